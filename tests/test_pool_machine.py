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

from memserve.config import ExchangeConfig
from memserve.errors import UserError
from memserve.kv_transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.kv_transfer.exchange import Exchange
from memserve.mempool.addresses import Address
from memserve.mempool.mempool import MemPool
from memserve.messages import AnyMessage, Peer, PeerInfo
from memserve.runtime.pool_machine import PoolMachine
from memserve.runtime.pool_words import Arrived, Call, Lost, Met, Reborn
from memserve.serving import ClockTicked, MessageArrived, Send
from memserve.sim.clock import Clock
from memserve.sim.fuzz.network import FaultyNetwork
from memserve.sim.network import Node
from memserve.types import KVGeometry, Role, Tier

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

    def receive(self, sender: Peer, message: AnyMessage) -> None:
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
        self.post(Call(do, answer))
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
        deadline_ns = self.machine.next_deadline_ns
        if deadline_ns is not None:
            self.ticks += 1
            clock.at(max(deadline_ns, clock.now + MS), partial(self.soon, partial(self.tick, self.ticks)))

    def tick(self, number: int) -> None:
        if number == self.ticks:
            self.post(ClockTicked())

    def perform(self, action: Any) -> None:
        world = self.world
        if isinstance(action, Send):
            if action.to in self.lines or action.to in self.heard or not action.to.generation:
                world.network.send(self.peer, action.to, action.message)
        elif isinstance(action, Met):
            self.lines.add(action.info.peer)
        elif isinstance(action, Lost):
            self.lines.discard(action.peer)
        elif isinstance(action, Reborn):
            self.peer = action.info.peer
            world.rebirths += 1
        elif isinstance(action, Arrived):
            blocks = getattr(action.outcome, "blocks", ())
            tier, generation = action.outcome.offer.dst_tier, self.memory.generation
            self.held.append([Address(tier, block, generation) for block in blocks])
        elif isinstance(action, SealPages | PullPages):
            do = self.seal if isinstance(action, SealPages) else self.pull
            world.clock.after(world.random.randint(0, 30 * MS), partial(self.soon, partial(do, action)))
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
        self.verified = self.done = 0

    def act(self, node: PoolNode) -> None:
        random, memory, machine = self.random, node.memory, node.machine
        if node.asleep is not None:
            return
        tokens = random.choice(FAMILIES)[: 4 * random.randint(1, 5)]
        other = random.choice([each.peer.name for each in self.nodes if each is not node])
        kind = random.choice(KINDS)
        if kind == "meet":
            node.call(lambda now: machine.meet(self.network.nodes[other].machine.info, now))
        elif kind == "store":
            node.call(lambda now: self.store(memory, tokens))
        elif kind == "match":
            self.verify(memory, tokens)
        elif kind in ("send", "raw"):
            self.offer(node, other, tokens, kind == "send")
        elif kind == "fetch":
            node.call(lambda now: machine.start_fetch(self.waiter(), machine.known(other), tokens, now, 200 * MS))
        elif kind == "there":
            waiter = self.waiter()
            waiter.add_done_callback(lambda got: node.held.append(list(got.result() or ())))
            tier = random.choice([Tier.HBM, Tier.DRAM])
            node.call(lambda now: machine.start_allocation(waiter, machine.known(other), 2, tier, now, 200 * MS))
        elif node.held:
            self.free(node, node.held.pop(random.randrange(len(node.held))))

    def waiter(self) -> Future[Any]:
        waiter: Future[Any] = Future()
        waiter.add_done_callback(self.count)
        return waiter

    def count(self, ended: Future[Any]) -> None:
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
            terms = {"insert": insert, "tier": Tier.HBM}
            machine, empty = node.machine, tokens[:0]
            node.call(
                lambda now: machine.start_offer(
                    self.waiter(), machine.known(other), blocks, now, tokens if insert else empty, **terms
                )
            )
        node.memory.free_mem(found)

    def free(self, node: PoolNode, addresses: list[Address]) -> None:
        for address in addresses:
            if address.generation == node.memory.generation:
                node.call(partial(lambda now, a: node.memory.free_mem([a]), a=address))
            else:
                node.call(partial(lambda now, a: node.machine.free_at(a.generation, [a]), a=address))

    def disturb(self) -> None:
        random, node = self.random, self.random.choice(self.nodes)
        span = random.choice([20, 400, 900]) * MS
        kind = random.choice(["nap", "part", "lose"])
        if kind == "nap" and node.asleep is None:
            node.asleep = []
            self.clock.after(span, partial(self.wake, node))
        elif kind == "part":
            other = random.choice([each.peer.name for each in self.nodes])
            ways = self.network.part(node.peer.name, other, "lose", random.random() < 0.5)
            self.clock.after(span, partial(self.network.heal, ways, "lose"))
        elif kind == "lose":
            self.network.loss += 0.2
            self.clock.after(span, self.lose_less)

    def lose_less(self) -> None:
        self.network.loss = max(0.0, self.network.loss - 0.2)

    def wake(self, node: PoolNode) -> None:
        todo, node.asleep = node.asleep or [], None
        for do in todo:
            node.soon(do)

    def run(self) -> None:
        for at in range(250):
            self.clock.at(at * 8 * MS, partial(self.act, self.nodes[at % 3]))
            if at % 50 == 49:
                self.clock.at(at * 8 * MS, self.disturb)
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
        self.clock.at(end_ns, lambda: None)
        while self.clock.now < end_ns:
            self.clock.run_one()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_random_histories(first: int) -> None:
    worlds = [PoolWorld(seed) for seed in range(first, first + 25)]
    for world in worlds:
        world.run()
    assert sum(world.verified for world in worlds) > 200 and sum(world.done for world in worlds) > 100
    assert sum(world.rebirths for world in worlds) > 0  # else nobody was ever taken to be gone
