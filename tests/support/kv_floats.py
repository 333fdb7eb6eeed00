"""Bytes that are floats as KV has them, for tests of what writes them in fewer bytes; and the codec's picture in plain
Python (``src/core/codec/kv_codec.h``), a float at a time."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memserve import _core

Bytes = NDArray[np.uint8]
NO_OFFSET = np.zeros(1, np.int64)
HEAD = struct.Struct("<IBBHQQ")
MAGIC, VERSION = 0x434B564D, 1
KINDS = {"bfloat16": 1, "float16": 2, "float32": 3}
CHUNK, GROUP, TIERS = 2048, 64, 3


def floats(kind: str, nbytes: int, seed: int = 0) -> Bytes:
    """Random floats whose sizes are as uneven as those of keys and values."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(nbytes // 2 + 2).astype(np.float32) * np.exp2(rng.integers(-3, 3)).astype(np.float32)
    if kind == "bfloat16":
        data = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    else:
        data = values.astype({"float16": "<f2", "float32": "<f4"}[kind]).view(np.uint8)
    return data[:nbytes].copy()


def encode(data: Bytes, kind: str | None) -> Bytes:
    """By the core; empty: it does not become shorter."""
    out = np.full(_core.kv_encoded_bytes_max(data.nbytes) + GROUP, 0xA5, np.uint8)
    nbytes = _core.kv_encode_ranges(data.ctypes.data, NO_OFFSET, data.nbytes, kind, out.ctypes.data, out.nbytes - GROUP)
    assert (out[-GROUP:] == 0xA5).all(), "written behind the memory for the encoding"
    return out[:nbytes].copy()


def decode(encoded: Bytes, nbytes: int) -> tuple[Bytes, int] | None:
    """By the core: the value and its checksum. None: damaged."""
    out = np.full(nbytes + GROUP, 0x5A, np.uint8)
    seals = _core.kv_decode_ranges(encoded.ctypes.data, encoded.nbytes, out.ctypes.data, NO_OFFSET, nbytes)
    assert (out[nbytes:] == 0x5A).all(), "written behind the value"
    return None if seals is None else (out[:nbytes], int(seals[0]))


def seal_of(data: Bytes) -> int:
    return int(_core.seal_ranges(data.ctypes.data, NO_OFFSET, data.nbytes)[0])


# -- the picture


def _bits_of(value: int, kind: str) -> tuple[int, int]:
    """Exponent, and what is left."""
    if kind == "bfloat16":
        return value >> 7 & 0xFF, (value >> 8 & 0x80) | value & 0x7F
    if kind == "float16":
        return value >> 10 & 0x1F, value & 0x3FF | value >> 15 << 10
    upper = value >> 16
    return upper >> 7 & 0xFF, ((upper >> 8 & 0x80) | upper & 0x7F) | (value & 0xFFFF) << 8


