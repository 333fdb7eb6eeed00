"""A prefix that lies in DRAM is brought up only where a profile does not say that computing it is quicker (row M11)."""

from __future__ import annotations

import random

import pytest

from instance_world import World, building_worlds, request
from memserve.kv.costs import CopyCurve, CostModel, PreemptionCosts, PreemptionModel, PrefillCurve

PREFIX = list(range(1, 17))  # four blocks of four
COMPUTE_NS = 1000  # as long as the literal device takes for any step

make = pytest.fixture(params=["twin", "real"])(building_worlds)


def costs(block_copy_ns: float | None) -> PreemptionCosts:
    """A profile with so much for each block; ``None``: no profile."""
    if block_copy_ns is None:
        return PreemptionCosts(link_bytes_per_s=1, prefill_ns_per_token=1)
    copy = CopyCurve(0.0, block_copy_ns, 0.0)
    profile = CostModel(prefill=PrefillCurve(0.0, COMPUTE_NS / 8, 0.0), swap_in=copy, swap_out=copy)
    return PreemptionCosts(profile=profile)


def run(world: World, prompt: list[int]) -> None:
    world.arrive(request(f"r{len(world.requests)}", prompt, max_tokens=2))
    world.drain()


def put_into_dram(world: World) -> None:
    run(world, PREFIX)
    for first in (100, 200):
        run(world, list(range(first, first + 40)))
    hbm, dram = world.machine.pool.match_blocks("", PREFIX)
    assert dram and hbm + dram == 4


@pytest.mark.parametrize(("block_copy_ns", "brought_up"), [(1.0, True), (1e9, False), (None, True)])
def test_prefix_is_swapped_in_where_that_pays(make, block_copy_ns, brought_up):
    """Without a profile what was kept is used, whatever the guesses say."""
    world = make(costs(block_copy_ns), hbm=12, dram=24)
    put_into_dram(world)
    before = world.machine.stats()
    run(world, [*PREFIX, 30, 31, 32])
    stats = world.machine.stats()
    assert (stats.dram_tokens_reused > before.dram_tokens_reused) == brought_up
    assert (stats.cached_tokens - before.cached_tokens == 16) == brought_up


@pytest.mark.parametrize("seed", range(6))
def test_random_prompts_on_a_slow_link_get_the_right_tokens(make, seed):
    """Recomputing behind a prefix that the index has in DRAM: nothing is leaked, and every token is the lone one's."""
    rng = random.Random(seed)
    world = make(costs(1e9), hbm=12, dram=16)
    met_dram = 0
    for _ in range(30):
        stem = PREFIX[: rng.choice((4, 8, 12, 16))] + [rng.randrange(40, 44)] * rng.randrange(9)
        prompt = [*stem, rng.randrange(50)]
        met_dram += world.machine.pool.match_blocks("", prompt)[1] > 0
        world.arrive(request(f"r{len(world.requests)}", prompt, max_tokens=rng.randrange(1, 6)))
        for _ in range(rng.randrange(4)):
            if world.plans:
                world.step()
    world.drain()
    assert met_dram and world.machine.stats().dram_tokens_reused == 0


def test_reuse_from_dram_is_decided_by_time():
    profile = CostModel(prefill=PrefillCurve(0.0, 1000.0, 0.0), swap_in=CopyCurve(10_000.0, 0.0, 0.0))
    model = PreemptionModel(PreemptionCosts(profile=profile))
    assert model.reusable_blocks(100, 4, 3, 2) == 3  # eight tokens take 8 us, bringing them up 10
    assert model.reusable_blocks(100, 4, 3, 3) == 6
    assert model.reusable_blocks(100, 4, 3, 0) == 3
    assert model.reusable_blocks(12, 4, 0, 3) == 3  # eleven tokens are saved: the last is computed in any case
    model.learn_step(100, 0, 50_000)  # the machine has become quicker
    assert model.reusable_blocks(100, 4, 3, 2) == 3
