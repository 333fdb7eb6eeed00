"""How OpenMP's threads wait: chosen before torch is imported, never against the user."""

from __future__ import annotations

import os
import sys

import pytest

from memserve.system.process import PRIMITIVES_MAX, set_thread_environment

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TOKENIZERS_PARALLELISM")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has set nothing and not imported torch, as far as can be seen; restored afterwards."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # remembered, so that what the function sets is undone
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return monkeypatch


def test_workers_spin_for_a_short_time(fresh: pytest.MonkeyPatch) -> None:
    set_thread_environment()
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0 and "OMP_WAIT_POLICY" not in os.environ


def test_the_users_choice_stays(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("GOMP_SPINCOUNT", "7")
    set_thread_environment()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_a_waiting_policy_is_the_users_choice_too(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("OMP_WAIT_POLICY", "PASSIVE")
    set_thread_environment()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_nothing_is_set_once_torch_is_there(fresh: pytest.MonkeyPatch) -> None:
    fresh.setitem(sys.modules, "torch", os)  # any module will do
    set_thread_environment()
    assert not any(name in os.environ for name in NAMES)


def test_the_cache_of_primitives_is_bounded(fresh: pytest.MonkeyPatch) -> None:
    set_thread_environment()
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == PRIMITIVES_MAX
