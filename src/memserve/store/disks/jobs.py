"""What the jobs of a disk are for, and what a record that was read must agree with.

A verification: every record is read and compared with what was written, one at a time on each disk.

How many bytes a day may be written to flash: a token bucket over the time that callers name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve._core import Found, SegmentLog, Ticket
from memserve.base.units import MIB, NS_PER_S, ceil_div
from memserve.store.disks.encoding import EncodeStep
from memserve.store.disks.events import (
    PAGE_BYTES,
    DiskAction,
    DiskCounters,
    DiskDone,
    DiskOutcome,
    DisksConfig,
    DropRecord,
    SyncDisk,
    WritePages,
    WriteRecord,
)

KEY_BYTES = 16
KEYS_MAX = 1000
"""Keys of records that do not match which a verification names."""


@dataclass(slots=True)
class Verification:
    """What a verification has found so far, on all disks."""

    id: int
    records: int = 0
    payload_bytes: int = 0
    damaged: int = 0
    unread: int = 0
    keys: list[bytes] = field(default_factory=list)

    def note_good(self, length: int) -> None:
        """A record is what was written."""
        self.records += 1
        self.payload_bytes += length

    def note_bad(self, key: bytes, length: int, *, readable: bool) -> None:
        """A record does not match, or could not be read."""
        self.note_good(length)
        if readable:
            self.damaged += 1
        else:
            self.unread += 1
        if len(self.keys) < KEYS_MAX:
            self.keys.append(key)


class RecordsToCheck:
    """What of a verification is left to do on one disk."""

    def __init__(self, pause_ns: int) -> None:
        """``pause_ns``: between two records while callers read."""
        self.verification: Verification | None = None
        """None: nothing is left."""
        self.job: int | None = None
        self.after_ns = 0
        self._pause_ns = pause_ns
        self._keys = b""
        self._offset = 0

    def start_check(self, verification: Verification, log: SegmentLog, now_ns: int) -> None:
        """All records that are here now are to be checked."""
        self.verification, self._keys, self._offset, self.after_ns = verification, log.keys(), 0, now_ns

    def stop_check(self) -> None:
        """The disk is lost, or all is done."""
        self.verification, self.job, self._keys = None, None, b""

    def is_due(self, now_ns: int, *, callers_read: bool) -> bool:
        """The next record may be read."""
        return self.verification is not None and self.job is None and (not callers_read or now_ns >= self.after_ns)

    def hold_next(self, log: SegmentLog) -> tuple[bytes, Found] | None:
        """The next record that is here still, held. None: that was all."""
        while self._offset < len(self._keys):
            key = self._keys[self._offset : self._offset + KEY_BYTES]
            self._offset += KEY_BYTES
            record = log.hold(key, False)
            if record is not None:
                return key, record
        self.stop_check()
        return None

    def finish_record(self, now_ns: int) -> Verification:
        """The record under way has been read; returns where to note it."""
        assert self.verification is not None
        self.job, self.after_ns = None, now_ns + self._pause_ns
        return self.verification


DAY_NS = 86_400 * NS_PER_S


class WriteBudget:
    """A bucket that is full at first, holds ``burst_bytes``, and fills at such a rate that no 24 hours see more than
    ``bytes_per_day``: a full bucket and a day's filling are the day's budget."""

    def __init__(self, bytes_per_day: int) -> None:
        """0: no limit."""
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = max(bytes_per_day // 8, min(bytes_per_day // 2, 16 * MIB))
        self._level = self.burst_bytes * DAY_NS  # in bytes times DAY_NS: nothing is lost to rounding
        self._at_ns: int | None = None

    def allows_bytes(self, nbytes: int, now_ns: int) -> bool:
        """Whether ``nbytes`` may be written now."""
        if self.bytes_per_day == 0:
            return True
        self._refill_bucket(now_ns)
        return self._level >= nbytes * DAY_NS

    def charge_bytes(self, nbytes: int, now_ns: int) -> None:
        """``nbytes`` are written, allowed or not: heads and footers can't be refused, and are owed."""
        if self.bytes_per_day == 0:
            return
        self._refill_bucket(now_ns)
        self._level -= nbytes * DAY_NS

    def _refill_bucket(self, now_ns: int) -> None:
        if self._at_ns is not None and now_ns > self._at_ns:
            gained = (now_ns - self._at_ns) * (self.bytes_per_day - self.burst_bytes)
            self._level = min(self.burst_bytes * DAY_NS, self._level + gained)
        self._at_ns = now_ns if self._at_ns is None else max(now_ns, self._at_ns)


