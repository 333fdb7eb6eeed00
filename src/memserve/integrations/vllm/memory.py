"""vLLM's KV memory: where the bytes of a block lie, whatever layout the engine has chosen.

Shapes do not say what a dimension means (two KV heads look like K and V), so nothing but the block dimension, which
must have vLLM's number of blocks, is read from them: strides say which bytes a block has, and in which runs they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from memserve.base.errors import UserError
from memserve.integrations.store_cache import Piece


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What the bytes of a stored block mean."""

    piece_bytes: tuple[int, ...]
    """One run after the other, all layers."""
    digest: bytes
    """Of layers, dtypes, shapes and strides within a block."""

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return sum(self.piece_bytes)


class BlockMemory:
    """The KV of all layers of one group, wherever it lies: which bytes are a block's."""

    def __init__(self, caches: Mapping[str, Any], num_blocks: int) -> None:
        """``caches``: name of a layer -> tensor with blocks as its first dimension, or several kernel blocks for each
        block. Raises :class:`UserError` for memory that this class does not understand."""
        self.num_blocks = num_blocks
        bases, steps, sizes = list[int](), list[int](), list[int]()
        descriptions, layer_by_place = list[object](), dict[tuple[int, tuple[int, ...]], str]()
        self.layers: dict[str, range] = {}
        """The pieces of a block that are complete when this layer has been computed. Not of layers that share their KV:
        which of them writes it is not known here."""
        for name, tensor in caches.items():
            self._check_tensor(name, tensor)
            place = (tensor.data_ptr(), tuple(tensor.stride()))
            if place in layer_by_place:
                self.layers.pop(layer_by_place[place], None)
                continue
            layer_by_place[place] = name
            item, first = tensor.element_size(), len(bases)
            offsets, run = runs_of(tensor)
            kernel_blocks = tensor.shape[0] // num_blocks
            step = tensor.stride()[0] * item
            for kernel_block in range(kernel_blocks):
                bases += [tensor.data_ptr() + kernel_block * step + offset * item for offset in offsets]
                steps += [kernel_blocks * step] * len(offsets)
                sizes += [run * item] * len(offsets)
            self.layers[name] = range(first, len(bases))
            descriptions.append(
                (name, str(tensor.dtype), kernel_blocks, tuple(tensor.shape[1:]), _dimension_order(tensor))
            )
        if not bases:
            raise UserError("vLLM has registered no KV memory", hint="a model without attention has nothing to keep")
        self._bases, self._steps = np.array(bases, np.int64), np.array(steps, np.int64)
        self.layout = BlockLayout(tuple(sizes), blake2b(repr(descriptions).encode(), digest_size=16).digest())
        self._caches = caches  # what is addressed stays

    def _check_tensor(self, name: str, tensor: Any) -> None:
        if tensor.shape[0] == 0 or tensor.shape[0] % self.num_blocks:
            message = f"the KV of {name} has {tuple(tensor.shape)} for {self.num_blocks} blocks"
            raise UserError(message, hint="this version of vLLM lays KV out in a way that memserve does not know")

    def block_pieces(self, block_id: int) -> list[Piece]:
        """Address and length of each run of a block. Raises :class:`UserError` for a block that is not there."""
        if not 0 <= block_id < self.num_blocks:
            raise UserError(f"block {block_id} of {self.num_blocks}")
        return list(zip((self._bases + block_id * self._steps).tolist(), self.layout.piece_bytes, strict=True))


class HostMemory(BlockMemory):
    """In memory that this process can address."""

    def _check_tensor(self, name: str, tensor: Any) -> None:
        device = getattr(getattr(tensor, "device", None), "type", None)
        if device != "cpu":
            hint = "KV lies in host memory or on one CUDA device"
            raise UserError(f"the KV of {name} is on {device or type(tensor).__name__}, not in host memory", hint=hint)
        super()._check_tensor(name, tensor)


def _dimension_order(tensor: Any) -> tuple[int, ...]:
    """The dimensions within a block from the widest stride to the closest."""
    strides = tensor.stride()[1:]
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


def runs_of(tensor: Any) -> tuple[list[int], int]:
    """Offsets of the contiguous runs of one kernel block, and the length of each, in items."""
    shape, strides = tensor.shape[1:], tensor.stride()[1:]
    dimensions = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1)
    run = 1
    while dimensions and dimensions[0][0] == run:
        run *= dimensions.pop(0)[1]
    offsets = [0]
    for stride, size in reversed(dimensions):
        offsets = [offset + stride * index for offset in offsets for index in range(size)]
    return sorted(offsets), run
