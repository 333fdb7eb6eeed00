"""The ports through which a host reaches the world (level 3)."""

from __future__ import annotations

from typing import Protocol

from memserve.instance.actions import StepPlan
from memserve.instance.events import StepFinished


class Device(Protocol):
    """Executes step plans, strictly in the order in which it gets them."""

    def execute(self, plan: StepPlan) -> StepFinished:
        """Do the copies, compute the rows, draw the tokens. Blocks until done; called from one thread only."""

    def close(self) -> None:
        """Give back arenas and threads."""
