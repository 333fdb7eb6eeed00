"""An instance as a member: golden scripts of what it hears and must do, and random lives that keep its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fake_instances import GEOMETRY
from memserve.base.config import MemberConfig
from memserve.base.errors import InvariantError
from memserve.base.types import ClockTicked, Role
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member import ANY_ROUTER, MemberMachine, RouterAddresses
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
    Cancel,
    Drain,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Leave,
    PeerGone,
    PeerJoined,
    Refused,
    RejoinRequest,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo, members_digest

CONFIG = MemberConfig(beat_ns=10, stats_every=2, asks_after_ns=20, silent_after_ns=120, turn_ns=40)
OLD, NEW = Peer(ROUTER, 7), Peer(ROUTER, 8)
IDLE, BUSY = Load(), Load(sequences_running=3, requests_waiting=2)


def info_of(name: str, generation: int) -> PeerInfo:
    return PeerInfo(Peer(name, generation), Role.COLOCATED, f"at-{name}", "model", GEOMETRY, 8, 0, 64, True)


ME, OTHER = info_of("c1", 5), info_of("c2", 1)


class Script:
    """Feeds one member, and checks what it wants done."""

    def __init__(self, *routers: str) -> None:
        self.member = MemberMachine(ME, routers or ("a",), CONFIG)
        first = self.member.start(0)
        assert first == [ConnectRouter(ANY_ROUTER, "a"), Send(ANY_ROUTER, Join(ME, "a"))]

    def at(self, now_ns: int, event: MemberEvent, *wanted: MemberAction) -> None:
        """At ``now_ns`` comes ``event``; these actions follow, in this order."""
        assert self.member.handle(event, now_ns) == list(wanted)
        self.member.check_invariants()

    def hears(self, now_ns: int, sender: Peer, message: AnyMessage, *wanted: MemberAction) -> None:
        self.at(now_ns, MessageArrived(sender, message), *wanted)

    def joins(self, now_ns: int, router: Peer = OLD, *peers: PeerInfo) -> None:
        """It is accepted, and its first heartbeat follows at once."""
        welcome = JoinAccepted(peers, "a")
        meets = [AddPeer(info) for info in peers]
        dial, deliver = ConnectRouter(router, "a"), ForwardMessage(router, welcome)
        self.hears(now_ns, router, welcome, dial, *meets, Joined(), deliver, ReadLoad(with_stats=True))
        self.beats(now_ns, IDLE, ME, *peers)

    def beats(self, now_ns: int, load: Load, *members: PeerInfo, wants_ack: bool = False, then: tuple = ()) -> None:
        """The load is read, and told."""
        digest = members_digest(info.peer for info in members)
        self.at(now_ns, LoadRead(load, 3), Send(ANY_ROUTER, Heartbeat(load, 3, b"", digest, wants_ack)), *then)


def test_join_is_repeated_until_accepted_then_heartbeats() -> None:
    it = Script()
    it.at(9, ClockTicked())
    it.at(10, ClockTicked(), Send(ANY_ROUTER, Join(ME, "a")))
    it.joins(15, OLD, OTHER)
    it.at(25, ClockTicked(), ReadLoad(with_stats=False))
    it.beats(26, BUSY, ME, OTHER)
    it.hears(
        27, OLD, PeerGone(OTHER.peer, "died"), ForwardMessage(OLD, PeerGone(OTHER.peer, "died")), RemovePeer(OTHER.peer)
    )
    it.at(35, ClockTicked(), ReadLoad(with_stats=True))
    it.beats(36, IDLE, ME)
    it.hears(37, OLD, PeerJoined(OTHER), AddPeer(OTHER), ForwardMessage(OLD, PeerJoined(OTHER)))
    assert it.member.knows_peer(OTHER.peer) and not it.member.knows_peer(Peer("c2", 9))
    it.hears(38, OTHER.peer, Cancel("x"), ForwardMessage(OTHER.peer, Cancel("x")))
    it.hears(39, OLD, HeartbeatAck())
    again = JoinAccepted((), "elsewhere")  # it lacks a member, the router has noticed
    it.hears(40, OLD, again, ConnectRouter(OLD, "a"), RemovePeer(OTHER.peer), ForwardMessage(OLD, again))


def test_drain_lets_running_requests_finish() -> None:
    it = Script()
    it.joins(5)
    it.hears(6, OLD, Drain(), ForwardMessage(OLD, Drain()))
    it.at(15, ClockTicked(), ReadLoad(with_stats=False))
    it.beats(15, BUSY, ME)
    it.at(25, ClockTicked(), ReadLoad(with_stats=True))
    it.beats(25, IDLE, ME, then=(Send(OLD, Leave()), Left()))
    assert it.member.next_deadline_ns is None


def test_it_stays_while_a_store_is_still_offered_kv() -> None:
    it = Script()
    it.joins(5)
    it.at(7, DrainRequested(2_000_000_000, ""), Send(OLD, Drain()), ReadLoad(with_stats=False))
    heartbeat = Send(ANY_ROUTER, Heartbeat(IDLE, 3, b"", members_digest([ME.peer]), False))
    it.at(8, LoadRead(IDLE, 3, offers_wait=True), heartbeat)
    it.at(17, ClockTicked(), ReadLoad(with_stats=True))
    it.beats(18, IDLE, ME, then=(Send(OLD, Leave()), Left()))


def test_patience_with_what_runs_ends() -> None:
    it = Script()
    it.joins(5)
    it.at(7, DrainRequested(2_000_000_000, "SIGTERM"), Send(OLD, Drain()), ReadLoad(with_stats=False))
    said = "SIGTERM: instance c1 leaves; 3 sequences run and 2 requests wait here, and have 2 s to finish"
    it.beats(8, BUSY, ME, then=(LogWarning(said),))
    it.at(2_000_000_007, ClockTicked(), ReadLoad(with_stats=True))
    it.beats(2_000_000_008, BUSY, ME, then=(Send(OLD, Leave()), Left()))


def test_leaving_at_once_needs_no_router() -> None:
    it = Script()
    it.at(3, DrainRequested(60), Left())
    it = Script()
    it.joins(5)
    it.at(6, DrainRequested(0), Send(OLD, Drain()), Send(OLD, Leave()), Left())
    it.at(7, LoadRead(IDLE, 3))


def test_refusal_ends_member_unless_accepted_elsewhere() -> None:
    it = Script()
    it.hears(3, OLD, Refused("another model"), Left("another model"))
    it = Script()
    it.joins(5)
    it.hears(6, NEW, Refused("another model"))


def test_takeover_router_is_joined_and_old_one_ignored() -> None:
    it = Script("a", "b")
    it.joins(5)
    takes_over = LogWarning("the router at b takes over: joining it")
    it.hears(6, NEW, RejoinRequest("b"), takes_over, ConnectRouter(ANY_ROUTER, "b"), Send(ANY_ROUTER, Join(ME, "b")))
    it.hears(7, NEW, RejoinRequest("b"))
    it.hears(8, OLD, RejoinRequest("a"))
    it.hears(9, OLD, JoinAccepted((OTHER,)))
    it.hears(10, OLD, Expelled("dead"))
    assert it.member.router is None
    welcome = JoinAccepted((), "b")
    it.hears(
        11, NEW, welcome, ConnectRouter(NEW, "b"), Joined(), ForwardMessage(NEW, welcome), ReadLoad(with_stats=False)
    )
    assert it.member.router == NEW


def test_expelled_member_ignores_messages_until_new_generation() -> None:
    it = Script()
    it.joins(5)
    it.hears(
        6,
        OLD,
        Expelled("silent", 9),
        LogWarning("expelled (silent): joining again"),
        ChangeGeneration(OLD, "silent", 10),
    )
    assert it.member.next_deadline_ns is None
    it.hears(7, OLD, Expelled("silent", 9))
    it.hears(8, OLD, PeerJoined(OTHER))
    it.at(9, LoadRead(IDLE, 3))
    born = replace(ME, peer=Peer("c1", 12))
    it.at(30, GenerationChanged(born), ConnectRouter(ANY_ROUTER, "a"), Send(ANY_ROUTER, Join(born, "a")))
    with pytest.raises(InvariantError, match="not newer"):
        it.member.handle(GenerationChanged(ME), 31)


def test_silent_router_is_probed_then_sought_at_next_address() -> None:
    it = Script("a", "b")
    it.joins(5)
    it.at(30, ClockTicked(), ReadLoad(with_stats=False))
    it.beats(30, IDLE, ME, wants_ack=True)
    gone = LogWarning("no router is heard: trying b"), ConnectRouter(ANY_ROUTER, "b")
    it.at(125, ClockTicked(), *gone, ReadLoad(with_stats=True))
    it.hears(126, OLD, HeartbeatAck(), ConnectRouter(OLD, "a"))
    assert it.member.addresses.address == it.member.addresses.joined_address == "a"


def test_router_found_again_gets_a_connection_of_its_own() -> None:
    """The line was dialled to any router: what is sent to this one would be lost."""
    it = Script("a", "b")
    it.joins(5)
    it.at(
        125, ClockTicked(), LogWarning("no router is heard: trying b"), ConnectRouter(ANY_ROUTER, "b"), ReadLoad(False)
    )
    back = LogWarning("no router is heard: trying a"), ConnectRouter(ANY_ROUTER, "a")
    it.at(165, ClockTicked(), *back, ReadLoad(with_stats=True))
    it.hears(166, OLD, HeartbeatAck(), ConnectRouter(OLD, "a"))
    it.hears(167, OLD, HeartbeatAck())


def test_addresses_are_tried_in_turn() -> None:
    them = RouterAddresses(["a", "b", "c"], CONFIG)
    tried = [them.address for now in range(0, 180, 20) if them.try_next(now)]
    assert tried == ["b", "c", "a", "b"], "as long as there is no router"
    them.mark_contact(200)
    them.set_joined("")
    assert them.joined_address == "b", "not said where: the one that is tried"
    them.address = "c"
    them.set_joined("b")
    assert (them.address, them.joined_address) == ("b", "b")
    assert not them.try_next(310) and them.wants_ack(310), "its own router has longer"
    assert them.try_next(320) and (them.address, them.joined_address) == ("c", "b")
    them.switch_to("d", 321)
    assert (them.address, them.joined_address, str(them)) == ("d", None, "a, b, d")
    them.switch_to("a", 322)
    assert (them.address, str(them)) == ("a", "a, b, d")
    them.set_joined("nowhere")
    assert (them.address, them.joined_address) == ("a", "a"), "an address that was never tried is none"
    alone = RouterAddresses(["a"], CONFIG)
    assert not alone.try_next(10**9) and not alone.wants_ack(10**9)


MESSAGES = st.one_of(
    st.builds(
        JoinAccepted, st.lists(st.sampled_from([OTHER, info_of("c2", 2), info_of("c3", 1)]), max_size=2).map(tuple)
    ),
    st.builds(RejoinRequest, st.sampled_from("abz")),
    st.builds(PeerJoined, st.sampled_from([OTHER, info_of("c2", 2), ME])),
    st.builds(PeerGone, st.sampled_from([OTHER.peer, Peer("c2", 2)]), st.just("gone")),
    st.builds(Expelled, st.just("silent"), st.integers(0, 20)),
    st.sampled_from([HeartbeatAck(), Drain(), Refused("no"), Cancel("x")]),
)


@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(["tick", "drain", OLD, NEW]), MESSAGES), max_size=25))
def test_random_lives(life: list[tuple[int, object, AnyMessage]]) -> None:
    """Lines are kept for exactly the peers that are known; a member beats, others ask to join; it leaves once."""
    it, now_ns, lines, left = MemberMachine(ME, ["a", "b"], CONFIG), 0, {}, 0
    it.start(0)
    pending: list[MemberAction] = []
    for later, kind, message in life:
        now_ns += later
        event: MemberEvent = ClockTicked()
        if kind == "drain":
            event = DrainRequested(50)
        elif isinstance(kind, Peer):
            event = MessageArrived(kind, message)
        pending += it.handle(event, now_ns)
        while pending:
            match pending.pop(0):
                case AddPeer(info):
                    lines[info.peer.name] = info.peer
                case RemovePeer(peer):
                    assert lines.pop(peer.name) == peer
                case ReadLoad():
                    pending += it.handle(LoadRead(IDLE, 0), now_ns)
                case ChangeGeneration(_, _, generation_min):
                    pending += it.handle(GenerationChanged(replace(ME, peer=Peer("c1", generation_min))), now_ns)
                case Send(to, Heartbeat() | Join() as said):
                    assert to == ANY_ROUTER and isinstance(said, Join) == (it.router is None)
                case Left():
                    left += 1
        it.check_invariants()
        assert all(it.knows_peer(peer) for peer in lines.values()) and len(lines) == len(it._peers)
        if left:
            return
        assert it.next_deadline_ns is not None and it.next_deadline_ns > now_ns


def test_instance_announces_its_end_to_the_store() -> None:
    """The router may be gone, and tell it nothing."""
    it = Script()
    store = replace(info_of("s", 3), role=Role.STORE)
    it.joins(5, OLD, OTHER, store)
    ends = Send(store.peer, Leave()), Send(OLD, Leave())
    it.at(6, DrainRequested(0), Send(OLD, Drain()), *ends, Left())
