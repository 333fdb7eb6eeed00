"""Stores of a replayed cluster: the production machine, a memory that keeps no bytes, and timed disks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from memserve import _core
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.kv.costs import CostModel
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.member import MemberMachine
from memserve.protocol.peers import PeerInfo
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import SYNC_CODES, DisksConfig, segments_of
from memserve.store.host.files import curve_of_disks
from memserve.store.machine.machine import StoreMachine
from memserve_lab.sim.nodes import DataPort, Host, MemberNode
from memserve_lab.sim.replay.clients import Served
from memserve_lab.sim.replay.setup import StoreSetup
from memserve_lab.sim.timed_disk import TABLE_SECRET, StoreNode, TimedDisk, TimedDisks

_SECRET = bytes(16)
MINUTES_PER_DAY = 24 * 60


def store_info(like: PeerInfo, setup: StoreSetup, costs: CostModel) -> PeerInfo:
    """What members are told of a store on the host of the instance ``like``: of its disks what it would have found."""
    disks = [(nbytes, setup.model.curve) for nbytes in setup.disk_bytes]
    known_costs = dataclasses.replace(costs, disk=curve_of_disks(disks)) if disks else costs
    return replace(
        like, role=Role.STORE, hbm_blocks=0, dram_blocks=setup.block_count(like.geometry.block_bytes), context_tokens=0,
        caching=True, costs=known_costs.to_json(),
    )  # fmt: skip


class StoreWorld(Host, Protocol):
    """A world with stores."""

    def store_port(self, node: MemberNode) -> DataPort:
        """A store's data port to the pages of others."""


class ReplayStore(StoreNode):
    """A store of a replayed cluster."""

    host: StoreWorld

    def __init__(self, world: StoreWorld, name: str, setup: StoreSetup, info: PeerInfo) -> None:
        """``info``: what members are told, but the peer and its address."""
        self._setup, self._info = setup, info
        self.disks = [TimedDisk(world.clock, setup.model) for _ in setup.disk_bytes]
        super().__init__(world, name)

    def new_machine(self) -> StoreMachine:
        setup, block_bytes = self._setup, self._info.geometry.block_bytes
        info = replace(self._info, peer=self.peer, address=f"virtual://{self.peer.name}")
        return StoreMachine(
            _core.MemoryTier(setup.block_count(block_bytes) * block_bytes, block_bytes, secret=TABLE_SECRET),
            Disks([_formatted(nbytes, setup.disks) for nbytes in setup.disk_bytes], setup.disks),
            info,
            DEFAULT_KEY,
            member=MemberMachine(info, self.host.router_addresses, self.host.member_config),
        )

    def new_devices(self) -> TimedDisks:
        return TimedDisks(self, self.disks)

    def new_port(self) -> DataPort:
        return self.host.store_port(self)


def _formatted(nbytes: int, config: DisksConfig) -> _core.SegmentLog:
    segments, segment_bytes = segments_of(nbytes)
    log = _core.SegmentLog(segments, segment_bytes, _SECRET, config.move_share, SYNC_CODES[config.sync])
    log.format()
    return log


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens whose KV was not computed, by where it lay when the request came."""

    hbm: int = 0
    dram: int = 0
    """The instance's own second tier."""
    instances: int = 0
    """Memory of other instances."""
    store: int = 0
    """Memory of a store."""
    ssd: int = 0
    """Disks of a store. A fetch that read any of its blocks from a disk counts as a whole, as in production's
    metrics."""


def hit_tokens(served: Sequence[Served]) -> HitTokens:
    """Of all requests."""
    tokens_by_source = dict.fromkeys(HitTokens.__dataclass_fields__, 0)
    for answer in served:
        fetched = min(answer.fetched_tokens, answer.cached_tokens)
        dram = min(answer.dram_tokens, answer.cached_tokens - fetched)
        tokens_by_source["hbm"] += answer.cached_tokens - fetched - dram
        tokens_by_source["dram"] += dram
        tokens_by_source[answer.fetched_tier if answer.fetched_tier in ("store", "ssd") else "instances"] += fetched
    return HitTokens(**tokens_by_source)


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What all stores did in a whole run. Bytes are of disks, unless they say otherwise."""

    stores: int
    memory_bytes: int
    capacity_bytes: int
    blocks_stored: int
    """Blocks of KV taken from instances."""
    blocks_lent: int
    """Blocks of KV given to instances."""
    fetches_cut: int
    """Fetches that got less than was there: a disk was late or refused, or memory had no room."""
    written_bytes: int
    """All that the disks were told to write."""
    payload_bytes: int
    """Of them: KV of blocks that were new on the disks."""
    moved_blocks: int
    """Blocks that were written again because they were hit when their space was needed."""
    read_bytes: int
    reads: int
    reads_late: int
    """Reads that missed their deadline: the tokens were computed."""
    reads_refused: int
    """Reads that were not begun: the disk had too many, or was late."""
    refused_seldom: int
    """Writes not admitted: the block was not asked for before."""
    refused_budget: int
    """Writes not made: the budget of the day was used up."""
    writes_per_day_bytes: int
    """The budget of each store. 0: no limit."""
    busiest_day_bytes: int
    """Most bytes that the disks of one store took within 24 hours."""
    busy_share: float
    """Share of the time in which the disks had work."""

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte of new KV; 0: none was written."""
        return self.written_bytes / self.payload_bytes if self.payload_bytes else 0.0


def store_usage(stores: Sequence[ReplayStore], setup: StoreSetup, elapsed_s: float) -> StoreUsage:
    """Of stores that have run for ``elapsed_s`` seconds."""
    counters = [node.machine.counters for node in stores]
    on_disk = [node.machine.values.disks.counters() for node in stores]
    disks = [disk for node in stores for disk in node.disks]
    sums = {name: sum(counts[name] for counts in on_disk) for name in on_disk[0]}
    busy_s = sum(disk.busy_ns for disk in disks) / NS_PER_S
    return StoreUsage(
        stores=len(stores),
        memory_bytes=setup.memory_bytes * len(stores),
        capacity_bytes=sum(setup.disk_bytes) * len(stores),
        blocks_stored=sum(store_counters.kv_stored for store_counters in counters),
        blocks_lent=sum(store_counters.kv_lent for store_counters in counters),
        fetches_cut=sum(store_counters.fetches_cut for store_counters in counters),
        written_bytes=sums["disk_bytes_written"],
        payload_bytes=sums["payload_bytes_written"],
        moved_blocks=sums["moves"],
        read_bytes=sums["read_bytes"],
        reads=sums["reads"],
        reads_late=sums["reads_late"],
        reads_refused=sums["reads_refused"],
        refused_seldom=sums["refused_seldom"],
        refused_budget=sums["refused_budget"],
        writes_per_day_bytes=setup.disks.writes_per_day_bytes,
        busiest_day_bytes=max(_busiest_day_bytes(node.disks) for node in stores),
        busy_share=busy_s / (len(disks) * elapsed_s) if disks and elapsed_s else 0.0,
    )


def _busiest_day_bytes(disks: Sequence[TimedDisk]) -> int:
    """Most bytes that ``disks`` took together within 24 hours, which begin with a minute."""
    by_minute: Counter[int] = Counter()
    for disk in disks:
        by_minute.update(disk.written_by_minute)
    minutes, most, first, within = sorted(by_minute), 0, 0, 0
    for minute in minutes:
        within += by_minute[minute]
        while minute - minutes[first] >= MINUTES_PER_DAY:
            within -= by_minute[minutes[first]]
            first += 1
        most = max(most, within)
    return most
