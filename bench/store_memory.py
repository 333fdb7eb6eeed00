"""What the store's memory tier costs a client of its host, beside the machine's own limits in the same run.

Measured in a process of its own, as clients are: hold and let go of a value of 1 MB; how many of 1,000 keys are there,
among a million; 64 blocks copied out, beside ``memcpy`` of the same bytes between the same kinds of memory. Medians of
``--reps`` rounds that take turns; ratios are what means something, for a machine's speed changes from run to run.

    python bench/store_memory.py [--reps 30] [--entries 1000000] [--geometry llama3] [--json out.json]
"""

from __future__ import annotations

import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness.flags import options, save
from harness.rounds import Samples, seconds
from harness.tables import Table

import geometries
from memserve import _core

KEYS_AT_ONCE, BLOCKS, VALUE_BYTES = 1000, 64, 1_000_000
CALLS = 2000


def keys_of(first: int, count: int) -> bytes:
    """Keys as hashes are: random, and the same in both processes."""
    rng = np.random.default_rng((first, 7))
    return rng.bytes(16 * count)


def fill(tier: _core.MemoryTier, entries: int) -> None:
    """``entries`` values of a few bytes."""
    keys = keys_of(0, entries)
    for i in range(entries):
        offset = tier.allocate(16)
        assert offset is not None, "the arena is too small"
        assert tier.publish(keys[16 * i : 16 * i + 16], offset, 16)
        tier.release(offset)


def add_blocks(tier: _core.MemoryTier, block_bytes: int) -> None:
    """Blocks with bytes, and one value of 1 MB, to which a reference is kept."""
    arena, keys = memoryview(tier.arena or b""), keys_of(-1 % 2**32, BLOCKS + 1)
    for i in range(BLOCKS + 1):
        nbytes = block_bytes if i < BLOCKS else VALUE_BYTES
        offset = tier.allocate(nbytes)
        assert offset is not None, "the arena is too small"
        arena[offset : offset + nbytes] = bytes([i + 1]) * nbytes
        assert tier.publish(keys[16 * i : 16 * i + 16], offset, nbytes)


def timed(call: Callable[[], object], calls: int = 1) -> float:
    """Microseconds a call."""
    return seconds(lambda: [call() for _ in range(calls)] and None) / calls * 1e6


def client(paths: tuple[str, str, str], args: Namespace, pipe: Connection) -> None:
    """Measures; sends medians in microseconds."""
    reader = _core.TierReader(*paths)
    block_bytes = args.block_bytes
    keys = keys_of(-1 % 2**32, BLOCKS + 1)
    blocks, value = keys[: 16 * BLOCKS], keys[16 * BLOCKS :]
    everything = keys_of(0, args.entries)
    targets = [np.ones(block_bytes, np.uint8) for _ in range(BLOCKS)]
    names = [b""] * BLOCKS
    rng = np.random.default_rng(1)
    source = _core.SharedArena(BLOCKS * block_bytes)
    np.frombuffer(source, np.uint8)[:] = 1
    addresses = [target.ctypes.data for target in targets]

    def hold() -> None:
        results = reader.hold(value)
        assert results is not None
        reader.let_go(results[2])

    def some_keys() -> bytes:
        places = rng.integers(0, args.entries, KEYS_AT_ONCE)
        return b"".join(everything[16 * int(i) : 16 * int(i) + 16] for i in places)

    def copy_out() -> None:
        assert reader.copy(blocks, names, targets) == [block_bytes] * BLOCKS

    def memcpy() -> None:
        for i, address in enumerate(addresses):
            _core.copy_bytes(address, source.address + i * block_bytes, block_bytes)

    assert reader.prefix(some_keys()) == KEYS_AT_ONCE
    copy_out()
    times = Samples()
    for _ in range(args.reps):
        keys_in_turn = some_keys()
        for name, call, calls in (
            ("a call that does nothing", lambda: reader.closed, CALLS),
            ("hold and let go of 1 MB", hold, CALLS),
            ("prefix of 1,000 keys", partial(reader.prefix, keys_in_turn), 1),
            ("where of the same again", partial(reader.where, keys_in_turn), 1),
            ("copy of 64 blocks", copy_out, 1),
            ("memcpy of 64 blocks", memcpy, 1),
        ):
            times[name].append(timed(call, calls))
    pipe.send({name: times.median(name) for name in list(times)})


