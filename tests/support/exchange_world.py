"""Pools with exchanges, real (small) page contents, a network that misbehaves, and a device that runs behind its plans.

A page holds 16 bytes that depend on tenant, tokens up to the block's end, and layer: a read of wrong KV is seen.
A plan's copies and writes are done at any time between its making and its end; a pull reads and writes at any time
between the action and its answer. Time is a number.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from memserve.base.config import ExchangeConfig, PoolConfig
from memserve.base.types import KVGeometry, Request, Role, Tier
from memserve.kv.pool import BlockPool
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.events import (
    CancelPulls,
    Delivered,
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    PagesPulled,
    PagesSealed,
    PullPages,
    Released,
    RemoteAllocated,
    SealPages,
)
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.peers import Peer, PeerInfo

BLOCK, LAYERS = 4, 3
GEOMETRY = KVGeometry(LAYERS, 1, 2, 2, "float32", BLOCK)
LEASE_NS = 1000


@functools.cache
def page(tenant: str, prefix: tuple[int, ...], layer: int) -> bytes:
    """What attention would find in the page of the block that ends with ``prefix``."""
    return hashlib.blake2b(repr((tenant, prefix, layer)).encode(), digest_size=16).digest()


def pages(tenant: str, tokens, block: int) -> np.ndarray:
    """Right contents of a block, ``[layers, 16]`` uint8."""
    prefix = tuple(int(token) for token in tokens[: (block + 1) * BLOCK])
    return np.stack([np.frombuffer(page(tenant, prefix, layer), np.uint8) for layer in range(LAYERS)])


def checksum(data: np.ndarray) -> int:
    return zlib.crc32(data.tobytes()) + data.size


def array(tokens) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def blocks_of(tokens) -> int:
    return -(-len(tokens) // BLOCK)


@dataclass(eq=False)
class Seq:
    """A sequence that computes or reads KV: its blocks, one reference each, and its pin."""

    tenant: str
    tokens: np.ndarray
    blocks: list[int]
    lease: Lease | None
    fence: int = 0  # contents are right once this plan has finished
    offer_id: str | None = None
    checked: bool = False
    tier: Tier = Tier.HBM


@dataclass(eq=False)
class Plan:
    step_id: int
    copies: list
    writes: list[tuple[int, int, np.ndarray]]  # (HBM block, layer, bytes)
    reads: list[tuple[int, np.ndarray]]  # (HBM block, what must be there)
    executed: bool = False


@dataclass(eq=False)
class Pull:
    job: PullPages
    moved: bool = False
    answer: PagesPulled | None = None


class Node:
    """One process: pool, exchange, device, host."""

    def __init__(
        self,
        world: World,
        peer: Peer,
        hbm: int,
        dram: int,
        caching: bool,
        namespace: str,
        states=None,
        windows=None,
        **config,
    ) -> None:
        self.world, self.peer, self.namespace, self.caching = world, peer, namespace, caching
        sizes = PoolConfig(hbm, dram, caching, states=states, windows=windows)
        self.pool = BlockPool(sizes, BLOCK, namespace, event_capacity=64)
        self.exchange = Exchange(self.pool, GEOMETRY, ExchangeConfig(lease_ns=LEASE_NS, **config), peer)
        self.arena = {
            Tier.HBM: np.zeros((hbm, LAYERS, 16), np.uint8),
            Tier.DRAM: np.zeros((dram, LAYERS, 16), np.uint8),
        }
        self.steps = 0
        self.plans: deque[Plan] = deque()
        self.seals: list[SealPages] = []
        self.pulls: list[Pull] = []
        self.seqs: list[Seq] = []
        self.remote: dict[str, tuple[Peer, Tier, tuple[int, ...]]] = {}  # own calls that got blocks
        self.held: list[tuple[Tier, int]] = []  # delivered, one reference each
        self.offers: dict[str, bool] = {}  # own offers: open?
        self.expecting: dict[str, str] = {}  # handoffs and fetches that must end: id -> kind
        self.cancelled: list[Peer] = []  # peers whose pulls were called off
        self.outcomes: list = []

    def info(self) -> PeerInfo:
        size = self.pool.config
        blocks = size.hbm_blocks, size.dram_blocks
        return PeerInfo(self.peer, Role.COLOCATED, "", self.namespace, GEOMETRY, *blocks, 999, self.caching)

    @property
    def now(self) -> int:
        return self.world.now

    # -- the exchange's two ends

    def take(self, outcomes) -> list:
        """Look at outcomes, pass on actions."""
        for outcome in outcomes:
            self._take_one(outcome)
        self.outcomes += outcomes
        for action in self.exchange.take_actions():
            if isinstance(action, Send):
                self.world.post(self.peer, action.to, action.message)
            elif isinstance(action, SealPages):
                self.seals.append(action)
            elif isinstance(action, PullPages):
                assert action.dst_blocks and len(action.checksums) == len(action.src_blocks) == len(action.dst_blocks)
                self.pulls.append(Pull(action))
            else:
                assert isinstance(action, CancelPulls)
                self.cancelled.append(action.peer)
                for pull in self.pulls:
                    if pull.job.peer == action.peer and not pull.moved:
                        pull.answer = PagesPulled(pull.job.job_id, "cancelled")
        return outcomes

    def _take_one(self, outcome) -> None:
        if isinstance(outcome, HandoffOffered):
            assert outcome.transfer_id not in self.expecting, "offered twice"
            self.expecting[outcome.transfer_id] = "handoff"
        elif isinstance(outcome, HandoffArrived):
            assert self.expecting.pop(outcome.transfer_id) == "handoff"
            offer = outcome.offer
            assert len(outcome.blocks) == blocks_of(offer.tokens) == outcome.pulled_blocks + outcome.reused_blocks
            published = offer.insert and offer.request.use_cache and outcome.tier is Tier.HBM
            assert (outcome.lease is not None) == published
            blocks, fence = list(outcome.blocks), self.exchange.fence
            self.seqs.append(Seq(offer.tenant, offer.tokens, blocks, outcome.lease, fence, tier=outcome.tier))
        elif isinstance(outcome, HandoffFailed):
            assert self.expecting.pop(outcome.transfer_id) == "handoff"
        elif isinstance(outcome, FetchEnded):
            assert self.expecting.pop(outcome.transfer_id) == "fetch"
        elif isinstance(outcome, Delivered):
            tier = outcome.offer.dst_tier
            if outcome.offer.dst_blocks:
                assert outcome.blocks == list(outcome.offer.dst_blocks)
            self.world.check_delivery(self, outcome)
            self.held += [(tier, block) for block in outcome.blocks]
        elif isinstance(outcome, Released):
            if outcome.transfer_id in self.offers:
                assert self.offers[outcome.transfer_id], "released twice"
                self.offers[outcome.transfer_id] = False
        elif isinstance(outcome, RemoteAllocated):
            assert self.expecting.pop(outcome.call_id) == "alloc"
            if outcome.blocks is not None:
                self.remote[outcome.call_id] = (outcome.peer, outcome.tier, outcome.blocks)

    def hear(self, sender: Peer, message) -> list:
        return self.take(self.exchange.handle(MessageArrived(sender, message), self.now))

    def advance(self) -> list:
        return self.take(self.exchange.advance_transfers(self.now))

    # -- the device

    def make_plan(self, writes=(), reads=()) -> int:
        self.steps += 1
        self.plans.append(Plan(self.steps, self.pool.take_copies(), list(writes), list(reads)))
        self.exchange.plan_made(self.steps)
        return self.steps

    def execute(self, plan: Plan) -> None:
        if plan.executed:
            return
        plan.executed = True
        for copy in plan.copies:
            self.arena[copy.dst_tier][copy.dst] = self.arena[copy.src_tier][copy.src]
        for block, expected in plan.reads:
            assert np.array_equal(self.arena[Tier.HBM][block], expected), f"plan {plan.step_id} reads wrong KV"
        for block, layer, data in plan.writes:
            self.arena[Tier.HBM][block, layer] = data

    def finish_plan(self) -> list:
        plan = self.plans.popleft()
        self.execute(plan)
        return self.take(self.exchange.plan_finished(plan.step_id, self.now))

    # -- the host

    def seal(self, job: SealPages) -> list:
        self.seals.remove(job)
        layers = slice(job.first_layer, job.end_layer)
        sums = tuple(checksum(self.arena[job.tier][block, layers]) for block in job.blocks)
        return self.take(self.exchange.handle(PagesSealed(job.job_id, sums), self.now))

    def move(self, pull: Pull, corrupt: bool = False) -> None:
        """The copy itself, and the comparison on the way."""
        job, source = pull.job, self.world.by_peer(pull.job.peer)
        pull.moved = True
        if pull.answer is not None:
            return
        if source is None:
            pull.answer = PagesPulled(job.job_id, "the peer's memory is gone")
            return
        layers, wrong = slice(job.first_layer, job.end_layer), 0
        for src, dst, expected in zip(job.src_blocks, job.dst_blocks, job.checksums, strict=True):
            data = source.arena[job.src_tier][src, layers].copy()
            if corrupt:
                data[0, 3] ^= 1
            self.arena[job.dst_tier][dst, layers] = data
            wrong += checksum(data) != expected
        size = len(job.src_blocks) * (job.end_layer - job.first_layer) * 16
        error = "checksums differ" if wrong else ""
        pull.answer = PagesPulled(job.job_id, error, size, "shm", 1, wrong)

    def answer(self, pull: Pull) -> list:
        self.move(pull) if not pull.moved else None
        self.pulls.remove(pull)
        return self.take(self.exchange.handle(pull.answer, self.now))

    # -- sequences

    def compute(self, tenant: str, tokens) -> Seq | None:
        """As an instance does: cached prefix, new blocks, a plan that computes them, published as the plan is made."""
        tokens = array(tokens)
        lease = self.pool.acquire(tenant, tokens)
        cached = len(lease.blocks)
        fresh = self.pool.allocate(blocks_of(tokens) - cached)
        if fresh is None:
            self.pool.unpin(lease)
            self.pool.release(lease.blocks)
            return None
        seq = Seq(tenant, tokens, lease.blocks + fresh, lease)
        writes = []
        for place in range(cached, len(seq.blocks)):
            data = pages(tenant, tokens, place)
            writes += [(seq.blocks[place], layer, data[layer]) for layer in range(LAYERS)]
        seq.fence = self.make_plan(
            writes, [(seq.blocks[place], pages(tenant, tokens, place)) for place in range(cached)]
        )
        whole = len(tokens) // BLOCK
        self.pool.publish(lease, tenant, tokens[: whole * BLOCK], seq.blocks[:whole], written_by=seq.fence)
        self.seqs.append(seq)
        return seq

    def end(self, seq: Seq) -> None:
        self.seqs.remove(seq)
        if seq.lease is not None:
            self.pool.unpin(seq.lease)
        give_back = self.pool.release if seq.tier is Tier.HBM else self.pool.release_dram
        give_back(seq.blocks)

    def hand_over(self, to: Peer, seq: Seq, first=((7,),), **options) -> str:
        """Offer all of a sequence, computed by the plans made so far, and its first token."""
        request = Request("r", seq.tokens, tenant=seq.tenant)
        options = {"request": request, **options}
        offer_id = self.offer(to, seq, **options)
        self.exchange.announce_computed(offer_id, 0, len(seq.blocks))
        self.exchange.hand_off(offer_id, first)
        self.take([])
        return offer_id

    def offer(self, to: Peer, seq: Seq, first_block: int = 0, end_block: int | None = None, **options) -> str:
        blocks = seq.blocks[first_block:end_block]
        offered = OfferedBlocks(seq.tenant, seq.tokens, blocks, first_block=first_block)
        offer_id = self.exchange.offer_blocks(to, offered, self.now, OfferTerms(**options))
        self.offers[offer_id] = True
        self.take([])
        return offer_id

    def fetch(self, holder: Peer, tenant: str, tokens, deadline_ns: int, **terms) -> str:
        tokens = array(tokens)
        begin, end = self.pool.match(tenant, tokens) // BLOCK, len(tokens) // BLOCK
        fetch_id = self.exchange.fetch_blocks(holder, tenant, tokens, begin, end, self.now, deadline_ns, **terms)
        self.expecting[fetch_id] = "fetch"
        self.take([])
        return fetch_id

    # -- checks

    def quiet(self) -> bool:
        """Whether memory is what the books say."""
        return not self.plans and not self.pool.has_copies

    def check_seqs(self) -> None:
        """A reader that may read now reads the right bytes."""
        finished = self.plans[0].step_id - 1 if self.plans else self.steps
        for seq in self.seqs:
            if seq.fence <= finished and not seq.checked:
                seq.checked = True
                for place, block in enumerate(seq.blocks):
                    found = self.arena[seq.tier][block]
                    assert np.array_equal(found, pages(seq.tenant, seq.tokens, place)), f"wrong KV in {seq}"

    def check_cache(self, tenant: str, tokens) -> int:
        """What the index has of ``tokens`` holds the right bytes; returns its blocks. For quiet nodes."""
        tokens = array(tokens)
        hbm, dram = self.pool.export_blocks(tenant, tokens)
        places = [(Tier.HBM, block) for block in hbm] + [(Tier.DRAM, block) for block in dram]
        for place, (tier, block) in enumerate(places):
            assert np.array_equal(self.arena[tier][block], pages(tenant, tokens, place)), "wrong KV in the cache"
        self.pool.release(hbm)
        self.pool.release_dram(dram)
        return len(places)

    def check(self) -> None:
        """The books balance: each reference is the index's, the exchange's or a sequence's."""
        self.pool.check_invariants()
        self.exchange.check_invariants()
        self.check_seqs()
        known = self.exchange.references()
        known.update((seq.tier, block) for seq in self.seqs for block in seq.blocks)
        known.update(self.held)
        report = self.pool.report().by_tier
        for tier in (Tier.HBM, Tier.DRAM):
            total, cached = report[tier].blocks_total, 0
            for block in range(total):
                over = self.pool.ref_count(tier, block) - known[tier, block]
                assert over in (0, 1), f"{tier.name} block {block} of {self.peer.name}: {over} references too many"
                cached += over
            assert cached == report[tier].blocks_cached, f"{self.peer.name}: references that nobody knows"

    def check_empty(self) -> None:
        """Nothing is held for anybody but the cache."""
        assert self.exchange.transfers_open == 0, repr(self.exchange)
        assert self.exchange.references() == Counter()
        assert not self.expecting, self.expecting
        assert not any(self.offers.values()), self.offers
        assert not self.exchange.wants_plan
        for report in self.pool.report().tiers:
            assert report.blocks_used == report.blocks_cached and report.blocks_pinned == 0, report


