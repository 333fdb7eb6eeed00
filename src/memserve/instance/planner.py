"""How a step is made (level 2): iteration-level batching with chunked prefill.

A plan is filled in four passes, each in rank order:

1. decodes: one token each; who needs a block gets one, if need be from a sequence of lower rank;
2. work: pieces of prompts already admitted, beams, resumed sequences;
3. admission: from the waiting line while there are slots, blocks and budget;
4. what the plan computes is published and forked. Not earlier: inside one plan nothing may depend on its own rows.

Progress: the sequence of the highest rank is served first in its pass, may take blocks from all others, and fits alone
(checked on arrival), so it ends after finitely many steps. The one way to stand still is that nobody may take from
anybody: beams that wait for each other across requests. When nothing is under way and nothing could be planned,
pins are given up, everything is preempted and the line starts over from its head.
"""

from __future__ import annotations

from memserve import _core
from memserve.config import SchedulerConfig
from memserve.errors import check
from memserve.instance.actions import StepPlan
from memserve.instance.admission import Admission
from memserve.instance.outstanding import Outstanding
from memserve.instance.pins import Pins
from memserve.instance.roster import Roster
from memserve.instance.rows import RowWriter
from memserve.instance.sequence import Phase, Sequence
from memserve.policy.batching import chunk_tokens

PROMPT_LOGPROBS_MAX = 256
"""Prompt tokens of one plan whose logits are wanted: each costs a row of the vocabulary (200 KB, or more) at once."""


class Planner:
    """Makes plans out of the roster."""

    __slots__ = ("admission", "config", "next_step_id", "pins", "roster")

    def __init__(self, roster: Roster, config: SchedulerConfig, pins: Pins | None) -> None:
        self.roster = roster
        self.config = config
        self.pins = pins
        self.admission = Admission(roster)
        self.next_step_id = 1

    def make(self, now: int, *, nothing_under_way: bool, copies_only: bool) -> tuple[StepPlan, Outstanding] | None:
        """The next plan, or ``None`` when there is nothing to compute.

        ``copies_only``: somebody waits for copies that are recorded already, so a plan without rows is worth making.
        """
        roster = self.roster
        if roster.decoding.items or roster.working.items or roster.waiting.items or roster.landed.items:
            rows = self._fill(now)
            if not rows.plan.slots and nothing_under_way:
                rows = self._start_over(rows, now)
        elif copies_only:
            rows = RowWriter(roster, self.next_step_id)
        else:
            return None
        if not (rows.plan.slots or copies_only):
            return None
        self.next_step_id += 1
        return self._seal(rows)

    def _start_over(self, rows: RowWriter, now: int) -> RowWriter:
        """Nobody can move: give up what is kept for later, then take from everybody and begin at the line's head.

        That must suffice, unless memory is lent to other instances. Then time helps: every loan has an end.
        """
        roster = self.roster
        if self.pins is not None and self.pins.release_all():
            rows = self._fill(now)
        if not rows.plan.slots and roster.holds_blocks:
            roster.counters.standstills += 1
            roster.preempt_all()
            rows = self._fill(now)
        pool = roster.memory.pool
        lent = pool.available() < pool.config.hbm_blocks
        check(rows.plan.slots or lent, f"standing still with everything free: {roster}")
        return rows

    def _fill(self, now: int) -> RowWriter:
        rows = RowWriter(self.roster, self.next_step_id)
        budget = self.config.max_step_tokens
        stalled = False
        if self.roster.decoding.items:
            stalled = self._make_room_for_decodes(rows)
            budget -= rows.add_decodes(not stalled)
        budget, starved = self._work(rows, budget)
        if not (stalled or starved):
            self._admit(rows, budget, now)
        return rows

    def _seal(self, rows: RowWriter) -> tuple[StepPlan, Outstanding]:
        """Publish, fork, and hand over everything that has to happen on the device before the rows."""
        roster, plan = self.roster, rows.plan
        rows.finish()
        plan.close, roster.closing = roster.closing, []
        plan.reset_slots, roster.slots_unknown = roster.slots_unknown, False
        plan.copies = roster.memory.pool.take_copies()
        roster.counters.steps += 1
        roster.counters.prefill_tokens += rows.outstanding.prefill_tokens
        roster.counters.decode_tokens += rows.outstanding.decode_rows
        return plan, rows.outstanding

    # -- pass 1

    def _make_room_for_decodes(self, rows: RowWriter) -> bool:
        """Give blocks to the decodes that reached the end of theirs. Returns whether one goes without."""
        needy = _core.out_of_room(self.roster.decoding.items)
        if not needy:
            return False
        memory = self.roster.memory
        growing = [sequence for sequence in needy if not memory.next_write_is_shared(sequence)]
        blocks = memory.pool.allocate(len(growing)) if growing else []
        if blocks is not None:
            for sequence, block in zip(growing, blocks, strict=True):
                rows.append_blocks(sequence, [block])
            if len(growing) == len(needy):
                return False
        stalled = False
        for sequence in needy:
            if sequence.phase is Phase.DECODING and sequence.computed >= sequence.writable_until:
                stalled |= not self._make_writable(rows, sequence, sequence.computed + 1)
        return stalled

    def _make_writable(self, rows: RowWriter, sequence: Sequence, end: int) -> bool:
        """Blocks for the tokens up to ``end``, private ones; preempts others for them if that helps."""
        while not rows.make_writable(sequence, end):
            victim = self.roster.victim_for(sequence, rows.plan.step_id)
            if victim is not None:
                rows.forget(victim)
                self.roster.preempt(victim)
            elif not self.roster.memory.loosen(sequence):
                return False
        return True

    # -- pass 2

    def _work(self, rows: RowWriter, budget: int) -> tuple[int, bool]:
        """Rows for what is admitted already. Returns the budget left and whether one goes without blocks."""
        starved = False
        for sequence in list(self.roster.working.items):
            if budget <= 0:
                break
            if sequence.phase is not Phase.WORKING:
                continue  # preempted for one before it
            count = self._chunk(rows, sequence, budget)
            if not count:
                continue
            end = sequence.computed + count
            if self._make_writable(rows, sequence, end):
                budget -= rows.add_chunk(sequence, end)
            else:
                starved = True
        return budget, starved

    def _chunk(self, rows: RowWriter, sequence: Sequence, budget: int) -> int:
        """Tokens of ``sequence`` for this plan; 0 when it has to wait for the next one."""
        block_tokens = self.roster.memory.block_tokens
        chunk_max = self.config.prefill_chunk_tokens
        if rows.reports_prompt(sequence):
            chunk_max = min(chunk_max, PROMPT_LOGPROBS_MAX - rows.prompt_logprobs)
        return chunk_tokens(sequence.computed, sequence.known, chunk_max, budget, block_tokens)

    # -- pass 3

    def _admit(self, rows: RowWriter, budget: int, now: int) -> None:
        """Admit from the waiting line, and give what was admitted its first row."""
        for sequence in self.admission.candidates(rows.publishing):
            if budget <= 0 or not self.admission.admit(sequence, now):
                return
            count = self._chunk(rows, sequence, budget)
            end = sequence.computed + count
            if not count or not rows.make_writable(sequence, end):
                return  # it is admitted; its row comes with a later plan
            budget -= rows.add_chunk(sequence, end)
