"""Messages between processes, over ZeroMQ.

One thread receives. It reads the letters, looks whether they are for us and new, and calls back. Sending happens in
the calling thread, so that a message costs one change of threads and not two. Hostile or broken input is dropped and
counted, whatever it is.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import cast

import zmq

from memserve.errors import UserError
from memserve.messages import AnyMessage, Peer
from memserve.runtime.links import wire
from memserve.runtime.links.curve import (
    CHANGE_LOOK_MS,
    LOOK_MS,
    Context,
    CurveKeys,
    Doorkeeper,
    Socket,
    listen_anew,
)
from memserve.runtime.links.devices import with_port
from memserve.runtime.links.outbox import MailboxCounters, Outbox, configure, new_context
from memserve.runtime.links.strangers import Strangers
from memserve.runtime.ports import OnMessage
from memserve.runtime.private_files import Secret, followed

log = logging.getLogger(__name__)

_SENDERS_MAX = 65536
_LETTERS_A_TURN = 256
"""Read before the other sockets are looked at again."""
_EVERYWHERE = ("0.0.0.0", "*", "::")


class ZmqMailbox:
    """A :class:`memserve.runtime.ports.Mailbox` on ``tcp://host:port``, among processes that know the cluster's secret.

    ``port`` 0 takes a free one; ``advertise`` is the host name that others use when ``host`` is a wildcard. A message
    to a peer that is not connected, but has spoken lately, still leaves, at most once a second: so a process that was
    expelled can be told, and a ``Join`` be refused. ``alias``: a second name, for those that know the address alone.

    Raises :class:`UserError` when the address cannot be listened on or the secret is too short.
    """

    def __init__(
        self,
        me: Peer,
        secret: Secret,
        host: str,
        port: int,
        on_message: OnMessage,
        *,
        advertise: str | None = None,
        alias: str = "",
    ) -> None:
        if host in _EVERYWHERE and not advertise:
            raise UserError(f"others cannot reach {host}", hint="name this host: --advertise HOST", param="advertise")
        self._secret = followed(secret).then(CurveKeys.all_in)
        self._keys = self._secret.value()
        self._me = me
        self._alias = Peer(alias, 0) if alias else None
        self._on_message = on_message
        self._counters = MailboxCounters()
        self._context = new_context()
        self._doorkeeper = Doorkeeper(self._context, self._keys[0])
        self._inbox = self._context.socket(zmq.PULL)
        configure(self._inbox, with_port(host, port))
        self._keys[0].listen(self._inbox)
        self._endpoint, bound_port = _bind(self._context, self._inbox, host, port)
        self._listens_with = self._keys[0]
        self._strangers = Strangers(self._inbox, bound_port)
        self.address = f"tcp://{with_port(advertise or host, bound_port)}"
        """Where others reach it, ``tcp://host:port``."""
        self._outbox = Outbox(self._context, self._keys, me, self.address, self._counters)
        self._newest: OrderedDict[Peer, int] = OrderedDict()
        """The highest number heard from each sender, most recent sender last."""
        self._stop_fd = os.eventfd(0)
        self._closed = False
        self._thread = threading.Thread(target=self._receive, name=f"mailbox {me.name}", daemon=True)
        self._thread.start()

    @property
    def counters(self) -> MailboxCounters:
        """What became of letters so far: a copy."""
        return replace(self._counters)

    def connect(self, peer: Peer, address: str) -> None:
        """From now on ``send`` knows where ``peer`` is. An older generation of the same name is forgotten."""
        self._outbox.connect(peer, address)

    def disconnect(self, peer: Peer) -> None:
        """Forget ``peer``: what is queued for it is dropped."""
        self._outbox.disconnect(peer)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Queue ``message``; unknown peers and full queues lose it, counted.

        Raises :class:`WireError` for a message that has no wire form.
        """
        self._outbox.send(to, wire.encode(message))

    def become(self, me: Peer) -> None:
        """Go on as another generation (or name): letters to the former one are dropped from now on."""
        self._me = me
        self._outbox.become(me)

    def close(self) -> None:
        """Stop the thread and close the sockets; what is queued has up to a second to leave. Not from the callback."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        self._outbox.close()
        self._inbox.disable_monitor()
        self._strangers.close()
        for socket in (self._inbox, self._doorkeeper.socket):
            socket.close(0)
        self._context.term()

    def _receive(self) -> None:
        """The thread: letters, questions at the door, strangers that failed at it, and the word to stop."""
        poller = zmq.Poller()
        for source in (self._inbox, self._doorkeeper.socket, self._strangers.monitor, self._stop_fd):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._look_ms))
            if self._stop_fd in ready:
                return
            self._follow_secret()
            if self._doorkeeper.socket in ready:
                self._doorkeeper.answer()
            self._strangers.look()
            if self._read_letters():
                self._counters.handshakes_failed += self._strangers.judge()

    @property
    def _look_ms(self) -> int | None:
        if len(self._keys) > 1 or self._listens_with != self._keys[0]:
            return CHANGE_LOOK_MS
        return LOOK_MS if self._secret.files else None

    def _follow_secret(self) -> None:
        keys = self._secret.value()
        if keys != self._keys:
            self._keys = keys
            self._doorkeeper.admit(keys[0])
            self._outbox.follow(keys)
        if self._listens_with != keys[0] and listen_anew(self._inbox, self._endpoint, keys[0]):
            self._listens_with = keys[0]
        self._outbox.tend()

    def _read_letters(self) -> bool:
        """Read what is there, but not for ever; whether that was all."""
        for _ in range(_LETTERS_A_TURN):
            if not cast(int, self._inbox.get(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than an exception for each letter
                return True
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
                more = self._inbox.recv_multipart(zmq.NOBLOCK) if frame.more else []
            except zmq.Again:
                return True
            self._strangers.spoke(int(frame.get("__fd")))
            try:
                self._read(frame.bytes, len(more))
            except wire.WireVersionError as error:
                self._counters.other_version += 1
                self._strangers.tell(str(frame.get("Peer-Address")), f"a letter has {error}")
            except wire.WireError as error:
                self._counters.malformed += 1
                self._strangers.tell(str(frame.get("Peer-Address")), f"a letter cannot be read: {str(error)[:100]}")
        return False

    def _read(self, letter: bytes, frames_more: int) -> None:
        if frames_more:
            raise wire.WireError("a letter has one frame")
        envelope = wire.unseal(letter)
        if envelope.receiver not in (self._me, Peer(self._me.name, 0), self._alias):
            self._counters.misdirected += 1
        elif not self._is_new(envelope.sender, envelope.number):
            self._counters.repeated += 1
        else:
            self._outbox.heard(envelope.sender, envelope.reply_to)
            self._deliver(envelope.sender, wire.decode(envelope.message), len(letter))

    def _is_new(self, sender: Peer, number: int) -> bool:
        """Whether ``number`` is higher than all that ``sender`` has sent before; remembers it."""
        newest = self._newest.get(sender, -1)
        is_new = number > newest
        self._newest[sender] = number if is_new else newest
        self._newest.move_to_end(sender)
        if len(self._newest) > _SENDERS_MAX:
            self._newest.popitem(last=False)
        return is_new

    def _deliver(self, sender: Peer, message: AnyMessage, letter_bytes: int) -> None:
        self._counters.received += 1
        self._counters.received_bytes += letter_bytes
        try:
            self._on_message(sender, message)
        except Exception:
            self._counters.callback_errors += 1
            log.exception("the receiver of %s from %s failed", type(message).__name__, sender.name)


def _bind(context: Context, inbox: Socket, host: str, port: int) -> tuple[str, int]:
    """Bind; returns the endpoint, and its port."""
    try:
        inbox.bind(f"tcp://{with_port(host, port or '*')}")
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        message = f"cannot listen on {with_port(host, port)}: {error.strerror}"
        raise UserError(message, hint="choose another --cluster-port", param="cluster_port") from error
    endpoint = cast(bytes, inbox.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    return endpoint, int(endpoint.rsplit(":", 1)[1])
