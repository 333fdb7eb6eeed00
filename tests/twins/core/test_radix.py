"""The radix index alone: contract, the global tree's twin, deletion's twin. (Eviction: twins/kv/test_pool.py.)"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve._core import BlockAllocator, RadixIndex
from memserve.base.errors import InvariantError

A, B = b"a" * 16, b"b" * 16
BLOCK = 2
PATH = st.lists(st.integers(0, 1), max_size=12)


def whole(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def test_match_is_read_only() -> None:
    index, allocator = None, BlockAllocator(8)
    index = RadixIndex(1, allocator)
    for tokens in ([1, 2, 3], [7, 8, 9]):
        blocks = allocator.allocate(3)
        index.insert(A, tokens, blocks)
        allocator.release(blocks)
    nodes, size = index.nodes, index.nbytes
    for _ in range(5):
        assert index.match(A, [1, 2]) == 2 and index.match_blocks(A, [1, 2, 3]).hbm == [0, 1, 2]
    assert (index.nodes, index.nbytes) == (nodes, size)  # no split
    assert index.evict(0, 2).dropped_hbm == [1, 2]  # the older one went first: no touch either


def test_namespaces_never_mix() -> None:
    index = RadixIndex(2)
    index.insert(A, [1, 2, 3, 4], [1, 2])
    assert index.match(B, [1, 2, 3, 4]) == 0
    index.insert(B, [1, 2, 5, 6], [3, 4])
    assert index.match_blocks(A, [1, 2, 5, 6]).hbm == [1]
    assert index.match_blocks(B, [1, 2, 5, 6]).hbm == [3, 4]
    index.delete(A, [1, 2, 3, 4])
    assert index.match(A, [1, 2]) == 0 and index.match(B, [1, 2, 5, 6]) == 4
    index.check_invariants()
    with pytest.raises(ValueError, match="16 bytes"):
        index.match(b"short", [1, 2])


def test_emptied_namespaces_leave_nothing_behind() -> None:
    index = RadixIndex(1)
    for i in range(300):
        index.insert(i.to_bytes(16, "little"), [i], [i])
    index.clear()
    assert index.nodes == 0
    index.check_invariants()


def test_pins_protect_whole_paths_and_end_once() -> None:
    allocator = BlockAllocator(6)
    index = RadixIndex(1, allocator)
    blocks = allocator.allocate(6)
    index.insert(A, [1, 2, 3, 4], blocks[:4])
    index.insert(A, [1, 2, 8, 9], [blocks[0], blocks[1], blocks[4], blocks[5]])
    allocator.release(blocks)
    held = index.acquire(A, [1, 2, 3])
    allocator.release(held.hbm)
    assert held.tokens == 3 and allocator.blocks_evictable == 3
    assert sorted(index.evict(0, 99).dropped_hbm) == [3, 4, 5]
    assert index.match(A, [1, 2, 3, 4]) == 3
    index.unpin(held.pin)
    with pytest.raises(InvariantError, match="not held"):
        index.unpin(held.pin)
    assert index.evict(0, 99).freed == 3 and index.nodes == 0
    allocator.check_invariants()


def test_an_existing_entry_keeps_its_block() -> None:
    allocator = BlockAllocator(4)
    index = RadixIndex(1, allocator)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert index.insert(A, [1, 2], first).added == 2
    assert index.insert(A, [1, 2], second).added == 0
    assert index.match_blocks(A, [1, 2]).hbm == first
    assert allocator.release(second) == 2 and allocator.release(first) == 0


def test_inserting_a_free_block_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    index = RadixIndex(1, allocator)
    held = allocator.allocate(1)
    with pytest.raises(InvariantError, match="block 2:"):
        index.insert(A, [1, 2], [held[0], 2])
    assert index.nodes == 0 and allocator.ref_count(0) == 1
    with pytest.raises(ValueError, match="whole block"):
        index.insert(A, [1, 2, 3], held)
    index.check_invariants()


def test_colliding_first_blocks_are_told_apart() -> None:
    """Many children under few buckets, and edges that share everything but the last token of a block."""
    index = RadixIndex(4)
    for i in range(5000):
        index.insert(A, [1, 2, 3, i], [i])
    assert all(index.match_blocks(A, [1, 2, 3, i]).hbm == [i] for i in range(5000))
    assert index.match(A, [1, 2, 3, 5000]) == 0
    index.check_invariants()


@settings(max_examples=150, deadline=None)
@given(ops=st.lists(st.tuples(st.sampled_from("iiidpuhxe"), PATH), max_size=40))
def test_insert_and_delete_equal_their_twin(ops: list[tuple[str, list[int]]]) -> None:
    index = RadixIndex(BLOCK)
    blocks: dict[tuple[int, ...], int] = {}
    pins: list[tuple[int, tuple[int, ...]]] = []
    holds: list[tuple[int, tuple[int, ...]]] = []
    asked = []
    for number, (op, tokens) in enumerate(ops):
        asked.append(tokens)
        path = whole(tokens)
        if op == "i":
            ids = [1000 * number + i for i in range(len(path))]
            want = sum(prefix not in blocks for prefix in path)
            assert index.insert(A, tokens, ids).added == want
            for prefix, block in zip(path, ids, strict=True):
                blocks.setdefault(prefix, block)
        elif op == "p":
            held = index.acquire(A, tokens)
            pins.append((held.pin, tuple(tokens[: held.tokens])))
        elif op == "u" and pins:
            index.unpin(pins.pop(number % len(pins))[0])
        elif op == "h":
            hold = index.hold(A, tokens)
            assert bool(hold) == bool(path and path[-1] in blocks)
            holds += [(hold, path[-1])] if hold else []
        elif op == "x" and holds:
            hold, _ = holds.pop(number % len(holds))
            for tier in (0, 1):
                index.unhold(hold, tier)
        elif op == "e":  # all that is neither pinned nor held
            ends = [*(pinned for _, pinned in pins), *(end for _, end in holds)]
            loose = [p for p in blocks if not any(end[: len(p)] == p for end in ends)]
            assert index.evictable(0) == bool(loose)
            assert sorted(index.evict(0, 1000).dropped_hbm) == sorted(blocks.pop(p) for p in loose)
        elif op == "d":
            gone = delete(blocks, path, [pinned for _, pinned in pins])
            assert sorted(index.delete(A, tokens).dropped_hbm) == sorted(gone)
            holds = [(hold, end) for hold, end in holds if end in blocks]  # the others are over
        for tokens in asked:
            known = [blocks[p] for p in whole(tokens) if p in blocks]
            assert index.match_blocks(A, np.array(tokens, np.int32)).hbm == known
            for cut in range(BLOCK + 1):
                told(index, blocks, tokens[: len(tokens) - cut])
        assert index.blocks(0) == len(blocks)
        pinned = {prefix for _, path in pins for prefix in whole(list(path))}
        assert index.blocks_pinned(0) == len(pinned)
        index.check_invariants()


@pytest.mark.parametrize("seed", range(12))
def test_held_paths_stay_and_others_never_go_down(seed: int) -> None:
    """Two tiers, where only what is held in DRAM goes there: what a hold keeps on a tier, eviction leaves in it or
    above; holds end just when their path is not whole any more."""
    random = Random(seed)
    hbm, dram = BlockAllocator(random.randint(4, 16)), BlockAllocator(random.randint(0, 10))
    prompts = [[random.randint(0, 1) for _ in range(6 * BLOCK)] for _ in range(4)]
    moved = 0
    index = RadixIndex(BLOCK, hbm, dram)
    index.set_demotes_held_only()
    holds: dict[int, tuple[tuple[int, ...], set[int]]] = {}  # -> path, tiers
    pins: list[int] = []

    def blocks_of(tokens: tuple[int, ...]) -> tuple[int, int]:
        matched = index.match_blocks(A, np.array(tokens, np.int32))
        return len(matched.hbm), len(matched.dram)

    for _ in range(600):
        op, count = random.choice("iiiiihhhxxxyeeeeddpuu" + "c" * (random.random() < 0.3)), random.randint(1, 4)
        tokens = random.choice(prompts)[: random.choice([3, 7, 12])]
        path = tuple(tokens[: len(tokens) // BLOCK * BLOCK])
        before = {hold: blocks_of(end) for hold, (end, _) in holds.items()}
        gone = None
        if op == "i" and path:
            have = sum(blocks_of(path))
            fresh = hbm.allocate(len(path) // BLOCK - have)
            if fresh is not None:
                known = index.match_blocks(A, np.array(path, np.int32))
                ids = [*known.hbm, *known.dram, *fresh]
                if not len(known.dram):
                    index.insert(A, path, ids)
                hbm.release(fresh)
        elif op == "h" and len(holds) < 4:
            hold = index.hold(A, path)
            assert bool(hold) == bool(path and sum(blocks_of(path)) * BLOCK == len(path))
            if hold in holds:  # a second one of the same path
                for tier in (0, 1):
                    index.unhold(hold, tier)
            elif hold:
                holds[hold] = path, {0, 1}
        elif op in "xy" and holds:
            hold = sorted(holds)[count % len(holds)]
            tier = "xy".index(op)
            if tier in holds[hold][1]:
                index.unhold(hold, tier)
                holds[hold][1].discard(tier)
                if not holds[hold][1]:
                    del holds[hold]
        elif op == "e":
            gone = index.evict(0, count)
            for hold, (end, tiers) in holds.items():
                if 0 in tiers and hold not in gone.ended_holds:
                    assert blocks_of(end) == before[hold]
            moved += len(gone.moved_from)
            if not any(1 in tiers for _, tiers in holds.values()):
                assert not len(gone.moved_from), "nothing is held in DRAM"
            assert not {hold for hold in gone.ended_holds if 1 in holds[hold][1]}, "evicted though it is held"
        elif op == "d":
            gone = index.evict(1, count)
            assert not {hold for hold in gone.ended_holds if 1 in holds[hold][1]}, "evicted though it is held"
        elif op == "p" and len(pins) < 2:
            matched = index.acquire(A, tokens)
            hbm.release(matched.hbm)
            pins.append(matched.pin)
        elif op == "u" and pins:
            index.unpin(pins.pop(count % len(pins)))
        elif op == "c":
            gone = index.delete(A, path) if count < 4 else index.clear()
        for hold in gone.ended_holds if gone is not None else ():
            end, _ = holds.pop(hold)
            assert sum(blocks_of(end)) * BLOCK < len(end), "its path is whole"
        for hold, (end, tiers) in holds.items():
            assert sum(blocks_of(end)) * BLOCK == len(end), "its path is not whole, and the hold not over"
            assert [index.is_held(hold, tier) for tier in (0, 1)] == [tier in tiers for tier in (0, 1)]
        index.check_invariants()
        hbm.check_invariants()
        dram.check_invariants()
    assert moved or not dram.blocks_total


def told(index: RadixIndex, blocks: dict, tokens: list[int]) -> None:
    """What is said to follow ``tokens`` does follow them somewhere, and nothing is said only where nothing does."""
    said = tuple(index.continuation(A, tokens, 5))
    whole_tokens = len(tokens) // BLOCK * BLOCK
    cached = not whole_tokens or tuple(tokens[:whole_tokens]) in blocks
    known = tuple(tokens)
    follows = [p for p in blocks if cached and len(p) > len(known) and p[: len(known)] == known]
    assert bool(said) == bool(follows) and len(said) <= 5
    assert not said or any(p[len(known) : len(known) + len(said)] == said for p in follows)


def delete(blocks: dict, path: list[tuple[int, ...]], pinned: list[tuple[int, ...]]) -> list[int]:
    """The sentence in ``RadixIndex.delete``'s docstring, word by word."""
    if not path or path[-1] not in blocks:
        return []

    def is_pinned(prefix: tuple[int, ...]) -> bool:
        return any(pin[: len(prefix)] == prefix for pin in pinned)

    below = [p for p in blocks if len(p) > len(path[-1]) and p[: len(path[-1])] == path[-1]]
    gone = [blocks.pop(prefix) for prefix in below if not is_pinned(prefix)]
    for prefix in reversed(path):
        leads_on = any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in blocks)
        if leads_on or is_pinned(prefix):
            break
        gone.append(blocks.pop(prefix))
    return gone


def test_demotion_does_not_make_older_dram_blocks_new_again() -> None:
    """An edge that goes down in two pieces: what was used between them is newer than the first piece."""
    hbm, dram = BlockAllocator(3), BlockAllocator(3)
    index = RadixIndex(1, hbm, dram)
    for tokens in ([7], [1, 2]):
        blocks = hbm.allocate(len(tokens))
        index.insert(A, tokens, blocks)
        hbm.release(blocks)
    assert index.evict(0, 2).moved_from == [0, 2]  # [7], then the tail of [1, 2]
    index.unpin(index.acquire(A, [7]).pin)
    assert index.evict(0, 1).moved_from == [1]
    index.check_invariants()
    assert len(index.evict(1, 1).dropped_dram) == 1
    assert (index.match(A, [1, 2]), index.match(A, [7])) == (1, 1)
