"""OrbitFlow's placement (VLDB 2026), for comparison: an integer program chooses how many layers each request keeps.

Of each request that lies by layer, one of a few numbers of kept layers is chosen, or it is paused::

    least    waits + PAUSE * paused requests
    so that  sum of kept layers * frames of a layer      <=  HBM for kept layers
             pages read back * time of a page - computing <=  waits
             computing + waits                            <=  time that a token may take

Its token deposit, tokens that are handed out at an even pace, is counted for all contenders (``Point.tbt_met``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memserve.policy.layers import LayerBudget, LayerPolicy, Lying
from memserve.units import NS_PER_MS, NS_PER_S, ceil_div

SOLVES_EVERY = 16
"""Steps with the same requests between two programs; the paper solves one step ahead and when lengths drift."""
CHOICES = 9
"""Numbers of kept layers, evenly from none to all: the paper prunes to even distances, too."""
_PAUSE_MS = 1e6
_KEEPS_MS = 1e-3  # a kept layer that brings nothing is not worth a copy; but what is kept stays, at equal waits


@dataclass(frozen=True, eq=False)
class ProgramPolicy(LayerPolicy):
    """OrbitFlow's program in the place of our rule. Of one instance and one run: it remembers the last solution."""

    is_staggered: bool = False
    _last: dict[int, int] = field(default_factory=dict)
    _steps: list[int] = field(default_factory=lambda: [0])

    def to_park(self, lying: Sequence[Lying], budget: LayerBudget, step_ns: int, free_blocks: int) -> list[int]:
        """Solve where the requests have changed, or some steps have passed. Those that are paused are parked."""
        self._steps[0] += 1
        ready = [at for at, one in enumerate(lying) if one.may_park]
        numbers = {lying[at].number for at in ready}
        if not ready or (numbers == self._last.keys() and self._steps[0] < SOLVES_EVERY):
            return []
        self._steps[0] = 0
        self._last.clear()
        found = solve([lying[at] for at in ready], budget, step_ns, free_blocks)
        self._last.update({lying[at].number: kept for at, kept in zip(ready, found, strict=True) if kept is not None})
        return [at for at, kept in zip(ready, found, strict=True) if kept is None]

    def kept_most(self, number: int, num_layers: int) -> int:
        """What the last solution has; all, of a request that was not in it."""
        return self._last.get(number, num_layers)


def solve(lying: Sequence[Lying], budget: LayerBudget, step_ns: int, free_blocks: int) -> list[int | None]:
    """Layers that each keeps; None: it is paused. ``step_ns``: what a step's computing takes; 0: not known."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    layers = budget.num_layers
    page_ms = budget.page_bytes / budget.link_bytes_s * NS_PER_S / NS_PER_MS
    token_ms = budget.tpot_ns / NS_PER_MS
    compute_ms = min(step_ns / NS_PER_MS, token_ms)
    kept = sorted({layers * n // (CHOICES - 1) for n in range(CHOICES)})
    width = len(kept) + 1  # of one request: its choices, and the pause; behind all requests: the waits
    count = width * len(lying) + 1
    cost, frames, reads = np.zeros(count), np.zeros(count), np.zeros(count)
    one_each = np.zeros((len(lying), count))
    for row, one in enumerate(lying):
        at, each = row * width, ceil_div(one.entries, layers)
        one_each[row, at : at + width] = 1
        for choice, number in enumerate(kept):
            cost[at + choice] = _KEEPS_MS * abs(number - one.kept)
            frames[at + choice] = number * each
            reads[at + choice] = (layers - number) * one.entries * page_ms
        cost[at + width - 1] = _PAUSE_MS
    cost[-1], reads[-1] = 1, -1
    room = free_blocks + sum(one.kept * ceil_div(one.entries, layers) for one in lying)
    solution = milp(
        cost,
        integrality=np.append(np.ones(count - 1), 0),
        bounds=Bounds(np.zeros(count), np.append(np.ones(count - 1), token_ms - compute_ms)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(frames[None], ub=room),
            LinearConstraint(reads[None], ub=compute_ms),
        ],
        options={"time_limit": 1.0, "mip_rel_gap": 1e-3},
    )
    if solution.x is None:
        return [one.kept for one in lying]
    chosen = solution.x[:-1].reshape(len(lying), width).argmax(axis=1)
    return [kept[at] if at < len(kept) else None for at in chosen.tolist()]
