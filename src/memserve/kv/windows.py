"""KV of layers that read a window, where it lies apart: what the prefix cache has of it, and what goes first.

A block of the pool has the pages of the layers that read everything. For the same tokens the others have a *part*, some
blocks more (:class:`~memserve.base.layer_kv.LayerLayout`). A sequence lets go of parts that are behind its window;
those whose tokens are cached stay as long as there is memory, and go before anything else does. So a prefix can be
taken up again at the longest position for which everything is there: all blocks up to it, and the parts of its last
window.

::

    blocks   [ b0 ][ b1 ][ b2 ][ b3 ][ b4 ][ b5 ]      six are cached; the window reaches over two
    parts    [ p0 ]                  [ p4 ][ p5 ]      p1 to p3 are gone: a prompt goes on behind b5, or behind b0

The part of a cached block hangs at it, its *anchor*, and goes with it. A part has one reference on each of its blocks;
its users are counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.layer_kv import WindowPages

_NO_BLOCK = -1


@dataclass(slots=True, eq=False)
class WindowPart:
    """KV of one block's tokens, of the layers that read a window."""

    blocks: tuple[int, ...]
    users: int = 1
    """Sequences and leases that need it."""
    anchor: int = _NO_BLOCK
    """The cached block that it belongs to."""
    retains: int = 0
    """Retained prefixes behind which it stands in the last window."""
    uses: int = 0
    """Sequences that began with it. The first is usually the next turn, which leaves other parts; where there are more,
    prompts part, and it goes with its anchor, not before."""

    @property
    def is_cached(self) -> bool:
        """Whether it hangs at a cached block."""
        return self.anchor != _NO_BLOCK


@dataclass(frozen=True, slots=True)
class WindowReport:
    """Parts of one pool, and totals since it was made."""

    cached: int = 0
    """Parts that are there for another sequence."""
    passed: int = 0
    """Parts that a running sequence let go of, since they were behind its window."""
    given_up: int = 0
    """Of those that were cached, without their block."""


