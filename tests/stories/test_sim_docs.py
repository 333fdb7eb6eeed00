"""The simulator's page: its commands run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memserve.cli.main import run
from places import ROOT

PAGE = ROOT / "docs" / "guides" / "SIMULATOR.md"


def test_the_simulators_commands_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Each `memserve sim` line that replays, in order and in one folder, on what comes with memserve.

    Only the size is the test's: 12 sessions, and clusters of at most 4 in a search.
    """
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    memserve (sim .+)$", PAGE.read_text(), re.MULTILINE)
    replays = [line.split() for line in lines if line.startswith(("sim run", "sim compare", "sim search", "sim --"))]
    assert len(replays) >= 6
    for words in replays:
        smaller = ["--sessions", "12"] if "--workload" in words else []
        smaller += ["--instances-max", "4"] if "search" in words else []
        assert run([*words, *smaller]) == 0, " ".join(words) + ": " + capsys.readouterr().err
