"""A store among the pools of ``exchange_world``: the real machine, real shared memory, literal disks, scripted clients.

Everything that the machine asks for waits in a list until the test, or chance, ends it. A store can be killed: what its
memory and its disks hold then is what the next one finds.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from disks_world import DisksWorld, Job, seal_of, split
from exchange_world import BLOCK, GEOMETRY, LAYERS, LEASE_NS, Node, World, array, checksum, pages
from memserve import _core
from memserve.base.config import ExchangeConfig, MemberConfig
from memserve.base.types import ClockTicked, Role, Tier
from memserve.kv.identity import DEFAULT_KEY
from memserve.kv.state_snapshot import Lease
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.kv.transfer.exchange import OfferedBlocks
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import ChangeGeneration, DrainRequested, GenerationChanged, LogWarning
from memserve.protocol.messages import JoinAccepted, KvEvents, KvSnapshot, PeerGone, PeerJoined
from memserve.protocol.peers import ROUTER, ArenaPlace, Peer, PeerInfo
from memserve.protocol.store import (
    StoreDone,
    StoreGet,
    StoreHello,
    StorePair,
    StorePut,
    StoreWelcome,
)
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import SYNC_CODES, DisksConfig
from memserve.store.machine.clients import tenant_key, tenant_scope
from memserve.store.machine.events import (
    Ended,
    ExtentsSealed,
    SealExtents,
    SendValues,
    ServeModel,
    StoreConfig,
    TakeValues,
    ValuesSent,
    ValuesTaken,
)
from memserve.store.machine.machine import StoreMachine
from memserve_lab.sim.reference.disk import PAGE_BYTES, SymbolicDisk
from tier_names import new_tier_name, remove_tier_files

ROUTER_PEER = Peer(ROUTER, 1)
SEGMENT_BYTES = 16 * PAGE_BYTES
BLOCK_BYTES = GEOMETRY.block_bytes
HOST = "this host"


class StoreNode:
    """A store's process; what ``World`` asks of a node it has, too."""

    def __init__(
        self,
        world: World,
        peer: Peer,
        *,
        blocks: int,
        disks: list[SymbolicDisk],
        name: str,
        namespace: str = "m",
        segments: int = 6,
        config: StoreConfig | None = None,
        disks_config: DisksConfig | None = None,
        is_called: bool = False,
    ) -> None:
        self.world, self.peer, self.literal, self.name = world, peer, disks, name
        self.tier = _core.MemoryTier(blocks * BLOCK_BYTES, BLOCK_BYTES, name=name)
        self.bytes = np.frombuffer(self.tier.arena, np.uint8)
        view = self.bytes.reshape(blocks, LAYERS, GEOMETRY.page_bytes)
        self.arena = {Tier.DRAM: view[:, :, :16]}
        self.disks_config = disks_config or DisksConfig(admission="all")
        self.seals: list[SealPages] = []
        self.pulls: list = []
        self.plans: list = []
        self.jobs: list[SealExtents | TakeValues | SendValues] = []
        self.disk_jobs: dict[int, Job] = {}
        self.kept: dict[int, bytes] = {}
        self.told: list[KvEvents | KvSnapshot] = []
        self.notices: list[str] = []
        self.ended: Ended | None = None
        self.serves: list[ServeModel] = []
        self.is_dead = False
        #: disks that answer nothing, or fail
        self.stalls = self.fails = False
        self.why = "EIO"
        logs = [self._log(disk, segments) for disk in disks]
        self.info_now = PeerInfo(
            peer, Role.STORE, "", namespace, GEOMETRY, 0, blocks, 0, True, host_id=HOST, publishes_events=True
        )
        member = MemberMachine(self.info_now, () if is_called else ("tcp://router:1",), MemberConfig())
        limits = config or StoreConfig(ExchangeConfig(lease_ns=LEASE_NS), fetch_deadline_ns=LEASE_NS // 2)
        self.machine = StoreMachine(
            self.tier, Disks(logs, self.disks_config), self.info_now, DEFAULT_KEY, member, limits
        )
        self.perform(self.machine.start(self.now))

    def _log(self, disk: SymbolicDisk, segments: int) -> _core.SegmentLog:
        known = _core.SegmentLog.read_superblock(disk.read_bytes)
        secret = known[2] if known is not None else disk.rng.randbytes(16)  # of a lost disk: nothing is found again
        sync = SYNC_CODES[self.disks_config.sync]
        log = _core.SegmentLog(segments, SEGMENT_BYTES, secret, self.disks_config.move_share, sync)
        if known is not None:
            log.recover(disk.read_bytes)
        else:
            log.format()
        return log

    @property
    def now(self) -> int:
        return self.world.now

    @property
    def exchange(self):
        return self.machine.kv.exchange

    def info(self) -> PeerInfo:
        return self.info_now

    # -- the machine's two ends

    def tell(self, event) -> list:
        if not self.is_dead:
            self.perform(self.machine.handle(event, self.now))
        return []

    def hear(self, sender: Peer, message) -> list:
        return self.tell(MessageArrived(sender, message))

    def advance(self) -> list:
        return self.tell(ClockTicked())

    def take(self, outcomes) -> list:
        return []

    def perform(self, actions) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    if to.name == ROUTER:
                        self._tell_router(message)
                    else:
                        self.world.post(self.peer, to, message)
                case SealPages():
                    self.seals.append(action)
                case PullPages():
                    self.pulls.append(_Pull(action))
                case SealExtents() | TakeValues() | SendValues():
                    self.jobs.append(action)
                case CancelPulls():
                    pass
                case ChangeGeneration(generation_min=generation):
                    self.peer = Peer(self.peer.name, generation)
                    self.info_now = type(self.info_now)(
                        self.peer, Role.STORE, "", self.info_now.namespace, GEOMETRY, 0, 9, 0, True, host_id=HOST
                    )
                    self.tell(GenerationChanged(self.info_now))
                case Ended():
                    self.ended = action
                case LogWarning(text):
                    self.notices.append(text)
                case ServeModel():
                    self.serves.append(action)
                case _ if type(action).__module__ == ev.__name__:
                    self._begin_disk(action)
        self.check()

    def _tell_router(self, message) -> None:
        if isinstance(message, KvEvents | KvSnapshot):
            self.told.append(message)

    def join(self, peers: list[PeerInfo]) -> None:
        self.hear(ROUTER_PEER, JoinAccepted(tuple(peers), "", self.world.copies))

    # -- jobs

    def seal(self, job: SealPages) -> list:
        self.seals.remove(job)
        layers = slice(job.first_layer, job.end_layer)
        sums = tuple(checksum(self.arena[job.tier][block, layers]) for block in job.blocks)
        return self.tell(PagesSealed(job.job_id, sums))

    move = Node.move

    def answer(self, pull) -> list:
        self.move(pull) if not pull.moved else None
        self.pulls.remove(pull)
        return self.tell(pull.answer)

    def do_job(self, job, *, unreadable: bool = False) -> None:
        self.jobs.remove(job)
        match job:
            case SealExtents(number, extents):
                seals = tuple(seal_of(self.bytes[at : at + length].tobytes()) for at, length in extents)
                self.tell(ExtentsSealed(number, seals))
            case TakeValues(number, client, parts):
                seals_or_none = []
                memory = self.world.clients.get(client.name)
                for part in parts:
                    data = part.data
                    if data is None and memory is not None and not unreadable:
                        data = bytes(memory.arena[part.offset : part.offset + part.length])
                    if data is not None:
                        self.bytes[part.extent : part.extent + part.length] = np.frombuffer(data, np.uint8)
                    seals_or_none.append(None if data is None else seal_of(data))
                self.tell(ValuesTaken(number, tuple(seals_or_none)))
            case SendValues(number, to, answer, pieces):
                values = list(answer.values)
                for piece in pieces:
                    values[piece.index] = self.bytes[piece.extent : piece.extent + piece.length].tobytes()
                fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
                self.world.post(self.peer, to, StoreDone(**(fields | {"values": tuple(values)})))
                self.tell(ValuesSent(number))

    begin_record = DisksWorld.begin_record
    read_record = DisksWorld.read_record

    def _begin_disk(self, action: ev.DiskAction) -> None:
        match action:
            case ev.ForgetDisk(disk, _):
                literal = self.literal[disk]
                literal.synced[: 2 * PAGE_BYTES] = bytes(2 * PAGE_BYTES)
                literal.writes = [write for write in literal.writes if write.offset >= 2 * PAGE_BYTES]
                return
            case ev.DropRecord(_, source):
                self.kept.pop(source, None)
                return
            case ev.WritePages(_, disk, offset, data):
                writes = [self.literal[disk].begin_write(offset, data)]
            case ev.WriteExtent(_, disk, offset, head, extent, length, inside):
                payload = self.bytes[extent : extent + length].tobytes()
                writes = self.begin_record(disk, offset, head, payload, inside)
            case ev.WriteRecord(_, disk, offset, head, source, _):
                writes = self.begin_record(disk, offset, head, self.kept.pop(source), 0)
            case _:
                writes = []
        self.disk_jobs[action.job] = Job(action, writes)

    def end_disk(self, number: int, works: bool = True) -> None:
        job = self.disk_jobs.pop(number)
        action, done = job.action, {}
        for write in job.writes:
            self.literal[action.disk].end_write(write, works)
        if works and isinstance(action, ev.SyncDisk):
            self.literal[action.disk].sync_writes()
        if works and isinstance(action, ev.ReadExtent | ev.ReadRecord):
            head, payload = self.read_record(action)
            done = {"seal": seal_of(payload), "head": head}
            if isinstance(action, ev.ReadExtent):
                self.bytes[action.extent : action.extent + len(payload)] = np.frombuffer(payload, np.uint8)
            elif action.keep:
                self.kept[number] = payload
        self.tell(ev.DiskDone(number, works, why="" if works else self.why, **done))

    def step(self) -> bool:
        """One job ends."""
        if self.jobs:
            self.do_job(self.jobs[0])
        elif self.disk_jobs and not self.stalls:
            self.end_disk(next(iter(self.disk_jobs)), not self.fails)
        else:
            return False
        return True

    # -- checks

    def check(self) -> None:
        if self.is_dead:
            return
        self.machine.check_invariants()
        values = self.machine.values
        for key in split(values.disks.all_keys()):
            is_kv = values.disks.find_record(key).scope == 0
            assert is_kv == (key in values.log) or key in values._writes, "the router is told of something else"

    def check_empty(self) -> None:
        """Nothing is held by anything but the table."""
        assert self.machine.count_references() == Counter(), self.machine.count_references()
        assert self.machine.kv.exchange.transfers_open == 0

    def value(self, key: bytes) -> bytes | None:
        """What lies in memory under a key."""
        place = self.tier.find(key, counts=False)
        if place is None:
            return None
        self.tier.release(place.offset)
        return self.bytes[place.offset : place.offset + place.length].tobytes()

    def identities(self, tenant: str, tokens) -> list[bytes]:
        return self.machine.kv._pool.block_identities(tenant, array(tokens))

    def check_kv(self, tenant: str, tokens) -> int:
        """Blocks of a prefix in memory, each with the right bytes."""
        for at, identity in enumerate(self.identities(tenant, tokens)):
            found = self.value(identity)
            if found is None:
                return at
            got = np.frombuffer(found, np.uint8).reshape(LAYERS, GEOMETRY.page_bytes)[:, :16]
            assert np.array_equal(got, pages(tenant, array(tokens), at)), "the store has wrong KV"
        return len(tokens) // BLOCK

    def known_to_router(self) -> dict[bytes, Tier]:
        """What a router makes of everything that it was told."""
        known: dict[bytes, Tier] = {}
        expected = None
        for news in self.told:
            if isinstance(news, KvSnapshot):
                runs = ((Tier.DRAM, news.dram), (Tier.SSD, news.ssd))
                known = {identity: tier for tier, run in runs for identity in split(run)}
                expected = news.next_event
                continue
            assert expected is None or news.first == expected, "changes are missing"
            expected = news.first + len(news.changes)
            for change in news.changes:
                for identity in split(change.identities):
                    if change.kind == "evicted":
                        known.pop(identity)
                    else:
                        assert (change.kind == "stored") == (identity not in known)
                        known[identity] = change.tier
        return known


@dataclass(eq=False)
class _Pull:
    job: PullPages
    moved: bool = False
    answer: PagesPulled | None = None


@dataclass(eq=False)
class Client:
    """A scripted client: memory out of which puts are pulled, and the answers that came."""

    world: StoreWorld
    peer: Peer
    tenant: str = "default"
    arena: bytearray = field(default_factory=lambda: bytearray(1 << 16))
    answers: dict[int, object] = field(default_factory=dict)
    heard: list = field(default_factory=list)
    welcome: StoreWelcome | None = None
    calls: int = 0

    plans = seals = pulls = ()

    def hear(self, sender: Peer, message) -> list:
        if isinstance(message, StoreWelcome):
            self.welcome = message
        elif hasattr(message, "call"):
            assert message.call not in self.answers, "a call is answered twice"
            self.answers[message.call] = message
        self.heard.append(message)
        return []

    def hello(self, host_id: str = HOST) -> None:
        place = ArenaPlace(Tier.DRAM, 0, len(self.arena), 3)
        self.say(StoreHello("tcp://client:1", self.tenant, 7, host_id, place))

    def say(self, message) -> None:
        self.world.post(self.peer, self.world.store.peer, message)

    def key(self, name: bytes) -> bytes:
        return _core.value_keys(tenant_key(self.tenant, DEFAULT_KEY), b"", [name])

    @property
    def scope(self) -> int:
        return tenant_scope(self.tenant, DEFAULT_KEY)

    def put(self, values: dict[bytes, bytes], *, inline: bool = False, replace: bool = True, **more) -> int:
        self.calls += 1
        pairs, at = [], 0
        for name, value in values.items():
            self.arena[at : at + len(value)] = value
            pairs.append(StorePair(self.key(name), name, len(value), at, value if inline else None))
            at += len(value)
        self.say(StorePut(self.calls, tuple(pairs), replace, **more))
        return self.calls

    def get(self, *names: bytes, inline: bool = True, **more) -> int:
        self.calls += 1
        keys = b"".join(self.key(name) for name in names)
        self.say(StoreGet(self.calls, keys, names, inline, **more))
        return self.calls

    def advance(self) -> list:
        return []

    def check(self) -> None:
        pass


@dataclass(eq=False)
class StoreWorld(World):
    """A store, pools of instances, clients; one thing happens after the other."""

    clients: dict[str, Client] = field(default_factory=dict)
    dead: dict[str, Node] = field(default_factory=dict)
    store: StoreNode = None
    further: dict[str, StoreNode] = field(default_factory=dict)
    copies: int = 1

    def open_store(self, blocks: int = 16, disks: int = 0, *, segments: int = 6, seed: int = 0, **more) -> StoreNode:
        size = _core.SegmentLog(segments, SEGMENT_BYTES, bytes(16)).disk_bytes
        literal = [SymbolicDisk(size, random.Random(seed + at)) for at in range(disks)]
        self.settings = {"blocks": blocks, "segments": segments, **more}
        self.store = StoreNode(self, Peer("s", 1), disks=literal, name=new_tier_name(), **self.settings)
        return self.store

    def open_further(self, name: str, **more) -> StoreNode:
        """One more store, as the first; the two are as one."""
        node = StoreNode(self, Peer(name, 1), disks=[], name=new_tier_name(), **{**self.settings, **more})
        self.further[name] = node
        return node

    @property
    def stores(self) -> list[StoreNode]:
        return [store for store in (self.store, *self.further.values()) if store is not None and not store.is_dead]

    def store_dies(self, name: str) -> None:
        """With its memory; the router has noticed."""
        gone = self.further.pop(name)
        gone.is_dead = True
        for node in (*self.stores, *self.nodes.values()):
            if isinstance(node, StoreNode):
                node.hear(ROUTER_PEER, PeerGone(gone.peer, "died"))
            else:
                node.take(node.exchange.peer_removed(gone.peer, self.now))
        gone.machine = gone.tier = gone.bytes = None
        gone.arena.clear()

    def instance(self, name: str, hbm: int = 32, **more) -> Node:
        if name in self.dead:
            self.nodes[name] = self.dead.pop(name)  # the next one is another generation
        node = self.add(name, hbm=hbm, **more)
        self.meet()
        return node

    def client(self, name: str, tenant: str = "default") -> Client:
        self.clients[name] = client = Client(self, Peer(name, len(self.clients) + 1), tenant)
        client.hello()
        self.run()
        return client

    def meet(self) -> None:
        """The router tells all of all."""
        super().meet()
        infos = [node.info() for node in self.nodes.values()]
        for store in self.stores:
            infos.append(store.info())
            for node in self.nodes.values():
                node.take(node.exchange.peer_joined(store.info(), self.now))
        for store in self.stores:
            store.join(infos)

    def joins(self, node: Node) -> None:
        for store in self.stores:
            store.hear(ROUTER_PEER, PeerJoined(node.info()))

    def dies(self, name: str) -> None:
        """An instance is gone, and the router has noticed."""
        node = self.dead[name] = self.nodes.pop(name)
        self.store.hear(ROUTER_PEER, PeerGone(node.peer, "died"))

    def by_peer(self, peer: Peer):
        for store in self.stores:
            if peer.name == store.peer.name:
                return store if peer.generation in (0, store.peer.generation) else None
        if peer.name in self.clients:
            return self.clients[peer.name] if self.clients[peer.name].peer == peer else None
        return super().by_peer(peer)

    def step(self, pulls: bool = True) -> bool:
        if self.links or not pulls:
            return super().step(pulls)
        for store in self.stores:
            if store.seals:
                store.seal(store.seals[0])
            elif store.pulls:
                store.answer(store.pulls[0])
            elif not store.step():
                continue
            return True
        return super().step(pulls)

    def wait(self, ns: int) -> None:
        super().wait(ns)
        for store in self.stores:
            store.advance()

    def restart(self, *, power: bool = False, orderly: bool = False) -> StoreNode:
        """The store is killed, and started again with what it has left. ``power``: its memory is lost, too."""
        old = self.store
        if orderly:
            old.tell(DrainRequested(10**12))
            self.run()
            assert old.ended is not None
            old.tier.unlink()
        old.is_dead = True
        for disk in old.literal:
            disk.lose_power() if power else disk.kill_writer()
        name = old.name
        old.machine = old.tier = old.bytes = None
        old.arena.clear()
        gc.collect()  # the lock of the memory ends with the last view of it
        if power:
            remove_tier_files(name)
            name = new_tier_name()
        self.links = {link: sent for link, sent in self.links.items() if "s" not in (link[0].name, link[1].name)}
        peer = Peer("s", old.peer.generation + 1)
        for node in self.nodes.values():
            node.take(node.exchange.peer_removed(old.peer, self.now))
        self.store = StoreNode(self, peer, disks=old.literal, name=name, **self.settings)
        self.meet()
        self.run()
        return self.store

    def close(self) -> None:
        remove_tier_files(self.store.name)


def push(world: StoreWorld, node: Node, tenant: str, tokens, private: bytes = b"") -> str:
    """An instance computes a prompt and offers its whole blocks."""
    seq = node.compute(tenant, tokens)
    whole = len(tokens) // BLOCK
    offer_id = node.offer(world.store.peer, seq, 0, whole, private=private)
    node.exchange.announce_computed(offer_id, 0, whole)
    node.take([])
    node.end(seq)
    return offer_id


def offer_loan(world: StoreWorld, node: Node, tenant: str, tokens, loan: Lease) -> str:
    """A peer of the store offers what comes behind the KV of ``tokens``, whole blocks: a state, or parts of windows."""
    end = len(tokens) // BLOCK
    offered = OfferedBlocks(tenant, array(tokens), (), first_block=end, state=loan)
    offer_id = node.exchange.offer_blocks(world.store.peer, offered, world.now)
    node.offers[offer_id] = True
    node.exchange.announce_state(offer_id, end, whole=True)
    node.take([])
    world.run()
    return offer_id


@contextmanager
def finished_world() -> Iterator[StoreWorld]:
    """A world that ends in order: leases lapse, nothing is left, and the router knows what the store holds."""
    world = StoreWorld()
    yield world
    world.run()
    for _ in range(2):
        world.wait(2 * LEASE_NS)
        world.run()
    if not world.store.is_dead:
        world.store.check_empty()
        log = world.store.machine.values.log
        assert world.store.known_to_router() == {identity: log.tier_of(identity) for identity in log.all_identities()}
    world.close()
