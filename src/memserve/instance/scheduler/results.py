"""What a finished or failed step means for its sequences, beams among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from memserve import _core
from memserve.base.errors import check
from memserve.base.types import FinishReason, TokenLogprobs, TokenOutput
from memserve.instance.events import RowFailed, StepFailed, StepFinished
from memserve.instance.scheduler.batch import InflightPlan
from memserve.instance.scheduler.beam import BeamSearch, BeamState, Candidates, Hypothesis, Survivor
from memserve.instance.scheduler.sequence import Cause, Group, Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.instance.speculation.speculation import Speculation

_RETRIES = 1  # a sequence survives one failed step


class StepResults:
    """Applies what the device reports to the state."""

    def __init__(self, state: SchedulerState, speculation: Speculation | None = None) -> None:
        self.state = state
        #: None: no drafts
        self.speculation = speculation

    def _learn_times(self, plan: InflightPlan, event: StepFinished) -> None:
        """How long steps and copies of this kind take, and what prompts that overtake take from answers."""
        state, costs, overtaking = self.state, self.state.costs, self.state.memory.layers.overtaking
        step_ns = event.device_ns - event.copies_ns
        if event.copies_ns:
            moved = sum([len(copy.src) for copy in plan.plan.copies if copy.src_tier is not copy.dst_tier])
            costs.learn_swap(moved, event.copies_ns)
        overtaking.pass_time(step_ns, len(state.groups))
        if plan.overtaking_tokens and plan.decode_rows and costs.decode_ns:
            share = plan.overtaking_tokens / plan.prefill_tokens
            alone_ns = costs.model.prefill.work_ns(plan.prefill_tokens, plan.prefill_pairs)
            more_ns = round(share * (step_ns - costs.decode_ns))
            overtaking.learn_delay(plan.overtaking_tokens, more_ns, share * alone_ns, 1 + len(state.parked))
        if plan.plan.slots and not (plan.drafts or plan.plan.gates):  # these have waited for others
            costs.learn_step(plan.prefill_tokens, plan.decode_rows, step_ns, plan.prefill_pairs, plan.reported_layers)
            if not (plan.prefill_tokens or costs.is_measured):
                costs.learn_decode(plan.decode_rows, sum(plan.plan.starts) + plan.decode_rows, step_ns)

    def apply_step(self, plan: InflightPlan, event: StepFinished) -> None:
        """Deliver the sampled tokens of ``plan``."""
        counters = self.state.counters
        counters.device_ns += event.device_ns
        if event.link is not None:
            self.state.memory.layers.on_step_finished(event.link, event.device_ns)
        if plan.void:
            return
        targets, tokens = plan.targets, event.tokens
        check(len(tokens) == len(targets), f"step {plan.step_id}: {len(tokens)} tokens for {len(targets)} draws")
        if self.speculation is not None:
            self.speculation.learn_step(plan, event)
        self._learn_times(plan, event)
        if event.failed:  # first: further results of sequences that have ended are dropped
            self._end_failed(plan, event.failed)
        if event.prompt_logprobs:
            self._take_prompt_logprobs(plan, event)
        if event.hidden:
            self._take_hidden(plan, event)
        if event.late:
            plan, event = self._skip_late(plan, event)
            targets, tokens = plan.targets, event.tokens
        dropped_before = counters.dropped_tokens
        if event.logprobs or event.candidates:
            self._apply_rich(targets, event)
        else:
            self._apply_plain(plan, tokens)
        if plan.drafts:
            self._take_kept(plan, event)
        drawn_tokens = len(targets) + sum(map(len, event.accepted_drafts.values()))
        counters.generated_tokens += drawn_tokens - (counters.dropped_tokens - dropped_before)

    def _skip_late(self, plan: InflightPlan, event: StepFinished) -> tuple[InflightPlan, StepFinished]:
        """Note the draws that were late; what is left of both."""
        timely_places: list[int] = []
        for place, slot in enumerate(plan.plan.drawing_slots):
            if slot not in event.late:
                timely_places.append(place)
            elif plan.targets[place].phase is not Phase.FINISHED:
                self.state.counters.late_draws += 1
                self.state.skip_draw(plan.targets[place])
        places = {place: number for number, place in enumerate(timely_places)}
        timely_event = replace(
            event,
            tokens=[event.tokens[place] for place in timely_places],
            logprobs={places[place]: logprobs for place, logprobs in event.logprobs.items()},
            candidates={places[place]: candidates for place, candidates in event.candidates.items()},
        )
        return replace(plan, targets=[plan.targets[place] for place in timely_places]), timely_event

    def _apply_plain(self, plan: InflightPlan, tokens: list[int]) -> None:
        """The hot loop: a token for each sequence. Most sequences draw on; first and last tokens need more care."""
        targets, outputs = plan.targets, self.state.outputs
        special = set(_core.take_tokens(targets, tokens, Phase.DECODING, Phase.FINISHED))
        for place in self.reported_places(plan, special):
            sequence, token = targets[place], tokens[place]
            if place in special:
                self._take_special(sequence, token, None)
            else:
                offset = len(sequence.out) - 1
                outputs.append(TokenOutput(sequence.request_id, sequence.index, (token,), offset=offset))

    def reported_places(self, plan: InflightPlan, special: set[int]) -> Iterable[int]:
        """Places in ``plan.targets`` whose tokens are emitted with this step, in order, those in ``special`` among
        them: here all. A host that knows otherwise when tokens are drawn may leave out plain ones."""
        return range(len(plan.targets))

    def _apply_rich(self, targets: list[Sequence], event: StepFinished) -> None:
        for position, (sequence, token) in enumerate(zip(targets, event.tokens, strict=True)):
            if sequence.group.beam is not None:
                take_candidates(self.state, sequence, event.candidates.get(position))
            else:
                if sequence.phase is not Phase.FINISHED:
                    sequence.inflight -= 1
                    sequence.out.append(token)
                self._take_special(sequence, token, event.logprobs.get(position))
        beams: dict[str, Group] = {s.request_id: s.group for s in targets if s.group.beam is not None}
        for group in beams.values():
            advance_beams(self.state, group)

    def _take_kept(self, plan: InflightPlan, event: StepFinished) -> None:
        """Behind the first token of each row with drafts, which was taken as any other: what else was drawn there. KV
        of the drafts that were right is there."""
        counters = self.state.counters
        for sequence in plan.targets[-len(plan.drafts) :]:
            slot = sequence.draw[0]  # also of one that was preempted: it waits for these tokens
            drafted, accepted = plan.drafts[slot], event.accepted_drafts.get(slot, [])
            counters.drafted_tokens += drafted
            counters.kept_tokens += len(accepted)
            if self.speculation is not None:
                self.speculation.learn_outcome(sequence, drafted, len(accepted))
            for token in accepted:
                if sequence.phase is not Phase.FINISHED:
                    sequence.out.append(token)
                    sequence.left -= 1
                    sequence.computed += sequence.phase is Phase.DECODING  # else it has lost what was computed
                self._take_special(sequence, token, None)

    def _take_special(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Emit the newest token of a sequence with all that goes with a first or last one, and end the sequence or let
        it go on."""
        if sequence.phase is Phase.FINISHED:
            self.state.counters.dropped_tokens += 1
            return
        generated = len(sequence.out)
        reason: FinishReason | None = None
        scoring_only = sequence.max_tokens == 0  # the prompt's logprobs were wanted, no token
        if token in sequence.stops and generated >= sequence.min_tokens and not scoring_only:
            reason = FinishReason.STOP
        elif generated >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if self.state.objectives is not None:
            self.state.objectives.on_token_emitted(sequence, reason, self.state.now)
        if reason is not None:
            self.state.memory.layers.report_placement(sequence)
        if reason is not None and sequence.pace is not None and sequence.pace.drafted:
            sequence.group.facts.append(("drafts_kept", f"{sequence.pace.accepted} of {sequence.pace.drafted} tokens"))
        self.emit_token(sequence, () if scoring_only else (token,), logprobs, reason)
        if reason is not None:
            self.state.finish_sequence(sequence, reason)
        else:
            self.state.resume_sequence(sequence)

    def emit_token(
        self, sequence: Sequence, tokens: tuple[int, ...], logprobs: TokenLogprobs | None, reason: FinishReason | None
    ) -> None:
        """Emit the newest token of a sequence, if the client is to have it."""
        first = len(sequence.out) == 1
        group = sequence.group
        if group.muted:
            return
        prompt_logprobs = group.prompt_logprobs if first else None
        reused = group.cached_tokens if first and prompt_logprobs is None else 0  # else those of another sequence of it
        self.state.outputs.append(
            TokenOutput(
                sequence.request_id,
                sequence.index,
                tokens,
                logprobs=(logprobs,) if logprobs is not None and tokens else (),
                finish_reason=reason,
                cached_tokens=reused,
                inexact_tokens=group.inexact_tokens if first else 0,
                prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
                queue_ns=group.queue_ns if first else None,
                offset=len(sequence.out) - 1,
                story=group.take_facts(),
                hidden=_pooled(sequence) if first and group.hidden is not None else b"",
            )
        )

    def _take_hidden(self, plan: InflightPlan, event: StepFinished) -> None:
        """Sums of rows are added up; a prompt that is computed again begins anew."""
        by_slot = plan.by_slot()
        for row, state in event.hidden.items():
            group = by_slot[plan.plan.slots[row]].group
            values = np.frombuffer(state, np.float32)
            adds_up = group.prompt_logprobs is not None and plan.plan.starts[row] > 0
            group.hidden = group.hidden + values if adds_up and group.hidden is not None else values

    def _take_prompt_logprobs(self, plan: InflightPlan, event: StepFinished) -> None:
        """Entry ``j`` of a row belongs to the token after the row's ``j``-th: its logits were computed there."""
        for row, entries in event.prompt_logprobs.items():
            sequence, start = plan.prompt_rows[row]
            collected = sequence.group.prompt_logprobs
            if collected is not None:
                for place, entry in enumerate(entries, start + 1):
                    if place < sequence.prompt_tokens:
                        collected[place] = entry

    # -- failure

    def fail_step(self, failed: InflightPlan, later: list[InflightPlan], event: StepFailed) -> None:
        """Drop the results of ``failed`` and of the plans behind it: tokens, KV, copies, cache entries.

        All KV is forgotten, not only that of the failed rows: copies of others (evictions, swaps) were in those plans
        too. A sequence survives one failed step that it has a row in; failed steps of others do not count for it.
        """
        state = self.state
        state.counters.steps_failed += 1
        if failed.void:
            return  # expected: this plan was built upon one that failed
        for plan in later:
            plan.void = True
        involved = {id(sequence) for plan in (failed, *later) for sequence in (*plan.targets, *plan.chunks)}
        for group in list(state.groups.values()):
            for sequence in list(group.sequences.values()):
                sequence.failures += id(sequence) in involved
                state.reset_sequence(sequence)
        state.memory.pool.clear_cache()
        state.memory.states.forget_orders()
        state.closing.clear()
        state.slots_unknown = True
        for group in list(state.groups.values()):
            self._end_after_retries(group)

    def _end_after_retries(self, group: Group) -> None:
        for sequence in list(group.sequences.values()):
            if sequence.failures > _RETRIES and sequence.phase is not Phase.FINISHED:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: Sequence, error: str = "") -> None:
        """End one sequence with an error, and with it the request where other sequences depend on this one."""
        state, group = self.state, sequence.group
        if group.beam is not None or group.muted or group.forks_pending:
            state.finish_group(group, FinishReason.ERROR, error)
            return
        state.outputs.append(sequence.final_output(FinishReason.ERROR, error))
        state.finish_sequence(sequence, FinishReason.ERROR)

    def _end_failed(self, plan: InflightPlan, failed: dict[int, RowFailed]) -> None:
        """End the sequences of rows that failed alone, each with its own error. A retry would fail again."""
        by_slot = plan.by_slot()
        reporting = {id(sequence) for sequence, _ in plan.prompt_rows.values()}
        check(
            failed.keys() <= by_slot.keys(), "step {}: it does not have the rows that failed: {}", plan.step_id, failed
        )
        for slot, failure in failed.items():
            sequence = by_slot[slot]
            if sequence.phase is Phase.FINISHED:  # cancelled since: what its last plans have published is in the index
                if failure.kv_is_suspect:
                    memory, tokens = self.state.memory, sequence.known_tokens()
                    memory.forget_kv(sequence, tokens[: memory.pool.match(sequence.group.isolation, tokens)])
                continue
            self.state.counters.rows_failed += 1
            if failure.kv_is_suspect:
                self.state.memory.discard_kv(sequence)
            if id(sequence) in reporting:  # prompt logprobs that its whole request waits for are lost
                self.state.finish_group(sequence.group, FinishReason.ERROR, failure.reason)
            else:
                self._end_sequence(sequence, failure.reason)


