"""A member that was told of no router: golden scripts of calls, rivals and silence, and random lives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_instances import GEOMETRY
from memserve.base.config import MemberConfig
from memserve.base.types import ClockTicked, Role
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member import ANY_ROUTER, MemberMachine
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    ForwardMessage,
    GenerationChanged,
    Joined,
    Left,
    LoadRead,
    LogWarning,
    MemberAction,
    MemberEvent,
    ReadLoad,
    RemovePeer,
)
from memserve.protocol.messages import (
    AnyMessage,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Leave,
    PeerJoined,
    Refused,
    RejoinRequest,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo, members_digest
from memserve.protocol.store import JoinRequest

CONFIG = MemberConfig(beat_ns=10, stats_every=2, asks_after_ns=20, silent_after_ns=120, turn_ns=40)
A, B = Peer(ROUTER, 7), Peer(ROUTER, 8)
OTHER = PeerInfo(Peer("c1", 1), Role.COLOCATED, "at-c1", "model", GEOMETRY, 8, 0, 64, True)
ME = replace(OTHER, peer=Peer("s1", 5), role=Role.STORE, address="at-s1")
BELONGS = Refused("s1 belongs to the router at a")


class Script:
    """Feeds one member, and checks what it wants done."""

    def __init__(self, *routers: str) -> None:
        self.member = MemberMachine(ME, routers, CONFIG)
        self.first = self.member.start(0)

    def at(self, now_ns: int, event: MemberEvent, *wanted: MemberAction) -> None:
        """At ``now_ns`` comes ``event``; these actions follow, in this order."""
        assert self.member.handle(event, now_ns) == list(wanted)
        self.member.check_invariants()

    def hears(self, now_ns: int, sender: Peer, message: AnyMessage, *wanted: MemberAction) -> None:
        self.at(now_ns, MessageArrived(sender, message), *wanted)

    def is_called(self, now_ns: int, router: Peer, address: str) -> None:
        """It is alone, and asks to join."""
        assert self.member.is_detached
        said = LogWarning(f"the router at {address} calls: joining it")
        asks = ConnectRouter(ANY_ROUTER, address), Send(ANY_ROUTER, Join(ME, address))
        self.hears(now_ns, router, JoinRequest(address), said, *asks)

    def joins(self, now_ns: int, router: Peer, address: str, *, stats: bool = True) -> None:
        """It is accepted, and its first heartbeat follows."""
        welcome = JoinAccepted((OTHER,), address)
        lines = ConnectRouter(router, address), AddPeer(OTHER), Joined()
        self.hears(now_ns, router, welcome, *lines, ForwardMessage(router, welcome), ReadLoad(with_stats=stats))
        self.beats(now_ns)

    def beats(self, now_ns: int, *, wants_ack: bool = False) -> None:
        digest = members_digest([ME.peer, OTHER.peer])
        self.at(now_ns, LoadRead(Load(), 3), Send(ANY_ROUTER, Heartbeat(Load(), 3, b"", digest, wants_ack)))


def test_uncalled_store_ignores_all_but_join_requests() -> None:
    it = Script()
    assert it.first == [] and it.member.next_deadline_ns is None
    it.at(500, ClockTicked())
    for late in (JoinAccepted((OTHER,)), Expelled("dead"), Refused("no"), PeerJoined(OTHER), HeartbeatAck()):
        it.hears(501, A, late)
    it.is_called(502, A, "a")
    it.hears(503, A, JoinRequest("a"))
    it.joins(505, A, "a")
    assert it.member.router == A


def test_calls_are_signs_of_life_and_a_silent_router_is_left() -> None:
    it = Script()
    it.is_called(0, A, "a")
    it.joins(1, A, "a")
    it.hears(9, A, JoinRequest("a"))
    it.at(30, ClockTicked(), ReadLoad(with_stats=False))
    it.beats(30, wants_ack=True)
    it.at(128, ClockTicked(), ReadLoad(with_stats=True))
    gone = LogWarning("the router at a is not heard any more; s1 waits to be called by another")
    it.at(138, ClockTicked(), gone, RemovePeer(OTHER.peer))
    assert it.member.is_detached and it.member.router is None and it.member.next_deadline_ns is None
    it.at(139, LoadRead(Load(), 3))
    it.is_called(200, Peer(ROUTER, 3), "b")
    assert it.member.addresses.address == "b"


def test_unanswered_call_expires() -> None:
    it = Script()
    it.is_called(0, A, "a")
    gone = LogWarning("the router at a is not heard any more; s1 waits to be called by another")
    it.at(120, ClockTicked(), gone)
    it.is_called(121, B, "b")


def test_another_router_is_told_that_the_store_has_one() -> None:
    """Its calls keep nothing alive: when the first router is silent, the next call is followed."""
    it = Script()
    it.is_called(0, A, "a")
    it.joins(1, A, "a")
    it.hears(2, B, JoinRequest("b"), Send(B, BELONGS))
    it.hears(3, B, RejoinRequest("b"), Send(B, BELONGS))
    it.hears(4, B, RejoinRequest("b", after=6), Send(B, BELONGS))
    assert it.member.router == A
    it.at(100, ClockTicked(), ReadLoad(with_stats=False))
    declined = Send(B, BELONGS), ReadLoad(with_stats=True)
    it.hears(119, B, JoinRequest("b"), *declined)
    gone = LogWarning("the router at a is not heard any more; s1 waits to be called by another")
    it.at(129, ClockTicked(), gone, RemovePeer(OTHER.peer))
    it.is_called(130, B, "b")


def test_store_follows_router_that_takes_over() -> None:
    it = Script()
    it.is_called(0, A, "a")
    it.joins(1, A, "a")
    takes_over = LogWarning("the router at b takes over: joining it")
    asks = ConnectRouter(ANY_ROUTER, "b"), Send(ANY_ROUTER, Join(ME, "b"))
    it.hears(2, B, RejoinRequest("b", after=7), takes_over, *asks)
    it.hears(3, A, RejoinRequest("a", after=6), Send(A, Refused("s1 belongs to the router at b")))


def test_store_follows_new_router_at_the_same_address() -> None:
    """Two cannot listen there."""
    it = Script()
    it.is_called(0, A, "a")
    it.joins(1, A, "a")
    asks = ConnectRouter(ANY_ROUTER, "a"), Send(ANY_ROUTER, Join(ME, "a"))
    it.hears(2, B, JoinRequest("a"), LogWarning("the router at a takes over: joining it"), *asks)


def test_store_with_configured_router_ignores_join_requests() -> None:
    it = Script("a")
    assert it.first == [ConnectRouter(ANY_ROUTER, "a"), Send(ANY_ROUTER, Join(ME, "a"))]
    it.hears(1, B, JoinRequest("b"), Send(B, BELONGS))
    it.hears(2, A, JoinRequest("a"))
    it.joins(3, A, "a")
    it.hears(4, B, JoinRequest("b"), Send(B, BELONGS))
    assert it.member.router == A


def test_store_refused_by_a_router_stays_standalone() -> None:
    it = Script()
    it.is_called(0, A, "a")
    alone = LogWarning("the router at a refuses this store: no; s1 waits to be called by another")
    it.hears(1, A, Refused("no"), alone)
    it.is_called(2, A, "a")


def test_ending_store_ignores_join_requests() -> None:
    it = Script()
    it.at(1, DrainRequested(50), Left())
    it.hears(2, A, JoinRequest("a"))


MESSAGES = st.one_of(
    st.builds(JoinRequest, st.sampled_from("ab")),
    st.builds(JoinRequest, st.sampled_from(["a", "b", ""])),
    st.builds(RejoinRequest, st.sampled_from(["a", "b", ""]), st.sampled_from([0, 7, 8])),
    st.builds(JoinAccepted, st.lists(st.sampled_from([OTHER]), max_size=1).map(tuple), st.sampled_from("ab")),
    st.builds(Expelled, st.just("silent"), st.integers(0, 20)),
    st.sampled_from([HeartbeatAck(), Refused("no"), PeerJoined(OTHER)]),
)


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([None, A, B]), MESSAGES), max_size=30))
def test_random_lives(life: list[tuple[int, Peer | None, AnyMessage]]) -> None:
    """Lines are kept for exactly the peers that are known; alone it has none and asks for nothing; it never ends."""
    it, now, lines = MemberMachine(ME, (), CONFIG), 0, {}
    it.start(0)
    pending: list[MemberAction] = []
    for later, router, message in life:
        now += later
        pending += it.handle(MessageArrived(router, message) if router is not None else ClockTicked(), now)
        while pending:
            match pending.pop(0):
                case AddPeer(info):
                    lines[info.peer.name] = info.peer
                case RemovePeer(peer):
                    assert lines.pop(peer.name) == peer
                case ReadLoad():
                    pending += it.handle(LoadRead(Load(), 0), now)
                case ChangeGeneration(_, _, generation_min):
                    pending += it.handle(GenerationChanged(replace(ME, peer=Peer("s1", generation_min))), now)
                case Send(to, Heartbeat() | Join() as said):
                    assert to == ANY_ROUTER and isinstance(said, Join) == (it.router is None) and not it.is_detached
                case Left():
                    raise AssertionError("it ends unasked")
        it.check_invariants()
        assert all(it.knows_peer(peer) for peer in lines.values()) and len(lines) == len(it._peers)
        assert (it.next_deadline_ns is None) == it.is_detached
        assert it.is_detached or it.next_deadline_ns > now


def test_store_leaves_a_router_shut_down_in_order_immediately() -> None:
    it = Script()
    it.is_called(0, A, "a")
    it.joins(1, A, "a")
    it.hears(2, B, Leave())
    assert it.member.router == A, "another router's end is no concern of it"
    ends = LogWarning("the router at a ends; s1 waits to be called by another")
    it.hears(3, A, Leave(), ends, RemovePeer(OTHER.peer))
    assert it.member.is_detached and it.member.next_deadline_ns is None
    it.hears(4, A, Leave())
    it.is_called(5, B, "b")


def test_store_leaves_a_router_that_ends_before_answering() -> None:
    it = Script()
    it.is_called(0, A, "a")
    it.hears(1, A, Leave(), LogWarning("the router at a ends; s1 waits to be called by another"))
    it.is_called(2, B, "b")


def test_store_with_configured_router_waits_for_its_return() -> None:
    it = Script("a")
    it.joins(1, A, "a")
    it.hears(2, A, Leave())
    assert it.member.router == A and not it.member.is_detached
