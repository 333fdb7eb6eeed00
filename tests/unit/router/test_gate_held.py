"""KV of finished requests is held for a moment for those that go on from it, and they go first (``hold``)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gate import Crowded, gate_of, gated, running

from cluster_world import World, a_request
from memserve.base.config import AdmissionConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission, Caching, Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.router.admission.memory_budget import HELD_NS_MAX, HELD_NS_MIN

A, B, C = ([k] * 100 for k in (1, 2, 3))
"""Prompts of which two fit into the memory of an instance."""


def world_of(mode: Admission = Admission.CACHE, **gate: Any) -> World:
    """One instance on which ``a`` has just ended, and ``b`` runs."""
    gate |= {"mode": mode, "hold": mode is Admission.CACHE, "output_tokens_max": 8, "wait_ns": 4 * NS_PER_S}
    world = gated(("c", Role.COLOCATED), caching=Caching.PD_CACHING_3, **gate)
    world.ask(a_request("a", A))
    world.run()
    world.ask(a_request("b", B, max_tokens=50))
    return world


def test_next_turn_precedes_a_new_request_without_room():
    world = world_of()
    world.ask(a_request("newcomer", C))
    assert running(world, "c") == ["b"] and gate_of(world).waiting == {"": 1}
    world.ask(a_request("goes on", A + [4] * 20))
    assert running(world, "c") == ["b", "goes on"] and gate_of(world).waiting == {"": 1}
    world.run()
    assert world.clients["newcomer"].rejected is None


def test_memory_admission_holds_no_prefix_and_keeps_order():
    world = world_of(Admission.MEMORY)
    world.ask(a_request("newcomer", C))
    assert running(world, "c") == ["b", "newcomer"]


def test_held_prefix_without_next_turn_is_released():
    world = world_of()
    world.ask(a_request("newcomer", C))
    world.wait(HELD_NS_MIN - NS_PER_MS, beats=False)
    assert running(world, "c") == ["b"]
    world.wait(HELD_NS_MAX, beats=False)
    assert running(world, "c") == ["b", "newcomer"]


def test_nothing_is_held_where_nothing_runs():
    world = world_of()
    world.run()
    world.ask(a_request("newcomer", C))
    assert running(world, "c") == ["newcomer"]


def test_head_of_the_queue_is_not_starved():
    """It has waited for half of its time: then what is held goes, and those that go on from it wait behind the head."""
    world = world_of()
    world.ask(a_request("newcomer", [5] * 150))
    turn, history = 0, A
    while running(world, "c") == ["b"] and turn < 40:
        turn += 1
        history = [*history, 7]
        world.ask(a_request(f"turn {turn}", history, max_tokens=1))
        world.wait(100 * NS_PER_MS, beats=False)
    assert world.clients["newcomer"].rejected is None


def test_a_request_of_another_tenant_does_not_take_the_turn():
    world = world_of()
    world.ask(a_request("newcomer", C, tenant="one"))
    world.ask(a_request("goes on", A + [4] * 20, tenant="two"))
    assert running(world, "c") == ["b"] and gate_of(world).waiting == {"one": 1, "two": 1}


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_random_load_leaves_nothing_held(seed):
    """``check_invariants`` runs after every event."""
    world = Crowded(seed, mode=Admission.CACHE, hold=True, evictions_max=None, unit_tokens=None)
    for _ in range(60):
        world.happen()
    world.end()
    gate, memory = gate_of(world), world.cluster._lifecycle.admission.memory
    assert (
        gate.admitted == gate.released and gate.active == 0 and gate.waiting == {} and "pressure" not in gate.rejected
    )
    world.wait(HELD_NS_MAX + world.config.admission.wait_ns)
    assert not any(memory.ledger.holders_of(member.number) for member in world.cluster._registry)


def test_admission_hold_needs_cache_admission():
    for rest in ({"mode": Admission.MEMORY}, {"mode": Admission.CACHE, "evictions_max": 1}):
        with pytest.raises(UserError, match="--admission-hold needs --admission cache"):
            AdmissionConfig(hold=True, **rest)
