"""Metrics: each is declared once, as a field of the statistics that it shows.

::

    requests_failed: int = counter("router_requests_failed", "Requests that ended with an error")

is the Prometheus family ``memserve_router_requests_failed_total`` of whatever page shows the statistics
(:mod:`memserve.api.metrics`), and a row of the reference. Times are fields in nanoseconds and metrics in seconds. The
text says what is counted to readers of both the code and the page; a string below the field adds what only the code has
to know. Nothing here knows Prometheus: machines count, and say what they count.

So a new metric of a router or a store is one field and the line that adds to it: ``Counters`` in ``router/report.py``,
``StoreCounters`` in ``store/machine/events.py``. One of an instance is a field of ``InstanceStats`` in
``instance/stats.py``, which ``_local_stats`` there takes from where it is counted, mostly ``SchedulerCounters``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memserve.base.errors import check

MetricKind = Literal["counter", "gauge"]
WHOSE = "{whose}"
"""In a text: the process that counts. One text serves the page of an engine and that of a router with its instances."""


@dataclass(frozen=True, slots=True)
class DeclaredMetric:
    """What a field says about its metric."""

    kind: MetricKind
    name: str
    """Without ``memserve_``, and without ``_total``; empty: only an engine's own page has it."""
    text: str
    engine_name: str = ""
    """Its name on the page of one engine; empty: not there."""


def counter(name: str, text: str, *, engine: str = "") -> Any:
    """A field that counts up from 0. ``engine``: its name on the page of one engine."""
    return _declare(DeclaredMetric("counter", name, text, engine))


def gauge(name: str, text: str, *, engine: str = "") -> Any:
    """A field that says how many there are now, 0 by default. ``engine``: its name on the page of one engine."""
    return _declare(DeclaredMetric("gauge", name, text, engine))


def _declare(metric: DeclaredMetric) -> Any:
    check(bool(metric.name or metric.engine_name), f"a metric without a name: {metric.text}")
    return dataclasses.field(default=0, metadata={"metric": metric})


def metrics_of(statistics: type) -> Iterator[tuple[str, DeclaredMetric]]:
    """Names and metrics of the fields of ``statistics``, a dataclass, in their order; others are left out."""
    for field in dataclasses.fields(statistics):
        metric = field.metadata.get("metric")
        if metric is not None:
            yield field.name, metric