# -- beams: collecting candidates, forking, dropping, delivering


def take_candidates(state: SchedulerState, sequence: Sequence, candidates: Candidates | None) -> None:
    """The candidates of a beam came. The next generation begins when all beams of the request have theirs."""
    if sequence.phase is Phase.FINISHED:
        state.counters.dropped_tokens += 1
        return
    check(candidates is not None, "{} is a beam, but no candidates came for it", sequence)
    sequence.inflight -= 1
    sequence.candidates = candidates


def advance_beams(state: SchedulerState, group: Group) -> None:
    """Once every beam has its candidates: make the next generation, or end the search."""
    beams, search = list(group.sequences.values()), group.beam
    if search is None or not beams or any(beam.candidates is None for beam in beams):
        return
    states = [BeamState(b.out, b.logprobs, b.cumulative_logprob, b.candidates or []) for b in beams]
    survivors = search.next_survivors(states, group.max_tokens)
    if survivors:
        _next_generation(state, group, beams, survivors)
    else:
        _deliver(state, group, search, beams)


def _next_generation(state: SchedulerState, group: Group, beams: list[Sequence], survivors: list[Survivor]) -> None:
    """A beam goes on as its first survivor; the others fork from it; beams without survivors are dropped."""
    parents = {survivor.parent for survivor in survivors}
    for place, beam in enumerate(beams):
        if place not in parents:
            state.drop_beam(beam)
    heirs: list[Sequence] = []
    for survivor in survivors:  # all forks come before any beam moves on: they copy its present state
        beam = beams[survivor.parent]
        heirs.append(beam if beam not in heirs else _fork(state, beam))
    for heir, survivor in zip(heirs, survivors, strict=True):
        _extend(state, heir, survivor)
    group.sequences = {heir.index: heir for heir in heirs}  # best first: ties in the next generation go to the better
    state.return_reserved(group)
    group.forks_pending = 0


