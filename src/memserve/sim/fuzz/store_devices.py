"""The disks of a store in a fuzzed world: jobs take their time, end in any order, fail, hang, and lie torn behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memserve.sim.fuzz.literal_disk import PAGE_BYTES, LiteralDisk, Write
from memserve.sim.fuzz.members import FuzzedMember
from memserve.sim.fuzz.store_memory import StoreMemory, seal_of
from memserve.sim.fuzz.store_scenario import StoreSetup
from memserve.sim.fuzz.truth import require
from memserve.store import disk_events as ev
from memserve.store.events import ExtentsSealed, SealExtents

IO_MAX_NS = 4_000_000_000


class DiskOwner(FuzzedMember):
    """A store, with the knobs for faults of its disks."""

    setup: StoreSetup
    disk_slowness: int
    disk_errors: float
    """Of all jobs, those that fail."""
    full_disks: int
    hanging_disks: int


class LiteralDisks:
    """Performs jobs for one life of a store."""

    def __init__(self, node: DiskOwner, memory: StoreMemory, disks: Sequence[LiteralDisk]) -> None:
        self._node, self._memory, self._disks = node, memory, disks
        self._kept: dict[int, bytes] = {}
        self._hanging: list[tuple[ev.DiskAction, list[Write], bytes]] = []

    # -- checksums of extents

    def seal(self, job: SealExtents) -> None:
        """The extents are read when the time is over."""
        node = self._node
        node.later(node.span_ns(node.host.scenario.pull_ns) // 4, self._seal, job)

    def _seal(self, job: SealExtents) -> None:
        seals = tuple(seal_of(self._memory.read(extent, length)) for extent, length in job.extents)
        self._node.post(ExtentsSealed(job.job, seals))

    # -- jobs of disks

    def perform(self, action: ev.DiskAction) -> None:
        """Begin with a job; it ends at a time of its own."""
        node, disk = self._node, self._disks[action.disk]
        writes: list[Write] = []
        there = b""
        match action:
            case ev.ForgetDisk():
                disk.forget(2 * PAGE_BYTES)
                return
            case ev.DropRecord():
                self._kept.pop(action.source, None)
                return
            case ev.WritePages():
                writes = [disk.begin(action.offset, action.data)]
            case ev.WriteExtent():
                there = self._memory.read(action.extent, action.length)
                writes = _begin_record(disk, action.offset, action.head, there, action.inside)
            case ev.WriteRecord():
                payload = self._kept.pop(action.source)
                writes = _begin_record(disk, action.offset, action.head, payload, 0)
            case _:
                pass
        spent_ns = min(node.span_ns(node.setup.io_ns, node.disk_slowness), IO_MAX_NS)
        node.later(spent_ns, self._end, action, writes, there)

    def go_on(self) -> None:
        """What hung ends now."""
        hanging, self._hanging = self._hanging, []
        life = self._node.life
        for job in hanging:
            if self._node.life == life:
                self._end(*job)

    def _end(self, action: ev.DiskAction, writes: list[Write], there: bytes) -> None:
        node, disk = self._node, self._disks[action.disk]
        if node.hanging_disks:
            self._hanging.append((action, writes, there))
            return
        why = self._failure(bool(writes))
        for write in writes:
            disk.end(write, not why)
        if isinstance(action, ev.WriteExtent):
            now_there = self._memory.read(action.extent, action.length)
            require(self._memory.is_held(action.extent), f"extent {action.extent} is free, and a disk reads it")
            require(now_there == there, f"extent {action.extent} was changed while a disk read it")
        require(not isinstance(action, ev.DropRecord | ev.ForgetDisk), "this job has no answer")
        done = ev.DiskDone(getattr(action, "job", 0), not why, why=why)
        if not why:
            done = self._done(action, done, disk)
        node.post(done)

    def _failure(self, is_write: bool) -> str:
        node = self._node
        if is_write and node.full_disks:
            return "ENOSPC"
        return "EIO" if node.disk_errors and node.random.random() < node.disk_errors else ""

    def _done(self, action: ev.DiskAction, done: ev.DiskDone, disk: LiteralDisk) -> ev.DiskDone:
        match action:
            case ev.SyncDisk():
                disk.sync()
            case ev.ReadExtent():
                head, payload = read_record(disk, action.offset, action.length, action.inside)
                self._memory.write(action.extent, payload)
                return replace(done, seal=seal_of(payload), head=head)
            case ev.ReadRecord():
                head, payload = read_record(disk, action.offset, action.length, action.inside)
                if action.keep:
                    self._kept[action.job] = payload
                return replace(done, seal=seal_of(payload), head=head)
            case _:
                pass
        return done


def _begin_record(disk: LiteralDisk, offset: int, head: bytes, payload: bytes, inside: int) -> list[Write]:
    if inside:
        return [disk.begin(offset, head[:inside] + payload + head[inside + len(payload) :])]
    padded = payload + bytes(-len(payload) % PAGE_BYTES)
    return [disk.begin(offset, head), disk.begin(offset + PAGE_BYTES, padded)]


def read_record(disk: LiteralDisk, offset: int, length: int, inside: int) -> tuple[bytes, bytes]:
    """A record's first page, and its payload."""
    head = disk.read(offset, PAGE_BYTES)
    if inside:
        return head, head[inside : inside + length]
    pages = -(-length // PAGE_BYTES)
    return head, disk.read(offset + PAGE_BYTES, pages * PAGE_BYTES)[:length]
