"""Command lines of child processes that run a module of this package, by this process's Python."""

from __future__ import annotations

import os
import sys

SAFE_PATH = "-P"


def module_command(module: str, *words: str, cwd: str | None = None) -> list[str]:
    """``python -m module words...``, which imports nothing from the folder where it runs (``cwd``; None: the present
    one), unless this process does so, too. Without that a file ``socket.py`` that lies there would be run."""
    return [sys.executable, *([] if _imports_from(cwd or os.getcwd()) else [SAFE_PATH]), "-m", module, *words]


def _imports_from(folder: str) -> bool:
    return os.path.realpath(folder) in map(os.path.realpath, sys.path)
