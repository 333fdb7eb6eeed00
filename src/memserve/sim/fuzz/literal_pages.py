"""Literal KV on two tiers: the pages that plans copy and move, and where those of a slot lie by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memserve.instance.events import MovePages, PlaceByLayer
from memserve.sim.fuzz.truth import require
from memserve.types import CopyBlocks, Tier

Cells = list[list[int | None]]
"""``[page][position in it]``; ``None`` = never written, or being moved."""
_CELL_BITS = 58
"""Of what ``truth.cell`` returns."""


def in_layer(value: int, layer: int) -> int:
    """What a position with the cell ``value`` has in ``layer``: layer 0 has the cell itself."""
    return value + (layer << _CELL_BITS)


class LiteralPages:
    """Each block has a page for each layer, with the number ``block * layers + layer``."""

    def __init__(self, block_tokens: int, hbm_blocks: int, dram_blocks: int, layers: int) -> None:
        self.block_tokens, self.layers = block_tokens, layers
        self.tiers: dict[Tier, Cells] = {
            tier: [[None] * block_tokens for _ in range(count * layers)]
            for tier, count in ((Tier.HBM, hbm_blocks), (Tier.DRAM, dram_blocks))
        }
        self.moved_pages = 0
        self.read_by_layer = 0
        """Pages that rows have read where they lie by layer."""
        self._moving: list[tuple[MovePages, Cells]] = []  # with what the sources hold

    def of_block(self, tier: Tier, block: int) -> Cells:
        """The pages of a block, layer by layer."""
        return self.tiers[tier][block * self.layers : (block + 1) * self.layers]

    def spoil(self, tier: Tier, pages: Iterable[int], seed: int) -> None:
        """Leave numbers that belong to no token."""
        for page in pages:
            self.tiers[tier][page] = [seed + at for at in range(self.block_tokens)]

    def spoil_block(self, tier: Tier, block: int, seed: int) -> None:
        """All pages of a block."""
        self.spoil(tier, range(block * self.layers, (block + 1) * self.layers), seed)

    def copy(self, order: CopyBlocks) -> None:
        """Whole blocks, one after the other."""
        for src, dst in zip(order.src, order.dst, strict=True):
            there = [list(page) for page in self.of_block(order.src_tier, src)]
            self.tiers[order.dst_tier][dst * self.layers : (dst + 1) * self.layers] = there

    # -- beside the rows

    def begin_moves(self, orders: Sequence[MovePages]) -> None:
        """From now until :meth:`end_moves` the targets hold nothing."""
        self._moving = [(order, [list(self.tiers[order.src_tier][page]) for page in order.src]) for order in orders]
        for order in orders:
            for page in order.dst:
                self.tiers[order.dst_tier][page] = [None] * self.block_tokens

    def end_moves(self) -> None:
        """Everything has arrived, and nothing has changed meanwhile where it came from."""
        moving, self._moving = self._moving, []
        for order, contents in moving:
            for src, dst, content in zip(order.src, order.dst, contents, strict=True):
                require(self.tiers[order.src_tier][src] == content, f"page {src} was written to while it was moved")
                may_end = order.src_tier is Tier.DRAM  # the last block of a sequence that comes up need not be full
                require(may_end or None not in content, f"page {src} was moved, and never written")
                require(self.tiers[order.dst_tier][dst].count(None) == len(content), f"page {dst} was not free")
                self.tiers[order.dst_tier][dst] = content
                self.moved_pages += 1

    # -- by layer

    def empty_staging(self, order: PlaceByLayer) -> None:
        """What passed through for an earlier row is gone."""
        for frame in (*order.staging[0], *order.staging[1]):
            for page in range(frame * self.layers, (frame + 1) * self.layers):
                self.tiers[Tier.HBM][page] = [None] * self.block_tokens

    def write_by_layer(self, order: PlaceByLayer, place: int, inside: int, value: int) -> None:
        """A row has computed a position of entry ``order.first + place``: to DRAM, and to the frames of kept layers."""
        for layer in range(self.layers):
            page = self.tiers[Tier.DRAM][order.dram_blocks[place] * self.layers + layer]
            if not inside:
                page[:] = [None] * self.block_tokens  # what another sequence has left there
            page[inside] = in_layer(value, layer)
            if layer in order.kept:
                frame = order.kept[layer][place // self.layers]
                self.tiers[Tier.HBM][frame * self.layers + place % self.layers] = list(page)

    def by_layer(self, order: PlaceByLayer, place: int) -> Cells:
        """The pages of entry ``order.first + place``, layer by layer, where rows read them; those of layers that are
        not kept have passed through HBM."""
        pages, passing = [], 0
        for layer in range(self.layers):
            frames = order.kept.get(layer)
            passes = frames is None
            if frames is None:
                frames = order.staging[passing % 2]
                passing += 1
            number = frames[place // self.layers] * self.layers + place % self.layers
            if passes:
                there = self.tiers[Tier.DRAM][order.dram_blocks[place] * self.layers + layer]
                self.tiers[Tier.HBM][number] = list(there)
            pages.append(list(self.tiers[Tier.HBM][number]))
        self.read_by_layer += self.layers
        return pages
