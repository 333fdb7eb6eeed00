"""``/v1/sessions``: what conversations keep in the cache (``session_ttl_s``), to look at and to give up (level 4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from memserve.api.body import TENANT_KEY
from memserve.api.errors import ApiError, echo, engine_silent
from memserve.api.plan import session_of
from memserve.api.served import PinningEngine, ServingEngine
from memserve.runtime.clients import EngineStopped
from memserve.types import NamedPrefix
from memserve.units import NS_PER_S


class SessionRoutes:
    """The handlers. A session is visible to its tenant alone. Sessions of one name with different ``cache_salt`` are
    listed each, and end together: a salt is never shown."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    async def list(self, request: HttpRequest) -> Response:
        """``GET /v1/sessions``: those whose KV is kept, least recently used first."""
        sessions, now_ns = await self._sessions(request), time.monotonic_ns()
        cards = [_card(name, kept, now_ns) for name, kept in sessions]
        return _json({"object": "list", "data": cards})

    async def delete(self, request: HttpRequest) -> Response:
        """``DELETE /v1/sessions/{name}``: its KV may be evicted from now on."""
        name = request.path_params["name"]
        handles = [kept.handle for session, kept in await self._sessions(request) if session == name]
        if not handles:
            message = f"There is no session {echo(name)!r}: it kept no KV, was ended, or has expired"
            raise ApiError(404, message, param="name", code="session_not_found")
        if isinstance(self._engine, PinningEngine):
            for handle in handles:
                self._engine.unpin(handle, request.scope[TENANT_KEY])
        return _json({"id": name, "object": "session.deleted", "deleted": True})

    async def _sessions(self, request: HttpRequest) -> Sequence[tuple[str, NamedPrefix]]:
        """The tenant's sessions by name."""
        if not isinstance(self._engine, PinningEngine):
            return []
        try:
            prefixes = await asyncio.to_thread(self._engine.named_prefixes, request.scope[TENANT_KEY])
        except (TimeoutError, EngineStopped):
            raise engine_silent() from None
        return [(name, kept) for kept in prefixes if (name := session_of(kept.handle)) is not None]


def _card(name: str, kept: NamedPrefix, now_ns: int) -> dict[str, Any]:
    left_s = max(0.0, (kept.expires_ns - now_ns) / NS_PER_S)
    return {"id": name, "object": "session", "pinned_tokens": kept.pinned_tokens, "expires_in_s": round(left_s, 3)}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
