"""A disk whose file system has no room left: it is read as before, and written again when there is room.

::

    writes --ENOSPC, again and again--> full --a write works--> writes
                                         ^  |
                                         +--+ one write at intervals, to see

A file that was taken whole at the start can be refused room all the same: by a quota, by a file system that copies what
it writes, by a volume that promises more than it has. Pages of the log itself that are refused are kept and written
later, so the log does not hear of it: to it the disk is slow. A sync is kept as well: what it makes safe has passed the
page cache, so nothing of it is lost between two tries.
"""

from __future__ import annotations

from collections import deque

from memserve.store.disk_events import DiskDone, DiskFull, DiskHasRoom
from memserve.store.disk_steps import CommandStep, MoveWrite, Shared, Step, WriteStep

NO_ROOM = frozenset({"ENOSPC", "EDQUOT"})


class DiskRoom:
    """Of one disk: whether it is written, and which of the log's commands wait for that."""

    def __init__(self, number: int, shared: Shared) -> None:
        self._number, self._shared = number, shared
        self.is_full = False
        self._refused = 0  # writes in a row
        self._waiting: deque[CommandStep] = deque()
        self._due: list[CommandStep] = []
        self._looks_at_ns: int | None = None  # None: it is not full, or a try is under way or allowed
        self._may_try = False  # a caller's write may be the next try

    @property
    def takes_writes(self) -> bool:
        """Whether a caller's write may begin."""
        return not self.is_full or self._may_try

    def write_begins(self) -> None:
        """A caller's write begins: on a full disk, as the one that tries."""
        self._may_try = False

    def add(self, step: CommandStep) -> None:
        """A command of the log: it is due, or waits for room."""
        if self.is_full:
            self._waiting.append(step)
        else:
            self._due.append(step)

    def ended(self, step: Step, done: DiskDone, now: int) -> bool:
        """Take the end of a job into account. True: there was no room for what it writes; a command of the log is done
        again then, and the log does not hear of it."""
        if not isinstance(step, CommandStep | WriteStep | MoveWrite):
            return False
        is_sync = isinstance(step, CommandStep) and step.data is None
        if done.ok and not is_sync:
            self._wrote()
        elif self.is_full and (is_sync or done.why not in NO_ROOM):
            self._looks_at_ns = now + (0 if done.ok else self._shared.config.full_pause_ns)  # nothing of room is known
        if done.ok or done.why not in NO_ROOM:
            return False
        self._refused += 1
        if not self.is_full and self._refused >= self._shared.config.failures_max:
            self.is_full = True
            self._shared.counters.disks_filled += 1
            self._shared.outcomes.append(DiskFull(self._number, done.why))
        if self.is_full:
            self._looks_at_ns, self._may_try = now + self._shared.config.full_pause_ns, False
        if isinstance(step, CommandStep):
            self.add(step)
        return True

    def _wrote(self) -> None:
        self._refused = 0
        if self.is_full:
            self.is_full, self._may_try, self._looks_at_ns = False, False, None
            self._due += self._waiting
            self._waiting.clear()
            self._shared.outcomes.append(DiskHasRoom(self._number))

    def tick(self, now: int) -> None:
        """Try one write when the time has come."""
        if self._looks_at_ns is None or now < self._looks_at_ns:
            return
        self._looks_at_ns = None
        if self._waiting:
            self._due.append(self._waiting.popleft())
        else:
            self._may_try = True

    def take_due(self) -> list[CommandStep]:
        """Commands of the log that are to be begun."""
        due, self._due = self._due, []
        return due

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`tick` has something to do."""
        return self._looks_at_ns

    def forget(self) -> None:
        """The disk is lost."""
        self.is_full, self._looks_at_ns = False, None
        self._waiting.clear()
        self._due.clear()
