"""The memory tier by example: what is evicted first, which references hold a value, and what is refused."""

from __future__ import annotations

import pytest

from memserve import _core
from memserve._core import MemoryTier
from memserve.base.errors import InvariantError

BLOCK = 8192


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def put(tier: MemoryTier, number: int, nbytes: int = BLOCK) -> int | None:
    """A value to which only the table refers."""
    offset = tier.allocate(nbytes)
    if offset is not None:
        assert tier.publish(key(number), offset, nbytes)
        tier.release(offset)
    return offset


def test_the_oldest_goes_unless_it_was_hit() -> None:
    tier = MemoryTier(4 * BLOCK, BLOCK)
    for number in range(4):
        assert put(tier, number) is not None
    place = tier.find(key(0))
    assert place is not None and (place.length, place.verified, place.name) == (BLOCK, True, b"")
    assert tier.bytes_evictable == 3 * BLOCK and tier.blocks_evictable == 3
    put(tier, 4)
    assert tier.take_evicted() == [key(1)]  # 0 is in use
    tier.release(place.offset)
    for number in (5, 6, 7):
        put(tier, number)
    assert tier.take_evicted() == [key(2), key(3), key(4)]  # 0 was hit: it has a round more, behind them
    assert key(0) in tier
    put(tier, 8)
    assert tier.take_evicted() == [key(5)]
    put(tier, 9)
    assert tier.take_evicted() == [key(6)]
    tier.check_invariants()


def test_a_look_that_is_no_hit_leaves_the_order() -> None:
    """Else what is verified, compared or written to a disk would be kept in the place of what is asked for."""
    tier = MemoryTier(4 * BLOCK, BLOCK)
    for number in range(4):
        put(tier, number)
    place = tier.find(key(0), counts=False)
    assert place is not None
    put(tier, 4)
    assert tier.take_evicted() == [key(1)] and tier.blocks_evictable == 3  # 0 is in use
    tier.release(place.offset)
    put(tier, 5)
    assert tier.take_evicted() == [key(0)]
    tier.check_invariants()


def test_touched_values_go_later_the_last_one_first() -> None:
    tier = MemoryTier(6 * BLOCK, BLOCK)
    for number in range(6):
        put(tier, number)
    tier.touch(key(0) + key(9) + key(1), hit=False)
    tier.touch(key(2) + key(3), hit=True)
    assert tier.counters()["hits"] == tier.counters()["misses"] == 0
    for number in range(10, 14):
        put(tier, number)
    assert tier.take_evicted() == [key(4), key(5), key(1), key(0)]
    for number in range(14, 20):
        put(tier, number)
    assert tier.take_evicted() == [*map(key, range(10, 14)), key(3), key(2)]  # their round more is over
    tier.check_invariants()


def test_blocks_come_from_the_bottom_and_runs_from_the_top() -> None:
    tier = MemoryTier(8 * BLOCK, BLOCK)
    blocks = tier.allocate_blocks(2)
    assert blocks is not None and blocks.tolist() == [0, 1]
    assert tier.allocate(BLOCK + 1) == 8 * BLOCK - 3 * 4096
    assert tier.allocate(100) == 8 * BLOCK - 4 * 4096  # a slab of 128 bytes
    assert tier.allocate(65) == 8 * BLOCK - 4 * 4096 + 128
    assert tier.allocate(3) == 8 * BLOCK - 5 * 4096
    assert (tier.blocks_free, tier.bytes_free) == (3, 3 * BLOCK + 4096)
    assert tier.allocate_blocks(4) is None and tier.allocate_blocks(0) is not None
    tier.release_blocks(blocks)
    more = tier.allocate_blocks(5)
    assert more is not None and more.tolist() == [0, 1, 2, 3, 4]
    tier.check_invariants()


def test_block_allocation_evicts_unused_values_only() -> None:
    tier = MemoryTier(2 * BLOCK, BLOCK)
    for number in range(40):
        put(tier, number, 2048 if number % 2 else 64)
    used = tier.find(key(0), counts=False)
    assert used is not None
    blocks = tier.allocate_blocks(1)
    assert blocks is not None and blocks[0] == 1 - used.offset // BLOCK
    assert key(0) in tier and 0 < len(tier) < 40
    before = len(tier)
    tier.take_evicted()
    assert tier.allocate_blocks(1) is None
    assert (len(tier), tier.take_evicted()) == (before, [])  # nothing goes for nothing
    tier.check_invariants()


