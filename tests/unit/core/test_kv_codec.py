"""KV in fewer bytes: every bit comes back, by every instruction set, and no damage leads out of bounds."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_floats import CHUNK, HEAD, KINDS, NO_OFFSET, Bytes, decode, encode, floats, seal_of, twin_decode, twin_encode
from memserve import _core

ISAS = _core.kv_codec_isas()
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def best_isa() -> Iterator[None]:
    yield
    _core.force_kv_codec_isa(None)


def all_patterns(kind: str) -> Bytes:
    """All 65,536 halves of a float, NaNs, infinities and denormals included, among ordinary ones."""
    rng = np.random.default_rng(3)
    patterns = rng.permutation(np.arange(65536, dtype="<u2"))
    if kind == "float32":
        words = patterns.astype("<u4") << 16 | rng.integers(0, 65536, 65536, np.uint32)
        return np.concatenate([floats(kind, 1 << 21, 1), words.view(np.uint8)])
    return np.concatenate([floats(kind, 1 << 20, 1), patterns.view(np.uint8)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_float_comes_back_bit_for_bit(isa: str, kind: str) -> None:
    _core.force_kv_codec_isa(isa)
    data = all_patterns(kind)
    encoded = encode(data, kind)
    assert 0 < encoded.nbytes < data.nbytes
    decoded = decode(encoded, data.nbytes)
    assert decoded is not None and (decoded[0] == data).all() and decoded[1] == seal_of(data)


@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_write_the_same_bytes(kind: str) -> None:
    small = [floats(kind, nbytes, nbytes) for nbytes in (2000, 4096, 4098, 8191, 30_001)]
    for data in [all_patterns(kind), *small]:
        by_isa = []
        for isa in ISAS:
            _core.force_kv_codec_isa(isa)
            by_isa.append(bytes(encode(data, kind)))
        assert by_isa[0] and by_isa.count(by_isa[0]) == len(ISAS)
        assert data.nbytes > 1 << 16 or twin_decode(by_isa[0]) == data.tobytes(), "the twin reads them"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_all_lengths_are_decoded_as_the_twin_encoded(isa: str, kind: str) -> None:
    _core.force_kv_codec_isa(isa)
    rng = random.Random(5)
    data = floats(kind, 9000, 2)
    for nbytes in [*range(1, 150), *range(250, 270), 4095, 4096, 4097, 4223, 8192, 8193, 8999]:
        value = data[rng.randrange(9000 - nbytes) :][:nbytes]  # at any address
        exponents = rng.sample(range(32 if kind == "float16" else 256), 21)
        sizes = [rng.choice((1, 3, 7)) for _ in range(3)]
        tables = [[exponents.pop() for _ in range(size)] for size in sizes]
        for known in (tables, None):
            encoded = np.frombuffer(twin_encode(value.tobytes(), kind, known), np.uint8)
            decoded = decode(encoded, nbytes)
            assert decoded is not None and (decoded[0] == value).all() and decoded[1] == seal_of(value)


@pytest.mark.parametrize("isa", ISAS)
def test_values_are_encoded_and_decoded_at_any_address(isa: str) -> None:
    _core.force_kv_codec_isa(isa)
    data = floats("bfloat16", 40_000, 4)
    for shift in (0, 1, 3, 7, 63):
        for nbytes in (1500, 4096, 20_000, 33_333):
            value = data[shift : shift + nbytes]
            out = np.empty(_core.kv_encoded_bytes_max(nbytes) + 1, np.uint8)[1:]
            written = _core.kv_encode_ranges(
                data.ctypes.data, np.array([shift], np.int64), nbytes, "bfloat16", out.ctypes.data, out.nbytes
            )
            target = np.zeros(nbytes + shift + 1, np.uint8)
            where = np.array([shift], np.int64)
            seals = _core.kv_decode_ranges(out.ctypes.data, written, target.ctypes.data, where, nbytes)
            # An odd shift cuts floats in two: what is one then has no uneven exponents.
            if written:
                assert seals is not None and (target[shift:-1] == value).all() and target[-1] == 0
            else:
                assert shift % 2


def test_many_ranges_are_encoded_one_behind_the_other() -> None:
    data = floats("bfloat16", 8 * 6144, 6).reshape(8, 6144)
    sources, targets = np.array([5, 0, 7], np.int64) * 6144, np.array([1, 3, 2], np.int64) * 6144
    out = np.empty(_core.kv_encoded_bytes_max(6144, 3), np.uint8)
    written = _core.kv_encode_ranges(data.ctypes.data, sources, 6144, None, out.ctypes.data, out.nbytes)
    landed = np.zeros_like(data)
    seals = _core.kv_decode_ranges(out.ctypes.data, written, landed.ctypes.data, targets, 6144)
    assert seals is not None and seals.tolist() == [seal_of(data[n]) for n in (5, 0, 7)]
    assert (landed[[1, 3, 2]] == data[[5, 0, 7]]).all() and not landed[[0, 4, 5, 6, 7]].any()


def test_floats_are_known_by_a_sample_and_others_left_alone() -> None:
    for kind in KINDS:
        data = floats(kind, 1 << 16, 8)
        assert _core.detect_floats(data.ctypes.data, data.nbytes) == kind
        assert bytes(encode(data, None)) == bytes(encode(data, kind))
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    assert _core.detect_floats(noise.ctypes.data, noise.nbytes) is None
    assert encode(noise, None).nbytes == encode(noise, "bfloat16").nbytes == 0
    mixed = np.concatenate([floats("bfloat16", 1 << 20), noise[: 1 << 16]])
    decoded = decode(encode(mixed, None), mixed.nbytes)
    assert decoded is not None and (decoded[0] == mixed).all(), "chunks that grow are left as they are"


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=1, max_size=3000), repeats=st.integers(1, 40), kind=st.sampled_from([*KINDS, None]))
def test_any_bytes_come_back_or_stay_as_they_are(data: bytes, repeats: int, kind: str | None) -> None:
    value = np.frombuffer(data * repeats, np.uint8)
    encoded = encode(value, kind)
    if encoded.nbytes:
        assert encoded.nbytes <= value.nbytes - value.nbytes // 32
        decoded = decode(encoded, value.nbytes)
        assert decoded is not None and (decoded[0] == value).all()


class Guarded:
    """Memory that ends where a page begins that may not be touched."""

    def __init__(self, nbytes: int) -> None:
        pages = -(-nbytes // PAGE)
        self._map = mmap.mmap(-1, (pages + 1) * PAGE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(begin + pages * PAGE), PAGE, 0) == 0
        self.address = begin + pages * PAGE - nbytes
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.address))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_is_read_or_written_out_of_bounds(isa: str, kind: str) -> None:
    _core.force_kv_codec_isa(isa)
    for nbytes in (1024, 4096, 4098, 5001, 12_300):
        source = Guarded(nbytes)
        source.bytes[:] = floats(kind, nbytes, nbytes)
        out = np.empty(_core.kv_encoded_bytes_max(nbytes), np.uint8)
        written = _core.kv_encode_ranges(source.address, NO_OFFSET, nbytes, kind, out.ctypes.data, out.nbytes)
        assert written
        encoded, target = Guarded(written), Guarded(nbytes)
        encoded.bytes[:] = out[:written]
        seals = _core.kv_decode_ranges(encoded.address, written, target.address, NO_OFFSET, nbytes)
        assert seals is not None and (target.bytes == source.bytes).all()


@pytest.mark.parametrize("isa", ISAS)
def test_damaged_bytes_end_in_an_error_or_another_checksum(isa: str) -> None:
    _core.force_kv_codec_isa(isa)
    rng, refused, differing = random.Random(11), 0, 0
    for round_number in range(400):
        kind, nbytes = rng.choice([*KINDS]), rng.choice((1500, 2 * CHUNK, 9001, 20_000))
        value = floats(kind, nbytes, round_number)
        whole = encode(value, kind)
        assert whole.nbytes
        cut = rng.randrange(whole.nbytes + 1) if rng.random() < 0.3 else whole.nbytes
        encoded, target = Guarded(max(cut, 1)), Guarded(nbytes)
        encoded.bytes[:cut] = whole[:cut]
        for _ in range(rng.choice((0, 1, 1, 2, 30))):
            near = HEAD.size + rng.randrange(40) if rng.random() < 0.5 else rng.randrange(whole.nbytes)
            if near < cut:
                encoded.bytes[near] = rng.randrange(256)
        if rng.random() < 0.1:  # a head that asks for more than there is
            forged = HEAD.pack(*HEAD.unpack_from(whole.tobytes())[:5], rng.choice((0, 23, nbytes, 1 << 40)))
            encoded.bytes[: min(cut, HEAD.size)] = np.frombuffer(forged[:cut], np.uint8)
        seals = _core.kv_decode_ranges(encoded.address, cut, target.address, NO_OFFSET, nbytes)
        if seals is None:
            refused += 1
            continue
        assert int(seals[0]) == seal_of(target.bytes), "the checksum is of what was written"
        if (target.bytes != value).any():
            differing += 1
            assert int(seals[0]) != seal_of(value)
    assert refused > 50 and differing > 50


def test_wrong_arguments_are_refused() -> None:
    data = floats("bfloat16", 4096)
    out = np.empty(_core.kv_encoded_bytes_max(4096), np.uint8)
    for kind, nbytes, room in (("int8", 4096, out.nbytes), ("bfloat16", 0, out.nbytes), ("bfloat16", 4096, 4096)):
        with pytest.raises(ValueError):
            _core.kv_encode_ranges(data.ctypes.data, NO_OFFSET, nbytes, kind, out.ctypes.data, room)
    with pytest.raises(ValueError):
        _core.kv_encode_ranges(data.ctypes.data, NO_OFFSET - 1, 4096, None, out.ctypes.data, out.nbytes)
    with pytest.raises(ValueError):
        _core.force_kv_codec_isa("abacus")
    assert decode(np.zeros(0, np.uint8), 10) is None and decode(encode(data, None), 4098) is None
