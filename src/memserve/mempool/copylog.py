"""The copies that a pool has decided and nobody has executed yet (level 1)."""

from __future__ import annotations

from collections.abc import Sequence

from memserve.types import CopyBlocks, Tier


class CopyLog:
    """Recorded copies in order; neighbours of the same direction are merged while that cannot change the result.

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
