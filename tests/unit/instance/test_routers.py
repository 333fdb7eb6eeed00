"""Which router hears what of an attempt."""

from __future__ import annotations

from memserve.instance.routers import Routers
from memserve.messages import Load, Peer, PeerInfo, RequestRefused, Tokens
from memserve.serving import EmitTokens, RejectRequest, Send
from memserve.types import KVGeometry, Role, TokenOutput

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
    books.begins("a", R2)
    books.begins("b", OWNER)
    books.begins("c", R3)
    told = books.tokens([output("a"), output("b"), output("c"), output("a")])
    assert told == [
        Send(R2, Tokens((output("a"), output("a")))),
        EmitTokens([output("b")]),
        Send(R3, Tokens((output("c"),))),
    ]
    assert books.refusal(RejectRequest("c", "full", 1.0)) == Send(R3, RequestRefused("c", "full", 1.0))
    assert books.refusal(RejectRequest("b", "full", 1.0)) == RejectRequest("b", "full", 1.0)
    assert [load.answers_told for _, load in books.loads(Load())] == [1, 2]
    assert books.counts(None).answers_told == 2
    assert books.is_of("a", R2) and not books.is_of("a", R3) and not books.is_of("a", OWNER) and books.is_of("b", OWNER)
    books.check_invariants(("a", "b", "c"))
    assert books.others(R2) == [OWNER, R3] and books.others(OWNER) == [R2, R3]


def test_an_attempt_whose_follower_is_gone_goes_on_for_a_while_and_is_taken_by_another() -> None:
    books = routers()
    books.begins("a", R2)
    books.begins("b", R2)
    assert books.left(R2) and not books.left(R2)
    books.goes_on_alone("a", 10)
    books.goes_on_alone("b", 20)
    assert books.router_of("a") is None and books.tokens([output("a")]) == []
    assert books.refusal(RejectRequest("a", "why", None)) is None
    assert books.next_deadline_ns == 110
    books.begins("a", R3)
    assert books.router_of("a") == R3 and books.next_deadline_ns == 120
    books.check_invariants(("a", "b"))
    assert books.overdue(119) == [] and books.overdue(120) == ["b"]
    books.begins("b", OWNER)
    assert books.router_of("b") == OWNER and books.next_deadline_ns is None


def test_what_has_ended_can_be_spoken_of_until_all_is_said() -> None:
    books = routers()
    books.begins("a", R2)
    books.begins("left", R2)
    books.ended("a")
    books.ended("left")
    assert books.router_of("a") == R2
    books.forget_ended(lambda: {"left"})
    assert books.router_of("a") == OWNER and books.router_of("left") == R2
    books.forget_ended(set)
    assert books.router_of("left") == OWNER
    books.check_invariants(())


def test_a_newer_incarnation_takes_the_place_of_an_older_one() -> None:
    books = routers()
    books.begins("a", R2)
    assert books.joined(info(Peer("router-2", 2))) == R2
    assert books.joined(info(Peer("router-2", 2))) is None
    assert not books.is_follower(R2) and books.router_of("a") is None
    assert books.set_members([info(R3)]) == [Peer("router-2", 2)]
    assert [*books.followers] == [R3]
    books.owner_changes(Peer("router", 6))
    assert not books.is_of("b", OWNER) and books.is_of("b", Peer("router", 6))
