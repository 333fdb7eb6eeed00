"""Byte ranges of pages and shards, against the same thing said with indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.errors import InvariantError
from memserve.base.kv_layout import Parallel, shares
from memserve.base.types import KVGeometry
from memserve.transport.ranges import Ranges, block_ranges, fits, shard_of
from shard_plans import pull_plan, shard_ranges, shards

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def model(layers: int = 6, heads: int = 4) -> KVGeometry:
    return KVGeometry(layers, heads, 2, 4, "bfloat16", 2)


def apply(ranges: Ranges, source: Bytes, target: Bytes) -> None:
    """Copy, and see that no byte is written twice."""
    written = np.zeros(target.nbytes, np.int32)
    for src, dst in zip(ranges.src_offsets.tolist(), ranges.dst_offsets.tolist(), strict=True):
        target.ravel()[dst : dst + ranges.range_bytes] = source.ravel()[src : src + ranges.range_bytes]
        written[dst : dst + ranges.range_bytes] += 1
    assert written.max(initial=0) <= 1


def arena(blocks: int, geometry: KVGeometry, seed: int | None = None) -> Bytes:
    """``[blocks, layers, heads, run]``."""
    shape = (blocks, geometry.num_layers, geometry.num_kv_heads, geometry.page_bytes // geometry.num_kv_heads)
    if seed is None:
        return np.zeros(shape, np.uint8)
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layers_of_blocks(data: st.DataObject) -> None:
    geometry = model()
    count = data.draw(st.integers(0, 5))
    src = data.draw(st.permutations(range(8)))[:count]
    dst = data.draw(st.permutations(range(8)))[:count]
    first = data.draw(st.integers(0, 5))
    end = data.draw(st.integers(first + 1, 6))
    by_page = data.draw(st.booleans())
    source, target, expected = arena(8, geometry, 1), arena(8, geometry), arena(8, geometry)
    ranges = block_ranges(geometry, src, dst, first, end, by_page=by_page)
    apply(ranges, source, target)
    expected[dst, first:end] = source[src, first:end]
    np.testing.assert_array_equal(target, expected)
    assert len(ranges) == count * (end - first if by_page else 1)
    assert ranges.total_bytes == count * (end - first) * geometry.page_bytes


@settings(max_examples=150, deadline=None)
@given(
    layers=st.integers(1, 7),
    heads=st.sampled_from([1, 2, 4, 8]),
    degrees=st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2, *[st.integers(1, 4)] * 2),
)
def test_ranks_fill_their_shards_from_those_of_other_degrees(
    layers: int, heads: int, degrees: tuple[int, int, int, int]
) -> None:
    src_tp, dst_tp, src_pp, dst_pp = degrees
    geometry = model(layers, heads)
    sources = shards(geometry, src_tp, min(src_pp, layers))
    src_blocks, dst_blocks = [3, 0], [1, 2]
    whole = arena(4, geometry, 7)
    held = [whole[:, s.first_layer : s.end_layer, s.first_head : s.end_head].copy() for s in sources]
    for shard in shards(geometry, dst_tp, min(dst_pp, layers)):
        target = arena(3, shard.local_geometry)
        total = 0
        for index, ranges in pull_plan(sources, shard, src_blocks, dst_blocks):
            assert fits(ranges.src_offsets, ranges.range_bytes, held[index].nbytes)
            assert fits(ranges.dst_offsets, ranges.range_bytes, target.nbytes)
            apply(ranges, held[index], target)
            total += ranges.total_bytes
        part = whole[:, shard.first_layer : shard.end_layer, shard.first_head : shard.end_head]
        np.testing.assert_array_equal(target[dst_blocks], part[src_blocks])
        assert total == len(dst_blocks) * shard.local_geometry.block_bytes and not target[0].any()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_shards_hold_every_layer_and_head(tensor_parallel: int, pipeline_parallel: int) -> None:
    held = np.zeros((6, 4), np.int32)
    ranks = shards(model(), tensor_parallel, pipeline_parallel)
    for shard in ranks:
        held[shard.first_layer : shard.end_layer, shard.first_head : shard.end_head] += 1
        assert shard.local_geometry.block_bytes > 0
    assert len(ranks) == tensor_parallel * pipeline_parallel
    assert (held == max(1, tensor_parallel // 4)).all()


@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(3), Parallel(2, 3)], ids=lambda found: found.text)
def test_runs_of_workers_are_those_of_the_whole(parallel: Parallel) -> None:
    """Every run of a block is one worker's, and lies where the whole page has that head."""
    geometry = KVGeometry(num_layers=5, num_kv_heads=3, head_dim_k=8, head_dim_v=16, block_tokens=32, dtype="float32")
    runs = geometry.page_bytes // geometry.num_kv_heads
    whole = np.arange(7 * 5 * 3)  # seven blocks
    taken = []
    for share in shares(parallel, geometry):
        shard = shard_of(share, geometry)
        own = shard.local_geometry
        assert shard.run_bytes == runs == own.page_bytes // own.num_kv_heads
        pages = np.array([4, 2], np.int32)[:, None] * own.num_layers + np.arange(own.num_layers, dtype=np.int32)
        here = shard.run_numbers(pages.ravel(), of_model=False).reshape(2, own.num_layers, own.num_kv_heads)
        there = whole[shard.run_numbers(pages.ravel(), of_model=True)].reshape(here.shape)
        assert (here.ravel() == np.arange(here[0].size * 7).reshape(7, -1)[[4, 2]].ravel()).all()
        heads, layers = np.arange(own.num_kv_heads), np.arange(own.num_layers)[:, None]
        for block, got in zip((4, 2), there, strict=True):
            assert (got == (block * 5 + shard.first_layer + layers) * 3 + shard.first_head + heads).all()
        taken += there.ravel().tolist()
    assert sorted(taken) == [*range(30, 45), *range(60, 75)]


def test_whole_pages_are_one_range_a_block() -> None:
    """Pipeline stages of one tensor-parallel degree keep layers together; other heads take a range a page."""
    geometry = model()
    (whole,), stages, halves = shards(geometry, 1, 1), shards(geometry, 1, 2), shards(geometry, 2, 1)
    assert len(shard_ranges(whole, stages[1], [0, 1], [1, 0])) == 2
    assert len(shard_ranges(whole, halves[1], [0, 1], [1, 0])) == 2 * geometry.num_layers
    assert len(shard_ranges(stages[0], stages[1], [0, 1], [1, 0])) == 0


def test_indivisible_model_is_refused() -> None:
    for degrees in ((3, 1), (0, 1), (1, 0), (1, 7), (6, 1)):
        with pytest.raises(InvariantError):
            shards(model(), *degrees)
    with pytest.raises(InvariantError):
        shard_ranges(shards(model(), 1, 1)[0], shards(model(layers=5), 1, 1)[0], [0], [0])
    for layers in ((0, 7), (-1, 2), (3, 3)):
        with pytest.raises(InvariantError):
            block_ranges(model(), [0], [0], *layers)
    with pytest.raises(InvariantError):
        block_ranges(model(), [0, 1], [0], 0, 6)


def test_fits() -> None:
    offsets = np.array([0, 90], np.int64)
    assert fits(offsets, 10, 100) and not fits(offsets, 11, 100)
    assert not fits(np.array([-1], np.int64), 1, 100)
    assert fits(np.zeros(0, np.int64), 1000, 0)
