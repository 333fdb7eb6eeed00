"""Pages and shards of KV as byte ranges.

An arena is blocks in a row, a block its layers' pages in a row, a page its heads' runs in a row; so any part that a
rank holds, or lacks, is a list of equal ranges. Ranks of different tensor or pipeline parallelism exchange what they
have in common: layers and heads, each a half-open interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from memserve.base.errors import check
from memserve.base.kv_layout import Share
from memserve.base.types import KVGeometry

Offsets = NDArray[np.int64]
"""Bytes from the start of an arena, ``[n]`` int64."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """``range_bytes`` from each of ``src_offsets`` to the same place of ``dst_offsets``."""

    src_offsets: Offsets
    dst_offsets: Offsets
    range_bytes: int

    def __len__(self) -> int:
        return len(self.src_offsets)

    @property
    def total_bytes(self) -> int:
        return len(self) * self.range_bytes

    def slice_ranges(self, begin: int, end: int) -> Ranges:
        """Ranges ``[begin, end)``."""
        return Ranges(self.src_offsets[begin:end], self.dst_offsets[begin:end], self.range_bytes)


def fits(offsets: Offsets, range_bytes: int, arena_bytes: int) -> bool:
    """Whether every range lies inside an arena."""
    return not len(offsets) or (int(offsets.min()) >= 0 and int(offsets.max()) + range_bytes <= arena_bytes)


def layer_offsets(geometry: KVGeometry, blocks: Sequence[int], first_layer: int) -> Offsets:
    """Where layer ``first_layer`` of each block begins; the layers behind it follow without a gap."""
    return np.array(blocks, np.int64) * geometry.block_bytes + first_layer * geometry.page_bytes


def block_ranges(
    geometry: KVGeometry,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    first_layer: int,
    end_layer: int,
    *,
    by_page: bool = False,
) -> Ranges:
    """Layers ``[first_layer, end_layer)`` of blocks between arenas of one geometry: a range a block, or a page."""
    check(0 <= first_layer < end_layer <= geometry.num_layers, f"layers [{first_layer}, {end_layer}) to be moved")
    check(len(src_blocks) == len(dst_blocks), "as many sources as destinations")
    src = layer_offsets(geometry, src_blocks, first_layer)
    dst = layer_offsets(geometry, dst_blocks, first_layer)
    if not by_page:
        return Ranges(src, dst, (end_layer - first_layer) * geometry.page_bytes)
    steps = np.arange(end_layer - first_layer, dtype=np.int64) * geometry.page_bytes
    return Ranges((src[:, None] + steps).ravel(), (dst[:, None] + steps).ravel(), geometry.page_bytes)


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers and KV heads of a model that one rank holds."""

    model: KVGeometry
    """Of the whole model."""
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    @property
    def local_geometry(self) -> KVGeometry:
        """Geometry of the rank's own arena."""
        layers, heads = self.end_layer - self.first_layer, self.end_head - self.first_head
        return replace(self.model, num_layers=layers, num_kv_heads=heads)

    @property
    def run_bytes(self) -> int:
        """Of one head of a page: what an arena of the model and one of the rank have in common."""
        return self.model.page_bytes // self.model.num_kv_heads

    def local_offsets(self, pages: Offsets, first_head: int) -> Offsets:
        """Where ``first_head`` of each of the model's ``pages`` (``block * layers + layer``, of layers that the rank
        has) begins in its own arena."""
        geometry = self.local_geometry
        blocks, layers = np.divmod(pages, self.model.num_layers)
        numbers = blocks * geometry.num_layers + layers - self.first_layer
        return (numbers * geometry.num_kv_heads + first_head - self.first_head) * self.run_bytes

    def has_layers(self, pages: Offsets) -> NDArray[np.bool_]:
        """Which of the model's ``pages`` are of the rank's layers."""
        layers = pages % self.model.num_layers
        mask: NDArray[np.bool_] = (layers >= self.first_layer) & (layers < self.end_layer)
        return mask

    def run_numbers(self, pages: NDArray[np.int32], *, of_model: bool) -> NDArray[np.int32]:
        """The runs of the rank's ``pages`` (``block * own layers + own layer``), a page's heads in a row: as they are
        numbered in the rank's own arena, or in one ``of_model``."""
        geometry, model = self.local_geometry, self.model
        heads = np.arange(geometry.num_kv_heads, dtype=np.int32)
        if not of_model:
            return (pages[:, None] * np.int32(geometry.num_kv_heads) + heads).ravel()
        blocks, layers = np.divmod(pages, np.int32(geometry.num_layers))
        pages = blocks * np.int32(model.num_layers) + layers + np.int32(self.first_layer)
        return (pages[:, None] * np.int32(model.num_kv_heads) + heads + np.int32(self.first_head)).ravel()


