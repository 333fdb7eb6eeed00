"""The HTTP application in front of engines of other projects.

``/engines``: which engines a fleet has; one joins, one leaves. It has a key of its own: what joins reads prompts.

``/metrics`` of a fleet: engines of other projects, and the admission before them.

What the pages of a fleet show: its engines, as ``/metrics`` tells of them.

The same behind one front with models of the server's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve.api.app import Application, FixedPaths, no_application, request_log
from memserve.api.http.config import EdgeConfig
from memserve.api.http.errors import ApiError, bad_request, model_not_found, shutting_down
from memserve.api.http.limits import Edge
from memserve.api.http.middleware import ApiKeys, Cors, Guard, KeyRing, json_page
from memserve.api.metrics.families import COUNTER, GAUGE, Table, admission_families, families, with_old_names
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.paths import Probes, TrailingSlashes, redirect_to_owner
from memserve.api.ui.feed import PageFeed
from memserve.api.ui.pages import Dashboard
from memserve.api.ui.snapshot import MEMBERS_MAX, SnapshotReading
from memserve.api.ui.timelines import Timelines, Watch
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.fleet.host import FleetHost
from memserve.fleet.messages import SILENCE_S, EngineView, read_engine
from memserve.fleet.relay import RELAYED_PATHS, Relay
from memserve.router.placement.prefix_directory import PrefixNode
from memserve.router.report import AdmissionStats
from memserve.system.secrets import Followed

BODY_BYTES_MAX = 4096


class _Join(msgspec.Struct):
    engine: str


class EngineRoutes:
    """The routes below ``/engines``."""

    def __init__(self, host: FleetHost, key: str | Followed[str] | None) -> None:
        """``key`` None: engines are those of the command line."""
        self._host = host
        if key is None:
            self._keys = KeyRing()
        else:
            followed = key if isinstance(key, Followed) else Followed.of_constant(key)
            self._keys = KeyRing(followed.derive_value(lambda key: (f"operator={key}",)))

    def routes(self) -> list[Route]:
        """For the application."""
        return [
            Route("/engines", self.list_engines, methods=["GET"]),
            Route("/engines", self.join_engine, methods=["POST"]),
            Route("/engines/{name:path}", self.remove_engine, methods=["DELETE"]),
        ]

    def _check_key(self, request: Request) -> None:
        if self._keys.is_open:
            message = "Engines join and leave where `memserve serve` has --engine-admin-key-file"
            raise ApiError(403, message, code="engines_are_fixed")
        self._keys.tenant_of(request.headers.get("authorization"))

    def _check_owner(self, request: Request) -> None:
        self._check_key(request)
        if self._host.owner_url is not None:
            raise redirect_to_owner(self._host.owner_url, request.scope, "which engines there are")

    async def list_engines(self, request: Request) -> Response:
        """All of them, and how they are."""
        self._check_key(request)
        return json_page({"engines": [_engine_fields(view) for view in self._host.machine.engine_views()]})

    async def join_engine(self, request: Request) -> Response:
        """``{"engine": "vllm=http://HOST:PORT,..."}``, as ``--engine`` has it. Says how it is at once."""
        self._check_owner(request)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise bad_request("The body of a join is an engine, and short", "engine")
        try:
            spec = read_engine(msgspec.json.decode(body, type=_Join).engine)
        except msgspec.DecodeError:
            raise bad_request('Send {"engine": "vllm=http://HOST:PORT"}', "engine") from None
        await self._host.join_engine(spec)
        view = self._view_of(spec.name)
        return json_page(_engine_fields(view) if view is not None else {"name": spec.name, "up": False})

    async def remove_engine(self, request: Request) -> Response:
        """It gets no new requests, and is gone when its last one has ended."""
        self._check_owner(request)
        name = request.path_params["name"]
        self._host.leave_engine(name)
        view = self._view_of(name)
        return json_page({"name": name, "requests_open": view.requests_open if view is not None else 0})

    def _view_of(self, name: str) -> EngineView | None:
        return next((view for view in self._host.machine.engine_views() if view.name == name), None)


def _engine_fields(view: EngineView) -> dict[str, object]:
    return {
        "name": view.name,
        "kind": view.kind,
        "up": view.up,
        "models": view.models,
        "requests_open": view.requests_open,
        "cached_blocks": view.cached_blocks,
    }


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


class FleetReading:
    """All engines at one moment: a collector of Prometheus, and what the dashboard shows."""

    def __init__(self, engines: Sequence[EngineView], admission: AdmissionStats) -> None:
        self._engines, self._admission = engines, admission

    def describe(self) -> list[Metric]:
        """Empty: the registry calls it when the collector registers, and the values are read later."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with the values of this reading."""
        yield from families(FLEET_METRICS, [((view.name,), view) for view in self._engines], ("engine",))
        yield from with_old_names(admission_families(self._admission, names_tenants=False))

    @property
    def is_answered(self) -> bool:
        """The router itself says it."""
        return True

    def metric_families(self, names_tenants: bool) -> Iterable[Metric]:
        """The fleet's part of ``/metrics``, which names no tenant."""
        return self.collect()

    def tenant_families(self) -> Iterable[Metric]:
        """None: engines of other projects tell nothing by tenant."""
        return ()

    def member_cards(self) -> list[Mapping[str, Any]]:
        """The engines; their hosts are not known."""
        views = self._engines[:MEMBERS_MAX]
        return [
            {"name": view.name, "role": "engine", "state": "live" if view.up else "down", "host": ""} for view in views
        ]


