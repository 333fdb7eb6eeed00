"""Stores in the fuzzed world: what goes wrong with them costs no request, what they keep is what was put there."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from memserve.base.types import Caching, KVGeometry, Tier
from memserve_lab.sim.fuzz.campaign import judge, parse_setting, setting_of
from memserve_lab.sim.fuzz.scenario import MS, Fault, Scenario, Setting, draw
from memserve_lab.sim.fuzz.scenario_features import STORE_FAULTS, draw_store
from memserve_lab.sim.fuzz.stores import KeptTier, StoreMemory, seal_of
from memserve_lab.sim.fuzz.world import World
from memserve_lab.sim.reference.disk import PAGE_BYTES, SECTOR_BYTES, SymbolicDisk
from memserve_lab.sim.reference.oracle import Violation

GEOMETRY = KVGeometry(2, 1, 1, 1, "float32", 4)


def with_store(seed: int, kinds: tuple[str, ...] = ()) -> Scenario:
    """A scenario in which nothing but the store goes wrong, each kind three times."""
    scenario = draw(seed, Setting(mix="1P1D1C", faulty=False))
    store = draw_store(Random(seed))
    scenario.store = replace(store, is_wanted=True, blocks=24, segments=(6,))
    scenario.faults = [
        Fault(kind, at * MS, 100 * MS, number % 3, -1, seed + at)
        for number, kind in enumerate(kinds)
        for at in (20 + 7 * number, 60 + 7 * number, 300 + 7 * number)
    ]
    scenario.faults.sort(key=lambda fault: fault.at_ns)
    return scenario


@pytest.mark.parametrize("kind", STORE_FAULTS)
def test_each_kind_alone_costs_no_request(kind: str) -> None:
    """Everything is answered as if there were no store."""
    world = World(with_store(5, (kind,)))
    world.run_scenario()
    assert world.happened[kind] == 3 and not world.referee.excused
    assert world.referee.tokens_judged > 0


def test_evicted_blocks_are_fetched_from_the_store() -> None:
    """Out of its memory, and from its disks; all blocks were compared at rest."""
    done = [World(with_store(seed)) for seed in range(5, 9)]
    for world in done:
        world.run_scenario()
    totals = sum((world.count_achievements() for world in done), done[0].happened)
    assert totals["store: kv_stored"] and totals["store: kv_lent"] and totals["store: reads_ok"]


def test_memory_of_killed_store_is_requested_and_compared() -> None:
    """It dies now and then when a turn ends, with what the next turn asks for."""
    scenarios = [with_store(seed) for seed in range(5, 13)]
    for scenario in scenarios:
        scenario.store = replace(scenario.store, dies_at_turns=0.1)
    done = [World(scenario) for scenario in scenarios]
    for world in done:
        world.run_scenario()
        assert not world.referee.excused
    totals = sum((world.count_achievements() for world in done), done[0].happened)
    assert totals["store: compared"] and totals["store: kv_lent"], totals


@pytest.mark.parametrize("copies", [1, 2])
def test_several_stores_are_as_one_through_deaths_and_returns(copies: int) -> None:
    """Nothing is wrong, no request is excused; blocks are lent, and move when stores have come or gone."""
    scenarios = [with_store(seed, ("store-kill", "store-cut")) for seed in range(20, 24)]
    for scenario in scenarios:
        scenario.store = replace(scenario.store, count=3, copies=copies, blocks=64)
    done = [World(scenario) for scenario in scenarios]
    for world in done:
        world.run_scenario()
        assert not world.referee.excused and len(world.stores) == 3
    totals = sum((world.count_achievements() for world in done), done[0].happened)
    assert totals["store: kv_lent"] and (totals["store: kv_moved"] or copies == 1), totals


def test_some_seeds_have_several_stores() -> None:
    scenarios = [draw(seed, setting_of(seed)) for seed in range(600)]
    counts = [scenario.store.count for scenario in scenarios if scenario.store is not None]
    assert {1, 2, 3, 4} <= set(counts) and 0.3 < sum(count > 1 for count in counts) / len(counts) < 0.7


def test_some_seeds_have_a_store_and_others_are_what_they_were() -> None:
    scenarios = [draw(seed, setting_of(seed)) for seed in range(400)]
    having = [scenario for scenario in scenarios if scenario.store is not None]
    assert 10 < len(having) < 80
    assert all(scenario.setting.caching is not Caching.OFF for scenario in having)
    for scenario in scenarios:
        kinds = {fault.kind for fault in scenario.faults}
        assert scenario.store is not None or not kinds & set(STORE_FAULTS)


def test_a_seed_with_a_store_gives_the_same_bytes_twice() -> None:
    seed = next(seed for seed in range(100) if draw(seed, setting_of(seed, "swarm")).store is not None)
    logs: list[list[str]] = [[], []]
    for log in logs:
        assert not judge(seed, setting_of(seed, "swarm"), log=log.append).failure
        log[:] = [
            re.sub("index_bytes.*?verify_running", "verify_running", line) for line in log
        ]  # keyed by the process
    assert logs[0] == logs[1] and any("store." in line for line in logs[0])


@pytest.mark.parametrize(
    ("seed", "setting"),
    [
        (523170083, "pd-caching-1/by-request-agg/2C/faulty"),
        (523170892, "pd-caching-1/by-request/2P2D/swarm"),
    ],
)
def test_a_memory_that_is_gone_promises_nothing(seed: int, setting: str) -> None:
    """The host loses power behind an offer; ``Ready`` arrives all the same, and zeros are read."""
    assert not judge(seed, parse_setting(setting)).failure


def test_offer_that_its_sender_has_forgotten_ends_with_its_lease() -> None:
    """The router began anew, and the instance took its stores to be gone before it had ended a plan."""
    assert not judge(5000002292, parse_setting("pd-caching-2/by-request/1C/faulty")).failure


# -- the parts


def test_a_disk_shows_flipped_bits_wherever_the_bytes_are() -> None:
    disk = SymbolicDisk(4 * PAGE_BYTES, Random(1))
    disk.end_write(disk.begin_write(0, bytes(PAGE_BYTES)), True)
    disk.flip_bit(8 * 100 + 3)
    assert disk.read_bytes(100, 1) == b"\x08"
    disk.sync_writes()
    assert disk.read_bytes(100, 1) == b"\x08"
    disk.erase_start(PAGE_BYTES)
    assert disk.read_bytes(0, SECTOR_BYTES) == bytes(SECTOR_BYTES)
    with pytest.raises(Violation, match="whole pages"):
        disk.begin_write(1, bytes(PAGE_BYTES))


def test_pages_of_a_store_come_back_as_they_were_written() -> None:
    memory = StoreMemory(3, GEOMETRY)
    memory.set_page(Tier.DRAM, 2, 1, [5, None, (1 << 61) - 1, 0])
    assert list(memory.page_cells(Tier.DRAM, 2, 1)) == [5, None, (1 << 61) - 1, 0]
    memory.is_held = lambda extent: extent != 64
    with pytest.raises(Violation, match="nothing refers to it"):
        memory.set_page(Tier.DRAM, 1, 0, [1, 2, 3, 4])
    with pytest.raises(Violation, match="DRAM alone"):
        memory.page_cells(Tier.HBM, 0, 0)


def test_next_process_adopts_published_values_unverified() -> None:
    first = KeptTier(4, 64)
    blocks = first._tier.allocate_blocks(2)
    key, seal = bytes(16), seal_of(b"x" * 64)
    assert first.publish(key, 64 * blocks[1], 64, seal=seal)
    second = KeptTier(4, 64, first.entries())
    assert len(second) == 1 and key in second and second._tier.blocks_free == 3
    found = second.find(key, counts=False)
    assert (found.offset, found.seal, found.verified) == (64 * blocks[1], seal, False)
    second.verified(key)
    assert second.find(key, counts=False).verified
