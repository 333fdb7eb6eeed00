"""Which router gets what an instance says of an attempt, where a cluster has several.

The *owner* has accepted the instance: it tells of members, pins and drains. *Followers* are members too; each places
requests, and hears of its own attempts alone. An attempt changes its router when a client asks another one for the
answer (``AskAnswers``); one whose follower is gone goes on for a while without any, if its answer is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from memserve.errors import check
from memserve.messages import Load, Peer, PeerInfo, RequestRefused, Tokens
from memserve.serving import EmitTokens, RejectRequest, Send
from memserve.types import Role, TokenOutput


@dataclass(slots=True)
class LinkCounts:
    """Totals of one router's link, which that router compares with its own (``LossDetector``)."""

    dispatches_heard: int = 0
    answers_told: int = 0


class Routers:
    """The owner, the followers, and whose each attempt is."""

    __slots__ = ("_counts", "_followers", "_keep_ns", "_of", "_over", "alone", "owner")

    def __init__(self, keep_ns: int) -> None:
        self._keep_ns = keep_ns
        #: None: no owner has spoken yet
        self.owner: Peer | None = None
        self._followers: dict[str, Peer] = {}
        self._of: dict[str, Peer] = {}  # attempts of followers, living or gone; all others are the owner's
        self._over: dict[str, None] = {}  # of them: ended, but their last words may not be said yet
        #: attempts that go on although their follower is gone, in order of their end if no client comes for them
        self.alone: dict[str, int] = {}
        self._counts: dict[Peer | None, LinkCounts] = {None: LinkCounts()}

    # -- which there are

    def set_members(self, infos: Iterable[PeerInfo]) -> list[Peer]:
        """These are all members. Returns the followers that are gone."""
        named = {info.peer.name: info.peer for info in infos if info.role is Role.ROUTER}
        gone = [peer for name, peer in self._followers.items() if named.get(name) != peer]
        for peer in gone:
            self.left(peer)
        for peer in named.values():
            self._enter(peer)
        return gone

    def joined(self, info: PeerInfo) -> Peer | None:
        """A new member. Returns the older incarnation of a follower, which is gone."""
        if info.role is not Role.ROUTER:
            return None
        older = self._followers.get(info.peer.name)
        if older is not None and older != info.peer:
            self.left(older)
        self._enter(info.peer)
        return older if older != info.peer else None

    def _enter(self, peer: Peer) -> None:
        self._followers[peer.name] = peer
        self._counts.setdefault(peer, LinkCounts())

    def left(self, peer: Peer) -> bool:
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
    def all(self) -> list[Peer]:
        """The owner, and all followers."""
        return [peer for peer in (self.owner, *self._followers.values()) if peer is not None]

    # -- whose is an attempt

    def begins(self, attempt_id: str, router: Peer | None) -> None:
        """An attempt of ``router`` is here, or an old one is ``router``'s from now on. None: the owner's."""
        follower = router if router is not None and router != self.owner else None
        self._over.pop(attempt_id, None)
        self.alone.pop(attempt_id, None)
        if follower is None:
            self._of.pop(attempt_id, None)
        else:
            self._of[attempt_id] = follower

    def follower_of(self, attempt_id: str) -> Peer | None:
        """The follower whose attempt it is, whether it lives or not. None: it is the owner's."""
        return self._of.get(attempt_id)

    def router_of(self, attempt_id: str) -> Peer | None:
        """The router that hears of the attempt. None: none does."""
        follower = self._of.get(attempt_id)
        if follower is None:
            return self.owner
        return follower if self.is_follower(follower) else None

    def is_of(self, attempt_id: str, router: Peer) -> bool:
        """Whether ``router`` may speak of the attempt."""
        follower = self._of.get(attempt_id)
        return router == (self.owner if follower is None else follower)

    def goes_on_alone(self, attempt_id: str, now: int) -> None:
        """The follower of an attempt is gone, and a client may ask another router for it."""
        self.alone[attempt_id] = now + self._keep_ns

    def overdue(self, now: int) -> list[str]:
        """Attempts for which no client has come in time."""
        return [attempt_id for attempt_id, until_ns in self.alone.items() if until_ns <= now]

    def ended(self, attempt_id: str) -> None:
        """The attempt is not here any more. It may still be spoken of in this event, or while it is handed over."""
        self.alone.pop(attempt_id, None)
        if attempt_id in self._of:
            self._over[attempt_id] = None

    def forget_ended(self, still_needed: Callable[[], set[str]]) -> None:
        """Everything of this event is said. ``still_needed``: ended attempts that may be spoken of later."""
        if self._over:
            needed = still_needed()
            for attempt_id in [name for name in self._over if name not in needed]:
                del self._over[attempt_id], self._of[attempt_id]

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`overdue` has something new to say. None: never."""
        return next(iter(self.alone.values()), None)

    # -- what is said

    def tokens(self, outputs: Sequence[TokenOutput]) -> list[EmitTokens | Send]:
        """New outputs, each to the router of its attempt. The host knows what to do with the owner's."""
        if not self._of:
            self._counts[None].answers_told += 1
            return [EmitTokens(list(outputs))]
        parts: dict[Peer | None, list[TokenOutput]] = {}
        for output in outputs:
            follower = self._of.get(output.request_id)
            if follower is None or self.is_follower(follower):
                parts.setdefault(follower, []).append(output)
        for follower in parts:
            self._counts[follower].answers_told += 1
        return [
            EmitTokens(part) if follower is None else Send(follower, Tokens(tuple(part)))
            for follower, part in parts.items()
        ]

    def refusal(self, action: RejectRequest) -> RejectRequest | Send | None:
        """That an attempt will not be run, as its router is told it. None: that router is gone."""
        follower = self._of.get(action.request_id)
        if follower is not None and not self.is_follower(follower):
            return None
        self._counts[follower].answers_told += 1
        if follower is None:
            return action
        return Send(follower, RequestRefused(action.request_id, action.reason, action.retry_after_s))

    # -- totals

    def counts(self, router: Peer | None) -> LinkCounts:
        """Those of a follower, or of the owner: None."""
        return self._counts[router if router in self._counts else None]

    def loads(self, load: Load) -> tuple[tuple[Peer, Load], ...]:
        """``load`` as each follower is told it."""
        told = []
        for peer, counts in ((peer, self._counts[peer]) for peer in self._followers.values()):
            totals = {"dispatches_heard": counts.dispatches_heard, "answers_told": counts.answers_told}
            told.append((peer, structs.replace(load, **totals)))
        return tuple(told)

    def owner_changes(self, owner: Peer | None) -> None:
        """Another owner has accepted the instance; None: it is no member for the time being."""
        self.owner, self._counts[None] = owner, LinkCounts()

    def reborn(self) -> None:
        """The instance begins anew: it knows no router, and no attempt of one."""
        self.owner_changes(None)
        self._followers.clear()
        self._of.clear()
        self._over.clear()
        self.alone.clear()
        self._counts = {None: LinkCounts()}

    def check_invariants(self, live: Iterable[str]) -> None:
        """Raise :class:`InvariantError` if the books do not agree. ``live``: all attempts that are here."""
        names = set(live)
        check(self._over.keys() <= self._of.keys(), "attempts are over, and of no follower")
        check(self.alone.keys() <= self._of.keys() & names, "attempts go on alone that are not here")
        stray = self._of.keys() - names - self._over.keys()
        check(not stray, "attempts of followers are not here: {}", stray)
        check(set(self._counts) == {None, *self._followers.values()}, "totals of links that are not there")
        for name in self.alone:
            check(not self.is_follower(self._of[name]), "{} goes on alone, and has a router", name)