class FleetSource:
    """A router of ``memserve serve --engine``."""

    def __init__(self, host: FleetHost, relay: Relay) -> None:
        self._host, self._relay = host, relay

    @property
    def draining(self) -> bool:
        """Whether the server ends."""
        return self._relay.draining

    @property
    def model(self) -> str:
        """The first name under which requests may ask; empty while no engine has answered."""
        return next(iter(self._host.engines_by_model()), "")

    async def read_snapshot(self) -> SnapshotReading:
        """The machine lives in this loop: nothing is waited for."""
        return FleetReading(self._host.machine.engine_views(), self._host.machine.admission_stats())

    async def prefix_trees(self, tenant: str | None) -> Mapping[str, Sequence[PrefixNode]]:
        """None: the prefixes of a fleet are not kept by prompt."""
        return {}


class _Pages:
    """The routes that do not generate."""

    def __init__(self, host: FleetHost, relay: Relay, metrics: ApiMetrics, metrics_keys: KeyRing) -> None:
        self._host, self._relay, self._metrics, self._metrics_keys = host, relay, metrics, metrics_keys
        self._created_s = int(time.time())

    def _model_card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": "memserve"}

    def model_cards(self) -> list[dict[str, object]]:
        """Of all engines."""
        return [self._model_card(name) for name in self._host.engines_by_model()]

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return json_page({"object": "list", "data": self.model_cards()})

    async def show_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``; names may contain slashes."""
        name, models = request.path_params["name"], self._host.engines_by_model()
        if name not in models:
            raise model_not_found(name, ", ".join(models))
        return json_page(self._model_card(name))

    async def show_health(self, request: Request) -> Response:
        """``GET /health``: 200 while an engine takes requests."""
        if self._relay.draining:
            raise shutting_down()
        views = self._host.machine.engine_views()
        is_up = any(view.up for view in views)
        status = "ok" if is_up else "no engine takes requests"
        return json_page({"status": status, "engines": {view.name: view.up for view in views}}, 200 if is_up else 503)

    async def show_metrics(self, request: Request) -> Response:
        """``GET /metrics`` in Prometheus' text form."""
        self._metrics_keys.tenant_of(request.headers.get("authorization"))
        self._metrics.read_process()
        page = b"".join(map(generate_latest, self.registries()))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    def registries(self) -> list[CollectorRegistry]:
        """What it shows."""
        registry = CollectorRegistry()
        registry.register(FleetReading(self._host.machine.engine_views(), self._host.machine.admission_stats()))
        return [self._metrics.registry, registry]


