"""One machine in a thread of its own: events in through one inbox, actions out through one function.

Clients, devices, mailboxes and data ports all post into the inbox; the loop's thread is the only one that touches the
machine. Between events it wakes when the machine's next deadline comes, and not before: an idle machine costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from memserve.base.types import ClockTicked
from memserve.base.units import NS_PER_S

log = logging.getLogger(__name__)

TICK_MIN_S = 0.001
"""The shortest sleep before a deadline: one that lies in the past cannot make the loop spin."""

ANSWER_TIMEOUT_S = 5.0
"""How long a caller waits for the loop's answer."""

EventT = TypeVar("EventT", contravariant=True)
Answer = TypeVar("Answer")


class EngineStopped(Exception):
    """The engine was closed or broke, so it cannot say anything about itself."""


class Machine(Protocol[EventT]):
    """What a loop can host: an instance, a cluster."""

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending; ``None`` = no deadlines."""

    def handle(self, event: EventT, now_ns: int) -> list[Any]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order."""


class _Close:
    """Inbox item: no more events will follow."""


@dataclass(frozen=True, slots=True)
class _Query:
    """Inbox item: a look at the machine between two events, where its state is consistent."""

    question: Callable[[], Any]
    answer: Future[Any]

    def resolve_call(self) -> None:
        """Whatever is wrong with the answer is the caller's to know: the machine goes on."""
        try:
            self.answer.set_result(self.question())
        except Exception as error:
            self.answer.set_exception(error)


class MachineLoop(Generic[EventT]):
    """Runs one machine until it is closed, or breaks."""

    def __init__(
        self,
        machine: Machine[EventT],
        perform: Callable[[Any, list[Any], int], None],
        *,
        on_broken: Callable[[], None],
        on_end: Callable[[], None] = lambda: None,
        name: str = "memserve-engine",
    ) -> None:
        """``perform(event, actions, spent_ns)`` does what the machine asks for, in the loop's thread.

        ``on_broken`` is called there when the machine or ``perform`` raised, ``on_end`` when no event will be handled
        any more, whatever the reason.
        """
        self._machine = machine
        self._perform = perform
        self._on_broken = on_broken
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = False  # no more events are handled
        self._deadline_ns: int | None = None  # the machine's, after its last event
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin to handle events; what was posted before is not lost. A machine that has been started has deadlines
        already, though nothing may ever be posted: the answer to what it has sent may be lost."""
        self._deadline_ns = self._machine.next_deadline_ns
        self._thread.start()

    def post_event(self, event: EventT) -> None:
        """Put ``event`` into the inbox. Thread-safe, never blocks."""
        self.enqueue_event(event)
        self.wake_loop()

    def enqueue_event(self, event: EventT) -> None:
        """Half of :meth:`post_event`, for callers with a lock: :meth:`wake_loop` follows when they have given it
        back."""
        self._inbox.put(event)

    def wake_loop(self) -> None:
        """The inbox has got something: its thread knows."""

    @property
    def has_waiting(self) -> bool:
        """Whether events wait to be handled. Thread-safe."""
        return not self._inbox.empty()

    def query_machine(self, question: Callable[[], Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer of ``question()``, called in the loop's thread between two events.

        Raises ``TimeoutError`` when the loop is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        ask = _Query(question, Future())
        self._inbox.put(ask)
        self.wake_loop()
        if self._stopped:  # set before the inbox is emptied for the last time: no question stays without an answer
            raise EngineStopped
        answer: Answer = ask.answer.result(timeout=timeout_s)
        return answer

    def call_in_loop(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in the loop's thread between two events, and go on here. Thread-safe, never blocks."""
        answer: Future[Any] = Future()
        answer.add_done_callback(_log_unhandled)
        self._inbox.put(_Query(function, answer))
        self.wake_loop()

    def close(self, timeout_s: float) -> bool:
        """Handle what is in the inbox, then end. ``False`` when that took longer than ``timeout_s``."""
        self._inbox.put(_Close())
        self.wake_loop()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the loop's thread

    def _run_loop(self) -> None:
        try:
            self._handle_events()
        finally:
            self._on_end()
            self._stopped = True
            self._fail_pending_calls()

    def _handle_events(self) -> None:
        while self._handle_item(self._next_item()):
            pass

    def _next_item(self) -> Any:
        if self._deadline_ns is None:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=self._time_left_s(self._deadline_ns))
        except queue.Empty:
            return ClockTicked()

    def _time_left_s(self, deadline_ns: int) -> float:
        return max(TICK_MIN_S, (deadline_ns - time.monotonic_ns()) / NS_PER_S)

    def _handle_item(self, item: Any) -> bool:
        """Handle one item of the inbox. False: no more will be handled."""
        if isinstance(item, _Close):
            return False
        if isinstance(item, _Query):
            item.resolve_call()
            return True
        try:
            started_ns = time.perf_counter_ns()
            actions = self._machine.handle(item, time.monotonic_ns())
            self._perform(item, actions, time.perf_counter_ns() - started_ns)
            self._deadline_ns = self._machine.next_deadline_ns
        except Exception:
            log.exception("the %s machine failed on %s", type(self._machine).__name__, type(item).__name__)
            self._on_broken()
            return False
        return True

    def _fail_pending_calls(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Query):
                item.answer.set_exception(EngineStopped())


