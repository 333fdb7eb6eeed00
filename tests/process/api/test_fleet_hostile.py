"""Engines that fail in fifty ways: each request ends with the right answer or with one clear error, in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from fleet_server import FleetServer, fleet_server, spec_of
from memserve.base.config import ClusterConfig
from memserve.base.units import NS_PER_S
from scripted_engine import (
    ANSWER,
    DONE,
    EVENTS,
    MODEL,
    STREAM_HEAD,
    Asked,
    Script,
    ScriptedEngine,
    chunk,
    scripted_engines,
    well,
    whole,
)

SILENCE_S = 1.0
STREAM = b"".join((*EVENTS, DONE))


def sends(*data: bytes) -> Script:
    """Send this, whatever was asked, and end the connection."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(data))

    return script


def sends_and_hangs(*data: bytes) -> Script:
    """Send this, and say nothing more."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(data))
        await writer.drain()
        await asyncio.sleep(60)

    return script


def sends_and_resets(*data: bytes) -> Script:
    """Send this, and break the connection off."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(data))
        await writer.drain()
        writer.transport.abort()

    return script


def streamed(*events: bytes, end: bytes = b"") -> bytes:
    """A stream of these events; ``end``: what closes it, if anything does."""
    return STREAM_HEAD + b"".join(chunk(event) for event in events) + end


LAST = b"0\r\n\r\n"
CUT = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"choices'

