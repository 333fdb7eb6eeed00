"""What may lie by layer: bytes that steps read back, and which layers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.instance.layerwise.budget import (
    LayerBudget,
    LayeredView,
    LayerPolicy,
    LinkRate,
    Overtaking,
    forecast_blocks,
    layer_order,
    least_kept_layers,
)


def test_layer_budget_fits_link_within_token_time() -> None:
    """1 GB/s for 200 ms: 200 MB, so 8,138 pages of 24,576 bytes."""
    budget = LayerBudget(30, 24_576, LinkRate(1e9), 200 * NS_PER_MS)
    assert budget.pages_max() == 8138
    assert budget.allows_pages(8138) and not budget.allows_pages(8139)


def test_layer_budget_is_half_of_the_link_in_known_step_time() -> None:
    """40 ms carry 40 MB, of which half may be read back; no step allows more than a token may take."""
    budget = LayerBudget(30, 24_576, LinkRate(1e9), 200 * NS_PER_MS)
    assert budget.pages_max(40 * NS_PER_MS) == 813
    assert budget.pages_max(500 * NS_PER_MS) == 8138


def test_chunk_takes_as_long_as_reading_back_its_prefix() -> None:
    """500 blocks of 737,280 bytes take 369 ms at 1 GB/s; a block of 32 tokens is computed in 23 ms."""
    budget = LayerBudget(30, 24_576, LinkRate(1e9), 200 * NS_PER_MS)
    assert budget.chunk_blocks(500, 23.0 * NS_PER_MS) == 17
    assert budget.chunk_blocks(20, 23.0 * NS_PER_MS) == budget.chunk_blocks(500, 0.0) == 1


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 24, 30, 32, 80])
def test_layer_order_spreads_evenly_and_starts_per_request(layers: int) -> None:
    for number in range(7):
        order = layer_order(layers, number)
        assert sorted(order) == list(range(layers)) and order[0] == number % layers
        for kept in range(2, layers + 1):
            some = sorted(order[:kept])
            gaps = [b - a for a, b in zip(some, [*some[1:], some[0] + layers], strict=True)]
            assert max(gaps) <= 2 * layers / kept + 1, f"{kept} of {layers} layers lie at {some}"


def test_least_kept_layers_hide_sending_the_others_away() -> None:
    """LayerKV, equations 3 and 4: of 32 layers the others take (32 - x) / 32 of the time of all."""
    offload_ns = 64 * NS_PER_MS
    for prefill_ns in range(0, 130 * NS_PER_MS, NS_PER_MS // 2):
        kept = least_kept_layers(32, prefill_ns, offload_ns)
        assert offload_ns * (32 - kept) // 32 <= prefill_ns
        assert kept == 0 or offload_ns * (32 - kept + 1) // 32 > prefill_ns, "one less would do"
    assert least_kept_layers(32, 0, offload_ns) == 32 and least_kept_layers(32, 70 * NS_PER_MS, offload_ns) == 0


def test_forecast_of_free_blocks_is_that_of_equation_5() -> None:
    """Free blocks of a stage are those before, and what is released, less what is allocated: a block a sequence."""
    assert forecast_blocks(10, [], 3) == [10, 10, 10]
    assert forecast_blocks(10, [(9, 4), (9, 6)], 4) == [10, 8, 6, 4]
    assert forecast_blocks(3, [(1, 4), (9, 6)], 5) == [3, 1, 1 - 2 + 6, 4, 3], "what ends gives all its blocks back"
    assert min(forecast_blocks(2, [(7, 1)] * 3, 8)) < 0, "and then sequences are preempted"


def test_policies_by_name() -> None:
    assert LayerPolicy.from_name("auto") == LayerPolicy(None, is_staggered=True, parks=True)
    assert LayerPolicy.from_name("prompts-first") == LayerPolicy(None, bounds_delays=False)
    published = LayerPolicy(None, is_staggered=False, parks=False, bounds_delays=False, forecasts=True)
    assert LayerPolicy.from_name("layerkv") == published
    assert LayerPolicy.from_name("layerkv-staggered") == replace(published, is_staggered=True)
    assert LayerPolicy.from_name("next-layer") == LayerPolicy(0, is_staggered=False, parks=False, bounds_delays=False)
    assert LayerPolicy.from_name("static-12") == LayerPolicy(12, is_staggered=False, parks=False, bounds_delays=False)


def test_latest_sequences_beyond_the_budget_are_parked() -> None:
    budget = LayerBudget(4, page_bytes=1_000_000, link=LinkRate(1e9), tpot_ns=100_000_000)  # 100 pages
    lying = [LayeredView(3, 20, 0, True, True), LayeredView(2, 20, 0, True, False), LayeredView(1, 20, 3, True, True)]
    assert LayerPolicy().indices_to_park(lying, budget, 0, 0) == [0]  # 180 pages, and 80 of them go
    assert LayerPolicy().indices_to_park(lying[1:], budget, 0, 0) == []
    assert LayerPolicy().indices_to_park([*lying, LayeredView(0, 20, 0, False, False)], budget, 0, 0) == [
        0
    ]  # it reads nothing
    assert LayerPolicy(parks=False).indices_to_park(lying, budget, 0, 0) == []
    assert LayerPolicy().kept_most(1, 4) == 4 and LayerPolicy(kept_max=2).kept_most(1, 4) == 2


def test_rate_of_the_link_is_the_curves_then_what_copies_took() -> None:
    """A measured curve is moved by what copies take; what was only assumed is replaced by the first copy."""
    measured, assumed = LinkRate(1e9), LinkRate(1e9, is_measured=False)
    assert round(measured.bytes_s) == round(assumed.bytes_s) == 1e9
    for rate in (measured, assumed):
        rate.learn_copies(0, 0)
        rate.learn_copies(4_000_000_000, NS_PER_S)
    assert round(assumed.bytes_s / 1e9, 3) == 4 and 3.5e9 < measured.bytes_s < 4e9
    assumed.learn_copies(1_000, NS_PER_MS)  # a small copy at 1 MB/s says little
    assert assumed.bytes_s > 3.9e9
    for _ in range(50):
        measured.learn_copies(2_000_000_000, NS_PER_S)
    assert round(measured.bytes_s / 1e9, 3) == 2


def test_budget_follows_what_the_link_is_found_to_carry() -> None:
    budget = LayerBudget(30, 24_576, LinkRate(1e9, is_measured=False), 200 * NS_PER_MS)
    before = budget.pages_max()
    budget.link.learn_copies(10_000_000_000, NS_PER_S)
    assert budget.pages_max() // 10 == before and budget.link_ns(500) == round(500 * 30 * 24_576 / 10e9 * NS_PER_S)


def test_prompts_that_overtake_fill_steps_while_delays_are_small() -> None:
    """A second for two requests, of 100 s that all had: more than a twenty-fifth comes with the third prompt."""
    overtaking = Overtaking(32, 100)
    overtaking.pass_time(10 * NS_PER_S, 10)
    for _ in range(3):
        overtaking.begin_plan(beside=True)
        assert overtaking.limit_tokens(8192, 0) == 8192
        overtaking.learn_delay(6000, NS_PER_S, NS_PER_S, 2)
    overtaking.begin_plan(beside=True)
    assert overtaking.limit_tokens(8192, 0) == 96, "whole blocks of what steps have free"
    overtaking.add_tokens(64)
    assert overtaking.limit_tokens(8192, 0) == 32 and overtaking.limit_tokens(8192, 64) == 64, (
        "a piece that hides reading back"
    )
    overtaking.add_tokens(64)
    assert overtaking.limit_tokens(8192, 64) == 0
    overtaking.begin_plan(beside=False)
    assert overtaking.limit_tokens(8192, 0) == 8192, "nothing decodes"
    overtaking.pass_time(10 * NS_PER_S, 10)
    overtaking.begin_plan(beside=True)
    assert overtaking.limit_tokens(8192, 0) == 8192


@pytest.mark.parametrize("knee", [40, 300, 1500])
def test_free_tokens_are_learnt_from_how_much_longer_steps_took(knee: int) -> None:
    """A step reads the weights for as long as computing ``knee`` tokens takes: so many come for nothing."""
    overtaking, token_ns = Overtaking(32, 200), 1_000
    for _ in range(200):
        tokens = round(overtaking.free_tokens) // 32 * 32
        overtaking.learn_delay(tokens, max(0, tokens - knee) * token_ns, tokens * token_ns, 1)
    assert 0.7 * knee <= overtaking.free_tokens <= 2 * knee + 32
