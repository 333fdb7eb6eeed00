"""Work that an engine's thread hands over and does not wait for: a bounded number of jobs, each of which ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class Jobs:
    """Threads for jobs that end by a deadline of their own."""

    def __init__(self, threads: int, waiting_max: int) -> None:
        """``waiting_max``: jobs that are under way or wait, more are refused."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="memserve-engine-job")
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False

    def start(self, job: Callable[[], None]) -> bool:
        """Run it in one of the threads. False: too many wait, and it will not be run."""
        with self._changed:
            if self._closed or self._waiting >= self._waiting_max:
                return False
            self._waiting += 1
        self._threads.submit(self._run, job)
        return True

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            log.exception("a job for the store failed")
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until no job is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Refuse further jobs and wait for those that are left."""
        with self._changed:
            self._closed = True
        self._threads.shutdown(wait=True)
