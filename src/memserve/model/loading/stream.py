"""Writes a safetensors file tensor by tensor: a conversion never holds more of a model than one of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memserve.errors import UserError, check

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.bool": "BOOL",
}  # fmt: skip
_ENTRY_BYTES = 512
"""Room in the header for a tensor: names have about 60 characters."""
_ALIGNED_BYTES = 64


class SafetensorsWriter:
    """A safetensors file that is complete once the block ends without an error; else it is not readable.

    The header comes first in the file and is known last: room for ``tensors`` entries is left for it, and what is not
    needed is blanks, as the format allows."""

    def __init__(self, path: Path, tensors: int) -> None:
        self._room_bytes = -(-(8 + _ENTRY_BYTES * (tensors + 1)) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        self._file = path.open("wb")
        self._file.seek(self._room_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._write_header()
        finally:
            self._file.close()

    def write(self, name: str, value: Tensor) -> None:
        """Add ``value``, of any shape, on a CPU. Raises ``OSError``, and :class:`UserError` for a dtype that the format
        does not know."""
        import torch

        check(name not in self._entries, "a tensor is written once")
        code = _NAMES.get(str(value.dtype))
        if code is None:
            raise UserError(f"{name} has the dtype {value.dtype}, which safetensors files do not hold")
        flat = value.detach().contiguous().reshape(-1)
        size = flat.numel() * flat.element_size()
        if size:
            self._file.write(flat.view(torch.uint8).numpy().data)
        self._entries[name] = {
            "dtype": code, "shape": list(value.shape), "data_offsets": [self._end, self._end + size]
        }  # fmt: skip
        self._end += size

    def _write_header(self) -> None:
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        room = self._room_bytes - 8
        if len(header) > room:
            raise UserError(f"the names of {len(self._entries)} tensors take {len(header)} bytes, more than {room}")
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
