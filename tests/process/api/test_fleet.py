"""The router in front of scripted servers: bytes in and out, models, keys, health, draining, limits, metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fleet_server import FleetServer, fleet_server, spec_of
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission
from memserve.base.units import NS_PER_S
from memserve.cli.credentials import followed_key
from memserve.cli.main import run
from memserve.system import secrets as private_files
from scripted_engine import ANSWER, DONE, EVENTS, Asked, ScriptedEngine, scripted_engines, well, whole
from waiting import eventually

HELD = {"model": "scripted", "prompt": "held"}


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


class Gate:
    """Engines that answer when they are told to."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    async def script(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        while not self.is_open.is_set():
            await asyncio.sleep(0.005)
        await well(asked, writer)


def in_background(server: FleetServer, answers: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.post(prompt="held")))
    thread.start()
    return thread


def test_bytes_go_through_unchanged(engines: list[ScriptedEngine]) -> None:
    engine = engines[0]
    body = b'{ "model":"scripted",\n "prompt" : "\\u00e9", "unknown": [1.0e0], "stream":false}'
    headers = {"content-type": "application/json", "x-request-id": "mine-1", "authorization": "Bearer theirs"}
    with fleet_server([spec_of(engine)]) as server:
        response = httpx.post(f"{server.url}/v1/chat/completions?x=1", content=body, headers=headers)
        assert (response.status_code, response.content) == (200, ANSWER)
        assert response.headers["x-request-id"] == "mine-1"
        (asked,) = engine.asked
        assert (asked.body, asked.path) == (body, "/v1/chat/completions")
        assert asked.headers["x-request-id"] == "mine-1" and asked.headers["authorization"] == "Bearer theirs"
        assert server.post(stream=True).content == b"".join((*EVENTS, DONE))


def test_a_header_says_why_and_the_bytes_stay(engines: list[ScriptedEngine]) -> None:
    async def broken(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(500, "caf\u00e9".encode()))

    engines[0].script = broken
    with fleet_server([spec_of(engine) for engine in engines], ClusterConfig(policy="prompt-tree")) as server:
        body = {"model": "scripted", "prompt": [1, 2, 3], "stream": True}
        response = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-memserve-explain": "1"})
        told = json.loads(response.headers["x-memserve-explain"])
        assert response.content == b"".join((*EVENTS, DONE))
        assert (told["engine"], told["compared_by"]) == (engines[1].name, "tokens")
        assert (told["prompt_tokens"], told["matched_tokens"]) == (3, 0) and told["reason"]
        assert list(told["failed"]) == [engines[0].name] and "500" in told["failed"][engines[0].name]
        assert "x-memserve-explain" not in server.post().headers


