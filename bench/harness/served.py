"""``memserve serve`` as a user starts it: its address, memory, metrics, and its end; sides with a store and without."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import SUPPORT
from harness.clients import Answer, ask_all, completion
from harness.processes import end, metrics_of, resident_bytes, wait_until
from ports import free_port
from process_tree import named_children

WAIT_S, STATS_S = 90.0, 2.5
"""For a condition; until the next heartbeat with statistics."""
BLOCK = 32
"""Tokens."""
FILLS_MAX = 5
_HELD = re.compile(
    r'memserve_instance_blocks\{.*state="held".*\}|memserve_pool_blocks\{.*state="used".*\}'
    r"|memserve_instance_(transfers_open|requests|sequences_running).*|memserve_sequences_(running|swapped)"
    r"|memserve_router_(requests_live|requests_unplaced|handles)|memserve_admission_(active|waiting.*)"
    r"|memserve_requests_waiting|memserve_pool_slot_tokens"
)
"""Gauges of one server and of a cluster."""


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    ready_s: float
    errors: Path  # its stderr

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """See :func:`~harness.processes.resident_bytes`."""
        return resident_bytes(self.process.pid, field)

    def loop_cpu_ns(self) -> int:
        """CPU time of the main thread so far: the event loop, that is HTTP, JSON, tokenizing and detokenizing."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])

    def children(self) -> dict[str, int]:
        """Its instances and store: name -> process id."""
        return named_children(self.process.pid)

    def metrics(self) -> dict[str, float]:
        """``/metrics`` as ``name{labels}`` -> value."""
        return metrics_of(self.url)

    def left(self) -> dict[str, float]:
        """What is held, runs or waits, and named prefixes: nothing, on an idle server without names."""
        return {name: value for name, value in self.metrics().items() if value and _HELD.fullmatch(name)}

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 60.0) -> tuple[int, float]:
        """Send ``sig``; returns the exit status and the seconds until the end."""
        started = time.perf_counter()
        self.process.send_signal(sig)
        return self.process.wait(timeout_s), time.perf_counter() - started


@contextmanager
def serving(*arguments: str, model: str = "") -> Iterator[Served]:
    """``memserve serve ARGUMENTS`` on a free port, until the block ends."""
    started = time.perf_counter()
    words = [*(("--model", model) if model else ()), *arguments]
    with tempfile.NamedTemporaryFile("wb", prefix="memserve-", suffix=".log", delete=False) as errors:
        command = [sys.executable, "-m", "memserve", "serve", "--port", "0", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        name, url = _ready_line(process, Path(errors.name))
        yield Served(process, url, name, time.perf_counter() - started, Path(errors.name))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        Path(errors.name).unlink()


def _ready_line(process: subprocess.Popen[bytes], errors: Path) -> tuple[str, str]:
    assert process.stdout is not None
    for raw in process.stdout:
        if results := re.match(r"ready in \S+ s: (.+) at (\S+)/v1$", raw.decode().strip()):
            return results[1], results[2]
    raise SystemExit(f"the server ended with {process.wait(30)}: {errors.read_text(errors='replace')[-500:]}")


def bundled_model(dtype: str) -> str:
    """The folder of the bundled default, converted if need be."""
    from memserve.base.config import DEFAULT_MODEL
    from memserve.model.loading.sources import resolve_source

    return str(resolve_source(DEFAULT_MODEL, dtype).path)


# -- servers side by side, with a store and without


@dataclass
class Side:
    """One of the servers that are compared, whose model is called ``x``."""

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

    def until(self, condition: Callable[[], object], description: str) -> None:
        """Wait."""
        wait_until(condition, f"{self.name}: {description}", WAIT_S)

    def ask(self, tokens: list[int], count: int) -> Answer:
        """``count`` greedy tokens, streamed."""
        return completion(self.server.url, tokens, count)

    def run(self, prompts: list[list[int]], clients: int, count: int) -> tuple[float, list[Answer]]:
        """Seconds, and answers, of all ``prompts``, ``clients`` at a time. Failed ones are among them."""
        begin = time.perf_counter()
        answers = ask_all(lambda tokens: self.ask(tokens, count), prompts, clients)
        return time.perf_counter() - begin, answers

    def fill(self, texts: list[list[int]]) -> None:
        """Ask ``texts`` until 95 % of their blocks are on the disk. What an instance with little memory cannot lend in
        time is not offered, so a busy machine may take several turns."""
        blocks = sum(len(text) // BLOCK for text in texts)
        for _ in range(FILLS_MAX):
            self.run(texts, 1, 1)
            end_s = time.monotonic() + 4 * STATS_S
            while time.monotonic() < end_s:
                if self.total("store_disk_values") >= blocks * 95 // 100:
                    return
                time.sleep(0.1)
        raise SystemExit(f"{self.name}: less than 95 % of {blocks} blocks reach the disk")


@contextmanager
def plain_side(name: str, *flags: str, model: str = "") -> Iterator[Side]:
    """``memserve serve FLAGS`` with one instance."""
    alone = ("--colocated", "1", "--metadata", "none", "--served-model-name", "x")
    with serving(*alone, *flags, model=model) as server:
        yield Side(name, server)
        server.stop()


@contextmanager
def stored_side(
    name: str, disk: str, dram: str, *flags: str, model: str = "", folder: Path | None = None
) -> Iterator[Side]:
    """The same with a store whose disk of size ``disk``, below ``folder``, can be broken."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="memserve-store-side-")))
        secret, faults, port = home / "secret", home / "faults.json", free_port()
        secret.write_text(secrets.token_hex(16))
        secret.chmod(0o600)
        faults.write_text("{}")
        joins = ("--cluster-port", str(port), "--cluster-secret-file", str(secret))
        side = stack.enter_context(plain_side(name, *joins, *flags, model=model))
        side.faults, store_name = faults, f"bench-{os.getpid()}-{name}"
        command = [sys.executable, str(SUPPORT / "faulty_store.py"), "--faults", str(faults), "--", "store"]
        command += ["--join", f"127.0.0.1:{port}", "--cluster-secret-file", str(secret), "--name", store_name]
        command += ["--dram", dram, "--ssd", f"{home}/kv={disk}", "--drain-s", "0"]
        store = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            side.until(lambda: side.total("store_up") >= 1 and side.total("store_memory_bytes") > 0, "a store")
            yield side
        finally:
            end(store, 20)
            for path in Path("/dev/shm").glob(f"memserve-store-{store_name[:24]}*"):
                path.unlink(missing_ok=True)
