"""What clients may make the HTTP server hold, and for how long: raw connections against the real server."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from api_world import MODEL, SCRIPT_TEXT, World, encode, says, serve
from fake_engine import FakeEngine
from memserve.api.http import connection as connection_module
from memserve.api.http.config import EdgeConfig
from memserve.api.http.limits import DESCRIPTORS_KEPT, READ_BYTES_MAX, SMALL_BODY_BYTES, make_room_for_connections
from memserve.base.errors import UserError
from memserve.base.types import TokenLogprobs
from memserve.base.units import KIB, MIB
from raw_http import Answers, connect, error_of, flood, head, post, until, until_closed
from waiting import eventually

CHUNKED = (b"content-type: application/json", b"transfer-encoding: chunked")
ASK = {"model": MODEL, "prompt": "hi", "max_tokens": 1}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=["a=key"]) as world:
        yield world


def held_bytes(world: World) -> int:
    """What the server holds of what came from clients."""
    return sum(connection._reader.unread_bytes for connection in list(world.server.server_state.connections))


def metric(world: World, name: str, **labels: str) -> float:
    return world.server._edge.metrics.registry.get_sample_value(f"memserve_http_{name}", labels) or 0.0


def still_answers(world: World, key: str = "key") -> None:
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(f"{world.url}/v1/completions", json=ASK, headers=headers, timeout=30).status_code == 200


# -- what has no end


@pytest.mark.parametrize("more", [b"x:y\r\n" * 1000, b"y" * 5000], ids=["trailers", "one trailer"])
@pytest.mark.parametrize("method, path, key, status", [
    (b"POST", "/v1/completions", b"key", 431), (b"POST", "/v1/completions", b"wrong", 401),
    (b"POST", "/nothing", b"key", 404), (b"POST", "/v1/models", b"key", 405),
])  # fmt: skip
def test_trailers_without_end_are_not_kept(
    world: World, method: bytes, path: str, key: bytes, status: int, more: bytes
) -> None:
    with connect(world.url) as connection:
        connection.sendall(head(method, path, b"authorization: Bearer " + key, *CHUNKED) + b"0\r\nx: ")
        flood(connection, more, 5 * MIB)
        assert held_bytes(world) < 100 * KIB
        with contextlib.suppress(OSError):  # the server may have ended it
            connection.shutdown(socket.SHUT_WR)
        answer = until_closed(connection)
    # the trailers may have been too long before the application had answered
    assert not answer or b"HTTP/1.1 %d " % status in answer or b"HTTP/1.1 431 " in answer
    still_answers(world)


def test_early_response_reaches_a_client_still_sending(world: World) -> None:
    """And it says that the connection ends; what comes afterwards is dropped."""
    length = b"content-length: %d" % (8 * MIB)
    with connect(world.url) as connection:
        connection.sendall(head(b"POST", "/v1/completions", length))
        assert flood(connection, b"z" * 65536, 8 * MIB) == 8 * MIB
        assert held_bytes(world) == 0
        answer = until_closed(connection)
    assert b" 401 " in answer and b"connection: close" in answer and answer.count(b"HTTP/1.1") == 1


def test_early_response_keeps_connection_if_little_body_is_left(world: World) -> None:
    with connect(world.url) as connection:
        answers = Answers(connection)
        connection.sendall(head(b"POST", "/nothing", b"content-length: 1000") + b"z" * 10)
        status, headers, _ = answers.next()
        assert status == 404 and "connection" not in headers
        connection.sendall(b"z" * 990 + head(b"GET", "/health"))
        assert answers.next()[0] == 200


# -- pipelining


def test_half_a_head_behind_a_long_body_waits_for_its_other_half(world: World) -> None:
    body = json.dumps({**ASK, "user": "u" * 100_000}).encode()
    second = head(b"GET", "/health")
    with connect(world.url) as connection:
        answers = Answers(connection)
        connection.sendall(post("/v1/completions", body, b"authorization: Bearer key") + second[:10])
        assert answers.next()[0] == 200
        connection.sendall(second[10:])
        assert answers.next()[0] == 200


def test_3000_pipelined_requests_are_answered_in_order(world: World) -> None:
    count = 3000
    key = b"authorization: Bearer key"
    stream = b"".join(head(b"GET", f"/v1/models/number-{at}", key) for at in range(count))
    most_tasks = 0
    with connect(world.url) as connection:
        connection.sendall(stream)  # the kernel holds what the server does not read yet
        answers = Answers(connection)
        for at in range(count):
            status, _, body = answers.next()
            most_tasks = max(most_tasks, len(world.server.server_state.tasks))
            assert status == 404 and f"`number-{at}`".encode() in body
            assert held_bytes(world) <= 2 * READ_BYTES_MAX
    assert most_tasks <= 2  # the last one may not have been tidied away yet


# -- time


@pytest.fixture
def hasty() -> Iterator[World]:
    limits = EdgeConfig(header_timeout_s=0.2, body_timeout_s=0.3, keep_alive_s=0.2)
    with serve(FakeEngine(says("x")), limits=limits) as world:
        yield world


@pytest.mark.parametrize("sent, status, what", [
    (b"", None, None), (b"\r\n", 408, "header_timeout"), (b"GET /health HTTP/1.1\r\nhost", 408, "header_timeout"),
    (head(b"POST", "/v1/completions", *CHUNKED) + b"5\r\n{", 408, "body_timeout"),
    (head(b"POST", "/v1/completions", b"content-type: application/json", b"content-length: 9"), 408, "body_timeout"),
    (head(b"POST", "/nothing", b"content-length: 9"), 404, None),
], ids=["nothing", "an empty line", "half a head", "half a chunk", "no body", "a body that is not wanted"])  # fmt: skip
def test_clients_that_do_not_go_on_are_ended(hasty: World, sent: bytes, status: int | None, what: str | None) -> None:
    with connect(hasty.url) as connection:
        connection.sendall(sent)
        answer = until_closed(connection)
    assert not answer if status is None else answer.startswith(b"HTTP/1.1 %d " % status)
    if what is not None:
        assert error_of(answer)["code"] == what and metric(hasty, "refused_total", limit=what) == 1


def test_slow_sender_does_not_extend_the_deadline(hasty: World) -> None:
    with connect(hasty.url) as connection:
        connection.settimeout(0.01)
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                connection.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
                    break
            else:
                pytest.fail("nothing ended it")


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(hasty: World) -> None:
    with connect(hasty.url) as connection:
        answers = Answers(connection)
        for _ in range(3):
            connection.sendall(head(b"GET", "/health"))
            assert answers.next()[0] == 200
        assert until_closed(connection) == b""


# -- connections


def test_new_connection_evicts_the_idlest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FRESH_S", 0.0)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(FakeEngine(says("x")), limits=EdgeConfig(connections_max=3)))
        first, second, third, fourth = (stack.enter_context(connect(world.url)) for _ in range(4))
        assert error_of(until_closed(first))["code"] == "evicted", "it is told, as it has had no answer yet"
        for connection in (second, third, fourth):
            connection.sendall(head(b"GET", "/health"))
            assert Answers(connection).next()[0] == 200
        assert metric(world, "refused_total", limit="evicted") == 1 and metric(world, "connections") == 3
        stack.enter_context(connect(world.url))
        assert until_closed(second) == b"", "between two requests a client expects that"
        assert metric(world, "refused_total", limit="evicted") == 2


def test_of_many_connections_at_once_each_gets_an_answer() -> None:
    """The loop stands still meanwhile, so that it finds all of them at once, their requests unread."""
    goes_on = threading.Event()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(FakeEngine(says("x")), limits=EdgeConfig(connections_max=20)))
        stack.callback(goes_on.set)
        assert httpx.post(f"{world.url}/v1/completions", json=ASK).status_code == 200, "its loop is known from then on"
        world.server._hub._loop.call_soon_threadsafe(goes_on.wait)
        connections = [stack.enter_context(connect(world.url)) for _ in range(300)]
        for connection in connections:
            connection.sendall(head(b"GET", "/health"))
        goes_on.set()
        statuses = Counter(connection.recv(1 << 16)[9:12] for connection in connections)
    assert statuses[b"200"] >= 20 and statuses[b"200"] + statuses[b"503"] == len(connections), statuses


def test_connections_in_use_are_not_evicted() -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    body = json.dumps({**ASK, "stream": True, "max_tokens": 3}).encode()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(engine, limits=EdgeConfig(connections_max=2)))
        streams = [stack.enter_context(connect(world.url)) for _ in range(2)]
        for stream in streams:
            stream.sendall(post("/v1/completions", body))
        assert engine.wait_until(lambda: len(engine.submitted) == 2)
        refused = until_closed(stack.enter_context(connect(world.url)))
        assert b" 503 " in refused and b"retry-after: 1" in refused and error_of(refused)["code"] == "connections"
        for _ in range(3):
            engine.step()
        for stream in streams:
            assert b" 200 " in stream.recv(65536)


def test_connections_per_address_are_limited() -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(engine, limits=EdgeConfig(connections_per_address_max=1)))
        stream = stack.enter_context(connect(world.url))
        stream.sendall(post("/v1/completions", json.dumps(ASK).encode()))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        assert b" 429 " in until_closed(stack.enter_context(connect(world.url)))
        engine.step()
        assert b" 200 " in stream.recv(65536)


def test_thousands_of_connections_leave_no_trace(world: World) -> None:
    before = len(world.server.server_state.connections)
    for at in range(2000):
        with connect(world.url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n"[: at % 20])
    eventually(lambda: len(world.server.server_state.connections) <= before)
    assert metric(world, "connections") == len(world.server.server_state.connections)


def test_open_file_limit_is_raised_for_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [1000, 2000]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(slice(None), new))
    make_room_for_connections(500)
    assert limits == [1000, 2000] and not caplog.text
    make_room_for_connections(1000)
    assert limits == [1000 + DESCRIPTORS_KEPT, 2000] and not caplog.text
    make_room_for_connections(3000)
    assert limits == [2000, 2000] and f"room for {2000 - DESCRIPTORS_KEPT} of 3000 connections" in caplog.text
    limits[:] = 64, 64
    make_room_for_connections(1024)
    assert (
        f"files, 64, leaves room for 1 of 1024 connections at once: raise it to {1024 + DESCRIPTORS_KEPT}"
        in caplog.text
    )


# -- bodies


def part_of_a_body(count: int, key: bytes = b"key-a") -> tuple[bytes, bytes]:
    fields = (b"content-type: application/json", b"authorization: Bearer " + key, b"content-length: %d" % MIB)
    return head(b"POST", "/v1/completions", *fields), b"z" * count


def test_bodies_count_together_and_by_tenant() -> None:
    limits = EdgeConfig(body_bytes_max=MIB, body_memory_bytes=2 * MIB, body_memory_per_client_bytes=MIB)
    keys = ["a=key-a", "b=key-b", "c=key-c"]
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(FakeEngine(says("x")), limits=limits, api_keys=keys))

        def send(key: bytes) -> socket.socket:
            connection = stack.enter_context(connect(world.url))
            connection.sendall(b"".join(part_of_a_body(900 * KIB, key)))
            return connection

        send(b"key-a")
        eventually(lambda: metric(world, "body_bytes") == 900 * KIB - SMALL_BODY_BYTES)
        again = until_closed(send(b"key-a"))
        assert b" 429 " in again and b"retry-after: 1" in again
        send(b"key-b")
        eventually(lambda: metric(world, "body_bytes") == 2 * (900 * KIB - SMALL_BODY_BYTES))
        other = until_closed(send(b"key-c"))
        assert b" 503 " in other and b"retry-after: 1" in other and error_of(other)["code"] == "overloaded"
        for key in ("key-a", "key-b", "key-c"):
            still_answers(world, key)  # small ones always pass
        stack.pop_all().close()
    assert world.server._edge.bodies.reserved_bytes == 0 and not world.server._edge.bodies._bytes_by_client


def test_body_bytes_are_counted_until_parsed() -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    with serve(engine) as world, connect(world.url) as connection:
        connection.sendall(post("/v1/completions", json.dumps({**ASK, "user": "u" * MIB}).encode()))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        assert world.server._edge.bodies.reserved_bytes == 0
        engine.step()
        assert Answers(connection).next()[0] == 200


# -- readers


def long_stream(**fields: object) -> bytes:
    body = {**ASK, "stream": True, "max_tokens": 240, "n": 8, "ignore_eos": True, "logprobs": 5, **fields}
    return post("/v1/completions", json.dumps(body).encode())


def step_until(world: World, engine: FakeEngine, ended: Callable[[], bool]) -> None:
    """Compute a token at a time, each as soon as the server has taken in the one before, or waits for its client."""
    hub = world.server._hub

    def took_it() -> bool:
        return not hub._mailbox and all(call.writing or not call._outputs for call in list(hub._calls.values()))

    for _ in range(240):
        if ended():
            return
        engine.step()
        eventually(lambda: ended() or took_it())
    raise AssertionError("it was computed to its end")


def test_stalled_reader_is_disconnected_and_request_cancelled() -> None:
    limits = EdgeConfig(write_timeout_s=0.3)
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=0.001)
    with serve(engine, limits=limits) as world, connect(world.url, receive_bytes=4 * KIB) as connection:
        connection.sendall(long_stream(n=64))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        still_answers(world)
        assert engine.wait_until(lambda: bool(engine.cancelled), 30)
        eventually(lambda: metric(world, "slow_readers_total", ending="cut_off") == 1)
        eventually(lambda: len(world.server.server_state.tasks) == 0)
        assert world.server._hub.pending_bytes == 0


def test_stream_to_a_slow_reader_ends_with_an_error() -> None:
    """The client reads again, and is told why its stream ended."""
    limits = EdgeConfig(stream_buffer_bytes=100 * KIB)
    engine = FakeEngine(lambda request, index: encode("hello ") * 240, step_s=None)
    with serve(engine, limits=limits) as world, connect(world.url, receive_bytes=4 * KIB) as connection:
        connection.sendall(long_stream(n=64))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        step_until(world, engine, lambda: bool(engine.cancelled))
        data = until(connection, b"[DONE]")
        assert b'"code":"client_too_slow"' in data
        assert world.server._hub.pending_bytes == 0
        assert metric(world, "slow_readers_total", ending="stream_ended") == 1


def test_all_streams_together_hold_back_no_more_than_a_few_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that holds back most is ended, though it holds back less than one stream may."""
    monkeypatch.setattr("memserve.api.openai.streams.STREAMS_TOGETHER", 0.1)
    limits = EdgeConfig(stream_buffer_bytes=MIB)
    engine = FakeEngine(lambda request, index: encode("hello ") * 240, step_s=None)
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(serve(engine, limits=limits))
        for _ in range(2):
            connection = stack.enter_context(connect(world.url, receive_bytes=4 * KIB))
            connection.sendall(long_stream(n=64))
        assert engine.wait_until(lambda: len(engine.submitted) == 2)
        step_until(world, engine, lambda: bool(engine.cancelled))


