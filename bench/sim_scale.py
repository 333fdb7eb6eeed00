"""How fast the simulator is, and its results for routing policies on a real trace.

    python bench/sim_scale.py speed --data DATA --out FOLDER [--only NAME]    wall time, requests a second, memory
    python bench/sim_scale.py policies --data DATA --out FOLDER               policies side by side, with a plot

Every case runs in a separate process, for its own peak memory. For comparison: the figures of Vidur and
of Dynamo's replay on the same shapes, measured on the same kind of machine (2 cores).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
        own = Span((1 << 40) + number * half, half * 16)
        turn = Turn(Blocks(16, (common, own)), output)
        sessions.append(Session(f"r{number}", (turn,), history=History.GIVEN))
    return by_request(Workload("groups", "generated", tuple(sessions)), Poisson(rate), seed=0, overlap=1)


def trace(data: Path) -> Workload:
    """Half an hour of Mooncake's conversations."""
    return build(Recipe(kind="trace", data=data))


def agentic(data: Path) -> Workload:
    """Coding agents that all begin within ten minutes, with a tenth of their think times (some last for hours)."""
    made = trace_time(build(Recipe(kind="agentic", data=data)), speed=10.0)
    gap_s = 600 / len(made.sessions)
    sessions = [
        dataclasses.replace(s, turns=(dataclasses.replace(s.turns[0], due_s=number * gap_s), *s.turns[1:]))
        for number, s in enumerate(made.sessions)
    ]
    return dataclasses.replace(made, sessions=tuple(sessions))


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
    done = simulate(dataclasses.replace(case.setup, fast_forwards=fast_forwards), workload, name, workload.kind)
    cpu_s = time.process_time() - before_s
    found = figures(done.records)
    return {
        "case": name,
        "requests": found.requests,
        "failed": found.failed,
        "virtual_s": round(done.usage.simulated_s, 1),
        "wall_s": round(done.wall_s, 2),
        "cpu_s": round(cpu_s, 2),  # what it takes of a core that others use as well
        "requests_per_wall_s": round(done.requests_per_wall_s, 1),
        "tokens_per_wall_s": round(done.usage.tokens / done.wall_s),
        "events": done.events,
        "workload_mb": round(before_mb),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "ttft_mean_ms": round(1e3 * found.ttft_s.mean, 1) if found.ttft_s else None,
        "ttft_p99_ms": round(1e3 * found.ttft_s.p99, 1) if found.ttft_s else None,
        "tpot_mean_ms": round(1e3 * found.tpot_s.mean, 2) if found.tpot_s else None,
        "cached_share": round(found.cached_share, 4),
        "beside": case.beside,
    }


def speed(data: Path, out: Path, only: str, fast_forwards: bool) -> None:
    """Run all cases, each in its own process."""
    rows = []
    for name in CASES:
        if only and only not in name:
            continue
        command = [sys.executable, __file__, "case", "--data", str(data), "--only", name]
        told = subprocess.run(
            [*command, *([] if fast_forwards else ["--walk"])], stdout=subprocess.PIPE, check=True
        ).stdout
        rows.append(json.loads(told))
        print(json.dumps(rows[-1]), flush=True)
    file = out / "speed.json"
    known = json.loads(file.read_text()) if file.exists() else []
    names = {row["case"] for row in rows}
    file.write_text(json.dumps([*(row for row in known if row["case"] not in names), *rows], indent=1))


# -- policies


def policies(data: Path, out: Path, instances: str, requests: int | None, names: str, dram: str) -> None:
    """Run the same trace under each policy, and plot TTFT, hit rate and balance."""
    workload = build(Recipe(kind="trace", data=data, sessions=requests))
    found = {}
    for policy in names.split(","):
        done = simulate(cluster(instances, policy=policy, dram=dram), workload, policy, workload.kind)
        found[policy] = summary(done)
        print(policy, json.dumps(found[policy]), flush=True)
    (out / "policies.json").write_text(json.dumps(found, indent=1))
    sent = f"{workload.request_count} requests of Mooncake's conversations"
    draw(
        found,
        out / "policies.png",
        f"{sent}, {instances} instances of Llama-3-8B on H100, {dram} of DRAM each (simulated)",
    )


def summary(done: Simulated) -> dict[str, float]:
    """The figures that compare policies."""
    found = figures(done.records)
    assert found.ttft_s is not None and found.tpot_s is not None and found.jct_s is not None, "requests were answered"
    busy = [mean_of([look.busy[at] for look in done.looks]) for at in range(len(done.instances))]
    return {
        "ttft_mean_ms": 1e3 * found.ttft_s.mean,
        "ttft_p99_ms": 1e3 * found.ttft_s.p99,
        "tpot_mean_ms": 1e3 * found.tpot_s.mean,
        "jct_mean_ms": 1e3 * found.jct_s.mean,
        "hit_rate": found.cached_share,
        "imbalance": max(busy) / mean_of(busy),
        "wall_s": done.wall_s,
    }


def mean_of(values: list[float]) -> float:
    """Arithmetic mean; 0 for no values."""
    return sum(values) / len(values) if values else 0.0


def draw(found: dict[str, dict[str, float]], file: Path, title: str) -> None:
    """Four bars per policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("ttft_mean_ms", "TTFT, mean (ms)"), ("ttft_p99_ms", "TTFT, P99 (ms)"),
        ("hit_rate", "hit rate (share of prompt tokens)"), ("imbalance", "busiest instance / mean"),
    )  # fmt: skip
    figure, row = pyplot.subplots(1, 4, figsize=(15, 4), layout="constrained")
    names = list(found)
    for axes, (field, label) in zip(row, panels, strict=True):
        values = [found[name][field] for name in names]
        bars = axes.bar(names, values, color=[f"C{at}" for at in range(len(names))])
        axes.bar_label(bars, fmt="%.0f" if field.endswith("_ms") else "%.2f", fontsize=8)
        axes.set(title=label)
        axes.tick_params(axis="x", rotation=30)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "case", "policies"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--walk", action="store_true", help="run every step by itself: equal results, but slower")
    parser.add_argument("--instances", default="16", help="for policies")
    parser.add_argument("--policies", default="least-load,session,prompt-tree,cost", help="for policies")
    parser.add_argument("--dram", default="0", help="for policies: second tier of each instance")
    parser.add_argument("--requests", type=int, help="for policies: the beginning of the trace")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    match given.part:
        case "case":
            print(json.dumps(run_case(given.only, given.data, not given.walk)))
        case "speed":
            speed(given.data, given.out, given.only, not given.walk)
        case _:
            policies(given.data, given.out, given.instances, given.requests, given.policies, given.dram)


if __name__ == "__main__":
    main()
