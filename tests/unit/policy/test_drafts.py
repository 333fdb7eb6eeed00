"""Drafts: what followed the same tokens, how long they are, whether they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.policy.drafts import FIRST, LEAST, MOST, PAUSE, PAUSE_MAX, REST, TRIALS, Pace, Worth, following


def simple(tokens: list[int], count: int) -> list[int]:
    """Every place looked at, from the latest on."""

    def alike(place: int) -> int:
        return next((back for back in range(MOST) if place < back or tokens[place - back] != tokens[-1 - back]), MOST)

    places = range(len(tokens) - 2, -1, -1)
    best = max(map(alike, places), default=0)
    if best < LEAST:
        return []
    place = next(place for place in places if alike(place) == best)
    said = list(tokens)
    for at in range(count):
        said.append(said[place + 1 + at])
    return said[len(tokens) :]


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 12))
def test_what_followed_is_what_a_search_of_all_places_finds(tokens: list[int], count: int) -> None:
    assert following(np.array(tokens, np.int32), count) == simple(tokens, count)


def test_three_tokens_must_be_alike() -> None:
    assert following(np.array([1, 2, 3, 9, 8, 0, 2, 3], np.int32), 2) == []
    assert following(np.array([1, 2, 3, 9, 8, 1, 2, 3], np.int32), 2) == [9, 8]
    assert following(np.array([4, 4, 4, 4], np.int32), 5) == [4] * 5


def test_drafts_grow_while_they_are_kept_and_pause_longer_each_time_that_they_are_not() -> None:
    pace, drawn = Pace(), 10
    pace.told(FIRST, FIRST, drawn)
    assert (pace.length, pace.due) == (2 * FIRST, 0)
    pace.told(2 * FIRST, 3, drawn)
    assert pace.length == 4
    pauses = []
    for _ in range(8):
        pace.told(4, 0, drawn)
        pauses.append(pace.due - drawn)
    assert pauses == [min(PAUSE << at, PAUSE_MAX) for at in range(8)] and pace.length == FIRST
    pace.told(4, 1, drawn)
    pace.told(4, 0, drawn)
    assert pace.due - drawn == PAUSE, "one that was kept makes up for all before it"
    assert (pace.drafted, pace.kept) == (FIRST + 2 * FIRST + 40, FIRST + 4)


@pytest.mark.parametrize(("tokens", "pays"), [(4, True), (1, False)])
def test_drafts_rest_where_steps_without_them_are_quicker(tokens: int, pays: bool) -> None:
    worth = Worth()
    worth.plain(1, 10_000_000)
    for _ in range(TRIALS):
        assert worth.pays(1)
        worth.drafted(1, tokens, 20_000_000)  # twice as long as a plain one
    assert worth.pays(1) is pays
    assert worth.pays(2), "more sequences are another question"
    rest = sum(not worth.pays(1) for _ in range(REST))
    assert rest == (0 if pays else REST - 1)
    assert worth.pays(1), "then it is looked at again"


def test_a_rest_is_longer_each_time() -> None:
    worth, rests = Worth(), []
    worth.plain(3, 30_000_000)
    for _ in range(3):
        for _ in range(TRIALS):
            worth.drafted(3, 3, 60_000_000)
        rests.append(next(step for step in range(10_000) if worth.pays(3)))
    assert rests == [REST, 2 * REST, 4 * REST]


def test_steps_with_drafts_say_nothing_before_there_was_one_without() -> None:
    worth = Worth()
    for _ in range(10):
        worth.drafted(1, 1, 1 << 40)
    assert worth.pays(1)
