"""The batch of one step: its plan as it is being filled, and what is remembered of the plan while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from memserve import _core
from memserve.base.units import ceil_div
from memserve.instance.events import Before, LateDraw, OpenSequence, StepPlan
from memserve.instance.scheduler.sequence import Cause, Group, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.costs import attended_pairs


@dataclass(slots=True)
class InflightPlan:
    """A plan that the device has not answered yet, and the sequences that its results belong to."""

    step_id: int
    plan: StepPlan
    #: the sequences that get the sampled tokens, in the order of ``plan.draws``
    targets: list[Sequence] = field(default_factory=list)
    #: sequences with a row that samples nothing
    chunks: list[Sequence] = field(default_factory=list)
    #: row -> (sequence, first position), for prompt logprobs
    prompt_rows: dict[int, tuple[Sequence, int]] = field(default_factory=dict)
    prefill_tokens: int = 0
    #: pairs of a prefill token and one that it attends to: the work of its attention
    prefill_pairs: int = 0
    #: of them, those of prompts that have no room whole, and are computed before it is their turn
    overtaking_tokens: int = 0
    #: the first of ``targets`` that were decoding when the plan was begun
    decode_rows: int = 0
    #: slot -> how many drafted tokens stand in its row; the last of ``targets`` have them
    drafts: dict[int, int] = field(default_factory=dict)
    #: layers of which the device has told while it computed
    reported_layers: int = 0
    #: an earlier plan failed: the results of this one are dropped
    void: bool = False

    def by_slot(self) -> dict[int, Sequence]:
        """Slot -> the sequence that had a row or a draw there in this plan; it may have ended since."""
        plan = self.plan
        silent = (slot for slot, slots in zip(plan.slots, plan.sample_slots, strict=True) if not slots)
        return dict(zip(plan.drawing_slots, self.targets, strict=True)) | dict(zip(silent, self.chunks, strict=True))

    def __repr__(self) -> str:
        void = " void" if self.void else ""
        return f"<InflightPlan {self.step_id}{void} targets={len(self.targets)} chunks={len(self.chunks)}>"


class BatchBuilder:
    """Adds rows to a plan, and keeps the sequences in step with what the plan tells the device."""

    __slots__ = ("deferrable_tokens", "forking", "inflight", "plan", "prompt_logprobs", "publishing", "state")

    def __init__(self, state: SchedulerState, step_id: int) -> None:
        self.state = state
        self.plan = StepPlan(step_id)
        self.inflight = InflightPlan(step_id, self.plan)
        self.deferrable_tokens = 0  # of prompts, that this plan computes
        self.prompt_logprobs = 0  # prompt tokens of which this plan materialises logits
        #: sequences of which this plan computes full blocks and publishes
        self.publishing: list[Sequence] = []
        #: (row, first sequence) of requests with a prompt that ends in this plan, where other sequences fork
        self.forking: list[tuple[int, Sequence]] = []

    # -- blocks

    def append_blocks(self, sequence: Sequence, blocks: list[int], entries: int) -> None:
        """New blocks, allocated for ``entries`` entries behind the last one."""
        own_blocks = self.state.memory.append_blocks(sequence, blocks, entries)
        if sequence.opened:
            self.plan.grow.append((sequence.slot, own_blocks))  # type: ignore[arg-type]  # a sequence with a row has a slot

    def make_writable(self, sequence: Sequence, end: int) -> bool:
        """Give ``sequence`` private blocks for the tokens ``[computed, end)``. False: the pool has no room."""
        if sequence.writable_until >= end:
            return True
        memory = self.state.memory
        memory.windows.pass_parts(sequence)
        if sequence.computed >= sequence.writable_until and memory.next_write_is_shared(sequence):
            place = sequence.computed // memory.block_tokens
            before = sequence.blocks[place]
            if not memory.make_private(sequence):
                return False
            if sequence.opened and sequence.blocks[place] != before:
                self.plan.replace.append((sequence.slot, place, sequence.blocks[place]))  # type: ignore[arg-type]  # a sequence with a row has a slot
        missing_entries = ceil_div(end, memory.block_tokens) - sequence.table_entries
        if missing_entries > 0:
            blocks = memory.pool.allocate(memory.windows.blocks_to_extend(sequence, missing_entries))
            if blocks is None:
                return False
            self.append_blocks(sequence, blocks, missing_entries)
        return memory.place_parts(sequence, end)

    def forget_preempted(self, sequence: Sequence) -> None:
        """Take out the blocks that ``sequence``, which is about to be preempted, got in this plan."""
        self.plan.grow = [entry for entry in self.plan.grow if entry[0] != sequence.slot]
        self.plan.replace = [entry for entry in self.plan.replace if entry[0] != sequence.slot]

    # -- rows

    def add_decodes(self, all_writable: bool) -> int:
        """Add a row for each decoding sequence that may write its next token. Returns the number of rows.

        ``all_writable``: each of them may. The hot loop of the machine.
        """
        plan, step_id = self.plan, self.plan.step_id
        targets = self.state.decoding.items
        if all_writable:
            targets = targets.copy()
        else:
            targets = [sequence for sequence in targets if sequence.computed < sequence.writable_until]
        if resting := self.state.memory.layers.sequences_at_rest(targets):
            targets = [sequence for sequence in targets if sequence not in resting]
        plan.decodes = len(targets)
        plan.counts = [1] * len(targets)
        plan.starts, plan.slots, plan.sample_slots, exhausted = _core.plan_decodes(targets, step_id)
        for sequence in exhausted:
            self.state.move(sequence, Cause.ALL_SCHEDULED)
        self.state.memory.states.note_decodes(targets)
        self.inflight.targets = targets
        self.inflight.decode_rows = len(targets)
        return len(targets)

    @staticmethod
    def reports_prompt(sequence: Sequence) -> bool:
        """Whether the next row of ``sequence`` reports prompt logprobs."""
        if sequence.group.prompt_logprobs is None or sequence.out:
            return False
        return sequence.computed < sequence.prompt_tokens

    def add_chunk(self, sequence: Sequence, end: int) -> int:
        """Add a row for the known tokens ``[computed, end)``, which draws a token when no known one is left behind it;
        rows, where KV stands in for some of them. Returns the number of tokens to compute."""
        if sequence.inexact is None:
            return self._add_row(sequence, sequence.computed, end)
        spans = sequence.inexact.spans_to_compute(sequence.computed, end)
        return sum([self._add_row(sequence, *span) for span in spans])

    def _add_row(self, sequence: Sequence, start: int, end: int) -> int:
        plan, inflight = self.plan, self.inflight
        if not sequence.opened:
            self._open_slot(sequence)
        row = len(plan.slots)
        plan.slots.append(sequence.slot)  # type: ignore[arg-type]  # a sequence with a row has a slot
        plan.starts.append(start)
        plan.counts.append(end - start)
        inflight.prefill_tokens += end - start
        inflight.prefill_pairs += attended_pairs(end - start, start)
        inflight.overtaking_tokens += end - start if sequence.is_overtaking else 0
        self.deferrable_tokens += end - start if sequence.is_deferrable else 0
        if self.reports_prompt(sequence):
            self.prompt_logprobs += end - start
            plan.prompt_logprob_rows.append(row)
            inflight.prompt_rows[row] = (sequence, start)
        self.state.memory.layers.note_rows(sequence, start, end)
        sequence.computed = end
        self.state.memory.states.note_chunk(sequence, start, end)
        sequence.scheduled_step = plan.step_id
        self.state.turns.serve_tenant(sequence.group.tenant, end - start)
        if self.state.memory.has_more_to_publish(sequence) and sequence not in self.publishing[-1:]:
            self.publishing.append(sequence)
        if end < sequence.known_length:
            plan.sample_slots.append(())
            inflight.chunks.append(sequence)
        else:
            self._schedule_draw(sequence, row)
        return end - start

    def add_late_draws(self) -> None:
        """Let the sequences draw whose masks were late, and are there now. Only rows with drafts may follow."""
        for sequence in self.state.late_masks.due_sequences():
            self.plan.late_draws.append(LateDraw(sequence.slot, sequence.known_length))  # type: ignore[arg-type]  # it waits with its slot
            self.inflight.targets.append(sequence)
            self.state.late_masks.drop_sequence(sequence, self.state.now)
            sequence.inflight += 1
            sequence.left -= 1
            if sequence.left:
                self.state.move(sequence, Cause.TOKENS_KNOWN)

    def add_drafts(self, sequence: Sequence, drafts: list[int]) -> None:
        """Add a row for the last known token of a held sequence, which draws, and ``drafts`` behind it. No row but
        further ones with drafts may follow."""
        plan, slot = self.plan, sequence.draw[0]
        plan.drafts[len(plan.slots)] = drafts
        plan.slots.append(slot)
        plan.starts.append(sequence.computed)
        plan.counts.append(1 + len(drafts))
        plan.sample_slots.append(sequence.draw)
        self.inflight.drafts[slot] = len(drafts)
        self.inflight.targets.append(sequence)
        sequence.computed += 1  # what is kept counts when it is known
        sequence.inflight += 1
        sequence.left -= 1

    def _open_slot(self, sequence: Sequence) -> None:
        group = sequence.group
        self.plan.open.append(
            OpenSequence(
                slot=sequence.slot,  # type: ignore[arg-type]  # a sequence with a row has a slot
                tokens=sequence.known_tokens(),
                prompt_tokens=sequence.prompt_tokens,
                index=sequence.index,
                sampling=group.request.sampling,
                blocks=_table(sequence),
                beam_candidates=group.beam.candidates_wanted if group.beam is not None else 0,
                stop=group.request.stop,
                before=_before(group),
                adapter=group.request.adapter,
                grammar_job=self.state.grammars.job_of(group.wanted_grammar),
            )
        )
        sequence.opened = True

    def _schedule_draw(self, sequence: Sequence, row: int) -> None:
        """The last known token is computed: the row draws the next one."""
        self.plan.sample_slots.append(sequence.draw)
        self.inflight.targets.append(sequence)
        sequence.inflight += 1
        group = sequence.group
        if group.beam is not None:
            self.state.move(sequence, Cause.ALL_SCHEDULED)  # until all beams have their candidates
            return
        if group.forks_pending:
            self.forking.append((row, sequence))
        sequence.left -= 1
        self.state.move(sequence, Cause.PROMPT_SCHEDULED if sequence.left else Cause.ALL_SCHEDULED)

    # -- the end of the plan

    def finish_plan(self) -> None:
        """Publish what the plan computes, then fork."""
        for sequence in self.publishing:
            self.state.memory.publish(sequence)
        if self.forking:
            self._fork_sequences()

    def _fork_sequences(self) -> None:
        """Parallel sampling: the other sequences of a request draw from the same row and share all blocks so far."""
        for row, first in self.forking:
            group = first.group
            draws = list(self.plan.sample_slots[row])
            place = self.inflight.targets.index(first) + 1
            for _ in range(group.forks_pending):
                child = group.new_sequence()
                self.state.take_slot(child)
                self.state.memory.fork(first, child)
                self._open_slot(child)
                child.inflight = 1
                child.left = first.left
                child.scheduled_step = self.plan.step_id
                self.state.move(child, Cause.PROMPT_SCHEDULED if child.left else Cause.ALL_SCHEDULED)
                draws.append(child.slot)  # type: ignore[arg-type]  # a sequence that draws has a slot
                self.inflight.targets.insert(place, child)
                place += 1
            self.plan.sample_slots[row] = tuple(draws)
            group.forks_pending = 0


def _before(group: Group) -> Before | None:
    span = group.span
    return Before(group.request.request_id, span.before, span.segments) if span is not None and span.segments else None


def _table(sequence: Sequence) -> list[int]:
    """The block table; entries that lie by layer are placed by the plan."""
    if sequence.layered is None:
        return list(sequence.blocks)
    first = sequence.layered.first
    return [*sequence.blocks[:first], *(0 for _ in sequence.layered.dram_blocks), *sequence.blocks[first:]]
