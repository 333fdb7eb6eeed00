"""``/ui``: its files, its snapshots beside ``/metrics``, and which key sees what."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.api.ui.snapshot import HISTOGRAMS
from waiting import eventually

KEYS = ["ada=sk-ada", "bob=sk-bob"]
MOVING = ("memserve_resident_bytes", "memserve_http_requests_total", "memserve_http_connections")
"""Another request, or a moment, changes these."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(FakeEngine(says(SCRIPT_TEXT))) as world:
        yield world


def key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def ask(world: World, key_text: str = "none", prompt: str = "hello", **headers: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    answer = httpx.post(f"{world.url}/v1/completions", json=body, headers={**key(key_text), **headers}, timeout=30)
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return told


def snapshot(world: World, key_text: str = "none") -> dict[str, Any]:
    answer = httpx.get(f"{world.url}/ui/snapshot", headers=key(key_text), timeout=30)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def flat(samples: dict[str, list[tuple[dict[str, str], float]]]) -> dict[tuple[str, frozenset[Any]], float]:
    return {(name, frozenset(labels.items())): value for name, rows in samples.items() for labels, value in rows}


def metrics_page(world: World, key_text: str = "none") -> dict[tuple[str, frozenset[Any]], float]:
    page = httpx.get(f"{world.url}/metrics", headers=key(key_text), timeout=30).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
        and (not sample.name.endswith("_bucket") or sample.name.removesuffix("_bucket") in HISTOGRAMS)
    }


# -- files


def test_dashboard_loads_assets_from_this_server_only(world: World) -> None:
    page = httpx.get(f"{world.url}/ui", timeout=30)
    policy = page.headers["content-security-policy"]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|https?://", page.text)
    seen, waiting = set(), set(re.findall(r'(?:href|src)="ui/([^"]+)"', page.text))
    assert {"app.js", "style.css", "icon.svg"} <= waiting
    while waiting:
        name = waiting.pop()
        seen.add(name)
        file = httpx.get(f"{world.url}/ui/{name}", timeout=30)
        assert file.status_code == 200 and file.headers["content-security-policy"] == policy, name
        assert file.headers["x-content-type-options"] == "nosniff"
        outside = [url for url in re.findall(r"https?://[^\"' )]+", file.text) if "www.w3.org/2000/svg" not in url]
        assert not outside, f"{name} names other servers: {outside}"
        waiting |= set(re.findall(r'from "\./([^"]+)"', file.text)) - seen
    assert {"cluster.js", "requests.js", "stream.js"} <= seen


@pytest.mark.parametrize("name", ["nothing.js", "__init__.py", "..%2Fpages.py", "static", "index.html/x"])
def test_nothing_else_of_the_package_is_served(world: World, name: str) -> None:
    answer = httpx.get(f"{world.url}/ui/{name}", timeout=30)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_url"


# -- figures


def test_a_snapshot_has_the_numbers_of_metrics(world: World) -> None:
    for _ in range(3):
        ask(world)
    shown, page = flat(snapshot(world)["metrics"]), metrics_page(world)
    fixed = {sample: value for sample, value in shown.items() if sample[0] not in MOVING}
    # /metrics sums up what it does not name: the counters of this viewer's tenant are beside it
    own = {sample for sample in fixed if sample[0].startswith("memserve_tenant_")}
    assert {sample: value for sample, value in fixed.items() if sample not in own} == {
        sample: value for sample, value in page.items() if sample[0] not in MOVING
    }
    assert fixed["memserve_tenant_requests_total", frozenset({("tenant", "")})] >= 3
    assert fixed["memserve_steps_total", frozenset()] == page["memserve_steps_total", frozenset()] > 0
    assert all((name, labels) in page for name, labels in shown if name in MOVING)


