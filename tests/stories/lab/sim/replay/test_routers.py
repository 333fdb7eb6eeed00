"""Several routers in a replay: production's machines, each of which sees the cluster for itself."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission, Role
from memserve.instance.machine import Instance
from memserve.protocol.peers import Load
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Fault, Setup, StoreSetup, parse_faults
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

H100 = machine("llama-3-8b", "h100")
SMALL = dataclasses.replace(H100, hbm_blocks=600, context_tokens=6000)


def conversations(count: int, turns: int, every_s: float = 0.05) -> Workload:
    """Prompts that grow by 640 tokens a turn, half of them under way at once; each session has words of its own."""
    sessions = []
    for number in range(count):
        first = 1 + 10_000 * number
        asked = [
            Turn(Blocks(16, (Span(first, 640 * (turn + 1)),)), 20 + number % 7, due_s=every_s * number + 2.0 * turn)
            for turn in range(turns)
        ]
        sessions.append(Session(f"s{number}", tuple(asked), history=History.GIVEN))
    return Workload("conversations", "test", tuple(sessions))


def played(setup: Setup, workload: Workload) -> ReplayWorld:
    world = ReplayWorld(setup, workload)
    world.run_workload()
    for node in (world.router, *world.instances, *world.followers):
        if node.alive:
            node.machine.check_invariants()
    return world


def outcome(world: ReplayWorld) -> list[tuple[object, ...]]:
    """Everything that a client saw."""
    return [
        (s.session, s.turn, s.first_ns, list(s.token_ns), s.end_ns, s.cached_tokens, s.instance, s.finish, s.error)
        for s in world.clients.served
    ]


def dispatched(world: ReplayWorld) -> list[int]:
    """Attempts of each router."""
    clusters = [world.router.machine, *(node.machine.cluster for node in world.followers)]
    return [cluster.stats().counters.dispatches for cluster in clusters]


@pytest.mark.parametrize(
    "instances",
    [{Role.COLOCATED: 3}, {Role.PREFILL: 1, Role.DECODE: 2}],
    ids=["colocated", "pairs"],
)
@pytest.mark.parametrize("routers", [2, 4])
def test_connections_are_spread_and_all_are_answered(instances: dict[Role, int], routers: int) -> None:
    """Turns of a session come to any router, and still find what another router's turn has left in a cache."""
    world = played(Setup(instances, SMALL, routers=routers), conversations(24, 4))
    assert all(served.answered and not served.error for served in world.clients.served)
    spread = dispatched(world)
    assert sum(spread) == 96 and min(spread) > 96 / routers / 3
    assert sum(served.cached_tokens for served in world.clients.served) > 24 * 640
    for node in world.followers:
        assert not node.machine.cluster.stats().requests_live
    at_home = Counter(
        len(node.machine.link.routers._follower_by_attempt) for node in world.instances if node.machine.link is not None
    )
    assert at_home == {0: len(world.instances)}, "instances keep attempts of followers that have ended"


def test_a_seed_decides_which_router_a_connection_comes_to() -> None:
    setup, workload = Setup({Role.COLOCATED: 3}, SMALL, routers=2), conversations(12, 3)
    one, again, other = (played(dataclasses.replace(setup, seed=seed), workload) for seed in (5, 5, 6))
    assert outcome(one) == outcome(again) and one.clock.steps == again.clock.steps
    assert dispatched(one) == dispatched(again)
    ways = [
        [world.balancer.requests_at(world.router), *(world.balancer.requests_at(f) for f in world.followers)]
        for world in (one, other)
    ]
    assert ways[0] != ways[1]


def test_tokens_that_are_held_reach_the_router_of_their_attempt() -> None:
    """Fast-forwarding is as exact with several routers as with one: clients see the same to the nanosecond."""
    seen = []
    for fast_forwards in (True, False):
        setup = Setup({Role.COLOCATED: 2}, SMALL, routers=3, fast_forwards=fast_forwards)
        seen.append(outcome(played(setup, conversations(20, 3))))
    assert seen[0] == seen[1]


def test_router_learns_placements_of_others_immediately() -> None:
    """Long before the next heartbeat: two prompts that come to two routers do not both go to the instance that was
    idle, and the third waits behind the shorter one."""
    rows = [(0.0, 4000), (0.01, 2000), (0.02, 1000)]
    sessions = [
        Session(f"s{at}", (Turn(Blocks(16, (Span(1 + 1000 * at, tokens),)), 200, due_s=due),), history=History.GIVEN)
        for at, (due, tokens) in enumerate(rows)
    ]
    ways = set()
    for seed in range(8):
        setup = Setup({Role.COLOCATED: 2}, SMALL, routers=2, seed=seed)
        world = played(setup, Workload("three", "test", tuple(sessions)))
        ways.add(tuple(name in world.balancer.requests_at(world.router) for name in ("0", "1", "2")))
        first, second, third = (served.instance for served in world.clients.served)
        assert first != second and third == second, (seed, first, second, third)
    assert len(ways) > 3, "the balancer led all to the same routers"


