"""``memserve sim layerkv``: LayerKV's evaluation, on the production scheduler, with its models on its devices.

Each figure is a sweep: the same requests for each contender at each point. Open loop, Poisson arrivals; prompts have
nothing in common, and answers have the lengths that the workload says.

The tables and plots of :mod:`memserve_lab.experiments.layerkv`.

OrbitFlow's placement (VLDB 2026), for comparison: an integer program chooses how many layers each request keeps.

Of each request that lies by layer, one of a few numbers of kept layers is chosen, or it is paused::

    least    waits + PAUSE * paused requests
    so that  sum of kept layers * frames of a layer      <=  HBM for kept layers
             pages read back * time of a page - computing <=  waits
             computing + waits                            <=  time that a token may take

Its token deposit, tokens that are handed out at an even pace, is counted for all contenders (``Point.tbt_met``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from memserve.base.config import AdmissionConfig, ClusterConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import Caching, Role
from memserve.base.units import GIB, NS_PER_MS, NS_PER_S, ceil_div
from memserve.instance.layerwise.budget import LayerBudget, LayeredView, LayerPolicy
from memserve_lab.bench.report_writer import Cell, Drawing, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.clients import Served
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, Session, Span, Turn, Workload

SOLVES_EVERY = 16
"""Steps with the same requests between two programs; the paper solves one step ahead and when lengths drift."""
CHOICES = 9
"""Numbers of kept layers, evenly from none to all: the paper prunes to even distances, too."""
_PAUSE_MS = 1e6
_KEEPS_MS = 1e-3  # a kept layer that brings nothing is not worth a copy; but what is kept stays, at equal waits


@dataclass(frozen=True, eq=False)
class ProgramPolicy(LayerPolicy):
    """OrbitFlow's program in the place of our rule. Of one instance and one run: it remembers the last solution."""

    is_staggered: bool = False
    _last: dict[int, int] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=lambda: [0])

    def indices_to_park(
        self, lying: Sequence[LayeredView], budget: LayerBudget, step_ns: int, free_blocks: int
    ) -> list[int]:
        """Solve where the requests have changed, or some steps have passed. Those that are paused are parked."""
        self._steps[0] += 1
        ready = [index for index, view in enumerate(lying) if view.may_park]
        numbers = {lying[index].number for index in ready}
        if not ready or (numbers == self._last.keys() and self._steps[0] < SOLVES_EVERY):
            return []
        self._steps[0] = 0
        self._last.clear()
        layers_solved = solve([lying[index] for index in ready], budget, step_ns, free_blocks)
        self._last.update(
            {
                lying[index].number: layer_count
                for index, layer_count in zip(ready, layers_solved, strict=True)
                if layer_count is not None
            }
        )
        return [index for index, layer_count in zip(ready, layers_solved, strict=True) if layer_count is None]

    def kept_most(self, number: int, num_layers: int) -> int:
        """What the last solution has; all, of a request that was not in it."""
        return self._last.get(number, num_layers)


