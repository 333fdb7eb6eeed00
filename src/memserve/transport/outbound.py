"""The sending half of a mailbox: one line to each peer, opened when there is something to say."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import zmq

from memserve.base.errors import check
from memserve.base.units import MIB, NS_PER_S
from memserve.protocol import codec as wire
from memserve.protocol.peers import Peer
from memserve.transport.curve import (
    Context,
    CurveKeys,
    Socket,
    close_monitor,
    handshake_failed,
    limit_frames,
    open_monitor,
)

SEND_QUEUE_MAX = 2048
"""At each end of a line. A peer that stands still fills it, then loses what is sent to it."""
LINGER_MS = 1000
"""How long a message to a peer that is not connected, or of a mailbox that closes, may take to leave."""
RECENT_BYTES_MAX = 4 * MIB
"""Of each line, kept to be sent again while the secret changes."""
RECONNECT_S, _RECONNECT_MAX_S = 0.05, 1.0
"""Between two keys that are tried; doubled for a peer that takes none."""
_SENDERS_MAX = 1024
_ANSWER_EVERY_NS = NS_PER_S
_SOCKETS_MAX = 16384
_DESCRIPTORS = 65536


@dataclass(slots=True)
class MailboxCounters:
    """What became of messages, since the mailbox was opened."""

    sent: int = 0
    """Queued for a peer."""
    sent_bytes: int = 0
    received: int = 0
    """Delivered to the callback."""
    received_bytes: int = 0
    lost_unknown: int = 0
    """For a peer that is not connected and was not heard from lately."""
    lost_full: int = 0
    """The peer does not read, and its queue is full."""
    lost_too_long: int = 0
    malformed: int = 0
    other_version: int = 0
    misdirected: int = 0
    """For another receiver or another generation of this one."""
    repeated: int = 0
    """Numbers that were heard before."""
    handshakes_failed: int = 0
    """Of processes without the secret, or with another."""
    callback_errors: int = 0


@dataclass(slots=True)
class _PeerConnection:
    peer: Peer
    address: str
    socket: Socket | None = None
    key: int = 0
    """Which of the cluster's keys it is connected with."""
    monitor: Socket | None = None
    """While the secret changes: tells that the peer has another one."""
    recent: deque[bytes] = field(default_factory=deque)
    """While the secret changes: what was sent, as it may have been on its way when the peer disconnected. The peer
    drops what it has."""
    recent_bytes: int = 0
    is_refused: bool = False
    """Whether the peer did not take the key when it was last connected."""
    retry_at_s: float = 0.0
    """When it may be connected with the next key."""
    pause_s: float = RECONNECT_S

    def add_recent(self, frame: bytes) -> None:
        """It may have to be sent again."""
        self.recent.append(frame)
        self.recent_bytes += len(frame)
        # half of a queue: what is sent again must fit into the new socket with what comes meanwhile
        while self.recent_bytes > RECENT_BYTES_MAX or len(self.recent) > SEND_QUEUE_MAX // 2:
            self.recent_bytes -= len(self.recent.popleft())

    def clear_recent(self) -> None:
        """The secret does not change any more."""
        self.recent.clear()
        self.recent_bytes = 0


@dataclass(slots=True)
class _Sender:
    address: str
    answered_ns: int | None = None


