"""Linears with weights as a file stores them: integers of 2 to 8 bits with a scale a group, never rounded again.

A step of few rows is bound by reading the weights, and these are a quarter to a half of the bytes of bfloat16. The
kernels (``_kernels.quantised_linear``) multiply integers: activations are rounded to int8 with a scale for 32 of them,
as llama.cpp does, or to 15 bits where a model's answers need them: as quick where few rows are multiplied, as quick as
bfloat16 where many are. An exact layer computes with the weights as numbers instead, in the dtype of the activations.
Numbers of 8 bits (FP8) are multiplied as they are, with activations as they are.

Two-dimensional tensors of GGUF files are packed as they lie in the file; integers of AWQ and GPTQ checkpoints, with a
scale and a zero point a group, once they are apart (:meth:`QuantisedWeight.of_groups`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.errors import UserError
from memserve.base.types import COARSE_BITS

FORMATS = tuple(_kernels.QUANTISED_FORMATS)
"""GGUF's names; ``INT4_32``, ``INT4_128``, ``INT8_32``, ``INT8_128``: integers in groups of so many inputs; ``FP8_32``,
``FP8_128``: numbers of 8 bits (e4m3) with a float for so many."""

_GROUPS = {name: int(name.rpartition("_")[2]) for name in FORMATS if name.startswith("INT")}
_BLOCKS_OF_FLOATS = {name: int(name.rpartition("_")[2]) for name in FORMATS if name.startswith("FP8")}
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT = (torch.float32, torch.bfloat16)
_NAN = 0x7F  # of e4m3, whatever its sign
_MARK = "memserve_is_quantised"


def rounds_activations(format: str) -> bool:
    """Whether activations become integers before they meet weights of ``format``."""
    return format not in _BLOCKS_OF_FLOATS


def mark_quantised(module: Any) -> None:
    """From now on :func:`is_quantised` holds of ``module``."""
    setattr(module, _MARK, True)


def is_quantised(module: Any) -> bool:
    """Whether weights of ``module`` come from fewer bits than those of its dtype. Rounding then makes more of a
    difference to its logits."""
    return bool(getattr(module, _MARK, False))


class Stacked(Protocol):
    """A quantised weight ``[n, k]``, as far as stacking it with others goes."""

    @property
    def format(self) -> str:
        """One of :data:`FORMATS`."""

    @property
    def n(self) -> int:
        """Outputs."""

    @property
    def k(self) -> int:
        """Inputs."""

    @property
    def inputs(self) -> Tensor | None:
        """See :class:`QuantisedWeight`."""


def can_follow(weight: Stacked, following: Stacked) -> bool:
    """Whether ``following`` can come after ``weight`` in one layer: the same format and inputs in the same order, and
    ``weight`` ends with a whole strip of the kernels."""
    alike = (weight.format, weight.k) == (following.format, following.k) and weight.n % _kernels.QUANTISED_STRIP == 0
    if weight.inputs is None or following.inputs is None:
        return alike and weight.inputs is following.inputs
    return alike and torch.equal(weight.inputs, following.inputs)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight ``[n, k]`` in the layout of the kernels: ``packed`` uint8, one-dimensional, strips of 32 outputs.

    ``inputs``, int64 ``[k]``: which input each packed one is, where a group's are no neighbours; None: the same."""

    format: str
    n: int
    k: int
    packed: Tensor
    inputs: Tensor | None = None

    @staticmethod
    def of_blocks(format: str, blocks: Tensor, k: int, order: Tensor | None = None) -> QuantisedWeight:
        """Pack the rows of a GGUF tensor: ``blocks`` uint8 ``[n, bytes of a row]``, contiguous, as in the file.

        ``order``, int64 ``[n]``: which row of the file each output is; None: the same. Raises :class:`UserError` for an
        unknown format, and for a size that does not fit the format's blocks.
        """
        n = blocks.shape[0]
        packed = _room(format, n, k)
        expected = _kernels.quantised_file_bytes(format, n, k)
        if blocks.dtype != torch.uint8 or not blocks.is_contiguous() or blocks.numel() != expected:
            raise UserError(f"a {format} weight of {n} x {k} has {expected} bytes, not {blocks.numel()}")
        if order is not None and (order.shape != (n,) or order.dtype != torch.int64 or not _is_within(order, n)):
            raise UserError(f"an order of {n} rows has {n} numbers below {n}")
        rows = None if order is None else order.contiguous()
        _kernels.quantised_pack(
            format, blocks.data_ptr(), 0 if rows is None else rows.data_ptr(), n, k, packed.data_ptr()
        )
        return QuantisedWeight(format, n, k, packed)

    @staticmethod
    def of_groups(
        format: str, values: Tensor, scales: Tensor, zeros: Tensor, inputs: Tensor | None = None
    ) -> QuantisedWeight:
        """Pack integers with zero points: ``weight = (values - zeros) * scales``, of each group of inputs.

        ``values`` uint8 ``[n, k]``, ``scales`` and ``zeros`` float16 ``[n, k / group]``, all in the order of
        ``inputs`` (see :class:`QuantisedWeight`). Raises :class:`UserError` for an unknown format, for other shapes and
        for integers that the format does not hold.
        """
        (n, k), group = values.shape, _GROUPS.get(format, 0)
        if not group:
            raise UserError(f"{format} is no format of grouped integers", hint=f"one of {', '.join(_GROUPS)}")
        packed = _room(format, n, k)
        if scales.shape != (n, k // group) or zeros.shape != scales.shape:
            raise UserError(f"a {format} weight of {n} x {k} has {n} x {k // group} scales and zero points")
        if values.dtype != torch.uint8 or (format.startswith("INT4") and int(values.max()) > 15):
            raise UserError(f"a {format} weight has values beyond its bits")
        values, scales, zeros = values.contiguous(), scales.half().contiguous(), zeros.half().contiguous()
        addresses = values.data_ptr(), scales.data_ptr(), zeros.data_ptr()
        _kernels.quantised_pack_groups(format, *addresses, n, k, packed.data_ptr())
        if inputs is not None and not torch.equal(inputs.sort().values, torch.arange(k)):
            raise UserError(f"an order of {k} inputs has each of them once")
        return QuantisedWeight(format, n, k, packed, inputs)

    @staticmethod
    def of_floats(format: str, values: Tensor, scales: Tensor) -> QuantisedWeight:
        """Pack numbers of 8 bits: ``weight = values * scales``, of each block of inputs.

        ``values`` float8_e4m3fn ``[n, k]``, ``scales`` float32 ``[n, k / block]``. Raises :class:`UserError` for an
        unknown format, for other shapes, and for a number that is NaN."""
        (n, k), block = values.shape, _BLOCKS_OF_FLOATS.get(format, 0)
        if not block or values.dtype != torch.float8_e4m3fn:
            raise UserError(f"{format} is no format of {values.dtype}", hint=f"one of {', '.join(_BLOCKS_OF_FLOATS)}")
        packed, codes, scales = _room(format, n, k), values.contiguous().view(torch.uint8), scales.float().contiguous()
        if scales.shape != (n, k // block):
            raise UserError(f"a {format} weight of {n} x {k} has {n} x {k // block} scales")
        if bool((codes & _NAN == _NAN).any()):
            raise UserError("a weight has numbers that are not finite (NaN)", hint="download all of it again")
        _kernels.quantised_pack_groups(format, codes.data_ptr(), scales.data_ptr(), 0, n, k, packed.data_ptr())
        return QuantisedWeight(format, n, k, packed)

    def cut(self, outputs: Tensor, blocks: Tensor | None = None) -> QuantisedWeight:
        """Some ``outputs``, and some blocks of inputs (None: all), int64 both and in any order, as a weight of its own.

        Raises :class:`UserError` for places beyond the weight, and for blocks of inputs in an order of their own."""
        size = _kernels.quantised_block_inputs(self.format)
        count = self.k // size
        own = torch.arange(count) if blocks is None else blocks.contiguous()
        is_kept = blocks is None or self.inputs is None
        if not (is_kept and _is_within(outputs, self.n) and _is_within(own, count) and len(outputs) and len(own)):
            raise UserError(f"a {self.format} weight of {self.n} x {self.k} has no such part")
        n, k, outputs = len(outputs), len(own) * size, outputs.contiguous()
        packed = _room(self.format, n, k)
        addresses = self.packed.data_ptr(), outputs.data_ptr(), own.data_ptr()
        _kernels.quantised_cut(self.format, *addresses, self.k, n, len(own), packed.data_ptr())
        return QuantisedWeight(self.format, n, k, packed, self.inputs)


class StoredLinear(ABC):
    """A linear with a weight that stays quantised, on whatever processor."""

    #: address of the only weight as numbers, where it has such: an embedding tied to it can be read from here
    source = 0

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """``(n, k)``: outputs and inputs."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``x [..., k]`` -> ``[..., n]``"""

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of outputs ``ids [...]``, int64 -> ``[..., k]``: an embedding. ``ids`` are trusted to be below
        ``n``."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight ``[n, k]`` as numbers."""


class QuantisedLinear(StoredLinear):
    """``y = x @ weight.T + bias`` with a quantised ``weight [n, k]``, possibly several weights stacked.

    As :class:`memserve.model.linears.PackedLinear`, for any number of rows."""

    __slots__ = (
        "_bias_address", "_format", "activation_bits", "bias", "exact", "format", "inputs", "k", "n",
        "weight", "wide",
    )  # fmt: skip

    is_ours = True  # every product is by our kernels

    def __init__(
        self,
        weights: Sequence[QuantisedWeight],
        bias: Tensor | None = None,
        *,
        wide: bool = False,
        exact: bool = False,
        activation_bits: int = COARSE_BITS,
    ) -> None:
        """``weights`` can follow each other (:func:`can_follow`); ``bias [n]`` of any dtype.

        ``wide``: results are the float32 sums, whatever the dtype of ``x``: for logits. ``exact``: the arithmetic is
        that of a float32 or bfloat16 weight with the dequantised values; else activations have ``activation_bits``, one
        of :data:`memserve.base.types.ACTIVATION_BITS`. Raises :class:`UserError` for weights that
        cannot be joined.
        """
        if not all(can_follow(weight, following) for weight, following in pairwise(weights)):
            raise UserError("only weights of one format and of whole strips can be joined")
        self.format, self.k = weights[0].format, weights[0].k
        self.n = sum(weight.n for weight in weights)
        self.weight = weights[0].packed if len(weights) == 1 else torch.cat([weight.packed for weight in weights])
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.wide = wide
        self.exact = exact
        self.activation_bits = activation_bits
        self.inputs = weights[0].inputs
        self._format = FORMATS.index(self.format)
        self._bias_address = 0 if self.bias is None else self.bias.data_ptr()

    @property
    def is_native(self) -> bool:
        """True when a program can hold this layer: results have the dtype of the inputs, which are taken in order."""
        return not self.wide and not self.exact and self.inputs is None

    def append_to(
        self, program: _kernels.Program, x: int, stride_x: int, y: int, dtype: torch.dtype, count: int
    ) -> None:
        """Append the product to ``program``: see :class:`memserve._kernels.Program`."""
        program.quantised_linear(
            x, stride_x, self.weight.data_ptr(), self._bias_address, y, self.k, self.n, self._format,
            self.activation_bits, _CODES[dtype], count,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``"""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Of the packed weight."""
        return self.weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """``x [..., k]`` float32, bfloat16 or float16 -> ``[..., n]``, of its dtype, or float32 if ``wide``."""
        dtype = torch.float32 if self.wide else x.dtype
        if (self.exact or not rounds_activations(self.format)) and x.dtype not in _EXACT:
            return self(x.float()).to(dtype)
        x = x.contiguous() if self.inputs is None else x.index_select(-1, self.inputs)
        y = torch.empty((*x.shape[:-1], self.n), dtype=dtype)
        rows = x.numel() // self.k
        _kernels.quantised_linear(
            x.data_ptr(), self.k, self.weight.data_ptr(), self._bias_address, y.data_ptr(), self.n,
            rows, self.k, self.n, self._format, _CODES[x.dtype], _CODES[dtype],
            0 if self.exact else self.activation_bits,
        )  # fmt: skip
        return y

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`StoredLinear`."""
        ids = ids.contiguous()
        y = torch.empty((*ids.shape, self.k), dtype=dtype)
        _kernels.quantised_gather(
            self.weight.data_ptr(), ids.data_ptr(), ids.numel(), y.data_ptr(), self.k, self._format, _CODES[dtype]
        )
        return y if self.inputs is None else y.index_select(-1, self.inputs.argsort())

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See :class:`StoredLinear`."""
        return self.rows(torch.arange(self.n), dtype)


class QuantisedEmbedding:
    """The rows of a quantised weight, for a model with its embedding as output head: one copy serves both."""

    def __init__(self, layer: StoredLinear, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """``ids [...]`` int64 -> ``[..., k]``"""
        return self._layer.rows(ids, self._dtype)


def _room(format: str, n: int, k: int) -> Tensor:
    try:
        return torch.empty(_kernels.quantised_packed_bytes(format, n, k), dtype=torch.uint8)
    except ValueError as error:
        raise UserError(f"a weight of {n} x {k} cannot be packed: {error}") from error


def _is_within(order: Tensor, n: int) -> bool:
    return not n or (int(order.min()) >= 0 and int(order.max()) < n)
