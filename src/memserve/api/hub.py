"""Carries the engine's news from its thread into the event loop.

One wake-up of the loop serves all streams of a step: the engine thread appends to one mailbox and rings the bell only
unless it has been rung since the mailbox was last emptied.
"""

from __future__ import annotations

import asyncio
from collections import deque

from memserve.api.edge import ClientGone
from memserve.api.errors import client_too_slow, shutting_down
from memserve.api.metrics import ApiMetrics
from memserve.api.served import ServingEngine
from memserve.runtime.engine import Rejected
from memserve.types import Request, TokenOutput

News = tuple[int, TokenOutput | Rejected]
"""Which of the call's requests, and what happened to it."""


class Call:
    """One HTTP request's work in the engine: one engine request a prompt. Lives in the event loop."""

    def __init__(self, hub: Hub, requests: list[Request]) -> None:
        self._hub = hub
        self._news: list[News] = []
        self._bell = asyncio.Event()
        #: while output is written: a client that does not take it lets news pile up here
        self.writing = False
        self.held_bytes = 0  # of the news that came while output was written
        self._error: Exception | None = None
        #: sequences of each request that have neither ended nor been told to, by the position of the request
        self._running = [set(range(request.n)) for request in requests]
        self.requests = requests

    async def news(self) -> list[News]:
        """Everything that happened since the last time; waits for something to happen.

        Raises :class:`ClientGone` when the client left, :class:`ApiError` 503 when the server ends all calls.
        """
        while not self._news and self._error is None:
            self._bell.clear()
            await self._bell.wait()
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
        elif news.finish_reason is not None:
            self._running[at].discard(news.index)
        if self._error is not None:
            return  # nothing will be read of it
        self._news.append((at, news))
        self._bell.set()
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
        self._bell.set()

    def abandon(self) -> None:
        """The client went away: its memory in the engine is freed now, and not at the next look."""
        self.fail(ClientGone())
        self.cancel_rest()

    def stop_sequence(self, at: int, index: int) -> None:
        """A stop string was found in the text of one sequence: the engine is to end it."""
        self._running[at].discard(index)
        self._hub.engine.stop_sequence(self.requests[at].request_id, index)

    def cancel_rest(self) -> None:
        """Cancel every request that has not ended."""
        for at, request in enumerate(self.requests):
            if self._running[at]:
                self._running[at].clear()
                self._hub.engine.cancel(request.request_id)


_NEWS_BYTES, _LOGPROB_BYTES = 400, 150
"""About what an output, and each alternative of a token in it, takes in memory."""

STREAMS_TOGETHER = 16
"""All streams together may hold back as much output as this many may by themselves."""


def held_bytes(news: TokenOutput | Rejected) -> int:
    """About what ``news`` takes in memory."""
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
        self._mailbox: deque[tuple[Call, int, TokenOutput | Rejected]] = deque()
        self._rung = False
        self._calls: dict[int, Call] = {}  # in order of arrival

    @property
    def calls_open(self) -> int:
        """Calls that are being answered."""
        return len(self._calls)

    def open(self, requests: list[Request]) -> Call:
        """Submit ``requests`` as one call. Raises :class:`ApiError` 503 when the server is going away."""
        if self.draining:
            raise shutting_down()
        self._loop = asyncio.get_running_loop()
        call = Call(self, requests)
        self._calls[id(call)] = call
        try:
            for at, request in enumerate(requests):
                self.engine.submit(request, lambda news, at=at: self._post(call, at, news))  # type: ignore[misc]  # a default binds the loop variable
        except BaseException:
            self.close(call)
            raise
        return call

    def close(self, call: Call) -> None:
        """The call was answered, or will not be: the engine must keep none of its requests."""
        call.cancel_rest()
        call.fail(ClientGone())
        self._calls.pop(id(call), None)

    def end_all(self) -> int:
        """The patience for a graceful end is over: every open call ends with a 503. How many there were."""
        calls = list(self._calls.values())
        for call in calls:
            call.fail(shutting_down())
        return len(calls)

    def check_held(self, call: Call) -> None:
        """End the stream that holds back too much, or, when all do together, the one that holds back most."""
        if self.held_bytes > STREAMS_TOGETHER * self._stream_buffer_bytes:
            call = max(self._calls.values(), key=lambda other: other.held_bytes)
        elif call.held_bytes <= self._stream_buffer_bytes:
            return
        self._metrics.slow_readers.labels("stream_ended").inc()
        call.fail(client_too_slow())
        call.cancel_rest()

    def _post(self, call: Call, at: int, news: TokenOutput | Rejected) -> None:
        """Called from the engine's thread."""
        self._mailbox.append((call, at, news))
        if not self._rung and self._loop is not None:
            self._rung = True
            self._loop.call_soon_threadsafe(self._empty_mailbox)

    def _empty_mailbox(self) -> None:
        self._rung = False  # before reading: a letter that comes now rings again
        while self._mailbox:
            call, at, news = self._mailbox.popleft()
            call.deliver(at, news)
