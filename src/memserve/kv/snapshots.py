"""Snapshots of recurrent states: what the prefix cache needs beside blocks, where layers keep more than KV.

A prefix can be taken up again at the longest position for which everything is there: whole blocks of KV up to it, and a
snapshot exactly at it. So each cached snapshot hangs at the block that ends where it was taken, its *anchor*: it is
found by that block's identity, goes when the index gives the block up, and is therefore never longer than the KV.

::

    KV        [ b0 ][ b1 ][ b2 ][ b3 ][ b4 ]       five blocks are cached
    snapshots             ^s1         ^s2           a prompt that has b0 to b3 goes on behind s2; one that leaves b2
                                                    in its middle goes on behind s1

Pages: a snapshot takes whole pages, which are blocks of the same arena or parts of one
(:class:`~memserve.base.states.StatePages`); a block with snapshots has one reference for all of them. A snapshot is
*running* (a sequence's last one, overwritten as it goes on), or *cached*; every one that is not pinned can be given up
at any time, because its tokens can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.states import StatePages
from memserve.base.types import TokenArray

_CHOICES = 8
"""Among so many that were not used for longest, the one goes whose loss costs least."""


@dataclass(slots=True, eq=False)
class StateSnapshot:
    """A recurrent state as it was behind ``tokens`` tokens of a sequence."""

    tokens: int
    """Whole blocks of them."""
    pages: list[int]
    """Where it lies. Empty: it was given up."""
    identity: bytes = b""
    """Of its anchor. Empty: it is not cached."""
    prefix: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Cached: its tokens, which a match compares."""
    anchor: int = -1
    """Cached: the HBM block behind which it hangs."""
    pins: int = 0
    """Holders that keep it from being given up."""
    gap_tokens: int = 0
    """Cached: how many tokens it saves beside the snapshot before it on its path."""
    is_branch: bool = False
    """Taken where prompts part, or used by several: worth more than its path's end."""
    uses: int = 0
    """Cached: sequences that went on from it."""

    @property
    def is_cached(self) -> bool:
        return bool(self.identity)


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """Snapshots of one pool, and totals since it was made."""

    cached: int = 0
    used: int = 0
    """Sequences that went on from a cached one."""
    given_up: int = 0
    """Of those that were cached."""


