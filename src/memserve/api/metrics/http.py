"""Prometheus metrics of the HTTP edge and of the engine behind it."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from memserve.api.metrics.cluster import cluster_families
from memserve.api.metrics.families import (
    COUNTER,
    GAUGE,
    Kind,
    Table,
    block_bytes_family,
    declared,
    families,
    layer_families,
    objective_families,
    preemption_family,
)
from memserve.base.units import NS_PER_S
from memserve.protocol.kv_hints import HintAction
from memserve.system.memory import resident_bytes

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Tally:
    """A counter, or a gauge. For one thread: it takes no lock, and so a tenth of the time of prometheus_client's."""

    __slots__ = ("_created_s", "_kind", "_name", "_text", "value")

    def __init__(self, kind: Kind, name: str, text: str, registry: CollectorRegistry) -> None:
        self._kind, self._name, self._text = kind, name, text
        self.value, self._created_s = 0.0, time.time()
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The family."""
        family = self._kind(self._name, self._text)
        if isinstance(family, CounterMetricFamily):
            family.add_metric([], self.value, created=self._created_s)
        else:
            family.add_metric([], self.value)
        yield family


class LabelledTally:
    """A :class:`Tally`, a counter, for each combination of values of its labels."""

    __slots__ = ("_created_s", "_labels", "_name", "_text", "_values")

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {}
        self._created_s: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def inc(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Add ``amount`` where ``labels`` are."""
        count = self._values.get(labels)
        if count is None:
            count, self._created_s[labels] = 0.0, time.time()
        self._values[labels] = count + amount

    def collect(self) -> Iterator[Metric]:
        """The family."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value, created=self._created_s[labels])
        yield family


class Spread:
    """A histogram with fixed buckets; for one thread, as :class:`Tally`."""

    __slots__ = ("_bounds", "_counts", "_created_s", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text, self._bounds = name, text, [*map(float, bounds), float("inf")]
        self._counts, self._sum, self._created_s = [0] * len(self._bounds), 0.0, time.time()
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket that ends at it or behind it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The family."""
        counts = itertools.accumulate(self._counts)
        names = (*map(repr, self._bounds[:-1]), "+Inf")
        buckets = [(name, float(count)) for name, count in zip(names, counts, strict=True)]
        family = HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._created_s)
        yield family


def _count_of_refusals(registry: CollectorRegistry) -> Counter:
    text = "Requests and connections that the HTTP server ended by one of its limits"
    return Counter("memserve_http_refused", text, ["limit"], registry=registry)


def _count_of_picks(registry: CollectorRegistry) -> LabelledTally:
    text = "Requests of gateways by the status of the endpoint picker's answer; 200: an endpoint"
    return LabelledTally("memserve_picks", text, ["status"], registry)


def _count_of_hints(registry: CollectorRegistry) -> LabelledTally:
    about = "Hints on KV by action, and by what was known of it when the client was answered"
    return LabelledTally("memserve_kv_hints", about, ["action", "outcome"], registry)


_OF_PROCESS = {"memserve_resident_bytes", "memserve_http_connections", "memserve_http_body_bytes"}


def is_of_process(family: Metric) -> bool:
    """Whether a family is the process's, whatever models it serves."""
    return family.name in _OF_PROCESS or family.name.startswith(("memserve_http_refused", "memserve_batch"))