def owner_figures(tier: _core.MemoryTier, block_bytes: int) -> dict[str, float]:
    """What the store itself does, a call."""
    number = iter(range(1 << 60))

    def put(nbytes: int) -> None:
        offset = tier.allocate(nbytes)
        assert offset is not None
        tier.publish((1 << 100 | next(number)).to_bytes(16, "little"), offset, nbytes)
        tier.release(offset)
        tier.take_evicted()

    key_batch = keys_of(0, KEYS_AT_ONCE)
    present = b"".join(
        key_batch[16 * i : 16 * i + 16] for i in range(KEYS_AT_ONCE) if key_batch[16 * i : 16 * i + 16] in tier
    )
    figures = {"owner: prefix, a key": timed(lambda: tier.prefix(present), 50) / max(1, len(present) // 16)}
    figures["owner: publish of 16 bytes"] = timed(lambda: put(16), CALLS)
    figures["owner: publish of a block"] = timed(lambda: put(block_bytes), BLOCKS // 2)
    tier.purge()
    for _ in range(2 * BLOCKS):
        put(block_bytes)
    while not tier.counters()["evicted"]:
        put(block_bytes)
    figures["owner: publish of a block that evicts one"] = timed(lambda: put(block_bytes), 200)
    return figures


def measure(args: Namespace) -> dict[str, Any]:
    """All figures, and the ratios that they are for."""
    room = 2 * (BLOCKS + 2) * args.block_bytes + 64 * args.entries + (8 << 20)
    start = time.perf_counter()
    name = f"bench-{os.getpid()}"
    tier = _core.MemoryTier(room, args.block_bytes, name=name, entries=args.entries + 1000)
    made_s = time.perf_counter() - start
    try:
        fill(tier, args.entries)
        add_blocks(tier, args.block_bytes)
        paths = (tier.data_path, tier.index_path, tier.open_client(1))
        ours, far_end = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=client, args=(paths, args, far_end))
        process.start()
        far_end.close()
        us: dict[str, float] = ours.recv()
        process.join()
        hidden, entries, bookkeeping = tier.counters()["hidden"], len(tier), tier.nbytes
        del tier
        start = time.perf_counter()
        tier = _core.MemoryTier(room, args.block_bytes, name=name, entries=args.entries + 1000)
        adopted_s = time.perf_counter() - start
        us |= owner_figures(tier, args.block_bytes)
    finally:
        tier.unlink()
    copied = BLOCKS * args.block_bytes
    return {
        "us": us,
        "copy_gb_s": copied / us["copy of 64 blocks"] / 1e3,
        "memcpy_gb_s": copied / us["memcpy of 64 blocks"] / 1e3,
        "copy_by_memcpy": us["memcpy of 64 blocks"] / us["copy of 64 blocks"],
        "prefix_ns_a_key": us["prefix of 1,000 keys"] * 1e3 / KEYS_AT_ONCE,
        "hidden": hidden,
        "bookkeeping_bytes_an_entry": bookkeeping / entries,
        "files_made_s": made_s,
        "adopted_s": adopted_s,
    }


def main() -> None:
    args = options(__doc__, reps=30, entries=1_000_000, geometry="llama3")
    args.block_bytes = geometries.SHAPES[args.geometry].kv.block_bytes
    figures = measure(args)
    table = Table(["figure", "value"])
    for name, us in figures["us"].items():
        table.show({"figure": name, "value": f"{us:,.2f} us"})
    speeds = f"{figures['copy_gb_s']:.2f} and {figures['memcpy_gb_s']:.2f} GB/s"
    for name, value in {
        "prefix, a key": f"{figures['prefix_ns_a_key']:,.1f} ns",
        "copy / memcpy (1 = as fast)": f"{figures['copy_by_memcpy']:.3f}, {speeds}",
        "bookkeeping, an entry": f"{figures['bookkeeping_bytes_an_entry']:,.0f} bytes",
        "files made, adopted": f"{figures['files_made_s']:.2f} and {figures['adopted_s']:.2f} s",
        "not shown for want of a place": f"{figures['hidden']:,}",
    }.items():
        table.show({"figure": name, "value": value})
    save(args, figures)


if __name__ == "__main__":
    main()
