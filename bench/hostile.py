"""Does a real server survive malformed requests, clients that leave, and a crowd on a tiny pool?

    python bench/hostile.py [--kv-memory 16MiB] [--clients 300] [--json FILE] [-- SERVE ARGUMENTS]
    python bench/hostile.py --requests 100000 [--seed N] [--connections 32] [-- SERVE ARGUMENTS]

Starts ``memserve serve`` on a free port; sends the table of ``tests/support/hostile_requests.py``, then raw connections
that break HTTP, then a crowd, of which some stream and some leave. After each part no block may be held, nothing
may run or wait, and a question must get the same good answer as before. At the end SIGTERM must end the server
cleanly.
With ``--requests N``, instead: N requests drawn at random from the grammars of ``tests/support/hostile_grammar.py``,
over many connections, while an honest client with its own key asks a short question repeatedly; for instance
``--requests 100000 -- --prefill 1 --decode 1``. A miss names its seed and number, which repeat it.

Prints one line per check; the exit status is 1 if any failed.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from harness.clients import Answer, greedy, stream
from harness.flags import options, save
from harness.served import Served, serving
from hostile_random import KEYS, Honest, ask, attack_with, give_up_names, target_of, verdicts

from hostile_requests import HostileCase, check_answer, hostile_cases, send

IDLE_S_MAX = 60.0
CROWD_S_MAX = 900.0
ANSWER_TOKENS = 16


@dataclass
class Report:
    """All checks and their results."""

    checks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: str, name: str, miss: str | None, seconds: float) -> None:
        """One check; ``miss`` says what went wrong."""
        self.checks.append({"part": part, "name": name, "ok": miss is None, "miss": miss, "seconds": round(seconds, 3)})
        print(f"{'ok  ' if miss is None else 'MISS'}  {part:<8} {name:<52} {seconds:8.3f} s  {miss or ''}", flush=True)

    def run(self, part: str, name: str, check: Callable[[], str | None]) -> None:
        """Run one check; an exception is a miss."""
        started = time.perf_counter()
        try:
            miss = check()
        except Exception as error:
            miss = f"{type(error).__name__}: {str(error)[:300]}"
        self.add(part, name, miss, time.perf_counter() - started)

    @property
    def misses(self) -> int:
        """Number of checks that failed."""
        return sum(not check["ok"] for check in self.checks)


# -- what must hold after every part


def check_idle(served: Served) -> str | None:
    """Wait until nothing is held. Cancelled work may take a step to end."""
    deadline = time.monotonic() + IDLE_S_MAX
    while leftovers := served.left():
        if time.monotonic() > deadline:
            return f"still held: {leftovers}"
        time.sleep(0.1)
    return None


def check_after(report: Report, served: Served, part: str) -> None:
    """The checks after every part."""

    def question() -> str | None:
        text = ask(served, 40).checked().text
        return None if "Paris" in text else f"said {text!r}"

    report.run(part, "nothing is held, runs or waits", lambda: check_idle(served))
    report.run(part, "an ordinary question", question)
    report.run(part, "nothing is held after it", lambda: check_idle(served))


# -- the table


def send_table(report: Report, served: Served, context_tokens: int) -> None:
    """Every malformed request of the tests' table."""

    def judge(case: HostileCase) -> None:
        check_answer(case, send(client, case))

    with httpx.Client(base_url=served.url, timeout=120) as client:
        for case in hostile_cases(served.model, context_tokens, "hello " * (context_tokens + 100)):
            report.run("table", case.name, partial(judge, case))


# -- connections that break HTTP itself


def raw(served: Served, data: bytes, *, read: bool = True) -> bytes:
    """Send bytes as they are, and drop the connection."""
    url = httpx.URL(served.url)
    with socket.create_connection((url.host, url.port or 80), timeout=20) as connection:
        connection.sendall(data)
        return connection.recv(65536) if read else b""


