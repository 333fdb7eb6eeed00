"""Raw connections to a server, for tests that break the protocol or its limits."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx

CLOSED_S = 20.0
"""By then each of the short deadlines of these tests has passed."""


@contextlib.contextmanager
def connect(url: str, *, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection; ``receive_bytes``: the kernel keeps so much for a client that does not read."""
    address = httpx.URL(url)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(CLOSED_S)
        connection.connect((address.host, address.port or 80))
        yield connection


def post(path: str, body: bytes, *more: bytes) -> bytes:
    """A whole request with a JSON body."""
    length = b"content-length: %d" % len(body)
    return head(b"POST", path, b"content-type: application/json", length, *more) + body


def head(method: bytes, path: str, *fields: bytes) -> bytes:
    """Request line, headers, and the empty line."""
    return b"\r\n".join([b"%b %b HTTP/1.1" % (method, path.encode()), b"host: x", *fields, b"", b""])


def until_closed(connection: socket.socket) -> bytes:
    """Everything the server sends until it ends the connection, whichever way. Fails after :data:`CLOSED_S`."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            data += piece
    return bytes(data)


def until(connection: socket.socket, end: bytes) -> bytes:
    """What the server sends up to ``end``."""
    data = b""
    while end not in data:
        piece = connection.recv(1 << 16)
        assert piece, data[-500:]
        data += piece
    return data


def flood(connection: socket.socket, piece: bytes, most: int) -> int:
    """Send ``piece`` again and again until the server ends the connection. Returns the bytes it took of at most
    ``most``."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += connection.send(piece)
    return sent


class Answers:
    """Reads whole answers with a length off one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def next(self, *, with_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Status, headers, body."""
        status = int(self._file.readline().split()[1])
        headers: dict[str, str] = {}
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name] = value.rstrip("\r\n")
        body = self._file.read(int(headers.get("content-length", 0))) if with_body else b""
        return status, headers, body


def error_of(data: bytes) -> dict[str, Any]:
    """The error in OpenAI's form of one whole answer."""
    return dict(json.loads(data.partition(b"\r\n\r\n")[2])["error"])
