"""MemPool: Table 1's calls with real bytes; nothing wrong may come back from any tier."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import memserve
from memserve.errors import InvariantError, UserError
from memserve.mempool.addresses import Address, Addresses
from memserve.mempool.mempool import MemPool
from memserve.types import KVGeometry, Tier

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim_k=8, head_dim_v=4, dtype="float32", block_tokens=4)
BYTES = GEOMETRY.block_bytes


def make(hbm: int, dram: int = 0, **options) -> MemPool:
    return MemPool(GEOMETRY, hbm_bytes=hbm * BYTES + 1, dram_bytes=dram * BYTES + 1, **options)


def tokens_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def pattern(prefix: np.ndarray) -> np.ndarray:
    """Bytes that only this prefix has."""
    seed = [int(t) for t in prefix]
    shape = (GEOMETRY.num_layers, GEOMETRY.page_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def store(pool: MemPool, tokens: np.ndarray) -> bool:
    """What an engine does: reuse, compute the rest, insert, let go."""
    found = pool.match(tokens)
    fresh = pool.alloc_mem(len(tokens) // 4 - len(found))
    if fresh is not None:
        for at, address in enumerate(fresh, start=len(found)):
            pool.view(address)[...] = pattern(tokens[: (at + 1) * 4])
        pool.insert(tokens, found + fresh)
        pool.free_mem(fresh)
    pool.free_mem(found)
    return fresh is not None


def check_bytes(pool: MemPool, tokens: np.ndarray) -> int:
    found = pool.match(tokens)
    for at, address in enumerate(found):
        assert np.array_equal(pool.view(address), pattern(tokens[: (at + 1) * 4]))
    pool.free_mem(found)
    return len(found)


def test_is_public() -> None:
    assert memserve.MemPool is MemPool


def test_down_and_up_again_byte_exact() -> None:
    pool = make(4, 8)
    first, second = np.arange(16, dtype=np.int32), np.arange(100, 116, dtype=np.int32)
    assert store(pool, first) and store(pool, second)  # the second pushes the first down to DRAM
    report = pool.report().by_tier
    assert (report[Tier.HBM].blocks_cached, report[Tier.DRAM].blocks_cached) == (4, 4)
    assert pool.cached_tokens(first) == pool.cached_tokens(second) == 16
    assert check_bytes(pool, first) == 4  # comes up, the second goes down
    assert check_bytes(pool, second) == 4
    pool.check_invariants()


@pytest.mark.parametrize(("hbm", "dram", "threads"), [(6, 0, 1), (6, 5, 1), (12, 30, 2), (3, 40, 1)])
def test_random_traffic_is_byte_exact(hbm: int, dram: int, threads: int) -> None:
    random, pool = Random(hbm * 100 + dram), make(hbm, dram, copy_threads=threads)
    prompts = [np.array([random.randrange(2) for _ in range(4 * random.randint(1, hbm))], np.int32) for _ in range(30)]
    hits = 0
    for _ in range(400):
        tokens = random.choice(prompts)
        action = random.random()
        if action < 0.5:
            store(pool, tokens)
        elif action < 0.9:
            hits += check_bytes(pool, tokens)
        elif action < 0.95:
            pool.swap_out(random.randint(0, 4))
        else:
            pool.delete(tokens)
        pool.check_invariants()
    assert hits > 20  # else nothing was checked
    report = pool.report().by_tier
    assert report[Tier.HBM].blocks_used == report[Tier.HBM].blocks_evictable  # nobody holds anything


def test_match_holds_what_it_returns() -> None:
    pool = make(4)
    tokens = np.arange(16, dtype=np.int32)
    assert store(pool, tokens)
    held = pool.match(tokens)
    assert pool.alloc_mem(1) is None
    pool.free_mem(held[2:])
    assert pool.alloc_mem(3) is None
    assert len(pool.alloc_mem(2) or []) == 2
    assert np.array_equal(pool.view(held[0]), pattern(tokens[:4]))


def test_swap_out_moves_the_oldest_cached_blocks() -> None:
    pool = make(8, 3)
    old, new = np.arange(8, dtype=np.int32), np.arange(50, 58, dtype=np.int32)
    assert store(pool, old) and store(pool, new)
    assert pool.swap_out(2) == 2
    assert pool.report().by_tier[Tier.DRAM].blocks_cached == 2
    assert pool.match(new).tier == Tier.HBM and check_bytes(pool, old) == 2
    assert make(4, 0).swap_out(3) == 0


def test_callers_blocks_move_between_tiers() -> None:
    pool = make(2, 2)
    held = pool.alloc_mem(2)
    want = [pattern(tokens_of(i)) for i in range(2)]
    for address, data in zip(held, want, strict=True):
        pool.view(address)[...] = data
    below = pool.swap_out_blocks(held)
    assert below.tier == Tier.DRAM and pool.report().by_tier[Tier.HBM].blocks_free == 2
    assert all(np.array_equal(pool.view(a), d) for a, d in zip(below, want, strict=True))
    other = pool.alloc_mem(1)
    assert pool.swap_in(below) is None
    pool.free_mem(other)
    above = pool.swap_in(below)
    assert all(np.array_equal(pool.view(a), d) for a, d in zip(above, want, strict=True))
    assert pool.report().by_tier[Tier.DRAM].blocks_free == 2


def test_dram_blocks_can_be_inserted_and_come_up() -> None:
    pool = make(2, 2)
    tokens = np.arange(8, dtype=np.int32)
    held = pool.alloc_mem(2, Tier.DRAM)
    for at, address in enumerate(held):
        pool.view(address)[...] = pattern(tokens[: (at + 1) * 4])
    assert pool.insert(tokens, held) == 2
    assert check_bytes(pool, tokens) == 2
    pool.free_mem(held)
    pool.check_invariants()
    assert pool.report().by_tier[Tier.DRAM].blocks_free == 2


def test_a_held_dram_block_is_no_room() -> None:
    """The index may forget a block that the caller still holds; that makes no room, and is not promised as such."""
    pool = make(1, 2)
    held = pool.alloc_mem(2, Tier.DRAM)
    pool.insert(np.arange(8, dtype=np.int32), held)
    assert pool.alloc_mem(1, Tier.DRAM) is None
    pool.free_mem(held[:1])
    assert pool.alloc_mem(2, Tier.DRAM) is None
    pool.free_mem(held[1:])
    assert len(pool.alloc_mem(2, Tier.DRAM)) == 2


def test_tenants_and_models_do_not_share() -> None:
    tokens = np.arange(8, dtype=np.int32)
    one, two = make(4, tenant="a"), make(4, tenant="b")
    assert store(one, tokens)
    names = {p._pool._name(p.tenant) for p in (one, two, make(4, tenant="a", namespace="m"))}
    assert len(names) == 3 and two.cached_tokens(tokens) == 0


def test_addresses() -> None:
    held = make(5).alloc_mem(3)
    assert held[1] == Address(Tier.HBM, 1, 0) and list(held[1:]) == [Address(Tier.HBM, 1), Address(Tier.HBM, 2)]
    assert held == held[:] and held != held[1:] and repr(held) == "Addresses(HBM, [0, 1, 2])"
    assert isinstance(held[:2], Addresses) and hash(held) == hash(held[:])


def test_bad_input() -> None:
    pool = make(4, 2)
    held = pool.alloc_mem(2)
    tokens = np.arange(8, dtype=np.int32)
    with pytest.raises(UserError, match="no block"):
        MemPool(GEOMETRY, hbm_bytes=1)
    with pytest.raises(UserError, match="generation 7"):
        pool.free_mem([Address(Tier.HBM, 0, 7)])
    with pytest.raises(UserError, match="no such block"):
        pool.view(Address(Tier.HBM, 4))
    with pytest.raises(UserError, match="1 addresses for 2"):
        pool.insert(tokens, held[:1])
    with pytest.raises(UserError, match="HBM blocks, then DRAM"):
        pool.insert(tokens, pool.alloc_mem(1, Tier.DRAM) + held[:1])
    with pytest.raises(UserError, match="DRAM only"):
        pool.swap_in(held)
    with pytest.raises(UserError, match="SSD"):
        pool.alloc_mem(1, Tier.SSD)
    with pytest.raises(UserError, match="negative"):
        pool.alloc_mem(-1)
    pool.free_mem(held)
    with pytest.raises(InvariantError, match="block 0:"):
        pool.free_mem(held)
    pool.check_invariants()
