"""What an engine that is a member has cached, in the words of the cluster: its KV events as those of an instance.

The engine names blocks by hashes of its own, of its own size; :class:`~memserve.fleet.kv_events.EngineKvFeed` turns
them into identities of the cluster's blocks. Here these become numbered changes, as a pool's: with one copy more or
less in each, which the router's directory counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.kv.events import KvEvent, KvEventKind

IDENTITY_BYTES = 16
_TIERS = (Tier.HBM, Tier.DRAM)


class EngineIndex:
    """A :class:`~memserve.fleet.kv_events.KvDirectory` of one engine, and a :class:`~memserve.kv.events.KvSource`."""

    def __init__(self) -> None:
        self._copies: dict[bytes, list[int]] = {}  # of each identity, on the upper and the lower tier
        self._events: list[KvEvent] = []
        self._sequence = 0

    # -- the engine's side

    def store(self, holder: int, tier: int, identities: bytes) -> None:
        """One copy more of each, on this tier (0 upper, 1 lower)."""
        for identity in _each(identities):
            self._copies.setdefault(identity, [0, 0])[tier] += 1
        self._append_event(KvEventKind.STORED, _TIERS[tier], identities)

    def evict(self, holder: int, identities: bytes, tier: int) -> None:
        """One copy less of each. There must be one."""
        for identity in _each(identities):
            copies = self._copies[identity]
            check(copies[tier] > 0, "no copy of {} on tier {}", identity.hex(), tier)
            if tier == 0 and copies[1]:  # a router takes what is evicted from the lower tier first
                self._append_event(KvEventKind.MOVED, Tier.DRAM, identity)
            self._append_event(KvEventKind.EVICTED, _TIERS[tier], identity)
            copies[tier] -= 1
            if not any(copies):
                del self._copies[identity]

    def clear(self, holder: int) -> None:
        """The engine has nothing."""
        for identity, (upper, lower) in self._copies.items():
            for tier, count in ((Tier.DRAM, lower), (Tier.HBM, upper)):
                for _ in range(count):
                    self._append_event(KvEventKind.EVICTED, tier, identity)
        self._copies.clear()

    # -- the routers' side

    @property
    def next_event(self) -> int:
        """Number of the next change."""
        return self._sequence

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_identities(self, tier: Tier) -> bytes:
        """Identities of all that lies on ``tier``, 16 bytes each, as often as there are copies."""
        if tier not in _TIERS:
            return b""
        place = _TIERS.index(tier)
        return b"".join(identity * copies[place] for identity, copies in self._copies.items())

    def matched_blocks(self, identities: bytes) -> int:
        """How many of these blocks, from the first one on, the engine has."""
        count = 0
        for identity in _each(identities):
            if identity not in self._copies:
                break
            count += 1
        return count

    def _append_event(self, kind: KvEventKind, tier: Tier, identities: bytes) -> None:
        self._events.append(KvEvent(self._sequence, kind, tier, tuple(_each(identities))))
        self._sequence += 1

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if something is listed of which there is no copy."""
        for identity, copies in self._copies.items():
            check(len(identity) == IDENTITY_BYTES and any(copies) and min(copies) >= 0, "copies: {}", copies)


def _each(identities: bytes) -> Iterator[bytes]:
    return (identities[at : at + IDENTITY_BYTES] for at in range(0, len(identities), IDENTITY_BYTES))
