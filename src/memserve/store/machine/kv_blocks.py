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
from memserve.kv.transfer.context import Deadlines, is_gone
from memserve.kv.transfer.events import Delivered, HandoffOffered, Outcome, PagesPulled, PagesSealed
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import KEEP, AnyMessage, Fetch, Offer, Release, Wanted
from memserve.protocol.peers import Peer
from memserve.store.machine.block_pool import StorePool
from memserve.store.machine.events import ExtentsSealed, Jobs, SealExtents, StoreConfig
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values, split


@dataclass(slots=True, eq=False)
class _Taken:
    """Blocks that have arrived and are being sealed; a reference each."""

    identities: list[bytes]
    extents: list[int]
    keep: bool


@dataclass(slots=True, eq=False)
class _Asked:
    """A fetch that waits for blocks to be brought up."""

    sender: Peer
    fetch: Fetch
    deadline_ns: int
    awaited: int = 0
    held: list[int] = field(default_factory=list)
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
        self._taken: dict[int, _Taken] = {}  # by the job that seals them
        self._asked: dict[str, _Asked] = {}  # by transfer id
        self._deadlines = Deadlines()

    # -- what is told

    def hear(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        """A member said something of transfers."""
        match message:
            case Offer():
                self._offered(sender, message, now_ns)
            case Fetch():
                self._fetch(sender, message, now_ns)
            case _:
                self._act(self.exchange.handle(MessageArrived(sender, message), now_ns), now_ns)

    def pages_done(self, event: PagesSealed | PagesPulled, now_ns: int) -> None:
        """The host has sealed or pulled pages for the exchange."""
        self._act(self.exchange.handle(event, now_ns), now_ns)

    def act(self, outcomes: list[Outcome], now_ns: int) -> None:
        """What the exchange says when members come and go."""
        self._act(outcomes, now_ns)

    def advance(self, now_ns: int) -> None:
        """On every event: leases, room, fetches that have waited long enough."""
        while (asked := self._deadlines.pop_due(now_ns)) is not None:
            assert isinstance(asked, _Asked)
            asked.is_cut = True
            self._answer(asked, now_ns)
        self._act(self.exchange.advance(now_ns), now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling."""
        due = (self._deadlines.next_ns(), self.exchange.next_deadline_ns)
        return min((at for at in due if at is not None), default=None)

    def peer_gone(self, peer: Peer, now_ns: int) -> None:
        """``peer`` is dead or has left: nothing is held for it any more."""
        for asked in [asked for asked in self._asked.values() if is_gone(asked.sender, peer)]:
            self._give_back(asked)
        self._act(self.exchange.peer_gone(peer, now_ns), now_ns)

    def drop_fetches(self) -> None:
        """All members are forgotten."""
        for asked in list(self._asked.values()):
            self._give_back(asked)

    # -- taking

    def _offered(self, sender: Peer, offer: Offer, now_ns: int) -> None:
        if not offer.insert or offer.request is not None:
            self._jobs.send(sender, Release(offer.transfer_id, False, "a store takes whole blocks that it may find"))
            return
        named = offer.first_block + len(offer.blocks) + len(offer.dram_blocks)
        whole = min(named, len(offer.tokens) // self._pool.block_tokens)
        identities = self._pool.identities(offer.tenant, offer.tokens)
        first, keep = offer.first_block, offer.private == KEEP
        while first < whole and identities[first] in self._values:
            if keep:
                self._values.keep(identities[first], now_ns)
            first += 1
        fits = self.exchange.misfit(sender) is None and offer.identity == next(reversed(identities), b"")
        self._values.counters.kv_known += (first - offer.first_block) * fits
        if fits and whole > offer.first_block == first - (whole - offer.first_block):
            self._jobs.send(sender, Release(offer.transfer_id))
            return
        if first > offer.first_block and first < whole:
            self._jobs.send(sender, Wanted(offer.transfer_id, first))
        self._act(self.exchange.handle(MessageArrived(sender, _raw(offer, first, whole)), now_ns), now_ns)

    def _arrived(self, outcome: Delivered) -> None:
        """Blocks have come, each page with the checksum that its owner computed: seal them as wholes."""
        offer = outcome.offer
        identities = self._pool.identities(offer.tenant, offer.tokens)
        block_bytes = self._pool.block_bytes
        extents = [block * block_bytes for block in outcome.blocks]
        end = offer.first_block + len(extents)
        job = self._jobs.new()
        self._taken[job] = _Taken(identities[offer.first_block : end], extents, offer.private == KEEP)
        self._jobs.ask(SealExtents(job, tuple((extent, block_bytes) for extent in extents)))

    def sealed(self, event: ExtentsSealed, now_ns: int) -> bool:
        """Blocks that have arrived are sealed: publish them. False: the job is another part's."""
        taken = self._taken.pop(event.job, None)
        if taken is None:
            return False
        block_bytes, values = self._pool.block_bytes, self._values
        for identity, extent, seal in zip(taken.identities, taken.extents, event.seals, strict=True):
            values.counters.kv_stored += values.put_kv(identity, extent, block_bytes, seal, now_ns, keep=taken.keep)
            values.tier.release(extent)
        return True

    def forget(self, identities: bytes, now_ns: int) -> None:
        """An instance does not trust its KV of these blocks any more."""
        for identity in split(identities):
            if identity in self._values.log:
                self._values.forget(identity, now_ns)

    # -- lending

    def _fetch(self, sender: Peer, fetch: Fetch, now_ns: int) -> None:
        self._values.counters.fetches += 1
        is_new = fetch.transfer_id not in self._asked
        if not is_new or len(self._asked) >= self._config.fetches_max or self.exchange.misfit(sender) is not None:
            if is_new:
                self._act(self.exchange.handle(MessageArrived(sender, fetch), now_ns), now_ns)
            return
        patience_ns = self._config.fetch_deadline_ns
        if fetch.deadline_in_ns:
            patience_ns = min(patience_ns, int(fetch.deadline_in_ns * self._config.fetch_read_share))
        asked = _Asked(sender, fetch, now_ns + patience_ns, awaited=1)  # one: this method
        self._asked[fetch.transfer_id] = asked
        tokens = fetch.tokens[: fetch.end_block * self._pool.block_tokens]
        wanted = []
        for identity in self._pool.identities(fetch.tenant, tokens)[fetch.first_block :]:
            if identity not in self._values:
                break
            if self._values.is_ready(identity):
                self._hold(asked, identity, now_ns)
            else:
                wanted.append(identity)
        asked.awaited += len(wanted)
        for identity in wanted:
            self._loads.want(identity, partial(self._loaded, asked, identity), now_ns)
        self._one_less(asked, now_ns)
        if not asked.over:
            self._deadlines.add(asked)

    def _hold(self, asked: _Asked, identity: bytes, now_ns: int) -> None:
        place = self._values.hold(identity, now_ns)
        if place is None:
            asked.is_cut = True
        else:
            asked.held.append(place.offset)

    def _loaded(self, asked: _Asked, identity: bytes, ok: bool, now_ns: int) -> None:
        if asked.over:
            return
        if ok:
            self._hold(asked, identity, now_ns)
        else:
            asked.is_cut = True
        self._one_less(asked, now_ns)

    def _one_less(self, asked: _Asked, now_ns: int) -> None:
        asked.awaited -= 1
        if asked.awaited == 0:
            self._answer(asked, now_ns)

    def _answer(self, asked: _Asked, now_ns: int) -> None:
        """The exchange offers what is in memory, up to the first block that is not."""
        counters = self._values.counters
        counters.fetches_cut += asked.is_cut
        before = len(self.exchange.references())
        self._act(self.exchange.handle(MessageArrived(asked.sender, asked.fetch), now_ns), now_ns)
        counters.kv_lent += max(0, len(self.exchange.references()) - before)
        self._give_back(asked)

    def _give_back(self, asked: _Asked) -> None:
        asked.over = True
        del self._asked[asked.fetch.transfer_id]
        for extent in asked.held:
            self._values.tier.release(extent)
        asked.held.clear()

    # -- the exchange

    def _act(self, outcomes: list[Outcome], now_ns: int) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Delivered):
                self._arrived(outcome)
            elif isinstance(outcome, HandoffOffered):
                self.exchange.give_up(outcome.transfer_id, "there is no model here")
        self._values.settle()

    def references(self) -> list[int]:
        """Extents with a reference of a transfer, of a fetch that waits, or of blocks that are being sealed."""
        held = [extent for asked in self._asked.values() for extent in asked.held]
        held += [extent for taken in self._taken.values() for extent in taken.extents]
        for (_, block), count in self.exchange.references().items():
            held += [block * self._pool.block_bytes] * count
        return held


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
