"""One application in front of several models, each with its own (:func:`memserve.api.app.create_app`).

A request goes to the model that it names: in its body, or with ``?model=`` in its address, as the dashboard does. One
that names none is the first model's; if that does not know an id in the path, the others are asked. Models, health,
metrics and load are those of all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.app import Application, BelowRoot
from memserve.api.batches.routes import open_batches
from memserve.api.http.config import ApiConfig
from memserve.api.http.errors import ApiError, model_not_found, shutting_down
from memserve.api.http.limits import TENANT_KEY, Edge, header
from memserve.api.http.middleware import ApiKeys, Guard, KeyRing, is_work, send_error
from memserve.api.http.server import Calls
from memserve.api.metrics.http import is_of_process
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.paths import Probes, TrailingSlashes

_BY_ID = (
    "/v1/responses/", "/v1/documents/", "/v1/sessions/", "/v1/kv_hints/", "/v1/chat/completions/", "/ui/requests/",
)  # fmt: skip
"""Paths below which an id stands that one model knows."""


class _Named(msgspec.Struct):
    """What the front reads of a body."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One model's application."""

    name: str
    app: Application
    """Of :func:`memserve.api.app.create_app`, which leaves in its state what is used here."""

    @property
    def names(self) -> ModelNames:
        """By which clients may ask for it."""
        names: ModelNames = self.app.state.names
        return names


class _AllCalls:
    """The requests of all models, as a server sees them."""

    def __init__(self, parts: Callable[[], Sequence[ModelPart]]) -> None:
        self._parts, self._draining = parts, False

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for hub in self._hubs():
            hub.draining = value

    @property
    def calls_open(self) -> int:
        return sum(hub.calls_open for hub in self._hubs())

    def end_all(self) -> int:
        return sum(hub.end_all() for hub in self._hubs())

    def _hubs(self) -> list[Calls]:
        return [part.app.state.hub for part in self._parts()]


