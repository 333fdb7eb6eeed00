"""The processes of a cluster in virtual time: what ``runtime/`` does around each machine, without threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from memserve.cluster.events import ClusterAction, ReportMember
from memserve.cluster.machine import Cluster
from memserve.errors import check
from memserve.instance.actions import (
    Action,
    CancelPulls,
    EmitTokens,
    PullPages,
    RejectRequest,
    RunStep,
    SealPages,
    Send,
    StepPlan,
)
from memserve.instance.events import LayerFinished, MessageArrived
from memserve.instance.machine import Instance
from memserve.messages import (
    ROUTER,
    AnyMessage,
    Drain,
    Expelled,
    Heartbeat,
    Join,
    Leave,
    Peer,
    PeerGone,
    PeerJoined,
    Recall,
    Refused,
    RequestRefused,
    Tokens,
    Welcome,
    roll_of,
)
from memserve.sim.host import DataPort, Device, Host
from memserve.sim.process import Process
from memserve.types import Role

_ANY_ROUTER = Peer(ROUTER, 0)


class InstanceNode(Process):
    """What ``runtime/member`` does: joins, beats, hosts an ``Instance``, its device and its data port."""

    machine: Instance
    device: Device
    port: DataPort

    def __init__(self, host: Host, name: str, role: Role, place: int, generation: int = 0) -> None:
        """``place``: its number in the world; ``generation``: of the process before it. It boots at once."""
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
        self.router: Peer | None = None
        self._recalled_by: Peer | None = None
        self.knows: dict[str, Peer] = {}
        self._roll: int | None = None
        self.draining = False
        self._join()
        self.later(self.host.heartbeat_ns, self._beat)

    def left(self) -> None:
        """It has been drained, has said good-bye, and its process has ended."""

    def refused(self, reason: str) -> None:
        """The router does not take it."""
        check(False, f"{self.peer.name} was refused: {reason}")

    def _join(self) -> None:
        """Ask to be a member, until there is an answer."""
        if self.router is None:
            self.host.network.send(self.peer, _ANY_ROUTER, Join(self.host.peer_info(self)))
            self.later(self.host.join_again_ns, self._join_again, self.peer.generation)

    def _join_again(self, generation: int) -> None:
        if generation == self.peer.generation:
            self._join()

    def _beat(self) -> None:
        if self.router is not None:
            machine = self.machine
            heartbeat = Heartbeat(machine.load(), machine.next_event, roll=self._count_roll())
            self.host.network.send(self.peer, _ANY_ROUTER, heartbeat)
            if self.draining and self._is_idle():
                self.host.network.send(self.peer, self.router, Leave())
                self.kill()
                self.left()
                return
        self.later(self.host.heartbeat_ns, self._beat)

    def _count_roll(self) -> int:
        """Of all members that it knows; counted again only when they change."""
        if self._roll is None:
            self._roll = roll_of([self.peer, *self.knows.values()])
        return self._roll

    def _is_idle(self) -> bool:
        load = self.machine.load()
        return not (load.requests_waiting or load.sequences_running or load.transfers_open)

    # -- in

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"{self.peer.name} <- {sender.name}: ", message)
        if sender.name != ROUTER:
            self.post(MessageArrived(sender, message))
        elif isinstance(message, Expelled | Welcome) and self._is_outdated(sender):
            pass
        elif isinstance(message, Expelled):
            self._join_anew(sender, message)
        elif isinstance(message, Drain):
            self.draining = True
        elif isinstance(message, Recall):
            self._answer_recall(sender)
        elif isinstance(message, Refused):
            self.refused(message.reason)
        else:
            self._follow_members(sender, message)
            self.post(MessageArrived(sender, message))

    def _is_outdated(self, router: Peer) -> bool:
        """Whether another has taken the place of ``router``, as far as is known here."""
        known = (self.router, self._recalled_by)
        return any(peer is not None and router.generation < peer.generation for peer in known)

    def _answer_recall(self, sender: Peer) -> None:
        """A router that was started anew remembers this incarnation: it joins again, as it is."""
        if sender != self.router and not self._is_outdated(sender):
            self.router, self._recalled_by = None, sender
            self._join()

    def _follow_members(self, sender: Peer, message: AnyMessage) -> None:
        if isinstance(message, Welcome | PeerJoined | PeerGone):
            self._roll = None
        if isinstance(message, Welcome):
            self.router = sender
            self.knows = {info.peer.name: info.peer for info in message.peers if info.peer != self.peer}
        elif isinstance(message, PeerJoined):
            self.knows[message.info.peer.name] = message.info.peer
        elif isinstance(message, PeerGone) and self.knows.get(message.peer.name) == message.peer:
            del self.knows[message.peer.name]

    def _join_anew(self, sender: Peer, message: Expelled) -> None:
        """All work is dropped, the cache stays, the name gets a new generation."""
        self.router = None
        self.knows.clear()
        self._roll = None
        self.post(MessageArrived(sender, message))
        self.peer = Peer(self.peer.name, max(self.peer.generation, message.newest) + 1)
        self.machine.reborn(self.peer)
        self._join()

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # whoever posts knows what the machine hears
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
            case SealPages():
                self.port.seal(action)
            case PullPages():
                self.port.pull(action)
            case CancelPulls():
                self.port.cancel(action)

    def _tell_router(self, message: AnyMessage) -> None:
        if self.router is not None:
            self.send(self.router, message)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Messages to peers that the mailbox does not know are lost."""
        if to == self.router or self.knows.get(to.name) == to:
            self.host.network.send(self.peer, to, message)
        elif self.host.tells:
            self.host.say(f"      lost: {self.peer.name} does not know {to}: ", message)

    def owner_of(self, job: PullPages) -> InstanceNode | None:
        """The living process whose pages ``job`` is to read; ``None`` = it is unknown here, or another generation."""
        node = self.host.network.nodes.get(job.peer.name)
        if isinstance(node, InstanceNode) and node.peer == job.peer and self.knows.get(job.peer.name) == job.peer:
            return node
        return None

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


class RouterNode(Process):
    """What ``runtime/router`` does."""

    machine: Cluster

    def __init__(self, host: Host, generation: int = 7) -> None:
        super().__init__(host, Peer(ROUTER, generation))
        self.machine = host.new_cluster()

    def restart(self) -> None:
        """It dies and starts again: its clients are gone, the instances are there."""
        self.begin_life()
        self.peer = Peer(ROUTER, self.peer.generation + 1)
        self.machine = self.host.new_cluster()

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"router <- {sender.name}.{sender.generation}: ", message)
        self.post(MessageArrived(sender, message))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # whoever posts knows what the machine hears
        self.host.handled(self, event, actions)
        self.perform(actions)
        self.ticking.look(self.machine.next_deadline_ns)

    def perform(self, actions: Sequence[ClusterAction]) -> None:
        """Do all of ``actions``, in order."""
        for action in actions:
            self.perform_one(action)

    def perform_one(self, action: ClusterAction) -> None:
        """Do it now. This router has no disk: its machine must not ask for one."""
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
