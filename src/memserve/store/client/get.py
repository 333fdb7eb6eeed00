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


def get_value(line: StoreConnection, name: bytes, deadline_s: float) -> View | None:
    """One value. None: there is none."""
    session = line.session(deadline_s)
    if session.reader is None:
        data = fetch_values(line, [name], deadline_s)[0]
        return None if data is None else View(data, None)
    for _ in range(_TRIES):
        try:
            view = held_value(line, session, name)
        except _HoldsTooMuchError:
            break
        if view is not None:
            return view
        if session.reader is None:
            break
        key = session.keys([name])
        if session.reader.where(key) == b"\0" and not session.ended:
            return None
        session, lengths = bring(line, [name], deadline_s)
        if lengths[0] < 0:
            return None
    data = fetch_values(line, [name], deadline_s)[0]
    return None if data is None else View(data, None)


def held_value(line: StoreConnection, session: Session | None, name: bytes) -> View | None:
    """The value where it lies in the store's memory. None: it does not, or that memory is not mapped. Raises
    :class:`_HoldsTooMuchError`."""
    if session is None or session.reader is None:
        return None
    held = _hold(line, session, session.reader, session.keys([name]), session.told([name])[0])
    if held is None:
        return None
    address, nbytes, number = held
    view = View(mapped(address, nbytes, ClientPin(session, number)), session.still)
    session.pins[number] = weakref.ref(view)
    return view


def get_held_value(line: StoreConnection, name: bytes) -> View | None:
    """As :func:`get_value`, without a word to the store. None: it does not lie in memory, or that is not mapped."""
    try:
        return held_value(line, line.known_session, name)
    except _HoldsTooMuchError:
        return None


def _hold(
    line: StoreConnection, session: Session, reader: _core.TierReader, key: bytes, name: bytes
) -> tuple[int, int, int] | None:
    """Address, length and pin. None: not in memory; or the store has dropped this client, and is greeted again.
    Raises :class:`_HoldsTooMuchError`."""
    try:
        return reader.hold(key, name)
    except OSError as error:
        if error.errno == errno.ESTALE:
            line.renew(session)
        elif error.errno == errno.ENOBUFS:
            raise _HoldsTooMuchError from None
        else:
            raise
        return None


def bring(line: StoreConnection, names: Sequence[bytes], deadline_s: float) -> tuple[Session, list[int]]:
    """Have the store bring values into its memory; the length of each, -1: there is none."""
    lengths: list[int] = []
    session = line.session(deadline_s)
    for first in range(0, len(names), _KEYS_A_CALL):
        session, answer = _ask(line, names[first : first + _KEYS_A_CALL], False, 0, deadline_s)
        for code, length in zip(answer.codes, answer.lengths, strict=True):
            lengths.append(length if _is_there(line, code) else -1)
    return session, lengths


