"""Answers with a key at the router: which connection reads them, for how long they are kept, and what a restarted
router makes of what instances have."""

from __future__ import annotations

from cluster_world import a_request, info
from memserve.base.config import ClusterConfig
from memserve.base.types import ClockTicked, FinishReason, Request, Role, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.protocol.events import EmitTokens, KeyConflict, MessageArrived, RejectRequest, Send, SequenceStopped
from memserve.protocol.idempotency import AnswerHeld, AnswersHeld
from memserve.protocol.messages import Cancel, Dispatch, Join, RequestRefused, Tokens
from memserve.protocol.peers import Peer
from memserve.protocol.records import RecoveredMember, RecoveredState
from memserve.router.events import RequestArrived, RequestCancelled, StateRecovered
from memserve.router.machine import Cluster
from memserve.router.requests.idempotency import OTHER_REQUEST, TAKEN_OVER

C, F = info("c", Role.COLOCATED), info("f", Role.COLOCATED)
ROUTER = Peer("router", 2)
WAIT_NS = 2 * NS_PER_S


class Router:
    """A machine that is checked after every event, and what it wants done."""

    def __init__(self, *members, recovers: bool = False, **config) -> None:
        self.machine = Cluster(
            ClusterConfig(policy="least-load", **{"answer_ns": WAIT_NS} | config), remembers=recovers
        )
        self.now = 0
        self.actions: list = []
        if recovers:
            known = tuple(RecoveredMember(member, False, 0, b"", b"") for member in members)
            self.do(StateRecovered(RecoveredState(members=known), ROUTER, "tcp://router"))
        else:
            for member in members:
                self.hear(member, Join(member))

    def do(self, event: object, now_ns: int | None = None) -> list:
        self.now = self.now if now_ns is None else now_ns
        self.actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return self.actions

    def hear(self, member, message) -> list:
        return self.do(MessageArrived(member.peer, message))

    def ask(self, connection: str, asked: str = "body", key: str = "key", **more) -> list:
        return self.do(RequestArrived(keyed(connection, asked, key, **more)))

    def told(self) -> list[tuple[str, int, tuple[int, ...], FinishReason | None]]:
        emitted = [action for action in self.actions if isinstance(action, EmitTokens)]
        outputs = [output for action in emitted for output in action.outputs]
        return [(o.request_id, o.index, o.tokens, o.finish_reason) for o in outputs]

    def sent(self, kind: type) -> list:
        return [a.message for a in self.actions if isinstance(a, Send) and isinstance(a.message, kind)]

    def rejected(self) -> list[tuple[str, KeyConflict | None]]:
        return [(a.request_id, a.conflict) for a in self.actions if isinstance(a, RejectRequest)]


def keyed(connection: str, asked: str = "body", key: str = "key", **more) -> Request:
    return a_request(connection, range(10), max_tokens=4, key=key, asked=asked, created_s=77, **more)


def tokens(attempt: str, offset: int, *new: int, last: bool = False, index: int = 0) -> Tokens:
    reason = FinishReason.LENGTH if last else None
    return Tokens((TokenOutput(attempt, index, new, finish_reason=reason, offset=offset),))


def held(attempt: str, *told: int, runs: bool = True, asked: str = "body", last: bool = True, ends: bool = False):
    reason = FinishReason.LENGTH if ends else None
    outputs = (TokenOutput(attempt, 0, told, finish_reason=reason),) if told else ()
    return AnswersHeld((AnswerHeld("key", asked, attempt, runs, 55, outputs),), last)


def test_reconnected_client_gets_full_replay_and_continues() -> None:
    it = Router(C)
    it.ask("a")
    (order,) = it.sent(Dispatch)
    attempt = order.request.request_id
    it.hear(C, tokens(attempt, 0, 5))
    assert it.told() == [("a", 0, (5,), None)]
    it.do(RequestCancelled("a"))
    assert it.sent(Cancel) == [] and it.rejected() == [("a", None)], "the host forgets the connection"
    it.hear(C, tokens(attempt, 1, 6))
    assert it.told() == []
    it.ask("b")
    assert it.told() == [("b", 0, (5, 6), None)] and it.sent(Dispatch) == []
    it.hear(C, tokens(attempt, 2, 7, 8, last=True))
    assert it.told() == [("b", 0, (7, 8), FinishReason.LENGTH)]
    it.ask("late")
    assert it.told() == [("late", 0, (5, 6, 7, 8), FinishReason.LENGTH)], "complete answers are kept"
    (emitted,) = [action for action in it.actions if isinstance(action, EmitTokens)]
    assert ("created", 77) in emitted.outputs[0].story
    assert it.machine.stats().counters.answers_continued == 2


