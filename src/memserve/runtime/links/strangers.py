"""Connections that came to a mailbox and went without a letter: peers without the secret are named, counted.

ZeroMQ tells that a connection was accepted, or has ended, by its descriptor; of a failed handshake it tells only that
there was one. So a connection is a stranger's until it has brought a letter, or as many handshakes have succeeded as
there are connections that could have passed them. One that ends without a letter and without a failure may be one of
those: a process that tries the secret and leaves (:mod:`memserve.runtime.links.knock`), as a server does before it
calls a store, is none.
"""

from __future__ import annotations

import logging
import os
import socket

import zmq
from zmq.utils.monitor import parse_monitor_message

from memserve.runtime.links.curve import FAILED, Socket, can_be_read
from memserve.runtime.rated import RatedLog

log = logging.getLogger(__name__)

_SEEN = FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_UNKNOWN = "an unknown address"
_OTHER_SECRET = "it has another cluster secret"
_BROKE_OFF = "it broke off before it had shown the cluster's secret"


class Strangers:
    """Watches the connections of one listening socket. For the thread that reads it alone."""

    def __init__(self, inbox: Socket, port: int) -> None:
        """``port``: where ``inbox`` is bound."""
        self.monitor: Socket = inbox.get_monitor_socket(_SEEN)
        """Can be read when there is something to :meth:`look` at."""
        self._port = port
        self._unproven: dict[int, str] = {}
        """Descriptor -> address of all connections that may be a stranger's; no more than there are descriptors."""
        self._passed = 0
        """Handshakes that succeeded, each of another one of those connections."""
        self._ended: list[tuple[int, str, str]] = []
        """Connections that have ended unproven: descriptor, address, why. Their letters may still lie unread."""
        self._why = ""
        """Of the handshake that has just failed: its connection is the next that ends."""
        self._lines = RatedLog(log)

    def look(self) -> None:
        """Take in all events. To be called before letters are read: the senders must be known here."""
        while can_be_read(self.monitor):
            try:
                seen = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._take(int(seen["event"]), int(seen["value"]))

    def _take(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._unproven[descriptor] = _address_of(descriptor, self._port)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._passed += 1
        elif event == zmq.EVENT_DISCONNECTED:
            why, self._why = self._why, ""
            if (address := self._unproven.pop(descriptor, None)) is None:
                pass
            elif self._passed and not why:
                self._passed -= 1
            else:
                self._ended.append((descriptor, address, why or "it does not speak this protocol"))
        elif event & FAILED:
            self._why = _BROKE_OFF if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else _OTHER_SECRET
        if self._passed >= len(self._unproven):  # more: of connections that have brought a letter
            self._unproven.clear()
            self._passed = 0

    @property
    def are_any(self) -> bool:
        """Whether a connection may still be a stranger's."""
        return bool(self._unproven or self._ended)

    def spoke(self, descriptor: int) -> None:
        """A letter came this way: nothing without the secret can write one."""
        if self._unproven.pop(descriptor, None) is not None:
            self._passed = max(0, self._passed - 1)
        elif self._ended:
            self._ended = [ended for ended in self._ended if ended[0] != descriptor]

    def judge(self) -> int:
        """All letters have been read: log and count the connections that ended without one."""
        ended, self._ended = self._ended, []
        for _, address, why in ended:
            self.tell(address, why)
        return len(ended)

    def tell(self, address: str, why: str) -> None:
        """One line about ``address`` (``host:port``), unless there was one about the host just now."""
        host = address.rpartition(":")[0] or address
        self._lines.say(logging.WARNING, (host, why), "turned away %s at the cluster port: %s", address, why)

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
