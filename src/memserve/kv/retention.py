"""Prefixes that stay in the cache: pinned, or retained. Both have names, lapse, and have a quota for each tenant.

*Pinned*: eviction does not touch them (:class:`Pins`). *Retained*: they leave after all that is neither pinned nor
retained, the one with the lowest priority first (:class:`RetainedPrefixes`), and take room from no request::

    evicted first   released > of no name, by last use > retained, by priority > pinned: only where nothing else helps

What is given up in HBM goes to DRAM, where it is retained still: there it goes in the same order. It is an ordinary
entry of the cache then, which stands where its last use puts it. So does one that lapses: a hint that was wrong leaves
the cache as if it had not been given.

Where layers keep a recurrent state, the snapshot behind a prefix is retained, and with it the KV that it holds. Where
KV of windows lies apart, the parts of its last window are retained with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.fairness import TenantStore
from memserve.base.types import NamedPrefix, Tier, TokenArray
from memserve.kv.snapshots import SnapshotCache
from memserve.kv.state_snapshot import Lease, StateSnapshot
from memserve.kv.windows import WindowCache, WindowPart
from memserve.protocol.kv_hints import names_to_release

PINNED_TOKENS_MAX = 4 << 20
"""Tokens of all pins whose tenants are known here. Beyond, the tenant with most tokens loses its oldest pin."""
QUOTA_PART = 2
"""Of the tokens of all tiers one part in so many is for retained prefixes: one tenant may have all of it while others
want none."""

Entry = TypeVar("Entry")


class Lapses(Generic[Entry]):
    """Entries by the ends of their time. Those that ended earlier, or were renewed, leave theirs in the heap: it is
    cleaned now and then, at a constant cost an entry."""

    def __init__(self, is_live: Callable[[Entry], bool]) -> None:
        self._is_live = is_live
        #: (end of its time, order of making, entry)
        self._heap: list[tuple[int, int, Entry]] = []
        self._made = 0

    def add(self, until_ns: int, entry: Entry) -> None:
        """It lapses then."""
        heapq.heappush(self._heap, (until_ns, self._made, entry))
        self._made += 1

    def due_entries(self, now_ns: int) -> Iterator[Entry]:
        """Live entries with no time left, the first of them first. The caller ends each before it takes the next."""
        while self.next_ns is not None and self._heap[0][0] <= now_ns:
            yield self._heap[0][2]

    def forget_dead(self, live: int) -> None:
        """An entry has ended, and so many are ``live``."""
        if len(self._heap) > 2 * live + 8:
            self._heap = [item for item in self._heap if self._is_live(item[2])]
            heapq.heapify(self._heap)

    @property
    def next_ns(self) -> int | None:
        """When the first of them lapses. None: there is none."""
        while self._heap and not self._is_live(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class PinnedPaths(Protocol):
    """What pins need of the pool (:class:`~memserve.kv.pool.BlockPool`)."""

    def acquire(self, tenant: str, tokens: TokenArray) -> Lease:
        """The longest cached prefix, pinned, with references on its blocks."""

    def release(self, blocks: Sequence[int]) -> None:
        """Give the references back."""

    def unpin(self, lease: Lease) -> None:
        """End the pin."""

    @property
    def retained(self) -> RetainedPrefixes:
        """What leaves late."""


@dataclass(slots=True, eq=False)
class _Pin:
    handle: str
    tokens: TokenArray  # that were asked for
    lease: Lease  # the pin alone: the references on its blocks were released at once
    until_ns: int
    tenant: str | None


class Pins:
    """Keeps cached paths from eviction, by name.

    Pins are best effort: when nothing else can make room, all are given up.
    """

    def __init__(self, pool: PinnedPaths) -> None:
        self._pool = pool
        #: in the order in which they were made or renewed
        self._pins: dict[str, _Pin] = {}
        self._lapses = Lapses[_Pin](lambda pin: self._pins.get(pin.handle) is pin)
        #: pins of tenants known here
        self._quota: TenantStore[str] = TenantStore(PINNED_TOKENS_MAX)
        #: names that were given up for memory, or because their KV was lost; the machine empties the list
        self.lost: list[str] = []

    def pin_prefix(
        self,
        handle: str,
        isolation: str,
        tokens: TokenArray,
        until_ns: int,
        *,
        tenant: str | None = None,
        priority: float | None = None,
    ) -> int:
        """Keep the cached prefix of ``tokens``, brought up from DRAM as far as HBM has room. Returns its tokens.

        An earlier pin of this name ends: it is renewed, extended or shortened. ``tenant``: the pin counts in its share
        of all pins, of which the oldest go. None: a router has counted it. ``priority``: the prefix is retained instead
        (:meth:`RetainedPrefixes.retain_prefix`).
        """
        if priority is not None:
            tokens_retained = self._pool.retained.retain_prefix(
                handle, isolation, tokens, until_ns, priority, tenant=tenant
            )
            self._end_pin(handle)
            return tokens_retained
        # before the earlier pin of this name goes: its path must not be evicted in between
        lease = self._pool.acquire(isolation, tokens)
        self._pool.release(lease.blocks)
        self.unpin_prefix(handle)
        if lease.tokens:
            pin = self._pins[handle] = _Pin(handle, tokens, lease, until_ns, tenant)
            self._lapses.add(until_ns, pin)
            if tenant is not None:
                for dropped_handle in self._quota.put(tenant, handle, handle, len(tokens)):
                    self.unpin_prefix(dropped_handle)
        else:
            self._pool.unpin(lease)
        return lease.tokens

    def unpin_prefix(self, handle: str) -> None:
        """Give up a name, of what is pinned or retained; unknown ones are ignored."""
        self._end_pin(handle)
        self._pool.retained.end_retention(handle)

    def _end_pin(self, handle: str) -> None:
        pin = self._pins.pop(handle, None)
        if pin is not None:
            self._pool.unpin(pin.lease)
            if pin.tenant is not None:
                self._quota.pop(pin.tenant, handle)
            self._lapses.forget_dead(len(self._pins))

    def pinned_tokens(self, handle: str) -> int:
        """Tokens kept under the name. 0: the name is unknown."""
        pin = self._pins.get(handle)
        return pin.lease.tokens if pin is not None else self._pool.retained.retained_tokens(handle)

    def named_tokens(self, handle: str) -> TokenArray | None:
        """What was asked for under the name. None: it is unknown."""
        pin = self._pins.get(handle)
        return pin.tokens if pin is not None else self._pool.retained.retained_prefix(handle)

    def prefixes_of(self, tenant: str) -> list[NamedPrefix]:
        """The prefixes of a tenant that is known here, under the names that :meth:`pin_prefix` was given."""
        pins = [self._pins[handle] for handle in self._quota.values_of(tenant)]
        pinned = [NamedPrefix(pin.handle, pin.lease.tokens, pin.until_ns) for pin in pins]
        return pinned + self._pool.retained.prefixes_of(tenant)

    def expire_pins(self, now_ns: int) -> None:
        """End the pins with no time left."""
        for pin in self._lapses.due_entries(now_ns):
            self.unpin_prefix(pin.handle)

    def release_all(self) -> bool:
        """Give up every pin. False: there was none."""
        names = list(self._pins)
        for handle in names:
            self.unpin_prefix(handle)
        self.lost += names
        return bool(names)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_pins` is worth calling. None: there is no pin."""
        return self._lapses.next_ns

    def __len__(self) -> int:
        return len(self._pins)


