"""The way of a request from arrival to its place in the ledger, or to its rejection: this router's own, and guests'."""

from __future__ import annotations

from collections.abc import Callable

from memserve.cluster.admission import AdmissionController, Rejection
from memserve.cluster.answers import Answers
from memserve.cluster.guests import Guests
from memserve.cluster.outbox import Outbox, Timers
from memserve.cluster.placement import Placer
from memserve.cluster.report import Counters
from memserve.cluster.requests import Cause, RequestState, RequestTable
from memserve.types import FinishReason


class Arrivals:
    """Asks admission for each request, and acts on what it says."""

    def __init__(
        self,
        requests: RequestTable,
        admission: AdmissionController,
        guests: Guests,
        placer: Placer,
        answers: Answers,
        timers: Timers,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._requests, self._admission, self._placer, self._answers = requests, admission, placer, answers
        self._timers, self._outbox, self._counters = timers, outbox, counters
        self._guests = guests
        guests.enqueue = self._enqueue
        #: dispatch a request; end one that has begun
        self.place: Callable[[RequestState, int], None] = lambda _req, _now: None
        self.end: Callable[[RequestState, FinishReason, int], None] = lambda _req, _reason, _now: None

    def arrive(self, req: RequestState, now: int) -> None:
        """A new request: placed now, queued, or rejected."""
        self._requests.enter(req)
        self._enqueue(req, now)

    def _enqueue(self, req: RequestState, now: int) -> None:
        if self._admission.memory.wants_identities:
            self._placer.identities(req)
        rejection = self._admission.enqueue(req, now)
        if rejection is None:
            self._admit(now)
            if not self._admission.is_waiting(req):
                return
            rejection = self._admission.overflow(req)
        if rejection is not None:
            self.turn_away(rejection, now)
        until_ns = self._admission.wait_until_ns(req)
        if until_ns is not None:
            self._timers.arm(until_ns, self._waited, req)

    def admit_waiting(self, now: int) -> None:
        """Admit and place queued requests as long as there is room."""
        if self._admission.is_idle(now):
            return
        self._admit(now)
        while (rejection := self._admission.excess()) is not None:
            self.turn_away(rejection, now)

    def _admit(self, now: int) -> None:
        while not self._admission.is_idle(now):
            while (req := self._admission.admit(now)) is not None:
                req.move(Cause.ADMITTED)
                if req.is_guest:
                    self._guests.admitted(req, now)
                else:
                    self.place(req, now)
            rejection = self._admission.hopeless(now)
            if rejection is None:
                return
            self.turn_away(rejection, now)

    def _waited(self, req: RequestState, now: int) -> None:
        rejection = self._admission.waited(req, now)
        if rejection is not None:
            self.turn_away(rejection, now)

    def turn_away(self, rejection: Rejection, now: int) -> None:
        """Admission has decided."""
        if rejection.req.is_guest:
            self._guests.turned_away(rejection, now)
        elif rejection.req.has_begun:  # an expelled follower has asked for it again
            self._counters.requests_failed += 1
            self.end(rejection.req, FinishReason.ERROR, now)
        else:
            self.reject(rejection.req, rejection.reason, rejection.retry_after_s, now, overloaded=rejection.is_overload)

    def reject(
        self, req: RequestState, reason: str, retry_after_s: float | None, now: int, *, overloaded: bool = False
    ) -> None:
        """``req``, of which its client has nothing, will not be run. ``retry_after_s`` None: it can never run."""
        self._counters.requests_rejected += 1
        self._outbox.reject(req.request_id, reason, retry_after_s, overloaded)
        self._requests.leave(req, Cause.REJECTED)
        self._admission.release(req, now)
        if req.request.key:
            self._answers.over(req.request_id, now)
