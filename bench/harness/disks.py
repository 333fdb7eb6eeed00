"""A store's disks as production has them, on a file of this machine, driven from this thread."""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.host.disks import DiskHost

EXTENTS = 64
NEVER_NS = 1 << 62
"""A deadline that does not come."""


class DiskRig:
    """A machine, its host and an arena of extents, whose random bytes are written as blocks."""

    def __init__(
        self, folder: Path, nbytes: int, config: DisksConfig, block_bytes: int, extents: int = EXTENTS, engine: str = ""
    ) -> None:
        self.block_bytes, self.config = block_bytes, config
        self.arena = _core.Arena(extents * block_bytes)
        np.frombuffer(self.arena, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, self.arena.nbytes, np.uint8)
        self.seal(range(extents))
        self.host = DiskHost([(folder, nbytes)], config, engine=engine)
        self.disks = Disks(self.host.logs, config)
        self.done: queue.SimpleQueue[ev.DiskDone] = queue.SimpleQueue()
        self.host.start(self.done.put, self.arena.address, self.arena.nbytes, block_bytes)
        self.free = list(range(extents))
        self.settle()

    def seal(self, extents: range) -> None:
        """After reads into them, and before writes: extents hold what their checksums say again."""
        offsets = np.array(extents, np.int64) * self.block_bytes
        seals = _core.seal_ranges(self.arena.address, offsets, self.block_bytes)
        known_seals = getattr(self, "seals", {})
        self.seals: dict[int, int] = known_seals | {
            extent: int(seal) for extent, seal in zip(extents, seals, strict=True)
        }

    def write(self, key: bytes, extent: int) -> bool:
        """Whether it was begun; else a segment is being prepared first."""
        offset = extent * self.block_bytes
        return self.disks.write_value(key, offset, self.block_bytes, self.now(), seal=self.seals[extent])

    def read(self, key: bytes, extent: int) -> int | None:
        """The number of the read. None: it cannot be begun now."""
        return self.disks.read_value(key, extent * self.block_bytes, self.now(), NEVER_NS)

    def take(self) -> list[ev.DiskOutcome]:
        """What has ended; further work goes to the disk. Ends the script where a block was not read back."""
        for action in self.disks.take_actions():
            self.host.perform_action(action)
        outcomes = self.disks.take_outcomes()
        for outcome in outcomes:
            if isinstance(outcome, ev.ReadEnded) and not outcome.ok:
                sys.exit(f"a block was not read back: {outcome.why}")
        return outcomes

    def now(self) -> int:
        """In nanoseconds; a budget of writes is counted by it."""
        return time.monotonic_ns()

    def step(self) -> list[ev.DiskOutcome]:
        """The same, after waiting for the disk where nothing has ended yet."""
        outcomes = self.take()
        if not outcomes and not self.disks.is_idle:
            self.disks.handle(self.done.get(timeout=60), self.now())
            outcomes = self.take()
        return outcomes

    def arrived(self) -> Iterator[ev.DiskDone]:
        """What the disk has done meanwhile."""
        while not self.done.empty():
            yield self.done.get()

    def settle(self) -> None:
        """Until nothing is under way."""
        self.take()
        while not self.disks.is_idle:
            self.step()

    def close(self) -> None:
        """Settle, and close the files."""
        self.settle()
        self.host.close()
