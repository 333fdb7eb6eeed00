"""Tenants: each shared resource in turn, with one tenant at its worst and another that wants its share of it."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instance_world import PROMPT, VOCAB, World, config, request
from memserve.api.metrics.http import ApiMetrics
from memserve.base.config import AdmissionConfig, ClusterConfig, PoolConfig
from memserve.base.fairness import TenantStore, Turns
from memserve.base.types import isolation
from memserve.host.stats import RouterStats
from memserve.instance.scheduler.sequence import Group
from memserve.kv.identity import NAMES_MAX
from memserve.kv.pool import BlockPool
from memserve.router.admission.needs import with_operator_settings
from memserve.router.events import PrefixPinned
from memserve.router.machine import Cluster
from memserve.router.outbox import Timers
from memserve.router.placement.prefix_directory import Trees
from memserve.router.report import AdmissionStats, ClusterStats, Counters
from memserve_lab.sim.fuzz.campaign import judge, setting_of
from memserve_lab.sim.fuzz.clients import FLOOD
from memserve_lab.sim.fuzz.scenario import draw

LONG = [(7 * i + i * i) % VOCAB for i in range(48)]


def endings(world: World) -> list[str]:
    """Requests in the order in which they ended."""
    return [name for name, _ in world.final]


def first_tokens(world: World, name: str, limit: int = 200) -> int:
    """Steps until ``name`` has its first token."""
    steps = 0
    while not world.got.get((name, 0)):
        world.step()
        steps += 1
        assert steps < limit, f"{name} has no token after {steps} steps"
    return steps


# -- the waiting line and the slots


def test_queued_flood_delays_another_tenant_by_one_turn():
    """Two slots, forty requests of one tenant in the line: another tenant's request is the next to start."""
    world = World(config(running=2, depth=1))
    for at in range(40):
        world.arrive(request(f"flood{at}", PROMPT[: 3 + at % 5], max_tokens=3, tenant="a"))
    world.arrive(request("b", PROMPT[:4], max_tokens=3, tenant="b"))
    world.drain()
    assert endings(world).index("b") <= 3
    world.check_all_ended()


@pytest.mark.parametrize("priority", [-(1 << 31), 1 << 30])
def test_priority_orders_the_requests_of_one_tenant_alone(priority):
    """A tenant that says its requests matter most, or another's matter least, gets nothing of others for it."""
    world = World(config(running=2, depth=1))
    for at in range(20):
        world.arrive(request(f"a{at}", PROMPT[: 3 + at % 5], max_tokens=3, tenant="a", priority=-(1 << 31)))
    world.arrive(request("late", PROMPT[:4], max_tokens=3, tenant="b", priority=priority))
    world.arrive(request("last", PROMPT[:4], max_tokens=1, tenant="a", priority=5))
    world.drain()
    assert endings(world).index("late") <= 3 and "last" in endings(world)[-2:]


def test_an_operator_may_let_priority_count_among_all_tenants():
    terms = AdmissionConfig(weights=(("b", 3),), priority_across_tenants=True)
    urgent = with_operator_settings(request("x", [1], tenant="a", priority=-4), terms)
    assert (urgent.urgency, urgent.weight) == (-4, 1)
    assert with_operator_settings(request("x", [1], tenant="b", priority=0), terms).weight == 3
    plain = request("x", [1], tenant="b", priority=-4)
    assert with_operator_settings(plain, AdmissionConfig()) is plain
    world = World(config(running=1, depth=1))
    for at in range(4):
        world.arrive(request(f"a{at}", PROMPT[:4], max_tokens=1, tenant="a"))
    world.arrive(request("b", PROMPT[1:5], max_tokens=1, tenant="b", urgency=1))
    world.arrive(request("c", PROMPT[2:6], max_tokens=1, tenant="c", urgency=-1))
    world.drain()
    assert endings(world) == ["a0", "c", "a1", "a2", "a3", "b"]


def test_tenant_holding_all_slots_is_preempted_to_fair_share():
    """Four slots taken by answers of thirty tokens. The other tenant's first request does not wait for one to end."""
    world = World(config(running=4, depth=1, hbm=64))
    for at in range(4):
        world.arrive(request(f"a{at}", PROMPT[at : at + 3], max_tokens=30, tenant="a"))
    for _ in range(6):
        world.step()
    world.arrive(request("b", PROMPT[:5], max_tokens=4, tenant="b"))
    assert first_tokens(world, "b") <= 3
    world.drain()
    world.check_all_ended()
    stats = world.machine.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute == 1


