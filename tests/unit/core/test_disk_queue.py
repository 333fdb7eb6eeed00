"""Many reads and writes at once, past the page cache: both engines do what a file would."""

from __future__ import annotations

import errno
import os
import random
import select
from pathlib import Path

import pytest

from memserve import _core

PAGE = 4096
ENGINES = ["io_uring", "threads"]


def opened(path: Path, engine: str, pages: int, depth: int = 8, **options) -> _core.DiskQueue:
    try:
        return _core.DiskQueue(str(path), pages * PAGE, depth, engine=engine, **options)
    except OSError as error:
        pytest.skip(f"no {engine} here: {error}")


def finished(queue: _core.DiskQueue, count: int) -> dict[int, int]:
    done: dict[int, int] = {}
    while len(done) < count:
        readable, _, _ = select.select([queue], [], [], 10)
        assert readable, "nothing ends"
        done.update(queue.take())
    return done


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("registered", [False, True])
def test_writes_are_read_back_in_any_order(tmp_path: Path, engine: str, registered: bool) -> None:
    rng = random.Random(5)
    arena = _core.Arena(256 * PAGE)
    memory = [(arena.address, arena.nbytes)] if registered else []
    queue = opened(tmp_path / "disk", engine, 64, memory=memory)
    twin = bytearray(64 * PAGE)
    view = memoryview(arena).cast("B")
    assert queue.engine == engine and os.path.getsize(tmp_path / "disk") == 64 * PAGE
    for _ in range(30):
        places = rng.sample(range(64), 12)
        for at, page in enumerate(places):
            data = rng.randbytes(PAGE)
            twin[page * PAGE : (page + 1) * PAGE] = data
            if at % 2:
                queue.write_bytes(at, page * PAGE, data)
            else:
                view[at * PAGE : (at + 1) * PAGE] = data
                queue.write(at, page * PAGE, arena.address + at * PAGE, PAGE)
        assert set(finished(queue, 12).values()) == {0}
        first = rng.randrange(32)
        count = rng.randint(1, 32)
        queue.read(99, first * PAGE, arena.address + 128 * PAGE, count * PAGE)
        queue.sync(100)
        assert finished(queue, 2) == {99: 0, 100: 0}
        assert view[128 * PAGE : (128 + count) * PAGE] == twin[first * PAGE : (first + count) * PAGE]
    assert (queue.waiting, queue.under_way) == (0, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_is_one_operations_own(tmp_path: Path, engine: str) -> None:
    arena = _core.Arena(4 * PAGE)
    queue = opened(tmp_path / "disk", engine, 4)
    queue.read(1, 1 << 40, arena.address, PAGE)  # behind the end
    queue.read(2, 0, arena.address, PAGE)
    assert finished(queue, 2) == {1: errno.EIO, 2: 0}


@pytest.mark.parametrize("engine", ENGINES)
def test_reads_pass_writes_that_wait_and_writes_go_on(tmp_path: Path, engine: str) -> None:
    queue = opened(tmp_path / "disk", engine, 512, depth=4)
    arena = _core.Arena(PAGE)
    order: list[int] = []
    for tag in range(200):
        queue.write_bytes(tag, tag * PAGE, bytes(PAGE))
    queue.read(1000, 0, arena.address, PAGE)
    order += [tag for tag, _ in queue.take()]
    before = len(order)  # a machine may have taken its time until now
    while len(order) < 201:
        select.select([queue], [], [], 10)
        order += [tag for tag, _ in queue.take()]
    assert order.index(1000) < before + 50 and sorted(order) == [*range(200), 1000]


def test_full_disk_and_bad_calls_are_reported_immediately(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        _core.DiskQueue(str(tmp_path / "none" / "disk"), PAGE)
    with pytest.raises(OSError):
        _core.DiskQueue(str(tmp_path / "huge"), 1 << 60)
    queue = _core.DiskQueue(str(tmp_path / "disk"), 4 * PAGE)
    with pytest.raises(ValueError, match="4 KiB"):
        queue.write_bytes(1, 100, bytes(PAGE))
    with pytest.raises(ValueError, match="one byte"):
        queue.read(1, 0, PAGE, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_closing_queue_waits_for_pending_operations(tmp_path: Path, engine: str) -> None:
    queue = opened(tmp_path / "disk", engine, 64, depth=16)
    for tag in range(64):
        queue.write_bytes(tag, tag * PAGE, bytes([tag]) * PAGE)
    del queue
    assert os.path.getsize(tmp_path / "disk") == 64 * PAGE
