"""Paged attention in plain torch: the fallback for devices without our kernels, and a test oracle.

It gathers each sequence's pages into dense K and V and computes the softmax in float32 (float64 for float64 queries).
Clear and slow; the layout is the one of :class:`memserve.base.types.KVGeometry`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memserve.base.types import INT4_GROUP, KVGeometry
from memserve.model.attention.context import StepRows


class ReferencePages:
    """An arena of bytes seen as ``k [blocks, layers, Hkv, Dk, block]`` and ``v [blocks, layers, Hkv, block, Dv]``."""

    def __init__(self, arena: Tensor, geometry: KVGeometry) -> None:
        """``arena``: uint8 ``[blocks, block_bytes]``, any strides between blocks, or all in a row; on any device; both
        views share its memory."""
        g = geometry
        blocks: Any = arena.view(-1, g.block_bytes) if arena.dim() == 1 else arena
        shape = g.num_layers, g.num_kv_heads, g.block_tokens * sum(g.kept_dims)
        heads = blocks.view(getattr(torch, g.dtype)).unflatten(-1, shape)
        split = g.head_dim_k * g.block_tokens
        self.geometry = geometry
        self.k: Tensor = heads[..., :split].unflatten(-1, (g.head_dim_k, g.block_tokens))
        latents = self.k[..., : g.head_dim_v, :].transpose(-1, -2)
        values = None if g.latent else heads[..., split:].unflatten(-1, (g.block_tokens, g.head_dim_v))
        self.v: Tensor = latents if values is None else values

    def write_kv(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k [T, Hkv, Dk]`` and ``v [T, Hkv, Dv]`` at ``offsets [T]`` inside ``blocks [T]``."""
        self.k[:, layer].permute(0, 3, 1, 2)[blocks, offsets] = k
        self.v[:, layer].permute(0, 2, 1, 3)[blocks, offsets] = v

    def read_kv(self, layer: int, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Dense ``k [Hkv, context, Dk]`` and ``v [Hkv, context, Dv]`` of the sequence in ``blocks``."""
        k = self.k[blocks, layer].permute(1, 0, 3, 2).flatten(1, 2)
        v = self.v[blocks, layer].permute(1, 0, 2, 3).flatten(1, 2)
        return k[:, :context], v[:, :context]


_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_LEAST, _LIMIT = 2.0**-100, 2.0**127


def round_kv(x: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
    """Codes ``[..., D]`` uint8 (int4: the lower half) and maxima ``[..., groups]`` bfloat16 of ``x [..., D]``: the rule
    of ``src/kernels/kv_codes.h``."""
    kind, groups = geometry.kv_dtype, geometry.code_groups(x.shape[-1])
    width = -(-x.shape[-1] // groups) if groups == 1 else INT4_GROUP
    padded: Any = torch.nn.functional.pad(x.float(), (0, groups * width - x.shape[-1]))
    padded = padded.unflatten(-1, (groups, width))
    magnitudes = padded.abs()
    largest = torch.where(magnitudes < _LIMIT, magnitudes, torch.nan).amax(-1)
    maxima = torch.where(largest < _LEAST, torch.zeros_like(largest), largest).to(torch.bfloat16)
    maxima.view(torch.int16)[maxima.isnan()] = 0x7FC0  # of all that are no numbers
    counts = (maxima > 0)[..., None]
    # one division: `number / tensor` is a product with a reciprocal, which rounds twice
    inverse = torch.full_like(padded[..., :1], _LARGEST[kind]) / torch.where(counts, maxima[..., None].float(), 1.0)
    scaled = torch.where(counts, padded * inverse, torch.zeros_like(padded))
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else scaled.round().to(torch.int8)
    codes = codes.view(torch.uint8) & (0x0F if kind == "int4" else 0xFF)
    return codes.flatten(-2)[..., : x.shape[-1]], maxima


def values_of(codes: Tensor, maxima: Tensor, geometry: KVGeometry) -> Tensor:
    """What :func:`round_kv` has made of values, float32 ``[..., D]``."""
    kind, groups = geometry.kv_dtype, maxima.shape[-1]
    if kind == "fp8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    else:
        half = 8 if kind == "int4" else 128
        numbers = (codes.int() + half) % (2 * half) - half
    scales = maxima.float() * torch.tensor(1.0).div(_LARGEST[kind])
    width = codes.shape[-1] if groups == 1 else INT4_GROUP
    values: Tensor = numbers.float() * scales.repeat_interleave(width, -1)[..., : codes.shape[-1]]
    return values


class CodedReferencePages:
    """As :class:`ReferencePages`, of an arena whose pages have codes."""

    def __init__(self, arena: Tensor, geometry: KVGeometry) -> None:
        self.geometry = g = geometry
        blocks: Any = arena.view(-1, g.block_bytes) if arena.dim() == 1 else arena
        heads = blocks.unflatten(-1, (g.num_layers, g.num_kv_heads, g.head_bytes))
        depth, tokens, dims = g.code_depth, g.block_tokens, (g.head_dim_k, g.head_dim_v)
        shapes = (-(-dims[0] // depth), tokens, 4), (-(-tokens // depth), dims[1], 4)
        groups = [(g.code_groups(dim), tokens) for dim in dims]
        sizes = [*(a * b * c for a, b, c in shapes), *(2 * a * b for a, b in groups)]
        parts = heads[..., : sum(sizes)].split(sizes, -1)
        self.k, self.v = (part.unflatten(-1, shape) for part, shape in zip(parts[:2], shapes, strict=True))
        self._maxima = [
            part.view(torch.bfloat16).unflatten(-1, shape) for part, shape in zip(parts[2:], groups, strict=True)
        ]

    def write_kv(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """See :meth:`ReferencePages.write_kv`."""
        for units, maxima, x in ((self.k, self._maxima[0], k), (self.v, self._maxima[1], v)):
            codes, maximum = round_kv(x, self.geometry)
            used, numbers = torch.unique(blocks, return_inverse=True)
            dense = self._codes_of(units[used, layer], is_key=units is self.k)
            dense[numbers, :, offsets] = codes
            units[used, layer] = self._units_of(dense, is_key=units is self.k)
            maxima[:, layer].permute(0, 3, 1, 2)[blocks, offsets] = maximum

    def read_kv(self, layer: int, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """See :meth:`ReferencePages.read_kv`; float32."""
        dense = []
        for units, maxima in ((self.k, self._maxima[0]), (self.v, self._maxima[1])):
            codes = self._codes_of(units[blocks, layer], is_key=units is self.k)
            values = values_of(codes, maxima[blocks, layer].transpose(-1, -2), self.geometry)
            dense.append(values.transpose(0, 1).flatten(1, 2)[:, :context])
        return dense[0], dense[1]

    def _codes_of(self, units: Tensor, *, is_key: bool) -> Tensor:
        """``[blocks, Hkv, tokens, D]`` of the units of some blocks."""
        halves = torch.cat([units & 0x0F, units >> 4], -1) if self.geometry.code_depth == 8 else units
        dense = halves.transpose(-1, -2).flatten(-3, -2)  # [depth, the other one]
        dense = dense.transpose(-1, -2) if is_key else dense
        return dense[..., : self.geometry.block_tokens, : self.geometry.head_dim_k if is_key else None].clone()

    def _units_of(self, codes: Tensor, *, is_key: bool) -> Tensor:
        depth = self.geometry.code_depth
        dense = codes.transpose(-1, -2) if is_key else codes
        rows = -(-dense.shape[-2] // depth) * depth
        padded: Any = torch.nn.functional.pad(dense, (0, 0, 0, rows - dense.shape[-2]))
        units: Tensor = padded.unflatten(-2, (-1, depth)).transpose(-1, -2)
        return units[..., :4] | units[..., 4:] << 4 if depth == 8 else units


def reference_pages(arena: Tensor, geometry: KVGeometry) -> ReferencePages | CodedReferencePages:
    """Of KV as ``geometry`` keeps it."""
    return (CodedReferencePages if geometry.code_depth else ReferencePages)(arena, geometry)


class ReferenceAttention:
    """A :class:`~memserve.model.attention.context.StepAttention` over :class:`ReferencePages`."""

    def __init__(self, pages: ReferencePages | CodedReferencePages, rows: StepRows) -> None:
        tables, table_rows, q_starts, contexts = np.asarray(rows.tables), rows.table_rows, rows.q_starts, rows.contexts
        self._pages = pages
        self._starts = q_starts.tolist()
        self._contexts = contexts.tolist()
        block_tokens, device = pages.geometry.block_tokens, pages.k.device
        counts = np.diff(q_starts)
        positions = np.arange(q_starts[-1]) - np.repeat(q_starts[:-1] + counts - contexts, counts)
        owners = np.repeat(table_rows, counts)
        self._blocks = torch.as_tensor(tables[owners, positions // block_tokens].astype(np.int64), device=device)
        self._offsets = torch.as_tensor(positions % block_tokens, device=device)
        self._tables = [
            torch.as_tensor(tables[row, : -(-context // block_tokens)].astype(np.int64), device=device)
            for row, context in zip(table_rows.tolist(), self._contexts, strict=True)
        ]

    def run_attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        new = slice(self._starts[-1])
        self._pages.write_kv(layer, self._blocks, self._offsets, k[0].transpose(0, 1)[new], v[0].transpose(0, 1)[new])
        out = torch.zeros((1, q.shape[2], q.shape[1], v.shape[3]), dtype=q.dtype, device=q.device)
        for row, (table, context) in enumerate(zip(self._tables, self._contexts, strict=True)):
            first, last = self._starts[row], self._starts[row + 1]
            keys, values = self._pages.read_kv(layer, table, context)
            mixed = attend_dense(q[0, :, first:last], keys, values, scale, window, softcap, sinks, chunk)
            out[0, first:last] = mixed.transpose(0, 1)
        return out


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None, chunk: int = 0
) -> Tensor:
    """``q [H, n, Dk]``: the last ``n`` positions of ``k [Hkv, context, Dk], v [Hkv, context, Dv]``. ``[H, n, Dv]``."""
    heads, count, _ = q.shape
    kv_heads, context, _ = k.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    if heads % kv_heads:  # queries of a worker that reads some KV heads of others: any of its own stand in for them
        read = torch.arange(heads, device=q.device) * kv_heads // heads
        k, v, kv_heads = k[read], v[read], heads
    grouped = q.to(exact).reshape(kv_heads, heads // kv_heads * count, q.shape[2])
    scores = (grouped @ k.to(exact).transpose(1, 2) * scale).view(heads, count, context)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions, keys = (torch.arange(first, context, device=q.device) for first in (context - count, 0))
    positions = positions[:, None]
    hidden = (keys > positions) | (keys <= positions - window) if window else keys > positions
    if chunk:
        hidden |= keys < positions // chunk * chunk
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(exact).view(heads, 1, 1).expand(heads, count, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :context].reshape(kv_heads, heads // kv_heads * count, context)
    return (weights @ v.to(exact)).view(heads, count, v.shape[2]).to(q.dtype)