def test_stream_drops_logprobs_already_sent() -> None:
    engine = FakeEngine(lambda request, index: encode("hello"), step_s=None)
    with serve(engine) as world, connect(world.url) as connection:
        connection.sendall(long_stream(n=1))
        assert engine.wait_until(lambda: len(engine.submitted) == 1)
        data = b""
        for at in range(200):
            engine.step()
            while data.count(b"top_logprobs") <= at:
                data += connection.recv(65536)  # one event a token: none of them is a piece of a character
        said = set(encode("hello"))  # no other test says it
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is TokenLogprobs and one.top and one.token in said]
        assert len(alive) < 10
        engine.cancel(engine.submitted[0].request_id)
        assert b"[DONE]" in until(connection, b"[DONE]")


# -- what errors repeat

LONG = "q" * 5000


@pytest.mark.parametrize("path, body, fields", [
    ("/v1/" + LONG, b"{}", {}),
    ("/v1/models/" + LONG, None, {}),
    ("/v1/completions", json.dumps({**ASK, LONG: 1}).encode(), {}),
    ("/v1/completions", json.dumps({**ASK, "stream_options": {LONG: 1}}).encode(), {}),
    ("/v1/completions", json.dumps({**ASK, "model": LONG}).encode(), {}),
    ("/v1/completions", json.dumps({**ASK, "document": LONG}).encode(), {}),
    ("/v1/completions", json.dumps({**ASK, "logit_bias": {LONG: 1}}).encode(), {}),
    ("/v1/chat/completions", json.dumps({"model": MODEL, "messages": [{"role": LONG, "content": ""}]}).encode(), {}),
    ("/v1/chat/completions", json.dumps({"model": MODEL, "messages": [{"role": "user", LONG: ""}]}).encode(), {}),
    ("/v1/completions", json.dumps(ASK).encode(), {"content-encoding": LONG}),
    ("/v1/documents/" + LONG, json.dumps({"prompt": "x"}).encode(), {}),
])  # fmt: skip
def test_errors_repeat_little_of_what_they_are_about(
    world: World, path: str, body: bytes | None, fields: dict[str, str]
) -> None:
    headers = {"authorization": "Bearer key", "content-type": "application/json", **fields}
    method = "GET" if body is None else "PUT" if "documents" in path else "POST"
    response = httpx.request(method, world.url + path, content=body, headers=headers)
    assert 400 <= response.status_code < 500
    error = response.json()["error"]
    for text in (error["message"], error["param"] or ""):
        assert sum(map(len, re.findall("q{3,}", text))) <= 200, text


