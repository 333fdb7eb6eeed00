"""Hints on KV in instances: what each does to the tiers, what becomes of it, and what it must not take from others."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_world import BLOCK, GEOMETRY, Fleet, fleet_config, stats, tokens_of
from geometries import SHAPES
from instance_world import PROMPT, World, config, request
from memserve.base.types import ClockTicked, Tier
from memserve.base.units import NS_PER_S
from memserve.protocol.events import PrefixPinned
from memserve.protocol.kv_hints import HintAction, HintOutcome, KvHint, KvHintDone, KvHinted
from memserve.protocol.messages import Pin, Pinned, Unpin
from memserve.protocol.peers import Holder, Peer

PREFIX = list(range(1, 17))  # four blocks of four


def world_of(**sizes) -> World:
    return World(config(**{"hbm": 16, **sizes}), BLOCK, twin=False)


def run(world: World, prompt: list[int]) -> int:
    """Run a request to its end; returns the tokens of its prompt that came from the cache."""
    before = world.machine.stats().cached_tokens
    world.arrive(request(f"r{len(world.requests)}", prompt, max_tokens=2))
    world.drain()
    return world.machine.stats().cached_tokens - before


def give(world: World, action: HintAction, tokens=PREFIX, name: str = "h", **terms):
    hint_id = f"{action.value}{world.now}"
    tokens = np.array(tokens, np.int32) if tokens is not None else None
    world.post(KvHinted(hint_id, action, "", name, tokens, **terms))
    result = world.machine.hints.results.result_of(hint_id)
    world.drain()
    return result.outcome.value, result.tokens, result.reason


def press(world: World) -> None:
    for _ in range(4):
        first = 100 * (len(world.requests) + 1)
        run(world, list(range(first, first + 40)))


def tiers(world: World, tokens=PREFIX) -> tuple[int, int]:
    return world.machine.pool.match_kv_blocks("", np.array(tokens, np.int32))


def test_a_retained_prefix_outlives_pressure_until_it_lapses():
    world = world_of()
    run(world, PREFIX)
    assert give(world, HintAction.RETAIN, ttl_ns=1000, priority=1.0) == ("accepted", 16, "")
    press(world)
    assert run(world, [*PREFIX, 20]) == 16
    world.now += 1000
    world.post(ClockTicked())
    press(world)
    assert run(world, [*PREFIX, 20]) == 0


def test_a_retained_prefix_gives_way_to_a_request_that_needs_it():
    """Unlike a pin it never makes a request wait."""
    world = world_of()
    run(world, PREFIX)
    give(world, HintAction.RETAIN, ttl_ns=10**6)
    assert world.machine.pool.available() == 16
    run(world, list(range(100, 160)))
    assert world.machine.pinned_tokens("h", "") == 0 and world.machine.stats().cached_tokens == 0


def test_each_outcome_says_why():
    world = world_of()
    assert give(world, HintAction.RETAIN, ttl_ns=10**6)[0] == "missing"
    assert give(world, HintAction.DEMOTE)[0] == "missing"
    assert give(world, HintAction.RELEASE, tokens=None)[::2] == (
        "missing", "the name keeps no KV: say which tokens are meant",
    )  # fmt: skip
    run(world, PREFIX)
    outcome, tokens, reason = give(world, HintAction.DEMOTE)
    assert (outcome, tokens) == ("rejected", 0) and "--dram-memory" in reason
    outcome, _, reason = give(world, HintAction.SHARE, destination="p2")
    assert outcome == "rejected" and reason == "there is no other instance"
    longer = [*PREFIX, *range(50, 60)]
    outcome, tokens, reason = give(world, HintAction.RETAIN, tokens=longer, ttl_ns=10**6)
    assert (outcome, tokens, reason) == ("clipped", 16, "no more of it is cached")


def test_a_full_quota_rejects_and_says_so():
    world = world_of(hbm=8)  # 16 tokens may be retained
    run(world, PREFIX[:12])
    assert give(world, HintAction.RETAIN, PREFIX[:12], "a", ttl_ns=10**6, priority=5.0)[0] == "accepted"
    run(world, list(range(60, 72)))
    outcome, tokens, reason = give(world, HintAction.RETAIN, list(range(60, 72)), "b", ttl_ns=10**6, priority=1.0)
    assert (outcome, tokens) == ("rejected", 0) and "quota" in reason


@pytest.mark.parametrize("retained", [False, True])
def test_a_prefix_goes_down_and_comes_up_when_it_is_told(retained):
    world = world_of(dram=16)
    run(world, PREFIX)
    if retained:
        give(world, HintAction.RETAIN, ttl_ns=10**6)
    assert give(world, HintAction.DEMOTE) == ("accepted", 16, "")
    assert tiers(world) == (0, 4)
    assert world.machine.pinned_tokens("h", "") == 16 * retained
    steps = world.machine.stats().steps
    assert give(world, HintAction.PREFETCH) == ("accepted", 16, "")
    assert tiers(world) == (4, 0)
    assert world.machine.stats().steps > steps and not world.machine.pool.has_copies, "no plan has copied it"
    assert run(world, [*PREFIX, 20]) == 16


def test_a_prefetch_takes_nothing_that_is_kept():
    world = world_of(hbm=8, dram=16)
    run(world, PREFIX)
    give(world, HintAction.DEMOTE)
    other = list(range(100, 124))
    run(world, other)  # six blocks and a part
    world.post(PrefixPinned("pinned", "", np.array(other, np.int32), 10**6))
    outcome, tokens, reason = give(world, HintAction.PREFETCH)
    assert outcome == "clipped" and 0 < tokens < 16 and "no room" in reason
    assert tiers(world, other)[0] == 6


def test_a_release_ends_the_name_and_lets_it_go_first():
    world = world_of()
    run(world, PREFIX)
    run(world, list(range(60, 76)))
    give(world, HintAction.RETAIN, list(range(60, 76)), ttl_ns=10**6)
    assert give(world, HintAction.RELEASE, tokens=None)[0] == "accepted"
    assert world.machine.pinned_tokens("h", "") == 0
    run(world, list(range(100, 136)))  # one block more than is free
    assert tiers(world)[0] == 4 and tiers(world, list(range(60, 76)))[0] < 4


# -- in a cluster


def hints_of(fleet, name):
    return [message for message in fleet.members[name].said if isinstance(message, KvHintDone)]


def test_a_pin_with_a_priority_is_a_retained_prefix():
    fleet = Fleet(p=fleet_config(hbm=12))
    member = fleet.members["p"]
    fleet.submit(request("doc", PROMPT[:17], max_tokens=2), "p")
    fleet.run()
    member.hear(Pin("doc", "", tokens_of(17), 5 * NS_PER_S, 2.0))
    assert Pinned("doc", 16) in member.said and stats(fleet, "p").pins == 0
    assert member.machine.pool.report().by_tier[Tier.HBM].blocks_pinned == 0
    assert member.machine.pool.retained.retained_tokens("doc") == 16
    member.hear(Unpin("doc"))
    assert len(member.machine.pool.retained) == 0
    fleet.finish()


@pytest.mark.parametrize("name", ["tiny", *SHAPES])
def test_a_prefetch_fetches_from_the_holder_that_has_it(name):
    """Before any request: it finds all of the prompt, and the holder keeps its own."""
    geometry = SHAPES[name].kv if name in SHAPES else GEOMETRY
    block = geometry.block_tokens
    prompt = [1 + place % 30 for place in range(4 * block + 1)]
    fleet = Fleet(geometry, p=fleet_config(context=8 * block), q=fleet_config(context=8 * block))
    fleet.submit(request("doc", prompt, max_tokens=2), "p")
    fleet.run()
    tokens = np.array(prompt, np.int32)
    holders = (Holder(Peer("p", 1), 4 * block),)
    fleet.members["q"].hear(KvHint("h1", "prefetch", "", tokens, holders))
    assert not hints_of(fleet, "q"), "nothing has come yet"
    fleet.run()
    assert hints_of(fleet, "q") == [KvHintDone("h1", "accepted", 4 * block)]
    assert fleet.members["q"].machine.pool.match("", tokens) == 4 * block
    assert fleet.members["p"].machine.pool.match("", tokens) == 4 * block
    fleet.finish()


def test_a_prefetch_whose_holder_dies_is_answered():
    fleet = Fleet(p=fleet_config(), q=fleet_config())
    fleet.submit(request("doc", PROMPT[:17], max_tokens=2), "p")
    fleet.run()
    fleet.members["q"].hear(KvHint("h1", "prefetch", "", tokens_of(17), (Holder(Peer("p", 1), 16),)))
    fleet.kill("p")
    fleet.run()
    assert [(m.hint_id, m.outcome) for m in hints_of(fleet, "q")] == [("h1", HintOutcome.MISSING)]
    assert not fleet.members["q"].machine.link.fetches.trial_ids
    fleet.finish()


def test_unknown_actions_and_absent_stores_are_rejected():
    fleet = Fleet(p=fleet_config())
    fleet.submit(request("doc", PROMPT[:17], max_tokens=2), "p")
    fleet.run()
    fleet.members["p"].hear(KvHint("h1", "compress", "", tokens_of(17)))
    fleet.members["p"].hear(KvHint("h2", "share", "", tokens_of(17)))
    answers = hints_of(fleet, "p")
    assert [(m.hint_id, m.outcome) for m in answers] == [("h1", "rejected"), ("h2", "rejected")]
    assert "compress" in answers[0].reason and answers[1].reason == "there is no store"
    fleet.finish()
