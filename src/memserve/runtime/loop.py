"""One machine in a thread of its own: events in through one inbox, actions out through one function.

Clients, devices, mailboxes and data ports all post into the inbox; the loop's thread is the only one that touches the
machine. Between events it wakes when the machine's next deadline comes, and not before: an idle machine costs nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from memserve.serving import ClockTicked
from memserve.units import NS_PER_S

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

    def handle(self, event: EventT, now: int) -> list[Any]:
        """Take ``event`` into account at time ``now`` (ns) and say what is to be done, in order."""


class _Close:
    """Inbox item: no more events will follow."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """Inbox item: a look at the machine between two events, where its state is consistent."""

    question: Callable[[], Any]
    answer: Future[Any]

    def settle(self) -> None:
        """Whatever is wrong with the answer is the asker's to know: the machine goes on."""
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
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``perform(event, actions, spent_ns)`` does what the machine asks for, in the loop's thread.

        ``on_broken`` is called there when the machine or ``perform`` raised, ``on_end`` when no event will be handled
        any more, whatever the reason.
        """
        self._machine = machine
        self._perform = perform
        self._on_broken = on_broken
        self._on_end = on_end
        self._clock_ns = clock_ns
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = False  # no more events are handled
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to handle events; what was posted before is not lost."""
        self._thread.start()

    def post(self, event: EventT) -> None:
        """Put ``event`` into the inbox. Thread-safe, never blocks."""
        self._inbox.put(event)

    @property
    def has_waiting(self) -> bool:
        """Whether events wait to be handled. Thread-safe."""
        return not self._inbox.empty()

    def ask(self, question: Callable[[], Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer of ``question()``, called in the loop's thread between two events.

        Raises ``TimeoutError`` when the loop is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        ask = _Ask(question, Future())
        self._inbox.put(ask)
        if self._stopped:  # set before the inbox is emptied for the last time: no question stays without an answer
            raise EngineStopped
        answer: Answer = ask.answer.result(timeout=timeout_s)
        return answer

    def call(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in the loop's thread between two events, and go on here. Thread-safe, never blocks."""
        answer: Future[Any] = Future()
        answer.add_done_callback(_complain)
        self._inbox.put(_Ask(function, answer))

    def close(self, timeout_s: float) -> bool:
        """Handle what is in the inbox, then end. ``False`` when that took longer than ``timeout_s``."""
        self._inbox.put(_Close())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the loop's thread

    def _run(self) -> None:
        try:
            self._handle_events()
        finally:
            self._on_end()
            self._stopped = True
            self._disappoint_askers()

    def _handle_events(self) -> None:
        deadline_ns: int | None = None
        while True:
            item = self._next(deadline_ns)
            if isinstance(item, _Close):
                return
            if isinstance(item, _Ask):
                item.settle()
                continue
            try:
                deadline_ns = self._handle(item)
            except Exception:
                log.exception("the %s machine failed on %s", type(self._machine).__name__, type(item).__name__)
                self._on_broken()
                return

    def _next(self, deadline_ns: int | None) -> Any:
        if deadline_ns is None:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=max(TICK_MIN_S, (deadline_ns - self._clock_ns()) / NS_PER_S))
        except queue.Empty:
            return ClockTicked()

    def _handle(self, event: Any) -> int | None:
        started_ns = time.perf_counter_ns()
        actions = self._machine.handle(event, self._clock_ns())
        self._perform(event, actions, time.perf_counter_ns() - started_ns)
        return self._machine.next_deadline_ns

    def _disappoint_askers(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Ask):
                item.answer.set_exception(EngineStopped())


def _complain(answer: Future[Any]) -> None:
    """No caller looks at the answer of a posted call: an error is at least in the log."""
    error = answer.exception()
    if error is not None and not isinstance(error, EngineStopped):
        log.error("a call in the machine's thread failed", exc_info=error)
