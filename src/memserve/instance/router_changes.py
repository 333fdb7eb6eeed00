"""What becomes of an instance's requests when their router is gone, or when a client asks another one for the answer.

::

    its follower is gone     answer kept: it goes on alone, for ``kept_answer_ns``       else it ends silently
    another owner came       answer kept: it goes on here, and the owner is told         else it ends silently
    AskAnswers(key, asked)   it goes on here for the router that asks; the former one hears ``AnswerTaken``
"""

from __future__ import annotations

from msgspec import structs

from memserve.answers import AnswerHeld, AnswersHeld, AnswerTaken
from memserve.instance.fetching import Fetches
from memserve.instance.handoff_sender import HandoffSender
from memserve.instance.kept import KeptAnswers
from memserve.instance.routers import Routers
from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.sequence import Group
from memserve.kv_transfer.exchange import Exchange
from memserve.messages import Peer
from memserve.serving import Send


class RouterChanges:
    """Follows the routers' fates with the requests that they have placed here."""

    __slots__ = ("_answers", "_exchange", "_fetches", "_kept", "_routers", "_sender", "_state", "me")

    def __init__(
        self,
        state: SchedulerState,
        kept: KeptAnswers,
        routers: Routers,
        sender: HandoffSender,
        fetches: Fetches,
        exchange: Exchange,
        me: Peer,
    ) -> None:
        #: the present incarnation of this instance
        self.me = me
        self._state, self._kept, self._routers = state, kept, routers
        self._sender, self._fetches, self._exchange = sender, fetches, exchange
        self._answers: list[Send] = []

    # -- a router is gone

    def follower_gone(self, follower: Peer, now: int) -> None:
        """A follower died or left."""
        for group in list(self._state.groups.values()):
            if group.remote is not None and self._routers.follower_of(group.request.request_id) == follower:
                self._goes_on_alone(group, now)

    def arrived(self, attempt_id: str, now: int) -> None:
        """An attempt was handed over to this instance; its router may be gone meanwhile."""
        group = self._state.groups.get(attempt_id)
        if group is not None and self._routers.router_of(attempt_id) is None:
            self._goes_on_alone(group, now)

    def _goes_on_alone(self, group: Group, now: int) -> None:
        """One that is under way to this instance is decided about when it has arrived."""
        remote, attempt_id = group.remote, group.request.request_id
        if self._routers.follower_of(attempt_id) is None:
            return  # the owner's, which may come again
        if self._kept.runs(attempt_id) and not group.muted:
            self._routers.goes_on_alone(attempt_id, now)
        elif remote is None or remote.import_id is None or not group.request.key:
            self._state.drop_group(group)

    def settle(self, now: int) -> None:
        """End attempts without a router for which no client has come."""
        for attempt_id in self._routers.overdue(now):
            self._state.drop_group(self._state.groups[attempt_id])

    def owner_gone(self) -> None:
        """Another owner has accepted the instance: requests that no follower has placed go on here, or end."""
        for group in list(self._state.groups.values()):
            attempt_id = group.request.request_id
            owners = group.remote is not None and self._routers.follower_of(attempt_id) is None
            if owners and not self._stays(group, "another router came"):
                self._state.drop_group(group)
        for attempt_id in [one for one in self._sender.left.values() if self._routers.follower_of(one) is None]:
            self._sender.cancel(attempt_id)

    def goes_on_without_transfers(self, group: Group) -> bool:
        """The router is another one, and all transfers have ended: ``group`` goes on without, if its answer is kept and
        its prompt is computed here."""
        remote = group.remote
        if remote is None or not self._may_stay(group):
            return False
        remote.offer_id = remote.home = None
        if group.tokens_here is not None:
            self._sender.go_on_here(group, "another router came")
        self._fetches.go_on_without(group)
        return True

    # -- a client asks elsewhere

    def asked(self, key: str, asked: str, router: Peer) -> None:
        """A client asks ``router`` for the answer with this key: what is here of it is told, and runs on for it. Where
        the key is another request's, that one goes on as it is."""
        answers = [self._take(held, router) for held in self._kept.with_key(key, asked)]
        is_anothers = self._kept.answers_another(key, asked)
        for attempt_id, group in self._state.groups.items():
            if group.request.key != key:
                continue
            if group.request.asked != asked:
                is_anothers = True
                continue
            former = self._routers.router_of(attempt_id) if group.span is not None else None
            if former is not None and former != router:
                self._answers.append(Send(former, AnswerTaken(attempt_id)))  # no part of it can go on for another
        refused = asked if is_anothers else ""
        self._answers.append(Send(router, AnswersHeld(tuple(answers), True, key, refused)))

    def _take(self, held: AnswerHeld, router: Peer) -> AnswerHeld:
        attempt_id = held.attempt_id
        group, former = self._state.groups.get(attempt_id), self._routers.router_of(attempt_id)
        if group is None and attempt_id not in self._sender.left.values():
            return held  # it has ended
        if former != router and former is not None:
            self._answers.append(Send(former, AnswerTaken(attempt_id)))
        if group is not None and self._stays(group, "another router has asked for it"):
            self._routers.begins(attempt_id, router)
            return held
        if group is not None:
            self._state.drop_group(group)
        self._sender.cancel(attempt_id)  # it is on its way to another instance: it cannot be called back there
        return structs.replace(held, runs=False)

    def take_answers(self) -> list[Send]:
        """What routers have asked for: before any further token of those answers."""
        answers, self._answers = self._answers, []
        return answers

    # -- going on here

    def _may_stay(self, group: Group) -> bool:
        remote = group.remote
        runs = self._kept.runs(group.request.request_id)
        return runs and remote is not None and remote.import_id is None and not group.muted

    def _stays(self, group: Group, why: str) -> bool:
        """Whether ``group`` goes on, on this instance alone: a router that takes it over knows of no other."""
        remote = group.remote
        if remote is None or not self._may_stay(group):
            return False
        if remote.offer_id is not None:
            self._exchange.withdraw(remote.offer_id, why)
            remote.offer_id = None
        if group.tokens_here is not None:
            self._sender.go_on_here(group, why)
        return True