def _fork(state: SchedulerState, parent: Sequence) -> Sequence:
    """Another beam with the parent's tokens. It shares the parent's blocks if there are any and a slot is free, and is
    computed from its tokens otherwise."""
    group = parent.group
    child = group.new_sequence()
    child.out, child.logprobs = list(parent.out), list(parent.logprobs)
    child.cumulative_logprob = parent.cumulative_logprob
    child.failures = parent.failures
    child.resumed = len(child.out)  # of the child's own computing none is drawn
    if parent.blocks and (group.reserved_slots or state.free_slots):
        child.resumed = parent.resumed
        state.take_slot(child)
        state.memory.fork(parent, child)
        state.move(child, Cause.BEAM_FORKED)
    else:
        state.move(child, Cause.PREEMPTED)
    return child


def _extend(state: SchedulerState, beam: Sequence, survivor: Survivor) -> None:
    """Append the chosen token. The device gets it by opening the slot anew."""
    beam.out.append(survivor.token)
    beam.logprobs.append(survivor.logprob)
    beam.cumulative_logprob = survivor.cumulative_logprob
    beam.candidates = None
    state.close_slot(beam)
    if beam.phase is Phase.IDLE:
        state.move(beam, Cause.BEAM_EXTENDED)
    else:
        state.resume_sequence(beam)


