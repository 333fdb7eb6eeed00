"""``memserve sim ratios``: ratios that others have published, in settings of like shape on the production machines.

======== ===========================================================================================================
precise  llm-d: exact knowledge of prefixes at the router beside balancing by load; six instances whose caches hold
         the shared prompts of 150 groups once, with a quarter to spare, and no prefix passes between them
store    vLLM with Mooncake's store: agents' sessions of which a part fits into HBM, without and with a store that
         holds all of them
======== ===========================================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission
from memserve.base.units import GIB, NS_PER_S
from memserve.router.placement.placer import ALL_OF
from memserve_lab.bench.metrics import figures
from memserve_lab.bench.report_writer import MS, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.cli.sim_results import record_of
from memserve_lab.experiments.agents import blocks_for
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.other_routers import RULES, RuledWorld
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup, StoreSetup, parse_instances
from memserve_lab.workloads.agents import AgentShape, agent_workload
from memserve_lab.workloads.arrivals import Poisson, by_session, draws
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

CASES = ("precise", "store")
BLOCK_TOKENS = 64
GROUPS, USERS, PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 150, 5, 6000, 1200, 200
"""llm-d's workload, with shorter answers."""
FILL = 0.73
"""Of all KV memory: the groups' prefixes, each once."""
PAPER = {
    "precise": "llm-d, 8 pods of Qwen3-32B, caches filled to 73 %: P90 of TTFT 0.542 s with precise routing, 31.1 s "
    "with approximate, 92.6 s with random routing.",
    "store": "vLLM with Mooncake's store, coding agents: 3.8 times the throughput, P50 of TTFT 46 times less.",
}


@dataclass(frozen=True, slots=True)
class RatioPoint:
    """One setting of one case."""

    case: str
    setting: str
    requests: int
    requests_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class RatioPlan:
    """The options of a run."""

    cases: tuple[str, ...] = CASES
    rate: float = 18.0
    """Requests a second of ``precise``."""
    users: int = 24
    """Agents at a time, of ``store``."""
    share: float = 0.25
    """Of their sessions whose KV fits into HBM."""
    turns: int = 12
    first_tokens: int = 20_000
    seed: int = 0


def groups_workload(rate: float, seed: int, groups: int = GROUPS) -> Workload:
    """Requests of groups in random order, each behind its group's prefix."""
    prefix_blocks, question_blocks = PREFIX_TOKENS // BLOCK_TOKENS + 1, QUESTION_TOKENS // BLOCK_TOKENS + 1
    sessions = []
    for place in draws(seed, "order").permutation(groups * USERS).tolist():
        group, number = divmod(place, USERS)
        spans = (
            Span(group * prefix_blocks, prefix_blocks * BLOCK_TOKENS),
            Span((1 << 24) + place * question_blocks, QUESTION_TOKENS),
        )
        turn = Turn(Blocks(BLOCK_TOKENS, spans), ANSWER_TOKENS)
        sessions.append(Session(f"group-{group}-{number}", (turn,), history=History.GIVEN))
    return by_session(Workload("groups", "generated", tuple(sessions)), Poisson(rate), seed=seed)


def _patient(policy: str) -> ClusterConfig:
    waits = AdmissionConfig(waiting_max=1_000_000, wait_ns=10_000 * NS_PER_S)
    return ClusterConfig(policy=policy, admission=waits, stalled_after_ns=100_000 * NS_PER_S)


def precise_worlds(plan: RatioPlan) -> Iterator[tuple[str, RuledWorld]]:
    """By load, and by exact prefixes in several ways; last with prefixes that instances take from each other."""
    workload = groups_workload(plan.rate, plan.seed)
    rules = "least-load", "prompt-tree", "llm-d", "cost"
    for policy, fetches in (*((rule, False) for rule in rules), ("prompt-tree", True), ("cost", True)):
        name = f"{policy}{'' if fetches else ', no fetches'}"
        yield name, precise_world(workload, policy, fetches)


