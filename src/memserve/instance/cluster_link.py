"""The instance as a member of a cluster: messages of the router and of other instances in, messages out.

What the machine does at each event, and where the link comes in::

    event     -> hear, pages_done, layer_finished, step_ended, kv_lost      what has happened
    settle    -> imports that arrived, generated KV, leases                 before plans are made
    planned   -> offers and their pages                                     after each plan
    conclude  -> messages, page jobs, KV events                             behind tokens and plans
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memserve.config import InstanceConfig
from memserve.instance.events import Action, StepPlan
from memserve.instance.fetching import Fetches
from memserve.instance.handoff_receiver import HandoffReceiver
from memserve.instance.handoff_sender import HandoffSender
from memserve.instance.intake import RequestIntake
from memserve.instance.kept import KeptAnswers
from memserve.instance.kv_feed import KvFeed
from memserve.instance.pins import Pins
from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.segments import HeldSegments
from memserve.instance.sequence import Cause, Fact, Group, RemoteState, Sequence
from memserve.instance.store_writer import StoreWriter
from memserve.kv_transfer.context import Room
from memserve.kv_transfer.events import (
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    Inserted,
    Outcome,
    PagesPulled,
    PagesSealed,
    PullPages,
    Released,
)
from memserve.kv_transfer.exchange import Exchange
from memserve.messages import (
    ROUTER,
    AnyMessage,
    AskAttempts,
    AskEvents,
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Drain,
    Expelled,
    HandedOver,
    JoinAccepted,
    Peer,
    PeerGone,
    PeerJoined,
    Pin,
    Pinned,
    StopSequence,
    Unpin,
    Withdraw,
)
from memserve.policy.capacity import headroom_blocks
from memserve.serving import MessageArrived, RejectRequest, Send
from memserve.types import KVGeometry


class ClusterLink:
    """Follows the router, deals with other instances, and reports what the cache holds; the ``Transfers`` of
    ``SchedulerState``."""

    def __init__(
        self,
        state: SchedulerState,
        intake: RequestIntake,
        pins: Pins,
        config: InstanceConfig,
        geometry: KVGeometry,
        me: Peer,
    ) -> None:
        pool = state.memory.pool
        self.me = me
        #: None: no router has spoken yet
        self.router: Peer | None = None
        self.exchange = Exchange(pool, geometry, config.exchange, me, config.namespace)
        self.kept = KeptAnswers(config.exchange.kept_answer_ns, config.exchange.kept_answer_bytes)
        self.sender = HandoffSender(state, intake, self.exchange, self.kept, geometry.num_layers)
        self.receiver = HandoffReceiver(state, intake, self.exchange)
        self.writer = StoreWriter(state, self.exchange, geometry)
        self.fetches = Fetches(state, self.exchange, geometry, config.exchange.fetch_deadline_ns)
        self.segments = HeldSegments(state)
        self.feed = KvFeed(pool, max(1, config.exchange.event_capacity))
        #: messages that only the router may send, from another process or an earlier router
        self.messages_ignored = 0
        self.blocks_come_home = 0
        #: totals of this incarnation, which the router compares with its own (``LossDetector``)
        self.dispatches_heard = self.answers_told = 0
        self._state = state
        self._intake = intake
        self._pins = pins
        self._geometry = geometry
        self._publishes = config.exchange.event_capacity > 0
        self._pulls: dict[int, str] = {}  # pull job -> name of the peer
        self._links: dict[str, str] = {}  # name of a peer -> link of the last pull from it
        self._outbox: list[Action] = []
        self._router_messages: dict[type, Callable[[Any, int], None]] = {
            JoinAccepted: self._join_accepted, PeerJoined: self._peer_joined, PeerGone: self._peer_gone,
            Expelled: self._expelled, Drain: self._drain, Dispatch: self._dispatch, Cancel: self._cancel,
            StopSequence: self._stop, Pin: self._pin, Unpin: self._unpin, AskEvents: self._ask_events,
            AskAttempts: self._ask_attempts,
        }  # fmt: skip
        state.transfers = self

    # -- what has happened

    def hear(self, sender: Peer, message: AnyMessage, now: int) -> None:
        """Another process sent ``message``."""
        follow = self._router_messages.get(type(message))
        if follow is None:
            if isinstance(message, Withdraw):
                self.receiver.withdrawn(message.transfer_id)
            self._act(self.exchange.handle(MessageArrived(sender, message), now), now)
        elif self._comes_from_router(sender, message):
            follow(message, now)
        else:
            self.messages_ignored += 1

    def _comes_from_router(self, sender: Peer, message: AnyMessage) -> bool:
        """The first router that speaks is followed, and then each newer one that accepts the instance."""
        if sender.name != ROUTER:
            return False
        if self.router is None:
            self.router = sender
        elif sender.generation > self.router.generation and isinstance(message, JoinAccepted):
            self.reborn(self.me, goes_on=True)  # requests of the earlier router are void, but for kept ones
            self.router = sender
        return sender == self.router

    def pages_done(self, event: PagesSealed | PagesPulled, now: int) -> None:
        """The host has sealed or pulled pages."""
        if isinstance(event, PagesPulled):
            name = self._pulls.pop(event.job_id, None)
            if name is not None and event.link:
                self._links[name] = event.link
                self.fetches.far[name] = event.link == "nixl"
        self._act(self.exchange.handle(event, now), now)

    def step_ended(self, step_id: int, now: int) -> None:
        """A plan was executed, and its tokens were taken into account; or it failed."""
        self.sender.step_finished(step_id)
        self.writer.offers.step_finished(step_id)
        self._act(self.exchange.plan_finished(step_id, now), now)

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of a plan."""
        self.sender.layer_finished(step_id, layer)
        self.writer.offers.layer_finished(step_id, layer)

    def kv_lost(self, now: int) -> list[Outcome]:
        """A step failed: to be called before the cache is cleared. The outcomes are for :meth:`start_over`, which comes
        behind that: a request that asked for its prefix before would still find it."""
        self.sender.kv_lost()
        self.writer.kv_lost()
        return self.exchange.everything_failed(now)

    def start_over(self, lost: list[Outcome], now: int) -> None:
        """After a failed step, when sequences were reset and the cache cleared. ``lost``: from :meth:`kv_lost`."""
        self._act(lost, now)
        self.sender.start_over()
        self.segments.start_over()

    # -- how requests are scheduled (``Transfers``)

    def request_ended(self, group: Group) -> None:
        """``group`` has ended, or continues on another instance: so do its transfers."""
        self.kept.ended(group.request.request_id, self._state.now)
        self.sender.ended(group)
        self.receiver.ended(group)
        self.fetches.given_up(group)
        self.segments.ended(group)

    def request_preempted(self, group: Group) -> None:
        """The KV of ``group``, which is being handed over, has gone."""
        self.sender.interrupted(group)

    def sequence_completed(self, sequence: Sequence) -> None:
        """Another instance wants the KV that ``sequence`` has generated."""
        self.receiver.keep_generated(sequence)

    def make_room(self) -> bool:
        """Blocks that are lent to a store."""
        return self.writer.make_room()

    # -- between event and plans, and after

    def settle(self, now: int) -> None:
        """Decide about fetches, offer generated KV, let imports go on, and end what has outlived its lease."""
        self.fetches.settle(now)
        self.receiver.send_back(now)
        self.kept.expire(now)
        self.segments.settle(now)
        state, layers = self._state, self._state.memory.layers
        parked = len(state.parked) if layers is not None and layers.policy.parks else None
        self.exchange.room = Room(headroom_blocks(len(state.decoding)), parked)
        self._act(self.exchange.advance(now), now)

    def planned(self, plan: StepPlan, now: int) -> None:
        """``plan`` has been made, with all copies recorded so far."""
        self.exchange.plan_made(plan.step_id)
        if self.sender.leaving:
            self.sender.planned(plan, now)
        self.writer.planned(plan, now)

    def conclude(self, actions: list[Action], now: int) -> None:
        """Append messages and page jobs, behind plans and tokens, which are more urgent. What is kept of answers goes
        before further tokens of them."""
        if self.kept.is_asked and self.router is not None:
            actions[:0] = [Send(self.router, held) for held in self.kept.take_held()]
        news = self.feed.news() if self._publishes else None
        if news is not None and self.router is not None:
            self._outbox.append(Send(self.router, news))
        for handle in self._pins.lost:
            self._send_router(Pinned(handle, 0))
        self._pins.lost.clear()
        self.writer.settle(now)
        self._outbox += self.writer.take_messages()
        actions += self.segments.take_news(self.router)
        for action in self.exchange.take_actions():
            if isinstance(action, PullPages):
                self._pulls[action.job_id] = action.peer.name
            self._outbox.append(action)
        actions += self._outbox
        self._outbox.clear()

    # -- what the exchange says

    def _act(self, outcomes: Iterable[Outcome], now: int) -> None:
        for outcome in outcomes:
            match outcome:
                case HandoffOffered():
                    self._reject(self.receiver.offered(outcome, now))
                case HandoffArrived():
                    self._arrived(outcome, now)
                case HandoffFailed():
                    self._reject(self.receiver.failed_to_come(outcome))
                case FetchEnded():
                    self.fetches.ended(outcome, now)
                case Released(offer_id, _, used, reason):
                    is_stores = self.writer.released(offer_id, used)
                    left = None if is_stores else self.sender.released(offer_id, used, reason)
                    if left is not None:
                        self._reject(RejectRequest(left, f"no instance took it over: {reason}", 0.0))
                case Inserted():
                    self.blocks_come_home += outcome.pulled_blocks

    def _arrived(self, outcome: HandoffArrived, now: int) -> None:
        facts: list[Fact] = [
            ("prefilled_at", outcome.sender.name),
            ("handoff_blocks_received", outcome.pulled_blocks),
            ("handoff_blocks_reused", outcome.reused_blocks),
            ("handoff_bytes", outcome.pulled_blocks * self._geometry.block_bytes),
            ("handoff_link", self._links.get(outcome.sender.name, "") if outcome.pulled_blocks else "none"),
        ]
        request_id = outcome.offer.request.request_id if outcome.offer.request is not None else ""
        if outcome.offer.request is not None:
            self.kept.open(outcome.offer.request, outcome.told, outcome.first_tokens)
        if self.receiver.arrived(outcome, now, facts):
            self._send_router(HandedOver(request_id))
        else:
            self.kept.forget(request_id)
            self._reject(RejectRequest(request_id, "the handoff contradicts its request", 0.0))

    def _reject(self, action: RejectRequest | None) -> None:
        if action is not None:
            self.answers_told += 1
            self._outbox.append(action)

    def _send_router(self, message: AnyMessage) -> None:
        if self.router is not None:
            self._outbox.append(Send(self.router, message))

    # -- what the router says

    def _join_accepted(self, message: JoinAccepted, now: int) -> None:
        self._act(self.exchange.set_members(message.peers, now), now)
        self.writer.set_members(message.peers)
        self.fetches.stores_changed(self.writer.stores)
        self.kept.ask(self.router)
        if self.feed.next_event:
            self._tell_changes(None)

    def _peer_joined(self, message: PeerJoined, now: int) -> None:
        if message.info.peer.name != self.me.name:
            self._act(self.exchange.peer_joined(message.info, now), now)
            self.writer.joined(message.info)
            self.fetches.stores_changed(self.writer.stores)

    def _peer_gone(self, message: PeerGone, now: int) -> None:
        self._act(self.exchange.peer_gone(message.peer, now), now)
        self.writer.gone(message.peer)
        self.fetches.stores_changed(self.writer.stores)

    def _drain(self, message: Drain, now: int) -> None:
        self._intake.draining = True

    def _expelled(self, message: Expelled, now: int) -> None:
        self.reborn(self.me)

    def _dispatch(self, order: Dispatch, now: int) -> None:
        self.dispatches_heard += 1
        if self._intake.has(order):
            return  # to refuse the repeated one would end the one that runs
        group = self._intake.open_dispatch(order, self.me, now)
        if isinstance(group, RejectRequest):
            self._reject(group)
            return
        request = order.request
        resumed = not request.beam_width and bool(any(order.generated) or order.ended)
        if order.span is None:  # an attempt of several instances ends with its router
            self.kept.open(request, order.told, order.generated)
        elif order.span.holds:
            self.segments.begin(group)
        self.sender.begin(group, len(order.generated[0]) if resumed and request.n == 1 else 0, resumed)
        cause = Cause.REMOTE_KV_EXPECTED if order.holders else Cause.ENQUEUED
        self._intake.enqueue(group, cause, order.generated if resumed else (), order.ended)
        if order.holders and group.sequences:
            self.fetches.begin(group, now)

    def _ask_attempts(self, message: AskAttempts, now: int) -> None:
        """An attempt that has left is known until another instance has taken it over."""
        left = set(self.sender.left.values())
        unknown = tuple(name for name in message.attempts if name not in self._state.groups and name not in left)
        self._send_router(AttemptsUnknown(unknown, message.dispatches, self.dispatches_heard, self.answers_told))

    def _cancel(self, message: Cancel, now: int) -> None:
        self._intake.cancel(message.request_id)
        self.sender.cancel(message.request_id)

    def _stop(self, message: StopSequence, now: int) -> None:
        self._intake.stop(message.request_id, message.index)

    def _pin(self, message: Pin, now: int) -> None:
        tokens = self._pins.pin(message.handle, message.tenant, message.tokens, now + message.ttl_ns)
        self.writer.keep(message.tenant, message.tokens[:tokens], now)
        self._send_router(Pinned(message.handle, tokens))

    def _unpin(self, message: Unpin, now: int) -> None:
        self._pins.unpin(message.handle)

    def _ask_events(self, message: AskEvents, now: int) -> None:
        self._tell_changes(message.first)

    def _tell_changes(self, first: int | None) -> None:
        for told in self.feed.answer(first) if self._publishes else ():
            self._send_router(told)

    def reborn(self, me: Peer, *, goes_on: bool = False) -> None:
        """All requests of the cluster end silently, the cache stays. The process is ``me`` from now on, and a member
        only when a router accepts it. ``goes_on``: requests that clients may ask for again go on."""
        self.me, self.router = me, None
        self.exchange.reborn(me)  # first: the transfers of the requests that end now shall not withdraw anything
        for group in list(self._state.groups.values()):
            if group.remote is not None and not (goes_on and self._goes_on_here(group, group.remote)):
                self._state.drop_group(group)
        self.sender.clear()
        self.receiver.clear()
        self.fetches.clear()
        self.writer.clear()
        self._pins.release_all()
        self._pins.lost.clear()
        self._outbox.clear()
        self._intake.draining = False
        self.dispatches_heard = self.answers_told = 0

    def _goes_on_here(self, group: Group, remote: RemoteState) -> bool:
        """The router is another one, and all transfers have ended: ``group`` goes on without, if its answer is kept and
        its prompt is computed here."""
        if not self.kept.runs(group.request.request_id) or remote.import_id is not None or group.muted:
            return False
        remote.offer_id = remote.home = None
        if group.tokens_here is not None:
            self.sender.go_on_here(group, "another router came")
        self.fetches.go_on_without(group)
        return True

    # -- views

    @property
    def pins_held(self) -> int:
        """Named prefixes."""
        return len(self._pins)

    @property
    def next_deadline_ns(self) -> int | None:
        """When a lease ends, fetches are decided, segments told, or an answer is forgotten. None: there is none."""
        ends = [part.next_deadline_ns for part in (self.exchange, self.segments, self.kept)]
        ends.append(self.fetches.decide_at_ns)
        return min([end for end in ends if end is not None], default=None)
