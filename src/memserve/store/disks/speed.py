"""What reading a disk takes, from a few reads of what lies on it: told to instances before their first fetch.

Records of an earlier life are read, as many at once as a fetch reads::

    when the n-th was there  =  start + byte * (bytes of the first n)

Only records are read, because space that was never written comes from no device: a file system answers it with zeros.
So of a disk without long records nothing is known, and nothing is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memserve._core import SegmentLog
from memserve.base.units import KIB, MIB, NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve, CostModel
from memserve.store.disks.events import PAGE_BYTES
from memserve.store.disks.jobs import record_bytes

MEASURE_NS = 150 * NS_PER_MS
"""How long reads may take at a start, all disks side by side."""
MEASURE_BYTES_MAX = 32 * MIB
"""Read of each disk at most."""
RECORDS_MIN, RECORDS_MAX = 4, 16
RECORD_BYTES_MIN, RECORD_BYTES_MAX = 16 * KIB, 4 * MIB
"""Shorter records tell nothing of blocks of KV; of longer ones so much is read."""
_LOOKS = 256
_PIECE_NS = CostModel().disk.piece_ns  # the store's own work for each block, which no read shows


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """Whole pages of a disk that begin with a record."""

    offset: int
    nbytes: int


def spans_to_read(log: SegmentLog) -> list[ReadSpan]:
    """Some records of the disk, far from each other. Empty: there are too few of them."""
    keys, left = log.keys(), MEASURE_BYTES_MAX
    spans: list[ReadSpan] = []
    count = len(keys) // 16
    for at in range(0, count, max(1, ceil_div(count, _LOOKS))):
        found = log.look(keys[16 * at : 16 * at + 16])
        if found is None or found.length < RECORD_BYTES_MIN:
            continue
        nbytes = min(record_bytes(found.length, found.name_bytes), PAGE_BYTES + RECORD_BYTES_MAX)
        if nbytes <= left and len(spans) < RECORDS_MAX:
            spans.append(ReadSpan(found.head_offset, nbytes))
            left -= nbytes
    return spans if len(spans) >= RECORDS_MIN else []


@dataclass(frozen=True, slots=True)
class ReadArrived:
    """So many bytes were there after ``ns``."""

    nbytes: int
    ns: int


def curve_of_reads(arrived: Sequence[ReadArrived], next_bytes: int, waited_ns: int) -> CopyCurve:
    """The curve through what has come. ``next_bytes``: of the next record, which had not come after ``waited_ns``; 0:
    all have come."""
    points = list(arrived)
    if next_bytes:
        late = ReadArrived((points[-1].nbytes if points else 0) + next_bytes, waited_ns)
        if not points or _line(points).ns(late.nbytes) < waited_ns:
            points.append(late)
    line = _line(points)
    return CopyCurve(line.start_ns, _PIECE_NS, line.byte_ns)


def _line(points: Sequence[ReadArrived]) -> CopyCurve:
    """Least squares; neither coefficient is negative."""
    count = len(points)
    mean_bytes, mean_ns = sum(one.nbytes for one in points) / count, sum(one.ns for one in points) / count
    spread = sum((one.nbytes - mean_bytes) ** 2 for one in points)
    byte_ns = sum((one.nbytes - mean_bytes) * one.ns for one in points) / spread if spread else 0.0
    start_ns = mean_ns - byte_ns * mean_bytes
    if byte_ns <= 0 or start_ns < 0:
        byte_ns = sum(one.nbytes * one.ns for one in points) / sum(one.nbytes**2 for one in points)
        start_ns = 0.0
    return CopyCurve(start_ns, 0.0, byte_ns)


def curve_of_disks(disks: Sequence[tuple[int, CopyCurve]]) -> CopyCurve:
    """Sizes and curves of all disks of a store: a fetch reads each of them for a share of its blocks as large as the
    disk's share of the space, side by side, and waits for the last."""
    total = sum(nbytes for nbytes, _ in disks)
    return CopyCurve(
        max(curve.start_ns for _, curve in disks),
        max(curve.piece_ns for _, curve in disks),  # work of the store's one thread
        max(curve.byte_ns * nbytes / total for nbytes, curve in disks),
    )
