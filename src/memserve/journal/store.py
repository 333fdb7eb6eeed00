"""A journal on a medium, and the state that it makes: what every host of a ``Cluster`` writes to.

::

    store = Store(medium)                     reads what is there; drops a torn last write, refuses damage
    store.state.recovered(clock_offset_ns)    for the StateRecovered event of a new machine
    store.write(records)                      for each Remember and Note, in order
    store.sync()                              before the actions after a Remember are performed

In the runtime a thread does this (``journal/keeper.py``), one ``sync`` for all that arrived meanwhile. A simulator
calls it in virtual time, on a medium that fails as disks do.

The journal is replaced by a checkpoint of the state when it has grown to three times the last one, and by its host
(:meth:`Store.write_checkpoint`) some time after it :attr:`holds what was deleted <Store.holds_deleted>`. After a
failure nothing is written until a whole checkpoint succeeds (:meth:`Store.write_checkpoint`): a journal never
continues after a hole.

How records are encoded, and read again even if a journal is torn or damaged:

::

    journal = head, frame, frame, ...
    head    = "memserve meta\\n" | format u16 | number of the journal u64 | checkpoint bytes u64 | seal
    frame   = "\\xf5rec" | body bytes u32 | sequence u64 | durable u64 | seal | body
    body    = records, as a list in msgpack; seal = 16 bytes, a keyed hash

A frame is read as a whole or not at all: its seal is a hash of all the rest of it, keyed with the journal's number, so
that bytes of an older journal, which a disk may return, are never taken for a frame. ``durable`` is how much of the
journal was known to be safe when the frame was written. It distinguishes two cases that look alike:

* *torn*: broken bytes that no later frame declares safe. The last write did not complete, its records were not
  acknowledged, and it is dropped, even if later parts of that write did arrive.
* *damaged*: broken bytes that a later frame declares safe, or in the checkpoint at the beginning (the head has its
  length). Something acknowledged is lost: reading stops with an error, and nothing is guessed.

Only damage to the very last frame is taken for a torn write, because no frame follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from struct import Struct
from typing import Protocol

import msgspec

from memserve import _core
from memserve.base.errors import MemserveError, UserError
from memserve.base.units import MIB
from memserve.journal.state import MetadataState
from memserve.protocol.records import AnyRecord, DocumentDropped, DocumentPut, HandleDropped

FORMAT = 1
"""Incremented whenever an older memserve would misread the journal; not for new records, nor for new fields at the
end."""

_MAGIC = b"memserve meta\n"
_HEAD = Struct("<14sHQQ16s")
_HEAD_SEALED_BYTES = _HEAD.size - 16
_FRAME_MAGIC = b"\xf5rec"
_FRAME = Struct("<4sIQQ16s")
_SEALED_BYTES = _FRAME.size - 16
_HINT = "restore a backup, or start without it: --metadata none"

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[AnyRecord]] = msgspec.msgpack.Decoder(list[AnyRecord])


@dataclass(frozen=True, slots=True)
class JournalReading:
    """What a journal holds."""

    number: int
    bodies: tuple[memoryview, ...]
    """Of its frames, in order; see :func:`records_of`."""
    good_bytes: int
    """Length up to the end of the last good frame."""
    torn_bytes: int
    """Length of what follows: a write that did not complete."""


class JournalWriter:
    """Frames of one journal, numbered."""

    __slots__ = ("_key", "_sequence", "number")

    def __init__(self, number: int, sequence: int = 0) -> None:
        """``sequence``: number of frames that the journal has already."""
        self.number = number
        self._key = _key_of(number)
        self._sequence = sequence

    def encode_checkpoint(self, batches: Iterable[Iterable[AnyRecord]]) -> bytes:
        """The head, and a checkpoint of one frame per batch: a journal to be put in place as a whole."""
        frames = b"".join(self.encode_frame(records, 0) for records in batches)
        start = _HEAD.pack(_MAGIC, FORMAT, self.number, _HEAD.size + len(frames), b"")[:_HEAD_SEALED_BYTES]
        return b"".join((start, _core.siphash128(self._key, start), frames))

    def encode_frame(self, records: Iterable[AnyRecord], durable_bytes: int) -> bytes:
        """The next frame. ``durable_bytes``: how much of this journal is safe."""
        body = _encoder.encode(list(records))
        return self._encode_checksummed(body, durable_bytes)

    def _encode_checksummed(self, body: bytes, durable_bytes: int) -> bytes:
        start = _FRAME.pack(_FRAME_MAGIC, len(body), self._sequence, durable_bytes, b"")[:_SEALED_BYTES]
        self._sequence += 1
        return b"".join((start, _core.siphash128(self._key, start + body), body))


def read_journal(data: bytes) -> JournalReading:
    """All good frames of ``data``. Raises :class:`UserError` for another format, and for damage (see above)."""
    number, checkpoint_bytes = _read_head(data)
    view, key = memoryview(data), _key_of(number)
    bodies: list[memoryview] = []
    offset = _HEAD.size
    # the sequence too: a whole frame in the wrong place is as bad as a broken one
    while (frame := _frame_at(view, offset, key)) is not None and frame.sequence == len(bodies):
        bodies.append(frame.body)
        offset = frame.end
    # a checkpoint was put in place as a whole, so all of it is safe without a later frame that says so
    safe_bytes = max(checkpoint_bytes, _vouched_bytes(data, view, offset, key))
    if safe_bytes > offset:
        message = f"the metadata is damaged: bytes {offset} to {safe_bytes} are not as they were written"
        raise UserError(message, hint=_HINT, param="metadata")
    return JournalReading(number, tuple(bodies), offset, len(data) - offset)


def _read_head(data: bytes) -> tuple[int, int]:
    if not data:  # a journal is put in place as a whole: it is never empty by itself
        raise UserError("the metadata is lost: the journal is empty", hint=_HINT, param="metadata")
    if len(data) >= _HEAD.size and data.startswith(_MAGIC):
        _, version, number, checkpoint_bytes, checksum = _HEAD.unpack_from(data)
        if version != FORMAT:
            age = "a newer memserve wrote it" if version > FORMAT else "it is no longer supported"
            message = f"the metadata has format {version}, this memserve reads {FORMAT}: {age}"
            raise UserError(message, hint=_HINT, param="metadata")
        if _core.siphash128(_key_of(number), data[:_HEAD_SEALED_BYTES]) == checksum:
            return number, checkpoint_bytes
    raise UserError("the metadata is damaged at its very beginning", hint=_HINT, param="metadata")


def records_of(body: memoryview | bytes) -> list[AnyRecord]:
    """The records of a frame. Raises :class:`UserError` for a record that this memserve does not know."""
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        message = f"the metadata has a record that this memserve does not know: {error}"
        raise UserError(message, hint=_HINT, param="metadata") from error


@dataclass(frozen=True, slots=True)
class _Frame:
    sequence: int
    durable_bytes: int
    body: memoryview
    end: int


def _key_of(number: int) -> bytes:
    return b"journal:" + number.to_bytes(8, "little")


def _frame_at(view: memoryview, offset: int, key: bytes) -> _Frame | None:
    """The frame that begins at ``offset``; None: there is none, or not a whole one."""
    if len(view) - offset < _FRAME.size:
        return None
    magic, body_bytes, sequence, durable_bytes, checksum = _FRAME.unpack_from(view, offset)
    start, end = offset + _FRAME.size, offset + _FRAME.size + body_bytes
    if magic != _FRAME_MAGIC or end > len(view):
        return None
    checksummed = bytes(view[offset : offset + _SEALED_BYTES]) + bytes(view[start:end])
    if _core.siphash128(key, checksummed) != checksum:
        return None
    return _Frame(sequence, durable_bytes, view[start:end], end)


def _vouched_bytes(data: bytes, view: memoryview, end: int, key: bytes) -> int:
    """How many bytes are safe according to the frames after ``end``, where reading stopped."""
    vouched_bytes = 0
    offset = data.find(_FRAME_MAGIC, end)
    while offset >= 0:
        frame = _frame_at(view, offset, key)
        if frame is not None:
            # found anywhere behind the break, since its own length cannot be trusted: the seal says whether it is one
            vouched_bytes = max(vouched_bytes, frame.durable_bytes)
        offset = data.find(_FRAME_MAGIC, offset + 1 if frame is None else frame.end)
    return vouched_bytes


class MediumFailed(MemserveError):
    """An operation failed (disk full, connection lost). What was appended since the last ``sync`` may be there in
    whole, in part or not at all."""


class Medium(Protocol):
    """One journal at a time: a sequence of bytes that grows, and that another one can replace.

    Implementations: a file (``journal/folder.py``), etcd (``journal/etcd.py``), and a simulator's.
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
        self._recover_journal()

    def _recover_journal(self) -> None:
        data = self._medium.load()
        if data is None:
            self.write_checkpoint()
            return
        reading = read_journal(data)
        for body in reading.bodies:
            self._apply_records(records_of(body))
        self._writer = JournalWriter(reading.number, len(reading.bodies))
        # durable_bytes stays 0: what was read may lie in a page cache that never reached the disk
        self._bytes = self._checkpoint_bytes = reading.good_bytes
        self.torn_bytes = reading.torn_bytes
        if self.torn_bytes:
            with suppress(MediumFailed):  # broken then, until one gets through: what can be read is whole
                self.write_checkpoint()

    def write_records(self, records: Iterable[AnyRecord]) -> None:
        """Apply ``records`` to the state and append them to the journal. Not safe before :meth:`sync`; not written at
        all while the store is broken. Raises :class:`MediumFailed`, and is broken then."""
        records = list(records)
        self._apply_records(records)
        if self.is_broken:
            return
        frame = self._writer.encode_frame(records, self._durable_bytes)
        self._guarded_append(frame)
        if self._bytes - self._checkpoint_bytes > max(self._checkpoint_bytes_min, 2 * self._checkpoint_bytes):
            self.write_checkpoint()

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

    def write_checkpoint(self) -> None:
        """A new journal that begins with the whole state. Raises :class:`MediumFailed`, and is broken then."""
        # the next number keys the seals: frames of the old journal that a disk returns are not read as ours
        writer = JournalWriter(self._writer.number + 1)
        data = writer.encode_checkpoint(_batches(self.state.checkpoint_records()))
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
        self._apply_records([DocumentDropped(record.tenant, record.document_id) for record in expired])

    def close(self) -> None:
        """Close the medium, without a :meth:`sync`."""
        self._medium.close()

    def _apply_records(self, records: list[AnyRecord]) -> None:
        for record in records:
            match record:
                case DocumentPut(tenant, document_id, body):
                    document = self.state.documents.get((tenant, document_id))
                    # the old text of a document that was replaced is deleted text, too
                    self.holds_deleted |= document is not None and document.body != body
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
