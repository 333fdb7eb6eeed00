"""A socket at which members of the cluster ask something, and the thread that answers: over ZeroMQ, by the cluster's
keys."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import zmq

from memserve.errors import UserError
from memserve.runtime.links.curve import CurveKeys, Doorkeeper, Socket
from memserve.runtime.links.devices import with_port
from memserve.runtime.links.outbox import configure, new_context

log = logging.getLogger(__name__)

Answer = Callable[[Sequence[zmq.Frame]], Sequence[Any] | None]
"""Frames of a question -> those of its answer; None: there is none."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process of a cluster listens, and what it asks of those that come."""

    secret: str
    """The cluster's."""
    host: str = "127.0.0.1"
    advertise: str | None = None
    """The host name by which others reach it; None: ``host``."""

    @property
    def known_as(self) -> str:
        """The host for others."""
        return self.advertise or self.host


class Answering:
    """Answers members one after the other, in a thread of its own.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(self, where: Listening, name: str, answer: Answer, *, bytes_max: int, queued_max: int) -> None:
        """``bytes_max``: of a frame of a question; ``queued_max``: answers that wait for one reader, before further
        ones are lost. ``answer`` may raise: the question is left without an answer, and a line logged."""
        self._name, self._answer = name, answer
        keys = CurveKeys.derived_from(where.secret)
        self._context = new_context()
        self._doorkeeper = Doorkeeper(self._context, keys)
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, with_port(where.host, 0))
        self._socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
        self._socket.set_hwm(queued_max)
        keys.listen(self._socket)
        try:
            self._socket.bind(f"tcp://{with_port(where.host, '*')}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"cannot listen on {where.host}: {error.strerror}", param="host") from error
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0")
        #: where members ask, ``tcp://host:port``
        self.address = f"tcp://{with_port(where.known_as, int(endpoint.rsplit(b':', 1)[1]))}"
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
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
        while True:
            ready = dict(poller.poll())
            if self._stop_fd in ready:
                return
            self._doorkeeper.answer_all()
            if self._socket in ready:
                self._ask(*self._socket.recv_multipart(copy=False))

    def _ask(self, sender: zmq.Frame, *frames: zmq.Frame) -> None:
        try:
            answer = self._answer(frames)
        except Exception as error:  # whatever was asked: the thread must live
            log.warning("%s: a question cannot be answered: %s", self._name, str(error)[:200])
            return
        if answer is not None:
            self._socket.send_multipart([sender.bytes, *answer], copy=False)


def line_to(context: zmq.Context[Socket], keys: CurveKeys, address: str, *, bytes_max: int) -> Socket:
    """A socket that asks at ``address``. ``bytes_max``: of a frame of an answer."""
    line: Socket = context.socket(zmq.DEALER)
    configure(line, address)
    line.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    keys.speak(line)
    line.connect(address)
    return line
