"""The memory report (row P4): what each tier holds, exactly (level 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve.types import Tier


@dataclass(frozen=True, slots=True)
class TierReport:
    """Blocks of one tier. ``total = free + used``; cached blocks are part of the used ones."""

    tier: Tier
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int  # known to the prefix index
    blocks_pinned: int  # cached and under a pin: not evictable
    blocks_evictable: int  # cached, and free as soon as the index gives them up
    pages_free: int = 0  # pages that are not handed out, in free and in broken blocks
    pages_stranded: int = 0  # of them in broken blocks: no request for a block can have them


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The state of a pool's memory.

    External fragmentation is free memory that a request for a block cannot have. Every block has the same size and any
    free block serves any request, so only loose pages (which break blocks) can cause it. Internal fragmentation (the
    unused tail of each sequence's last block, below one block a sequence) is known to the machine only: see
    ``MemoryReport`` of the instance.
    """

    tiers: tuple[TierReport, ...]
    block_tokens: int
    copies_pending: int = 0  # blocks whose recorded copy has not been taken yet
    by_tier: dict[Tier, TierReport] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_tier", {report.tier: report for report in self.tiers})

    @property
    def external_fragmentation(self) -> float:
        """Free pages in broken blocks as a share of all free pages, 0 to 1."""
        free = sum(tier.pages_free for tier in self.tiers)
        return sum(tier.pages_stranded for tier in self.tiers) / free if free else 0.0
