"""What an instance says about a sequence, against what the client has (level 2).

Outputs come on several ways: a decode instance's tokens may be here before the prefill instance's first one; messages
get lost; an old attempt may speak long after another one has taken its place. Each output says how many tokens came
before it, and so it is known, repeated, early or late.
"""

from __future__ import annotations

from memserve.cluster.jobs import ASIDE_OUTPUTS_MAX, Attempt, Job
from memserve.cluster.lifecycle import Lifecycle
from memserve.cluster.outbox import Outbox
from memserve.cluster.registry import Member
from memserve.cluster.report import Counters
from memserve.cluster.timers import Timers
from memserve.messages import Cancel, Tokens
from memserve.types import FinishReason, TokenOutput
from memserve.units import NS_PER_S

GAP_NS = 2 * NS_PER_S
"""Tokens that are missing for so long were lost: the attempt has failed."""

_BROKEN = (FinishReason.ERROR, FinishReason.CANCELLED)
"""Endings that are the instance's own affair, unless they name an error of the request: its device failed, or it goes
away."""


class OutputMerger:
    """Takes outputs in and gives the client what is new of them, each token once and in order."""

    __slots__ = ("_counters", "_lifecycle", "_outbox", "_timers")

    def __init__(self, lifecycle: Lifecycle, timers: Timers, outbox: Outbox, counters: Counters) -> None:
        self._lifecycle, self._timers, self._outbox, self._counters = lifecycle, timers, outbox, counters

    def take(self, sender: Member, message: Tokens, now: int) -> None:
        """News from ``sender``."""
        strangers: dict[str, None] = {}
        by_attempt = self._lifecycle.jobs.by_attempt
        for output in message.outputs:
            job = by_attempt.get(output.request_id)
            if job is None or job.attempt is None or not job.attempt.is_from(sender.peer):
                self._counters.outputs_late += 1
                if output.finish_reason is None:
                    strangers[output.request_id] = None
                continue
            if not self._pass_on(job, job.attempt, output, now):
                self._take(job, job.attempt, sender, output, now)
        for attempt_id in strangers:  # it has not heard that nobody waits for these
            self._outbox.send(sender.peer, Cancel(attempt_id))

    def gap_lasted(self, attempt_id: str, now: int) -> None:
        """The timer of an attempt with outputs aside."""
        job = self._lifecycle.jobs.by_attempt.get(attempt_id)
        if job is None or job.attempt is None or job.attempt.gap_ns is None:
            return
        due_ns = job.attempt.gap_ns + GAP_NS
        if due_ns > now:
            self._timers.arm(due_ns, ("gap", attempt_id))
        else:
            self._lifecycle.attempt_failed(job, "gap", now)

    def _pass_on(self, job: Job, attempt: Attempt, output: TokenOutput, now: int) -> bool:
        """The hot path: further tokens of a sequence, in order, and nothing else. Whether ``output`` was that."""
        index, tokens, offset = output.index, output.tokens, output.offset
        request = job.request
        if output.finish_reason is not None or attempt.aside or attempt.is_computing or not 0 <= index < request.n:
            return False
        emitted = job.emitted[index]
        if not tokens or not offset or offset != len(emitted) or job.finished[index] is not None:
            return False
        if offset + len(tokens) > request.stop.max_tokens or not job.introduced[index]:
            return False
        attempt.news_ns, job.unplaced_ns = now, None
        logprobs, story = output.logprobs, output.story
        self._outbox.emit(
            TokenOutput(
                request.request_id, index, tokens, logprobs=logprobs, story=story, offset=offset,
                cumulative_logprob=output.cumulative_logprob,
            )
        )  # fmt: skip
        emitted.extend(tokens)
        self._counters.tokens += len(tokens)
        return True

    def _take(self, job: Job, attempt: Attempt, sender: Member, output: TokenOutput, now: int) -> None:
        if self._contradicts(job, output, now):
            self._lifecycle.attempt_failed(job, "contradiction", now, blamed=[sender])
            return
        attempt.news_ns, job.unplaced_ns = now, None
        self._lifecycle.computed(attempt)
        if output.finish_reason in _BROKEN and not output.error:  # else it would fail anywhere: the client is told
            if sender in attempt.involved and job.finished[output.index] is None:
                self._lifecycle.attempt_failed(job, "error", now, blamed=[sender])
            else:
                self._counters.outputs_late += 1
        elif output.offset > len(job.emitted[output.index]):
            self._keep_aside(job, attempt, output, now)
        else:
            self._deliver_new(job, attempt, output, now)
            self._deliver_aside(job, attempt, now)

    @staticmethod
    def _contradicts(job: Job, output: TokenOutput, now: int) -> bool:
        """Whether no honest instance could say this: its memory is broken, or its clock runs ahead."""
        request = job.request
        if not 0 <= output.index < request.n:
            return True
        if output.offset < 0 or output.offset + len(output.tokens) > max(0, request.stop.max_tokens):
            return True
        if output.finish_reason is not FinishReason.DEADLINE:
            return False
        return request.deadline_ns is None or request.deadline_ns > now

    # -- out of order

    def _keep_aside(self, job: Job, attempt: Attempt, output: TokenOutput, now: int) -> None:
        if job.finished[output.index] is not None:
            self._counters.outputs_late += 1
            return
        attempt.aside.append(output)
        if attempt.gap_ns is None:
            attempt.gap_ns = now
            self._timers.arm(now + GAP_NS, ("gap", attempt.attempt_id))
        if len(attempt.aside) > ASIDE_OUTPUTS_MAX:
            self._lifecycle.attempt_failed(job, "gap", now)

    def _deliver_aside(self, job: Job, attempt: Attempt, now: int) -> None:
        """What was early may follow now."""
        while attempt.aside and job.attempt is attempt:
            ready = [o for o in attempt.aside if o.offset <= len(job.emitted[o.index])]
            if not ready:
                return
            attempt.aside = [o for o in attempt.aside if o.offset > len(job.emitted[o.index])]
            attempt.gap_ns = now if attempt.aside else None
            for output in sorted(ready, key=lambda o: o.offset):
                if job.attempt is attempt:
                    self._deliver_new(job, attempt, output, now)

    # -- in order

    def _deliver_new(self, job: Job, attempt: Attempt, output: TokenOutput, now: int) -> None:
        """Deliver what of ``output`` the client does not have. Its offset is not beyond what it has."""
        index = output.index
        known = len(job.emitted[index]) - output.offset
        reason = output.finish_reason
        nothing_new = known > len(output.tokens) or (known == len(output.tokens) and reason is None)
        if job.finished[index] is not None or nothing_new:
            self._counters.outputs_late += 1
            return
        self._outbox.emit(self._for_client(job, attempt, output, known))
        job.emitted[index].extend(output.tokens[known:])
        job.introduced[index] = True
        self._counters.tokens += len(output.tokens) - known
        if reason is not None:
            job.finished[index] = reason
            self._counters.finished[reason.value] += 1
            if all(job.finished):
                self._lifecycle.leave(job, now)

    @staticmethod
    def _for_client(job: Job, attempt: Attempt, output: TokenOutput, known: int) -> TokenOutput:
        """Under the client's name, without what it has had, and with what was decided."""
        index = output.index
        first = not job.introduced[index]
        queue_ns = output.queue_ns if first else None
        told = job.told() if first or output.finish_reason is not None else ()
        return TokenOutput(
            job.request_id,
            index,
            output.tokens[known:],
            logprobs=output.logprobs[known:],
            finish_reason=output.finish_reason,
            error=output.error,
            cached_tokens=output.cached_tokens if first else 0,
            prompt_logprobs=output.prompt_logprobs if first else None,
            cumulative_logprob=output.cumulative_logprob,
            queue_ns=None if queue_ns is None else queue_ns + attempt.dispatched_ns - job.arrived_ns,
            story=told + output.story,  # who decodes tells what came to it with its first output, the client's second
            offset=len(job.emitted[index]),
        )
