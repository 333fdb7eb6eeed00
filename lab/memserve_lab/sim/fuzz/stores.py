"""A store of the fuzzed world: what outlives its process, and the knobs by which it can be hurt.

The disks of a store in a fuzzed world: jobs take their time, end in any order, fail, hang, and lie torn behind.

A store's memory in a fuzzed world: literal pages as bytes, and what the next process finds of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from memserve import _core
from memserve.base.config import ExchangeConfig, MemberConfig
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.identity import DEFAULT_KEY
from memserve.kv.transfer.sender import Export
from memserve.protocol.member import MemberMachine
from memserve.protocol.peers import PeerInfo
from memserve.protocol.store import store_at
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import SYNC_CODES
from memserve.store.machine.events import ExtentsSealed, SealExtents
from memserve.store.machine.machine import StoreMachine
from memserve_lab.sim.fuzz.instances import FIRST_GENERATION, FaultyPort, FuzzedMember, FuzzedMemberHost
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.fuzz.scenario import LEASE_NS, MS, NAMESPACE
from memserve_lab.sim.fuzz.scenario_features import StoreSetup
from memserve_lab.sim.nodes import InstanceNode
from memserve_lab.sim.reference.device import PageMemory
from memserve_lab.sim.reference.disk import PAGE_BYTES, SymbolicDisk, Write
from memserve_lab.sim.reference.oracle import require
from memserve_lab.sim.timed_disk import TABLE_SECRET, StoreNode

if TYPE_CHECKING:
    from memserve._core import MemoryTier


_CELL_BYTES = 8
_NEVER = (1 << 64) - 1


def seal_of(payload: bytes | bytearray | memoryview) -> int:
    """As hosts compute it; 0 of no bytes."""
    if not payload:
        return 0
    data = np.frombuffer(payload, np.uint8)
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(data))[0])


class StoreMemory(PageMemory):
    """Blocks of ``geometry``, each cell 8 bytes. It outlives the process that wrote it."""

    def __init__(self, blocks: int, geometry: KVGeometry) -> None:
        self.block_bytes = geometry.block_bytes
        self._page_bytes = geometry.page_bytes
        require(self._page_bytes == _CELL_BYTES * geometry.block_tokens, "a cell of this geometry has another size")
        self.arena = bytearray(blocks * self.block_bytes)
        self.is_held: Callable[[int], bool] = lambda extent: True
        """Whether something refers to the extent that begins there: else nothing may be written to it."""

    def page_cells(self, tier: Tier, block: int, layer: int) -> Sequence[int | None]:
        require(tier is Tier.DRAM, "a store has DRAM alone")
        offset = block * self.block_bytes + layer * self._page_bytes
        page = self.arena[offset : offset + self._page_bytes]
        cells = [
            int.from_bytes(page[offset : offset + _CELL_BYTES], "little") for offset in range(0, len(page), _CELL_BYTES)
        ]
        return [None if cell == _NEVER else cell for cell in cells]

    def set_page(self, tier: Tier, block: int, layer: int, cells: Sequence[int | None]) -> None:
        require(tier is Tier.DRAM, "a store has DRAM alone")
        offset = block * self.block_bytes + layer * self._page_bytes
        page = b"".join((_NEVER if cell is None else cell).to_bytes(_CELL_BYTES, "little") for cell in cells)
        require(self.is_held(block * self.block_bytes), f"block {block} is written, and nothing refers to it")
        self.arena[offset : offset + self._page_bytes] = page

    def read_extent(self, extent: int, length: int) -> bytes:
        """Bytes of an extent."""
        return bytes(self.arena[extent : extent + length])

    def write_extent(self, extent: int, payload: bytes) -> None:
        """Write to an extent, which something must refer to."""
        require(self.is_held(extent), f"extent {extent} is written, and nothing refers to it")
        self.arena[extent : extent + len(payload)] = payload


@dataclass(frozen=True, slots=True)
class Entry:
    """What the shared table says of a value."""

    key: bytes
    offset: int
    length: int
    scope: int
    seal: int
    verified: bool
    name: bytes


class KeptTier:
    """A private ``_core.MemoryTier`` that may begin with what an earlier process has published, not verified."""

    def __init__(self, blocks: int, block_bytes: int, entries: Sequence[Entry] = ()) -> None:
        self._tier = _core.MemoryTier(blocks * block_bytes, block_bytes, secret=TABLE_SECRET)
        self._unverified = {entry.key for entry in entries}
        if not entries:
            return
        everything = self._tier.allocate_blocks(blocks)
        require(everything is not None, "a new memory tier is not empty")
        for entry in entries:
            fresh = self._tier.publish(entry.key, entry.offset, entry.length, scope=entry.scope, seal=entry.seal)
            require(fresh, "a key stood twice in the table")
        if everything is not None:
            self._tier.release_blocks(everything)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def __contains__(self, key: bytes) -> bool:
        return key in self._tier

    def __len__(self) -> int:
        return len(self._tier)

    def find(self, key: bytes, *, counts: bool = True) -> Entry | None:
        """As the tier's own."""
        place = self._tier.find(key, counts=counts)
        if place is None:
            return None
        is_verified = place.verified and key not in self._unverified
        return Entry(key, place.offset, place.length, place.scope, place.seal, is_verified, place.name)

    def verified(self, key: bytes) -> None:
        """As the tier's own."""
        self._unverified.discard(key)
        self._tier.verified(key)

    def publish(
        self, key: bytes, offset: int, length: int, *, scope: int = 0, seal: int = 0, name: bytes = b""
    ) -> bool:
        """As the tier's own."""
        fresh = self._tier.publish(key, offset, length, scope=scope, seal=seal, name=name)
        if fresh:
            self._unverified.discard(key)
        return fresh

    def entries(self) -> list[Entry]:
        """What the shared table says, for the next process, by key."""
        entries, keys = [], self._tier.keys()
        for offset in range(0, len(keys), 16):
            entry = self.find(keys[offset : offset + 16], counts=False)
            if entry is not None:
                self._tier.release(entry.offset)
                entries.append(entry)
        return sorted(entries, key=lambda entry: entry.key)