def preemptions(world: World) -> int:
    """Sequences that gave way so far."""
    stats = world.machine.stats()
    return stats.preemptions_swap + stats.preemptions_recompute


def test_burst_within_slot_share_waits_for_one_plan():
    """Eight slots taken by long answers. Four requests of another tenant begin together, and are not taken back."""
    world = World(config(running=8, depth=1, hbm=96, chunk=64, step_tokens=64))
    for at in range(12):
        world.arrive(request(f"a{at}", PROMPT[at % 8 : at % 8 + 3], max_tokens=30, tenant="a"))
    for _ in range(4):
        world.step()
    for at in range(5):
        world.arrive(request(f"b{at}", PROMPT[at : at + 4], max_tokens=12, tenant="b"))
    assert sum(first_tokens(world, f"b{at}") for at in range(4)) <= 2  # the plan under way, and the next one
    assert preemptions(world) == 4 and not world.got.get(("b4", 0))
    world.drain()
    world.check_all_ended()
    assert endings(world).index("b4") < endings(world).index("a11")


def test_free_slots_are_shared_among_waiting_tenants():
    """Four slots, and two tenants that come together: two each, and none has to give way."""
    world = World(config(running=4, depth=1, hbm=64, chunk=64, step_tokens=64))
    world.arrive(request("first", PROMPT[:4], max_tokens=1, tenant="z"))
    for at in range(6):
        world.arrive(request(f"a{at}", PROMPT[at : at + 3], max_tokens=20, tenant="a"))
    for at in range(2):
        world.arrive(request(f"b{at}", PROMPT[at : at + 4], max_tokens=20, tenant="b"))
    assert sum(first_tokens(world, f"b{at}") for at in range(2)) <= 2
    assert preemptions(world) == 0
    world.drain()
    world.check_all_ended()


def test_request_beyond_its_tenants_share_is_not_starved():
    world = World(config(running=4, depth=1, hbm=64))
    for at in range(40):
        world.arrive(request(f"a{at}", PROMPT[at % 8 : at % 8 + 3], max_tokens=3 + at % 4, tenant="a"))
    world.arrive(request("b", PROMPT[:4], max_tokens=3, n=4, tenant="b"))
    world.drain(400)
    world.check_all_ended()
    assert endings(world).index("b") <= 12


def test_new_tenant_is_in_next_plan_when_prompts_hold_all_slots():
    """Four slots with prompts of 48 tokens, 16 a step: a slot and a part of the budget are free at once."""
    world = World(config(running=4, depth=1, chunk=16, step_tokens=16, hbm=96))
    for at in range(6):
        world.arrive(request(f"a{at}", [*LONG[at:], *LONG[:at]], max_tokens=30, tenant="a", use_cache=False))
    for _ in range(10):
        world.step()
    world.arrive(request("b", PROMPT[:5], max_tokens=2, tenant="b"))
    assert first_tokens(world, "b") <= 2  # the plan under way, and the next one
    world.drain(600)
    world.check_all_ended()


def test_tenants_with_their_share_take_nothing_from_each_other():
    """Two slots each: a third request of either waits, and nothing is preempted."""
    world = World(config(running=4, depth=1, hbm=64))
    for at in range(3):
        for tenant in "ab":
            world.arrive(request(f"{tenant}{at}", PROMPT[at : at + 3], max_tokens=9, tenant=tenant))
    world.drain()
    assert preemptions(world) == 0


def test_weights_share_the_slots():
    """Weight three: of the first eight that end six are its own."""
    world = World(config(running=1, depth=1))
    world.arrive(request("first", PROMPT[:4], max_tokens=1, tenant="z"))
    for at in range(12):
        world.arrive(request(f"a{at}", PROMPT[:4], max_tokens=2, tenant="a", weight=3, use_cache=False))
        world.arrive(request(f"b{at}", PROMPT[:4], max_tokens=2, tenant="b", use_cache=False))
    world.drain()
    early = endings(world)[1:9]
    assert sum(name.startswith("a") for name in early) in (5, 6)


