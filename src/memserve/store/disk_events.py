"""What the disks ask their host for, what it answers, and what they tell their owner.

A *job* is one action with an answer: its number comes back in :class:`DiskDone`. Offsets on a disk are whole pages of
4 KiB. An *extent* is an offset in the store's arena.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class ReadExtent:
    """Read a record: its first page is answered in :attr:`DiskDone.head`, its payload goes to ``extent``, and the
    payload's checksum (:func:`memserve._core.seal_ranges`; 0 for an empty one) is answered as well.

    ``inside`` above 0: the payload stands in the first page, at that byte. Else it follows on the next page.
    """

    job: int
    disk: int
    offset: int
    extent: int
    length: int
    inside: int


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """As :class:`ReadExtent`, into memory of the host's. ``keep``: until :class:`WriteRecord` or
    :class:`DropRecord`."""

    job: int
    disk: int
    offset: int
    length: int
    inside: int
    keep: bool


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write the page ``head`` and behind it the payload that the job ``source`` has read, and forget that one."""

    job: int
    disk: int
    offset: int
    head: bytes
    source: int
    length: int


@dataclass(frozen=True, slots=True)
class DropRecord:
    """What the job ``source`` has read is not needed. No answer."""

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


DiskAction = WritePages | WriteExtent | ReadExtent | ReadRecord | WriteRecord | DropRecord | SyncDisk | ForgetDisk


@dataclass(frozen=True, slots=True)
class DiskDone:
    """The end of a job. Not ``ok``: the device failed, for the reason ``why``; the memory is used no more."""

    job: int
    ok: bool
    seal: int = 0
    head: bytes = b""
    why: str = ""


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
