"""Admission before engines: of one router, or of several, whose limits hold for all of them together.

::

    follower's Fleet ---- AdmissionRequests ---> owner's Fleet      queue and limits: AdmissionController
    RemoteAdmission  <--- AdmissionGrants -----  RemoteRequests

The rules are those of routers with instances (``router/admission``). Only the link differs: a connection on one host,
which keeps the order, loses nothing, and ends with the process at its other end. A follower that dies holds nothing
from then on: what it had admitted is the others' again, and the engines see its connections close.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.base.config import ClusterConfig, MemberConfig
from memserve.base.types import Role
from memserve.fleet.messages import RouterJoined, RouterLeft
from memserve.protocol.admission import AdmissionGrants, AdmissionRequests
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.admission.admission_queue import AdmissionQueue
from memserve.router.admission.controller import AdmissionController, Rejection, RequestAdmission
from memserve.router.admission.follower import remote_admission_for
from memserve.router.admission.remote_requests import AdmissionTables, RemoteRequests
from memserve.router.follower import NO_KV
from memserve.router.members.loads import LoadTable
from memserve.router.members.registry import Registry
from memserve.router.outbox import Outbox, Timers
from memserve.router.report import AdmissionStats
from memserve.router.requests.requests import RequestState

BEAT_NS = MemberConfig().beat_ns
"""A follower's lease is renewed so often: an owner that stands still has it admit nothing more."""


class FleetAdmission:
    """Requests up to their admission, whichever router they came to."""

    def __init__(
        self,
        config: ClusterConfig,
        loads: LoadTable,
        timers: Timers,
        place: Callable[[RequestState, int], None],
        reject: Callable[[Rejection, int], None],
        *,
        is_follower: bool,
    ) -> None:
        """``place``, ``reject``: called with a request of this router that is admitted, or is not. ``is_follower``:
        another router has the queue, if there is any admission."""
        self._registry, self._timers, self._outbox = Registry(), timers, Outbox(remembers=False)
        self._asks = remote_admission_for(config, self._registry, loads) if is_follower else None
        owner = AdmissionController(config.admission, config.policy, self._registry, loads)
        self._admission: RequestAdmission = self._asks or owner
        tables = AdmissionTables(config, self._registry, self._admission, timers, self._outbox)
        self._remote_requests = RemoteRequests(tables, self, None)
        self._queue = AdmissionQueue(self._admission, timers, self._remote_requests, place, reject)
        #: this router's own that wait or are active
        self._requests: dict[str, RequestState] = {}
        self._owner: Peer | None = None
        self._beat_is_due = False

    # -- requests

    def add_request(self, req: RequestState, now_ns: int) -> None:
        """A new request of this router: admitted now, queued, or rejected."""
        self._requests[req.request_id] = req
        self.enqueue_request(req, now_ns)

    def enqueue_request(self, req: RequestState, now_ns: int) -> None:
        """Ask for admission: admitted now, queued, or rejected."""
        self._queue.enqueue_request(req, now_ns)

    def admit_waiting(self, now_ns: int) -> None:
        """Admit queued requests as long as there is room."""
        self._queue.admit_waiting(now_ns)

    def release_request(self, req: RequestState, now_ns: int) -> None:
        """``req`` has ended, however it did; it may have ended before it asked for admission."""
        if self._requests.pop(req.request_id, None) is not None:
            self._admission.release_request(req, now_ns)

    # -- other routers

    def on_router_joined(self, event: RouterJoined, now_ns: int) -> None:
        """A follower, which asks from now on; for a follower: the owner, which it asks."""
        if self._asks is None:
            info = PeerInfo(event.peer, Role.ROUTER, "", "", NO_KV, 0, 0, 0, False)
            self._registry.add_member(info, now_ns)
            return
        self._owner = event.peer
        self._asks.on_owner_accepts(event.peer)
        self._timers.arm(now_ns + BEAT_NS, self._on_beat, event.peer)

    def on_router_left(self, event: RouterLeft, now_ns: int) -> None:
        """Its connection has ended, as it does when its process does. What a follower had is released; without the
        owner nothing more is admitted, and what was goes on."""
        member = self._registry.get(event.peer)
        if member is not None:
            self._remote_requests.on_member_removed(member, now_ns)
            self._registry.remove_member(member)
        elif event.peer == self._owner:
            self._owner = None

    def _on_beat(self, owner: Peer, now_ns: int) -> None:
        if owner == self._owner:
            self._beat_is_due = True
            self._timers.arm(now_ns + BEAT_NS, self._on_beat, owner)

    def on_message(self, event: MessageArrived, now_ns: int) -> None:
        """Another router asks, or has decided."""
        member = self._registry.get(event.sender)
        if self._asks is not None and isinstance(event.message, AdmissionGrants):
            for rejection in self._asks.on_grants(event.sender, event.message, now_ns):
                self._queue.handle_rejection(rejection, now_ns)
        elif member is not None and isinstance(event.message, AdmissionRequests):
            self._remote_requests.on_requests(member, event.message, now_ns)

    def take_messages(self, now_ns: int) -> list[Send]:
        """What other routers are to be told of this event."""
        if self._asks is None:
            self._remote_requests.send_grants()
            return [action for action in self._outbox.take_actions() if isinstance(action, Send)]
        if self._owner is None:
            return []  # the next one is told all
        message = self._asks.take_owner_message(now_ns, beats=self._beat_is_due)
        self._beat_is_due = False
        return [] if message is None else [Send(self._owner, message)]

    # -- looking

    def snapshot(self) -> AdmissionStats:
        """Totals and gauges; the owner's are of all routers."""
        return self._admission.snapshot()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        self._registry.check_invariants()
        self._remote_requests.check_invariants()
        self._admission.check_invariants(self._requests | self._remote_requests.by_id)
