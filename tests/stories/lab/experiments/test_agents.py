"""Agents' sessions that do not all fit: the policy beside the order of last use, in virtual time."""

from __future__ import annotations

import pytest

from memserve.base.errors import UserError
from memserve_lab.experiments.agents import AUTO, CACHE_TTL, LRU, AgentResults, AgentStudy, Plan, measure_point
from memserve_lab.sim.hardware import machine
from memserve_lab.workloads.agents import GAPS, AgentShape, agent_workload, context_tokens

MACHINE = machine("llama-3-8b", "h100", block_tokens=64)
SMALL = Plan(MACHINE, ("tools",), (0.34,), users=6, sessions=12, shape=AgentShape(turns=8))
CROWDED = Plan(MACHINE, ("tools",), (0.333,), users=12, sessions=24, shape=AgentShape(turns=12))
"""Two thirds of the sessions of the page."""


@pytest.mark.parametrize("gaps", ["tools", "any"])
def test_sessions_end_sooner_than_by_last_use(gaps):
    """Also with gaps that no history predicts."""
    points = {rule: measure_point(CROWDED, gaps, 0.333, rule) for rule in (LRU, AUTO)}
    assert points[AUTO].hit_rate >= 0.98 * points[LRU].hit_rate
    assert points[AUTO].session_s <= points[LRU].session_s / 0.98
    assert not points[AUTO].unanswered
    if gaps == "tools":
        assert points[AUTO].session_s < 0.75 * points[LRU].session_s
        assert points[AUTO].hit_rate > 2 * points[LRU].hit_rate


def test_study_prints_a_table_for_each_kind_of_gaps():
    study = AgentStudy(SMALL, AgentResults())
    lines: list[str] = []
    study.fill_results(lines.append)
    (table,) = study.make_tables()
    assert [row[0] for row in table.rows] == ["unlimited", LRU, CACHE_TTL, AUTO] and len(lines) == 4
    assert table.rows[1][3] == "1.00" and table.rows[0][1] == "all"


@pytest.mark.parametrize("gaps", GAPS)
def test_workload_is_made_again_from_its_seed(gaps):
    shape = AgentShape(turns=6)
    workload = agent_workload(shape, gaps, 3, 10, seed=4)
    assert workload == agent_workload(shape, gaps, 3, 10, seed=4) != agent_workload(shape, gaps, 3, 10, seed=5)
    for session in workload.sessions:
        assert [bool(turn.tool) for turn in session.turns] == [True] * (len(session.turns) - 1) + [False]
        assert context_tokens(session) == sorted(context_tokens(session))


def test_unknown_gaps_and_rules_are_named():
    with pytest.raises(UserError, match="unknown gaps 'x'"):
        agent_workload(AgentShape(), "x", 1, 1)
    with pytest.raises(UserError, match="unknown rule 'x'"):
        Plan(SMALL.machine, ("tools",), (0.5,), ("x",))
