"""What an instance has learnt of its costs is there at its next start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from memserve.base.types import KVGeometry
from memserve.host import profile_file as profile_store
from memserve.host.profile_file import LearntProfile, load_profile
from memserve.kv.costs import LEARNT, CostModel, PreemptionCosts, PreemptionModel, PrefillCurve

GEOMETRY = KVGeometry(2, 2, 64, 64, "bfloat16", 32)


def learnt(token_ns: float) -> bytes:
    return CostModel(prefill=PrefillCurve(1e6, token_ns, 1.0), machine=LEARNT).to_json()


def test_learnt_costs_are_there_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setattr(profile_store, "profile_path", lambda *_: path)
    keeper = LearntProfile(path, CostModel())
    keeper.save_costs(b"", 0.0)
    assert not path.exists()
    keeper.save_costs(learnt(100.0), 0.0)
    keeper.save_costs(learnt(200.0), 1.0)  # too soon
    costs = load_profile("model", GEOMETRY, "cpu", None)
    assert costs.prefill.token_ns == 100.0 and costs.is_measured
    assert not PreemptionModel(PreemptionCosts(profile=costs)).is_measured, "it goes on learning"
    keeper.save_costs(learnt(200.0), 61.0)
    assert load_profile("model", GEOMETRY, "cpu", None).prefill.token_ns == 200.0


def test_a_measured_profile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    LearntProfile(path, CostModel(machine="a processor")).save_costs(learnt(100.0), 0.0)
    assert not path.exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    keeper = LearntProfile(tmp_path / "file" / "profile.json", CostModel())
    with caplog.at_level(logging.WARNING):
        keeper.save_costs(learnt(100.0), 0.0)
        keeper.save_costs(learnt(200.0), 100.0)
    assert len(caplog.records) == 1 and "not kept" in caplog.text
