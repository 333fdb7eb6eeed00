"""Adapters that come and go behind several routers: no call is answered before all of them know, and no instance lets
go of what a request at any of them has."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from random import Random
from typing import Any

import pytest

from cluster_world import a_request, info
from memserve.base.config import ClusterConfig, MemberConfig
from memserve.base.types import ClockTicked, FinishReason, Role, TokenOutput, salt_of
from memserve.base.units import NS_PER_S
from memserve.protocol.member_events import ChangeGeneration, GenerationChanged
from memserve.protocol.messages import (
    AdapterFiles,
    AdaptersHeld,
    AdaptersNamed,
    Dispatch,
    Heartbeat,
    HoldAdapters,
    Join,
    NameAdapters,
    RequestRefused,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.router.events import (
    AdapterAnswered,
    AdapterNamed,
    AdapterNamesChanged,
    AdapterUnnamed,
    MessageArrived,
    RequestArrived,
    Send,
)
from memserve.router.follower import NO_KV, Follower, FollowerStarts
from memserve.router.machine import Cluster
from memserve.router.members.adapters import ASK_OWNER, NOT_KNOWN, FollowedNames

ONE, TWO = AdapterFiles("one", "/adapters/one", "c0de"), AdapterFiles("two", "/adapters/two", "5a17")
OWNER = Peer(ROUTER, 5)
BEAT_NS = NS_PER_S // 2
R2, R3 = "router-2", "router-3"


class World:
    """An owner, followers, and instances that hold what they are told and compute nothing by themselves. Messages
    arrive at once, unless one end is cut off."""

    def __init__(self, *followers: str, instances: tuple[str, ...] = ("c1",)) -> None:
        self.now_ns = 0
        self.owner = Cluster(ClusterConfig())
        self.followers: dict[str, Follower] = {}
        self.infos: dict[str, PeerInfo] = {}
        self.held: dict[str, set[str]] = {}
        self._wanted: dict[str, set[str]] = {}
        self._asked: dict[str, Peer] = {}
        self.names: dict[str, dict[str, str]] = {}
        self.answers: dict[int, str] = {}
        self.cut: set[str] = set()
        self.running: dict[str, tuple[str, str, str]] = {}  # by attempt: router, instance, digest
        self.calls = 0
        self._messages: deque[tuple[Peer, Peer, Any]] = deque()
        for name in instances:
            self.add_instance(name)
        for name in followers:
            self.add_follower(name)
        self.beat()

    def add_instance(self, name: str) -> None:
        self.infos[name], self.held[name] = info(name, Role.COLOCATED), set()
        self.post(ROUTER, MessageArrived(self.infos[name].peer, Join(self.infos[name])))

    def add_follower(self, name: str, generation: int = 1) -> None:
        me = PeerInfo(Peer(name, generation), Role.ROUTER, "", "", NO_KV, 0, 0, 0, False)
        self.followers[name] = Follower(me, ("tcp://owner",), ClusterConfig(), MemberConfig())
        self.names[name] = {}
        self.post(name, FollowerStarts(f"tcp://{name}"))

    def peer(self, name: str) -> Peer:
        if name == ROUTER:
            return OWNER
        return self.infos[name].peer if name in self.infos else self.followers[name].member.info.peer

    def post(self, name: str, event: Any) -> None:
        """To one router, with all that follows."""
        self._handle(name, event)
        while self._messages:
            sender, to, message = self._messages.popleft()
            if sender.name in self.cut or to.name in self.cut:
                continue
            if to.name in self.infos:
                self._hear(to.name, sender.name, message)
            elif to.name == ROUTER or (to.name in self.followers and to in (Peer(to.name, 0), self.peer(to.name))):
                self._handle(to.name, MessageArrived(sender, message))

    def _handle(self, name: str, event: Any) -> None:
        machine = self.owner if name == ROUTER else self.followers[name]
        actions = machine.handle(event, self.now_ns)
        machine.check_invariants()
        for action in actions:
            if isinstance(action, Send):
                self._messages.append((self.peer(name), action.to, action.message))
            elif isinstance(action, AdapterNamesChanged):
                self.names[name] = {files.name: files.digest for files in action.adapters}
            elif isinstance(action, AdapterAnswered):
                self.answers[action.call_id] = action.error
            elif isinstance(action, ChangeGeneration):
                me = PeerInfo(Peer(name, action.generation_min), Role.ROUTER, "", "", NO_KV, 0, 0, 0, False)
                self._handle(name, GenerationChanged(me))

    def _hear(self, name: str, router: str, message: Any) -> None:
        """An instance keeps an adapter as long as one of its requests has it."""
        if isinstance(message, HoldAdapters):
            wanted = self._wanted[name] = {files.digest for files in message.adapters}
            self._drop_unused(name, wanted)
            self._messages.append((self.peer(name), OWNER, AdaptersHeld(tuple(sorted(wanted)))))
        elif isinstance(message, Dispatch):
            attempt, digest = message.request.request_id, message.request.adapter
            if digest in self.held[name]:
                self.running[attempt] = (router, name, digest)
                return
            is_member = router == ROUTER or self.owner._registry.get(self.peer(router)) is not None
            was_member = self.peer(router) == self._asked[attempt.partition("#")[0]]
            assert not (is_member and was_member), f"{name} does not have {digest}, and {router} was never given up"
            self._messages.append(
                (self.peer(name), self.peer(router), RequestRefused(attempt, "no such adapter", None))
            )

    def _drop_unused(self, name: str, loaded: Set[str] = frozenset()) -> None:
        used = {digest for _, at, digest in self.running.values() if at == name}
        self.held[name] = loaded | (self.held[name] & (self._wanted.get(name, set()) | used))

    def beat(self) -> None:
        """Time for the heartbeats of all."""
        self.now_ns += BEAT_NS
        for router in (ROUTER, *self.followers):
            for name, of in self.infos.items():
                if router not in self.cut and name not in self.cut:
                    self.post(router, MessageArrived(of.peer, Heartbeat(Load())))
            self.post(router, ClockTicked())

    def wait(self, seconds: int) -> None:
        for _ in range(seconds * NS_PER_S // BEAT_NS):
            self.beat()

    # -- clients

    def load(self, files: AdapterFiles) -> int:
        self.calls += 1
        self.post(ROUTER, AdapterNamed(self.calls, files))
        return self.calls

    def unload(self, name: str, *, is_fixed: bool = False) -> int:
        self.calls += 1
        self.post(ROUTER, AdapterUnnamed(self.calls, name, is_fixed))
        return self.calls

    def ask(self, router: str, request_id: str, digest: str) -> None:
        self._asked[request_id] = self.peer(router)
        self.post(router, RequestArrived(a_request(request_id, range(9), salt=salt_of("", digest))))

    def end(self, attempt: str) -> None:
        router, at, _ = self.running.pop(attempt)
        self._drop_unused(at)
        output = TokenOutput(attempt, 0, (1,), finish_reason=FinishReason.LENGTH)
        self.post(router, MessageArrived(self.peer(at), Tokens((output,))))


def test_calls_wait_until_every_router_knows_the_names() -> None:
    world = World(R2, R3)
    world.cut = {R3}
    call = world.load(ONE)
    assert call not in world.answers and world.names[R2] == {"one": "c0de"} and not world.names[R3]
    world.cut = set()
    world.beat()
    assert world.answers[call] == "" and world.names[R3] == {"one": "c0de"}
    world.cut = {R2}
    call = world.unload("one")
    assert call not in world.answers and not world.names[R3]
    world.wait(20)  # until it is taken to be dead
    assert world.answers[call] == ""


def test_router_that_joins_later_is_told_the_names() -> None:
    world = World()
    assert world.answers[world.load(ONE)] == world.answers[world.unload("kept", is_fixed=True)] == ""
    world.add_follower(R2)
    assert world.names[R2] == {"one": "c0de"}
    world.load(AdapterFiles("kept", "/adapters/two", "5a17"))
    assert world.names[R2] == {"one": "c0de", "kept": "5a17"}


def test_router_that_knows_nothing_of_names_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older release: it lives, and does not answer."""
    monkeypatch.setattr(FollowedNames, "on_owner_names", lambda *_: None)
    world = World(R2)
    call = world.load(ONE)
    world.wait(310)
    assert world.answers[call] == NOT_KNOWN


