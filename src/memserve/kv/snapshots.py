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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.states import StatePages
from memserve.base.types import Tier, TokenArray
from memserve.kv.costs import PrefillCurve
from memserve.kv.snapshot_policy import MeasuredPolicy, SnapshotPolicy
from memserve.kv.state_snapshot import StateSnapshot


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
        check(self._taken == Counter(taken), "pages were counted wrongly")
        free = {block: size - count for block, count in self._taken.items() if count < size}
        check({block: len(rest) for block, rest in self._open.items()} == free, "free pages were counted wrongly")
        check(not set(pages) & {page for rest in self._open.values() for page in rest}, "a page is free and taken")
        check(all(self._allocator.ref_count(block) >= 1 for block in taken), "a block of snapshots is free")
        check(self._own is None or self._own.blocks_used == len(self._taken), "pages of no snapshot are in use")
        check(self._pins.keys() == set(pinned), "pinned blocks were counted wrongly")


class PathHolds(Protocol):
    """What snapshots need of the prefix index (:class:`memserve._core.RadixIndex`)."""

    def unhold(self, hold: int) -> None:
        """The KV of a path is not needed by a snapshot any more."""

    def burden(self, owner: bytes, tier: int, beside: int) -> int:
        """How heavy the blocks of an owner are on a tier, with ``beside`` more."""


