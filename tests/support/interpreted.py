"""Scenarios of GPUs under Triton's interpreter, in a process of their own: whether it interprets is read when triton is
imported. A test file runs itself as a script, and gets its results as JSON."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parent


def results_of(script: str, names: Iterable[str] = (), timeout_s: float = 500) -> dict[str, str]:
    """Scenario -> "" or what went wrong. ``names``: of ``script``'s; none: all."""
    pytest.importorskip("triton", reason="the package triton (extra: test) is not installed")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, script, *names]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert run.returncode == 0, run.stderr[-3000:]
    results: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return results


def run_scenarios(scenarios: Mapping[str, Any], before: Callable[[str], None] = lambda name: None) -> None:
    """The script: those that its command line names, else all. A scenario: a function that says whether it was as it
    should be, or a tuple of one and its arguments. ``before``: called with each name."""
    results = {}
    for name in sys.argv[1:] or scenarios:
        began = time.monotonic()
        before(name)
        run, *args = scenarios[name] if isinstance(scenarios[name], tuple) else (scenarios[name],)
        try:
            results[name] = "" if run(*args) else "nothing was found out"
        except Exception:
            results[name] = traceback.format_exc()[-2500:]
        print(f"{time.monotonic() - began:6.1f} s  {name}", file=sys.stderr)
    print(json.dumps(results))


def run_devices(scenarios: Mapping[str, Any], interpreted: Container[str] = ()) -> None:
    """As :func:`run_scenarios`, with models. ``interpreted``: names of those with Triton's kernels of attention; the
    others have attention by their oracle."""
    from lean_imports import interpret_quickly, leave_compiler_out

    leave_compiler_out()
    interpret_quickly()
    from fake_gpu import attend_with_kernels

    gc.disable()  # else every device looks through all of torch, transformers and triton
    run_scenarios(scenarios, lambda name: attend_with_kernels(name in interpreted))
