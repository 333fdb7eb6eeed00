"""Linears with packed weights: oneDNN for many rows, a kernel of ours for few, one copy of the weights.

oneDNN packs a weight into blocks of 64 outputs, or of 32 where the processor has matrix units (AMX). Its matrix product
reads them well from many rows on. With few rows a step is bound by memory, and there oneDNN reaches about half of the
bandwidth. Our kernel (``_kernels.linear``) reads the very same blocks, so nothing is kept twice. The block format is
private to oneDNN; it is therefore checked by computing with it when a weight is packed, and a weight that does not pass
is left to oneDNN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from memserve import _kernels
from memserve.base.errors import InvariantError
from memserve.model.loading.pages import reserve_weight

ROWS_NATIVE_MAX = 128
"""Up to this many rows our kernel is faster than oneDNN (1.6 times at one row, 1.1 at 128; equal at 512)."""

_BUCKETS_OF_A_DOUBLING = 8
_TILE_ROWS = 16  # of a matrix unit: padding to them costs nothing

_BLOCKS_OUTPUTS = (64, 32)  # the formats that our kernel reads
_ROWS_HINT = 8  # the number of rows for which oneDNN chooses a weight's layout
_WIDE_SLICE = 4096  # outputs
_BLOCK_INPUTS = {torch.float32: 16, torch.bfloat16: 32}
_CODES = {torch.float32: 0, torch.bfloat16: 1}


def bucket_rows(rows: int) -> int:
    """``rows`` rounded up to a row count that oneDNN is called with: all up to 16, then multiples of 16 up to 128, then
    8 per doubling.

    oneDNN builds and keeps a primitive for each row count that it sees: up to 0.8 MB and 6 ms of CPU each. Prompts have
    every length, so without this a prefill instance would build four in nearly every step, and keep hundreds.
    """
    if rows <= _TILE_ROWS:
        return max(rows, 1)
    step = max(_TILE_ROWS, (1 << (rows - 1).bit_length() - 1) // _BUCKETS_OF_A_DOUBLING)
    return -(-rows // step) * step


def in_bucket(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """``product(x)`` for ``x [..., k]``, computed over a bucket of rows; the padding rows are zeros."""
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    padded = torch.nn.functional.pad(flat, (0, 0, 0, bucket_rows(rows) - rows)) if bucket_rows(rows) > rows else flat
    y = product(padded)[:rows]
    return y.view(*x.shape[:-1], y.shape[-1])


class PackedLinear:
    """``y = x @ weight.T + bias`` with ``weight [n, k]``, possibly several weights stacked."""

    __slots__ = (
        "_address", "_bias_address", "_block", "_code", "_dense", "_inputs_padded", "_packed", "_rows_max",
        "bias", "k", "n", "source", "wide",
    )  # fmt: skip

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None, *, wide: bool = False) -> None:
        """``weights``: ``[n_i, k]`` each, all of one dtype; ``biases``: ``[n_i]`` each, or None.

        ``wide``: results are the float32 sums themselves, not rounded to the dtype. For logits: at their size, bfloat16
        has steps of an eighth, which makes ties between tokens that differ clearly.
        """
        weight = _joined(weights)
        self.wide = wide
        #: address of the only weight while it is packed: an embedding tied to it can be read from here
        self.source = weight.data_ptr() if len(weights) == 1 else 0
        self.n, self.k = weight.shape
        self.bias = None if biases is None else _joined(biases).clone()
        self._packed = _pack(weight)
        self._dense = weight.clone() if self._packed is None else None  # the module's own storage may be freed
        self._code = _CODES.get(weight.dtype, 0)
        self._bias_address = 0 if self.bias is None else self.bias.data_ptr()
        self._address, self._block = 0, _BLOCKS_OUTPUTS[0]
        self._rows_max = 0
        block_inputs = _BLOCK_INPUTS.get(weight.dtype, 1)
        self._inputs_padded = -(-self.k // block_inputs) * block_inputs
        if self._packed is not None:
            self._rows_max = ROWS_NATIVE_MAX if self._find_format(weight) else 0
        if wide and not self._rows_max and self._dense is None:
            self._dense = weight.clone()
            # Only our kernel gives float32 sums of 16-bit operands: without it the packed copy has no use.
            self._packed = self._packed if weight.dtype == torch.float32 else None

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``: outputs and inputs."""
        return self.n, self.k

    @property
    def is_native(self) -> bool:
        """True when a program can hold this layer: our kernel computes it, with results of the inputs' dtype."""
        return self._rows_max > 0 and not self.wide

    @property
    def is_ours(self) -> bool:
        """True when our kernel computes every product of up to ``ROWS_NATIVE_MAX`` rows."""
        return self._rows_max > 0

    @property
    def native_weights(self) -> tuple[int, int]:
        """Addresses of the packed weight and of the bias (0: none)."""
        return self._address, self._bias_address

    @property
    def native_sizes(self) -> tuple[int, int, int, int]:
        """``(k, k padded to whole blocks, n, outputs of a block)``"""
        return self.k, self._inputs_padded, self.n, self._block

    @property
    def code(self) -> int:
        """The dtype's number in ``_kernels``."""
        return self._code

    def __call__(self, x: Tensor) -> Tensor:
        """``x [..., k]`` -> ``[..., n]``, of the dtype of ``x``, or float32 if ``wide``."""
        if self.wide and x.dtype != torch.float32:
            return self._wide_product(x)
        if self._packed is None:
            return in_bucket(x, lambda rows: torch.nn.functional.linear(rows, self._plain_weight, self.bias))
        rows = x.numel() // self.k
        if rows <= self._rows_max:
            return self._few_rows(x, rows)
        return in_bucket(x, self._many_rows)

    def packed_blocks(self) -> Tensor | None:
        """The packed weight itself: ``[n / block, k, block]``, or ``[n / block, k / 2, block, 2]`` in bfloat16.

        None where it is padded.
        """
        if not self._rows_max or self._packed is None or self.n % self._block or self.k != self._inputs_padded:
            return None
        dtype, tail = (torch.float32, ()) if self._code == 0 else (torch.bfloat16, (2,))
        shape = (self.n // self._block, self.k // (2 if tail else 1), self._block, *tail)
        size = self.n * self.k * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(self._address)  # lives as long as this layer
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _few_rows(self, x: Tensor, rows: int) -> Tensor:
        x = x.contiguous()
        y = torch.empty((*x.shape[:-1], self.n), dtype=torch.float32 if self.wide else x.dtype)
        _kernels.linear(
            x.data_ptr(), self.k, self._address, self._bias_address, y.data_ptr(), self.n,
            rows, *self.native_sizes, self._code, self.wide,
        )  # fmt: skip
        return y

    def _many_rows(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]  # an operator: torch types none

    def _wide_product(self, x: Tensor) -> Tensor:
        """Float32 results. oneDNN has none for 16-bit weights, so our kernel takes any number of rows, else torch."""
        if self._rows_max:
            return self._few_rows(x, x.numel() // self.k)
        return wide_linear(x, self._plain_weight, self.bias)

    @property
    def _plain_weight(self) -> Tensor:
        if self._dense is None:
            raise InvariantError("a packed linear has freed its dense weight")
        return self._dense

    def _find_format(self, weight: Tensor) -> bool:
        """Find the block width with which our kernel computes what torch does; False: oneDNN uses another format."""
        for self._block in _BLOCKS_OUTPUTS:
            self._address = _address_of(self._packed, self.n, self._block, self._inputs_padded * weight.element_size())
            if self._address and self._reads_the_format(weight):
                return True
        return False

    def _reads_the_format(self, weight: Tensor) -> bool:
        """One row through our kernel and through torch: equal up to rounding only if the blocks are what we think.

        By slices: for a product torch copies a weight into a layout of its own, and a head is large."""
        x = torch.linspace(-1.0, 1.0, self.k, dtype=weight.dtype)[None]
        expected = torch.cat(
            [
                torch.nn.functional.linear(x, weight[first : first + _WIDE_SLICE])
                for first in range(0, self.n, _WIDE_SLICE)
            ],
            1,
        ).float()
        expected = expected if self.bias is None else expected + self.bias.float()
        tolerance = 2e-2 if weight.dtype == torch.bfloat16 else 1e-4
        scale = float(expected.abs().max()) + 1e-6
        return bool((self._few_rows(x, 1).float() - expected).abs().max() <= tolerance * scale)


Kernel = Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]
"""``(x [..., k], weight [n, k], bias [n] or None, dtype of the result) -> [..., n]``."""

ROW_BUCKETS = (1, 16, 32, 64)
"""Up to so many rows a linear on a GPU may have a kernel of its own."""


class JoinedLinear:
    """As :class:`PackedLinear` on a GPU: several weights stacked in one tensor, which the weights become parts of, so
    that a model is held once while it is captured."""

    __slots__ = ("_kernels", "bias", "weight", "wide")
    weight: Any
    """``[n, k]``: a tensor, or what its kernels read as one."""

    is_native = is_ours = False

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None, *, wide: bool = False) -> None:
        """See :class:`PackedLinear`."""
        self.weight, self.wide = _joined(weights), wide
        self.bias = None if biases is None else _joined(biases)
        self._kernels: dict[int, Kernel] = {}
        first = 0
        for weight in weights if len(weights) > 1 else ():
            weight.data = self.weight[first : first + len(weight)]
            first += len(weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of the results."""
        return torch.float32 if self.wide else self.weight.dtype

    def use_kernel(self, rows: int, kernel: Kernel | None) -> None:
        """Compute up to ``rows`` of :data:`ROW_BUCKETS` by ``kernel``; None: by torch."""
        self._kernels.pop(rows, None)
        if kernel is not None:
            self._kernels[rows] = kernel

    def __call__(self, x: Tensor) -> Tensor:
        """``x [..., k]`` -> ``[..., n]``, of the dtype of ``x``, or float32 if ``wide``."""
        if self._kernels:
            rows = x.numel() // self.weight.shape[1]
            bucket = next((most for most in ROW_BUCKETS if 0 < rows <= most), 0)
            kernel = self._kernels.get(bucket)
            if kernel is not None:
                return kernel(x, self.weight, self.bias, self.dtype)
        return self.compute_plain(x)

    def compute_plain(self, x: Tensor) -> Tensor:
        """As :meth:`__call__`, by torch."""
        if self.wide and x.dtype != torch.float32:
            return wide_linear(x, self.weight, self.bias)
        return torch.nn.functional.linear(x, self.weight, self.bias)


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [..., k] @ weight [n, k].T + bias`` in float32, from operands of 16 bits."""
    if x.device.type == "cuda":
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
        return (y if bias is None else y + bias).view(*x.shape[:-1], weight.shape[0])
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)
    for first in range(0, weight.shape[0], _WIDE_SLICE):  # a slice of the weight in float32 at a time
        dense = weight[first : first + _WIDE_SLICE].float()
        y[..., first : first + _WIDE_SLICE] = in_bucket(x.float(), partial(torch.nn.functional.linear, weight=dense))
    return y if bias is None else y + bias


