"""Requests in flight and requests that have ended lately, as the dashboard and ``memserve explain`` tell of them.

An entry has ids, counts, times, instances and reasons. It has no text, no token, no key and no salt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send

from memserve.api.http import middleware as guard
from memserve.api.http.limits import TENANT_KEY
from memserve.api.http.middleware import REPLY_KEY, Answered, is_work, route_of, wrap_send
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.openai.response.reply import Account, Reply
from memserve.base.units import NS_PER_MS

FORWARDED_KEY = "memserve.forwarded"
"""Of an ASGI scope: gives a fleet's last decision for its request, as entries of its timeline."""

KEPT = 512
"""Requests that are remembered after their end."""

Entry = dict[str, Any]

Ended = Callable[[Scope, Entry, int], None]
"""Is told of each request that has ended: its ASGI scope, its entry, and when it began, in nanoseconds of Unix time."""


class _Seen(Struct, frozen=True):
    """What was seen of a request. An entry is made of it when a page asks, or a trace: most are never asked for."""

    request_id: str
    tenant: str | None
    path: str
    status: int | None
    """``None``: it is being answered."""
    started_ns: int
    started_unix_ns: int
    now_ns: int
    answered_ns: int | None
    account: Account | None
    forwarded: Entry | None
    """Of a request for an engine of another project."""

    def has_name(self, name: str) -> bool:
        """Whether ``name`` is the id of the request or of its answer."""
        return name == self.request_id or (self.account is not None and name == self.account.response_id)

    def to_entry(self, model: str) -> Entry:
        """What is shown of it."""
        total_ms = self._after_ms(self.now_ns)
        entry: Entry = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "route": route_of(self.path),
            "status": self.status,
            "started_ms": self.started_unix_ns // NS_PER_MS,
            "total_ms": total_ms,
        }
        if (account := self.account) is not None:
            response_fields = {"response_id": account.response_id, "total_ms": total_ms}
            # the account's times count from the arrival, those of the explanation from the end of reading
            entry |= account.as_explanation() | guard.account_fields(account, model, self.started_ns) | response_fields
            entry["stages"] = stages(entry, total_ms)
        elif self.forwarded is not None:
            answered_ms = None if self.answered_ns is None else self._after_ms(self.answered_ns)
            entry |= self.forwarded
            entry["stages"] = relayed_stages(answered_ms, total_ms)
        return entry

    def _after_ms(self, time_ns: int) -> float:
        return round((time_ns - self.started_ns) / NS_PER_MS, 3)


class _Open:
    """A request that is being answered. The ASGI scope is read when a page asks: the request pays for a dict entry."""

    __slots__ = ("answered", "scope", "started_ns", "started_unix_ns")

    def __init__(self, scope: Scope, answered: Answered) -> None:
        self.scope, self.answered = scope, answered
        self.started_ns, self.started_unix_ns = time.monotonic_ns(), time.time_ns()

    @property
    def tenant(self) -> str | None:
        """``None``: no key has been checked yet, or the key was refused."""
        tenant: str | None = self.scope.get(TENANT_KEY)
        return tenant

    def take_snapshot(self, *, is_ended: bool) -> _Seen:
        """As it is now."""
        scope = self.scope
        reply, forwarded = scope.get(REPLY_KEY), scope.get(FORWARDED_KEY)
        return _Seen(
            scope.get(REQUEST_ID_KEY, ""),
            self.tenant,
            scope["path"],
            (self.answered.status or 499) if is_ended else None,
            self.started_ns,
            self.started_unix_ns,
            time.monotonic_ns(),
            self.answered.began_ns,
            reply.make_account() if isinstance(reply, Reply) else None,
            forwarded() if forwarded is not None else None,
        )


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

    def __init__(self, model: str, on_end: Ended | None = None) -> None:
        """``model``: its served name. ``on_end``: is told of them, too."""
        self._model = model
        self._on_end = on_end
        self._open: dict[int, _Open] = {}
        self._ended_records: deque[_Seen] = deque(maxlen=KEPT)

    def begin_request(self, scope: Scope, answered: Answered) -> _Open:
        """A request has arrived; ``answered`` will note its answer."""
        request = self._open[id(scope)] = _Open(scope, answered)
        return request

    def end_request(self, request: _Open) -> None:
        """The request has its answer, or its client has left. Requests without a valid key are not kept."""
        del self._open[id(request.scope)]
        if request.tenant is not None and (self._is_shown(request) or request.answered.status >= 400):
            record = request.take_snapshot(is_ended=True)
            self._ended_records.append(record)
            if self._on_end is not None:
                self._on_end(request.scope, record.to_entry(self._model), request.started_unix_ns)

    @staticmethod
    def _is_shown(request: _Open) -> bool:
        return REPLY_KEY in request.scope or FORWARDED_KEY in request.scope

    def live_entries(self, tenant: str | None, most: int) -> list[Entry]:
        """Up to ``most`` requests in flight of ``tenant``, oldest first; ``None``: of all tenants."""
        requests = (request for request in self._open.values() if _visible(request.tenant, tenant))
        return [request.take_snapshot(is_ended=False).to_entry(self._model) for request in islice(requests, most)]

    def recent_entries(self, tenant: str | None, most: int) -> list[Entry]:
        """Up to ``most`` requests of ``tenant`` that have ended, newest first; ``None``: of all tenants."""
        return [record.to_entry(self._model) for record in islice(self._recent_records(tenant), most)]

    def find_entry(self, name: str, tenant: str | None) -> Entry | None:
        """The newest request with this id, or with this id of its answer; ``None``: there is none, or not for
        ``tenant``."""
        shown = (request for request in reversed(self._open.values()) if _visible(request.tenant, tenant))
        records = chain((request.take_snapshot(is_ended=False) for request in shown), self._recent_records(tenant))
        return next((record.to_entry(self._model) for record in records if record.has_name(name)), None)

    def _recent_records(self, tenant: str | None) -> Iterator[_Seen]:
        return (record for record in reversed(self._ended_records) if _visible(record.tenant, tenant))


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
        answered, send = wrap_send(scope, send)
        request = self._timelines.begin_request(scope, answered)
        try:
            await self._app(scope, receive, send)
        finally:
            self._timelines.end_request(request)
