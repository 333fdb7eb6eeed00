"""The attackers of ``soak.py``: with their own key, beside the honest clients, one attack after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from soak_load import Target

from hostile_requests import HostileCase, hostile_cases

BODY_BYTES_MAX = 2_000_000  # larger bodies of the table are skipped, because this machine also runs the clients
RAW_S_MAX = 10.0
SLOW_S_MAX = 20.0


@dataclass
class Attacked:
    """The server's answers."""

    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Answers of 500: a request caused an internal error."""

    def answered(self, name: str, status: int, text: str) -> None:
        self.statuses[status] += 1
        if status == 500:
            self.failures.append(f"{name}: {text[:300]}")


class Attacker:
    """Draws attacks from its own seed, until stopped."""

    def __init__(self, target: Target, found: Attacked, number: int, seed: int) -> None:
        self._target, self._found = target, found
        self._draw = random.Random(f"attack-{seed}-{number}")
        long = "hello " * (target.fits_tokens + 9000)
        cases = hostile_cases(target.model, 8192, long)
        self._cases = [case for case in cases if len(case.body) <= BODY_BYTES_MAX]

    async def run(self, stop: asyncio.Event, pause_s: float) -> None:
        """One attack after the other."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._table, self._table, self._parameters, self._parameters, self._raw, self._raw, self._slow_reader,
            self._flood, self._pins,
        ]  # fmt: skip
        while not stop.is_set():
            kind = self._draw.choice(kinds)
            self._found.attacks[kind.__name__.lstrip("_")] += 1
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):  # being cut off is a correct answer
                await kind()
            await asyncio.sleep(self._draw.uniform(0, pause_s))

    async def _post(self, name: str, path: str, data: bytes, method: str = "POST", headers: Any = None) -> None:
        headers = dict(headers or {"content-type": "application/json"}, authorization=f"Bearer {self._target.key}")
        patience = aiohttp.ClientTimeout(total=self._draw.choice((1.0, 10.0, 60.0)))
        async with self._target.http.request(
            method, f"{self._target.url}{path}", data=data or None, headers=headers, timeout=patience
        ) as response:
            self._found.answered(name, response.status, await response.text())

    async def _table(self) -> None:
        """A malformed request of the tests' table."""
        case: HostileCase = self._draw.choice(self._cases)
        await self._post(case.name, case.path, case.body, case.method, case.headers)

    def _hostile_body(self) -> dict[str, Any]:
        draw = self._draw
        hostile: list[dict[str, Any]] = [
            {"stop_token_ids": [2**31 - 1], "min_tokens": 2},
            {"logit_bias": {str(i): draw.uniform(-100, 100) for i in range(300)}},
            {"logit_bias": {str(draw.randrange(10**6)): 100}},
            {"n": 64, "stop": [chr(97 + i % 26) * 200 + str(i) for i in range(32)]},
            {"n": 8, "best_of": 16, "logprobs": 20},
            {"use_beam_search": True, "beam_width": 8, "n": 4},
            {"temperature": 2, "top_p": 1e-9, "top_k": 1, "min_p": 1, "repetition_penalty": 2},
            {"priority": -(2**31), "timeout_s": 0.001},
            {"prompt": [draw.randrange(-5, 60000) for _ in range(draw.randrange(1, 4000))]},
            {"prompt": "\u200d" * draw.randrange(1, 30000)},
            {"prompt": [[1]] * draw.randrange(1, 300), "max_tokens": 1},
            {"echo": True, "logprobs": 20, "prompt": [draw.randrange(1000, 40000) for _ in range(2000)]},
            {"cache_salt": "x" * draw.randrange(1, 3000)},
            {"session": str(draw.random()), "session_ttl_s": 1e6},
        ]
        body = {"model": self._target.model, "prompt": "hi", "max_tokens": 8} | draw.choice(hostile)
        return body | {"stream": draw.random() < 0.3} if "best_of" not in body else body

    async def _parameters(self) -> None:
        """Parameters at and beyond their bounds."""
        await self._post("parameters", "/v1/completions", json.dumps(self._hostile_body()).encode())

    async def _flood(self) -> None:
        """Many small requests at once; most clients leave."""
        body = json.dumps({"model": self._target.model, "prompt": "hi " * 20, "max_tokens": 4}).encode()
        posts = (self._post("flood", "/v1/completions", body) for _ in range(self._draw.randrange(5, 60)))
        await asyncio.gather(*posts, return_exceptions=True)

    async def _pins(self) -> None:
        """Sessions and documents with a long lifetime, rarely deleted."""
        for _ in range(self._draw.randrange(1, 10)):
            name = f"a{self._draw.randrange(10**9)}"
            text = "pin " * self._draw.randrange(1, 300)
            body = {"text": text, "ttl_s": self._draw.choice((1, 30)), "endpoint": "completions"}
            await self._post("pins", f"/v1/documents/{name}", json.dumps(body).encode(), "PUT")

    async def _slow_reader(self) -> None:
        """A stream with much output that is never read."""
        body = {"model": self._target.model, "prompt": "a story", "max_tokens": 400, "ignore_eos": True}
        data = json.dumps(body | {"n": 8, "logprobs": 20, "stream": True}).encode()
        reader, writer = await self._connect(limit=1024)
        try:
            writer.write(self._head(len(data)) + data)
            await writer.drain()
            await asyncio.sleep(self._draw.uniform(1, SLOW_S_MAX))
        finally:
            writer.transport.abort()
            del reader

    async def _raw(self) -> None:
        """Bytes that are no request, half a request, an endless one, or many at once."""
        draw, head = self._draw, self._head(1000)
        pieces = draw.choice((
            [b"\x16\x03\x01\x02\x00 hello\r\n\r\n"],
            [head, b'{"model":'],
            [head[:40], b"x"],
            [b"GET /health HTTP/1.1\r\nx: ", *[b"a" * 10_000] * 50],
            [b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", *[b"x: y\r\n" * 2000] * 50],
            [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500],
            [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n"],
            [bytes(draw.randrange(256) for _ in range(2000))],
            [b""],
        ))  # fmt: skip
        reader, writer = await self._connect()
        try:
            async with asyncio.timeout(RAW_S_MAX):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(draw.choice((0, 0, 0.05)))
                if draw.random() < 0.5:
                    await reader.read(65536)
        finally:
            writer.transport.abort()

    def _head(self, length: int) -> bytes:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        return f"{head}authorization: Bearer {self._target.key}\r\ncontent-length: {length}\r\n\r\n".encode()

    async def _connect(self, limit: int = 65536) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = urlsplit(self._target.url)
        return await asyncio.open_connection(url.hostname, url.port, limit=limit)
