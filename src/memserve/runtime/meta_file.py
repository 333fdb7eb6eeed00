"""A journal in a file (level 3): the embedded default of ``memserve serve --metadata``.

``FOLDER/journal`` is the journal; ``FOLDER/journal.new`` is one that is being written to take its place, and is of no
use after a crash. Both are readable by their owner alone: documents of tenants are in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from memserve.meta.medium import MediumFailed

JOURNAL = "journal"
Result = TypeVar("Result")


class FileMedium:
    """A :class:`memserve.meta.medium.Medium` in a folder of the local file system, used by this process alone."""

    def __init__(self, folder: Path, *, fsync: Callable[[int], None] = os.fdatasync) -> None:
        """``folder`` must exist. ``fsync``: how bytes get safe; a test may give one that does nothing."""
        self._fsync = fsync
        self._path, self._fresh = folder / JOURNAL, folder / f"{JOURNAL}.new"
        self._fd: int | None = None
        self._folder_fd = _guarded(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    @property
    def name(self) -> str:
        """As :class:`Medium`."""
        return str(self._path)

    def load(self) -> bytes | None:
        """As :class:`Medium`."""
        self._fresh.unlink(missing_ok=True)  # of a crash: documents that are deleted by now may be in it
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND)
            with open(self._fd, "rb", closefd=False) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MediumFailed(f"cannot read {self._path}: {error.strerror}") from None

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
        fresh = self._fresh
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
        """As :class:`Medium`."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        os.close(self._folder_fd)

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = _guarded(lambda: os.write(fd, rest))  # noqa: B023  # called at once
            rest = rest[written:]


def _guarded(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except OSError as error:
        raise MediumFailed(error.strerror or str(error)) from None
