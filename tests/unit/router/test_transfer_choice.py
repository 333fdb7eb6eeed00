"""``--transfer auto``: what each mode is expected to cost, which one is chosen, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster_world import GEOMETRY, World, a_request
from memserve.base.types import Role, TransferMode, TransferPolicy
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.kv.costs import CopyCurve, CostModel
from memserve.protocol.messages import Dispatch
from memserve.router.placement.candidates import Ask, Candidate
from memserve.router.placement.transfer_choice import PlannedHandoff, choose_transfer, expected_ns, handoff_of

BY_LAYER, BY_REQUEST, AGGREGATED = TransferMode
P, D = Role.PREFILL, Role.DECODE
LAYERS = 32
QUICK_LINK = CopyCurve(0.2 * NS_PER_MS, 2_000.0, 0.07)
PLAIN = PlannedHandoff(
    prefill_ns=33 * NS_PER_MS, steps=1, cached_blocks=0, computed_blocks=32, queued_prompts=0.0, together=1,
    layers=LAYERS, block_bytes=4 << 20, link=QUICK_LINK, report_ns=50_000.0,
)  # fmt: skip
"""A prompt of 1,024 tokens of an 8B model on an H100 with a link of 400 Gbit/s."""


def chosen(handoff: PlannedHandoff, *, reports_layers: bool = True) -> TransferMode:
    return choose_transfer(handoff, reports_layers=reports_layers).mode


def stages_ns(handoff: PlannedHandoff, copied_bytes: int, pieces: int) -> tuple[float, float]:
    """Checksums, and what the link takes beside them, of all that are handed over together."""
    moved_ns = handoff.link.ns(copied_bytes, pieces)
    sealed_ns = min(moved_ns, copied_bytes * handoff.seal_byte_ns)
    return handoff.together * sealed_ns, handoff.together * (moved_ns - sealed_ns)


def waited_ns(handoff: PlannedHandoff, mode: TransferMode) -> float:
    """Pull by pull: each is sealed when its pages are there, and copied when that is over and the one before it is
    here. The mean of those together."""
    by_layer = mode is BY_LAYER
    layers = handoff.layers if by_layer else 1
    report_ns = handoff.layers * handoff.report_ns if by_layer else 0.0
    step_ns = handoff.together * handoff.prefill_ns / handoff.steps + report_ns
    blocks = ceil_div(handoff.computed_blocks, handoff.steps)
    pieces = blocks if by_layer or mode is AGGREGATED else blocks * handoff.layers
    block_pieces = 1 if mode is AGGREGATED else handoff.layers
    cached = handoff.cached_blocks
    sealed_ns, copied_ns = stages_ns(handoff, cached * handoff.block_bytes, cached * block_pieces)
    free_ns = sealed_ns + copied_ns
    for step in range(handoff.steps):
        for layer in range(layers):
            ready_ns = step_ns * (step + (layer + 1) / layers)
            seal_ns, copy_ns = stages_ns(handoff, blocks * handoff.block_bytes // layers, pieces)
            sealed_ns = max(sealed_ns, ready_ns) + seal_ns
            free_ns = max(free_ns, sealed_ns) + copy_ns
    free_ns -= (handoff.together - 1) / 2 / handoff.together * (seal_ns + copy_ns)
    return free_ns - step_ns * handoff.steps + report_ns * handoff.steps


handoffs = st.builds(
    PlannedHandoff, prefill_ns=st.integers(1, 10**9), steps=st.integers(1, 5), cached_blocks=st.integers(0, 50),
    computed_blocks=st.integers(1, 50), queued_prompts=st.just(0.0), together=st.integers(1, 4),
    layers=st.integers(1, 40), block_bytes=st.integers(1, 1 << 22),
    link=st.builds(CopyCurve, st.floats(0, 1e7), st.floats(0, 1e5), st.floats(0, 3.0)), report_ns=st.floats(0, 1e6),
    seal_byte_ns=st.floats(0, 3.0),
)  # fmt: skip


@given(handoff=handoffs, mode=st.sampled_from(TransferMode))
@example(handoff=PLAIN, mode=BY_LAYER)
def test_expected_time_is_that_of_pulls_behind_one_another(handoff: PlannedHandoff, mode: TransferMode) -> None:
    pulls = handoff.steps * handoff.layers * handoff.together
    assert expected_ns(handoff, mode) == pytest.approx(waited_ns(handoff, mode), rel=1e-6, abs=2 * pulls + 2)


def test_alone_a_prompt_goes_by_layer_and_crowded_in_blocks() -> None:
    assert chosen(PLAIN) is BY_LAYER
    assert chosen(PLAIN._replace(queued_prompts=5.0)) is AGGREGATED, "each report makes all that wait wait"
    assert chosen(PLAIN._replace(queued_prompts=5.0, report_ns=0.0)) is BY_LAYER


def test_short_prompts_and_dear_messages_go_in_blocks() -> None:
    assert chosen(PLAIN._replace(computed_blocks=1, prefill_ns=10 * NS_PER_MS)) is AGGREGATED
    assert chosen(PLAIN._replace(link=replace(QUICK_LINK, start_ns=5.0 * NS_PER_MS))) is AGGREGATED
    assert chosen(PLAIN._replace(report_ns=1.0 * NS_PER_MS)) is AGGREGATED


def test_a_link_slower_than_computing_takes_no_more_messages() -> None:
    """By layer it carries the same bytes with more starts, and all that wait behind wait for them."""
    slow = PLAIN._replace(link=replace(QUICK_LINK, byte_ns=0.3), report_ns=0.0)
    assert chosen(slow) is BY_LAYER and chosen(slow._replace(queued_prompts=20.0)) is AGGREGATED


def test_checksums_of_one_layer_pass_while_another_is_copied() -> None:
    """Half of the link's time is the prefill instance's: by layer the two overlap, in blocks they do not."""
    slow = PLAIN._replace(link=CopyCurve(0.0, 0.0, 1.0), report_ns=0.0)
    halves = slow._replace(seal_byte_ns=0.5)
    assert expected_ns(halves, AGGREGATED) == expected_ns(slow, AGGREGATED)
    hidden_ns = expected_ns(slow, BY_LAYER) - expected_ns(halves, BY_LAYER)
    assert hidden_ns == pytest.approx(0.5 * (LAYERS - 1) / LAYERS * expected_ns(slow, AGGREGATED), rel=0.01)


def test_no_layers_are_promised_by_an_instance_that_reports_none() -> None:
    choice = choose_transfer(PLAIN, reports_layers=False)
    assert choice.mode is AGGREGATED and "by-layer cannot be" in choice.reason


def test_modes_that_cost_alike_take_the_fewest_messages() -> None:
    free = PLAIN._replace(link=CopyCurve(0.0, 0.0, 0.0), report_ns=0.0)
    assert chosen(free) is AGGREGATED
    gained_ns = expected_ns(PLAIN, AGGREGATED) - expected_ns(PLAIN, BY_LAYER)
    assert gained_ns > 0 and chosen(PLAIN._replace(prefill_ns=100 * gained_ns)) is AGGREGATED


def test_handoff_counts_what_both_instances_have() -> None:
    costs = CostModel(machine="m", report_ns=7.0, seal_byte_ns=0.3)
    ask = Ask(1000, block_tokens=32, token_bytes=10, state_blocks=3)
    first = Candidate(0, "p", P, matched_tokens=320, prefill_tokens=2500, costs=costs)
    handoff = handoff_of(ask, first, Candidate(1, "d", D, matched_tokens=96), LAYERS, 256)
    assert (handoff.cached_blocks, handoff.computed_blocks) == (10 - 3, 32 - 10 + 3)
    assert handoff.steps == 3 and handoff.together == 1 and handoff.queued_prompts == 2.5 and handoff.report_ns == 7.0
    assert handoff.seal_byte_ns == 0.3
    assert handoff.prefill_ns == costs.prefill_ns(680, 320) and handoff.block_bytes == 320
    assert handoff_of(ask, first, Candidate(1, "d", D), LAYERS, 0).steps == 1
    assert [handoff_of(ask, first, Candidate(1, "d", D), LAYERS, n).together for n in (256, 1400, 9999)] == [1, 2, 2]
    further = handoff_of(ask, first, Candidate(1, "d", D, matched_tokens=640), LAYERS, 0)
    assert (further.cached_blocks, further.computed_blocks) == (0, 32 - 20 + 3)


# -- in the cluster


def world_of(transfer: TransferPolicy, **fields: object) -> World:
    """``p`` and ``d``, whose link takes as long for a block as ``p`` computes its tokens."""
    link = CopyCurve(0.0, 0.0, 0.8 * NS_PER_MS / GEOMETRY.block_bytes)
    costs = CostModel(machine="m", same_host=link, report_ns=0.0).to_json()
    world = World([], transfer=transfer)
    for name, role in (("p", P), ("d", D)):
        world.add(name, role, costs=costs, **fields)
    return world


def modes_told(world: World) -> list[TransferMode]:
    return [message.transfer for message in world.instances["p"].heard if isinstance(message, Dispatch)]


def story_of(world: World, name: str) -> dict[str, str]:
    return dict(world.clients[name].outputs[0].story)


@pytest.mark.parametrize("reports_layers", [True, False])
def test_auto_is_decided_for_each_request_and_explained(reports_layers: bool) -> None:
    world = world_of(TransferPolicy.AUTO, reports_layers=reports_layers)
    world.ask(a_request("long", list(range(50)) * 4))
    world.run()
    best = BY_LAYER if reports_layers else AGGREGATED
    story = story_of(world, "long")
    assert story["transfer"] == best.value and "expected ms behind the prefill: by-request-agg" in story["transfer_why"]
    assert ("by-layer cannot be" in story["transfer_why"]) is not reports_layers
    assert modes_told(world) == [best]
    world.check_repeatable()


@pytest.mark.parametrize("mode", TransferMode)
def test_a_mode_of_the_operator_is_that_of_all(mode: TransferMode) -> None:
    world = world_of(TransferPolicy(mode.value), reports_layers=True)
    world.ask(a_request("one", list(range(50)) * 4))
    world.run()
    assert modes_told(world) == [mode]
    assert "transfer_why" not in story_of(world, "one")
