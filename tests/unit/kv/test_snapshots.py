"""Snapshots and the KV before them, what goes and what stays: golden cases on a pool of a few blocks."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import StateSnapshot

BLOCK = 4


def new_pool(blocks: int = 12, dram: int = 0) -> BlockPool:
    return BlockPool(PoolConfig(blocks, dram, states=StatePages(10, 1)), BLOCK, "test")


def tokens_of(*blocks: int) -> np.ndarray:
    """A path: each number stands for a block of tokens."""
    return np.repeat(np.array(blocks, np.int32), BLOCK)


def leave(pool: BlockPool, *path: int, tenant: str = "") -> StateSnapshot:
    """What a sequence leaves that has computed ``path``: KV of all its blocks, and a snapshot behind the last one."""
    tokens = tokens_of(*path)
    lease = pool.acquire(tenant, tokens)
    assert pool.snapshots is not None
    pool.snapshots.use_lease(lease)
    fresh = pool.allocate(len(path) - len(lease.blocks))
    assert fresh is not None
    pool.publish(lease, tenant, tokens, lease.blocks + fresh, written_by=0)
    snapshot = pool.allocate_snapshot(len(tokens))
    assert snapshot is not None and pool.keep_snapshot(tenant, tokens, snapshot)
    pool.release(lease.blocks + fresh)
    pool.unpin(lease)
    return snapshot


def test_kv_that_no_snapshot_stands_behind_goes_first() -> None:
    """It is newer than all else, and no sequence can go on from it."""
    pool = new_pool(6)
    snapshot = leave(pool, 1, 2)
    tokens = tokens_of(8, 9)
    blocks = pool.allocate(2)
    assert blocks is not None
    lease = pool.acquire("", tokens)
    pool.publish(lease, "", tokens, blocks, written_by=0)
    pool.release(blocks)
    pool.unpin(lease)
    assert pool.allocate(3) is not None
    assert (pool.match_kv("", tokens), pool.match("", tokens_of(1, 2))) == (0, 2 * BLOCK) and snapshot.pages
    pool.check_invariants()


def test_a_snapshot_goes_without_the_kv_of_a_longer_one() -> None:
    pool = new_pool()
    first, second = leave(pool, 1), leave(pool, 1, 2, 3)
    assert pool.snapshots is not None and second.gap_tokens == 2 * BLOCK
    pool.snapshots.forget(first)
    assert pool.match("", tokens_of(1, 2, 3)) == 3 * BLOCK and second.gap_tokens == 3 * BLOCK
    assert pool.match("", tokens_of(1, 5)) == 0 and pool.match_kv("", tokens_of(1, 5)) == BLOCK
    pool.check_invariants()


def test_the_last_snapshot_frees_only_its_own_kv() -> None:
    """Two paths share a block: with one of them go the blocks that it alone has."""
    pool = new_pool()
    one, _ = leave(pool, 1, 2, 3), leave(pool, 1, 4)
    assert pool.snapshots is not None
    pool.snapshots.forget(one)
    free = pool.blocks_free
    assert pool.allocate(free + 2) is not None
    assert (pool.match("", tokens_of(1, 4)), pool.match_kv("", tokens_of(1, 2, 3))) == (2 * BLOCK, BLOCK)
    pool.check_invariants()


def test_a_snapshot_between_two_becomes_the_parent() -> None:
    pool = new_pool()
    ends = [leave(pool, 1, 2, 3), leave(pool, 1, 2, 4), leave(pool, 5)]
    middle = leave(pool, 1, 2)
    assert [end.parent for end in ends] == [middle, middle, None]
    assert [end.gap_tokens for end in ends] == [BLOCK, BLOCK, BLOCK]
    assert pool.snapshots is not None
    pool.snapshots.forget(middle)
    assert [end.parent for end in ends] == [None] * 3 and ends[0].gap_tokens == 3 * BLOCK
    pool.check_invariants()


def test_a_flood_of_one_tenant_costs_its_own_snapshots() -> None:
    pool = new_pool()
    quiet = leave(pool, 1, tenant="quiet")
    for number in range(10, 30):
        leave(pool, number, tenant="loud")
    assert quiet.pages and pool.match("quiet", tokens_of(1)) == BLOCK
    pool.check_invariants()


def test_a_lent_snapshot_keeps_no_kv_from_those_who_need_it() -> None:
    """A peer reads the snapshot's blocks alone: all others can be allocated, as is promised."""
    pool = new_pool(6)
    leave(pool, 1, 2, 3)
    loan = pool.lend_state("", tokens_of(1, 2, 3), 1)
    assert loan is not None and pool.available() == 5
    assert pool.allocate(5) is not None
    assert pool.match("", tokens_of(1, 2, 3)) == 0
    pool.check_invariants()
    pool.unpin(loan)
    pool.release(loan.blocks)
    assert pool.available() == 1


