"""Drafts: what followed the same tokens, how long they are, whether they pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.instance.speculation.drafts import (
    CACHED,
    EXPECTED,
    LEAST,
    LOOK_AGAIN,
    MARGIN,
    MOST,
    REST,
    TRIALS,
    TRUST,
    WIDE,
    Chances,
    Draft,
    Pace,
    Price,
    Worth,
    gain_ns,
    paying_length,
    repeated_draft,
)


def simple(tokens: list[int], count: int) -> Draft:
    """Every place looked at, from the latest on."""

    def alike(place: int) -> int:
        return next((back for back in range(MOST) if place < back or tokens[place - back] != tokens[-1 - back]), MOST)

    places = range(len(tokens) - 2, -1, -1)
    best = max(map(alike, places), default=0)
    if best < LEAST:
        return Draft()
    place = next(place for place in places if alike(place) == best)
    said = list(tokens)
    for at in range(count):
        said.append(said[place + 1 + at])
    return Draft(said[len(tokens) :], best)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 12))
def test_draft_lookup_equals_exhaustive_search(tokens: list[int], count: int) -> None:
    assert repeated_draft(np.array(tokens, np.int32), count) == simple(tokens, count)


def test_two_tokens_must_be_alike_and_more_are_better() -> None:
    assert repeated_draft(np.array([1, 2, 9, 8, 0, 2], np.int32), 2) == Draft()
    assert repeated_draft(np.array([1, 2, 9, 8, 1, 2], np.int32), 2) == Draft([9, 8], 2)
    assert repeated_draft(np.array([1, 2, 3, 9, 8, 7, 2, 3, 4, 4, 1, 2, 3], np.int32), 2) == Draft([9, 8], 3)
    assert repeated_draft(np.array([4, 4, 4, 4], np.int32), 5) == Draft([4] * 5, 3)


def test_chances_are_what_was_expected_until_they_are_seen() -> None:
    chances = Chances(fade=1.0)
    assert chances.chance_of(3, 0.4) == pytest.approx(0.4)
    chances.learn_outcome(3, drafted=8, accepted=3)  # the fourth was wrong, those behind it say nothing
    assert chances.chance_of(3, 0.4) == pytest.approx((3 + TRUST * 0.4) / (4 + TRUST))
    assert chances.chance_of(4, 0.5) == pytest.approx(0.5), "another source is another question"
    for _ in range(100):
        chances.learn_outcome(3, drafted=4, accepted=0)
    assert chances.chance_of(3, 0.4) < 0.1
    for _ in range(500):
        chances.fade_source(3)
    assert chances.chance_of(3, 0.4) == pytest.approx(0.4, rel=0.01), "what was not tried for long may be right again"


@given(st.floats(0.01, 0.97), st.floats(0.001, 2.0), st.integers(1, 64))
def test_a_draft_is_as_long_as_each_token_pays(chance: float, cost: float, most: int) -> None:
    price = Price(1.0, cost)
    count = paying_length(chance, price, most)
    gains = [gain_ns(chance, price, some) for some in range(most + 1)]
    assert gains[count] >= max(gains) - 1e-9
    assert gains[count] == pytest.approx(sum(chance**at - cost for at in range(1, count + 1)))


def test_drafts_that_cost_nothing_are_as_long_as_they_may_be() -> None:
    assert paying_length(0.1, Price(1.0, 0.0), 8) == 8


def test_sequence_records_accepted_drafts() -> None:
    pace = Pace()
    pace.source = CACHED
    pace.learn_outcome(8, 8)
    pace.learn_outcome(8, 2)
    pace.learn_outcome(8, 0)
    assert (pace.drafted, pace.accepted) == (24, 10)
    assert (
        pace.chances.chance_of(CACHED, EXPECTED[CACHED])
        < EXPECTED[CACHED]
        == pace.chances.chance_of(3, EXPECTED[CACHED])
    )


def worth_of(sequences: int, device_ns: int) -> Worth:
    worth = Worth()
    for _ in range(2):
        assert not worth.drafts_pay(sequences), "not before it is known what steps take"
        worth.learn_plain_step(sequences, device_ns)
    return worth


@pytest.mark.parametrize(("tokens", "pays"), [(4, True), (1, False)])
def test_drafts_rest_where_steps_without_them_are_quicker(tokens: int, pays: bool) -> None:
    worth = worth_of(1, 10_000_000)
    for _ in range(TRIALS):
        assert worth.drafts_pay(1)
        worth.learn_drafted_step(1, tokens, 8, 15_000_000)
    assert worth.drafts_pay(1) is pays
    worth.learn_plain_step(2, 10_000_000)
    worth.learn_plain_step(2, 10_000_000)
    assert worth.drafts_pay(2), "more sequences are another question"
    for _ in range(REST if not pays else 0):
        assert not worth.drafts_pay(1)
        worth.learn_plain_step(1, 10_000_000)
    assert worth.drafts_pay(1), "then it is looked at again"


def test_draft_pause_grows_each_time() -> None:
    worth, rests = worth_of(3, 30_000_000), []
    for _ in range(3):
        while worth.drafts_pay(3):
            worth.learn_drafted_step(3, 3, 9, 50_000_000)
        rests.append(0)
        while not worth.drafts_pay(3):
            worth.learn_plain_step(3, 30_000_000)
            rests[-1] += 1
    assert rests == [REST, 2 * REST, 4 * REST]


def test_the_price_is_what_steps_take() -> None:
    worth = worth_of(4, 40_000_000)
    assert worth.draft_price(4) == Price(10_000_000, pytest.approx(MARGIN * 40_000_000 / WIDE, rel=0.01))
    for _ in range(40):
        worth.learn_drafted_step(4, 12, 10, 60_000_000)
    assert worth.draft_price(4).draft_ns == pytest.approx(MARGIN * 2_000_000, rel=0.01)
    for _ in range(500):
        worth.learn_plain_step(4, 40_000_000)
    assert worth.draft_price(4).draft_ns < 1_000_000, "what was too dear is tried again"
    worth.learn_plain_step(4, 40_000_000_000)
    assert worth.draft_price(4).token_ns <= 13_000_000, "one step that was held up says little"


def test_now_and_then_a_step_has_no_drafts() -> None:
    worth, plain = worth_of(1, 10_000_000), 0
    for _ in range(10 * LOOK_AGAIN):
        if worth.drafts_pay(1):
            worth.learn_drafted_step(1, 6, 8, 12_000_000)
        else:
            worth.learn_plain_step(1, 10_000_000)
            plain += 1
    assert 10 <= plain <= 25


def test_draft_costs_are_learnt_only_after_a_plain_step() -> None:
    worth = Worth()
    for _ in range(10):
        worth.learn_drafted_step(1, 1, 8, 1 << 40)
    worth.learn_plain_step(1, 10)
    worth.learn_plain_step(1, 10)
    assert worth.drafts_pay(1) and worth.draft_price(1).token_ns == 10
