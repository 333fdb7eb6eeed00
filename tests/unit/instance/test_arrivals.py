"""Blocks that come up beside the rows of plans: no more with each than the link carries."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.config import PoolConfig, SchedulerConfig
from memserve.base.types import Request, SamplingParams, StopParams, Tier
from memserve.base.units import NS_PER_S
from memserve.instance.events import StepPlan
from memserve.instance.layerwise.budget import LayerBudget, LinkRate
from memserve.instance.layerwise.copies import SwapIns
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.kv.costs import PreemptionCosts, PreemptionModel
from memserve.kv.pool import BlockPool

LAYERS = 3


def parked(pool: BlockPool, name: str, blocks: int) -> Sequence:
    prompt = np.arange(4 * blocks, dtype=np.int32)
    sequence = Sequence(Group(Request(name, prompt, SamplingParams(), StopParams(max_tokens=4)), 0, 4, 0), 0)
    dram_blocks = pool.allocate_dram_ids(blocks)
    assert dram_blocks is not None
    sequence.dram_blocks = dram_blocks.tolist()
    return sequence


def moved(plan: StepPlan) -> list[int]:
    """HBM blocks that the copies of a plan fill."""
    assert all((order.src_tier, order.dst_tier) == (Tier.DRAM, Tier.HBM) for order in plan.moves)
    pages = [page for order in plan.moves for page in order.dst]
    assert len(pages) % LAYERS == 0
    return [page // LAYERS for page in pages[::LAYERS]]


def test_a_plan_copies_what_the_link_carries_beside_its_rows() -> None:
    pool = BlockPool(PoolConfig(20, 20), 4, "m")
    arrivals = SwapIns(pool, LAYERS)
    first, second = parked(pool, "first", 7), parked(pool, "second", 3)
    plans = [StepPlan(number) for number in range(5)]
    arrivals.continue_copies(plans[0], 4)
    assert arrivals.start_swap_in(first) and arrivals.start_swap_in(second)
    arrivals.on_plan_made()
    for plan in plans[1:3]:
        arrivals.continue_copies(plan, 4)
        arrivals.check_invariants()
        arrivals.on_plan_made()
    assert [len(moved(plan)) for plan in plans[:3]] == [4, 4, 2], "one after the other"
    assert [block for plan in plans for block in moved(plan)] == [*first.blocks, *second.blocks]
    assert arrivals.is_arriving(second) and not arrivals.is_arriving(first), "the first is up with the plan before"
    arrivals.continue_copies(plans[3], 0)
    assert not arrivals and pool.available(Tier.DRAM) == 20
    third = parked(pool, "third", 5)
    assert arrivals.start_swap_in(third) and len(moved(plans[3])) == 1, (
        "whatever the link is said to carry, something comes"
    )
    arrivals.continue_copies(plans[4], None)
    assert len(moved(plans[4])) == 4, "where no row waits, everything comes"


def test_cancelled_swap_in_leaves_all_blocks_in_dram() -> None:
    pool = BlockPool(PoolConfig(20, 20), 4, "m")
    arrivals = SwapIns(pool, LAYERS)
    sequence, other = parked(pool, "called off", 6), parked(pool, "other", 2)
    dram_blocks = list(sequence.dram_blocks)
    plans = [StepPlan(0), StepPlan(1)]
    arrivals.continue_copies(plans[0], 4)
    assert arrivals.start_swap_in(sequence)
    arrivals.on_plan_made()
    arrivals.continue_copies(plans[1], 4)
    assert arrivals.start_swap_in(other)
    assert arrivals.cancel_swap_in(sequence) == dram_blocks
    assert len(moved(plans[0])) == 4, "a plan that was made stays as it is"
    assert moved(plans[1]) == other.blocks
    assert pool.available() == 20 - len(other.blocks)


def test_no_room_is_an_answer() -> None:
    pool = BlockPool(PoolConfig(4, 20), 4, "m")
    arrivals = SwapIns(pool, LAYERS)
    sequence = parked(pool, "too long", 5)
    arrivals.continue_copies(StepPlan(0), None)
    assert not arrivals.start_swap_in(sequence) and not arrivals and len(sequence.dram_blocks) == 5


@pytest.mark.parametrize("lower_dtype", ["auto", "int8"])
def test_lower_dtype_sequence_is_not_handed_over(lower_dtype: str) -> None:
    """A sequence that is handed over may lie by layer, unless DRAM has it in a form that no other instance knows."""
    pool = BlockPool(PoolConfig(20, 20, lower_dtype=lower_dtype), 4, "m")
    costs, budget = PreemptionModel(PreemptionCosts()), LayerBudget(LAYERS, 64, LinkRate(1e9), NS_PER_S)
    placer = LayerPlacer(pool, budget, SchedulerConfig(max_step_tokens=16, steps_in_flight=1, layerwise="auto"), costs)
    sequence = parked(pool, "leaves", 3)
    assert placer.may_offload(sequence)
    sequence.group.tokens_here = 1
    assert placer.may_offload(sequence) == (lower_dtype == "auto")
