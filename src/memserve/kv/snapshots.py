"""Snapshots of recurrent states: what the prefix cache needs beside blocks, where layers keep more than KV.

A prefix can be taken up again at the longest position for which everything is there: whole blocks of KV up to it, and a
snapshot exactly at it. So each cached snapshot is found by the identity of the block that ends where it was taken,
holds the KV up to there, goes when the index gives that up, and is therefore never longer than the KV.

::

    KV        [ b0 ][ b1 ][ b2 ][ b3 ][ b4 ]       five blocks are cached
    snapshots             ^s1         ^s2           a prompt that has b0 to b3 goes on behind s2; one that leaves b2
                                                    in its middle goes on behind s1

Pages: a snapshot takes whole pages, which are blocks of the same arena or parts of one
(:class:`~memserve.base.states.StatePages`); a block with snapshots has one reference for all of them. A snapshot is
*running* (a sequence's last one, overwritten as it goes on), or *cached*; every one that is not pinned can be given up
at any time, because its tokens can be computed again.

Where there is a second tier, a cached snapshot that must leave HBM goes to DRAM, if it is worth more there than what
goes for it, and the KV that it holds may follow. A sequence goes on from it where it lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.states import StatePages
from memserve.base.types import Tier, TokenArray
from memserve.kv.costs import PrefillCurve
from memserve.kv.snapshot_policy import MeasuredPolicy, SnapshotPolicy
from memserve.kv.state_snapshot import Lease, StateSnapshot


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
        self._allocator, self._release_blocks = blocks, release
        self._taken: dict[int, int] = {}  # block -> pages of it that are taken
        self._open: dict[int, list[int]] = {}  # block -> its free pages, of blocks that have both
        self._pins: dict[int, int] = {}  # block -> pins on its pages

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
        check(self._pins.keys() == set(pinned), "pinned blocks were counted wrongly")


class PathHolds(Protocol):
    """What snapshots need of the prefix index (:class:`memserve._core.RadixIndex`)."""

    def hold(self, namespace: bytes, tokens: TokenArray) -> int:
        """Keep the KV of a path on both tiers."""

    def unhold(self, hold: int, tier: int) -> None:
        """The KV of a path is not needed on a tier any more."""

    def is_held(self, hold: int, tier: int) -> bool:
        """Whether it is."""

    def burden(self, owner: bytes, tier: int, beside: int) -> int:
        """How heavy the blocks of an owner are on a tier, with ``beside`` more."""


class SnapshotRoom(Protocol):
    """What snapshots need of the pool's memory (:class:`~memserve.kv.pool.BlockPool`)."""

    def make_room(self, count: int, *, for_snapshot: bool) -> bool:
        """Free HBM blocks of the cache until there are so many. False: there are fewer."""

    def release(self, blocks: Sequence[int]) -> None:
        """Give HBM blocks back."""

    def allocate_below(self, count: int) -> Sequence[int] | None:
        """DRAM blocks with a reference each, perhaps for KV that no snapshot stands behind. None: there are not so
        many."""

    def release_dram(self, dram_blocks: Sequence[int]) -> None:
        """Give them back."""

    def record_copies(self, src_tier: Tier, src: Sequence[int], dst_tier: Tier, dst: Sequence[int]) -> None:
        """The next plan copies, behind its loads and before its rows."""


