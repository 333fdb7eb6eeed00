"""Noise between tenants: what one tenant at its worst costs another, beside an honest neighbour with that share.

    python bench/noise.py [--rounds 3] [--seconds 12] [--only slots,pins] [--flags "--max-running 8"]

A real server with two keys. The *victim* sends a short request every ``--every`` seconds, whatever the answers take.
For each shared resource its neighbour does two things in turn, round after round: the same kind of requests as its
share allows (*honest*), then as many and as bad ones as it can (*worst*). Printed for each: the victim's time to first
token at the median and the 99th percentile of all rounds, and the ratio of the two 99th percentiles beside 1.5.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from served import serving

KEYS = {"victim": "sk-noise-victim", "neighbour": "sk-noise-neighbour"}
RATIO_MAX = 1.5
FLAGS = "--colocated 1 --max-running 8 --max-step-tokens 512 --prefill-chunk-tokens 512 --kv-memory 192MiB"
WORDS = ("river", "stone", "cloud", "table", "seven", "light", "paper", "green", "house", "bread", "glass", "night")


def words(count: int) -> str:
    """A text that no other request begins with."""
    return " ".join(random.choices(WORDS, k=count))


@dataclass
class Neighbour:
    """The tenant next door: clients of its own that go on until they are cancelled."""

    url: str
    model: str
    numbers: Any = field(default_factory=itertools.count)

    def client(self) -> httpx.AsyncClient:
        """One connection of the neighbour's."""
        headers = {"authorization": f"Bearer {KEYS['neighbour']}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=600)

    async def ask(self, client: httpx.AsyncClient, prompt_words: int, max_tokens: int, **rest: Any) -> None:
        """One request; a refusal is waited out as a client would that hopes for more."""
        body = {"model": self.model, "prompt": words(prompt_words), "max_tokens": max_tokens, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body | rest)
        if answer.status_code != 200:
            await asyncio.sleep(0.05)


Load = Callable[[Neighbour, int], Awaitable[None]]
"""What one of the neighbour's clients does, for ever."""


def asks(prompt_words: int, max_tokens: int, **fixed: Any) -> Load:
    """Requests of one kind, one after the other. ``{n}`` in a text stands for a number that is never used again."""

    async def load(neighbour: Neighbour, _: int) -> None:
        async with neighbour.client() as client:
            while True:
                number = str(next(neighbour.numbers))
                rest = {k: v.replace("{n}", number) if isinstance(v, str) else v for k, v in fixed.items()}
                await neighbour.ask(client, prompt_words, max_tokens, **rest)

    return load


async def documents(neighbour: Neighbour, place: int) -> None:
    """Puts twenty documents, then lists them for ever."""
    async with neighbour.client() as client:
        for number in range(20):
            await client.put(f"/v1/documents/d{place}-{number}", json={"text": words(40), "endpoint": "completions"})
        while True:
            await client.get("/v1/documents")


async def bodies(neighbour: Neighbour, _: int) -> None:
    """Bodies of 8 MB that are valid JSON and no request."""
    body = b'{"model": "x", "messages": [' + b"[]," * (8 << 20 >> 2) + b"[]]}"
    async with neighbour.client() as client:
        while True:
            await client.post("/v1/chat/completions", content=body)


async def small_bodies(neighbour: Neighbour, _: int) -> None:
    """Bodies that are no request, of a size that requests have."""
    async with neighbour.client() as client:
        while True:
            await client.post("/v1/chat/completions", content=b'{"model": "x", "messages": [' + b"[]," * 2000 + b"[]]}")


async def deaf(neighbour: Neighbour, _: int) -> None:
    """A stream of eight answers with logprobs that is never read; opened anew when the server ends it."""
    host, port = neighbour.url.removeprefix("http://").split(":")
    body = {"model": neighbour.model, "prompt": words(8), "max_tokens": 400, "n": 8, "stream": True, "logprobs": 5,
            "ignore_eos": True}  # fmt: skip
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['neighbour']}\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    while True:
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(head.encode() + data)
        await asyncio.sleep(20)
        writer.close()


