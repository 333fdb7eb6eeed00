"""The picker's server: health, certificates, its end, several routers, and the routers of a cluster as endpoints."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asking_gateway import Asking, AskingGateway
from fleet_server import FleetProcess, fleet_server, spec_of
from memserve.api.http.tls import Tls
from memserve.cli.main import run
from memserve.fleet.gateway.server import LIVENESS, READINESS, SERVICE
from ports import free_port
from scripted_engine import MODEL, Asked, ScriptedEngine, scripted_engines, whole
from waiting import eventually

BODY = {"model": MODEL, "prompt": "hi"}
STATUS = health_pb2.HealthCheckResponse


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


def health_of(gateway: AskingGateway, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(gateway.channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status


def begun(gateway: AskingGateway) -> Asking:
    asking = gateway.begin()
    asking.send_head()
    asking.send_body(json.dumps(BODY).encode())
    assert asking.answer().endpoints
    return asking


def test_health_follows_the_engines(engines: list[ScriptedEngine]) -> None:
    async def ill(asked: Asked, writer: object) -> None:
        writer.write(whole(503, b""))

    with fleet_server([spec_of(engines[0])], picks=True) as server, AskingGateway(server.picker) as gateway:
        services = ("", READINESS, SERVICE)
        assert [health_of(gateway, service) for service in services] == [STATUS.SERVING] * 3
        watching = health_pb2_grpc.HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watching).status == STATUS.SERVING
        engines[0].health = ill
        assert next(watching).status == STATUS.NOT_SERVING
        assert [health_of(gateway, service) for service in services] == [STATUS.NOT_SERVING] * 3
        assert health_of(gateway, LIVENESS) == STATUS.SERVING
        engines[0].health = None
        assert next(watching).status == STATUS.SERVING
        watching.cancel()
        with pytest.raises(grpc.RpcError) as unknown:
            health_of(gateway, "nope")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_renewed_certificate_needs_no_restart(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authorities = [trustme.CA() for _ in range(2)]

    def issue(authority: trustme.CA) -> None:
        pair = authority.issue_cert("127.0.0.1")
        pair.private_key_pem.write_to_path(key)
        pair.cert_chain_pems[0].write_to_path(cert)

    issue(authorities[0])
    with fleet_server([spec_of(engine) for engine in engines], picks=True, tls=Tls(cert, key)) as server:
        with AskingGateway(server.picker, authorities[0].cert_pem.bytes()) as gateway:
            assert gateway.ask(BODY).endpoints
        issue(authorities[1])

        def renewed() -> bool:
            with AskingGateway(server.picker, authorities[1].cert_pem.bytes()) as gateway:
                try:
                    return bool(gateway.ask(BODY).endpoints)
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    return False

        eventually(renewed)


def test_requests_go_on_while_the_picker_drains(engines: list[ScriptedEngine]) -> None:
    port = free_port()
    with (
        AskingGateway(f"127.0.0.1:{port}") as gateway,
        FleetProcess(
            "--engine", f"vllm={engines[0].url}", "--endpoint-picker", f"127.0.0.1:{port}", "--drain-s", "20"
        ) as server,
    ):
        asking, late = begun(gateway), gateway.begin()
        server.process.send_signal(signal.SIGTERM)

        def is_refused() -> bool:
            try:
                return gateway.ask(BODY).status == 503
            except grpc.RpcError:
                return True

        eventually(is_refused)
        assert server.process.poll() is None
        asking.send_answer()
        assert asking.next().WhichOneof("response") == "response_headers"
        asking.send_answer_body(b"{}")
        assert asking.next().response_body.response.body_mutation.streamed_response.body == b"{}"
        asking.end()
        late.break_off()
        assert server.process.wait(15) == 0  # before the time for draining is over


def test_with_several_routers_the_first_one_picks(engines: list[ScriptedEngine]) -> None:
    port = free_port()
    flags = [word for engine in engines for word in ("--engine", f"vllm={engine.url}")]
    with (
        FleetProcess(*flags, "--routers", "2", "--endpoint-picker", f"127.0.0.1:{port}") as server,
        AskingGateway(f"127.0.0.1:{port}") as gateway,
    ):
        assert len(gateway.ask(BODY).endpoints) == 2
        assert server.post().status_code == 200


def test_names_of_engines_become_addresses(engines: list[ScriptedEngine]) -> None:
    port = free_port()
    url = engines[0].url.replace("127.0.0.1", "localhost")
    with (
        FleetProcess("--engine", f"vllm={url}", "--endpoint-picker", f"127.0.0.1:{port}"),
        AskingGateway(f"127.0.0.1:{port}") as gateway,
    ):
        assert gateway.ask(BODY).endpoints[0].removeprefix("[::1]").removeprefix("127.0.0.1") == f":{url[17:]}"


def test_a_port_in_use_is_said_before_anything_starts(
    engines: list[ScriptedEngine], capfd: pytest.CaptureFixture[str]
) -> None:
    port = engines[0].name.rpartition(":")[2]
    words = ["serve", "--engine", f"vllm={engines[1].url}", "--endpoint-picker", f"127.0.0.1:{port}"]
    assert run(words) == 1
    assert "choose another one with --endpoint-picker HOST:PORT" in capfd.readouterr().err
    assert run([*words[:-1], "9002"]) == 1
    assert "--endpoint-picker must be HOST:PORT" in capfd.readouterr().err


def test_a_picker_without_its_packages_says_so(
    engines: list[ScriptedEngine], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    words = ["serve", "--engine", f"vllm={engines[0].url}", "--endpoint-picker", f"127.0.0.1:{free_port()}"]
    assert run(words) == 1
    assert "pip install 'memserve[gateway]'" in capfd.readouterr().err


def test_a_fleet_of_memserve_routers_is_picked_from(engines: list[ScriptedEngine]) -> None:
    with (
        FleetProcess("--engine", f"vllm={engines[0].url}") as first,
        FleetProcess("--engine", f"vllm={engines[1].url}") as second,
    ):
        port = free_port()
        names = [server.url.removeprefix("http://") for server in (first, second)]
        flags = [word for name in names for word in ("--engine", f"memserve=http://{name}")]
        with (
            FleetProcess(*flags, "--endpoint-picker", f"127.0.0.1:{port}") as third,
            AskingGateway(f"127.0.0.1:{port}") as gateway,
        ):
            assert sorted(gateway.ask(BODY).endpoints) == sorted(names)
            assert third.post().status_code == 200  # relayed twice
            assert httpx.get(f"{third.url}/v1/models").json()["data"][0]["id"] == MODEL