def test_events_are_snapshots_and_end_with_the_page(world: World) -> None:
    with httpx.stream("GET", f"{world.url}/ui/events", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert first.keys() - {"history"} == second.keys() == snapshot(world).keys()
    assert second["time_ms"] > first["time_ms"]
    in_progress = ("memserve_http_requests_in_progress", frozenset())
    eventually(lambda: flat(snapshot(world)["metrics"])[in_progress] == 1, 30)


# -- requests


def test_request_events_cover_arrival_to_end(world: World) -> None:
    answer = ask(world, prompt="hello hello", **{"x-request-id": "theirs-1"})
    told = snapshot(world)["recent"][0]
    assert (told["request_id"], told["response_id"], told["status"]) == ("theirs-1", answer["id"], 200)
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"] and told["output_tokens"] == 4
    assert told["finish_reason"] == "length" and told["total_ms"] >= told["ttft_ms"] > 0
    ends = [stage["to_ms"] for stage in told["stages"]]
    assert [stage["from_ms"] for stage in told["stages"]] == [0, *ends[:-1]] and ends == sorted(ends)
    assert ends[-1] == told["total_ms"]
    assert "hello" not in json.dumps(told), "a timeline has no text"
    for name in ("theirs-1", answer["id"]):
        assert httpx.get(f"{world.url}/ui/requests/{name}", timeout=30).json() == told
    missing = httpx.get(f"{world.url}/ui/requests/none-such", timeout=30)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "request_not_found"


def test_request_in_flight_is_listed() -> None:
    engine = FakeEngine(says(SCRIPT_TEXT), step_s=None)
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "stream": True}
    with serve(engine) as world, httpx.Client(timeout=30) as client:
        request = client.build_request("POST", f"{world.url}/v1/completions", json=body)
        seen: list[Any] = []

        def is_live() -> bool:
            seen[:] = snapshot(world)["live"]
            return bool(seen)

        answers: list[httpx.Response] = []
        sender = threading.Thread(target=lambda: answers.append(client.send(request)))
        sender.start()
        eventually(is_live)
        assert seen[0]["status"] is None and seen[0]["route"] == "/v1/completions"
        while sender.is_alive():
            engine.step()
        sender.join(30)
        assert answers[0].status_code == 200
        eventually(lambda: not snapshot(world)["live"] and snapshot(world)["recent"][0]["output_tokens"] == 4)


def test_refused_request_is_listed_with_its_status(world: World) -> None:
    answer = httpx.post(f"{world.url}/v1/completions", json={"model": MODEL, "prompt": 7}, timeout=30)
    told = snapshot(world)["recent"][0]
    assert answer.status_code == told["status"] == 400 and "prompt_tokens" not in told


# -- keys


def test_a_tenant_sees_its_own_and_nothing_without_its_key() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=KEYS) as world:
        mine, theirs = ask(world, "sk-ada"), ask(world, "sk-bob")
        for path in ("/ui/events", "/ui/snapshot", f"/ui/requests/{mine['id']}"):
            assert httpx.get(f"{world.url}{path}", timeout=30).status_code == 401
        assert httpx.get(f"{world.url}/ui", timeout=30).status_code == 200
        told = snapshot(world, "sk-ada")
        assert [entry["response_id"] for entry in told["recent"]] == [mine["id"]]
        assert [labels for labels, _ in told["metrics"]["memserve_tenant_requests_total"]] == [{"tenant": "ada"}]
        assert "bob" not in json.dumps(told) and theirs["id"] not in json.dumps(told)
        assert "memserve_engine_up" in told["metrics"], "as on /metrics, which is open here"
        other = httpx.get(f"{world.url}/ui/requests/{theirs['id']}", headers=key("sk-ada"), timeout=30)
        assert other.status_code == 404


def test_metrics_key_sees_all_and_tenant_key_only_its_own() -> None:
    with serve(FakeEngine(says(SCRIPT_TEXT)), api_keys=KEYS, metrics_keys=["sk-operator"]) as world:
        ids = {ask(world, "sk-ada")["id"], ask(world, "sk-bob")["id"]}
        told, page = snapshot(world, "sk-operator"), metrics_page(world, "sk-operator")
        assert {entry["response_id"] for entry in told["recent"]} == ids
        shown = {sample: value for sample, value in flat(told["metrics"]).items() if sample[0] not in MOVING}
        assert shown == {sample: value for sample, value in page.items() if sample[0] not in MOVING}
        assert shown["memserve_tenant_requests_total", frozenset({("tenant", "bob")})] == 1
        own = snapshot(world, "sk-ada")
        assert set(own["metrics"]) == {name for name in own["metrics"] if name.startswith("memserve_tenant_")}
        assert own["members"] == [] and len(own["recent"]) == 1
        assert httpx.get(f"{world.url}/ui/snapshot", headers=key("sk-wrong"), timeout=30).status_code == 401
