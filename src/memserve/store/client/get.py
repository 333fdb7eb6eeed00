"""Getting values: in place where the store's memory is mapped, else through messages, compared with their seals."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from memserve import _core
from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.units import MIB
from memserve.protocol.messages import AnyMessage
from memserve.protocol.store import StoreCode, StoreDone, StoreGet
from memserve.store.client.connection import Session, StoreConnection
from memserve.store.client.memory import ClientPin, View, mapped

_KEYS_A_CALL = 4096
_TRIES = 3
"""A value that was brought into memory may have left it before it was held."""
_COPIED_AT_ONCE_BYTES = 64 * MIB
_KEYS_A_COPY = 256


class _HoldsTooMuchError(Exception):
    """This client's views hold as much of the store's memory as they may: the next values come as copies."""


def get_value(connection: StoreConnection, name: bytes, deadline_s: float) -> View | None:
    """One value. None: there is none."""
    session = connection.wait_for_session(deadline_s)
    if session.reader is None:
        data = fetch_values(connection, [name], deadline_s)[0]
        return None if data is None else View(data, None)
    for _ in range(_TRIES):
        try:
            view = held_value(connection, session, name)
        except _HoldsTooMuchError:
            break
        if view is not None:
            return view
        if session.reader is None:
            break
        key = session.store_keys([name])
        if session.reader.where(key) == b"\0" and not session.is_over:
            return None
        session, lengths = bring(connection, [name], deadline_s)
        if lengths[0] < 0:
            return None
    data = fetch_values(connection, [name], deadline_s)[0]
    return None if data is None else View(data, None)


def held_value(connection: StoreConnection, session: Session | None, name: bytes) -> View | None:
    """The value where it lies in the store's memory. None: it does not, or that memory is not mapped. Raises
    :class:`_HoldsTooMuchError`."""
    if session is None or session.reader is None:
        return None
    pinned = _hold_value(
        connection, session, session.reader, session.store_keys([name]), session.stored_names([name])[0]
    )
    if pinned is None:
        return None
    address, nbytes, number = pinned
    view = View(mapped(address, nbytes, ClientPin(session, number)), session.are_pins_valid)
    session.pins[number] = weakref.ref(view)
    return view


def get_held_value(connection: StoreConnection, name: bytes) -> View | None:
    """As :func:`get_value`, without a word to the store. None: it does not lie in memory, or that is not mapped."""
    try:
        return held_value(connection, connection.known_session, name)
    except _HoldsTooMuchError:
        return None


def _hold_value(
    connection: StoreConnection, session: Session, reader: _core.TierReader, key: bytes, name: bytes
) -> tuple[int, int, int] | None:
    """Address, length and pin. None: not in memory; or the store has dropped this client, and gets a hello again.
    Raises :class:`_HoldsTooMuchError`."""
    try:
        return reader.hold(key, name)
    except OSError as error:
        if error.errno == errno.ESTALE:
            connection.renew_session(session)
        elif error.errno == errno.ENOBUFS:
            raise _HoldsTooMuchError from None
        else:
            raise
        return None


def bring(connection: StoreConnection, names: Sequence[bytes], deadline_s: float) -> tuple[Session, list[int]]:
    """Have the store bring values into its memory; the length of each, -1: there is none."""
    lengths: list[int] = []
    session = connection.wait_for_session(deadline_s)
    for first in range(0, len(names), _KEYS_A_CALL):
        session, answer = _query_values(connection, names[first : first + _KEYS_A_CALL], False, 0, deadline_s)
        for code, length in zip(answer.codes, answer.lengths, strict=True):
            lengths.append(length if _is_there(connection, code) else -1)
    return session, lengths


def bring_sealed(connection: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[tuple[int, int]]:
    """As :func:`bring`, of KV blocks: of each its length, -1: there is none; and its seal."""
    results = list[tuple[int, int]]()
    for first in range(0, len(names), _KEYS_A_CALL):
        _, answer = _query_values(connection, names[first : first + _KEYS_A_CALL], False, 0, deadline_s)
        if len(answer.seals) != len(answer.codes):
            raise StoreUnavailable(f"the store at {connection.address} seals nothing", hint="is it of this version?")
        for code, length, seal in zip(answer.codes, answer.lengths, answer.seals, strict=True):
            results.append((length, seal) if _is_there(connection, code) else (-1, 0))
    return results


def _is_there(connection: StoreConnection, code: int) -> bool:
    if code == StoreCode.NO_ROOM:
        hint = "release views, or try again"
        raise StoreUnavailable(f"all memory of the store at {connection.address} is in use", hint=hint)
    if code == StoreCode.LATE:
        hint = "it is overloaded: try again, or with a longer timeout_s"
        raise StoreUnavailable(f"the store at {connection.address} did not finish in time", hint=hint)
    return code in (StoreCode.DONE, StoreCode.PRESENT)


def fetch_values(connection: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[memoryview | None]:
    """Values as copies of the caller's own, read-only, which came in messages. None: there is none."""
    values: list[memoryview | None] = [None] * len(names)
    numbers_left = list(range(len(names)))
    while numbers_left:
        numbers = numbers_left[:_KEYS_A_CALL]
        session, answer = _query_values(connection, [names[number] for number in numbers], True, 0, deadline_s)
        later = []
        for position, (number, code) in enumerate(zip(numbers, answer.codes, strict=True)):
            if code == StoreCode.LATER:
                later.append(number)
            elif _is_there(connection, code):
                values[number] = _whole_value(connection, session, names[number], answer, position, deadline_s)
        if len(later) == len(numbers):
            raise StoreUnavailable(f"the store at {connection.address} sends nothing", hint="is it of this version?")
        numbers_left = later + numbers_left[len(numbers) :]
    return values


