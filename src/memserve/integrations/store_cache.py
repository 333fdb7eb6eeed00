"""What engines of others keep in a store: many values in a call, each compared when it is read, never waited for long.

    pool = EnginePool(PoolOptions("127.0.0.1:7100", tenant="search"))
    prefix = namespace("sglang", model="m", dtype="bfloat16", page_tokens=64, tp="0/2")
    value = Value(prefix + b"page hash", [(address, nbytes)])
    pool.put([value]), pool.exists([value.name]), pool.get([value])

A value is the pieces of memory of one page or chunk, one behind the other, and a tail: to which key and layout they
belong, and the checksum of each piece, taken while it was copied. A read that disagrees is a miss, and the value is
forgotten. A store that does not answer is one warning and then a miss at once, until a thread of the pool has found it.

A value of an engine's in a store: pieces of memory, and a tail that says what they are and how they must add up.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.units import MIB, ceil_div
from memserve.protocol.store import NAME_BYTES_MAX, KvModel
from memserve.store.client.client import StoreClient
from memserve.store.client.memory import Staged, View

_TAIL = struct.Struct("<4sI16s")
"""A mark, the number of pieces, a digest of name and layout; the pieces' checksums follow, 8 bytes each."""
_MARK = b"MSE1"
_ALIGNMENT = 4096
"""Of values in memory of the store's and of its clients'."""

Piece = tuple[int, int]
"""Address and bytes of memory of the engine's, which stays where it is until the call has returned."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the engine's, where it is read from or written to."""

    name: bytes
    pieces: Sequence[Piece]
    layout: bytes = b""
    """What the bytes mean beside what the name says: a value of another layout is a miss."""
    at_most: bool = False
    """The value that is read may be shorter than the one piece that it is read into."""

    @property
    def payload_bytes(self) -> int:
        """Of all pieces together."""
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def stored_bytes(self) -> int:
        """With the tail."""
        return self.payload_bytes + _TAIL.size + 8 * len(self.pieces)

    def fit_to_stored(self, stored_bytes: int) -> Value | None:
        """This value, if that is the length of what is stored; None: it is another one."""
        if stored_bytes == self.stored_bytes:
            return self
        if not self.at_most or len(self.pieces) != 1 or not _TAIL.size + 8 < stored_bytes < self.stored_bytes:
            return None
        return replace(self, pieces=[(self.pieces[0][0], stored_bytes - _TAIL.size - 8)])

    def encode_tail(self, seals: NDArray[np.uint64]) -> bytes:
        """What stands behind the pieces, of which these are the checksums."""
        digest = blake2b(len(self.name).to_bytes(4) + self.name + self.layout, digest_size=16).digest()
        return _TAIL.pack(_MARK, len(self.pieces), digest) + seals.astype("<u8").tobytes()


def namespace(engine: str, **facts: object) -> bytes:
    """The begin of all names of values that may meet: ``engine/DIGEST/`` of everything that decides what bytes mean."""
    facts_json = json.dumps(facts, sort_keys=True, default=str).encode()
    return f"{engine}/{blake2b(facts_json, digest_size=12).hexdigest()}/".encode()


def name_in(prefix: bytes, key: bytes) -> bytes:
    """A name in a namespace for a key of any length: the key itself, or a digest of one that is too long."""
    if len(prefix) + 1 + len(key) <= NAME_BYTES_MAX:
        return prefix + b"=" + key
    return prefix + b"#" + blake2b(key, digest_size=32).hexdigest().encode()


def address_of(data: memoryview) -> int:
    """Where the bytes begin."""
    return np.frombuffer(data, np.uint8).ctypes.data


def piece_places(value: Value, first: int) -> Iterator[tuple[int, Piece]]:
    """Each piece, and where it lies in a value that begins at ``first``."""
    for piece in value.pieces:
        yield first, piece
        first += piece[1]


def copy_pieces(moves: Sequence[tuple[int, int, int]], threads: int) -> NDArray[np.uint64]:
    """Copy for each ``(to, from, bytes)``; the checksums of what was written, 0 of nothing."""
    seals = np.zeros(len(moves), np.uint64)
    table = np.array(moves, np.int64).reshape(-1, 3)
    for nbytes in np.unique(table[:, 2]):
        if nbytes:
            indices = np.flatnonzero(table[:, 2] == nbytes)
            to, source = np.ascontiguousarray(table[indices, 0]), np.ascontiguousarray(table[indices, 1])
            seals[indices] = _core.copy_ranges_sealed(0, to, 0, source, int(nbytes), threads)
    return seals


