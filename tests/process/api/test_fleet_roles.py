"""One scripted engine computes prompts, another answers: what each is sent, and what a client gets when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_server import fleet_server, spec_of
from memserve.base.config import ClusterConfig
from memserve.base.units import NS_PER_S
from scripted_engine import ANSWER, DONE, EVENTS, Asked, Script, ScriptedEngine, scripted_engines, well, whole

LONG = list(range(1, 301))
PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": 288}


async def computes(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """As vLLM answers that was asked for a prompt alone."""
    assert asked.fields["kv_transfer_params"]["do_remote_decode"] is True
    writer.write(whole(200, json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}).encode()))


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """One that computes prompts, and two that answer."""
    with scripted_engines(3) as started:
        started[0].script = computes
        yield started


def specs_of(engines: list[ScriptedEngine]) -> list[Any]:
    return [spec_of(engine, role=role) for engine, role in zip(engines, ("prefill", "decode", "decode"), strict=True)]


def asked_of(engines: list[ScriptedEngine]) -> list[dict[str, Any]]:
    """What the engines that answer were sent."""
    return [asked.fields for engine in engines[1:] for asked in engine.asked]


def test_the_prompt_is_computed_and_then_answered(engines: list[ScriptedEngine]) -> None:
    fields = {"prompt": LONG, "max_tokens": 7, "n": 2, "min_tokens": 3, "stop": ["x"], "temperature": 0.5}
    with fleet_server(specs_of(engines)) as server:
        answer = server.post(stream=True, stream_options={"include_usage": True}, **fields)
        assert answer.content == b"".join((*EVENTS, DONE))
        (first,), (second,) = engines[0].asked, asked_of(engines)
        assert first.path == "/v1/completions" and (first.fields["max_tokens"], first.fields["stream"]) == (1, False)
        assert first.fields.keys().isdisjoint({"n", "min_tokens", "stream_options"})
        assert first.fields["prompt"] == LONG and first.fields["temperature"] == 0.5
        assert second.pop("kv_transfer_params") == PARAMS
        assert {name: second[name] for name in fields} == fields and second["stream_options"]
        view = server.host.machine.engine_views()[0]
        assert (view.prefills, view.failed) == (1, 0)
        assert f'memserve_fleet_prefills_total{{engine="{view.name}"}} 1.0' in server.get("/metrics").text


def test_chats_have_their_own_limit(engines: list[ScriptedEngine]) -> None:
    messages = [{"role": "user", "content": "word " * 400}]
    with fleet_server(specs_of(engines)) as server:
        answer = server.post("/v1/chat/completions", prompt=None, messages=messages, max_completion_tokens=9)
        assert answer.content == ANSWER
        (first,), (second,) = engines[0].asked, asked_of(engines)
        assert (first.fields["max_completion_tokens"], first.fields["max_tokens"]) == (1, 1)
        assert second["max_completion_tokens"] == 9 and second["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG[:100]}, {"prompt": LONG, "kv_transfer_params": {"a": 1}}, {"prompt": LONG, "echo": True},
        {"prompt": LONG, "prompt_logprobs": 1}, {"prompt": ["a " * 900, "b"]}, {"prompt": [LONG, LONG]},
    ],
)  # fmt: skip
def test_some_requests_are_not_split(engines: list[ScriptedEngine], fields: dict[str, Any]) -> None:
    with fleet_server(specs_of(engines)) as server:
        assert server.post(**fields).content == ANSWER
        assert not engines[0].asked
        (asked,) = asked_of(engines)
        assert {name: asked[name] for name in fields} == fields
        assert ("kv_transfer_params" in asked) == ("kv_transfer_params" in fields)


async def refuses(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(500, b"out of order"))


async def breaks_off(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")


async def says_garbage(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(200, b"<html>"))


async def says_nothing_of_kv(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(200, b'{"choices": [], "kv_transfer_params": null}'))


async def finds_fault(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(400, b'{"error": {"message": "too long"}}'))


@pytest.mark.parametrize("script", [refuses, breaks_off, says_garbage, says_nothing_of_kv, finds_fault])
def test_prompt_is_answered_without_its_prefill(engines: list[ScriptedEngine], script: Script) -> None:
    """By an engine that gets the request as it came."""
    engines[0].script = script
    with fleet_server(specs_of(engines)) as server:
        assert server.post(prompt=LONG, stream=True).content == b"".join((*EVENTS, DONE))
        (asked,) = asked_of(engines)
        assert engines[0].asked and asked["prompt"] == LONG and "kv_transfer_params" not in asked


def test_a_silent_engine_is_not_waited_for(engines: list[ScriptedEngine]) -> None:
    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    with fleet_server(specs_of(engines), ClusterConfig(dead_after_ns=NS_PER_S)) as server:
        engines[0].script = engines[0].health = silent
        assert server.post(prompt=LONG).content == ANSWER


def test_failed_decode_engine_is_replaced_after_prefill(engines: list[ScriptedEngine]) -> None:
    failed: list[str] = []

    async def fails_once(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if failed:
            await well(asked, writer)
        else:
            failed.append("once")
            await refuses(asked, writer)

    engines[1].script = engines[2].script = fails_once
    with fleet_server(specs_of(engines)) as server:
        assert server.post(prompt=LONG).content == ANSWER
        assert len(engines[0].asked) == 1 and [one["kv_transfer_params"] for one in asked_of(engines)] == [PARAMS] * 2


def test_without_engines_that_answer_one_does_both(engines: list[ScriptedEngine]) -> None:
    engines[1].script = engines[2].script = refuses
    engines[0].script = well
    with fleet_server(specs_of(engines)) as server:
        assert server.post(prompt=LONG).content == ANSWER
        assert len(engines[0].asked) == 2 and len(asked_of(engines)) == 2
