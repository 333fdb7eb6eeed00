"""LoRA adapters that come and go while a cluster serves: which there are, and which members have them.

::

    AdapterNamed --HoldAdapters--> all instances --AdaptersHeld--> all have it --> journal, names
                                                                   one cannot  --> nothing --> AdapterAnswered(why)
    names --NameAdapters--> all followers --AdaptersNamed--> all know them --> AdapterAnswered("")
    AdapterUnnamed --> journal, names ... its last request ends at every router --HoldAdapters (without it)-->

Followers know a new instance when it has what they may name: the owner introduces it to them then.

An instance that joins, or joins again, gets no requests before it has what the others have; where none can have it any
more, since its files are gone, requests that do not name it are served nevertheless. A request that has begun
goes on with its adapter, whatever becomes of the name: an adapter leaves the instances behind its last request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memserve.base.errors import check
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, AdaptersNamed, HoldAdapters, NameAdapters
from memserve.protocol.peers import Peer
from memserve.protocol.records import AdapterDropped, AdapterPut
from memserve.router.events import AdapterAnswered, AdapterNamed, AdapterNamesChanged, AdapterUnnamed, MemberChange
from memserve.router.members.registry import Member, MemberState
from memserve.router.parts import RouterParts
from memserve.router.requests.requests import RequestTable

LOADED_WITHIN_NS = 300 * NS_PER_S
"""So long all instances have to load an adapter."""
NO_INSTANCE = "no instance is here to load it: try again"
TOO_LATE = "some instance has not loaded it in time"
NOT_KNOWN = "some router has not said in time that it knows of the change"
ASK_OWNER = "this router is not the owner: ask that one"


@dataclass(slots=True)
class _FollowerNames:
    """What a follower has said of the names that it was told."""

    serial: int = -1
    is_told: bool = False
    serial_before: int = -1
    """Of its answer before the last: a request that named an adapter on the way is in the last one."""
    used: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Leaving:
    """Files that no name leads to any more."""

    files: AdapterFiles
    serial: int
    """Of the names without it."""


@dataclass(slots=True)
class _Loading:
    """An adapter that is not named yet."""

    files: AdapterFiles
    waits_for: set[str] = field(default_factory=set)
    """Names of members."""


class AdapterBook:
    """Names of adapters, and what each member lacks of them."""

    def __init__(self, parts: RouterParts, requests: RequestTable) -> None:
        self._registry, self._loads = parts.tables.registry, parts.tables.loads
        self._timers, self._outbox, self._requests = parts.timers, parts.outbox, requests
        self._named: dict[str, AdapterFiles] = {}
        self._loading: dict[int, _Loading] = {}  # by call
        #: no name leads to them any more, but requests that began with them may run
        self._leaving: dict[str, _Leaving] = {}
        self._unnamed: set[str] = set()  # of the adapters of the start
        self._serial = 0
        self._followers: dict[str, _FollowerNames] = {}  # by member
        self._naming: dict[int, int] = {}  # calls that wait for all followers to have the names of a serial
        #: members that get requests although they could not load some, as no other has more
        self._without: set[str] = set()

    @property
    def wanted(self) -> tuple[AdapterFiles, ...]:
        """What all instances are to have, each content once."""
        loading = (entry.files for entry in self._loading.values())
        every = (*self._named.values(), *(entry.files for entry in self._leaving.values()), *loading)
        return tuple({files.digest: files for files in every}.values())

    def restore_adapters(self, adapters: Iterable[AdapterFiles]) -> None:
        """Those of the last router."""
        self._named = {files.name: files for files in adapters}

    # -- what clients ask for

    def name_adapter(self, event: AdapterNamed, now_ns: int) -> None:
        """Have all instances load it; then it has its name."""
        able = [member for member in self._registry if self._is_able(member)]
        if not able:
            self._outbox.answer_adapter(AdapterAnswered(event.call_id, NO_INSTANCE, is_passing=True))
            return
        self._loading[event.call_id] = _Loading(event.files, {member.name for member in able})
        self._timers.arm(now_ns + LOADED_WITHIN_NS, self._give_up, event.call_id)
        for member in able:
            self._send_wanted(member)

    def unname_adapter(self, event: AdapterUnnamed, now_ns: int) -> None:
        """From now on no new request has it."""
        files = self._named.pop(event.name, None)
        if event.is_fixed:
            self._unnamed.add(event.name)
        self._begin_naming(event.call_id, now_ns)
        if files is not None:
            self._outbox.record_ahead(AdapterDropped(event.name))
            self._let_go(files)
        self._end_named()

    # -- what members say

    def on_registered(self, member: Member) -> None:
        """A member is new, or back: before it may get requests."""
        if member.info.role is Role.ROUTER:
            has_names = bool(self._named or self._unnamed)  # else there is nothing to tell, unless it has some
            self._followers[member.name] = _FollowerNames(-1 if has_names else self._serial)
        if member.shares_kv and self.wanted:
            member.lacks_adapters = True
            self._loads.close_member(member.number)

    def on_introduced(self, member: Member) -> None:
        """It listens."""
        if member.lacks_adapters:
            self._send_wanted(member)
        follower = self._followers.get(member.name)
        if follower is not None and follower.serial < self._serial:
            self._send_names(member)

    def on_heartbeat(self, member: Member) -> None:
        """What was asked of it may have been lost."""
        is_waited_for = any(member.name in loading.waits_for for loading in self._loading.values())
        if member.lacks_adapters or is_waited_for or member.name in self._without:
            self._send_wanted(member)
        follower = self._followers.get(member.name)
        if follower is not None and (self._leaving or follower.serial < self._serial):
            self._send_names(member)
        self._forget_unused()

    def on_named(self, member: Member, message: AdaptersNamed, now_ns: int) -> None:
        """``member``, a follower, has these names, and these requests."""
        follower = self._followers.get(member.name)
        if follower is not None and not follower.is_told:
            self._send_names(member)  # it has names of another owner, or of a time before it was taken to be dead
            return
        if follower is None or message.serial < follower.serial:
            return  # late
        follower.serial_before, follower.serial = follower.serial, message.serial
        follower.used = frozenset(message.used)
        self._end_named()
        self._forget_unused()

    def on_held(self, member: Member, message: AdaptersHeld, now_ns: int) -> bool:
        """What ``member`` has. True: it may get requests from now on."""
        digests, failed = set(message.digests), dict(message.failed)
        if digests - {files.digest for files in self.wanted}:  # of an earlier router
            self._send_wanted(member)
        for call_id, loading in list(self._loading.items()):
            digest = loading.files.digest
            if member.name in loading.waits_for and digest in digests:
                loading.waits_for.discard(member.name)
            elif member.name in loading.waits_for and digest in failed:
                self._end_loading(call_id, f"{member.name}: {failed[digest]}")
        self._end_loaded()
        lacking = [files for files in self._named.values() if files.digest not in digests]
        if not lacking:
            self._without.discard(member.name)
        if not member.lacks_adapters:
            return False
        if lacking:
            why = next((failed[files.digest] for files in lacking if files.digest in failed), "")
            if not why:
                return False
            has_others = any(self._is_able(other) and other.name not in self._without for other in self._registry)
            text = f"it gets no requests: {why}" if has_others else f"it lacks an adapter: {why}"
            self._outbox.report_member(MemberChange.REFUSED, member.peer, member.info.address, text)
            if has_others:
                return False
            self._without.add(member.name)
        member.lacks_adapters = False
        if member.state is not MemberState.LIVE:
            return False
        self._loads.open_member(member.number)
        return True

    def on_member_removed(self, member: Member) -> None:
        """Nothing is expected of it any more."""
        self._without.discard(member.name)
        self._followers.pop(member.name, None)
        for call_id, loading in list(self._loading.items()):
            loading.waits_for.discard(member.name)
            if not any(self._is_able(other) for other in self._registry):
                self._end_loading(call_id, NO_INSTANCE, is_passing=True)
        self._end_loaded()
        self._end_named()

    # -- the end of a call

    def _end_loaded(self) -> None:
        for call_id in [call_id for call_id, loading in self._loading.items() if not loading.waits_for]:
            files = self._loading.pop(call_id).files
            replaced = self._named.get(files.name)
            self._named[files.name] = files
            self._unnamed.discard(files.name)
            self._outbox.record_ahead(AdapterPut(files.name, files.folder, files.digest))
            self._begin_naming(call_id, None)
            if replaced is not None:
                self._let_go(replaced)
        self._end_named()

    def _begin_naming(self, call_id: int, now_ns: int | None) -> None:
        """The names have changed: followers are told, and ``call_id`` waits for all of them. ``now_ns``: None: its end
        is armed already."""
        self._serial += 1
        self._naming[call_id] = self._serial
        if now_ns is not None:
            self._timers.arm(now_ns + LOADED_WITHIN_NS, self._give_up, call_id)
        for member in self._registry:
            if member.name in self._followers:
                self._send_names(member)

    @property
    def _serial_of_all(self) -> int:
        """All followers have the names of this one."""
        return min((follower.serial for follower in self._followers.values()), default=self._serial)

    def _end_named(self) -> None:
        serial_min = self._serial_of_all
        for call_id in [call_id for call_id, serial in self._naming.items() if serial <= serial_min]:
            del self._naming[call_id]
            self._outbox.answer_adapter(AdapterAnswered(call_id))

    def _end_loading(self, call_id: int, error: str, *, is_passing: bool = False) -> None:
        del self._loading[call_id]
        self._outbox.answer_adapter(AdapterAnswered(call_id, error, is_passing))
        self._send_to_all()

    def _give_up(self, call_id: int, now_ns: int) -> None:
        if call_id in self._loading:
            self._end_loading(call_id, TOO_LATE, is_passing=True)
        elif self._naming.pop(call_id, None) is not None:
            self._outbox.answer_adapter(AdapterAnswered(call_id, NOT_KNOWN, is_passing=True))

    def _let_go(self, files: AdapterFiles) -> None:
        if all(other.digest != files.digest for other in self._named.values()):
            self._leaving[files.digest] = _Leaving(files, self._serial)
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Adapters that no request has any more leave the instances."""
        if not self._leaving:
            return
        used = {req.request.adapter for req in self._requests.by_id.values()}
        used |= {files.digest for files in self._named.values()}
        for follower in self._followers.values():
            used |= follower.used
            used |= {digest for digest, entry in self._leaving.items() if follower.serial_before < entry.serial}
        if self._leaving.keys() - used:
            self._leaving = {digest: entry for digest, entry in self._leaving.items() if digest in used}
            self._send_to_all()

    def _is_able(self, member: Member) -> bool:
        return member.shares_kv and member.is_open

    def _send_to_all(self) -> None:
        for member in self._registry:
            if member.shares_kv and member.state is not MemberState.REJOINING:
                self._send_wanted(member)

    def _send_wanted(self, member: Member) -> None:
        self._outbox.send(member.peer, HoldAdapters(self.wanted))

    def _send_names(self, member: Member) -> None:
        self._followers[member.name].is_told = True
        unnamed = tuple(sorted(self._unnamed))
        self._outbox.send(member.peer, NameAdapters(tuple(self._named.values()), unnamed, self._serial))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a call waits for nothing, or for a member that is gone."""
        names = {member.name for member in self._registry}
        check(self._followers.keys() <= names, "{} are no members", self._followers.keys() - names)
        serial_min = self._serial_of_all
        check(all(serial > serial_min for serial in self._naming.values()), "{} wait for nothing", self._naming)
        for call_id, loading in self._loading.items():
            check(loading.waits_for and loading.waits_for <= names, "call {} waits for nothing", call_id)


class FollowedNames(AdapterBook):
    """Of a follower: the names that the owner has told. It tells no instance what to have."""

    def __init__(self, parts: RouterParts, requests: RequestTable) -> None:
        super().__init__(parts, requests)
        self._last_names: tuple[Peer, int] = Peer("", 0), -1  # the owner that told last, and its serial
        self._has_names = False

    def on_owner_names(self, owner: Peer, message: NameAdapters) -> None:
        """Requests may name these from now on. The host has done so before the owner hears of it."""
        if owner == self._last_names[0] and message.serial < self._last_names[1]:
            return  # late
        if self._last_names != (owner, message.serial):
            self._outbox.change_adapter_names(AdapterNamesChanged(message.adapters, message.unnamed))
        self._last_names, self._has_names = (owner, message.serial), bool(message.adapters or message.unnamed)
        self._send_used(owner, message.serial)

    def on_owner_accepts(self, owner: Peer) -> None:
        """``owner`` may be another one, or have had others in the meantime."""
        if self._has_names:
            self._send_used(owner, 0)

    def _send_used(self, owner: Peer, serial: int) -> None:
        used = sorted({req.request.adapter for req in self._requests.by_id.values()} - {""})
        self._outbox.send(owner, AdaptersNamed(serial, tuple(used)))

    def name_adapter(self, event: AdapterNamed, now_ns: int) -> None:
        """Clients are led to the owner before this."""
        self._outbox.answer_adapter(AdapterAnswered(event.call_id, ASK_OWNER))

    def unname_adapter(self, event: AdapterUnnamed, now_ns: int) -> None:
        """As :meth:`name_adapter`."""
        self._outbox.answer_adapter(AdapterAnswered(event.call_id, ASK_OWNER))

    def on_held(self, member: Member, message: AdaptersHeld, now_ns: int) -> bool:
        """Members say this to the owner."""
        return False
