"""Remote requests: those of followers in the owner's queue and ledger, which hold for all routers together.

::

    ask --> QUEUED --admitted: the grant names instances with room--> UNPLACED, PREFILLING ... as its follower tells
               |                                                          |
               +--rejected                                                +--over, or its follower is gone--> released

Remote requests wait, take turns and are rejected as the owner's own requests are. Nothing is dispatched for them here.
A new owner admits nothing until each follower that it remembers has told what the last owner had granted to it, or is
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from memserve.base.config import ClusterConfig
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.protocol.admission import (
    AdmissionGrant,
    AdmissionGrants,
    AdmissionRequest,
    AdmissionRequests,
    AttemptPlacement,
)
from memserve.protocol.peers import Holder, Peer
from memserve.router.admission.controller import AdmissionController, Rejection, RequestAdmission
from memserve.router.admission.needs import with_operator_settings
from memserve.router.members.registry import Member, MemberState, Registry
from memserve.router.outbox import Outbox, Timers
from memserve.router.parts import QueueFlow, RouterParts
from memserve.router.placement.candidates import Candidate, Route
from memserve.router.placement.placer import Placement
from memserve.router.requests.requests import Attempt, RequestCause, RequestPhase, RequestState, RequestTable

LEASE_SHARE = 2
"""Of the time after which a silent follower is taken to be dead, its lease lasts one Nth: clocks may differ, and the
owner's may have stood still for the rest."""


@dataclass(slots=True)
class _RemoteRequest:
    """A request of a follower."""

    peer: Peer
    number: int
    req: RequestState
    attempt: int = 0
    """The one that its follower has told of last; 0: none, what the ledger counts is the grant."""


@dataclass(slots=True)
class _Follower:
    """What the owner has heard of a follower."""

    serial: int = 0
    remote_requests: dict[int, _RemoteRequest] = field(default_factory=dict)
    grants: list[AdmissionGrant] = field(default_factory=list)
    """Not yet sent."""
    is_known: bool = False
    """It has told of all that it has at least once."""
    is_answered: bool = True


@dataclass(frozen=True, slots=True)
class AdmissionTables:
    """What the owner admits by."""

    config: ClusterConfig
    registry: Registry
    admission: RequestAdmission
    timers: Timers
    outbox: Outbox


class RemoteAttempts:
    """Where remote requests run, for an owner that has instances."""

    def __init__(self, parts: RouterParts, requests: RequestTable) -> None:
        self._admission, self._placer, self._requests = parts.admission, parts.placer, requests
        self._sessions, self._named_prefixes = parts.sessions, parts.named_prefixes

    def choose_placement(self, req: RequestState) -> Placement | None:
        """Instances with room for ``req``. None: room is not counted."""
        return self._placer.choose_placement(req) if self._admission.memory.is_counting else None

    def start_attempt(
        self, req: RequestState, members: Sequence[Member], holders: tuple[Holder, ...], now_ns: int
    ) -> None:
        """``req`` runs at ``members``: room is kept for it there."""
        first, decode_at = members[0], members[1] if len(members) > 1 else None
        number = self._requests.next_number()
        candidate = Candidate(first.number, first.name, first.info.role, first.info.host_id)
        route = Route(candidate, None, "its follower decides")
        name = f"{req.request_id}#{number}"
        req.attempt = attempt = Attempt(
            name, number, first, decode_at, holders, route, now_ns, now_ns, list(members), []
        )
        req.change_phase(RequestCause.DISPATCHED)
        for handle in self._admission.memory.reserve_for_attempt(req, attempt):
            self._named_prefixes.evict_pin(handle)
        self._sessions.record_route(req.request.tenant, req.request.session, attempt.involved)


