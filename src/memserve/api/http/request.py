"""One HTTP request and its answer, as ASGI sees them."""

from __future__ import annotations

import asyncio
import http
import logging
import os
import re
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from memserve.api.http.parser import Head
from memserve.base.units import KIB

log = logging.getLogger(__name__)

REQUEST_ID_KEY = "memserve.request_id"
"""The key of a request's id in its ASGI scope."""

WHEN_GONE_KEY = "memserve.when_gone"
"""Where the ASGI scope of our own connections has :meth:`HttpExchange.call_when_client_left`, which costs less than a
task that waits for ``http.disconnect``."""

BODY_HELD_BYTES_MAX = 32 * KIB
"""Body bytes that may wait for the application; beyond them nothing is read from the client."""

WRITE_BYTES_MAX = 64 * KIB
"""Bytes of one write; the next waits until the client has read most of what was written before."""

DROPPED_BODY_BYTES_MAX = 64 * KIB
"""The rest of a body that is read and dropped to keep a connection; a longer rest ends it."""

RANDOM_BYTES = 4096

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus
}  # fmt: skip
_WITHOUT_BODY = (204, 304)


def request_id_of(head: Head | None) -> str:
    """The client's own id if it is well-formed, else a new one."""
    client_id = head.first_header(b"x-request-id") if head is not None else None
    if client_id is not None and _REQUEST_ID.fullmatch(client_id):
        return client_id.decode("ascii")
    return f"req-{new_id()}"


_random = bytearray()  # to be given out
os.register_at_fork(after_in_child=_random.clear)


def random_bytes(count: int) -> bytes:
    """``count`` bytes, at most :data:`RANDOM_BYTES`, that cannot be guessed. For the event loop's thread. The kernel is
    asked once for many: each such call would let another thread take the interpreter."""
    if len(_random) < count:
        _random.extend(os.urandom(RANDOM_BYTES))
    chunk = bytes(_random[-count:])
    del _random[-count:]
    return chunk


def new_id() -> str:
    """128 random bits as hexadecimal digits."""
    return random_bytes(16).hex()


