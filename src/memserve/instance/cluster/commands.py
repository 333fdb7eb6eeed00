"""What any router may ask of an instance, the owner or a follower: to run requests, to end them, to tell of them.

What becomes of an instance's requests when their router is gone, or when a client asks another one for the answer.

::

    its follower is gone     answer kept: it goes on alone, for ``kept_answer_ns``       else it ends silently
    another owner came       answer kept: it goes on here, and the owner is told         else it ends silently
    QueryAnswers(key, asked)   it goes on here for the router that asks; the former one hears ``AnswerTaken``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from memserve.instance.adapters import AdapterShelf
from memserve.instance.cluster.handoff_sender import HandoffSender
from memserve.instance.cluster.idempotency import ReplayBuffer
from memserve.instance.cluster.migration import MigrationSender
from memserve.instance.cluster.prefix_fetch import Fetches
from memserve.instance.cluster.routers import Routers, RouterUpdates
from memserve.instance.cluster.shards import HeldSegments
from memserve.instance.cluster.stripes import StripedPrompts
from memserve.instance.events import Action
from memserve.instance.hints import HintRunner
from memserve.instance.intake import RequestIntake
from memserve.instance.scheduler.sequence import Cause, Group
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.retention import Pins
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import RejectRequest, Send
from memserve.protocol.idempotency import AnswerHeld, AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.messages import (
    AnyMessage,
    Cancel,
    Dispatch,
    Migrate,
    NoteTool,
    QueryAttempts,
    QueryKvEvents,
    RequestRefused,
    StopSequence,
)
from memserve.protocol.peers import Load, Peer


@dataclass(frozen=True, slots=True)
class InstanceParts:
    """What an instance lets its link to the cluster use and change."""

    state: SchedulerState
    intake: RequestIntake
    pins: Pins
    hints: HintRunner
    load: Callable[[], Load]
    """How busy the instance is."""
    adapters: AdapterShelf


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What the parts of that link share."""

    instance: InstanceParts
    routers: Routers
    kept: ReplayBuffer
    sender: HandoffSender
    fetches: Fetches
    exchange: Exchange
    migrations: MigrationSender
    striped: StripedPrompts


