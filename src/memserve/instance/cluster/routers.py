"""Which router gets what an instance says of an attempt, where a cluster has several.

The *owner* has accepted the instance: it tells of members, pins and drains. *Followers* are members too; each places
requests, and hears of its own attempts alone. An attempt changes its router when a client asks another one for the
answer (``QueryAnswers``); one whose follower is gone goes on for a while without any, if its answer is kept.

What routers hear of an instance without asking: what has changed in its index, and how busy it is.

One router hears of changes at once. Of several, each is told of what all of them do here, and others' requests would
cost it as many messages as its own. It hears at once if it has heard nothing for ``BUNDLE_NS``; else what there is
comes in one message when that time is over. Its own requests it knows meanwhile: it has counted their work, and expects
their prompts to be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from memserve.base.errors import check
from memserve.base.types import Role, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.kv.events import KvFeed
from memserve.protocol.events import EmitTokens, RejectRequest, Send
from memserve.protocol.messages import (
    AnyMessage,
    AttemptsUnknown,
    Heartbeat,
    JoinAccepted,
    KvEvents,
    KvSnapshot,
    QueryAttempts,
    RequestRefused,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo


@dataclass(slots=True)
class LinkCounts:
    """Totals of one router's link, which that router compares with its own (``LossDetector``)."""

    dispatches_heard: int = 0
    answers_told: int = 0