def precise_world(workload: Workload, policy: str, fetches: bool) -> RuledWorld:
    """Six instances that play ``workload`` under ``policy`` or a rule of others."""
    hardware = machine("qwen3-32b", "h100", 2, block_tokens=BLOCK_TOKENS)
    blocks = int(GROUPS * PREFIX_TOKENS / FILL / ALL_OF / BLOCK_TOKENS)
    hardware = dataclasses.replace(hardware, hbm_blocks=blocks)
    cluster = _patient("prompt-tree" if policy in RULES else policy)
    setup = Setup(parse_instances(str(ALL_OF)), hardware, cluster, GPU_SCHEDULER)
    return RuledWorld(setup, workload, RULES.get(policy), fetches)


def store_worlds(plan: RatioPlan) -> Iterator[tuple[str, RuledWorld]]:
    """Two instances with HBM alone; with a store beside the first; and with admission that minds caches, too."""
    shape = AgentShape(turns=plan.turns, first_tokens=plan.first_tokens)
    workload = agent_workload(shape, "tools", plan.users, 2 * plan.users, plan.seed)
    hardware = machine("llama-3-8b", "h100", block_tokens=BLOCK_TOKENS)
    hardware = dataclasses.replace(hardware, hbm_blocks=blocks_for(workload, plan.users, plan.share / 2, BLOCK_TOKENS))
    setup = Setup(parse_instances("2"), hardware, _patient("cost"), GPU_SCHEDULER)
    yield "HBM alone", RuledWorld(setup, workload)
    stored = dataclasses.replace(setup, stores=StoreSetup(1024 * GIB))
    yield "with a store", RuledWorld(stored, workload)
    admission = dataclasses.replace(setup.cluster.admission, mode=Admission.CACHE)
    cluster = dataclasses.replace(setup.cluster, admission=admission)
    yield "with a store, --admission cache", RuledWorld(dataclasses.replace(stored, cluster=cluster), workload)


@dataclass(slots=True, kw_only=True)
class RatioResults(StudyResults):
    """All points."""

    points: list[RatioPoint] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points


class RatioStudy(Study[RatioResults]):
    """Throughput and first tokens by setting."""

    title = "memserve sim ratios"

    def __init__(self, plan: RatioPlan, results: RatioResults) -> None:
        super().__init__(results)
        self._plan = plan

    def fill_results(self, tell: Tell) -> None:
        makers = {"precise": precise_worlds, "store": store_worlds}
        for case in self._plan.cases:
            for setting, world in makers[case](self._plan):
                world.run_workload()
                point = _point(case, setting, world)
                self.results.points.append(point)
                tell(f"{case}, {setting}: {point.requests_per_s:.2f} requests/s, P90 {point.ttft_p90_s:.2f} s")

    def make_tables(self) -> Iterator[Table]:
        columns = (
            "setting", "requests/s", "to the first", "TTFT mean (ms)", "P50", "P90", "P90: times less", "hit rate",
        )  # fmt: skip
        for case in self._plan.cases:
            points = [point for point in self.results.points if point.case == case]
            rows = [
                [
                    point.setting, f"{point.requests_per_s:.2f}",
                    f"{point.requests_per_s / points[0].requests_per_s:.2f}", f"{MS * point.ttft_mean_s:.0f}",
                    f"{MS * point.ttft_p50_s:.0f}", f"{MS * point.ttft_p90_s:.0f}",
                    f"{points[0].ttft_p90_s / point.ttft_p90_s:.1f}", f"{point.hit_rate:.1%}",
                ]
                for point in points
            ]  # fmt: skip
            yield Table(f"{case} (simulated)", columns, rows, about=PAPER[case])

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


def _point(case: str, setting: str, world: RuledWorld) -> RatioPoint:
    summary = figures([record_of(served, setting, case, 0) for served in world.clients.served])
    ttft = summary.ttft_s
    assert ttft is not None, "requests were answered"
    return RatioPoint(
        case, setting, summary.requests - summary.failed, summary.requests_per_s, ttft.mean, ttft.p50, ttft.p90,
        summary.cached_share,
    )  # fmt: skip
