"""A thread that looks after something: often for a while, then now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PACE = ((0.01, 0.0001), (0.1, 0.0005), (2.0, 0.002))
"""``(age_s, pause_s)``: how long to sleep between looks, until so long after the last call of ``look_often``."""
_SLOW_S = 0.05


class Attendant:
    """Calls ``attend`` again and again, until it returns False; then not before the next ``look_often``."""

    def __init__(self, attend: Callable[[], bool]) -> None:
        self._attend = attend
        self._changed = threading.Condition()
        self._asked = False
        self._closed = False
        self._busy_since_s = 0.0
        self._thread = threading.Thread(target=self._work, name="nixl attendant", daemon=True)
        self._thread.start()

    def look_often(self) -> None:
        """Something is about to happen."""
        with self._changed:
            self._busy_since_s = time.monotonic()
            self._asked = True
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            pause_s = self._pause_s() if self._attend() else None
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed, pause_s)
                self._asked = False
                if self._closed:
                    return

    def _pause_s(self) -> float:
        age_s = time.monotonic() - self._busy_since_s
        return next((pause_s for until_s, pause_s in _PACE if age_s < until_s), _SLOW_S)
