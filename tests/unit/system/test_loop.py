"""A loop whose events are handled by the threads that post them: one at a time, each event once, none forgotten."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

from memserve.base.types import ClockTicked
from memserve.base.units import NS_PER_S
from memserve.system.loop import EVENTS_A_TURN, EngineStopped, MachineLoop, SharedLoop

WAIT_S = 30.0


class Recorder:
    """A machine that notes which thread brought which event, and whether two ever came at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.overlaps = 0
        self.next_deadline_ns: int | None = None
        self.ticked = threading.Event()
        self._busy = threading.Lock()

    def handle(self, event: Any, now_ns: int) -> list[Any]:
        if not self._busy.acquire(blocking=False):
            self.overlaps += 1
            return []
        try:
            self.seen.append((threading.current_thread().name, event))
            if isinstance(event, ClockTicked):
                self.next_deadline_ns = None
                self.ticked.set()
            if isinstance(event, BaseException):
                raise event
            return [event]
        finally:
            self._busy.release()

    def events(self) -> list[Any]:
        return [event for _, event in self.seen if not isinstance(event, ClockTicked)]


@pytest.fixture
def machine() -> Recorder:
    return Recorder()


def loop_of(machine: Recorder, perform=lambda event, actions, spent_ns: None, broken=lambda: None) -> SharedLoop[Any]:
    return SharedLoop(machine, perform, on_broken=broken, name="own")


def test_events_of_many_threads_run_once_in_thread_order(machine: Recorder) -> None:
    loop = loop_of(machine)
    loop.start()
    posters = [threading.Thread(target=lambda n=n: [loop.post_event((n, i)) for i in range(2000)]) for n in range(6)]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join(WAIT_S)
    assert loop.close(WAIT_S)
    assert machine.overlaps == 0
    assert sorted(machine.events()) == [(n, i) for n in range(6) for i in range(2000)]
    for n in range(6):
        assert [i for m, i in machine.events() if m == n] == list(range(2000))


def test_idle_loop_handles_event_on_the_posting_thread(machine: Recorder) -> None:
    loop = loop_of(machine)
    loop.start()
    assert loop.query_machine(lambda: "started") == "started"
    loop.post_event("here")
    assert (threading.current_thread().name, "here") in machine.seen
    assert loop.close(WAIT_S)


def test_events_before_start_wait_for_it(machine: Recorder) -> None:
    loop = loop_of(machine)
    loop.post_event("early")
    assert machine.seen == []
    loop.start()
    assert loop.close(WAIT_S)
    assert machine.events() == ["early"]


def test_event_posted_during_actions_comes_next(machine: Recorder) -> None:
    loop = loop_of(machine, lambda event, actions, spent_ns: loop.post_event("second") if event == "first" else None)
    loop.start()
    loop.post_event("first")
    assert loop.close(WAIT_S)
    assert machine.events() == ["first", "second"]


def test_deadline_of_a_posted_event_is_kept(machine: Recorder) -> None:
    loop = loop_of(machine)
    machine.next_deadline_ns = time.monotonic_ns() + 3600 * NS_PER_S
    loop.start()
    loop.post_event("late")
    for _ in range(20):
        machine.ticked.clear()
        machine.next_deadline_ns = time.monotonic_ns() + NS_PER_S // 1000
        loop.post_event("soon")
        assert machine.ticked.wait(WAIT_S)
    assert loop.close(WAIT_S)
    assert all(name == "own" for name, event in machine.seen if isinstance(event, ClockTicked))


@pytest.mark.parametrize("kind", [MachineLoop, SharedLoop])
def test_deadline_of_before_the_start_needs_no_event(machine: Recorder, kind: type[MachineLoop[Any]]) -> None:
    """A store that asks to join while its router is being started anew hears nothing: it has to ask again."""
    machine.next_deadline_ns = time.monotonic_ns()
    loop = kind(machine, lambda event, actions, spent_ns: None, on_broken=lambda: None, name="own")
    loop.start()
    assert machine.ticked.wait(WAIT_S)
    assert loop.close(WAIT_S)


def test_a_long_queue_is_left_to_the_loops_own_thread(machine: Recorder) -> None:
    entered, goes_on = threading.Event(), threading.Event()

    def perform(event: Any, actions: list[Any], spent_ns: int) -> None:
        if event == "wait":
            entered.set()
            assert goes_on.wait(WAIT_S)

    loop = loop_of(machine, perform)
    loop.start()
    assert loop.query_machine(lambda: True)
    poster = threading.Thread(target=lambda: loop.post_event("wait"), name="poster")
    poster.start()
    assert entered.wait(WAIT_S)
    for number in range(5 * EVENTS_A_TURN):
        loop.post_event(number)  # returns at once: the poster has the turn
    goes_on.set()
    poster.join(WAIT_S)
    assert loop.close(WAIT_S)
    assert machine.events() == ["wait", *range(5 * EVENTS_A_TURN)]
    by_thread = Counter(name for name, _ in machine.seen)
    assert 1 <= by_thread["poster"] <= EVENTS_A_TURN
    assert by_thread["own"] > 0


def test_a_machine_that_fails_ends_the_loop_once(machine: Recorder) -> None:
    broken: list[str] = []
    loop = loop_of(machine, broken=lambda: broken.append(threading.current_thread().name))
    loop.start()
    loop.post_event(ValueError("planted"))
    with pytest.raises(EngineStopped):
        loop.query_machine(lambda: "not asked")
    loop.post_event("too late")
    assert loop.close(WAIT_S)
    assert len(broken) == 1
    assert "too late" not in machine.events()
