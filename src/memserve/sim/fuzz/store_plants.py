"""Planted faults of a store: each a safeguard that is taken out (``plants.py``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memserve.messages import Offer, Peer
from memserve.store import disk as disk_module
from memserve.store import disk_steps
from memserve.store.disk_events import DiskDone, Written
from memserve.store.events import ExtentsSealed
from memserve.store.kv_blocks import KvBlocks
from memserve.store.loads import Loads
from memserve.store.values import Values

if TYPE_CHECKING:
    from memserve._core import Found, Place, SegmentLog

Swap = tuple[Any, str, Any]
"""An object, the name of its attribute, and the attribute's replacement."""


def _same_head(log: SegmentLog, key: bytes, found: Found, done: DiskDone) -> bytes | None:
    return _name_if_same(log, key, found, replace(done, seal=found.seal) if done.ok else done)


_name_if_same = disk_steps.name_if_same


def _takes_as_sealed(self: Loads, event: ExtentsSealed, now: int) -> bool:
    load = self._sealing.get(event.job)
    if load is not None and load.place is not None:
        event = replace(event, seals=(load.place.seal,))
    return _sealed(self, event, now)


_sealed = Loads.sealed


def store_seal() -> list[Swap]:
    """A store takes what it reads, from a disk or in memory that it adopts, for what was written there."""
    return [(disk_module, "name_if_same", _same_head), (Loads, "sealed", _takes_as_sealed)]


def _publishes_at_once(self: KvBlocks, sender: Peer, offer: Offer, now: int) -> None:
    _offered(self, sender, offer, now)
    taken = self.exchange._receiver.open.get(offer.transfer_id)
    if taken is None or taken.placed is None or taken.placed.lease.blocks:
        return
    first, block_bytes = taken.offer.first_block, self._pool.block_bytes
    identities = self._pool.identities(offer.tenant, offer.tokens)[first:]
    for identity, block in zip(identities, taken.placed.blocks, strict=False):
        self._values.put_kv(identity, block * block_bytes, block_bytes, 0, now, keep=False)


_offered = KvBlocks._offered


def store_arrival() -> list[Swap]:
    """A store publishes blocks before they have arrived."""
    return [(KvBlocks, "_offered", _publishes_at_once)]


def _is_written_at_once(self: Values, key: bytes, place: Place, now: int, *, bypass: bool) -> None:
    was_written = key in self._writes
    _write_through(self, key, place, now, bypass=bypass)
    if key in self._writes and not was_written:
        self.written(Written(key, True), now)


_write_through = Values._write_through


def store_write() -> list[Swap]:
    """A store takes a value to be on a disk when the disk has begun to write it."""
    return [(Values, "_write_through", _is_written_at_once)]
