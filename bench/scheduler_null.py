"""The scheduler's own time per step, with a device that does nothing.

``handle(StepFinished)`` handles a finished step *and* makes the next plan, so its time is all that the
machine costs per step. ``decode`` = every sequence decodes; ``held`` = as ``decode``, for a host that takes tokens
late, as the simulator does; ``mixed`` = requests end and new ones with 1,024-token prompts (half of it shared) take
their place, so that prefill chunks run in every step. ``us_per_row``: the time of each further row, from the fewest
running to the most. ``scheduler_rivals.py`` sets vLLM's scheduler beside it.

    python bench/scheduler_null.py [--json] [--steps 300] [--running 1 32 128 256]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from harness.flags import options, save
from harness.rounds import Timer
from harness.scheduling import DRAWN_TOKEN, STOP_TOKENS, MadeRequest, Shape, StepDriver
from harness.tables import show

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import Request, SamplingParams, StopParams
from memserve.instance.events import RunStep, StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.protocol.events import EmitTokens, RequestArrived
from memserve_lab.sim.fast_forward import FastForwardInstance

LONG = 1_000_000
LOADS = ("decode", "held", "mixed")


class InstanceDriver(StepDriver):
    """memserve's instance machine."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        scheduler = SchedulerConfig(
            max_running=shape.running, max_step_tokens=shape.step_tokens, prefill_chunk_tokens=shape.chunk_tokens
        )
        config = InstanceConfig(LONG, pool=PoolConfig(shape.blocks, 0), scheduler=scheduler)
        self._is_held = shape.load == "held"
        kind = FastForwardInstance if self._is_held else Instance
        self._instance = kind(config, shape.block_tokens)
        self._plans: deque[StepPlan] = deque()

    def add_request(self, request: MadeRequest, timer: Timer) -> None:
        stop = StopParams(max_tokens=request.answer_tokens, stop_token_ids=() if self._is_held else STOP_TOKENS)
        event = RequestArrived(Request(request.name, request.prompt, SamplingParams(seed=request.number), stop))
        self._perform(timer(self._instance.handle, event, 0))

    def finish_step(self, timer: Timer) -> tuple[int, int]:
        plan = self._plans.popleft()
        draws = sum(map(len, plan.sample_slots))
        event = StepFinished(plan.step_id, [DRAWN_TOKEN] * draws, 40_000_000)
        self._perform(timer(self._instance.handle, event, 0))
        return len(plan.slots), plan.num_tokens

    def _perform(self, actions: Iterable[object]) -> None:
        for action in actions:
            if isinstance(action, RunStep):
                self._plans.append(action.plan)
            elif isinstance(action, EmitTokens):
                self.ended += sum(output.finish_reason is not None for output in action.outputs)


def measure(running: int, load: str, steps: int) -> dict[str, Any]:
    """Warm up until all sequences run, then time ``steps`` steps."""
    driver = InstanceDriver(Shape(running, load, 1024 if load == "mixed" else 40))
    driver.warm_up()
    figures = driver.measure_steps(steps)
    return {
        "running": running,
        "load": load,
        "rows_mean": figures["rows"],
        "us_median": round(figures["us_median"], 1),
        "us_mean": round(figures["step_us"], 1),
        "cpu_us_mean": round(figures["step_cpu_us"], 1),
        "us_p99": round(figures["us_p99"], 1),
        "share_of_40ms_step_percent": round(figures["us_median"] / 400, 3),
    }


def add_slope(results: list[dict[str, Any]]) -> None:
    """Add the time per row to the record of the largest batch."""
    first, last = results[0], results[-1]
    rows = last["rows_mean"] - first["rows_mean"]
    if rows > 0:
        last["us_per_row"] = round((last["us_median"] - first["us_median"]) / rows, 3)


def main() -> None:
    args = options(__doc__, steps=300, running=[1, 32, 128, 256])
    rows = []
    for load in LOADS:
        results = [measure(running, load, args.steps) for running in sorted(args.running)]
        add_slope(results)
        rows += results
    show(rows, [*rows[0], "us_per_row"])
    save(args, rows)


if __name__ == "__main__":
    main()
