"""Which web pages may use the API from a browser: CORS, before keys are asked for (level 4)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

EXPOSED = b"x-request-id, retry-after"
"""Headers of answers that a page may read."""

METHODS = b"GET, POST, PUT, DELETE, OPTIONS"
PREFLIGHT_S = b"600"
"""How long a browser may remember the answer to a preflight."""

_FIELDS = re.compile(r"[A-Za-z0-9_-]+(?: *, *[A-Za-z0-9_-]+)*")
_FIELDS_CHARS_MAX = 1000
_USUAL_FIELDS = "authorization, content-type, x-request-id, x-memserve-explain"


class Cors:
    """ASGI middleware. Without origins it does nothing: pages of other origins are refused by their browsers."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._all = "*" in origins
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" and self._origins else None
        if headers is None or (origin := headers.get("origin")) is None:
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed, send)
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        await self._app(scope, receive, send_with_origin)

    def _allowed(self, origin: str) -> list[tuple[bytes, bytes]]:
        """The headers that let a page of ``origin`` read the answer; for others only what caches must know."""
        if self._all:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        vary = (b"vary", b"origin")
        if origin.lower() not in self._origins:
            return [vary]
        named = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [named, (b"access-control-expose-headers", EXPOSED), vary]


async def _preflight(headers: Headers, allowed: list[tuple[bytes, bytes]], send: Send) -> None:
    """What the browser asks before it sends a request with a key. The key itself does not come with it."""
    asked = headers.get("access-control-request-headers", "").strip()
    fields = asked if len(asked) <= _FIELDS_CHARS_MAX and _FIELDS.fullmatch(asked) else _USUAL_FIELDS
    answer = [
        *allowed,
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", fields.encode("latin-1")),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b""})
