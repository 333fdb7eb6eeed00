"""What any router may ask of an instance, the owner or a follower: to run requests, to end them, to tell of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from memserve.instance.events import Action
from memserve.instance.fetching import Fetches
from memserve.instance.handoff_sender import HandoffSender
from memserve.instance.intake import RequestIntake
from memserve.instance.kept import KeptAnswers
from memserve.instance.router_changes import RouterChanges
from memserve.instance.router_news import RouterNews
from memserve.instance.routers import Routers
from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.segments import HeldSegments
from memserve.instance.sequence import Cause
from memserve.messages import (
    AnyMessage,
    AskAnswers,
    AskAttempts,
    AskEvents,
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Load,
    Peer,
    RequestRefused,
    StopSequence,
)
from memserve.serving import RejectRequest, Send


class RouterOrders:
    """Does what routers ask for. A router's word about an attempt of another one does not count."""

    def __init__(
        self,
        state: SchedulerState,
        intake: RequestIntake,
        routers: Routers,
        changes: RouterChanges,
        kept: KeptAnswers,
        sender: HandoffSender,
        fetches: Fetches,
        segments: HeldSegments,
        news: RouterNews,
        outbox: list[Action],
        load: Callable[[], Load],
        step_tokens: int,
    ) -> None:
        """``outbox``: where messages go. ``load``: how busy the instance is. ``step_tokens``: of one step, at most."""
        self._state, self._intake, self._routers, self._changes = state, intake, routers, changes
        self._kept, self._sender, self._fetches, self._segments = kept, sender, fetches, segments
        self._news, self._outbox = news, outbox
        self._load, self._step_tokens = load, step_tokens
        self._orders: dict[type, Callable[[Any, Peer, int], None]] = {
            Dispatch: self._dispatch, Cancel: self._cancel, StopSequence: self._stop, AskEvents: self._ask_events,
            AskAttempts: self._ask_attempts, AskAnswers: self._ask_answers,
        }  # fmt: skip

    def __contains__(self, message: AnyMessage) -> bool:
        return type(message) in self._orders

    def follow(self, message: AnyMessage, sender: Peer, now: int) -> None:
        """Do what ``sender``, a router of this instance, asks for."""
        self._orders[type(message)](message, sender, now)

    # -- what routers are told

    def reject(self, action: RejectRequest | None) -> None:
        """Tell the router of an attempt that it will not be run here."""
        told = None if action is None else self._routers.refusal(action)
        if action is not None and action.request_id not in self._state.groups:
            self._routers.ended(action.request_id)
        if told is not None:
            self._outbox.append(told)

    def tell_router_of(self, attempt_id: str, message: AnyMessage) -> None:
        """The router whose attempt it is hears ``message``."""
        router = self._routers.router_of(attempt_id)
        if router is not None:
            self._outbox.append(Send(router, message))

    def tell_owner(self, message: AnyMessage) -> None:
        """The owner hears ``message``."""
        if self._routers.owner is not None:
            self._outbox.append(Send(self._routers.owner, message))

    def tell_changes(self, first: int | None, to: Peer) -> None:
        """One router hears all changes from number ``first`` on; None: everything."""
        rest = self._news.catch_up(to, first)
        if rest is not None:
            self._outbox.append(Send(to, rest))

    # -- what they ask for

    def _dispatch(self, order: Dispatch, sender: Peer, now: int) -> None:
        self._routers.counts(sender).dispatches_heard += 1
        if self._intake.has(order):
            return  # to refuse the repeated one would end the one that runs
        if order.request.request_id not in self._state.groups:
            self._routers.begins(order.request.request_id, sender)
        if any(self._routers.followers) and self._is_outrun(order, sender):
            return
        group = self._intake.open_dispatch(order, self._changes.me, now)
        if isinstance(group, RejectRequest):
            self.reject(group)
            return
        request = order.request
        resumed = not request.beam_width and bool(any(order.generated) or order.ended)
        if order.span is None:  # an attempt of several instances ends with its router
            self._kept.open(request, order.told, order.generated)
        elif order.span.holds:
            self._segments.begin(group)
        self._sender.begin(group, len(order.generated[0]) if resumed and request.n == 1 else 0, resumed)
        cause = Cause.REMOTE_KV_EXPECTED if order.holders else Cause.ENQUEUED
        self._intake.enqueue(group, cause, order.generated if resumed else (), order.ended)
        self._news.placed(sender)
        if order.holders and group.sequences:
            self._fetches.begin(group, now)

    def _is_outrun(self, order: Dispatch, sender: Peer) -> bool:
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
        self._routers.ended(name)
        self._routers.counts(sender).answers_told += 1
        self._outbox.append(Send(sender, RequestRefused(name, "other routers' requests came before it", 0.0, load)))
        return True

    def _cancel(self, message: Cancel, sender: Peer, now: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self._intake.cancel(message.request_id)
            self._sender.cancel(message.request_id)

    def _stop(self, message: StopSequence, sender: Peer, now: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            self._intake.stop(message.request_id, message.index)

    def _ask_events(self, message: AskEvents, sender: Peer, now: int) -> None:
        self.tell_changes(message.first, sender)

    def _ask_attempts(self, message: AskAttempts, sender: Peer, now: int) -> None:
        """An attempt that has left is known until another instance has taken it over."""
        left = set(self._sender.left.values())
        known = [name for name in message.attempts if name in self._state.groups or name in left]
        own = {name for name in known if self._routers.is_of(name, sender)}
        unknown, counts = tuple(n for n in message.attempts if n not in own), self._routers.counts(sender)
        told = AttemptsUnknown(unknown, message.dispatches, counts.dispatches_heard, counts.answers_told)
        self._outbox.append(Send(sender, told))

    def _ask_answers(self, message: AskAnswers, sender: Peer, now: int) -> None:
        self._changes.asked(message.key, message.asked, sender)
