"""Instances of several workers, for scenarios that have them: each computes its part of a plan at its own pace.

In production they meet (``model/crew.py``) before the end of a plan is told. Until the slowest one is through, others
would find its part of the pages as it was before.
"""

from __future__ import annotations

from random import Random

SHARDED_SHARE = 0.3
"""Of all scenarios, those whose instances have several workers."""


def workers_of(seed: int) -> int:
    """How many an instance has in the scenario of ``seed``."""
    random = Random(f"{seed}/workers")
    return random.choice([2, 3, 4]) if random.random() < SHARDED_SHARE else 1


class Workers:
    """When those of one instance are through with a plan."""

    def __init__(self, count: int, name: str) -> None:
        self._others, self._random = count - 1, Random(name)

    def told_ns(self, slowest_ns: int) -> int:
        """How long after a plan's begin its end is told, if the slowest of them takes ``slowest_ns``."""
        return self._meet([slowest_ns, *(int(slowest_ns * self._random.random()) for _ in range(self._others))])

    def _meet(self, through_ns: list[int]) -> int:
        return max(through_ns)
