"""Values of clients, carried from a store's memory to that of its next life, which has blocks of another size.

The one memory is given up before the other is taken, because the host may have no room for both. So values wait in
memory of the process meanwhile, up to ``CARRIED_BYTES_MAX``; what a disk has is not carried, and KV of another model is
of no use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from memserve import _core
from memserve.store.pool import KV_SCOPE
from memserve.store.values import split
from memserve.units import GIB

CARRIED_BYTES_MAX = GIB
_NO_OFFSET = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class _Value:
    key: bytes
    scope: int
    seal: int
    name: bytes
    payload: bytes


@dataclass(slots=True)
class CarriedValues:
    """On their way from one life to the next."""

    values: list[_Value] = field(default_factory=list)
    lost: int = 0
    """Values that were in memory alone and are not carried: too much, damaged, or no room for them."""


def take_values(
    tier: _core.MemoryTier, is_on_disk: Callable[[bytes], bool], bytes_max: int = CARRIED_BYTES_MAX
) -> CarriedValues:
    """Copy the values of clients that are in this memory alone. Nothing else uses ``tier`` any more."""
    arena = tier.arena
    assert arena is not None
    memory, carried, left = memoryview(arena).cast("B"), CarriedValues(), bytes_max
    for key in split(tier.keys()):
        place = tier.find(key, counts=False)
        if place is None:
            continue
        if place.scope != KV_SCOPE and not is_on_disk(key):
            is_whole = place.length == 0 or place.seal == _seal(arena.address + place.offset, place.length)
            if is_whole and place.length <= left:
                left -= place.length
                payload = bytes(memory[place.offset : place.offset + place.length])
                carried.values.append(_Value(key, place.scope, place.seal, place.name, payload))
            else:
                carried.lost += 1
        tier.release(place.offset)
    return carried


def put_values(tier: _core.MemoryTier, carried: CarriedValues) -> None:
    """Publish them in another memory, as far as there is room."""
    arena = tier.arena
    assert arena is not None
    memory = memoryview(arena).cast("B")
    for value in carried.values:
        extent = tier.allocate(max(1, len(value.payload) + len(value.name)))
        if extent is None:
            continue
        memory[extent : extent + len(value.payload)] = value.payload
        tier.publish(value.key, extent, len(value.payload), scope=value.scope, seal=value.seal, name=value.name)
        tier.release(extent)
    tier.take_evicted()
    arrived = [value for value in carried.values if value.key in tier]
    carried.lost += len(carried.values) - len(arrived)
    carried.values = arrived


def _seal(address: int, length: int) -> int:
    return int(_core.seal_ranges(address, _NO_OFFSET, length)[0])
