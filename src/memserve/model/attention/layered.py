"""A step's attention where some of the KV lies by layer: each layer has its own table, of pages instead of blocks.

    layer          0        1        2        3        4       ...
    row a keeps    x                 x                 x          its pages stay in frames
    row b keeps             x                 x                   staggered: the link has the same work before each
    a's staging             A                 B                   the others come from DRAM, by turns in two buffers:
    b's staging    A                 B                 A          B fills while A is read, and A again behind its layer

The kernels know nothing of it: a page is a block of a model with one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memserve.instance.events import PlaceByLayer
from memserve.model.attention.backends import AttentionFactory
from memserve.model.copier import Copy, PageCopier, Pages

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiers:
    """Addresses of both arenas, and their pages."""

    hbm: int
    dram: int
    page_bytes: int
    num_layers: int


class PlacedRange:
    """Entries of one slot's table that lie by layer."""

    __slots__ = ("_buffers", "_dram", "_kept", "_tiers", "count", "first", "passing")

    def __init__(self, order: PlaceByLayer, tiers: Tiers) -> None:
        self._tiers = tiers
        self.first = order.first
        self.count = len(order.dram_blocks)
        self._dram = np.array(order.dram_blocks, np.int32) * tiers.num_layers
        self._kept = {layer: self._pages(frames) for layer, frames in order.kept.items()}
        self._buffers = tuple(self._pages(frames) for frames in order.staging)
        #: layers that are not kept, in model order
        self.passing = [layer for layer in range(tiers.num_layers) if layer not in self._kept]

    def _pages(self, frames: Sequence[int]) -> Pages:
        each = np.arange(self.count, dtype=np.int32)
        return np.array(frames, np.int32)[each // self._tiers.num_layers] * self._tiers.num_layers + (
            each % self._tiers.num_layers
        )

    def pages(self, layer: int) -> Pages:
        """Where the pages of ``layer`` are when they are read."""
        kept = self._kept.get(layer)
        return self._buffers[self.passing.index(layer) % 2] if kept is None else kept

    def copy_of(self, turn: int) -> Copy:
        """Of the layer that passes ``turn``-th."""
        layer, tiers = self.passing[turn], self._tiers
        return Copy(tiers.dram, tiers.hbm, self._dram + layer, self._buffers[turn % 2], tiers.page_bytes)


class LayeredAttention:
    """A step's attention; see the module."""

    def __init__(
        self,
        make: AttentionFactory,
        copier: PageCopier,
        num_layers: int,
        placed: dict[int, PlacedRange],
        tables: Int32s,
        q_starts: Int32s,
        contexts: Int32s,
    ) -> None:
        """``make``: of pages as blocks of one layer. ``tables [rows, entries]``: blocks. ``placed``: by row."""
        self._make = make
        self._copier = copier
        self._placed = placed
        self._tables = tables * num_layers
        self._rows = np.arange(len(tables), dtype=np.int32)
        self._q_starts, self._contexts = q_starts, contexts
        self._coming: dict[tuple[int, int], Copy] = {}  # (row, layer)
        firsts = [(row, turn) for turn in range(2) for row, a_range in placed.items() if turn < len(a_range.passing)]
        for row, turn in sorted(firsts, key=lambda first: placed[first[0]].passing[first[1]]):
            self._fetch(row, turn)

    def _fetch(self, row: int, turn: int) -> None:
        copy = self._placed[row].copy_of(turn)
        self._coming[row, self._placed[row].passing[turn]] = copy
        self._copier.begin(copy, urgent=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.attend`."""
        table = self._tables + np.int32(layer)
        passed: list[tuple[int, int]] = []
        for row, a_range in self._placed.items():
            table[row, a_range.first : a_range.first + a_range.count] = a_range.pages(layer)
            copy = self._coming.pop((row, layer), None)
            if copy is not None:
                self._copier.wait(copy)
                passed.append((row, a_range.passing.index(layer)))
        mixed = self._make(table, self._rows, self._q_starts, self._contexts).attend(0, q, k, v, **options)
        for row, turn in passed:  # its buffer is free again
            if turn + 2 < len(self._placed[row].passing):
                self._fetch(row, turn + 2)
        return mixed
