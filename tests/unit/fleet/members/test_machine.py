"""An engine as a member: what routers ask becomes calls, what the engine says becomes outputs, loads and KV events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kv_event_words import BLOCK, batch, stored
from memserve import _core
from memserve.base.types import FinishReason, KVGeometry, Request, Role, SamplingParams, StopParams, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.fleet.members.dialects import AnswerPiece, SequenceCall, dialect_of
from memserve.fleet.members.events import (
    CallBroke,
    EndCall,
    EngineMemberEvent,
    GenerationBegun,
    PieceArrived,
    RepeatEvents,
    ReportRead,
    StartCall,
)
from memserve.fleet.members.machine import EngineMember
from memserve.fleet.members.work import EngineTerms
from memserve.fleet.messages import EngineKind, EngineReport, EngineSpec, KvReceived, ReplayEnded
from memserve.kv.identity import DEFAULT_KEY, namespace_id
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.idempotency import AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.messages import (
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Drain,
    JoinAccepted,
    KvEvents,
    KvSnapshot,
    Migrate,
    MigrationRefused,
    PeerGone,
    QueryAttempts,
    QueryKvEvents,
    StopSequence,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Peer, PeerInfo

OWNER, FOLLOWER, SELF = Peer(ROUTER, 1), Peer("router-2", 1), Peer("e1", 1)
SPEC = EngineSpec(EngineKind.VLLM, "http://10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", model="x")
GEOMETRY = KVGeometry(2, 1, 8, 8, "float32", 2 * BLOCK)
INSTANCE = PeerInfo(Peer("c1", 1), Role.COLOCATED, "", "names", GEOMETRY, 8, 0, 64, True)
ROUTERS = (INSTANCE, PeerInfo(FOLLOWER, Role.ROUTER, "", "", GEOMETRY, 0, 0, 0, False))
END = 7
"""A stop token."""


class World:
    """The machine, and what it has asked for."""

    def __init__(self, spec: EngineSpec = SPEC) -> None:
        dialect = dialect_of(spec.kind)
        assert dialect is not None
        self.member = EngineMember(EngineTerms(spec, "x", 64, DEFAULT_KEY, 2 * BLOCK), dialect, SELF)
        self.now_ns = NS_PER_S
        self.post(MessageArrived(OWNER, JoinAccepted(ROUTERS)))

    def post(self, event: EngineMemberEvent, after_ns: int = 0) -> list[Any]:
        """What it asks for."""
        self.now_ns += after_ns
        actions = self.member.handle(event, self.now_ns)
        self.member.check_invariants()
        return actions

    def dispatch(self, request: Request, sender: Peer = OWNER, **more: Any) -> list[Any]:
        """A router's order."""
        return self.post(MessageArrived(sender, Dispatch(request, **more)))

    def piece(self, call_id: int, *tokens: int, after_ns: int = 0, **more: Any) -> list[Any]:
        """The engine has drawn."""
        return self.post(PieceArrived(call_id, AnswerPiece(tokens, **more)), after_ns)


def request(name: str = "a", prompt: int = 8, max_tokens: int = 4, **more: Any) -> Request:
    """Tokens 0, 1, 2, ..."""
    stop = StopParams(max_tokens, stop_token_ids=(END,))
    return Request(name, np.arange(prompt, dtype=np.int32), stop=stop, **more)


def calls_in(actions: list[Any]) -> dict[int, SequenceCall]:
    return {action.call_id: action.call for action in actions if isinstance(action, StartCall)}


def outputs_in(actions: list[Any]) -> list[TokenOutput]:
    return [output for action in actions if isinstance(action, EmitTokens) for output in action.outputs]


def test_a_request_is_a_call_and_its_stream_the_outputs() -> None:
    world = World()
    actions = world.dispatch(request())
    ((call_id, call),) = calls_in(actions).items()
    assert (call.prompt, call.tokens_left, call.model) == (list(range(8)), 4, "x")
    (first,) = outputs_in(world.piece(call_id, 20))
    assert (first.tokens, first.offset, first.finish_reason) == ((20,), 0, None)
    assert first.story == (("engine", "vllm at 10.0.0.1:8000"),)
    (second,) = outputs_in(world.piece(call_id, 21, 22))
    assert (second.tokens, second.offset) == ((21, 22), 1)
    actions = world.piece(call_id, 23, finish="length", cached_tokens=6)
    (last,) = outputs_in(actions)
    assert (last.tokens, last.offset, last.finish_reason, last.cached_tokens) == ((23,), 3, FinishReason.LENGTH, 6)
    assert not any(isinstance(action, EndCall) for action in actions), "the engine has ended it"