def test_engines_join_and_leave(
    engines: list[ScriptedEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; the last request of the one that leaves ends there."""
    key_file = tmp_path / "key"
    key_file.write_text("c2VjcmV0=\n")
    key_file.chmod(0o600)
    gate = Gate()
    engines[0].script = gate.script
    answers: list[httpx.Response] = []
    with fleet_server([spec_of(engines[0])], engines_key="c2VjcmV0=") as server:
        flags = ["--engine-admin-key-file", str(key_file), "--router", f"{server.url}/v1"]

        def told(*words: str) -> str:
            assert run(["engine", *words, *flags]) == 0
            return capsys.readouterr().out

        waiting = in_background(server, answers)
        eventually(lambda: bool(engines[0].asked))
        assert told("join", f"vllm={engines[1].url}") == f"{engines[1].name} has joined\n"
        assert told("leave", engines[0].name) == f"{engines[0].name} leaves: 1 requests have not ended\n"
        assert server.post().status_code == 200 and engines[1].asked
        gate.is_open.set()
        waiting.join()
        assert answers[0].status_code == 200
        eventually(lambda: told("list").startswith(f"{engines[1].name}  vllm  up  0 requests"))
        assert run(["engine", "join", f"vllm={engines[1].url}", *flags]) == 1
        assert "has joined already" in capsys.readouterr().err
        assert run(["engine", "leave", "x:1", *flags]) == 1 and "is no engine here" in capsys.readouterr().err
        assert told("leave", engines[1].name) == f"{engines[1].name} has left\n"
        assert server.post().status_code == 503


def test_engines_are_fixed_without_a_key_for_them(engines: list[ScriptedEngine]) -> None:
    with fleet_server([spec_of(engines[0])]) as server:
        assert server.get("/engines").status_code == 403
    with fleet_server([], engines_key="secret") as server:
        body = {"engine": f"vllm={engines[1].url}"}
        assert httpx.post(f"{server.url}/engines", json=body).status_code == 401
        headers = {"authorization": "Bearer secret"}
        for wrong in (b"", b"[]", b'{"engine": 1}', b'{"engine": "vllm=x"}', b"x" * 5000):
            answer = httpx.post(f"{server.url}/engines", content=wrong, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "engine"
        assert server.post().status_code == server.get("/health").status_code == 503
        assert httpx.post(f"{server.url}/engines", json=body, headers=headers).json()["up"]
        assert server.post().status_code == 200


def test_keys_of_clients_are_no_keys_of_engines(engines: list[ScriptedEngine]) -> None:
    with fleet_server([spec_of(engines[0])], api_keys=["mine"], engine_key="theirs") as server:
        assert server.post().status_code == 401 and not engines[0].asked
        headers = {"authorization": "Bearer mine"}
        response = httpx.post(f"{server.url}/v1/completions", json=HELD, headers=headers)
        assert response.status_code == 200
        assert engines[0].asked[0].headers["authorization"] == "Bearer theirs"


def test_keys_in_files_change_while_it_serves(
    engines: list[ScriptedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which engines want, and that with which they join."""
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)
    theirs, joins = tmp_path / "theirs", tmp_path / "joins"
    for file in (theirs, joins):
        file.write_text("old\n")
        file.chmod(0o600)
    followed = followed_key(theirs), followed_key(joins)
    with fleet_server([spec_of(engines[0])], engine_key=followed[0], engines_key=followed[1]) as server:

        def listed(key: str) -> int:
            return httpx.get(f"{server.url}/engines", headers={"authorization": f"Bearer {key}"}).status_code

        assert server.post().status_code == 200 and (listed("old"), listed("new")) == (200, 401)
        theirs.write_text("newer\n")
        joins.write_text("new=er\n")
        assert server.post().status_code == 200 and (listed("old"), listed("new=er")) == (401, 200)
        assert [one.headers["authorization"] for one in engines[0].asked] == ["Bearer old", "Bearer newer"]
        joins.write_text("")
        assert (listed("x"), listed("new=er")) == (401, 200)


def test_each_model_has_its_engines(engines: list[ScriptedEngine]) -> None:
    engines[0].models, engines[1].models = ["a", "both"], ["b", "both"]
    with fleet_server([spec_of(engine) for engine in engines]) as server:
        assert {card["id"] for card in server.get("/v1/models").json()["data"]} == {"a", "b", "both"}
        assert server.get("/v1/models/a").status_code == 200 and server.get("/v1/models/c").status_code == 404
        for _ in range(3):
            assert server.post(model="b").status_code == 200
        assert (len(engines[0].asked), len(engines[1].asked)) == (0, 3)
        response = server.post(model="c")
        assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


def test_unhealthy_engine_gets_no_requests_until_healthy(engines: list[ScriptedEngine]) -> None:
    async def draining(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(503, b""))

    with fleet_server([spec_of(engine) for engine in engines]) as server:
        engines[0].health = draining
        eventually(lambda: server.get("/health").json()["engines"][engines[0].name] is False)
        for _ in range(4):
            assert server.post().status_code == 200
        assert (len(engines[0].asked), len(engines[1].asked)) == (0, 4)
        engines[1].health = draining
        eventually(lambda: server.get("/health").status_code == 503)
        response = server.post()
        assert response.status_code == 503 and response.headers["retry-after"] == "5"
        engines[0].health = None
        eventually(lambda: server.get("/health").status_code == 200)
        assert server.post().status_code == 200


def test_silent_engine_is_dropped(engines: list[ScriptedEngine]) -> None:
    """Its requests go elsewhere long before the longest silence."""

    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    config = ClusterConfig(policy="least-load", dead_after_ns=NS_PER_S)
    with fleet_server([spec_of(engine) for engine in engines], config) as server:
        engines[0].script = engines[0].health = silent
        response = server.post()
        assert (response.status_code, response.content) == (200, ANSWER) and engines[0].asked
        assert f'memserve_fleet_engine_up{{engine="{engines[0].name}"}} 0.0' in server.get("/metrics").text


def test_load_goes_to_the_idle_engine(engines: list[ScriptedEngine]) -> None:
    gate = Gate()
    for engine in engines:
        engine.script = gate.script
    answers: list[httpx.Response] = []
    with fleet_server([spec_of(engine) for engine in engines], ClusterConfig(policy="least-load")) as server:
        threads = [in_background(server, answers) for _ in range(4)]
        eventually(lambda: len(engines[0].asked) + len(engines[1].asked) == 4)
        assert len(engines[0].asked) == len(engines[1].asked) == 2
        gate.is_open.set()
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4


def test_engine_metrics_count_as_load(engines: list[ScriptedEngine]) -> None:
    engines[0].metrics = (
        b"# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0"} 9.0\nvllm:num_requests_waiting{engine="0"} 4.0\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
        b"process_start_time_seconds 1.7e9\nvllm:num_requests_running nonsense\n\xff\xfe\n"
    )
    engines[1].metrics = b'vllm:num_requests_running{engine="0"} 0.0\n'
    with fleet_server([spec_of(engine) for engine in engines], ClusterConfig(policy="least-load")) as server:
        (busy, idle) = server.host.machine.engine_views()
        report = busy.report
        assert (report.running, report.waiting, report.kv_usage, report.kv_tokens) == (9, 4, 0.5, 16_000)
        assert idle.report.running == 0
        assert server.post().status_code == 200 and len(engines[1].asked) == 1
        page = server.get("/metrics").text
        assert f'memserve_fleet_requests_total{{engine="{engines[1].name}"}} 1.0' in page
        assert f'memserve_fleet_engine_running{{engine="{engines[0].name}"}} 9.0' in page