class ApiMetrics:
    """Counters and histograms of one server. What requests and tokens change belongs to the event loop alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = self._new_counter, self._new_histogram
        self.requests = LabelledTally(
            "memserve_http_requests", "HTTP requests by route and status", ["route", "status"], self.registry
        )
        self.in_progress = Tally(
            GAUGE, "memserve_http_requests_in_progress", "HTTP requests that are being answered", self.registry
        )
        self.resident = Gauge(
            "memserve_resident_bytes", "Bytes that the process behind this page has resident", registry=self.registry
        )
        self.prompt_tokens = counter("memserve_prompt_tokens", "Prompt tokens of answered requests")
        self.cached_tokens = counter(
            "memserve_cached_prompt_tokens", "Prompt tokens of answered requests with KV from the prefix cache"
        )
        self.generated_tokens = counter("memserve_generated_tokens", "Tokens generated for clients")
        self.rejected = counter("memserve_rejected_requests", "Requests of clients that were rejected before they ran")
        self.picks = _count_of_picks(self.registry)
        self.disconnected = counter(
            "memserve_disconnected_requests", "HTTP requests of clients that left before the end of their answer"
        )
        self.refused = _count_of_refusals(self.registry)
        self.slow_readers = Counter(
            "memserve_http_slow_readers", "Clients that did not take their answers: their requests were cancelled",
            ["ending"], registry=self.registry,
        )  # fmt: skip
        self.kv_hints = _count_of_hints(self.registry)
        self.connections = Gauge("memserve_http_connections", "HTTP connections open now", registry=self.registry)
        self.body_bytes = Gauge(
            "memserve_http_body_bytes", "Bytes of request bodies that are being read or parsed", registry=self.registry
        )
        self.by_tenant = CollectorRegistry()  # shown to readers that may know the tenants
        self.tenant_requests = self._of_tenants("requests", "Generation requests that were answered, by tenant")
        self.tenant_prompt_tokens = self._of_tenants("prompt_tokens", "Prompt tokens of answered requests, by tenant")
        self.tenant_generated_tokens = self._of_tenants("generated_tokens", "Tokens generated for clients, by tenant")
        self.to_first_token = histogram(
            "memserve_time_to_first_token_seconds",
            "Seconds from the request to its first token, at the HTTP edge",
            _FIRST_TOKEN_S,
        )
        self.in_queue = histogram(
            "memserve_queue_seconds", "Seconds that a request waited until it was first computed", _FIRST_TOKEN_S
        )
        self.between_tokens = histogram(
            "memserve_inter_token_seconds", "Seconds between two tokens of one answer, at the HTTP edge", _TOKEN_S
        )
        self.per_token = histogram(
            "memserve_time_per_output_token_seconds",
            "Seconds per output token after the first, mean over a request",
            _TOKEN_S,
        )
        self.whole_request = histogram(
            "memserve_request_seconds", "Seconds from the request to its last token, at the HTTP edge", _REQUEST_S
        )

        self.on_interactive_token: Callable[[int | None, int], None] = lambda _queue_ns, _to_first_token_ns: None
        """Is told of the first token of each request that is not deferrable: as :meth:`first_token`."""

    def first_token(self, to_first_token_ns: int, queue_ns: int | None) -> None:
        """A request that is not deferrable has its first token, after so long, of it ``queue_ns`` in queues."""
        self.to_first_token.observe(to_first_token_ns / NS_PER_S)
        if queue_ns is not None:
            self.in_queue.observe(queue_ns / NS_PER_S)
        self.on_interactive_token(queue_ns, to_first_token_ns)

    def count_http_request(self, route: str, status: int) -> None:
        """An HTTP request was answered with ``status``."""
        self.requests.inc((route, str(status)))

    def count_answer(self, tenant: str, prompt_tokens: int, generated_tokens: int) -> None:
        """A request of ``tenant`` has its answer."""
        label = (tenant,)
        self.tenant_requests.inc(label)
        self.tenant_prompt_tokens.inc(label, prompt_tokens)
        self.tenant_generated_tokens.inc(label, generated_tokens)

    def count_hints(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Hints on KV were given, with these outcomes (:class:`~memserve.api.openai.kv_hints.GivenHints`)."""
        for result in results:
            name = str(result["action_type"]).removeprefix("kv.")
            action = name if name in list(HintAction) else "other"
            self.kv_hints.inc((action, str(result["outcome"])))

    def read_process(self) -> None:
        """Bring the gauges of this process up to date, before they are read."""
        self.resident.set(resident_bytes())

    def render_page(self, engine_stats: Any | None, *, names_tenants: bool = False) -> bytes:
        """The text that Prometheus scrapes; without the engine's metrics when ``engine_stats`` is ``None``.

        ``names_tenants``: the reader may know the names of keys. Else their numbers are summed up.
        """
        self.read_process()
        return b"".join(map(generate_latest, self.registries(engine_stats, names_tenants=names_tenants)))

    def registries(self, engine_stats: Any | None, *, names_tenants: bool) -> list[CollectorRegistry]:
        """What :meth:`render_page` shows."""
        registry = CollectorRegistry()
        registry.register(Snapshot(engine_stats, names_tenants))
        return [self.registry, registry, *([self.by_tenant] if names_tenants else [])]

    def _of_tenants(self, name: str, text: str) -> LabelledTally:
        return LabelledTally(f"memserve_tenant_{name}", text, ["tenant"], self.by_tenant)

    def _new_counter(self, name: str, text: str) -> Tally:
        return Tally(COUNTER, name, text, self.registry)

    def _new_histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Spread:
        return Spread(name, text, buckets, self.registry)


