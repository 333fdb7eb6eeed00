"""What KV by layer costs those that do not need it: decode and prefill with everything in memory.

    python bench/layerwise_overhead.py [--old CHECKOUT] [--rounds 15] [--model FOLDER]

Engines of this code with ``--layerwise off`` and with ``auto``, which has nothing to do, and with ``--old`` one of
another checkout (its core built), each in a process of its own that stands still while others are measured. They take
turns, measurement by measurement, first the one and then the other; a figure is the median of the rounds' ratios.
Targets: off beside old within 1 %, auto beside off within 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from statistics import median
from typing import Any

CASES = {"decode, 1": (1, 32, 65), "decode, 8": (8, 32, 65), "decode, 32": (32, 32, 33), "prefill, 1,000": (1, 1000, 1)}
"""Sequences, tokens of each prompt, and tokens of each answer."""
HERE = Path(__file__).resolve().parents[1]

ENGINE = """
import json, sys, time
import memserve, numpy as np
from memserve import LLM
options = json.loads(sys.argv[1])
random = np.random.default_rng(int(sys.argv[2]))
with LLM(options.pop("model"), **options) as llm:
    print(memserve.__file__, flush=True)
    for line in sys.stdin:
        rows, prompt, tokens = json.loads(line)
        prompts = [random.integers(1000, 40000, prompt).tolist() for _ in range(rows)]
        began = time.perf_counter()
        llm.generate(prompts, max_tokens=tokens, ignore_eos=True)
        print(time.perf_counter() - began, flush=True)
"""


class Side:
    """An engine in a process of its own."""

    def __init__(self, name: str, checkout: Path, options: dict[str, Any]) -> None:
        self.name = name
        path = os.pathsep.join((str(checkout / "src"), sysconfig.get_path("purelib")))
        environment = dict(os.environ, PYTHONPATH=path)
        # without `site`, since an editable install would put its own memserve first
        command = [sys.executable, "-S", "-c", ENGINE, json.dumps(options), "1"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        said = self._line()
        if said != str(checkout / "src" / "memserve" / "__init__.py"):
            raise SystemExit(f"the engine of {name} did not start from {checkout}: {said!r}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def seconds(self, case: tuple[int, int, int]) -> float:
        """How long one measurement takes."""
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(sides: list[Side], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Case -> side -> seconds, round by round; the first round warms up."""
    times: dict[str, dict[str, list[float]]] = {case: {side.name: [] for side in sides} for case in CASES}
    for number in range(rounds + 1):
        for name, case in CASES.items():
            for side in sides if number % 2 else reversed(sides):
                seconds = side.seconds(case)
                if number:
                    times[name][side.name].append(seconds)
    return times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder, file or name")
    arguments = parser.parse_args()
    same = {"model": arguments.model, "kv_memory": "1GiB", "enable_prefix_caching": False}
    sides = [Side("old", arguments.old.resolve(), same)] if arguments.old else []
    sides.append(Side("off", HERE, same))
    sides.append(Side("auto", HERE, {**same, "layerwise": "auto", "dram_memory": "1GiB"}))
    times = measure(sides, arguments.rounds)
    for name, by_side in times.items():
        ratios = [f"off {1000 * median(by_side['off']):.1f} ms"]
        for one, other in (("off", "old"), ("auto", "off")):
            if other in by_side:
                pairs = [mine / theirs for mine, theirs in zip(by_side[one], by_side[other], strict=True)]
                ratios.append(f"{one} / {other} {median(pairs):.3f}")
        print(f"{name}: {', '.join(ratios)}")
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