class RouterChanges:
    """Follows the routers' fates with the requests that they have placed here."""

    def __init__(self, parts: LinkParts, self_peer: Peer) -> None:
        #: the present incarnation of this instance
        self.self_peer = self_peer
        self._state, self._replay_buffer, self._routers = parts.instance.state, parts.kept, parts.routers
        self._sender, self._fetches, self._exchange = parts.sender, parts.fetches, parts.exchange
        self._migrations = parts.migrations
        self._answers: list[Send] = []

    # -- a router is gone

    def on_follower_removed(self, follower: Peer, now_ns: int) -> None:
        """A follower died or left."""
        for group in list(self._state.groups.values()):
            if group.remote is not None and self._routers.follower_of(group.request.request_id) == follower:
                self._continue_detached(group, now_ns)

    def on_handoff_arrived(self, attempt_id: str, now_ns: int) -> None:
        """An attempt was handed over to this instance; its router may be gone meanwhile."""
        group = self._state.groups.get(attempt_id)
        if group is not None and self._routers.router_of(attempt_id) is None:
            self._continue_detached(group, now_ns)

    def _continue_detached(self, group: Group, now_ns: int) -> None:
        """One that is under way to this instance is decided about when it has arrived."""
        remote, attempt_id = group.remote, group.request.request_id
        if self._routers.follower_of(attempt_id) is None:
            return  # the owner's, which may come again
        if self._replay_buffer.is_running(attempt_id) and not group.muted:
            self._routers.continue_detached(attempt_id, now_ns)
        elif remote is None or remote.import_id is None or not group.request.key:
            self._state.drop_group(group)

    def end_overdue(self, now_ns: int) -> None:
        """End attempts without a router for which no client has come."""
        for attempt_id in self._routers.overdue_attempts(now_ns):
            self._state.drop_group(self._state.groups[attempt_id])

    def on_owner_replaced(self) -> None:
        """Another owner has accepted the instance: requests that no follower has placed go on here, or end."""
        for group in list(self._state.groups.values()):
            attempt_id = group.request.request_id
            owners = group.remote is not None and self._routers.follower_of(attempt_id) is None
            if owners and not self._continue_here(group, "another router came"):
                self._state.drop_group(group)
        for attempt_id in [
            request_id for request_id in self._sender.departed.values() if self._routers.follower_of(request_id) is None
        ]:
            self._sender.cancel_request(attempt_id)

    def continue_without_transfers(self, group: Group) -> bool:
        """The router is another one, and all transfers have ended: ``group`` goes on without, if its answer is kept and
        its prompt is computed here."""
        remote = group.remote
        if remote is None or not self._may_stay(group):
            return False
        remote.offer_id = remote.home = None
        if group.tokens_here is not None:
            self._sender.continue_here(group, "another router came")
        self._fetches.continue_without(group)
        return True

    # -- a client asks elsewhere

    def answer_query(self, key: str, request_digest: str, router: Peer) -> None:
        """A client asks ``router`` for the answer with this key: what is here of it is told, and runs on for it. Where
        the key is another request's, that one goes on as it is."""
        answers = [self._take(answer, router) for answer in self._replay_buffer.with_key(key, request_digest)]
        is_anothers = self._replay_buffer.answers_another(key, request_digest)
        for attempt_id, group in self._state.groups.items():
            if group.request.key != key:
                continue
            if group.request.asked != request_digest:
                is_anothers = True
                continue
            former = self._routers.router_of(attempt_id) if group.span is not None else None
            if former is not None and former != router:
                self._answers.append(Send(former, AnswerTaken(attempt_id)))  # no part of it can go on for another
        refused = request_digest if is_anothers else ""
        self._answers.append(Send(router, AnswersHeld(tuple(answers), True, key, refused)))

    def _take(self, answer: AnswerHeld, router: Peer) -> AnswerHeld:
        attempt_id = answer.attempt_id
        group, former = self._state.groups.get(attempt_id), self._routers.router_of(attempt_id)
        if group is None and attempt_id not in self._sender.departed.values():
            return answer  # it has ended
        if former != router and former is not None:
            self._answers.append(Send(former, AnswerTaken(attempt_id)))
        if group is not None and self._continue_here(group, "another router has asked for it"):
            self._routers.assign_attempt(attempt_id, router)
            return answer
        if group is not None:
            self._state.drop_group(group)
        self._sender.cancel_request(attempt_id)  # it is on its way to another instance: it cannot be called back there
        return structs.replace(answer, runs=False)

    def take_answers(self) -> list[Send]:
        """What routers have asked for: before any further token of those answers."""
        answers, self._answers = self._answers, []
        return answers

    # -- going on here

    def _may_stay(self, group: Group) -> bool:
        remote = group.remote
        runs = self._replay_buffer.is_running(group.request.request_id)
        return runs and remote is not None and remote.import_id is None and not group.muted

    def _continue_here(self, group: Group, why: str) -> bool:
        """Whether ``group`` goes on, on this instance alone: a router that takes it over knows of no other."""
        remote = group.remote
        if remote is None or not self._may_stay(group):
            return False
        if remote.offer_id is not None:
            self._exchange.withdraw_offer(remote.offer_id, why)
            remote.offer_id = None
        self._migrations.end_copies(group, why)
        if group.tokens_here is not None:
            self._sender.continue_here(group, why)
        return True


