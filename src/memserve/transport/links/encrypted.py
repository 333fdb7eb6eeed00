"""Reading peers through the cluster's own channel: over ZeroMQ, encrypted, both ends authenticated by the secret.

    reader                                                  owner
    generation, tier, bytes of a range; where they begin -> copies the ranges into one message
    copies them into the arena, checksums                <- their bytes; or why not
    ... and the version of the codec that it reads       -> encodes them, if they become shorter
    decodes them into the arena, checksums               <- their encoding, and what that took

A read goes in pieces of a mebibyte, four on their way at a time: one is encrypted and sent while another is copied.
What was given up comes late, or never, in a message that is not read: nothing but our own copies writes an arena.

A reader asks for encoded bytes where that pays (``system/kv_codec.py``): it knows what a byte takes on its way from
this peer, without what both ends spend on the codec. A member that knows nothing of the codec does not look at what is
asked behind its own fields, and answers as ever; it is never sent an encoding that it did not ask for. So it is with
readers on the same host, which take what lies on a GPU out of memory that both see (``links/staging.py``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from memserve import _core
from memserve.base.types import KvCodecMode, Tier
from memserve.base.units import KIB, MIB, NS_PER_S, ns_from_s
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.kv_codec import CodecGate, KvCodec, LearntRate
from memserve.system.secrets import as_followed
from memserve.transport.curve import CurveKeys
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.links.staging import FindStaging, StagedPlace, StagingRings
from memserve.transport.network_devices import ListenAddress
from memserve.transport.outbound import new_context
from memserve.transport.ports import (
    ArenaMemory,
    Arenas,
    ChecksumError,
    LinkError,
    Seals,
    Travelled,
    check_ranges,
    place_of,
)
from memserve.transport.ranges import Ranges, fits
from memserve.transport.request_server import Answering, Line

Bytes = NDArray[np.uint8]

PIECE_BYTES = MIB
"""Of a message; or one range, when that is longer. An owner holds four of them for each read of a peer."""
STALL_S = 4.0
"""A piece that does not come within this time is given up, and the read with it."""
_UNDER_WAY = 4
_LOOK_MS = 20
"""Between two looks whether the peer is still a member."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What is asked for, before the places of the ranges."""

    number: int
    generation: int
    tier: int
    range_bytes: int
    codec: int = 0
    """The version of the codec in which an answer may come; 0: none."""
    line: int = 0
    """Names the line to its owner, which may answer with a place in memory that both see; 0: the reader sees none."""


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    """Behind the bytes that were asked for with a codec, or by a reader that sees memory of the owner."""

    is_encoded: bool
    encode_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """What that took of a CPU, or the attempt."""
    staged: StagedPlace | None = None
    """Where they lie instead."""


_decode_facts = msgspec.msgpack.Decoder(_Facts).decode
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Head).decode


_ENCODED_RANGE_MIN = 2 * KIB
"""Shorter ranges are sent as they are."""


class _Way:
    """The way from one peer: what a byte takes there, and whether to ask for encoded ones. Thread-safe."""

    def __init__(self, codec: KvCodec) -> None:
        self._codec = codec
        least = codec.least
        self._gate = CodecGate(codec.mode, least.encode_byte_ns + least.decode_byte_ns)
        self._lock = threading.Lock()
        self._rate = LearntRate()
        self._peer_encode, self._share = LearntRate(least.encode_byte_ns), LearntRate(least.share)

    def wants_encoded(self) -> bool:
        """Whether the next piece is to come encoded."""
        with self._lock:
            encode_ns, share = self._peer_encode.byte_ns, self._share.byte_ns
            assert encode_ns is not None and share is not None
            cost_ns = encode_ns + self._codec.rates.decode_byte_ns
            return self._gate.lets_encode(self._rate.byte_ns, cost_ns, share)

    def note_piece(self, nbytes: int, sent_bytes: int, facts: _Facts | None) -> None:
        """``nbytes`` of values came in ``sent_bytes``."""
        if facts is None:
            return
        with self._lock:
            self._share.note(nbytes, float(sent_bytes))
            if facts.is_encoded:
                self._peer_encode.note(nbytes, facts.encode_ns)

    def note_spent(self, sent_bytes: int, spent_ns: int) -> None:
        """So much came in ``spent_ns``, the codec's time left out."""
        with self._lock:
            self._rate.note(sent_bytes, max(0, spent_ns))


