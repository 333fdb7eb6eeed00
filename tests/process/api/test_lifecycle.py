"""Clients that leave, crowds, deadlines, refusals, keys, and the server's own end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.api.http import server as server_module
from memserve.api.http.errors import ApiError
from memserve.api.http.middleware import KeyRing
from memserve.api.http.server import bind
from memserve.api.openai.request.prompts import INLINE_BYTES_MAX, Prompt, PromptEncoder
from memserve.base.errors import UserError
from memserve.system import secrets as private_files
from memserve.system.loop import EngineStopped
from memserve.system.secrets import GivenKeys

STREAM = {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def paused() -> Iterator[World]:
    """A server with an engine that moves only when the test says so."""
    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=None)) as world:
        yield world


def open_stream(world: World, fields: dict) -> socket.socket:
    """A raw connection, so that it can be dropped at any moment."""
    address = httpx.URL(world.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=10)
    body = httpx.Request("POST", world.url, json=fields).content
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


# -- clients that leave


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize("steps", [0, 2], ids=["before the first token", "in the middle"])
def test_client_disconnect_frees_the_engine_immediately(paused: World, stream: bool, steps: int) -> None:
    engine = paused.engine
    connection = open_stream(paused, {**STREAM, "stream": stream, "n": 2})
    assert engine.wait_until(lambda: len(engine.submitted) == 1)
    for _ in range(steps):
        engine.step()
    if stream and steps:
        assert b"200 OK" in connection.recv(65536)
    connection.close()
    assert engine.wait_until(lambda: bool(engine.cancelled)), "without any further token"
    assert engine.cancelled == [engine.submitted[0].request_id] and engine.requests_outstanding == 0


def test_every_prompt_of_a_dropped_request_is_cancelled(paused: World) -> None:
    engine = paused.engine
    connection = open_stream(paused, {**STREAM, "prompt": ["a", "b", "c"]})
    assert engine.wait_until(lambda: len(engine.submitted) == 3)
    connection.close()
    assert engine.wait_until(lambda: len(engine.cancelled) == 3)


def test_nothing_is_cancelled_after_a_good_end() -> None:
    with serve(FakeEngine(says("short"))) as world, world.client() as client:
        client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
        client.completions.create(model=MODEL, prompt="hi", max_tokens=100, stop="or")
        assert world.engine.wait_until(lambda: not world.engine._running)
        assert world.engine.cancelled == []


# -- crowds


def test_300_clients_at_once() -> None:
    async def one(world: World, number: int) -> str:
        fields = {**STREAM, "prompt": f"client {number}", "max_tokens": 20}
        async with httpx.AsyncClient(base_url=world.url, timeout=60) as client:
            text = (await client.post("/v1/completions", json=fields)).text
        assert text.endswith("data: [DONE]\n\n")
        return text

    async def crowd(world: World) -> list[str]:
        return await asyncio.gather(*(one(world, number) for number in range(300)))

    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=0.001)) as world:
        texts = asyncio.run(crowd(world))
    assert all(text.count('"finish_reason":"length"') == 1 for text in texts)
    assert len({request.prompt.tobytes() for request in world.engine.submitted}) == 300


def test_a_long_prompt_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing waits here until another request was answered: it must run beside the event loop."""
    encode_now, answered, waiting = PromptEncoder._encode, threading.Event(), threading.Event()

    def encode_slowly(self: PromptEncoder, prompt: str, special: bool, cut: bool, *known: Any, **more: Any) -> Prompt:
        if len(prompt) > INLINE_BYTES_MAX:
            waiting.set()
            assert answered.wait(20)
        return encode_now(self, prompt[:5], special, cut)

    monkeypatch.setattr(PromptEncoder, "_encode", encode_slowly)
    with serve(FakeEngine(says("x"))) as world, ThreadPoolExecutor(1) as pool, world.client() as client:
        long = pool.submit(client.completions.create, model=MODEL, prompt="a" * (INLINE_BYTES_MAX + 1))
        assert waiting.wait(20)
        assert client.completions.create(model=MODEL, prompt="short").choices
        answered.set()
        assert long.result(20).choices


# -- refusals


def test_a_full_queue_is_429_with_a_hint_when_to_retry() -> None:
    with serve(FakeEngine(says("x"), step_s=None, max_requests=0, retry_after_s=2.5)) as world:
        for stream in (False, True):
            response = httpx.post(f"{world.url}/v1/completions", json={**STREAM, "stream": stream})
            assert response.status_code == 429 and response.headers["retry-after"] == "3"
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
        with world.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="x")


