"""A journal in a file (level 3): the embedded default of ``memserve serve --metadata``.

``FOLDER/journal`` is the journal; ``FOLDER/journal.new`` is one that is being written to take its place, and is of no
use after a crash; ``FOLDER/lock`` is locked as long as a router writes here, and its kernel-held lock ends with the
process, however that ends. Everything is readable by its owner alone: documents of tenants are in it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import TypeVar

from memserve.errors import UserError
from memserve.meta.medium import MediumFailed

JOURNAL, LOCK = "journal", "lock"
_FLOCK = Struct("hhqqi4x")
"""``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""
Result = TypeVar("Result")


class FileMedium:
    """A :class:`memserve.meta.medium.Medium` in a folder of the local file system."""

    def __init__(self, folder: Path, *, fsync: Callable[[int], None] = os.fdatasync) -> None:
        """Raises :class:`UserError` when the folder cannot be used, or another process uses it. ``fsync``: how bytes
        get safe; a test may give one that does nothing."""
        self._fsync = fsync
        self._path = folder / JOURNAL
        self._fd: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            self._lock_fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UserError(
                f"cannot keep metadata in {folder}: {error.strerror}", hint="--metadata PATH or none", param="metadata"
            ) from None
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._close_folder()
            hint = "another `memserve serve` runs with it: end that one, or give this one another --metadata"
            raise UserError(f"the metadata in {folder} is in use", hint=hint, param="metadata") from None

    def load(self) -> bytes:
        """As :class:`Medium`."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise MediumFailed(f"cannot read {self._path}: {error.strerror}") from None
        with open(self._fd, "rb", closefd=False) as file:
            return file.read()

    def append(self, data: bytes) -> None:
        """As :class:`Medium`."""
        if self._fd is None:
            raise MediumFailed("there is no journal yet")
        self._write(self._fd, data)

    def sync(self) -> None:
        """As :class:`Medium`."""
        if self._fd is not None:
            _guarded(lambda: self._fsync(self._fd or 0))

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`: written beside it, made safe, and renamed."""
        fresh = self._path.with_name(JOURNAL + ".new")
        fd = _guarded(lambda: os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600))
        try:
            self._write(fd, data)
            _guarded(lambda: self._fsync(fd))
            _guarded(lambda: os.rename(fresh, self._path))
            _guarded(lambda: self._fsync(self._folder_fd))
        except MediumFailed:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        old, self._fd = self._fd, fd
        if old is not None:
            os.close(old)

    def close(self) -> None:
        """As :class:`Medium`; another router may come."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._close_folder()

    def _close_folder(self) -> None:
        os.close(self._lock_fd)
        os.close(self._folder_fd)

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = _guarded(lambda: os.write(fd, rest))  # noqa: B023  # called at once
            rest = rest[written:]


def is_locked(folder: Path) -> bool:
    """Whether some router has its metadata in ``folder`` right now. Asks the kernel and takes nothing."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        asked = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def _guarded(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except OSError as error:
        raise MediumFailed(error.strerror or str(error)) from None
