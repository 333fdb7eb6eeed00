"""The experiments of llm-serving-cache on the production machines: a router, one instance and a client.

The source adds up its constants in a formula. Here its requests go through the ``Cluster`` machine (admission, and
placement by ``affinity``) and an ``Instance`` (index, pool, eviction), and a virtual clock times the result::

    latency = 5 ms routing + 1 ms * uncached prompt tokens + 1 ms * output tokens
              the dispatch    the prefill, whole               each token that is drawn

KV of ten tokens is 1 MB. The source's block of 16 MB, 160 tokens, is the unit of admission; the instance's own blocks
have 40 tokens, because whole blocks are reused and a hit of 840 tokens is not a multiple of 160. A prompt that is
cached as a whole has its last token recomputed for the logits: that is the cost of the first output token.

``memserve sim --scenario NAME``: the tables of published simulations, from the production machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memserve.base.config import (
    AdmissionConfig,
    ClusterConfig,
    InstanceConfig,
    MemberConfig,
    PoolConfig,
    SchedulerConfig,
)
from memserve.base.errors import UserError, check
from memserve.base.types import Admission, Caching, KVGeometry, Request, Role, StopParams, TokenArray, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S, ceil_div
from memserve.instance.events import StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.kv.transfer.events import CancelPulls, PullPages, SealPages
from memserve.protocol.events import RequestArrived
from memserve.protocol.messages import AnyMessage, Dispatch
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.machine import Cluster
from memserve.router.report import AdmissionStats
from memserve_lab.bench.report_writer import Table
from memserve_lab.bench.study import Study, StudyResults, Tell
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.nodes import ROUTER_ADDRESS, InstanceNode, RouterNode
from memserve_lab.sim.process import Network, Process

ROUTING_NS = 5 * NS_PER_MS
TOKEN_NS = NS_PER_MS
TOKENS_A_MB = 10
UNIT_MB = 16
FREE_MB = 500
BLOCK_TOKENS = 40
GEOMETRY = KVGeometry(25, 10, 100, 100, "bfloat16", BLOCK_TOKENS)
"""100,000 bytes a token."""
CONTEXT_TOKENS = 16_384
UNIT_TOKENS = UNIT_MB * TOKENS_A_MB
FREE_UNITS = FREE_MB // UNIT_MB
GIVE_UP_NS = 600 * NS_PER_S


class Ask(NamedTuple):
    """A request: how much of its prompt an earlier request has left in the cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Answer(NamedTuple):
    """The end of a request; ``latency_ms`` of a rejected one is 0."""

    latency_ms: int
    cached_tokens: int
    rejected: str


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    name: str
    asks: tuple[Ask, ...]
    before: tuple[Ask, ...] = ()
    """Requests sent first and not counted: their KV is inactive."""
    caching: Caching = Caching.PD_CACHING_3
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    units: int = FREE_UNITS
    """KV memory, in blocks of 16 MB."""