# -- request ids


@pytest.mark.parametrize("sent, status", [
    (head(b"GET", "/health", b"x-request-id: my-1"), 200), (head(b"GET", "/nothing", b"x-request-id: my-1"), 404),
    (head(b"PUT", "/health", b"x-request-id: my-1"), 405), (head(b"GET", "/v1/models", b"x-request-id: my-1"), 401),
    (head(b"POST", "/v1/completions", b"x-request-id: my-1", b"authorization: Bearer key", *CHUNKED) + b"zz\r\n", 400),
    (post("/v1/completions", json.dumps(ASK).encode(), b"x-request-id: my-1", b"authorization: Bearer key"), 200),
    (post("/v1/completions", json.dumps({**ASK, "stream": True}).encode(), b"x-request-id: my-1",
          b"authorization: Bearer key"), 200),
], ids=["200", "404", "405", "401", "a broken chunk", "completion", "stream"])  # fmt: skip
def test_client_request_id_is_kept(world: World, sent: bytes, status: int) -> None:
    with connect(world.url) as connection:
        connection.sendall(sent)
        got, headers, _ = Answers(connection).next(with_body=False)
    assert (got, headers["x-request-id"]) == (status, "my-1")


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"<script>", b"\xc3\xbc"])
def test_other_requests_get_an_id(world: World, given: bytes) -> None:
    with connect(world.url) as connection:
        connection.sendall(head(b"GET", "/health", b"x-request-id: " + given) + b"\x16")
        answers = Answers(connection)
        ids = [answers.next()[1]["x-request-id"] for _ in range(2)]  # the second answers bytes that are no request
    assert all(re.fullmatch("req-[0-9a-f]{32}", one) for one in ids) and ids[0] != ids[1]


