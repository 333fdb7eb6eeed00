"""Import paths of earlier releases."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from memserve._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_new_module_and_warns(old: str) -> None:
    script = f"""
import importlib, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    old = importlib.import_module({old!r})
new = importlib.import_module({MOVED[old]!r})
assert old is new, (old, new)
assert new.__name__ == new.__spec__.name == {MOVED[old]!r}, new.__spec__
assert any({old!r} in str(one.message) and one.category is DeprecationWarning for one in caught), caught
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_unknown_module_is_still_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("memserve.nothing_of_the_kind")
