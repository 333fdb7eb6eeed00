"""Copies of pages beside the rows of plans, for sequences that lie by layer: complete blocks down, kept layers up."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from memserve.errors import check
from memserve.instance.events import MovePages, StepPlan
from memserve.instance.layered_kv import LayeredKV, Moving, whole_blocks
from memserve.types import Tier
from memserve.units import ceil_div

if TYPE_CHECKING:
    from memserve.instance.sequence import Sequence
    from memserve.mempool.pool import BlockPool


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
