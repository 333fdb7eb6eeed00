"""The engine: one instance for the clients of its own process. A cluster's members and its router use its
parts: :class:`HostedInstance` and :class:`EngineClients`.

client threads --submit--> inbox --> [machine] --> sinks (new tokens, called by the engine thread)
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from memserve.base.errors import UserError
from memserve.base.types import FinishReason, NamedPrefix, Request, TokenArray, TokenOutput
from memserve.host.stats import EngineStats
from memserve.instance.events import (
    Action,
    AdapterLoaded,
    AwaitMask,
    BuildGrammar,
    DropAdapter,
    Event,
    ForgetGrammar,
    GrammarBuilt,
    LayerFinished,
    LoadAdapter,
    MaskComputed,
    MoveGate,
    RunStep,
    StepFailed,
    StepFinished,
    StepPlan,
)
from memserve.instance.machine import Instance
from memserve.instance.stats import InstanceStats
from memserve.protocol.events import (
    AdapterAnswered,
    EmitTokens,
    KeyConflict,
    PrefixPinned,
    PrefixUnpinned,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
    ToolCalled,
)
from memserve.protocol.kv_hints import HintResult, KvHinted
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, HoldAdapters
from memserve.system.loop import ANSWER_TIMEOUT_S, MachineLoop
from memserve.system.memory import resident_bytes
from memserve.transport.ports import Device

log = logging.getLogger(__name__)

WINDOW_STEPS = 512
"""Steps over which medians are taken."""
CLOSING_RETRY_S = 5.0
"""After this long another engine may have taken the place of one that closes."""


@dataclass(slots=True)
class StepTimer:
    """Adds up the machine's and the device's time. Used by the engine thread only."""

    steps: int = 0
    machine_ns: int = 0
    device_ns: int = 0
    bound_bytes: int = 0
    _machine_mark_ns: int = 0  # machine_ns at the last finished step
    _machine_steps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _device_steps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def machine_worked(self, spent_ns: int) -> None:
        """The machine handled one event in ``spent_ns``."""
        self.machine_ns += spent_ns

    def step_finished(self, device_ns: int) -> None:
        """One step ended; what the machine spent since the last one belongs to it."""
        self.steps += 1
        self.device_ns += device_ns
        self._machine_steps_ns.append(self.machine_ns - self._machine_mark_ns)
        self._device_steps_ns.append(device_ns)
        self._machine_mark_ns = self.machine_ns

    def take_snapshot(self, instance: InstanceStats) -> EngineStats:
        """The figures so far, with the machine's own."""
        return EngineStats(
            steps=self.steps,
            machine_ns=self.machine_ns,
            device_ns=self.device_ns,
            machine_step_ns=int(median(self._machine_steps_ns)) if self._machine_steps_ns else 0,
            device_step_ns=int(median(self._device_steps_ns)) if self._device_steps_ns else 0,
            instance=instance,
            resident_bytes=resident_bytes(),
            bound_bytes=self.bound_bytes,
            read_at_ns=time.time_ns(),
        )


class Refusal(enum.Enum):
    """Why an engine refuses a request."""

    IMPOSSIBLE = "impossible"  # the request could never run here
    BUSY = "busy"  # too many wait already: try again later
    OVERLOADED = "overloaded"  # the request waited in vain: there is too much to do, whatever the tenant
    CLOSING = "closing"  # the engine is going away, or broke: try another server
    KEY_REUSED = "key reused"  # its key was given to another request
    TAKEN_OVER = "taken over"  # another connection with its key gets the answer


@dataclass(frozen=True, slots=True)
class Rejected:
    """The engine will not run this request. ``retry_after_s`` is ``None`` when trying again cannot help."""

    request_id: str
    reason: str
    retry_after_s: float | None
    refusal: Refusal = Refusal.IMPOSSIBLE


def rejection_of(action: RejectRequest) -> Rejected:
    """What the request's client is told."""
    if action.conflict is not None:
        refusal = Refusal.TAKEN_OVER if action.conflict is KeyConflict.TAKEN_OVER else Refusal.KEY_REUSED
    elif action.retry_after_s is None:
        refusal = Refusal.IMPOSSIBLE
    else:
        refusal = Refusal.OVERLOADED if action.overloaded else Refusal.BUSY
    return Rejected(action.request_id, action.reason, action.retry_after_s, refusal)


Sink = Callable[[TokenOutput | Rejected], None]


@dataclass(slots=True)
class _Waiter:
    """The sink of a request, and its sequences that have not ended."""

    sink: Sink
    running: list[int]


