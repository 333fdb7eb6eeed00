"""One application in front of several models, each with its own (:func:`memserve.api.app.create_app`).

A request goes to the model that it names: in its body, or with ``?model=`` in its address, as the dashboard does. One
that names none is the first model's; if that does not know an id in the path, the others are asked. Models, health,
metrics and load are those of all. Models of servers of other projects have one application together
(:func:`memserve.fleet.app.create_fleet_app`), which hands requests on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.app import Application, BelowRoot
from memserve.api.batches.routes import open_batches
from memserve.api.front_pages import AllPages
from memserve.api.http.config import ApiConfig
from memserve.api.http.errors import ApiError, bad_request, shutting_down
from memserve.api.http.limits import TENANT_KEY, Edge, header
from memserve.api.http.middleware import ApiKeys, Guard, KeyRing, authorization_of, is_work, json_page, send_error
from memserve.api.model_table import ModelPart, ModelTable
from memserve.api.openai.paths import OWNER_ANSWERS, TrailingSlashes
from memserve.base.config import DRAIN_S
from memserve.base.errors import UserError
from memserve.system.secrets import Followed

_BY_ID = (
    "/v1/responses/", "/v1/documents/", "/v1/sessions/", "/v1/kv_hints/", "/v1/chat/completions/", "/ui/requests/",
)  # fmt: skip
"""Paths below which an id stands that one model knows."""


_NO_MODEL = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""What the router answers without the model's instances."""
_LISTS = ("/v1/models/", "/models/")
"""What the owner answers where models come and go: all routers say the same."""
_ENGINES = "/engines"
"""Servers of other projects come and go below it."""
_LOOK_S = 0.05


class _Named(msgspec.Struct):
    """What the front reads of a body."""

    model: str | None = None


class ModelHost(Protocol):
    """What starts and ends models. Its methods block."""

    def open_model(self, text: str) -> ModelPart:
        """Start what ``NAME=PATH[,option=value...]`` says; it is ready when this returns. Raises
        :class:`UserError`."""

    def close_model(self, name: str) -> None:
        """End it; nothing is asked of it any more."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Of clients, and of what reads the metrics; as of :func:`memserve.api.app.create_app`."""

    api: ApiKeys = ()
    metrics: ApiKeys = ()


@dataclass(frozen=True, slots=True)
class ModelAdmin:
    """How models come and go."""

    host: ModelHost
    key: Followed[str]
    """The operator's."""
    drain_s: float = DRAIN_S
    """How long those that go may finish what they have."""


class _AllCalls:
    """The requests of all models, as a server sees them."""

    def __init__(self, table: ModelTable) -> None:
        self._table, self._draining = table, False

    @property
    def draining(self) -> bool:
        return self._draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value
        for hub in self._table.hubs():
            hub.draining = value

    @property
    def calls_open(self) -> int:
        return sum(hub.calls_open for hub in self._table.hubs())

    def end_all(self) -> int:
        return sum(hub.end_all() for hub in self._table.hubs())


