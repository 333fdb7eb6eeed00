"""Reading peers on the same host where a GPU has KV, theirs or ours: memory of both kinds is mapped and copied from.

peer's HBM (CUDA IPC)         -> own HBM       one kernel: copies, and seals what it has written; of several GPUs on
                                               either side, piece by piece
peer's HBM                    -> own DRAM      the same kernel, into pinned memory
peer's host memory (mapped)   -> own HBM       through pinned memory
peer's host memory            -> own DRAM      as between CPUs
"""

from __future__ import annotations

from memserve.base.types import KVGeometry, Tier
from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
from memserve.system.gpus import Driver, DriverError
from memserve.transport.links.gpu_memory import ArenaParts, GpuMemory, MappedMemory, shards_of
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.ports import (
    ArenaMemory,
    Arenas,
    LinkError,
    Seals,
    Travelled,
    UnreachableError,
    check_ranges,
    place_of,
)
from memserve.transport.ranges import Ranges


class IpcLink(ShmLink):
    """A :class:`~memserve.transport.ports.PageLink` on one host, where GPUs take part.

    As with shared memory, the owner's generation is compared before and after each copy; it stands in a page of host
    memory beside the arena.
    """

    name = "ipc"

    def __init__(self, arenas: Arenas, driver: Driver | None = None) -> None:
        super().__init__(arenas)
        self._driver = driver or Driver()
        self._gpu_maps: dict[tuple[Peer, Tier], ArenaParts] = {}

    def reaches(self, info: PeerInfo) -> bool:
        """Same host; all its arenas are files that can be opened, or exported by the drivers of its GPUs."""
        return info.host_id == self._host and all(place.fd >= 0 and _is_exported(place) for place in info.arenas)

    def remove_peer(self, peer: Peer) -> None:
        """Unmap its arenas; a copy under way keeps its map until it ends."""
        super().remove_peer(peer)
        with self._lock:
            for key in [key for key in self._gpu_maps if key[0] == peer]:
                del self._gpu_maps[key]

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Copy and seal. Raises :class:`LinkError`."""
        target = self._arenas.get(dst_tier)
        if target is None:
            raise LinkError(f"no {dst_tier.name} here")
        source = self._map_arena(peer, src_tier)  # what has the generation
        place = self._arena_place(peer, src_tier)
        check_ranges(ranges, place.arena_bytes, target.nbytes)
        if not place.on_gpu and not isinstance(target, GpuMemory):
            return super().read(peer, src_tier, dst_tier, ranges)
        self._check_generation(source, peer)
        if place.on_gpu:
            seals = self._read_gpu(self._map_gpu(peer, src_tier), target, ranges)
        elif isinstance(target, GpuMemory):
            seals = target.land_host(ranges.dst_offsets, source.address, ranges.src_offsets, ranges.range_bytes)
        self._check_generation(source, peer)
        self._limit_resident(0 if place.on_gpu else ranges.total_bytes)
        return seals

    def close(self) -> None:
        """Unmap everything."""
        super().close()
        with self._lock:
            self._gpu_maps.clear()

    def _read_gpu(self, source: ArenaParts, target: ArenaMemory, ranges: Ranges) -> Seals:
        into = target.arena_parts if isinstance(target, GpuMemory) else ArenaParts((target.address,))  # pinned
        gpu = next((arena for arena in self._arenas.values() if isinstance(arena, GpuMemory)), None)
        if gpu is None:
            raise LinkError("no GPU here")
        return gpu.copy_and_seal(source, ranges, into)

    def _arena_place(self, peer: Peer, tier: Tier) -> ArenaPlace:
        return place_of(self._peer_info(peer), tier)

    def _map_gpu(self, peer: Peer, tier: Tier) -> ArenaParts:
        """The peer's memories, mapped when they are first read."""
        info = self._peer_info(peer)
        place = place_of(info, tier)
        with self._lock:
            parts = self._gpu_maps.get((peer, tier))
            if parts is None:
                try:
                    parts = _map_parts(self._driver, place, info.geometry)
                except (DriverError, ValueError) as error:
                    raise UnreachableError(f"cannot map {peer.name}'s {tier.name}: {error}") from error
                if peer in self._peers:
                    self._gpu_maps[peer, tier] = parts
            return parts


def _is_exported(place: ArenaPlace) -> bool:
    if not place.on_gpu:
        return True
    return bool(place.exported) or (bool(place.shards) and all(shard.exported for shard in place.shards))


def _map_parts(driver: Driver, place: ArenaPlace, geometry: KVGeometry) -> ArenaParts:
    shards = shards_of(place, geometry)
    exported = [(part.exported, part.arena_bytes) for part in place.shards] or [(place.exported, place.arena_bytes)]
    maps = tuple(MappedMemory(driver, *part) for part in exported)
    return ArenaParts(tuple(part.address for part in maps), shards, maps)
