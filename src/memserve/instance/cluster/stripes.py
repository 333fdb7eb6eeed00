"""Prompts that this instance computes together with others, in stripes, and the KV that goes from one to the other.

::

    admitted      what of the own stripes is cached is offered, and what others have offered gets its place
    each plan     a stripe's first row: offered to all that compute a later one; its blocks by layer
    a layer came  the gates of rows that wait for it are moved
    drawn         the prompt is complete: of the runner it is an ordinary sequence from now on

Of a stripe the last layer is announced when the step has ended and its row has not failed. An instance that has all
layers of all stripes before its own row knows therefore that none of them has: what the runner draws is right, and may
be cached. A stripe that does not come ends the part here; the router tries the request again, in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memserve.base.errors import check
from memserve.base.types import Tier, TransferMode
from memserve.instance.cluster.layer_announcer import LayerAnnouncer
from memserve.instance.events import MoveGate, StepPlan
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.instance.scheduler.stripes import StripedPrompt, StripeProgress
from memserve.kv.transfer.events import LayersArrived, Outcome, StripeLost, StripeOffered
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import RejectRequest
from memserve.protocol.messages import Stripe
from memserve.protocol.peers import Peer


@dataclass(slots=True)
class _Gate:
    """Of a row in a plan that the device has not answered."""

    step_id: int
    start: int
    layers: int = 0


@dataclass(slots=True, eq=False)
class _Part:
    """What this instance has to do with one such prompt."""

    group: Group
    sequence: Sequence
    striped: StripedPrompt
    peers: list[Peer]
    """Of each of its stripes, the instance that computes it."""
    receivers: list[list[Peer]]
    """Of each of its stripes, those that need it: all that compute a later one."""
    is_placed: bool = False
    """Its sequence has blocks."""
    until_ns: int = 0
    """From when on the next stripe of others, if one is awaited, is late: a message is lost, or its instance."""
    is_complete: bool = False
    """The prompt, as far as it is computed here."""
    offers: dict[int, list[str]] = field(default_factory=dict)
    """Own stripe -> its offers, one for each receiver."""
    named_blocks: dict[int, int] = field(default_factory=dict)
    """Own stripe -> behind the last block that was announced."""
    imports: dict[str, int] = field(default_factory=dict)
    """Import -> the stripe that it brings."""
    gates: dict[int, _Gate] = field(default_factory=dict)


class StripedPrompts:
    """All of them, from their dispatch until they are complete, or end."""

    def __init__(self, state: SchedulerState, exchange: Exchange, num_layers: int, patience_ns: int) -> None:
        """``patience_ns``: how long a sequence that has blocks waits for the next stripe."""
        self._state, self._exchange, self._num_layers = state, exchange, num_layers
        self._patience_ns = patience_ns
        self._announcer = LayerAnnouncer(exchange, num_layers)
        #: all and only the live requests whose stripes are not complete, by id
        self.parts: dict[str, _Part] = {}
        #: offers of stripes that have no place yet: attempt -> those
        self._offered: dict[str, list[StripeOffered]] = {}
        self._gates_made = 0
        self._moves: list[MoveGate] = []
        #: prompts computed here as one of several instances, in total
        self.completed = 0

    # -- coming

    def add_part(self, group: Group, self_peer: Peer) -> str:
        """``group``, whose sequence was just made, is computed in stripes. Returns what contradicts that, or ""."""
        stripes = group.span.stripes if group.span is not None else ()
        sequence, progress, first = next(iter(group.sequences.values())), list[StripeProgress](), 0
        for stripe in stripes:
            if first < sequence.prompt_tokens:
                progress.append(StripeProgress(first, first + stripe.tokens, stripe.peer == self_peer))
            first += stripe.tokens
        problem = self._contradiction(group, sequence, progress)
        if problem:
            return problem
        sequence.striped = StripedPrompt(progress, self._num_layers)
        peers = [stripe.peer for stripe in stripes]
        receivers, count = _receivers(stripes, self_peer), len(progress)
        self.parts[group.request.request_id] = _Part(
            group, sequence, sequence.striped, peers[:count], receivers[:count]
        )
        return ""

    def _contradiction(self, group: Group, sequence: Sequence, progress: list[StripeProgress]) -> str:
        memory, block_tokens = self._state.memory, self._state.memory.block_tokens
        # states, windows and layers in DRAM have no place that is known before the row runs
        if memory.needs_more_than_blocks or memory.layers.is_by_layer or group.beam is not None or sequence.out:
            return "it cannot be computed in stripes here"
        fits = progress and progress[-1].is_own and progress[-1].end == sequence.prompt_tokens
        whole = all(stripe.first % block_tokens == 0 and stripe.first < stripe.end for stripe in progress)
        return "" if fits and whole else "stripes that do not make up its prompt"

    def on_offered(self, outcome: StripeOffered) -> None:
        """Another instance computes a stripe; its request may come later than this."""
        self._offered.setdefault(outcome.offer.part_of, []).append(outcome)

    def place_offered(self, now_ns: int) -> list[Outcome]:
        """Sequences may have got blocks: what others offered has its place, and what is cached of own stripes goes."""
        outcomes: list[Outcome] = []
        for part in self.parts.values():
            if not part.sequence.blocks:
                continue
            outcomes += self._place_stripes(part, now_ns)
            if not part.is_placed:
                part.is_placed, part.until_ns = True, now_ns + self._patience_ns
                for place, stripe in enumerate(part.striped.stripes):
                    if stripe.is_own and stripe.first < part.striped.cached_tokens:
                        self._announce_cached(part, place, min(stripe.end, part.striped.cached_tokens), now_ns)
        return outcomes

    def _place_stripes(self, part: _Part, now_ns: int) -> list[Outcome]:
        sequence, block_tokens, outcomes = part.sequence, self._state.memory.block_tokens, list[Outcome]()
        for outcome in self._offered.pop(part.group.request.request_id, ()):
            place = self._stripe_of(part, outcome)
            # of an earlier attempt, or of stripes that were cut otherwise: its place is not ours to guess
            if place is None:
                self._exchange.give_up(outcome.transfer_id, "no stripe of this prompt")
                continue
            stripe = part.striped.stripes[place]
            part.imports[outcome.transfer_id] = place
            first = max(stripe.first, min(stripe.end, part.striped.cached_tokens)) // block_tokens
            blocks = sequence.blocks[first : stripe.end // block_tokens]
            outcomes += self._exchange.place_stripe(outcome.transfer_id, blocks, now_ns)
        return outcomes

    def _stripe_of(self, part: _Part, outcome: StripeOffered) -> int | None:
        offer, block_tokens = outcome.offer, self._state.memory.block_tokens
        bounds = offer.first_block * block_tokens, (offer.first_block + len(offer.blocks)) * block_tokens
        for place, (stripe, peer) in enumerate(zip(part.striped.stripes, part.peers, strict=True)):
            if (stripe.first, stripe.end) == bounds and peer == outcome.sender and not stripe.is_own:
                return place
        return None

    # -- while it is computed

    def on_plan_made(self, plan: StepPlan, now_ns: int) -> None:
        """``plan`` has been made: name what it computes, and say which rows wait for what."""
        for part in self.parts.values():
            sequence, slot = part.sequence, part.sequence.slot
            if sequence.scheduled_step != plan.step_id or slot not in plan.slots:
                continue
            start = plan.starts[plan.slots.index(slot)]
            if start >= sequence.prompt_tokens:
                continue  # it decodes already, behind a row that the device has
            # without a gate a row would read what has not come; with all layers here there is nothing to wait for
            if part.striped.layers_before(start) < self._num_layers:
                self._gates_made += 1
                plan.gates[slot], part.gates[self._gates_made] = self._gates_made, _Gate(plan.step_id, start)
            part.until_ns = now_ns + self._patience_ns
            self._name_computed(part, plan, start, now_ns)
        self._move_gates(self.parts.values())

    def _name_computed(self, part: _Part, plan: StepPlan, start: int, now_ns: int) -> None:
        place, block_tokens = part.striped.stripe_at(start), self._state.memory.block_tokens
        named = self._offer_stripe(part, place, now_ns)
        end_block = part.sequence.computed // block_tokens
        for offer_id in part.offers[place] if end_block > named else ():
            self._announcer.add_blocks(plan, offer_id, (named, end_block))
        part.named_blocks[place] = max(named, end_block)

    def _announce_cached(self, part: _Part, place: int, end: int, now_ns: int) -> None:
        """The own stripe ``place`` is cached up to token ``end``. Its first row may have announced that already."""
        first, end_block = self._offer_stripe(part, place, now_ns), end // self._state.memory.block_tokens
        if end_block <= first:
            return
        fence = self._exchange.fence_of_cached([(Tier.HBM, block) for block in part.sequence.blocks[first:end_block]])
        for offer_id in part.offers[place]:
            self._exchange.announce_computed(offer_id, first, end_block, fence=fence)
        part.named_blocks[place] = end_block

    def _offer_stripe(self, part: _Part, place: int, now_ns: int) -> int:
        """Offer an own stripe, if it is not offered yet. Returns its first block that was not announced."""
        if place not in part.offers:
            stripe, request = part.striped.stripes[place], part.group.request
            first = part.named_blocks[place] = stripe.first // self._state.memory.block_tokens
            blocks = part.sequence.blocks[first : stripe.end // self._state.memory.block_tokens]
            tokens = request.prompt[stripe.first : stripe.end]
            offered = OfferedBlocks(request.isolation, tokens, blocks, first_block=first)
            terms = OfferTerms(TransferMode.BY_LAYER, insert=False, part_of=request.request_id)
            receivers = part.receivers[place]
            part.offers[place] = [self._exchange.offer_blocks(peer, offered, now_ns, terms) for peer in receivers]
        return part.named_blocks[place]

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan."""
        self._announcer.layer_finished(step_id, layer)

    def step_finished(self, step_id: int) -> None:
        """The results of a plan were taken into account: sequences whose rows failed have ended."""
        self._announcer.step_finished(step_id)
        for part in list(self.parts.values()):
            # the device has passed these: moving one now would name a row that is over
            for gate in [gate for gate, waiting in part.gates.items() if waiting.step_id <= step_id]:
                del part.gates[gate]
            # not when the last row was planned: it may still fail, and then every stripe is of no use
            if part.sequence.out and not part.is_complete:
                self._complete_part(part)

    def _complete_part(self, part: _Part) -> None:
        """A token is known that was drawn behind all of the prompt, so every stripe before it was right."""
        group, sequence = part.group, part.sequence
        self.completed, part.is_complete = self.completed + 1, True
        if group.span is not None and group.span.holds:
            return  # others may still read its blocks
        self._end_transfers(part, "the prompt is complete")
        del self.parts[group.request.request_id]
        group.span = sequence.striped = None
        self._state.memory.publish(sequence)

    # -- what comes from others

    def on_layers_arrived(self, outcome: LayersArrived) -> None:
        """Rows may read more."""
        part = self.parts.get(outcome.offer.part_of)
        place = part.imports.get(outcome.transfer_id) if part is not None else None
        if part is None or place is None:
            return
        part.striped.stripes[place].layers, part.until_ns = outcome.layers, self._state.now + self._patience_ns
        if outcome.layers == self._num_layers:
            del part.imports[outcome.transfer_id]
        self._move_gates([part])

    def _move_gates(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            for number, gate in part.gates.items():
                layers = part.striped.layers_before(gate.start)
                if layers > gate.layers:
                    gate.layers = layers
                    self._moves.append(MoveGate(number, layers))

    def on_stripe_lost(self, outcome: StripeLost) -> None:
        """A stripe will not come: the part has failed, unless it is known already that it is of no use."""
        waiting = self._offered.get(outcome.offer.part_of, [])
        self._offered[outcome.offer.part_of] = [w for w in waiting if w.transfer_id != outcome.transfer_id]
        if not self._offered[outcome.offer.part_of]:
            del self._offered[outcome.offer.part_of]
        part = self.parts.get(outcome.offer.part_of)
        if part is not None and part.imports.pop(outcome.transfer_id, None) is not None:
            self.fail_part(part.group, outcome.reason)

    # -- endings

    def fail_part(self, group: Group, reason: str) -> bool:
        """What is computed of ``group`` is of no use, from the next event on (:meth:`take_failed`). False: it is not
        computed in stripes."""
        part = self.parts.get(group.request.request_id)
        if part is None or part.group is not group:
            return False
        part.striped.loss = part.striped.loss or reason
        return True

    def take_failed(self, now_ns: int) -> list[RejectRequest]:
        """End the parts that have failed, or wait in vain: their router is to hear that."""
        for part in self.parts.values():
            if part.is_placed and part.until_ns <= now_ns and self._awaits_stripe(part):
                self.fail_part(part.group, "it has not come in time")
        failed = [part for part in self.parts.values() if part.striped.loss]
        for part in failed:
            self._state.drop_group(part.group)
        return [RejectRequest(p.group.request.request_id, f"a stripe is lost: {p.striped.loss}", 0.0) for p in failed]

    @staticmethod
    def _awaits_stripe(part: _Part) -> bool:
        sequence = part.sequence
        begins_later = sequence.computed < sequence.prompt_tokens
        return begins_later and part.striped.next_row(sequence.computed, sequence.published) is None

    def on_request_ended(self, group: Group) -> None:
        """Nothing more of it is needed, nor given."""
        part = self.parts.get(group.request.request_id)
        if part is not None and part.group is group:
            del self.parts[group.request.request_id]
            self._moves += [MoveGate(gate, None) for gate in part.gates]
            self._end_transfers(part, "the request has ended")

    def _end_transfers(self, part: _Part, reason: str) -> None:
        for offer_id in [offer for offers in part.offers.values() for offer in offers]:
            self._exchange.withdraw_offer(offer_id, reason)
        waiting = [outcome.transfer_id for outcome in self._offered.pop(part.group.request.request_id, ())]
        for transfer_id in (*part.imports, *waiting):
            self._exchange.give_up(transfer_id, reason)

    def kv_lost(self) -> None:
        """A step failed, and with it everything under way."""
        self._announcer.clear()
        for part in self.parts.values():
            self.fail_part(part.group, "a step failed")

    def clear(self) -> None:
        """The instance was expelled: its requests have ended."""
        self._announcer.clear()
        self._offered.clear()

    def take_moves(self) -> list[MoveGate]:
        """What the device is to be told of gates, behind the plans that have them."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`take_failed` has something to do. None: never."""
        ends = [self._state.now for part in self.parts.values() if part.striped.loss]
        ends += [part.until_ns for part in self.parts.values() if part.is_placed and self._awaits_stripe(part)]
        return min(ends, default=None)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself."""
        striped = {
            name: group for name, group in self._state.groups.items() if group.span is not None and group.span.stripes
        }
        check(striped == {name: part.group for name, part in self.parts.items()}, "striped prompts are lost, or twice")
        check(not self._moves, "moves of gates that were not told")
        for part in self.parts.values():
            check(part.sequence.striped is part.striped, "{} has forgotten its stripes", part.sequence)
            arriving = {part.striped.stripes[place].layers for place in part.imports.values()}
            check(self._num_layers not in arriving, "{} awaits what is here", part.sequence)


def _receivers(stripes: tuple[Stripe, ...], self_peer: Peer) -> list[list[Peer]]:
    """Of each stripe, those that compute a later one."""
    later: list[list[Peer]] = []
    peers: list[Peer] = []
    for stripe in reversed(stripes):
        later.append([peer for peer in peers if peer != self_peer])
        if stripe.peer not in peers:
            peers = [stripe.peer, *peers]
    return later[::-1]
