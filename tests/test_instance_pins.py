"""Named prefixes in one instance: they outlive pressure, not their time, and never stand in the way (row M14)."""

from __future__ import annotations

import numpy as np
import pytest

from instance_world import World, building_worlds, request
from memserve.serving import ClockTicked, PrefixPinned, PrefixUnpinned

PREFIX = list(range(1, 17))  # four blocks of four

make = pytest.fixture(params=["twin", "real"])(building_worlds)


def pin(world: World, name: str = "d", tenant: str = "", tokens=PREFIX, ttl_ns: int = 10**6) -> None:
    world.post(PrefixPinned(name, tenant, np.array(tokens, np.int32), ttl_ns))


def warm(world: World, tenant: str = "") -> None:
    run(world, PREFIX, tenant)


def run(world: World, prompt: list[int], tenant: str = "") -> int:
    """Run a request to its end; returns the tokens of its prompt that came from the cache."""
    before = world.machine.stats().cached_tokens
    world.arrive(request(f"r{len(world.requests)}", prompt, max_tokens=2, tenant=tenant))
    world.drain()
    return world.machine.stats().cached_tokens - before


def press(world: World) -> None:
    """Enough other prompts to evict whatever may be evicted."""
    for _ in range(4):
        first = 100 * (len(world.requests) + 1)
        run(world, list(range(first, first + 40)))


def test_a_pinned_prefix_outlives_pressure_and_an_unpinned_one_does_not(make):
    world = make(hbm=16)
    warm(world)
    pin(world)
    assert world.machine.pinned_tokens("d", "") == 16
    press(world)
    assert run(world, [*PREFIX, 20, 21]) == 16
    world.post(PrefixUnpinned("d", ""))
    assert world.machine.pinned_tokens("d", "") == 0
    press(world)
    assert run(world, [*PREFIX, 20, 21]) == 0


def test_a_pin_ends_with_its_time_and_starts_again_when_renewed(make):
    world = make(hbm=16)
    warm(world)
    pin(world, ttl_ns=100)
    pinned_at = world.now
    assert world.machine.next_deadline_ns == pinned_at + 100
    world.now += 60
    pin(world, ttl_ns=100)
    assert world.machine.next_deadline_ns == pinned_at + 160
    world.now = pinned_at + 159
    world.post(ClockTicked())
    assert world.machine.pinned_tokens("d", "") == 16
    world.now += 1
    world.post(ClockTicked())
    assert world.machine.pinned_tokens("d", "") == 0 and world.machine.next_deadline_ns is None


def test_names_of_different_tenants_are_different_names(make):
    world = make(hbm=16)
    warm(world, "ada")
    pin(world, tenant="ada")
    pin(world, tenant="bob")
    assert world.machine.pinned_tokens("d", "ada") == 16
    assert world.machine.pinned_tokens("d", "bob") == 0  # the same tokens, but nothing of bob's is cached
    (kept,) = world.machine.named_prefixes("ada")
    assert (kept.handle, kept.pinned_tokens) == ("d", 16) and world.machine.named_prefixes("bob") == []
    world.post(PrefixUnpinned("d", "bob"))
    assert world.machine.pinned_tokens("d", "ada") == 16
    press(world)
    assert run(world, [*PREFIX, 20], "bob") == 0
    assert run(world, [*PREFIX, 20], "ada") == 16
    world.post(PrefixUnpinned("d", "ada"))


def test_pins_give_way_rather_than_stand_still(make):
    world = make(hbm=16)
    warm(world)
    pin(world)
    run(world, list(range(100, 160)))  # 15 of the 16 blocks
    assert world.machine.pinned_tokens("d", "") == 0


def test_a_failed_step_ends_pins_with_the_cache(make):
    world = make(hbm=16)
    warm(world)
    pin(world)
    world.arrive(request("fails", list(range(200, 230))))
    world.fail()
    assert world.machine.pinned_tokens("d", "") == 0
    world.drain()


def test_only_what_is_cached_is_pinned(make):
    world = make(hbm=16)
    pin(world)
    assert world.machine.pinned_tokens("d", "") == 0 and world.machine.next_deadline_ns is None
    warm(world)
    pin(world, tokens=[*PREFIX, 50, 51, 52, 53, 54])
    assert world.machine.pinned_tokens("d", "") == 16
    world.post(PrefixUnpinned("d", ""))
