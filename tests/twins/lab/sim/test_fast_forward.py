"""Many like steps in one go (``sim/fast_forward``), beside an ``Instance`` that handles each by itself."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import FinishReason, Request, StopParams
from memserve.instance.events import RunStep, StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.protocol.events import EmitTokens, RequestArrived
from memserve_lab.sim.fast_forward import FastForwardInstance

BLOCK_TOKENS = 4


def step_ns(number: int) -> int:
    """How long that step takes: each longer than the ones before."""
    return 1000 + 300 * number


class Engine:
    """A machine, its device's plans, and what it has said."""

    def __init__(self, blocks: int, depth: int, caching: bool, skips: bool = True) -> None:
        config = InstanceConfig(
            200, "fast-forward", PoolConfig(blocks, 0, caching),
            SchedulerConfig(4, 16, 8, 50, depth, "recompute", "slo", slo_tpot_ns=40_000),
        )  # fmt: skip
        self.machine = (FastForwardInstance if skips else Instance)(config, BLOCK_TOKENS)
        self.plans: list[StepPlan] = []
        self.said: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[str, FinishReason | None] = {}
        self.steps = 0
        self.skipped = 0

    def post(self, event: object) -> None:
        for action in self.machine.handle(event, 0):
            if isinstance(action, RunStep):
                self.plans.append(action.plan)
            elif isinstance(action, EmitTokens):
                self.take(action.outputs)
        self.machine.check_invariants()

    def take(self, outputs) -> None:
        for output in outputs:
            got = self.said.setdefault((output.request_id, output.index), [])
            assert output.offset == len(got)
            got.extend(output.tokens)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output.finish_reason

    def step(self) -> None:
        plan = self.plans.pop(0)
        self.steps += 1
        self.post(StepFinished(plan.step_id, [self.steps] * sum(map(len, plan.sample_slots)), step_ns(self.steps)))

    def take_held(self) -> None:
        """All held tokens, and then no more."""
        for action in self.machine.take_held_tokens():
            self.take(action.outputs)
        assert self.machine.take_held_tokens() == []
        self.machine.check_invariants()

    def fast_forward(self, steps: int) -> None:
        tokens = list(range(self.steps + 1, self.steps + 1 + steps))
        self.steps += steps
        self.skipped += steps
        self.machine.fast_forward(tokens, [step_ns(number) for number in tokens])
        for plan in self.plans:
            plan.step_id += steps
            plan.starts = [start + steps for start in plan.starts]
        self.machine.check_invariants()


def looks_like(one: Engine, other: Engine) -> None:
    """Everything that can be seen of them is equal; what ``one`` has emitted, ``other`` has emitted by then."""
    assert (one.ends, one.steps) == (other.ends, other.steps)
    assert all(other.said[key][: len(said)] == said for key, said in one.said.items())
    assert one.said.keys() == other.said.keys(), "first tokens are emitted at once"
    assert all(one.said[name, 0] == other.said[name, 0] for name in one.ends), (
        "all tokens of a request that has ended are emitted"
    )
    rows = [
        [(plan.step_id, plan.slots, plan.starts, plan.counts, plan.sample_slots) for plan in e.plans]
        for e in (one, other)
    ]
    assert rows[0] == rows[1]
    assert one.machine.stats() == other.machine.stats()
    assert one.machine.report() == other.machine.report()
    inside = [
        [(s.request_id, s.computed, s.left, s.scheduled_step, s.blocks) for s in engine.machine.state.decoding]
        for engine in (one, other)
    ]
    assert inside[0] == inside[1]
    states = [engine.machine.state for engine in (one, other)]
    spare_ns = [state.objectives.slacks_ns(state.decoding.items, 0) for state in states]
    assert spare_ns[0] == spare_ns[1], "what decode steps take is learnt from skipped ones, too"


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=8),
    blocks=st.integers(18, 60),
    depth=st.integers(1, 2),
    caching=st.booleans(),
    gaps=st.lists(st.integers(0, 25), max_size=8),
    most=st.integers(1, 60),
    tells=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_fast_forward_equals_step_by_step(requests, blocks, depth, caching, gaps, most, tells) -> None:
    """Requests come at random between steps; one engine skips steps wherever it may and emits tokens late, the other
    handles each."""
    skipper, walker = Engine(blocks, depth, caching), Engine(blocks, depth, caching, skips=False)
    turns = 0
    coming = list(enumerate(requests))
    pauses = [*gaps, *[3] * len(requests)]
    while coming or skipper.plans:
        if coming:
            number, (prompt, output, family) = coming.pop(0)
            tokens = np.arange(prompt, dtype=np.int32) + 100 * family
            request = Request(str(number), tokens, stop=StopParams(max_tokens=output))
            skipper.post(RequestArrived(request))
            walker.post(RequestArrived(request))
        wanted = pauses.pop(0) if coming else 10_000
        while wanted > 0 and skipper.plans:
            steps = min(skipper.machine.steps_ahead(), wanted, most)
            if steps:
                skipper.fast_forward(steps)
            else:
                steps = 1
                skipper.step()
            for _ in range(steps):
                walker.step()
            wanted -= steps
            looks_like(skipper, walker)
            turns += 1
            if turns % tells == 0:
                skipper.take_held()
                assert skipper.said == walker.said
    assert len(skipper.ends) == len(requests) and skipper.said == walker.said


def test_nearly_all_steps_of_a_lone_request_are_skipped() -> None:
    """The first token, and the plans under way at the end, are handled one by one; the rest is one event."""
    engine = Engine(blocks=60, depth=2, caching=True)
    request = Request("a", np.arange(5, dtype=np.int32), stop=StopParams(max_tokens=100))
    engine.post(RequestArrived(request))
    while engine.plans:
        steps = engine.machine.steps_ahead()
        if steps:
            engine.fast_forward(steps)
        else:
            engine.step()
    assert engine.ends == {"a": FinishReason.LENGTH} and len(engine.said["a", 0]) == 100
    assert engine.skipped >= 95


def test_steps_that_may_end_or_share_are_not_skipped() -> None:
    """A stop token may come with any step; with ``n`` sequences the last block of the prompt is shared at first."""
    engine = Engine(blocks=60, depth=1, caching=True)
    engine.post(RequestArrived(Request("s", np.arange(5, dtype=np.int32), stop=StopParams(50, 0, (999,)))))
    for _ in range(10):
        assert engine.machine.steps_ahead() == 0
        engine.step()
