"""Performs the jobs of :class:`memserve.store.disks.disks.Disks` on disks (``store/host/backends.py``): a thread and a
queue for each.

::

    host = DiskHost([(folder, nbytes)], config)         files opened, locked, recovered
    disks = Disks(host.logs, config)
    host.start(post, address, nbytes, unit_bytes)       the arena; post(DiskDone) is called from the disks' threads
    for action in disks.take_actions(): host.perform(action)

Extents are read and written in place where they are whole pages; others go through memory of the host's. Checksums
are computed behind each read, in the disk's thread, without the GIL.

Values are encoded and decoded in the disk's thread as well (``system/kv_codec.py``), between its reads: one value, then
a look at what has come. Whether that pays follows from what a byte takes on the disk: the time in which at least one
read was under way, or one write, without what the codec took of it.

Memory of a disk's thread: pages for heads of records, and whole payloads that can't be read or written in place.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.units import MIB, NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve
from memserve.store.disks import events as ev
from memserve.store.disks.encoding import ENCODED_BYTES_MIN
from memserve.store.disks.events import PAGE_BYTES, DiskAction, DiskDone, DisksConfig
from memserve.store.host.backends import Queue
from memserve.store.host.files import DiskFile, measured_curve, open_files
from memserve.system.kv_codec import CodecGate, KvCodec, LearntRate

_PAGES = 512
_IDLE_MAX = 8
"""Larger pieces of one size that are kept for the next job, or as many as are this much memory:"""
_IDLE_BYTES = 32 * MIB


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
        size = len(bounce.view)
        if len(idle) < (_PAGES if size == PAGE_BYTES else max(_IDLE_MAX, _IDLE_BYTES // size)):
            idle.append(bounce)

    def prepare_pieces(self, nbytes: int) -> None:
        """Have memory for pieces of ``nbytes`` that the kernel has filled with zeros already, which takes longer than a
        quick disk takes to read as much."""
        pieces = [self.take_piece(nbytes) for _ in range(max(1, _IDLE_BYTES // nbytes))]
        for piece in pieces:
            np.frombuffer(piece.view, np.uint8)[::PAGE_BYTES] = 0
            self.return_piece(piece)


log = logging.getLogger(__name__)

DEPTH = 64
"""Operations that a disk may have under way; a record is two."""
_PARTS = 2
"""Of a record: tags are twice the job's number, and one more for the payload behind the head."""
_NO_OFFSET = np.zeros(1, np.int64)

Post = Callable[[DiskDone], None]


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


_LOOKS = 64
_LANDING_BYTES_MAX = 32 * MIB
"""Encoded values that may be under way from a disk into memory of the host's; a longer value comes alone."""
_WINDOW_NS = 50 * NS_PER_MS
_WINDOW_BYTES = MIB
"""A rate is learnt from so much at least, in windows of about so long."""


class DiskWay:
    """What a byte takes in one direction of a disk, by the time in which something was under way."""

    def __init__(self) -> None:
        self.rate = LearntRate()
        self._under_way = 0
        self._since_ns = self._busy_ns = 0
        self._bytes = 0

    def begin_job(self, now_ns: int) -> None:
        """A read, or a write, has begun."""
        if self._under_way == 0:
            self._since_ns = now_ns
        self._under_way += 1

    def end_job(self, nbytes: int, now_ns: int) -> None:
        """It has ended. ``nbytes``: on the disk; 0: it has failed, or tells nothing."""
        self._under_way -= 1
        self._bytes += nbytes
        if self._under_way > 0 and now_ns - self._since_ns < _WINDOW_NS:
            return
        self._busy_ns += now_ns - self._since_ns
        self._since_ns = now_ns
        if self._bytes >= _WINDOW_BYTES:
            self.rate.note(self._bytes, max(0, self._busy_ns))
            self._busy_ns = self._bytes = 0

    def leave_out(self, spent_ns: int) -> None:
        """The disk's thread has done something else."""
        if self._under_way > 0:
            self._busy_ns -= spent_ns


def usual_encoded_bytes(segments: _core.SegmentLog) -> int:
    """The longest encoding among some values of a disk; 0: there is none. Not while the machine uses the log."""
    keys = segments.keys()[: 16 * _LOOKS]
    records = [segments.look(keys[at : at + 16]) for at in range(0, len(keys), 16)]
    return max((record.encoded_bytes for record in records if record is not None), default=0)


