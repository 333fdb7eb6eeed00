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

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

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
    made = build(Recipe(kind="trace", data=data, speed=case.speed, sessions=case.requests))
    if not case.spread:
        return made
    random = Random("spread")

    def later(turn: Turn) -> Turn:
        return dataclasses.replace(turn, due_s=(turn.due_s or 0.0) + random.random() * STAMP_S / case.speed)

    sessions = tuple(dataclasses.replace(one, turns=tuple(map(later, one.turns))) for one in made.sessions)
    return dataclasses.replace(made, sessions=sessions)


def run(options: Namespace, routers: int, seed: int) -> dict[str, Any]:
    """Run one case in this process."""
    name = options.case
    case = CASES[name]
    if options.requests:
        case = case._replace(requests=options.requests)
    workload = load(case, options.data)
    made = cluster(case.instances, policy=options.policy, beat_ms=options.beat_ms or case.beat_ms)
    setup = dataclasses.replace(made, routers=routers, seed=seed)
    done = simulate(setup, workload, name, workload.kind)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answered = sum(record.ok for record in done.records)
    return {**summary(done), "answered": answered, "requests": len(done.records), "peak_mb": peak_mb}


def run_apart(options: Namespace, name: str, routers: int, seed: int) -> dict[str, Any]:
    """Run one case in another process."""
    command = [sys.executable, __file__, "--data", str(options.data), "--policy", options.policy, "--case", name]
    for flag in ("beat_ms", "requests"):
        if getattr(options, flag):
            command += [f"--{flag.replace('_', '-')}", str(getattr(options, flag))]
    command += ["--routers", str(routers), "--seeds", str(seed)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found: dict[str, Any] = json.loads(told)
    print(json.dumps({"case": name, "routers": routers, "seed": seed, **found}), file=sys.stderr, flush=True)
    return found


def row(name: str, routers: int, runs: list[dict[str, Any]], first: dict[str, Any]) -> str:
    """One line of the table; ``first``: the run with one router."""

    def mean(field: str) -> float:
        return sum(found[field] for found in runs) / len(runs)

    p99_s = [found["ttft_p99_ms"] / 1e3 for found in runs]
    spread = f" ({min(p99_s):.2f} to {max(p99_s):.2f})" if len(runs) > 1 else ""
    cells = [
        name, str(routers), f"{mean('hit_rate'):.3f}", f"{100 * (mean('hit_rate') - first['hit_rate']):+.1f}",
        f"{mean('ttft_mean_ms'):.0f} ms", f"{mean('ttft_p99_ms') / 1e3:.2f} s{spread}",
        f"{100 * (mean('ttft_p99_ms') / first['ttft_p99_ms'] - 1):+.1f} %", f"{mean('imbalance'):.2f}",
        f"{mean('wall_s'):.0f} s", f"{max(found['peak_mb'] for found in runs):.0f} MB",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--routers", default="1,2,4")
    parser.add_argument("--seeds", type=int, default=3, help="of the balancer, where there is one")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--beat-ms", type=int, help="milliseconds between heartbeats, for all cases")
    parser.add_argument("--requests", type=int, help="only the beginning of the trace, in all cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        found = run(options, int(options.routers), options.seeds)
        print(json.dumps(found))
        return
    print(
        "| case | routers | hit rate | points | TTFT mean | TTFT P99 | to one router | busiest / mean | wall | memory |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in [name for name in CASES if options.only in name]:
        first = run_apart(options, name, 1, 0)
        for routers in map(int, options.routers.split(",")):
            seeds = range(options.seeds) if routers > 1 else ()
            runs = [run_apart(options, name, routers, seed) for seed in seeds] or [first]
            print(row(name, routers, runs, first), flush=True)


if __name__ == "__main__":
    main()
