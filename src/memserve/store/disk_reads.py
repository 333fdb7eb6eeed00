"""Callers' reads that are under way on one disk, and their deadlines."""

from __future__ import annotations

import heapq

from memserve.errors import check
from memserve.store.disk_steps import ReadStep


class ReadsUnderWay:
    """Reads by their ids. One that is late has ended for its caller; until the device is done it counts here."""

    def __init__(self) -> None:
        self._reads: dict[int, ReadStep] = {}
        self._deadlines: list[tuple[int, int]] = []
        self.late = 0

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, step: ReadStep, deadline_ns: int) -> None:
        """A read has begun."""
        self._reads[step.id] = step
        heapq.heappush(self._deadlines, (deadline_ns, step.id))

    def pop(self, step: ReadStep) -> None:
        """The device is done with a read."""
        del self._reads[step.id]
        self.late -= step.ended

    def take_late(self, now: int) -> list[int]:
        """Ids of reads whose deadline has passed now; they have ended."""
        late: list[int] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            step = self._reads.get(heapq.heappop(self._deadlines)[1])
            if step is not None and not step.ended:
                step.ended = True
                late.append(step.id)
        self.late += len(late)
        return late

    def end_all(self) -> list[int]:
        """Ids of reads that had not ended; they have now."""
        self._deadlines.clear()
        ids = [step.id for step in self._reads.values() if not step.ended]
        for step in self._reads.values():
            step.ended = True
        self.late = len(self._reads)
        return ids

    @property
    def next_deadline_ns(self) -> int | None:
        """Of the reads that have not ended."""
        while self._deadlines and self._deadlines[0][1] not in self._reads:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def check_invariants(self, steps: list[ReadStep]) -> None:
        """``steps``: those that have a job."""
        check({step.id: step for step in steps} == self._reads, "reads and their jobs differ")
        check(sum(step.ended for step in steps) == self.late, "late reads are miscounted")
