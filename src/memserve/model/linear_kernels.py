"""Linears of few rows on a GPU, in Triton: the weight streams through once, at the speed of the memory.

Libraries are made for many rows; with few they leave a fifth to a half of the bandwidth. Importing this module needs
the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memserve.units import ceil_div


@triton.jit
def one_row_kernel(
    x, weight, bias, y, n, k, stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of one row, ``INPUTS`` inputs at a time."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live = outputs < n
    inputs = tl.arange(0, INPUTS)
    rows = weight + outputs[:, None].to(tl.int64) * stride
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, k, INPUTS):
        if EVEN:
            value = tl.load(x + start + inputs)
            part = tl.load(rows + (start + inputs)[None, :], mask=live[:, None], other=0.0)
        else:
            inside = start + inputs < k
            value = tl.load(x + start + inputs, mask=inside, other=0.0)
            part = tl.load(rows + (start + inputs)[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        sums += part.to(tl.float32) * value.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=live)


@triton.jit
def few_rows_kernel(
    x, weight, bias, y, count, n, k, stride_x, stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of up to ``ROWS`` rows, by tensor cores."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live = outputs < n
    rows = tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    there = rows < count
    places = x + rows[:, None] * stride_x
    columns = weight + outputs[None, :].to(tl.int64) * stride
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, k, INPUTS):
        at = start + inputs
        if EVEN:
            value = tl.load(places + at[None, :], mask=there[:, None], other=0.0)
            part = tl.load(columns + at[:, None], mask=live[None, :], other=0.0)
        else:
            value = tl.load(places + at[None, :], mask=there[:, None] & (at < k)[None, :], other=0.0)
            part = tl.load(columns + at[:, None], mask=live[None, :] & (at < k)[:, None], other=0.0)
        if WIDE:  # Triton's interpreter multiplies bfloat16 as if it were an integer
            value, part = value.to(tl.float32), part.to(tl.float32)
        sums = tl.dot(value, part, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)[None, :]
    place = y + rows[:, None] * n + outputs[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=there[:, None] & live[None, :])


ONE_ROW = {"OUTPUTS": 4, "INPUTS": 1024, "num_warps": 4}
FEW_ROWS = {"OUTPUTS": 32, "INPUTS": 128, "num_warps": 4, "num_stages": 5}


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: dict[str, int] | None = None
) -> Tensor:
    """``x [..., k]`` of up to 64 rows times ``weight [n, k]`` transposed, plus ``bias [n]``: ``[..., n]`` of ``dtype``.
    Sums are float32. ``options``: other ones than the usual for the kernel."""
    n, k = weight.shape
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    count = len(flat)
    y = torch.empty((count, n), dtype=dtype, device=x.device)
    some = weight if bias is None else bias
    if count == 1 and (options is None or "num_stages" not in options):
        chosen = options or ONE_ROW
        one_row_kernel[(ceil_div(n, chosen["OUTPUTS"]),)](
            flat, weight, some, y, n, k, weight.stride(0), BIAS=bias is not None,
            EVEN=k % chosen["INPUTS"] == 0, **chosen,
        )  # fmt: skip
    elif count:
        chosen = options or FEW_ROWS
        few_rows_kernel[(ceil_div(n, chosen["OUTPUTS"]),)](
            flat, weight, some, y, count, n, k, flat.stride(0), weight.stride(0),
            ROWS=max(16, 1 << (count - 1).bit_length()), BIAS=bias is not None, EVEN=k % chosen["INPUTS"] == 0,
            WIDE=x.device.type == "cpu", **chosen,
        )  # fmt: skip
    return y.view(*x.shape[:-1], n)
