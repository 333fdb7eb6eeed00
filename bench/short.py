"""The short half of what is measured, in a quarter of an hour: ``make bench``.

    python bench/short.py [--minutes 13] [--folder build/bench] [--tools DIR --vllm PYTHON --llama-server PATH]

Runs one after the other: the engine (``memserve bench engine``), what a store adds to prefill
(``bench/store_prefill.py --quick``), the leaderboard's short round (``bench/leaderboard.py --short``), and those of the
simulator's studies that are short, by the commands that stand in their result files. Results and pages come into
``--folder``: what was not measured there is as it lies in ``bench/results/``, from another run or another machine.
``--folder`` may be given again: what it has is measured anew, but for the leaderboard, which goes on. What would begin
after ``--minutes`` is left out, and said.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BENCH, ROOT
from harness.flags import options
from harness.processes import end_in_order

STUDIES = (
    "paging-sharegpt", "paging-alpaca", "memserve-8-long", "memserve-8-chat", "memserve-8-chat-8b", "memserve-14-24",
    "memserve-8-react",
)  # fmt: skip
"""Result files of the simulator, the shortest first. The same commands give the same figures on every machine."""
LEADERBOARD_SHARE = 0.6
"""Of the time, which the leaderboard may take."""


@dataclass(frozen=True)
class Step:
    """One command, and the result file that it gives."""

    title: str
    command: list[str]
    result: str
    is_written: bool = False
    """The command writes the file itself; else its output becomes it."""
    is_simulated: bool = False
    """In virtual time, by one thread: beside others."""


def memserve(command: str) -> list[str]:
    """``memserve ...`` as this Python runs it."""
    return [sys.executable, "-m", *shlex.split(command)]


def steps(args: Namespace, results: Path) -> Iterator[Step]:
    """In order."""
    yield Step("the engine", memserve("memserve bench engine --repeats 1 --json"), "engine")
    store = [sys.executable, str(BENCH / "store_prefill.py"), "--quick", "--json", str(results / "store-prefill.json")]
    yield Step("what a store adds to prefill", store, "store-prefill", is_written=True)
    board = [sys.executable, str(BENCH / "leaderboard.py"), "--short", "--json", str(results / "leaderboard.json")]
    board += ["--minutes", str(LEADERBOARD_SHARE * args.minutes), "--tools", str(args.tools)]
    board += [word for name in ("vllm", "llama_server") if getattr(args, name)
              for word in (f"--{name.replace('_', '-')}", getattr(args, name))]  # fmt: skip
    yield Step("the leaderboard, short", board, "leaderboard", is_written=True)
    for name in STUDIES:
        command = json.loads((BENCH / "results" / f"{name}.json").read_text())["command"]
        out = results.parent / "studies" / name
        yield Step(command, [*memserve(command), "--json", "--out", str(out)], name, is_simulated=True)


def record_of(step: Step, output: str) -> Any:
    """What a command has printed: one object, or a head and one for each figure."""
    if step.is_simulated:
        return json.loads(output) | {"command": step.title}
    head, *points = map(json.loads, output.splitlines())
    return {"command": shlex.join(step.command[2:]), "head": head, "points": points}


def run_step(step: Step, results: Path) -> str:
    """What came of it: empty, or why there is no result."""
    output = {"stdout": None if step.is_written else subprocess.PIPE}
    run = subprocess.run(step.command, text=True, stderr=subprocess.DEVNULL if step.is_simulated else None, **output)
    if run.returncode:
        return f"ended with {run.returncode}"
    if not step.is_written:
        try:
            record = record_of(step, run.stdout)
        except ValueError as error:
            return f"printed no result: {error}"
        (results / f"{step.result}.json").write_text(json.dumps(record, indent=1) + "\n")
    return ""


def run_all(todo: list[Step], results: Path, began_s: float, minutes: float) -> list[str]:
    """What is left out, and why. What is measured runs alone, then simulations side by side."""

    def run(numbered: tuple[int, Step]) -> str:
        number, step = numbered
        if (spent_min := (time.monotonic() - began_s) / 60) > minutes:
            return f"{step.title}: the time is over"
        print(f"[{number} of {len(todo)}, {spent_min:.1f} min] {step.title}", flush=True)
        reason = run_step(step, results)
        return f"{step.title}: {reason}" if reason else ""

    measured = [(number, step) for number, step in enumerate(todo, 1) if not step.is_simulated]
    simulated = [(number, step) for number, step in enumerate(todo, 1) if step.is_simulated]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        reasons = [*map(run, measured), *pool.map(run, simulated)]
    return [reason for reason in reasons if reason]


def write_pages(folder: Path) -> list[Path]:
    """Both pages, from the results in ``folder``."""
    pages = {"evaluation": folder / "EVALUATION.md", "leaderboard": folder / "LEADERBOARD.md"}
    results = {"evaluation": folder / "results", "leaderboard": folder / "results" / "leaderboard.json"}
    for name, page in pages.items():
        if results[name].exists():
            command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--results", str(results[name])]
            subprocess.run([*command, "--page", str(page)], check=True)
    return [page for page in pages.values() if page.exists()]


def main() -> None:
    args = options(
        __doc__, minutes=(13.0, "until nothing further begins"), vllm="", llama_server=("", "llama.cpp's server"),
        tools=(ROOT / "build" / "tools", "a folder with an environment for each tool"), folder=ROOT / "build" / "bench",
    )  # fmt: skip
    end_in_order()
    began_s, results = time.monotonic(), args.folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    for path in (BENCH / "results").glob("*.json"):
        if path.name != "leaderboard.json":
            shutil.copy(path, results)
    left_out = run_all(list(steps(args, results)), results, began_s, args.minutes)
    pages = write_pages(args.folder)
    for line in left_out:
        print(f"left out: {line}")
    print(f"{(time.monotonic() - began_s) / 60:.1f} min; the pages: {', '.join(map(str, pages))}")


if __name__ == "__main__":
    main()
