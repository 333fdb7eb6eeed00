"""A device that executes plans literally, without a model: the oracle of the instance machine.

What attention sees is read through the block table, or where layers lie, cell by cell; ``truth`` says what the cells
hold. A row that reads cells of layers that do not belong together has read a block that was moved by halves. Every
misuse of the contract between machine and device is a :class:`Violation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memserve.instance.events import OpenSequence, PlaceByLayer, RowFailed, StepFailed, StepFinished, StepPlan
from memserve.segments import Segment
from memserve.sim.fuzz.literal_pages import Cells, LiteralPages, in_layer
from memserve.sim.fuzz.truth import Violation, candidates, cell, draw, mix, require
from memserve.types import Tier, TokenLogprobs
from memserve.units import ceil_div

Writers = dict[int, dict[int, int]]
"""Block -> position in it -> the row of the plan that writes there. Blocks of DRAM count from -1 down."""


class Slot:
    """A slot's tokens and block table, and where its layers lie."""

    def __init__(self, opened: OpenSequence) -> None:
        before = opened.before
        self.first = len(before.tokens) if before is not None else 0  # position of the first token in the table
        self.tokens = [int(t) for t in (*(before.tokens if before is not None else ()), *opened.tokens)]
        self.is_lost = False  # an earlier part was not to be had
        self.table = list(opened.blocks)
        self.opened = opened
        self.late: int | None = None  # what attention has seen where a draw was late
        self.placed: PlaceByLayer | None = None

    def place_of(self, entry: int) -> int | None:
        """Its number among the entries that lie by layer. None: it lies whole."""
        place = -1 if self.placed is None else entry - self.placed.first
        return place if self.placed is not None and 0 <= place < len(self.placed.dram_blocks) else None


def fail_row(plan: StepPlan, event: StepFinished, slot: int, why: RowFailed) -> None:
    """Let ``slot``, which has a row or a draw in ``plan``, fail alone; ``event``: the plan's result without the
    failure."""
    event.failed[slot] = why
    draws = plan.draws
    if slot in draws:
        place = draws.index(slot)
        event.tokens[place] = 0
        event.logprobs.pop(place, None)
        event.candidates.pop(place, None)
    event.kept.pop(slot, None)
    if slot in plan.slots:
        event.prompt_logprobs.pop(plan.slots.index(slot), None)


