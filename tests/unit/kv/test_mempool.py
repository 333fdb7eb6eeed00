"""MemPool: Table 1's calls with real bytes; nothing wrong may come back from any tier."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import memserve
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Tier
from memserve.kv.mempool import Address, Addresses, MemPool

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


def test_match_on_a_full_hbm_tier_says_where_blocks_lie() -> None:
    """A prefix half of which has gone down, and HBM is full of what callers hold: nothing moves."""
    pool, tokens = make(4, 4), np.arange(16, dtype=np.int32)
    assert store(pool, tokens)
    assert pool.swap_out(2) == 2
    full = pool.alloc_mem(2)
    assert full is not None and pool.alloc_mem(0) is not None
    held = pool.match(tokens, tiers=(Tier.HBM, Tier.DRAM))
    assert [address.tier for address in held] == [Tier.HBM] * 2 + [Tier.DRAM] * 2
    for number, address in enumerate(held):
        assert np.array_equal(pool.view(address), pattern(tokens[: 4 * (number + 1)]))
    assert len(pool.match(tokens)) == 2, "without tiers it ends where HBM has no room"
    assert pool.swap_in(held[2:]) is None
    pool.free_mem(full)
    above = pool.swap_in(held[2:])
    assert above is not None and np.array_equal(pool.view(above[1]), pattern(tokens))
    pool.free_mem([*held[:2], *above])
    assert len(pool.match(tokens, {Tier.HBM, Tier.DRAM})) == 4, "the index has its own"
    pool.check_invariants()


def test_match_ends_before_the_first_block_on_another_tier() -> None:
    pool, tokens = make(4, 4), np.arange(16, dtype=np.int32)
    assert store(pool, tokens) and pool.swap_out(2) == 2
    assert len(pool.match(tokens, {Tier.HBM})) == 2 and not pool.match(tokens, {Tier.DRAM})
    assert pool.swap_out(4) == 0, "a caller holds those in HBM"
    lower = make(4, 4)
    assert store(lower, tokens) and lower.swap_out(4) == 4
    assert [address.tier for address in lower.match(tokens, {Tier.DRAM})] == [Tier.DRAM] * 4
    assert not lower.match(tokens, {Tier.HBM}) and not lower.match(tokens + 1, {Tier.DRAM})
    for wrong in ((), {Tier.SSD}, {Tier.HBM, Tier.SSD}):
        with pytest.raises(UserError, match="HBM and in DRAM"):
            lower.match(tokens, wrong)
    lower.check_invariants()


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


def test_held_dram_block_is_not_counted_as_room() -> None:
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
    names = {p._pool.namespace_of(p.tenant) for p in (one, two, make(4, tenant="a", namespace="m"))}
    assert len(names) == 3 and two.cached_tokens(tokens) == 0


def test_addresses() -> None:
    held = make(5, generation=0).alloc_mem(3)
    assert held[1] == Address(Tier.HBM, 1, 0) and list(held[1:]) == [Address(Tier.HBM, 1), Address(Tier.HBM, 2)]
    assert held == held[:] and held != held[1:] and repr(held) == "Addresses(HBM, [0, 1, 2])"
    assert isinstance(held[:2], Addresses) and hash(held) == hash(held[:])


def test_bad_input() -> None:
    pool = make(4, 2, generation=3)
    held = pool.alloc_mem(2)
    tokens = np.arange(8, dtype=np.int32)
    with pytest.raises(UserError, match="no block"):
        MemPool(GEOMETRY, hbm_bytes=1)
    with pytest.raises(UserError, match="generation 7"):
        pool.free_mem([Address(Tier.HBM, 0, 7)])
    with pytest.raises(UserError, match="HBM block 4 is not held by the caller: there are 4"):
        pool.view(Address(Tier.HBM, 4, 3))
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
    with pytest.raises(UserError, match="HBM block 0 is not held"):
        pool.free_mem(held)
    pool.check_invariants()


def test_a_cached_block_is_freed_once() -> None:
    pool, tokens = make(4, 4), np.arange(8, dtype=np.int32)
    held = pool.alloc_mem(2)
    pool.insert(tokens, held)
    pool.free_mem(held)
    with pytest.raises(UserError, match="HBM block 0 is not held"):  # though the index has a reference on it
        pool.free_mem(held)
    with pytest.raises(UserError, match="not held"):
        pool.insert(tokens + 1, held)
    with pytest.raises(UserError, match="not held"):
        pool.swap_out_blocks(held)
    with pytest.raises(UserError, match="not held"):
        pool.view(held[1])
    again = pool.match(tokens)
    assert again == held
    with pytest.raises(UserError, match="not held"):  # one is held once: nothing of the whole list is freed
        pool.free_mem([*again, again[1]])
    assert pool.report().by_tier[Tier.HBM].blocks_evictable == 0
    pool.free_mem(again)
    pool.check_invariants()


def test_a_swapped_block_has_another_address() -> None:
    pool = make(4, 4)
    held = pool.alloc_mem(2)
    with pytest.raises(UserError, match="not held"):
        pool.swap_out_blocks([*held, held[0]])
    below = pool.swap_out_blocks(held)
    with pytest.raises(UserError, match="not held"):
        pool.free_mem(held)
    assert pool.swap_in(below) is not None
    with pytest.raises(UserError, match="DRAM block 0 is not held"):
        pool.swap_in(below)
    pool.check_invariants()


def test_addresses_of_another_pool_are_refused() -> None:
    one, two = make(4), make(4)
    mine, its = one.alloc_mem(2), two.alloc_mem(2)
    for misuse in (one.free_mem, one.swap_out_blocks, lambda a: one.insert(np.arange(8, dtype=np.int32), a)):
        with pytest.raises(UserError, match="generation"):
            misuse(its)
    with pytest.raises(UserError, match="generation"):
        one.view(its[0])
    one.free_mem(mine)
    two.free_mem(its)


def test_random_use_and_misuse_against_a_twin() -> None:
    """The twin counts holds: a call works when they suffice, else it names the misuse and changes nothing."""
    random, pool, holds = Random(11), make(6, 4), Counter[Address]()
    worked = refused = 0
    for _ in range(3000):
        tier = random.choice([Tier.HBM, Tier.DRAM])
        if random.random() < 0.4:
            fresh = pool.alloc_mem(random.randint(0, 2), tier)
            holds.update(fresh or ())
            continue
        made_up = [Address(random.choice(list(Tier)), random.randint(-1, 6), pool.generation) for _ in range(2)]
        held = sorted(holds.elements())
        named = random.choices(held, k=2) if held and random.random() < 0.8 else made_up
        before, allowed = pool.report(), holds >= Counter(named)
        call = random.choice([pool.free_mem, pool.swap_out_blocks, pool.swap_in])
        if call != pool.free_mem:
            allowed &= {a.tier for a in named} == {Tier.HBM if call == pool.swap_out_blocks else Tier.DRAM}
        if not allowed:
            with pytest.raises(UserError):
                call(named)
            assert pool.report() == before
            refused += 1
            continue
        moved = call(named)
        if call == pool.free_mem or moved is not None:
            holds -= Counter(named)
            holds.update(moved or ())
        worked += 1
        for address in named:
            if not holds[address]:
                with pytest.raises(UserError):
                    pool.view(address)
        pool.check_invariants()
    assert worked > 300 and refused > 300


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [[1, 2], [3, 4]], [-1, 2], [1 << 31], "abc", [None]])
def test_tokens_that_are_none(tokens) -> None:
    pool = make(4)
    held = pool.alloc_mem(1)
    for call in (pool.match, pool.cached_tokens, pool.delete, lambda t: pool.insert(t, held)):
        with pytest.raises(UserError, match="token"):
            call(tokens)
    assert pool.insert([1, 2, 3, 4], held) == 1 and len(pool.match(np.array([1, 2, 3, 4], np.int64))) == 1


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "fp32"), ("num_layers", -2), ("head_dim_k", 0), ("block_tokens", 2.5)]
)
def test_impossible_geometry_is_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=str(value)) as caught:
        replace(GEOMETRY, **{field: value})
    assert caught.value.param == field


def test_public_names_are_listed() -> None:
    assert {"LLM", "MemPool", "PoolPeer", "SamplingParams", "UserError", "__version__"} <= set(dir(memserve))
