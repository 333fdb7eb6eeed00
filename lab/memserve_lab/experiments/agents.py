"""``memserve sim agents``: sessions of agents whose KV does not all fit, kept between turns by four rules.

Closed loop: as many agents as ``Plan.users`` hold a session each, and begin another when it ends. A *share* of memory
is that of the KV of so many whole sessions. Session times count from the first request's sending to the last answer's
end, so that time for which a session is kept waiting counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.instance.machine import Instance
from memserve_lab.bench.report_writer import Cell, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.sim.cache_ttl import CacheTtl
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.nodes import InstanceNode
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.agents import AgentShape, agent_workload, context_tokens
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.statistics import spread_of

UNLIMITED, LRU, CACHE_TTL, AUTO = "unlimited", "last use", "CacheTTL", "auto"
RULES = (UNLIMITED, LRU, CACHE_TTL, AUTO)


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    machine: Machine
    """Its KV memory is set by the shares."""
    gaps: tuple[str, ...]
    shares: tuple[float, ...]
    rules: tuple[str, ...] = RULES
    shape: AgentShape = field(default_factory=AgentShape)
    users: int = 18
    sessions: int = 54
    seeds: int = 1

    def __post_init__(self) -> None:
        if unknown := [rule for rule in self.rules if rule not in RULES]:
            raise UserError(f"unknown rule {unknown[0]!r}", hint=f"some of {', '.join(RULES)}")


@dataclass(frozen=True, slots=True)
class Point:
    """One rule with one size of memory, over all sessions."""

    gaps: str
    share: float
    """Of the sessions whose KV fits; 0: all of it does."""
    rule: str
    session_s: float
    """Mean."""
    session_p95_s: float
    ttft_max_s: float
    hit_rate: float
    """Share of the prompts' tokens that were not computed."""
    delayed_turns: int
    """Turns that waited for room which was kept for others."""
    unanswered: int


@dataclass(slots=True, kw_only=True)
class AgentResults(StudyResults):
    """All points."""

    points: list[Point] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points

    def find_point(self, gaps: str, share: float, rule: str) -> Point | None:
        """None: it was not measured."""
        where = (gaps, 0.0 if rule == UNLIMITED else share, rule)
        return next((point for point in self.points if (point.gaps, point.share, point.rule) == where), None)


class CacheTtlWorld(ReplayWorld):
    """A world whose instances keep prefixes by CacheTTL's rule."""

    def new_instance(self, node: InstanceNode) -> Instance:
        instance = super().new_instance(node)
        instance.state.returns = CacheTtl(instance.state)
        return instance


def blocks_for(workload: Workload, users: int, share: float, block_tokens: int) -> int:
    """Blocks that hold the KV of ``share`` of ``users`` whole sessions."""
    whole = [context_tokens(session)[-1] for session in workload.sessions]
    return int(share * users * sum(whole) / len(whole) / block_tokens)


def measure_point(plan: Plan, gaps: str, share: float, rule: str, seed: int = 0) -> Point:
    """Simulate one rule."""
    workload = agent_workload(plan.shape, gaps, plan.users, plan.sessions, seed)
    machine, block_tokens = plan.machine, plan.machine.geometry.block_tokens
    # the KV of sessions that have ended stays: an unlimited cache holds all, and what their prompts share many times
    fitting = 1.25 * plan.sessions / plan.users if rule == UNLIMITED else share
    machine = dataclasses.replace(machine, hbm_blocks=blocks_for(workload, plan.users, fitting, block_tokens))
    keeps = "off" if rule in (UNLIMITED, LRU) else "auto"
    setup = Setup({Role.COLOCATED: 1}, machine, scheduler=dataclasses.replace(GPU_SCHEDULER, keep_tool_prefixes=keeps))
    world = (CacheTtlWorld if rule == CACHE_TTL else ReplayWorld)(setup, workload)
    world.run_workload()
    return _point(gaps, 0.0 if rule == UNLIMITED else share, rule, world)


def _point(gaps: str, share: float, rule: str, world: ReplayWorld) -> Point:
    served = world.clients.served
    first_ns: dict[str, int] = {}
    last_ns: dict[str, int] = {}
    for request in served:
        first_ns.setdefault(request.session, request.scheduled_ns)
        last_ns[request.session] = request.end_ns or 0
    times = spread_of((last_ns[name] - first_ns[name]) / NS_PER_S for name in first_ns)
    waits_ns = [request.first_ns - request.scheduled_ns for request in served if request.first_ns is not None]
    cached = sum(request.cached_tokens for request in served)
    return Point(
        gaps, share, rule, times.mean, times.p95, max(waits_ns) / NS_PER_S,
        cached / sum(request.prompt_tokens for request in served),
        sum(node.machine.state.counters.delayed_turns for node in world.instances),
        sum(not request.answered for request in served),
    )  # fmt: skip


def mean_point(points: list[Point]) -> Point:
    """Of runs that differ in their seeds."""
    count = len(points)
    return dataclasses.replace(
        points[0],
        session_s=sum(point.session_s for point in points) / count,
        session_p95_s=sum(point.session_p95_s for point in points) / count,
        ttft_max_s=max(point.ttft_max_s for point in points),
        hit_rate=sum(point.hit_rate for point in points) / count,
        delayed_turns=sum(point.delayed_turns for point in points),
        unanswered=sum(point.unanswered for point in points),
    )


class AgentStudy(Study[AgentResults]):
    """Session times and hit rates by rule, gaps and memory."""

    title = "memserve sim agents"

    def __init__(self, plan: Plan, results: AgentResults) -> None:
        super().__init__(results)
        self._plan = plan

    def fill_results(self, tell: Tell) -> None:
        plan = self._plan
        for gaps in plan.gaps:
            for share in plan.shares:
                for rule in plan.rules:
                    if self.results.find_point(gaps, share, rule) is None:
                        points = [measure_point(plan, gaps, share, rule, seed) for seed in range(plan.seeds)]
                        self.results.points.append(point := mean_point(points))
                        tell(f"{gaps} {share:.2f} {rule}: {point.session_s:.0f} s, {point.hit_rate:.1%} hit")

    def head_lines(self) -> Iterator[str]:
        plan = self._plan
        yield f"* {plan.users} agents at a time, {plan.sessions} sessions, seeds 0 to {plan.seeds - 1}"

    def make_tables(self) -> Iterator[Table]:
        columns = (
            "rule", "KV for", "session mean (s)", "of last use", "p95 (s)", "hit rate", "of unlimited",
            "longest wait (s)", "delayed turns",
        )  # fmt: skip
        for gaps, points in groupby(self.results.points, key=lambda point: point.gaps):
            yield Table(f"Gaps: {gaps}", columns, [self._row_of(point) for point in points])

    def _row_of(self, point: Point) -> list[Cell]:
        results = self.results
        lru = results.find_point(point.gaps, point.share, LRU)
        best = results.find_point(point.gaps, point.share, UNLIMITED)
        return [
            point.rule, f"{point.share:.0%}" if point.share else "all", f"{point.session_s:.1f}",
            f"{point.session_s / lru.session_s:.2f}" if lru is not None else "", f"{point.session_p95_s:.0f}",
            f"{point.hit_rate:.1%}", f"{point.hit_rate / best.hit_rate:.2f}" if best is not None else "",
            f"{point.ttft_max_s:.0f}", point.delayed_turns,
        ]  # fmt: skip

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()
