"""Decisions on their way to what carries them out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.host.autoscaling import DecisionFile, LastDecisions, LocalInstances
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


class Host:
    """A supervisor and a router: an instance that is started joins when it is looked for the third time."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.joined: dict[str, str] = {}
        self.looks = 0

    def names_of(self, role: Role) -> list[str]:
        return list(self.names)

    def add_child(self, role: Role) -> str:
        self.names.append("c1")
        self.looks = 0
        return "c1"

    def expect_end_of(self, name: str) -> None:
        pass

    drain_member = expect_end_of

    def remove_child(self, name: str, patience_s: float) -> None:
        self.names.remove(name)

    def forget_member(self, name: str) -> None:
        self.joined.pop(name, None)

    def members(self) -> dict[str, str]:
        return dict(self.joined)

    def wait_for_members(self, names: list[str], timeout_s: float) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.joined |= dict.fromkeys(self.names, "joined")
        return all(name in self.joined for name in names)


def test_an_instance_of_a_name_that_was_there_is_waited_for() -> None:
    host = Host()
    instances = LocalInstances(host, host)
    for _ in range(2):
        assert instances.scale_roles({Role.COLOCATED: 1}) == {"colocated": ["c1"]}
        assert host.looks == 3, "ready only when this one has joined"
        assert instances.scale_roles({Role.COLOCATED: 0}) == {"colocated": []}