class ModelFront:
    """An ASGI application, which a server drains and limits by its ``state`` like that of one model."""

    def __init__(
        self,
        table: ModelTable,
        edge: Edge,
        *,
        keys: ServerKeys | None = None,
        config: ApiConfig | None = None,
        batches_folder: Path | None = None,
        admin: ModelAdmin | None = None,
    ) -> None:
        """``table``: each of its applications made with ``edge``. ``admin``: models come and go while the server runs.
        The rest: as of :func:`memserve.api.app.create_app`."""
        self.table, self._admin, self._changing = table, admin, asyncio.Lock()
        self._running: dict[str, AsyncExitStack] = {}
        for app in table.applications():
            app.state.feed.list_models = table.names
        self.state = State({"hub": _AllCalls(table), "edge": edge})
        keys = keys or ServerKeys()
        self._edge, self._keys = edge, KeyRing(keys.api)
        metrics = [part.app.state.metrics for part in table.parts]
        self._batches, batch_routes = open_batches(
            batches_folder, edge, table.count_waiting, self._answer_line, metrics
        )
        admin_routes = () if admin is None else _AdminRoutes(self, admin.key).routes()
        pages = AllPages(table, self.state.hub, edge.metrics, KeyRing(keys.metrics))
        routes = [*pages.routes(), *batch_routes, *admin_routes]
        all_pages = Application(routes, [Middleware(Guard, keys=self._keys, metrics=edge.metrics)])
        self._own_app: ASGIApp = TrailingSlashes(all_pages, routes)
        self._own_paths = [route.path_regex for route in routes]
        self._app: ASGIApp = self._route_request
        if config is not None and config.root_path:
            self._app = BelowRoot(self._app, config.root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        else:
            await self._app(scope, receive, send)

    # -- where a request goes

    async def _route_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.table.parts[0].app(scope, receive, send)
            return
        path, relayed = scope["path"], self.table.relayed
        if self.table.owners is not None and f"{path}/".startswith(_LISTS):
            await self._ask_owner("The list of models", scope, receive, send)
            return
        if any(pattern.match(path.rstrip("/") or "/") for pattern in self._own_paths):
            await self._own_app(scope, receive, send)
            return
        if relayed is not None and f"{path}/".startswith(f"{_ENGINES}/"):
            await relayed.app(scope, receive, send)
            return
        try:
            name, receive = await self._named_model(scope, receive)
            if name is None and path.startswith(_BY_ID):
                await self._ask_in_turn(scope, receive, send)
            elif self.table.is_owners(name) and (name is not None or _needs_model(scope)):
                feature = "The first model" if name is None else f"The model `{name}`"
                await self._ask_owner(feature, scope, receive, send)
            elif relayed is not None and name is not None and self.table.is_relayed(name):
                await relayed.app(scope, receive, send)
            else:
                part = self.table.part_named(name)
                await _answer_awake(part, part.app, scope, receive, send)
        except ApiError as error:  # of the front itself: a model's application answers its own
            await send_error(scope, send, error)

    async def _ask_owner(self, feature: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Any own model's application checks the request, and hands it on."""
        await self.table.parts[0].app({**scope, OWNER_ANSWERS: feature}, receive, send)

    async def _named_model(self, scope: Scope, receive: Receive) -> tuple[str | None, Receive]:
        """The model that a request names, and its body to be read again. Reads none of clients without a key."""
        # pages have no body in which a model could be named
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
        try:
            self._keys.tenant_of(authorization_of(scope))
        except ApiError:  # the model's application says so
            return False
        return True

    async def _ask_in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The first model that knows the id answers; if none does, the last own one says so."""
        body, receive = await _read_body(scope, receive, self._edge)
        refusal = _HeldAnswer(send)
        for app in self.table.applications():
            answer = _HeldAnswer(send)
            await app(dict(scope), _replay(body, receive), answer.send)
            if not answer.is_unknown:
                return
            # an id that nothing knows is refused in own words, and not in those of another project
            refusal = answer if app is self.table.parts[-1].app else refusal
        for message in refusal.messages:
            await send(message)

    async def _answer_line(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A line of a batch, which names its model."""
        try:
            body, receive = await _read_body(scope, receive, self._edge)
            name, relayed = _model_in(body), self.table.relayed
            if relayed is not None and name is not None and self.table.is_relayed(name):
                await relayed.app.state.behind_guard(scope, receive, send)
                return
            part = self.table.part_named(name)
            await _answer_awake(part, part.app.state.behind_guard, scope, receive, send)
        except ApiError as error:
            await send_error(scope, send, error)

    # -- models that come and go

    async def add_model(self, text: str) -> ModelPart:
        """Start a model, and answer for it. Raises :class:`UserError`."""
        async with self._changing:
            if self._admin is None or self.state.hub.draining:
                raise shutting_down()
            # loading takes minutes, in which the loop answers for the other models
            part = await asyncio.to_thread(self._admin.host.open_model, text)
            part.app.state.feed.list_models = self.table.names
            if self._batches is not None:
                part.app.state.metrics.on_interactive_token = self._batches.note_interactive
            await self._start_part(part)
            self.table.parts.append(part)
            return part

    async def remove_model(self, name: str) -> None:
        """Answer for it no more; what it has may end in its time. Raises :class:`ApiError`, and :class:`UserError` for
        the only model."""
        async with self._changing:
            part = self.table.part_called(name)
            _refuse_shared(part, "go")
            if len(self.table.parts) == 1:
                raise UserError(f"{name} is the only model", hint="add another one first, or end the server")
            # first, so that no new request finds it
            self.table.parts.remove(part)
            drain_s = 0.0 if self._admin is None else self._admin.drain_s
            deadline, hub = time.monotonic() + drain_s, part.app.state.hub
            while hub.calls_open and time.monotonic() < deadline:
                await asyncio.sleep(_LOOK_S)
            hub.draining = True
            hub.end_all()
            await self._running.pop(name).aclose()
            if self._admin is not None:
                await asyncio.to_thread(self._admin.host.close_model, name)

    async def set_asleep(self, name: str, is_asleep: bool) -> ModelPart:
        """Put a model to sleep, or wake it. Raises :class:`ApiError` 409 while requests are open."""
        part = self.table.part_called(name)
        _refuse_shared(part, "sleep")
        if part.sleep is None:
            raise ApiError(
                409, f"The model `{name}` cannot sleep: its instances are not this server's", code="no_sleep"
            )
        if not is_asleep:
            await part.sleep.wake_up()
        elif not await part.sleep.fall_asleep():
            message = f"The model `{name}` cannot sleep: {part.sleep.requests_open} requests are open"
            raise ApiError(409, message, code="model_in_use")
        return part

    # -- start and end

    async def _start_part(self, part: ModelPart) -> None:
        stack = self._running[part.name] = AsyncExitStack()
        await stack.enter_async_context(part.app.router.lifespan_context(part.app))
        if part.sleep is not None:
            stack.callback(asyncio.create_task(part.sleep.watch()).cancel)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            async with self._lifespan():
                await send({"type": "lifespan.startup.complete"})
                await receive()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": repr(error)})
            raise
        await send({"type": "lifespan.shutdown.complete"})

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        try:
            for part in self.table.parts:
                await self._start_part(part)
            if self.table.relayed is not None:
                # under a name that no model can have
                stack, app = self._running.setdefault("", AsyncExitStack()), self.table.relayed.app
                await stack.enter_async_context(app.router.lifespan_context(app))
            if self._batches is not None:
                self._batches.start()
            yield
        finally:
            if self._batches is not None:
                await self._batches.stop()
            for stack in reversed(self._running.values()):
                await stack.aclose()


class _AdminRoutes:
    """Models that come and go, sleep and wake: ``memserve model``."""

    def __init__(self, front: ModelFront, key: Followed[str]) -> None:
        self._front = front
        self._keys = KeyRing(key.derive_value(lambda text: (f"operator={text}",)))

    def routes(self) -> list[Route]:
        """All of them; each needs the key."""
        return [
            Route("/models", self.list_states),
            Route("/models", self.add_model, methods=["POST"]),
            Route("/models/{name:path}/sleep", self.put_to_sleep, methods=["POST"]),
            Route("/models/{name:path}/wake", self.wake_up, methods=["POST"]),
            Route("/models/{name:path}", self.remove_model, methods=["DELETE"]),
        ]

    async def list_states(self, request: Request) -> Response:
        """``GET /models``."""
        self._check_key(request)
        return json_page({"models": [await _model_state(part) for part in self._front.table.parts]})

    async def add_model(self, request: Request) -> Response:
        """``POST /models`` with ``{"model": "NAME=PATH[,option=value...]"}``."""
        self._check_key(request)
        text = _model_in(await request.body())
        if not text:
            raise bad_request("'model' says what to add: NAME=PATH[,option=value...]", "model")
        return json_page(await _model_state(await self._front.add_model(text)))

    async def remove_model(self, request: Request) -> Response:
        """``DELETE /models/{name}``."""
        self._check_key(request)
        await self._front.remove_model(request.path_params["name"])
        return json_page({"name": request.path_params["name"], "removed": True})

    async def put_to_sleep(self, request: Request) -> Response:
        """``POST /models/{name}/sleep``."""
        self._check_key(request)
        return json_page(await _model_state(await self._front.set_asleep(request.path_params["name"], True)))

    async def wake_up(self, request: Request) -> Response:
        """``POST /models/{name}/wake``."""
        self._check_key(request)
        return json_page(await _model_state(await self._front.set_asleep(request.path_params["name"], False)))

    def _check_key(self, request: Request) -> None:
        self._keys.tenant_of(request.headers.get("authorization"))


async def _model_state(part: ModelPart) -> dict[str, Any]:
    waking = {} if part.sleep is None else {"wakes": part.sleep.wakes, "wake_s": round(part.sleep.wake_s, 3)}
    requests = {"requests": part.app.state.hub.calls_open, **waking}
    return {"name": part.name, "source": part.source, "state": await part.state_text(), **requests}


def _refuse_shared(part: ModelPart, what: str) -> None:
    if part.has_routers():
        message = (
            f"The model `{part.name}` cannot {what}: other routers place its requests as well. Models with sleep-after,"
            " and those that were added, are this router's alone"
        )
        raise ApiError(409, message, code="model_shared")


def _needs_model(scope: Scope) -> bool:
    """Whether a request is for a model's instances."""
    return scope["method"] == "POST" and is_work(scope["path"]) and scope["path"] not in _NO_MODEL


async def _answer_awake(part: ModelPart, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """``app`` answers; before that the model is woken, if the request needs it."""
    if part.sleep is None or not _needs_model(scope):
        await app(scope, receive, send)
        return
    try:
        async with part.sleep.in_use() as waited_s:
            await app(scope, receive, send if not waited_s else _send_waking(send, waited_s))
    except UserError as error:
        message = f"The model `{part.name}` sleeps, and does not wake: {error.message}"
        await send_error(scope, send, ApiError(503, message, kind="server_error", code="model_asleep"))


def _send_waking(send: Send, waited_s: float) -> Send:
    field = b"x-memserve-wake-ms", str(round(waited_s * 1000)).encode()

    async def send_with_time(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), field]}
        await send(message)

    return send_with_time


class _HeldAnswer:
    """Passes an answer on, unless it says that nothing of that name is known: that is held."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_unknown = send, False
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        """As of ASGI."""
        if message["type"] == "http.response.start" and message["status"] == 404:
            self.is_unknown = True
        if self.is_unknown:
            self.messages.append(message)
        else:
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
