"""Admission with several routers: an owner and followers, with every message between them in the test's hand."""

from __future__ import annotations

from collections import deque

import pytest

from cluster_world import a_request, info
from memserve.base.config import AdmissionConfig, ClusterConfig, MemberConfig
from memserve.base.types import Admission, ClockTicked, FinishReason, Role, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.protocol.admission import AdmissionGrant, AdmissionGrants, AdmissionRequests
from memserve.protocol.events import MessageArrived, RejectRequest, RequestArrived, RequestCancelled, Send
from memserve.protocol.member_events import ChangeGeneration, GenerationChanged, Left
from memserve.protocol.messages import Dispatch, HandedOver, Heartbeat, Join, Tokens
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.protocol.records import RecoveredMember, RecoveredState
from memserve.router.events import StateRecovered
from memserve.router.follower import NO_KV, Follower, FollowerStarts
from memserve.router.machine import Cluster

C1, C2 = info("c1", Role.COLOCATED), info("c2", Role.COLOCATED)
PROMPT = list(range(1, 21))  # 5 blocks
DEAD_NS = ClusterConfig().dead_after_ns
BEAT_NS = MemberConfig().beat_ns
R2, R3 = "router-2", "router-3"


def follower_info(name: str, generation: int = 1, admission: str = "") -> PeerInfo:
    return PeerInfo(Peer(name, generation), Role.ROUTER, "", "", NO_KV, 0, 0, 0, False, admission=admission)


