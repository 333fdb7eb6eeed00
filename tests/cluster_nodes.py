"""The processes of a cluster world: an instance with its null device and data port, and the router."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from cluster_device import LAYERS
from cluster_network import Node
from memserve.cluster.machine import Cluster
from memserve.instance.actions import (
    CancelPulls,
    EmitTokens,
    PullPages,
    RejectRequest,
    RunStep,
    SealPages,
    Send,
    StepPlan,
)
from memserve.instance.events import ClockTicked, LayerFinished, MessageArrived, PagesPulled, StepFailed
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
    PeerInfo,
    PeerJoined,
    Ready,
    Refused,
    RequestRefused,
    Tokens,
    Welcome,
)
from memserve.types import Role

if TYPE_CHECKING:
    from whole_world import World

TICK_MIN_NS = 1_000_000
PULL_MAX_NS = 4_000_000_000


class _Ticking:
    """Sends ``ClockTicked`` when a machine's deadline comes, as the hosts' loop does."""

    def __init__(self, node: Process) -> None:
        self.node = node
        self.planned_ns: int | None = None

    def look(self, deadline_ns: int | None) -> None:
        """The machine's deadline after an event."""
        if deadline_ns is None or (self.planned_ns is not None and self.planned_ns <= deadline_ns):
            return
        now = self.node.now
        when = max(deadline_ns, now + TICK_MIN_NS)
        self.planned_ns = when
        self.node.later(when - now, self._tick, when)

    def _tick(self, when: int) -> None:
        if self.planned_ns == when:
            self.planned_ns = None
            self.node.post(ClockTicked())


class Process(Node):
    """A node that can be killed and paused: whatever would happen to it waits, or never happens."""

    def __init__(self, world: World, peer: Peer) -> None:
        self.world = world
        self.peer = peer
        self.alive = True
        self.paused = 0
        self.life = 0
        self.frozen: deque[Callable[[], None]] = deque()
        self.ticking = _Ticking(self)
        self.skew_ns = 0

    @property
    def now(self) -> int:
        """What this process's own clock says: the clocks of two hosts have nothing to do with each other."""
        return self.world.clock.now + self.skew_ns

    def later(self, delay_ns: int, do: Callable[..., None], *arguments: object) -> None:
        """``do(*arguments)`` in ``delay_ns``, if this life lasts so long; after a pause, if it is paused then."""
        life = self.life

        def fire() -> None:
            if self.life != life:
                return
            if self.paused:
                self.frozen.append(fire)
            else:
                do(*arguments)

        self.world.clock.after(delay_ns, fire)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused += 1

    def resume(self) -> None:
        """SIGCONT: everything that has queued up is handled now, late."""
        self.paused -= 1
        while self.frozen and not self.paused:
            self.frozen.popleft()()

    def receive(self, sender: Peer, message: AnyMessage) -> None:
        meant = self.peer
        self._soon(lambda: self.hear(sender, message) if self.peer == meant else None)

    def submit(self, event: object) -> None:
        """Somebody on this host posts an event."""
        self._soon(lambda: self.post(event))

    def _soon(self, do: Callable[[], None]) -> None:
        if self.paused:
            life = self.life
            self.frozen.append(lambda: do() if self.life == life else None)
        elif self.alive:
            do()

    @abstractmethod
    def hear(self, sender: Peer, message: AnyMessage) -> None:
        """A message, in a process that runs."""

    @abstractmethod
    def post(self, event: object) -> None:
        """Hand ``event`` to the machine and perform its actions."""