@dataclass(eq=False)
class World:
    now: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[tuple[Peer, Peer], deque] = field(default_factory=dict)
    drop: object = None  # (sender, to, message) -> bool
    log: list = field(default_factory=list)

    def add(self, name: str, hbm: int = 16, dram: int = 0, caching: bool = True, namespace="m", **config) -> Node:
        old = self.nodes.get(name)
        peer = Peer(name, old.peer.generation + 1 if old is not None else 1)
        node = self.nodes[name] = Node(self, peer, hbm, dram, caching, namespace, **config)
        return node

    def meet(self) -> None:
        """All know each other."""
        for node in self.nodes.values():
            for other in self.nodes.values():
                if other is not node:
                    node.take(node.exchange.peer_joined(other.info(), self.now))

    def by_peer(self, peer: Peer) -> Node | None:
        node = self.nodes.get(peer.name)
        return node if node is not None and node.peer == peer else None

    def post(self, sender: Peer, to: Peer, message) -> None:
        self.log.append((sender.name, to.name, type(message).__name__))
        if self.drop is None or not self.drop(sender, to, message):
            self.links.setdefault((sender, to), deque()).append(message)

    def deliver(self, link: tuple[Peer, Peer]) -> list:
        """The next message of a link; its receiver may be gone."""
        sender, to = link
        message = self.links[link].popleft()
        if not self.links[link]:
            del self.links[link]
        node = self.by_peer(to)
        return node.hear(sender, message) if node is not None else []

    def step(self, pulls: bool = True) -> bool:
        """Something of what is under way happens, in a fixed order; ``False`` = all quiet (but for pulls)."""
        for link in list(self.links):
            self.deliver(link)
            return True
        for node in self.nodes.values():
            if node.seals:
                node.seal(node.seals[0])
                return True
            if node.pulls and pulls:
                node.answer(node.pulls[0])
                return True
            if node.plans:
                node.finish_plan()
                return True
            if node.exchange.wants_plan:
                node.make_plan()
                return True
        return False

    def run(self) -> None:
        """Until all is quiet, with all books checked on the way."""
        while self.step():
            for node in self.nodes.values():
                node.check()

    def wait(self, ns: int) -> None:
        """Time passes."""
        self.now += ns
        for node in self.nodes.values():
            node.advance()
            node.check()

    def check_delivery(self, node: Node, outcome: Delivered) -> None:
        """A raw transfer says in ``private`` what it holds: tenant, first block, tokens."""
        tenant, first, tokens = ast.literal_eval(outcome.offer.private.decode())
        for i, block in enumerate(outcome.blocks):
            found = node.arena[outcome.offer.dst_tier][block]
            assert np.array_equal(found, pages(tenant, tokens, first + i)), "a raw transfer brought something else"