def shard_of(share: Share, model: KVGeometry) -> Shard:
    """What a worker has of each page, where it keeps that in a memory of its own."""
    layers, end_head = share.own_layers, share.first_head + share.heads[share.part]
    return Shard(model, layers.start, layers.stop, share.first_head, end_head)


Shards = tuple[Shard, ...]
"""Of an arena, those of all ranks in their order. Empty: the arena is one memory with whole blocks."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one memory has of ranges that another one takes."""

    source: int
    """Which of the memories behind the source; 0 where it is one."""
    target: int
    ranges: Ranges
    """Places in those two memories, ``[n]``."""
    begins: Offsets
    """Bytes from the begin of the range that a piece is of, ``[n]`` int64."""
    owners: NDArray[np.int64]
    """Which range that is, ``[n]``."""


def cut_pieces(ranges: Ranges, sources: Shards = (), targets: Shards = ()) -> list[Pieces]:
    """Ranges between two arenas, each of which may be in shards, as ranges between their memories. Together they have
    every byte once, as long as shards hold every head and layer once.

    Raises :class:`ValueError` for ranges that are no whole pages, where one of the arenas is in shards.
    """
    if not sources and not targets:
        numbers = np.arange(len(ranges), dtype=np.int64)
        return [Pieces(0, 0, ranges, np.zeros_like(numbers), numbers)]
    model = (sources or targets)[0].model
    check(all(shard.model == model for shard in (*sources, *targets)), "shards of one model")
    page_bytes, whole = model.page_bytes, (Shard(model, 0, model.num_layers, 0, model.num_kv_heads),)
    if not is_whole(ranges.src_offsets, ranges.range_bytes, page_bytes) or (ranges.dst_offsets % page_bytes).any():
        raise ValueError("KV of several GPUs is read by whole pages")
    steps = np.arange(ranges.range_bytes // page_bytes, dtype=np.int64)
    src_pages = (ranges.src_offsets[:, None] // page_bytes + steps).ravel()
    dst_pages = (ranges.dst_offsets[:, None] // page_bytes + steps).ravel()
    owners, begins = np.repeat(np.arange(len(ranges)), len(steps)), np.tile(steps * page_bytes, len(ranges))
    piece_list = []
    for source, src in enumerate(sources or whole):
        for target, dst in enumerate(targets or whole):
            first_head, end_head = max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)
            mask = src.has_layers(src_pages) & dst.has_layers(dst_pages)
            if first_head >= end_head or not mask.any():
                continue
            offsets = src.local_offsets(src_pages[mask], first_head), dst.local_offsets(dst_pages[mask], first_head)
            part = Ranges(*offsets, (end_head - first_head) * src.run_bytes)
            piece_list.append(Pieces(source, target, part, begins[mask] + first_head * src.run_bytes, owners[mask]))
    return piece_list


def is_whole(offsets: Offsets, range_bytes: int, page_bytes: int) -> bool:
    """Whether ranges are whole pages."""
    return range_bytes > 0 and range_bytes % page_bytes == 0 and not (offsets % page_bytes).any()
