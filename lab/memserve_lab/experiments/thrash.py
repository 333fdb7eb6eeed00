"""``memserve sim thrash``: what happens when more conversations are held at once than fit into memory.

Closed loop: each client asks the next turn of its conversation as soon as the last answer has ended, and begins
another conversation after the last turn. A conversation that *fits* has all of its KV in HBM; ``1x`` is as many
clients as conversations fit. A device that computes every turn's history again is slower by the ratio of a prompt to
a turn: that is the cliff which a cache falls off when it is too small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve_lab.bench.report_writer import Cell, Drawing, Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.sim.replay.clients import Served
from memserve_lab.sim.replay.setup import Setup
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, Session, Span, Turn, Workload

BLOCK_TOKENS = 16
SESSIONS_PER_CLIENT = 60
"""More conversations than a client holds in a run."""


@dataclass(frozen=True, slots=True)
class Talk:
    """The shape of all conversations, in tokens."""

    turns: int = 6
    first_tokens: int = 4000
    """Of the first prompt."""
    turn_tokens: int = 500
    """Of each further turn."""
    answer_tokens: int = 64

    @property
    def tokens(self) -> int:
        """Of a whole conversation."""
        return self.first_tokens + (self.turns - 1) * self.turn_tokens + self.turns * self.answer_tokens


@dataclass(frozen=True, slots=True)
class Contender:
    """One line of the plot."""

    name: str
    setup: Setup


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run."""

    contenders: tuple[Contender, ...]
    multiples: tuple[float, ...]
    """Clients, in multiples of the conversations that fit."""
    talk: Talk
    warm_s: float
    """Virtual seconds before the measurement."""
    measured_s: float

    @property
    def fitting(self) -> int:
        """Conversations that fit into the HBM of all instances."""
        setup = self.contenders[0].setup
        machine = setup.machine
        tokens = sum(setup.instances.values()) * machine.hbm_blocks * machine.geometry.block_tokens
        if tokens < self.talk.tokens:
            message = f"a conversation of {self.talk.tokens:,} tokens does not fit into memory for {tokens:,}"
            raise UserError(message, hint="give more --kv-blocks, or shorter conversations")
        return tokens // self.talk.tokens


@dataclass(frozen=True, slots=True)
class Point:
    """One contender with one number of clients, over the measured time."""

    contender: str
    multiple: float
    clients: int
    requests_per_s: float
    hit_rate: float
    """Share of the prompts' tokens that were not computed."""
    store_rate: float
    """Share of the prompts' tokens that came from a store."""
    ttft_mean_s: float
    rejected: int


@dataclass(slots=True, kw_only=True)
class ThrashResults(StudyResults):
    """All points."""

    fitting: int = 0
    talk: Talk = field(default_factory=Talk)
    points: list[Point] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.points

    def points_of(self, contender: str) -> list[Point]:
        """The points of one line, in the order of clients."""
        return [point for point in self.points if point.contender == contender]

    @property
    def contenders(self) -> list[str]:
        """Names of the lines."""
        return list(dict.fromkeys(point.contender for point in self.points))