def raw_label(seq: Seq, first_block: int) -> bytes:
    return repr((seq.tenant, first_block, tuple(int(token) for token in seq.tokens))).encode()


__all__ = ["BLOCK", "GEOMETRY", "LAYERS", "LEASE_NS", "Node", "Seq", "World", "array", "raw_label"]


PROMPT = list(range(100, 100 + 2 * BLOCK + 2))  # two whole blocks and a half


@contextmanager
def settled_world() -> Iterator[World]:
    """A world for one story, at whose end all have finished and all leases have ended: then nothing is held."""
    world = World()
    yield world
    world.drop = None
    world.run()
    for node in world.nodes.values():
        while node.seqs:
            node.end(node.seqs[0])
        for tier, block in node.held:
            (node.pool.release if tier == Tier.HBM else node.pool.release_dram)([block])
        node.held.clear()
    for _ in range(2):
        world.wait(2 * LEASE_NS)
        world.run()
    for node in world.nodes.values():
        node.check()
        node.check_empty()
        assert node.exchange.next_deadline_ns is None


def pair(world: World, **options) -> tuple[Node, Node]:
    """A prefill and a decode instance; options are the decode instance's."""
    p, d = world.add("p"), world.add("d", **options)
    world.meet()
    return p, d


def of(node: Node, kind):
    """The node's outcomes of a kind."""
    return [outcome for outcome in node.outcomes if isinstance(outcome, kind)]


def last(node: Node):
    return node.outcomes[-1]


def losing(*kinds):
    """Loses messages of these kinds."""
    return lambda sender, to, message: isinstance(message, kinds)


def send(world: World, name: str) -> list[str]:
    return [kind for sender, _, kind in world.log if sender == name]


def allocated(node: Node, at: Node, count: int, tier: Tier = Tier.HBM, deadline_ns: int = 500) -> str:
    call_id = node.exchange.allocate_at(at.peer, count, tier, node.now, deadline_ns)
    node.expecting[call_id] = "alloc"
    node.take([])
    return call_id


def deliver_all_but_pulls(world: World) -> None:
    while world.step(pulls=False):
        pass


def arrived_tenants(node: Node) -> list[str]:
    return [arrived.offer.request.tenant for arrived in of(node, HandoffArrived)]
