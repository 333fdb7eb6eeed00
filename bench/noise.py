"""Noise between tenants: how one tenant at its worst delays another, compared with an honest neighbour.

    python bench/noise.py [--rounds 3] [--seconds 5.6] [--only "rows,KV blocks"] [--json FILE]

Two servers of the bundled model, each with two keys: first one colocated instance, small enough that every limit
is reached in seconds, then a cluster of a prefill and a decode instance. The *victim* sends a short request every
``--every`` seconds on a connection of its own, whatever the answers take. That is less than its half of the server, so
any wait is caused by its neighbour. For each shared resource the neighbour is *honest* (it uses its own half all
the time) or at its *worst* (it wants everything, in the most harmful way that a key allows), in turn; the order
alternates with every round. A neighbour is a separate process; if refused, it asks again after a second.

| resource | honest | worst |
| --- | --- | --- |
| nothing (control) | four rows of 40 tokens | the same: the ratio without any difference |
| rows | four rows of 40 tokens, of eight | 64 clients with 400 tokens each |
| waiting queue | four clients with 16 tokens | 160 clients with 16 tokens; the queue has 64 places |
| tokens of a step | one prompt of 200 tokens after the other | 32 clients with prompts of 600 |
| KV blocks | two clients with 300 + 100 tokens, of 2,900 | 32 clients with 300 + 500: four run out of KV |
| cached prefixes | three prefixes of 200 tokens, used again and again | 16 clients, no prompt twice, each salted anew |
| DRAM tier | eight such prefixes: more than its half of the KV | as above; the victim has seven prefixes, too |
| forks | one request of n = 4 after the other | 32 clients with n = 8 |
| priority | four rows of 40 tokens | 64 clients with the most urgent priority |
| sessions | four clients with a session each | 32 clients, each request a new session that is kept for an hour |
| documents | one client that puts a document of 200 tokens, lists all, and so on | 8 such clients |
| tokenizing | two clients with prompts of 3 KB | 8 clients with texts of 60 KB and 4 with 4 MB |
| parsing | one client with bodies of 16 KB | 8 clients with bodies of 8 MB, no request among them |
| output text | four streams of 40 tokens | 32 streams of n = 8 with logprobs and four long stop strings |
| slow readers | four streams of 40 tokens | 16 such streams that are never read |
| connections | four clients with 40 tokens | 1,200 connections with half a head; the server allows 1,024 |
| handovers (cluster) | four conversations | 24 conversations: prompts go to the decode instance, answers come back |
| pins (cluster) | four clients with a session each | 32 clients, each request a new session that is kept for an hour |

Printed for each: the victim's time to first token in seconds at the median and the 99th percentile of all rounds (105
requests for each kind in three rounds, so that one outlier does not decide), the ratio of the two 99th percentiles
beside 1.5, and the ratio round by round, which shows how reliable it is. A failed request counts as an infinite wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.flags import options, save
from harness.prompts import words
from harness.rounds import percentile, turns
from harness.served import Served, serving
from harness.tables import Table

KEYS = {"victim": "sk-noise-victim", "neighbour": "sk-noise-neighbour"}
DRAW = random.Random()
RATIO_MAX = 1.5
REFUSED_WAIT_S = 1.0
COMMON = (
    "--max-running 8 --max-waiting 64 --max-step-tokens 64 --prefill-chunk-tokens 64 --kv-memory 64MiB"
    " --dram-memory 64MiB --metadata none"
)
SHAPES = {"one instance": f"--colocated 1 {COMMON}", "cluster": f"--prefill 1 --decode 1 {COMMON}"}
Fields = dict[str, Any]


def text_of(count: int, seed: str | None = None) -> str:
    """A text of ``count`` tokens: always the same for a ``seed``, else one that no other request begins with."""
    return words(count, random.Random(seed) if seed else DRAW)


@dataclass
class Tenant:
    """One key of a server: sends requests, each on a connection of its own."""

    name: str
    port: int
    model: str
    numbers: Any = field(default_factory=itertools.count)

    def message(self, method: str, path: str, body: bytes) -> bytes:
        """A request that the server answers and then closes the connection."""
        return (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[self.name]}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body

    def completion(self, prompt: str, max_tokens: int, **rest: Any) -> bytes:
        """A completion of exactly ``max_tokens`` tokens. ``{n}`` in a text: a number that is never used again."""
        number = f"{os.getpid()}-{next(self.numbers)}"
        fields = {
            name: value.replace("{n}", number) if isinstance(value, str) else value for name, value in rest.items()
        }
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | fields
        return self.message("POST", "/v1/completions", json.dumps(body).encode())

    async def status(self, message: bytes) -> int:
        """Send, read the whole answer; 0: the connection broke."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(message)
                head = await reader.readline()
                while await reader.read(1 << 16):
                    pass
                return int(head.split()[1]) if head else 0
            finally:
                writer.close()
        except OSError:
            return 0

    async def first_token_s(self, message: bytes) -> float:
        """Time from before the connection to the first event of a stream; infinite, if none comes."""
        started = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(message)
                head = await reader.readline()
                async for line in reader:
                    if b" 200 " in head and line.startswith(b"data:"):
                        results = time.perf_counter() - started
                        while await reader.read(1 << 16):
                            pass
                        return results
            finally:
                writer.close()
        except OSError:
            pass
        return math.inf


