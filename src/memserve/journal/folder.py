"""The folder in which one ``memserve serve`` keeps what outlives it, and the journal in it.

::

    lock             locked by the router's process; the kernel unlocks it when that process ends, however it ends
    secret           the cluster's, unless it was given one: instances that outlive the router know it
    journal          what the router remembers, the embedded default of ``memserve serve --metadata``
    journal.new      a journal that is being written to take the place of ``journal``; of no use after a crash
    children.json    the instances that the router has started (journal/survivors.py)
    batches/         files and batches of clients (api/batches/)

All of them are readable by their owner alone: documents of tenants are in the journal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import TypeVar

from memserve.base.errors import UserError
from memserve.journal.store import MediumFailed

log = logging.getLogger(__name__)

LOCK, SECRET, BATCHES, MODELS = "lock", "secret", "batches", "models"
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing about the thing that was asked for, only that this process may not ask now."""
_FILES = {LOCK, SECRET, "secret.new", "journal", "journal.new", "children.json", "children.new"}
_SECRET_HINT = "restore it, or remove it: instances that still run do not know the new one, and end by themselves"
_FLOCK = Struct("hhqqi4x")
"""``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""


class StateFolder:
    """The folder, locked for this process as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when the folder cannot be used, or another process uses it."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.was_used = (path / SECRET).exists()
            """A router has kept its state here before."""
            _restrict_to_owner(path)
            self._lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"cannot keep metadata in {path}: {error.strerror}"
            raise UserError(message, hint="give a folder, --metadata PATH, or none", param="metadata") from None
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            hint = "another `memserve serve` runs with it: end that one, or give this one another --metadata"
            raise UserError(f"the metadata in {path} is in use", hint=hint, param="metadata") from None

    def read_or_create_secret(self, fresh: str | None = None) -> str:
        """The cluster's secret. None yet: ``fresh``, or one that is made. Raises :class:`UserError` for a file that
        holds none."""
        path = self.path / SECRET
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            secret = fresh or secrets.token_urlsafe(32)
            write_private(path, secret + "\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"cannot read the cluster secret in {path}: {reason}", hint=_SECRET_HINT) from None
        if not secret:
            raise UserError(f"the cluster secret in {path} is empty", hint=_SECRET_HINT)
        return secret

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock_fd)


def write_private(path: Path, text: str) -> None:
    """Put ``text`` in the place of the file, as a whole, for its owner alone. Raises :class:`OSError`."""
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # of a file that an older memserve has left
        file.write(text)
    fresh.rename(path)


def _chmod(path: Path, mode: int) -> None:
    """Only where it has another mode: processes that follow a file see each change of it."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def _restrict_to_owner(folder: Path) -> None:
    """Make the folder and memserve's files in it readable by their owner alone, whatever modes a copy has left.

    A folder in which others keep files as well (``/tmp``, a home) is left as it is; the files are closed one by one.
    """
    file_names = set(os.listdir(folder))
    for name in file_names & _FILES:
        _chmod(folder / name, 0o600)
    if file_names <= {*_FILES, BATCHES, MODELS}:
        _chmod(folder, 0o700)
    elif stat.S_IMODE(folder.stat().st_mode) & 0o022:
        log.warning("other users may write to %s, and take files of the metadata away: chmod 700 it", folder)


def default_folder(port: int) -> Path:
    """The folder of the server at an HTTP port, in the user's state folder (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "memserve" / f"port-{port}"


def is_locked(folder: Path) -> bool:
    """Whether some other process has this folder open right now, or that cannot be found out for lack of descriptors
    or memory. Asks the kernel and takes nothing."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR)
    except OSError as error:
        return error.errno in OUT_OF_RESOURCES
    try:
        lock_reply = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(lock_reply)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


JOURNAL = "journal"
Result = TypeVar("Result")


class FileMedium:
    """A :class:`memserve.journal.store.Medium` in a folder of the local file system, used by this process alone."""

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
        self._write_all(self._fd, data)

    def sync(self) -> None:
        """As :class:`Medium`."""
        if self._fd is not None:
            _guarded(lambda: self._fsync(self._fd or 0))

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`: written beside it, made safe, and renamed."""
        fresh = self._fresh
        fd = _guarded(lambda: os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600))
        try:
            self._write_all(fd, data)
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

    def _write_all(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = _guarded(lambda: os.write(fd, rest))  # noqa: B023  # called at once
            rest = rest[written:]


def _guarded(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except OSError as error:
        raise MediumFailed(error.strerror or str(error)) from None
