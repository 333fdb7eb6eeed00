"""Running requests of an instance that drains: which are asked to leave, where to, and what the router does."""

from __future__ import annotations

from cluster_world import a_request, info
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, ClockTicked, FinishReason, Role, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import (
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Drain,
    HandedOver,
    Join,
    Leave,
    Migrate,
    MigrationRefused,
    PeerGone,
    QueryAttempts,
    RequestRefused,
    Tokens,
)
from memserve.router.events import InstanceDied, InstanceDrained, RequestArrived
from memserve.router.machine import Cluster
from memserve.router.requests.migration import MIGRATIONS_MAX

A, B, C = (info(name, Role.COLOCATED) for name in "abc")
P, D, E = (info(name, role) for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("e", Role.DECODE)))


class Play:
    """A router, what it has sent, and what clients have got."""

    def __init__(self, *members, migration="drain", **admission) -> None:
        gate = AdmissionConfig(**admission) if admission else AdmissionConfig()
        self.machine = Cluster(ClusterConfig(policy="least-load", migration=migration, admission=gate))
        self.now_ns, self.sent, self.got = 0, [], []
        for member in members:
            self.hears(member, Join(member))

    def post(self, event):
        self.now_ns += NS_PER_MS
        actions = self.machine.handle(event, self.now_ns)
        self.machine.check_invariants()
        sent = [(action.to.name, action.message) for action in actions if hasattr(action, "message")]
        self.sent += sent
        self.got += [output for action in actions for output in getattr(action, "outputs", ())]
        return [(to, message) for to, message in sent if not isinstance(message, Drain)]

    def hears(self, member, message):
        return self.post(MessageArrived(member.peer, message))

    def runs(self, name, *, max_tokens=50, **asked):
        """A request with its first token. Returns its instance."""
        ((to, dispatch),) = self.post(RequestArrived(a_request(name, range(20), max_tokens=max_tokens, **asked)))
        assert isinstance(dispatch, Dispatch)
        self.hears(next(m for m in (A, B, C, P) if m.peer.name == to), said(dispatch.request.request_id, 0, 7))
        return to

    def drain(self, member):
        return [message for to, message in self.post(InstanceDrained(member.peer.name)) if to == member.peer.name]

    def passes(self, ms):
        self.now_ns += ms * NS_PER_MS
        return self.post(ClockTicked())

    @property
    def counters(self):
        return self.machine.stats().counters


def said(attempt, offset, *new, last=False):
    reason = FinishReason.LENGTH if last else None
    return Tokens((TokenOutput(attempt, 0, new, finish_reason=reason, offset=offset),))


def test_requests_of_a_draining_instance_go_on_elsewhere() -> None:
    """Tokens of both come in any order; the client sees one answer, and no attempt has failed."""
    it = Play(A, B)
    assert it.runs("r") == "a"
    (order,) = it.drain(A)
    assert order == Migrate("r#1", B.peer, copies_ahead=True)
    it.hears(A, said("r#1", 1, 8))
    it.hears(B, HandedOver("r#1"))
    it.hears(B, said("r#1", 3, 1))
    it.hears(A, said("r#1", 2, 9))
    it.hears(A, Leave())
    it.hears(B, said("r#1", 4, 2, last=True))
    assert [token for output in it.got for token in output.tokens] == [7, 8, 9, 1, 2]
    assert it.counters.migrated == it.counters.migrations == 1 and not it.counters.attempts_failed
    assert not it.counters.recomputed_tokens


def test_a_few_migrate_at_once_and_the_next_follow() -> None:
    it = Play(A)
    for number in range(MIGRATIONS_MAX + 3):
        it.runs(f"r{number}")
    it.hears(B, Join(B))
    assert len(it.drain(A)) == MIGRATIONS_MAX
    assert not it.passes(250)
    for name, following in (("r0#1", "r4#5"), ("r2#3", "r5#6")):
        assert [message.request_id for _, message in it.hears(B, HandedOver(name))] == [following]


def test_each_goes_where_least_is_to_do() -> None:
    it = Play(A)
    for number in range(3):
        it.runs(f"r{number}")
    it.hears(B, Join(B))
    it.hears(C, Join(C))
    targets = [order.to.name for order in it.drain(A)]
    assert sorted(targets) in (["b", "b", "c"], ["b", "c", "c"])


def test_without_a_target_requests_stay_until_there_is_one() -> None:
    it = Play(A)
    it.runs("r")
    assert not it.drain(A) and not it.passes(1000)
    it.hears(B, Join(B))
    assert it.passes(250) == [("a", Migrate("r#1", B.peer))]


def test_shorter_contexts_are_no_targets() -> None:
    """The answer would end earlier there."""
    small = info("s", Role.COLOCATED, context_tokens=40)
    it = Play(A)
    it.runs("r", max_tokens=50)
    it.hears(small, Join(small))
    assert not it.drain(A)


