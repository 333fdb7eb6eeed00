"""Admission at a follower: it asks the owner, which has queue and ledger (``router/admission/remote_requests.py``).

::

    enqueue --AdmissionRequest--> WAITS --grant--> active --over--> released      rejected, or unanswered for too long
                                             |  ^
                              expelled: asks |  | grant                       it runs nowhere meanwhile

What is granted is dispatched under a lease alone, also after a failure. The lease is renewed with each heartbeat, and
counts from when the heartbeat was sent: when the owner takes this follower to be dead, it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.protocol.admission import AdmissionGrants, AdmissionRequest, AdmissionRequests, AttemptPlacement
from memserve.protocol.peers import Peer
from memserve.router.admission.controller import FOLLOWERS_MAX, Rejection, RequestAdmission
from memserve.router.admission.memory_budget import MemoryBudget
from memserve.router.admission.needs import RETRY_MIN_S
from memserve.router.members.loads import Ints, LoadTable
from memserve.router.members.registry import Member, Registry
from memserve.router.requests.requests import Attempt, RequestPhase, RequestState

SENT_MAX = 64
"""Messages whose answers are waited for; an older one renews no lease."""


@dataclass(slots=True)
class _PendingRequest:
    """A request that the owner knows, or is to know."""

    number: int
    req: RequestState
    returns: bool = False
    is_granted: bool = False
    peers: tuple[Peer, ...] = ()
    """Where the owner keeps room for it."""
    attempts: int = 0
    place: AttemptPlacement | None = None
    """The last attempt, with memory-aware admission."""
    completed: bool = False

    def to_message(self) -> AdmissionRequest:
        """As the owner is told."""
        request = structs.replace(self.req.request, deadline_ns=None, key="", asked="")
        emitted = max(map(len, self.req.emitted))
        return AdmissionRequest(self.number, request, emitted, self.is_granted, self.returns)


class RemoteAdmission(RequestAdmission):
    """A follower's: requests are admitted in the order of the owner's grants."""

    def __init__(self, config: ClusterConfig, registry: Registry, loads: LoadTable) -> None:
        admission = config.admission
        super().__init__(admission, GrantedMemory(self, config.policy, registry, loads))
        self._reports_placements = admission.counts_memory
        #: the owner decides first, then what it says may be lost
        self._wait_ns = admission.wait_ns + config.dead_after_ns
        self._owner: Peer | None = None
        self._lease_until_ns = 0
        self._numbers = self._serial = 0
        self._by_request: dict[str, _PendingRequest] = {}
        self._by_number: dict[int, _PendingRequest] = {}
        self._granted: deque[_PendingRequest] = deque()  # those that are not active yet
        self._sent_ns: dict[int, int] = {}  # by serial
        #: serial of the first whole news to this owner; None: it has answered such
        self._full_report_serial: int | None = None
        # not told yet
        self._unsent_requests: dict[int, _PendingRequest] = {}
        self._unsent_placements: dict[int, AttemptPlacement] = {}
        self._unsent_ends: list[tuple[int, bool]] = []

    # -- as ``Arrivals`` asks

    def enqueue_request(self, req: RequestState, now_ns: int) -> Rejection | None:
        """``req`` is asked for."""
        self._waiting_since_ns[req.request_id] = now_ns
        self._request_admission(req, returns=False)
        return None

    def _request_admission(self, req: RequestState, *, returns: bool) -> None:
        self._numbers += 1
        entry = _PendingRequest(self._numbers, req, returns)
        self._by_request[req.request_id] = self._by_number[entry.number] = self._unsent_requests[entry.number] = entry

    def admit_next(self, now_ns: int) -> RequestState | None:
        """The next one that was granted."""
        if not self._granted or not self._has_lease(now_ns):
            return None
        req = self._granted.popleft().req
        self._mark_active(req, now_ns)
        self.stats.waited_ns += now_ns - self._waiting_since_ns.pop(req.request_id)
        return req

    def _has_lease(self, now_ns: int) -> bool:
        return now_ns < self._lease_until_ns

    def may_place(self, req: RequestState, now_ns: int) -> bool:
        """Whether the owner counts ``req``, and does so still."""
        return self._by_request[req.request_id].is_granted and self._has_lease(now_ns)

    def reject_overflow(self, new_request: RequestState) -> Rejection | None:
        """The owner rejects what is too much; only while it does not answer, too many may wait here."""
        most = self._config.waiting_max + (self._config.active_max or FOLLOWERS_MAX)
        self.stats.queued += 1
        if len(self._waiting_since_ns) <= most:
            return None
        reason = (
            f"{len(self._waiting_since_ns)} requests wait for the owner, which decides on admission; at most {most} may"
        )
        return self._make_rejection(new_request, "queue", reason, RETRY_MIN_S)

    def reject_timed_out(self, req: RequestState, now_ns: int) -> Rejection | None:
        """The timer of a request that waits."""
        until_ns = self.wait_until_ns(req)
        if until_ns is None or now_ns < until_ns:
            return None
        reason = f"not admitted within {self._wait_ns / 1e9:g} s: the owner, which decides that, does not answer"
        return self._make_rejection(req, "wait", reason, RETRY_MIN_S)

    def waiting_by_tenant(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        tenants: dict[str, int] = {}
        for name in self._waiting_since_ns:
            tenant = self._by_request[name].req.request.tenant
            tenants[tenant] = tenants.get(tenant, 0) + 1
        return tenants

    def release_request(self, req: RequestState, now_ns: int) -> None:
        """``req`` has ended: the owner hears it."""
        entry = self._by_request.pop(req.request_id)
        del self._by_number[entry.number]
        self._waiting_since_ns.pop(req.request_id, None)
        if entry in self._granted:
            self._granted.remove(entry)
        if self._active_since_ns.pop(req.request_id, None) is not None:
            self.stats.released += 1
        self._unsent_placements.pop(entry.number, None)
        if self._unsent_requests.pop(entry.number, None) is None:
            self._unsent_ends.append((entry.number, entry.completed))

    # -- where they run

    def record_attempt(self, req: RequestState, attempt: Attempt) -> _PendingRequest:
        """``attempt`` is under way."""
        entry = self._by_request[req.request_id]
        entry.attempts, entry.completed = entry.attempts + 1, False
        peers = tuple(member.peer for member in attempt.involved)
        emitted = max(map(len, req.emitted))
        self.record_placement(
            entry, AttemptPlacement(entry.number, entry.attempts, peers, attempt.holders, emitted=emitted)
        )
        return entry

    def record_placement(self, entry: _PendingRequest, place: AttemptPlacement) -> None:
        """What the owner counts for a request is elsewhere, or less."""
        if self._reports_placements and entry.place != place and self._by_number.get(place.number) is entry:
            entry.place = self._unsent_placements[place.number] = place

    def granted_peers(self, req: RequestState) -> tuple[Peer, ...]:
        """Where the owner keeps room for ``req``, until its first attempt has failed."""
        entry = self._by_request[req.request_id]
        return entry.peers if not entry.attempts else ()

    # -- the owner

    def on_owner_accepts(self, owner: Peer) -> None:
        """This follower is a member of ``owner``'s cluster. A new owner has to hear what the last one granted."""
        if owner != self._owner:
            self._owner, self._full_report_serial = owner, self._serial + 1
            self._unsent_requests = dict(self._by_number)

    def on_expelled(self) -> None:
        """The owner counts nothing of this follower any more, and instances run nothing for it."""
        self._owner, self._lease_until_ns = None, 0
        self._sent_ns.clear()
        self._granted.clear()
        self._unsent_requests, self._unsent_placements, self._unsent_ends = {}, {}, []
        former, self._by_number, self._by_request = list(self._by_number.values()), {}, {}
        for entry in former:
            self._request_admission(entry.req, returns=entry.req.request_id in self._active_since_ns)

    def on_grants(self, sender: Peer, message: AdmissionGrants, now_ns: int) -> list[Rejection]:
        """The owner has decided. Returns what it has rejected; what it has granted is for :meth:`admit_next`, or may be
        placed."""
        if sender != self._owner:
            return []  # late: that owner is gone
        sent_ns = self._sent_ns.get(message.serial)
        if sent_ns is not None:
            self._lease_until_ns = max(self._lease_until_ns, sent_ns + message.lease_ns)
        if self._full_report_serial is not None and message.serial >= self._full_report_serial:
            self._full_report_serial = None
        rejected: dict[int, Rejection] = {}
        for grant in message.grants:
            entry = self._by_number.get(grant.number)
            if entry is None or entry.is_granted or grant.number in rejected:
                continue  # it has ended meanwhile, or this comes twice
            if grant.cause:
                rejected[grant.number] = self._make_rejection(entry.req, grant.cause, grant.reason, grant.retry_after_s)
                continue
            entry.is_granted, entry.peers = True, grant.at
            if entry.req.phase is RequestPhase.QUEUED:
                self._granted.append(entry)
        return [*rejected.values()]

    # -- speaking

    def take_owner_message(self, now_ns: int, *, beats: bool) -> AdmissionRequests | None:
        """What the owner is to be told now. None: nothing. ``beats``: with a heartbeat all is told again that may have
        been lost."""
        is_first = self._full_report_serial == self._serial + 1
        if self._owner is None or not (
            beats or is_first or self._unsent_requests or self._unsent_placements or self._unsent_ends
        ):
            return None
        self._serial += 1
        self._sent_ns[self._serial] = now_ns
        for serial in [serial for serial in self._sent_ns if serial <= self._serial - SENT_MAX]:
            del self._sent_ns[serial]
        asks, places, is_whole = self._unsent_requests, self._unsent_placements, self._full_report_serial is not None
        if beats or is_whole:
            asks = {number: entry for number, entry in self._by_number.items() if is_whole or not entry.is_granted}
            places = {number: entry.place for number, entry in self._by_number.items() if entry.place is not None}
        message = AdmissionRequests(
            self._serial,
            tuple(item.to_message() for item in asks.values()),
            tuple(places.values()),
            tuple(self._unsent_ends),
            tuple(self._by_number) if beats or is_whole else None,
            is_whole,
        )
        self._unsent_requests, self._unsent_placements, self._unsent_ends = {}, {}, []
        return message

    def check_invariants(self, requests: Mapping[str, RequestState]) -> None:
        """Raise :class:`InvariantError` unless every live request is asked for, or granted."""
        check(self._by_request.keys() == requests.keys(), "{} are asked for, not {}", self._by_request, requests)
        check({entry.number for entry in self._by_request.values()} == self._by_number.keys(), "numbers do not agree")
        queued = {name for name, req in requests.items() if req.phase is RequestPhase.QUEUED}
        check(queued == self._waiting_since_ns.keys(), "{} wait, not {}", self._waiting_since_ns, queued)
        check(self._active_since_ns.keys() == requests.keys() - queued, "{} are active", self._active_since_ns)
        check(
            self.stats.admitted == self.stats.released + len(self._active_since_ns),
            "an admitted request was not released once",
        )
        granted = {entry.req.request_id for entry in self._by_request.values() if entry.is_granted}
        check(
            {entry.req.request_id for entry in self._granted} == granted & queued,
            "what is granted does not wait for it",
        )
        for name, req in requests.items():
            check(req.attempt is None or name in granted, "{} runs, and was not granted", name)


