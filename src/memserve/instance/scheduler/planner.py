"""How a step is made: iteration-level batching with chunked prefill.

A plan is filled in four passes, each by turns of tenants, and in rank order within one:

1. decodes: one token each; a sequence that needs a block gets one, if need be from one of lower rank;
2. prefills: pieces of prompts already admitted, beams, resumed sequences;
3. admission: from the waiting lines while there are slots, blocks and budget;
4. what the plan computes is published and forked. Not earlier: inside one plan no row may depend on another.

Progress: the sequence of the highest rank is served first in its pass, may take blocks from all others, and fits alone
(checked on arrival), so it ends after finitely many steps. The one way to stand still is that no sequence may take
from another: beams that wait for each other across requests. When nothing is under way and nothing could be planned,
pins are given up, everything is preempted and the queue starts over from its head.
"""

from __future__ import annotations

from memserve import _core
from memserve.base.config import PROMPT_LOGPROBS_MAX, SchedulerConfig
from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.instance.events import StepPlan
from memserve.instance.layerwise.placement import WholeBlocks
from memserve.instance.scheduler.admission import PrefixSharing, SequenceAdmission
from memserve.instance.scheduler.batch import BatchBuilder, InflightPlan
from memserve.instance.scheduler.capacity import chunk_tokens
from memserve.instance.scheduler.sequence import Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.instance.scheduler.stripes import StripedPrompt
from memserve.instance.speculation.speculation import Speculation
from memserve.kv.retention import Pins

DEFERRABLE_PART = 8
"""Prompts of deferrable requests fill at most this part of a step while interactive ones are expected: one that comes
during such a step waits for its end. Beside its own prompt there are none."""
_LOOKS_AHEAD = 8  # of a line: how many of those that wait the budget of a step is kept for


