"""A value of an engine's in a store: pieces of memory, and a tail that says what they are and how they must add up."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.store_messages import NAME_BYTES_MAX
from memserve.units import ceil_div

_TAIL = struct.Struct("<4sI16s")
"""A mark, the number of pieces, a digest of name and layout; the pieces' checksums follow, 8 bytes each."""
_MARK = b"MSE1"
_ALIGNMENT = 4096
"""Of values in memory of the store's and of its clients'."""

Piece = tuple[int, int]
"""Address and bytes of memory of the engine's, which stays where it is until the call has returned."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the engine's, where it is read from or written to."""

    name: bytes
    pieces: Sequence[Piece]
    layout: bytes = b""
    """What the bytes mean beside what the name says: a value of another layout is a miss."""
    at_most: bool = False
    """The value that is read may be shorter than the one piece that it is read into."""

    @property
    def payload_bytes(self) -> int:
        """Of all pieces together."""
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def stored_bytes(self) -> int:
        """With the tail."""
        return self.payload_bytes + _TAIL.size + 8 * len(self.pieces)

    def fitted(self, stored_bytes: int) -> Value | None:
        """This value, if that is the length of what is stored; None: it is another one."""
        if stored_bytes == self.stored_bytes:
            return self
        if not self.at_most or len(self.pieces) != 1 or not _TAIL.size + 8 < stored_bytes < self.stored_bytes:
            return None
        return replace(self, pieces=[(self.pieces[0][0], stored_bytes - _TAIL.size - 8)])

    def tail(self, seals: NDArray[np.uint64]) -> bytes:
        """What stands behind the pieces, of which these are the checksums."""
        digest = blake2b(len(self.name).to_bytes(4) + self.name + self.layout, digest_size=16).digest()
        return _TAIL.pack(_MARK, len(self.pieces), digest) + seals.astype("<u8").tobytes()


def namespace(engine: str, **facts: object) -> bytes:
    """The begin of all names of values that may meet: ``engine/DIGEST/`` of everything that decides what bytes mean."""
    told = json.dumps(facts, sort_keys=True, default=str).encode()
    return f"{engine}/{blake2b(told, digest_size=12).hexdigest()}/".encode()


def name_in(prefix: bytes, key: bytes) -> bytes:
    """A name in a namespace for a key of any length: the key itself, or a digest of one that is too long."""
    if len(prefix) + 1 + len(key) <= NAME_BYTES_MAX:
        return prefix + b"=" + key
    return prefix + b"#" + blake2b(key, digest_size=32).hexdigest().encode()


def address(data: memoryview) -> int:
    """Where the bytes begin."""
    return np.frombuffer(data, np.uint8).ctypes.data


def places(value: Value, first: int) -> Iterator[tuple[int, Piece]]:
    """Each piece, and where it lies in a value that begins at ``first``."""
    for piece in value.pieces:
        yield first, piece
        first += piece[1]


def copied(moves: Sequence[tuple[int, int, int]], threads: int) -> NDArray[np.uint64]:
    """Copy for each ``(to, from, bytes)``; the checksums of what was written, 0 of nothing."""
    seals = np.zeros(len(moves), np.uint64)
    table = np.array(moves, np.int64).reshape(-1, 3)
    for nbytes in np.unique(table[:, 2]):
        if nbytes:
            at = np.flatnonzero(table[:, 2] == nbytes)
            to, source = np.ascontiguousarray(table[at, 0]), np.ascontiguousarray(table[at, 1])
            seals[at] = _core.copy_ranges_sealed(0, to, 0, source, int(nbytes), threads)
    return seals


def portions(
    numbers: Iterable[int], values: Sequence[Value], bytes_max: int, count_max: int = 1024
) -> Iterator[list[int]]:
    """Of ``numbers``, as many together as have room in ``bytes_max``; at least one."""
    some, nbytes = list[int](), 0
    for at in numbers:
        room = ceil_div(values[at].stored_bytes, _ALIGNMENT) * _ALIGNMENT
        if some and (nbytes + room > bytes_max or len(some) >= count_max):
            yield some
            some, nbytes = [], 0
        some.append(at)
        nbytes += room
    if some:
        yield some
