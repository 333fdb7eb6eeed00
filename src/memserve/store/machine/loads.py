"""Bringing values to where they can be read: from disks into memory, and what an earlier life left there, compared.

Each value is brought once, however many ask for it meanwhile::

    want -> in memory, compared          -> answered at once
            in memory, of an earlier life -> SealExtents --right--> answered
                                                         --wrong--> dropped; from the disk, if one has it
            on a disk -> room -> Disks.read_value -> head, key, length, checksum agree -> published, answered
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.store.disks.disks import DiskRecord
from memserve.store.disks.events import ExtentFree, ReadEnded
from memserve.store.machine.block_pool import KV_SCOPE
from memserve.store.machine.events import ExtentsSealed, Jobs, SealExtents, StoreConfig
from memserve.store.machine.values import Values

if TYPE_CHECKING:
    from memserve._core import Place

Waiter = Callable[[bool, int], None]
"""Called once, with the time: whether the value is in memory now and was compared. False: computed again, or absent."""


@dataclass(slots=True, eq=False)
class _Load:
    key: bytes
    waiters: list[Waiter] = field(default_factory=list)
    place: Place | None = None
    """What is being compared, with a reference."""
    extent: int = 0
    """Where a disk's value goes, with a reference."""
    record: DiskRecord | None = None
    """What is being read."""
    is_void: bool = False
    """The value was forgotten meanwhile."""


class Loads:
    """All values that are on their way."""

    def __init__(self, values: Values, jobs: Jobs, config: StoreConfig) -> None:
        self._values = values
        self._jobs = jobs
        self._config = config
        self._loads: dict[bytes, _Load] = {}  # that are not void
        self._queue: deque[_Load] = deque()
        self._sealing: dict[int, _Load] = {}
        self._reading: dict[int, _Load] = {}
        self._lingering: dict[int, int] = {}  # read that has ended -> extent that the device may still write
        self._voided: list[_Load] = []
        values.on_forget = self._void_load

    def request_load(self, key: bytes, waiter: Waiter, now_ns: int) -> None:
        """Bring a value; ``waiter`` is called at once where it is there already, or is nowhere."""
        load = self._loads.get(key)
        if load is not None:
            self._values.counters.loads_joined += 1
            load.waiters.append(waiter)
            return
        self._loads[key] = load = _Load(key, [waiter])
        self._queue.append(load)
        self.start_loads(now_ns)

    def start_loads(self, now_ns: int) -> None:
        """Begin with what waits, as far as the host may have more; tell those whose value was forgotten."""
        while self._voided:
            load = self._voided.pop(0)
            for waiter in load.waiters:
                waiter(load.key in self._values.tier, now_ns)
        while self._queue and len(self._sealing) + len(self._reading) < self._config.loads_max:
            load = self._queue.popleft()
            if not load.is_void:
                self._begin_load(load, now_ns)

    def _begin_load(self, load: _Load, now_ns: int) -> None:
        values = self._values
        place = values.tier.find(load.key)
        if place is None:
            self._start_read(load, now_ns)
        elif place.verified:
            values.tier.release(place.offset)
            self._end_load(load, True, now_ns)
        else:
            load.place = place
            job = self._jobs.next_job()
            self._sealing[job] = load
            self._jobs.add_action(SealExtents(job, ((place.offset, place.length),)))

    # -- from an earlier life

    def sealed(self, event: ExtentsSealed, now_ns: int) -> bool:
        """A value was looked at. False: the job is another part's."""
        load = self._sealing.pop(event.job, None)
        if load is None:
            return False
        values, place = self._values, load.place
        check(place is not None, "nothing was being compared")
        assert place is not None
        load.place = None
        right = event.seals[0] == place.seal
        if load.is_void:
            values.tier.release(place.offset)
        elif right:
            values.counters.compared += 1
            values.tier.verified(load.key)
            values.tier.release(place.offset)
            self._end_load(load, True, now_ns)
        else:
            values.drop_damaged(load.key, place.offset)
            values.tier.release(place.offset)
            self._start_read(load, now_ns)
        self.start_loads(now_ns)
        return True

    # -- from a disk

    def _start_read(self, load: _Load, now_ns: int) -> None:
        values = self._values
        load.record = record = values.disks.find_record(load.key)
        if record is None:
            self._end_load(load, False, now_ns)
            return
        extent = self._allocate_extent(record)
        values.settle_evicted()
        if extent is None:
            values.counters.no_room += 1
            self._end_load(load, False, now_ns)
            return
        load.extent = extent
        read = values.disks.read_value(load.key, extent, now_ns)
        if read is None:  # too much is under way on that disk, or the disk is late
            values.tier.release(extent)
            self._end_load(load, False, now_ns)
            return
        values.counters.loads += 1
        self._reading[read] = load

    def _allocate_extent(self, record: DiskRecord) -> int | None:
        tier = self._values.tier
        if record.scope != KV_SCOPE:
            return tier.allocate(max(1, record.length + record.name_bytes))
        if record.length != tier.block_bytes:
            return None  # of another model
        blocks = tier.allocate_blocks(1)
        return None if blocks is None else blocks[0] * tier.block_bytes

    def read_ended(self, event: ReadEnded, now_ns: int) -> None:
        """A disk is done with a read, or the read is late."""
        load = self._reading.pop(event.id)
        values, record, fresh = self._values, load.record, False
        assert record is not None
        if event.ok and not load.is_void:
            fresh = (
                values.put_restored(load.key, load.extent, record.length, record.scope, record.seal, event.name)
                or load.key in values.tier
            )
        if event.extent_free:
            values.tier.release(load.extent)
        else:
            self._lingering[event.id] = load.extent
        values.counters.loads_failed += not event.ok
        if not load.is_void:
            self._end_load(load, fresh, now_ns)
        self.start_loads(now_ns)

    def extent_free(self, event: ExtentFree) -> None:
        """The device has ended a late read."""
        self._values.tier.release(self._lingering.pop(event.id))

    # -- ends

    def _end_load(self, load: _Load, ok: bool, now_ns: int) -> None:
        del self._loads[load.key]
        for waiter in load.waiters:
            waiter(ok, now_ns)

    def _void_load(self, key: bytes) -> None:
        """The value is forgotten: what is being read is no longer it. Callers get what there is then."""
        load = self._loads.pop(key, None)
        if load is not None:
            load.is_void = True
            self._voided.append(load)  # callers are told by `advance`: what was forgotten may be replaced right now

    @property
    def open_loads(self) -> int:
        return len(self._loads)

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a load."""
        extents = [load.place.offset for load in self._sealing.values() if load.place is not None]
        return extents + [load.extent for load in self._reading.values()] + list(self._lingering.values())

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a load is lost, or is under way twice."""
        under_way = [*self._sealing.values(), *self._reading.values(), *self._queue]
        living = [load for load in under_way if not load.is_void]
        check(len(living) == len(self._loads), f"{len(living)} loads under way, {len(self._loads)} awaited")
        check(all(self._loads.get(load.key) is load for load in living), "a load is under way twice")
