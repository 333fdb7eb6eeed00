"""Everything that a store keeps: one set of keys, in memory and on disks.

::

    put: extent --publish--> memory --Disks.wants_value--> written through --> memory and disk
                               |  evicted to make room                         |
                               +--> gone, or on the disk alone  <--------------+

What changes is told where it is looked up: the shared table (clients of this host), the log of KV events (the router).

Which KV blocks a store has, and where, as it tells the router: numbered changes, and everything at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.kv.events import KvEvent, KvEventKind
from memserve.kv.store_shares import split_keys
from memserve.protocol.store import KEY_BYTES
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import Dropped, Written
from memserve.store.machine.block_pool import KV_SCOPE
from memserve.store.machine.events import StoreCounters

if TYPE_CHECKING:
    from memserve._core import MemoryTier, Place


GROUP_MAX = 4096
"""Identities of one change."""


class KvLog:
    """A source of :class:`memserve.kv.events.KvFeed`. What lies in memory and on a disk counts as in memory."""

    def __init__(self) -> None:
        self._places: dict[bytes, Tier] = {}
        self._number = 1  # so that a router asks for what was here from the start
        self._changes: list[tuple[KvEventKind, Tier, list[bytes]]] = []

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._places

    def __len__(self) -> int:
        return len(self._places)

    def tier_of(self, identity: bytes) -> Tier | None:
        """Where a block lies. None: nowhere."""
        return self._places.get(identity)

    def set_tier(self, identity: bytes, tier: Tier | None) -> None:
        """A block lies on ``tier`` from now on. None: nowhere."""
        before = self._places.get(identity)
        if before is tier:
            return
        if tier is None:
            del self._places[identity]
            self._add_change(KvEventKind.EVICTED, before or Tier.DRAM, identity)
        else:
            self._places[identity] = tier
            self._add_change(KvEventKind.STORED if before is None else KvEventKind.MOVED, tier, identity)

    def _add_change(self, kind: KvEventKind, tier: Tier, identity: bytes) -> None:
        last = self._changes[-1] if self._changes else None
        if last is not None and last[0] is kind and last[1] is tier and len(last[2]) < GROUP_MAX:
            last[2].append(identity)
        else:
            self._changes.append((kind, tier, [identity]))

    # -- the source of a feed

    @property
    def next_event(self) -> int:
        """Number of the next change that :meth:`take_events` will return."""
        return self._number

    def take_events(self) -> list[KvEvent]:
        """The changes since the last call, in order."""
        events = []
        for kind, tier, identities in self._changes:
            events.append(KvEvent(self._number, kind, tier, tuple(identities)))
            self._number += 1
        self._changes.clear()
        return events

    def cached_identities(self, tier: Tier) -> bytes:
        """Identities of all blocks on ``tier``, 16 bytes each."""
        return b"".join(identity for identity, place in self._places.items() if place is tier)

    def all_identities(self) -> list[bytes]:
        return list(self._places)


WAITING_MAX = 65_536
"""Values in memory that wait for the disks to have time for them; more are written when they are asked for again."""


@dataclass(frozen=True, slots=True)
class _Write:
    """A value on its way to a disk, with a reference on its extent."""

    extent: int
    scope: int


@dataclass(frozen=True, slots=True)
class Known:
    """A value, wherever it lies. ``name`` None: it lies on a disk, and its name was not read."""

    length: int
    scope: int
    name: bytes | None


class Values:
    """The memory tier, the disks, and what is told of them."""

    def __init__(self, tier: MemoryTier, disks: Disks, counters: StoreCounters) -> None:
        self.tier = tier
        self.disks = disks
        self.log = KvLog()
        self.counters = counters
        self._writes: dict[bytes, _Write] = {}
        self._dirty: dict[bytes, None] = {}  # replaced while an earlier value of the key was being written
        self._waiting: dict[bytes, bool] = {}  # to be written when a write has ended; whether that is sure
        #: called with each key whose value is forgotten: what is being read back is that value
        self.on_forget: Callable[[bytes], None] = _ignore
        self._recover_log()

    def _recover_log(self) -> None:
        """Tell what earlier lives have left."""
        keys = self.disks.all_keys()
        for key in split_keys(keys):
            record = self.disks.find_record(key)
            if record is not None and record.scope == KV_SCOPE:
                self.log.set_tier(key, Tier.SSD)
            elif record is not None:
                self.tier.mark_on_disk(key, True)
        for key in split_keys(self.tier.keys()):
            place = self.tier.find(key, counts=False)
            if place is None:
                continue
            self.tier.release(place.offset)
            on_disk = self.disks.find_record(key)
            if on_disk is not None and (on_disk.seal, on_disk.length) != (place.seal, place.length):
                self.disks.remove_value(
                    key
                )  # of an earlier value: the one in memory took its place right before the end
                self.tier.mark_on_disk(key, False)
            if place.scope == KV_SCOPE:
                self.log.set_tier(key, Tier.DRAM)

    # -- looking

    def find_value(self, key: bytes) -> Known | None:
        """What is known of a value. No hit."""
        place = self.tier.find(key, counts=False)
        if place is not None:
            self.tier.release(place.offset)
            return Known(place.length, place.scope, place.name)
        record = self.disks.find_record(key)
        return None if record is None else Known(record.length, record.scope, None)

    def location_of(self, key: bytes) -> int:
        """0: nowhere. 1: in memory. 2: on a disk. 3: both."""
        return (key in self.tier) + 2 * (key in self.disks)

    def __contains__(self, key: bytes) -> bool:
        return key in self.tier or key in self.disks

    def is_ready(self, key: bytes) -> bool:
        """Whether a value is in memory and was compared. No hit."""
        place = self.tier.find(key, counts=False)
        if place is None:
            return False
        self.tier.release(place.offset)
        return place.verified

    def is_at(self, key: bytes, extent: int) -> bool:
        """Whether a value lies in memory, there."""
        place = self.tier.find(key, counts=False)
        if place is not None:
            self.tier.release(place.offset)
        return place is not None and place.offset == extent

    def hold_value(self, key: bytes, now_ns: int) -> Place | None:
        """A value in memory that may be read, with a reference. None: it is not there, or was not compared yet."""
        place = self.tier.find(key)
        if place is None:
            return None
        if not place.verified:
            self.tier.release(place.offset)
            return None
        self._write_through(key, place, now_ns, bypass=False)
        return place

    def use_values(self, keys: bytes, now_ns: int) -> None:
        """Values were used by those that have them as well, the first one before all others: they stay as if they had
        been asked for. A peer says so: what is no whole key is left out."""
        keys = keys[: len(keys) // KEY_BYTES * KEY_BYTES]
        self.tier.touch(keys, hit=True)
        if self.disks.has_disks:
            self.disks.touch_values(keys)
            for key in split_keys(keys):
                self._write_through_new(key, now_ns)

    # -- putting

    def put_value(self, key: bytes, extent: int, length: int, scope: int, seal: int, name: bytes, now_ns: int) -> None:
        """Keep a client's value; the caller's reference on ``extent`` stays the caller's. An older one is forgotten."""
        self.forget_value(key, now_ns)
        if self.tier.publish(key, extent, length, scope=scope, seal=seal, name=name):
            self._write_through_new(key, now_ns)
        self.settle_evicted()

    def put_kv(self, identity: bytes, extent: int, length: int, seal: int, now_ns: int, *, keep: bool) -> bool:
        """Keep a KV block. False: it is here already, with the same tokens."""
        fresh = self.tier.publish(identity, extent, length, scope=KV_SCOPE, seal=seal)
        if fresh:
            self.log.set_tier(identity, Tier.DRAM)
            self._write_through_new(identity, now_ns, bypass=keep)
        self.settle_evicted()
        return fresh

    def put_restored(self, key: bytes, extent: int, length: int, scope: int, seal: int, name: bytes) -> bool:
        """A value was read back from a disk and compared. False: memory has got one of this key meanwhile, or cannot
        take any."""
        fresh = self.tier.publish(key, extent, length, scope=scope, seal=seal, name=name)
        if fresh and scope == KV_SCOPE:
            self.log.set_tier(key, Tier.DRAM)
        elif fresh:
            self.tier.mark_on_disk(key, key in self.disks)
        self.settle_evicted()
        return fresh

    def keep_block(self, identity: bytes, now_ns: int) -> None:
        """A block has a name from now on: write it through, whether it was asked for before or not."""
        place = self.tier.find(identity, counts=False)
        if place is not None:
            self._write_through(identity, place, now_ns, bypass=True)
            self.tier.release(place.offset)

    def _write_through_new(self, key: bytes, now_ns: int, *, bypass: bool = False) -> None:
        place = self.tier.find(key, counts=False)
        if place is not None:
            if key in self._writes:
                self._dirty[key] = None
            else:
                self._write_through(key, place, now_ns, bypass=bypass)
            self.tier.release(place.offset)

    def _write_through(self, key: bytes, place: Place, now_ns: int, *, bypass: bool) -> None:
        """Write a value to a disk if it is wanted there. It counts as one request of the key."""
        if key in self._writes:
            return
        if not self.may_write_out:
            if len(self._waiting) < WAITING_MAX and key not in self.disks:
                self._waiting[key] = bypass or self._waiting.get(key, False)
            return
        if not self.disks.wants_value(key, place.length, now_ns, bypass=bypass) or not place.verified:
            return
        is_accepted = self.disks.write_value(
            key, place.offset, place.length, now_ns, scope=place.scope, seal=place.seal, name=place.name
        )
        if is_accepted:
            self.tier.retain(place.offset)
            self._writes[key] = _Write(place.offset, place.scope)
        elif len(self._waiting) < WAITING_MAX:  # no segment is ready now
            self._waiting[key] = True

    # -- forgetting

    def forget_value(self, key: bytes, now_ns: int) -> bool:
        """Forget a value, wherever it lies. False: there is none."""
        self._dirty.pop(key, None)
        self._waiting.pop(key, None)
        self.on_forget(key)
        in_memory = self.tier.remove(key)
        on_disk = self.disks.remove_value(key, now_ns)
        if on_disk and key not in self.log:
            self.tier.mark_on_disk(key, False)
        self.log.set_tier(key, None)
        return in_memory or on_disk

    def forget_everything(self, now_ns: int) -> int:
        """Forget all values and blocks; returns how many there were."""
        count = len(self.tier) + sum(key not in self.tier for key in split_keys(self.disks.all_keys()))
        for key in split_keys(self.disks.all_keys()):
            if key not in self.log:
                self.tier.mark_on_disk(key, False)
        self._dirty.clear()
        self._waiting.clear()
        self.tier.purge()
        self.tier.take_evicted()
        self.disks.remove_all(now_ns)
        for identity in self.log.all_identities():
            self.log.set_tier(identity, None)
        return count

    def drop_damaged(self, key: bytes, extent: int) -> None:
        """What lies in memory at ``extent`` is not what was put: drop it there. A disk may still have it."""
        if self.is_at(key, extent):
            self.counters.damaged += 1
            self.tier.remove(key)
            self._on_evicted(key)

    # -- what has happened

    def on_written(self, outcome: Written, now_ns: int) -> None:
        """A write has ended."""
        write = self._writes.pop(outcome.key, None)
        if write is None:
            return
        self.tier.release(write.extent)
        if outcome.ok and write.scope == KV_SCOPE:
            if outcome.key not in self.tier:
                self.log.set_tier(outcome.key, Tier.SSD)
        elif outcome.ok:
            self.tier.mark_on_disk(outcome.key, True)
        if outcome.key in self._dirty:
            del self._dirty[outcome.key]
            self._write_through_new(outcome.key, now_ns)
        self.write_waiting(now_ns)

    def write_waiting(self, now_ns: int) -> None:
        """The disks have done something: write what waits for them."""
        for _ in range(len(self._waiting)):
            if not self.may_write_out:
                return
            key = next(iter(self._waiting))
            self._write_through_new(key, now_ns, bypass=self._waiting.pop(key))
            if key in self._waiting:
                return  # still no room

    def on_dropped(self, outcome: Dropped) -> None:
        """Disks have given up values, or lost them."""
        for key in split_keys(outcome.keys):
            if key in self.disks:
                continue  # another disk has it, or it was written again
            if key not in self.log:
                self.tier.mark_on_disk(key, False)
            elif key not in self.tier:
                self.log.set_tier(key, None)

    def settle_evicted(self) -> None:
        """Behind everything that may have taken memory: look what left it for that."""
        for key in self.tier.take_evicted():
            self._on_evicted(key)

    def _on_evicted(self, key: bytes) -> None:
        if key in self.log and key not in self.tier:
            self.log.set_tier(key, Tier.SSD if key in self.disks else None)

    # -- the end

    def unwritten_keys(self) -> list[bytes]:
        """Keys that are in memory alone; none of them waits any more for a write to end."""
        self._waiting.clear()
        return [key for key in split_keys(self.tier.keys()) if key not in self.disks and key not in self._writes]

    def write_out(self, key: bytes, now_ns: int) -> None:
        """Write a value before the end, if it is wanted on a disk."""
        self._write_through_new(key, now_ns)

    @property
    def may_write_out(self) -> bool:
        """Whether no disk is too busy for one write more."""
        return len(self._writes) < self.disks.config.writes_max

    @property
    def writes_open(self) -> int:
        """Writes under way, and those that wait."""
        return len(self._writes) + len(self._waiting)

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a write."""
        return [write.extent for write in self._writes.values()]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the log says something else than memory and disks."""
        for key in self.log.all_identities():
            in_memory = key in self.tier
            is_stored = in_memory or key in self.disks or key in self._writes
            check(is_stored, "the log has a block that is nowhere")
            tier = Tier.DRAM if in_memory else Tier.SSD
            check(self.log.tier_of(key) is tier, "the log has a block on another tier than {}", tier)


def _ignore(key: bytes) -> None:
    """Nothing is being read back."""