class WindowCache:
    """All parts of a pool. It knows which go first; the pool decides when."""

    def __init__(
        self, pages: WindowPages, blocks: _core.BlockAllocator, release: Callable[[Sequence[int]], None]
    ) -> None:
        """``blocks``: of the arena that attention reads, and how they are given back."""
        self.pages, self._allocator, self._release_blocks = pages, blocks, release
        self._by_anchor: dict[int, WindowPart] = {}
        self._has_part = np.zeros(blocks.blocks_total, np.bool_)  # of each block, whether a part hangs at it
        # without users, in the order in which they lost the last one
        self._passed: dict[WindowPart, None] = {}
        self._ends: dict[WindowPart, None] = {}
        self._retained: dict[WindowPart, None] = {}
        self._passes = self._given_up = 0

    # -- of sequences

    def build_parts(self, blocks: Sequence[int]) -> list[WindowPart]:
        """Parts of these blocks, whose references they have from now on; the caller uses each."""
        size = self.pages.part_blocks
        check(not len(blocks) % size, "{} blocks are no whole number of parts", len(blocks))
        return [WindowPart(tuple(blocks[first : first + size])) for first in range(0, len(blocks), size)]

    def use_parts(self, parts: Iterable[WindowPart], *, is_new_sequence: bool = False) -> None:
        """One user more of each."""
        for part in parts:
            part.users += 1
            part.uses += is_new_sequence
            self._leave_line(part)

    def release_parts(self, parts: Iterable[WindowPart], *, is_end: bool) -> None:
        """One user less of each. ``is_end``: they stand in the last window of a sequence that ends there; else they
        were passed."""
        for part in parts:
            part.users -= 1
            self._passes += not is_end
            if part.users:
                continue
            if part.retains:
                self._retained[part] = None
            elif part.is_cached:
                (self._ends if is_end or part.uses > 1 else self._passed)[part] = None
            else:
                self._release_blocks(part.blocks)

    def retain_parts(self, parts: Iterable[WindowPart]) -> None:
        """One retained prefix more that ends with each: it goes when its block does, not before."""
        for part in parts:
            part.retains += 1
            if not part.users:
                self._leave_line(part)
                self._retained[part] = None

    def end_retention(self, parts: Iterable[WindowPart]) -> None:
        """One less of each; some may have gone with their blocks."""
        for part in parts:
            part.retains -= 1
            if not part.retains and part in self._retained:
                del self._retained[part]
                self._ends[part] = None

    def release_tail(self, blocks: Sequence[int]) -> None:
        """What stands in the last window before the end of ``blocks``, and is there for that alone, goes first."""
        first = self.pages.first_entry(len(blocks) * self.pages.block_tokens)
        for block in blocks[first:]:
            part = self._by_anchor.get(block)
            if part in self._ends and part.uses <= 1:
                del self._ends[part]
                self._passed[part] = None

    # -- the cache

    def anchor_part(self, part: WindowPart, block: int) -> bool:
        """``part`` has the KV of the tokens of the cached ``block``. False: another one has, or it has a block."""
        if part.is_cached or block in self._by_anchor:
            return False
        part.anchor = block
        self._by_anchor[block] = part
        self._has_part[block] = True
        return True

    def count_resumable(self, blocks: _core.BlockIds) -> int:
        """How many of ``blocks``, the cached ones of a prefix in order, a sequence can go on behind."""
        count, pages = len(blocks), self.pages
        if not count:
            return 0
        has_part = self._has_part[np.asarray(blocks)]
        first = pages.first_entry(count * pages.block_tokens)
        if has_part[first:].all():
            return count
        entries = np.arange(count)
        last_holes = np.maximum.accumulate(np.where(has_part, -1, entries))  # before each end
        ends = (entries + 1) * pages.block_tokens
        firsts = pages.first_entries(ends)
        whole = np.flatnonzero(last_holes < firsts)
        return int(whole[-1]) + 1 if len(whole) else 0

    def tail_of(self, blocks: Sequence[int]) -> list[WindowPart]:
        """The parts that a sequence needs which goes on behind ``blocks``; all are there."""
        first = self.pages.first_entry(len(blocks) * self.pages.block_tokens)
        return [self._by_anchor[block] for block in blocks[first:]]

    def find_parts(self, blocks: _core.BlockIds, first: int, count: int) -> tuple[int, list[WindowPart]]:
        """Of those that hang at ``blocks`` from the ``first`` on, the first run, up to ``count``, and its begin."""
        while first < len(blocks) and not self._has_part[blocks[first]]:
            first += 1
        parts = []
        for block in blocks[first : first + count]:
            part = self._by_anchor.get(block)
            if part is None:
                break
            parts.append(part)
        return first, parts

    def on_evicted(self, evicted: _core.Eviction) -> None:
        """The index has given up blocks: what hangs at them cannot be found any more."""
        for block in evicted.dropped_hbm:
            part = self._by_anchor.pop(block, None)
            if part is not None:
                self._has_part[block] = False
                part.anchor = _NO_BLOCK
                if not part.users:
                    self._drop_idle(part)

    # -- room

    @property
    def blocks_evictable(self) -> int:
        """Blocks of parts without users."""
        return (len(self._passed) + len(self._ends) + len(self._retained)) * self.pages.part_blocks

    @property
    def blocks_used(self) -> int:
        """Blocks of parts that hang at cached blocks."""
        return len(self._by_anchor) * self.pages.part_blocks

    def give_up_first(self) -> bool:
        """Give up the part that was passed longest ago. False: there is none."""
        return self._give_up(self._passed)

    def give_up_cached(self) -> bool:
        """No part keeps its block from eviction: the two go together."""
        return False

    def give_up_below(self) -> bool:
        """There is no lower tier."""
        return False

    def give_up_last(self) -> bool:
        """Give up the oldest part in the last window of a sequence. False: there is none."""
        return self._give_up(self._ends)

    def report(self) -> WindowReport:
        """For the pool's."""
        return WindowReport(len(self._by_anchor), self._passes, self._given_up)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not balance."""
        idle = [*self._passed, *self._ends, *self._retained]
        check(len(set(idle)) == len(idle), "a part stands in two lines")
        check(all(not part.users for part in idle), "a part without users has some")
        check({id(part) for part in idle} <= {id(part) for part in self._by_anchor.values()}, "a part hangs at nothing")
        for block, part in self._by_anchor.items():
            check(part.anchor == block, "the part of block {} hangs at another one", block)
            check(bool(part.users) != (part in idle), "a part with users may go")
            check(part.users or bool(part.retains) == (part in self._retained), "a part is not retained as counted")
            check(self._allocator.ref_count(block) > 0, "a part hangs at block {}, which is free", block)
            check(all(self._allocator.ref_count(own) > 0 for own in part.blocks), "a block of a part is free")
        check(np.flatnonzero(self._has_part).tolist() == sorted(self._by_anchor), "blocks with parts are not those")

    def _give_up(self, line: dict[WindowPart, None]) -> bool:
        part = next(iter(line), None)
        if part is None:
            return False
        del self._by_anchor[part.anchor]
        self._has_part[part.anchor] = False
        part.anchor = _NO_BLOCK
        self._given_up += 1
        self._drop_idle(part)
        return True

    def _drop_idle(self, part: WindowPart) -> None:
        self._leave_line(part)
        self._release_blocks(part.blocks)

    def _leave_line(self, part: WindowPart) -> None:
        for line in (self._passed, self._ends, self._retained):
            line.pop(part, None)
