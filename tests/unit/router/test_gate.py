"""The gate in the cluster's machine: what is let in, what waits, what is turned away, and that nothing is forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_world import World, a_request, lone_answer
from memserve.base.config import AdmissionConfig
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Admission, Caching, FinishReason, Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.protocol.messages import Leave
from memserve.router.events import InstanceDrained

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
PROMPT = list(range(1, 21))  # 5 blocks


def gated(
    *instances,
    mode=Admission.BOUNDED,
    active_max=None,
    policy="least-load",
    caching=Caching.OFF,
    migration="drain",
    **admission,
):
    config = AdmissionConfig(mode, active_max, **admission)
    return World(instances, policy=policy, caching=caching, admission=config, migration=migration)


def gate_of(world):
    return world.cluster.stats().admission


def running(world, name) -> list[str]:
    return [attempt.partition("#")[0] for attempt in world.instances[name].running]


# -- bounded


def test_ten_at_once_and_three_may_run():
    """C6's overload: 3 accepted, 7 told at once to come again."""
    world = gated(("c", C), active_max=3, waiting_max=0)
    clients = [world.ask(a_request(f"r{k}", PROMPT)) for k in range(10)]
    rejected = [client.rejected for client in clients if client.rejected is not None]
    assert len(rejected) == 7 and len(running(world, "c")) == 3
    assert all(r.retry_after_s >= 1 and not r.overloaded for r in rejected)
    assert "3 requests are active" in rejected[0].reason
    world.run()
    assert gate_of(world).admitted == gate_of(world).released == 3 and gate_of(world).rejected == {"queue": 7}


def test_queued_request_is_admitted_on_any_ending_of_another():
    world = gated(("c", C), active_max=2, waiting_max=10)
    for k in range(6):
        world.ask(a_request(f"r{k}", PROMPT, max_tokens=3))
    assert running(world, "c") == ["r0", "r1"] and gate_of(world).waiting == {"": 4}
    world.cancel("r0")
    assert running(world, "c") == ["r1", "r2"]
    world.cancel("r3")  # it waits: nothing was ever sent
    assert world.clients["r3"].reasons == [FinishReason.CANCELLED]
    world.stop("r1", 0)  # nothing is there to stop yet
    world.step()
    world.stop("r1", 0)
    assert running(world, "c") == ["r2", "r4"]
    world.run()
    assert gate_of(world).waiting == {} and gate_of(world).active == 0 and gate_of(world).queued == 4


def test_wait_timeout_rejects_with_retry_after():
    world = gated(("c", C), active_max=1, waiting_max=10, wait_ns=3 * NS_PER_S)
    world.ask(a_request("long", PROMPT, max_tokens=100))
    client = world.ask(a_request("r", PROMPT))
    world.wait(3 * NS_PER_S - 1)
    assert client.rejected is None
    world.wait(1)
    assert client.rejected.overloaded and client.rejected.retry_after_s >= 1
    assert "not admitted within 3 s: 1 requests are active" in client.rejected.reason
    assert gate_of(world).rejected == {"wait": 1}
    world.run()


def test_a_deadline_ends_a_request_that_waits():
    world = gated(("c", C), active_max=1)
    world.ask(a_request("long", PROMPT, max_tokens=100))
    client = world.ask(a_request("r", PROMPT, deadline_ns=NS_PER_S))
    world.wait(NS_PER_S)
    assert client.reasons == [FinishReason.DEADLINE]
    world.run()


def test_burst_of_a_tenant_costs_others_nothing():
    """A burst fills the line. Another tenant's request takes the place of the burst's last, and its turn is next."""
    world = gated(("c", C), active_max=2, waiting_max=6)
    burst = [world.ask(a_request(f"b{k}", PROMPT, tenant="burst")) for k in range(10)]
    assert [client.rejected is not None for client in burst] == [False] * 8 + [True] * 2
    late = world.ask(a_request("late", PROMPT, tenant="late"))
    assert late.rejected is None and burst[7].rejected is not None, "the last one of the burst makes place"
    assert gate_of(world).waiting == {"burst": 5, "late": 1}
    world.cancel("b0")
    assert running(world, "c") == ["b1", "late"]
    world.run()


