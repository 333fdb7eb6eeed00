"""``memserve bench engine`` on a tiny model: every figure comes out, and the ones with a bound hold it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memserve.cli.main import run
from tiny_models import save_folder, tiny_module


def test_every_figure_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_folder(tiny_module("llama"), tmp_path / "llama")
    command = ["bench", "engine", "--model", str(folder), "--dtype", "float32", "--kv-memory", "8MiB"]
    assert run([*command, "--repeats", "1", "--json"]) == 0
    head, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    figures = {row["name"]: row["value"] for row in rows}
    assert head["layers"] == 3 and head["ready_s"] > 0
    assert {f"decode batch {b}" for b in (1, 8, 32)} <= figures.keys()
    assert not any("2048" in name for name in figures), "beyond this model's context of 256"
    assert 0 < figures["internal fragmentation, worst"] < 32
    assert figures["external fragmentation, worst"] == 0
    assert 50 < figures["running KV memory that holds token states"] <= 100
    assert all(figures[f"scheduler share, batch {b}"] > 0 for b in (1, 8, 32))