def test_the_newest_connection_takes_the_answer_over() -> None:
    it = Router(C)
    it.ask("a")
    attempt = it.sent(Dispatch)[0].request.request_id
    it.ask("b")
    assert it.rejected() == [("a", KeyConflict.TAKEN_OVER)] and it.actions[0].reason == TAKEN_OVER
    it.do(RequestCancelled("a"))
    assert it.sent(Cancel) == [], "the first connection ends nothing any more"
    it.hear(C, tokens(attempt, 0, 5, 6))
    assert it.told() == [("b", 0, (5, 6), None)]
    it.do(SequenceStopped("b", 0))
    assert it.told() == [("b", 0, (), FinishReason.STOP)] and it.sent(Cancel)


def test_reused_key_with_another_body_is_a_conflict() -> None:
    it = Router(C)
    it.ask("a")
    it.ask("b", asked="another body")
    assert it.rejected() == [("b", KeyConflict.OTHER_REQUEST)] and it.actions[0].reason == OTHER_REQUEST
    it.ask("c", asked="another body", key="another key")
    assert it.rejected() == [] and len(it.sent(Dispatch)) == 1


def test_abandoned_keyed_request_is_cancelled_and_forgotten() -> None:
    it = Router(C)
    it.ask("a")
    attempt = it.sent(Dispatch)[0].request.request_id
    it.do(RequestCancelled("a"), 1)
    it.hear(C, tokens(attempt, 0, 5))
    it.do(ClockTicked(), 1 + WAIT_NS)
    assert [cancel.request_id for cancel in it.sent(Cancel)] == [attempt]
    assert len(it.machine.answers) == 0 and it.machine.answers.nbytes == 0
    it.ask("b")
    assert len(it.sent(Dispatch)) == 1, "it is computed again"


def test_failed_answer_is_not_retained_and_others_expire() -> None:
    it = Router(C)
    it.ask("a", deadline_ns=NS_PER_S)
    it.do(ClockTicked(), NS_PER_S)
    assert it.told() == [("a", 0, (), FinishReason.DEADLINE)] and len(it.machine.answers) == 0
    it.ask("b")
    attempt = it.sent(Dispatch)[0].request.request_id
    it.hear(C, tokens(attempt, 0, 1, 2, 3, 4, last=True))
    assert len(it.machine.answers) == 1
    it.do(ClockTicked(), it.now + WAIT_NS)
    assert len(it.machine.answers) == 0


def test_replay_memory_limit_evicts_oldest_unread_answers() -> None:
    it = Router(C, answer_bytes=2500)
    attempts = []
    for number in range(4):
        it.ask(f"a{number}", key=f"key{number}")
        attempts.append(it.sent(Dispatch)[0].request.request_id)
    assert len(it.machine.answers) == 4
    for attempt in attempts[:3]:
        it.hear(C, tokens(attempt, 0, 1, 2, 3, 4, last=True))
    assert len(it.machine.answers) == 2, "the one that is read, and the newest of the others"
    it.ask("again", key="key2")
    assert it.told() and not it.sent(Dispatch)
    it.ask("again", key="key0")
    assert len(it.sent(Dispatch)) == 1


def test_restarted_router_resumes_answers_running_at_members() -> None:
    it = Router(C, F, recovers=True)
    it.ask("b")
    it.hear(C, Join(C))
    assert it.sent(Dispatch) == [], "another member may have it"
    it.hear(F, Join(F))
    it.hear(F, held("a#1", 5, 6))
    assert it.sent(Dispatch) == [] and it.told() == []
    it.hear(F, tokens("a#1", 2, 7))
    assert it.told() == [] and it.sent(Cancel) == []
    it.hear(C, AnswersHeld((), True))
    assert it.told() == [("b", 0, (5, 6, 7), None)] and it.sent(Dispatch) == []
    (emitted,) = [action for action in it.actions if isinstance(action, EmitTokens)]
    assert ("created", 55) in emitted.outputs[0].story, "of the first time"
    it.hear(F, tokens("a#1", 3, 8, last=True))
    assert it.told() == [("b", 0, (8,), FinishReason.LENGTH)]
    assert it.machine.stats().counters.attempts_adopted == 1


