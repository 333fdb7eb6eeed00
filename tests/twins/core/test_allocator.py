"""The block allocator: its contract, and a twin of plain dictionaries under random operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve._core import BlockAllocator
from memserve.base.errors import InvariantError
from memserve.base.types import Tier
from memserve.kv.events import PoolReport, TierReport


def state(allocator: BlockAllocator) -> tuple:
    blocks = range(allocator.blocks_total)
    return (
        [allocator.ref_count(b) for b in blocks],
        allocator.blocks_free,
        allocator.blocks_used,
        allocator.blocks_broken,
        allocator.pages_free,
        allocator.pages_loose,
    )


def test_no_room_is_an_answer_and_changes_nothing() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(3) == [0, 1, 2]
    before = state(allocator)
    assert allocator.allocate(2) is None and allocator.allocate_pages(2) is None
    assert state(allocator) == before
    assert allocator.allocate(0) == []


@pytest.mark.parametrize(
    ("blocks", "names"), [([1, 1], "1"), ([0, 3], "3"), ([1, 99], "99"), ([0, -1], "-1"), ([0, 1, 2, 0], "0")]
)
def test_bad_releases_name_the_block_and_change_nothing(blocks: list[int], names: str) -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(InvariantError, match=f"block {names}:"):
        allocator.release(blocks)
    assert state(allocator) == before
    allocator.check_invariants()


@pytest.mark.parametrize("block", [3, 5, -2])
def test_bad_retains_name_the_block_and_change_nothing(block: int) -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(InvariantError, match=f"block {block}:"):
        allocator.retain([0, 1, block])
    assert state(allocator) == before


@pytest.mark.parametrize(("pages", "names"), [([0, 0], "0 of block 0"), ([0, 5], "5 of block 1"), ([1, 99], "99")])
def test_bad_page_releases_name_the_page_and_change_nothing(pages: list[int], names: str) -> None:
    allocator = BlockAllocator(3, 4)
    assert allocator.allocate_pages(2) == [0, 1]
    before = state(allocator)
    with pytest.raises(InvariantError, match=f"page {names}"):
        allocator.release_pages(pages)
    assert state(allocator) == before
    allocator.check_invariants()


def test_single_pages_come_from_broken_blocks_first() -> None:
    allocator = BlockAllocator(3, 4)
    assert allocator.allocate_pages(3) == [0, 1, 2]
    assert allocator.allocate(1) == [1]  # block 0 is broken: not an aligned block
    assert allocator.allocate_pages(2) == [3, 8]
    assert (allocator.blocks_free, allocator.blocks_broken, allocator.pages_free) == (0, 2, 3)
    assert allocator.allocate(1) is None and allocator.allocate_pages(4) is None
    assert allocator.release_pages([1]) == 0
    assert allocator.allocate_pages(1) == [1]
    assert allocator.release_pages([0, 8, 3, 2]) == 1  # block 2 is whole; page 1 of block 0 is still out
    assert allocator.allocate(1) == [2]
    assert allocator.release_pages([1]) == 1
    allocator.check_invariants()


def test_bad_arguments() -> None:
    for call in (lambda: BlockAllocator(-1), lambda: BlockAllocator(1, 0), lambda: BlockAllocator(2**40, 2**30)):
        with pytest.raises((ValueError, TypeError)):
            call()
    with pytest.raises(ValueError, match="negative"):
        BlockAllocator(1).allocate(-1)


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.integers(0, 150),
    pages_per_block=st.sampled_from([1, 2, 30, 64, 65, 130]),
    ops=st.lists(st.tuples(st.sampled_from("aarrlpq"), st.integers(0, 400)), max_size=40),
)
def test_allocator_equals_its_twin(blocks: int, pages_per_block: int, ops: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(blocks, pages_per_block)
    refs: Counter[int] = Counter()  # blocks with references
    out: set[int] = set()  # loose pages

    def broken() -> set[int]:
        return {page // pages_per_block for page in out}

    def free() -> list[int]:
        return [b for b in range(blocks) if not refs[b] and b not in broken()]

    for op, n in ops:
        held = sorted(b for b in refs if refs[b])
        if op == "a":
            want = free()[:n] if n <= len(free()) else None
            got = allocator.allocate(n)
            assert (None if got is None else got.tolist()) == want
            refs.update(want or [])
        elif op == "r" and held:
            some = held[n % len(held) :]
            assert allocator.release(some) == sum(refs[b] == 1 for b in some)
            refs.subtract(some)
        elif op == "l" and held:
            some = held[: n % len(held)]
            allocator.retain(some)
            refs.update(some)
        elif op == "p":
            room = len(free()) * pages_per_block + len(broken()) * pages_per_block - len(out)
            was_broken, was_free = broken(), free()
            got = allocator.allocate_pages(n)
            assert (got is None) == (n > room)
            fresh = [] if got is None else got.tolist()
            assert len(set(fresh)) == len(fresh) and not set(fresh) & out
            out |= set(fresh)
            assert broken() - was_broken <= set(was_free)
            spare = sum(pages_per_block - sum(p // pages_per_block == b for p in out) for b in was_broken)
            assert broken() == was_broken or not spare  # a block is broken only when no broken one had a page
        elif op == "q" and out:
            some = sorted(out)[n % len(out) :]
            was_broken = broken()
            out -= set(some)
            assert allocator.release_pages(some) == len(was_broken - broken())
        assert [allocator.ref_count(b) for b in range(blocks)] == [refs[b] for b in range(blocks)]
        assert allocator.blocks_free == len(free()) and allocator.blocks_broken == len(broken())
        assert allocator.blocks_used == sum(refs[b] > 0 for b in refs)
        assert allocator.pages_loose == len(out)
        assert allocator.pages_free == (len(free()) + len(broken())) * pages_per_block - len(out)
        assert allocator.pages_stranded == allocator.pages_free - len(free()) * pages_per_block
        allocator.check_invariants()


def test_large_pool_reuses_the_lowest_ids() -> None:
    allocator = BlockAllocator(300_000)
    everything = allocator.allocate(300_000)
    allocator.release([299_999, 12, 150_000])
    assert allocator.allocate(3) == [12, 150_000, 299_999]
    assert allocator.release(everything) == 300_000
    allocator.check_invariants()


def test_stranded_pages_are_free_pages_of_broken_blocks() -> None:
    allocator = BlockAllocator(3, 8)
    assert allocator.pages_stranded == 0
    allocator.allocate_pages(10)  # breaks two blocks
    assert (allocator.pages_free, allocator.pages_stranded) == (14, 6)
    allocator.allocate(1)
    assert (allocator.pages_free, allocator.pages_stranded) == (6, 6) and allocator.allocate(1) is None
    allocator.release_pages([8, 9])  # the second block is whole again
    assert (allocator.pages_free, allocator.pages_stranded) == (8, 0)


def test_the_report_computes_external_fragmentation() -> None:
    def report(*tiers: BlockAllocator) -> float:
        rows = (
            TierReport(tier, a.blocks_total, a.blocks_free, a.blocks_used, 0, 0, 0, a.pages_free, a.pages_stranded)
            for tier, a in zip(Tier, tiers, strict=False)
        )
        return PoolReport(tuple(rows), 32).external_fragmentation

    broken, whole = BlockAllocator(4, 4), BlockAllocator(2, 4)
    assert report(broken, whole) == 0
    broken.allocate_pages(1)
    assert report(broken) == 3 / 15 and report(broken, whole) == 3 / 23
    full = BlockAllocator(0)
    assert report(full) == 0
