"""A device that executes plans literally, without a model: the oracle of the instance machine.

What attention sees is read through the block table, or where layers lie, cell by cell; ``truth`` says what the cells
hold. A row that reads cells of layers that do not belong together has read a block that was moved by halves. Every
misuse of the contract between machine and device is a :class:`Violation`.

A literal device whose memory others can read: checksums, pulls, layers that finish one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from operator import add
from typing import cast

from memserve.base.layer_kv import WindowPages
from memserve.base.types import Tier, TokenLogprobs
from memserve.base.units import ceil_div
from memserve.instance.events import (
    OpenSequence,
    PlaceByLayer,
    PlaceWindow,
    RowFailed,
    StepFailed,
    StepFinished,
    StepPlan,
)
from memserve.kv.contents import MoveTokens
from memserve.kv.transfer.events import PagesSealed, PullPages, SealPages
from memserve.protocol.messages import Segment
from memserve_lab.sim.reference.memory import Cells, SymbolicPages, SymbolicStates, in_layer
from memserve_lab.sim.reference.oracle import Violation, candidates, cell, draw, mix, require

Writers = dict[int, dict[int, int]]
"""Block -> position in it -> the slot that writes there in a plan. Blocks of DRAM count from -1 down."""


class Slot:
    """A slot's tokens and block table, and where its layers lie."""

    def __init__(self, opened: OpenSequence) -> None:
        before = opened.before
        self.first = len(before.tokens) if before is not None else 0  # position of the first token in the table
        self.tokens = [int(t) for t in (*(before.tokens if before is not None else ()), *opened.tokens)]
        self.is_lost = False  # an earlier part was not to be had
        self.table = list(opened.blocks)
        self.opened = opened
        self.parts: dict[int, list[int]] = {}  # entry -> blocks, where KV of windows lies apart
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
    draws = plan.drawing_slots
    if slot in draws:
        place = draws.index(slot)
        event.tokens[place] = 0
        event.logprobs.pop(place, None)
        event.candidates.pop(place, None)
    event.accepted_drafts.pop(slot, None)
    if slot in plan.slots:
        event.prompt_logprobs.pop(plan.slots.index(slot), None)


