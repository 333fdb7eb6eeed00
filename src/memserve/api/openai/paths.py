"""What a path alone decides: probes, tools written for vLLM and people with a browser ask for ``/version``, ``/ping``,
``/load`` and ``/``; paths with a slash at their end; and what a router that is not the owner does not answer itself.

Documents, sessions whose KV is kept, stored responses, files and batches are the owner's alone: others say where it
answers, by a redirect (307).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve import __version__
from memserve.api.http.errors import ApiError
from memserve.api.http.middleware import KeyRing
from memserve.api.openai.interfaces import ServingEngine

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
        return _json({"version": __version__})

    async def get_load(self, request: Request) -> Response:
        """``GET /load``: how many requests are being answered, in vLLM's form. Needs the key of ``/metrics``."""
        self._metrics_keys.tenant_of(request.headers.get("authorization"))
        return _json({"server_load": self._requests_open()})


class TrailingSlashes:
    """ASGI middleware: a path without parameters is the same with a slash at its end."""

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._paths = {route.path for route in routes if not route.param_convertors} - {_PAGE}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and scope["path"][:-1] in self._paths:
            scope = {**scope, "path": scope["path"][:-1]}
        await self._app(scope, receive, send)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


_PATHS = ("/v1/documents", "/v1/sessions", "/v1/responses", "/v1/files", "/v1/batches", "/v1/kv_hints")
_FIELDS = ("document", "session_ttl_s", "kv_hints")


def owner_url(engine: ServingEngine) -> str | None:
    """Where the owner answers HTTP; empty: not known. None: this router is the owner, or the only one."""
    url: str | None = getattr(engine, "owner_url", None)
    return url


def send_to_owner_if_kept(engine: ServingEngine, scope: Scope, data: bytes) -> None:
    """Raise :class:`ApiError` 307 for a body that names what the owner keeps, 503 where the owner's address is not
    known."""
    url = owner_url(engine)
    if url is None or not any(f'"{field}"'.encode() in data for field in _FIELDS):
        return
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return  # the planner says what is wrong with it
    fields = [field for field in _FIELDS if isinstance(body, dict) and body.get(field) is not None]
    if fields:
        raise redirect_to_owner(url, scope, fields[0])


class OwnerOnly:
    """Sends clients of some paths to the owner."""

    def __init__(self, app: ASGIApp, engine: ServingEngine) -> None:
        self._app, self._engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            url = owner_url(self._engine)
            if url is not None:
                for path in _PATHS:
                    if f"{scope['path']}/".startswith(f"{path}/"):
                        raise redirect_to_owner(url, scope, path)
        await self._app(scope, receive, send)


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
