"""LoRA adapters that come and go while a cluster serves: which there are, and which members have them.

::

    AdapterNamed --HoldAdapters--> all instances --AdaptersHeld--> all have it --> journal --> AdapterAnswered("")
                                                                   one cannot  --> nothing --> AdapterAnswered(why)
    AdapterUnnamed --> journal --> AdapterAnswered("") ... its last request ends --HoldAdapters (without it)-->

An instance that joins, or joins again, gets no requests before it has what the others have; where none can have it any
more, since its files are gone, requests that do not name it are served nevertheless. A request that has begun
goes on with its adapter, whatever becomes of the name: an adapter leaves the instances behind its last request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memserve.base.errors import check
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, HoldAdapters
from memserve.protocol.records import AdapterDropped, AdapterPut
from memserve.router.events import AdapterAnswered, AdapterNamed, AdapterUnnamed, MemberChange
from memserve.router.members.registry import Member, MemberState
from memserve.router.parts import RouterParts
from memserve.router.requests.requests import RequestTable

LOADED_WITHIN_NS = 300 * NS_PER_S
"""So long all instances have to load an adapter."""
NO_INSTANCE = "no instance is here to load it: try again"
TOO_LATE = "some instance has not loaded it in time"


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
        self._leaving: dict[str, AdapterFiles] = {}
        #: members that get requests although they could not load some, as no other has more
        self._without: set[str] = set()

    @property
    def wanted(self) -> tuple[AdapterFiles, ...]:
        """What all instances are to have, each content once."""
        loading = (entry.files for entry in self._loading.values())
        every = (*self._named.values(), *self._leaving.values(), *loading)
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
        if (files := self._named.pop(event.name, None)) is not None:
            self._outbox.record_ahead(AdapterDropped(event.name))
            self._let_go(files)
        self._outbox.answer_adapter(AdapterAnswered(event.call_id))

    # -- what members say

    def on_registered(self, member: Member) -> None:
        """A member is new, or back: before it may get requests."""
        if member.shares_kv and self.wanted:
            member.lacks_adapters = True
            self._loads.close_member(member.number)

    def on_introduced(self, member: Member) -> None:
        """It listens."""
        if member.lacks_adapters:
            self._send_wanted(member)

    def on_heartbeat(self, member: Member) -> None:
        """What was asked of it may have been lost."""
        is_waited_for = any(member.name in loading.waits_for for loading in self._loading.values())
        if member.lacks_adapters or is_waited_for or member.name in self._without:
            self._send_wanted(member)
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
        for call_id, loading in list(self._loading.items()):
            loading.waits_for.discard(member.name)
            if not any(self._is_able(other) for other in self._registry):
                self._end_loading(call_id, NO_INSTANCE, is_passing=True)
        self._end_loaded()

    # -- the end of a call

    def _end_loaded(self) -> None:
        for call_id in [call_id for call_id, loading in self._loading.items() if not loading.waits_for]:
            files = self._loading.pop(call_id).files
            replaced = self._named.get(files.name)
            self._named[files.name] = files
            self._outbox.record_ahead(AdapterPut(files.name, files.folder, files.digest))
            self._outbox.answer_adapter(AdapterAnswered(call_id))
            if replaced is not None:
                self._let_go(replaced)

    def _end_loading(self, call_id: int, error: str, *, is_passing: bool = False) -> None:
        del self._loading[call_id]
        self._outbox.answer_adapter(AdapterAnswered(call_id, error, is_passing))
        self._send_to_all()

    def _give_up(self, call_id: int, now_ns: int) -> None:
        if call_id in self._loading:
            self._end_loading(call_id, TOO_LATE, is_passing=True)

    def _let_go(self, files: AdapterFiles) -> None:
        if all(other.digest != files.digest for other in self._named.values()):
            self._leaving[files.digest] = files
            self._forget_unused()

    def _forget_unused(self) -> None:
        """Adapters that no request has any more leave the instances."""
        if not self._leaving:
            return
        used = {req.request.adapter for req in self._requests.by_id.values()}
        used |= {files.digest for files in self._named.values()}
        unused = self._leaving.keys() - used
        if unused:
            self._leaving = {digest: files for digest, files in self._leaving.items() if digest in used}
            self._send_to_all()

    def _is_able(self, member: Member) -> bool:
        return member.shares_kv and member.is_open

    def _send_to_all(self) -> None:
        for member in self._registry:
            if member.shares_kv and member.state is not MemberState.REJOINING:
                self._send_wanted(member)

    def _send_wanted(self, member: Member) -> None:
        self._outbox.send(member.peer, HoldAdapters(self.wanted))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a call waits for nothing, or for a member that is gone."""
        names = {member.name for member in self._registry}
        for call_id, loading in self._loading.items():
            check(loading.waits_for and loading.waits_for <= names, "call {} waits for nothing", call_id)
