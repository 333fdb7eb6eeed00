"""KV of a GPU for readers of the same host that have none, such as stores: it is put into memory that both see, and
only where it lies goes over the encrypted channel.

    reader                                                    owner
    what it wants (``encrypted.py``), and that it sees memory -> copies the ranges into a slot of the line's ring
    maps that memory, read-only; copies, checksums            <- which slot

A ring has a slot for each piece that a reader has on its way. It lands them in the order in which it asked, so when it
asks for another one the oldest slot is free, without a message for that. All rings are one memory of a fixed size:
while each is in use, further lines get bytes. Whatever lies in a slot, a block counts only with the checksum of its
owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from memserve import _core
from memserve.base.types import Tier
from memserve.base.units import MIB
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.gpus import DriverError
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.ports import Arenas, Seals, Travelled, UnreachableError, place_of
from memserve.transport.ranges import Offsets, Ranges

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

STAGING_BYTES = 64 * MIB
"""Of all rings, or two of them where blocks are so long."""


class StagedPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a piece lies in memory of its owner's process."""

    fd: int
    arena_bytes: int
    begin: int


FindStaging = Callable[[StagedPlace], _core.PeerArena]
"""The memory that a peer names, mapped here. Raises :class:`~memserve.transport.ports.LinkError`."""


ReadStaged = Callable[[Peer, Tier, Tier, Ranges, FindStaging], Seals]
"""``CurveLink.read_staged``."""


@dataclass(slots=True)
class _Ring:
    number: int
    pieces: int = 0
    """So far."""
    used_ns: int = 0


class StagingRings:
    """An owner's slots; used by the thread that answers. The memory is taken when the first piece is staged."""

    def __init__(self, slot_bytes: int, slots: int, idle_ns: int) -> None:
        """``slots``: of a ring. ``idle_ns``: a line that asks for nothing so long has given up its ring."""
        self._slot_bytes, self._slots, self._idle_ns = slot_bytes, slots, idle_ns
        self._rings_max = max(2, STAGING_BYTES // (slot_bytes * slots))
        self._rings: dict[int, _Ring] = {}
        self._arena: _core.SharedArena | None = None
        self._tensor: Tensor | None = None
        self._pinned_for: GpuMemory | None = None
        self._is_refused = False

    def stage_ranges(
        self, line: int, memory: GpuMemory, offsets: Offsets, range_bytes: int, now_ns: int
    ) -> StagedPlace | None:
        """Copy ranges of ``memory`` to the next slot of ``line``, at most ``slot_bytes`` altogether. None: there is no
        ring for it, or no memory that the GPU reaches."""
        ring = None if self._is_refused else self._ring_of(line, now_ns)
        if ring is None or not self._has_memory(memory):
            return None
        assert self._arena is not None and self._tensor is not None
        begin = (ring.number * self._slots + ring.pieces % self._slots) * self._slot_bytes
        ring.pieces, ring.used_ns = ring.pieces + 1, now_ns
        self._arena.generation = memory.generation
        memory.copy_ranges_to(offsets, range_bytes, self._tensor[begin : begin + len(offsets) * range_bytes])
        return StagedPlace(self._arena.fd, self._arena.nbytes, begin)

    def close(self) -> None:
        """Give the memory back."""
        if self._pinned_for is not None and self._arena is not None:
            self._pinned_for.unpin_host(self._arena.address)
        self._pinned_for = self._tensor = self._arena = None
        self._rings.clear()
        self._is_refused = True

    def _ring_of(self, line: int, now_ns: int) -> _Ring | None:
        ring = self._rings.get(line)
        if ring is not None:
            return ring
        number = len(self._rings)
        if number >= self._rings_max:
            former, idle = min(self._rings.items(), key=lambda item: item[1].used_ns)
            if now_ns - idle.used_ns < self._idle_ns:
                return None
            number = idle.number
            del self._rings[former]
        ring = self._rings[line] = _Ring(number, used_ns=now_ns)
        return ring

    def _has_memory(self, memory: GpuMemory) -> bool:
        if self._arena is not None:
            return True
        import torch

        try:
            arena = _core.SharedArena(self._rings_max * self._slots * self._slot_bytes)
            memory.pin_host(arena.address, arena.nbytes)
        except (OSError, DriverError) as error:
            log.warning("KV of the GPU goes to stores of this host through the encrypted channel: %s", error)
            self._is_refused = True
            return False
        self._arena, self._tensor, self._pinned_for = arena, torch.frombuffer(arena, dtype=torch.uint8), memory
        return True


class StagedLink(ShmLink):
    """A :class:`~memserve.transport.ports.PageLink` to peers on this host with a GPU, which this process does not map:
    their KV there through the memory that they stage it in, that in memory of the host as between CPUs."""

    name = "staged"

    def __init__(self, arenas: Arenas, read_staged: ReadStaged) -> None:
        """``read_staged``: of the channel on which it asks, which knows the same peers."""
        super().__init__(arenas)
        self._read_staged = read_staged
        self._staging: dict[Peer, tuple[StagedPlace, _core.PeerArena]] = {}

    def reaches(self, info: PeerInfo) -> bool:
        """Same host; a GPU has some of its KV, and it answers on the channel."""
        on_gpu = any(place.on_gpu for place in info.arenas)
        return info.host_id == self._host and on_gpu and bool(info.pages_at) and all(p.fd >= 0 for p in info.arenas)

    def remove_peer(self, peer: Peer) -> None:
        """Unmap what it has staged; a copy under way keeps its map until it ends."""
        super().remove_peer(peer)
        with self._lock:
            self._staging.pop(peer, None)

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Copy and checksum. Raises :class:`~memserve.transport.ports.LinkError`."""
        info = self._peer_info(peer)
        if not place_of(info, src_tier).on_gpu:
            return super().read(peer, src_tier, dst_tier, ranges, travelled)
        return self._read_staged(peer, src_tier, dst_tier, ranges, partial(self._find_staging, info))

    def close(self) -> None:
        """Unmap everything."""
        super().close()
        with self._lock:
            self._staging.clear()

    def _find_staging(self, info: PeerInfo, place: StagedPlace) -> _core.PeerArena:
        """The memory that a peer has named, mapped when it first does. Raises :class:`UnreachableError`."""
        with self._lock:
            mapped = self._staging.get(info.peer)
            if mapped is not None and (mapped[0].fd, mapped[0].arena_bytes) == (place.fd, place.arena_bytes):
                return mapped[1]
            try:
                arena = _core.PeerArena(info.pid, place.fd, place.arena_bytes)
            except (OSError, ValueError) as error:
                raise UnreachableError(f"cannot map what {info.peer.name} stages: {error}") from error
            self._check_generation(arena, info.peer)
            if info.peer in self._peers:
                self._staging[info.peer] = place, arena
            return arena