def test_a_snapshot_goes_with_its_block() -> None:
    pool = new_pool()
    snapshot = leave(pool, 1, 2)
    assert pool.match("", tokens_of(1, 2, 3)) == 2 * BLOCK
    assert pool.delete("", tokens_of(1, 2)) == 2
    assert not snapshot.pages and pool.match("", tokens_of(1, 2)) == 0
    assert pool.available() == 12 == pool.blocks_free


def test_kv_without_a_snapshot_is_no_match() -> None:
    pool = new_pool()
    leave(pool, 1, 2, 3)
    assert pool.match_kv("", tokens_of(1, 2, 4)) == 2 * BLOCK
    assert pool.match("", tokens_of(1, 2, 4)) == 0
    assert pool.match_blocks("", tokens_of(1, 2, 3)) == (3, 0)
    lease = pool.acquire("", tokens_of(1, 2, 4))
    assert (lease.blocks, lease.tokens, lease.snapshot) == ([], 0, None)


def test_other_tokens_of_one_identity_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the index, tokens are compared: identities that collide cost time, and never give a wrong state."""
    pool = new_pool()
    leave(pool, 1)
    monkeypatch.setattr(pool, "identities", lambda tenant, tokens: bytes(16) * (len(tokens) // BLOCK))
    monkeypatch.setattr(pool, "match_kv", lambda tenant, tokens: len(tokens))
    assert pool.snapshots is not None
    (snapshot,) = pool.snapshots.list_cached()
    pool.snapshots._by_identity = {bytes(16): snapshot}
    assert pool.match("", tokens_of(1)) == BLOCK
    assert pool.match("", tokens_of(2)) == 0


def test_a_pinned_prefix_keeps_its_snapshot() -> None:
    pool = new_pool(4)
    snapshot = leave(pool, 1, 2)
    lease = pool.acquire("", tokens_of(1, 2))
    pool.release(lease.blocks)
    assert pool.available() == 1 and pool.allocate(2) is None
    assert snapshot.pages and pool.match("", tokens_of(1, 2)) == 2 * BLOCK
    pool.unpin(lease)
    assert pool.available() == 4


def written(pool: BlockPool, *path: int) -> StateSnapshot:
    """As :func:`leave`, and the plan is made that computes it."""
    snapshot = leave(pool, *path)
    assert not pool.take_copies()
    return snapshot


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_a_snapshot_leaves_for_dram_and_its_kv_follows() -> None:
    pool = new_pool(6, dram=8)
    snapshot = written(pool, 1, 2)
    assert pool.allocate(5) is not None
    [state, *kv] = [(copy.src_tier, copy.dst_tier, len(copy.src)) for copy in pool.take_copies()]
    assert (snapshot.tier, state, kv) == (Tier.DRAM, (Tier.HBM, Tier.DRAM, 2), []), "with one block of its KV"
    assert pool.match("", tokens_of(1, 2)) == 2 * BLOCK and pool.match_blocks("", tokens_of(1, 2)) == (1, 1)
    pool.check_invariants()


def test_kv_that_no_snapshot_stands_behind_is_dropped() -> None:
    """It is of no use on a lower tier either."""
    pool = new_pool(6, dram=8)
    written(pool, 1, 2)
    lease = pool.acquire_kv("", tokens_of(1, 2))
    more = pool.allocate(1)
    assert more is not None
    pool.publish(lease, "", tokens_of(1, 2, 3), [*lease.blocks, *more], written_by=0)
    pool.release([*lease.blocks, *more])
    pool.unpin(lease)
    assert pool.allocate(3) is not None
    assert not pool.take_copies() and pool.match_kv("", tokens_of(1, 2, 3)) == 2 * BLOCK


def test_a_sequence_goes_on_from_dram_before_it_is_copied() -> None:
    """Loads of a plan come before its copies: a snapshot that moves with this plan is read where it lay."""
    pool = new_pool(6, dram=8)
    snapshot = written(pool, 1, 2)
    pages = list(snapshot.pages)
    fresh = pool.allocate(4)
    assert fresh is not None and snapshot.tier is Tier.DRAM and snapshot.source == (Tier.HBM, pages)
    pool.take_copies()
    assert snapshot.source == (Tier.DRAM, snapshot.pages)
    pool.release(fresh)
    lease = pool.acquire("", tokens_of(1, 2, 3))
    assert lease.snapshot is snapshot and len(lease.blocks) == 2
    assert pool.snapshots is not None
    pool.snapshots.use_lease(lease)
    pool.release(lease.blocks)
    pool.unpin(lease)
    pool.check_invariants()


def test_a_snapshot_that_is_not_written_yet_does_not_move() -> None:
    pool = new_pool(6, dram=8)
    snapshot = leave(pool, 1, 2)
    pool.note_state_access(snapshot, writes=True)
    assert pool.allocate(4) is not None
    assert not snapshot.pages and not pool.take_copies()


def test_the_least_snapshot_leaves_a_full_second_tier() -> None:
    """What moves down must be worth more than what goes for it; KV in DRAM that none stands behind goes first."""
    pool = new_pool(6, dram=3)
    assert pool.snapshots is not None
    pool.snapshots.compute_ns = lambda tokens, behind: tokens * (tokens + behind)
    short = written(pool, 1)
    first = taken(pool, 5)
    assert short.tier is Tier.DRAM
    pool.take_copies()
    pool.release(first)
    longer = written(pool, 2, 3)
    second = taken(pool, 6)
    assert (bool(short.pages), longer.tier) == (False, Tier.DRAM), "it saves more for each byte"
    assert pool.match("", tokens_of(2, 3)) == 2 * BLOCK and not pool.match("", tokens_of(1))
    pool.release(second)
    pool.check_invariants()


def test_a_prefix_that_does_not_fit_is_cut_at_a_snapshot() -> None:
    pool = new_pool(8, dram=12)
    written(pool, 1)
    longer = written(pool, 1, 2, 3, 4)
    fresh = taken(pool, 8)
    assert longer.tier is Tier.DRAM
    pool.take_copies()
    pool.release(fresh[:3])
    lease = pool.acquire("", tokens_of(1, 2, 3, 4, 5))
    assert (lease.tokens, len(lease.blocks)) == (BLOCK, 1) and lease.snapshot is not None
    pool.check_invariants()


def test_a_peer_gets_a_snapshot_from_dram_by_way_of_hbm() -> None:
    pool = new_pool(6, dram=8)
    snapshot = written(pool, 1, 2)
    fresh = taken(pool, 6)
    assert snapshot.tier is Tier.DRAM
    pool.take_copies()
    assert pool.lend_state("", tokens_of(1, 2), 1) is None, "there is no room"
    assert snapshot.tier is Tier.DRAM
    pool.release(fresh)
    lent = pool.lend_state("", tokens_of(1, 2), 1)
    assert lent is not None and snapshot.tier is Tier.HBM and lent.blocks == snapshot.pages
    [copy] = pool.take_copies()
    assert (copy.src_tier, copy.dst_tier, copy.dst) == (Tier.DRAM, Tier.HBM, lent.blocks)
    pool.unpin(lent)
    pool.release(lent.blocks)
    pool.check_invariants()


@pytest.mark.parametrize("is_lent", [False, True])
def test_dram_is_free_of_kv_that_a_snapshot_above_holds(is_lent: bool) -> None:
    """A snapshot that has gone up for a peer, and whose KV has stayed below."""
    pool = new_pool(6, dram=4)
    snapshot = written(pool, 1, 2)
    fresh = taken(pool, 6)
    pool.take_copies()
    pool.release(fresh)
    lent = pool.lend_state("", tokens_of(1, 2), 1)
    assert lent is not None and snapshot.tier is Tier.HBM and pool.match_kv_blocks("", tokens_of(1, 2)) == (0, 2)
    if not is_lent:
        pool.unpin(lent)
        pool.release(lent.blocks)
    assert pool.available(Tier.DRAM) == 4
    below = pool.allocate_dram_ids(4)
    assert below is not None and pool.match_kv("", tokens_of(1, 2)) == 0
    pool.release_dram(below)
    pool.check_invariants()