def test_parallel_samples_and_beams_stay() -> None:
    it = Play(A)
    it.runs("n", n=2)
    it.hears(B, Join(B))
    assert not it.drain(A)


def test_a_refused_request_is_asked_for_again_a_few_times() -> None:
    it = Play(A, B)
    it.runs("r")
    it.drain(A)
    asked = 1
    for _ in range(12):
        it.hears(A, MigrationRefused("r#1", "no room"))
        asked += len(it.passes(250))
    assert asked == 8 and it.counters.migrated == 0
    it.hears(A, said("r#1", 1, 8, last=True))


def test_an_order_is_repeated_when_nothing_is_heard() -> None:
    it = Play(A, B)
    it.runs("r")
    (order,) = it.drain(A)
    again = [message for ms in range(0, 5500, 250) for _, message in it.passes(250) if isinstance(message, Migrate)]
    assert again == [order]


def test_the_targets_death_costs_nothing() -> None:
    """The source is asked whether it has the request, since word of the handover may have died, too."""
    it = Play(A, B)
    it.runs("r")
    it.drain(A)
    sent = it.post(InstanceDied("b", "was killed"))
    assert [type(message) for to, message in sent if to == "a"][:1] == [QueryAttempts]
    it.hears(A, AttemptsUnknown((), 1, 1, 1))
    it.hears(A, said("r#1", 1, 8))
    assert not it.counters.attempts_failed and len(it.got) == 2


def test_what_died_with_the_target_is_tried_again() -> None:
    it = Play(A, B, C)
    it.runs("r")
    (order,) = it.drain(A)
    target, other = (B, C) if order.to == B.peer else (C, B)
    it.post(InstanceDied(target.peer.name, "was killed"))
    sent = it.hears(A, AttemptsUnknown(("r#1",), 1, 1, 1))
    (dispatch,) = [message for to, message in sent if to == other.peer.name]
    assert dispatch.generated == ((7,),) and it.counters.recomputed_tokens == 21


def test_the_sources_death_is_one_of_any_instance() -> None:
    it = Play(A, B)
    it.runs("r")
    it.drain(A)
    sent = it.post(InstanceDied("a", "was killed"))
    assert [type(message) for to, message in sent if to == "b"] == [Cancel, PeerGone, Dispatch]
    assert it.counters.attempts_failed == {"gone": 1}


def test_a_request_that_waits_is_placed_anew() -> None:
    it = Play(A)
    it.post(RequestArrived(a_request("w", range(20), max_tokens=5)))
    it.hears(B, Join(B))
    assert it.drain(A) == [Migrate("w#1", B.peer)]
    sent = it.hears(A, RequestRefused("w#1", "the instance is about to leave", 0.0))
    assert [type(message) for to, message in sent if to == "b"] == [Cancel, Dispatch]


def test_a_handed_over_request_migrates_from_its_decode_instance() -> None:
    """And on from there: late words of every earlier instance count."""
    it = Play(P, D)
    it.runs("r")
    it.hears(D, HandedOver("r#1"))
    it.hears(D, said("r#1", 1, 8))
    it.hears(E, Join(E))
    assert it.drain(D) == [Migrate("r#1", E.peer)]
    it.hears(E, HandedOver("r#1"))
    later = info("f", Role.DECODE)
    it.hears(later, Join(later))
    assert it.drain(E) == [Migrate("r#1", later.peer)]
    it.hears(later, HandedOver("r#1"))
    it.hears(later, said("r#1", 3, 1, last=True))
    it.hears(D, said("r#1", 2, 9))
    assert [token for output in it.got for token in output.tokens] == [7, 8, 9, 1]


def test_one_that_is_being_handed_over_arrives_first() -> None:
    it = Play(P, D, E)
    it.runs("r")
    (dispatch,) = [message for _, message in it.sent if isinstance(message, Dispatch)]
    decoder, other = (D, E) if dispatch.decode_at == D.peer else (E, D)
    assert not it.drain(decoder) and not it.passes(250)
    it.hears(decoder, HandedOver("r#1"))
    assert it.passes(250) == [(decoder.peer.name, Migrate("r#1", other.peer))]


def test_memory_is_reserved_at_target_and_freed_at_source() -> None:
    """By the router's own ledger, whose invariants are checked behind every event."""
    it = Play(A, B, mode=Admission.MEMORY)
    it.runs("r")
    it.drain(A)
    it.hears(A, MigrationRefused("r#1", "no room"))
    it.passes(250)
    it.hears(B, HandedOver("r#1"))
    it.hears(B, said("r#1", 1, 8, last=True))
    assert it.counters.migrated == 1


def test_migration_may_be_switched_off() -> None:
    it = Play(A, B, migration="off")
    it.runs("r")
    assert not it.drain(A) and not it.passes(1000)
