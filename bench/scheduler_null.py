"""The scheduler's own time per step, with a device that does nothing.

``handle(StepFinished)`` handles a finished step *and* makes the next plan, so its time is all that the
machine costs per step. ``decode`` = every sequence decodes; ``held`` = as ``decode``, for a host that takes tokens
late, as the simulator does; ``mixed`` = requests end and new ones with 1,024-token prompts (half of it shared) take
their place, so that prefill chunks run in every step. ``us_per_row``: the time of each further row, from the fewest
running to the most.

    python bench/scheduler_null.py [--json] [--steps 300] [--running 1 32 128 256]
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np
from harness.flags import options, save
from harness.rounds import mean, median, percentile
from harness.tables import show

from memserve.base.config import InstanceConfig, PoolConfig, SchedulerConfig
from memserve.base.types import Request, SamplingParams, StopParams
from memserve.instance.events import Event, RunStep, StepFinished, StepPlan
from memserve.instance.machine import Instance
from memserve.protocol.events import EmitTokens, RequestArrived
from memserve_lab.sim.fast_forward import FastForwardInstance

BLOCK_TOKENS = 32
LONG = 1_000_000
LOADS = ("decode", "held", "mixed")


class Bench:
    """An instance kept at ``running`` sequences by a device that answers at once."""

    def __init__(self, running: int, load: str) -> None:
        self.running, self.load, self.mixed = running, load, load == "mixed"
        blocks = running * (64 if not self.mixed else 48) + 256
        scheduler = SchedulerConfig(max_running=running, max_step_tokens=2048, prefill_chunk_tokens=512)
        config = InstanceConfig(LONG, pool=PoolConfig(blocks, 0), scheduler=scheduler)
        kind = FastForwardInstance if load == "held" else Instance
        self.instance = kind(config, BLOCK_TOKENS)
        self.random = np.random.default_rng(7)
        self.shared = self.random.integers(0, 49_000, 512, dtype=np.int32)
        self.plans: deque[StepPlan] = deque()
        self.arrivals = 0
        self.ended = 0

    def perform(self, event: Event) -> tuple[float, float]:
        """Handle ``event``; returns the seconds that ``handle`` took: by the clock, and of this thread's CPU time."""
        begin_s, begun_cpu = time.perf_counter(), time.thread_time()
        actions = self.instance.handle(event, 0)
        spent = time.perf_counter() - begin_s, time.thread_time() - begun_cpu
        for action in actions:
            if isinstance(action, RunStep):
                self.plans.append(action.plan)
            elif isinstance(action, EmitTokens):
                self.ended += sum(output.finish_reason is not None for output in action.outputs)
        return spent

    def arrive(self) -> None:
        own_tokens = self.random.integers(0, 49_000, 512 if self.mixed else 40, dtype=np.int32)
        prompt = np.concatenate((self.shared, own_tokens)) if self.mixed else own_tokens
        tokens = 64 + self.arrivals % 256 if self.mixed else 1900  # spread lengths, so that endings are spread
        stop = StopParams(max_tokens=tokens, stop_token_ids=() if self.load == "held" else (0, 2))
        name = f"request-{self.arrivals}"
        self.perform(RequestArrived(Request(name, prompt, SamplingParams(seed=self.arrivals), stop)))
        self.arrivals += 1

    def step(self) -> tuple[float, float, int]:
        """The device answers the oldest plan; returns seconds in ``handle`` (clock, CPU) and the plan's rows."""
        plan = self.plans.popleft()
        draws = sum(map(len, plan.sample_slots))
        spent, spent_cpu = self.perform(StepFinished(plan.step_id, [1234] * draws, 40_000_000))
        while self.arrivals - self.ended < self.running:
            self.arrive()
        return spent, spent_cpu, len(plan.slots)

    def measure(self, steps: int) -> dict[str, Any]:
        """Warm up until all sequences run, then time ``steps`` steps."""
        for _ in range(self.running):
            self.arrive()
        for _ in range(self.running + 20 if not self.mixed else 2 * self.running + 50):
            self.step()
        samples = [self.step() for _ in range(steps)]
        spent = [sample[0] * 1e6 for sample in samples]
        cpu = [sample[1] * 1e6 for sample in samples]
        return {
            "running": self.running,
            "load": self.load,
            "rows_mean": round(mean(rows for _, _, rows in samples), 1),
            "us_median": round(median(spent), 1),
            "us_mean": round(mean(spent), 1),
            "cpu_us_mean": round(mean(cpu), 1),
            "us_p99": round(percentile(spent, 0.99), 1),
            "share_of_40ms_step_percent": round(median(spent) / 400, 3),
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
        results = [Bench(running, load).measure(args.steps) for running in sorted(args.running)]
        add_slope(results)
        rows += results
    show(rows, [*rows[0], "us_per_row"])
    save(args, rows)


if __name__ == "__main__":
    main()
