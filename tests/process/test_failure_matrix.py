"""Cells of the failure matrix on real processes, drawn by a seed; ``support/failure_matrix.py`` runs all of them."""

from __future__ import annotations

import importlib.util
import random

import pytest

import faulty_instance
from failure_matrix import FAULTS, LINKS, MOMENTS, PHASES, ROLES, Case, all_cases, run_matrix
from geometries import SHAPES

pytestmark = pytest.mark.timeout(600)


def test_every_role_fault_phase_and_link_has_a_cell() -> None:
    cases = all_cases()
    assert {case.role for case in cases} == set(ROLES)
    assert {case.fault for case in cases} == set(FAULTS)
    assert {case.phase for case in cases} == set(PHASES)
    assert {case.link for case in cases} == set(LINKS)
    assert set(MOMENTS.values()) == set(faulty_instance.MOMENTS), "an instance knows when each of them is"
    assert len(cases) == len(set(cases)) == 132


def drawn(count: int, seed: int) -> list[Case]:
    """Cells of one role and link, so that one fleet is enough; each with another fault."""
    rng = random.Random(seed)
    role, link = rng.choice(ROLES), rng.choice(LINKS if importlib.util.find_spec("nixl_cu12") else LINKS[:-1])
    faults = rng.sample(FAULTS, len(FAULTS))
    cells = [[c for c in all_cases() if (c.role, c.link, c.fault) == (role, link, fault)] for fault in faults]
    return [rng.choice(cell) for cell in cells if cell][:count]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_clients_see_one_right_stream_and_nothing_is_left_behind(request: pytest.FixtureRequest, kv_dtype: str) -> None:
    count, seed = request.config.getoption("--matrix-cells"), request.config.getoption("--matrix-seed")
    cells = drawn(count, seed) if kv_dtype == "auto" else drawn(1, seed + 1)
    shape = SHAPES[request.config.getoption("--matrix-geometry")].with_codes(kv_dtype)
    assert cells
    if shape.kv.latent and kv_dtype != "auto":
        pytest.skip("latents are kept as they are computed")
    for result in run_matrix(cells, pause_s=7.0, clients=6, seed=seed, shape=shape):
        assert result.good, result.line()
        assert not result.errors, result.line()
