"""One instance machine and its device, each in a thread of its own (level 3).

While the device works on a plan, the machine has already prepared the next one::

    post --> inbox --> [engine thread: machine.handle] --plans--> [device thread: execute]
               ^                |                                        |
               |                +--> outlet (tokens, messages, ...)      |
               +------------------ LayerFinished, StepFinished ----------+
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from memserve.instance.events import Action, Event, LayerFinished, RunStep, StepFailed, StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.runtime.loop import ANSWER_TIMEOUT_S, MachineLoop
from memserve.runtime.ports import Device
from memserve.runtime.stats import EngineStats, StepTimer

log = logging.getLogger(__name__)

Outlet = Callable[[Action], None]
"""Takes every action that is not the device's, in the engine thread."""


class HostedInstance:
    """Runs an instance until it is closed. Whoever owns it posts events and gets what the machine says."""

    def __init__(
        self,
        machine: Instance,
        device: Device,
        outlet: Outlet,
        *,
        on_broken: Callable[[], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``on_broken`` is called in the engine thread when the machine raised: nothing will happen any more."""
        self.machine = machine
        self._device = device
        self._outlet = outlet
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._timer = StepTimer(bound_bytes=getattr(device, "bound_bytes", 0))  # devices without a model know none
        self._loop: MachineLoop[Event] = MachineLoop(
            machine, self._perform, on_broken=on_broken, on_end=self._end_plans, clock_ns=clock_ns
        )
        self._device_thread = threading.Thread(target=self._run_device, name="memserve-device", daemon=True)
        self.post = self._loop.post
        self.ask = self._loop.ask
        device.on_layer = self._layer_finished

    def start(self) -> None:
        """Begin to work."""
        self._loop.start()
        self._device_thread.start()

    def stats(self, timeout_s: float = ANSWER_TIMEOUT_S) -> EngineStats:
        """A consistent snapshot of counters and gauges; raises as :meth:`MachineLoop.ask`."""
        return self.ask(lambda: self._timer.snapshot(self.machine.stats()), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Handle what was posted, stop both threads and free the device; ``False`` when they did not stop in time."""
        stopped = self._loop.close(timeout_s)
        self._device_thread.join(timeout_s)
        if not stopped or self._device_thread.is_alive():
            log.warning("the engine did not stop within %.1f s", timeout_s)
            return False
        self._device.close()
        return True

    # -- engine thread

    def _perform(self, event: Event, actions: list[Action], spent_ns: int) -> None:
        self._timer.machine_worked(spent_ns)
        if isinstance(event, StepFinished):
            self._timer.step_finished(event.device_ns)
        for action in actions:
            if isinstance(action, RunStep):
                self._plans.put(action.plan)
            else:
                self._outlet(action)

    def _end_plans(self) -> None:
        self._plans.put(None)

    # -- device thread

    def _run_device(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self.post(self._device.execute(plan))
            except Exception as error:
                log.exception("step %d failed on the device", plan.step_id)
                self.post(StepFailed(plan.step_id, f"{type(error).__name__}: {error}"))

    def _layer_finished(self, step_id: int, layer: int) -> None:
        self.post(LayerFinished(step_id, layer))