class RouterCommands:
    """Does what routers ask for. A router's word about an attempt of another one does not count."""

    def __init__(
        self,
        parts: LinkParts,
        changes: RouterChanges,
        segments: HeldSegments,
        news: RouterUpdates,
        outbox: list[Action],
        step_tokens: int,
    ) -> None:
        """``outbox``: where messages go. ``step_tokens``: of one step, at most."""
        instance = parts.instance
        self._state, self._intake, self._routers, self._changes = (
            instance.state, instance.intake, parts.routers, changes,
        )  # fmt: skip
        self._replay_buffer, self._sender, self._fetches, self._segments = (
            parts.kept,
            parts.sender,
            parts.fetches,
            segments,
        )
        self._migrations, self._striped = parts.migrations, parts.striped
        self._router_updates, self._outbox = news, outbox
        self._load, self._step_tokens = instance.load, step_tokens
        self._handlers: dict[type, Callable[[Any, Peer, int], None]] = {
            Dispatch: self._on_dispatch, Cancel: self._on_cancel, StopSequence: self._on_stop,
            NoteTool: self._on_note_tool, QueryKvEvents: self._on_query_events,
            QueryAttempts: self._on_query_attempts, QueryAnswers: self._on_query_answers, Migrate: self._on_migrate,
        }  # fmt: skip

    def __contains__(self, message: AnyMessage) -> bool:
        return type(message) in self._handlers

    def run_command(self, message: AnyMessage, sender: Peer, now_ns: int) -> None:
        """Do what ``sender``, a router of this instance, asks for."""
        self._handlers[type(message)](message, sender, now_ns)

    # -- what routers are told

    def reject_attempt(self, action: RejectRequest | None) -> None:
        """Tell the router of an attempt that it will not be run here."""
        message = None if action is None else self._routers.route_refusal(action)
        if action is not None and action.request_id not in self._state.groups:
            self._routers.on_attempt_ended(action.request_id)
        if message is not None:
            self._outbox.append(message)

    def notify_router_of(self, attempt_id: str, message: AnyMessage) -> None:
        """The router whose attempt it is hears ``message``."""
        router = self._routers.router_of(attempt_id)
        if router is not None:
            self._outbox.append(Send(router, message))

    def notify_owner(self, message: AnyMessage) -> None:
        """The owner hears ``message``."""
        if self._routers.owner is not None:
            self._outbox.append(Send(self._routers.owner, message))

    def send_changes(self, first: int | None, to: Peer) -> None:
        """One router hears all changes from number ``first`` on; None: everything."""
        rest = self._router_updates.catch_up(to, first)
        if rest is not None:
            self._outbox.append(Send(to, rest))

    # -- what they ask for

    def _on_dispatch(self, order: Dispatch, sender: Peer, now_ns: int) -> None:
        self._routers.counts_of(sender).dispatches_heard += 1
        if self._intake.runs_dispatch(order):
            return  # to refuse the repeated one would end the one that runs
        if order.request.request_id not in self._state.groups:
            self._routers.assign_attempt(order.request.request_id, sender)
        if any(self._routers.followers) and self._is_stale(order, sender):
            return
        group = self._intake.open_dispatch(order, self._changes.self_peer, now_ns)
        if isinstance(group, RejectRequest):
            self.reject_attempt(group)
            return
        request = order.request
        resumed = not request.beam_width and bool(any(order.generated) or order.ended)
        if order.span is None:  # an attempt of several instances ends with its router
            self._replay_buffer.open_answer(request, order.told, order.generated)
        elif order.span.holds:
            self._segments.hold_group(group)
        self._sender.prepare_handoff(group, len(order.generated[0]) if resumed and request.n == 1 else 0, resumed)
        cause = Cause.REMOTE_KV_EXPECTED if order.holders else Cause.ENQUEUED
        self._intake.enqueue_group(group, cause, order.generated if resumed else (), order.ended)
        if order.span is not None and order.span.stripes:
            problem = self._striped.add_part(group, self._changes.self_peer)
            if problem:
                self._state.drop_group(group)
                self.reject_attempt(RejectRequest(request.request_id, problem, 0.0))
                return
        self._router_updates.on_attempt_placed(sender)
        if order.holders and group.sequences:
            self._fetches.start_fetch(group, now_ns)

    def _is_stale(self, order: Dispatch, sender: Peer) -> bool:
        """Whether other routers' requests have come before ``order``, so many that its router had better choose again:
        it is told how much there is to do."""
        known_tokens, load = order.known_tokens, self._load()
        if known_tokens is None:
            return False
        slack_tokens = max(self._step_tokens, known_tokens // 2)
        if load.prefill_tokens_queued <= known_tokens + slack_tokens:
            return False
        name = order.request.request_id
        load = structs.replace(load, dispatches_heard=None)
        self._routers.on_attempt_ended(name)
        self._routers.counts_of(sender).answers_told += 1
        self._outbox.append(Send(sender, RequestRefused(name, "other routers' requests came before it", 0.0, load)))
        return True

    def _on_cancel(self, message: Cancel, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self._intake.cancel_request(message.request_id)
            self._sender.cancel_request(message.request_id)

    def _on_stop(self, message: StopSequence, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self._intake.stop_sequence(message.request_id, message.index)

    def _on_note_tool(self, message: NoteTool, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self._intake.note_tool(message.request_id, message.tool)

    def _on_migrate(self, message: Migrate, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self.reject_attempt(self._migrations.start_migration(message, now_ns))

    def _on_query_events(self, message: QueryKvEvents, sender: Peer, now_ns: int) -> None:
        self.send_changes(message.first, sender)

    def _on_query_attempts(self, message: QueryAttempts, sender: Peer, now_ns: int) -> None:
        """An attempt that has left is known until another instance has taken it over."""
        attempts_here = self._state.groups.keys() | self._sender.departed.values()
        self._outbox.append(self._routers.answer_attempts(message, sender, attempts_here))

    def _on_query_answers(self, message: QueryAnswers, sender: Peer, now_ns: int) -> None:
        self._changes.answer_query(message.key, message.asked, sender)