@dataclass(slots=True)
class _Reading:
    """One read: from where to where, and how its pieces come."""

    peer: Peer
    tier: Tier
    target: ArenaMemory
    way: _Way
    travelled: Travelled
    find_staging: FindStaging | None
    _since_ns: int = 0
    """When something was on its way for the first time, or the last piece had come."""
    _counts: bool = False
    """Whether the next piece tells what the way takes: the first one over a new connection waits for that."""

    def begin(self, *, is_connected: bool) -> None:
        """The first piece is asked for."""
        self._since_ns, self._counts = time.perf_counter_ns(), is_connected

    def note_piece(self, nbytes: int, sent_bytes: int, landing_ns: int, facts: _Facts | None) -> None:
        """A piece has landed, which took ``landing_ns`` of the time."""
        now_ns = time.perf_counter_ns()
        encode_ns = 0 if facts is None else facts.encode_ns
        self.way.note_piece(nbytes, sent_bytes, facts)
        if self._counts and sent_bytes:
            self.way.note_spent(sent_bytes, now_ns - self._since_ns - landing_ns - encode_ns)
        self._since_ns, self._counts = now_ns, True
        if facts is not None:
            self.travelled.saved_bytes += nbytes - sent_bytes
            self.travelled.codec_ns += encode_ns + (landing_ns if facts.is_encoded else 0)


class _SecretRejectedError(Exception):
    """The cluster's secret changes, and the owner has another one than the line."""


