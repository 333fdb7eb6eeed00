"""What the gate counts as taken besides running requests: ended ones, pins, KV on its way; and that no gate stays
closed for it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gate import Crowded, gate_of, gated, running

from cluster_world import a_request, cached
from memserve.base.types import Admission, Caching, Role
from memserve.base.units import NS_PER_S
from memserve.protocol.events import Send
from memserve.protocol.messages import Dispatch, Pin, Pinned, Unpin
from memserve.router.events import ClockTicked, PrefixPinned, PrefixUnpinned, RequestArrived

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


# -- what has ended


def test_ended_requests_stop_counting_after_a_while():
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


def test_resumed_attempt_is_reserved_once():
    """Its client has asked another router, and comes back: what is kept of the attempt becomes its own again."""
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=0, output_tokens_max=0, caching=Caching.PD_CACHING_3)
    world.ask(a_request("r", [1] * 120))
    (req,) = world.cluster._lifecycle.requests.by_id.values()
    memory, attempt = world.cluster._lifecycle.admission.memory, req.attempt
    node, before = attempt.first.number, memory.ledger.blocks_free(attempt.first.number)
    world.run()
    assert memory.ledger.blocks_inactive(node)
    memory.reserve_for_attempt(req, attempt)
    memory.ledger.check_invariants()
    assert not memory.ledger.blocks_inactive(node) and before - memory.ledger.blocks_free(node) <= 1, "its answer alone"


def test_released_memory_admits_waiting_requests():
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


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32), evictions_max=st.sampled_from([None, 0, 1, 2, 1000]), cached=st.booleans())
def test_fitting_request_is_admitted_on_retry_after_any_load(seed, evictions_max, cached):
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


def test_concurrent_shared_prefix_is_counted_twice_at_decode():
    """At the prefill instance it is computed once. The decode instance shares what is there when a handover begins."""
    world = gated(("p", P), ("d", D), mode=Admission.CACHE, caching=Caching.PD_CACHING_2)
    memory = world.cluster._lifecycle.admission.memory

    def taken() -> list[int]:
        return [64 - memory.ledger.blocks_free(world.cluster._registry.member_by_name(name).number) for name in "pd"]

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


# -- pins

DOCUMENT = [5] * 160  # 40 of 64 blocks


def pinned(mode=Admission.MEMORY, **gate):
    """An instance with a document that is pinned there, and has said so."""
    world = gated(("c", C), mode=mode, caching=Caching.PD_CACHING_3, **gate)
    cached(world, "c", DOCUMENT)
    pin(world)
    world.say_all(world.instances["c"])
    return world


def pin(world, tokens=DOCUMENT) -> list:
    return world.post(PrefixPinned("doc", "", a_request("", tokens).prompt, 60 * NS_PER_S))


def free(world) -> int:
    return world.cluster._lifecycle.admission.memory.ledger.blocks_free(0)


def test_pinned_memory_is_no_room_while_requests_run():
    world = pinned()
    assert free(world) == 24
    world.ask(a_request("small", [1] * 60, max_tokens=4))  # 16 blocks
    world.ask(a_request("large", [2] * 60, max_tokens=4))
    assert running(world, "c") == ["small"] and gate_of(world).waiting == {"": 1}
    world.run()
    assert free(world) == 24
    world.ask(a_request("small again", [1] * 60, max_tokens=4))
    world.ask(a_request("large again", [2] * 60, max_tokens=4))
    world.post(PrefixUnpinned("doc", ""))
    assert running(world, "c") == ["small again", "large again"] and free(world) == 32
    world.run()


@pytest.mark.parametrize("mode", [Admission.MEMORY, Admission.CACHE])
def test_a_pin_that_a_request_begins_with_is_counted_once(mode):
    world = pinned(mode)
    for k in range(3):
        world.ask(a_request(f"r{k}", [*DOCUMENT, k, 1, 2, 3], max_tokens=12))  # 4 blocks of its own
    assert len(running(world, "c")) == 3 and free(world) == 24 - 3 * 4
    world.post(PrefixUnpinned("doc", ""))
    assert free(world) == 24 - 3 * 4, "they hold it still"
    world.run()
    assert free(world) == 64


def test_pins_are_evicted_for_a_fitting_request_and_restored():
    """They are given up before the request is sent there: it could not tell that it waits for them."""
    world = pinned()
    actions = world.post(RequestArrived(a_request("large", [2] * 116, max_tokens=4)))
    sent = [type(action.message) for action in actions if isinstance(action, Send)]
    assert sent == [Unpin, Dispatch] and free(world) == 64 - 30
    assert world.cluster.handles()[0].pinned_tokens == 0
    assert not world.sent(pin(world), Pin), "it would take the room of who was let in"
    world.run()
    world.now += NS_PER_S
    assert world.sent(world.post(ClockTicked()), Pin)
    world.say_all(world.instances["c"])
    assert free(world) == 24 and world.cluster.handles()[0].pinned_tokens == 160


def test_ledger_follows_pins_reported_by_the_instance():
    """As much as there could be, as much as there is; nothing when it was given up, or its time is over."""
    world = gated(("c", C), mode=Admission.MEMORY, caching=Caching.PD_CACHING_3)
    cached(world, "c", DOCUMENT)
    pin(world, [*DOCUMENT, *DOCUMENT[:40]])
    assert free(world) == 64 - 50
    handle = next(iter(world.instances["c"].pins))
    world.instances["c"].outbox.clear()
    world.hear(world.instances["c"].peer, Pinned(handle, 160))
    assert free(world) == 24
    world.hear(world.instances["c"].peer, Pinned(handle, 0))
    assert free(world) == 64
    pin(world)
    world.wait(59 * NS_PER_S)
    assert free(world) == 24
    world.wait(2 * NS_PER_S)
    assert free(world) == 64 and not world.instances["c"].pins
