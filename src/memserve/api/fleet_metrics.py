"""``/metrics`` of a fleet: engines of other projects, and the admission before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from memserve.api.cluster_metrics import ADMISSION_METRICS
from memserve.api.families import COUNTER, GAUGE, Table, families
from memserve.cluster.report import AdmissionStats
from memserve.fleet.words import EngineView

FLEET_METRICS: Table = [
    ("fleet_engine_up", GAUGE, "1 while the engine takes requests, 0 while it does not", "up"),
    ("fleet_requests_open", GAUGE, "Requests that the router sent to the engine and that have not ended",
     "requests_open"),
    ("fleet_requests", COUNTER, "Attempts that the router sent to the engine", "requests"),
    ("fleet_requests_failed", COUNTER, "Attempts that the engine did not answer, or broke off", "failed"),
    ("fleet_prefills", COUNTER, "Prompts that the engine has computed for another one to answer", "prefills"),
    ("fleet_prompt_tokens", COUNTER, "Prompt tokens of attempts sent to the engine", "prompt_tokens"),
    ("fleet_matched_tokens", COUNTER, "Prompt tokens sent to the engine that it was believed to have cached",
     "matched_tokens"),
    ("fleet_cached_blocks", GAUGE, "KV blocks that the engine is believed to have cached", "cached_blocks"),
    ("fleet_kv_batches", COUNTER, "Batches of KV events of the engine that were applied", "kv_batches"),
    ("fleet_kv_gaps", COUNTER, "Times that batches of KV events of the engine were missing", "kv_gaps"),
    ("fleet_kv_forgotten", COUNTER, "Times that all cached blocks of the engine were forgotten", "kv_forgotten"),
    ("fleet_engine_running", GAUGE, "Requests that the engine says it computes", lambda v: v.report.running or 0),
    ("fleet_engine_waiting", GAUGE, "Requests that wait in the engine, by its metrics", lambda v: v.report.waiting),
    ("fleet_engine_kv_usage", GAUGE, "Share (0 to 1) of the engine's KV memory in use, as it says",
     lambda v: v.report.kv_usage),
]  # fmt: skip


class FleetSnapshot:
    """One reading of the fleet, as Prometheus wants it."""

    def __init__(self, engines: Sequence[EngineView], admission: AdmissionStats) -> None:
        self._engines, self._admission = engines, admission

    def describe(self) -> list[Metric]:
        """Empty: the registry calls it when the collector registers, and the values are read later."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this reading."""
        yield from families(FLEET_METRICS, [((view.name,), view) for view in self._engines], ("engine",))
        yield from families(ADMISSION_METRICS, [((), self._admission)])
