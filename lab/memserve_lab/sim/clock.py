"""Virtual time: an ordered queue of future calls.

Processors that the instances of one host share: an instance that computes beside others is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

_Entry = tuple[int, int, Callable[..., None], tuple[Any, ...]]
_Moment = tuple[int, tuple[Any, ...]]


class Clock:
    """Calls in order of time; equal times in order of posting. ``now`` is in nanoseconds and starts at 0."""

    __slots__ = ("_posted", "_queue", "now", "steps")

    def __init__(self) -> None:
        self.now = 0
        self.steps = 0
        """Calls made so far."""
        self._queue: list[_Entry] = []
        self._posted = 0

    def call_at(self, when_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` at ``when_ns``, not before now."""
        self._posted += 1
        heappush(self._queue, (when_ns if when_ns > self.now else self.now, self._posted, do, arguments))

    def call_after(self, delay_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` in ``delay_ns``."""
        self.call_at(self.now + delay_ns, do, *arguments)

    def at_each(self, moments: Iterable[_Moment], do: Callable[..., None]) -> None:
        """Call ``do(*arguments)`` at each of ``moments``, (time, arguments) in order of time: as if all were posted
        now, but only the next one is in the queue, which stays short."""
        self._posted += 1
        self._await_next(iter(moments), do, self._posted)

    def _await_next(self, moments: Iterator[_Moment], do: Callable[..., None], number: int) -> None:
        coming = next(moments, None)
        if coming is not None:
            when_ns, arguments = coming
            heappush(self._queue, (max(when_ns, self.now), number, self._make_next, (moments, do, number, arguments)))

    def _make_next(
        self, moments: Iterator[_Moment], do: Callable[..., None], number: int, arguments: tuple[Any, ...]
    ) -> None:
        self._await_next(moments, do, number)
        do(*arguments)

    @property
    def next_ns(self) -> int | None:
        """When the next call is due; ``None`` = there is none."""
        return self._queue[0][0] if self._queue else None

    def run_one(self) -> bool:
        """Make the next call, at its time; ``False`` = there is none."""
        if not self._queue:
            return False
        self.now, _, do, arguments = heappop(self._queue)
        self.steps += 1
        do(*arguments)
        return True

    def run_until(self, end_ns: int) -> None:
        """Make every call that is due by ``end_ns``; then the time is ``end_ns``."""
        queue = self._queue
        while queue and queue[0][0] <= end_ns:
            self.run_one()
        self.now = max(self.now, end_ns)


@dataclass(slots=True, eq=False)
class _Job:
    left_ns: float
    beside: float
    done: Callable[[], None]


class Cores:
    """Jobs in progress. A job alone runs at full speed, two at a measured speed each; more share evenly what two
    get."""

    __slots__ = ("_clock", "_jobs", "_since_ns", "_turn")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[_Job, None] = {}
        self._since_ns = 0
        self._turn = 0

    def _speed_of(self, job: _Job) -> float:
        count = len(self._jobs)
        return 1.0 if count == 1 else job.beside * 2 / count

    def start_job(self, alone_ns: int, beside: float, on_done: Callable[[], None]) -> None:
        """Call ``done`` at the end of a job that takes ``alone_ns`` alone; ``beside``: its speed beside one other."""
        self._advance_jobs()
        self._jobs[_Job(float(alone_ns), beside, on_done)] = None
        self._plan_next()

    def _advance_jobs(self) -> None:
        now = self._clock.now
        for job in self._jobs:
            job.left_ns -= (now - self._since_ns) * self._speed_of(job)
        self._since_ns = now

    def _plan_next(self) -> None:
        self._turn += 1
        if self._jobs:
            first_ns = min(job.left_ns / self._speed_of(job) for job in self._jobs)
            self._clock.call_after(max(0, round(first_ns)), self._end_job, self._turn)

    def _end_job(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance_jobs()
        jobs_ended = [job for job in self._jobs if job.left_ns < 1]
        for job in jobs_ended:
            del self._jobs[job]
        self._plan_next()
        for job in jobs_ended:
            job.done()