class EngineClients:
    """The sinks of all requests that have not ended. Anyone may submit; one thread delivers."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """``cancel`` is called for a request with a failed sink."""
        self._cancel = cancel
        #: all and only the requests that were submitted and have not ended
        self._waiters: dict[str, _Waiter] = {}
        self._lock = threading.Lock()  # guards _waiters and closing against submitters
        self.closing = False  # refuse new requests

    @property
    def requests_outstanding(self) -> int:
        """Requests that have not ended."""
        with self._lock:
            return len(self._waiters)

    def submit_request(self, request: Request, sink: Sink, start: Callable[[Request], None]) -> None:
        """``start(request)`` and remember its ``sink``, or tell the sink that it is too late."""
        with self._lock:
            if not self.closing:
                self._waiters[request.request_id] = _Waiter(sink, list(range(request.n)))
                start(request)
                return
        sink(Rejected(request.request_id, "the server is shutting down", CLOSING_RETRY_S, Refusal.CLOSING))

    def close(self) -> list[str]:
        """From now on every new request is refused. Returns the ids of those that run."""
        with self._lock:
            self.closing = True
            return list(self._waiters)

    def deliver_outputs(self, outputs: list[TokenOutput]) -> None:
        """Give each output to the sink of its request."""
        for output in outputs:
            self._deliver_output(output)

    def reject_request(self, action: RejectRequest) -> None:
        """Tell a client that its request will not run."""
        self._call_sink(self._remove_waiter(action.request_id), rejection_of(action))

    def fail_all(self) -> None:
        """The machine broke: every request ends with an error, and new ones are refused."""
        with self._lock:
            self.closing = True
            waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            for index in waiter.running:
                self._call_sink(waiter.sink, TokenOutput(request_id, index, (), finish_reason=FinishReason.ERROR))

    def _deliver_output(self, output: TokenOutput) -> None:
        waiter = self._waiters.get(output.request_id)
        if waiter is None:
            return
        if output.finish_reason is not None:
            waiter.running.remove(output.index)
            if not waiter.running:
                self._remove_waiter(output.request_id)
        if not self._call_sink(waiter.sink, output):
            self._remove_waiter(output.request_id)
            self._cancel(output.request_id)

    @staticmethod
    def _call_sink(sink: Sink | None, output: TokenOutput | Rejected) -> bool:
        """Give ``output`` to ``sink``; ``False`` when it raised. Whatever a client's sink does, the others go on."""
        try:
            if sink is not None:
                sink(output)
        except Exception:
            log.exception("the sink of request %s failed", output.request_id)
            return False
        return True

    def _remove_waiter(self, request_id: str) -> Sink | None:
        with self._lock:
            waiter = self._waiters.pop(request_id, None)
        return waiter.sink if waiter else None


class ClientCommands:
    """What clients ask of an engine besides answers: events for its machine, from any thread."""

    def __init__(self, post: Callable[[Any], None]) -> None:
        """``post`` takes the events."""
        self._post = post
        self._clients = EngineClients(self.cancel)

    def cancel(self, request_id: str) -> None:
        """End every sequence of the request; unknown ids are ignored (it may just have ended)."""
        self._post(RequestCancelled(request_id))

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence with ``FinishReason.STOP``: the edge found a stop string."""
        self._post(SequenceStopped(request_id, index))

    def note_tool(self, request_id: str, tool: str) -> None:
        """The answer calls ``tool``; unknown ids are ignored."""
        self._post(ToolCalled(request_id, tool))

    def pin_prefix(self, handle: str, tenant: str, tokens: TokenArray, ttl_ns: int, salt: str = "") -> None:
        """Keep what is cached of ``tokens`` for ``ttl_ns`` under a name. Repeated: renewed, extended."""
        self._post(PrefixPinned(handle, tenant, tokens, ttl_ns, salt))

    def unpin_prefix(self, handle: str, tenant: str) -> None:
        """Give the name up; unknown ones are ignored."""
        self._post(PrefixUnpinned(handle, tenant))

    def give_hint(self, hint: KvHinted) -> None:
        """Do something with cached KV, after what was asked for before."""
        self._post(hint)

    @property
    def requests_outstanding(self) -> int:
        """Requests that have not ended."""
        return self._clients.requests_outstanding

    @property
    def closing(self) -> bool:
        """Whether new requests are refused: the engine is closing, or its machine broke."""
        return self._clients.closing


# -- an instance and its device
#
# While the device works on a plan, the machine has already prepared the next one:
#
#     post --> inbox --> [engine thread: machine.handle] --plans--> [device thread: execute]
#                ^                |                                        |
#                |                +--> outlet (tokens, messages, ...)      |
#                +------------------ LayerFinished, StepFinished ----------+

Outlet = Callable[[Action], None]
"""Takes every action that is not the device's, in the engine thread."""