class World:
    """Instances only hold what they are sent. Messages between routers arrive at once, unless one is cut off."""

    def __init__(self, *instances: PeerInfo, followers: tuple[str, ...] = (R2,), **admission) -> None:
        self.config = ClusterConfig(admission=AdmissionConfig(**admission))
        self.instances, self.now = instances or (C1,), 0
        self.messages: deque[tuple[Peer, Peer, object]] = deque()
        self.cut: set[str] = set()
        self.orders: list[tuple[str, Peer, Dispatch]] = []
        self.rejected: dict[str, RejectRequest] = {}
        self.owner, self.me = Cluster(self.config), Peer(ROUTER, 5)
        self.followers = {
            name: Follower(follower_info(name), ("tcp://owner",), self.config, MemberConfig()) for name in followers
        }
        for one in self.instances:
            self.post(ROUTER, MessageArrived(one.peer, Join(one)))
        for name in followers:
            self.post(name, FollowerStarts(f"tcp://{name}"))
        self.beat()

    # -- events

    def peer(self, name: str) -> Peer:
        return self.me if name == ROUTER else self.followers[name].member.info.peer

    def post(self, name: str, event) -> None:
        """To one router, with all that follows from it."""
        self._handle(name, event)
        while self.messages:
            sender, to, message = self.messages.popleft()
            if sender.name not in self.cut and to.name not in self.cut and to in (Peer(to.name, 0), self.peer(to.name)):
                self._handle(to.name, MessageArrived(sender, message))

    def _handle(self, name: str, event) -> None:
        machine, me = self.owner if name == ROUTER else self.followers[name], self.peer(name)
        actions = machine.handle(event, self.now)
        machine.check_invariants()
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Dispatch):
                self.orders.append((name, action.to, action.message))
            elif isinstance(action, Send) and action.to.name in (ROUTER, *self.followers):
                self.messages.append((me, action.to, action.message))
            elif isinstance(action, RejectRequest):
                self.rejected[action.request_id] = action
            elif isinstance(action, ChangeGeneration):
                admission = self.followers[name].member.info.admission
                self._handle(name, GenerationChanged(follower_info(name, action.generation_min, admission)))
            assert not isinstance(action, Left), action

    def beat(self, *, but: tuple[str, ...] = ()) -> None:
        """Time for the heartbeats of all. ``but``: routers that stand still."""
        self.now += BEAT_NS
        for name in [name for name in (ROUTER, *self.followers) if name not in but]:
            for one in self.instances:
                self.post(name, MessageArrived(one.peer, Heartbeat(Load())))
            self.post(name, ClockTicked())

    def wait(self, span_ns: int, *, but: tuple[str, ...] = ()) -> None:
        end_ns = self.now + span_ns
        while self.now < end_ns:
            self.beat(but=but)

    # -- clients and instances

    def ask(self, router: str, name: str, prompt=PROMPT, **rest) -> None:
        self.post(router, RequestArrived(a_request(name, prompt, **rest)))

    def cancel(self, router: str, name: str) -> None:
        self.post(router, RequestCancelled(name))

    def end(self, name: str) -> None:
        """Its instance has computed all of it."""
        router, at, order = next(one for one in reversed(self.orders) if attempt_of(one[2]) == name)
        end = TokenOutput(order.request.request_id, 0, (1,), finish_reason=FinishReason.LENGTH)
        self.post(router, MessageArrived(at, Tokens((end,))))

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Router and name of all that was dispatched, in order."""
        return [(router, attempt_of(order)) for router, _, order in self.orders]

    @property
    def active(self) -> int:
        return self.owner.stats().admission.active


def attempt_of(order: Dispatch) -> str:
    return order.request.request_id.partition("#")[0]


def bounded(active_max: int, **rest) -> World:
    return World(followers=(R2, R3), mode=Admission.BOUNDED, active_max=active_max, **rest)


# -- one queue for all


def test_the_limit_holds_over_all_routers_and_the_queue_is_one() -> None:
    world = bounded(2, waiting_max=2)
    for router, name in ((R2, "a"), (R3, "b"), (ROUTER, "c"), (R2, "d"), (R3, "e")):
        world.ask(router, name)
    assert world.runs == [(R2, "a"), (R3, "b")] and world.active == 2
    assert "2 requests are active, the most allowed; 3 wait, at most 2 may" in world.rejected["e"].reason
    assert world.rejected["e"].retry_after_s >= 1 and not world.rejected["e"].overloaded
    world.end("b")
    assert world.runs[2:] == [(ROUTER, "c")]
    world.cancel(R2, "a")
    assert world.runs[3:] == [(R2, "d")]
    world.end("c")
    world.end("d")
    assert world.active == 0 and not world.owner._lifecycle.remote_requests.by_id


def test_tenants_take_turns_over_all_routers() -> None:
    world = bounded(1, waiting_max=10)
    for number in range(4):
        world.ask(R2, f"burst{number}", tenant="burst")
    world.ask(R3, "late", tenant="late")
    world.end("burst0")
    world.end(world.runs[1][1])
    assert [name for _, name in world.runs] in (["burst0", "late", "burst1"], ["burst0", "burst1", "late"])


def test_owner_rejects_remote_request_on_wait_timeout() -> None:
    world = bounded(1, wait_ns=2 * NS_PER_S)
    world.ask(ROUTER, "long")
    world.ask(R2, "a")
    world.wait(2 * NS_PER_S)
    assert "not admitted within 2 s: 1 requests are active" in world.rejected["a"].reason
    assert world.rejected["a"].overloaded
    assert world.owner.stats().admission.rejected == {"wait": 1}


# -- what is lost


@pytest.mark.parametrize("lost", ["to the owner", "to the follower"])
def test_lost_messages_are_resent_with_next_heartbeat(lost: str) -> None:
    world = bounded(1)
    if lost == "to the owner":
        world.cut.add(R2)
        world.ask(R2, "a")
    else:
        world.cut.add(R2)
        world._handle(R2, RequestArrived(a_request("a", PROMPT)))
        (message,) = [message for message in world.messages if isinstance(message[2], AdmissionRequests)]
        world.messages.clear()
        world._handle(ROUTER, MessageArrived(message[0], message[2]))
        world.messages.clear()
        assert world.active == 1
    assert world.runs == []
    world.cut.clear()
    world.beat()
    assert world.runs == [(R2, "a")] and world.active == 1
    world.cut.add(R2)
    world.end("a")
    assert world.active == 1, "the owner has not heard of the end"
    world.cut.clear()
    world.beat()
    assert world.active == 0


def test_news_that_come_late_or_twice_change_nothing() -> None:
    world = bounded(2)
    world._handle(R2, RequestArrived(a_request("a", PROMPT)))
    (message,) = [one for one in world.messages if isinstance(one[2], AdmissionRequests)]
    world.post(R2, ClockTicked())
    world.end("a")
    assert world.active == 0
    world.post(ROUTER, MessageArrived(message[0], message[2]))
    assert world.active == 0 and not world.owner._lifecycle.remote_requests.by_id


# -- a follower dies, stands still, is cut off


def test_slots_of_a_dead_follower_are_freed() -> None:
    world = bounded(1)
    world.ask(R2, "a")
    world.ask(R3, "b")
    assert world.runs == [(R2, "a")]
    del world.followers[R2]
    world.wait(DEAD_NS - BEAT_NS)
    assert world.active == 1 and world.runs == [(R2, "a")], "it may be alive"
    world.wait(2 * BEAT_NS)
    assert world.runs == [(R2, "a"), (R3, "b")]


def test_stopped_follower_does_not_use_a_stale_grant() -> None:
    world = bounded(1)
    world._handle(R2, RequestArrived(a_request("a", PROMPT)))
    asked = world.messages.popleft()
    world._handle(ROUTER, MessageArrived(asked[0], asked[2]))
    granted = world.messages.popleft()  # it is under way while the follower is stopped
    world.ask(R3, "b")
    world.wait(DEAD_NS + BEAT_NS, but=(R2,))
    assert world.runs == [(R3, "b")], "the grant is another request's now"
    world.post(R2, MessageArrived(granted[0], granted[2]))
    assert world.runs == [(R3, "b")]
    world.beat()
    assert world.peer(R2).generation == 2, "it was expelled, and asks again"
    assert world.runs == [(R3, "b")] and world.active == 1
    world.end("b")
    world.beat()
    assert world.runs[1:] == [(R2, "a")]


def test_retry_waits_for_the_silent_owner() -> None:
    world = World(C1, C2, mode=Admission.BOUNDED, active_max=1)
    world.ask(R2, "a")
    world.cut.add(ROUTER)
    lost = world.orders[0][1]
    world.instances = tuple(one for one in world.instances if one.peer != lost)
    world.wait(DEAD_NS + BEAT_NS)
    assert world.runs == [(R2, "a")], "the owner may count it no more"
    world.cut.clear()
    world.wait(4 * BEAT_NS)
    assert world.runs == [(R2, "a"), (R2, "a")] and world.active == 1


def test_attempts_of_expelled_follower_precede_the_queue() -> None:
    world = bounded(1)
    world.ask(R2, "a")
    world.cut.add(R2)
    world.ask(R3, "b")
    world.ask(R3, "c")
    world.wait(DEAD_NS + BEAT_NS)
    assert world.runs == [(R2, "a"), (R3, "b")]
    world.cut.clear()
    world.wait(2 * BEAT_NS)
    assert world.runs == [(R2, "a"), (R3, "b")] and world.active == 1
    world.end("b")
    world.beat()
    assert world.runs[2:] == [(R2, "a")], "it was admitted once: the queue waits"
    world.end("a")
    assert world.runs[3:] == [(R3, "c")]


def test_queue_without_owner_is_bounded_and_times_out() -> None:
    world = World(mode=Admission.BOUNDED, active_max=1, waiting_max=1, wait_ns=NS_PER_S)
    world.cut.add(ROUTER)
    for name in "abc":
        world.ask(R2, name)
    assert set(world.rejected) == {"c"} and "3 requests wait for the owner" in world.rejected["c"].reason
    world.wait(NS_PER_S + DEAD_NS)
    assert set(world.rejected) == {"a", "b", "c"} and world.rejected["a"].overloaded
    assert "does not answer" in world.rejected["a"].reason


# -- the owner is started anew


def successor(world: World, remembered: tuple[str, ...]) -> None:
    """Another process takes the owner's place, with the journal of the last one."""
    infos = [*world.instances, *(world.followers[name].member.info for name in remembered if name in world.followers)]
    infos += [follower_info(name, 1, "bounded") for name in remembered if name not in world.followers]
    members = tuple(RecoveredMember(info, False, 0, b"", b"") for info in infos)
    state = RecoveredState(world.me, "", members)
    world.me = Peer(ROUTER, world.me.generation + 1)
    world.owner = Cluster(world.config, remembers=True)
    world.post(ROUTER, StateRecovered(state, world.me, "tcp://owner"))
    for one in world.instances:
        world.post(ROUTER, MessageArrived(one.peer, Join(one)))


