"""The cost of HTTP on top of the engine: CPU per request and per streamed token, start-up, resident memory.

    python bench/http_overhead.py [--streams 32] [--tokens 128] [--rounds 3] [--json FILE] [-- SERVE ARGUMENTS]

Starts ``memserve serve`` on a free port. The event loop is the server's main thread and does nothing but HTTP, JSON,
tokenizing and detokenizing, so its CPU time (from the kernel's accounting) is HTTP's cost, whatever else the machine
does; a step's time beyond the device's is the delay that clients see. The client reads raw sockets and parses
nothing, for it shares the machine. Figures are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
from harness.clients import post
from harness.flags import options, save
from harness.rounds import median, medians
from harness.served import Served, serving
from harness.tables import show

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
SMALL_REQUESTS = 100
DONE, EVENT = b"data: [DONE]", b"data: {"


@dataclass(frozen=True)
class Load:
    """One phase of load: requests, answers, and times."""

    tokens: int
    wall_s: float
    loop_ns: int
    device_s: float
    steps: float

    def figures(self, name: str) -> dict[str, float]:
        """The figures of this phase."""
        return {
            f"{name}: tokens/s": self.tokens / self.wall_s,
            f"{name}: event loop CPU, us/token": self.loop_ns / 1e3 / self.tokens,
            f"{name}: step beyond the device, ms": (self.wall_s - self.device_s) * 1e3 / self.steps,
            f"{name}: device step, ms": self.device_s * 1e3 / self.steps,
        }


async def read_answer(address: tuple[str, int], body: dict[str, Any]) -> int:
    """Send one request on a connection of its own; the number of events (streamed), or of bytes."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    if b" 200 OK" not in answer[:20] or (body["stream"] and DONE not in answer):
        raise SystemExit(f"a request failed: {answer[:500]!r}")
    return answer.count(EVENT) if body["stream"] else len(answer)


def load(served: Served, streams: int, tokens: int, *, stream: bool) -> Load:
    """Request ``streams`` answers of ``tokens`` tokens each, all at once."""
    url = httpx.URL(served.url)
    body = {"model": served.model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}

    async def crowd() -> None:
        await asyncio.gather(*(read_answer((url.host, url.port or 80), body) for _ in range(streams)))

    before, loop_ns, started = served.metrics(), served.loop_cpu_ns(), time.perf_counter()
    asyncio.run(crowd())
    wall_s, loop_ns = time.perf_counter() - started, served.loop_cpu_ns() - loop_ns
    after = served.metrics()
    device_s = after["memserve_device_seconds_total"] - before["memserve_device_seconds_total"]
    steps = after["memserve_steps_total"] - before["memserve_steps_total"]
    return Load(streams * tokens, wall_s, loop_ns, device_s, steps)


def small_requests(served: Served) -> dict[str, float]:
    """Request one token of a cached prompt, repeatedly on one connection."""
    body = {"model": served.model, "prompt": "Hello there", "max_tokens": 1}
    with httpx.Client(timeout=60) as client:
        post(served.url, body, client=client)
        before, loop_ns = served.metrics(), served.loop_cpu_ns()
        times_s = [post(served.url, body, client=client).checked().total_s for _ in range(SMALL_REQUESTS)]
        loop_ns = served.loop_cpu_ns() - loop_ns
    device_s = served.metrics()["memserve_device_seconds_total"] - before["memserve_device_seconds_total"]
    return {
        "small request: wall, ms": median(times_s) * 1e3,
        "small request: device, ms": device_s * 1e3 / SMALL_REQUESTS,
        "small request: event loop CPU, us": loop_ns / 1e3 / SMALL_REQUESTS,
    }


def measure(served: Served, streams: int, tokens: int, rounds: int) -> dict[str, float]:
    """All figures of one server."""
    figures = {"ready, s": served.ready_s, "resident after start, MB": served.memory_bytes() / 1e6}
    load(served, streams, 8, stream=True)  # warm-up: threads, kernels, the prefix cache
    rows: list[dict[str, float]] = []
    for _ in range(rounds):
        rows.append(small_requests(served))
        rows[-1] |= load(served, streams, tokens, stream=True).figures("streamed")
        rows[-1] |= load(served, streams, tokens, stream=False).figures("whole")
    figures |= medians(rows)
    figures["resident after load, MB"] = served.memory_bytes() / 1e6
    figures["resident, peak, MB"] = served.memory_bytes("VmHWM") / 1e6
    return figures


def main() -> None:
    args = options(__doc__, rest="serve", streams=32, tokens=128, rounds=3)
    with serving(*args.serve) as served:
        figures = measure(served, args.streams, args.tokens, args.rounds)
        status, stopping_s = served.stop()
    figures |= {"stopping, s": stopping_s, "exit status": status}
    show(({"name": name, "value": value} for name, value in figures.items()),
         {"figure": "{name}", "": "{value:.2f}"})  # fmt: skip
    save(args, {"options": vars(args), "figures": figures})


if __name__ == "__main__":
    main()