@pytest.mark.parametrize(
    ("pieces", "tokens", "reason"),
    [
        ([(20, END, 30)], (20, END), FinishReason.STOP),
        ([(20,), (21, 22, 23, 24)], (20, 21, 22, 23), FinishReason.LENGTH),
    ],
)
def test_what_an_engine_draws_too_much_is_cut(
    pieces: list[tuple[int, ...]], tokens: tuple[int, ...], reason: FinishReason
) -> None:
    world = World()
    ((call_id, _),) = calls_in(world.dispatch(request())).items()
    actions = [action for piece in pieces for action in world.piece(call_id, *piece)]
    outputs = outputs_in(actions)
    assert tuple(token for output in outputs for token in output.tokens) == tokens
    assert outputs[-1].finish_reason is reason and actions[-1] == EndCall(call_id)
    assert world.piece(call_id, 40) == [], "nothing follows"


def test_an_answer_is_cut_at_the_engines_context() -> None:
    world = World()
    ((call_id, call),) = calls_in(world.dispatch(request(prompt=62, max_tokens=100))).items()
    assert call.tokens_left == 2
    outputs = outputs_in(world.piece(call_id, 20, 21))
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_each_sequence_of_a_request_is_a_call_of_its_own() -> None:
    world = World()
    calls = calls_in(world.dispatch(request(n=3, sampling=SamplingParams(seed=5))))
    assert [call.sequence_index for call in calls.values()] == [0, 1, 2]
    assert len({call.seed for call in calls.values()}) == 3
    for index, call_id in enumerate(calls):
        (output,) = outputs_in(world.piece(call_id, END))
        assert (output.index, output.finish_reason) == (index, FinishReason.STOP)
    assert world.member.heartbeat_load(0).load.sequences_running == 0


def test_a_resumed_request_goes_on_behind_its_tokens() -> None:
    world = World()
    actions = world.dispatch(request(n=3, max_tokens=3), generated=((20, 21), (30, END), (40,)), ended=(2,))
    ((call_id, call),) = calls_in(actions).items()
    assert (call.prompt[-3:], call.tokens_left, call.sequence_index) == ([7, 20, 21], 1, 0)
    (ended,) = outputs_in(actions)
    assert (ended.index, ended.tokens, ended.offset, ended.finish_reason) == (1, (), 2, FinishReason.STOP)
    (last,) = outputs_in(world.piece(call_id, 22))
    assert (last.offset, last.finish_reason) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        (request(beam_width=2), {}),
        (request(sampling=SamplingParams(grammar="{}")), {}),
        (request(sampling=SamplingParams(logprobs=1, prompt_logprobs=True)), {}),
        (request(sampling=SamplingParams(presence_penalty=1.0)), {"generated": ((20,),)}),
        (request(salt="lora-abc"), {}),
        (request(prompt=64), {}),
        (request(), {"decode_at": Peer("d1", 1)}),
    ],
)
def test_what_an_engine_has_no_words_for_is_refused(asked: Request, order: dict[str, Any]) -> None:
    world = World()
    (refusal,) = world.dispatch(asked, **order)
    assert isinstance(refusal, RejectRequest) and refusal.retry_after_s is None and "10.0.0.1:8000" in refusal.reason
    load = world.member.heartbeat_load(0).load
    assert (load.dispatches_heard, load.answers_told, load.sequences_running) == (1, 1, 0)


@pytest.mark.parametrize(("is_final", "retry_after_s"), [(True, None), (False, 0.0)])
def test_a_broken_call_gives_the_request_back(is_final: bool, retry_after_s: float | None) -> None:
    world = World()
    first, second = calls_in(world.dispatch(request(n=2)))
    world.piece(first, 20)
    refusal, end = world.post(CallBroke(first, "it said 500", is_final))
    assert end == EndCall(second) or refusal == EndCall(second)
    refusal = refusal if isinstance(refusal, RejectRequest) else end
    assert (refusal.request_id, refusal.retry_after_s) == ("a", retry_after_s)
    assert refusal.reason == "10.0.0.1:8000: it said 500"
    assert world.piece(second, 30) == []