def _float_of(exponent: int, rest: int, kind: str) -> int:
    if kind == "bfloat16":
        return (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    if kind == "float16":
        return rest >> 10 << 15 | exponent << 10 | rest & 0x3FF
    upper = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    return upper << 16 | rest >> 8


def _planes(codes: Sequence[int], width: int) -> bytes:
    packed = b""
    for at in range(0, len(codes), GROUP):
        group = codes[at : at + GROUP]
        for plane in range(width):
            packed += sum((code >> plane & 1) << i for i, code in enumerate(group)).to_bytes(8, "little")
    return packed


def _codes(packed: bytes, count: int, width: int) -> Iterator[int]:
    for i in range(count):
        base = i // GROUP * width * 8
        words = (int.from_bytes(packed[base + 8 * plane : base + 8 * plane + 8], "little") for plane in range(width))
        yield sum((word >> i % GROUP & 1) << plane for plane, word in enumerate(words))


def _plane_bytes(count: int, width: int) -> int:
    return -(-count // GROUP) * 8 * width


def _rests(rests: Sequence[int], kind: str) -> bytes:
    low = bytes(rest & 0xFF for rest in rests)
    if kind == "float16":
        return low + _planes([rest >> 8 for rest in rests], 3)
    if kind == "float32":
        return low + b"".join((rest >> 8).to_bytes(2, "little") for rest in rests)
    return low


def twin_chunk(values: Sequence[int], kind: str, tables: Sequence[Sequence[int]]) -> bytes:
    """A chunk with the tables of its three tiers, 1, 3 or 7 different exponents each."""
    widths = [len(table).bit_length() for table in tables]
    exponents, rests = zip(*(_bits_of(value, kind) for value in values), strict=True)
    escaped, counts, tiers = list(exponents), [], b""
    for table, width in zip(tables, widths, strict=True):
        codes = [table.index(exponent) if exponent in table else len(table) for exponent in escaped]
        tiers += _planes(codes, width)
        escaped = [exponent for exponent in escaped if exponent not in table]
        counts.append(len(escaped))
    packed = widths[0] | widths[1] << 2 | widths[2] << 4
    head = struct.pack("<B3H", packed, *counts) + b"".join(bytes(table) for table in tables)
    return head + _rests(rests, kind) + tiers + bytes(escaped)


def twin_encode(data: bytes, kind: str, tables: Sequence[Sequence[int]] | None) -> bytes:
    """All chunks with the same tables; None: as they are."""
    size = 4 if kind == "float32" else 2
    count = len(data) // size
    values = [int.from_bytes(data[size * i : size * i + size], "little") for i in range(count)]
    body = b""
    for at in range(0, count, CHUNK):
        chunk = values[at : at + CHUNK]
        raw = data[size * at : size * (at + len(chunk))]
        body += twin_chunk(chunk, kind, tables) if tables is not None else b"\0" + raw
    body += data[size * count :]
    return HEAD.pack(MAGIC, VERSION, KINDS[kind], 0, len(data), HEAD.size + len(body)) + body


def twin_decode(encoded: bytes) -> bytes:
    """Of an encoding without damage."""
    magic, version, number, _, nbytes, encoded_bytes = HEAD.unpack_from(encoded)
    assert (magic, version, encoded_bytes) == (MAGIC, VERSION, len(encoded))
    kind = {number: kind for kind, number in KINDS.items()}[number]
    size, at, out = 4 if kind == "float32" else 2, HEAD.size, b""

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        assert at <= len(encoded)
        return encoded[at - count : at]

    left = nbytes // size
    while left:
        count = min(left, CHUNK)
        left -= count
        packed = take(1)[0]
        if packed == 0:
            out += take(size * count)
            continue
        widths = [packed >> 2 * tier & 3 for tier in range(TIERS)]
        counts = struct.unpack("<3H", take(6))
        tables = [take((1 << width) - 1) for width in widths]
        rests = list(take(count))
        if kind == "float16":
            rests = [
                rest | code << 8
                for rest, code in zip(rests, _codes(take(_plane_bytes(count, 3)), count, 3), strict=True)
            ]
        if kind == "float32":
            lower = struct.unpack(f"<{count}H", take(2 * count))
            rests = [rest | half << 8 for rest, half in zip(rests, lower, strict=True)]
        entering = [count, *counts[:2]]
        codes = [
            list(_codes(take(_plane_bytes(n, width)), n, width)) for n, width in zip(entering, widths, strict=True)
        ]
        escaped = list(take(counts[2]))
        for tier in reversed(range(TIERS)):
            later = iter(escaped)
            table = tables[tier]
            escaped = [table[code] if code < len(table) else next(later) for code in codes[tier]]
            assert next(later, None) is None
        for exponent, rest in zip(escaped, rests, strict=True):
            out += _float_of(exponent, rest, kind).to_bytes(size, "little")
    out += take(nbytes % size)
    assert at == len(encoded)
    return out
