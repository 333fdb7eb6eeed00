"""A literal device with several layers: pages lie where plans say, and what a copy may write at any time is garbage."""

from __future__ import annotations

from collections.abc import Iterable

from memserve.instance.events import PlaceByLayer, StepFailed, StepFinished, StepPlan
from memserve.sim.fuzz.literal_device import LiteralDevice, Slot
from memserve.sim.fuzz.truth import Violation, cell, mix, require
from memserve.types import Tier, TokenLogprobs

Cell = tuple[int, int] | None
"""(what the token left behind, layer); None: never written, or garbage."""


class LayeredDevice(LiteralDevice):
    """Each block has a page for each layer. Copies beside the rows are over when the plan is, and at any time before:
    their targets are garbage until then, and no row may write to their sources."""

    def __init__(self, block_tokens: int, hbm_blocks: int, dram_blocks: int, vocab: int, layers: int) -> None:
        super().__init__(block_tokens, hbm_blocks, dram_blocks, vocab)
        self.layers = layers
        self.pages: dict[Tier, list[list[Cell]]] = {
            tier: [[None] * block_tokens for _ in range(count * layers)]
            for tier, count in ((Tier.HBM, hbm_blocks), (Tier.DRAM, dram_blocks))
        }
        self.placed: dict[int, PlaceByLayer] = {}
        self.moved_pages = 0
        self.read_by_layer = 0

    # -- plans

    def fail(self, plan: StepPlan, seed: int) -> StepFailed:
        for copy in plan.copies:
            for block in copy.dst:
                self._spoil(copy.dst_tier, range(block * self.layers, (block + 1) * self.layers))
        for move in plan.moves:
            self._spoil(move.dst_tier, move.dst[: seed % (len(move.dst) + 1)])
        return super().fail(plan, seed)

    def _prepare(self, plan: StepPlan) -> None:
        if plan.reset_slots:
            self.placed.clear()
        for slot in plan.close:
            self.placed.pop(slot, None)
        super()._prepare(plan)
        for copy in plan.copies:
            for src, dst in zip(copy.src, copy.dst, strict=True):
                for layer in range(self.layers):
                    page = self.pages[copy.src_tier][src * self.layers + layer]
                    self.pages[copy.dst_tier][dst * self.layers + layer] = list(page)
        for order in plan.place:
            require(order.slot in self.slots, "a slot that is not open is placed by layer")
            end = order.first + len(order.dram_blocks)
            require(end <= len(self.slots[order.slot].table), "entries that do not exist are placed by layer")
            frames = [frame for some in (*order.kept.values(), *order.staging) for frame in some]
            require(len(set(frames)) == len(frames), "a frame is used twice")
            self.placed[order.slot] = order

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
        self._prepare(plan)
        sources = [[list(self.pages[move.src_tier][page]) for page in move.src] for move in plan.moves]
        for move in plan.moves:
            self._spoil(move.dst_tier, move.dst)
        finished = self._compute(plan)
        for move, contents in zip(plan.moves, sources, strict=True):
            for src, dst, content in zip(move.src, move.dst, contents, strict=True):
                require(self.pages[move.src_tier][src] == content, "a row writes to a page that is being moved")
                complete = (
                    move.src_tier is Tier.DRAM or None not in content
                )  # the last block of a parked sequence is not
                require(complete, "a page is moved that was never written")
                self.pages[move.dst_tier][dst] = content
                self.moved_pages += 1
        return finished

    def _spoil(self, tier: Tier, pages: Iterable[int]) -> None:
        for page in pages:
            self.pages[tier][page] = [None] * self.block_tokens

    # -- rows

    def _row(
        self, row: int, slot: Slot, start: int, count: int, writer: dict[tuple[int, int], int]
    ) -> tuple[int, list[TokenLogprobs | None]]:
        require(count >= 1 and start + count <= len(slot.tokens), f"row {row} computes tokens that do not exist")
        values = self._context(slot, start, row, writer)
        entries: list[TokenLogprobs | None] = []
        seen = 0
        for value in values:
            seen = mix(seen, value)
        for position in range(start, start + count):
            entry, inside = divmod(position, self.block_tokens)
            order = self.placed.get(slot.opened.slot)
            value = cell(slot.tokens[position], position, seen)
            if order is not None and order.first <= entry < order.first + len(order.dram_blocks):
                self._write_by_layer(order, entry - order.first, inside, value)
            else:
                block = slot.table[entry]
                if writer.setdefault((block, inside), row) != row:
                    raise Violation("two rows write the same cell")
                for layer in range(self.layers):
                    self.pages[Tier.HBM][block * self.layers + layer][inside] = (value, layer)
            entries.append(None)
            if position + 1 < slot.opened.prompt_tokens:
                entries[-1] = TokenLogprobs(slot.tokens[position + 1], -float(position + 1))
            seen = mix(seen, value)
        self.computed_tokens += count
        return seen, entries

    def _write_by_layer(self, order: PlaceByLayer, place: int, inside: int, value: int) -> None:
        """To DRAM, and to the frames of kept layers."""
        for layer in range(self.layers):
            page = self.pages[Tier.DRAM][order.dram_blocks[place] * self.layers + layer]
            if not inside:
                page[:] = [None] * self.block_tokens  # what another sequence has left there
            page[inside] = (value, layer)
            if layer in order.kept:
                frame = order.kept[layer][place // self.layers]
                self.pages[Tier.HBM][frame * self.layers + place % self.layers] = list(page)

    def _context(self, slot: Slot, end: int, row: int, writer: dict[tuple[int, int], int]) -> list[int]:
        """What lies before position ``end``: the same in each layer, read one after the other."""
        order = self.placed.get(slot.opened.slot)
        if order is not None:
            for frames in order.staging:
                self._spoil(Tier.HBM, [f * self.layers + at for f in frames for at in range(self.layers)])
        by_layer = [self._layer(slot, order, layer, end, row, writer) for layer in range(self.layers)]
        if any(values != by_layer[0] for values in by_layer):
            raise Violation("the layers do not belong together")
        return by_layer[0]

    def _layer(
        self, slot: Slot, order: PlaceByLayer | None, layer: int, end: int, row: int, writer: dict[tuple[int, int], int]
    ) -> list[int]:
        values = []
        for position in range(end):
            entry, inside = divmod(position, self.block_tokens)
            place = entry - order.first if order is not None else -1
            if order is not None and 0 <= place < len(order.dram_blocks):
                page = self._placed_page(order, layer, place)
            else:
                if writer.get((slot.table[entry], inside), row) != row:
                    raise Violation("a row reads what another row of the plan writes")
                page = self.pages[Tier.HBM][slot.table[entry] * self.layers + layer]
            there = page[inside]
            if there is None or there[1] != layer:
                raise Violation(f"position {position}, layer {layer}: {there}")
            values.append(there[0])
        return values

    def _placed_page(self, order: PlaceByLayer, layer: int, place: int) -> list[Cell]:
        frames = order.kept.get(layer)
        if frames is None:  # passes through a buffer
            passing = [other for other in range(self.layers) if other not in order.kept]
            frames = order.staging[passing.index(layer) % 2]
            number = frames[place // self.layers] * self.layers + place % self.layers
            self.pages[Tier.HBM][number] = list(self.pages[Tier.DRAM][order.dram_blocks[place] * self.layers + layer])
        self.read_by_layer += 1
        return self.pages[Tier.HBM][frames[place // self.layers] * self.layers + place % self.layers]
