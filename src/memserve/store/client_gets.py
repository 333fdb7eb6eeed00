"""Values that clients ask for: brought into memory, where clients of this host read them, or sent in a message."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from memserve.kv_transfer.context import Deadlines
from memserve.store.client import Client
from memserve.store.events import Piece, SendValues, ValuesSent
from memserve.store.jobs import Jobs
from memserve.store.loads import Loads
from memserve.store.pool import KV_SCOPE
from memserve.store.values import Values
from memserve.store_messages import INLINE_BYTES_MAX, KEY_BYTES, StoreCode, StoreDone, StoreGet

if TYPE_CHECKING:
    from memserve._core import Place


@dataclass(slots=True, eq=False)
class _Get:
    client: Client
    message: StoreGet
    codes: bytearray
    deadline_ns: int
    places: dict[int, Place] = field(default_factory=dict)
    """Of the keys that are in memory, a reference each."""
    awaited: int = 1
    over: bool = False


class Gets:
    """All gets under way."""

    def __init__(self, values: Values, loads: Loads, jobs: Jobs) -> None:
        self._values = values
        self._loads = loads
        self._jobs = jobs
        self._open: dict[_Get, None] = {}
        self._sending: dict[int, list[int]] = {}  # job -> extents, a reference each
        self._deadlines = Deadlines()

    def begin(self, client: Client, message: StoreGet, now: int) -> None:
        """Hold what is in memory, have the rest brought there."""
        get = _Get(client, message, bytearray([StoreCode.LATE]) * len(message.names), now + message.deadline_in_ns)
        if len(message.keys) != KEY_BYTES * len(message.names):
            get.codes[:] = bytes([StoreCode.BAD_CALL]) * len(message.names)
            self._jobs.send(client.peer, StoreDone(message.call, bytes(get.codes)))
            return
        self._open[get] = None
        client.calls.add(message.call)
        for index in range(len(message.names)):
            key = _key(message, index)
            known = self._values.look(key)
            if known is None:
                get.codes[index] = StoreCode.ABSENT
            elif known.scope != client.scope or known.name not in (None, message.names[index]):
                get.codes[index] = StoreCode.BAD_CALL
            elif self._values.is_ready(key):
                self._take(get, index, now)
            else:
                get.awaited += 1
                self._loads.want(key, partial(self._loaded, get, index), now)
        self._one_less(get)
        if not get.over:
            self._deadlines.add(get)

    def _take(self, get: _Get, index: int, now: int) -> None:
        place = self._values.hold(_key(get.message, index), now)
        if place is None:
            get.codes[index] = StoreCode.ABSENT
        elif place.scope != get.client.scope or place.name != get.message.names[index]:
            get.codes[index] = StoreCode.BAD_CALL
            self._values.tier.release(place.offset)
        else:
            get.codes[index] = StoreCode.DONE
            get.places[index] = place

    def _loaded(self, get: _Get, index: int, ok: bool, now: int) -> None:
        if get.over:
            return
        if ok:
            self._take(get, index, now)
        elif _key(get.message, index) in self._values.disks:
            get.codes[index] = StoreCode.LATE  # no room, or the disk is busy: it is not gone
        else:
            get.codes[index] = StoreCode.ABSENT
        self._one_less(get)

    def _one_less(self, get: _Get) -> None:
        get.awaited -= 1
        if get.awaited == 0:
            self._answer(get)

    def _answer(self, get: _Get) -> None:
        self._end(get)
        message, counters = get.message, self._values.counters
        counters.gets += len(get.places)
        lengths = tuple(get.places[index].length if index in get.places else 0 for index in range(len(get.codes)))
        if not message.inline:
            is_kv = get.client.scope == KV_SCOPE
            answer = StoreDone(message.call, bytes(get.codes), lengths, self._seals(get) if is_kv else ())
            self._give_back(get)
            self._jobs.send(get.client.peer, answer)
            return
        room = INLINE_BYTES_MAX
        pieces: list[Piece] = []
        for index, place in sorted(get.places.items()):
            begin = min(message.first_byte, place.length)
            wanted = place.length - begin
            if wanted > room and pieces:
                get.codes[index] = StoreCode.LATER
                continue
            pieces.append(Piece(index, place.offset + begin, min(wanted, room)))
            room -= min(wanted, room)
        counters.get_bytes += INLINE_BYTES_MAX - room
        answer = StoreDone(message.call, bytes(get.codes), lengths, self._seals(get), (b"",) * len(get.codes))
        job = self._jobs.new()
        self._sending[job] = [place.offset for place in get.places.values()]
        get.places.clear()
        self._jobs.ask(SendValues(job, get.client.peer, answer, tuple(pieces)))

    @staticmethod
    def _seals(get: _Get) -> tuple[int, ...]:
        return tuple(get.places[index].seal if index in get.places else 0 for index in range(len(get.codes)))

    def _end(self, get: _Get) -> None:
        get.over = True
        del self._open[get]
        get.client.calls.discard(get.message.call)

    def _give_back(self, get: _Get) -> None:
        for place in get.places.values():
            self._values.tier.release(place.offset)
        get.places.clear()

    def sent(self, event: ValuesSent) -> None:
        """The host has read the values of an answer."""
        for extent in self._sending.pop(event.job):
            self._values.tier.release(extent)

    def drop(self, client: Client) -> None:
        """The client is gone."""
        for get in [get for get in self._open if get.client is client]:
            self._end(get)
            self._give_back(get)

    def advance(self, now: int) -> None:
        """Answer the gets whose time is over with what has come."""
        while (get := self._deadlines.pop_due(now)) is not None:
            assert isinstance(get, _Get)
            self._answer(get)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling."""
        return self._deadlines.next_ns()

    def references(self) -> list[int]:
        """Extents with a reference of a get."""
        held = [place.offset for get in self._open for place in get.places.values()]
        return held + [extent for extents in self._sending.values() for extent in extents]


def _key(message: StoreGet, index: int) -> bytes:
    return message.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]
