"""A weight that several tensors of a checkpoint describe, as the numbers that it stands for or in the kernels' form.

Whatever a format calls its parts, a weight is one of three things: integers with a scale and a zero point for a group
of inputs (:class:`GroupedTensor`), numbers of 8 bits with a scale for a block (:class:`ScaledTensor`), or numbers of 4
bits with an exponent for 32 inputs (:class:`Mxfp4Tensor`). Numbers are products in float32, rounded once to the dtype
that is asked for; a package that multiplies in 16 bits rounds there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.formats.files import Outputs, row_chunks
from memserve.model.loading.pages import drop_file_pages
from memserve.model.quantised import QuantisedLinear, QuantisedWeight, Stacked

Read = Callable[[], Tensor]

_GROUPS = (128, 32)
"""Inputs of a group in the kernels' forms, the better first."""
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # inputs with one exponent


class StoredForm(Stacked, Protocol):
    """A weight that the kernels can compute with as it is stored, not read yet."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""

    def packed(self) -> QuantisedWeight:
        """The weight in the layout of the kernels. It is packed once, until :meth:`forget_packed`."""

    def forget_packed(self) -> None:
        """Keep no packed weight any longer: it is in its layer."""

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of some outputs as numbers."""


class PackedOnce(ABC):
    """A :class:`StoredForm` that keeps what it has packed until that is in its layer."""

    __slots__ = ()
    _packs: list[QuantisedWeight]

    @abstractmethod
    def pack_weight(self) -> QuantisedWeight:
        """The weight in the layout of the kernels."""

    @property
    def shape(self: Stacked) -> tuple[int, int]:
        """``(n, k)``"""
        return self.n, self.k

    def packed(self) -> QuantisedWeight:
        """See :class:`StoredForm`."""
        if not self._packs:
            self._packs.append(self.pack_weight())
        return self._packs[0]

    def forget_packed(self) -> None:
        """See :class:`StoredForm`."""
        self._packs.clear()


