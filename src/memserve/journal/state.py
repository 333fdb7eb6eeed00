"""The state that records add up to: what a journal's checkpoint holds, and what recovery returns.

It lives in the store's thread, apart from the machine's own state, so that writing a checkpoint costs the machine
nothing. Times in records are on a router's clock; here they are ns since 1970.

The cache entries of one member: which blocks, on which tier, since when, when last used, and how often.

A million of them must fit, so an entry is a key of 16 bytes in a dict and one integer, its stamp, which all entries of
one batch share::

    bit 63        | bits 62..32              | bit 31            | bits 30..0
    tier: 1 DRAM  | created, s since 1970    | tier: 1 SSD       | last used, s since 1970

A use is noted at the deepest block of the used prefix: a block was last used when it or one of its descendants was. Few
blocks are the deepest of a prefix, so a separate dict counts their uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from struct import unpack
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.base.units import NS_PER_S
from memserve.kv.events import KvEventKind
from memserve.protocol.messages import KvChange
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.records import (
    AdapterDropped,
    AdapterPut,
    AnyRecord,
    DocumentDropped,
    DocumentPut,
    EntriesChanged,
    EntriesKept,
    EntriesReplaced,
    EntryUsed,
    HandleDropped,
    HandlePinned,
    MemberDrained,
    MemberEntered,
    MemberGone,
    RecoveredMember,
    RecoveredState,
    RouterStarted,
    SessionRouted,
)

IDENTITY_BYTES = 16
_DRAM, _SSD = 1 << 63, 1 << 31
_TIER = {Tier.HBM: 0, Tier.DRAM: _DRAM, Tier.SSD: _SSD}
_SECONDS = (1 << 31) - 1
_HITS, _AGE_S = (1 << 6) - 1, (1 << 26) - 1  # the limits of the sort key: 63 uses, two years


def stamp_of(tier: Tier, created_ns: int, used_ns: int) -> int:
    """All three in one integer; times in ns since 1970."""
    created_s, used_s = (max(0, ns // NS_PER_S) & _SECONDS for ns in (created_ns, used_ns))
    return _TIER[tier] | created_s << 32 | used_s


def split_identities(identities: bytes) -> tuple[bytes, ...]:
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

    def apply_changes(self, first: int, changes: tuple[KvChange, ...], now_ns: int) -> None:
        """Apply the new part of a batch, in order. After a gap apply nothing: a replacement will come."""
        if first > self.next_event:
            return
        for change in changes[self.next_event - first :]:
            if change.kind == KvEventKind.LOST:
                return
            self._apply_change(change, now_ns)
            self.next_event += 1

    def _apply_change(self, change: KvChange, now_ns: int) -> None:
        stamps, identities = self.stamps, split_identities(change.identities)
        if change.kind == KvEventKind.EVICTED:
            for identity in identities:
                stamps.pop(identity, None)
                self.hits.pop(identity, None)
        else:  # stored, or moved; an unknown block that moves counts as stored, as in the directory
            fresh = stamp_of(change.tier, now_ns, now_ns)
            for identity in identities:
                stamp = stamps.get(identity)
                stamps[identity] = fresh if stamp is None else _stamp_on_tier(stamp, change.tier)

    def replace_entries(self, next_event: int, hbm: bytes, dram: bytes, now_ns: int, ssd: bytes = b"") -> None:
        """Replace all entries by these; known blocks keep their times. Ignored if older than the present state."""
        if next_event < self.next_event:
            return
        old, self.stamps, self.next_event = self.stamps, {}, next_event
        for tier, identities in ((Tier.SSD, ssd), (Tier.DRAM, dram), (Tier.HBM, hbm)):
            fresh = stamp_of(tier, now_ns, now_ns)
            for identity in split_identities(identities):
                old_stamp = old.get(identity)
                self.stamps[identity] = fresh if old_stamp is None else _stamp_on_tier(old_stamp, tier)
        self.hits = {identity: count for identity, count in self.hits.items() if identity in self.stamps}

    def note_use(self, identity: bytes, now_ns: int) -> None:
        """Note a use of a block; unknown ones are ignored."""
        stamp = self.stamps.get(identity)
        if stamp is not None:
            self.stamps[identity] = stamp & ~_SECONDS | (now_ns // NS_PER_S & _SECONDS)
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
        pairs = [(index, hits[name]) for index, name in enumerate(self.stamps) if name in hits] if hits else []
        return np.array(pairs, "<u4").reshape(-1, 2)

    def to_record(self, peer: Peer) -> EntriesKept:
        """All entries as one record, for a checkpoint."""
        stamps = np.fromiter(self.stamps.values(), np.uint64, len(self.stamps)).astype("<u8")
        return EntriesKept(
            peer, self.next_event, b"".join(self.stamps), stamps.tobytes(), self._hits_by_place().tobytes()
        )

    def restore_record(self, record: EntriesKept) -> None:
        """Take over what :meth:`to_record` returned."""
        stamps = np.frombuffer(record.stamps, "<u8").tolist()
        identities = split_identities(record.identities)
        check(len(stamps) == len(identities), f"{len(identities)} entries have {len(stamps)} stamps")
        self.next_event, self.stamps = record.next_event, dict(zip(identities, stamps, strict=True))
        self.hits = {
            identities[index]: count for index, count in np.frombuffer(record.hits, "<u4").reshape(-1, 2).tolist()
        }


def _stamp_on_tier(stamp: int, tier: Tier) -> int:
    return stamp & ~(_DRAM | _SSD) | _TIER[tier]


SESSIONS_MAX = 100_000
"""Beyond it, the least recently used session is forgotten, here and in the router."""
GONE_MAX = 1024
"""Dead incarnations that are remembered, as many as in the router's registry."""


