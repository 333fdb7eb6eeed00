"""What probes of containers look at: the text of a file, and its age."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.system import process as health_file
from memserve.system.process import HealthFile, HealthState


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(health_file.time, "monotonic", lambda: now[0])
    return now


def test_health_file_is_written_once_a_second(tmp_path: Path, clock: list[float]) -> None:
    path = tmp_path / "health"
    health = HealthFile(path)
    assert not path.exists(), "before the first word there is none: the process has not started"
    health.write_state(HealthState.OUTSIDE)
    health.write_state(HealthState.MEMBER)
    assert path.read_text() == "outside\n", "at most once a second"
    clock[0] += 1.0
    health.write_state(HealthState.MEMBER)
    assert path.read_text() == "member\n"
    os.utime(path, (0, 0))
    clock[0] += 1.0
    health.write_state(HealthState.MEMBER)
    assert path.stat().st_mtime > 0, "the same word again makes it young"
    health.remove_file()
    assert list(tmp_path.iterdir()) == []


def test_health_file_of_a_previous_process_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "health"
    path.write_text("member\n")
    HealthFile(path)
    assert not path.exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        HealthFile(tmp_path / "none" / "health")