def test_full_queue_is_full_for_the_tenant_filling_it():
    world = World(config(running=1, depth=1, waiting=6))
    for at in range(12):
        world.arrive(request(f"a{at}", PROMPT[:4], max_tokens=2, tenant="a"))
    assert len(world.rejected) == 5
    for at in range(12):
        world.arrive(request(f"b{at}", PROMPT[:4], max_tokens=2, tenant="b"))
    assert sum(name.startswith("b") for name in world.rejected) == 12 - 3
    world.drain()
    world.check_all_ended()


# -- the budget of a step


def test_long_prompts_leave_others_their_share_of_each_step():
    """Prompts of 48 tokens, 16 a step: a short one of another tenant is computed in the very next plan."""
    world = World(config(running=6, depth=1, chunk=16, hbm=64))
    for at in range(3):
        world.arrive(request(f"a{at}", LONG[at:], max_tokens=1, tenant="a", use_cache=False))
    world.arrive(request("b", PROMPT[:5], max_tokens=2, tenant="b"))
    assert first_tokens(world, "b") <= 2
    world.drain()
    world.check_all_ended()


def test_reserved_budget_of_unadmittable_tenant_blocks_no_other():
    """One token a step, one slot: the tenant that waits is behind in turns, and the other one must end first."""
    world = World(config(running=1, depth=3, step_tokens=1, chunk=8, hbm=16))
    world.arrive(request("a", PROMPT[:20], max_tokens=6, tenant="a", use_cache=False))
    for _ in range(4):
        world.step()
    world.arrive(request("b", PROMPT[:20], max_tokens=6, tenant="b", use_cache=False))
    world.drain(300)
    world.check_all_ended()
    assert endings(world) == ["a", "b"]


def test_a_tenant_alone_has_the_whole_budget():
    world = World(config(running=6, depth=1, chunk=16, hbm=64))
    world.arrive(request("a", LONG, max_tokens=1, tenant="a"))
    assert first_tokens(world, "a") == 3


# -- memory


def test_tenant_holding_all_memory_is_preempted_to_half_share():
    """Sixteen blocks, all held by answers that go on; the other tenant needs two of them."""
    world = World(config(running=6, depth=1, hbm=16))
    for at in range(4):
        world.arrive(request(f"a{at}", PROMPT[at : at + 12], max_tokens=20, tenant="a", use_cache=False))
    for _ in range(5):
        world.step()
    world.arrive(request("b", PROMPT[:6], max_tokens=2, tenant="b"))
    assert first_tokens(world, "b") <= 3
    world.drain()
    world.check_all_ended()


def test_first_sequence_of_a_tenant_is_not_preempted_for_a_flood():
    """Memory is short. The newcomer is the youngest by far, and stays: the flood's own later ones give way."""
    world = World(config(running=6, depth=1, hbm=14))
    for at in range(4):
        world.arrive(request(f"a{at}", PROMPT[at : at + 6], max_tokens=24, tenant="a", use_cache=False))
    world.step()
    world.arrive(request("b", PROMPT[:6], max_tokens=20, tenant="b", use_cache=False))
    world.drain()
    world.check_all_ended()
    assert endings(world).index("b") <= 1


# -- salts


def test_a_hundred_thousand_salts_leave_nothing_behind():
    """In the pool, its index, and the names that a router keeps; whatever was computed with each was evicted."""
    pool = BlockPool(PoolConfig(64), 4, "model")
    trees = Trees(ClusterConfig(), Timers(), Counters(), b"0" * 16)
    tokens = np.arange(8, dtype=np.int32)
    before = 0
    for at in range(100_000):
        name = isolation("tenant", f"salt{at}")
        trees.prompt_identities(name, "model", tokens, 4)
        lease = pool.acquire(name, tokens)
        blocks = pool.allocate(2)
        assert blocks is not None
        pool.publish(lease, name, tokens, blocks, written_by=0)
        pool.unpin(lease)
        pool.release(blocks)
        if at == 1000:
            before = pool._index.nbytes
    pool.clear_cache()
    assert pool._index.nbytes <= before and pool.blocks_free == 64
    assert len(pool._names) <= NAMES_MAX and len(trees._names) <= NAMES_MAX


