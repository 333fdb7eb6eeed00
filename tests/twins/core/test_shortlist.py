"""``shortlist`` and ``most_of`` beside the same thing in a few lines of Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve import _core

SMALL = st.integers(0, 5)  # many equals


@st.composite
def fleets(draw):
    """A crowd of one or two roles, loads and matches."""
    columns = draw(st.integers(1, 12))
    values = np.array(draw(st.lists(SMALL, min_size=12 * columns, max_size=12 * columns))).reshape(12, columns)
    loads, room, matches = values[:9].reshape(3, 3, columns), values[9], values[10:]
    everybody = st.sets(st.integers(0, columns - 1), min_size=1)
    first = sorted(draw(everybody))
    second = sorted(draw(everybody) - set(first))
    crowd = [np.array(numbers) for numbers in (first, second) if numbers]
    return crowd, loads, room, matches


def work_of(loads, number):
    """The larger of what was sent, and what was reported with what was sent since."""
    own, reported, since = loads[:, :, number]
    return np.maximum(own, reported + since).tolist()


def twin(crowd, loads, matched, favourites, respects, overload, all_of):
    """Numbers only."""
    busy = {k: work_of(loads, k)[0] + work_of(loads, k)[2] for numbers in crowd for k in numbers.tolist()}
    if all(len(numbers) <= all_of for numbers in crowd):
        return list(busy)
    limit = overload[0] * min(busy.values()) + overload[1]
    chosen = {}
    for numbers in crowd:
        those = numbers.tolist()
        idlest = min(those, key=busy.get)
        longest = min(those, key=lambda k: (-matched[k], busy[k]))
        fair = min((k for k in those if busy[k] <= limit), key=lambda k: (-matched[k], busy[k]), default=idlest)
        best = idlest, longest, fair
        chosen.update(dict.fromkeys(best[respect] for respect in respects))
        chosen.update(dict.fromkeys(known for known in favourites if known in those))
    return list(chosen)


@given(
    fleets(),
    st.lists(st.integers(-1, 14), max_size=3),
    st.lists(st.integers(0, 2), max_size=3),
    st.tuples(st.integers(0, 2), st.integers(-1, 5)),
    st.integers(0, 4),
)
def test_the_best_in_each_respect(fleet, favourites, respects, overload, all_of):
    crowd, loads, room, matches = fleet
    rows = _core.shortlist(crowd, loads, room, matches, favourites, respects, overload, all_of)
    numbers = twin(crowd, loads, matches[0], favourites, respects, overload, all_of)
    waiting = {k: work_of(loads, k)[2] - loads[1, 2, k] for k in numbers}
    assert rows == [(k, *work_of(loads, k), room[k], waiting[k], *matches[:, k]) for k in numbers]


@given(st.lists(st.tuples(SMALL, SMALL, st.integers(-1, 2)), min_size=1, max_size=12), st.integers(-2, 2), SMALL)
def test_the_holders_of_most(columns, without, count):
    blocks, dram, codes = (np.array(column) for column in zip(*columns, strict=True))
    having = [k for k in range(len(columns)) if blocks[k] and codes[k] != without]
    having.sort(key=lambda k: (-blocks[k], codes[k] == 1, dram[k] > 0, k))  # code 1: stores
    most = _core.most_of(np.stack([blocks, dram]), codes.astype(np.int8), without, 1, count)
    assert most == [(k, blocks[k], dram[k]) for k in having[:count]]


def ask(numbers, loads, matches, respects=(0, 1, 2)):
    """With limits of no interest."""
    crowd, room = [np.array(numbers, np.int64)], np.zeros(3, np.int64)
    return _core.shortlist(crowd, loads, room, matches, (), respects, (2, 0), 0)


@pytest.mark.parametrize("numbers", [[], [3], [-1]])
def test_numbers_without_a_column_are_refused(numbers):
    with pytest.raises(ValueError):
        ask(numbers, np.zeros((3, 3, 3), np.int64), np.zeros((2, 3), np.int64))


def test_shapes_are_checked():
    with pytest.raises(ValueError):
        ask([0], np.zeros((3, 3, 3), np.int64), np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError):
        ask([0], np.zeros((3, 3, 3), np.int64), np.zeros((2, 3), np.int64), respects=(3,))
    with pytest.raises(TypeError):
        ask([0], np.zeros((2, 3, 3), np.int64), np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError):
        _core.most_of(np.zeros((2, 3), np.int64), np.zeros(2, np.int8), 0, 1, 1)
