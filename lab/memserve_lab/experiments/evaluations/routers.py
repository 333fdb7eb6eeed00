"""``memserve sim routers``: the router beside single policies and beside other projects' rules, on real traces.

Each rule twice: with prefixes that instances take from each other, as memserve's do, and without, as instances of
Dynamo and llm-d are without a shared store. Same instances, same requests, same exact knowledge of prefixes; each
prompt is computed by one instance. ``as it is`` is memserve's default: by cost, with fetches, and with long prompts
that several instances compute at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.units import GIB, NS_PER_S
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.metrics import Figures, figures
from memserve_lab.bench.report_writer import MS, Cell, Drawing, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.cli.sim_results import record_of
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.other_routers import RULES, RuledWorld
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup, parse_instances
from memserve_lab.sim.replay.world import usage
from memserve_lab.workloads.arrivals import trace_time
from memserve_lab.workloads.records import Workload

OURS = "cost"
SINGLE = ("least-load", "session", "prompt-tree")
POLICIES = (*SINGLE, "dynamo", "llm-d", OURS)
DEFAULT = "as it is"
"""Measured beside the rules."""
INSTANCES = 6
"""As many as every rule sees all of."""
BLOCK_TOKENS = 128
TARGET = 0.9
"""Of the best other rule's time to the first token, on three of four traces."""


@dataclass(frozen=True, slots=True)
class TraceCase:
    """One trace, and the cluster that it is played to."""

    kind: str
    """Of the catalogue."""
    sessions: int
    """Its beginning."""
    speed: float = 1.0
    """So many times as fast: instances are busy, and none is overrun."""
    model: str = "llama-3-8b"
    device: str = "h100"
    dram_gib: int = 64
    gather_s: float | None = None
    """Sessions begin within this time. None: as recorded."""


CASES = {
    "conversation": TraceCase("trace", 500, 1.5),
    "synthetic": TraceCase("synthetic", 300, 1.5),
    "toolagent": TraceCase("toolagent", 190, 1.0),
    "agentic": TraceCase("agentic", 12, 10.0, "qwen3-30b-a3b", "h200", 64, 60.0),
    "azure-conv": TraceCase("azure-conv", 2000, 6.0),
    "azure-code": TraceCase("azure-code", 2000, 6.0),
    "servegen": TraceCase("servegen", 2000, 1.0),
}
WITH_PREFIXES = ("conversation", "synthetic", "toolagent", "agentic")
"""Traces that say what prompts share; of the others only loads differ."""


