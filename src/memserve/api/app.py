"""The HTTP application: routes and what they share."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve.api.anthropic.endpoint import MessagesRoutes
from memserve.api.batches.routes import open_batches, waiting_of
from memserve.api.batches.runner import BatchRunner
from memserve.api.http.config import ApiConfig, EdgeConfig
from memserve.api.http.errors import model_not_found, shutting_down
from memserve.api.http.limits import Edge
from memserve.api.http.middleware import ApiKeys, Cors, Guard, KeyRing, LineWriter, RequestLog, json_page, on_http_error
from memserve.api.metrics.http import ApiMetrics
from memserve.api.metrics.traces import Traces, open_traces
from memserve.api.openai.adapters import AdapterRoutes
from memserve.api.openai.documents import Documents
from memserve.api.openai.embeddings import Embedder, embedding_routes, without_generation
from memserve.api.openai.endpoints import (
    ChatPlanner,
    CompletionPlanner,
    EndpointParts,
    GenerationEndpoint,
    InvocationsEndpoint,
)
from memserve.api.openai.interfaces import HearingEngine, ModelNames, ServedModel, ServingEngine, TokenNames
from memserve.api.openai.kv_hints import GivenHints
from memserve.api.openai.openapi import openapi
from memserve.api.openai.paths import OwnerOnly, Probes, TrailingSlashes
from memserve.api.openai.prefixes import DocumentRoutes, HintRoutes, SessionRoutes
from memserve.api.openai.relevance import RelevanceRoutes
from memserve.api.openai.request.prompts import PromptEncoder
from memserve.api.openai.response.formats import ChatShape, CompletionShape
from memserve.api.openai.response.responders import ChoicesWriter
from memserve.api.openai.responses.endpoint import ResponsesRoutes
from memserve.api.openai.streams import Hub
from memserve.api.openai.tokens import TokenRoutes
from memserve.api.ui.feed import EngineSource, PageFeed
from memserve.api.ui.pages import Dashboard
from memserve.api.ui.timelines import Timelines, Watch
from memserve.base.types import RequestLogFormat
from memserve.model.loading.lora import Adapter
from memserve.system.loop import EngineStopped


class _Pages:
    """The routes that do not generate."""

    def __init__(
        self, hub: Hub, model: ServedModel, names: ModelNames, metrics: ApiMetrics, metrics_keys: KeyRing
    ) -> None:
        self._hub, self._model, self._names, self._metrics = hub, model, names, metrics
        self._metrics_keys = metrics_keys
        self._created_s = int(time.time())

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.get_model),
            Route("/health", self.check_health),
            Route("/metrics", self.get_metrics),
            Route("/openapi.json", self.get_openapi),
            *Probes(self.check_health, lambda: self._hub.calls_open, self._metrics_keys).routes(),
        ]

    def _model_card(self, name: str | None = None, adapter: Adapter | None = None) -> dict[str, Any]:
        of_adapter = {} if adapter is None else {"root": adapter.root, "parent": self._model.name}
        return {
            "id": name or self._model.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "memserve",
            "root": self._model.name,
            "parent": None,
            "max_model_len": self._model.max_model_tokens,
            **of_adapter,
        }

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        return json_page({"object": "list", "data": self.model_cards()})

    def model_cards(self) -> list[dict[str, Any]]:
        """Of all names that are shown, and of adapters."""
        cards = [self._model_card(name) for name in self._names.shown]
        return cards + [self._model_card(adapter.name, adapter) for adapter in self._names.adapters]

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``; names may contain slashes."""
        name = request.path_params["name"]
        if name not in self._names:
            raise model_not_found(name, self._names.served)
        adapter = self._names.find_adapter(name)
        return json_page(self._model_card() if adapter is None else self._model_card(adapter.name, adapter))

    async def check_health(self, request: Request) -> Response:
        """``GET /health``: 200 while the engine answers and could run a request."""
        if self._hub.draining or self._hub.engine.closing:
            raise shutting_down()
        state = await self.state_text()
        named = {"model": self._model.name} if state == "ok" else {}
        return json_page({"status": state, **named}, 200 if named else 503)

    async def state_text(self) -> str:
        """``ok``, or why no request could run."""
        stats = await self.engine_stats()
        if stats is None:
            return "engine does not answer"
        return "ok" if getattr(stats, "serving", True) else "no instance takes requests"

    async def get_openapi(self, request: Request) -> Response:
        """``GET /openapi.json``: the API described."""
        return json_page(openapi())

    async def get_metrics(self, request: Request) -> Response:
        """``GET /metrics`` in Prometheus' text form. Names tenants only where it requires a key."""
        keys = self._metrics_keys
        keys.tenant_of(request.headers.get("authorization"))
        page = self._metrics.render_page(await self.engine_stats(), names_tenants=not keys.is_open)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def engine_stats(self) -> Any | None:
        """None: the engine does not answer."""
        try:
            return await asyncio.to_thread(self._hub.engine.stats)
        except (TimeoutError, EngineStopped):
            return None


Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


