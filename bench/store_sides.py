"""Servers with and without a store side by side, and loads for them: for store_load, store_faults, store_restart."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from served import Served, serving

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from ports import free_port

SUPPORT = Path(__file__).resolve().parent.parent / "tests" / "support"
TIMEOUT_S = 300.0
WAIT_S = 90.0
BLOCK = 32
"""Tokens."""
FILLS_MAX = 5
STATS_S = 2.5
"""Until the next heartbeat with statistics."""


@dataclass
class Side:
    """One of the servers that are compared."""

    name: str
    server: Served
    faults: Path | None = None
    """What its store's disk does wrong, if it has one."""

    def break_disk(self, **faults: Any) -> None:
        """As ``tests/support/faulty_store.py`` describes; nothing: the disk is healthy."""
        assert self.faults is not None
        fresh = self.faults.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.replace(self.faults)

    def total(self, name: str) -> float:
        """Of a counter or gauge, over all members."""
        whole = re.compile(rf"memserve_{name}(_total)?(\{{|$)")
        return sum(value for key, value in self.server.metrics().items() if whole.match(key))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait."""
        end = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > end:
                numbers = {key: value for key, value in self.server.metrics().items() if value and "store_" in key}
                raise SystemExit(f"{self.name}: never came to this: {what}; {numbers}")
            time.sleep(0.05)

    def disk_has(self, values: int) -> None:
        """Wait until so many blocks are on the disk."""
        self.until(lambda: self.total("store_disk_values") >= values, f"{values} blocks on the disk")


@dataclass
class Answer:
    """What came of one prompt."""

    seconds: float
    first_s: float
    """Until the first token."""
    cached: int
    text: str
    error: str = ""


@dataclass
class Run:
    """One load on one side."""

    total_s: float
    answers: list[Answer]
    counters: dict[str, float] = field(default_factory=dict)


@contextmanager
def plain_side(name: str, *flags: str) -> Iterator[Side]:
    """``memserve serve FLAGS`` with one instance."""
    with serving("--colocated", "1", "--metadata", "none", *flags) as server:
        yield Side(name, server)
        server.stop()


@contextmanager
def stored_side(name: str, disk: str, dram: str, *flags: str, folder: Path | None = None) -> Iterator[Side]:
    """The same with a store whose disk of size ``disk``, below ``folder``, can be broken."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="memserve-store-sides-")))
        secret, faults, port = home / "secret", home / "faults.json", free_port()
        secret.write_text(secrets.token_hex(16))
        secret.chmod(0o600)
        faults.write_text("{}")
        joins = ("--cluster-port", str(port), "--cluster-secret-file", str(secret))
        server = stack.enter_context(serving("--colocated", "1", "--metadata", "none", *joins, *flags))
        store_name = f"bench-{os.getpid()}-{name}"
        command = [sys.executable, str(SUPPORT / "faulty_store.py"), "--faults", str(faults), "--", "store"]
        command += ["--join", f"127.0.0.1:{port}", "--cluster-secret-file", str(secret), "--name", store_name]
        command += ["--dram", dram, "--ssd", f"{home}/kv={disk}", "--drain-s", "0"]
        store = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            side = Side(name, server, faults)
            side.until(lambda: side.total("store_up") >= 1 and side.total("store_memory_bytes") > 0, "a store")
            yield side
        finally:
            store.send_signal(signal.SIGTERM)
            try:
                store.wait(20)
            except subprocess.TimeoutExpired:
                store.kill()
            for path in Path("/dev/shm").glob(f"memserve-store-{store_name[:24]}*"):
                path.unlink(missing_ok=True)


def ask(client: httpx.Client, url: str, tokens: list[int], count: int) -> Answer:
    """``count`` greedy tokens, streamed."""
    body = {"model": "x", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    begin, first_s, text, cached = time.perf_counter(), 0.0, "", 0
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT_S) as answer:
            if answer.status_code != 200:
                return Answer(0.0, 0.0, 0, "", f"{answer.status_code} {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("error"):
                    return Answer(0.0, 0.0, 0, text, str(chunk["error"]))
                first_s = first_s or time.perf_counter() - begin
                text += "".join(choice["text"] for choice in chunk["choices"])
                if chunk.get("usage"):
                    cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except httpx.HTTPError as error:
        return Answer(0.0, 0.0, 0, text, repr(error))
    return Answer(time.perf_counter() - begin, first_s, cached, text)


def run_load(side: Side, prompts: list[list[int]], clients: int, count: int) -> Run:
    """All ``prompts``, ``clients`` at a time, each client's next as soon as its last has ended."""
    with httpx.Client(limits=httpx.Limits(max_connections=clients)) as client, ThreadPoolExecutor(clients) as pool:
        begin = time.perf_counter()
        answers = list(pool.map(lambda tokens: ask(client, side.server.url, tokens, count), prompts))
        total_s = time.perf_counter() - begin
    return Run(total_s, answers)


def fill(side: Side, texts: list[list[int]], clients: int) -> None:
    """Ask ``texts`` until 95 % of their blocks are on the disk. What an instance with little memory cannot lend in time
    is not offered, so a busy machine may take several turns."""
    blocks = sum(len(text) // BLOCK for text in texts)
    for _ in range(FILLS_MAX):
        run_load(side, texts, clients, 1)
        end = time.monotonic() + 4 * STATS_S
        while time.monotonic() < end:
            if side.total("store_disk_values") >= blocks * 95 // 100:
                return
            time.sleep(0.1)
    numbers = {key: value for key, value in side.server.metrics().items() if value and "store_" in key}
    raise SystemExit(f"{side.name}: less than 95 % of {blocks} blocks reach the disk: {numbers}")


def documents(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Texts of random tokens: nothing of them is in any cache."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 40_000, tokens).tolist() for _ in range(count)]


def free_bytes(folder: Path | None) -> int:
    """Room where disks are put."""
    return shutil.disk_usage(folder or tempfile.gettempdir()).free