def test_unservable_request_is_400() -> None:
    with serve(FakeEngine(says("x"), step_s=None, max_requests=0, retry_after_s=None)) as world:
        assert httpx.post(f"{world.url}/v1/completions", json=STREAM).status_code == 400


def test_one_refused_prompt_cancels_the_others() -> None:
    with serve(FakeEngine(says("x"), step_s=None, max_requests=2)) as world:
        response = httpx.post(f"{world.url}/v1/completions", json={**STREAM, "prompt": ["a", "b", "c"]})
        assert response.status_code == 429
        assert len(world.engine.cancelled) == 2 and world.engine.requests_outstanding == 0


def test_our_own_failure_is_500_without_details() -> None:
    engine = FakeEngine(says("x"))
    with serve(engine) as world:
        engine.submit_error = RuntimeError("secret details")
        response = httpx.post(f"{world.url}/v1/completions", json=STREAM)
        assert response.status_code == 500 and "secret" not in response.text
        assert response.json()["error"]["type"] == "server_error"
        assert world.server._hub.calls_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_504(stream: bool) -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        fields = {**STREAM, "stream": stream, "timeout_s": 1e-9}
        response = httpx.post(f"{world.url}/v1/completions", json=fields)
        assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"


def test_mid_stream_error_reaches_openai_client(paused: World) -> None:
    engine = paused.engine

    def work() -> None:
        engine.wait_until(lambda: bool(engine.submitted))
        engine.step()
        engine.step()
        engine.cancel(engine.submitted[0].request_id)  # as when the engine gives up a request

    worker = threading.Thread(target=work)
    worker.start()
    with paused.client() as client, pytest.raises(openai.APIError, match="shutting down"):
        list(client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=50))
    worker.join()


# -- keys and tenants


def test_keys_are_asked_for_and_stand_for_tenants() -> None:
    engine = FakeEngine(says("x"))
    with serve(engine, api_keys=["team-a=secret-a", "team-b=secret-b", "plain"]) as world:
        for key, tenant in (("secret-a", "team-a"), ("secret-b", "team-b"), ("plain", "")):
            with world.client(key) as client:
                client.completions.create(model=MODEL, prompt="the same prompt for every tenant of this server")
                assert engine.submitted[-1].tenant == tenant
                assert client.models.list().data
        for key in ("wrong", "team-a=secret-a", "secret-a ", "secret"):
            header = {"authorization": f"Bearer {key}x"}
            assert httpx.post(f"{world.url}/v1/completions", json=STREAM, headers=header).status_code == 401
        with world.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model=MODEL, prompt="x")
        assert httpx.get(f"{world.url}/v1/models").status_code == 401
        assert httpx.get(f"{world.url}/health").status_code == 200
        assert len(engine.submitted) == 3


def test_removed_key_is_refused_while_open_streams_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant keeps its name, and with it its KV."""
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("ada=k-old\n")
    file.chmod(0o600)
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with serve(engine, api_keys=GivenKeys(file=file).follow_keys()) as world, httpx.Client(base_url=world.url) as http:
        old, new = ({"authorization": f"Bearer {key}"} for key in ("k-old", "k-new"))
        assert http.get("/v1/models", headers=old).status_code == 200
        with httpx.Client(base_url=world.url) as other:
            asked = other.build_request("POST", "/v1/completions", json={**STREAM, "max_tokens": 2}, headers=old)
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(other.send, asked)
                assert engine.wait_until(lambda: engine.requests_outstanding == 1)
                engine.step()
                file.write_text("ada=k-new\n# k-old is withdrawn\n")
                assert http.get("/v1/models", headers=old).status_code == 401, "the connection was open before"
                assert http.get("/v1/models", headers=new).status_code == 200
                engine.step()
                assert "[DONE]" in answer.result(10).text
            assert other.post("/v1/completions", json=STREAM, headers=old).status_code == 401
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(other.post, "/v1/completions", json={**STREAM, "max_tokens": 1}, headers=new)
                assert engine.wait_until(lambda: engine.requests_outstanding == 1)
                engine.step()
                assert answer.result(10).status_code == 200
        assert [request.tenant for request in engine.submitted] == ["ada", "ada"]


def test_tenants_and_salts_do_not_share_the_cache() -> None:
    prompt = "a prompt long enough for several blocks of the cache"
    engine = FakeEngine(says("x"))
    with serve(engine, api_keys=["a=ka", "b=kb"]) as world, world.client("ka") as one, world.client("kb") as other:

        def cached(client: openai.OpenAI, **fields: str) -> int:
            answer = client.completions.create(model=MODEL, prompt=prompt, extra_body=fields)
            return answer.usage.prompt_tokens_details.cached_tokens

        assert cached(one) == 0 and cached(one) > 0
        assert cached(other) == 0
        assert cached(one, cache_salt="s") == 0 and cached(one, cache_salt="s") > 0


def test_key_ring() -> None:
    ring = KeyRing(["a=1=2", "abc==", "b=k"])
    assert (
        ring.tenant_of("Bearer 1=2") == "a"
        and ring.tenant_of("bearer abc==") == ""
        and ring.tenant_of("Bearer k") == "b"
    )
    for header in (None, "", "Bearer", "Bearer ", "Basic k", "k", "Bearer a", "Bearer k\udcff"):
        with pytest.raises(ApiError):
            ring.tenant_of(header)
    assert KeyRing().is_open and KeyRing().tenant_of(None) == ""
    for bad in (["a=k", "b=k"], ["with space"], ["é"], ["a=\x7f"]):
        with pytest.raises(UserError):
            KeyRing(bad)


@pytest.mark.parametrize("empty", ["", "=", "team-a=", "a.b_c="])
def test_empty_key_is_refused(empty: str) -> None:
    """``--api-key team-a=$KEY`` without the variable must not make a key of the tenant's name."""
    with pytest.raises(UserError, match="an API key is empty") as caught:
        KeyRing(["a=k", empty])
    assert caught.value.hint