def test_new_owner_counts_existing_grants_before_admitting() -> None:
    world = bounded(2)
    world.ask(R2, "a")
    world.ask(R3, "b")
    world.cut |= {R2, R3}
    successor(world, (R2, R3))
    world.ask(ROUTER, "c")
    assert world.runs == [(R2, "a"), (R3, "b")] and world.active == 0
    world.cut -= {R2}
    world.wait(2 * BEAT_NS)
    assert world.active == 1 and len(world.runs) == 2, "router-3 has not told"
    world.cut.clear()
    world.wait(2 * BEAT_NS)
    assert world.active == 2 and len(world.runs) == 2 and world.peer(R2).generation == 1
    world.end("b")
    assert world.runs[2:] == [(ROUTER, "c")]
    world.end("a")
    assert world.active == 1


def test_new_owner_stops_waiting_for_a_dead_follower() -> None:
    world = bounded(1, waiting_max=0)
    world.ask(R2, "a")
    del world.followers[R2]
    successor(world, (R2, R3))
    world.ask(ROUTER, "b")
    assert "b" not in world.rejected, "there may be room"
    world.ask(ROUTER, "c")
    assert "has just started" in world.rejected["c"].reason
    world.wait(DEAD_NS + BEAT_NS)
    assert world.runs[1:] == [(ROUTER, "b")]