def _joined(parts: list[Tensor]) -> Tensor:
    """``parts`` stacked."""
    if len(parts) == 1:
        return parts[0].detach()
    if parts[0].device.type != "cpu":
        return torch.cat(parts)
    # In pages of its own, which go back to the system: from the heap, each layer's copy can leave a hole of its size.
    rows = sum(part.shape[0] for part in parts)
    joined = reserve_weight((rows, *parts[0].shape[1:]), parts[0].dtype)
    return torch.cat([part.detach() for part in parts], out=joined)


def _pack(weight: Tensor) -> Tensor | None:
    """oneDNN's packed copy; None where this processor or build has none for the dtype."""
    if weight.dtype not in _CODES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch does not type it
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)  # type: ignore[no-any-return]  # an operator: torch types none
    except (RuntimeError, AttributeError):
        return None


def _address_of(packed: Tensor | None, n: int, block: int, column_bytes: int) -> int:
    """Where the packed blocks lie, or 0 when their size is not that of ``n`` outputs in blocks of ``block``."""
    try:
        expected = -(-n // block) * block * column_bytes
        if torch.ops.mkldnn._nbytes(packed) != expected:
            return 0
        return int(torch.ops.mkldnn.data_ptr(packed))
    except (RuntimeError, AttributeError):
        return 0
