"""Which stores keep a value: balance, and how little moves when stores come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memserve.base.errors import InvariantError
from memserve.kv.store_shares import StoreShares

COUNT = 20_000
KEYS = random.Random(5).randbytes(16 * COUNT)
NAMES = ("a", "b", "c", "d")


def owners(names: tuple[str, ...], copies: int = 1) -> np.ndarray:
    """``[keys, copies]`` names."""
    shares = StoreShares(names, copies)
    return np.array(shares.names)[shares.owners_of(KEYS)]


def key_at(index: int) -> bytes:
    return KEYS[16 * index : 16 * index + 16]


def test_each_store_gets_its_share() -> None:
    _, counts = np.unique(owners(NAMES), return_counts=True)
    assert len(counts) == 4 and all(abs(count / COUNT - 0.25) < 0.01 for count in counts)


def test_order_of_names_does_not_matter() -> None:
    assert (owners(NAMES) == owners(("c", "a", "d", "b"))).all()
    assert StoreShares(NAMES) == StoreShares(reversed(NAMES)) != StoreShares(NAMES, 2)


def test_joining_store_takes_its_share_from_all() -> None:
    before, after = owners(NAMES)[:, 0], owners((*NAMES, "e"))[:, 0]
    moved = before != after
    assert set(after[moved]) == {"e"} and set(before[moved]) == set(NAMES)
    assert abs(moved.mean() - 0.2) < 0.01


def test_share_of_a_dead_store_falls_to_the_next_in_line() -> None:
    """With two copies the next one has a copy already."""
    ranked = owners(NAMES, 2)
    left = owners(("a", "c", "d"))[:, 0]
    assert (np.where(ranked[:, 0] == "b", ranked[:, 1], ranked[:, 0]) == left).all()


def test_copies_lie_in_different_stores() -> None:
    ranked = owners(NAMES, 3)
    assert ranked.shape == (COUNT, 3)
    assert all(len(set(row)) == 3 for row in ranked[:500])
    assert owners(("a", "b"), 3).shape == (COUNT, 2)


def test_one_key_has_the_owners_of_many() -> None:
    ranked, shares = owners(NAMES, 2), StoreShares(NAMES, 2)
    for index in range(50):
        assert shares.owner_names(key_at(index)) == tuple(ranked[index])


def test_places_are_the_same_for_ever() -> None:
    """What lies in stores is found by a later version: these are the owners of keys 0, 1, 2, ..."""
    keys = b"".join(number.to_bytes(16, "little") for number in range(12))
    assert "".join(StoreShares(NAMES).names[at] for at in StoreShares(NAMES).owners_of(keys)[:, 0]) == EXPECTED


def test_no_copies_are_refused() -> None:
    with pytest.raises(InvariantError):
        StoreShares(NAMES, 0)


EXPECTED = "cabdbbadaccd"