@dataclass(slots=True)
class DiskContext:
    """What all disks of a store have in common."""

    config: DisksConfig
    budget: WriteBudget
    disks: int
    counters: DiskCounters = field(default_factory=DiskCounters)
    actions: list[DiskAction] = field(default_factory=list)
    outcomes: list[DiskOutcome] = field(default_factory=list)
    jobs: int = 0

    def next_job(self, disk: int) -> int:
        """A number from which :meth:`disk_of` tells the disk."""
        self.jobs += 1
        return self.jobs * self.disks + disk

    def disk_of(self, job: int) -> int:
        """The disk of a job."""
        return job % self.disks

    def charge_bytes(self, nbytes: int, now_ns: int) -> None:
        """Bytes that a disk is told to write."""
        self.counters.disk_bytes_written += nbytes
        self.budget.charge_bytes(nbytes, now_ns)


@dataclass(slots=True)
class CommandStep:
    """Of the log itself: pages of its own, or a sync."""

    command: int
    offset: int = 0
    data: bytes | None = None
    """None: a sync."""

    def disk_action(self, job: int, disk: int) -> DiskAction:
        """What the host has to do for it."""
        return SyncDisk(job, disk) if self.data is None else WritePages(job, disk, self.offset, self.data)


@dataclass(slots=True)
class WriteStep:
    """A caller's write."""

    ticket: int
    key: bytes


@dataclass(slots=True)
class ReadStep:
    """A caller's read. ``ended``: the caller was told, the device is not done with the extent."""

    id: int
    key: bytes
    record: Found
    has_ended: bool = False


@dataclass(slots=True)
class MoveRead:
    """The first half of a move, which is a command of the log."""

    command: int
    key: bytes
    record: Found


@dataclass(slots=True)
class MoveWrite:
    """The second half of a move."""

    ticket: int
    command: int


@dataclass(slots=True)
class CheckStep:
    """A verification's read."""

    key: bytes
    record: Found


Step = CommandStep | WriteStep | EncodeStep | ReadStep | MoveRead | MoveWrite | CheckStep


def place_of(record: Found) -> tuple[int, int]:
    """Where a record's head lies on the disk, and where in the head's page its payload begins; 0: behind that page."""
    inside = record.offset - record.head_offset
    return record.head_offset, inside if inside < PAGE_BYTES else 0


def actions_of_move(
    log: SegmentLog, disk: int, job: int, ticket: Ticket, name: bytes, result: DiskDone, record: Found
) -> list[DiskAction]:
    """What writes the record that ``result`` has read to where it moves."""
    length = record.encoded_bytes or record.length
    if ticket.pages > 1:
        return [WriteRecord(job, disk, ticket.offset, log.head(ticket.id, name), result.job, length)]
    payload_start = SegmentLog.HEAD_BYTES + len(name)
    page = log.head(ticket.id, name, result.head[payload_start : payload_start + length])
    return [DropRecord(disk, result.job), WritePages(job, disk, ticket.offset, page)]


def record_bytes(length: int, name_bytes: int = 0) -> int:
    """What a record takes on a disk."""
    in_head = length + name_bytes <= PAGE_BYTES - SegmentLog.HEAD_BYTES
    return PAGE_BYTES * (1 + (0 if in_head else ceil_div(length, PAGE_BYTES)))


def bytes_on_disk(record: Found) -> int:
    """What a record takes on its disk, its head included."""
    if record.encoded_bytes:
        return PAGE_BYTES + record.encoded_bytes
    return record_bytes(record.length, record.name_bytes)


def name_if_same(log: SegmentLog, key: bytes, record: Found, result: DiskDone) -> bytes | None:
    """The name of the record that was read. None: it is not the one that was written, or could not be read."""
    head = log.read_head(result.head) if result.ok and len(result.head) == PAGE_BYTES else None
    if head is None:
        return None
    head_key, length, scope, name, seal = head
    same = (head_key, length, scope, seal) == (key, record.length, record.scope, record.seal)
    return name if same and result.seal == seal else None
