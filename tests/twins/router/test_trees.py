"""The global trees against the real contents of real pools, whatever happens to the events on their way.

Several ``BlockPool``s live random lives; their KV events go to a ``Cluster`` over a network that drops, repeats, delays
and reorders. Once everything was asked for and answered, the trees must equal what the pools' own indexes hold, tier by
tier. The truth is walked out of each pool's radix index with every prompt that was ever cached: neither the event log
nor anything of the feed has a part in it.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from memserve.base.config import ClusterConfig, PoolConfig
from memserve.base.types import KVGeometry, Request, Role, Tier
from memserve.base.units import NS_PER_S
from memserve.kv.events import KvFeed
from memserve.kv.identity import block_identities, namespace_id
from memserve.kv.pool import BlockPool
from memserve.protocol.messages import Expelled, Heartbeat, Join, KvChange, KvEvents, QueryKvEvents
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve.router.events import ClockTicked, MessageArrived, RequestArrived, RequestCancelled, Send
from memserve.router.machine import Cluster
from memserve.router.placement.prefix_directory import ASK_AGAIN_NS

BLOCK = 2
GEOMETRY = KVGeometry(1, 1, 8, 8, "float32", BLOCK)
CONFIG = ClusterConfig(dead_after_ns=1000 * NS_PER_S)  # silence is not what these tests are about
TENANTS = ("", "other")


class Caching:
    """One instance, reduced to its pool and its feed."""

    def __init__(self, name: str, generation: int, hbm: int, dram: int, pool_events: int, ring: int) -> None:
        self.peer = Peer(name, generation)
        self.sizes = (hbm, dram, pool_events, ring)
        self.pool = BlockPool(PoolConfig(hbm, dram), BLOCK, "ns", event_capacity=pool_events)
        self.feed = KvFeed(self.pool, ring)
        self.prompts: set[tuple[str, tuple[int, ...]]] = set()
        #: messages to the router that are under way, oldest first
        self.flying: list = []

    def info(self) -> PeerInfo:
        hbm, dram, *_ = self.sizes
        return PeerInfo(self.peer, Role.COLOCATED, "tcp://x", "ns", GEOMETRY, hbm, dram, 64, True)

    def run(self, tenant: str, tokens: list[int]) -> None:
        """A request comes and goes: its whole blocks are cached if there is room."""
        pool = self.pool
        prompt = np.array(tokens, np.int32)[: len(tokens) // BLOCK * BLOCK]
        lease = pool.acquire(tenant, prompt)
        more = pool.allocate(len(prompt) // BLOCK - len(lease.blocks))
        if more is not None:
            blocks = lease.blocks + more
            pool.publish(lease, tenant, prompt, blocks, written_by=0)
            pool.release(blocks)
            self.prompts.add((tenant, tuple(prompt.tolist())))
        else:
            pool.release(lease.blocks)
        pool.unpin(lease)

    def truth(self) -> dict[bytes, tuple[int, int]]:
        """Identity -> references in HBM and in DRAM, from the index alone."""
        found = {}
        for tenant, prompt in self.prompts:
            tokens = np.array(prompt, np.int32)
            match = self.pool._index.match_blocks(namespace_id(tenant, "ns"), tokens)
            names = block_identities(namespace_id(tenant, "ns"), tokens, BLOCK)
            on_hbm = len(match.hbm)
            for at, name in enumerate(names[: on_hbm + len(match.dram)]):
                found[name] = (1, 0) if at < on_hbm else (0, 1)
        report = self.pool.report().by_tier
        assert len(found) == report[Tier.HBM].blocks_cached + report[Tier.DRAM].blocks_cached, "the truth has holes"
        return found


class World:
    """A cluster, some pools, and the network between them."""

    def __init__(self, pools: list[Caching]) -> None:
        self.cluster = Cluster(CONFIG)
        self.pools = pools
        self.now = 0
        for pool in pools:
            self.say(pool, Join(pool.info()))

    def say(self, pool: Caching, message, peer: Peer | None = None) -> None:
        """``message`` arrives at the router; questions are answered into the network."""
        self.now += 1
        for action in self.cluster.handle(MessageArrived(peer or pool.peer, message), self.now):
            if isinstance(action, Send) and isinstance(action.message, QueryKvEvents):
                asked = next(p for p in self.pools if p.peer == action.to)
                self.collect(asked)
                answer = asked.feed.replay_from(action.message.first)
                if answer is not None:
                    asked.flying.append((asked.peer, answer))
        self.cluster.check_invariants()

    def collect(self, pool: Caching) -> None:
        """What the pool has to tell goes on its way."""
        news = pool.feed.take_changes()
        if news is not None:
            pool.flying.append((pool.peer, news))

    def beat(self, pool: Caching) -> None:
        self.collect(pool)
        pool.flying.append((pool.peer, Heartbeat(Load(), pool.feed.next_event)))

    def arrive(self, pool: Caching, at: int) -> None:
        peer, message = pool.flying.pop(at % len(pool.flying))
        self.say(pool, message, peer)

    def settle(self) -> None:
        """The network works again: all that flies arrives, beats show what is missing, answers come."""
        for _ in range(8):
            self.now += ASK_AGAIN_NS
            for pool in self.pools:
                self.beat(pool)
                while pool.flying:
                    self.arrive(pool, 0)

    def forget_expected(self) -> None:
        """Time passes until nothing is believed without an event."""
        self.now += CONFIG.speculative_ttl_ns + NS_PER_S
        self.cluster.handle(ClockTicked(), self.now)

    def dump(self, pool: Caching) -> dict[bytes, tuple[int, int]]:
        member = self.cluster._registry.get(pool.peer)
        assert member is not None
        dumped = self.cluster._trees.directory.dump(member.number)
        return {bytes(name): (hbm, dram) for name, hbm, dram in dumped}


TOKENS = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=12)
POOL = st.integers(0, 7)


class TreesLife(RuleBasedStateMachine):
    """Pools live, events get lost, incarnations change."""

    @initialize(
        count=st.integers(1, 3),
        hbm=st.integers(3, 10),
        dram=st.sampled_from([0, 4]),
        pool_events=st.sampled_from([2, 1000]),
        ring=st.sampled_from([1, 4, 1000]),
    )
    def begin(self, count, **sizes):
        self.world = World([Caching(f"i{k}", 1, **sizes) for k in range(count)])
        self.requests = 0

    def pool(self, which) -> Caching:
        return self.world.pools[which % len(self.world.pools)]

    @rule(which=POOL, tenant=st.sampled_from(TENANTS), tokens=TOKENS)
    def run_request(self, which, tenant, tokens):
        self.pool(which).run(tenant, tokens)

    @rule(which=POOL, count=st.integers(1, 4))
    def demote(self, which, count):
        self.pool(which).pool.demote_blocks(count)

    @rule(which=POOL, tenant=st.sampled_from(TENANTS), tokens=TOKENS)
    def delete(self, which, tenant, tokens):
        whole = np.array(tokens, np.int32)[: len(tokens) // BLOCK * BLOCK]
        self.pool(which).pool.delete(tenant, whole)

    @rule(which=POOL)
    def clear(self, which):
        self.pool(which).pool.clear_cache()

    @rule(which=POOL)
    def tell(self, which):
        self.world.collect(self.pool(which))

    @rule(which=POOL)
    def beat(self, which):
        self.world.now += ASK_AGAIN_NS // 3
        self.world.beat(self.pool(which))

    @rule(which=POOL, at=st.integers(0, 7), times=st.integers(1, 4))
    def arrive(self, which, at, times):
        for _ in range(times):
            if self.pool(which).flying:
                self.world.arrive(self.pool(which), at)

    @precondition(lambda self: any(p.flying for p in self.world.pools))
    @rule(which=POOL, at=st.integers(0, 7))
    def lose(self, which, at):
        flying = self.pool(which).flying
        if flying:
            flying.pop(at % len(flying))

    @precondition(lambda self: any(p.flying for p in self.world.pools))
    @rule(which=POOL, at=st.integers(0, 7))
    def repeat(self, which, at):
        flying = self.pool(which).flying
        if flying:
            flying.append(flying[at % len(flying)])

    @rule(which=POOL, keeps_cache=st.booleans())
    def restart(self, which, keeps_cache):
        """A process dies and comes again empty; or it was taken to be dead, and is reborn with its cache."""
        at = which % len(self.world.pools)
        old = self.world.pools[at]
        name, generation = old.peer.name, old.peer.generation + 1
        new = Caching(name, generation, *old.sizes)
        if keeps_cache:
            new.pool, new.feed, new.prompts = old.pool, old.feed, old.prompts
        new.flying = old.flying  # the old incarnation's last words may come after the new one's first
        self.world.pools[at] = new
        self.world.say(new, Join(new.info()))

    @rule(tokens=TOKENS, tenant=st.sampled_from(TENANTS))
    def expect(self, tokens, tenant):
        """A request is dispatched: its prompt is believed to be somewhere without any event."""
        self.requests += 1
        request = Request(f"r{self.requests}", np.array(tokens, np.int32), tenant=tenant)
        self.world.cluster.handle(RequestArrived(request), self.world.now)
        self.world.cluster.handle(RequestCancelled(request.request_id), self.world.now)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.settle()
        self.world.forget_expected()
        for pool in self.world.pools:
            assert self.world.dump(pool) == pool.truth(), f"{pool.peer} is not known as it is"


EXAMPLES = int(os.environ.get("MEMSERVE_TEST_EXAMPLES", "100"))
TestTreesLife = TreesLife.TestCase
TestTreesLife.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def one_pool(**sizes) -> tuple[World, Caching]:
    pool = Caching("a", 1, **{"hbm": 8, "dram": 0, "pool_events": 100, "ring": 100} | sizes)
    return World([pool]), pool


def test_a_lost_batch_is_noticed_by_the_next_one_and_replayed():
    """The usual case: a connection broke, one message was in it."""
    world, pool = one_pool()
    pool.run("", [0, 1, 0, 1])
    world.collect(pool)
    pool.flying.clear()  # lost
    pool.run("", [1, 1, 1, 1])
    world.collect(pool)
    world.arrive(pool, 0)  # from number 1: kept aside, the first is asked for
    assert world.cluster.instances()[0].events_aside == 1 and not world.dump(pool)
    (answer,) = pool.flying
    assert isinstance(answer[1], KvEvents) and answer[1].first == 0
    world.arrive(pool, 0)
    assert world.dump(pool) == pool.truth() != {}
    assert world.cluster.stats().counters.kv_gaps == 1


def test_a_lost_tail_is_noticed_by_a_heartbeat():
    world, pool = one_pool()
    pool.run("", [0, 1, 0, 1])
    world.collect(pool)
    pool.flying.clear()
    world.beat(pool)
    world.arrive(pool, 0)
    world.arrive(pool, 0)
    assert world.dump(pool) == pool.truth() != {}


def test_an_old_snapshot_does_not_undo_newer_events():
    """It was asked for, waited in a queue, and meanwhile the replay came another way."""
    world, pool = one_pool()
    pool.run("", [0, 1, 0, 1])
    world.collect(pool)
    world.arrive(pool, 0)
    old = pool.feed.snapshot()
    pool.run("", [1, 1])
    world.collect(pool)
    world.arrive(pool, 0)
    world.say(pool, old)
    assert world.dump(pool) == pool.truth()


def test_buffered_events_are_bounded_and_requested_later():
    """A gap that is never filled: memory stays small, and it heals all the same."""
    world, pool = one_pool()
    for number in range(1, 20):
        changes = tuple(
            KvChange("stored", Tier.HBM, bytes([number, k % 256, k // 256]) + bytes(13)) for k in range(1000)
        )
        world.say(pool, KvEvents(number * 1000, changes))
    (view,) = world.cluster.instances()
    assert view.events_aside == 16 and view.next_event == 0


SENSELESS = [
    KvChange("stored", Tier.HBM, b"short"),
    KvChange("stolen", Tier.HBM, bytes(16)),
    KvChange("stored", Tier.SSD, bytes(16)),
]


@pytest.mark.parametrize("change", SENSELESS, ids=["identity", "kind", "tier"])
def test_events_that_make_no_sense_expel_their_sender(change):
    """Memory is broken there, or it is another process: nothing that it says of its KV may be trusted."""
    world, pool = one_pool()
    actions = world.cluster.handle(MessageArrived(pool.peer, KvEvents(0, (change,))), 5)
    assert any(isinstance(a, Send) and isinstance(a.message, Expelled) for a in actions)
    assert world.cluster.instances() == ()
    world.cluster.check_invariants()


def test_the_oracle_notices_a_wrong_tree():
    """The comparison must fail for a tree that misses one block, or has one on the wrong tier."""
    world, pool = one_pool(dram=4)
    pool.run("", [0, 1, 0, 1])
    world.settle()
    assert world.dump(pool) == pool.truth()
    pool.pool.demote_blocks(1)
    assert world.dump(pool) != pool.truth()
    world.settle()
    assert world.dump(pool) == pool.truth()
    pool.pool.clear_cache()
    assert world.dump(pool) != pool.truth()
