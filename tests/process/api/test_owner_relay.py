"""A router that is not the owner hands the owner's answers on: bytes, headers, streams, faults, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from api_world import World, says, serve
from fake_engine import FakeEngine
from front_world import Front, running_front
from memserve.api.model_table import OwnersModels
from memserve.api.openai.paths import answer_as_owner
from ports import free_port
from scripted_engine import STREAM_HEAD, Asked, ScriptedEngine, chunk, scripted_engines, whole

DOCUMENT = b'{"id":"d 1", "object":"document"}'


@pytest.fixture
def owner() -> Iterator[ScriptedEngine]:
    with scripted_engines(1) as (started,):
        started.script = answer_well
        yield started


async def answer_well(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(201, DOCUMENT, "x-own: yes", "set-cookie: a=b"))


@pytest.fixture
def world(owner: ScriptedEngine) -> Iterator[World]:
    engine = FakeEngine(says("hello"))
    engine.owner_url = owner.url
    with serve(engine, api_keys=("team-a=key-of-a",)) as started:
        yield started


HEADERS = {"authorization": "Bearer key-of-a", "content-type": "application/json"}


def test_the_owners_answer_is_handed_on_as_it_is(world: World, owner: ScriptedEngine) -> None:
    body = b'{"text":   "w1 w2"}'
    answer = httpx.put(f"{world.url}/v1/documents/d%201?a=%20b", content=body, headers=HEADERS)
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (201, DOCUMENT, "yes")
    assert "set-cookie" not in answer.headers
    (asked,) = owner.asked
    assert (asked.path, asked.body) == ("/v1/documents/d%201?a=%20b", body)
    assert asked.headers["authorization"] == "Bearer key-of-a"
    assert asked.headers["x-request-id"] == answer.headers["x-request-id"] and asked.headers["host"] == owner.name


def test_servers_that_leave_the_raw_path_out_are_understood(owner: ScriptedEngine) -> None:
    """ASGI asks for neither a raw path nor an id of ours: as with Ray Serve."""
    hub = SimpleNamespace(engine=SimpleNamespace(owner_url=owner.url), draining=False)
    headers = [(b"x-request-id", b"of-the-client")]
    scope = {"method": "GET", "path": "/v1/documents/d 1", "query_string": b"a=b", "headers": headers}
    events: list[Any] = []

    async def ask() -> None:
        async def receive() -> Any:
            await asyncio.sleep(20)

        async def send(event: Any) -> None:
            events.append(event)

        await answer_as_owner(hub, "documents", scope, receive, send, b"")

    asyncio.run(ask())
    (asked,) = owner.asked
    assert events[0]["status"] == 201 and asked.path == "/v1/documents/d%201?a=b"
    assert asked.headers["x-request-id"] == "of-the-client"


def test_methods_that_no_router_knows_are_refused_here(world: World, owner: ScriptedEngine) -> None:
    assert httpx.patch(f"{world.url}/v1/documents/d", json={}, headers=HEADERS).status_code == 405
    assert owner.asked == []


@pytest.mark.parametrize("path", ["/v1/sessions/s", "/v1/responses/resp_1", "/v1/documents"])
def test_paths_without_a_body_are_the_owners_too(path: str, world: World, owner: ScriptedEngine) -> None:
    assert httpx.get(f"{world.url}{path}", headers=HEADERS).status_code == 201
    assert httpx.delete(f"{world.url}{path}", headers=HEADERS).status_code == 201
    assert [asked.path for asked in owner.asked] == [path, path]


def test_only_what_names_kept_kv_goes_to_the_owner(world: World, owner: ScriptedEngine) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    assert httpx.post(f"{world.url}/v1/completions", json=body, headers=HEADERS).status_code == 200
    assert owner.asked == []
    for field in ({"document": "d"}, {"session": "s", "session_ttl_s": 5}):
        assert httpx.post(f"{world.url}/v1/completions", json=body | field, headers=HEADERS).status_code == 201
        assert json.loads(owner.asked.pop().body) == body | field


def test_wrong_keys_do_not_reach_the_owner(world: World, owner: ScriptedEngine) -> None:
    assert httpx.get(f"{world.url}/v1/documents", headers={"authorization": "Bearer x"}).status_code == 401
    assert owner.asked == []


def test_adapters_are_loaded_and_unloaded_by_the_owner(world: World, owner: ScriptedEngine) -> None:
    assert httpx.post(f"{world.url}/v1/load_lora_adapter", content=b'{"a": 1}', headers=HEADERS).status_code == 201
    assert httpx.delete(f"{world.url}/adapters/a/b", headers=HEADERS).status_code == 201
    asked = [(each.path, each.body) for each in owner.asked]
    assert asked == [("/v1/load_lora_adapter", b'{"a": 1}'), ("/adapters/a/b", b"")]


def test_batches_and_what_files_say_are_the_owners(world: World, owner: ScriptedEngine) -> None:
    assert httpx.get(f"{world.url}/v1/files?limit=2", headers=HEADERS).content == DOCUMENT
    assert httpx.delete(f"{world.url}/v1/files/f", headers=HEADERS).status_code == 201
    assert httpx.post(f"{world.url}/v1/batches", content=b'{"a": 1}', headers=HEADERS).status_code == 201
    asked = [(each.path, each.body) for each in owner.asked]
    assert asked == [("/v1/files?limit=2", b""), ("/v1/files/f", b""), ("/v1/batches", b'{"a": 1}')]


def test_an_upload_goes_on_as_it_comes(world: World, owner: ScriptedEngine) -> None:
    """More than a router would read of a body; the first pieces are there before the last one is sent."""
    arrived, size = threading.Event(), 0

    async def receive(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal size
        async for piece in asked.pieces():
            size += len(piece)
            arrived.set()
        writer.write(whole(200, DOCUMENT))

    owner.streams_bodies, owner.script = True, receive

    def pieces() -> Iterator[bytes]:
        yield b"x" * 100_000
        assert arrived.wait(30)
        for _ in range(800):
            yield b"y" * 100_000

    answer = httpx.post(f"{world.url}/v1/files", content=pieces(), headers=HEADERS, timeout=60)
    assert (answer.status_code, answer.content, size) == (200, DOCUMENT, 80_100_000)


def test_an_upload_that_the_owner_refuses_need_not_end(world: World, owner: ScriptedEngine) -> None:
    refused = threading.Event()

    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(413, b"{}"))
        await writer.drain()
        refused.set()

    owner.streams_bodies, owner.script = True, refuse

    def pieces() -> Iterator[bytes]:
        yield b"x"
        assert refused.wait(30)
        yield b"x"

    answer = httpx.post(f"{world.url}/v1/files", content=pieces(), headers=HEADERS, timeout=30)
    assert answer.status_code == 413


def test_an_upload_that_breaks_off_breaks_off_at_the_owner(world: World, owner: ScriptedEngine) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def receive(asked: Asked, writer: asyncio.StreamWriter) -> None:
        try:
            async for _ in asked.pieces():
                begun.set()
        finally:
            ended.set()

    owner.streams_bodies, owner.script = True, receive
    host, _, port = world.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-a\r\nContent-Length: 9999\r\n\r\n"
        sock.sendall(head + b"x" * 100)
        assert begun.wait(30)
    assert ended.wait(30)


def test_a_relayed_request_is_never_relayed_again(world: World, owner: ScriptedEngine) -> None:
    answer = httpx.get(f"{world.url}/v1/documents", headers=HEADERS | {"x-memserve-relayed": "1"})
    assert answer.status_code == 307 and owner.asked == []


def test_an_owner_that_is_gone_is_a_503(world: World) -> None:
    world.engine.owner_url = f"http://127.0.0.1:{free_port()}"
    answer = httpx.get(f"{world.url}/v1/documents", headers=HEADERS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "owner_silent")
    assert answer.headers["retry-after"] == "1" and "/v1/documents is the owner's" in answer.text
    world.engine.owner_url = ""
    assert httpx.get(f"{world.url}/v1/documents", headers=HEADERS).json()["error"]["code"] == "owner_only"


def test_a_stream_comes_piece_by_piece_and_may_break_off(world: World, owner: ScriptedEngine) -> None:
    through = threading.Event()

    async def breaks(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        while not through.is_set():
            await asyncio.sleep(0.005)
        writer.write(chunk(b"data: 2\n\n"))
        await writer.drain()
        writer.transport.abort() if asked.fields["input"] == "breaks" else writer.write(b"0\r\n\r\n")

    owner.script = breaks
    for text in ("goes on", "breaks"):
        through.clear()
        body = {"input": text, "stream": True}
        with httpx.stream("POST", f"{world.url}/v1/responses", json=body, headers=HEADERS, timeout=30) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == b"data: 1\n\n", "before the second one was sent"
            through.set()
            if text == "breaks":
                with pytest.raises(httpx.RemoteProtocolError):
                    list(pieces)
            else:
                assert b"".join(pieces) == b"data: 2\n\n"


def test_a_client_that_leaves_ends_the_owners_work(world: World, owner: ScriptedEngine) -> None:
    left = threading.Event()

    async def goes_on(asked: Asked, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(STREAM_HEAD)
            while True:
                writer.write(chunk(b"data: more\n\n"))
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            left.set()

    owner.script = goes_on
    body = {"input": "x", "stream": True}
    with httpx.stream("POST", f"{world.url}/v1/responses", json=body, headers=HEADERS, timeout=30) as answer:
        next(answer.iter_raw())
        assert not left.is_set()
    assert left.wait(30)


# -- models that are the owner's


@pytest.fixture
def front(owner: ScriptedEngine) -> Iterator[Front]:
    """With ``one`` and ``two`` here, and ``three`` at the owner, which may have others."""
    with running_front(api_keys=("team-a=key-of-a",)) as started:
        started.engines["one"].owner_url = owner.url
        started.front.table.owners = OwnersModels(("three",))
        yield started


@pytest.mark.parametrize("name", ["three", "THREE", "added"])
def test_requests_for_its_models_are_the_owners(name: str, front: Front, owner: ScriptedEngine) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}]}
    answer = front.post("/v1/chat/completions", body, headers=HEADERS)
    assert (answer.status_code, answer.content) == (201, DOCUMENT)
    (asked,) = owner.asked
    assert (asked.path, json.loads(asked.body)) == ("/v1/chat/completions", body)
    assert asked.headers["authorization"] == "Bearer key-of-a"


def test_requests_for_other_models_are_answered_here(front: Front, owner: ScriptedEngine) -> None:
    body = {"model": "two", "messages": [{"role": "user", "content": "hi"}]}
    answer = front.post("/v1/chat/completions", body, headers=HEADERS)
    assert "I am the second" in answer.text and owner.asked == []


def test_calls_about_models_are_the_owners(front: Front, owner: ScriptedEngine) -> None:
    operator = {"authorization": "Bearer operators"}
    calls = [("POST", "/models/three/sleep"), ("DELETE", "/models/three"), ("GET", "/models"), ("POST", "/models")]
    for method, path in calls:
        content = b'{"model": "x=/x"}' if path == "/models" and method == "POST" else b""
        assert httpx.request(method, front.url + path, content=content, headers=operator).status_code == 201
    assert [asked.path for asked in owner.asked] == [path for _, path in calls]
    assert {asked.headers["authorization"] for asked in owner.asked} == {"Bearer operators"}


def test_keys_are_checked_before_the_owner_is_asked(front: Front, owner: ScriptedEngine) -> None:
    body = {"model": "three", "messages": [{"role": "user", "content": "hi"}]}
    wrong = HEADERS | {"authorization": "Bearer x"}
    assert front.post("/v1/chat/completions", body, headers=wrong).status_code == 401
    assert front.get("/v1/models", headers=wrong).status_code == 401 and owner.asked == []


def test_an_owner_with_tls_is_named(front: Front) -> None:
    front.engines["one"].owner_url = "https://owner:8001"
    body = {"model": "three", "messages": [{"role": "user", "content": "hi"}]}
    answer = front.post("/v1/chat/completions", body, headers=HEADERS)
    assert answer.status_code == 307 and answer.headers["location"] == "https://owner:8001/v1/chat/completions"
    assert "The model `three` is the owner's alone" in answer.text
