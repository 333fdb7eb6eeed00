"""Routing policies of other distributions: found by their entry points, and never trusted."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

from memserve.base import config as config_module
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.router.placement import routing
from memserve.router.placement.candidates import Ask, Candidate, Route, with_decoder
from memserve.router.placement.routing import route

ASK = Ask(100)
FREE, BUSY = Candidate(0, "c0", Role.COLOCATED), Candidate(1, "c1", Role.COLOCATED, prefill_tokens=900)


def most_work(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    chosen = max(first, key=lambda one: one.work_tokens)
    return with_decoder(chosen, f"{chosen.name} has most work", decoders, lambda some: some[0])


def raises(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    raise ValueError("no idea")


def invents(ask: Ask, first: Sequence[Candidate], decoders: Sequence[Candidate]) -> Route:
    return Route(Candidate(7, "c7", Role.COLOCATED), None, "it looks nice")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = config_module.POLICY_GROUP
    entries = [EntryPoint(one.__name__, f"{__name__}:{one.__name__}", group) for one in (most_work, raises, invents)]
    entries.append(EntryPoint("absent", "no_such_module:policy", group))
    loads = {one.__name__: one for one in (most_work, raises, invents)}
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda self: loads.get(self.name) or load(self))
    for module in (config_module, routing):
        monkeypatch.setattr(module, "entry_points", lambda group: entries)


def test_a_policy_of_an_entry_point_decides() -> None:
    assert ClusterConfig(policy="most_work").policy == "most_work"
    decided = route("most_work", ASK, [FREE, BUSY])
    assert decided is not None and decided.first is BUSY and decided.reason == "most_work: c1 has most work"


@pytest.mark.parametrize(("name", "why"), [("raises", "ValueError: no idea"), ("invents", "not offered")])
def test_a_wrong_policy_leaves_the_choice_to_the_load(name: str, why: str) -> None:
    decided = route(name, ASK, [FREE, BUSY])
    assert decided is not None and decided.first is FREE
    assert (
        decided.reason.startswith(f"policy {name} failed") and why in decided.reason and "least load" in decided.reason
    )


def test_unloadable_policy_is_one_clear_error() -> None:
    with pytest.raises(UserError, match=r"'absent' .* cannot be loaded: No module named 'no_such_module'"):
        route("absent", ASK, [FREE])


def test_an_unknown_name_lists_those_that_are_installed() -> None:
    with pytest.raises(UserError) as caught:
        ClusterConfig(policy="best")
    assert "cost" in caught.value.hint and "most_work" in caught.value.hint