class SourceDevice:
    """Takes 1 ms for each token whose KV is computed, and 1 ms for each token drawn."""

    layers = 1

    def __init__(self) -> None:
        self._spent_ns = 0

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` takes. Computing only the last known token is part of drawing the next one."""
        rows = zip(plan.counts, plan.sample_slots, strict=True)
        self._spent_ns = TOKEN_NS * sum((count if count > 1 else 0) + len(draft_tokens) for count, draft_tokens in rows)
        return self._spent_ns

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """Layers are not reported one by one."""
        return False

    def lose_rows(self, plan: StepPlan, slots: Iterable[int]) -> None:
        """A single instance waits for no layers of others."""
        check(False, f"slots {slots} wait for other instances")

    def run_plan(self, plan: StepPlan) -> StepFinished:
        """The step has ended: every token is 1."""
        return StepFinished(plan.step_id, [1] * sum(map(len, plan.sample_slots)), self._spent_ns)


class NoPort:
    """A single instance moves no pages to others."""

    def seal_pages(self, job: SealPages) -> None:
        """A single instance offers no pages."""
        check(False, f"no peer takes {job}")

    def pull_pages(self, job: PullPages) -> None:
        """A single instance pulls no pages."""
        check(False, f"no peer gives {job}")

    def cancel_pulls(self, job: CancelPulls) -> None:
        """There is nothing to cancel."""


class SourceNetwork(Network):
    """Routing takes the time of the dispatch; everything else takes none."""

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        """5 ms for a dispatch."""
        return ROUTING_NS if isinstance(message, Dispatch) else 0


class SourceWorld:
    """A router, one instance, and a client."""

    tells = False
    member_config = MemberConfig()
    router_addresses = (ROUTER_ADDRESS,)

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = Clock()
        self.network = SourceNetwork(self.clock)
        self.answers: dict[str, Answer] = {}
        self._asked_ns: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._shared: TokenArray = np.zeros(0, np.int32)
        self.router = RouterNode(self)
        self.network.nodes[self.router.peer.name] = self.router
        self.instance = InstanceNode(self, "node-a", Role.COLOCATED, 0)
        self.network.nodes[self.instance.peer.name] = self.instance
        self.clock.run_until(NS_PER_S)
        check(len(self.router.machine.instances()) == 1, "the instance has not joined")

    # -- parts of the nodes

    def new_cluster(self) -> Cluster:
        return Cluster(ClusterConfig(self.case.caching, "affinity", admission=self.case.admission))

    def _instance_config(self) -> InstanceConfig:
        pool = PoolConfig(self.case.units * UNIT_TOKENS // BLOCK_TOKENS, 0, self.case.caching is not Caching.OFF)
        whole = SchedulerConfig(max_running=256, max_step_tokens=1 << 20)
        return InstanceConfig(CONTEXT_TOKENS, "source", pool, whole)

    def new_instance(self, node: InstanceNode) -> Instance:
        return Instance(self._instance_config(), BLOCK_TOKENS, self_peer=node.peer, geometry=GEOMETRY)

    def new_device(self, node: InstanceNode) -> SourceDevice:
        return SourceDevice()

    def new_port(self, node: InstanceNode) -> NoPort:
        return NoPort()

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """Its description when it joins."""
        pool, name = self._instance_config().pool, node.peer.name
        context = node.machine.context_tokens
        return PeerInfo(
            node.peer, node.role, f"virtual://{name}", "source", GEOMETRY, pool.hbm_blocks, 0, context, pool.caching
        )

    # -- the client

    def send_request(self, ask: Ask) -> str:
        """Send a request now; returns its name. Its cached part is that of the last missed prompt."""
        name = f"req-{len(self._asked_ns) + 1}"
        fresh = np.full(ask.prompt_tokens, 10 + len(self._asked_ns), np.int32)
        prompt = np.concatenate((self._shared[: ask.cached_tokens], fresh[ask.cached_tokens :]))
        if not ask.cached_tokens:
            self._shared = fresh
        self._asked_ns[name] = self.clock.now
        self.router.submit_event(RequestArrived(Request(name, prompt, stop=StopParams(ask.output_tokens))))
        return name

    def wait_for(self, names: Sequence[str]) -> list[Answer]:
        """Run until all of them have ended."""
        end_ns = self.clock.now + GIVE_UP_NS
        while not all(name in self.answers for name in names):
            check(self.clock.now < end_ns and self.clock.run_one(), f"no answer to {names}")
        return [self.answers[name] for name in names]

    def on_output(self, output: TokenOutput) -> None:
        """The router gives tokens to the client; the last ones end its request."""
        name = output.request_id
        self._cached[name] = max(self._cached.get(name, 0), output.cached_tokens)
        if output.finish_reason is not None:
            latency_ns = self.clock.now - self._asked_ns[name]
            self.answers[name] = Answer(latency_ns // NS_PER_MS, self._cached[name], "")

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        self.answers[request_id] = Answer(0, 0, reason)

    def on_handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """After each event, check the machine's invariants."""

    def log_line(self, line: str, detail: object = "") -> None:
        """Not recorded."""

    def admission(self) -> AdmissionStats:
        """Totals of the router's admission."""
        return self.router.machine.stats().admission


def _by_memory(evictions_max: int) -> AdmissionConfig:
    """A prompt's memory is held until it is evicted; generated tokens do not count (the source's model)."""
    return AdmissionConfig(
        Admission.MEMORY, waiting_max=0, output_tokens_max=0, unit_tokens=UNIT_TOKENS, evictions_max=evictions_max
    )


MISS, PREFIX, EXACT = Ask(1200, 200, 0), Ask(1200, 200, 840), Ask(1200, 200, 1200)
INACTIVE = Ask(2000, 1, 0)
CASES = (
    Case("No cache", (MISS,) * 4, caching=Caching.OFF),
    Case("Prefix reuse", (MISS, PREFIX) * 2),
    Case("Exact cache", (EXACT,) * 4, before=(MISS,)),
    Case("GPU-aware", (MISS, PREFIX, Ask(10_000, 200, 0), MISS), admission=_by_memory(0)),
    Case(
        "GPU-aware + eviction", (MISS, PREFIX, Ask(4000, 200, 0), MISS), (INACTIVE,) * 2, admission=_by_memory(1),
        units=FREE_UNITS + 2 * ceil_div(INACTIVE.prompt_tokens, UNIT_TOKENS),
    ),
)  # fmt: skip


class Outcome(NamedTuple):
    """A row's figures, as the source defines them."""

    mean_ms: int
    p95_ms: int
    hit_percent: int
    rejected_percent: int


def outcome(answers: Sequence[Answer]) -> Outcome:
    """The mean is over all requests, cut to whole ms, rejected ones counting 0; p95 is over the served requests."""
    served = sorted(answer.latency_ms for answer in answers if not answer.rejected)
    hits = sum(answer.cached_tokens > 0 for answer in answers)
    count = len(answers)
    p95_ms = served[int(0.95 * len(served))] if served else 0
    return Outcome(sum(served) // count, p95_ms, 100 * hits // count, 100 * (count - len(served)) // count)


def play(case: Case) -> tuple[list[Answer], SourceWorld]:
    """Send the requests one after the other."""
    world = SourceWorld(case)
    for ask in case.before:
        world.wait_for([world.send_request(ask)])
    answers = [world.wait_for([world.send_request(ask)])[0] for ask in case.asks]
    return answers, world


def overload(active_max: int | None, at_once: int = 10) -> tuple[list[Answer], float]:
    """``at_once`` requests, at most ``active_max`` of them admitted; the answers, and requests served a second."""
    admission = AdmissionConfig()
    if active_max is not None:
        admission = AdmissionConfig(Admission.BOUNDED, active_max, waiting_max=0)
    world = SourceWorld(Case("overload", (), caching=Caching.OFF, admission=admission, units=10 * FREE_UNITS))
    started_ns = world.clock.now
    answers = world.wait_for([world.send_request(MISS) for _ in range(at_once)])
    served = sum(not answer.rejected for answer in answers)
    return answers, served / ((world.clock.now - started_ns) / NS_PER_S)


@dataclass(slots=True, kw_only=True)
class ScenarioResults(StudyResults):
    """Rows as text, one list per table."""

    cases: list[tuple[str, ...]] = field(default_factory=list)
    overload: list[tuple[str, ...]] = field(default_factory=list)


class LlmServingCache(Study[ScenarioResults]):
    """The five scenarios of llm-serving-cache, and its overload case."""

    title = "memserve sim --scenario llm-serving-cache"

    def fill_results(self, tell: Tell) -> None:
        results = self.results
        for case in CASES:
            answers, world = play(case)
            result = outcome(answers)
            shares = (f"{result.hit_percent} %", f"{result.rejected_percent} %")
            results.cases.append((case.name, str(result.mean_ms), str(result.p95_ms), *shares))
            results.notes += [f"{case.name}: rejected: {answer.rejected}" for answer in answers if answer.rejected]
            if world.admission().evictions:
                results.notes.append(f"{case.name}: {world.admission().evictions} ended requests were evicted")
        for name, active_max in (("no control", None), ("3 active", 3)):
            answers, served_per_s = overload(active_max)
            rejected = sum(bool(answer.rejected) for answer in answers)
            counts = (str(len(answers) - rejected), str(rejected))
            results.overload.append((name, *counts, str(outcome(answers).p95_ms), f"{served_per_s:.2f}"))

    def make_tables(self) -> Iterator[Table]:
        title = "llm-serving-cache: 5 ms routing, 1 ms a token, 10 tokens a MB, 16 MB a block, 500 MB free"
        columns = ("scenario", "mean (ms)", "p95 (ms)", "hit rate", "rejected")
        yield Table(title, columns, self.results.cases, below="\n".join(self.results.notes))
        columns = ("10 requests at once", "accepted", "rejected", "p95 (ms)", "served/s")
        yield Table("overload: the device computes one token after the other", columns, self.results.overload)


SCENARIOS = {"llm-serving-cache": LlmServingCache}


def open_scenario(name: str, command: str = "") -> LlmServingCache:
    """The study called ``name``, not run yet. Raises :class:`UserError` for an unknown name."""
    if name not in SCENARIOS:
        raise UserError(f"unknown scenario {name!r}", hint=f"one of {', '.join(SCENARIOS)}")
    return SCENARIOS[name](ScenarioResults(command=command, machine={"simulated": "the source's constants"}))
