"""memserve's scheduler beside vLLM's: the same requests, no model on either side, in turns round by round.

A step is what the scheduler's process spends between a device's answer and the next plan: memserve's
``handle(StepFinished)``; vLLM's ``update_from_output`` and ``schedule``; and on both sides what arrivals take
(``handle(RequestArrived)``; ``Request`` with its blocks' hashes and ``add_request``). In it are the stop rule, the
outputs, the blocks of new tokens, prefix look-up and insert, and the next plan's rows. Not in it: to make the device's
answer, to send anything, detokenizing. Prefix caching is on in both, with blocks of ``--block-tokens``.

``decode`` = all sequences decode; ``mixed`` = requests end after 64 to 319 tokens, and new ones take their place,
half of whose prompt is common to all. ``--budgets``: tokens of a step, all of which one prompt may have. Where prompts
come sooner than the budget allows, fewer sequences decode than run: ``rows`` and ``tokens`` say what a step had.

Figures are CPU time of the thread (``--clock``: by the clock), the mean of a round's steps; medians of rounds, and the
median of the rounds' ratios. ``share``: of a step of ``--step-ms`` on the device.

    python bench/scheduler_rivals.py --vllm PYTHON [--json] [--quick] [--rounds 5] [--steps 100] [--clock]
        [--step-ms 10] [--running 32,256] [--prompts 512,4096] [--budgets 512,2048,8192] [--block-tokens 32]
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from typing import IO, Any

from harness import BENCH
from harness.flags import Commas, options, save
from harness.processes import LineChild, without_path
from harness.rounds import median, medians, ratio, turns
from harness.scheduling import Shape
from harness.tables import Table
from scheduler_null import InstanceDriver

CLOCK = (False, "figures by the clock, where nothing else runs")
NAMES = ("memserve", "vLLM", "vLLM async")
COLUMNS = {
    "load": "{load}", "running": "{running}", "prompt": "{prompt_tokens}", "budget": "{step_tokens}",
    "engine": "{engine}", "rows": "{rows:.0f}", "tokens": "{tokens:.0f}", "us a step": "{figure_us:,.0f}",
    "share": "{share:.1%}", "times memserve's": "{ratio:.1f}",
}  # fmt: skip
FIGURES = ("rows", "tokens", "arrivals", "us", "cpu_us", "step_us", "step_cpu_us", "us_median")


class VllmCore:
    """vLLM's process, which works only while it is asked."""

    def __init__(self, python: str, log: IO[str]) -> None:
        """``log``: what vLLM prints, of which only a failure is of interest."""
        self._log = log
        command = (python, str(BENCH / "vllm_core.py"))
        self._child = LineChild(*command, env=without_path(), stderr=log)
        if not self._child.hello:
            raise SystemExit(f"{python} has no vLLM that works: {self._last_words()}")
        self.version = json.loads(self._child.hello)["version"]

    def call(self, method: str, /, **arguments: Any) -> Any:
        """A method of ``vllm_core.Commands``."""
        try:
            return json.loads(self._child.ask(json.dumps({"call": method, **arguments})))
        except SystemExit as end:
            raise SystemExit(f"{end}: {self._last_words()}") from end

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-20:])


@contextmanager
def vllm_core(python: str) -> Iterator[VllmCore]:
    """That process, by the Python that can import vllm."""
    with tempfile.TemporaryFile("w+") as log:
        core = VllmCore(python, log)
        try:
            yield core
        finally:
            core.close()


def shapes_of(args: Namespace) -> Iterator[Shape]:
    """All that are measured. Decoding does not depend on the budget, so it has one."""
    for running, prompt in product(args.running, args.prompts):
        budget = max(args.budgets)
        yield Shape(running, "decode", prompt, budget, budget, args.block_tokens)
    for running, prompt, budget in product(args.running, args.prompts, args.budgets):
        yield Shape(running, "mixed", prompt, budget, budget, args.block_tokens)


def measure_shape(shape: Shape, core: VllmCore, args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """Figures of each engine, round by round."""
    driver = InstanceDriver(shape)
    driver.warm_up()
    core.call("build_schedulers", shape=asdict(shape))
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for _, name in turns(args.rounds, NAMES):
        if name == "memserve":
            figures = driver.measure_steps(args.steps)
        else:
            figures = core.call("measure_steps", name=name, steps=args.steps)
        results[name].append(figures)
    return results


def points_of(shape: Shape, results: dict[str, list[dict[str, Any]]], args: Namespace) -> Iterator[dict[str, Any]]:
    """One record an engine."""
    figure = "us" if args.clock else "cpu_us"
    base = [figures[figure] for figures in results["memserve"]]
    for name, rounds in results.items():
        point: dict[str, Any] = {**asdict(shape), "engine": name}
        point |= {key: round(value, 3) for key, value in medians(rounds).items() if key in FIGURES}
        values = [figures[figure] for figures in rounds]
        point["figure_us"], point["ratio"] = median(values), round(ratio(values, base), 2)
        point["share"] = round(point["figure_us"] / (args.step_ms * 1e3), 4)
        yield point


def main() -> None:
    args = options(
        __doc__, required="vllm", vllm=str, rounds=5, steps=100, running=Commas(32, 256), prompts=Commas(512, 4096),
        budgets=Commas(512, 2048, 8192), block_tokens=32, step_ms=(10.0, "of the step that shares are of"),
        clock=CLOCK,
        quick={"rounds": 2, "steps": 30, "running": [32], "prompts": [512], "budgets": [2048]},
    )  # fmt: skip
    points = []
    with vllm_core(args.vllm) as core:
        table = Table(COLUMNS)
        for shape in shapes_of(args):
            for point in points_of(shape, measure_shape(shape, core, args), args):
                table.show(point)
                points.append(point)
    record = {"command": "bench/scheduler_rivals.py --vllm PYTHON", "vllm": core.version, "step_ms": args.step_ms}
    record |= {"load_average": os.getloadavg()}
    save(args, {**record, "rounds": args.rounds, "steps": args.steps, "points": points})


if __name__ == "__main__":
    main()
