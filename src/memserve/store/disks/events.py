"""What the disks ask their host for, what it answers, and what they tell their owner.

A *job* is one action with an answer: its number comes back in :class:`DiskDone`. Offsets on a disk are whole pages of
4 KiB. An *extent* is an offset in the store's arena.

What the disks of a store are set to, and what they count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memserve.base.metrics import counter
from memserve.base.types import KvCodecMode
from memserve.base.units import GIB, MIB, NS_PER_MS, NS_PER_S

PAGE_BYTES = 4096


# -- actions


@dataclass(frozen=True, slots=True)
class WritePages:
    """Write ``data``, whole pages, at ``offset``."""

    job: int
    disk: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class WriteExtent:
    """Write a record: the page ``head`` at ``offset``, and the extent's ``length`` bytes behind it, padded to pages.

    ``inside`` above 0: the payload is short; it goes into the head's page, at that byte, and nothing follows.
    """

    job: int
    disk: int
    offset: int
    head: bytes
    extent: int
    length: int
    inside: int


@dataclass(frozen=True, slots=True)
class EncodeExtent:
    """Encode the extent's ``length`` bytes into memory of the host's, and keep that until :class:`WriteRecord` or
    :class:`DropRecord`. Answered with its bytes; 0: no page is saved, and nothing kept."""

    job: int
    disk: int
    extent: int
    length: int


@dataclass(frozen=True, slots=True)
class ReadExtent:
    """Read a record: its first page is answered in :attr:`DiskDone.head`, its payload goes to ``extent``, and the
    payload's checksum (:func:`memserve._core.seal_ranges`; 0 for an empty one) is answered as well.

    ``inside`` above 0: the payload stands in the first page, at that byte. Else it follows on the next page;
    ``encoded_bytes`` above 0: encoded, in whole pages. What is no encoding is answered with the checksum 0.
    """

    job: int
    disk: int
    offset: int
    extent: int
    length: int
    inside: int
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """As :class:`ReadExtent`, into memory of the host's. ``keep``, as it lies on the disk: until :class:`WriteRecord`
    or :class:`DropRecord`."""

    job: int
    disk: int
    offset: int
    length: int
    inside: int
    keep: bool
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write the page ``head`` and behind it the ``length`` bytes that the job ``source`` has read or encoded, and
    forget that one."""

    job: int
    disk: int
    offset: int
    head: bytes
    source: int
    length: int


@dataclass(frozen=True, slots=True)
class DropRecord:
    """What the job ``source`` has read or encoded is not needed. No answer."""

    disk: int
    source: int


@dataclass(frozen=True, slots=True)
class SyncDisk:
    """What was answered before is on the disk when this is answered."""

    job: int
    disk: int


@dataclass(frozen=True, slots=True)
class ForgetDisk:
    """The disk is lost, last for the reason ``why``. Make sure, as far as it lets itself be written, that a restart
    finds nothing on it: what was removed since would come back. No answer."""

    disk: int
    why: str


DiskAction = (
    WritePages | WriteExtent | EncodeExtent | ReadExtent | ReadRecord | WriteRecord | DropRecord | SyncDisk | ForgetDisk
)


@dataclass(frozen=True, slots=True)
class DiskDone:
    """The end of a job. Not ``ok``: the device failed, for the reason ``why``; the memory is used no more."""

    job: int
    ok: bool
    seal: int = 0
    head: bytes = b""
    why: str = ""
    encoded_bytes: int = 0
    """Of :class:`EncodeExtent`."""
    codec_ns: int = 0
    """What encoding or decoding took."""
    encodes: bool = False
    """Whether the host would encode a value now: where it says so, writes come as :class:`EncodeExtent` first."""


# -- outcomes


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a write that was taken: its extent is read no more. ``ok``: the record is found from now on."""

    key: bytes
    ok: bool


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The end of a read. ``ok``: the extent holds the payload, and head, key, length and checksum agree.

    ``why`` otherwise: ``late``, ``damaged`` (forgotten, see :class:`Dropped`), ``lost`` (the disk is), or the
    device's error. ``extent_free`` False: the device may still write into the extent; :class:`ExtentFree` follows.
    """

    id: int
    ok: bool
    why: str = ""
    name: bytes = b""
    extent_free: bool = True


