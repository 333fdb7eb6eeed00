"""Which of several stores keep a value: the one rule of instances, stores, clients and the simulator.

Rendezvous hashing: each store has a score for each key, and the ``copies`` stores with the highest scores keep the
value. Each process that knows the names of the stores that live finds the same owners; nothing else is remembered.

::

    key k:   A 0.91   C 0.77   B 0.40   D 0.12     copies 1: A;  copies 2: A and C
    A dies:           C 0.77   B 0.40   D 0.12     what A kept falls to the next in its line; no other value moves
    E joins: A 0.91   E 0.80   C 0.77   ...        E takes its own share, a fifth of the values; no other moves
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import check

KEY_BYTES = 16
NO_SPARE = 255
"""Where a byte names the store with a second copy of a block: there is none."""
_SEED = b"memserve shares "
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64, whose last steps mix a key with a store's name."""

Indices = NDArray[np.intp]


class StoreShares:
    """The stores that live, and in how many of them each value lies. Immutable; equal for equal names and copies."""

    __slots__ = ("_name_words", "copies", "names")

    def __init__(self, names: Iterable[str], copies: int = 1) -> None:
        """``copies``: how many stores are to keep each value, if there are so many."""
        check(copies >= 1, f"{copies} copies of a value")
        self.names = tuple(sorted(names))
        self.copies = copies
        digests = b"".join(_core.siphash128(_SEED, name.encode("utf-8", "surrogatepass")) for name in self.names)
        self._name_words = _words(digests)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreShares) and (self.names, self.copies) == (other.names, other.copies)

    def __hash__(self) -> int:
        return hash((self.names, self.copies))

    def __repr__(self) -> str:
        return f"<StoreShares {self.copies} in {', '.join(self.names) or 'no store'}>"

    def rank_stores(self, keys: bytes) -> Indices:
        """``[keys, stores]``: for each key of 16 bytes all stores, as indices of ``names``, the first owner first."""
        words = _words(keys)
        scores = words[:, None, 0] ^ self._name_words[None, :, 0]
        scores = _mix(_mix(scores) + (words[:, None, 1] ^ self._name_words[None, :, 1]))
        # two equal scores of 64 bits: the first name goes first
        return np.argsort(~scores, axis=1, kind="stable")

    def owners_of(self, keys: bytes) -> Indices:
        """``[keys, copies]``: the stores that keep each value, as indices of ``names``; of fewer stores all."""
        return self.rank_stores(keys)[:, : self.copies]

    def owner_names(self, key: bytes) -> tuple[str, ...]:
        """The stores that keep one value, the first owner first."""
        return tuple(self.names[index] for index in self.owners_of(key)[0].tolist())


def split_keys(keys: bytes) -> list[bytes]:
    """The keys of 16 bytes that stand one behind the other."""
    return [keys[offset : offset + KEY_BYTES] for offset in range(0, len(keys), KEY_BYTES)]


def _words(keys: bytes) -> NDArray[np.uint64]:
    """``[n, 2]`` numbers of 64 bits from ``n`` keys of 16 bytes."""
    return np.frombuffer(keys, "<u8").reshape(-1, 2)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of the result depends on each bit of the word; the arithmetic is that of 64 bits, which wraps."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return words ^ (words >> np.uint64(31))
