"""Servers of other projects as members: they run what they can, and no member asks for their KV."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from cluster_world import BLOCK, World, a_request, cached, dispatches
from memserve.base.config import AdmissionConfig
from memserve.base.types import Role, SamplingParams
from memserve.base.units import NS_PER_S
from memserve.protocol.kv_hints import HintAction, HintOutcome, KvHint, KvHinted
from memserve.protocol.messages import HoldAdapters, Migrate, Pin
from memserve.router.events import PrefixPinned, RequestArrived

LONG = list(range(6 * BLOCK))
BOTH = (("c1", Role.COLOCATED), ("e1", Role.ENGINE))


def placed(world: World, name: str, prompt: list[int], **more) -> tuple[str, tuple]:
    """Where a request goes, and from where it may fetch its prefix."""
    ((to, order),) = dispatches(world, world.post(RequestArrived(a_request(name, prompt, **more))))
    return to, order.holders


def test_an_engine_that_has_the_prefix_gets_the_request() -> None:
    world = World(BOTH, policy="cost")
    cached(world, "e1", LONG)
    assert placed(world, "a", [*LONG, 1]) == ("e1", ())
    world.run()
    world.check_repeatable()


@pytest.mark.parametrize("policy", ["cost", "least-load", "prompt-tree", "affinity", "session", "best-fit"])
def test_no_instance_fetches_from_an_engine_nor_an_engine(policy: str) -> None:
    world = World((*BOTH, ("c2", Role.COLOCATED), ("e2", Role.ENGINE)), policy=policy)
    cached(world, "e1", LONG)
    cached(world, "c1", LONG[: 2 * BLOCK])
    for number in range(12):
        to, holders = placed(world, str(number), [*LONG, number])
        assert all(holder.peer.name == "c1" for holder in holders) and (not holders or to == "c2")
    world.run()
    world.check_repeatable()


@pytest.mark.parametrize("asks", [{"beam_width": 2}, {"sampling": SamplingParams(grammar="x")}])
def test_what_needs_an_instance_waits_for_one(asks: dict) -> None:
    world = World((("e1", Role.ENGINE),), policy="least-load")
    request = a_request("a", [1, 2, 3])
    for name, value in asks.items():
        request = structs.replace(request, **{name: value})
    assert not dispatches(world, world.post(RequestArrived(request)))
    assert dispatches(world, world.post(RequestArrived(a_request("b", [1, 2])))), "others go to the engine"
    world.add("c1", Role.COLOCATED)
    assert any(r.dispatch.request.request_id.startswith("a") for r in world.instances["c1"].running.values())


def test_pairs_and_engines_stand_side_by_side() -> None:
    world = World((("p1", Role.PREFILL), ("d1", Role.DECODE), ("e1", Role.ENGINE)), policy="least-load")
    targets = []
    for number in range(6):
        ((to, order),) = dispatches(world, world.post(RequestArrived(a_request(str(number), LONG))))
        targets.append(to)
        assert (order.decode_at is None) == (to == "e1")
    assert set(targets) == {"p1", "e1"}
    world.run()


def test_a_killed_engines_requests_go_on_at_an_instance() -> None:
    world = World(BOTH, policy="least-load")
    for number in range(6):
        world.ask(a_request(str(number), LONG, max_tokens=8))
    world.step()
    assert world.instances["e1"].running
    world.kill("e1")
    world.wait(6 * NS_PER_S)
    world.run()
    world.check_repeatable()


def test_nothing_is_pinned_moved_or_loaded_at_an_engine() -> None:
    world = World(BOTH, policy="least-load", migration="auto")
    cached(world, "e1", LONG)
    actions = world.post(PrefixPinned("doc", "", np.array(LONG, np.int32), 60 * NS_PER_S))
    actions += world.post(KvHinted("h", HintAction.PREFETCH, "", "", np.array(LONG, np.int32), destination="e1"))
    assert not [to for to, _ in world.sent(actions, Pin | KvHint | HoldAdapters) if to == "e1"]
    assert world.cluster.hints.result_of("h").outcome is HintOutcome.REJECTED
    for number in range(4):
        world.ask(a_request(str(number), LONG, max_tokens=40))
    world.step()
    world.instances["e1"].draining = True
    world.wait(2 * NS_PER_S)
    assert not any(isinstance(message, Migrate) for message in world.instances["e1"].heard)
    world.run()


def test_memory_counts_at_engines_as_at_instances() -> None:
    world = World(BOTH, policy="least-load", admission=AdmissionConfig("memory", waiting_max=20))
    for number in range(12):
        world.ask(a_request(str(number), [number, *LONG], max_tokens=12 * BLOCK))
    held = {name: len(instance.running) for name, instance in world.instances.items()}
    assert held == {"c1": 3, "e1": 3}, "64 blocks each, 19 a request"
    world.run()
    world.check_repeatable()


def test_what_is_expected_for_a_short_time_ends_first() -> None:
    world = World((("c1", Role.COLOCATED),), policy="least-load")
    world.add("e1", Role.ENGINE, publishes_events=False)
    world.ask(a_request("a", [1]))
    world.ask(a_request("b", LONG))
    assert world.instances["e1"].running, "the idle one"
    world.run()
    world.ask(a_request("c", LONG[::-1]))
    world.run()
    world.wait(world.config.speculative_ttl_ns + 2 * NS_PER_S)
    blocks = {view.peer.name: view.tree_blocks for view in world.cluster.instances()}
    assert blocks == {"c1": 0, "e1": 6}, "one of them never says what it has"
