"""The search for the smallest and the cheapest cluster (``memserve_lab.sim.search``)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.cli.main import run
from memserve_lab.sim.search import COLOCATED, Mix, Trial, cheapest, parse_mixes, smallest


@given(needed=st.integers(1, 200), least=st.integers(1, 4), most=st.integers(4, 150))
def test_the_smallest_good_size_is_found(needed: int, least: int, most: int) -> None:
    """Where a size is good from ``needed`` on: exactly that one, with few trials, none twice."""
    best, trials = smallest(lambda size: Trial(size, size >= needed, size), least, most)
    sizes = [trial.size for trial in trials]
    assert len(set(sizes)) == len(sizes) <= 18 and all(least <= size <= most for size in sizes)
    if needed > most:
        assert best is None
    else:
        assert best is not None and best.size == max(needed, least)


def test_unsatisfiable_search_ends_after_two_trials() -> None:
    best, trials = smallest(lambda size: Trial(size, False, size), 1, 64)
    assert best is None and [trial.size for trial in trials] == [1, 64]


def test_the_cheapest_of_the_good_ones() -> None:
    found = [("a", Trial(4, True, 8.0)), ("b", None), ("c", Trial(6, True, 6.0)), ("d", Trial(3, True, 6.0))]
    assert cheapest(found) == ("c", found[2][1])
    assert cheapest([("b", None)]) is None


def test_mixes_have_both_roles_in_every_size() -> None:
    mixes = parse_mixes("colocated,1:3,1:1")
    assert mixes == (COLOCATED, Mix("1:3", 1, 4), Mix("1:1", 1, 2))
    assert mixes[1].instances_of(8) == {Role.PREFILL: 2, Role.DECODE: 6}
    for size in range(2, 40):
        for mix in mixes[1:]:
            counts = mix.instances_of(size)
            assert sum(counts.values()) == size and min(counts.values()) >= 1
    for wrong in ("1", "0:2", "a:b", ""):
        with pytest.raises(UserError):
            parse_mixes(wrong)


def test_search_finds_what_running_each_would(capsys) -> None:
    """A rate that one instance cannot bear: the answer is the first size that holds, and one less does not."""
    common = ["--workload", "groups", "--sessions", "120", "--rate", "12", "--model", "llama-3-8b"]
    slo = ["--slo-ttft-ms", "1200"]
    assert run(["sim", "search", *common, *slo, "--mixes", "colocated", "--instances-max", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["found"][0]["trial"]
    missed = {}
    for size in (found["size"] - 1, found["size"]):
        assert run(["sim", "run", *common, *slo, "--instances", str(size), "--json"]) == 0
        missed[size] = json.loads(capsys.readouterr().out)["found"][0]["figures"]["slo_violations"]
    assert missed[found["size"]] <= 0.01 < missed[found["size"] - 1]


def test_search_needs_something_to_hold(capsys) -> None:
    assert run(["sim", "search", "--workload", "chat"]) == 1
    assert "SLO" in capsys.readouterr().err
