"""Several models behind one HTTP front: which one answers, and what is said of all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from front_world import QUESTION, Front, running_front
from memserve.api.http.config import ApiConfig, EdgeConfig
from memserve.api.model_table import ModelTable, OwnersModels
from memserve.api.openai.interfaces import ModelNames
from memserve.base.units import MIB
from memserve.cli.doctor_cluster import examine_cluster
from memserve.cli.main import run
from memserve.cli.output import Status


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running_front() as front:
        yield front


def test_a_request_goes_to_the_model_that_it_names(front: Front) -> None:
    assert front.ask(model="one") == "I am the first"
    assert [front.ask(model=name) for name in ("two", "TWO", "org/two")] == ["I am the second"] * 3
    assert front.ask() == "I am the first", "none named: the default"
    assert front.ask(model=None) == "I am the first"


def test_a_model_is_found_before_what_another_calls_so(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(front.front.table.parts[0].app.state._state, "names", ModelNames("one", ["two", "three"]))
    table = front.front.table
    assert (front.ask(model="two"), table.find_part("three")) == ("I am the second", table.parts[0])


def test_what_a_router_does_not_know_is_the_owners(front: Front) -> None:
    parts, names = front.front.table.parts, ("one", "org/two", "THREE", "unknown", None)
    table = ModelTable(parts, owners=OwnersModels(("Three",)))
    assert [table.is_owners(name) for name in names] == [False, False, True, True, False]
    hidden = ModelTable(parts, owners=OwnersModels(("org/two",), has_default=True))
    assert hidden.is_owners(None) and hidden.is_owners("org/two"), "before what another model is called as well"
    assert not any(front.front.table.is_owners(name) for name in names), "an owner asks no other router"


def test_all_endpoints_find_their_model(front: Front) -> None:
    assert (
        front.post("/v1/completions", {"model": "two", "prompt": "hello"}).json()["choices"][0]["text"]
        == "I am the second"
    )
    message = front.post("/v1/messages", {"model": "two", "max_tokens": 64, "messages": QUESTION}).json()
    assert message["content"][0]["text"] == "I am the second" and message["model"] == "two"
    response = front.post("/v1/responses", {"model": "two", "input": "hello"}).json()
    assert response["output"][0]["content"][0]["text"] == "I am the second"
    assert front.get(f"/v1/responses/{response['id']}").json()["model"] == "two", "the first model does not know it"
    assert front.post("/tokenize", {"model": "two", "prompt": "hello"}).status_code == 200


def test_streams_come_from_their_model(front: Front) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="two", messages=QUESTION, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "I am the second"
    assert [model.id for model in client.models.list()] == ["one", "two"]


def test_an_unknown_model_is_404_in_the_form_of_its_interface(front: Front) -> None:
    answer = front.post("/v1/chat/completions", {"model": "three", "messages": QUESTION})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert "this server serves `one, two`" in answer.json()["error"]["message"]
    answer = front.post("/v1/messages", {"model": "three", "max_tokens": 4, "messages": QUESTION})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert front.get("/v1/models/three").status_code == 404
    assert front.get("/v1/models/org/two").json()["id"] == "two"


def test_what_cannot_be_read_is_answered_by_the_default(front: Front) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[1]", b'{"model": 3}', b'{"messages": [1]}', b"\xff\xfe"):
        answer = httpx.post(f"{front.url}/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", content
    assert httpx.post(f"{front.url}/v1/chat/completions", content=b"x=1").status_code == 415
    assert front.get("/nothing").json()["error"]["code"] == "unknown_url"
    assert front.get("/v1/responses/none").json()["error"]["code"] == "response_not_found"


def test_the_address_can_name_the_model(front: Front) -> None:
    assert [front.get(f"/ui/snapshot?model={name}").json()["model"] for name in ("one", "two")] == ["one", "two"]
    assert front.get("/ui/snapshot").json()["model"] == "one"
    assert front.get("/ui/snapshot?model=three").status_code == 404
    assert front.get("/ui").status_code == 200


def test_health_and_metrics_speak_of_all_models(front: Front) -> None:
    assert front.get("/health").json() == {"status": "ok", "models": {"one": "ok", "two": "ok"}}
    before = _counter(front, "two")
    front.ask(model="two")
    front.ask(model="one")
    assert _counter(front, "two") == before + 1
    page = front.get("/metrics").text
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert len(lines) == len({line.rsplit(" ", 1)[0] for line in lines}), "no series twice"
    assert sum(line.startswith("# TYPE memserve_http_requests_total ") for line in page.splitlines()) == 1
    of_process = [line for line in lines if line.startswith("memserve_http_connections")]
    assert len(of_process) == 1 and "{" not in of_process[0], "of the process: once, and without a model"
    front.engines["two"].stats_error = TimeoutError()
    try:
        assert front.get("/health").json()["models"] == {"one": "ok", "two": "engine does not answer"}
        assert front.get("/health").status_code == 200
        front.engines["one"].stats_error = TimeoutError()
        assert front.get("/health").status_code == 503
    finally:
        front.engines["one"].stats_error = front.engines["two"].stats_error = None


def _counter(front: Front, model: str) -> float:
    start = f'memserve_http_requests_total{{model="{model}",route="/v1/chat/completions",status="200"}} '
    lines = [line for line in front.get("/metrics").text.splitlines() if line.startswith(start)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_keys_are_asked_for_before_a_body_is_read() -> None:
    with running_front(api_keys=["team=secret"], metrics_keys=["op=page"]) as front:
        body = {"model": "two", "messages": QUESTION}
        assert front.post("/v1/chat/completions", body).status_code == 401
        assert front.post("/v1/chat/completions", body, headers={"authorization": "Bearer secret"}).status_code == 200
        anthropic = body | {"max_tokens": 5}
        assert front.post("/v1/messages", anthropic, headers={"x-api-key": "secret"}).status_code == 200
        assert front.get("/v1/models").status_code == 401 and front.get("/metrics").status_code == 401
        page = front.get("/metrics", headers={"authorization": "Bearer page"}).text
        assert 'memserve_tenant_requests_total{model="two",tenant="team"} 2.0' in page
        with httpx.stream(
            "POST", f"{front.url}/v1/completions", content=_endless(), headers={"content-type": "application/json"}
        ) as answer:
            assert answer.status_code == 401


def _endless() -> Iterator[bytes]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        yield b" " * 65536


def test_bodies_are_bounded() -> None:
    with running_front(limits=EdgeConfig(body_bytes_max=MIB)) as front:
        long = {"model": "two", "prompt": "x" * (2 * MIB)}
        assert front.post("/v1/completions", long).status_code == 413
        assert front.post("/v1/completions", {"model": "two", "prompt": "hello"}).status_code == 200


def test_a_root_path_and_slashes_at_ends() -> None:
    with running_front(config=ApiConfig(root_path="/llm")) as front:
        assert [card["id"] for card in front.get("/llm/v1/models/").json()["data"]] == ["one", "two"]
        assert front.post("/llm/v1/completions/", {"model": "two", "prompt": "hello"}).json()["model"] == "two"
        assert front.get("/v1/models").status_code == 200


def test_a_batch_asks_the_model_of_each_line(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        names = ["one", "two", "three", None]
        bodies = [{"prompt": "hello"} | ({"model": name} if name else {}) for name in names]
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
            for number, body in enumerate(bodies)
        ]
        client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until = time.monotonic() + 30
        while (batch := client.batches.retrieve(batch.id)).status not in (
            "completed",
            "failed",
        ) and time.monotonic() < until:
            time.sleep(0.02)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 3, 1)
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        said = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers}
        assert said == {"0": "I am the first", "1": "I am the second", "3": "I am the first"}
        assert "three" in client.files.content(batch.error_file_id).text


ADMIN = {"authorization": "Bearer let-me"}


def test_models_come_and_go_while_the_server_runs() -> None:
    with running_front(admin_key="let-me") as front:
        assert front.post("/models", {"model": "new=/m"}).status_code == 401
        assert front.post("/v1/completions", {"model": "new", "prompt": "hello"}).status_code == 404
        added = front.post("/models", {"model": "new=/m"}, headers=ADMIN)
        assert added.status_code == 200 and added.json()["source"] == "new=/m"
        assert front.ask(model="new") == "I am new"
        assert [card["id"] for card in front.get("/v1/models").json()["data"]] == ["one", "two", "new"]
        assert front.get("/ui/snapshot?model=new").json()["models"] == ["one", "two", "new"]
        assert front.post("/models", {"model": "nothing"}, headers=ADMIN).status_code == 400
        assert front.post("/models", {}, headers=ADMIN).status_code == 400
        assert httpx.delete(f"{front.url}/models/one", headers=ADMIN).status_code == 200
        assert front.host.closed == ["one"] and front.ask() == "I am the second", "the next one is the default"
        assert front.post("/v1/completions", {"model": "one", "prompt": "hello"}).status_code == 404
        assert httpx.delete(f"{front.url}/models/one", headers=ADMIN).status_code == 404
        assert httpx.delete(f"{front.url}/models/two", headers=ADMIN).status_code == 200
        last = httpx.delete(f"{front.url}/models/new", headers=ADMIN)
        assert last.status_code == 400 and "the only model" in last.json()["error"]["message"]


def test_a_model_that_goes_finishes_what_it_has() -> None:
    with running_front(admin_key="let-me") as front:
        engine = front.engines["two"]
        engine._step_s = 0.02
        body = {"model": "two", "prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{front.url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            removing = threading.Thread(
                target=httpx.delete, args=(f"{front.url}/models/two",), kwargs={"headers": ADMIN, "timeout": 30}
            )
            removing.start()
            until = time.monotonic() + 20
            while front.post("/v1/completions", {"model": "two", "prompt": "hello"}).status_code != 404:
                assert time.monotonic() < until
            assert "data: [DONE]" in list(lines)
        removing.join(20)
        assert front.host.closed == ["two"]


def test_a_model_sleeps_until_it_is_asked() -> None:
    with running_front(admin_key="let-me") as front:
        assert front.post("/models/two/sleep", {}, headers=ADMIN).json()["state"] == "asleep"
        assert front.get("/health").json()["models"]["two"] == "asleep"
        assert 'memserve_model_asleep{model="two"} 1.0' in front.get("/metrics").text
        assert front.post("/tokenize", {"model": "two", "prompt": "hello"}).status_code == 200
        assert front.get("/v1/models/two").status_code == 200 and front.host.instances == [False]
        woken = front.post("/v1/completions", {"model": "two", "prompt": "hello"})
        assert woken.json()["choices"][0]["text"] == "I am the second" and front.host.instances == [False, True]
        assert int(woken.headers["x-memserve-wake-ms"]) >= 0
        again = front.post("/v1/completions", {"model": "two", "prompt": "hello"})
        assert "x-memserve-wake-ms" not in again.headers
        assert front.post("/models/two/sleep", {}, headers=ADMIN).status_code == 200
        assert front.post("/models/two/wake", {}, headers=ADMIN).json()["wakes"] == 2
        assert front.post("/models/one/sleep", {}, headers=ADMIN).json()["error"]["code"] == "no_sleep"
        assert front.post("/models/three/wake", {}, headers=ADMIN).status_code == 404


def test_without_an_admin_key_there_are_no_such_routes(front: Front) -> None:
    assert front.get("/models").status_code == 404 and front.post("/models", {"model": "x=/y"}).status_code == 404


def test_the_terminal_sees_each_model(front: Front, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--url", front.url, "--once", "--model", "two"]) == 0
    assert capsys.readouterr().out.startswith("two, memserve ")
    assert run(["trees", "--url", front.url, "--model", "three"]) == 1
    assert "this server serves `one, two`" in capsys.readouterr().err
    findings = list(examine_cluster(front.url, None, {}))
    assert {"one: members", "two: members"} <= {finding.name for finding in findings}
    assert all(finding.status is Status.OK for finding in findings)
