"""Where the KV of layers lies that do not all keep the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.layer_kv import LayerKv, LayerLayout, WindowPages, keep_every_layer, lay_out


def windows(*sizes: int) -> list[LayerKv]:
    """Layers of one shape; 0: one that reads everything."""
    return [LayerKv(1, 8, 8, size) for size in sizes]


def gemma4(local: int, others: int, heads: tuple[int, int], *, every: int = 6) -> list[LayerKv]:
    """Layers with a window of 1,024 and heads of 256, and each ``every``-th one with wider heads and no window."""
    shapes = [LayerKv(heads[0], 256, 256, 1024), LayerKv(heads[1], 512, 512)]
    return [shapes[number % every == every - 1] for number in range(local + others)]


def test_layers_that_keep_the_same_need_no_layout() -> None:
    assert lay_out(windows(0, 0, 0)) is None
    assert lay_out(windows(8, 0, 8)) is None
    assert lay_out(windows(0, 0, 8), is_apart=True) is None  # mostly empty parts
    assert lay_out(windows(8, 8, 8), is_apart=True) is None  # a block that only names tokens would be as large


def test_windows_fill_parts_in_their_order() -> None:
    layout = lay_out(windows(8, 8, 0, 8, 8, 0, 8), is_apart=True)
    assert layout is not None
    assert (layout.block_pages, layout.part_blocks, layout.window, layout.chunk) == (2, 3, 8, 0)
    tables = [(layout.runs[run].table, place) for run, place in layout.places]
    assert tables == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (0, 1), (3, 0)]
    assert layout.digest != LayerLayout(layout.layers).digest
    assert layout.block_geometry("bfloat16", 32).page_bytes == 32 * 16 * 2


def test_blocks_of_windows_alone_only_name_tokens() -> None:
    """Mistral 7B 0.1: 32 layers in 16 blocks of a part, beside one with two pages of no layer."""
    layout = lay_out([LayerKv(8, 128, 128, 4096)] * 32, is_apart=True)
    assert layout is not None
    assert (layout.block_pages, layout.part_blocks, layout.window) == (2, 16, 4096)
    assert [run.table for run in layout.runs] == list(range(1, 17))
    assert layout.block_geometry("bfloat16", 32).token_bytes * 16 == 32 * 8 * 256 * 2
    assert lay_out([LayerKv(8, 128, 128, 4096)] * 32, is_apart=True, context_tokens=4096) is None
    few = lay_out(windows(8, 8, 8, 8), is_apart=True, context_tokens=9)
    assert few is not None and (few.block_pages, few.part_blocks) == (1, 4)
    wide = lay_out([*windows(*[8] * 8), *[LayerKv(4, 8, 8, 8)] * 2], is_apart=True)
    assert wide is not None and (wide.block_pages, wide.part_blocks) == (4, 4)


def test_wider_heads_take_several_pages() -> None:
    """Gemma 4 31B: 50 layers with 16 heads of 256, and 10 with 4 of 512."""
    layout = lay_out(gemma4(50, 10, (16, 4)), is_apart=True)
    assert layout is not None
    assert (layout.page_elements, layout.block_pages, layout.part_blocks) == (4096, 10, 10)
    assert {run.pages_each for run in layout.runs} == {1, 2}
    geometry = layout.block_geometry("bfloat16", 32)
    assert (geometry.block_bytes, geometry.token_bytes) == (32 * 10 * 4096 * 2, 10 * 4096 * 2)
    assert str(layout) == "50 layers x 16 heads x (256 K + 256 V) + 10 layers x 4 heads x (512 K + 512 V)"


def test_layers_that_read_another_ones_kv_have_no_pages() -> None:
    layers = [*windows(8, 0), LayerKv(1, 8, 8, 8, owner=0), LayerKv(1, 8, 8, owner=1)]
    layout = lay_out(layers)
    assert layout is not None
    assert layout.block_pages == 2 and layout.places == ((0, 0), (0, 1), (0, 0), (0, 1))
    assert lay_out(keep_every_layer(layers)) is None
    assert str(layout).endswith(", which 2 more layers read")


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([8, 16, 24]), st.booleans()), min_size=1, max_size=12),
    st.booleans(),
)
def test_no_two_layers_share_a_page(drawn: list[tuple[int, int, bool]], is_apart: bool) -> None:
    """And every page of a layer lies within its block."""
    layers = [LayerKv(heads, dim, dim, 32 * is_local) for heads, dim, is_local in drawn]
    layout = lay_out(layers, is_apart=is_apart)
    if layout is None:
        return
    spans = []
    for layer, (number, place) in zip(layers, layout.places, strict=True):
        run = layout.runs[number]
        assert run.shape == layer.shape and run.pages_each * layout.page_elements == layer.elements
        assert (run.table > 0) == (layout.is_apart and layer.is_local)
        first = run.first_page + place * run.pages_each
        assert first + run.pages_each <= layout.block_pages
        spans.append((run.table, first, first + run.pages_each))
    assert all(before[0] < after[0] or before[2] <= after[1] for before, after in pairwise(sorted(spans)))
    assert layout.part_blocks == max(table for table, _, _ in spans)


@given(st.integers(0, 70), st.integers(0, 70), st.integers(1, 9))
def test_first_entry_is_that_of_the_first_token_read(window: int, chunk: int, block_tokens: int) -> None:
    pages = WindowPages(window, 1, block_tokens, 8, chunk)
    ends = np.arange(200)
    for position in ends.tolist():
        read = [
            token
            for token in range(position + 1)
            if (window and token > position - window) or (chunk and token >= position // chunk * chunk)
        ]
        first = read[0] if read else position
        assert pages.first_token(position) == first
        assert pages.first_entry(position) == first // block_tokens
        assert len(pages.entries_behind(position)) <= pages.parts_max
    assert pages.first_entries(ends).tolist() == [pages.first_entry(end) for end in ends.tolist()]
