"""Values that clients put: copied by the host out of the client's memory, or out of the message, then published.

Values that clients ask for: brought into memory, where clients of this host read them, or sent in a message.

One client of a store.

Answers to calls that have forgotten something: given once a restart knows of it.

A value that was deleted or replaced lies on a disk until its space is written again. What says that it is gone is
written as well, a moment later; a process that is killed in between would bring the value back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memserve.kv.transfer.context import Deadlines
from memserve.protocol.peers import Peer
from memserve.protocol.store import (
    INLINE_BYTES_MAX,
    KEY_BYTES,
    StoreCode,
    StoreDone,
    StoreGet,
    StoreHello,
    StorePair,
    StorePut,
    StoreWelcome,
)
from memserve.store.machine.block_pool import KV_SCOPE
from memserve.store.machine.events import Jobs, Piece, SendValues, TakeValues, ValuePart, ValuesSent, ValuesTaken
from memserve.store.machine.loads import Loads
from memserve.store.machine.values import Values

if TYPE_CHECKING:
    from memserve._core import Place


@dataclass(slots=True, eq=False)
class Client:
    """One client."""

    peer: Peer
    number: int
    hello: StoreHello
    scope: int
    welcome: StoreWelcome
    last_seen_ns: int
    calls: set[int] = field(default_factory=set)
    """Under way."""
    listing: list[bytes] = field(default_factory=list)
    is_gone: bool = False


@dataclass(slots=True, eq=False)
class _Get:
    client: Client
    message: StoreGet
    codes: bytearray
    deadline_ns: int
    places: dict[int, Place] = field(default_factory=dict)
    """Of the keys that are in memory, a reference each."""
    loads_awaited: int = 1
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

    def begin_get(self, client: Client, message: StoreGet, now_ns: int) -> None:
        """Hold what is in memory, have the rest brought there."""
        get = _Get(client, message, bytearray([StoreCode.LATE]) * len(message.names), now_ns + message.deadline_in_ns)
        # clients are not trusted: a call that does not fit together is answered, not believed
        if len(message.keys) != KEY_BYTES * len(message.names):
            get.codes[:] = bytes([StoreCode.BAD_CALL]) * len(message.names)
            self._jobs.send_message(client.peer, StoreDone(message.call, bytes(get.codes)))
            return
        self._open[get] = None
        client.calls.add(message.call)
        to_load = []  # behind all that are held: what is brought up takes the room of what is not
        for index in range(len(message.names)):
            key = _key(message, index)
            value = self._values.find_value(key)
            if value is None:
                get.codes[index] = StoreCode.ABSENT
            # a hash names the value; the name behind it proves that it is this one and of this tenant
            elif value.scope != client.scope or value.name not in (None, message.names[index]):
                get.codes[index] = StoreCode.BAD_CALL
            elif self._values.is_ready(key):
                self._take_value(get, index, now_ns)
            else:
                to_load.append(index)
        get.loads_awaited += len(to_load)
        for index in to_load:
            self._loads.request_load(_key(message, index), partial(self._on_loaded, get, index), now_ns)
        self._count_down(get)
        if not get.over:
            self._deadlines.add(get)

    def _take_value(self, get: _Get, index: int, now_ns: int) -> None:
        place = self._values.hold_value(_key(get.message, index), now_ns)
        if place is None:
            get.codes[index] = StoreCode.ABSENT
        elif place.scope != get.client.scope or place.name != get.message.names[index]:
            get.codes[index] = StoreCode.BAD_CALL
            self._values.tier.release(place.offset)
        else:
            get.codes[index] = StoreCode.DONE
            get.places[index] = place

    def _on_loaded(self, get: _Get, index: int, ok: bool, now_ns: int) -> None:
        if get.over:
            return
        if ok:
            self._take_value(get, index, now_ns)
        elif _key(get.message, index) in self._values.disks:
            get.codes[index] = StoreCode.LATE  # no room, or the disk is busy: it is not gone
        else:
            get.codes[index] = StoreCode.ABSENT
        self._count_down(get)

    def _count_down(self, get: _Get) -> None:
        get.loads_awaited -= 1
        if get.loads_awaited == 0:
            self._send_answer(get)

    def _send_answer(self, get: _Get) -> None:
        self._end_get(get)
        message, counters = get.message, self._values.counters
        counters.gets += len(get.places)
        lengths = tuple(get.places[index].length if index in get.places else 0 for index in range(len(get.codes)))
        if not message.inline:
            is_kv = get.client.scope == KV_SCOPE
            answer = StoreDone(message.call, bytes(get.codes), lengths, self._checksums(get) if is_kv else ())
            self._release_places(get)
            self._jobs.send_message(get.client.peer, answer)
            return
        room = INLINE_BYTES_MAX
        pieces: list[Piece] = []
        for index, place in sorted(get.places.items()):
            begin = min(message.first_byte, place.length)
            # one message holds so much: the first value is cut where it must be, later ones are asked for again
            bytes_wanted = place.length - begin
            if bytes_wanted > room and pieces:
                get.codes[index] = StoreCode.LATER
                continue
            pieces.append(Piece(index, place.offset + begin, min(bytes_wanted, room)))
            room -= min(bytes_wanted, room)
        counters.get_bytes += INLINE_BYTES_MAX - room
        answer = StoreDone(message.call, bytes(get.codes), lengths, self._checksums(get), (b"",) * len(get.codes))
        job = self._jobs.next_job()
        # the host reads them later: until then eviction must leave them where they are
        self._sending[job] = [place.offset for place in get.places.values()]
        get.places.clear()
        self._jobs.add_action(SendValues(job, get.client.peer, answer, tuple(pieces)))

    @staticmethod
    def _checksums(get: _Get) -> tuple[int, ...]:
        return tuple(get.places[index].seal if index in get.places else 0 for index in range(len(get.codes)))

    def _end_get(self, get: _Get) -> None:
        get.over = True
        del self._open[get]
        get.client.calls.discard(get.message.call)

    def _release_places(self, get: _Get) -> None:
        for place in get.places.values():
            self._values.tier.release(place.offset)
        get.places.clear()

    def on_values_sent(self, event: ValuesSent) -> None:
        """The host has read the values of an answer."""
        for extent in self._sending.pop(event.job):
            self._values.tier.release(extent)

    def drop_client(self, client: Client) -> None:
        for get in [get for get in self._open if get.client is client]:
            self._end_get(get)
            self._release_places(get)

    def expire_gets(self, now_ns: int) -> None:
        """Answer the gets whose time is over with what has come."""
        while (get := self._deadlines.pop_due(now_ns)) is not None:
            assert isinstance(get, _Get)
            self._send_answer(get)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_gets` is worth calling."""
        return self._deadlines.next_ns()

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a get."""
        referenced = [place.offset for get in self._open for place in get.places.values()]
        return referenced + [extent for extents in self._sending.values() for extent in extents]


def _key(message: StoreGet, index: int) -> bytes:
    return message.keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]


@dataclass(slots=True, eq=False)
class _DelayedReply:
    client: Client
    answer: StoreDone
    deadline_ns: int
    over: bool = False


class DelayedReplies:
    """All that are held back."""

    def __init__(self, values: Values, jobs: Jobs) -> None:
        self._values = values
        self._jobs = jobs
        self._pending: list[_DelayedReply] = []
        self._deadlines = Deadlines()

    def reply_when_durable(self, client: Client, answer: StoreDone, deadline_ns: int) -> None:
        """Answer as soon as everything that was forgotten so far stays so; ``LATE`` when that takes too long, or a disk
        has no room for it."""
        disks = self._values.disks
        if disks.removals_written or disks.removals_wait_for_room:
            self._send_reply(client, answer if disks.removals_written else _too_late(answer))
            return
        reply = _DelayedReply(client, answer, deadline_ns)
        client.calls.add(answer.call)
        self._pending.append(reply)
        self._deadlines.add(reply)

    def _send_reply(self, client: Client, answer: StoreDone) -> None:
        client.calls.discard(answer.call)
        if not client.is_gone:
            self._jobs.send_message(client.peer, answer)

    def send_due(self, now_ns: int) -> None:
        """Give what may be given now."""
        disks = self._values.disks
        if self._pending and (disks.removals_written or disks.removals_wait_for_room):
            replies, self._pending = self._pending, []
            for reply in replies:
                reply.over = True
                self._send_reply(reply.client, reply.answer if disks.removals_written else _too_late(reply.answer))
        while (late := self._deadlines.pop_due(now_ns)) is not None:
            assert isinstance(late, _DelayedReply)
            late.over = True
            self._pending.remove(late)
            self._send_reply(late.client, _too_late(late.answer))

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`send_due` is worth calling."""
        return self._deadlines.next_ns()