def test_new_instance_is_named_to_routers_when_it_has_all() -> None:
    world = World(R2)
    world.load(ONE)
    world.cut = {"c2"}
    world.add_instance("c2")
    world.beat()
    follower = world.followers[R2].cluster
    assert {view.peer.name for view in follower.instances()} == {"c1"}
    world.cut = set()
    world.beat()
    world.beat()
    assert {view.peer.name for view in follower.instances()} == {"c1", "c2"}
    for number in range(8):
        world.ask(R2, f"r{number}", ONE.digest)
    assert {at for _, at, _ in world.running.values()} == {"c1", "c2"}


def test_adapter_stays_for_requests_of_any_router() -> None:
    """One waits at a follower for an instance that has room; the name is gone meanwhile."""
    world = World(R2)
    world.load(ONE)
    world.ask(R2, "r", ONE.digest)
    (attempt,) = world.running
    world.unload("one")
    world.wait(3)
    assert world.held["c1"] == {"c0de"} and world.owner._membership.adapters.wanted == (ONE,)
    world.end(attempt)
    world.wait(3)
    assert not world.owner._membership.adapters.wanted and not world.held["c1"]


def test_router_that_was_cut_off_forgets_names_that_are_gone() -> None:
    """While it counts as dead the last name goes; nothing is left that the owner would tell a new one."""
    world = World(R2)
    world.load(ONE)
    world.cut = {R2}
    world.wait(20)
    assert world.answers[world.unload("one")] == ""
    world.cut = set()
    world.wait(20)
    assert not world.names[R2] and not world.held["c1"]