# -- browsers


def preflight(world: World, origin: str) -> httpx.Response:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    return httpx.options(f"{world.url}/v1/chat/completions", headers={"origin": origin, **asks})


def test_pages_of_named_origins_may_use_the_api() -> None:
    limits = EdgeConfig(cors_origins=("https://chat.example.com", "http://localhost:3000"))
    with serve(FakeEngine(says("x")), limits=limits, api_keys=["key"]) as world:
        for origin in limits.cors_origins:
            answer = preflight(world, origin)
            assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == origin
            assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
            for path, status in (("/health", 200), ("/v1/models", 401), ("/nothing", 404)):
                answer = httpx.get(world.url + path, headers={"origin": origin})
                assert answer.status_code == status and answer.headers["access-control-allow-origin"] == origin
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
                assert answer.headers["vary"] == "origin"
        assert "access-control-allow-origin" not in preflight(world, "https://evil.example.com").headers


def test_any_origin_and_none() -> None:
    with serve(FakeEngine(says("x")), limits=EdgeConfig(cors_origins=("*",))) as world:
        assert preflight(world, "https://any.example.com").headers["access-control-allow-origin"] == "*"
    with serve(FakeEngine(says("x"))) as world:
        assert preflight(world, "https://any.example.com").status_code == 405


