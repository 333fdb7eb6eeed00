"""Which snapshots go first: golden cases on a pool of a few blocks."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.states import StatePages
from memserve.kv.pool import BlockPool
from memserve.kv.snapshots import StateSnapshot

BLOCK = 4


def new_pool(blocks: int = 12) -> BlockPool:
    return BlockPool(PoolConfig(blocks, 0, states=StatePages(10, 1)), BLOCK, "test")


def tokens_of(*blocks: int) -> np.ndarray:
    """A path: each number stands for a block of tokens."""
    return np.repeat(np.array(blocks, np.int32), BLOCK)


def leave(pool: BlockPool, *path: int) -> StateSnapshot:
    """What a sequence leaves that has computed ``path``: KV of all its blocks, and a snapshot behind the last one."""
    tokens = tokens_of(*path)
    lease = pool.acquire("", tokens)
    pool.use_snapshot(lease)
    fresh = pool.allocate(len(path) - len(lease.blocks))
    assert fresh is not None
    pool.publish(lease, "", tokens, lease.blocks + fresh, written_by=0)
    snapshot = pool.allocate_snapshot(len(tokens))
    assert snapshot is not None and pool.keep_snapshot("", tokens, snapshot)
    pool.release(lease.blocks + fresh)
    pool.unpin(lease)
    return snapshot


def lost(pool: BlockPool, snapshots: dict[str, StateSnapshot]) -> list[str]:
    """Their names in the order in which they go, when blocks are needed one by one."""
    names: list[str] = []
    while pool.allocate(1) is not None:
        names += [name for name, snapshot in snapshots.items() if not snapshot.pages and name not in names]
    return names


def test_earlier_turns_go_before_anything_else() -> None:
    """Each turn goes on from the one before it; another conversation is older than them all."""
    pool = new_pool()
    snapshots = {"other": leave(pool, 9), "first": leave(pool, 1), "second": leave(pool, 1, 2)}
    snapshots["third"] = leave(pool, 1, 2, 3)
    assert lost(pool, snapshots) == ["first", "second", "other", "third"]


def test_what_several_went_on_from_stays_with_its_path() -> None:
    pool = new_pool()
    snapshots = {"shared": leave(pool, 1), "a": leave(pool, 1, 2), "b": leave(pool, 1, 3), "c": leave(pool, 1, 4)}
    assert snapshots["shared"].is_branch and snapshots["shared"].uses == 3
    assert lost(pool, snapshots)[-1] == "shared"


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
    ((_, snapshot),) = pool.snapshots.anchors()
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
