"""What a path alone decides: probes, tools written for vLLM and people with a browser ask for ``/version``, ``/ping``,
``/load`` and ``/``; paths with a slash at their end; and what a router that is not the owner does not answer itself.

Documents, sessions whose KV is kept, stored responses, hints on KV, files, batches and which adapters there are: all of
it is the owner's alone. A router that is not the owner has the owner answer, and hands uploads and answers on as they
come; where the owner speaks TLS, it says where the owner answers, by a redirect (307).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve import __version__
from memserve.api.http.client import NOT_SENT_BACK, NOT_SENT_ON, HttpCall, HttpFault
from memserve.api.http.errors import ApiError, shutting_down
from memserve.api.http.limits import ClientGone, Edge, json_body, wait_for_disconnect
from memserve.api.http.middleware import KeyRing, json_page
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.openai.interfaces import ServingEngine
from memserve.api.openai.streams import Hub

_PAGE = "/ui"


class Probes:
    """Small pages that both servers have, of instances and of engines of others."""

    def __init__(
        self, health: Callable[[Request], Awaitable[Response]], requests_open: Callable[[], int], metrics_keys: KeyRing
    ) -> None:
        self._health, self._requests_open, self._metrics_keys = health, requests_open, metrics_keys

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/", self.get_front_page),
            Route(f"{_PAGE}/", self.redirect_to_dashboard),
            Route("/version", self.get_version),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self.get_load),
        ]

    async def get_front_page(self, request: Request) -> Response:
        """``GET /``: a browser is led to the dashboard. Others find nothing here."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return RedirectResponse(_PAGE.removeprefix("/"))  # relative: there may be a root path before it

    async def redirect_to_dashboard(self, request: Request) -> Response:
        """``GET /ui/``: its files are named relative to ``/ui``."""
        return RedirectResponse(f"..{_PAGE}")

    async def get_version(self, request: Request) -> Response:
        """``GET /version``: memserve's, in vLLM's form."""
        return json_page({"version": __version__})

    async def get_load(self, request: Request) -> Response:
        """``GET /load``: how many requests are being answered, in vLLM's form. Needs the key of ``/metrics``."""
        self._metrics_keys.tenant_of(request.headers.get("authorization"))
        return json_page({"server_load": self._requests_open()})


