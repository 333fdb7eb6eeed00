"""Ray under load: scaled by hand from 1P1D to 2P2D and back, then a raylet of 2P2D killed with -9.

    PYTHONPATH=tests/support python bench/ray_kill.py

Prints one JSON object: answers of each part, wrong and failed ones, the slowest, and the seconds until all instances
were back. Needs ``memserve[ray]``. Three raylets of Ray's own test cluster share this machine; the model is a tiny one,
and every answer is compared with that of one engine.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.flags import options, save
from harness.processes import wait_until

from asking_clients import QUESTIONS, Load, truth_of
from on_ray import CLIENTS, COUNT, PAUSE_S, OnRay
from tiny_models import save_folder, tiny_module

PATIENCE_S = 300.0


def until(condition: Callable[[], bool]) -> float:
    """Seconds until ``condition`` held."""
    return round(wait_until(condition, "that", PATIENCE_S, 0.1), 1)


def more(load: Load, answers: int) -> float:
    """Seconds until ``answers`` more have come."""
    before = load.answers
    return until(lambda: load.answers >= before + answers)


def told(load: Load) -> dict[str, Any]:
    """The figures of one part."""
    failed = [(seed, repr(error)) for seed, error in load.wrong if isinstance(error, Exception)]
    ordered = sorted(load.seconds)
    return {
        "answers": load.answers,
        "wrong": len(load.wrong) - len(failed),
        "failed": len(failed),
        "median_s": round(ordered[len(ordered) // 2], 2),
        "slowest_s": round(ordered[-1], 2),
        "first_failures": failed[:3],
    }


def main() -> None:
    args = options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        model = save_folder(tiny_module("llama"), Path(folder) / "tiny")
        truth = truth_of(model, COUNT)
        served = OnRay(model)
        try:
            with Load(served.ask, truth, CLIENTS, PAUSE_S) as scaling:
                more(scaling, QUESTIONS)
                started = time.monotonic()
                served.scale("prefill=2", "decode=2")
                up_s = round(time.monotonic() - started, 1)
                more(scaling, 4 * QUESTIONS)
                started = time.monotonic()
                served.scale("prefill=1", "decode=1")
                down_s = round(time.monotonic() - started, 1)
                more(scaling, 2 * QUESTIONS)
            scaled = {**told(scaling), "up_s": up_s, "down_s": down_s}
            scaled["left"] = served.counter("router_members_left_total")
            print(json.dumps({"scaled": scaled}), flush=True)
            served.scale("prefill=2", "decode=2")
            everyone = served.up()
            with Load(served.ask, truth, CLIENTS, PAUSE_S) as striking:
                more(striking, 2 * QUESTIONS)
                died = served.counter("router_members_died_total")
                served.ray.kill_raylet(0)
                noticed_s = until(lambda: served.counter("router_members_died_total") > died)
                back_s = until(lambda: served.up() == everyone)
                more(striking, 2 * QUESTIONS)
            killed = {**told(striking), "noticed_s": noticed_s, "back_s": back_s}
            killed["died"] = served.counter("router_members_died_total") - died
            killed["exit_status"] = served.end()
        finally:
            served.close()
    print(json.dumps({"scaled": scaled, "killed": killed}, indent=2))
    save(args, {"scaled": scaled, "killed": killed})


if __name__ == "__main__":
    main()
