"""A member around the real instance machine and a literal device, with the real router at the other end."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from fake_instances import GEOMETRY, SECRET
from memserve.base.config import ClusterConfig, InstanceConfig, MemberConfig, PoolConfig, SchedulerConfig
from memserve.base.errors import UserError
from memserve.base.types import FinishReason, Request, Role, SamplingParams, StopParams
from memserve.base.units import NS_PER_MS
from memserve.host.member import MemberLinks, MemberProcess
from memserve.host.router import RouterEngine
from memserve.instance.machine import Instance
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, SealPages
from memserve.protocol.idempotency import AnswerLog, AnswersHeld
from memserve.protocol.member import RouterAddresses
from memserve.protocol.messages import (
    AnyMessage,
    Dispatch,
    Expelled,
    HeartbeatAck,
    Join,
    JoinAccepted,
    PeerJoined,
    RejoinRequest,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.router.machine import Cluster
from memserve.system.process import new_generation
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import Device as DevicePort
from memserve_lab.sim.reference.device import SymbolicDevice
from memserve_lab.sim.reference.oracle import lone_tokens
from ports import free_port
from waiting import eventually

BLOCK, BLOCKS, VOCAB, WAIT_S = 32, 40, 50, 20.0
CONFIG = ClusterConfig(dead_after_ns=2000 * NS_PER_MS, unplaced_ns=10_000 * NS_PER_MS)


BRISK = MemberConfig(beat_ns=50 * NS_PER_MS)
IMPATIENT = replace(BRISK, asks_after_ns=50 * NS_PER_MS, silent_after_ns=600 * NS_PER_MS, turn_ns=200 * NS_PER_MS)
"""Addresses are tried in tenths of seconds."""


class Device(SymbolicDevice, DevicePort):
    """The literal device as a port; each step may be held at a gate."""

    def __init__(self) -> None:
        super().__init__(BLOCK, BLOCKS, 0, vocab=VOCAB)
        self.gate, self.closed = threading.Event(), False
        self.gate.set()

    def execute(self, plan):
        assert self.gate.wait(WAIT_S)
        return self.run_plan(plan)

    def close(self) -> None:
        self.closed = True


class NoPages:
    """A data port that reaches no peer, and says so."""

    def __init__(self, on_pages) -> None:
        self._on_pages = on_pages
        self.peers: set[Peer] = set()
        self.met: list[Peer] = []
        """All that were ever peers."""

    def describe(self, info: PeerInfo) -> PeerInfo:
        return info

    def add_peer(self, info: PeerInfo) -> None:
        self.peers.add(info.peer)
        self.met.append(info.peer)

    def remove_peer(self, peer: Peer) -> None:
        self.peers.remove(peer)

    def start(self, job) -> None:
        if isinstance(job, SealPages):
            self._on_pages(PagesSealed(job.job_id, (0,) * len(job.blocks)))
        elif not isinstance(job, CancelPulls):
            self._on_pages(PagesPulled(job.job_id, "nobody is reached"))

    def close(self) -> None:
        pass


class Node:
    """A member and what it is made of."""

    def __init__(self, name: str, routers: str, namespace: str = "model", config: MemberConfig = BRISK) -> None:
        me = Peer(name, new_generation())
        pool = PoolConfig(BLOCKS)
        self.machine = Instance(
            InstanceConfig(256, namespace, pool, SchedulerConfig(8, 128, 64)), BLOCK, self_peer=me, geometry=GEOMETRY
        )
        self.device = Device()
        info = PeerInfo(me, Role.COLOCATED, "", namespace, GEOMETRY, BLOCKS, 0, self.machine.context_tokens, True)
        self.ports: list[NoPages] = []
        self.member = MemberProcess(
            self.machine,
            self.device,
            info,
            routers.split(","),
            MemberLinks(lambda me, on_message: ZmqMailbox(me, ListenAddress(SECRET), on_message), self._open_port),
            config,
        )
        self.member.start()

    @property
    def addresses(self) -> RouterAddresses:
        """Where it looks for a router."""
        return self.member._member.addresses

    def _open_port(self, on_pages) -> NoPages:
        self.ports.append(NoPages(on_pages))
        return self.ports[-1]


def new_router(port: int = 0) -> RouterEngine:
    me = Peer(ROUTER, new_generation())
    return RouterEngine(Cluster(CONFIG), partial(ZmqMailbox, me, ListenAddress(SECRET, port=port)))


@pytest.fixture
def router() -> Iterator[RouterEngine]:
    engine = new_router()
    yield engine
    engine.close(WAIT_S)


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*arguments: str, config: MemberConfig = BRISK) -> Node:
        made.append(Node(*arguments, config=config))
        return made[-1]

    yield make
    for each in made:
        each.device.gate.set()
        each.member.close()
        assert each.device.closed
        each.machine.check_invariants()


def ask(name: str, count: int) -> tuple[Request, list[int]]:
    """A request, and its one right answer."""
    tokens = np.arange(3, 45, dtype=np.int32) + len(name)
    request = Request(name, tokens, SamplingParams(temperature=0.0, seed=5), StopParams(max_tokens=count))
    return request, lone_tokens(tokens.tolist(), count, 5, 0, VOCAB)


def answer(news: queue.Queue) -> tuple[list[int], FinishReason]:
    tokens: list[int] = []
    while True:
        output = news.get(timeout=WAIT_S)
        tokens += output.tokens
        if output.finish_reason is not None:
            return tokens, output.finish_reason


def submit(router: RouterEngine, request: Request) -> queue.Queue:
    news: queue.Queue = queue.Queue()
    router.submit(request, news.put)
    return news


def test_members_meet_answer_and_tell_how_they_are(router, node) -> None:
    nodes = [node("c1", router.address), node("c2", router.address)]
    assert router.wait_for_members(["c1", "c2"], WAIT_S)
    asked = [ask("r" * k, 3 + k) for k in range(1, 9)]
    answers = [submit(router, request) for request, _ in asked]
    for (_, truth), news in zip(asked, answers, strict=True):
        assert answer(news) == (truth, FinishReason.LENGTH)
    eventually(lambda: nodes[0].ports[0].peers == {nodes[1].member.self_peer})
    eventually(lambda: nodes[1].ports[0].peers == {nodes[0].member.self_peer})
    eventually(lambda: router.stats().instance.requests_finished == len(asked))
    eventually(lambda: all(view.tree_blocks for view in router.instance_views()))  # KV events have come


def test_long_step_does_not_stop_heartbeats(router, node) -> None:
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    it.device.gate.clear()
    request, truth = ask("slow", 4)
    news = submit(router, request)
    eventually(lambda: router.instance_views()[0].load.sequences_running)
    [before] = router.instance_views()
    eventually(lambda: router.instance_views()[0].last_seen_ns > before.last_seen_ns + 500 * NS_PER_MS)
    it.device.gate.set()
    assert answer(news) == (truth, FinishReason.LENGTH)


def test_a_router_whose_loop_is_blocked_declares_no_member_dead(router, node) -> None:
    """The API's event loop reads what members say: while it is blocked, silence means nothing."""
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    me, beats = it.member.self_peer, 3 * CONFIG.dead_after_ns // (2 * BRISK.beat_ns)

    async def blocked() -> None:
        router.receive_messages_in(asyncio.get_running_loop())
        sent = it.member._mailbox.counters.sent
        eventually(lambda: it.member._mailbox.counters.sent > sent + beats)  # nothing else runs in this loop
        blocked_until_ns = time.monotonic_ns()
        heard_ns = blocked_until_ns + CONFIG.dead_after_ns // 2
        await asyncio.to_thread(eventually, lambda: router.instance_views()[0].last_seen_ns > heard_ns)
        router.receive_messages_in(None)

    asyncio.run(blocked())
    assert it.member.self_peer == me and router.members()["c1"].peer == me, "it was not expelled"