def create_fleet_app(
    host: FleetHost,
    *,
    api_keys: ApiKeys = (),
    metrics_keys: ApiKeys = (),
    engines_key: str | Followed[str] | None = None,
    limits: EdgeConfig | None = None,
    silence_s: float = SILENCE_S,
    edge: Edge | None = None,
) -> Application:
    """The OpenAI API in front of the engines of ``host``, which starts and ends with it.

    ``engines_key``: with it engines join and leave; ``None``: they do not. ``silence_s``: seconds that an engine may
    say nothing in the middle of a request. ``edge``: of the server, where several applications share it; ``None``: its
    own, with ``limits``. Raises :class:`UserError` for malformed keys.
    """
    limits = limits or EdgeConfig()
    metrics, keys = ApiMetrics(), KeyRing(api_keys)
    edge = edge or Edge(limits, metrics)
    relay = Relay(host, edge, metrics, silence_s, not keys.is_open)
    operators, timelines = KeyRing(metrics_keys), Timelines("")
    pages = _Pages(host, relay, metrics, operators)
    feed = PageFeed(FleetSource(host, relay), metrics, timelines)
    dashboard = Dashboard(feed, timelines, keys, operators)
    closing = ExitStack()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with closing:
            await host.start()
            closing.callback(asyncio.create_task(feed.keep_moments()).cancel)
            try:
                yield
            finally:
                await host.close()

    relayed = [Route(path, relay, methods=["POST"]) for path in RELAYED_PATHS]
    routes = [
        *relayed,
        Route("/v1/responses/{name:path}", relay.find_response, methods=["GET", "POST", "DELETE"]),
        Route("/v1/models", pages.list_models),
        Route("/v1/models/{name:path}", pages.show_model),
        Route("/health", pages.show_health),
        Route("/metrics", pages.show_metrics),
        *Probes(pages.show_health, lambda: relay.calls_open, operators).routes(),
        *EngineRoutes(host, engines_key).routes(),
        *dashboard.routes(),
    ]
    layers = [
        Middleware(TrailingSlashes, routes=routes),
        *request_log(limits.log_requests, "", closing),
        Middleware(Watch, timelines=timelines),
        Middleware(Cors, origins=limits.cors_origins),
        Middleware(Guard, keys=keys, metrics=metrics),
    ]
    app = Application(routes, layers, lifespan)
    app.state.hub, app.state.edge, app.state.metrics, app.state.feed = relay, edge, metrics, feed
    app.state.pages, app.state.behind_guard = pages, Guard(FixedPaths(no_application, relayed), keys, metrics)
    return app


# -- beside models of the server's own, behind one front (:mod:`memserve.api.front`)
#
# Each is limited for itself: own models by their routers' admission and memory; requests for engines by what the HTTP
# server takes of its clients, and by the engines, which queue and refuse. Keys, tenants and bodies are the server's.


def without_admission(config: ClusterConfig) -> ClusterConfig:
    """``config`` of own models for the engines beside them: its admission is not theirs."""
    return replace(config, admission=AdmissionConfig())


class RelayedFleet:
    """As :class:`memserve.api.model_table.RelayedModels` has it."""

    def __init__(self, host: FleetHost, app: Application) -> None:
        """``app``: of :func:`create_fleet_app`, in front of the engines of ``host``."""
        self.host, self._app = host, app

    @property
    def app(self) -> Application:
        """What hands requests on to engines."""
        return self._app

    def model_names(self) -> list[str]:
        """Of all engines, but for names of own models."""
        return list(self.host.engines_by_model())

    def model_cards(self) -> list[dict[str, Any]]:
        """For ``/v1/models``."""
        cards: list[dict[str, Any]] = self._app.state.pages.model_cards()
        return cards

    def model_states(self) -> dict[str, str]:
        """By name; ``ok`` while an engine that has it takes requests."""
        by_model = self.host.engines_by_model()
        return {name: "ok" if engines else "no engine takes requests" for name, engines in by_model.items()}

    def server_states(self) -> dict[str, bool]:
        """By engine: whether it takes requests."""
        return {view.name: view.up for view in self.host.machine.engine_views()}

    def registries(self) -> list[CollectorRegistry]:
        """Of the engines, and of the requests for them."""
        registries: list[CollectorRegistry] = self._app.state.pages.registries()
        return registries

    def count_waiting(self) -> int:
        """Requests that wait in engines, by their own metrics."""
        return sum(view.report.waiting for view in self.host.machine.engine_views())

    def hide_models(self, find_own: Callable[[str], str | None]) -> None:
        """Own models win; each time that hides an engine's model, it is said once."""
        self.host.find_own = find_own
