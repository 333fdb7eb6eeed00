"""The processes of a cluster in virtual time: the part of ``runtime/`` around each machine, without threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import structs

from memserve.cluster.events import ClusterAction, ReportMember
from memserve.cluster.machine import Cluster
from memserve.config import MemberConfig
from memserve.errors import check
from memserve.follower.machine import NO_KV, Follower, FollowerAction, FollowerStarts
from memserve.instance.events import (
    Action,
    BecomeNew,
    Deliver,
    DialRouter,
    DropSegment,
    HoldSegment,
    LayerFinished,
    Left,
    MeetPeer,
    MemberAction,
    MemberEvent,
    Notice,
    PartFromPeer,
    ReadLoad,
    Reborn,
    RunStep,
    StepFailed,
    StepFinished,
    StepPlan,
)
from memserve.instance.grammar_events import AwaitMask, BuildGrammar, GrammarBuilt, MaskComputed
from memserve.instance.machine import Instance
from memserve.instance.member import MemberMachine
from memserve.kv_transfer.events import CancelPulls, PullPages, SealPages
from memserve.messages import ROUTER, AnyMessage, Expelled, Peer, PeerInfo, RequestRefused, Tokens
from memserve.serving import ClockTicked, EmitTokens, MessageArrived, RejectRequest, Send
from memserve.sim.member_node import DataPort, MemberHost, MemberNode
from memserve.sim.process import Process, Ticking
from memserve.types import Role, TokenOutput
from memserve.units import NS_PER_MS

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

    def run(self, plan: StepPlan) -> StepFinished | StepFailed:
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

    def emitted(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a client's request."""


class FollowedHost(Host, Protocol):
    """A world with routers that are not the owner."""

    def new_follower(self, node: FollowerNode) -> Follower:
        """The machine of a follower, which starts now as ``node.peer``."""


