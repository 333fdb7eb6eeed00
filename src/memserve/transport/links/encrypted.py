"""Reading peers through the cluster's own channel: over ZeroMQ, encrypted, both ends authenticated by the secret.

    reader                                                  owner
    generation, tier, bytes of a range; where they begin -> copies the ranges into one message
    copies them into the arena, checksums                <- their bytes; or why not

A read goes in pieces of a mebibyte, four on their way at a time: one is encrypted and sent while another is copied.
What was given up comes late, or never, in a message that is not read: nothing but our own copies writes an arena.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import zmq

from memserve import _core
from memserve.base.types import Tier
from memserve.base.units import MIB, NS_PER_S, ns_from_s
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.secrets import as_followed
from memserve.transport.curve import CurveKeys
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.outbound import new_context
from memserve.transport.ports import ArenaMemory, Arenas, LinkError, Seals, check_ranges, place_of
from memserve.transport.ranges import Ranges, fits
from memserve.transport.request_server import Answering, Line, ListenAddress

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


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Head).decode


class _SecretRejectedError(Exception):
    """The cluster's secret changes, and the owner has another one than the line."""


class CurveLink:
    """A :class:`~memserve.transport.ports.PageLink` for networks that are not trusted: between hosts by default.

    Raises :class:`UserError` when it cannot listen.
    """

    name = "curve"
    workers = 4

    def __init__(
        self, arenas: Arenas, listen_address: ListenAddress, block_bytes: int, *, stall_s: float = STALL_S
    ) -> None:
        self._arenas, self._stall_ns = arenas, ns_from_s(stall_s)
        self._bytes_max = max(PIECE_BYTES, block_bytes)
        self._secret = as_followed(listen_address.secret).derive_value(CurveKeys.all_in, tells=False)
        self._keys = self._secret.value()
        self._lock = threading.Lock()
        self._peers: dict[Peer, PeerInfo] = {}
        self._connections: dict[Peer, list[Line]] = {}
        """To peers that were read from: those that no read uses."""
        self._numbers = 0
        self._context = new_context()
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
            connections = self._connections.pop(peer, [])
        for connection in connections:
            connection.close()

    def expect_reads(self) -> None:
        """The thread that answers waits for questions."""

    def read(self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges) -> Seals:
        """Ask piece by piece, and copy what comes. Raises :class:`LinkError`."""
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
        try:
            while True:
                try:
                    seals = self._read(connection, peer, src_tier, target, ranges)
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

    def _close_connections(self) -> None:
        for connection in chain.from_iterable(self._connections.values()):
            connection.close()
        self._connections.clear()

    def _read(self, connection: Line, peer: Peer, tier: Tier, target: ArenaMemory, ranges: Ranges) -> Seals:
        step = max(1, self._bytes_max // ranges.range_bytes)
        pending: deque[tuple[int, Ranges]] = deque()
        seals: list[Seals] = []
        for begin in range(0, len(ranges), step):
            piece = ranges.slice_ranges(begin, begin + step)
            pending.append((self._send_request(connection, peer, tier, piece), piece))
            if len(pending) == _UNDER_WAY:
                seals.append(self._receive_piece(connection, peer, target, *pending.popleft()))
        while pending:
            seals.append(self._receive_piece(connection, peer, target, *pending.popleft()))
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def _send_request(self, connection: Line, peer: Peer, tier: Tier, piece: Ranges) -> int:
        with self._lock:
            self._numbers += 1
            number = self._numbers
        head = _encode(_Head(number, peer.generation, int(tier), piece.range_bytes))
        try:
            connection.socket.send_multipart([head, piece.src_offsets.astype("<i8").tobytes()], zmq.NOBLOCK)
        except zmq.Again as error:
            if connection.is_rejected:  # while no read used it
                raise _SecretRejectedError from None
            raise LinkError("the peer reads no questions") from error
        return number

    def _receive_piece(self, connection: Line, peer: Peer, target: ArenaMemory, number: int, piece: Ranges) -> Seals:
        """Wait for the piece, then copy it: pieces come in the order in which they were asked for."""
        head, *frames = self._wait_for_reply(connection, peer)
        if len(frames) == 2:
            raise LinkError(f"the peer hands out none: {frames[1].bytes.decode(errors='replace')[:100]}")
        if head.bytes != _encode(number) or len(frames) != 1 or len(frames[0].buffer) != piece.total_bytes:
            raise LinkError("the peer answers something else")
        came = np.frombuffer(frames[0].buffer, np.uint8)
        places = np.arange(len(piece), dtype=np.int64) * piece.range_bytes
        if isinstance(target, GpuMemory):
            return target.land_host(piece.dst_offsets, came.ctypes.data, places, piece.range_bytes)
        return _core.copy_ranges_sealed(target.address, piece.dst_offsets, came.ctypes.data, places, piece.range_bytes)

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
        payload = _copy_ranges(arena, offsets, size)
        if arena.generation != head.generation:
            return [number, b"", b"another generation"]
        return [number, payload.data]


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
