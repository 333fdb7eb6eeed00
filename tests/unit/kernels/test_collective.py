"""Groups of workers beside a simple twin: sums, gathered rows, broadcasts in any order; ends and lateness."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memserve import _core, _kernels

SLOT_BYTES = 256
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def together(size: int, work: Callable[[_kernels.Collective], Any], timeout_s: float = 20.0) -> list[Any]:
    """``work`` of every rank in a thread of its own: what it returned, or its error."""
    region = _core.SharedArena(_kernels.Collective.region_bytes(size, SLOT_BYTES))
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(_kernels.Collective(region.address, rank, size, SLOT_BYTES, timeout_s))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def script(size: int, seed: int) -> list[tuple[Any, ...]]:
    """Operations, each with the values of all ranks and the twin's answer for each rank."""
    rng = random.Random(seed)
    numbers = np.random.default_rng(seed)
    found: list[tuple[Any, ...]] = []
    for _ in range(rng.randrange(20, 60)):
        match rng.choice(("all_reduce", "gather", "broadcast", "meet")):
            case "all_reduce":
                dtype = rng.choice(list(CODES))
                count = rng.choice((1, 7, 64, 129, 1000))
                parts = [torch.from_numpy(numbers.integers(-8, 8, count)).to(dtype) for _ in range(size)]
                found.append(("all_reduce", parts, sum(part.float() for part in parts).to(dtype)))
            case "gather":
                rows = rng.randrange(0, 30)
                widths = [rng.randrange(0, 20) for _ in range(size)]
                parts = [torch.from_numpy(numbers.random((rows, width), np.float32)) for width in widths]
                found.append(("gather", parts, torch.cat(parts, 1)))
            case "broadcast":
                root, count = rng.randrange(size), rng.randrange(1, 700)
                parts = [torch.from_numpy(numbers.integers(0, 255, count).astype(np.uint8)) for _ in range(size)]
                found.append(("broadcast", parts, root))
            case kind:
                found.append((kind, [None] * size, None))
    return found


def perform(collective: _kernels.Collective, steps: list[tuple[Any, ...]]) -> int:
    for kind, parts, expected in steps:
        mine = parts[collective.rank]
        if kind == "all_reduce":
            out = torch.empty_like(mine)
            collective.all_reduce(mine.data_ptr(), out.data_ptr(), len(mine), CODES[mine.dtype])
            assert torch.equal(out, expected)
        elif kind == "gather":
            out = torch.empty_like(expected)
            widths = [4 * part.shape[1] for part in parts]
            collective.gather(mine.data_ptr(), len(mine), widths, out.data_ptr())
            assert collective.rank != 0 or torch.equal(out, expected)
        elif kind == "broadcast":
            data = mine.clone()
            collective.broadcast(data.data_ptr(), len(data), expected)
            assert torch.equal(data, parts[expected])
        else:
            collective.meet()
    return len(steps)


@pytest.mark.parametrize("seed", range(12))
def test_any_operations_in_any_order_give_what_the_twin_gives(seed: int) -> None:
    size = 1 + seed % 4
    steps = script(size, 5100 + seed)
    assert together(size, lambda collective: perform(collective, steps)) == [len(steps)] * size


def test_all_ranks_have_the_same_bits() -> None:
    parts = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]

    def add(collective: _kernels.Collective) -> bytes:
        out = torch.empty(5000)
        collective.all_reduce(parts[collective.rank].data_ptr(), out.data_ptr(), 5000, 0)
        return out.numpy().tobytes()

    assert len(set(together(3, add))) == 1


def test_ending_rank_ends_the_waits_of_all() -> None:
    def work(collective: _kernels.Collective) -> None:
        if collective.rank == 2:
            collective.abort()
            return
        collective.meet()

    first, second, third = together(3, work)
    assert third is None
    for error in (first, second):
        assert isinstance(error, RuntimeError) and "has ended" in str(error)


def test_a_rank_that_announces_waits_for_no_other() -> None:
    seen: list[str] = []
    asked = threading.Event()

    def work(collective: _kernels.Collective) -> float:
        if collective.rank == 0:
            collective.announce()  # rank 1 has not come
            seen.append("announced")
            asked.set()
        else:
            assert asked.wait(20)
            collective.announce()
            collective.await_rank(0)
            collective.await_rank(1)
            seen.append("awaited")
        x = torch.full((4,), float(1 + collective.rank))
        collective.all_reduce(x.data_ptr(), x.data_ptr(), 4, 0)
        with pytest.raises(ValueError, match="one of the collective"):
            collective.await_rank(2)
        return float(x[0])

    assert together(2, work) == [3.0, 3.0] and seen == ["announced", "awaited"]


def test_absent_rank_times_out() -> None:
    first, second = together(2, lambda collective: collective.rank or collective.meet(), timeout_s=0.05)
    assert isinstance(first, RuntimeError) and "does not answer" in str(first) and second == 1


def test_invalid_collective_group_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 ranks"):
        _kernels.Collective(64, 2, 2, 256, 1.0)
    with pytest.raises(ValueError, match="multiples of 64"):
        _kernels.Collective(64, 0, 2, 100, 1.0)
    region = _core.SharedArena(_kernels.Collective.region_bytes(2, SLOT_BYTES))
    collective = _kernels.Collective(region.address, 0, 2, SLOT_BYTES, 1.0)
    with pytest.raises(ValueError, match="one width for each rank"):
        collective.gather(0, 0, [1], 0)
    with pytest.raises(ValueError, match="a rank of the collective"):
        collective.broadcast(0, 1, 2)
