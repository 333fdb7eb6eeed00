"""Reading peers on the same host: their arenas are mapped, read-only, and copied from."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from memserve import _core
from memserve.base.types import Tier
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.memory import PEERS_BYTES
from memserve.transport.links.gpu_memory import BEACON_BYTES
from memserve.transport.ports import Arenas, LinkError, Seals, Travelled, UnreachableError, check_ranges, place_of
from memserve.transport.ranges import Ranges


def this_host() -> str:
    """Equal in processes that see each other under ``/proc``: the kernel's boot and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


_RESIDENT_BYTES_MAX = PEERS_BYTES
"""What of peers' arenas may count as resident here, but for the read that exceeds it. Each peer's whole arenas would
otherwise, in time: memory that exists once, and is counted in every process of the cluster."""


class ShmLink:
    """A :class:`PageLink` through shared memory: one copy, checksummed on the way, at the speed of memory.

    The owner's generation stands in its arena. It is compared before and after each copy, so that neither a process
    that got a dead peer's pid nor the same process as a later generation is taken for the peer.
    """

    name = "shm"
    workers = 2

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._host = this_host()
        self._lock = threading.Lock()
        self._peers: dict[Peer, PeerInfo] = {}
        self._maps: dict[tuple[Peer, Tier], _core.PeerArena] = {}
        """Mapped when first read from; only of peers in ``_peers``."""
        self._resident_bytes = 0
        """At most so much of the maps was read since they were last let go of."""

    def describe(self, info: PeerInfo) -> PeerInfo:
        """Nothing to add: every description says host, process and arenas."""
        return info

    def reaches(self, info: PeerInfo) -> bool:
        """Same host, and its arenas are files that can be opened."""
        return info.host_id == self._host and all(place.fd >= 0 and not place.on_gpu for place in info.arenas)

    def add_peer(self, info: PeerInfo) -> None:
        """Remember where its arenas are."""
        with self._lock:
            self._peers[info.peer] = info

    def remove_peer(self, peer: Peer) -> None:
        """Unmap its arenas; a copy under way keeps its map until it ends."""
        with self._lock:
            self._peers.pop(peer, None)
            for key in [key for key in self._maps if key[0] == peer]:
                del self._maps[key]

    def expect_reads(self) -> None:
        """Readers need nothing from us."""

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Copy and checksum in one pass. Raises :class:`LinkError`."""
        source, target = self._map_arena(peer, src_tier), self._arenas.get(dst_tier)
        if target is None:
            raise LinkError(f"no {dst_tier.name} here")
        check_ranges(ranges, source.nbytes, target.nbytes)
        self._check_generation(source, peer)
        seals = _core.copy_ranges_sealed(
            target.address, ranges.dst_offsets, source.address, ranges.src_offsets, ranges.range_bytes
        )
        self._check_generation(source, peer)
        self._limit_resident(ranges.total_bytes)
        return seals

    def close(self) -> None:
        """Unmap everything."""
        with self._lock:
            self._peers.clear()
            self._maps.clear()

    def _peer_info(self, peer: Peer) -> PeerInfo:
        with self._lock:
            info = self._peers.get(peer)
        if info is None:
            raise LinkError(f"{peer.name} is gone")
        return info

    def _map_arena(self, peer: Peer, tier: Tier) -> _core.PeerArena:
        with self._lock:
            info = self._peers.get(peer)
            if info is None:
                raise LinkError(f"{peer.name} is gone")
            arena = self._maps.get((peer, tier))
            if arena is None:
                place = place_of(info, tier)
                try:
                    size = BEACON_BYTES if place.on_gpu else place.arena_bytes
                    arena = _core.PeerArena(info.pid, place.fd, size)
                except OSError as error:
                    raise UnreachableError(f"cannot map {peer.name}'s {tier.name}: {error}") from error
                self._check_generation(arena, peer)
                self._maps[peer, tier] = arena
            return arena

    def _limit_resident(self, read_bytes: int) -> None:
        with self._lock:
            self._resident_bytes += read_bytes
            if self._resident_bytes < _RESIDENT_BYTES_MAX:
                return
            self._resident_bytes, maps = 0, list(self._maps.values())
        for arena in maps:
            arena.forget()

    @staticmethod
    def _check_generation(arena: _core.PeerArena, peer: Peer) -> None:
        if arena.generation != peer.generation:
            raise LinkError(f"{peer.name} is now generation {arena.generation}, not {peer.generation}")