@dataclass(frozen=True, slots=True)
class RouterPoint:
    """One rule on one trace."""

    trace: str
    policy: str
    fetches: bool
    requests: int
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    jct_mean_s: float
    hit_rate: float
    busy_share: float


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The options of a run."""

    traces: tuple[str, ...]
    policies: tuple[str, ...] = POLICIES
    data: Path | None = None
    load: float = 1.0
    """Times the speed of each case."""
    seed: int = 0


def workload_of(case: TraceCase, data: Path | None, load: float) -> Workload:
    """The beginning of a trace. Raises :class:`UserError` where the data are not there."""
    recipe = Recipe(kind=case.kind, data=data, sessions=case.sessions, arrivals=Arrivals.RECORDED)
    workload = trace_time(build(recipe), speed=case.speed * load)
    if case.gather_s is None:
        return workload
    gap_s = case.gather_s / load / len(workload.sessions)
    sessions = []
    for number, session in enumerate(workload.sessions):
        first, *rest = session.turns
        sessions.append(replace(session, turns=(replace(first, due_s=number * gap_s), *rest)))
    return replace(workload, sessions=tuple(sessions))


def measure_rule(case: TraceCase, workload: Workload, policy: str, fetches: bool) -> tuple[Figures, float]:
    """The figures of one rule, and how busy the devices were."""
    patient = AdmissionConfig(waiting_max=1_000_000, wait_ns=10_000 * NS_PER_S)
    policy_name = {DEFAULT: OURS, **dict.fromkeys(RULES, "prompt-tree")}.get(policy, policy)
    shares = "auto" if policy == DEFAULT else "off"
    cluster = ClusterConfig(
        policy=policy_name, sequence_parallel=shares, admission=patient, stalled_after_ns=100_000 * NS_PER_S
    )
    hardware = machine(case.model, case.device, 1, case.dram_gib * GIB, BLOCK_TOKENS)
    setup = Setup(parse_instances(str(INSTANCES)), hardware, cluster, GPU_SCHEDULER)
    world = RuledWorld(setup, workload, RULES.get(policy), fetches)
    world.run_workload()
    return figures([record_of(served, policy, case.kind, 0) for served in world.clients.served]), usage(
        world
    ).busy_share


# -- the study


@dataclass(slots=True, kw_only=True)
class RouterResults(StudyResults):
    """All points."""

    points: list[RouterPoint] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points

    def ratios(self, trace: str) -> dict[str, float]:
        """Our mean and P99 of the time to the first token over the best of the other rules, without their fetches and
        with ours. Empty: not measured."""
        points = [point for point in self.points if point.trace == trace]
        ours = next((point for point in points if point.policy == DEFAULT), None)
        ratios = {}
        for name, fetches in (("as they are", False), ("with our fetches", True)):
            rivals = [point for point in points if point.policy not in (OURS, DEFAULT) and point.fetches is fetches]
            if ours is not None and rivals:
                ratios[f"mean, {name}"] = ours.ttft_mean_s / min(point.ttft_mean_s for point in rivals)
                ratios[f"P99, {name}"] = ours.ttft_p99_s / min(point.ttft_p99_s for point in rivals)
        return ratios


class RouterStudy(Study[RouterResults]):
    """Times to the first token by rule and trace."""

    title = "memserve sim routers"

    def __init__(self, plan: RouterPlan, results: RouterResults) -> None:
        super().__init__(results)
        self._plan = plan
        self.drawings = {"routers": Drawing("Time to the first token by rule. Simulated.", draw_rules)}

    def fill_results(self, tell: Tell) -> None:
        plan = self._plan
        for name in plan.traces:
            case = CASES[name]
            try:
                workload = workload_of(case, plan.data, plan.load)
            except UserError as error:
                self.results.notes.append(f"{name} left out: {error}")
                continue
            rules = [(policy, fetches) for fetches in (False, True) for policy in plan.policies]
            for policy, fetches in [*rules, (DEFAULT, True)]:
                point = _point(name, policy, fetches, *measure_rule(case, workload, policy, fetches))
                self.results.points.append(point)
                tell(f"{name}, {policy}{'' if fetches else ' without fetches'}: {MS * point.ttft_mean_s:.0f} ms")
        if not self.results.points:
            raise UserError("no trace was found", hint="; ".join(self.results.notes))

    def make_tables(self) -> Iterator[Table]:
        columns = (
            "rule", "fetches", "TTFT mean (ms)", "P99", "TPOT mean (ms)", "JCT mean (ms)", "hit rate", "busy",
        )  # fmt: skip
        for name in dict.fromkeys(point.trace for point in self.results.points):
            rows: list[list[Cell]] = [
                [
                    point.policy, "yes" if point.fetches else "no", f"{MS * point.ttft_mean_s:.0f}",
                    f"{MS * point.ttft_p99_s:.0f}", f"{MS * point.tpot_mean_s:.1f}", f"{MS * point.jct_mean_s:.0f}",
                    f"{point.hit_rate:.1%}", f"{point.busy_share:.0%}",
                ]
                for point in self.results.points
                if point.trace == name
            ]  # fmt: skip
            case = CASES[name]
            title = f"{name}: {INSTANCES} instances of {case.model} on {case.device} (simulated)"
            yield Table(title, columns, rows)
        yield self._ratio_table()

    def _ratio_table(self) -> Table:
        names = ("mean, as they are", "P99, as they are", "mean, with our fetches", "P99, with our fetches")
        rows: list[list[Cell]] = []
        for trace in dict.fromkeys(point.trace for point in self.results.points):
            ratios = self.results.ratios(trace)
            rows.append([trace, *(f"{ratios[name]:.2f}" if name in ratios else "" for name in names)])
        about = f"Our time to the first token over the best other rule's; below {TARGET:g}: 10 % lower."
        return Table("The router beside the best of the others", ("trace", *names), rows, about=about)

    def terminal_lines(self) -> Iterator[str]:
        yield from self.results.notes
        for table in self.make_tables():
            yield from table.terminal_lines()


def _point(trace: str, policy: str, fetches: bool, summary: Figures, busy_share: float) -> RouterPoint:
    ttft, tpot, jct = summary.ttft_s, summary.tpot_s, summary.jct_s
    if ttft is None or tpot is None or jct is None:
        raise UserError(f"{policy} has answered nothing of {trace}", hint="take a larger model's context")
    return RouterPoint(
        trace, policy, fetches, summary.requests - summary.failed, ttft.mean, ttft.p99, tpot.mean, jct.mean,
        summary.cached_share, busy_share,
    )  # fmt: skip


def draw_rules(pyplot: Any, results: RouterResults) -> Any:
    """Bars of the mean above those of P99, for each trace."""
    traces = list(dict.fromkeys(point.trace for point in results.points))
    size = 4.2 * len(traces), 6.4
    figure, rows = pyplot.subplots(2, len(traces), figsize=size, layout="constrained", squeeze=False, sharex="col")
    for column, trace in enumerate(traces):
        points = [point for point in results.points if point.trace == trace]
        names = list(dict.fromkeys(point.policy for point in points))
        for row, value in enumerate(("ttft_mean_s", "ttft_p99_s")):
            axes = rows[row][column]
            for shift, fetches in ((-0.2, False), (0.2, True)):
                by_policy = {point.policy: MS * getattr(point, value) for point in points if point.fetches is fetches}
                places = [place + shift for place, name in enumerate(names) if name in by_policy]
                label = "with fetches" if fetches else "without"
                axes.bar(places, list(by_policy.values()), 0.36, label=label, color=f"C{int(fetches)}")
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
        rows[0][column].set(title=trace)
        rows[1][column].set_xticks(range(len(names)), names, rotation=40, ha="right")
    rows[0][0].set(ylabel="TTFT, mean (ms)")
    rows[1][0].set(ylabel="TTFT, P99 (ms)")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle("Time to the first token by routing rule, simulated")
    return figure