# -- memory


def blocks_left(world: World, name: str) -> int:
    member = world.owner._registry.member_by_name(name)
    return int(world.owner._lifecycle.admission.memory.ledger.blocks_free(member.number))


def test_ledger_counts_follower_attempts_and_pending_grants() -> None:
    small = [info(name, Role.COLOCATED, hbm_blocks=8) for name in ("c1", "c2")]
    world = World(*small, followers=(R2, R3), mode=Admission.MEMORY, waiting_max=9)
    for number, router in enumerate((R2, R3, R2, ROUTER)):
        world.ask(router, f"r{number}", prompt=[number, *PROMPT[1:]], max_tokens=4)  # 6 blocks
    assert world.runs == [(R2, "r0"), (R3, "r1")]
    assert {at.name for _, at, _ in world.orders} == {"c1", "c2"}, "each has room for one"
    world.end("r1")
    assert world.runs[2:] == [(R2, "r2")] and world.orders[2][1] == world.orders[1][1]
    assert {blocks_left(world, name) for name in ("c1", "c2")} == {2}
    world.ask(R3, "large", prompt=list(range(40)))
    assert "it needs 10 blocks of KV memory, no instance has more than 8" in world.rejected["large"].reason
    assert world.rejected["large"].retry_after_s is None
    for name in ("r0", "r2", "r3"):
        world.end(name)
    assert {blocks_left(world, name) for name in ("c1", "c2")} == {8}


def test_prompt_memory_is_freed_by_the_handover() -> None:
    pair = info("p1", Role.PREFILL, hbm_blocks=8), info("d1", Role.DECODE, hbm_blocks=8)
    world = World(*pair, mode=Admission.MEMORY)
    world.ask(R2, "a", max_tokens=4)
    ((_, at, order),) = world.orders
    assert at.name == "p1" and (blocks_left(world, "p1"), blocks_left(world, "d1")) == (3, 2)
    world.post(R2, MessageArrived(pair[1].peer, HandedOver(order.request.request_id)))
    assert (blocks_left(world, "p1"), blocks_left(world, "d1")) == (8, 2)
    successor(world, (R2,))
    world.wait(2 * BEAT_NS)
    assert (blocks_left(world, "p1"), blocks_left(world, "d1")) == (8, 2), "the new owner knows it too"
    end = TokenOutput(order.request.request_id, 0, (1,), finish_reason=FinishReason.LENGTH)
    world.post(R2, MessageArrived(pair[1].peer, Tokens((end,))))
    assert (blocks_left(world, "p1"), blocks_left(world, "d1")) == (8, 8)


# -- which followers may join


def test_a_follower_with_other_admission_is_refused() -> None:
    world = bounded(1)
    other = Follower(follower_info("router-4"), ("tcp://owner",), ClusterConfig(), MemberConfig())
    (join,) = [one.message for one in other.handle(FollowerStarts("tcp://x"), 0) if isinstance(one, Send)]
    (refused,) = [
        one.message
        for one in world.owner.handle(MessageArrived(other.member.info.peer, join), world.now)
        if isinstance(one, Send)
    ]
    assert refused.reason == "it was started with --admission none, and the owner with --admission bounded"


def test_duplicate_rejection_in_one_message_counts_once() -> None:
    """It was asked for again while the first answer waited to be sent."""
    it = World(mode=Admission.BOUNDED, active_max=1)
    it.ask(R2, "first")
    it.cut.add(ROUTER)
    it.ask(R2, "second")
    rejection = AdmissionGrant(2, cause="queue", reason="too many wait", retry_after_s=1.0)
    it.post(R2, MessageArrived(it.me, AdmissionGrants(0, 0, (rejection, rejection))))
    assert it.rejected["second"].reason == "too many wait"
    assert it.followers[R2].cluster.stats().admission.rejected["queue"] == 1