def test_equal_crowds_lose_no_place_to_each_other():
    world = gated(("c", C), active_max=1, waiting_max=2)
    for name, tenant in (("x", "a"), ("a", "a"), ("b", "b")):
        world.ask(a_request(name, PROMPT, tenant=tenant))
    client = world.ask(a_request("b2", PROMPT, tenant="b"))
    assert client.rejected is not None and gate_of(world).waiting == {"a": 1, "b": 1}
    world.run()


def test_a_tenant_of_weight_two_gets_twice_as_much():
    world = gated(("c", C), active_max=1, waiting_max=50, weights=(("gold", 2),))
    order = []
    for k in range(12):
        for tenant in ("gold", "other"):
            world.ask(a_request(f"{tenant}{k}", PROMPT, max_tokens=1, tenant=tenant))
    while len(order) < 18:
        order += [name.rstrip("0123456789") for name in running(world, "c")]
        world.step()
    assert Counter(order) == {"gold": 12, "other": 6}
    world.run()


def test_retries_keep_their_place_inside():
    """The instance dies: its requests go on elsewhere at once, they are not made to wait again."""
    world = gated(("c0", C), ("c1", C), active_max=2, waiting_max=5)
    clients = [world.ask(a_request(f"r{k}", PROMPT, max_tokens=8)) for k in range(4)]
    world.step()
    world.hear(world.instances["c0"].peer, Leave())
    world.kill("c0")
    assert running(world, "c1") == ["r1", "r0"] and gate_of(world).active == 2
    world.run()
    assert all(client.got[0] == lone_answer(client.request, 0)[0] for client in clients)


def test_admission_wait_counts_as_queue_time():
    world = gated(("c", C), active_max=1)
    world.ask(a_request("first", PROMPT, max_tokens=1))
    client = world.ask(a_request("second", PROMPT))
    world.now += 2 * NS_PER_S
    world.run()
    assert client.outputs[0].queue_ns >= 2 * NS_PER_S and gate_of(world).waited_ns >= 2 * NS_PER_S


def test_without_admission_all_requests_are_admitted():
    world = World([("c", C)])
    for k in range(200):
        world.ask(a_request(f"r{k}", PROMPT))
    assert len(running(world, "c")) == 200 and gate_of(world).admitted == 200


# -- memory: an instance of this world has 64 blocks of 4 tokens


def test_memory_is_given_out_block_by_block_and_comes_back():
    world = gated(("c", C), mode=Admission.MEMORY, waiting_max=10)
    for k in range(3):  # 80 + 20 tokens: 25 blocks each
        world.ask(a_request(f"r{k}", [k + 1] * 80, max_tokens=20))
    assert running(world, "c") == ["r0", "r1"]
    world.run()
    assert all(client.got[0] == lone_answer(client.request, 0)[0] for client in world.clients.values())


def test_request_larger_than_any_instance_is_rejected():
    world = gated(("c", C), mode=Admission.MEMORY)
    client = world.ask(a_request("r", [1] * 260))
    assert client.rejected.retry_after_s is None
    assert client.rejected.reason == "it needs 65 blocks of KV memory, no instance has more than 64"


def test_fitting_prompt_is_not_rejected_for_its_answer():
    """75 blocks would be needed; the instance will cut what is generated, and has room for nothing else meanwhile."""
    world = gated(("c", C), mode=Admission.MEMORY, output_tokens_max=100)
    client = world.ask(a_request("r", [1] * 200, max_tokens=100))
    world.ask(a_request("small", [1] * 4))
    assert running(world, "c") == ["r"] and gate_of(world).waiting == {"": 1}
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_instance_too_small_for_prompt_is_excluded():
    """The pair's prefill instance has not enough memory: the decode instance does both, and is what counts."""
    world = gated(mode=Admission.MEMORY)
    world.add("p", P, hbm_blocks=10, context_tokens=41)
    world.add("d", D)
    client = world.ask(a_request("r", [1] * 80))
    assert client.rejected is None and running(world, "d") == ["r"]
    world.run()


