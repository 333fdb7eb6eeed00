"""One HTTP/1.1 call to another server: a connection of its own, every wait with a deadline, bodies as they come.

A call costs a tenth of what it costs with httpx, and can be given up from outside in one step
(:meth:`HttpCall.abort_call`).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import httptools

from memserve.base.units import KIB

CONNECT_S = 5.0
READ_BYTES = 64 * KIB
HEAD_BYTES_MAX = 64 * KIB
Headers = Sequence[tuple[bytes, bytes]]
NOT_SENT_ON = frozenset((
    b"host", b"content-length", b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"accept-encoding",
))  # fmt: skip
"""Headers of a client's connection, which are not those of a call for it."""
NOT_SENT_BACK = frozenset((
    b"content-length", b"connection", b"keep-alive", b"transfer-encoding", b"trailer", b"upgrade", b"x-request-id",
    b"server", b"date", b"set-cookie",
))  # fmt: skip
"""Headers of an answer that are the relaying server's own."""


class HttpFault(Exception):
    """The server did not answer as HTTP asks for."""

    def __init__(
        self, reason: str, *, status: int = 502, refuses: bool = False, retry_after_s: float | None = None
    ) -> None:
        """``status``: what a client gets that hears of it; 504 where a deadline passed. ``refuses``: its port is
        closed. ``retry_after_s``: it is busy, and said for how long."""
        super().__init__(reason)
        self.reason, self.status, self.refuses, self.retry_after_s = reason, status, refuses, retry_after_s


class HttpCall:
    """One request and its answer. Use it once, and close it."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        """``url``: scheme, host and port. ``tls`` None: an ordinary client's, for ``https``."""
        self.url = url
        #: when bytes came last, by ``time.monotonic_ns``; 0: none did
        self.last_seen_ns = 0
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._tls: ssl.SSLContext | bool | None = (tls or True) if parts.scheme == "https" else None
        self._writer: asyncio.StreamWriter | None = None
        self._aborted: HttpFault | None = None
        self._broken: HttpFault | None = None
        self._head_complete = self._complete = False
        self._body: deque[bytes] = deque()
        #: of the answer, names in lower case
        self.headers: list[tuple[bytes, bytes]] = []
        self.status = 0

    async def send_request(
        self, method: str, path: str, headers: Headers, body: bytes | AsyncIterator[bytes], deadline_s: float
    ) -> None:
        """Send the request, and wait for the head of the answer until ``deadline_s`` (seconds) are over.

        ``body``: pieces are sent as they come, until the server answers: what it refuses it need not read to its end.
        What they raise aborts the call. Raises :class:`HttpFault`.
        """
        try:
            async with asyncio.timeout(min(CONNECT_S, deadline_s)):
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise HttpFault("no connection in time", status=504) from None
        except (OSError, ValueError) as error:
            raise HttpFault(f"no connection: {error}", refuses=True) from None
        lines = [b"%b %b HTTP/1.1" % (method.encode(), path.encode("latin-1")), b"host: %b" % self._authority()]
        lines += [b"%b: %b" % header for header in headers]
        framing = b"content-length: %d" % len(body) if isinstance(body, bytes) else b"transfer-encoding: chunked"
        lines += [b"connection: close", framing, b"", body if isinstance(body, bytes) else b""]
        self._parser = httptools.HttpResponseParser(self)
        sending: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(deadline_s):
                self._writer.write(b"\r\n".join(lines))
                await self._writer.drain()
                if not isinstance(body, bytes):
                    sending = asyncio.create_task(self._send_pieces(self._writer, body))
                head_bytes = 0
                while not self._head_complete:
                    head_bytes += await self._read_data()
                    if head_bytes > HEAD_BYTES_MAX and not self._head_complete:
                        raise HttpFault("its headers never end")
        except TimeoutError:
            raise HttpFault(f"no answer within {deadline_s:g} s", status=504) from None
        except OSError as error:
            raise self._aborted or HttpFault(f"it broke the connection off: {error}") from None
        finally:
            if sending is not None:
                sending.cancel()

    async def body_pieces(self, silence_s: float) -> AsyncIterator[bytes]:
        """The body as it comes; never empty. Raises :class:`HttpFault` when it breaks off, or when nothing comes for
        ``silence_s`` seconds."""
        fault: HttpFault | None = None
        while True:
            while self._body:
                yield self._body.popleft()
            if fault is not None:  # what came before it comes first
                raise fault
            if self._complete:
                return
            try:
                async with asyncio.timeout(silence_s):
                    await self._read_data()
            except HttpFault as engine_fault:
                fault = engine_fault
            except TimeoutError:
                fault = HttpFault(f"it fell silent for {silence_s:g} s", status=504)
            except OSError as error:
                fault = self._aborted or HttpFault(f"it broke the answer off: {error}")

    async def read_body(self, limit_bytes: int, silence_s: float) -> bytes:
        """The whole body. Raises :class:`HttpFault`, also for one of more than ``limit_bytes``."""
        body = bytearray()
        async for piece in self.body_pieces(silence_s):
            body += piece
            if len(body) > limit_bytes:
                raise HttpFault(f"its answer is longer than {limit_bytes} bytes")
        return bytes(body)

    def header(self, name: bytes) -> str:
        """A header of the answer; empty: there is none."""
        return next((value.decode("latin-1") for header_name, value in self.headers if header_name == name), "")

    def abort_call(self, reason: str) -> None:
        """Let all waits end with an :class:`HttpFault`."""
        self._aborted = self._aborted or HttpFault(reason, status=504)
        if self._writer is not None:
            self._writer.transport.abort()

    def close(self) -> None:
        """Give the connection up, whatever has come."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _send_pieces(self, writer: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
        try:
            async for piece in pieces:
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        except OSError:
            return  # the server reads no more: its answer, if it sent one, says why
        except Exception as error:  # the wait for the answer ends with it
            self.abort_call(f"its body broke off: {error}")

    def _authority(self) -> bytes:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}".encode("latin-1")

    async def _read_data(self) -> int:
        if fault := self._aborted or self._broken:
            raise fault
        data = await self._reader.read(READ_BYTES)
        if self._aborted is not None:
            raise self._aborted
        if not data:
            self._on_disconnect()
            return 0
        self.last_seen_ns = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._complete:  # what follows a whole answer does not matter
                return len(data)
            self._broken = HttpFault(f"it does not speak HTTP: {error}")
            if not self._head_complete:
                raise self._broken from None
        return len(data)

    def _on_disconnect(self) -> None:
        """The connection has ended: only a body without a length may end so."""
        names = {name for name, _ in self.headers}
        if not self._head_complete:
            raise HttpFault("it ended the connection without an answer")
        if not self._complete and names & {b"content-length", b"transfer-encoding"}:
            raise HttpFault("it ended the connection in the middle of its answer")
        self._complete = True

    # -- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped."""
        if not self._head_complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status, self._head_complete = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
