"""What probes, tools written for vLLM and people with a browser ask for first: ``/version``, ``/ping``, ``/load`` and
``/``; and paths with a slash at their end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve import __version__
from memserve.api.http.middleware import KeyRing

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