def test_a_table_that_is_full_evicts_although_there_is_room() -> None:
    tier = MemoryTier(100 * BLOCK, BLOCK, entries=5)
    for number in range(8):
        put(tier, number, 10)
    assert len(tier) == 5 and tier.take_evicted() == [key(0), key(1), key(2)]


def test_references_and_keys_are_counted() -> None:
    tier = MemoryTier(4 * BLOCK, BLOCK)
    offset = tier.allocate(10)
    assert offset is not None and tier.ref_count(offset) == 1 and tier.ref_count(1) == 0
    assert tier.publish(key(1), offset, 6, scope=7, seal=9, name=b"four")
    other = tier.allocate(10)
    assert other is not None
    assert not tier.publish(key(1), other, 10)
    with pytest.raises(InvariantError, match="exceed their extent"):
        tier.publish(key(2), other, 60, name=b"fives")
    with pytest.raises(InvariantError, match="had, a key"):
        tier.publish(key(2), offset, 1)
    tier.release(offset)
    with pytest.raises(InvariantError, match="only the table"):
        tier.release(offset)
    assert tier.remove(key(1)) and not tier.remove(key(1))
    for call in (tier.release, tier.retain):
        with pytest.raises(InvariantError, match="none that is held begins there"):
            call(offset)
    with pytest.raises(InvariantError):
        tier.release_blocks([0])
    tier.release(other)
    assert tier.bytes_used == 0
    tier.check_invariants()


def test_invalid_tier_arguments_are_refused() -> None:
    for arena_bytes, block_bytes in ((0, 1), (10, 0), (10, 11), (1 << 50, 4096)):
        with pytest.raises(ValueError):
            MemoryTier(arena_bytes, block_bytes)
    for name in ("a/b", "a.b", "..", "x" * 65, "ü"):
        with pytest.raises(ValueError, match="letters, digits"):
            MemoryTier(BLOCK, BLOCK, name=name)
    tier = MemoryTier(BLOCK, BLOCK)
    assert tier.arena is None and tier.data_path == ""
    assert tier.allocate(BLOCK + 1) is None and tier.allocate(1 << 60) is None and tier.allocate_blocks(1 << 40) is None
    for call in (lambda: tier.allocate(-1), lambda: tier.allocate_blocks(-1), lambda: tier.find(b"short")):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(ValueError, match="no client can read it"):
        tier.open_client(1)
    offset = tier.allocate(10)
    assert offset is not None
    with pytest.raises(ValueError, match="1,024"):
        tier.publish(key(1), offset, 1, name=bytes(1025))


def test_keys_of_values_are_told_apart_by_secret_scope_and_key() -> None:
    secret, keys = bytes(range(16)), [b"", b"a", b"ab", bytes(1000)]
    made = _core.value_keys(secret, b"tenant", keys)
    assert made == b"".join(_core.siphash128(secret, (6).to_bytes(8, "little") + b"tenant" + k) for k in keys)
    assert _core.value_keys(secret, b"ten", [b"anta"]) != _core.value_keys(secret, b"tenant", [b"a"])
    assert _core.value_keys(secret, b"", []) == b""
    with pytest.raises(ValueError, match="16 bytes"):
        _core.value_keys(b"short", b"", keys)
    with pytest.raises(TypeError):
        _core.value_keys(secret, b"", ["text"])  # not bytes


def test_tables_of_one_secret_take_the_same_memory() -> None:
    """Else a simulated store would say other sizes in each process."""

    def sizes(**secret: bytes) -> list[int]:
        tier, seen = MemoryTier(2000 * BLOCK, BLOCK, **secret), []
        for number in range(1800):
            put(tier, number)
            seen.append(tier.nbytes)
        return seen

    assert sizes(secret=bytes(range(16))) == sizes(secret=bytes(range(16)))
    assert sizes() != sizes()
    with pytest.raises(ValueError, match="16 bytes"):
        MemoryTier(4 * BLOCK, BLOCK, secret=b"short")
