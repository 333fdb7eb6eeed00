"""``bench/transfer.py``: the same pieces for each contender, and figures for each."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from geometries import SHAPES
from places import ROOT

SCRIPT = ROOT / "bench" / "transfer.py"


@pytest.mark.parametrize("geometry", ["smollm2", "mqa"])
def test_every_contender_gets_every_work(geometry: str, tmp_path: Path) -> None:
    out, block_bytes = tmp_path / "out.json", SHAPES[geometry].kv.block_bytes
    command = [sys.executable, str(SCRIPT), "--mib", "4", "--rounds", "1", "--geometry", geometry, "--json", str(out)]
    others = ["nixl link", "nixl alone"] if geometry == "mqa" and find_spec("nixl_cu12") else []
    command += [] if others else ["--without-nixl"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    works = {"8 KiB", "32 KiB", "256 KiB", "1024 KiB", "4096 KiB", "aggregated", "by page", "8 KiB pieces"}
    for contender in ("memcpy", "shm link", *others):
        mine = {record["work"]: record for record in records if record["contender"] == contender}
        assert set(mine) == works
        assert all(record["gb_s_min"] <= record["gb_s"] <= record["gb_s_max"] for record in mine.values())
    assert {record["bytes"] for record in records} == {4 << 20, 64 * block_bytes}
    assert "shm link / memcpy, aggregated" in run.stdout
