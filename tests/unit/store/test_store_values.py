"""Where a store's jobs on memory are done: small ones at once by a thread that has time, all others by workers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from memserve import _core
from memserve.base.units import KIB, MIB
from memserve.protocol.peers import Peer
from memserve.store.host.memory_jobs import Answer, ValueJobs
from memserve.store.machine.events import SealExtents, TakeValues, ValuePart, ValuesTaken

WAIT_S = 20.0
CLIENT = Peer("client", 1)


class Jobs:
    """The jobs of one arena, and which thread has answered each."""

    def __init__(self) -> None:
        self.busy = False
        self.arena = _core.SharedArena(4 * MIB)
        self.bytes = np.asarray(memoryview(self.arena))
        self.answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self.jobs = ValueJobs(self.arena, self._post, lambda to, message: None, lambda: self.busy)

    def _post(self, answer: Answer) -> None:
        self.answers.put((threading.get_ident(), answer))

    def took_place_here(self) -> tuple[bool, Answer]:
        thread, answer = self.answers.get(timeout=WAIT_S)
        return thread == threading.get_ident(), answer


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs()
    yield jobs
    jobs.jobs.close()


def take(job: int, *values: bytes) -> TakeValues:
    ends = np.cumsum([0, *map(len, values)])
    parts = (ValuePart(int(end), len(value), 0, value) for end, value in zip(ends, values, strict=False))
    return TakeValues(job, CLIENT, tuple(parts))


@pytest.mark.parametrize(
    ("nbytes", "busy", "here"), [(8, False, True), (8, True, False), (MIB, False, True), (MIB + 1, False, False)]
)
def test_small_jobs_are_done_at_once_by_a_thread_that_has_time(jobs: Jobs, nbytes: int, busy: bool, here: bool) -> None:
    value = np.random.default_rng(nbytes).bytes(nbytes)
    jobs.busy = busy
    jobs.jobs.start(take(7, value))
    done_here, answer = jobs.took_place_here()
    seal = int(_core.seal_ranges(jobs.arena.address, np.zeros(1, np.int64), nbytes)[0])
    assert (done_here, answer) == (here, ValuesTaken(7, (seal,))) and bytes(jobs.bytes[:nbytes]) == value


def test_all_values_of_a_job_count_for_its_size(jobs: Jobs) -> None:
    values = [bytes([number]) * (300 * KIB) for number in range(4)]
    jobs.jobs.start(take(1, *values))
    assert not jobs.took_place_here()[0] and bytes(jobs.bytes[: 1200 * KIB]) == b"".join(values)
    jobs.jobs.start(take(2, *values[:3]))
    assert jobs.took_place_here()[0]
    for extents, here in [(((0, 600 * KIB), (MIB, 600 * KIB)), False), (((0, 300 * KIB), (MIB, 0)), True)]:
        jobs.jobs.start(SealExtents(3, extents))
        assert jobs.took_place_here()[0] == here


def test_a_job_that_fails_is_answered_wherever_it_is_done(jobs: Jobs) -> None:
    """No client of this name was met: its memory cannot be read."""
    for jobs.busy in (False, True):
        jobs.jobs.start(TakeValues(9, CLIENT, (ValuePart(0, 100, 0, None), ValuePart(MIB, 0, 0, None))))
        assert jobs.took_place_here() == (not jobs.busy, ValuesTaken(9, (None, None)))
