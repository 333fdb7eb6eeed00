"""A real store whose disks fail, are slow, or stand still, as a file says: a launcher, not a test.

    python tests/support/faulty_store.py --faults FILE -- store --join ... --ssd ...

Everything after ``--`` is the command line of ``memserve``. FILE has JSON, and is looked at again when it changes::

    {"rate": 25e6, "delay_s": 0.01}              bytes a second of all disks together; time that each job takes at least
    {"fail_reads": "EIO", "fail_writes": "ENOSPC", "share": 0.5}    this share of the jobs fails
    {"stall_s": 2.0, "every_s": 4.0}             every 4 s nothing that was begun ends for 2 s
    {}                                           a healthy disk

What the disk does is done for real; its end is told later, or as a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import heapq
import json
import os
import random
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

LOOKS_S = 0.2


class Faults:
    """What the file says now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = -LOOKS_S
        self._changed_ns = 0
        self._said: dict[str, Any] = {}
        self._began = 0.0
        self._busy_until = 0.0
        self._lock = threading.Lock()
        self._random = random.Random(1)

    def said(self) -> dict[str, Any]:
        """As of at most ``LOOKS_S`` ago."""
        now = time.monotonic()
        if now - self._looked_at > LOOKS_S:
            self._looked_at = now
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._said, self._changed_ns = json.loads(self._path.read_text()), changed_ns
                self._began = self._busy_until = now
        return self._said

    def failure(self, kind: str) -> int:
        """The error with which a job ends that begins now; 0: none. ``kind``: ``fail_reads`` or ``fail_writes``."""
        name = self.said().get(kind)
        return getattr(errno, name) if name and self._random.random() < self._said.get("share", 1.0) else 0

    def due(self, count: int) -> float:
        """When a job of ``count`` bytes that begins now may end."""
        said, now = self.said(), time.monotonic()
        with self._lock:
            at = now
            if rate := said.get("rate"):
                self._busy_until = at = max(now, self._busy_until) + count / rate
        return at + said.get("delay_s", 0.0)

    def stalled_for(self) -> float:
        """Seconds until the disk goes on."""
        said = self.said()
        if not said.get("stall_s"):
            return 0.0
        return max(0.0, said["stall_s"] - (time.monotonic() - self._began) % said["every_s"])


class FaultyQueue:
    """A queue of a disk, between a thread of the store and ``memserve._core.DiskQueue``."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._due: dict[int, tuple[float, int]] = {}  # of what is under way: when it may end, and how
        self._late: list[tuple[float, int, int]] = []  # what has ended and may not be told yet
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._both = select.epoll()
        self._both.register(inner.fileno(), select.EPOLLIN)
        self._both.register(self._bell, select.EPOLLIN)

    def read(self, tag: int, offset: int, address: int, count: int) -> None:
        self._begin(tag, count, "fail_reads")
        self._inner.read(tag, offset, address, count)

    def write(self, tag: int, offset: int, address: int, count: int) -> None:
        self._begin(tag, count, "fail_writes")
        self._inner.write(tag, offset, address, count)

    def write_bytes(self, tag: int, offset: int, data: bytes) -> None:
        self._begin(tag, len(data), "fail_writes")
        self._inner.write_bytes(tag, offset, data)

    def sync(self, tag: int) -> None:
        self._begin(tag, 0, "fail_writes")
        self._inner.sync(tag)

    def fileno(self) -> int:
        return self._both.fileno()

    def _begin(self, tag: int, count: int, kind: str) -> None:
        self._due[tag] = (self._faults.due(count), self._faults.failure(kind))

    def take(self) -> list[tuple[int, int]]:
        """What has ended and may be told."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        for tag, error in self._inner.take():
            at, failure = self._due.pop(tag)
            heapq.heappush(self._late, (at, tag, error or failure))
        now, stalled_s = time.monotonic(), self._faults.stalled_for()
        told = []
        while self._late and self._late[0][0] <= now and not stalled_s:
            _, tag, error = heapq.heappop(self._late)
            told.append((tag, error))
        if self._late:
            self._ring_in(max(self._late[0][0] - now, stalled_s))
        return told

    def _ring_in(self, seconds: float) -> None:
        timer = threading.Timer(max(seconds, 0.0005), os.eventfd_write, (self._bell, 1))
        timer.daemon = True
        timer.start()


def main() -> None:
    """Spoil the disks, then be a store."""
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=Path, required=True)
    faults = Faults(parser.parse_args(sys.argv[1:split]).faults)
    from memserve.store.host.disks import DiskHost

    make = DiskHost._open_queue
    DiskHost._open_queue = lambda self, path, memory: FaultyQueue(make(self, path, memory), faults)
    sys.argv = ["memserve", *sys.argv[split + 1 :]]
    from memserve.cli.main import main as memserve

    memserve()


if __name__ == "__main__":
    main()
