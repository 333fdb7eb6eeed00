"""A journal on a medium, and the state that it makes: what every host of a ``Cluster`` writes to.

::

    store = Store(medium)                     reads what is there; drops a torn last write, refuses damage
    store.state.recovered(clock_offset_ns)    for the StateRecovered event of a new machine
    store.write(records)                      for each Remember and Note, in order
    store.sync()                              before the actions after a Remember are performed

In the runtime a thread does this (``runtime/meta_keeper.py``), one ``sync`` for all that arrived meanwhile. A simulator
calls it in virtual time on a ``FaultyMedium``.

The journal is replaced by a checkpoint of the state when it has grown to three times the last one, and by its host
(:meth:`Store.checkpoint`) some time after it :attr:`holds what was deleted <Store.holds_deleted>`. After a failure
nothing is written until a whole checkpoint succeeds (:meth:`Store.checkpoint`): a journal never continues after a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from memserve.meta.journal import JournalWriter, read_journal, records_of
from memserve.meta.medium import Medium, MediumFailed
from memserve.meta.state import MetadataState
from memserve.metadata import AnyRecord, DocumentDropped, DocumentPut, HandleDropped
from memserve.units import MIB

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
