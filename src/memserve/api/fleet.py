"""The HTTP application in front of engines of other projects."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from memserve.api.app import request_log
from memserve.api.auth import ApiKeys, KeyRing
from memserve.api.config import EdgeConfig
from memserve.api.edge import Edge
from memserve.api.errors import model_not_found, shutting_down
from memserve.api.fleet_engines import Engines
from memserve.api.fleet_metrics import FleetSnapshot
from memserve.api.fleet_relay import Relay
from memserve.api.guard import Cors, Guard, on_http_error
from memserve.api.metrics import ApiMetrics
from memserve.api.probes import Probes, TrailingSlashes
from memserve.api.ui.feed import Feed
from memserve.api.ui.fleet_source import FleetSource
from memserve.api.ui.pages import Dashboard
from memserve.api.ui.timelines import Timelines, Watch
from memserve.runtime.fleet import FleetHost
from memserve.runtime.private_files import Followed

SILENCE_S = 600.0
"""How long an engine may say nothing in the middle of a request, by default."""


class _Pages:
    """The routes that do not generate."""

    def __init__(self, host: FleetHost, relay: Relay, metrics: ApiMetrics, metrics_keys: KeyRing) -> None:
        self._host, self._relay, self._metrics, self._metrics_keys = host, relay, metrics, metrics_keys
        self._created_s = int(time.time())

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created_s, "owned_by": "memserve"}

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``: of all engines."""
        return _json({"object": "list", "data": [self._card(name) for name in self._host.machine.models()]})

    async def model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``; names may contain slashes."""
        name, models = request.path_params["name"], self._host.machine.models()
        if name not in models:
            raise model_not_found(name, ", ".join(models))
        return _json(self._card(name))

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while an engine takes requests."""
        if self._relay.draining:
            raise shutting_down()
        views = self._host.machine.engines()
        is_up = any(view.up for view in views)
        status = "ok" if is_up else "no engine takes requests"
        return _json({"status": status, "engines": {view.name: view.up for view in views}}, 200 if is_up else 503)

    async def metrics(self, request: Request) -> Response:
        """``GET /metrics`` in Prometheus' text form."""
        self._metrics_keys.tenant(request.headers.get("authorization"))
        registry = CollectorRegistry()
        registry.register(FleetSnapshot(self._host.machine.engines(), self._host.machine.admission()))
        self._metrics.read_process()
        page = generate_latest(self._metrics.registry) + generate_latest(registry)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def create_fleet_app(
    host: FleetHost,
    *,
    api_keys: ApiKeys = (),
    metrics_keys: ApiKeys = (),
    engines_key: str | Followed[str] | None = None,
    limits: EdgeConfig | None = None,
    silence_s: float = SILENCE_S,
) -> Starlette:
    """The OpenAI API in front of the engines of ``host``, which starts and ends with it.

    ``engines_key``: with it engines join and leave; ``None``: they do not. ``silence_s``: seconds that an engine may
    say nothing in the middle of a request. Raises :class:`UserError` for malformed keys.
    """
    limits = limits or EdgeConfig()
    metrics = ApiMetrics()
    edge, keys = Edge(limits, metrics), KeyRing(api_keys)
    relay = Relay(host, edge, metrics, silence_s, not keys.is_open)
    operators, timelines = KeyRing(metrics_keys), Timelines("")
    pages = _Pages(host, relay, metrics, operators)
    dashboard = Dashboard(Feed(FleetSource(host, relay), metrics, timelines), timelines, keys, operators)
    closing = ExitStack()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with closing:
            await host.start()
            try:
                yield
            finally:
                await host.close()

    routes = [
        Route("/v1/completions", relay, methods=["POST"]),
        Route("/v1/chat/completions", relay, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        *Probes(pages.health, lambda: relay.calls_open, operators).routes(),
        *Engines(host, engines_key).routes(),
        *dashboard.routes(),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(TrailingSlashes, routes=routes),
            *request_log(limits.log_requests, "", closing),
            Middleware(Watch, timelines=timelines),
            Middleware(Cors, origins=limits.cors_origins),
            Middleware(Guard, keys=keys, metrics=metrics),
        ],
        exception_handlers={HTTPException: on_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.hub, app.state.edge = relay, edge
    return app