class SymbolicDevice:
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
        self.kv = SymbolicPages(block_tokens, hbm_blocks, dram_blocks, layers)
        self.slots: dict[int, Slot] = {}
        self.states: SymbolicStates | None = None
        """None: layers keep KV alone."""
        self.windows: WindowPages | None = None
        """None: no layers' KV lies apart."""
        self.computed_tokens = 0
        self.segment: Callable[[Segment, str], list[int] | None] = lambda segment, name: None
        """Asks a holder for the cells of its part of a sequence. None: it does not answer."""
        self.mask_is_late: Callable[[OpenSequence], bool] = lambda opened: False
        """Whether the mask of a grammar is not there when it is needed."""
        self.token_of: dict[int, int] | None = None
        """Of each cell that was computed: what is moved to other positions has to be of the same tokens. None: nothing
        looks at that."""
        self._step_id = 0  # of the plan that was begun last
        self._written_by_layer: list[
            tuple[PlaceByLayer, int, int, int]
        ] = []  # by its rows: entry, position in it, cell

    def fail_plan(self, plan: StepPlan, seed: int) -> StepFailed:
        """Execute part of the plan, wrongly: afterwards the blocks that it touches are garbage."""
        for copy in plan.copies:
            for block in copy.dst:
                self.kv.spoil_block(copy.dst_tier, block, seed + 1000)
        for move in plan.moves:
            self.kv.spoil_pages(move.dst_tier, move.dst[: seed % (len(move.dst) + 1)], seed + 1000)
        for opened in plan.open:
            if seed % 2:
                self.slots[opened.slot] = Slot(opened)
        for slot in plan.slots:
            if slot in self.slots:
                last = len(self.slots[slot].table) - 1
                for block in (*self.slots[slot].table[-1:], *self.slots[slot].parts.get(last, ())):
                    self.kv.spoil_block(Tier.HBM, block, seed)
        return StepFailed(plan.step_id, "injected")

    def begin_plan(self, plan: StepPlan) -> None:
        """Everything before the rows, unless it has begun: what comes in order is done, what is moved has left."""
        if self._step_id == plan.step_id:
            return
        self._step_id = plan.step_id
        self._written_by_layer.clear()
        self._prepare_plan(plan)
        self.kv.begin_moves(plan.moves)

    def run_plan(self, plan: StepPlan) -> StepFinished | StepFailed:
        """Execute ``plan``, or what is left of it."""
        self.begin_plan(plan)
        event = self._compute_plan(plan)
        self._end_plan()
        return event

    def _end_plan(self) -> None:
        for order, place, inside, value in self._written_by_layer:
            self.kv.write_by_layer(order, place, inside, value)
        self.kv.end_moves()

    def run_void(self, plan: StepPlan) -> StepFinished | StepFailed:
        """Execute a plan that follows a failed one: it may or may not match the device's state."""
        try:
            return self.run_plan(plan)
        except (Violation, KeyError, IndexError) as wrong:
            return StepFailed(plan.step_id, str(wrong))

    def _prepare_plan(self, plan: StepPlan) -> None:
        require(len(plan.slots) == len(plan.starts) == len(plan.counts) == len(plan.sample_slots), "ragged rows")
        ends: dict[int, int] = {}
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            require(start >= ends.get(slot, 0), f"rows of slot {slot} overlap, or are out of order")
            ends[slot] = start + count
        if plan.reset_slots:
            self.slots.clear()
            if self.states is not None:
                self.states.of_slots.clear()
        for slot in plan.close:
            require(self.slots.pop(slot, None) is not None, f"slot {slot} closed, but not open")
        require(self.states is not None or not (plan.states or plan.snapshots), "states where layers have none")
        if self.states is not None:
            for change in plan.states:
                self.states.apply_order(change)
        for copy in plan.copies:
            self.kv.copy_blocks(copy)
            if self.states is not None:
                self.states.copy_blocks(copy)
        for moved in plan.token_moves:
            self.kv.move_tokens(moved)
        for opened in plan.open:
            require(opened.slot not in self.slots, f"slot {opened.slot} opened twice")
            self.slots[opened.slot] = Slot(opened)
        for moved in plan.token_moves:
            self._check_moved(moved, plan.open)
        for slot, blocks in plan.grow:
            self.slots[slot].table.extend(blocks)
        for slot, place, block in plan.replace:
            self.slots[slot].table[place] = block
        for window in plan.windows:
            self._place_window(window)
        for order in plan.place:
            self._place_by_layer(order)
        for late in plan.late_draws:
            drawing = self.slots[late.slot]
            del drawing.tokens[drawing.first + late.known_tokens :]

    def _check_moved(self, order: MoveTokens, opened: list[OpenSequence]) -> None:
        for sequence in opened if self.token_of is not None else ():
            if order.dst[0] in sequence.blocks:
                first = sequence.blocks.index(order.dst[0]) * self.block_tokens + order.dst_first
                for position in range(first, first + order.count):
                    block, place = sequence.blocks[position // self.block_tokens], position % self.block_tokens
                    value = self.kv.of_block(Tier.HBM, block)[0][place]
                    token = (self.token_of or {}).get(value or 0)
                    require(token == sequence.tokens[position], f"KV of token {token} was moved to position {position}")

    def _place_window(self, order: PlaceWindow) -> None:
        require(self.windows is not None and order.slot in self.slots, f"slot {order.slot} has no window")
        if self.windows is not None:
            size = self.windows.part_blocks
            require(not len(order.blocks) % size, "half a part is placed")
            for place in range(len(order.blocks) // size):
                part = order.blocks[place * size : (place + 1) * size]
                self.slots[order.slot].parts[order.first + place] = part

    def _place_by_layer(self, order: PlaceByLayer) -> None:
        require(order.slot in self.slots, f"slot {order.slot} is placed by layer, but not open")
        slot, frames = self.slots[order.slot], [*order.staging[0], *order.staging[1]]
        frames += [frame for layer_frames in order.resident_layers.values() for frame in layer_frames]
        require(order.first + len(order.dram_blocks) <= len(slot.table), "entries that do not exist lie by layer")
        require(len(set(frames)) == len(frames), "a frame is used twice")
        slot.placed = order

    def _compute_plan(self, plan: StepPlan) -> StepFinished:
        writers: Writers = {}
        seen_by_row, logprobs = [], {}
        if self.states is not None:
            self.states.check_drafts(plan.drafts.values())
        for row, number in enumerate(plan.slots):
            slot, drafts = self.slots[number], plan.drafts.get(row, [])
            token_count = len(slot.tokens)
            slot.tokens += drafts
            behind, entries = self._compute_row(number, slot, slot.first + plan.starts[row], plan.counts[row], writers)
            if self.states is not None:
                start, end = plan.starts[row], plan.starts[row] + plan.counts[row]
                self.states.pass_row(number, slot.tokens, start, end, keeps=slot.late is None)
            del slot.tokens[token_count:]
            seen_by_row.append(behind)
            if row in plan.prompt_logprob_rows:
                logprobs[row] = entries
        for order in plan.snapshots:
            slot = self.slots[order.slot]
            if self.states is not None and slot.late is None:
                require(order.tokens <= self.states.of_slots[order.slot][0], "a snapshot of tokens still to come")
                self.states.save(order.pages, slot.tokens[: order.tokens])
        event = StepFinished(plan.step_id, [], self.device_ns, prompt_logprobs=logprobs)
        late: set[int] = set()
        plain = len(plan.sample_slots) - len(plan.drafts)
        for row, draws in enumerate(plan.sample_slots):
            if row == plain:
                self._draw_late(plan, event, late)
            drafts, cells_seen = plan.drafts.get(row, []), seen_by_row[row]
            at_end = self.slots[plan.slots[row]].first + plan.starts[row] + plan.counts[row] - len(drafts)
            for number in draws:
                self._sample_token(number, at_end, cells_seen[-1 - len(drafts)], event, late)
            if drafts:
                self._verify_drafts(plan.slots[row], drafts, cells_seen[-len(drafts) :], event)
        if not plan.drafts:
            self._draw_late(plan, event, late)
        for number in plan.with_draws([number for number in plan.slots if self.slots[number].is_lost]):
            fail_row(plan, event, number, RowFailed(""))
        return replace(event, late=frozenset(late))

    def _draw_late(self, plan: StepPlan, event: StepFinished, late: set[int]) -> None:
        for draw_late in plan.late_draws:
            slot = self.slots[draw_late.slot]
            require(slot.late is not None, f"slot {draw_late.slot} draws what was not late")
            cells_seen, slot.late = slot.late or 0, None
            self._sample_token(draw_late.slot, len(slot.tokens), cells_seen, event, late)

    def _verify_drafts(self, number: int, drafts: list[int], cells_seen: list[int], event: StepFinished) -> None:
        """``seen``: by attention, behind each of the ``drafts``."""
        slot, accepted = self.slots[number], list[int]()
        opened = slot.opened
        require(not (opened.beam_candidates or opened.sampling.logprobs), "drafts where draws are not plain")
        for token, behind in zip(drafts, cells_seen, strict=True):
            if slot.tokens[-1] != token:
                break
            accepted.append(draw(behind, opened.sampling.seed, opened.index, self.vocab))
            slot.tokens.append(accepted[-1])
        event.accepted_drafts[number] = accepted
        if self.states is not None:  # the last of its tokens was drawn behind the row
            self.states.settle_drafts(number, slot.tokens, len(slot.tokens) - 1)

    # -- rows

    def _compute_row(
        self, number: int, slot: Slot, start: int, count: int, writers: Writers
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Write the cells of a row of slot ``number``, reading all before them through the table, but none that another
        slot's row writes now. Returns what attention has seen behind each of its tokens."""
        require(count >= 1 and start + count <= len(slot.tokens), f"slot {number} computes tokens that do not exist")
        hash_seen = 0
        is_lost = slot.is_lost and slot.opened.before is None  # then there may be anything before it
        context_cells = [] if is_lost else self._context_cells(slot, start, writers)
        self._read_window(slot, context_cells, writers)
        for value in context_cells:
            hash_seen = mix(hash_seen, value)
        behind, entries = list[int](), list[TokenLogprobs | None]()
        for position in range(start, start + count):
            entry, inside = divmod(position - slot.first, self.block_tokens)
            order, place, block = slot.placed, slot.place_of(entry), slot.table[entry]
            if order is not None and place is not None:
                block = -1 - order.dram_blocks[place]
            if writers.setdefault(block, {}).setdefault(inside, number) != number:
                raise Violation("two rows write the same cell")
            value = cell(slot.tokens[position], position, hash_seen)
            if self.token_of is not None:
                self.token_of[value] = slot.tokens[position]
            self._write_part(number, slot, position, value, writers)
            if order is not None and place is not None:
                self._written_by_layer.append((order, place, inside, value))
            else:
                self._write_cell(block, inside, value)
            entries.append(None)
            if position - slot.first + 1 < slot.opened.prompt_tokens:
                entries[-1] = TokenLogprobs(slot.tokens[position + 1], -float(position + 1))
            hash_seen = mix(hash_seen, value)
            behind.append(hash_seen)
        self.computed_tokens += count
        return behind, entries

    def _context_cells(self, slot: Slot, end: int, writers: Writers) -> list[int]:
        """What lies before position ``end``, in each of its layers."""
        size, order, values = self.block_tokens, slot.placed, self._earlier_cells(slot)
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
                written = writers.get(block, {}).items()
                if any(inside < count and number != slot.opened.slot for inside, number in written):
                    raise Violation("a row reads what another slot's row of the plan writes")
                pages = self._pages_read(slot, block, count)
            values += _belonging_together(pages, count, f"positions {first} to {first + count - 1}")
        return values

    def _pages_read(self, slot: Slot, block: int, count: int) -> Cells:
        """Of a whole block, of which a row of ``slot`` reads ``count`` cells."""
        return self.kv.of_block(Tier.HBM, block)

    def _read_window(self, slot: Slot, context_cells: list[int], writers: Writers) -> None:
        """Of the cells before a row, those in its window are there for the layers that read it as well."""
        if self.windows is None:
            return
        size, end = self.block_tokens, len(context_cells)
        window, chunk = self.windows.window, self.windows.chunk
        oldest = max(0, end - window + 1) if window else end  # that the first token of the row reads
        oldest = min(oldest, end - end % chunk) if chunk else oldest
        for entry in range(oldest // size, ceil_div(end, size)):
            own_cells = context_cells[entry * size : (entry + 1) * size]
            require(entry in slot.parts, f"entry {entry} of a window has no part")
            for place, block in enumerate(slot.parts[entry], 1):
                if min(writers.get(block, (size,))) < len(own_cells):
                    raise Violation("a row reads what another row of the plan writes")
                pages = self.kv.of_block(Tier.HBM, block)
                for layer, page in enumerate(pages, place * self.layers):
                    expected = [in_layer(value, layer) for value in own_cells]
                    require(page[: len(own_cells)] == expected, f"entry {entry}: a part of other tokens")

    def _write_part(self, row: int, slot: Slot, position: int, value: int, writers: Writers) -> None:
        if self.windows is None:
            return
        entry, inside = divmod(position, self.block_tokens)
        require(entry in slot.parts, f"entry {entry} is written, and has no part")
        for place, block in enumerate(slot.parts[entry], 1):
            if writers.setdefault(block, {}).setdefault(inside, row) != row:
                raise Violation("two rows write the same cell of a part")
            for layer, page in enumerate(self.kv.of_block(Tier.HBM, block), place * self.layers):
                page[inside] = in_layer(value, layer)

    def _earlier_cells(self, slot: Slot) -> list[int]:
        """The cells of earlier parts, as their holders have them."""
        before, values = slot.opened.before, list[int]()
        for segment in before.segments if before is not None else ():
            segment_cells = self.segment(segment, before.name) if before is not None and not slot.is_lost else None
            slot.is_lost |= segment_cells is None
            values += segment_cells or []
        return values

    def segment_cells(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """What the first ``tokens`` of ``blocks`` hold."""
        size, values = self.block_tokens, list[int]()
        for place, block in enumerate(blocks[: ceil_div(tokens, size)]):
            pages = self.kv.of_block(Tier.HBM, block)
            values += _belonging_together(pages, min(size, tokens - place * size), f"entry {place} of a segment")
        return values

    def _write_cell(self, block: int, inside: int, value: int) -> None:
        if self.states is not None:
            self.states.overwrite((block,))
        for layer, page in enumerate(self.kv.of_block(Tier.HBM, block)):
            page[inside] = in_layer(value, layer)

    def _sample_token(self, number: int, at_end: int, hash_seen: int, event: StepFinished, late: set[int]) -> None:
        slot = self.slots[number]
        opened = slot.opened
        require(at_end == len(slot.tokens), "a draw that is not at the end of the slot's tokens")
        if opened.beam_candidates:
            event.candidates[len(event.tokens)] = candidates(hash_seen, opened.beam_candidates, self.vocab)
            event.tokens.append(0)
            return
        if slot.late is not None or (opened.sampling.grammar and self.mask_is_late(opened)):
            slot.late = hash_seen if slot.late is None else slot.late  # what is behind a late draw has no meaning
            late.add(number)
            slot.tokens.append(0)
            event.tokens.append(0)
            return
        token = draw(hash_seen, opened.sampling.seed, opened.index, self.vocab)
        slot.tokens.append(token)
        if opened.sampling.logprobs is not None:
            event.logprobs[len(event.tokens)] = TokenLogprobs(token, -1.0)
        event.tokens.append(token)


def _belonging_together(pages: Cells, count: int, place: str) -> list[int]:
    """The first ``count`` cells of a block, if each layer has its part of them."""
    cells_of_pages: list[int] = []
    for layer, page in enumerate(pages):
        cells = list(page[:count])
        if len(cells) < count or None in cells:
            raise Violation(f"{place}, layer {layer}: never written, or not there yet")
        if not layer:
            cells_of_pages = cast("list[int]", cells)
            continue
        if cells != list(map(add, cells_of_pages, repeat(in_layer(0, layer)))):
            raise Violation(f"{place}: the layers do not belong together")
    return cells_of_pages


LAYERS = 2
"""Of a device on which nothing lies by layer."""


class PageMemory(ABC):
    """Pages, each of one layer of one block, that others of the world may read."""

    @abstractmethod
    def page_cells(self, tier: Tier, block: int, layer: int) -> Sequence[int | None]:
        """The cells of a page. None: never written."""

    @abstractmethod
    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        """Write a page."""

    def checksum_of(self, tier: Tier, block: int, first_layer: int, end_layer: int) -> int:
        """Of these layers of a block as they are, unused positions included."""
        state = 11
        for layer in range(first_layer, end_layer):
            for value in self.page_cells(tier, block, layer):
                state = mix(state, -1 if value is None else value)
        return state

    def seal_pages(self, job: SealPages) -> PagesSealed:
        """Checksums of own pages."""
        sums = [self.checksum_of(job.tier, block, job.first_layer, job.end_layer) for block in job.blocks]
        return PagesSealed(job.job_id, tuple(sums))

    def pull_block(self, job: PullPages, place: int, source: PageMemory, *, corrupt: bool) -> bool:
        """Copy one block's layers from ``source``; whether what was written has the checksum that was promised."""
        src, dst = job.src_blocks[place], job.dst_blocks[place]
        for layer in range(job.first_layer, job.end_layer):
            cells = list(source.page_cells(job.src_tier, src, layer))
            if corrupt and layer == job.first_layer:
                cells[0] = (cells[0] or 0) ^ 1
            self.set_page(job.dst_tier, dst, layer, cells)
        return self.checksum_of(job.dst_tier, dst, job.first_layer, job.end_layer) == job.checksums[place]


class OracleDevice(SymbolicDevice, PageMemory):
    """Literal KV in several layers."""

    def __init__(
        self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int, *, layers: int = LAYERS
    ) -> None:
        super().__init__(block_tokens, hbm_blocks, dram_blocks, vocab, layers=layers)
        self._results: dict[int, StepFinished] = {}  # of plans with a first layer that is done
        #: block, position in it, cell; upper layers are still to be written
        self._late: list[tuple[int, int, int]] | None = None
        self.written: set[tuple[int, int]] = set()
        """Blocks of HBM and positions in them that the present plan writes."""
        self.gated_reads: dict[int, list[tuple[int, list[int]]]] = {}
        """Slot with a gate in the plan under way -> blocks before its row, and the cells that layer 0 has there."""
        self.behind: set[tuple[int, int]] = set()
        """Where a worker has still to write its part: others than its own rows find something else there."""

    # -- plans

    def begin_plan(self, plan: StepPlan) -> None:
        if self._step_id != plan.step_id:
            self.written.clear()
        super().begin_plan(plan)

    def run_plan(self, plan: StepPlan) -> StepFinished | StepFailed:
        """All layers, or those that are not done yet."""
        result = self._results.pop(plan.step_id, None)
        if result is None:
            return super().run_plan(plan)
        lost_since = [number for number in plan.gates if self.slots[number].is_lost]  # since they have computed
        for number in plan.with_draws(lost_since):
            fail_row(plan, result, number, RowFailed(""))
        for layer in range(1, self.layers):
            self._write_layer(layer)
        self._late, self.gated_reads = None, {}
        self._end_plan()
        return result

    def finish_layer(self, plan: StepPlan, layer: int) -> None:
        """One layer of a plan with ``report_layers``."""
        if layer == 0:
            self._late = []
            self.begin_plan(plan)
            self.gated_reads = {slot: [] for slot in plan.gates}
            self._results[plan.step_id] = self._compute_plan(plan)
        else:
            self._read_layer(layer)
            self._write_layer(layer)

    def lose_rows(self, plan: StepPlan, slots: Iterable[int]) -> None:
        """What these slots of the plan under way wait for does not come: they read on without meaning, and so is what
        is drawn there."""
        for slot in plan.with_draws(slots):
            self.gated_reads.pop(slot, None)
            self.slots[slot].is_lost = True

    def _pages_read(self, slot: Slot, block: int, count: int) -> Cells:
        reads, pages = self.gated_reads.get(slot.opened.slot), super()._pages_read(slot, block, count)
        if reads is None:
            return pages
        require(None not in pages[0][:count], f"slot {slot.opened.slot} reads layer 0 before it has come")
        reads.append((block, cast("list[int]", list(pages[0][:count]))))
        return pages[:1]

    def _read_layer(self, layer: int) -> None:
        for slot, reads in self.gated_reads.items():
            for block, values in reads:
                cells = self.kv.of_block(Tier.HBM, block)[layer][: len(values)]
                expected = [in_layer(value, layer) for value in values]
                require(cells == expected, f"slot {slot} reads layer {layer} of block {block} before it has come")

    def abandon_layers(self, plan: StepPlan) -> None:
        """The plan under way fails, perhaps after half of its layers."""
        self.gated_reads = {}
        self._results.pop(plan.step_id, None)
        self._late = None

    def _write_layer(self, layer: int) -> None:
        for block, inside, value in self._late or ():
            self.kv.of_block(Tier.HBM, block)[layer][inside] = in_layer(value, layer)

    def _write_cell(self, block: int, inside: int, value: int) -> None:
        self.written.add((block, inside))
        if self._late is None:
            super()._write_cell(block, inside, value)
        else:
            if self.states is not None:
                self.states.overwrite((block,))
            self.kv.of_block(Tier.HBM, block)[0][inside] = value
            self._late.append((block, inside, value))

    # -- pages

    def page_cells(self, tier: Tier, block: int, layer: int) -> list[int | None]:
        if self.states is not None and not layer:
            saved = self.states.page_cells(tier, block, self.block_tokens)
            if saved is not None:
                return saved
        cells = self.kv.tiers[tier][block * self.layers + layer]
        if not self.behind or tier is not Tier.HBM:
            return cells
        return [mix(value or 0, 1) if (block, inside) in self.behind else value for inside, value in enumerate(cells)]

    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        if self.states is not None and not layer:
            self.states.take_cells(tier, block, cells)
        self.kv.tiers[tier][block * self.layers + layer] = list(cells)
        if self.behind and tier is Tier.HBM:
            self.behind -= {(block, inside) for inside in range(len(cells))}