def test_cancel_stop_and_deadline_end_what_runs() -> None:
    world = World()
    for name in "abc":
        deadline_in_ns = 50 * NS_PER_MS if name == "c" else None
        world.dispatch(request(name), deadline_in_ns=deadline_in_ns)
        world.piece(world.member._work.calls_made, 20)
    actions = world.post(MessageArrived(OWNER, Cancel("a")))
    assert outputs_in(actions)[-1].finish_reason is FinishReason.CANCELLED and EndCall(1) in actions
    actions = world.post(MessageArrived(OWNER, StopSequence("b", 0)))
    assert outputs_in(actions)[-1].finish_reason is FinishReason.STOP and EndCall(2) in actions
    world.post(ReportRead(EngineReport({})), after_ns=10 * NS_PER_MS)  # routers hear in bundles of what was placed
    assert world.member.next_deadline_ns == world.now_ns + 40 * NS_PER_MS
    actions = world.post(ReportRead(EngineReport({})), after_ns=40 * NS_PER_MS)
    assert outputs_in(actions)[-1].finish_reason is FinishReason.DEADLINE and EndCall(3) in actions


def test_a_router_speaks_of_its_own_attempts_alone() -> None:
    world = World()
    world.dispatch(request("a"))
    ((call_id, _),) = calls_in(world.dispatch(request("b"), FOLLOWER)).items()
    assert world.post(MessageArrived(FOLLOWER, Cancel("a"))) == []
    assert world.post(MessageArrived(Peer("router-9", 1), Cancel("b"))) == []
    (send,) = [action for action in world.piece(call_id, 20) if isinstance(action, Send)]
    assert send.to == FOLLOWER and isinstance(send.message, Tokens)
    (reply,) = world.post(MessageArrived(FOLLOWER, QueryAttempts(("a", "b", "z"), 1)))
    assert reply == Send(FOLLOWER, AttemptsUnknown(("a", "z"), 1, 1, 1))


def test_answers_with_a_key_outlive_their_router() -> None:
    world = World()
    world.dispatch(request("a", key="k", asked="q"), FOLLOWER)
    world.dispatch(request("b"), FOLLOWER)
    world.piece(1, 20)
    actions = world.post(MessageArrived(OWNER, PeerGone(FOLLOWER, "it died")))
    assert EndCall(2) in actions and EndCall(1) not in actions, "no client can ask for b again"
    (send,) = [a for a in world.post(MessageArrived(OWNER, QueryAnswers("k", "q"))) if isinstance(a, Send)]
    assert isinstance(send.message, AnswersHeld) and send.message.answers[0].told[0].tokens == (20,)
    (output,) = outputs_in(world.piece(1, 21))
    assert (output.request_id, output.offset) == ("a", 1), "it runs on for the router that has asked"


def test_a_client_that_asks_elsewhere_takes_its_answer_along() -> None:
    world = World()
    world.dispatch(request("a", key="k", asked="q"), FOLLOWER)
    world.piece(1, 20)
    sends = world.post(MessageArrived(OWNER, QueryAnswers("k", "q")))
    assert Send(FOLLOWER, AnswerTaken("a")) in sends
    (send,) = [a for a in world.post(MessageArrived(OWNER, QueryAnswers("k", "other"))) if isinstance(a, Send)]
    assert isinstance(send.message, AnswersHeld) and send.message.refused == "other"


def test_what_cannot_be_moved_says_so() -> None:
    world = World()
    world.dispatch(request("a"))
    (send,) = world.post(MessageArrived(OWNER, Migrate("a", Peer("c1", 1))))
    assert isinstance(send.message, MigrationRefused) and send.message.request_id == "a"
    world.post(MessageArrived(OWNER, Drain()))
    (refusal,) = world.dispatch(request("b"))
    assert isinstance(refusal, RejectRequest) and refusal.reason.endswith("drains")


def test_a_member_that_drains_waits_for_its_own_requests() -> None:
    world = World()
    world.dispatch(request("a"))
    world.piece(1, 20)
    world.post(ReportRead(EngineReport({"x": "x"}, running=5, waiting=2)))
    world.post(MessageArrived(OWNER, Drain()))
    assert world.member.heartbeat_load(0).load.sequences_running == 1
    world.piece(1, END)
    load = world.member.heartbeat_load(0).load
    assert (load.sequences_running, load.requests_waiting) == (0, 0), "the others are none of its own"


