"""Shards of any degrees, and what of one another they can take: oracles for links and ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memserve.base.errors import check
from memserve.base.types import KVGeometry
from memserve.transport.ranges import Offsets, Ranges, Shard, layer_offsets


def shards(model: KVGeometry, tensor_parallel: int, pipeline_parallel: int) -> list[Shard]:
    """The shard of each rank, stage by stage. Layers are dealt out as evenly as they can be.

    With more ranks than heads, neighbours hold the same head.
    """
    layers, heads = model.num_layers, model.num_kv_heads
    check(tensor_parallel > 0, "at least one rank a stage")
    whole = heads % tensor_parallel == 0 or tensor_parallel % heads == 0
    check(whole, f"{heads} heads on {tensor_parallel} ranks")
    check(0 < pipeline_parallel <= layers, f"{layers} layers in {pipeline_parallel} stages")
    return [
        Shard(
            model,
            stage * layers // pipeline_parallel,
            (stage + 1) * layers // pipeline_parallel,
            rank * heads // tensor_parallel,
            max((rank + 1) * heads // tensor_parallel, rank * heads // tensor_parallel + 1),
        )
        for stage in range(pipeline_parallel)
        for rank in range(tensor_parallel)
    ]


def shard_ranges(src: Shard, dst: Shard, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Ranges:
    """What ``dst`` can take from ``src``: one range a block where whole pages of both agree, else one a page.

    Nothing in common: no ranges.
    """
    check(src.model == dst.model, "shards of one model")
    first_layer, end_layer = max(src.first_layer, dst.first_layer), min(src.end_layer, dst.end_layer)
    first_head, end_head = max(src.first_head, dst.first_head), min(src.end_head, dst.end_head)
    if first_layer >= end_layer or first_head >= end_head:
        return Ranges(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
    run_bytes = src.model.page_bytes // src.model.num_kv_heads
    layers, range_bytes = end_layer - first_layer, (end_head - first_head) * run_bytes

    def offsets(shard: Shard, blocks: Sequence[int]) -> Offsets:
        pages = np.arange(layers, dtype=np.int64) * shard.local_geometry.page_bytes
        base = layer_offsets(shard.local_geometry, blocks, first_layer - shard.first_layer)
        return (base[:, None] + pages + (first_head - shard.first_head) * run_bytes).ravel()

    ranges = Ranges(offsets(src, src_blocks), offsets(dst, dst_blocks), range_bytes)
    if range_bytes == src.local_geometry.page_bytes == dst.local_geometry.page_bytes:
        return Ranges(ranges.src_offsets[::layers], ranges.dst_offsets[::layers], range_bytes * layers)
    return ranges


def pull_plan(
    sources: Sequence[Shard], dst: Shard, src_blocks: Sequence[int], dst_blocks: Sequence[int]
) -> list[tuple[int, Ranges]]:
    """``(index into sources, ranges)`` that together fill ``dst``'s blocks, every byte exactly once.

    Of sources that hold the same heads and layers the first is taken.
    """
    plan, taken = [], set()
    for index, src in enumerate(sources):
        part = (
            max(src.first_layer, dst.first_layer),
            min(src.end_layer, dst.end_layer),
            max(src.first_head, dst.first_head),
            min(src.end_head, dst.end_head),
        )
        if part[0] < part[1] and part[2] < part[3] and part not in taken:
            taken.add(part)
            plan.append((index, shard_ranges(src, dst, src_blocks, dst_blocks)))
    return plan
