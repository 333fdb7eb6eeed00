"""Where the index keeps its edges: rows are cut, trimmed, given back and used again while others read their part."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import numpy as np
import pytest

from memserve._core import BlockAllocator, RadixIndex
from memserve.base.types import Tier

NAME = b"n" * 16


def prompt(*seed: int, blocks: int, block_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200_000, blocks * block_tokens, dtype=np.int32)


def test_both_halves_of_a_cut_edge_live_on_their_own() -> None:
    """Cut, trimmed, deleted, evicted: what is left of an edge stays readable while others reuse what was freed."""
    allocator = BlockAllocator(64)
    index = RadixIndex(4, allocator)
    first, second = prompt(1, blocks=12, block_tokens=4), prompt(2, blocks=12, block_tokens=4)
    second[: 5 * 4] = first[: 5 * 4]
    blocks = allocator.allocate(19)
    index.insert(NAME, first, blocks[:12])
    index.insert(NAME, second, [*blocks[:5], *blocks[12:]])
    allocator.release(blocks)
    assert index.nodes == 4  # root, shared head, two tails
    index.unpin(index.acquire(NAME, second).pin)
    allocator.release(index.match_blocks(NAME, second).hbm)  # the reference that `acquire` took
    assert index.evict(Tier.HBM, 3).dropped_hbm == blocks[9:12]  # trims the first tail
    fill(index, allocator, 3)
    assert index.match_blocks(NAME, first).hbm == blocks[:9]
    assert index.delete(NAME, first[: 9 * 4]).freed == 0 or index.match(NAME, first) == 5 * 4  # the first tail is gone
    fill(index, allocator, 4)
    assert index.match_blocks(NAME, second).hbm == [*blocks[:5], *blocks[12:]]
    pin = index.acquire(NAME, second[: 2 * 4])  # cuts the shared head once more
    allocator.release(pin.hbm)
    index.clear()
    fill(index, allocator, 5)
    assert index.match_blocks(NAME, second).hbm == blocks[:2]
    index.unpin(pin.pin)
    index.check_invariants()


def fill(index: RadixIndex, allocator: BlockAllocator, seed: int) -> None:
    """Use what is free: other tokens would overwrite rows that are read after they were given back."""
    blocks = allocator.allocate(seed)
    index.insert(NAME, prompt(99, seed, blocks=seed, block_tokens=index.block_tokens), blocks)
    allocator.release(blocks)
    index.check_invariants()


@pytest.mark.parametrize("block_tokens", [1, 3, 32])
def test_memory_is_used_again_and_given_back(block_tokens: int) -> None:
    """Many rounds of filling and forgetting need no more memory than one; an empty index keeps at most a little."""
    index = RadixIndex(block_tokens)
    sizes = []
    for round_number in range(4):
        for i in range(40):
            blocks = (40_000 + 37_000 * i % 60_001) // block_tokens
            tokens = prompt(round_number, i, blocks=blocks, block_tokens=block_tokens)
            index.insert(NAME, tokens, np.arange(blocks, dtype=np.int32))
        index.check_invariants()
        sizes.append(index.nbytes)
        index.clear()
        index.check_invariants()
        assert index.nbytes < 3 << 20
    assert min(sizes) > 5 << 20 and max(sizes) < 1.3 * min(sizes)


GROWTH = """
import re
import numpy as np
from memserve._core import RadixIndex

def resident_bytes() -> int:
    return 1024 * int(re.search("RssAnon: *(.+) kB", open("/proc/self/status").read().replace("\\t", " "))[1])

index, tokens, block = RadixIndex(1), np.arange(200_000, dtype=np.int32), np.zeros(1, np.int32)
index.insert(b"n" * 16, tokens[:1], block)
before = resident_bytes()
for place in range(1, len(tokens)):
    index.insert(b"n" * 16, tokens[place : place + 1], block)
print(index.nbytes / (resident_bytes() - before))
"""


def test_the_size_of_an_index_is_what_it_takes() -> None:
    """Nodes and the table of children, not only their rows; in whole chunks, the last of which are half used."""
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=60, check=True)
    assert 0.9 < float(run.stdout) < 1.2


def test_an_edge_longer_than_a_huge_page() -> None:
    index = RadixIndex(32)
    tokens = prompt(1, blocks=40_000, block_tokens=32)  # 5 MB of tokens
    ids = np.arange(40_000, dtype=np.int32)
    index.insert(NAME, tokens, ids)
    assert index.match_blocks(NAME, tokens).hbm == ids
    other = tokens.copy()
    other[20_001 * 32] ^= 1
    assert index.match(NAME, other) == 20_001 * 32
    assert index.evict(Tier.HBM, 39_999).dropped_hbm == ids[1:]
    assert index.match_blocks(NAME, tokens).hbm == [0]
    index.check_invariants()


def test_edges_with_the_same_hash_are_told_apart() -> None:
    """Blocks that begin with a salt of the hash function all collide: the tokens decide."""
    zeroing = np.array([0xA0761D6478BD642F], np.uint64).view(np.int32)
    index = RadixIndex(4)

    def tokens(i: int) -> np.ndarray:
        return np.array([*zeroing, i, -i, *range(4)], np.int32)

    for i in range(20):
        index.insert(NAME, tokens(i), [2 * i, 2 * i + 1])
    for i in range(20):
        assert index.match_blocks(NAME, tokens(i)).hbm == [2 * i, 2 * i + 1]
    assert index.match(NAME, tokens(20)) == 0
    for i in range(0, 20, 2):
        index.delete(NAME, tokens(i))
    assert [index.match(NAME, tokens(i)) for i in range(20)] == [0, 8] * 10
    index.check_invariants()


@pytest.mark.parametrize("seed", range(8))
def test_random_cuts_equal_a_dictionary(seed: int) -> None:
    """Long edges cut at random places, trimmed by eviction and refilled; every cached block is compared each round."""
    random, block_tokens = Random(seed), Random(seed).choice([1, 2, 16])
    allocator = BlockAllocator(3000)
    index = RadixIndex(block_tokens, allocator)
    known: list[np.ndarray] = []
    owner: dict[int, bytes] = {}  # block -> the tokens up to its end
    for step in range(60):
        base = random.choice(known) if known and random.random() < 0.7 else np.empty(0, np.int32)
        head = base[: random.randint(0, len(base) // block_tokens) * block_tokens]
        tail = prompt(seed, step, blocks=random.randint(1, 120), block_tokens=block_tokens)
        tokens = np.concatenate([head, tail])
        found = index.acquire(NAME, tokens)
        need = len(tokens) // block_tokens - len(found.hbm)
        index.evict(Tier.HBM, max(0, need - allocator.blocks_free))
        fresh = allocator.allocate(need)
        for at, block in enumerate(fresh, start=len(found.hbm) + 1):
            owner[block] = tokens[: at * block_tokens].tobytes()
        index.insert(NAME, tokens, [*found.hbm, *fresh])
        index.unpin(found.pin)
        allocator.release([*found.hbm, *fresh])
        known.append(tokens)
        if random.random() < 0.3:
            index.evict(Tier.HBM, random.randint(1, 200))
        if random.random() < 0.1:
            index.delete(NAME, random.choice(known))
        for tokens in known:
            for at, block in enumerate(index.match_blocks(NAME, tokens).hbm, start=1):
                assert owner[block] == tokens[: at * block_tokens].tobytes()
        index.check_invariants()
