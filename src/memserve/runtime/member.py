"""One instance as a member of a cluster: its machine, its mailbox, its data port, its heartbeats (level 3).

Three threads touch it. The mailbox's thread brings messages: it keeps the lines to peers in step with what the router
says of them, and posts everything that is the machine's. The engine thread sends what the machine says. The member's
own thread joins, beats, and joins again as a new generation when the router has taken this one to be dead; a long step
of the device blocks none of them.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from memserve.errors import UserError
from memserve.instance.actions import Action, EmitTokens, RejectRequest, Send
from memserve.instance.events import MessageArrived
from memserve.instance.machine import Instance
from memserve.messages import (
    ROUTER,
    AnyMessage,
    Drain,
    Expelled,
    Heard,
    Heartbeat,
    Join,
    Leave,
    Load,
    Peer,
    PeerGone,
    PeerInfo,
    PeerJoined,
    Recall,
    Refused,
    RequestRefused,
    Tokens,
    Welcome,
    roll_of,
)
from memserve.runtime.clients import EngineStopped
from memserve.runtime.doors import Doors
from memserve.runtime.hosted import HostedInstance
from memserve.runtime.ports import DataPort, Device, Mailbox, OnMessage, OnPages

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Between two heartbeats; a member that is silent for ten of them is taken to be dead."""

STATS_EVERY = 4
"""Every so many heartbeats carry the engine's statistics."""

READING_TIMEOUT_S = 0.2
"""How long a heartbeat waits for a fresh reading of the machine; then it repeats the last one."""

_ANY_ROUTER = Peer(ROUTER, 0)
"""Whoever is the router now."""

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Drain:
    """An order for the member's thread: somebody here wants the end."""

    patience_s: float
    why: str
    """For the log; empty: nothing is logged."""


@dataclass(frozen=True, slots=True)
class _Expulsion:
    """An order for the member's thread: the router takes ``me`` to be dead."""

    router: Peer
    me: Peer
    reason: str
    newest: int


@dataclass(frozen=True, slots=True)
class _Recalled:
    """An order for the member's thread: a router that was started anew wants us back, as we are."""

    router: Peer
    address: str


