"""Taking over requests whose prompt was computed elsewhere, and sending home what they generate (level 2): the decode
side.

A request is known here from its ``Offer`` on, as a group whose sequence is EXPECTED: it can be cancelled and runs out
of time like any other. Its blocks come by the exchange; then its sequences are LANDED and wait for a slot.
"""

from __future__ import annotations

import numpy as np

from memserve.instance.frontdesk import FrontDesk
from memserve.instance.orders import Orders
from memserve.instance.roster import Roster
from memserve.instance.sequence import Fact, Group, Phase, Sequence
from memserve.kv_transfer.exchange import Exchange
from memserve.kv_transfer.outcomes import HandoffArrived, HandoffFailed, HandoffOffered
from memserve.serving import RejectRequest
from memserve.types import FinishReason, TokenArray


class Takeovers:
    """All requests that are on their way here."""

    __slots__ = ("_desk", "_exchange", "_roster", "coming", "failed", "taken_over")

    def __init__(self, roster: Roster, desk: FrontDesk, exchange: Exchange) -> None:
        self._roster = roster
        self._desk = desk
        self._exchange = exchange
        #: import id -> the request that it brings
        self.coming: dict[str, Group] = {}
        self.taken_over = 0
        self.failed = 0

    def offered(self, outcome: HandoffOffered, now: int) -> RejectRequest | None:
        """Another instance prefills a request for this one. Returns why it is not taken."""
        offer, request = outcome.offer, outcome.offer.request
        if request is None:
            return None
        known = self._roster.groups.get(request.request_id)
        if known is not None and known.orders is not None and known.orders.import_id is not None:
            self._replace(known, known.orders, outcome)  # the sender was interrupted, and begins anew
            return None
        refusal = self._desk.refusal(request, now)
        if refusal is not None:
            self._exchange.give_up(outcome.transfer_id, refusal.reason)
            return refusal
        deadline_ns = None if offer.deadline_in_ns is None else now + offer.deadline_in_ns
        group = self._desk.open(request, now, deadline_ns)
        group.prompt_logprobs = None  # reported where they were computed
        group.orders = Orders(import_id=outcome.transfer_id, deadline_ns=deadline_ns)
        self._desk.line_up(group, Phase.EXPECTED)
        self.coming[outcome.transfer_id] = group
        return None

    def _replace(self, group: Group, orders: Orders, outcome: HandoffOffered) -> None:
        old = orders.import_id or ""
        self._exchange.give_up(old, "offered anew")
        del self.coming[old]
        orders.import_id = outcome.transfer_id
        self.coming[outcome.transfer_id] = group

    # -- it is here

    def arrived(self, outcome: HandoffArrived, now: int, facts: list[Fact]) -> Group | None:
        """The KV has come: its sequences wait for slots. ``None`` = nothing of it can be used (nothing is held)."""
        group = self.coming.pop(outcome.transfer_id)
        orders = group.orders
        unknown = self._desk.unknown_token(outcome.first_tokens)
        if orders is None or unknown or not _agrees(group, outcome):
            self._release(outcome)
            self.failed += 1
            self._roster.drop_group(group)
            return None
        orders.import_id = None
        group.admitted_ns = now  # its prompt is counted where it was computed, whatever becomes of the KV here
        group.facts += facts
        if outcome.offer.return_kv and group.request.n == 1 and group.beam is None:
            orders.home, orders.home_tokens = outcome.sender, len(outcome.offer.tokens)
        self.taken_over += 1
        if group.beam is not None:
            first = next(iter(group.sequences.values()))
            self._roster.memory.land(first, outcome.blocks, outcome.lease, len(outcome.offer.tokens) - 1)
            self._roster.move(first, Phase.LANDED)
        else:
            self._land_all(group, orders, outcome)
        return group

    def _land_all(self, group: Group, orders: Orders, outcome: HandoffArrived) -> None:
        """Each sequence with its own tokens, all sharing the prompt's blocks."""
        first = next(iter(group.sequences.values()))
        group.forks_pending = 0
        self._roster.memory.land(first, outcome.blocks, outcome.lease, len(outcome.offer.tokens))
        self._roster.move(first, Phase.LANDED)
        first.out = list(outcome.first_tokens[first.index])
        for index in range(1, group.request.n):
            child = group.new_sequence()
            child.out = list(outcome.first_tokens[index])
            self._roster.memory.fork(first, child)
            self._roster.enter(child, Phase.LANDED)
        for sequence in list(group.sequences.values()):
            self._end_early(sequence, orders, outcome.ended)

    def _end_early(self, sequence: Sequence, orders: Orders, ended: tuple[int, ...]) -> None:
        if sequence.index in ended:
            self._roster.leave(sequence)
            return
        reason = FinishReason.STOP if sequence.index in orders.stopped else sequence.known_ending
        if reason is not None:
            self._roster.outputs.append(sequence.ending(reason))
            self._roster.finish(sequence, reason)

    def _release(self, outcome: HandoffArrived) -> None:
        if outcome.lease is not None:
            self._roster.memory.pool.unpin(outcome.lease)
        self._roster.memory.pool.release(outcome.blocks)

    # -- it will not come

    def failed_to_come(self, outcome: HandoffFailed) -> RejectRequest | None:
        """The router shall try elsewhere, from the tokens that the client has."""
        group = self.coming.pop(outcome.transfer_id, None)
        if group is None:
            return None
        self.failed += 1
        self._roster.drop_group(group)
        return RejectRequest(group.request.request_id, f"handoff failed: {outcome.reason}", 0.0)

    def withdrawn(self, import_id: str) -> None:
        """Who offered it goes on with it, or it has ended there: there is nothing to say about it here."""
        group = self.coming.get(import_id)
        if group is not None:
            self._roster.drop_group(group)

    def ended(self, group: Group) -> None:
        """The request was called off, or ran out of time, before it came."""
        orders = group.orders
        if orders is not None and orders.import_id is not None:
            self._exchange.give_up(orders.import_id, "the request has ended")
            self.coming.pop(orders.import_id, None)
            orders.import_id = None

    def clear(self) -> None:
        """The instance was expelled: everything has ended."""
        self.coming.clear()

    # -- going home

    def send_home(self, now: int) -> int:
        """Offer generated KV to those who computed the prompts. Returns the blocks offered."""
        homeward, self._roster.homeward = self._roster.homeward, []
        for part in homeward:
            offer_id = self._exchange.offer(
                part.home, part.tenant, part.tokens, part.blocks, now, first_block=part.first_block
            )
            self._exchange.computed(offer_id, part.first_block, part.first_block + len(part.blocks))
            self._roster.memory.pool.release(part.blocks)
        return sum(len(part.blocks) for part in homeward)


def _agrees(group: Group, outcome: HandoffArrived) -> bool:
    """Whether the tokens of the KV are the request's prompt and what each live sequence generated but for the last."""
    request, tokens, firsts = group.request, outcome.offer.tokens, outcome.first_tokens
    if group.beam is not None:
        return not firsts and np.array_equal(tokens, request.prompt)
    if len(firsts) != request.n:
        return False
    live = [firsts[index] for index in range(request.n) if index not in outcome.ended]
    return bool(live) and all(generated and _continues(tokens, request.prompt, generated) for generated in live)


def _continues(tokens: TokenArray, prompt: TokenArray, generated: tuple[int, ...]) -> bool:
    known = np.concatenate((prompt, np.asarray(generated[:-1], dtype=np.int32)))
    return np.array_equal(tokens, known)
