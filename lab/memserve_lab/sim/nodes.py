"""The processes of a cluster in virtual time: the part of ``host/`` around each machine, without threads.

What every member of a cluster has in virtual time, whatever its machine: a mailbox, and a port for pages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from msgspec import structs

from memserve.base.config import MemberConfig
from memserve.base.errors import check
from memserve.base.types import ClockTicked, Role, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.instance.events import (
    Action,
    AwaitMask,
    BuildGrammar,
    DropSegment,
    GrammarBuilt,
    HoldSegment,
    LayerFinished,
    MaskComputed,
    MoveGate,
    RunStep,
    StepFailed,
    StepFinished,
    StepPlan,
)
from memserve.instance.machine import Instance
from memserve.kv.transfer.events import CancelPulls, PullPages, SealPages
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.member import ANY_ROUTER, MemberMachine
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    ForwardMessage,
    GenerationChanged,
    Left,
    LoadRead,
    LogWarning,
    MemberAction,
    MemberEvent,
    ReadLoad,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage, Expelled, RequestRefused, Tokens
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.router.events import ClusterAction, ReportMember
from memserve.router.follower import NO_KV, Follower, FollowerAction, FollowerStarts
from memserve.router.machine import Cluster
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.process import Network, Process, Ticking


class DataPort(Protocol):
    """Moves pages beside the device. Each job but a cancellation is answered through ``node.post``, at its time."""

    def seal_pages(self, job: SealPages) -> None:
        """Answer with ``PagesSealed``."""

    def pull_pages(self, job: PullPages) -> None:
        """Answer with ``PagesPulled``."""

    def cancel_pulls(self, job: CancelPulls) -> None:
        """Pulls from a peer need not begin; each is answered all the same."""


class Addressed(Protocol):
    """A router."""

    @property
    def address(self) -> str:
        """Where it is reached."""


class MemberHost(Protocol):
    """A world with members."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def network(self) -> Network:
        """The wires between the nodes."""

    @property
    def router(self) -> Addressed:
        """The one router there is."""

    @property
    def tells(self) -> bool:
        """Whether :meth:`log_line` is wanted: else no lines are built."""

    def on_handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """A machine has handled ``event``; none of ``actions`` is done yet."""

    def log_line(self, line: str, detail: object = "") -> None:
        """Something worth telling happened; ``what`` is written out only when it is read."""


class MemberNode(Process):
    """Hosts a machine that is a member of a cluster, or has one in it."""

    host: MemberHost
    port: DataPort

    def forget_lines(self) -> None:
        """A process that starts knows no other member, and no router."""
        #: what the mailbox knows: other members by name, and where it looks for a router
        self._lines: dict[str, Peer] = {}
        self._dialled: ConnectRouter | None = None

    def change_connections(self, action: ConnectRouter | AddPeer | RemovePeer) -> None:
        """The mailbox gets to know a member, or forgets it, or looks for a router elsewhere."""
        match action:
            case ConnectRouter():
                self._dialled = action
            case AddPeer(info):
                self._lines[info.peer.name] = info.peer
            case RemovePeer(peer):
                del self._lines[peer.name]

    def port_job(self, job: SealPages | PullPages | CancelPulls) -> None:
        """Have pages sealed or moved."""
        match job:
            case SealPages():
                self.port.seal_pages(job)
            case PullPages():
                self.port.pull_pages(job)
            case CancelPulls():
                self.port.cancel_pulls(job)

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        """Messages to peers that the mailbox does not know, and to an address without a router, are lost."""
        if self._reaches_router(to) if to.name == ROUTER else self._lines.get(to.name) == to:
            self.host.network.send_message(self.peer, to, message)
        elif self.host.tells:
            self.host.log_line(f"      lost: {self.peer.name} does not reach {to}: ", message)

    def _reaches_router(self, to: Peer) -> bool:
        """Only the router that was dialled, or whichever is there if any was meant."""
        line = self._dialled
        return line is not None and line.address == self.host.router.address and to in (line.router, ANY_ROUTER)

    def owner_of(self, job: PullPages) -> MemberNode | None:
        """The living process whose pages ``job`` is to read. None: it is unknown here, or of another generation."""
        node = self.host.network.nodes.get(job.peer.name)
        if isinstance(node, MemberNode) and node.peer == job.peer and self._lines.get(job.peer.name) == job.peer:
            return node
        return None


ROUTER_ADDRESS = "virtual://router"


