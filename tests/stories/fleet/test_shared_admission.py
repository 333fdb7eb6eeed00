"""Several fleet machines that share one admission, over links that keep the order: bounds, deaths, returns."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, Request
from memserve.base.units import NS_PER_S
from memserve.fleet.machine import Fleet
from memserve.fleet.messages import (
    AnswerEnded,
    EngineAnswered,
    EngineReport,
    FleetEvent,
    ForwardRequest,
    GiveUp,
    PromptArrived,
    PromptSpace,
    RouterJoined,
    RouterLeft,
    TimePassed,
    read_engine,
)
from memserve.protocol.codec import decode, encode
from memserve.protocol.events import MessageArrived, RejectRequest, Send
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import ROUTER, Peer

ACTIVE_MAX = 3
OWNER = 0


class SharedWorld:
    """An owner and followers, their clock, what is under way between them, and what became of each request."""

    def __init__(self, followers: int, active_max: int = ACTIVE_MAX, waiting_max: int = 4) -> None:
        limits = AdmissionConfig(
            mode=Admission.BOUNDED, active_max=active_max, waiting_max=waiting_max, wait_ns=5 * NS_PER_S
        )
        self.config = ClusterConfig(policy="least-load", admission=limits)
        self.now = NS_PER_S
        self.machines: dict[int, Fleet] = {}
        self.links: dict[int, int] = {}
        """Follower -> the number of its connection, while there is one."""
        self.sent: dict[int, deque[tuple[int, AnyMessage]]] = {}
        """What a router has not received yet: the connection, and the message."""
        self.connections = 0
        self.running: dict[str, int] = {}
        self.rejected: dict[str, str] = {}
        for number in range(followers + 1):
            self.start(number)
        for number in range(1, followers + 1):
            self.connect(number)
        self.settle()

    def start(self, number: int) -> None:
        self.machines[number] = Fleet([read_engine("vllm=http://a:1")], self.config, is_follower=number != OWNER)
        self.sent[number] = deque()
        self.tell(number, EngineAnswered("a:1", EngineReport({"m": "m"})))

    def connect(self, number: int) -> None:
        self.connections += 1
        self.links[number] = self.connections
        self.tell(OWNER, RouterJoined(Peer(f"router-{number}.{self.connections}", self.connections)))
        self.tell(number, RouterJoined(Peer(ROUTER, self.connections)))

    def cut(self, number: int, *, is_heard: bool) -> None:
        """The connection of a follower ends; ``is_heard``: for itself, too."""
        link = self.links.pop(number)
        self.sent[number].clear()
        self.sent[OWNER] = deque((sender, message) for sender, message in self.sent[OWNER] if sender != link)
        if is_heard:
            self.tell(number, RouterLeft(Peer(ROUTER, link)))
        self.tell(OWNER, RouterLeft(Peer(f"router-{number}.{link}", link)))

    def kill(self, number: int) -> None:
        """A follower dies, and with it what it runs."""
        self.running = {name: at for name, at in self.running.items() if at != number}
        del self.machines[number]
        if number in self.links:
            self.cut(number, is_heard=False)

    def tell(self, number: int, event: FleetEvent) -> None:
        machine = self.machines[number]
        for action in machine.handle(event, self.now):
            match action:
                case ForwardRequest(request_id):
                    assert request_id not in self.running
                    self.running[request_id] = number
                case RejectRequest(request_id) | GiveUp(request_id):
                    self.rejected[request_id] = action.reason
                case Send(to, message):
                    message = decode(encode(message))
                    link = self.links.get(number, to.generation)
                    target = OWNER if number != OWNER else int(to.name.removeprefix("router-").partition(".")[0])
                    if self.links.get(target if number == OWNER else number) == link:
                        self.sent[target].append((link, message))
                case _:
                    raise AssertionError(action)
        machine.check_invariants()

    def deliver(self, number: int) -> None:
        link, message = self.sent[number].popleft()
        follower = next(name for name, connection in self.links.items() if connection == link)
        sender = Peer(f"router-{follower}.{link}", link) if number == OWNER else Peer(ROUTER, link)
        self.tell(number, MessageArrived(sender, message))

    def settle(self) -> None:
        while any(self.sent.values()):
            for number in [number for number, messages in self.sent.items() if messages]:
                self.deliver(number)

    def pass_time(self, ns: int) -> None:
        """A quarter of a second at a time: heartbeats are due twice in one."""
        end = self.now + ns
        while self.now < end:
            self.now += NS_PER_S // 4
            for number in self.machines:
                self.tell(number, TimePassed())
            self.settle()

    def ask(self, number: int, name: str, tenant: str = "") -> None:
        prompt = Request(name, np.arange(1, 40, dtype=np.int32), tenant=tenant)
        self.tell(number, PromptArrived(prompt, "m", PromptSpace.TOKENS))

    def end(self, name: str) -> None:
        self.tell(self.running.pop(name), AnswerEnded(name))


def test_the_limit_holds_for_all_routers_together() -> None:
    world = SharedWorld(2)
    for number in range(7):
        world.ask(number % 3, f"r{number}")
        world.settle()
    assert sorted(world.running) == ["r0", "r1", "r2"] and not world.rejected
    assert world.machines[OWNER].admission_stats().active == ACTIVE_MAX
    for name in ("r0", "r1"):  # whichever router has room, the next one in the queue gets it
        world.end(name)
        world.settle()
    assert sorted(world.running) == ["r2", "r3", "r4"]


def test_one_router_may_use_all_that_others_leave() -> None:
    world = SharedWorld(2)
    for number in range(ACTIVE_MAX):
        world.ask(2, f"r{number}")
    world.settle()
    assert set(world.running.values()) == {2} and len(world.running) == ACTIVE_MAX


def test_what_is_too_much_is_rejected_where_it_was_asked() -> None:
    world = SharedWorld(1, active_max=1, waiting_max=1)
    for number in range(3):
        world.ask(1, f"r{number}")
        world.settle()
    assert list(world.running) == ["r0"] and list(world.rejected) == ["r2"]


def test_tenants_take_turns_across_routers() -> None:
    world = SharedWorld(1, active_max=1)
    for router, name, tenant in ((1, "x0", "x"), (1, "x1", "x"), (1, "x2", "x"), (OWNER, "y0", "y")):
        world.ask(router, name, tenant)
        world.settle()
    served = []
    for _ in range(3):
        served += list(world.running)
        world.end(*world.running)
        world.settle()
    assert served == ["x0", "y0", "x1"]


def test_a_killed_router_holds_nothing() -> None:
    world = SharedWorld(2)
    for number in range(ACTIVE_MAX):
        world.ask(1, f"r{number}")
    world.ask(1, "waits with it")
    world.settle()
    world.ask(2, "next")
    world.settle()
    assert "next" not in world.running
    world.kill(1)
    world.settle()
    assert world.running == {"next": 2} and world.machines[OWNER].admission_stats().active == 1
    world.start(1)
    world.connect(1)
    world.ask(1, "again")
    world.settle()
    assert world.running == {"next": 2, "again": 1}


def test_requests_that_came_before_the_owner_wait_for_it() -> None:
    world = SharedWorld(1)
    world.cut(1, is_heard=True)
    world.pass_time(4 * NS_PER_S)
    world.ask(1, "early")
    world.settle()
    assert not world.running
    world.connect(1)
    world.settle()
    assert world.running == {"early": 1}


def test_without_an_owner_requests_are_rejected_in_time() -> None:
    world = SharedWorld(1)
    world.cut(1, is_heard=True)
    world.pass_time(4 * NS_PER_S)
    world.ask(1, "r")
    world.pass_time(11 * NS_PER_S)
    assert "does not answer" in world.rejected["r"]


def test_what_an_owner_granted_long_ago_waits_for_its_word() -> None:
    """It may have taken this router to be gone meanwhile: what it says now counts."""
    world = SharedWorld(1)
    world.ask(1, "r")
    world.deliver(OWNER)  # which grants it, and stands still
    for _ in range(16):
        world.now += NS_PER_S // 4
        world.tell(1, TimePassed())
    world.deliver(1)
    assert not world.running
    world.settle()
    assert world.running == {"r": 1}


def test_what_runs_through_a_cut_is_counted_again() -> None:
    world = SharedWorld(1)
    for number in range(ACTIVE_MAX):
        world.ask(1, f"r{number}")
    world.settle()
    world.cut(1, is_heard=True)
    world.connect(1)
    world.settle()
    world.ask(OWNER, "own")
    assert "own" not in world.running and world.machines[OWNER].admission_stats().active == ACTIVE_MAX
    world.end("r0")
    world.settle()
    assert world.running["own"] == OWNER


def test_a_request_that_no_engine_takes_asks_for_nothing() -> None:
    world = SharedWorld(1)
    prompt = Request("r", np.arange(1, 40, dtype=np.int32))
    world.tell(1, PromptArrived(prompt, "unknown", PromptSpace.TOKENS))
    world.settle()
    assert list(world.rejected) == ["r"] and not world.machines[OWNER].admission_stats().admitted


@pytest.mark.parametrize("seed", range(60))
def test_random_lives_stay_within_the_limit(seed: int) -> None:
    """Messages come late, clients leave, followers die and come back: no more run than may, and nothing leaks."""
    draw = random.Random(seed)
    world = SharedWorld(3)
    for step in range(200):
        alive = list(world.machines)
        choice, number = draw.random(), draw.choice(alive)
        if choice < 0.4:
            world.ask(number, f"r{step}", draw.choice("xyz"))
        elif choice < 0.6 and world.running:
            world.end(draw.choice(list(world.running)))
        elif choice < 0.65 and number != OWNER:
            world.kill(number)
        elif choice < 0.75 and len(alive) < 4:
            back = next(name for name in (1, 2, 3) if name not in world.machines)
            world.start(back)
            world.connect(back)
        elif choice < 0.8:
            world.pass_time(NS_PER_S)
        else:
            for target in [target for target, messages in world.sent.items() if messages and draw.random() < 0.6]:
                world.deliver(target)
        assert len(world.running) <= ACTIVE_MAX
    world.settle()
    while world.running:
        world.end(next(iter(world.running)))
        world.settle()
    stats = world.machines[OWNER].admission_stats()
    assert stats.active == 0 and not stats.waiting and stats.admitted
