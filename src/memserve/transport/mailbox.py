"""Messages between processes, over ZeroMQ.

One thread receives: the mailbox's own, or that of an event loop (:meth:`ZmqMailbox.read_in`), where a message costs no
change of threads. It reads the messages, looks whether they are for us and new, and calls back. Sending happens in
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
from memserve.system.secrets import as_followed
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
from memserve.transport.network_devices import ListenAddress, with_port
from memserve.transport.outbound import MailboxCounters, Outbound, configure, new_context
from memserve.transport.ports import OnMessage

log = logging.getLogger(__name__)

_SENDERS_MAX = 65536
_FRAMES_A_TURN = 256
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
    thread does not interrupt others there (``SCHED_BATCH``): messages then travel in bundles, for less CPU; but if
    others compute on that core, they may wait.

    Raises :class:`UserError` when the address cannot be listened on or the secret is too short.
    """

    def __init__(
        self, self_peer: Peer, where: ListenAddress, on_message: OnMessage, *, alias: str = "", gives_way: bool = False
    ) -> None:
        if where.host in _EVERYWHERE and not where.advertise:
            hint = "name this host: --advertise HOST"
            raise UserError(f"others cannot reach {where.host}", hint=hint, param="advertise")
        self._secret = as_followed(where.secret).derive_value(CurveKeys.all_in)
        self._keys = self._secret.value()
        self._self_peer = self_peer
        self._alias = alias
        self._on_message = on_message
        self._counters = MailboxCounters()
        self._context = new_context(gives_way=gives_way)
        self._authenticator = ZapAuthenticator(self._context, self._keys[0])
        self._inbox = self._context.socket(zmq.PULL)
        configure(self._inbox, with_port(where.host, where.port))
        self._keys[0].configure_server(self._inbox)
        self._endpoint, bound_port = _bind(self._context, self._inbox, where.host, where.port)
        self._listen_keys = self._keys[0]
        self._failed_handshakes = FailedHandshakes(self._inbox, bound_port)
        self.address = f"tcp://{with_port(where.known_as, bound_port)}"
        """Where others reach it, ``tcp://host:port``."""
        self._outbox = Outbound(self._context, self._keys, self_peer, self.address, self._counters)
        self._newest: OrderedDict[Peer, int] = OrderedDict()
        """The highest number heard from each sender, most recent sender last."""
        self._sources = self._inbox, self._authenticator.socket, self._failed_handshakes.monitor
        self._stop_fd = os.eventfd(0)
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._next_poll: asyncio.TimerHandle | None = None
        self._start_thread()

    @property
    def counters(self) -> MailboxCounters:
        """What became of messages so far: a copy."""
        return replace(self._counters)

    def connect(self, peer: Peer, address: str) -> None:
        """From now on ``send`` knows where ``peer`` is. An older generation of the same name is forgotten."""
        self._outbox.connect_peer(peer, address)

    def disconnect(self, peer: Peer) -> None:
        """Forget ``peer``: what is queued for it is dropped."""
        self._outbox.disconnect_peer(peer)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Queue ``message``; unknown peers and full queues lose it, counted.

        Raises :class:`WireError` for a message that has no wire form.
        """
        self._outbox.send_message(to, wire.encode(message))

    def restart_as(self, self_peer: Peer) -> None:
        """Go on as another generation (or name): messages to the former one are dropped from now on."""
        self._self_peer = self_peer
        self._outbox.restart_as(self_peer)

    def read_in(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """From now on messages are read, and the callback is called, in ``loop``, from which this is called; None: in a
        thread of the mailbox again. Not from the callback."""
        self._stop_reading()
        self._loop = loop
        if loop is None:
            self._start_thread()
            return
        self._loop_thread = threading.get_ident()
        for source in self._sources:
            loop.add_reader(source.fileno(), self._poll_in_loop)
        loop.call_soon(self._poll_periodically)  # what came before rings no more

    def close(self) -> None:
        """Stop to read and close the sockets; what is queued has up to a second to leave. Not from the callback."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        os.close(self._stop_fd)
        self._outbox.close()
        self._inbox.disable_monitor()
        self._failed_handshakes.close()
        for socket in (self._inbox, self._authenticator.socket):
            socket.close(0)
        self._context.term()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run_reader, name=f"mailbox {self._self_peer.name}", daemon=True)
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
            loop_left = threading.Event()
            self._loop.call_soon_threadsafe(self._leave_loop, loop_left.set)
            # with a limit: a loop that stands still, or waits for us, must not hold up the end of the process
            loop_left.wait(_LEAVE_S)

    def _leave_loop(self, then: Callable[[], None] = lambda: None) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            for source in self._sources:
                loop.remove_reader(source.fileno())
        if self._next_poll is not None:
            self._next_poll.cancel()
        then()

    # -- the thread that reads

    def _run_reader(self) -> None:
        """The mailbox's own, until it is told to stop."""
        poller = zmq.Poller()
        for source in (*self._sources, self._stop_fd):
            poller.register(source, zmq.POLLIN)
        while self._stop_fd not in dict(poller.poll(self._poll_interval_ms)):
            self._poll_sources()

    def _poll_in_loop(self) -> None:
        if self._loop is not None and not self._poll_sources():
            # edges, not levels: ZeroMQ's descriptor rings once, so a turn that left frames must ask for another
            self._loop.call_soon(self._poll_in_loop)

    def _poll_periodically(self) -> None:
        """In the loop: whether the secret changes is told by no socket."""
        self._poll_in_loop()
        if self._loop is not None and (interval_ms := self._poll_interval_ms) is not None:
            self._next_poll = self._loop.call_later(interval_ms / 1000, self._poll_periodically)

    def _poll_sources(self) -> bool:
        """Take in what has come: another secret, questions at the door, handshakes that failed, messages. Whether
        that was all."""
        self._follow_secret()
        # before the messages: the handshake of a client waits for this answer
        self._authenticator.answer_all()
        self._failed_handshakes.read_events()
        is_all = self._read_frames()
        if is_all:
            self._counters.handshakes_failed += self._failed_handshakes.log_failed()
        return is_all

    @property
    def _poll_interval_ms(self) -> int | None:
        if len(self._keys) > 1 or self._listen_keys != self._keys[0]:
            return CHANGE_LOOK_MS
        return LOOK_MS if self._secret.files else None

    def _follow_secret(self) -> None:
        keys = self._secret.value()
        if keys != self._keys:
            self._keys = keys
            self._authenticator.set_keys(keys[0])
            self._outbox.change_keys(keys)
        if self._listen_keys != keys[0] and listen_anew(self._inbox, self._endpoint, keys[0]):
            self._listen_keys = keys[0]
        self._outbox.reconnect_rejected()

    def _read_frames(self) -> bool:
        """Read what is there, but not for ever; whether that was all."""
        for _ in range(_FRAMES_A_TURN):
            if not can_be_read(self._inbox):  # cheaper than an exception for each message
                return True
            try:
                frame = self._inbox.recv(zmq.NOBLOCK, copy=False)
                more = self._inbox.recv_multipart(zmq.NOBLOCK) if frame.more else []
            except zmq.Again:
                return True
            # only while one is unproven: the descriptor of a frame costs a call into ZeroMQ each time
            if self._failed_handshakes.has_unproven:
                self._failed_handshakes.mark_proven(int(frame.get("__fd")))
            try:
                self._read_frame(frame.bytes, len(more))
            except wire.WireVersionError as error:
                self._counters.other_version += 1
                self._failed_handshakes.log_rejection(str(frame.get("Peer-Address")), f"a message has {error}")
            except wire.WireError as error:
                self._counters.malformed += 1
                self._failed_handshakes.log_rejection(
                    str(frame.get("Peer-Address")), f"a message cannot be read: {str(error)[:100]}"
                )
        return False

    def _is_receiver(self, receiver: Peer) -> bool:
        """Whether a message is for this mailbox: by its name, or by the alias, behind which a number may stand."""
        if receiver in (self._self_peer, Peer(self._self_peer.name, 0)):
            return True
        name, _, number = receiver.name.partition(" ")
        return (
            bool(self._alias) and name == self._alias and not receiver.generation and (not number or number.isdigit())
        )

    def _read_frame(self, frame: bytes, frames_more: int) -> None:
        if frames_more:
            raise wire.WireError("a message has one frame")
        envelope = wire.unseal(frame)
        if not self._is_receiver(envelope.receiver):
            self._counters.misdirected += 1
        elif not self._is_new(envelope.sender, envelope.number):
            self._counters.repeated += 1
        else:
            # before the callback, which may answer at once
            self._outbox.note_sender(envelope.sender, envelope.reply_to)
            self._deliver_message(envelope.sender, wire.decode(envelope.message), len(frame))

    def _is_new(self, sender: Peer, number: int) -> bool:
        """Whether ``number`` is higher than all that ``sender`` has sent before; remembers it."""
        # numbers may have gaps (lost frames) but never go back: a frame sent again after a change of key is seen
        # twice
        newest = self._newest.get(sender, -1)
        is_new = number > newest
        self._newest[sender] = number if is_new else newest
        self._newest.move_to_end(sender)
        if len(self._newest) > _SENDERS_MAX:
            self._newest.popitem(last=False)
        return is_new

    def _deliver_message(self, sender: Peer, message: AnyMessage, frame_bytes: int) -> None:
        self._counters.received += 1
        self._counters.received_bytes += frame_bytes
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
        # the sockets that are open already go with it
        context.destroy(linger=0)
        message = f"cannot listen on {with_port(host, port)}: {error.strerror}"
        raise UserError(message, hint="choose another --cluster-port", param="cluster_port") from error
    endpoint = cast(bytes, inbox.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    return endpoint, int(endpoint.rsplit(":", 1)[1])
