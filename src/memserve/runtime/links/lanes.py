"""Worker threads that keep the order of each lane."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

log = logging.getLogger(__name__)

Task = Callable[[], None]


class Lanes:
    """Tasks of one lane run one after another, in order; different lanes run at once, on ``workers`` threads."""

    def __init__(self, name: str, workers: int) -> None:
        self._waiting: dict[Hashable, deque[Task]] = {}
        """All and only the lanes that have tasks, the running one included."""
        self._ready: deque[Hashable] = deque()
        """Lanes with tasks of which none runs, longest waiting first."""
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name} {number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: Hashable, task: Task) -> bool:
        """Queue ``task``; False when closed."""
        with self._changed:
            if self._closed:
                return False
            tasks = self._waiting.get(lane)
            if tasks is None:
                self._waiting[lane] = deque([task])
                self._ready.append(lane)
                self._changed.notify()
            else:
                tasks.append(task)
            return True

    def close(self) -> None:
        """Take no more, run what is queued, stop the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (turn := self._next()) is not None:
            lane, task = turn
            try:
                task()
            except Exception:
                log.exception("a task of lane %r failed", lane)
            self._finished(lane)

    def _next(self) -> tuple[Hashable, Task] | None:
        """The first task of the lane that waits longest; ``None`` = closed, and nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or (self._closed and not self._waiting))
            if not self._ready:
                return None
            lane = self._ready.popleft()
            return lane, self._waiting[lane][0]

    def _finished(self, lane: Hashable) -> None:
        with self._changed:
            self._waiting[lane].popleft()
            if self._waiting[lane]:
                self._ready.append(lane)
                self._changed.notify()
            else:
                del self._waiting[lane]
                if self._closed:
                    self._changed.notify_all()