def rejoined(recovers: bool = True) -> Router:
    it = Router(C, recovers=recovers)
    it.hear(C, Join(C))
    return it


def test_retained_answer_that_is_not_running_is_resumed() -> None:
    it = rejoined()
    it.hear(C, held("a#1", 5, 6, runs=False))
    it.ask("b")
    (order,) = it.sent(Dispatch)
    assert order.generated == ((5, 6),) and [output.tokens for output in order.told] == [(5, 6)]
    assert it.told() == [("b", 0, (5, 6), None)]


def test_complete_retained_answer_needs_no_instance() -> None:
    it = rejoined()
    it.hear(C, held("a#1", 5, 6, 7, 8, runs=False, ends=True))
    it.ask("b")
    assert it.told() == [("b", 0, (5, 6, 7, 8), FinishReason.LENGTH)] and it.sent(Dispatch) == []


def test_unclaimed_recovered_attempt_is_cancelled() -> None:
    it = rejoined()
    it.hear(C, held("a#1", 5))
    it.do(ClockTicked(), WAIT_NS)
    assert [cancel.request_id for cancel in it.sent(Cancel)] == ["a#1"] and len(it.machine.answers) == 0


def test_refused_or_gapped_attempt_is_not_resumed() -> None:
    it = rejoined()
    it.hear(C, held("a#1", 5))
    it.hear(C, RequestRefused("a#1", "no instance took it over", 0.0))
    it.ask("b")
    assert len(it.sent(Dispatch)) == 1
    it = rejoined()
    it.hear(C, held("a#1", 5))
    it.hear(C, tokens("a#1", 2, 9))
    assert [cancel.request_id for cancel in it.sent(Cancel)] == ["a#1"]
    it.ask("b")
    assert it.told() == [("b", 0, (5,), None)] and it.sent(Dispatch)[0].generated == ((5,),)


def test_other_attempts_of_the_same_answer_are_cancelled() -> None:
    it = Router(C, F, recovers=True)
    it.hear(C, Join(C))
    it.hear(F, Join(F))
    it.hear(C, held("a#1", 5))
    it.hear(F, held("a#2", 5, 6))
    it.ask("b")
    assert it.told() == [("b", 0, (5, 6), None)]
    assert [cancel.request_id for cancel in it.sent(Cancel)] == ["a#1"]
    it.hear(C, held("a#7", 5))
    assert [cancel.request_id for cancel in it.sent(Cancel)] == ["a#7"], "it is too late"


def test_decode_instance_of_handover_wins_in_any_report_order() -> None:
    for order in ((C, F), (F, C)):
        it = Router(C, F, recovers=True)
        it.hear(C, Join(C))
        it.hear(F, Join(F))
        for member in order:
            it.hear(member, held("a#1", 5, runs=False) if member is C else held("a#1", 5, 6, 7))
        it.ask("b")
        assert it.told() == [("b", 0, (5, 6, 7), None)] and not it.sent(Dispatch) and not it.sent(Cancel)


def test_body_differing_from_recovered_answer_is_a_conflict() -> None:
    it = rejoined()
    it.hear(C, held("a#1", 5))
    it.ask("b", asked="another body")
    assert it.rejected() == [("b", KeyConflict.OTHER_REQUEST)]


def test_recovery_stops_waiting_for_missing_members() -> None:
    it = Router(C, F, recovers=True)
    it.hear(C, Join(C))
    it.hear(C, AnswersHeld((), True))
    it.ask("b")
    assert it.sent(Dispatch) == []
    dead_ns = it.machine.config.dead_after_ns
    it.machine._registry.get(C.peer).last_seen_ns = dead_ns
    it.do(ClockTicked(), dead_ns)
    assert len(it.sent(Dispatch)) == 1
