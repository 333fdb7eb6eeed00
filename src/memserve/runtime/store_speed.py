"""Reads a little of each disk of a store that starts: :mod:`memserve.store.disk_speed` says what, and what follows."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from memserve import _core
from memserve._core import SegmentLog
from memserve.policy.costs import CopyCurve
from memserve.store.disk_events import PAGE_BYTES
from memserve.store.disk_speed import MEASURE_NS, Arrived, Span, curve_of_disks, curve_of_reads, spans_to_read
from memserve.units import NS_PER_MS, NS_PER_S

log = logging.getLogger(__name__)

_NO_OFFSET = np.zeros(1, np.int64)


class ReadQueue(Protocol):
    """What is needed of :class:`memserve._core.DiskQueue`."""

    def read(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def take(self) -> list[tuple[int, int]]: ...
    def fileno(self) -> int: ...


class _Reading:
    """The reads of one disk, in a thread of their own: a disk that stands still holds up no start. The thread ends when
    the disk has answered, however late."""

    def __init__(self, path: Path, spans: list[Span], make_queue: Callable[[str], ReadQueue]) -> None:
        self._path, self._spans, self._make_queue = path, spans, make_queue
        self._arrived: list[Arrived] = []
        self._failed = False
        self._asked_ns = self._began_ns = time.monotonic_ns()
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="memserve-disk-speed", daemon=True).start()

    def curve(self) -> CopyCurve | None:
        """By what has come until now. None: the disk fails."""
        arrived = list(self._arrived)
        if self._failed:
            return None
        next_bytes = self._spans[len(arrived)].nbytes if len(arrived) < len(self._spans) else 0
        since_ns = self._began_ns if arrived else self._asked_ns  # the thread may have begun late, or not yet
        return curve_of_reads(arrived, next_bytes, time.monotonic_ns() - since_ns)

    def _run(self) -> None:
        try:
            self._read()
        except OSError as error:
            log.warning("what %s takes to be read is not known: %s", self._path, error)
            self._failed = True
        finally:
            self.ended.set()

    def _read(self) -> None:
        arena = _core.Arena(sum(span.nbytes for span in self._spans))
        np.frombuffer(memoryview(arena), np.uint8)[::PAGE_BYTES] = 0  # a store's memory is there when it is read into
        queue, address, addresses = self._make_queue(str(self._path)), arena.address, []
        poll, total = select.poll(), 0
        poll.register(queue.fileno(), select.POLLIN)
        self._began_ns = time.monotonic_ns()
        for tag, span in enumerate(self._spans):
            addresses.append(address)
            queue.read(tag, span.offset, address, span.nbytes)
            address += span.nbytes
        left = len(self._spans)
        while left:
            poll.poll()
            for tag, error in queue.take():
                left -= 1
                if error:
                    self._failed = True
                    continue
                nbytes = self._spans[tag].nbytes
                _core.seal_ranges(addresses[tag], _NO_OFFSET, nbytes)  # as every read of the store is compared
                total += nbytes
                self._arrived.append(Arrived(total, time.monotonic_ns() - self._began_ns))


def measured_curve(
    disks: list[tuple[Path, SegmentLog]], make_queue: Callable[[str], ReadQueue], within_ns: int = MEASURE_NS
) -> CopyCurve | None:
    """What reading these disks takes, all of them together. None: one has too little to be read, or fails."""
    plans = [(path, segments, spans_to_read(segments)) for path, segments in disks]
    if not plans or not all(spans for _, _, spans in plans):
        return None
    readings = [(path, segments, _Reading(path, spans, make_queue)) for path, segments, spans in plans]
    end_ns = time.monotonic_ns() + within_ns
    found = []
    for path, segments, reading in readings:
        reading.ended.wait(max(0, end_ns - time.monotonic_ns()) / NS_PER_S)
        curve = reading.curve()
        if curve is None:
            return None
        rate = NS_PER_S / curve.byte_ns / 1e6
        log.info("%s: reads begin after %.2f ms and give %.0f MB/s", path, curve.start_ns / NS_PER_MS, rate)
        found.append((segments.disk_bytes, curve))
    return curve_of_disks(found)
