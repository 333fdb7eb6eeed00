"""The index's changes as messages for the router's trees.

Changes are numbered from 0 by the pool. The last ones are kept for a router that missed some. A router that missed more
than are kept gets everything that the index holds.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from memserve.base.types import Tier
from memserve.kv.events import KvEvent, KvEventKind
from memserve.protocol.messages import KvChange, KvEvents, KvSnapshot


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
