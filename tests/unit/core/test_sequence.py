"""BlockIds, and what the core accepts where ids or tokens go in."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from memserve._core import BlockAllocator, BlockIds, RadixIndex

NAME = b"n" * 16


def test_block_ids_are_a_sequence() -> None:
    ids = BlockIds([4, 5, 6, 7])
    assert len(ids) == 4 and ids[0] == 4 and ids[-1] == 7 and list(ids) == [4, 5, 6, 7] == ids.tolist()
    assert ids[1:3] == [5, 6] and ids[::-2] == (7, 5) and ids[9:] == []
    assert ids == BlockIds((4, 5, 6, 7)) and ids != [4, 5, 6] and ids != "4567" and ids != None  # noqa: E711  # equality itself is tested
    assert repr(ids) == "BlockIds([4, 5, 6, 7])" and 5 in ids
    with pytest.raises(IndexError):
        ids[4]


def test_block_ids_are_viewed_without_a_copy_and_read_only() -> None:
    ids = BlockIds(range(1000))
    first, second = np.asarray(ids), np.asarray(ids)
    assert first.dtype == np.int32 and first.shape == (1000,) and first[999] == 999
    assert first.__array_interface__["data"] == second.__array_interface__["data"]
    assert not first.flags.writeable
    del ids  # the view keeps them alive
    assert first.sum() == 499500
    assert np.asarray(BlockIds()).shape == (0,)


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        BlockIds,
        lambda t: np.array(t, np.int32),
        lambda t: np.array(t, np.int64),
        lambda t: array("q", t),
        lambda t: array("i", t),
        lambda t: memoryview(np.array(t, np.int32)),
    ],
)
def test_every_kind_of_tokens(make) -> None:
    index = RadixIndex(2)
    index.insert(NAME, [1, 2, 3, 4, 5], [10, 11])
    assert index.match(NAME, make([1, 2, 3, 4, 5])) == 4
    assert index.match(NAME, make([1, 2, 3, 9])) == 2
    assert index.match(NAME, make([])) == 0


@pytest.mark.parametrize("bad", [[1, "x"], np.zeros(4, np.float32), np.zeros((2, 2), np.int32), 5, None, [1.5, 2]])
def test_wrong_kinds_are_type_errors(bad) -> None:
    with pytest.raises(TypeError):
        RadixIndex(2).match(NAME, bad)


@pytest.mark.parametrize("bad", [[2**31], np.array([2**40]), [-(2**31) - 1]])
def test_tokens_beyond_32_bits_are_refused(bad) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        RadixIndex(1).match(NAME, bad)


def test_strided_arrays_are_read_with_their_stride() -> None:
    index = RadixIndex(2)
    index.insert(NAME, [0, 2, 4, 6], [1, 2])
    assert index.match(NAME, np.arange(8, dtype=np.int32)[::2]) == 4


def test_allocator_takes_any_ids() -> None:
    allocator = BlockAllocator(8)
    held = allocator.allocate(4)
    allocator.retain(np.array([0, 1], np.int32))
    allocator.retain((2,))
    assert allocator.release(held) == 1 and allocator.release([0, 1, 2]) == 3
    allocator.check_invariants()
