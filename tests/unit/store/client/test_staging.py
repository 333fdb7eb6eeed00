"""Staging memory: room that is waited for, and memory that a caller fills itself."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from memserve.base.errors import InvariantError, UserError
from memserve.store.client.memory import Staged, Staging


def staged(staging: Staging, nbytes: int) -> Staged:
    offset = staging.take_piece(nbytes, 0.0)
    assert offset is not None
    return Staged(staging, offset, nbytes)


def test_more_than_there_ever_is_is_refused_at_once() -> None:
    staging = Staging(8192, 1)
    assert staging.take_piece(8193, time.monotonic() + 60) is None
    assert staging.take_piece(8192, 0.0) == 0


def test_room_is_waited_for_until_the_deadline() -> None:
    staging = Staging(8192, 1)
    assert staging.take_piece(8192, 0.0) == 0
    assert staging.take_piece(1, time.monotonic() + 0.01) is None
    got: list[int | None] = []
    waiting = threading.Thread(target=lambda: got.append(staging.take_piece(1, time.monotonic() + 30)))
    waiting.start()
    staging.return_piece(0)
    waiting.join(30)
    assert got == [0]


def test_staged_memory_lies_in_the_arena() -> None:
    staging = Staging(8192, 1)
    with staged(staging, 5) as memory:
        memory.data[:] = b"hello"
        assert len(memory) == 5
        assert bytes(staging.bytes[:5]) == b"hello"
    with pytest.raises(UserError, match="released"):
        _ = memory.data
    assert staging.bytes_free == 8192
    memory.release()  # again: nothing


def test_memory_with_arrays_over_it_is_not_given_to_another() -> None:
    staging = Staging(8192, 1)
    memory = staged(staging, 8)
    array = np.frombuffer(memory.data, np.uint8)
    memory.release()
    assert staging.bytes_free == 4096
    array[:] = 7
    assert staging.take_piece(8192, 0.0) is None
    del array
    assert staging.bytes_free == 8192
    assert staging.take_piece(8192, 0.0) == 0


def test_memory_of_one_client_is_not_put_by_another() -> None:
    one, other = Staging(8192, 1), Staging(8192, 2)
    memory = staged(one, 8)
    assert memory.offset_in(one) == 0 and memory.offset_in(other) is None
    memory.release()
    assert memory.offset_in(one) is None


def test_pieces_that_overlap_are_noticed() -> None:
    staging = Staging(8192, 1)
    staging.take_piece(1, 0.0)
    staging._free.append((0, 4096))
    with pytest.raises(InvariantError):
        staging.check_invariants()
