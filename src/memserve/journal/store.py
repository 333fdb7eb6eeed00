"""A journal on a medium, and the state that it makes: what every host of a ``Cluster`` writes to.

::

    store = Store(medium)                     reads what is there; drops a torn last write, refuses damage
    store.state.recovered(clock_offset_ns)    for the StateRecovered event of a new machine
    store.write(records)                      for each Remember and Note, in order
    store.sync()                              before the actions after a Remember are performed

In the runtime a thread does this (``journal/keeper.py``), one ``sync`` for all that arrived meanwhile. A simulator
calls it in virtual time on a ``FaultyMedium``.

The journal is replaced by a checkpoint of the state when it has grown to three times the last one, and by its host
(:meth:`Store.checkpoint`) some time after it :attr:`holds what was deleted <Store.holds_deleted>`. After a failure
nothing is written until a whole checkpoint succeeds (:meth:`Store.checkpoint`): a journal never continues after a hole.

Where a journal lies: a port with few methods, and a medium in memory that fails as disks do.

How a simulator uses :class:`FaultyMedium`. Each router of a world has one, which outlives its process; the host of the
``Cluster`` opens a :class:`~memserve.journal.store.Store` on it, writes the records of each ``Remember`` and ``Note``,
and calls ``sync`` before it performs the actions after a ``Remember``. Draws from the seed decide what to call:

* the process is killed (``kill -9``): nothing to call. What was appended is in the system's cache; open it again;
* the machine loses power: :meth:`FaultyMedium.lose_power` with how much of the unsafe tail arrived, and which pieces
  of that did not (disks write out of order);
* the disk is full: :attr:`FaultyMedium.room_bytes`; None = there is room again;
* bytes rot: :meth:`FaultyMedium.damage`: opening must raise ``UserError``, or lose nothing that was promised;
* *planted fault*, the disk's cache lies: ``FaultyMedium(fsync_lies=True)``. ``sync`` returns and nothing is safe. A
  checker "durable is durable" keeps the records for which ``sync`` returned, and finds them missing in
  ``Store(medium).state`` after :meth:`~FaultyMedium.lose_power`. A killed process alone does not show this fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol

from memserve.base.errors import MemserveError
from memserve.base.units import MIB
from memserve.journal.journal import JournalWriter, read_journal, records_of
from memserve.journal.state import MetadataState
from memserve.protocol.records import AnyRecord, DocumentDropped, DocumentPut, HandleDropped


class MediumFailed(MemserveError):
    """An operation failed (disk full, connection lost). What was appended since the last ``sync`` may be there in
    whole, in part or not at all."""


class Medium(Protocol):
    """One journal at a time: a sequence of bytes that grows, and that another one can replace.

    Implementations: a file (``journal/folder.py``), etcd (``journal/etcd.py``), and :class:`FaultyMedium`.
    All pass ``tests/process/journal/test_media.py``.
    """

    @property
    def name(self) -> str:
        """For operators: the path of the file, the key in etcd."""

    def load(self) -> bytes | None:
        """Everything since the last ``replace``, in order. None: there never was a journal. ``b""``: there was one,
        and nothing is left of it. Raises :class:`MediumFailed`."""

    def append(self, data: bytes) -> None:
        """Append ``data``; it need not be safe yet. Raises :class:`MediumFailed`."""

    def sync(self) -> None:
        """Everything appended is safe when this returns. Raises :class:`MediumFailed`."""

    def replace(self, data: bytes) -> None:
        """Replace the journal by ``data``: safe when this returns; at every moment the old or the new one is there.
        Raises :class:`MediumFailed`, and then leaves the old one as it was."""

    def close(self) -> None:
        """Release the medium."""


class FaultyMedium:
    """A :class:`memserve.journal.store.Medium` in memory that can lose parts of its data."""

    def __init__(self, *, fsync_lies: bool = False, room_bytes: int | None = None) -> None:
        self.fsync_lies = fsync_lies
        self.room_bytes = room_bytes
        """None: the disk has room. N: the journal may grow to N bytes."""
        self.syncs = 0
        self._safe = b""
        self._unsafe = bytearray()

    @property
    def unsafe_bytes(self) -> int:
        """Appended, and not yet safe."""
        return len(self._unsafe)

    @property
    def name(self) -> str:
        """As :class:`Medium`."""
        return "memory"

    def load(self) -> bytes | None:
        """Everything, safe or not: the operating system's cache outlives processes."""
        return self._everything() or None

    def append(self, data: bytes) -> None:
        """As :class:`Medium`. On a full disk a part of ``data`` arrives."""
        room_bytes = self._room_for(len(data))
        self._unsafe += data[:room_bytes]
        if room_bytes < len(data):
            raise MediumFailed("no space left on device")

    def sync(self) -> None:
        """As :class:`Medium`, unless ``fsync_lies``."""
        self.syncs += 1
        if not self.fsync_lies:
            self._safe, self._unsafe = self._everything(), bytearray()

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`."""
        if self.room_bytes is not None and len(data) > self.room_bytes:
            raise MediumFailed("no space left on device")
        self._safe, self._unsafe = data, bytearray()

    def close(self) -> None:
        """Nothing to release."""

    def lose_power(self, arrived_bytes: int, holes: Sequence[tuple[int, int]] = ()) -> None:
        """Keep only ``arrived_bytes`` of the unsafe tail, with zeros in its ``holes`` ``[start, end)``."""
        tail = self._unsafe[:arrived_bytes]
        for start, end in holes:
            tail[start:end] = bytes(len(tail[start:end]))
        self._safe, self._unsafe = self._safe + bytes(tail), bytearray()

    def damage(self, at: int, data: bytes) -> None:
        """Overwrite the bytes from ``at`` on with ``data``."""
        everything = bytearray(self._everything())
        everything[at : at + len(data)] = data
        self._safe, self._unsafe = bytes(everything), bytearray()

    def _everything(self) -> bytes:
        return self._safe + bytes(self._unsafe)

    def _room_for(self, wanted_bytes: int) -> int:
        if self.room_bytes is None:
            return wanted_bytes
        return max(0, min(wanted_bytes, self.room_bytes - len(self._safe) - len(self._unsafe)))


CHECKPOINT_BYTES_MIN = 4 * MIB
"""A journal that has grown by less than this is left alone."""
_FRAME_RECORDS = 1024
"""Records of a checkpoint in one frame: sessions and handles come by the hundred thousand."""


class Store:
    """Writes records and keeps the state that they make. For one thread."""

    def __init__(self, medium: Medium, *, checkpoint_bytes_min: int = CHECKPOINT_BYTES_MIN) -> None:
        """Recover what ``medium`` holds. Raises :class:`UserError` when it is damaged or of another format, and
        :class:`MediumFailed` when it cannot be read, or holds nothing and takes nothing. :attr:`is_broken` afterwards:
        it takes nothing more at present."""
        self._medium = medium
        self._checkpoint_bytes_min = checkpoint_bytes_min
        self.state = MetadataState()
        self.torn_bytes = 0
        """Length of an incomplete last write that was found when this store was opened."""
        self.checkpoints = 0
        self.is_broken = False
        """A write failed: nothing is durable until a checkpoint succeeds."""
        self.holds_deleted = False
        """The journal has documents or pinned prefixes that the state no longer has; a checkpoint removes them."""
        self._writer = JournalWriter(0)
        self._bytes = self._durable_bytes = self._checkpoint_bytes = 0
        self._open()

    def _open(self) -> None:
        data = self._medium.load()
        if data is None:
            self.checkpoint()
            return
        reading = read_journal(data)
        for body in reading.bodies:
            self._apply(records_of(body))
        self._writer = JournalWriter(reading.number, len(reading.bodies))
        self._bytes = self._checkpoint_bytes = reading.good_bytes
        self.torn_bytes = reading.torn_bytes
        if self.torn_bytes:
            with suppress(MediumFailed):  # broken then, until one gets through: what can be read is whole
                self.checkpoint()

    @property
    def bytes_written(self) -> int:
        """Length of the journal."""
        return self._bytes

    def write(self, records: Iterable[AnyRecord]) -> None:
        """Apply ``records`` to the state and append them to the journal. Not safe before :meth:`sync`; not written at
        all while the store is broken. Raises :class:`MediumFailed`, and is broken then."""
        records = list(records)
        self._apply(records)
        if self.is_broken:
            return
        frame = self._writer.frame(records, self._durable_bytes)
        self._guarded_append(frame)
        if self._bytes - self._checkpoint_bytes > max(self._checkpoint_bytes_min, 2 * self._checkpoint_bytes):
            self.checkpoint()

    def sync(self) -> None:
        """All that was written is safe when this returns. Raises :class:`MediumFailed`, and is broken then."""
        if self.is_broken:
            raise MediumFailed("an earlier write failed")
        if self._durable_bytes == self._bytes:
            return
        try:
            self._medium.sync()
        except MediumFailed:
            self.is_broken = True
            raise
        self._durable_bytes = self._bytes

    def checkpoint(self) -> None:
        """A new journal that begins with the whole state. Raises :class:`MediumFailed`, and is broken then."""
        writer = JournalWriter(self._writer.number + 1)
        data = writer.begin(_batches(self.state.records()))
        try:
            self._medium.replace(data)
        except MediumFailed:
            self.is_broken = True
            raise
        self._writer, self.is_broken, self.holds_deleted = writer, False, False
        self._bytes = self._durable_bytes = self._checkpoint_bytes = len(data)
        self.checkpoints += 1

    def forget_expired(self, now_unix_ns: int) -> None:
        """Remove expired documents from the state, as the next router would."""
        expired = [record for record in self.state.documents.values() if record.expires_unix_ns <= now_unix_ns]
        self._apply([DocumentDropped(record.tenant, record.document_id) for record in expired])

    def close(self) -> None:
        """Close the medium, without a :meth:`sync`."""
        self._medium.close()

    def _apply(self, records: list[AnyRecord]) -> None:
        for record in records:
            match record:
                case DocumentPut(tenant, document_id, body):
                    known = self.state.documents.get((tenant, document_id))
                    self.holds_deleted |= known is not None and known.body != body
                case DocumentDropped(tenant, document_id):
                    self.holds_deleted |= (tenant, document_id) in self.state.documents
                case HandleDropped(tenant, handle):
                    self.holds_deleted |= (tenant, handle) in self.state.handles
            self.state.apply([record])

    def _guarded_append(self, frame: bytes) -> None:
        try:
            self._medium.append(frame)
        except MediumFailed:
            self.is_broken = True
            raise
        self._bytes += len(frame)


def _batches(records: Iterator[AnyRecord]) -> Iterator[list[AnyRecord]]:
    while batch := list(islice(records, _FRAME_RECORDS)):
        yield batch
