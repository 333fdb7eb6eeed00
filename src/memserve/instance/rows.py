"""The rows of one plan as it is being filled (level 2)."""

from __future__ import annotations

from memserve import _core
from memserve.instance.actions import OpenSequence, StepPlan
from memserve.instance.outstanding import Outstanding
from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase, Sequence
from memserve.policy.costs import attended_pairs
from memserve.units import ceil_div


class RowWriter:
    """Writes rows and what goes with them; keeps in step what the sequences say and what the device is told."""

    __slots__ = ("forking", "outstanding", "plan", "prompt_logprobs", "publishing", "roster")

    def __init__(self, roster: Roster, step_id: int) -> None:
        self.roster = roster
        self.plan = StepPlan(step_id)
        self.outstanding = Outstanding(step_id, self.plan)
        self.prompt_logprobs = 0  # prompt tokens whose logits this plan materialises
        #: sequences whose full blocks this plan computes and publishes
        self.publishing: list[Sequence] = []
        #: (row, first sequence) of requests whose prompt ends in this plan and whose other sequences fork here
        self.forking: list[tuple[int, Sequence]] = []

    # -- blocks

    def append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        """New blocks behind the last one."""
        self.roster.memory.append(sequence, blocks)
        if sequence.opened:
            self.plan.grow.append((sequence.slot, blocks))  # type: ignore[arg-type]  # who has a row has a slot

    def make_writable(self, sequence: Sequence, end: int) -> bool:
        """Blocks, its own, for the tokens ``[computed, end)``; ``False`` when the pool has no room."""
        if sequence.writable_until >= end:
            return True
        memory = self.roster.memory
        if sequence.computed >= sequence.writable_until and memory.next_write_is_shared(sequence):
            place = sequence.computed // memory.block_tokens
            before = sequence.blocks[place]
            if not memory.make_private(sequence):
                return False
            if sequence.opened and sequence.blocks[place] != before:
                self.plan.replace.append((sequence.slot, place, sequence.blocks[place]))  # type: ignore[arg-type]  # who has a row has a slot
        missing = ceil_div(end, memory.block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = memory.pool.allocate(missing)
        if blocks is None:
            return False
        self.append_blocks(sequence, blocks)
        return True

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` is about to be preempted: the device need not hear of blocks that it got in this plan."""
        self.plan.grow = [entry for entry in self.plan.grow if entry[0] != sequence.slot]
        self.plan.replace = [entry for entry in self.plan.replace if entry[0] != sequence.slot]

    # -- rows

    def add_decodes(self, all_writable: bool) -> int:
        """One row for every decoding sequence that may write its next token. Returns the rows added.

        ``all_writable``: each of them may. The hot loop of the machine: nothing here but what each row needs.
        """
        plan, step_id = self.plan, self.plan.step_id
        targets = self.roster.decoding.items
        if all_writable:
            targets = targets.copy()
        else:
            targets = [sequence for sequence in targets if sequence.computed < sequence.writable_until]
        plan.decodes = len(targets)
        plan.counts = [1] * len(targets)
        plan.starts, plan.slots, plan.sample_slots, ended = _core.plan_decodes(targets, step_id)
        for sequence in ended:
            self.roster.move(sequence, Phase.IDLE)
        self.outstanding.targets = targets
        self.outstanding.decode_rows = len(targets)
        return len(targets)

    @staticmethod
    def reports_prompt(sequence: Sequence) -> bool:
        """Whether the next row of ``sequence`` reports prompt logprobs."""
        if sequence.group.prompt_logprobs is None or sequence.out:
            return False
        return sequence.computed < sequence.prompt_tokens

    def add_chunk(self, sequence: Sequence, end: int) -> int:
        """A row for the known tokens ``[computed, end)``; draws a token when nothing known is left. Returns tokens."""
        plan, outstanding, start = self.plan, self.outstanding, sequence.computed
        if not sequence.opened:
            self._open(sequence)
        row = len(plan.slots)
        plan.slots.append(sequence.slot)  # type: ignore[arg-type]  # who has a row has a slot
        plan.starts.append(start)
        plan.counts.append(end - start)
        outstanding.prefill_tokens += end - start
        outstanding.prefill_pairs += attended_pairs(end - start, start)
        if self.reports_prompt(sequence):
            self.prompt_logprobs += end - start
            plan.prompt_logprob_rows.append(row)
            outstanding.prompt_rows[row] = (sequence, start)
        sequence.computed = end
        sequence.scheduled_step = plan.step_id
        self.roster.turns.serve(sequence.group.tenant, end - start)
        block_tokens = self.roster.memory.block_tokens
        if sequence.lease is not None and end // block_tokens * block_tokens > sequence.published:
            self.publishing.append(sequence)
        if end < sequence.known:
            plan.sample_slots.append(())
            outstanding.chunks.append(sequence)
        else:
            self._draw(sequence, row)
        return end - start

    def _open(self, sequence: Sequence) -> None:
        group = sequence.group
        self.plan.open.append(
            OpenSequence(
                slot=sequence.slot,  # type: ignore[arg-type]  # who has a row has a slot
                tokens=sequence.known_tokens(),
                prompt_tokens=sequence.prompt_tokens,
                index=sequence.index,
                sampling=group.request.sampling,
                blocks=list(sequence.blocks),
                beam_candidates=group.beam.candidates_wanted if group.beam is not None else 0,
                stop=group.request.stop,
            )
        )
        sequence.opened = True

    def _draw(self, sequence: Sequence, row: int) -> None:
        """The last known token is computed: the row draws the next one."""
        self.plan.sample_slots.append(sequence.draw)
        self.outstanding.targets.append(sequence)
        sequence.inflight += 1
        group = sequence.group
        if group.beam is not None:
            self.roster.move(sequence, Phase.IDLE)  # until all beams have their candidates
            return
        if group.forks_pending:
            self.forking.append((row, sequence))
        sequence.left -= 1
        self.roster.move(sequence, Phase.DECODING if sequence.left else Phase.IDLE)

    # -- the end of the plan

    def finish(self) -> None:
        """Publish what the plan computes, then fork."""
        for sequence in self.publishing:
            self.roster.memory.publish(sequence)
        if self.forking:
            self._fork()

    def _fork(self) -> None:
        """Parallel sampling: the other sequences of a request draw from the same row and share all blocks so far."""
        for row, first in self.forking:
            group = first.group
            draws = list(self.plan.sample_slots[row])
            place = self.outstanding.targets.index(first) + 1
            for _ in range(group.forks_pending):
                child = group.new_sequence()
                self.roster.take_slot(child)
                self.roster.memory.fork(first, child)
                self._open(child)
                child.inflight = 1
                child.left = first.left
                child.scheduled_step = self.plan.step_id
                self.roster.enter(child, Phase.DECODING if child.left else Phase.IDLE)
                draws.append(child.slot)  # type: ignore[arg-type]  # who draws has a slot
                self.outstanding.targets.insert(place, child)
                place += 1
            self.plan.sample_slots[row] = tuple(draws)
            group.forks_pending = 0
