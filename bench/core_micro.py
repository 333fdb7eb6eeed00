"""Microbenchmarks of the memory core through the Python API that users call; single thread, microseconds an operation.

Workload: prompts of 4,096 tokens, groups of 10 share the first 1,024; trees of 1, 1,000 and 20,000 prompts; another
victim prompt in each repetition. For comparison, the limits of this machine in the same run: copying the same
tokens out of cold memory on huge pages, and an empty call.

    python bench/core_micro.py [--trees 1,1000,20000] [--blocks 16,32] [--reps 200] [--json out.json] [--rivals PATH]

``--rivals PATH``: a JSON-lines file, or a folder of ``*.jsonl``, with records ``{"peer", "impl", "op", "tree_prompts",
"median_us", "p99_us"}`` (or ``"bytes_per_block"``). They are printed below our figures, marked as recorded in another
run: such figures vary by 5 to 10 % between runs, so only large ratios are meaningful.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
from harness.flags import Commas, options, save
from harness.processes import resident_bytes
from harness.rounds import Timer
from harness.tables import Table
from numpy.typing import NDArray

from memserve import _core
from memserve.base.config import PoolConfig
from memserve.base.types import KVGeometry, Tier
from memserve.kv.mempool import MemPool
from memserve.kv.pool import BlockPool

PROMPT_TOKENS, SHARED_TOKENS, GROUP = 4096, 1024, 10
VOCABULARY = 49152
Tokens = NDArray[np.int32]
Record = dict[str, Any]
PLACES = ("tree_prompts", "block_tokens", "page", "pool_blocks", "threads")
COLUMNS = {
    "what": "{head}", "where": "{where}", "median, us": "{median_us:.2f}", "p99, us": "{p99_us:.2f}",
    "bytes a block": "{bytes_per_block:.1f}", "GB/s": "{gb_per_s}",
}  # fmt: skip


def prompt(i: int) -> Tokens:
    """Prompt ``i``: its first tokens are common to its group."""
    shared = np.random.default_rng((0, 1, i // GROUP)).integers(1, VOCABULARY, SHARED_TOKENS, dtype=np.int32)
    own_tokens = np.random.default_rng((0, 2, i)).integers(1, VOCABULARY, PROMPT_TOKENS - SHARED_TOKENS, dtype=np.int32)
    return np.concatenate([shared, own_tokens])


def partial(i: int, share: float, block: int) -> Tokens:
    """A prompt of which the first ``share`` (whole blocks) equals prompt ``i`` and the rest is fresh."""
    kept_tokens = int(PROMPT_TOKENS * share) // block * block
    tokens = np.random.default_rng((0, 3, i)).integers(1, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
    tokens[:kept_tokens] = prompt(i)[:kept_tokens]
    if kept_tokens < PROMPT_TOKENS:
        tokens[kept_tokens] = prompt(i)[kept_tokens] % (VOCABULARY - 1) + 1
    return tokens


def build(prompts: int, block: int) -> BlockPool:
    """A pool whose cache holds ``prompts`` prompts, with room for 400 more."""
    per_prompt = PROMPT_TOKENS // block
    pool = BlockPool(PoolConfig(hbm_blocks=(prompts + 400) * per_prompt), block, "bench")
    for i in range(prompts):
        fill(pool, prompt(i))
    return pool


def fill(pool: BlockPool, tokens: Tokens) -> None:
    """Cache ``tokens``, as a finished request does."""
    lease = pool.acquire("", tokens)
    fresh = pool.allocate(len(tokens) // pool.block_tokens - len(lease.blocks)) or []
    blocks = lease.blocks + fresh
    pool.publish(lease, "", tokens, blocks, written_by=0)
    pool.unpin(lease)
    pool.release(blocks)


def bench_match(pool: BlockPool, prompts: int, reps: int) -> Iterator[Record]:
    """Time ``BlockPool.match`` of prompts cached to different degrees."""
    rng = np.random.default_rng(7)
    for share in (1.0, 0.9, 0.5, 0.0):
        timer = Timer()
        for i in rng.permutation(max(prompts, reps))[:reps] % prompts:
            tokens = partial(int(i), share, pool.block_tokens)
            results = timer(pool.match, "", tokens)
            assert results == int(PROMPT_TOKENS * share) // pool.block_tokens * pool.block_tokens, results
        yield timer.record(f"match_{share:.0%}")


def bench_acquire(pool: BlockPool, prompts: int, reps: int) -> Iterator[Record]:
    """Time the whole read path of a request: acquire pinned and referenced blocks, then release them."""
    acquire, back, borrow = Timer(), Timer(), Timer()
    for i in np.random.default_rng(8).permutation(max(prompts, reps))[:reps] % prompts:
        tokens = prompt(int(i))
        lease = acquire(pool.acquire, "", tokens)
        back(pool.unpin, lease)
        pool.release(lease.blocks)
        pool.release(borrow(pool.borrow_blocks, "", tokens))
    yield acquire.record("acquire_100% (list of blocks)")
    yield borrow.record("borrow_100% (native blocks)")
    yield back.record("unpin")


def bench_insert(pool: BlockPool, reps: int) -> Iterator[Record]:
    """Time ``insert`` of fresh prompts, of prompts with a cached first quarter, and of cached prompts."""
    timers = {"insert_fresh": Timer(), "insert_sharing_1k": Timer(), "insert_cached": Timer()}
    for k in range(min(reps, 190)):
        first = prompt(10_000_000 + GROUP * k)
        for name, tokens in zip(timers, (first, prompt(10_000_000 + GROUP * k + 1), first), strict=True):
            blocks = pool.allocate_ids(PROMPT_TOKENS // pool.block_tokens)
            assert blocks is not None
            timers[name](pool.insert, "", tokens, blocks, len(blocks))
            pool.release(blocks)
    for name, timer in timers.items():
        yield timer.record(name)


def bench_evict(pool: BlockPool, reps: int) -> Iterator[Record]:
    """Time an allocation of 256 blocks that must evict exactly 256 first."""
    block_ids = pool.allocate_ids(pool.available() - pool.report().by_tier[Tier.HBM].blocks_evictable)
    timer = Timer()
    for _ in range(min(reps, 100, pool.available() // 256)):
        blocks = timer(pool.allocate_ids, 256)
        assert blocks is not None and len(blocks) == 256
    if timer.us:
        yield timer.record("evict_256_and_allocate")
    assert block_ids is not None


def bench_blocks(reps: int) -> Iterator[Record]:
    """Time allocating and freeing 256 blocks in pools of several sizes."""
    geometry = KVGeometry(1, 1, 1, 1, "bfloat16", 1)
    for total in (4096, 65536, 524288):
        allocator, mempool = _core.BlockAllocator(total), MemPool(geometry, hbm_bytes=total * geometry.block_bytes)
        pool = BlockPool(PoolConfig(hbm_blocks=total), 32, "bench")
        cases: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "BlockAllocator": (allocator.allocate, allocator.release),
            "MemPool": (mempool.alloc_mem, mempool.free_mem),
            "BlockPool (list)": (pool.allocate, pool.release),
        }
        for name, (allocate, free) in cases.items():
            taking, giving = Timer(), Timer()
            for _ in range(reps):
                giving(free, taking(allocate, 256))
            yield taking.record("allocate_256", api=name, pool_blocks=total)
            yield giving.record("free_256", api=name, pool_blocks=total)


def bench_limits(reps: int) -> Iterator[Record]:
    """Time what the machine itself needs: comparing and copying 16 KiB of cold memory, and an empty call."""
    cold = np.random.default_rng(1).integers(1, VOCABULARY, (20_000, PROMPT_TOKENS), dtype=np.int32)
    target = np.empty(PROMPT_TOKENS, np.int32)
    copy, nothing = Timer(), Timer()
    for i in np.random.default_rng(2).permutation(len(cold))[:reps]:
        copy(_core.copy_bytes, target.ctypes.data, cold[i].ctypes.data, target.nbytes)
        nothing(int)
    yield copy.record("limit: memcpy of 16 KiB, cold source")
    yield nothing.record("limit: an empty call and the timer")


def bench_copies() -> Iterator[Record]:
    """Time copies of blocks of 737,280 bytes between two arenas, beside one memcpy of the same bytes."""
    block_bytes, blocks = 737_280, 128
    source, target = _core.Arena(block_bytes * blocks), _core.Arena(block_bytes * blocks)
    np.frombuffer(memoryview(source), np.uint8)[:] = 1
    np.frombuffer(memoryview(target), np.uint8)[:] = 2
    ids = np.random.default_rng(3).permutation(blocks).astype(np.int32)
    order = np.arange(blocks, dtype=np.int32)
    calls: dict[str, Callable[[int], None]] = {
        "memcpy": lambda threads: _core.copy_bytes(target.address, source.address, block_bytes * blocks, threads),
        "copy_blocks": lambda threads: _core.copy_blocks(
            target.address, source.address, block_bytes, order, ids, threads
        ),
    }
    timers = {(name, threads): Timer() for threads in (1, 2) for name in calls}
    for _ in range(9):
        for (name, threads), timer in timers.items():
            timer(calls[name], threads)
    for (name, threads), timer in timers.items():
        gb_per_s = round(block_bytes * blocks / np.median(timer.us) / 1e3, 2)
        yield timer.record(name, threads=threads, gb_per_s=gb_per_s)


def bench_tree(prompts: int, block: int, reps: int) -> Iterator[Record]:
    """All measurements of one tree."""
    resident = resident_bytes(os.getpid())
    pool = build(prompts, block)
    resident = resident_bytes(os.getpid()) - resident
    cached = pool.report().by_tier[Tier.HBM].blocks_cached
    per_block = round(pool._index.nbytes / cached, 1)
    records = [*bench_match(pool, prompts, reps), *bench_acquire(pool, prompts, reps), *bench_insert(pool, reps)]
    if prompts >= 1000:
        records.append({"op": "index memory", "bytes_per_block": per_block, "blocks": cached})
        records.append({"op": "resident-set growth", "bytes_per_block": round(resident / cached, 1), "blocks": cached})
    records += bench_evict(pool, reps)
    pool.check_invariants()
    for record in records:
        yield {**record, "tree_prompts": prompts, "block_tokens": block}


def rivals(path: Path) -> list[Record]:
    """Recorded figures of rivals: a JSON-lines file, or every ``*.jsonl`` below a folder."""
    files = [path] if path.is_file() else sorted(path.glob("**/*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in records if "peer" in record and ("median_us" in record or "bytes_per_block" in record)]


def main() -> None:
    args = options(__doc__, trees=Commas(1, 1000, 20000), blocks=Commas(32, 16), reps=200, rivals=Path)
    table, records = Table(COLUMNS), list[Record]()

    def show(record: Record) -> None:
        head = " ".join(str(record[key]) for key in ("peer", "impl", "op", "api") if key in record)
        places_text = " ".join(f"{key}={record[key]}" for key in PLACES if key in record)
        table.show({"head": head, "where": places_text, **record})

    trees = (bench_tree(prompts, block, args.reps) for block, prompts in product(args.blocks, args.trees))
    for record in chain(bench_limits(args.reps), bench_blocks(args.reps), chain.from_iterable(trees), bench_copies()):
        show(record)
        records.append(record)
    if args.rivals:
        print(f"\nrecorded, another run (not beside the figures above): {args.rivals}\n")
        table = Table(COLUMNS)
        for record in rivals(args.rivals):
            show(record)
    save(args, records)


if __name__ == "__main__":
    main()
