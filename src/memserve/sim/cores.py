"""Processors that the instances of one host share: an instance that computes beside others is slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memserve.sim.clock import Clock


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

    def _speed(self, job: _Job) -> float:
        count = len(self._jobs)
        return 1.0 if count == 1 else job.beside * 2 / count

    def start(self, alone_ns: int, beside: float, done: Callable[[], None]) -> None:
        """Call ``done`` at the end of a job that takes ``alone_ns`` alone; ``beside``: its speed beside one other."""
        self._progress()
        self._jobs[_Job(float(alone_ns), beside, done)] = None
        self._plan_next()

    def _progress(self) -> None:
        now = self._clock.now
        for job in self._jobs:
            job.left_ns -= (now - self._since_ns) * self._speed(job)
        self._since_ns = now

    def _plan_next(self) -> None:
        self._turn += 1
        if self._jobs:
            first_ns = min(job.left_ns / self._speed(job) for job in self._jobs)
            self._clock.after(max(0, round(first_ns)), self._end, self._turn)

    def _end(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._progress()
        ended = [job for job in self._jobs if job.left_ns < 1]
        for job in ended:
            del self._jobs[job]
        self._plan_next()
        for job in ended:
            job.done()
