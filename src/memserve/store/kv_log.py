"""Which KV blocks a store has, and where, as it tells the router: numbered changes, and everything at once."""

from __future__ import annotations

from memserve.mempool.events import KvEvent, KvEventKind
from memserve.types import Tier

GROUP_MAX = 4096
"""Identities of one change."""


class KvLog:
    """A source of :class:`memserve.instance.kv_feed.KvFeed`. What lies in memory and on a disk counts as in memory."""

    def __init__(self) -> None:
        self._places: dict[bytes, Tier] = {}
        self._number = 1  # so that a router asks for what was here from the start
        self._changes: list[tuple[KvEventKind, Tier, list[bytes]]] = []

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._places

    def __len__(self) -> int:
        return len(self._places)

    def tier_of(self, identity: bytes) -> Tier | None:
        """Where a block lies. None: nowhere."""
        return self._places.get(identity)

    def place(self, identity: bytes, tier: Tier | None) -> None:
        """A block lies on ``tier`` from now on. None: nowhere."""
        before = self._places.get(identity)
        if before is tier:
            return
        if tier is None:
            del self._places[identity]
            self._note(KvEventKind.EVICTED, before or Tier.DRAM, identity)
        else:
            self._places[identity] = tier
            self._note(KvEventKind.STORED if before is None else KvEventKind.MOVED, tier, identity)

    def _note(self, kind: KvEventKind, tier: Tier, identity: bytes) -> None:
        last = self._changes[-1] if self._changes else None
        if last is not None and last[0] is kind and last[1] is tier and len(last[2]) < GROUP_MAX:
            last[2].append(identity)
        else:
            self._changes.append((kind, tier, [identity]))

    # -- the source of a feed

    @property
    def next_event(self) -> int:
        """Number of the next change that :meth:`take_events` will return."""
        return self._number

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""
        events = []
        for kind, tier, identities in self._changes:
            events.append(KvEvent(self._number, kind, tier, tuple(identities)))
            self._number += 1
        self._changes.clear()
        return events

    def cached_identities(self, tier: Tier) -> bytes:
        """Identities of all blocks on ``tier``, 16 bytes each."""
        return b"".join(identity for identity, place in self._places.items() if place is tier)

    def identities(self) -> list[bytes]:
        """All of them."""
        return list(self._places)
