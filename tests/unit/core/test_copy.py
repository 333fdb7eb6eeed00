"""Copies between arenas: gather, scatter and both at once, on one thread and on several, every byte compared."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from memserve import _core

PARALLEL_BYTES = 1 << 20  # from here on helpers are woken


def arena(blocks: int, block_bytes: int, seed: int) -> tuple[_core.Arena, np.ndarray]:
    """Random bytes, seen as ``(blocks, block_bytes)``."""
    memory = _core.Arena(blocks * block_bytes)
    view = np.frombuffer(memoryview(memory), np.uint8).reshape(blocks, block_bytes)
    view[...] = np.random.default_rng(seed).integers(0, 256, view.shape, dtype=np.uint8)
    return memory, view


# Below and above the smallest unit that threads share (256 KiB), not a multiple of it, and too small to share at all.
SHAPES = [(48, 40_000), (9, 262_144), (7, 700_001), (3, 1_500_000), (40, 1_000)]


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(("blocks", "block_bytes"), SHAPES)
def test_gather_scatter_and_both_move_every_byte(blocks: int, block_bytes: int, threads: int) -> None:
    total = 2 * blocks
    source, read = arena(total, block_bytes, 1)
    target, written = arena(total, block_bytes, 2)
    rng = np.random.default_rng(3)
    from_ids, to_ids = (rng.permutation(total)[:blocks].astype(np.int32) for _ in range(2))
    for src_ids, dst_ids in ((from_ids, to_ids), (from_ids, None), (None, to_ids)):
        before = np.random.default_rng(4).integers(0, 256, written.shape, dtype=np.uint8)
        written[...] = before
        want = before.copy()
        in_order = np.arange(blocks)
        to = in_order if dst_ids is None else dst_ids
        want[to] = read[in_order if src_ids is None else src_ids]
        _core.copy_blocks(target.address, source.address, block_bytes, src_ids, dst_ids, threads)
        assert np.array_equal(written, want)  # what was asked for, and nothing beside it


@pytest.mark.parametrize("count", [1, PARALLEL_BYTES - 1, PARALLEL_BYTES, 3 * PARALLEL_BYTES + 17])
def test_copy_bytes_moves_exactly_the_bytes(count: int) -> None:
    source, read = arena(1, 4 * PARALLEL_BYTES, 1)
    target, written = arena(1, 4 * PARALLEL_BYTES, 2)
    want = written.copy()
    want[0, 5 : 5 + count] = read[0, 11 : 11 + count]
    _core.copy_bytes(target.address + 5, source.address + 11, count, 4)
    assert np.array_equal(written, want)


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    """The helpers serve one job at a time: others wait, and each gets its own bytes."""
    blocks, block_bytes, callers = 5, 300_000, 4
    arenas = [(arena(blocks, block_bytes, 2 * i), arena(blocks, block_bytes, 2 * i + 1)) for i in range(callers)]
    order = np.arange(blocks, dtype=np.int32)
    failed: list[int] = []

    def copy(i: int) -> None:
        (source, read), (target, written) = arenas[i]
        for turn in range(10):
            ids = np.roll(order, turn)
            _core.copy_blocks(target.address, source.address, block_bytes, ids, order, 3)
            if not np.array_equal(written, read[ids]):
                failed.append(i)

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_bad_copies_are_refused_before_a_byte_moves() -> None:
    source, _ = arena(2, 64, 1)
    target, written = arena(2, 64, 2)
    before = written.copy()
    for src, dst, size in (([0], [0, 1], 64), (None, None, 64), ([0, -1], [0, 1], 64), ([0], [0], 0), ([0], [-5], 64)):
        with pytest.raises(ValueError, match=r"differ|give|negative|positive"):
            _core.copy_blocks(target.address, source.address, size, src, dst, 2)
    assert np.array_equal(written, before)