def test_preflight_echoes_header_names_only() -> None:
    with serve(FakeEngine(says("x")), limits=EdgeConfig(cors_origins=("*",))) as world:
        for fields in ("a" * 5000, "a;b", "<b>"):
            asks = {"access-control-request-method": "POST", "access-control-request-headers": fields}
            answer = httpx.options(f"{world.url}/v1/models", headers={"origin": "https://a.example.com", **asks})
            assert answer.headers["access-control-allow-headers"].startswith("authorization, content-type")


# -- the configuration


@pytest.mark.parametrize("fields", [
    {"connections_max": 0}, {"header_timeout_s": 0}, {"write_timeout_s": float("nan")}, {"stream_buffer_bytes": 0},
    {"body_memory_bytes": MIB}, {"body_memory_per_client_bytes": MIB}, {"connections_per_address_max": -1},
    {"cors_origins": ("https://a.example.com/path",)}, {"cors_origins": ("a.example.com",)}, {"cors_origins": ("",)},
])  # fmt: skip
def test_limits_that_make_no_sense_are_refused(fields: dict) -> None:
    with pytest.raises(UserError):
        EdgeConfig(**fields)


def test_body_memory_limit_follows_the_largest_body() -> None:
    limits = EdgeConfig(body_bytes_max=100 * MIB)
    assert (limits.body_total_bytes, limits.body_share_bytes) == (400 * MIB, 200 * MIB)
