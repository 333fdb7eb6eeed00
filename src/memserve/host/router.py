"""The router's engine: a whole cluster behind the interface that the API knows from one engine.

client threads --submit--> inbox --> [one at a time: Cluster.handle] --Send--> mailbox --> instances
                             ^                     |                                          |
                             |                     +--> sinks (new tokens)                    |
                             +------------- MessageArrived <---- mailbox <--------------------+

What operators read of a cluster's members: one line for each death, return and refusal of one.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from msgspec import structs

from memserve.base.errors import InvariantError
from memserve.base.types import NamedPrefix, Request, Role
from memserve.base.units import NS_PER_MS
from memserve.host.engine import ClientCommands, Sink
from memserve.host.stats import RouterStats
from memserve.host.supervisor import ChildStats
from memserve.journal.keeper import Durability, MetaKeeper
from memserve.protocol.kv_hints import HintResult
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    GenerationChanged,
    Left,
    LogWarning,
    RemovePeer,
)
from memserve.protocol.messages import AdapterFiles, AnyMessage, Join, JoinAccepted
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.records import DocumentDropped, DocumentPut
from memserve.protocol.store import store_at
from memserve.router.events import (
    AdapterAnswered,
    AdapterNamed,
    AdapterNamesChanged,
    AdapterUnnamed,
    EmitTokens,
    InstanceDied,
    InstanceDrained,
    MemberChange,
    MessageArrived,
    RejectRequest,
    ReportMember,
    RequestArrived,
    RouterEnds,
    Send,
    StateRecovered,
    StoreNamed,
)
from memserve.router.follower import Follower, FollowerStarts
from memserve.router.machine import Cluster
from memserve.router.members.autoscaling import RoleCount
from memserve.router.outbox import DurabilityGate, Write
from memserve.router.placement.prefix_directory import PrefixNode
from memserve.router.report import InstanceView
from memserve.system.log import RatedLog
from memserve.system.loop import SharedLoop
from memserve.transport.ports import Mailbox, OnMessage

log = logging.getLogger(__name__)

_NAMES_MAX = 1024
"""Names of which the last end is remembered, for the line about their return."""

_LEVELS = {
    MemberChange.JOINED: logging.INFO,
    MemberChange.LEFT: logging.INFO,
    MemberChange.RETURNED: logging.WARNING,  # beside the line about the death: one without the other alarms
    MemberChange.DIED: logging.WARNING,
    MemberChange.REFUSED: logging.WARNING,
    MemberChange.EXPELLED: logging.WARNING,
    MemberChange.DECLINED: logging.WARNING,
}

_WORDS = {
    MemberChange.JOINED: "joined",
    MemberChange.LEFT: "left",
    MemberChange.RETURNED: "is back",
    MemberChange.DIED: "is dead",
    MemberChange.REFUSED: "may not join",
    MemberChange.EXPELLED: "is told to join again",
    MemberChange.DECLINED: "does not join",
}

_KINDS = {Role.STORE: "store", Role.ROUTER: "router", None: "member"}


class MemberLog:
    """Writes what operators read of a cluster's members. One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rated_log = RatedLog(log, clock=clock)
        self._last_ends: OrderedDict[str, tuple[float, bool]] = OrderedDict()
        """Name -> when its last incarnation ended, and whether that was its death."""

    def log_change(self, report: ReportMember) -> None:
        """One line, unless there was one like it just now."""
        change, name, level = report.change, report.peer.name, _LEVELS[report.change]
        why = [report.why] if report.why else []
        if change in (MemberChange.DIED, MemberChange.LEFT):
            self._last_ends[name] = (self._clock(), change is MemberChange.DIED)
            self._last_ends.move_to_end(name)
            if len(self._last_ends) > _NAMES_MAX:
                self._last_ends.popitem(last=False)
        elif change is MemberChange.RETURNED:
            since_s, has_died = self._last_ends.pop(name, (None, bool(why)))
            why += [] if since_s is None else [f"after {self._clock() - since_s:.1f} s"]
            level = level if has_died else logging.INFO  # it said goodbye, here or to a router before this one
        # one process that connects at short intervals under ever new generations has one line, too
        thing = (change, name, report.address)
        place = f" at {report.address}" if report.address else ""
        change_text = _WORDS[change] + (f": {', '.join(why)}" if why else "")
        kind = _KINDS.get(report.role, "instance")
        self._rated_log.log_limited(level, thing, "%s %s%s %s", kind, name[:100], place[:200], change_text[:300])


MEMBERS_LOOK_S = 1.0
"""How often the lines to instances are compared with the members."""


