"""A context in parts, each attended to alone and merged, against a float64 twin of the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memserve import _kernels
from memserve.base.types import KV_DTYPES, KVGeometry
from memserve.model.attention.reference import CodedReferencePages

BLOCK, DIM = 32, 64
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}


class Arena:
    """Pages of one layer, and the keys and values ``[tokens, kv_heads, dim]`` that lie in them from block 0 on."""

    def __init__(self, tokens: int, kv_heads: int, group: int, dtype: str, seed: int, kv_dtype: str = "auto") -> None:
        self.kind, self.dtype, self.kv_dtype = getattr(torch, dtype), dtype, kv_dtype
        draw = torch.Generator().manual_seed(seed)
        self.kv_heads, self.heads = kv_heads, kv_heads * group
        self.k, self.v = (torch.randn(tokens, kv_heads, DIM, generator=draw).to(self.kind) for _ in range(2))
        self.q = torch.randn(tokens, self.heads, DIM, generator=draw).to(self.kind)
        blocks = -(-tokens // BLOCK)
        if kv_dtype != "auto":
            self._write_codes(blocks, tokens)
            return
        k, v = (torch.full((blocks * BLOCK, kv_heads, DIM), torch.nan, dtype=self.kind) for _ in range(2))
        k[:tokens], v[:tokens] = self.k, self.v
        k, v = (t.view(blocks, BLOCK, kv_heads, DIM) for t in (k, v))
        parts = k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)  # [dim, slot] and [slot, dim] of each block and head
        self.pages = torch.stack([part.flatten(2) for part in parts], 2).contiguous()

    def _write_codes(self, blocks: int, tokens: int) -> None:
        """K and V are from now on what has become of them."""
        geometry = KVGeometry(1, self.kv_heads, DIM, DIM, self.dtype, BLOCK, self.kv_dtype)
        self.pages = torch.full((blocks * geometry.block_bytes,), 0xFF, dtype=torch.uint8)
        pages, places = CodedReferencePages(self.pages, geometry), torch.arange(tokens)
        pages.write_kv(0, places // BLOCK, places % BLOCK, self.k, self.v)
        self.k, self.v = (part.transpose(0, 1) for part in pages.read_kv(0, torch.arange(blocks), tokens))

    def part(self, q: Tensor, first: int, end: int, behind: bool, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
        """Queries ``[T, heads, dim]`` over tokens ``[first, end)``, from a block on: outputs and statistics."""
        shape = (1, self.kv_heads, DIM, DIM, BLOCK, self.dtype, self.kv_dtype)
        table = np.arange(first // BLOCK, -(-end // BLOCK), dtype=np.int32)[None]
        counts, contexts = np.array([0, len(q)], np.int32), np.array([end - first], np.int32)
        batch = _kernels.PagedBatch(
            self.pages.data_ptr(), shape, table, np.zeros(1, np.int32), counts, contexts, behind=behind
        )
        out = torch.full((len(q), self.heads, DIM), torch.nan)
        statistics = np.full((len(q), self.heads), np.nan, np.float32)
        at: list[Any] = [(t.data_ptr(), t.stride(0), t.stride(1)) for t in (q, q, q, out)]
        _kernels.attend(batch, 0, self.heads, *at, DIM**-0.5, 0, softcap, write=False, statistics=statistics)
        return out, torch.from_numpy(statistics)

    def truth(self, first: int, softcap: float = 0.0) -> Tensor:
        """Tokens from ``first`` on over all before them and themselves, in float64."""
        q, k, v = (t.double().transpose(0, 1) for t in (self.q[first:], self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * DIM**-0.5
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(torch.ones_like(scores).triu(first + 1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    last=st.integers(1, 90),
    rows=st.integers(1, 60),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 5]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    kv_dtype=st.sampled_from(KV_DTYPES),
    softcap=st.sampled_from([0.0, 20.0]),
    isa=st.sampled_from(_kernels.supported_isas()),
    seed=st.integers(0, 2**31),
)
def test_parts_of_a_context_make_the_whole(
    parts: list[int], last: int, rows: int, kv_heads: int, group: int, dtype: str, kv_dtype: str, softcap: float,
    isa: str, seed: int,
) -> None:  # fmt: skip
    """Whole blocks before the last part, which has the tokens of the queries as well."""
    rows = min(rows, last)
    edges = [0, *(np.cumsum(parts) * BLOCK).tolist()]
    tokens = edges[-1] + last
    arena = Arena(tokens, kv_heads, group, dtype, seed, kv_dtype)
    q = arena.q[tokens - rows :]
    _kernels.force_isa(isa)
    try:
        found = [arena.part(q, a, b, True, softcap) for a, b in itertools.pairwise(edges)]
        found.append(arena.part(q, edges[-1], tokens, False, softcap))
    finally:
        _kernels.force_isa(None)
    outputs, statistics = (torch.stack(each).flatten(1, 2) for each in zip(*found, strict=True))
    out = torch.full((rows * arena.heads, DIM), torch.nan)
    _kernels.merge_parts(outputs.numpy(), statistics.numpy(), out.numpy())
    want = arena.truth(tokens - rows, softcap)
    error = float((out.view_as(want).double() - want).norm() / want.norm())
    assert error < TOLERANCE[dtype], error


def test_a_part_of_vanishing_weight_changes_nothing() -> None:
    outputs = np.array([[[1.0, 2.0]], [[5.0, 7.0]]], np.float32)
    out = np.empty((1, 2), np.float32)
    _kernels.merge_parts(outputs, np.array([[0.0], [-300.0]], np.float32), out)
    assert out.tolist() == [[1.0, 2.0]]


def test_bad_shapes_and_orders_are_refused() -> None:
    arena = Arena(64, 1, 1, "float32", 0)
    outputs, statistics, out = (np.zeros(shape, np.float32) for shape in ((2, 3, 4), (2, 3), (3, 4)))
    wrong: tuple[tuple[Any, ...], ...] = (
        (outputs, statistics[:1], out, "statistics is not"),
        (outputs, statistics, out[:2], "out is not"),
        (outputs[:0], statistics[:0], out, "no part"),
    )
    for *arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            _kernels.merge_parts(*arguments)
    one = np.zeros(1, np.int32)
    counts, contexts = np.array([0, 1], np.int32), np.array([64], np.int32)
    table, shape = np.zeros((1, 2), np.int32), (1, 1, DIM, DIM, BLOCK, "float32", "auto")
    batch = _kernels.PagedBatch(arena.pages.data_ptr(), shape, table, one, counts, contexts, behind=True)
    at: Any = (arena.q.data_ptr(), DIM, DIM)
    with pytest.raises(ValueError, match="not written"):
        _kernels.attend(batch, 0, 1, at, at, at, at, 1.0)
    room = {"sinks": np.zeros(1, np.float32), "statistics": np.zeros((1, 1), np.float32)}
    with pytest.raises(ValueError, match="sinks"):
        _kernels.attend(batch, 0, 1, at, at, at, at, 1.0, write=False, **room)
