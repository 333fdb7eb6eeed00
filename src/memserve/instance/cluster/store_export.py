"""Which blocks of an instance's cache are offered to a store, which keeps them for longer than HBM has room.

::

    published (blocks of a row, of an answer)  --> pending              the cache has got them just now
    planned, settle                            --> offered              ``store_offers``
    kept (a named prefix), and what is beyond the limit of lent blocks --> offered later, if it is still cached
    reused, and not offered for a while                                --> offered later, as well: the store may have
                                                                           joined since, or have lost it

No request waits for any of this. Blocks that are lent to the store cannot be evicted, so they are few, they are lent
for a few seconds at most, and where a request needs the room, they are taken back. Without a store the cache has no
listener, and nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.types import KVGeometry, Role, Tier, TokenArray
from memserve.instance.cluster.store_offers import (
    AGAIN_NS,
    IDENTITY_BYTES,
    IN_CACHE,
    USED_EVERY_NS,
    BlockRun,
    KeptState,
    SpreadTarget,
    StoreOffers,
    forget_old,
    identity_at,
    remember,
)
from memserve.instance.events import StepPlan
from memserve.instance.scheduler.sequence import Sequence, SequenceKey
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.state_snapshot import Lease
from memserve.kv.store_shares import StoreShares, split_keys
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import Send
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.store import ForgetKv, KvUsed

LENT_SHARE = 8
"""At most one of so many HBM blocks is lent to the store at once."""
LATER_MAX = 64
"""Prompts and answers whose blocks wait until less is lent; of more, the oldest is dropped."""


@dataclass(slots=True)
class _Later:
    """Cached blocks of ``tokens`` from ``first_block`` on, to be offered when less is lent."""

    isolation: str
    tokens: TokenArray
    first_block: int
    keep: bool = False
    """They have a name."""


class StoreWriter:
    """Offers what one instance caches to its store, or to several as one; the listener of ``SequenceMemory``. What
    stands behind KV, a state or a window, is offered in blocks with names of their own, and over several stores it is
    spread as KV is."""

    def __init__(self, state: SchedulerState, exchange: Exchange, geometry: KVGeometry) -> None:
        self._state = state
        self._exchange = exchange
        self._block_tokens = geometry.block_tokens
        pool = state.memory.pool
        lent_max = pool.config.hbm_blocks // LENT_SHARE
        self.offers = StoreOffers(exchange, geometry, lent_max, max(1, pool.state_blocks))
        self._stores: dict[str, PeerInfo] = {}
        #: of this process; empty: not known
        self.host_id = ""
        #: the store that gets the offers. None: there is none
        self.target: Peer | None = None
        #: several stores with KV of this model. None: ``target`` is the only one, or gets everything
        self.spread: SpreadTarget | None = None
        self._copies = 1
        self._pending: list[BlockRun] = []  # a reference on each block
        self._later: dict[bytes | SequenceKey, _Later] = {}  # by a named prefix's last identity, or by sequence
        self._kept_states: dict[bytes, KeptState] = {}  # by the identity of their first block
        self._parts: dict[bytes | SequenceKey, _Later] = {}  # of windows, to be offered; as ``_later``
        self._named_ns: dict[bytes, int] = {}  # last identity of a named prefix -> when it was offered as such
        self._used_ns: dict[bytes, int] = {}  # identity -> when the store was told of its use; oldest first
        self._reused: list[bytes] = []  # identities of prefixes that sequences went on from, to be told
        self._messages: list[Send] = []

    # -- members

    @property
    def stores(self) -> list[PeerInfo]:
        """All stores among the members."""
        return list(self._stores.values())

    def set_members(self, infos: Iterable[PeerInfo], copies: int = 1) -> None:
        """All members but this one, and in how many of several stores each block is to lie."""
        self._copies = copies
        self._stores = {info.peer.name: info for info in infos if info.role is Role.STORE}
        self._choose_store()

    def on_member_joined(self, info: PeerInfo) -> None:
        if info.role is Role.STORE:
            self._stores[info.peer.name] = info
            self._choose_store()

    def on_member_left(self, peer: Peer) -> None:
        """A member left; its offers have ended."""
        member = self._stores.get(peer.name)
        if member is not None and member.peer.generation <= peer.generation:
            del self._stores[peer.name]
            self._choose_store()

    def _choose_store(self) -> None:
        """The store on this host, else the first by name. Another one, or another incarnation, was told of nothing."""
        near = [info for info in self._stores.values() if self.host_id and info.host_id == self.host_id]
        stores = sorted(near or self._stores.values(), key=lambda info: info.peer.name)
        caches = self._exchange.shares_kv and self._state.memory.pool.config.caching
        target = stores[0].peer if stores and caches else None
        spread = self._spread_target() if target is not None else None
        before = {*self.spread.peers} if self.spread is not None else {self.target}
        joins = spread is not None and before <= {*spread.peers}  # what was offered stays where it is, or is moved
        if target != self.target or spread != self.spread:
            self.target, self.spread = target, spread
            self.offers.set_copies(1 if spread is None else min(spread.shares.copies, len(spread.peers)))
            if not joins:
                self.offers.store_changed()
                self._named_ns.clear()
                self._used_ns.clear()
            if target is None:  # else what waits goes to those that are there now
                self._drop_later()
                self._drop_pending()
        self._state.memory.listener = self._state.memory.states.listener = self if target is not None else None

    def _spread_target(self) -> SpreadTarget | None:
        peers = {name: info.peer for name, info in self._stores.items() if info.namespace == self._exchange.namespace}
        if len(peers) < 2:
            return None
        shares = StoreShares(peers, self._copies)
        return SpreadTarget(shares, tuple(peers[name] for name in shares.names))

    # -- what the cache has got (``PublishListener``)

    @property
    def has_waiting(self) -> bool:
        """Whether there is something to be offered, and a store for it."""
        waiting = self._pending or self._later or self._parts or self._kept_states
        return self.target is not None and bool(waiting)

    def on_published(self, sequence: Sequence, tokens: TokenArray, first_block: int) -> None:
        """The cache has got the blocks of ``sequence`` from ``first_block`` to the end of ``tokens``, which hold their
        final bytes once the plan has finished in which the sequence was scheduled last."""
        isolation, end = sequence.group.isolation, len(tokens) // self._block_tokens
        pool, owner = self._state.memory.pool, sequence.key
        if pool.part_blocks:
            self._put_off(self._parts, owner, _Later(isolation, tokens, first_block))
        identities = pool.identities(isolation, tokens)
        while first_block < end and self.offers.was_offered(identity_at(identities, first_block)):
            first_block += 1
        room = max(0, self._room_blocks)
        if end - first_block > room:
            self._put_off(self._later, owner, _Later(isolation, tokens, first_block + room))
            end = first_block + room
        if first_block >= end:
            return
        before, tokens = _between(identities, 0, first_block), tokens[: end * self._block_tokens]
        identities = _between(identities, first_block, end)
        blocks = sequence.blocks[first_block:end]
        written_by: int | None = sequence.scheduled_step
        if pool.access is not None and pool.access.last_write(Tier.HBM, blocks) > sequence.scheduled_step:
            written_by = None  # they come up from DRAM, with a plan in which the sequence has no row
        pool.retain(blocks)
        run = BlockRun(owner, isolation, tokens, first_block, blocks, identities, written_by, before=before)
        self._pending.append(run)

    def on_reused(self, sequence: Sequence, tokens: TokenArray) -> None:
        """``sequence`` goes on from ``tokens``, which were cached here: stores are not asked for them, and would take
        them for forgotten. What was not offered for a while is: a store that has it takes nothing, and one that came
        after it was computed, or has lost it, gets what is used again."""
        isolation, pool = sequence.group.isolation, self._state.memory.pool
        identities = pool.identities(isolation, tokens)
        self._reused.append(identities + pool.names_behind(identities))
        self._offer_cached(sequence, tokens)
        self.on_snapshot_kept(isolation, tokens)
        windows = pool.config.windows
        if windows is not None:
            self._put_off(self._parts, sequence.key, _Later(isolation, tokens, windows.first_entry(len(tokens))))

    def _report_reused(self, now_ns: int) -> None:
        """Tell stores of blocks that were used, each once in ``USED_EVERY_NS``."""
        reused, self._reused = self._reused, []
        forget_old(self._used_ns, now_ns - USED_EVERY_NS)
        for identities in reused:
            names = (identity_at(identities, index) for index in range(len(identities) // IDENTITY_BYTES))
            fresh = [name for name in names if name not in self._used_ns]
            for name in fresh:
                remember(self._used_ns, name, now_ns)
            for peer, indices in self._stores_of(b"".join(fresh)):
                self._messages.append(Send(peer, KvUsed(b"".join(fresh[index] for index in indices))))

    def _stores_of(self, identities: bytes) -> list[tuple[Peer, Items[int]]]:
        """The stores that keep these blocks, with the indices of those of each."""
        if self.spread is not None:
            return list(self.spread.blocks_by_store(identities))
        return [] if self.target is None else [(self.target, range(len(identities) // IDENTITY_BYTES))]

    @property
    def _room_blocks(self) -> int:
        """Blocks that may be lent beside those that are, and those that the next plan lends."""
        return self.offers.room_blocks - sum(len(run.blocks) for run in self._pending)

    def on_left_in_dram(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The cache has got ``tokens`` of ``sequence`` out of DRAM: they are offered out of the cache."""
        self._offer_cached(sequence, tokens)

    def _offer_cached(self, sequence: Sequence, tokens: TokenArray) -> None:
        isolation, first, end = sequence.group.isolation, 0, len(tokens) // self._block_tokens
        identities = self._state.memory.pool.identities(isolation, tokens)
        while first < end and self.offers.was_offered(identity_at(identities, first)):
            first += 1
        if first < end:
            self._put_off(self._later, sequence.key, _Later(isolation, tokens, first))

    def on_snapshot_kept(self, isolation: str, tokens: TokenArray, *, keep: bool = False) -> None:
        """The cache has got a snapshot behind ``tokens`` (``SnapshotListener``)."""
        pool = self._state.memory.pool
        names = pool.state_identities(pool.identity(isolation, tokens)) if not pool.part_blocks else []
        if names and (keep or not self.offers.was_offered(names[0])):
            self._kept_states.pop(names[0], None)
            self._kept_states[names[0]] = KeptState(isolation, tokens, keep)
            if len(self._kept_states) > LATER_MAX:
                del self._kept_states[next(iter(self._kept_states))]
                self.offers.counters.dropped += len(names)

    def on_discarded(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The KV of ``sequence`` is not to be trusted: neither offers of it nor what stores have of ``tokens``."""
        owner = sequence.key
        own_runs = [run for run in self._pending if run.owner == owner]
        self._pending = [run for run in self._pending if run.owner != owner]
        for run in own_runs:
            self._state.memory.pool.release(run.blocks)
        self._later.pop(owner, None)
        self._parts.pop(owner, None)
        self.offers.withdraw_offers("its KV is not to be trusted", owner)
        identities = self._state.memory.pool.identities(sequence.group.isolation, tokens)
        pool = self._state.memory.pool
        states = [pool.state_identities(identity_at(identities, block)) for block in range(len(identities) // 16)]
        identities += b"".join(name for names in states for name in names)
        self.offers.forget_blocks(identities)
        if identities:
            self._messages += [Send(info.peer, ForgetKv(identities)) for info in self._stores.values()]

    # -- what waits

    def keep_prefix(self, isolation: str, tokens: TokenArray, now_ns: int) -> None:
        """The cached prefix of ``tokens`` has a name: the store shall keep it whatever else it keeps. Blocks that the
        store has already are only marked."""
        tokens = tokens[: len(tokens) // self._block_tokens * self._block_tokens]
        if self.target is None or not len(tokens):
            return
        last = self._state.memory.pool.identity(isolation, tokens)
        if now_ns - self._named_ns.get(last, -AGAIN_NS) >= AGAIN_NS:
            remember(self._named_ns, last, now_ns)
            self._put_off(self._later, last, _Later(isolation, tokens, 0, keep=True))
            self.on_snapshot_kept(isolation, tokens, keep=True)
            windows = self._state.memory.pool.config.windows
            if windows is not None:
                later = _Later(isolation, tokens, windows.first_entry(len(tokens)), keep=True)
                self._put_off(self._parts, last, later)

    def _put_off(self, waiting: dict[bytes | SequenceKey, _Later], key: bytes | SequenceKey, later: _Later) -> None:
        """Offer it when less is lent. An order with this key is replaced, and begins where that one did."""
        earlier = waiting.pop(key, None)
        if earlier is not None:
            later.first_block = min(later.first_block, earlier.first_block)
        waiting[key] = later
        if len(waiting) > LATER_MAX:
            self._count_dropped(waiting.pop(next(iter(waiting))))

    def _count_dropped(self, later: _Later) -> None:
        self.offers.counters.dropped += max(0, len(later.tokens) // self._block_tokens - later.first_block)

    def _offer_later(self, target: Peer, now_ns: int) -> None:
        """Offer what was put off, as far as it is still cached and there is room."""
        pool, offers = self._state.memory.pool, self.offers
        while self._later and offers.room_blocks > 0:
            key, later = next(iter(self._later.items()))
            first = later.first_block
            hbm, dram = pool.export_blocks(later.isolation, later.tokens, first)
            if not pool.config.shares_dram:
                pool.release_dram(dram)
                dram = dram[:0]
            cached = first + len(hbm) + len(dram)
            end = min(cached, first + offers.room_blocks)
            if first < end:
                tokens = later.tokens[: end * self._block_tokens]
                path = pool.identities(later.isolation, tokens)
                identities, before = _between(path, first, end), _between(path, 0, first)
                above = hbm.tolist()[: end - first]
                below = dram.tolist()[: end - first - len(above)]
                run = BlockRun(
                    IN_CACHE, later.isolation, tokens, first, above, identities, None, below, later.keep, before
                )  # fmt: skip
                self._offer_run(run, target, now_ns, None)
                later.first_block = end
            if end >= cached:  # all of it; or what is behind has left the cache
                self._count_dropped(self._later.pop(key))
            pool.release(hbm)
            pool.release_dram(dram)

    def offer_states(self, now_ns: int) -> None:
        """Offer the snapshots that were cached, as far as they still are and there is room. Before plans are made: the
        next one brings those up that lie in DRAM."""
        pool, offers, target = self._state.memory.pool, self.offers, self.target
        while target is not None and self._kept_states and self._room_blocks >= pool.state_blocks:
            kept = self._kept_states.pop(next(iter(self._kept_states)))
            loan = pool.lend_state(kept.isolation, kept.tokens, pool.state_blocks)
            if loan is None or loan.tokens != len(kept.tokens):
                offers.counters.dropped += pool.state_blocks
                self._end_loan(loan)
                continue
            identities = pool.identities(kept.isolation, kept.tokens)
            self._offer_behind(kept, loan, pool.names_behind(identities), identities, target, now_ns)

    def _offer_behind(
        self, kept: KeptState, loan: Lease, names: bytes, identities: bytes, target: Peer, now_ns: int
    ) -> None:
        """Offer what is lent, under these ``names``, one a block. ``identities``: of the KV that it stands behind."""
        pool, offers = self._state.memory.pool, self.offers
        if self.spread is None:  # one offer, which ends the loan; named after each part's first block
            heads = range(0, len(loan.blocks), pool.part_blocks or len(loan.blocks))
            offers.offer_state(kept, loan, b"".join(identity_at(names, head) for head in heads), target, now_ns)
            return
        fence = self._exchange.fence_of_cached([(Tier.HBM, block) for block in loan.blocks])
        nothing = kept.tokens[:0]
        run = BlockRun(
            IN_CACHE, kept.isolation, nothing, 0, loan.blocks, names, fence, keep=kept.keep, before=identities,
            loan=loan,
        )  # fmt: skip
        offers.offer_spread(run, self.spread, now_ns)
        self._end_loan(loan)  # each offer has its share of it

    def _end_loan(self, loan: Lease | None) -> None:
        if loan is not None:
            self._state.memory.pool.unpin(loan)
            self._state.memory.pool.release(loan.blocks)

    def _offer_parts(self, target: Peer, now_ns: int) -> None:
        """Offer parts of windows that hang at cached blocks, as far as there is room; those that are gone are left
        out. KV behind a window goes soon: a store that has it can go on from there all the same."""
        pool, offers, size = self._state.memory.pool, self.offers, self._block_tokens
        while self._parts and (room := offers.room_blocks // pool.part_blocks) > 0:
            key, later = next(iter(self._parts.items()))
            found = pool.lend_cached_parts(later.isolation, later.tokens, later.first_block, room)
            if found is None:
                self._count_dropped(self._parts.pop(key))
                continue
            first, loan = found
            tokens = later.tokens[: loan.tokens]
            identities = pool.identities(later.isolation, tokens)
            own = split_keys(_between(identities, first, loan.tokens // size))
            parts = [pool.state_identities(identity) for identity in own]
            later.first_block = loan.tokens // size
            if later.first_block * size >= len(later.tokens):
                del self._parts[key]
            if not later.keep and all(offers.was_offered(names[0]) for names in parts):
                self._end_loan(loan)
                continue
            names = b"".join(name for part in parts for name in part)
            self._offer_behind(KeptState(later.isolation, tokens, later.keep), loan, names, identities, target, now_ns)

    # -- offering

    def on_plan_made(self, plan: StepPlan, now_ns: int) -> None:
        """``plan`` has been made: offer what it computes."""
        self.offers.plan_made(plan.step_id, now_ns)
        if self._pending:
            self._offer_pending(now_ns, plan)
        if self._parts and self.target is not None:
            self._offer_parts(self.target, now_ns)

    def offer_waiting(self, now_ns: int) -> None:
        """Offer what has become known since the last plan, and what was put off; report what was used."""
        if self._reused:
            self._report_reused(now_ns)
        if self._pending:
            self._offer_pending(now_ns, None)
        if self._later and self.target is not None:
            self._offer_later(self.target, now_ns)
        if self._parts and self.target is not None:
            self._offer_parts(self.target, now_ns)
        self.offers.expire_offered(now_ns)

    def _offer_pending(self, now_ns: int, plan: StepPlan | None) -> None:
        pending, self._pending = self._pending, []
        for run in pending:
            if self.target is not None:
                self._offer_run(run, self.target, now_ns, plan)
            self._state.memory.pool.release(run.blocks)

    def _offer_run(self, run: BlockRun, target: Peer, now_ns: int, plan: StepPlan | None) -> None:
        if self.spread is None:
            self.offers.offer_run(run, target, now_ns, plan)
        else:
            self.offers.offer_spread(run, self.spread, now_ns, plan)

    # -- endings

    def on_released(self, offer_id: str, used: bool) -> bool:
        """An offer has ended. False: it was none of these. A store that has not taken it, and is there, is too slow for
        what waits."""
        to = self.offers.on_released(offer_id, used)
        if to is not None and not used and to.name in self._stores:
            self._drop_later()
        return to is not None

    def free_blocks(self) -> bool:
        """Take back what keeps blocks from a request that needs them. False: there is nothing.

        Blocks of sequences that run stay lent: they are held anyway, and while they are, the store has time to pull.
        """
        running = {
            s.key for group in self._state.groups.values() for s in group.sequences.values() if s.slot is not None
        }
        idle = [run for run in self._pending if run.owner not in running]
        for run in idle:
            self._state.memory.pool.release(run.blocks)
        self._pending = [run for run in self._pending if run.owner in running]
        if not self.offers.withdraw_offers("the blocks are needed", spared=running) and not idle:
            return False
        self._drop_later()
        return True

    def kv_lost(self) -> None:
        """A step failed: nothing that it computed is offered."""
        self._drop_pending()
        self._drop_later()
        self.offers.kv_lost()

    def clear(self) -> None:
        """The instance was expelled: all offers have ended silently, and all members are unknown."""
        self._drop_pending()
        self.offers.clear()
        self._messages.clear()
        self._reused.clear()
        self.set_members(())

    def _drop_later(self) -> None:
        for waiting in (self._later, self._parts):
            for later in waiting.values():
                self._count_dropped(later)
            waiting.clear()
        self.offers.counters.dropped += len(self._kept_states) * self._state.memory.pool.state_blocks
        self._kept_states.clear()

    def _drop_pending(self) -> None:
        for run in self._pending:
            self._state.memory.pool.release(run.blocks)
        self._pending.clear()

    # -- out

    def take_messages(self) -> list[Send]:
        """What stores are to be told."""
        messages, self._messages = self._messages, []
        return messages

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when blocks are neither offered nor given back."""
        check(not self._pending, f"{len(self._pending)} runs of blocks are neither offered nor given back")
        check(max(len(self._later), len(self._parts)) <= LATER_MAX, f"{len(self._later)} runs wait")
        listens = self._state.memory.listener is self
        check(listens == (self.target is not None), "there is a store and no listener, or the reverse")
        self.offers.check_invariants()


def _between(identities: bytes, first: int, end: int) -> bytes:
    return identities[first * IDENTITY_BYTES : end * IDENTITY_BYTES]
