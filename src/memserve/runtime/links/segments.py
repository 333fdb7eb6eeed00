"""Queries of attention, and their answers, between the devices of instances: over ZeroMQ, by the cluster's keys.

A layer of each step waits for them, so they go directly from the device's thread of one process to a thread of the
other, which computes beside the steps there.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch
import zmq
from torch import Tensor

from memserve.errors import UserError, check
from memserve.instance.events import DropSegment, HoldSegment
from memserve.messages import Peer
from memserve.model.attention.segments import HeldKv, Parts, Query, SegmentLostError
from memserve.runtime.links.curve import CurveKeys, Doorkeeper, Socket
from memserve.runtime.links.devices import with_port
from memserve.runtime.links.outbox import configure, new_context
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

    def __init__(
        self, secret: str, host: str, dtype: str, attend: Callable[[Query], Parts | None], advertise: str | None = None
    ) -> None:
        """``dtype``: of queries. ``attend`` returns None for a segment that is not here."""
        self._attend, self._dtype = attend, getattr(torch, dtype)
        keys = CurveKeys.derived_from(secret)
        self._context = new_context()
        self._doorkeeper = Doorkeeper(self._context, keys)
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, with_port(host, 0))
        keys.listen(self._socket)
        try:
            self._socket.bind(f"tcp://{with_port(host, '*')}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"cannot listen on {host}: {error.strerror}", param="host") from error
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0")
        self.address = f"tcp://{with_port(advertise or host, int(endpoint.rsplit(b':', 1)[1]))}"
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._work, name="segments", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close the sockets."""
        if self._context.closed:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        for socket in (self._socket, self._doorkeeper.socket):
            socket.close(0)
        self._context.term()

    def _work(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._doorkeeper.socket, self._stop_fd):
            poller.register(source, zmq.POLLIN)
        with torch.inference_mode():
            while True:
                ready = dict(poller.poll())
                if self._stop_fd in ready:
                    return
                self._doorkeeper.answer_all()
                if self._socket in ready:
                    self._answer(*self._socket.recv_multipart(copy=False))

    def _answer(self, sender: zmq.Frame, *frames: zmq.Frame) -> None:
        """One query, one answer: the number, then outputs and statistics, or nothing."""
        if len(frames) != 2:
            return
        parts: Parts | None = None
        try:
            head = _decode(frames[0].buffer)
        except msgspec.MsgspecError:
            return
        try:
            if min(head.shape) < 1 or math.prod(head.shape) * self._dtype.itemsize != len(frames[1].buffer):
                raise ValueError(f"{len(frames[1].buffer)} bytes are no queries of the shape {head.shape}")
            q = torch.empty(head.shape, dtype=self._dtype)
            _copy(frames[1], q)
            parts = self._attend(Query(head.name, head.layer, q, head.scale, head.softcap))
        except Exception as error:  # whatever was asked: the thread must live, and the sender must not wait
            log.warning("a query about a segment cannot be answered: %s", str(error)[:200])
        number = msgspec.msgpack.encode(head.number)
        found = [] if parts is None else [part.view(-1).view(torch.uint8).numpy().data for part in parts]
        self._socket.send_multipart([sender.bytes, number, *found], copy=False)


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
            line = self._lines[_place(segment)] = self._context.socket(zmq.DEALER)
            _configure(line, segment.address)
            self._keys.speak(line)
            line.connect(segment.address)
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

    def __init__(self, device: ModelDevice, secret: str, host: str, dtype: str, advertise: str | None = None) -> None:
        check(device.held_kv is not None, "this device holds no segments")
        self.held: HeldKv = device.held_kv  # type: ignore[assignment]  # checked in the line before
        self._server = SegmentServer(secret, host, dtype, self.held.attend, advertise)
        self._lines = ZmqSegmentLines(secret)
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


def _configure(socket: Socket, address: str) -> None:
    configure(socket, address)
    socket.setsockopt(zmq.MAXMSGSIZE, _BYTES_MAX)
