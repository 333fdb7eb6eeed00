"""KV blocks of instances: taken when they are offered, lent when they are asked for.

::

    Offer(insert) --> known blocks are left out --> Exchange: a raw transfer into memory --> sealed --> published
    Fetch --> what lies on disks is brought up, each block once --> Exchange: offers what is in memory

The exchange does what it does in every process: references, checks of namespace, geometry, identity and checksums,
leases, peers that die. A fetch that cannot get a block ends in front of it: the instance computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from memserve.base.types import Tier
from memserve.kv.store_shares import split_keys
from memserve.kv.transfer.context import Deadlines, is_gone
from memserve.kv.transfer.events import Delivered, HandoffOffered, Outcome, PagesPulled, PagesSealed, Released
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import KEEP, AnyMessage, Fetch, Offer, Release, Wanted, Withdraw
from memserve.protocol.peers import Peer
from memserve.protocol.store import KEY_BYTES
from memserve.store.machine.block_pool import StorePool
from memserve.store.machine.events import ExtentsSealed, Jobs, SealExtents, StoreConfig
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values


@dataclass(slots=True, eq=False)
class _Taken:
    """Blocks that have arrived and are being sealed; a reference each."""

    identities: list[bytes]
    extents: list[int]
    keep: bool
    before: bytes = b""
    """Identities of the blocks that lead to these, as far as they are known."""


@dataclass(slots=True, eq=False)
class _PendingFetch:
    """A fetch that waits for blocks to be brought up."""

    sender: Peer
    fetch: Fetch
    deadline_ns: int
    loads_awaited: int = 0
    extents: list[int] = field(default_factory=list)
    """Extents, a reference each: what is there already shall still be there when the rest has come."""
    is_cut: bool = False
    over: bool = False


class KvBlocks:
    """The store's side of transfers with instances."""

    def __init__(
        self, pool: StorePool, exchange: Exchange, values: Values, loads: Loads, jobs: Jobs, config: StoreConfig
    ) -> None:
        self._pool = pool
        self.exchange = exchange
        self._values = values
        self._loads = loads
        self._jobs = jobs
        self._config = config
        self._sealing: dict[int, _Taken] = {}  # by the job that seals them
        self._pending_fetches: dict[str, _PendingFetch] = {}  # by transfer id
        self._deadlines = Deadlines()
        #: own offers to other stores that have ended since the last :meth:`take_released`
        self._released: list[Released] = []
        self._lent: list[bytes] = []  # named blocks, since the last :meth:`take_lent`

    # -- what is told

    def on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        """A member said something of transfers."""
        match message:
            case Offer():
                self._offered(sender, message, now_ns)
            case Fetch():
                self._begin_fetch(sender, message, now_ns)
            case _:
                self._perform_outcomes(self.exchange.handle(MessageArrived(sender, message), now_ns), now_ns)

    def pages_done(self, event: PagesSealed | PagesPulled, now_ns: int) -> None:
        """The host has sealed or pulled pages for the exchange."""
        self._perform_outcomes(self.exchange.handle(event, now_ns), now_ns)

    def on_outcomes(self, outcomes: list[Outcome], now_ns: int) -> None:
        """What the exchange says when members come and go."""
        self._perform_outcomes(outcomes, now_ns)

    def advance_time(self, now_ns: int) -> None:
        """On every event: leases, room, fetches that have waited long enough."""
        while (pending := self._deadlines.pop_due(now_ns)) is not None:
            assert isinstance(pending, _PendingFetch)
            pending.is_cut = True
            self._offer_blocks(pending, now_ns)
        self._perform_outcomes(self.exchange.advance_transfers(now_ns), now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance_time` is worth calling."""
        due = (self._deadlines.next_ns(), self.exchange.next_deadline_ns)
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

    def remove_peer(self, peer: Peer, now_ns: int) -> None:
        """``peer`` is dead or has left: nothing is held for it any more."""
        for pending in [pending for pending in self._pending_fetches.values() if is_gone(pending.sender, peer)]:
            self._end_fetch(pending)
        self._perform_outcomes(self.exchange.peer_removed(peer, now_ns), now_ns)

    def drop_fetches(self) -> None:
        for pending in list(self._pending_fetches.values()):
            self._end_fetch(pending)

    # -- taking

    def _offered(self, sender: Peer, offer: Offer, now_ns: int) -> None:
        if not offer.insert or offer.request is not None:
            self._jobs.send_message(
                sender, Release(offer.transfer_id, False, "a store takes whole blocks that it may find")
            )
            return
        misfits = offer.identities and len(offer.identities) != KEY_BYTES * (len(offer.blocks) + len(offer.dram_blocks))
        if misfits or len(offer.before) % KEY_BYTES:
            self._jobs.send_message(sender, Release(offer.transfer_id, False, "not an identity for each block"))
            return
        offered_end = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
        identities = self._identities_of(offer)
        whole = min(offered_end, len(identities))
        first, keep = offer.first_block, offer.private == KEEP
        while first < whole and identities[first] in self._values:
            if keep:
                self._values.keep_block(identities[first], now_ns)
            first += 1
        last = self._pool.identity(offer.tenant, offer.tokens)
        fits = self.exchange.incompatibility(sender) is None and offer.identity == last
        self._values.counters.kv_known += (first - offer.first_block) * fits
        if fits and whole > offer.first_block == first - (whole - offer.first_block):
            self._jobs.send_message(sender, Release(offer.transfer_id))
            return
        if first > offer.first_block and first < whole:
            self._jobs.send_message(sender, Wanted(offer.transfer_id, first))
        self._perform_outcomes(self.exchange.handle(MessageArrived(sender, _raw(offer, first, whole)), now_ns), now_ns)

    def _identities_of(self, offer: Offer) -> list[bytes]:
        """Of the blocks of its tokens, from the first one, and behind them of those of a state, or of parts, if it
        brings all."""
        if offer.identities:
            return split_keys(offer.identities)
        identities, count = self._pool.block_identities(offer.tenant, offer.tokens), offer.state_blocks
        named_end = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
        if count and identities and named_end == len(identities) + count:
            names = self._pool.names_behind(identities, count, offer.part_blocks)
            identities += names if len(names) == count else []
        return identities

    def _on_delivered(self, outcome: Delivered) -> None:
        """Blocks have come, each page with the checksum that its owner computed: seal them as wholes."""
        offer = outcome.offer
        identities = self._identities_of(offer)
        block_bytes = self._pool.block_bytes
        extents = [block * block_bytes for block in outcome.blocks]
        end = offer.first_block + len(extents)
        job = self._jobs.next_job()
        before = offer.before if offer.identities else b"".join(identities[: offer.first_block])
        self._sealing[job] = _Taken(identities[offer.first_block : end], extents, offer.private == KEEP, before)
        self._jobs.add_action(SealExtents(job, tuple((extent, block_bytes) for extent in extents)))

    def sealed(self, event: ExtentsSealed, now_ns: int) -> bool:
        """Blocks that have arrived are sealed: publish them. False: the job is another part's."""
        arrived = self._sealing.pop(event.job, None)
        if arrived is None:
            return False
        block_bytes, values = self._pool.block_bytes, self._values
        for identity, extent, seal in zip(arrived.identities, arrived.extents, event.seals, strict=True):
            values.counters.kv_stored += values.put_kv(identity, extent, block_bytes, seal, now_ns, keep=arrived.keep)
            values.tier.release(extent)
        # a prefix leaves memory from its end: without its first block it is of no use
        values.tier.touch(arrived.before + b"".join(arrived.identities), hit=False)
        return True

    def forget_blocks(self, identities: bytes, now_ns: int) -> None:
        """An instance does not trust its KV of these blocks any more."""
        for identity in split_keys(identities):
            if identity in self._values.log:
                self._values.forget_value(identity, now_ns)

    # -- lending

    def _begin_fetch(self, sender: Peer, fetch: Fetch, now_ns: int) -> None:
        self._values.counters.fetches += 1
        is_new = fetch.transfer_id not in self._pending_fetches
        if (
            not is_new
            or len(self._pending_fetches) >= self._config.fetches_max
            or self.exchange.incompatibility(sender) is not None
            or self.exchange.has_offered(fetch.transfer_id)
        ):
            if is_new:
                self._perform_outcomes(self.exchange.handle(MessageArrived(sender, fetch), now_ns), now_ns)
            return
        grace_ns = self._config.fetch_deadline_ns
        if fetch.deadline_in_ns:
            grace_ns = min(grace_ns, int(fetch.deadline_in_ns * self._config.fetch_read_share))
        self._values.counters.kv_asked += fetch.end_block - fetch.first_block
        fetch, wanted_identities = (fetch, split_keys(fetch.identities)) if fetch.identities else self._reachable(fetch)
        pending = _PendingFetch(sender, fetch, now_ns + grace_ns, loads_awaited=1)  # one: this method
        self._pending_fetches[fetch.transfer_id] = pending
        to_load = []
        for identity in wanted_identities:
            if identity not in self._values:
                break
            if self._values.is_ready(identity):
                self._hold_block(pending, identity, now_ns)
            else:
                to_load.append(identity)
        pending.loads_awaited += len(to_load)
        for identity in to_load:
            self._loads.request_load(identity, partial(self._on_loaded, pending, identity), now_ns)
        self._count_down(pending, now_ns)
        if not pending.over:
            self._deadlines.add(pending)

    def _reachable(self, fetch: Fetch) -> tuple[Fetch, list[bytes]]:
        """``fetch``, and the blocks for it. Where a state is wanted: as far as one is here with all KV before it, and
        its blocks."""
        size = self._pool.block_tokens
        identities = self._pool.block_identities(fetch.tenant, fetch.tokens[: fetch.end_block * size])
        count, pool, end = fetch.state_blocks, self._pool, fetch.first_block
        if not count:
            return fetch, identities[fetch.first_block :]
        if not pool.may_lend(count, fetch.part_blocks):  # what a peer says is not worth much work
            return fetch, []
        while end < len(identities) and identities[end] in self._values:
            end += 1
        for last in range(end, fetch.first_block, -1):
            # the last name first: where a state was never stored, one is looked for
            least = pool.names_behind(
                identities[last - 1 : last], min(count, fetch.part_blocks or 1), fetch.part_blocks
            )
            if least[0] not in self._values:
                continue
            state = pool.names_behind(identities[:last], count, fetch.part_blocks)
            if all(identity in self._values for identity in state):
                return replace(fetch, tokens=fetch.tokens[: last * size], end_block=last), [
                    *identities[fetch.first_block : last], *state,
                ]  # fmt: skip
        return fetch, []

    def _hold_block(self, pending: _PendingFetch, identity: bytes, now_ns: int) -> None:
        place = self._values.hold_value(identity, now_ns)
        if place is None:
            pending.is_cut = True
        else:
            pending.extents.append(place.offset)

    def _on_loaded(self, pending: _PendingFetch, identity: bytes, ok: bool, now_ns: int) -> None:
        if pending.over:
            return
        if ok:
            self._hold_block(pending, identity, now_ns)
        else:
            pending.is_cut = True
        self._count_down(pending, now_ns)

    def _count_down(self, pending: _PendingFetch, now_ns: int) -> None:
        pending.loads_awaited -= 1
        if pending.loads_awaited == 0:
            self._offer_blocks(pending, now_ns)

    def _offer_blocks(self, pending: _PendingFetch, now_ns: int) -> None:
        """The exchange offers what is in memory, up to the first block that is not."""
        counters = self._values.counters
        counters.fetches_cut += pending.is_cut
        before = len(self.exchange.references())
        if pending.fetch.identities:
            self._offer_named(pending.sender, pending.fetch, now_ns)
        else:
            self._perform_outcomes(self.exchange.handle(MessageArrived(pending.sender, pending.fetch), now_ns), now_ns)
        counters.kv_lent += max(0, len(self.exchange.references()) - before)
        self._end_fetch(pending)

    def take_released(self) -> list[Released]:
        """Own offers that have ended since the last call: blocks that were lent, or given to another store."""
        released, self._released = self._released, []
        return released

    def take_lent(self) -> list[bytes]:
        """Named blocks that were offered to instances since the last call."""
        lent, self._lent = self._lent, []
        return lent

    def _offer_named(self, sender: Peer, fetch: Fetch, now_ns: int) -> None:
        """Answer a fetch of named blocks: those in memory, up to the first that is not."""
        extents: list[int] = []
        for identity in split_keys(fetch.identities):
            extent = self._pool.hold_block(identity)
            if extent is None:
                break
            extents.append(extent)
        if extents:
            offered = OfferedBlocks(
                fetch.tenant,
                fetch.tokens[:0],
                [extent // self._pool.block_bytes for extent in extents],
                Tier.DRAM,
                identities=fetch.identities[: len(extents) * KEY_BYTES],
            )
            terms = OfferTerms(insert=False, answers=fetch.transfer_id)
            self.exchange.offer_blocks(sender, offered, now_ns, terms)
            self.exchange.announce_computed(fetch.transfer_id, 0, len(extents))
            self._lent += split_keys(offered.identities)
        else:
            self._jobs.send_message(sender, Withdraw(fetch.transfer_id, "not kept here (any more)"))
        for extent in extents:
            self._values.tier.release(extent)

    def _end_fetch(self, pending: _PendingFetch) -> None:
        pending.over = True
        del self._pending_fetches[pending.fetch.transfer_id]
        for extent in pending.extents:
            self._values.tier.release(extent)
        pending.extents.clear()

    # -- the exchange

    def _perform_outcomes(self, outcomes: list[Outcome], now_ns: int) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Delivered):
                self._on_delivered(outcome)
            elif isinstance(outcome, HandoffOffered):
                self.exchange.give_up(outcome.transfer_id, "there is no model here")
            elif isinstance(outcome, Released):
                self._released.append(outcome)
        self._values.settle_evicted()

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a transfer, of a fetch that waits, or of blocks that are being sealed."""
        extents = [extent for pending in self._pending_fetches.values() for extent in pending.extents]
        extents += [extent for arrived in self._sealing.values() for extent in arrived.extents]
        for (_, block), count in self.exchange.references().items():
            extents += [block * self._pool.block_bytes] * count
        return extents


def _raw(offer: Offer, first: int, end: int) -> Offer:
    """``offer`` as a transfer into DRAM of the blocks ``[first, end)`` alone, which are inserted by identity later."""
    skipped, count = first - offer.first_block, end - first
    blocks = offer.blocks[skipped : skipped + count]
    behind = max(0, skipped - len(offer.blocks))
    dram_blocks = offer.dram_blocks[behind : behind + count - len(blocks)]
    return replace(
        offer,
        insert=False,
        first_block=first,
        blocks=blocks,
        dram_blocks=dram_blocks,
        dst_blocks=(),
        dst_tier=Tier.DRAM,
    )
