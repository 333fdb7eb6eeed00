"""What an engine counts about itself: the scheduler's own time beside the device's (level 3, row P5)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from memserve.instance.stats import InstanceStats

WINDOW_STEPS = 512
"""Steps over which medians are taken."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Totals count from the engine's start."""

    steps: int = 0
    machine_ns: int = 0
    """Time the instance machine took to think, in total."""
    device_ns: int = 0
    """Time the device worked, in total."""
    machine_step_ns: int = 0
    """Median thinking time a step, over the last steps."""
    device_step_ns: int = 0
    """Median device time a step, over the last steps."""
    instance: InstanceStats | None = None
    """The machine's own counters and its pool report."""

    @property
    def scheduler_share(self) -> float:
        """Thinking time as a share of the device's time, over everything so far."""
        return self.machine_ns / self.device_ns if self.device_ns else 0.0


@dataclass(slots=True)
class StepTimer:
    """Adds up the machine's and the device's time. Used by the engine thread only."""

    steps: int = 0
    machine_ns: int = 0
    device_ns: int = 0
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

    def snapshot(self, instance: InstanceStats) -> EngineStats:
        """The figures so far, with the machine's own."""
        return EngineStats(
            steps=self.steps,
            machine_ns=self.machine_ns,
            device_ns=self.device_ns,
            machine_step_ns=int(median(self._machine_steps_ns)) if self._machine_steps_ns else 0,
            device_step_ns=int(median(self._device_steps_ns)) if self._device_steps_ns else 0,
            instance=instance,
        )