IO_MAX_NS = 4_000_000_000


class DiskOwner(FuzzedMember):
    """A store, with the knobs for faults of its disks."""

    setup: StoreSetup
    disk_slowness: int
    disk_errors: float
    """Of all jobs, those that fail."""
    full_disks: int
    hanging_disks: int


class SymbolicDisks:
    """Performs jobs for one life of a store."""

    def __init__(self, node: DiskOwner, memory: StoreMemory, disks: Sequence[SymbolicDisk]) -> None:
        self._node, self._memory, self._disks = node, memory, disks
        self._kept: dict[int, bytes] = {}
        self._hanging: list[tuple[ev.DiskAction, list[Write], bytes]] = []

    # -- checksums of extents

    def seal_extents(self, job: SealExtents) -> None:
        """The extents are read when the time is over."""
        node = self._node
        node.call_later(node.span_ns(node.host.scenario.pull_ns) // 4, self._seal_now, job)

    def _seal_now(self, job: SealExtents) -> None:
        seals = tuple(seal_of(self._memory.read_extent(extent, length)) for extent, length in job.extents)
        self._node.post_event(ExtentsSealed(job.job, seals))

    # -- jobs of disks

    def perform_action(self, action: ev.DiskAction) -> None:
        """Begin with a job; it ends at a time of its own."""
        node, disk = self._node, self._disks[action.disk]
        writes: list[Write] = []
        data = b""
        match action:
            case ev.ForgetDisk():
                disk.erase_start(2 * PAGE_BYTES)
                return
            case ev.DropRecord():
                self._kept.pop(action.source, None)
                return
            case ev.WritePages():
                writes = [disk.begin_write(action.offset, action.data)]
            case ev.WriteExtent():
                data = self._memory.read_extent(action.extent, action.length)
                writes = _begin_record(disk, action.offset, action.head, data, action.inside)
            case ev.WriteRecord():
                payload = self._kept.pop(action.source)
                writes = _begin_record(disk, action.offset, action.head, payload, 0)
            case _:
                pass
        spent_ns = min(node.span_ns(node.setup.io_ns, node.disk_slowness), IO_MAX_NS)
        node.call_later(spent_ns, self._end_job, action, writes, data)

    def go_on(self) -> None:
        """What hung ends now."""
        hanging, self._hanging = self._hanging, []
        life = self._node.life
        for job in hanging:
            if self._node.life == life:
                self._end_job(*job)

    def _end_job(self, action: ev.DiskAction, writes: list[Write], data: bytes) -> None:
        node, disk = self._node, self._disks[action.disk]
        if node.hanging_disks:
            self._hanging.append((action, writes, data))
            return
        why = self._draw_failure(bool(writes))
        for write in writes:
            disk.end_write(write, not why)
        if isinstance(action, ev.WriteExtent):
            now_there = self._memory.read_extent(action.extent, action.length)
            require(self._memory.is_held(action.extent), f"extent {action.extent} is free, and a disk reads it")
            require(now_there == data, f"extent {action.extent} was changed while a disk read it")
        require(not isinstance(action, ev.DropRecord | ev.ForgetDisk), "this job has no answer")
        job_done = ev.DiskDone(getattr(action, "job", 0), not why, why=why)
        if not why:
            job_done = self._finish_job(action, job_done, disk)
        node.post_event(job_done)

    def _draw_failure(self, is_write: bool) -> str:
        node = self._node
        if is_write and node.full_disks:
            return "ENOSPC"
        return "EIO" if node.disk_errors and node.random.random() < node.disk_errors else ""

    def _finish_job(self, action: ev.DiskAction, job_done: ev.DiskDone, disk: SymbolicDisk) -> ev.DiskDone:
        match action:
            case ev.SyncDisk():
                disk.sync_writes()
            case ev.ReadExtent():
                head, payload = read_record(disk, action.offset, action.length, action.inside)
                self._memory.write_extent(action.extent, payload)
                return replace(job_done, seal=seal_of(payload), head=head)
            case ev.ReadRecord():
                head, payload = read_record(disk, action.offset, action.length, action.inside)
                if action.keep:
                    self._kept[action.job] = payload
                return replace(job_done, seal=seal_of(payload), head=head)
            case _:
                pass
        return job_done


def _begin_record(disk: SymbolicDisk, offset: int, head: bytes, payload: bytes, inside: int) -> list[Write]:
    if inside:
        return [disk.begin_write(offset, head[:inside] + payload + head[inside + len(payload) :])]
    padded = payload + bytes(-len(payload) % PAGE_BYTES)
    return [disk.begin_write(offset, head), disk.begin_write(offset + PAGE_BYTES, padded)]


def read_record(disk: SymbolicDisk, offset: int, length: int, inside: int) -> tuple[bytes, bytes]:
    """A record's first page, and its payload."""
    head = disk.read_bytes(offset, PAGE_BYTES)
    if inside:
        return head, head[inside : inside + length]
    pages = -(-length // PAGE_BYTES)
    return head, disk.read_bytes(offset + PAGE_BYTES, pages * PAGE_BYTES)[:length]


SEGMENT_BYTES = 16 * PAGE_BYTES
_ACHIEVED = (
    "kv_stored", "kv_known", "kv_lent", "fetches_cut", "loads", "loads_failed", "loads_joined", "compared", "damaged",
    "reads_ok", "reads_late", "reads_damaged", "writes_ok", "moves", "records_evicted", "records_recovered",
    "records_torn", "disks_lost", "disks_filled", "kv_moved", "kv_given_up", "kv_copied",
)  # fmt: skip


class FuzzedStoreHost(FuzzedMemberHost, Protocol):
    """A world with a store."""

    @property
    def member_config(self) -> MemberConfig:
        """How often a member says that it lives, and how long it waits for its router."""

    @property
    def router_addresses(self) -> Sequence[str]:
        """Where members look for a router, in turn."""

    @property
    def network(self) -> FaultyNetwork:
        """The wires between the nodes."""


class FuzzedStore(StoreNode, DiskOwner):
    """A node with knobs for faults. Its memory and its disks outlive its process, or do not."""

    host: FuzzedStoreHost
    devices: SymbolicDisks

    def __init__(self, world: FuzzedStoreHost, setup: StoreSetup, number: int) -> None:
        """``number``: of this store among several."""
        self.setup, name = setup, store_at(number).name
        self.random = Random(f"{world.scenario.seed}/{world.scenario.setting}/{name}")
        self.corrupting = 0
        self.pull_slowness = 1
        self.disk_slowness = 1
        self.disk_errors = 0.0
        self.full_disks = 0
        self.hanging_disks = 0
        self.has_damage = False
        """What lies on a disk may be something else than what was written there."""
        self._kept: Sequence[Entry] = ()
        self._done = Counter[str]()  # in earlier lives
        self._memory = StoreMemory(setup.blocks, world.geometry)
        self._secrets = 0  # drawn so far
        disk_bytes = [self._new_log(segments, b"").disk_bytes for segments in setup.segments]
        self.disks = [SymbolicDisk(nbytes, self.random) for nbytes in disk_bytes]
        super().__init__(world, name, FIRST_GENERATION)

    @property
    def is_well(self) -> bool:
        """No fault is on."""
        faults = self.corrupting or self.disk_errors or self.full_disks or self.hanging_disks
        return not faults and self.pull_slowness == self.disk_slowness == 1

    @property
    def memory(self) -> StoreMemory:
        """Its pages."""
        return self._memory

    def open_offers(self) -> dict[str, Export]:
        return self.machine.kv.exchange._sender.open

    def count_achievements(self) -> Counter[str]:
        """How often the things happened that a store is for, in all lives."""
        counters = self.machine.counters.as_dict() | self.machine.values.disks.counters()
        return self._done + Counter({f"store: {name}": counters[name] for name in _ACHIEVED})

    def turn_ends(self, instances: Sequence[InstanceNode]) -> None:
        """Between two turns of a conversation, the caches of some instances make room for something else, and at times
        the memory of the store: then it has its disks."""
        for node in instances:
            if self.setup.is_wanted and node.alive and self.random.random() < 0.9:
                node.machine.pool.clear_cache()
        if self.setup.dies_at_turns:  # then its memory is left as it is: it shall have something that can be adopted
            if self.alive and self.random.random() < self.setup.dies_at_turns:
                self.host.clock.call_after(0, self._die_and_return)
        elif self.setup.is_wanted and self.alive and self.random.random() < 0.5:
            tier, values = self.machine.values.tier, self.machine.values
            blocks = tier.allocate_blocks(tier.blocks_free + tier.blocks_evictable)
            values.settle_evicted()
            if blocks is not None:
                tier.release_blocks(blocks)

    # -- life

    def boot_process(self) -> None:
        self.skew_ns = self.random.choice([0, self.random.randrange(1 << 60)])
        self.forget_promises()
        super().boot_process()

    def new_port(self) -> FaultyPort:
        return FaultyPort(self)

    def new_devices(self) -> SymbolicDisks:
        return SymbolicDisks(self, self._memory, self.disks)

    def new_machine(self) -> StoreMachine:
        self.tier = KeptTier(self.setup.blocks, self._memory.block_bytes, self._kept)
        self._memory.is_held = self._is_held
        scenario, setup = self.host.scenario, self.setup
        info = PeerInfo(
            self.peer,
            Role.STORE,
            f"virtual://{self.peer.name}",
            NAMESPACE,
            self.host.geometry,
            hbm_blocks=0,
            dram_blocks=setup.blocks,
            context_tokens=0,
            caching=True,
            costs=setup.costs.to_json() if setup.costs is not None else b"",
        )
        capacity = max(4, scenario.event_capacity)
        exchange = ExchangeConfig(LEASE_NS, 100 * MS, scenario.pulls_in_flight, capacity, room_wait_ns=0)
        self.logs = [
            self._recovered_log(segments, disk) for segments, disk in zip(setup.segments, self.disks, strict=True)
        ]
        return StoreMachine(
            cast("MemoryTier", self.tier),
            Disks(self.logs, setup.disks),
            info,
            DEFAULT_KEY,
            MemberMachine(info, () if setup.is_called else self.host.router_addresses, self.host.member_config),
            replace(setup.config, exchange=exchange),
        )

    def _is_held(self, extent: int) -> bool:
        return self.machine.values.tier.ref_count(extent) > 0

    def _new_log(self, segments: int, secret: bytes) -> _core.SegmentLog:
        disks = self.setup.disks
        self._secrets += 1
        secret = secret or self._secrets.to_bytes(16, "little")
        return _core.SegmentLog(segments, SEGMENT_BYTES, secret, disks.move_share, SYNC_CODES[disks.sync])

    def _recovered_log(self, segments: int, disk: SymbolicDisk) -> _core.SegmentLog:
        superblock = _core.SegmentLog.read_superblock(disk.read_bytes)
        log = self._new_log(
            segments, superblock[2] if superblock is not None else b""
        )  # else what lies there is of no log's
        if superblock is None:
            log.format()
        else:
            log.recover(disk.read_bytes)
        return log

    def die_with_memory(self, *, keeps_memory: bool, power: bool = False) -> None:
        """SIGKILL; or its host loses power, and with it what was not synced."""
        for disk in self.disks:
            disk.lose_power() if power else disk.kill_writer()
        self.has_damage |= power
        self._end_memory(keeps=keeps_memory and not power)
        self.kill_process()

    def _end_memory(self, *, keeps: bool) -> None:
        self._done = self.count_achievements()
        self._kept = self.tier.entries() if keeps else ()
        if not keeps:
            self._memory = StoreMemory(self.setup.blocks, self.host.geometry)
            self.forget_promises()  # what was said of pages that are no more

    def _die_and_return(self) -> None:
        """Before anything has noticed: the next process adopts its memory, at times with damage."""
        if self.alive:
            self.die_with_memory(keeps_memory=True)
            if self.random.random() < 0.2:
                self.damage_memory(self.random)
            self.boot_process()

    def damage_memory(self, random: Random) -> None:
        """Some of what the next process will adopt has another byte. The dead one has not written it."""
        self.forget_promises()
        for entry in self._kept:
            if random.random() < 0.3:
                self._memory.arena[entry.offset + random.randrange(entry.length)] ^= 1 << random.randrange(8)

    def on_ended(self, refused: str) -> None:
        """Its keeper starts it again, soon. What was in memory is given up."""
        self._end_memory(keeps=False)
        self.host.clock.call_after(2 * self.host.member_config.beat_ns, self.boot_unless_alive)

    def submit_disks(self) -> None:
        """What hung on the disks ends now, or when the process goes on."""
        self._call_soon(self.devices.go_on)

    def boot_unless_alive(self) -> None:
        if not self.alive:
            self.boot_process()
