"""kill -9 of real processes while a store writes; ``support/store_kills.py`` does as many as one likes."""

from __future__ import annotations

import pytest

from store_kills import KINDS, TURNS, run_kills

pytestmark = pytest.mark.timeout(1800)


def test_every_kind_of_kill_has_a_turn() -> None:
    assert set(TURNS) == set(KINDS) == set(TURNS[:3])


def test_writes_and_answers_survive_kills(request: pytest.FixtureRequest) -> None:
    """After each kill; out of the store at least once."""
    done = run_kills(request.config.getoption("--store-kills"), seed=0)
    assert done
    for one in done:
        assert one.good, one.line()
    assert any(one.before for one in done), "no kill came when there was something to be lost"
