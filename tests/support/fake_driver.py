"""A driver of GPUs that are made up: memory of a device is shared memory of the host, which other processes map, and
write, as they do with CUDA IPC."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

from memserve.system.gpus import DriverError

if TYPE_CHECKING:
    import torch

_EXPORTED = struct.Struct("<qqqq40x")  # process, descriptor, bytes, offset; as long as CUDA's

_owned: list[tuple[int, int, int, mmap.mmap]] = []  # address, bytes, descriptor


def device_zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of a made-up device, which lives as long as the process."""
    import torch

    nbytes = max(1, torch.Size(shape).numel() * dtype.itemsize)
    descriptor = os.memfd_create("made-up device memory")
    os.ftruncate(descriptor, nbytes)
    memory = mmap.mmap(descriptor, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _owned.append((address, nbytes, descriptor, memory))
    return (
        torch.frombuffer(memory, dtype=torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
        .view(dtype)
        .view(shape)
    )


class FakeDriver:
    """See :class:`memserve.system.gpus.Driver`. ``mapped`` counts what is mapped of other memories."""

    refuses = ""
    """Why nothing can be mapped; empty: it can."""

    def __init__(self, library: Any = None) -> None:
        self.mapped = 0
        self._maps: dict[int, mmap.mmap] = {}

    def export(self, address: int) -> bytes:
        for begin, nbytes, descriptor, _ in _owned:
            if begin <= address < begin + nbytes:
                return _EXPORTED.pack(os.getpid(), descriptor, nbytes, address - begin)
        raise DriverError("no memory of a device is there")

    def map(self, exported: bytes) -> tuple[int, int]:
        if self.refuses:
            raise DriverError(self.refuses)
        process, descriptor, nbytes, offset = _EXPORTED.unpack(exported)
        try:
            with open(f"/proc/{process}/fd/{descriptor}", "r+b", buffering=0) as file:
                memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            raise DriverError(f"the owner is gone: {error}") from error
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._maps[base] = memory
        self.mapped += 1
        return base + offset, base

    def unmap(self, base: int) -> None:
        del self._maps[base]  # unmapped with the last view of it
        self.mapped -= 1
