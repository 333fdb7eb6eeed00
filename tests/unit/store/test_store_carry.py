"""Values of clients go on when a store gets memory with blocks of another size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from memserve import _core
from memserve.base.units import KIB
from memserve.store.host.memory_jobs import put_values, take_values
from memserve.store.machine.block_pool import KV_SCOPE
from tier_names import new_tier_name, remove_tier_files

SCOPE = 77


def seal_of(data: bytes) -> int:
    if not data:
        return 0
    array = np.frombuffer(data, np.uint8)
    return int(_core.seal_ranges(array.ctypes.data, np.zeros(1, np.int64), len(data))[0])


class Memory:
    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self.name = new_tier_name()
        self.tier = _core.MemoryTier(nbytes, block_bytes, name=self.name)
        self.bytes = np.frombuffer(self.tier.arena, np.uint8)

    def put(self, key: bytes, data: bytes, *, scope: int = SCOPE, name: bytes = b"", seal: int | None = None) -> None:
        offset = self.tier.allocate(max(1, len(data) + len(name)))
        assert offset is not None
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        seal = seal_of(data) if seal is None else seal
        assert self.tier.publish(key, offset, len(data), scope=scope, seal=seal, name=name)
        self.tier.release(offset)

    def get(self, key: bytes) -> tuple[bytes, bytes, int] | None:
        place = self.tier.find(key, counts=False)
        if place is None:
            return None
        self.tier.release(place.offset)
        return bytes(self.bytes[place.offset : place.offset + place.length]), place.name, place.scope


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture
def memories() -> Iterator[tuple[Memory, Memory]]:
    both = Memory(64 * 4 * KIB, 4 * KIB), Memory(8 * 32 * KIB, 32 * KIB)
    yield both
    for memory in both:
        remove_tier_files(memory.name)


def test_values_arrive_with_name_owner_and_seal(memories) -> None:
    old, new = memories
    values = {key(n): bytes([n]) * (700 * n) for n in range(12)}
    for at, data in values.items():
        old.put(at, data, name=b"name of " + at[:1])
    old.put(key(99), bytes(4 * KIB), scope=KV_SCOPE)
    carried = take_values(old.tier, lambda _: False)
    put_values(new.tier, carried)
    assert carried.lost == 0 and len(new.tier) == 12, "KV of another model is of no use"
    for at, data in values.items():
        assert new.get(at) == (data, b"name of " + at[:1], SCOPE)
    new.tier.check_invariants()
    old.tier.check_invariants()


def test_values_on_disk_or_damaged_are_not_carried(memories) -> None:
    old, _ = memories
    for n in range(3):
        old.put(key(n), b"x" * 500, seal=None if n else 1)
    carried = take_values(old.tier, lambda at: at == key(1))
    assert [value.key for value in carried.values] == [key(2)] and carried.lost == 1


def test_carry_beyond_the_limit_counts_as_lost(memories) -> None:
    old, _ = memories
    for n in range(40):
        old.put(key(n), bytes([n]) * 4000)
    carried = take_values(old.tier, lambda _: False, bytes_max=100_000)
    assert len(carried.values) == 25 and carried.lost == 15
    small = Memory(2 * 32 * KIB, 32 * KIB)
    put_values(small.tier, carried)
    assert len(small.tier) == len(carried.values) < 25 and carried.lost == 40 - len(carried.values)
    small.tier.check_invariants()
    remove_tier_files(small.name)
