"""``/ui`` of a router before servers of other projects: its own metrics, its engines, its requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from browser import browsers
from fleet_server import FleetServer, fleet_server, spec_of
from front_world import running_front
from memserve.api.ui import feed
from memserve.base.config import ClusterConfig
from scripted_engine import scripted_engines
from waiting import eventually

PROMPT = list(range(10, 90))
SHOWN = """
return [...document.querySelectorAll('[data-metric][data-value]')].map(
  (element) => [element.dataset.metric, JSON.parse(element.dataset.labels), Number(element.dataset.value)])
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.1)


def snapshot(server: FleetServer) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{server.url}/ui/snapshot", timeout=30).json()
    return told


def ask(server: FleetServer) -> None:
    body = {"model": "scripted", "prompt": PROMPT, "stream": True}
    headers = {"x-request-id": "theirs-1"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200


def test_fleet_snapshot_has_metrics_engines_and_requests() -> None:
    with scripted_engines(2) as engines, fleet_server([spec_of(engine) for engine in engines]) as server:
        ask(server)
        ask(server)
        eventually(lambda: len(snapshot(server)["recent"]) == 2)
        told, page = snapshot(server), httpx.get(f"{server.url}/metrics", timeout=30).text
        names = [spec_of(engine).name for engine in engines]
        assert [(member["name"], member["role"], member["state"]) for member in told["members"]] == [
            (name, "engine", "live") for name in names
        ]
        fleet = {
            (sample.name, sample.labels["engine"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("memserve_fleet_")
        }
        shown = {
            (name, labels["engine"]): value
            for name, rows in told["metrics"].items()
            if name.startswith("memserve_fleet_")
            for labels, value in rows
        }
        assert shown == fleet and sum(fleet["memserve_fleet_requests_total", name] for name in names) == 2
        (request, _), end_ms = told["recent"], told["recent"][0]["total_ms"]
        assert request["request_id"] == "theirs-1" and request["status"] == 200
        assert request["instances"][0] in names and request["prompt_tokens"] == len(PROMPT)
        assert [stage["stage"] for stage in request["stages"]] == ["waiting", "decode"]
        assert request["stages"][0]["from_ms"] == 0 and request["stages"][1]["to_ms"] == end_ms
        assert {fact["fact"] for fact in request["story"]} == {"reason", "compared_by"}
        assert json.dumps(PROMPT[:5])[1:-1] not in json.dumps(told)


def test_a_fleet_asks_for_the_keys_that_its_metrics_ask_for() -> None:
    with (
        scripted_engines(1) as engines,
        fleet_server([spec_of(engines[0])], api_keys=["ada=sk-ada"], metrics_keys=["sk-op"]) as server,
    ):
        answers = {
            key: httpx.get(f"{server.url}/ui/snapshot", headers={"authorization": f"Bearer {key}"}, timeout=30)
            for key in ("none", "sk-ada", "sk-op")
        }
        assert answers["none"].status_code == 401
        assert answers["sk-ada"].json()["members"] == [] and len(answers["sk-op"].json()["members"]) == 1
        assert "memserve_fleet_engine_up" not in answers["sk-ada"].json()["metrics"]


def test_an_engines_model_is_chosen_and_asked() -> None:
    """Beside own models, and not the first one that engines have."""
    with browsers() as open_browser, scripted_engines(1) as (engine,):
        engine.models = ["first", "second"]
        with running_front(specs=[spec_of(engine)]) as front:
            browser = open_browser()
            browser.open(f"{front.url}/ui?model=second#chat")
            chosen = "return document.querySelector('#model select')?.value"
            assert browser.until(chosen) == "second"
            options = "return [...document.querySelectorAll('#model option')].map((option) => option.value)"
            assert browser.run(options) == ["one", "two", "first", "second"]
            browser.until("return document.querySelector('textarea')")
            browser.run(
                "document.querySelector('textarea').value = 'hi'; document.querySelector('form').requestSubmit()"
            )
            eventually(lambda: bool(engine.asked))
            assert engine.asked[0].fields["model"] == "second"
            browser.open(f"{front.url}/ui?model=two")
            assert browser.until(chosen) == "two"
            assert browser.errors() == []


def test_a_fleet_is_drawn_with_the_figures_of_metrics() -> None:
    with (
        browsers() as open_browser,
        scripted_engines(2) as engines,
        fleet_server([spec_of(engine) for engine in engines], ClusterConfig(policy="prompt-tree")) as server,
    ):
        ask(server)
        ask(server)
        browser = open_browser()
        browser.open(f"{server.url}/ui")
        browser.until("return document.querySelectorAll('[data-node=member]').length === 2")
        told = snapshot(server)["metrics"]
        seen = set()
        for name, wanted, value in browser.run(SHOWN):
            if name != "memserve_http_connections":
                rows = [amount for labels, amount in told[name] if wanted.items() <= labels.items()]
                assert value == sum(rows), (name, wanted)
                seen.add(name)
        assert {"memserve_fleet_requests_open", "memserve_fleet_requests_total",
                "memserve_fleet_prompt_tokens_total"} <= seen  # fmt: skip
        for view in ("cache", "requests", "trees", "chat"):
            browser.run("location.hash = arguments[0]", view)
            browser.until("return document.querySelector('nav a[aria-current]')?.hash === arguments[0]", f"#{view}")
        browser.until("return document.querySelector('textarea')")
        assert browser.errors() == []
