"""What an instance says about a sequence, against what the client has.

Outputs come on several ways: a decode instance's tokens may be here before the prefill instance's first one; messages
get lost; an old attempt may speak long after another one has taken its place. Each output says how many tokens came
before it, and so it is known, repeated, early or late.
"""

from __future__ import annotations

from memserve.base.types import FinishReason, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import Cancel, Tokens
from memserve.router.members.registry import Member
from memserve.router.outbox import Outbox, Timers
from memserve.router.report import Counters
from memserve.router.requests.lifecycle import Lifecycle
from memserve.router.requests.requests import Attempt, RequestPhase, RequestState

GAP_NS = 2 * NS_PER_S
"""Tokens that are missing for so long were lost: the attempt has failed."""
EARLY_OUTPUTS_MAX = 4096
"""Outputs of an attempt that wait for earlier ones; more of them are a failure."""

_BROKEN = (FinishReason.ERROR, FinishReason.CANCELLED)
"""Endings that concern the instance alone, unless they name an error of the request: the device
failed, for instance."""


class OutputMerger:
    """Merges the outputs of all attempts into one stream a sequence: each token once and in order."""

    def __init__(self, lifecycle: Lifecycle, timers: Timers, outbox: Outbox, counters: Counters) -> None:
        self._lifecycle, self._timers, self._outbox, self._counters = lifecycle, timers, outbox, counters

    def merge_outputs(self, sender: Member, message: Tokens, now_ns: int) -> None:
        """Outputs from ``sender``."""
        unknown_attempts: dict[str, None] = {}
        by_attempt = self._lifecycle.requests.by_attempt
        for output in message.outputs:
            req = by_attempt.get(output.request_id)
            if req is None or req.attempt is None or not req.attempt.is_from(sender.peer):
                if self._lifecycle.answers.on_output(sender.peer, output):
                    continue
                self._counters.outputs_late += 1
                if output.finish_reason is None:
                    unknown_attempts[output.request_id] = None
                continue
            if not self._pass_on(req, req.attempt, output, now_ns):
                self._merge_output(req, req.attempt, sender, output, now_ns)
        for attempt_id in unknown_attempts:  # it has not heard that these are over
            self._outbox.send(sender.peer, Cancel(attempt_id))

    def on_gap_timer(self, attempt_id: str, now_ns: int) -> None:
        """The timer of an attempt with early outputs."""
        req = self._lifecycle.requests.by_attempt.get(attempt_id)
        if req is None or req.attempt is None or req.attempt.gap_ns is None:
            return
        due_ns = req.attempt.gap_ns + GAP_NS
        if due_ns > now_ns:
            self._timers.arm(due_ns, self.on_gap_timer, attempt_id)
        else:
            self._lifecycle.attempt_failed(req, "gap", now_ns)

    def _pass_on(self, req: RequestState, attempt: Attempt, output: TokenOutput, now_ns: int) -> bool:
        """The hot path: further tokens of a sequence, in order, and nothing else. Whether ``output`` was that."""
        index, tokens, offset = output.index, output.tokens, output.offset
        request = req.request
        if (
            output.finish_reason is not None
            or attempt.early
            or req.phase is RequestPhase.PREFILLING
            or not 0 <= index < request.n
        ):
            return False
        emitted = req.emitted[index]
        if not tokens or not offset or offset != len(emitted) or req.finished[index] is not None:
            return False
        if offset + len(tokens) > request.stop.max_tokens or not req.introduced[index]:
            return False
        attempt.news_ns, req.unplaced_ns = now_ns, None
        logprobs, story = output.logprobs, output.story
        self._outbox.emit_output(
            TokenOutput(
                request.request_id, index, tokens, logprobs=logprobs, story=story, offset=offset,
                cumulative_logprob=output.cumulative_logprob,
            )
        )  # fmt: skip
        emitted.extend(tokens)
        self._counters.tokens += len(tokens)
        return True

    def _merge_output(
        self, req: RequestState, attempt: Attempt, sender: Member, output: TokenOutput, now_ns: int
    ) -> None:
        if not attempt.is_generated_by(sender):
            if output.finish_reason is not None and sender in attempt.involved:  # its part is lost
                self._lifecycle.attempt_failed(req, "error", now_ns)
            return
        if self._is_contradictory(req, output, now_ns):
            self._lifecycle.attempt_failed(req, "contradiction", now_ns, blamed=[sender])
            return
        attempt.news_ns, req.unplaced_ns = now_ns, None
        self._lifecycle.on_prefilled(req, attempt)
        if output.finish_reason in _BROKEN and not output.error:  # else it would fail anywhere: the client is told
            if sender in attempt.involved and req.finished[output.index] is None:
                self._lifecycle.attempt_failed(req, "error", now_ns, blamed=[sender])
            else:
                self._counters.outputs_late += 1
        elif output.offset > len(req.emitted[output.index]):
            self._keep_early(req, attempt, output, now_ns)
        else:
            self._deliver_new(req, attempt, output, now_ns)
            self._deliver_early(req, attempt, now_ns)

    @staticmethod
    def _is_contradictory(req: RequestState, output: TokenOutput, now_ns: int) -> bool:
        """Whether no honest instance could say this: its memory is broken, or its clock runs ahead."""
        request = req.request
        if not 0 <= output.index < request.n:
            return True
        if output.offset < 0 or output.offset + len(output.tokens) > max(0, request.stop.max_tokens):
            return True
        if output.finish_reason is not FinishReason.DEADLINE:
            return False
        return request.deadline_ns is None or request.deadline_ns > now_ns

    # -- out of order

    def _keep_early(self, req: RequestState, attempt: Attempt, output: TokenOutput, now_ns: int) -> None:
        if req.finished[output.index] is not None:
            self._counters.outputs_late += 1
            return
        attempt.early.append(output)
        if attempt.gap_ns is None:
            attempt.gap_ns = now_ns
            self._timers.arm(now_ns + GAP_NS, self.on_gap_timer, attempt.attempt_id)
        if len(attempt.early) > EARLY_OUTPUTS_MAX:
            self._lifecycle.attempt_failed(req, "gap", now_ns)

    def _deliver_early(self, req: RequestState, attempt: Attempt, now_ns: int) -> None:
        """What was early may follow now."""
        while attempt.early and req.attempt is attempt:
            ready = [o for o in attempt.early if o.offset <= len(req.emitted[o.index])]
            if not ready:
                return
            attempt.early = [o for o in attempt.early if o.offset > len(req.emitted[o.index])]
            attempt.gap_ns = now_ns if attempt.early else None
            for output in sorted(ready, key=lambda o: o.offset):
                if req.attempt is attempt:
                    self._deliver_new(req, attempt, output, now_ns)

    # -- in order

    def _deliver_new(self, req: RequestState, attempt: Attempt, output: TokenOutput, now_ns: int) -> None:
        """Deliver what of ``output`` the client does not have. Its offset is not beyond what it has."""
        index = output.index
        known_tokens = len(req.emitted[index]) - output.offset
        reason = output.finish_reason
        nothing_new = known_tokens > len(output.tokens) or (known_tokens == len(output.tokens) and reason is None)
        if req.finished[index] is not None or nothing_new:
            self._counters.outputs_late += 1
            return
        self._outbox.emit_output(self._for_client(req, attempt, output, known_tokens))
        req.emitted[index].extend(output.tokens[known_tokens:])
        req.introduced[index] = True
        self._counters.tokens += len(output.tokens) - known_tokens
        if reason is not None:
            req.finished[index] = reason
            self._counters.finished[reason.value] += 1
            if all(req.finished):
                self._lifecycle.finish_request(req, now_ns)

    @staticmethod
    def _for_client(req: RequestState, attempt: Attempt, output: TokenOutput, known_tokens: int) -> TokenOutput:
        """Under the client's name, without what it has had, and with what was decided."""
        index = output.index
        first = not req.introduced[index]
        queue_ns = output.queue_ns if first else None
        story = req.routing_story() if first or output.finish_reason is not None else ()
        return TokenOutput(
            req.request_id,
            index,
            output.tokens[known_tokens:],
            logprobs=output.logprobs[known_tokens:],
            finish_reason=output.finish_reason,
            error=output.error,
            cached_tokens=output.cached_tokens if first or not attempt.first.shares_kv else 0,
            inexact_tokens=output.inexact_tokens if first else 0,
            prompt_logprobs=output.prompt_logprobs if first else None,
            cumulative_logprob=output.cumulative_logprob,
            queue_ns=None if queue_ns is None else queue_ns + attempt.dispatched_ns - req.arrived_ns,
            story=story + output.story,  # a decode instance tells its part with its first output, the client's second
            offset=len(req.emitted[index]),
            hidden=output.hidden if first else b"",
        )
