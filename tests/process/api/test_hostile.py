"""Bad input gets the right error, holds nothing, and hurts no other request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_world import CONTEXT_TOKENS, MODEL, SCRIPT_TEXT, TinyModel, World, says, serve
from fake_engine import FakeEngine
from hostile_grammar import Target
from hostile_requests import HostileCase, check_answer, hostile_cases, send
from hostile_storm import fresh_seed, storm
from memserve.api.http.errors import ApiError
from memserve.api.openai.request.schema import ChatBody, CompletionBody, parse_body

STORM_ATTACKS = 400
CASES = list(hostile_cases(MODEL, CONTEXT_TOKENS, "hello " * CONTEXT_TOKENS))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


@pytest.fixture(scope="module")
def http(world: World) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=world.url, timeout=60) as client:
        yield client


def still_answers(world: World, http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert world.engine.wait_until(lambda: not world.engine._running)


def test_the_table_is_large_enough() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_request(world: World, http: httpx.Client, case: HostileCase) -> None:
    submitted = len(world.engine.submitted)
    check_answer(case, send(http, case))
    assert len(world.engine.submitted) == submitted, "a bad request reached the engine"
    still_answers(world, http)


def test_a_message_that_the_template_refuses(world: World, http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "refuse me"}]}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "cannot say that" in response.json()["error"]["message"]


def test_a_body_without_end_is_not_held_in_memory(world: World, http: httpx.Client) -> None:
    """Chunked, so no length is declared: the limit must hold while reading."""

    def endless() -> Iterator[bytes]:
        for _ in range(400):
            yield b"x" * 100_000

    headers = {"content-type": "application/json"}
    response = http.post("/v1/completions", content=endless(), headers=headers)
    assert response.status_code == 413
    still_answers(world, http)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 20,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
    ],
    ids=["no request line", "TLS", "negative length", "two lengths", "20,000 headers", "a client that leaves early"],
)
def test_hostile_bytes(world: World, http: httpx.Client, raw: bytes) -> None:
    address = httpx.URL(world.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    assert re.match(rb"HTTP/1\.1 4\d\d ", answer) or not answer, "it was taken for a request"
    assert answer.count(b"HTTP/1.1 ") <= 1
    still_answers(world, http)


@pytest.mark.parametrize("more", [b"a: b\r\n" * 1000, b"x" * 5000], ids=["headers", "one header"])
def test_a_head_without_end_is_ended(world: World, http: httpx.Client, more: bytes) -> None:
    address = httpx.URL(world.url)
    with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\na: ")
        with pytest.raises(ConnectionError):
            for _ in range(10_000):  # 50 MB: far more than any buffer on the way
                connection.sendall(more)
    still_answers(world, http)


def test_an_answer_survives_what_was_sent_behind_a_last_request(world: World, http: httpx.Client) -> None:
    """The client may send on before it knows that the connection ends: that must not reset what it has not read."""
    address = httpx.URL(world.url)
    for behind in (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3, b"x" * 100_000):
        with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\nhost: x\r\n\r\n" + behind)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\n") and answer.count(b"HTTP/1.1 ") == 1
    still_answers(world, http)


def test_long_heads_are_answered(world: World, http: httpx.Client) -> None:
    """Each of them within the limit, on one connection."""
    for _ in range(3):
        assert http.get("/health", headers={"x-long": "y" * 50_000}).status_code == 200


def test_a_storm_of_random_requests(world: World, http: httpx.Client) -> None:
    """Another one in each run; ``HOSTILE_SEED=N`` repeats one."""
    seed = fresh_seed()
    target = Target(MODEL, CONTEXT_TOKENS, TinyModel().vocab_size)
    result = asyncio.run(storm(world.url, target, seed, range(STORM_ATTACKS), clients=16))
    assert not result.misses, f"HOSTILE_SEED={seed}: {len(result.misses)} misses\n" + "\n".join(result.misses[:5])
    assert result.statuses["200"] >= STORM_ATTACKS // 20, result.statuses
    assert result.statuses["400"] >= STORM_ATTACKS // 20, result.statuses
    still_answers(world, http)
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 200, "temperature": 0})
    assert answer.json()["choices"][0]["text"] == SCRIPT_TEXT


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "wow"])


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(FIELDS, JSON_VALUES, max_size=6), st.binary(max_size=3), st.integers(0, 200))
def test_parsing_anything_gives_a_body_or_a_400(fields: dict, noise: bytes, at: int) -> None:
    data = json.dumps(fields).encode()
    for text in (data, data[:at] + noise + data[at:]):
        for kind in (CompletionBody, ChatBody):
            try:
                assert isinstance(parse_body(text, kind), kind)
            except ApiError as error:
                assert error.status == 400
                json.loads(error.encode_body())
