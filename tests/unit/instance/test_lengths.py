"""What is expected of answers, beside what numpy says of the very lengths that were seen."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from memserve.base.errors import InvariantError
from memserve.instance.scheduler.slo import EDGES, RANGES, OutputLengths, Prediction

SEEDS = [3, 77001, 20261123]
BIN = 2**0.25
"""Width of a bin: neighbouring edges are that far apart."""


def lengths(random: Random, count: int, scale: float = 4.5) -> list[int]:
    return [max(1, int(random.lognormvariate(scale, 1.0))) for _ in range(count)]


def test_bins_cover_every_length_once() -> None:
    assert EDGES[0] == 1 and sorted(set(EDGES)) == EDGES and EDGES[-1] > 1 << 20
    assert all(following <= max(before + 1, before * BIN + 1) for before, following in itertools.pairwise(EDGES))


def test_without_answers_only_what_is_certain_is_said() -> None:
    them = OutputLengths()
    assert them.predict_length("a", 100, 0, 500) == Prediction(1, 1, 0)
    assert them.predict_length("a", 100, 499, 500) == Prediction(500, 500, 0)
    for tokens in [70] * 15:
        them.learn_length("a", 100, tokens)
    assert them.predict_length("a", 100, 0, 500).answers == 0, "too few say nothing"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("generated", [0, 30, 90, 200])
def test_percentiles_are_those_of_the_longer_answers(seed: int, generated: int) -> None:
    random, them = Random(seed), OutputLengths()
    seen = lengths(random, 900)
    for tokens in seen:
        them.learn_length("a", 100, tokens)
    longer = [tokens for tokens in seen if tokens > generated]
    said = them.predict_length("a", 100, generated, 1 << 20)
    lower, median = np.percentile(longer, [25, 50])
    assert said.answers == pytest.approx(len(longer), rel=0.1, abs=3)
    assert generated < said.lower <= lower * 1.05 + 1, "a bound from below"
    assert lower / BIN / 1.05 - 1 <= said.lower
    assert median / BIN <= said.median <= median * BIN
    assert them.predict_length("a", 100, generated, generated + 5).median <= generated + 5, "the request's own limit"
    them.check_invariants()


def test_output_lengths_are_learnt_per_tenant_and_prompt_size() -> None:
    them = OutputLengths()
    for _ in range(40):
        them.learn_length("short", 100, 10)
        them.learn_length("long", 100, 1000)
        them.learn_length("long", 5000, 30)
    assert them.predict_length("short", 100, 0, 4096).median <= 11
    assert them.predict_length("long", 100, 0, 4096).median >= 1000 / BIN
    assert them.predict_length("long", 5000, 0, 4096).median <= 30 * BIN
    assert them.predict_length("long", 40, 0, 4096).answers == 80, "no prompt of that size: all of the tenant"
    assert them.predict_length("new", 100, 0, 4096).answers == 120, "no answer of that tenant: all there are"


@pytest.mark.parametrize("seed", SEEDS)
def test_each_class_gets_its_share_and_what_changes_is_followed(seed: int) -> None:
    random, them = Random(seed), OutputLengths()
    for tokens in lengths(random, 6000):
        them.learn_length("a", 100, tokens)
    shares = np.asarray(list(them.classes.values())) / sum(them.classes.values())
    widths = np.diff([0, *RANGES, 1])
    assert np.abs(shares - widths).max() < 0.04, shares
    for tokens in lengths(random, 4000, scale=6.5):  # e times e as long
        them.learn_length("a", 100, tokens)
    assert them.predict_length("a", 100, 0, 1 << 20).median > 400, "older answers count less and less"


def test_memory_is_bounded_whatever_tenants_there_are() -> None:
    them = OutputLengths()
    for number in range(6000):
        them.learn_length(f"tenant {number}", 100, 5)
    them.check_invariants()
    with pytest.raises(InvariantError, match="-1 tokens"):
        them.learn_length("a", 100, -1)
