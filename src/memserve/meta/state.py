"""The state that records add up to: what a journal's checkpoint holds, and what recovery returns.

It lives in the store's thread, apart from the machine's own state, so that writing a checkpoint costs the machine
nothing. Times in records are on a router's clock; here they are ns since 1970.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from memserve.errors import check
from memserve.messages import Peer, PeerInfo
from memserve.meta.entries import Entries
from memserve.metadata import (
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
from memserve.units import NS_PER_S

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
        self._gone: OrderedDict[Peer, None] = OrderedDict()
        self.sessions: OrderedDict[tuple[str, str], SessionRouted] = OrderedDict()
        #: ``expires_ns`` is since 1970
        self.handles: dict[tuple[str, str], HandlePinned] = {}
        self.documents: dict[tuple[str, str], DocumentPut] = {}
        self._apply: dict[type, Callable[[Any], None]] = {
            RouterStarted: self._started, MemberEntered: self._entered, MemberDrained: self._drained,
            MemberGone: self._left, EntriesChanged: self._changed, EntriesReplaced: self._replaced,
            EntriesKept: self._kept, EntryUsed: self._used, SessionRouted: self._routed,
            HandlePinned: self._pinned, HandleDropped: self._dropped, DocumentPut: self._document_put,
            DocumentDropped: self._document_dropped,
        }  # fmt: skip

    @property
    def entries(self) -> int:
        """Cached blocks of all members."""
        return sum(len(page.entries) for page in self.members.values())

    def apply(self, records: Iterable[AnyRecord]) -> None:
        """Apply ``records``, in order."""
        for record in records:
            self._apply[type(record)](record)

    # -- routers and members

    def _started(self, record: RouterStarted) -> None:
        self.router, self.address, self._offset_ns = record.router, record.address, record.clock_offset_ns

    def _entered(self, record: MemberEntered) -> None:
        peer = record.info.peer
        known = self.members.get(peer.name)
        if peer in self._gone or (known is not None and known.info.peer.generation > peer.generation):
            return
        if known is not None and known.info.peer == peer:
            known.info = record.info
            return
        self.members.pop(peer.name, None)
        self.members[peer.name] = MemberPage(record.info, self._since_1970(record.at_ns))

    def _drained(self, record: MemberDrained) -> None:
        page = self._page(record.peer)
        if page is not None:
            page.is_draining = True

    def _left(self, record: MemberGone) -> None:
        if self._page(record.peer) is not None:
            del self.members[record.peer.name]
        self._gone[record.peer] = None
        if len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

    # -- entries

    def _changed(self, record: EntriesChanged) -> None:
        page = self._page(record.peer)
        if page is not None:
            page.entries.change(record.first, record.changes, self._since_1970(record.at_ns))

    def _replaced(self, record: EntriesReplaced) -> None:
        page = self._page(record.peer)
        if page is not None:
            now_ns = self._since_1970(record.at_ns)
            page.entries.replace(record.next_event, record.hbm, record.dram, now_ns, record.ssd)

    def _kept(self, record: EntriesKept) -> None:
        page = self._page(record.peer)
        if page is not None:
            page.entries.restore(record)

    def _used(self, record: EntryUsed) -> None:
        page = self._page(record.peer)
        if page is not None:
            page.entries.use(record.identity, self._since_1970(record.at_ns))

    # -- sessions, handles, documents

    def _routed(self, record: SessionRouted) -> None:
        key = record.tenant, record.session
        self.sessions[key] = record
        self.sessions.move_to_end(key)
        if len(self.sessions) > SESSIONS_MAX:
            self.sessions.popitem(last=False)

    def _pinned(self, record: HandlePinned) -> None:
        until_ns = self._since_1970(record.expires_ns)
        self.handles[record.tenant, record.handle] = replace(record, expires_ns=until_ns)

    def _dropped(self, record: HandleDropped) -> None:
        self.handles.pop((record.tenant, record.handle), None)

    def _document_put(self, record: DocumentPut) -> None:
        self.documents[record.tenant, record.document_id] = record

    def _document_dropped(self, record: DocumentDropped) -> None:
        self.documents.pop((record.tenant, record.document_id), None)

    def _page(self, peer: Peer) -> MemberPage | None:
        page = self.members.get(peer.name)
        return page if page is not None and page.info.peer == peer else None

    def _since_1970(self, at_ns: int) -> int:
        return at_ns + self._offset_ns

    # -- checkpoints and recovery

    def records(self) -> Iterator[AnyRecord]:
        """The shortest records of the whole state: a checkpoint. Applied to an empty state they make an equal one."""
        if self.router is not None:  # offset 0 for the times below, which are since 1970; the true one comes last
            yield RouterStarted(self.router, self.address, 0)
        yield from (MemberGone(peer) for peer in self._gone)
        for page in self.members.values():
            yield MemberEntered(page.info, page.entered_ns)
            if page.is_draining:
                yield MemberDrained(page.info.peer)
            yield page.entries.record(page.info.peer)
        yield from self.sessions.values()
        yield from self.handles.values()
        yield from self.documents.values()
        if self.router is not None:
            yield RouterStarted(self.router, self.address, self._offset_ns)

    def recovered(self, clock_offset_ns: int) -> RecoveredState:
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
            tuple(self._gone),
            tuple(self.sessions.values()),
            tuple(handles),
            tuple(self.documents.values()),
        )

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        for name, page in self.members.items():
            check(page.info.peer.name == name, f"{page.info.peer} is listed as {name}")
            check(page.info.peer not in self._gone, f"{page.info.peer} is a member, and gone")
            check(all(len(identity) == 16 for identity in page.entries.stamps), f"{name} has broken identities")
        check(len(self.sessions) <= SESSIONS_MAX and len(self._gone) <= GONE_MAX, "more is kept than the limits allow")
