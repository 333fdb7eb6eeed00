"""Dispatch, failure, another try, the end (level 2): no request is lost.

Whatever goes wrong with an attempt, it is ended as a whole: those who are involved are told, its work is taken off the
books, and the request is placed again with the tokens that the client has. Drawing depends on seed, sequence and
position alone, so the next attempt goes on exactly where the client's stream is.
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.cluster.gate import Gate, Refusal
from memserve.cluster.handles import Handles
from memserve.cluster.jobs import Attempt, Job, Jobs, attempt_story
from memserve.cluster.loads import Charge, LoadTable, Work
from memserve.cluster.outbox import Outbox
from memserve.cluster.placement import Placement, Placer
from memserve.cluster.registry import Member, Registry
from memserve.cluster.report import Counters
from memserve.cluster.sessions import Sessions
from memserve.cluster.timers import Timers
from memserve.cluster.trees import IDENTITY_BYTES, Trees
from memserve.config import ClusterConfig
from memserve.messages import Cancel, RequestRefused
from memserve.metadata import EntryUsed
from memserve.types import Caching, FinishReason, TokenOutput
from memserve.units import NS_PER_S, ns_from_s

_STALL_DOUBLINGS_MAX = 6
RETRY_AFTER_S = 5.0
"""What clients are told when no instance was there in time."""


class Lifecycle:
    """The way of each job from arrival to its end. All of its methods leave the books balanced."""

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        trees: Trees,
        loads: LoadTable,
        gate: Gate,
        placer: Placer,
        sessions: Sessions,
        handles: Handles,
        timers: Timers,
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._config, self._counters = config, counters
        self._registry, self._trees, self._loads = registry, trees, loads
        self._placer, self._sessions, self._handles = placer, sessions, handles
        self._timers, self._outbox = timers, outbox
        self.jobs = Jobs()
        #: who of them was let in, and who waits for that
        self.gate = gate
        self._attempts = 0

    # -- the gate

    def arrive(self, job: Job, now: int) -> None:
        """A new job, in ``jobs`` already: it is placed now, waits before the gate, or is turned away."""
        if self.gate.wants_identities:
            self._placer.identities(job)
        refusal = self.gate.arrive(job, now)
        if refusal is None:
            self.admit_waiting(now)
            refusal = self.gate.overflow(job)
        if refusal is not None:
            self._turn_away(refusal, now)
        until_ns = self.gate.wait_until_ns(job)
        if until_ns is not None:
            self._timers.arm(until_ns, ("gate", job.request_id))

    def admit_waiting(self, now: int) -> None:
        """Let in whoever is next, as long as there is room."""
        while True:
            while (job := self.gate.next(now)) is not None:
                self.place(job, now)
            refusal = self.gate.hopeless(now)
            if refusal is None:
                return
            self._turn_away(refusal, now)

    def waited_at_gate(self, request_id: str, now: int) -> None:
        """The timer of a job that had to wait."""
        job = self.jobs.by_id.get(request_id)
        refusal = self.gate.waited(job, now) if job is not None else None
        if refusal is not None:
            self._turn_away(refusal, now)

    def _turn_away(self, refusal: Refusal, now: int) -> None:
        overloaded = refusal.cause in ("wait", "pressure")
        self._reject(refusal.job, refusal.reason, refusal.retry_after_s, now, overloaded=overloaded)

    # -- placing

    def place(self, job: Job, now: int) -> None:
        """Find somebody for an unplaced job; else it waits, or ends when waiting cannot help."""
        if job.tries >= self._config.attempts_max:
            self._counters.requests_failed += 1
            self.end(job, FinishReason.ERROR, now)
            return
        chosen = self._placer.place(job)
        if chosen is None and self._give_second_chance(job):
            chosen = self._placer.place(job)
        if chosen is None:
            self._nobody(job, now)
        else:
            self._dispatch(job, chosen, now)

    def place_waiting(self, now: int) -> None:
        """Something has changed: try all unplaced jobs, in order."""
        for job in list(self.jobs.unplaced.values()):
            if not self.gate.holds_back(job):
                self.place(job, now)

    def _give_second_chance(self, job: Job) -> bool:
        """Forget who only failed: everybody else has refused."""
        failed = [peer for peer, retry_after_s in job.avoid.items() if retry_after_s == 0.0]
        for peer in failed:
            del job.avoid[peer]
        return bool(failed)

    def _nobody(self, job: Job, now: int) -> None:
        """Nobody takes it: say so at once when that will not change by waiting."""
        asked = [job.avoid[m.peer] for m in self._registry if m.peer in job.avoid]
        busy = [retry_after_s for retry_after_s in asked if retry_after_s is not None]
        anybody = self._loads.longest_context() > 0
        if not job.has_begun and busy:
            self._reject(job, job.refusal, min(busy), now)
        elif not job.has_begun and anybody:
            self._reject(job, job.refusal if asked else self._too_long(job), None, now)
        else:
            self._wait(job, min(busy, default=None), now)

    def _too_long(self, job: Job) -> str:
        prompt_tokens, longest = len(job.request.prompt), self._loads.longest_context()
        return f"the prompt has {prompt_tokens} tokens; with one more to generate the most that fits is {longest}"

    def _wait(self, job: Job, retry_after_s: float | None, now: int) -> None:
        if job.unplaced_ns is None:
            job.unplaced_ns = now
            self._timers.arm(now + self._config.unplaced_ns, ("unplaced", job.request_id))
        if retry_after_s is not None:
            self._timers.arm(now + max(ns_from_s(retry_after_s), NS_PER_S // 10), ("retry", job.request_id))

    def waited(self, request_id: str, now: int) -> None:
        """The timer of a job that nobody could take."""
        job = self.jobs.unplaced.get(request_id)
        if job is None or job.unplaced_ns is None or now < job.unplaced_ns + self._config.unplaced_ns:
            return
        if job.has_begun:
            self._counters.requests_failed += 1
            self.end(job, FinishReason.ERROR, now)
        else:
            self._reject(job, job.refusal or "no instance is ready to take requests", RETRY_AFTER_S, now)

    def retry(self, request_id: str, now: int) -> None:
        """The timer of a job whose instances were all busy."""
        job = self.jobs.unplaced.get(request_id)
        if job is not None:
            job.avoid = {peer: None for peer, retry_after_s in job.avoid.items() if retry_after_s is None}
            self.place(job, now)

    def _reject(
        self, job: Job, reason: str, retry_after_s: float | None, now: int, *, overloaded: bool = False
    ) -> None:
        self._counters.requests_rejected += 1
        self._outbox.reject(job.request_id, reason, retry_after_s, overloaded)
        self.jobs.leave(job)
        self.gate.left(job, now)

    # -- dispatching

    def _dispatch(self, job: Job, chosen: Placement, now: int) -> None:
        self._attempts += 1
        attempt_id = f"{job.request_id}#{self._attempts}"
        first, decode_at = chosen.first, chosen.decode_at
        involved = [first] if decode_at is None else [first, decode_at]
        charges = self._charge(job, chosen)
        attempt = Attempt(attempt_id, first, decode_at, chosen.holders, chosen.route, now, now, involved, charges)
        self.jobs.begin(job, attempt)
        for name in self.gate.dispatched(job, attempt):
            self._handles.give_way(name)
        job.tries += 1
        self._count_dispatch(job, chosen)
        self._expect(job, involved, now)
        request = job.request
        self._sessions.remember(request.tenant, request.session, involved)
        self._note_use(job, chosen, now)
        self._timers.arm(now + self._stalled_after_ns(job), ("stall", attempt_id))
        message = job.message(attempt, self._config.transfer, self._returns_kv(job, attempt), now)
        first.reckoning.dispatches += 1
        self._outbox.send(first.peer, message)

    def _charge(self, job: Job, chosen: Placement) -> list[Charge]:
        """The prompt's work first, then that of decoding."""
        width = max(job.request.n, job.request.beam_width)
        uncached = max(1, chosen.prompt_tokens - chosen.route.first.matched_tokens)
        decoder = chosen.decode_at or chosen.first
        return [
            self._loads.charge(chosen.first.number, Work(prefill_tokens=uncached)),
            self._loads.charge(decoder.number, Work(0, width, width * chosen.prompt_tokens)),
        ]

    def _count_dispatch(self, job: Job, chosen: Placement) -> None:
        counters = self._counters
        counters.dispatches += 1
        counters.resumptions += bool(job.past)
        counters.prompt_tokens += chosen.prompt_tokens
        counters.matched_tokens += chosen.route.first.matched_tokens
        way = "fetch" if chosen.holders else "reuse" if chosen.route.first.matched_tokens else "compute"
        decision = (self._config.policy, way)
        counters.decisions[decision] = counters.decisions.get(decision, 0) + 1

    def _note_use(self, job: Job, chosen: Placement, now: int) -> None:
        """The deepest block of the prefix that is reused stands for all of them."""
        blocks = chosen.route.first.matched_tokens // chosen.first.info.geometry.block_tokens
        if blocks and job.identities and self._outbox.remembers:
            end = blocks * IDENTITY_BYTES
            self._outbox.note(EntryUsed(chosen.first.peer, job.identities[end - IDENTITY_BYTES : end], now))

    def _expect(self, job: Job, involved: Sequence[Member], now: int) -> None:
        """The prompt will be cached where it is computed, and where it is decoded when those cache too."""
        if not job.identities:
            return
        for at, member in enumerate(involved):
            if member.info.caching and (at == 0 or self._config.caching is not Caching.PD_CACHING_1):
                self._trees.expect(member.number, job.identities, now)

    def _returns_kv(self, job: Job, attempt: Attempt) -> bool:
        request = job.request
        plain = request.n == 1 and request.beam_width == 0 and request.use_cache
        wanted = self._config.caching is Caching.PD_CACHING_3 and attempt.decode_at is not None
        return wanted and plain and attempt.first.info.caching

    def _stalled_after_ns(self, job: Job) -> int:
        """Longer each time: a long queue looks like a stalled instance, and must not be started over for ever."""
        return self._config.stalled_after_ns << min(job.stalls, _STALL_DOUBLINGS_MAX)

    # -- going on

    def computed(self, attempt: Attempt) -> None:
        """The prompt is computed: its work is done."""
        if attempt.is_computing:
            attempt.is_computing = False
            self.gate.computed(attempt)
            self._loads.discharge(attempt.charges.pop(0))

    def handed_over(self, attempt_id: str, sender: Member, now: int) -> None:
        """The decode instance has all it needs: who computed the prompt no longer matters."""
        job = self.jobs.by_attempt.get(attempt_id)
        attempt = job.attempt if job is not None else None
        if attempt is None or attempt.decode_at is not sender or attempt.first not in attempt.involved:
            return
        attempt.news_ns = now
        self.computed(attempt)
        self.gate.handed_over(attempt)
        attempt.involved.remove(attempt.first)
        del attempt.first.attempts[attempt_id]

    # -- failing

    def attempt_failed(self, job: Job, cause: str, now: int, blamed: Sequence[Member] = ()) -> None:
        """It comes to nothing: try elsewhere, and not with those to blame unless nobody else is there."""
        for member in blamed:
            job.avoid.setdefault(member.peer, 0.0)
        self._abandon(job, cause)
        self.place(job, now)

    def refused(self, sender: Member, message: RequestRefused, now: int) -> None:
        """An instance will not run its attempt. That costs no try, unless it had taken it before."""
        job = self.jobs.by_attempt.get(message.request_id)
        if job is None or job.attempt is None or sender not in job.attempt.involved:
            return  # nobody's, or the sender has handed it over: it is another one's affair
        job.refusal = message.reason
        job.avoid[sender.peer] = message.retry_after_s
        if message.retry_after_s is None or message.retry_after_s > 0:
            job.tries -= 1
        self._abandon(job, "refused", but=sender)
        self.place(job, now)

    def stalled(self, attempt_id: str, now: int) -> None:
        """The timer of an attempt: did news come meanwhile?"""
        job = self.jobs.by_attempt.get(attempt_id)
        if job is None or job.attempt is None:
            return
        due_ns = job.attempt.news_ns + self._stalled_after_ns(job)
        if due_ns > now:
            self._timers.arm(due_ns, ("stall", attempt_id))
            return
        job.stalls += 1
        self.attempt_failed(job, "stalled", now, blamed=list(job.attempt.involved))

    def lost(self, attempt_id: str, by: Member, now: int) -> None:
        """``by`` has no attempt of this name, though it should: a message was lost. Once is chance; whoever loses an
        attempt of a request that has failed before is passed over."""
        job = self.jobs.by_attempt[attempt_id]
        self.attempt_failed(job, "lost", now, blamed=[by] if job.past else [])

    def _abandon(self, job: Job, cause: str, but: Member | None = None) -> None:
        """Nobody waits for the attempt any more, and those involved are told, ``but`` one who knows or is gone."""
        attempt = self.jobs.end_attempt(job)
        job.past.append(attempt_story(attempt, cause))
        causes = self._counters.attempts_failed
        causes[cause] = causes.get(cause, 0) + 1
        self._settle(attempt, completed=False)
        self._cancel(attempt, but)

    def _settle(self, attempt: Attempt, *, completed: bool) -> None:
        self.gate.over(attempt, completed=completed)
        for charge in attempt.charges:
            self._loads.discharge(charge)

    def _cancel(self, attempt: Attempt, but: Member | None = None) -> None:
        for member in attempt.involved:
            if member is not but:
                self._outbox.send(member.peer, Cancel(attempt.attempt_id))

    def abandon_member(self, member: Member) -> list[Job]:
        """``member`` is gone: everything that depends on it has failed. Returns what is to be placed again."""
        failed = [self.jobs.by_attempt[attempt_id] for attempt_id in member.attempts]
        for job in failed:
            self._abandon(job, "gone", but=member)
        return failed

    # -- ending

    def end(self, job: Job, reason: FinishReason, now: int) -> None:
        """End every unfinished sequence with ``reason``, now."""
        for index in job.unfinished:
            offset = len(job.emitted[index])
            job.finished[index] = reason
            self._counters.finished[reason.value] += 1
            ending = TokenOutput(job.request_id, index, (), finish_reason=reason, story=job.told(), offset=offset)
            self._outbox.emit(ending)
        job.is_stopped = True
        self.leave(job, now)

    def leave(self, job: Job, now: int) -> None:
        """All of its sequences have ended."""
        if job.attempt is not None:
            attempt = self.jobs.end_attempt(job)
            self._settle(attempt, completed=job.request.use_cache)
            if job.is_stopped:  # not by the instances, which may go on
                self._cancel(attempt)
        self.jobs.leave(job)
        self.gate.left(job, now)
        self._counters.requests_finished += 1
        self._handles.extend(job.request.tenant, job.request.session, now)