def _deliver(state: SchedulerState, group: Group, search: BeamSearch, beams: list[Sequence]) -> None:
    """The search is over: the best ``n`` hypotheses are the request's sequences."""
    for beam in beams:
        state.drop_beam(beam)
    for index in range(group.request.n):
        output = _output(group, index, search.finished[index] if index < len(search.finished) else None)
        state.outputs.append(output)
        state.counters.count_finish(output.finish_reason or FinishReason.STOP)
    state.forget_group(group)


def _output(group: Group, index: int, hypothesis: Hypothesis | None) -> TokenOutput:
    request = group.request
    if hypothesis is None:  # fewer ends than asked for: every continuation was a stop token
        return TokenOutput(request.request_id, index, (), finish_reason=FinishReason.STOP)
    pairs = zip(hypothesis.tokens, hypothesis.logprobs, strict=True)
    return TokenOutput(
        request.request_id,
        index,
        hypothesis.tokens,
        logprobs=tuple(TokenLogprobs(t, p) for t, p in pairs) if request.sampling.logprobs is not None else (),
        finish_reason=hypothesis.reason,
        cached_tokens=group.cached_tokens,
        prompt_logprobs=tuple(group.prompt_logprobs) if group.prompt_logprobs is not None else None,
        cumulative_logprob=hypothesis.cumulative_logprob,
        queue_ns=group.queue_ns,
        story=group.take_facts(),
    )


def _pooled(sequence: Sequence) -> bytes:
    """The state of the prompt's last token, or the mean over all of its tokens where all were reported; float32."""
    group = sequence.group
    count = 1 if group.prompt_logprobs is None else sequence.prompt_tokens
    return (np.asarray(group.hidden) / np.float32(count)).astype(np.float32).tobytes()
