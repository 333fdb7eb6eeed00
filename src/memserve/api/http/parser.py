"""Reads HTTP/1.1 requests from bytes: one at a time, and bounded before anything is parsed (without IO).

::

    head: .. CRLF CRLF ----> body by length ------------------------------> end
                      `----> chunk size -> chunk -> CRLF -> .. -> trailers --^

A parser that is fed whatever arrives buffers without a bound and runs into the next request. This reader is polled
instead: :meth:`RequestReader.next_event` returns one event, and after :data:`END` none until :meth:`start_next`.
Unread bytes stay in the buffer, and the connection stops reading. httptools parses complete heads only.
"""

from __future__ import annotations

import enum
import re
import urllib.parse
from functools import lru_cache

import httptools
import msgspec

from memserve.api.http.config import EdgeConfig
from memserve.base.units import KIB

CHUNK_LINE_BYTES_MAX = KIB
"""A chunk's size and its extensions."""

FRAMING_BYTES_FREE, FRAMING_SHARE = 256 * KIB, 8
"""Chunk headers may take 256 KiB and an eighth of the body: parsing many tiny chunks would cost too much time."""

_PIECE_BYTES_MAX = 64 * KIB
_URLS_REMEMBERED = 64
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")
_METHOD_START = re.compile(rb"[A-Za-z]")
_END_OF_HEAD = b"\r\n\r\n"


