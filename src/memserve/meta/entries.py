"""The cache entries of one member: which blocks, on which tier, since when, when last used, and how often.

A million of them must fit, so an entry is a key of 16 bytes in a dict and one integer, its stamp, which all entries of
one batch share::

    bit 63        | bits 62..32              | bit 31            | bits 30..0
    tier: 1 DRAM  | created, s since 1970    | tier: 1 SSD       | last used, s since 1970

A use is noted at the deepest block of the used prefix: a block was last used when it or one of its descendants was. Few
blocks are the deepest of a prefix, so a separate dict counts their uses.
"""

from __future__ import annotations

from struct import unpack

import numpy as np
from numpy.typing import NDArray

from memserve.errors import check
from memserve.mempool.events import KvEventKind
from memserve.messages import KvChange
from memserve.metadata import EntriesKept
from memserve.peers import Peer
from memserve.types import Tier
from memserve.units import NS_PER_S

IDENTITY_BYTES = 16
_DRAM, _SSD = 1 << 63, 1 << 31
_TIER = {Tier.HBM: 0, Tier.DRAM: _DRAM, Tier.SSD: _SSD}
_SECONDS = (1 << 31) - 1
_HITS, _AGE_S = (1 << 6) - 1, (1 << 26) - 1  # the limits of the sort key: 63 uses, two years


def stamp_of(tier: Tier, created_ns: int, used_ns: int) -> int:
    """All three in one integer; times in ns since 1970."""
    created_s, used_s = (max(0, ns // NS_PER_S) & _SECONDS for ns in (created_ns, used_ns))
    return _TIER[tier] | created_s << 32 | used_s


def split(identities: bytes) -> tuple[bytes, ...]:
    """The single identities of concatenated ones."""
    count = len(identities) // IDENTITY_BYTES
    return unpack("16s" * count, identities[: count * IDENTITY_BYTES])


class Entries:
    """Blocks by identity, with their stamps, up to one number of the member's KV events."""

    __slots__ = ("hits", "next_event", "stamps")

    def __init__(self) -> None:
        self.next_event = 0
        self.stamps: dict[bytes, int] = {}
        #: how often a block was the last of a used prefix; absent: never
        self.hits: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.stamps)

    def change(self, first: int, changes: tuple[KvChange, ...], now_ns: int) -> None:
        """Apply the new part of a batch, in order. After a gap apply nothing: a replacement will come."""
        if first > self.next_event:
            return
        for change in changes[self.next_event - first :]:
            if change.kind == KvEventKind.LOST:
                return
            self._apply(change, now_ns)
            self.next_event += 1

    def _apply(self, change: KvChange, now_ns: int) -> None:
        stamps, identities = self.stamps, split(change.identities)
        if change.kind == KvEventKind.EVICTED:
            for identity in identities:
                stamps.pop(identity, None)
                self.hits.pop(identity, None)
        else:  # stored, or moved; an unknown block that moves counts as stored, as in the directory
            fresh = stamp_of(change.tier, now_ns, now_ns)
            for identity in identities:
                known = stamps.get(identity)
                stamps[identity] = fresh if known is None else _moved(known, change.tier)

    def replace(self, next_event: int, hbm: bytes, dram: bytes, now_ns: int, ssd: bytes = b"") -> None:
        """Replace all entries by these; known blocks keep their times. Ignored if older than the present state."""
        if next_event < self.next_event:
            return
        old, self.stamps, self.next_event = self.stamps, {}, next_event
        for tier, identities in ((Tier.SSD, ssd), (Tier.DRAM, dram), (Tier.HBM, hbm)):
            fresh = stamp_of(tier, now_ns, now_ns)
            for identity in split(identities):
                known = old.get(identity)
                self.stamps[identity] = fresh if known is None else _moved(known, tier)
        self.hits = {identity: count for identity, count in self.hits.items() if identity in self.stamps}

    def use(self, identity: bytes, now_ns: int) -> None:
        """Note a use of a block; unknown ones are ignored."""
        known = self.stamps.get(identity)
        if known is not None:
            self.stamps[identity] = known & ~_SECONDS | (now_ns // NS_PER_S & _SECONDS)
            self.hits[identity] = self.hits.get(identity, 0) + 1

    def by_tier(self) -> tuple[bytes, bytes, bytes]:
        """Identities in HBM, those in DRAM, and those on disks."""
        keys = np.frombuffer(b"".join(self.stamps), "V16")
        stamps = np.fromiter(self.stamps.values(), np.uint64, len(self.stamps))
        in_dram, on_ssd = stamps >= np.uint64(_DRAM), (stamps & np.uint64(_SSD)) != 0
        return keys[~(in_dram | on_ssd)].tobytes(), keys[in_dram].tobytes(), keys[on_ssd].tobytes()

    def by_use(self) -> list[tuple[int, int]]:
        """Blocks in HBM by their last use: seconds since 1970 and a count, least recently used first; within a second
        less often used ones first, and of these the older ones."""
        stamps = np.fromiter(self.stamps.values(), np.uint64, len(self.stamps))
        hits = np.zeros(len(stamps), np.uint64)
        places, counts = self._hits_by_place().T
        hits[places] = np.minimum(counts, _HITS)
        in_hbm = (stamps < np.uint64(_DRAM)) & ((stamps & np.uint64(_SSD)) == 0)
        stamps, hits = stamps[in_hbm].astype(np.int64), hits[in_hbm].astype(np.int64)
        used, created = stamps & _SECONDS, stamps >> 32
        youth = _AGE_S - np.clip(used - created, 0, _AGE_S)
        order, counts = np.unique((used * (_HITS + 1) + hits) * (_AGE_S + 1) + youth, return_counts=True)
        return list(zip((order // ((_HITS + 1) * (_AGE_S + 1))).tolist(), counts.tolist(), strict=True))

    def _hits_by_place(self) -> NDArray[np.uint32]:
        """Place among all blocks, and number of uses, of each used block. ``[n, 2]``."""
        hits = self.hits
        found = [(at, hits[name]) for at, name in enumerate(self.stamps) if name in hits] if hits else []
        return np.array(found, "<u4").reshape(-1, 2)

    def record(self, peer: Peer) -> EntriesKept:
        """All entries as one record, for a checkpoint."""
        stamps = np.fromiter(self.stamps.values(), np.uint64, len(self.stamps)).astype("<u8")
        return EntriesKept(
            peer, self.next_event, b"".join(self.stamps), stamps.tobytes(), self._hits_by_place().tobytes()
        )

    def restore(self, kept: EntriesKept) -> None:
        """Take over what :meth:`record` returned."""
        stamps = np.frombuffer(kept.stamps, "<u8").tolist()
        identities = split(kept.identities)
        check(len(stamps) == len(identities), f"{len(identities)} entries have {len(stamps)} stamps")
        self.next_event, self.stamps = kept.next_event, dict(zip(identities, stamps, strict=True))
        self.hits = {identities[at]: count for at, count in np.frombuffer(kept.hits, "<u4").reshape(-1, 2).tolist()}


def _moved(stamp: int, tier: Tier) -> int:
    return stamp & ~(_DRAM | _SSD) | _TIER[tier]