class TrailingSlashes:
    """ASGI middleware: a path without parameters is the same with a slash at its end."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._paths = {route.path for route in routes if not route.param_convertors} - {_PAGE}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"][:-1] in self._paths:
            scope = {**scope, "path": scope["path"][:-1]}
        await self._app(scope, receive, send)


_UPLOADS = "/v1/files"
"""Bodies are larger than memory is for: none is read whole here."""
_RELAYED_PATHS = (
    "/v1/documents", "/v1/sessions", "/v1/responses", "/v1/kv_hints", "/v1/batches", _UPLOADS, "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/adapters",
)  # fmt: skip
_RELAYED = b"x-memserve-relayed"
OWNER_ANSWERS = "memserve.owner_answers"
"""In a scope: the owner answers, whatever the path; why it does."""
_SILENCE_S = 600.0
"""How long the owner may say nothing in the middle of a request."""
_FIELDS = ("document", "session_ttl_s", "kv_hints")


def owner_url(engine: ServingEngine) -> str | None:
    """Where the owner answers HTTP; empty: not known. None: this router is the owner, or the only one."""
    url: str | None = getattr(engine, "owner_url", None)
    return url


def owner_field(engine: ServingEngine, data: bytes) -> str | None:
    """The field of a request's body by which it is the owner's. None: this router can answer."""
    if owner_url(engine) is None or not any(f'"{field}"'.encode() in data for field in _FIELDS):
        return None
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # the planner says what is wrong with it
    return next((field for field in _FIELDS if isinstance(body, dict) and body.get(field) is not None), None)


class OwnerOnly:
    """Has the owner answer what some paths ask for."""

    def __init__(self, app: ASGIApp, hub: Hub, edge: Edge) -> None:
        self._app, self._hub, self._edge = app, hub, edge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        url = owner_url(self._hub.engine) if scope["type"] == "http" else None
        if url is None:
            await self._app(scope, receive, send)
            return
        place = f"{scope['path']}/"
        path = next((path for path in _RELAYED_PATHS if place.startswith(f"{path}/")), None)
        path = scope.get(OWNER_ANSWERS) or path
        if path is None or scope["method"] not in ("GET", "DELETE", "POST", "PUT"):  # this one says so, too
            await self._app(scope, receive, send)
        elif scope["method"] in ("GET", "DELETE"):
            await answer_as_owner(self._hub, path, scope, receive, send, b"")
        elif path == _UPLOADS or OWNER_ANSWERS in scope:
            # calls about models may have no body, and the front has read the others up to what they may have
            await answer_as_owner(self._hub, path, scope, receive, send, None)
        else:
            async with json_body(scope, receive, self._edge) as body:
                await answer_as_owner(self._hub, path, scope, receive, send, body)


async def answer_as_owner(
    hub: Hub, feature: str, scope: Scope, receive: Receive, send: Send, body: bytes | None
) -> None:
    """Send the owner's answer to a request with ``body``; None: it is still to come, and handed on piece by piece.
    ``feature``: why it is the owner's.

    Raises :class:`ApiError` where the owner cannot be asked: 307 with TLS, 503 where it does not answer, or its address
    is not known."""
    url = owner_url(hub.engine)
    if not url or not url.startswith("http://") or any(name == _RELAYED for name, _ in scope["headers"]):
        raise redirect_to_owner(url or "", scope, feature)
    if hub.draining:
        raise shutting_down()
    call, upload = HttpCall(url), _Upload(receive)
    if body is not None:
        upload.is_over.set()
    watcher = asyncio.create_task(_abort_on_disconnect(call, upload))
    try:
        query = scope.get("query_string", b"")
        raw_path = scope.get("raw_path") or quote(scope["path"]).encode()  # which not every server gives
        target = (raw_path + (b"?" + query if query else b"")).decode("latin-1")
        own_id = scope.get(REQUEST_ID_KEY)  # our own server gives one to each request; else the client's goes on
        not_sent = NOT_SENT_ON if own_id is None else NOT_SENT_ON | {b"x-request-id"}
        headers = [header for header in scope["headers"] if header[0] not in not_sent]
        headers += [(_RELAYED, b"1")] if own_id is None else [(b"x-request-id", own_id.encode()), (_RELAYED, b"1")]
        await call.send_request(scope["method"], target, headers, upload.pieces() if body is None else body, _SILENCE_S)
        answer_headers = [header for header in call.headers if header[0] not in NOT_SENT_BACK]
        await send({"type": "http.response.start", "status": call.status, "headers": answer_headers})
        async for piece in call.body_pieces(_SILENCE_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except HttpFault as fault:
        if watcher.done() or upload.is_broken:
            raise ClientGone from None
        raise owner_silent(feature, fault.reason) from None  # where it has begun, the connection ends with it
    finally:
        watcher.cancel()
        call.close()


class _Upload:
    """A body that is read only as fast as it is sent on."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        #: nothing of it is read any more
        self.is_over = asyncio.Event()
        #: the client left before its end
        self.is_broken = False

    async def pieces(self) -> AsyncIterator[bytes]:
        """Never empty. Raises :class:`ClientGone`."""
        try:
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    self.is_broken = True
                    raise ClientGone
                if piece := message.get("body"):
                    yield piece
                if not message.get("more_body"):
                    return
        finally:
            self.is_over.set()


async def _abort_on_disconnect(call: HttpCall, upload: _Upload) -> None:
    await upload.is_over.wait()  # both would read
    await wait_for_disconnect(upload.receive)
    call.abort_call("the client left")


def owner_silent(feature: str, reason: str) -> ApiError:
    """503: the owner is not there now."""
    message = f"{feature} is the owner's, which does not answer now: {reason}"
    return ApiError(503, message, kind="server_error", code="owner_silent", headers={"retry-after": "1"})


def redirect_to_owner(url: str, scope: Scope, feature: str) -> ApiError:
    """307 to where the owner answers; 503 where that is not known. ``feature``: what is the owner's."""
    if not url:
        message = (
            f"{feature} is the owner's alone, and this router is not the owner: ask the router of `memserve serve`"
        )
        return ApiError(503, message, kind="server_error", code="owner_only")
    query = scope.get("query_string", b"").decode("latin-1")
    place = f"{url}{scope['path']}{'?' if query else ''}{query}"
    message = f"{feature} is the owner's alone: ask at {url}, with your key"
    return ApiError(307, message, kind="server_error", code="owner_only", headers={"location": place})
