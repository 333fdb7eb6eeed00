"""Encodes records as a journal, and reads one back even if it is torn or damaged. Pure: bytes in, bytes out.

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

from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import msgspec

from memserve import _core
from memserve.base.errors import UserError
from memserve.protocol.records import AnyRecord

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

    def begin(self, batches: Iterable[Iterable[AnyRecord]]) -> bytes:
        """The head, and a checkpoint of one frame per batch: a journal to be put in place as a whole."""
        frames = b"".join(self.frame(records, 0) for records in batches)
        start = _HEAD.pack(_MAGIC, FORMAT, self.number, _HEAD.size + len(frames), b"")[:_HEAD_SEALED_BYTES]
        return b"".join((start, _core.siphash128(self._key, start), frames))

    def frame(self, records: Iterable[AnyRecord], durable_bytes: int) -> bytes:
        """The next frame. ``durable_bytes``: how much of this journal is safe."""
        body = _encoder.encode(list(records))
        return self._seal(body, durable_bytes)

    def _seal(self, body: bytes, durable_bytes: int) -> bytes:
        start = _FRAME.pack(_FRAME_MAGIC, len(body), self._sequence, durable_bytes, b"")[:_SEALED_BYTES]
        self._sequence += 1
        return b"".join((start, _core.siphash128(self._key, start + body), body))


def read_journal(data: bytes) -> JournalReading:
    """All good frames of ``data``. Raises :class:`UserError` for another format, and for damage (see above)."""
    number, checkpoint_bytes = _read_head(data)
    view, key = memoryview(data), _key_of(number)
    bodies: list[memoryview] = []
    at = _HEAD.size
    while (frame := _frame_at(view, at, key)) is not None and frame.sequence == len(bodies):
        bodies.append(frame.body)
        at = frame.end
    safe_bytes = max(checkpoint_bytes, _vouched_bytes(data, view, at, key))
    if safe_bytes > at:
        message = f"the metadata is damaged: bytes {at} to {safe_bytes} are not as they were written"
        raise UserError(message, hint=_HINT, param="metadata")
    return JournalReading(number, tuple(bodies), at, len(data) - at)


def _read_head(data: bytes) -> tuple[int, int]:
    if not data:  # a journal is put in place as a whole: it is never empty by itself
        raise UserError("the metadata is lost: the journal is empty", hint=_HINT, param="metadata")
    if len(data) >= _HEAD.size and data.startswith(_MAGIC):
        _, version, number, checkpoint_bytes, seal = _HEAD.unpack_from(data)
        if version != FORMAT:
            age = "a newer memserve wrote it" if version > FORMAT else "it is no longer supported"
            message = f"the metadata has format {version}, this memserve reads {FORMAT}: {age}"
            raise UserError(message, hint=_HINT, param="metadata")
        if _core.siphash128(_key_of(number), data[:_HEAD_SEALED_BYTES]) == seal:
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


def _frame_at(view: memoryview, at: int, key: bytes) -> _Frame | None:
    """The frame that begins at ``at``; None: there is none, or not a whole one."""
    if len(view) - at < _FRAME.size:
        return None
    magic, body_bytes, sequence, durable_bytes, seal = _FRAME.unpack_from(view, at)
    start, end = at + _FRAME.size, at + _FRAME.size + body_bytes
    if magic != _FRAME_MAGIC or end > len(view):
        return None
    sealed = bytes(view[at : at + _SEALED_BYTES]) + bytes(view[start:end])
    if _core.siphash128(key, sealed) != seal:
        return None
    return _Frame(sequence, durable_bytes, view[start:end], end)


def _vouched_bytes(data: bytes, view: memoryview, end: int, key: bytes) -> int:
    """How many bytes are safe according to the frames after ``end``, where reading stopped."""
    vouched_bytes = 0
    at = data.find(_FRAME_MAGIC, end)
    while at >= 0:
        frame = _frame_at(view, at, key)
        if frame is not None:
            vouched_bytes = max(vouched_bytes, frame.durable_bytes)
        at = data.find(_FRAME_MAGIC, at + 1 if frame is None else frame.end)
    return vouched_bytes