def test_uncacheable_request_holds_no_memory_after_its_end():
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=0, caching=Caching.PD_CACHING_3, waiting_max=0)
    for k in range(3):
        client = world.ask(a_request(f"r{k}", [k] * 200, use_cache=False))
        assert client.rejected is None
        world.run()


def test_pressure_rejects_when_nothing_runs():
    """One eviction is not enough, and nothing runs: waiting would help no request."""
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=1, output_tokens_max=0, caching=Caching.PD_CACHING_3)
    for name in ("one", "two", "three"):
        world.ask(a_request(name, [len(name)] * 80))
        world.run()
    client = world.ask(a_request("large", [9] * 120))
    assert client.rejected.overloaded and client.rejected.retry_after_s >= 1
    assert "nor by 1 evictions" in client.rejected.reason and gate_of(world).rejected == {"pressure": 1}
    world.ask(a_request("small", [9] * 40))
    assert running(world, "c") == ["small"]
    world.run()


def test_large_request_is_not_starved():
    world = gated(("c", C), mode=Admission.MEMORY, waiting_max=20)
    world.ask(a_request("running", [1] * 40, max_tokens=4))
    world.ask(a_request("large", [2] * 240, max_tokens=4))
    for k in range(3):
        world.ask(a_request(f"small{k}", [3] * 8, max_tokens=4))
    assert running(world, "c") == ["running"], "the small ones would fit, but they come later"
    world.run()


def test_a_pair_needs_room_at_both_ends():
    """The prompt's blocks at P until the handover, all of it at D."""
    world = gated(("p", P), ("d", D), mode=Admission.MEMORY, caching=Caching.PD_CACHING_1)
    first = world.ask(a_request("first", [1] * 120, max_tokens=40))  # 30 blocks at p, 40 at d
    world.ask(a_request("second", [2] * 120, max_tokens=40))
    memory = world.cluster._lifecycle.admission.memory
    numbers = [world.cluster._registry.member_by_name(name).number for name in "pd"]
    assert [64 - memory.ledger.blocks_free(number) for number in numbers] == [30, 40]
    world.step("p")
    world.step("d")
    assert running(world, "p") == [] and [64 - memory.ledger.blocks_free(n) for n in numbers] == [0, 40]
    assert not first.done and gate_of(world).waiting == {"": 1}, "d has room for one only"
    world.run()
    assert [64 - memory.ledger.blocks_free(number) for number in numbers] == [0, 0]


def test_requests_go_where_there_is_room():
    """The least loaded instance has no room for it: another one has."""
    world = gated(("a", C), ("b", C), mode=Admission.MEMORY)
    world.ask(a_request("short", [1] * 4, max_tokens=236))  # little work, 60 blocks
    world.ask(a_request("long", [2] * 100, max_tokens=4))
    assert (running(world, "a"), running(world, "b")) == (["short"], ["long"])
    world.ask(a_request("next", [3] * 100, max_tokens=4))
    assert running(world, "b") == ["long", "next"]
    world.run()


def test_best_fit_fills_the_fullest_that_has_room():
    world = gated(("a", C), ("b", C), mode=Admission.MEMORY, policy="best-fit")
    for name, tokens in (("one", 156), ("two", 156), ("three", 76), ("four", 76), ("five", 12)):
        world.ask(a_request(name, [1] * tokens, max_tokens=4))
    assert running(world, "a") == ["one", "three", "five"], "40 + 20 + 4 blocks: full"
    assert running(world, "b") == ["two", "four"]
    world.cancel("three")
    world.ask(a_request("six", [1] * 12, max_tokens=4))
    assert running(world, "b") == ["two", "four", "six"], "4 blocks were left there, 20 on a"
    world.run()


