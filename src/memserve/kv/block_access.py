"""What unfinished plans may still do to blocks, and the copies that no plan carries yet.

The data behind ``kv/transfer/barriers.py``. Nothing is recorded for blocks that stay with a sequence, however many
plans use them. Three events are enough:

let go      an HBM block is given back: rows of plans made so far may read and write it, later ones do not
copied      a copy is recorded: the next plan reads the source and writes the destination
filled      the index takes a block as a plan computes its last tokens: no later plan writes to it; what is cached
            never changes

Only plans under way are remembered, and the next one: two or three small sets, whatever the pool's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memserve.base.errors import check
from memserve.base.types import CopyBlocks, Tier


class CopyLog:
    """Copies that a pool has recorded and no plan has taken, in order.

    Neighbouring copies of one direction are merged if that cannot change the result.

    The pairs of one :class:`CopyBlocks` may be executed in any order or at once. So a pair starts a new entry if it
    writes a block that the last entry reads or writes, or reads a block that the last entry writes.
    """

    def __init__(self) -> None:
        self._copies: list[CopyBlocks] = []
        self._read: set[tuple[Tier, int]] = set()  # of the last entry of `_copies`
        self._written: set[tuple[Tier, int]] = set()

    def __len__(self) -> int:
        return sum(len(copy.src) for copy in self._copies)

    def record_copies(self, src_tier: Tier, src: Sequence[int], dst_tier: Tier, dst: Sequence[int]) -> None:
        """Append the copies ``src[i] -> dst[i]``."""
        for source, target in zip(src, dst, strict=True):
            reads, writes = (src_tier, source), (dst_tier, target)
            if not self._may_join(reads, writes):
                self._copies.append(CopyBlocks(src_tier, dst_tier, [], []))
                self._read, self._written = set(), set()
            self._copies[-1].src.append(source)
            self._copies[-1].dst.append(target)
            self._read.add(reads)
            self._written.add(writes)

    def take_copies(self) -> list[CopyBlocks]:
        """Everything recorded since the last call, in order."""
        copies, self._copies = self._copies, []
        self._read, self._written = set(), set()
        return copies

    def _may_join(self, reads: tuple[Tier, int], writes: tuple[Tier, int]) -> bool:
        if not self._copies:
            return False
        last = self._copies[-1]
        return (
            (last.src_tier, last.dst_tier) == (reads[0], writes[0])
            and reads not in self._written
            and writes not in self._written
            and writes not in self._read
        )


class LastPlans:
    """Blocks of one tier by the plans that may be the last to touch them. Several plans may name a block."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, set[int]] = {}

    def note_blocks(self, plan: int, blocks: Iterable[int]) -> None:
        """``plan`` is the last, so far, that may touch ``blocks``."""
        self._blocks.setdefault(plan, set()).update(blocks)

    def last_plan_of(self, blocks: Iterable[int]) -> int:
        """The last unfinished plan that touches any of ``blocks``; 0: there is none."""
        return max([plan for plan, noted in self._blocks.items() if not noted.isdisjoint(blocks)], default=0)

    def forget_until(self, finished: int) -> None:
        """Plan ``finished`` and all before it touch nothing any more."""
        if self._blocks:
            for plan in [plan for plan in self._blocks if plan <= finished]:
                del self._blocks[plan]


class BlockAccessLog:
    """Plans made and finished, and what they may still touch: the pool writes it, the barriers read it."""

    def __init__(self) -> None:
        self.last_made = 0  # the last plan made; 0: none
        self.last_finished = 0  # the last plan that has finished
        self._touched = {tier: LastPlans() for tier in (Tier.HBM, Tier.DRAM)}
        self._written = {tier: LastPlans() for tier in (Tier.HBM, Tier.DRAM)}
        self._accounts = (*self._touched.values(), *self._written.values())

    # -- what happens

    def on_blocks_released(self, blocks: Iterable[int]) -> None:
        """These HBM blocks were given back: no later plan has rows with them."""
        if self.last_made > self.last_finished:
            self._touched[Tier.HBM].note_blocks(self.last_made, blocks)

    def on_copies_recorded(self, src_tier: Tier, src: Iterable[int], dst_tier: Tier, dst: Iterable[int]) -> None:
        """Copies were recorded; the next plan carries them."""
        plan = self.last_made + 1
        self._touched[src_tier].note_blocks(plan, src)
        self._touched[dst_tier].note_blocks(plan, dst)
        self._written[dst_tier].note_blocks(plan, dst)

    def on_blocks_filled(self, blocks: Iterable[int], plan: int) -> None:
        """The index has taken these HBM blocks; rows of ``plan`` are the last to write to them."""
        if plan > self.last_finished:
            self._written[Tier.HBM].note_blocks(plan, blocks)

    def on_state_read(self, blocks: Iterable[int]) -> None:
        """The next plan reads a snapshot in these HBM blocks, whatever becomes of it until then."""
        self._touched[Tier.HBM].note_blocks(self.last_made + 1, blocks)

    def on_state_written(self, blocks: Iterable[int]) -> None:
        """The next plan writes a snapshot to these HBM blocks."""
        self.on_state_read(blocks)
        self._written[Tier.HBM].note_blocks(self.last_made + 1, blocks)

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` carries everything that was recorded."""
        check(step_id > self.last_made, f"plan {step_id} was made after plan {self.last_made}")
        self.last_made = step_id

    def plan_finished(self, step_id: int) -> None:
        """Plan ``step_id`` and all before it have finished."""
        check(
            self.last_finished < step_id <= self.last_made,
            f"plan {step_id} of {self.last_finished}..{self.last_made} has finished",
        )
        self.last_finished = step_id
        for plans in self._accounts:
            plans.forget_until(step_id)

    # -- what may still happen

    def last_touch(self, tier: Tier, blocks: Iterable[int]) -> int:
        """The last plan that reads or writes any of ``blocks``, which no sequence holds; 0: none that is under way."""
        return self._touched[tier].last_plan_of(blocks)

    def last_write(self, tier: Tier, blocks: Iterable[int]) -> int:
        """The last plan that writes to any of ``blocks``, which are cached; 0: none that is under way."""
        return self._written[tier].last_plan_of(blocks)
