"""Queries of attention, and their answers, between the devices of instances: over ZeroMQ, by the cluster's keys.

A layer of each step waits for them, so they go directly from the device's thread of one process to a thread of the
other, which computes beside the steps there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from memserve.base.errors import check
from memserve.instance.events import DropSegment, HoldSegment
from memserve.model.attention.sequence_parallel import HeldKv, Parts, Query, SegmentLostError
from memserve.protocol.messages import Segment
from memserve.protocol.peers import Peer
from memserve.system.secrets import Secret, as_followed
from memserve.transport.curve import CurveKeys
from memserve.transport.network_devices import ListenAddress
from memserve.transport.outbound import SEND_QUEUE_MAX, new_context
from memserve.transport.request_server import Answering, Line

if TYPE_CHECKING:
    from memserve.model.device import ModelDevice

log = logging.getLogger(__name__)

ANSWER_S = 20.0
"""How long an answer may take. A holder that has died is known to be gone long before."""
_LOOK_MS = 20
"""Between two looks whether a holder is gone."""
_BYTES_MAX = 1 << 30


class _Head(msgspec.Struct, frozen=True, array_like=True):
    number: int
    name: str
    layer: int
    shape: tuple[int, int, int]
    scale: float
    softcap: float


_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Head).decode


class SegmentServer:
    """Answers queries about what ``attend`` knows, in a thread of its own, one after the other.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(self, listen_address: ListenAddress, dtype: str, attend: Callable[[Query], Parts | None]) -> None:
        """``dtype``: of queries. ``attend`` returns None for a segment that is not here."""
        self._attend, self._dtype = attend, getattr(torch, dtype)
        sizes = {"bytes_max": _BYTES_MAX, "queued_max": SEND_QUEUE_MAX}
        self._answering = Answering(listen_address, "segments", self._answer_query, **sizes)
        self.address = self._answering.address

    def close(self) -> None:
        """Answer nothing any more."""
        self._answering.close()

    def _answer_query(self, frames: Sequence[zmq.Frame]) -> list[Any] | None:
        """One query, one answer: the number, then outputs and statistics, or nothing."""
        if len(frames) != 2:
            return None
        parts: Parts | None = None
        try:
            head = _decode(frames[0].buffer)
        except msgspec.MsgspecError:
            return None
        try:
            if min(head.shape) < 1 or math.prod(head.shape) * self._dtype.itemsize != len(frames[1].buffer):
                raise ValueError(f"{len(frames[1].buffer)} bytes are no queries of the shape {head.shape}")
            q = torch.empty(head.shape, dtype=self._dtype)
            _copy(frames[1], q)
            with torch.inference_mode():
                parts = self._attend(Query(head.name, head.layer, q, head.scale, head.softcap))
        except Exception as error:  # whatever was asked: the sender must not wait
            log.warning("a query about a segment cannot be answered: %s", str(error)[:200])
        number = msgspec.msgpack.encode(head.number)
        return [number, *(part.view(-1).view(torch.uint8).numpy().data for part in parts or ())]


