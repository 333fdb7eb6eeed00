"""A store of the fuzzed world: what outlives its process, and the knobs by which it can be hurt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Protocol, cast

from memserve import _core
from memserve.config import ExchangeConfig, MemberConfig
from memserve.instance.member import MemberMachine
from memserve.kv_transfer.sender import Export
from memserve.mempool.identity import DEFAULT_KEY
from memserve.messages import PeerInfo
from memserve.sim.fuzz.data_port import FaultyPort
from memserve.sim.fuzz.literal_disk import PAGE_BYTES, LiteralDisk
from memserve.sim.fuzz.members import FuzzedMemberHost
from memserve.sim.fuzz.network import FaultyNetwork
from memserve.sim.fuzz.scenario import LEASE_NS, MS, NAMESPACE
from memserve.sim.fuzz.store_devices import DiskOwner, LiteralDisks
from memserve.sim.fuzz.store_memory import Entry, KeptTier, StoreMemory
from memserve.sim.fuzz.store_scenario import StoreSetup
from memserve.sim.nodes import InstanceNode
from memserve.sim.store_node import StoreNode
from memserve.store.disk_config import SYNC_CODES
from memserve.store.disks import Disks
from memserve.store.machine import StoreMachine
from memserve.types import Role

if TYPE_CHECKING:
    from memserve._core import MemoryTier

NAME = "store"
SEGMENT_BYTES = 16 * PAGE_BYTES
_ACHIEVED = (
    "kv_stored", "kv_known", "kv_lent", "fetches_cut", "loads", "loads_failed", "loads_joined", "compared", "damaged",
    "reads_ok", "reads_late", "reads_damaged", "writes_ok", "moves", "records_evicted", "records_recovered",
    "records_torn", "disks_lost", "disks_filled",
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
    devices: LiteralDisks

    def __init__(self, world: FuzzedStoreHost, setup: StoreSetup, generation: int) -> None:
        self.setup = setup
        self.random = Random(f"{world.scenario.seed}/{world.scenario.setting}/{NAME}")
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
        disk_bytes = [self._log(segments, b"").disk_bytes for segments in setup.segments]
        self.disks = [LiteralDisk(nbytes, self.random) for nbytes in disk_bytes]
        super().__init__(world, NAME, generation)

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
        """Its offers, by transfer."""
        return self.machine.kv.exchange._sender.open

    def achievements(self) -> Counter[str]:
        """How often the things happened that a store is for, in all lives."""
        counters = self.machine.counters.numbers() | self.machine.values.disks.counters()
        return self._done + Counter({f"store: {name}": counters[name] for name in _ACHIEVED})

    def turn_ends(self, instances: Sequence[InstanceNode]) -> None:
        """Between two turns of a conversation, the caches of some instances make room for something else, and at times
        the memory of the store: then it has its disks."""
        for node in instances:
            if self.setup.is_wanted and node.alive and self.random.random() < 0.9:
                node.machine.pool.clear_cache()
        if self.setup.dies_at_turns:  # then its memory is left as it is: it shall have something that can be adopted
            if self.alive and self.random.random() < self.setup.dies_at_turns:
                self.host.clock.after(0, self._die_and_return)
        elif self.setup.is_wanted and self.alive and self.random.random() < 0.5:
            tier, values = self.machine.values.tier, self.machine.values
            blocks = tier.allocate_blocks(tier.blocks_free + tier.blocks_evictable)
            values.settle()
            if blocks is not None:
                tier.release_blocks(blocks)

    # -- life

    def boot(self) -> None:
        self.skew_ns = self.random.choice([0, self.random.randrange(1 << 60)])
        self.forget_promises()
        super().boot()

    def new_port(self) -> FaultyPort:
        return FaultyPort(self)

    def new_devices(self) -> LiteralDisks:
        return LiteralDisks(self, self._memory, self.disks)

    def new_machine(self) -> StoreMachine:
        self.tier = KeptTier(self.setup.blocks, self._memory.block_bytes, self._kept)
        self._memory.is_held = self._is_held
        scenario, setup = self.host.scenario, self.setup
        info = PeerInfo(
            self.peer,
            Role.STORE,
            f"virtual://{NAME}",
            NAMESPACE,
            self.host.geometry,
            hbm_blocks=0,
            dram_blocks=setup.blocks,
            context_tokens=0,
            caching=True,
            costs=setup.costs.encode() if setup.costs is not None else b"",
        )
        capacity = max(4, scenario.event_capacity)
        exchange = ExchangeConfig(LEASE_NS, 100 * MS, scenario.pulls_in_flight, capacity)
        self.logs = [self._found(segments, disk) for segments, disk in zip(setup.segments, self.disks, strict=True)]
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

    def _log(self, segments: int, secret: bytes) -> _core.SegmentLog:
        disks = self.setup.disks
        self._secrets += 1
        secret = secret or self._secrets.to_bytes(16, "little")
        return _core.SegmentLog(segments, SEGMENT_BYTES, secret, disks.move_share, SYNC_CODES[disks.sync])

    def _found(self, segments: int, disk: LiteralDisk) -> _core.SegmentLog:
        known = _core.SegmentLog.read_superblock(disk.read)
        log = self._log(segments, known[2] if known is not None else b"")  # else what lies there is of no log's
        if known is None:
            log.format()
        else:
            log.recover(disk.read)
        return log

    def die(self, *, keeps_memory: bool, power: bool = False) -> None:
        """SIGKILL; or its host loses power, and with it what was not synced."""
        for disk in self.disks:
            disk.lose_power() if power else disk.kill()
        self.has_damage |= power
        self._end_memory(keeps=keeps_memory and not power)
        self.kill()

    def _end_memory(self, *, keeps: bool) -> None:
        self._done = self.achievements()
        self._kept = self.tier.entries() if keeps else ()
        if not keeps:
            self._memory = StoreMemory(self.setup.blocks, self.host.geometry)
            self.forget_promises()  # what was said of pages that are no more

    def _die_and_return(self) -> None:
        """Before anything has noticed: the next process adopts its memory, at times with damage."""
        if self.alive:
            self.die(keeps_memory=True)
            if self.random.random() < 0.2:
                self.damage_memory(self.random)
            self.boot()

    def damage_memory(self, random: Random) -> None:
        """Some of what the next process will adopt has another byte. The dead one has not written it."""
        self.forget_promises()
        for entry in self._kept:
            if random.random() < 0.3:
                self._memory.arena[entry.offset + random.randrange(entry.length)] ^= 1 << random.randrange(8)

    def ended(self, refused: str) -> None:
        """Its keeper starts it again, soon. What was in memory is given up."""
        self._end_memory(keeps=False)
        self.host.clock.after(2 * self.host.member_config.beat_ns, self.boot_unless_alive)

    def submit_disks(self) -> None:
        """What hung on the disks ends now, or when the process goes on."""
        self._soon(self.devices.go_on)

    def boot_unless_alive(self) -> None:
        """Start again."""
        if not self.alive:
            self.boot()