class BelowRoot:
    """Serves every path below ``root`` as well."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"][len(self._root) :]}
        await self._app(scope, receive, send)


class Application(Starlette):
    """Starlette without its outermost layer: the :class:`Guard` has an answer for every error."""

    def __init__(
        self, routes: Sequence[Route], middleware: Sequence[Middleware], lifespan: Lifespan | None = None
    ) -> None:
        super().__init__(
            routes=routes, middleware=middleware, exception_handlers={HTTPException: on_http_error}, lifespan=lifespan
        )
        self.router.redirect_slashes = False

    def build_middleware_stack(self) -> ASGIApp:
        """As :attr:`user_middleware` says."""
        stack = super().build_middleware_stack()
        return stack.app if isinstance(stack, ServerErrorMiddleware) else stack


class FixedPaths:
    """ASGI middleware: the application of a path without a pattern is looked up. Starlette tries the patterns of its
    routes one after the other, and catches errors of its own that these applications do not raise."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        """``routes``: with ASGI applications behind them, not functions."""
        self._app = app
        self._fixed_apps = {
            (method, route.path): route.app
            for route in routes
            for method in route.methods or ()
            if not route.param_convertors and not inspect.isroutine(route.endpoint)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fixed_app = self._fixed_apps.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (fixed_app or self._app)(scope, receive, send)


async def no_application(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a path that leads nowhere. Raises :class:`HTTPException` 404."""
    raise HTTPException(404)


def request_log(kind: RequestLogFormat, model: str, closing: ExitStack) -> list[Middleware]:
    """The middleware that logs requests, or none; ``closing`` ends its thread."""
    if kind is RequestLogFormat.NONE:
        return []
    writer = LineWriter(sys.stderr)
    closing.callback(writer.close)
    return [Middleware(RequestLog, kind=kind, model=model, writer=writer)]


def _named_prefixes(shared: EndpointParts, names: ModelNames, documents: Documents) -> list[Route]:
    document_routes, sessions = DocumentRoutes(shared, names, documents), SessionRoutes(shared.hub.engine)
    hints = HintRoutes(shared, names, documents)
    return [
        Route("/v1/documents", document_routes.list_documents),
        Route("/v1/documents/{document_id}", document_routes.put_document, methods=["PUT"]),
        Route("/v1/documents/{document_id}", document_routes.get_document),
        Route("/v1/documents/{document_id}", document_routes.delete_document, methods=["DELETE"]),
        Route("/v1/sessions", sessions.list_sessions),
        Route("/v1/sessions/{name:path}", sessions.delete_session, methods=["DELETE"]),
        Route("/v1/kv_hints", hints.post_hints, methods=["POST"]),
        Route("/v1/kv_hints/{message_id:path}", hints.get_hints),
    ]


def _generation_routes(
    shared: EndpointParts,
    names: ModelNames,
    aliases: Sequence[str],
    tokens: TokenNames,
    documents: Documents,
    config: ApiConfig,
) -> list[Route]:
    of_model = (shared.model, names, shared.encoder, documents, config)
    embedder = Embedder(shared)
    chats = ChatPlanner(*of_model)
    chat = GenerationEndpoint(shared, chats, partial(ChoicesWriter, ChatShape(tokens)))
    completion_writer = partial(ChoicesWriter, CompletionShape(tokens))
    completions = GenerationEndpoint(shared, CompletionPlanner(*of_model), completion_writer)
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/invocations", InvocationsEndpoint(shared.edge, {b'"messages"': chat}, completions), methods=["POST"]),
        *TokenRoutes(shared, names).routes(),
        *MessagesRoutes(shared, chats, names).routes(),
        *RelevanceRoutes(shared, names, config.reranker, aliases, embedder).routes(),
        *embedding_routes(shared, names, embedder),
        *ResponsesRoutes(shared, chats, names, ChatShape(tokens)).routes(),
    ]
    return routes if shared.model.pooling is None else without_generation(routes, shared)


def _count_waiting(engine: ServingEngine) -> int:
    return waiting_of(engine.stats())


