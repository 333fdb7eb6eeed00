"""What a person at a terminal sees of a run (level 4)."""

from __future__ import annotations

import sys
from typing import TextIO

from memserve.bench.load.record import Outcome, RequestRecord
from memserve.units import NS_PER_S

BAR_CHARS = 24
EVERY_NS = NS_PER_S // 5


class Progress:
    """One line on stderr that is written over again; silent where stderr is no terminal."""

    def __init__(self, planned: int, title: str = "", stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._shows = self._stream.isatty()
        self._planned, self._title = planned, title
        self._ended = self._failed = self._under_way = 0
        self._shown_ns = -EVERY_NS

    def sent(self) -> None:
        """One more is under way."""
        self._under_way += 1

    def ended(self, record: RequestRecord, now_ns: int) -> None:
        """One has ended."""
        self._under_way -= 1
        self._ended += 1
        self._failed += record.outcome is not Outcome.OK
        if self._shows and now_ns - self._shown_ns >= EVERY_NS:
            self._shown_ns = now_ns
            self._stream.write("\r" + self.line(now_ns) + "\x1b[K")
            self._stream.flush()

    def line(self, now_ns: int) -> str:
        """For example ``sharegpt [######........]  120/480  8 under way  12.5 s``."""
        filled = BAR_CHARS * self._ended // max(self._planned, 1)
        bar = "#" * filled + "." * (BAR_CHARS - filled)
        failed = f"  {self._failed} failed" if self._failed else ""
        head = f"{self._title} " if self._title else ""
        seconds = now_ns / NS_PER_S
        return f"{head}[{bar}]  {self._ended}/{self._planned}  {self._under_way} under way{failed}  {seconds:.1f} s"

    def close(self) -> None:
        """Make room for other output."""
        if self._shows:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