class CurveLink:
    """A :class:`~memserve.transport.ports.PageLink` for networks that are not trusted: between hosts by default.

    Raises :class:`UserError` when it cannot listen.
    """

    name = "curve"
    workers = 4

    def __init__(
        self,
        arenas: Arenas,
        listen_address: ListenAddress,
        block_bytes: int,
        *,
        stall_s: float = STALL_S,
        kv_codec: KvCodecMode = "none",
    ) -> None:
        """``kv_codec``: whether pages come, and are handed out, in fewer bytes: where that pays for the reader, never,
        always."""
        self._codec = KvCodec(kv_codec)
        self._arenas, self._stall_ns = arenas, ns_from_s(stall_s)
        self._bytes_max = max(PIECE_BYTES, block_bytes)
        self._secret = as_followed(listen_address.secret).derive_value(CurveKeys.all_in, tells=False)
        self._keys = self._secret.value()
        self._lock = threading.Lock()
        self._peers: dict[Peer, PeerInfo] = {}
        self._connections: dict[Peer, list[Line]] = {}
        """To peers that were read from: those that no read uses."""
        self._ways: dict[Peer, _Way] = {}
        """From peers that were read from."""
        self._numbers = 0
        self._context = new_context()
        self._staging = StagingRings(self._bytes_max, _UNDER_WAY, 2 * self._stall_ns)
        sizes = {"bytes_max": self._bytes_max, "queued_max": 2 * _UNDER_WAY}
        self._answering = Answering(listen_address, "pages", self._answer_request, **sizes)

    def describe(self, info: PeerInfo) -> PeerInfo:
        """Add where pages are asked for."""
        return msgspec.structs.replace(info, pages_at=self._answering.address)

    def reaches(self, info: PeerInfo) -> bool:
        """It answers as well."""
        return bool(info.pages_at)

    def add_peer(self, info: PeerInfo) -> None:
        """Remember where it answers."""
        with self._lock:
            self._peers[info.peer] = info

    def remove_peer(self, peer: Peer) -> None:
        """A read under way notices."""
        with self._lock:
            self._peers.pop(peer, None)
            self._ways.pop(peer, None)
            connections = self._connections.pop(peer, [])
        for connection in connections:
            connection.close()

    def expect_reads(self) -> None:
        """The thread that answers waits for questions."""

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Ask piece by piece, and copy what comes. Raises :class:`LinkError`."""
        return self._read_from(peer, (src_tier, dst_tier), ranges, travelled or Travelled(), None)

    def read_staged(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, find_staging: FindStaging
    ) -> Seals:
        """As :meth:`read`, of a peer on this host: what it stages is found by ``find_staging``."""
        return self._read_from(peer, (src_tier, dst_tier), ranges, Travelled(), find_staging)

    def _read_from(
        self,
        peer: Peer,
        tiers: tuple[Tier, Tier],
        ranges: Ranges,
        travelled: Travelled,
        find_staging: FindStaging | None,
    ) -> Seals:
        src_tier, dst_tier = tiers
        with self._lock:
            info = self._peers.get(peer)
        if info is None:
            raise LinkError(f"{peer.name} is gone")
        target = self._arenas.get(dst_tier)
        if target is None:
            raise LinkError(f"no {dst_tier.name} here")
        check_ranges(ranges, place_of(info, src_tier).arena_bytes, target.nbytes)
        if ranges.range_bytes > self._bytes_max:
            raise LinkError(f"ranges of {ranges.range_bytes} bytes are longer than a message")
        connection, until_ns = self._take_connection(info), time.monotonic_ns() + self._stall_ns
        reading = _Reading(peer, src_tier, target, self._way_from(peer), travelled, find_staging)
        try:
            while True:
                try:
                    seals = self._read(connection, reading, ranges)
                    break
                except _SecretRejectedError:
                    if time.monotonic_ns() > until_ns:
                        raise LinkError("the peer takes none of the secrets") from None
                    connection = connection.with_next_key()
        except BaseException:
            connection.close()  # and with it what comes late
            raise
        with self._lock:
            if peer in self._peers and connection.keys == self._keys:
                self._connections.setdefault(peer, []).append(connection)
            else:
                connection.close()
        return seals

    def close(self) -> None:
        """Answer nothing any more, disconnect everywhere."""
        self._answering.close()
        self._staging.close()
        with self._lock:
            self._close_connections()
        self._context.term()

    # -- the reader's side

    def _take_connection(self, info: PeerInfo) -> Line:
        """One that no other read uses, by the secret as it is now."""
        with self._lock:
            if (keys := self._secret.value()) != self._keys:
                self._keys = keys
                self._close_connections()
            idle = self._connections.get(info.peer)
            if idle:
                return idle.pop()
            return Line(self._context, self._keys, info.pages_at, bytes_max=self._bytes_max)

    def _way_from(self, peer: Peer) -> _Way:
        with self._lock:
            way = self._ways.get(peer)
            if way is None:
                way = _Way(self._codec)
                if peer in self._peers:
                    self._ways[peer] = way
            return way

    def _close_connections(self) -> None:
        for connection in chain.from_iterable(self._connections.values()):
            connection.close()
        self._connections.clear()

    def _read(self, connection: Line, reading: _Reading, ranges: Ranges) -> Seals:
        step = max(1, self._bytes_max // ranges.range_bytes)
        pending: deque[tuple[int, Ranges]] = deque()
        seals: list[Seals] = []
        reading.begin(is_connected=connection.was_used)
        for begin in range(0, len(ranges), step):
            piece = ranges.slice_ranges(begin, begin + step)
            pending.append((self._send_request(connection, reading, piece), piece))
            if len(pending) == _UNDER_WAY:
                seals.append(self._receive_piece(connection, reading, *pending.popleft()))
        while pending:
            seals.append(self._receive_piece(connection, reading, *pending.popleft()))
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def _send_request(self, connection: Line, reading: _Reading, piece: Ranges) -> int:
        with self._lock:
            self._numbers += 1
            number = self._numbers
        lands_here = not isinstance(reading.target, GpuMemory) and piece.range_bytes >= _ENCODED_RANGE_MIN
        codec = _core.KV_CODEC_VERSION if lands_here and reading.way.wants_encoded() else 0
        line = 0 if reading.find_staging is None else connection.number
        peer = reading.peer
        head = _encode(_Head(number, peer.generation, int(reading.tier), piece.range_bytes, codec, line))
        try:
            connection.socket.send_multipart([head, piece.src_offsets.astype("<i8").tobytes()], zmq.NOBLOCK)
        except zmq.Again as error:
            if connection.is_rejected:  # while no read used it
                raise _SecretRejectedError from None
            raise LinkError("the peer reads no questions") from error
        return number

    def _receive_piece(self, connection: Line, reading: _Reading, number: int, piece: Ranges) -> Seals:
        """Wait for the piece, then copy it: pieces come in the order in which they were asked for."""
        head, *frames = self._wait_for_reply(connection, reading.peer)
        connection.was_used = True
        if len(frames) == 2:
            raise LinkError(f"the peer hands out none: {frames[1].bytes.decode(errors='replace')[:100]}")
        if head.bytes != _encode(number) or len(frames) not in (1, 3):
            raise LinkError("the peer answers something else")
        facts = _facts_of(frames[2]) if len(frames) == 3 else None
        came, began_ns = np.frombuffer(frames[0].buffer, np.uint8), time.perf_counter_ns()
        if facts is not None and facts.staged is not None:
            seals = _land_staged(facts.staged, reading, piece)
            reading.begin(is_connected=False)  # what the way takes is told by bytes that come over it
            return seals
        if facts is not None and facts.is_encoded:
            seals = self._decode_piece(came, reading.target, piece)
        elif came.nbytes != piece.total_bytes:
            raise LinkError("the peer answers something else")
        else:
            seals = _land_piece(came.ctypes.data, reading.target, piece)
        reading.note_piece(piece.total_bytes, came.nbytes, time.perf_counter_ns() - began_ns, facts)
        return seals

    def _decode_piece(self, came: Bytes, target: ArenaMemory, piece: Ranges) -> Seals:
        if isinstance(target, GpuMemory):
            raise LinkError("the peer answers with an encoding that was not asked for")
        source, place = (came.ctypes.data, came.nbytes), (target.address, piece.dst_offsets)
        seals = self._codec.decode(*source, *place, piece.range_bytes)
        if seals is None:
            raise ChecksumError(1, len(piece))
        return seals

    def _wait_for_reply(self, connection: Line, peer: Peer) -> list[zmq.Frame]:
        until_ns = time.monotonic_ns() + self._stall_ns
        while not connection.socket.poll(_LOOK_MS):
            if connection.is_rejected:
                raise _SecretRejectedError
            if peer not in self._peers:
                raise LinkError("the peer is gone")
            if time.monotonic_ns() > until_ns:
                raise LinkError(f"the peer sent nothing for {self._stall_ns / NS_PER_S:.1f} s")
        return connection.socket.recv_multipart(copy=False)

    # -- the owner's side

    def _answer_request(self, frames: Sequence[zmq.Frame]) -> list[Any] | None:
        """The number and the bytes; without bytes where they are not to be had."""
        if len(frames) != 2:
            return None
        try:
            head = _decode(frames[0].buffer)
            offsets = np.frombuffer(frames[1].buffer, "<i8").astype(np.int64)
        except (msgspec.MsgspecError, ValueError):
            return None
        number, size = _encode(head.number), head.range_bytes
        arena = next((arena for tier, arena in self._arenas.items() if int(tier) == head.tier), None)
        if arena is None or size < 1 or size * len(offsets) > self._bytes_max or not _has_ranges(arena, offsets, size):
            return [number, b"", b"no such ranges"]
        if arena.generation != head.generation:
            return [number, b"", b"another generation"]
        if head.line and isinstance(arena, GpuMemory):
            staged = self._staging.stage_ranges(head.line, arena, offsets, size, time.monotonic_ns())
            if staged is not None and arena.generation == head.generation:
                return [number, b"", b"", _encode(_Facts(False, 0, staged))]
        encodes = head.codec == _core.KV_CODEC_VERSION and self._codec.mode != "none"
        encoded, spent_ns = self._encode_ranges(arena, offsets, size) if encodes else (None, 0)
        payload = _copy_ranges(arena, offsets, size) if encoded is None else encoded
        if arena.generation != head.generation:
            return [number, b"", b"another generation"]
        if not encodes:
            return [number, payload.data]
        return [number, payload.data, b"", _encode(_Facts(encoded is not None, spent_ns))]

    def _encode_ranges(self, arena: ArenaMemory, offsets: Any, range_bytes: int) -> tuple[Bytes | None, int]:
        """Their encoding, None where they do not become shorter; and what that took."""
        if isinstance(arena, GpuMemory) or not len(offsets):
            return None, 0
        began_ns = time.thread_time_ns()
        out = np.empty(_core.kv_encoded_bytes_max(range_bytes, len(offsets)), np.uint8)
        nbytes = self._codec.encode(arena.address, offsets, range_bytes, out)
        return out[:nbytes] if nbytes else None, time.thread_time_ns() - began_ns


def _facts_of(frame: zmq.Frame) -> _Facts:
    try:
        return _decode_facts(frame.buffer)
    except (msgspec.MsgspecError, ValueError):
        raise LinkError("the peer answers something else") from None


def _land_staged(place: StagedPlace, reading: _Reading, piece: Ranges) -> Seals:
    if reading.find_staging is None:
        raise LinkError("the peer stages what was not asked for")
    arena = reading.find_staging(place)
    if not 0 <= place.begin <= arena.nbytes - piece.total_bytes:
        raise LinkError("the peer stages outside of its memory")
    return _land_piece(arena.address + place.begin, reading.target, piece)


def _land_piece(address: int, target: ArenaMemory, piece: Ranges) -> Seals:
    """Its ranges lie one after the other at ``address``."""
    places = np.arange(len(piece), dtype=np.int64) * piece.range_bytes
    if isinstance(target, GpuMemory):
        return target.land_host(piece.dst_offsets, address, places, piece.range_bytes)
    return _core.copy_ranges_sealed(target.address, piece.dst_offsets, address, places, piece.range_bytes)


def _has_ranges(arena: ArenaMemory, offsets: Any, range_bytes: int) -> bool:
    if isinstance(arena, GpuMemory):
        return arena.has_ranges(offsets, range_bytes)
    return fits(offsets, range_bytes, arena.nbytes)


def _copy_ranges(arena: ArenaMemory, offsets: Any, range_bytes: int) -> Any:
    """Ranges of an arena, one after the other, as bytes of their own."""
    if isinstance(arena, GpuMemory):
        return arena.copied_ranges(offsets, range_bytes)
    payload = np.empty(len(offsets) * range_bytes, np.uint8)
    places = np.arange(len(offsets), dtype=np.int64) * range_bytes
    _core.copy_ranges_sealed(payload.ctypes.data, places, arena.address, offsets, range_bytes)
    return payload