def bring_sealed(line: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[tuple[int, int]]:
    """As :func:`bring`, of KV blocks: of each its length, -1: there is none; and its seal."""
    found = list[tuple[int, int]]()
    for first in range(0, len(names), _KEYS_A_CALL):
        _, answer = _ask(line, names[first : first + _KEYS_A_CALL], False, 0, deadline_s)
        if len(answer.seals) != len(answer.codes):
            raise StoreUnavailable(f"the store at {line.address} seals nothing", hint="is it of this version?")
        for code, length, seal in zip(answer.codes, answer.lengths, answer.seals, strict=True):
            found.append((length, seal) if _is_there(line, code) else (-1, 0))
    return found


def _is_there(line: StoreConnection, code: int) -> bool:
    if code == StoreCode.NO_ROOM:
        hint = "release views, or try again"
        raise StoreUnavailable(f"all memory of the store at {line.address} is in use", hint=hint)
    if code == StoreCode.LATE:
        hint = "it is overloaded: try again, or with a longer timeout_s"
        raise StoreUnavailable(f"the store at {line.address} did not finish in time", hint=hint)
    return code in (StoreCode.DONE, StoreCode.PRESENT)


def fetch_values(line: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[memoryview | None]:
    """Values as copies of the caller's own, read-only, which came in messages. None: there is none."""
    found: list[memoryview | None] = [None] * len(names)
    wanted = list(range(len(names)))
    while wanted:
        asked = wanted[:_KEYS_A_CALL]
        session, answer = _ask(line, [names[number] for number in asked], True, 0, deadline_s)
        later = []
        for at, (number, code) in enumerate(zip(asked, answer.codes, strict=True)):
            if code == StoreCode.LATER:
                later.append(number)
            elif _is_there(line, code):
                found[number] = _whole(line, session, names[number], answer, at, deadline_s)
        if len(later) == len(asked):
            raise StoreUnavailable(f"the store at {line.address} sends nothing", hint="is it of this version?")
        wanted = later + wanted[len(asked) :]
    return found


def _whole(
    line: StoreConnection, session: Session, name: bytes, answer: StoreDone, at: int, deadline_s: float
) -> memoryview | None:
    """The value that ``answer`` has at ``at``, what follows its first part being asked for. None: it went meanwhile."""
    for _ in range(_TRIES):
        length, seal, part = answer.lengths[at], answer.seals[at], answer.values[at]
        if length > session.welcome.value_bytes_max:
            break
        if len(part) == length:
            value = memoryview(part)
        else:
            whole = bytearray(length)
            if not _fill(line, name, whole, part, seal, deadline_s):
                return None
            value = memoryview(whole).toreadonly()
        if _seal_of(value) == seal:
            return value
        session, answer = _ask(line, [name], True, 0, deadline_s)  # replaced meanwhile, or damaged on the way
        at = 0
        if not _is_there(line, answer.codes[0]):
            return None
    raise StoreUnavailable("a value came damaged, again and again", hint="`memserve store verify` looks for the cause")


def _fill(line: StoreConnection, name: bytes, whole: bytearray, part: bytes, seal: int, deadline_s: float) -> bool:
    """Ask for the parts behind ``part``. False: there is no such value any more."""
    end = 0
    while True:
        whole[end : end + len(part)] = part
        end += len(part)
        if end >= len(whole):
            del whole[end:]
            return True
        _, answer = _ask(line, [name], True, end, deadline_s)
        if not _is_there(line, answer.codes[0]):
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


def _ask(
    line: StoreConnection, names: Sequence[bytes], inline: bool, first_byte: int, deadline_s: float
) -> tuple[Session, StoreDone]:
    def ask(call: int, left_ns: int) -> AnyMessage:
        now = line.session(deadline_s)
        return StoreGet(call, now.keys(names), tuple(now.told(names)), inline, left_ns, first_byte)

    session, answer = line.call(ask, deadline_s)
    count = len(names)
    if not isinstance(answer, StoreDone) or len(answer.codes) != count or len(answer.lengths) != count:
        raise StoreUnavailable(f"the store at {line.address} answered something else", hint="is it of this version?")
    if inline and not len(answer.values) == len(answer.seals) == count:
        raise StoreUnavailable(f"the store at {line.address} answered something else", hint="is it of this version?")
    return session, answer


# -- into the caller's buffers


def get_values_into(
    line: StoreConnection, names: Sequence[bytes], buffers: Sequence[memoryview], threads: int, deadline_s: float
) -> list[int]:
    """Bytes written to each buffer; -1: there is no such value. Raises :class:`UserError` when a buffer is too small,
    before anything is written."""
    session = line.session(deadline_s)
    if session.reader is None:
        values = fetch_values(line, names, deadline_s)
        _check_room(names, buffers, [-1 if value is None else len(value) for value in values])
        return [_written(value, buffer) for value, buffer in zip(values, buffers, strict=True)]
    copied = _copied_at_once(line, session, session.reader, names, buffers, threads)
    if copied is not None:
        return copied
    lengths = _lengths(line, names, deadline_s)
    _check_room(names, buffers, lengths)
    written = [-1] * len(names)
    for some in _portions(lengths):
        _copy(line, some, names, buffers, written, threads, deadline_s)
    return written


def _copied_at_once(
    line: StoreConnection,
    session: Session,
    reader: _core.TierReader,
    names: Sequence[bytes],
    buffers: Sequence[memoryview],
    threads: int,
) -> list[int] | None:
    """Bytes written to each buffer, where all values are in memory and fit: each is looked up once. None: they are not,
    or are too many for that."""
    try:
        return reader.copy_all(session.keys(names), session.told(names), list(buffers), threads)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        line.renew(session)
        return None


def _lengths(line: StoreConnection, names: Sequence[bytes], deadline_s: float) -> list[int]:
    """Of each value, -1: there is none. Those on a disk are brought into memory."""
    session = line.session(deadline_s)
    lengths, missed = [-1] * len(names), list(range(len(names)))
    if session.reader is not None:
        missed = _lengths_in_memory(line, session, session.reader, names, lengths)
    if missed:
        _, brought = bring(line, [names[number] for number in missed], deadline_s)
        for number, length in zip(missed, brought, strict=True):
            lengths[number] = length
    return lengths


def _lengths_in_memory(
    line: StoreConnection, session: Session, reader: _core.TierReader, names: Sequence[bytes], lengths: list[int]
) -> list[int]:
    """Fill ``lengths`` from what lies in memory; the numbers of those that may lie elsewhere."""
    everything, keys = session.told(names), session.keys(names)
    try:
        lengths[:] = reader.lengths(keys, everything)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        line.renew(session)
    absent = [number for number, length in enumerate(lengths) if length < 0]
    if session.ended or not absent:
        return absent
    where = reader.where(b"".join(keys[16 * number : 16 * number + 16] for number in absent))
    return [number for number, place in zip(absent, where, strict=True) if place]


def _portions(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of values that are there, as many together as are copied under one look at the store's memory."""
    some, nbytes = list[int](), 0
    for number, length in enumerate(lengths):
        if length < 0:
            continue
        if some and (nbytes + length > _COPIED_AT_ONCE_BYTES or len(some) >= _KEYS_A_COPY):
            yield some
            some, nbytes = [], 0
        some.append(number)
        nbytes += length
    if some:
        yield some


def _copy(
    line: StoreConnection,
    some: list[int],
    names: Sequence[bytes],
    buffers: Sequence[memoryview],
    written: list[int],
    threads: int,
    deadline_s: float,
) -> None:
    """Fill ``written`` at ``some``. What has left memory since it was looked at is brought again, or sent."""
    for _ in range(_TRIES):
        session, those = line.session(deadline_s), [names[number] for number in some]
        if session.reader is None:
            break
        keys = session.keys(those)
        targets = [buffers[number] for number in some]
        try:
            lengths = session.reader.copy(keys, session.told(those), targets, threads)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                break
            if error.errno != errno.ESTALE:
                raise
            line.renew(session)
            continue
        if not session.still():
            line.renew(session)  # it was dropped: another value may have been read
            continue
        _check_room(those, targets, lengths)  # one was replaced by a longer one meanwhile
        for number, length in zip(some, lengths, strict=True):
            written[number] = length
        some = [number for number in some if written[number] < 0]
        if not some:
            return
        _, brought = bring(line, [names[number] for number in some], deadline_s)
        some = [number for number, length in zip(some, brought, strict=True) if length >= 0]
        if not some:
            return
    values, targets = fetch_values(line, [names[n] for n in some], deadline_s), [buffers[n] for n in some]
    lengths = [-1 if value is None else len(value) for value in values]
    _check_room([names[n] for n in some], targets, lengths)
    for number, value, target in zip(some, values, targets, strict=True):
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
