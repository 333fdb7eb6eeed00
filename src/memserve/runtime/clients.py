"""Who waits for which request: the clients' side of an engine, and of a cluster's router (level 3)."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from memserve.types import FinishReason, Request, TokenOutput

log = logging.getLogger(__name__)

CLOSING_RETRY_S = 5.0
"""After this long another engine may have taken the place of one that closes."""


class Refusal(enum.Enum):
    """Why an engine refuses a request."""

    IMPOSSIBLE = "impossible"  # it could never run here
    BUSY = "busy"  # too many wait already: try again later
    OVERLOADED = "overloaded"  # it has waited in vain: there is too much to do, whoever asks
    CLOSING = "closing"  # the engine is going away, or broke: try another server


@dataclass(frozen=True, slots=True)
class Rejected:
    """The engine will not run this request. ``retry_after_s`` is ``None`` when trying again cannot help."""

    request_id: str
    reason: str
    retry_after_s: float | None
    refusal: Refusal = Refusal.IMPOSSIBLE


class EngineStopped(Exception):
    """The engine was closed or broke, so it cannot say anything about itself."""


Sink = Callable[[TokenOutput | Rejected], None]


@dataclass(slots=True)
class _Waiter:
    """Who waits for a request, and which of its sequences have not ended."""

    sink: Sink
    running: list[int]


class Clients:
    """The sinks of all requests that have not ended. Anyone may submit; one thread delivers."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """``cancel`` is called for a request whose sink has failed."""
        self._cancel = cancel
        #: all and only the requests that were submitted and have not ended
        self._waiters: dict[str, _Waiter] = {}
        self._lock = threading.Lock()  # guards _waiters and closing against submitters
        self.closing = False  # refuse new requests

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        with self._lock:
            return len(self._waiters)

    def submit(self, request: Request, sink: Sink, start: Callable[[Request], None]) -> None:
        """``start(request)`` and remember its ``sink``, or tell the sink that it is too late."""
        with self._lock:
            if not self.closing:
                self._waiters[request.request_id] = _Waiter(sink, list(range(request.n)))
                start(request)
                return
        sink(Rejected(request.request_id, "the server is shutting down", CLOSING_RETRY_S, Refusal.CLOSING))

    def close(self) -> list[str]:
        """From now on every new request is refused. Returns the ids of those that run."""
        with self._lock:
            self.closing = True
            return list(self._waiters)

    def deliver(self, outputs: list[TokenOutput]) -> None:
        """Give each output to whoever waits for it."""
        for output in outputs:
            self._deliver(output)

    def reject(self, request_id: str, reason: str, retry_after_s: float | None, overloaded: bool = False) -> None:
        """Tell a client that its request will not run."""
        later = Refusal.OVERLOADED if overloaded else Refusal.BUSY
        refusal = Refusal.IMPOSSIBLE if retry_after_s is None else later
        self._tell(self._forget(request_id), Rejected(request_id, reason, retry_after_s, refusal))

    def fail_all(self) -> None:
        """The machine broke: every request ends with an error, and new ones are refused."""
        with self._lock:
            self.closing = True
            waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            for index in waiter.running:
                self._tell(waiter.sink, TokenOutput(request_id, index, (), finish_reason=FinishReason.ERROR))

    def _deliver(self, output: TokenOutput) -> None:
        waiter = self._waiters.get(output.request_id)
        if waiter is None:
            return
        if output.finish_reason is not None:
            waiter.running.remove(output.index)
            if not waiter.running:
                self._forget(output.request_id)
        if not self._tell(waiter.sink, output):
            self._forget(output.request_id)
            self._cancel(output.request_id)

    @staticmethod
    def _tell(sink: Sink | None, news: TokenOutput | Rejected) -> bool:
        """Give ``news`` to ``sink``; ``False`` when it raised. Whatever a client's sink does, the others go on."""
        try:
            if sink is not None:
                sink(news)
        except Exception:
            log.exception("the sink of request %s failed", news.request_id)
            return False
        return True

    def _forget(self, request_id: str) -> Sink | None:
        with self._lock:
            waiter = self._waiters.pop(request_id, None)
        return waiter.sink if waiter else None
