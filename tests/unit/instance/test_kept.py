"""What an instance keeps of answers with a key: all that was told, for a bounded time, in bounded memory."""

from __future__ import annotations

import pytest

from memserve.base.types import FinishReason, Request, TokenLogprobs, TokenOutput
from memserve.instance.cluster.idempotency import ReplayBuffer
from memserve.protocol.idempotency import AnswerLog
from memserve.protocol.peers import Peer

ROUTER, NEXT = Peer("router", 1), Peer("router", 2)


def request(name: str, key: str = "key", **more) -> Request:
    return Request(name, b"", key=key, asked="body", created_s=9, **more)


def output(name: str, offset: int, *tokens: int, reason: FinishReason | None = None, **more) -> TokenOutput:
    return TokenOutput(name, 0, tokens, finish_reason=reason, offset=offset, **more)


def one(kept: ReplayBuffer):
    (message,) = kept.take_messages()
    assert message.is_last
    (answer,) = message.answers
    return answer


def test_next_router_gets_every_answer_once() -> None:
    kept = ReplayBuffer(100, 1 << 20)
    kept.on_router_accepted(ROUTER)
    assert [len(message.answers) for message in kept.take_messages()] == [0]
    kept.open_answer(request("a#1"), (), ())
    kept.record_outputs([output("a#1", 0, 5, cached_tokens=3), output("other", 0, 1), output("a#1", 1, 6)])
    kept.on_router_accepted(ROUTER)
    assert not kept.report_due, "that router knows it"
    kept.on_router_accepted(NEXT)
    assert kept.report_due
    answer = one(kept)
    assert (answer.key, answer.asked, answer.attempt_id, answer.runs) == ("key", "body", "a#1", True)
    assert answer.created_s == 9
    assert answer.told == (TokenOutput("a#1", 0, (5, 6), cached_tokens=3),)
    kept.check_invariants({"a#1"})


def test_ended_answer_is_retained_until_expiry() -> None:
    kept = ReplayBuffer(100, 1 << 20)
    kept.open_answer(request("a#1"), (), ())
    kept.on_attempt_ended("a#1", 10)
    kept.record_outputs([output("a#1", 0, 5, reason=FinishReason.STOP)])
    kept.check_invariants(())
    assert kept.next_deadline_ns == 110 and not one(kept).runs
    kept.expire_answers(109)
    assert one(kept).told[0].finish_reason is FinishReason.STOP
    kept.expire_answers(110)
    assert len(kept) == 0 and kept.nbytes == 0 and kept.next_deadline_ns is None


def test_a_request_brings_its_log_along_or_is_not_kept() -> None:
    kept = ReplayBuffer(100, 1 << 20)
    kept.open_answer(request("a#2"), (output("a", 0, 5, 6),), ((5, 6),))
    kept.record_outputs([output("a#2", 2, 7)])
    assert [o.tokens for o in one(kept).told] == [(5, 6, 7)]
    assert kept.outputs_of("a#2", [output("a#2", 3, 8), output("b", 0, 1)])[0].tokens == (5, 6, 7, 8)
    kept.forget_attempt("a#2")
    kept.open_answer(request("a#3"), (), ((5, 6),))
    kept.open_answer(request("beams", beam_width=2), (), ())
    kept.open_answer(request("no key", key=""), (), ())
    assert len(kept) == 0
    kept.open_answer(request("a#4"), (), ())
    kept.record_outputs([output("a#4", 2, 7)])
    assert len(kept) == 0, "something was left out"


def test_replay_buffer_evicts_oldest_first_and_running_last() -> None:
    kept = ReplayBuffer(100, 3000)
    for name in ("a", "b", "c"):
        kept.open_answer(request(name), (), ())
    kept.check_invariants({"a", "b", "c"})
    kept.on_attempt_ended("b", 1)
    kept.record_outputs([output("a", 0, 1)])
    assert not kept.is_running("b") and kept.is_running("a") and len(kept) == 2
    kept.record_outputs([output("c", 0, *range(40))])
    assert len(kept) == 1 and kept.is_running("c")
    kept.check_invariants({"c"})


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [4], [2, 2], [1, 3]])
def test_a_log_is_the_same_however_the_tokens_came(cut: list[int]) -> None:
    log, at = AnswerLog(), 0
    entries = [TokenLogprobs(token, -float(token)) for token in range(4)]
    for count in cut:
        logprobs = tuple(entries[at : at + count])
        log.append_output(output("a", at, *range(at, at + count), logprobs=logprobs))
        assert log.append_output(output("a", at, *range(at, at + count), logprobs=logprobs)) == 0, "repeated"
        at += count
    assert not log.is_complete(1)
    log.append_output(output("a", 4, reason=FinishReason.DEADLINE))
    assert not log.is_complete(1), "that is no ending of an answer"
    log.append_output(output("a", 4, reason=FinishReason.LENGTH))
    assert log.is_complete(1)
    whole, end = log.outputs_for("b")
    assert whole == TokenOutput("b", 0, (0, 1, 2, 3), logprobs=tuple(entries))
    assert end == TokenOutput("b", 0, (), finish_reason=FinishReason.LENGTH, offset=4)
    assert log.append_output(output("a", 6, 9)) == -1


def test_a_whole_answer_keeps_its_key() -> None:
    kept = ReplayBuffer(100, 1 << 20)
    kept.open_answer(request("a#1"), (), ())
    kept.record_outputs([output("a#1", 0, 5)])
    kept.on_attempt_ended("a#1", 10)
    assert not kept.answers_another("key", "other"), "it was cancelled: the next request with the key is a new one"
    kept.record_outputs([output("a#1", 1, 6, reason=FinishReason.STOP)])
    assert kept.answers_another("key", "other") and not kept.answers_another("key", "body")
    assert [answer.attempt_id for answer in kept.with_key("key", "body")] == ["a#1"]
    assert kept.with_key("key", "other") == [] and not kept.answers_another("else", "other")