class SnapshotCache:
    """All snapshots of a pool. Its policy decides which go; the pool decides when."""

    def __init__(
        self,
        pages: StatePages,
        blocks: tuple[_core.BlockAllocator, _core.BlockAllocator | None],
        room: SnapshotRoom,
        index: PathHolds,
        block_tokens: int,
    ) -> None:
        """``blocks`` of the arena that attention reads, and of a second tier (None: there is none); ``index`` over
        them."""
        hbm, dram = blocks
        self._room = room
        self.pages = SnapshotPages(pages, hbm, room.release)
        self._pages_on = {Tier.HBM: self.pages}
        if dram is not None:
            check(pages.whole_blocks, "snapshots that move between tiers have whole blocks")
            self._pages_on[Tier.DRAM] = SnapshotPages(pages, dram, room.release_dram)
        self._changed: list[StateSnapshot] = []  # by the plan that is being made: written, or moved
        #: time of computing tokens behind others, as far as it is known: ``(tokens, behind)`` -> ns
        self.compute_ns: Callable[[int, int], int] = PrefillCurve().ns
        self.policy: SnapshotPolicy = MeasuredPolicy(
            lambda tokens, behind: self.compute_ns(tokens, behind), 1 / block_tokens, pages.pages_each / pages.per_block
        )
        self._index = index
        self._by_identity: dict[bytes, StateSnapshot] = {}
        self._by_hold: dict[int, StateSnapshot] = {}
        self._running: dict[StateSnapshot, None] = {}  # in the order in which they were taken
        self._retained: dict[StateSnapshot, None] = {}  # of the cached ones
        #: hears of one that is cached no more
        self.on_retained_gone: Callable[[StateSnapshot], None] = lambda snapshot: None
        self._owners: dict[Tier, dict[bytes, int]] = {tier: {} for tier in Tier}  # of cached ones -> how many
        self._first: dict[StateSnapshot, None] = {}  # cached ones without a parent
        self._used = self._given_up = 0

    # -- room

    @property
    def blocks_evictable(self) -> int:
        """Blocks of KV that would be free if all snapshots but pinned ones went."""
        return self.pages.blocks_used - self.pages.blocks_pinned

    def dram_blocks(self) -> tuple[int, int]:
        """Blocks of DRAM that snapshots lie in, and of them those that would be free if all but pinned ones went."""
        pages = self._pages_on.get(Tier.DRAM)
        return (0, 0) if pages is None else (pages.blocks_used, pages.blocks_used - pages.blocks_pinned)

    def allocate(self, tokens: int) -> StateSnapshot | None:
        """A running snapshot with free pages. None: there are not enough, and cannot be."""
        pages = self._allocate_pages()
        if pages is None:
            return None
        snapshot = StateSnapshot(tokens, pages)
        self._running[snapshot] = None
        return snapshot

    def _allocate_pages(self) -> list[int] | None:
        if self.pages.lacking_blocks:
            self._room.make_room(self.pages.layout.pages_each, for_snapshot=True)
        return self.pages.allocate()

    def adopt(self, tokens: int, blocks: Sequence[int]) -> StateSnapshot:
        """A running snapshot that has come from elsewhere, in ``blocks`` whose references the caller gives up."""
        snapshot = StateSnapshot(tokens, self.pages.adopt(blocks))
        self._running[snapshot] = None
        return snapshot

    def give_up_first(self) -> bool:
        """Nothing goes before KV that no snapshot stands behind."""
        return False

    def give_up_last(self) -> bool:
        """Give up what a sequence would leave in blocks of KV; then one that a peer reads, for its KV. False: none."""
        return self.give_up_running() or self.give_up_pinned(Tier.HBM)

    def give_up_cached(self) -> bool:
        """For room in HBM, a cached one goes: of the owner whose blocks weigh most, what its policy says, and what is
        retained last; to DRAM where it is worth that. False: each is pinned, or there is none."""
        snapshot = self._choose_victim(Tier.HBM)
        if snapshot is None:
            return False
        if not self._move_down(snapshot):
            self._give_up(snapshot, evicted=True)
        return True

    def _choose_victim(self, tier: Tier) -> StateSnapshot | None:
        victims = (self.policy.choose_victim(owner, tier) for owner in self._owners_by_weight(tier))
        victim = next((victim for victim in victims if victim is not None), None)
        if victim is None and self._retained:
            candidates = (snapshot for snapshot in self._retained if snapshot.tier is tier and not snapshot.pins)
            victim = min(candidates, key=self._worth_of, default=None)
        return victim

    def _worth_of(self, snapshot: StateSnapshot) -> tuple[bool, float, int]:
        retained = snapshot.retained
        return (False, self.policy.score_of(snapshot), 0) if retained is None else (True, *retained)

    def retain(self, snapshot: StateSnapshot, retained: tuple[float, int] | None) -> None:
        """A cached one goes behind all others, by its priority, and when that lapses. None: as the policy says."""
        snapshot.retained = retained
        if retained is None:
            self._retained.pop(snapshot, None)
        else:
            self._retained[snapshot] = None

    def _owners_by_weight(self, tier: Tier) -> list[bytes]:
        owners = self._owners[tier]
        if len(owners) < 2:
            return list(owners)
        each = self.pages.layout.pages_each / self.pages.layout.per_block
        return sorted(owners, key=lambda owner: -self._index.burden(owner, tier, round(owners[owner] * each)))

    def _move_down(self, snapshot: StateSnapshot) -> bool:
        """Take a cached one to DRAM, and let the KV that it holds follow. False: it is worth less than what lies there,
        or not written yet."""
        if Tier.DRAM not in self._pages_on or snapshot.is_planned:
            return False
        while (blocks := self._room.allocate_below(self.pages.layout.pages_each)) is None:
            other = self._choose_victim(Tier.DRAM)
            if other is None or self._worth_of(other) >= self._worth_of(snapshot):
                return False
            self._give_up(other, evicted=True)
        self._move(snapshot, Tier.DRAM, self._pages_on[Tier.DRAM].adopt(blocks))
        self._index.unhold(snapshot.hold, Tier.HBM)
        return True

    def move_up(self, namespace: bytes, snapshot: StateSnapshot) -> bool:
        """Take a cached one, of a path of ``namespace``, from DRAM to HBM. False: there is no room."""
        self.pin(snapshot)  # it must not go for its own room
        pages = self._allocate_pages()
        self.unpin(snapshot)
        if pages is None or not snapshot.pages:
            self.pages.release(pages or [])
            return False
        self._move(snapshot, Tier.HBM, pages)
        self._index.hold(namespace, snapshot.prefix)  # on both tiers
        self._index.unhold(snapshot.hold, Tier.DRAM)
        return True

    def _move(self, snapshot: StateSnapshot, tier: Tier, pages: list[int]) -> None:
        self._room.record_copies(snapshot.tier, snapshot.pages, tier, pages)
        if snapshot.pins:
            self._pages_on[snapshot.tier].pin(snapshot.pages, -1)
            self._pages_on[tier].pin(pages, 1)
        self._pages_on[snapshot.tier].release(snapshot.pages)
        if snapshot.before_copies is None:
            snapshot.before_copies = snapshot.tier, snapshot.pages
            self._changed.append(snapshot)
        self._count_owner(snapshot, -1)
        self.policy.on_moving(snapshot)
        snapshot.tier, snapshot.pages = tier, pages
        self._count_owner(snapshot, 1)
        self.policy.on_moved(snapshot)

    def note_planned(self, snapshot: StateSnapshot) -> None:
        """The plan that is being made writes it behind its rows."""
        snapshot.is_planned = True
        self._changed.append(snapshot)

    def on_plan_made(self) -> None:
        """What is decided from now on is for the next plan."""
        for snapshot in self._changed:
            snapshot.is_planned, snapshot.before_copies = False, None
        self._changed.clear()

    def give_up_below(self) -> bool:
        """Let KV in DRAM go that snapshots hold: of those there first, then of those that have gone up without it.
        False: none is held."""
        for tier in (Tier.DRAM, Tier.HBM):
            snapshot = self._choose_victim(tier)
            if snapshot is not None:
                self._give_up(snapshot, evicted=True)
                return True
        return self.give_up_pinned(Tier.DRAM) or self.give_up_pinned(Tier.HBM)

    def give_up_running(self) -> bool:
        """Give up what a sequence would leave behind. False: there is none."""
        snapshot = next((snapshot for snapshot in self._running if not snapshot.pins), None)
        return snapshot is not None and self.forget(snapshot)

    def give_up_pinned(self, tier: Tier) -> bool:
        """Give up a cached one that is pinned, for the KV that it holds: a peer has references of its own on the pages
        that it reads, and needs no KV. False: there is none."""
        snapshot = next((snapshot for snapshot in self._by_hold.values() if snapshot.tier is tier), None)
        return snapshot is not None and self.forget(snapshot)

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
        place = self._pages_on[snapshot.tier]
        if snapshot.pins:
            place.pin(snapshot.pages, -1)
        pages, snapshot.pages, snapshot.identity = snapshot.pages, [], b""
        snapshot.prefix, snapshot.identities = snapshot.prefix[:0], b""
        place.release(pages)

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

    def use_lease(self, lease: Lease) -> None:
        """A sequence goes on from the lease's snapshot, which may go then, as the last of all."""
        if lease.snapshot is not None:
            self.use(lease.snapshot)
            self.end_lease(lease)

    def end_lease(self, lease: Lease) -> None:
        """The lease's snapshot is not wanted: it may go."""
        if lease.snapshot is not None:
            self.unpin(lease.snapshot)
            lease.snapshot = None

    def keep(self, snapshot: StateSnapshot, identities: bytes, prefix: TokenArray, *, hold: int, owner: bytes) -> None:
        """Cache a running snapshot: it is of ``prefix``, with blocks of these ``identities``, whose KV ``hold`` keeps.
        There must be none for these tokens (:meth:`has`)."""
        check(snapshot.tokens == len(prefix), "a snapshot is not of its prefix")
        check(not self.has(identities), "two snapshots of the same tokens")
        check(hold not in self._by_hold, "two snapshots hold the same KV")
        parent = self.longest_match(identities[:-16], prefix)
        del self._running[snapshot]
        snapshot.identity, snapshot.prefix = identities[-16:], prefix.copy()
        snapshot.identities, snapshot.hold, snapshot.owner = identities, hold, owner
        self._by_identity[snapshot.identity] = self._by_hold[hold] = snapshot
        self._count_owner(snapshot, 1)
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
        del self._by_identity[snapshot.identity]
        for child in list(snapshot.children):
            self._set_parent(child, snapshot.parent)
        self._children_of(snapshot.parent).pop(snapshot)
        if snapshot.retained is not None:
            self.retain(snapshot, None)
            self.on_retained_gone(snapshot)
        self.policy.on_gone(snapshot, evicted=evicted)
        snapshot.parent = None
        self._count_owner(snapshot, -1)
        if self._by_hold.pop(snapshot.hold, None) is not None:
            for tier in (Tier.HBM, Tier.DRAM) if snapshot.tier is Tier.HBM else (Tier.DRAM,):
                self._index.unhold(snapshot.hold, tier)
        snapshot.hold = 0
        self._given_up += 1

    def _count_owner(self, snapshot: StateSnapshot, change: int) -> None:
        owners = self._owners[snapshot.tier]
        owners[snapshot.owner] = owners.get(snapshot.owner, 0) + change
        if not owners[snapshot.owner]:
            del owners[snapshot.owner]

    def pin(self, snapshot: StateSnapshot) -> None:
        """Keep it until :meth:`unpin`."""
        if not snapshot.pins:
            self._pages_on[snapshot.tier].pin(snapshot.pages, 1)
        snapshot.pins += 1

    def unpin(self, snapshot: StateSnapshot) -> None:
        """End one pin; of a snapshot that was lost meanwhile, too."""
        snapshot.pins -= 1
        if not snapshot.pins:
            self._pages_on[snapshot.tier].pin(snapshot.pages, -1)

    def on_evicted(self, evicted: _core.Eviction) -> None:
        """The index has given up KV, and with it the holds of what cannot be reached any more."""
        for hold in evicted.ended_holds:
            snapshot = self._by_hold.pop(hold, None)
            if snapshot is not None:
                self.forget(snapshot)

    @property
    def cached(self) -> int:
        """How many are cached."""
        return len(self._by_identity)

    @property
    def blocks_used(self) -> int:
        """Blocks of KV that snapshots lie in."""
        return self.pages.blocks_used

    def report(self) -> SnapshotReport:
        """For the pool's."""
        return SnapshotReport(self.cached, self._used, self._given_up)

    def list_cached(self) -> list[StateSnapshot]:
        """All that are cached."""
        return list(self._by_identity.values())

    def __len__(self) -> int:
        return len(self._running) + len(self._by_identity)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not balance."""
        cached = list(self._by_identity.values())
        lines = [*self._running, *cached]
        check(len(set(lines)) == len(lines), "a snapshot stands in two lines")
        check(all(len(s.pages) == self.pages.layout.pages_each for s in lines), "a snapshot lacks pages")
        per_block = self.pages.layout.per_block
        for tier, place in self._pages_on.items():
            here = [snapshot for snapshot in lines if snapshot.tier is tier]
            pinned = [page // per_block for snapshot in here if snapshot.pins for page in snapshot.pages]
            place.check_invariants([page for snapshot in here for page in snapshot.pages], pinned)
            owners = Counter(s.owner for s in here if s.is_cached)
            check(self._owners[tier] == owners, "owners were counted wrongly")
        check(all(s.is_cached for s in cached), "a snapshot is cached without a name")
        check(all(s.is_cached and s.retained for s in self._retained), "a snapshot that is retained is not cached")
        check(all((s.retained is not None) == (s in self._retained) for s in cached), "a retained one is not listed")
        check(not any(s.is_cached or s.hold for s in self._running), "a running snapshot has what a cached one has")
        check(all(self._by_hold[s.hold] is s for s in cached), "holds and snapshots disagree")
        check(len(self._by_hold) == len(cached), "a hold is of no snapshot")
        for snapshot in cached:
            for tier in (Tier.HBM, Tier.DRAM):
                is_held = self._index.is_held(snapshot.hold, tier)
                check(is_held == (snapshot.tier <= tier), "the KV before a snapshot is not held where it lies")
        for snapshot in cached:
            check(len(snapshot.prefix) == snapshot.tokens, "a snapshot does not know its tokens")
            parent = self.longest_match(snapshot.identities[:-16], snapshot.prefix)
            check(snapshot.parent is parent, "a snapshot has another parent than the longest one before it")
            check(snapshot in self._children_of(parent), "a snapshot is no child of its parent")
        children = sum(len(s.children) for s in cached) + len(self._first)
        check(children == len(cached), "a snapshot is the child of two")
