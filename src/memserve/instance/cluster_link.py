"""The instance as a member of a cluster (level 2): orders and messages in, messages out.

What the machine does at each event, and where the link comes in::

    event     -> hear, pages_done, layer_finished, step_ended, kv_lost      what has happened
    settle    -> requests that ended, imports that arrived, leases          before plans are made
    planned   -> offers and their pages                                     after each plan
    conclude  -> messages, page jobs, KV events                             behind tokens and plans
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memserve import _core
from memserve.config import InstanceConfig
from memserve.instance.actions import Action, StepPlan
from memserve.instance.dispatching import Dispatching
from memserve.instance.fetching import Fetches
from memserve.instance.frontdesk import FrontDesk
from memserve.instance.handoff import Handoffs
from memserve.instance.kvfeed import KvFeed
from memserve.instance.membership import Membership
from memserve.instance.pins import Pins
from memserve.instance.roster import Roster
from memserve.instance.sequence import Fact
from memserve.instance.takeover import Takeovers
from memserve.kv_transfer.exchange import Exchange
from memserve.kv_transfer.jobs import PagesPulled, PagesSealed, PullPages
from memserve.kv_transfer.outcomes import (
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    Inserted,
    Outcome,
    Released,
)
from memserve.messages import (
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
    KvEvents,
    KvSnapshot,
    Load,
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
    """Obeys the router, deals with other instances, and tells what the cache holds."""

    def __init__(
        self, roster: Roster, desk: FrontDesk, pins: Pins, config: InstanceConfig, geometry: KVGeometry, me: Peer
    ) -> None:
        pool = roster.memory.pool
        self.exchange = Exchange(pool, geometry, config.exchange, me, config.namespace)
        self.handoffs = Handoffs(roster, desk, self.exchange, geometry.num_layers)
        self.takeovers = Takeovers(roster, desk, self.exchange)
        self.fetches = Fetches(roster, self.exchange, geometry, config.exchange.fetch_deadline_ns)
        self.members = Membership(self.exchange, me)
        self.feed = KvFeed(pool, max(1, config.exchange.event_capacity))
        #: messages of whoever is not the router, or is it no more, that only the router may send
        self.ignored_orders = 0
        self.blocks_sent_home = 0
        self.blocks_come_home = 0
        #: totals of this incarnation, which the router compares with its own (``LossDetector``)
        self.dispatches_heard = self.answers_told = 0
        self._dispatching = Dispatching(roster, desk, self.handoffs, self.fetches)
        self._roster = roster
        self._desk = desk
        self._pins = pins
        self._geometry = geometry
        self._publishes = config.exchange.event_capacity > 0
        self._pulls: dict[int, str] = {}  # pull job -> name of the peer
        self._links: dict[str, str] = {}  # name of a peer -> link of the last pull from it
        self._outbox: list[Action] = []
        self._lost: list[Outcome] = []  # what becomes of transfers after a failed step
        self._orders: dict[type, Callable[[Any, int], None]] = {
            JoinAccepted: self._welcome, PeerJoined: self._peer_joined, PeerGone: self._peer_gone,
            Expelled: self._expelled, Drain: self._drain, Dispatch: self._dispatch, Cancel: self._cancel,
            StopSequence: self._stop, Pin: self._pin, Unpin: self._unpin, AskEvents: self._ask_events,
            AskAttempts: self._ask_attempts,
        }  # fmt: skip

    # -- what has happened

    def hear(self, sender: Peer, message: AnyMessage, now: int) -> None:
        """Another process said something."""
        obey = self._orders.get(type(message))
        if obey is not None:
            if self.members.is_superseded(sender, message):
                self.reborn(self.members.me)
            if self.members.obeys(sender):
                obey(message, now)
            else:
                self.ignored_orders += 1
            return
        if isinstance(message, Withdraw):
            self.takeovers.withdrawn(message.transfer_id)
            self._end_transfers(now)
        self._act(self.exchange.handle(MessageArrived(sender, message), now), now)

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
        lost, self._lost = self._lost, []
        self._act(lost, now)
        self._end_transfers(now)
        self.handoffs.step_finished(step_id)
        self._act(self.exchange.plan_finished(step_id, now), now)

    def kv_lost(self, now: int) -> None:
        """A step failed: to be called before the cache is cleared. What follows from that waits for ``step_ended``: who
        looked for a prefix now would still find it."""
        self.handoffs.kv_lost()
        self._lost = self.exchange.everything_failed(now)

    # -- between event and plans, and after

    def settle(self, now: int) -> None:
        """End what goes with requests that have ended, let imports go on, and forget what has outlived its lease."""
        self._end_transfers(now)
        self.fetches.settle(now)
        if self._roster.homeward:
            self.blocks_sent_home += self.takeovers.send_home(now)
        self.exchange.headroom_blocks = headroom_blocks(len(self._roster.decoding))
        self._act(self.exchange.advance(now), now)

    def planned(self, plan: StepPlan, now: int) -> None:
        """``plan`` has been made, with all copies recorded so far."""
        self.exchange.plan_made(plan.step_id)
        if self.handoffs.leaving:
            self.handoffs.planned(plan, now)

    def conclude(self, actions: list[Action], now: int) -> None:
        """Say what is to be said; it comes behind plans and tokens, which are more urgent."""
        self._end_transfers(now)
        news = self.feed.news() if self._publishes else None
        if news is not None and self.members.router is not None:
            self._outbox.append(Send(self.members.router, news))
        for handle in self._pins.lost:
            self._tell_router(Pinned(handle, 0))
        self._pins.lost.clear()
        for action in self.exchange.take_actions():
            if isinstance(action, PullPages):
                self._pulls[action.job_id] = action.peer.name
            self._outbox.append(action)
        actions += self._outbox
        self._outbox.clear()

    def _end_transfers(self, now: int) -> None:
        """Transfers end with the requests that they are for; interrupted handoffs begin anew."""
        roster = self._roster
        for group in roster.ended_orders:
            self.handoffs.ended(group)
            self.takeovers.ended(group)
            self.fetches.given_up(group)
        roster.ended_orders.clear()
        interrupted, roster.interrupted = roster.interrupted, []
        for group in interrupted:
            self.handoffs.interrupted(group, now)

    # -- what the exchange says

    def _act(self, outcomes: Iterable[Outcome], now: int) -> None:
        for outcome in outcomes:
            if isinstance(outcome, HandoffOffered):
                self._reject(self.takeovers.offered(outcome, now))
            elif isinstance(outcome, HandoffArrived):
                self._arrived(outcome, now)
            elif isinstance(outcome, HandoffFailed):
                self._reject(self.takeovers.failed_to_come(outcome))
            elif isinstance(outcome, FetchEnded):
                self.fetches.ended(outcome, now)
            elif isinstance(outcome, Released):
                self._released(outcome, now)
            elif isinstance(outcome, Inserted):
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
        if self.takeovers.arrived(outcome, now, facts) is not None:
            self._tell_router(HandedOver(request_id))
        else:
            self._reject(RejectRequest(request_id, "the handoff contradicts its request", 0.0))

    def _released(self, outcome: Released, now: int) -> None:
        left = self.handoffs.released(outcome.transfer_id, outcome.used, outcome.reason, now)
        if left is not None:
            self._reject(RejectRequest(left, f"nobody took it over: {outcome.reason}", 0.0))

    def _reject(self, action: RejectRequest | None) -> None:
        if action is not None:
            self.answers_told += 1
            self._outbox.append(action)

    def _tell_router(self, message: HandedOver | AttemptsUnknown | Pinned | KvEvents | KvSnapshot) -> None:
        if self.members.router is not None:
            self._outbox.append(Send(self.members.router, message))

    # -- orders

    def _welcome(self, message: JoinAccepted, now: int) -> None:
        self._act(self.members.welcome(message, now), now)
        if self._publishes and self.feed.next_event:
            self._settle_feed()
            self._tell_router(self.feed.snapshot())

    def _peer_joined(self, message: PeerJoined, now: int) -> None:
        self._act(self.members.joined(message.info, now), now)

    def _peer_gone(self, message: PeerGone, now: int) -> None:
        self._act(self.members.gone(message.peer, now), now)

    def _drain(self, message: Drain, now: int) -> None:
        self._dispatching.draining = True

    def _expelled(self, message: Expelled, now: int) -> None:
        self.reborn(self.members.me)

    def _dispatch(self, order: Dispatch, now: int) -> None:
        self.dispatches_heard += 1
        self._reject(self._dispatching.dispatch(order, self.members.me, now))

    def _ask_attempts(self, message: AskAttempts, now: int) -> None:
        """Also those are known that have left, until somebody has taken them over."""
        left = set(self.handoffs.left.values())
        unknown = tuple(name for name in message.attempts if name not in self._roster.groups and name not in left)
        self._tell_router(AttemptsUnknown(unknown, message.dispatches, self.dispatches_heard, self.answers_told))

    def _cancel(self, message: Cancel, now: int) -> None:
        self._desk.cancel(message.request_id)
        self.handoffs.cancel(message.request_id)

    def _stop(self, message: StopSequence, now: int) -> None:
        self._desk.stop(message.request_id, message.index)

    def _pin(self, message: Pin, now: int) -> None:
        tokens = self._pins.pin(message.handle, message.tenant, message.tokens, now + message.ttl_ns)
        self._tell_router(Pinned(message.handle, tokens))

    def _unpin(self, message: Unpin, now: int) -> None:
        self._pins.unpin(message.handle)

    # -- KV events

    def _ask_events(self, message: AskEvents, now: int) -> None:
        if self._publishes:
            self._settle_feed()
            answer = self.feed.replay(message.first)
            if answer is not None:
                self._tell_router(answer)

    def _settle_feed(self) -> None:
        """Changes that nobody was told of come before anything that is told about them."""
        news = self.feed.news()
        if news is not None:
            self._tell_router(news)

    # -- beginning anew

    def reborn(self, me: Peer) -> None:
        """Nobody waits for anything any more: all requests end without a word, the cache stays. From now on the process
        is ``me``, and not a member yet."""
        self._drop_everything()
        self._dispatching.draining = False
        self.dispatches_heard = self.answers_told = 0
        self.members.begin_anew(me)

    def _drop_everything(self) -> None:
        for group in list(self._roster.groups.values()):
            if group.orders is not None:
                self._roster.drop_group(group)
        for part in self._roster.homeward:
            self._roster.memory.pool.release(part.blocks)
        for listed in (self._roster.ended_orders, self._roster.interrupted, self._roster.homeward):
            listed.clear()
        self.handoffs.clear()
        self.takeovers.clear()
        self.fetches.clear()
        self._pins.release_all()
        self._pins.lost.clear()
        self._outbox.clear()

    # -- views

    def load(self) -> Load:
        """For the next heartbeat."""
        roster = self._roster
        if not roster.groups:  # most members of a large cluster, most of the time
            available = roster.memory.pool.available()
            return Load(
                hbm_blocks_available=available,
                transfers_open=self.exchange.transfers_open,
                dispatches_heard=self.dispatches_heard,
                answers_told=self.answers_told,
            )
        running = [*roster.working.items, *roster.decoding.items, *roster.idle.items]
        requests_waiting, sequences_running = roster.crowd()
        return Load(
            requests_waiting=requests_waiting,
            sequences_running=sequences_running,
            prefill_tokens_queued=roster.prefill_tokens_queued(),
            context_tokens_running=_core.count_tokens(running)[0],
            hbm_blocks_available=roster.memory.pool.available(),
            transfers_open=self.exchange.transfers_open,
            dispatches_heard=self.dispatches_heard,
            answers_told=self.answers_told,
        )

    @property
    def pins_held(self) -> int:
        """Named prefixes."""
        return len(self._pins)

    @property
    def next_deadline_ns(self) -> int | None:
        """When something outlives its lease or its time, or fetches are decided."""
        ends = (self.exchange.next_deadline_ns, self.fetches.decide_at_ns)
        return min([end for end in ends if end is not None], default=None)