class Routers:
    """The owner, the followers, and whose each attempt is."""

    def __init__(self, keep_ns: int) -> None:
        self._keep_ns = keep_ns
        #: None: no owner has spoken yet
        self.owner: Peer | None = None
        self._followers: dict[str, Peer] = {}
        self._follower_by_attempt: dict[
            str, Peer
        ] = {}  # attempts of followers, living or gone; all others are the owner's
        self._ended: dict[str, None] = {}  # of them: ended, but their last words may not be said yet
        #: attempts that go on although their follower is gone, in order of their end if no client comes for them
        self.detached: dict[str, int] = {}
        self._counts: dict[Peer | None, LinkCounts] = {None: LinkCounts()}

    # -- which there are

    def set_members(self, infos: Iterable[PeerInfo]) -> list[Peer]:
        """These are all members. Returns the followers that are gone."""
        peers_by_name = {info.peer.name: info.peer for info in infos if info.role is Role.ROUTER}
        removed = [peer for name, peer in self._followers.items() if peers_by_name.get(name) != peer]
        for peer in removed:
            self.remove_member(peer)
        for peer in peers_by_name.values():
            self._add_follower(peer)
        return removed

    def on_member_joined(self, info: PeerInfo) -> Peer | None:
        """A new member. Returns the older incarnation of a follower, which is gone."""
        if info.role is not Role.ROUTER:
            return None
        older = self._followers.get(info.peer.name)
        if older is not None and older != info.peer:
            self.remove_member(older)
        self._add_follower(info.peer)
        return older if older != info.peer else None

    def _add_follower(self, peer: Peer) -> None:
        self._followers[peer.name] = peer
        self._counts.setdefault(peer, LinkCounts())

    def remove_member(self, peer: Peer) -> bool:
        """A member is gone. Whether it was a follower."""
        if self._followers.get(peer.name) != peer:
            return False
        del self._followers[peer.name], self._counts[peer]
        return True

    def is_follower(self, peer: Peer) -> bool:
        """Whether this incarnation is a member that places requests."""
        return self._followers.get(peer.name) == peer

    @property
    def followers(self) -> Iterable[Peer]:
        """All of them, in the order in which they were heard of."""
        return self._followers.values()

    @property
    def all_routers(self) -> list[Peer]:
        """The owner, and all followers."""
        return [peer for peer in (self.owner, *self._followers.values()) if peer is not None]

    def comes_from_owner(self, sender: Peer, message: AnyMessage, replace_owner: Callable[[], None]) -> bool:
        """Whether ``sender`` is the owner. The first one that speaks is followed, and then each newer one that accepts
        the instance: before that ``replace_owner`` is called."""
        if sender.name != ROUTER:
            return False
        if self.owner is None:
            self.owner = sender
        elif sender.generation > self.owner.generation and isinstance(message, JoinAccepted):
            replace_owner()
            self.owner = sender
        return sender == self.owner

    # -- whose is an attempt

    def assign_attempt(self, attempt_id: str, router: Peer | None) -> None:
        """An attempt of ``router`` is here, or an old one is ``router``'s from now on. None: the owner's."""
        follower = router if router is not None and router != self.owner else None
        self._ended.pop(attempt_id, None)
        self.detached.pop(attempt_id, None)
        if follower is None:
            self._follower_by_attempt.pop(attempt_id, None)
        else:
            self._follower_by_attempt[attempt_id] = follower

    def follower_of(self, attempt_id: str) -> Peer | None:
        """The follower whose attempt it is, whether it lives or not. None: it is the owner's."""
        return self._follower_by_attempt.get(attempt_id)

    def router_of(self, attempt_id: str) -> Peer | None:
        """The router that hears of the attempt. None: none does."""
        follower = self._follower_by_attempt.get(attempt_id)
        if follower is None:
            return self.owner
        return follower if self.is_follower(follower) else None

    def is_of(self, attempt_id: str, router: Peer) -> bool:
        """Whether ``router`` may speak of the attempt."""
        follower = self._follower_by_attempt.get(attempt_id)
        return router == (self.owner if follower is None else follower)

    def continue_detached(self, attempt_id: str, now_ns: int) -> None:
        """The follower of an attempt is gone, and a client may ask another router for it."""
        self.detached[attempt_id] = now_ns + self._keep_ns

    def overdue_attempts(self, now_ns: int) -> list[str]:
        """Attempts for which no client has come in time."""
        return [attempt_id for attempt_id, until_ns in self.detached.items() if until_ns <= now_ns]

    def on_attempt_ended(self, attempt_id: str) -> None:
        """The attempt is not here any more. It may still be spoken of in this event, or while it is handed over."""
        self.detached.pop(attempt_id, None)
        if attempt_id in self._follower_by_attempt:
            self._ended[attempt_id] = None

    def forget_ended(self, still_needed: Callable[[], set[str]]) -> None:
        """Everything of this event is said. ``still_needed``: ended attempts that may be spoken of later."""
        if self._ended:
            needed = still_needed()
            for attempt_id in [name for name in self._ended if name not in needed]:
                del self._ended[attempt_id], self._follower_by_attempt[attempt_id]

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`overdue_attempts` has something new to say. None: never."""
        return next(iter(self.detached.values()), None)

    # -- what is said

    def route_outputs(self, outputs: Sequence[TokenOutput]) -> list[EmitTokens | Send]:
        """New outputs, each to the router of its attempt. The host knows what to do with the owner's."""
        if not self._follower_by_attempt:
            self._counts[None].answers_told += 1
            return [EmitTokens(list(outputs))]
        parts: dict[Peer | None, list[TokenOutput]] = {}
        for output in outputs:
            follower = self._follower_by_attempt.get(output.request_id)
            if follower is None or self.is_follower(follower):
                parts.setdefault(follower, []).append(output)
        for follower in parts:
            self._counts[follower].answers_told += 1
        return [
            EmitTokens(part) if follower is None else Send(follower, Tokens(tuple(part)))
            for follower, part in parts.items()
        ]

    def route_refusal(self, action: RejectRequest) -> RejectRequest | Send | None:
        """That an attempt will not be run, as its router is told it. None: that router is gone."""
        follower = self._follower_by_attempt.get(action.request_id)
        if follower is not None and not self.is_follower(follower):
            return None
        self._counts[follower].answers_told += 1
        if follower is None:
            return action
        return Send(follower, RequestRefused(action.request_id, action.reason, action.retry_after_s))

    def answer_attempts(self, query: QueryAttempts, sender: Peer, attempts_here: Container[str]) -> Send:
        """Which attempts ``sender`` has not here. ``attempts_here``: all of them, of any router."""
        unknown = tuple(name for name in query.attempts if name not in attempts_here or not self.is_of(name, sender))
        counts = self.counts_of(sender)
        reply = AttemptsUnknown(unknown, query.dispatches, counts.dispatches_heard, counts.answers_told)
        return Send(sender, reply)

    # -- totals

    def counts_of(self, router: Peer | None) -> LinkCounts:
        """Those of a follower, or of the owner: None."""
        return self._counts[router if router in self._counts else None]

    def loads_for_followers(self, load: Load) -> tuple[tuple[Peer, Load], ...]:
        """``load`` as each follower is told it."""
        peer_loads = []
        for peer, counts in ((peer, self._counts[peer]) for peer in self._followers.values()):
            totals = {"dispatches_heard": counts.dispatches_heard, "answers_told": counts.answers_told}
            peer_loads.append((peer, structs.replace(load, **totals)))
        return tuple(peer_loads)

    def owner_changes(self, owner: Peer | None) -> None:
        """Another owner has accepted the instance; None: it is no member for the time being."""
        self.owner, self._counts[None] = owner, LinkCounts()

    def reset_routers(self) -> None:
        """The instance begins anew: it knows no router, and no attempt of one."""
        self.owner_changes(None)
        self._followers.clear()
        self._follower_by_attempt.clear()
        self._ended.clear()
        self.detached.clear()
        self._counts = {None: LinkCounts()}

    def check_invariants(self, live: Iterable[str]) -> None:
        """Raise :class:`InvariantError` if the books do not agree. ``live``: all attempts that are here."""
        names = set(live)
        check(self._ended.keys() <= self._follower_by_attempt.keys(), "attempts are over, and of no follower")
        check(
            self.detached.keys() <= self._follower_by_attempt.keys() & names, "attempts go on alone that are not here"
        )
        stray = self._follower_by_attempt.keys() - names - self._ended.keys()
        check(not stray, "attempts of followers are not here: {}", stray)
        check(set(self._counts) == {None, *self._followers.values()}, "totals of links that are not there")
        for name in self.detached:
            check(not self.is_follower(self._follower_by_attempt[name]), "{} goes on alone, and has a router", name)