EVENTS_A_TURN = 64
"""Events that a posting thread handles before the rest is left to the loop's own thread."""


class SharedLoop(MachineLoop[EventT]):
    """A loop whose events are handled by the thread that posts them, where no other is handling some: then that one
    handles these as well. Its own thread is left with deadlines, and with the rest of long queues.

    For machines whose events take little time and come from threads that all need the interpreter: to wake another
    thread for each costs more than the event. One thread at a time has the turn, so the machine still has one mutator.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As of :class:`MachineLoop`; ``perform`` and ``on_broken`` are called in the thread that has the turn."""
        super().__init__(*args, **options)
        self._turn = threading.Lock()
        self._is_open = False  # events are handled
        self._wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()  # wakes its own thread
        self._ticks_in: asyncio.AbstractEventLoop | None = None
        self._wakes_ns = 0  # when that thread will look at the deadline anyway

    def start(self) -> None:
        """Begin to handle events; what was posted before is handled first."""
        self._deadline_ns = self._machine.next_deadline_ns  # before any thread may have the turn
        self._is_open = True
        self._thread.start()

    def tick_in(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """From now on deadlines are looked at in ``loop``, which reads what others say; None: in a thread. While
        ``loop`` is blocked nothing is heard, so no silence may end there."""
        self._ticks_in = loop
        self._wakeup.put(None)

    def wake_loop(self) -> None:
        """The inbox has got something: handle it, unless another thread is at it."""
        self._handle_waiting(EVENTS_A_TURN)

    def _handle_waiting(self, most: int | None) -> None:
        """Handle what waits. The thread that gives the turn back looks once more, so nothing is forgotten."""
        while self._is_open and not self._inbox.empty() and self._turn.acquire(blocking=False):
            try:
                self._drain_inbox(most)
            finally:
                self._turn.release()
            if most is not None and not self._inbox.empty():
                self._wakeup.put(None)
                return

    def _drain_inbox(self, most: int | None) -> None:
        items_left = most
        while self._is_open and items_left != 0:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                break
            self._is_open = self._handle_item(item)
            items_left = None if items_left is None else items_left - 1
        if not self._is_open or (self._deadline_ns is not None and self._deadline_ns < self._wakes_ns):
            self._wakeup.put(None)

    # -- its own thread

    def _handle_events(self) -> None:
        while True:
            self._handle_waiting(None)
            self._wakes_ns = sys.maxsize  # before the deadline is read: one that is set in between rings the bell
            if not self._is_open:
                return
            deadline_ns = self._deadline_ns
            if deadline_ns is not None:
                self._wakes_ns = deadline_ns
            try:
                self._wakeup.get(timeout=None if deadline_ns is None else self._time_left_s(deadline_ns))
            except queue.Empty:
                self._check_deadline()

    def _check_deadline(self) -> None:
        loop = self._ticks_in
        if loop is None or loop.is_closed():
            self._inbox.put(ClockTicked())
            return
        with suppress(RuntimeError):  # it has just been closed
            loop.call_soon_threadsafe(self._tick_in_loop)
            self._wakeup.get()

    def _tick_in_loop(self) -> None:
        self._inbox.put(ClockTicked())
        self.wake_loop()
        self._wakeup.put(None)


def _log_unhandled(answer: Future[Any]) -> None:
    """No caller looks at the answer of a posted call: an error is at least in the log."""
    error = answer.exception()
    if error is not None and not isinstance(error, EngineStopped):
        log.error("a call in the machine's thread failed", exc_info=error)
