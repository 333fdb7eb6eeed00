"""A client's line to its store: the hello and its repetition, calls and their answers, and beginning anew.

The store is addressed by its place, so a store that was restarted is the next one that answers. What belongs to one
hello is a :class:`Session`: it ends when another incarnation answers, or when the store has forgotten the client.
Calls under way then are made again, until their deadline.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from memserve import _core
from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.types import Tier
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import AnyMessage, Expelled, Leave, Refused
from memserve.protocol.peers import ArenaPlace, Peer
from memserve.protocol.store import (
    KEY_BYTES,
    STORE,
    KvModel,
    StoreDone,
    StoreHello,
    StoreListing,
    StorePlaces,
    StoreStatus,
    StoreWelcome,
)
from memserve.store.client.memory import Staging, View
from memserve.system.secrets import Secret
from memserve.transport.links.shared_memory import this_host
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from memserve.transport.probe import ProbeResult, probe_address

log = logging.getLogger(__name__)

GREETING_S = 1.0
"""Between two greetings of a client that is known."""
_HELLO_RETRY_S = 0.1
"""Between two greetings of a client that is not."""
_PROBE_S = 0.5
_CLOSE_S = 5.0
_DEADLINE_SHARE = 0.9
"""Of the time that a call has left, the store is told this much: it answers what it has by then."""
_CALLS_MAX = 4096
"""Calls whose answers are awaited, those included that are late."""
_numbers = count(1)

Answer = StoreDone | StorePlaces | StoreStatus | StoreListing


@dataclass(eq=False)
class Session:
    """What one hello has brought."""

    peer: Peer
    welcome: StoreWelcome
    reader: _core.TierReader | None
    """None: the store is on another host, or its memory cannot be mapped."""
    is_over: bool = False
    """Another session has begun, or has to. What is pinned stays where it is as long as the store does not say
    otherwise in the shared memory: one that was restarted goes on with the memory, and with its clients' pins."""
    pins: dict[int, weakref.ref[View] | None] = field(default_factory=dict)
    """The pins that are held, by number, and the views that they are for. Changed from any thread, one step each."""

    is_kv: bool = False
    """The values are KV blocks: their keys are the names themselves, and they have no names."""

    def store_keys(self, names: Sequence[bytes]) -> bytes:
        """By which the store finds these values: 16 bytes each. Raises :class:`UserError` for a name that cannot be."""
        if not self.is_kv:
            return _core.value_keys(self.welcome.key, b"", list(names))
        if any(len(name) != KEY_BYTES for name in names):
            raise UserError("the key of a KV block has 16 bytes", hint="memserve.kv.identity", param="key")
        return b"".join(names)

    def stored_names(self, names: Sequence[bytes]) -> list[bytes]:
        """What the store keeps as the names of these values."""
        return [b""] * len(names) if self.is_kv else list(names)

    def release_pin(self, pin: int) -> None:
        """The value may be moved, or make room for another. Any thread, any time: also from the garbage collector."""
        self.pins.pop(pin, None)
        if self.reader is not None:
            self.reader.let_go(pin)

    def are_pins_valid(self) -> bool:
        """Whether all that is pinned is where it was."""
        return self.reader is None or not self.reader.closed


@dataclass(eq=False, slots=True)
class _Call:
    session: Session
    answers: queue.SimpleQueue[Answer | None] = field(default_factory=queue.SimpleQueue)
    """One: the answer, or None when the session has ended."""
    afterwards: Callable[[], None] | None = None
    """Set once the caller has gone without an answer: to be called when there is one."""


