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
from memserve.system.secrets import Secret, followed
from memserve.transport.curve import CurveKeys
from memserve.transport.outbound import LETTERS_QUEUED_MAX, new_context
from memserve.transport.request_server import Answering, Line, ListenAddress

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

    def __init__(self, where: ListenAddress, dtype: str, attend: Callable[[Query], Parts | None]) -> None:
        """``dtype``: of queries. ``attend`` returns None for a segment that is not here."""
        self._attend, self._dtype = attend, getattr(torch, dtype)
        sizes = {"bytes_max": _BYTES_MAX, "queued_max": LETTERS_QUEUED_MAX}
        self._answering = Answering(where, "segments", self._answer, **sizes)
        self.address = self._answering.address

    def close(self) -> None:
        """Answer nothing any more."""
        self._answering.close()

    def _answer(self, frames: Sequence[zmq.Frame]) -> list[Any] | None:
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

    Used from one thread, but for :meth:`gone`.
    """

    def __init__(self, secret: Secret, answer_s: float = ANSWER_S) -> None:
        self._secret, self._answer_s = followed(secret).then(CurveKeys.all_in, tells=False), answer_s
        self._keys = self._secret.value()
        self._context = new_context()
        self._lines: dict[tuple[Peer, str], Line] = {}
        self._gone: set[Peer] = set()
        self._numbers = 0
        #: number -> the segment that was asked, and what
        self._asked: dict[int, tuple[Segment, bytes, memoryview]] = {}
        #: answers that came before they were waited for
        self._early: dict[int, list[zmq.Frame]] = {}
        #: time in which steps stood still
        self.waited_ns = 0
        self.queries = 0

    def gone(self, peer: Peer) -> None:
        """``peer`` will not answer any more. Thread-safe."""
        self._gone.add(peer)

    def ask(self, segment: Segment, query: Query) -> int:
        """See :class:`~memserve.model.attention.sequence_parallel.SegmentLines`."""
        self._numbers += 1
        self.queries += 1
        number = self._numbers
        shape = cast(tuple[int, int, int], tuple(query.q.shape))
        head = _encode(_Head(number, query.name, query.layer, shape, query.scale, query.softcap))
        data = query.q.view(-1).view(torch.uint8).numpy().data
        line = self._line(segment)
        self._asked[number] = segment, head, data
        self._send(line, segment, head, data)
        return number

    def _send(self, line: Line, segment: Segment, head: bytes, data: memoryview) -> None:
        try:
            line.socket.send_multipart([head, data], zmq.NOBLOCK)
        except zmq.Again:
            if line.is_turned_away:  # while nothing was asked
                self._try_next_key(segment)
            else:
                self._gone.add(segment.peer)  # it reads nothing

    def answer(self, number: int, outputs: Tensor, statistics: Tensor) -> None:
        """See :class:`~memserve.model.attention.sequence_parallel.SegmentLines`."""
        (segment, *_), began_ns = self._asked[number], time.monotonic_ns()
        try:
            frames = self._early.pop(number, None) or self._wait(segment, number)
        finally:
            del self._asked[number]
        self.waited_ns += time.monotonic_ns() - began_ns
        places = (outputs, statistics)
        if len(frames) != 2 or any(len(f.buffer) != 4 * p.numel() for f, p in zip(frames, places, strict=True)):
            raise SegmentLostError(f"{segment.peer.name} does not have it")
        for frame, place in zip(frames, places, strict=True):
            _copy(frame, place)

    def _wait(self, segment: Segment, number: int) -> list[zmq.Frame]:
        line, until_s = self._line(segment), time.monotonic() + self._answer_s
        while segment.peer not in self._gone:
            if not line.socket.poll(_LOOK_MS):
                if time.monotonic() > until_s:
                    raise SegmentLostError(f"{segment.peer.name} has not answered within {self._answer_s:g} s")
                if line.is_turned_away:
                    line = self._try_next_key(segment)
                continue
            head, *frames = line.socket.recv_multipart(copy=False)
            came = msgspec.msgpack.decode(head.buffer, type=int)
            if came == number:
                return frames
            if came in self._asked:
                self._early[came] = frames
        self._lines.pop(_place(segment)).close()
        raise SegmentLostError(f"{segment.peer.name} is gone")

    def _line(self, segment: Segment) -> Line:
        if not self._asked and (keys := self._secret.value()) != self._keys:  # no line is in use
            self._keys = keys
            self._hang_up()
        line = self._lines.get(_place(segment))
        if line is None:
            line = Line(self._context, self._keys, segment.address, bytes_max=_BYTES_MAX)
            self._lines[_place(segment)] = line
        return line

    def _try_next_key(self, segment: Segment) -> Line:
        """The peer has another secret than its line: dial anew, and ask again what it has not answered."""
        line = self._lines[_place(segment)] = self._lines[_place(segment)].with_next_key()
        for number, (of, head, data) in self._asked.items():
            if _place(of) == _place(segment) and number not in self._early:
                self._send(line, of, head, data)
        return line

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def close(self) -> None:
        """Close all lines."""
        self._hang_up()
        self._context.term()


class SegmentPort:
    """Both ends at an instance: it answers for what ``device`` holds, and the device asks others.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(self, device: ModelDevice, where: ListenAddress, dtype: str) -> None:
        check(device.held_kv is not None, "this device holds no segments")
        self.held: HeldKv = device.held_kv  # type: ignore[assignment]  # checked in the line before
        self._server = SegmentServer(where, dtype, self.held.attend)
        self._lines = ZmqSegmentLines(where.secret)
        device.segment_lines = self._lines
        self.address = self._server.address

    def perform(self, order: HoldSegment | DropSegment) -> None:
        """Answer queries about a segment, or no more. Thread-safe."""
        if isinstance(order, HoldSegment):
            self.held.hold(order.name, order.blocks, order.tokens)
        else:
            self.held.drop(order.name)

    def gone(self, peer: Peer) -> None:
        """``peer`` is no member any more: nothing waits for it. Thread-safe."""
        self._lines.gone(peer)

    def close(self) -> None:
        """Answer nothing any more. The device closes its lines."""
        self._server.close()


def _copy(frame: zmq.Frame, to: Tensor) -> None:
    """The bytes of ``frame``, which may lie anywhere, into a contiguous tensor of as many."""
    to.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(frame.buffer, np.uint8)


def _place(segment: Segment) -> tuple[Peer, str]:
    return segment.peer, segment.address