class CachedPaths(Protocol):
    """What retained prefixes need of the pool (:class:`~memserve.kv.pool.BlockPool`)."""

    snapshots: SnapshotCache | None
    windows: WindowCache | None

    def match(self, tenant: str, tokens: TokenArray) -> int:
        """Cached tokens that a sequence can go on behind."""

    def namespace_of(self, tenant: str) -> bytes:
        """The name of a root of the index."""

    def cached_snapshot(self, tenant: str, tokens: TokenArray) -> StateSnapshot | None:
        """The longest one of a prefix of ``tokens``."""


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """A cached path that leaves late."""

    handle: str
    tenant: str | None
    """Whose quota it counts in."""
    namespace: bytes
    prefix: TokenArray
    """What of the tokens was cached: whole blocks."""
    priority: float
    until_ns: int
    hold: int = 0
    """The index's handle of its path. 0: it stands at a snapshot."""
    tiers: set[Tier] = field(default_factory=set)
    """Where the hold stands still."""
    snapshot: StateSnapshot | None = None
    parts: list[WindowPart] = field(default_factory=list)
    """Of its last window, where KV of windows lies apart."""

    @property
    def place(self) -> tuple[float, int]:
        """In the order in which they are given up: by priority, then the one that lapses first."""
        return self.priority, self.until_ns


