"""A store's memory in a fuzzed world: literal pages as bytes, and what the next process finds of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memserve import _core
from memserve.sim.fuzz.truth import require
from memserve.sim.fuzz.truth_device import PageMemory
from memserve.types import KVGeometry, Tier

_CELL_BYTES = 8
_NEVER = (1 << 64) - 1


def seal_of(payload: bytes | bytearray | memoryview) -> int:
    """As hosts compute it; 0 of no bytes."""
    if not payload:
        return 0
    data = np.frombuffer(payload, np.uint8)
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(data))[0])


class StoreMemory(PageMemory):
    """Blocks of ``geometry``, each cell 8 bytes. It outlives the process that wrote it."""

    def __init__(self, blocks: int, geometry: KVGeometry) -> None:
        self.block_bytes = geometry.block_bytes
        self._page_bytes = geometry.page_bytes
        require(self._page_bytes == _CELL_BYTES * geometry.block_tokens, "a cell of this geometry has another size")
        self.arena = bytearray(blocks * self.block_bytes)
        self.is_held: Callable[[int], bool] = lambda extent: True
        """Whether something refers to the extent that begins there: else nothing may be written to it."""

    def page(self, tier: Tier, block: int, layer: int) -> Sequence[int | None]:
        require(tier is Tier.DRAM, "a store has DRAM alone")
        at = block * self.block_bytes + layer * self._page_bytes
        page = self.arena[at : at + self._page_bytes]
        cells = [int.from_bytes(page[at : at + _CELL_BYTES], "little") for at in range(0, len(page), _CELL_BYTES)]
        return [None if cell == _NEVER else cell for cell in cells]

    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        require(tier is Tier.DRAM, "a store has DRAM alone")
        at = block * self.block_bytes + layer * self._page_bytes
        page = b"".join((_NEVER if cell is None else cell).to_bytes(_CELL_BYTES, "little") for cell in cells)
        require(self.is_held(block * self.block_bytes), f"block {block} is written, and nothing refers to it")
        self.arena[at : at + self._page_bytes] = page

    def read(self, extent: int, length: int) -> bytes:
        """Bytes of an extent."""
        return bytes(self.arena[extent : extent + length])

    def write(self, extent: int, payload: bytes) -> None:
        """Write to an extent, which something must refer to."""
        require(self.is_held(extent), f"extent {extent} is written, and nothing refers to it")
        self.arena[extent : extent + len(payload)] = payload


@dataclass(frozen=True, slots=True)
class Entry:
    """What the shared table says of a value."""

    key: bytes
    offset: int
    length: int
    scope: int
    seal: int
    verified: bool
    name: bytes


class KeptTier:
    """A private ``_core.MemoryTier`` that may begin with what an earlier process has published, not verified."""

    def __init__(self, blocks: int, block_bytes: int, kept: Sequence[Entry] = ()) -> None:
        self._tier = _core.MemoryTier(blocks * block_bytes, block_bytes)
        self._unverified = {entry.key for entry in kept}
        if not kept:
            return
        everything = self._tier.allocate_blocks(blocks)
        require(everything is not None, "a new memory tier is not empty")
        for entry in kept:
            fresh = self._tier.publish(entry.key, entry.offset, entry.length, scope=entry.scope, seal=entry.seal)
            require(fresh, "a key stood twice in the table")
        if everything is not None:
            self._tier.release_blocks(everything)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def __contains__(self, key: bytes) -> bool:
        return key in self._tier

    def __len__(self) -> int:
        return len(self._tier)

    def find(self, key: bytes, *, counts: bool = True) -> Entry | None:
        """As the tier's own."""
        place = self._tier.find(key, counts=counts)
        if place is None:
            return None
        is_verified = place.verified and key not in self._unverified
        return Entry(key, place.offset, place.length, place.scope, place.seal, is_verified, place.name)

    def verified(self, key: bytes) -> None:
        """As the tier's own."""
        self._unverified.discard(key)
        self._tier.verified(key)

    def publish(
        self, key: bytes, offset: int, length: int, *, scope: int = 0, seal: int = 0, name: bytes = b""
    ) -> bool:
        """As the tier's own."""
        fresh = self._tier.publish(key, offset, length, scope=scope, seal=seal, name=name)
        if fresh:
            self._unverified.discard(key)
        return fresh

    def entries(self) -> list[Entry]:
        """What the shared table says, for the next process, by key."""
        found, keys = [], self._tier.keys()
        for at in range(0, len(keys), 16):
            entry = self.find(keys[at : at + 16], counts=False)
            if entry is not None:
                self._tier.release(entry.offset)
                found.append(entry)
        return sorted(found, key=lambda entry: entry.key)
