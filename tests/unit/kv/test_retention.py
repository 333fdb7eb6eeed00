"""Retained prefixes: golden cases of which leaves first, on one tier and two, with states and with windows."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.layer_kv import WindowPages
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.kv.pool import BlockPool

BLOCK = 4


def tokens_of(*blocks: int) -> np.ndarray:
    """A path: each number stands for a block of tokens."""
    return np.repeat(np.array(blocks, np.int32), BLOCK)


def leave(pool: BlockPool, *path: int, tenant: str = "") -> None:
    """What a sequence leaves that has computed ``path``."""
    tokens = tokens_of(*path)
    lease = pool.acquire(tenant, tokens)
    first, parts = len(lease.blocks), pool.part_blocks
    fresh = pool.allocate((len(path) - first) * (1 + parts))
    assert fresh is not None
    blocks = lease.blocks + fresh[: len(path) - first]
    pool.publish(lease, tenant, tokens, blocks, written_by=0)
    if pool.windows is not None:
        made = pool.windows.build_parts(fresh[len(path) - first :])
        pool.anchor_parts(tenant, tokens, first, made, written_by=0)
        pool.windows.release_parts(made, is_end=True)
    if pool.snapshots is not None:
        snapshot = pool.allocate_snapshot(len(tokens))
        assert snapshot is not None and pool.keep_snapshot(tenant, tokens, snapshot)
    pool.release(blocks)
    pool.unpin(lease)
    pool.check_invariants()


def take(pool: BlockPool, count: int) -> None:
    """A request needs so many blocks, for a moment."""
    blocks = pool.allocate(count)
    assert blocks is not None
    pool.release(blocks)
    pool.check_invariants()


def retain(pool: BlockPool, name: str, *path: int, priority: float = 1.0, until_ns: int = 100, **quota: str) -> int:
    return pool.retained.retain_prefix(name, "", tokens_of(*path), until_ns, priority, **quota)


def cached(pool: BlockPool, *path: int) -> int:
    return pool.match("", tokens_of(*path)) // BLOCK


KINDS = {
    "kv": PoolConfig(10),
    "states": PoolConfig(15, states=StatePages(10, 1)),
    "windows": PoolConfig(20, windows=WindowPages(6, 1, BLOCK, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_retained_leaves_last_by_priority(kind: str) -> None:
    """Five paths of two blocks, the oldest of them retained, with the lowest priority last."""
    pool = BlockPool(KINDS[kind], BLOCK, "m")
    total = pool.config.hbm_blocks
    for first in (1, 2, 3, 4, 5):
        leave(pool, 10 * first, 10 * first + 1)
    assert pool.available() == total and pool.blocks_free == 0
    for name, priority in (("c", 3.0), ("b", 2.0), ("a", 0.5)):
        first = {"a": 1, "b": 2, "c": 3}[name]
        assert retain(pool, name, 10 * first, 10 * first + 1, priority=priority) == 2 * BLOCK
    assert pool.available() == total, "retained blocks take room from a request"
    order = []
    for count in range(1, total + 1):
        take(pool, count)
        here = [first for first in (1, 2, 3, 4, 5) if cached(pool, 10 * first, 10 * first + 1) == 2]
        order += [first for first in (1, 2, 3, 4, 5) if first not in here and first not in order]
    assert sorted(order[:2]) == [4, 5] and order[2:] == [1, 2, 3]
    assert len(pool.retained) == 0 and pool.retained.next_deadline_ns is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_released_leaves_first(kind: str) -> None:
    pool = BlockPool(KINDS[kind], BLOCK, "m")
    for first in (1, 2, 3, 4, 5):
        leave(pool, 10 * first, 10 * first + 1)
    assert pool.retained.release_prefix("", tokens_of(50, 51)) == 2
    take(pool, 1)
    assert [cached(pool, 10 * first, 10 * first + 1) == 2 for first in (1, 2, 3, 4, 5)] == [True] * 4 + [False]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_lapses_is_where_its_last_use_put_it(kind: str) -> None:
    pool = BlockPool(KINDS[kind], BLOCK, "m")
    for first in (1, 2, 3, 4, 5):
        leave(pool, 10 * first, 10 * first + 1)
    retain(pool, "a", 10, 11, until_ns=50)
    retain(pool, "b", 30, 31, until_ns=60)
    assert pool.retained.next_deadline_ns == 50
    pool.retained.expire_retained(59)
    assert pool.retained.retained_tokens("a") == 0 and pool.retained.next_deadline_ns == 60
    take(pool, 1)
    assert [cached(pool, 10 * first, 10 * first + 1) == 2 for first in (1, 2, 3)] == [False, True, True]


def test_the_highest_of_several_on_a_path_counts() -> None:
    pool = BlockPool(PoolConfig(6), BLOCK, "m")
    leave(pool, 1, 2)
    leave(pool, 3, 4)
    leave(pool, 5, 6)
    retain(pool, "low", 1, 2, priority=1)
    retain(pool, "high", 1, 2, priority=5)
    retain(pool, "middle", 3, 4, priority=2)
    take(pool, 4)
    assert (cached(pool, 1, 2), cached(pool, 3, 4)) == (2, 0)
    assert pool.retained.retained_tokens("high") == 2 * BLOCK and len(pool.retained) == 1


def test_a_shared_part_stays_for_those_still_retained() -> None:
    pool = BlockPool(PoolConfig(6), BLOCK, "m")
    leave(pool, 1, 2, 3)
    leave(pool, 1, 2, 4, 5)
    retain(pool, "low", 1, 2, 3, priority=1)
    retain(pool, "high", 1, 2, 4, 5, priority=2)
    take(pool, 2)
    assert (cached(pool, 1, 2, 3), cached(pool, 1, 2, 4, 5)) == (2, 4)


def test_given_up_in_hbm_it_is_retained_in_dram() -> None:
    """The lower one leaves DRAM for the higher one; what no name keeps is dropped before either."""
    pool = BlockPool(PoolConfig(6, 3), BLOCK, "m")
    leave(pool, 1, 2, 3)
    leave(pool, 4, 5)
    leave(pool, 6)
    retain(pool, "low", 1, 2, 3, priority=1)
    retain(pool, "high", 4, 5, priority=2)
    take(pool, 4)
    assert pool.match_blocks("", tokens_of(1, 2, 3)) == (0, 3) and cached(pool, 6) == 0
    assert pool.retained.retained_tokens("low") == 3 * BLOCK
    take(pool, 6)
    assert pool.match_blocks("", tokens_of(4, 5)) == (0, 2) and cached(pool, 1, 2, 3) == 1
    assert pool.retained.retained_tokens("low") == 0 < pool.retained.retained_tokens("high")


def test_a_priority_below_zero_releases() -> None:
    pool = BlockPool(PoolConfig(4), BLOCK, "m")
    leave(pool, 1, 2)
    leave(pool, 3, 4)
    retain(pool, "a", 3, 4)
    assert retain(pool, "a", 3, 4, priority=-1) == 0 == pool.retained.retained_tokens("a")
    take(pool, 2)
    assert (cached(pool, 1, 2), cached(pool, 3, 4)) == (2, 0)


def test_a_release_spares_what_others_share_or_retain() -> None:
    pool = BlockPool(PoolConfig(8), BLOCK, "m")
    leave(pool, 1, 2, 3)
    leave(pool, 1, 2, 4)
    leave(pool, 5, 6)
    assert pool.retained.release_prefix("", tokens_of(1, 2)) == 0, "two go on behind it"
    assert pool.retained.release_prefix("", tokens_of(1, 2, 3)) == 1
    retain(pool, "long", 1, 2, 4)
    retain(pool, "other", 1, 2, 3)
    assert pool.retained.release_prefix("", tokens_of(1, 2)) == 0 and len(pool.retained) == 2, "two retain it"
    retain(pool, "a", 5)
    assert pool.retained.release_prefix("", tokens_of(5, 6)) == 1 and len(pool.retained) == 3
    lease = pool.acquire("", tokens_of(5, 6))
    assert pool.retained.release_prefix("", tokens_of(5, 6)) == 0, "it is in use"
    pool.release(lease.blocks)
    pool.unpin(lease)
    assert pool.retained.release_prefix("", tokens_of(9)) == 0


def test_a_release_ends_the_names_on_its_path() -> None:
    """Whatever they are: of the prompt with its answer, of the prompt alone."""
    pool = BlockPool(PoolConfig(8), BLOCK, "m")
    leave(pool, 1, 2, 3)
    leave(pool, 5, 6)
    retain(pool, "prompt", 1, 2)
    retain(pool, "answer", 1, 2, 3)
    retain(pool, "other", 5, 6)
    assert pool.retained.release_prefix("", tokens_of(1, 2)) == 3
    assert len(pool.retained) == 1 and pool.retained.retained_tokens("other") == 2 * BLOCK
    pool.check_invariants()


def test_a_tenant_beyond_its_quota_loses_its_lowest() -> None:
    """Half of all tokens is for retained prefixes: a tenant may have it alone, and others take their part of it."""
    pool = BlockPool(PoolConfig(16), BLOCK, "m")
    for first in range(1, 8):
        leave(pool, 10 * first, 10 * first + 1)
    assert pool.retained.tokens_max == 8 * BLOCK
    for first, priority in ((1, 4.0), (2, 1.0), (3, 3.0), (4, 2.0)):
        assert retain(pool, f"a{first}", 10 * first, 10 * first + 1, priority=priority, tenant="a") == 2 * BLOCK
    assert retain(pool, "a5", 50, 51, priority=0.5, tenant="a") == 0, "it is the lowest itself"
    assert retain(pool, "b6", 60, 61, priority=0.1, tenant="b") == 2 * BLOCK
    assert pool.retained.tokens_by_tenant() == {"a": 6 * BLOCK, "b": 2 * BLOCK}
    assert [pool.retained.retained_tokens(f"a{first}") > 0 for first in (1, 2, 3, 4, 5)] == [
        True,
        False,
        True,
        True,
        False,
    ]
    assert retain(pool, "free", 70, 71) == 2 * BLOCK, "of no tenant: in no quota"
    pool.check_invariants()


def test_lost_kv_ends_what_was_retained() -> None:
    pool = BlockPool(PoolConfig(8), BLOCK, "m")
    leave(pool, 1, 2)
    leave(pool, 3)
    retain(pool, "a", 1, 2)
    retain(pool, "b", 3)
    pool.delete("", tokens_of(1, 2))
    assert pool.retained.retained_tokens("a") == 0 < pool.retained.retained_tokens("b")
    pool.clear_cache()
    assert len(pool.retained) == 0
    pool.check_invariants()


def test_a_snapshot_goes_down_before_it_is_retained_no_more() -> None:
    pool = BlockPool(PoolConfig(8, 4, states=StatePages(10, 1)), BLOCK, "m")
    assert pool.snapshots is not None
    leave(pool, 1)
    leave(pool, 2)
    retain(pool, "a", 1)
    take(pool, 8)
    (snapshot,) = [s for s in pool.snapshots.list_cached() if s.retained]
    assert snapshot.tier is Tier.DRAM and pool.retained.retained_tokens("a") == BLOCK
    assert pool.allocate_dram_ids(4) is not None
    assert pool.retained.retained_tokens("a") == 0
    pool.check_invariants()