def test_instance_with_lost_join_accepted_rejoins_as_new(node) -> None:
    """It was a member without knowing it, sent no heartbeat, and was taken to be dead: its ``Join`` is void."""
    joins: queue.Queue[Peer] = queue.Queue()
    me = Peer(ROUTER, 5)
    mailbox = ZmqMailbox(me, ListenAddress(SECRET), lambda sender, message: joins.put(sender))
    node("c1", mailbox.address)
    first = joins.get(timeout=WAIT_S)
    ahead = first.generation + 1_000_000  # a dead one of this name lived before the wall clock was set back
    mailbox.send(first, Expelled("this incarnation was taken to be dead", ahead))
    generations = iter(lambda: joins.get(timeout=WAIT_S).generation, None)
    assert next(number for number in generations if number != first.generation) > ahead
    mailbox.close()


def test_expelled_member_drops_work_and_rejoins_as_new(router, node) -> None:
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    it.device.gate.clear()
    request, truth = ask("moved", 6)
    news = submit(router, request)
    eventually(lambda: it.machine.load().sequences_running)
    first = it.member.self_peer
    router._mailbox.send(first, Expelled("a test says so"))
    eventually(lambda: it.member.self_peer.generation > first.generation)
    it.device.gate.set()
    assert answer(news) == (truth, FinishReason.LENGTH)
    assert router.stats().cluster.counters.resumptions == 1
    assert router.members()["c1"].peer == it.member.self_peer == it.machine.self_peer


