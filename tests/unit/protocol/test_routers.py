"""Which router hears what of an attempt."""

from __future__ import annotations

from msgspec import structs

from fleet_world import BLOCK, GEOMETRY, fleet_config
from instance_world import PROMPT, request
from memserve.base.types import KVGeometry, Role, TokenArray, TokenOutput
from memserve.instance.cluster.routers import Routers
from memserve.instance.machine import Instance
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.idempotency import AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.messages import RETRY_S, Cancel, Dispatch, JoinAccepted, PeerGone, RequestRefused, Span, Tokens
from memserve.protocol.peers import Load, Peer, PeerInfo

NO_KV = KVGeometry(1, 1, 1, 1, "float32", 1)
OWNER, R2, R3 = Peer("router", 5), Peer("router-2", 1), Peer("router-3", 1)


def info(peer: Peer, role: Role = Role.ROUTER) -> PeerInfo:
    return PeerInfo(peer, role, "virtual://", "", NO_KV, 0, 0, 0, False)


def output(name: str) -> TokenOutput:
    return TokenOutput(name, 0, (1,))


def routers() -> Routers:
    found = Routers(100)
    found.owner = OWNER
    assert found.set_members([info(R2), info(R3), info(Peer("p1", 1), Role.PREFILL)]) == []
    assert [*found.followers] == [R2, R3]
    return found


def test_each_router_hears_of_its_own_attempts() -> None:
    books = routers()
    books.assign_attempt("a", R2)
    books.assign_attempt("b", OWNER)
    books.assign_attempt("c", R3)
    told = books.route_outputs([output("a"), output("b"), output("c"), output("a")])
    assert told == [
        Send(R2, Tokens((output("a"), output("a")))),
        EmitTokens([output("b")]),
        Send(R3, Tokens((output("c"),))),
    ]
    assert books.route_refusal(RejectRequest("c", "full", 1.0)) == Send(R3, RequestRefused("c", "full", 1.0))
    assert books.route_refusal(RejectRequest("b", "full", 1.0)) == RejectRequest("b", "full", 1.0)
    assert [load.answers_told for _, load in books.loads_for_followers(Load())] == [1, 2]
    assert books.counts_of(None).answers_told == 2
    assert books.is_of("a", R2) and not books.is_of("a", R3) and not books.is_of("a", OWNER) and books.is_of("b", OWNER)
    books.check_invariants(("a", "b", "c"))
    assert books.all_routers == [OWNER, R2, R3]


def test_attempt_of_removed_follower_runs_until_taken_or_expired() -> None:
    books = routers()
    books.assign_attempt("a", R2)
    books.assign_attempt("b", R2)
    assert books.remove_member(R2) and not books.remove_member(R2)
    books.continue_detached("a", 10)
    books.continue_detached("b", 20)
    assert books.router_of("a") is None and books.route_outputs([output("a")]) == []
    assert books.route_refusal(RejectRequest("a", "why", None)) is None
    assert books.next_deadline_ns == 110
    books.assign_attempt("a", R3)
    assert books.router_of("a") == R3 and books.next_deadline_ns == 120
    books.check_invariants(("a", "b"))
    assert books.overdue_attempts(119) == [] and books.overdue_attempts(120) == ["b"]
    books.assign_attempt("b", OWNER)
    assert books.router_of("b") == OWNER and books.next_deadline_ns is None


def test_ended_attempt_stays_known_until_all_is_sent() -> None:
    books = routers()
    books.assign_attempt("a", R2)
    books.assign_attempt("left", R2)
    books.on_attempt_ended("a")
    books.on_attempt_ended("left")
    assert books.router_of("a") == R2
    books.forget_ended(lambda: {"left"})
    assert books.router_of("a") == OWNER and books.router_of("left") == R2
    books.forget_ended(set)
    assert books.router_of("left") == OWNER
    books.check_invariants(())


