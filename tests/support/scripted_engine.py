"""Servers that speak OpenAI's HTTP as vLLM does, by a script: what each answers, how it breaks, what it publishes.

Raw sockets in one event loop on a thread of its own. A script is a coroutine that gets the request and the connection's
writer, and may do anything to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "scripted"


@dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: bytes
    pieces: Callable[[], AsyncIterator[bytes]] | None = None
    """Of a body that is still to come."""

    @property
    def fields(self) -> dict[str, Any]:
        """The body as JSON."""
        return json.loads(self.body)


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def whole(status: int, body: bytes, *more: str, kind: str = "application/json") -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(body)}", "connection: close"]
    lines += [*more, "", ""]
    return "\r\n".join(lines).encode() + body


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
ANSWER = b'{"object":"text_completion",  "choices":[{"index":0,"text":"ok"}]}'
EVENTS = [b'data: {"choices":[{"index":0,"text":"o"}]}\n\n', b'data: {"choices":[{"index":0,"text":"k"}]}\n\n']
DONE = b"data: [DONE]\n\n"


async def well(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A right answer, as a stream if it is asked for."""
    if asked.fields.get("stream"):
        writer.write(STREAM_HEAD + b"".join(chunk(event) for event in (*EVENTS, DONE)) + b"0\r\n\r\n")
    else:
        writer.write(whole(200, ANSWER))


@dataclass
class ScriptedEngine:
    """Its address, what it was asked, and what it does."""

    url: str = ""
    models: list[str] = field(default_factory=lambda: [MODEL])
    script: Script = well
    health: Script | None = None
    metrics: bytes = b""
    tokens: Callable[[dict[str, Any]], list[int]] | None = None
    asked: list[Asked] = field(default_factory=list)
    """Requests for answers."""
    looks: int = 0
    """How often it was asked for its models."""
    streams_bodies: bool = False
    """Bodies without a length are left to the script."""
    pages: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body by path, in the place of what it says itself."""
    seen: set[str] = field(default_factory=set)
    """All paths that it was asked for."""
    close: Callable[[], None] = lambda: None
    """Closes its port."""

    @property
    def name(self) -> str:
        """``HOST:PORT``."""
        return self.url.removeprefix("http://")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
            is_chunked = headers.get("transfer-encoding") == "chunked"
            if is_chunked and self.streams_bodies:
                await self._one(Asked(first.split()[1], headers, b"", lambda: _pieces(reader)), writer)
                return
            body = await (_chunks(reader) if is_chunked else reader.readexactly(int(headers.get("content-length", 0))))
            await self._one(Asked(first.split()[1], headers, body), writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _one(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.seen.add(asked.path)
        if asked.path in self.pages:
            status, body = self.pages[asked.path]
            writer.write(whole(status, body))
        elif asked.path == "/health":
            await self.health(asked, writer) if self.health is not None else writer.write(whole(200, b""))
        elif asked.path == "/v1/models":
            self.looks += 1
            cards = [{"id": name, "object": "model", "root": name} for name in self.models]
            writer.write(whole(200, json.dumps({"data": cards}).encode()))
        elif asked.path == "/metrics":
            writer.write(whole(200, self.metrics, kind="text/plain"))
        elif asked.path == "/tokenize":
            tokens = self.tokens(asked.fields) if self.tokens is not None else None
            answer = whole(404, b"{}") if tokens is None else whole(200, json.dumps({"tokens": tokens}).encode())
            writer.write(answer)
        else:
            self.asked.append(asked)
            await self.script(asked, writer)


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A body without a length."""
    while size := int(await reader.readline() or b"no end", 16):
        yield (await reader.readexactly(size + 2))[:size]
    await reader.readline()


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    return b"".join([piece async for piece in _pieces(reader)])


@contextlib.contextmanager
def scripted_engines(count: int) -> Iterator[list[ScriptedEngine]]:
    """So many servers on ports of 127.0.0.1, until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> list[tuple[ScriptedEngine, asyncio.Server]]:
        started = []
        for _ in range(count):
            engine = ScriptedEngine()
            server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
            engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            engine.close = lambda server=server: loop.call_soon_threadsafe(server.close)
            started.append((engine, server))
        return started

    servers = asyncio.run_coroutine_threadsafe(start(), loop).result(10)

    async def stop() -> None:
        for _, server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield [engine for engine, _ in servers]
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
