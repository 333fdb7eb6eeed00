"""What clients give names to: sessions, and prefixes that are kept.

A session leads a conversation to the instances that ran it last. A handle keeps a prefix (a session's or a document's)
pinned where it lies, until it expires. While no instance has the prefix the handle waits; when its instance dies it
goes to another one that has the prefix. A ``Pin`` may get lost, so it is repeated until ``Pinned`` comes. Admission
counts what is pinned as used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.fairness import TenantStore
from memserve.base.types import Caching, NamedPrefix, Role, TokenArray, isolation
from memserve.base.units import NS_PER_S
from memserve.protocol.kv_hints import names_to_release
from memserve.protocol.messages import Pin, Pinned, Unpin
from memserve.protocol.peers import Peer
from memserve.protocol.records import HandleDropped, HandlePinned, SessionRouted
from memserve.router.admission.memory_budget import MemoryBudget
from memserve.router.events import PrefixPinned, PrefixUnpinned
from memserve.router.members.loads import LoadTable
from memserve.router.members.registry import Member, MemberState, Registry
from memserve.router.outbox import Outbox, Timers
from memserve.router.placement.prefix_directory import Trees

SESSIONS_MAX = 100_000
"""Of more, the tenant with most loses the one that was silent longest."""
REPEAT_NS = NS_PER_S
"""A ``Pin`` without answer is repeated after this long."""
MISSES_MAX = 6
"""A prefix that no instance has is looked for again after 1, 2, 4, ... 32 s, and whenever its session has a turn."""
HANDLE_TOKENS = 256
"""What a handle counts beside its tokens."""
REJOIN_NS = NS_PER_S // 5
"""After this long a router that was started anew looks where its recovered handles lie."""

_ROLE_RANK = {Role.PREFILL: 0, Role.COLOCATED: 0, Role.DECODE: 1}


class Sessions:
    """The instances of each session's last request, by tenant and name."""

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry, self._outbox = registry, outbox
        self._places: TenantStore[tuple[Peer, ...]] = TenantStore(SESSIONS_MAX)

    def record_route(self, tenant: str, session: str, members: list[Member]) -> None:
        """The session runs at ``members`` now. ``session`` empty: a request without one, nothing is kept."""
        if not session:
            return
        peers = tuple(member.peer for member in members)
        self._outbox.record_later(SessionRouted(tenant, session, peers))
        self.restore_route(tenant, session, peers)

    def restore_route(self, tenant: str, session: str, peers: tuple[Peer, ...]) -> None:
        """The session ran at ``peers``, which need not be members (any more)."""
        self._places.put(tenant, session, peers)

    def member_numbers(self, tenant: str, session: str) -> tuple[int, ...]:
        """The members that ran it last."""
        if not session:
            return ()
        members = (self._registry.get(peer) for peer in self._places.get(tenant, session) or ())
        return tuple(member.number for member in members if member is not None)


@dataclass(frozen=True, slots=True)
class HandleView:
    """A named, pinned prefix."""

    handle: str
    tenant: str
    tokens: int
    """Asked for."""
    pinned_tokens: int | None
    """As the instance said; ``None``: it has not answered yet."""
    peer: Peer | None
    """Where the prefix lies; ``None``: no instance has it."""
    expires_ns: int


@dataclass(slots=True, eq=False)
class Handle:
    """One named prefix."""

    name: str
    tenant: str
    tokens: TokenArray
    identities: bytes
    expires_ns: int
    salt: str = ""
    priority: float | None = None
    """It is retained, and takes no room from requests. None: it is pinned."""
    place: Member | None = None
    """Where a ``Pin`` was sent to, or will be when there is room; nothing is pinned anywhere else."""
    pinned_tokens: int | None = None
    unanswered: int = 0
    """Times that ``Pin`` was sent there and, as far as is known, not answered yet."""
    is_asked: bool = False
    """The last message there was ``Pin``, not ``Unpin``."""
    misses: int = 0
    """Times in a row that there was nowhere to pin it: it is looked at less and less often."""
    wake_ns: int | None = None
    """When it is looked at next: timers that were armed for later are void."""

    @property
    def isolation(self) -> str:
        """Name of the KV that it belongs to."""
        return isolation(self.tenant, self.salt)

    @property
    def wire_name(self) -> str:
        """Its name among instances, where tenants share one space; the length first, so that no two are alike."""
        return f"{len(self.tenant)}:{self.tenant}:{self.name}"

    def make_view(self) -> HandleView:
        """A snapshot."""
        peer = self.place.peer if self.place is not None else None
        return HandleView(self.name, self.tenant, len(self.tokens), self.pinned_tokens, peer, self.expires_ns)


