"""Whole blocks that come up from DRAM beside the rows of plans.

A swap-in by ``StepPlan.copies`` holds up every row of its plan. Where KV may lie by layer there is a thread, or a
stream, that copies beside the rows. A plan ends when its copies have ended, so it takes only as many as the link
carries beside its rows; the sequence has rows from the first plan on that is begun when all of them are up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.errors import check
from memserve.instance.events import MovePages, StepPlan
from memserve.instance.layered_kv import whole_blocks
from memserve.types import Tier

if TYPE_CHECKING:
    from memserve.instance.sequence import Sequence
    from memserve.mempool.pool import BlockPool


@dataclass(slots=True)
class _Arrival:
    dram_blocks: list[int]
    blocks: list[int]
    begun: int = 0
    """Blocks that plans have copied, or copy."""
    order: MovePages | None = None
    """The copies of the newest plan."""

    @property
    def left(self) -> int:
        """Blocks that no plan has begun to copy."""
        return len(self.blocks) - self.begun


class Arrivals:
    """Sequences with blocks that come up, in the order in which they began."""

    __slots__ = ("_coming", "_layers", "_plan", "_pool", "_room")

    def __init__(self, pool: BlockPool, layers: int) -> None:
        self._pool = pool
        self._layers = layers
        self._coming: dict[Sequence, _Arrival] = {}
        self._plan: StepPlan | None = None  # that is being made
        self._room = 0  # blocks that it may still copy

    def __bool__(self) -> bool:
        return bool(self._coming)

    def has(self, sequence: Sequence) -> bool:
        """Whether blocks of ``sequence`` come up: it has no rows yet."""
        return sequence in self._coming

    def begin(self, sequence: Sequence) -> bool:
        """Give ``sequence`` HBM blocks, and begin to copy what it has in DRAM into them. False: no room."""
        blocks = self._pool.allocate(len(sequence.dram_blocks))
        if blocks is None:
            return False
        arrival = self._coming[sequence] = _Arrival(sequence.dram_blocks, blocks)
        sequence.dram_blocks, sequence.blocks = [], list(blocks)
        self._copy(arrival)
        return True

    def go_on(self, plan: StepPlan, blocks_max: int | None) -> None:
        """``plan`` is begun: to it, everything that was copied is up. Copy more beside its rows, ``blocks_max`` blocks
        at most (None: all of them) but at least one, so that what comes arrives."""
        for sequence, arrival in list(self._coming.items()):
            if not arrival.left:
                self._pool.release_dram(arrival.dram_blocks)
                del self._coming[sequence]
        self._plan = plan
        self._room = self._pool.config.hbm_blocks if blocks_max is None else max(1, blocks_max)
        for arrival in self._coming.values():
            arrival.order = None
            self._copy(arrival)

    def _copy(self, arrival: _Arrival) -> None:
        count = min(self._room, arrival.left)
        plan, pool, some = self._plan, self._pool, slice(arrival.begun, arrival.begun + count)
        if not count or plan is None:
            return
        dram_blocks, blocks = arrival.dram_blocks[some], arrival.blocks[some]
        arrival.order = whole_blocks(self._layers, Tier.DRAM, dram_blocks, Tier.HBM, blocks)
        arrival.begun += count
        self._room -= count
        plan.moves.append(arrival.order)
        if pool.access is not None:
            pool.access.copied(Tier.DRAM, dram_blocks, Tier.HBM, blocks)

    def made(self) -> None:
        """The plan is made: what comes later comes with the next one."""
        self._plan, self._room = None, 0

    def call_off(self, sequence: Sequence) -> list[int]:
        """Take the HBM blocks of ``sequence`` back, and the copies of the plan that is being made. Returns the DRAM
        blocks, which have everything."""
        arrival, plan = self._coming.pop(sequence), self._plan
        if plan is not None and arrival.order is not None:
            plan.moves[:] = [order for order in plan.moves if order is not arrival.order]
        self._pool.release(sequence.blocks)
        return arrival.dram_blocks

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` has ended, or gives its blocks up: later plans may write to either."""
        arrival = self._coming.pop(sequence, None)
        if arrival is not None:
            self._pool.release_dram(arrival.dram_blocks)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        for sequence, arrival in self._coming.items():
            check(len(arrival.blocks) == len(arrival.dram_blocks), "{}: blocks come from nowhere", sequence)
            check(0 <= arrival.begun <= len(arrival.blocks), "{}: {} blocks are up", sequence, arrival.begun)
            check(sequence.blocks[: len(arrival.blocks)] == arrival.blocks, "{} has no room for what comes", sequence)
            check(not sequence.opened, "{} has rows before its blocks are up", sequence)
