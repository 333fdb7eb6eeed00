"""The open offers of an instance to its store: what is lent, what the store was told of, and layers under way.

::

    offer --> Offer(insert), a reference on each block             until ``Release``, the lease's end, or taken back
    the plan that computes the blocks, or a group of its layers, has finished --> seals, Ready --> the store pulls
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from memserve.errors import check
from memserve.instance.events import StepPlan
from memserve.kv_transfer.exchange import Exchange
from memserve.messages import KEEP, Peer
from memserve.types import KVGeometry, Tier, TokenArray, TransferMode
from memserve.units import MIB, NS_PER_S, ceil_div

LEASE_NS = 5 * NS_PER_S
"""A store that has not taken an offer after this long does not get it."""
TOLD_MAX = 65_536
"""Blocks that are known to have been offered."""
AGAIN_NS = 60 * NS_PER_S
"""What was offered longer ago, and is computed again, is offered again: the store may have lost it."""
GROUP_BYTES = 4 * MIB
"""A plan that computes more than this for an offer announces it in groups of layers that are at least this large. Less
of it is announced as a whole: messages cost more than the wait."""
IDENTITY_BYTES = 16


def identity_at(identities: bytes, at: int) -> bytes:
    """The identity of block ``at`` in a run of them."""
    return identities[at * IDENTITY_BYTES : (at + 1) * IDENTITY_BYTES]


def remember(times: dict[bytes, int], identity: bytes, now: int) -> None:
    """Note when something was told. The newest come last, and there are ``TOLD_MAX`` at most."""
    times.pop(identity, None)
    times[identity] = now
    if len(times) > TOLD_MAX:
        del times[next(iter(times))]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks to be offered: those of ``tokens`` from ``first_block`` to the end."""

    owner: int
    """``id`` of the sequence that computes them; 0: they lie in the cache."""
    isolation: str
    tokens: TokenArray
    first_block: int
    blocks: Sequence[int]
    """In HBM."""
    identities: bytes
    """Of these blocks, 16 bytes each."""
    written_by: int | None
    """The plan that has to finish before they hold their final bytes. None: whatever is under way."""
    dram_blocks: Sequence[int] = ()
    """Behind ``blocks``."""
    keep: bool = False
    """They have a name."""

    @property
    def end_block(self) -> int:
        """Behind the last one."""
        return self.first_block + len(self.blocks) + len(self.dram_blocks)


@dataclass(frozen=True, slots=True)
class _Open:
    """An open offer."""

    owner: int
    blocks: int
    identities: bytes


@dataclass(slots=True)
class _Layers:
    """An offer's blocks that a plan under way computes, to be announced group by group of layers."""

    offer_id: str
    first_block: int
    end_block: int
    group: int
    next_layer: int = 0


@dataclass(slots=True)
class StoreCounters:
    """Blocks, in total."""

    offered: int = 0
    taken: int = 0
    """Of them: the store has them."""
    failed: int = 0
    """Of them: refused, too late, or taken back."""
    dropped: int = 0
    """Not offered: they had left the cache, or too many waited."""