#: name, kind, help, how to read it from ``EngineStats``
ENGINE_METRICS: Table = [
    ("steps", COUNTER, "Steps executed by the device", "steps"),
    ("scheduler_seconds", COUNTER, "Seconds that the scheduler has computed", lambda s: s.machine_ns / NS_PER_S),
    ("device_seconds", COUNTER, "Seconds that the device has worked", lambda s: s.device_ns / NS_PER_S),
    (
        "scheduler_time_share",
        GAUGE,
        "Share of the scheduler's time in the device's time (0.01 is 1 %)",
        "scheduler_share",
    ),
    (
        "scheduler_step_seconds",
        GAUGE,
        "Median seconds of the scheduler for one step, over the last 512 steps",
        lambda s: s.machine_step_ns / NS_PER_S,
    ),
    (
        "device_step_seconds",
        GAUGE,
        "Median seconds of the device for one step, over the last 512 steps",
        lambda s: s.device_step_ns / NS_PER_S,
    ),
]

#: from ``InstanceStats``, beside those that its fields declare
POOL_METRICS: Table = [
    (
        "pool_internal_fragmentation_tokens",
        GAUGE,
        "Token positions held by running sequences that hold no token yet",
        "internal_fragmentation_tokens",
    ),
    (
        "pool_external_fragmentation_pages",
        GAUGE,
        "Free pages that no request for a block can have",
        lambda s: s.hbm.pages_stranded + s.dram.pages_stranded,
    ),
    (
        "pool_external_fragmentation_share",
        GAUGE,
        "Share of free pages (0 to 1) that no request for a block can have",
        "external_fragmentation",
    ),
    (
        "pool_token_state_share",
        GAUGE,
        "Share of held token positions (0 to 1) that hold the state of a token",
        lambda s: s.running_tokens / s.running_slots_tokens if s.running_slots_tokens else 1.0,
    ),
]


class Snapshot:
    """One reading of the engine, as Prometheus wants it."""

    def __init__(self, stats: Any | None, names_tenants: bool) -> None:
        self._stats = stats
        self._names_tenants = names_tenants

    def describe(self) -> list[Metric]:
        """Empty: the registry calls it when the collector registers, and the values are read later."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this reading."""
        up = GaugeMetricFamily("memserve_engine_up", "1 while the engine answers, 0 while it does not")
        up.add_metric([], 0.0 if self._stats is None else 1.0)
        yield up
        if self._stats is None:
            return
        yield from families(ENGINE_METRICS, [((), self._stats)])
        if self._stats.instance is not None:
            table = declared(type(self._stats.instance), is_engine=True) + POOL_METRICS
            yield from families(table, [((), self._stats.instance)])
            yield from _tiers(self._stats.instance)
            yield from objective_families("", "the engine", (), [((), self._stats.instance)])
            yield from layer_families("", "the engine", (), [((), self._stats.instance)])
        if getattr(self._stats, "cluster", None) is not None:
            yield from cluster_families(self._stats, self._names_tenants)


def _tiers(instance: Any) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "memserve_pool_blocks", "KV blocks of the engine by tier and state", labels=["tier", "state"]
    )
    for tier in ("hbm", "dram"):
        report = getattr(instance, tier)
        used = report.blocks_total - report.blocks_free - report.blocks_cached
        for state, count in (("free", report.blocks_free), ("cached", report.blocks_cached), ("used", used)):
            blocks.add_metric([tier, state], count)
    yield blocks
    yield block_bytes_family("pool_", "the engine", (), [((), instance)])
    yield preemption_family("", "the engine", (), [((), instance)])