def test_cache_aware_admission_counts_shared_prefixes_once():
    """Twelve requests with the same long prefix: whole they would fill the memory four times over."""
    prefix = [7] * 160  # 40 blocks
    for mode, at_once in ((Admission.MEMORY, 1), (Admission.CACHE, 12)):
        world = gated(("c", C), mode=mode, waiting_max=20, caching=Caching.PD_CACHING_3)
        for k in range(12):
            world.ask(a_request(f"r{k}", [*prefix, k], max_tokens=4))  # 2 blocks of its own
        assert len(running(world, "c")) == at_once
        world.run()


# -- memory that ended requests keep (C5)


def test_evictions_take_oldest_ended_within_limit_per_request():
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=1, output_tokens_max=0, caching=Caching.PD_CACHING_3,
                  waiting_max=0)  # fmt: skip
    for name, tokens in (("old", 100), ("new", 60)):
        world.ask(a_request(name, [len(name)] * tokens))
        world.run()
    memory = world.cluster._lifecycle.admission.memory
    assert memory.ledger.blocks_free(0) == 64 - 25 - 15 and gate_of(world).evictions == 0
    world.ask(a_request("active", [9] * 80, max_tokens=50))
    world.ask(a_request("newcomer", [8] * 100, max_tokens=50))
    assert gate_of(world).evictions == 1 and list(memory.ledger.inactive_requests(0)) == ["new#2"]
    too_much = world.ask(a_request("too much", [8] * 120))
    assert too_much.rejected is not None and gate_of(world).evictions == 1, "nobody was evicted in vain"
    world.run()


def test_drained_decode_instance_leaves_room_at_prefill():
    """It was full. Now the prefill instance does all of it, and is free."""
    world = gated(("p", P), ("d", D), mode=Admission.MEMORY, unit_tokens=256, migration="off")
    world.ask(a_request("first", [1] * 20, max_tokens=9))
    world.step("p")
    world.say_all(world.instances["d"])
    world.ask(a_request("second", [2] * 20, max_tokens=9))
    assert running(world, "d") == ["first"] and running(world, "p") == []
    world.post(InstanceDrained("d"))
    assert running(world, "p") == ["second"]
    world.run()


def test_without_evictions_memory_stays_reserved():
    world = gated(("c", C), mode=Admission.MEMORY, evictions_max=0, caching=Caching.PD_CACHING_3, waiting_max=0)
    for k, accepted in ((1, True), (2, True), (3, False)):
        client = world.ask(a_request(f"r{k}", [k] * 100))
        assert (client.rejected is None) == accepted
        world.run()


# -- random histories


