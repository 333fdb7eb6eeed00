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

    def __init__(self, pool: BlockPool, layers: int, block_tokens: int) -> None:
        self._pool = pool
        self._layers = layers
        self._block_tokens = block_tokens

    def complete_blocks(self, sequence: Sequence, kv: LayeredKV) -> int:
        """Whole blocks, behind those that lie by layer, in which every token is known and computed."""
        return min(sequence.computed, sequence.known_length) // self._block_tokens - kv.first - len(kv.dram_blocks)

    def finish_copies(self, sequence: Sequence, kv: LayeredKV, moving: Moving) -> None:
        """The plan that moves has been made before: to the next one, all is where it should be."""
        count = len(moving.blocks)
        check(sequence.blocks[kv.first : kv.first + count] == moving.blocks, "blocks that move are not where they were")
        del sequence.blocks[kv.first : kv.first + count]
        self._pool.release(moving.blocks)
        kv.dram_blocks += moving.dram_blocks
        for layer, frames in moving.frames.items():
            kv.resident_layers.setdefault(layer, []).extend(frames)
        for old, new in zip(kv.staging, moving.staging, strict=True):
            old.extend(new)
        kv.moving, kv.changed = None, True

    def spill_blocks(self, plan: StepPlan, sequence: Sequence, kv: LayeredKV, evict_layer: Callable[[], bool]) -> bool:
        """Move complete blocks to DRAM. False: there are none, or no room. ``evict_layer`` gives up a layer that is
        kept somewhere, and returns whether there was one."""
        had, count = len(kv.dram_blocks), min(self.complete_blocks(sequence, kv), self._pool.available(Tier.DRAM))
        if count <= 0:
            return False
        more = ceil_div(had + count, self._layers) - len(kv.staging[0])
        frames = self._pool.allocate(more * (2 + len(kv.resident_layers)))
        while frames is None and kv.resident_layers and evict_layer():
            frames = self._pool.allocate(more * (2 + len(kv.resident_layers)))
        if frames is None:  # as many as the frames that it has hold
            count, more, frames = len(kv.staging[0]) * self._layers - had, 0, []
        dram = self._pool.allocate_dram_ids(count)
        if dram is None or not count:
            self._pool.release(frames)
            return False
        free_frames = iter(frames)
        fresh = [[next(free_frames) for _ in range(more)] for _ in range(2 + len(kv.resident_layers))]
        blocks = sequence.blocks[kv.first : kv.first + count]
        moving = Moving(
            plan,
            whole_blocks(self._layers, Tier.HBM, blocks, Tier.DRAM, dram.tolist()),
            blocks=blocks,
            dram_blocks=dram.tolist(),
            frames=dict(zip(kv.resident_layers, fresh[2:], strict=True)),
            staging=(fresh[0], fresh[1]),
        )
        pages = [
            self._resident_pages([*kv.resident_layers[n], *moving.frames[n]], n, blocks, had)
            for n in kv.resident_layers
        ]
        if pages:
            src, dst = [page for part, _ in pages for page in part], [page for _, part in pages for page in part]
            moving.kept_order = MovePages(Tier.HBM, Tier.HBM, src, dst)
        self._start_copies(plan, kv, moving)
        return True

    def make_resident(self, plan: StepPlan, kv: LayeredKV, layer: int) -> None:
        """Bring ``layer`` up, to stay, if there is room."""
        frames = self._pool.allocate(len(kv.staging[0])) if kv.dram_blocks else None
        if frames is not None:
            src, dst = self._resident_pages(frames, layer, kv.dram_blocks, 0)
            up = MovePages(Tier.DRAM, Tier.HBM, src, dst)
            self._start_copies(plan, kv, Moving(plan, up, frames={layer: frames}))

    def _start_copies(self, plan: StepPlan, kv: LayeredKV, moving: Moving) -> None:
        kv.moving = moving
        plan.moves += [order for order in (moving.order, moving.kept_order) if order is not None]
        if moving.dram_blocks and self._pool.access is not None:
            self._pool.access.on_copies_recorded(Tier.HBM, moving.blocks, Tier.DRAM, moving.dram_blocks)

    def _resident_pages(
        self, frames: Many[int], layer: int, blocks: Many[int], first: int
    ) -> tuple[list[int], list[int]]:
        """The pages of ``layer`` in ``blocks``, and where those of the entries from ``first`` on lie in ``frames``."""
        src = [block * self._layers + layer for block in blocks]
        entries = range(first, first + len(blocks))
        return src, [frames[entry // self._layers] * self._layers + entry % self._layers for entry in entries]

    def cancel_copies(self, kv: LayeredKV, moving: Moving) -> None:
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
    blocks_started: int = 0
    """Blocks that plans have copied, or copy."""
    order: MovePages | None = None
    """The copies of the newest plan."""

    @property
    def blocks_left(self) -> int:
        """Blocks that no plan has begun to copy."""
        return len(self.blocks) - self.blocks_started


class SwapIns:
    """Sequences with blocks that come up, in the order in which they began."""

    def __init__(self, pool: BlockPool, layers: int) -> None:
        self._pool = pool
        self._layers = layers
        self._pending: dict[Sequence, _Arrival] = {}
        self._plan: StepPlan | None = None  # that is being made
        self._room = 0  # blocks that it may still copy

    def __bool__(self) -> bool:
        return bool(self._pending)

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether blocks of ``sequence`` come up: it has no rows yet."""
        return sequence in self._pending

    def start_swap_in(self, sequence: Sequence) -> bool:
        """Give ``sequence`` HBM blocks, and begin to copy what it has in DRAM into them. False: no room."""
        blocks = self._pool.allocate(len(sequence.dram_blocks))
        if blocks is None:
            return False
        arrival = self._pending[sequence] = _Arrival(sequence.dram_blocks, blocks)
        sequence.dram_blocks, sequence.blocks = [], list(blocks)
        self._copy_next(arrival)
        return True

    def continue_copies(self, plan: StepPlan, blocks_max: int | None) -> None:
        """``plan`` is begun: to it, everything that was copied is up. Copy more beside its rows, ``blocks_max`` blocks
        at most (None: all of them) but at least one, so that what comes arrives."""
        for sequence, arrival in list(self._pending.items()):
            if not arrival.blocks_left:
                self._pool.release_dram(arrival.dram_blocks)
                del self._pending[sequence]
        self._plan = plan
        self._room = self._pool.config.hbm_blocks if blocks_max is None else max(1, blocks_max)
        for arrival in self._pending.values():
            arrival.order = None
            self._copy_next(arrival)

    def _copy_next(self, arrival: _Arrival) -> None:
        count = min(self._room, arrival.blocks_left)
        plan, pool, span = self._plan, self._pool, slice(arrival.blocks_started, arrival.blocks_started + count)
        if not count or plan is None:
            return
        dram_blocks, blocks = arrival.dram_blocks[span], arrival.blocks[span]
        arrival.order = whole_blocks(self._layers, Tier.DRAM, dram_blocks, Tier.HBM, blocks)
        arrival.blocks_started += count
        self._room -= count
        plan.moves.append(arrival.order)
        if pool.access is not None:
            pool.access.on_copies_recorded(Tier.DRAM, dram_blocks, Tier.HBM, blocks)

    def on_plan_made(self) -> None:
        """The plan is made: what comes later comes with the next one."""
        self._plan, self._room = None, 0

    def cancel_swap_in(self, sequence: Sequence) -> list[int]:
        """Take the HBM blocks of ``sequence`` back, and the copies of the plan that is being made. Returns the DRAM
        blocks, which have everything."""
        arrival, plan = self._pending.pop(sequence), self._plan
        if plan is not None and arrival.order is not None:
            plan.moves[:] = [order for order in plan.moves if order is not arrival.order]
        self._pool.release(sequence.blocks)
        return arrival.dram_blocks

    def forget_sequence(self, sequence: Sequence) -> None:
        """``sequence`` has ended, or gives its blocks up: later plans may write to either."""
        arrival = self._pending.pop(sequence, None)
        if arrival is not None:
            self._pool.release_dram(arrival.dram_blocks)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        for sequence, arrival in self._pending.items():
            check(len(arrival.blocks) == len(arrival.dram_blocks), "{}: blocks come from nowhere", sequence)
            check(
                0 <= arrival.blocks_started <= len(arrival.blocks),
                "{}: {} blocks are up",
                sequence,
                arrival.blocks_started,
            )
            check(sequence.blocks[: len(arrival.blocks)] == arrival.blocks, "{} has no room for what comes", sequence)
            check(not sequence.opened, "{} has rows before its blocks are up", sequence)
