"""The memory tier beside a dict: random lives, private and shared, with readers, owners that die and adoptions."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

from memserve import _core
from memserve.base.errors import InvariantError
from tier_names import new_tier_name, remove_tier_files

CLASSES = [64 << c for c in range(6)]


@dataclass
class Value:
    offset: int
    payload: bytes
    scope: int
    seal: int
    name: bytes
    verified: bool = True


class Twin:
    """What the tier must know: extents with their bytes and references, values by key."""

    def __init__(self, arena_bytes: int, block_bytes: int) -> None:
        self.unit = 4096 if block_bytes % 4096 == 0 else block_bytes
        self.block_bytes = block_bytes
        self.units = arena_bytes // self.unit
        self.blocks = arena_bytes // block_bytes
        self.size: dict[int, int] = {}
        self.mine: Counter[int] = Counter()  # references of the caller
        self.had_key: set[int] = set()
        self.values: dict[bytes, Value] = {}
        self.limbo: dict[int, int] = {}  # removed, and a client may read it

    def shape(self, length: int) -> int:
        """The bytes that a value of this length takes."""
        for size in CLASSES:
            if size * 2 <= self.unit and length <= size:
                return size
        return max(1, -(-length // self.unit)) * self.unit

    def add(self, offset: int, size: int) -> None:
        assert offset >= 0 and offset + size <= self.units * self.unit
        for other, taken in [*self.size.items(), *self.limbo.items()]:
            assert offset + size <= other or other + taken <= offset, "two extents overlap"
        self.size[offset] = size
        self.mine[offset] += 1
        self.had_key.discard(offset)

    def key_of(self, offset: int) -> bytes | None:
        return next((key for key, value in self.values.items() if value.offset == offset), None)

    def references(self, offset: int) -> int:
        return self.mine[offset] + (self.key_of(offset) is not None)

    def loose(self, pinned: set[int]) -> list[bool]:
        """Of each unit: whether it is free, or holds only what may be evicted."""
        loose = [True] * self.units
        published = {value.offset for value in self.values.values()}
        for offset, size in [*self.size.items(), *self.limbo.items()]:
            if offset not in published or self.mine[offset] or offset in pinned:
                if offset in self.limbo and offset not in pinned:
                    continue
                for unit in range(offset // self.unit, (offset + size - 1) // self.unit + 1):
                    loose[unit] = False
        return loose

    def blocks_possible(self, pinned: set[int]) -> int:
        loose, each = self.loose(pinned), self.block_bytes // self.unit
        return sum(all(loose[b * each : (b + 1) * each]) for b in range(self.blocks))

    def run_possible(self, size: int, pinned: set[int]) -> bool:
        run, wanted = 0, max(1, size // self.unit)
        for loose in self.loose(pinned):
            run = run + 1 if loose else 0
            if run == wanted:
                return True
        return False

    def part_possible(self, size: int, pinned: set[int]) -> bool:
        """Whether a slab of this class has a part that is free, or may be."""
        for unit in {offset // self.unit for offset, taken in self.size.items() if taken == size}:
            parts = [offset for offset, taken in self.size.items() if taken == size and offset // self.unit == unit]
            parts += [offset for offset in self.limbo if offset // self.unit == unit]
            kept = [offset for offset in parts if self.key_of(offset) is None or self.mine[offset] or offset in pinned]
            if len(kept) < min(64, self.unit // size):
                return True
        return False

    def units_taken(self) -> int:
        taken = set()
        for offset, size in [*self.size.items(), *self.limbo.items()]:
            taken |= set(range(offset // self.unit, (offset + size - 1) // self.unit + 1))
        return len(taken)


class Life:
    """A tier and its twin, the same operations on both."""

    def __init__(self, seed: int, shared: bool) -> None:
        self.rng = random.Random(seed)
        self.block_bytes = self.rng.choice((4096, 3 * 4096, 16384, 1000, 5000))
        self.arena_bytes = self.block_bytes * self.rng.randint(3, 40) + self.rng.randrange(self.block_bytes)
        self.name = new_tier_name() if shared else ""
        self.tier = self.new_tier()
        self.twin = Twin(self.arena_bytes, self.block_bytes)
        self.keys = [self.rng.randbytes(16) for _ in range(60)]
        self.on_disk: set[bytes] = set()
        self.clients: dict[int, _core.TierReader] = {}
        self.old: list[_core.TierReader] = []  # of clients of an owner that is gone
        self.held: list[tuple[_core.TierReader, int, int, bytes]] = []  # with the offset and what was read
        self.next_client = 0

    def new_tier(self) -> _core.MemoryTier:
        return _core.MemoryTier(self.arena_bytes, self.block_bytes, name=self.name, entries=400)

    def close(self) -> None:
        self.tier.unlink()
        if self.name:
            remove_tier_files(self.name)

    def pinned(self) -> set[int]:
        return {offset for _, _, offset, _ in self.held}

    # -- what changes

    def took_room(self) -> None:
        for key in self.tier.take_evicted():
            value = self.twin.values.pop(key)
            assert self.twin.mine[value.offset] == 0 and value.offset not in self.pinned(), "it was in use"
            del self.twin.size[value.offset]
        self.settle_limbo()

    def settle_limbo(self) -> None:
        """The tier frees what clients read no longer when it needs room, all of it at once."""
        pinned = self.pinned()
        if self.tier.counters()["limbo"] < len(self.twin.limbo):
            self.twin.limbo = {offset: size for offset, size in self.twin.limbo.items() if offset in pinned}
        assert self.tier.counters()["limbo"] == len(self.twin.limbo)

    def allocate(self) -> None:
        limit = self.rng.choice((100, 3000, 3 * self.twin.unit, 8 * self.twin.unit))
        length = self.rng.randrange(limit)
        size = self.twin.shape(length)
        offset = self.tier.allocate(length)
        self.took_room()
        if offset is None:
            assert not self.twin.run_possible(size, self.pinned())
            assert size >= self.twin.unit or not self.twin.part_possible(size, self.pinned())
        else:
            self.twin.add(offset, size)

    def allocate_blocks(self) -> None:
        count = self.rng.choice((1, 1, 2, 5, self.twin.blocks, self.twin.blocks + 1))
        before = set(self.twin.values)
        ids = self.tier.allocate_blocks(count)
        self.took_room()
        if ids is None:
            assert self.twin.blocks_possible(self.pinned()) < count
            assert set(self.twin.values) == before, "values went for nothing"
            return
        assert len(ids) == count
        for block in ids:
            self.twin.add(block * self.block_bytes, self.block_bytes)

    def unpublished(self) -> list[int]:
        return [offset for offset, count in self.twin.mine.items() if count and offset not in self.twin.had_key]

    def publish(self) -> None:
        offsets = self.unpublished()
        if not offsets:
            return
        offset, key = self.rng.choice(offsets), self.rng.choice(self.keys)
        size = self.twin.size[offset]
        name = self.rng.randbytes(self.rng.choice((0, 0, 7))) if size >= 64 else b""
        payload = self.rng.randbytes(min(size - len(name), self.rng.choice((0, 9, size))))
        scope, seal = self.rng.getrandbits(32), self.rng.getrandbits(64)
        self.write(offset, payload)
        done = self.tier.publish(key, offset, len(payload), scope=scope, seal=seal, name=name)
        self.took_room()
        assert done == (key not in self.twin.values)
        if done:
            self.twin.had_key.add(offset)
            self.twin.values[key] = Value(offset, payload, scope, seal, name)

    def write(self, offset: int, payload: bytes) -> None:
        if self.tier.arena is not None:
            memoryview(self.tier.arena)[offset : offset + len(payload)] = payload

    def release(self) -> None:
        held = sorted(self.twin.mine.elements())
        some = self.rng.sample(held, min(len(held), self.rng.randint(1, 4)))
        blocks = [offset // self.block_bytes for offset in some if offset % self.block_bytes == 0]
        if len(blocks) == len(some) and self.rng.random() < 0.5:
            self.tier.release_blocks(blocks)
        else:
            for offset in some:
                self.tier.release(offset)
        for offset in some:
            self.drop(offset)

    def drop(self, offset: int) -> None:
        self.twin.mine[offset] -= 1
        if self.twin.mine[offset] == 0:
            del self.twin.mine[offset]
            if self.twin.key_of(offset) is None:
                self.free(offset)

    def free(self, offset: int) -> None:
        size = self.twin.size.pop(offset)
        if offset in self.pinned():
            self.twin.limbo[offset] = size

    def retain(self) -> None:
        if self.twin.size:
            offset = self.rng.choice(list(self.twin.size))
            self.tier.retain(offset)
            self.twin.mine[offset] += 1

    def find(self) -> None:
        key = self.rng.choice(self.keys)
        place, value = self.tier.find(key, counts=self.rng.random() < 0.8), self.twin.values.get(key)
        assert (place is None) == (value is None)
        if place is None or value is None:
            return
        self.twin.mine[value.offset] += 1
        assert (place.offset, place.length, place.scope, place.seal) == (
            value.offset, len(value.payload), value.scope, value.seal,
        )  # fmt: skip
        assert (place.name, place.verified) == (value.name, value.verified)

    def remove(self) -> None:
        key = self.rng.choice(self.keys)
        value = self.twin.values.pop(key, None)
        assert self.tier.remove(key) == (value is not None)
        if value is not None and not self.twin.mine[value.offset]:
            self.free(value.offset)

    def purge(self) -> None:
        self.tier.purge()
        values, self.twin.values = self.twin.values, {}
        for value in values.values():
            if not self.twin.mine[value.offset]:
                self.free(value.offset)

    def mark(self) -> None:
        key, here = self.rng.choice(self.keys), self.rng.random() < 0.6
        self.tier.mark_on_disk(key, here)
        (self.on_disk.add if here else self.on_disk.discard)(key)

    def verify(self) -> None:
        key = self.rng.choice(self.keys)
        self.tier.verified(key)
        if key in self.twin.values:
            self.twin.values[key].verified = True

    def misuse(self) -> None:
        """Nothing changes."""
        taken = set(self.twin.size)
        offset = next(o for o in range(0, self.arena_bytes, 4096) if o not in taken) if 0 not in taken else 1
        idle = [value.offset for value in self.twin.values.values() if not self.twin.mine[value.offset]]
        for bad in (offset, *idle[:1]):
            with pytest.raises(InvariantError):
                self.tier.release(bad)
        with pytest.raises(InvariantError):
            self.tier.retain(offset)
        for spent in self.twin.had_key & set(self.twin.size):
            with pytest.raises(InvariantError, match="had, a key"):
                self.tier.publish(bytes(16), spent, 0)

    # -- clients

    def open_client(self) -> None:
        if not self.name or len(self.clients) > 2:
            return
        self.next_client += 1
        path = self.tier.open_client(self.next_client)
        self.clients[self.next_client] = _core.TierReader(self.tier.data_path, self.tier.index_path, path)

    def close_client(self) -> None:
        if not self.clients:
            return
        number = self.rng.choice(list(self.clients))
        reader = self.clients.pop(number)
        self.held = [hold for hold in self.held if hold[0] is not reader]
        self.tier.close_client(number)
        assert reader.closed
        self.settle_limbo()

    def hold(self) -> None:
        if not self.clients:
            return
        reader, key = self.rng.choice(list(self.clients.values())), self.rng.choice(self.keys)
        value = self.twin.values.get(key)
        name = value.name if value is not None else b""
        assert reader.hold(key, name + b"?") is None
        try:
            held = reader.hold(key, name)
        except OSError:  # its share is full
            assert reader.held >= 1
            return
        assert (held is None) == (value is None or not value.verified)
        if held is None or value is None:
            return
        address, length, pin = held
        assert self.bytes_at(address, length) == value.payload
        self.held.append((reader, pin, value.offset, value.payload))

    @staticmethod
    def bytes_at(address: int, length: int) -> bytes:
        data = np.zeros(max(length, 1), np.uint8)
        if length:
            _core.copy_bytes(data.ctypes.data, address, length)
        return data.tobytes()[:length]

    def touch(self) -> None:
        """Nothing but the order changes, whatever is in use."""
        self.tier.touch(b"".join(self.rng.sample(self.keys, self.rng.choice((1, 5, 20)))), hit=self.rng.random() < 0.5)

    def let_go(self) -> None:
        if self.held:
            reader, pin, _, _ = self.held.pop(self.rng.randrange(len(self.held)))
            reader.let_go(pin)

    def copy(self) -> None:
        if not self.clients:
            return
        reader = self.rng.choice(list(self.clients.values()))
        keys = self.rng.sample(self.keys, 20)
        values = [self.twin.values.get(key) for key in keys]
        names = [value.name if value else b"" for value in values]
        targets = [bytearray(self.arena_bytes) for _ in keys]
        try:
            lengths = reader.copy(b"".join(keys), names, targets, threads=self.rng.choice((1, 3)))
        except OSError:
            assert reader.held >= 1
            return
        for value, length, target in zip(values, lengths, targets, strict=True):
            if value is None or not value.verified:
                assert length == -1
            else:
                assert target[:length] == value.payload

    def copy_all(self) -> None:
        if not self.clients:
            return
        reader = self.rng.choice(list(self.clients.values()))
        keys = self.rng.sample(self.keys, self.rng.choice((1, 2, 3)))
        values = [self.twin.values.get(key) for key in keys]
        names = [value.name if value else b"" for value in values]
        short = self.rng.random() < 0.3
        sizes = [len(value.payload) - short if value else 1 for value in values]
        targets = [bytearray(b"\xee" * max(0, size)) for size in sizes]
        lengths = reader.copy_all(b"".join(keys), names, targets, threads=self.rng.choice((1, 3)))
        fits = [
            value is not None and value.verified and len(value.payload) <= len(target)
            for value, target in zip(values, targets, strict=True)
        ]
        if lengths is None:
            assert not all(fits) or reader.held >= 1
            assert all(target.count(0xEE) == len(target) for target in targets), "something was written"
        else:
            assert all(fits) and targets == [value.payload for value in values if value]

    def new_owner(self) -> None:
        """As after a kill: what was published is there again, what was not is gone; clients read on."""
        if not self.name:
            return
        self.old = [reader for reader in [*self.old, *self.clients.values()] if any(h[0] is reader for h in self.held)]
        self.clients.clear()
        del self.tier
        self.tier = self.new_tier()
        assert self.tier.adopted
        self.on_disk.clear()
        self.twin.mine.clear()
        kept = {value.offset: self.twin.size[value.offset] for value in self.twin.values.values()}
        self.twin.size, self.twin.limbo = kept, {}
        for value in self.twin.values.values():
            value.verified = False
        # What an old client reads of a value that is gone is not known any more: it had been removed already.
        published = {value.offset for value in self.twin.values.values()}
        for hold in [hold for hold in self.held if hold[2] not in published]:
            hold[0].let_go(hold[1])
            self.held.remove(hold)

    # -- what is compared

    def check(self) -> None:
        tier, twin = self.tier, self.twin
        tier.check_invariants()
        self.settle_limbo()
        keys = tier.keys()
        assert {keys[i : i + 16] for i in range(0, len(keys), 16)} == set(twin.values)
        assert len(tier) == tier.entries_used == len(twin.values)
        assert tier.bytes_used == twin.units_taken() * twin.unit
        assert tier.bytes_free == (twin.units - twin.units_taken()) * twin.unit
        idle = [value.offset for value in twin.values.values() if not twin.mine[value.offset]]
        assert tier.bytes_evictable == sum(twin.size[offset] for offset in idle)
        for offset in twin.size:
            assert tier.ref_count(offset) == twin.references(offset)
        some = self.rng.sample(self.keys, 8)
        here = [key in twin.values for key in some]
        assert [key in tier for key in some] == here
        assert tier.prefix(b"".join(some)) == (here.index(False) if False in here else len(here))
        for reader in self.clients.values():
            shown = bytes(1 if k in twin.values else 2 if k in self.on_disk else 0 for k in some)
            assert reader.where(b"".join(some)) == shown
            assert reader.prefix(b"".join(some)) == (shown.index(0) if 0 in shown else len(shown))
        if self.name:
            assert tier.places_used == len(set(twin.values) | self.on_disk)
        for reader, _, offset, payload in self.held:
            assert not reader.closed
            arena = memoryview(tier.arena) if tier.arena is not None else memoryview(b"")
            assert arena[offset : offset + len(payload)] == payload, "what a client reads has changed"

    def run(self, steps: int) -> None:
        often = (self.allocate, self.allocate_blocks, self.publish, self.publish, self.release, self.release, self.find)
        common = (
            self.remove,
            self.retain,
            self.mark,
            self.verify,
            self.hold,
            self.hold,
            self.let_go,
            self.copy,
            self.copy_all,
            self.touch,
        )
        rare = (self.purge, self.misuse, self.open_client, self.close_client, self.new_owner)
        for _ in range(steps):
            kind = self.rng.random()
            self.rng.choice(often if kind < 0.75 else common if kind < 0.97 else rare)()
            self.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_private_tier_equals_its_twin(seed: int) -> None:
    Life(seed, shared=False).run(250)


@pytest.mark.parametrize("seed", range(60))
def test_a_shared_tier_equals_its_twin_across_owners_and_clients(seed: int) -> None:
    life = Life(1000 + seed, shared=True)
    try:
        life.open_client()
        life.run(250)
    finally:
        life.close()


def main(first: int, count: int) -> None:
    """More of the same: ``python tests/twins/core/test_memory_tier.py FIRST COUNT``."""
    for seed in range(first, first + count):
        for shared in (False, True):
            life = Life(seed, shared)
            try:
                life.run(400)
            finally:
                life.close()


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), int(sys.argv[2]))