class InstanceNode(MemberNode):
    """Hosts a ``MemberMachine`` and an ``Instance``, its device and its data port, as ``runtime/member`` does."""

    host: Host
    machine: Instance
    member: MemberMachine
    device: Device

    def __init__(self, host: Host, name: str, role: Role, place: int, generation: int = 0) -> None:
        """Boots at once. ``place``: its number in the world; ``generation``: that of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.role, self.place = role, place
        self.boot()

    # -- life

    def boot(self) -> None:
        """A new process under the same name, with nothing in memory, which asks to join."""
        self.begin_life()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.machine = self.host.new_instance(self)
        self.device = self.host.new_device(self)
        self.port = self.host.new_port(self)
        self.plans: deque[StepPlan] = deque()
        self._working = False
        self.forget_lines()
        info, config = self.host.peer_info(self), self.host.member_config
        self.member = MemberMachine(info, self.host.router_addresses, config)
        self._beating = Ticking(self, self._member_ticks)
        self._do(self.member.start(self.now))

    def left(self) -> None:
        """The instance has been drained, has left the cluster, and its process has ended."""

    def refused(self, reason: str) -> None:
        """The router does not accept the instance."""
        check(False, f"{self.peer.name} was refused: {reason}")

    # -- as a member

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"{self.peer.name} <- {sender.name}: ", message)
        self._tell_member(MessageArrived(sender, message))

    def _member_ticks(self) -> None:
        self._tell_member(ClockTicked())

    def _tell_member(self, event: MemberEvent) -> None:
        self._do(self.member.handle(event, self.now))

    def _do(self, actions: Sequence[MemberAction]) -> None:
        life = self.life
        for action in actions:
            self._do_one(action)
            if self.life != life:
                return  # it has left
        self._beating.look(self.member.next_deadline_ns)

    def _do_one(self, action: MemberAction) -> None:
        match action:
            case Deliver(sender, message):
                self.post(MessageArrived(sender, message))
            case Send(to, message):
                self.send(to, message)
            case ReadLoad():
                self._tell_member(self.machine.reading(self.now))
            case DialRouter() | MeetPeer() | PartFromPeer():
                self.line(action)
            case BecomeNew():
                self._become_new(action)
            case Notice(text):
                self.host.say(f"{self.peer.name}: {text}")
            case Left(refused):
                self.kill()
                self.refused(refused) if refused else self.left()

    def _become_new(self, order: BecomeNew) -> None:
        """Drop all work, keep the cache, and take a new generation of the name."""
        self.post(MessageArrived(order.router, Expelled(order.reason)))
        self.peer = Peer(self.peer.name, order.generation_min)
        self.machine.reborn(self.peer)
        self._tell_member(Reborn(self.host.peer_info(self)))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.handled(self, event, actions)
        for action in actions:
            self._perform(action)
        self.ticking.look(self.machine.next_deadline_ns)

    # -- out

    def _perform(self, action: Action) -> None:
        match action:
            case RunStep():
                self.plans.append(action.plan)
                self._start_step()
            case EmitTokens():
                self._tell_router(Tokens(tuple(action.outputs)))
            case Send():
                self.send(action.to, action.message)
            case RejectRequest():
                self._tell_router(RequestRefused(action.request_id, action.reason, action.retry_after_s))
            case SealPages() | PullPages() | CancelPulls():
                self.port_job(action)
            case HoldSegment() | DropSegment():
                self.segment(action)
            case BuildGrammar():
                self.later(GRAMMAR_NS, self.post, GrammarBuilt(action.job_id))
            case AwaitMask():
                self.later(GRAMMAR_NS, self.post, MaskComputed(action.job_id))

    def segment(self, order: HoldSegment | DropSegment) -> None:
        """Answer queries about a part of a longer sequence, or no more: in a world where such queries have content."""

    def _tell_router(self, message: AnyMessage) -> None:
        if self.member.router is not None:
            self.send(self.member.router, message)

    # -- device: plans strictly in order

    def _start_step(self) -> None:
        if self._working or not self.plans:
            return
        self._working = True
        plan = self.plans[0]
        spent_ns = self.device.step_ns(plan)
        if plan.report_layers:
            layers = self.device.layers
            for layer in range(layers):
                self.later(spent_ns * (layer + 1) // (layers + 1), self._finish_layer, plan, layer)
        self.later(spent_ns, self._finish_step)

    def _finish_layer(self, plan: StepPlan, layer: int) -> None:
        if self.device.finish_layer(plan, layer):
            self.post(LayerFinished(plan.step_id, layer))

    def _finish_step(self) -> None:
        plan = self.plans.popleft()
        self._working = False
        self.post(self.device.run(plan))
        self._start_step()


GRAMMAR_NS = 10 * NS_PER_MS
"""How long a grammar is built, and how late a mask is, in virtual time."""


class FollowerNode(MemberNode):
    """Hosts a ``Follower``, as ``runtime/router`` does."""

    host: FollowedHost
    machine: Follower

    def __init__(self, host: FollowedHost, name: str, generation: int = 0) -> None:
        """Boots at once. ``generation``: that of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.boot()

    def boot(self) -> None:
        """A new process under the same name, with nothing in memory, which asks to join."""
        self.begin_life()
        #: why the owner does not accept it; empty: it does, or has not answered
        self.refusal = ""
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.forget_lines()
        self.machine = self.host.new_follower(self)
        self.post(FollowerStarts(f"virtual://{self.peer.name}"))

    def info(self) -> PeerInfo:
        """What the owner and all members are told of it."""
        return PeerInfo(self.peer, Role.ROUTER, f"virtual://{self.peer.name}", "", NO_KV, 0, 0, 0, False)

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"{self.peer.name} <- {sender.name}.{sender.generation}: ", message)
        self.post(MessageArrived(sender, message))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.handled(self, event, actions)
        self._do(actions)
        self.ticking.look(self.machine.next_deadline_ns)

    def _do(self, actions: Sequence[FollowerAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self.send(to, message)
                case EmitTokens(outputs):
                    for output in outputs:
                        self.host.emitted(output)
                case RejectRequest(request_id, reason, retry_after_s):
                    self.host.turned_away(request_id, reason, retry_after_s)
                case DialRouter() | MeetPeer() | PartFromPeer():
                    self.line(action)
                case Notice(text):
                    self.host.say(f"{self.peer.name}: {text}")
                case BecomeNew(generation_min=generation):
                    self.peer = Peer(self.peer.name, generation)
                    self.post(Reborn(structs.replace(self.machine.member.info, peer=self.peer)))
                case Left(refused):
                    self.kill()
                    self.refusal = refused
                case _:
                    pass  # for operators


class RouterNode(Process):
    """Hosts a ``Cluster``, as ``runtime/router`` does."""

    host: Host
    machine: Cluster

    def __init__(self, host: Host, generation: int = 7) -> None:
        super().__init__(host, Peer(ROUTER, generation))
        self.address = ROUTER_ADDRESS
        self.machine = host.new_cluster()

    def restart(self) -> None:
        """The router dies and restarts: its clients are gone, the instances remain."""
        self.begin_life()
        self.peer = Peer(ROUTER, self.peer.generation + 1)
        self.machine = self.host.new_cluster()

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"router <- {sender.name}.{sender.generation}: ", message)
        self.post(MessageArrived(sender, message))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.handled(self, event, actions)
        self.perform(actions)
        self.ticking.look(self.machine.next_deadline_ns)

    def perform(self, actions: Sequence[ClusterAction]) -> None:
        """Do all of ``actions``, in order."""
        for action in actions:
            self.perform_one(action)

    def perform_one(self, action: ClusterAction) -> None:
        """Do one action now. This router has no disk, so its machine must not write to one."""
        match action:
            case Send():
                self.host.network.send(self.peer, action.to, action.message)
            case EmitTokens():
                for output in action.outputs:
                    self.host.emitted(output)
            case RejectRequest():
                self.host.turned_away(action.request_id, action.reason, action.retry_after_s)
            case ReportMember():
                pass  # for operators
            case _:
                check(False, f"unknown action {action!r}")
