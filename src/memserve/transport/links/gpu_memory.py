"""An arena in GPU memory, as links see it: seals computed where the pages lie, by the function of the CPU
(``src/core/transfer/seal_sums.h``), and copies into it with seals on the way.

The KV of an instance of several workers lies in as many memories, each with its heads and layers of every block. To
links it is one arena of whole blocks, like that of one worker: the leader's process has all of them mapped, and its GPU
copies and seals, piece by piece. So the seal of a block is the same wherever its heads lie, and instances of any
degrees read one another.

torch and Triton are imported on first use: processes that have no GPU import this module, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import check
from memserve.base.types import KVGeometry, Tier
from memserve.base.units import MIB
from memserve.protocol.peers import ArenaPlace, ShardPlace
from memserve.system.gpus import Driver, DriverError
from memserve.transport.ports import ArenaMemory, LinkError, Seals
from memserve.transport.ranges import Offsets, Ranges, Shard, Shards, cut_pieces, fits, is_whole

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

BEACON_BYTES = 4096
"""Of the shared memory beside an arena on a GPU, which has its generation."""
_STAGING_BYTES_MIN = 4 * MIB


class _Mine(threading.local):
    stream: Any = None


_mine = _Mine()


@dataclass(frozen=True, slots=True)
class ArenaParts:
    """Where an arena lies for this process's GPU: at one address, or each worker's shard of every block at its own."""

    addresses: tuple[int, ...]
    shards: Shards = ()
    maps: tuple[object, ...] = ()
    """What must live while the addresses are used."""


class MappedMemory:
    """Memory of another process's GPU, as an address here; unmapped with the last reference."""

    def __init__(self, driver: Driver, exported: bytes, nbytes: int) -> None:
        """Raises :class:`DriverError`."""
        self._driver = driver
        self.address, self._base = driver.map(exported)
        self.nbytes = nbytes

    def __del__(self) -> None:
        try:
            if hasattr(self, "_base"):
                self._driver.unmap(self._base)
        except DriverError as error:  # the owner, or the context, is gone
            log.info("%s", error)


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory of a GPU that another worker of this instance has."""

    place: ShardPlace
    mapped: MappedMemory
    """The same, here."""


class GpuMemory:
    """Memory of a GPU, or of those of an instance's workers; an :class:`~memserve.transport.ports.ArenaMemory` of
    whole blocks. Thread-safe."""

    def __init__(
        self,
        tensor: Tensor,
        driver: Driver | None = None,
        *,
        shards: Shards = (),
        worker_memories: Sequence[WorkerMemory] = (),
    ) -> None:
        """``tensor``: contiguous bytes on the device. ``driver``: in place of the machine's. ``shards``: of all workers
        by rank, where ``tensor`` has the first one's and ``worker_memories`` those of the rest."""
        self._flat = tensor.view(-1)
        self._driver = driver
        self._worker_memories = tuple(worker_memories)
        self._beacon = _core.SharedArena(BEACON_BYTES)
        self._lock = threading.Lock()  # guards the staging memory
        self._staging: Tensor | None = None
        addresses = int(self._flat.data_ptr()), *(memory.mapped.address for memory in worker_memories)
        self._arena_parts = ArenaParts(addresses, shards)
        self._nbytes = int(self._flat.numel())
        #: called when peers will read it in a moment
        self.on_expected: Callable[[], object] = lambda: None
        if shards:
            blocks, rest = divmod(self._nbytes, shards[0].local_geometry.block_bytes)
            sizes = [blocks * shard.local_geometry.block_bytes for shard in shards[1:]]
            check(
                not rest and sizes == [memory.mapped.nbytes for memory in worker_memories], "as many blocks on each GPU"
            )
            self._nbytes = blocks * shards[0].model.block_bytes

    @property
    def tensor(self) -> Tensor:
        """All bytes of this process's GPU, ``[n]`` uint8."""
        return self._flat

    @property
    def arena_parts(self) -> ArenaParts:
        return self._arena_parts

    @property
    def address(self) -> int:
        """Of the first byte, in the device's memory."""
        return self._arena_parts.addresses[0]

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return self._nbytes

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

    def describe_arena(self, tier: Tier) -> ArenaPlace:
        """What peers must know to read it."""
        exported, shards = self.export_handle(), self._arena_parts.shards
        if not shards:
            return ArenaPlace(tier, self.address, self.nbytes, self.fd, on_gpu=True, exported=exported)
        own_place = shard_place(shards[0], self.address, self._flat.numel(), exported)
        places = own_place, *(memory.place for memory in self._worker_memories)
        return ArenaPlace(tier, 0, self.nbytes, self.fd, on_gpu=True, shards=places)

    def export_handle(self) -> bytes:
        """What processes of this host map this process's part with; empty: the driver exports it to none."""
        try:
            return (self._driver or Driver()).export(self.address)
        except DriverError as error:
            log.warning("processes of this host cannot map this GPU's KV: %s", error)
            return b""

    def has_ranges(self, offsets: Offsets, range_bytes: int) -> bool:
        """Whether ranges lie inside, and can be read: of several GPUs, whole pages can."""
        shards = self._arena_parts.shards
        pages = not shards or is_whole(offsets, range_bytes, shards[0].model.page_bytes)
        return pages and fits(offsets, range_bytes, self.nbytes)

    def seal(self, offsets: Offsets, range_bytes: int) -> Seals:
        """The seal of each range."""
        return self.copy_and_seal(self._arena_parts, Ranges(offsets, offsets, range_bytes), None)

    def land_pinned(self, offsets: Offsets, source: ArenaParts, src_offsets: Offsets, range_bytes: int) -> Seals:
        """Copy ranges of ``source``, which the device can read, and seal what was written."""
        return self.copy_and_seal(source, Ranges(src_offsets, offsets, range_bytes), self._arena_parts)

    def land_host(self, offsets: Offsets, address: int, src_offsets: Offsets, range_bytes: int) -> Seals:
        """As :meth:`land_pinned`, from memory of the host that is not pinned: through pinned memory, some ranges at a
        time."""
        seals: list[Seals] = []
        with self._lock, stream_of_its_own(self._flat) as stream:
            staging = self._pinned_staging(range_bytes)
            step = len(staging) // range_bytes
            for begin in range(0, len(offsets), step):
                part = slice(begin, begin + step)
                count = len(offsets[part])
                places = np.arange(count, dtype=np.int64) * range_bytes
                seals.append(
                    _core.copy_ranges_sealed(staging.data_ptr(), places, address, src_offsets[part], range_bytes)
                )
                if self._arena_parts.shards:
                    pinned = ArenaParts((staging.data_ptr(),))
                    seals[-1] = self.copy_and_seal(
                        pinned, Ranges(places, offsets[part], range_bytes), self._arena_parts
                    )
                    continue
                for place, offset in zip(places.tolist(), offsets[part].tolist(), strict=True):
                    landing = self._flat[offset : offset + range_bytes]
                    landing.copy_(staging[place : place + range_bytes], non_blocking=True)
                if stream is not None:
                    stream.synchronize()
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def copied_ranges(self, offsets: Offsets, range_bytes: int) -> NDArray[np.uint8]:
        """Ranges, one after the other, in memory of the host."""
        if not self._arena_parts.shards:
            import torch

            with stream_of_its_own(self._flat):
                parts = [self._flat[offset : offset + range_bytes] for offset in offsets.tolist()]
                return torch.cat(parts).cpu().numpy()
        with self._lock:
            staging = self._pinned_staging(len(offsets) * range_bytes)
            self.copy_ranges_to(offsets, range_bytes, staging)
            return staging[: len(offsets) * range_bytes].numpy().copy()

    def copy_ranges_to(self, offsets: Offsets, range_bytes: int, target: Tensor) -> None:
        """Copy ranges, one after the other, to the begin of ``target``: pinned memory of the host."""
        with stream_of_its_own(self._flat) as stream:
            places = np.arange(len(offsets), dtype=np.int64) * range_bytes
            if self._arena_parts.shards:
                self.copy_and_seal(
                    self._arena_parts, Ranges(offsets, places, range_bytes), ArenaParts((target.data_ptr(),))
                )
                return
            for place, offset in zip(places.tolist(), offsets.tolist(), strict=True):
                source = self._flat[offset : offset + range_bytes]
                target[place : place + range_bytes].copy_(source, non_blocking=True)
            if stream is not None:
                stream.synchronize()

    def pin_host(self, address: int, nbytes: int) -> None:
        """Let the copy engines of this process's device reach memory of the host. Raises :class:`DriverError`."""
        if self._flat.device.type == "cuda":
            (self._driver or Driver()).pin(address, nbytes)

    def unpin_host(self, address: int) -> None:
        """The reverse of :meth:`pin_host`, before the memory goes."""
        try:
            if self._flat.device.type == "cuda":
                (self._driver or Driver()).unpin(address)
        except DriverError as error:  # the context is gone, and with it what it had pinned
            log.info("%s", error)

    def allocate_like(self, nbytes: int) -> GpuMemory:
        """Further memory of this process's device."""
        import torch

        return GpuMemory(torch.empty(nbytes, dtype=torch.uint8, device=self._flat.device), self._driver)

    def copy_and_seal(self, source: ArenaParts, ranges: Ranges, target: ArenaParts | None) -> Seals:
        """Seal ranges of ``source``, or of what is copied from there into ``target``, by this process's GPU. Memory of
        the host is pinned. Waits for the end. Raises :class:`LinkError` for what cannot be cut into pieces."""
        from memserve.system.gpu_kernels import Batch, Sealing

        batches, targets = [], () if target is None else target.shards
        try:
            piece_list = cut_pieces(ranges, source.shards, targets)
        except ValueError as error:
            raise LinkError(str(error)) from error
        for piece in piece_list:
            src = piece.ranges.src_offsets + source.addresses[piece.source]
            dst = None if target is None else piece.ranges.dst_offsets + target.addresses[piece.target]
            batches.append(Batch(piece.ranges.range_bytes, src, dst, piece.begins, piece.owners))
        with stream_of_its_own(self._flat):
            return Sealing(batches, len(ranges), ranges.range_bytes, self._flat.device).read_checksums()

    def _pinned_staging(self, nbytes: int) -> Tensor:
        import torch

        if self._staging is None or len(self._staging) < nbytes:
            size = max(_STAGING_BYTES_MIN, nbytes)
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._flat.device.type == "cuda")
        return self._staging