def test_members_come_back_to_a_router_that_was_started_anew(router, node) -> None:
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    first = it.member.self_peer
    router.close(WAIT_S)
    successor = new_router(int(router.address.rpartition(":")[2]))
    try:
        assert successor.wait_for_members(["c1"], WAIT_S)
        request, truth = ask("again", 5)
        assert answer(submit(successor, request)) == (truth, FinishReason.LENGTH)
        assert it.member.self_peer.generation > first.generation
    finally:
        successor.close(WAIT_S)


def test_late_join_accepted_of_replaced_router_is_ignored(node) -> None:
    """A member that took it would speak to a router that is gone, for ever. Found by fuzzing (seed 1009825)."""
    joins: queue.Queue[tuple[int, PeerInfo]] = queue.Queue()

    def router_of(generation: int) -> ZmqMailbox:
        def hear(sender: Peer, message: AnyMessage) -> None:
            if isinstance(message, Join):
                joins.put((generation, message.info))

        return ZmqMailbox(Peer(ROUTER, generation), ListenAddress(SECRET), hear)

    old, new = router_of(7), router_of(8)
    it = node("c1", old.address)
    _, info = joins.get(timeout=WAIT_S)
    for mailbox in (old, new):
        mailbox.connect(info.peer, info.address)
    new.send(info.peer, RejoinRequest(new.address))
    eventually(lambda: joins.get(timeout=WAIT_S)[0] == 8)
    behind = msgspec.structs.replace(info, peer=Peer("c2", 1))
    old.send(info.peer, JoinAccepted(()))
    old.send(info.peer, PeerJoined(behind))
    eventually(lambda: behind.peer in it.ports[0].peers)
    assert it.member.router is None
    new.send(info.peer, JoinAccepted(()))
    eventually(lambda: it.member.router == Peer(ROUTER, 8))
    for mailbox in (old, new):
        mailbox.close()


