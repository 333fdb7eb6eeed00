"""What the product's policy of snapshots decides: where they are taken, and which goes, by what it has seen."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.instance.scheduler.states import describe_prompt
from memserve.kv.costs import CostModel, PreemptionCosts, PreemptionModel, PrefillCurve
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import PlannedPrompt, SnapshotKind, StateSnapshot

BLOCK = 4


class Cache:
    """A pool that serves prompts whose tokens are numbers of blocks, and does with snapshots what an instance does."""

    def __init__(self, blocks: int, state_blocks: int = 1) -> None:
        self.pool = BlockPool(PoolConfig(blocks, 0, states=StatePages(10 * state_blocks, state_blocks)), BLOCK, "test")
        assert self.pool.snapshots is not None
        self.snapshots = self.pool.snapshots
        self.snapshots.compute_ns = lambda tokens, behind: 1000 * tokens

    def serve(self, *path: int, kind: SnapshotKind | None = SnapshotKind.ANSWER) -> list[int]:
        """Positions, in blocks, at which the prompt left snapshots; ``kind``: of one more behind all of it."""
        tokens = np.repeat(np.array(path, np.int32), BLOCK)
        prompt = np.append(tokens, np.int32(99))
        lease = self.pool.acquire("", tokens)
        start_tokens = lease.tokens
        self.pool.snapshots.use_lease(lease)
        prefill = describe_prompt(self.pool, "", prompt, start_tokens)
        positions = list(self.snapshots.policy.choose_positions(prefill))
        fresh = self.pool.allocate(len(path) - len(lease.blocks))
        assert fresh is not None
        blocks = lease.blocks + fresh
        self.pool.publish(lease, "", tokens, blocks, written_by=0)
        for position in positions:
            parts = position == prefill.parting_tokens
            ends = position == prefill.last_tokens
            reason = SnapshotKind.BRANCH if parts else SnapshotKind.PROMPT if ends else SnapshotKind.BEHIND
            self.leave(tokens[:position], reason)
        if kind is not None:
            self.leave(tokens, kind)
        self.pool.release(blocks)
        self.pool.unpin(lease)
        self.pool.check_invariants()
        return [position // BLOCK for position in positions]

    def leave(self, tokens: np.ndarray, kind: SnapshotKind) -> None:
        snapshot = self.pool.allocate_snapshot(len(tokens))
        if snapshot is not None:
            snapshot.kind = kind
            if not self.pool.keep_snapshot("", tokens, snapshot):
                self.snapshots.forget(snapshot)

    def at(self, *path: int) -> StateSnapshot | None:
        tokens = np.repeat(np.array(path, np.int32), BLOCK)
        found = [s for s in self.snapshots.list_cached() if np.array_equal(s.prefix, tokens)]
        return found[0] if found else None


def test_a_snapshot_is_taken_where_prompts_part() -> None:
    """The second prompt leaves it, the third goes on from it."""
    cache = Cache(60)
    cache.serve(1, 2, 3, 10)
    assert 3 in cache.serve(1, 2, 3, 11)
    branch = cache.at(1, 2, 3)
    assert branch is not None and branch.kind is SnapshotKind.BRANCH and not branch.uses
    cache.serve(1, 2, 3, 12)
    assert branch.uses == 1


def test_positions_lie_behind_the_start_and_before_the_end() -> None:
    prefill = PlannedPrompt(8, 40, 33, BLOCK, bytes(16 * 8))
    assert (prefill.last_tokens, prefill.parting_tokens) == (32, 0)  # the last token is always computed
    assert PlannedPrompt(8, 32, 34, BLOCK, b"").parting_tokens == 32
    assert PlannedPrompt(32, 32, 34, BLOCK, b"").parting_tokens == 0


def test_turns_that_a_longer_one_stands_for_are_found_useless() -> None:
    """Chats that never go back: after a few of them, what their earlier turns have left goes before others."""
    cache = Cache(24, state_blocks=3)
    for chat in range(40):
        for turn in range(1, 4):
            cache.serve(*(100 * chat + part for part in range(turn)))
    earlier = [snapshot for snapshot in cache.snapshots.list_cached() if snapshot.prefix[0] != 100 * chat]
    assert len(earlier) > 1 and not any(snapshot.children for snapshot in earlier)


def test_of_equals_the_one_goes_that_saves_less_for_its_bytes() -> None:
    """A state of eight blocks: eight tokens more cost little memory beside it, and save as much again."""
    cache = Cache(40, state_blocks=8)
    cache.serve(1)
    cache.serve(*range(20, 26))
    assert cache.at(1) is not None
    victim = cache.snapshots.policy.choose_victim(cache.at(1).owner, Tier.HBM)
    assert victim is cache.at(1)


def test_what_was_not_used_for_long_goes_before_its_equal() -> None:
    cache = Cache(60)
    for start in (10, 20, 30):
        cache.serve(start, start + 1, kind=None)
    cache.serve(10, 11, kind=None)
    victim = cache.snapshots.policy.choose_victim(cache.at(20, 21).owner, Tier.HBM)
    assert victim is cache.at(20, 21)


@pytest.mark.parametrize("back", [1, 4])
def test_positions_before_the_end_are_learnt(back: int) -> None:
    """Each turn parts from the one before it some blocks before that one's end: soon there is a snapshot there."""
    cache = Cache(4000)
    served = []
    for chat in range(12):
        path = [1000 * chat + part for part in range(20)]
        for turn in range(3):
            served.append((len(path), cache.serve(*path, kind=None)))
            cut = len(path) - back
            path = path[:cut] + [1000 * chat + 100 * (turn + 1) + part for part in range(10)]
    assert served[0] == (20, [20])  # nothing is known: its end alone
    length, learnt = served[-1]
    assert any(back <= length - position <= 2 * back for position in learnt)
    assert cache.snapshots.report().used >= 20  # of 24 further turns


def test_an_end_that_saves_nothing_is_not_taken_for_long() -> None:
    """Prompts that are never seen again, beside a document that is, in memory for few: their ends are given up."""
    cache = Cache(30)
    for number in range(300):
        cache.serve(1, 2, 3, 4, 5, 6, 10 + number, kind=None)
        cache.serve(*(100 * number + part + 5000 for part in range(5)), kind=None)
    taken = [cache.serve(*(100 * number + part + 90000 for part in range(5)), kind=None) for number in range(10)]
    assert cache.at(1, 2, 3, 4, 5, 6) is not None
    assert all(position <= 5 for positions in taken for position in positions)


def test_worth_follows_the_measured_curves() -> None:
    """By pairs of tokens, what is computed behind much is worth more; a step's fixed time is no saving."""
    curve = CostModel(prefill=PrefillCurve(1e6, 10.0, 1.0))
    model = PreemptionModel(PreemptionCosts(64, profile=curve))
    assert model.saved_ns(4, 0) == 4 * 10 + 10
    assert model.saved_ns(4, 100) == 4 * 10 + 410
    assert model.saved_ns(0, 100) == 0
