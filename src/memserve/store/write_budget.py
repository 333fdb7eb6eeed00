"""How many bytes a day may be written to flash: a token bucket over the time that callers name."""

from __future__ import annotations

from memserve.units import MIB, NS_PER_S

DAY_NS = 86_400 * NS_PER_S


class WriteBudget:
    """A bucket that is full at first, holds ``burst_bytes``, and fills at such a rate that no 24 hours see more than
    ``bytes_per_day``: a full bucket and a day's filling are the day's budget."""

    def __init__(self, bytes_per_day: int) -> None:
        """0: no limit."""
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = max(bytes_per_day // 8, min(bytes_per_day // 2, 16 * MIB))
        self._level = self.burst_bytes * DAY_NS  # in bytes times DAY_NS: nothing is lost to rounding
        self._at_ns: int | None = None

    def has(self, nbytes: int, now: int) -> bool:
        """Whether ``nbytes`` may be written now."""
        if self.bytes_per_day == 0:
            return True
        self._fill(now)
        return self._level >= nbytes * DAY_NS

    def charge(self, nbytes: int, now: int) -> None:
        """``nbytes`` are written, allowed or not: heads and footers can't be refused, and are owed."""
        if self.bytes_per_day == 0:
            return
        self._fill(now)
        self._level -= nbytes * DAY_NS

    def bytes_left(self, now: int) -> int:
        """What may be written now; below 0: owed."""
        self._fill(now)
        return self._level // DAY_NS

    def _fill(self, now: int) -> None:
        if self._at_ns is not None and now > self._at_ns:
            gained = (now - self._at_ns) * (self.bytes_per_day - self.burst_bytes)
            self._level = min(self.burst_bytes * DAY_NS, self._level + gained)
        self._at_ns = now if self._at_ns is None else max(now, self._at_ns)
