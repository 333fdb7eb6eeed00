"""Named prefixes in one instance: they outlive pressure, not their time, and never stand in the way (row M14)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_world import BLOCK, Fleet, fleet_config, stats, tokens_of
from instance_world import PROMPT, World, building_worlds, request
from memserve.base.config import PoolConfig
from memserve.base.types import ClockTicked, Tier
from memserve.base.units import NS_PER_S
from memserve.kv.pool import BlockPool
from memserve.kv.retention import Pins
from memserve.protocol.events import PrefixPinned, PrefixUnpinned
from memserve.protocol.messages import (
    Pin,
    Pinned,
    Unpin,
)

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


def test_pinned_prefix_survives_pressure_unlike_unpinned(make):
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


# -- in a cluster


def test_pinned_prefix_survives_pressure_until_expiry():
    """A document is opened; others fill the cache; its questions still find it."""
    fleet = Fleet(p=fleet_config(hbm=12))
    member = fleet.members["p"]
    for name, start in (("doc", 0), ("noise", 11)):
        fleet.submit(request(name, PROMPT[start : start + 17], max_tokens=2), "p")
        fleet.run()
        if name == "doc":
            member.hear(Pin("doc", "", tokens_of(17), 5 * NS_PER_S))
            assert Pinned("doc", 16) in member.said and stats(fleet, "p").pins == 1
    for number in range(3):
        fleet.submit(request(f"more{number}", PROMPT[20 - number : 38], max_tokens=2), "p")
        fleet.run()
    assert member.machine.pool.match("", tokens_of(17)) == 16
    deadline = member.machine.next_deadline_ns
    fleet.now = deadline
    member.post(ClockTicked())
    assert stats(fleet, "p").pins == 0 and member.machine.next_deadline_ns is None
    fleet.finish()


def test_a_pin_is_renewed_extended_and_given_up():
    """A conversation goes on under one name."""
    fleet = Fleet(p=fleet_config())
    member = fleet.members["p"]
    fleet.submit(request("a", PROMPT[:25], max_tokens=2), "p")
    fleet.run()
    member.hear(Pin("s", "", tokens_of(9), NS_PER_S))
    member.hear(Pin("s", "", tokens_of(25), 9 * NS_PER_S))
    assert [m.tokens for m in member.said if isinstance(m, Pinned)] == [8, 24]
    assert member.machine.pool.report().by_tier[Tier.HBM].blocks_pinned > 0
    member.hear(Unpin("s"))
    member.hear(Unpin("unknown"))
    assert member.machine.pool.report().by_tier[Tier.HBM].blocks_pinned == 0
    member.hear(Pin("nothing", "", np.asarray([9, 9, 9, 9, 9], np.int32), NS_PER_S))
    assert Pinned("nothing", 0) in member.said and member.machine.next_deadline_ns is None
    fleet.finish()


def test_pins_yield_before_everything_stands_still():
    """The pinned document leaves too little memory for a request that was accepted: the promise is broken, and told."""
    fleet = Fleet(p=fleet_config(hbm=8))
    member = fleet.members["p"]
    fleet.submit(request("doc", PROMPT[:21], max_tokens=2), "p")
    fleet.run()
    member.hear(Pin("doc", "", tokens_of(21), 600 * NS_PER_S))
    fleet.submit(request("big", PROMPT[9:33], max_tokens=6), "p")
    fleet.run()
    assert Pinned("doc", 0) in member.said and stats(fleet, "p").pins == 0
    fleet.finish()


class PlainPins:
    """Names with their ends, looked through each time."""

    def __init__(self):
        self.ends = {}

    def due(self, now):
        self.ends = {handle: (tokens, end) for handle, (tokens, end) in self.ends.items() if end > now}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 25), st.booleans()), max_size=60))
@settings(deadline=None, max_examples=60)
def test_pins_are_what_a_plain_dictionary_says(operations):
    """Pinned, renewed, given up and expired at random: how much is kept, until when, and nothing else."""
    pool = BlockPool(PoolConfig(16, 0), BLOCK, "test")
    blocks = pool.allocate(6)
    pool.insert("", tokens_of(24), blocks, 6)
    pool.release(blocks)
    pins, plain, now = Pins(pool), PlainPins(), 0
    for handle, life, tokens, gives_up in operations:
        now += 3
        pins.expire_pins(now)
        plain.due(now)
        if gives_up:
            pins.unpin_prefix(f"h{handle}")
            plain.ends.pop(f"h{handle}", None)
        else:
            kept = pins.pin_prefix(f"h{handle}", "", tokens_of(tokens), now + life)
            assert kept == min(tokens, 24) // BLOCK * BLOCK
            plain.ends.pop(f"h{handle}", None)
            if kept:
                plain.ends[f"h{handle}"] = (kept, now + life)
        longest = max((tokens for tokens, _ in plain.ends.values()), default=0)
        assert pool.report().by_tier[Tier.HBM].blocks_pinned == longest // BLOCK
        assert pins.next_deadline_ns == min((end for _, end in plain.ends.values()), default=None)
        assert len(pins) == len(plain.ends)
        assert all(pins.pinned_tokens(handle) == tokens for handle, (tokens, _) in plain.ends.items())
    assert pins.release_all() == bool(plain.ends) and sorted(pins.lost) == sorted(plain.ends)
    assert pool.clear_cache() == 6 and pins.next_deadline_ns is None
