"""The open offers of an instance to its store: what is lent, what the store was told of, and layers under way.

::

    offer --> Offer(insert), a reference on each block             until ``Release``, the lease's end, or taken back
    the plan that computes the blocks, or a group of its layers, has finished --> seals, Ready --> the store pulls
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from memserve.base.errors import check
from memserve.base.types import KVGeometry, Tier, TokenArray, TransferMode
from memserve.base.units import MIB, NS_PER_S, ceil_div
from memserve.instance.cluster.layer_announcer import LayerAnnouncer
from memserve.instance.events import StepPlan
from memserve.instance.scheduler.sequence import SequenceKey
from memserve.kv.state_snapshot import Lease
from memserve.kv.store_shares import StoreShares
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.messages import KEEP
from memserve.protocol.peers import Peer

LEASE_NS = 5 * NS_PER_S
"""A store that has not taken an offer so long after its blocks are written does not get it."""
FIRST_PLAN_NS = 10 * NS_PER_S
"""How long a plan may take until its blocks are written, as long as none has ended."""
TOLD_MAX = 65_536
"""Blocks that are known to have been offered."""
AGAIN_NS = 60 * NS_PER_S
"""What was offered longer ago, and is computed again, is offered again: the store may have lost it."""
GROUP_BYTES = 4 * MIB
"""A plan that computes more than this for an offer announces it in groups of layers that are at least this large. Less
of it is announced as a whole: messages cost more than the wait."""
USED_EVERY_NS = 10 * NS_PER_S
"""Stores hear so often at most that a block was used: short beside the time that a value stays in memory."""
IDENTITY_BYTES = 16
IN_CACHE: SequenceKey = (-1, -1)
"""The owner of blocks that lie in the cache: no sequence."""


def identity_at(identities: bytes, index: int) -> bytes:
    """The identity of block ``index`` in a run of them."""
    return identities[index * IDENTITY_BYTES : (index + 1) * IDENTITY_BYTES]


def remember(times: dict[bytes, int], identity: bytes, now_ns: int) -> None:
    """Note when something was told. The newest come last, and there are ``TOLD_MAX`` at most."""
    times.pop(identity, None)
    times[identity] = now_ns
    if len(times) > TOLD_MAX:
        del times[next(iter(times))]


def forget_old(times: dict[bytes, int], since_ns: int) -> None:
    """Forget what was told at ``since_ns``, or before."""
    while times and next(iter(times.values())) <= since_ns:
        del times[next(iter(times))]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks to be offered: those of ``tokens`` from ``first_block`` to the end."""

    owner: SequenceKey
    """The sequence that computes them, or ``IN_CACHE``."""
    isolation: str
    tokens: TokenArray
    first_block: int
    blocks: Items[int]
    """In HBM."""
    identities: bytes
    """Of these blocks, 16 bytes each."""
    written_by: int | None
    """The plan that has to finish before they hold their final bytes. None: whatever is under way."""
    dram_blocks: Items[int] = ()
    """Behind ``blocks``."""
    keep: bool = False
    """They have a name."""
    before: bytes = b""
    """Identities of the blocks that lead to these."""
    loan: Lease | None = None
    """A state or parts of windows: what lends them."""

    @property
    def end_block(self) -> int:
        """Behind the last one."""
        return self.first_block + len(self.blocks) + len(self.dram_blocks)

    def named_part(self, indices: Items[int], before: bytes) -> BlockRun:
        """Of the blocks those with these ``indices``, in order, known by their identities and not by tokens; ``before``
        is what of the blocks that lead to them is kept together with them."""
        in_hbm = len(self.blocks)
        return dataclasses.replace(
            self,
            tokens=self.tokens[:0],
            first_block=0,
            blocks=[self.blocks[index] for index in indices if index < in_hbm],
            dram_blocks=[self.dram_blocks[index - in_hbm] for index in indices if index >= in_hbm],
            identities=b"".join(identity_at(self.identities, index) for index in indices),
            before=before,
        )


@dataclass(frozen=True, slots=True)
class SpreadTarget:
    """Several stores as one."""

    shares: StoreShares
    peers: tuple[Peer, ...]
    """As ``shares.names``."""

    def blocks_by_store(self, identities: bytes) -> list[tuple[Peer, list[int]]]:
        """Each store that is to keep any of these blocks, with the indices of those, in order."""
        owners = self.shares.owners_of(identities)
        indices = [np.flatnonzero((owners == number).any(axis=1)).tolist() for number in range(len(self.peers))]
        return [(peer, own) for peer, own in zip(self.peers, indices, strict=True) if own]


