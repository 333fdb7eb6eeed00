"""Routing policies of other distributions decide, and are never trusted."""

from __future__ import annotations

from pathlib import Path

import pytest

from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Role
from memserve.router.placement.candidates import Ask, Candidate
from memserve.router.placement.routing import route
from written_plugins import plugin_folder, write_plugins

__all__ = ["plugin_folder"]

ASK = Ask(100)
FREE, BUSY = Candidate(0, "c0", Role.COLOCATED), Candidate(1, "c1", Role.COLOCATED, prefill_tokens=900)
MODULE = """
from memserve.base.types import Role
from memserve.router.placement.candidates import Candidate, Route, with_decoder

def most_work(ask, first, decoders):
    chosen = max(first, key=lambda one: one.work_tokens)
    return with_decoder(chosen, f"{chosen.name} has most work", decoders, lambda some: some[0])

def raises(ask, first, decoders):
    raise ValueError("no idea")

def invents(ask, first, decoders):
    return Route(Candidate(7, "c7", Role.COLOCATED), None, "it looks nice")

def nothing(ask, first, decoders):
    return None
"""


@pytest.fixture(autouse=True)
def installed(plugin_folder: Path) -> None:
    functions = ["most_work", "raises", "invents", "nothing"]
    write_plugins(plugin_folder, "written_policies", MODULE, {ROUTING_POLICIES.group: functions})


def test_a_policy_of_an_entry_point_decides() -> None:
    assert ClusterConfig(policy="most-work").policy == "most-work"
    decided = route("most-work", ASK, [FREE, BUSY])
    assert decided is not None and decided.first is BUSY and decided.reason == "most-work: c1 has most work"


@pytest.mark.parametrize(
    ("name", "why"), [("raises", "ValueError: no idea"), ("invents", "not offered"), ("nothing", "AttributeError")]
)
def test_a_wrong_policy_leaves_the_choice_to_the_load(name: str, why: str) -> None:
    decided = route(name, ASK, [FREE, BUSY])
    assert decided is not None and decided.first is FREE
    assert (
        decided.reason.startswith(f"policy {name} failed") and why in decided.reason and "least load" in decided.reason
    )


def test_an_unknown_name_lists_those_that_are_installed() -> None:
    with pytest.raises(UserError) as caught:
        ClusterConfig(policy="best")
    assert "cost" in caught.value.hint and "most-work" in caught.value.hint