def configure(socket: Socket, address: str = "", own_address: str = "") -> None:
    """What both ends of a line agree on: bounded queues, small messages at once, dead connections noticed.

    IPv6 is on where ``address``, or this process's ``own_address``, is of IPv6: elsewhere a name would be
    looked up as IPv6 first, where nothing listens."""
    socket.ipv6 = "[" in address or "[" in own_address
    socket.linger = 0
    socket.set_hwm(SEND_QUEUE_MAX)
    limit_frames(socket, wire.FRAME_BYTES_MAX)
    # a peer that accepts and then says nothing must not hold the connection for ever
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 3000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    # a host that vanished sends no FIN: without keepalive the kernel would wait for hours
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def new_context(*, gives_way: bool = False) -> Context:
    """A context of its own: an authenticator answers for a whole context. ``gives_way``: as of a mailbox.

    Every line takes two descriptors, and ZeroMQ may abort when there are no more: the process gets as many as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    # never the instance that all of pyzmq shares: there is one authenticator for a context
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    if gives_way and len(os.sched_getaffinity(0)) == 1:
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


class Outbound:
    """Lines to peers. Sends from the calling thread, under a lock, and never waits for a peer."""

    def __init__(
        self, context: Context, keys: tuple[CurveKeys, ...], self_peer: Peer, reply_to: str, counters: MailboxCounters
    ) -> None:
        self._context = context
        self._keys = keys
        self._self_peer = self_peer
        self._reply_to = reply_to
        self._counters = counters
        self._lock = threading.Lock()
        self._number = self._answers = 0
        self._closed = False
        self._connections: dict[str, _PeerConnection] = {}
        """By name: one generation of each."""
        self._senders: OrderedDict[Peer, _Sender] = OrderedDict()
        """Peers that spoke, most recent last."""

    def restart_as(self, self_peer: Peer) -> None:
        """From now on messages are ``self_peer``'s."""
        with self._lock:
            self._self_peer = self_peer

    def connect_peer(self, peer: Peer, address: str) -> None:
        """Remember where ``peer`` is; another generation of that name is forgotten."""
        with self._lock:
            connection = self._connections.get(peer.name)
            if connection is None or connection.peer != peer or connection.address != address:
                self._close_socket(connection)
                self._connections[peer.name] = _PeerConnection(peer, address)

    def disconnect_peer(self, peer: Peer) -> None:
        """Forget ``peer`` and what is queued for it."""
        with self._lock:
            connection = self._connections.get(peer.name)
            if connection is not None and connection.peer == peer:
                self._close_socket(connection)
                del self._connections[peer.name]

    def note_sender(self, peer: Peer, address: str) -> None:
        """``peer`` spoke, and can be answered at ``address``."""
        with self._lock:
            entry = self._senders.get(peer)
            if entry is not None and entry.address == address:
                self._senders.move_to_end(peer)
                return
            # a new address has the same limit of one answer a second, else a sender could lift it by changing its own
            self._senders.pop(peer, None)
            self._senders[peer] = _Sender(address, entry.answered_ns if entry else None)
            if len(self._senders) > _SENDERS_MAX:
                self._senders.popitem(last=False)

    def send_message(self, to: Peer, message: bytes) -> None:
        """Queue an encoded message for ``to`` (generation 0: the bearer of the name now), or lose and count it."""
        with self._lock:
            if self._closed:
                return
            connection = self._connections.get(to.name)
            if connection is not None and (connection.peer == to or to.generation == 0):
                self._check_key(connection)
                if connection.socket is None:
                    self._open_socket(connection)
                # ZeroMQ queues it even before the connection is made: a send never waits for a handshake
                frame = self._send_frame(connection.socket, to, message)
                if frame is not None and connection.monitor is not None:
                    connection.add_recent(frame)
            else:
                self._send_reply(to, message)

    def close(self) -> None:
        """Disconnect everywhere; what is queued has a second to leave."""
        with self._lock:
            self._closed = True
            for connection in self._connections.values():
                self._close_socket(connection, LINGER_MS)
            self._connections.clear()

    def change_keys(self, keys: tuple[CurveKeys, ...]) -> None:
        """The secret changes, or has changed: connections with a key that is none of ``keys`` are made anew."""
        with self._lock:
            if self._closed:
                return
            old_keys, self._keys = self._keys, keys
            for connection in self._connections.values():
                # by the key, not its place: the order of secrets in the file may have changed too
                keeps_key = old_keys[connection.key] in keys
                connection.key = keys.index(old_keys[connection.key]) if keeps_key else 0
                if connection.socket is not None and (not keeps_key or connection.is_refused):
                    self._reconnect(connection)
                elif connection.socket is not None and connection.monitor is None:
                    self._watch_handshakes(connection)
                if len(keys) == 1 and connection.socket is not None:
                    close_monitor(connection.socket, connection.monitor)
                    connection.monitor = None
                    connection.clear_recent()

    def reconnect_rejected(self) -> None:
        """While the secret changes: reconnect to peers that have changed theirs."""
        if len(self._keys) == 1:
            return
        with self._lock:
            for connection in self._connections.values() if not self._closed else ():
                self._check_key(connection)

    def _check_key(self, connection: _PeerConnection) -> None:
        """If its peer does not take its key, connect with the next one."""
        if connection.monitor is None:
            return
        is_rejected, now_s = handshake_failed(connection.monitor), time.monotonic()
        if is_rejected is not None:  # it may be told once, in a pause
            connection.is_refused = is_rejected
        if is_rejected is False:
            connection.pause_s = RECONNECT_S
        elif connection.is_refused and now_s >= connection.retry_at_s:
            connection.retry_at_s, connection.pause_s = (
                now_s + connection.pause_s,
                min(2 * connection.pause_s, _RECONNECT_MAX_S),
            )
            # a peer that has no key in common yet gets each in turn, ever more slowly
            connection.key = (connection.key + 1) % len(self._keys)
            self._reconnect(connection)

    def _reconnect(self, connection: _PeerConnection) -> None:
        self._close_socket(connection)
        self._open_socket(connection)
        if connection.socket is not None:
            for frame in connection.recent:
                with contextlib.suppress(zmq.Again):
                    connection.socket.send(frame, zmq.NOBLOCK)

    def _open_socket(self, connection: _PeerConnection) -> None:
        connection.socket = self._connect_socket(connection.address, self._keys[connection.key])
        self._watch_handshakes(connection)

    def _watch_handshakes(self, connection: _PeerConnection) -> None:
        if connection.socket is not None and len(self._keys) > 1:
            with contextlib.suppress(zmq.ZMQError):  # no more sockets can be had
                connection.monitor = open_monitor(connection.socket)

    def _send_frame(self, socket: Socket | None, to: Peer, message: bytes) -> bytes | None:
        """Send it. Returns the message; None: it is lost. While the secret changes, the peer may have turned the line
        away: then the message is returned, and nothing is sent."""
        self._number += 1
        frame = wire.seal(self._self_peer, self._reply_to, to, self._number, message)
        if len(frame) > wire.FRAME_BYTES_MAX:
            self._counters.lost_too_long += 1
            return None
        if socket is None:
            self._counters.lost_unknown += 1
            return None
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            if len(self._keys) > 1:
                return frame
            self._counters.lost_full += 1
            return None
        self._counters.sent += 1
        self._counters.sent_bytes += len(frame)
        return frame

    def _send_reply(self, to: Peer, message: bytes) -> None:
        """One message to a process that spoke but is no longer, or not yet, connected."""
        entry, now_ns = self._senders.get(to), time.monotonic_ns()
        lately = entry and entry.answered_ns is not None and now_ns - entry.answered_ns < _ANSWER_EVERY_NS
        if entry is None or lately:
            self._counters.lost_unknown += 1
            return
        entry.answered_ns = now_ns
        self._answers += 1
        # which key the sender listens with is not known, and there is one try: the keys take turns
        socket = self._connect_socket(entry.address, self._keys[self._answers % len(self._keys)])
        self._send_frame(socket, to, message)
        if socket is not None:
            socket.close(LINGER_MS)

    def _connect_socket(self, address: str, keys: CurveKeys) -> Socket | None:
        """A socket that connects to ``address`` and keeps trying; ``None`` when that is no address, or no more sockets
        can be had."""
        check(not self._closed, "a closed mailbox connects")
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError:
            return None
        configure(socket, address, self._reply_to)
        keys.configure_client(socket)
        # a restarted peer is met soon, one that stays away costs an attempt a second
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(0)
            return None
        return socket

    @staticmethod
    def _close_socket(connection: _PeerConnection | None, linger_ms: int = 0) -> None:
        if connection is not None and connection.socket is not None:
            close_monitor(connection.socket, connection.monitor)
            connection.socket.close(linger_ms)
            connection.socket, connection.monitor, connection.is_refused = None, None, False