class ModelFront:
    """An ASGI application, which a server drains and limits by its ``state`` like that of one model."""

    def __init__(
        self,
        parts: Sequence[ModelPart],
        edge: Edge,
        *,
        api_keys: ApiKeys = (),
        metrics_keys: ApiKeys = (),
        config: ApiConfig | None = None,
        batches_folder: Path | None = None,
    ) -> None:
        """``parts``: the default first, each made with ``edge``. The rest: as of
        :func:`memserve.api.app.create_app`."""
        self.parts = list(parts)
        for part in parts:
            part.app.state.feed.list_models = lambda: [part.name for part in self.parts]
        self.state = State({"hub": _AllCalls(lambda: self.parts), "edge": edge})
        self._edge, self._keys = edge, KeyRing(api_keys)
        self._batches, batch_routes = open_batches(
            batches_folder, edge, self._count_waiting, self._answer_line, [part.app.state.metrics for part in parts]
        )
        pages = _AllPages(self, KeyRing(metrics_keys))
        routes = [*pages.routes(), *batch_routes]
        root = [] if config is None or not config.root_path else [Middleware(BelowRoot, root=config.root_path)]
        all_pages = Application(routes, [Middleware(Guard, keys=self._keys, metrics=edge.metrics)])
        self._own_app: ASGIApp = TrailingSlashes(all_pages, routes)
        self._own_paths = [route.path_regex for route in routes]
        self._app: ASGIApp = self._route_request
        for middleware in root:
            self._app = middleware.cls(self._app, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        else:
            await self._app(scope, receive, send)

    def find_part(self, name: str) -> ModelPart | None:
        """The model of a name that a client uses. None: there is none."""
        return next((part for part in self.parts if name in part.names), None)

    def unknown_model(self, name: str) -> ApiError:
        """404, which says what there is."""
        return model_not_found(name, ", ".join(part.name for part in self.parts))

    # -- where a request goes

    async def _route_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.parts[0].app(scope, receive, send)
            return
        path = scope["path"]
        if any(pattern.match(path.rstrip("/") or "/") for pattern in self._own_paths):
            await self._own_app(scope, receive, send)
            return
        try:
            name, receive = await self._named_model(scope, receive)
        except ApiError as error:
            await send_error(scope, send, error)
            return
        part = self.find_part(name) if name is not None else self.parts[0]
        if part is None:
            await send_error(scope, send, self.unknown_model(name or ""))
        elif name is None and path.startswith(_BY_ID):
            await self._ask_in_turn(scope, receive, send)
        else:
            await part.app(scope, receive, send)

    async def _named_model(self, scope: Scope, receive: Receive) -> tuple[str | None, Receive]:
        """The model that a request names, and its body to be read again. Reads none of clients without a key."""
        if query := scope.get("query_string"):
            names = parse_qs(query.decode("latin-1")).get("model")
            if names:
                return names[0], receive
        is_json = (header(scope, b"content-type") or "").partition(";")[0].strip().lower() == "application/json"
        if scope["method"] not in ("POST", "PUT") or not is_json or not self._may_read(scope):
            return None, receive
        body, receive = await _read_body(scope, receive, self._edge)
        return _model_in(body), receive

    def _may_read(self, scope: Scope) -> bool:
        if TENANT_KEY in scope or not is_work(scope["path"]):
            return True
        key = header(scope, b"x-api-key")
        try:
            self._keys.tenant_of(header(scope, b"authorization") or (None if key is None else f"Bearer {key}"))
        except ApiError:  # the model's application says so
            return False
        return True

    async def _ask_in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first model that knows the id answers; if none does, the last one says so."""
        body, receive = await _read_body(scope, receive, self._edge)
        for part in self.parts[:-1]:
            answer = _HeldAnswer(send)
            await part.app(dict(scope), _replay(body, receive), answer.send)
            if not answer.is_unknown:
                return
        await self.parts[-1].app(scope, _replay(body, receive), send)

    async def _answer_line(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A line of a batch, which names its model."""
        body, receive = await _read_body(scope, receive, self._edge)
        name = _model_in(body)
        part = self.find_part(name) if name is not None else self.parts[0]
        if part is None:
            await send_error(scope, send, self.unknown_model(name or ""))
        else:
            await part.app.state.behind_guard(scope, receive, send)

    def _count_waiting(self) -> int:
        return sum(part.app.state.count_waiting() for part in self.parts)

    # -- start and end

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self._running():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": repr(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in self.parts:
                await stack.enter_async_context(part.app.router.lifespan_context(part.app))
            if self._batches is not None:
                self._batches.start()
                stack.push_async_callback(self._batches.stop)
            yield


class _AllPages:
    """The routes that speak of all models."""

    def __init__(self, front: ModelFront, metrics_keys: KeyRing) -> None:
        self._front, self._metrics_keys = front, metrics_keys

    def routes(self) -> list[Route]:
        """All of them."""
        probes = Probes(self.check_health, lambda: self._front.state.hub.calls_open, self._metrics_keys).routes()
        return [
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.get_model),
            Route("/health", self.check_health),
            Route("/metrics", self.get_metrics),
            *(route for route in probes if route.path in ("/ping", "/load")),
        ]

    async def list_models(self, request: Request) -> Response:
        """``GET /v1/models``."""
        cards = [card for part in self._front.parts for card in part.app.state.pages.model_cards()]
        return _json({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        """``GET /v1/models/{id}``."""
        name = request.path_params["name"]
        part = self._front.find_part(name)
        if part is None:
            raise self._front.unknown_model(name)
        answer: Response = await part.app.state.pages.get_model(request)
        return answer

    async def check_health(self, request: Request) -> Response:
        """``GET /health``: 200 while one of the models can be asked; says which."""
        if self._front.state.hub.draining:
            raise shutting_down()
        states = {part.name: await part.app.state.pages.state_text() for part in self._front.parts}
        is_ok = "ok" in states.values()
        return _json({"status": "ok" if is_ok else "no model answers", "models": states}, 200 if is_ok else 503)

    async def get_metrics(self, request: Request) -> Response:
        """``GET /metrics``: of each model with its name as a label; of the process once."""
        self._metrics_keys.tenant_of(request.headers.get("authorization"))
        names_tenants = not self._metrics_keys.is_open
        metrics = self._front.state.edge.metrics
        metrics.read_process()
        by_name = {metric.name: metric for metric in metrics.registry.collect() if is_of_process(metric)}
        for part in self._front.parts:
            stats = await part.app.state.pages.engine_stats()
            for registry in part.app.state.metrics.registries(stats, names_tenants=names_tenants):
                _add_families(by_name, registry, part.name)
        registry = CollectorRegistry()
        registry.register(_Families(list(by_name.values())))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")


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


def _add_families(by_name: dict[str, Metric], registry: CollectorRegistry, model: str) -> None:
    for metric in registry.collect():
        if is_of_process(metric):
            continue
        family = by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        family.samples += [sample._replace(labels={"model": model, **sample.labels}) for sample in metric.samples]


class _HeldAnswer:
    """Passes an answer on, unless it says that nothing of that name is known."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_unknown = send, False

    async def send(self, message: Message) -> None:
        """As of ASGI."""
        if message["type"] == "http.response.start" and message["status"] == 404:
            self.is_unknown = True
        if not self.is_unknown:
            await self._send(message)


async def _read_body(scope: Scope, receive: Receive, edge: Edge) -> tuple[bytes, Receive]:
    """The body, as far as a server reads any, and ``receive`` from its beginning. Counts in the memory of bodies until
    it is read again. Raises :class:`ApiError` where there is no room."""
    client = scope.get(TENANT_KEY) or (scope.get("client") or ("",))[0]
    body, more, lease = bytearray(), True, edge.bodies.open_lease(client)
    try:
        while more and len(body) <= edge.limits.body_bytes_max:
            message = await receive()
            if message["type"] == "http.disconnect":
                return bytes(body), _replay(None, receive, message)
            body += message.get("body", b"")
            more = message.get("more_body", False)
            lease.grow_to(len(body))
    finally:
        lease.release_bytes()
    return bytes(body), _replay(bytes(body), receive, more_body=more)


def _replay(body: bytes | None, receive: Receive, first: Message | None = None, *, more_body: bool = False) -> Receive:
    """``receive`` that gives ``body`` first (None: ``first``)."""
    message = first if body is None else {"type": "http.request", "body": body, "more_body": more_body}
    waiting: list[Message] = [] if message is None else [message]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def _model_in(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, ValueError, RecursionError):  # the model's application says what is wrong
        return None


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
