"""A reader of the memory tier while its owner does what is worst for it, at the worst moments, beside a dict.

No thread is raced: :meth:`memserve._core.TierReader.watch` stops the reader between its steps, and the owner, in the
same thread, changes the table there. What is held afterwards must be that key's value and stay so, whatever the owner
does then; what is copied must be that key's value, or not count.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memserve import _core
from tier_names import new_tier_name, remove_tier_files

UNIT, UNITS = 4096, 24
KEYS = [bytes([n]) * 16 for n in range(1, 7)]


class World:
    """An owner whose memory is small, one client of it, and every value that each key ever had."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.name = new_tier_name()
        self.tier = _core.MemoryTier(UNIT * UNITS, UNIT, name=self.name, entries=50)
        self.values: dict[bytes, bytes] = {}
        self.extents: dict[bytes, int] = {}
        self.client = 0
        self.open()

    def open(self) -> None:
        self.client += 1
        path = self.tier.open_client(self.client)
        self.reader = _core.TierReader(self.tier.data_path, self.tier.index_path, path)

    def close(self) -> None:
        self.tier.unlink()
        remove_tier_files(self.name)

    # -- what an owner does

    def put(self, key: bytes, units: int | None = None) -> None:
        length = (units or self.rng.randint(1, 4)) * UNIT - self.rng.randrange(200)
        payload = self.rng.randbytes(length)
        self.remove(key)
        offset = self.tier.allocate(length + len(self.named(key)))
        self.forget_evicted()
        if offset is None:
            return
        assert self.tier.arena is not None
        memoryview(self.tier.arena)[offset : offset + length] = payload
        assert self.tier.publish(key, offset, length, name=self.named(key))
        self.tier.release(offset)
        self.values[key], self.extents[key] = payload, offset

    @staticmethod
    def named(key: bytes) -> bytes:
        return b"the key %03d" % key[0]

    def remove(self, key: bytes) -> None:
        assert self.tier.remove(key) == (self.values.pop(key, None) is not None)

    def forget_evicted(self) -> None:
        for key in self.tier.take_evicted():
            del self.values[key]

    def overwrite_all_that_is_free(self) -> None:
        """Take all memory that can be had, spoil it, and give it back."""
        taken = []
        while (offset := self.tier.allocate(UNIT)) is not None:
            taken.append(offset)
            assert self.tier.arena is not None
            memoryview(self.tier.arena)[offset : offset + UNIT] = b"\xee" * UNIT
        self.forget_evicted()
        for offset in taken:
            self.tier.release(offset)

    def drop_client(self) -> None:
        if not self.reader.closed:
            self.tier.close_client(self.client)

    def worst(self, key: bytes) -> None:
        """One to three things, in any order."""
        acts: list[Callable[[], None]] = [
            lambda: self.remove(key),
            lambda: self.put(key),
            lambda: self.put(self.rng.choice(KEYS)),
            self.overwrite_all_that_is_free,
            self.overwrite_all_that_is_free,
            self.drop_client,
        ]
        for act in self.rng.choices(acts, weights=(4, 4, 2, 4, 4, 1), k=self.rng.randint(1, 3)):
            act()

    # -- the reader, with one interruption

    def interrupt(self, moment: str, act: Callable[[], None]) -> None:
        """``act`` runs at the first such moment, and at no other."""

        def watcher(name: str) -> None:
            if name == moment:
                self.reader.watch(None)
                act()

        self.reader.watch(watcher)

    def hold(self, key: bytes) -> tuple[bytes, tuple[int, int, int] | None]:
        """What was held was its key's value when the pin was found to count: now, then."""
        try:
            held = self.reader.hold(key, self.named(key))
        except OSError as error:
            assert error.errno == errno.ESTALE and self.reader.closed
            return b"", None
        return (read(held[0], held[1]) if held is not None else b""), held


def read(address: int, length: int) -> bytes:
    data = np.zeros(length, np.uint8)
    _core.copy_bytes(data.ctypes.data, address, length)
    return data.tobytes()


@pytest.fixture
def world() -> Iterator[World]:
    world = World(1)
    yield world
    world.close()


