"""The gate before placement (level 2, row C6): who is let in, who waits, who is told to come again.

::

    arrives --> WAITING --its turn, and there is room--> ACTIVE --every sequence ended--> gone
                   |                                        (retries and resumptions stay active)
                   +--too many wait, or it has waited too long: rejected, with a time to come again

A request is let in when it is its tenant's turn (``policy.fairness``), no more than ``active_max`` are active, and an
instance has memory for it. The head of the line is not overtaken: a large request would starve behind small ones.
Every request that was let in leaves exactly once, whatever becomes of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from memserve.cluster.gate_memory import GateMemory
from memserve.cluster.jobs import Attempt, Job, Jobs
from memserve.cluster.loads import LoadTable
from memserve.cluster.registry import Member, Registry
from memserve.cluster.report import GateStats
from memserve.config import AdmissionConfig
from memserve.errors import check
from memserve.policy.admission import Crowd, ServiceTimes, bounded_retry_s, cost_tokens
from memserve.policy.fairness import FairQueue
from memserve.types import Admission
from memserve.units import NS_PER_S


class Refusal(NamedTuple):
    """A request that is turned away."""

    job: Job
    cause: str
    """``queue`` (too many wait), ``wait`` (it has waited too long), ``memory`` (it fits nowhere, ever) or ``pressure``
    (not even with the memory of those that have ended, as much as it may take)."""
    reason: str
    retry_after_s: float | None
    """``None``: it never could."""


class Gate:
    """Counts who is in, keeps who waits. Acts on nothing: says what is to be done."""

    __slots__ = ("_active", "_changed", "_config", "_queue", "_times", "_waits_since", "memory", "stats")

    def __init__(self, config: AdmissionConfig, policy: str, registry: Registry, loads: LoadTable) -> None:
        self._config = config
        self._queue: FairQueue[Job] = FairQueue(dict(config.weights))
        #: since when, of all and only those that wait
        self._waits_since: dict[str, int] = {}
        #: since when, of all and only those that were let in and have not ended
        self._active: dict[str, int] = {}
        #: something has happened since the head of the line was last found to have no room
        self._changed = False
        self._times = ServiceTimes()
        self.stats = GateStats()
        #: who holds which blocks; ``None`` = memory is not looked at
        self.memory: GateMemory | None = None
        if config.mode in (Admission.MEMORY, Admission.CACHE):
            self.memory = GateMemory(config, policy, registry, loads)

    # -- coming

    def arrive(self, job: Job, now: int) -> Refusal | None:
        """``job`` lines up, unless it could never be let in."""
        never = self.memory.never_fits(job) if self.memory is not None else None
        if never is not None:
            return self._refuse(job, "memory", never, None)
        request = job.request
        cost = cost_tokens(request, self._config.output_tokens_max)
        self._queue.push(request.tenant, request.request_id, job, cost, request.priority, request.urgency)
        self._waits_since[request.request_id] = now
        self._changed = True
        return None

    def next(self, now: int) -> Job | None:
        """Let the next one in: it is active from now on. ``None`` = nobody waits, or there is no room for the first.

        To be called with every event; heartbeats are enough of them to notice in time what is let go.
        """
        if self.memory is not None and self.memory.let_go(now):
            self._changed = True
        job = self._queue.head() if self._changed else None
        if job is None or self._crowd().is_full or not self._has_room(job):
            self._changed = False
            return None
        self._queue.pop()
        waited_ns = now - self._waits_since.pop(job.request_id)
        self._active[job.request_id] = now
        self.stats.admitted += 1
        self.stats.waited_ns += waited_ns
        return job

    def hopeless(self, now: int) -> Refusal | None:
        """The head of the line has no room although nobody is active: nobody will make room for it, but time, and it is
        told when."""
        job = self._queue.head() if not self._active else None
        if job is None or self.memory is None:
            return None
        retry_after_s = bounded_retry_s(self.memory.room_in_ns(job, now) / NS_PER_S)
        return self._refuse(job, "pressure", f"{self._no_room()}, and nobody runs", retry_after_s)

    def overflow(self, newcomer: Job) -> Refusal | None:
        """Who is turned away because, with ``newcomer``, more wait than may: the last one of the tenant with most."""
        crowd = self._crowd()
        victim = self._queue.most_crowded(newcomer.request.tenant) if crowd.overflows else None
        self.stats.queued += self.holds_back(newcomer) and victim is not newcomer
        if victim is None:
            return None
        return self._refuse(victim, "queue", crowd.reason(self._no_room()), self._retry_after_s())

    def wait_until_ns(self, job: Job) -> int | None:
        """When ``job`` has waited too long; ``None`` = it does not wait."""
        since_ns = self._waits_since.get(job.request_id)
        return None if since_ns is None else since_ns + self._config.wait_ns

    def waited(self, job: Job, now: int) -> Refusal | None:
        """The timer of a job that lined up: is it still waiting?"""
        until_ns = self.wait_until_ns(job)
        if until_ns is None or now < until_ns:
            return None
        waited_s = self._config.wait_ns / 1e9
        reason = f"not let in within {waited_s:g} s: {self._crowd().reason(self._no_room())}"
        return self._refuse(job, "wait", reason, self._retry_after_s())

    def left(self, job: Job, now: int) -> None:
        """``job`` has ended, in whatever way; it may have waited, or not even that."""
        request_id = job.request_id
        self._changed = True
        if self._queue.remove(request_id):
            del self._waits_since[request_id]
        since_ns = self._active.pop(request_id, None)
        if since_ns is not None:
            self.stats.left += 1
            if job.has_begun:  # else nothing was done for it
                self._times.learn(now - since_ns)

    # -- memory

    def enter(self, member: Member) -> None:
        """A new instance."""
        self._changed = True
        if self.memory is not None:
            self.memory.enter(member)

    def reconsider(self) -> None:
        """An instance takes requests now, or none any more and others do its work: there may be room for who waits."""
        self._changed = True

    def leave(self, member: Member) -> None:
        """An instance is gone; attempts there must be over."""
        self._changed = True
        if self.memory is not None:
            self.memory.leave(member)

    def dispatched(self, job: Job, attempt: Attempt) -> list[str]:
        """``attempt`` holds memory from now on. Returns the pins that have to go for it."""
        return self.memory.dispatched(job, attempt) if self.memory is not None else []

    def computed(self, attempt: Attempt) -> None:
        """Its prompt is computed: nobody lends it anything any more."""
        if self.memory is not None and self.memory.computed(attempt):
            self._changed = True

    def handed_over(self, attempt: Attempt) -> None:
        """The prefill instance, still involved, is about to have nothing to do with it."""
        if self.memory is not None:
            self._changed = True
            self.memory.handed_over(attempt)

    def over(self, attempt: Attempt, *, completed: bool) -> None:
        """``attempt`` is over. ``completed``: what it has computed stays in the cache; else it holds nothing."""
        if self.memory is not None:
            self._changed = True
            self.memory.over(attempt, completed=completed)

    def may_pin(self, name: str, member: Member, identities: bytes, tokens: int) -> bool:
        """Whether a prefix may be kept at ``member`` under ``name``: not in the room of those who were let in."""
        self._changed = True
        return self.memory is None or self.memory.may_pin(name, member, identities, tokens)

    def pinned(self, name: str, member: Member, identities: bytes, tokens: int) -> None:
        """So much of a prefix is kept at ``member`` under ``name``, and nothing elsewhere."""
        if self.memory is not None:
            self._changed = True
            self.memory.pinned(name, member, identities, tokens)

    def unpinned(self, name: str) -> None:
        """Nothing is kept under ``name``."""
        if self.memory is not None:
            self._changed = True
            self.memory.claims.unpin(name)

    # -- looking

    @property
    def wants_identities(self) -> bool:
        """Whether a job should know the identities of its prompt's blocks when it arrives."""
        return self.memory is not None and self.memory.wants_identities

    def holds_back(self, job: Job) -> bool:
        """Whether ``job`` waits to be let in."""
        return job.request_id in self._queue

    def snapshot(self) -> GateStats:
        """Totals and gauges."""
        stats = self.stats
        return replace(
            stats,
            rejected=dict(stats.rejected),
            active=len(self._active),
            waiting=self._queue.waiting(),
            evictions=self.memory.pressure.evictions if self.memory is not None else 0,
        )

    def _crowd(self) -> Crowd:
        config = self._config
        return Crowd(len(self._active), config.active_max, len(self._queue), config.waiting_max)

    def _has_room(self, job: Job) -> bool:
        """Pins keep out only as long as somebody runs whose end may help as well."""
        memory = self.memory
        return memory is None or memory.fits(job) or (not self._active and memory.fits_but_for_pins(job))

    def _no_room(self) -> str:
        """Why the head of the line waits, when it is not for others to leave."""
        if self.memory is None:
            return ""
        limit = self._config.evictions_max
        evicted = "" if limit is None else f", nor by {limit} evictions"
        return f"no instance has enough free KV memory for the next one{evicted}"

    def _refuse(self, job: Job, cause: str, reason: str, retry_after_s: float | None) -> Refusal:
        self.stats.rejected[cause] = self.stats.rejected.get(cause, 0) + 1
        return Refusal(job, cause, reason, retry_after_s)

    def _retry_after_s(self) -> float:
        at_once = self._config.active_max or max(1, len(self._active))
        return self._times.retry_after_s(len(self._queue), at_once)

    def check_invariants(self, jobs: Jobs) -> None:
        """Raise :class:`InvariantError` unless every live request either waits or is active, and the limits hold."""
        config = self._config
        self._queue.check_invariants()
        check(list(self._waits_since) == [i for i in self._waits_since if i in self._queue], "who waits is not in line")
        check(len(self._waits_since) == len(self._queue), "who is in line does not wait")
        both = [request_id for request_id in self._active if request_id in self._queue]
        check(not both, f"active and waiting: {both}")
        check(len(self._active) + len(self._queue) == len(jobs.by_id), "somebody neither waits nor is active")
        check(
            all(request_id in jobs.by_id for request_id in (*self._active, *self._waits_since)), "the dead are counted"
        )
        check(config.active_max is None or len(self._active) <= config.active_max, f"{len(self._active)} are active")
        check(len(self._queue) <= config.waiting_max, f"{len(self._queue)} wait")
        check(self.stats.admitted == self.stats.left + len(self._active), "who was let in has not left exactly once")
        if self.memory is not None:
            self.memory.check_invariants({job.attempt.attempt_id: job.attempt
                                          for job in jobs.by_id.values() if job.attempt is not None})  # fmt: skip
