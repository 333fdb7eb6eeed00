"""Linears with quantised weights on a GPU, in Triton: few rows meet integers that become numbers in registers, and of
many rows torch multiplies panels of numbers, one after the other in the same memory.

A weight ``[n, k]`` is rows of bytes, in units of 16: 16 inputs of more than 4 bits, or 32 of up to 4 bits, of which the
first 16 have the low halves. A number is ``code * scale - minimum`` in float32, where of integers the product is
exact: whatever a compiler fuses, it is rounded once, as on a CPU. Products of several rows, and panels, round numbers
to the dtype of the activations, as a dequantised weight has them.

Importing this module needs the package ``triton``; ``TRITON_INTERPRET=1`` runs its kernels on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memserve.base.units import ceil_div
from memserve.model.gpu.weights import UNIT_BYTES, DeviceWeight
from memserve.model.linears import JoinedLinear, wide_linear
from memserve.model.quantised import StoredLinear

_UNIT: tl.constexpr = tl.constexpr(UNIT_BYTES)
_INTEGERS, _TABLE, _FLOATS = 0, 1, 2  # what codes are
_MINIMA = {"none": 0, "half": 1, "levels": 2, "zero": 3}


@triton.jit
def numbers_of(codes, table, KIND: tl.constexpr, ZERO: tl.constexpr):
    """What ``codes`` stand for, float32, without their scale."""
    if KIND == 1:
        number = tl.load(table + codes.to(tl.int32))
    elif KIND == 2:  # e4m3 read as float16 is 2^-8 of itself, small ones too; no device lacks float16
        bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:  # above 2^23 the last bits of a float32 are the integer: conversions of integers have fewer units
        number = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    return number


@triton.jit
def scales_of(
    scales, minima, levels, minimum_levels, outputs, inputs, live, k,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """Scale and minimum ``[outputs, units]`` of the units that begin at ``inputs``."""
    block = outputs * (k // BLOCK) + inputs // BLOCK
    group = outputs * (k // GROUP) + inputs // GROUP
    scale = tl.load(scales + block, mask=live, other=0.0).to(tl.float32)
    if LEVELS:
        scale *= tl.load(levels + group, mask=live, other=0).to(tl.float32)
    minimum = scale
    if MINIMUM > 0:
        minimum = tl.load(minima + block, mask=live, other=0.0).to(tl.float32)
    if MINIMUM == 2:
        minimum *= tl.load(minimum_levels + group, mask=live, other=0).to(tl.float32)
    if MINIMUM == 3:
        minimum *= scale
    return scale, minimum


@triton.jit
def one_row_stored_kernel(
    x, values, scales, minima, levels, minimum_levels, table, bias, y, n, k,
    HALVES: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LEVELS: tl.constexpr, MINIMUM: tl.constexpr, OUTPUTS: tl.constexpr, UNITS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of one row, ``UNITS`` units at a time, whose sums are scaled as a whole."""
    outputs = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    byte = tl.arange(0, _UNIT)
    row_units = k // (_UNIT * HALVES)
    sums = tl.zeros([OUTPUTS, UNITS], tl.float32)
    for start in range(0, row_units, UNITS):
        units = start + tl.arange(0, UNITS)
        inside = units < row_units
        live = (outputs < n)[:, None] & inside[None, :]
        place = (outputs[:, None] * row_units + units[None, :]) * _UNIT
        codes = tl.load(values + place[:, :, None] + byte[None, None, :], mask=live[:, :, None], other=0)
        for half in tl.static_range(HALVES):
            inputs = (units * HALVES + half) * _UNIT
            if half == 0 or GROUP < 32:
                scale, minimum = scales_of(
                    scales, minima, levels, minimum_levels, outputs[:, None], inputs[None, :], live, k,
                    BLOCK, GROUP, LEVELS, MINIMUM,
                )  # fmt: skip
            value = tl.load(x + inputs[:, None] + byte[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
            part = (codes >> (4 * half)) & (15 if HALVES == 2 else 255)
            number = numbers_of(part, table, KIND, ZERO)
            sums += tl.sum(number * value[None, :, :], 2) * scale
            if MINIMUM > 0:
                sums -= minimum * tl.sum(value, 1)[None, :]
    total = tl.sum(sums, 1)
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < n, other=0.0).to(tl.float32)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=outputs < n)


