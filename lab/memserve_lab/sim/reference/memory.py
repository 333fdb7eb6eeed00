"""Literal KV on two tiers: the pages that plans copy and move, and where those of a slot lie by layer.

Literal recurrent states: a number made of all tokens so far, which a row changes and nothing takes back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

from memserve.base.types import CopyBlocks, Tier
from memserve.instance.events import LoadState, MovePages, PlaceByLayer, SaveState
from memserve.kv.contents import MoveTokens
from memserve_lab.sim.reference.oracle import mix, require

Cells = list[list[int | None]]
"""``[page][position in it]``; ``None`` = never written, or being moved."""
_CELL_BITS = 58
"""Of what ``truth.cell`` returns."""


def in_layer(value: int, layer: int) -> int:
    """What a position with the cell ``value`` has in ``layer``: layer 0 has the cell itself."""
    return value + (layer << _CELL_BITS)


class SymbolicPages:
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

    def spoil_pages(self, tier: Tier, pages: Iterable[int], seed: int) -> None:
        """Leave numbers that belong to no token."""
        for page in pages:
            self.tiers[tier][page] = [seed + index for index in range(self.block_tokens)]

    def spoil_block(self, tier: Tier, block: int, seed: int) -> None:
        """All pages of a block."""
        self.spoil_pages(tier, range(block * self.layers, (block + 1) * self.layers), seed)

    def copy_blocks(self, order: CopyBlocks) -> None:
        """Whole blocks, one after the other."""
        for src, dst in zip(order.src, order.dst, strict=True):
            target = [list(page) for page in self.of_block(order.src_tier, src)]
            self.tiers[order.dst_tier][dst * self.layers : (dst + 1) * self.layers] = target

    def move_tokens(self, order: MoveTokens) -> None:
        """The cells of tokens, as they are: a row that reads them has not read its own."""
        for number in range(order.count):
            source, from_place = divmod(order.src_first + number, self.block_tokens)
            target, to_place = divmod(order.dst_first + number, self.block_tokens)
            pages = self.of_block(order.src_tier, order.src[source]), self.of_block(Tier.HBM, order.dst[target])
            for page, moved in zip(*pages, strict=True):
                require(page[from_place] is not None, f"token {number} is moved, and was never written")
                moved[to_place] = page[from_place]

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
            if layer in order.resident_layers:
                frame = order.resident_layers[layer][place // self.layers]
                self.tiers[Tier.HBM][frame * self.layers + place % self.layers] = list(page)

    def by_layer(self, order: PlaceByLayer, place: int) -> Cells:
        """The pages of entry ``order.first + place``, layer by layer, where rows read them; those of layers that are
        not kept have passed through HBM."""
        pages, passing = [], 0
        for layer in range(self.layers):
            frames = order.resident_layers.get(layer)
            passes = frames is None
            if frames is None:
                frames = order.staging[passing % 2]
                passing += 1
            number = frames[place // self.layers] * self.layers + place % self.layers
            if passes:
                target = self.tiers[Tier.DRAM][order.dram_blocks[place] * self.layers + layer]
                self.tiers[Tier.HBM][number] = list(target)
            pages.append(list(self.tiers[Tier.HBM][number]))
        self.read_by_layer += self.layers
        return pages


_SNAPSHOT = (1 << 63) + 5
"""The first cell of a page with a snapshot; no other cell is as large."""


class SymbolicStates:
    """The recurrent state of each slot, and snapshots in pages: blocks of HBM, or parts of them."""

    def __init__(self, kv: SymbolicPages, per_block: int = 1, draft_states: int = 0) -> None:
        """``kv``: whose blocks of HBM are the pages, or have ``per_block`` each.
        ``draft_states``: tokens of rows with drafts in a plan, at most."""
        self._kv, self._per_block, self._draft_states = kv, per_block, draft_states
        self.of_slots: dict[int, tuple[int, int]] = {}
        """Behind how many tokens, and what it is."""
        self.pages: dict[int, tuple[int, int, int]] = {}
        """The same for each page, and which of its snapshot it is."""
        self.dram: dict[int, tuple[int, int, int]] = {}
        """The same for each block of DRAM."""
        self._homes = {Tier.HBM: self.pages, Tier.DRAM: self.dram}
        self.loaded = 0
        """Snapshots that sequences went on from."""

    @staticmethod
    def behind(tokens: Sequence[int]) -> int:
        """The state behind ``tokens``."""
        value = 5
        for token in tokens:
            value = mix(value, token)
        return value

    def apply_order(self, order: LoadState | SaveState) -> None:
        """Before the rows of a plan."""
        if isinstance(order, SaveState):
            state = self.of_slots[order.slot]
            require(state[0] == order.tokens, f"a state behind {state[0]} tokens is saved as one behind {order.tokens}")
            self.dram.update({block: (*state, place) for place, block in enumerate(order.dram_blocks)})
            return
        self._load(order)

    def _load(self, order: LoadState) -> None:
        state = (0, self.behind(()))
        if order.from_slot is not None:
            state = self.of_slots[order.from_slot]
        elif order.pages:
            parts = [self._homes[order.tier].get(page) for page in order.pages]
            first = parts[0]
            require(first is not None, f"page {order.pages[0]} holds no snapshot")
            if first is not None:
                whole = [(*first[:2], place) for place in range(len(parts))]
                require(parts == whole, f"pages {order.pages} do not hold one snapshot")
                state = first[:2]
            self.loaded += 1
        require(state[0] == order.tokens, f"a state behind {state[0]} tokens is loaded as one behind {order.tokens}")
        self.of_slots[order.slot] = state

    def pass_row(self, number: int, tokens: Sequence[int], start: int, end: int, *, keeps: bool) -> None:
        """A row computes ``tokens[start:end]``; ``keeps``: it counts, and else it may begin anywhere."""
        require(number in self.of_slots, f"slot {number} has no state")
        if keeps:
            require(self.of_slots[number] == (start, self.behind(tokens[:start])), f"slot {number} has another state")
            self.of_slots[number] = end, self.behind(tokens[:end])

    def check_drafts(self, drafts: Collection[Sequence[int]]) -> None:
        """A plan has rows with these ``drafts``: there must be a state for each of their tokens."""
        needed = len(drafts) + sum(map(len, drafts))
        require(needed <= self._draft_states, f"{needed} states of drafts, and room for {self._draft_states}")

    def settle_drafts(self, number: int, tokens: Sequence[int], end: int) -> None:
        """Of a row with drafts that slot ``number`` had, ``tokens[:end]`` are right: the state is that behind them."""
        self.of_slots[number] = end, self.behind(tokens[:end])

    def save(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """A snapshot behind ``tokens``; what else lay in these pages is gone."""
        for place, page in enumerate(pages):
            block = page // self._per_block
            self._kv.tiers[Tier.HBM][block * self._kv.layers : (block + 1) * self._kv.layers] = [
                [None] * self._kv.block_tokens for _ in range(self._kv.layers)
            ]
            self.pages[page] = len(tokens), self.behind(tokens), place

    def page_cells(self, tier: Tier, block: int, size: int) -> list[int | None] | None:
        """What peers see of a snapshot in the first page of its block, ``size`` cells. None: there is none."""
        saved = self._homes[tier].get(block)
        return None if saved is None else self.cells_of(saved, size)

    @staticmethod
    def cells_of(saved: tuple[int, int, int], size: int) -> list[int | None]:
        """Of a snapshot: behind how many tokens, what it is, and which of its blocks; ``size`` cells."""
        return [_SNAPSHOT, *saved, *[None] * (size - 4)]

    def take_cells(self, tier: Tier, block: int, cells: Sequence[int | None]) -> None:
        """These came from a peer: a snapshot, or something else."""
        mark, *saved = cells[:4]
        if mark == _SNAPSHOT:
            self._homes[tier][block] = cast("tuple[int, int, int]", tuple(saved))
        else:
            self._homes[tier].pop(block, None)

    def copy_blocks(self, order: CopyBlocks) -> None:
        """Whole blocks, one after the other: a snapshot goes along with its block, or what was there is gone."""
        if Tier.DRAM not in (order.src_tier, order.dst_tier):
            self.overwrite(order.dst if order.dst_tier is Tier.HBM else ())
            return
        for src, dst in zip(order.src, order.dst, strict=True):
            saved = self._homes[order.src_tier].get(src)
            self._homes[order.dst_tier].pop(dst, None)
            if saved is not None:
                self._homes[order.dst_tier][dst] = saved

    def overwrite(self, blocks: Iterable[int]) -> None:
        """KV is written to blocks."""
        for block in blocks:
            for page in range(block * self._per_block, (block + 1) * self._per_block):
                self.pages.pop(page, None)