class DiskCodec:
    """The codec in a disk's thread, and whether it pays there."""

    def __init__(self, codec: KvCodec) -> None:
        self._codec = codec
        self.reads, self.writes = DiskWay(), DiskWay()
        self._read_gate = CodecGate(codec.mode, codec.least.decode_byte_ns)
        self._write_gate = CodecGate(codec.mode, codec.least.encode_byte_ns)
        self.spent_ns = 0
        """By the last job."""

    @property
    def pays(self) -> bool:
        """Whether a value should be encoded now: it is to be read sooner, and encoded more quickly than it is written.
        For a write no request waits, and one value is encoded while another is written."""
        rates, reads, writes = self._codec.rates, self.reads.rate.byte_ns, self.writes.rate.byte_ns
        read_ns, write_ns = writes if reads is None else reads, reads if writes is None else writes
        sooner = self._read_gate.lets_encode(read_ns, rates.decode_byte_ns, rates.share)
        return self._write_gate.lets_encode(write_ns, rates.encode_byte_ns, 0.0) and sooner

    def encode_value(self, address: int, length: int, out: Bounce) -> int:
        """Bytes of the encoding; 0: it saves no page."""
        began_ns = time.perf_counter_ns()
        nbytes = self._codec.encode_to(address, _NO_OFFSET, length, out.address, len(out.view))
        self._note_spent(began_ns)
        return nbytes if nbytes and _core.SegmentLog.saves_pages(length, nbytes) else 0

    def decode_value(self, source: int, nbytes: int, target: int, length: int) -> int:
        """The checksum of what was decoded; 0: it is no encoding of a value of this length."""
        began_ns = time.perf_counter_ns()
        seals = self._codec.decode(source, nbytes, target, _NO_OFFSET, length)
        self._note_spent(began_ns)
        return 0 if seals is None else int(seals[0])

    def _note_spent(self, began_ns: int) -> None:
        self.spent_ns = time.perf_counter_ns() - began_ns
        self.reads.leave_out(self.spent_ns)
        self.writes.leave_out(self.spent_ns)


