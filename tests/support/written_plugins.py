"""Distributions with plug-ins, as an installer leaves them in a folder: a module, its entry points, a version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from memserve.base import plugins


def write_plugins(folder: Path, name: str, module: str, groups: Mapping[str, list[str]], version: str = "1.5") -> None:
    """Distribution ``name`` with a module of that name. ``groups``: names of functions by group of entry points; each
    is the plug-in of the same name, with ``-`` for ``_``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(dedent(module))
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, functions in groups.items():
        lines += [f"[{group}]", *(f"{function.replace('_', '-')} = {name}:{function}" for function in functions)]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path. What is written there is installed, until entry points are first looked for."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    plugins._installed.cache_clear()
    yield folder
    plugins._installed.cache_clear()
