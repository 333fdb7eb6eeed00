"""Where a journal lies (level 2): a port with few methods, and the word for its failures."""

from __future__ import annotations

from typing import Protocol

from memserve.errors import MemserveError


class MediumFailed(MemserveError):
    """The medium could not do it (disk full, connection lost). What was appended since the last ``sync`` may be there
    in whole, in part or not at all."""


class Medium(Protocol):
    """One journal at a time: a run of bytes that grows, and that another one can replace.

    Implementations: a file (``runtime/meta_file.py``), etcd (``runtime/meta_etcd.py``), memory with faults
    (``meta/faulty.py``). All pass ``tests/process/meta/test_media.py``.
    """

    @property
    def name(self) -> str:
        """What an operator calls it: the path of the file, the key in etcd."""

    def load(self) -> bytes | None:
        """Everything since the last ``replace``, in order. ``None``: there never was a journal; ``b""``: there was one,
        and nothing is left of it. Raises :class:`MediumFailed`."""

    def append(self, data: bytes) -> None:
        """Put ``data`` behind the rest; it need not be safe yet. Raises :class:`MediumFailed`."""

    def sync(self) -> None:
        """Everything appended is safe when this returns. Raises :class:`MediumFailed`."""

    def replace(self, data: bytes) -> None:
        """``data`` instead of all that is there: safe when this returns, and at no moment is neither there. Raises
        :class:`MediumFailed`; then the old one is still there, as it was."""

    def close(self) -> None:
        """Give everything back."""