def test_admission_queues_and_rejects(engines: list[ScriptedEngine]) -> None:
    gate = Gate()
    engines[0].script = gate.script
    admission = AdmissionConfig(mode=Admission.BOUNDED, active_max=1, waiting_max=1)
    answers: list[httpx.Response] = []
    with fleet_server([spec_of(engines[0])], ClusterConfig(admission=admission)) as server:
        threads = [in_background(server, answers)]
        eventually(lambda: len(engines[0].asked) == 1)
        threads.append(in_background(server, answers))
        eventually(
            lambda: "memserve_admission_active 1.0" in server.get("/metrics").text and server.host.requests_open == 2
        )
        response = server.post()
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert len(engines[0].asked) == 1
        gate.is_open.set()
        for thread in threads:
            thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]


def test_client_disconnect_frees_the_engine(engines: list[ScriptedEngine]) -> None:
    engines[0].script = Gate().script
    with fleet_server([spec_of(engines[0])]) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=HELD, timeout=0.2)
        eventually(lambda: server.host.requests_open == 0)


def test_shutdown_lets_requests_finish(engines: list[ScriptedEngine]) -> None:
    gate = Gate()
    engines[0].script = gate.script
    answers: list[httpx.Response] = []
    with fleet_server([spec_of(engines[0])]) as server:
        thread = in_background(server, answers)
        eventually(lambda: len(engines[0].asked) == 1)
        server.server.should_exit = True
        gate.is_open.set()
        thread.join()
    assert answers[0].status_code == 200


def test_conversation_stays_at_its_engine(engines: list[ScriptedEngine]) -> None:
    """Without KV events, by the text of what was sent there."""
    config = ClusterConfig(policy="prompt-tree")
    with fleet_server([spec_of(engine) for engine in engines], config) as server:
        chats = [[{"role": "user", "content": f"chat {chat}: " + "word " * 100}] for chat in range(4)]
        for _ in range(3):
            for messages in chats:
                assert server.post("/v1/chat/completions", prompt=None, messages=messages).status_code == 200
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and " * 50}]
        places: dict[str, set[str]] = {}
        for engine in engines:
            for asked in engine.asked:
                opening = asked.fields["messages"][0]["content"][:7]
                places.setdefault(opening, set()).add(engine.name)
        assert len(places) == 4 and all(len(place) == 1 for place in places.values())
        assert sum(view.matched_tokens for view in server.host.machine.engine_views()) > 0
