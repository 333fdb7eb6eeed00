"""The folder in which one ``memserve serve`` keeps what outlives it (level 3).

::

    lock             locked by the router's process; the kernel unlocks it when that ends, however it ends
    secret           of the cluster, unless it was given one: instances that live on know it
    journal          what the router remembers (runtime/meta_file.py)
    children.json    whom it has started (runtime/meta_children.py)
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path
from struct import Struct

from memserve.errors import UserError

log = logging.getLogger(__name__)

LOCK, SECRET = "lock", "secret"
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing about the thing that was asked for, only that this process may not ask now."""
_OURS = {LOCK, SECRET, "secret.new", "journal", "journal.new", "children.json", "children.new"}
_SECRET_HINT = "restore it, or remove it: instances that still run do not know the new one, and end by themselves"
_FLOCK = Struct("hhqqi4x")
"""``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""


class StateFolder:
    """Belongs to this process as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when the folder cannot be used, or another process uses it."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.was_used = (path / SECRET).exists()
            """A router has kept its state here before."""
            _close_to_others(path)
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

    def secret(self) -> str:
        """The cluster's, made when there is none yet. Raises :class:`UserError` for a file that holds none."""
        path = self.path / SECRET
        try:
            secret = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            secret = secrets.token_urlsafe(32)
            write_private(path, secret + "\n")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"cannot read the cluster secret in {path}: {reason}", hint=_SECRET_HINT) from None
        if not secret:
            raise UserError(f"the cluster secret in {path} is empty", hint=_SECRET_HINT)
        return secret

    def close(self) -> None:
        """Another router may come."""
        os.close(self._lock_fd)


def write_private(path: Path, text: str) -> None:
    """Put ``text`` in the place of the file, as a whole, for its owner alone. Raises :class:`OSError`."""
    fresh = path.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)  # of a file that an older memserve has left
        file.write(text)
    fresh.rename(path)


def _close_to_others(folder: Path) -> None:
    """Make the folder and what we keep there readable for their owner alone, whatever a copy or an older memserve left.

    A folder in which others keep files as well (``/tmp``, a home) is left as it is: ours are closed each by itself.
    """
    found = set(os.listdir(folder))
    for name in found & _OURS:
        os.chmod(folder / name, 0o600)
    if found <= _OURS:
        os.chmod(folder, 0o700)
    elif stat.S_IMODE(folder.stat().st_mode) & 0o022:
        log.warning("other users may write to %s, and take files of the metadata away: chmod 700 it", folder)


def default_folder(port: int) -> Path:
    """Of the server at an HTTP port, in the user's state folder (XDG)."""
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
        asked = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)
