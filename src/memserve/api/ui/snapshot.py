"""What one event of ``/ui/events`` says: the samples of ``/metrics``, the members, and the viewer's requests.

The figures are the very samples that ``/metrics`` renders, so that a page cannot show another number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import Metric

from memserve import __version__
from memserve.api.metrics.cluster import tenant_ceiling_families
from memserve.api.metrics.http import ApiMetrics, Snapshot
from memserve.api.ui.timelines import Timelines
from memserve.base.units import NS_PER_MS

LIVE_MAX, RECENT_MAX = 100, 40
"""Requests of one event: in flight, and ended."""
MEMBERS_MAX = 64
"""Members that are drawn; the figures count all."""

HISTOGRAMS = ("memserve_time_to_first_token_seconds", "memserve_inter_token_seconds")
"""The only ones with their buckets: a page reads percentiles from them."""

CHARTED = frozenset({
    "memserve_http_requests_total", "memserve_http_requests_in_progress", "memserve_generated_tokens_total",
    "memserve_prompt_tokens_total", "memserve_cached_prompt_tokens_total", "memserve_sequences_running",
    "memserve_router_requests_live", "memserve_instance_blocks", "memserve_pool_blocks", "memserve_fleet_engine_up",
    "memserve_fleet_requests_open", "memserve_fleet_prompt_tokens_total", "memserve_fleet_matched_tokens_total",
})  # fmt: skip
"""What a page draws over the last minutes."""
CHARTED_LABELS = ("tier", "state")
"""Others are summed up."""

Samples = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True, slots=True)
class Viewer:
    """Which figures a page may show: those that its key may read elsewhere."""

    tenant: str | None
    """``None``: an operator, with the key of ``/metrics``; requests of all tenants."""
    sees_cluster: bool
    """Whether ``/metrics`` is open to this viewer."""
    names_tenants: bool = False
    """Whether ``/metrics`` names tenants to this viewer."""


class SnapshotReading(Protocol):
    """What serves behind the HTTP edge, at one moment."""

    def metric_families(self, names_tenants: bool) -> Iterable[Metric]:
        """Its part of ``/metrics``."""

    def tenant_families(self) -> Iterable[Metric]:
        """What ``/metrics`` has by tenant, beyond the edge's own."""

    @property
    def is_answered(self) -> bool:
        """Whether it said how it is."""

    def member_cards(self) -> list[Mapping[str, Any]]:
        """Up to :data:`MEMBERS_MAX` processes to draw: ``name``, ``role``, ``state``, ``host``."""


class EngineReading:
    """An engine, or a router's cluster. ``stats``: its statistics; ``None``: no answer."""

    def __init__(self, stats: Any | None) -> None:
        self._stats = stats

    @property
    def is_answered(self) -> bool:
        return self._stats is not None

    def metric_families(self, names_tenants: bool) -> Iterable[Metric]:
        return Snapshot(self._stats, names_tenants).collect()

    def tenant_families(self) -> Iterable[Metric]:
        """The router's: what each tenant's cache could have had."""
        cluster = getattr(self._stats, "cluster", None)
        return () if cluster is None else tenant_ceiling_families(cluster)

    def member_cards(self) -> list[Mapping[str, Any]]:
        """The instances and stores of the cluster; none for an engine alone."""
        views = (member.view for member in getattr(self._stats, "members", ())[:MEMBERS_MAX])
        return [
            {"name": view.peer.name, "role": view.role.value, "state": view.state, "host": view.host_id}
            for view in views
        ]


class SnapshotBuilder:
    """Builds the events of one moment. ``reading``: one for all viewers."""

    def __init__(
        self,
        metrics: ApiMetrics,
        timelines: Timelines,
        model: str,
        reading: SnapshotReading,
        models: Sequence[str] = (),
    ) -> None:
        """``models``: all that the server has, where there are several."""
        self._metrics, self._timelines, self._model, self._reading = metrics, timelines, model, reading
        self._models = list(models)
        self._time_ms = time.time_ns() // NS_PER_MS

    def build_event(self, viewer: Viewer) -> dict[str, Any]:
        """The event for ``viewer``."""
        return {
            "time_ms": self._time_ms,
            "version": __version__,
            "model": self._model,
            "models": self._models,
            "viewer": {"tenant": viewer.tenant, "sees_cluster": viewer.sees_cluster},
            "metrics": self._visible_samples(viewer),
            "members": self._reading.member_cards() if viewer.sees_cluster else [],
            "live": self._timelines.live_entries(viewer.tenant, LIVE_MAX),
            "recent": self._timelines.recent_entries(viewer.tenant, RECENT_MAX),
        }

    def build_moment(self) -> dict[str, Any] | None:
        """What is kept of it for pages that open later: an event with the figures of charts alone, of all members
        together. ``None``: the engine did not answer."""
        if not self._reading.is_answered:
            return None
        families = (*self._metrics.registry.collect(), *self._reading.metric_families(False))
        samples = _samples_by_name(family for family in families if not CHARTED.isdisjoint(_names_of(family)))
        return {
            "time_ms": self._time_ms,
            "metrics": {name: _summed(rows) for name, rows in samples.items() if name in CHARTED},
        }

    def _visible_samples(self, viewer: Viewer) -> Samples:
        of_tenants = _samples_by_name(self._metrics.by_tenant.collect())
        if not viewer.names_tenants:
            of_tenants |= _samples_by_name(self._reading.tenant_families())
        if viewer.tenant is not None:
            of_tenants = {
                name: [(labels, value) for labels, value in rows if labels["tenant"] == viewer.tenant]
                for name, rows in of_tenants.items()
            }
        if not viewer.sees_cluster:
            return of_tenants
        self._metrics.read_process()
        edge, engine = self._metrics.registry.collect(), self._reading.metric_families(viewer.names_tenants)
        return _samples_by_name(edge) | _samples_by_name(engine) | of_tenants


def _samples_by_name(families: Iterable[Metric]) -> Samples:
    """The samples by name, as ``/metrics`` writes them; no times of creation, and buckets of few histograms."""
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            if sample.name.endswith("_bucket") and family.name not in HISTOGRAMS:
                continue
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def _names_of(family: Metric) -> tuple[str, str]:
    """As its samples may be called."""
    return family.name, f"{family.name}_total"


def _summed(rows: list[tuple[dict[str, str], float]]) -> list[tuple[dict[str, str], float]]:
    """``rows`` with the labels of :data:`CHARTED_LABELS` alone."""
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in rows:
        key = tuple((name, labels[name]) for name in CHARTED_LABELS if name in labels)
        sums[key] = sums.get(key, 0.0) + value
    return [(dict(key), value) for key, value in sums.items()]
