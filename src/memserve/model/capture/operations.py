"""The operations with which graph passes replace several small ones.

Each is a plain function of tensors, so that a rewritten graph runs node by node at any size. The kernels take
addresses and strides; a tensor with a last dimension that is not dense is copied first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memserve import _kernels
from memserve.model.linears import PackedLinear
from memserve.model.quantised import QuantisedEmbedding, QuantisedLinear

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GATE_CODES = {"silu": 0, "gelu_tanh": 1}
CPU_GATE_CODES = {**GATE_CODES, "sigmoid": 2, "product": 3, "silu_wide": 4}


def item(values: tuple[Tensor, ...], index: int) -> Tensor:
    """One output of an operation that has several."""
    return values[index]


def columns(x: Tensor, start: int, width: int) -> Tensor:
    """``x[..., start : start + width]``, a view."""
    return x.narrow(-1, start, width)


def linear(x: Tensor, layer: PackedLinear | QuantisedLinear) -> Tensor:
    """``x [..., k]`` -> ``[..., n]``."""
    return layer(x)


class TiedEmbedding:
    """The rows of a linear's packed weight, for a model with its embedding as output head: one copy serves both."""

    def __init__(self, layer: PackedLinear, blocks: Tensor) -> None:
        self._layer, self._blocks = layer, blocks  # the layer owns the memory

    def __call__(self, ids: Tensor) -> Tensor:
        """``ids [...]`` int64 -> ``[..., k]``"""
        flat, block = ids.reshape(-1), self._blocks.shape[2]
        rows = self._blocks[flat // block, :, flat % block]
        return rows.reshape(*ids.shape, self._layer.k)


def embed(ids: Tensor, table: TiedEmbedding | QuantisedEmbedding) -> Tensor:
    """``ids [...]`` -> ``[..., k]``"""
    return table(ids)


def rows_of(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """``x [..., width]`` as two levels of rows: (tensor, outer, inner, outer stride, inner stride)."""
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    dims = [(size, stride) for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size != 1]
    if len(dims) > 2:
        x = x.contiguous()
        dims = [(x.numel() // shape[-1], shape[-1])]
    dims = [(1, 0)] * (2 - len(dims)) + dims
    return x, dims[0][0], dims[1][0], dims[0][1], dims[1][1]


def rms_norm(x: Tensor, weight: Tensor, eps: float, round_first: bool) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    ``weight [width]`` float32. ``round_first``: the normalised value is rounded to the dtype of ``x`` before the
    weight multiplies it (Llama), not after (Gemma).
    """
    x, outer, inner, stride_outer, stride_inner = rows_of(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    _kernels.rms_norm(
        x.data_ptr(), 0, 0, y.data_ptr(), weight.data_ptr(), eps, round_first,
        outer, inner, stride_outer, stride_inner, x.shape[-1], DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_first: bool) -> tuple[Tensor, Tensor]:
    """``(x + residual, rms_norm(x + residual))`` in one pass; the sum is rounded before it is normalised."""
    x, outer, inner, stride_outer, stride_inner = rows_of(x)
    residual = residual.contiguous()
    buffer = torch.empty((2, *x.shape), dtype=x.dtype)
    total, y = buffer.unbind(0)
    _kernels.rms_norm(
        x.data_ptr(), residual.data_ptr(), total.data_ptr(), y.data_ptr(), weight.data_ptr(), eps, round_first,
        outer, inner, stride_outer, stride_inner, x.shape[-1], DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return total, y


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """``act(gate) * up``, the activation rounded to the dtype before the product; ``kind``: of :data:`CPU_GATE_CODES`.
    ``silu_wide`` is not rounded; ``product`` has no activation."""
    width = gate.shape[-1]
    gate, _, rows, _, stride_gate = one_level(gate)
    up, _, _, _, stride_up = one_level(up)
    y = torch.empty(gate.shape, dtype=gate.dtype)
    _kernels.gated(
        gate.data_ptr(), stride_gate, up.data_ptr(), stride_up, y.data_ptr(), rows, width,
        CPU_GATE_CODES[kind], DTYPE_CODES[gate.dtype],
    )  # fmt: skip
    return y


def one_level(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """As :func:`rows_of`, with a single level of rows."""
    rows = rows_of(x)
    return rows if rows[1] == 1 else rows_of(x.reshape(-1, x.shape[-1]))


def rotary(x: Tensor, cosine: Tensor, sine: Tensor, token_dim: int) -> Tensor:
    """``x * cos + (-x[half:], x[:half]) * sin``, rounded once.

    ``x`` is ``[1, T, H, D]`` (``token_dim`` 1) or ``[1, H, T, D]`` (2), any strides; ``cosine, sine`` broadcast over
    the heads. The result has the shape of ``x`` and lies in memory as ``[T, H, D]``.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    head_dim = 3 - token_dim
    tokens, heads, dim = x.shape[token_dim], x.shape[head_dim], x.shape[-1]
    y = torch.empty((1, tokens, heads, dim), dtype=x.dtype)
    _kernels.rotary(
        x.data_ptr(), x.stride(token_dim), x.stride(head_dim), cosine.data_ptr(), sine.data_ptr(),
        cosine.stride(token_dim), y.data_ptr(), tokens, heads, dim, DTYPE_CODES[x.dtype],
    )  # fmt: skip
    return y if token_dim == 1 else y.transpose(1, 2)
