"""Reading peers on the same host where a GPU has KV, theirs or ours: memory of both kinds is mapped and copied from.

peer's HBM (CUDA IPC)         -> own HBM       one kernel: copies, and seals what it has written
peer's HBM                    -> own DRAM      the same kernel, into pinned memory
peer's host memory (mapped)   -> own HBM       through pinned memory
peer's host memory            -> own DRAM      as between CPUs
"""

from __future__ import annotations

import logging
from typing import Any

from memserve.messages import ArenaPlace, Peer, PeerInfo
from memserve.runtime.gpus import Driver, DriverError
from memserve.runtime.links.gpu_memory import GpuMemory, stream_of_its_own
from memserve.runtime.links.link import Arenas, LinkError, Seals, UnreachableError, check_ranges, place_of
from memserve.runtime.links.ranges import Ranges
from memserve.runtime.links.shm import ShmLink
from memserve.types import Tier

log = logging.getLogger(__name__)


class _Mapped:
    """Memory of another process's GPU arena; unmapped with the last reference."""

    def __init__(self, driver: Driver, place: ArenaPlace) -> None:
        self._driver = driver
        self.address, self._base = driver.map(place.exported)
        self.nbytes = place.arena_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 2}

    def __del__(self) -> None:
        try:
            if hasattr(self, "_base"):
                self._driver.unmap(self._base)
        except DriverError as error:  # the owner, or the context, is gone
            log.info("%s", error)


class IpcLink(ShmLink):
    """A :class:`~memserve.runtime.links.link.PageLink` on one host, where GPUs take part.

    As with shared memory, the owner's generation is compared before and after each copy; it stands in a page of host
    memory beside the arena.
    """

    name = "ipc"

    def __init__(self, arenas: Arenas, driver: Driver | None = None) -> None:
        super().__init__(arenas)
        self._driver = driver or Driver()
        self._gpu_maps: dict[tuple[Peer, Tier], _Mapped] = {}

    def reaches(self, info: PeerInfo) -> bool:
        """Same host; all its arenas are files that can be opened, or exported by its GPU's driver."""
        open_to_us = all(place.fd >= 0 and (place.exported or not place.on_gpu) for place in info.arenas)
        return info.host_id == self._host and open_to_us

    def remove_peer(self, peer: Peer) -> None:
        """Unmap its arenas; a copy under way keeps its map until it ends."""
        super().remove_peer(peer)
        with self._lock:
            for key in [key for key in self._gpu_maps if key[0] == peer]:
                del self._gpu_maps[key]

    def read(self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges) -> Seals:
        """Copy and seal. Raises :class:`LinkError`."""
        target = self._arenas.get(dst_tier)
        if target is None:
            raise LinkError(f"no {dst_tier.name} here")
        source = self._map(peer, src_tier)  # what has the generation
        place = self._place(peer, src_tier)
        check_ranges(ranges, place.arena_bytes, target.nbytes)
        if not place.on_gpu and not isinstance(target, GpuMemory):
            return super().read(peer, src_tier, dst_tier, ranges)
        self._check_generation(source, peer)
        if place.on_gpu:
            seals = self._read_gpu(self._map_gpu(peer, src_tier, place), target, ranges)
        elif isinstance(target, GpuMemory):
            seals = target.land_host(ranges.dst_offsets, source.address, ranges.src_offsets, ranges.range_bytes)
        self._check_generation(source, peer)
        self._let_go(0 if place.on_gpu else ranges.total_bytes)
        return seals

    def close(self) -> None:
        """Unmap everything."""
        super().close()
        with self._lock:
            self._gpu_maps.clear()

    def _read_gpu(self, mapped: _Mapped, target: Any, ranges: Ranges) -> Seals:
        import torch

        from memserve.model.gpu_kernels import Sealing

        source = self._as_tensor(mapped)
        if isinstance(target, GpuMemory):
            return target.land(ranges.dst_offsets, source, ranges.src_offsets, ranges.range_bytes)
        pinned = torch.frombuffer(target, dtype=torch.uint8)
        with stream_of_its_own(source):
            return Sealing(source, ranges.src_offsets, ranges.range_bytes, pinned, ranges.dst_offsets).result()

    @staticmethod
    def _as_tensor(mapped: _Mapped) -> Any:
        import torch

        return torch.as_tensor(mapped, device="cuda")

    def _place(self, peer: Peer, tier: Tier) -> ArenaPlace:
        with self._lock:
            info = self._peers.get(peer)
        if info is None:
            raise LinkError(f"{peer.name} is gone")
        return place_of(info, tier)

    def _map_gpu(self, peer: Peer, tier: Tier, place: ArenaPlace) -> _Mapped:
        with self._lock:
            mapped = self._gpu_maps.get((peer, tier))
            if mapped is None:
                try:
                    mapped = _Mapped(self._driver, place)
                except DriverError as error:
                    raise UnreachableError(f"cannot map {peer.name}'s {tier.name}: {error}") from error
                if peer in self._peers:
                    self._gpu_maps[peer, tier] = mapped
            return mapped
