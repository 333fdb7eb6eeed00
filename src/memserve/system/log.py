"""Log lines that cannot flood the log: one line for what happens again and again, then a count."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

EVERY_S = 10.0
"""Between two lines about one thing."""

KEYS_MAX = 256
"""Things that are told apart; the one that was logged least recently makes room."""

LINES_MAX = 60
"""Lines a minute about all things together."""

_MINUTE_S = 60.0


class RatedLog:
    """Logs at most one line a thing in ``every_s``, and at most ``LINES_MAX`` a minute altogether; the next line says
    how many were left out. Any thread may log."""

    def __init__(
        self, log: logging.Logger, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log, self._every_s, self._clock = log, every_s, clock
        self._lock = threading.Lock()
        self._last: OrderedDict[Hashable, float] = OrderedDict()
        self._minute_s = clock()
        self._lines = 0
        self._left_out = 0

    def log_limited(self, level: int, thing: Hashable, text: str, *values: object) -> None:
        """Log ``text % values`` about ``thing``, or count it."""
        with self._lock:
            if not self._may_log(thing):
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, values = text + " (%d lines like it were left out before)", (*values, left_out)
        self._log.log(level, text, *values)

    def _may_log(self, thing: Hashable) -> bool:
        now = self._clock()
        if now - self._minute_s >= _MINUTE_S:
            self._minute_s, self._lines = now, 0
        last = self._last.get(thing)
        if (last is not None and now - last < self._every_s) or self._lines >= LINES_MAX:
            return False
        self._lines += 1
        self._last[thing] = now
        self._last.move_to_end(thing)
        if len(self._last) > KEYS_MAX:
            self._last.popitem(last=False)
        return True
