"""Prompt logprobs cost a row of the vocabulary a token: no plan materialises more than a bounded number of them."""

from __future__ import annotations

import numpy as np

from instance_world import config
from memserve.base.config import PROMPT_LOGPROBS_MAX
from memserve.base.types import Request, SamplingParams, StopParams
from memserve.instance.events import Action, Event, RunStep, StepPlan
from memserve.instance.machine import Instance
from memserve.kv.costs import PreemptionCosts
from memserve.protocol.events import RequestArrived
from memserve_lab.sim.reference.device import SymbolicDevice


def echo(name: str, tokens: int, *, logprobs: bool = True) -> Request:
    sampling = SamplingParams(prompt_logprobs=logprobs)
    prompt = (np.arange(tokens, dtype=np.int32) + ord(name)) % 11  # no two share a prefix
    return Request(name, prompt, sampling, StopParams(max_tokens=1))


def plans(actions: list[Action]) -> list[StepPlan]:
    return [action.plan for action in actions if isinstance(action, RunStep)]


def test_no_plan_materialises_more_logits_than_the_limit() -> None:
    options = config(hbm=2000, context=4000, step_tokens=2048, chunk=2048, depth=1)
    machine = Instance(options, 4, PreemptionCosts(block_bytes=1000))
    device = SymbolicDevice(block_tokens=4, hbm_blocks=2000, dram_blocks=0, vocab=12)
    arrivals = [echo("a", 900), echo("b", 900, logprobs=False), echo("c", 700), echo("d", 3)]
    pending: list[Event] = [RequestArrived(request) for request in arrivals]
    reported: list[int] = []
    computed: list[int] = []
    now = 0
    while pending:
        now += 1
        for plan in plans(machine.handle(pending.pop(0), now)):
            reported.append(sum(plan.counts[row] for row in plan.prompt_logprob_rows))
            computed.append(sum(plan.counts))
            pending.append(device.run_plan(plan))
        machine.check_invariants()
    assert sum(reported) == 900 + 700 + 3
    assert max(reported) == PROMPT_LOGPROBS_MAX
    assert max(computed) >= 900, "prompts whose logprobs nobody wants are not cut up"
    assert machine.stats().requests_finished == len(arrivals)