# -- the server's own end


def stop_gently(world: World) -> None:
    world.server.handle_exit(signal.SIGTERM, None)


def test_a_stream_may_finish_after_the_first_signal(paused: World) -> None:
    engine = paused.engine
    connection = open_stream(paused, {**STREAM, "max_tokens": 3})
    assert engine.wait_until(lambda: len(engine.submitted) == 1)
    engine.step()
    assert b"200 OK" in connection.recv(65536)
    stop_gently(paused)
    engine.step()
    engine.step()
    rest = b""
    while data := connection.recv(65536):
        rest += data
    assert b'"finish_reason":"length"' in rest and b"[DONE]" in rest
    paused.thread.join(20)
    assert not paused.thread.is_alive()


def test_stream_beyond_drain_deadline_ends_with_error() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=None), drain_s=0.2) as world:
        connection = open_stream(world, STREAM)
        assert world.engine.wait_until(lambda: len(world.engine.submitted) == 1)
        world.engine.step()
        assert b"200 OK" in connection.recv(65536)
        stop_gently(world)
        rest = b""
        while data := connection.recv(65536):
            rest += data
        assert b"shutting down" in rest and b"[DONE]" in rest
        assert world.engine.wait_until(lambda: not world.engine._running)


def test_the_second_signal_ends_at_once() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT), step_s=None), drain_s=600) as world:
        connection = open_stream(world, STREAM)
        assert world.engine.wait_until(lambda: len(world.engine.submitted) == 1)
        stop_gently(world)
        stop_gently(world)
        world.thread.join(20)
        assert not world.thread.is_alive()
        connection.close()
        for request in world.engine.submitted:
            world.engine.cancel(request.request_id)  # the process would end here


def test_new_requests_are_503_while_draining(paused: World) -> None:
    with httpx.Client(base_url=paused.url) as client:
        assert client.get("/health").status_code == 200
        paused.server._hub.draining = True
        response = client.post("/v1/completions", json=STREAM)
        assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
        assert client.get("/health").status_code == 503


def test_a_closing_engine_is_503_everywhere(paused: World) -> None:
    paused.engine._closing = True
    paused.engine.stats_error = EngineStopped()
    with httpx.Client(base_url=paused.url) as client:
        response = client.post("/v1/completions", json=STREAM)
        assert response.status_code == 503 and response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"] and client.get("/health").status_code == 503
        assert "memserve_engine_up 0.0" in client.get("/metrics").text


def test_half_a_request_is_503_when_the_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FAREWELL_S", 0.1)
    with serve(FakeEngine(says("x")), drain_s=0.1) as world:
        address = httpx.URL(world.url)
        with socket.create_connection((address.host, address.port or 80), timeout=20) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"expect: 100-continue\r\ncontent-length: 100\r\n\r\n")
            assert b" 100 " in connection.recv(65536), "the server waits for the body now"
            stop_gently(world)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b" 503 " in answer and b"shutting_down" in answer and b"Internal Server Error" not in answer


def test_a_taken_port_is_a_user_error_before_anything_else() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(UserError) as caught:
        bind("127.0.0.1", first.getsockname()[1])
    assert "in use" in str(caught.value) and "--port" in (caught.value.hint or "")


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio turns Nagle's algorithm off only for sockets with an explicit protocol; accepted ones inherit it."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