BUNDLE_NS = 5 * NS_PER_MS
"""How old news may get. Short beside the steps whose load they tell of."""


@dataclass(slots=True)
class ReportState:
    """What one router has heard."""

    next_event: int
    """The changes of the index before this one."""
    is_stale: bool = False
    """Another router has placed something since it heard how busy the instance is."""
    again_ns: int = 0
    """It hears no news before that, if there are other routers."""

    def may_wait(self, now_ns: int) -> bool:
        """Whether news for it wait until ``again_ns``. A wait longer than a bundle's: the clock was set back."""
        return 0 < self.again_ns - now_ns <= BUNDLE_NS


class RouterUpdates:
    """Tells every router, and remembers what each has heard."""

    def __init__(self, routers: Routers, feed: KvFeed | None, load: Callable[[], Load]) -> None:
        """``feed`` None: this instance publishes no KV events. ``load``: how busy the instance is."""
        self._routers, self._feed, self._load = routers, feed, load
        #: by router; those that are gone are forgotten at the next event
        self._router_states: dict[Peer, ReportState] = {}
        #: when a router is told what waits for it. None: nothing does
        self.next_deadline_ns: int | None = None

    @property
    def next_event(self) -> int:
        """Number of the next change of the index. 0: none are told."""
        return self._feed.next_event if self._feed is not None else 0

    def for_heartbeat(self, router: Peer | None, now_ns: int) -> int:
        """A change before this one that ``router`` has not heard of was lost. What waits for it is not."""
        router_state = self._router_states.get(router) if router is not None else None
        return (
            router_state.next_event if router_state is not None and router_state.may_wait(now_ns) else self.next_event
        )

    # -- what has happened in the event under way

    def on_attempt_placed(self, by: Peer) -> None:
        """The router ``by`` has placed something here. Until they know, all others would choose the instance that was
        idle."""
        for router in self._routers.all_routers:
            if router != by:
                self._state_of(router).is_stale = True

    def catch_up(self, router: Peer, first: int | None) -> KvEvents | KvSnapshot | None:
        """All changes from number ``first`` on, None: everything, for ``router``, which has asked for it."""
        if self._feed is None:
            return None
        self._feed.take_changes()
        self._state_of(router).next_event = self._feed.next_event
        return self._feed.answer_query(first)

    # -- and what is said of it

    def take_messages(self, now_ns: int) -> list[Send]:
        """What routers are told now."""
        news = self._feed.take_changes() if self._feed is not None else None
        routers, messages = self._routers.all_routers, list[Send]()
        self.next_deadline_ns = None
        for router in routers:
            router_state = self._state_of(router)
            if router_state.next_event == self.next_event and not router_state.is_stale:
                continue
            if not router_state.may_wait(now_ns) or len(routers) == 1:
                messages += self._bundle_for(router, router_state, news)
                router_state.again_ns = now_ns + BUNDLE_NS
            else:
                self.next_deadline_ns = min(router_state.again_ns, self.next_deadline_ns or router_state.again_ns)
        if len(self._router_states) > len(routers):
            self._router_states = {router: self._router_states[router] for router in routers}
        return messages

    def _bundle_for(self, router: Peer, router_state: ReportState, news: KvEvents | None) -> Iterable[Send]:
        if self._feed is not None and router_state.next_event != self.next_event:
            is_all = news is not None and news.first == router_state.next_event
            changes = news if is_all else self._feed.replay_from(router_state.next_event)
            router_state.next_event = self.next_event
            if isinstance(changes, KvEvents) and router_state.is_stale:
                changes, router_state.is_stale = structs.replace(changes, load=self._load_for_all()), False
            if changes is not None:
                yield Send(router, changes)
        if router_state.is_stale:
            router_state.is_stale = False
            yield Send(router, Heartbeat(self._load_for_all(), self.next_event))

    def _load_for_all(self) -> Load:
        """Totals of a router's link are for the heartbeats of that router."""
        return structs.replace(self._load(), dispatches_heard=None)

    def _state_of(self, router: Peer) -> ReportState:
        """A router that has heard nothing asks for all that it misses."""
        router_state = self._router_states.get(router)
        if router_state is None:
            router_state = self._router_states[router] = ReportState(self.next_event)
        return router_state

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless whatever a router has not heard will be told. Between two events."""
        waits = [
            router_state
            for router_state in self._router_states.values()
            if router_state.is_stale or router_state.next_event != self.next_event
        ]
        due_ns = min((router_state.again_ns for router_state in waits), default=None)
        check(self.next_deadline_ns == due_ns, "routers hear news at {}, not {}", self.next_deadline_ns, due_ns)
