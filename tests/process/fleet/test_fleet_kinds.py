"""Servers of other kinds behind the router, scripted: llama.cpp's, any of OpenAI's interface; what each is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import pytest

from fleet_server import fleet_server
from memserve.base.errors import UserError
from memserve.fleet.engine_client import busy_slots, context_of, slot_context, slot_tokens
from memserve.fleet.messages import EngineKind, read_engine
from scripted_engine import ANSWER, DONE, EVENTS, STREAM_HEAD, Asked, ScriptedEngine, chunk, scripted_engines, whole
from waiting import eventually

NOT_SHOWN = 501, b'{"error":{"code":501,"message":"This server does not support metrics endpoint."}}'
PROPS = 200, json.dumps({"total_slots": 4, "default_generation_settings": {"n_ctx": 1024, "params": {}}}).encode()
METRICS = b"""# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio 0.25
"""


def slots(*busy: bool) -> tuple[int, bytes]:
    """As llama.cpp shows its slots."""
    states = [{"id": number, "n_ctx": 1024, "is_processing": is_busy} for number, is_busy in enumerate(busy)]
    return 200, json.dumps(states).encode()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with scripted_engines(1) as (started,):
        yield started


def test_load_of_llamacpp_is_read_from_its_metrics(engine: ScriptedEngine) -> None:
    engine.metrics, engine.pages["/props"] = METRICS, PROPS
    with fleet_server([read_engine(f"llamacpp={engine.url}")]) as server:
        report = server.host.machine.engine_views()[0].report
        assert (report.running, report.waiting, report.kv_usage, report.kv_tokens) == (3, 2, 0.25, 4096)
        assert server.post().content == ANSWER
        assert server.post(stream=True).content == b"".join((*EVENTS, DONE))
        assert engine.seen == {"/health", "/v1/models", "/metrics", "/props", "/v1/completions"}
        assert f'memserve_fleet_engine_running{{engine="{engine.name}"}} 3.0' in server.get("/metrics").text


def test_load_of_llamacpp_without_metrics_is_its_slots(engine: ScriptedEngine) -> None:
    engine.pages |= {"/metrics": NOT_SHOWN, "/slots": slots(True, False, True, False), "/props": PROPS}
    with fleet_server([read_engine(f"llamacpp={engine.url}")]) as server:
        report = server.host.machine.engine_views()[0].report
        assert (report.running, report.waiting, report.kv_tokens) == (2, 0, 4096)


def test_llamacpp_that_shows_nothing_still_answers(engine: ScriptedEngine) -> None:
    engine.pages |= dict.fromkeys(("/metrics", "/slots", "/props"), NOT_SHOWN)
    with fleet_server([read_engine(f"llamacpp={engine.url}")]) as server:
        assert server.post().content == ANSWER
        assert server.host.machine.engine_views()[0].report.running is None


def test_llamacpp_that_loads_gets_nothing(engine: ScriptedEngine) -> None:
    """It says 503 to all while it loads its model."""
    engine.pages["/health"] = 503, b'{"error":{"code":503,"message":"Loading model"}}'
    with fleet_server([read_engine(f"llamacpp={engine.url}")]) as server:
        assert server.post().status_code == 503
        del engine.pages["/health"]
        eventually(lambda: server.host.machine.engine_views()[0].up)
        assert server.post().content == ANSWER


def test_llamacpp_begins_some_streams_with_null(engine: ScriptedEngine) -> None:
    """Those for several prompts (bench/fleet_llamacpp.py)."""
    events = [b"data: null\n\n", *EVENTS, DONE]

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n")

    engine.script = script
    with fleet_server([read_engine(f"llamacpp={engine.url}")]) as server:
        assert server.post(prompt=["a", "b"], stream=True).content == b"".join(events)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"a": 1}', b'[{"is_processing": 3}]', b"[" * 100_000])
def test_odd_slots_are_no_slots(body: bytes) -> None:
    assert busy_slots(body) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"total_slots": "x"}', b'{"total_slots": -3}', b"[" * 100_000])
def test_odd_props_say_nothing(body: bytes) -> None:
    assert slot_tokens(body) == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"data": [{"id": "y", "max_model_len": 9}]}', b'{"data": [{"id": "x", "max_model_len": true}]}'],
)
def test_odd_pages_say_no_context(body: bytes) -> None:
    assert context_of(body, "x") == slot_context(body) == 0
    assert context_of(b'{"data": [{"id": "y", "max_model_len": "?"}, {"id": "x", "max_model_len": 9}]}', "x") == 9
    assert slot_context(b'{"total_slots": 2, "default_generation_settings": {"n_ctx": 8}}') == 8


def test_of_an_openai_server_only_models_are_asked(engine: ScriptedEngine) -> None:
    """It may have no other page, and pages of these names may mean anything there."""
    engine.pages |= dict.fromkeys(("/health", "/metrics", "/tokenize"), (404, b"{}"))
    with fleet_server([read_engine(f"openai={engine.url}")]) as server:
        assert server.post().content == ANSWER
        looks = engine.looks
        eventually(lambda: engine.looks > looks)
        assert engine.seen == {"/v1/models", "/v1/completions"}


def test_an_openai_server_without_models_gets_nothing(engine: ScriptedEngine) -> None:
    engine.pages["/v1/models"] = 401, b'{"error":{"message":"a key, please"}}'
    with fleet_server([read_engine(f"openai={engine.url}")]) as server:
        assert server.post().status_code == 503
        assert not server.host.machine.engine_views()[0].up


@pytest.mark.parametrize("base", ["/api", "/api/v1", "/v1", "/api/"])
def test_a_base_stands_before_each_path(engine: ScriptedEngine, base: str) -> None:
    """With the /v1 that OpenAI's clients count to it, or without."""
    before = base.rstrip("/").removesuffix("/v1")

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(200, ANSWER))

    engine.script = script
    engine.pages[f"{before}/v1/models"] = 200, b'{"data":[{"id":"scripted"}]}'
    with fleet_server([read_engine(f"openai={engine.url}{base}")], engines_key="key") as server:
        assert server.post("/v1/chat/completions").content == ANSWER
        assert engine.seen == {f"{before}/v1/models", f"{before}/v1/chat/completions"}
        headers = {"authorization": "Bearer key"}
        (card,) = httpx.get(f"{server.url}/engines", headers=headers).json()["engines"]
        assert card["name"] == f"{engine.name}{before}"
        assert httpx.delete(f"{server.url}/engines/{card['name']}", headers=headers).status_code == 200
        assert server.host.specs == {}


