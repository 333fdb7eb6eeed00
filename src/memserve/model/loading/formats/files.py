"""The safetensors files of a folder as one set of named tensors, and numbers of few bits in wider ones.

Headers are read at once, tensors are mapped when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from memserve.base.errors import UserError
from memserve.model.loading.formats.headers import COMPLETE_HINT, errors_named, read_header

Outputs = slice | Tensor
"""Some rows of a weight."""

CHUNK_VALUES = 1 << 18
"""So many values of a tensor are dequantised at a time: what they need meanwhile stays in the processor's caches."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header of its file describes it; ``dtype`` in the words of the format, as ``I32``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """Every tensor of a folder by its name."""

    def __init__(self, folder: Path, name: str) -> None:
        """``name``: of the model, for errors. Raises :class:`UserError` for a damaged file."""
        self.name = name
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self._opened: dict[Path, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for key, entry in read_header(file).items():
                if key == "__metadata__":
                    self.metadata |= entry
                else:
                    self.entries[key] = TensorEntry(file, str(entry["dtype"]), tuple(entry["shape"]))

    def read(self, name: str) -> Tensor:
        """The tensor ``name``, mapped from its file. Raises :class:`UserError`."""
        from safetensors import safe_open

        entry, opens = self.entries[name], cast(Any, safe_open)
        with errors_named(f"{entry.file} is damaged", COMPLETE_HINT):
            if entry.file not in self._opened:
                self._opened[entry.file] = opens(entry.file, framework="pt")
            value: Tensor = self._opened[entry.file].get_tensor(name)
            return value

    def find(self, name: str, whose: str) -> TensorEntry:
        """The entry of ``name``, a part of the weight ``whose``. Raises :class:`UserError` where it is missing."""
        entry = self.entries.get(name)
        if entry is None:
            raise self.refused(f"{whose} has no {name.rpartition('.')[2]}")
        return entry

    def expect(self, name: str, whose: str, shape: tuple[int, ...], *dtypes: str) -> TensorEntry:
        """As :meth:`find`, for an entry of this shape and one of these dtypes (none: of any)."""
        entry = self.find(name, whose)
        if entry.shape != shape or (dtypes and entry.dtype not in dtypes):
            size = " x ".join(map(str, entry.shape)) or "one number"
            wanted = " x ".join(map(str, shape)) or "one number"
            raise self.refused(f"{name} is {entry.dtype}, {size}, not {' or '.join(dtypes) or 'a tensor'}, {wanted}")
        return entry

    def refused(self, problem: str) -> UserError:
        """The error for a checkpoint whose tensors do not fit each other."""
        hint = "config.json and weights must be of the same model: download all of it again"
        return UserError(f"{self.name}: {problem}", hint=hint, param="model")


FLOATS = ("F32", "F16", "BF16")
FLOATS_8 = ("F8_E4M3", "F8_E5M2")
BYTES = {"I64": 8, "I32": 4, "F32": 4, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
"""Of a number of the format's dtypes, as far as it has not one byte."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Numbers of ``bits`` bits (2, 3, 4 or 8) that lie densely in int32 or uint8 ``words [..., m]``, the lowest bits
    first -> uint8 ``[..., values]``."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    runs = packed.view(*packed.shape[:-1], -1, bits).int()  # eight values in so many bytes
    joined = sum((runs[..., place] << 8 * place for place in range(bits)), torch.zeros((), dtype=torch.int32))
    shifts = torch.arange(0, 8 * bits, bits, dtype=torch.int32)
    return (joined[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)


def row_chunks(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a tensor, some at a time."""
    rows = max(32, CHUNK_VALUES // max(1, math.prod(shape[1:])) // 32 * 32)
    yield from (slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows))