def conversations(talk: Talk, clients: int, count: int) -> Workload:
    """``count`` conversations for ``clients`` clients, no two with a common block. The first ones of the clients are of
    all lengths, so that later ones do not all begin at once."""
    sessions, first = [], 1
    for number in range(count):
        turns = number % talk.turns + 1 if number < clients else talk.turns
        requests = []
        for turn in range(turns):
            tokens = talk.turn_tokens if turn else talk.first_tokens
            requests.append(Turn(Blocks(BLOCK_TOKENS, (Span(first, tokens),)), talk.answer_tokens))
            first += -(-tokens // BLOCK_TOKENS)
        sessions.append(Session(f"talk-{number}", tuple(requests)))
    return Workload("conversations", "generated", tuple(sessions), users=clients)


def measure_point(contender: Contender, plan: Plan, multiple: float) -> Point:
    """Simulate one contender with one number of clients."""
    clients = max(1, round(multiple * plan.fitting))
    setup = contender.setup
    setup = dataclasses.replace(setup, around=dataclasses.replace(setup.around, retries=True))
    world = ReplayWorld(setup, conversations(plan.talk, clients, clients * SESSIONS_PER_CLIENT))
    world.run_workload(plan.warm_s + plan.measured_s)
    return _point(contender.name, multiple, clients, world.clients.served, plan)


def _point(name: str, multiple: float, clients: int, served: Sequence[Served], plan: Plan) -> Point:
    from_ns, until_ns = plan.warm_s * NS_PER_S, (plan.warm_s + plan.measured_s) * NS_PER_S
    finished = [request for request in served if request.end_ns is not None and from_ns <= request.end_ns < until_ns]
    answered = [request for request in finished if request.answered]
    prompts = max(1, sum(request.prompt_tokens for request in answered))
    stored = sum(
        min(request.fetched_tokens, request.cached_tokens)
        for request in answered
        if request.fetched_tier in ("store", "ssd")
    )
    waits_ns = [request.first_ns - request.scheduled_ns for request in answered if request.first_ns is not None]
    return Point(
        name, multiple, clients, len(answered) / plan.measured_s,
        sum(request.cached_tokens for request in answered) / prompts,
        stored / prompts, sum(waits_ns) / max(1, len(waits_ns)) / NS_PER_S, len(finished) - len(answered),
    )  # fmt: skip


class ThrashStudy(Study[ThrashResults]):
    """Requests a second and hit rate against the number of clients."""

    title = "memserve sim thrash"

    def __init__(self, plan: Plan, results: ThrashResults) -> None:
        super().__init__(results)
        self._plan = plan
        self.drawings = {
            "thrash": Drawing("Requests a second and hit rate against the conversations held at once.", draw_thrash)
        }

    def fill_results(self, tell: Tell) -> None:
        plan, results = self._plan, self.results
        results.fitting, results.talk = plan.fitting, plan.talk
        for multiple in plan.multiples:
            for contender in plan.contenders:
                point = measure_point(contender, plan, multiple)
                results.points.append(point)
                tell(f"{multiple:g}x {contender.name}: {point.requests_per_s:.2f} requests/s, {point.hit_rate:.0%} hit")

    def head_lines(self) -> Iterator[str]:
        results = self.results
        yield f"* {results.fitting} conversations of {results.talk.tokens:,} tokens fit into HBM (1x)"

    def make_tables(self) -> Iterator[Table]:
        results = self.results
        rows: list[list[Cell]] = [
            [point.contender, f"{point.multiple:g}x", point.clients, f"{point.requests_per_s:.2f}",
             f"{_of_peak(results, point):.0%}", f"{point.hit_rate:.1%}", f"{point.store_rate:.1%}",
             f"{point.ttft_mean_s:.2f}", point.rejected]
            for name in results.contenders for point in results.points_of(name)
        ]  # fmt: skip
        columns = ("setting", "load", "clients", "requests/s", "of peak", "hit rate", "from store", "TTFT mean (s)")
        yield Table("Requests a second against conversations", (*columns, "rejected"), rows)

    def terminal_lines(self) -> Iterator[str]:
        for table in self.make_tables():
            yield from table.terminal_lines()


def _of_peak(results: ThrashResults, point: Point) -> float:
    peak = max(same.requests_per_s for same in results.points_of(point.contender))
    return point.requests_per_s / peak if peak else 0.0


def draw_thrash(pyplot: Any, results: ThrashResults) -> Any:
    """Two panels over one axis: requests a second, hit rate."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    for name in results.contenders:
        points = results.points_of(name)
        multiples = [point.multiple for point in points]
        style: dict[str, Any] = {"marker": "o", "label": name, "linestyle": "--" if "admission" in name else "-"}
        above.plot(multiples, [point.requests_per_s for point in points], **style)
        below.plot(multiples, [100 * point.hit_rate for point in points], **style)
    above.set(ylabel="requests / s", ylim=(0, None))
    below.set(ylabel="hit rate (% of prompt tokens)", ylim=(0, 100))
    below.set_xlabel(f"clients, in multiples of the {results.fitting} conversations that fit into HBM")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.suptitle("Multi-turn clients beyond what fits into memory")
    return figure
