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
from memserve.transport.curve import Context, CurveKeys, Socket, limit_frames, turned_away, unwatch, watch

LETTERS_QUEUED_MAX = 2048
"""At each end of a line. A peer that stands still fills it, then loses what is sent to it."""
LAST_WORD_MS = 1000
"""How long a letter to a peer that is not connected, or of a mailbox that closes, may take to leave."""
RECENT_BYTES_MAX = 4 * MIB
"""Of each line, kept to be sent again while the secret changes."""
REDIAL_S, _REDIAL_MAX_S = 0.05, 1.0
"""Between two keys that are tried; doubled for a peer that takes none."""
_HEARD_MAX = 1024
_ANSWER_EVERY_NS = NS_PER_S
_SOCKETS_MAX = 16384
_DESCRIPTORS = 65536


@dataclass(slots=True)
class MailboxCounters:
    """What became of letters, since the mailbox was opened."""

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
class _Line:
    peer: Peer
    address: str
    socket: Socket | None = None
    key: int = 0
    """Which of the cluster's keys it is dialled with."""
    monitor: Socket | None = None
    """While the secret changes: tells that the peer has another one."""
    recent: deque[bytes] = field(default_factory=deque)
    """While the secret changes: what was sent, as it may have been on its way when the peer hung up. The peer drops
    what it has."""
    recent_bytes: int = 0
    is_refused: bool = False
    """Whether the peer did not take the key when it was last dialled."""
    again_s: float = 0.0
    """When it may be dialled with the next key."""
    pause_s: float = REDIAL_S

    def keep(self, letter: bytes) -> None:
        """It may have to be sent again."""
        self.recent.append(letter)
        self.recent_bytes += len(letter)
        while self.recent_bytes > RECENT_BYTES_MAX or len(self.recent) > LETTERS_QUEUED_MAX // 2:
            self.recent_bytes -= len(self.recent.popleft())

    def forget(self) -> None:
        """The secret does not change any more."""
        self.recent.clear()
        self.recent_bytes = 0


@dataclass(slots=True)
class _Heard:
    address: str
    answered_ns: int | None = None


