"""Copies of pages beside the rows of plans, for sequences that lie by layer: complete blocks down, kept layers up.

Whole blocks that come up from DRAM beside the rows of plans.

A swap-in by ``StepPlan.copies`` holds up every row of its plan. Where KV may lie by layer there is a thread, or a
stream, that copies beside the rows. A plan ends when its copies have ended, so it takes only as many as the link
carries beside its rows; the sequence has rows from the first plan on that is begun when all of them are up.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.base.units import ceil_div
from memserve.instance.events import MovePages, StepPlan
from memserve.instance.layerwise.state import LayeredKV, Moving, whole_blocks

if TYPE_CHECKING:
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.pool import BlockPool


class LayerMoves:
    """Begins copies with a plan, and puts what they have filled to use with the next one."""

    __slots__ = ("_block_tokens", "_layers", "_pool")

    def __init__(self, pool: BlockPool, layers: int, block_tokens: int) -> None:
        self._pool = pool
        self._layers = layers
        self._block_tokens = block_tokens

    def complete(self, sequence: Sequence, kv: LayeredKV) -> int:
        """Whole blocks, behind those that lie by layer, in which every token is known and computed."""
        return min(sequence.computed, sequence.known) // self._block_tokens - kv.first - len(kv.dram_blocks)

    def settle(self, sequence: Sequence, kv: LayeredKV, moving: Moving) -> None:
        """The plan that moves has been made before: to the next one, all is where it should be."""
        count = len(moving.blocks)
        check(sequence.blocks[kv.first : kv.first + count] == moving.blocks, "blocks that move are not where they were")
        del sequence.blocks[kv.first : kv.first + count]
        self._pool.release(moving.blocks)
        kv.dram_blocks += moving.dram_blocks
        for layer, frames in moving.frames.items():
            kv.kept.setdefault(layer, []).extend(frames)
        for old, new in zip(kv.staging, moving.staging, strict=True):
            old.extend(new)
        kv.moving, kv.changed = None, True

    def spill(self, plan: StepPlan, sequence: Sequence, kv: LayeredKV, make_room: Callable[[], bool]) -> bool:
        """Move complete blocks to DRAM. False: there are none, or no room. ``make_room`` gives up a layer that is kept
        somewhere, and returns whether there was one."""
        had, count = len(kv.dram_blocks), self.complete(sequence, kv)
        if count <= 0:
            return False
        dram = self._pool.allocate_dram_ids(count)
        if dram is None:
            return False
        more = ceil_div(had + count, self._layers) - len(kv.staging[0])
        frames = self._pool.allocate(more * (2 + len(kv.kept)))
        while frames is None and kv.kept and make_room():
            frames = self._pool.allocate(more * (2 + len(kv.kept)))
        if frames is None:
            self._pool.release_dram(dram)
            return False
        taken = iter(frames)
        fresh = [[next(taken) for _ in range(more)] for _ in range(2 + len(kv.kept))]
        blocks = sequence.blocks[kv.first : kv.first + count]
        moving = Moving(
            plan,
            whole_blocks(self._layers, Tier.HBM, blocks, Tier.DRAM, dram.tolist()),
            blocks=blocks,
            dram_blocks=dram.tolist(),
            frames=dict(zip(kv.kept, fresh[2:], strict=True)),
            staging=(fresh[0], fresh[1]),
        )
        pages = [self._kept_pages([*kv.kept[n], *moving.frames[n]], n, blocks, had) for n in kv.kept]
        if pages:
            src, dst = [page for some, _ in pages for page in some], [page for _, some in pages for page in some]
            moving.kept_order = MovePages(Tier.HBM, Tier.HBM, src, dst)
        self._begin(plan, kv, moving)
        return True

    def keep(self, plan: StepPlan, kv: LayeredKV, layer: int) -> None:
        """Bring ``layer`` up, to stay, if there is room."""
        frames = self._pool.allocate(len(kv.staging[0])) if kv.dram_blocks else None
        if frames is not None:
            src, dst = self._kept_pages(frames, layer, kv.dram_blocks, 0)
            up = MovePages(Tier.DRAM, Tier.HBM, src, dst)
            self._begin(plan, kv, Moving(plan, up, frames={layer: frames}))

    def _begin(self, plan: StepPlan, kv: LayeredKV, moving: Moving) -> None:
        kv.moving = moving
        plan.moves += [order for order in (moving.order, moving.kept_order) if order is not None]
        if moving.dram_blocks and self._pool.access is not None:
            self._pool.access.copied(Tier.HBM, moving.blocks, Tier.DRAM, moving.dram_blocks)

    def _kept_pages(self, frames: Many[int], layer: int, blocks: Many[int], first: int) -> tuple[list[int], list[int]]:
        """The pages of ``layer`` in ``blocks``, and where those of the entries from ``first`` on lie in ``frames``."""
        src = [block * self._layers + layer for block in blocks]
        entries = range(first, first + len(blocks))
        return src, [frames[at // self._layers] * self._layers + at % self._layers for at in entries]

    def call_off(self, kv: LayeredKV, moving: Moving) -> None:
        """Take back the copies of the plan that is being made."""
        moving.plan.moves[:] = [
            order for order in moving.plan.moves if order is not moving.order and order is not moving.kept_order
        ]
        self._pool.release_dram(moving.dram_blocks)
        self._pool.release(moving.hbm_frames)
        kv.moving = None


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


class SwapIns:
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
