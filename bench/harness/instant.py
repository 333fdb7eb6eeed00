"""HTTP servers that answer every request with bytes that are made already, as quickly as Python can.

What is measured is then the client, or the router before them; tests have ``instant_server.py``, which can be scripted.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

_LENGTH = re.compile(rb"content-length: *(\d+)")
Responder = Callable[[bytes], bytes]
"""From a path to the whole response."""


class _Connection(asyncio.Protocol):
    def __init__(self, respond: Responder) -> None:
        self._respond = respond

    def connection_made(self, transport: Any) -> None:
        self._transport, self._buffer = transport, bytearray()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            fields = bytes(self._buffer[:head]).lower()
            words, length = fields.split(b" ", 2), _LENGTH.search(fields)
            if len(words) < 3 or not words[2].startswith(b"http/1.1") or b"transfer-encoding:" in fields:
                self._transport.close()  # a router that tries HTTP/2 first
                return
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                return
            del self._buffer[:end]
            self._transport.write(self._respond(words[1]))


def serve_instantly(
    respond: Responder, ports: Sequence[int] = (0,), on_listen: Callable[[int], object] | None = None
) -> None:
    """A server at each of ``ports``, until the process ends. ``on_listen`` gets the port of the last one."""
    import uvloop

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        servers = [
            await loop.create_server(lambda: _Connection(respond), "127.0.0.1", port, backlog=4096) for port in ports
        ]
        if on_listen is not None:
            on_listen(servers[-1].sockets[0].getsockname()[1])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    uvloop.run(serve())


def json_response(body: bytes) -> bytes:
    """A whole response of 200."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