class Planner:
    """Makes plans for the device out of the scheduler's state."""

    def __init__(
        self, state: SchedulerState, config: SchedulerConfig, pins: Pins | None, speculation: Speculation | None
    ) -> None:
        self.state = state
        self.config = config
        self.pins = pins
        #: None: no drafts
        self.speculation = speculation
        self.admission = SequenceAdmission(state)
        self.sharing = PrefixSharing(state)
        #: the head of the line, when the last plan had no room for it
        self._no_room_for: Sequence | None = None
        self.next_step_id = 1

    def make_plan(
        self, now_ns: int, begins_ns: int, *, nothing_under_way: bool, copies_only: bool
    ) -> tuple[StepPlan, InflightPlan] | None:
        """The next plan, which the device is expected to begin at ``begins_ns``. None: there is nothing to compute.

        ``copies_only``: a transfer waits for copies that are recorded already, so a plan without rows is of use.
        """
        state = self.state
        # drafts follow from tokens that the step under way samples: a plan now would be one without them
        if self.speculation is not None and not (nothing_under_way or copies_only) and self.speculation.should_wait():
            return None
        lines = state.decoding.items, state.prefilling.items, state.waiting, state.remote_kv_ready, state.parked
        if any(lines) or state.late_masks.due_sequences():
            batch = self._fill_plan(now_ns, begins_ns)
            stands = not (batch.plan.gives_tokens or batch.plan.moves)
            # masks come, or their sequences end, and so do stripes and sessions that are away
            if (
                stands
                and nothing_under_way
                and not (state.late_masks or self._awaits_stripes() or self._awaits_returns())
            ):
                batch = self._start_over(batch, now_ns, begins_ns)
        elif copies_only:
            batch = BatchBuilder(state, self.next_step_id)
        else:
            return None
        if not (batch.plan.gives_tokens or batch.plan.moves or copies_only):
            return None
        self.next_step_id += 1
        return self._finish_plan(batch)

    def _awaits_stripes(self) -> bool:
        return any(s.striped is not None and not s.striped.loss for s in self.state.prefilling.items)

    def _awaits_returns(self) -> bool:
        """Whether all that could begin waits for room which is kept for others, for a bounded time."""
        returns = self.state.returns
        return returns is not None and returns.next_check_ns is not None and self._no_room_for is None

    def _start_over(self, batch: BatchBuilder, now_ns: int, begins_ns: int) -> BatchBuilder:
        """No sequence can move: give up all pins, then preempt everything and begin at the head of the queue.

        That must suffice, unless memory is lent to other instances. Then time helps: every lease has an end.
        """
        state = self.state
        # pins first: they are promises of best effort, and a preemption costs a request its place
        if self.pins is not None and self.pins.release_all():
            batch = self._fill_plan(now_ns, begins_ns)
        if not batch.plan.slots and state.holds_blocks:
            state.counters.standstills += 1
            state.preempt_all()
            batch = self._fill_plan(now_ns, begins_ns)
        if state.memory.layers.is_by_layer and not (batch.plan.slots or batch.plan.moves):
            # the head of the line may need DRAM, too
            waiting = [sequence for line in (*state.parked.lines, *state.waiting.lines) for sequence in line]
            for sequence in waiting:
                if sequence.dram_blocks:
                    state.compute_again(sequence)
            batch = self._fill_plan(now_ns, begins_ns)
        pool = state.memory.pool
        # everything is preempted by now: blocks that are still out belong to transfers
        lent = pool.available() < pool.config.hbm_blocks
        lent = lent or pool.available(Tier.DRAM) < pool.config.dram_blocks
        check(
            batch.plan.slots or batch.plan.moves or lent or self._awaits_returns(),
            "standing still with everything free: {}",
            state,
        )
        return batch

    def _fill_plan(self, now_ns: int, begins_ns: int) -> BatchBuilder:
        if self.state.returns is not None:
            self.state.returns.average_running()
        head, self._no_room_for = self._without_slot() or self._no_room_for, None
        has_room = head is None or self.sharing.preempt_for_head(head)
        # what was preempted for it must not go first to what is parked
        self.admission.due = head if has_room else None
        batch = BatchBuilder(self.state, self.next_step_id)
        layers = self.state.memory.layers
        layers.begin_plan(batch.plan, beside=bool(self.state.decoding.items))
        for sequence in layers.sequences_to_park(self.state.decoding.items):
            self.state.preempt_sequence(sequence)
        layers.move(batch.plan, self.state.decoding.items, keeps=not (self.state.waiting or self.state.parked))
        if layers.needs_dram:
            self.state.compute_again(self.sharing.lowest_in_dram())
        budget = self.config.step_tokens
        opens = has_room and bool(self.state.free_slots)  # else the budget kept for the waiting line may be lost
        alone = self.config.scheduling == "prefill-first" and self._fill_with_prompts(batch, now_ns, opens)
        stalled, drafts = False, []
        if self.state.decoding.items and not alone:
            allowed = self._within_objectives(budget, begins_ns)
            self.state.serve_decodes(1)
            if self.speculation is not None:
                drafts = self.speculation.choose_drafts(batch, budget)
                budget -= sum([1 + len(tokens) for _, tokens in drafts])
            stalled = self._grow_decodes(batch)
            # objectives bound what prompts may add to this step, not the decodes that they protect
            budget = min(budget - batch.add_decodes(not stalled), allowed)
        budget -= self._add_resumed(batch)
        if self._has_prompts and self.config.scheduling != "prefill-first":
            self._add_prefills(batch, budget, now_ns, stalled, opens)
        if not stalled:
            # after the prompts, and not while decodes lack blocks: it would take what these were short of
            for sequence in self.admission.parked_sequences():
                if not self.admission.admit(sequence, now_ns):
                    break
            if not batch.plan.gives_tokens:  # else they have their rows with the next plan
                self._add_resumed(batch)
        if self.state.late_masks:
            batch.add_late_draws()
        for sequence, tokens in drafts:
            batch.add_drafts(sequence, tokens)
        return batch

    @property
    def _has_prompts(self) -> bool:
        return bool(self.state.prefilling.items or self.state.waiting or self.state.remote_kv_ready)

    def _fill_with_prompts(self, batch: BatchBuilder, now_ns: int, opens: bool) -> bool:
        """Passes 2 and 3, before the first. False: no prompt can be computed, so the plan is for those that decode."""
        if self._has_prompts:
            self._add_prefills(batch, self.config.step_tokens, now_ns, stalled=False, opens=opens)
        return batch.plan.gives_tokens

    def _add_resumed(self, batch: BatchBuilder) -> int:
        """A row for each sequence that was parked and is up again, whatever prompts may have. Returns their number."""
        rows = 0
        for sequence in self.state.memory.layers.up_again(self.state.prefilling.items):
            end = sequence.known_length  # one may be preempted for another
            if sequence.phase is Phase.PREFILLING and self._make_writable(batch, sequence, end):
                rows += batch.add_chunk(sequence, end)
        return rows

    def _within_objectives(self, budget: int, begins_ns: int) -> int:
        """What the objectives of requests that decode leave of ``budget`` for prompts."""
        state = self.state
        lines = (state.prefilling.items, *state.remote_kv_ready.lines, *state.waiting.lines)
        first = next((line[0] for line in lines if line), None)
        if state.objectives is None or first is None:
            return budget
        tokens_left = state.objectives.prefill_tokens(
            state.decoding.items, first, budget, begins_ns, list(state.parked)
        )
        # a piece by layer that is too short to hide reading back those before it is worse than none
        return tokens_left if tokens_left >= min(budget, state.memory.layers.least_piece(first)) else 0

    def _without_slot(self) -> Sequence | None:
        """The head of the waiting lines, when no slot is free and several tenants want one, or deferrable sequences
        have some."""
        state, turns = self.state, self.state.turns
        if state.free_slots or not state.waiting:
            return None
        running = (state.decoding.items, state.prefilling.items)
        if len(turns) == 1 and not any(items and items[-1].is_deferrable for items in running):
            return None
        tenant = min(state.waiting.tenants, key=lambda name: (state.first_urgency(name), turns.clock_of(name)))
        return state.waiting.line_of(tenant)[0]

    def _add_prefills(self, batch: BatchBuilder, budget: int, now_ns: int, stalled: bool, opens: bool) -> None:
        """Passes 2 and 3. Of several tenants each gets its share of the budget, and what the ones before it leave.

        ``opens``: the waiting line is likely to move, so a part of the budget is kept for it.
        """
        state, turns, starved = self.state, self.state.turns, False
        if len(turns) == 1:  # nothing to share
            budget_left, starved = self._continue_prefills(batch, budget, state.prefilling.items.copy())
            if (state.waiting or state.remote_kv_ready) and not (stalled or starved):
                self._admit_waiting(batch, budget_left, [(tenant, 0) for tenant in turns], now_ns)
            return
        tenants = sorted(
            {**state.prefilling.tenants, **dict.fromkeys(state.waiting.tenants)},
            key=lambda tenant: (state.first_urgency(tenant), turns.clock_of(tenant)),
        )
        budget = self._budget_beside_others(tenants, budget, opens)
        weights = sum([turns.weight_of(tenant) for tenant in tenants])
        reserved: list[tuple[str, int]] = []  # for the waiting line
        for tenant in tenants:
            weight = turns.weight_of(tenant)
            share = budget if weight == weights else min(budget, max(1, budget * weight // weights))
            # of those that are left: what earlier tenants did not use is shared among the later ones
            weights -= weight
            budget_left = share
            if tenant in state.prefilling.tenants:
                budget_left, lacks = self._continue_prefills(batch, share, state.prefilling.of_tenant(tenant))
                starved |= lacks
            line = state.waiting.line_of(tenant) if opens else []
            keep = min(budget_left, _core.count_tokens(line[:_LOOKS_AHEAD])[1]) if line else 0
            reserved.append((tenant, keep))
            budget -= share - budget_left + keep
        if not (stalled or starved):
            self._admit_waiting(batch, budget, reserved, now_ns)

    def _budget_beside_others(self, tenants: list[str], budget: int, opens: bool) -> int:
        """Where several tenants have prompts to compute, the one with most fills at most half of the step beside the
        others' tokens: a short prompt of another tenant shall not wait for a step of full length."""
        prefilling, waiting = self.state.prefilling, self.state.waiting
        wanted_tokens = [
            _core.count_tokens(prefilling.of_tenant(tenant)[:_LOOKS_AHEAD])[1]
            + (_core.count_tokens(waiting.line_of(tenant)[:_LOOKS_AHEAD])[1] if opens else 0)
            for tenant in tenants
        ]
        other_tokens = sum(wanted_tokens) - max(wanted_tokens, default=0)
        return min(budget, other_tokens + max(1, budget // 2)) if other_tokens else budget

    def _finish_plan(self, batch: BatchBuilder) -> tuple[StepPlan, InflightPlan]:
        """Publish, fork, and hand over everything that has to happen on the device before the rows."""
        state, plan = self.state, batch.plan
        state.memory.windows.finish_plan(plan)
        state.memory.states.finish_plan(plan)  # before forks: they copy what the rows leave, with the next plan
        batch.finish_plan()
        state.memory.layers.place_layers(plan)
        plan.close, state.closing = state.closing, []
        plan.reset_slots, state.slots_unknown = state.slots_unknown, False
        # last: preempting, growing and forking above have recorded copies that this plan must make
        plan.copies = state.memory.pool.take_copies()
        if state.memory.contents is not None:
            plan.token_moves = state.memory.contents.take_moves()
        state.counters.steps += 1
        state.counters.prefill_tokens += batch.inflight.prefill_tokens
        drafted = sum([1 + len(tokens) for tokens in plan.drafts.values()])
        state.counters.decode_tokens += batch.inflight.decode_rows + drafted
        return plan, batch.inflight

    # -- pass 1

    def _grow_decodes(self, batch: BatchBuilder) -> bool:
        """Give blocks to the decodes that reached the end of theirs. Returns whether one goes without."""
        needy = _core.out_of_room(self.state.decoding.items)
        if not needy:
            return False
        memory = self.state.memory
        growing = [sequence for sequence in needy if not memory.next_write_is_shared(sequence)]
        # all at once in the usual case, where there is room: one call, however many decode
        blocks = memory.pool.allocate(len(growing)) if growing and not memory.windows.has_windows else []
        if blocks:
            for sequence, block in zip(growing, blocks, strict=True):
                batch.append_blocks(sequence, [block], 1)
            if len(growing) == len(needy):
                return False
        stalled = False
        for sequence in needy:
            if sequence.phase is Phase.DECODING and sequence.computed >= sequence.writable_until:
                stalled |= not self._make_writable(batch, sequence, sequence.computed + 1)
        return stalled

    def _make_writable(self, batch: BatchBuilder, sequence: Sequence, end: int) -> bool:
        """Blocks for the tokens up to ``end``, private ones; preempts others for them if that helps."""
        while not batch.make_writable(sequence, end):
            if self._withdraw_exports() or self.state.memory.layers.evict_layer():
                continue
            # only now: first what costs no sequence anything
            victim = self.sharing.victim_for(sequence, batch.plan.step_id)
            if victim is not None:
                # it may have a row or drafts in this very plan
                batch.forget_preempted(victim)
                self.state.preempt_sequence(victim)
            elif not self.state.memory.unpin_published(sequence):
                return False
        return True

    # -- pass 2

    def _continue_prefills(self, batch: BatchBuilder, budget: int, sequences: list[Sequence]) -> tuple[int, bool]:
        """Rows for admitted sequences. Returns the budget left, and whether one of them goes without blocks."""
        starved = False
        for sequence in sequences:
            if budget <= 0:
                break
            if sequence.phase is not Phase.PREFILLING:
                continue  # preempted for an earlier one
            end = self._next_chunk_end(batch, sequence, budget)
            if not end:
                continue
            if self._make_writable(batch, sequence, end):
                budget -= batch.add_chunk(sequence, end)
            else:
                starved = True
        return budget, starved

    def _next_chunk_end(self, batch: BatchBuilder, sequence: Sequence, budget: int) -> int:
        """Up to where ``sequence`` is computed in this plan. 0: it has to wait for the next one."""
        block_tokens, layers, row_end = self.state.memory.block_tokens, self.state.memory.layers, sequence.known_length
        if not _may_go_on(sequence, layers):
            return 0
        if sequence.striped is not None and (row := _next_row(sequence, sequence.striped)):
            sequence.computed, row_end = row  # what is between comes from others
        chunk_max = self.config.chunk_tokens
        if sequence.layered is not None and sequence.layered.chunk_tokens:
            chunk_max = min(chunk_max, sequence.layered.chunk_tokens)
        if sequence.is_overtaking:
            budget = layers.overtaking_tokens(sequence, budget)
        if sequence.is_deferrable:
            budget = min(budget, self._deferrable_budget(batch, budget))
        if batch.reports_prompt(sequence):
            chunk_max = min(chunk_max, PROMPT_LOGPROBS_MAX - batch.prompt_logprobs)
        if sequence.inexact is not None:
            return sequence.inexact.end_of_chunk(sequence.computed, sequence.known_length, min(chunk_max, budget))
        count = chunk_tokens(sequence.computed, row_end, chunk_max, budget, block_tokens)
        if self.config.scheduling == "prefill-first" and batch.plan.slots and sequence.computed + count < row_end:
            return 0  # it is computed whole, or at least begins its own step
        return sequence.computed + count if count else 0

    def _deferrable_budget(self, batch: BatchBuilder, budget: int) -> int:
        """What of ``budget`` prompts of deferrable requests may still have: nothing beside prompts of others."""
        state = self.state
        if not state.expects_interactive_requests:
            return budget
        heads = [line[0] for line in (state.prefilling.items, *state.waiting.lines) if line]
        computes_others = batch.inflight.prefill_tokens > batch.deferrable_tokens
        if computes_others or not all(sequence.is_deferrable for sequence in heads):
            return 0
        most = max(self.state.memory.block_tokens, self.config.step_tokens // DEFERRABLE_PART)
        return max(0, most - batch.deferrable_tokens)

    # -- pass 3

    def _admit_waiting(self, batch: BatchBuilder, budget: int, reserved: list[tuple[str, int]], now_ns: int) -> None:
        """Admit from the waiting lines, and give admitted sequences their first rows.

        ``reserved``: tenants in turn, and what of the budget is kept for each; ``budget`` is left beside that.
        """
        later = sum([keep for _, keep in reserved])
        budget += later
        for sequence in self.admission.remote_kv_ready():
            if budget <= 0 or not self._admit_sequence(batch, sequence, now_ns):
                return
            spent = self._first_row(batch, sequence, budget)
            if not spent:
                return
            budget -= spent
        urgency: int | None = None
        while (level := self.state.waiting.first_urgency()) is not None and level != urgency:
            urgency, behind = level, later
            for tenant, keep in reserved:
                behind -= keep
                budget_left = self._admit_line(
                    batch, tenant, level, budget - behind, now_ns, self.sharing.slots_due(tenant)
                )
                if budget_left is None:
                    return
                budget = budget_left + behind
            for tenant, _ in reserved if len(reserved) > 1 else ():  # slots that the others leave
                budget_left = self._admit_line(batch, tenant, level, budget, now_ns, self.state.slots)
                if budget_left is None:
                    return
                budget = budget_left

    def _admit_line(
        self, batch: BatchBuilder, tenant: str, urgency: int, budget: int, now_ns: int, slots_max: int
    ) -> int | None:
        """Admit from the line of one tenant, as many sequences as there are slots for it. Returns the budget left.
        None: the plan admits no more."""
        for sequence in self.admission.waiting_sequences(tenant, urgency, batch.publishing):
            slots_max -= 1 + sequence.group.forks_pending
            if budget <= 0 or slots_max < 0:
                break
            if sequence.is_deferrable and not self._deferrable_budget(batch, budget):
                break  # those behind it are as well
            if not self._admit_sequence(batch, sequence, now_ns):
                return None
            if not _may_go_on(sequence, self.state.memory.layers):
                continue
            spent = self._first_row(batch, sequence, budget)
            if not spent:
                return None
            budget -= spent
        return budget

    def _admit_sequence(self, batch: BatchBuilder, sequence: Sequence, now_ns: int) -> bool:
        """Admit. The first sequence that does not fit is remembered, and none is admitted behind it."""
        if self.admission.admit(sequence, now_ns) or (
            self._withdraw_exports() and self.admission.admit(sequence, now_ns)
        ):
            return True
        self._no_room_for = sequence
        if self.state.free_slots:
            running = [*self.state.decoding.items, *self.state.prefilling.items]
            self.state.memory.layers.convert_running(running, sequence)
        return False

    def _withdraw_exports(self) -> bool:
        """Make room without cost to any sequence. False: there is none to be made."""
        return self.state.transfers is not None and self.state.transfers.free_blocks()

    def _first_row(self, batch: BatchBuilder, sequence: Sequence, budget: int) -> int:
        """A row for an admitted sequence; returns its tokens. 0: the row comes with a later plan."""
        end = self._next_chunk_end(batch, sequence, budget)
        return batch.add_chunk(sequence, end) if end and batch.make_writable(sequence, end) else 0


def _may_go_on(sequence: Sequence, layers: WholeBlocks) -> bool:
    """Whether its next row can be computed: what is before it is there, or is on its way layer by layer."""
    awaits_stripe = sequence.striped is not None and _next_row(sequence, sequence.striped) is None
    return not (awaits_stripe or layers.arrives(sequence))


def _next_row(sequence: Sequence, striped: StripedPrompt) -> tuple[int, int] | None:
    return striped.next_row(sequence.computed, sequence.published)
