"""Figure 9: the calls of MemServe's Table 1 within one process, by blocks and by cached ratio.

Calls that only keep accounts are timed on a pool of many small blocks, for they never touch a block's bytes; those that
copy (``swap_out``, ``swap_in``) on blocks of the model's own size. All points take turns within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from memserve.bench.pool.prompts import TREE_PROMPT_TOKENS, Prompts, plant_tree
from memserve.bench.pool.results import CallPoint
from memserve.bench.sheet import Spent
from memserve.errors import check
from memserve.mempool.mempool import Addresses, MemPool
from memserve.types import KVGeometry, Tier, TokenArray

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
Key = tuple[str, int, float | None]
"""Call, blocks, cached ratio."""


class Times:
    """Times of calls, by what was called with what."""

    def __init__(self) -> None:
        self._ns: dict[Key, list[int]] = {}

    def __call__(self, key: Key, call: Callable[..., Any], *arguments: Any) -> Any:
        """What ``call`` returns; how long it took is noted under ``key``."""
        begin_ns = time.perf_counter_ns()
        result = call(*arguments)
        self.add(key, time.perf_counter_ns() - begin_ns)
        return result

    def add(self, key: Key, spent_ns: int) -> None:
        """Note a time that was measured elsewhere."""
        self._ns.setdefault(key, []).append(spent_ns)

    def forget(self) -> None:
        """What was noted so far was a warm-up."""
        self._ns.clear()

    def points(self, link: str = "") -> list[CallPoint]:
        """What was noted, in the order in which it first came."""
        return [CallPoint(call, blocks, ratio, Spent.of(ns), link) for (call, blocks, ratio), ns in self._ns.items()]


def measure_accounts(
    block_tokens: int, counts: Sequence[int], ratio_blocks: int, tree_prompts: int, rounds: int
) -> list[CallPoint]:
    """``alloc_mem``, ``free_mem``, ``insert``, ``match`` and ``delete``; over cached ratios at ``ratio_blocks``."""
    per_prompt = TREE_PROMPT_TOKENS // block_tokens
    blocks = tree_prompts * per_prompt + 4 * max(*counts, ratio_blocks, per_prompt)
    geometry = KVGeometry(1, 1, 1, 1, "bfloat16", block_tokens)
    pool, prompts, times = MemPool(geometry, hbm_bytes=blocks * geometry.block_bytes), Prompts(), Times()
    plant_tree(pool.pool, prompts, tree_prompts)
    for turn in range(rounds + 1):
        for count in counts:
            _account_by_blocks(pool, prompts, times, count)
        for ratio in RATIOS:
            _account_by_ratio(pool, prompts, times, ratio_blocks, ratio)
        if turn == 0:
            times.forget()
    pool.check_invariants()
    return times.points()


def _account_by_blocks(pool: MemPool, prompts: Prompts, times: Times, count: int) -> None:
    tokens = prompts.fresh(count * pool.geometry.block_tokens)
    times(("free_mem", count, None), pool.free_mem, times(("alloc_mem", count, None), pool.alloc_mem, count))
    held = _allocated(pool, count)
    times(("insert", count, 0.0), pool.insert, tokens, held)
    pool.free_mem(held)
    found = times(("match", count, 1.0), pool.match, tokens)
    check(len(found) == count, "all of it was inserted")
    pool.free_mem(found)
    gone = times(("delete", count, 0.0), pool.delete, tokens)
    check(gone == count, "all of it goes")


def _account_by_ratio(pool: MemPool, prompts: Prompts, times: Times, count: int, ratio: float) -> None:
    """The index has ``ratio`` of a prompt; the prompt is looked up, inserted whole, and deleted again."""
    block_tokens = pool.geometry.block_tokens
    shared = round(count * ratio)
    first = prompts.fresh(count * block_tokens)
    _insert(pool, first[: shared * block_tokens])
    tokens = prompts.sharing(first, shared * block_tokens)
    found = times(("match", count, ratio), pool.match, tokens)
    check(len(found) == shared, "what was planted is found, and no more")
    pool.free_mem(found)
    held = _allocated(pool, count)
    added = times(("insert", count, ratio), pool.insert, tokens, held)
    check(added == count - shared, "what was there is kept")
    pool.free_mem(held)
    if shared < count:  # a prompt that leads on to another one is deleted with that one
        _insert(pool, first)
        gone = times(("delete", count, ratio), pool.delete, tokens)
        check(gone == count - shared, "what the other prompt needs stays")
    pool.delete(first)


def _allocated(pool: MemPool, count: int) -> Addresses:
    held = pool.alloc_mem(count)
    assert held is not None, "the pool was made for it"
    return held


def _insert(pool: MemPool, tokens: TokenArray) -> None:
    held = _allocated(pool, len(tokens) // pool.geometry.block_tokens)
    pool.insert(tokens, held)
    pool.free_mem(held)


def measure_swaps(geometry: KVGeometry, counts: Sequence[int], rounds: int) -> list[CallPoint]:
    """``swap_out`` and ``swap_in`` of blocks that the caller holds: the copy is part of the call."""
    size_bytes = max(counts) * geometry.block_bytes
    pool, times = MemPool(geometry, hbm_bytes=size_bytes, dram_bytes=size_bytes), Times()
    for turn in range(rounds + 1):
        for count in reversed(counts):  # the first round touches all of the memory
            held = _allocated(pool, count)
            below = times(("swap_out", count, None), pool.swap_out_blocks, held)
            above = times(("swap_in", count, None), pool.swap_in, below)
            check(above is not None and above.tier is Tier.HBM, "there is room for all of it")
            pool.free_mem(above)
        if turn == 0:
            times.forget()
    pool.check_invariants()
    return sorted(times.points(), key=lambda point: (point.call, point.blocks))