def test_follower_itself_names_nothing() -> None:
    world = World(R2)
    world.post(R2, AdapterNamed(7, ONE))
    world.post(R2, AdapterUnnamed(8, "one"))
    assert world.answers == {7: ASK_OWNER, 8: ASK_OWNER} and not world.held["c1"]


def test_late_names_change_nothing() -> None:
    world = World(R2)
    world.load(ONE)
    world.load(TWO)
    follower = world.followers[R2]
    for message in (NameAdapters((ONE,), (), 1), NameAdapters((), (), 0)):
        assert not follower.handle(MessageArrived(OWNER, message), world.now_ns)
    assert world.names[R2] == {"one": "c0de", "two": "5a17"}
    later = follower.handle(MessageArrived(Peer(ROUTER, 6), NameAdapters((TWO,), (), 0)), world.now_ns)
    assert later == [
        AdapterNamesChanged((TWO,), ()),
        Send(Peer(ROUTER, 6), AdaptersNamed(0)),
    ], "another owner counts anew, and is answered when clients find what it says"


@pytest.mark.parametrize("seed", range(40))
def test_adapters_come_and_go_in_random_lives(seed: int) -> None:
    """Whatever is cut off, and whatever joins: what a call has answered holds at each router that is a member, and no
    instance gets a request without its adapter (:meth:`World._hear`)."""
    random, world = Random(seed), World(R2, R3, instances=("c1", "c2"))
    truth: dict[str, str] = {}
    sent: dict[int, dict[str, str]] = {}
    for turn in range(60):
        if all(call in world.answers for call in sent) and random.random() < 0.5:
            name, digest = random.choice("abc"), random.choice(("c0de", "5a17", "f00d"))
            if name in truth and random.random() < 0.5:
                truth = {key: value for key, value in truth.items() if key != name}
                call = world.unload(name)
            else:
                truth = truth | {name: digest}
                call = world.load(AdapterFiles(name, f"/{digest}", digest))
            sent[call] = truth
        router = random.choice((ROUTER, R2, R3))
        known = truth if router == ROUTER else world.names[router]
        if known and router not in world.cut:
            world.ask(router, f"r{turn}", random.choice(sorted(known.values())))
        if world.running and random.random() < 0.6:
            world.end(random.choice(sorted(world.running)))
        if random.random() < 0.2:
            world.cut = {random.choice((R2, R3))} if random.random() < 0.5 else set()
        if turn == 30:
            world.add_instance("c3")
        for _ in range(random.randrange(3)):
            world.beat()
    world.cut = set()
    world.wait(40)
    for attempt in sorted(world.running):
        world.end(attempt)
    world.wait(5)
    assert all(world.answers[call] == "" for call in sent)
    assert all(world.names[name] == truth for name in (R2, R3))
    assert all(held == set(truth.values()) for held in world.held.values())
