"""What becomes of a ``Dispatch`` (level 2): a group like any other, and the orders that go with it."""

from __future__ import annotations

from memserve.instance.fetching import Fetches
from memserve.instance.frontdesk import FrontDesk
from memserve.instance.handoff import Handoffs
from memserve.instance.orders import Orders
from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase
from memserve.messages import Dispatch, Peer
from memserve.serving import RejectRequest


class Dispatching:
    """Takes requests from the router."""

    __slots__ = ("_desk", "_fetches", "_handoffs", "_roster", "draining")

    def __init__(self, roster: Roster, desk: FrontDesk, handoffs: Handoffs, fetches: Fetches) -> None:
        self._roster = roster
        self._desk = desk
        self._handoffs = handoffs
        self._fetches = fetches
        self.draining = False

    def dispatch(self, order: Dispatch, me: Peer, now: int) -> RejectRequest | None:
        """Run ``order.request``, or its prefill. Returns why not."""
        request = order.request
        if self.draining:
            return RejectRequest(request.request_id, "the instance is about to leave", 0.0)
        refusal = self._desk.refusal(request, now) or self._contradiction(order)
        if refusal is not None:
            return refusal
        orders = self._orders(order, me, now)
        run = request if orders.original is None else Handoffs.substitute(request)
        group = self._desk.open(run, now, orders.deadline_ns)
        group.orders = orders
        resumed = not request.beam_width and bool(any(order.generated) or order.ended)
        self._handoffs.begin(group, len(order.generated[0]) if resumed and request.n == 1 else 0, resumed)
        phase = Phase.EXPECTED if order.holders else Phase.WAITING
        self._desk.line_up(group, phase, order.generated if resumed else (), order.ended)
        if order.holders and group.sequences:
            self._fetches.begin(group, now)
        return None

    def _orders(self, order: Dispatch, me: Peer, now: int) -> Orders:
        """A beam search leaves by a substitute, if it leaves at all."""
        request = order.request
        decode_at = None if order.decode_at is None or order.decode_at.name == me.name else order.decode_at
        if request.beam_width and (request.sampling.prompt_logprobs or self._desk.tokens_to_generate(request) <= 1):
            decode_at = None
        return Orders(
            decode_at,
            order.transfer,
            order.return_kv,
            None if order.deadline_in_ns is None else now + order.deadline_in_ns,
            request if request.beam_width and decode_at is not None else None,
            list(order.holders),
        )

    def _contradiction(self, order: Dispatch) -> RejectRequest | None:
        """Orders that no router of ours gives."""
        n = order.request.n
        fits = not order.generated or len(order.generated) == n
        fits = fits and bool(order.generated or not order.ended) and all(index < n for index in order.ended)
        if fits and not self._desk.unknown_token(order.generated):
            return None
        return RejectRequest(order.request.request_id, "generated tokens do not fit the request")
