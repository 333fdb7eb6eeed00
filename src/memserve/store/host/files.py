"""The file of each disk of a store: made, locked, and what an earlier store left in it.

``DIR/memserve-store.dat`` has exactly the size that was asked for, all of it taken at once, and is readable by its
owner alone.

The cluster's secret beside a store's disks.

What lies there is found by identities that are keyed with the secret: with another one nothing is found again. So the
first folder of ``--ssd`` has a copy, for its owner alone, from which a server goes on that has no other.

What reading a disk takes is found by a few reads of what lies on it when a store starts, and told to instances before
their first fetch. Records of an earlier life are read, as many at once as a fetch reads::

    when the n-th was there  =  start + byte * (bytes of the first n)

Only records are read, because space that was never written comes from no device: a file system answers it with zeros.
So of a disk without long records nothing is known, and nothing is told.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from memserve import _core
from memserve._core import SegmentLog
from memserve.base.deployment import OWN_BACKEND, StoreOptions, backend_of
from memserve.base.errors import UserError
from memserve.base.units import KIB, MIB, NS_PER_MS, NS_PER_S, ceil_div, human_bytes
from memserve.journal.folder import write_private
from memserve.kv.costs import CopyCurve, CostModel
from memserve.kv.identity import kv_secret
from memserve.store.disks.events import PAGE_BYTES, SYNC_CODES, DisksConfig, segments_of
from memserve.store.disks.jobs import bytes_on_disk
from memserve.store.host.backends import open_medium

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
    value_bytes: int
    """What they bring: of an encoded value its own bytes."""
    encoded_bytes: int = 0


def spans_to_read(log: SegmentLog) -> list[ReadSpan]:
    """Some records of the disk, far from each other. Empty: there are too few of them."""
    keys, bytes_left = log.keys(), MEASURE_BYTES_MAX
    spans: list[ReadSpan] = []
    count = len(keys) // 16
    for index in range(0, count, max(1, ceil_div(count, _LOOKS))):
        record = log.look(keys[16 * index : 16 * index + 16])
        if record is None or record.length < RECORD_BYTES_MIN:
            continue
        nbytes, value_bytes = bytes_on_disk(record), record.length
        if not record.encoded_bytes:
            nbytes = value_bytes = min(nbytes, PAGE_BYTES + RECORD_BYTES_MAX)
        if nbytes <= bytes_left and len(spans) < RECORDS_MAX:
            spans.append(ReadSpan(record.head_offset, nbytes, value_bytes, record.encoded_bytes))
            bytes_left -= nbytes
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
    mean_bytes, mean_ns = sum(point.nbytes for point in points) / count, sum(point.ns for point in points) / count
    spread = sum((point.nbytes - mean_bytes) ** 2 for point in points)
    byte_ns = sum((point.nbytes - mean_bytes) * point.ns for point in points) / spread if spread else 0.0
    start_ns = mean_ns - byte_ns * mean_bytes
    if byte_ns <= 0 or start_ns < 0:
        byte_ns = sum(point.nbytes * point.ns for point in points) / sum(point.nbytes**2 for point in points)
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


log = logging.getLogger(__name__)

BYTES_MIN = 16 * MIB


class DiskFile:
    """One disk as long as it is open, and its log."""

    def __init__(self, folder: Path | str, nbytes: int, config: DisksConfig) -> None:
        """``folder``: as ``--ssd`` names it. Open or make it, and recover what is in it: of a file about a second for
        each ten million values. Raises :class:`UserError`."""
        if nbytes < BYTES_MIN:
            message = f"a store's disk has at least {human_bytes(BYTES_MIN)}, not {human_bytes(nbytes)}"
            raise UserError(message, hint=f"--ssd {folder}=20GiB", param="ssd")
        self.medium, self.nbytes = open_medium(str(folder), nbytes), nbytes
        self.path = self.medium.name
        try:
            self.log = self._recover_log(config)
        except BaseException:
            self.medium.close()
            raise

    def _recover_log(self, config: DisksConfig) -> SegmentLog:
        sync, source = SYNC_CODES[config.sync], self.medium.source()
        if (version := SegmentLog.superblock_version(source)) > SegmentLog.FORMAT_VERSION:
            hint = "start that one, or remove the file, and what it holds is forgotten"
            message = (
                f"{self.path} was written by a later memserve (format {version}, here {SegmentLog.FORMAT_VERSION})"
            )
            raise UserError(message, hint=hint, param="ssd")
        superblock = SegmentLog.read_superblock(source)
        if superblock is None:
            segments, segment_bytes = segments_of(self.nbytes)
            fresh = SegmentLog(segments, segment_bytes, secrets.token_bytes(16), config.move_share, sync)
            fresh.format()
            return fresh
        segments, segment_bytes, secret = superblock
        recovered = SegmentLog(segments, segment_bytes, secret, config.move_share, sync)
        if recovered.disk_bytes > self.nbytes:
            hint = "remove it, and what it holds is forgotten"
            raise UserError(f"{self.path} is a part of a larger file", hint=hint, param="ssd")
        recovered.recover(source)
        return recovered


def open_files(disks: Sequence[tuple[Path | str, int]], config: DisksConfig) -> list[DiskFile]:
    """All files, recovered side by side. Raises the first :class:`UserError`, and none is open then."""
    if len({_absolute(str(folder)) for folder, _ in disks}) < len(disks):
        raise UserError("two disks have one folder", hint="give each --ssd a folder of its own", param="ssd")
    if not disks:
        return []
    with ThreadPoolExecutor(len(disks), thread_name_prefix="memserve-recover") as pool:
        opening = [pool.submit(DiskFile, folder, nbytes, config) for folder, nbytes in disks]
    failed = next((error for future in opening if (error := future.exception()) is not None), None)
    if failed is None:
        return [future.result() for future in opening]
    for future in opening:
        if future.exception() is None:
            future.result().medium.close()
    raise failed


_NO_OFFSET = np.zeros(1, np.int64)


class ReadQueue(Protocol):
    """What is needed of :class:`memserve._core.DiskQueue`."""

    def read(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def take(self) -> list[tuple[int, int]]: ...
    def fileno(self) -> int: ...


class _Reading:
    """The reads of one disk, in a thread of their own: a disk that stands still holds up no start. The thread ends when
    the disk has answered, however late."""

    def __init__(self, path: str, spans: list[ReadSpan], make_queue: Callable[[str], ReadQueue]) -> None:
        self._path, self._spans, self._make_queue = path, spans, make_queue
        self._arrived: list[ReadArrived] = []
        self._failed = False
        self._requested_ns = self._began_ns = time.monotonic_ns()
        self.reads_ended = threading.Event()
        threading.Thread(target=self._run_reads, name="memserve-disk-speed", daemon=True).start()

    def curve_so_far(self) -> CopyCurve | None:
        """By what has come until now. None: the disk fails."""
        arrived = list(self._arrived)
        if self._failed:
            return None
        next_bytes = self._spans[len(arrived)].value_bytes if len(arrived) < len(self._spans) else 0
        since_ns = self._began_ns if arrived else self._requested_ns  # the thread may have begun late, or not yet
        return curve_of_reads(arrived, next_bytes, time.monotonic_ns() - since_ns)

    def _run_reads(self) -> None:
        try:
            self._read_spans()
        except OSError as error:
            log.warning("what %s takes to be read is not known: %s", self._path, error)
            self._failed = True
        finally:
            self.reads_ended.set()

    def _read_spans(self) -> None:
        arena = _core.Arena(sum(span.nbytes for span in self._spans))
        values = _core.Arena(max(span.value_bytes for span in self._spans))
        for memory in (arena, values):
            np.frombuffer(memoryview(memory), np.uint8)[::PAGE_BYTES] = 0  # a store's is there when it is read into
        queue, address, addresses = self._make_queue(self._path), arena.address, []
        poll, total = select.poll(), 0
        poll.register(queue.fileno(), select.POLLIN)
        self._began_ns = time.monotonic_ns()
        for tag, span in enumerate(self._spans):
            addresses.append(address)
            queue.read(tag, span.offset, address, span.nbytes)
            address += span.nbytes
        reads_left = len(self._spans)
        while reads_left:
            poll.poll()
            for tag, error in queue.take():
                reads_left -= 1
                if error:
                    self._failed = True
                    continue
                span = self._spans[tag]
                if span.encoded_bytes:
                    source, target = addresses[tag] + PAGE_BYTES, values.address
                    _core.kv_decode_ranges(source, span.encoded_bytes, target, _NO_OFFSET, span.value_bytes)
                else:
                    _core.seal_ranges(addresses[tag], _NO_OFFSET, span.nbytes)  # as every read is compared
                total += span.value_bytes
                self._arrived.append(ReadArrived(total, time.monotonic_ns() - self._began_ns))


def measured_curve(
    disks: list[tuple[str, SegmentLog]], make_queue: Callable[[str], ReadQueue], within_ns: int = MEASURE_NS
) -> CopyCurve | None:
    """What reading these disks takes, all of them together. None: one has too little to be read, or fails."""
    plans = [(path, segments, spans_to_read(segments)) for path, segments in disks]
    if not plans or not all(spans for _, _, spans in plans):
        return None
    readings = [(path, segments, _Reading(path, spans, make_queue)) for path, segments, spans in plans]
    end_ns = time.monotonic_ns() + within_ns
    curves = []
    for path, segments, reading in readings:
        reading.reads_ended.wait(max(0, end_ns - time.monotonic_ns()) / NS_PER_S)
        curve = reading.curve_so_far()
        if curve is None:
            return None
        rate = NS_PER_S / curve.byte_ns / 1e6
        log.info("%s: reads begin after %.2f ms and give %.0f MB/s", path, curve.start_ns / NS_PER_MS, rate)
        curves.append((segments.disk_bytes, curve))
    return curve_of_disks(curves)


SECRET = "memserve-store.secret"


def with_absolute_folders(store: StoreOptions) -> StoreOptions:
    """``store`` with paths that mean the same to every process. Raises :class:`UserError` for a folder named twice."""
    folders = {_absolute(folder): size for folder, size in store.folders}
    if len(folders) < len(store.folders):
        raise UserError("--ssd names one folder twice", hint="one folder a disk", param="ssd")
    return replace(store, folders=tuple(folders.items()))


def _absolute(folder: str) -> str:
    name, location = backend_of(folder)
    return str(Path(location).expanduser().resolve()) if name == OWN_BACKEND else folder


def first_folder(folders: Iterable[tuple[str, int]]) -> Path | None:
    """Of the folders that ``--ssd`` names, as :class:`StoreOptions` has them. None: there are other backends alone, or
    none."""
    places = [backend_of(folder) for folder, _ in folders]
    return next((Path(location) for name, location in places if name == OWN_BACKEND), None)


def stored_secret(store: StoreOptions) -> str | None:
    """The secret with which the disks were written. None: there is none. Raises :class:`UserError` when it cannot be
    read."""
    path = _path_of(store)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        hint = f"restore it, or remove it: what {path.parent} holds is then not found any more"
        raise UserError(f"cannot read the cluster secret in {path}: {reason}", hint=hint, param="ssd") from None


def store_secret(store: StoreOptions, secret: str, print_line: Callable[[str], None]) -> None:
    """Keep ``secret`` beside the disks, unless there is one. Raises :class:`UserError` when it cannot be written."""
    path, disk_secret = _path_of(store), stored_secret(store)
    if path is None or disk_secret == secret:
        return
    if disk_secret is not None and kv_secret(disk_secret) != kv_secret(secret):
        print_line(
            f"{path} is of another cluster: what was kept in {path.parent} under it is not found (is --metadata new?)"
        )
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, secret + "\n")
    except OSError as error:
        hint = "give a folder that this user may write to: --ssd DIR=20GiB"
        message = f"cannot keep a store in {path.parent}: {error.strerror}"
        raise UserError(message, hint=hint, param="ssd") from None


def _path_of(store: StoreOptions) -> Path | None:
    folder = first_folder(store.folders)
    return folder / SECRET if folder is not None else None
