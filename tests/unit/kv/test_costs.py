"""The cost model: curves never lie about their direction, fits find planted truth, decisions are the best ones."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.errors import UserError
from memserve.base.types import KVGeometry
from memserve.kv.costs import (
    CopyCurve,
    CostModel,
    DecodeCurve,
    PreemptionCosts,
    PreemptionModel,
    PrefillCurve,
    Sample,
    attended_pairs,
    fit_copy,
    fit_decode,
    fit_held_out,
    fit_prefill,
)
from memserve.kv.reuse import Decision, FetchChoice, Prefix, Way, decide_batch, plan_fetches

GEOMETRY = KVGeometry(4, 2, 16, 16, "float32", block_tokens=8)

coefficient = st.floats(0, 1e7, allow_nan=False)
curves = st.tuples(coefficient, coefficient, coefficient)
tokens = st.integers(0, 5000)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    return CostModel(
        prefill=PrefillCurve(*draw(curves)),
        decode=DecodeCurve(*draw(curves)),
        swap_in=CopyCurve(*draw(curves)),
        swap_out=CopyCurve(*draw(curves)),
        same_host=CopyCurve(*draw(curves)),
        network=CopyCurve(*draw(curves)),
    )


@settings(max_examples=100, deadline=None)
@given(models(), tokens, tokens, tokens, tokens)
def test_more_work_never_takes_less_time(model: CostModel, first: int, second: int, more: int, pieces: int) -> None:
    costs = [
        model.prefill_ns,
        model.decode_step_ns,
        model.swap_in.ns,
        model.swap_out.ns,
        model.same_host.ns,
        model.network.ns,
        lambda a, b: model.network.kv_ns(a, 8, 100, b),
    ]
    for cost in costs:
        here = cost(first, second)
        assert here >= 0
        assert cost(first + more, second) >= here
        assert cost(first, second + pieces) >= here


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40))
def test_pairs_are_counted_as_a_causal_mask_has_them(new: int, context: int) -> None:
    mask = [[key <= context + query for key in range(context + new)] for query in range(new)]
    assert attended_pairs(new, context) == sum(map(sum, mask))


@pytest.mark.parametrize(
    ("fit", "kind", "truth", "grid"),
    [
        (fit_prefill, PrefillCurve, (9e6, 7e5, 25.0), [(n, c) for n in (16, 64, 256, 1024) for c in (0, 512, 4096)]),
        (fit_decode, DecodeCurve, (1e7, 4e5, 40.0), [(b, b * c) for b in (1, 4, 16, 64) for c in (64, 512, 4096)]),
        (fit_copy, CopyCurve, (2e5, 3e3, 0.1), [(n << 14, p) for n in (1, 16, 512, 4096) for p in (1, 30, 900)]),
    ],
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_planted_curves_are_found_through_noise(fit, kind, truth, grid, seed: int) -> None:
    planted = kind(*truth)
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(grid))
    samples = [Sample(a, b, round(planted.ns(a, b) * factor)) for (a, b), factor in zip(grid, noise, strict=True)]
    curve, quality = fit_held_out(samples, fit)
    for a, b in grid:
        assert curve.ns(a, b) == pytest.approx(planted.ns(a, b), rel=0.12)
    assert quality.samples == len(grid)
    assert 0 < quality.median_error <= quality.worst_error < 0.2


def test_a_slow_moment_of_the_machine_does_not_bend_the_curve() -> None:
    planted = PrefillCurve(9e6, 7e5, 250.0)
    grid = [(new, context) for new in (16, 64, 256, 1024) for context in (0, 512, 4096)]
    slow = {(1024, 0), (256, 512)}
    samples = [Sample(*point, planted.ns(*point) * (2 if point in slow else 1)) for point in grid]
    curve = fit_prefill(samples)
    for point in grid:
        assert curve.ns(*point) == pytest.approx(planted.ns(*point), rel=0.02)


def test_pieces_of_one_size_put_all_cost_on_the_bytes() -> None:
    """Else a client that asks for one large piece would be told that bytes cost nothing."""
    samples = [Sample(4096 * n, n, 50_000 + 2048 * n) for n in (1, 2, 4, 8, 16)]
    curve = fit_copy(samples)
    assert (curve.piece_ns, curve.byte_ns) == (0.0, pytest.approx(0.5)) and curve.start_ns == pytest.approx(50_000)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(tokens, tokens, st.integers(1, 10**10)), min_size=3, max_size=12))
def test_a_fit_to_anything_has_no_negative_coefficient(rows: list[tuple[int, int, int]]) -> None:
    samples = [Sample(*row) for row in rows]
    for fit in (fit_prefill, fit_decode, fit_copy):
        assert all(value >= 0 for value in asdict(fit(samples)).values())


def test_a_fit_needs_samples() -> None:
    with pytest.raises(UserError, match="2 samples"):
        fit_prefill([Sample(1, 0, 5), Sample(2, 0, 6)])


def every_option(model: CostModel, prefix: Prefix, queue_ns: int, busy_ns: int) -> list[int]:
    """The simple truth: the time of every point up to which the prefix could be taken, block by block."""
    times = []
    held = (prefix.hbm_tokens, prefix.hbm_tokens + prefix.dram_tokens)
    end = held[1] + prefix.remote_tokens
    for point in range(0, end + 1, GEOMETRY.block_tokens):
        used = min(point, prefix.prompt_tokens - 1)
        swapped = max(0, min(used, held[1]) - held[0])
        fetched = max(0, used - held[1])
        wait_ns = queue_ns
        if fetched:
            blocks = -(-fetched // GEOMETRY.block_tokens)
            fetch_ns = model.link_curve(prefix.same_host).ns(blocks * GEOMETRY.block_bytes, blocks)
            wait_ns = max(queue_ns, busy_ns + fetch_ns)
        blocks = -(-swapped // GEOMETRY.block_tokens)
        swap_ns = model.swap_in.ns(blocks * GEOMETRY.block_bytes, blocks)
        times.append(wait_ns + swap_ns + model.prefill_ns(prefix.prompt_tokens - used, used))
    return times


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    """Whole blocks, and no more than the prompt has."""
    prompt_tokens = draw(st.integers(1, 1200))
    left = prompt_tokens // GEOMETRY.block_tokens
    pieces = []
    for _ in range(3):
        blocks = min(left, draw(st.integers(0, 60)))
        pieces.append(blocks * GEOMETRY.block_tokens)
        left -= blocks
    return Prefix(prompt_tokens, *pieces, same_host=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(models(), prefixes(), st.integers(0, 10**9), st.integers(0, 10**9))
def test_nothing_that_it_knows_is_quicker_than_what_it_decides(
    model: CostModel, prefix: Prefix, queue_ns: int, busy_ns: int
) -> None:
    (decision,) = decide_batch(model, GEOMETRY, [prefix], queue_ns=queue_ns, link_busy_ns=busy_ns)
    assert all(decision.expected_ns <= other.expected_ns for other in decision.alternatives)
    best = min(every_option(model, prefix, queue_ns, busy_ns))
    covered = prefix.hbm_tokens + prefix.dram_tokens + prefix.remote_tokens == prefix.prompt_tokens
    last_ns = model.prefill_ns(1, prefix.prompt_tokens - 1) if covered else 0  # its last token is computed all the same
    assert decision.expected_ns <= best * (1 + 1e-9) + 5 + last_ns  # each of five terms is rounded
    assert sum(count for _, count in decision.choice.ways) == prefix.prompt_tokens
    assert decision.tokens_of(Way.RECOMPUTE) >= 1


def decide(model: CostModel, *where: int, same_host: bool = True, **rest: object) -> Decision:
    return decide_batch(model, GEOMETRY, [Prefix(*where, same_host=same_host)], **rest)[0]


QUICK = CopyCurve(0.0, 0.0, 0.001)
SLOW = CopyCurve(1e9, 0.0, 10.0)


def test_each_way_is_taken_where_it_pays() -> None:
    quick = CostModel(swap_in=QUICK, same_host=QUICK, network=SLOW)
    assert decide(quick, 400, 80, 80, 80).choice.name == "reuse 80 + swap-in 80 + fetch 80 + recompute 160"
    assert decide(quick, 400, 80, 80, 80, same_host=False).choice.name == "reuse 80 + swap-in 80 + recompute 240"
    slow = replace(quick, swap_in=SLOW, same_host=SLOW)
    assert decide(slow, 400, 80, 80, 80).choice.name == "reuse 80 + recompute 320"


def test_the_last_prompt_token_is_always_computed() -> None:
    assert decide(CostModel(swap_in=QUICK), 80, 40, 40, 0).choice.name == "reuse 40 + swap-in 39 + recompute 1"
    assert decide(CostModel(), 80, 80, 80, 80).choice.name == "reuse 79 + recompute 1"


def test_a_fetch_that_other_work_hides_is_free() -> None:
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(500_000, 0, 0))
    assert decide(model, 400, 0, 0, 320).tokens_of(Way.FETCH) == 0
    assert decide(model, 400, 0, 0, 320, queue_ns=500_000).tokens_of(Way.FETCH) == 320
    assert decide(model, 400, 0, 0, 320, queue_ns=500_000, link_busy_ns=400_000).tokens_of(Way.FETCH) == 0


def test_as_much_is_fetched_as_the_queue_hides() -> None:
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(0, 9000, 0))  # 9 us fetch, 8 us compute
    assert decide(model, 400, 0, 0, 320).tokens_of(Way.FETCH) == 0
    assert decide(model, 400, 0, 0, 320, queue_ns=100_000).tokens_of(Way.FETCH) == 11 * GEOMETRY.block_tokens
    assert decide(model, 400, 0, 0, 320, queue_ns=10**9).tokens_of(Way.FETCH) == 320


def test_short_remote_prefix_is_not_fetched_without_profile() -> None:
    assert decide(CostModel(), 60, 0, 0, 32, same_host=False).tokens_of(Way.FETCH) == 0
    assert not CostModel().is_measured


def test_batch_shares_link_by_longest_saving_first() -> None:
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(200_000, 0, 0))
    batch = [Prefix(400, remote_tokens=304), Prefix(400, remote_tokens=392), Prefix(400, remote_tokens=240)]
    fetched = [decision.tokens_of(Way.FETCH) for decision in decide_batch(model, GEOMETRY, batch)]
    # The second takes the link for 0.2 ms; another 0.2 ms is more than 304 tokens. While the first one is computed,
    # what the third one fetches comes for nothing.
    assert fetched == [0, 392, 240]


def test_a_batch_shares_the_device_as_well() -> None:
    """Fetches of 100 us that save 90 us each: computing is quicker, until so much is computed before a prompt that its
    fetch is hidden behind that. The link and the device then work beside each other."""
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(100_000, 0, 0))
    batch = [Prefix(96, remote_tokens=88)] * 4
    decisions = decide_batch(model, GEOMETRY, batch)
    assert [decision.tokens_of(Way.FETCH) for decision in decisions] == [0, 88, 0, 88]
    assert [decision.expected_ns for decision in decisions] == [96_000, 108_000, 200_000, 208_000]


@settings(max_examples=100, deadline=None)
@given(models(), prefixes(), st.integers(0, 10**9), st.integers(0, 10**9))
def test_batch_of_one_equals_single_decision(model: CostModel, prefix: Prefix, queue_ns: int, busy_ns: int) -> None:
    """Another prompt with nothing to fetch changes nothing but the queue of those behind it."""
    (alone,) = decide_batch(model, GEOMETRY, [prefix], queue_ns=queue_ns, link_busy_ns=busy_ns)
    other = Prefix(100)
    pair = decide_batch(model, GEOMETRY, [other, prefix], queue_ns=queue_ns, link_busy_ns=busy_ns)
    if prefix.remote_tokens and pair[1].queue_ns == queue_ns:  # it went first: it alone uses the link
        assert pair[1] == alone
    else:
        behind_ns = queue_ns + model.prefill_ns(100)
        assert pair[1] == decide_batch(model, GEOMETRY, [prefix], queue_ns=behind_ns, link_busy_ns=busy_ns)[0]


@settings(max_examples=50, deadline=None)
@given(models(), st.lists(prefixes(), max_size=5), st.integers(0, 10**9))
def test_fetch_in_a_batch_never_costs_its_prompt_time(model: CostModel, batch: list[Prefix], queue_ns: int) -> None:
    decisions = decide_batch(model, GEOMETRY, batch, queue_ns=queue_ns)
    assert len(decisions) == len(batch)
    for prefix, decision in zip(batch, decisions, strict=True):
        before_ns = decision.queue_ns
        alone = decide(model, prefix.prompt_tokens, prefix.hbm_tokens, prefix.dram_tokens, 0, queue_ns=before_ns)
        assert decision.expected_ns <= alone.expected_ns


def test_a_decision_explains_itself() -> None:
    decision = decide(CostModel(prefill=PrefillCurve(0, 1e6, 0), swap_in=CopyCurve(1e6, 0, 0)), 400, 0, 80, 0)
    assert decision.reason == "swap-in 80 + recompute 320: 321.0 ms; recompute 400: 400.0 ms"
    assert decide(CostModel(), 400, 80, 0, 0).reason.startswith("reuse 80 + recompute 320: ")


@settings(max_examples=25, deadline=None)
@given(models())
def test_a_model_survives_json(model: CostModel) -> None:
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize(
    "change", [{"version": 0}, {"prefill": 3}, {"prefill": {"step_ns": -1.0}}, {"swap_in": {"start_ns": 1.0}},
               {"decode": {"row_ns": float("nan")}}, {"network": {"start_ns": 0.0, "piece_ns": 0.0, "byte_ns": 1e300}}]
)  # fmt: skip
def test_invalid_profile_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match="cost profile"):
        CostModel.from_dict(CostModel().to_dict() | change)


def test_scaling_changes_the_prefill_and_nothing_else() -> None:
    model = CostModel()
    double = model.with_prefill_scale(2.0)
    assert double.prefill_ns(300, 700) == 2 * model.prefill_ns(300, 700)
    assert replace(double, prefill=model.prefill) == model


# -- learning from finished steps


def test_first_step_replaces_a_guess_but_corrects_a_profile() -> None:
    guess = PreemptionModel(PreemptionCosts(prefill_ns_per_token=1000))
    profile = PreemptionModel(PreemptionCosts(profile=CostModel(prefill=PrefillCurve(0, 1000, 0))))
    for model in (guess, profile):
        assert model.recompute_ns(100) == 100_000
        model.learn_step(100, 0, 200_000)
    assert (guess.recompute_ns(100), profile.recompute_ns(100)) == (200_000, 112_500)
    assert profile.prefill_ns_per_token == 1125
    assert profile.model.prefill_ns(100, 50) == profile.model.prefill_ns(100) == 112_500


def test_a_chunk_far_into_a_long_prompt_teaches_no_slowness() -> None:
    """Attending to what is before it takes its time: as much as the profile says."""
    profile = CostModel(prefill=PrefillCurve(1e6, 1000, 10))
    model = PreemptionModel(PreemptionCosts(profile=profile))
    model.learn_step(512, 0, profile.prefill_ns(512, 8192), attended_pairs(512, 8192))
    assert model.recompute_ns(1000) == profile.prefill_ns(1000)
    assert model.queue_ns(2560) == 2560 * model.prefill_ns_per_token


def test_swapping_is_priced_by_the_profile() -> None:
    profile = CostModel(swap_out=CopyCurve(5, 1, 0.5), swap_in=CopyCurve(7, 2, 0.25))
    model = PreemptionModel(PreemptionCosts(block_bytes=1000, profile=profile))
    assert model.swap_ns(4) == (5 + 4 + 2000) + (7 + 8 + 1000)


@settings(max_examples=50, deadline=None)
@given(models(), st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 64), st.integers(-5, 10**10)), max_size=20))
def test_whatever_is_learnt_costs_stay_ordered(model: CostModel, steps: list[tuple[int, int, int]]) -> None:
    learning = PreemptionModel(PreemptionCosts(profile=model))
    for step in steps:
        learning.learn_step(*step)
    costs = [learning.recompute_ns(tokens) for tokens in (0, 1, 100, 1000)]
    assert costs == sorted(costs) and costs[0] == 0 and learning.prefill_ns_per_token >= 1
    assert learning.model.prefill_ns(1000) == costs[-1]


# -- worth the wait


@settings(max_examples=150, deadline=None)
@given(models(), prefixes(), st.integers(0, 10**9), st.integers(1, 10**10), st.integers(0, 10**9))
def test_fetch_plan_is_whole_blocks_expected_to_be_quicker(
    model: CostModel, prefix: Prefix, queue_ns: int, wait_max_ns: int, busy_ns: int
) -> None:
    (choice,) = plan_fetches(
        model, GEOMETRY, [prefix], queue_ns=queue_ns, waits_max_ns=[wait_max_ns], link_busy_ns=busy_ns
    )
    assert 0 <= choice.tokens <= prefix.remote_tokens and choice.tokens % GEOMETRY.block_tokens == 0
    if not choice.tokens:
        assert (choice.wait_ns, choice.link_ns) == (0, 0)
        return
    assert 1 <= choice.wait_ns <= wait_max_ns
    own = prefix.hbm_tokens + prefix.dram_tokens
    assert choice.wait_ns <= max(1, queue_ns + model.prefill_ns(choice.tokens, own))
    blocks = choice.tokens // GEOMETRY.block_tokens
    assert choice.link_ns == model.link_curve(prefix.same_host).ns(blocks * GEOMETRY.block_bytes, blocks)


def test_concurrent_fetch_plans_share_the_link() -> None:
    """Each fetch takes 0.2 ms and saves 0.3 ms: the first pays, the second would end too late."""
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(200_000, 0, 0))
    prefix = Prefix(400, remote_tokens=304)

    def choose(count: int, busy_ns: int = 0) -> list[FetchChoice]:
        waits_max_ns = [10**9] * count
        return plan_fetches(
            model, GEOMETRY, [prefix] * count, queue_ns=0, waits_max_ns=waits_max_ns, link_busy_ns=busy_ns
        )

    first, second = choose(2)
    assert (first.tokens, first.link_ns, second.tokens) == (304, 200_000, 0)
    assert choose(1, first.link_ns)[0].tokens == 0
    late = Prefix(400, remote_tokens=304, fetch_after_ns=200_000)
    assert plan_fetches(model, GEOMETRY, [late], queue_ns=0, waits_max_ns=[10**9])[0].tokens == 0


def test_disk_wait_is_three_times_the_expected_time() -> None:
    """And no longer than computing takes, and for free while other prompts are computed."""
    curve, nothing = CopyCurve(50_000, 0, 0), CopyCurve(0, 0, 0)
    model = CostModel(prefill=PrefillCurve(0, 10_000, 0), same_host=nothing, disk=curve)

    def wait_ns(queue_ns: int, disk_tokens: int, disk: CopyCurve = curve) -> int:
        prefix = Prefix(96, remote_tokens=88, disk_tokens=disk_tokens, disk=disk)
        return plan_fetches(model, GEOMETRY, [prefix], queue_ns=queue_ns, waits_max_ns=[10**9])[0].wait_ns

    assert wait_ns(0, 88) == 3 * 50_000 and wait_ns(400_000, 88) == 3 * 50_000 + 400_000
    assert wait_ns(0, 88, CopyCurve(500_000, 0, 0)) == wait_ns(0, 0) == 88 * 10_000


def test_a_prompt_waits_for_its_turn_on_the_link() -> None:
    """The wait of those behind others in a batch has room for what is computed before them."""
    model = CostModel(prefill=PrefillCurve(0, 1000, 0), same_host=CopyCurve(100_000, 0, 0))
    choices = plan_fetches(model, GEOMETRY, [Prefix(96, remote_tokens=88)] * 4, queue_ns=0, waits_max_ns=[10**9] * 4)
    assert [choice.wait_ns for choice in choices] == [0, 96_000 + 88_000, 0, 96_000 + 8_000 + 96_000 + 88_000]