class StoreOffers:
    """Lends blocks to one store, ``lent_max`` at most at once."""

    __slots__ = ("_exchange", "_geometry", "_layers", "_open", "_told", "counters", "lent", "lent_max")

    def __init__(self, exchange: Exchange, geometry: KVGeometry, lent_max: int) -> None:
        self._exchange = exchange
        self._geometry = geometry
        self.lent_max = lent_max
        #: blocks of all open offers
        self.lent = 0
        self._open: dict[str, _Open] = {}
        self._layers: dict[int, list[_Layers]] = {}  # plan -> what it computes for offers
        self._told: dict[bytes, int] = {}  # identity -> when it was offered; oldest first
        self.counters = StoreCounters()

    @property
    def room(self) -> int:
        """Blocks that may be lent beside those that are."""
        return self.lent_max - self.lent

    def knows(self, identity: bytes) -> bool:
        """Whether this block was offered a short while ago."""
        return identity in self._told

    def offer(self, run: Run, to: Peer, now: int, plan: StepPlan | None = None) -> None:
        """Offer ``run``, in groups of layers where ``plan``, which has just been made, computes much of it."""
        count, keep = run.end_block - run.first_block, KEEP if run.keep else b""
        layers, group = self._geometry.num_layers, ceil_div(GROUP_BYTES, count * self._geometry.page_bytes)
        by_layer = plan is not None and run.written_by == plan.step_id and group < layers
        offer_id = self._exchange.offer(
            to,
            run.isolation,
            run.tokens,
            run.blocks or run.dram_blocks,
            now,
            tier=Tier.HBM if run.blocks else Tier.DRAM,
            first_block=run.first_block,
            dram_blocks=run.dram_blocks if run.blocks else (),
            mode=TransferMode.BY_LAYER if by_layer else TransferMode.BY_REQUEST_AGG,
            private=keep,
            lease_ns=LEASE_NS,
        )
        self._open[offer_id] = _Open(run.owner, count, run.identities)
        self.lent += count
        self.counters.offered += count
        for at in range(count):
            remember(self._told, identity_at(run.identities, at), now)
        if by_layer and plan is not None:
            plan.report_layers = min(plan.report_layers or group, group)
            part = _Layers(offer_id, run.first_block, run.end_block, group)
            self._layers.setdefault(plan.step_id, []).append(part)
        else:
            self._exchange.computed(offer_id, run.first_block, run.end_block, fence=run.written_by)

    # -- while it is computed

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan. The last group waits for the end of the step: no
        offer is complete while its row may still fail."""
        for part in self._layers.get(step_id, ()):
            end = layer + 1
            if end - part.next_layer >= part.group and end < self._geometry.num_layers:
                self._announce(part, end)

    def step_finished(self, step_id: int) -> None:
        """All layers of the plan are written, reported or not."""
        for part in self._layers.pop(step_id, ()):
            self._announce(part, self._geometry.num_layers)

    def _announce(self, part: _Layers, end_layer: int) -> None:
        self._exchange.computed(part.offer_id, part.first_block, part.end_block, part.next_layer, end_layer, fence=0)
        part.next_layer = end_layer

    # -- endings

    def released(self, offer_id: str, used: bool) -> bool:
        """An offer has ended. False: it was none of these."""
        ended = self._open.pop(offer_id, None)
        if ended is None:
            return False
        self.lent -= ended.blocks
        if used:
            self.counters.taken += ended.blocks
        else:
            self._failed(ended)
        return True

    def take_back(self, reason: str, owner: int | None = None, spared: Container[int] = ()) -> bool:
        """End all offers but those of owners that are ``spared``, or those of one owner. False: there were none."""
        ended = [
            offer_id
            for offer_id, known in self._open.items()
            if owner in (None, known.owner) and known.owner not in spared
        ]
        for offer_id in ended:
            known = self._open.pop(offer_id)
            self.lent -= known.blocks
            self._failed(known)
            self._exchange.withdraw(offer_id, reason)
        return bool(ended)

    def _failed(self, ended: _Open) -> None:
        self.counters.failed += ended.blocks
        self.forget(ended.identities)

    def forget(self, identities: bytes) -> None:
        """The store does not have these: they are offered again when they are computed again."""
        for at in range(len(identities) // IDENTITY_BYTES):
            self._told.pop(identity_at(identities, at), None)

    def expire(self, now: int) -> None:
        """Forget what was told long ago."""
        while self._told and now - next(iter(self._told.values())) >= AGAIN_NS:
            del self._told[next(iter(self._told))]

    def kv_lost(self) -> None:
        """A step failed; the exchange ends all offers, and says so."""
        self._layers.clear()

    def store_changed(self) -> None:
        """Another store, or another incarnation of it, was told of nothing."""
        self._told.clear()

    def clear(self) -> None:
        """All offers have ended silently."""
        self._layers.clear()
        self._open.clear()
        self.lent = 0

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when more or less is lent than the offers say, or more than may be."""
        lent = sum(known.blocks for known in self._open.values())
        check(lent == self.lent <= self.lent_max, f"{self.lent} blocks are lent, offers: {lent}, limit {self.lent_max}")
