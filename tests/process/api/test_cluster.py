"""What the edge shows of a cluster: its metrics, and why a request went where it did."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api_world import MODEL, SCRIPT_TEXT, World, says, serve
from fake_engine import FakeEngine
from memserve.base.types import Request, Role
from memserve.base.units import NS_PER_S
from memserve.host.stats import EngineStats, RouterStats
from memserve.instance.events import LinkUse
from memserve.instance.layerwise.state import LayerReport
from memserve.instance.scheduler.slo import ObjectiveReport
from memserve.instance.stats import InstanceStats, TierStats
from memserve.protocol.peers import Load, Peer
from memserve.router.report import ClusterStats, Counters, InstanceView


def view(name: str, role: Role, stats: EngineStats | None, load: Load, state: str = "live") -> InstanceView:
    return InstanceView(
        Peer(name, 1), role, state, "tcp://h:1", "h", load, stats.encode() if stats else b"", 0, 0,
        requests=2, prefill_tokens=3, context_tokens=4, hbm_blocks=100, dram_blocks=10, tree_blocks=7, next_event=0,
        events_aside=0,
    )  # fmt: skip


def router_stats() -> RouterStats:
    counters = Counters(
        requests=9,
        dispatches=11,
        resumptions=2,
        decisions={("cost", "reuse"): 6, ("cost", "fetch"): 2, ("cost", "compute"): 3},
        attempts_failed={"gone": 1, "refused": 4},
    )
    counters.finished["stop"] = 5
    p1 = InstanceStats(
        prompt_tokens=200, cached_tokens=50, fetched_tokens=30, bytes_received=4096, checksum_mismatches=1,
        pulls_failed=3,
        hbm=TierStats(100, 60, 30), dram=TierStats(10, 4, 6), requests_arrived=9, preemptions_swap=5, steps_failed=8,
        objectives=ObjectiveReport(ttft_met=3),
        layers=LayerReport(kept_pages=12, parkings=2, link=LinkUse(4096, 8192, 4 * NS_PER_S, 1 * NS_PER_S)),
    )  # fmt: skip
    kept = ObjectiveReport(tpot_missed=2, plans_limited=5, output_classes={"0-10": 1, "10-25": 4})
    d1 = InstanceStats(
        generated_tokens=70, taken_over=8, transfers_failed=2, hbm=TierStats(100, 90, 0), objectives=kept,
        preemptions_recompute=6, rows_failed=7,
    )  # fmt: skip
    told = EngineStats(5, 1, 2_000_000_000, instance=p1, read_at_ns=7_250_000_000)
    views = [
        view("p1", Role.PREFILL, told, Load(requests_waiting=3)),
        view("d1", Role.DECODE, EngineStats(6, 1, 10, instance=d1), Load(sequences_running=4, transfers_open=1)),
        view("d2", Role.DECODE, None, Load(), "draining"),
    ]
    return RouterStats.from_cluster(ClusterStats(4, 1, 3, 1, 14, 2048, 2, counters), views, router_ns=500_000_000)


class RouterFake(FakeEngine):
    """A fake engine that stands for a cluster: its statistics, and the story of each request."""

    def stats(self) -> RouterStats:
        return router_stats()

    def submit(self, request: Request, sink) -> None:
        told: dict[int, int] = {}

        def tell(news) -> None:
            first = told.setdefault(news.index, 0) == 0
            told[news.index] += 1
            route = (("route", "p1 to d1"), ("route_why", "cost: p1 reuses 8 tokens"), ("attempts", 1))
            if first:
                news = msgspec.structs.replace(news, story=(*route, ("cached_tokens_hbm", 8)))
            elif news.finish_reason is not None:
                news = msgspec.structs.replace(news, story=(*route, ("returned_blocks", 2)))
            sink(news)

        super().submit(request, tell)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serve(RouterFake(says(SCRIPT_TEXT))) as world:
        yield world


def samples(world: World) -> dict[tuple[str, frozenset], float]:
    text = httpx.get(f"{world.url}/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_instance_has_its_gauges_by_name_and_role(world: World) -> None:
    found = samples(world)

    def of(name: str, instance: str, role: str, **labels: str) -> float | None:
        return found.get((name, frozenset({"instance": instance, "role": role, **labels}.items())))

    assert of("memserve_instance_requests_waiting", "p1", "prefill") == 3
    assert of("memserve_instance_sequences_running", "d1", "decode") == 4
    assert of("memserve_instance_transfers_open", "d1", "decode") == 1
    assert of("memserve_instance_device_seconds", "p1", "prefill") == 2
    assert of("memserve_instance_read_timestamp_seconds", "p1", "prefill") == 7.25
    assert of("memserve_instance_read_timestamp_seconds", "d2", "decode") == 0, "it has told nothing yet"
    assert of("memserve_instance_hit_rate", "p1", "prefill") == 0.25
    assert of("memserve_instance_hit_rate", "d1", "decode") is None  # it has had no prompts: no share of nothing
    assert of("memserve_instance_blocks", "p1", "prefill", tier="hbm", state="held") == 10
    assert of("memserve_instance_blocks", "p1", "prefill", tier="dram", state="cached") == 6
    assert of("memserve_instance_objectives_total", "p1", "prefill", objective="ttft", result="met") == 3
    assert of("memserve_instance_objectives_total", "d1", "decode", objective="tpot", result="missed") == 2
    assert of("memserve_instance_layerwise_pages", "p1", "prefill", tier="hbm", state="kept") == 12
    assert of("memserve_instance_layerwise_turns_total", "p1", "prefill", turn="parked") == 2
    assert of("memserve_instance_layerwise_bytes_total", "p1", "prefill", direction="down") == 8192
    assert of("memserve_instance_layerwise_hidden_share", "p1", "prefill") == 0.75
    assert found["memserve_layerwise_link_seconds_total", frozenset({("state", "busy")})] == 4, "of all"
    assert of("memserve_instance_output_length_classes_total", "d1", "decode", percentiles="10-25") == 4
    assert found["memserve_objectives_total", frozenset({("objective", "ttft"), ("result", "met")})] == 3, "of all"
    assert of("memserve_instance_checksum_mismatches_total", "p1", "prefill") == 1
    assert of("memserve_instance_pulls_failed_total", "p1", "prefill") == 3
    assert of("memserve_instance_received_bytes_total", "p1", "prefill") == 4096
    assert of("memserve_instance_preemptions_total", "p1", "prefill", kind="swap") == 5
    assert of("memserve_instance_preemptions_total", "d1", "decode", kind="recompute") == 6
    assert of("memserve_instance_rows_failed_total", "d1", "decode") == 7
    assert of("memserve_instance_steps_failed_total", "p1", "prefill") == 8
    assert of("memserve_instance_transfers_failed_total", "d1", "decode") == 2
    assert [of("memserve_instance_up", name, role) for name, role in (("p1", "prefill"), ("d2", "decode"))] == [1, 0]
    assert of("memserve_instance_blocks", "d2", "decode", tier="hbm", state="held") is None  # it has told nothing yet


def test_the_router_counts_decisions_failures_and_endings(world: World) -> None:
    found = samples(world)

    def of(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert of("memserve_router_requests_live") == 4 and of("memserve_router_instances_draining") == 1
    assert of("memserve_router_dispatches_total") == 11 and of("memserve_router_resumptions_total") == 2
    assert of("memserve_router_decisions_total", policy="cost", way="fetch") == 2
    assert of("memserve_router_decisions_total", policy="cost", way="reuse") == 6
    assert of("memserve_router_attempts_failed_total", cause="refused") == 4
    assert of("memserve_router_sequences_total", reason="stop") == 5
    assert of("memserve_router_seconds_total") == 0.5


def test_a_single_engines_metrics_are_all_there_as_sums(world: World) -> None:
    found = samples(world)
    assert found["memserve_engine_up", frozenset()] == 1
    assert found["memserve_steps_total", frozenset()] == 11
    assert found["memserve_engine_cached_tokens_total", frozenset()] == 50
    assert found["memserve_pool_blocks", frozenset({"tier": "hbm", "state": "free"}.items())] == 150


def ask(world: World, **fields) -> dict:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "explain": True, **fields}
    response = httpx.post(f"{world.url}/v1/completions", json=body, timeout=30)
    assert response.status_code == 200
    if fields.get("stream"):
        return json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["memserve"]
    return response.json()["memserve"]


@pytest.mark.parametrize("stream", [False, True])
def test_response_has_routing_decision_and_reason(world: World, stream: bool) -> None:
    story = ask(world, stream=stream)["story"]
    assert story == [
        {"fact": "route", "value": "p1 to d1"},
        {"fact": "route_why", "value": "cost: p1 reuses 8 tokens"},
        {"fact": "attempts", "value": 1},
        {"fact": "cached_tokens_hbm", "value": 8},
        {"fact": "returned_blocks", "value": 2},
    ]


def test_story_is_reported_per_prompt_not_per_sequence(world: World) -> None:
    assert len(ask(world, n=3)["story"]) == 5
    story = ask(world, prompt=["hello", "is"])["story"]
    assert [entry["prompt"] for entry in story] == [0] * 5 + [1] * 5
    assert {entry["fact"] for entry in story} == {
        "route", "route_why", "attempts", "cached_tokens_hbm", "returned_blocks"
    }  # fmt: skip


def test_nothing_is_told_unasked(world: World) -> None:
    response = httpx.post(f"{world.url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    assert "memserve" not in response.json()


def test_a_snapshot_of_the_dashboard_has_the_numbers_of_metrics(world: World) -> None:
    shown, page = httpx.get(f"{world.url}/ui/snapshot", timeout=30).json(), samples(world)
    cluster = {
        (name, frozenset(labels.items())): value
        for name, rows in shown["metrics"].items()
        if name.startswith(("memserve_router_", "memserve_instance_", "memserve_admission_"))
        for labels, value in rows
    }
    assert cluster == {
        sample: value
        for sample, value in page.items()
        if sample[0].startswith(("memserve_router_", "memserve_instance_", "memserve_admission_"))
        and not sample[0].endswith("_created")
    }
    assert [(member["name"], member["role"], member["state"]) for member in shown["members"]] == [
        ("p1", "prefill", "live"), ("d1", "decode", "live"), ("d2", "decode", "draining"),
    ]  # fmt: skip
