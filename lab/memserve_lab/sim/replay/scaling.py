"""``--scale`` in virtual time: the production policy looks at the simulated cluster, and instances come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.router.events import InstanceDrained
from memserve.router.members.autoscaling import LOOK_NS, ClusterLook, MemberLook, ScaleRole, Scaling
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.nodes import RouterNode
from memserve_lab.sim.replay.nodes import ReplayNode
from memserve_lab.sim.replay.setup import Setup


class ScaledWorld(Protocol):
    """A world whose instances come and go."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def router(self) -> RouterNode:
        """Its router."""

    @property
    def setup(self) -> Setup:
        """What it was built from."""

    @property
    def instances(self) -> Sequence[ReplayNode]:
        """All that there have been."""

    @property
    def elapsed_s(self) -> float:
        """Virtual time since the workload began."""

    def add_instance(self, name: str, role: Role) -> None:
        """One more boots."""


class SimulatedScaling:
    """Looks once a second and carries decisions out as ``host/autoscaling`` does: a new instance boots after the time
    that a start takes, and one that is too many drains, with all the patience in the world."""

    def __init__(self, world: ScaledWorld, setup: Setup) -> None:
        self._world, self._around = world, setup.around
        self.machine = Scaling(setup.scaling, setup.scheduler.slo_ttft_ns)
        self.decisions: list[tuple[float, ScaleRole]] = []
        """With the seconds since the workload began."""
        self._lives: dict[str, list[int | None]] = {}
        #: all and only instances that are there, or are being started, and shall stay; in the order of their start
        self._staying: dict[Role, list[str]] = {}
        for node in world.instances:
            self._add_instance(node.peer.name, node.role, world.clock.now)

    def begin_workload(self) -> None:
        """The workload begins now."""
        self._lives = {name: [self._world.clock.now, None] for name in self._lives}
        self._world.clock.call_after(LOOK_NS, self._look_once)

    def instance_seconds(self) -> float:
        """Time of all instances together, from their start to their end, or until now."""
        now = self._world.clock.now
        return sum((end or now) - (begin or 0) for begin, end in self._lives.values()) / NS_PER_S

    def _add_instance(self, name: str, role: Role, now_ns: int) -> None:
        self._lives[name] = [now_ns, None]
        self._staying.setdefault(role, []).append(name)

    def _look_once(self) -> None:
        world = self._world
        for node in world.instances:
            node.catch_up()
            if not node.alive and not any(fault.stops_process(node.peer.name) for fault in world.setup.faults):
                life = self._lives[node.peer.name]
                life[1] = life[1] or world.clock.now
        for order in self.machine.handle(self._read_cluster(), world.clock.now):
            self.decisions.append((world.elapsed_s, order))
            self._carry_out(order)
        world.clock.call_after(LOOK_NS, self._look_once)

    def _read_cluster(self) -> ClusterLook:
        world, nodes = self._world, {node.peer.name: node for node in self._world.instances}
        stats, members = world.router.machine.stats(), []
        for view in world.router.machine.instances():
            node = nodes.get(view.peer.name)
            if node is not None and node.alive:
                members.append(MemberLook.from_view(view, node.device.busy_ns, node.machine.stats()))
        prompts = stats.prompt_tokens
        return ClusterLook(tuple(members), stats.requests_unplaced, prompts.total, prompts.new)

    def _carry_out(self, order: ScaleRole) -> None:
        clock, staying = self._world.clock, self._staying.setdefault(order.role, [])
        while len(staying) < order.target:
            name = f"{order.role.value[0]}{len(self._lives)}"
            self._add_instance(name, order.role, clock.now)
            clock.call_after(self._around.start_ns, self._world.add_instance, name, order.role)
        for name in staying[order.target :]:
            self._world.router.submit_event(InstanceDrained(name))
        del staying[order.target :]
