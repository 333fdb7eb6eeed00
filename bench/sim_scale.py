"""How fast the simulator is, and its results for routing policies on a real trace.

    python bench/sim_scale.py speed --data DATA --out FOLDER [--only NAME]    wall time, requests a second, memory
    python bench/sim_scale.py policies --data DATA --out FOLDER               policies side by side, with a plot

Every case runs in a separate process, for its own peak memory. For comparison: the figures of Vidur and
of Dynamo's replay on the same shapes, measured on the same kind of machine (2 cores).
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from harness.flags import Commas, options, parts_of
from harness.rounds import mean
from harness.tables import Table

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.types import Caching
from memserve.base.units import NS_PER_MS, parse_bytes
from memserve_lab.bench.catalogue import Recipe, build
from memserve_lab.bench.metrics import figures
from memserve_lab.cli.sim_results import Simulated, simulate
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup, Surroundings, parse_instances
from memserve_lab.workloads.arrivals import Poisson, by_request, trace_time
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload
from memserve_lab.workloads.sessions import uniform_workload

CHUNKED = SchedulerConfig(max_running=128, max_step_tokens=512, prefill_chunk_tokens=512)
"""Sarathi's chunk, as in Vidur."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One run, and the published speed of others on a like run."""

    make: Callable[[Path], Workload]
    setup: Setup
    beside: str = ""


def azure(data: Path, requests: int, rate: float) -> Workload:
    """Lengths of Azure's chat service (Splitwise's conversation trace), Poisson arrivals."""
    return by_request(build(Recipe(kind="azure-conv", data=data, sessions=requests)), Poisson(rate), seed=0, overlap=1)


def shared_groups(requests: int, prompt: int, output: int, rate: float, groups: int) -> Workload:
    """Half of each prompt shared in groups."""
    half = prompt // 2 // 16
    sessions = []
    for number in range(requests):
        common = Span(1 + number % groups * half, half * 16)
        own_span = Span((1 << 40) + number * half, half * 16)
        turn = Turn(Blocks(16, (common, own_span)), output)
        sessions.append(Session(f"r{number}", (turn,), history=History.GIVEN))
    return by_request(Workload("groups", "generated", tuple(sessions)), Poisson(rate), seed=0, overlap=1)


def trace(data: Path) -> Workload:
    """Half an hour of Mooncake's conversations."""
    return build(Recipe(kind="trace", data=data))


def agentic(data: Path) -> Workload:
    """Coding agents that all begin within ten minutes, with a tenth of their think times (some last for hours)."""
    workload = trace_time(build(Recipe(kind="agentic", data=data)), speed=10.0)
    gap_s = 600 / len(workload.sessions)
    sessions = [
        dataclasses.replace(s, turns=(dataclasses.replace(s.turns[0], due_s=number * gap_s), *s.turns[1:]))
        for number, s in enumerate(workload.sessions)
    ]
    return dataclasses.replace(workload, sessions=tuple(sessions))


def cluster(
    instances: str,
    model: str = "llama-3-8b",
    policy: str = "cost",
    device: str = "h100",
    beat_ms: int = 500,
    scheduler: SchedulerConfig = GPU_SCHEDULER,
    caching: Caching = Caching.PD_CACHING_3,
    dram: str = "0",
) -> Setup:
    """A setup from few arguments."""
    kind, _, count = device.partition("x")
    return Setup(
        parse_instances(instances), machine(model, kind, int(count or 1), parse_bytes(dram)),
        ClusterConfig(caching, policy), scheduler, Surroundings(heartbeat_ns=beat_ms * NS_PER_MS),
    )  # fmt: skip


VIDUR = cluster("1", "llama-2-7b", device="a100", scheduler=CHUNKED, caching=Caching.OFF)
CASES: dict[str, Case] = {
    "vidur, 1 replica": Case(lambda data: azure(data, 1000, 6.45), VIDUR, "Vidur 688/s"),
    "vidur, 8 replicas": Case(
        lambda data: azure(data, 1000, 50.0), dataclasses.replace(VIDUR, instances=parse_instances("8")), "Vidur 554/s"
    ),
    "dynamo, 1 worker": Case(
        lambda data: by_request(
            uniform_workload(1000, prompt_tokens=1024, shared_tokens=0, output_tokens=128), Poisson(6.45), seed=0
        ),
        cluster("1"), "Dynamo 21,058/s",
    ),
    "dynamo, 8 workers, shared": Case(
        lambda data: shared_groups(1000, 1024, 128, 50.0, 100), cluster("8"), "Dynamo 13,944/s with its KV router"
    ),
    "mooncake, 100 instances": Case(trace, cluster("100")),
    "mooncake, 100 instances, 1P3D": Case(trace, cluster("prefill=25,decode=75")),
    "mooncake, 1000 instances": Case(trace, cluster("1000", beat_ms=2000)),
    "agentic, 64 instances": Case(agentic, cluster("64", "qwen3-30b-a3b", device="h200", beat_ms=2000)),
}  # fmt: skip


