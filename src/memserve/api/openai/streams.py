"""Carries the engine's news (outputs and rejections) from its thread into the event loop.

One wake-up of the loop serves all streams of a step: the engine thread appends to one mailbox, and wakes the loop only
if no wake-up is pending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from memserve.api.http.errors import client_too_slow, rejected, shutting_down
from memserve.api.http.limits import ClientGone
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.interfaces import ServingEngine
from memserve.base.types import Request, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.host.engine import Refusal, Rejected

News = tuple[int, TokenOutput | Rejected]
"""The position of a request in its call, and what happened to it."""


class StreamCall:
    """One HTTP request's work in the engine: one engine request per prompt. Lives in the event loop."""

    def __init__(self, hub: Hub, requests: list[Request]) -> None:
        self._hub = hub
        self._news: list[News] = []
        self._bell: asyncio.Future[None] | None = None  # of the task that waits for news
        #: output is being written: if the client does not read it, news piles up here
        self.writing = False
        self.held_bytes = 0  # of the news that came while output was written
        self._error: Exception | None = None
        #: by the position of the request: its sequences that have neither ended nor been told to end
        self._running = [set(range(request.n)) for request in requests]
        self.requests = requests

    async def news(self) -> list[News]:
        """Everything that happened since the last call; waits until there is something.

        Raises :class:`ClientGone` when the client left, :class:`ApiError` 503 when the server ends all calls.
        """
        while not self._news and self._error is None:
            self._bell = asyncio.get_running_loop().create_future()
            await self._bell
        if self._error is not None:
            raise self._error
        news, self._news = self._news, []
        self._hub.held_bytes -= self.held_bytes
        self.held_bytes = 0
        return news

    def deliver(self, at: int, news: TokenOutput | Rejected) -> None:
        """Called by the hub, in the loop."""
        if isinstance(news, Rejected):
            self._running[at].clear()
            self._hub.note_refusal(self.requests[at].tenant, news)
        elif news.finish_reason is not None:
            self._running[at].discard(news.index)
        if self._error is not None:
            return  # the news will not be read
        self._news.append((at, news))
        self._ring()
        if self.writing:
            self.held_bytes += (held := held_bytes(news))
            self._hub.held_bytes += held
            self._hub.check_held(self)

    def fail(self, error: Exception) -> None:
        """The task that waits for news gets ``error`` instead."""
        self._error = self._error or error
        self._news.clear()
        self._hub.held_bytes -= self.held_bytes
        self.held_bytes = 0
        self._ring()

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def abandon(self) -> None:
        """The client left: cancel its requests now, so that the engine frees their memory at once."""
        self.fail(ClientGone())
        self.cancel_rest()

    def stop_sequence(self, at: int, index: int) -> None:
        """End one sequence in the engine: a stop string was found in its text."""
        self._running[at].discard(index)
        self._hub.engine.stop_sequence(self.requests[at].request_id, index)

    def cancel_rest(self) -> None:
        """Cancel every request that has not ended."""
        for at, request in enumerate(self.requests):
            if self._running[at]:
                self._running[at].clear()
                self._hub.engine.cancel(request.request_id)


_NEWS_BYTES, _LOGPROB_BYTES = 400, 150
"""Approximate memory of an output, and of each alternative of a token in it."""

REFUSAL_HOLDS_NS = 50 * NS_PER_MS
"""How long a refusal for a full queue also answers the tenant's next requests, before their bodies are parsed."""

STREAMS_TOGETHER = 16
"""All streams together may hold back as much output as this many single streams."""


def held_bytes(news: TokenOutput | Rejected) -> int:
    """Approximate memory of ``news``."""
    if isinstance(news, Rejected):
        return _NEWS_BYTES
    tops = sum(1 + len(entry.top) for entry in news.logprobs)
    if news.prompt_logprobs is not None:
        tops += sum(1 + len(entry.top) for entry in news.prompt_logprobs if entry is not None)
    return _NEWS_BYTES + _LOGPROB_BYTES * tops


class Hub:
    """All calls of a server."""

    def __init__(self, engine: ServingEngine, metrics: ApiMetrics, stream_buffer_bytes: int) -> None:
        self.engine = engine
        self._metrics = metrics
        self.draining = False
        #: output that streams hold back because their clients do not take it
        self.held_bytes = 0
        self._stream_buffer_bytes = stream_buffer_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the loop's
        self._mailbox: deque[tuple[StreamCall, int, TokenOutput | Rejected]] = deque()
        self._rung = False
        self._calls: dict[int, StreamCall] = {}  # in order of arrival
        self._refused: dict[str, tuple[int, Rejected]] = {}  # tenant -> until when, and the answer

    @property
    def calls_open(self) -> int:
        """Calls that are being answered."""
        return len(self._calls)

    def open(self, requests: list[Request]) -> StreamCall:
        """Submit ``requests`` as one call. Raises :class:`ApiError` 503 when the server is shutting down."""
        if self.draining:
            raise shutting_down()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        call = StreamCall(self, requests)
        self._calls[id(call)] = call
        try:
            for at, request in enumerate(requests):
                self.engine.submit(request, lambda news, at=at: self._post(call, at, news))  # type: ignore[misc]  # a default binds the loop variable
        except BaseException:
            self.close(call)
            raise
        return call

    def note_refusal(self, tenant: str, news: Rejected) -> None:
        """Remember the refusal of a request of ``tenant`` if the queue was full."""
        if news.refusal is Refusal.BUSY:
            self._refused[tenant] = (time.monotonic_ns() + REFUSAL_HOLDS_NS, news)

    def check_busy(self, tenant: str, data: bytes) -> None:
        """Raise the :class:`ApiError` 429 that ``tenant`` was just given, so that a crowd of retries costs little more
        than one request. A body that contains ``priority`` passes: its request may displace another."""
        refused = self._refused.get(tenant)
        if refused is None:
            return
        until_ns, news = refused
        if time.monotonic_ns() >= until_ns:
            del self._refused[tenant]
        elif b"priority" not in data:
            self._metrics.rejected.value += 1
            raise rejected(news)

    def close(self, call: StreamCall) -> None:
        """The call was answered, or will not be: cancel what the engine still has of it."""
        call.cancel_rest()
        call.fail(ClientGone())
        self._calls.pop(id(call), None)

    def end_all(self) -> int:
        """The time for a graceful end is over: end every open call with a 503. Returns their number."""
        calls = list(self._calls.values())
        for call in calls:
            call.fail(shutting_down())
        return len(calls)

    def check_held(self, call: StreamCall) -> None:
        """End ``call`` if it holds back too much; if all streams together do, end the one that holds back most."""
        if self.held_bytes > STREAMS_TOGETHER * self._stream_buffer_bytes:
            call = max(self._calls.values(), key=lambda other: other.held_bytes)
        elif call.held_bytes <= self._stream_buffer_bytes:
            return
        self._metrics.slow_readers.labels("stream_ended").inc()
        call.fail(client_too_slow())
        call.cancel_rest()

    def _post(self, call: StreamCall, at: int, news: TokenOutput | Rejected) -> None:
        """Called from the engine's thread; a router's may be the event loop's."""
        if threading.get_ident() == self._thread and not self._mailbox:
            call.deliver(at, news)
            return
        self._mailbox.append((call, at, news))
        if not self._rung and self._loop is not None:
            self._rung = True
            self._loop.call_soon_threadsafe(self._empty_mailbox)

    def _empty_mailbox(self) -> None:
        self._rung = False  # before reading: news that comes now wakes the loop again
        while self._mailbox:
            call, at, news = self._mailbox.popleft()
            call.deliver(at, news)
