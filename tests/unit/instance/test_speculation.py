"""Speculation: which sequences leave the decodes, what a plan says of drafts, what becomes of those that are kept."""

from __future__ import annotations

from typing import Any

import pytest

from instance_world import PROMPT, VOCAB, World, config, request
from memserve.base.types import FinishReason
from memserve.instance.scheduler.sequence import Phase
from memserve.instance.speculation.drafts import Draft, Price
from memserve.instance.speculation.speculation import NEVER, is_predictable
from memserve.protocol.events import RequestCancelled
from memserve_lab.sim.fuzz.scenario_features import Always
from memserve_lab.sim.reference.oracle import lone_tokens

TOKENS = lone_tokens(PROMPT[:4], 12, 0, 0, VOCAB)
"""What the request of these tests draws."""


def world_of(draft_tokens: int = 8, **sizes: Any) -> World:
    """One instance that foretells what :data:`TOKENS` says."""
    world = World(config(draft_tokens=draft_tokens, **sizes), twin=False)
    speculation = world.machine.planner.speculation
    assert speculation is not None
    speculation.propose = lambda sequence, count: Draft(TOKENS[len(sequence.out) + sequence.inflight :][:count])
    speculation.worth = Always()
    return world


def test_a_draft_takes_the_place_of_as_many_steps() -> None:
    plain, drafting = world_of(draft_tokens=1, depth=1), world_of(depth=1)
    for world in (plain, drafting):
        world.arrive(request("a", PROMPT[:4], max_tokens=12))
        if world is plain:
            world.machine.planner.speculation.propose = lambda sequence, count: Draft()
        world.drain()
        assert world.final["a", 0] is FinishReason.LENGTH
    assert drafting.machine.state.counters.steps < plain.machine.state.counters.steps // 2
    assert drafting.machine.state.counters.kept_tokens >= 6


def test_a_sequence_waits_for_its_token_under_way() -> None:
    world = world_of(depth=2)
    world.arrive(request("a", PROMPT[:4], max_tokens=12))
    seen = set()
    while not world.machine.is_idle:
        sequences = [s for group in world.machine.state.groups.values() for s in group.sequences.values()]
        seen |= {(s.phase, s.awaits_tokens, s.inflight) for s in sequences}
        world.step()
    assert (Phase.IDLE, True, 1) in seen
    assert world.got["a", 0] == TOKENS


def test_no_plan_is_made_ahead_of_tokens_that_decide_on_drafts() -> None:
    """Where nothing is to be gained, one is."""
    foretold, unknown = world_of(depth=2), world_of(depth=2)
    unknown.machine.planner.speculation.propose = lambda sequence, count: Draft()
    for world, ahead in ((foretold, 1), (unknown, 2)):
        world.arrive(request("a", PROMPT[:4], max_tokens=12))
        most = 0
        while not world.machine.is_idle:
            most = max(most, len(world.plans) if world.machine.state.decoding.items else 0)
            world.step()
        assert most == ahead


def test_drafts_that_cost_more_than_they_save_are_left_out() -> None:
    world = world_of(depth=1)

    class Dear(Always):
        def draft_price(self, sequences: int) -> Price:
            return Price(1e6, 0.9e6)

    world.machine.planner.speculation.worth = Dear()
    world.arrive(request("a", PROMPT[:4], max_tokens=12))
    world.drain()
    assert not world.machine.state.counters.drafted_tokens and world.got["a", 0] == TOKENS


def test_drafts_end_with_the_block() -> None:
    """None is allocated for tokens that may not come."""
    world = world_of(depth=1, step_tokens=64)
    world.arrive(request("a", PROMPT[:4], max_tokens=12))
    widths = []
    while not world.machine.is_idle:
        for plan in world.plans:
            widths += [(plan.starts[row], len(drafts)) for row, drafts in plan.drafts.items()]
        world.step()
    assert widths and all((start + count) // 4 == start // 4 for start, count in widths)


def test_a_stop_token_among_the_drafts_ends_the_answer() -> None:
    world = world_of(depth=1)
    world.arrive(request("a", PROMPT[:4], max_tokens=12, stops=[TOKENS[3]]))
    world.drain()
    assert world.final["a", 0] is FinishReason.STOP


def test_cancel_with_drafts_in_flight_leaves_nothing() -> None:
    world = world_of(depth=1)
    world.arrive(request("a", PROMPT[:4], max_tokens=12))
    while not any(plan.drafts for plan in world.plans):
        world.step()
    world.asked_to_end.add("a")
    world.post(RequestCancelled("a"))
    world.drain()
    assert world.machine.is_idle and world.machine.state.counters.dropped_tokens


@pytest.mark.parametrize(
    "words", [{"logprobs": 1}, {"beam_width": 2}, {"min_tokens": 2, "stops": [3]}], ids=["logprobs", "beams", "minimum"]
)
def test_draws_that_depend_on_more_are_not_foretold(words: dict[str, Any]) -> None:
    world = world_of()
    world.arrive(request("a", PROMPT[:4], max_tokens=6, **words))
    group = world.machine.state.groups["a"]
    assert not is_predictable(group)
    world.drain()
    assert not world.machine.state.counters.drafted_tokens and NEVER.drafted == 0


def test_story_has_accepted_drafts() -> None:
    world = world_of(depth=1)
    world.arrive(request("a", PROMPT[:4], max_tokens=12))
    world.drain()
    assert world.machine.state.counters.kept_tokens and world.facts.count("drafts_kept") == 1


def test_drafts_leave_what_prompts_need_of_a_step() -> None:
    """With a budget of two tokens a draft would leave nothing, and two tenants' prompts were to get a token each."""
    world = world_of(draft_tokens=1, hbm=16, dram=0, running=2, step_tokens=2, chunk=1, depth=1)
    world.arrive(request("a", PROMPT[:4], max_tokens=12, tenant="other"))
    while not any(plan.drafts for plan in world.plans):
        world.step()
    world.arrive(request("b", PROMPT[:3], max_tokens=2))
    world.arrive(request("c", PROMPT[:2], max_tokens=2, tenant="third"))
    while not world.machine.is_idle:
        assert all(plan.num_tokens <= 2 for plan in world.plans)
        prompts_wait = bool(world.machine.state.prefilling.items)
        world.step()
        assert not (prompts_wait and any(plan.drafts for plan in world.plans))
    assert {name for name, _ in world.final} == {"a", "b", "c"}