def _whole_value(
    connection: StoreConnection, session: Session, name: bytes, answer: StoreDone, index: int, deadline_s: float
) -> memoryview | None:
    """The value that ``answer`` has at ``index``, what follows its first part being asked for. None: it went
    meanwhile."""
    for _ in range(_TRIES):
        length, seal, part = answer.lengths[index], answer.seals[index], answer.values[index]
        if length > session.welcome.value_bytes_max:
            break
        if len(part) == length:
            value = memoryview(part)
        else:
            whole = bytearray(length)
            if not _fill_value(connection, name, whole, part, seal, deadline_s):
                return None
            value = memoryview(whole).toreadonly()
        if _seal_of(value) == seal:
            return value
        session, answer = _query_values(
            connection, [name], True, 0, deadline_s
        )  # replaced meanwhile, or damaged on the way
        index = 0
        if not _is_there(connection, answer.codes[0]):
            return None
    raise StoreUnavailable("a value came damaged, again and again", hint="`memserve store verify` looks for the cause")


def _fill_value(
    connection: StoreConnection, name: bytes, whole: bytearray, part: bytes, seal: int, deadline_s: float
) -> bool:
    """Ask for the parts behind ``part``. False: there is no such value any more."""
    end = 0
    while True:
        whole[end : end + len(part)] = part
        end += len(part)
        if end >= len(whole):
            del whole[end:]
            return True
        _, answer = _query_values(connection, [name], True, end, deadline_s)
        if not _is_there(connection, answer.codes[0]):
            return False
        part = answer.values[0][: len(whole) - end]
        if not part or answer.seals[0] != seal:
            return True  # its seal will not fit


def _seal_of(value: memoryview) -> int:
    """As the store has computed it of the whole value; 0 for an empty one."""
    if not value.nbytes:
        return 0
    array = np.frombuffer(value, np.uint8)
    return int(_core.seal_ranges(array.ctypes.data, np.zeros(1, np.int64), value.nbytes)[0])


def _query_values(
    connection: StoreConnection, names: Sequence[bytes], inline: bool, first_byte: int, deadline_s: float
) -> tuple[Session, StoreDone]:
    def ask(call: int, left_ns: int) -> AnyMessage:
        now = connection.wait_for_session(deadline_s)
        return StoreGet(call, now.store_keys(names), tuple(now.stored_names(names)), inline, left_ns, first_byte)

    session, answer = connection.call_store(ask, deadline_s)
    count = len(names)
    if not isinstance(answer, StoreDone) or len(answer.codes) != count or len(answer.lengths) != count:
        raise StoreUnavailable(
            f"the store at {connection.address} answered something else", hint="is it of this version?"
        )
    if inline and not len(answer.values) == len(answer.seals) == count:
        raise StoreUnavailable(
            f"the store at {connection.address} answered something else", hint="is it of this version?"
        )
    return session, answer


# -- into the caller's buffers


def get_values_into(
    connection: StoreConnection, names: Sequence[bytes], buffers: Sequence[memoryview], threads: int, deadline_s: float
) -> list[int]:
    """Bytes written to each buffer; -1: there is no such value. Raises :class:`UserError` when a buffer is too small,
    before anything is written."""
    session = connection.wait_for_session(deadline_s)
    if session.reader is None:
        values = fetch_values(connection, names, deadline_s)
        _check_room(names, buffers, [-1 if value is None else len(value) for value in values])
        return [_written(value, buffer) for value, buffer in zip(values, buffers, strict=True)]
    copied = _copied_at_once(connection, session, session.reader, names, buffers, threads)
    if copied is not None:
        return copied
    lengths = _lengths(connection, names, deadline_s)
    _check_room(names, buffers, lengths)
    written = [-1] * len(names)
    for portion in _portions(lengths):
        _copy_values(connection, portion, names, buffers, written, threads, deadline_s)
    return written