@dataclass(frozen=True, slots=True)
class MemberTables:
    """What a router knows of its members, each in columns by a member's number."""

    registry: Registry
    """Names, incarnations, states."""
    trees: Trees
    """What they have cached."""
    loads: LoadTable
    """How busy they are."""
    memory: MemoryBudget
    """What room requests hold there."""


class NamedPrefixes:
    """All live handles. They have room for so many tokens; a tenant with more than others loses its oldest."""

    def __init__(self, config: ClusterConfig, tables: MemberTables, timers: Timers, outbox: Outbox) -> None:
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._memory = tables.memory
        self._timers, self._outbox = timers, outbox
        self._named: TenantStore[Handle] = TenantStore(config.handle_tokens_max)
        self._caches = config.caching is not Caching.OFF
        self._by_wire: dict[str, Handle] = {}

    def __len__(self) -> int:
        return len(self._by_wire)

    def pin_prefix(self, event: PrefixPinned, now_ns: int) -> None:
        """Keep a prefix, or keep it longer."""
        handle = self._named.get(event.tenant, event.handle)
        expires_ns = now_ns + event.ttl_ns
        if handle is None:
            handle = Handle(event.handle, event.tenant, event.tokens, b"", expires_ns, event.salt)
        handle.tokens, handle.identities, handle.expires_ns = event.tokens, b"", expires_ns
        handle.salt, handle.priority = event.salt, event.priority
        if event.priority is not None:
            self._memory.on_unpinned(handle.wire_name)
        handle.pinned_tokens, handle.misses = None, 0
        self._store_handle(handle)
        tokens = event.tokens.astype("<i4", copy=False).tobytes() if self._outbox.remembers else b""
        self._outbox.record_ahead(
            HandlePinned(event.tenant, event.handle, tokens, expires_ns, event.salt, event.priority)
        )
        self._place_pin(handle, now_ns)

    def recover_pin(self, pin: HandlePinned, now_ns: int) -> None:
        """An earlier router had the handle. Its place is looked for when members have answered."""
        if pin.expires_ns > now_ns:
            tokens = np.frombuffer(pin.tokens, "<i4").astype(np.int32)
            handle = Handle(pin.handle, pin.tenant, tokens, b"", pin.expires_ns, pin.salt, pin.priority)
            self._store_handle(handle)
            self._arm_timer(handle, now_ns + REJOIN_NS)
        else:
            self._outbox.record_later(HandleDropped(pin.tenant, pin.handle))

    def unpin_prefix(self, event: PrefixUnpinned) -> None:
        """Drop a handle; an unknown one is ignored."""
        handle = self._named.pop(event.tenant, event.handle)
        if handle is not None:
            self._outbox.record_ahead(HandleDropped(handle.tenant, handle.name))
            self._drop_handle(handle)

    def on_pinned(self, sender: Member, answer: Pinned, now_ns: int) -> None:
        """``sender`` says how much of a prefix it keeps."""
        handle = self._by_wire.get(answer.handle)
        if handle is not None and handle.place is sender:
            handle.pinned_tokens = answer.tokens
            # of several that are under way, an answer with tokens may be an earlier one's
            is_last = handle.is_asked and handle.unanswered <= 1
            if handle.priority is None and (is_last or not answer.tokens):
                self._memory.on_pinned(handle.wire_name, sender, handle.identities, answer.tokens)
            handle.unanswered = max(0, handle.unanswered - 1)

    def evict_pin(self, wire_name: str) -> None:
        """Admission no longer counts the handle: a request needs the room, and nothing else makes any. Instances unpin
        by themselves where they can see that they stand still; a request that waits for a handover cannot be seen."""
        handle = self._by_wire[wire_name]
        if handle.place is not None:
            self._outbox.send(handle.place.peer, Unpin(wire_name))
            handle.pinned_tokens, handle.is_asked = 0, False

    def place_of(self, tenant: str, name: str) -> Member | None:
        """Where a handle lies."""
        handle = self._named.get(tenant, name) if name else None
        return handle.place if handle is not None else None

    def tokens_of(self, tenant: str, name: str) -> TokenArray | None:
        """What a handle keeps. None: there is none of this name."""
        handle = self._named.get(tenant, name)
        return handle.tokens if handle is not None else None

    def release_retained(self, tenant: str, salt: str, tokens: TokenArray) -> None:
        """Drop the handles that retain ``tokens``, whole blocks, or what goes on behind them alone."""
        handles = [handle for handle in self._named.values_of(tenant) if handle.priority is not None]
        names = [(handle.name, handle.tokens) for handle in handles if handle.salt == salt]
        for name in names_to_release(tokens, names):
            self.unpin_prefix(PrefixUnpinned(name, tenant))

    def retained_tokens(self) -> dict[str, int]:
        """By tenant, how much of its handles is retained, as the instances said last."""
        tokens: dict[str, int] = {}
        for handle in self._by_wire.values():
            if handle.priority is not None:
                tokens[handle.tenant] = tokens.get(handle.tenant, 0) + (handle.pinned_tokens or 0)
        return tokens

    def extend_pin(self, tenant: str, name: str, now_ns: int) -> None:
        """A request of this session has ended: the missing part of the prefix may have been computed."""
        handle = self._named.get(tenant, name) if name else None
        if handle is not None and (handle.pinned_tokens or 0) < self._whole_tokens(handle):
            handle.pinned_tokens, handle.misses = None, 0
            self._place_pin(handle, now_ns)

    def on_member_removed(self, member: Member, now_ns: int) -> None:
        """Prefixes that lay at ``member`` are looked for elsewhere. It has left the registry and the trees."""
        for handle in self._by_wire.values():
            if not len(self._registry):
                handle.identities = b""  # the next member may serve another model
            if handle.place is member:
                handle.place = handle.pinned_tokens = None
                handle.unanswered = handle.misses = 0
                self._place_pin(handle, now_ns)

    def on_timer(self, wire_name: str, now_ns: int) -> None:
        """The handle's timer: repeat an unanswered ``Pin``, look again for a missing prefix, drop what has expired."""
        handle = self._by_wire.get(wire_name)
        if handle is None or handle.wake_ns is None or handle.wake_ns > now_ns:
            return
        handle.wake_ns = None
        if handle.expires_ns <= now_ns:
            self._outbox.record_later(HandleDropped(handle.tenant, handle.name))
            self._named.pop(handle.tenant, handle.name)
            self._drop_handle(handle)  # the instance's own time for it is over a little later
        elif handle.pinned_tokens is None:
            handle.unanswered = 0  # they were lost, or their answers
            self._place_pin(handle, now_ns)
        else:
            self._arm_timer(handle, handle.expires_ns)

    def handle_views(self) -> tuple[HandleView, ...]:
        return tuple(handle.make_view() for handle in self._by_wire.values())

    def pinned_tokens(self, tenant: str, names: Sequence[str]) -> list[int | None]:
        """How much of each of a tenant's handles is pinned; ``None``: unknown, or no instance has answered yet."""
        handles = (self._named.get(tenant, name) for name in names)
        return [handle.pinned_tokens if handle is not None else None for handle in handles]

    def prefixes_of(self, tenant: str) -> list[NamedPrefix]:
        """A tenant's handles, least recently renewed first."""
        return [
            NamedPrefix(handle.name, handle.pinned_tokens, handle.expires_ns)
            for handle in self._named.values_of(tenant)
        ]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a handle has a wrong name, or lies at an instance that is gone."""
        self._named.check_invariants()
        check(len(self._named) == len(self._by_wire), "handles are not listed alike")
        for wire_name, handle in self._by_wire.items():
            check(wire_name == handle.wire_name, f"handle {handle.name} is listed as {wire_name}")
            check(self._named.get(handle.tenant, handle.name) is handle, f"handle {handle.name} has no name")
            place = handle.place
            check(place is None or self._registry.get(place.peer) is place, f"{handle.name} lies at {place}: gone")

    # -- inside

    def _place_pin(self, handle: Handle, now_ns: int) -> None:
        """Pin the prefix where most of it lies, if there is room; else try again later. A prefix without whole blocks
        has nothing to pin."""
        tokens = self._whole_tokens(handle)
        self._move_pin(handle, self._find_place(handle) if tokens else None)
        place = handle.place
        if not tokens:
            handle.pinned_tokens = 0
            self._arm_timer(handle, handle.expires_ns)
            return
        if place is not None and self._has_room(handle, place, tokens):
            ttl_ns = max(1, handle.expires_ns - now_ns)
            pin = Pin(handle.wire_name, handle.isolation, handle.tokens, ttl_ns, handle.priority)
            self._outbox.send(place.peer, pin)
            handle.is_asked = True
            handle.unanswered += 1
        else:
            handle.misses = min(handle.misses + 1, MISSES_MAX)
        self._arm_timer(handle, min(now_ns + (REPEAT_NS << max(0, handle.misses - 1)), handle.expires_ns))

    def _has_room(self, handle: Handle, place: Member, tokens: int) -> bool:
        is_retained = handle.priority is not None
        return is_retained or self._memory.may_pin(handle.wire_name, place, handle.identities, tokens)

    def _arm_timer(self, handle: Handle, when_ns: int) -> None:
        if handle.wake_ns is None or when_ns < handle.wake_ns:
            handle.wake_ns = when_ns
            self._timers.arm(when_ns, self.on_timer, handle.wire_name)

    def _move_pin(self, handle: Handle, place: Member | None) -> None:
        if handle.place is not None and handle.place is not place:
            self._outbox.send(handle.place.peer, Unpin(handle.wire_name))
            self._memory.on_unpinned(handle.wire_name)
            handle.pinned_tokens, handle.unanswered = None, 0
        handle.place = place

    def _find_place(self, handle: Handle) -> Member | None:
        geometry = self._registry.geometry
        if geometry is None:
            return None
        if not handle.identities:
            handle.identities = self._trees.prompt_identities(
                handle.isolation, self._registry.namespace, handle.tokens, geometry.block_tokens
            )
        matches = self._trees.match_prompt(handle.identities, len(self._loads))
        if not matches.holders:
            return handle.place
        blocks = self._loads.of_instances(matches.blocks)  # a store pins by itself
        longest = int(blocks.max())
        if not longest:
            return handle.place
        longest_at = (self._registry.member_by_number(int(number)) for number in np.flatnonzero(blocks == longest))
        among = [member for member in longest_at if member.state is not MemberState.REJOINING]
        rank = _ROLE_RANK
        return min(among, key=lambda m: (m is not handle.place, rank[m.info.role], m.number), default=handle.place)

    def _whole_tokens(self, handle: Handle) -> int:
        """Tokens of it that an instance can keep: whole blocks, and none where no instance caches."""
        block_tokens = self._registry.geometry.block_tokens if self._registry.geometry is not None else 1
        return len(handle.tokens) // block_tokens * block_tokens if self._caches else 0

    def _store_handle(self, handle: Handle) -> None:
        """Make room for ``handle``: others of its tenant may be dropped."""
        self._by_wire[handle.wire_name] = handle
        for dropped in self._named.put(handle.tenant, handle.name, handle, len(handle.tokens) + HANDLE_TOKENS):
            self._outbox.record_later(HandleDropped(dropped.tenant, dropped.name))
            self._drop_handle(dropped)

    def _drop_handle(self, handle: Handle) -> None:
        self._move_pin(handle, None)
        del self._by_wire[handle.wire_name]
