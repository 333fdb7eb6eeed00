"""What a finished or failed step means for its sequences (level 2)."""

from __future__ import annotations

from memserve import _core
from memserve.errors import check
from memserve.instance.beam_group import advance_beams, take_candidates
from memserve.instance.events import RowFailed, StepFailed, StepFinished
from memserve.instance.outstanding import Outstanding
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group, Phase, Sequence
from memserve.types import FinishReason, TokenLogprobs, TokenOutput

_RETRIES = 1  # a sequence survives one failed step


class Results:
    """Applies what the device reports to the roster."""

    __slots__ = ("_holds", "roster")

    def __init__(self, roster: Roster, holds_tokens: bool) -> None:
        self.roster = roster
        self._holds = holds_tokens

    def apply(self, plan: Outstanding, event: StepFinished) -> None:
        """Deliver the sampled tokens of ``plan``."""
        counters = self.roster.counters
        counters.device_ns += event.device_ns
        if plan.void:
            return
        targets, tokens = plan.targets, event.tokens
        check(len(tokens) == len(targets), f"step {plan.step_id}: {len(tokens)} tokens for {len(targets)} draws")
        self.roster.costs.learn(plan.prefill_tokens, plan.decode_rows, event.device_ns, plan.prefill_pairs)
        if event.failed:  # first: what else the plan says of sequences that have ended is dropped
            self._end_failed(plan, event.failed)
        if event.prompt_logprobs:
            self._take_prompt_logprobs(plan, event)
        dropped_before = counters.dropped_tokens
        if event.logprobs or event.candidates:
            self._apply_rich(targets, event)
        else:
            self._apply_plain(targets, tokens)
        counters.generated_tokens += len(targets) - (counters.dropped_tokens - dropped_before)

    def _apply_plain(self, targets: list[Sequence], tokens: list[int]) -> None:
        """The hot loop: a token for each sequence; what is first, last, or unexpected goes the long way."""
        outputs, decoding = self.roster.outputs, Phase.DECODING
        for place in _core.take_tokens(targets, tokens, decoding, Phase.FINISHED):
            sequence, token = targets[place], tokens[place]
            offset = len(sequence.out) - 1
            if sequence.phase is not decoding or not offset or token in sequence.stops:  # else it will draw more
                self._look_at(sequence, token, None)
            elif not sequence.told:
                outputs.append(TokenOutput(sequence.request_id, sequence.index, (token,), offset=offset))
                sequence.told = offset + 1 if self._holds else 0

    def _apply_rich(self, targets: list[Sequence], event: StepFinished) -> None:
        for position, (sequence, token) in enumerate(zip(targets, event.tokens, strict=True)):
            if sequence.group.beam is not None:
                take_candidates(self.roster, sequence, event.candidates.get(position))
            else:
                if sequence.phase is not Phase.FINISHED:
                    sequence.inflight -= 1
                    sequence.out.append(token)
                self._look_at(sequence, token, event.logprobs.get(position))
        beams: dict[str, Group] = {s.request_id: s.group for s in targets if s.group.beam is not None}
        for group in beams.values():
            advance_beams(self.roster, group)

    def _look_at(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """The last token of one sequence, with all that may come with it."""
        if sequence.phase is Phase.FINISHED:
            self.roster.counters.dropped_tokens += 1
            return
        generated = len(sequence.out)
        reason: FinishReason | None = None
        scoring_only = sequence.max_tokens == 0  # the prompt's logprobs were wanted, no token
        if token in sequence.stops and generated >= sequence.min_tokens and not scoring_only:
            reason = FinishReason.STOP
        elif generated >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        self._emit(sequence, () if scoring_only else (token,), logprobs, reason)
        if reason is not None:
            self.roster.finish(sequence, reason)
        else:
            self.roster.wake(sequence)

    def _emit(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> None:
        first = len(sequence.out) == 1
        group = sequence.group
        if group.muted or (sequence.told and reason is None and logprobs is None and sequence.phase is Phase.IDLE):
            return  # nobody is to hear of it, or what comes next tells it
        offset = len(sequence.out) - 1
        if self._holds:
            offset = sequence.told or offset
            tokens = tuple(sequence.out[offset:]) if tokens else ()
            sequence.told = len(sequence.out)
        prompt_logprobs = group.prompt_logprobs if first else None
        self.roster.outputs.append(
            TokenOutput(
                sequence.request_id,
                sequence.index,
                tokens,
                logprobs=(logprobs,) if logprobs is not None and tokens else (),
                finish_reason=reason,
                cached_tokens=group.cached_tokens if first else 0,
                prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
                queue_ns=group.queue_ns if first else None,
                offset=offset,
                story=group.take_facts(),
            )
        )

    def _take_prompt_logprobs(self, plan: Outstanding, event: StepFinished) -> None:
        """Entry ``j`` of a row belongs to the token after the row's ``j``-th: its logits were computed there."""
        for row, entries in event.prompt_logprobs.items():
            sequence, start = plan.prompt_rows[row]
            collected = sequence.group.prompt_logprobs
            if collected is not None:
                for place, entry in enumerate(entries, start + 1):
                    if place < sequence.prompt_tokens:
                        collected[place] = entry

    # -- failure

    def fail(self, failed: Outstanding, later: list[Outstanding], event: StepFailed) -> None:
        """Nothing of ``failed`` can be relied upon, nor of the plans behind it: tokens, KV, copies, cache entries.

        All KV is forgotten, not only that of the failed rows: copies of others (evictions, swaps) were in those plans
        too. Sequences that had a row are retried once, the others do not pay for it.
        """
        roster = self.roster
        roster.counters.steps_failed += 1
        if failed.void:
            return  # expected: it was built upon a plan that failed
        for plan in later:
            plan.void = True
        involved = {id(sequence) for plan in (failed, *later) for sequence in (*plan.targets, *plan.chunks)}
        for group in list(roster.groups.values()):
            for sequence in list(group.sequences.values()):
                sequence.failures += id(sequence) in involved
                roster.reset(sequence)
        roster.memory.pool.clear_cache()
        roster.closing.clear()
        roster.slots_unknown = True
        for group in list(roster.groups.values()):
            self._end_hopeless(group)

    def _end_hopeless(self, group: Group) -> None:
        for sequence in list(group.sequences.values()):
            if sequence.failures > _RETRIES and sequence.phase is not Phase.FINISHED:
                self._end(sequence)

    def _end(self, sequence: Sequence, error: str = "") -> None:
        """End one sequence with an error; all of its request where the others depend on it."""
        roster, group = self.roster, sequence.group
        if group.beam is not None or group.muted or group.forks_pending:
            roster.finish_group(group, FinishReason.ERROR, error)
            return
        roster.outputs.append(sequence.ending(FinishReason.ERROR, error))
        roster.finish(sequence, FinishReason.ERROR)

    def _end_failed(self, plan: Outstanding, failed: dict[int, RowFailed]) -> None:
        """Rows that failed alone: their sequences end, each with its own error. Trying again would fail again."""
        by_slot = plan.by_slot()
        reporting = {id(sequence) for sequence, _ in plan.prompt_rows.values()}
        check(failed.keys() <= by_slot.keys(), f"step {plan.step_id}: rows failed that it does not have: {failed}")
        for slot, failure in failed.items():
            sequence = by_slot[slot]
            if sequence.phase is Phase.FINISHED:
                continue
            self.roster.counters.rows_failed += 1
            if failure.kv_is_suspect:
                self.roster.memory.distrust(sequence)
            if id(sequence) in reporting:  # prompt logprobs that its whole request waits for are lost
                self.roster.finish_group(sequence.group, FinishReason.ERROR, failure.reason)
            else:
                self._end(sequence, failure.reason)