def test_single_router_has_no_followers_or_random_choice() -> None:
    worlds = [played(Setup({Role.COLOCATED: 2}, SMALL, seed=seed), conversations(8, 2)) for seed in (0, 1)]
    assert outcome(worlds[0]) == outcome(worlds[1]) and worlds[0].clock.steps == worlds[1].clock.steps
    assert not worlds[0].followers and dispatched(worlds[0]) == [16]


def test_a_router_dies() -> None:
    """Its clients get an error from the network, and all later ones are served by the others; instances let its
    attempts go. Started again it gets its share."""
    workload = conversations(60, 6)
    fault = Fault("kill", "router-2", 1.02, 4.0)
    world = played(Setup({Role.COLOCATED: 3}, SMALL, routers=2, faults=(fault,)), workload)
    cut = [served for served in world.clients.served if served.is_cut_off]
    assert cut and {served.error for served in cut} == {"its router is gone"}
    assert all(served.end_ns == 1_020_000_000 for served in cut)
    others = [served for served in world.clients.served if not served.is_cut_off]
    assert all(served.answered for served in others)
    down = [served for served in others if 1.03e9 < served.scheduled_ns < 5.0e9]
    assert len(down) > 60
    assert dispatched(world)[1] > 10, "it came back, and got nothing"
    for node in world.instances:
        assert not node.machine.state.groups, "an attempt without a router goes on"


def test_prompt_waiting_for_fetch_counts_as_load_at_all_routers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is in no line of its instance yet; the router that has placed it there counts it all the same."""
    seen, plain = list[tuple[int, int]](), Instance.load

    def load(instance: Instance) -> Load:
        told = plain(instance)
        if asked := instance.link.fetches.pending.values():
            seen.append(
                (sum(len(one.request.prompt) - at.prefix_tokens for one, at in asked), told.prefill_tokens_queued)
            )
        return told

    monkeypatch.setattr(Instance, "load", load)
    one_document = tuple(
        Session(f"s{n}", (Turn(Blocks(16, (Span(1, 3200), Span(10_000 * (n + 1), 320))), 20, due_s=0.3 * n),))
        for n in range(8)
    )
    setup = Setup({Role.COLOCATED: 3}, SMALL, ClusterConfig(policy="least-load"), routers=2)
    played(setup, Workload("one document", "test", one_document))
    assert seen and all(told >= computed > 0 for computed, told in seen), seen


def test_all_routers_have_one_gate() -> None:
    """Requests of a follower wait for the owner's places; each is admitted once by each that has a say."""
    bounded = ClusterConfig(admission=AdmissionConfig(Admission.BOUNDED, active_max=4))
    world = played(Setup({Role.COLOCATED: 2}, SMALL, bounded, routers=2), conversations(12, 2))
    owner, follower = world.router.machine.stats().admission, world.followers[0].machine.cluster.stats().admission
    assert all(served.finish for served in world.clients.served) and len(world.clients.served) == 24
    assert owner.admitted == owner.released == 24 and owner.queued > 0
    assert 0 < follower.admitted < 24 and not owner.active


def test_all_routers_name_what_a_store_holds() -> None:
    """Each hears the store for itself: prompts that HBM has lost come from its memory, at any router."""
    stores = StoreSetup(2000 * SMALL.geometry.block_bytes)
    few = dataclasses.replace(SMALL, hbm_blocks=200, context_tokens=4000)
    asked = [Turn(Blocks(16, (Span(1 + 10_000 * (at % 4), 3200),)), 5, due_s=2.0 * at) for at in range(16)]
    sessions = tuple(Session(f"s{at}", (turn,), history=History.GIVEN) for at, turn in enumerate(asked))
    world = played(Setup({Role.COLOCATED: 1}, few, routers=2, stores=stores), Workload("four", "test", sessions))
    assert min(dispatched(world)) >= 4
    tiers = [served.fetched_tier for served in world.clients.served]
    assert tiers[4:] == ["store"] * 12, tiers
    at_follower = [int(name) for name in world.balancer.requests_at(world.followers[0])]
    assert any(number >= 4 for number in at_follower)


def test_simulation_refuses_settings_that_production_refuses() -> None:
    with pytest.raises(UserError, match="0 routers"):
        Setup({Role.COLOCATED: 2}, SMALL, routers=0)
    with pytest.raises(UserError, match="is called 'router-2'"):
        parse_faults("kill:router-2@1+1", {Role.COLOCATED: 2})
    with pytest.raises(UserError, match="takes no steps"):
        parse_faults("slow:router-2@1+1", {Role.COLOCATED: 2}, 2)
