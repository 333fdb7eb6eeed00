"""An arena in GPU memory, as links see it: seals computed where the pages lie, by the function of the CPU
(``src/core/transfer/seal_sums.h``), and copies into it with seals on the way.

torch and Triton are imported on first use: processes that have no GPU import this module, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.runtime.gpus import Driver, DriverError
from memserve.runtime.links.link import ArenaMemory, Seals
from memserve.runtime.links.ranges import Offsets
from memserve.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

BEACON_BYTES = 4096
"""Of the shared memory beside an arena on a GPU, which has its generation."""
_STAGING_BYTES_MIN = 4 * MIB


class _Mine(threading.local):
    stream: Any = None


_mine = _Mine()


class GpuMemory:
    """Memory of a GPU; an :class:`~memserve.runtime.links.link.ArenaMemory`. Thread-safe."""

    def __init__(self, tensor: Tensor, driver: Driver | None = None) -> None:
        """``tensor``: contiguous bytes on the device. ``driver``: in place of the machine's."""
        self._flat = tensor.view(-1)
        self._driver = driver
        self._beacon = _core.SharedArena(BEACON_BYTES)
        self._lock = threading.Lock()  # guards the staging memory
        self._staging: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """All bytes, ``[nbytes]`` uint8."""
        return self._flat

    @property
    def address(self) -> int:
        """Of the first byte, in the device's memory."""
        return int(self._flat.data_ptr())

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return int(self._flat.numel())

    @property
    def fd(self) -> int:
        """Descriptor of a page of shared memory that has the generation."""
        return self._beacon.fd

    @property
    def generation(self) -> int:
        """Of the process's life that owns the memory."""
        return self._beacon.generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._beacon.generation = value

    def export(self) -> bytes:
        """What processes of this host map it with; empty: the driver exports it to none."""
        try:
            return (self._driver or Driver()).export(self.address)
        except DriverError as error:
            log.warning("processes of this host cannot map this GPU's KV: %s", error)
            return b""

    def seal(self, offsets: Offsets, range_bytes: int) -> Seals:
        """The seal of each range."""
        from memserve.model.gpu_kernels import Sealing

        with stream_of_its_own(self._flat):
            return Sealing(self._flat, offsets, range_bytes).result()

    def land(self, offsets: Offsets, source: Tensor, src_offsets: Offsets, range_bytes: int) -> Seals:
        """Copy ranges of ``source``, which the device can read, and seal what was written."""
        from memserve.model.gpu_kernels import Sealing

        with stream_of_its_own(self._flat):
            return Sealing(source, src_offsets, range_bytes, self._flat, offsets).result()

    def land_host(self, offsets: Offsets, address: int, src_offsets: Offsets, range_bytes: int) -> Seals:
        """As :meth:`land`, from memory of the host that is not pinned: through pinned memory, some ranges at a time."""
        seals: list[Seals] = []
        with self._lock, stream_of_its_own(self._flat) as stream:
            staging = self._pinned(range_bytes)
            step = len(staging) // range_bytes
            for begin in range(0, len(offsets), step):
                part = slice(begin, begin + step)
                count = len(offsets[part])
                places = np.arange(count, dtype=np.int64) * range_bytes
                seals.append(
                    _core.copy_ranges_sealed(staging.data_ptr(), places, address, src_offsets[part], range_bytes)
                )
                for place, offset in zip(places.tolist(), offsets[part].tolist(), strict=True):
                    landing = self._flat[offset : offset + range_bytes]
                    landing.copy_(staging[place : place + range_bytes], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def taken(self, offsets: Offsets, range_bytes: int) -> NDArray[np.uint8]:
        """Ranges, one after the other, in memory of the host."""
        import torch

        with stream_of_its_own(self._flat):
            parts = [self._flat[offset : offset + range_bytes] for offset in offsets.tolist()]
            return torch.cat(parts).cpu().numpy()

    def like(self, nbytes: int) -> GpuMemory:
        """Further memory of the same device."""
        import torch

        return GpuMemory(torch.empty(nbytes, dtype=torch.uint8, device=self._flat.device), self._driver)

    def _pinned(self, range_bytes: int) -> Tensor:
        import torch

        if self._staging is None or len(self._staging) < range_bytes:
            size = max(_STAGING_BYTES_MIN, range_bytes)
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._flat.device.type == "cuda")
        return self._staging


def stream_of_its_own(tensor: Tensor) -> AbstractContextManager[Any]:
    """What is enqueued inside does not wait for what the device computes; gives the stream, None on a CPU."""
    import torch

    if tensor.device.type != "cuda":
        return nullcontext()
    if _mine.stream is None:  # torch hands out few streams by turns: one a thread
        _mine.stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # torch does not type it
    return _using(_mine.stream)


@contextmanager
def _using(stream: Any) -> Iterator[Any]:
    import torch

    with torch.cuda.stream(stream):
        yield stream


def export_problem() -> str:
    """Why processes of this host cannot map memory of this one's GPU; empty: they can."""
    import torch

    try:
        Driver().export(torch.zeros(MIB, dtype=torch.uint8, device="cuda").data_ptr())
    except DriverError as error:
        return str(error)
    return ""


def seal_ranges(arena: ArenaMemory, offsets: Offsets, range_bytes: int) -> Seals:
    """The seal of each range of an arena, wherever that lies."""
    if isinstance(arena, GpuMemory):
        return arena.seal(offsets, range_bytes)
    return _core.seal_ranges(arena.address, offsets, range_bytes)


def land_ranges(
    arena: ArenaMemory, offsets: Offsets, slot: GpuMemory | _core.Arena, src_offsets: Offsets, range_bytes: int
) -> Seals:
    """Copy ranges of ``slot``, memory of ours, into an arena, and seal what was written."""
    if isinstance(slot, GpuMemory):
        if not isinstance(arena, GpuMemory):
            raise TypeError("what lands in host memory passes through host memory")
        return arena.land(offsets, slot.tensor, src_offsets, range_bytes)
    if isinstance(arena, GpuMemory):
        return arena.land_host(offsets, slot.address, src_offsets, range_bytes)
    return _core.copy_ranges_sealed(arena.address, offsets, slot.address, src_offsets, range_bytes)
