"""A device that executes plans literally, without a model: the oracle of the instance machine.

The "KV" of a position is a number made of (token, position, everything that attention would have seen before it). What
attention sees is read through the block table, cell by cell, so a wrong block, a stale reuse, a missing copy or a wrong
position changes the number, and with it the next "token", which is a hash of all visible cells. ``lone_tokens`` says
what a request must get when it is alone in the world.
"""

from __future__ import annotations

from memserve.instance.events import StepFailed, StepFinished
from memserve.types import Tier, TokenLogprobs

_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return (state * 6364136223846793005 + value * 1442695040888963407 + 1013904223) & _MASK


def _cell(token: int, position: int, seen: int) -> int:
    return _mix(_mix(_mix(seen, 17), token), position) >> 3


def _draw(seen: int, seed: int, index: int, vocab: int) -> int:
    return (_mix(_mix(seen, seed + 1), index + 1) >> 20) % vocab


def _candidates(seen: int, count: int, vocab: int) -> list[tuple[int, float]]:
    """Distinct tokens with falling logprobs that depend on all that was seen."""
    tokens, logprob, state = [], 0.0, seen
    while len(tokens) < min(count, vocab):
        state = _mix(state, 5)
        token = (state >> 20) % vocab
        logprob -= 0.01 + ((state >> 30) % 1000) / 1000
        while token in [t for t, _ in tokens]:
            token = (token + 1) % vocab
        tokens.append((token, logprob))
    return tokens


def chain(tokens) -> int:
    """What attention sees after ``tokens``."""
    seen = 0
    for position, token in enumerate(tokens):
        seen = _mix(seen, _cell(int(token), position, seen))
    return seen


def lone_tokens(prompt, count: int, seed: int, index: int, vocab: int) -> list[int]:
    """The first ``count`` tokens of sequence ``index`` of a request that runs alone."""
    seen, position, out = chain(prompt), len(prompt), []
    for _ in range(count):
        token = _draw(seen, seed, index, vocab)
        out.append(token)
        seen = _mix(seen, _cell(token, position, seen))
        position += 1
    return out


def lone_candidates(tokens, count: int, vocab: int) -> list[tuple[int, float]]:
    """Beam candidates after ``tokens``."""
    return _candidates(chain(tokens), count, vocab)


class _Slot:
    """A slot's tokens and block table."""

    def __init__(self, opened):
        self.tokens = [int(t) for t in opened.tokens]
        self.table = list(opened.blocks)
        self.opened = opened


class NullDevice:
    """Slots, two tiers of cells, and literal execution. Every misuse is an assertion."""

    def __init__(self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int = 50, device_ns: int = 1000):
        self.block_tokens, self.vocab, self.device_ns = block_tokens, vocab, device_ns
        self.tiers = {
            Tier.HBM: [[None] * block_tokens for _ in range(hbm_blocks)],
            Tier.DRAM: [[None] * block_tokens for _ in range(dram_blocks)],
        }
        self.slots: dict[int, _Slot] = {}
        self.computed_tokens = 0

    def fail(self, plan, seed: int) -> StepFailed:
        """Do some of the plan, wrongly: the blocks that it touches are garbage afterwards."""
        for copy in plan.copies:
            for block in copy.dst:
                self.tiers[copy.dst_tier][block] = [seed + 1000 + i for i in range(self.block_tokens)]
        for opened in plan.open:
            if seed % 2:
                self.slots[opened.slot] = _Slot(opened)
        for slot in plan.slots:
            if slot in self.slots:
                for block in self.slots[slot].table[-1:]:
                    self.tiers[Tier.HBM][block] = [seed + i for i in range(self.block_tokens)]
        return StepFailed(plan.step_id, "injected")

    def run(self, plan) -> StepFinished:
        """Execute ``plan``."""
        self._prepare(plan)
        return self._compute(plan)

    def run_void(self, plan) -> StepFinished | StepFailed:
        """Execute a plan that was made upon one that failed: it may fit the state of the device or not."""
        try:
            return self.run(plan)
        except (AssertionError, KeyError, IndexError) as wrong:
            return StepFailed(plan.step_id, str(wrong))

    def _prepare(self, plan):
        assert len(plan.slots) == len(plan.starts) == len(plan.counts) == len(plan.sample_slots)
        assert len(set(plan.slots)) == len(plan.slots), "a slot has two rows"
        if plan.reset_slots:
            self.slots.clear()
        for slot in plan.close:
            gone = self.slots.pop(slot, None)
            assert gone is not None, f"slot {slot} closed, but not open"
        for copy in plan.copies:
            for src, dst in zip(copy.src, copy.dst, strict=True):
                self.tiers[copy.dst_tier][dst] = list(self.tiers[copy.src_tier][src])
        for opened in plan.open:
            assert opened.slot not in self.slots, f"slot {opened.slot} opened twice"
            self.slots[opened.slot] = _Slot(opened)
        for slot, blocks in plan.grow:
            self.slots[slot].table.extend(blocks)
        for slot, place, block in plan.replace:
            self.slots[slot].table[place] = block

    def _compute(self, plan):
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

    def _row(self, row, slot, start, count, writer):
        """Write the row's cells, reading all before them through the table; never what another row writes now."""
        assert count >= 1 and start + count <= len(slot.tokens), f"row {row} computes tokens that do not exist"
        size, cells, seen, entries = self.block_tokens, self.tiers[Tier.HBM], 0, []
        for position in range(start + count):
            block, inside = slot.table[position // size], position % size
            if position >= start:
                assert writer.setdefault((block, inside), row) == row, "two rows write the same cell"
                cells[block][inside] = _cell(slot.tokens[position], position, seen)
                entries.append(None)
                if position + 1 < slot.opened.prompt_tokens:
                    entries[-1] = TokenLogprobs(slot.tokens[position + 1], -float(position + 1))
            assert writer.get((block, inside), row) == row, "a row reads what another row of the plan writes"
            assert cells[block][inside] is not None, f"position {position} was never written"
            seen = _mix(seen, cells[block][inside])
        self.computed_tokens += count
        return seen, entries

    def _sample(self, slot, at_end, seen, event):
        opened = slot.opened
        assert at_end == len(slot.tokens), "a draw that is not at the end of the slot's tokens"
        if opened.beam_candidates:
            event.candidates[len(event.tokens)] = _candidates(seen, opened.beam_candidates, self.vocab)
            event.tokens.append(0)
            return
        token = _draw(seen, opened.sampling.seed, opened.index, self.vocab)
        slot.tokens.append(token)
        if opened.sampling.logprobs is not None:
            event.logprobs[len(event.tokens)] = TokenLogprobs(token, -1.0)
        event.tokens.append(token)