class CheckpointTensor(Protocol):
    """A weight of a quantised checkpoint."""

    @property
    def name(self) -> str:
        """Of the weight in a checkpoint that is not quantised."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors that describe it, the largest first."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers."""

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The weight, dequantised. Raises :class:`UserError` for parts that have no meaning."""

    def form(self) -> StoredForm | str:
        """How the kernels compute with it, or why they cannot."""


@dataclass(frozen=True, slots=True)
class GroupedTensor:
    """``weight = (integers - zeros) * scales``, by groups of ``size`` inputs, of a weight ``[n, k]``."""

    name: str
    parts: tuple[str, ...]
    n: int
    k: int
    bits: int
    size: int
    words: Read
    """The packed integers, mapped."""
    unpack: Callable[[Tensor, Outputs], Tensor]
    """Of some outputs, from the words: uint8 ``[outputs, k]``."""
    scales: Read
    """``[n, groups]``, floating point."""
    zeros: Read
    """``[n, groups]``"""
    order: Read | None = None
    """Which group each input belongs to, ``[k]``; None: inputs of a group are neighbours."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""
        return self.n, self.k

    @property
    def groups(self) -> int:
        """Of a row."""
        return -(-self.k // self.size)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """See :class:`CheckpointTensor`."""
        result, words = torch.empty(self.shape, dtype=dtype), self.words()
        scales, zeros = _finite(self.name, self.scales()), self.zeros()
        groups = None if self.order is None and self.k % self.size == 0 else self._group_of_inputs()
        for rows in row_chunks(self.shape):
            integers, zero, scale = self.unpack(words, rows).float(), zeros[rows].float(), scales[rows].float()
            if groups is None:  # without a number for each input
                of_groups = integers.view(len(integers), -1, self.size)
                of_groups.sub_(zero[..., None]).mul_(scale[..., None])
            else:
                integers.sub_(zero[:, groups]).mul_(scale[:, groups])
            result[rows] = integers
        drop_file_pages(words)
        return result

    def form(self) -> StoredForm | str:
        """See :class:`CheckpointTensor`."""
        size, inputs = self.size, None
        if self.order is not None:
            groups = self._group_of_inputs()
            if not torch.equal(groups, torch.arange(self.k) // size):
                if len(set(groups.bincount(minlength=self.groups).tolist())) > 1:
                    return "its groups of inputs (g_idx) are not of one size"
                size, inputs = self.k // self.groups, groups.argsort(stable=True)
        if self.k % _BLOCK or size % _BLOCK:
            return f"it has groups of {size} of {self.k} inputs, no multiples of {_BLOCK}"
        scales = _finite(self.name, self.scales())
        if not torch.equal(scales.half().to(scales.dtype), scales):
            return f"its scales ({str(scales.dtype)[6:]}) are no float16 numbers"
        group = next(group for group in _GROUPS if size % group == 0 and self.k % group == 0)
        places = torch.arange(0, self.k, group) // size
        return _GroupedForm(f"INT{4 if self.bits <= 4 else 8}_{group}", self, inputs, places)

    def _group_of_inputs(self) -> Tensor:
        if self.order is None:
            return torch.arange(self.k) // self.size
        order = self.order().long()
        if int(order.min()) < 0 or int(order.max()) >= self.groups:
            message = f"{self.name}: its order of inputs (g_idx) names groups beyond the {self.groups} that it has"
            raise UserError(message, hint="download all of it again", param="model")
        return order


@dataclass(frozen=True, slots=True)
class _GroupedForm(PackedOnce):
    """A :class:`GroupedTensor` in the kernels' form; ``places``: which of its groups each of the form's is."""

    format: str
    tensor: GroupedTensor
    inputs: Tensor | None
    places: Tensor
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def n(self) -> int:
        """Outputs."""
        return self.tensor.n

    @property
    def k(self) -> int:
        """Inputs."""
        return self.tensor.k

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`."""
        return self._of(row_chunks(self.shape), slice(None))

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`StoredForm`."""
        return QuantisedLinear([self._of([outputs], outputs)]).dequantised(dtype)

    def _of(self, chunks: Iterable[Outputs], outputs: Outputs) -> QuantisedWeight:
        """The weight of ``outputs``, which are those of ``chunks`` together."""
        words = self.tensor.words()
        parts = [self.tensor.unpack(words, rows) for rows in chunks]
        integers = parts[0] if len(parts) == 1 else torch.cat(parts)
        integers = integers if self.inputs is None else integers[:, self.inputs]
        scales, zeros = (part()[outputs][:, self.places] for part in (self.tensor.scales, self.tensor.zeros))
        weight = QuantisedWeight.of_groups(self.format, integers, scales, zeros, self.inputs)
        drop_file_pages(words)
        return weight


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """``weight = values * scales``, by blocks of a weight ``[..., n, k]``."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    block: tuple[int, int]
    """Outputs and inputs with one scale."""
    values: Read
    scales: Read
    """``[..., blocks of outputs, blocks of inputs]``"""

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """See :class:`CheckpointTensor`."""
        (n, k), (rows_of_block, inputs_of_block) = self.shape[-2:], self.block
        result, inputs = torch.empty(self.shape, dtype=dtype), torch.arange(k) // inputs_of_block
        read = self.values()
        values = read.view(-1, n, k)
        scales = _finite(self.name, self.scales().float()).expand(*self.shape[:-2], -1, -1)
        scales = scales.reshape(len(values), *scales.shape[-2:])
        for index, matrix in enumerate(result.view(-1, n, k)):
            for rows in row_chunks((n, k)):
                outputs = torch.arange(rows.start, rows.stop) // rows_of_block
                matrix[rows] = values[index, rows].float() * scales[index][outputs][:, inputs]
        drop_file_pages(read)
        return result

    def form(self) -> StoredForm | str:
        """See :class:`CheckpointTensor`."""
        if len(self.shape) != 2:
            return "it is a stack of experts"
        if self.values().dtype != torch.float8_e4m3fn:
            return "numbers of 8 bits with 5 of them for the exponent (e5m2) have no kernel"
        k, inputs = self.shape[1], min(self.block[1], self.shape[1])
        if k % _BLOCK or inputs % _BLOCK:
            return f"it has scales for {inputs} of {k} inputs, no multiples of {_BLOCK}"
        _finite(self.name, self.scales().float())
        size = next(size for size in _GROUPS if k % size == 0 and inputs % size == 0)
        return _ScaledForm(f"FP8_{size}", self)


@dataclass(frozen=True, slots=True)
class _ScaledForm(PackedOnce):
    """A :class:`ScaledTensor` in the kernels' form."""

    format: str
    tensor: ScaledTensor
    inputs: Tensor | None = None
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def n(self) -> int:
        """Outputs."""
        return self.tensor.shape[0]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.tensor.shape[1]

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`."""
        return self._of(torch.arange(self.n))

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`StoredForm`."""
        return QuantisedLinear([self._of(outputs)]).dequantised(dtype)

    def _of(self, outputs: Tensor) -> QuantisedWeight:
        read, (rows_of_block, inputs_of_block) = self.tensor.values(), self.tensor.block
        codes = read.view(torch.uint8)
        codes = codes if len(outputs) == self.n else codes[outputs]
        places = torch.arange(0, self.k, int(self.format.rpartition("_")[2])) // inputs_of_block
        scales = self.tensor.scales().float()[outputs // rows_of_block][:, places]
        weight = QuantisedWeight.of_floats(self.format, codes.view(read.dtype), scales)
        drop_file_pages(read)
        return weight


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """Numbers of 4 bits (e2m1), two in a byte, times powers of two: ``blocks`` uint8 ``[..., n, k / 32, 16]``,
    ``exponents`` uint8 ``[..., n, k / 32]``. ``turned``: the weight is ``[..., k, n]``."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    blocks: Read
    exponents: Read
    turned: bool = False

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """See :class:`CheckpointTensor`."""
        read, exponents = self.blocks(), self.exponents()
        blocks, exponents = read.view(-1, *read.shape[-3:]), exponents.view(-1, *exponents.shape[-2:], 1)
        result = torch.empty(self.shape, dtype=dtype)
        table = torch.tensor(_FLOAT4)
        for matrix, block, exponent in zip(result.view(-1, *self.shape[-2:]), blocks, exponents, strict=True):
            place = matrix.t() if self.turned else matrix
            for rows in row_chunks((len(block), block.shape[1] * _BLOCK)):
                halves = torch.stack((block[rows] & 15, block[rows] >> 4), -1).flatten(-2).int()
                place[rows] = torch.ldexp(table[halves], exponent[rows].int() - 127).flatten(1)
        drop_file_pages(read)
        return result

    def form(self) -> StoredForm | str:
        """See :class:`CheckpointTensor`."""
        return _Mxfp4Form(self) if len(self.shape) == 2 and not self.turned else "it is a stack of experts"

    def experts(self) -> tuple[StoredForm, ...]:
        """How the kernels compute with each expert of a stack ``[experts, k, n]``; none: it is none."""
        if len(self.shape) != 3 or not self.turned:
            return ()
        return tuple(_Mxfp4Form(self, expert) for expert in range(self.shape[0]))


@dataclass(frozen=True, slots=True)
class _Mxfp4Form(PackedOnce):
    """An :class:`Mxfp4Tensor`, or one ``expert`` of it, in the blocks of a GGUF file: an exponent, then the first half
    of 32 values in the low four bits of bytes and the second half in the high ones."""

    tensor: Mxfp4Tensor
    expert: int | None = None
    format: str = "MXFP4"
    inputs: Tensor | None = None
    _packs: list[QuantisedWeight] = field(default_factory=list, compare=False, repr=False)

    @property
    def n(self) -> int:
        """Outputs."""
        return self.tensor.shape[-1 if self.tensor.turned else -2]

    @property
    def k(self) -> int:
        """Inputs."""
        return self.tensor.shape[-2 if self.tensor.turned else -1]

    def pack_weight(self) -> QuantisedWeight:
        """See :class:`PackedOnce`."""
        return self._of(slice(None))

    def sampled(self, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`StoredForm`."""
        return QuantisedLinear([self._of(outputs)]).dequantised(dtype)

    def _of(self, outputs: Outputs) -> QuantisedWeight:
        read, exponents = self.tensor.blocks(), self.tensor.exponents()
        if self.expert is not None:
            read, exponents = read[self.expert], exponents[self.expert]
        pairs = read[outputs]
        values = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)  # [n, k / 32, 32]
        halves = values[..., : _BLOCK // 2] | values[..., _BLOCK // 2 :] << 4
        blocks = torch.cat((exponents[outputs][..., None], halves), -1)
        drop_file_pages(read)
        return QuantisedWeight.of_blocks("MXFP4", blocks.flatten(1).contiguous(), self.k)


def _finite(name: str, scales: Tensor) -> Tensor:
    if not bool(torch.isfinite(scales).all()):
        message = f"{name} has scales that are not finite (NaN or infinite)"
        raise UserError(message, hint="download all of it again", param="model")
    return scales


def values_of(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of this shape has."""
    return math.prod(shape)
