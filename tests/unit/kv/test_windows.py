"""KV of windows in the pool: where a prefix can be taken up again, and what goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve import _core
from memserve.base.config import PoolConfig
from memserve.base.errors import InvariantError
from memserve.base.layer_kv import WindowPages
from memserve.kv.pool import BlockPool
from memserve.kv.windows import WindowCache

BLOCK = 4
NO_TENANT = ""


def tokens_of(blocks: int, seed: int = 0) -> np.ndarray:
    return (np.arange(blocks * BLOCK) * 7 + seed * 1000).astype(np.int32)


class Publisher:
    """Puts prefixes into a pool as a sequence would, with all of their parts."""

    def __init__(self, hbm: int, *, window: int = 8, part_blocks: int = 2) -> None:
        self.pages = WindowPages(window, part_blocks, BLOCK, 8)
        self.pool = BlockPool(PoolConfig(hbm, windows=self.pages), BLOCK, "test")
        assert self.pool.windows is not None
        self.windows: WindowCache = self.pool.windows

    def publish(self, tokens: np.ndarray) -> None:
        """What is cached is used; the rest is new, and passed block by block."""
        lease = self.pool.acquire(NO_TENANT, tokens)
        first, count = len(lease.blocks), len(tokens) // BLOCK
        new = self.pool.allocate((count - first) * (1 + self.pages.part_blocks))
        assert new is not None
        blocks, parts = lease.blocks + new[: count - first], self.windows.build_parts(new[count - first :])
        self.pool.publish(lease, NO_TENANT, tokens, blocks, written_by=0)
        self.pool.anchor_parts(NO_TENANT, tokens, first, parts, written_by=0)
        tail_from = self.pages.first_entry(len(tokens))
        passed = max(0, tail_from - first)
        self.windows.release_parts(parts[:passed], is_end=False)
        self.windows.release_parts(parts[passed:], is_end=True)
        self.pool.release(blocks)
        self.pool.unpin(lease)
        self.pool.check_invariants()


@given(
    window=st.integers(0, 30),
    chunk=st.integers(0, 30),
    has_part=st.lists(st.booleans(), max_size=24),
)
def test_a_prefix_is_resumable_where_its_window_is_whole(window: int, chunk: int, has_part: list[bool]) -> None:
    """As trying each end says; or where its chunk is."""
    pages, blocks = WindowPages(window, 1, BLOCK, 8, chunk), _core.BlockAllocator(64)
    cache = WindowCache(pages, blocks, blocks.release)
    anchors = blocks.allocate(len(has_part))
    assert anchors is not None
    for anchor, wanted in zip(anchors, has_part, strict=True):
        if wanted:
            own = blocks.allocate(1)
            assert own is not None
            part = cache.build_parts(own.tolist())[0]
            assert cache.anchor_part(part, anchor)
            cache.release_parts((part,), is_end=False)
    cache.check_invariants()

    def is_whole(count: int) -> bool:
        end = count * BLOCK  # the position of the next token
        read = [*range(max(0, end - window + 1), end), *(range(end - end % chunk, end) if chunk else ())]
        return all(has_part[position // BLOCK] for position in read)

    counts = [count for count in range(len(has_part) + 1) if is_whole(count)]
    assert cache.count_resumable(anchors) == max(counts)
    assert len(cache.tail_of(anchors[: max(counts)])) == len(pages.entries_behind(max(counts) * BLOCK))


def test_passed_parts_go_before_anything_else() -> None:
    """A prefix of eight blocks loses the parts before its last window, then itself from its end."""
    writer = Publisher(24)
    pool, tokens = writer.pool, tokens_of(8)
    writer.publish(tokens)
    assert pool.available() == 24 and pool.blocks_free == 0
    first = pool.allocate(12)
    assert first is not None
    assert pool.match(NO_TENANT, tokens) == 32  # its window is there
    assert [pool.match(NO_TENANT, tokens[: 4 * count]) for count in range(8)] == [0] * 8  # no other
    assert pool.report().windows.given_up == 6
    second = pool.allocate(1)
    assert second is not None and pool.match(NO_TENANT, tokens) == 0
    pool.release(first + second)
    pool.check_invariants()


def test_a_window_with_which_two_began_stays() -> None:
    writer = Publisher(60)
    pool, common = writer.pool, tokens_of(4)
    writer.publish(common)
    for seed in (1, 2):
        writer.publish(np.concatenate((common, tokens_of(4, seed))))
    held = pool.allocate(pool.available() - pool.report().by_tier[0].blocks_evictable + 6)
    assert held is not None
    assert pool.match(NO_TENANT, common) == len(common)
    pool.check_invariants()


def test_a_lent_window_is_kept_while_it_is_read() -> None:
    writer = Publisher(24)
    pool, tokens = writer.pool, tokens_of(8)
    writer.publish(tokens)
    loan = pool.lend_state(NO_TENANT, tokens, pool.state_blocks)
    assert loan is not None and loan.tokens == 32 and len(loan.blocks) == pool.blocks_behind(32) == 4
    assert pool.available() == 20
    taken = pool.allocate(20)
    assert taken is not None and not set(taken) & set(loan.blocks)
    assert pool.allocate(1) is None
    pool.unpin(loan)
    pool.release(loan.blocks)
    pool.release(taken)
    assert pool.blocks_free == 24
    pool.check_invariants()


def test_a_window_that_comes_is_found() -> None:
    """Blocks alone cannot be taken up again; with the parts behind them they can."""
    writer = Publisher(24)
    pool, tokens = writer.pool, tokens_of(6)
    blocks = pool.allocate(6)
    parts = pool.allocate(pool.blocks_behind(len(tokens)))
    assert blocks is not None and parts is not None
    pool.insert(NO_TENANT, tokens, blocks, len(blocks))
    pool.release(blocks)
    assert (pool.match(NO_TENANT, tokens), pool.match_kv(NO_TENANT, tokens)) == (0, 24)
    assert pool.insert_state(NO_TENANT, tokens, parts)
    pool.release(parts)
    assert pool.match(NO_TENANT, tokens) == 24
    others = pool.allocate(4)
    assert others is not None and not pool.insert_state(NO_TENANT, tokens_of(6, 9), others)
    pool.release(others)
    pool.clear_cache()
    assert pool.blocks_free == 24
    pool.check_invariants()


def test_wrong_books_are_noticed() -> None:
    writer = Publisher(24)
    writer.publish(tokens_of(8))
    part = next(iter(writer.windows._by_anchor.values()))
    part.users += 1
    with pytest.raises(InvariantError):
        writer.pool.check_invariants()
