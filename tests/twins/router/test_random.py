"""Random lives of a cluster: instances refuse, die, hang, restart and lie; messages get lost, late and repeated.

Every request ends exactly once, with exactly the right tokens or one clean error, and where nothing but failures was in
its way, with the right tokens. A seed is a complete report: ``Storm(seed)`` does the same again.
"""

from __future__ import annotations

import os
from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_world import BLOCK, FakeInstance, World, a_request, info, lone_answer
from memserve.base.plugins import ROUTING_POLICIES
from memserve.base.types import Caching, FinishReason, Role, Tier, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.messages import Heartbeat, Join, KvChange, KvEvents, RequestRefused, Tokens
from memserve.protocol.peers import Load
from memserve.router.events import ClockTicked, InstanceDrained, MessageArrived, PrefixPinned, PrefixUnpinned, Send

ROUTER = "router"
SHAPES = [
    [Role.PREFILL, Role.DECODE],
    [Role.PREFILL, Role.DECODE, Role.DECODE],
    [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE],
    [Role.COLOCATED] * 3,
    [Role.COLOCATED],
    [Role.COLOCATED, Role.ENGINE],
    [Role.PREFILL, Role.DECODE, Role.ENGINE, Role.ENGINE],
]
FOREVER = 10**9


class Storm(World):
    """A cluster with every choice from one seed. ``patient``: requests are never given up."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.patient = random.random() < 0.5
        self.raging = True
        #: messages under way, in order, by (sender's name, receiver's name)
        self.links: dict[tuple[str, str], deque] = {}
        self.loss = random.choice([0.0, 0.02, 0.15])
        limits = {"attempts_max": FOREVER, "unplaced_ns": FOREVER * NS_PER_S} if self.patient else {"attempts_max": 5}
        super().__init__(
            policy=random.choice(list(ROUTING_POLICIES.built_in)),
            caching=random.choice(list(Caching)),
            stalled_after_ns=20 * NS_PER_S,
            **limits,
        )
        for k, role in enumerate(random.choice(SHAPES)):
            self.instances[f"i{k}"] = FakeInstance(f"i{k}", role)
        self.names = list(self.instances)

    # -- the network

    def fly(self, sender: str, to: str, item) -> None:
        if self.raging and self.random.random() < self.loss:
            return
        self.links.setdefault((sender, to), deque()).append(item)

    def _deliver(self, action: Send) -> None:
        self.fly(ROUTER, action.to.name, (action.to, action.message))

    def say_all(self, instance: FakeInstance) -> None:
        messages, instance.outbox = instance.outbox, []
        for message in messages:
            instance.answers_told += isinstance(message, Tokens | RequestRefused)
            self.say(instance, message)
        handoffs, instance.handoffs = instance.handoffs, []
        for to, *rest in handoffs:
            self.fly(instance.name, to.name, (to, rest))

    def say(self, instance: FakeInstance, message) -> None:
        again = self.raging and isinstance(message, Tokens) and self.random.random() < 0.05
        for _ in range(1 + again):
            self.fly(instance.name, ROUTER, (instance.peer, message))

    def arrive(self, link: tuple[str, str]) -> None:
        """The oldest message of a link."""
        peer, message = self.links[link].popleft()
        if not self.links[link]:
            del self.links[link]
        if link[1] == ROUTER:
            self.post(MessageArrived(peer, message))
            return
        instance = self.instances[link[1]]
        if instance.peer != peer or not instance.alive:
            return
        if instance.paused:
            instance.inbox.append(message)
        elif isinstance(message, list):
            instance.take_over(*message)
        else:
            instance.hear(message)
        self.say_all(instance)

    def beat(self) -> None:
        for instance in self.instances.values():
            if not instance.alive or instance.paused:
                continue
            if not instance.member:
                self.say(instance, Join(info(instance.name, instance.role, instance.generation)))
            elif instance.draining and not instance.running:
                self.leave_later(instance)
            else:
                totals = {"dispatches_heard": instance.dispatches_heard, "answers_told": instance.answers_told}
                self.say(instance, Heartbeat(Load(len(instance.running), hbm_blocks_available=64, **totals)))

    def leave_later(self, instance: FakeInstance) -> None:
        instance.alive = False

    # -- what may happen

    def happen(self) -> None:
        """One random thing."""
        random = self.random
        things = (
            [self.a_client_comes] * 3 + [self.some_step] * 12 + [self.messages_arrive] * 12 + [self.time_passes] * 4
        )
        things += [self.a_client_leaves, self.a_client_has_enough, self.an_instance_fails, self.an_instance_comes_back]
        things += [self.an_instance_lies] * 3 + [self.a_mood_changes, self.blocks_are_cached, self.a_name_is_given]
        random.choice(things)()

    def some(self) -> FakeInstance:
        return self.instances[self.random.choice(self.names)]

    def a_client_comes(self) -> None:
        random = self.random
        lifetime = random.choice([None, None, None, 3 * NS_PER_S])
        self.ask(
            a_request(
                f"r{len(self.clients)}",
                [random.randrange(2) for _ in range(random.randint(1, 30))],
                max_tokens=random.randint(0, 8),
                n=random.choice([1, 1, 1, 2, 3]),
                seed=random.randrange(3),
                stops=[random.randrange(50) for _ in range(random.randrange(6))],
                session=random.choice(["", "s", "t"]),
                tenant=random.choice(["", "u"]),
                use_cache=random.random() < 0.9,
                deadline_ns=None if lifetime is None else self.now + lifetime,
            )
        )

    def some_step(self) -> None:
        instance = self.some()
        if instance.alive and not instance.paused:
            instance.step()
            self.say_all(instance)

    def messages_arrive(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            if self.links:
                self.arrive(self.random.choice(list(self.links)))

    def time_passes(self) -> None:
        self.now += self.random.choice([1, NS_PER_MS, 100 * NS_PER_MS, NS_PER_S])
        self.beat()
        self.post(ClockTicked())

    def a_client_leaves(self) -> None:
        if self.clients and self.random.random() < 0.3:
            self.cancel(self.random.choice(list(self.clients)))

    def a_client_has_enough(self) -> None:
        if self.clients:
            name = self.random.choice(list(self.clients))
            self.stop(name, self.random.randrange(3))

    def an_instance_fails(self) -> None:
        instance, how = self.some(), self.random.randrange(4)
        if how == 0:
            instance.alive = False
        elif how == 1:
            instance.paused = True
        elif how == 2:
            self.restart(instance)
        elif self.random.random() < 0.3:
            self.post(InstanceDrained(instance.name))

    def restart(self, instance: FakeInstance) -> None:
        fresh = FakeInstance(instance.name, instance.role, instance.generation + 1)
        self.instances[instance.name] = fresh

    def an_instance_comes_back(self) -> None:
        instance = self.some()
        if not instance.alive:
            self.restart(instance)
        elif instance.paused:
            self.wake(instance)

    def wake(self, instance: FakeInstance) -> None:
        instance.paused = False
        messages, instance.inbox = instance.inbox, []
        for message in messages:
            if isinstance(message, list):
                instance.take_over(*message)
            else:
                instance.hear(message)

    def an_instance_lies(self) -> None:
        """Its memory is broken, or its device fails."""
        instance = self.some()
        for request_id in list(instance.running)[:1]:
            reason = self.random.choice([None, FinishReason.ERROR, FinishReason.CANCELLED])
            index = 0 if reason is not None else 7
            self.say(instance, Tokens((TokenOutput(request_id, index, (), finish_reason=reason),)))

    def a_mood_changes(self) -> None:
        refusals = [None, None, None, ("handoff failed", 0.0)]
        if not self.patient:
            refusals += [("the queue is full", 2.0), ("never", None)]
        self.some().refuses = self.random.choice(refusals)

    def blocks_are_cached(self) -> None:
        instance = self.some()
        tokens = a_request("", [self.random.randrange(2) for _ in range(12)]).prompt
        names = b"".join(block_identities(namespace_id("", "ns"), tokens, BLOCK))
        change = KvChange(
            self.random.choice(["stored", "evicted", "moved"]), self.random.choice([Tier.HBM, Tier.DRAM]), names
        )
        self.say(instance, KvEvents(self.random.randrange(4), (change,)))

    def a_name_is_given(self) -> None:
        name = self.random.choice(["s", "t"])
        if self.random.random() < 0.3:
            self.post(PrefixUnpinned(name, ""))
        else:
            tokens = a_request("", [self.random.randrange(2) for _ in range(12)]).prompt
            self.post(PrefixPinned(name, "", tokens, self.random.randint(1, 20) * NS_PER_S))

    # -- and in the end

    def calm_down(self) -> None:
        """Nothing fails any more: everything must come to an end."""
        self.raging = False
        for instance in list(self.instances.values()):
            if not instance.alive or instance.draining:
                self.restart(instance)
            elif instance.paused:
                self.wake(instance)
            self.instances[instance.name].refuses = None
        for _ in range(800):
            for instance in list(self.instances.values()):
                if instance.draining and not instance.running:
                    self.restart(instance)
                else:
                    instance.step()
                    self.say_all(instance)
            self.beat()
            while self.links:
                self.arrive(next(iter(self.links)))
            self.now += NS_PER_S // 2
            self.post(ClockTicked())
            if all(client.done for client in self.clients.values()):
                return
        raise AssertionError(f"no end: {self.cluster}")

    def judge(self) -> None:
        for client in self.clients.values():
            assert client.done
            if self.patient and client.request.deadline_ns is None and not client.asked_to_end:
                assert client.rejected is None, client.rejected
                for index in range(client.request.n):
                    assert (client.got[index], client.reasons[index]) == lone_answer(client.request, index)
        assert self.cluster.stats().requests_live == 0
        loads = self.cluster._loads
        assert not any(any(loads.own_of(number)) for number in range(len(loads)))
        self.check_repeatable()


def live(seed: int, events: int = 250) -> Storm:
    storm = Storm(seed)
    for _ in range(events):
        storm.happen()
    storm.calm_down()
    storm.judge()
    return storm


EXAMPLES = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "100"))


@settings(max_examples=max(10, EXAMPLES // 4), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_once_with_the_right_tokens(seed: int) -> None:
    live(seed)


@pytest.fixture(scope="module")
def totals() -> dict[str, int]:
    """What happened in a few lives altogether."""
    sums: dict[str, int] = {}
    for seed in range(40):
        counters = live(seed).cluster.stats().counters
        for name, count in [*counters.attempts_failed.items(), ("late", counters.outputs_late)]:
            sums[name] = sums.get(name, 0) + count
        sums["resumed"] = sums.get("resumed", 0) + counters.resumptions
    return sums


@pytest.mark.parametrize("what", ["gone", "refused", "contradiction", "error", "gap", "late", "resumed"])
def test_random_operations_reach_every_case(totals: dict[str, int], what: str) -> None:
    """Lives in which nothing goes wrong would prove nothing."""
    assert totals.get(what, 0) > 5, totals
