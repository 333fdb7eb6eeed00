"""The operations of :mod:`memserve.model.capture.operations` on a GPU, in Triton.

A decode step of a large model reads its weights once; every small kernel between two linears adds microseconds to
that. Importing this module needs the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memserve.base.units import ceil_div
from memserve.model.capture import operations as fused

_GATE_CODES = {**fused.GATE_CODES, "gelu": 2}
_COLUMNS = 1024  # of a row, that a program of :func:`gated` computes


@triton.jit
def rms_norm_kernel(
    x, residual, weight, total, y, eps, inner, stride_outer, stride_inner, width,
    WIDTH_PAD: tl.constexpr, ADDS: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Program (row): the row of ``x``, with ``residual`` added, normalised; results are dense rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < width
    start = (row // inner) * stride_outer + (row % inner) * stride_inner
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    place = row * width + column
    if ADDS:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=inside)
        value = value.to(tl.float32)
    mean = tl.sum(value * value, 0) / width
    value = value * tl.rsqrt(mean + eps)
    gain = tl.load(weight + column, mask=inside, other=0.0)
    if ROUND_FIRST:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (value * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(gate, stride_gate, up, stride_up, y, width, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, piece): ``act(gate) * up``, the activation rounded to the dtype before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    value = tl.load(gate + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(up + row * stride_up + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        value = value * tl.sigmoid(value)
    elif KIND == 1:  # tanh(x) = 2 sigmoid(2x) - 1
        bent = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value * tl.sigmoid(2.0 * bent)
    else:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (value * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    x, stride_token, stride_head, cosine, sine, stride_table, y, dim,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Program (token): all heads, ``x * cos + (-x[half:], x[:half]) * sin``, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    column = tl.arange(0, DIM_PAD)[None, :]
    half = dim // 2
    inside = (head < HEADS) & (column < dim)
    row = x + token * stride_token + head * stride_head
    other = tl.where(column < half, column + half, column - half)
    straight = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.load(row + other, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.where(column < half, -crossed, crossed)
    cos = tl.load(cosine + token * stride_table + column, mask=column < dim, other=0.0).to(tl.float32)
    sin = tl.load(sine + token * stride_table + column, mask=column < dim, other=0.0).to(tl.float32)
    place = (token * HEADS + head) * dim + column
    tl.store(y + place, (straight * cos + crossed * sin).to(y.dtype.element_ty), mask=inside)


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _warps(width: int) -> int:
    """Of a program that has a row of so many elements in registers."""
    return min(16, max(4, width // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, round_first: bool) -> Tensor:
    """See :func:`memserve.model.capture.operations.rms_norm`."""
    return _rms_norm(x, None, weight, eps, round_first)[1]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_first: bool) -> tuple[Tensor, Tensor]:
    """See :func:`memserve.model.capture.operations.add_rms_norm`."""
    return _rms_norm(x, residual.contiguous(), weight, eps, round_first)


def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    x, outer, inner, stride_outer, stride_inner = fused.rows_of(x)
    width, adds = x.shape[-1], residual is not None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if adds else y
    if outer * inner:
        rms_norm_kernel[(outer * inner,)](
            x, x if residual is None else residual, weight, total, y, eps, inner, stride_outer, stride_inner, width,
            WIDTH_PAD=_padded(width), ADDS=adds, ROUND_FIRST=round_first, num_warps=_warps(width),
        )  # fmt: skip
    return total, y


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """See :func:`memserve.model.capture.operations.gated`."""
    width, shape = gate.shape[-1], gate.shape
    gate, _, rows, _, stride_gate = fused.one_level(gate)
    up, _, _, _, stride_up = fused.one_level(up)
    y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if rows:
        gated_kernel[(rows, ceil_div(width, _COLUMNS))](
            gate, stride_gate, up, stride_up, y, width, KIND=_GATE_CODES[kind], COLUMNS=_COLUMNS
        )
    return y


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, token_dim: int) -> Tensor:
    """See :func:`memserve.model.capture.operations.rotary`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cosine, sine = (table if table.stride(-1) == 1 else table.contiguous() for table in (cosine, sine))
    if sine.stride(token_dim) != cosine.stride(token_dim):
        cosine, sine = cosine.contiguous(), sine.contiguous()
    head_dim = 3 - token_dim
    tokens, heads, dim = x.shape[token_dim], x.shape[head_dim], x.shape[-1]
    y = torch.empty((1, tokens, heads, dim), dtype=x.dtype, device=x.device)
    if tokens:
        rotary_kernel[(tokens,)](
            x, x.stride(token_dim), x.stride(head_dim), cosine, sine, cosine.stride(token_dim), y, dim,
            HEADS=heads, HEADS_PAD=_padded(heads), DIM_PAD=_padded(dim), num_warps=_warps(heads * dim),
        )  # fmt: skip
    return y if token_dim == 1 else y.transpose(1, 2)


OPERATIONS = {
    fused.rms_norm: rms_norm, fused.add_rms_norm: add_rms_norm, fused.gated: gated, fused.rotary: rotary,
}  # fmt: skip
"""What takes the place of the CPU's."""