def configure(socket: Socket, address: str = "", own: str = "") -> None:
    """What both ends of a line agree on: bounded queues, small letters at once, dead connections noticed.

    IPv6 is on where ``address``, or the ``own`` one of this process, is of IPv6: elsewhere a name would be looked up
    as IPv6 first, where nothing listens."""
    socket.ipv6 = "[" in address or "[" in own
    socket.linger = 0
    socket.set_hwm(LETTERS_QUEUED_MAX)
    limit_frames(socket, wire.LETTER_BYTES_MAX)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 3000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def new_context(*, gives_way: bool = False) -> Context:
    """A context of its own: a doorkeeper answers for a whole context. ``gives_way``: as of a mailbox.

    Every line takes two descriptors, and ZeroMQ may abort when there are no more: the process gets as many as it may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    if gives_way and len(os.sched_getaffinity(0)) == 1:
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


class Outbound:
    """Lines to peers. Sends from the calling thread, under a lock, and never waits for a peer."""

    def __init__(
        self, context: Context, keys: tuple[CurveKeys, ...], me: Peer, reply_to: str, counters: MailboxCounters
    ) -> None:
        self._context = context
        self._keys = keys
        self._me = me
        self._reply_to = reply_to
        self._counters = counters
        self._lock = threading.Lock()
        self._number = self._answers = 0
        self._closed = False
        self._lines: dict[str, _Line] = {}
        """By name: one generation of each."""
        self._heard: OrderedDict[Peer, _Heard] = OrderedDict()
        """Peers that spoke, most recent last."""

    def become(self, me: Peer) -> None:
        """From now on letters are ``me``'s."""
        with self._lock:
            self._me = me

    def connect(self, peer: Peer, address: str) -> None:
        """Remember where ``peer`` is; another generation of that name is forgotten."""
        with self._lock:
            line = self._lines.get(peer.name)
            if line is None or line.peer != peer or line.address != address:
                self._hang_up(line)
                self._lines[peer.name] = _Line(peer, address)

    def disconnect(self, peer: Peer) -> None:
        """Forget ``peer`` and what is queued for it."""
        with self._lock:
            line = self._lines.get(peer.name)
            if line is not None and line.peer == peer:
                self._hang_up(line)
                del self._lines[peer.name]

    def heard(self, peer: Peer, address: str) -> None:
        """``peer`` spoke, and can be answered at ``address``."""
        with self._lock:
            known = self._heard.get(peer)
            if known is not None and known.address == address:
                self._heard.move_to_end(peer)
                return
            self._heard.pop(peer, None)
            self._heard[peer] = _Heard(address, known.answered_ns if known else None)
            if len(self._heard) > _HEARD_MAX:
                self._heard.popitem(last=False)

    def send(self, to: Peer, message: bytes) -> None:
        """Queue an encoded message for ``to`` (generation 0: the bearer of the name now), or lose and count it."""
        with self._lock:
            if self._closed:
                return
            line = self._lines.get(to.name)
            if line is not None and (line.peer == to or to.generation == 0):
                self._look(line)
                if line.socket is None:
                    self._open(line)
                letter = self._post(line.socket, to, message)
                if letter is not None and line.monitor is not None:
                    line.keep(letter)
            else:
                self._answer(to, message)

    def close(self) -> None:
        """Hang up everywhere; what is queued has a second to leave."""
        with self._lock:
            self._closed = True
            for line in self._lines.values():
                self._hang_up(line, LAST_WORD_MS)
            self._lines.clear()

    def follow(self, keys: tuple[CurveKeys, ...]) -> None:
        """The secret changes, or has changed: lines with a key that is none of ``keys`` are dialled anew."""
        with self._lock:
            if self._closed:
                return
            was, self._keys = self._keys, keys
            for line in self._lines.values():
                known = was[line.key] in keys
                line.key = keys.index(was[line.key]) if known else 0
                if line.socket is not None and (not known or line.is_refused):
                    self._redial(line)
                elif line.socket is not None and line.monitor is None:
                    self._watch(line)
                if len(keys) == 1 and line.socket is not None:
                    unwatch(line.socket, line.monitor)
                    line.monitor = None
                    line.forget()

    def tend(self) -> None:
        """While the secret changes: dial peers that have changed theirs."""
        if len(self._keys) == 1:
            return
        with self._lock:
            for line in self._lines.values() if not self._closed else ():
                self._look(line)

    def _look(self, line: _Line) -> None:
        """If its peer does not take its key, dial with the next one."""
        if line.monitor is None:
            return
        told, now_s = turned_away(line.monitor), time.monotonic()
        if told is not None:  # it may be told once, in a pause
            line.is_refused = told
        if told is False:
            line.pause_s = REDIAL_S
        elif line.is_refused and now_s >= line.again_s:
            line.again_s, line.pause_s = now_s + line.pause_s, min(2 * line.pause_s, _REDIAL_MAX_S)
            line.key = (line.key + 1) % len(self._keys)
            self._redial(line)

    def _redial(self, line: _Line) -> None:
        self._hang_up(line)
        self._open(line)
        if line.socket is not None:
            for letter in line.recent:
                with contextlib.suppress(zmq.Again):
                    line.socket.send(letter, zmq.NOBLOCK)

    def _open(self, line: _Line) -> None:
        line.socket = self._dial(line.address, self._keys[line.key])
        self._watch(line)

    def _watch(self, line: _Line) -> None:
        if line.socket is not None and len(self._keys) > 1:
            with contextlib.suppress(zmq.ZMQError):  # no more sockets can be had
                line.monitor = watch(line.socket)

    def _post(self, socket: Socket | None, to: Peer, message: bytes) -> bytes | None:
        """Send it. Returns the letter; None: it is lost. While the secret changes, the peer may have turned the line
        away: then the letter is returned, and nothing is sent."""
        self._number += 1
        letter = wire.seal(self._me, self._reply_to, to, self._number, message)
        if len(letter) > wire.LETTER_BYTES_MAX:
            self._counters.lost_too_long += 1
            return None
        if socket is None:
            self._counters.lost_unknown += 1
            return None
        try:
            socket.send(letter, zmq.NOBLOCK)
        except zmq.Again:
            if len(self._keys) > 1:
                return letter
            self._counters.lost_full += 1
            return None
        self._counters.sent += 1
        self._counters.sent_bytes += len(letter)
        return letter

    def _answer(self, to: Peer, message: bytes) -> None:
        """One letter to a process that spoke but is no longer, or not yet, connected."""
        heard, now_ns = self._heard.get(to), time.monotonic_ns()
        lately = heard and heard.answered_ns is not None and now_ns - heard.answered_ns < _ANSWER_EVERY_NS
        if heard is None or lately:
            self._counters.lost_unknown += 1
            return
        heard.answered_ns = now_ns
        self._answers += 1
        socket = self._dial(heard.address, self._keys[self._answers % len(self._keys)])
        self._post(socket, to, message)
        if socket is not None:
            socket.close(LAST_WORD_MS)

    def _dial(self, address: str, keys: CurveKeys) -> Socket | None:
        """A socket that connects to ``address`` and keeps trying; ``None`` when that is no address, or no more sockets
        can be had."""
        check(not self._closed, "a closed mailbox dials")
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError:
            return None
        configure(socket, address, self._reply_to)
        keys.speak(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close(0)
            return None
        return socket

    @staticmethod
    def _hang_up(line: _Line | None, linger_ms: int = 0) -> None:
        if line is not None and line.socket is not None:
            unwatch(line.socket, line.monitor)
            line.socket.close(linger_ms)
            line.socket, line.monitor, line.is_refused = None, None, False
