"""What engines are asked in their own words, and how their streams are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from memserve.api.http.client import HttpFault
from memserve.base.errors import UserError
from memserve.base.types import Request, SamplingParams, StopParams, TokenLogprobs
from memserve.fleet.members.dialects import END_OF_STREAM, AnswerPiece, Dialect, SequenceCall, dialect_of, event_data
from memserve.fleet.messages import EngineKind, read_engine

KINDS = [kind for kind in EngineKind if dialect_of(kind) is not None]


def call_of(sampling: SamplingParams | None = None, generated: tuple[int, ...] = (), **more: Any) -> SequenceCall:
    stop = StopParams(8, min_tokens=more.pop("min_tokens", 0), stop_token_ids=more.pop("stops", (2, 9)))
    request = Request("a", np.arange(3, dtype=np.int32), sampling or SamplingParams(), stop, **more)
    return SequenceCall(request, 0, generated, 8, "x")


def dialect(kind: EngineKind) -> Dialect:
    known = dialect_of(kind)
    assert known is not None
    return known


def body_of(kind: EngineKind, call: SequenceCall) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(dialect(kind).body(call))
    return fields


def read_all(kind: EngineKind, call: SequenceCall, *events: dict[str, Any]) -> list[AnswerPiece]:
    read = dialect(kind).reader(call)
    pieces = [read(json.dumps(event).encode()) for event in events]
    return [piece for piece in (*pieces, read(END_OF_STREAM)) if piece is not None]


PROMPT = {EngineKind.VLLM: "prompt", EngineKind.SGLANG: "input_ids", EngineKind.LLAMACPP: "prompt"}
ANSWER = {EngineKind.VLLM: "max_tokens", EngineKind.SGLANG: "max_new_tokens", EngineKind.LLAMACPP: "n_predict"}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_ids_and_go_on_behind_what_was_drawn(kind: EngineKind) -> None:
    fields = body_of(kind, call_of(generated=(7, 8)))
    assert fields[PROMPT[kind]] == [0, 1, 2, 7, 8] and fields["stream"] is True
    assert {**fields, **fields.get("sampling_params", {})}[ANSWER[kind]] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_is_the_requests_own(kind: EngineKind) -> None:
    sampling = SamplingParams(0.7, 0.9, 40, 0.1, 0.5, 0.25, 1.2, seed=3, logit_bias=((5, -1.0),))
    fields = body_of(kind, call_of(sampling))
    fields |= fields.get("sampling_params", {})
    assert [fields[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [0.7, 0.9, 40, 0.1]
    assert [fields["presence_penalty"], fields["frequency_penalty"]] == [0.5, 0.25]
    assert fields["repeat_penalty" if kind is EngineKind.LLAMACPP else "repetition_penalty"] == 1.2
    assert fields["logit_bias"] in ({"5": -1.0}, [[5, -1.0]])
    if kind is not EngineKind.LLAMACPP:  # it knows its own end tokens alone
        assert fields["stop_token_ids"] == [2, 9] and fields["ignore_eos"] is True
    else:
        assert fields["ignore_eos"] is False and body_of(kind, call_of(stops=()))["ignore_eos"] is True


def test_seeds_differ_where_a_sequence_goes_on() -> None:
    sampling = SamplingParams(seed=11)
    seeds = {body_of(EngineKind.VLLM, call_of(sampling, generated))["seed"] for generated in ((), (4,), (4, 5))}
    assert len(seeds) == 3
    assert "seed" not in body_of(EngineKind.VLLM, call_of(SamplingParams(temperature=0.0)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_tenant_finds_anothers_prefixes(kind: EngineKind) -> None:
    def shared(call: SequenceCall) -> Any:
        fields = body_of(kind, call)
        return (
            fields["cache_prompt"]
            if kind is EngineKind.LLAMACPP
            else fields.get("cache_salt") or fields.get("extra_key")
        )

    plain, first, second = shared(call_of()), shared(call_of(tenant="a")), shared(call_of(tenant="b"))
    uncached = shared(call_of(use_cache=False)), shared(call_of(use_cache=False, generated=(4,)))
    if kind is EngineKind.LLAMACPP:
        assert (plain, first, second, *uncached) == (True, False, False, False, False)
    else:
        assert plain is None and len({first, second, shared(call_of(tenant="a", salt="s")), *uncached}) == 5


@pytest.mark.parametrize("kind", [EngineKind.SGLANG, EngineKind.LLAMACPP])
def test_what_an_api_has_no_word_for_is_refused(kind: EngineKind) -> None:
    assert dialect(kind).refusal(call_of()) == ""
    assert dialect(kind).refusal(call_of(SamplingParams(allowed_token_ids=(1, 2))))
    assert bool(dialect(kind).refusal(call_of(min_tokens=4))) == (kind is EngineKind.LLAMACPP)


def test_vllm_says_what_was_cached_behind_its_last_token() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 2}}
    pieces = read_all(
        EngineKind.VLLM,
        call_of(),
        {"choices": [{"index": 0, "token_ids": [4, 5], "finish_reason": None}]},
        {"choices": [{"index": 0, "token_ids": [2], "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    )
    assert pieces == [AnswerPiece((4, 5)), AnswerPiece((2,), finish="stop", cached_tokens=2)]
    last = {"choices": [{"index": 0, "token_ids": [2], "finish_reason": "length"}]}
    assert read_all(EngineKind.VLLM, call_of(), last) == [AnswerPiece((2,), finish="length")]


def test_vllm_names_tokens_of_logprobs_by_their_ids() -> None:
    shown = {
        "tokens": ["token_id:4"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:4": -0.5, "token_id:6": -1.5, "token_id:7": -9999.0}],
    }
    event = {"choices": [{"index": 0, "token_ids": [4], "logprobs": shown}]}
    (piece,) = read_all(EngineKind.VLLM, call_of(SamplingParams(logprobs=2)), json.loads(json.dumps(event)))
    assert piece.logprobs == [TokenLogprobs(4, -0.5, ((4, -0.5), (6, -1.5)))]


def test_sglang_streams_all_tokens_so_far_or_the_new_ones() -> None:
    def event(ids: list[int], total: int, **more: Any) -> dict[str, Any]:
        return {"output_ids": ids, "meta_info": {"completion_tokens": total, "cached_tokens": 1, **more}}

    stop = {"finish_reason": {"type": "stop"}}
    growing = read_all(EngineKind.SGLANG, call_of(), event([4], 1), event([4, 5], 2), event([4, 5, 2], 3, **stop))
    pieces = read_all(EngineKind.SGLANG, call_of(), event([4], 1), event([5], 2), event([2], 3, **stop))
    assert growing == pieces
    assert pieces == [AnswerPiece((4,), (), "", 1), AnswerPiece((5,), (), "", 1), AnswerPiece((2,), (), "stop", 1)]


def test_sglang_logprobs_are_of_the_newest_tokens() -> None:
    info = {
        "completion_tokens": 2,
        "output_token_logprobs": [[-0.1, 4, None], [-0.2, 5, None]],
        "output_top_logprobs": [[[-0.1, 4, None]], [[-0.2, 5, None], [-3.0, 8, None]]],
    }
    call = call_of(SamplingParams(logprobs=2))
    (piece,) = read_all(EngineKind.SGLANG, call, {"output_ids": [4, 5], "meta_info": info})
    assert piece.logprobs[1] == TokenLogprobs(5, -0.2, ((5, -0.2), (8, -3.0)))


def test_llama_cpp_ends_with_an_event_of_its_own() -> None:
    call = call_of(SamplingParams(logprobs=1))
    shown = [{"id": 4, "logprob": -0.3, "top_logprobs": [{"id": 4, "logprob": -0.3}]}]
    pieces = read_all(
        EngineKind.LLAMACPP,
        call,
        {"content": "x", "tokens": [4], "stop": False, "completion_probabilities": shown},
        {"content": "", "tokens": [], "stop": True, "stop_type": "limit", "timings": {"cache_n": 2}},
    )
    assert pieces[0] == AnswerPiece((4,), [TokenLogprobs(4, -0.3, ((4, -0.3),))])
    assert pieces[1] == AnswerPiece((), [], "length", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", [{"choices": [{"text": "no ids"}]}, {"error": {"message": "no"}}, {"tokens": ["x"]}])
def test_streams_without_ids_break_the_call(kind: EngineKind, event: dict[str, Any]) -> None:
    if kind is EngineKind.VLLM and "tokens" in event:
        return  # nothing of an answer
    with pytest.raises(HttpFault):
        read_all(kind, call_of(), event)


def data_in(*pieces: bytes) -> list[bytes]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def collect() -> list[bytes]:
        return [data async for data in event_data(stream())]

    return asyncio.run(collect())


def test_events_are_put_together_however_they_come() -> None:
    whole = b'data: {"a": 1}\n\n: a comment\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    for cut in range(len(whole)):
        assert data_in(whole[:cut], whole[cut:]) == [b'{"a": 1}', b'{"b": 2}']
    with pytest.raises(HttpFault, match="middle of an event"):
        data_in(whole, b"data: {")
    with pytest.raises(HttpFault, match="full"):
        data_in(b'error: {"message": "full"}\n\n')


def test_servers_of_which_nothing_is_known_speak_in_text() -> None:
    assert dialect_of(EngineKind.OPENAI) is None
    with pytest.raises(UserError, match="unknown or repeated part"):
        read_engine("openai=http://10.0.0.1:8000,model=x")
    assert read_engine("llamacpp=http://10.0.0.1:8000,model=x").model == "x"
