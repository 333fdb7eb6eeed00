"""Stands before every route: keys, metrics, and no error that is not in OpenAI's form (level 4)."""

from __future__ import annotations

import asyncio
import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.auth import KeyRing
from memserve.api.body import TENANT_KEY, ClientGone
from memserve.api.errors import ApiError, echo, from_user_error, internal, shutting_down
from memserve.api.metrics import ApiMetrics
from memserve.api.respond import send_json
from memserve.errors import UserError

log = logging.getLogger(__name__)

KNOWN_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/openapi.json")
"""Labels of the request counter: paths that clients invent must not make new ones."""

NAMED_ROUTES = ("/v1/documents", "/v1/sessions")
"""Routes below which each name is a path."""


def route_of(path: str) -> str:
    """The label of a path in metrics and logs."""
    for route in NAMED_ROUTES:
        if path == route or path.startswith(f"{route}/"):
            return route
    return path if path in KNOWN_ROUTES else "other"


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: ApiMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._metrics.in_progress.track_inprogress():
            error = await self._run(scope, receive, send_noting_status)
            if error is not None and status == 0:
                await send_json(send_noting_status, error.status, error.body(), error.headers)
        path = route_of(scope["path"])
        self._metrics.requests.labels(path, str(status or 499)).inc()  # 499: the client left first

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """The error that the client has to be told of, if there is one and nothing was sent yet."""
        try:
            if scope["path"].startswith("/v1/"):
                scope[TENANT_KEY] = self._keys.tenant(Headers(scope=scope).get("authorization"))
            await self._app(scope, receive, send)
        except ApiError as error:
            return error
        except UserError as error:
            return from_user_error(error)
        except ClientGone:
            self._metrics.disconnected.inc()
        except asyncio.CancelledError:  # the server's patience with this request is over: it still gets an answer
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return shutting_down()
        except Exception:
            log.exception("failed on %s %s", scope["method"], scope["path"])
            return internal()
        return None


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (unknown route, wrong method) in OpenAI's form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    shown = echo(f"{request.method} {request.url.path}")
    message = {404: f"Unknown request URL: {shown}", 405: f"Not allowed to {shown}"}.get(status, "Request failed")
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    body = ApiError(status, message, code=code).body()
    return Response(body, status, headers, "application/json")
