"""Which blocks of an instance's cache are offered to a store, which keeps them for longer than HBM has room.

::

    published (blocks of a row, of an answer)  --> pending              the cache has got them just now
    planned, settle                            --> offered              ``store_offers``
    kept (a named prefix), and what is beyond the limit of lent blocks --> offered later, if it is still cached

No request waits for any of this. Blocks that are lent to the store cannot be evicted, so they are few, they are lent
for a few seconds at most, and where a request needs the room, they are taken back. Without a store the cache has no
listener, and nothing of this happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memserve.errors import check
from memserve.instance.events import StepPlan
from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.sequence import Sequence
from memserve.instance.store_offers import AGAIN_NS, IDENTITY_BYTES, Run, StoreOffers, identity_at, remember
from memserve.kv_transfer.exchange import Exchange
from memserve.messages import Peer, PeerInfo
from memserve.serving import Send
from memserve.store_messages import ForgetKv
from memserve.tiers import AS_COMPUTED
from memserve.types import KVGeometry, Role, Tier, TokenArray

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
    """Offers what one instance caches to the nearest store; the listener of ``SequenceMemory``."""

    __slots__ = (
        "_block_tokens", "_exchange", "_kept", "_later", "_messages", "_pending", "_state", "_stores", "host_id",
        "offers", "target",
    )  # fmt: skip

    def __init__(self, state: SchedulerState, exchange: Exchange, geometry: KVGeometry) -> None:
        self._state = state
        self._exchange = exchange
        self._block_tokens = geometry.block_tokens
        self.offers = StoreOffers(exchange, geometry, max(1, state.memory.pool.config.hbm_blocks // LENT_SHARE))
        self._stores: dict[str, PeerInfo] = {}
        #: of this process; empty: not known
        self.host_id = ""
        #: the store that gets the offers. None: there is none
        self.target: Peer | None = None
        self._pending: list[Run] = []  # a reference on each block
        self._later: dict[bytes | int, _Later] = {}  # by a named prefix's last identity, or a sequence's ``id``
        self._kept: dict[bytes, int] = {}  # last identity of a named prefix -> when it was offered as such
        self._messages: list[Send] = []

    # -- members

    @property
    def stores(self) -> list[PeerInfo]:
        """All stores among the members."""
        return list(self._stores.values())

    def set_members(self, infos: Iterable[PeerInfo]) -> None:
        """All members but this one."""
        self._stores = {info.peer.name: info for info in infos if info.role is Role.STORE}
        self._choose()

    def joined(self, info: PeerInfo) -> None:
        """A new member."""
        if info.role is Role.STORE:
            self._stores[info.peer.name] = info
            self._choose()

    def gone(self, peer: Peer) -> None:
        """A member left; its offers have ended."""
        known = self._stores.get(peer.name)
        if known is not None and known.peer.generation <= peer.generation:
            del self._stores[peer.name]
            self._choose()

    def _choose(self) -> None:
        """The store on this host, else the first by name. Another one, or another incarnation, was told of nothing."""
        near = [info for info in self._stores.values() if self.host_id and info.host_id == self.host_id]
        stores = sorted(near or self._stores.values(), key=lambda info: info.peer.name)
        caches = self._exchange.shares_kv and self._state.memory.pool.config.caching
        target = stores[0].peer if stores and caches else None
        if target != self.target:
            self.target = target
            self.offers.store_changed()
            self._kept.clear()
            self._drop_later()
            self._drop_pending()
        self._state.memory.listener = self if target is not None else None

    # -- what the cache has got (``PublishListener``)

    def published(self, sequence: Sequence, tokens: TokenArray, first_block: int) -> None:
        """The cache has got the blocks of ``sequence`` from ``first_block`` to the end of ``tokens``, which hold their
        final bytes once the plan has finished in which the sequence was scheduled last."""
        isolation, end = sequence.group.isolation, len(tokens) // self._block_tokens
        pool, owner = self._state.memory.pool, id(sequence)
        identities = pool.identities(isolation, tokens)
        while first_block < end and self.offers.knows(identity_at(identities, first_block)):
            first_block += 1
        room = max(0, self.offers.room - sum(len(run.blocks) for run in self._pending))
        if end - first_block > room:
            self._put_off(owner, _Later(isolation, tokens, first_block + room))
            end = first_block + room
        if first_block >= end:
            return
        tokens, identities = tokens[: end * self._block_tokens], _between(identities, first_block, end)
        blocks = sequence.blocks[first_block:end]
        written_by: int | None = sequence.scheduled_step
        if pool.access is not None and pool.access.last_write(Tier.HBM, blocks) > sequence.scheduled_step:
            written_by = None  # they come up from DRAM, with a plan in which the sequence has no row
        pool.retain(blocks)
        self._pending.append(Run(owner, isolation, tokens, first_block, blocks, identities, written_by))

    def left_in_dram(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The cache has got ``tokens`` of ``sequence`` out of DRAM: they are offered out of the cache."""
        isolation, first, end = sequence.group.isolation, 0, len(tokens) // self._block_tokens
        identities = self._state.memory.pool.identities(isolation, tokens)
        while first < end and self.offers.knows(identity_at(identities, first)):
            first += 1
        if first < end:
            self._put_off(id(sequence), _Later(isolation, tokens, first))

    def discarded(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The KV of ``sequence`` is not to be trusted: neither offers of it nor what stores have of ``tokens``."""
        owner = id(sequence)
        mine = [run for run in self._pending if run.owner == owner]
        self._pending = [run for run in self._pending if run.owner != owner]
        for run in mine:
            self._state.memory.pool.release(run.blocks)
        self._later.pop(owner, None)
        self.offers.take_back("its KV is not to be trusted", owner)
        identities = self._state.memory.pool.identities(sequence.group.isolation, tokens)
        self.offers.forget(identities)
        if identities:
            self._messages += [Send(info.peer, ForgetKv(identities)) for info in self._stores.values()]

    # -- what waits

    def keep(self, isolation: str, tokens: TokenArray, now: int) -> None:
        """The cached prefix of ``tokens`` has a name: the store shall keep it whatever else it keeps. Blocks that the
        store has already are only marked."""
        tokens = tokens[: len(tokens) // self._block_tokens * self._block_tokens]
        if self.target is None or not len(tokens):
            return
        last = self._state.memory.pool.identity(isolation, tokens)
        if now - self._kept.get(last, -AGAIN_NS) >= AGAIN_NS:
            remember(self._kept, last, now)
            self._put_off(last, _Later(isolation, tokens, 0, keep=True))

    def _put_off(self, key: bytes | int, later: _Later) -> None:
        """Offer it when less is lent. An order with this key is replaced, and begins where that one did."""
        known = self._later.pop(key, None)
        if known is not None:
            later.first_block = min(later.first_block, known.first_block)
        self._later[key] = later
        if len(self._later) > LATER_MAX:
            self._dropped(self._later.pop(next(iter(self._later))))

    def _dropped(self, later: _Later) -> None:
        self.offers.counters.dropped += max(0, len(later.tokens) // self._block_tokens - later.first_block)

    def _offer_later(self, target: Peer, now: int) -> None:
        """Offer what was put off, as far as it is still cached and there is room."""
        pool, offers = self._state.memory.pool, self.offers
        while self._later and offers.room:
            key, later = next(iter(self._later.items()))
            first = later.first_block
            hbm, dram = pool.lend(later.isolation, later.tokens, first)
            if pool.config.lower_dtype != AS_COMPUTED:  # what lies rounded in DRAM leaves no instance
                pool.release_dram(dram)
                dram = dram[:0]
            cached = first + len(hbm) + len(dram)
            end = min(cached, first + offers.room)
            if first < end:
                tokens = later.tokens[: end * self._block_tokens]
                identities = _between(pool.identities(later.isolation, tokens), first, end)
                above = hbm.tolist()[: end - first]
                below = dram.tolist()[: end - first - len(above)]
                run = Run(0, later.isolation, tokens, first, above, identities, None, below, later.keep)
                offers.offer(run, target, now)
                later.first_block = end
            if end >= cached:  # all of it; or what is behind has left the cache
                self._dropped(self._later.pop(key))
            pool.release(hbm)
            pool.release_dram(dram)

    # -- offering

    def planned(self, plan: StepPlan, now: int) -> None:
        """``plan`` has been made: offer what it computes."""
        if self._pending:
            self._offer_pending(now, plan)

    def settle(self, now: int) -> None:
        """Offer what has become known since the last plan, and what was put off."""
        if self._pending:
            self._offer_pending(now, None)
        if self._later and self.target is not None:
            self._offer_later(self.target, now)
        self.offers.expire(now)

    def _offer_pending(self, now: int, plan: StepPlan | None) -> None:
        pending, self._pending = self._pending, []
        for run in pending:
            if self.target is not None:
                self.offers.offer(run, self.target, now, plan)
            self._state.memory.pool.release(run.blocks)

    # -- endings

    def released(self, offer_id: str, used: bool) -> bool:
        """An offer has ended. False: it was none of these. A store that has not taken it is too slow for what waits."""
        is_mine = self.offers.released(offer_id, used)
        if is_mine and not used:
            self._drop_later()
        return is_mine

    def make_room(self) -> bool:
        """Take back what keeps blocks from a request that needs them. False: there is nothing.

        Blocks of sequences that run stay lent: they are held anyway, and while they are, the store has time to pull.
        """
        running = {
            id(s) for group in self._state.groups.values() for s in group.sequences.values() if s.slot is not None
        }
        idle = [run for run in self._pending if run.owner not in running]
        for run in idle:
            self._state.memory.pool.release(run.blocks)
        self._pending = [run for run in self._pending if run.owner in running]
        if not self.offers.take_back("the blocks are needed", spared=running) and not idle:
            return False
        self._drop_later()
        return True

    def kv_lost(self) -> None:
        """A step failed: nothing that it computed is offered."""
        self._drop_pending()
        self._drop_later()
        self.offers.kv_lost()

    def clear(self) -> None:
        """The instance was expelled: all offers have ended silently, and all members are strangers."""
        self._drop_pending()
        self.offers.clear()
        self._messages.clear()
        self.set_members(())

    def _drop_later(self) -> None:
        for later in self._later.values():
            self._dropped(later)
        self._later.clear()

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
        check(len(self._later) <= LATER_MAX, f"{len(self._later)} runs wait")
        listens = self._state.memory.listener is self
        check(listens == (self.target is not None), "there is a store and no listener, or the reverse")
        self.offers.check_invariants()


def _between(identities: bytes, first: int, end: int) -> bytes:
    return identities[first * IDENTITY_BYTES : end * IDENTITY_BYTES]
