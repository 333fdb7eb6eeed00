"""What a router that is not the owner does not answer itself: it says where the owner does, by a redirect (307).

Documents, sessions whose KV is kept, and stored responses are the owner's alone.
"""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve.api.http.errors import ApiError
from memserve.api.openai.interfaces import ServingEngine

_PATHS = ("/v1/documents", "/v1/sessions", "/v1/responses")
_FIELDS = ("document", "session_ttl_s")


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
        raise _redirect_to_owner(url, scope, fields[0])


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
                        raise _redirect_to_owner(url, scope, path)
        await self._app(scope, receive, send)


def _redirect_to_owner(url: str, scope: Scope, feature: str) -> ApiError:
    if not url:
        message = (
            f"{feature} is the owner's alone, and this router is not the owner: ask the router of `memserve serve`"
        )
        return ApiError(503, message, kind="server_error", code="owner_only")
    query = scope.get("query_string", b"").decode("latin-1")
    place = f"{url}{scope['path']}{'?' if query else ''}{query}"
    message = f"{feature} is the owner's alone: ask at {url}, with your key"
    return ApiError(307, message, kind="server_error", code="owner_only", headers={"location": place})