class Member:
    """Runs an instance in a cluster, from joining to leaving."""

    def __init__(
        self,
        machine: Instance,
        device: Device,
        info: PeerInfo,
        routers: Sequence[str],
        open_mailbox: Callable[[Peer, OnMessage], Mailbox],
        open_port: Callable[[OnPages], DataPort],
    ) -> None:
        """``info`` describes the instance but for its address and what the data port adds. ``routers``: addresses
        where one may be, tried in turn."""
        self._machine = machine
        self._doors = Doors(routers)
        self._router: Peer | None = None  # the one that welcomed us; None: we are no member
        self._recalled_by: Peer | None = None  # the newest that took over; it is asked until it answers
        self._peers: dict[str, PeerInfo] = {}  # the other members; the mailbox's thread's
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()  # for the member's thread
        self._ended = threading.Event()
        self._failure: UserError | None = None
        self._joined = threading.Event()
        self._leave_at: float | None = None  # while draining: when the patience is over
        self._beats = 0
        self._last: tuple[Load, int] = (Load(), 0)
        self._instance = HostedInstance(machine, device, self._perform, on_broken=self._broke)
        self._port = open_port(self._instance.post)
        self._mailbox = open_mailbox(info.peer, self._message_arrived)
        address = info.address or self._mailbox.address
        self._info = self._port.describe(msgspec.structs.replace(info, address=address))
        self._thread = threading.Thread(target=self._run, name="memserve-member", daemon=True)

    @property
    def me(self) -> Peer:
        """The present incarnation."""
        return self._info.peer

    @property
    def router(self) -> Peer | None:
        """Who has welcomed us."""
        return self._router

    def start(self) -> None:
        """Begin to work, and to ask for membership until the router answers."""
        self._instance.start()
        self._mailbox.connect(_ANY_ROUTER, self._doors.address)
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until the router has welcomed us; ``False``: it has not, or the end was asked for meanwhile.

        Raises :class:`UserError` when the router refuses us."""
        self._joined.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return self._joined.is_set() and not self._ended.is_set()

    @property
    def ended(self) -> bool:
        """Whether it has left, or broke."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for the end: drained, told to leave, or broken. Raises :class:`UserError` when it was not in order."""
        while not self._ended.wait(1.0):  # short waits: a signal's handler runs between them
            pass
        if self._failure is not None:
            raise self._failure

    def drain(self, patience_s: float, why: str = "") -> None:
        """Take nothing new, finish what is here, then leave; for ``patience_s`` at most. May be called from a signal's
        handler, and again with less patience. ``why``: for the log."""
        self._orders.put(_Drain(patience_s, why))

    def leave(self) -> None:
        """Say good-bye and end; others take over what runs here."""
        self.drain(0.0)

    def close(self) -> None:
        """Stop all threads and give everything back."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._port.close()
        self._mailbox.close()
        self._instance.close(_CLOSE_S)

    # -- the mailbox's thread

    def _message_arrived(self, sender: Peer, message: AnyMessage) -> None:
        if sender.name == ROUTER:
            self._doors.heard()
            if sender == self._router and self._doors.home not in (None, self._doors.address):
                self._doors.address = self._doors.home or ""
                self._mailbox.connect(sender, self._doors.address)  # it was only cut off
            if not self._about_members(sender, message):
                return
        self._instance.post(MessageArrived(sender, message))
        if isinstance(message, PeerGone):
            self._part(message.peer)

    def _about_members(self, router: Peer, message: AnyMessage) -> bool:
        """Follow what the router says of membership; ``False`` when that is all there is to do."""
        match message:
            case Welcome() if self._is_outdated(router):
                return False  # late: another has taken its place, and would never hear of us again
            case Welcome(peers, joined_at):
                if router != self._router:  # a further one of its own router does not move it
                    self._doors.settle(joined_at)
                self._mailbox.connect(router, self._doors.address)
                gone = {name: info.peer for name, info in self._peers.items()}
                for info in peers:
                    gone.pop(info.peer.name, None)
                    self._meet(info)
                for peer in gone.values():
                    self._part(peer)
                self._router = router
                self._joined.set()
            case PeerJoined(info):
                self._meet(info)
            case Heard():
                return False
            case Expelled(reason, newest):
                self._orders.put(_Expulsion(router, self.me, reason, newest))
                return False
            case Recall(address):
                self._orders.put(_Recalled(router, address))
                return False
            case Refused() | Drain():
                self._orders.put(message)
                return isinstance(message, Drain)  # the others come to the machine when all here is ready for it
        return True

    def _meet(self, info: PeerInfo) -> None:
        if info.peer != self.me and self._peers.get(info.peer.name) != info:
            self._peers[info.peer.name] = info
            self._mailbox.connect(info.peer, info.address)
            self._port.add_peer(info)

    def _part(self, peer: Peer) -> None:
        known = self._peers.get(peer.name)
        if known is not None and known.peer == peer:
            del self._peers[peer.name]
            self._mailbox.disconnect(peer)
            self._port.remove_peer(peer)

    # -- the engine thread

    def _perform(self, action: Action) -> None:
        match action:
            case EmitTokens(outputs):
                self._tell_router(Tokens(tuple(outputs)))
            case RejectRequest(request_id, reason, retry_after_s):
                self._tell_router(RequestRefused(request_id, reason, retry_after_s))
            case Send(to, message):
                self._mailbox.send(to, message)
            case _:
                self._port.start(action)  # type: ignore[arg-type]  # a RunStep does not come here

    def _tell_router(self, message: AnyMessage) -> None:
        if self._router is not None:  # else nobody waits: an expelled instance's requests run elsewhere
            self._mailbox.send(self._router, message)

    def _broke(self) -> None:
        self._failure = UserError("the instance broke; its log says why", hint="please report it")
        self.leave()

    # -- the member's thread

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._beat()
                self._follow_orders(until=time.monotonic() + BEAT_S)
        except Exception:  # a member that cannot beat is dead to the others: better that it ends, and is started again
            log.exception("the member's thread failed")
            self._failure = UserError("the instance cannot go on; its log says why", hint="please report it")
        finally:
            self._ended.set()
            self._joined.set()

    def _beat(self) -> None:
        if self._doors.turn():
            log.warning("no router is heard: trying %s", self._doors.address)
            self._mailbox.connect(_ANY_ROUTER, self._doors.address)
        if self._router is None:
            self._mailbox.send(_ANY_ROUTER, Join(self._info, self._doors.address))
            return
        load, next_event = self._reading()
        self._beats += 1
        stats = self._stats() if self._beats % STATS_EVERY == 1 else b""
        roll = roll_of([self.me, *(info.peer for info in self._peers.values())])
        heartbeat = Heartbeat(load, next_event, stats, roll, self._doors.asks)
        self._mailbox.send(_ANY_ROUTER, heartbeat)  # a restarted router shall hear it too
        idle = not (load.requests_waiting or load.sequences_running or load.transfers_open)
        if self._leave_at is not None and (idle or time.monotonic() >= self._leave_at):
            self._say_goodbye()

    def _reading(self) -> tuple[Load, int]:
        try:
            self._last = self._instance.ask(lambda: (self._machine.load(), self._machine.next_event), READING_TIMEOUT_S)
        except (TimeoutError, EngineStopped):
            log.debug("the engine is busy: the heartbeat repeats the last reading")
        return self._last

    def _stats(self) -> bytes:
        try:
            return self._instance.stats(READING_TIMEOUT_S).encode()
        except (TimeoutError, EngineStopped):
            return b""

    def _follow_orders(self, until: float) -> None:
        """Until the next heartbeat is due. The first beat of a new incarnation is due at once."""
        while not self._ended.is_set():
            try:
                order = self._orders.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            match order:
                case _Drain(patience_s, why):
                    self._log_drain(patience_s, why)
                    self._leave_at = time.monotonic() + patience_s
                    self._tell_router(Drain())
                    if not patience_s or self._router is None:
                        self._say_goodbye()
                    return
                case Drain():  # the router asks, as often as it hears of us: there is no hurry
                    self._leave_at = self._leave_at or math.inf
                case Refused(reason):
                    self._refused(reason)
                case _Expulsion():
                    self._join_again(order)
                    return
                case _Recalled():
                    self._answer_recall(order)
                    return

    def _log_drain(self, patience_s: float, why: str) -> None:
        if not why or self._router is None:
            return
        load, _ = self._reading()
        running, waiting = load.sequences_running, load.requests_waiting
        story = "%s: instance %s leaves; %d sequences run and %d requests wait here, and have %.0f s to finish"
        log.warning(story, why, self.me.name, running, waiting, patience_s)

    def _say_goodbye(self) -> None:
        self._tell_router(Leave())
        self._ended.set()

    def _refused(self, reason: str) -> None:
        if self._router is None:
            hint = "instances of one cluster run the same model, dtype and block size"
            self._failure = UserError(f"the router refuses this instance: {reason}", hint=hint, param="join")
            self._ended.set()

    def _is_outdated(self, router: Peer) -> bool:
        """Whether another has taken the place of ``router``, as far as is known here."""
        known = (self._router, self._recalled_by)
        return any(peer is not None and router.generation < peer.generation for peer in known)

    def _answer_recall(self, recall: _Recalled) -> None:
        """Nobody waits for what runs here, but that ends with the ``Welcome``: until then it does no harm."""
        known = self._router or self._recalled_by
        if recall.router == known or self._is_outdated(recall.router):
            return  # again, or said by one whose place another has taken
        log.warning("the router at %s takes over: joining it", recall.address)
        self._router, self._recalled_by = None, recall.router
        self._doors.lead_to(recall.address)
        self._mailbox.connect(_ANY_ROUTER, recall.address)

    def _join_again(self, expulsion: _Expulsion) -> None:
        """What this incarnation had promised is void: the machine drops its work, keeps its cache, gets a new name.

        Also one that never heard that it was a member: its ``Welcome`` was lost, and then it was silent for too long.
        """
        if expulsion.me != self.me:
            return  # said to an earlier one
        if self._is_outdated(expulsion.router):
            return  # of a router whose place another has taken
        self._router, self._doors.home = None, None
        log.warning("expelled (%s): joining again", expulsion.reason)
        me = Peer(self.me.name, max(self.me.generation + 1, expulsion.newest + 1, new_generation()))
        self._instance.post(MessageArrived(expulsion.router, Expelled(expulsion.reason)))
        self._instance.ask(lambda: self._machine.reborn(me))
        self._mailbox.become(me)
        self._mailbox.connect(_ANY_ROUTER, self._doors.address)
        self._info = self._port.describe(msgspec.structs.replace(self._info, peer=me))


def new_generation() -> int:
    """A generation higher than that of any earlier process of the same name: milliseconds since 1970."""
    return time.time_ns() // 1_000_000
