"""The beams of one request as sequences (level 2): collecting candidates, forking, dropping, delivering."""

from __future__ import annotations

from memserve.errors import check
from memserve.instance.beam import BeamSearch, BeamState, Candidates, Hypothesis, Survivor
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group, Phase, Sequence
from memserve.types import FinishReason, TokenLogprobs, TokenOutput


def take_candidates(roster: Roster, sequence: Sequence, candidates: Candidates | None) -> None:
    """A beam's candidates came; it now waits for the other beams."""
    if sequence.phase is Phase.FINISHED:
        roster.counters.dropped_tokens += 1
        return
    check(candidates is not None, f"{sequence} is a beam, but no candidates came for it")
    sequence.inflight -= 1
    sequence.candidates = candidates


def advance_beams(roster: Roster, group: Group) -> None:
    """Once every beam has its candidates: make the next generation, or end the search."""
    beams, search = list(group.sequences.values()), group.beam
    if search is None or not beams or any(beam.candidates is None for beam in beams):
        return
    states = [BeamState(b.out, b.logprobs, b.cumulative_logprob, b.candidates or []) for b in beams]
    survivors = search.advance(states, group.max_tokens)
    if survivors:
        _next_generation(roster, group, beams, survivors)
    else:
        _deliver(roster, group, search, beams)


def _next_generation(roster: Roster, group: Group, beams: list[Sequence], survivors: list[Survivor]) -> None:
    """A beam goes on as its first survivor; the others fork from it; beams without survivors are dropped."""
    parents = {survivor.parent for survivor in survivors}
    for place, beam in enumerate(beams):
        if place not in parents:
            roster.drop_beam(beam)
    heirs: list[Sequence] = []
    for survivor in survivors:  # all forks come before any beam moves on: they copy its present state
        beam = beams[survivor.parent]
        heirs.append(beam if beam not in heirs else _fork(roster, beam))
    for heir, survivor in zip(heirs, survivors, strict=True):
        _extend(roster, heir, survivor)
    group.sequences = {heir.index: heir for heir in heirs}  # best first: ties in the next generation go to the better
    roster.return_reserved(group)
    group.forks_pending = 0


def _fork(roster: Roster, parent: Sequence) -> Sequence:
    """Another beam with the parent's tokens: sharing its blocks if it has any and a slot is free, else from scratch."""
    group = parent.group
    child = group.new_sequence()
    child.out, child.logprobs = list(parent.out), list(parent.logprobs)
    child.cumulative_logprob = parent.cumulative_logprob
    child.failures = parent.failures
    if parent.blocks and (group.reserved_slots or roster.free_slots):
        roster.take_slot(child)
        roster.memory.fork(parent, child)
        roster.enter(child, Phase.IDLE)
    else:
        roster.enter(child, Phase.PARKED)
    return child


def _extend(roster: Roster, beam: Sequence, survivor: Survivor) -> None:
    """Append the chosen token. The device learns of it by opening the slot anew."""
    beam.out.append(survivor.token)
    beam.logprobs.append(survivor.logprob)
    beam.cumulative_logprob = survivor.cumulative_logprob
    beam.candidates = None
    roster.close_slot(beam)
    if beam.phase is Phase.IDLE:
        roster.move(beam, Phase.WORKING)
    else:
        roster.wake(beam)


def _deliver(roster: Roster, group: Group, search: BeamSearch, beams: list[Sequence]) -> None:
    """The search is over: the best ``n`` hypotheses are the request's sequences."""
    for beam in beams:
        roster.drop_beam(beam)
    for index in range(group.request.n):
        output = _output(group, index, search.finished[index] if index < len(search.finished) else None)
        roster.outputs.append(output)
        roster.counters.count_finish(output.finish_reason or FinishReason.STOP)
    roster.forget_group(group)


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