# -- cached prefixes


def cache(pool: BlockPool, name: str, tokens: np.ndarray) -> int:
    """What a request of those tokens does to the pool; returns how many of them it found."""
    lease = pool.acquire(name, tokens)
    found = lease.tokens
    blocks = lease.blocks + (pool.allocate(len(tokens) // pool.block_tokens - len(lease.blocks)) or [])
    pool.publish(lease, name, tokens, blocks, written_by=0)
    pool.unpin(lease)
    pool.release(blocks)
    pool.check_invariants()
    return found


def flood(pool: BlockPool, blocks: int, salted: bool, first: int) -> None:
    """So many new blocks of tenant a, eight with each request."""
    for at in range(first, first + blocks, 8):
        tokens = np.full(8 * pool.block_tokens, at, dtype=np.int32)
        assert cache(pool, isolation("a", f"{at}" if salted else ""), tokens) == 0


@pytest.mark.parametrize("salted", [False, True])
@pytest.mark.parametrize("dram", [0, 32])
def test_a_flood_evicts_the_cache_of_its_own_tenant(salted: bool, dram: int):
    """A hundred times the cache, in which b comes back every turnover: half of what is cached is safe, and eight blocks
    belong to a request."""
    pool = BlockPool(PoolConfig(64, dram), 4, "model")
    mine = np.arange(28 * 4, dtype=np.int32)
    cache(pool, "b", mine)
    for turnover in range(100):
        flood(pool, 56, salted, 1000 + 56 * turnover)
        assert cache(pool, "b", mine) == len(mine)


def test_a_tenant_alone_fills_the_whole_cache():
    pool = BlockPool(PoolConfig(64, 32), 4, "model")
    flood(pool, 96, True, 0)
    assert all(pool.match(isolation("a", f"{at}"), np.full(32, at, dtype=np.int32)) == 32 for at in range(0, 96, 8))


def test_a_tenant_that_stays_away_loses_its_cache():
    """By halves, a turnover each: what has been left behind keeps no memory from those that use it."""
    pool = BlockPool(PoolConfig(64), 4, "model")
    mine, kept = np.arange(32 * 4, dtype=np.int32), []
    cache(pool, "b", mine)
    for turnover in range(8):
        flood(pool, 64, False, 1000 + 64 * turnover)
        kept.append(pool.match("b", mine) // 4)
    assert kept == sorted(kept, reverse=True) and 16 <= kept[0] <= 28 and kept[-1] == 0, kept


# -- salts at the scheduler


def test_salted_requests_take_turns_as_one_tenant():
    """A fresh salt on each request is no tenant of its own."""
    world = World(config(running=1, depth=1))
    for at in range(12):
        world.arrive(request(f"a{at}", PROMPT[:4], max_tokens=1, tenant="a", salt=f"{at}"))
    world.arrive(request("b", PROMPT[:4], max_tokens=1, tenant="b"))
    world.drain()
    assert endings(world).index("b") <= 2 and list(world.machine.state.turns) == []


# -- pins and sessions


def a_pin(tenant: str, name: str, tokens: int = 300) -> PrefixPinned:
    return PrefixPinned(name, tenant, np.zeros(tokens, np.int32), 10**12)


def test_a_flood_of_pins_costs_others_none_of_theirs():
    """A hundred thousand pins of one tenant: there is room for so many tokens, and another's pins stay."""
    cluster = Cluster(ClusterConfig(handle_tokens_max=1 << 16))
    for at in range(20):
        cluster.handle(a_pin("b", f"b{at}"), 0)
    for at in range(3000):
        cluster.handle(a_pin("a", f"a{at}"), at)
    cluster.check_invariants()
    views = cluster.handles()
    assert sum(view.tenant == "b" for view in views) == 20
    assert len(views) == (1 << 16) // (300 + 256)
    assert {view.handle for view in views if view.tenant == "a"} >= {f"a{at}" for at in range(2950, 3000)}


def test_pin_retries_back_off_without_a_holder():
    """A pin of what was evicted: 100,000 of them must not cost a look a second each."""
    cluster = Cluster(ClusterConfig())
    cluster.handle(a_pin("a", "s"), 0)
    looks = [now for now in range(300) if cluster._named_prefixes._by_wire["1:a:s"].wake_ns == _tick(cluster, now)]
    assert len(looks) <= 15


def _tick(cluster: Cluster, second: int) -> int:
    from memserve.router.events import ClockTicked

    due = cluster._named_prefixes._by_wire["1:a:s"].wake_ns
    cluster.handle(ClockTicked(), second * 10**9)
    return (
        -1
        if due == cluster._named_prefixes._by_wire["1:a:s"].wake_ns
        else cluster._named_prefixes._by_wire["1:a:s"].wake_ns or 0
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(1, 4), st.booleans()), max_size=80))
def test_tenant_store_equals_its_twin(operations):
    """Beside one list of all entries, searched from the start."""
    store: TenantStore[str] = TenantStore(10)
    twin: list[tuple[str, str, int]] = []
    for tenant, number, cost, removes in operations:
        name = f"n{number}"
        twin = [entry for entry in twin if entry[:2] != (tenant, name)]
        if removes:
            store.pop(tenant, name)
        else:
            gone = store.put(tenant, name, tenant + name, cost)
            twin.append((tenant, name, cost))
            expected = []
            while sum(entry[2] for entry in twin) > 10:
                sums = {t: sum(e[2] for e in twin if e[0] == t) for t, _, _ in twin}
                others = [e[0] for e in twin[:-1]]  # the newest is kept
                fullest = max(others, key=lambda t: (sums[t], t == tenant, t))
                entry = next(e for e in twin if e[0] == fullest)
                twin.remove(entry)
                expected.append("".join(entry[:2]))
            assert gone == expected
        store.check_invariants()
        assert sorted(store.values()) == sorted(t + n for t, n, _ in twin) and len(store) == len(twin)
        assert all(store.get(t, n) == t + n for t, n, _ in twin)


# -- turns


def test_debts_of_tenants_that_never_come_back_are_forgotten():
    turns = Turns()
    for at in range(20_000):
        turns.add_tenant(f"t{at}")
        turns.serve_tenant(f"t{at}", 5)
        turns.serve_tenant(f"t{at}", 5)
        turns.remove_tenant(f"t{at}")
    turns.check_invariants()
    assert len(turns._away) <= 2048


def test_served_at_once_is_served_as_often():
    """Many steps told as one leave the clocks as those steps would have."""
    one, many = Turns(), Turns()
    for turns in (one, many):
        turns.add_tenant("a", 3)
        turns.add_tenant("b")
    one.serve_tenant("a", 7, 5)
    for _ in range(5):
        many.serve_tenant("a", 7)
    assert (one.clock_of("a"), one._clock) == (many.clock_of("a"), many._clock)


# -- the fuzzer


def seeds_with_floods(count: int) -> list[int]:
    """Of colocated instances in good weather."""
    drawn = ((seed, draw(seed, setting_of(seed)).conversations) for seed in range(2000))
    return list(islice((seed for seed, clients in drawn if any(c.tenant == FLOOD for c in clients)), count))


def test_checker_notices_a_starved_tenant(monkeypatch: pytest.MonkeyPatch):
    """Instances that see one tenant alone serve requests as they come: the flood first."""
    seeds = seeds_with_floods(3)
    assert not any(judge(seed, setting_of(seed)).failure for seed in seeds)
    monkeypatch.setattr(Group, "tenant", property(lambda self: "", lambda self, tenant: None))
    assert any("starves" in judge(seed, setting_of(seed)).failure for seed in seeds)


# -- metrics


def test_metrics_name_tenants_to_those_alone_that_may_know():
    gate = AdmissionStats(1, 1, 0, 0, {}, 0, 1, 3, {"secret-a": 2, "": 1})
    stats = RouterStats.from_cluster(ClusterStats(6, 0, 0, 0, 0, 0, 0, Counters(), gate), (), router_ns=1)
    metrics = ApiMetrics()
    metrics.count_answer("secret-a", 7, 3)
    page = metrics.render_page(stats).decode()
    assert "secret-a" not in page and "memserve_admission_waiting 3.0" in page
    named = metrics.render_page(stats, names_tenants=True).decode()
    assert 'memserve_admission_waiting{tenant="secret-a"} 2.0' in named
    assert 'memserve_tenant_prompt_tokens_total{tenant="secret-a"} 7.0' in named
