"""A prefix whose blocks lie in several stores: one fetch of each store, put together when they have ended.

::

    blocks      0  1  2  3  4  5  6  7          fetch of A: 0 2 3    fetch of B: 1 5 6    fetch of C: 4 7
    have come   +  +  +  +  -  +  +  -          C had neither: the prefix ends in front of block 4
                ------------ into the index, in one piece; what is behind it is given back

Each of these fetches is a transfer of named blocks into blocks of its own, with checks, room and deadline like any
other; nothing is in the index before all have ended. A part that ends short is asked of the stores with second copies,
and one that is not answered in a third of the time as well: a store that has just died costs no hit. Where there is no
second copy, the prefix is cut: what is wholly behind the cut is not waited for. What comes behind the KV, a state or a
window, is asked for like blocks of it; then all has to come, since nothing can go on from less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memserve.base.errors import check
from memserve.base.types import Tier, TokenArray
from memserve.base.units import NS_PER_S
from memserve.kv.state_snapshot import Lease
from memserve.kv.store_shares import KEY_BYTES, NO_SPARE
from memserve.kv.transfer.context import Deadlines, Place, TransferContext
from memserve.kv.transfer.events import Delivered, FetchEnded, Outcome
from memserve.kv.transfer.imports import give_up_lease
from memserve.kv.transfer.receiver import Receiver
from memserve.protocol.peers import Peer

PATIENCE_SHARE = 3
"""A store that has answered nothing in such a part of the time is silent: others are asked, if they have the blocks."""
SILENT_NS = 5 * NS_PER_S
"""For how long others are asked first then: until the router has noticed, or the store has answered."""


@dataclass(frozen=True, slots=True)
class SpreadPrefix:
    """Where each block of a prefix lies."""

    stores: tuple[Peer, ...]
    places: bytes
    """For each block, from the first that is wanted on, the index of its store in ``stores``; then for each of what
    comes behind the KV."""
    identities: bytes
    """Of these blocks, 16 bytes each."""
    spares: bytes = b""
    """As ``places``, where a second copy lies; ``NO_SPARE``: nowhere. Empty: there are none."""
    behind: int = 0
    """So many of the last are no KV: a state, or the parts of a window. 0: KV is all that is wanted."""


@dataclass(slots=True, eq=False)
class _Part:
    """What one store was asked for."""

    transfer_id: str
    store: int
    indices: list[int]
    """Of its blocks, among those that are wanted."""
    is_open: bool = True


@dataclass(slots=True, eq=False)
class SpareTurn:
    """When stores with second copies are asked in the place of one that has not answered."""

    transfer_id: str
    deadline_ns: int
    over: bool = False


@dataclass(slots=True, eq=False)
class _Spread:
    """A fetch of several stores."""

    transfer_id: str
    prefix: SpreadPrefix
    tenant: str
    tokens: TokenArray
    first_block: int
    deadline_ns: int
    lease: Lease
    """The own prefix before ``first_block``: pinned until the fetch ends."""
    parts: list[_Part] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    """Those that have come, in HBM, a reference each, by their index among those that are wanted."""
    cut: int = 0
    """The first block that will not come; behind the last one: none is missing yet."""
    reason: str = ""
    was_offered: bool = False
    turn: SpareTurn | None = None
    spared: set[int] = field(default_factory=set)
    """Blocks that were asked of the stores with their second copies."""

    def spares_of(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """Those of these blocks that may be asked of another store, by that store."""
        indices_by_store: dict[int, list[int]] = {}
        for index in indices if self.prefix.spares else ():
            store = self.prefix.spares[index]
            if store != NO_SPARE and index not in self.spared:
                indices_by_store.setdefault(store, []).append(index)
        return indices_by_store


class SpreadFetches:
    """All fetches of several stores."""

    def __init__(self, context: TransferContext, receiver: Receiver, deadlines: Deadlines) -> None:
        self._context = context
        self._receiver = receiver
        self._open: dict[str, _Spread] = {}
        self._parts: dict[str, tuple[_Spread, _Part]] = {}  # by the transfer id of the part
        self._deadlines = deadlines
        #: stores that have not answered lately, and until when others are asked first
        self._silent_ns: dict[Peer, int] = {}

    def start_fetch(
        self, spread: SpreadPrefix, tenant: str, tokens: TokenArray, first_block: int, now_ns: int, deadline_ns: int
    ) -> str:
        """Ask each store for its blocks of ``tokens``, whole ones, from ``first_block`` on, and of what comes behind
        them. One :class:`FetchEnded` with the id that is returned follows, at the deadline at the latest, unless the
        fetch is given up."""
        context, count = self._context, len(spread.places)
        end_block = first_block + count - spread.behind
        check(end_block == len(tokens) // context.pool.block_tokens, f"{count} blocks of other tokens")
        check(len(spread.identities) == KEY_BYTES * count, "not an identity for each block")
        lease = context.pool.acquire_kv(tenant, tokens[: first_block * context.pool.block_tokens])
        fetch = _Spread(context.new_transfer_id(), spread, tenant, tokens, first_block, deadline_ns, lease, cut=count)
        self._open[fetch.transfer_id] = fetch
        indices_by_store: dict[int, list[int]] = {}
        for index, store in enumerate(spread.places):
            place = store
            if spread.spares and self._silent_ns.get(spread.stores[store], 0) > now_ns:
                spare = spread.spares[index]
                if spare != NO_SPARE and self._silent_ns.get(spread.stores[spare], 0) <= now_ns:
                    place = spare
                    fetch.spared.add(index)
            indices_by_store.setdefault(place, []).append(index)
        self._ask_stores(fetch, indices_by_store, now_ns)
        if fetch.spares_of(range(count)):
            fetch.turn = SpareTurn(fetch.transfer_id, now_ns + (deadline_ns - now_ns) // PATIENCE_SHARE)
            self._deadlines.add(fetch.turn)
        return fetch.transfer_id

    def _ask_stores(self, fetch: _Spread, indices_by_store: dict[int, list[int]], now_ns: int) -> None:
        keys = fetch.prefix.identities
        for store, indices in indices_by_store.items():
            identities = b"".join(keys[KEY_BYTES * index : KEY_BYTES * (index + 1)] for index in indices)
            part_id = self._receiver.fetches.start_named(
                fetch.prefix.stores[store], fetch.tenant, identities, now_ns, fetch.deadline_ns
            )
            part = _Part(part_id, store, indices)
            fetch.parts.append(part)
            self._parts[part_id] = fetch, part

    def ask_spares(self, turn: SpareTurn, now_ns: int) -> None:
        """A third of the time is over: what is not even offered yet is asked of other stores, where they have it."""
        fetch = self._open.get(turn.transfer_id)
        for part in list(fetch.parts) if fetch is not None else ():
            if fetch is None or not part.is_open or part.transfer_id not in self._receiver.fetches.open:
                continue
            spares = fetch.spares_of(part.indices)
            if sum(map(len, spares.values())) == len(part.indices):
                self._silent_ns[fetch.prefix.stores[part.store]] = now_ns + SILENT_NS
                self._close_part(part, "not answered in time")
                self._turn_to_spares(fetch, spares, now_ns)

    def _turn_to_spares(self, fetch: _Spread, spares: dict[int, list[int]], now_ns: int) -> None:
        fetch.spared.update(index for indices in spares.values() for index in indices)
        self._ask_stores(fetch, spares, now_ns)

    def gather_outcomes(self, outcomes: list[Outcome], now_ns: int) -> list[Outcome]:
        """``outcomes`` of the exchange, with those of whole fetches in the place of their parts'."""
        if not self._parts:
            return outcomes
        gathered: list[Outcome] = []
        changed: dict[_Spread, None] = {}
        for outcome in outcomes:
            fetch, part = self._parts.pop(_part_id_of(outcome), (None, None))
            if fetch is None or part is None:
                gathered.append(outcome)
                continue
            changed[fetch] = None
            part.is_open = False
            if isinstance(outcome, Delivered):
                self._silent_ns.pop(fetch.prefix.stores[part.store], None)
                fetch.was_offered = True
                fetch.blocks.update(zip(part.indices, outcome.blocks, strict=False))
                self._on_short(fetch, part.indices[len(outcome.blocks) :], "a part, in time", now_ns)
            elif isinstance(outcome, FetchEnded):
                fetch.was_offered |= outcome.was_offered
                self._on_short(fetch, part.indices, outcome.reason, now_ns)
        for fetch in changed:
            self._give_up_behind(fetch)
            if not any(part.is_open for part in fetch.parts):
                gathered.append(self._finish_fetch(fetch))
        return gathered

    def _on_short(self, fetch: _Spread, missing: list[int], reason: str, now_ns: int) -> None:
        """A store did not give these blocks: another one is asked where that is possible, else the prefix is cut."""
        spares = fetch.spares_of(missing) if now_ns < fetch.deadline_ns and fetch.cut else {}
        spared = {index for indices in spares.values() for index in indices}
        for index in missing:
            if index not in spared:
                self._cut_prefix(fetch, index, reason)
                break
        wanted = {store: [i for i in indices if i < fetch.cut] for store, indices in spares.items()}
        self._turn_to_spares(fetch, {store: indices for store, indices in wanted.items() if indices}, now_ns)

    def _cut_prefix(self, fetch: _Spread, index: int, reason: str) -> None:
        if index < fetch.cut:
            fetch.cut, fetch.reason = (0 if fetch.prefix.behind else index), reason

    def _give_up_behind(self, fetch: _Spread) -> None:
        """Parts that are wholly behind the cut are of no use."""
        for part in fetch.parts:
            if part.is_open and part.indices[0] >= fetch.cut:
                self._close_part(part, "what is before it will not come")

    def _close_part(self, part: _Part, reason: str) -> None:
        part.is_open = False
        del self._parts[part.transfer_id]
        self._receiver.give_up(part.transfer_id, reason)

    def _finish_fetch(self, fetch: _Spread) -> FetchEnded:
        """All parts have ended: what has come without a gap goes into the index."""
        context, cut, first = self._context, fetch.cut, fetch.first_block
        ended = FetchEnded(fetch.transfer_id, False, 0, fetch.reason, was_offered=fetch.was_offered)
        if cut:
            # what was pinned at the start may since have been brought up; the pin keeps it from being given up
            before = context.pool.acquire_kv(fetch.tenant, fetch.tokens[: first * context.pool.block_tokens])
            if len(before.blocks) == first:
                behind = fetch.prefix.behind
                kv_count = cut - behind
                blocks = [*before.blocks, *(fetch.blocks[index] for index in range(kv_count))]
                tokens = fetch.tokens[: (first + kv_count) * context.pool.block_tokens]
                # before the references are released: the index must hold the blocks
                context.pool.insert(fetch.tenant, tokens, blocks, len(blocks))
                if behind:
                    state = [fetch.blocks[index] for index in range(kv_count, cut)]
                    context.pool.insert_state(fetch.tenant, tokens, state)
                context.counters.fetched_blocks += kv_count
                ended = FetchEnded(fetch.transfer_id, True, len(tokens), fetch.reason, kv_count, behind > 0)
            give_up_lease(context, before)
        self._release_fetch(fetch)
        return ended

    def _release_fetch(self, fetch: _Spread) -> None:
        del self._open[fetch.transfer_id]
        if fetch.turn is not None:
            fetch.turn.over = True
        give_up_lease(self._context, fetch.lease)
        self._context.release(Tier.HBM, list(fetch.blocks.values()))

    # -- other ends

    def give_up(self, transfer_id: str, reason: str) -> bool:
        """End a fetch without an outcome. False: it is none of these."""
        fetch = self._open.get(transfer_id)
        if fetch is None:
            return False
        for part in fetch.parts:
            if part.is_open:
                self._close_part(part, reason)
        self._release_fetch(fetch)
        return True

    def distrust_all(self) -> None:
        """No KV can be relied upon: what has come goes nowhere. The parts are about to fail."""
        for fetch in self._open.values():
            fetch.cut, fetch.reason = 0, "a step failed"

    def drop_all(self) -> None:
        """End everything, silently; the parts have ended so."""
        self._parts.clear()
        for fetch in list(self._open.values()):
            self._release_fetch(fetch)

    # -- books

    def list_references(self) -> list[Place]:
        """Every reference that these fetches hold, beside those of their parts."""
        fetches = self._open.values()
        return [(Tier.HBM, block) for fetch in fetches for block in (*fetch.lease.blocks, *fetch.blocks.values())]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when a fetch waits for nothing, or a block has come twice."""
        for transfer_id, fetch in self._open.items():
            open_ids = [part.transfer_id for part in fetch.parts if part.is_open]
            check(bool(open_ids), "the fetch {} of several stores waits for none of them", transfer_id)
            check(all(part_id in self._parts for part_id in open_ids), "{} lost a part", transfer_id)
            check(len(set(fetch.blocks.values())) == len(fetch.blocks), "{} has a block twice", transfer_id)
        part_ids = {part.transfer_id for fetch in self._open.values() for part in fetch.parts if part.is_open}
        check(part_ids == self._parts.keys(), "parts of fetches that have ended: {}", self._parts.keys() - part_ids)


def _part_id_of(outcome: Outcome) -> str:
    return outcome.transfer_id if isinstance(outcome, (Delivered, FetchEnded)) else ""