class RemoteRequests:
    """All and only the remote requests that have not ended."""

    def __init__(self, tables: AdmissionTables, flow: QueueFlow, attempts: RemoteAttempts | None) -> None:
        """``attempts`` None: there are no instances, and where requests run does not matter."""
        self._config, self._registry, self._admission = tables.config, tables.registry, tables.admission
        self._timers, self._outbox = tables.timers, tables.outbox
        self._flow, self._attempts = flow, attempts
        self._followers: dict[Peer, _Follower] = {}
        self._by_id: dict[str, _RemoteRequest] = {}
        self._unreported_followers: dict[
            Peer, None
        ] = {}  # followers of the last owner that have not told what they have

    @property
    def by_id(self) -> dict[str, RequestState]:
        """Remote requests by the names that they have here."""
        return {name: remote.req for name, remote in self._by_id.items()}

    # -- followers

    def wait_for_follower(self, follower: Peer) -> None:
        """``follower`` was one of the last owner's: until it has told what it has, nothing is admitted."""
        self._unreported_followers[follower] = None
        self._admission.is_closed = True

    def on_member_removed(self, member: Member, now_ns: int) -> None:
        """An instance, and with it the attempts that depend on it; or a follower, and with it its remote requests."""
        for remote in list(self._by_id.values()):
            attempt = remote.req.attempt
            if remote.peer == member.peer:
                self._end_request(remote, completed=False, now_ns=now_ns)
            elif attempt is not None and member in attempt.involved:
                self._abandon_attempt(remote, attempt)
        self._followers.pop(member.peer, None)
        self._on_follower_reported(member.peer)

    def _on_follower_reported(self, follower: Peer) -> None:
        self._unreported_followers.pop(follower, None)
        self._admission.is_closed = bool(self._unreported_followers)

    # -- what they tell

    def on_requests(self, member: Member, news: AdmissionRequests, now_ns: int) -> None:
        """``member``, a follower, tells of its requests."""
        if member.info.role is not Role.ROUTER:
            return
        follower = self._followers.setdefault(member.peer, _Follower())
        if news.serial <= follower.serial:
            return  # late, or twice: the next news tell all again
        follower.serial = news.serial
        for number, completed in news.over:
            self._end_request(follower.remote_requests.get(number), completed=completed, now_ns=now_ns)
        if news.open is not None:
            follower.is_answered = False
            open_numbers = set(news.open)
            for number in [number for number in follower.remote_requests if number not in open_numbers]:
                self._end_request(follower.remote_requests[number], completed=False, now_ns=now_ns)
        for ask in news.asks:
            earlier = follower.remote_requests.get(ask.number)
            if earlier is None:
                self._add_request(member.peer, follower, ask, now_ns)
            elif earlier.req.phase is not RequestPhase.QUEUED and not ask.is_admitted:
                follower.grants.append(self._make_grant(earlier))  # it was lost
        for place in news.places:
            remote = follower.remote_requests.get(place.number)
            if remote is not None and remote.req.phase is not RequestPhase.QUEUED:
                self._on_placement(remote, place, now_ns)
        follower.is_known |= news.is_whole
        reported_all = news.is_whole or news.open is not None
        if follower.is_known and reported_all and not any(self._is_back_soon(place) for place in news.places):
            self._on_follower_reported(member.peer)

    def _is_back_soon(self, place: AttemptPlacement) -> bool:
        """Whether an instance of ``place`` has not answered this owner yet: how much fits there is not known."""
        members = [self._registry.get(peer) for peer in place.at]
        return any(member is not None and member.state is MemberState.REJOINING for member in members)

    def _add_request(self, peer: Peer, follower: _Follower, ask: AdmissionRequest, now_ns: int) -> None:
        name = f"{peer.name}.{peer.generation}/{ask.number}"
        request = structs.replace(ask.request, request_id=name, deadline_ns=None, key="")
        req = RequestState(with_operator_settings(request, self._config.admission), now_ns, is_remote=True)
        req.emitted[0] = [0] * ask.emitted
        remote = self._by_id[name] = follower.remote_requests[ask.number] = _RemoteRequest(peer, ask.number, req)
        admission = self._admission
        assert isinstance(admission, AdmissionController)  # the owner's: no follower has remote requests
        if ask.is_admitted:
            req.change_phase(RequestCause.ADMITTED)
            admission.restore_active(remote.req, now_ns)
        elif ask.returns:
            admission.queue_for_readmission(req)
        else:
            self._flow.enqueue_request(req, now_ns)

    def _on_placement(self, remote: _RemoteRequest, place: AttemptPlacement, now_ns: int) -> None:
        req, attempt = remote.req, remote.req.attempt
        current_peers = () if attempt is None else tuple(member.peer for member in attempt.involved)
        is_same = remote.attempt in (0, place.attempt)
        if attempt is not None and is_same and attempt.decode_at is not None and place.at == current_peers[1:]:
            self._on_prefilled(req, attempt)
            self._admission.memory.on_handed_over(attempt)
            attempt.involved.remove(attempt.first)
            req.change_phase(RequestCause.HANDED_OVER)
        elif attempt is None or not is_same or place.at != current_peers or place.holders != attempt.holders:
            if attempt is not None:
                self._abandon_attempt(remote, attempt)
            members = [self._registry.get(peer) for peer in place.at]
            present_members = [member for member in members if member is not None and member.has_model]
            are_all_present = bool(present_members) and len(present_members) == len(members)
            if self._attempts is not None and are_all_present and not self._is_back_soon(place):
                req.emitted[0] = [0] * place.emitted
                self._attempts.start_attempt(req, present_members, place.holders, now_ns)
        remote.attempt = place.attempt
        if place.prefilled and req.attempt is not None:
            self._on_prefilled(req, req.attempt)

    def _on_prefilled(self, req: RequestState, attempt: Attempt) -> None:
        if req.phase is RequestPhase.PREFILLING:
            req.change_phase(RequestCause.PREFILLED)
            self._admission.memory.on_prefilled(attempt)

    # -- what becomes of them

    def on_admitted(self, req: RequestState, now_ns: int) -> None:
        """``req`` is admitted: instances with room are kept for it until its follower tells where it is."""
        remote = self._by_id[req.request_id]
        placement = self._attempts.choose_placement(req) if self._attempts is not None else None
        if self._attempts is not None and placement is not None:
            self._attempts.start_attempt(req, placement.members, placement.holders, now_ns)
        self._followers[remote.peer].grants.append(self._make_grant(remote))

    def _make_grant(self, remote: _RemoteRequest) -> AdmissionGrant:
        attempt = remote.req.attempt
        return AdmissionGrant(
            remote.number, () if attempt is None else tuple(member.peer for member in attempt.involved)
        )

    def on_rejected(self, rejection: Rejection, now_ns: int) -> None:
        """A remote request is rejected."""
        remote = self._by_id[rejection.req.request_id]
        grant = AdmissionGrant(remote.number, (), rejection.cause, rejection.reason, rejection.retry_after_s)
        self._followers[remote.peer].grants.append(grant)
        self._remove_request(remote, RequestCause.REJECTED, now_ns)

    def _end_request(self, remote: _RemoteRequest | None, *, completed: bool, now_ns: int) -> None:
        """``None``: it has ended already."""
        if remote is None:
            return
        attempt = remote.req.attempt
        if attempt is not None:
            remote.req.introduced[0] = completed
            held_ns = self._admission.memory.release_attempt(attempt, completed=completed)
            if held_ns:
                self._timers.arm(now_ns + held_ns, self._on_hold_ended, None)
        self._remove_request(remote, RequestCause.FINISHED, now_ns)

    def _remove_request(self, remote: _RemoteRequest, cause: RequestCause, now_ns: int) -> None:
        remote.req.change_phase(cause)
        del self._by_id[remote.req.request_id], self._followers[remote.peer].remote_requests[remote.number]
        self._admission.release_request(remote.req, now_ns)

    def _on_hold_ended(self, _: None, now_ns: int) -> None:
        self._flow.admit_waiting(now_ns)

    def _abandon_attempt(self, remote: _RemoteRequest, attempt: Attempt) -> None:
        self._admission.memory.release_attempt(attempt, completed=False)
        remote.req.change_phase(RequestCause.ATTEMPT_FAILED)
        remote.req.attempt = None

    # -- speaking

    def send_grants(self) -> None:
        """Tell followers what was decided in this event, and that they are members still."""
        for peer, follower in self._followers.items():
            if follower.grants or not follower.is_answered:
                lease_ns = self._config.dead_after_ns // LEASE_SHARE
                self._outbox.send(peer, AdmissionGrants(follower.serial, lease_ns, tuple(follower.grants)))
                follower.grants, follower.is_answered = [], True

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless all are those of members, and stand where their phase says."""
        listed = {
            remote.req.request_id
            for follower in self._followers.values()
            for remote in follower.remote_requests.values()
        }
        check(listed == self._by_id.keys(), "{} are remote requests, listed are {}", list(self._by_id), listed)
        check(
            self._admission.is_closed == bool(self._unreported_followers), "admission is closed, or open, for nothing"
        )
        for peer in (*self._followers, *self._unreported_followers):
            check(self._registry.get(peer) is not None, "{} has remote requests, and is no member", peer)
        for name, remote in self._by_id.items():
            phase, attempt = remote.req.phase, remote.req.attempt
            waits = phase in (RequestPhase.QUEUED, RequestPhase.UNPLACED)
            check(waits == (attempt is None), "{} is {}: {}", name, phase, attempt)
            for member in attempt.involved if attempt is not None else ():
                check(self._registry.get(member.peer) is member, "{} depends on {}, which is gone", name, member)