def split_portions(
    numbers: Iterable[int], values: Sequence[Value], bytes_max: int, count_max: int = 1024
) -> Iterator[list[int]]:
    """Of ``numbers``, as many together as have room in ``bytes_max``; at least one."""
    portion, nbytes = list[int](), 0
    for number in numbers:
        room = ceil_div(values[number].stored_bytes, _ALIGNMENT) * _ALIGNMENT
        if portion and (nbytes + room > bytes_max or len(portion) >= count_max):
            yield portion
            portion, nbytes = [], 0
        portion.append(number)
        nbytes += room
    if portion:
        yield portion


log = logging.getLogger(__name__)

_RETRY_S = 1.0
_PROBE_S = 1.0
_WARN_S = 60.0
"""Between two warnings of one pool."""
_READ_AT_ONCE = 32
"""Values: as many as are held in the store's memory, and read from its disks side by side, at a time."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class PoolOptions:
    """Where the store is, and how much an engine may wait and hold for it."""

    pool: str
    """``HOST:PORT``, as ``memserve store --listen`` has it; several, with commas between them, are as one."""
    copies: int = 1
    """In how many of several stores each value is to lie."""
    tenant: str = "default"
    secret_file: str | None = None
    """None: the file that ``MEMSERVE_CLUSTER_SECRET_FILE`` names."""
    namespace: str = ""
    """Anything that must not mix with others and that the engine does not say: a revision of weights."""
    timeout_s: float = 2.0
    """Of each call, whatever happens to the store."""
    staging_bytes: int = 256 * MIB
    """Memory out of which the store takes what is put; what was never needed is not touched."""
    threads: int = 2
    """They copy side by side."""

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> PoolOptions:
        """From an engine's JSON. Raises :class:`UserError` for what is missing, unknown or no number."""
        kinds = {field.name: (int, float) if field.type in ("int", "float") else str for field in fields(cls)}
        for name, value in settings.items():
            if name not in kinds:
                hint = f"one of {', '.join(kinds)}"
                raise UserError(f"memserve knows no option {name!r} here", hint=hint, param=name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if not (isinstance(value, str) if kinds[name] is str else is_number):
                raise UserError(f"{name} is {value!r}", hint="see docs/guides/OTHER_ENGINES.md", param=name)
        if "pool" not in settings:
            raise UserError("no store is named", hint='"pool": "HOST:PORT" of `memserve store --listen`', param="pool")
        return cls(**settings)


class EnginePool:
    """A store as an engine's cache. Every call ends by ``timeout_s``, raises nothing, and may come from any thread."""

    def __init__(self, options: PoolOptions, kv: KvModel | None = None) -> None:
        """``kv``: the values are KV blocks of this model, as instances have them. Raises :class:`UserError` for options
        that cannot be, and when the store refuses this client. A store that does not answer is looked for in the
        background."""
        self.options = options
        self._kv = kv
        self.counts: Counter[str] = Counter()
        """hits, misses, stored, refused, damaged: values. unavailable: calls that found no store."""
        self._client: StoreClient | None = None
        self._up = threading.Event()
        self._down = threading.Event()
        self._closing = threading.Event()
        self._putting = threading.Lock()
        self._warned_s = -_WARN_S
        try:
            self._client = self._connect_client()
            self._up.set()
        except StoreUnavailable as error:
            self._mark_down(error)
        self._thread = threading.Thread(target=self._reconnect_loop, name="memserve-engine-pool", daemon=True)
        self._thread.start()

    # -- values

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        """Whether there is a value of each name."""
        nothing = [False] * len(names)
        return self._call_store(lambda client, end_s: client.exists(names, timeout_s=_seconds_left(end_s)), nothing)

    def match_prefix(self, names: Sequence[bytes]) -> int:
        """How many have a value, from the first on."""
        return self._call_store(
            lambda client, end_s: client.match_last_index(names, timeout_s=_seconds_left(end_s)) + 1, 0
        )

    def put_values(self, values: Sequence[Value]) -> list[bool]:
        """Whether the store has each value now. False: there was no room or no time for it, or it is too large."""
        stored = [False] * len(values)
        self._call_store(lambda client, end_s: self._put_missing(client, values, stored, end_s), None)
        self.counts["stored"] += sum(stored)
        self.counts["refused"] += len(stored) - sum(stored)
        return stored

    def get_values(self, values: Sequence[Value]) -> list[bool]:
        """Whether each value was found and compared. False: it was not, and its pieces hold anything."""
        hits = [False] * len(values)
        self._call_store(lambda client, end_s: self._get_present(client, values, hits, end_s), None)
        self.counts["hits"] += sum(hits)
        self.counts["misses"] += len(hits) - sum(hits)
        return hits

    def delete(self, names: Sequence[bytes]) -> int:
        """Forget values; how many there were."""
        return self._call_store(lambda client, end_s: client.delete(names, timeout_s=_seconds_left(end_s)), 0)

    def clear(self, *prefixes: bytes) -> bool:
        """Forget all values whose names begin with one of them. False: not all, the store was away."""

        def forget(client: StoreClient, end_s: float) -> bool:
            names = [
                entry.name
                for entry in client.entries(timeout_s=_seconds_left(end_s))
                if entry.name.startswith(prefixes)
            ]
            return client.delete(names, timeout_s=_seconds_left(end_s)) <= len(names)

        return self._call_store(forget, False)

    @property
    def is_up(self) -> bool:
        """Whether the store answered when it was last asked."""
        return self._up.is_set()

    def status(self) -> dict[str, Any]:
        """For an engine's own report."""
        return {"is_healthy": self.is_up, "pool": self.options.pool, "tenant": self.options.tenant, **self.counts}

    def close(self) -> None:
        """Leave the store. Calls from now on find nothing."""
        self._closing.set()
        self._up.clear()
        self._down.set()
        self._thread.join(_PROBE_S + self.options.timeout_s)
        if self._client is not None:
            self._client.close()

    # -- a store that may be away

    def _connect_client(self) -> StoreClient:
        options = self.options
        staging_bytes = int(options.staging_bytes)
        return StoreClient(
            options.pool,
            options.tenant,
            options.secret_file,
            timeout_s=_PROBE_S,
            staging_bytes=staging_bytes,
            kv=self._kv,
            copies=int(options.copies),
        )

    def _call_store(self, work: Callable[[StoreClient, float], Answer], otherwise: Answer) -> Answer:
        client = self._client
        if client is None or not self._up.is_set():
            self.counts["unavailable"] += 1
            return otherwise
        try:
            return work(client, time.monotonic() + self.options.timeout_s)
        except (UserError, OSError) as error:
            self._mark_down(error)
            return otherwise

    def _mark_down(self, error: Exception) -> None:
        self.counts["unavailable"] += 1
        self._up.clear()
        self._down.set()
        now_s = time.monotonic()
        if now_s - self._warned_s >= _WARN_S and not self._closing.is_set():
            self._warned_s = now_s
            log.warning("no KV from %s until it answers again: %s", self.options.pool, error)

    def _reconnect_loop(self) -> None:
        """Look for the store while it is away."""
        while self._down.wait() and not self._closing.is_set():
            try:
                if self._client is None:
                    self._client = self._connect_client()
                self._client.statistics(timeout_s=_PROBE_S)
            except (UserError, OSError):
                self._closing.wait(_RETRY_S)
                continue
            self._down.clear()
            if self._closing.is_set():
                return
            self._up.set()
            log.info("the store at %s answers", self.options.pool)

    # -- put

    def _put_missing(self, client: StoreClient, values: Sequence[Value], stored: list[bool], end_s: float) -> None:
        stored[:] = client.exists([value.name for value in values], timeout_s=_seconds_left(end_s))
        longest = min(client.value_bytes_max(timeout_s=_seconds_left(end_s)), int(self.options.staging_bytes) // 2)
        absent_indices = [
            index for index, is_stored in enumerate(stored) if not is_stored and values[index].stored_bytes <= longest
        ]
        for portion in split_portions(absent_indices, values, int(self.options.staging_bytes) // 2):
            if not self._putting.acquire(
                timeout=_seconds_left(end_s)
            ):  # two that hold half each would wait for each other
                raise StoreUnavailable("other values are being put", hint="more staging_bytes, or fewer at once")
            try:
                accepted = self._put_portion(client, [values[index] for index in portion], end_s)
            finally:
                self._putting.release()
            for index, took in zip(portion, accepted, strict=True):
                stored[index] = took
            self._note_others(client, values, stored, [index for index in portion if not stored[index]], end_s)

    @staticmethod
    def _note_others(
        client: StoreClient, values: Sequence[Value], stored: list[bool], refused: list[int], end_s: float
    ) -> None:
        """What another engine put at the same time is there, too."""
        if refused:
            presence = client.exists([values[index].name for index in refused], timeout_s=_seconds_left(end_s))
            for index, is_there in zip(refused, presence, strict=True):
                stored[index] = is_there

    def _put_portion(self, client: StoreClient, values: Sequence[Value], end_s: float) -> list[bool]:
        with ExitStack() as stack:
            staged = [
                stack.enter_context(client.allocate(value.stored_bytes, timeout_s=_seconds_left(end_s)))
                for value in values
            ]
            moves = [
                (place, source, nbytes)
                for value, memory in zip(values, staged, strict=True)
                for place, (source, nbytes) in piece_places(value, address_of(memory.data))
            ]
            seals, first = copy_pieces(moves, int(self.options.threads)), 0
            for value, memory in zip(values, staged, strict=True):
                last = first + len(value.pieces)
                memory.data[value.payload_bytes :] = value.encode_tail(seals[first:last])
                first = last
            # A put that gets no answer may yet be read by the store, out of memory that holds another value by then:
            # that one's tail belongs to another name.
            pairs: list[tuple[bytes, Staged]] = [(v.name, m) for v, m in zip(values, staged, strict=True)]
            return client.put_many(pairs, overwrite=False, timeout_s=_seconds_left(end_s))

    # -- get

    def _get_present(self, client: StoreClient, values: Sequence[Value], hits: list[bool], end_s: float) -> None:
        presence = client.exists([value.name for value in values], timeout_s=_seconds_left(end_s))
        present_indices = [index for index, is_there in enumerate(presence) if is_there]
        held_bytes = client.value_bytes_max(timeout_s=_seconds_left(end_s)) // 2  # a client may hold twice as much
        for portion in split_portions(present_indices, values, held_bytes, _READ_AT_ONCE):
            damaged = self._get_portion(client, [values[index] for index in portion], portion, hits, end_s)
            if damaged:
                self._delete_damaged(client, damaged, end_s)

    def _delete_damaged(self, client: StoreClient, damaged: Sequence[bytes], end_s: float) -> None:
        """These values are not what was stored."""
        self.counts["damaged"] += len(damaged)
        if len(damaged) == 1:
            log.warning("1 value at %s disagrees with its checksums: forgotten", self.options.pool)
        else:
            log.warning("%d values at %s disagree with their checksums: forgotten", len(damaged), self.options.pool)
        client.delete(damaged, timeout_s=_seconds_left(end_s))

    def _get_portion(
        self, client: StoreClient, values: Sequence[Value], numbers: list[int], hits: list[bool], end_s: float
    ) -> list[bytes]:
        """Copy and compare; the names of values that disagree."""
        damaged, read = list[bytes](), list[tuple[int, Value, memoryview]]()
        with ExitStack() as stack:
            buffers = _hold_buffers(client, [value.name for value in values], stack, end_s)
            for number, value, data in zip(numbers, values, buffers, strict=True):
                fitted = value.fit_to_stored(len(data)) if data is not None else None
                if data is not None and fitted is not None:
                    read.append((number, fitted, data))
                elif data is not None:
                    damaged.append(value.name)
            moves = [
                (target, source, nbytes)
                for _, value, data in read
                for source, (target, nbytes) in piece_places(value, address_of(data))
            ]
            seals, first = copy_pieces(moves, int(self.options.threads)), 0
            for number, value, data in read:
                last = first + len(value.pieces)
                hits[number] = bytes(data[value.payload_bytes :]) == value.encode_tail(seals[first:last])
                if not hits[number]:
                    damaged.append(value.name)
                first = last
        return damaged


def _seconds_left(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise StoreUnavailable("the time of this call is over", hint="timeout_s of the pool, or fewer values at once")
    return left_s


def _hold_buffers(
    client: StoreClient, names: Sequence[bytes], stack: ExitStack, end_s: float
) -> list[memoryview | None]:
    """Values where they lie in the store's memory, until ``stack`` ends; copies of those that cannot be held there."""
    buffers = [_view_data(client.get_held(name), stack) for name in names]
    absent = [index for index, data in enumerate(buffers) if data is None]
    if absent and client.is_mapped:
        client.bring([names[index] for index in absent], timeout_s=_seconds_left(end_s))
        for index in absent:
            buffers[index] = _view_data(client.get_held(names[index]), stack)
        absent = [index for index in absent if buffers[index] is None]
    if absent:
        copies = client.get_copies([names[index] for index in absent], timeout_s=_seconds_left(end_s))
        for index, copy in zip(absent, copies, strict=True):
            buffers[index] = copy
    return buffers


def _view_data(view: View | None, stack: ExitStack) -> memoryview | None:
    if view is None:
        return None
    stack.callback(view.drop)
    return view.data
