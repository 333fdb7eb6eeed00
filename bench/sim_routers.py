"""What several routers cost: one, two and four in the simulator, on half an hour of Mooncake's conversations.

    python bench/sim_routers.py --data DATA [--only 1000] [--routers 1,2,4] [--seeds 3]      prints a Markdown table

Every request comes to a router by chance, as behind a TCP balancer. A router knows its own dispatches at once, those of
the others from what instances tell. Each case is run with all numbers of routers; of several seeds of the balancer the
table has the mean, and the range of P99.

The trace's rate suits some 16 instances of Llama-3-8B on H100: ``x1`` is the trace as recorded, where most instances
are idle; ``x6`` on 100 instances and ``x60`` on 1,000 play it so many times as fast. Its times are multiples of 3 s, so
that 10 requests on average come in the same nanosecond, where no router can know of the others' choices; *spread*: they
come at random within those 3 s.
Every run is a process of its own, for its peak memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from harness.flags import Commas, options, save
from harness.processes import resident_bytes
from harness.rounds import mean
from harness.tables import Table
from sim_scale import cluster, summary

from memserve_lab.bench.catalogue import Recipe, build
from memserve_lab.cli.sim_results import simulate
from memserve_lab.workloads.records import Turn, Workload

STAMP_S = 3.0
"""Distance of the trace's times."""


class Case(NamedTuple):
    """A cluster and its load."""

    instances: str
    speed: float = 1.0
    spread: bool = False
    beat_ms: int = 500
    requests: int | None = None
    """The beginning of the trace. None: all of its half hour."""


CASES = {
    "100 instances x1": Case("100"),
    "100 instances x1, spread": Case("100", spread=True),
    "1000 instances x1, 5 min, spread": Case("1000", spread=True, requests=950, beat_ms=2000),
    "100 instances x6": Case("100", 6.0),
    "100 instances x6, spread": Case("100", 6.0, spread=True),
    "1000 instances x60": Case("1000", 60.0),
    "1000 instances x60, spread": Case("1000", 60.0, spread=True),
}
"""With 1,000 mostly idle instances most of the time goes into heartbeats: that case has fewer, as in
``sim_scale.py``."""


def load(case: Case, data: Path) -> Workload:
    """The workload of a case."""
    workload_made = build(Recipe(kind="trace", data=data, speed=case.speed, sessions=case.requests))
    if not case.spread:
        return workload_made
    random = Random("spread")

    def later(turn: Turn) -> Turn:
        return dataclasses.replace(turn, due_s=(turn.due_s or 0.0) + random.random() * STAMP_S / case.speed)

    sessions = tuple(dataclasses.replace(item, turns=tuple(map(later, item.turns))) for item in workload_made.sessions)
    return dataclasses.replace(workload_made, sessions=sessions)


def run(args: Namespace, routers: int, seed: int) -> dict[str, Any]:
    """Run one case in this process."""
    case = CASES[args.case]
    if args.requests:
        case = case._replace(requests=args.requests)
    workload = load(case, args.data)
    setup = cluster(case.instances, policy=args.policy, beat_ms=args.beat_ms or case.beat_ms)
    simulated = simulate(dataclasses.replace(setup, routers=routers, seed=seed), workload, args.case, workload.kind)
    peak_mb = resident_bytes(os.getpid(), "VmHWM") / (1 << 20)
    answered = sum(record.ok for record in simulated.records)
    return {**summary(simulated), "answered": answered, "requests": len(simulated.records), "peak_mb": peak_mb}


def run_apart(args: Namespace, name: str, routers: int, seed: int) -> dict[str, Any]:
    """Run one case in another process."""
    command = [sys.executable, __file__, "--data", str(args.data), "--policy", args.policy, "--case", name]
    for flag in ("beat_ms", "requests"):
        if getattr(args, flag):
            command += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    command += ["--routers", str(routers), "--seeds", str(seed)]
    results: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    print(json.dumps({"case": name, "routers": routers, "seed": seed, **results}), file=sys.stderr, flush=True)
    return results


COLUMNS = {
    "case": "{case}", "routers": "{routers}", "hit rate": "{hit_rate:.3f}", "points": "{points:+.1f}",
    "TTFT mean": "{ttft_mean_ms:.0f} ms", "TTFT P99": "{p99_s:.2f} s{spread}", "to one router": "{added:+.1f} %",
    "busiest / mean": "{imbalance:.2f}", "wall": "{wall_s:.0f} s", "memory": "{peak_mb:.0f} MB",
}  # fmt: skip


def row_of(name: str, routers: int, runs: list[dict[str, Any]], first: dict[str, Any]) -> dict[str, Any]:
    """One row of the table; ``first``: the run with one router."""
    row = {field: mean(results[field] for results in runs) for field in first}
    p99_s = [results["ttft_p99_ms"] / 1e3 for results in runs]
    return row | {
        "case": name, "routers": routers, "points": 100 * (row["hit_rate"] - first["hit_rate"]),
        "p99_s": mean(p99_s), "spread": f" ({min(p99_s):.2f} to {max(p99_s):.2f})" if len(runs) > 1 else "",
        "added": 100 * (row["ttft_p99_ms"] / first["ttft_p99_ms"] - 1),
        "peak_mb": max(results["peak_mb"] for results in runs),
    }  # fmt: skip


def main() -> None:
    args = options(
        __doc__, required="data", hidden="case", data=Path, only=("", "cases whose name contains this"),
        routers=Commas(1, 2, 4), seeds=(3, "of the balancer, where there is one"), policy="cost",
        beat_ms=(int, "milliseconds between heartbeats, for all cases"),
        requests=(int, "only the beginning of the trace, in all cases"), case=str,
    )  # fmt: skip
    if args.case:
        print(json.dumps(run(args, args.routers[0], args.seeds)))
        return
    rows, table = [], Table(COLUMNS)
    for name in [name for name in CASES if args.only in name]:
        first = run_apart(args, name, 1, 0)
        for routers in args.routers:
            seeds = range(args.seeds) if routers > 1 else ()
            runs = [run_apart(args, name, routers, seed) for seed in seeds] or [first]
            rows.append(row_of(name, routers, runs, first))
            table.show(rows[-1])
    save(args, rows)


if __name__ == "__main__":
    main()
