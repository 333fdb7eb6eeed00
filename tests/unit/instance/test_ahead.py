"""The next step is planned shortly before the device needs it, and not a step earlier."""

from __future__ import annotations

import numpy as np

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import ClockTicked, Request, SamplingParams, StopParams
from memserve.base.units import NS_PER_MS
from memserve.instance.events import Action, RunStep, StepFinished, StepPlan
from memserve.instance.machine import AHEAD_MAX_NS, Instance
from memserve.kv.costs import CostModel, PreemptionCosts, PrefillCurve
from memserve.protocol.events import RequestArrived

TOKEN_NS = NS_PER_MS


def new_instance(costs: PreemptionCosts | None = None) -> Instance:
    """A token of a prompt takes a millisecond, a chunk of 32 more than is planned ahead."""
    scheduler = SchedulerConfig(max_running=8, max_step_tokens=32, prefill_chunk_tokens=32)
    known = PreemptionCosts(profile=CostModel(prefill=PrefillCurve(0.0, TOKEN_NS, 0.0)))
    return Instance(InstanceConfig(512, pool=PoolConfig(64), scheduler=scheduler), 4, costs or known)


def arrival(name: str, tokens: int, tenant: str = "") -> RequestArrived:
    prompt = np.arange(tokens, dtype=np.int32) % 50
    return RequestArrived(Request(name, prompt, SamplingParams(), StopParams(max_tokens=4), tenant=tenant))


def plans(actions: list[Action]) -> list[StepPlan]:
    return [action.plan for action in actions if isinstance(action, RunStep)]


def test_next_plan_is_made_shortly_before_a_long_step_ends() -> None:
    it = new_instance()
    [first] = plans(it.handle(arrival("long", 96), 0))
    assert sum(first.counts) == 32 and it.next_deadline_ns == 32 * TOKEN_NS - AHEAD_MAX_NS
    assert not plans(it.handle(ClockTicked(), 5 * NS_PER_MS)), "the device has enough to do"
    assert not plans(it.handle(arrival("short", 3, "another"), 6 * NS_PER_MS))
    [second] = plans(it.handle(ClockTicked(), 32 * TOKEN_NS - AHEAD_MAX_NS))
    assert 3 in second.counts, "what came meanwhile has its row in the very next step"
    assert not plans(it.handle(StepFinished(first.step_id, [], 32 * TOKEN_NS), 32 * TOKEN_NS))
    assert it.next_deadline_ns == (32 + sum(second.counts)) * TOKEN_NS - AHEAD_MAX_NS


def test_a_step_that_ends_early_leaves_no_gap() -> None:
    it = new_instance()
    [first] = plans(it.handle(arrival("long", 96), 0))
    [second] = plans(it.handle(StepFinished(first.step_id, [], 1), 7 * NS_PER_MS))
    assert sum(second.counts) == 32


def test_short_steps_and_unknown_ones_are_planned_ahead() -> None:
    it = new_instance(PreemptionCosts())
    first, second = plans(it.handle(arrival("long", 96), 0))
    assert sum(first.counts) == sum(second.counts) == 32, "nothing is known of this device's speed"
    quick = PreemptionCosts(profile=CostModel(prefill=PrefillCurve(0.0, 1000.0, 0.0)))
    assert len(plans(new_instance(quick).handle(arrival("long", 96), 0))) == 2