async def connections(neighbour: Neighbour, _: int) -> None:
    """A connection with half a head, opened anew when it is closed."""
    host, port = neighbour.url.removeprefix("http://").split(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
            await reader.read(1000)
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Resource:
    """Something that tenants share: how many honest clients, how many of the worst."""

    name: str
    honest: tuple[int, Load]
    worst: tuple[int, Load]


URGENT = -(1 << 31)
RESOURCES = (
    Resource("slots", (4, asks(20, 120)), (64, asks(20, 400))),
    Resource("waiting line", (4, asks(20, 16)), (400, asks(20, 16))),
    Resource("prefill tokens", (2, asks(900, 1)), (48, asks(900, 1))),
    Resource("KV memory", (2, asks(600, 100)), (64, asks(600, 400))),
    Resource("forks", (1, asks(20, 60, n=4)), (32, asks(20, 200, n=8))),
    Resource("priorities", (4, asks(20, 60)), (64, asks(20, 60, priority=URGENT))),
    Resource("salts", (4, asks(20, 60)), (64, asks(20, 60, cache_salt="s{n}"))),
    Resource("pins", (4, asks(60, 1, session="s")), (64, asks(60, 1, session="s{n}", session_ttl_s=3600))),
    Resource("sessions", (4, asks(20, 16, session="s")), (64, asks(20, 16, session="s{n}"))),
    Resource("documents", (1, documents), (16, documents)),
    Resource("bodies", (1, small_bodies), (8, bodies)),
    Resource("slow readers", (1, asks(8, 100, n=4)), (16, deaf)),
    Resource("connections", (4, connections), (200, connections)),
)


@asynccontextmanager
async def neighbourhood(neighbour: Neighbour, count: int, load: Load) -> AsyncIterator[None]:
    """The neighbour's clients, while the block runs. They start within a second, and are gone behind it."""
    clients = [asyncio.create_task(load(neighbour, place)) for place in range(count)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def first_token_s(client: httpx.AsyncClient, model: str, found: list[float]) -> None:
    """One request of the victim's. One that fails has waited for ever."""
    body = {"model": model, "prompt": words(24), "max_tokens": 4, "stream": True, "temperature": 0}
    started = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if answer.status_code == 200 and line.startswith("data:"):
                    found.append(time.perf_counter() - started)
                    return
    except httpx.HTTPError:
        pass
    found.append(float("inf"))


async def victim(url: str, model: str, seconds: float, every_s: float) -> list[float]:
    """Times to first token of requests at fixed times."""
    found: list[float] = []
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {KEYS['victim']}"}, timeout=120
    ) as client:
        pending = []
        for _ in range(int(seconds / every_s)):
            pending.append(asyncio.create_task(first_token_s(client, model, found)))
            await asyncio.sleep(every_s)
        await asyncio.gather(*pending)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def measure(resource: Resource, neighbour: Neighbour, given: argparse.Namespace) -> dict[str, list[float]]:
    """Both in turn, round after round."""
    found: dict[str, list[float]] = {"honest": [], "worst": []}
    for _ in range(given.rounds):
        for kind, (count, load) in (("honest", resource.honest), ("worst", resource.worst)):
            async with neighbourhood(neighbour, count, load):
                await asyncio.sleep(given.settle)
                found[kind] += await victim(neighbour.url, neighbour.model, given.seconds, given.every)
            await asyncio.sleep(given.settle)
    return found


def main() -> int:
    """Measure and print; 1 when a ratio is above 1.5."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of the victim's requests, each time")
    parser.add_argument("--every", type=float, default=0.4, help="seconds between two of them")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds before and behind each time")
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--flags", default=FLAGS, help="of the server")
    given = parser.parse_args()
    chosen = [r for r in RESOURCES if not given.only or r.name in given.only.split(",")]
    os.environ["MEMSERVE_API_KEY"] = " ".join(f"{name}={key}" for name, key in KEYS.items())
    above = 0
    with serving(*shlex.split(given.flags)) as server:
        asyncio.run(victim(server.url, server.model, 3.0, 0.5))  # what a process has put off
        print(f"{'resource':<15} {'honest p50':>11} {'p99':>8} {'worst p50':>11} {'p99':>8} {'ratio':>6}   (s)")
        for resource in chosen:
            found = asyncio.run(measure(resource, Neighbour(server.url, server.model), given))
            (honest, worst), times = (quantile(found[kind], 0.99) for kind in ("honest", "worst")), found
            ratio = worst / honest
            above += ratio > RATIO_MAX
            print(
                f"{resource.name:<15} {quantile(times['honest'], 0.5):>11.3f} {honest:>8.3f}"
                f" {quantile(times['worst'], 0.5):>11.3f} {worst:>8.3f} {ratio:>6.2f}"
                f"   {'at most' if ratio <= RATIO_MAX else 'ABOVE'} {RATIO_MAX}",
                flush=True,
            )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
