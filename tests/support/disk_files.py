"""A :class:`Disks` machine on real files: what its host does is waited for, with a deadline."""

from __future__ import annotations

import errno
import queue
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.host.disks import DiskHost

WAIT_S = 20.0


class FaultyQueue:
    """A real queue whose operations fail, or wait until they are let through."""

    def __init__(self, path: str, memory: list[tuple[int, int]]) -> None:
        self.queue = _core.DiskQueue(path, 0, 8, memory=memory)
        self.fails: Callable[[str], int] = lambda kind: 0
        """Errno of operations of a kind (read, write, sync); 0: they work."""
        self.through = threading.Event()
        self.through.set()
        self.delay_s = 0.0
        """Before ends of operations are told."""
        self.byte_ns = 0.0
        """What a byte takes at least, one operation after the other."""
        self._bytes: dict[int, int] = {}
        self._failed: dict[int, int] = {}

    def _begin(self, kind: str, tag: int, *rest: object) -> None:
        error = self.fails(kind.partition("_")[0])
        if error:
            self._failed[tag] = error
        if kind in ("read", "write") and isinstance(rest[-1], int):
            self._bytes[tag] = rest[-1]
        getattr(self.queue, kind)(tag, *rest)

    def read(self, tag: int, *rest: object) -> None:
        self._begin("read", tag, *rest)

    def write(self, tag: int, *rest: object) -> None:
        self._begin("write", tag, *rest)

    def write_bytes(self, tag: int, *rest: object) -> None:
        self._begin("write_bytes", tag, *rest)

    def sync(self, tag: int) -> None:
        self._begin("sync", tag)

    def take(self) -> list[tuple[int, int]]:
        time.sleep(self.delay_s)
        if not self.through.wait(WAIT_S):
            return [(tag, errno.ETIMEDOUT) for tag, _ in self.queue.take()]
        began_ns, done = time.perf_counter_ns(), self.queue.take()
        due_ns = began_ns + self.byte_ns * sum(self._bytes.pop(tag, 0) for tag, _ in done)
        time.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
        return [(tag, self._failed.pop(tag, error)) for tag, error in done]

    def fileno(self) -> int:
        return self.queue.fileno()


class Files:
    """Machine, host and an arena; calls return when what they began has ended."""

    def __init__(
        self,
        disks: list[tuple[Path, int]],
        config: DisksConfig | None = None,
        *,
        engine: str = "",
        arena_bytes: int = 4 << 20,
        unit_bytes: int = 4096,
        faulty: bool = False,
    ) -> None:
        config = config or DisksConfig(admission="all")
        self.arena = _core.Arena(arena_bytes)
        self.bytes = np.frombuffer(self.arena, np.uint8)
        self.queues: list[FaultyQueue] = []
        self.host = DiskHost(disks, config, engine=engine)
        self.disks = Disks(self.host.logs, config)
        self.done: queue.SimpleQueue[ev.DiskDone] = queue.SimpleQueue()
        make = self.make_queue if faulty else None
        self.host.start(self.done.put, self.arena.address, self.arena.nbytes, unit_bytes, make_queue=make)
        self.outcomes: list[ev.DiskOutcome] = []
        self.now = 0
        self.settle()

    def make_queue(self, path: str, memory: list[tuple[int, int]]) -> FaultyQueue:
        self.queues.append(FaultyQueue(path, memory))
        return self.queues[-1]

    def take(self) -> None:
        for action in self.disks.take_actions():
            self.host.perform_action(action)
        self.outcomes += self.disks.take_outcomes()
        self.disks.check_invariants()

    def step(self) -> None:
        self.take()
        self.disks.handle(self.done.get(timeout=WAIT_S), self.now)
        self.take()

    def settle(self) -> None:
        self.take()
        while not self.disks.is_idle:
            self.step()

    def tick(self, now_ns: int) -> None:
        self.now = now_ns
        self.disks.advance_time(now_ns)
        self.take()

    def write(self, key: bytes, extent: int, payload: bytes, **options) -> bool:
        self.bytes[extent : extent + len(payload)] = np.frombuffer(payload, np.uint8)
        seal = 0
        if payload:
            data = np.frombuffer(payload, np.uint8)
            seal = int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(payload))[0])
        while not self.disks.write_value(key, extent, len(payload), self.now, seal=seal, **options):
            if self.disks.is_idle:
                return False
            self.step()
        self.settle()
        return self.outcomes_of(ev.Written)[-1] == ev.Written(key, True)

    def read(self, key: bytes, extent: int, length: int) -> bytes | None:
        read_id = self.disks.read_value(key, extent, self.now, 1 << 62)
        if read_id is None:
            return None
        self.settle()
        ended = next(end for end in self.outcomes_of(ev.ReadEnded) if end.id == read_id)
        return bytes(self.bytes[extent : extent + length]) if ended.ok else None

    def outcomes_of(self, kind: type) -> list:
        return [outcome for outcome in self.outcomes if isinstance(outcome, kind)]

    def kill(self) -> None:
        """The end of a process that closes nothing in order."""
        assert self.host.close()

    def close(self) -> None:
        self.disks.close(self.now)
        self.settle()
        assert self.host.close()


def has_io_uring(folder: Path) -> bool:
    try:
        made = _core.DiskQueue(str(folder / "probe"), 4096, 4, engine="io_uring")
    except OSError:
        return False
    made.sync(1)
    select.select([made], [], [], WAIT_S)
    return made.take() == [(1, 0)]