def _too_late(answer: StoreDone) -> StoreDone:
    """What was forgotten may be back after a restart."""
    return replace(answer, codes=answer.codes.replace(bytes([StoreCode.DONE]), bytes([StoreCode.LATE])))


@dataclass(slots=True, eq=False)
class _Put:
    client: Client
    message: StorePut
    codes: bytearray
    indexes: list[int]
    """Of the pairs that are being copied."""
    extents: list[int]
    """Theirs, a reference each."""
    deadline_ns: int
    over: bool = False
    """It was answered: what comes now is not published, since the client may have changed the bytes."""


class Puts:
    """All puts under way."""

    def __init__(self, values: Values, jobs: Jobs, answers: DelayedReplies, value_bytes_max: int) -> None:
        self._answers = answers
        self._values = values
        self._jobs = jobs
        self._value_bytes_max = value_bytes_max
        self._open: dict[int, _Put] = {}  # by job
        self._deadlines = Deadlines()

    def begin_put(self, client: Client, message: StorePut, now_ns: int) -> None:
        """Find room, and have the values copied there."""
        put = _Put(client, message, bytearray(len(message.pairs)), [], [], now_ns + message.deadline_in_ns)
        parts = []
        for index, pair in enumerate(message.pairs):
            code = self._refusal_code(client, pair, replace=message.replace)
            extent = self._allocate_extent(client, pair) if code is None else None
            if code is None and extent is None:
                self._values.counters.no_room += 1
                code = StoreCode.NO_ROOM
            if code is not None or extent is None:
                # each pair has an answer of its own: one that is refused must not fail the others
                put.codes[index] = code or StoreCode.NO_ROOM
                continue
            put.indexes.append(index)
            put.extents.append(extent)
            parts.append(ValuePart(extent, pair.length, pair.offset, pair.data))
        self._values.settle_evicted()
        if not parts:
            self._send_answer(put)
            return
        job = self._jobs.next_job()
        self._open[job] = put
        client.calls.add(message.call)
        self._deadlines.add(put)
        self._jobs.add_action(TakeValues(job, client.peer, tuple(parts)))

    def _allocate_extent(self, client: Client, pair: StorePair) -> int | None:
        """An extent: of a KV block in the place of a block, so that instances find it as such. None: no room."""
        tier = self._values.tier
        if client.scope != KV_SCOPE:
            # the name lies behind the value, where a lookup compares it; an empty value takes a byte, to have a place
            return tier.allocate(max(1, pair.length + len(pair.name)))
        blocks = tier.allocate_blocks(1)
        return None if blocks is None else int(blocks[0]) * tier.block_bytes

    def _refusal_code(self, client: Client, pair: StorePair, *, replace: bool) -> StoreCode | None:
        if pair.length > self._value_bytes_max:
            return StoreCode.TOO_LARGE
        if client.scope == KV_SCOPE and (pair.name or pair.length != self._values.tier.block_bytes):
            return StoreCode.BAD_CALL
        if pair.data is not None and len(pair.data) != pair.length:
            return StoreCode.BAD_CALL
        if pair.data is None and not _reaches(client, pair):
            return StoreCode.UNREADABLE
        value = self._values.find_value(pair.key)
        if value is None:
            return None
        if value.scope != client.scope or value.name not in (None, pair.name):
            return StoreCode.BAD_CALL
        # KV of one identity is always the same bytes: there is nothing to replace
        return None if replace and client.scope != KV_SCOPE else StoreCode.PRESENT

    def on_values_taken(self, event: ValuesTaken, now_ns: int) -> None:
        """The host has copied: publish."""
        put = self._open.pop(event.job)
        pairs, counters = put.message.pairs, self._values.counters
        for index, extent, seal in zip(put.indexes, put.extents, event.seals, strict=True):
            pair = pairs[index]
            if put.over or put.client.is_gone:
                pass
            elif seal is None:
                put.codes[index] = StoreCode.UNREADABLE
            else:
                # another put may have come first: what it put is replaced, or left alone
                code = self._refusal_code(put.client, pair, replace=put.message.replace)
                put.codes[index] = code or StoreCode.DONE
                if code is None and put.client.scope == KV_SCOPE:
                    counters.kv_stored += self._values.put_kv(pair.key, extent, pair.length, seal, now_ns, keep=False)
                elif code is None:
                    self._values.put_value(pair.key, extent, pair.length, put.client.scope, seal, pair.name, now_ns)
                    counters.puts += 1
                    counters.put_bytes += pair.length
            self._values.tier.release(extent)
        if not put.over:
            self._send_answer(put)

    def _send_answer(self, put: _Put) -> None:
        put.over = True
        put.client.calls.discard(put.message.call)
        self._answers.reply_when_durable(put.client, StoreDone(put.message.call, bytes(put.codes)), put.deadline_ns)

    def expire_puts(self, now_ns: int) -> None:
        """Answer the puts whose time is over."""
        while (put := self._deadlines.pop_due(now_ns)) is not None:
            assert isinstance(put, _Put)
            for index in put.indexes:
                # the host may still be copying from the memory of the client: nothing of it is published
                put.codes[index] = StoreCode.LATE
            self._send_answer(put)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_puts` is worth calling."""
        return self._deadlines.next_ns()

    def referenced_extents(self) -> list[int]:
        """Extents with a reference of a put."""
        return [extent for put in self._open.values() for extent in put.extents]


def _reaches(client: Client, pair: StorePair) -> bool:
    """Whether the value lies in memory of the client's that can be read."""
    arena = client.hello.arena
    is_here = bool(client.welcome.client_path)
    return arena is not None and is_here and pair.offset + pair.length <= arena.arena_bytes
