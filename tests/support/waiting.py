"""Waiting for what another thread or process does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Until ``condition`` holds. To look takes a tenth of the time: a test that asks a server again and again leaves
    the processor to what it waits for, and what is quickly looked at is looked at often."""
    began = time.monotonic()
    deadline = began + timeout_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, "it never came to that"
        time.sleep(min(0.1, max(0.005, 9 * (now - began))))
        began = time.monotonic()


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until all its threads stand still: on a busy machine they may run on for 80 ms, and answer."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        return all(state == "T" for state in _states_of_threads(pid))

    eventually(stands_still)


def _states_of_threads(pid: int) -> Iterator[str]:
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended since it was listed
            yield path.read_text().rpartition(")")[2].split()[0]
