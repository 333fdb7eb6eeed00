"""Processors that the instances of one host share: who computes beside others is slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memserve.sim.clock import Clock


@dataclass(slots=True, eq=False)
class _Job:
    left_ns: float
    done: Callable[[], None]


class Cores:
    """Work in progress; all of it goes on at one speed, that of ``speeds[n - 1]`` when ``n`` compute at once.

    1 = as fast as alone. Beyond the last entry they share evenly what that one leaves for all.
    """

    __slots__ = ("_clock", "_jobs", "_since_ns", "_speeds", "_turn")

    def __init__(self, clock: Clock, speeds: tuple[float, ...] = (1.0,)) -> None:
        self._clock, self._speeds = clock, speeds
        self._jobs: dict[_Job, None] = {}
        self._since_ns = 0
        self._turn = 0

    def speed(self) -> float:
        """Of each job now."""
        count, known = len(self._jobs), len(self._speeds)
        return self._speeds[count - 1] if 0 < count <= known else self._speeds[-1] * known / max(1, count)

    def start(self, alone_ns: int, done: Callable[[], None]) -> None:
        """Call ``done`` once what would take ``alone_ns`` alone is done."""
        self._progress()
        self._jobs[_Job(float(alone_ns), done)] = None
        self._plan_next()

    def _progress(self) -> None:
        now, speed = self._clock.now, self.speed()
        for job in self._jobs:
            job.left_ns -= (now - self._since_ns) * speed
        self._since_ns = now

    def _plan_next(self) -> None:
        self._turn += 1
        if self._jobs:
            first_ns = min(job.left_ns for job in self._jobs)
            self._clock.after(max(0, round(first_ns / self.speed())), self._end, self._turn)

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
