"""What plans that have not finished may still do to blocks, and the copies that no plan carries yet.

These are the accounts behind ``kv_transfer/barriers.py``. Nothing is written down for blocks that stay with a sequence,
however many plans use them. Three moments tell the rest:

let go      an HBM block is given back: rows of plans made by now may read and write it, later ones do not
copied      a copy is recorded: the next plan reads the one block and writes the other
filled      the index takes a block as a plan computes its last tokens: no later plan writes to it; what is cached
            never changes

Only plans under way are remembered, and the next one: two or three small sets, whatever the pool's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memserve.errors import check
from memserve.types import CopyBlocks, Tier


class CopyLog:
    """Copies that a pool has recorded and no plan has taken, in order.

    Neighbours of the same direction are merged while that cannot change the result.

    The pairs of one :class:`CopyBlocks` may be executed in any order or at once. So a pair starts a new one when it
    writes a block that the open one reads or writes, or reads a block that the open one writes.
    """

    def __init__(self) -> None:
        self._copies: list[CopyBlocks] = []
        self._read: set[tuple[Tier, int]] = set()  # of the last entry of `_copies`
        self._written: set[tuple[Tier, int]] = set()

    def __len__(self) -> int:
        return sum(len(copy.src) for copy in self._copies)

    def record(self, src_tier: Tier, src: Sequence[int], dst_tier: Tier, dst: Sequence[int]) -> None:
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

    def take(self) -> list[CopyBlocks]:
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
    """Blocks of one tier by the plans that may be the last to do something to them. A block may be named by several."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, set[int]] = {}

    def note(self, plan: int, blocks: Iterable[int]) -> None:
        """``plan`` is the last, so far, that may touch ``blocks``."""
        self._blocks.setdefault(plan, set()).update(blocks)

    def of(self, blocks: Iterable[int]) -> int:
        """The last plan that does it to any of ``blocks``; 0: none that has not finished."""
        return max([plan for plan, noted in self._blocks.items() if not noted.isdisjoint(blocks)], default=0)

    def forget(self, finished: int) -> None:
        """Plan ``finished`` and those before do nothing any more."""
        if self._blocks:
            for plan in [plan for plan in self._blocks if plan <= finished]:
                del self._blocks[plan]


class BlockAccessLog:
    """Plans made and finished, and what they may still touch: kept by the pool, asked by the barriers."""

    __slots__ = ("_accounts", "_touched", "_written", "finished", "made")

    def __init__(self) -> None:
        self.made = 0  # the last plan made; 0: none
        self.finished = 0  # the last plan that touches memory no more
        self._touched = {tier: LastPlans() for tier in (Tier.HBM, Tier.DRAM)}
        self._written = {tier: LastPlans() for tier in (Tier.HBM, Tier.DRAM)}
        self._accounts = (*self._touched.values(), *self._written.values())

    # -- what happens

    def let_go(self, blocks: Iterable[int]) -> None:
        """These HBM blocks were given back: no plan that is made from now on has rows with them."""
        if self.made > self.finished:
            self._touched[Tier.HBM].note(self.made, blocks)

    def copied(self, src_tier: Tier, src: Iterable[int], dst_tier: Tier, dst: Iterable[int]) -> None:
        """Copies were recorded: the next plan carries them."""
        plan = self.made + 1
        self._touched[src_tier].note(plan, src)
        self._touched[dst_tier].note(plan, dst)
        self._written[dst_tier].note(plan, dst)

    def filled(self, blocks: Iterable[int], plan: int) -> None:
        """The index has taken these HBM blocks; rows of ``plan`` are the last that write to them."""
        if plan > self.finished:
            self._written[Tier.HBM].note(plan, blocks)

    def plan_made(self, step_id: int) -> None:
        """Plan ``step_id`` carries everything that was recorded."""
        check(step_id > self.made, f"plan {step_id} was made after plan {self.made}")
        self.made = step_id

    def plan_finished(self, step_id: int) -> None:
        """Plan ``step_id`` and each before it have finished."""
        check(self.finished < step_id <= self.made, f"plan {step_id} of {self.finished}..{self.made} has finished")
        self.finished = step_id
        for plans in self._accounts:
            plans.forget(step_id)

    # -- what may still happen

    def last_touch(self, tier: Tier, blocks: Iterable[int]) -> int:
        """The last plan that reads or writes any of ``blocks``, which no sequence holds; 0: none that is under way."""
        return self._touched[tier].of(blocks)

    def last_write(self, tier: Tier, blocks: Iterable[int]) -> int:
        """The last plan that writes to any of ``blocks``, which are cached; 0: none that is under way."""
        return self._written[tier].of(blocks)
