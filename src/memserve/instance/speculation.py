"""Speculation: sequences whose next step computes drafted tokens, too, and keeps those that are drawn.

    plan k        DECODING, a token under way: a draft is likely  -> leaves the decodes (``held``), until it is known
    plan k + 1    IDLE, all tokens known: drafts are looked up    -> one row: the last token and the drafts behind it
    its result    the first draw, and the draws that drafts foretold -> DECODING

Drafts lie in blocks that the sequence has, so none is allocated for tokens that may not come; what was computed for
drafts that were not kept is written over. Only plain draws are foretold: with changed logits or reported logprobs each
token is drawn from what the one before it left.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.instance.batch import BatchBuilder, InflightPlan
from memserve.instance.events import StepFinished
from memserve.instance.scheduler_state import SchedulerState
from memserve.instance.sequence import Group, Sequence
from memserve.policy.drafts import Pace, Worth, following

Proposal = Callable[[Sequence, int], list[int]]
"""Up to so many tokens that may follow those that are known."""


class Speculation:
    """Chooses drafts for a plan, and learns from what became of them."""

    __slots__ = ("length_max", "propose", "state", "worth")

    def __init__(self, state: SchedulerState, length_max: int) -> None:
        """``length_max``: drafted tokens of a row."""
        self.state = state
        self.length_max = length_max
        self.worth = Worth()
        #: where drafts come from
        self.propose: Proposal = self.look_up

    # -- before a step

    def choose(self, batch: BatchBuilder, budget: int) -> list[tuple[Sequence, list[int]]]:
        """The sequences that get a row with drafts in this plan, ``budget`` tokens of rows at most. They, and those
        that wait to be among the next ones, are taken out of the sequences that decode."""
        decoding = self.state.decoding.items
        ready = [sequence for sequence in decoding if self._is_due(sequence)]
        if not ready or not self.worth.pays(len(decoding)):
            return []
        chosen: list[tuple[Sequence, list[int]]] = []
        budget -= len(decoding) + len(self.state.prefilling.items)  # drafts delay no prompt
        for sequence in ready:
            drafts = self._drafts(sequence, budget)
            if not drafts:
                continue
            if sequence.inflight:
                self.state.hold(sequence)
            elif batch.make_writable(sequence, sequence.computed + 1):
                drafts = drafts[: sequence.writable_until - sequence.computed - 1]
                if drafts:
                    self.state.hold(sequence)
                    sequence.scheduled_step = batch.plan.step_id  # its blocks are not for others any more
                    chosen.append((sequence, drafts))
                    budget -= len(drafts)
        return chosen

    def _is_due(self, sequence: Sequence) -> bool:
        pace = sequence.pace
        if pace is None:
            pace = sequence.pace = Pace() if foretellable(sequence.group) else NEVER
        return pace is not NEVER and len(sequence.out) >= pace.due and sequence.left > 1

    def _drafts(self, sequence: Sequence, budget: int) -> list[int]:
        pace = sequence.pace
        if pace is None:
            return []
        room = min(self.length_max, pace.length, sequence.left - 1, budget)
        drafts = self.propose(sequence, room) if room > 0 else []
        if not drafts and room > 0:
            pace.put_off(len(sequence.out))
        return drafts

    def look_up(self, sequence: Sequence, count: int) -> list[int]:
        """What followed these tokens in an earlier request of the tenant, else what followed the last ones before;
        behind those that are under way."""
        tokens, group, under_way = sequence.known_tokens(), sequence.group, sequence.inflight
        found: list[int] = []
        if group.request.use_cache:
            found = self.state.memory.pool.continuation(group.isolation, tokens, count + under_way)
        if len(found) <= under_way:
            found = following(tokens, count + under_way)
        return found[under_way:]

    # -- after it

    def learn(self, plan: InflightPlan, event: StepFinished) -> None:
        """What a step has taken, and given."""
        if plan.prefill_tokens or event.failed:
            return
        if not plan.drafts:
            if plan.decode_rows:
                self.worth.plain(plan.decode_rows, event.device_ns)
            return
        more = sum(map(len, event.kept.values()))
        sequences = len(plan.targets)
        self.worth.drafted(sequences, sequences + more, event.device_ns)

    @staticmethod
    def told(sequence: Sequence, drafted: int, kept: int) -> None:
        """What became of a sequence's drafts; what was kept is not among its tokens yet."""
        if sequence.pace is not None:
            sequence.pace.told(drafted, kept, len(sequence.out) + kept)


NEVER = Pace()
"""Of a sequence whose draws are not foretold."""


def foretellable(group: Group) -> bool:
    """Whether what the sequences of a request draw depends on nothing but the logits and the position."""
    request = group.request
    sampling, stop = request.sampling, request.stop
    changes = sampling.changes_logits or bool(stop.min_tokens and stop.stop_token_ids)
    return not (changes or sampling.logprobs is not None or group.beam is not None or group.tokens_here is not None)
