"""The endpoint picker over a real socket: what a gateway is told, what it is refused, and what is learned from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from asking_gateway import NONE, PASSING, PIECES, WHOLE, Asking, AskingGateway, pieces
from fleet_server import FleetServer, fleet_server, spec_of
from memserve.api.http.config import EdgeConfig
from memserve.api.http.limits import Edge
from memserve.api.http.middleware import KeyRing
from memserve.api.metrics.http import ApiMetrics
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission
from memserve.base.units import MIB, NS_PER_S
from memserve.fleet.gateway.picker import Picker
from memserve.fleet.messages import EngineView, read_engine
from scripted_engine import MODEL, ScriptedEngine, scripted_engines, whole
from waiting import eventually

BODY = {"model": MODEL, "prompt": "The history of the lighthouse. " * 40, "max_tokens": 4}


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(3) as started:
        yield started


def picking(engines: list[ScriptedEngine], **options: Any) -> Any:
    """A router before ``engines`` that gateways ask."""
    config = options.pop("config", ClusterConfig(policy="prompt-tree"))
    return fleet_server([spec_of(engine) for engine in engines], config, picks=True, **options)


def views_of(server: FleetServer) -> dict[str, EngineView]:
    return {view.name: view for view in server.host.machine.engine_views()}


def begun(gateway: AskingGateway, modes: tuple[int, int] = (PIECES, PIECES)) -> tuple[Asking, list[str]]:
    """A request that has its endpoints."""
    asking = gateway.begin(modes)
    asking.send_head()
    if modes[0] == WHOLE:
        asking.next()
    asking.send_body(json.dumps(BODY).encode())
    return asking, asking.answer().endpoints


def one_behind_another(gateway: AskingGateway, server: FleetServer) -> tuple[Asking, Asking]:
    """A request that an engine runs, and one that waits for its place."""
    first, _ = begun(gateway)
    waiting = gateway.begin()
    waiting.send_head()
    waiting.send_body(json.dumps(BODY).encode())
    eventually(lambda: server.host.machine.admission_stats().waiting == {"": 1})
    return first, waiting


@pytest.mark.parametrize("modes", [(PIECES, PIECES), (WHOLE, NONE), None])
def test_endpoints_come_in_the_order_of_the_machine(engines: list[ScriptedEngine], modes: Any) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        answer = gateway.ask(BODY, modes)
        assert sorted(answer.endpoints) == sorted(engine.name for engine in engines)
        assert answer.metadata == answer.headers["x-gateway-destination-endpoint"]
        assert answer.body == (b"" if modes == (WHOLE, NONE) else json.dumps(BODY).encode())
        again = gateway.ask({**BODY, "prompt": BODY["prompt"] + "And more."}, modes)
        assert again.endpoints[0] == answer.endpoints[0]  # where the prefix is
        assert not any(engine.asked for engine in engines)  # the gateway asks, the router does not


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/responses", lambda text: {"input": text}),
        ("/v1/messages", lambda text: {"system": text[:600], "messages": [{"role": "user", "content": text[600:]}]}),
        ("/v1/embeddings", lambda text: {"input": [text]}),
    ],
)
def test_prefixes_of_other_interfaces_are_followed(engines: list[ScriptedEngine], path: str, prompt: Any) -> None:
    text = "The history of the lighthouse. " * 40
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        names = [
            gateway.ask({"model": MODEL, **prompt(text + "x" * turn)}, path=path).endpoints[0] for turn in range(5)
        ]
        assert len(set(names)) == 1
        assert views_of(server)[names[0]].matched_tokens > 1000


def test_a_long_body_comes_and_goes_in_pieces(engines: list[ScriptedEngine]) -> None:
    body = json.dumps({**BODY, "prompt": "x" * 300_000}).encode()
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_head()
        for piece, is_last in pieces(body, 50_000):
            asking.send_body(piece, ends=is_last)
        answer = asking.answer()
        assert answer.body == body and len(answer.endpoints) == 3
        asking.end()


def test_trailers_behind_a_body_end_it(engines: list[ScriptedEngine]) -> None:
    body = json.dumps(BODY).encode()
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_head()
        asking.send_body(body, ends=False)
        asking.send_trailers("request")
        answer = asking.answer()
        assert answer.body == body and answer.endpoints
        asking.end()


def test_the_subset_of_the_gateway_holds(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        for engine in engines:
            assert gateway.ask(BODY, subset=[engine.name, "10.9.9.9:1"]).endpoints == [engine.name]
        answer = gateway.ask(BODY, subset=["10.9.9.9:1"])
        assert (answer.status, answer.endpoints) == (503, [])
        assert gateway.ask(BODY, subset=[]).status == 503


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "nope", "prompt": "x"}, 404, "model_not_found"),
        ([1, 2], 400, None),
        ({**BODY, "prompt": "x" * 1_100_000}, 413, "request_too_large"),
    ],
)
def test_a_wrong_request_is_refused_as_by_the_api(
    engines: list[ScriptedEngine], fields: Any, status: int, code: str | None
) -> None:
    limits = EdgeConfig(body_bytes_max=MIB)
    with picking(engines, limits=limits) as server, AskingGateway(server.picker) as gateway:
        answer = gateway.ask(fields)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"
        api = server.post(**fields).status_code if isinstance(fields, dict) else 400
        assert api == status
        assert f'memserve_picks_total{{status="{status}"}} 1.0' in server.get("/metrics").text


def test_without_an_engine_the_gateway_says_503(engines: list[ScriptedEngine]) -> None:
    async def ill(asked: Any, writer: Any) -> None:
        writer.write(whole(503, b""))

    for engine in engines:
        engine.health = ill
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        answer = gateway.ask(BODY)
        assert (answer.status, answer.error["code"]) == (503, "no_engine") and answer.headers["retry-after"] == "5"


def test_admission_queues_and_refuses_with_429(engines: list[ScriptedEngine]) -> None:
    admission = AdmissionConfig(mode=Admission.BOUNDED, active_max=1, waiting_max=1)
    with (
        picking(engines, config=ClusterConfig(admission=admission)) as server,
        AskingGateway(server.picker) as gateway,
    ):
        first, waiting = one_behind_another(gateway, server)
        answer = gateway.ask(BODY)
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded") and answer.headers["retry-after"]
        first.end()
        assert waiting.answer().endpoints  # its turn has come
        waiting.end()


@pytest.mark.parametrize("how", ["end", "break_off"])
def test_a_gateway_that_gives_up_leaves_the_queue(engines: list[ScriptedEngine], how: str) -> None:
    admission = AdmissionConfig(mode=Admission.BOUNDED, active_max=1, waiting_max=1)
    with (
        picking(engines, config=ClusterConfig(admission=admission)) as server,
        AskingGateway(server.picker) as gateway,
    ):
        first, waiting = one_behind_another(gateway, server)
        getattr(waiting, how)()
        eventually(lambda: server.host.machine.admission_stats().waiting == {})
        first.end()
        eventually(lambda: not any(view.requests_open for view in views_of(server).values()))  # nor has it an engine


def test_the_engine_is_busy_until_the_answer_ends(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking, (name, *_) = begun(gateway)
        assert views_of(server)[name].requests_open == 1
        asking.send_answer()
        assert asking.next().WhichOneof("response") == "response_headers"
        asking.send_answer_body(b"data: {}\n\n", ends=False)
        streamed = asking.next().response_body.response.body_mutation.streamed_response
        assert (streamed.body, streamed.end_of_stream) == (b"data: {}\n\n", False)
        assert views_of(server)[name].requests_open == 1
        asking.send_answer_body(b"data: [DONE]\n\n")
        assert asking.next().response_body.response.body_mutation.streamed_response.end_of_stream
        eventually(lambda: views_of(server)[name].requests_open == 0)  # before the stream is closed
        assert not asking.end() and views_of(server)[name].failed == 0


def test_a_broken_stream_frees_the_engine(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking, (name, *_) = begun(gateway)
        asking.break_off()
        eventually(lambda: views_of(server)[name].requests_open == 0)
        assert views_of(server)[name].failed == 0  # its client may have left


@pytest.mark.parametrize(("status", "failed"), [(200, 0), (400, 0), (422, 0), (404, 1), (429, 1), (500, 1), (503, 1)])
def test_a_failed_answer_counts_against_its_engine(engines: list[ScriptedEngine], status: int, failed: int) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking, (name, *_) = begun(gateway, (WHOLE, NONE))
        asking.send_answer(status, ends=True)
        asking.next()
        asking.end()
        view = views_of(server)[name]
        assert (view.requests, view.requests_open, view.failed) == (1, 0, failed)


def test_a_fallback_that_answers_is_charged(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking, (first, second, _) = begun(gateway)
        asking.send_answer(served=second)
        asking.next()
        views = views_of(server)
        assert (views[first].failed, views[first].requests_open) == (1, 0)
        assert (views[second].failed, views[second].requests_open, views[second].requests) == (0, 1, 1)
        asking.end()
        assert gateway.ask(BODY).endpoints[0] in (first, second)


def test_an_engine_that_streams_is_alive(engines: list[ScriptedEngine]) -> None:
    """Its health does not answer in time: it computes."""
    polls = 0

    async def busy(asked: Any, writer: Any) -> None:
        nonlocal polls
        polls += 1
        await asyncio.sleep(20)

    config = ClusterConfig(policy="prompt-tree", dead_after_ns=2 * NS_PER_S)
    with picking(engines, config=config) as server, AskingGateway(server.picker) as gateway:
        asking, (name, *_) = begun(gateway)
        asking.send_answer()
        asking.next()
        for engine in engines:
            engine.health = busy

        def streams_on() -> bool:
            asking.send_answer_body(b"data: {}\n\n", ends=False)
            asking.next()
            return polls >= 6 and not any(view.up for other, view in views_of(server).items() if other != name)

        eventually(streams_on)
        assert views_of(server)[name].up
        asking.end()


def test_a_request_without_a_body_may_go_anywhere(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_head("GET", "/v1/models", ends=True)
        assert len(asking.choice().endpoints) == 3
        asking.end()
        for mode in (NONE, PASSING):  # the headers go on before the body is seen
            asking = gateway.begin((mode, NONE))
            asking.send_head()
            assert len(asking.choice().endpoints) == 3
            if mode == PASSING:
                asking.send_body(b"{}")
                assert asking.next().WhichOneof("response") == "request_body"
            asking.end()


def test_other_bodies_than_json_are_not_read(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_head(path="/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
        asking.send_body(b"--x\r\n\x00")
        answer = asking.answer()
        assert answer.body == b"--x\r\n\x00" and len(answer.endpoints) == 3
        asking.end()


def test_keys_of_the_router_are_checked_and_not_sent(engines: list[ScriptedEngine]) -> None:
    with (
        picking(engines, api_keys=("ada=secret",)) as server,
        AskingGateway(server.picker) as gateway,
    ):
        assert gateway.ask(BODY).status == 401
        assert gateway.ask(BODY, authorization="Bearer wrong").status == 401
        answer = gateway.ask(BODY, authorization="Bearer secret")
        assert answer.endpoints and answer.removed == ["authorization"]


def test_what_engines_store_is_no_tenants(engines: list[ScriptedEngine]) -> None:
    body = {"model": MODEL, "input": "x" * 400}
    for keys, status in ((("ada=secret",), 400), ((), 200)):
        key = "Bearer secret"
        with picking(engines, api_keys=keys) as server, AskingGateway(server.picker) as gateway:
            for fields, expected in ((body, 200), ({**body, "previous_response_id": "resp_1"}, status)):
                asking = gateway.begin()
                asking.send_head(path="/v1/responses?x=1", authorization=key)
                asking.send_body(json.dumps(fields).encode())
                answer = asking.answer()
                assert (answer.status, len(answer.endpoints)) == (expected, 3 if expected == 200 else 0)
                asking.end()
            asking = gateway.begin()
            asking.send_head("GET", "/v1/responses/resp_1", ends=True, authorization=key)
            message = asking.next()
            assert (message.WhichOneof("response") == "immediate_response") == bool(keys)
            assert not keys or message.immediate_response.status.code == 404
            asking.end()


def test_an_engine_of_a_pair_makes_no_picker_ready(engines: list[ScriptedEngine]) -> None:
    roles = ("prefill", "decode")
    specs = [read_engine(f"sglang={engine.url},role={role}") for engine, role in zip(engines, roles, strict=False)]
    with fleet_server(specs, picks=True) as server, AskingGateway(server.picker) as gateway:
        answer = gateway.ask(BODY)
        assert answer.status == 503 and "in a pair alone" in answer.error["message"]
        assert not Picker(server.host, Edge(EdgeConfig(), ApiMetrics()), KeyRing(), 1.0).is_ready


def test_engines_get_their_own_key(engines: list[ScriptedEngine]) -> None:
    with picking(engines, engine_key="theirs") as server, AskingGateway(server.picker) as gateway:
        answer = gateway.ask(BODY, authorization="Bearer of-a-client")
        assert answer.headers["authorization"] == "Bearer theirs"


def test_an_answer_says_why_its_engine_was_chosen(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_head(x_memserve_explain="1")
        asking.send_body(json.dumps(BODY).encode())
        name = asking.answer().endpoints[0]
        asking.send_answer()
        (option,) = asking.next().response_headers.response.header_mutation.set_headers
        assert option.header.key == "x-memserve-explain"
        assert json.loads(option.header.raw_value)["engine"] == name
        asking.end()


def test_a_stream_in_the_wrong_order_is_refused(engines: list[ScriptedEngine]) -> None:
    with picking(engines) as server, AskingGateway(server.picker) as gateway:
        asking = gateway.begin()
        asking.send_body(b"{}")
        assert asking.answer().status == 400
        asking.end()
        asking = gateway.begin()
        asking.send_head()
        asking.send_answer()
        assert asking.answer().status == 400
        asking.end()
        asking, _ = begun(gateway)
        asking.send_head()
        assert asking.answer().status == 400
        asking.end()


def test_a_body_that_never_comes_is_waited_for_in_vain(engines: list[ScriptedEngine]) -> None:
    with (
        picking(engines, limits=EdgeConfig(body_timeout_s=0.2)) as server,
        AskingGateway(server.picker) as gateway,
    ):
        asking = gateway.begin()
        asking.send_head()
        assert asking.answer().status == 408
        asking.end()


def test_more_streams_than_connections_are_refused(engines: list[ScriptedEngine]) -> None:
    with (
        picking(engines, limits=EdgeConfig(connections_max=2)) as server,
        AskingGateway(server.picker) as gateway,
    ):
        askings = [begun(gateway)[0] for _ in range(2)]
        with pytest.raises(grpc.RpcError) as refused:
            begun(gateway)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for asking in askings:
            asking.end()