class StoreConnection:
    """One client's line. Thread-safe; of no use in a child of ``fork``."""

    def __init__(
        self, address: str, tenant: str, secret: Secret, staging_bytes: int, listen: str, kv: KvModel | None = None
    ) -> None:
        """``address``: ``HOST:PORT``; ``listen``: the host at which the store's answers arrive; ``kv``: the values are
        KV blocks of this model."""
        self.address = address
        self._secret = secret
        self._pid = os.getpid()
        self._self_peer = Peer(f"client-{socket.gethostname()}-{self._pid}-{next(_numbers)}", time.time_ns())
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._refused: Refused | None = None
        self.last_seen_s = time.monotonic()
        self._calls: dict[int, _Call] = {}
        self._next_call = count(1)
        self._closed = False
        self._tick = threading.Event()
        self._may_map = True
        self.staging = Staging(staging_bytes, self._self_peer.generation)
        self._mailbox = ZmqMailbox(self._self_peer, ListenAddress(secret, listen), self._on_message)
        self._mailbox.connect(STORE, f"tcp://{address}")
        self._hello = StoreHello(
            address=self._mailbox.address,
            tenant=tenant,
            pid=self._pid,
            host_id=this_host(),
            arena=ArenaPlace(Tier.DRAM, self.staging.arena.address, self.staging.nbytes, self.staging.arena.fd),
            kv=kv,
        )
        self._thread = threading.Thread(target=self._run_hellos, name="memserve-store-client", daemon=True)
        self._thread.start()

    # -- calls, from any thread

    def check_usable(self) -> None:
        """Raise :class:`UserError` where the client cannot be used any more, or not in this process."""
        if self._closed:
            raise UserError("this client is closed", hint="make another one")
        if os.getpid() != self._pid:
            hint = "make a client in each process, after the fork (or use the start method `spawn`)"
            raise UserError("this client belongs to the process that was forked", hint=hint)

    @property
    def known_session(self) -> Session | None:
        """The session, if there is one at this moment."""
        return self._session

    def wait_for_session(self, deadline_s: float) -> Session:
        """The session, once the store has answered. Raises :class:`StoreUnavailable` when it has not by then, and
        :class:`UserError` when it refuses this client."""
        session = self._session
        if session is not None:
            return session
        with self._changed:
            while self._session is None and self._refused is None and not self._closed:
                if not self._changed.wait(max(0.0, deadline_s - time.monotonic())):
                    break
            if self._session is not None:
                return self._session
            refused = self._refused
        self.check_usable()
        if refused is not None:
            raise UserError(f"the store at {self.address} refuses this client: {refused.reason}")
        raise self._unreachable_error()

    def renew_session(self, session: Session) -> None:
        """``session`` was found to be over before the store said so: send a hello again."""
        if self._session is session:
            self._change_session(None)
            self._tick.set()

    def call_store(
        self,
        ask: Callable[[int, int], AnyMessage],
        deadline_s: float,
        after: Callable[[], None] = lambda: None,
    ) -> tuple[Session, Answer]:
        """Send ``ask(call, nanoseconds left)``, and again to the next session when this one ends; the answer.

        ``after`` is called once, as soon as the store can have no more use of what the call named: now, or from another
        thread when an answer comes that is no longer waited for, or cannot come any more. Raises
        :class:`StoreUnavailable` when there is no answer by ``deadline_s``.
        """
        number = None
        try:
            while True:
                session = self.wait_for_session(deadline_s)
                number, call = self._register_call(session)
                left_ns = max(0, int((deadline_s - time.monotonic()) * _DEADLINE_SHARE * NS_PER_S))
                self._mailbox.send(STORE, ask(number, left_ns))
                answer = call.answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
                if answer is not None:
                    after()
                    return session, answer
        except queue.Empty:
            self._give_up(number, after)
            raise self._no_answer_error("did not answer in time") from None
        except BaseException:
            self._give_up(number, after)
            raise

    def _register_call(self, session: Session) -> tuple[int, _Call]:
        """A number for a call, whose answer is awaited from now on."""
        number, call = next(self._next_call), _Call(session)
        with self._changed:
            if len(self._calls) >= _CALLS_MAX:
                raise self._no_answer_error(f"has not answered {_CALLS_MAX} calls")
            if session.is_over:
                call.answers.put(None)
            else:
                self._calls[number] = call
        return number, call

    def _give_up(self, number: int | None, after: Callable[[], None]) -> None:
        """The caller goes without an answer."""
        with self._changed:
            call = self._calls.get(number) if number is not None else None
            if call is not None:
                call.afterwards = after
                return
        after()

    def _no_answer_error(self, problem: str) -> StoreUnavailable:
        silent_s = time.monotonic() - self.last_seen_s
        hint = "is it overloaded? try again, or with a longer timeout_s"
        if silent_s > 3 * GREETING_S:
            hint = f"nothing was heard of it for {silent_s:.0f} s: is it running?"
        return StoreUnavailable(f"the store at {self.address} {problem}", hint=hint)

    def _unreachable_error(self) -> StoreUnavailable:
        match probe_address(f"tcp://{self.address}", self._secret, _PROBE_S):
            case ProbeResult.NO_ANSWER:
                problem, hint = "nothing answers there", "start it (`memserve store`), or correct the address"
            case ProbeResult.REJECTED:
                problem, hint = "it has another secret", "give secret_file the file that the store was given"
            case ProbeResult.ACCEPTED:
                problem = "it takes the secret, and does not answer as a store"
                hint = "give the address that `memserve store` listens at; if it is right, try a longer timeout_s"
        return StoreUnavailable(f"no store at {self.address}: {problem}", hint=hint)

    # -- the mailbox's thread

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        self.last_seen_s = time.monotonic()
        match message:
            case StoreWelcome():
                self._on_welcome(sender, message)
            case StoreDone() | StorePlaces() | StoreStatus() | StoreListing():
                self._on_answer(sender, message)
            case Refused():
                with self._changed:
                    self._refused = message
                    self._changed.notify_all()
            case Expelled() | Leave():  # it does not know this client, or ends: it may be started again
                self._change_session(None)
                self._tick.set()

    def _on_welcome(self, sender: Peer, welcome: StoreWelcome) -> None:
        session = self._session
        if session is not None and session.peer == sender and session.welcome.number == welcome.number:
            return
        if self._closed:
            return
        self._change_session(Session(sender, welcome, self._map_memory(welcome), is_kv=self._hello.kv is not None))

    def _map_memory(self, welcome: StoreWelcome) -> _core.TierReader | None:
        if not welcome.client_path or not self._may_map:
            return None
        try:
            return _core.TierReader(welcome.data_path, welcome.index_path, welcome.client_path)
        except OSError as error:
            self._may_map = False  # another user's, or a mount namespace of its own: values come by message
            log.warning("cannot map the memory of the store at %s: %s; values are copied", self.address, error)
            return None

    def _change_session(self, session: Session | None) -> None:
        """Another session from now on, or none."""
        with self._changed:
            before, self._session = self._session, session
            if before is not None:
                before.is_over = True
            if session is not None:
                self._refused = None
            call_numbers = [number for number, call in self._calls.items() if call.session is before]
            calls = [self._calls.pop(number) for number in call_numbers]
            self._changed.notify_all()
        for call in calls:
            self._resolve_call(call, None)

    def _on_answer(self, sender: Peer, answer: Answer) -> None:
        with self._changed:
            call = self._calls.get(answer.call)
            if call is None or call.session.peer != sender:
                return
            del self._calls[answer.call]
        self._resolve_call(call, answer)

    @staticmethod
    def _resolve_call(call: _Call, answer: Answer | None) -> None:
        call.answers.put(answer)
        if call.afterwards is not None:
            call.afterwards()

    # -- the client's own thread

    def _run_hellos(self) -> None:
        """Send the store hellos until the client is closed and no memory of the store is in use, then leave."""
        while not (self._closed and not self._has_pins()):
            hello = self._hello if self._may_map else _without_memory(self._hello)
            self._mailbox.send(STORE, hello)
            self._tick.wait(GREETING_S if self._session is not None else _HELLO_RETRY_S)
            self._tick.clear()
        self._mailbox.send(STORE, Leave())
        self._mailbox.close()
        self._change_session(None)

    def _has_pins(self) -> bool:
        session = self._session
        return session is not None and bool(session.pins)

    def close(self) -> None:
        """Refuse further calls and leave. While arrays made of views live, the line stays open for them."""
        if os.getpid() != self._pid:
            return  # what a child of fork has are copies: the line is its parent's
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._tick.set()
        if not self._has_pins():
            self._thread.join(_CLOSE_S)

    def drop_views(self) -> None:
        """Release all views, so that they raise when they are used; arrays that were made of them hold their pins."""
        session = self._session
        for view_ref in list(session.pins.values()) if session is not None and os.getpid() == self._pid else ():
            view = view_ref() if view_ref is not None else None
            if view is not None:
                view.drop()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed


def _without_memory(hello: StoreHello) -> StoreHello:
    return StoreHello(hello.address, hello.tenant, hello.pid, "", None, hello.kv)
