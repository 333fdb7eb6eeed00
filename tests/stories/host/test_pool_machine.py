"""Pool peers in virtual time: random calls and faults; every byte that is matched is right, nothing leaks."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import Future
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from memserve.base.config import ExchangeConfig
from memserve.base.errors import UserError
from memserve.base.types import ClockTicked, KVGeometry, Role, Tier
from memserve.host.pool_peer_machine import AddRequested, Arrived, PeerGroup, PoolCall, PoolMachine, RemoveRequested
from memserve.kv.mempool import Address, MemPool
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import AddPeer, ChangeGeneration, ForwardMessage, GenerationChanged, RemovePeer
from memserve.protocol.messages import AnyMessage, Expelled, Free, Heartbeat, Leave, PeerJoined
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.process import Node

MS = 1_000_000
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=1, head_dim_k=2, head_dim_v=2, dtype="float32", block_tokens=4)
SEEDS = int(os.environ.get("MEMSERVE_TEST_SEEDS", "1")) * 25
KINDS = ["meet", "store", "store", "match", "send", "send", "raw", "fetch", "there", "free", "free"]
FAMILIES = [np.random.default_rng(family).integers(0, 9, 24, dtype=np.int32) for family in range(3)]


def pattern(prefix: np.ndarray) -> np.ndarray:
    """Bytes that only this prefix has."""
    seed = [int(token) for token in prefix]
    return np.random.default_rng(seed).integers(0, 256, (2, GEOMETRY.page_bytes), dtype=np.uint8)


class PoolNode(Node):
    """A machine, its memory, and an application that calls at random."""

    def __init__(self, world: PoolWorld, name: str, blocks: int, dram: int) -> None:
        self.world, self.peer, size = world, Peer(name, world.random.randrange(1, 1 << 40)), GEOMETRY.block_bytes
        self.memory = MemPool(
            GEOMETRY, hbm_bytes=blocks * size, dram_bytes=dram * size, generation=self.peer.generation
        )
        exchange = Exchange(self.memory.pool, GEOMETRY, ExchangeConfig(lease_ns=800 * MS), self.peer, "n")
        info = PeerInfo(self.peer, Role.STORE, f"virtual://{name}", "n", GEOMETRY, blocks, dram, 0, True)
        self.machine = PoolMachine(self.memory, exchange, info, silent_ns=300 * MS)
        self.lines: set[Peer] = set()
        self.heard: set[Peer] = set()
        self.held: list[Any] = []
        self.asleep: list[Any] | None = None
        self.ticks = 0
        world.network.nodes[name] = self

    def receive_message(self, sender: Peer, message: AnyMessage) -> None:
        meant = self.peer
        self.soon(lambda: self.post(MessageArrived(sender, message)) if self.peer == meant else None)
        self.heard.add(sender)

    def soon(self, do: Any) -> None:
        if self.asleep is not None:
            self.asleep.append(do)
        else:
            do()

    def call(self, do: Any) -> Any:
        """What ``do(now)`` gives; ``None`` where it is refused."""
        answer: Future[Any] = Future()
        self.post(PoolCall(do, answer))
        error = answer.exception()
        if error is not None:
            assert isinstance(error, UserError), error
            return None
        return answer.result()

    def post(self, event: Any) -> None:
        clock = self.world.clock
        for action in self.machine.handle(event, clock.now):
            self.perform(action)
        self.machine.memory.check_invariants()
        self.machine.exchange.check_invariants()
        self.machine._group.check_invariants()
        deadline_ns = self.machine.next_deadline_ns
        if deadline_ns is not None:
            self.ticks += 1
            clock.call_at(max(deadline_ns, clock.now + MS), partial(self.soon, partial(self.tick, self.ticks)))

    def tick(self, number: int) -> None:
        if number == self.ticks:
            self.post(ClockTicked())

    def perform(self, action: Any) -> None:
        world = self.world
        if isinstance(action, Send):
            if action.to in self.lines or action.to in self.heard or not action.to.generation:
                world.network.send_message(self.peer, action.to, action.message)
        elif isinstance(action, AddPeer):
            self.lines.add(action.info.peer)
        elif isinstance(action, RemovePeer):
            self.lines.discard(action.peer)
        elif isinstance(action, GenerationChanged):
            self.peer = action.info.peer
            world.rebirths += 1
        elif isinstance(action, Arrived):
            blocks = getattr(action.outcome, "blocks", ())
            tier, generation = action.outcome.offer.dst_tier, self.memory.generation
            self.held.append([Address(tier, block, generation) for block in blocks])
        elif isinstance(action, SealPages | PullPages):
            do = self.seal if isinstance(action, SealPages) else self.pull
            world.clock.call_after(world.random.randint(0, 30 * MS), partial(self.soon, partial(do, action)))
        else:
            assert isinstance(action, CancelPulls)

    def bytes_of(self, tier: Tier, block: int, first: int, end: int) -> np.ndarray:
        return self.memory.bytes_of(tier, block)[first:end]

    def seal(self, job: SealPages) -> None:
        layers = job.first_layer, job.end_layer
        self.post(PagesSealed(job.job_id, tuple(zlib.crc32(self.bytes_of(job.tier, b, *layers)) for b in job.blocks)))

    def pull(self, job: PullPages) -> None:
        source, wrong = self.world.network.nodes[job.peer.name], 0
        if not isinstance(source, PoolNode) or source.peer != job.peer or job.peer not in self.lines:
            self.post(PagesPulled(job.job_id, "no way"))
            return
        layers = job.first_layer, job.end_layer
        for src, dst, checksum in zip(job.src_blocks, job.dst_blocks, job.checksums, strict=True):
            target = self.bytes_of(job.dst_tier, dst, *layers)
            target[...] = source.bytes_of(job.src_tier, src, *layers)
            target[0, 0] ^= self.world.random.random() < 0.02
            wrong += zlib.crc32(target) != checksum
        self.post(PagesPulled(job.job_id, "checksum" if wrong else "", mismatches=wrong))


class PoolWorld:
    """Three peers; calls, losses, partitions and naps; then peace."""

    def __init__(self, seed: int) -> None:
        self.random, self.clock, self.rebirths = Random(seed), Clock(), 0
        self.network = FaultyNetwork(self.clock, self.random, (MS // 10, 5 * MS))
        self.nodes = [PoolNode(self, name, self.random.randint(6, 14), self.random.choice([0, 4])) for name in "abc"]
        self.verified = self.done = self.chosen = 0

    def act(self, node: PoolNode) -> None:
        random, memory, machine = self.random, node.memory, node.machine
        if node.asleep is not None:
            return
        tokens = random.choice(FAMILIES)[: 4 * random.randint(1, 5)]
        other = random.choice([each.peer.name for each in self.nodes if each is not node])
        kind = random.choice(KINDS)
        if kind == "meet":
            node.call(lambda now_ns: machine.add_peer(self.network.nodes[other].machine.info, now_ns))
        elif kind == "store":
            node.call(lambda now_ns: self.store(memory, tokens))
        elif kind == "match":
            self.verify(memory, tokens)
        elif kind in ("send", "raw"):
            self.offer(node, other, tokens, kind == "send")
        elif kind == "fetch":
            self.count(node.call(lambda now_ns: machine.start_fetch(other, tokens, now_ns, 200 * MS)))
        elif kind == "there":
            tier = random.choice([Tier.HBM, Tier.DRAM])
            got = self.count(node.call(lambda now_ns: machine.start_allocation(other, 2, tier, now_ns, 200 * MS)))
            got.add_done_callback(lambda got: node.held.append(list(got.result() or ())))
        elif node.held:
            self.free(node, node.held.pop(random.randrange(len(node.held))))

    def count(self, call: Future[Any] | None) -> Future[Any]:
        """A call that was refused never ends."""
        call = call or Future()
        call.add_done_callback(self.add)
        return call

    def add(self, ended: Future[Any]) -> None:
        self.done += bool(ended.result())

    def store(self, memory: MemPool, tokens: np.ndarray) -> None:
        found = memory.match(tokens)
        fresh = memory.alloc_mem(len(tokens) // 4 - len(found))
        if fresh is not None:
            for at, address in enumerate(fresh, start=len(found)):
                memory.view(address)[...] = pattern(tokens[: (at + 1) * 4])
            memory.insert(tokens, found + fresh)
            memory.free_mem(fresh)
        memory.free_mem(found)

    def verify(self, memory: MemPool, tokens: np.ndarray) -> None:
        found = memory.match(tokens)
        for at, address in enumerate(found):
            assert np.array_equal(memory.view(address), pattern(tokens[: (at + 1) * 4])), f"wrong bytes at {at}"
            self.verified += 1
        memory.free_mem(found)

    def offer(self, node: PoolNode, other: str, tokens: np.ndarray, insert: bool) -> None:
        found = node.memory.match(tokens)
        blocks, tokens = [address.block for address in found], tokens[: 4 * len(found)]
        if blocks:
            terms: dict[str, Any] = {"insert": insert}
            there = self.random.choice([None, *self.held_at(node, other)])
            if there is not None:
                blocks, tokens = blocks[: len(there)], tokens[: 4 * len(there)]
                chosen = there[: len(blocks)]
                terms |= {"dst_blocks": tuple(each.block for each in chosen), "dst_tier": chosen[0].tier}
                self.chosen += insert
            machine = node.machine
            offered = OfferedBlocks(node.memory.tenant, tokens if insert else tokens[:0], blocks)
            self.count(
                node.call(
                    lambda now_ns: machine.start_offer(
                        machine.require_peer(other), offered, now_ns, OfferTerms(**terms)
                    )
                )
            )
        node.memory.free_mem(found)

    def held_at(self, node: PoolNode, other: str) -> list[list[Address]]:
        """What ``node`` has allocated at ``other``, call by call."""
        generation = self.network.nodes[other].peer.generation
        return [held for held in node.held if held and held[0].generation == generation]

    def free(self, node: PoolNode, addresses: list[Address]) -> None:
        for address in addresses:
            if address.generation == node.memory.generation:
                node.call(partial(lambda now_ns, a: node.memory.free_mem([a]), a=address))
            else:
                node.call(partial(lambda now_ns, a: node.machine.free_at(a.generation, [a]), a=address))

    def disturb(self) -> None:
        random, node = self.random, self.random.choice(self.nodes)
        span = random.choice([20, 400, 900]) * MS
        kind = random.choice(["nap", "part", "lose"])
        if kind == "nap" and node.asleep is None:
            node.asleep = []
            self.clock.call_after(span, partial(self.wake, node))
        elif kind == "part":
            other = random.choice([each.peer.name for each in self.nodes])
            ways = self.network.cut_ways(node.peer.name, other, "lose", random.random() < 0.5)
            self.clock.call_after(span, partial(self.network.heal_ways, ways, "lose"))
        elif kind == "lose":
            self.network.loss += 0.2
            self.clock.call_after(span, self.lose_less)

    def lose_less(self) -> None:
        self.network.loss = max(0.0, self.network.loss - 0.2)

    def wake(self, node: PoolNode) -> None:
        todo, node.asleep = node.asleep or [], None
        for do in todo:
            node.soon(do)

    def run(self) -> None:
        for at in range(250):
            self.clock.call_at(at * 8 * MS, partial(self.act, self.nodes[at % 3]))
            if at % 50 == 49:
                self.clock.call_at(at * 8 * MS, self.disturb)
        self.run_until(4000 * MS)
        for node in self.nodes:
            while node.held:
                self.free(node, node.held.pop())
            self.run_until(self.clock.now + MS)
        self.run_until(self.clock.now + 2500 * MS)
        for node in self.nodes:
            while node.held:  # came late
                self.free(node, node.held.pop())
            assert node.machine.exchange.transfers_open == 0
            for tokens in FAMILIES:
                self.verify(node.memory, tokens)
            for report in node.memory.report().tiers:
                assert report.blocks_used == report.blocks_evictable, f"{node.peer.name} leaks: {report}"

    def run_until(self, end_ns: int) -> None:
        self.clock.call_at(end_ns, lambda: None)
        while self.clock.now < end_ns:
            self.clock.run_one()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_random_histories(first: int) -> None:
    worlds = [PoolWorld(seed) for seed in range(first, first + 25)]
    for world in worlds:
        world.run()
    assert sum(world.verified for world in worlds) > 200 and sum(world.done for world in worlds) > 100
    assert sum(world.chosen for world in worlds) > 50
    assert sum(world.rebirths for world in worlds) > 0  # else nobody was ever taken to be gone


# -- the group, one event at a time


def told(name: str, generation: int = 1) -> PeerInfo:
    return PeerInfo(Peer(name, generation), Role.STORE, f"virtual://{name}", "n", GEOMETRY, 4, 0, 0, True)


A, B = told("a"), told("b")
GREETING, BEAT = Send(Peer("b", 0), PeerJoined(A)), Send(B.peer, Heartbeat(Load()))


def test_group_repeats_greeting_until_answered_then_heartbeats() -> None:
    group = PeerGroup(A, silent_ns=50 * MS)
    assert group.handle(AddRequested(B), 0) == [AddPeer(B), GREETING, GREETING]  # the first beat is due at once
    assert group.handle(ClockTicked(), 9 * MS) == [] and group.next_deadline_ns == 10 * MS
    assert group.handle(ClockTicked(), 10 * MS) == [GREETING] and not group.has_answered("b")
    free = MessageArrived(B.peer, Free("x"))
    assert group.handle(free, 12 * MS) == [ForwardMessage(B.peer, Free("x"))] and group.has_answered("b")
    assert group.handle(ClockTicked(), 20 * MS) == [BEAT]
    assert group.handle(MessageArrived(B.peer, Leave()), 21 * MS) == [RemovePeer(B.peer)]
    assert group.live_peers() == [] and group.next_deadline_ns is None


def test_silent_peer_is_removed_unless_this_process_was_stopped() -> None:
    group = PeerGroup(A, silent_ns=50 * MS)
    group.handle(AddRequested(B), 0)
    group.handle(MessageArrived(B.peer, Heartbeat(Load())), MS)
    assert group.handle(ClockTicked(), 500 * MS) == [BEAT]  # it was stopped, and could hear no peer
    for at in (510, 520, 530, 540, 550):
        assert group.handle(ClockTicked(), at * MS) == [BEAT]
    assert group.handle(ClockTicked(), 560 * MS) == [RemovePeer(B.peer)]
    [expelled] = group.handle(MessageArrived(B.peer, Heartbeat(Load())), 561 * MS)
    assert expelled.to == B.peer and isinstance(expelled.message, Expelled)
    assert group.handle(MessageArrived(B.peer, PeerJoined(B)), 562 * MS) == [expelled]  # what it promised is void
    again = told("b", 2)
    joined = MessageArrived(again.peer, PeerJoined(again))
    assert group.handle(joined, 563 * MS)[0] == AddPeer(again) and group.find_peer("b") == again.peer


def test_expelled_process_restarts_and_greets_all_peers() -> None:
    group, c = PeerGroup(A, silent_ns=50 * MS), told("c")
    for info in (B, c):
        group.handle(AddRequested(info), 0)
        group.handle(MessageArrived(info.peer, Heartbeat(Load())), MS)
    order = ChangeGeneration(B.peer, "silent", 2)
    assert group.handle(MessageArrived(B.peer, Expelled("silent")), 2 * MS) == [order]
    assert group.handle(MessageArrived(c.peer, Free("x")), 3 * MS) == []  # said to the incarnation that ends
    new = told("a", 2)
    parted, met = group.handle(GenerationChanged(new), 4 * MS)[:2], group.handle(ClockTicked(), 5 * MS)
    assert parted == [RemovePeer(B.peer), RemovePeer(c.peer)] and met == []
    assert group.live_peers() == [B.peer, c.peer] and not group.has_answered("b") and not group.has_answered("c")
    assert group.handle(RemoveRequested(B.peer), 6 * MS) == [RemovePeer(B.peer), Send(B.peer, Leave())]
    assert group.handle(MessageArrived(B.peer, Free("x")), 7 * MS) == [Send(B.peer, Leave())]  # left, not lost
    assert group.handle(AddRequested(B), 8 * MS) == [
        ChangeGeneration(B.peer, "b was lost here, and is to be met again", 3)
    ]
    assert AddPeer(B) in group.handle(GenerationChanged(told("a", 3)), 8 * MS)
