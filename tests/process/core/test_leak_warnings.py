"""A process that ends with native objects alive, as an interrupted one does, says so only where that is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memserve import _core

END = f"""
import ctypes, sys
from {_core.__package__} import _core, _kernels
if sys.argv[1] == "warns":
    _core.warn_of_leaks(True)
kept = _core.BlockIds([1, 2, 3])
ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["silent", "warns"])
def test_objects_that_outlive_python_are_listed_where_asked_for(how: str) -> None:
    run = subprocess.run([sys.executable, "-c", END, how], capture_output=True, text=True, timeout=60)
    assert run.returncode == 3
    assert ("nanobind: leaked" in run.stderr) == (how == "warns"), run.stderr