def _timelines(model: str, traces: Traces | None, otlp_endpoint: str, closing: ExitStack) -> Timelines:
    """Timelines that traces are made of, if there are any; ``closing`` ends those."""
    if traces is None and otlp_endpoint:
        traces = open_traces(otlp_endpoint)
    if traces is None:
        return Timelines(model)
    closing.callback(traces.close)
    return Timelines(model, traces.on_request_end)


def _lifespan(engine: ServingEngine, feed: PageFeed, closing: ExitStack, batches: BatchRunner | None) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with closing:
            if isinstance(engine, HearingEngine):  # to hand each message over from a thread costs as much as a message
                engine.receive_messages_in(asyncio.get_running_loop())
                closing.callback(engine.receive_messages_in, None)
            closing.callback(asyncio.create_task(feed.keep_moments()).cancel)
            if batches is not None:
                batches.start()
            yield
            if batches is not None:
                await batches.stop()

    return lifespan


def create_app(
    engine: ServingEngine,
    model: ServedModel,
    *,
    aliases: Sequence[str] = (),
    further_names: Sequence[str] = (),
    adapters: Sequence[Adapter] = (),
    api_keys: ApiKeys = (),
    metrics_keys: ApiKeys = (),
    limits: EdgeConfig | None = None,
    config: ApiConfig | None = None,
    traces: Traces | None = None,
    batches_folder: Path | None = None,
    lora_folder: Path | None = None,
    edge: Edge | None = None,
) -> Application:
    """The OpenAI API in front of ``engine``. A server drains ``app.state.hub`` and applies ``app.state.edge``'s limits.

    Clients may ask for ``model`` by its name, by one of ``further_names``, which are listed as well, or by one of
    ``aliases``; answers carry its name. Each of ``adapters`` is asked for by its own. ``GET /metrics`` requires one of
    ``metrics_keys``, and names tenants; none: it is open and names none. ``traces``: closed with the application;
    ``None``: as ``config.otlp_endpoint`` says. ``batches_folder``: of files and batches, ``lora_folder``: of adapters
    that may be loaded; ``None``: none. ``edge``: of the server, where several applications share it; ``None``: its own,
    with ``limits``. Raises :class:`UserError` for malformed keys, and for traces without a package.
    """
    limits, config = limits or EdgeConfig(), config or ApiConfig()
    metrics, trusts_content = ApiMetrics(), config.trust_content_tokens
    encoder = PromptEncoder(model, trusts_content=trusts_content, tokens_max=config.embedding_tokens_max)
    hub, edge = Hub(engine, metrics, limits.stream_buffer_bytes), edge or Edge(limits, metrics)
    tokens, names = TokenNames(encoder.tokenizer), ModelNames(model.name, aliases, further_names, adapters)
    keys, operators, closing = KeyRing(api_keys), KeyRing(metrics_keys), ExitStack()
    pages = _Pages(hub, model, names, metrics, operators)
    timelines = _timelines(model.name, traces, config.otlp_endpoint, closing)
    feed = PageFeed(EngineSource(hub, model.name), metrics, timelines)
    dashboard = Dashboard(feed, timelines, keys, operators)
    shared, documents = EndpointParts(hub, model, encoder, metrics, edge, GivenHints()), Documents()
    closing.callback(encoder.close)

    generating = _generation_routes(shared, names, aliases, tokens, documents, config)
    behind_guard = Guard(FixedPaths(no_application, generating), keys, metrics)
    count_waiting = partial(_count_waiting, engine)
    batches, batch_routes = open_batches(batches_folder, edge, count_waiting, behind_guard, [metrics])
    prefix_routes = _named_prefixes(shared, names, documents)
    adapter_routes = AdapterRoutes(engine, names, lora_folder, edge, keys, operators).routes()
    routes = [*generating, *pages.routes(), *prefix_routes, *batch_routes, *adapter_routes, *dashboard.routes()]
    layers = [
        *([Middleware(BelowRoot, root=config.root_path)] if config.root_path else []),
        Middleware(TrailingSlashes, routes=routes),
        *request_log(limits.log_requests, model.name, closing),
        Middleware(Watch, timelines=timelines),
        *([Middleware(Cors, origins=limits.cors_origins)] if limits.cors_origins else []),
        Middleware(Guard, keys=keys, metrics=metrics),
        Middleware(OwnerOnly, hub=hub, edge=edge),
        Middleware(FixedPaths, routes=generating),
    ]
    app = Application(routes, layers, _lifespan(engine, feed, closing, batches))
    app.state.hub, app.state.edge, app.state.metrics = hub, edge, metrics
    app.state.names, app.state.pages, app.state.feed = names, pages, feed
    app.state.behind_guard, app.state.count_waiting = behind_guard, count_waiting
    return app