def test_a_newer_incarnation_takes_the_place_of_an_older_one() -> None:
    books = routers()
    books.assign_attempt("a", R2)
    assert books.on_member_joined(info(Peer("router-2", 2))) == R2
    assert books.on_member_joined(info(Peer("router-2", 2))) is None
    assert not books.is_follower(R2) and books.router_of("a") is None
    assert books.set_members([info(R3)]) == [Peer("router-2", 2)]
    assert [*books.followers] == [R3]
    books.owner_changes(Peer("router", 6))
    assert not books.is_of("b", OWNER) and books.is_of("b", Peer("router", 6))


class Shared:
    """An instance of two routers that has a part of a long sequence of the first one."""

    def __init__(self, key: str = "") -> None:
        self.machine = Instance(fleet_config(), BLOCK, self_peer=Peer("p", 1), geometry=GEOMETRY)
        self.hears(OWNER, JoinAccepted((info(R2), info(R3))))
        assert not self.told(self.part("a", R2, key))

    def hears(self, sender: Peer, message: object) -> list:
        actions = self.machine.handle(MessageArrived(sender, message), 0)
        self.machine.check_invariants()
        return actions

    def part(self, name: str, router: Peer, key: str = "") -> list:
        asked = structs.replace(request(name, PROMPT[:8]), key=key)
        return self.hears(router, Dispatch(asked, span=Span(nothing(), (), True)))

    @staticmethod
    def told(actions: list) -> list:
        return [action for action in actions if isinstance(action, Send | RejectRequest) and not is_of_feed(action)]

    @property
    def parts(self) -> list[str]:
        return [*self.machine.state.groups]


def nothing() -> TokenArray:
    return request("", PROMPT[:1]).prompt[:0]


def is_of_feed(action: object) -> bool:
    return isinstance(action, Send) and type(action.message).__name__ in ("KvEvents", "KvSnapshot", "Heartbeat")


def test_segment_of_second_sequence_waits_for_the_first_to_end() -> None:
    """Of whatever router; other requests are taken."""
    it = Shared()
    for name, router in (("b", R3), ("c", R2)):
        (refused,) = it.told(it.part(name, router))
        assert refused.to == router and isinstance(refused.message, RequestRefused)
        assert (refused.message.request_id, refused.message.retry_after_s) == (name, RETRY_S)
    (refused,) = it.told(it.part("d", OWNER))
    assert isinstance(refused, RejectRequest) and refused.request_id == "d"
    assert not it.told(it.hears(R3, Dispatch(request("short", PROMPT[:3])))) and it.parts == ["a", "short"]
    assert not it.told(it.part("a", R2)), "the same order again is none of another"
    it.hears(R3, Cancel("a"))
    assert it.parts == ["a", "short"], "another router has no say"
    it.hears(R2, Cancel("a"))
    assert not it.told(it.part("b", R3)) and it.parts == ["short", "b"]


def test_removed_router_leaves_no_segment() -> None:
    it = Shared("key")
    it.hears(OWNER, PeerGone(R2, "it died"))
    assert not it.parts and not it.told(it.part("b", R3))


def test_client_at_another_router_ends_segments_of_the_first() -> None:
    """They go on for no other router: the first one hears that its client has gone, and cancels."""
    it = Shared("key")
    assert not [one for one in it.told(it.hears(R3, QueryAnswers("other", ""))) if isinstance(one.message, AnswerTaken)]
    told = it.told(it.hears(R3, QueryAnswers("key", "")))
    assert told == [Send(R2, AnswerTaken("a")), Send(R3, AnswersHeld((), True, "key"))]
    assert len(it.told(it.hears(R2, QueryAnswers("key", "")))) == 1, "its own router is told of nothing new"


def test_conflicting_key_takes_no_answer_from_its_router() -> None:
    it = Shared()
    running = structs.replace(request("first", PROMPT[:3]), key="key", asked="body")
    it.hears(R2, Dispatch(running))
    for key, asked, refused in (("key", "other", "other"), ("else", "other", "")):
        assert it.told(it.hears(R3, QueryAnswers(key, asked))) == [Send(R3, AnswersHeld((), True, key, refused))]
    former, told = it.told(it.hears(R3, QueryAnswers("key", "body")))
    assert former == Send(R2, AnswerTaken("first"))
    assert [held.attempt_id for held in told.message.answers] == ["first"] and not told.message.refused
