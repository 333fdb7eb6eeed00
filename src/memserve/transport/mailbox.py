"""Messages between processes, over ZeroMQ.

One thread receives: the mailbox's own, or that of an event loop (:meth:`ZmqMailbox.read_in`), where a letter costs no
change of threads. It reads the letters, looks whether they are for us and new, and calls back. Sending happens in
the calling thread, so that a message costs one change of threads and not two. Hostile or broken input is dropped and
counted, whatever it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import zmq

from memserve.base.errors import UserError
from memserve.protocol import codec as wire
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.system.secrets import followed
from memserve.transport.curve import (
    CHANGE_LOOK_MS,
    LOOK_MS,
    Context,
    CurveKeys,
    FailedHandshakes,
    Socket,
    ZapAuthenticator,
    can_be_read,
    listen_anew,
)
from memserve.transport.network_devices import with_port
from memserve.transport.outbound import MailboxCounters, Outbound, configure, new_context
from memserve.transport.ports import OnMessage
from memserve.transport.request_server import ListenAddress

log = logging.getLogger(__name__)

_SENDERS_MAX = 65536
_LETTERS_A_TURN = 256
"""Read before the other sockets are looked at again."""
_EVERYWHERE = ("0.0.0.0", "*", "::")
_LEAVE_S = 5.0
"""How long another thread may wait for a loop to read no longer."""


class ZmqMailbox:
    """A :class:`memserve.transport.ports.Mailbox` on ``tcp://host:port``, among processes that know the cluster's
    secret.

    A wildcard as a host needs ``advertise``. A message to a peer that is not connected, but has spoken lately, still
    leaves, at most once a second: so a process that was expelled can be told, and a ``Join`` be refused. ``alias``: a
    second name, for those that know the address alone. ``gives_way``: where this process has one core alone, ZeroMQ's
    thread does not interrupt others there (``SCHED_BATCH``): letters then travel in bundles, for less CPU; but if
    others compute on that core, they may wait.

    Raises :class:`UserError` when the address cannot be listened on or the secret is too short.
    """

    def __init__(
        self,
        me: Peer,
        where: ListenAddress,
        on_message: OnMessage,
        *,
        alias: str = "",
        gives_way: bool = False,
    ) -> None:
        if where.host in _EVERYWHERE and not where.advertise:
            hint = "name this host: --advertise HOST"
            raise UserError(f"others cannot reach {where.host}", hint=hint, param="advertise")
        self._secret = followed(where.secret).then(CurveKeys.all_in)
        self._keys = self._secret.value()
        self._me = me
        self._alias = Peer(alias, 0) if alias else None
        self._on_message = on_message
        self._counters = MailboxCounters()
        self._context = new_context(gives_way=gives_way)
        self._doorkeeper = ZapAuthenticator(self._context, self._keys[0])
        self._inbox = self._context.socket(zmq.PULL)
        configure(self._inbox, with_port(where.host, where.port))
        self._keys[0].listen(self._inbox)
        self._endpoint, bound_port = _bind(self._context, self._inbox, where.host, where.port)
        self._listens_with = self._keys[0]
        self._strangers = FailedHandshakes(self._inbox, bound_port)
        self.address = f"tcp://{with_port(where.known_as, bound_port)}"
        """Where others reach it, ``tcp://host:port``."""
        self._outbox = Outbound(self._context, self._keys, me, self.address, self._counters)
        self._newest: OrderedDict[Peer, int] = OrderedDict()
        """The highest number heard from each sender, most recent sender last."""
        self._sources = self._inbox, self._doorkeeper.socket, self._strangers.monitor
        self._stop_fd = os.eventfd(0)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._next_look: asyncio.TimerHandle | None = None
        self._start_thread()

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

    def read_in(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """From now on letters are read, and the callback is called, in ``loop``, from which this is called; None: in a
        thread of the mailbox again. Not from the callback."""
        self._stop_reading()
        self._loop = loop
        if loop is None:
            self._start_thread()
            return
        self._loop_thread = threading.get_ident()
        for source in self._sources:
            loop.add_reader(source.fileno(), self._look_in_loop)
        loop.call_soon(self._look_now_and_then)  # what came before rings no more

    def close(self) -> None:
        """Stop to read and close the sockets; what is queued has up to a second to leave. Not from the callback."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        os.close(self._stop_fd)
        self._outbox.close()
        self._inbox.disable_monitor()
        self._strangers.close()
        for socket in (self._inbox, self._doorkeeper.socket):
            socket.close(0)
        self._context.term()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._receive, name=f"mailbox {self._me.name}", daemon=True)
        self._thread.start()

    def _stop_reading(self) -> None:
        """No thread reads when this returns."""
        if self._loop is None:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            os.eventfd_read(self._stop_fd)
        elif threading.get_ident() == self._loop_thread:
            self._leave_loop()
        elif not self._loop.is_closed():
            left = threading.Event()
            self._loop.call_soon_threadsafe(self._leave_loop, left.set)
            left.wait(_LEAVE_S)

    def _leave_loop(self, then: Callable[[], None] = lambda: None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            for source in self._sources:
                loop.remove_reader(source.fileno())
        if self._next_look is not None:
            self._next_look.cancel()
        then()

    # -- the thread that reads

    def _receive(self) -> None:
        """The mailbox's own, until it is told to stop."""
        poller = zmq.Poller()
        for source in (*self._sources, self._stop_fd):
            poller.register(source, zmq.POLLIN)
        while self._stop_fd not in dict(poller.poll(self._look_ms)):
            self._look()

    def _look_in_loop(self) -> None:
        if self._loop is not None and not self._look():
            self._loop.call_soon(self._look_in_loop)

    def _look_now_and_then(self) -> None:
        """In the loop: whether the secret changes is told by no socket."""
        self._look_in_loop()
        if self._loop is not None and (look_ms := self._look_ms) is not None:
            self._next_look = self._loop.call_later(look_ms / 1000, self._look_now_and_then)

    def _look(self) -> bool:
        """Take in what has come: another secret, questions at the door, strangers that failed at it, letters. Whether
        that was all."""
        self._follow_secret()
        self._doorkeeper.answer_all()
        self._strangers.look()
        is_all = self._read_letters()
        if is_all:
            self._counters.handshakes_failed += self._strangers.judge()
        return is_all

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
            if not can_be_read(self._inbox):  # cheaper than an exception for each letter
                return True
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
                more = self._inbox.recv_multipart(zmq.NOBLOCK) if frame.more else []
            except zmq.Again:
                return True
            if self._strangers.are_any:
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
