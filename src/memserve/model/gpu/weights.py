"""Quantised weights as tensors of a GPU.

On the host a weight is packed as for the kernels of a CPU (:class:`memserve.model.quantised.QuantisedWeight`); its
bytes go to the device, and become there what :mod:`memserve.model.gpu.quantised` reads: up to 4 bits two to a byte,
more in a byte of their own, with the file's own scales beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memserve import _kernels
from memserve.model.quantised import QuantisedWeight

UNIT_BYTES = 16
"""Codes lie in units of so many bytes."""
_STRIP, _GROUP, _STEPS, _STEP_INPUTS = 32, 32, 8, 4  # of packed weights: see src/kernels/quantised.h
_UNPACKED_AT_ONCE = 1 << 24  # values


class WeightLayout(NamedTuple):
    """``Layout`` of src/kernels/quantised.h: what weights of a format are on every processor."""

    bits: int
    scale: str
    minimum: str
    zero: int
    groups: int
    parts: int
    table: list[int]
    is_float: bool

    @property
    def block(self) -> int:
        """Inputs that share a number."""
        return self.groups * _GROUP

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return _GROUP // self.parts if self.scale == "levels" else self.block

    @property
    def has_halves(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits <= 4

    @property
    def numbers(self) -> int:
        """Of a block of an output: its scale, and a minimum or zero point."""
        return 1 if self.minimum == "none" else 2

    @property
    def number_dtype(self) -> torch.dtype:
        """Of scales and minima."""
        return {"bfloat": torch.bfloat16, "single": torch.float32}.get(self.scale, torch.float16)


@cache
def layout_of(format: str) -> WeightLayout:
    """Raises ``ValueError`` for an unknown format."""
    return WeightLayout(*_kernels.quantised_layout(format))


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight ``[n, k]`` on a device; all tensors have a row for each output."""

    format: str
    k: int
    dtype: torch.dtype
    """Of the numbers, where products need them as such."""
    values: Tensor
    """uint8 ``[n, k]``, or ``[n, k / 2]`` with two codes in a byte."""
    scales: Tensor
    """``[n, blocks]``"""
    minima: Tensor | None = None
    """``[n, blocks]``; of grouped integers zero points."""
    levels: Tensor | None = None
    """int8 ``[n, groups]``: what multiplies the scale of a block."""
    minimum_levels: Tensor | None = None
    """The same for minima."""
    inputs: Tensor | None = None
    """See :class:`memserve.model.quantised.QuantisedWeight`."""

    @property
    def layout(self) -> WeightLayout:
        """Of its format."""
        return layout_of(self.format)

    @property
    def n(self) -> int:
        """Outputs."""
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.values.device

    @property
    def form(self) -> tuple[str, bool]:
        """What kernels differ by: the format, and whether inputs have an order of their own."""
        return self.format, self.inputs is not None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def table(self) -> Tensor | None:
        """float32 ``[16]``: what codes stand for; None: themselves."""
        return _table(self.format, self.device) if self.layout.table else None

    def _tensors(self) -> dict[str, Tensor]:
        names = ("values", "scales", "minima", "levels", "minimum_levels")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def _with_tensors(self, tensors: Mapping[str, Tensor]) -> DeviceWeight:
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def cut(self, first: int, count: int) -> DeviceWeight:
        """Outputs from ``first`` on, in the same memory."""
        return self._with_tensors({name: tensor[first : first + count] for name, tensor in self._tensors().items()})

    @staticmethod
    def joined(weights: Sequence[DeviceWeight]) -> DeviceWeight:
        """``weights`` of one format and order of inputs, one behind the other."""
        parts = [weight._tensors() for weight in weights]
        return weights[0]._with_tensors({name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def order_inputs(self, x: Tensor) -> Tensor:
        """``x [..., k]`` in the order of the codes."""
        return x if self.inputs is None else x.index_select(-1, self.inputs)

    def restore_inputs(self, numbers: Tensor) -> Tensor:
        """``numbers [..., k]`` in the order of the codes -> in that of the inputs."""
        return numbers if self.inputs is None else numbers.index_select(-1, self.inputs.argsort())


@cache
def _table(format: str, device: torch.device) -> Tensor:
    of = layout_of(format)
    return torch.tensor([float(entry - of.zero) for entry in of.table], device=device)


def unpack_weight(weight: QuantisedWeight, place: torch.device, dtype: torch.dtype) -> DeviceWeight:
    """``weight`` on a device: ``n`` rows, some strips at a time."""
    of = layout_of(weight.format)
    strips = weight.packed.view(-(-weight.n // _STRIP), weight.k // of.block, -1)
    count = max(1, _UNPACKED_AT_ONCE // (_STRIP * weight.k))
    parts = [_unpack_strips(strips[first : first + count].to(place), of) for first in range(0, len(strips), count)]
    tensors = {name: torch.cat([part[name] for part in parts])[: weight.n] for name in parts[0]}
    inputs = None if weight.inputs is None else weight.inputs.to(place)
    return DeviceWeight(weight.format, weight.k, dtype, inputs=inputs, **tensors)


def _unpack_strips(strips: Tensor, of: WeightLayout) -> dict[str, Tensor]:
    """``strips``: uint8 ``[strips, blocks, bytes]`` -> tensors with a row for each of their outputs."""
    number_bytes = _STRIP * max(of.numbers * of.number_dtype.itemsize, 2)
    small_count = of.groups * of.parts if of.scale == "levels" else 0
    level_bytes = _STRIP * small_count * (2 if of.minimum == "levels" else 1)
    numbers, levels, codes = strips.split_with_sizes(
        [number_bytes, level_bytes, strips.shape[2] - number_bytes - level_bytes], dim=2
    )
    by_output = numbers.contiguous().view(of.number_dtype).view(*strips.shape[:2], of.numbers, _STRIP)
    tensors = dict(zip(("scales", "minima"), map(_rows, by_output.unbind(2)), strict=False))
    if small_count:
        small = levels.contiguous().view(torch.int8).view(*strips.shape[:2], -1, small_count, _STRIP)
        tensors |= zip(("levels", "minimum_levels"), map(_rows, small.unbind(2)), strict=False)
    # groups of inputs, halves of a strip, lines, outputs, inputs of a step
    lines = codes.reshape(*strips.shape[:2], of.groups, 2, of.bits, _STRIP // 2, _STEP_INPUTS)
    steps = _steps_of(lines, of.bits).permute(0, 3, 5, 1, 2, 4, 6)
    values = steps.reshape(len(strips) * _STRIP, -1)
    if of.has_halves:
        halves = values.view(len(values), -1, 2, UNIT_BYTES)
        values = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return {"values": values, **tensors}


def _rows(numbers: Tensor) -> Tensor:
    """``[strips, blocks, ..., outputs]`` -> ``[strips * outputs, blocks * ...]``"""
    return numbers.movedim(-1, 1).flatten(0, 1).flatten(1)


def _steps_of(lines: Tensor, bits: int) -> Tensor:
    """Bits of lines ``[..., bits, outputs, inputs]`` -> codes ``[..., steps, outputs, inputs]``: see
    src/kernels/quantised_values.h."""
    if bits == 8:
        return lines
    low = 4 if bits >= 4 else 2
    codes = _split_bytes(lines[..., :low, :, :], low)
    return codes if bits == low else codes | _split_bytes(lines[..., low:, :, :], bits - low) << low


def _split_bytes(lines: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=lines.device)[:, None, None]
    return (lines.unsqueeze(-3) >> shifts & (1 << bits) - 1).flatten(-4, -3)
