"""A verification: every record is read and compared with what was written, one at a time on each disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve._core import Found, SegmentLog

KEY_BYTES = 16
KEYS_MAX = 1000
"""Keys of records that do not match which a verification names."""


@dataclass(slots=True)
class Verification:
    """What a verification has found so far, on all disks."""

    id: int
    records: int = 0
    payload_bytes: int = 0
    damaged: int = 0
    unread: int = 0
    keys: list[bytes] = field(default_factory=list)

    def note_good(self, length: int) -> None:
        """A record is what was written."""
        self.records += 1
        self.payload_bytes += length

    def note_bad(self, key: bytes, length: int, *, readable: bool) -> None:
        """A record does not match, or could not be read."""
        self.note_good(length)
        if readable:
            self.damaged += 1
        else:
            self.unread += 1
        if len(self.keys) < KEYS_MAX:
            self.keys.append(key)


class RecordsToCheck:
    """What of a verification is left to do on one disk."""

    def __init__(self, pause_ns: int) -> None:
        """``pause_ns``: between two records while callers read."""
        self.verification: Verification | None = None
        """None: nothing is left."""
        self.job: int | None = None
        self.after_ns = 0
        self._pause_ns = pause_ns
        self._keys = b""
        self._at = 0

    def start(self, verification: Verification, log: SegmentLog, now: int) -> None:
        """All records that are here now are to be checked."""
        self.verification, self._keys, self._at, self.after_ns = verification, log.keys(), 0, now

    def stop(self) -> None:
        """The disk is lost, or all is done."""
        self.verification, self.job, self._keys = None, None, b""

    def is_due(self, now: int, *, callers_read: bool) -> bool:
        """The next record may be read."""
        return self.verification is not None and self.job is None and (not callers_read or now >= self.after_ns)

    def hold_next(self, log: SegmentLog) -> tuple[bytes, Found] | None:
        """The next record that is here still, held. None: that was all."""
        while self._at < len(self._keys):
            key = self._keys[self._at : self._at + KEY_BYTES]
            self._at += KEY_BYTES
            found = log.hold(key, False)
            if found is not None:
                return key, found
        self.stop()
        return None

    def ended(self, now: int) -> Verification:
        """The record under way has been read; returns where to note it."""
        assert self.verification is not None
        self.job, self.after_ns = None, now + self._pause_ns
        return self.verification
