"""Values that clients put: copied by the host out of the client's memory, or out of the message, then published."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.kv_transfer.context import Deadlines
from memserve.store.answers import Answers
from memserve.store.client import Client
from memserve.store.events import Part, TakeValues, ValuesTaken
from memserve.store.jobs import Jobs
from memserve.store.pool import KV_SCOPE
from memserve.store.values import Values
from memserve.store_messages import StoreCode, StoreDone, StorePair, StorePut


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

    def __init__(self, values: Values, jobs: Jobs, answers: Answers, value_bytes_max: int) -> None:
        self._answers = answers
        self._values = values
        self._jobs = jobs
        self._value_bytes_max = value_bytes_max
        self._open: dict[int, _Put] = {}  # by job
        self._deadlines = Deadlines()

    def begin(self, client: Client, message: StorePut, now: int) -> None:
        """Find room, and have the values copied there."""
        put = _Put(client, message, bytearray(len(message.pairs)), [], [], now + message.deadline_in_ns)
        parts = []
        for index, pair in enumerate(message.pairs):
            code = self._objection(client, pair, replace=message.replace)
            extent = self._room(client, pair) if code is None else None
            if code is None and extent is None:
                self._values.counters.no_room += 1
                code = StoreCode.NO_ROOM
            if code is not None or extent is None:
                put.codes[index] = code or StoreCode.NO_ROOM
                continue
            put.indexes.append(index)
            put.extents.append(extent)
            parts.append(Part(extent, pair.length, pair.offset, pair.data))
        self._values.settle()
        if not parts:
            self._answer(put)
            return
        job = self._jobs.new()
        self._open[job] = put
        client.calls.add(message.call)
        self._deadlines.add(put)
        self._jobs.ask(TakeValues(job, client.peer, tuple(parts)))

    def _room(self, client: Client, pair: StorePair) -> int | None:
        """An extent: of a KV block in the place of a block, so that instances find it as such. None: no room."""
        tier = self._values.tier
        if client.scope != KV_SCOPE:
            return tier.allocate(max(1, pair.length + len(pair.name)))
        blocks = tier.allocate_blocks(1)
        return None if blocks is None else int(blocks[0]) * tier.block_bytes

    def _objection(self, client: Client, pair: StorePair, *, replace: bool) -> StoreCode | None:
        if pair.length > self._value_bytes_max:
            return StoreCode.TOO_LARGE
        if client.scope == KV_SCOPE and (pair.name or pair.length != self._values.tier.block_bytes):
            return StoreCode.BAD_CALL
        if pair.data is not None and len(pair.data) != pair.length:
            return StoreCode.BAD_CALL
        if pair.data is None and not _reaches(client, pair):
            return StoreCode.UNREADABLE
        known = self._values.look(pair.key)
        if known is None:
            return None
        if known.scope != client.scope or known.name not in (None, pair.name):
            return StoreCode.BAD_CALL
        return None if replace and client.scope != KV_SCOPE else StoreCode.PRESENT

    def taken(self, event: ValuesTaken, now: int) -> None:
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
                code = self._objection(put.client, pair, replace=put.message.replace)
                put.codes[index] = code or StoreCode.DONE
                if code is None and put.client.scope == KV_SCOPE:
                    counters.kv_stored += self._values.put_kv(pair.key, extent, pair.length, seal, now, keep=False)
                elif code is None:
                    self._values.put(pair.key, extent, pair.length, put.client.scope, seal, pair.name, now)
                    counters.puts += 1
                    counters.put_bytes += pair.length
            self._values.tier.release(extent)
        if not put.over:
            self._answer(put)

    def _answer(self, put: _Put) -> None:
        put.over = True
        put.client.calls.discard(put.message.call)
        self._answers.give(put.client, StoreDone(put.message.call, bytes(put.codes)), put.deadline_ns)

    def advance(self, now: int) -> None:
        """Answer the puts whose time is over."""
        while (put := self._deadlines.pop_due(now)) is not None:
            assert isinstance(put, _Put)
            for index in put.indexes:
                put.codes[index] = StoreCode.LATE
            self._answer(put)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling."""
        return self._deadlines.next_ns()

    def references(self) -> list[int]:
        """Extents with a reference of a put."""
        return [extent for put in self._open.values() for extent in put.extents]


def _reaches(client: Client, pair: StorePair) -> bool:
    """Whether the value lies in memory of the client's that can be read."""
    arena = client.hello.arena
    is_here = bool(client.welcome.client_path)
    return arena is not None and is_here and pair.offset + pair.length <= arena.arena_bytes
