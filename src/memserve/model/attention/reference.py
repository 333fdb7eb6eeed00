"""Paged attention in plain torch: the fallback for devices without our kernels, and a test oracle.

It gathers each sequence's pages into dense K and V and computes the softmax in float32 (float64 for float64 queries).
Clear and slow; the layout is the one of :class:`memserve.base.types.KVGeometry`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memserve.base.types import KVGeometry
from memserve.model.attention.context import StepRows


class ReferencePages:
    """An arena of bytes seen as ``k [blocks, layers, Hkv, Dk, block]`` and ``v [blocks, layers, Hkv, block, Dv]``."""

    def __init__(self, arena: Tensor, geometry: KVGeometry) -> None:
        """``arena``: uint8 ``[blocks * block_bytes]``, any device; both views share its memory."""
        g = geometry
        dtype = getattr(torch, g.dtype)
        heads = arena.view(dtype).view(-1, g.num_layers, g.num_kv_heads, g.block_tokens * (g.head_dim_k + g.head_dim_v))
        split = g.head_dim_k * g.block_tokens
        self.geometry = geometry
        self.k = heads[..., :split].view(*heads.shape[:3], g.head_dim_k, g.block_tokens)
        self.v = heads[..., split:].view(*heads.shape[:3], g.block_tokens, g.head_dim_v)

    def write_kv(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k [T, Hkv, Dk]`` and ``v [T, Hkv, Dv]`` at ``offsets [T]`` inside ``blocks [T]``."""
        self.k[:, layer].permute(0, 3, 1, 2)[blocks, offsets] = k
        self.v[:, layer].permute(0, 2, 1, 3)[blocks, offsets] = v

    def read_kv(self, layer: int, blocks: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Dense ``k [Hkv, context, Dk]`` and ``v [Hkv, context, Dv]`` of the sequence in ``blocks``."""
        k = self.k[blocks, layer].permute(1, 0, 3, 2).flatten(1, 2)
        v = self.v[blocks, layer].permute(1, 0, 2, 3).flatten(1, 2)
        return k[:, :context], v[:, :context]


class ReferenceAttention:
    """A :class:`~memserve.model.attention.context.StepAttention` over :class:`ReferencePages`."""

    def __init__(self, pages: ReferencePages, rows: StepRows) -> None:
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
    ) -> Tensor:
        """See :meth:`memserve.model.attention.context.StepAttention.run_attention`."""
        new = slice(self._starts[-1])
        self._pages.write_kv(layer, self._blocks, self._offsets, k[0].transpose(0, 1)[new], v[0].transpose(0, 1)[new])
        out = torch.zeros((1, q.shape[2], q.shape[1], v.shape[3]), dtype=q.dtype, device=q.device)
        for row, (table, context) in enumerate(zip(self._tables, self._contexts, strict=True)):
            first, last = self._starts[row], self._starts[row + 1]
            keys, values = self._pages.read_kv(layer, table, context)
            mixed = attend_dense(q[0, :, first:last], keys, values, scale, window, softcap, sinks)
            out[0, first:last] = mixed.transpose(0, 1)
        return out


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """``q [H, n, Dk]``: the last ``n`` positions of ``k [Hkv, context, Dk], v [Hkv, context, Dv]``. ``[H, n, Dv]``."""
    heads, count, _ = q.shape
    kv_heads, context, _ = k.shape
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    if heads % kv_heads:  # queries of a worker that reads some KV heads of others: any of its own stand in for them
        read = torch.arange(heads, device=q.device) * kv_heads // heads
        k, v, kv_heads = k[read], v[read], heads
    grouped = q.to(exact).reshape(kv_heads, heads // kv_heads * count, -1)
    scores = (grouped @ k.to(exact).transpose(1, 2) * scale).view(heads, count, context)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ages = torch.arange(context - count, context, device=q.device)[:, None] - torch.arange(context, device=q.device)
    hidden = (ages < 0) | (ages >= window) if window else ages < 0
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(exact).view(heads, 1, 1).expand(heads, count, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :context].reshape(kv_heads, -1, context)
    return (weights @ v.to(exact)).view(heads, count, -1).to(q.dtype)
