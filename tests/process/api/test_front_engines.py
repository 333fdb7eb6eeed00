"""Own models and engines of other projects behind one HTTP front: which answers, and what is said of all."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from fleet_server import spec_of
from front_world import QUESTION, Front, running_front
from memserve.api.http.config import ApiConfig, EdgeConfig
from memserve.base.units import MIB
from memserve.cli.doctor_cluster import examine_cluster
from memserve.cli.main import run
from memserve.cli.output import Status
from scripted_engine import ANSWER, DONE, EVENTS, Asked, ScriptedEngine, scripted_engines, well
from waiting import eventually

OPERATOR = {"authorization": "Bearer engines-key"}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[ScriptedEngine]]:
    """Two that have the model ``scripted``; the second one ``TWO`` as well, as an own model is called, and ``org/one``,
    which is what an own model knows and does not list."""
    with scripted_engines(2) as started:
        started[1].models += ["TWO", "org/one"]
        yield started


@pytest.fixture(scope="module")
def front(engines: list[ScriptedEngine]) -> Iterator[Front]:
    with running_front(specs=[spec_of(engine) for engine in engines], engines_key="engines-key") as front:
        yield front


@pytest.fixture(autouse=True)
def clean(engines: list[ScriptedEngine]) -> None:
    for engine in engines:
        engine.asked.clear()
        engine.script = well


def asked_of(engines: list[ScriptedEngine]) -> list[Asked]:
    return [asked for engine in engines for asked in engine.asked]


def test_bytes_of_an_engines_model_go_through(front: Front, engines: list[ScriptedEngine]) -> None:
    body = b'{ "model":"scripted",\n "prompt" : "\\u00e9", "unknown": [1.0e0], "stream":false}'
    headers = {"content-type": "application/json", "x-request-id": "mine-1", "authorization": "Bearer theirs"}
    answer = httpx.post(f"{front.url}/v1/chat/completions?x=1", content=body, headers=headers)
    assert (answer.status_code, answer.content, answer.headers["x-request-id"]) == (200, ANSWER, "mine-1")
    (asked,) = asked_of(engines)
    assert (asked.body, asked.path, asked.headers["authorization"]) == (body, "/v1/chat/completions", "Bearer theirs")
    stream = front.post("/v1/completions", {"model": "scripted", "prompt": "x", "stream": True})
    assert stream.content == b"".join((*EVENTS, DONE))


def test_the_address_may_name_an_engines_model(front: Front, engines: list[ScriptedEngine]) -> None:
    assert front.post("/v1/completions?model=scripted", {"model": "scripted", "prompt": "x"}).content == ANSWER
    assert front.get("/ui/snapshot?model=scripted").json()["model"] == "scripted"


def test_own_models_answer_as_before(front: Front, engines: list[ScriptedEngine]) -> None:
    assert [front.ask(model=name) for name in ("one", "two", "org/two")] == ["I am the first", *["I am the second"] * 2]
    assert front.ask() == "I am the first" and not asked_of(engines)


def test_an_own_name_wins_and_that_is_said_once(
    engines: list[ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), running_front(specs=[spec_of(engine) for engine in engines]) as front:
        assert front.ask(model="TWO") == "I am the second" and not asked_of(engines)
        looks = engines[1].looks
        eventually(lambda: engines[1].looks > looks + 1)
    lines = [record.getMessage() for record in caplog.records if "has a model" in record.getMessage()]
    assert len(lines) == 1 and "TWO" in lines[0] and "two" in lines[0] and engines[1].name in lines[0]


def test_a_listed_name_is_found_before_an_alias(front: Front, engines: list[ScriptedEngine]) -> None:
    assert front.post("/v1/completions", {"model": "org/one", "prompt": "x"}).content == ANSWER
    assert [asked.fields["model"] for asked in engines[1].asked] == ["org/one"]


def test_lists_errors_health_and_load_are_of_all(front: Front, engines: list[ScriptedEngine]) -> None:
    ids = [card["id"] for card in front.get("/v1/models").json()["data"]]
    assert ids == ["one", "two", "scripted", "org/one"]
    assert [front.get(f"/v1/models/{name}").json()["id"] for name in ids] == ids
    for answer in (front.get("/v1/models/three"), front.post("/v1/completions", {"model": "three", "prompt": "x"})):
        assert answer.status_code == 404
        assert "`one, two, scripted, org/one`" in answer.json()["error"]["message"]
    health = front.get("/health").json()
    assert health["models"] == dict.fromkeys(ids, "ok")
    assert health["engines"] == {engine.name: True for engine in engines}
    assert front.get("/load").json() == {"server_load": 0}


def test_metrics_have_no_family_twice(front: Front, engines: list[ScriptedEngine]) -> None:
    front.ask(model="one")
    front.post("/v1/completions", {"model": "scripted", "prompt": "x"})
    lines = front.get("/metrics").text.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert f'memserve_fleet_engine_up{{engine="{engines[0].name}"}}' in series
    assert 'memserve_http_requests_total{model="one",route="/v1/chat/completions",status="200"}' in series
    assert 'memserve_http_requests_total{route="/v1/completions",status="200"}' in series, "of engines: without model"


def test_the_dashboard_shows_both(front: Front) -> None:
    names = ["one", "two", "scripted", "org/one"]
    assert [front.get(f"/ui/snapshot?model={name}").json()["models"] for name in ("one", "scripted")] == [names] * 2
    assert front.get("/ui").status_code == 200
    front.post("/v1/completions", {"model": "scripted", "prompt": "x"}, headers={"x-request-id": "of-engine"})
    front.post("/v1/completions", {"model": "two", "prompt": "x"}, headers={"x-request-id": "of-two"})
    assert front.get("/ui/requests/of-engine").json()["instances"][0].startswith("127.0.0.1:")
    assert front.get("/ui/requests/of-two").status_code == 200
    assert front.get("/ui/requests/none").status_code == 404


def test_engines_join_and_leave_beside_models(front: Front) -> None:
    assert front.get("/engines").status_code == 401
    with scripted_engines(1) as (third,):
        third.models = ["third"]
        body = {"engine": f"vllm={third.url}"}
        assert front.post("/engines", body, headers=OPERATOR).json()["up"] is True
        assert front.post("/v1/completions", {"model": "third", "prompt": "x"}).content == ANSWER
        assert len(front.get("/engines", headers=OPERATOR).json()["engines"]) == 3
        left = httpx.delete(f"{front.url}/engines/{third.name}", headers=OPERATOR)
        assert left.json() == {"name": third.name, "requests_open": 0}
    assert front.post("/v1/completions", {"model": "third", "prompt": "x"}).status_code == 404


def test_an_id_is_looked_for_at_all(front: Front) -> None:
    response = front.post("/v1/responses", {"model": "two", "input": "hello"}).json()
    assert front.get(f"/v1/responses/{response['id']}").json()["model"] == "two"
    assert front.get("/v1/responses/none").json()["error"]["code"] == "response_not_found"
    assert front.get("/v1/documents/none").json()["error"]["code"] == "document_not_found"


def test_keys_and_bodies_have_the_servers_limits(engines: list[ScriptedEngine]) -> None:
    keys = {"api_keys": ["team=secret"], "metrics_keys": ["op=page"]}
    with running_front(specs=[spec_of(engines[0])], limits=EdgeConfig(body_bytes_max=MIB), **keys) as front:
        body, key = {"model": "scripted", "prompt": "x"}, {"authorization": "Bearer secret"}
        assert front.post("/v1/completions", body).status_code == 401
        assert front.post("/v1/completions", body, headers=key).content == ANSWER
        (asked,) = asked_of(engines)
        assert "authorization" not in asked.headers, "it is the server's key"
        assert front.post("/v1/completions", body | {"prompt": "x" * 2 * MIB}, headers=key).status_code == 413
        assert front.get("/metrics").status_code == 401
        assert front.post("/engines", {"engine": "vllm=http://a:1"}, headers=key).status_code == 403


def test_a_batch_asks_an_engine_as_well(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    with running_front(tmp_path, specs=[spec_of(engines[0])]) as front:
        bodies = {name: {"model": name, "prompt": "hello"} for name in ("one", "scripted", "three")}
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
            for name, body in bodies.items()
        ]
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        batch = client.batches.retrieve(batch.id)
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        said = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
        assert said == {"one": "I am the first", "scripted": "ok"}
        assert "this server serves `one, two, scripted`" in client.files.content(batch.error_file_id).text


def test_shutdown_lets_both_finish(engines: list[ScriptedEngine]) -> None:
    is_open = threading.Event()

    async def held(asked: Asked, writer: asyncio.StreamWriter) -> None:
        while not is_open.is_set():
            await asyncio.sleep(0.005)
        await well(asked, writer)

    engines[0].script = held
    with running_front(specs=[spec_of(engines[0])]) as front:
        answers: list[httpx.Response] = []
        body = {"model": "scripted", "prompt": "x"}
        asking = threading.Thread(target=lambda: answers.append(front.post("/v1/completions", body)))
        asking.start()
        eventually(lambda: bool(engines[0].asked))
        front.server.handle_exit(15, None)
        eventually(lambda: front.front.state.hub.calls_open == 1 and front.relayed.app.state.hub.draining)
        is_open.set()
        asking.join(20)
    assert answers[0].content == ANSWER


def test_a_client_that_leaves_frees_the_engine(engines: list[ScriptedEngine]) -> None:
    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(600)

    engines[0].script = silent
    with running_front(specs=[spec_of(engines[0])]) as front:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{front.url}/v1/completions", json={"model": "scripted", "prompt": "x"}, timeout=0.5)
        eventually(lambda: front.relayed.host.requests_open == 0)


def test_a_root_path_covers_engines(engines: list[ScriptedEngine]) -> None:
    options = {"config": ApiConfig(root_path="/llm"), "engines_key": "engines-key"}
    with running_front(specs=[spec_of(engines[0])], **options) as front:
        assert front.post("/llm/v1/completions/", {"model": "scripted", "prompt": "x"}).content == ANSWER
        assert front.get("/llm/engines", headers=OPERATOR).status_code == 200


def test_without_an_engine_its_models_are_unknown(engines: list[ScriptedEngine]) -> None:
    with running_front(specs=[]) as front:
        assert front.get("/health").json() == {"status": "ok", "models": {"one": "ok", "two": "ok"}, "engines": {}}
        assert front.post("/v1/completions", {"model": "scripted", "prompt": "x"}).status_code == 404
        assert front.post("/v1/chat/completions", {"messages": QUESTION}).status_code == 200


def test_the_terminal_sees_engines(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", front.url, "--once", "--model", "scripted"]) == 0
    assert capsys.readouterr().out.startswith("scripted, memserve ")
    findings = list(examine_cluster(front.url, None, {}))
    assert all(finding.status is Status.OK for finding in findings), findings
    assert {"scripted: engines", "one: members"} <= {finding.name for finding in findings}