class HttpSyntaxError(Exception):
    """The client broke the protocol or a limit. Carries the answer, after which the connection ends."""

    def __init__(self, status: int, message: str, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        #: one of a fixed set of words, for the counters
        self.reason = reason


class Head(msgspec.Struct, frozen=True):
    """One complete head."""

    method: str
    raw_path: bytes
    path: str
    query: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    keep_alive: bool
    body_bytes: int | None
    """Declared length of the body; ``None``: chunked."""

    def first_header(self, name: bytes) -> bytes | None:
        """The first header of that name."""
        for field_name, value in self.headers:
            if field_name == name:
                return value
        return None


class _End(enum.Enum):
    END = "the request is complete"


END = _End.END
"""The request is complete; bytes behind it belong to the next one."""

Event = Head | bytes | _End


class _State(enum.Enum):
    HEAD = enum.auto()
    SIZED = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK_DATA = enum.auto()
    CHUNK_END = enum.auto()
    TRAILERS = enum.auto()
    DONE = enum.auto()


class _HeadParser:
    """Parses one complete head with httptools."""

    def __init__(self, data: bytes) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = self.keep_alive = False
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are not supported: the request is answered as if it had not asked for one
        except httptools.HttpParserError as error:
            raise HttpSyntaxError(400, f"Invalid HTTP request: {str(error)[:100]}", "malformed") from None
        if not self.complete:
            raise HttpSyntaxError(400, "Invalid HTTP request", "malformed")

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()  # later the value is of the next request


class RequestReader:
    """The bytes of one connection, cut into the events of its requests."""

    def __init__(self, limits: EdgeConfig) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._state = _State.HEAD
        self._searched = 0  # bytes of the buffer in which a head does not end
        self._rest = 0  # bytes to come of the body, or of the chunk
        self._body_bytes = self._framing_bytes = self._trailer_bytes = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes that arrived and were not read yet."""
        return len(self._buffer)

    @property
    def rest_bytes(self) -> int | None:
        """Bytes of the body that are still to come. None: unknown, the body is chunked."""
        return self._rest if self._state in (_State.SIZED, _State.DONE) else None

    def feed_bytes(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def start_next(self) -> None:
        """Go on to the request after the complete one."""
        self._state, self._searched = _State.HEAD, 0

    def next_event(self) -> Event | None:
        """The next event. None: it needs more bytes. Raises :class:`HttpSyntaxError`, after which nothing can be
        read."""
        match self._state:
            case _State.HEAD:
                return self._next_head()
            case _State.DONE:
                return None
            case _State.SIZED:
                return self._next_sized_piece()
        return self._next_chunked_piece()

    # -- heads

    def _next_head(self) -> Head | None:
        buffer = self._buffer
        if not buffer:
            return None
        if buffer.startswith((b"\r", b"\n")):  # some clients add an empty line after a body
            del buffer[: len(buffer) - len(buffer.lstrip(b"\r\n"))]
        if buffer and not _METHOD_START.match(buffer):
            raise HttpSyntaxError(
                400, "Not an HTTP request: the server speaks plain HTTP/1.1, without TLS", "malformed"
            )
        end = buffer.find(_END_OF_HEAD, max(0, self._searched - len(_END_OF_HEAD) + 1))
        self._searched = len(buffer)
        most = self._limits.head_bytes_max
        if (len(buffer) if end < 0 else end) > most:
            raise HttpSyntaxError(431, f"The headers are longer than {most} bytes", "head")
        if end < 0:
            return None
        data = bytes(buffer[: end + len(_END_OF_HEAD)])
        del buffer[: len(data)]
        return self._parse_head(data)

    def _parse_head(self, data: bytes) -> Head:
        head_parser = _HeadParser(data)
        limits, version = self._limits, head_parser.parser.get_http_version()
        if len(head_parser.url) > limits.url_bytes_max:
            raise HttpSyntaxError(414, f"The URL is longer than {limits.url_bytes_max} bytes", "url")
        if len(head_parser.headers) > limits.fields_max:
            raise HttpSyntaxError(431, f"The request has more than {limits.fields_max} headers", "fields")
        if version not in ("1.0", "1.1"):
            raise HttpSyntaxError(505, "The server speaks only HTTP/1.0 and HTTP/1.1", "malformed")
        raw_path, query, path = _split_url(head_parser.url)
        body_bytes = self._start_body(head_parser.headers, version)
        method = head_parser.parser.get_method().decode("ascii")
        del head_parser.parser  # a reference cycle
        keep_alive = head_parser.keep_alive and version == "1.1"
        return Head(method, raw_path, path, query, version, head_parser.headers, keep_alive, body_bytes)

    def _start_body(self, headers: list[tuple[bytes, bytes]], version: str) -> int | None:
        """Enter the state after a head; httptools has refused repeated and contradicting lengths."""
        fields = dict(headers)
        if sum(name == b"transfer-encoding" for name, _ in headers) > 1:  # another server may follow the other one
            raise HttpSyntaxError(400, "The request has several Transfer-Encoding headers", "malformed")
        self._body_bytes = self._framing_bytes = self._trailer_bytes = 0
        if (coding := fields.get(b"transfer-encoding")) is not None:
            if coding.strip().lower() != b"chunked" or version != "1.1":
                raise HttpSyntaxError(501, "Transfer-Encoding must be 'chunked', with HTTP/1.1", "malformed")
            self._state = _State.CHUNK_SIZE
            return None
        self._rest = int(fields.get(b"content-length", b"0"))
        self._state = _State.SIZED
        return self._rest

    # -- bodies

    def _next_sized_piece(self) -> Event | None:
        if self._rest == 0:
            self._state = _State.DONE
            return END
        return self._take_piece(self._rest) or None

    def _take_piece(self, most: int) -> bytes:
        piece = bytes(self._buffer[: min(most, _PIECE_BYTES_MAX)])
        del self._buffer[: len(piece)]
        self._rest -= len(piece)
        return piece

    def _next_chunked_piece(self) -> Event | None:
        """The part of the body that the buffer has, in one piece."""
        pieces: list[bytes] = []
        read_bytes = 0
        while read_bytes < _PIECE_BYTES_MAX and self._state is not _State.SIZED:
            if self._state is _State.CHUNK_DATA:
                piece = self._take_piece(self._rest)
                pieces.append(piece)
                read_bytes += len(piece)
                if self._rest:
                    break
                self._state = _State.CHUNK_END
            elif not self._read_framing_line():
                break
        self._body_bytes += read_bytes
        return b"".join(pieces) or (self._next_sized_piece() if self._state is _State.SIZED else None)

    def _read_framing_line(self) -> bool:
        """One line around the chunks. False: it is not complete yet."""
        in_trailers = self._state is _State.TRAILERS
        most = self._limits.trailer_bytes_max - self._trailer_bytes if in_trailers else CHUNK_LINE_BYTES_MAX
        end = self._buffer.find(b"\r\n", 0, most + 2)
        if end < 0:
            if len(self._buffer) > most:
                raise _too_many_trailers(self._limits) if in_trailers else _bad_chunk()
            return False
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        self._framing_bytes += end + 2
        if self._framing_bytes > FRAMING_BYTES_FREE + self._body_bytes // FRAMING_SHARE:
            raise HttpSyntaxError(400, "The chunks of the body are too small: send larger ones, or a length", "chunks")
        match self._state:
            case _State.CHUNK_SIZE:
                self._start_chunk(line)
            case _State.CHUNK_END if line:
                raise _bad_chunk()
            case _State.CHUNK_END:
                self._state = _State.CHUNK_SIZE
            case _:
                self._check_trailer(line)
        return True

    def _start_chunk(self, line: bytes) -> None:
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise _bad_chunk()
        self._rest = int(size.group(1), 16)
        self._state = _State.CHUNK_DATA if self._rest else _State.TRAILERS

    def _check_trailer(self, line: bytes) -> None:
        """Count a trailer and drop it: trailers have no meaning here."""
        self._trailer_bytes += len(line) + 2
        if b"\n" in line or b"\r" in line:
            raise _bad_chunk()
        if not line:
            self._state, self._rest = _State.SIZED, 0  # nothing more: the end
        elif self._trailer_bytes > self._limits.trailer_bytes_max:
            raise _too_many_trailers(self._limits)


@lru_cache(_URLS_REMEMBERED)
def _split_url(url: bytes) -> tuple[bytes, bytes, str]:
    """Path and query as they came, and the path decoded; most requests are for one of a few."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError:
        raise HttpSyntaxError(400, "Invalid URL", "malformed") from None
    raw_path = parsed.path or b"/"
    return raw_path, parsed.query or b"", urllib.parse.unquote(raw_path.decode("ascii"))


def _bad_chunk() -> HttpSyntaxError:
    return HttpSyntaxError(400, "The chunked body is malformed", "malformed")


def _too_many_trailers(limits: EdgeConfig) -> HttpSyntaxError:
    return HttpSyntaxError(431, f"The trailers are longer than {limits.trailer_bytes_max} bytes", "trailers")