def test_new_router_gets_held_answers_before_further_tokens(node, monkeypatch) -> None:
    """Steps end while its ``JoinAccepted`` is on the way from the member to the machine. A router that hears tokens of
    an attempt of which it was not told ends it, and then waits for it: a minute, until it is taken to have stalled."""
    heard: list[tuple[int, AnyMessage]] = []

    def router_of(generation: int) -> ZmqMailbox:
        me = Peer(ROUTER, generation)
        return ZmqMailbox(me, ListenAddress(SECRET), lambda _, message: heard.append((generation, message)))

    def said_to(generation: int, kind: Any) -> list[AnyMessage]:
        return [message for to, message in heard if to == generation and isinstance(message, kind)]

    old, new = router_of(7), router_of(8)
    it = node("c1", old.address)
    eventually(lambda: said_to(7, Join))
    me = it.member.self_peer
    for mailbox in (old, new):
        mailbox.connect(me, it.member._mailbox.address)
    old.send(me, JoinAccepted(()))
    steps = threading.Semaphore(0)  # that the device may take: the answer shall not end too early
    monkeypatch.setattr(
        it.device, "execute", lambda plan: it.device.run_plan(plan) if steps.acquire(timeout=WAIT_S) else None
    )
    request, truth = ask("kept", 60)
    old.send(me, Dispatch(msgspec.structs.replace(request, key="a key", asked="this")))
    eventually(lambda: it.machine.load().sequences_running)
    connect = it.member._mailbox.connect

    def connect_late(peer: Peer, address: str) -> None:
        connect(peer, address)
        if peer.generation == 8:  # the member knows the new router, the machine does not yet
            steps.release(20)
            eventually(lambda: it.machine.stats().generated_tokens >= 8)

    monkeypatch.setattr(it.member._mailbox, "connect", connect_late)
    new.send(me, RejoinRequest(new.address))
    eventually(lambda: said_to(8, Join))
    new.send(me, JoinAccepted(()))
    eventually(lambda: said_to(8, AnswersHeld))
    steps.release(200)
    eventually(lambda: [o for message in said_to(8, Tokens) for o in message.outputs if o.finish_reason is not None])
    told = said_to(8, AnswersHeld | Tokens)
    assert [type(message) for message in told] == [AnswersHeld, *[Tokens] * (len(told) - 1)]
    [held] = told[0].answers
    log = AnswerLog(held.told)
    assert held.runs and all(log.append_output(output) >= 0 for message in told[1:] for output in message.outputs)
    assert [token for output in log.outputs_for("kept") for token in output.tokens] == truth
    for mailbox in (old, new):
        mailbox.close()


def test_a_router_is_found_at_the_address_where_one_is(router, node) -> None:
    """The first of the cluster's routers is away when the instance starts."""
    it = node("c1", f"tcp://127.0.0.1:9,{router.address}", config=IMPATIENT)
    assert router.wait_for_members(["c1"], WAIT_S)
    request, truth = ask("found", 5)
    assert answer(submit(router, request)) == (truth, FinishReason.LENGTH)
    it.member.wait_joined(WAIT_S)


def test_member_joins_next_router_that_has_no_record_of_it(router, node) -> None:
    """No router calls it back: it knocks itself, and keeps its cache."""
    standby_port = free_port()
    it = node("c1", f"{router.address},tcp://127.0.0.1:{standby_port}", config=IMPATIENT)
    assert router.wait_for_members(["c1"], WAIT_S)
    request, truth = ask("first", 5)
    assert answer(submit(router, request)) == (truth, FinishReason.LENGTH)
    router.close(WAIT_S)
    standby = new_router(standby_port)
    try:
        assert standby.wait_for_members(["c1"], WAIT_S)
        again = submit(standby, request)
        assert answer(again) == (truth, FinishReason.LENGTH)
        assert it.machine.stats().cached_tokens > 0
    finally:
        standby.close(WAIT_S)


def test_idle_router_is_not_abandoned(router, node, monkeypatch) -> None:
    """There is nothing to say for many patiences: it is asked for a word, and gives it."""
    words: list[AnyMessage] = []
    arrived = MemberProcess._message_arrived
    monkeypatch.setattr(
        MemberProcess,
        "_message_arrived",
        lambda self, sender, message: (words.append(message), arrived(self, sender, message)),
    )
    it = node("c1", f"{router.address},tcp://127.0.0.1:9", config=IMPATIENT)
    assert router.wait_for_members(["c1"], WAIT_S)
    first, since_ns = it.member.self_peer, time.monotonic_ns()
    patience_ns = 3 * IMPATIENT.silent_after_ns
    eventually(lambda: time.monotonic_ns() - since_ns > patience_ns and words.count(HeartbeatAck()) >= 10)
    assert it.member.self_peer == first and it.addresses.address == router.address


def test_member_cut_off_for_a_while_returns_to_its_router(router, node, monkeypatch) -> None:
    """For a while nothing of the router arrives: the instance looks elsewhere, and hears it when it turns back."""
    arrived, deaf = MemberProcess._message_arrived, threading.Event()
    monkeypatch.setattr(
        MemberProcess, "_message_arrived", lambda self, *letter: None if deaf.is_set() else arrived(self, *letter)
    )
    it = node("c1", f"{router.address},tcp://127.0.0.1:9", config=IMPATIENT)
    assert router.wait_for_members(["c1"], WAIT_S)
    deaf.set()
    eventually(lambda: it.addresses.address != router.address)
    deaf.clear()
    eventually(lambda: it.addresses.address == router.address == it.addresses.joined_address)
    request, truth = ask("back", 5)
    assert answer(submit(router, request)) == (truth, FinishReason.LENGTH)


