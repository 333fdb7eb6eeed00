"""Requests per second with one router process and with several, at one port, in front of the same instances.

    python bench/routers.py --model FOLDER [--routers 1,2] [--clients 32] [--seconds 20] [--flags "--colocated 1"]

Every client asks for one token behind a short prompt, each time over a new connection, so that the kernel spreads the
requests over the routers. A busy router takes about a core: give it as many cores as there are routers, beside those of
the instances and of this script. With fewer, the last column tells: what all routers together could answer with a core
each, by the CPU time that they took for a request, without what they take when no request comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")
IDLE_S = 20.0


def start(model: str, routers: int, flags: list[str]) -> tuple[subprocess.Popen[str], str, int]:
    """A server that is ready, its host and its port."""
    command = [sys.executable, "-m", "memserve", "serve", "--model", model, "--port", "0", "--metadata", "none"]
    process = subprocess.Popen([*command, "--routers", str(routers), *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://([^:/ ]+):(\d+)/v1", process.stdout.readline())
    assert found is not None, "the server did not start"
    time.sleep(5)  # the other routers bind the port when they are ready, a moment after the first
    return process, found[1], int(found[2])


def routers_of(owner: int) -> list[int]:
    """The process ids of ``owner`` and of its followers."""
    found = [owner]
    for children in Path(f"/proc/{owner}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if "router" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                found.append(pid)
    return found


def cpu_s(pids: list[int]) -> float:
    """CPU time that the processes have taken, in user and system mode."""
    words = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(user) + int(system) for *_, user, system in (w[:13] for w in words)) / TICKS_S


async def ask(host: str, port: int, body: bytes) -> bool:
    """One request over a connection of its own. Whether it was answered."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    status = await reader.readline()
    await reader.read()
    writer.close()
    return b" 200 " in status


async def load(host: str, port: int, clients: int, seconds: float) -> tuple[float, int]:
    """Requests per second, and how many were answered."""
    with urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=60) as page:
        model = json.load(page)["data"][0]["id"]
    body = json.dumps({"model": model, "prompt": list(range(1, 17)), "max_tokens": 1, "temperature": 0}).encode()
    end, answered = time.monotonic() + seconds, 0

    async def client() -> None:
        nonlocal answered
        while time.monotonic() < end:
            is_answered = await ask(host, port, body)
            answered += is_answered  # not in one line: that would read the count before it waits

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    assert answered, "no request was answered"
    return answered / (time.monotonic() - began), answered


def main() -> None:
    """Measure each number of routers, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--routers", default="1,2")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--flags", default="--colocated 1")
    options = parser.parse_args()
    first, alone = None, None
    for routers in map(int, options.routers.split(",")):
        process, host, port = start(options.model, routers, options.flags.split())
        asyncio.run(load(host, port, options.clients, 2.0))
        pids = routers_of(process.pid)
        assert len(pids) == routers, "not all routers have started"
        before_s = cpu_s(pids)
        time.sleep(IDLE_S)
        idle = (cpu_s(pids) - before_s) / IDLE_S
        before_s, began_s = cpu_s(pids), time.monotonic()
        rate, answered = asyncio.run(load(host, port, options.clients, options.seconds))
        request_s = (cpu_s(pids) - before_s - idle * (time.monotonic() - began_s)) / answered
        capacity = (routers - idle) / request_s
        first, alone = first or rate, alone or capacity
        print(
            f"{routers} routers: {rate:.0f} requests/s, {rate / first:.2f} times the first; "
            f"{1e6 * request_s:.0f} us of their CPU a request, {100 * idle:.1f} % of a core without any: "
            f"{capacity:.0f} requests/s with a core each, "
            f"{capacity / alone:.2f} times the first",
            flush=True,
        )
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