def _copied_at_once(
    connection: StoreConnection,
    session: Session,
    reader: _core.TierReader,
    names: Sequence[bytes],
    buffers: Sequence[memoryview],
    threads: int,
) -> list[int] | None:
    """Bytes written to each buffer, where all values are in memory and fit: each is looked up once. None: they are not,
    or are too many for that."""
    try:
        return reader.copy_all(session.store_keys(names), session.stored_names(names), list(buffers), threads)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        connection.renew_session(session)
        return None


def _lengths(connection: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[int]:
    """Of each value, -1: there is none. Those on a disk are brought into memory."""
    session = connection.wait_for_session(deadline_s)
    lengths, missed = [-1] * len(names), list(range(len(names)))
    if session.reader is not None:
        missed = _lengths_in_memory(connection, session, session.reader, names, lengths)
    if missed:
        _, brought = bring(connection, [names[number] for number in missed], deadline_s)
        for number, length in zip(missed, brought, strict=True):
            lengths[number] = length
    return lengths


def _lengths_in_memory(
    connection: StoreConnection, session: Session, reader: _core.TierReader, names: Sequence[bytes], lengths: list[int]
) -> list[int]:
    """Fill ``lengths`` from what lies in memory; the numbers of those that may lie elsewhere."""
    everything, keys = session.stored_names(names), session.store_keys(names)
    try:
        lengths[:] = reader.lengths(keys, everything)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        connection.renew_session(session)
    absent = [number for number, length in enumerate(lengths) if length < 0]
    if session.is_over or not absent:
        return absent
    locations = reader.where(b"".join(keys[16 * number : 16 * number + 16] for number in absent))
    return [number for number, place in zip(absent, locations, strict=True) if place]


def _portions(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of values that are there, as many together as are copied under one look at the store's memory."""
    numbers, nbytes = list[int](), 0
    for number, length in enumerate(lengths):
        if length < 0:
            continue
        if numbers and (nbytes + length > _COPIED_AT_ONCE_BYTES or len(numbers) >= _KEYS_A_COPY):
            yield numbers
            numbers, nbytes = [], 0
        numbers.append(number)
        nbytes += length
    if numbers:
        yield numbers


def _copy_values(
    connection: StoreConnection,
    numbers: list[int],
    names: Sequence[bytes],
    buffers: Sequence[memoryview],
    written: list[int],
    threads: int,
    deadline_s: float,
) -> None:
    """Fill ``written`` at ``numbers``. What has left memory since it was looked at is brought again, or sent."""
    for _ in range(_TRIES):
        session, portion_names = connection.wait_for_session(deadline_s), [names[number] for number in numbers]
        if session.reader is None:
            break
        keys = session.store_keys(portion_names)
        targets = [buffers[number] for number in numbers]
        try:
            lengths = session.reader.copy(keys, session.stored_names(portion_names), targets, threads)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                break
            if error.errno != errno.ESTALE:
                raise
            connection.renew_session(session)
            continue
        if not session.are_pins_valid():
            connection.renew_session(session)  # it was dropped: another value may have been read
            continue
        _check_room(portion_names, targets, lengths)  # one was replaced by a longer one meanwhile
        for number, length in zip(numbers, lengths, strict=True):
            written[number] = length
        numbers = [number for number in numbers if written[number] < 0]
        if not numbers:
            return
        _, brought = bring(connection, [names[number] for number in numbers], deadline_s)
        numbers = [number for number, length in zip(numbers, brought, strict=True) if length >= 0]
        if not numbers:
            return
    values, targets = fetch_values(connection, [names[n] for n in numbers], deadline_s), [buffers[n] for n in numbers]
    lengths = [-1 if value is None else len(value) for value in values]
    _check_room([names[n] for n in numbers], targets, lengths)
    for number, value, target in zip(numbers, values, targets, strict=True):
        written[number] = _written(value, target)


def _check_room(names: Sequence[bytes], buffers: Sequence[memoryview], lengths: Sequence[int]) -> None:
    for name, buffer, length in zip(names, buffers, lengths, strict=True):
        if length > buffer.nbytes:
            message = f"the value of {name[:40]!r} has {length} bytes, its buffer {buffer.nbytes}"
            raise UserError(message, hint="give each value a buffer of its length or more", param="pairs")


def _written(value: memoryview | None, buffer: memoryview) -> int:
    if value is None:
        return -1
    if value.nbytes:
        buffer[: value.nbytes] = value
    return value.nbytes
