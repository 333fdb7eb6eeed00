"""Figure 10 of MemServe with the real thing: what finding a cached prefix costs by the length of the prompt, in
memserve's radix index and in vLLM's ``KVCacheManager``. No model; in turns, round by round.

Each index holds ``--prompts`` prompts of each length, a quarter of which is common to those of its length. *cached*: a
prompt that is held, and a token more; *fresh*: one that is not.

* memserve: ``acquire``, which finds the prefix by its tokens and has it pinned and referenced (``match`` alone beside
  it). ``identities``: the keyed hashes of all blocks, by which other processes know them; no look-up needs them.
* vLLM: the hashes of the prompt's blocks, which are computed when a request is made (with its default, SHA-256), and
  ``get_computed_blocks``, which finds them in a table, without a reference yet.

Figures are CPU time of the thread (``--clock``: by the clock), medians of a round's prompts; medians of rounds, and the
median of the rounds' ratios: hashes and look-up of vLLM over ``acquire``. Half a microsecond of each figure is the
timer's own.

    python bench/index_rivals.py --vllm PYTHON [--json] [--quick] [--rounds 7] [--prompts 5] [--clock]
        [--block-tokens 32] [--lengths 512,2048,8192,32768,65536]
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from harness.flags import Commas, options, save
from harness.rounds import Timer, medians, ratio, turns
from harness.scheduling import IndexDriver, Tokens
from harness.tables import Table
from scheduler_rivals import CLOCK, VllmCore, vllm_core

from memserve.base.config import PoolConfig
from memserve.kv.pool import BlockPool

NAMES = ("memserve", "vLLM")
COLUMNS = {
    "prompt": "{length:,}", "": "{state}", "match, us": "{memserve[match_us]:.1f}",
    "acquire, us": "{memserve[acquire_us]:.1f}", "identities, us": "{memserve[identities_us]:.1f}",
    "vLLM: hashes, us": "{vllm[hash_us]:,.0f}", "look-up, us": "{vllm[lookup_us]:,.0f}",
    "both, us": "{vllm[total_us]:,.0f}", "times memserve's": "{ratio:.0f}",
}  # fmt: skip


class RadixDriver(IndexDriver):
    """The radix index of memserve's pool."""

    def __init__(self, lengths: list[int], prompts: int, block_tokens: int) -> None:
        blocks = prompts * sum(lengths) // block_tokens + 256
        self._pool = BlockPool(PoolConfig(hbm_blocks=blocks), block_tokens, "bench")
        super().__init__(lengths, prompts)

    def plant_tokens(self, tokens: Tokens) -> None:
        pool = self._pool
        lease = pool.acquire("", tokens)
        new_blocks = pool.allocate(len(tokens) // pool.block_tokens - len(lease.blocks))
        assert new_blocks is not None, "the pool has room for all prompts"
        blocks = lease.blocks + new_blocks
        pool.publish(lease, "", tokens, blocks, written_by=0)
        pool.unpin(lease)
        pool.release(blocks)

    def look_up(self, tokens: Tokens, timers: Callable[[str], Timer]) -> int:
        timers("identities_us")(self._pool.identities, "", tokens)
        lease = timers("acquire_us")(self._pool.acquire, "", tokens)
        self._pool.unpin(lease)
        self._pool.release(lease.blocks)
        return int(timers("match_us")(self._pool.match, "", tokens))


def measure(args: Namespace, core: VllmCore) -> Iterator[dict[str, Any]]:
    """A record for each length, cached and fresh."""
    radix = RadixDriver(args.lengths, args.prompts, args.block_tokens)
    core.call("build_index", lengths=args.lengths, prompts=args.prompts, block_tokens=args.block_tokens)
    for length, is_cached in product(args.lengths, (True, False)):
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
        for turn, name in turns(args.rounds, NAMES, warm=1):
            if name == "memserve":
                figures = radix.measure_lookups(length, is_cached=is_cached, turn=turn, by_clock=args.clock)
                figures["total_us"] = figures["acquire_us"]
            else:
                order = {"length": length, "is_cached": is_cached, "turn": turn, "by_clock": args.clock}
                figures = core.call("measure_lookups", **order)
                figures["total_us"] = figures["hash_us"] + figures["lookup_us"]
            if turn >= 0:
                rounds[name].append(figures)
        totals = [[figures["total_us"] for figures in rounds[name]] for name in ("vLLM", "memserve")]
        state = "cached" if is_cached else "fresh"
        point: dict[str, Any] = {"length": length, "state": state, "ratio": round(ratio(*totals), 1)}
        for name in NAMES:
            point[name.lower()] = {key: round(value, 2) for key, value in medians(rounds[name]).items()}
        yield point


def main() -> None:
    args = options(
        __doc__, required="vllm", vllm=str, rounds=7, prompts=5, block_tokens=32,
        lengths=Commas(512, 2048, 8192, 32_768, 65_536), clock=CLOCK,
        quick={"rounds": 2, "prompts": 2, "lengths": [512, 2048]},
    )  # fmt: skip
    points = []
    with vllm_core(args.vllm) as core:
        table = Table(COLUMNS)
        for point in measure(args, core):
            table.show(point)
            points.append(point)
    record = {"command": "bench/index_rivals.py --vllm PYTHON", "vllm": core.version, "rounds": args.rounds}
    record |= {"load_average": os.getloadavg(), "prompts": args.prompts}
    save(args, {**record, "block_tokens": args.block_tokens, "points": points})


if __name__ == "__main__":
    main()