FAILS = {
    "hangs": sends_and_hangs(),
    "hangs in the headers": sends_and_hangs(b"HTTP/1.1 200 OK\r\nconte"),
    "hangs in the body": sends_and_hangs(CUT),
    "hangs up": sends(),
    "resets": sends_and_resets(),
    "resets in the headers": sends_and_resets(b"HTTP/1.1 200 OK\r\ncontent-"),
    "resets in the body": sends_and_resets(CUT),
    "ends in the body": sends(CUT),
    "no HTTP": sends(b"\x00\xff\x13garbage\r\n\r\n"),
    "another protocol": sends(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "endless headers": sends(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 200_000 + b"\r\n"),
    "a chunk without a size": sends(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
    "two lengths": sends(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 9\r\n\r\n{}"),
    "a negative length": sends(b"HTTP/1.1 200 OK\r\ncontent-length: -3\r\n\r\n{}"),
    "an empty body": sends(whole(200, b"")),
    "a page": sends(whole(200, b"<html>busy</html>", kind="text/html")),
    "half an object": sends(whole(200, b'{"choices": [')),
    "a list": sends(whole(200, b"[]")),
    "a deep body": sends(whole(200, b'{"a":' + b"[" * 100_000)),
    "500": sends(whole(500, b'{"error":{"message":"CUDA error"}}')),
    "501": sends(whole(501, b"")),
    "502": sends(whole(502, b"<html>nginx</html>", kind="text/html")),
    "504": sends(whole(504, b"")),
    "a redirect": sends(whole(302, b"", "location: http://127.0.0.1:1/")),
    "no content": sends(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "continue": sends(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "408": sends(whole(408, b"{}")),
    "503": sends(whole(503, b"{}", "retry-after: 7")),
    "429": sends(whole(429, b"{}", "retry-after: soon")),
    "404": sends(whole(404, b'{"error":{"message":"no such model"}}')),
}
"""What an engine does before the client has a byte of a whole answer."""

STATUS = {"hangs": 504, "hangs in the headers": 504, "hangs in the body": 504, "503": 503, "429": 429, "404": 404}

STREAM_FAILS = {
    "an object instead": sends(whole(200, ANSWER)),
    "an empty stream": sends(streamed(end=LAST)),
    "a stream of garbage": sends(streamed(b"garbage\n\n", end=LAST)),
    "an event of garbage": sends(streamed(b"data: garbage\n\n", end=LAST)),
    "half an event": sends(streamed(b'data: {"choi', end=LAST)),
    "a stream that hangs": sends_and_hangs(STREAM_HEAD),
    "a stream that resets": sends_and_resets(STREAM_HEAD),
    "a page as a stream": sends(whole(200, b"<html></html>", kind="text/html")),
}
"""What an engine does before the first event."""

CUTS = {
    "no end": sends(streamed(EVENTS[0], end=LAST)),
    "a cut": sends(streamed(EVENTS[0])),
    "a cut in an event": sends(streamed(EVENTS[0], b'data: {"cho')),
    "a reset": sends_and_resets(streamed(EVENTS[0])),
    "a hang": sends_and_hangs(streamed(EVENTS[0])),
    "garbage": sends(streamed(EVENTS[0], b"garbage\n\n", DONE, end=LAST)),
    "a broken event": sends(streamed(EVENTS[0], b'data: {"choices\n\n', DONE, end=LAST)),
    "a broken chunk": sends(streamed(EVENTS[0]) + b"zz\r\n"),
}
"""How a stream breaks off behind its first event."""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


@pytest.fixture(scope="module")
def server(engines: list[ScriptedEngine]) -> Iterator[FleetServer]:
    config = ClusterConfig(policy="least-load", dead_after_ns=600 * NS_PER_S)
    with fleet_server([spec_of(engine) for engine in engines], config, silence_s=SILENCE_S) as started:
        yield started


@pytest.fixture(autouse=True)
def fresh(engines: list[ScriptedEngine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.script, engine.asked = well, []


def one_error(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return str(error["message"])


@pytest.mark.parametrize("name", FAILS)
def test_another_engine_answers(engines: list[ScriptedEngine], server: FleetServer, name: str) -> None:
    engines[0].script = FAILS[name]
    response = server.post()
    assert (response.status_code, response.content) == (200, ANSWER)
    assert len(engines[1].asked) == 1


@pytest.mark.parametrize("name", FAILS)
def test_or_one_clear_error_comes(engines: list[ScriptedEngine], server: FleetServer, name: str) -> None:
    for engine in engines:
        engine.script = FAILS[name]
    message = one_error(server.post(), STATUS.get(name, 502))
    assert all(engine.name in message for engine in engines)


@pytest.mark.parametrize("name", STREAM_FAILS)
def test_another_engine_streams(engines: list[ScriptedEngine], server: FleetServer, name: str) -> None:
    engines[0].script = STREAM_FAILS[name]
    response = server.post(stream=True)
    assert (response.status_code, response.content) == (200, STREAM)


@pytest.mark.parametrize("name", CUTS)
def test_a_broken_stream_ends_with_one_error(engines: list[ScriptedEngine], server: FleetServer, name: str) -> None:
    engines[0].script = CUTS[name]
    response = server.post(stream=True)
    first, *rest = response.content.split(b"\n\n")
    assert first + b"\n\n" == EVENTS[0] and len(engines[0].asked) == 1 and not engines[1].asked
    error, done, nothing = rest
    assert set(json.loads(error.removeprefix(b"data: "))) == {"error"} and (done + b"\n\n", nothing) == (DONE, b"")


def test_a_client_error_is_passed_on_as_it_is(engines: list[ScriptedEngine], server: FleetServer) -> None:
    body = b'{"object":"error",  "message":"too long"}'
    engines[0].script = sends(whole(400, body))
    response = server.post()
    assert (response.status_code, response.content) == (400, body) and not engines[1].asked


def test_a_busy_fleet_says_when_to_retry(engines: list[ScriptedEngine], server: FleetServer) -> None:
    for engine, seconds in zip(engines, (7, 3), strict=True):
        engine.script = sends(whole(503, b"{}", f"retry-after: {seconds}"))
    response = server.post()
    one_error(response, 503)
    assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"model":' + b"[" * 50_000, 400),
        (b'{"prompt":"x","model":"other"}', 404),
        (b'{"prompt":"x","model":7}', 200),  # the only model
        (b'{"model":"%b","prompt":{"a":1},"n":"many","max_tokens":[],"tools":3}' % MODEL.encode(), 200),
    ],
)
def test_odd_requests(server: FleetServer, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == status, response.text


def test_there_are_fifty_cases() -> None:
    cases: list[Callable[..., object]] = [*FAILS.values(), *FAILS.values(), *STREAM_FAILS.values(), *CUTS.values()]
    assert len(cases) >= 50