def remote_admission_for(config: ClusterConfig, registry: Registry, loads: LoadTable) -> RemoteAdmission | None:
    """Of a follower. None: there is no admission."""
    return RemoteAdmission(config, registry, loads) if config.admission.shared_mode else None


class GrantedMemory(MemoryBudget):
    """Counts nothing itself: the owner does, and is told what runs where."""

    def __init__(self, admission: RemoteAdmission, policy: str, registry: Registry, loads: LoadTable) -> None:
        super().__init__(AdmissionConfig(), policy, registry, loads)
        self._admission = admission
        self._by_attempt: dict[str, _PendingRequest] = {}

    def filter_by_room(self, req: RequestState, role: Role, numbers: Ints) -> Ints:
        """Those of ``numbers`` where the owner keeps room for ``req``; all of them where it keeps none there."""
        granted_numbers = {self._registry_number(peer) for peer in self._admission.granted_peers(req)}
        within = numbers[[number in granted_numbers for number in numbers.tolist()]]
        return within if len(within) else numbers

    def _registry_number(self, peer: Peer) -> int:
        member = self._registry.get(peer)
        return -1 if member is None else member.number

    def reserve_for_attempt(self, req: RequestState, attempt: Attempt) -> list[str]:
        """The owner hears where ``attempt`` runs."""
        self._by_attempt[attempt.attempt_id] = self._admission.record_attempt(req, attempt)
        return []

    def on_prefilled(self, attempt: Attempt) -> None:
        """The prompt of ``attempt`` is computed."""
        self._report_placement(attempt, prefilled=True)

    def on_handed_over(self, attempt: Attempt) -> None:
        """The decode instance has all KV of ``attempt``."""
        if attempt.decode_at is not None:
            self._report_placement(attempt, at=(attempt.decode_at.peer,), prefilled=True)

    def release_attempt(self, attempt: Attempt, *, completed: bool) -> int:
        """``attempt`` is over."""
        self._by_attempt[attempt.attempt_id].completed = completed
        self._report_placement(attempt, at=())
        del self._by_attempt[attempt.attempt_id]
        return 0

    def _report_placement(self, attempt: Attempt, **changes: object) -> None:
        entry = self._by_attempt[attempt.attempt_id]
        if entry.place is not None:
            self._admission.record_placement(entry, structs.replace(entry.place, **changes))

    def has_room_at(self, req: RequestState, member: Member) -> bool:
        """Whether ``req`` may go on where it runs already."""
        return True