@pytest.mark.parametrize("moment", ["seen", "pinned"])
def test_value_replaced_during_pin_reads_as_new_one(world: World, moment: str) -> None:
    key = KEYS[0]
    world.put(key)
    before = world.values[key]
    world.interrupt(moment, lambda: (world.put(key), world.overwrite_all_that_is_free(), world.put(key))[0])
    data, held = world.hold(key)
    assert held is not None and data == world.values[key] != before and world.reader.held == 1


@pytest.mark.parametrize("moment", ["seen", "pinned"])
def test_a_value_that_is_removed_while_it_is_pinned_is_not_held(world: World, moment: str) -> None:
    world.put(KEYS[0])
    world.interrupt(moment, lambda: world.remove(KEYS[0]))
    assert world.hold(KEYS[0]) == (b"", None) and world.reader.held == 0


def test_pin_is_visible_to_owner_before_version_recheck(world: World) -> None:
    world.put(KEYS[0])
    found: list[tuple[int, bool]] = []

    def act() -> None:
        offset, payload = world.extents[KEYS[0]], world.values[KEYS[0]]
        world.remove(KEYS[0])
        world.overwrite_all_that_is_free()
        assert world.tier.arena is not None
        kept = memoryview(world.tier.arena)[offset : offset + len(payload)] == payload
        found.append((world.tier.counters()["limbo"], kept))

    world.interrupt("pinned", act)
    assert world.hold(KEYS[0]) == (b"", None) and found == [(1, True)], "its memory was another's at once"


@pytest.mark.parametrize("moment", ["seen", "pinned"])
def test_client_dropped_during_pin_gets_an_error(world: World, moment: str) -> None:
    world.put(KEYS[0])
    world.interrupt(moment, world.drop_client)
    with pytest.raises(OSError, match="has dropped this client") as raised:
        world.reader.hold(KEYS[0], world.named(KEYS[0]))
    assert raised.value.errno == errno.ESTALE and world.reader.held == 0


def test_copy_is_void_when_its_client_is_dropped(world: World) -> None:
    for key in KEYS[:3]:
        world.put(key, 1)
    keys, names = b"".join(KEYS[:3]), [world.named(key) for key in KEYS[:3]]
    targets = [bytearray(UNIT) for _ in names]
    world.interrupt("copied", world.drop_client)
    assert world.reader.copy(keys, names, targets) == [-1, -1, -1] and world.reader.held == 0
    world.open()
    world.interrupt("copied", world.drop_client)
    assert world.reader.copy_all(keys, names, targets) is None and world.reader.held == 0


@pytest.mark.parametrize("moment", ["seen", "pinned"])
def test_all_are_copied_or_none_when_one_is_removed_meanwhile(world: World, moment: str) -> None:
    for key in KEYS[:3]:
        world.put(key, 1)
    keys, names = b"".join(KEYS[:3]), [world.named(key) for key in KEYS[:3]]
    targets = [bytearray(UNIT) for _ in names]
    world.interrupt(moment, lambda: world.remove(KEYS[0]))
    assert world.reader.copy_all(keys, names, targets) is None and world.reader.held == 0
    assert not any(map(any, targets)), "something was written"
    world.put(KEYS[0], 1)
    assert world.reader.copy_all(keys, names, targets) == [len(world.values[key]) for key in KEYS[:3]]
    assert [bytes(target[: len(world.values[key])]) for key, target in zip(KEYS, targets, strict=False)] == [
        world.values[key] for key in KEYS[:3]
    ]


def test_hash_collision_with_another_name_is_a_miss(world: World) -> None:
    """A hash of two names may be one key; also names of one length."""
    key, name = KEYS[0], World.named(KEYS[0])
    world.put(key)
    for other in (b"", name + b"?", name[:-1], b"?" + name[1:], name[:-1] + b"?"):
        assert world.reader.hold(key, other) is None
        assert world.reader.lengths(key, [other]) == [-1]
        assert world.reader.copy(key, [other], [bytearray(4 * UNIT)]) == [-1]
        assert world.reader.copy_all(key, [other], [bytearray(4 * UNIT)]) is None
    assert world.reader.lengths(key, [name]) == [len(world.values[key])] and world.reader.held == 0


def poke(world: World, key: bytes, at: int, word: int) -> int:
    """Write a word of the key's entry, ``at`` bytes from its key; what stood there before."""
    with open(world.tier.index_path, "r+b") as file:
        place = file.read().index(key) + at
        file.seek(place)
        before = int.from_bytes(file.read(8), "little")
        file.seek(place)
        file.write(word.to_bytes(8, "little"))
    return before


