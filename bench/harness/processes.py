"""Processes that scripts start: until when they are waited for, what they are asked, what they take, how they end."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

START_S, END_S = 300.0, 60.0


def end_in_order() -> None:
    """SIGTERM ends this script as Ctrl-C does, so that its servers end with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def wait_until(
    condition: Callable[[], object], description: str, timeout_s: float = START_S, pause_s: float = 0.05
) -> float:
    """Seconds until ``condition`` held. Ends the script when it does not come to that."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > timeout_s:
            raise SystemExit(f"never came to this: {description}")
        time.sleep(pause_s)
    return time.monotonic() - begin


def is_ready(url: str) -> bool:
    """Whether the server there is well."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def metrics_of(url: str) -> dict[str, float]:
    """``/metrics`` as ``name{labels}`` -> value."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def metric_sum(metrics: Mapping[str, float], name: str) -> float:
    """Over the labels; ``name{label="value"}``: over those with this label."""
    name, _, label = name.partition("{")
    return sum(value for key, value in metrics.items() if key.split("{")[0] == name and label.rstrip("}") in key)


@contextmanager
def process(
    command: Sequence[str], url: str = "", log: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, in a group of its own, until the block ends; with ``url``: ready there. Ends the script, with the end
    of ``log``, when it does not start."""
    with (log or Path(os.devnull)).open("ab") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        if url:
            wait_until(lambda: child.poll() is not None or is_ready(url), f"{command[0]} is ready", pause_s=0.1)
        if child.poll() is not None:
            text = log.read_text(errors="replace")[-2000:] if log else ""
            raise SystemExit(f"{' '.join(command[:4])} does not start, see {log}:\n{text}")
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[Any], timeout_s: float = END_S) -> None:
    """SIGTERM to a process, and in the end SIGKILL to its group, if it leads one."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        kill(child)


def kill(child: subprocess.Popen[Any]) -> None:
    """SIGKILL to a process, or to its whole group, if it leads one."""
    with suppress(ProcessLookupError):
        (os.killpg if os.getpgid(child.pid) == child.pid else os.kill)(child.pid, signal.SIGKILL)
    child.wait()


def without_path(**more: str) -> dict[str, str]:
    """The environment for another Python's program."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


class LineChild:
    """A process that answers lines with lines. ``hello`` is its first one; empty: it has ended."""

    def __init__(self, *command: str, start: Callable[..., Any] | None = None, **more: Any) -> None:
        """``start``: in place of ``Popen``, with pipes of text."""
        start = start or partial(subprocess.Popen, text=True)
        self.process = start(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)
        self.hello = self.read()

    def ask(self, line: str) -> str:
        """The answer. Ends the script when the process has ended."""
        print(line, file=self.process.stdin, flush=True)
        answer = self.read()
        if not answer:
            raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")
        return answer

    def read(self) -> str:
        """The next line."""
        return str(self.process.stdout.readline()).strip()

    def close(self) -> None:
        """End of its input, which is its own end; else SIGKILL."""
        self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            kill(self.process)


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """``VmRSS`` = resident now, ``VmHWM`` = the most so far, ``RssAnon`` = without files and shared memory."""
    results = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(results[1]) * 1024 if results else 0


def process_cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_s(group: int) -> float:
    """CPU time so far of a process and of all in its group, if it leads one."""
    spent_s = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            pid, fields = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            spent_s += process_cpu_s(pid) if group in (pid, int(fields[2])) else 0.0
    return spent_s


def threads_cpu_s(pid: int) -> float:
    """CPU time so far of a process's threads that still run, in steps of nanoseconds, not of clock ticks."""
    spent_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            spent_ns += int(path.read_text().split()[0])
    return spent_ns / 1e9


def family_cpu_s(pid: int) -> float:
    """CPU time so far of a process and of all below it that still run."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    spent_s = 0.0
    for member in parents:
        ancestor = member
        while ancestor != pid and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == pid:
            with suppress(OSError):
                spent_s += process_cpu_s(member)
    return spent_s


class MachineShare:
    """What of the machine's CPU time others took since it was made: programs that this script has not started."""

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._busy_s, self._own_s = _machine_busy_s(), _own_cpu_s()

    def others(self) -> float:
        """Between 0 and 1."""
        whole_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        others_s = _machine_busy_s() - self._busy_s - (_own_cpu_s() - self._own_s)
        return min(1.0, max(0.0, others_s / whole_s)) if whole_s else 0.0


def _machine_busy_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # all but idle, and waiting for disks


def _own_cpu_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return family_cpu_s(os.getpid()) + ended.ru_utime + ended.ru_stime
