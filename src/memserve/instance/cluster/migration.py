"""Requests that go on at another instance while they decode: what is complete of their KV goes ahead.

::

    Migrate       copy what is complete      to the other instance's cache, while the request runs on here
    Release       copy again                 if much has been drawn meanwhile, a few times at most
                  let_migrate                one more token here; then it is handed over like one behind its prompt,
                                             and the other instance finds most of it in its cache

A copy that is refused, for want of room say, ends the migration: the request goes on here, and its router is told. A
request that waits, of which nothing is computed, is refused instead, so that its router places it anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.instance.cluster.handoff_sender import HandoffSender, places_of
from memserve.instance.scheduler.sequence import Group, Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import RejectRequest
from memserve.protocol.messages import RETRY_S, Migrate
from memserve.protocol.peers import Peer

_COPIES_MAX = 4
"""Each copy is of what was drawn during the one before: it ends when little is left, or where the link is too slow."""
_LITTLE_BLOCKS = 2
"""So many blocks may be left for the handoff, in which the request stands still."""


@dataclass(slots=True)
class _Copy:
    """Of one request, under way."""

    group: Group
    to: Peer
    end_block: int
    """Behind the last block that was copied, or is about to be."""
    number: int


class MigrationSender:
    """All requests that were asked to leave and are still here."""

    def __init__(self, state: SchedulerState, exchange: Exchange, sender: HandoffSender) -> None:
        self._state, self._exchange, self._sender = state, exchange, sender
        #: by offer
        self._copies: dict[str, _Copy] = {}
        #: requests that leave as soon as it is known how many of their drafts were right, and where to
        self._drafting: dict[str, tuple[Group, Peer]] = {}

    def start_migration(self, order: Migrate, now_ns: int) -> RejectRequest | None:
        """Let a request leave. Returns the rejection of one that has not begun."""
        group = self._state.groups.get(order.request_id)
        if group is not None and self._is_on_its_way(group):
            return None  # the order was repeated
        reason = self._objection(group)
        if group is None or reason:
            self._sender.stayed.append((order.request_id, reason))
            return None
        sequence = _only_sequence(group)
        if sequence.phase is Phase.WAITING and not sequence.dram_blocks:
            self._state.drop_group(group)
            return RejectRequest(order.request_id, "another instance is to run it", RETRY_S)
        if not order.copies_ahead or not group.request.use_cache or not self._copy_ahead(group, order.to, 0, 1, now_ns):
            self._let_go(group, order.to)
        return None

    def _objection(self, group: Group | None) -> str:
        """Why a request stays. Empty: it can leave."""
        if group is None or group.remote is None:
            return "it is not here"
        if group.request.n > 1 or group.beam is not None or group.muted or group.span is not None:
            return "it is more than one line of tokens, or less"
        sequence = _only_sequence(group)
        if sequence.draws_left <= 1:
            return "it is about to end"
        by_layer, pool = sequence.layered, self._state.memory.pool
        if by_layer is not None and by_layer.streams and not pool.config.shares_dram:
            return "it has no room whole, and others cannot read what lies below HBM"
        if sequence.inexact is not None:
            return "its KV is inexact, and would be taken for exact"
        if self._state.memory.states.has_states and group.request.sampling.grammar:
            return "its state may be behind a row that is computed again"
        return ""

    def _is_on_its_way(self, group: Group) -> bool:
        """Whether it leaves, or has not arrived yet."""
        return group.is_leaving or (group.remote is not None and group.remote.import_id is not None)

    # -- copies

    def _copy_ahead(self, group: Group, to: Peer, first_block: int, number: int, now_ns: int) -> bool:
        """Copy what is complete from ``first_block`` on. False: that is too little to be worth it."""
        sequence, block_tokens = _only_sequence(group), self._state.memory.block_tokens
        end_block = min(sequence.computed, sequence.known_length) // block_tokens
        places = places_of(sequence)[first_block:end_block]
        comes_up = sequence.slot is None or self._state.memory.layers.arrives(sequence)
        if len(places) <= _LITTLE_BLOCKS or comes_up:
            return False
        end_block = first_block + len(places)
        offered = OfferedBlocks(
            group.isolation,
            sequence.known_tokens()[: end_block * block_tokens],
            [block for tier, block in places if tier is Tier.HBM],
            first_block=first_block,
            dram_blocks=[block for tier, block in places if tier is Tier.DRAM],
        )
        offer_id = self._exchange.offer_blocks(to, offered, now_ns, OfferTerms())
        # rows of its own may be under way, and copies: those that it was brought up with, any where some lies by layer
        fence = max(sequence.scheduled_step, self._exchange.fence_of_cached(places))
        fence = fence if sequence.layered is None else self._exchange.fence
        self._exchange.announce_computed(offer_id, first_block, end_block, fence=fence)
        self._copies[offer_id] = _Copy(group, to, end_block, number)
        _mark(group, migrates=True)
        return True

    def on_released(self, offer_id: str, used: bool, reason: str) -> bool:
        """An offer has ended. False: it was not a copy."""
        copy = self._copies.pop(offer_id, None)
        if copy is None:
            return False
        group = copy.group
        if not used:
            self._keep(group, reason)
        elif copy.number >= _COPIES_MAX or not self._copy_ahead(
            group, copy.to, copy.end_block, copy.number + 1, self._state.now
        ):
            self._let_go(group, copy.to)
        return True

    def _let_go(self, group: Group, to: Peer) -> None:
        sequence = _only_sequence(group)
        if _may_have_drafts(sequence):
            self._drafting[group.request.request_id] = group, to
            _mark(group, migrates=True)
        elif sequence.draws_left > 1:
            self._sender.let_migrate(group, to)
        else:
            self._keep(group, "it is about to end")

    def let_drafting_go(self) -> None:
        """A step may have ended: what it has drawn is known, and the next plan is not made."""
        for name, (group, to) in list(self._drafting.items()):
            if not _may_have_drafts(_only_sequence(group)):
                del self._drafting[name]
                self._let_go(group, to)

    def _keep(self, group: Group, why: str) -> None:
        _mark(group, migrates=False)
        self._sender.stayed.append((group.request.request_id, why))

    # -- endings

    def end_copies(self, group: Group, why: str) -> None:
        """Nothing of the request need be copied any more: it has ended, or goes on here."""
        if self._drafting.pop(group.request.request_id, None) is not None:
            _mark(group, migrates=False)
        for offer_id in [offer_id for offer_id, copy in self._copies.items() if copy.group is group]:
            del self._copies[offer_id]
            self._exchange.withdraw_offer(offer_id, why)
            _mark(group, migrates=False)

    def clear(self) -> None:
        """The instance was expelled: no router waits for word."""
        self._copies.clear()
        self._drafting.clear()
        self._sender.stayed.clear()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless copies are those of requests that run here, one each."""
        names = [*self._drafting, *(copy.group.request.request_id for copy in self._copies.values())]
        check(len(set(names)) == len(names), "a request is copied twice: {}", names)
        groups = [*(group for group, _ in self._drafting.values()), *(copy.group for copy in self._copies.values())]
        for group in groups:
            check(self._state.groups.get(group.request.request_id) is group, "{} is copied, and not here", group)
            check(group.tokens_here is None, "{} is copied, and leaves", group)


def _mark(group: Group, *, migrates: bool) -> None:
    if group.remote is not None:
        group.remote.migrates = migrates


def _may_have_drafts(sequence: Sequence) -> bool:
    """Whether a row under way may draw more tokens than one."""
    return sequence.awaits_tokens or sequence.phase is Phase.PREEMPTED


def _only_sequence(group: Group) -> Sequence:
    return next(iter(group.sequences.values()))
