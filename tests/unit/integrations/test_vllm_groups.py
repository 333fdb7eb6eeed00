"""Several groups of KV under vLLM: what a prefix needs of each, what is promised, loaded and saved, and refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from memserve.integrations.vllm.lookups import GroupOfKv, Lookups, RankNames
from memserve.integrations.vllm.memory import BlockLayout
from memserve.integrations.vllm.scheduler import EngineBlocks, KvLoad, Save, SchedulerSide
from memserve.integrations.vllm.shared_kv import tails_of, why_not_kept
from waiting import eventually

BLOCK, TAIL = 4, 2


def spec(kind: str, block_size: int = BLOCK, **more: Any) -> Any:
    return type(kind, (), {"block_size": block_size, **more})()


def group(kind: str, **more: Any) -> Any:
    return SimpleNamespace(kv_cache_spec=spec(kind, **more), is_eagle_group=False)


FULL, WINDOW = group("FullAttentionSpec"), group("SlidingWindowSpec", sliding_window=6)


class Pool:
    """What the store has, by name; which of it turns out to be damaged when it is held."""

    def __init__(self) -> None:
        self.kept: set[bytes] = set()
        self.damaged: set[bytes] = set()
        self.is_mapped = True

    def prefix_at_once(self, names: Sequence[bytes]) -> int | None:
        return (
            next((at for at, one in enumerate(names) if one not in self.kept), len(names)) if self.is_mapped else None
        )

    def exists_at_once(self, names: Sequence[bytes]) -> list[bool]:
        return [one in self.kept and self.is_mapped for one in names]

    def hold_values(self, values: Sequence[Any]) -> tuple[int, list[Any]]:
        good = self.kept - self.damaged
        count = next((at for at, one in enumerate(values) if one.name not in good), len(values))
        return count, []

    def may_hold(self, count: int, nbytes: int) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def lookups(pool: Pool) -> Iterator[Lookups]:
    kept: Any = pool
    made = Lookups(kept, [GroupOfKv(), GroupOfKv(TAIL)])
    layout = BlockLayout((8,), b"d")
    made.set_ranks([(RankNames(b"full/", layout), RankNames(b"window/", layout))])
    yield made
    made.close()


def hashes(count: int) -> list[bytes]:
    return [b"h%d" % at for at in range(count)]


def keep(pool: Pool, full: Sequence[int], window: Sequence[int]) -> None:
    pool.kept = {b"full/=h%d" % at for at in full} | {b"window/=h%d" % at for at in window}


def held(lookups: Lookups, count: int) -> int:
    assert lookups.start_lookup("r", hashes(count))
    eventually(lambda: lookups.lookup_result("r") is not None)
    return lookups.lookup_result("r") or 0


@pytest.mark.parametrize(
    ("full", "window", "found"),
    [
        (range(6), range(6), 6),
        (range(6), (4, 5), 6),
        (range(6), (2, 3, 5), 4),
        (range(6), (0, 5), 1),
        (range(6), (3, 5), 0),
        (range(4), (4, 5), 0),
        (range(4), (2, 3), 4),
        ((), range(6), 0),
    ],
)
def test_a_prefix_needs_the_tail_of_a_window(
    pool: Pool, lookups: Lookups, full: Sequence[int], window: Sequence[int], found: int
) -> None:
    keep(pool, full, window)
    assert lookups.prefix_at_once(hashes(6)) == found
    assert held(lookups, 6) == found


def test_the_longest_prefix_against_a_plain_search(pool: Pool, lookups: Lookups) -> None:
    rng = random.Random(3)
    for _ in range(300):
        full, window = rng.randrange(9), [at for at in range(8) if rng.random() < 0.7]
        keep(pool, range(full), window)
        ends = [end for end in range(min(full, 8) + 1) if all(at in window for at in range(max(0, end - TAIL), end))]
        assert lookups.prefix_at_once(hashes(8)) == max(ends) == held(lookups, 8)


def test_damage_in_a_tail_shortens_the_prefix(pool: Pool, lookups: Lookups) -> None:
    keep(pool, range(6), range(6))
    pool.damaged = {b"window/=h4"}
    assert lookups.prefix_at_once(hashes(6)) == 6 and held(lookups, 6) == 4


def test_blocks_go_to_the_tables_of_their_groups(pool: Pool, lookups: Lookups) -> None:
    """What vLLM has no block for lies beyond the window."""
    keep(pool, range(4), range(4))
    side = SchedulerSide(lookups, EngineBlocks(BLOCK, 1), 10**12)
    request = SimpleNamespace(request_id="r", block_hashes=hashes(4), num_tokens=17, num_computed_tokens=0)
    eventually(lambda: side.match_request(request, 0, 0)[0] is not None)
    assert side.match_request(request, 0, 1) == (16, True)
    side.on_blocks_allocated(request, ([10, 11, 12, 13], [0, 0, 22, 23]), 16)
    state = SimpleNamespace(get_block_ids=lambda _: ([10, 11, 12, 13, 14], [0, 0, 22, 23, 24]))
    orders = side.plan_step(SimpleNamespace(num_scheduled_tokens={}, kv_connector_block_state=state), 2)
    names = (b"h0", b"h1", b"h2", b"h3", b"h2", b"h3")
    assert orders.loads == (KvLoad("r", names, (10, 11, 12, 13, 22, 23), (0, 0, 0, 0, 1, 1)),) and not orders.begun
    side.on_loads_received(["r"], set())
    request.num_tokens, request.num_computed_tokens = 20, 16
    request.block_hashes = hashes(5)
    orders = side.plan_step(SimpleNamespace(num_scheduled_tokens={"r": 4}, kv_connector_block_state=state), 3)
    assert orders.saves == (Save((b"h4", b"h4"), (14, 24), (0, 1)),) and orders.begun == ("r",)
    side.on_request_finished("r")
    assert side.is_idle


def test_a_failed_load_is_computed_and_not_begun(pool: Pool, lookups: Lookups) -> None:
    keep(pool, range(2), range(2))
    side = SchedulerSide(lookups, EngineBlocks(BLOCK, 1), 10**12)
    request = SimpleNamespace(request_id="r", block_hashes=hashes(2), num_tokens=9, num_computed_tokens=0)
    eventually(lambda: side.match_request(request, 0, 0) == (8, True))
    side.on_blocks_allocated(request, ([1, 2], [3, 4]), 8)
    side.on_loads_received(["r"], set(), {"r"})
    assert side.match_request(request, 0, 2) == (0, False)
    state = SimpleNamespace(get_block_ids=lambda _: ([1, 2], [3, 4]))
    assert not side.plan_step(SimpleNamespace(num_scheduled_tokens={"r": 9}, kv_connector_block_state=state), 3).begun


def test_a_window_reaches_back_that_many_blocks() -> None:
    sizes = {1: 0, 2: 1, 5: 1, 6: 2, 9: 2, 10: 3}
    groups = [group("SlidingWindowSpec", sliding_window=window) for window in sizes]
    assert tails_of([FULL, *groups]) == [None, *sizes.values()]


@pytest.mark.parametrize(
    ("groups", "tells", "reason"),
    [
        ([FULL], False, ""),
        ([FULL, WINDOW], True, ""),
        ([WINDOW], True, ""),
        ([FULL, WINDOW], False, "cannot be told"),
        ([WINDOW], False, "cannot be told"),
        ([FULL, group("MambaSpec")], True, "a state is all of a prefix"),
        ([FULL, group("ChunkedLocalAttentionSpec")], True, "ChunkedLocalAttentionSpec is not understood"),
        ([FULL, group("SlidingWindowSpec", sliding_window=6, block_size=8)], True, "blocks of 4 and 8 tokens"),
        ([], True, "no KV"),
    ],
)
def test_inexact_cache_groups_are_refused_with_reason(groups: list[Any], tells: bool, reason: str) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), cache_config=SimpleNamespace(enable_prefix_caching=True, hash_block_size=4)
    )
    told = why_not_kept(config, SimpleNamespace(kv_cache_groups=groups), tells_requests=tells)
    assert reason in told and bool(reason) == bool(told)
