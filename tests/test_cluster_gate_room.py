"""What the gate counts as taken besides those who run: what has ended, pins, and KV on its way; and that no gate stays
closed for it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_world import a_request
from memserve.types import Admission, Caching, Role
from memserve.units import NS_PER_S
from test_cluster_gate import Crowded, gate_of, gated, running

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


# -- what has ended


def test_what_ended_a_minute_ago_keeps_nobody_out():
    """With no evictions at all the memory is full, and the gate closed; not for ever, and it says for how long."""
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=0, output_tokens_max=0, caching=Caching.PD_CACHING_3)
    for k in range(3):
        world.ask(a_request(f"r{k}", [k] * 80))
        world.run()
        world.now += 10 * NS_PER_S
    client = world.ask(a_request("refused", [9] * 100))
    assert gate_of(world).rejected == {"pressure": 1} and client.rejected.retry_after_s == pytest.approx(40, abs=0.01)
    world.now += int(client.rejected.retry_after_s * NS_PER_S)
    world.ask(a_request("again", [9] * 100))
    assert running(world, "c") == ["again"] and gate_of(world).evictions == 0
    world.run()


def test_what_is_let_go_makes_room_for_who_waits():
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=0, output_tokens_max=0, caching=Caching.PD_CACHING_3,
                  kept_ns=2 * NS_PER_S)  # fmt: skip
    world.ask(a_request("ended", [1] * 120))
    world.run()
    world.ask(a_request("long", [2] * 80, max_tokens=50))
    world.ask(a_request("waits", [3] * 120))
    assert running(world, "c") == ["long"] and gate_of(world).waiting == {"": 1}
    world.wait(3 * NS_PER_S)
    assert running(world, "c") == ["long", "waits"]
    world.run()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), evictions_max=st.sampled_from([None, 0, 1, 2, 1000]), cached=st.booleans())
def test_after_any_load_whatever_fits_is_let_in_when_it_was_told_to_come_again(seed, evictions_max, cached):
    """At the first try or, if it was turned away for memory of others that have ended, at the second."""
    mode = Admission.CACHE if cached else Admission.MEMORY
    world = Crowded(seed, mode=mode, evictions_max=evictions_max, unit_tokens=None, waiting_max=8)
    for _ in range(60):
        world.happen()
    world.end()
    for k, tokens in enumerate((250, 120, 4, 250)):
        client = world.ask(a_request(f"first{k}", [tokens % 49] * tokens, max_tokens=4))
        if client.rejected is not None:
            assert client.rejected.overloaded and evictions_max is not None, client.rejected
            assert client.rejected.retry_after_s <= 60
            world.wait(int(client.rejected.retry_after_s * NS_PER_S))
            client = world.ask(a_request(f"second{k}", [tokens % 49] * tokens, max_tokens=4))
        assert client.rejected is None and gate_of(world).active == 1, client.rejected
        world.end()


# -- KV on its way


def test_who_comes_with_the_same_prefix_at_the_same_time_brings_it_twice():
    """At the prefill instance it is computed once. The decode instance shares what is there when a handover begins."""
    world = gated(("p", P), ("d", D), mode=Admission.CACHE, caching=Caching.PD_CACHING_2)
    memory = world.cluster._lifecycle.gate.memory

    def taken() -> list[int]:
        return [64 - memory.ledger.blocks_free(world.cluster._registry.named(name).number) for name in "pd"]

    for k in range(2):
        world.ask(a_request(f"r{k}", [7] * 40 + [k], max_tokens=3))  # 10 blocks that are alike, and one each
    assert taken() == [12, 22]
    world.step("p")
    world.say_all(world.instances["d"])
    assert taken() == [0, 22], "both have brought it"
    world.ask(a_request("r2", [7] * 40 + [2], max_tokens=3))
    assert taken() == [12 - 1, 23], "it finds it there"
    world.run()
    assert taken() == [0, 0]