def post(body: bytes, length: int | None = None) -> bytes:
    """A raw POST with any Content-Length."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def raw_connections(report: Report, served: Served) -> None:
    """Connections that no well-behaved client makes."""

    def expect(data: bytes, status: bytes) -> Callable[[], str | None]:
        return lambda: None if status in (answer := raw(served, data)[:200]) else f"got {answer!r}"

    def drop(data: bytes) -> Callable[[], str | None]:
        return lambda: raw(served, data, read=False).decode() or None

    long = {"model": served.model, "prompt": "once upon a time", "max_tokens": 200, "ignore_eos": True}
    report.run("raw", "no HTTP at all", expect(b"\x16\x03\x01\x02\x00 hello\r\n\r\n", b" 400 "))
    report.run("raw", "a header of 1 MB", expect(b"GET /health HTTP/1.1\r\nx: " + b"a" * 1_000_000 + b"\r\n\r\n", b""))
    report.run("raw", "a negative content length", expect(post(b"{}", -5), b" 400 "))
    report.run("raw", "half a body, then gone", drop(post(b'{"model":', 1000)))
    report.run("raw", "a request line, then gone", drop(b"POST /v1/completions HTTP/1.1\r\n"))
    report.run("raw", "connected, then gone", drop(b""))
    report.run("raw", "asked, then gone at once", drop(post(json.dumps(long).encode())))
    report.run("raw", "asked streamed, then gone at once", drop(post(json.dumps({**long, "stream": True}).encode())))
    streamed = post(json.dumps({**long, "stream": True}).encode())
    report.run("raw", "gone after the first token", expect(streamed, b" 200 "))
    report.run("raw", "two requests in one packet", expect(post(b"[]") + post(b"[]"), b" 400 "))


# -- the crowd


@dataclass(frozen=True)
class Visitor:
    """One client of the crowd."""

    number: int
    stream: bool
    leaves: bool

    def body(self, model: str) -> dict[str, Any]:
        """The request: prompts of many lengths, some sharing a long prefix."""
        start = "All of us begin with these very words. " * 4 if self.number % 3 == 0 else ""
        prompt = start + f"Visitor {self.number} counts: " + "one two three " * (self.number % 29)
        body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        return body | {"n": 1 + self.number % 2, "temperature": self.number % 3 / 2, "stream": self.stream}


async def visit(client: httpx.AsyncClient, model: str, visitor: Visitor) -> str | None:
    """Send one request; returns what went wrong."""
    body = visitor.body(model)
    if visitor.leaves and not visitor.stream:
        try:
            await client.post("/v1/completions", json=body, timeout=0.5 + visitor.number / 100)
        except httpx.TimeoutException:
            return None
        return None
    if not visitor.stream:
        response = await client.post("/v1/completions", json=body)
        used = response.json().get("usage", {}).get("completion_tokens")
        return None if used == ANSWER_TOKENS * body["n"] else f"{response.status_code}: {response.text[:200]}"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in _until(response, 3 if visitor.leaves else None)]
    if visitor.leaves:
        return None if lines else "no line before it left"
    ends = sum('"finish_reason":"length"' in line for line in lines)
    good = response.status_code == 200 and lines[-1] == "data: [DONE]" and ends == body["n"]
    return None if good else f"{response.status_code}: {lines[-2:]}"


async def _until(response: httpx.Response, count: int | None) -> Any:
    offset = 0
    async for line in response.aiter_lines():
        if line:
            offset += 1
            yield line
        if offset == count:
            return


async def crowd(served: Served, clients: int) -> list[str | None]:
    """All clients at once: half of them stream, a fifth leave early."""
    visitors = [Visitor(number, number % 2 == 0, number % 5 == 0) for number in range(clients)]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=served.url, timeout=CROWD_S_MAX, limits=limits) as client:
        visits = (visit(client, served.model, visitor) for visitor in visitors)
        results = await asyncio.gather(*visits, return_exceptions=True)
    return [str(result) or repr(result) if isinstance(result, BaseException) else result for result in results]


def check_crowd(served: Served, clients: int) -> str | None:
    """Every visitor that stays gets its whole answer."""
    missed = [miss for miss in asyncio.run(crowd(served, clients)) if miss]
    return f"{len(missed)} of {clients}, for example {missed[0]}" if missed else None


def check_pressure(served: Served) -> str | None:
    """Sequences were preempted: the pool was small enough."""
    metrics = served.metrics()
    kinds = {kind: metrics[f'memserve_preemptions_total{{kind="{kind}"}}'] for kind in ("swap", "recompute")}
    return None if sum(kinds.values()) else f"no sequence was preempted: {kinds}"


# -- the end


def check_end(served: Served) -> str | None:
    """SIGTERM while a stream runs: it may finish, the server ends with 0 and prints no traceback."""
    body = greedy("a story", 64, served.model)
    answer = stream(served.url, body, on_event=lambda answer: served.process.terminate() if is_first(answer) else None)
    status = served.process.wait(60)
    errors = served.errors.read_text(errors="replace")
    if "Traceback" in errors:
        return f"tracebacks: {errors[-500:]}"
    return None if status == 0 and answer.is_whole else f"status {status}, {answer.error or 'the stream broke off'}"


def is_first(answer: Answer) -> bool:
    """Whether the newest event is the first with text."""
    return len(answer.times_s) == 1


def random_requests(report: Report, args: Namespace) -> None:
    """Send requests from the grammars, and measure their cost to another client."""
    with serving("--kv-memory", args.kv_memory, *KEYS, *args.serve) as served:
        honest = Honest(served)
        target = target_of(served, args.vocab_size)
        print(f"seed {args.seed}")
        outcome = attack_with(served, honest, target, args.seed, args.requests, args.connections)
        for name, miss in verdicts(outcome, honest).items():
            report.add("random", name, miss, sum(outcome.attacked_s))
        give_up_names(served)
        report.run("random", "nothing is held, runs or waits", lambda: check_idle(served))
        report.run("random", "SIGTERM ends it", lambda: None if served.stop()[0] == 0 else "exit status")


def attack_all(report: Report, args: Namespace) -> None:
    """The table, raw connections, the crowd, the end."""
    with serving("--kv-memory", args.kv_memory, *args.serve) as served:
        card = httpx.get(f"{served.url}/v1/models").json()["data"][0]
        send_table(report, served, card["max_model_len"])
        check_after(report, served, "table")
        raw_connections(report, served)
        check_after(report, served, "raw")
        report.run("crowd", f"{args.clients} clients at once", lambda: check_crowd(served, args.clients))
        report.run("crowd", "sequences were preempted", lambda: check_pressure(served))
        check_after(report, served, "crowd")
        report.run("end", "SIGTERM during a stream", lambda: check_end(served))


def main() -> None:
    args = options(
        __doc__, rest="serve", kv_memory="16MiB", clients=300, 
        requests=(0, "number of random requests to send instead"),
        seed=random.SystemRandom().randrange(1 << 32),
        connections=(32, "connections of the random requests at a time"),
        vocab_size=(49_152, "vocabulary of the served model"),
    )  # fmt: skip
    report = Report()
    if args.requests:
        random_requests(report, args)
    else:
        attack_all(report, args)
    print(f"{len(report.checks)} checks, {report.misses} missed")
    save(args, {"options": vars(args), "checks": report.checks})
    raise SystemExit(1 if report.misses else 0)


if __name__ == "__main__":
    main()
