"""Handing requests over to another instance after the prefill (level 2): the prefill side.

::

    admitted     offer(blocks)                    as soon as its first row is in a plan
    each plan    computed(blocks of the row)      named now, sealed when the plan (or the layer of it) has finished
    last token   hand_off(tokens drawn)           the sequences leave; the offer holds their blocks until ``Release``

An offer that comes to nothing before that is no misfortune: the request goes on here. When a request was preempted, or
a step failed, the offer is withdrawn and made anew when it is admitted again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from memserve.instance.actions import StepPlan
from memserve.instance.frontdesk import FrontDesk
from memserve.instance.orders import Orders
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group, Phase, Sequence
from memserve.kv_transfer.exchange import Exchange
from memserve.types import Request, TransferMode
from memserve.units import ceil_div


@dataclass(slots=True)
class _Layers:
    """Blocks that a plan under way computes, to be named layer by layer."""

    offer_id: str
    first_block: int
    end_block: int
    next_layer: int = 0


class Handoffs:
    """All requests that leave after their first token, and the offers of those that have left."""

    __slots__ = ("_desk", "_exchange", "_layers", "_num_layers", "_roster", "handed_over", "leaving", "left")

    def __init__(self, roster: Roster, desk: FrontDesk, exchange: Exchange, num_layers: int) -> None:
        self._roster = roster
        self._desk = desk
        self._exchange = exchange
        self._num_layers = num_layers
        #: all and only the live requests with ``tokens_here``, by id
        self.leaving: dict[str, Group] = {}
        #: open offers of requests that have left: offer id -> request id
        self.left: dict[str, str] = {}
        #: plan -> what it computes for offers by layer
        self._layers: dict[int, list[_Layers]] = {}
        self.handed_over = 0

    # -- coming

    @staticmethod
    def substitute(request: Request) -> Request:
        """What runs here for a beam search that leaves: the prompt, and a draw that nobody sees."""
        stop = replace(request.stop, max_tokens=2, min_tokens=0, stop_token_ids=())
        return structs.replace(request, beam_width=0, stop=stop, sampling=replace(request.sampling, logprobs=None))

    def begin(self, group: Group, known_tokens: int, resumed: bool) -> None:
        """Let ``group`` leave after its next token, if there is one after that and its sequences still share a prompt.

        ``known_tokens``: those generated before. Sequences of a resumed request with ``n > 1`` have parted: they stay.
        """
        orders = group.orders
        if orders is None or orders.decode_at is None:
            return
        if group.max_tokens - known_tokens <= 1 or (resumed and group.request.n > 1):
            self._stay(group, orders, "nothing to gain")
            return
        if orders.original is not None:
            group.muted, group.forks_pending = True, 0
        group.tokens_here = known_tokens + 1
        self.leaving[group.request.request_id] = group
        group.facts += [("decode_at", orders.decode_at.name), ("handoff_mode", orders.mode.value)]

    # -- while it is computed

    def planned(self, plan: StepPlan, now: int) -> None:
        """``plan`` has been made: offer what it admitted, name what it computes."""
        for sequence in (*self._roster.working.items, *self._roster.idle.items):
            group, orders = sequence.group, sequence.group.orders
            if group.tokens_here is None or orders is None or sequence.scheduled_step != plan.step_id:
                continue
            if sequence is next(iter(group.sequences.values())):  # it computes the prompt for all
                start = plan.starts[plan.slots.index(sequence.slot)]  # type: ignore[arg-type]  # who is in a plan has a slot
                if orders.offer_id is None:
                    self._offer(group, orders, sequence, start, now)
                self._name(orders, sequence, plan)

    def _offer(self, group: Group, orders: Orders, sequence: Sequence, start: int, now: int) -> None:
        request = orders.original or group.request
        orders.offer_id = self._exchange.offer(
            orders.decode_at,  # type: ignore[arg-type]  # who leaves knows where to
            request.isolation,
            sequence.known_tokens(),
            sequence.blocks,
            now,
            mode=orders.mode,
            insert=request.use_cache,
            request=request,
            deadline_in_ns=None if orders.deadline_ns is None else max(1, orders.deadline_ns - now),
            return_kv=orders.return_kv,
        )
        orders.offered_blocks = len(sequence.blocks)
        orders.named_blocks = start // self._roster.memory.block_tokens
        if orders.named_blocks:  # from the cache: computed, or copied, by plans made so far
            fence = self._exchange.fence_of_cached(sequence.blocks[: orders.named_blocks])
            self._exchange.computed(orders.offer_id, 0, orders.named_blocks, fence=fence)

    def _name(self, orders: Orders, sequence: Sequence, plan: StepPlan) -> None:
        """Whole blocks up to the row's end; the last one as well when the prompt ends."""
        offer_id, block_tokens = orders.offer_id or "", self._roster.memory.block_tokens
        if len(sequence.blocks) > orders.offered_blocks:
            self._exchange.more_blocks(offer_id, sequence.blocks[orders.offered_blocks :])
            orders.offered_blocks = len(sequence.blocks)
        end = sequence.computed
        end_block = ceil_div(end, block_tokens) if end == sequence.known else end // block_tokens
        if end_block <= orders.named_blocks:
            return
        if orders.mode is TransferMode.BY_LAYER:
            plan.report_layers = True
            self._layers.setdefault(plan.step_id, []).append(_Layers(offer_id, orders.named_blocks, end_block))
        else:
            self._exchange.computed(offer_id, orders.named_blocks, end_block, fence=plan.step_id)
        orders.named_blocks = end_block

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of the plan."""
        for part in self._layers.get(step_id, ()):
            if part.next_layer <= layer:
                self._name_layers(part, layer + 1)

    def step_finished(self, step_id: int) -> None:
        """All layers are there, also those that nobody told of; hand over the requests whose tokens are known."""
        for part in self._layers.pop(step_id, ()):
            if part.next_layer < self._num_layers:
                self._name_layers(part, self._num_layers)
        drawn = {id(s.group): s.group for s in self._roster.idle.items if s.group.tokens_here is not None}
        for group in drawn.values():
            if not group.forks_pending and all(self._is_done(sequence) for sequence in group.sequences.values()):
                self._hand_over(group)

    def _name_layers(self, part: _Layers, end_layer: int) -> None:
        self._exchange.computed(part.offer_id, part.first_block, part.end_block, part.next_layer, end_layer, fence=0)
        part.next_layer = end_layer

    # -- leaving

    @staticmethod
    def _is_done(sequence: Sequence) -> bool:
        return sequence.phase is Phase.IDLE and not sequence.inflight

    def _hand_over(self, group: Group) -> None:
        """Every sequence has its first token here, or has ended with it."""
        orders, request, live = group.orders, group.request, group.sequences
        if orders is None or orders.offer_id is None:
            return
        offer_id, orders.offer_id = orders.offer_id, None
        if group.muted:
            self._exchange.hand_off(offer_id, (), ())
        else:
            tokens = tuple(tuple(live[index].out) if index in live else () for index in range(request.n))
            self._exchange.hand_off(offer_id, tokens, tuple(i for i in range(request.n) if i not in live))
        self.left[offer_id] = request.request_id
        self.handed_over += 1
        self._roster.drop_group(group)

    def interrupted(self, group: Group, now: int) -> None:
        """It was preempted, or its KV was lost: it is offered anew when it is admitted again, if still in one piece."""
        orders = group.orders
        if orders is None or self.leaving.get(group.request.request_id) is not group:
            return
        if orders.offer_id is not None:
            self._exchange.withdraw(orders.offer_id, "preempted")
            orders.offer_id = None
        sequences = list(group.sequences.values())
        drawn = len(sequences[0].out) + sequences[0].inflight
        parted = len(sequences) > 1 or (group.request.n > 1 and not group.forks_pending and not group.muted)
        if parted or (group.muted and drawn) or group.max_tokens - drawn <= 1:
            self.go_on_here(group, "preempted", now)
        else:
            group.tokens_here = drawn + 1

    def go_on_here(self, group: Group, why: str, now: int) -> None:
        """Nobody takes it over: it is decoded where it is."""
        orders = group.orders
        if orders is None:
            return
        self._stay(group, orders, why)
        if group.muted:
            self._restart(group, orders, now)
            return
        for sequence in group.sequences.values():
            sequence.left = sequence.draws_left
            if sequence.phase is Phase.IDLE and sequence.left:
                self._roster.move(sequence, Phase.DECODING)

    def _stay(self, group: Group, orders: Orders, why: str) -> None:
        orders.decode_at, group.tokens_here = None, None
        self.leaving.pop(group.request.request_id, None)
        group.facts.append(("handoff_not_made", why))

    def _restart(self, group: Group, orders: Orders, now: int) -> None:
        """A beam search that stays begins as itself; its prompt is in the cache."""
        if orders.original is None:
            return
        original, orders.original = orders.original, None
        group.orders = None
        self._roster.drop_group(group)
        again = self._desk.open(original, now, orders.deadline_ns)
        again.orders, again.facts, again.arrived_ns = orders, group.facts, group.arrived_ns
        self._desk.line_up(again, Phase.WAITING)

    # -- endings

    def ended(self, group: Group) -> None:
        """The request ended here, by its first token, by its client, or in time: nobody need take it over."""
        name, orders = group.request.request_id, group.orders
        if self.leaving.get(name) is group:
            del self.leaving[name]
        if orders is not None and orders.offer_id is not None:
            self._exchange.withdraw(orders.offer_id, "the request has ended")
            orders.offer_id = None

    def cancel(self, request_id: str) -> None:
        """The request has left, and nobody waits for it any more."""
        for offer_id in [offer for offer, name in self.left.items() if name == request_id]:
            del self.left[offer_id]
            self._exchange.withdraw(offer_id, "cancelled")

    def released(self, offer_id: str, used: bool, reason: str, now: int) -> str | None:
        """The offer has ended. Returns the id of a request that has left and that nobody has taken over."""
        name = self.left.pop(offer_id, None)
        if name is not None:
            return None if used else name
        for group in list(self.leaving.values()):
            if group.orders is not None and group.orders.offer_id == offer_id:
                group.orders.offer_id = None
                self.go_on_here(group, reason, now)
        return None

    def kv_lost(self) -> None:
        """A step failed, and with it every offer: those that are still here are offered anew."""
        self._layers.clear()
        for group in self.leaving.values():
            if group.orders is not None:
                group.orders.offer_id = None
            self._roster.interrupted.append(group)

    def clear(self) -> None:
        """The instance was expelled: everything has ended."""
        self.leaving.clear()
        self.left.clear()
        self._layers.clear()
