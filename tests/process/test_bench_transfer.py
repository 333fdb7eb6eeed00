"""``bench/transfer.py``: the same pieces for each contender, and figures for each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from places import ROOT

SCRIPT = ROOT / "bench" / "transfer.py"


def test_every_contender_gets_every_work(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--mib", "4", "--rounds", "1", "--without-nixl", "--json", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    works = {"8 KiB", "32 KiB", "256 KiB", "1024 KiB", "4096 KiB", "aggregated", "by page", "8 KiB pieces"}
    for contender in ("memcpy", "shm link"):
        mine = {record["work"]: record for record in records if record["contender"] == contender}
        assert set(mine) == works
        assert all(record["gb_s_min"] <= record["gb_s"] <= record["gb_s_max"] for record in mine.values())
    assert {record["bytes"] for record in records} == {4 << 20, 64 * 737_280}
    assert "shm link / memcpy, aggregated" in run.stdout
