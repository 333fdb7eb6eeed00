"""A server that answers at once, for tests of the load client: raw HTTP on a thread of its own, no framework.

It speaks what a test scripts: how many tokens, which pauses, which failures; and it keeps what it was asked.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "instant"


@dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Script:
    """How to answer one request."""

    pieces: list[str] = field(default_factory=lambda: ["One", " two", " three"])
    pauses_s: list[float] = field(default_factory=list)  # before each piece
    status: int = 200
    error: str = ""
    breaks_after: int | None = None  # pieces, then the connection ends
    usage: dict[str, Any] | None = field(default_factory=lambda: {
        "prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}
    })  # fmt: skip
    cut: int | None = None  # bytes a write: events arrive in pieces


@dataclass
class InstantServer:
    """Its address, and what it was asked, in order of arrival."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    script: Callable[[Asked], Script] = lambda asked: Script()
    close: Callable[[], None] = lambda: None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer_one(head.decode("latin-1"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer_one(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": MODEL}]})
            return
        asked = Asked(path, headers, json.loads(body))
        self.asked.append(asked)
        script = self.script(asked)
        if script.status != 200:
            _whole(writer, script.status, {"error": {"message": script.error}})
            return
        await self._stream(script, asked, writer)

    async def _stream(self, script: Script, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        chat = asked.path.endswith("chat/completions")
        if chat:
            await self._event(script, writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for at, piece in enumerate(script.pieces):
            if script.breaks_after == at:
                raise ConnectionResetError
            if script.pauses_s:
                await asyncio.sleep(script.pauses_s[at])
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await self._event(script, writer, {"choices": [{"index": 0, "finish_reason": None, **choice}]})
        if script.error:
            await self._event(script, writer, {"error": {"message": script.error}})
        else:
            end = {"delta": {}} if chat else {"text": ""}
            await self._event(script, writer, {"choices": [{"index": 0, "finish_reason": "stop", **end}]})
            story = [{"fact": "route", "value": "p1 to d1"}]
            await self._event(script, writer, {"choices": [], "usage": script.usage, "memserve": {"story": story}})
        _chunk(writer, b": a comment\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def _event(self, script: Script, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        step = script.cut or len(data)
        for at in range(0, len(data), step):
            _chunk(writer, data[at : at + step])
            if script.cut:
                await writer.drain()
                await asyncio.sleep(0)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)


@contextmanager
def instant_server(script: Callable[[Asked], Script] | None = None) -> Iterator[InstantServer]:
    """A server on a free port until the block ends, or until its ``close`` is called: then the port refuses."""
    served = InstantServer(script=script or (lambda asked: Script()))
    ready = threading.Event()
    loop = asyncio.new_event_loop()

    def run() -> None:
        connections: set[asyncio.StreamWriter] = set()

        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(writer)
            await served.answer(reader, writer)

        async def serve() -> None:
            server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
            served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            stopped = asyncio.Event()

            def close() -> None:
                server.close()
                for writer in connections:
                    writer.transport.abort()
                stopped.set()

            served.close = lambda: loop.call_soon_threadsafe(close)
            ready.set()
            await stopped.wait()

        loop.run_until_complete(serve())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield served
    finally:
        if thread.is_alive():
            served.close()
        thread.join(10)
        loop.run_until_complete(_cancel_rest())
        loop.close()


async def _cancel_rest() -> None:
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
