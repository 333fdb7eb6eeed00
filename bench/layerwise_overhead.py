"""What KV by layer costs those that do not need it: decode and prefill with everything in memory.

    python bench/layerwise_overhead.py [--old CHECKOUT] [--rounds 15] [--model FOLDER]

Engines of this code with ``--layerwise off`` and with ``auto``, which has nothing to do, and with ``--old`` one of
another checkout (its core built), each in a process of its own that stands still while others are measured. They take
turns, measurement by measurement, first the one and then the other; a figure is the median of the rounds' ratios.
Targets: off beside old within 1 %, auto beside off within 2 %.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.flags import options, save
from harness.processes import LineChild
from harness.rounds import Samples
from harness.tables import show

CASES = {"decode, 1": (1, 32, 65), "decode, 8": (8, 32, 65), "decode, 32": (32, 32, 33), "prefill, 1,000": (1, 1000, 1)}
"""Sequences, tokens of each prompt, and tokens of each answer."""

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


class Side(LineChild):
    """An engine in a process of its own."""

    def __init__(self, checkout: Path, **engine: Any) -> None:
        path = os.pathsep.join((str(checkout / "src"), sysconfig.get_path("purelib")))
        # without `site`, since an editable install would put its own memserve first
        command = [sys.executable, "-S", "-c", ENGINE, json.dumps(engine), "1"]
        super().__init__(*command, env=dict(os.environ, PYTHONPATH=path))
        if self.hello != str(checkout / "src" / "memserve" / "__init__.py"):
            raise SystemExit(f"the engine did not start from {checkout}: {self.hello!r}")


def main() -> None:
    args = options(
        __doc__, old=(Path, "a checkout to compare with"), rounds=15,
        model=("smollm2-135m-instruct", "folder, file or name"),
    )  # fmt: skip
    same = {"model": args.model, "kv_memory": "1GiB", "enable_prefix_caching": False}
    sides = {"old": Side(args.old.resolve(), **same)} if args.old else {}
    sides |= {"off": Side(ROOT, **same), "auto": Side(ROOT, **same, layerwise="auto", dram_memory="1GiB")}
    times = Samples()
    for number in range(-1, args.rounds):  # the first round warms up
        for case, sizes in CASES.items():
            for name in list(sides)[:: -1 if number % 2 else 1]:
                spent_s = float(sides[name].ask(json.dumps(sizes)))
                times[case, name] += [spent_s] if number >= 0 else []
    rows = []
    for case in CASES:
        rows.append({"case": case, "off_ms": 1000 * times.median((case, "off"))})
        for name, base in (("off", "old"), ("auto", "off")):
            if base in sides:
                rows[-1][f"{name}_{base}"] = times.ratio((case, name), (case, base))
    show(rows, {"step": "{case}", "off": "{off_ms:.1f} ms", "off / old": "{off_old:.3f}",
                "auto / off": "{auto_off:.3f}"})  # fmt: skip
    for side in sides.values():
        side.close()
    save(args, {f"{case}, {name}": case_times for (case, name), case_times in times.items()})


if __name__ == "__main__":
    main()
