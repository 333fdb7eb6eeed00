"""Decisions on their way to what carries them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.host.autoscaling import DecisionFile, LastDecisions
from memserve.router.members.autoscaling import ScaleRole


def test_only_the_last_decision_of_a_role_is_carried_out() -> None:
    orders = LastDecisions()
    first, decode, last = (
        ScaleRole(role, 1, wanted, "") for role, wanted in ((Role.PREFILL, 2), (Role.DECODE, 2), (Role.PREFILL, 3))
    )
    for order in (first, decode, last):
        orders.put_decision(order)
    assert [orders.next_decision(), orders.next_decision()] == [decode, last]
    orders.put_decision(first)
    orders.close()
    assert orders.next_decision() is None, "nothing is carried out any more"


def test_each_decision_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    file = DecisionFile(path)
    assert json.loads(path.read_text()) == {}
    file.write_decisions({Role.PREFILL: 2})
    first = json.loads(path.read_text())
    assert first["prefill"]["instances"] == 2
    file.write_decisions({Role.DECODE: 1})
    assert json.loads(path.read_text())["prefill"] == first["prefill"], "another role's is the same decision still"
    file.write_decisions({Role.PREFILL: 2})
    again = json.loads(path.read_text())["prefill"]
    assert again["instances"] == 2 and again["decision"] != first["prefill"]["decision"]
    assert [one.name for one in tmp_path.iterdir()] == ["scale.json"]


def test_unwritable_file_is_reported_immediately(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*nowhere"):
        DecisionFile(tmp_path / "nowhere" / "scale.json")
