"""Checksums and checksummed copies: the formula in plain Python, and the damage that they must find."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from memserve import _core

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
PARALLEL_BYTES = 1 << 20  # from here on helpers are woken
Bytes = NDArray[np.uint8]


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    _core.force_seal_isa(None)


def scatter(x: int) -> int:
    x = x * GOLDEN & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def twin_seal(data: bytes) -> int:
    """The picture of seal_sums.h, a word at a time."""
    keys, lanes = [scatter(lane + 1) for lane in range(8)], [0] * 8
    for stripe, at in enumerate(range(0, len(data), 64)):
        part = data[at : at + 64].ljust(64, b"\0")
        words = [int.from_bytes(part[8 * lane : 8 * lane + 8], "little") for lane in range(8)]
        for lane in range(8):
            x = words[lane] ^ (keys[lane] + stripe * GOLDEN & MASK)
            lanes[lane] = (lanes[lane] + (x & 0xFFFFFFFF) * (x >> 32) + words[lane ^ 1]) & MASK
    seal = scatter(len(data))
    for lane in lanes:
        seal = scatter(seal ^ lane)
    return seal


def random_bytes(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def seal(data: Bytes, threads: int = 1) -> int:
    assert data.flags.c_contiguous
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), data.nbytes, threads)[0])


@settings(max_examples=80, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=700),
    isa=st.sampled_from(_core.seal_isas()),
    shift=st.integers(0, 70),
    plain=st.sampled_from([None, 0, 255]),
)
def test_checksum_follows_its_formula(data: bytes, isa: str, shift: int, plain: int | None) -> None:
    _core.force_seal_isa(isa)
    if plain is not None:
        data = bytes([plain]) * len(data)
    memory = np.frombuffer(bytes(shift) + data, np.uint8)[shift:]
    copy = np.zeros(len(data) + 64, np.uint8)
    zero = np.zeros(1, np.int64)
    assert seal(memory) == twin_seal(data)
    seals = _core.copy_ranges_sealed(copy.ctypes.data, zero + 3, memory.ctypes.data, zero, len(data))
    assert seals.tolist() == [twin_seal(data)]
    assert copy.tobytes() == bytes(3) + data + bytes(61)  # not a byte beside it


RANGES = [(300, 8 << 10), (60, 24 << 10), (5, 262_144), (4, 700_001), (2, 1_500_000), (9000, 130), (33, 1)]


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(("count", "range_bytes"), RANGES)
def test_copies_of_many_ranges(count: int, range_bytes: int, threads: int) -> None:
    """As many threads as you like: the same bytes, the same seals, and nothing else written."""
    rng = np.random.default_rng(count)
    source, target = random_bytes(2 * count * range_bytes, 1), random_bytes(2 * count * range_bytes, 2)
    from_, to = (rng.permutation(2 * count)[:count].astype(np.int64) * range_bytes for _ in range(2))
    want = target.copy().reshape(2 * count, range_bytes)
    want[to // range_bytes] = source.reshape(2 * count, range_bytes)[from_ // range_bytes]
    whole = _core.seal_ranges(source.ctypes.data, from_, range_bytes, 1)
    seals = _core.copy_ranges_sealed(target.ctypes.data, to, source.ctypes.data, from_, range_bytes, threads)
    assert (seals.dtype, seals.shape) == (np.uint64, (count,))
    assert np.array_equal(target.reshape(want.shape), want)
    assert np.array_equal(seals, whole)
    assert np.array_equal(_core.seal_ranges(target.ctypes.data, to, range_bytes, threads), whole)
    assert range_bytes < 8 or len(set(whole.tolist())) == count


@pytest.mark.parametrize("isa", _core.seal_isas())
@pytest.mark.parametrize("kind", ["random", "zeros", "ones", "few values"])
def test_every_kind_of_damage_is_found(kind: str, isa: str) -> None:
    """Flipped bits, exchanged words and stripes, cuts and shifts, also in data that is nearly all the same."""
    _core.force_seal_isa(isa)
    size, rng = 24_000, np.random.default_rng(7)
    data = {
        "random": random_bytes(size, 3),
        "zeros": np.zeros(size, np.uint8),
        "ones": np.full(size, 255, np.uint8),
        "few values": (random_bytes(size, 4) % 3 == 0).astype(np.uint8),
    }[kind]
    good = seal(data)
    for bit in rng.permutation(8 * size)[:4000]:
        data[bit // 8] ^= 1 << bit % 8
        assert seal(data) != good, f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8
    for width in (8, 16, 64, 4096 // 8):
        rows = data[: size // width * width].reshape(-1, width)
        pairs = rng.integers(0, len(rows), (1500, 2))
        for a, b in [*pairs.tolist(), *([i, i + 1] for i in range(min(len(rows) - 1, 300)))]:
            if (rows[a] != rows[b]).any():
                rows[[a, b]] = rows[[b, a]]
                assert seal(data) != good, f"words {a} and {b} of {width} bytes"
                rows[[a, b]] = rows[[b, a]]
    assert seal(data) == good
    lengths = [seal(data[:end]) for end in range(size - 200, size + 1)]
    assert len(set(lengths)) == len(lengths)
    if kind in ("random", "few values"):
        shifted = [seal(np.roll(data, by)) for by in (1, 2, 8, 64, 128, 4096, 8192, -8, -64)]
        assert len({good, *shifted}) == len(shifted) + 1


def test_single_words_in_empty_data_are_told_apart() -> None:
    """A lonely word has its own seal wherever it lies: sums of products that forget places would mix them up."""
    data, seals = np.zeros(4096, np.uint64), set()
    for at in range(len(data)):
        for value in (1, 1 << 32, 1 << 63):
            data[at] = value
            seals.add(seal(data.view(np.uint8)))
        data[at] = 0
    assert len(seals) == 3 * len(data)


def test_seals_spread_over_all_bits() -> None:
    """Each bit of the seal is set in half of many seals, and flips in half of the cases when one bit of data does."""
    data = random_bytes(256, 9)
    seals = []
    for i in range(2000):
        data[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)
        seals.append(seal(data))
    bits = np.unpackbits(np.array(seals, np.uint64).view(np.uint8)).reshape(-1, 64)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 0.06)  # over five standard deviations
    flips = np.unpackbits((np.array(seals[1:], np.uint64) ^ np.array(seals[:-1], np.uint64)).view(np.uint8))
    assert np.all(np.abs(flips.reshape(-1, 64).mean(axis=0) - 0.5) < 0.06)


def test_copy_has_the_checksum_of_the_written_bytes() -> None:
    """While the owner writes, the seal is of the bytes that arrived, whichever those are."""
    count, range_bytes = 40, 64 << 10
    source, target = random_bytes(count * range_bytes, 1), np.zeros(count * range_bytes, np.uint8)
    offsets, stop = np.arange(count, dtype=np.int64) * range_bytes, threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            source[:] += 1

    owner = threading.Thread(target=scribble)
    owner.start()
    try:
        for _ in range(40):
            seals = _core.copy_ranges_sealed(target.ctypes.data, offsets, source.ctypes.data, offsets, range_bytes, 2)
            assert np.array_equal(seals, _core.seal_ranges(target.ctypes.data, offsets, range_bytes))
    finally:
        stop.set()
        owner.join()


def test_bad_arguments_are_refused_before_a_byte_moves() -> None:
    source, target = random_bytes(256, 1), random_bytes(256, 2)
    before, at, to = target.copy(), source.ctypes.data, target.ctypes.data
    two, three, negative = (np.array(x, np.int64) for x in ([0, 64], [0, 64, 128], [0, -1]))
    for call in (
        lambda: _core.copy_ranges_sealed(to, two, at, three, 64),
        lambda: _core.copy_ranges_sealed(to, two, at, negative, 64),
        lambda: _core.copy_ranges_sealed(to, negative, at, two, 64),
        lambda: _core.copy_ranges_sealed(to, two, at, two, 0),
        lambda: _core.seal_ranges(at, negative, 64),
        lambda: _core.seal_ranges(at, two, -64),
        lambda: _core.force_seal_isa("abacus"),
    ):
        with pytest.raises(ValueError, match=r"differ|negative|positive|seal_isas"):
            call()
    assert np.array_equal(target, before)
    assert _core.seal_ranges(at, np.zeros(0, np.int64), 64).shape == (0,)
