"""A file that says once a second what a process is: probes of containers read its text, and look at its age."""

from __future__ import annotations

import enum
import os
import time
from pathlib import Path

from memserve.errors import UserError

PERIOD_S = 1.0
STALL_S = 15.0
"""A process whose own thread has done nothing for so long is not said to work any more."""


class Standing(enum.StrEnum):
    """What a process is to its cluster."""

    MEMBER = "member"
    OUTSIDE = "outside"  # it works, and no router has accepted it
    DRAINS = "drains"  # it takes nothing new


class HealthFile:
    """Writes a :class:`Standing` into a file at most once a second, and removes it at the end.

    A process that hangs writes nothing: the file grows old. One that works without a router keeps it young, and says
    ``outside``: whether it is to be restarted, and whether it is ready, are two questions.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when no file can be written there."""
        self._path = path.absolute()
        self._draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._next_s = 0.0
        try:
            self._path.unlink(missing_ok=True)  # of the process before, which may have said that it is a member
            self._draft.touch()
        except OSError as error:
            hint = "give --health-file a path in a folder that this user may write to"
            message = f"cannot write {self._path}: {error.strerror or error}"
            raise UserError(message, hint=hint, param="health_file") from None

    def tell(self, standing: Standing) -> None:
        """Write ``standing``, unless that was done within this second. A full disk leaves the file to grow old."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + PERIOD_S * 0.9  # callers come once a second, and not to the millisecond
        try:
            self._draft.write_text(f"{standing.value}\n")
            self._draft.replace(self._path)
        except OSError:
            return

    def remove(self) -> None:
        """There is nothing more to say."""
        for path in (self._path, self._draft):
            path.unlink(missing_ok=True)
