"""``memserve sim layerkv``: LayerKV's evaluation, on the production scheduler, with its models on its devices.

Each figure is a sweep: the same requests for each contender at each point. Open loop, Poisson arrivals; prompts have
nothing in common, and answers have the lengths that the workload says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from memserve.bench.orbitflow import ProgramPolicy
from memserve.bench.study import StudyResults
from memserve.config import AdmissionConfig, ClusterConfig, SchedulerConfig
from memserve.errors import UserError
from memserve.sim.hardware import machine
from memserve.sim.replay.clients import Served
from memserve.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve.sim.replay.world import ReplayWorld
from memserve.types import Caching, Role
from memserve.units import GIB, NS_PER_S
from memserve.workloads.words import Blocks, Session, Span, Turn, Workload

BLOCK_TOKENS = 32
TTFT_S, TPOT_S = 3.0, 0.2
"""LayerKV's objectives (5.2.4)."""
DRAM_BYTES = 512 * GIB
"""Of an instance: the paper's servers have 2 TB."""
ORBITFLOW = "integer program (orbitflow)"
SHORTEST, LONGEST = 4, 2300
"""Tokens of ShareGPT's sequences, as the paper says."""
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
MODELS = {"llama-2-7b-16k": 1, "yi-34b-200k": 2, "llama-3.1-70b": 4}
"""The paper's models, and the devices of each."""
LONG_TTFT_S = 30.0
"""Objective of the figure ``orbitflow``: computing one of its prompts takes 2 to 50 s on an L20."""
LONG_RATES = (0.02, 0.04, 0.06, 0.08)


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of each plot."""

    name: str
    scheduler: SchedulerConfig
    figure: str = ""
    """The only one that it is in. Empty: in all."""
    is_program: bool = False
    """An integer program says what is kept."""


def contenders() -> tuple[Contender, ...]:
    """By request, and by layer with first tokens before all, as the paper has it. ``layerkv`` has no limit of what
    steps read back: the paper does not name one."""
    slo = {"scheduling": "slo", "slo_ttft_ns": round(TTFT_S * NS_PER_S), "slo_tpot_ns": round(TPOT_S * NS_PER_S)}
    layers = {"layerwise": "prompts-first"}
    ways: dict[str, dict[str, Any]] = {
        "request-wise": {},
        "request-wise, slo": slo,
        "all read back, slo (layerkv)": {"layerwise": "layerkv", **slo},
        "by layer": layers,
        "by layer, slo": {**layers, **slo},
    }
    others = {"static-16": "static-16", "next-layer": "next-layer", ORBITFLOW: "prompts-first"}
    return (
        *(Contender(name, dataclasses.replace(GPU_SCHEDULER, **options)) for name, options in ways.items()),
        *(
            Contender(name, dataclasses.replace(GPU_SCHEDULER, layerwise=mode), "orbitflow", name == ORBITFLOW)
            for name, mode in others.items()
        ),
    )


def aligned_and_staggered() -> tuple[Contender, ...]:
    """Everything is read back: requests that keep the same layers, and those that keep other ones than neighbours."""
    names = {"phase-aligned": "layerkv", "staggered": "layerkv-staggered"}
    return tuple(Contender(name, dataclasses.replace(GPU_SCHEDULER, layerwise=way)) for name, way in names.items())


@dataclass(frozen=True, slots=True)
class Point:
    """One contender under one load."""

    figure: str
    model: str
    devices: int
    contender: str
    at: float
    """Tokens of context, devices, or requests a second."""
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tokens_per_s: float
    violations: float
    """Share of requests that miss one of the objectives."""
    parked: int
    waited_share: float
    """Of the time of all steps: waits for the link."""
    hidden: float
    """Share of the link's time that no step waited for."""
    ttft_met: float = 0.0
    tpot_met: float = 0.0
    """Share of requests that meet the objective."""
    tbt_met: float = 0.0
    """Share of the tokens that are there when an even pace of the objective hands them out."""
    read_pages: tuple[int, ...] = ()
    """Pages that steps have read back, layer by layer."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One figure for one model: the loads of its points."""

    figure: str
    model: str
    points: tuple[tuple[float, int, float], ...]
    """Where on the axis, devices, and requests a second."""
    ttft_s: float = TTFT_S
    """Objective."""
    contenders: tuple[Contender, ...] = ()
    """None: those of the run."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    sweeps: tuple[Sweep, ...]
    contenders: tuple[Contender, ...]
    device: str
    requests: int
    """Of each point."""
    seed: int = 0


def sweeps_of(figures: Sequence[str], rates: Sequence[float]) -> tuple[Sweep, ...]:
    """The paper's sweeps: context lengths at 1 request/s for three models, devices for Yi, rates for Llama 2."""
    found: list[Sweep] = []
    if "context" in figures:
        found += [
            Sweep("context", model, tuple((context, devices, 1.0) for context in CONTEXTS))
            for model, devices in MODELS.items()
        ]
    if "devices" in figures:
        found.append(Sweep("devices", "yi-34b-200k", tuple((devices, devices, 1.0) for devices in (2, 4, 8))))
    by_rate = tuple((rate, 1, rate) for rate in rates)
    if "rate" in figures:
        found.append(Sweep("rate", "llama-2-7b-16k", by_rate))
    if "stagger" in figures:
        found.append(Sweep("stagger", "llama-2-7b-16k", by_rate[-1:], contenders=aligned_and_staggered()))
    if "orbitflow" in figures:
        found.append(Sweep("orbitflow", "llama-3-8b", tuple((rate, 1, rate) for rate in LONG_RATES), LONG_TTFT_S))
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class LayerKvResults(StudyResults):
    """All points."""

    points: list[Point] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was simulated."""
        return not self.points

    def of(self, figure: str, model: str, contender: str) -> list[Point]:
        """One line."""
        mine = (figure, model, contender)
        return [point for point in self.points if (point.figure, point.model, point.contender) == mine]


def requests(shapes: Sequence[tuple[int, int]], rate: float, random: Random) -> Workload:
    """Prompts and answers of these lengths, at ``rate`` requests a second."""
    sessions, first, due_s = [], 0, 0.0
    for number, (prompt, answer) in enumerate(shapes):
        due_s += random.expovariate(rate)
        sessions.append(
            Session(f"r{number}", (Turn(Blocks(BLOCK_TOKENS, (Span(first, prompt),)), answer, due_s=due_s),))
        )
        first += -(-prompt // BLOCK_TOKENS)
    return Workload("layerkv", "generated", tuple(sessions), arrivals=f"{rate:g} requests/s")


def conversation_lengths(count: int, random: Random) -> list[tuple[int, int]]:
    """Lengths like ShareGPT's: lognormal, prompts of 160 tokens at the median, answers of 210; both together at most
    2,300 tokens."""
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        prompt, answer = (round(random.lognormvariate(math.log(median), 1.1)) for median in (160, 210))
        if min(prompt, answer) >= SHORTEST and prompt + answer <= LONGEST:
            shapes.append((prompt, answer))
    return shapes


def long_lengths(count: int, random: Random) -> list[tuple[int, int]]:
    """Lengths like those of OrbitFlow's traces as far as the model's context goes: prompts of 8,000 tokens or more, of
    16,000 at the median, and long answers."""
    shapes: list[tuple[int, int]] = []
    while len(shapes) < count:
        prompt = round(random.lognormvariate(math.log(16_000), 0.6))
        if 8000 <= prompt <= 100_000:
            shapes.append((prompt, random.randint(1024, 3072)))
    return shapes


def measure_point(
    figure: str,
    model: str,
    device: str,
    devices: int,
    contender: Contender,
    at: float,
    workload: Workload,
    ttft_s: float = TTFT_S,
) -> Point:
    """Simulate one contender with one workload."""
    hardware = machine(model, device, devices, DRAM_BYTES, BLOCK_TOKENS)
    waits = AdmissionConfig(waiting_max=1_000_000, wait_ns=10_000 * NS_PER_S)
    cluster = ClusterConfig(caching=Caching.OFF, admission=waits, stalled_after_ns=100_000 * NS_PER_S)
    scheduler = dataclasses.replace(contender.scheduler, max_waiting=1_000_000)
    if scheduler.slo_ttft_ns is not None:
        scheduler = dataclasses.replace(scheduler, slo_ttft_ns=round(ttft_s * NS_PER_S))
    layers = ProgramPolicy(bounds_delays=False) if contender.is_program else None
    world = ReplayWorld(Setup({Role.COLOCATED: 1}, hardware, cluster, scheduler, layers=layers), workload)
    world.run()
    return _point(figure, model, devices, contender.name, at, world, ttft_s)


def _point(
    figure: str, model: str, devices: int, contender: str, at: float, world: ReplayWorld, ttft_s: float
) -> Point:
    done = [served for served in world.clients.served if served.answered]
    if len(done) < len(world.clients.served):
        raise UserError(f"{len(world.clients.served) - len(done)} requests of {contender} were not answered")
    node = world.instances[0]
    link, layers = node.device.link.counters, node.machine.state.memory.layers
    ttfts = sorted(_ttft_s(served) for served in done)
    tpots = [_tpot_s(served) for served in done]
    elapsed_s = max(served.end_ns or 0 for served in done) / NS_PER_S
    missed = sum(ttft > ttft_s or tpot > TPOT_S for ttft, tpot in zip(map(_ttft_s, done), tpots, strict=True))
    worst = ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)]
    return Point(
        figure, model, devices, contender, at, sum(ttfts) / len(ttfts), worst,
        sum(tpots) / len(tpots), sum(len(served.token_ns) for served in done) / elapsed_s, missed / len(done),
        layers.parked if layers is not None else 0, link.waited_ns / max(1, node.device.busy_ns),
        link.hidden_share, sum(ttft <= ttft_s for ttft in ttfts) / len(done),
        sum(tpot <= TPOT_S for tpot in tpots) / len(done),
        sum(map(_in_time, done)) / sum(len(served.token_ns) for served in done), tuple(link.read_pages),
    )  # fmt: skip


def _ttft_s(served: Served) -> float:
    return ((served.first_ns or 0) - served.scheduled_ns) / NS_PER_S


def _tpot_s(served: Served) -> float:
    tokens = len(served.token_ns)
    return (served.token_ns[-1] - served.token_ns[0]) / NS_PER_S / (tokens - 1) if tokens > 1 else 0.0


def _in_time(served: Served) -> int:
    """Tokens that are there when an even pace, from the first one on, hands them out."""
    first_ns, pace_ns = served.token_ns[0], round(TPOT_S * NS_PER_S)
    return sum(at_ns <= first_ns + number * pace_ns for number, at_ns in enumerate(served.token_ns))


def sooner(ratio: float) -> str:
    """How much sooner than the other, whose time is ``ratio`` times as long."""
    if abs(ratio - 1) < 0.05:
        return "as soon"
    return f"{ratio:.1f} times sooner" if ratio > 1 else f"{1 / max(1e-9, ratio):.1f} times later"