Load = Callable[[Tenant, int], Awaitable[None]]
"""The work of one of the neighbour's clients, until it is killed."""


def repeats(make: Callable[[Tenant, int, int], bytes], pause_s: float = 0.0) -> Load:
    """Requests one after the other, each made from (tenant, client, turn)."""

    async def load(tenant: Tenant, client: int) -> None:
        for turn in itertools.count():
            status = await tenant.status(make(tenant, client, turn))
            await asyncio.sleep(pause_s if status in (200, 400, 413) else REFUSED_WAIT_S)

    return load


def asks(prompt_tokens: int, max_tokens: int, **rest: Any) -> Load:
    """Completions of one kind, each with its own prompt."""
    return repeats(lambda tenant, client, turn: tenant.completion(text_of(prompt_tokens), max_tokens, **rest))


def revisits(prefixes: int, prefix_tokens: int, tail_tokens: int) -> Load:
    """Prompts that begin with one of ``prefixes`` prefixes, and then differ."""

    def make(tenant: Tenant, client: int, turn: int) -> bytes:
        prefix = text_of(prefix_tokens, f"neighbour {(client + turn) % prefixes}")
        return tenant.completion(f"{prefix} {text_of(tail_tokens)}", 2)

    return repeats(make)


def talks(answer_tokens: int) -> Load:
    """A conversation: each prompt is the conversation so far and a new question; after six turns a new conversation
    begins."""

    async def load(tenant: Tenant, client: int) -> None:
        for turn in itertools.count():
            chat_text = text_of(60 * (1 + turn % 6), f"talk {os.getpid()} {client} {turn // 6}")
            session = f"talk {client} {turn // 6}"
            if await tenant.status(tenant.completion(chat_text, answer_tokens, session=session)) != 200:
                await asyncio.sleep(REFUSED_WAIT_S)

    return load


async def documents(tenant: Tenant, client: int) -> None:
    """Repeatedly put a document and list all."""
    for turn in itertools.count():
        body = json.dumps({"text": text_of(200), "endpoint": "completions", "ttl_s": 60}).encode()
        await tenant.status(tenant.message("PUT", f"/v1/documents/d{client}-{turn % 100}", body))
        await tenant.status(tenant.message("GET", "/v1/documents", b""))


def bodies(size_bytes: int) -> Load:
    """Bodies of valid JSON that are not requests."""
    body = b'{"model": "x", "messages": [' + b"[]," * (size_bytes >> 2) + b"[]]}"
    return repeats(lambda tenant, client, turn: tenant.message("POST", "/v1/chat/completions", body))


def texts(tenant: Tenant, client: int) -> Awaitable[None]:
    """Prompts that must be tokenized to see that they are too long; every third client sends the longest."""
    long = text_of(60 if client % 3 else 4000) + " "
    text = (long * (1000 if client % 3 else 180))[: 60_000 if client % 3 else 4_000_000]
    return repeats(lambda tenant, client, turn: tenant.completion(text, 1))(tenant, client)