class SnapshotPages:
    """Which pages are taken, and which blocks are for them."""

    def __init__(
        self, pages: StatePages, blocks: _core.BlockAllocator, release: Callable[[Sequence[int]], None]
    ) -> None:
        """``blocks`` of the arena that attention reads, and how they are given back."""
        self.layout = pages
        self._own = _core.BlockAllocator(pages.own_pages) if pages.own_pages else None
        self._allocator, self._release_blocks = self._own or blocks, self._own.release if self._own else release
        self._taken: dict[int, int] = {}  # block -> pages of it that are taken
        self._open: dict[int, list[int]] = {}  # block -> its free pages, of blocks that have both
        self._pins: dict[int, int] = {}  # block -> pins on its pages

    @property
    def shares_blocks(self) -> bool:
        """Whether they lie in blocks of KV."""
        return self._own is None

    @property
    def blocks_used(self) -> int:
        """Blocks with a page that is taken."""
        return len(self._taken)

    @property
    def blocks_pinned(self) -> int:
        """Of them, those with a page that is pinned."""
        return len(self._pins)

    @property
    def lacking_blocks(self) -> int:
        """Blocks that must come free before :meth:`allocate` succeeds. 0: it does."""
        return 0 if self._open else max(0, self.layout.pages_each - self._allocator.blocks_free)

    def allocate(self) -> list[int] | None:
        """Pages for one snapshot. None: there are not enough."""
        if self._open:
            block, free = next(iter(self._open.items()))
            page = free.pop()
            if not free:
                del self._open[block]
            self._taken[block] += 1
            return [page]
        blocks = self._allocator.allocate(self.layout.pages_each)
        if blocks is None:
            return None
        self._taken |= dict.fromkeys(blocks, 1)
        first = blocks[0] * self.layout.per_block
        if self.layout.per_block == 1:
            return blocks.tolist()
        self._open[blocks[0]] = list(range(first + self.layout.per_block - 1, first, -1))
        return [first]

    def adopt(self, blocks: Sequence[int]) -> list[int]:
        """Pages of one snapshot that has come in whole blocks; their references are this object's from now on."""
        check(self.layout.whole_blocks and len(blocks) == self.layout.pages_each, "not the blocks of one snapshot")
        self._taken |= dict.fromkeys(blocks, 1)
        return list(blocks)

    def release(self, pages: Sequence[int]) -> None:
        """Give them back; a block without any is free."""
        for page in pages:
            block = page // self.layout.per_block
            self._taken[block] -= 1
            if self._taken[block]:
                self._open.setdefault(block, []).append(page)
            else:
                del self._taken[block]
                self._open.pop(block, None)
                self._release_blocks([block])

    def pin(self, pages: Sequence[int], change: int) -> None:
        """Count ``change`` pins more on the blocks of these pages."""
        for page in pages:
            block = page // self.layout.per_block
            pins = self._pins.get(block, 0) + change
            if pins:
                self._pins[block] = pins
            else:
                del self._pins[block]

    def check_invariants(self, pages: Sequence[int], pinned: Sequence[int]) -> None:
        """Raise :class:`InvariantError` unless just these ``pages`` are taken, and pins are on ``pinned`` blocks."""
        size = self.layout.per_block
        taken = [page // size for page in pages]
        check(len(set(pages)) == len(pages), "snapshots share pages")
        check(self._taken == {block: taken.count(block) for block in taken}, "pages were counted wrongly")
        free = {block: size - count for block, count in self._taken.items() if count < size}
        check({block: len(rest) for block, rest in self._open.items()} == free, "free pages were counted wrongly")
        check(not set(pages) & {page for rest in self._open.values() for page in rest}, "a page is free and taken")
        check(all(self._allocator.ref_count(block) >= 1 for block in taken), "a block of snapshots is free")
        check(self._own is None or self._own.blocks_used == len(self._taken), "pages of no snapshot are in use")
        check(self._pins.keys() == set(pinned), "pinned blocks were counted wrongly")


class SnapshotCache:
    """All snapshots of a pool. It decides which go; the pool decides when."""

    def __init__(
        self, pages: StatePages, blocks: _core.BlockAllocator, release: Callable[[Sequence[int]], None]
    ) -> None:
        """``blocks`` of the arena that attention reads, and how they are given back."""
        self.pages = SnapshotPages(pages, blocks, release)
        self._by_identity: dict[bytes, StateSnapshot] = {}
        self._by_anchor: dict[int, StateSnapshot] = {}
        # all, in the order of their last use; dicts keep it
        self._running: dict[StateSnapshot, None] = {}
        self._behind: dict[StateSnapshot, None] = {}  # cached, and a longer one of the same path is, too
        self._ends: dict[StateSnapshot, None] = {}  # cached, the others
        self._used = self._given_up = 0

    # -- room

    @property
    def shares_blocks(self) -> bool:
        """Whether snapshots lie in blocks of KV."""
        return self.pages.shares_blocks

    @property
    def blocks_evictable(self) -> int:
        """Blocks of KV that would be free if all snapshots but pinned ones went."""
        return self.pages.blocks_used - self.pages.blocks_pinned if self.shares_blocks else 0

    def allocate(self, tokens: int) -> StateSnapshot | None:
        """A running snapshot with free pages. None: there are not enough."""
        while not self.shares_blocks and self.pages.lacking_blocks and (self.give_up_behind() or self.give_up_end()):
            pass
        pages = self.pages.allocate()
        if pages is None:
            return None
        snapshot = StateSnapshot(tokens, pages)
        self._running[snapshot] = None
        return snapshot

    def adopt(self, tokens: int, blocks: Sequence[int]) -> StateSnapshot:
        """A running snapshot that has come from elsewhere, in ``blocks`` whose references the caller gives up."""
        snapshot = StateSnapshot(tokens, self.pages.adopt(blocks))
        self._running[snapshot] = None
        return snapshot

    def give_up_first(self) -> bool:
        """Give up what is of least use in blocks of KV: a snapshot that has a longer one on its path. False: none."""
        return self.shares_blocks and self.give_up_behind()

    def give_up_last(self) -> bool:
        """Give up what cached blocks go for: a path's end, or what a sequence would leave. False: there is none."""
        return self.shares_blocks and (self.give_up_end() or self.give_up_running())

    def give_up_behind(self) -> bool:
        """Give up the oldest snapshot that has a longer one on its path. False: there is none."""
        snapshot = next((snapshot for snapshot in self._behind if not snapshot.pins), None)
        return snapshot is not None and self.forget(snapshot)

    def give_up_end(self) -> bool:
        """Of the cached ones that were not used for longest, give up the one that saves fewest tokens."""
        oldest = islice((snapshot for snapshot in self._ends if not snapshot.pins), _CHOICES)
        snapshot = min(oldest, key=lambda snapshot: snapshot.gap_tokens, default=None)
        return snapshot is not None and self.forget(snapshot)

    def give_up_running(self) -> bool:
        """Give up what a sequence would leave behind. False: there is none."""
        snapshot = next((snapshot for snapshot in self._running if not snapshot.pins), None)
        return snapshot is not None and self.forget(snapshot)

    def forget(self, snapshot: StateSnapshot) -> bool:
        """Give its pages back, whatever it is; True. What refers to it sees that it has none."""
        if not snapshot.pages:
            return True
        for line in (self._running, self._behind, self._ends):
            line.pop(snapshot, None)
        if snapshot.is_cached:
            del self._by_identity[snapshot.identity], self._by_anchor[snapshot.anchor]
            self._given_up += 1
        if snapshot.pins:
            self.pages.pin(snapshot.pages, -1)
        pages, snapshot.pages, snapshot.identity = snapshot.pages, [], b""
        snapshot.prefix = snapshot.prefix[:0]
        self.pages.release(pages)
        return True

    def forget_all(self, *, with_pinned: bool) -> None:
        """Give up all; ``with_pinned``: a step has failed, and what any of them holds is not known."""
        for snapshot in [*self._running, *self._behind, *self._ends]:
            if with_pinned or not snapshot.pins:
                self.forget(snapshot)

    # -- the cache

    def longest_match(self, identities: bytes, tokens: TokenArray) -> StateSnapshot | None:
        """The longest snapshot of a prefix of ``tokens``; ``identities`` of the blocks of it that have KV, 16 bytes
        each. Changes nothing. Tokens are compared, as the index does."""
        for end in range(len(identities), 0, -16):
            snapshot = self._by_identity.get(identities[end - 16 : end])
            if snapshot is not None and np.array_equal(snapshot.prefix, tokens[: snapshot.tokens]):
                return snapshot
        return None

    def use(self, snapshot: StateSnapshot) -> None:
        """A sequence goes on from it: it is the last that should go."""
        self._used += 1
        snapshot.uses += 1
        snapshot.is_branch |= snapshot.uses > 1  # the first is usually the next turn, which leaves a longer one
        self._behind.pop(snapshot, None)
        self._ends.pop(snapshot, None)
        self._ends[snapshot] = None

    def keep(self, snapshot: StateSnapshot, identities: bytes, prefix: TokenArray, anchor: int) -> bool:
        """Cache a running snapshot: it is of ``prefix``, with blocks of these ``identities``, the last of which is
        ``anchor``. False: another one is there for the same tokens; this one stays as it is."""
        check(snapshot.tokens == len(prefix), "a snapshot is not of its prefix")
        present = self._by_identity.get(identities[-16:])
        if present is not None:
            return False
        before = self.longest_match(identities[:-16], prefix)
        snapshot.gap_tokens = snapshot.tokens - (before.tokens if before is not None else 0)
        if before is not None and not before.is_branch and before in self._ends:
            del self._ends[before]
            self._behind[before] = None
        del self._running[snapshot]
        self._ends[snapshot] = None
        snapshot.identity, snapshot.prefix, snapshot.anchor = identities[-16:], prefix.copy(), anchor
        check(anchor not in self._by_anchor, "two snapshots hang behind block {}", anchor)
        self._by_identity[snapshot.identity] = self._by_anchor[anchor] = snapshot
        return True

    def pin(self, snapshot: StateSnapshot) -> None:
        """Keep it until :meth:`unpin`."""
        if not snapshot.pins:
            self.pages.pin(snapshot.pages, 1)
        snapshot.pins += 1

    def unpin(self, snapshot: StateSnapshot) -> None:
        """End one pin; of a snapshot that was lost meanwhile, too."""
        snapshot.pins -= 1
        if not snapshot.pins:
            self.pages.pin(snapshot.pages, -1)

    def on_blocks_dropped(self, blocks: Iterable[int]) -> None:
        """The index has given up these HBM blocks: what hangs behind them cannot be reached any more."""
        for block in blocks:
            snapshot = self._by_anchor.get(block)
            if snapshot is not None:
                self.forget(snapshot)

    @property
    def cached(self) -> int:
        """How many are cached."""
        return len(self._by_identity)

    @property
    def blocks_used(self) -> int:
        """Blocks of KV that snapshots lie in."""
        return self.pages.blocks_used if self.shares_blocks else 0

    def report(self) -> SnapshotReport:
        """For the pool's."""
        return SnapshotReport(self.cached, self._used, self._given_up)

    def anchors(self) -> list[tuple[int, StateSnapshot]]:
        """Each cached snapshot with the block that it hangs behind."""
        return list(self._by_anchor.items())

    def __len__(self) -> int:
        return len(self._running) + len(self._behind) + len(self._ends)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not balance."""
        lines = [*self._running, *self._behind, *self._ends]
        check(len(set(lines)) == len(lines), "a snapshot stands in two lines")
        check(all(len(s.pages) == self.pages.layout.pages_each for s in lines), "a snapshot lacks pages")
        per_block = self.pages.layout.per_block
        pinned = [page // per_block for snapshot in lines if snapshot.pins for page in snapshot.pages]
        self.pages.check_invariants([page for snapshot in lines for page in snapshot.pages], pinned)
        cached = {snapshot for snapshot in lines if snapshot.is_cached}
        check(cached == {*self._behind, *self._ends}, "a snapshot is cached without a name, or the reverse")
        check({id(s) for s in cached} == {id(s) for s in self._by_identity.values()}, "names and snapshots disagree")
        check({id(s) for s in cached} == {id(s) for s in self._by_anchor.values()}, "anchors and snapshots disagree")
        check(all(len(s.prefix) == s.tokens for s in cached), "a snapshot does not know its tokens")
