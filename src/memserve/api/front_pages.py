"""The pages of :mod:`memserve.api.front` that speak of all models: lists, health, metrics, load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve.api.http.errors import shutting_down
from memserve.api.http.middleware import KeyRing, json_page
from memserve.api.http.server import Calls
from memserve.api.metrics.http import ApiMetrics, is_of_process
from memserve.api.model_table import ASLEEP, ModelPart, ModelTable
from memserve.api.openai.paths import Probes


class AllPages:
    """The routes that speak of all models."""

    def __init__(self, table: ModelTable, calls: Calls, metrics: ApiMetrics, metrics_keys: KeyRing) -> None:
        """``calls``, ``metrics``: of the server."""
        self._table, self._calls, self._metrics, self._metrics_keys = table, calls, metrics, metrics_keys

    def routes(self) -> list[Route]:
        """All of them."""
        probes = Probes(self.check_health, lambda: self._calls.calls_open, self._metrics_keys).routes()
        return [
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.get_model),
            Route("/health", self.check_health),
            Route("/metrics", self.get_metrics),
            *(route for route in probes if route.path in ("/ping", "/load")),
        ]

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        cards = [card for part in self._table.parts for card in part.app.state.pages.model_cards()]
        relayed = self._table.relayed
        return json_page({"object": "list", "data": cards + (relayed.model_cards() if relayed is not None else [])})

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        name, relayed = request.path_params["name"], self._table.relayed
        if relayed is not None and self._table.is_relayed(name):
            return json_page(next(card for card in relayed.model_cards() if card["id"] == name))
        answer: Response = await self._table.part_named(name).app.state.pages.get_model(request)
        return answer

    async def check_health(self, request: Request) -> Response:
        """``GET /health``: 200 while one of the models can be asked; says which, and which servers take requests."""
        if self._calls.draining:
            raise shutting_down()
        states, relayed = await self._table.states(), self._table.relayed
        is_ok = not {"ok", ASLEEP}.isdisjoint(states.values())
        engines = {} if relayed is None else {"engines": relayed.server_states()}
        status = "ok" if is_ok else "no model answers"
        return json_page({"status": status, "models": states, **engines}, 200 if is_ok else 503)

    async def get_metrics(self, request: Request) -> Response:
        """``GET /metrics``: of each model with its name as a label; of other servers and of the process without."""
        self._metrics_keys.tenant_of(request.headers.get("authorization"))
        # a page that needs no key tells no names of tenants
        names_tenants = not self._metrics_keys.is_open
        self._metrics.read_process()
        by_name = {metric.name: metric for metric in self._metrics.registry.collect() if is_of_process(metric)}
        for part in self._table.parts:
            stats = await part.app.state.pages.engine_stats()
            for registry in part.app.state.metrics.registries(stats, names_tenants=names_tenants):
                _add_families(by_name, registry, {"model": part.name})
        for registry in [] if self._table.relayed is None else self._table.relayed.registries():
            _add_families(by_name, registry, {})
        registry = CollectorRegistry()
        registry.register(_Families([*by_name.values(), *_sleep_families(self._table.parts)]))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


def _sleep_families(parts: Sequence[ModelPart]) -> list[Metric]:
    asleep = GaugeMetricFamily(
        "memserve_model_asleep", "1 while the model sleeps: its instances have ended", labels=["model"]
    )
    wakes = CounterMetricFamily("memserve_model_wakes", "Times that the model was woken by a request", labels=["model"])
    seconds = GaugeMetricFamily(
        "memserve_model_wake_seconds", "Seconds that the model took to wake last", labels=["model"]
    )
    for part in parts:
        if part.sleep is not None:
            asleep.add_metric([part.name], float(part.sleep.is_asleep))
            wakes.add_metric([part.name], part.sleep.wakes)
            seconds.add_metric([part.name], part.sleep.wake_s)
    return [asleep, wakes, seconds]


class _Families:
    """Families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        """Empty: nothing is checked against other collectors, of which there are none."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._families


def _add_families(by_name: dict[str, Metric], registry: CollectorRegistry, labels: dict[str, str]) -> None:
    for metric in registry.collect():
        # each model's registry has them, and they are of one process
        if is_of_process(metric):
            continue
        family = by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        family.samples += [sample._replace(labels={**labels, **sample.labels}) for sample in metric.samples]