@triton.jit
def few_rows_stored_kernel(
    x, values, scales, minima, levels, minimum_levels, table, bias, y, count, n, k, stride_x,
    HALVES: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LEVELS: tl.constexpr, MINIMUM: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, UNITS: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (piece): ``OUTPUTS`` outputs of up to ``ROWS`` rows, by tensor cores."""
    outputs = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    rows = tl.arange(0, ROWS)
    byte, column = tl.arange(0, _UNIT), tl.arange(0, UNITS * _UNIT)
    row_units = k // (_UNIT * HALVES)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, row_units, UNITS):
        units = start + tl.arange(0, UNITS)
        live = (outputs < n)[:, None] & (units < row_units)[None, :]
        place = (outputs[:, None] * row_units + units[None, :]) * _UNIT
        codes = tl.load(values + place[:, :, None] + byte[None, None, :], mask=live[:, :, None], other=0)
        unit = start + column // _UNIT
        for half in tl.static_range(HALVES):
            if half == 0 or GROUP < 32:
                scale, minimum = scales_of(
                    scales, minima, levels, minimum_levels, outputs[:, None],
                    ((units * HALVES + half) * _UNIT)[None, :], live, k, BLOCK, GROUP, LEVELS, MINIMUM,
                )  # fmt: skip
            part = (codes >> (4 * half)) & (15 if HALVES == 2 else 255)
            weight = numbers_of(part, table, KIND, ZERO) * scale[:, :, None]
            if MINIMUM > 0:
                weight -= minimum[:, :, None]
            weight = tl.trans(tl.reshape(weight.to(x.dtype.element_ty), [OUTPUTS, UNITS * _UNIT]))
            inputs = (unit * HALVES + half) * _UNIT + column % _UNIT
            inside = (rows < count)[:, None] & (unit < row_units)[None, :]
            value = tl.load(x + rows[:, None] * stride_x + inputs[None, :], mask=inside, other=0.0)
            if WIDE:  # see few_rows_kernel
                value, weight = value.to(tl.float32), weight.to(tl.float32)
            sums = tl.dot(value, weight, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + outputs, mask=outputs < n, other=0.0).to(tl.float32)[None, :]
    place = y + rows[:, None] * n + outputs[None, :]
    tl.store(place, sums.to(y.dtype.element_ty), mask=(rows < count)[:, None] & (outputs < n)[None, :])


@triton.jit
def write_numbers_kernel(
    ids, values, scales, minima, levels, minimum_levels, table, y, count, k,
    HALVES: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LEVELS: tl.constexpr, MINIMUM: tl.constexpr, PICKS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Program (rows, piece): ``UNITS`` units of ``ROWS`` outputs, those that ``ids`` names if it ``PICKS``."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    units = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    byte = tl.arange(0, _UNIT)[None, None, :]
    row_units = k // (_UNIT * HALVES)
    live = (rows < count)[:, None] & (units < row_units)[None, :]
    outputs = rows
    if PICKS:
        outputs = tl.load(ids + rows, mask=rows < count, other=0)
    place = (outputs[:, None] * row_units + units[None, :]) * _UNIT
    codes = tl.load(values + place[:, :, None] + byte, mask=live[:, :, None], other=0)
    for half in tl.static_range(HALVES):
        inputs = ((units * HALVES + half) * _UNIT)[None, :]
        if half == 0 or GROUP < 32:
            scale, minimum = scales_of(
                scales, minima, levels, minimum_levels, outputs[:, None], inputs, live, k,
                BLOCK, GROUP, LEVELS, MINIMUM,
            )  # fmt: skip
        part = (codes >> (4 * half)) & (15 if HALVES == 2 else 255)
        number = numbers_of(part, table, KIND, ZERO) * scale[:, :, None]
        if MINIMUM > 0:
            number -= minimum[:, :, None]
        target = y + (rows[:, None] * k + inputs)[:, :, None] + byte
        tl.store(target, number.to(y.dtype.element_ty), mask=live[:, :, None])


Options = dict[str, int]

ONE_ROW_STORED: tuple[Options, ...] = (
    {"OUTPUTS": 4, "UNITS": 32, "num_warps": 4}, {"OUTPUTS": 8, "UNITS": 32, "num_warps": 4},
    {"OUTPUTS": 4, "UNITS": 64, "num_warps": 4},
)  # fmt: skip
FEW_ROWS_STORED: tuple[Options, ...] = (
    {"OUTPUTS": 32, "UNITS": 8, "num_warps": 4, "num_stages": 4},
    {"OUTPUTS": 16, "UNITS": 16, "num_warps": 2, "num_stages": 4},
    {"OUTPUTS": 64, "UNITS": 8, "num_warps": 4, "num_stages": 3},
)
"""What is tried for a linear, and measured: see :data:`memserve.model.gpu.linears.FEW_ROWS`."""

_WRITES: Options = {"ROWS": 4, "UNITS": 32, "num_warps": 4}


def _arguments(weight: DeviceWeight) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Of the kernels: the tensors of ``weight``, and what is fixed for its format."""
    of, values = weight.layout, weight.values
    optional = (weight.minima, weight.levels, weight.minimum_levels, weight.table)
    tensors = (values, weight.scales, *(values if tensor is None else tensor for tensor in optional))
    return tensors, {
        "HALVES": 2 if of.has_halves else 1, "KIND": _FLOATS if of.is_float else _TABLE if of.table else _INTEGERS,
        "ZERO": of.zero, "BLOCK": of.block, "GROUP": of.group, "LEVELS": int(weight.levels is not None),
        "MINIMUM": _MINIMA[of.minimum],
    }  # fmt: skip


def one_row_stored(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None, dtype: torch.dtype, options: Options
) -> Tensor:
    """``x [..., k]`` of one row times ``weight [n, k]`` transposed, plus ``bias [n]``: ``[..., n]`` of ``dtype``. Sums
    are float32, and weights are not rounded."""
    n, k = weight.shape
    tensors, fixed = _arguments(weight)
    y = torch.empty(n, dtype=dtype, device=x.device)
    one_row_stored_kernel[(ceil_div(n, options["OUTPUTS"]),)](
        weight.order_inputs(x).reshape(k), *tensors, y if bias is None else bias, y, n, k,
        BIAS=bias is not None, **fixed, **options,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def few_rows_stored(
    x: Tensor, weight: DeviceWeight, bias: Tensor | None, dtype: torch.dtype, options: Options
) -> Tensor:
    """As :func:`one_row_stored` for one row or several; up to 64 make sense. Weights are rounded to the dtype of
    ``x``."""
    n, k = weight.shape
    tensors, fixed = _arguments(weight)
    flat = weight.order_inputs(x).reshape(-1, k)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    count = len(flat)
    y = torch.empty((count, n), dtype=dtype, device=x.device)
    few_rows_stored_kernel[(ceil_div(n, options["OUTPUTS"]),)](
        flat, *tensors, y if bias is None else bias, y, count, n, k, flat.stride(0),
        ROWS=max(16, 1 << (count - 1).bit_length()), BIAS=bias is not None, WIDE=x.device.type == "cpu",
        **fixed, **options,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def write_numbers(weight: DeviceWeight, y: Tensor, ids: Tensor | None = None) -> Tensor:
    """The weights of outputs ``ids``, int64 ``[count]``, contiguous (None: all of them), in the order of the packed
    inputs: fills ``y [count, k]``, contiguous, and returns it."""
    (count, k), (tensors, fixed) = y.shape, _arguments(weight)
    if count:
        pieces = ceil_div(ceil_div(k, UNIT_BYTES * fixed["HALVES"]), _WRITES["UNITS"])
        write_numbers_kernel[(ceil_div(count, _WRITES["ROWS"]), pieces)](
            tensors[0] if ids is None else ids, *tensors, y, count, k, PICKS=ids is not None, **fixed, **_WRITES
        )
    return y


class DeviceQuantisedLinear(JoinedLinear, StoredLinear):
    """As :class:`memserve.model.linears.JoinedLinear`, with a weight that stays quantised."""

    __slots__ = ("_panel",)
    weight: DeviceWeight

    def __init__(self, weight: DeviceWeight, bias: Tensor | None, panel: Tensor, *, wide: bool = False) -> None:
        """``weight [n, k]``, ``bias [n]``; ``panel``: uint8, memory for the numbers of some outputs at a time, which
        layers that compute one after the other share. ``wide``: results are float32."""
        self.weight, self.bias, self.wide, self._panel = weight, bias, wide, panel
        self._kernels = {}

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""
        return self.weight.shape

    def compute_plain(self, x: Tensor) -> Tensor:
        """As :meth:`__call__`, by torch: a panel of the weight after the other."""
        (n, k), room = self.weight.shape, self._panel.view(self.weight.dtype)
        x, most = self.weight.order_inputs(x), max(1, len(room) // k)
        y = torch.empty((*x.shape[:-1], n), dtype=self.dtype, device=x.device)
        product = wide_linear if self.dtype != x.dtype else torch.nn.functional.linear
        for first in range(0, n, most):
            part = self.weight.cut(first, min(most, n - first))
            numbers = write_numbers(part, room[: part.n * k].view(part.n, k))
            bias = None if self.bias is None else self.bias[first : first + part.n]
            y[..., first : first + part.n] = product(x, numbers, bias)
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`memserve.model.quantised.StoredLinear`."""
        flat = ids.reshape(-1).contiguous()
        numbers = torch.empty((len(flat), self.weight.k), dtype=dtype, device=ids.device)
        write_numbers(self.weight, numbers, flat)
        return self.weight.restore_inputs(numbers).view(*ids.shape, self.weight.k)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :class:`memserve.model.quantised.StoredLinear`."""
        numbers = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
        return self.weight.restore_inputs(write_numbers(self.weight, numbers))
