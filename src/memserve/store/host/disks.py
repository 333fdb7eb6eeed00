"""Performs the jobs of :class:`memserve.store.disks.disks.Disks` on files: a thread and a queue for each disk.

::

    host = DiskHost([(folder, nbytes)], config)         files opened, locked, recovered
    disks = Disks(host.logs, config)
    host.start(post, address, nbytes, unit_bytes)       the arena; post(DiskDone) is called from the disks' threads
    for action in disks.take_actions(): host.perform(action)

Extents are read and written in place where they are whole pages; others go through memory of the host's. Checksums
are computed behind each read, in the disk's thread, without the GIL.

Memory of a disk's thread: pages for heads of records, and whole payloads that can't be read or written in place.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.units import ceil_div
from memserve.kv.costs import CopyCurve
from memserve.store.disks import events as ev
from memserve.store.disks.events import PAGE_BYTES, DiskAction, DiskDone, DisksConfig
from memserve.store.host.files import DiskFile, measured_curve, open_files

_PAGES = 512
_IDLE_MAX = 8
"""Larger pieces of one size that are kept for the next job."""


@dataclass(slots=True)
class Bounce:
    """Bytes on a page boundary."""

    address: int
    view: memoryview
    arena: _core.Arena
    """Of a whole arena or of a page in one that is shared."""


class BounceMemory:
    """Pieces of whole pages, reused. As many are out as there are jobs under way: the machine bounds those."""

    def __init__(self) -> None:
        self._arena = _core.Arena(_PAGES * PAGE_BYTES)
        self.pages = (self._arena.address, self._arena.nbytes)
        """Where most single pages lie: worth making known to the kernel."""
        whole = memoryview(self._arena).cast("B")
        self._idle: dict[int, list[Bounce]] = {PAGE_BYTES: []}
        for offset in range(0, _PAGES * PAGE_BYTES, PAGE_BYTES):
            page = Bounce(self._arena.address + offset, whole[offset : offset + PAGE_BYTES], self._arena)
            self._idle[PAGE_BYTES].append(page)

    def take_piece(self, nbytes: int) -> Bounce:
        """At least ``nbytes``, what they hold is left over from before."""
        size = PAGE_BYTES
        # powers of two: few sizes, so that a piece that comes back fits the next job
        while size < nbytes:
            size *= 2
        idle = self._idle.setdefault(size, [])
        if idle:
            return idle.pop()
        arena = _core.Arena(size)
        return Bounce(arena.address, memoryview(arena).cast("B"), arena)

    def return_piece(self, bounce: Bounce | None) -> None:
        """It is used no more. None: nothing was."""
        if bounce is None:
            return
        idle = self._idle[len(bounce.view)]
        if len(idle) < (_PAGES if len(bounce.view) == PAGE_BYTES else _IDLE_MAX):
            idle.append(bounce)


log = logging.getLogger(__name__)

DEPTH = 64
"""Operations that a disk may have under way; a record is two."""
_PARTS = 2
"""Of a record: tags are twice the job's number, and one more for the payload behind the head."""
_NO_OFFSET = np.zeros(1, np.int64)

Post = Callable[[DiskDone], None]