def shard_place(shard: Shard, address: int, nbytes: int, exported: bytes, nixl_agent: bytes = b"") -> ShardPlace:
    """What peers must know of one worker's memory."""
    layers, heads = (shard.first_layer, shard.end_layer), (shard.first_head, shard.end_head)
    return ShardPlace(*layers, *heads, address, nbytes, exported, nixl_agent)


def shards_of(place: ArenaPlace, model: KVGeometry) -> Shards:
    """The shards that a peer's memories hold. Raises :class:`ValueError` unless they are, together, whole blocks."""
    shards = tuple(
        Shard(model, entry.first_layer, entry.end_layer, entry.first_head, entry.end_head) for entry in place.shards
    )
    holder_counts = np.zeros((model.num_layers, model.num_kv_heads), np.int64)
    blocks, rest = divmod(place.arena_bytes, model.block_bytes)
    for shard, entry in zip(shards, place.shards, strict=True):
        inside = shard.first_layer < shard.end_layer <= model.num_layers
        if not (inside and shard.first_head < shard.end_head <= model.num_kv_heads):
            raise ValueError("a shard of a peer's KV has layers or heads that its model has not")
        if rest or entry.arena_bytes != blocks * shard.local_geometry.block_bytes:
            raise ValueError("a shard of a peer's KV has another size than its blocks")
        holder_counts[shard.first_layer : shard.end_layer, shard.first_head : shard.end_head] += 1
    if shards and (holder_counts != 1).any():
        raise ValueError("the shards of a peer's KV are no whole blocks")
    return shards


def stream_of_its_own(tensor: Tensor) -> AbstractContextManager[Any]:
    """What is enqueued inside does not wait for what the device computes; gives the stream, None on a CPU."""
    import torch

    if tensor.device.type != "cuda":
        return nullcontext()
    if _mine.stream is None:  # torch hands out few streams by turns: one a thread
        _mine.stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]  # torch does not type it
    return _using_stream(_mine.stream)


@contextmanager
def _using_stream(stream: Any) -> Iterator[Any]:
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
        return arena.land_pinned(offsets, slot.arena_parts, src_offsets, range_bytes)
    if isinstance(arena, GpuMemory):
        return arena.land_host(offsets, slot.address, src_offsets, range_bytes)
    return _core.copy_ranges_sealed(arena.address, offsets, slot.address, src_offsets, range_bytes)