def head_of_answer(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Status line, headers, and the empty line."""
    lines = b"".join([b"%b: %b\r\n" % field for field in headers])
    if not lines.count(b"\r") == lines.count(b"\n") == len(headers):
        broken = [name for name, value in headers if b"\r" in name + value or b"\n" in name + value]
        raise RuntimeError(f"the header {broken[0]!r} of an answer contains a line break")
    return (_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status) + lines + b"\r\n"


class Wire(Protocol):
    """The connection, as an exchange sees it."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""

    @property
    def is_closing(self) -> bool:
        """No further request will be read."""

    @property
    def rest_bytes(self) -> int | None:
        """Bytes of the body that are still to come; ``None``: unknown."""

    async def write(self, data: bytes) -> None:
        """Send ``data`` as fast as the client reads it."""

    def write_now(self, data: bytes) -> None:
        """Send a few bytes without waiting."""

    def on_body_consumed(self) -> None:
        """The application has taken what had arrived of the body."""

    def on_answer_complete(self, exchange: HttpExchange) -> None:
        """The answer is complete."""

    def abort(self) -> None:
        """End the connection at once."""


class HttpExchange:
    """Runs the application for one request."""

    def __init__(self, wire: Wire, head: Head, scope: Scope) -> None:
        self._wire, self._head, self._scope = wire, head, scope
        self._wakeup = asyncio.Event()
        self._body = bytearray()
        self._wants_100 = (head.first_header(b"expect") or b"").lower() == b"100-continue"
        self._start: Message | None = None  # not sent yet: it travels with the first piece of the body
        self._chunked = False
        self._to_send: int | None = None  # bytes left of a declared length
        self._on_client_left: Callable[[], None] | None = None
        scope[WHEN_GONE_KEY] = self.call_when_client_left
        self.body_complete = False
        self.started = False
        self.complete = False
        self.client_left = False
        self.keeps_connection = False

    @property
    def request_id(self) -> str:
        """The client's, or the server's."""
        return str(self._scope[REQUEST_ID_KEY])

    @property
    def is_full(self) -> bool:
        """The application must take some of the body before more is read."""
        return len(self._body) >= BODY_HELD_BYTES_MAX and not self.complete

    # -- called by the connection

    def push_body(self, data: bytes) -> None:
        """A piece of the body. After an early answer it is dropped."""
        if not self.complete and not self.client_left:
            self._body += data
            self._wakeup.set()

    def end_body(self) -> None:
        """The body is complete."""
        self.body_complete = True
        self._wakeup.set()

    def mark_client_left(self) -> None:
        """The client is gone, or cut off."""
        self.client_left = True
        self._body.clear()
        self._wakeup.set()
        if self._on_client_left is not None:
            self._on_client_left()

    # -- called by the application

    def call_when_client_left(self, act: Callable[[], None]) -> Callable[[], None]:
        """``act()`` as soon as the client is gone, in place of what was asked for before. Returns what takes it back.
        The body must have been read."""
        self._on_client_left = act
        if self.client_left:
            act()
        return self._clear_on_client_left

    def _clear_on_client_left(self) -> None:
        self._on_client_left = None

    # -- ASGI

    async def run_app(self, app: ASGIApp) -> None:
        """Run the application to its end."""
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the server is shutting down
        except Exception:
            log.exception("the application failed")
        finally:
            self._scope.pop(WHEN_GONE_KEY, None)  # a reference cycle
        if not self.complete and not self.client_left:
            self._wire.abort()

    async def receive(self) -> Message:
        """What has arrived of the body; after its end: wait for the client to leave."""
        if self._wants_100 and not self.body_complete and not self.started and not self.client_left:
            self._wire.write_now(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._wants_100 = False
        self._wire.on_body_consumed()
        if not self.client_left and not self.complete:
            if not self._wakeup.is_set():
                await self._wakeup.wait()
            self._wakeup.clear()
        if self.client_left or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.body_complete}

    async def send(self, message: Message) -> None:
        """Send a part of the answer; dropped when the client is gone."""
        if self.client_left:
            return
        if self.complete:
            raise RuntimeError("the answer is complete")
        if message["type"] == "http.response.start":
            self._start = message
            self.started = True
            return
        if not self.started:
            raise RuntimeError("an answer begins with its status")
        await self._send_body(message.get("body", b""), more=message.get("more_body", False))

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        data = b""
        if self._start is not None:
            data, self._start = self._head_of_answer(self._start, None if more else len(body)), None
        data += self._frame_body(body, more=more)
        for offset in range(0, len(data), WRITE_BYTES_MAX):
            await self._wire.write(data[offset : offset + WRITE_BYTES_MAX])
        if not more and not self.client_left:
            self.complete = True
            self.keeps_connection = self.keeps_connection and not self._to_send
            self._body.clear()
            self._wakeup.set()
            self._wire.on_answer_complete(self)

    def _frame_body(self, body: bytes, *, more: bool) -> bytes:
        if self._head.method == "HEAD":
            self._to_send = None
            return b""
        if not self._chunked:
            if self._to_send is not None:
                self._to_send -= len(body)
            return body
        framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return framed if more else framed + b"0\r\n\r\n"

    def _head_of_answer(self, start: Message, whole_bytes: int | None) -> bytes:
        status, fields = start["status"], [(name.lower(), value) for name, value in start.get("headers", ())]
        header_values = dict(fields)
        headers = [*self._wire.default_headers, *fields]
        headers.append((b"x-request-id", self.request_id.encode("ascii")))
        if b"content-length" in header_values:
            self._to_send = int(header_values[b"content-length"])
        elif whole_bytes is not None and status not in _WITHOUT_BODY:
            headers.append((b"content-length", b"%d" % whole_bytes))
        elif self._head.version == "1.1" and status not in _WITHOUT_BODY:
            self._chunked = True
            headers.append((b"transfer-encoding", b"chunked"))
        self.keeps_connection = self._may_keep(header_values, status)
        if not self.keeps_connection and b"connection" not in header_values:
            headers.append((b"connection", b"close"))
        return head_of_answer(status, headers)

    def _may_keep(self, header_values: dict[bytes, bytes], status: int) -> bool:
        rest = self._wire.rest_bytes
        body_ends = self.body_complete or (rest is not None and rest <= DROPPED_BODY_BYTES_MAX and not self._wants_100)
        delimited = self._chunked or b"content-length" in header_values or self._head.version == "1.1"
        wants_keep_alive = self._head.keep_alive and header_values.get(b"connection", b"").lower() != b"close"
        return wants_keep_alive and body_ends and delimited and not self._wire.is_closing


def plain_answer(
    status: int, body: bytes, headers: list[tuple[bytes, bytes]], more: list[tuple[bytes, bytes]] | None = None
) -> bytes:
    """A whole answer of the server itself, after which the connection ends."""
    all_headers = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *(more or ()),
    ]
    return head_of_answer(status, all_headers) + body
