"""Speculation: sequences whose next step computes drafted tokens, too, and keeps those that are drawn.

    plan k        DECODING, a token under way: is a draft worth it?  -> no plan behind it, until the token is known
    plan k + 1    DECODING, all tokens known: drafts are looked up   -> one row: the last token and the drafts behind it
    meanwhile     IDLE (``held``): what comes next is known with the result
    its result    the first draw, and the draws that drafts predicted -> DECODING

Drafts lie in blocks that the sequence has, so none is allocated for tokens that may not come; what was computed for
drafts that were not kept is written over. Only plain draws are predicted: with changed logits or reported logprobs each
token is drawn from what the one before it left.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memserve.instance.events import StepFinished
from memserve.instance.scheduler.batch import BatchBuilder, InflightPlan
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.instance.speculation.drafts import (
    CACHED,
    EXPECTED,
    HANDOVER_NS,
    Chances,
    Draft,
    Pace,
    Price,
    Worth,
    gain_ns,
    paying_length,
    repeated_draft,
)

Proposal = Callable[[Sequence, int], Draft]
"""Up to so many tokens that may follow those that are known."""

LOOKS, MISSES_MAX = 4, 4
"""Sequences in a step that are looked at for each token, in the mean, where nothing is found for the first time; where
nothing was found so many times in a row, as many times less."""

FADE_SEEN = 0.995
"""What is left of what all sequences have seen with each further draft."""


class Speculation:
    """Chooses drafts for a plan, and learns from what became of them."""

    def __init__(self, state: SchedulerState, length_max: int) -> None:
        """``length_max``: drafted tokens of a row."""
        self.state = state
        self.length_max = length_max
        self.worth = Worth()
        #: of all sequences
        self.chances = Chances(FADE_SEEN)
        #: where drafts come from
        self.propose: Proposal = self.look_up

    # -- before a step

    def should_wait(self) -> bool:
        """Whether to make no plan while tokens are under way: they decide on drafts that are worth more than a plan
        ahead. Prompts are never kept waiting."""
        state = self.state
        if state.prefilling.items or state.waiting or state.remote_kv_ready or state.parked:
            return False
        if not any(sequence.inflight for sequence in state.decoding.items):
            return False
        return bool(self._paying_drafts(self.length_max * len(state.decoding.items), enough_ns=HANDOVER_NS))

    def choose_drafts(self, batch: BatchBuilder, budget: int) -> list[tuple[Sequence, list[int]]]:
        """The sequences that get a row with drafts in this plan, ``budget`` tokens of rows at most. They are taken out
        of the sequences that decode."""
        budget -= len(self.state.decoding.items) + len(self.state.prefilling.items)  # drafts delay no prompt
        choices: list[tuple[Sequence, list[int]]] = []
        states, computed_tokens = self.state.memory.states, 0
        for sequence, draft in self._paying_drafts(budget):
            if not sequence.inflight and batch.make_writable(sequence, sequence.computed + 1):
                writable_tokens = sequence.writable_until - sequence.computed - 1
                room = min(writable_tokens, states.draft_room(sequence, computed_tokens))
                drafts = draft.tokens[: max(0, room)]
                if drafts and sequence.pace is not None:
                    sequence.pace.source = draft.source
                    self.state.hold_for_tokens(sequence)
                    sequence.scheduled_step = batch.plan.step_id  # its blocks are not for others any more
                    choices.append((sequence, drafts))
                    computed_tokens += 1 + len(drafts)
        return choices

    def _paying_drafts(self, budget: int, enough_ns: float = math.inf) -> list[tuple[Sequence, Draft]]:
        """The drafts that pay in the next step, ``budget`` tokens at most, or as many as save ``enough_ns``; none if
        all together do not pay."""
        decoding = self.state.decoding.items
        if budget <= 0 or not self.worth.drafts_pay(len(decoding)):
            return []
        price, paying, saved_ns = self.worth.draft_price(len(decoding)), [], 0.0
        for sequence in decoding:
            draft, gain_ns = self._draft_for(sequence, price, budget)
            if draft.tokens:
                budget -= len(draft.tokens)
                saved_ns += gain_ns
                paying.append((sequence, draft))
                if saved_ns > enough_ns:
                    break
        return paying if saved_ns > HANDOVER_NS else []

    def _draft_for(self, sequence: Sequence, price: Price, budget: int) -> tuple[Draft, float]:
        """The tokens that pay, and what they save in ns."""
        pace = sequence.pace
        if pace is None:
            pace = sequence.pace = Pace() if is_predictable(sequence.group) else NEVER
        room = min(self.length_max, sequence.left - 1, budget)
        if pace is NEVER or room <= 0 or len(sequence.out) < pace.due:
            return Draft(), 0.0
        draft = self.propose(sequence, room)
        count, chance = 0, 0.0
        if draft.tokens:
            chance = pace.chances.chance_of(draft.source, self.chances.chance_of(draft.source, EXPECTED[draft.source]))
            count = paying_length(chance, price, len(draft.tokens))
            if not count:
                pace.chances.fade_source(draft.source)
                self.chances.fade_source(draft.source)
        if not count:
            # looking takes time, too: 10 to 30 us, of a token that takes little where many share a step
            pace.misses = min(pace.misses + 1, MISSES_MAX)
            pace.due = len(sequence.out) + pace.misses * len(self.state.decoding.items) // LOOKS
        else:
            pace.misses = 0
        return Draft(draft.tokens[:count], draft.source), gain_ns(chance, price, count)

    def look_up(self, sequence: Sequence, count: int) -> Draft:
        """What followed these tokens in an earlier request of the tenant, else what followed the last ones before;
        behind those that are under way."""
        tokens, group, under_way = sequence.known_tokens(), sequence.group, sequence.inflight
        draft = Draft()
        if group.request.use_cache:
            draft = Draft(
                self.state.memory.pool.cached_continuation(group.isolation, tokens, count + under_way), CACHED
            )
        if len(draft.tokens) <= under_way:
            draft = repeated_draft(tokens, count + under_way)
        return Draft(draft.tokens[under_way:], draft.source)

    # -- after it

    def learn_step(self, plan: InflightPlan, event: StepFinished) -> None:
        """What a step has taken, and given."""
        if plan.prefill_tokens or event.failed:
            return
        if not plan.drafts:
            if plan.decode_rows:
                self.worth.learn_plain_step(plan.decode_rows, event.device_ns)
            return
        more = sum(map(len, event.accepted_drafts.values()))
        sequences = len(plan.targets)
        self.worth.learn_drafted_step(sequences, sequences + more, sum(plan.drafts.values()), event.device_ns)

    def learn_outcome(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """What became of a sequence's drafts."""
        if sequence.pace is not None:
            self.chances.learn_outcome(sequence.pace.source, drafted, accepted)
            sequence.pace.learn_outcome(drafted, accepted)


NEVER = Pace()
"""Of a sequence whose draws are not predicted."""


def is_predictable(group: Group) -> bool:
    """Whether what the sequences of a request draw depends on nothing but the logits and the position."""
    request = group.request
    sampling, stop = request.sampling, request.stop
    changes = sampling.changes_logits or bool(stop.min_tokens and stop.stop_token_ids)
    return not (changes or sampling.logprobs is not None or group.beam is not None or _moves(group))


def _moves(group: Group) -> bool:
    """Whether it leaves, or is a part of a longer sequence."""
    return group.tokens_here is not None or group.span is not None
