"""Whole blocks that come up from DRAM beside the rows of a plan.

A swap-in by ``StepPlan.copies`` holds up every row of its plan. Where KV may lie by layer there is a thread, or a
stream, that copies beside the rows: the sequence gets its blocks with one plan, and has rows from the next one on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.instance.events import MovePages, StepPlan
from memserve.instance.layered_kv import whole_blocks
from memserve.types import Tier

if TYPE_CHECKING:
    from memserve.instance.sequence import Sequence
    from memserve.mempool.pool import BlockPool


@dataclass(frozen=True, slots=True)
class _Arrival:
    plan: StepPlan
    order: MovePages
    dram_blocks: list[int]


class Arrivals:
    """The blocks that the last plan brings up, and where they come from."""

    __slots__ = ("_coming", "_layers", "_pool")

    def __init__(self, pool: BlockPool, layers: int) -> None:
        self._pool = pool
        self._layers = layers
        self._coming: dict[Sequence, _Arrival] = {}

    def begin(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Give ``sequence`` HBM blocks, and let ``plan`` copy what it has in DRAM into them. False: no room."""
        pool = self._pool
        blocks = pool.allocate(len(sequence.dram_blocks))
        if blocks is None:
            return False
        dram_blocks, sequence.dram_blocks, sequence.blocks = sequence.dram_blocks, [], blocks
        order = whole_blocks(self._layers, Tier.DRAM, dram_blocks, Tier.HBM, blocks)
        plan.moves.append(order)
        self._coming[sequence] = _Arrival(plan, order, dram_blocks)
        if pool.access is not None:
            pool.access.copied(Tier.DRAM, dram_blocks, Tier.HBM, blocks)
        return True

    def __bool__(self) -> bool:
        return bool(self._coming)

    def has(self, sequence: Sequence, plan: StepPlan | None = None) -> bool:
        """Whether ``plan`` (None: the last one, whichever that is) brings blocks up for ``sequence``."""
        arrival = self._coming.get(sequence)
        return arrival is not None and (plan is None or arrival.plan is plan)

    def call_off(self, sequence: Sequence) -> list[int]:
        """The plan is still being made: take its copies back, and the HBM blocks. Returns the DRAM blocks."""
        arrival = self._coming.pop(sequence)
        arrival.plan.moves[:] = [order for order in arrival.plan.moves if order is not arrival.order]
        self._pool.release(sequence.blocks)
        return arrival.dram_blocks

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` has ended, or gives its blocks up: later plans may write to either."""
        arrival = self._coming.pop(sequence, None)
        if arrival is not None:
            self._pool.release_dram(arrival.dram_blocks)

    def settle(self) -> None:
        """The next plan is begun: to it, all blocks are up."""
        for arrival in self._coming.values():
            self._pool.release_dram(arrival.dram_blocks)
        self._coming.clear()