def run_case(name: str, data: Path, fast_forwards: bool) -> dict[str, object]:
    """Run one case in this process."""
    case = CASES[name]
    workload = case.make(data)
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before_s = time.process_time()
    simulated = simulate(dataclasses.replace(case.setup, fast_forwards=fast_forwards), workload, name, workload.kind)
    cpu_s = time.process_time() - before_s
    results = figures(simulated.records)
    return {
        "case": name,
        "requests": results.requests,
        "failed": results.failed,
        "virtual_s": round(simulated.usage.simulated_s, 1),
        "wall_s": round(simulated.wall_s, 2),
        "cpu_s": round(cpu_s, 2),  # what it takes of a core that others use as well
        "requests_per_wall_s": round(simulated.requests_per_wall_s, 1),
        "tokens_per_wall_s": round(simulated.usage.tokens / simulated.wall_s),
        "events": simulated.events,
        "workload_mb": round(before_mb),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "ttft_mean_ms": round(1e3 * results.ttft_s.mean, 1) if results.ttft_s else None,
        "ttft_p99_ms": round(1e3 * results.ttft_s.p99, 1) if results.ttft_s else None,
        "tpot_mean_ms": round(1e3 * results.tpot_s.mean, 2) if results.tpot_s else None,
        "cached_share": round(results.cached_share, 4),
        "beside": case.beside,
    }


def speed(args: Namespace) -> None:
    """Run all cases, each in its own process."""
    file, table = args.out / "speed.json", Table(COLUMNS)
    rows = {row["case"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    for name in CASES:
        if args.only in name:
            command = [sys.executable, __file__, "case", "--data", str(args.data), "--only", name]
            command += ["--walk"] if args.walk else []
            rows[name] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            table.show(rows[name])
    file.write_text(json.dumps(list(rows.values()), indent=1))


# -- policies


def policies(args: Namespace) -> None:
    """Run the same trace under each policy, and plot TTFT, hit rate and balance."""
    workload = build(Recipe(kind="trace", data=args.data, sessions=args.requests))
    results, table = {}, Table(POLICY_COLUMNS)
    for policy in args.policies:
        simulated = simulate(cluster(args.instances, policy=policy, dram=args.dram), workload, policy, workload.kind)
        results[policy] = summary(simulated)
        table.show({"policy": policy, **results[policy]})
    (args.out / "policies.json").write_text(json.dumps(results, indent=1))
    title = f"{workload.request_count} requests of Mooncake's conversations, {args.instances} instances of Llama-3-8B "
    draw(results, args.out / "policies.png", f"{title}on H100, {args.dram} of DRAM each (simulated)")


def summary(simulated: Simulated) -> dict[str, float]:
    """The figures that compare policies."""
    results = figures(simulated.records)
    assert results.ttft_s is not None and results.tpot_s is not None and results.jct_s is not None, (
        "requests were answered"
    )
    busy = [mean_of([look.busy[place] for look in simulated.looks]) for place in range(len(simulated.instances))]
    return {
        "ttft_mean_ms": 1e3 * results.ttft_s.mean,
        "ttft_p99_ms": 1e3 * results.ttft_s.p99,
        "tpot_mean_ms": 1e3 * results.tpot_s.mean,
        "jct_mean_ms": 1e3 * results.jct_s.mean,
        "hit_rate": results.cached_share,
        "imbalance": max(busy) / mean_of(busy),
        "wall_s": simulated.wall_s,
    }


def mean_of(values: list[float]) -> float:
    """Arithmetic mean; 0 for no values."""
    return mean(values) if values else 0.0


def draw(results: dict[str, dict[str, float]], file: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("ttft_mean_ms", "TTFT, mean (ms)"), ("ttft_p99_ms", "TTFT, P99 (ms)"),
        ("hit_rate", "hit rate (share of prompt tokens)"), ("imbalance", "busiest instance / mean"),
    )  # fmt: skip
    figure, row = pyplot.subplots(1, 4, figsize=(15, 4), layout="constrained")
    names = list(results)
    for axes, (field, label) in zip(row, panels, strict=True):
        values = [results[name][field] for name in names]
        bars = axes.bar(names, values, color=[f"C{place}" for place in range(len(names))])
        axes.bar_label(bars, fmt="%.0f" if field.endswith("_ms") else "%.2f", fontsize=8)
        axes.set(title=label)
        axes.tick_params(axis="x", rotation=30)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)


COLUMNS = {
    "case": "{case}", "requests": "{requests}", "failed": "{failed}", "virtual": "{virtual_s} s", "wall": "{wall_s} s",
    "CPU": "{cpu_s} s", "requests/s": "{requests_per_wall_s}", "tokens/s": "{tokens_per_wall_s:,}",
    "peak": "{peak_mb} MB", "TTFT mean": "{ttft_mean_ms} ms", "P99": "{ttft_p99_ms} ms", "TPOT": "{tpot_mean_ms} ms",
    "cached": "{cached_share:.1%}", "beside": "{beside}",
}  # fmt: skip
POLICY_COLUMNS = {
    "policy": "{policy}", "TTFT mean": "{ttft_mean_ms:.0f} ms", "P99": "{ttft_p99_ms:.0f} ms",
    "TPOT": "{tpot_mean_ms:.1f} ms", "JCT": "{jct_mean_ms:.0f} ms", "hit rate": "{hit_rate:.3f}",
    "busiest / mean": "{imbalance:.2f}", "wall": "{wall_s:.0f} s",
}  # fmt: skip
PARTS = ("speed", "case", "policies")


def main() -> None:
    args = options(
        __doc__, rest="part", required="data", data=Path, out=Path(), only=("", "cases whose name contains this"),
        walk=(False, "run every step by itself: equal results, but slower"), instances=("16", "for policies"),
        policies=(Commas("least-load", "session", "prompt-tree", "cost"), "for policies"),
        dram=("0", "for policies: second tier of each instance"),
        requests=(int, "for policies: the beginning of the trace"),
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    match list(parts_of(args.part, dict.fromkeys(PARTS))):
        case ["case"]:
            print(json.dumps(run_case(args.only, args.data, not args.walk)))
        case ["speed"]:
            speed(args)
        case ["policies"]:
            policies(args)
        case _:
            raise SystemExit(f"one of {', '.join(PARTS)}")


if __name__ == "__main__":
    main()
