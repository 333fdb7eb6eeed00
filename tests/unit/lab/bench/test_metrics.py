"""The figures of the bench, beside values computed by hand and by numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_records import record
from memserve_lab.bench import metrics
from memserve_lab.bench.load.prompts import Outcome
from memserve_lab.bench.metrics import Slo, Timing
from memserve_lab.workloads.statistics import spread


def test_timing_of_one_request() -> None:
    felt = metrics.timing(record(scheduled_ms=40, end_ms=170))
    assert felt is not None
    assert felt.ttft_s == pytest.approx(0.060), "from the schedule, not from the sending"
    assert felt.tpot_s == pytest.approx(0.030)
    assert felt.itl_s == pytest.approx((0.020, 0.040))
    assert felt.jct_s == pytest.approx(0.130)


def test_tokens_that_came_together_count_as_tokens() -> None:
    felt = metrics.timing(record(tokens_ms=(100, 160), output_tokens=7))
    assert felt is not None and felt.tpot_s == pytest.approx(0.010) and felt.itl_s == pytest.approx((0.060,))


def test_one_token_answer_has_no_tpot() -> None:
    felt = metrics.timing(record(tokens_ms=(100,)))
    assert felt is not None and felt.tpot_s is None and felt.itl_s == ()


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_unanswered_request_has_no_timing(outcome: Outcome) -> None:
    assert metrics.timing(record(outcome=outcome)) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_spread_is_numpys(values: list[float]) -> None:
    found = spread(values)
    assert found is not None and found.count == len(values) and found.max == max(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(np.quantile(values, [0.5, 0.9, 0.99])))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80))
def test_percentiles_are_numpys(values: list[float]) -> None:
    numbers = np.array(values)
    assert metrics.p95(numbers) == np.percentile(numbers, 95)
    assert metrics.p99(numbers) == np.percentile(numbers, 99)


def test_spread_of_nothing() -> None:
    assert spread([]) is None


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.1), True),
        (Slo(ttft_s=0.099), False),
        (Slo(tpot_s=0.01), True),
        (Slo(tpot_s=0.009), False),
        (Slo(jct_s=0.2), True),
        (Slo(ttft_s=1, jct_s=0.19), False),
    ],
)
def test_slo_holds_every_limit(slo: Slo, kept: bool) -> None:
    felt = Timing(ttft_s=0.1, tpot_s=0.01, jct_s=0.2, itl_s=())
    assert slo.is_kept(felt) is kept
    assert not slo.is_kept(None)


def test_a_request_of_one_token_keeps_every_tpot() -> None:
    assert Slo(tpot_s=0.001).is_kept(Timing(0.1, None, 0.1, ()))


def test_figures_by_hand() -> None:
    records = [
        record(0, (100, 200), prompt_tokens=30, cached_tokens=10),
        record(500, (900, 950, 1000), end_ms=2000, prompt_tokens=50, cached_tokens=30),
        record(600, (), end_ms=700, outcome=Outcome.REFUSED, http_status=429),
        record(600, (), end_ms=700, outcome=Outcome.BROKEN, http_status=None),
        record(600, (650,), end_ms=2900, outcome=Outcome.STOPPED),
    ]
    found = metrics.figures(records, slo=Slo(ttft_s=0.2))
    assert (found.requests, found.failed, found.stopped) == (4, 2, 1)
    assert found.wall_s == pytest.approx(2.0), "what was given up does not count"
    assert found.requests_per_s == pytest.approx(1.0)
    assert found.output_tokens == 5 and found.output_tokens_per_s == pytest.approx(2.5)
    assert found.goodput_per_s == pytest.approx(0.5), "one kept it"
    assert found.slo_violations == pytest.approx(0.75), "one was late, two failed"
    assert found.ttft_s is not None and found.ttft_s.mean == pytest.approx(0.25)
    assert found.itl_s is not None and found.itl_s.count == 3
    assert found.late_s is not None and found.late_s.mean == pytest.approx(0.002)
    assert found.cached_share == pytest.approx(0.5)
    assert found.errors == {"broken": 1, "refused 429": 1}


def test_figures_of_nothing() -> None:
    found = metrics.figures([])
    assert (found.requests, found.requests_per_s, found.slo_violations, found.ttft_s) == (0, 0.0, 0.0, None)


def test_groups_keep_every_record_once() -> None:
    records = [record(session=f"s{i}", turn=i % 3, seed=i % 2, setting="ab"[i % 2], workload="w") for i in range(12)]
    assert {turn: len(group) for turn, group in metrics.by_turn(reversed(records)).items()} == {0: 4, 1: 4, 2: 4}
    assert list(metrics.by_turn(reversed(records))) == [0, 1, 2]
    assert {key: len(group) for key, group in metrics.by_setting(records).items()} == {("w", "a"): 6, ("w", "b"): 6}
    assert {seed: len(group) for seed, group in metrics.by_run(records).items()} == {0: 6, 1: 6}


def test_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        groups = [[value] for value in rng.normal(10, 3, size=60)]
        found = metrics.bootstrap(groups, metrics.mean, seed=trial)
        assert found is not None
        covered += found[0] <= 10 <= found[1]
    assert 0.88 < covered / 200 <= 0.99


def test_bootstrap_draws_whole_groups() -> None:
    """Ten equal values a group: a bootstrap over values would find an interval three times narrower."""
    rng = np.random.default_rng(6)
    values = rng.normal(0, 1, size=40)
    alone = metrics.bootstrap([[v] for v in values], metrics.mean, seed=1)
    repeated = metrics.bootstrap([[v] * 10 for v in values], metrics.mean, seed=1)
    assert alone is not None and repeated == pytest.approx(alone)


def test_bootstrap_is_repeatable_and_needs_two_groups() -> None:
    groups = [[1.0, 2.0], [3.0], [8.0], []]
    assert metrics.bootstrap(groups, metrics.p99, seed=3) == metrics.bootstrap(groups, metrics.p99, seed=3)
    assert metrics.bootstrap([[1.0, 2.0], []], metrics.mean) is None


def test_interval_groups_by_session_and_run() -> None:
    records = [record(0, (100 + 10 * i,), session=f"s{i // 2}", seed=i % 2) for i in range(8)]
    found = metrics.interval(records, lambda felt: felt.ttft_s, metrics.mean)
    assert found is not None and 0.1 <= found[0] < 0.135 < found[1] <= 0.17
    same = [record(0, (100 + 10 * i,), session="s") for i in range(8)]
    assert metrics.interval(same, lambda felt: felt.ttft_s, metrics.mean) is None


def test_wall_is_from_the_first_schedule_to_the_last_end() -> None:
    assert metrics.wall_seconds([record(500, (600,)), record(100, (200,), end_ms=300)]) == pytest.approx(0.501)
