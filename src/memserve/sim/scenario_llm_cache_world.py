"""A router, one instance and a client under the constants of llm-serving-cache.

::

    latency = 5 ms routing + 1 ms * uncached prompt tokens + 1 ms * output tokens
              the dispatch    the prefill, whole               each token that is drawn

KV of ten tokens is 1 MB. The source's block of 16 MB, 160 tokens, is what admission counts in; the instance's own
blocks have 40 tokens, since whole blocks are reused and a hit of 840 tokens is not a whole number of 160. A prompt that
is cached as a whole has its last token computed again, for its logits: that is what the first output token costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memserve.cluster.machine import Cluster
from memserve.cluster.report import AdmissionStats
from memserve.config import AdmissionConfig, ClusterConfig, InstanceConfig, MemberConfig, PoolConfig, SchedulerConfig
from memserve.errors import check
from memserve.instance.events import StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.kv_transfer.events import CancelPulls, PullPages, SealPages
from memserve.messages import AnyMessage, Dispatch, Peer, PeerInfo
from memserve.serving import RequestArrived
from memserve.sim.clock import Clock
from memserve.sim.network import Network
from memserve.sim.nodes import ROUTER_ADDRESS, InstanceNode, RouterNode
from memserve.sim.process import Process
from memserve.types import Caching, KVGeometry, Request, Role, StopParams, TokenArray, TokenOutput
from memserve.units import NS_PER_MS, NS_PER_S

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
    """A request: how much of its prompt the one before it, or one before the measurement, has left in the cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Answer(NamedTuple):
    """What came of one; ``latency_ms`` is 0 for one that was rejected."""

    latency_ms: int
    cached_tokens: int
    rejected: str


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    name: str
    asks: tuple[Ask, ...]
    before: tuple[Ask, ...] = ()
    """Asked first and not counted: what they have left behind is inactive."""
    caching: Caching = Caching.PD_CACHING_3
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    units: int = FREE_UNITS
    """KV memory, in blocks of 16 MB."""


class SourceDevice:
    """Takes 1 ms for each token of which KV is computed, and 1 ms for each that is drawn."""

    layers = 1

    def __init__(self) -> None:
        self._spent_ns = 0

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` takes. The last known token alone is part of drawing the next one."""
        rows = zip(plan.counts, plan.sample_slots, strict=True)
        self._spent_ns = TOKEN_NS * sum((count if count > 1 else 0) + len(drawn) for count, drawn in rows)
        return self._spent_ns

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """Layers are not told one by one."""
        return False

    def run(self, plan: StepPlan) -> StepFinished:
        """It has ended: every token is the same."""
        return StepFinished(plan.step_id, [1] * sum(map(len, plan.sample_slots)), self._spent_ns)


class NoPort:
    """A single instance moves no pages to others."""

    def seal(self, job: SealPages) -> None:
        """Never asked for."""
        check(False, f"no node takes {job}")

    def pull(self, job: PullPages) -> None:
        """Never asked for."""
        check(False, f"no node gives {job}")

    def cancel(self, job: CancelPulls) -> None:
        """There is nothing to cancel."""


class SourceNetwork(Network):
    """Routing is the way to the instance; all else takes no time."""

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        """5 ms for a dispatch."""
        return ROUTING_NS if isinstance(message, Dispatch) else 0


class SourceWorld:
    """A router, one instance, and a client that asks."""

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

    # -- what nodes are made of

    def new_cluster(self) -> Cluster:
        """The router's machine."""
        return Cluster(ClusterConfig(self.case.caching, "affinity", admission=self.case.admission))

    def _config(self) -> InstanceConfig:
        pool = PoolConfig(self.case.units * UNIT_TOKENS // BLOCK_TOKENS, 0, self.case.caching is not Caching.OFF)
        whole = SchedulerConfig(max_running=256, max_step_tokens=1 << 20)
        return InstanceConfig(CONTEXT_TOKENS, "source", pool, whole)

    def new_instance(self, node: InstanceNode) -> Instance:
        """The instance's machine."""
        return Instance(self._config(), BLOCK_TOKENS, me=node.peer, geometry=GEOMETRY)

    def new_device(self, node: InstanceNode) -> SourceDevice:
        """Its device."""
        return SourceDevice()

    def new_port(self, node: InstanceNode) -> NoPort:
        """There is no other node."""
        return NoPort()

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """What it tells of itself when it joins."""
        pool, name = self._config().pool, node.peer.name
        context = node.machine.context_tokens
        return PeerInfo(
            node.peer, node.role, f"virtual://{name}", "source", GEOMETRY, pool.hbm_blocks, 0, context, pool.caching
        )

    # -- the client

    def ask(self, ask: Ask) -> str:
        """Send a request now; its name. It begins as the last one that was to be a miss did."""
        name = f"req-{len(self._asked_ns) + 1}"
        fresh = np.full(ask.prompt_tokens, 10 + len(self._asked_ns), np.int32)
        prompt = np.concatenate((self._shared[: ask.cached_tokens], fresh[ask.cached_tokens :]))
        if not ask.cached_tokens:
            self._shared = fresh
        self._asked_ns[name] = self.clock.now
        self.router.submit(RequestArrived(Request(name, prompt, stop=StopParams(ask.output_tokens))))
        return name

    def wait_for(self, names: Sequence[str]) -> list[Answer]:
        """Run until all of them have ended."""
        end_ns = self.clock.now + GIVE_UP_NS
        while not all(name in self.answers for name in names):
            check(self.clock.now < end_ns and self.clock.run_one(), f"no answer to {names}")
        return [self.answers[name] for name in names]

    def emitted(self, output: TokenOutput) -> None:
        """Tokens for a client; the last ones end its request."""
        name = output.request_id
        self._cached[name] = max(self._cached.get(name, 0), output.cached_tokens)
        if output.finish_reason is not None:
            latency_ns = self.clock.now - self._asked_ns[name]
            self.answers[name] = Answer(latency_ns // NS_PER_MS, self._cached[name], "")

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """A request is rejected."""
        self.answers[request_id] = Answer(0, 0, reason)

    def handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """After each event: the machine must not contradict itself."""

    def say(self, line: str, what: object = "") -> None:
        """Nothing listens."""

    def admission(self) -> AdmissionStats:
        """Totals of the router's admission."""
        return self.router.machine.stats().admission
