"""Starts ``memserve serve`` as a user would, for the scripts here; gives its address and memory, and stops it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_S_MAX = 300.0
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
        """``VmRSS`` = resident now, ``VmHWM`` = the most so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(rf"{field}:\s+(\d+) kB", status)
        return int(match.group(1)) * 1024 if match else 0

    def loop_cpu_ns(self) -> int:
        """CPU time of the main thread so far: the event loop, that is HTTP, JSON, tokenizing and detokenizing."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])

    def metrics(self) -> dict[str, float]:
        """``/metrics`` as ``name{labels}`` -> value."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def left(self) -> dict[str, float]:
        """What is held, runs or waits, and named prefixes: nothing, on an idle server without names."""
        return {name: value for name, value in self.metrics().items() if value and _HELD.fullmatch(name)}

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 60.0) -> tuple[int, float]:
        """Send ``sig``; returns the exit status and the seconds until the end."""
        started = time.perf_counter()
        self.process.send_signal(sig)
        return self.process.wait(timeout_s), time.perf_counter() - started


def end_in_order() -> None:
    """SIGTERM ends this script as Ctrl-C does, so that its servers end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """``memserve serve ARGUMENTS`` on a free port, until the block ends."""
    started = time.perf_counter()
    with tempfile.NamedTemporaryFile("wb", prefix="memserve-", suffix=".log", delete=False) as errors:
        command = [sys.executable, "-m", "memserve", "serve", "--port", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    try:
        name, url = _ready_line(process)
        yield Served(process, url, name, time.perf_counter() - started, Path(errors.name))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        Path(errors.name).unlink()


def _ready_line(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    assert process.stdout is not None
    for raw in process.stdout:
        if found := re.match(r"ready in \S+ s: (\S+) at (\S+)/v1$", raw.decode().strip()):
            return found.group(1), found.group(2)
    raise SystemExit(f"the server did not start: it ended with {process.wait(START_S_MAX)}")
