"""The way of a request through admission: admitted now, or after others, or rejected; of this router, or remote.

Routers with instances and routers of engines ask the same way. They differ in what becomes of a request of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.router.admission.controller import Rejection, RequestAdmission
from memserve.router.admission.remote_requests import RemoteRequests
from memserve.router.outbox import Timers
from memserve.router.requests.requests import RequestCause, RequestState


class AdmissionQueue:
    """Asks admission for each request, and acts on what it says."""

    def __init__(
        self,
        admission: RequestAdmission,
        timers: Timers,
        remote_requests: RemoteRequests,
        place: Callable[[RequestState, int], None],
        reject: Callable[[Rejection, int], None],
    ) -> None:
        """``place``, ``reject``: called with a request of this router that is admitted, or is not."""
        self._admission, self._timers, self._remote_requests = admission, timers, remote_requests
        self._place, self._reject = place, reject

    def enqueue_request(self, req: RequestState, now_ns: int) -> None:
        """Ask for admission: admitted now, queued, or rejected."""
        rejection = self._admission.enqueue_request(req, now_ns)
        if rejection is None:
            self._admit_queued(now_ns)
            # it was admitted at once, or rejected as one that fits nowhere
            if not self._admission.is_waiting(req):
                return
            rejection = self._admission.reject_overflow(req)
        if rejection is not None:
            self.handle_rejection(rejection, now_ns)
        until_ns = self._admission.wait_until_ns(req)
        if until_ns is not None:
            self._timers.arm(until_ns, self._on_wait_over, req)

    def admit_waiting(self, now_ns: int) -> None:
        """Admit queued requests as long as there is room."""
        if self._admission.is_idle(now_ns):
            return
        self._admit_queued(now_ns)
        # none was rejected while admission was closed
        while (rejection := self._admission.reject_over_limit()) is not None:
            self.handle_rejection(rejection, now_ns)

    def _admit_queued(self, now_ns: int) -> None:
        while not self._admission.is_idle(now_ns):
            while (req := self._admission.admit_next(now_ns)) is not None:
                req.change_phase(RequestCause.ADMITTED)
                if req.is_remote:
                    self._remote_requests.on_admitted(req, now_ns)
                else:
                    self._place(req, now_ns)
            rejection = self._admission.reject_unservable(now_ns)
            if rejection is None:
                return
            self.handle_rejection(rejection, now_ns)

    def _on_wait_over(self, req: RequestState, now_ns: int) -> None:
        rejection = self._admission.reject_timed_out(req, now_ns)
        if rejection is not None:
            self.handle_rejection(rejection, now_ns)

    def handle_rejection(self, rejection: Rejection, now_ns: int) -> None:
        """Admission has decided."""
        if rejection.req.is_remote:
            self._remote_requests.on_rejected(rejection, now_ns)
        else:
            self._reject(rejection, now_ns)
