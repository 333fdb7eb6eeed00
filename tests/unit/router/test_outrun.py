"""Two routers choose the same instance before either knows of the other's choice: the second one chooses again."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster_world import BLOCK, a_request, info
from fleet_world import GEOMETRY, fleet_config
from memserve.base.config import ClusterConfig
from memserve.base.types import KVGeometry, Request, Role
from memserve.instance.machine import Instance
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.messages import Dispatch, Heartbeat, Join, JoinAccepted, RequestRefused
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve.router.events import RequestArrived
from memserve.router.machine import Cluster

OWNER, R2 = Peer("router", 5), Peer("router-2", 1)
FOLLOWER = PeerInfo(R2, Role.ROUTER, "", "", KVGeometry(1, 1, 1, 1, "float32", 1), 0, 0, 0, False)
MS = 1_000_000
LONG, SHORT = 40, 4


def prompt_of(tokens: int, first: int) -> np.ndarray:
    """Prompts with different first tokens share nothing."""
    return (np.arange(tokens) * 3 + first) % 40


# -- an instance


class Node:
    """An instance of a cluster, whose steps never end: what comes waits."""

    def __init__(self, *followers: PeerInfo) -> None:
        self.machine = Instance(fleet_config(step_tokens=SHORT), BLOCK, self_peer=Peer("a", 1), geometry=GEOMETRY)
        self.hears(OWNER, JoinAccepted(followers))

    def hears(self, router: Peer, message: Any) -> list[Send]:
        actions = self.machine.handle(MessageArrived(router, message), 0)
        self.machine.check_invariants()
        return [action for action in actions if isinstance(action, Send)]

    def ordered(self, router: Peer, name: str, tokens: int, known_tokens: int | None) -> list[RequestRefused]:
        """What the router of the order is answered at once."""
        order = Dispatch(a_request(name, prompt_of(tokens, len(name))), known_tokens=known_tokens)
        said = self.hears(router, order)
        return [send.message for send in said if send.to == router and isinstance(send.message, RequestRefused)]

    @property
    def runs(self) -> list[str]:
        return [*self.machine.state.groups]


def test_stale_dispatch_is_refused_with_current_load() -> None:
    it = Node(FOLLOWER)
    assert not it.ordered(OWNER, "first", LONG, 0)
    (refused,) = it.ordered(R2, "second", LONG, 0)
    assert refused.request_id == "second" and it.runs == ["first"]
    assert refused.load is not None and refused.load.prefill_tokens_queued == LONG
    assert not it.ordered(R2, "second", LONG, refused.load.prefill_tokens_queued), "it knows, and comes all the same"
    assert it.runs == ["first", "second"]


def test_forced_dispatch_runs_at_any_load() -> None:
    it = Node(FOLLOWER)
    it.ordered(OWNER, "first", LONG, 0)
    assert not it.ordered(R2, "second", LONG, None) and it.runs == ["first", "second"]


def test_slightly_stale_dispatch_is_accepted() -> None:
    """Less than a step, or than half of what it knows."""
    it = Node(FOLLOWER)
    it.ordered(OWNER, "first", SHORT, 0)
    assert not it.ordered(R2, "second", SHORT, 0)
    it.ordered(OWNER, "another long one", LONG, None)
    assert not it.ordered(R2, "third", SHORT, (LONG + 2 * SHORT) * 2 // 3 + 1)
    assert it.ordered(R2, "fourth", SHORT, LONG // 2)


def test_single_router_dispatch_is_never_stale() -> None:
    it = Node()
    it.ordered(OWNER, "first", LONG, 0)
    assert not it.ordered(OWNER, "second", LONG, 0) and it.runs == ["first", "second"]


# -- a router


class Router:
    """A cluster machine with two instances."""

    def __init__(self, **config: Any) -> None:
        self.machine, self.now = Cluster(ClusterConfig(**config)), 0
        for name in ("a", "b"):
            self.hears(name, Join(info(name, Role.COLOCATED)))

    def handle(self, event: Any) -> list[tuple[str, Dispatch]]:
        self.now += MS
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return [(a.to.name, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, Dispatch)]

    def hears(self, name: str, message: Any) -> list[tuple[str, Dispatch]]:
        return self.handle(MessageArrived(Peer(name, 1), message))

    def asked(self, name: str, tokens: int) -> tuple[str, Dispatch]:
        request: Request = a_request(name, prompt_of(tokens, len(name)))
        (order,) = self.handle(RequestArrived(request))
        return order

    def outrun(self, at: str, order: Dispatch, tokens: int) -> list[tuple[str, Dispatch]]:
        load = Load(prefill_tokens_queued=tokens, hbm_blocks_available=16)
        return self.hears(at, RequestRefused(order.request.request_id, "outrun", 0.0, load))


def test_dispatch_carries_the_known_load() -> None:
    it = Router()
    it.hears("b", Heartbeat(Load(prefill_tokens_queued=1000, hbm_blocks_available=16)))
    assert [it.asked(name, LONG)[1].known_tokens for name in ("r", "rr", "rrr")] == [0, LONG, 2 * LONG]


def test_stale_placement_is_rerouted_without_costing_an_attempt() -> None:
    it = Router(attempts_max=1)
    at, order = it.asked("r", LONG)
    other = "b" if at == "a" else "a"
    assert order.known_tokens == 0
    ((where, again),) = it.outrun(at, order, 5000)
    assert where == other and again.known_tokens == 0
    assert it.machine.stats().counters.attempts_failed == {"outrun": 1}
    assert it.asked("another", LONG)[0] == other, "it has learnt what waits at the first"


def test_stale_placement_stays_if_others_are_busier() -> None:
    it = Router()
    it.hears("b", Heartbeat(Load(prefill_tokens_queued=9000, hbm_blocks_available=16)))
    at, order = it.asked("r", LONG)
    assert at == "a"
    assert [(where, again.known_tokens) for where, again in it.outrun(at, order, 5000)] == [("a", 5000)]


def test_after_some_times_it_runs_where_it_comes() -> None:
    it = Router()
    at, order = it.asked("r", LONG)
    waits = 1000
    while order.known_tokens is not None:
        ((at, order),) = it.outrun(at, order, waits)
        waits *= 2
    assert waits == 8000, "three times"
    assert it.outrun(at, order, waits) != [(at, order)], "an instance that refuses all the same is avoided"
    assert it.machine.stats().counters.attempts_failed["refused"] == 1


def test_repeated_refusal_of_abandoned_attempt_is_ignored() -> None:
    it = Router()
    at, order = it.asked("r", LONG)
    it.outrun(at, order, 5000)
    assert it.outrun(at, order, 5000) == []
    assert it.machine.stats().counters.attempts_failed == {"outrun": 1}