class RetainedPrefixes:
    """The retained prefixes of one pool, by name. The pool says when one is to be given up.

    A path with several leaves when all of them have been given up: the highest priority counts.
    """

    def __init__(
        self, paths: CachedPaths, index: _core.RadixIndex, hbm: _core.BlockAllocator, dram: _core.BlockAllocator
    ) -> None:
        self._paths, self._index, self._hbm, self._dram = paths, index, hbm, dram
        #: of all whose tenants are known here; beyond, the tenant with most gives up its lowest
        self.tokens_max = (hbm.blocks_total + dram.blocks_total) * index.block_tokens // QUOTA_PART
        self._prefixes: dict[str, RetainedPrefix] = {}
        self._lapses = Lapses[RetainedPrefix](lambda prefix: self._prefixes.get(prefix.handle) is prefix)
        #: heaps of (priority, end of time, order of making, prefix): those held in HBM, and those given up there
        self._orders: dict[Tier, list[tuple[float, int, int, RetainedPrefix]]] = {
            Tier.HBM: [],
            Tier.DRAM: [],
        }
        self._made = 0
        #: called before one is given up: priorities may change
        self.on_giving_up: Callable[[], None] = _nothing
        self._at_hold: dict[int, dict[RetainedPrefix, None]] = {}
        self._at_snapshot: dict[StateSnapshot, dict[RetainedPrefix, None]] = {}
        #: tokens of each tenant that is known here
        self._tenant_tokens: dict[str, int] = {}
        if paths.snapshots is not None:
            paths.snapshots.on_retained_gone = self._forget_snapshot

    # -- what is asked for

    def retain_prefix(
        self,
        handle: str,
        isolation: str,
        tokens: TokenArray,
        until_ns: int,
        priority: float = 0.0,
        *,
        tenant: str | None = None,
    ) -> int:
        """Let the cached prefix of ``tokens`` leave after all that is not retained. Returns its tokens; 0: nothing is
        cached, or the tenant's quota has no room for it.

        An earlier one of this name ends. ``priority``: of several, the lowest is given up first; below zero the prefix
        is released instead (:meth:`release_prefix`). ``tenant``: whose quota it counts in. None: in no quota.
        """
        if priority < 0:
            self.end_retention(handle)
            self.release_prefix(isolation, tokens)
            return 0
        prefix = self._hold_path(handle, isolation, tokens, until_ns, priority, tenant)
        self.end_retention(handle)  # not earlier: its path must not be listed in between
        if prefix is None:
            return 0
        self._prefixes[handle] = prefix
        self._lapses.add(until_ns, prefix)
        if tenant is not None:
            self._tenant_tokens[tenant] = self._tenant_tokens.get(tenant, 0) + len(prefix.prefix)
            self._keep_quotas(tenant)
        return self.retained_tokens(handle)

    def change_priority(self, handle: str, priority: float) -> None:
        """From now on it goes in another order; unknown names are ignored."""
        prefix = self._prefixes.get(handle)
        if prefix is None or prefix.priority == priority:
            return
        prefix.priority = priority
        if prefix.snapshot is not None:
            self._rank_snapshot(prefix.snapshot)
        elif prefix.tiers:
            self._push(min(prefix.tiers), prefix)

    def end_retention(self, handle: str) -> None:
        """The name is an ordinary entry of the cache from now on; unknown ones are ignored."""
        prefix = self._prefixes.get(handle)
        if prefix is not None:
            for tier in sorted(prefix.tiers):
                self._index.unhold(prefix.hold, tier)
            self._forget(prefix)

    def release_prefix(self, isolation: str, tokens: TokenArray) -> int:
        """What only ``tokens`` leads to is the next of its tenant to leave, unless it is pinned or shared with what is
        retained; the names of what goes on behind ``tokens`` end. Returns its blocks."""
        paths, windows = self._paths, self._paths.windows
        namespace = paths.namespace_of(isolation)
        tokens = tokens[: self._index.match(namespace, tokens)]
        names = ((prefix.handle, prefix.prefix) for prefix in self._prefixes.values() if prefix.namespace == namespace)
        for handle in names_to_release(tokens, names):
            self.end_retention(handle)
        snapshot = paths.cached_snapshot(isolation, tokens)
        is_unshared = snapshot is not None and not snapshot.children and snapshot.uses <= 1 and snapshot.is_ordinary
        if is_unshared and snapshot is not None and paths.snapshots is not None:
            paths.snapshots.forget(snapshot)
        blocks = self._index.make_oldest(paths.namespace_of(isolation), tokens)
        if blocks and windows is not None:
            windows.release_tail(self._index.match_blocks(paths.namespace_of(isolation), tokens).hbm)
        return blocks

    def expire_retained(self, now_ns: int) -> None:
        """End those with no time left."""
        for prefix in self._lapses.due_entries(now_ns):
            self.end_retention(prefix.handle)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_retained` is worth calling. None: nothing is retained."""
        return self._lapses.next_ns

    # -- what is retained

    def spare_blocks(self, kept: int) -> int:
        """HBM blocks that are free, or cached and neither pinned nor retained, but for ``kept`` of these."""
        return self._hbm.blocks_free + max(0, self._index.evictable_blocks(Tier.HBM, self._hbm.blocks_total) - kept)

    def leave_hbm(self, isolation: str, tokens: TokenArray) -> None:
        """What begins with ``tokens`` is to go down: it is retained in DRAM alone."""
        namespace = self._paths.namespace_of(isolation)
        for prefix in list(self._prefixes.values()):
            begins = prefix.namespace == namespace and np.array_equal(prefix.prefix[: len(tokens)], tokens)
            if begins and prefix.tiers == {Tier.HBM, Tier.DRAM} and self._dram.blocks_total:
                self._index.unhold(prefix.hold, Tier.HBM)
                prefix.tiers.discard(Tier.HBM)
                self._push(Tier.DRAM, prefix)

    def retained_tokens(self, handle: str) -> int:
        """Tokens retained under the name. 0: it is unknown, was given up, or has lapsed."""
        prefix = self._prefixes.get(handle)
        return len(prefix.prefix) if prefix is not None else 0

    def retained_prefix(self, handle: str) -> TokenArray | None:
        """The tokens that are retained under the name. None: none are."""
        prefix = self._prefixes.get(handle)
        return prefix.prefix if prefix is not None else None

    def prefixes_of(self, tenant: str) -> list[NamedPrefix]:
        """The prefixes that count in a tenant's quota."""
        tenant_prefixes = (prefix for prefix in self._prefixes.values() if prefix.tenant == tenant)
        return [NamedPrefix(prefix.handle, len(prefix.prefix), prefix.until_ns) for prefix in tenant_prefixes]

    @property
    def tokens(self) -> int:
        """Tokens of all of them; where several share some, these count for each."""
        return sum([len(prefix.prefix) for prefix in self._prefixes.values()])

    def room_beside(self, at_most: int) -> int:
        """HBM blocks that can be allocated while all that is retained stays; not counted further than needed."""
        return self._hbm.blocks_free + self._index.evictable_blocks(Tier.HBM, at_most)

    def tokens_by_tenant(self) -> dict[str, int]:
        """Retained tokens of each tenant that is known here."""
        return dict(self._tenant_tokens)

    def __len__(self) -> int:
        return len(self._prefixes)

    # -- room

    def give_up(self, tier: Tier) -> bool:
        """The lowest that is held on ``tier`` may be evicted from there. False: there is none.

        One that leaves HBM may leave no room for lower ones in DRAM.
        """
        self.on_giving_up()
        prefix = self._lowest(tier)
        if prefix is None and tier is Tier.DRAM:
            prefix = self._lowest(Tier.HBM, also_on=Tier.DRAM)  # a part of it may lie there
        if prefix is None:
            return False
        if tier is Tier.HBM and self._dram.blocks_total:
            self._make_room_below(prefix)
        self._index.unhold(prefix.hold, tier)
        prefix.tiers.discard(tier)
        if prefix.tiers == {Tier.DRAM} and self._dram.blocks_total:
            self._push(Tier.DRAM, prefix)
        elif tier is Tier.HBM or not prefix.tiers:
            self.end_retention(prefix.handle)
        return True

    def _make_room_below(self, prefix: RetainedPrefix) -> None:
        """Let those in DRAM go that are lower, as far as ``prefix`` lacks the room there."""
        needed_blocks = len(self._index.match_blocks(prefix.namespace, prefix.prefix).hbm)
        while (lowest := self._lowest(Tier.DRAM)) is not None and lowest.place < prefix.place:
            if self._dram.blocks_free + self._index.evictable_blocks(Tier.DRAM, needed_blocks) >= needed_blocks:
                return
            self.end_retention(lowest.handle)

    def on_evicted(self, evicted: _core.Eviction) -> None:
        """The index has given up paths, and with them their holds."""
        for hold in evicted.ended_holds:
            for prefix in list(self._at_hold.get(hold, ())):
                self._forget(prefix)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not balance."""
        live = list(self._prefixes.values())
        counts: dict[str, int] = {}
        for prefix in live:
            if prefix.tenant is not None:
                counts[prefix.tenant] = counts.get(prefix.tenant, 0) + len(prefix.prefix)
        check(counts == self._tenant_tokens, "retained tokens were counted wrongly")
        check(sum(counts.values()) <= self.tokens_max, "more is retained than the quota allows")
        for prefix in live:
            whole = self._index.match(prefix.namespace, prefix.prefix)
            check(whole == len(prefix.prefix), "a retained prefix is not whole")
            check(all(self._index.is_held(prefix.hold, tier) for tier in prefix.tiers), "a retained prefix is not held")
            snapshot = prefix.snapshot
            stands = bool(prefix.tiers) if snapshot is None else prefix in self._at_snapshot.get(snapshot, ())
            check(stands, "a retained prefix stands nowhere")
            check(all(part.retains for part in prefix.parts), "a part of a retained window is not")
        holding = {prefix for prefixes in self._at_hold.values() for prefix in prefixes}
        check(holding == {prefix for prefix in live if prefix.hold}, "holds and retained prefixes disagree")
        for snapshot, prefixes in self._at_snapshot.items():
            best = max((prefix.place for prefix in prefixes), default=None)
            check(snapshot.retained == best is not None, "a snapshot is not retained as its prefixes are")

    # -- inside

    def _hold_path(
        self, handle: str, isolation: str, tokens: TokenArray, until_ns: int, priority: float, tenant: str | None
    ) -> RetainedPrefix | None:
        paths, namespace = self._paths, self._paths.namespace_of(isolation)
        cached = tokens[: paths.match(isolation, tokens)].copy()
        if not len(cached):
            return None
        prefix = RetainedPrefix(handle, tenant, namespace, cached, priority, until_ns)
        if paths.snapshots is not None:
            prefix.snapshot = snapshot = paths.cached_snapshot(isolation, cached)
            check(snapshot is not None, "a match of a model with states has no snapshot")
            if snapshot is not None:
                self._at_snapshot.setdefault(snapshot, {})[prefix] = None
                self._rank_snapshot(snapshot)
            return prefix
        prefix.hold, prefix.tiers = self._index.hold(namespace, cached), {Tier.HBM, Tier.DRAM}
        self._at_hold.setdefault(prefix.hold, {})[prefix] = None
        self._push(Tier.HBM, prefix)
        if paths.windows is not None:
            prefix.parts = paths.windows.tail_of(self._index.match_blocks(namespace, cached).hbm)
            paths.windows.retain_parts(prefix.parts)
        return prefix

    def _forget(self, prefix: RetainedPrefix) -> None:
        """Its hold is over."""
        prefix.tiers.clear()
        if self._prefixes.get(prefix.handle) is prefix:
            del self._prefixes[prefix.handle]
            if prefix.tenant is not None:
                tokens = self._tenant_tokens.pop(prefix.tenant) - len(prefix.prefix)
                if tokens:
                    self._tenant_tokens[prefix.tenant] = tokens
        if prefix.snapshot is not None:
            _remove_at(self._at_snapshot, prefix.snapshot, prefix)
            self._rank_snapshot(prefix.snapshot)
        else:
            _remove_at(self._at_hold, prefix.hold, prefix)
        if prefix.parts and self._paths.windows is not None:
            self._paths.windows.end_retention(prefix.parts)
            prefix.parts = []
        self._lapses.forget_dead(len(self._prefixes))

    def _forget_snapshot(self, snapshot: StateSnapshot) -> None:
        for prefix in list(self._at_snapshot.get(snapshot, ())):
            self._forget(prefix)

    def _rank_snapshot(self, snapshot: StateSnapshot) -> None:
        """It goes as the highest of its prefixes says."""
        snapshots = self._paths.snapshots
        if snapshots is not None and snapshot.is_cached:
            places = [prefix.place for prefix in self._at_snapshot.get(snapshot, ())]
            snapshots.retain(snapshot, max(places, default=None))

    def _push(self, tier: Tier, prefix: RetainedPrefix) -> None:
        order = self._orders[tier]
        if len(order) > 2 * len(self._prefixes) + 8:
            order = self._orders[tier] = [entry for entry in order if _stands(entry, tier)]
            heapq.heapify(order)
        heapq.heappush(order, (*prefix.place, self._made, prefix))
        self._made += 1

    def _lowest(self, tier: Tier, also_on: Tier | None = None) -> RetainedPrefix | None:
        """The first to be given up on ``tier``; with ``also_on`` of those that are held there, too."""
        order = self._orders[tier]
        while order and not _stands(order[0], tier):
            heapq.heappop(order)
        if also_on is None or not order:
            return order[0][3] if order else None
        on_both_tiers = (entry for entry in order if _stands(entry, tier) and also_on in entry[3].tiers)
        return min(on_both_tiers, default=(None,))[-1]

    def _keep_quotas(self, newest: str) -> None:
        while sum(self._tenant_tokens.values()) > self.tokens_max:
            tenant = max(self._tenant_tokens, key=lambda name: (self._tenant_tokens[name], name == newest, name))
            tenant_prefixes = [prefix for prefix in self._prefixes.values() if prefix.tenant == tenant]
            self.end_retention(min(tenant_prefixes, key=lambda prefix: prefix.place).handle)


def _stands(entry: tuple[float, int, int, RetainedPrefix], tier: Tier) -> bool:
    """Whether an entry of an order is not overtaken: the prefix is held on the tier still, with this priority."""
    priority, _, _, prefix = entry
    return tier in prefix.tiers and priority == prefix.priority


def _nothing() -> None:
    """Nothing hears of it."""


Place = TypeVar("Place")


def _remove_at(prefixes: dict[Place, dict[RetainedPrefix, None]], place: Place, prefix: RetainedPrefix) -> None:
    del prefixes[place][prefix]
    if not prefixes[place]:
        del prefixes[place]