def test_the_key_of_engines_goes_to_each_kind(engine: ScriptedEngine) -> None:
    with fleet_server([read_engine(f"openai={engine.url}")], engine_key="theirs", api_keys=["ours"]) as server:
        httpx.post(
            f"{server.url}/v1/completions", json={"model": "scripted", "prompt": "x"},
            headers={"authorization": "Bearer ours"},
        )  # fmt: skip
        assert [asked.headers["authorization"] for asked in engine.asked] == ["Bearer theirs"]


@pytest.mark.parametrize(
    ("text", "kind", "url"),
    [
        ("llamacpp=http://a:1", EngineKind.LLAMACPP, "http://a:1"),
        ("openai=https://a.b:443/x/v1/", EngineKind.OPENAI, "https://a.b:443/x"),
        ("openai=http://a:1/", EngineKind.OPENAI, "http://a:1"),
        ("memserve=https://a:1/x/v1", EngineKind.MEMSERVE, "https://a:1/x"),
    ],
)
def test_engines_of_other_kinds_are_read(text: str, kind: EngineKind, url: str) -> None:
    spec = read_engine(text)
    assert (spec.kind, spec.url) == (kind, url) and read_engine(spec.text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "openai=http://a:1,events=tcp://a:2", "llamacpp=http://a:1,role=prefill", "openai=http://a:1,format=vllm",
        "memserve=http://a:1,model=x", "vllm=http://a:1/base", "openai=http://a",
        "openai=http://a:1/b?c", "openai=http://u:p@a:1", "other=http://a:1",
    ],
)  # fmt: skip
def test_parts_that_a_kind_has_not_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        read_engine(text)