HEAVY: Fields = {"n": 8, "stream": True, "logprobs": 5, "stop": [text_of(30, f"stop {n}") for n in range(4)]}


async def deaf(tenant: Tenant, _: int) -> None:
    """A stream that is never read; reopened when the server ends it."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", tenant.port, limit=1)
            writer.write(tenant.completion(text_of(8), 400, **HEAVY))
            await asyncio.sleep(20)
            writer.close()
            del reader


async def half_heads(tenant: Tenant, _: int) -> None:
    """A connection with half a head, reopened when it is closed."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", tenant.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
            await reader.read(1000)
            writer.close()
        await asyncio.sleep(REFUSED_WAIT_S)


@dataclass(frozen=True)
class Resource:
    """Something that tenants share, with the honest and the worst number of clients."""

    name: str
    honest: tuple[int, Load]
    worst: tuple[int, Load]
    prefixes: int = 0  # the victim's prompts begin with one of this many
    prefix_tokens: int = 194  # a little more than six blocks
    shape: str = "one instance"


FOUR_ROWS = (4, asks(20, 40))
NEW_SESSIONS = asks(60, 8, session="s{n}", session_ttl_s=3600)
RESOURCES = (
    Resource("nothing", FOUR_ROWS, FOUR_ROWS),
    Resource("rows", FOUR_ROWS, (64, asks(20, 400))),
    Resource("waiting queue", (4, asks(20, 16)), (160, asks(20, 16))),
    Resource("tokens of a step", (1, asks(200, 2)), (32, asks(600, 2))),
    Resource("KV blocks", (2, asks(300, 100)), (32, asks(300, 500))),
    Resource("cached prefixes", (2, revisits(3, 200, 60)), (16, asks(260, 2, cache_salt="s{n}")), prefixes=2),
    Resource("DRAM tier", (2, revisits(8, 200, 60)), (16, asks(260, 2, cache_salt="s{n}")), prefixes=7),
    Resource("forks", (1, asks(20, 40, n=4)), (32, asks(20, 200, n=8))),
    Resource("priority", FOUR_ROWS, (64, asks(20, 40, priority=-(1 << 31)))),
    Resource("sessions", (4, asks(60, 8, session="own")), (32, NEW_SESSIONS)),
    Resource("documents", (1, documents), (8, documents)),
    Resource("tokenizing", (2, revisits(1, 500, 20)), (12, texts), prefixes=1, prefix_tokens=514),
    Resource("parsing", (1, bodies(16 << 10)), (8, bodies(8 << 20))),
    Resource("output text", (4, asks(20, 40, stream=True)), (32, asks(20, 200, **HEAVY))),
    Resource("slow readers", (4, asks(20, 40, stream=True)), (16, deaf)),
    Resource("connections", FOUR_ROWS, (1200, half_heads)),
    Resource("handovers", (4, talks(16)), (24, talks(16)), shape="cluster"),
    Resource("pins", (4, asks(60, 8, session="own")), (32, NEW_SESSIONS), shape="cluster"),
)


def _neighbour(tenant: Tenant, count: int, load: Load) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(load(tenant, client) for client in range(count)))

    DRAW.seed()
    asyncio.run(all_of_them())


@contextmanager
def neighbourhood(tenant: Tenant, count: int, load: Load) -> Iterator[multiprocessing.process.BaseProcess]:
    """Run the neighbour's clients during the block; afterwards the server finds them gone."""
    process = multiprocessing.get_context("fork").Process(target=_neighbour, args=(tenant, count, load), daemon=True)
    process.start()
    try:
        yield process
    finally:
        alive = process.is_alive()
        process.kill()
        process.join()
        if not alive:
            raise SystemExit("the neighbour ended: its clients have a fault")


