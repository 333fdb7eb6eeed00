"""OrbitFlow's integer program: what it keeps, and what it pauses."""

from __future__ import annotations

import pytest

from memserve.base.units import NS_PER_MS
from memserve.instance.layerwise.budget import LayerBudget, LayeredView, LinkRate
from memserve_lab.experiments.layerkv import SOLVES_EVERY, ProgramPolicy, solve

pytest.importorskip("scipy", reason="the program needs a solver: the bench extra")

LAYERS = 8
BUDGET = LayerBudget(LAYERS, page_bytes=1_000_000, link=LinkRate(1e9), tpot_ns=100 * NS_PER_MS)  # a page a millisecond
STEP_NS = 40 * NS_PER_MS


def lying(number: int, entries: int = 8, kept: int = 0) -> LayeredView:
    return LayeredView(number, entries, kept, decodes=True, may_park=True)


def test_with_room_for_it_nothing_waits() -> None:
    """64 pages would be read back; 40 of them beside computing, so 3 layers of 8 blocks, at least, are kept."""
    (kept,) = solve([lying(0)], BUDGET, STEP_NS, free_blocks=8)
    assert kept is not None and kept >= 3


def test_without_room_steps_wait_within_the_objective() -> None:
    assert solve([lying(0)], BUDGET, STEP_NS, free_blocks=0) == [0]  # 64 ms of 100


def test_request_beyond_the_objective_is_paused() -> None:
    """Each reads back 64 pages in a step: two are more than 100 ms."""
    found = solve([lying(0), lying(1)], BUDGET, STEP_NS, free_blocks=0)
    assert sorted(found, key=str) == [0, None]
    assert None not in solve([lying(0), lying(1)], BUDGET, STEP_NS, free_blocks=8)


def test_kept_layers_fit_their_memory() -> None:
    some = [lying(0, entries=16, kept=1), lying(1, entries=8), lying(2, entries=4)]
    kept = solve(some, BUDGET, STEP_NS, free_blocks=9)
    frames = [-(-one.entries // LAYERS) * (layers or 0) for one, layers in zip(some, kept, strict=True)]
    assert sum(frames) <= 9 + 2


def test_solution_is_reused_until_requests_change_or_it_ages() -> None:
    policy = ProgramPolicy()
    assert policy.indices_to_park([lying(7)], BUDGET, STEP_NS, 0) == [] and policy.kept_most(7, LAYERS) == 0
    for _ in range(SOLVES_EVERY - 1):
        assert policy.indices_to_park([lying(7)], BUDGET, STEP_NS, 8) == [] and policy.kept_most(7, LAYERS) == 0
    assert policy.indices_to_park([lying(7)], BUDGET, STEP_NS, 8) == [] and policy.kept_most(7, LAYERS) >= 3
    assert len(policy.indices_to_park([lying(7), lying(8)], BUDGET, STEP_NS, 0)) == 1
    assert policy.kept_most(9, LAYERS) == LAYERS  # not in it
