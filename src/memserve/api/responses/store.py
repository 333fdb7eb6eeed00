"""Responses that are kept for their clients: to be read again, continued, or cancelled."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from memserve.api.errors import ApiError, bad_request

KEPT_MAX, KEPT_BYTES_MAX = 1000, 64 << 20
"""Of one tenant; the oldest are forgotten first."""
BACKGROUND_MAX = 64
"""Of one tenant, at a time."""

Json = dict[str, Any]


@dataclass(slots=True)
class Kept:
    """One response, and what continues it."""

    response: Json
    messages: list[Json]
    """Input and output as messages of a chat, without instructions."""
    session: str
    nbytes: int
    task: asyncio.Task[None] | None = None
    """Computes a response in the background."""


@dataclass(slots=True)
class _Tenant:
    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)
    nbytes: int = 0


class ResponseStore:
    """By tenant. Lives in the event loop, and as long as the server."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def put(self, tenant: str, kept: Kept) -> None:
        """Keep a response, in place of an earlier state of it."""
        own = self._tenants.setdefault(tenant, _Tenant())
        self._drop(own, kept.response["id"])
        own.kept[kept.response["id"]] = kept
        own.nbytes += kept.nbytes
        while len(own.kept) > 1 and (len(own.kept) > KEPT_MAX or own.nbytes > KEPT_BYTES_MAX):
            self._drop(own, next(iter(own.kept)))

    def get(self, tenant: str, response_id: str) -> Kept:
        """Raises :class:`ApiError` 404 for one that was never stored, or is forgotten, or another tenant's."""
        own = self._tenants.get(tenant)
        if own is None or response_id not in own.kept:
            shown = response_id[:100]
            raise ApiError(
                404, f"Response with id {shown!r} not found.", param="response_id", code="response_not_found"
            )
        return own.kept[response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises :class:`ApiError` 404, as :meth:`get`."""
        kept = self.get(tenant, response_id)
        if kept.task is not None:
            kept.task.cancel()
        self._drop(self._tenants[tenant], response_id)

    def cancel(self, tenant: str, response_id: str) -> Json:
        """End a response in the background; one that has ended stays as it is. Returns its state."""
        kept = self.get(tenant, response_id)
        if kept.task is None:
            raise bad_request("Cannot cancel a synchronous response.", "response_id")
        if kept.response["status"] in ("queued", "in_progress"):
            kept.response = {**kept.response, "status": "cancelled"}
            kept.task.cancel()
        return kept.response

    def running(self, tenant: str) -> int:
        """Responses in the background that have not ended."""
        own = self._tenants.get(tenant)
        tasks = [kept.task for kept in own.kept.values()] if own is not None else []
        return sum(task is not None and not task.done() for task in tasks)

    @staticmethod
    def _drop(own: _Tenant, response_id: str) -> None:
        if (kept := own.kept.pop(response_id, None)) is not None:
            own.nbytes -= kept.nbytes