class Victim:
    """The tenant that is measured."""

    def __init__(self, tenant: Tenant, resource: Resource) -> None:
        self._tenant = tenant
        self._prefixes = [text_of(resource.prefix_tokens, f"victim {n}") + " " for n in range(resource.prefixes)] or [
            ""
        ]

    def _message(self, turn: int) -> bytes:
        prompt = self._prefixes[turn % len(self._prefixes)] + text_of(3)
        return self._tenant.completion(prompt, 1, stream=True, temperature=0)

    async def warm(self) -> None:
        """Send each prefix once, while there is no neighbour."""
        for turn in range(len(self._prefixes)):
            await self._tenant.first_token_s(self._message(turn))

    async def times_s(self, settle_s: float, seconds: float, every_s: float) -> list[float]:
        """Times to first token of requests at fixed times, without those that begin while the load settles."""
        pending: list[asyncio.Task[float]] = []
        started, settling = time.perf_counter(), round(settle_s / every_s)
        for turn in range(settling + round(seconds / every_s)):
            await asyncio.sleep(max(0.0, started + (turn + random.random() / 2) * every_s - time.perf_counter()))
            pending.append(asyncio.create_task(self._tenant.first_token_s(self._message(turn))))
        results = await asyncio.gather(*pending)
        return results[settling:]


def ratio(worst: Sequence[float], honest: Sequence[float]) -> float:
    """Ratio of the two 99th percentiles."""
    return percentile(worst, 0.99) / percentile(honest, 0.99)


Times = dict[str, list[list[float]]]
"""Kind of neighbour -> round -> times."""


def measure(resource: Resource, server: Served, args: Namespace) -> Times:
    """Both kinds, round after round, in alternating order, so that a machine that slows down favours neither."""
    port = int(server.url.rpartition(":")[2])
    victim, results = Victim(Tenant("victim", port, server.model), resource), Times(honest=[], worst=[])
    for _, (kind, neighbour) in turns(args.rounds, (("honest", resource.honest), ("worst", resource.worst))):
        asyncio.run(victim.warm())
        with neighbourhood(Tenant("neighbour", port, server.model), *neighbour):
            results[kind].append(asyncio.run(victim.times_s(args.settle, args.seconds, args.every)))
    return results


def row_of(resource: Resource, results: Times) -> dict[str, Any]:
    """A row of the table."""
    honest, worst = (list(itertools.chain(*results[kind])) for kind in ("honest", "worst"))
    row: dict[str, Any] = {"resource": resource.name, "ratio": ratio(worst, honest)}
    for kind, times in (("honest", honest), ("worst", worst)):
        row |= {f"{kind}_p50": percentile(times, 0.5), f"{kind}_p99": percentile(times, 0.99)}
    ratios_text = " ".join(f"{ratio(*pair):.2f}" for pair in zip(results["worst"], results["honest"], strict=True))
    return row | {"verdict": "ok" if row["ratio"] <= RATIO_MAX else "ABOVE", "each": ratios_text}


COLUMNS = {
    "resource": "{resource}", "honest (s) p50": "{honest_p50:.3f}", "p99": "{honest_p99:.3f}",
    "worst (s) p50": "{worst_p50:.3f}", "p99 ": "{worst_p99:.3f}", "ratio": "{ratio:.2f}", "": "{verdict}",
    "by round": "{each}",
}  # fmt: skip


def main() -> int:
    """Measure and print; 1 when a ratio is above 1.5."""
    args = options(
        __doc__, rounds=3, seconds=(5.6, "seconds of the victim's requests, each time"),
        every=(0.16, "seconds between two of them"), only=("", "comma-separated names"),
        settle=(0.8, "seconds beside the neighbour that do not count"), flags=("", "more flags of the servers"),
    )  # fmt: skip
    resources = [resource for resource in RESOURCES if not args.only or resource.name in args.only.split(",")]
    os.environ["MEMSERVE_API_KEY"] = " ".join(f"{name}={key}" for name, key in KEYS.items())
    started, everything, rows, table = time.monotonic(), {}, [], Table(COLUMNS)
    for shape, flags in SHAPES.items():
        resources_here = [resource for resource in resources if resource.shape == shape]
        if not resources_here:
            continue
        with serving(*shlex.split(f"{flags} {args.flags}")) as server:
            for resource in resources_here:
                everything[resource.name] = measure(resource, server, args)
                rows.append(row_of(resource, everything[resource.name]))
                table.show(rows[-1])
    save(args, everything)
    above = sum(row["verdict"] == "ABOVE" for row in rows)
    print(f"\n{time.monotonic() - started:.0f} s; load average {os.getloadavg()[0]:.1f}; above {RATIO_MAX}: {above}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
