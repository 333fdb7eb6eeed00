"""Admission before placement: admit a request, let it wait in a queue, or reject it.

::

    arrives --> QUEUED --its turn, and there is room--> active --every sequence ended--> released
                   |                                      (retries and resumptions stay active)
                   +--too many wait, or it has waited too long: rejected, with a time to retry after

A request is admitted when it is its tenant's turn (``base/fairness.py``), fewer than ``active_max`` are active, the
rule of ``--admission`` admits it (:class:`~memserve.router.admission.needs.AdmissionRule`), and an instance has memory
for it (``cluster.memory``). The head of the queue is not overtaken: a large request would starve
behind small ones. One exception, with ``hold``: where an instance still holds what a request of the same
tenant continues, that request goes first, until the head has waited for half of the time that it may wait. Otherwise,
with more chats than fit in memory, each would find its KV evicted by the others. Every admitted request is released
exactly once, however it ends.

With several routers the owner has the queue and the ledger: requests of followers are in it as well
(``router/admission/remote_requests.py``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from memserve.base.config import AdmissionConfig
from memserve.base.errors import check
from memserve.base.fairness import FairQueue
from memserve.base.types import Request
from memserve.base.units import NS_PER_S
from memserve.router.admission.memory_budget import MemoryBudget
from memserve.router.admission.needs import (
    ADMIT,
    ASKED_EVERY_NS,
    NONE_ADMITTED,
    Admitted,
    Crowd,
    ServiceTimes,
    Verdict,
    bounded_retry_s,
    cost_tokens,
    read_rule,
    usable_verdict,
)
from memserve.router.members.loads import LoadTable
from memserve.router.members.registry import Registry
from memserve.router.report import AdmissionStats
from memserve.router.requests.requests import RequestPhase, RequestState

FOLLOWERS_MAX = 256
"""Requests behind the head of the queue that are looked at."""


class Rejection(NamedTuple):
    """A request that is rejected."""

    req: RequestState
    cause: str
    """As in :attr:`AdmissionStats.rejected`."""
    reason: str
    retry_after_s: float | None
    """``None``: it can never run."""

    @property
    def is_overload(self) -> bool:
        """Whether any other request would have been rejected, too."""
        return self.cause in ("wait", "pressure")


class RequestAdmission(ABC):
    """Which requests wait and which are active. Sends nothing: its answers say what is to be done. The owner decides
    (:class:`AdmissionController`), a follower asks it (:class:`~memserve.router.admission.follower.RemoteAdmission`).
    """

    def __init__(self, config: AdmissionConfig, memory: MemoryBudget) -> None:
        self._config = config
        #: how long a request may wait
        self._wait_ns = config.wait_ns
        #: since when, of all and only those that wait
        self._waiting_since_ns: dict[str, int] = {}
        #: since when, of all and only admitted requests that have not ended
        self._active_since_ns: dict[str, int] = {}
        #: nothing is admitted: what an earlier router has admitted is not known yet
        self.is_closed = False
        self.stats = AdmissionStats()
        self.memory = memory

    @abstractmethod
    def enqueue_request(self, req: RequestState, now_ns: int) -> Rejection | None:
        """``req`` waits from now on, unless it could never run."""

    @abstractmethod
    def admit_next(self, now_ns: int) -> RequestState | None:
        """The next request, which is active from now on. ``None``: there is no room, or nothing waits."""

    @abstractmethod
    def release_request(self, req: RequestState, now_ns: int) -> None:
        """``req`` has ended in whatever way: it was active, waited, or was rejected on arrival."""

    @abstractmethod
    def reject_overflow(self, new_request: RequestState) -> Rejection | None:
        """Whether too many wait with ``new_request``, which does."""

    @abstractmethod
    def reject_timed_out(self, req: RequestState, now_ns: int) -> Rejection | None:
        """The timer of a request that waits: rejected if it does so still."""

    @abstractmethod
    def waiting_by_tenant(self) -> dict[str, int]:
        """Requests that wait, by tenant."""

    @abstractmethod
    def check_invariants(self, requests: Mapping[str, RequestState]) -> None:
        """Raise :class:`InvariantError` unless every live request waits or is active. ``requests``: all that are live,
        by name, remote requests included."""

    def is_idle(self, now_ns: int) -> bool:
        """Whether no request waits, as most events find it: nothing is to be admitted or rejected."""
        return not self._waiting_since_ns

    def is_waiting(self, req: RequestState) -> bool:
        """Whether ``req`` was not admitted yet."""
        return req.request_id in self._waiting_since_ns

    def may_place(self, req: RequestState, now_ns: int) -> bool:
        """Whether ``req``, which was admitted, may be dispatched now."""
        return True

    def reject_over_limit(self) -> Rejection | None:
        """More wait than may, since admission was closed for a while."""
        return None

    def reject_unservable(self, now_ns: int) -> Rejection | None:
        """A request that does not wait any longer: only time will make room for it, or nothing."""
        return None

    def wait_until_ns(self, req: RequestState) -> int | None:
        """When ``req`` has waited too long; ``None``: it does not wait."""
        since_ns = self._waiting_since_ns.get(req.request_id)
        return None if since_ns is None else since_ns + self._wait_ns

    def snapshot(self) -> AdmissionStats:
        """Totals and gauges."""
        stats = self.stats
        return replace(
            stats,
            rejected=dict(stats.rejected),
            active=len(self._active_since_ns),
            waiting=self.waiting_by_tenant(),
            evictions=self.memory.ledger.evictions,
        )

    def _mark_active(self, req: RequestState, now_ns: int) -> None:
        self._active_since_ns[req.request_id] = now_ns
        self.stats.admitted += 1

    def _make_rejection(self, req: RequestState, cause: str, reason: str, retry_after_s: float | None) -> Rejection:
        self.stats.rejected[cause] = self.stats.rejected.get(cause, 0) + 1
        return Rejection(req, cause, reason, retry_after_s)


class TenantLoads:
    """What is admitted, as rules are shown it (:class:`~memserve.router.admission.needs.AdmissionLoad`). Tokens are
    added up when a rule asks: most rules do not."""

    def __init__(self, queue: FairQueue[RequestState], output_tokens_max: int) -> None:
        self._queue, self._output_tokens_max = queue, output_tokens_max
        #: active requests by tenant; only tenants that have any
        self._by_tenant: dict[str, dict[str, Request]] = {}
        #: of tenants without a change since
        self._sums: dict[str, Admitted] = {}

    def admitted(self) -> Admitted:
        """All together."""
        tenants = [self.admitted_of(tenant) for tenant in self._by_tenant]
        return Admitted(sum(tenant.requests for tenant in tenants), sum(tenant.tokens for tenant in tenants))

    def admitted_of(self, tenant: str) -> Admitted:
        """Those of a tenant."""
        if tenant in self._sums:
            return self._sums[tenant]
        requests = self._by_tenant.get(tenant)
        if requests is None:
            return NONE_ADMITTED
        tokens = sum(cost_tokens(request, self._output_tokens_max) for request in requests.values())
        admitted = self._sums[tenant] = Admitted(len(requests), tokens)
        return admitted

    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def add_request(self, request: Request) -> None:
        """It is active from now on."""
        self._by_tenant.setdefault(request.tenant, {})[request.request_id] = request
        self._sums.pop(request.tenant, None)

    def remove_request(self, request: Request) -> None:
        """It was active, and has ended."""
        requests = self._by_tenant[request.tenant]
        del requests[request.request_id]
        if not requests:
            del self._by_tenant[request.tenant]
        self._sums.pop(request.tenant, None)

    def check_invariants(self, active: Collection[str]) -> None:
        """Raise :class:`InvariantError` unless the requests named ``active`` are counted, and no other ones."""
        counted = [name for requests in self._by_tenant.values() for name in requests]
        check(sorted(counted) == sorted(active), "{} are counted, {} are active", counted, active)
        check(all(self._by_tenant.values()), "a tenant without anything is listed")
        check(self._sums.keys() <= self._by_tenant.keys(), "sums of {}", self._sums)


class AdmissionController(RequestAdmission):
    """The owner's: has the queue, and counts what instances have room for."""

    def __init__(self, config: AdmissionConfig, policy: str, registry: Registry, loads: LoadTable) -> None:
        super().__init__(config, MemoryBudget(config, policy, registry, loads))
        self._queue: FairQueue[RequestState] = FairQueue(dict(config.weights))
        self._rule, self._load = read_rule(config), TenantLoads(self._queue, config.output_tokens_max)
        #: of requests that wait, what the rule has said last
        self._verdicts: dict[str, Verdict] = {}
        #: when a plug-in's rule is asked again although nothing has changed
        self._asked_next_ns: float = math.inf
        #: what an earlier router had admitted counts, however much it is
        self._active_count_max = config.active_max or 0
        #: requests that were admitted before their follower was expelled: they go before the queue
        self._returning: deque[RequestState] = deque()
        self._service_times = ServiceTimes()

    def enqueue_request(self, req: RequestState, now_ns: int) -> Rejection | None:
        """``req`` joins the queue, unless it could never run."""
        never = self.memory.never_fits(req)
        if never is not None:
            return self._make_rejection(req, "memory", never, None)
        request = req.request
        cost = cost_tokens(request, self._config.output_tokens_max)
        self._queue.push(request.tenant, request.request_id, req, cost, request.priority, request.urgency)
        self._waiting_since_ns[request.request_id] = now_ns
        self.memory.hold_for_request(req, now_ns + self._config.wait_ns // 2)
        self.memory.changed = True
        return None

    def is_idle(self, now_ns: int) -> bool:
        """Whether no request waits, as most events find it: nothing is to be admitted or rejected.

        To be called with every event; heartbeats are frequent enough to notice in time what has expired.
        """
        if self.memory.is_counting:
            self.memory.expire_kept(now_ns)
        return not self._waiting_since_ns and not self._returning

    def admit_next(self, now_ns: int) -> RequestState | None:
        """Admit the head of the queue: it is active from now on. ``None``: there is no room, or nothing waits."""
        if self.is_closed:
            return None
        may_fit = (self.memory.changed or now_ns >= self._asked_next_ns) and not self._queue_state().is_full
        if self._returning and may_fit:
            return self._readmit_returning(now_ns)
        req = self._next_by_rule(now_ns) if may_fit else None
        if req is not None and self.memory.fits(req, leaves_growth=True):
            self._queue.serve_item(req.request_id)
        elif req is not None:
            req = self._pop_continuation(req, now_ns) or self._pop_under_pressure(req, now_ns)  # or none of them
        if req is None:
            self.memory.changed = False
            return None
        self.memory.on_admitted(req)
        self._mark_active(req, now_ns)
        self._verdicts.pop(req.request_id, None)
        self.stats.waited_ns += now_ns - self._waiting_since_ns.pop(req.request_id)
        return req

    def _mark_active(self, req: RequestState, now_ns: int) -> None:
        super()._mark_active(req, now_ns)
        self._load.add_request(req.request)

    def _next_by_rule(self, now_ns: int) -> RequestState | None:
        """The next request that the rule admits: the head of the queue, else that of another tenant."""
        head = self._queue.head()
        if head is None or self._is_admitted(head, now_ns):
            return head
        behind = islice(self._queue.heads(), 1, None)
        req = next((head for head in behind if self._is_admitted(head, now_ns)), None)
        self._asked_next_ns = now_ns + ASKED_EVERY_NS
        return req

    def _is_admitted(self, req: RequestState, now_ns: int) -> bool:
        try:
            verdict = self._rule(req.request, self._load, now_ns)
            if verdict is ADMIT:
                return True
            verdict = usable_verdict(verdict)
        except Exception:  # a plug-in's: the other limits judge alone
            self.stats.rule_failures += 1
            verdict = ADMIT
        if verdict.kind == "admit":
            return True
        self._verdicts[req.request_id] = verdict
        return False

    def _reject_by_rule(self) -> Rejection | None:
        for name, verdict in self._verdicts.items():
            if verdict.kind == "reject":
                del self._verdicts[name]
                return self._make_rejection(self._queue.item(name), "rule", verdict.reason, verdict.retry_after_s)
        return None

    def _readmit_returning(self, now_ns: int) -> RequestState | None:
        """The next one that returns. Where nothing runs it need not fit: it goes on somewhere, as after a failure."""
        if self._active_since_ns and not self.memory.fits(self._returning[0], gives_up_held=True):
            self.memory.changed = False
            return None
        req = self._returning.popleft()
        self._mark_active(req, now_ns)
        return req

    def restore_active(self, req: RequestState, now_ns: int) -> None:
        """``req`` is active, as an earlier router has decided, be there room or not."""
        self._mark_active(req, now_ns)
        self._active_count_max = max(self._active_count_max, len(self._active_since_ns))

    def queue_for_readmission(self, req: RequestState) -> None:
        """``req`` was admitted once, and counts no more: it is the next one."""
        self._returning.append(req)
        self.memory.changed = True

    def _pop_continuation(self, head: RequestState, now_ns: int) -> RequestState | None:
        """A request behind ``head``, which has no room, that goes on where its KV still is, and takes the head's turn.
        It is out of the queue then."""
        if not self.memory.holds or self._has_waited_long(head, now_ns):
            return None
        memory, behind = self.memory, self._queue.behind_head(FOLLOWERS_MAX)
        going_on = [req for req in behind if memory.continues_prefix(req)]
        for req in going_on:
            if memory.fits(req):
                return self._queue.serve_item(req.request_id)
        # All that run together have grown beyond the memory: one of them goes on at the expense of the others.
        if (
            going_on
            and not self._active_since_ns
            and not memory.continues_prefix(head)
            and memory.fits_without_pins(going_on[0])
        ):
            return self._queue.serve_item(going_on[0].request_id)
        return None

    def _has_waited_long(self, req: RequestState, now_ns: int) -> bool:
        return now_ns - self._waiting_since_ns[req.request_id] >= self._config.wait_ns // 2

    def release_request(self, req: RequestState, now_ns: int) -> None:
        """``req`` has ended in whatever way: it was active, in the queue, or rejected on arrival."""
        request_id = req.request_id
        self.memory.changed = True
        self._verdicts.pop(request_id, None)
        if self._queue.remove(request_id):
            del self._waiting_since_ns[request_id]
        elif req in self._returning:
            self._returning.remove(req)
        since_ns = self._active_since_ns.pop(request_id, None)
        if since_ns is not None:
            self.stats.released += 1
            self._load.remove_request(req.request)
            if req.has_begun:  # else nothing was done for it
                self._service_times.add_sample(now_ns - since_ns)

    # -- rejecting

    def reject_overflow(self, new_request: RequestState) -> Rejection | None:
        """Too many wait, with ``new_request``, which does: the last request of the tenant with most waiting is
        rejected."""
        victim = self._overflow_victim(new_request.request.tenant)
        self.stats.queued += victim is not new_request
        return None if victim is None else self._reject_overflowing(victim)

    def reject_over_limit(self) -> Rejection | None:
        """More wait than may, since admission was closed for a while."""
        victim = self._overflow_victim("")
        return None if victim is None else self._reject_overflowing(victim)

    def _overflow_victim(self, new_tenant: str) -> RequestState | None:
        may_overflow = len(self._queue) > self._config.waiting_max
        return self._queue.most_crowded(new_tenant) if may_overflow and self._queue_state().is_over_limit else None

    def _reject_overflowing(self, victim: RequestState) -> Rejection:
        return self._make_rejection(
            victim, "queue", self._queue_state().describe_wait(self._no_room_reason()), self._retry_after_s()
        )

    def reject_unservable(self, now_ns: int) -> Rejection | None:
        """The rule rejects a request, or the head of the queue has no room although no request is active: only time
        will make room for it."""
        if (rejection := self._reject_by_rule()) is not None:
            return rejection
        if self._active_since_ns or self.is_closed or not self.memory.is_counting or not self._queue:
            return None
        req = self._queue.head()
        if req is None:
            return None
        retry_after_s = bounded_retry_s(self.memory.room_in_ns(req, now_ns) / NS_PER_S)
        return self._make_rejection(
            req, "pressure", f"{self._no_room_reason()}, and no request is running", retry_after_s
        )

    def reject_timed_out(self, req: RequestState, now_ns: int) -> Rejection | None:
        """The timer of a queued request: rejected if it is still in the queue."""
        until_ns = self.wait_until_ns(req)
        if until_ns is None or now_ns < until_ns:
            return None
        waited_s = self._config.wait_ns / 1e9
        verdict = self._verdicts.get(req.request_id)
        reason = verdict.reason if verdict is not None else self._no_room_reason()
        reason = f"not admitted within {waited_s:g} s: {self._queue_state().describe_wait(reason)}"
        return self._make_rejection(req, "wait", reason, self._retry_after_s())

    def _no_room_reason(self) -> str:
        """Why the head of the queue waits although fewer than ``active_max`` are active."""
        if self.is_closed:
            return "this router has just started, and asks the others what they run"
        if not self.memory.is_counting:
            return ""
        limit = self._config.evictions_max
        evicted = "" if limit is None else f", nor by {limit} evictions"
        return f"no instance has enough free KV memory for the next one{evicted}"

    def _retry_after_s(self) -> float:
        at_once = self._config.active_max or max(1, len(self._active_since_ns))
        return self._service_times.retry_after_s(len(self._queue), at_once)

    # -- looking

    def waiting_by_tenant(self) -> dict[str, int]:
        """Requests in the queue, by tenant."""
        return self._queue.waiting_by_tenant()

    def _queue_state(self) -> Crowd:
        config = self._config
        waiting_max = config.waiting_max + (config.active_max or FOLLOWERS_MAX if self.is_closed else 0)
        return Crowd(len(self._active_since_ns), config.active_max, len(self._queue), waiting_max)

    def _pop_under_pressure(self, head: RequestState, now_ns: int) -> RequestState | None:
        """``head``, if there is room for it without what is held for others, or without pins. It is out of the queue
        then."""
        memory = self.memory
        has_room = memory.holds and self._has_waited_long(head, now_ns) and memory.fits(head, gives_up_held=True)
        # Pins keep a request out only while another one is running, whose end may help as well.
        if has_room or (not self._active_since_ns and memory.fits_without_pins(head)):
            return self._queue.pop()
        return None

    def check_invariants(self, requests: Mapping[str, RequestState]) -> None:
        """Raise :class:`InvariantError` unless every live request is either queued or active, and the limits hold.
        ``requests``: all that are live, by name, remote requests included."""
        config = self._config
        self._queue.check_invariants()
        self._load.check_invariants(self._active_since_ns)
        check(all(name in self._queue for name in self._verdicts), "verdicts on {}", self._verdicts)
        returning = {req.request_id for req in self._returning}
        queued = [name for name, req in requests.items() if req.phase is RequestPhase.QUEUED and name not in returning]
        check(sorted(self._waiting_since_ns) == sorted(queued), "{} wait, not {}", self._waiting_since_ns, queued)
        check(all(name in self._queue for name in queued), "{} are not all in the queue", queued)
        active = [name for name in requests if name not in self._waiting_since_ns and name not in returning]
        check(sorted(self._active_since_ns) == sorted(active), "{} are active, not {}", self._active_since_ns, active)
        check(
            config.active_max is None or len(self._active_since_ns) <= self._active_count_max,
            "{} are active",
            len(self._active_since_ns),
        )
        check(len(self._queue) == len(queued) <= self._queue_state().waiting_max, "{} wait", len(self._queue))
        check(
            self.stats.admitted == self.stats.released + len(self._active_since_ns),
            "an admitted request was not released once",
        )
        self.memory.check_invariants(requests)
