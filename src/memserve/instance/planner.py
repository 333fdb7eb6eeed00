"""How a step is made: iteration-level batching with chunked prefill.

A plan is filled in four passes, each by turns of tenants, and in rank order within one:

1. decodes: one token each; who needs a block gets one, if need be from a sequence of lower rank;
2. work: pieces of prompts already admitted, beams, resumed sequences;
3. admission: from the waiting lines while there are slots, blocks and budget;
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
from memserve.instance.sharing import Sharing
from memserve.policy.capacity import chunk_tokens

_LOOKS_AHEAD = 8  # of a line: how many of those that wait the budget of a step is kept for

PROMPT_LOGPROBS_MAX = 256
"""Prompt tokens of one plan whose logits are wanted: each costs a row of the vocabulary (200 KB, or more) at once."""


class Planner:
    """Makes plans out of the roster."""

    __slots__ = ("_no_room_for", "admission", "config", "next_step_id", "pins", "roster", "sharing")

    def __init__(self, roster: Roster, config: SchedulerConfig, pins: Pins | None) -> None:
        self.roster = roster
        self.config = config
        self.pins = pins
        self.admission = Admission(roster)
        self.sharing = Sharing(roster)
        #: the head of the line, when the last plan had no room for it
        self._no_room_for: Sequence | None = None
        self.next_step_id = 1

    def make(self, now: int, *, nothing_under_way: bool, copies_only: bool) -> tuple[StepPlan, Outstanding] | None:
        """The next plan, or ``None`` when there is nothing to compute.

        ``copies_only``: somebody waits for copies that are recorded already, so a plan without rows is worth making.
        """
        roster = self.roster
        if roster.decoding.items or roster.working.items or roster.waiting or roster.landed:
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
        head, self._no_room_for = self._without_slot() or self._no_room_for, None
        has_room = head is None or self.sharing.make_way(head)
        rows = RowWriter(self.roster, self.next_step_id)
        budget = self.config.step_tokens
        stalled = False
        if self.roster.decoding.items:
            stalled = self._make_room_for_decodes(rows)
            self.roster.serve_decodes(1)
            budget -= rows.add_decodes(not stalled)
        if self.roster.working.items or self.roster.waiting or self.roster.landed:
            opens = has_room and bool(self.roster.free_slots)  # else what is kept for the waiting line may be lost
            self._prefill(rows, budget, now, stalled, opens)
        return rows

    def _without_slot(self) -> Sequence | None:
        """The head of the waiting lines, when no slot is free and several tenants want one."""
        roster, turns = self.roster, self.roster.turns
        if roster.free_slots or len(turns) == 1 or not roster.waiting:
            return None
        tenant = min(roster.waiting.tenants, key=lambda name: (roster.first_urgency(name), turns.at(name)))
        return roster.waiting.line(tenant)[0]

    def _prefill(self, rows: RowWriter, budget: int, now: int, stalled: bool, opens: bool) -> None:
        """Passes 2 and 3. Of several tenants each gets its share of the budget, and what those before it leave.

        ``opens``: the waiting line is likely to move, so a part of the budget is kept for it.
        """
        roster, turns, starved = self.roster, self.roster.turns, False
        if len(turns) == 1:  # nothing to share
            left, starved = self._work(rows, budget, roster.working.items.copy())
            if (roster.waiting or roster.landed) and not (stalled or starved):
                self._admit(rows, left, [(tenant, 0) for tenant in turns], now)
            return
        tenants = sorted(
            {**roster.working.tenants, **dict.fromkeys(roster.waiting.tenants)},
            key=lambda tenant: (roster.first_urgency(tenant), turns.at(tenant)),
        )
        budget = self._budget_beside_others(tenants, budget, opens)
        weights = sum([turns.weight(tenant) for tenant in tenants])
        kept: list[tuple[str, int]] = []  # for the waiting line
        for tenant in tenants:
            weight = turns.weight(tenant)
            share = budget if weight == weights else max(1, budget * weight // weights)
            weights -= weight
            left = share
            if tenant in roster.working.tenants:
                left, lacks = self._work(rows, share, roster.working.of(tenant))
                starved |= lacks
            line = roster.waiting.line(tenant) if opens else []
            keep = min(left, _core.count_tokens(line[:_LOOKS_AHEAD])[1]) if line else 0
            kept.append((tenant, keep))
            budget -= share - left + keep
        if not (stalled or starved):
            self._admit(rows, budget, kept, now)

    def _budget_beside_others(self, tenants: list[str], budget: int, opens: bool) -> int:
        """Where several tenants have prompts to compute, the one with most fills at most half of the step beside the
        others' tokens: a short prompt of another tenant is not to wait for as long a step as there can be."""
        working, waiting = self.roster.working, self.roster.waiting
        wanted = [
            _core.count_tokens(working.of(tenant)[:_LOOKS_AHEAD])[1]
            + (_core.count_tokens(waiting.line(tenant)[:_LOOKS_AHEAD])[1] if opens else 0)
            for tenant in tenants
        ]
        others = sum(wanted) - max(wanted, default=0)
        return min(budget, others + max(1, budget // 2)) if others else budget

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
            victim = self.sharing.victim_for(sequence, rows.plan.step_id)
            if victim is not None:
                rows.forget(victim)
                self.roster.preempt(victim)
            elif not self.roster.memory.loosen(sequence):
                return False
        return True

    # -- pass 2

    def _work(self, rows: RowWriter, budget: int, sequences: list[Sequence]) -> tuple[int, bool]:
        """Rows for what is admitted already. Returns the budget left and whether one goes without blocks."""
        starved = False
        for sequence in sequences:
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
        chunk_max = self.config.chunk_tokens
        if rows.reports_prompt(sequence):
            chunk_max = min(chunk_max, PROMPT_LOGPROBS_MAX - rows.prompt_logprobs)
        return chunk_tokens(sequence.computed, sequence.known, chunk_max, budget, block_tokens)

    # -- pass 3

    def _admit(self, rows: RowWriter, budget: int, kept: list[tuple[str, int]], now: int) -> None:
        """Admit from the waiting lines, and give what was admitted its first row.

        ``kept``: tenants in turn, and what of the budget is kept for each; ``budget`` is left beside that.
        """
        later = sum([keep for _, keep in kept])
        budget += later
        for sequence in self.admission.landed():
            if budget <= 0 or not self._enter(rows, sequence, now):
                return
            spent = self._first_row(rows, sequence, budget)
            if not spent:
                return
            budget -= spent
        urgency: int | None = None
        while (level := self.roster.waiting.first_urgency()) is not None and level != urgency:
            urgency, behind = level, later
            for tenant, keep in kept:
                behind -= keep
                left = self._admit_line(rows, tenant, level, budget - behind, now, self.sharing.slots_due(tenant))
                if left is None:
                    return
                budget = left + behind
            for tenant, _ in kept if len(kept) > 1 else ():  # slots that the others leave
                left = self._admit_line(rows, tenant, level, budget, now, self.roster.slots)
                if left is None:
                    return
                budget = left

    def _admit_line(
        self, rows: RowWriter, tenant: str, urgency: int, budget: int, now: int, slots_max: int
    ) -> int | None:
        """Admit from the line of one tenant, as many sequences as there are slots for it. Returns the budget left;
        ``None``: the plan admits no more."""
        for sequence in self.admission.waiting(tenant, urgency, rows.publishing):
            slots_max -= 1 + sequence.group.forks_pending
            if budget <= 0 or slots_max < 0:
                break
            if not self._enter(rows, sequence, now):
                return None
            spent = self._first_row(rows, sequence, budget)
            if not spent:
                return None
            budget -= spent
        return budget

    def _enter(self, rows: RowWriter, sequence: Sequence, now: int) -> bool:
        """Admit; the first that does not fit is remembered, and nothing is admitted behind it."""
        if self.admission.admit(sequence, now):
            return True
        self._no_room_for = sequence
        return False

    def _first_row(self, rows: RowWriter, sequence: Sequence, budget: int) -> int:
        """A row for what was admitted; 0 = it comes with a later plan."""
        count = self._chunk(rows, sequence, budget)
        end = sequence.computed + count
        return rows.add_chunk(sequence, end) if count and rows.make_writable(sequence, end) else 0
