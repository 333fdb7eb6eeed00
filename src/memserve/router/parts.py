"""What the flows of a router share, built once and passed as one; and what a flow asks of the way of requests.

Parts know nothing of flows. Flows (:class:`~memserve.router.requests.lifecycle.Lifecycle`, the requests of other
routers, keyed answers, membership) change parts, and reach each other through :class:`RequestFlow`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memserve.base.config import ClusterConfig
from memserve.base.types import FinishReason
from memserve.protocol.peers import Peer
from memserve.router.admission.controller import RequestAdmission
from memserve.router.outbox import Outbox, Timers
from memserve.router.placement.placer import Placer
from memserve.router.report import Counters
from memserve.router.requests.hints import HintRelay
from memserve.router.requests.requests import RequestState
from memserve.router.requests.sessions import MemberTables, NamedPrefixes, Sessions


@dataclass(frozen=True, slots=True)
class RouterParts:
    """Of one router."""

    config: ClusterConfig
    tables: MemberTables
    admission: RequestAdmission
    sessions: Sessions
    named_prefixes: NamedPrefixes
    placer: Placer
    hints: HintRelay
    timers: Timers
    outbox: Outbox
    counters: Counters

    follower: Peer | None = None
    """The router that this is, where another one is the owner."""


class QueueFlow(Protocol):
    """The way of requests up to their admission."""

    def enqueue_request(self, req: RequestState, now_ns: int) -> None:
        """Ask for the admission of a request that has entered."""

    def admit_waiting(self, now_ns: int) -> None:
        """Admit and place queued requests as long as there is room."""


class RequestFlow(QueueFlow, Protocol):
    """The way of requests, as those see it that change where a request stands on it."""

    def place_request(self, req: RequestState, now_ns: int) -> None:
        """Dispatch a request that is admitted; else it waits, or ends when waiting cannot help."""

    def place_waiting(self, now_ns: int) -> None:
        """Something has changed: try all unplaced requests, in order."""

    def give_up_request(self, request_id: str, now_ns: int) -> None:
        """End a request for which no client has come."""

    def end_request(self, req: RequestState, reason: FinishReason, now_ns: int, error: str = "") -> None:
        """End a request that has begun."""
