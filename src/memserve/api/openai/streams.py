"""Carries the engine's news (outputs and rejections) from its thread into the event loop.

One wake-up of the loop serves all streams of a step: the engine thread appends to one mailbox, and wakes the loop only
if no wake-up is pending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from functools import partial

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
        self._outputs: list[News] = []
        self._wakeup: asyncio.Future[None] | None = None  # of the task that waits for news
        #: output is being written: if the client does not read it, news piles up here
        self.writing = False
        self.pending_bytes = 0  # of the news that came while output was written
        self._error: Exception | None = None
        #: by the position of the request: its sequences that have neither ended nor been told to end
        self._running = [set(range(request.n)) for request in requests]
        self.requests = requests

    async def next_outputs(self) -> list[News]:
        """Everything that happened since the last call; waits until there is something.

        Raises :class:`ClientGone` when the client left, :class:`ApiError` 503 when the server ends all calls.
        """
        while not self._outputs and self._error is None:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        if self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        self._hub.pending_bytes -= self.pending_bytes
        self.pending_bytes = 0
        return outputs

    def deliver_output(self, request_index: int, output: TokenOutput | Rejected) -> None:
        """Called by the hub, in the loop."""
        if isinstance(output, Rejected):
            self._running[request_index].clear()
            self._hub.note_refusal(self.requests[request_index], output)
        elif output.finish_reason is not None:
            self._running[request_index].discard(output.index)
        if self._error is not None:
            return  # the news will not be read
        self._outputs.append((request_index, output))
        self._wake_waiter()
        if self.writing:
            self.pending_bytes += (size_bytes := output_bytes(output))
            self._hub.pending_bytes += size_bytes
            self._hub.check_pending(self)

    def fail_with(self, error: Exception) -> None:
        """The task that waits for news gets ``error`` instead."""
        self._error = self._error or error
        self._outputs.clear()
        self._hub.pending_bytes -= self.pending_bytes
        self.pending_bytes = 0
        self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def abandon_call(self) -> None:
        """The client left: cancel its requests now, so that the engine frees their memory at once."""
        self.fail_with(ClientGone())
        self.cancel_rest()

    def stop_sequence(self, request_index: int, index: int) -> None:
        """End one sequence in the engine: a stop string was found in its text."""
        self._running[request_index].discard(index)
        self._hub.engine.stop_sequence(self.requests[request_index].request_id, index)

    def note_tool(self, request_index: int, tool: str) -> None:
        """Tell the engine that an answer calls ``tool``: its session comes back with the result."""
        self._hub.engine.note_tool(self.requests[request_index].request_id, tool)

    def cancel_rest(self) -> None:
        """Cancel every request that has not ended."""
        for request_index, request in enumerate(self.requests):
            if self._running[request_index]:
                self._running[request_index].clear()
                self._hub.engine.cancel(request.request_id)


_NEWS_BYTES, _LOGPROB_BYTES = 400, 150
"""Approximate memory of an output, and of each alternative of a token in it."""

REFUSAL_HOLDS_NS = 50 * NS_PER_MS
"""How long a refusal for a full queue also answers the tenant's next requests, before their bodies are parsed."""

STREAMS_TOGETHER = 16
"""All streams together may hold back as much output as this many single streams."""


def output_bytes(output: TokenOutput | Rejected) -> int:
    """Approximate memory of ``output``."""
    if isinstance(output, Rejected):
        return _NEWS_BYTES
    tops = sum(1 + len(entry.top) for entry in output.logprobs)
    if output.prompt_logprobs is not None:
        tops += sum(1 + len(entry.top) for entry in output.prompt_logprobs if entry is not None)
    return _NEWS_BYTES + _LOGPROB_BYTES * tops


class Hub:
    """All calls of a server."""

    def __init__(self, engine: ServingEngine, metrics: ApiMetrics, stream_buffer_bytes: int) -> None:
        self.engine = engine
        self._metrics = metrics
        self.draining = False
        #: output that streams hold back because their clients do not take it
        self.pending_bytes = 0
        self._stream_buffer_bytes = stream_buffer_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the loop's
        self._mailbox: deque[tuple[StreamCall, int, TokenOutput | Rejected]] = deque()
        self._wakeup_pending = False
        self._calls: dict[int, StreamCall] = {}  # in order of arrival
        self._refused: dict[str, tuple[int, Rejected]] = {}  # tenant -> until when, and the answer

    @property
    def calls_open(self) -> int:
        """Calls that are being answered."""
        return len(self._calls)

    def open_call(self, requests: list[Request]) -> StreamCall:
        """Submit ``requests`` as one call. Raises :class:`ApiError` 503 when the server is shutting down."""
        if self.draining:
            raise shutting_down()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        call = StreamCall(self, requests)
        self._calls[id(call)] = call
        try:
            for request_index, request in enumerate(requests):
                self.engine.submit(request, partial(self._post_output, call, request_index))
        except BaseException:
            self.close_call(call)
            raise
        return call

    def note_refusal(self, request: Request, rejection: Rejected) -> None:
        """Remember the refusal of ``request`` if the queue was full, unless another one would be taken in its place."""
        if rejection.refusal is Refusal.BUSY and not request.is_deferrable:
            self._refused[request.tenant] = (time.monotonic_ns() + REFUSAL_HOLDS_NS, rejection)

    def check_busy(self, tenant: str, data: bytes) -> None:
        """Raise the :class:`ApiError` 429 that ``tenant`` was just given, so that a crowd of retries costs little more
        than one request. A body that contains ``priority`` passes: its request may displace another."""
        refused = self._refused.get(tenant)
        if refused is None:
            return
        until_ns, rejection = refused
        if time.monotonic_ns() >= until_ns:
            del self._refused[tenant]
        elif b"priority" not in data:
            self._metrics.rejected.value += 1
            raise rejected(rejection)

    def close_call(self, call: StreamCall) -> None:
        """The call was answered, or will not be: cancel what the engine still has of it."""
        call.cancel_rest()
        call.fail_with(ClientGone())
        self._calls.pop(id(call), None)

    def end_all(self) -> int:
        """The time for a graceful end is over: end every open call with a 503. Returns their number."""
        calls = list(self._calls.values())
        for call in calls:
            call.fail_with(shutting_down())
        return len(calls)

    def check_pending(self, call: StreamCall) -> None:
        """End ``call`` if it holds back too much; if all streams together do, end the one that holds back most."""
        if self.pending_bytes > STREAMS_TOGETHER * self._stream_buffer_bytes:
            call = max(self._calls.values(), key=lambda candidate: candidate.pending_bytes)
        elif call.pending_bytes <= self._stream_buffer_bytes:
            return
        self._metrics.slow_readers.labels("stream_ended").inc()
        call.fail_with(client_too_slow())
        call.cancel_rest()

    def _post_output(self, call: StreamCall, request_index: int, output: TokenOutput | Rejected) -> None:
        """Called from the engine's thread; a router's may be the event loop's."""
        if threading.get_ident() == self._thread and not self._mailbox:
            call.deliver_output(request_index, output)
            return
        self._mailbox.append((call, request_index, output))
        if not self._wakeup_pending and self._loop is not None:
            self._wakeup_pending = True
            self._loop.call_soon_threadsafe(self._drain_mailbox)

    def _drain_mailbox(self) -> None:
        self._wakeup_pending = False  # before reading: news that comes now wakes the loop again
        while self._mailbox:
            call, request_index, output = self._mailbox.popleft()
            call.deliver_output(request_index, output)
