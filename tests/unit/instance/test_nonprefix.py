"""Stories of requests that take KV from behind other tokens: what is computed, and what becomes of that KV."""

from __future__ import annotations

import pytest

from instance_world import World, config, plans_of, request, rows
from memserve.protocol.events import RequestCancelled

ONE, TWO = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
FIRST = [0, *ONE, *TWO]
SECOND = [11, 11, 11, *TWO, *ONE, 0, 3, 0, 5, 0]


def served(**sizes):
    """A world that has served ``first``."""
    more = {"hbm": 24, "nonprefix_reuse": True, "nonprefix_recompute": 0.2} | sizes
    world = World(config(**more), 4, twin=False)
    world.arrive(request("first", FIRST, max_tokens=1))
    world.drain()
    return world


@pytest.fixture
def make():
    """Builds such worlds; at the end all is given back."""
    worlds = []

    def build(**sizes):
        worlds.append(served(**sizes))
        return worlds[-1]

    yield build
    for world in worlds:
        world.drain()
        world.check_all_ended()


def reused(world):
    return world.inexact_tokens["second"]


def stories(world, name):
    return dict(fact for group in [world.machine.state.groups[name]] for fact in group.facts)


def test_runs_are_copied_and_holes_computed(make):
    """Two paragraphs of ten tokens in the other order: the first two of each are computed, the others copied."""
    world = make(step_tokens=24, chunk=24)
    (plan, *_) = plans_of(world.arrive(request("second", SECOND, nonprefix_reuse=True)))
    assert [(move.count, move.shift) for move in plan.token_moves] == [(9, -8), (10, 12)]
    assert rows(plan)[0][:3] == (0, 0, 5) and rows(plan)[-1][3] == (0,)
    assert sum(plan.counts) == len(SECOND) - 15
    world.drain()
    assert reused(world) == 15


def test_other_requests_are_planned_as_if_it_were_off(make):
    """Bit for bit: the same plans, for requests that do not ask for it."""
    diaries = []
    for is_on in (False, True):
        world = make(nonprefix_reuse=is_on)
        for name in ("a", "b"):
            world.arrive(request(name, SECOND))
            world.arrive(request(name + "2", [*SECOND, 1], n=2))
        world.drain()
        diaries.append([actions for _, _, actions in world.diary])
    assert diaries[0] == diaries[1]


@pytest.mark.parametrize("chunk", [3, 24])
def test_inexact_kv_is_never_cached(make, chunk):
    """Nor is what is computed behind it, of prompt or answer: the next prompt finds what is before it, exact."""
    world = make(chunk=chunk)
    world.arrive(request("second", SECOND, max_tokens=12, nonprefix_reuse=True))
    world.drain()
    tokens = request("", [*SECOND, *world.got["second", 0]]).prompt
    assert reused(world) and world.machine.pool.match("", tokens) == 4
    world.arrive(request("third", SECOND, max_tokens=6))  # the world compares its tokens
    world.drain()
    sources = world.machine.state.memory.contents.index._sources.values()
    assert sorted(source.label for source in sources) == ["first", "second", "third"]
    (own,) = (source for source in sources if source.label == "second")
    assert own.tokens.tolist() == SECOND[:4]


def test_request_off_a_server_without_it_is_told_why(make):
    world = make(nonprefix_reuse=False)
    world.arrive(request("second", SECOND, nonprefix_reuse=True))
    assert "without --nonprefix-reuse" in stories(world, "second")["nonprefix_reuse"]
    world.drain()
    assert not reused(world)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"n": 2, "beam_width": 2}, "beam search"),
        ({"prompt_logprobs": True}, "whole prompt computed"),
        ({"use_cache": False}, "whole prompt computed"),
    ],
)
def test_what_cannot_be_inexact_is_served_exactly(make, asked, why):
    world = make()
    world.arrive(request("second", SECOND, nonprefix_reuse=True, **asked))
    assert why in stories(world, "second")["nonprefix_reuse"]
    world.drain()
    assert not reused(world)


def test_story_says_where_each_range_came_from(make):
    world = make()
    world.arrive(request("second", SECOND, nonprefix_reuse=True))
    story = stories(world, "second")
    assert story["inexact_ranges"] == "[3, 12) from 11 of first, [13, 23) from 1 of first"
    assert (story["inexact_tokens"], story["inexact_recomputed_tokens"]) == (15, 4)


def test_nothing_found_is_computed_exactly(make):
    world = make()
    world.arrive(request("second", [11] * 20, nonprefix_reuse=True))
    assert "nothing" in stories(world, "second")["nonprefix_reuse"]
    world.drain()
    assert not reused(world)


def test_sequences_of_one_request_share_inexact_kv(make):
    world = make()
    world.arrive(request("second", SECOND, n=3, max_tokens=9, nonprefix_reuse=True))
    world.drain()
    assert reused(world) == 15
    assert world.machine.pool.match("", request("", SECOND).prompt) == 4


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 8])
def test_cancelled_request_leaves_nothing(make, steps):
    world = make(chunk=3)
    world.arrive(request("second", SECOND, max_tokens=9, nonprefix_reuse=True))
    for _ in range(steps):
        world.step()
    world.asked_to_end.add("second")
    world.post(RequestCancelled("second"))
    world.drain()
    world.check_nothing_held()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("steps", [0, 3, 12])
def test_preempted_request_ends_and_caches_nothing_inexact(preemption, steps):
    """Before its prompt is computed it starts over; behind it, its own blocks go to DRAM and come back."""
    world = served(chunk=3, step_tokens=3, dram=24, preemption=preemption, depth=1)
    world.arrive(request("second", SECOND, max_tokens=12, nonprefix_reuse=True))
    for _ in range(steps):
        world.step()
    (sequence,) = world.machine.state.groups["second"].sequences.values()
    is_computed = sequence.inexact.is_behind(sequence.computed)
    world.machine.state.preempt_sequence(sequence)
    is_swapped = bool(sequence.dram_blocks)
    assert is_swapped == (is_computed and preemption == "swap")
    assert (sequence.inexact is not None) == is_swapped
    world.drain()
    assert len(world.got["second", 0]) == 12 and reused(world) == 15
    assert world.machine.pool.match("", request("", SECOND).prompt) == 4
    world.check_nothing_held()


def test_failed_step_starts_over_without_the_lost_sources(make):
    world = make()
    world.arrive(request("second", SECOND, nonprefix_reuse=True))
    world.fail()
    world.drain()
    assert len(world.got["second", 0]) == 5
