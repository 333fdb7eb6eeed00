"""Which processes may speak: keys that follow from the cluster's secret, and the authenticator that asks for them.

Every member has the same CURVE key pair, derived from the secret. No other process knows even the public key, which a
client needs to say anything at all; the authenticator (ZeroMQ's authentication protocol, RFC 27) makes sure that the
client has the secret one as well. What is sent is encrypted, and cannot be recorded and sent again by another process.

Connections that came to a mailbox and went without a message: peers without the secret are named, counted.

ZeroMQ tells that a connection was accepted, or has ended, by its descriptor; of a failed handshake it tells only that
there was one. So a connection is unproven until it has brought a message, or as many handshakes have succeeded as
there are connections that could have passed them. One that ends without a message and without a failure may be one of
those: a process that tries the secret and leaves (:mod:`memserve.transport.probe`), as a server does before it
calls a store, is none.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import cast

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from memserve.base.errors import UserError
from memserve.kv.identity import secrets_in
from memserve.system.log import RatedLog

log = logging.getLogger(__name__)

SECRET_CHARS_MIN = 16
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
LOOK_MS = 500
"""How often a thread that listens looks whether the secret has changed."""
CHANGE_LOOK_MS = 20
"""And while it changes: how often, whether peers have followed."""
_CIPHER_BYTES = 33
"""What CURVE adds to each frame (RFC 26: the command's name 8, nonce 8, authenticator 16, flags 1)."""
_CAN_BE_READ = int(zmq.POLLIN)  # a flag of zmq's makes another one of every number that it meets
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def can_be_read(socket: Socket) -> bool:
    """Whether ``socket`` has something. Where it had, its descriptor tells of nothing more until it has not."""
    return bool(int(cast(int, socket.get(zmq.EVENTS))) & _CAN_BE_READ)


def limit_frames(socket: Socket, frame_bytes_max: int) -> None:
    """Let ``socket`` receive frames of up to ``frame_bytes_max`` bytes; a peer that sends a longer one is disconnected.

    ZeroMQ compares its limit with the frame as it travels, encrypted: without room for that, a full frame ends the
    connection without a word."""
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max + _CIPHER_BYTES)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The key pair of a cluster, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def derived_from(cls, cluster_secret: str) -> CurveKeys:
        """The keys that follow from the secret.

        Raises :class:`UserError` for a secret that could be guessed.
        """
        if len(cluster_secret) < SECRET_CHARS_MIN:
            raise UserError(
                f"a cluster secret has at least {SECRET_CHARS_MIN} characters, this one {len(cluster_secret)}",
                hint='make one: python -c "import secrets; print(secrets.token_hex(32))"',
                param="cluster_secret",
            )
        seed = hashlib.blake2b(cluster_secret.encode(), digest_size=32, person=b"memserve curve")
        secret = z85.encode(seed.digest())
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def all_in(cls, text: str) -> tuple[CurveKeys, ...]:
        """Those of each secret in ``text``: of the first one this process listens with it; a peer that listens with
        another one of them is spoken to with that.

        Raises :class:`UserError` for a text without secrets, and for one that could be guessed.
        """
        return tuple(cls.derived_from(secret) for secret in secrets_in(text) or ("",))

    def configure_server(self, socket: Socket) -> None:
        """Make ``socket`` accept only clients that an authenticator lets in."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret

    def configure_client(self, socket: Socket) -> None:
        """Let ``socket`` connect to members."""
        socket.curve_serverkey = self.public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


def open_monitor(socket: Socket) -> Socket:
    """A socket that tells what happens to the connections of ``socket``."""
    return socket.get_monitor_socket(FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)


def close_monitor(socket: Socket, monitor: Socket | None) -> None:
    """The end of that."""
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(0)


def handshake_failed(monitor: Socket) -> bool | None:
    """Whether the last handshake that a :func:`watch` tells of has failed. None: it tells of none since the last
    call."""
    failed = None
    while can_be_read(monitor):
        failed = bool(int(parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]) & FAILED)
    return failed


def listen_anew(socket: Socket, endpoint: str, keys: CurveKeys) -> bool:
    """Give up all connections that came to ``endpoint``, and accept with other keys. False: not yet, call again: the
    port is still being closed."""
    with contextlib.suppress(zmq.ZMQError):  # it is not bound: the last call came to nothing
        socket.unbind(endpoint)
    keys.configure_server(socket)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        log.info("cannot listen at %s with the new secret yet: %s", endpoint, error.strerror)
        return False
    return True


class ZapAuthenticator:
    """Answers a context's questions whether a client may come in; only the cluster's own key may.

    Build it before anything is bound in ``context``, then call :meth:`answer_all` whenever :attr:`socket` can be read.
    """

    def __init__(self, context: Context, keys: CurveKeys) -> None:
        self.set_keys(keys)
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ENDPOINT)

    def set_keys(self, keys: CurveKeys) -> None:
        """From now on only those with ``keys``."""
        self._key = z85.decode(keys.public)

    def answer_all(self) -> None:
        """Answer all questions that have come."""
        while can_be_read(self.socket):
            self._answer_request()

    def _answer_request(self) -> None:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        # compared in constant time: how long a refusal takes must not tell how much of a key was right
        welcome = mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], self._key)
        status = (b"200", b"OK", b"member") if welcome else (b"400", b"unknown key", b"")
        self.socket.send_multipart([version, request, *status, b""])


_SEEN = FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_UNKNOWN = "an unknown address"
_OTHER_SECRET = "it has another cluster secret"
_BROKE_OFF = "it broke off before it had shown the cluster's secret"


class FailedHandshakes:
    """Watches the connections of one listening socket. For the thread that reads it alone."""

    def __init__(self, inbox: Socket, port: int) -> None:
        """``port``: where ``inbox`` is bound."""
        self.monitor: Socket = inbox.get_monitor_socket(_SEEN)
        """Can be read when there is something to :meth:`read_events` at."""
        self._port = port
        self._unproven: dict[int, str] = {}
        """Descriptor -> address of all connections that may be unauthenticated; no more than there are descriptors."""
        self._passed = 0
        """Handshakes that succeeded, each of another one of those connections."""
        self._failed_connections: list[tuple[int, str, str]] = []
        """Connections that have ended unproven: descriptor, address, why. Their messages may still lie unread."""
        self._failure_reason = ""
        """Of the handshake that has just failed: its connection is the next that ends."""
        self._rated_log = RatedLog(log)

    def read_events(self) -> None:
        """Take in all events. To be called before messages are read: the senders must be known here."""
        while can_be_read(self.monitor):
            try:
                monitor_event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._handle_event(int(monitor_event["event"]), int(monitor_event["value"]))

    def _handle_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._unproven[descriptor] = _address_of(descriptor, self._port)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._passed += 1
        elif event == zmq.EVENT_DISCONNECTED:
            why, self._failure_reason = self._failure_reason, ""
            if (address := self._unproven.pop(descriptor, None)) is None:
                pass
            # ZeroMQ does not say whose handshake succeeded: one that ends without an error is taken for one of those
            elif self._passed and not why:
                self._passed -= 1
            else:
                self._failed_connections.append((descriptor, address, why or "it does not speak this protocol"))
        elif event & FAILED:
            self._failure_reason = _BROKE_OFF if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else _OTHER_SECRET
        if self._passed >= len(self._unproven):  # more: of connections that have brought a message
            self._unproven.clear()
            self._passed = 0

    @property
    def has_unproven(self) -> bool:
        """Whether a connection may still be unauthenticated."""
        return bool(self._unproven or self._failed_connections)

    def mark_proven(self, descriptor: int) -> None:
        """A message came this way: nothing without the secret can write one."""
        if self._unproven.pop(descriptor, None) is not None:
            self._passed = max(0, self._passed - 1)
        elif self._failed_connections:
            # its message was read only after the connection had ended: it was a member all the same
            self._failed_connections = [failed for failed in self._failed_connections if failed[0] != descriptor]

    def log_failed(self) -> int:
        """All messages have been read: log and count the connections that ended without one."""
        connections, self._failed_connections = self._failed_connections, []
        for _, address, why in connections:
            self.log_rejection(address, why)
        return len(connections)

    def log_rejection(self, address: str, why: str) -> None:
        """One line about ``address`` (``host:port``), unless there was one about the host just now."""
        host = address.rpartition(":")[0] or address
        self._rated_log.log_limited(logging.WARNING, (host, why), "rejected %s at the cluster port: %s", address, why)

    def close(self) -> None:
        """No more events."""
        self.monitor.close(0)


def _address_of(descriptor: int, port: int) -> str:
    """``host:port`` at the other end. The connection may have ended, and its number been given to another socket of
    this process: one of another port is not taken for it."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.getsockname()[1] != port:
                return _UNKNOWN
            host, its_port = copy.getpeername()[:2]
            return f"[{host}]:{its_port}" if ":" in host else f"{host}:{its_port}"
    except (OSError, IndexError, ValueError):
        return _UNKNOWN
