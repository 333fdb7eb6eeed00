"""Putting values: small ones inside of the message, larger ones in the client's arena until the store has read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.units import MIB, human_bytes
from memserve.protocol.codec import FRAME_BYTES_MAX
from memserve.protocol.messages import AnyMessage
from memserve.protocol.store import CALL_KEYS_MAX, INLINE_BYTES_MAX, StoreCode, StoreDone, StorePair, StorePut
from memserve.store.client.connection import Session, StoreConnection
from memserve.store.client.memory import Staged

INLINE_BYTES = 16 * 1024
"""Values up to here travel inside of the message, also on one host: a copy less to be waited for."""
_BATCH_BYTES = 16 * MIB
"""Of one call: the store reads one batch while the next is filled by another thread, and a deadline holds for each."""
_BATCH_KEYS = 4096
_ALONE_BYTES_MAX = FRAME_BYTES_MAX - MIB
"""Of a value inside of a message that has no other."""
_TAKEN = (StoreCode.DONE, StoreCode.PRESENT, StoreCode.NO_ROOM, StoreCode.TOO_LARGE)

Value = memoryview | Staged


@dataclass(slots=True)
class _Batch:
    """One call's worth: which of the pairs, what is said of each, and the pieces of the arena that they lie in."""

    numbers: list[int] = field(default_factory=list)
    pairs: list[StorePair] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    nbytes: int = 0
    message_bytes: int = 0

    def add_pair(self, number: int, pair: StorePair) -> None:
        """One more."""
        self.numbers.append(number)
        self.pairs.append(pair)
        self.nbytes += pair.length
        self.message_bytes += len(pair.name) + len(pair.data or b"")

    @property
    def is_full(self) -> bool:
        """Whether the next pair belongs into another batch."""
        return self.nbytes >= _BATCH_BYTES or len(self.pairs) >= min(_BATCH_KEYS, CALL_KEYS_MAX)


def put_values(
    connection: StoreConnection, names: Sequence[bytes], values: Sequence[Value], overwrite: bool, deadline_s: float
) -> list[bool]:
    """Whether the store has taken each value. Raises :class:`UserError`, :class:`StoreUnavailable`."""
    accepted = [False] * len(names)
    session = connection.wait_for_session(deadline_s)
    for value in values:
        _check_fits(connection, session, value)
    keys, names = session.store_keys(names), session.stored_names(names)
    for batch in _batches(connection, session, names, keys, values, deadline_s):
        codes = _send_batch(connection, batch, overwrite, deadline_s)
        again = []
        for number, code in zip(batch.numbers, codes, strict=True):
            accepted[number] = code == StoreCode.DONE
            if code == StoreCode.UNREADABLE:
                again.append(number)
            elif code not in _TAKEN:
                raise _put_error(connection, code)
        for number in again:  # the store cannot read this process's memory: inside of messages, then
            key = keys[16 * number : 16 * number + 16]
            accepted[number] = _put_inline(connection, names[number], key, values[number], overwrite, deadline_s)
    return accepted


def _check_fits(connection: StoreConnection, session: Session, value: Value) -> None:
    if isinstance(value, Staged):
        if value.offset_in(connection.staging) is None:
            raise UserError("this memory is not of this client, or was released", hint="client.allocate(nbytes)")
    elif session.reader is not None and connection.staging.nbytes < value.nbytes <= session.welcome.value_bytes_max:
        message = (
            f"a value of {human_bytes(value.nbytes)} in staging memory of {human_bytes(connection.staging.nbytes)}"
        )
        raise UserError(message, hint="StoreClient(..., staging_bytes=N) with room for the largest", param="value")


def _batches(
    connection: StoreConnection,
    session: Session,
    names: Sequence[bytes],
    keys: bytes,
    values: Sequence[Value],
    deadline_s: float,
) -> Iterator[_Batch]:
    """Values in order, but for those that are too long for the store or for a message. What was yielded is the
    receiver's, its pieces of the arena as well."""
    in_arena = session.reader is not None
    longest = session.welcome.value_bytes_max if in_arena else min(_ALONE_BYTES_MAX, session.welcome.value_bytes_max)
    batch = _Batch()
    try:
        for number, (name, value) in enumerate(zip(names, values, strict=True)):
            nbytes = len(value)
            if nbytes > longest:
                continue
            inside = 0 if in_arena and nbytes > INLINE_BYTES else nbytes
            if batch.pairs and (batch.is_full or batch.message_bytes + inside > INLINE_BYTES_MAX):
                full, batch = batch, _Batch()
                yield full
            offset, data = 0, None
            if isinstance(value, Staged) and in_arena:
                offset = value.offset_in(connection.staging) or 0
            elif in_arena and nbytes > INLINE_BYTES:
                piece = connection.staging.take_piece(nbytes, 0.0 if batch.pairs else deadline_s)
                if piece is None and batch.pairs:
                    full, batch = batch, _Batch()
                    yield full
                    piece = connection.staging.take_piece(nbytes, deadline_s)
                if piece is None:
                    hint = "many threads put at once, or the store is slow: try again, or with more staging_bytes"
                    raise StoreUnavailable("no room in the client's staging memory", hint=hint)
                offset = piece
                batch.pieces.append(offset)
                connection.staging.bytes[offset : offset + nbytes] = np.frombuffer(_bytes_of(value), np.uint8)
            else:
                data = bytes(_bytes_of(value))
            batch.add_pair(number, StorePair(keys[16 * number : 16 * number + 16], name, nbytes, offset, data))
        if batch.pairs:
            full, batch = batch, _Batch()
            yield full
    finally:
        for offset in batch.pieces:
            connection.staging.return_piece(offset)


def _bytes_of(value: Value) -> memoryview:
    return value.data if isinstance(value, Staged) else value


def _send_batch(connection: StoreConnection, batch: _Batch, overwrite: bool, deadline_s: float) -> bytes:
    """A code for each pair; the pieces go back when the store is done with them, whatever happens."""
    pairs, pieces = tuple(batch.pairs), batch.pieces

    def ask(call: int, left_ns: int) -> AnyMessage:
        return StorePut(call, pairs, overwrite, left_ns)

    def give_back() -> None:
        for offset in pieces:
            connection.staging.return_piece(offset)

    _, answer = connection.call_store(ask, deadline_s, give_back)
    if not isinstance(answer, StoreDone) or len(answer.codes) != len(pairs):
        raise StoreUnavailable(
            f"the store at {connection.address} answered something else", hint="is it of this version?"
        )
    return answer.codes


def _put_inline(
    connection: StoreConnection, name: bytes, key: bytes, value: Value, overwrite: bool, deadline_s: float
) -> bool:
    data = _bytes_of(value)
    if data.nbytes > _ALONE_BYTES_MAX:
        return False
    batch = _Batch()
    batch.add_pair(0, StorePair(key, name, data.nbytes, data=bytes(data)))
    return _send_batch(connection, batch, overwrite, deadline_s)[0] == StoreCode.DONE


def _put_error(connection: StoreConnection, code: int) -> StoreUnavailable:
    if code == StoreCode.LATE:
        hint = "it is overloaded: try again, or with a longer timeout_s"
        return StoreUnavailable(f"the store at {connection.address} did not finish in time", hint=hint)
    return StoreUnavailable(
        f"the store at {connection.address} refused a value (code {code})", hint="is it of this version?"
    )
