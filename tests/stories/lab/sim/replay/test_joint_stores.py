"""Several stores of a replayed cluster as one: hits and balance beside one as large, a death, a return, a join."""

from __future__ import annotations

import dataclasses

import pytest

from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Fault, Setup, StoreSetup, parse_faults
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

MACHINE = dataclasses.replace(machine("llama-3-8b", "h100"), hbm_blocks=200, context_tokens=4000)
BLOCK_BYTES = MACHINE.geometry.block_bytes
PROMPT = 3200
"""Tokens: 100 blocks, half of HBM."""
FIRSTS = range(1, 60_001, 10_000)


def prompts(rounds: int = 2, gap_s: float = 2.0) -> Workload:
    """Six prompts in turn, each of which has left HBM when it comes again."""
    firsts = [first for _ in range(rounds) for first in FIRSTS]
    sessions = tuple(
        Session(f"s{at}", (Turn(Blocks(16, (Span(first, PROMPT),)), 5, due_s=at * gap_s),), history=History.GIVEN)
        for at, first in enumerate(firsts)
    )
    return Workload("blocks", "test", sessions)


def played(workload: Workload, count: int, blocks: int, *faults: Fault, copies: int = 1) -> ReplayWorld:
    setup = Setup(
        {Role.COLOCATED: 1}, MACHINE, cluster=ClusterConfig(store_copies=copies), faults=faults,
        stores=StoreSetup(blocks * BLOCK_BYTES, count=count),
    )  # fmt: skip
    world = ReplayWorld(setup, workload)
    world.run_workload()
    for node in (world.router, *world.instances, *(store for store in world.stores if store.alive)):
        node.machine.check_invariants()
    return world


def cached(world: ReplayWorld) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [served.cached_tokens for served in world.clients.served]


def kept(world: ReplayWorld) -> list[int]:
    return [len(store.machine.values.log) for store in world.stores if store.alive]


ALL = [0] * 6 + [PROMPT - 1] * 6


def test_four_stores_hit_as_one_as_large() -> None:
    one, four = played(prompts(), 1, 1200), played(prompts(), 4, 300)
    assert cached(one) == cached(four) == ALL
    assert sum(kept(four)) == sum(kept(one)) == 600
    assert max(abs(count - 150) for count in kept(four)) < 40


def test_killed_store_costs_no_hit_with_two_copies() -> None:
    """Nor in the five seconds before the router notices: what it does not answer is asked of the other copies."""
    death = Fault("kill", "store1", 13.0, 1e6)
    assert cached(played(prompts(3, 4.0), 4, 600, Fault("kill", "store1", 25.0, 1e6), copies=2)) == ALL + ALL[6:]
    lost = cached(played(prompts(2, 4.0), 4, 600, dataclasses.replace(death, at_s=23.0)))
    assert lost[:6] == ALL[:6] and all(tokens < PROMPT // 2 for tokens in lost[6:])


def test_store_that_comes_back_is_given_its_share() -> None:
    """It was killed with its memory; third copies go."""
    world = played(prompts(8), 4, 600, Fault("kill", "store1", 20.0, 20.0), copies=2)
    assert cached(world) == ALL[:6] + 7 * ALL[6:]
    assert sum(kept(world)) == 1200 and max(abs(count - 300) for count in kept(world)) < 60


def test_joining_store_takes_its_share_and_no_more() -> None:
    world = played(prompts(5), 4, 600, Fault("join", "store4", 20.0, 0.0))
    assert cached(world) == ALL[:6] + 4 * ALL[6:]
    assert sum(kept(world)) == 600 and len(kept(world)) == 5
    moved = sum(store.machine.counters.kv_moved for store in world.stores)
    assert moved == kept(world)[4] and 0.8 < moved / 120 < 1.2


def test_stores_are_named_in_faults() -> None:
    counts = {Role.COLOCATED: 1}
    assert parse_faults("kill:store1@5+2,join:store2@9", counts, stores=2) == (
        Fault("kill", "store1", 5.0, 2.0, 2.0),
        Fault("join", "store2", 9.0, 0.0),
    )
    for text in ("join:store3@9", "join:c1@9", "kill:store2@5+2", "slow:store1@5+2", "kill:store1@5"):
        with pytest.raises(UserError):
            parse_faults(text, counts, stores=2)
    with pytest.raises(UserError):
        parse_faults("join:store0@9", counts)
