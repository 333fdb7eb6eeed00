"""Cells of the failure matrix on real processes, drawn by a seed; ``support/failure_matrix.py`` runs all of them."""

from __future__ import annotations

import random

import pytest

from failure_matrix import FAULTS, PHASES, ROLES, Case, all_cases, run_matrix

pytestmark = pytest.mark.timeout(600)


def test_every_role_fault_and_phase_has_a_cell() -> None:
    cases = all_cases()
    assert {case.role for case in cases} == set(ROLES)
    assert {case.fault for case in cases} == set(FAULTS)
    assert {case.phase for case in cases} == set(PHASES)
    assert len(cases) == len(set(cases)) == 64


def drawn(count: int, seed: int) -> list[Case]:
    """Cells of one role, so that one fleet is enough; each with another fault."""
    rng = random.Random(seed)
    role = rng.choice(ROLES)
    faults = rng.sample(FAULTS, len(FAULTS))
    cells = [[case for case in all_cases() if (case.role, case.fault) == (role, fault)] for fault in faults]
    return [rng.choice(cell) for cell in cells if cell][:count]


def test_clients_see_one_right_stream_and_nothing_is_left_behind(request: pytest.FixtureRequest) -> None:
    count, seed = request.config.getoption("--matrix-cells"), request.config.getoption("--matrix-seed")
    results = list(run_matrix(drawn(count, seed), pause_s=7.0, clients=6, seed=seed))
    assert len(results) == count
    for result in results:
        assert result.good, result.line()
        assert not result.errors, result.line()
