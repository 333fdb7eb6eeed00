"""Token ids that the model does not have: every edge refuses them by name, and nothing of them reaches a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from api_world import MODEL, TinyModel, running_server, tiny_tokenizer
from fake_engine import FakeEngine
from fleet_world import Fleet, fleet_config
from instance_world import PROMPT, VOCAB, World, config, request
from memserve.base.errors import UserError
from memserve.base.types import Request, SamplingParams, StopParams
from memserve.base.validation import check_request, token_array
from memserve.protocol.messages import Dispatch

TOKENIZER_TOKENS = tiny_tokenizer().backend_tokenizer.get_vocab_size()
KNOWN = TOKENIZER_TOKENS - 40
"""The model of these tests has fewer tokens than its tokenizer."""


# -- the one check


def plain(**parts: Any) -> Request:
    return Request("r", np.array([1, 2], np.int32), **parts)


BAD_IDS: list[Any] = [-1, 131, 2**31, 2**63, 10**5000, True, 1.5, "3", None]


@pytest.mark.parametrize(
    "bad", BAD_IDS, ids=lambda bad: type(bad).__name__ + repr(bad)[:8] if bad != 10**5000 else "huge"
)
def test_out_of_vocabulary_id_is_refused_in_every_field(bad: Any) -> None:
    with pytest.raises(UserError) as caught:
        token_array([5, bad], 131)
    assert caught.value.param == "prompt" and len(caught.value.message) < 200
    fields = {
        "stop_token_ids": plain(stop=StopParams(stop_token_ids=(5, bad))),
        "logit_bias": plain(sampling=SamplingParams(logit_bias=((5, 1.0), (bad, 1.0)))),
    }
    for param, broken in fields.items():
        with pytest.raises(UserError) as caught:
            check_request(broken, 131)
        assert caught.value.param == param and len(caught.value.message) < 200


def test_the_last_id_is_good_and_so_are_arrays() -> None:
    assert token_array([0, 130], 131).tolist() == [0, 130]
    assert token_array(np.array([130, 0], np.int64), 131).tolist() == [130, 0]
    assert token_array((np.int64(7),), 131).dtype == np.int32
    for bad in (np.array([131]), np.array([-1]), np.array([True]), np.array([1.0]), np.array([[1]])):
        with pytest.raises(UserError):
            token_array(bad, 131)
    edge = StopParams(stop_token_ids=(130,)), SamplingParams(logit_bias=((0, -100.0), (130, 100.0)))
    check_request(plain(stop=edge[0], sampling=edge[1]), 131)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("temperature", 10**400), ("top_p", 7.0), ("top_p", 0.0), ("top_p", -0.1), ("min_p", 1.5), ("min_p", True),
        ("top_k", -2), ("top_k", 2**63), ("top_k", 1.5), ("repetition_penalty", 0.0), ("repetition_penalty", 5e-324),
        ("repetition_penalty", float("inf")), ("presence_penalty", float("nan")), ("frequency_penalty", None),
        ("seed", 1.5), ("logprobs", -1), ("logprobs", "5"), ("logit_bias", ((5, float("nan")),)),
    ],
)  # fmt: skip
def test_sampling_that_means_nothing_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        check_request(plain(sampling=structs.replace(SamplingParams(), **{field: value})), 131)
    assert caught.value.param == field and "\n" not in caught.value.message and len(caught.value.message) < 200


def test_parameters_of_another_kind_are_refused() -> None:
    for broken in (plain(sampling={"temperature": 0}), plain(stop=None), structs.replace(plain(), prompt=np.ones(3))):
        with pytest.raises(UserError):
            check_request(broken, 131)


@given(st.lists(st.integers(-3, 140), max_size=5), st.lists(st.integers(-3, 140), max_size=3))
def test_a_request_passes_exactly_when_all_of_its_ids_are_known(prompt: list[int], stops: list[int]) -> None:
    good = all(0 <= token < 131 for token in prompt + stops)
    broken = Request("r", np.array(prompt, np.int32), stop=StopParams(stop_token_ids=tuple(stops)))
    if good:
        check_request(broken, 131)
    else:
        with pytest.raises(UserError):
            check_request(broken, 131)


# -- HTTP: a tokenizer that knows more tokens than the model


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = FakeEngine(lambda request, index: [5])
    try:
        with running_server(engine, TinyModel(vocab_size=KNOWN)) as world, httpx.Client(base_url=world.url) as client:
            client.engine = engine
            yield client
    finally:
        engine.close()


def foreign_text() -> str:
    """A word with a token that only the tokenizer knows."""
    tokenizer = tiny_tokenizer().backend_tokenizer
    for token in range(KNOWN, TOKENIZER_TOKENS):
        text = tokenizer.decode([token])
        if max(tokenizer.encode(text, add_special_tokens=False).ids, default=0) >= KNOWN:
            return text
    raise AssertionError("the tokenizer has no such word")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": [KNOWN]}, "prompt"),
        ("completions", {"prompt": [[5], [5, KNOWN]]}, "prompt"),
        ("completions", {"prompt": [2**70]}, "prompt"),
        ("completions", {"prompt": foreign_text()}, "prompt"),
        ("completions", {"prompt": "a", "logit_bias": {str(KNOWN): 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "logit_bias": {"9999999999": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "min_tokens": 1, "stop_token_ids": [2147483647]}, "stop_token_ids"),
        ("completions", {"prompt": "a", "stop_token_ids": [KNOWN]}, "stop_token_ids"),
        ("chat/completions", {"messages": [{"role": "user", "content": foreign_text()}]}, "prompt"),
    ],
)
def test_http_refuses_what_the_model_does_not_have(http: httpx.Client, path: str, body: dict, param: str) -> None:
    answer = http.post(f"/v1/{path}", json={"model": MODEL, "max_tokens": 2, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 200
    assert not http.engine.submitted


def test_documents_refuse_text_that_the_model_cannot_read(http: httpx.Client) -> None:
    for body in ({"text": foreign_text()}, {"messages": [{"role": "user", "content": foreign_text()}]}):
        answer = http.put("/v1/documents/d", json=body)
        assert answer.status_code == 400 and "vocabulary" in answer.text
    assert not http.engine.submitted


# -- the machine, and what other processes send


def broken_requests() -> list[Request]:
    return [
        request("prompt", [1, VOCAB]),
        request("negative", [1, -1]),
        request("stop", PROMPT[:3], stops=(2**31 - 1,), min_tokens=2),
        structs.replace(request("bias", PROMPT[:3]), sampling=SamplingParams(logit_bias=((VOCAB, 1.0),))),
        structs.replace(request("nan", PROMPT[:3]), sampling=SamplingParams(temperature=float("nan"))),
        structs.replace(request("top_k", PROMPT[:3]), sampling=SamplingParams(top_k=1 << 70)),
    ]


def test_the_machine_refuses_such_requests_and_keeps_its_cache() -> None:
    world = World(replace(config(), vocab_size=VOCAB))
    world.arrive(request("first", PROMPT[:9]))
    world.drain()
    for broken in broken_requests():
        world.arrive(broken)
        assert world.rejected[broken.request_id].retry_after_s is None
    world.arrive(request("again", PROMPT[:9]))
    world.drain()
    assert world.machine.stats().steps_failed == 0 and world.machine.stats().cached_tokens == 8


@pytest.mark.parametrize("broken", broken_requests(), ids=lambda broken: broken.request_id)
def test_an_instance_refuses_a_dispatch_with_such_ids(broken: Request) -> None:
    fleet = Fleet(p=replace(fleet_config(), vocab_size=VOCAB))
    fleet.members["p"].hear(Dispatch(broken))
    fleet.run()
    assert [refused.request_id for refused in fleet.refused] == [broken.request_id]
    assert fleet.members["p"].machine.is_idle and not fleet.members["p"].machine.stats().steps


def test_instance_refuses_resume_with_out_of_vocabulary_tokens() -> None:
    fleet = Fleet(p=replace(fleet_config(), vocab_size=VOCAB))
    fleet.members["p"].hear(Dispatch(request("a", PROMPT[:5]), generated=((1, VOCAB),)))
    fleet.run()
    assert [refused.request_id for refused in fleet.refused] == ["a"] and fleet.members["p"].machine.is_idle


def test_decode_instance_refuses_out_of_vocabulary_handoff() -> None:
    fleet = Fleet(p=fleet_config(), d=replace(fleet_config(), vocab_size=VOCAB))
    order = Dispatch(request("a", PROMPT[:9], stops=(VOCAB,)), decode_at=fleet.members["d"].peer)
    fleet.members["p"].hear(order)
    fleet.run()
    assert "a" in [refused.request_id for refused in fleet.refused]
    assert not fleet.members["d"].machine.stats().steps and fleet.members["d"].machine.is_idle
