"""Files with secrets: read whole, refused where other users could have written them, read again when they change."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from memserve.base.errors import UserError
from memserve.base.units import MIB

log = logging.getLogger(__name__)

SECRET_FILE_VARIABLE = "MEMSERVE_CLUSTER_SECRET_FILE"
LOOK_S = 1.0
"""How often followed files are compared with what was read, at most."""

T = TypeVar("T")
S = TypeVar("S")
_Stamp = tuple[tuple[int, int, int], ...]


class Followed(Generic[T]):
    """What files hold. A change is read by the next look at it; no process watches them.

    An operator may write anything, at any time: what cannot be read changes nothing, and is said once. A file that was
    only touched is no news.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T], subject: str, *, tells: bool = True) -> None:
        """``read``: of ``files``; its :class:`UserError` says what is wrong with them, and is raised here. ``subject``:
        they hold, in log lines."""
        self._files, self._read, self._subject = tuple(files), read, subject
        self._level = logging.WARNING if tells else logging.DEBUG
        self._stamp: _Stamp | None = self._stamp_now()  # before they are read: a change meanwhile is seen later
        self._value = self._first = read()
        self._looked_s = time.monotonic()
        self._is_odd = False  # what was there last could not be read

    @property
    def initial_value(self) -> T:
        """As it was when the process began."""
        return self._first

    @property
    def files(self) -> tuple[Path, ...]:
        """Empty: it stays as it is."""
        return self._files

    @classmethod
    def of_constant(cls, value: T) -> Followed[T]:
        """What is in no file, and stays."""
        return cls((), lambda: value, "")

    def value(self) -> T:
        """Of the files as they are; of the last good ones while they are halfway through a change."""
        now_s = time.monotonic()
        if not self._files or now_s < self._looked_s + LOOK_S:
            return self._value
        self._looked_s = now_s
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return self._value
        self._stamp = stamp
        try:
            for path in self._files:
                if path.exists() and not path.is_file():  # to open a pipe would wait for its writer
                    raise UserError(f"{path} is no file any more")
            value, before, was_odd = self._read(), self._value, self._is_odd
            self._value, self._is_odd = value, False
            if value != before or was_odd:
                log.log(self._level, "%s in %s: read again", self._subject, self._files[0])
        except UserError as error:
            self._is_odd = True
            log.log(self._level, "%s; %s that were read before stay in use", error.message, self._subject)
        return self._value

    def derive_value(self, make: Callable[[T], S], *, tells: bool = True) -> Followed[S]:
        """What ``make`` makes of it, which may refuse it with a :class:`UserError` as well. ``tells`` False: another
        one of this process has the lines in the log."""
        value = make(self._value)  # the file may be broken just now
        derived = Followed((), lambda: value, self._subject, tells=tells)
        derived._files, derived._read, derived._stamp = self._files, lambda: make(self._read()), self._stamp
        return derived

    def _stamp_now(self) -> _Stamp | None:
        """None: not all of them are there."""
        try:
            stats = [path.stat() for path in self._files]
        except OSError:
            return None
        return tuple((status.st_ino, status.st_size, status.st_ctime_ns) for status in stats)  # a mode changes it, too


Secret = str | Followed[str]
"""The text of a cluster's secret file; it may change."""


def as_followed(secret: Secret) -> Followed[str]:
    """``secret``, wherever it comes from."""
    return secret if isinstance(secret, Followed) else Followed.of_constant(secret)


def follow_secret(path: Path) -> Followed[str]:
    """The cluster's secret in a file; of a pipe it is read once. Raises :class:`UserError` as :func:`read_secret`."""
    if not path.is_file():
        return Followed.of_constant(read_secret(path))
    return Followed([path], lambda: read_secret(path), "the cluster secret")


@dataclass(frozen=True, slots=True)
class GivenKeys:
    """Where the keys of clients come from. Neither: there are none."""

    words: tuple[str, ...] = field(default=(), repr=False)
    """Of the command line or the environment: as long as the process lives."""
    file: Path | None = None

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> GivenKeys:
        """What another process has :meth:`as_payload`."""
        return cls(tuple(payload["words"]), Path(payload["file"]) if payload["file"] else None)

    def as_payload(self) -> dict[str, Any]:
        """For a process of this host, by a way that no other user sees."""
        return {"words": self.words, "file": str(self.file.absolute()) if self.file is not None else ""}

    @property
    def are_given(self) -> bool:
        """Clients need one."""
        return bool(self.words) or self.file is not None

    def follow_keys(self) -> Followed[tuple[str, ...]]:
        """All of them. Raises :class:`UserError` for a file without keys."""
        return Followed([self.file] if self.file is not None else [], self.read_keys, "the keys")

    def read_keys(self) -> tuple[str, ...]:
        """As they are now. Raises :class:`UserError` for a file without keys."""
        return self.words + (tuple(keys_in(self.file)) if self.file is not None else ())


def read_secret(path: Path, subject: str = "the cluster secret") -> str:
    """A secret that fills a file. Raises :class:`UserError` when the file cannot be read, or is no text."""
    hint = f"make one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
    return read_private(path, subject, hint).strip()


def keys_in(path: Path) -> list[str]:
    """The API keys in a file, one a line. Raises :class:`UserError` naming a line that is not a key."""
    hint = "one KEY or NAME=KEY per line; `chmod 600` it"
    keys = []
    for number, line in enumerate(read_private(path, "API keys", hint).splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key.split()) > 1:
            raise UserError(f"line {number} of {path} is not an API key: it contains a space", hint=hint)
        keys.append(key)
    if not keys:
        raise UserError(f"{path} holds no API key", hint=hint)
    return keys


def read_private(path: Path, subject: str, hint: str, secret_bits: int = 0o044) -> str:
    """The text of a small file. Others may not write to it: they could add a key of their own. ``secret_bits`` 0: what
    is in it may be read by all.

    A file that others may read is only warned of: containers mount secrets with mode 0444 on a read-only file system,
    where there is no other user and the mode cannot be changed.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MIB + 1)
        if len(data) > MIB:
            raise UserError(f"cannot read {subject} in {path}: it is larger than 1 MiB", hint=hint)
        text = data.decode("utf-8-sig")  # without the mark that editors of Windows begin with
    except UnicodeDecodeError:
        raise UserError(f"cannot read {subject} in {path}: it is not text", hint=hint) from None
    except OSError as error:
        raise UserError(f"cannot read {subject} in {path}: {error.strerror or error}", hint=hint) from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o022:
        raise UserError(f"other users may write to {path}, which holds {subject}", hint=f"chmod 600 {path}")
    if stat.S_ISREG(status.st_mode) and status.st_mode & secret_bits:
        log.warning("other users may read %s, which holds %s: chmod 600 %s", path, subject, path)
    return text