class DiskHost:
    """The files of a store, and a thread each."""

    def __init__(self, disks: Sequence[tuple[Path | str, int]], config: DisksConfig, *, engine: str = "") -> None:
        """``disks``: what ``--ssd`` names, and sizes. Opens and recovers them; raises :class:`UserError`.
        ``engine`` of files: ``io_uring``, ``threads``, or empty for the better one that works."""
        self._files = open_files(disks, config)
        self.logs = [file.log for file in self._files]
        self.engine = engine
        self._kv_codec = config.kv_codec
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
        self._workers = [
            _Worker(number, file, extents, post, make, KvCodec(self._kv_codec))
            for number, file in enumerate(self._files)
        ]
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
                file.medium.close()
        return all(joined)

    def _open_queue(self, path: str, memory: list[tuple[int, int]]) -> Queue:
        medium = next(file.medium for file in self._files if file.path == path)
        return medium.open_queue(memory, DEPTH, self.engine)


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

    def __init__(
        self, number: int, file: DiskFile, extents: Extents, post: Post, make_queue: MakeQueue, codec: KvCodec
    ) -> None:
        self._file, self._extents, self._post = file, extents, post
        self._codec = DiskCodec(codec)
        self._to_encode: deque[ev.EncodeExtent] = deque()
        self._to_read: deque[ev.ReadExtent | ev.ReadRecord] = deque()
        """Encoded values, for which there is no memory while others are read."""
        self._landing_bytes = 0
        self._usual_bytes = usual_encoded_bytes(file.log)
        self._memory = BounceMemory()
        memory_ranges = (
            [(extents.address, extents.nbytes), self._memory.pages] if extents.nbytes else [self._memory.pages]
        )
        try:
            self._queue: Queue | None = make_queue(file.path, memory_ranges)
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
        if self._usual_bytes:
            self._memory.prepare_pieces(self._usual_bytes)
        poll = select.poll()
        poll.register(queue.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        # what was asked for before the stop is done: the machine waits for an end of each job
        while self._running or self._inbox or self._to_encode or not self._stopping:
            ready = poll.poll(0 if self._to_encode else None)
            if any(fd == self._wake for fd, _ in ready):
                os.eventfd_read(self._wake)
            while self._inbox:
                self._begin_job(queue, self._inbox.popleft())
            for tag, error in queue.take():
                self._part_ended(tag, error)
            if self._to_encode:
                self._encode_extent(self._to_encode.popleft())
        # io_uring is closed by the thread that used it, and before the file
        self._queue = queue = None
        self._file.medium.close()

    def _begin_job(self, queue: Queue, action: DiskAction) -> None:
        match action:
            case ev.ForgetDisk(_, why):
                log.error("the disk %s is lost (%s): its values are forgotten", self._file.path, why)
                self._file.medium.erase()
                return
            case ev.DropRecord(_, source):
                self._memory.return_piece(self._kept_payloads.pop(source, None))
                return
            case ev.EncodeExtent():
                self._to_encode.append(action)
                return
            case ev.ReadExtent() | ev.ReadRecord() if action.encoded_bytes:
                if self._landing_bytes and self._landing_bytes + action.encoded_bytes > _LANDING_BYTES_MAX:
                    self._to_read.append(action)
                    return
                self._landing_bytes += action.encoded_bytes
        self._running[action.job] = running = _Running(action, action.job)
        if (way := self._way_of(action)) is not None:
            way.begin_job(time.perf_counter_ns())
        try:
            self._submit_operations(queue, running)
        except Exception:  # a job always has an end: the machine counts on it
            log.exception("a job on %s cannot be begun", self._file.path)
            running.error = errno.EINVAL
            if running.parts == 0:
                self._finish_job(running)

    def _encode_extent(self, action: ev.EncodeExtent) -> None:
        nbytes, self._codec.spent_ns = 0, 0
        try:
            piece = self._memory.take_piece(_core.kv_encoded_bytes_max(action.length))
            nbytes = self._codec.encode_value(self._extents.address + action.extent, action.length, piece)
            if nbytes:
                self._kept_payloads[action.job] = piece
            else:
                self._memory.return_piece(piece)
        except Exception:
            log.exception("a value for %s cannot be encoded", self._file.path)
        self._post_done(DiskDone(action.job, True, encoded_bytes=nbytes, codec_ns=self._codec.spent_ns))

    def _post_done(self, done: DiskDone) -> None:
        self._post(replace(done, encodes=self._codec.pays))

    def _way_of(self, action: DiskAction) -> DiskWay | None:
        """None: it tells nothing of how quick the disk is with long values."""
        if isinstance(action, ev.ReadExtent | ev.ReadRecord) and action.length >= ENCODED_BYTES_MIN:
            return self._codec.reads
        if isinstance(action, ev.WriteExtent | ev.WriteRecord) and action.length >= ENCODED_BYTES_MIN // 2:
            return self._codec.writes
        return None

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
            case ev.ReadExtent(_, _, offset, extent, length, inside, encoded_bytes):
                if encoded_bytes:
                    running.body = self._memory.take_piece(encoded_bytes)
                    self._submit_read(queue, running, offset, running.body.address, encoded_bytes)
                else:
                    address = 0 if inside else self._payload_address(running, extent, length)
                    self._submit_read(queue, running, offset, address, length)
            case ev.ReadRecord(_, _, offset, length, inside, _, encoded_bytes):
                nbytes = encoded_bytes or length
                if not inside:
                    running.body = self._memory.take_piece(_padded(nbytes))
                self._submit_read(queue, running, offset, 0 if inside else _address(running.body), nbytes)

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
        if (way := self._way_of(running.action)) is not None:
            way.end_job(0 if running.error else _bytes_moved(running.action), time.perf_counter_ns())
        self._codec.spent_ns = 0
        self._post_done(self._result_of(running))
        self._memory.return_piece(running.head)
        # a record that is being moved keeps its payload until the write of the move takes it
        if running.job not in self._kept_payloads:
            self._memory.return_piece(running.body)
        if isinstance(running.action, ev.ReadExtent | ev.ReadRecord) and running.action.encoded_bytes:
            self._landing_bytes -= running.action.encoded_bytes
            if self._to_read:  # one ends, one begins: what is under way stays below the limit
                self._inbox.appendleft(self._to_read.popleft())
                os.eventfd_write(self._wake, 1)

    def _result_of(self, running: _Running) -> DiskDone:
        if running.error:
            return DiskDone(running.job, False, why=errno.errorcode.get(running.error, str(running.error)))
        match running.action:
            case ev.ReadExtent(_, _, _, extent, length, inside, encoded_bytes):
                assert running.head is not None
                head, target = bytes(running.head.view), self._extents.address + extent
                if encoded_bytes:
                    seal = self._codec.decode_value(_address(running.body), encoded_bytes, target, length)
                    return DiskDone(running.job, True, seal, head, codec_ns=self._codec.spent_ns)
                if not inside and running.body is None:
                    return DiskDone(running.job, True, _checksum_of(target, length), head)
                source = running.head.address + inside if inside else _address(running.body)
                return DiskDone(running.job, True, _copy_with_checksum(target, source, length), head)
            case ev.ReadRecord(_, _, _, length, inside, keep, encoded_bytes):
                assert running.head is not None
                head = bytes(running.head.view)
                source = running.head.address + inside if inside else _address(running.body)
                if keep:
                    self._kept_payloads[running.job] = running.body
                if encoded_bytes:
                    value = self._memory.take_piece(length)
                    seal = self._codec.decode_value(source, encoded_bytes, value.address, length)
                    self._memory.return_piece(value)
                    return DiskDone(running.job, True, seal, head, codec_ns=self._codec.spent_ns)
                return DiskDone(running.job, True, _checksum_of(source, length), head)
        return DiskDone(running.job, True)


def _padded(length: int) -> int:
    return ceil_div(length, PAGE_BYTES) * PAGE_BYTES


def _bytes_moved(action: DiskAction) -> int:
    """Behind a record's head."""
    if isinstance(action, ev.ReadExtent | ev.ReadRecord):
        return action.encoded_bytes or action.length
    return action.length if isinstance(action, ev.WriteExtent | ev.WriteRecord) else 0


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
