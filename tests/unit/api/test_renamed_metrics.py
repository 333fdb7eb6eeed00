"""Metrics that were renamed: one release shows both names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from memserve.api.metrics.cluster import ROUTER_HOST_METRICS
from memserve.api.metrics.families import COUNTER, families, with_old_names


class Reading:
    def describe(self) -> list[object]:
        return []

    def collect(self) -> object:
        table = [("router_messages_lost", COUNTER, "Messages lost", "lost"), ("router_requests", COUNTER, "All", "all")]
        return with_old_names(families(table, [(("c1",), {"lost": 3, "all": 5})], ("instance",)))


def test_a_renamed_metric_has_its_samples_under_the_old_name() -> None:
    registry = CollectorRegistry()
    registry.register(Reading())
    page = generate_latest(registry).decode()
    assert 'memserve_router_messages_lost_total{instance="c1"} 3.0' in page
    assert 'memserve_router_letters_lost_total{instance="c1"} 3.0' in page
    assert (
        "Messages lost (old name of memserve_router_messages_lost)" in page
        and page.count("memserve_router_requests_total") == 3
    )


def test_no_table_has_an_old_name_any_more() -> None:
    assert not [name for name, *_ in ROUTER_HOST_METRICS if "letters" in name or "strangers" in name]
