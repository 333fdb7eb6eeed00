"""One connection of the HTTP server: reads a request, has it answered, reads the next.

::

    idle -> head -> body -> answering -> idle ...      each phase but the last has a deadline
                `-------`-> lingering -> closed        after an early answer: further input is dropped

Memory is bounded: bytes are read only while something consumes them, requests are answered one at a time, and output
waits until the client has read what was sent. A client that reads nothing for a while is cut off.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from memserve.api.http.errors import ApiError
from memserve.api.http.limits import READ_BYTES_MAX, Edge, MovableTimeout
from memserve.api.http.parser import END, Head, HttpSyntaxError, RequestReader
from memserve.api.http.request import REQUEST_ID_KEY, HttpExchange, plain_answer, request_id_of
from memserve.api.http.tls import Handshake
from memserve.base.units import KIB, MIB

OUTPUT_BYTES_MAX = 64 * KIB
"""Output that the process holds for one client; more waits."""

PROGRESS_BYTES = 16 * KIB
"""A client that reads less than this within the write timeout counts as reading nothing."""

LINGER_S, LINGER_BYTES_MAX = 10.0, 256 * MIB
"""After an early answer: how long, and how much, the client may still send. Clients read the answer only afterwards; if
the connection were closed, they would see a reset instead."""

WIRE_LINGER_BYTES_MAX = 256 * KIB
"""Bytes that a client may still send after it broke a limit of the protocol."""

FRESH_S = 1.0
"""A connection that has just opened is not closed for another one: of thousands that open at once, requests wait unread
in the kernel."""

_RETRY = {429: b"1", 503: b"1"}


class _Phase(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWERING = enum.auto()
    LINGERING = enum.auto()
    CLOSED = enum.auto()


_WAITS_FOR_CLIENT = (_Phase.IDLE, _Phase.HEAD, _Phase.BODY, _Phase.LINGERING)


class Connection(asyncio.BufferedProtocol):
    """What uvicorn makes for each connection; ``edge`` is the server's."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        edge: Edge,
        handshake: Handshake | None = None,
    ) -> None:
        """``handshake``: the TLS handshake that comes before; None: plain HTTP."""
        self._app, self._server, self._app_state, self._edge = config.loaded_app, server_state, app_state, edge
        self._limits, self._handshake = edge.limits, handshake
        self._loop = _loop or asyncio.get_event_loop()
        self._reader = RequestReader(edge.limits)
        self._exchange: HttpExchange | None = None
        self._phase, self._since_s = _Phase.IDLE, self._loop.time()
        self._paused = False
        self._linger_bytes = 0  # bytes that may still come
        self._writable = asyncio.Event()
        self._writable.set()
        self._written_bytes = self._consumed_bytes = 0
        self._input_timeout = MovableTimeout(self._loop, self._input_is_late)
        self._output_timeout = MovableTimeout(self._loop, self._output_is_late)
        self._closing = self._has_answered = False

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected; it is refused when the server has no room for it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self._transport.set_write_buffer_limits(OUTPUT_BYTES_MAX)
        self._address = _host(transport.get_extra_info("peername"))
        self._server.connections.add(self)  # type: ignore[arg-type]  # only `shutdown` is called
        self._enter_phase(_Phase.IDLE, self._limits.header_timeout_s)
        if self._handshake is not None:
            self._handshake.on_handshake_end()  # from here on this object counts
        error = self._edge.connections.admit_connection(self, self._address)
        if error is not None:
            self._refuse_request(error, linger=False)  # refused connections must not take up room, either

    def connection_lost(self, error: Exception | None) -> None:
        """The connection ended, from either side."""
        self._phase, self._closing = _Phase.CLOSED, True
        self._input_timeout.close()
        self._output_timeout.close()
        self._edge.connections.remove_connection(self, self._address)
        self._server.connections.discard(self)
        if self._exchange is not None:
            self._exchange.mark_client_left()
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer that the loop reads into."""
        return memoryview(self._edge.read_buffer)

    def buffer_updated(self, count: int) -> None:
        """``count`` bytes were read."""
        if self._phase is _Phase.LINGERING:
            self._linger_bytes -= count
            if self._linger_bytes < 0:
                self.abort()
            return
        if self._phase is _Phase.CLOSED:
            return
        if self._phase is _Phase.IDLE:
            self._enter_phase(_Phase.HEAD, self._limits.header_timeout_s)
        self._reader.feed_bytes(memoryview(self._edge.read_buffer)[:count])
        self._read_on()

    def eof_received(self) -> bool:
        """The client will send nothing more, and counts as gone. The transport closes itself."""
        self._enter_phase(_Phase.LINGERING, LINGER_S)
        if self._exchange is not None:
            self._exchange.mark_client_left()
        return False

    def pause_writing(self) -> None:
        """The output buffer is full: the client does not read its answer."""
        self._writable.clear()
        self._note_progress()
        self._output_timeout.set_timeout(self._limits.write_timeout_s)

    def resume_writing(self) -> None:
        """The client has read most of what was sent."""
        self._output_timeout.clear_timeout()
        self._writable.set()

    # -- called by the server, and by its :class:`Connections`

    def shutdown(self) -> None:
        """The server is shutting down: finish the current answer, and read nothing more."""
        self._closing = True
        if self._exchange is None or self._phase is _Phase.LINGERING:
            self._close_when_sent()

    @property
    def waits_since_s(self) -> float | None:
        """Since when the connection has been waiting for bytes of its client. None: it is not, or is new."""
        if self._phase not in _WAITS_FOR_CLIENT:
            return None
        is_fresh = self._phase is _Phase.IDLE and not self._has_answered and self._loop.time() < self._since_s + FRESH_S
        return None if is_fresh else self._since_s

    def evict(self) -> None:
        """Close it: another client needs the place. Between two requests a client expects that; else it is told."""
        if self._phase is _Phase.LINGERING or (self._phase is _Phase.IDLE and self._has_answered):
            self._edge.metrics.refused.labels("evicted").inc()
            self.abort()
        else:
            self._refuse_request(
                HttpSyntaxError(503, "The server needed this connection for another client", "evicted"), linger=False
            )
        self._phase = _Phase.CLOSED  # `connection_lost` comes later: it must not be chosen again until then

    # -- called by its exchange

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer: the date."""
        return self._server.default_headers

    @property
    def is_closing(self) -> bool:
        """No further request will be read."""
        return self._closing

    @property
    def rest_bytes(self) -> int | None:
        """Bytes of the body that are still to come."""
        return self._reader.rest_bytes

    async def write(self, data: bytes) -> None:
        """Send ``data`` as soon as the client has read most of what was sent before."""
        if not self._writable.is_set():
            await self._writable.wait()
        self.write_now(data)

    def write_now(self, data: bytes) -> None:
        """Send a few bytes without waiting."""
        if not self._transport.is_closing():
            self._written_bytes += len(data)
            self._transport.write(data)

    def on_body_consumed(self) -> None:
        """The application has taken what had arrived of the body."""
        if self._exchange is not None and not self._exchange.body_complete:
            self._read_on()

    def on_answer_complete(self, exchange: HttpExchange) -> None:
        """The answer is complete: read the next request, or end the connection."""
        self._server.total_requests += 1
        self._has_answered = True
        if self._phase is _Phase.LINGERING or self._phase is _Phase.CLOSED:
            return
        if not exchange.keeps_connection:
            # A close with unread requests behind this one would reset the connection, and the answer could be lost.
            self._linger_then_close(LINGER_BYTES_MAX if not exchange.body_complete else WIRE_LINGER_BYTES_MAX)
        elif exchange.body_complete:
            if self._reader.unread_bytes:  # no direct call: thousands of pipelined requests would nest as deeply
                self._loop.call_soon(self._next_request)
            else:
                self._next_request()
        else:
            self._loop.call_soon(self._read_on)  # drops the rest of the body

    def abort(self) -> None:
        """End the connection at once; what was not sent is lost."""
        self._transport.abort()

    # -- reading

    def _read_on(self) -> None:
        """Read as long as something consumes what is read."""
        try:
            while not (blocked := self._is_blocked()):
                event = self._reader.next_event()
                if event is None:
                    break
                self._handle_event(event)
        except HttpSyntaxError as error:
            self._refuse_request(error)
            return
        self._pause_if(blocked and self._reader.unread_bytes >= READ_BYTES_MAX)

    def _is_blocked(self) -> bool:
        if self._phase in (_Phase.ANSWERING, _Phase.LINGERING, _Phase.CLOSED):
            return True
        return self._exchange is not None and self._exchange.is_full

    def _handle_event(self, event: object) -> None:
        exchange = self._exchange
        if isinstance(event, Head):
            self._start_exchange(event)
        elif exchange is not None and isinstance(event, bytes):
            exchange.push_body(event)
        elif exchange is not None and event is END:
            self._enter_phase(_Phase.ANSWERING, None)
            exchange.end_body()
            if exchange.complete:
                self._next_request()

    def _start_exchange(self, head: Head) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http" if self._handshake is None else "https",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": (self._address, 0),
            "server": None,
            "state": self._app_state.copy(),
            REQUEST_ID_KEY: request_id_of(head),
        }
        self._exchange = HttpExchange(self, head, scope)
        self._enter_phase(_Phase.BODY, self._limits.body_timeout_s)
        task = self._loop.create_task(self._exchange.run_app(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _next_request(self) -> None:
        if self._phase is not _Phase.ANSWERING:
            return
        if self._closing:
            self._close_when_sent()
            return
        self._exchange = None
        self._reader.start_next()
        self._pause_if(False)
        if not self._reader.unread_bytes:
            self._enter_phase(_Phase.IDLE, self._limits.keep_alive_s)
            return
        self._enter_phase(_Phase.HEAD, self._limits.header_timeout_s)
        self._read_on()

    def _pause_if(self, pause: bool) -> None:
        if pause != self._paused and not self._transport.is_closing():
            self._paused = pause
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # -- deadlines

    def _enter_phase(self, phase: _Phase, seconds: float | None) -> None:
        """Go on to ``phase``, which may take ``seconds``."""
        self._phase, self._since_s = phase, self._loop.time()
        if seconds is None:
            self._input_timeout.clear_timeout()
        else:
            self._input_timeout.set_timeout(seconds)

    def _input_is_late(self) -> None:
        limits = self._limits
        match self._phase:
            case _Phase.IDLE:
                self._close_when_sent()
            case _Phase.HEAD:
                text = f"The headers did not arrive within {limits.header_timeout_s:g} s"
                self._refuse_request(HttpSyntaxError(408, text, "header_timeout"))
            case _Phase.BODY:
                text = f"The body did not arrive within {limits.body_timeout_s:g} s"
                self._refuse_request(HttpSyntaxError(408, text, "body_timeout"))
            case _:
                self.abort()

    def _note_progress(self) -> None:
        self._consumed_bytes = self._written_bytes - self._transport.get_write_buffer_size()

    def _output_is_late(self) -> None:
        before = self._consumed_bytes
        self._note_progress()
        if self._consumed_bytes - before >= PROGRESS_BYTES:
            self._output_timeout.set_timeout(self._limits.write_timeout_s)
            return
        self._edge.metrics.slow_readers.labels("cut_off").inc()
        self.abort()

    # -- endings

    def _refuse_request(self, error: HttpSyntaxError, *, linger: bool = True) -> None:
        """Answer with ``error`` unless an answer has begun, and end the connection."""
        self._edge.metrics.refused.labels(error.reason).inc()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.mark_client_left()
            if exchange.started:
                self.abort()
                return
        body = ApiError(error.status, error.message, code=error.reason).encode_body()
        more = [(b"x-request-id", (exchange.request_id if exchange else request_id_of(None)).encode())]
        if error.status in _RETRY:
            more.append((b"retry-after", _RETRY[error.status]))
        self.write_now(plain_answer(error.status, body, self._server.default_headers, more))
        self._linger_then_close(WIRE_LINGER_BYTES_MAX if linger else 0)

    def _linger_then_close(self, bytes_max: int) -> None:
        """Finish sending, end the output, and drop further input."""
        self._closing = True
        self._reader = RequestReader(self._limits)  # frees what the old one held
        if not bytes_max:
            self._close_when_sent()
            return
        self._linger_bytes = bytes_max
        slow = self._transport.get_write_buffer_size() > 0
        self._enter_phase(_Phase.LINGERING, max(LINGER_S, self._limits.write_timeout_s) if slow else LINGER_S)
        self._pause_if(False)
        if not self._transport.is_closing() and self._transport.can_write_eof():  # with TLS a client sees the end later
            self._transport.write_eof()

    def _close_when_sent(self) -> None:
        """Close when the client has read everything, or after the write timeout."""
        self._closing = True
        self._enter_phase(_Phase.LINGERING, self._limits.write_timeout_s)
        self._linger_bytes = 0
        self._transport.close()


def _host(peername: Any) -> str:
    return str(peername[0]) if isinstance(peername, tuple) and peername else ""
