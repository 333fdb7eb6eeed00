"""Libraries and command lines that speak OpenAI's or Anthropic's API, against a real server with the bundled model."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.served import serving

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("MEMSERVE_CLIENTS_PYTHON", sys.executable)
"""A Python that has the libraries."""
PATH = os.environ.get("MEMSERVE_CLIENTS_PATH", "")
"""Folders that have the commands."""


def _module(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


clients = _module(ROOT / "scripts" / "openai_clients.py")
commands = _module(ROOT / "scripts" / "client_commands.py")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    with serving("--metadata", "none") as running:
        yield running.url, running.model


@pytest.mark.parametrize("library", clients.EXAMPLES)
def test_the_examples_of_a_library_work(library: str, server: tuple[str, str]) -> None:
    told = clients.run_in(PYTHON, *server, library)
    if "missing" in told:
        pytest.skip(f"{library} is not installed: name a Python that has it in MEMSERVE_CLIENTS_PYTHON")
    assert len(told["examples"]) == len(clients.EXAMPLES[library][1])
    failed = {name: one["error"] for name, one in told["examples"].items() if one["error"]}
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_a_command_line_works(name: str, server: tuple[str, str]) -> None:
    report = commands.run_command(name, *server, PATH)
    if "missing" in report:
        pytest.skip(report["missing"])
    assert not report["error"], report["error"]