@dataclass(slots=True)
class MemberPage:
    """What is known of one member."""

    info: PeerInfo
    entered_ns: int
    """Since 1970."""
    is_draining: bool = False
    entries: Entries = field(default_factory=Entries)


class MetadataState:
    """Applies records, in order. A record that comes twice, late or for an unknown member changes nothing."""

    def __init__(self) -> None:
        self.router: Peer | None = None
        self.address = ""
        self._offset_ns = 0
        #: by name, in the order of joining
        self.members: dict[str, MemberPage] = {}
        self._dead_peers: OrderedDict[Peer, None] = OrderedDict()
        self.sessions: OrderedDict[tuple[str, str], SessionRouted] = OrderedDict()
        #: ``expires_ns`` is since 1970
        self.handles: dict[tuple[str, str], HandlePinned] = {}
        self.documents: dict[tuple[str, str], DocumentPut] = {}
        self.adapters: dict[str, AdapterPut] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            RouterStarted: self._on_router_started, MemberEntered: self._on_member_entered,
            MemberDrained: self._on_member_drained,
            MemberGone: self._on_member_gone, EntriesChanged: self._on_entries_changed,
            EntriesReplaced: self._on_entries_replaced,
            EntriesKept: self._on_entries_kept, EntryUsed: self._on_entry_used, SessionRouted: self._on_session_routed,
            HandlePinned: self._on_handle_pinned, HandleDropped: self._on_handle_dropped,
            DocumentPut: self._on_document_put,
            DocumentDropped: self._on_document_dropped,
            AdapterPut: self._on_adapter_put, AdapterDropped: self._on_adapter_dropped,
        }  # fmt: skip

    @property
    def entries(self) -> int:
        """Cached blocks of all members."""
        return sum(len(page.entries) for page in self.members.values())

    def apply(self, records: Iterable[AnyRecord]) -> None:
        """Apply ``records``, in order."""
        for record in records:
            self._handlers[type(record)](record)

    # -- routers and members

    def _on_router_started(self, record: RouterStarted) -> None:
        self.router, self.address, self._offset_ns = record.router, record.address, record.clock_offset_ns

    def _on_member_entered(self, record: MemberEntered) -> None:
        peer = record.info.peer
        page = self.members.get(peer.name)
        if peer in self._dead_peers or (page is not None and page.info.peer.generation > peer.generation):
            return
        if page is not None and page.info.peer == peer:
            page.info = record.info
            return
        self.members.pop(peer.name, None)
        self.members[peer.name] = MemberPage(record.info, self._since_1970(record.at_ns))

    def _on_member_drained(self, record: MemberDrained) -> None:
        page = self._page_of(record.peer)
        if page is not None:
            page.is_draining = True

    def _on_member_gone(self, record: MemberGone) -> None:
        if self._page_of(record.peer) is not None:
            del self.members[record.peer.name]
        self._dead_peers[record.peer] = None
        if len(self._dead_peers) > GONE_MAX:
            self._dead_peers.popitem(last=False)

    # -- entries

    def _on_entries_changed(self, record: EntriesChanged) -> None:
        page = self._page_of(record.peer)
        if page is not None:
            page.entries.apply_changes(record.first, record.changes, self._since_1970(record.at_ns))

    def _on_entries_replaced(self, record: EntriesReplaced) -> None:
        page = self._page_of(record.peer)
        if page is not None:
            now_ns = self._since_1970(record.at_ns)
            page.entries.replace_entries(record.next_event, record.hbm, record.dram, now_ns, record.ssd)

    def _on_entries_kept(self, record: EntriesKept) -> None:
        page = self._page_of(record.peer)
        if page is not None:
            page.entries.restore_record(record)

    def _on_entry_used(self, record: EntryUsed) -> None:
        page = self._page_of(record.peer)
        if page is not None:
            page.entries.note_use(record.identity, self._since_1970(record.at_ns))

    # -- sessions, handles, documents

    def _on_session_routed(self, record: SessionRouted) -> None:
        key = record.tenant, record.session
        self.sessions[key] = record
        self.sessions.move_to_end(key)
        if len(self.sessions) > SESSIONS_MAX:
            self.sessions.popitem(last=False)

    def _on_handle_pinned(self, record: HandlePinned) -> None:
        until_ns = self._since_1970(record.expires_ns)
        self.handles[record.tenant, record.handle] = replace(record, expires_ns=until_ns)

    def _on_handle_dropped(self, record: HandleDropped) -> None:
        self.handles.pop((record.tenant, record.handle), None)

    def _on_document_put(self, record: DocumentPut) -> None:
        self.documents[record.tenant, record.document_id] = record

    def _on_document_dropped(self, record: DocumentDropped) -> None:
        self.documents.pop((record.tenant, record.document_id), None)

    def _on_adapter_put(self, record: AdapterPut) -> None:
        self.adapters[record.name] = record

    def _on_adapter_dropped(self, record: AdapterDropped) -> None:
        self.adapters.pop(record.name, None)

    def _page_of(self, peer: Peer) -> MemberPage | None:
        page = self.members.get(peer.name)
        return page if page is not None and page.info.peer == peer else None

    def _since_1970(self, at_ns: int) -> int:
        return at_ns + self._offset_ns

    # -- checkpoints and recovery

    def checkpoint_records(self) -> Iterator[AnyRecord]:
        """The shortest records of the whole state: a checkpoint. Applied to an empty state they make an equal one."""
        if self.router is not None:  # offset 0 for the times below, which are since 1970; the true one comes last
            yield RouterStarted(self.router, self.address, 0)
        yield from (MemberGone(peer) for peer in self._dead_peers)
        for page in self.members.values():
            yield MemberEntered(page.info, page.entered_ns)
            if page.is_draining:
                yield MemberDrained(page.info.peer)
            yield page.entries.to_record(page.info.peer)
        yield from self.sessions.values()
        yield from self.handles.values()
        yield from self.documents.values()
        yield from self.adapters.values()
        if self.router is not None:
            yield RouterStarted(self.router, self.address, self._offset_ns)

    def recovered_state(self, clock_offset_ns: int) -> RecoveredState:
        """The whole state, for a router with a clock that is ``clock_offset_ns`` behind the ns since 1970."""
        members = []
        for page in self.members.values():
            hbm, dram, ssd = page.entries.by_tier()
            used = tuple((used_s * NS_PER_S - clock_offset_ns, blocks) for used_s, blocks in page.entries.by_use())
            next_event = page.entries.next_event
            members.append(RecoveredMember(page.info, page.is_draining, next_event, hbm, dram, used, ssd))
        handles = (replace(pin, expires_ns=pin.expires_ns - clock_offset_ns) for pin in self.handles.values())
        return RecoveredState(
            self.router,
            self.address,
            tuple(members),
            tuple(self._dead_peers),
            tuple(self.sessions.values()),
            tuple(handles),
            tuple(self.documents.values()),
            tuple(self.adapters.values()),
        )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        for name, page in self.members.items():
            check(page.info.peer.name == name, f"{page.info.peer} is listed as {name}")
            check(page.info.peer not in self._dead_peers, f"{page.info.peer} is a member, and gone")
            check(all(len(identity) == 16 for identity in page.entries.stamps), f"{name} has broken identities")
        check(
            len(self.sessions) <= SESSIONS_MAX and len(self._dead_peers) <= GONE_MAX,
            "more is kept than the limits allow",
        )
