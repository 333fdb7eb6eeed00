"""``/v1/responses`` of engines, as they are: streams with their own end, stored ones by id; keys are refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fleet_server import FleetServer, fleet_server, spec_of
from scripted_engine import ANSWER, STREAM_HEAD, Asked, ScriptedEngine, chunk, scripted_engines, whole


def event(kind: str, number: int, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": number, **fields})
    return f"event: {kind}\ndata: {data}\n\n".encode()


BEGUN = [event("response.created", 0, response={"id": "resp_1"}), event("response.output_text.delta", 1, delta="o")]


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


@pytest.fixture
def server(engines: list[ScriptedEngine]) -> Iterator[FleetServer]:
    with fleet_server([spec_of(engine) for engine in engines]) as server:
        yield server


def ask(server: FleetServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"model": "scripted", "input": "hi", **fields}, timeout=20)


def set_stream(engines: list[ScriptedEngine], events: list[bytes], *, is_whole: bool = True) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunk, events)) + (b"0\r\n\r\n" if is_whole else b""))

    for engine in engines:
        engine.script = script


def test_a_response_goes_through_byte_for_byte(engines: list[ScriptedEngine], server: FleetServer) -> None:
    body = b'{ "model":"scripted", "input" : [{"role":"user","content":"\\u00e9"}], "max_output_tokens": 9, "tools":[]}'
    answer = httpx.post(f"{server.url}/v1/responses", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.content) == (200, ANSWER)
    (asked,) = [asked for engine in engines for asked in engine.asked]
    assert (asked.body, asked.path) == (body, "/v1/responses")


@pytest.mark.parametrize("end", ["response.completed", "response.incomplete", "response.failed", "error"])
def test_a_stream_ends_as_a_response_does(engines: list[ScriptedEngine], server: FleetServer, end: str) -> None:
    """There is no [DONE]."""
    events = [*BEGUN, event(end, 2, response={"id": "resp_1"})]
    set_stream(engines, events)
    assert ask(server, stream=True).content == b"".join(events)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_cut_stream_ends_with_a_numbered_error(
    engines: list[ScriptedEngine], server: FleetServer, *, is_whole: bool
) -> None:
    set_stream(engines, BEGUN, is_whole=is_whole)
    content = ask(server, stream=True).content
    assert content.startswith(b"".join(BEGUN))
    name, data = content.removeprefix(b"".join(BEGUN)).rstrip().split(b"\n")
    error = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error" and error["type"] == "error" and error["sequence_number"] == 2
    assert error["code"] == "engine_failed" and "ends here" in error["message"]


def test_a_response_that_another_engine_stored_is_found(engines: list[ScriptedEngine], server: FleetServer) -> None:
    """Each engine stores its own: what says 404 is asked elsewhere."""
    unknown = whole(404, b'{"error":{"message":"Response with id resp_1 not found."}}')

    async def forgets(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(unknown)

    engines[0].script = forgets
    for _ in range(3):
        assert ask(server, previous_response_id="resp_1").content == ANSWER
    engines[1].script = forgets
    answer = ask(server, previous_response_id="resp_1")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_stored_responses_are_asked_of_each_engine(engines: list[ScriptedEngine], server: FleetServer) -> None:
    stored = b'{"id":"resp_1", "object":"response"}'
    engines[0].pages["/v1/responses/resp_1?include=x"] = 404, b"{}"
    engines[1].pages["/v1/responses/resp_1?include=x"] = 200, stored
    answer = server.get("/v1/responses/resp_1?include=x")
    assert (answer.status_code, answer.content) == (200, stored)
    for engine in engines:
        engine.pages["/v1/responses/resp_2"] = engine.pages["/v1/responses/resp_2/cancel"] = 404, b"{}"
    engines[1].pages["/v1/responses/resp_2/cancel"] = 200, stored
    assert httpx.post(f"{server.url}/v1/responses/resp_2/cancel").content == stored
    answer = server.get("/v1/responses/resp_2")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "response_not_found"
    assert all(engine.name in answer.json()["error"]["message"] for engine in engines)


def test_an_id_cannot_say_more_than_an_id(engines: list[ScriptedEngine], server: FleetServer) -> None:
    """It is decoded on the way, and what comes out must not become a header, another request, or another page."""
    for odd in ("a%0d%0ax-evil:%201", "a%20HTTP/1.1%0d%0a%0d%0a", "%e2%82%ac", "a%3fb", "..%2f..%2fmodels", "a/b"):
        assert server.get(f"/v1/responses/{odd}").status_code == 404
    assert not any(engine.asked for engine in engines)


def test_a_client_that_leaves_a_stored_response(engines: list[ScriptedEngine], server: FleetServer) -> None:
    left = threading.Event()

    async def streams(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(BEGUN[0]))
        try:
            while not writer.is_closing():
                writer.write(chunk(b": still\n\n"))
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            left.set()

    for engine in engines:
        engine.script = streams
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server.url}/v1/responses/resp_1?stream=true", timeout=0.5)
    assert left.wait(20)


def test_stored_responses_are_of_no_tenant(engines: list[ScriptedEngine]) -> None:
    """Engines know none: one key's client could read what another one's has stored."""
    engines[0].pages["/v1/responses/resp_1"] = 200, b"{}"
    with fleet_server([spec_of(engines[0])], api_keys=["team=secret", "plain"]) as server:
        named, plain = ({"authorization": f"Bearer {key}"} for key in ("secret", "plain"))
        url, body = f"{server.url}/v1/responses", {"model": "scripted", "input": "hi"}
        assert httpx.get(f"{url}/resp_1", headers=named).status_code == 404
        assert httpx.get(f"{url}/resp_1", headers=plain).status_code == 200
        refused = httpx.post(url, json=body | {"previous_response_id": "resp_1"}, headers=named)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "previous_response_id"
        assert httpx.post(url, json=body | {"previous_response_id": None}, headers=named).content == ANSWER
        assert httpx.post(url, json=body | {"previous_response_id": "resp_1"}, headers=plain).content == ANSWER


@pytest.mark.parametrize("name", ["Idempotency-Key", "Last-Event-ID"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_keys_for_the_same_answer_are_refused(
    engines: list[ScriptedEngine], server: FleetServer, path: str, name: str
) -> None:
    """An engine would compute it again, and the client would take the two for one."""
    body = {"model": "scripted", "prompt": "x", "input": "x"}
    answer = httpx.post(server.url + path, json=body, headers={name: "one"})
    assert answer.status_code == 400 and not any(engine.asked for engine in engines)
    error = answer.json()["error"]
    assert error["code"] == "unsupported_parameter" and name in error["message"] and error["param"] == name.lower()