@dataclass(frozen=True, slots=True)
class _Open:
    """An open offer."""

    to: Peer
    owner: SequenceKey
    blocks: int
    identities: bytes


@dataclass(slots=True)
class ExportCounters:
    """Blocks, in total."""

    offered: int = 0
    accepted: int = 0
    """Of them: the store has them."""
    failed: int = 0
    """Of them: refused, too late, or taken back."""
    dropped: int = 0
    """Not offered: they had left the cache, or too many waited."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """A snapshot that was cached, to be offered."""

    isolation: str
    tokens: TokenArray
    """Which it stands behind: whole blocks."""
    keep: bool = False
    """They have a name."""


class StoreOffers:
    """Lends blocks to stores, ``lent_max`` at most at once, and in any case ``least``, which are offered together."""

    def __init__(self, exchange: Exchange, geometry: KVGeometry, lent_max: int, least: int = 1) -> None:
        self._exchange = exchange
        self._geometry = geometry
        self._lent_max, self._least = lent_max, least
        self.exported_max = max(lent_max, least)
        self._copies = 1
        #: blocks of all open offers
        self.exported = 0
        self._open: dict[str, _Open] = {}
        self._announcer = LayerAnnouncer(exchange, geometry.num_layers)
        self._offered_ns: dict[bytes, int] = {}  # identity -> when it was offered; oldest first
        self._made_ns: dict[int, int] = {}  # step id -> when the plan was made, until it ends
        #: how long plans lately took, from when they were made, at most. None: none has ended
        self._plan_ns: int | None = None
        self.counters = ExportCounters()

    @property
    def room_blocks(self) -> int:
        """Blocks that may be offered beside those that are: each is lent to as many stores as keep it."""
        return (self.exported_max - self.exported) // self._copies

    def set_copies(self, copies: int) -> None:
        """In how many stores each block is to lie."""
        self._copies = copies
        self.exported_max = max(self._lent_max, self._least * copies, self.exported)

    def was_offered(self, identity: bytes) -> bool:
        """Whether this block was offered a short while ago."""
        return identity in self._offered_ns

    def offer_spread(self, run: BlockRun, target: SpreadTarget, now_ns: int, plan: StepPlan | None = None) -> None:
        """Offer each block of ``run`` to the stores that are to keep it, as :meth:`offer_run`."""
        path, count = run.before + run.identities, len(run.before) // IDENTITY_BYTES
        for peer, indices in target.blocks_by_store(path):
            own = [index - count for index in indices if index >= count]
            if own:
                before = b"".join(identity_at(path, index) for index in indices if index < count)
                self.offer_run(run.named_part(own, before), peer, now_ns, plan)

    def offer_run(self, run: BlockRun, to: Peer, now_ns: int, plan: StepPlan | None = None) -> None:
        """Offer ``run``, in groups of layers where ``plan``, which has just been made, computes much of it."""
        count, keep = run.end_block - run.first_block, KEEP if run.keep else b""
        layers, group = self._geometry.num_layers, ceil_div(GROUP_BYTES, count * self._geometry.page_bytes)
        by_layer = plan is not None and run.written_by == plan.step_id and group < layers
        offered = OfferedBlocks(
            run.isolation,
            run.tokens,
            run.blocks or run.dram_blocks,
            Tier.HBM if run.blocks else Tier.DRAM,
            run.first_block,
            run.dram_blocks if run.blocks else (),
            run.loan,
            identities=b"" if len(run.tokens) else run.identities,
            before=b"" if len(run.tokens) else run.before,
        )
        mode = TransferMode.BY_LAYER if by_layer else TransferMode.BY_REQUEST_AGG
        offer_id = self._exchange.offer_blocks(
            to, offered, now_ns, OfferTerms(mode, private=keep, lease_ns=self._lease_ns)
        )
        self._open[offer_id] = _Open(to, run.owner, count, run.identities)
        self.exported += count
        self.counters.offered += count
        for index in range(count):
            remember(self._offered_ns, identity_at(run.identities, index), now_ns)
        if by_layer and plan is not None:
            self._announcer.add_blocks(plan, offer_id, (run.first_block, run.end_block), every=group)
        else:
            self._exchange.announce_computed(offer_id, run.first_block, run.end_block, fence=run.written_by)

    def offer_state(self, kept: KeptState, loan: Lease, identities: bytes, to: Peer, now_ns: int) -> None:
        """Offer what is lent by ``loan``, behind KV that is offered on its own: a snapshot, under the identity of its
        first block, or parts of windows, under that of each one's first block."""
        end = len(kept.tokens) // self._geometry.block_tokens
        offered = OfferedBlocks(kept.isolation, kept.tokens, (), first_block=end, state=loan)
        terms = OfferTerms(private=KEEP if kept.keep else b"", lease_ns=self._lease_ns)
        fence = self._exchange.fence_of_cached([(Tier.HBM, block) for block in loan.blocks])
        offer_id = self._exchange.offer_blocks(to, offered, now_ns, terms)
        self._open[offer_id] = _Open(to, IN_CACHE, len(loan.blocks), identities)
        self.exported += len(loan.blocks)
        self.counters.offered += len(loan.blocks)
        for index in range(len(identities) // IDENTITY_BYTES):
            remember(self._offered_ns, identity_at(identities, index), now_ns)
        # all pages: a store keeps whole blocks
        self._exchange.announce_state(offer_id, end, fence, whole=True)

    # -- while it is computed

    @property
    def _lease_ns(self) -> int:
        """Of an offer that is made now: its blocks may be those of a plan that is still to be computed, and which takes
        a large model on a few cores many seconds."""
        return LEASE_NS + 2 * (FIRST_PLAN_NS if self._plan_ns is None else self._plan_ns)

    def plan_made(self, step_id: int, now_ns: int) -> None:
        """The plan ``step_id`` is on its way to the device."""
        self._made_ns[step_id] = now_ns

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan."""
        self._announcer.layer_finished(step_id, layer)

    def step_finished(self, step_id: int, now_ns: int) -> None:
        """All layers of the plan are written, reported or not."""
        self._announcer.step_finished(step_id)
        made_ns = self._made_ns.pop(step_id, None)
        if made_ns is not None:
            forgotten_ns = 0 if self._plan_ns is None else self._plan_ns * 15 // 16  # a long one counts for a while
            self._plan_ns = max(now_ns - made_ns, forgotten_ns)

    # -- endings

    def on_released(self, offer_id: str, used: bool) -> Peer | None:
        """An offer has ended. Returns the store that it was made to; None: it was none of these."""
        offer = self._open.pop(offer_id, None)
        if offer is None:
            return None
        self.exported -= offer.blocks
        if used:
            self.counters.accepted += offer.blocks
        else:
            self._count_failed(offer)
        return offer.to

    def withdraw_offers(
        self, reason: str, owner: SequenceKey | None = None, spared: Container[SequenceKey] = ()
    ) -> bool:
        """End all offers but those of owners that are ``spared``, or those of one owner. False: there were none."""
        offer_ids = [
            offer_id
            for offer_id, offer in self._open.items()
            if owner in (None, offer.owner) and offer.owner not in spared
        ]
        for offer_id in offer_ids:
            offer = self._open.pop(offer_id)
            self.exported -= offer.blocks
            self._count_failed(offer)
            self._exchange.withdraw_offer(offer_id, reason)
        return bool(offer_ids)

    def _count_failed(self, offer: _Open) -> None:
        self.counters.failed += offer.blocks
        self.forget_blocks(offer.identities)

    def forget_blocks(self, identities: bytes) -> None:
        """The store does not have these: they are offered again when they are computed again."""
        for index in range(len(identities) // IDENTITY_BYTES):
            self._offered_ns.pop(identity_at(identities, index), None)

    def expire_offered(self, now_ns: int) -> None:
        """Forget what was told long ago."""
        forget_old(self._offered_ns, now_ns - AGAIN_NS)

    def kv_lost(self) -> None:
        """A step failed; the exchange ends all offers, and says so."""
        self._announcer.clear()
        self._made_ns.clear()

    def store_changed(self) -> None:
        """Another store, or another incarnation of it, was told of nothing."""
        self._offered_ns.clear()

    def clear(self) -> None:
        """All offers have ended silently."""
        self._announcer.clear()
        self._made_ns.clear()
        self._open.clear()
        self.exported = 0

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when more or less is lent than the offers say, or more than may be."""
        lent = sum(offer.blocks for offer in self._open.values())
        check(
            lent == self.exported <= self.exported_max,
            f"{self.exported} blocks are lent, offers: {lent}, limit {self.exported_max}",
        )