def test_late_join_accepted_sets_address_of_the_join(router, node, monkeypatch) -> None:
    """The instance has gone on to the next address by then, where no router is."""
    arrived, away, late = MemberProcess._message_arrived, "tcp://127.0.0.1:9", threading.Event()

    def arrive(self: MemberProcess, sender: Peer, message: AnyMessage) -> None:
        if isinstance(message, JoinAccepted) and not late.is_set():
            late.set()
            self._member.addresses.address = away
            self._mailbox.connect(Peer(ROUTER, 0), away)
        arrived(self, sender, message)

    monkeypatch.setattr(MemberProcess, "_message_arrived", arrive)
    it = node("c1", f"{router.address},{away}")
    assert it.member.wait_joined(WAIT_S) and late.is_set()
    assert it.addresses.address == it.addresses.joined_address == router.address
    behind = msgspec.structs.replace(it.member._member.info, peer=Peer("c2", 1))
    router._mailbox.send(it.member.self_peer, JoinAccepted((), away))  # of a Join that was under way
    router._mailbox.send(it.member.self_peer, PeerJoined(behind))
    eventually(lambda: behind.peer in it.ports[0].met)  # no member: the router takes it back after a heartbeat
    assert it.addresses.address == it.addresses.joined_address == router.address
    request, truth = ask("late", 5)
    assert answer(submit(router, request)) == (truth, FinishReason.LENGTH)


def test_a_drained_member_finishes_what_it_has_and_leaves(router, node) -> None:
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    it.device.gate.clear()
    request, truth = ask("last", 5)
    news = submit(router, request)
    eventually(lambda: router.instance_views()[0].load.sequences_running)
    router.drain_member("c1")
    eventually(lambda: router.instance_views()[0].state == "draining")
    assert not it.member._ended.is_set()
    it.device.gate.set()
    assert answer(news) == (truth, FinishReason.LENGTH)
    it.member.wait_for_end()
    eventually(lambda: not router.instance_views())
    assert router.stats().cluster.counters.members_left == 1


def test_patience_ends(router, node) -> None:
    it, other = node("c1", router.address), node("c2", router.address)
    assert router.wait_for_members(["c1", "c2"], WAIT_S)
    it.device.gate.clear()
    other.device.gate.clear()
    request, truth = ask("moves on", 5)
    news = submit(router, request)
    eventually(lambda: [v for v in router.instance_views() if v.load.sequences_running])
    busy, idle = (it, other) if it.machine.load().sequences_running else (other, it)
    busy.member.drain_and_leave(0.1)
    busy.member.wait_for_end()
    idle.device.gate.set()
    assert answer(news) == (truth, FinishReason.LENGTH)


def test_another_model_is_refused(router, node) -> None:
    node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    stranger = node("c2", router.address, "another model")
    with pytest.raises(UserError, match="refuses"):
        stranger.member.wait_joined(WAIT_S)
    assert set(router.members()) == {"c1"}


def test_member_without_a_router_does_not_join(node) -> None:
    it = node("c1", "tcp://127.0.0.1:9")
    assert not it.member.wait_joined(0.2) and not it.member.has_ended


def test_machine_failure_ends_member_and_work_moves_on(router, node, monkeypatch) -> None:
    it = node("c1", router.address)
    assert router.wait_for_members(["c1"], WAIT_S)
    it.device.gate.clear()
    request, truth = ask("survivor", 5)
    news = submit(router, request)
    eventually(lambda: it.machine.load().sequences_running)
    node("c2", router.address)
    assert router.wait_for_members(["c1", "c2"], WAIT_S)
    monkeypatch.setattr(
        Device, "run_plan", lambda self, plan: object if self is it.device else SymbolicDevice.run_plan(self, plan)
    )
    it.device.gate.set()  # what the step's end returns is no event
    with pytest.raises(UserError, match="broke"):
        it.member.wait_for_end()
    assert answer(news) == (truth, FinishReason.LENGTH)
