"""A step's attention where some of the KV lies by layer: each layer has its own table, of pages instead of blocks.

    layer          0        1        2        3        4       ...
    row a keeps    x                 x                 x          its pages stay in frames
    row b keeps             x                 x                   staggered: the link has the same work before each
    a's staging             A                 B                   the others come from DRAM, by turns in two buffers:
    b's staging    A                 B                 A          B fills while A is read, and A again behind its layer

What a row computes of such entries is written to the same pages, and leaves for DRAM behind its layer. The kernels know
nothing of it: a page is a block of a model with one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memserve import _core
from memserve.base.types import KVGeometry, Tier
from memserve.instance.events import MovePages, PlaceByLayer
from memserve.model.attention.backends import AttentionFactory
from memserve.model.attention.context import StepRows
from memserve.model.copier import Copy, PageCopier, Pages
from memserve.model.tier_file import TierFile

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Addresses of both arenas, and their pages."""

    hbm: int
    dram: int
    page_bytes: int
    num_layers: int
    lower: _core.LowerPages | None = None
    """Converts pages between them. None: they lie alike in both."""
    file: TierFile | None = None
    """Of the last pages of DRAM's tier. None: all of it is memory."""


def copies_of(order: MovePages, tiers: Tiers, check_blocks: Callable[[Tier, Pages], None]) -> list[Copy]:
    """The copies of an order, a few pages each. ``check_blocks`` raises where a block does not exist."""
    src, dst, unit = np.array(order.src, np.int32), np.array(order.dst, np.int32), tiers.num_layers
    check_blocks(order.src_tier, src // unit)
    check_blocks(order.dst_tier, dst // unit)
    address = {Tier.HBM: tiers.hbm, Tier.DRAM: tiers.dram}
    ends = address[order.src_tier], address[order.dst_tier]
    direction = order.dst_tier if order.dst_tier is not order.src_tier else None
    pieces = [slice(first, first + unit) for first in range(0, len(src), unit)]
    return [
        Copy(*ends, src[part], dst[part], tiers.page_bytes, direction, lower=tiers.lower, file=tiers.file)
        for part in pieces
    ]


class PlacedRange:
    """Entries of one slot's table that lie by layer."""

    __slots__ = ("_buffers", "_dram", "_resident", "_tiers", "count", "first", "passing")

    def __init__(self, order: PlaceByLayer, tiers: Tiers) -> None:
        self._tiers = tiers
        self.first = order.first
        self.count = len(order.dram_blocks)
        self._dram = np.array(order.dram_blocks, np.int32) * tiers.num_layers
        self._resident = {layer: self._page_ids(frames) for layer, frames in order.resident_layers.items()}
        self._buffers = tuple(self._page_ids(frames) for frames in order.staging)
        #: layers that are not kept, in model order
        self.passing = [layer for layer in range(tiers.num_layers) if layer not in self._resident]

    def _page_ids(self, frames: Sequence[int]) -> Pages:
        entries = np.arange(self.count, dtype=np.int32)
        return np.array(frames, np.int32)[entries // self._tiers.num_layers] * self._tiers.num_layers + (
            entries % self._tiers.num_layers
        )

    def pages_of(self, layer: int) -> Pages:
        """Where the pages of ``layer`` are when they are read, or written."""
        resident = self._resident.get(layer)
        return self._buffers[self.passing.index(layer) % 2] if resident is None else resident

    def fetch_copy(self, turn: int, entries: int) -> Copy:
        """Of the layer that passes ``turn``-th, its first ``entries``."""
        layer, tiers = self.passing[turn], self._tiers
        target = self._buffers[turn % 2][:entries]
        source = self._dram[:entries] + layer
        return Copy(
            tiers.dram, tiers.hbm, source, target, tiers.page_bytes, Tier.HBM, lower=tiers.lower, file=tiers.file
        )

    def write_back(self, layer: int, first: int, end: int) -> Copy:
        """Of what a row has computed of ``layer``: entries ``[first, end)``."""
        tiers = self._tiers
        target = self._dram[first:end] + layer
        source = self.pages_of(layer)[first:end]
        return Copy(
            tiers.hbm, tiers.dram, source, target, tiers.page_bytes, Tier.DRAM, lower=tiers.lower, file=tiers.file
        )


class _Row:
    """A row of a step whose sequence lies by layer: the entries that it reads back, and those that it computes."""

    __slots__ = ("entries", "placed_range", "read", "written_end", "written_first")

    def __init__(self, placed_range: PlacedRange, start: int, end: int, block_tokens: int) -> None:
        def inside(entry: int) -> int:
            return min(max(0, entry - placed_range.first), placed_range.count)

        self.placed_range = placed_range
        self.entries = slice(placed_range.first, placed_range.first + placed_range.count)
        self.read = inside(-(-start // block_tokens))
        self.written_first, self.written_end = inside(start // block_tokens), inside(-(-end // block_tokens))


class LayeredAttention:
    """A step's attention; see the module."""

    def __init__(
        self,
        make: AttentionFactory,
        copier: PageCopier | None,
        geometry: KVGeometry,
        ranges: dict[int, PlacedRange],
        batch: StepRows,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        """``make``: of pages as blocks of one layer. ``batch``: the table of each row, in order. ``ranges``: by row.

        ``copier`` None: another worker of the instance makes the copies. ``meet`` returns when all have come."""
        self._make, self._barrier = make, meet
        self._copier = copier
        self._batch, self._tables = batch, np.asarray(batch.tables) * geometry.num_layers
        starts = batch.contexts - (batch.q_starts[1:] - batch.q_starts[:-1])
        self._rows = {
            row: _Row(a_range, int(starts[row]), int(batch.contexts[row]), geometry.block_tokens)
            for row, a_range in ranges.items()
        }
        self._coming: dict[tuple[int, int], Copy] = {}  # (row, turn)
        self._leaving: dict[tuple[int, int], Copy] = {}  # (row, layer)
        firsts = [(row, turn) for turn in range(2) for row, a_range in ranges.items() if turn < len(a_range.passing)]
        for row, turn in sorted(firsts, key=lambda first: ranges[first[0]].passing[first[1]]):
            self._start_fetch(row, turn)

    def _start_fetch(self, row: int, turn: int) -> None:
        entries = self._rows[row].read
        if entries and self._copier is not None:
            copy = self._coming[row, turn] = self._rows[row].placed_range.fetch_copy(turn, entries)
            self._copier.start_copy(copy, urgent=True)

    def run_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        table = self._tables + np.int32(layer)
        turns: dict[int, int] = {}
        for number, row in self._rows.items():
            placed_range = row.placed_range
            table[number, row.entries] = placed_range.pages_of(layer)
            if layer in placed_range.passing:
                turn = turns[number] = placed_range.passing.index(layer)
                self._await_buffer(number, placed_range, turn)
        self._barrier()  # what was to be read is there, for all workers
        mixed = self._make(replace(self._batch, tables=table)).run_attention(0, q, k, v, **options)
        self._barrier()  # all have read it, and written theirs
        if self._copier is None:
            return mixed
        for number, row in self._rows.items():
            if row.written_end > row.written_first:
                copy = self._leaving[number, layer] = row.placed_range.write_back(
                    layer, row.written_first, row.written_end
                )
                self._copier.start_copy(copy, urgent=True)
            turn = turns.get(number, len(row.placed_range.passing))
            if turn + 2 < len(row.placed_range.passing):  # its buffer is free again, behind what leaves it
                self._start_fetch(number, turn + 2)
        return mixed

    def _await_buffer(self, number: int, placed_range: PlacedRange, turn: int) -> None:
        """The buffer of a layer has what is to be read, and no longer what another layer has left there."""
        leaving_copy = self._leaving.pop((number, placed_range.passing[turn - 2]), None) if turn >= 2 else None
        for copy in (leaving_copy, self._coming.pop((number, turn), None)):
            if copy is not None and self._copier is not None:
                self._copier.wait_for(copy)

    def wait_for_copies(self) -> None:
        """All layers are computed: wait for what leaves."""
        if self._copier is not None:
            for copy in self._leaving.values():
                self._copier.wait_for(copy)
