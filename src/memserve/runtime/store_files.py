"""The file of each disk of a store: made, locked, and what an earlier store left in it.

``DIR/memserve-store.dat`` has exactly the size that was asked for, all of it taken at once, and is readable by its
owner alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memserve._core import SegmentLog
from memserve.errors import UserError
from memserve.store.disk_config import SYNC_CODES, DisksConfig, segments_of
from memserve.units import MIB, flag_bytes, human_bytes

log = logging.getLogger(__name__)

FILE = "memserve-store.dat"
BYTES_MIN = 16 * MIB


class DiskFile:
    """A disk's file, locked for this process as long as it is open, and its log."""

    def __init__(self, folder: Path, nbytes: int, config: DisksConfig) -> None:
        """Open or make the file, and recover what is in it: about a second for each ten million values. Raises
        :class:`UserError`."""
        self.folder, self.path, self.nbytes = folder, folder / FILE, nbytes
        if nbytes < BYTES_MIN:
            message = f"a store's disk has at least {human_bytes(BYTES_MIN)}, not {human_bytes(nbytes)}"
            raise UserError(message, hint=f"--ssd {folder}=20GiB", param="ssd")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path, error) from None
        try:
            self._lock()
            self._take_room()
            self.log = self._recover(config)
        except BaseException:
            os.close(self.fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            hint = "another `memserve store` runs with it: end that one, or give this one another folder"
            raise UserError(f"{self.path} is in use", hint=hint, param="ssd") from None

    def _take_room(self) -> None:
        there = os.fstat(self.fd).st_size
        if there not in (0, self.nbytes):
            hint = f"give --ssd {self.folder}={flag_bytes(there)}, or remove the file, and what it holds is forgotten"
            message = f"{self.path} has {there:,} bytes, not {self.nbytes:,}"
            raise UserError(message, hint=hint, param="ssd")
        try:
            os.posix_fallocate(self.fd, 0, self.nbytes)
        except OSError as error:
            if there == 0:
                os.unlink(self.path)
            raise _unusable(self.path, error) from None

    def _recover(self, config: DisksConfig) -> SegmentLog:
        sync = SYNC_CODES[config.sync]
        known = SegmentLog.read_superblock(self.fd)
        if known is None:
            segments, segment_bytes = segments_of(self.nbytes)
            fresh = SegmentLog(segments, segment_bytes, secrets.token_bytes(16), config.move_share, sync)
            fresh.format()
            return fresh
        segments, segment_bytes, secret = known
        recovered = SegmentLog(segments, segment_bytes, secret, config.move_share, sync)
        if recovered.disk_bytes > self.nbytes:
            hint = "remove it, and what it holds is forgotten"
            raise UserError(f"{self.path} is a part of a larger file", hint=hint, param="ssd")
        recovered.recover(self.fd)
        # From now on everything passes the page cache.
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return recovered

    def forget(self) -> None:
        """Let a restart find nothing here, as far as the device allows."""
        try:
            os.pwrite(self.fd, bytes(8192), 0)
            os.fdatasync(self.fd)
        except OSError as error:
            log.warning("%s cannot be marked as lost: %s", self.path, error.strerror)
        try:
            os.unlink(self.path)
        except OSError as error:
            log.warning("%s cannot be removed: %s; do so before the next start", self.path, error.strerror)

    def close(self) -> None:
        """Unlock the file."""
        os.close(self.fd)


def open_files(disks: list[tuple[Path, int]], config: DisksConfig) -> list[DiskFile]:
    """All files, recovered side by side. Raises the first :class:`UserError`, and none is open then."""
    if len({folder.resolve() for folder, _ in disks}) < len(disks):
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
            future.result().close()
    raise failed


def _unusable(path: Path, error: OSError) -> UserError:
    hint = "give a folder on a disk, --ssd DIR=SIZE, that this user may write"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "give a smaller --ssd DIR=SIZE, or make room"
    return UserError(f"cannot keep values in {path}: {error.strerror}", hint=hint, param="ssd")
