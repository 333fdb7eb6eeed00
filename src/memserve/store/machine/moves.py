"""Blocks go to the stores that are to keep them, when those have changed: one joined, died, or has come back.

::

    members change --> all blocks are looked at, some thousand at a time:
        QueryBlocks --> each store that is to keep some of them     <-- BlocksHeld: has it, lacks it, is being given it
        lacks it    --> brought into memory, offered by name, pulled, Release       a few at once, so much a second
        this store is not to keep it, and all that are have it --> dropped here

Every store does so with what it has; there is no plan for all. A store that comes back lacks what was new meanwhile,
and is given that by the stores that have it; one that joins, its share; after a death the next in line are given copies
by those that are left. A block that goes nowhere in the end is computed again.

A store without disks that ends in good order gives what it has to the stores that are to keep it without this one, as
far as there is time.

A block that is asked for often gets one copy more, at the next store in its line: the copies take turns then. It is
like any block there, so it goes when it is asked for no more, or when the stores are looked at again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from memserve.base.errors import check
from memserve.base.types import Role, Tier
from memserve.base.units import NS_PER_S
from memserve.kv.store_shares import StoreShares, split_keys
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.store import BlocksHeld, QueryBlocks
from memserve.store.machine.events import Jobs, StoreConfig
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values

LACKS, HAS, EXPECTS = 0, 1, 2
"""What ``BlocksHeld`` says of a block."""
NOWHERE = -1
"""The place of a store that is leaving among those that are to keep blocks."""
EXPECTED_MAX = 1 << 16
"""Blocks that other stores are about to give; of more it is not remembered."""


@dataclass(slots=True, eq=False)
class _Query:
    """Blocks that another store was asked for."""

    to: Peer
    identities: list[bytes]
    deadline_ns: int


@dataclass(slots=True, eq=False)
class _Batch:
    """Blocks that are given to another store together."""

    to: Peer
    identities: list[bytes]
    loads_awaited: int = 0
    extents: dict[bytes, int] = field(default_factory=dict)
    """In memory, a reference each, until they are offered."""
    offer_id: str = ""
    offered: list[bytes] = field(default_factory=list)
    is_over: bool = False


class ShareMoves:
    """What one of several stores does so that each has its share."""

    def __init__(self, values: Values, loads: Loads, exchange: Exchange, jobs: Jobs, config: StoreConfig) -> None:
        self._values, self._loads, self._exchange, self._jobs = values, loads, exchange, jobs
        self._config = config.moves
        self._block_bytes = values.tier.block_bytes
        self._own_name = ""
        self._is_leaving = False
        self._members: dict[str, PeerInfo] = {}
        self._copies = 1
        self._peers: dict[str, Peer] = {}
        self._shares: StoreShares | None = None
        #: blocks that are still to be looked at
        self._unseen: deque[bytes] = deque()
        self._passes_left = 0
        self._begins_ns = 0
        self._has_failed = False
        self._queries: dict[int, _Query] = {}
        self._number = 0
        self._lacking: deque[tuple[Peer, bytes]] = deque()
        self._owners_to_confirm: dict[bytes, int] = {}  # of blocks that are not to be kept here
        self._batch: _Batch | None = None
        self._next_batch_ns = 0
        self._expected_ns: dict[bytes, int] = {}  # block -> until when another store is expected to give it
        self._lends: dict[bytes, int] = {}  # block -> how often it was lent in this window
        self._window_ends_ns = 0
        #: blocks that are to get one copy more
        self._hot: dict[bytes, None] = {}
        self._hot_left = 0
        self._copied: dict[bytes, None] = {}  # that were asked of the next store last

    # -- members

    def set_members(self, own: PeerInfo, infos: Iterable[PeerInfo], copies: int, now_ns: int) -> None:
        """All members, and in how many stores each block is to lie."""
        self._members = {info.peer.name: info for info in infos if info.peer.name != own.peer.name}
        self._copies = copies
        self._follow_members(own, now_ns)

    def add_member(self, own: PeerInfo, info: PeerInfo, now_ns: int) -> None:
        """A member has joined, or has started anew."""
        self._members[info.peer.name] = info
        self._follow_members(own, now_ns)

    def remove_member(self, own: PeerInfo, peer: Peer, now_ns: int) -> None:
        """A member is gone."""
        member = self._members.get(peer.name)
        if member is not None and member.peer.generation <= peer.generation:
            del self._members[peer.name]
            self._follow_members(own, now_ns)

    def _follow_members(self, own: PeerInfo, now_ns: int) -> None:
        """Look at all blocks anew where the stores with KV of this model are others than before."""
        infos = [info for info in self._members.values() if own.namespace and info.namespace == own.namespace]
        peers = {info.peer.name: info.peer for info in infos if info.role is Role.STORE}
        names = peers if self._is_leaving else (own.peer.name, *peers)
        shares = StoreShares(names, self._copies) if peers else None
        joined = {name: peer for name, peer in peers.items() if self._peers.get(name) != peer}
        has_changed = shares != self._shares or bool(joined)
        self._own_name, self._peers, self._shares = own.peer.name, peers, shares
        if not has_changed:
            return
        self._drop_plans()
        if shares is not None:
            self._passes_left = self._config.passes_max
            self._begin_pass(now_ns)

    def begin_leaving(self, own: PeerInfo, now_ns: int) -> None:
        """This store ends: others are to keep what it has."""
        self._is_leaving = True
        self._follow_members(own, now_ns)

    @property
    def is_giving_away(self) -> bool:
        """Whether the store is leaving, and has not given everything away yet."""
        return self._is_leaving and self.is_at_work

    @property
    def is_at_work(self) -> bool:
        """Whether blocks are still looked at, or given to others."""
        return self._shares is not None and bool(self._unseen or self._is_busy)

    def _drop_plans(self) -> None:
        """What is under way was planned for other members; an open offer ends by itself."""
        self._unseen.clear()
        self._queries.clear()
        self._lacking.clear()
        self._owners_to_confirm.clear()
        self._hot.clear()
        self._copied.clear()
        self._passes_left = 0
        if self._batch is not None and not self._batch.offer_id:
            self._end_batch(self._batch)

    def _begin_pass(self, begins_ns: int) -> None:
        self._passes_left -= 1
        self._has_failed = False
        self._begins_ns = begins_ns
        self._unseen.extend(self._values.log.all_identities())

    # -- what other stores say

    def on_query(self, sender: Peer, message: QueryBlocks, now_ns: int) -> None:
        """Another store asks which blocks are here; those that are not are expected of it from now on."""
        until_ns, answer = now_ns + self._config.answer_ns, bytearray()
        for identity in split_keys(message.identities):
            if identity in self._values:
                answer.append(HAS)
            elif self._expected_ns.get(identity, 0) > now_ns:
                answer.append(EXPECTS)
            else:
                answer.append(LACKS)
                self._expected_ns.pop(identity, None)
                self._expected_ns[identity] = until_ns
        while len(self._expected_ns) > EXPECTED_MAX:
            del self._expected_ns[next(iter(self._expected_ns))]
        self._jobs.send_message(sender, BlocksHeld(message.query, bytes(answer)))

    def on_held(self, sender: Peer, message: BlocksHeld, now_ns: int) -> None:
        """The answer of another store."""
        query = self._queries.get(message.query)
        if query is None or query.to != sender or len(message.held) != len(query.identities):
            return
        del self._queries[message.query]
        for identity, code in zip(query.identities, message.held, strict=True):
            if code == HAS:
                self._confirm_owner(identity, now_ns)
            elif code == LACKS:
                self._lacking.append((sender, identity))
            else:
                self._has_failed = True  # look again, whether it was given

    def on_released(self, transfer_id: str, used: bool, now_ns: int) -> None:
        """An own offer has ended."""
        batch = self._batch
        if batch is None or batch.offer_id != transfer_id:
            return
        if used:
            copied = sum(identity in self._copied for identity in batch.offered)
            self._values.counters.kv_copied += copied
            self._values.counters.kv_moved += len(batch.offered) - copied
            for identity in batch.offered:
                self._confirm_owner(identity, now_ns)
        else:
            self._has_failed = True
        self._end_batch(batch)

    def _confirm_owner(self, identity: bytes, now_ns: int) -> None:
        """One of the stores that are to keep a block has it. When all have it, it need not be here."""
        awaited = self._owners_to_confirm.get(identity)
        if awaited is None:
            return
        self._owners_to_confirm[identity] = awaited - 1
        if awaited == 1:
            del self._owners_to_confirm[identity]
            if identity in self._values.log:
                self._values.counters.kv_given_up += self._values.forget_value(identity, now_ns)

    def note_lent(self, identities: Iterable[bytes], now_ns: int) -> None:
        """Blocks were given to an instance. Those that are given often are to get one copy more, as long as a part of
        the memory is not used up for that in this window."""
        if self._shares is None or len(self._shares) <= self._copies:
            return
        if now_ns >= self._window_ends_ns:
            self._window_ends_ns = now_ns + self._config.hot_window_ns
            self._lends.clear()
            self._hot_left = self._values.tier.blocks_total // self._config.hot_part
        for identity in identities:
            count = self._lends[identity] = self._lends.get(identity, 0) + 1
            if count == self._config.hot_lends and self._hot_left > 0:
                self._hot_left -= 1
                self._hot[identity] = None
        if len(self._lends) > EXPECTED_MAX:
            self._lends.clear()

    def _query_hot(self, shares: StoreShares, now_ns: int) -> None:
        """Ask the next store in the line of each block that is asked for often."""
        identities = [identity for identity in self._hot if identity in self._values.log]
        self._hot = dict.fromkeys(identities)  # until the pass is over
        if not identities:
            return
        next_stores = shares.rank_stores(b"".join(identities))[:, self._copies].tolist()
        for number, name in enumerate(shares.names):
            to_give = [identities[index] for index, store in enumerate(next_stores) if store == number]
            if to_give and name != self._own_name:
                self._query_store(self._peers[name], to_give, now_ns)

    # -- time

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_time` is worth calling. None: nothing is under way."""
        if self._shares is None:
            return None
        due = [query.deadline_ns for query in self._queries.values()]
        if self._lacking and self._batch is None:
            due.append(self._next_batch_ns)
        if self._unseen and not self._is_busy:
            due.append(self._begins_ns)
        elif self._hot and not self._is_busy:
            due.append(0)
        return min(due, default=None)

    @property
    def _is_busy(self) -> bool:
        return bool(self._queries or self._lacking or self._batch is not None)

    def advance_time(self, now_ns: int) -> None:
        """On every event."""
        shares = self._shares
        if shares is None:
            return
        for number, query in list(self._queries.items()):
            if now_ns >= query.deadline_ns:
                del self._queries[number]
                self._has_failed = True
        if self._lacking and self._batch is None and now_ns >= self._next_batch_ns:
            self._start_batch(now_ns)
        if self._is_busy:
            return
        self._owners_to_confirm.clear()
        if self._unseen:
            if now_ns >= self._begins_ns:
                self._query_some(shares, now_ns)
        elif self._has_failed and self._passes_left:
            self._begin_pass(now_ns + self._config.again_ns)
        elif self._hot:
            self._query_hot(shares, now_ns)
            self._copied, self._hot = self._hot, {}

    def _query_some(self, shares: StoreShares, now_ns: int) -> None:
        """Ask the other stores for the next blocks that they are to keep."""
        identities: list[bytes] = []
        while self._unseen and len(identities) < self._config.scan_keys:
            identity = self._unseen.popleft()
            if identity in self._values.log:
                identities.append(identity)
        if not identities:
            return
        owners = shares.owners_of(b"".join(identities))
        own_index = shares.names.index(self._own_name) if self._own_name in shares.names else NOWHERE
        for index in np.flatnonzero((owners != own_index).all(axis=1)).tolist():
            self._owners_to_confirm[identities[index]] = owners.shape[1]
        for number, name in enumerate(shares.names):
            indices = np.flatnonzero((owners == number).any(axis=1)).tolist() if number != own_index else []
            if indices:
                self._query_store(self._peers[name], [identities[index] for index in indices], now_ns)

    def _query_store(self, to: Peer, identities: list[bytes], now_ns: int) -> None:
        self._number += 1
        self._queries[self._number] = _Query(to, identities, now_ns + self._config.answer_ns)
        self._jobs.send_message(to, QueryBlocks(self._number, b"".join(identities)))

    # -- giving

    def _start_batch(self, now_ns: int) -> None:
        """Bring the next blocks that one store lacks into memory."""
        to, count = self._lacking[0][0], max(1, self._config.batch_bytes // self._block_bytes)
        identities: list[bytes] = []
        while self._lacking and self._lacking[0][0] == to and len(identities) < count:
            identities.append(self._lacking.popleft()[1])
        self._next_batch_ns = now_ns + len(identities) * self._block_bytes * NS_PER_S // self._config.bytes_per_s
        batch = self._batch = _Batch(to, identities, loads_awaited=1)
        for identity in identities:
            if self._values.is_ready(identity):
                self._hold_block(batch, identity)
            elif identity in self._values:
                batch.loads_awaited += 1
                self._loads.request_load(identity, partial(self._on_loaded, batch, identity), now_ns)
        self._count_down(batch, now_ns)

    def _hold_block(self, batch: _Batch, identity: bytes) -> None:
        place = self._values.tier.find(identity, counts=False)
        if place is not None and place.verified and place.length == self._block_bytes:
            batch.extents[identity] = place.offset
        elif place is not None:
            self._values.tier.release(place.offset)

    def _on_loaded(self, batch: _Batch, identity: bytes, ok: bool, now_ns: int) -> None:
        if batch.is_over:
            return
        if ok:
            self._hold_block(batch, identity)
        self._count_down(batch, now_ns)

    def _count_down(self, batch: _Batch, now_ns: int) -> None:
        batch.loads_awaited -= 1
        if batch.loads_awaited:
            return
        self._has_failed |= len(batch.extents) < len(batch.identities)
        if not batch.extents:
            self._end_batch(batch)
            return
        batch.offered = list(batch.extents)
        blocks = [extent // self._block_bytes for extent in batch.extents.values()]
        tokens = np.empty(0, np.int32)
        offered = OfferedBlocks("", tokens, blocks, Tier.DRAM, identities=b"".join(batch.offered))
        batch.offer_id = self._exchange.offer_blocks(batch.to, offered, now_ns)
        self._exchange.announce_computed(batch.offer_id, 0, len(blocks))
        self._release_extents(batch)  # the offer has references of its own

    def _end_batch(self, batch: _Batch) -> None:
        batch.is_over = True
        self._release_extents(batch)
        self._batch = None

    def _release_extents(self, batch: _Batch) -> None:
        for extent in batch.extents.values():
            self._values.tier.release(extent)
        batch.extents.clear()

    def drop_offers(self) -> None:
        """All offers have ended silently: the store is another incarnation now."""
        self._drop_plans()
        if self._batch is not None:
            self._end_batch(self._batch)
        self._peers, self._shares = {}, None

    # -- books

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a batch that is not offered yet."""
        return list(self._batch.extents.values()) if self._batch is not None else []

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the books do not balance."""
        check(self._shares is not None or not (self._unseen or self._queries or self._lacking), "moves without shares")
        for query in self._queries.values():
            check(self._peers.get(query.to.name) == query.to, f"{query.to.name} was asked, and is no store")
        check(all(self._owners_to_confirm.values()), "a block waits for no store")
        if self._batch is not None:
            check(not self._batch.is_over, "a batch has ended, and is under way")
            check(bool(self._batch.identities), "a batch of nothing")
