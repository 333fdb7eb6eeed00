"""The folder in which one ``memserve serve`` keeps what outlives it (level 3).

::

    lock             locked by the router's process; the kernel unlocks it when that ends, however it ends
    secret           of the cluster, unless it was given one: instances that live on know it
    journal          what the router remembers (runtime/meta_file.py)
    children.json    whom it has started (runtime/meta_children.py)
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from struct import Struct

from memserve.errors import UserError

LOCK, SECRET = "lock", "secret"
_FLOCK = Struct("hhqqi4x")
"""``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""


class StateFolder:
    """Belongs to this process as long as it is open."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when the folder cannot be used, or another process uses it."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        """The cluster's, made when there is none yet."""
        path = self.path / SECRET
        try:
            return path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            secret = secrets.token_urlsafe(32)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(secret + "\n")
            return secret

    def close(self) -> None:
        """Another router may come."""
        os.close(self._lock_fd)


def default_folder(port: int) -> Path:
    """Of the server at an HTTP port, in the user's state folder (XDG)."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "memserve" / f"port-{port}"


def is_locked(folder: Path) -> bool:
    """Whether some other process has this folder open right now. Asks the kernel and takes nothing."""
    try:
        fd = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        asked = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        return bool(_FLOCK.unpack(asked)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)
