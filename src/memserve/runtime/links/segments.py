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

from memserve.errors import check
from memserve.instance.events import DropSegment, HoldSegment
from memserve.messages import Peer
from memserve.model.attention.segments import HeldKv, Parts, Query, SegmentLostError
from memserve.runtime.links.answering import Answering, Listening, line_to
from memserve.runtime.links.curve import CurveKeys, Socket
from memserve.runtime.links.outbox import LETTERS_QUEUED_MAX, new_context
from memserve.segments import Segment

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

    def __init__(self, where: Listening, dtype: str, attend: Callable[[Query], Parts | None]) -> None:
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
    """A :class:`memserve.model.attention.segments.SegmentLines` to :class:`SegmentServer` processes.

    Used from one thread, but for :meth:`gone`.
    """

    def __init__(self, secret: str, answer_s: float = ANSWER_S) -> None:
        self._keys, self._answer_s = CurveKeys.derived_from(secret), answer_s
        self._context = new_context()
        self._lines: dict[tuple[Peer, str], Socket] = {}
        self._gone: set[Peer] = set()
        self._numbers = 0
        #: number -> the segment that was asked
        self._asked: dict[int, Segment] = {}
        #: answers that came before they were waited for
        self._early: dict[int, list[zmq.Frame]] = {}
        #: time in which steps stood still
        self.waited_ns = 0
        self.queries = 0

    def gone(self, peer: Peer) -> None:
        """``peer`` will not answer any more. Thread-safe."""
        self._gone.add(peer)

    def ask(self, segment: Segment, query: Query) -> int:
        """See :class:`~memserve.model.attention.segments.SegmentLines`."""
        self._numbers += 1
        self.queries += 1
        number = self._numbers
        self._asked[number] = segment
        shape = cast(tuple[int, int, int], tuple(query.q.shape))
        head = _encode(_Head(number, query.name, query.layer, shape, query.scale, query.softcap))
        data = query.q.view(-1).view(torch.uint8).numpy().data
        try:
            self._line(segment).send_multipart([head, data], zmq.NOBLOCK)
        except zmq.Again:
            self._gone.add(segment.peer)  # it reads nothing
        return number

    def answer(self, number: int, outputs: Tensor, statistics: Tensor) -> None:
        """See :class:`~memserve.model.attention.segments.SegmentLines`."""
        segment, began_ns = self._asked.pop(number), time.monotonic_ns()
        frames = self._early.pop(number, None) or self._wait(segment, number)
        self.waited_ns += time.monotonic_ns() - began_ns
        places = (outputs, statistics)
        if len(frames) != 2 or any(len(f.buffer) != 4 * p.numel() for f, p in zip(frames, places, strict=True)):
            raise SegmentLostError(f"{segment.peer.name} does not have it")
        for frame, place in zip(frames, places, strict=True):
            _copy(frame, place)

    def _wait(self, segment: Segment, number: int) -> list[zmq.Frame]:
        line, until_s = self._line(segment), time.monotonic() + self._answer_s
        while segment.peer not in self._gone:
            if not line.poll(_LOOK_MS):
                if time.monotonic() > until_s:
                    raise SegmentLostError(f"{segment.peer.name} has not answered within {self._answer_s:g} s")
                continue
            head, *frames = line.recv_multipart(copy=False)
            came = msgspec.msgpack.decode(head.buffer, type=int)
            if came == number:
                return frames
            if came in self._asked:
                self._early[came] = frames
        line.close(0)
        del self._lines[_place(segment)]
        raise SegmentLostError(f"{segment.peer.name} is gone")

    def _line(self, segment: Segment) -> Socket:
        line = self._lines.get(_place(segment))
        if line is None:
            line = line_to(self._context, self._keys, segment.address, bytes_max=_BYTES_MAX)
            self._lines[_place(segment)] = line
        return line

    def close(self) -> None:
        """Close all lines."""
        for line in self._lines.values():
            line.close(0)
        self._context.term()


class SegmentPort:
    """Both ends at an instance: it answers for what ``device`` holds, and the device asks others.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(self, device: ModelDevice, where: Listening, dtype: str) -> None:
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
