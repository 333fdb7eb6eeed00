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

from memserve.base.config import InstanceConfig
from memserve.base.types import FAR_LINKS, KVGeometry, TokenOutput
from memserve.instance.cluster.commands import InstanceParts, LinkParts, RouterChanges, RouterCommands
from memserve.instance.cluster.handoff_receiver import HandoffReceiver
from memserve.instance.cluster.handoff_sender import HandoffSender
from memserve.instance.cluster.idempotency import ReplayBuffer
from memserve.instance.cluster.migration import MigrationSender
from memserve.instance.cluster.prefix_fetch import Fetches
from memserve.instance.cluster.routers import Routers, RouterUpdates
from memserve.instance.cluster.shards import HeldSegments
from memserve.instance.cluster.store_export import StoreWriter
from memserve.instance.cluster.stripes import StripedPrompts
from memserve.instance.events import Action, StepPlan
from memserve.instance.hints import NEEDED, NO_STORE
from memserve.instance.scheduler.capacity import headroom_blocks
from memserve.instance.scheduler.sequence import Fact, Group, Sequence
from memserve.kv.events import KvFeed
from memserve.kv.transfer.context import Room
from memserve.kv.transfer.events import (
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    Inserted,
    LayersArrived,
    Outcome,
    PagesPulled,
    PagesSealed,
    PullPages,
    Released,
    StripeLost,
    StripeOffered,
)
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import MessageArrived, RejectRequest, Send
from memserve.protocol.kv_hints import (
    NOTHING_CACHED,
    HintAction,
    HintOutcome,
    HintResult,
    KvHint,
    KvHintDone,
    result_for,
)
from memserve.protocol.messages import (
    AnyMessage,
    Drain,
    Expelled,
    HandedOver,
    HoldAdapters,
    JoinAccepted,
    MigrationRefused,
    PeerGone,
    PeerJoined,
    Pin,
    Pinned,
    Unpin,
    Withdraw,
)
from memserve.protocol.peers import Peer