class InstanceNode(Process):
    """What ``runtime/instance_host`` does, in virtual time."""

    def __init__(self, world: World, name: str, role: Role, place: int) -> None:
        super().__init__(world, Peer(name, 0))
        self.role, self.place = role, place
        self.fails_next_step = False
        self.corrupting = 0
        self.slowness = 1
        self.random = Random(f"{world.scenario.seed}/{name}")
        self.boot()

    # -- life

    def boot(self) -> None:
        """A new process, with nothing in memory."""
        self.life += 1
        self.alive, self.paused = True, 0
        self.frozen.clear()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.skew_ns = self.random.choice([0, self.random.randrange(1 << 60)])
        self.machine: Instance = self.world.new_instance(self)
        self.device = self.world.new_device(self)
        self.plans: deque[StepPlan] = deque()
        self.void: set[int] = set()
        self.working = False
        #: pages as `Ready` told of them -> the offers that they were part of
        self.promises: dict[tuple[object, ...], set[str]] = {}
        self.has_failed = False
        self.router: Peer | None = None
        self.knows: dict[str, Peer] = {}
        self.draining = False
        self.ticking = _Ticking(self)
        self.join()
        self.later(self.world.heartbeat_ns, self.beat)

    def kill(self) -> None:
        """SIGKILL."""
        self.life += 1
        self.alive, self.paused = False, 0
        self.frozen.clear()

    def info(self) -> PeerInfo:
        """What the instance tells of itself."""
        return self.world.peer_info(self)

    def join(self) -> None:
        """Ask to be a member, until there is an answer."""
        if self.router is None:
            self.world.network.send(self.peer, Peer(ROUTER, 0), Join(self.info()))
            self.later(self.world.join_again_ns, self.join_again, self.peer.generation)

    def join_again(self, generation: int) -> None:
        """Unless another life of the machine has begun."""
        if generation == self.peer.generation:
            self.join()

    def beat(self) -> None:
        """A heartbeat, for ever."""
        if self.router is not None:
            self.world.network.send(
                self.peer, Peer(ROUTER, 0), Heartbeat(self.machine.load(), self.machine.next_event)
            )
            if self.draining and self._is_idle():
                self._leave()
                return
        self.later(self.world.heartbeat_ns, self.beat)

    def _is_idle(self) -> bool:
        load = self.machine.load()
        return not (load.requests_waiting or load.sequences_running or load.transfers_open)

    def _leave(self) -> None:
        """Say good-bye; a new process of the same name follows soon."""
        self.world.network.send(self.peer, self.router or Peer(ROUTER, 0), Leave())
        self.kill()
        self.world.clock.after(2 * self.world.heartbeat_ns, lambda: None if self.alive else self.boot())

    # -- in

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        self.world.say(f"{self.peer.name} <- {sender.name}: ", message)
        if isinstance(message, Expelled) and sender.name == ROUTER:
            self._join_anew(sender, message)
            return
        if isinstance(message, Drain):
            self.draining = True
            return
        if sender.name == ROUTER:
            self._membership(sender, message)
        self.post(MessageArrived(sender, message))

    def _membership(self, sender: Peer, message: AnyMessage) -> None:
        if isinstance(message, Welcome):
            self.router = sender
            self.knows = {info.peer.name: info.peer for info in message.peers if info.peer != self.peer}
        elif isinstance(message, PeerJoined):
            self.knows[message.info.peer.name] = message.info.peer
        elif isinstance(message, PeerGone) and self.knows.get(message.peer.name) == message.peer:
            del self.knows[message.peer.name]
        assert not isinstance(message, Refused), f"{self.peer.name} was refused: {message}"

    def _join_anew(self, sender: Peer, message: Expelled) -> None:
        """All work is dropped, the cache stays, the name gets a new generation."""
        self.router = None
        self.knows.clear()
        self.post(MessageArrived(sender, message))
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.machine.reborn(self.peer)
        self.join()

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)
        self.world.handled(self, event, actions)
        for action in actions:
            self._perform(action)
        self.ticking.look(self.machine.next_deadline_ns)

    # -- out

    def _perform(self, action: object) -> None:
        if isinstance(action, RunStep):
            self.plans.append(action.plan)
            self._start_step()
        elif isinstance(action, EmitTokens):
            if self.router is not None:
                self._send(self.router, Tokens(tuple(action.outputs)))
        elif isinstance(action, RejectRequest):
            if self.router is not None:
                refused = RequestRefused(action.request_id, action.reason, action.retry_after_s)
                self._send(self.router, refused)
        elif isinstance(action, Send):
            if isinstance(action.message, Ready):
                self._promise(action.message)
            self._send(action.to, action.message)
        elif isinstance(action, SealPages):
            self.later(self._span(self.world.scenario.pull_ns) // 4, self._seal, action)
        elif isinstance(action, PullPages):
            self._start_pull(action)
        elif isinstance(action, CancelPulls):
            return  # what has begun may as well go on
        else:
            raise AssertionError(f"unknown action {action!r}")

    def _send(self, to: Peer, message: AnyMessage) -> None:
        """Messages to peers that the mailbox does not know are lost."""
        if to == self.router or self.knows.get(to.name) == to:
            self.world.network.send(self.peer, to, message)
        else:
            self.world.say(f"      lost: {self.peer.name} does not know {to}: {type(message).__name__}")

    def _span(self, bounds: tuple[int, int], slowness: int = 1) -> int:
        return self.random.randint(*bounds) * slowness

    # -- device: plans strictly in order

    def _start_step(self) -> None:
        if self.working or not self.plans:
            return
        self.working = True
        plan = self.plans[0]
        spent = self._span(self.world.scenario.step_ns)
        if plan.report_layers:
            for layer in range(LAYERS):
                self.later(spent * (layer + 1) // (LAYERS + 1), self._layer, plan, layer)
        self.later(spent, self._finish_step)

    def _layer(self, plan: StepPlan, layer: int) -> None:
        if plan.step_id not in self.void:
            self.device.finish_layer(plan, layer)
            self.post(LayerFinished(plan.step_id, layer))

    def _finish_step(self) -> None:
        plan = self.plans.popleft()
        self.working = False
        if plan.step_id in self.void:
            event = self.device.run_void(plan)
        elif self.fails_next_step:
            self.fails_next_step = False
            event = self.device.fail(plan, self.random.randrange(100))
            self.has_failed = True
            self.void |= {later.step_id for later in self.plans}
            self.world.say(f"{self.peer.name}: step {plan.step_id} fails")
        else:
            event = self.device.run(plan)
            assert not isinstance(event, StepFailed)
        self.post(event)
        self._start_step()

    # -- data port: seals and pulls beside the device

    def _seal(self, job: SealPages) -> None:
        self.post(self.device.seal(job))

    def _start_pull(self, job: PullPages) -> None:
        """Each block is read at a moment of its own; the answer comes behind the last."""
        source = self.world.network.nodes.get(job.peer.name)
        device = source.device if isinstance(source, InstanceNode) and source.peer == job.peer else None
        if device is None or self.knows.get(job.peer.name) != job.peer:
            self.later(TICK_MIN_NS, self._pulled, PagesPulled(job.job_id, "no such peer"))
            return
        errors: list[str] = []
        at = 0
        for place in range(len(job.src_blocks)):
            at = min(max(at, self._span(self.world.scenario.pull_ns, self.slowness)), PULL_MAX_NS)
            self.later(at, self._pull_block, job, place, device, source.life, errors)
        self.world.say(f"{self.peer.name} pulls for {at / 1e6:.3f} ms: ", job)
        self.later(at + 1, self._end_pull, job, errors)

    def _promise(self, ready: Ready) -> None:
        """Remember what was said of pages: as long as the offer is open, they have these checksums."""
        export = self.machine._link.exchange._exports.open.get(ready.transfer_id)
        if export is None:  # it has ended since
            return
        for at, checksum in enumerate(ready.checksums, ready.first_block - export.first_block):
            page = (*export.places[at], ready.first_layer, ready.end_layer, checksum)
            self.promises.setdefault(page, set()).add(ready.transfer_id)

    def check_promise(self, job: PullPages, place: int) -> None:
        """A page of ours had another checksum than we said: then its offer must have ended, or a step failed here."""
        page = (job.src_tier, job.src_blocks[place], job.first_layer, job.end_layer, job.checksums[place])
        still_open = self.promises.get(page, set()) & self.machine._link.exchange._exports.open.keys()
        assert not still_open or self.has_failed, f"{self.peer.name} has written to {page}, offered as {still_open}"

    def _pull_block(self, job: PullPages, place: int, device: object, life: int, errors: list[str]) -> None:
        source = self.world.network.nodes[job.peer.name]
        if self.world.network.is_cut(job.peer.name, self.peer.name) and self.world.links_cut:
            errors.append("the link is down")
        elif source.life != life and self.random.random() < 0.5:
            errors.append("the peer is gone")  # else: its memory outlives it as long as it is mapped
        else:
            corrupt = self.corrupting > 0 and self.random.random() < 0.5
            if not self.device.pull(job, place, device, corrupt=corrupt):
                errors.append("checksum")
                if not corrupt and source.life == life:
                    source.check_promise(job, place)

    def _end_pull(self, job: PullPages, errors: list[str]) -> None:
        self._pulled(
            PagesPulled(
                job.job_id,
                errors[0] if errors else "",
                len(job.src_blocks) * self.world.geometry.page_bytes * (job.end_layer - job.first_layer),
                "shm",
                mismatches=errors.count("checksum"),
            )
        )

    def _pulled(self, event: PagesPulled) -> None:
        self.post(event)


class RouterNode(Process):
    """What ``runtime/router`` does, in virtual time."""

    def __init__(self, world: World) -> None:
        super().__init__(world, Peer(ROUTER, 7))
        self.machine: Cluster = world.new_cluster()

    def restart(self) -> None:
        """It dies and comes back empty: its clients are gone, the instances are there."""
        self.life += 1
        self.paused = 0
        self.frozen.clear()
        self.peer = Peer(ROUTER, self.peer.generation + 1)
        self.machine = self.world.new_cluster()
        self.ticking = _Ticking(self)

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        self.world.say(f"router <- {sender.name}.{sender.generation}: ", message)
        self.post(MessageArrived(sender, message))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)
        self.world.handled(self, event, actions)
        for action in actions:
            if isinstance(action, Send):
                self.world.network.send(self.peer, action.to, action.message)
            elif isinstance(action, EmitTokens):
                for output in action.outputs:
                    self.world.emitted(output)
            elif isinstance(action, RejectRequest):
                self.world.turned_away(action.request_id, action.reason)
            else:
                raise AssertionError(f"unknown action {action!r}")
        self.ticking.look(self.machine.next_deadline_ns)
