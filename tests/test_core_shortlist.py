"""``least_busy`` and ``shortlist`` beside the same thing in a few lines of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve import _core

SMALL = st.integers(0, 5)  # many equals


@st.composite
def crowds(draw):
    """Numbers, work, matched."""
    columns = draw(st.integers(1, 12))
    rows = draw(st.lists(st.lists(SMALL, min_size=columns, max_size=columns), min_size=4, max_size=4))
    numbers = sorted(draw(st.sets(st.integers(0, columns - 1), min_size=1)))
    return np.array(numbers), np.array(rows[:3]), np.array(rows[3])


@given(crowds(), st.tuples(*[st.integers(-3, 3)] * 4), st.integers(-1, 10))
def test_the_best_in_each_respect(crowd, prices, limit):
    numbers, work, matched = crowd
    busy = {k: int(work[0][k] + work[2][k]) for k in numbers.tolist()}
    price = {k: float(np.dot(prices, [*work[:, k], matched[k]])) for k in busy}
    idlest, cheapest = min(busy, key=busy.get), min(price, key=price.get)
    longest = min(busy, key=lambda k: (-matched[k], busy[k]))
    fair = min((k for k in busy if busy[k] <= limit), key=lambda k: (-matched[k], busy[k]), default=idlest)
    assert _core.shortlist(numbers, work, matched, prices, limit) == (idlest, cheapest, longest, fair)
    least = min(busy, key=busy.get)
    assert _core.least_busy(numbers, work) == (least, busy[least])


@pytest.mark.parametrize("numbers", [[], [3], [-1]])
def test_numbers_without_a_column_are_refused(numbers):
    work, matched = np.zeros((3, 3), np.int64), np.zeros(3, np.int64)
    numbers = np.array(numbers, np.int64)
    with pytest.raises(ValueError):
        _core.least_busy(numbers, work)
    with pytest.raises(ValueError):
        _core.shortlist(numbers, work, matched, (0, 0, 0, 0), 0)


def test_shapes_are_checked():
    work, matched = np.zeros((3, 3), np.int64), np.zeros(2, np.int64)
    with pytest.raises(ValueError):
        _core.shortlist(np.array([0]), work, matched, (0, 0, 0, 0), 0)
    with pytest.raises(TypeError):
        _core.least_busy(np.array([0]), np.zeros((2, 3), np.int64))