class Device(Protocol):
    """Executes plans strictly in order. Between :meth:`step_ns` and the answer that time passes."""

    @property
    def layers(self) -> int:
        """How many layers report their end, for a plan with ``report_layers``."""

    def step_ns(self, plan: StepPlan) -> int:
        """How long ``plan`` will take, its copies included."""

    def finish_layer(self, plan: StepPlan, layer: int) -> bool:
        """``layer`` of the plan under way is computed. Returns whether to report it."""

    def lose_rows(self, plan: StepPlan, slots: Iterable[int]) -> None:
        """What rows of these slots wait for will not come: they fail alone."""

    def run_plan(self, plan: StepPlan) -> StepFinished | StepFailed:
        """The plan has been executed, or has failed."""


class Host(MemberHost, Protocol):
    """A world. ``clock`` and ``network`` are shared by all its nodes."""

    @property
    def member_config(self) -> MemberConfig:
        """How often an instance sends heartbeats, and how long it waits for its router."""

    @property
    def router_addresses(self) -> Sequence[str]:
        """Where instances look for a router, in turn."""

    @property
    def router(self) -> RouterNode:
        """The only router."""

    def new_cluster(self) -> Cluster:
        """The machine of the router, which starts now."""

    def new_instance(self, node: InstanceNode) -> Instance:
        """The machine of an instance, which starts now as ``node.peer``."""

    def new_device(self, node: InstanceNode) -> Device:
        """Its device."""

    def new_port(self, node: InstanceNode) -> DataPort:
        """Its data port to the pages of others."""

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """Its description when it joins."""

    def on_output(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a client's request."""


class FollowedHost(Host, Protocol):
    """A world with routers that are not the owner."""

    def new_follower(self, node: FollowerNode) -> Follower:
        """The machine of a follower, which starts now as ``node.peer``."""


class WorkerMachine(Protocol):
    """The machine of a member that runs requests."""

    def heartbeat_load(self, now_ns: int) -> LoadRead:
        """How busy it is."""


class WorkerNode(MemberNode):
    """Hosts a ``MemberMachine``, beside the machine of what it is a member with."""

    host: Host
    machine: WorkerMachine
    member: MemberMachine

    @abstractmethod
    def post_event(self, event: object) -> None:
        """Give ``event`` to :attr:`machine`, and do what it says."""

    @abstractmethod
    def begin_generation(self, order: ChangeGeneration) -> None:
        """Go on under a new generation of the name, and tell :attr:`member`."""

    @abstractmethod
    def on_end(self, refused: str) -> None:
        """It has left the cluster. ``refused``: why it may not join; empty: it was drained."""

    def start_member(self, info: PeerInfo) -> None:
        """Ask to join, as a process does that has just started."""
        self.forget_lines()
        self.member = MemberMachine(info, self.host.router_addresses, self.host.member_config)
        self._beating = Ticking(self, self.member_ticks)
        self._do_actions(self.member.start(self.now))

    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.log_line(f"{self.peer.name} <- {sender.name}: ", message)
        self.tell_member(MessageArrived(sender, message))

    def member_ticks(self) -> None:
        """A deadline of :attr:`member` has come."""
        self.tell_member(ClockTicked())

    def tell_member(self, event: MemberEvent) -> None:
        """Give ``event`` to :attr:`member`, and do what it says."""
        self._do_actions(self.member.handle(event, self.now))

    def _do_actions(self, actions: Sequence[MemberAction]) -> None:
        life = self.life
        for action in actions:
            self._do_one(action)
            if self.life != life:
                return  # it has left
        self._beating.plan_tick(self.member.next_deadline_ns)

    def _do_one(self, action: MemberAction) -> None:
        match action:
            case ForwardMessage(sender, message):
                self.post_event(MessageArrived(sender, message))
            case Send(to, message):
                self.send_message(to, message)
            case ReadLoad():
                self.tell_member(self.machine.heartbeat_load(self.now))
            case ConnectRouter() | AddPeer() | RemovePeer():
                self.change_connections(action)
            case ChangeGeneration():
                self.begin_generation(action)
            case LogWarning(text):
                self.host.log_line(f"{self.peer.name}: {text}")
            case Left(refused):
                self.on_end(refused)


class InstanceNode(WorkerNode):
    """Hosts a ``MemberMachine`` and an ``Instance``, its device and its data port, as ``host/member`` does."""

    machine: Instance
    device: Device

    def __init__(self, host: Host, name: str, role: Role, place: int, generation: int = 0) -> None:
        """Boots at once. ``place``: its number in the world; ``generation``: that of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.role, self.place = role, place
        self.boot_process()

    # -- life

    def boot_process(self) -> None:
        """A new process under the same name, with nothing in memory, which asks to join."""
        self.begin_life()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.machine = self.host.new_instance(self)
        self.device = self.host.new_device(self)
        self.port = self.host.new_port(self)
        self.plans: deque[StepPlan] = deque()
        self._working = False
        self._gates: dict[int, int | None] = {}  # of the plan under way and later ones: as ``MoveGate`` says
        self._at_gate: Callable[[], None] | None = None  # what goes on when one moves
        self.start_member(self.host.peer_info(self))

    def on_left(self) -> None:
        """The instance has been drained, has left the cluster, and its process has ended."""

    def on_refused(self, reason: str) -> None:
        """The router does not accept the instance."""
        check(False, f"{self.peer.name} was refused: {reason}")

    def on_end(self, refused: str) -> None:
        self.kill_process()
        self.on_refused(refused) if refused else self.on_left()

    def begin_generation(self, order: ChangeGeneration) -> None:
        """Drop all work, keep the cache, and take a new generation of the name."""
        self.post_event(MessageArrived(order.router, Expelled(order.reason)))
        self.peer = Peer(self.peer.name, order.generation_min)
        self.machine.restart_as(self.peer)
        self.tell_member(GenerationChanged(self.host.peer_info(self)))

    def post_event(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.on_handled(self, event, actions)
        for action in actions:
            self._perform_action(action)
        self.ticking.plan_tick(self.machine.next_deadline_ns)

    # -- out

    def _perform_action(self, action: Action) -> None:
        match action:
            case RunStep():
                self.plans.append(action.plan)
                self._start_step()
            case EmitTokens():
                self._tell_router(Tokens(tuple(action.outputs)))
            case Send():
                self.send_message(action.to, action.message)
            case RejectRequest():
                self._tell_router(RequestRefused(action.request_id, action.reason, action.retry_after_s))
            case SealPages() | PullPages() | CancelPulls():
                self.port_job(action)
            case HoldSegment() | DropSegment():
                self.change_segment(action)
            case MoveGate():
                self._move_gate(action)
            case BuildGrammar():
                self.call_later(GRAMMAR_NS, self.post_event, GrammarBuilt(action.job_id))
            case AwaitMask():
                self.call_later(GRAMMAR_NS, self.post_event, MaskComputed(action.job_id))

    def change_segment(self, order: HoldSegment | DropSegment) -> None:
        """Answer queries about a part of a longer sequence, or no more: in a world where such queries have content."""

    def _tell_router(self, message: AnyMessage) -> None:
        if self.member.router is not None:
            self.send_message(self.member.router, message)

    # -- device: plans strictly in order

    def _start_step(self) -> None:
        if self._working or not self.plans:
            return
        self._working = True
        self._run_layers(self.plans[0], self.device.step_ns(self.plans[0]))

    def _run_layers(self, plan: StepPlan, spent_ns: int) -> None:
        """Let ``plan`` take its time, and longer where it waits for layers of others."""
        layers = self.device.layers
        if plan.gates:
            self._enter_layer(plan, 0, spent_ns // (layers + 1))
            return
        for layer in range(layers if plan.report_layers else 0):
            self.call_later(spent_ns * (layer + 1) // (layers + 1), self._finish_layer, plan, layer)
        self._end_later(spent_ns)

    def _end_later(self, rest_ns: int) -> None:
        self.call_later(rest_ns, self._finish_step)

    def _enter_layer(self, plan: StepPlan, layer: int, layer_ns: int) -> None:
        """``layer`` begins, once what its rows read of others has come."""
        moves = [self._gates.get(gate, 0) for gate in plan.gates.values()]
        if any(layers is not None and layers <= layer for layers in moves):
            self._at_gate = partial(self._enter_layer, plan, layer, layer_ns)
            return
        self._at_gate = None
        self.call_later(layer_ns, self._leave_layer, plan, layer, layer_ns)

    def _leave_layer(self, plan: StepPlan, layer: int, layer_ns: int) -> None:
        lost = [slot for slot, gate in plan.gates.items() if self._gates.get(gate, 0) is None]
        self.device.lose_rows(plan, lost)
        self._finish_layer(plan, layer)
        if layer + 1 < self.device.layers:
            self._enter_layer(plan, layer + 1, layer_ns)
        else:
            self._end_later(layer_ns)

    def _move_gate(self, move: MoveGate) -> None:
        if not any(move.gate in plan.gates.values() for plan in self.plans):
            return  # its plan has ended
        self._gates[move.gate] = move.layers
        if self._at_gate is not None:
            self._at_gate()

    def _finish_layer(self, plan: StepPlan, layer: int) -> None:
        if self.device.finish_layer(plan, layer) and plan.report_layers:
            self.post_event(LayerFinished(plan.step_id, layer))

    def _finish_step(self) -> None:
        plan = self.plans.popleft()
        for gate in plan.gates.values():
            self._gates.pop(gate, None)
        self._working = False
        self.post_event(self.device.run_plan(plan))
        self._start_step()


GRAMMAR_NS = 10 * NS_PER_MS
"""How long a grammar is built, and how late a mask is, in virtual time."""


class FollowerNode(MemberNode):
    """Hosts a ``Follower``, as ``host/router`` does."""

    host: FollowedHost
    machine: Follower

    def __init__(self, host: FollowedHost, name: str, generation: int = 0) -> None:
        """Boots at once. ``generation``: that of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.boot_process()

    def boot_process(self) -> None:
        """A new process under the same name, with nothing in memory, which asks to join."""
        self.begin_life()
        #: why the owner does not accept it; empty: it does, or has not answered
        self.refusal = ""
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.forget_lines()
        self.machine = self.host.new_follower(self)
        self.post_event(FollowerStarts(f"virtual://{self.peer.name}"))

    def peer_info(self) -> PeerInfo:
        """What the owner and all members are told of it."""
        return PeerInfo(self.peer, Role.ROUTER, f"virtual://{self.peer.name}", "", NO_KV, 0, 0, 0, False)

    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.log_line(f"{self.peer.name} <- {sender.name}.{sender.generation}: ", message)
        self.post_event(MessageArrived(sender, message))

    def post_event(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.on_handled(self, event, actions)
        self._do_actions(actions)
        self.ticking.plan_tick(self.machine.next_deadline_ns)

    def _do_actions(self, actions: Sequence[FollowerAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self.send_message(to, message)
                case EmitTokens(outputs):
                    for output in outputs:
                        self.host.on_output(output)
                case RejectRequest(request_id, reason, retry_after_s):
                    self.host.turned_away(request_id, reason, retry_after_s)
                case ConnectRouter() | AddPeer() | RemovePeer():
                    self.change_connections(action)
                case LogWarning(text):
                    self.host.log_line(f"{self.peer.name}: {text}")
                case ChangeGeneration(generation_min=generation):
                    self.peer = Peer(self.peer.name, generation)
                    self.post_event(GenerationChanged(structs.replace(self.machine.member.info, peer=self.peer)))
                case Left(refused):
                    self.kill_process()
                    self.refusal = refused
                case _:
                    pass  # for operators


class RouterNode(Process):
    """Hosts a ``Cluster``, as ``host/router`` does."""

    host: Host
    machine: Cluster

    def __init__(self, host: Host, generation: int = 7) -> None:
        super().__init__(host, Peer(ROUTER, generation))
        self.address = ROUTER_ADDRESS
        self.machine = host.new_cluster()

    def restart_router(self) -> None:
        """The router dies and restarts: its clients are gone, the instances remain."""
        self.begin_life()
        self.peer = Peer(ROUTER, self.peer.generation + 1)
        self.machine = self.host.new_cluster()

    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.log_line(f"router <- {sender.name}.{sender.generation}: ", message)
        self.post_event(MessageArrived(sender, message))

    def post_event(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.on_handled(self, event, actions)
        self.perform_actions(actions)
        self.ticking.plan_tick(self.machine.next_deadline_ns)

    def perform_actions(self, actions: Sequence[ClusterAction]) -> None:
        """Do all of ``actions``, in order."""
        for action in actions:
            self.perform_one(action)

    def perform_one(self, action: ClusterAction) -> None:
        """Do one action now. This router has no disk, so its machine must not write to one."""
        match action:
            case Send():
                self.host.network.send_message(self.peer, action.to, action.message)
            case EmitTokens():
                for output in action.outputs:
                    self.host.on_output(output)
            case RejectRequest():
                self.host.turned_away(action.request_id, action.reason, action.retry_after_s)
            case ReportMember():
                pass  # for operators
            case _:
                check(False, f"unknown action {action!r}")
