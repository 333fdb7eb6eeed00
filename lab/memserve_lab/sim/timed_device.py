"""A device that only models the time of computing; and the moments at which tokens were drawn.

A token's number is the number of the step that drew it: so a client that gets several tokens late, at once, still knows
when each was drawn (:class:`Moments`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from memserve.base.types import Tier
from memserve.instance.events import RowFailed, StepFinished, StepPlan
from memserve.kv.costs import CostModel, attended_pairs
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.timed_link import TimedLink

ARRAY_STEPS_MIN = 12
"""From this many steps on, computing their times as an array is faster than one by one."""


class Steps(Protocol):
    """How long steps take, in nanoseconds."""

    def step_ns(self, new_tokens: int, pairs: int, rows: int, context_tokens: int) -> int:
        """Time of a step: ``new_tokens`` of prompts with their ``pairs``, and ``rows`` that attend to
        ``context_tokens``."""

    def decode_line(self, rows: int) -> tuple[float, float]:
        """A step that only decodes ``rows`` sequences: its fixed time, and the time per token attended to."""


class Moments:
    """When clients see the tokens of steps, by number and their own clock. Shared by all devices of a world."""

    __slots__ = ("_seen_ns", "way_ns")

    def __init__(self) -> None:
        self._seen_ns = array("q")
        self.way_ns = 0
        """Time from the end of a step, by the world's clock, until clients see its tokens."""

    def add_moment(self, ends_ns: list[int]) -> list[int]:
        """Steps have ended. Returns their numbers."""
        seen_ns, way_ns = self._seen_ns, self.way_ns
        first = len(seen_ns)
        seen_ns.extend([end_ns + way_ns for end_ns in ends_ns])
        return list(range(first, len(seen_ns)))

    def seen_ns(self, steps: Sequence[int]) -> Iterable[int]:
        """When the tokens of ``steps`` are seen, in rising order."""
        first, end = steps[0], steps[-1] + 1
        if end - first == len(steps):  # consecutive: no other device was computing
            return self._seen_ns[first:end]
        return map(self._seen_ns.__getitem__, steps)


class FittedSteps:
    """Times by measured curves. A step that prefills and decodes reads the weights once."""

    def __init__(self, costs: CostModel) -> None:
        self._prefill, self._decode = costs.prefill, costs.decode

    def step_ns(self, new_tokens: int, pairs: int, rows: int, context_tokens: int) -> int:
        """See :class:`Steps`."""
        prefill, decode = self._prefill, self._decode
        fixed_ns = max(prefill.step_ns if new_tokens else 0.0, decode.step_ns if rows else 0.0)
        computed_ns = prefill.token_ns * new_tokens + prefill.pair_ns * pairs
        return round(fixed_ns + computed_ns + decode.row_ns * rows + decode.context_ns * context_tokens)

    def decode_line(self, rows: int) -> tuple[float, float]:
        return self._decode.step_ns + self._decode.row_ns * rows, self._decode.context_ns


def step_times(machine: Machine) -> Steps:
    """How long steps take on ``machine``: by its roof, or by the curves of its profile."""
    return machine.roof if machine.roof is not None else FittedSteps(machine.costs)


class TimedDevice:
    """Answers each plan with as many tokens as it draws. Requests end only by their length.

    Beams and logprobs are not computed: no workload asks for them.
    """

    def __init__(self, clock: Clock, machine: Machine, moments: Moments, steps: Steps | None = None) -> None:
        self._clock, self._moments = clock, moments
        self._costs = machine.costs
        self._block_bytes = machine.geometry.block_bytes
        self.layers = machine.geometry.num_layers
        self._steps = steps or step_times(machine)
        self.link = TimedLink(machine.geometry, machine.host_rate)
        self.slowness = 1.0
        """The factor on all times; faults make it more than 1."""
        self.busy_ns = 0
        self.spent_ns = 0
        """The time of the step under way."""
        self.copies_ns = 0
        """Of it: of the copies before its rows."""
        self._lost: set[int] = set()  # slots of the step under way

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` takes, its copies before its rows."""
        computed_ns, copied_ns = self._computed_ns(plan), 0
        for copy in plan.copies:
            copied_ns += self._copy_ns(copy.src_tier, copy.dst_tier, len(copy.src))
        self.copies_ns = copied_ns
        self.spent_ns = max(1, self.link.step_ns(plan, computed_ns * self.slowness) + copied_ns)
        return self.spent_ns

    def decode_steps_ns(self, rows: int, context_tokens: int, steps: int) -> list[int]:
        """How long each of ``steps`` decoding steps takes; the first attends to ``context_tokens``."""
        fixed_ns, context_ns = self._steps.decode_line(rows)
        slowness = self.slowness
        if steps < ARRAY_STEPS_MIN:
            ends = range(context_tokens, context_tokens + steps * rows, rows)
            return [max(1, round((fixed_ns + context_ns * context) * slowness)) for context in ends]
        contexts = np.arange(steps, dtype=np.float64) * rows + context_tokens
        spent = np.maximum(np.rint((fixed_ns + context_ns * contexts) * slowness), 1)
        times: list[int] = spent.astype(np.int64).tolist()
        return times

    def _computed_ns(self, plan: StepPlan) -> float:
        reported = self.layers // plan.report_layers if plan.report_layers else 0
        return self._rows_ns(plan) + reported * self._costs.report_ns

    def _rows_ns(self, plan: StepPlan) -> float:
        rows, context, decodes = len(plan.starts), sum(plan.starts), plan.decodes
        new = pairs = 0
        for count, start in zip(plan.counts[decodes:], plan.starts[decodes:], strict=True):
            if count > 1:
                new += count
                pairs += attended_pairs(count, start)
                rows -= 1
                context -= start
        if new:
            return self._steps.step_ns(new, pairs, rows, context + rows)
        fixed_ns, context_ns = self._steps.decode_line(rows) if rows else (0.0, 0.0)
        return fixed_ns + context_ns * (context + rows)

    def _copy_ns(self, src: Tier, dst: Tier, blocks: int) -> int:
        if src == dst:
            return 0
        move_ns = (self._costs.swap_in if src is Tier.DRAM else self._costs.swap_out).ns
        return move_ns(blocks * self._block_bytes, blocks)

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """Each layer of a plan with ``report_layers`` is reported, at equal distances over the step."""
        return True

    def lose_rows(self, plan: StepPlan, slots: Iterable[int]) -> None:
        """They have drawn nothing of meaning."""
        self._lost.update(plan.with_draws(slots))

    def run_plan(self, plan: StepPlan) -> StepFinished:
        """The step has ended now."""
        self.busy_ns += self.spent_ns
        draws = plan.decodes + sum(map(len, plan.sample_slots[plan.decodes :]))
        tokens = self._moments.add_moment([self._clock.now]) * draws if draws else []
        failed, self._lost = {slot: RowFailed("") for slot in self._lost}, set()
        return StepFinished(
            plan.step_id, tokens, self.spent_ns, failed=failed, link=self.link.used, copies_ns=self.copies_ns
        )