class RouterEngine(ClientCommands):
    """Runs requests on the members of a cluster; thread-safe, answers through sinks. Those are called in any thread,
    never two at a time, and must not wait for the router."""

    def __init__(
        self,
        machine: Cluster | Follower,
        open_mailbox: Callable[[OnMessage], Mailbox],
        *,
        keeper: MetaKeeper | None = None,
        self_peer: Peer | None = None,
    ) -> None:
        """``open_mailbox`` gets the function that takes what members say. ``keeper``: what ``machine`` remembers goes
        there, and it goes on from what ``keeper`` remembers; ``self_peer`` is the router's name then."""
        self._machine = machine.cluster if isinstance(machine, Follower) else machine
        self._follower = machine if isinstance(machine, Follower) else None
        super().__init__(lambda event: self._loop.post_event(event))
        self._members: dict[str, PeerInfo] = {}  # all and only the members, as they introduced themselves
        self._changed = threading.Condition()  # notified whenever _members changes
        self._next_check_s = 0.0
        self._connected_peers: dict[Peer, None] = {}  # all and only those that the mailbox knows
        self._handle_ns = 0
        self._log = MemberLog()
        self.children: Callable[[], Mapping[str, ChildStats]] = dict
        """Asked for what became of the processes of instances, by name; none runs under this router by default."""
        self.scaling: tuple[RoleCount, ...] = ()
        """Counts of instances that follow the load."""
        self.declined: dict[str, ReportMember] = {}
        """Stores that have said that they do not join, and why, by name."""
        self.owner_url: str | None = None
        """Of a follower: where the owner answers HTTP; empty: not known."""
        self.refused = ""
        """Why the owner does not accept this follower. Empty: it does, or this is the owner."""
        self.on_left: Callable[[str], None] = lambda _refused: None
        """Called with :attr:`refused` when this follower is no member any more, and will not be one again."""
        self.on_joined: Callable[[], None] = lambda: None
        """Called when an instance has joined."""
        self._closed = False
        self._adapter_ids = itertools.count()
        self._adapter_calls: dict[int, Future[AdapterAnswered]] = {}
        self._followed_names = AdapterNamesChanged((), ())
        self._on_names: Callable[[AdapterNamesChanged], None] = lambda _names: None
        self._keeper = keeper
        self._is_listening = keeper is None  # before the machine has recovered, it would not know its members
        self._loop: SharedLoop[Any] = SharedLoop(
            machine, self._perform_actions, on_broken=self._clients.fail_all, name="memserve-router"
        )
        self._gate = DurabilityGate() if keeper is not None else None
        self._mailbox = open_mailbox(self._message_arrived)
        if keeper is not None and self_peer is not None:
            recovered = StateRecovered(keeper.recovered_state, self_peer, self._mailbox.address, keeper.clock_offset_ns)
            self._loop.post_event(recovered)
            self._is_listening = True
        elif isinstance(machine, Follower):
            self._loop.post_event(FollowerStarts(self._mailbox.address))
        self._loop.start()

    # -- for the API

    def receive_messages_in(self, loop: AbstractEventLoop | None) -> None:
        """From now on ``loop``, from which this is called, reads what members say; None: a thread, as at first. Before
        ``loop`` ends, or this engine is closed."""
        self._mailbox.read_in(loop)
        self._loop.tick_in(loop)

    def submit(self, request: Request, sink: Sink) -> None:
        """Run ``request`` somewhere. ``sink`` gets every :class:`TokenOutput`, or one :class:`Rejected`."""
        self._clients.submit_request(request, sink, lambda request: self._loop.enqueue_event(RequestArrived(request)))
        self._loop.wake_loop()

    def hint_results(self, hint_ids: Sequence[str]) -> list[HintResult | None]:
        """What became of each hint; ``None``: not known yet, or any more. Raises as :meth:`stats`."""
        hints = self._machine.hints
        return self._loop.query_machine(lambda: [hints.result_of(hint_id) for hint_id in hint_ids])

    def pinned_tokens(self, handles: Sequence[str], tenant: str) -> list[int | None]:
        """How much of each is pinned; ``None`` while nothing was heard of it. Raises as :meth:`stats`."""
        return self._loop.query_machine(lambda: self._machine.pinned_tokens(tenant, handles))

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """What is kept under a tenant's names; their times are those of the router's clock. Raises as :meth:`stats`."""
        return self._loop.query_machine(lambda: self._machine.named_prefixes(tenant))

    def prefix_trees(self, tenant: str | None) -> dict[str, tuple[PrefixNode, ...]]:
        """The prefixes of the last prompts by tenant; ``None``: of all tenants. Raises as :meth:`stats`."""
        return self._loop.query_machine(lambda: self._machine.prefix_trees(tenant))

    def stats(self) -> RouterStats:
        """A consistent snapshot of the router's counters, and what each member has said of itself lately.

        Raises ``TimeoutError`` when the router is stuck, :class:`EngineStopped` when it has ended: that one at once.
        """
        snapshot = self._loop.query_machine(
            lambda: RouterStats.from_cluster(self._machine.stats(), self._machine.instances(), self._handle_ns)
        )
        durability = self._keeper.durability() if self._keeper is not None else Durability()
        mailbox = self._mailbox.counters
        return replace(snapshot, children=self.children(), scaling=self.scaling, mailbox=mailbox, metadata=durability)

    # -- for the process that runs the cluster

    @property
    def address(self) -> str:
        """Where instances join, ``tcp://host:port``."""
        return self._mailbox.address

    def members(self) -> dict[str, PeerInfo]:
        """The members by name, as they introduced themselves."""
        with self._changed:
            return dict(self._members)

    def forget_member(self, name: str) -> None:
        """Its process has ended, as its keeper knows: :meth:`members` has the next one of this name when it joins."""
        with self._changed:
            self._members.pop(name, None)

    @property
    def is_member(self) -> bool:
        """Whether the owner has accepted this follower. True: this is the owner."""
        return self._follower is None or self._follower.member.router is not None

    def wait_for_members(self, names: Sequence[str], timeout_s: float) -> bool:
        """Whether all of ``names`` (at least one member, if there are none) are members before ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._members) and all(name in self._members for name in names), timeout_s
            )

    def instance_views(self) -> tuple[InstanceView, ...]:
        """The members as the router sees them. Raises as :meth:`stats`."""
        return self._loop.query_machine(self._machine.instances)

    def invite_store(self, address: str, number: int) -> None:
        """Ask the store at ``address`` (``tcp://host:port``) to join, from now on, whenever it is started. ``number``:
        another one for each store of this mailbox, from 0 on."""
        store = store_at(number)
        self._mailbox.connect(store, address)
        self._loop.post_event(StoreNamed(self._mailbox.address, store))

    def drain_member(self, name: str) -> None:
        """Ask a member to finish what it has and to leave."""
        self._loop.post_event(InstanceDrained(name))

    def mark_dead(self, name: str, how: str) -> None:
        """The process of a member has ended, as its keeper knows: what ran there goes on elsewhere at once, without
        the wait for heartbeats that do not come. ``how`` it ended: ``was ended by signal 9``."""
        self._loop.post_event(InstanceDied(name, how))

    # -- what clients were promised

    def stored_documents(self) -> tuple[DocumentPut, ...]:
        """Those that the last router knew."""
        return self._keeper.recovered_state.documents if self._keeper is not None else ()

    def write_record(self, record: DocumentPut | DocumentDropped) -> Future[bool]:
        """Make ``record`` durable. The future says whether it is; True without metadata: no client is promised more."""
        durable_future: Future[bool] = Future()
        if self._keeper is None:
            durable_future.set_result(True)
        else:
            self._keeper.write_durably([record], durable_future.set_result)
        return durable_future

    # -- adapters

    def stored_adapters(self) -> tuple[AdapterFiles, ...]:
        """Those that the last router knew."""
        records = self._keeper.recovered_state.adapters if self._keeper is not None else ()
        return tuple(AdapterFiles(record.name, record.folder, record.digest) for record in records)

    def load_adapter(self, files: AdapterFiles) -> Future[AdapterAnswered]:
        """Have all instances load it, for requests that name it. The future says what came of it, once it is
        durable."""
        return self._ask_adapter(lambda call_id: AdapterNamed(call_id, files))

    def unload_adapter(self, name: str, *, is_fixed: bool = False) -> Future[AdapterAnswered]:
        """No new request names it; those that have begun with it go on. ``is_fixed``: it is one of the start."""
        return self._ask_adapter(lambda call_id: AdapterUnnamed(call_id, name, is_fixed))

    def follow_names(self, on_names: Callable[[AdapterNamesChanged], None]) -> None:
        """Of a follower: ``on_names`` is called with the owner's names now, and when they change, from any thread."""

        def begin() -> None:
            self._on_names = on_names
            on_names(self._followed_names)

        self._loop.query_machine(begin)

    def _ask_adapter(self, event_of: Callable[[int], AdapterNamed | AdapterUnnamed]) -> Future[AdapterAnswered]:
        call_id, answered = next(self._adapter_ids), Future[AdapterAnswered]()
        self._adapter_calls[call_id] = answered
        self._loop.post_event(event_of(call_id))
        return answered

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what still runs, stop the thread and close the mailbox."""
        if self._closed:
            return
        self._closed = True
        for request_id in self._clients.close():
            self.cancel(request_id)
        self._loop.post_event(RouterEnds())
        self._loop.close(timeout_s)
        if self._keeper is not None:
            self._keeper.close(timeout_s)
        self._mailbox.close()

    # -- the thread that reads the mailbox

    def _message_arrived(self, sender: Peer, message: AnyMessage) -> None:
        if self._is_listening:
            self._loop.post_event(MessageArrived(sender, message))

    # -- the thread that has the loop's turn

    def _perform_actions(self, event: Any, actions: list[Any], spent_ns: int) -> None:
        self._handle_ns += spent_ns
        if isinstance(event, MessageArrived) and self._follower is None:
            self._follow_members(event, actions)
        elif isinstance(event, StateRecovered):
            for member in event.recovered.members:
                self._connect_member(member.info)
        for action in self._gate.admit_actions(actions) if self._gate is not None else actions:
            self._perform_action(action)
        if self._follower is None and time.monotonic() >= self._next_check_s:
            self._remove_left_members()

    def _perform_action(self, action: Any) -> None:
        match action:
            case EmitTokens(outputs):
                self._clients.deliver_outputs(outputs)
            case Send(to, message):
                self._mailbox.send(to, message)
            case RejectRequest():
                self._clients.reject_request(action)
            case ReportMember():
                if action.change is MemberChange.DECLINED:
                    self.declined[action.peer.name] = action
                self._log.log_change(action)
            case Write():
                self._write_records(action)
            case AdapterAnswered(call_id):
                self._adapter_calls.pop(call_id).set_result(action)
            case AdapterNamesChanged():
                self._followed_names = action
                self._on_names(action)
            case _:
                self._perform_member_action(action)

    def _perform_member_action(self, action: Any) -> None:
        """What a follower does as a member of the owner's cluster."""
        match action:
            case ConnectRouter(router, address):
                self._mailbox.connect(router, address)
            case AddPeer(info):
                self._mailbox.connect(info.peer, info.address)
                self._add_member(info)
            case RemovePeer(peer):
                self._mailbox.disconnect(peer)
                with self._changed:
                    self._members.pop(peer.name, None)
            case ChangeGeneration():
                self._change_generation(action)
            case Left(refused):
                self.refused = refused
                self.on_left(refused)
            case LogWarning(text):
                log.warning("%s", text)

    def _change_generation(self, command: ChangeGeneration) -> None:
        if self._follower is not None:
            info = self._follower.member.info
            self_peer = Peer(info.peer.name, max(command.generation_min, time.time_ns() // NS_PER_MS))
            self._mailbox.restart_as(self_peer)
            self._loop.post_event(GenerationChanged(structs.replace(info, peer=self_peer)))

    def _write_records(self, write: Write) -> None:
        keeper, gate, number = self._keeper, self._gate, write.number
        if keeper is None or gate is None:
            raise InvariantError("a router without metadata was asked to write some")
        if number is None:
            keeper.note(write.records)
            return

        def release() -> None:
            for action in gate.release_actions(number):
                self._perform_action(action)

        keeper.write_durably(write.records, lambda _durable: self._loop.call_in_loop(release))

    def _follow_members(self, event: MessageArrived, actions: list[Any]) -> None:
        """Lines follow membership: a process that is welcome can be sent to from now on."""
        message = event.message
        if isinstance(message, Join) and any(
            isinstance(a, Send) and isinstance(a.message, JoinAccepted) for a in actions
        ):
            self._connect_member(message.info)
            self._add_member(message.info)

    def _add_member(self, info: PeerInfo) -> None:
        with self._changed:
            self._members[info.peer.name] = info
            self._changed.notify_all()
        if info.role.has_model:
            self.on_joined()

    def _connect_member(self, info: PeerInfo) -> None:
        self._mailbox.connect(info.peer, info.address)
        self._connected_peers[info.peer] = None

    def _remove_left_members(self) -> None:
        """Now and then: processes that are no members any more need no line."""
        self._next_check_s = time.monotonic() + MEMBERS_LOOK_S
        live = {view.peer for view in self._machine.instances()}
        with self._changed:
            for info in [info for info in self._members.values() if info.peer not in live]:
                del self._members[info.peer.name]
        for peer in [peer for peer in self._connected_peers if peer not in live]:
            del self._connected_peers[peer]
            self._mailbox.disconnect(peer)
