"""Several stores as one, beside one as large: hit rate, balance, a death, a return, a join under load.

    python bench/store_joint.py --trace DATA/traces/mooncake_conversation_0-30min.jsonl.gz [--minutes 6]
        [--instances 8] [--kv-blocks 400] [--memory 2TiB] [--only one,four] [--json FILE]

Mooncake's conversations in virtual time: the production machines of router, instances and stores, with instances of
Llama-3-8B on an H100 each and blocks of 512 tokens, as the trace has them. HBM keeps ``--kv-blocks`` an instance, so
that most of what is reused lies in stores. ``--memory`` is that of all stores together.

=========  ==========================================================================================
one        one store with all the memory
four       four stores with a quarter each: hit tokens beside ``one``, bytes a store beside their mean
five       ``four``, and a fifth store joins in the middle: blocks moved beside its share, TTFT beside ``four``
copies     four stores with half of the memory each and two copies: as much as ``one``, twice
killed     ``copies``, and one is killed in the middle, with its memory, and does not come back: hits beside ``copies``
returned   ``copies``, and one is killed in the middle, and comes back empty 30 s later: what it is given
=========  ==========================================================================================

TTFT is that of requests in the three minutes behind the middle. Exit status 1: a figure is beyond its bound.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import Commas, need, options, save
from harness.tables import show

from memserve.base.config import ClusterConfig
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS, NS_PER_S, human_bytes, parse_bytes
from memserve_lab.bench.catalogue import Recipe, build
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Fault, Setup, StoreSetup
from memserve_lab.sim.replay.world import ReplayWorld, usage
from memserve_lab.workloads.records import Workload

CASES = "one", "four", "five", "copies", "killed", "returned"
BLOCK_TOKENS = 512
WINDOW_S = 180.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one run shows."""

    case: str
    hit_share: float
    """Of all prompt tokens: not computed."""
    store_share: float
    """Of all prompt tokens: out of stores."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    bytes_by_store: tuple[int, ...]
    asked_by_store: tuple[int, ...]
    lent_by_store: tuple[int, ...]
    moved_blocks: int
    moved_share: float | None
    """Beside the share of the store that joined: 1.0 is all of it, and nothing else."""
    failed: int
    wall_s: float

    @property
    def imbalance(self) -> float:
        """How far the store with most, or with least, is from the mean."""
        mean = sum(self.bytes_by_store) / len(self.bytes_by_store)
        return max(abs(nbytes / mean - 1) for nbytes in self.bytes_by_store) if mean else 0.0


def workload_of(args: Namespace) -> Workload:
    """The first minutes of the trace."""
    whole = build(Recipe(kind="file", file=args.trace))
    sessions = [s for s in whole.sessions if (s.turns[0].due_s or 0.0) < args.minutes * 60]
    return dataclasses.replace(whole, sessions=tuple(sessions))


def setup_of(case: str, args: Namespace) -> Setup:
    """The cluster of a case."""
    memory_bytes, middle_s = parse_bytes(args.memory), args.minutes * 30.0
    stores = {
        "one": StoreSetup(memory_bytes),
        "four": StoreSetup(memory_bytes // 4, count=4),
        "five": StoreSetup(memory_bytes // 4, count=4),
    }.get(case, StoreSetup(memory_bytes // 2, count=4))
    faults = {
        "five": (Fault("join", "store4", middle_s, 0.0),),
        "killed": (Fault("kill", "store1", middle_s, 1e6),),
        "returned": (Fault("kill", "store1", middle_s, 30.0),),
    }
    hardware = machine("llama-3-8b", "h100", block_tokens=BLOCK_TOKENS)
    copies = 2 if case in ("copies", "killed", "returned") else 1
    return Setup(
        {Role.COLOCATED: args.instances},
        dataclasses.replace(hardware, hbm_blocks=args.kv_blocks),
        cluster=ClusterConfig(store_copies=copies),
        faults=faults.get(case, ()),
        stores=stores,
    )


def run_case(case: str, workload: Workload, args: Namespace) -> Run:
    """Play the workload."""
    world, began_s = ReplayWorld(setup_of(case, args), workload), time.monotonic()
    middle_ns, blocks_before = int(args.minutes * 30 * NS_PER_S), [0]

    def count_blocks() -> None:
        blocks_before[0] = sum(len(node.machine.values.log) for node in world.stores)

    world.clock.call_at(middle_ns, count_blocks)
    world.run_workload()
    for node in world.stores:
        if node.alive:
            node.machine.check_invariants()
    served, used = world.clients.served, usage(world)
    prompt_tokens = sum(answer.prompt_tokens for answer in served)
    first_ns, end_ns = world.start_ns + middle_ns, world.start_ns + middle_ns + int(WINDOW_S * NS_PER_S)
    ttft_ms = [
        (answer.first_ns - answer.scheduled_ns) / NS_PER_MS
        for answer in served
        if answer.first_ns is not None and first_ns <= world.start_ns + answer.scheduled_ns < end_ns
    ]
    machines = [node.machine for node in world.stores if node.alive]
    moved = sum(store.counters.kv_moved for store in machines)
    return Run(
        case,
        sum(answer.cached_tokens for answer in served) / prompt_tokens,
        (used.hits.store + used.hits.ssd) / prompt_tokens,
        float(np.percentile(ttft_ms, 50)),
        float(np.percentile(ttft_ms, 99)),
        tuple(store.values.tier.bytes_used for store in machines),
        tuple(store.counters.kv_asked for store in machines),
        tuple(store.counters.kv_lent for store in machines),
        moved,
        moved / (blocks_before[0] / 5) if case == "five" and blocks_before[0] else None,
        sum(not answer.answered for answer in served),
        time.monotonic() - began_s,
    )


def bounds(runs: dict[str, Run]) -> list[tuple[str, float, float]]:
    """What is compared, as far as it was run: a name, the figure, the most that it may be."""
    rows = []
    if {"one", "four"} <= runs.keys():
        rows.append(("hit rate lost by four stores", 1 - runs["four"].hit_share / runs["one"].hit_share, 0.02))
        rows.append(("bytes of a store beside the mean", runs["four"].imbalance, 0.15))
    if {"four", "five"} <= runs.keys():
        rows.append(("blocks moved, of the fifth store's share", runs["five"].moved_share or 0.0, 1.2))
        rows.append(("TTFT P99 while it joins", runs["five"].ttft_p99_ms / runs["four"].ttft_p99_ms, 1.1))
    if {"copies", "killed"} <= runs.keys():
        rows.append(("hit rate lost by a death", 1 - runs["killed"].hit_share / runs["copies"].hit_share, 0.01))
    if {"copies", "returned"} <= runs.keys():
        rows.append(("hit rate lost by a return", 1 - runs["returned"].hit_share / runs["copies"].hit_share, 0.02))
    return rows


def main() -> int:
    args = options(
        __doc__, required="trace", trace=Path, minutes=6.0, instances=8, kv_blocks=400, memory="2TiB",
        only=Commas(*CASES),
    )  # fmt: skip
    need(args.trace)
    workload = workload_of(args)
    print(f"{len(workload.sessions)} requests of {args.minutes:.0f} minutes, {args.memory} of memory in all stores\n")
    runs: dict[str, Run] = {}
    for case in args.only:
        runs[case] = run_case(case, workload, args)
        print(f"{case}: {runs[case].wall_s:.0f} s", file=sys.stderr)
    columns = {
        "": "{case}", "hit tokens": "{hit_share:.2%}", "of stores": "{store_share:.2%}",
        "TTFT P50, ms": "{ttft_p50_ms:.0f}", "P99, ms": "{ttft_p99_ms:.0f}", "failed": "{failed}",
        "bytes a store": "{stored}", "blocks lent a store": "{lent}", "blocks moved": "{moved_blocks:,}",
    }  # fmt: skip
    show([_row(run) for run in runs.values()], columns)
    print()
    rows = bounds(runs)
    show(
        [{"name": name, "figure": figure, "most": most} for name, figure, most in rows],
        {"": "{name}", "figure": "{figure:.3f}", "at most": "{most:g}"},
    )
    save(args, {case: dataclasses.asdict(run) for case, run in runs.items()})
    return int(any(figure > most for _, figure, most in rows))


def _row(run: Run) -> dict[str, Any]:
    stored = ", ".join(human_bytes(nbytes) for nbytes in run.bytes_by_store)
    return {**dataclasses.asdict(run), "stored": stored, "lent": ", ".join(f"{n:,}" for n in run.lent_by_store)}


if __name__ == "__main__":
    sys.exit(main())
