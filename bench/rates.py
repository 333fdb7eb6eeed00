"""What decisions lose where rates are not known: KV by layer, costs, objectives, transfers; in virtual time.

    python bench/rates.py [--tables layers,costs,objectives,transfer] [--seeds 3]

``layers``: 60 prompts of 6,144 tokens with answers of 512, Llama-3-8B, 1,200 blocks of KV, by request (``off``) and by
layer (``auto``), with a profile and in a first start, which assumes costs and learns them. ``costs``: the trace that is
built in, 800 requests on 8 colocated H100, by cost: with profiles, in a first start, without a cache. ``objectives``:
the load of ``layers`` on the L40S with objectives of 3 s and 200 ms: which share of requests misses one. ``transfer``:
MemServe's figure 12, 200 prompts of 1,024 tokens with answers of 32 on 1P1D at five request rates: each transfer mode,
and ``auto`` with a profile and in a first start; behind each JCT its ratio to that of the best mode.

Means over seeds of the arrivals, or of the trace (``costs``: four times as quick it is overrun, and a first start waits
0.86 to 1.16 times as long with single seeds: take eight). Behind a time by layer, and behind a cost: its ratio to the
first line of its group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import NamedTuple

from harness.clients import Json
from harness.flags import Commas, options, parts_of, save
from harness.rounds import mean as fmean
from harness.tables import Table

from memserve.base.config import AdmissionConfig, ClusterConfig, SchedulerConfig
from memserve.base.types import Caching, Role, TransferPolicy
from memserve.base.units import GIB, NS_PER_S
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.experiments.layerkv import TPOT_S, TTFT_S, requests
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.shape import Caps

MODEL, KV_BLOCKS, DRAM_BYTES = "llama-3-8b", 1200, 256 * GIB
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, REQUESTS_PER_S = 60, 6144, 512, 0.9
TRACE_REQUESTS, INSTANCES, SPEEDS = 800, 8, (1, 2, 4)
UNIFORM = Caps(1024, 32, 1)
WAITS = AdmissionConfig(waiting_max=1_000_000, wait_ns=10_000 * NS_PER_S)
HANDED_OVER = {"llama-3-8b": ("h100", (2, 8, 16, 24, 30)), "llama-2-13b": ("l40s", (1, 2, 4, 6, 7)),
               "smollm2-135m": ("cpu", (0.25, 0.5, 0.75, 1.0, 1.2))}  # fmt: skip
"""Model -> device, and requests a second: from an idle prefill instance to a full one."""
OBJECTIVES = {"scheduling": "slo", "slo_ttft_ns": round(TTFT_S * NS_PER_S), "slo_tpot_ns": round(TPOT_S * NS_PER_S)}


class Outcome(NamedTuple):
    """Of one run: means over its requests, and shares of those that miss an objective."""

    ttft_s: float
    tpot_s: float
    jct_s: float
    cached_tokens: float
    missed: float
    ttft_missed: float
    tpot_missed: float


def outcome(setup: Setup, workload: Workload) -> Outcome:
    world = ReplayWorld(setup, workload)
    world.run_workload()
    served = [item for item in world.clients.served if item.answered]
    if len(served) < len(world.clients.served):
        raise SystemExit(f"{len(world.clients.served) - len(served)} requests were not answered")
    ttfts = [((item.first_ns or 0) - item.scheduled_ns) / NS_PER_S for item in served]
    jcts = [(item.token_ns[-1] - item.scheduled_ns) / NS_PER_S for item in served]
    tpots = [
        (item.token_ns[-1] - item.token_ns[0]) / NS_PER_S / max(1, len(item.token_ns) - 1) for item in served
    ]  # fmt: skip
    late, slow = [ttft > TTFT_S for ttft in ttfts], [tpot > TPOT_S for tpot in tpots]
    missed = [either or is_slow for either, is_slow in zip(late, slow, strict=True)]
    cached = sum(item.cached_tokens or 0 for item in served)
    return Outcome(fmean(ttfts), fmean(tpots), fmean(jcts), cached, fmean(missed), fmean(late), fmean(slow))


def mean(outcomes: list[Outcome]) -> Outcome:
    return Outcome(*(fmean(values) for values in zip(*outcomes, strict=True)))


def long_prompts(device: str, seeds: int, has_profiles: bool = True, **scheduler: object) -> Outcome:
    """The load of the tables ``layers`` and ``objectives``."""
    hardware = dataclasses.replace(machine(MODEL, device, 1, DRAM_BYTES), hbm_blocks=KV_BLOCKS)
    config: SchedulerConfig = dataclasses.replace(GPU_SCHEDULER, max_waiting=1_000_000, **scheduler)
    cluster = ClusterConfig(caching=Caching.OFF, admission=WAITS, stalled_after_ns=100_000 * NS_PER_S)
    setup = Setup({Role.COLOCATED: 1}, hardware, cluster, config, has_profiles=has_profiles)
    shapes = [(PROMPT_TOKENS, ANSWER_TOKENS)] * PROMPTS
    return mean([outcome(setup, requests(shapes, REQUESTS_PER_S, Random(seed))) for seed in range(seeds)])


def trace(speed: float, seeds: int, caching: Caching = Caching.PD_CACHING_3, has_profiles: bool = True) -> Outcome:
    """The load of the table ``costs``."""
    cluster = ClusterConfig(policy="cost", caching=caching, admission=WAITS)
    setup = Setup({Role.COLOCATED: INSTANCES}, machine(MODEL, "h100"), cluster, has_profiles=has_profiles)
    recipes = [Recipe(kind="trace", sessions=TRACE_REQUESTS, seed=seed, speed=speed) for seed in range(seeds)]
    return mean([outcome(setup, build(recipe)) for recipe in recipes])


def layers(seeds: int) -> Iterator[Json]:
    """KV by request and by layer."""
    ways = {"off": ("off", True), "auto": ("auto", True), "auto, first start": ("auto", False)}
    for device in ("h100", "l40s"):
        first: Outcome | None = None
        for name, (layerwise, has_profiles) in ways.items():
            results = long_prompts(device, seeds, has_profiles, layerwise=layerwise)
            first = first or results
            yield {**results._asdict(), "device": device, "kv": name, "jct_ratio": results.jct_s / first.jct_s}


def costs(seeds: int) -> Iterator[Json]:
    """Decisions by cost: with profiles, in a first start, without a cache."""
    ways = {"profiled": {}, "first start": {"has_profiles": False}, "no cache": {"caching": Caching.OFF}}
    for speed in SPEEDS:
        first: Outcome | None = None
        for name, more in ways.items():
            results = trace(speed, seeds, **more)
            first = first or results
            ratios = {"ttft_ratio": results.ttft_s / first.ttft_s, "jct_ratio": results.jct_s / first.jct_s}
            yield {
                **results._asdict(),
                "speed": speed,
                "instances": name,
                "cached_m": results.cached_tokens / 1e6,
                **ratios,
            }


def objectives(seeds: int) -> Iterator[Json]:
    """Requests that miss an objective."""
    aims = {name: value for name, value in OBJECTIVES.items() if name != "scheduling"}
    for layerwise, scheduling in product(("off", "auto"), ("fcfs", "slo")):
        results = long_prompts("l40s", seeds, layerwise=layerwise, scheduling=scheduling, **aims)
        yield {**results._asdict(), "kv": layerwise, "scheduling": scheduling}


def transfer(seeds: int) -> Iterator[Json]:
    """Figure 12, with a fourth line."""
    ways = [(way, True) for way in TransferPolicy if way.mode is not None]
    ways += [(TransferPolicy.AUTO, True), (TransferPolicy.AUTO, False)]
    for model, (device, rates) in HANDED_OVER.items():
        for rate in rates:
            recipes = [Recipe(kind="uniform", sessions=200, seed=seed, requests_per_s=rate, caps=UNIFORM,
                              arrivals=Arrivals.POISSON) for seed in range(seeds)]  # fmt: skip
            results = {}
            for policy, has_profiles in ways:
                cluster = ClusterConfig(caching=Caching.OFF, transfer=policy, admission=WAITS)
                pair = {Role.PREFILL: 1, Role.DECODE: 1}
                setup = Setup(pair, machine(model, device), cluster, has_profiles=has_profiles)
                results[policy, has_profiles] = mean([outcome(setup, build(recipe)) for recipe in recipes])
            best_s = min(found.jct_s for (policy, _), found in results.items() if policy.mode is not None)
            for (policy, has_profiles), found in results.items():
                name = policy.value if has_profiles else f"{policy.value}, first start"
                about = {"model": model, "device": device, "rate": rate, "transfer": name}
                yield {**found._asdict(), **about, "jct_ratio": found.jct_s / best_s}


TIMES = {"TTFT (s)": "{ttft_s:.2f}", "ms a token": "{tpot_ms:.0f}", "JCT (s)": "{jct_s:.1f}"}
TABLES = {
    "layers": (layers, {"simulated device": "{device}", "KV": "{kv}", **TIMES, "JCT to off": "{jct_ratio:.2f}"}),
    "costs": (
        costs,
        {"speed": "x{speed}", "instances": "{instances}", "TTFT (ms)": "{ttft_ms:.0f}", "JCT (s)": "{jct_s:.2f}",
         "cached tokens (M)": "{cached_m:.2f}", "TTFT, JCT to profiled": "{ttft_ratio:.2f}, {jct_ratio:.2f}"},
    ),
    "objectives": (
        objectives,
        {"KV": "{kv}", "scheduling": "{scheduling}", "miss one": "{missed:.0%}", "TTFT": "{ttft_missed:.0%}",
         "TPOT": "{tpot_missed:.0%}", **TIMES},
    ),
    "transfer": (
        transfer,
        {"model": "{model}", "simulated device": "{device}", "requests/s": "{rate:g}", "--transfer": "{transfer}",
         "TTFT (ms)": "{ttft_ms:.1f}", "JCT (ms)": "{jct_ms:.1f}", "JCT to best": "{jct_ratio:.3f}"},
    ),
}  # fmt: skip


def main() -> None:
    args, record = options(__doc__, tables=Commas(*TABLES), seeds=3), {}
    for name, (rows, columns) in parts_of(args.tables, TABLES).items():
        print(f"\n{name}\n")
        table, record[name] = Table(columns), []
        for row in rows(args.seeds):
            row |= {"ttft_ms": 1000 * row["ttft_s"], "tpot_ms": 1000 * row["tpot_s"], "jct_ms": 1000 * row["jct_s"]}
            record[name].append(row)
            table.show(row)
    save(args, record)


if __name__ == "__main__":
    main()
