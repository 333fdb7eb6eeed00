"""A store's jobs on memory: values out of clients' arenas, checksums, values into messages. Two threads, any order.

A small job is done in the thread that asks for it, as long as that one has nothing else to do: two changes of threads
take longer than the copy.

Values of clients, carried from a store's memory to that of its next life, which has blocks of another size.

The one memory is given up before the other is taken, because the host may have no room for both. So values wait in
memory of the process meanwhile, up to ``CARRIED_BYTES_MAX``; what a disk has is not carried, and KV of another model is
of no use.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from memserve import _core
from memserve.base.units import GIB, MIB
from memserve.kv.store_shares import split_keys
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.protocol.store import StoreHello
from memserve.store.machine.block_pool import KV_SCOPE
from memserve.store.machine.events import (
    ExtentsSealed,
    SealExtents,
    SendValues,
    TakeValues,
    ValuePart,
    ValuesSent,
    ValuesTaken,
)

log = logging.getLogger(__name__)

_WORKERS = 2
_AT_ONCE_BYTES = MIB
"""A job on no more bytes than these may be done in the asking thread."""
_NO_OFFSET = np.zeros(1, np.int64)

Job = SealExtents | TakeValues | SendValues
Answer = ExtentsSealed | ValuesTaken | ValuesSent


class ValueJobs:
    """Performs them; each is answered exactly once, through ``post``."""

    def __init__(
        self,
        arena: _core.SharedArena,
        post: Callable[[Answer], None],
        send: Callable[[Peer, AnyMessage], None],
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """``post`` and ``send`` are called from threads of this object's, and from the one that calls :meth:`start`.
        ``is_busy``: whether that one has other work waiting; then it does no job itself."""
        self._arena = arena
        self._post = post
        self._send = send
        self._is_busy = is_busy
        self._lock = threading.Lock()
        self._hellos: dict[Peer, StoreHello] = {}
        self._maps: dict[Peer, _core.PeerArena] = {}
        """Of clients' memory, mapped when it is first read."""
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="memserve-store-values")

    def add_client(self, client: Peer, hello: StoreHello) -> None:
        """Values may come out of the client's memory."""
        with self._lock:
            self._hellos[client] = hello

    def remove_client(self, client: Peer) -> None:
        with self._lock:
            self._hellos.pop(client, None)
            self._maps.pop(client, None)

    def start(self, job: Job) -> None:
        """Begin with a job; waits for none but small ones."""
        # handing a small job to a thread and back costs more than the job
        if _bytes_of(job) <= _AT_ONCE_BYTES and not self._is_busy():
            self._run_job(job)
        else:
            self._workers.submit(self._run_job, job)

    def close(self) -> None:
        """End when what was begun has ended; the rest is given up."""
        self._workers.shutdown(cancel_futures=True)
        with self._lock:
            self._maps.clear()

    # -- a worker's thread, or the asking one

    def _run_job(self, job: Job) -> None:
        match job:
            case SealExtents(number, extents):
                answer: Answer = ExtentsSealed(number, self._checksum_extents(extents))
            case TakeValues(number, client, parts):
                answer = ValuesTaken(number, self._copy_in_values(client, parts))
            case SendValues():
                self._send_values(job)
                answer = ValuesSent(job.job)
        self._post(answer)

    def _checksum_extents(self, extents: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Extents of one size are sealed in one call."""
        extents = list(extents)
        seals = [0] * len(extents)
        for length, numbers in _by_length(length for _, length in extents).items():
            offsets = np.array([extents[number][0] for number in numbers], np.int64)
            checksums = _core.seal_ranges(self._arena.address, offsets, length)
            for number, seal in zip(numbers, checksums.tolist(), strict=True):
                seals[number] = seal
        return tuple(seals)

    def _copy_in_values(self, client: Peer, parts: tuple[ValuePart, ...]) -> tuple[int | None, ...]:
        seals: list[int | None] = [0 if part.length == 0 else None for part in parts]
        try:
            self._copy_in_inline(parts, seals)
            self._copy_in_mapped(client, parts, seals)
        except Exception as error:  # a job always has an end: the machine counts on it
            if not isinstance(error, OSError):
                log.exception("values of %s cannot be taken", client.name)
            return tuple(None for _ in parts)
        return tuple(seals)

    def _copy_in_inline(self, parts: tuple[ValuePart, ...], seals: list[int | None]) -> None:
        for number, part in enumerate(parts):
            if part.data:
                source = np.frombuffer(part.data, np.uint8).ctypes.data
                seals[number] = self._copy_ranges(source, [(part.extent, 0)], part.length)[0]

    def _copy_in_mapped(self, client: Peer, parts: tuple[ValuePart, ...], seals: list[int | None]) -> None:
        mapped_numbers = [number for number, part in enumerate(parts) if part.data is None and part.length]
        if not mapped_numbers:
            return
        arena = self._map_client(client)
        for length, run in _by_length(parts[number].length for number in mapped_numbers).items():
            numbers = [mapped_numbers[position] for position in run]
            ends = [(parts[number].extent, parts[number].offset) for number in numbers]
            for number, seal in zip(numbers, self._copy_ranges(arena.address, ends, length), strict=True):
                seals[number] = seal
        if arena.generation != client.generation:  # the process id belongs to another one by now
            raise OSError("the client has gone")

    def _copy_ranges(self, source: int, ends: list[tuple[int, int]], length: int) -> list[int]:
        """Copy ``length`` bytes from each ``(extent, offset)``'s offset to its extent; the checksums."""
        extents, offsets = (np.array(column, np.int64) for column in zip(*ends, strict=True))
        seals: list[int] = _core.copy_ranges_sealed(self._arena.address, extents, source, offsets, length).tolist()
        return seals

    def _map_client(self, client: Peer) -> _core.PeerArena:
        with self._lock:
            hello, mapped_arena = self._hellos.get(client), self._maps.get(client)
            if mapped_arena is not None:
                return mapped_arena
            if hello is None or hello.arena is None:
                raise OSError("the client has gone")
            arena = _core.PeerArena(hello.pid, hello.arena.fd, hello.arena.arena_bytes)
            if arena.generation != client.generation:
                raise OSError("another process has the client's number")
            self._maps[client] = arena
            return arena

    def _send_values(self, job: SendValues) -> None:
        try:
            view, values = memoryview(self._arena), [b""] * len(job.answer.codes)
            for piece in job.pieces:
                values[piece.index] = bytes(view[piece.extent : piece.extent + piece.length])
            self._send(job.to, replace(job.answer, values=tuple(values)))
        except Exception:
            log.exception("values cannot be sent to %s", job.to.name)


def _bytes_of(job: Job) -> int:
    match job:
        case TakeValues(_, _, parts):
            return sum(part.length for part in parts)
        case SendValues():
            return sum(piece.length for piece in job.pieces)
        case SealExtents(_, extents):
            return sum(length for _, length in extents)


def _by_length(lengths: Iterable[int]) -> dict[int, list[int]]:
    """Positions of each length above 0."""
    positions: defaultdict[int, list[int]] = defaultdict(list)
    for position, length in enumerate(lengths):
        if length:
            positions[length].append(position)
    return positions


CARRIED_BYTES_MAX = GIB


@dataclass(frozen=True, slots=True)
class _Value:
    key: bytes
    scope: int
    seal: int
    name: bytes
    payload: bytes


@dataclass(slots=True)
class CarriedValues:
    """On their way from one life to the next."""

    values: list[_Value] = field(default_factory=list)
    lost: int = 0
    """Values that were in memory alone and are not carried: too much, damaged, or no room for them."""


def take_values(
    tier: _core.MemoryTier, is_on_disk: Callable[[bytes], bool], bytes_max: int = CARRIED_BYTES_MAX
) -> CarriedValues:
    """Copy the values of clients that are in this memory alone. Nothing else uses ``tier`` any more."""
    arena = tier.arena
    assert arena is not None
    memory, carried, bytes_left = memoryview(arena).cast("B"), CarriedValues(), bytes_max
    for key in split_keys(tier.keys()):
        place = tier.find(key, counts=False)
        if place is None:
            continue
        if place.scope != KV_SCOPE and not is_on_disk(key):
            # damage is not to be carried on: behind the copy it would look like the value
            is_whole = place.length == 0 or place.seal == _checksum_of(arena.address + place.offset, place.length)
            if is_whole and place.length <= bytes_left:
                bytes_left -= place.length
                payload = bytes(memory[place.offset : place.offset + place.length])
                carried.values.append(_Value(key, place.scope, place.seal, place.name, payload))
            else:
                carried.lost += 1
        tier.release(place.offset)
    return carried


def put_values(tier: _core.MemoryTier, carried: CarriedValues) -> None:
    """Publish them in another memory, as far as there is room."""
    arena = tier.arena
    assert arena is not None
    memory = memoryview(arena).cast("B")
    for value in carried.values:
        extent = tier.allocate(max(1, len(value.payload) + len(value.name)))
        if extent is None:
            continue
        memory[extent : extent + len(value.payload)] = value.payload
        tier.publish(value.key, extent, len(value.payload), scope=value.scope, seal=value.seal, name=value.name)
        tier.release(extent)
    tier.take_evicted()
    arrived = [value for value in carried.values if value.key in tier]
    carried.lost += len(carried.values) - len(arrived)
    carried.values = arrived


def _checksum_of(address: int, length: int) -> int:
    return int(_core.seal_ranges(address, _NO_OFFSET, length)[0])