class Crowded(World):
    """Clients of three tenants, instances that come, go, hang and refuse; everything from one seed."""

    def __init__(self, seed: int, **gate) -> None:
        """``gate``: of the gate, what is not left to chance."""
        self.random = random = Random(seed)
        mode = random.choice(list(Admission))
        limit = random.choice([None, 1, 3])
        admission = AdmissionConfig(
            mode,
            limit or 2 if mode is Admission.BOUNDED else limit,
            waiting_max=random.choice([0, 2, 8]),
            wait_ns=random.choice([NS_PER_S, 20 * NS_PER_S]),
            output_tokens_max=random.choice([0, 8, 256]),
            unit_tokens=random.choice([None, 8]) if mode is not Admission.CACHE else None,
            evictions_max=random.choice([None, None, 0, 1, 5]),
        )
        admission = replace(admission, **gate)
        roles = random.choice([[C], [C, C, C], [P, D], [P, P, D, C]])
        super().__init__(
            [(f"i{k}", role) for k, role in enumerate(roles)],
            policy=random.choice(list(ROUTING_POLICIES.built_in)),
            caching=random.choice(list(Caching)),
            admission=admission,
            unplaced_ns=5 * NS_PER_S,
            stalled_after_ns=10 * NS_PER_S,
        )

    def happen(self) -> None:
        random = self.random
        what = random.choice(
            ["ask"] * 6 + ["step"] * 8 + ["cancel", "wait", "wait", "die", "refuse", "drain", "enough"]
        )
        if what == "ask":
            base = random.randrange(3)
            tokens = [base] * random.choice([4, 30, 120, 200, 260]) + [random.randrange(50)]
            name = f"r{len(self.clients)}"
            deadline = random.choice([None, None, self.now + 4 * NS_PER_S])
            self.ask(a_request(name, tokens, max_tokens=random.randint(1, 12), n=random.choice([1, 1, 2]),
                               tenant=random.choice(["", "a", "b"]), deadline_ns=deadline))  # fmt: skip
        elif what == "step":
            self.now += NS_PER_MS
            self.step()
        elif what == "wait":
            self.wait(random.choice([NS_PER_S // 2, 3 * NS_PER_S]))
        elif what in ("cancel", "enough") and self.clients:
            name = random.choice(list(self.clients))
            self.cancel(name) if what == "cancel" else self.stop(name, 0)
        elif what == "refuse":
            instance = self.instances[random.choice(list(self.instances))]
            instance.refuses = random.choice([None, None, ("the queue is full", 1.0), ("handoff failed", 0.0)])
        elif what == "die":
            self._restart(random.choice(list(self.instances)))
        elif what == "drain" and random.random() < 0.3:
            self.post(InstanceDrained(random.choice(list(self.instances))))

    def _restart(self, name: str) -> None:
        old = self.instances[name]
        self.hear(old.peer, Leave())
        self.add(name, old.role, old.generation + 1)

    def end(self) -> None:
        for name, instance in list(self.instances.items()):
            instance.refuses = None
            if instance.draining or not instance.alive:
                self._restart(name)
        for _ in range(2000):
            if all(client.done for client in self.clients.values()):
                return
            self.now += 20 * NS_PER_MS
            self.beat()
            self.step()
            self.wait(1, beats=False)
        raise AssertionError(f"no end: {self.cluster}, {gate_of(self)}")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 32))
def test_admitted_requests_leave_once_and_hold_nothing(seed):
    """``check_invariants`` runs after every event: limits, conservation, and exactly the live attempts hold memory."""
    world = Crowded(seed)
    for _ in range(80):
        world.happen()
    world.end()
    gate, cluster = gate_of(world), world.cluster
    rejected = sum(client.rejected is not None for client in world.clients.values())
    assert gate.admitted == gate.released and gate.active == 0 and gate.waiting == {}
    assert sum(gate.rejected.values()) <= rejected <= len(world.clients)
    assert gate.admitted + sum(gate.rejected.values()) <= len(world.clients)
    memory = cluster._lifecycle.admission.memory
    if memory.is_counting:
        for member in cluster._registry:
            kept = set(memory.ledger.inactive_requests(member.number))
            assert set(memory.ledger.holders_of(member.number)) == kept
            assert world.config.admission.evictions_max is not None or not kept
    world.check_repeatable()


@pytest.fixture(scope="module")
def happened() -> Counter:
    """What happened in some lives altogether."""
    sums: Counter = Counter()
    for seed in range(24):
        world = Crowded(seed)
        for _ in range(80):
            world.happen()
        world.end()
        gate = gate_of(world)
        sums.update(gate.rejected)
        sums.update(queued=gate.queued, evictions=gate.evictions, resumed=world.cluster.stats().counters.resumptions)
    return sums


@pytest.mark.parametrize("what", ["queue", "wait", "memory", "pressure", "queued", "evictions", "resumed"])
def test_random_histories_reach_every_case(happened, what):
    assert happened[what] > 3, happened
