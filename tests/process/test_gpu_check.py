"""``scripts/gpu_check.py``: every part on its own, what goes wrong is written down, and one report says it all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; its parts see the odd ones."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, file: Path, parts: dict[str, str]) -> int:
    monkeypatch.setattr(script, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--report", str(file)])
    return script.main()


def test_failing_part_is_recorded_and_the_next_runs(script, monkeypatch, tmp_path: Path) -> None:
    parts = {name: f"odd_parts:{name}" for name in ("breaks", "dies", "fails", "good")}
    parts["attention"] = parts.pop("fails")
    file = tmp_path / "found.json"
    assert run(script, monkeypatch, file, parts) == 1
    record, said = json.loads(file.read_text()), file.with_suffix(".md").read_text()
    found = record["parts"]
    assert [found[name]["status"] for name in parts] == ["broke", "broke", "done", "done"]
    assert found["breaks"]["why"].rstrip().endswith("ValueError: a part of it | is broken")
    assert "its process ended with -6" in found["dies"]["why"]
    assert [found[name]["rows"][0]["what"] for name in ("breaks", "dies")] == ["before it broke", "before it died"]
    assert "ValueError: a part of it | is broken\n```" in said and "| one and one | passed | sum 2 |" in said
    assert "| one and two | failed | sum 4 |" in said
    assert "| attention of a decode | 80% of copy bandwidth | 55% | missed |" in said, "the worst of its rows counts"
    others = len(importlib.import_module("gpu_report").TARGETS) - 1
    assert f"Checks: 3 passed, 1 failed. Targets: 0 met, 1 missed, {others} not run. Parts that broke: 2." in said
    assert f"python {sys.version.split()[0]}" in said and record["commit"] in said and record["device"] in said


def test_a_part_that_hangs_is_ended(script) -> None:
    script.PARTS["hangs"] = "odd_parts:hangs"
    report = script.Report(["hangs"], "none", "now", None)
    script.run_part(report, "hangs", 2.0)
    part = report.record["parts"]["hangs"]
    assert part["status"] == "broke" and part["why"] == "it took more than 2 s, and was ended"


def test_parts_without_time_are_not_begun(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "LEAST_S", script.LIMIT_S + 1)
    file = tmp_path / "found.json"
    assert run(script, monkeypatch, file, {"good": "odd_parts:good"}) == 0
    assert json.loads(file.read_text())["parts"]["good"]["why"] == "the 540 s of all parts were over"


def test_the_files_are_whole_after_every_row(script, tmp_path: Path) -> None:
    import gpu_report

    file = tmp_path / "found.json"
    report = gpu_report.Report(["8b", "pull"], "none", "now", file)
    report.turn("8b", gpu_report.RUNNING, "cut off here")
    row = {"what": "decode of 1, graphs", "target": "decode of an 8B, 1 sequence", "share": 0.8}
    report.add("8b", row)
    record = json.loads(file.read_text())
    assert record["parts"]["8b"] | {"rows": []} == {
        "status": "running",
        "why": "cut off here",
        "seconds": 0,
        "rows": [],
    }
    assert record["parts"]["8b"]["rows"] == [row] and record["parts"]["pull"]["why"] == "it was not reached"
    said = file.with_suffix(".md").read_text()
    assert said == gpu_report.markdown(record), "nothing is in it that the JSON has not"
    assert "| decode of an 8B, 1 sequence | 80% of what copy bandwidth allows | 80% | met |" in said
    assert (
        "| prefill of an 8B | 50% of the matrix product that torch reaches in bfloat16 |  | not run: cut off here |"
        in said
    )
    assert "| pull between two processes | 50% of copy bandwidth |  | not run: it was not reached |" in said


def test_every_target_has_a_part(script) -> None:
    import gpu_report

    assert {target.part for target in gpu_report.TARGETS.values()} <= script.PARTS.keys()
    for place in script.PARTS.values():
        module, function, *_ = place.split(":")
        assert f"\ndef {function}(" in (SCRIPT.parent / f"{module}.py").read_text()


def test_without_a_device_what_can_run_does(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    only = [word for part in ("engine", "phi3", "graphs", "8b", "4bit", "pull") for word in ("--only", part)]
    command = [sys.executable, str(SCRIPT), *only, "--report", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    for name, count in (("engine", 4), ("phi3", 2)):
        checks = [row for row in record["parts"][name]["rows"] if "ok" in row]
        assert record["parts"][name]["status"] == "done" and len(checks) == count and all(row["ok"] for row in checks)
    assert {record["parts"][name]["why"] for name in ("graphs", "8b", "4bit", "pull")} == {"no CUDA device"}
    assert "not run: no CUDA device" in file.with_suffix(".md").read_text()


@pytest.mark.usefixtures("executed_processes")
def test_quantised_weights_are_checked_without_a_device(tmp_path: Path) -> None:
    """In a process of its own: those that tests fork have no triton."""
    pytest.importorskip("triton", reason="the package triton (extra: test) is not installed")
    file = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--only", "quantised", "--report", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["parts"]["quantised"]["rows"]
    assert len(rows) == 3 and all(row["ok"] and row["same"] for row in rows)
