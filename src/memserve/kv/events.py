"""What a pool tells others: KV events for the global trees, a report of its memory, and the changes of its index as
messages for the router.

Changes are numbered from 0 by the pool. The last ones are kept for a router that missed some. A router that missed more
than are kept gets everything that the index holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, islice
from operator import itemgetter
from typing import Protocol

from memserve.base.types import Tier
from memserve.kv.snapshots import SnapshotReport
from memserve.kv.windows import WindowReport
from memserve.protocol.messages import KvChange, KvEvents, KvSnapshot

DROPPED_HBM, DROPPED_DRAM, MOVED_DOWN = 0, 1, 2  # kinds of changes in `_core.Eviction`


class KvEventKind(StrEnum):
    """What happened to cached blocks."""

    STORED = "stored"  # the index has them now, on `tier`
    MOVED = "moved"  # now they lie on `tier`
    EVICTED = "evicted"  # the index no longer has them
    LOST = "lost"  # events were dropped before this one: the follower must ask for everything


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of the index. Block identities name (namespace, tokens up to the block's end), see ``identity``."""

    sequence: int  # counts up by one within a pool: a gap means that events were lost
    kind: KvEventKind
    tier: Tier
    identities: tuple[bytes, ...]  # 16 bytes each


class EventLog:
    """A bounded buffer of :class:`KvEvent` that knows which identity lies in which block.

    With ``capacity`` 0 it is off and costs nothing. When the buffer overflows the oldest event goes, and the next
    ``take`` opens with a ``LOST`` event.
    """

    def __init__(self, capacity: int) -> None:
        self.enabled = capacity > 0
        self._events: deque[KvEvent] = deque(maxlen=capacity or None)
        self._sequence = 0
        self._lost = False
        #: identity of every block that the index holds
        self._identity: dict[tuple[Tier, int], bytes] = {}

    def on_published(
        self, hbm: Sequence[int], dram: Sequence[int], identities: Sequence[bytes], adopted_dram: Sequence[int]
    ) -> None:
        """The index has the path ``identities``, in ``hbm``, then in ``dram``; ``adopted_dram`` came up from DRAM."""
        came_up = {self._identity.pop((Tier.DRAM, block)) for block in adopted_dram}
        places = [(Tier.HBM, block) for block in hbm] + [(Tier.DRAM, block) for block in dram]
        moved: list[bytes] = []
        stored: dict[Tier, list[bytes]] = {Tier.HBM: [], Tier.DRAM: []}
        for place, identity in zip(places, identities, strict=True):
            if self._identity.get(place) != identity:
                self._identity[place] = identity
                (moved if identity in came_up else stored[place[0]]).append(identity)
        self._append_event(KvEventKind.MOVED, Tier.HBM, moved)
        for tier, new in stored.items():
            self._append_event(KvEventKind.STORED, tier, new)

    def on_promoted(self, dram_blocks: Sequence[int], hbm_blocks: Sequence[int]) -> None:
        """The entries of ``dram_blocks`` moved to ``hbm_blocks``."""
        identities = [self._identity.pop((Tier.DRAM, block)) for block in dram_blocks]
        for block, identity in zip(hbm_blocks, identities, strict=True):
            self._identity[Tier.HBM, block] = identity
        self._append_event(KvEventKind.MOVED, Tier.HBM, identities)

    def on_evicted(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """An eviction, as :class:`memserve._core.Eviction` lists it; neighbours of one kind become one event."""
        for kind, run in groupby(changes, key=itemgetter(0)):
            tier = Tier.DRAM if kind == DROPPED_DRAM else Tier.HBM
            identities = []
            for _, source, target in run:
                identity = self._identity.pop((tier, source))
                identities.append(identity)
                if kind == MOVED_DOWN:
                    self._identity[Tier.DRAM, target] = identity
            if kind == MOVED_DOWN:
                self._append_event(KvEventKind.MOVED, Tier.DRAM, identities)
            else:
                self._append_event(KvEventKind.EVICTED, tier, identities)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        if self._lost:
            events.insert(0, KvEvent(events[0].sequence - 1, KvEventKind.LOST, Tier.HBM, ()))
            self._lost = False
        return events

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._sequence

    def identities_on(self, tier: Tier) -> bytes:
        """Identities of all blocks that the index holds on ``tier``, 16 bytes each, in no particular order."""
        return b"".join(identity for (place, _), identity in self._identity.items() if place is tier)

    def _append_event(self, kind: KvEventKind, tier: Tier, identities: Sequence[bytes]) -> None:
        if not identities:
            return
        self._lost = self._lost or len(self._events) == self._events.maxlen
        self._events.append(KvEvent(self._sequence, kind, tier, tuple(identities)))
        self._sequence += 1


@dataclass(frozen=True, slots=True)
class TierReport:
    """Blocks of one tier. ``total = free + used``; cached blocks are part of the used ones."""

    tier: Tier
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int  # known to the prefix index, or of snapshots
    blocks_pinned: int  # cached and under a pin: not evictable
    blocks_evictable: int  # cached, and free as soon as they are given up
    pages_free: int = 0  # pages that are not allocated, in free and in broken blocks
    pages_stranded: int = 0  # those of them in broken blocks: no request for a whole block can use them


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The state of a pool's memory.

    External fragmentation is free memory that a request for a block cannot use. Every block has the same size and any
    free block serves any request, so only loose pages (which break blocks) can cause it. Internal fragmentation (the
    unused tail of each sequence's last block, below one block a sequence) is known only to the machine: see
    ``MemoryReport`` of the instance.
    """

    tiers: tuple[TierReport, ...]
    block_tokens: int
    copies_pending: int = 0  # blocks with a recorded copy that has not been taken yet
    snapshots: SnapshotReport = field(default_factory=SnapshotReport)  # all zero: layers keep KV alone
    windows: WindowReport = field(default_factory=WindowReport)  # all zero: no layers' KV lies apart
    by_tier: dict[Tier, TierReport] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_tier", {report.tier: report for report in self.tiers})

    @property
    def external_fragmentation(self) -> float:
        """Free pages in broken blocks as a share of all free pages, 0 to 1."""
        free = sum(tier.pages_free for tier in self.tiers)
        return sum(tier.pages_stranded for tier in self.tiers) / free if free else 0.0


class KvSource(Protocol):
    """What has KV events: a pool, or a store's log."""

    @property
    def next_event(self) -> int:
        """Number of the next change."""

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""

    def cached_identities(self, tier: Tier) -> bytes:
        """Identities of all that is kept on ``tier``, 16 bytes each."""


class KvFeed:
    """Reads the pool's KV events, remembers the last ones, and replays them."""

    def __init__(self, pool: KvSource, capacity: int) -> None:
        self._pool = pool
        #: the last changes, without a gap; the last one has the number ``pool.next_event - 1``
        self._ring: deque[KvChange] = deque(maxlen=capacity)

    @property
    def next_event(self) -> int:
        """Number of the next change."""
        return self._pool.next_event

    def take_changes(self) -> KvEvents | None:
        """The changes since the last call."""
        events = self._pool.take_events()
        if not events:
            return None
        if (
            events[0].kind is KvEventKind.LOST
        ):  # the pool's own buffer ran over: the changes kept here have a gap behind them
            self._ring.clear()
            del events[0]
        changes = tuple(_change(event) for event in events)
        self._ring.extend(changes)
        return KvEvents(events[0].sequence, changes)

    def replay_from(self, first: int) -> KvEvents | KvSnapshot | None:
        """All changes from number ``first`` on; a snapshot when they are not kept any more. None: there are none."""
        missing_count = self.next_event - first
        if missing_count == 0:
            return None
        if 0 < missing_count <= len(self._ring):
            return KvEvents(first, tuple(islice(reversed(self._ring), missing_count))[::-1])
        return self.snapshot()

    def answer_query(self, first: int | None) -> KvEvents | KvSnapshot | None:
        """For a router that asks for all changes from number ``first`` on; ``None``: for everything. To be called when
        :meth:`take_changes` has been sent."""
        return self.snapshot() if first is None else self.replay_from(first)

    def snapshot(self) -> KvSnapshot:
        """Everything that the index holds now. To be called when :meth:`take_changes` has been sent."""
        pool = self._pool
        hbm, dram, ssd = (pool.cached_identities(tier) for tier in (Tier.HBM, Tier.DRAM, Tier.SSD))
        return KvSnapshot(self.next_event, hbm, dram, ssd)


def _change(event: KvEvent) -> KvChange:
    return KvChange(event.kind.value, event.tier, b"".join(event.identities))
