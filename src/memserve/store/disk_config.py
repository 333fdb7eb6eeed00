"""What the disks of a store are set to, and what they count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memserve.units import GIB, MIB, NS_PER_MS, NS_PER_S

Sync = Literal["none", "segment", "always"]
Admission = Literal["second-hit", "all"]
SYNC_CODES: dict[Sync, int] = {"none": 0, "segment": 1, "always": 2}
"""As :class:`memserve._core.SegmentLog` numbers them."""
_HEAD_BYTES = 64 << 10  # in front of the first segment
_SEGMENTS_WANTED = 32
_SEGMENTS_MAX = 65_535


def segment_bytes_for(nbytes: int) -> int:
    """About a thirty-second of the disk, from 1 MiB to 256 MiB; more where a log would have too many segments."""
    size = MIB
    while size < 256 * MIB and 2 * size * _SEGMENTS_WANTED <= nbytes:
        size *= 2
    while nbytes // size > _SEGMENTS_MAX and size < 2 * GIB:
        size *= 2
    return size


def segments_of(nbytes: int) -> tuple[int, int]:
    """How many segments a disk of ``nbytes`` has, and the bytes of each."""
    segment_bytes = segment_bytes_for(nbytes)
    return (nbytes - _HEAD_BYTES) // segment_bytes, segment_bytes


@dataclass(frozen=True, slots=True)
class DisksConfig:
    """Settings of all disks of a store."""

    sync: Sync = "segment"
    """When written bytes are made safe against a loss of power: never, with each segment, with each record. What was
    written survives the end of the process with all of them."""
    writes_per_day_bytes: int = 0
    """N: at most N bytes are written in any 24 hours, to all disks together. 0: no limit."""
    move_share: float = 0.25
    """How much of a segment is written again when its space is needed, because it was hit."""
    reads_max: int = 256
    """Reads that may be under way on a disk; beyond them a read is refused."""
    writes_max: int = 32
    """Writes that may be under way on a disk; beyond them nothing is admitted."""
    moves_max: int = 4
    """Records that may be on their way from one segment to another, a disk."""
    read_deadline_ns: int = 2 * NS_PER_S
    """How long a read without a deadline of its own may take."""
    admission: Admission = "second-hit"
    """Write what was asked for before; or everything."""
    frequency_keys: int = 1 << 20
    """How many keys admission tells apart: three bytes of memory each."""
    failures_max: int = 8
    """A disk that fails so many jobs in a row is lost; one that has no room for so many writes in a row is full."""
    full_pause_ns: int = 60 * NS_PER_S
    """How long a full disk is not written before one more write is tried."""
    check_pause_ns: int = 10 * NS_PER_MS
    """How long a verification waits before its next record while callers read."""


@dataclass(slots=True)
class DiskCounters:
    """Counts of all disks since the start."""

    reads: int = 0
    """Reads that were begun; each has one of the next four ends."""
    reads_ok: int = 0
    reads_late: int = 0
    reads_failed: int = 0
    """The device failed, or the disk was lost."""
    reads_damaged: int = 0
    """Head, key, length or checksum did not agree: the record was forgotten."""
    reads_refused: int = 0
    """Reads that were not begun: too many were under way, or one of them was late."""
    read_bytes: int = 0
    """Payload of reads that were ``ok``."""
    writes: int = 0
    """Writes that were begun."""
    writes_ok: int = 0
    writes_failed: int = 0
    """Writes that were begun and are not found: the device failed, or the record was removed meanwhile."""
    refused_seldom: int = 0
    """Not admitted: not asked for before."""
    refused_budget: int = 0
    """Not written: the day's budget is used up."""
    refused_busy: int = 0
    """Not written: too many writes under way."""
    refused_room: int = 0
    """Not written: no segment was ready, or the value is longer than a segment takes."""
    payload_bytes_written: int = 0
    """Payload of writes that were begun."""
    disk_bytes_written: int = 0
    """All bytes that the disks were told to write: payload, padding, heads, footers, moves."""
    moves: int = 0
    """Records that were written again elsewhere."""
    moves_refused: int = 0
    """Records that were hit and went nevertheless: no budget, no room, or not readable."""
    device_errors: int = 0
    """Jobs of any kind that the device failed."""
    disks_lost: int = 0
    disks_filled: int = 0
    """How often a disk stopped being written because there was no room."""
    checked: int = 0
    """Records that verifications read."""