class HostedInstance:
    """Runs an instance until it is closed: its owner posts events and gets the machine's actions."""

    def __init__(
        self,
        machine: Instance,
        device: Device,
        outlet: Outlet,
        *,
        on_broken: Callable[[], None],
    ) -> None:
        """``on_broken`` is called in the engine thread when the machine raised: nothing will happen any more."""
        self.machine = machine
        self._device = device
        self._outlet = outlet
        self._plans: queue.SimpleQueue[StepPlan | Callable[[], None] | None] = queue.SimpleQueue()
        self._timer = StepTimer(bound_bytes=device.bound_bytes)
        self._loop: MachineLoop[Event] = MachineLoop(
            machine, self._perform_actions, on_broken=on_broken, on_end=self._end_plans
        )
        self._device_thread = threading.Thread(target=self._run_device, name="memserve-device", daemon=True)
        self._started_steps: queue.SimpleQueue[tuple[StepPlan, Callable[[], StepFinished]] | None] = queue.SimpleQueue()
        self._finisher_thread = threading.Thread(target=self._run_finisher, name="memserve-finishing", daemon=True)
        self.post_event = self._loop.post_event
        self.query_machine = self._loop.query_machine
        device.on_layer = self._layer_finished
        device.on_broken = lambda: self._loop.call_in_loop(on_broken)

    def start(self) -> None:
        """Begin to work."""
        self._loop.start()
        self._device_thread.start()
        self._finisher_thread.start()

    def read_stats(self, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineStats:
        """A consistent snapshot of counters and gauges; raises as :meth:`MachineLoop.query_machine`."""
        return self.query_machine(lambda: self._timer.take_snapshot(self.machine.stats()), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Handle what was posted, stop both threads and free the device; ``False`` when they did not stop in time."""
        stopped = self._loop.close(timeout_s)
        for thread in (self._device_thread, self._finisher_thread):
            thread.join(timeout_s)
        if not stopped or self._device_thread.is_alive() or self._finisher_thread.is_alive():
            log.warning("the engine did not stop within %.1f s", timeout_s)
            return False
        self._device.close()
        return True

    # -- engine thread

    def _perform_actions(self, event: Event, actions: list[Action], spent_ns: int) -> None:
        self._timer.machine_worked(spent_ns)
        if isinstance(event, StepFinished):
            self._timer.step_finished(event.device_ns)
        for action in actions:
            if isinstance(action, RunStep):
                self._plans.put(action.plan)
            elif isinstance(action, BuildGrammar):
                built = partial(self._grammar_built, action.job_id)
                self._device.build_grammar(action.job_id, action.grammar, built)
            elif isinstance(action, ForgetGrammar):
                self._device.forget_grammar(action.job_id)
            elif isinstance(action, AwaitMask):
                self._device.await_mask(action.slot, partial(self.post_event, MaskComputed(action.job_id)))
            elif isinstance(action, MoveGate):
                self._device.move_gate(action.gate, action.layers)
            elif isinstance(action, LoadAdapter):
                args = (action.files,)
                threading.Thread(target=self._load_adapter, args=args, name="memserve-adapter", daemon=True).start()
            elif isinstance(action, DropAdapter):
                self._plans.put(partial(self._device.drop_adapter, action.digest))
            else:
                self._outlet(action)

    def _grammar_built(self, job_id: int, error: str) -> None:
        self.post_event(GrammarBuilt(job_id, error))

    def _load_adapter(self, files: AdapterFiles) -> None:
        """In a thread of its own: what must be between two steps goes where plans go."""
        with self._reporting_adapter(files):
            install = self._device.read_adapter(files)

            def install_between_steps() -> None:
                with self._reporting_adapter(files):
                    install()
                    self.post_event(AdapterLoaded(files.digest))

            self._plans.put(install_between_steps)

    @contextmanager
    def _reporting_adapter(self, files: AdapterFiles) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.post_event(AdapterLoaded(files.digest, str(error)))
        except Exception as error:
            log.exception("the adapter %s cannot be loaded", files.name)
            self.post_event(AdapterLoaded(files.digest, f"{type(error).__name__}: {error}"))

    def _end_plans(self) -> None:
        self._plans.put(None)

    # -- device thread, and the one that waits for a device which the host is ahead of

    def _run_device(self) -> None:
        is_ahead = False  # then failures are answered behind what is begun, too
        while (plan := self._plans.get()) is not None:
            if not isinstance(plan, StepPlan):
                plan()
                continue
            try:
                begun = self._device.begin_step(plan)
                is_ahead = not isinstance(begun, StepFinished)
            except Exception as error:
                begun = partial(_raise_error, error)
            if isinstance(begun, StepFinished):
                self.post_event(begun)
            elif is_ahead:
                self._started_steps.put((plan, begun))
            else:
                self._finish_step(plan, begun)
        self._started_steps.put(None)

    def _run_finisher(self) -> None:
        while (started_step := self._started_steps.get()) is not None:
            self._finish_step(*started_step)

    def _finish_step(self, plan: StepPlan, finish: Callable[[], StepFinished]) -> None:
        try:
            self.post_event(finish())
        except Exception as error:
            log.exception("step %d failed on the device", plan.step_id)
            self.post_event(StepFailed(plan.step_id, f"{type(error).__name__}: {error}"))

    def _layer_finished(self, step_id: int, layer: int) -> None:
        self.post_event(LayerFinished(step_id, layer))


def _raise_error(error: Exception) -> StepFinished:
    raise error


class EngineAdapters:
    """The adapters that come and go at one instance, and the calls that wait for it."""

    def __init__(self, post: Callable[[HoldAdapters], None]) -> None:
        """``post``: tells the instance what it is to have."""
        self._post, self._lock = post, threading.Lock()
        self._named: dict[str, AdapterFiles] = {}
        self._waiting: list[tuple[AdapterFiles, Future[AdapterAnswered]]] = []

    def stored_adapters(self) -> tuple[AdapterFiles, ...]:
        """None: an engine alone keeps no records."""
        return ()

    def load_adapter(self, files: AdapterFiles) -> Future[AdapterAnswered]:
        """Have the instance load it, for requests that name it. The future says what came of it."""
        answered = Future[AdapterAnswered]()
        with self._lock:
            self._waiting.append((files, answered))
            self._post_wanted()
        return answered

    def unload_adapter(self, name: str, *, is_fixed: bool = False) -> Future[AdapterAnswered]:
        """No new request names it; those that have begun with it go on."""
        answered = Future[AdapterAnswered]()
        with self._lock:
            self._named.pop(name, None)
            self._post_wanted()
        answered.set_result(AdapterAnswered(0))
        return answered

    def on_held(self, report: AdaptersHeld) -> None:
        """The instance has answered."""
        failed = dict(report.failed)
        with self._lock:
            ready = [entry for entry in self._waiting if entry[0].digest in (*report.digests, *failed)]
            self._waiting = [entry for entry in self._waiting if entry not in ready]
            self._named |= {files.name: files for files, _ in ready if files.digest not in failed}
            if ready:
                self._post_wanted()  # without those that have failed or were replaced
        for files, answered in ready:
            answered.set_result(AdapterAnswered(0, failed.get(files.digest, "")))

    def _post_wanted(self) -> None:
        self._post(HoldAdapters((*self._named.values(), *(files for files, _ in self._waiting))))


class Engine(ClientCommands):
    """Runs requests: thread-safe ``submit``, answers through a sink that the engine thread calls."""

    def __init__(self, machine: Instance, device: Device) -> None:
        super().__init__(lambda event: self._instance.post_event(event))
        self._instance = HostedInstance(machine, device, self._perform_action, on_broken=self._clients.fail_all)
        self._closed = False
        self._adapters = EngineAdapters(self._instance.post_event)
        self.load_adapter, self.unload_adapter = self._adapters.load_adapter, self._adapters.unload_adapter
        self.stored_adapters = self._adapters.stored_adapters
        self._instance.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Run ``request``. ``sink`` gets every :class:`TokenOutput`, or one :class:`Rejected`."""
        self._clients.submit_request(request, sink, lambda request: self._instance.post_event(RequestArrived(request)))

    def hint_results(self, hint_ids: Sequence[str]) -> list[HintResult | None]:
        """What became of each hint; ``None``: not known yet, or any more. Raises as :meth:`stats`."""
        results = self._instance.machine.hints.results
        return self._instance.query_machine(lambda: [results.result_of(hint_id) for hint_id in hint_ids])

    def pinned_tokens(self, handles: Sequence[str], tenant: str) -> list[int | None]:
        """How much of it is pinned. Raises as :meth:`stats`."""
        machine = self._instance.machine
        return self._instance.query_machine(lambda: [machine.pinned_tokens(handle, tenant) for handle in handles])

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """What is kept under a tenant's names; their times are those of the engine's clock. Raises as :meth:`stats`."""
        return self._instance.query_machine(lambda: self._instance.machine.named_prefixes(tenant))

    def stats(self) -> EngineStats:
        """A consistent snapshot of counters and gauges.

        Raises ``TimeoutError`` when the engine is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        return self._instance.read_stats()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, stop both threads and free the device."""
        if self._closed:
            return
        self._closed = True
        for request_id in self._clients.close():
            self.cancel(request_id)
        self._instance.close(timeout_s)

    def _perform_action(self, action: Action) -> None:
        """Perform an action of the machine, in the engine thread. Without peers no action is a message."""
        if isinstance(action, EmitTokens):
            self._clients.deliver_outputs(action.outputs)
        elif isinstance(action, RejectRequest):
            self._clients.reject_request(action)
        elif isinstance(action, AdaptersHeld):
            self._adapters.on_held(action)
