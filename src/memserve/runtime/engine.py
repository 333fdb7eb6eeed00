"""The engine: hosts one instance machine in a thread of its own and one device in another (level 3).

Events go into one inbox, from clients and from the device alike. The engine thread is the only one that touches the
machine; while the device works on a plan, the machine has already prepared the next one.

    client threads --submit--> inbox --> [engine thread: machine.handle] --plans--> [device thread: execute]
                                 ^                |                                        |
                                 |                +--> sinks (new tokens)                  |
                                 +------------------------- StepFinished ------------------+
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from memserve.instance.actions import Action, EmitTokens, RejectRequest, RunStep, StepPlan
from memserve.instance.events import (
    ClockTicked,
    Event,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
    StepFailed,
    StepFinished,
)
from memserve.instance.machine import Instance
from memserve.runtime.ports import Device
from memserve.runtime.stats import EngineStats, StepTimer
from memserve.types import FinishReason, Request, TokenOutput

log = logging.getLogger(__name__)

TICK_S = 0.02
"""How often deadlines are looked at while nothing else happens."""

STATS_TIMEOUT_S = 5.0
"""How long a reader of the statistics waits for the engine thread."""

CLOSING_RETRY_S = 5.0
"""After this long another engine may have taken the place of one that closes."""


class Refusal(enum.Enum):
    """Why an engine refuses a request."""

    IMPOSSIBLE = "impossible"  # it could never run here
    BUSY = "busy"  # too many wait already: try again later
    CLOSING = "closing"  # the engine is going away, or broke: try another server


@dataclass(frozen=True, slots=True)
class Rejected:
    """The engine will not run this request. ``retry_after_s`` is ``None`` when trying again cannot help."""

    request_id: str
    reason: str
    retry_after_s: float | None
    refusal: Refusal = Refusal.IMPOSSIBLE


class EngineStopped(Exception):
    """The engine was closed or broke, so it cannot say anything about itself."""


Sink = Callable[[TokenOutput | Rejected], None]


class _Close:
    """Inbox item: no more events will follow."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """Inbox item: someone wants a snapshot, taken between two events so that it is consistent."""

    answer: Future[EngineStats]


@dataclass(slots=True)
class _Waiter:
    """Who waits for a request, and which of its sequences have not ended."""

    sink: Sink
    running: list[int]


class Engine:
    """Runs requests: thread-safe ``submit``, answers through a sink that the engine thread calls."""

    def __init__(self, machine: Instance, device: Device, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._machine = machine
        self._device = device
        self._clock_ns = clock_ns
        self._inbox: queue.SimpleQueue[Event | _Ask | _Close] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        #: all and only the requests that were submitted and have not ended
        self._waiters: dict[str, _Waiter] = {}
        self._lock = threading.Lock()  # guards _waiters and _closing against submitters
        self._closing = False  # refuse new requests
        self._closed = False  # `close` was called
        self._stopped = False  # the engine thread handles no more events
        self._timer = StepTimer()
        self._threads = [
            threading.Thread(target=self._run_machine, name="memserve-engine", daemon=True),
            threading.Thread(target=self._run_device, name="memserve-device", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Run ``request``. ``sink`` gets every :class:`TokenOutput`, or one :class:`Rejected`."""
        with self._lock:
            if not self._closing:
                self._waiters[request.request_id] = _Waiter(sink, list(range(request.n)))
                self._inbox.put(RequestArrived(request))
                return
        sink(Rejected(request.request_id, "the server is shutting down", CLOSING_RETRY_S, Refusal.CLOSING))

    def cancel(self, request_id: str) -> None:
        """End every sequence of the request; unknown ids are ignored (it may just have ended)."""
        self._inbox.put(RequestCancelled(request_id))

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence with ``FinishReason.STOP``: the edge found a stop string."""
        self._inbox.put(SequenceStopped(request_id, index))

    def stats(self) -> EngineStats:
        """A consistent snapshot of counters and gauges.

        Raises ``TimeoutError`` when the engine is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        ask = _Ask(Future())
        self._inbox.put(ask)
        if self._stopped:  # set before the inbox is emptied for the last time: nobody asks in vain
            raise EngineStopped
        return ask.answer.result(timeout=STATS_TIMEOUT_S)

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""
        with self._lock:
            return len(self._waiters)

    @property
    def closing(self) -> bool:
        """Whether new requests are refused: the engine is closing, or its machine broke."""
        return self._closing

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, stop both threads and free the device."""
        with self._lock:
            if self._closed:
                return
            self._closing = self._closed = True
            running = list(self._waiters)
        for request_id in running:
            self._inbox.put(RequestCancelled(request_id))
        self._inbox.put(_Close())
        for thread in self._threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the engine did not stop within %.1f s", timeout_s)
            return
        self._device.close()

    # -- engine thread

    def _run_machine(self) -> None:
        try:
            self._handle_events()
        finally:
            self._plans.put(None)
            self._stopped = True
            self._disappoint_askers()

    def _disappoint_askers(self) -> None:
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, _Ask):
                item.answer.set_exception(EngineStopped())

    def _handle_events(self) -> None:
        while True:
            try:
                event = self._inbox.get(timeout=TICK_S if self._waiters else None)
            except queue.Empty:
                event = ClockTicked()
            if isinstance(event, _Close):
                return
            if isinstance(event, _Ask):
                self._answer(event)
                continue
            try:
                self._handle(event)
            except Exception:
                log.exception("the instance machine failed on %s; its requests end with an error", type(event).__name__)
                self._fail_everything()
                return

    def _answer(self, ask: _Ask) -> None:
        """Whatever is wrong with the figures is the asker's to know: the requests go on."""
        try:
            ask.answer.set_result(self._timer.snapshot(self._machine.stats()))
        except Exception as error:
            ask.answer.set_exception(error)

    def _handle(self, event: Event) -> None:
        started_ns = time.perf_counter_ns()
        actions = self._machine.handle(event, self._clock_ns())
        self._timer.machine_worked(time.perf_counter_ns() - started_ns)
        if isinstance(event, StepFinished):
            self._timer.step_finished(event.device_ns)
        self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case RunStep(plan):
                    self._plans.put(plan)
                case EmitTokens(outputs):
                    for output in outputs:
                        self._deliver(output)
                case RejectRequest(request_id, reason, retry_after_s):
                    refusal = Refusal.IMPOSSIBLE if retry_after_s is None else Refusal.BUSY
                    self._tell(self._forget(request_id), Rejected(request_id, reason, retry_after_s, refusal))

    def _deliver(self, output: TokenOutput) -> None:
        waiter = self._waiters.get(output.request_id)
        if waiter is None:
            return
        if output.finish_reason is not None:
            waiter.running.remove(output.index)
            if not waiter.running:
                self._forget(output.request_id)
        if not self._tell(waiter.sink, output):
            self._forget(output.request_id)
            self._inbox.put(RequestCancelled(output.request_id))

    @staticmethod
    def _tell(sink: Sink | None, news: TokenOutput | Rejected) -> bool:
        """Give ``news`` to ``sink``; ``False`` when it raised. Whatever a client's sink does, the others go on."""
        try:
            if sink is not None:
                sink(news)
        except Exception:
            log.exception("the sink of request %s failed", news.request_id)
            return False
        return True

    def _forget(self, request_id: str) -> Sink | None:
        with self._lock:
            waiter = self._waiters.pop(request_id, None)
        return waiter.sink if waiter else None

    def _fail_everything(self) -> None:
        with self._lock:
            self._closing = True
            waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            for index in waiter.running:
                self._tell(waiter.sink, TokenOutput(request_id, index, (), finish_reason=FinishReason.ERROR))

    # -- device thread

    def _run_device(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._inbox.put(self._device.execute(plan))
            except Exception as error:
                log.exception("step %d failed on the device", plan.step_id)
                self._inbox.put(StepFailed(plan.step_id, f"{type(error).__name__}: {error}"))
