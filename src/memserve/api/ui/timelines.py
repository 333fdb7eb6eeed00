"""Requests in flight and requests that have ended lately, as the dashboard and ``memserve explain`` tell of them.

An entry has ids, counts, times, instances and reasons. It has no text, no token, no key and no salt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.edge import TENANT_KEY
from memserve.api.exchange import REQUEST_ID_KEY
from memserve.api.fleet_explain import FORWARDED_KEY, told
from memserve.api.guard import REPLY_KEY, account, is_work, route_of
from memserve.api.reply import Reply
from memserve.units import NS_PER_MS

KEPT = 512
"""Requests that are remembered after their end."""

Entry = dict[str, Any]

Ended = Callable[[Scope, Entry, int], None]
"""Is told of each request that has ended: its ASGI scope, its entry, and when it began, in nanoseconds of Unix time."""


class _Open:
    """A request that is being answered. The ASGI scope is read when a page asks: the request pays for a dict entry."""

    __slots__ = ("answered_ns", "scope", "started_ns", "started_unix_ns", "status")

    def __init__(self, scope: Scope) -> None:
        self.scope, self.status = scope, 0
        self.answered_ns: int | None = None
        self.started_ns, self.started_unix_ns = time.monotonic_ns(), time.time_ns()

    @property
    def tenant(self) -> str | None:
        """``None``: no key has been checked yet, or the key was refused."""
        tenant: str | None = self.scope.get(TENANT_KEY)
        return tenant

    def _answered_ms(self) -> float | None:
        return None if self.answered_ns is None else round((self.answered_ns - self.started_ns) / NS_PER_MS, 3)

    def entry(self, model: str, *, ended: bool) -> Entry:
        """What is shown of it now."""
        reply = self.scope.get(REPLY_KEY)
        entry: Entry = {
            "request_id": self.scope.get(REQUEST_ID_KEY, ""),
            "tenant": self.tenant,
            "route": route_of(self.scope["path"]),
            "status": (self.status or 499) if ended else None,
            "started_ms": self.started_unix_ns // NS_PER_MS,
            "total_ms": round((time.monotonic_ns() - self.started_ns) / NS_PER_MS, 3),
        }
        if isinstance(reply, Reply):
            own = {"response_id": reply.response_id, "total_ms": entry["total_ms"]}
            # the account's times count from the arrival, those of the explanation from the end of reading
            entry |= reply.explanation() | account(reply, model, self.started_ns) | own
            entry["stages"] = stages(entry, entry["total_ms"])
        elif FORWARDED_KEY in self.scope:
            entry |= told(*self.scope[FORWARDED_KEY])
            entry["stages"] = relayed_stages(self._answered_ms(), entry["total_ms"])
        return entry


def relayed_stages(answered_ms: float | None, total_ms: float) -> list[Entry]:
    """Of a request that an engine of another project answers: ``waiting`` until its answer began, then ``decode``."""
    first_ms = total_ms if answered_ms is None else min(answered_ms, total_ms)
    return [
        {"stage": "waiting", "from_ms": 0, "to_ms": first_ms},
        {"stage": "decode", "from_ms": first_ms, "to_ms": total_ms},
    ]


def stages(entry: Entry, total_ms: float) -> list[Entry]:
    """The parts of a request's time in order, in milliseconds from its arrival; the last one may go on.

    ``read``: body, template and tokens; ``queue``: until it is first computed, waits for admission, for KV and for
    memory included; ``prefill``: until the first token, a handover included; ``decode``: the rest.
    """
    first_ms, queue_ms, prefill_ms = entry["ttft_ms"], entry["queue_ms"], entry["prefill_ms"]
    if first_ms is None or queue_ms is None or prefill_ms is None:
        return [{"stage": "waiting", "from_ms": 0, "to_ms": total_ms}]
    first_ms = min(first_ms, total_ms)  # rounded apart
    read_ms = max(0.0, first_ms - queue_ms - prefill_ms)
    queued_ms = min(read_ms + queue_ms, first_ms)
    ends = [("read", read_ms), ("queue", queued_ms), ("prefill", first_ms), ("decode", total_ms)]
    begins = [0.0, *(end for _, end in ends)]
    return [
        {"stage": name, "from_ms": round(begin, 3), "to_ms": round(end, 3)}
        for begin, (name, end) in zip(begins, ends, strict=False)
    ]


class Timelines:
    """All requests in flight, and the last :data:`KEPT` that have ended. Lives in the event loop."""

    def __init__(self, model: str, ended: Ended | None = None) -> None:
        """``model``: its served name. ``ended``: is told of them, too."""
        self._model = model
        self._tell = ended
        self._open: dict[int, _Open] = {}
        self._ended: deque[Entry] = deque(maxlen=KEPT)

    def begin(self, scope: Scope) -> _Open:
        """A request has arrived."""
        request = self._open[id(scope)] = _Open(scope)
        return request

    def end(self, request: _Open) -> None:
        """The request has its answer, or its client has left. Requests without a valid key are not kept."""
        del self._open[id(request.scope)]
        if request.tenant is not None and (self._is_shown(request) or request.status >= 400):
            entry = request.entry(self._model, ended=True)
            self._ended.append(entry)
            if self._tell is not None:
                self._tell(request.scope, entry, request.started_unix_ns)

    @staticmethod
    def _is_shown(request: _Open) -> bool:
        return REPLY_KEY in request.scope or FORWARDED_KEY in request.scope

    def live(self, tenant: str | None, most: int) -> list[Entry]:
        """Up to ``most`` requests in flight of ``tenant``, oldest first; ``None``: of all tenants."""
        seen = (request for request in self._open.values() if _visible(request.tenant, tenant))
        return [request.entry(self._model, ended=False) for _, request in zip(range(most), seen, strict=False)]

    def recent(self, tenant: str | None, most: int) -> list[Entry]:
        """Up to ``most`` requests of ``tenant`` that have ended, newest first; ``None``: of all tenants."""
        return [entry for _, entry in zip(range(most), self._recent(tenant), strict=False)]

    def find(self, name: str, tenant: str | None) -> Entry | None:
        """The newest request with this id, or with this id of its answer; ``None``: there is none, or not for
        ``tenant``."""
        for request in reversed(self._open.values()):
            if _visible(request.tenant, tenant):
                entry = request.entry(self._model, ended=False)
                if name in (entry["request_id"], entry.get("response_id")):
                    return entry
        return next((e for e in self._recent(tenant) if name in (e["request_id"], e.get("response_id"))), None)

    def _recent(self, tenant: str | None) -> Iterator[Entry]:
        return (entry for entry in reversed(self._ended) if _visible(entry["tenant"], tenant))


def _visible(owner: str | None, viewer: str | None) -> bool:
    return owner is not None and viewer in (None, owner)


class Watch:
    """ASGI middleware around the whole application: requests for work enter the :class:`Timelines`."""

    def __init__(self, app: ASGIApp, timelines: Timelines) -> None:
        self._app, self._timelines = app, timelines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not is_work(scope["path"]):
            await self._app(scope, receive, send)
            return
        request = self._timelines.begin(scope)

        async def send_noting_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status, request.answered_ns = message["status"], time.monotonic_ns()
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            self._timelines.end(request)