class Queue(Protocol):
    """What a disk's thread needs of :class:`memserve._core.DiskQueue`."""

    def read(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def write(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def write_bytes(self, tag: int, offset: int, data: bytes) -> None: ...
    def sync(self, tag: int) -> None: ...
    def take(self) -> list[tuple[int, int]]: ...
    def fileno(self) -> int: ...


MakeQueue = Callable[[str, list[tuple[int, int]]], Queue]
"""Path, and address and size of the memory that operations use."""


@dataclass(frozen=True, slots=True)
class Extents:
    """The arena whose extents are read and written."""

    address: int
    nbytes: int
    unit_bytes: int
    """Extents take whole units: what is behind a payload, up to the unit's end, belongs to no other."""

    def in_place(self, extent: int, length: int) -> bool:
        """Whether the pages of this payload may be read and written where it is."""
        whole = length % PAGE_BYTES == 0 or self.unit_bytes % PAGE_BYTES == 0
        padded = ceil_div(length, PAGE_BYTES) * PAGE_BYTES
        return whole and (self.address + extent) % PAGE_BYTES == 0 and extent + padded <= self.nbytes


class DiskHost:
    """The files of a store, and a thread each."""

    def __init__(
        self, disks: list[tuple[Path, int]], config: DisksConfig, *, engine: str = "", depth: int = DEPTH
    ) -> None:
        """``disks``: folders and sizes. Opens and recovers them; raises :class:`UserError`. ``engine``: ``io_uring``,
        ``threads``, or empty for the better one that works."""
        self._files = open_files(disks, config)
        self.logs = [file.log for file in self._files]
        self.engine, self.depth = engine, depth
        self._workers: list[_Worker] = []

    def read_curve(self) -> CopyCurve | None:
        """What reading the disks takes, by a few reads now; see :func:`measured_curve`. Before :meth:`start`."""
        disks = [(file.path, file.log) for file in self._files]
        return measured_curve(disks, lambda path: self._open_queue(path, []))

    def start(
        self, post: Post, address: int, nbytes: int, unit_bytes: int, *, make_queue: MakeQueue | None = None
    ) -> None:
        """Begin to perform. The arena, ``nbytes`` at ``address``, stays until :meth:`close` has returned True.

        ``post`` is called from the disks' threads and must not raise. Raises :class:`UserError`.
        """
        extents = Extents(address, nbytes, unit_bytes)
        make = make_queue or self._open_queue
        self._workers = [_Worker(number, file, extents, post, make) for number, file in enumerate(self._files)]
        for worker in self._workers:
            worker.start()

    def perform_action(self, action: DiskAction) -> None:
        """Begin with a job; never waits for the disk. Not after :meth:`close`."""
        self._workers[action.disk].enqueue_action(action)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End when every job has ended. False: after ``timeout_s`` a disk still uses the arena."""
        for worker in self._workers:
            worker.request_stop()
        joined = [worker.join_thread(timeout_s) for worker in self._workers]
        # with workers each closes its file itself, after its last operation
        if not self._workers:
            for file in self._files:
                file.close()
        return all(joined)

    def _open_queue(self, path: str, memory: list[tuple[int, int]]) -> Queue:
        return _core.DiskQueue(path, 0, self.depth, engine=self.engine, memory=memory)


@dataclass(slots=True)
class _Running:
    """A job whose operations are under way."""

    action: DiskAction
    job: int
    parts: int = 0
    """Operations under way."""
    error: int = 0
    head: Bounce | None = None
    body: Bounce | None = None


class _Worker:
    """One disk. Its thread alone uses its queue: io_uring hands results to the thread that asked, and another one would
    be woken for each."""

    def __init__(self, number: int, file: DiskFile, extents: Extents, post: Post, make_queue: MakeQueue) -> None:
        self._file, self._extents, self._post = file, extents, post
        self._memory = BounceMemory()
        memory_ranges = (
            [(extents.address, extents.nbytes), self._memory.pages] if extents.nbytes else [self._memory.pages]
        )
        try:
            self._queue: Queue | None = make_queue(str(file.path), memory_ranges)
        except OSError as error:
            raise UserError(f"cannot use {file.path}: {error.strerror}", hint="--ssd DIR=SIZE", param="ssd") from None
        self._inbox: deque[DiskAction] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._running: dict[int, _Running] = {}
        self._kept_payloads: dict[int, Bounce | None] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run_worker, name=f"memserve-disk-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enqueue_action(self, action: DiskAction) -> None:
        self._inbox.append(action)
        os.eventfd_write(self._wake, 1)

    def request_stop(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def join_thread(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s has not ended what is under way after %g s", self._file.path, timeout_s)
            return False
        os.close(self._wake)
        return True

    # -- the thread

    def _run_worker(self) -> None:
        queue = self._queue
        assert queue is not None
        poll = select.poll()
        poll.register(queue.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        # what was asked for before the stop is done: the machine waits for an end of each job
        while self._running or self._inbox or not self._stopping:
            ready = poll.poll()
            if any(fd == self._wake for fd, _ in ready):
                os.eventfd_read(self._wake)
            while self._inbox:
                self._begin_job(queue, self._inbox.popleft())
            for tag, error in queue.take():
                self._part_ended(tag, error)
        # io_uring is closed by the thread that used it, and before the file
        self._queue = queue = None
        self._file.close()

    def _begin_job(self, queue: Queue, action: DiskAction) -> None:
        match action:
            case ev.ForgetDisk(_, why):
                log.error("the disk in %s is lost (%s): its values are forgotten", self._file.folder, why)
                self._file.erase_file()
                return
            case ev.DropRecord(_, source):
                self._memory.return_piece(self._kept_payloads.pop(source, None))
                return
        self._running[action.job] = running = _Running(action, action.job)
        try:
            self._submit_operations(queue, running)
        except Exception:  # a job always has an end: the machine counts on it
            log.exception("a job on %s cannot be begun", self._file.path)
            running.error = errno.EINVAL
            if running.parts == 0:
                self._finish_job(running)

    def _submit_operations(self, queue: Queue, running: _Running) -> None:
        tag = _PARTS * running.job
        match running.action:
            case ev.WritePages(_, _, offset, data):
                queue.write_bytes(tag, offset, data)
                running.parts = 1
            case ev.SyncDisk():
                queue.sync(tag)
                running.parts = 1
            case ev.WriteExtent(_, _, offset, head, extent, length, inside):
                running.head = page = self._memory.take_piece(PAGE_BYTES)
                page.view[:] = head
                source = self._extents.address + extent
                if inside:
                    _copy(page.address + inside, source, length)
                else:
                    address = self._payload_address(running, extent, length)
                    if running.body is not None:
                        _copy(address, source, length)
                    queue.write(tag + 1, offset + PAGE_BYTES, address, _padded(length))
                    running.parts = 1
                queue.write(tag, offset, page.address, PAGE_BYTES)
                running.parts += 1
            case ev.WriteRecord(_, _, offset, head, source, length):
                running.head, running.body = self._memory.take_piece(PAGE_BYTES), self._kept_payloads.pop(source)
                running.head.view[:] = head
                queue.write(tag + 1, offset + PAGE_BYTES, _address(running.body), _padded(length))
                running.parts = 1
                queue.write(tag, offset, running.head.address, PAGE_BYTES)
                running.parts = 2
            case ev.ReadExtent(_, _, offset, extent, length, inside):
                address = 0 if inside else self._payload_address(running, extent, length)
                self._submit_read(queue, running, offset, address, length)
            case ev.ReadRecord(_, _, offset, length, inside, _):
                if not inside:
                    running.body = self._memory.take_piece(_padded(length))
                self._submit_read(queue, running, offset, 0 if inside else _address(running.body), length)

    def _submit_read(self, queue: Queue, running: _Running, offset: int, address: int, length: int) -> None:
        """A record's head and, unless ``address`` is 0, the payload behind it."""
        tag = _PARTS * running.job
        running.head = self._memory.take_piece(PAGE_BYTES)
        if address:
            queue.read(tag + 1, offset + PAGE_BYTES, address, _padded(length))
            running.parts = 1
        queue.read(tag, offset, running.head.address, PAGE_BYTES)
        running.parts += 1

    def _payload_address(self, running: _Running, extent: int, length: int) -> int:
        """Where whole pages of the payload are read or written."""
        if self._extents.in_place(extent, length):
            return self._extents.address + extent
        running.body = self._memory.take_piece(_padded(length))
        return running.body.address

    def _part_ended(self, tag: int, error: int) -> None:
        running = self._running[tag // _PARTS]
        running.parts -= 1
        # the first error tells why; a second part of the job often fails of the same
        running.error = running.error or error
        if running.parts == 0:
            self._finish_job(running)

    def _finish_job(self, running: _Running) -> None:
        del self._running[running.job]
        self._post(self._result_of(running))
        self._memory.return_piece(running.head)
        # a record that is being moved keeps its payload until the write of the move takes it
        if running.job not in self._kept_payloads:
            self._memory.return_piece(running.body)

    def _result_of(self, running: _Running) -> DiskDone:
        if running.error:
            return DiskDone(running.job, False, why=errno.errorcode.get(running.error, str(running.error)))
        match running.action:
            case ev.ReadExtent(_, _, _, extent, length, inside):
                assert running.head is not None
                head, target = bytes(running.head.view), self._extents.address + extent
                if not inside and running.body is None:
                    return DiskDone(running.job, True, _checksum_of(target, length), head)
                source = running.head.address + inside if inside else _address(running.body)
                return DiskDone(running.job, True, _copy_with_checksum(target, source, length), head)
            case ev.ReadRecord(_, _, _, length, inside, keep):
                assert running.head is not None
                head = bytes(running.head.view)
                source = running.head.address + inside if inside else _address(running.body)
                if keep:
                    self._kept_payloads[running.job] = running.body
                return DiskDone(running.job, True, _checksum_of(source, length), head)
        return DiskDone(running.job, True)


def _padded(length: int) -> int:
    return ceil_div(length, PAGE_BYTES) * PAGE_BYTES


def _address(body: Bounce | None) -> int:
    assert body is not None
    return body.address


def _copy(target: int, source: int, length: int) -> None:
    if length:
        _core.copy_bytes(target, source, length)


def _checksum_of(address: int, length: int) -> int:
    return int(_core.seal_ranges(address, _NO_OFFSET, length)[0]) if length else 0


def _copy_with_checksum(target: int, source: int, length: int) -> int:
    return int(_core.copy_ranges_sealed(target, _NO_OFFSET, source, _NO_OFFSET, length)[0]) if length else 0
