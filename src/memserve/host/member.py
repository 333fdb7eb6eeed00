"""Hosts an instance that is a member of a cluster: its machines, its mailbox, its data port.

Three threads touch it. The mailbox's thread brings messages; the engine thread sends what the instance machine says;
the member's own thread keeps time, and does what has to wait for the engine: a long step of the device blocks neither
messages nor heartbeats. :class:`memserve.protocol.member.MemberMachine` decides what is to be done, one event at a
time, under a lock. Its actions are performed under that lock too, in order, but for those that wait for the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from memserve.base.config import MemberConfig
from memserve.base.errors import InvariantError, UserError
from memserve.base.types import ClockTicked
from memserve.base.units import ns_from_s
from memserve.host.engine import HostedInstance
from memserve.instance.events import Action, DropSegment, HoldSegment
from memserve.instance.machine import Instance
from memserve.instance.scheduler.slo import Answer
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    ForwardMessage,
    GenerationChanged,
    Joined,
    Left,
    LoadRead,
    LogWarning,
    MemberAction,
    MemberEvent,
    ReadLoad,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage, Expelled, RequestRefused, Tokens
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve.system.loop import EngineStopped
from memserve.system.process import STALL_S, HealthState
from memserve.transport.member_place import health_of, next_incarnation
from memserve.transport.ports import DataPort, Device, Mailbox, OnMessage, OnPages

if TYPE_CHECKING:
    from memserve.model.attention.query_server import SegmentPort

log = logging.getLogger(__name__)

READING_TIMEOUT_S = 0.2
"""How long a heartbeat waits for a fresh reading of the machine; then it repeats the last one."""

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class MemberLinks:
    """How an instance reaches other processes: its ports are opened by the process that runs it."""

    open_mailbox: Callable[[Peer, OnMessage], Mailbox]
    open_port: Callable[[OnPages], DataPort]
    segments: SegmentPort | None = None
    """None: it computes no part of a longer sequence."""


class MemberProcess:
    """Runs an instance in a cluster, from joining to leaving."""

    def __init__(
        self,
        machine: Instance,
        device: Device,
        info: PeerInfo,
        routers: Sequence[str],
        links: MemberLinks,
        config: MemberConfig | None = None,
    ) -> None:
        """``info`` describes the instance but for its address and what the data port adds. ``routers``: addresses
        where one may be, tried in turn."""
        self._machine, self._segments = machine, links.segments
        self._lock = threading.Lock()
        self._work_queue: queue.SimpleQueue[MemberEvent | MemberAction] = queue.SimpleQueue()  # for the member's thread
        self._ended = threading.Event()
        self._failure: UserError | None = None
        self._joined = threading.Event()
        self._last_reading = LoadRead(Load(), 0)
        self._last_work_s = time.monotonic()
        self._instance = HostedInstance(machine, device, self._perform_action, on_broken=self._on_broken)
        self._port = links.open_port(self._instance.post_event)
        with self._lock:  # messages may arrive as soon as there is a mailbox
            self._mailbox = links.open_mailbox(info.peer, self._message_arrived)
            address = info.address or self._mailbox.address
            info = self._port.describe(msgspec.structs.replace(info, address=address))
            if machine.link is not None:
                machine.link.writer.host_id = info.host_id
            self._member = MemberMachine(info, routers, config or MemberConfig())
        self._thread = threading.Thread(target=self._run_thread, name="memserve-member", daemon=True)

    @property
    def self_peer(self) -> Peer:
        """The present incarnation."""
        return self._member.self_peer

    @property
    def reported_costs(self) -> bytes:
        """What it has told its router of its costs last. Empty: nothing."""
        return self._last_reading.costs

    @property
    def router(self) -> Peer | None:
        """The router that has accepted the instance."""
        return self._member.router

    def start(self) -> None:
        """Begin to work, and to ask for membership until the router answers."""
        self._instance.start()
        with self._lock:
            self._perform_member_actions(self._member.start(time.monotonic_ns()))
        self._thread.start()

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until the router has accepted the instance; False: it has not, or the end was asked for meanwhile.

        Raises :class:`UserError` when the router refuses the instance."""
        self._joined.wait(timeout_s)
        if self._failure is not None:
            raise self._failure
        return self._joined.is_set() and not self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether it has left, or broke."""
        return self._ended.is_set()

    @property
    def health_state(self) -> HealthState | None:
        """What it is to its cluster. None: its thread, which keeps membership, hangs."""
        if time.monotonic() - self._last_work_s > STALL_S:
            return None
        return health_of(self._member)

    def wait_for_end(self, each_second: Callable[[], None] = lambda: None) -> None:
        """Wait for the end: drained, told to leave, or broken. Raises :class:`UserError` when it was not in order."""
        while not self._ended.wait(1.0):  # short waits: a signal's handler runs between them
            each_second()
        if self._failure is not None:
            raise self._failure

    def drain_and_leave(self, patience_s: float, why: str = "") -> None:
        """Take nothing new, finish what is here, then leave; for ``patience_s`` at most. May be called from a signal's
        handler, and again with less patience. ``why``: for the log."""
        self._work_queue.put(DrainRequested(ns_from_s(patience_s), why))  # a handler must not wait for the lock

    def leave_cluster(self) -> None:
        """Say goodbye and end; other instances take over what runs here."""
        self.drain_and_leave(0.0)

    def close(self) -> None:
        """Stop all threads and give everything back."""
        self.leave_cluster()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)
        self._port.close()
        if self._segments is not None:
            self._segments.close()
        self._mailbox.close()
        self._instance.close(_CLOSE_S)

    # -- any thread

    def _message_arrived(self, sender: Peer, message: AnyMessage) -> None:
        self._handle_event(MessageArrived(sender, message))

    def _handle_event(self, event: MemberEvent) -> None:
        with self._lock:
            self._perform_member_actions(self._member.handle(event, time.monotonic_ns()))

    def _perform_member_actions(self, actions: Sequence[MemberAction]) -> None:
        """In order, with the lock held."""
        for action in actions:
            match action:
                case Send(to, message):
                    self._mailbox.send(to, message)
                case ForwardMessage(sender, message):
                    self._instance.post_event(MessageArrived(sender, message))
                case ConnectRouter(router, address):
                    self._mailbox.connect(router, address)
                case AddPeer(info):
                    self._mailbox.connect(info.peer, info.address)
                    self._port.add_peer(info)
                case RemovePeer(peer):
                    self._mailbox.disconnect(peer)
                    self._port.remove_peer(peer)
                    if self._segments is not None:
                        self._segments.remove_peer(peer)
                case Joined():
                    self._joined.set()
                case LogWarning(text):
                    log.warning("%s", text)
                case _:
                    self._work_queue.put(action)

    # -- the engine thread

    def _perform_action(self, action: Action) -> None:
        match action:
            case EmitTokens(outputs):
                self._send_to_router(Tokens(tuple(outputs)))
            case RejectRequest(request_id, reason, retry_after_s):
                self._send_to_router(RequestRefused(request_id, reason, retry_after_s))
            case Send(to, message):
                self._mailbox.send(to, message)
            case HoldSegment() | DropSegment():
                if self._segments is not None:  # else no router sends it a part
                    self._segments.update_segment(action)
            case _:
                self._port.start(action)  # type: ignore[arg-type]  # a RunStep does not come here

    def _send_to_router(self, message: AnyMessage) -> None:
        router = self._machine.link.router if self._machine.link is not None else None
        # Without the lock: its holder may wait for this thread. Where the member knows another router than the machine,
        # or none, nothing waits for this message: an expelled instance's requests run elsewhere, and the next router
        # hears of an answer by ``AnswersHeld``, which has to come before further tokens of it.
        if router is not None and router == self._member.router:
            self._mailbox.send(router, message)

    def _on_broken(self) -> None:
        self._failure = UserError("the instance broke; its log says why", hint="please report it")
        self.leave_cluster()

    # -- the member's thread

    def _run_thread(self) -> None:
        try:
            while not self._ended.is_set():
                self._wait_and_work()
        except Exception:  # a member that cannot beat is dead to the others: better that it ends, and is started again
            log.exception("the member's thread failed")
            self._failure = UserError("the instance cannot go on; its log says why", hint="please report it")
        finally:
            self._ended.set()
            self._joined.set()

    def _wait_and_work(self) -> None:
        """One piece of work, or a look at the clock when the next heartbeat is due."""
        with self._lock:
            due_ns = self._member.next_deadline_ns
        try:
            wait_s = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
            work = self._work_queue.get(timeout=wait_s)
        except queue.Empty:
            self._last_work_s = time.monotonic()
            self._handle_event(ClockTicked())
            return
        self._last_work_s = time.monotonic()
        match work:
            case DrainRequested():
                self._handle_event(work)
            case ReadLoad(with_stats):
                self._handle_event(self._read_load(with_stats))
            case ChangeGeneration():
                self._change_generation(work)
            case Left(refused):
                self._on_left(refused)
            case _:
                raise InvariantError(f"unknown work {work!r}")

    def share_answers(self, exchange: Callable[[list[Answer]], list[Answer]]) -> None:
        """Tell others of the answers that ended here, by ``exchange``, and learn how long theirs were. Where the engine
        is busy, or has ended, those wait for the next time, or are lost."""
        objectives = self._machine.state.objectives
        if objectives is None:
            return
        lengths = objectives.lengths
        with suppress(TimeoutError, EngineStopped):
            answers = exchange(self._instance.query_machine(lengths.take_untold, READING_TIMEOUT_S))
            self._instance.query_machine(lambda: lengths.learn_answers(answers), READING_TIMEOUT_S)

    def _read_load(self, with_stats: bool) -> LoadRead:
        try:
            self._last_reading = self._instance.query_machine(
                lambda: self._machine.heartbeat_load(time.monotonic_ns()), READING_TIMEOUT_S
            )
        except (TimeoutError, EngineStopped):
            log.debug("the engine is busy: the heartbeat repeats the last reading")
        return replace(self._last_reading, stats=self._encode_stats() if with_stats else b"")

    def _encode_stats(self) -> bytes:
        try:
            return self._instance.read_stats(READING_TIMEOUT_S).encode()
        except (TimeoutError, EngineStopped):
            return b""

    def _change_generation(self, command: ChangeGeneration) -> None:
        self_peer = next_incarnation(self.self_peer, command)
        self._instance.post_event(MessageArrived(command.router, Expelled(command.reason)))
        self._instance.query_machine(lambda: self._machine.restart_as(self_peer))
        self._mailbox.restart_as(self_peer)
        self._handle_event(
            GenerationChanged(self._port.describe(msgspec.structs.replace(self._member.info, peer=self_peer)))
        )

    def _on_left(self, refused: str) -> None:
        if refused:
            hint = "instances of one cluster run the same model, dtype and block size"
            self._failure = UserError(f"the router refuses this instance: {refused}", hint=hint, param="join")
        self._ended.set()