class LiteralDevice:
    """Slots, two tiers of pages, and literal execution. Copies beside the rows, and what rows write where layers lie,
    are over when the plan is, and at any time before: until then the targets of copies hold nothing, and no row may
    write to their sources."""

    def __init__(
        self,
        block_tokens: int,
        hbm_blocks: int,
        dram_blocks: int,
        vocab: int = 50,
        device_ns: int = 1000,
        *,
        layers: int = 1,
    ) -> None:
        """``device_ns``: the time that it reports for each step."""
        self.block_tokens, self.vocab, self.device_ns, self.layers = block_tokens, vocab, device_ns, layers
        self.kv = LiteralPages(block_tokens, hbm_blocks, dram_blocks, layers)
        self.slots: dict[int, Slot] = {}
        self.computed_tokens = 0
        self.segment: Callable[[Segment, str], list[int] | None] = lambda segment, name: None
        """Asks a holder for the cells of its part of a sequence. None: it does not answer."""
        self.mask_is_late: Callable[[OpenSequence], bool] = lambda opened: False
        """Whether the mask of a grammar is not there when it is needed."""
        self._step_id = 0  # of the plan that was begun last
        self._written_by_layer: list[
            tuple[PlaceByLayer, int, int, int]
        ] = []  # by its rows: entry, position in it, cell

    def fail(self, plan: StepPlan, seed: int) -> StepFailed:
        """Execute part of the plan, wrongly: afterwards the blocks that it touches are garbage."""
        for copy in plan.copies:
            for block in copy.dst:
                self.kv.spoil_block(copy.dst_tier, block, seed + 1000)
        for move in plan.moves:
            self.kv.spoil(move.dst_tier, move.dst[: seed % (len(move.dst) + 1)], seed + 1000)
        for opened in plan.open:
            if seed % 2:
                self.slots[opened.slot] = Slot(opened)
        for slot in plan.slots:
            if slot in self.slots:
                for block in self.slots[slot].table[-1:]:
                    self.kv.spoil_block(Tier.HBM, block, seed)
        return StepFailed(plan.step_id, "injected")

    def begin(self, plan: StepPlan) -> None:
        """Everything before the rows, unless it has begun: what comes in order is done, what is moved has left."""
        if self._step_id == plan.step_id:
            return
        self._step_id = plan.step_id
        self._written_by_layer.clear()
        self._prepare(plan)
        self.kv.begin_moves(plan.moves)

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        """Execute ``plan``, or what is left of it."""
        self.begin(plan)
        event = self._compute(plan)
        self._end()
        return event

    def _end(self) -> None:
        for order, place, inside, value in self._written_by_layer:
            self.kv.write_by_layer(order, place, inside, value)
        self.kv.end_moves()

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
            self.kv.copy(copy)
        for opened in plan.open:
            require(opened.slot not in self.slots, f"slot {opened.slot} opened twice")
            self.slots[opened.slot] = Slot(opened)
        for slot, blocks in plan.grow:
            self.slots[slot].table.extend(blocks)
        for slot, place, block in plan.replace:
            self.slots[slot].table[place] = block
        for order in plan.place:
            self._place(order)
        for late in plan.late_draws:
            drawing = self.slots[late.slot]
            del drawing.tokens[drawing.first + late.known :]

    def _place(self, order: PlaceByLayer) -> None:
        require(order.slot in self.slots, f"slot {order.slot} is placed by layer, but not open")
        slot, frames = self.slots[order.slot], [*order.staging[0], *order.staging[1]]
        frames += [frame for kept in order.kept.values() for frame in kept]
        require(order.first + len(order.dram_blocks) <= len(slot.table), "entries that do not exist lie by layer")
        require(len(set(frames)) == len(frames), "a frame is used twice")
        slot.placed = order

    def _compute(self, plan: StepPlan) -> StepFinished:
        writers: Writers = {}
        seen_by_row, logprobs = [], {}
        for row, number in enumerate(plan.slots):
            slot, drafts = self.slots[number], plan.drafts.get(row, [])
            known = len(slot.tokens)
            slot.tokens += drafts
            behind, entries = self._row(row, slot, slot.first + plan.starts[row], plan.counts[row], writers)
            del slot.tokens[known:]
            seen_by_row.append(behind)
            if row in plan.prompt_logprob_rows:
                logprobs[row] = entries
        event = StepFinished(plan.step_id, [], self.device_ns, prompt_logprobs=logprobs)
        late: set[int] = set()
        plain = len(plan.sample_slots) - len(plan.drafts)
        for row, draws in enumerate(plan.sample_slots):
            if row == plain:
                self._draw_late(plan, event, late)
            drafts, seen = plan.drafts.get(row, []), seen_by_row[row]
            at_end = self.slots[plan.slots[row]].first + plan.starts[row] + plan.counts[row] - len(drafts)
            for number in draws:
                self._sample(number, at_end, seen[-1 - len(drafts)], event, late)
            if drafts:
                self._verify(plan.slots[row], drafts, seen[-len(drafts) :], event)
        if not plan.drafts:
            self._draw_late(plan, event, late)
        for number in plan.slots:
            if self.slots[number].is_lost:
                fail_row(plan, event, number, RowFailed(""))
        return replace(event, late=frozenset(late))

    def _draw_late(self, plan: StepPlan, event: StepFinished, late: set[int]) -> None:
        for draw_late in plan.late_draws:
            slot = self.slots[draw_late.slot]
            require(slot.late is not None, f"slot {draw_late.slot} draws what was not late")
            seen, slot.late = slot.late or 0, None
            self._sample(draw_late.slot, len(slot.tokens), seen, event, late)

    def _verify(self, number: int, drafts: list[int], seen: list[int], event: StepFinished) -> None:
        """``seen``: by attention, behind each of the ``drafts``."""
        slot, kept = self.slots[number], list[int]()
        opened = slot.opened
        require(not (opened.beam_candidates or opened.sampling.logprobs), "drafts where draws are not plain")
        for token, behind in zip(drafts, seen, strict=True):
            if slot.tokens[-1] != token:
                break
            kept.append(draw(behind, opened.sampling.seed, opened.index, self.vocab))
            slot.tokens.append(kept[-1])
        event.kept[number] = kept

    # -- rows

    def _row(
        self, row: int, slot: Slot, start: int, count: int, writers: Writers
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Write the row's cells, reading all before them through the table, but none that another row writes now.
        Returns what attention has seen behind each of its tokens."""
        require(count >= 1 and start + count <= len(slot.tokens), f"row {row} computes tokens that do not exist")
        seen = 0
        for value in self._context(slot, start, writers):
            seen = mix(seen, value)
        behind, entries = list[int](), list[TokenLogprobs | None]()
        for position in range(start, start + count):
            entry, inside = divmod(position - slot.first, self.block_tokens)
            order, place, block = slot.placed, slot.place_of(entry), slot.table[entry]
            if order is not None and place is not None:
                block = -1 - order.dram_blocks[place]
            if writers.setdefault(block, {}).setdefault(inside, row) != row:
                raise Violation("two rows write the same cell")
            value = cell(slot.tokens[position], position, seen)
            if order is not None and place is not None:
                self._written_by_layer.append((order, place, inside, value))
            else:
                self._write(block, inside, value)
            entries.append(None)
            if position - slot.first + 1 < slot.opened.prompt_tokens:
                entries[-1] = TokenLogprobs(slot.tokens[position + 1], -float(position + 1))
            seen = mix(seen, value)
            behind.append(seen)
        self.computed_tokens += count
        return behind, entries

    def _context(self, slot: Slot, end: int, writers: Writers) -> list[int]:
        """What lies before position ``end``, in each of its layers."""
        size, order, values = self.block_tokens, slot.placed, self._before(slot)
        end -= slot.first
        if order is not None:
            self.kv.empty_staging(order)
        for entry in range(ceil_div(end, size)):
            first, place = entry * size, slot.place_of(entry)
            count = min(size, end - first)
            if order is not None and place is not None:
                pages = self.kv.by_layer(order, place)
            else:
                block = slot.table[entry]
                if min(writers.get(block, (count,))) < count:
                    raise Violation("a row reads what another row of the plan writes")
                pages = self.kv.of_block(Tier.HBM, block)
            values += _belonging_together(pages, count, f"positions {first} to {first + count - 1}")
        return values

    def _before(self, slot: Slot) -> list[int]:
        """The cells of earlier parts, as their holders have them."""
        before, values = slot.opened.before, list[int]()
        for segment in before.segments if before is not None else ():
            there = self.segment(segment, before.name) if before is not None and not slot.is_lost else None
            slot.is_lost |= there is None
            values += there or []
        return values

    def cells(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """What the first ``tokens`` of ``blocks`` hold."""
        size, values = self.block_tokens, list[int]()
        for place, block in enumerate(blocks[: ceil_div(tokens, size)]):
            pages = self.kv.of_block(Tier.HBM, block)
            values += _belonging_together(pages, min(size, tokens - place * size), f"entry {place} of a segment")
        return values

    def _write(self, block: int, inside: int, value: int) -> None:
        for layer, page in enumerate(self.kv.of_block(Tier.HBM, block)):
            page[inside] = in_layer(value, layer)

    def _sample(self, number: int, at_end: int, seen: int, event: StepFinished, late: set[int]) -> None:
        slot = self.slots[number]
        opened = slot.opened
        require(at_end == len(slot.tokens), "a draw that is not at the end of the slot's tokens")
        if opened.beam_candidates:
            event.candidates[len(event.tokens)] = candidates(seen, opened.beam_candidates, self.vocab)
            event.tokens.append(0)
            return
        if slot.late is not None or (opened.sampling.grammar and self.mask_is_late(opened)):
            slot.late = seen if slot.late is None else slot.late  # what is behind a late draw has no meaning
            late.add(number)
            slot.tokens.append(0)
            event.tokens.append(0)
            return
        token = draw(seen, opened.sampling.seed, opened.index, self.vocab)
        slot.tokens.append(token)
        if opened.sampling.logprobs is not None:
            event.logprobs[len(event.tokens)] = TokenLogprobs(token, -1.0)
        event.tokens.append(token)


def _belonging_together(pages: Cells, count: int, where: str) -> list[int]:
    """The first ``count`` cells of a block, if each layer has its part of them."""
    there: list[int] = []
    for layer, page in enumerate(pages):
        cells = [value for value in page[:count] if value is not None]
        if len(cells) < count:
            raise Violation(f"{where}, layer {layer}: never written, or not there yet")
        if not layer:
            there = cells
        elif cells != [in_layer(value, layer) for value in there]:
            raise Violation(f"{where}: the layers do not belong together")
    return there