def test_loads_are_the_engines_word_and_what_was_sent_since() -> None:
    world = World()
    report = EngineReport({"x": "x"}, running=1, waiting=2, kv_usage=0.25, kv_tokens=160)
    world.post(ReportRead(report))
    world.dispatch(request("a"))
    world.dispatch(request("b"))
    world.piece(1, 20)
    load = world.member.heartbeat_load(0).load
    assert (load.requests_waiting, load.sequences_running) == (2, 1)
    assert load.prefill_tokens_queued == 8 + 512, "b, and one that came from elsewhere"
    assert (load.context_tokens_running, load.hbm_blocks_available) == (40, 120 // GEOMETRY.block_tokens)


def test_times_of_prompts_and_tokens_are_learnt() -> None:
    world = World()
    assert world.member.heartbeat_load(0).costs == b""
    for number in range(8):
        ((call_id, _),) = calls_in(world.dispatch(request(str(number), prompt=40))).items()
        world.piece(call_id, 20, after_ns=40 * NS_PER_MS)
        world.piece(call_id, 21, 22, 23, after_ns=9 * NS_PER_MS, finish="length", cached_tokens=0)
    model = world.member.costs.model
    assert 30 < model.prefill_ns(40) / NS_PER_MS < 50 and 2 < model.decode_step_ns(1, 40) / NS_PER_MS < 4
    assert world.member.heartbeat_load(0).costs


def test_an_expelled_member_drops_all() -> None:
    world = World()
    world.dispatch(request("a", key="k", asked="q"))
    newer = Peer("e1", 2)
    assert world.post(GenerationBegun(newer)) == [EndCall(1)]
    assert world.member.self_peer == newer and world.piece(1, 20) == []
    world.post(MessageArrived(OWNER, JoinAccepted(ROUTERS)))
    assert calls_in(world.dispatch(request("a")))


# -- KV events

TOKENS = list(range(4 * BLOCK))


def names_of(tokens: list[int]) -> bytes:
    root = namespace_id("", INSTANCE.namespace)
    return _core.block_identities(DEFAULT_KEY, root, np.array(tokens, np.int32), GEOMETRY.block_tokens)


def test_engines_blocks_are_told_as_the_clusters() -> None:
    world = World()
    event = stored([1, 2, 3], None, TOKENS[: 3 * BLOCK])
    sends = world.post(KvReceived(SPEC.name, 0, batch(event)))
    news = [action.message for action in sends if isinstance(action, Send)]
    assert {action.to for action in sends} == {OWNER, FOLLOWER}
    assert isinstance(news[0], KvEvents) and news[0].changes[0].identities == names_of(TOKENS[: 2 * BLOCK])
    (send,) = world.post(MessageArrived(OWNER, QueryKvEvents(-1 & 0xFFFF)))
    assert isinstance(send.message, KvSnapshot) and send.message.hbm == names_of(TOKENS[: 2 * BLOCK])


def test_gaps_and_restarts_are_asked_for_once() -> None:
    world = World()
    first = stored([1, 2], None, TOKENS[: 2 * BLOCK])
    assert world.member._listener is not None
    world.post(ReplayEnded(SPEC.name))  # of what it asked for when it joined
    actions = world.post(KvReceived(SPEC.name, 3, batch(first)))
    assert RepeatEvents(0) in actions
    assert RepeatEvents(0) not in world.post(KvReceived(SPEC.name, 4, batch(first)))
    actions = world.post(ReportRead(EngineReport({}, started_s=9.0)))
    assert world.member._listener.feed.block_counts() == {}


def test_names_are_asked_for_when_an_instance_is_known() -> None:
    dialect = dialect_of(SPEC.kind)
    assert dialect is not None
    member = EngineMember(EngineTerms(SPEC, "x", 64, DEFAULT_KEY, 2 * BLOCK), dialect, SELF)
    member.handle(MessageArrived(OWNER, JoinAccepted(())), 0)
    assert member.handle(KvReceived(SPEC.name, 0, batch(stored([1], None, TOKENS[:BLOCK]))), 0) == []
    assert RepeatEvents(0) in member.handle(MessageArrived(OWNER, JoinAccepted((INSTANCE,))), 0)