_VERSION, _OFFSET = -8, 16
"""Words of an entry (shared_table.h), from its key."""


def test_entry_being_written_is_not_adopted(world: World) -> None:
    key, name = KEYS[0], World.named(KEYS[0])
    world.put(key)
    version = poke(world, key, _VERSION, 1)
    assert world.reader.hold(key, name) is None and world.reader.lengths(key, [name]) == [-1]
    assert world.reader.where(key) == b"\0"
    poke(world, key, _VERSION, version)
    assert world.hold(key)[0] == world.values[key]


def test_entry_pointing_beyond_memory_is_a_miss(world: World) -> None:
    """The table is another process's: what it says is looked at, not trusted."""
    world.put(KEYS[0])
    for offset in (UNIT * UNITS - 1, UNIT * UNITS, UNIT * UNITS + 1, 1 << 62, (1 << 64) - 1):
        before = poke(world, KEYS[0], _OFFSET, offset)
        assert world.hold(KEYS[0]) == (b"", None)
        poke(world, KEYS[0], _OFFSET, before)
    assert world.hold(KEYS[0])[0] == world.values[KEYS[0]]


def live(seed: int, steps: int) -> tuple[int, int]:
    """How often a value was held though its owner had just done something, and how often not."""
    world, outcomes = World(seed), [0, 0]
    try:
        for _ in range(steps):
            if world.reader.closed:
                world.open()
            for key in world.rng.sample(KEYS, 3):
                world.put(key)
            key = world.rng.choice(KEYS)
            if world.rng.random() < 0.7:
                outcomes[held_through(world, key)] += 1
            else:
                copied_through(world)
            world.tier.check_invariants()
    finally:
        world.close()
    return outcomes[1], outcomes[0]


def held_through(world: World, key: bytes) -> bool:
    ever = [world.values.get(key)]

    def act() -> None:
        world.worst(key)
        ever.append(world.values.get(key))

    world.interrupt(world.rng.choice(("seen", "pinned")), act)
    data, held = world.hold(key)
    world.reader.watch(None)
    if held is None:
        assert world.reader.closed or world.values.get(key) is None, "it is there, and was not found"
        assert world.reader.held == 0
        return False
    assert data == ever[-1] == world.values[key], "another value was served"
    world.remove(key)
    world.overwrite_all_that_is_free()
    assert read(held[0], held[1]) == data, "what is held was given to another"
    world.reader.let_go(held[2])
    return True


def copied_through(world: World) -> None:
    keys = world.rng.sample(KEYS, 4)
    names, targets = [world.named(key) for key in keys], [bytearray(4 * UNIT) for _ in keys]
    ever = {key: {world.values.get(key)} for key in keys}

    def act() -> None:
        world.worst(world.rng.choice(keys))
        for key in keys:
            ever[key].add(world.values.get(key))

    world.interrupt(world.rng.choice(("seen", "pinned", "copied")), act)
    whole = world.rng.random() < 0.5
    if whole:  # only what is there can be copied together
        keys = [key for key in keys if key in world.values]
        names, targets = [world.named(key) for key in keys], targets[: len(keys)]
    try:
        copied = (world.reader.copy_all if whole else world.reader.copy)(b"".join(keys), names, targets)
        lengths = [-1] * len(keys) if copied is None else copied
    except OSError as error:
        assert error.errno == errno.ESTALE and world.reader.closed
        lengths = [-1] * len(keys)
    world.reader.watch(None)
    for key, length, target in zip(keys, lengths, targets, strict=True):
        assert (bytes(target[:length]) if length >= 0 else None) in ever[key] | {None}, "another value was copied"
        assert length < 0 or not world.reader.closed, "the memory was not protected"
    assert world.reader.held == 0


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_owner_does_only_the_keys_own_value_is_read(seed: int) -> None:
    held, not_held = live(seed, 60)
    assert held > 3 and not_held > 3, "the seeds do not try both"


def main(first: int, count: int) -> None:
    """More of the same, with ``tests/support`` in the path: ``python test_tier_reader_moments.py FIRST COUNT``."""
    for seed in range(first, first + count):
        live(seed, 200)


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]), int(sys.argv[2]))
