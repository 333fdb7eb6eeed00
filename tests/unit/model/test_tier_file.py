"""Pages of the lower tier that lie in a file: what comes back is what was written, or nothing does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from geometries import TINY
from memserve.base.config import EngineOptions, Parallel
from memserve.base.errors import UserError
from memserve.base.types import CopyBlocks, Tier
from memserve.model.arena import ArenaSizes, KvArenas
from memserve.model.tier_file import TierFile

PAGES, LAYERS, FIRST = 24, 4, 3


def pages_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.fixture(params=[96, 4096], ids=["cached", "direct"])
def arena(request: pytest.FixtureRequest) -> np.ndarray:
    """Random pages, at addresses that a disk can write to at once."""
    size = request.param
    memory = np.zeros(PAGES * size + 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    arena = memory[begin : begin + PAGES * size].reshape(PAGES, size)
    arena[:] = np.random.default_rng(1).integers(0, 256, arena.shape, np.uint8)
    return arena


def file_of(folder: Path, arena: np.ndarray) -> TierFile:
    return TierFile(str(folder), FIRST, 8, LAYERS, arena.shape[1])


def damage(file: TierFile, offset: int) -> None:
    """Through the page cache: what passes it by is written in whole sectors."""
    with open(f"/proc/self/fd/{file._fd}", "r+b") as there:
        os.pwrite(there.fileno(), b"torn", offset)


def test_pages_come_back_in_any_order(tmp_path: Path, arena: np.ndarray) -> None:
    file, rng = file_of(tmp_path, arena), np.random.default_rng(2)
    written = rng.permutation(np.arange(FIRST * LAYERS, (FIRST + 6) * LAYERS, dtype=np.int32))
    file.write_pages(written, arena.ctypes.data, np.arange(PAGES, dtype=np.int32))
    order = rng.permutation(PAGES)
    expected = arena[order].copy()
    back = arena.copy()
    arena[:] = 0
    file.read_pages(written[order], arena.ctypes.data, np.arange(PAGES, dtype=np.int32))
    assert np.array_equal(arena, expected) and not np.array_equal(back, expected)
    assert file.in_file(pages_of(11, 12)).tolist() == [False, True] and not list(tmp_path.iterdir())
    file.close()


def test_damaged_torn_and_unwritten_pages_are_refused(tmp_path: Path, arena: np.ndarray) -> None:
    file, address = file_of(tmp_path, arena), arena.ctypes.data
    file.write_pages(pages_of(12, 16), address, pages_of(0, 1))  # layer 0 of the file's first two blocks
    file.read_pages(pages_of(12, 16), address, pages_of(2, 3))
    with pytest.raises(OSError, match="1 of 2 pages"):
        file.read_pages(pages_of(12, 13), address, pages_of(2, 3))
    damage(file, arena.shape[1])
    with pytest.raises(OSError, match="1 of 2 pages"):
        file.read_pages(pages_of(12, 16), address, pages_of(2, 3))
    file.write_pages(pages_of(16), address, pages_of(1))
    os.ftruncate(file._fd, arena.shape[1])
    with pytest.raises(OSError, match="ends early"):
        file.read_pages(pages_of(12, 16), address, pages_of(2, 3))
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write_pages(pages_of(12), address, pages_of(0))
    assert not file._written[file._places_of(pages_of(12))], "half of it may be there"


def test_whole_blocks_move_between_memory_and_file(tmp_path: Path) -> None:
    """HBM of 6 blocks; below it 2 in DRAM and 4 in the file."""
    arenas = KvArenas(ArenaSizes(LAYERS * 64, 6, 2, 4, str(tmp_path), LAYERS))
    contents = np.random.default_rng(3).integers(0, 256, (6, LAYERS * 64), np.uint8)
    arenas.hbm.numpy()[:] = contents
    arenas.copy_blocks(CopyBlocks(Tier.HBM, Tier.DRAM, [0, 1, 2, 3], [1, 4, 2, 5]))
    arenas.hbm.numpy()[:] = 0
    arenas.copy_blocks(CopyBlocks(Tier.DRAM, Tier.HBM, [5, 1, 2, 4], [3, 0, 2, 1]))
    assert np.array_equal(arenas.hbm.numpy()[:4], contents[:4])
    with pytest.raises(IndexError, match="6 blocks"):
        arenas.copy_blocks(CopyBlocks(Tier.HBM, Tier.DRAM, [0], [6]))


def test_no_room_and_what_goes_not_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match="no file of"):
        TierFile(str(tmp_path / "a file"), 0, 8, LAYERS, 64)
    options = EngineOptions(kv_folder=(str(tmp_path), 1 << 30), dram_memory_bytes=1 << 30)
    for refused, why in (
        (replace(options, parallel=Parallel(tensor=2)), "several workers"),
        (replace(options, kv_lower_dtype="int8"), "another dtype"),
    ):
        with pytest.raises(UserError, match=why):
            refused.instance_config(TINY.kv, 64, "n")
    with pytest.raises(UserError, match="on a GPU"):
        options.instance_config(TINY.kv, 64, "n", on_gpu=True)
    pool = options.instance_config(TINY.kv, 64, "n").pool
    assert pool.dram_blocks == 2 * pool.ssd_blocks and not pool.shares_dram
