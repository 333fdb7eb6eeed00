"""A device that executes plans literally, without a model: the oracle of the instance machine.

What attention sees is read through the block table, cell by cell; ``truth`` says what the cells hold. Every misuse of
the contract between machine and device is a :class:`Violation`.
"""

from __future__ import annotations

from memserve.instance.events import OpenSequence, RowFailed, StepFailed, StepFinished, StepPlan
from memserve.sim.fuzz.truth import Violation, candidates, cell, draw, mix, require
from memserve.types import Tier, TokenLogprobs

Cells = list[list[int | None]]
"""``[block][position in it]``; ``None`` = never written."""


class Slot:
    """A slot's tokens and block table."""

    def __init__(self, opened: OpenSequence) -> None:
        self.tokens = [int(t) for t in opened.tokens]
        self.table = list(opened.blocks)
        self.opened = opened


def fail_row(plan: StepPlan, event: StepFinished, slot: int, why: RowFailed) -> None:
    """Let ``slot``, which has a row or a draw in ``plan``, fail alone; ``event``: the plan's result without the
    failure."""
    event.failed[slot] = why
    draws = [drawn for slots in plan.sample_slots for drawn in slots]
    if slot in draws:
        place = draws.index(slot)
        event.tokens[place] = 0
        event.logprobs.pop(place, None)
        event.candidates.pop(place, None)
    if slot in plan.slots:
        event.prompt_logprobs.pop(plan.slots.index(slot), None)


class LiteralDevice:
    """Slots, two tiers of cells, and literal execution."""

    def __init__(
        self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int = 50, device_ns: int = 1000
    ) -> None:
        """``device_ns``: the time that it reports for each step."""
        self.block_tokens, self.vocab, self.device_ns = block_tokens, vocab, device_ns
        self.tiers: dict[Tier, Cells] = {
            Tier.HBM: [[None] * block_tokens for _ in range(hbm_blocks)],
            Tier.DRAM: [[None] * block_tokens for _ in range(dram_blocks)],
        }
        self.slots: dict[int, Slot] = {}
        self.computed_tokens = 0

    def fail(self, plan: StepPlan, seed: int) -> StepFailed:
        """Execute part of the plan, wrongly: afterwards the blocks that it touches are garbage."""
        for copy in plan.copies:
            for block in copy.dst:
                self.tiers[copy.dst_tier][block] = [seed + 1000 + i for i in range(self.block_tokens)]
        for opened in plan.open:
            if seed % 2:
                self.slots[opened.slot] = Slot(opened)
        for slot in plan.slots:
            if slot in self.slots:
                for block in self.slots[slot].table[-1:]:
                    self.tiers[Tier.HBM][block] = [seed + i for i in range(self.block_tokens)]
        return StepFailed(plan.step_id, "injected")

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        """Execute ``plan``."""
        self._prepare(plan)
        return self._compute(plan)

    def run_void(self, plan: StepPlan) -> StepFinished | StepFailed:
        """Execute a plan that follows a failed one: it may or may not match the device's state."""
        try:
            return self.run(plan)
        except (Violation, KeyError, IndexError) as wrong:
            return StepFailed(plan.step_id, str(wrong))

    def _prepare(self, plan: StepPlan) -> None:
        require(len(plan.slots) == len(plan.starts) == len(plan.counts) == len(plan.sample_slots), "ragged rows")
        require(len(set(plan.slots)) == len(plan.slots), "a slot has two rows")
        if plan.reset_slots:
            self.slots.clear()
        for slot in plan.close:
            require(self.slots.pop(slot, None) is not None, f"slot {slot} closed, but not open")
        for copy in plan.copies:
            for src, dst in zip(copy.src, copy.dst, strict=True):
                self.tiers[copy.dst_tier][dst] = list(self.tiers[copy.src_tier][src])
        for opened in plan.open:
            require(opened.slot not in self.slots, f"slot {opened.slot} opened twice")
            self.slots[opened.slot] = Slot(opened)
        for slot, blocks in plan.grow:
            self.slots[slot].table.extend(blocks)
        for slot, place, block in plan.replace:
            self.slots[slot].table[place] = block

    def _compute(self, plan: StepPlan) -> StepFinished:
        writer: dict[tuple[int, int], int] = {}
        seen_by_row, logprobs = [], {}
        for row, slot in enumerate(plan.slots):
            seen, entries = self._row(row, self.slots[slot], plan.starts[row], plan.counts[row], writer)
            seen_by_row.append(seen)
            if row in plan.prompt_logprob_rows:
                logprobs[row] = entries
        event = StepFinished(plan.step_id, [], self.device_ns, prompt_logprobs=logprobs)
        for row, draws in enumerate(plan.sample_slots):
            at_end = plan.starts[row] + plan.counts[row]
            for slot in draws:
                self._sample(self.slots[slot], at_end, seen_by_row[row], event)
        return event

    def _row(
        self, row: int, slot: Slot, start: int, count: int, writer: dict[tuple[int, int], int]
    ) -> tuple[int, list[TokenLogprobs | None]]:
        """Write the row's cells, reading all before them through the table, but none that another row writes now."""
        require(count >= 1 and start + count <= len(slot.tokens), f"row {row} computes tokens that do not exist")
        size, cells, seen = self.block_tokens, self.tiers[Tier.HBM], 0
        entries: list[TokenLogprobs | None] = []
        for position in range(start + count):
            place = block, inside = slot.table[position // size], position % size
            if position >= start:
                if writer.setdefault(place, row) != row:
                    raise Violation("two rows write the same cell")
                cells[block][inside] = cell(slot.tokens[position], position, seen)
                entries.append(None)
                if position + 1 < slot.opened.prompt_tokens:
                    entries[-1] = TokenLogprobs(slot.tokens[position + 1], -float(position + 1))
            if writer.get(place, row) != row:
                raise Violation("a row reads what another row of the plan writes")
            there = cells[block][inside]
            if there is None:
                raise Violation(f"position {position} (block {block}) was never written")
            seen = mix(seen, there)
        self.computed_tokens += count
        return seen, entries

    def _sample(self, slot: Slot, at_end: int, seen: int, event: StepFinished) -> None:
        opened = slot.opened
        require(at_end == len(slot.tokens), "a draw that is not at the end of the slot's tokens")
        if opened.beam_candidates:
            event.candidates[len(event.tokens)] = candidates(seen, opened.beam_candidates, self.vocab)
            event.tokens.append(0)
            return
        token = draw(seen, opened.sampling.seed, opened.index, self.vocab)
        slot.tokens.append(token)
        if opened.sampling.logprobs is not None:
            event.logprobs[len(event.tokens)] = TokenLogprobs(token, -1.0)
        event.tokens.append(token)
