"""A device that computes nothing and knows how long it would take; the moments at which tokens were drawn.

A token's number is the number of the step that drew it: so whoever gets a token late, and several at once, can still
say when each was there (:class:`Moments`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from memserve.instance.actions import StepPlan
from memserve.instance.events import StepFinished
from memserve.policy.curves import attended_pairs
from memserve.sim.clock import Clock
from memserve.sim.hardware import Machine
from memserve.types import Tier

StepNs = Callable[[int, int, int, int], int]
"""``(new tokens, their pairs, decoding rows, tokens that those attend to)`` -> nanoseconds."""


class Moments:
    """When steps ended, by number. Shared by all devices of a world."""

    __slots__ = ("ends_ns",)

    def __init__(self) -> None:
        self.ends_ns = array("q")

    def add(self, ends_ns: list[int]) -> list[int]:
        """Steps have ended; their numbers."""
        first = len(self.ends_ns)
        self.ends_ns.extend(ends_ns)
        return list(range(first, first + len(ends_ns)))


def step_times(machine: Machine) -> StepNs:
    """How long steps take on ``machine``: by its roof, or by the curves of its profile."""
    return machine.roof.step_ns if machine.roof is not None else fitted_steps(machine)


def fitted_steps(machine: Machine) -> StepNs:
    """By measured curves. A step of both kinds reads the weights once."""
    prefill, decode = machine.costs.prefill, machine.costs.decode

    def step_ns(new_tokens: int, pairs: int, rows: int, context_tokens: int) -> int:
        fixed_ns = max(prefill.step_ns if new_tokens else 0.0, decode.step_ns if rows else 0.0)
        computed_ns = prefill.token_ns * new_tokens + prefill.pair_ns * pairs
        return round(fixed_ns + computed_ns + decode.row_ns * rows + decode.context_ns * context_tokens)

    return step_ns


class TimedDevice:
    """Answers each plan with as many tokens as it draws. Requests end by their length: nothing stops them earlier.

    Beams and logprobs are not computed: no workload asks for them.
    """

    layers = 1

    def __init__(self, clock: Clock, machine: Machine, moments: Moments, steps: StepNs | None = None) -> None:
        self._clock, self._moments = clock, moments
        self._costs = machine.costs
        self._block_bytes = machine.geometry.block_bytes
        self._steps = steps or step_times(machine)
        self.slowness = 1.0
        """Faults make it more than 1."""
        self.busy_ns = 0
        self._spent_ns = 0

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` takes, its copies before its rows."""
        rows, tokens = len(plan.slots), sum(plan.counts)
        if tokens == rows:
            computed_ns = self._steps(0, 0, rows, sum(plan.starts) + rows) if rows else 0
        else:
            computed_ns = self._mixed_ns(plan)
        copied_ns = sum(self._copy_ns(copy.src_tier, copy.dst_tier, len(copy.src)) for copy in plan.copies)
        self._spent_ns = max(1, round((computed_ns + copied_ns) * self.slowness))
        return self._spent_ns

    def decode_ns(self, rows: int, context_tokens: int) -> int:
        """The same for a plan of nothing but ``rows`` that decode."""
        return max(1, round(self._steps(0, 0, rows, context_tokens) * self.slowness))

    def _mixed_ns(self, plan: StepPlan) -> int:
        new = pairs = rows = context = 0
        for start, count in zip(plan.starts, plan.counts, strict=True):
            if count == 1:
                rows += 1
                context += start + 1
            else:
                new += count
                pairs += attended_pairs(count, start)
        return self._steps(new, pairs, rows, context)

    def _copy_ns(self, src: Tier, dst: Tier, blocks: int) -> int:
        if src == dst:
            return 0
        move_ns = self._costs.swap_in_ns if src is Tier.DRAM else self._costs.swap_out_ns
        return move_ns(blocks * self._block_bytes, blocks)

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """Layers are not looked at one by one: the end of the step tells of all."""
        return False

    def run(self, plan: StepPlan) -> StepFinished:
        """It has ended now."""
        self.busy_ns += self._spent_ns
        draws = sum(map(len, plan.sample_slots))
        tokens = self._moments.add([self._clock.now]) * draws if draws else []
        return StepFinished(plan.step_id, tokens, self._spent_ns)
