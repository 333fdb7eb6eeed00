"""Arenas that other processes map: real processes, read-only maps, owners that die, numbers that others have by now."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve._core import PeerArena, SharedArena

HUGE = 2 << 20

OWNER = """
import sys, numpy as np
from memserve._core import SharedArena
arena = SharedArena(int(sys.argv[1]))
arena.generation = 41
np.frombuffer(arena, np.uint8)[:] = 7
print(arena.fd, flush=True)
for line in sys.stdin:
    np.frombuffer(arena, np.uint8)[:] = int(line)
    arena.generation += 1
    print("done", flush=True)
"""

VANDAL = """
import ctypes, sys
from memserve._core import PeerArena
arena = PeerArena(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
assert ctypes.string_at(arena.address, 1) == b"\\x05"
print("reads", flush=True)
ctypes.memset(arena.address, 1, 1)
print("writes", flush=True)
"""


@contextmanager
def owner(nbytes: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with an arena full of sevens, and its descriptor; each number that it is told replaces them."""
    command = [sys.executable, "-c", OWNER, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], value: int) -> None:
    assert process.stdin and process.stdout
    process.stdin.write(f"{value}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def look(peer: PeerArena) -> np.ndarray:
    return np.frombuffer(peer, np.uint8)


def test_peer_mapping_sees_writes_and_survives_owner_death() -> None:
    nbytes = 3 * HUGE + 12_345
    with owner(nbytes) as (process, fd):
        peer = PeerArena(process.pid, fd, nbytes)
        assert (peer.nbytes, peer.generation, peer.address % 4096) == (nbytes, 41, 0)
        assert look(peer).shape == (nbytes,) and (look(peer) == 7).all()
        tell(process, 9)
        assert peer.generation == 42 and (look(peer) == 9).all()
        process.kill()
        process.wait()
        assert (look(peer) == 9).all()
        with pytest.raises(OSError, match=rf"process {process.pid} \(descriptor {fd}\) cannot be opened"):
            PeerArena(process.pid, fd, nbytes)


def test_peers_cannot_write() -> None:
    arena = SharedArena(HUGE)
    np.frombuffer(arena, np.uint8)[:] = 5
    peer = PeerArena(os.getpid(), arena.fd, HUGE)
    assert memoryview(peer).readonly and not memoryview(arena).readonly
    command = [sys.executable, "-c", VANDAL, str(os.getpid()), str(arena.fd), str(HUGE)]
    vandal = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert vandal.stdout == "reads\n", vandal.stderr
    assert vandal.returncode == -signal.SIGSEGV
    assert (np.frombuffer(arena, np.uint8) == 5).all()


def test_shared_memory_file_has_seals() -> None:
    """It does not shrink under its readers, no other process maps it for writing, no child inherits it."""
    import mmap

    arena = SharedArena(HUGE)
    assert not os.get_inheritable(arena.fd)
    for size in (4096, 16 * HUGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(arena.fd, b"x", 0)


@contextmanager
def descriptors() -> Iterator[dict[str, int]]:
    """What a number may stand for once its owner is gone."""
    with tempfile.TemporaryFile() as file, SharedFile(0) as empty, SharedFile(9 * HUGE) as unsealed:
        file.truncate(9 * HUGE)
        arena = SharedArena(HUGE)
        os.pwrite(unsealed, os.pread(arena.fd, 4096, 0), 0)  # looks like one, but may shrink
        os.ftruncate(unsealed, os.fstat(arena.fd).st_size)
        read_end, write_end = os.pipe()
        yield {"file": file.fileno(), "pipe": read_end, "empty": empty, "unsealed": unsealed, "null": NULL}
        os.close(read_end)
        os.close(write_end)


class SharedFile:
    """An ordinary memfd."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("other")
        os.ftruncate(self.fd, nbytes)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *error: object) -> None:
        os.close(self.fd)


NULL = os.open(os.devnull, os.O_RDONLY)


def test_numbers_that_belong_to_others_are_refused() -> None:
    with descriptors() as others:
        for name, fd in others.items():
            with pytest.raises(OSError, match=r"no longer exists|could shrink"):
                PeerArena(os.getpid(), fd, HUGE)
                pytest.fail(name)
    arena = SharedArena(HUGE)
    for nbytes in (1, HUGE - 1, HUGE + 1, 1 << 40):
        with pytest.raises(OSError, match=f"has {HUGE} bytes, not {nbytes}"):
            PeerArena(os.getpid(), arena.fd, nbytes)
    for pid, fd in ((os.getpid(), 9999), (2**22 + 1, 3), (-1, 0)):
        with pytest.raises(FileNotFoundError, match="cannot be opened"):
            PeerArena(pid, fd, HUGE)


def test_bad_sizes_are_refused() -> None:
    for nbytes in (0, -1, 2**63 - 1):
        with pytest.raises(ValueError, match="at least one byte"):
            SharedArena(nbytes)
    with pytest.raises(OSError, match="shared arena"):
        SharedArena(1 << 61)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE - 4096, HUGE, 2 * HUGE + 1])
def test_zeroed_aligned_and_exactly_as_long(nbytes: int) -> None:
    arena = SharedArena(nbytes)
    view = np.frombuffer(arena, np.uint8)
    assert (len(view), arena.nbytes, arena.address % 4096, view.ctypes.data) == (nbytes, nbytes, 0, arena.address)
    assert not view.any()
    view[:] = 255  # the last byte too
    for generation in (0, 1, 2**64 - 1):
        arena.generation = generation
        assert (arena.generation, PeerArena(os.getpid(), arena.fd, nbytes).generation) == (generation, generation)
    assert (view == 255).all()  # the header lies elsewhere


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9999), st.binary(min_size=1, max_size=200))))
def test_writes_arrive(writes: list[tuple[int, bytes]]) -> None:
    nbytes = 10_200
    arena, twin = SharedArena(nbytes), bytearray(nbytes)
    peer, view = PeerArena(os.getpid(), arena.fd, nbytes), np.frombuffer(arena, np.uint8)
    for at, data in writes:
        view[at : at + len(data)] = np.frombuffer(data, np.uint8)
        twin[at : at + len(data)] = data
    assert bytes(peer) == bytes(arena) == twin


def test_views_keep_the_memory_and_the_last_one_gives_it_back() -> None:
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum("memserve-arena" in line for line in file)

    gc.collect()
    maps_before, fds_before = maps(), len(os.listdir("/proc/self/fd"))
    arena = SharedArena(HUGE)
    peer = PeerArena(os.getpid(), arena.fd, HUGE)
    mine, theirs = np.frombuffer(arena, np.uint8), np.frombuffer(peer, np.uint8)
    del arena, peer
    mine[-1] = 3
    assert theirs[-1] == 3
    del mine
    assert theirs[-1] == 3
    del theirs
    gc.collect()
    assert (maps(), len(os.listdir("/proc/self/fd"))) == (maps_before, fds_before)


def test_huge_pages_change_nothing_but_the_speed() -> None:
    nbytes = 5 * HUGE + 100
    arena = SharedArena(nbytes)
    peer, view = PeerArena(os.getpid(), arena.fd, nbytes), np.frombuffer(arena, np.uint8)
    pattern = np.resize(np.arange(251, dtype=np.uint8), nbytes)
    view[: 3 * HUGE] = pattern[: 3 * HUGE]  # the rest is untouched as yet
    done = arena.collapse(HUGE, 3 * HUGE)
    assert done % HUGE == 0 and 0 <= done <= 5 * HUGE  # 0 on a machine that cannot
    assert np.array_equal(look(peer)[: 3 * HUGE], pattern[: 3 * HUGE])
    assert not look(peer)[3 * HUGE :].any()
    arena.collapse(0, nbytes)
    view[:] = pattern
    assert np.array_equal(look(peer), pattern)
    assert arena.collapse(nbytes, 0) == 0
    for offset, count in ((0, nbytes + 1), (nbytes, 1), (-1, 5), (5, -1)):
        with pytest.raises(ValueError, match=r"inside the arena|not in the arena"):
            arena.collapse(offset, count)