class ClusterLink:
    """Follows the router, deals with other instances, and reports what the cache holds; the ``Transfers`` of
    ``SchedulerState``."""

    def __init__(self, instance: InstanceParts, config: InstanceConfig, geometry: KVGeometry, self_peer: Peer) -> None:
        state, intake = instance.state, instance.intake
        pool = state.memory.pool
        self.routers = Routers(config.exchange.kept_answer_ns)
        self.exchange = Exchange(pool, geometry, config.exchange, self_peer, config.namespace)
        self.replay_buffer = ReplayBuffer(config.exchange.kept_answer_ns, config.exchange.kept_answer_bytes)
        self.sender = HandoffSender(state, intake, self.exchange, self.replay_buffer, self.routers, geometry.num_layers)
        self.migrations = MigrationSender(state, self.exchange, self.sender)
        self.receiver = HandoffReceiver(state, intake, self.exchange)
        self.writer = StoreWriter(state, self.exchange, geometry)
        self.fetches = Fetches(state, self.exchange, geometry, config.exchange.fetch_deadline_ns)
        self.segments = HeldSegments(state)
        self.striped = StripedPrompts(state, self.exchange, geometry.num_layers, config.exchange.lease_ns)
        capacity = config.exchange.event_capacity
        self.router_updates = RouterUpdates(self.routers, KvFeed(pool, capacity) if capacity else None, instance.load)
        #: messages that only the router may send, from another process or an earlier router
        self.messages_ignored = 0
        self.blocks_come_home = 0
        parts = LinkParts(
            instance, self.routers, self.replay_buffer, self.sender, self.fetches, self.exchange, self.migrations,
            self.striped,
        )  # fmt: skip
        self.changes = RouterChanges(parts, self_peer)
        self._state = state
        self._intake = intake
        self._pins, self._hints, self._adapters = instance.pins, instance.hints, instance.adapters
        self._geometry = geometry
        self._pulls: dict[int, tuple[str, int, int]] = {}  # pull job -> name of the peer, pieces, what sealing took
        self._links: dict[str, str] = {}  # name of a peer -> link of the last pull from it
        self._outbox: list[Action] = []
        self._owner_messages: dict[type, Callable[[Any, int], None]] = {
            JoinAccepted: self._on_join_accepted, PeerJoined: self._on_peer_joined, PeerGone: self._on_peer_gone,
            Expelled: self._on_expelled, Drain: self._on_drain, Pin: self._on_pin, Unpin: self._on_unpin,
            KvHint: self._on_hint, HoldAdapters: self._on_hold_adapters,
        }  # fmt: skip
        self.commands = RouterCommands(
            parts, self.changes, self.segments, self.router_updates, self._outbox, config.scheduler.step_tokens
        )
        state.transfers = self

    # -- what has happened

    def on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        """Another process sent ``message``."""
        follow, is_order = self._owner_messages.get(type(message)), message in self.commands
        if follow is None and not is_order:
            if isinstance(message, Withdraw):
                self.receiver.on_withdrawn(message.transfer_id)
            self._apply_outcomes(self.exchange.handle(MessageArrived(sender, message), now_ns), now_ns)
        elif follow is not None and self._comes_from_owner(sender, message):
            follow(message, now_ns)
        elif is_order and (self.routers.is_follower(sender) or self._comes_from_owner(sender, message)):
            self.commands.run_command(message, sender, now_ns)
        else:
            self.messages_ignored += 1

    def _comes_from_owner(self, sender: Peer, message: AnyMessage) -> bool:
        return self.routers.comes_from_owner(sender, message, self._replace_owner)

    @property
    def self_peer(self) -> Peer:
        """The present incarnation."""
        return self.changes.self_peer

    @property
    def router(self) -> Peer | None:
        """The owner that has accepted the instance. None: none has spoken yet."""
        return self.routers.owner

    def pages_done(self, event: PagesSealed | PagesPulled, now_ns: int) -> None:
        """The host has sealed or pulled pages."""
        if isinstance(event, PagesSealed):
            self._state.costs.learn_seal(event.sealed_bytes, event.spent_ns)
        else:
            name, pieces, sealed_ns = self._pulls.pop(event.job_id, ("", 0, 0))
            if name and event.link:
                far = self.fetches.far[name] = event.link in FAR_LINKS
                self._links[name] = event.link
                if not event.error:
                    self._state.costs.learn_link(name, not far, event.pulled_bytes, pieces, event.spent_ns + sealed_ns)
        self._apply_outcomes(self.exchange.handle(event, now_ns), now_ns)

    def step_ended(self, step_id: int, now_ns: int) -> None:
        """A plan was executed, and its tokens were taken into account; or it failed."""
        self.sender.step_finished(step_id)
        self.writer.offers.step_finished(step_id, now_ns)
        self.striped.step_finished(step_id)
        self._apply_outcomes(self.exchange.plan_finished(step_id, now_ns), now_ns)

    def layer_finished(self, step_id: int, layer: int) -> None:
        """The device has written ``layer`` for all rows of a plan."""
        self.sender.layer_finished(step_id, layer)
        self.writer.offers.layer_finished(step_id, layer)
        self.striped.layer_finished(step_id, layer)

    def kv_lost(self, now_ns: int) -> list[Outcome]:
        """A step failed: to be called before the cache is cleared. The outcomes are for :meth:`start_over`, which comes
        behind that: a request that asked for its prefix before would still find it."""
        self.sender.kv_lost()
        self.writer.kv_lost()
        self.striped.kv_lost()
        return self.exchange.everything_failed(now_ns)

    def start_over(self, lost: list[Outcome], now_ns: int) -> None:
        """After a failed step, when sequences were reset and the cache cleared. ``lost``: from :meth:`kv_lost`."""
        self._apply_outcomes(lost, now_ns)
        self.sender.start_over()
        self.segments.start_over()

    # -- how requests are scheduled (``Transfers``)

    def request_ended(self, group: Group) -> None:
        """``group`` has ended, or continues on another instance: so do its transfers."""
        self.replay_buffer.on_attempt_ended(group.request.request_id, self._state.now)
        self.routers.on_attempt_ended(group.request.request_id)
        self.sender.on_request_ended(group)
        self.migrations.end_copies(group, "the request has ended")
        self.receiver.on_request_ended(group)
        self.fetches.on_request_ended(group)
        self.segments.on_request_ended(group)
        self.striped.on_request_ended(group)

    def request_preempted(self, group: Group) -> None:
        """The KV of ``group``, which other instances have to do with, has gone."""
        if not self.striped.fail_part(group, "preempted"):
            self.sender.on_preempted(group)

    def sequence_completed(self, sequence: Sequence) -> None:
        """Another instance wants the KV that ``sequence`` has generated."""
        self.receiver.keep_generated(sequence)

    def free_blocks(self) -> bool:
        """Blocks that are lent to a store, or that a trial fetch reads or writes to."""
        return self.fetches.give_up_trials() or self.exchange.withdraw_trials() or self.writer.free_blocks()

    # -- between event and plans, and after

    def settle_transfers(self, now_ns: int) -> None:
        """Decide about fetches, offer generated KV, let imports go on, and end what has outlived its lease."""
        self.fetches.decide_gathered(now_ns)
        self.migrations.let_drafting_go()
        self.receiver.send_back(now_ns)
        self.replay_buffer.expire_answers(now_ns)
        self.changes.end_overdue(now_ns)
        self.segments.report_complete(now_ns)
        for refusal in self.striped.take_failed(now_ns):
            self.commands.reject_attempt(refusal)
        state = self._state
        parked = len(state.parked) if state.memory.layers.parks else None
        self.exchange.room = Room(headroom_blocks(len(state.decoding)), parked)
        self._apply_outcomes(self.exchange.advance_transfers(now_ns), now_ns)
        self.writer.offer_states(now_ns)

    def on_plan_made(self, plan: StepPlan, now_ns: int) -> None:
        """``plan`` has been made, with all copies recorded so far."""
        self.exchange.plan_made(plan.step_id)
        if self.sender.leaving:
            self.sender.on_plan_made(plan, now_ns)
        self.writer.on_plan_made(plan, now_ns)
        if self.striped.parts:
            self.striped.on_plan_made(plan, now_ns)

    def append_messages(self, actions: list[Action], now_ns: int) -> None:
        """Append messages and page jobs, behind plans and tokens, which are more urgent. What is kept of answers goes
        before further tokens of them."""
        self._apply_outcomes(self.striped.place_offered(now_ns), now_ns)
        actions += self.striped.take_moves()
        if self.replay_buffer.report_due and self.router is not None:
            messages = self.replay_buffer.take_messages(self.routers.follower_of)
            actions[:0] = [Send(self.router, message) for message in messages]
        actions[:0] = self.changes.take_answers()
        self._outbox += self.router_updates.take_messages(now_ns)
        for hint in self.fetches.given_up:
            self._answer_hint(hint.hint_id, HintResult(HintOutcome.REJECTED, 0, NEEDED))
        self.fetches.given_up.clear()
        for handle in self._pins.lost:
            self.commands.notify_owner(Pinned(handle, 0))
        self._pins.lost.clear()
        for request_id, reason in self.sender.stayed:
            self.commands.notify_router_of(request_id, MigrationRefused(request_id, reason))
        self.sender.stayed.clear()
        self.writer.offer_waiting(now_ns)
        self._outbox += self.writer.take_messages()
        if self.router is not None and (report := self._adapters.take_report()) is not None:
            self._outbox.append(Send(self.router, report))
        actions += self.segments.take_actions(self.routers.router_of)
        for action in self.exchange.take_actions():
            if isinstance(action, PullPages):
                pages = action.end_layer - action.first_layer if action.by_page else 1
                self._pulls[action.job_id] = action.peer.name, len(action.src_blocks) * pages, action.sealed_ns
            self._outbox.append(action)
        actions += self._outbox
        self._outbox.clear()
        self.routers.forget_ended(lambda: set(self.sender.departed.values()))

    def send_outputs(self, outputs: list[TokenOutput]) -> list[Action]:
        """New outputs, kept for clients that ask again, as they are told to the routers."""
        self.replay_buffer.record_outputs(outputs)
        return [*self.routers.route_outputs(outputs)]

    # -- what the exchange says

    def _apply_outcomes(self, outcomes: Iterable[Outcome], now_ns: int) -> None:
        for outcome in outcomes:
            match outcome:
                case HandoffOffered():
                    self._on_offered(outcome, now_ns)
                case HandoffArrived():
                    self._on_arrived(outcome, now_ns)
                case HandoffFailed():
                    self.commands.reject_attempt(self.receiver.on_failed(outcome))
                case FetchEnded():
                    prefetched = self.fetches.on_fetch_ended(outcome, now_ns)
                    if prefetched is not None:
                        self._run_hint(prefetched)
                case Released(offer_id, _, used, reason):
                    is_others = self.writer.on_released(offer_id, used)
                    is_others = is_others or self.migrations.on_released(offer_id, used, reason)
                    departed_id = None if is_others else self.sender.on_released(offer_id, used, reason)
                    if departed_id is not None:
                        self.commands.reject_attempt(
                            RejectRequest(departed_id, f"no instance took it over: {reason}", 0.0)
                        )
                case StripeOffered():
                    self.striped.on_offered(outcome)
                case LayersArrived():
                    self.striped.on_layers_arrived(outcome)
                case StripeLost():
                    self.striped.on_stripe_lost(outcome)
                case Inserted():
                    self.blocks_come_home += outcome.pulled_blocks

    def _on_offered(self, outcome: HandoffOffered, now_ns: int) -> None:
        offer = outcome.offer
        if offer.request is not None and offer.request.request_id not in self._state.groups:
            self.routers.assign_attempt(offer.request.request_id, offer.router)
        self.commands.reject_attempt(self.receiver.on_offered(outcome, now_ns))

    def _on_arrived(self, outcome: HandoffArrived, now_ns: int) -> None:
        state_bytes, moved = self.exchange.state_bytes if outcome.state else 0, outcome.pulled_blocks or outcome.state
        facts: list[Fact] = [
            ("migrated_from" if outcome.offer.migrates else "prefilled_at", outcome.sender.name),
            ("handoff_blocks_received", outcome.pulled_blocks),
            ("handoff_blocks_reused", outcome.reused_blocks),
            ("handoff_bytes", outcome.pulled_blocks * self._geometry.block_bytes + state_bytes),
            ("handoff_link", self._links.get(outcome.sender.name, "") if moved else "none"),
        ]
        facts += [("handoff_state_bytes", state_bytes)] if outcome.state else []
        request_id = outcome.offer.request.request_id if outcome.offer.request is not None else ""
        if outcome.offer.request is not None:
            self.replay_buffer.open_answer(outcome.offer.request, outcome.emitted_outputs, outcome.first_tokens)
        if self.receiver.on_arrived(outcome, now_ns, facts):
            self.commands.notify_router_of(request_id, HandedOver(request_id))
            self.changes.on_handoff_arrived(request_id, now_ns)
        else:
            self.replay_buffer.forget_attempt(request_id)
            self.commands.reject_attempt(RejectRequest(request_id, "the handoff contradicts its request", 0.0))

    # -- what the owner says

    def _on_join_accepted(self, message: JoinAccepted, now_ns: int) -> None:
        self._apply_outcomes(self.exchange.set_members(message.peers, now_ns), now_ns)
        for follower in self.routers.set_members(message.peers):
            self.changes.on_follower_removed(follower, now_ns)
        self.writer.set_members(message.peers, message.store_copies)
        self.fetches.stores_changed(self.writer.stores)
        self.replay_buffer.on_router_accepted(self.router)
        self._adapters.on_router_joined()
        if self.router_updates.next_event and self.router is not None:
            self.commands.send_changes(None, self.router)

    def _on_peer_joined(self, message: PeerJoined, now_ns: int) -> None:
        if message.info.peer.name != self.self_peer.name:
            self._apply_outcomes(self.exchange.peer_joined(message.info, now_ns), now_ns)
            older = self.routers.on_member_joined(message.info)
            if older is not None:
                self.changes.on_follower_removed(older, now_ns)
            self.writer.on_member_joined(message.info)
            self.fetches.stores_changed(self.writer.stores)

    def _on_peer_gone(self, message: PeerGone, now_ns: int) -> None:
        self.writer.on_member_left(message.peer)  # before its offers end, which says nothing of those that are there
        self._apply_outcomes(self.exchange.peer_removed(message.peer, now_ns), now_ns)
        if self.routers.remove_member(message.peer):
            self.changes.on_follower_removed(message.peer, now_ns)
        self.fetches.stores_changed(self.writer.stores)

    def _on_drain(self, message: Drain, now_ns: int) -> None:
        self._intake.draining = True

    def _on_hold_adapters(self, message: HoldAdapters, now_ns: int) -> None:
        self._adapters.update_wanted(message.adapters)

    def _on_expelled(self, message: Expelled, now_ns: int) -> None:
        self.restart_as(self.self_peer)

    def _on_pin(self, message: Pin, now_ns: int) -> None:
        until_ns = now_ns + message.ttl_ns
        tokens = self._pins.pin_prefix(
            message.handle, message.tenant, message.tokens, until_ns, priority=message.priority
        )
        self.writer.keep_prefix(message.tenant, message.tokens[:tokens], now_ns)
        self.commands.notify_owner(Pinned(message.handle, tokens))

    def _on_unpin(self, message: Unpin, now_ns: int) -> None:
        self._pins.unpin_prefix(message.handle)

    def _on_hint(self, message: KvHint, now_ns: int) -> None:
        if message.action == HintAction.SHARE:
            self._answer_hint(message.hint_id, self._share_with_store(message, now_ns))
        elif not self.fetches.start_prefetch(message, now_ns):
            self._run_hint(message)

    def _run_hint(self, message: KvHint) -> None:
        if message.action not in list(HintAction):
            result = HintResult(HintOutcome.REJECTED, 0, f"{message.action!r} is not known here")
        else:
            result = self._hints.run_action(HintAction(message.action), message.tenant, message.tokens)
        self._answer_hint(message.hint_id, result)

    def _share_with_store(self, message: KvHint, now_ns: int) -> HintResult:
        pool = self._state.memory.pool
        cached = pool.match_kv(message.tenant, message.tokens)
        if self.writer.target is None:
            return HintResult(HintOutcome.REJECTED, 0, NO_STORE)
        if not cached:
            return NOTHING_CACHED
        self.writer.keep_prefix(message.tenant, message.tokens[:cached], now_ns)
        return result_for(cached, len(message.tokens) // pool.block_tokens * pool.block_tokens, "less is cached")

    def _answer_hint(self, hint_id: str, result: HintResult) -> None:
        self.commands.notify_owner(KvHintDone(hint_id, result.outcome.value, result.tokens, result.reason))

    # -- another life, another owner

    def _replace_owner(self) -> None:
        if not any(self.routers.followers):  # requests of the earlier router are void, but for kept ones
            self.restart_as(self.self_peer, goes_on=True)
            return
        # followers' requests go on as they are; the pins are the next owner's to place
        self.changes.on_owner_replaced()
        self._pins.release_all()
        self._pins.lost.clear()
        self._intake.draining = False
        self.routers.owner_changes(None)

    def restart_as(self, self_peer: Peer, *, goes_on: bool = False) -> None:
        """All requests of the cluster end silently, the cache stays. The process is ``self_peer`` from now on, and a
        member only when a router accepts it. ``goes_on``: requests that clients may ask for again go on."""
        self.changes.self_peer = self_peer
        self.exchange.restart_as(
            self_peer
        )  # first: the transfers of the requests that end now shall not withdraw anything
        for group in list(self._state.groups.values()):
            if group.remote is not None and not (goes_on and self.changes.continue_without_transfers(group)):
                self._state.drop_group(group)
        self.sender.clear()
        self.migrations.clear()
        self.receiver.clear()
        self.fetches.clear()
        self.writer.clear()
        self.striped.clear()
        self._pins.release_all()
        self._pins.lost.clear()
        self._outbox.clear()
        self.changes.take_answers()
        self._intake.draining = False
        self.routers.reset_routers()

    # -- views

    @property
    def pins_held(self) -> int:
        """Named prefixes."""
        return len(self._pins)

    @property
    def next_deadline_ns(self) -> int | None:
        """When something is due here: the end of a lease, a fetch, news for a router ... None: nothing is."""
        own_parts = self.exchange, self.segments, self.striped, self.replay_buffer
        ends = [part.next_deadline_ns for part in (*own_parts, self.routers, self.router_updates)]
        ends.append(self.fetches.decide_at_ns)
        return min([end for end in ends if end is not None], default=None)