class ZmqSegmentLines:
    """A :class:`memserve.model.attention.sequence_parallel.SegmentLines` to :class:`SegmentServer` processes.

    Used from one thread, but for :meth:`remove_peer`.
    """

    def __init__(self, secret: Secret, answer_s: float = ANSWER_S) -> None:
        self._secret, self._answer_s = as_followed(secret).derive_value(CurveKeys.all_in, tells=False), answer_s
        self._keys = self._secret.value()
        self._context = new_context()
        self._connections: dict[tuple[Peer, str], Line] = {}
        self._removed_peers: set[Peer] = set()
        self._numbers = 0
        #: number -> the segment that was asked, and what
        self._pending: dict[int, tuple[Segment, bytes, memoryview]] = {}
        #: answers that came before they were waited for
        self._early: dict[int, list[zmq.Frame]] = {}
        #: time in which steps stood still
        self.waited_ns = 0
        self.queries = 0

    def remove_peer(self, peer: Peer) -> None:
        """``peer`` will not answer any more. Thread-safe."""
        self._removed_peers.add(peer)

    def send_query(self, segment: Segment, query: Query) -> int:
        """See :class:`~memserve.model.attention.sequence_parallel.SegmentLines`."""
        self._numbers += 1
        self.queries += 1
        number = self._numbers
        shape = cast(tuple[int, int, int], tuple(query.q.shape))
        head = _encode(_Head(number, query.name, query.layer, shape, query.scale, query.softcap))
        data = query.q.view(-1).view(torch.uint8).numpy().data
        line = self._connection_to(segment)
        self._pending[number] = segment, head, data
        if not self._try_send_frames(line, segment, head, data):
            self._try_next_key(segment)
        return number

    def _try_send_frames(self, line: Line, segment: Segment, head: bytes, data: memoryview) -> bool:
        """False: the peer has another secret than ``line``, and has said so before anything was asked."""
        try:
            line.socket.send_multipart([head, data], zmq.NOBLOCK)
        except zmq.Again:
            if line.is_rejected:
                return False
            self._removed_peers.add(segment.peer)  # it reads nothing
        return True

    def receive_answer(self, number: int, outputs: Tensor, statistics: Tensor) -> None:
        """See :class:`~memserve.model.attention.sequence_parallel.SegmentLines`."""
        (segment, *_), began_ns = self._pending[number], time.monotonic_ns()
        try:
            frames = self._early.pop(number, None) or self._wait_answer(segment, number)
        finally:
            del self._pending[number]
        self.waited_ns += time.monotonic_ns() - began_ns
        places = (outputs, statistics)
        if len(frames) != 2 or any(len(f.buffer) != 4 * p.numel() for f, p in zip(frames, places, strict=True)):
            raise SegmentLostError(f"{segment.peer.name} does not have it")
        for frame, place in zip(frames, places, strict=True):
            _copy(frame, place)

    def _wait_answer(self, segment: Segment, number: int) -> list[zmq.Frame]:
        line, until_s = self._connection_to(segment), time.monotonic() + self._answer_s
        while segment.peer not in self._removed_peers:
            if not line.socket.poll(_LOOK_MS):
                if time.monotonic() > until_s:
                    raise SegmentLostError(f"{segment.peer.name} has not answered within {self._answer_s:g} s")
                if line.is_rejected:
                    line = self._try_next_key(segment)
                continue
            head, *frames = line.socket.recv_multipart(copy=False)
            came = msgspec.msgpack.decode(head.buffer, type=int)
            if came == number:
                return frames
            if came in self._pending:
                self._early[came] = frames
        self._connections.pop(_connection_key(segment)).close()
        raise SegmentLostError(f"{segment.peer.name} is gone")

    def _connection_to(self, segment: Segment) -> Line:
        if not self._pending and (keys := self._secret.value()) != self._keys:  # no line is in use
            self._keys = keys
            self._disconnect_all()
        line = self._connections.get(_connection_key(segment))
        if line is None:
            line = Line(self._context, self._keys, segment.address, bytes_max=_BYTES_MAX)
            self._connections[_connection_key(segment)] = line
        return line

    def _try_next_key(self, segment: Segment) -> Line:
        """The peer has another secret than its line: reconnect, and ask again what it has not answered."""
        key = _connection_key(segment)
        unanswered = (query for number, query in self._pending.items() if number not in self._early)
        queries = [query for query in unanswered if _connection_key(query[0]) == key]
        until_s = time.monotonic() + self._answer_s
        while True:
            line = self._connections[key] = self._connections[key].with_next_key()
            # the next line can be rejected before all is sent: then the one after it sends all again
            if all(self._try_send_frames(line, *query) for query in queries) or time.monotonic() > until_s:
                return line

    def _disconnect_all(self) -> None:
        for line in self._connections.values():
            line.close()
        self._connections.clear()

    def close(self) -> None:
        """Close all lines."""
        self._disconnect_all()
        self._context.term()


class SegmentPort:
    """Both ends at an instance: it answers for what ``device`` holds, and the device asks others.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(self, device: ModelDevice, listen_address: ListenAddress, dtype: str) -> None:
        check(device.held_kv is not None, "this device holds no segments")
        self.held_kv: HeldKv = device.held_kv  # type: ignore[assignment]  # checked in the line before
        self._server = SegmentServer(listen_address, dtype, self.held_kv.answer_query)
        self._lines = ZmqSegmentLines(listen_address.secret)
        device.segment_lines = self._lines
        self.address = self._server.address

    def update_segment(self, order: HoldSegment | DropSegment) -> None:
        """Answer queries about a segment, or no more. Thread-safe."""
        if isinstance(order, HoldSegment):
            self.held_kv.hold_segment(order.name, order.blocks, order.tokens)
        else:
            self.held_kv.drop_segment(order.name)

    def remove_peer(self, peer: Peer) -> None:
        """``peer`` is no member any more: nothing waits for it. Thread-safe."""
        self._lines.remove_peer(peer)

    def close(self) -> None:
        """Answer nothing any more. The device closes its lines."""
        self._server.close()


def _copy(frame: zmq.Frame, to: Tensor) -> None:
    """The bytes of ``frame``, which may lie anywhere, into a contiguous tensor of as many."""
    to.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(frame.buffer, np.uint8)


def _connection_key(segment: Segment) -> tuple[Peer, str]:
    return segment.peer, segment.address