def solve(lying: Sequence[LayeredView], budget: LayerBudget, step_ns: int, free_blocks: int) -> list[int | None]:
    """Layers that each keeps; None: it is paused. ``step_ns``: what a step's computing takes; 0: not known."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers = budget.num_layers
    page_ms = budget.page_bytes / budget.link_bytes_s * NS_PER_S / NS_PER_MS
    token_ms = budget.tpot_ns / NS_PER_MS
    compute_ms = min(step_ns / NS_PER_MS, token_ms)
    layer_choices = sorted({layers * n // (CHOICES - 1) for n in range(CHOICES)})
    width = len(layer_choices) + 1  # of one request: its choices, and the pause; behind all requests: the waits
    count = width * len(lying) + 1
    cost, frames, reads = np.zeros(count), np.zeros(count), np.zeros(count)
    one_each = np.zeros((len(lying), count))
    for row, view in enumerate(lying):
        first_column, blocks_per_layer = row * width, ceil_div(view.entries, layers)
        one_each[row, first_column : first_column + width] = 1
        for choice, number in enumerate(layer_choices):
            cost[first_column + choice] = _KEEPS_MS * abs(number - view.resident_layers)
            frames[first_column + choice] = number * blocks_per_layer
            reads[first_column + choice] = (layers - number) * view.entries * page_ms
        cost[first_column + width - 1] = _PAUSE_MS
    cost[-1], reads[-1] = 1, -1
    room = free_blocks + sum(view.resident_layers * ceil_div(view.entries, layers) for view in lying)
    solution = milp(
        cost,
        integrality=np.append(np.ones(count - 1), 0),
        bounds=Bounds(np.zeros(count), np.append(np.ones(count - 1), token_ms - compute_ms)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(frames[None], ub=room),
            LinearConstraint(reads[None], ub=compute_ms),
        ],
        options={"time_limit": 1.0, "mip_rel_gap": 1e-3},
    )
    if solution.x is None:
        return [view.resident_layers for view in lying]
    choices = solution.x[:-1].reshape(len(lying), width).argmax(axis=1)
    return [layer_choices[index] if index < len(layer_choices) else None for index in choices.tolist()]


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
    contender_names = {"static-16": "static-16", "next-layer": "next-layer", ORBITFLOW: "prompts-first"}
    return (
        *(Contender(name, dataclasses.replace(GPU_SCHEDULER, **options)) for name, options in ways.items()),
        *(
            Contender(name, dataclasses.replace(GPU_SCHEDULER, layerwise=mode), "orbitflow", name == ORBITFLOW)
            for name, mode in contender_names.items()
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
    sweeps: list[Sweep] = []
    if "context" in figures:
        sweeps += [
            Sweep("context", model, tuple((context, devices, 1.0) for context in CONTEXTS))
            for model, devices in MODELS.items()
        ]
    if "devices" in figures:
        sweeps.append(Sweep("devices", "yi-34b-200k", tuple((devices, devices, 1.0) for devices in (2, 4, 8))))
    by_rate = tuple((rate, 1, rate) for rate in rates)
    if "rate" in figures:
        sweeps.append(Sweep("rate", "llama-2-7b-16k", by_rate))
    if "stagger" in figures:
        sweeps.append(Sweep("stagger", "llama-2-7b-16k", by_rate[-1:], contenders=aligned_and_staggered()))
    if "orbitflow" in figures:
        sweeps.append(Sweep("orbitflow", "llama-3-8b", tuple((rate, 1, rate) for rate in LONG_RATES), LONG_TTFT_S))
    return tuple(sweeps)


@dataclass(slots=True, kw_only=True)
class LayerKvResults(StudyResults):
    """All points."""

    points: list[Point] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points

    def points_of(self, figure: str, model: str, contender: str) -> list[Point]:
        """One line."""
        key = (figure, model, contender)
        return [point for point in self.points if (point.figure, point.model, point.contender) == key]


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
    world.run_workload()
    return _point(figure, model, devices, contender.name, at, world, ttft_s)


def _point(
    figure: str, model: str, devices: int, contender: str, at: float, world: ReplayWorld, ttft_s: float
) -> Point:
    answered = [served for served in world.clients.served if served.answered]
    if len(answered) < len(world.clients.served):
        raise UserError(f"{len(world.clients.served) - len(answered)} requests of {contender} were not answered")
    node = world.instances[0]
    link = node.device.link.counters
    ttfts = sorted(_ttft_s(served) for served in answered)
    tpots = [_tpot_s(served) for served in answered]
    elapsed_s = max(served.end_ns or 0 for served in answered) / NS_PER_S
    missed = sum(ttft > ttft_s or tpot > TPOT_S for ttft, tpot in zip(map(_ttft_s, answered), tpots, strict=True))
    worst = ttfts[min(len(ttfts) - 1, len(ttfts) * 99 // 100)]
    return Point(
        figure, model, devices, contender, at, sum(ttfts) / len(ttfts), worst,
        sum(tpots) / len(tpots), sum(len(served.token_ns) for served in answered) / elapsed_s, missed / len(answered),
        node.machine.state.memory.layers.report(0).parkings, link.waited_ns / max(1, node.device.busy_ns),
        link.hidden_share, sum(ttft <= ttft_s for ttft in ttfts) / len(answered),
        sum(tpot <= TPOT_S for tpot in tpots) / len(answered),
        sum(map(_in_time, answered)) / sum(len(served.token_ns) for served in answered), tuple(link.read_pages),
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


PAPER = {
    "context": "The paper's figures 1 and 4: TTFT grows sharply with the context by request, and up to an order of "
    "magnitude less by layer; throughput is nearly the same.",
    "devices": "The paper's figure 5: TTFT is lower by layer with any number of devices; throughput nearly the same.",
    "stagger": "Everything is read back in each step. Staggered, the link has the same work before each layer; how "
    "long steps wait is bound by all of it together.",
    "rate": "The paper's figures 6, 7 and 8: mean TTFT up to 69 times lower, P99 up to 45 times; throughput within "
    "3 %; 17.7 to 28.7 points fewer requests violate 3 s or 200 ms a token from 6 requests/s on.",
    "orbitflow": "OrbitFlow's paper: TPOT objectives are met up to 66 % more often than with other ways to offload, "
    "P95 latency is 38 % lower, throughput up to 3.3 times. Its objectives and device are not those of this figure.",
}

AXES = {
    "context": "tokens of context",
    "devices": "devices",
    "rate": "requests/s",
    "stagger": "requests/s",
    "orbitflow": "requests/s",
}


class LayerKvStudy(Study[LayerKvResults]):
    """Time to the first token, throughput and violations, by figure."""

    title = "memserve sim layerkv"

    def __init__(self, plan: Plan, results: LayerKvResults) -> None:
        super().__init__(results)
        self._plan = plan
        about = "{} on {}, by {}. Simulated."
        self.drawings = {
            _file_of(sweep): Drawing(
                about.format(sweep.model, plan.device, AXES[sweep.figure] if sweep.figure != "stagger" else "layer"),
                draw_depth if sweep.figure == "stagger" else _drawing(sweep),
            )
            for sweep in plan.sweeps
        }

    def fill_results(self, tell: Tell) -> None:
        plan = self._plan
        for sweep in plan.sweeps:
            for place, devices, rate in sweep.points:
                random = Random(f"{plan.seed} {sweep.figure}")  # with each load the same requests
                contenders = sweep.contenders or plan.contenders
                shapes = self._request_shapes(sweep.figure, place, random)
                workload = requests(shapes, rate, random)
                for contender in contenders:
                    if contender.figure not in ("", sweep.figure):
                        continue
                    point = measure_point(
                        sweep.figure, sweep.model, plan.device, devices, contender, place, workload, sweep.ttft_s
                    )
                    self.results.points.append(point)
                    tell(f"{sweep.model}, {place:g} {AXES[sweep.figure]}, {point.contender}: {point.ttft_mean_s:.2f} s")

    def _request_shapes(self, figure: str, place: float, random: Random) -> list[tuple[int, int]]:
        count = self._plan.requests
        if figure in ("rate", "stagger"):
            return conversation_lengths(count, random)
        if figure == "orbitflow":
            return long_lengths(max(20, count // 4), random)
        return [(int(place) - 512 * (place > 16000) if figure == "context" else 4096, 512)] * max(20, count // 4)

    def make_tables(self) -> Iterator[Table]:
        for sweep in self._plan.sweeps:
            rows = [row for place, *_ in sweep.points for row in self._row_cells(sweep, place)]
            axis = AXES[sweep.figure]
            title = f"{sweep.model} on {self._plan.device}, by {axis} (simulated: a roofline, not measured)"
            columns = (
                axis, "setting", "TTFT mean (s)", "P99 (s)", "beside the first", "TPOT (ms)", "tokens/s",
                "beside the first", "miss an objective", "parked", "of the link hidden",
            )  # fmt: skip
            yield Table(title, columns, rows, about=PAPER[sweep.figure])
            if sweep.figure == "orbitflow":
                yield self._met_table(sweep)

    def _met_table(self, sweep: Sweep) -> Table:
        columns = ("requests/s", "setting", "TTFT met", "TPOT met", "tokens in time", "steps wait for the link")
        rows: list[list[Cell]] = [
            [
                f"{point.at:g}", point.contender, f"{point.ttft_met:.1%}", f"{point.tpot_met:.1%}",
                f"{point.tbt_met:.1%}", f"{point.waited_share:.1%}",
            ]
            for place, *_ in sweep.points
            for point in self.results.points
            if (point.figure, point.model, point.at) == (sweep.figure, sweep.model, place)
        ]  # fmt: skip
        about = (
            f"Objectives: {sweep.ttft_s:g} s to the first token, {1000 * TPOT_S:g} ms for each further one; a token is "
            "in time if it is there when tokens are handed out at that pace (OrbitFlow's token deposit)."
        )
        return Table(f"{sweep.model} on {self._plan.device}: objectives met", columns, rows, about=about)

    def _row_cells(self, sweep: Sweep, place: float) -> Iterator[list[Cell]]:
        points = [p for p in self.results.points if (p.figure, p.model, p.at) == (sweep.figure, sweep.model, place)]
        for point in points:
            base = points[0]
            yield [
                f"{place:g}", point.contender, f"{point.ttft_mean_s:.2f}", f"{point.ttft_p99_s:.2f}",
                sooner(base.ttft_mean_s / point.ttft_mean_s), f"{1000 * point.tpot_mean_s:.0f}",
                f"{point.tokens_per_s:.0f}", f"{point.tokens_per_s / base.tokens_per_s - 1:+.1%}",
                f"{point.violations:.1%}", point.parked, f"{point.hidden:.0%}",
            ]  # fmt: skip

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


def _file_of(sweep: Sweep) -> str:
    return f"{sweep.figure}-{sweep.model}"


def draw_depth(pyplot: Any, results: LayerKvResults) -> Any:
    """Pages read back, layer by layer."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for point in (point for point in results.points if point.figure == "stagger"):
        mean = sum(point.read_pages) / max(1, len(point.read_pages))
        waits = f"{point.contender}: steps wait {point.waited_share:.1%} of their time"
        axes.plot([pages / max(1e-9, mean) for pages in point.read_pages], marker="o", label=waits)
    axes.set(xlabel="layer", ylabel="pages read back (mean of layers: 1)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.suptitle("Work of the link over the depth, simulated")
    return figure


def _drawing(sweep: Sweep) -> Any:
    """Three panels over one axis: time to the first token, throughput, violations."""

    def draw(pyplot: Any, results: LayerKvResults) -> Any:
        figure, panels = pyplot.subplots(3, 1, figsize=(8, 10), sharex=True, layout="constrained")
        for name in dict.fromkeys(point.contender for point in results.points if point.figure == sweep.figure):
            points = results.points_of(sweep.figure, sweep.model, name)
            places, style = [point.at for point in points], {"marker": "x" if "slo" in name else "o", "label": name}
            line = panels[0].plot(places, [point.ttft_mean_s for point in points], **style)[0]
            panels[0].plot(places, [point.ttft_p99_s for point in points], linestyle=":", color=line.get_color())
            panels[1].plot(places, [point.tokens_per_s for point in points], **style)
            panels[2].plot(places, [100 * point.violations for point in points], **style)
        panels[0].set(ylabel="TTFT (s): mean, P99 dotted", yscale="log")
        panels[1].set(ylabel="tokens / s", ylim=(0, None))
        panels[2].set(ylabel="requests that miss an objective (%)", ylim=(0, 100), xlabel=AXES[sweep.figure])
        if sweep.figure == "context":
            panels[2].set_xscale("log", base=2)
        for axes in panels:
            axes.grid(alpha=0.3)
        panels[1].legend(loc="lower left")
        figure.suptitle(f"{sweep.model}, simulated")
        return figure

    return draw
