"""What the jobs of a disk are for, and what a record that was read must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve._core import Found, SegmentLog, Ticket
from memserve.store.disk_config import DiskCounters, DisksConfig
from memserve.store.disk_events import (
    PAGE_BYTES,
    DiskAction,
    DiskDone,
    DiskOutcome,
    DropRecord,
    SyncDisk,
    WritePages,
    WriteRecord,
)
from memserve.store.write_budget import WriteBudget
from memserve.units import ceil_div


@dataclass(slots=True)
class Shared:
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

    def charge(self, nbytes: int, now: int) -> None:
        """Bytes that a disk is told to write."""
        self.counters.disk_bytes_written += nbytes
        self.budget.charge(nbytes, now)


@dataclass(slots=True)
class CommandStep:
    """Of the log itself: pages of its own, or a sync."""

    command: int
    offset: int = 0
    data: bytes | None = None
    """None: a sync."""

    def action(self, job: int, disk: int) -> DiskAction:
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
    found: Found
    ended: bool = False


@dataclass(slots=True)
class MoveRead:
    """The first half of a move, which is a command of the log."""

    command: int
    key: bytes
    found: Found


@dataclass(slots=True)
class MoveWrite:
    """The second half of a move."""

    ticket: int
    command: int


@dataclass(slots=True)
class CheckStep:
    """A verification's read."""

    key: bytes
    found: Found


Step = CommandStep | WriteStep | ReadStep | MoveRead | MoveWrite | CheckStep


def place_of(found: Found) -> tuple[int, int]:
    """Where a record's head lies on the disk, and where in the head's page its payload begins; 0: behind that page."""
    inside = found.offset - found.head_offset
    return found.head_offset, inside if inside < PAGE_BYTES else 0


def actions_of_move(
    log: SegmentLog, disk: int, job: int, ticket: Ticket, name: bytes, done: DiskDone, length: int
) -> list[DiskAction]:
    """What writes the record that ``done`` has read to where it moves."""
    if ticket.pages > 1:
        return [WriteRecord(job, disk, ticket.offset, log.head(ticket.id, name), done.job, length)]
    at = SegmentLog.HEAD_BYTES + len(name)
    page = log.head(ticket.id, name, done.head[at : at + length])
    return [DropRecord(disk, done.job), WritePages(job, disk, ticket.offset, page)]


def record_bytes(length: int, name_bytes: int = 0) -> int:
    """What a record takes on a disk."""
    in_head = length + name_bytes <= PAGE_BYTES - SegmentLog.HEAD_BYTES
    return PAGE_BYTES * (1 + (0 if in_head else ceil_div(length, PAGE_BYTES)))


def name_if_same(log: SegmentLog, key: bytes, found: Found, done: DiskDone) -> bytes | None:
    """The name of the record that was read. None: it is not the one that was written, or could not be read."""
    head = log.read_head(done.head) if done.ok and len(done.head) == PAGE_BYTES else None
    if head is None:
        return None
    head_key, length, scope, name, seal = head
    same = (head_key, length, scope, seal) == (key, found.length, found.scope, found.seal)
    return name if same and done.seal == seal else None