class SnapshotCache:
    """All snapshots of a pool. Its policy decides which go; the pool decides when."""

    def __init__(
        self,
        pages: StatePages,
        blocks: _core.BlockAllocator,
        release: Callable[[Sequence[int]], None],
        index: PathHolds,
        block_tokens: int,
    ) -> None:
        """``blocks`` of the arena that attention reads, and how they are given back; ``index`` over them."""
        self.pages = SnapshotPages(pages, blocks, release)
        #: time of computing tokens behind others, as far as it is known: ``(tokens, behind)`` -> ns
        self.compute_ns: Callable[[int, int], int] = PrefillCurve().ns
        # blocks of a model without attention have no KV: what they hold is worth nothing
        token_blocks = 1 / block_tokens if self.shares_blocks else 0.0
        self.policy: SnapshotPolicy = MeasuredPolicy(
            lambda tokens, behind: self.compute_ns(tokens, behind), token_blocks, pages.pages_each / pages.per_block
        )
        self._index = index
        self._by_identity: dict[bytes, StateSnapshot] = {}
        self._by_anchor: dict[int, StateSnapshot] = {}
        self._running: dict[StateSnapshot, None] = {}  # in the order in which they were taken
        self._owners: dict[bytes, int] = {}  # of cached ones -> how many
        self._first: dict[StateSnapshot, None] = {}  # cached ones without a parent
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
        while not self.shares_blocks and self.pages.lacking_blocks and self.give_up_cached():
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
        """Nothing goes before KV that no snapshot stands behind."""
        return False

    def give_up_last(self) -> bool:
        """Give up what a sequence would leave in blocks of KV; then KV that only pinned snapshots hold. False: none."""
        return (self.shares_blocks and self.give_up_running()) or self.end_hold()

    def give_up_cached(self) -> bool:
        """For room, give up a cached one: of the owner whose blocks weigh most, what its policy says. False: each is
        pinned, or there is none."""
        for owner in self._owners_by_weight():
            snapshot = self.policy.choose_victim(owner)
            if snapshot is not None:
                self._give_up(snapshot, evicted=True)
                return True
        return False

    def _owners_by_weight(self) -> list[bytes]:
        if len(self._owners) < 2:
            return list(self._owners)
        each = self.pages.layout.pages_each / self.pages.layout.per_block if self.shares_blocks else 0
        return sorted(
            self._owners, key=lambda owner: -self._index.burden(owner, Tier.HBM, round(self._owners[owner] * each))
        )

    def give_up_running(self) -> bool:
        """Give up what a sequence would leave behind. False: there is none."""
        snapshot = next((snapshot for snapshot in self._running if not snapshot.pins), None)
        return snapshot is not None and self.forget(snapshot)

    def end_hold(self) -> bool:
        """Let KV go that only a pinned snapshot holds: a peer reads that snapshot, and needs no KV. False: there is
        none."""
        snapshot = next((snapshot for snapshot in self._by_identity.values() if snapshot.hold), None)
        if snapshot is not None:
            self._index.unhold(snapshot.hold)
            snapshot.hold = 0
        return snapshot is not None

    def forget(self, snapshot: StateSnapshot) -> bool:
        """Give its pages back, whatever it is; True. What refers to it sees that it has none."""
        self._give_up(snapshot, evicted=False)
        return True

    def _give_up(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        if not snapshot.pages:
            return
        self._running.pop(snapshot, None)
        if snapshot.is_cached:
            self._leave_cache(snapshot, evicted=evicted)
        if snapshot.pins:
            self.pages.pin(snapshot.pages, -1)
        pages, snapshot.pages, snapshot.identity = snapshot.pages, [], b""
        snapshot.prefix, snapshot.identities = snapshot.prefix[:0], b""
        self.pages.release(pages)

    def forget_all(self, *, with_pinned: bool) -> None:
        """Give up all; ``with_pinned``: a step has failed, and what any of them holds is not known."""
        for snapshot in [*self._running, *self._by_identity.values()]:
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
        """A sequence goes on from it."""
        self._used += 1
        snapshot.uses += 1
        self.policy.on_used(snapshot)

    def keep(
        self, snapshot: StateSnapshot, identities: bytes, prefix: TokenArray, anchor: int, *, hold: int, owner: bytes
    ) -> None:
        """Cache a running snapshot: it is of ``prefix``, with blocks of these ``identities``, the last of which is
        ``anchor``; ``hold`` keeps their KV. There must be none for these tokens (:meth:`has`)."""
        check(snapshot.tokens == len(prefix), "a snapshot is not of its prefix")
        check(not self.has(identities), "two snapshots of the same tokens")
        check(anchor not in self._by_anchor, "two snapshots hang behind block {}", anchor)
        parent = self.longest_match(identities[:-16], prefix)
        del self._running[snapshot]
        snapshot.identity, snapshot.prefix, snapshot.anchor = identities[-16:], prefix.copy(), anchor
        snapshot.identities, snapshot.hold, snapshot.owner = identities, hold, owner
        self._by_identity[snapshot.identity] = self._by_anchor[anchor] = snapshot
        self._owners[owner] = self._owners.get(owner, 0) + 1
        end = len(identities)
        longer = [child for child in self._children_of(parent) if child.identities[end - 16 : end] == snapshot.identity]
        self._set_parent(snapshot, parent)
        for child in longer:
            self._set_parent(child, snapshot)
        self.policy.on_kept(snapshot)

    def has(self, identities: bytes) -> bool:
        """Whether there is one behind the last block of these."""
        return identities[-16:] in self._by_identity

    def _children_of(self, parent: StateSnapshot | None) -> dict[StateSnapshot, None]:
        return self._first if parent is None else parent.children

    def _set_parent(self, snapshot: StateSnapshot, parent: StateSnapshot | None) -> None:
        self._children_of(snapshot.parent).pop(snapshot, None)
        snapshot.parent = parent
        self._children_of(parent)[snapshot] = None

    def _leave_cache(self, snapshot: StateSnapshot, *, evicted: bool) -> None:
        del self._by_identity[snapshot.identity], self._by_anchor[snapshot.anchor]
        for child in list(snapshot.children):
            self._set_parent(child, snapshot.parent)
        self._children_of(snapshot.parent).pop(snapshot)
        self.policy.on_gone(snapshot, evicted=evicted)
        snapshot.parent = None
        self._owners[snapshot.owner] -= 1
        if not self._owners[snapshot.owner]:
            del self._owners[snapshot.owner]
        if snapshot.hold:
            self._index.unhold(snapshot.hold)
            snapshot.hold = 0
        self._given_up += 1

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
        """The index has given up these HBM blocks, with any hold on them: what hangs behind them cannot be reached any
        more."""
        for block in blocks:
            snapshot = self._by_anchor.get(block)
            if snapshot is not None:
                snapshot.hold = 0
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
        return len(self._running) + len(self._by_identity)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not balance."""
        cached = list(self._by_identity.values())
        lines = [*self._running, *cached]
        check(len(set(lines)) == len(lines), "a snapshot stands in two lines")
        check(all(len(s.pages) == self.pages.layout.pages_each for s in lines), "a snapshot lacks pages")
        per_block = self.pages.layout.per_block
        pinned = [page // per_block for snapshot in lines if snapshot.pins for page in snapshot.pages]
        self.pages.check_invariants([page for snapshot in lines for page in snapshot.pages], pinned)
        check(all(s.is_cached for s in cached), "a snapshot is cached without a name")
        check(not any(s.is_cached or s.hold for s in self._running), "a running snapshot has what a cached one has")
        check({id(s) for s in cached} == {id(s) for s in self._by_anchor.values()}, "anchors and snapshots disagree")
        check(self._owners == Counter(s.owner for s in cached), "owners were counted wrongly")
        for snapshot in cached:
            check(len(snapshot.prefix) == snapshot.tokens, "a snapshot does not know its tokens")
            parent = self.longest_match(snapshot.identities[:-16], snapshot.prefix)
            check(snapshot.parent is parent, "a snapshot has another parent than the longest one before it")
            check(snapshot in self._children_of(parent), "a snapshot is no child of its parent")
        children = sum(len(s.children) for s in cached) + len(self._first)
        check(children == len(cached), "a snapshot is the child of two")
