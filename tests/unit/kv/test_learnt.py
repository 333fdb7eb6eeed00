"""Costs that are learnt while serving: curves through steps, copies and pulls."""

from __future__ import annotations

import pytest

from memserve.base.types import Role
from memserve.kv.costs import (
    CopyCurve,
    CostModel,
    DecodeCurve,
    LearntCurve,
    LearntLinks,
    PreemptionCosts,
    PreemptionModel,
    PrefillCurve,
    are_alike,
    attended_pairs,
)

TRUE = CostModel(
    prefill=PrefillCurve(5e6, 30_000.0, 1.0), decode=DecodeCurve(8e6, 10_000.0, 50.0),
    swap_in=CopyCurve(20_000.0, 2_000.0, 0.02), network=CopyCurve(200_000.0, 2_000.0, 0.07),
)  # fmt: skip
BLOCK_BYTES = 4 << 20


def served(requests: int) -> PreemptionModel:
    """What an instance knows that has served so many requests, each of another length, and knew nothing before."""
    costs = PreemptionModel(PreemptionCosts(block_bytes=BLOCK_BYTES))
    for number in range(requests):
        tokens, blocks = 200 * (number + 1), number % 7 + 1
        pairs = attended_pairs(tokens, 0)
        costs.learn_step(tokens, 0, TRUE.prefill.batch_ns(tokens, pairs), pairs)
        costs.learn_decode(number % 8 + 1, 500 * (number + 1), TRUE.decode_step_ns(number % 8 + 1, 500 * (number + 1)))
        costs.learn_swap(blocks, TRUE.swap_in.ns(blocks * BLOCK_BYTES, blocks))
        costs.learn_link("a", False, blocks * BLOCK_BYTES, blocks, TRUE.network.ns(blocks * BLOCK_BYTES, blocks))
    return costs


def test_within_20_requests_all_curves_are_those_of_the_machine() -> None:
    model = served(20).model
    assert model.prefill_ns(4096) == pytest.approx(TRUE.prefill_ns(4096), rel=0.02)
    assert model.prefill_ns(100, 8000) == pytest.approx(TRUE.prefill_ns(100, 8000), rel=0.05)
    assert model.decode_step_ns(16, 30_000) == pytest.approx(TRUE.decode_step_ns(16, 30_000), rel=0.02)
    for link, true in ((model.swap_in, TRUE.swap_in), (model.swap_out, TRUE.swap_in), (model.network, TRUE.network)):
        assert link.ns(50 * BLOCK_BYTES, 50) == pytest.approx(true.ns(50 * BLOCK_BYTES, 50), rel=0.05)


def test_learnt_costs_are_reported_again_when_changed() -> None:
    fresh = PreemptionModel(PreemptionCosts())
    assert not fresh.is_known() and fresh.encoded_costs() == b""
    costs = served(20)
    told = costs.encoded_costs()
    assert CostModel.from_json(told).is_measured and costs.encoded_costs() is told
    for _ in range(64):
        costs.learn_link("a", False, BLOCK_BYTES, 1, 10 * TRUE.network.ns(BLOCK_BYTES, 1))
    assert costs.encoded_costs() != told


def test_measurements_of_one_size_scale_the_curve_only() -> None:
    curve = LearntCurve(PrefillCurve(2e6, 200_000.0, 10.0))
    for _ in range(10):
        curve.add_sample((1.0, 1000.0, 500_000.0), 20_700_000)
    assert not curve.is_fitted and curve.curve.token_ns == pytest.approx(20_000.0, rel=0.01)


def test_each_peer_has_a_link_of_its_own() -> None:
    links = LearntLinks(CopyCurve(0.0, 0.0, 1.0), CopyCurve(0.0, 0.0, 2.0))
    for blocks in (1, 4, 9):
        links.learn_pull("fast", False, blocks * BLOCK_BYTES, blocks, round(blocks * BLOCK_BYTES * 0.1))
        links.learn_pull("slow", False, blocks * BLOCK_BYTES, blocks, blocks * BLOCK_BYTES * 10)
    fast_ns, slow_ns = (links.curve_from(name, False).ns(BLOCK_BYTES) for name in ("fast", "slow"))
    assert slow_ns > 50 * fast_ns and fast_ns < links.curve_from("new", False).ns(BLOCK_BYTES) <= slow_ns
    assert links.is_known(near=False) and not links.is_known(near=True)


def test_a_profile_is_scaled_and_not_replaced() -> None:
    costs = PreemptionModel(PreemptionCosts(profile=TRUE))
    costs.learn_decode(8, 8000, 1)
    costs.learn_swap(8, 1)
    assert costs.model.decode == TRUE.decode and costs.model.swap_in == TRUE.swap_in


def test_costs_are_alike_within_a_share() -> None:
    assert are_alike(TRUE, TRUE.with_prefill_scale(1.1), 0.15) and not are_alike(
        TRUE, TRUE.with_prefill_scale(1.3), 0.15
    )


def test_what_reported_layers_cost_is_learnt_beside_the_prefill() -> None:
    """And steps that report do not make prompts look dearer than they are."""
    costs, layers, report_ns = served(20), 32, 400_000.0
    prefill_ns = costs.model.prefill_ns(1000)
    for _ in range(10):
        step_ns = TRUE.prefill_ns(1000) + round(layers * report_ns)
        costs.learn_step(1000, 0, step_ns, attended_pairs(1000, 0), layers)
    assert costs.model.report_ns == pytest.approx(report_ns, rel=0.05)
    assert costs.model.prefill_ns(1000) == pytest.approx(prefill_ns, rel=0.05)
    told = CostModel.from_json(costs.encoded_costs())
    assert told.report_ns == costs.model.report_ns, "routers hear of it"


def test_reports_cost_what_is_assumed_until_some_are_measured() -> None:
    costs = PreemptionModel(PreemptionCosts())
    assumed_ns = costs.model.report_ns
    for _ in range(4):
        costs.learn_step(1000, 0, TRUE.prefill_ns(1000), attended_pairs(1000, 0), 32)
    assert costs.model.report_ns == assumed_ns


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_instance_tells_what_its_role_has_measured(role: Role) -> None:
    """A prefill instance never draws a second token, and a decode instance computes no prompt."""
    costs = PreemptionModel(PreemptionCosts())
    if role is Role.PREFILL:
        costs.learn_step(1000, 0, TRUE.prefill_ns(1000), attended_pairs(1000, 0))
    else:
        costs.learn_decode(4, 5000, TRUE.decode_step_ns(4, 5000))
    other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
    assert costs.encoded_costs(Role.COLOCATED) == costs.encoded_costs(other) == b""
    assert CostModel.from_json(costs.encoded_costs(role)).is_measured
