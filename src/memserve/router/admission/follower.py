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
from memserve.base.types import Admission, Role
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
class _Asked:
    """A request that the owner knows, or is to know."""

    number: int
    req: RequestState
    returns: bool = False
    is_granted: bool = False
    at: tuple[Peer, ...] = ()
    """Where the owner keeps room for it."""
    attempts: int = 0
    place: AttemptPlacement | None = None
    """The last attempt, with memory-aware admission."""
    completed: bool = False

    def ask(self) -> AdmissionRequest:
        """As the owner is told."""
        request = structs.replace(self.req.request, deadline_ns=None, key="", asked="")
        emitted = max(map(len, self.req.emitted))
        return AdmissionRequest(self.number, request, emitted, self.is_granted, self.returns)


class RemoteAdmission(RequestAdmission):
    """A follower's: requests are admitted in the order of the owner's grants."""

    __slots__ = (
        "_by_number", "_by_request", "_granted", "_lease_until_ns", "_news", "_numbers", "_over", "_owner", "_places",
        "_sent_ns", "_serial", "_tells_places", "_whole",
    )  # fmt: skip

    def __init__(self, config: ClusterConfig, registry: Registry, loads: LoadTable) -> None:
        admission = config.admission
        super().__init__(admission, GrantedMemory(self, config.policy, registry, loads))
        self._tells_places = admission.mode in (Admission.MEMORY, Admission.CACHE)
        #: the owner decides first, then what it says may be lost
        self._wait_ns = admission.wait_ns + config.dead_after_ns
        self._owner: Peer | None = None
        self._lease_until_ns = 0
        self._numbers = self._serial = 0
        self._by_request: dict[str, _Asked] = {}
        self._by_number: dict[int, _Asked] = {}
        self._granted: deque[_Asked] = deque()  # those that are not active yet
        self._sent_ns: dict[int, int] = {}  # by serial
        #: serial of the first whole news to this owner; None: it has answered such
        self._whole: int | None = None
        # not told yet
        self._news: dict[int, _Asked] = {}
        self._places: dict[int, AttemptPlacement] = {}
        self._over: list[tuple[int, bool]] = []

    # -- as ``Arrivals`` asks

    def enqueue(self, req: RequestState, now_ns: int) -> Rejection | None:
        """``req`` is asked for."""
        self._waits_since[req.request_id] = now_ns
        self._ask(req, returns=False)
        return None

    def _ask(self, req: RequestState, *, returns: bool) -> None:
        self._numbers += 1
        asked = _Asked(self._numbers, req, returns)
        self._by_request[req.request_id] = self._by_number[asked.number] = self._news[asked.number] = asked

    def admit(self, now_ns: int) -> RequestState | None:
        """The next one that was granted."""
        if not self._granted or not self._has_lease(now_ns):
            return None
        req = self._granted.popleft().req
        self._activate(req, now_ns)
        self.stats.waited_ns += now_ns - self._waits_since.pop(req.request_id)
        return req

    def _has_lease(self, now_ns: int) -> bool:
        return now_ns < self._lease_until_ns

    def may_place(self, req: RequestState, now_ns: int) -> bool:
        """Whether the owner counts ``req``, and does so still."""
        return self._by_request[req.request_id].is_granted and self._has_lease(now_ns)

    def overflow(self, newcomer: RequestState) -> Rejection | None:
        """The owner rejects what is too much; only while it does not answer, too many may wait here."""
        most = self._config.waiting_max + (self._config.active_max or FOLLOWERS_MAX)
        self.stats.queued += 1
        if len(self._waits_since) <= most:
            return None
        reason = f"{len(self._waits_since)} requests wait for the owner, which decides on admission; at most {most} may"
        return self._reject(newcomer, "queue", reason, RETRY_MIN_S)

    def waited(self, req: RequestState, now_ns: int) -> Rejection | None:
        """The timer of a request that waits."""
        until_ns = self.wait_until_ns(req)
        if until_ns is None or now_ns < until_ns:
            return None
        reason = f"not admitted within {self._wait_ns / 1e9:g} s: the owner, which decides that, does not answer"
        return self._reject(req, "wait", reason, RETRY_MIN_S)

    def waiting(self) -> dict[str, int]:
        """Requests that wait, by tenant."""
        tenants: dict[str, int] = {}
        for name in self._waits_since:
            tenant = self._by_request[name].req.request.tenant
            tenants[tenant] = tenants.get(tenant, 0) + 1
        return tenants

    def release(self, req: RequestState, now_ns: int) -> None:
        """``req`` has ended: the owner hears it."""
        asked = self._by_request.pop(req.request_id)
        del self._by_number[asked.number]
        self._waits_since.pop(req.request_id, None)
        if asked in self._granted:
            self._granted.remove(asked)
        if self._active.pop(req.request_id, None) is not None:
            self.stats.left += 1
        self._places.pop(asked.number, None)
        if self._news.pop(asked.number, None) is None:
            self._over.append((asked.number, asked.completed))

    # -- where they run

    def placed(self, req: RequestState, attempt: Attempt) -> _Asked:
        """``attempt`` is under way."""
        asked = self._by_request[req.request_id]
        asked.attempts, asked.completed = asked.attempts + 1, False
        at = tuple(member.peer for member in attempt.involved)
        emitted = max(map(len, req.emitted))
        self.moved(asked, AttemptPlacement(asked.number, asked.attempts, at, attempt.holders, emitted=emitted))
        return asked

    def moved(self, asked: _Asked, place: AttemptPlacement) -> None:
        """What the owner counts for a request is elsewhere, or less."""
        if self._tells_places and asked.place != place and self._by_number.get(place.number) is asked:
            asked.place = self._places[place.number] = place

    def granted_at(self, req: RequestState) -> tuple[Peer, ...]:
        """Where the owner keeps room for ``req``, until its first attempt has failed."""
        asked = self._by_request[req.request_id]
        return asked.at if not asked.attempts else ()

    # -- the owner

    def owner_accepts(self, owner: Peer) -> None:
        """This follower is a member of ``owner``'s cluster. A new owner has to hear what the last one granted."""
        if owner != self._owner:
            self._owner, self._whole = owner, self._serial + 1
            self._news = dict(self._by_number)

    def expelled(self) -> None:
        """The owner counts nothing of this follower any more, and instances run nothing for it."""
        self._owner, self._lease_until_ns = None, 0
        self._sent_ns.clear()
        self._granted.clear()
        self._news, self._places, self._over = {}, {}, []
        former, self._by_number, self._by_request = list(self._by_number.values()), {}, {}
        for asked in former:
            self._ask(asked.req, returns=asked.req.request_id in self._active)

    def hear(self, sender: Peer, message: AdmissionGrants, now_ns: int) -> list[Rejection]:
        """The owner has decided. Returns what it has rejected; what it has granted is for :meth:`admit`, or may be
        placed."""
        if sender != self._owner:
            return []  # late: that owner is gone
        sent_ns = self._sent_ns.get(message.serial)
        if sent_ns is not None:
            self._lease_until_ns = max(self._lease_until_ns, sent_ns + message.lease_ns)
        if self._whole is not None and message.serial >= self._whole:
            self._whole = None
        rejected: dict[int, Rejection] = {}
        for grant in message.grants:
            asked = self._by_number.get(grant.number)
            if asked is None or asked.is_granted or grant.number in rejected:
                continue  # it has ended meanwhile, or this comes twice
            if grant.cause:
                rejected[grant.number] = self._reject(asked.req, grant.cause, grant.reason, grant.retry_after_s)
                continue
            asked.is_granted, asked.at = True, grant.at
            if asked.req.phase is RequestPhase.QUEUED:
                self._granted.append(asked)
        return [*rejected.values()]

    # -- speaking

    def news(self, now_ns: int, *, beats: bool) -> AdmissionRequests | None:
        """What the owner is to be told now. None: nothing. ``beats``: with a heartbeat all is told again that may have
        been lost."""
        is_first = self._whole == self._serial + 1
        if self._owner is None or not (beats or is_first or self._news or self._places or self._over):
            return None
        self._serial += 1
        self._sent_ns[self._serial] = now_ns
        for serial in [serial for serial in self._sent_ns if serial <= self._serial - SENT_MAX]:
            del self._sent_ns[serial]
        asks, places, is_whole = self._news, self._places, self._whole is not None
        if beats or is_whole:
            asks = {number: one for number, one in self._by_number.items() if is_whole or not one.is_granted}
            places = {number: one.place for number, one in self._by_number.items() if one.place is not None}
        message = AdmissionRequests(
            self._serial,
            tuple(asked.ask() for asked in asks.values()),
            tuple(places.values()),
            tuple(self._over),
            tuple(self._by_number) if beats or is_whole else None,
            is_whole,
        )
        self._news, self._places, self._over = {}, {}, []
        return message

    def check_invariants(self, requests: Mapping[str, RequestState]) -> None:
        """Raise :class:`InvariantError` unless every live request is asked for, or granted."""
        check(self._by_request.keys() == requests.keys(), "{} are asked for, not {}", self._by_request, requests)
        check({one.number for one in self._by_request.values()} == self._by_number.keys(), "numbers do not agree")
        queued = {name for name, req in requests.items() if req.phase is RequestPhase.QUEUED}
        check(queued == self._waits_since.keys(), "{} wait, not {}", self._waits_since, queued)
        check(self._active.keys() == requests.keys() - queued, "{} are active", self._active)
        check(self.stats.admitted == self.stats.left + len(self._active), "an admitted request was not released once")
        granted = {one.req.request_id for one in self._by_request.values() if one.is_granted}
        check({one.req.request_id for one in self._granted} == granted & queued, "what is granted does not wait for it")
        for name, req in requests.items():
            check(req.attempt is None or name in granted, "{} runs, and was not granted", name)