@dataclass(frozen=True, slots=True)
class ExtentFree:
    """The extent of the read ``id``, which ended before, is written no more."""

    id: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Keys, 16 bytes each, that are found no longer though their owner did not remove them."""

    keys: bytes


@dataclass(frozen=True, slots=True)
class DiskLost:
    """The disk has failed again and again, last for the reason ``why``: nothing is read from it or written to it."""

    disk: int
    why: str


@dataclass(frozen=True, slots=True)
class DiskFull:
    """There was no room for what was written, again and again, last for the reason ``why``: the disk is read, and not
    written but for a try at intervals."""

    disk: int
    why: str


@dataclass(frozen=True, slots=True)
class DiskHasRoom:
    """A full disk is written again."""

    disk: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The end of a verification: ``records`` were read and compared, ``payload_bytes`` long in all.

    ``damaged`` did not match and are forgotten; ``unread`` could not be read. ``keys`` of both, at most 1,000.
    """

    id: int
    records: int
    payload_bytes: int
    damaged: int
    unread: int
    keys: bytes


DiskOutcome = Written | ReadEnded | ExtentFree | Dropped | DiskLost | DiskFull | DiskHasRoom | Verified


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
    kv_codec: KvCodecMode = "none"
    """Whether values are written in fewer bytes: where that pays, nowhere, everywhere."""
    check_pause_ns: int = 10 * NS_PER_MS
    """How long a verification waits before its next record while callers read."""


@dataclass(slots=True)
class DiskCounters:
    """Counts of all disks since the start."""

    reads: int = 0
    """Reads that were begun; each has one of the next four ends."""
    reads_ok: int = 0
    reads_late: int = counter("store_disk_reads_late", "Reads from a disk of the store that missed their deadline")
    reads_failed: int = 0
    """The device failed, or the disk was lost."""
    reads_damaged: int = counter("store_disk_reads_damaged", "Values on a disk of the store with a wrong checksum")
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
    refused_budget: int = counter(
        "store_disk_refused_budget", "Values not written to a disk of the store since the budget of the day was used up"
    )
    refused_busy: int = 0
    """Not written: too many writes under way."""
    refused_room: int = 0
    """Not written: no segment was ready, or the value is longer than a segment takes."""
    payload_bytes_written: int = counter(
        "store_disk_payload_bytes", "Bytes of values written to the disks of the store"
    )
    """Of writes that were begun."""
    values_encoded: int = counter("store_disk_encoded", "Values written to the disks of the store in fewer bytes")
    encoded_from_bytes: int = counter(
        "store_disk_encoded_value_bytes", "Bytes of the values that were written to the disks of the store in fewer"
    )
    encoded_to_bytes: int = counter(
        "store_disk_encoded_bytes", "Bytes in which these values were written to the disks of the store"
    )
    """Whole pages."""
    encode_ns: int = counter(
        "store_disk_encode_seconds", "Seconds in which values for the disks of the store were encoded"
    )
    """By the disks' threads, also what did not become shorter."""
    values_decoded: int = 0
    """Reads of encoded values."""
    decode_ns: int = counter(
        "store_disk_decode_seconds", "Seconds in which values from the disks of the store were decoded"
    )
    disk_bytes_written: int = counter(
        "store_disk_written_bytes", "Bytes written to the disks of the store, all overhead included"
    )
    """Payload, padding, heads, footers, moves."""
    moves: int = 0
    """Records that were written again elsewhere."""
    moves_refused: int = 0
    """Records that were hit and went nevertheless: no budget, no room, or not readable."""
    device_errors: int = counter("store_disk_errors", "Reads and writes that a disk of the store failed")
    disks_lost: int = 0
    disks_filled: int = 0
    """How often a disk stopped being written because there was no room."""
    checked: int = 0
    """Records that verifications read."""
