"""A socket at which members of the cluster ask something, and the thread that answers: over ZeroMQ, by the cluster's
keys."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq

from memserve.base.errors import UserError
from memserve.system.secrets import as_followed
from memserve.transport.curve import (
    LOOK_MS,
    Context,
    CurveKeys,
    Socket,
    ZapAuthenticator,
    close_monitor,
    handshake_failed,
    limit_frames,
    listen_anew,
    open_monitor,
)
from memserve.transport.network_devices import ListenAddress, with_port
from memserve.transport.outbound import configure, new_context

log = logging.getLogger(__name__)

Answer = Callable[[Sequence[zmq.Frame]], Sequence[Any] | None]
"""Frames of a question -> those of its answer; None: there is none."""


class Answering:
    """Answers members one after the other, in a thread of its own.

    Raises :class:`UserError` when it cannot listen.
    """

    def __init__(
        self, listen_address: ListenAddress, name: str, answer: Answer, *, bytes_max: int, queued_max: int
    ) -> None:
        """``bytes_max``: of a frame of a question; ``queued_max``: answers that wait for one reader, before further
        ones are lost. ``answer`` may raise: the question is left without an answer, and a line logged."""
        self._name, self._answer = name, answer
        self._secret = as_followed(listen_address.secret).derive_value(CurveKeys.all_in, tells=False)
        self._listen_keys = self._secret.value()[0]
        self._context = new_context()
        self._authenticator = ZapAuthenticator(self._context, self._listen_keys)
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, with_port(listen_address.host, 0))
        limit_frames(self._socket, bytes_max)
        self._socket.set_hwm(queued_max)
        self._listen_keys.configure_server(self._socket)
        try:
            self._socket.bind(f"tcp://{with_port(listen_address.host, '*')}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"cannot listen on {listen_address.host}: {error.strerror}", param="host") from error
        self._endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        #: where members ask, ``tcp://host:port``
        self.address = f"tcp://{with_port(listen_address.known_as, int(self._endpoint.rsplit(':', 1)[1]))}"
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._run_server, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and close the sockets."""
        if self._context.closed:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        for socket in (self._socket, self._authenticator.socket):
            socket.close(0)
        self._context.term()

    def _run_server(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._authenticator.socket, self._stop_fd):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(LOOK_MS if self._secret.files else None))
            if self._stop_fd in ready:
                return
            self._follow_secret()
            self._authenticator.answer_all()
            if self._socket in ready:
                self._answer_request(*self._socket.recv_multipart(copy=False))

    def _follow_secret(self) -> None:
        keys = self._secret.value()[0]
        if keys != self._listen_keys:
            self._authenticator.set_keys(keys)
            if listen_anew(self._socket, self._endpoint, keys):
                self._listen_keys = keys

    def _answer_request(self, sender: zmq.Frame, *frames: zmq.Frame) -> None:
        try:
            answer = self._answer(frames)
        except Exception as error:  # whatever was asked: the thread must live
            log.warning("%s: a question cannot be answered: %s", self._name, str(error)[:200])
            return
        if answer is not None:
            self._socket.send_multipart([sender.bytes, *answer], copy=False)


class Line:
    """A socket that asks at one address, by one of the cluster's keys."""

    def __init__(
        self, context: Context, keys: tuple[CurveKeys, ...], address: str, *, bytes_max: int, key: int = 0
    ) -> None:
        """``bytes_max``: of a frame of an answer; ``key``: which of ``keys``."""
        self._context, self._address, self._bytes_max, self._key = context, address, bytes_max, key
        self.keys = keys
        #: whether an answer has come over it
        self.was_used = False
        #: names it to the other end; no other line has it
        self.number = secrets.randbits(62) | 1
        self.socket: Socket = context.socket(zmq.DEALER)
        configure(self.socket, address)
        limit_frames(self.socket, bytes_max)
        keys[key].configure_client(self.socket)
        self._monitor = open_monitor(self.socket) if len(keys) > 1 else None
        self.socket.connect(address)

    @property
    def is_rejected(self) -> bool:
        """While the secret changes: whether the other end has another one."""
        return self._monitor is not None and bool(handshake_failed(self._monitor))

    def with_next_key(self) -> Line:
        """Another line in the place of this one, which is closed."""
        self.close()
        key = (self._key + 1) % len(self.keys)
        return Line(self._context, self.keys, self._address, bytes_max=self._bytes_max, key=key)

    def close(self) -> None:
        """What comes late is not read."""
        close_monitor(self.socket, self._monitor)
        self.socket.close(0)