def asking_for(config: ClusterConfig, registry: Registry, loads: LoadTable) -> RemoteAdmission | None:
    """Of a follower. None: there is no admission."""
    return None if config.admission.mode is Admission.NONE else RemoteAdmission(config, registry, loads)


class GrantedMemory(MemoryBudget):
    """Counts nothing itself: the owner does, and is told what runs where."""

    __slots__ = ("_asking", "_by_attempt")

    def __init__(self, asking: RemoteAdmission, policy: str, registry: Registry, loads: LoadTable) -> None:
        super().__init__(AdmissionConfig(), policy, registry, loads)
        self._asking = asking
        self._by_attempt: dict[str, _Asked] = {}

    def narrow(self, req: RequestState, role: Role, numbers: Ints) -> Ints:
        """Those of ``numbers`` where the owner keeps room for ``req``; all of them where it keeps none there."""
        kept = {self._registry_number(peer) for peer in self._asking.granted_at(req)}
        within = numbers[[number in kept for number in numbers.tolist()]]
        return within if len(within) else numbers

    def _registry_number(self, peer: Peer) -> int:
        member = self._registry.get(peer)
        return -1 if member is None else member.number

    def reserve(self, req: RequestState, attempt: Attempt) -> list[str]:
        """The owner hears where ``attempt`` runs."""
        self._by_attempt[attempt.attempt_id] = self._asking.placed(req, attempt)
        return []

    def prefilled(self, attempt: Attempt) -> None:
        """The prompt of ``attempt`` is computed."""
        self._tell(attempt, prefilled=True)

    def handed_over(self, attempt: Attempt) -> None:
        """The decode instance has all KV of ``attempt``."""
        if attempt.decode_at is not None:
            self._tell(attempt, at=(attempt.decode_at.peer,), prefilled=True)

    def release(self, attempt: Attempt, *, completed: bool) -> int:
        """``attempt`` is over."""
        self._by_attempt[attempt.attempt_id].completed = completed
        self._tell(attempt, at=())
        del self._by_attempt[attempt.attempt_id]
        return 0

    def _tell(self, attempt: Attempt, **changes: object) -> None:
        asked = self._by_attempt[attempt.attempt_id]
        if asked.place is not None:
            self._asking.moved(asked, structs.replace(asked.place, **changes))

    def has_room_at(self, req: RequestState, member: Member) -> bool:
        """Whether ``req`` may go on where it runs already."""
        return True
