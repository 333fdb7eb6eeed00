"""A cluster of production machines, timed devices and the clients of a workload, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from memserve.base.config import ExchangeConfig, InstanceConfig, MemberConfig, PoolConfig
from memserve.base.errors import UserError
from memserve.base.types import Role, TokenOutput
from memserve.base.units import NS_PER_S, ns_from_s
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.machine import Instance
from memserve.kv.costs import PreemptionCosts
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.follower import Follower
from memserve.router.machine import Cluster
from memserve_lab.sim.clock import Clock, Cores
from memserve_lab.sim.fast_forward import FastForwardInstance
from memserve_lab.sim.links import Fabric, Link, LinkTotals, TimedPort
from memserve_lab.sim.nodes import ROUTER_ADDRESS, FollowerNode, InstanceNode, MemberNode, RouterNode
from memserve_lab.sim.process import Network, Process
from memserve_lab.sim.replay.clients import Clients, MakeScript
from memserve_lab.sim.replay.lengths import StudiedObjectives
from memserve_lab.sim.replay.nodes import Balancer, ReplayNode
from memserve_lab.sim.replay.scaling import SimulatedScaling
from memserve_lab.sim.replay.scripts import Script
from memserve_lab.sim.replay.setup import Fault, Setup, StoreSetup, follower_names, names_of, store_name
from memserve_lab.sim.replay.stores import HitTokens, ReplayStore, StoreUsage, hit_tokens, store_info, store_usage
from memserve_lab.sim.replay.timeline import Timeline
from memserve_lab.sim.timed_device import Moments, TimedDevice, step_times
from memserve_lab.workloads.records import Workload

NAMESPACE = "simulated"
JOINED_BY_NS = 60 * NS_PER_S
S_PER_HOUR = 3600
LOOKS = 300
"""Approximate number of samples in a timeline."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a whole run, from the workload's start to its last answer."""

    devices: int
    """Of all instances that there were."""
    simulated_s: float
    device_hours: float
    """Device hours from start to end, or while there was each instance."""
    busy_share: float
    """Share of that time in which devices worked."""
    tokens: int
    """Generated."""
    tokens_per_device_hour: float
    pulled_bytes: int
    """Bytes of KV sent between instances."""
    link_waits_s: float
    """Additional time of all transfers because links were shared."""
    hits: HitTokens
    stores: StoreUsage | None = None
    """None: the cluster has no store."""


class ReplayWorld:
    """Builds a setup, and runs a workload on it. Deterministic: only the balancer draws at random, from a seed."""

    tells = False
    router_addresses = (ROUTER_ADDRESS,)

    def __init__(self, setup: Setup, workload: Workload, make_script: MakeScript = Script) -> None:
        self.setup = setup
        self.clock = Clock()
        self.network = Network(self.clock, setup.around.message_ns)
        self.member_config = MemberConfig(beat_ns=setup.around.heartbeat_ns)
        self.moments = Moments()
        self.fabric, self.links = Fabric(self.clock), LinkTotals()
        self._steps = step_times(setup.machine)
        self._costs = setup.machine.costs.to_json() if setup.has_profiles else b""
        self._cores: dict[str, Cores] = {}
        self._hosts: dict[str, str] = {}  # of each instance and store, by name
        self.router = RouterNode(self)
        self.balancer = Balancer(setup.seed)
        submit = self.router.submit_event if setup.routers == 1 else self.balancer.submit_event
        self.clients = Clients(self.clock, setup.around, self.moments, submit, workload, make_script)
        self.network.nodes[self.router.peer.name] = self.router
        self.instances: list[ReplayNode] = []
        for name, role in names_of(setup.instances):
            self.add_instance(name, role)
        self.scaling = SimulatedScaling(self, setup) if setup.scaling.scale else None
        self.stores = [self._new_store(setup.stores, n) for n in range(setup.stores.count)] if setup.stores else []
        self.followers = [FollowerNode(self, name) for name in follower_names(setup.routers)]
        for follower in self.followers:
            self.network.nodes[follower.peer.name] = follower
        self.balancer.routers = [self.router, *self.followers]
        every_ns = max(NS_PER_S, ns_from_s(_last_due_s(workload) / LOOKS))
        self.timeline = Timeline(self.clock, self.instances, lambda: self.clients.answered, every_ns)
        self.start_ns = 0

    # -- parts of the nodes

    def add_instance(self, name: str, role: Role) -> None:
        """Start one more, on the next host with room."""
        place = len(self.instances)
        self._hosts[name] = self._host_of(place)
        node = ReplayNode(self, name, role, place, self._cores_of(place))
        self.instances.append(node)
        self.network.nodes[name] = node

    def _host_of(self, place: int) -> str:
        return f"host-{place // self.setup.around.instances_per_host}"

    def _cores_of(self, place: int) -> Cores | None:
        if self.setup.around.beside is None:
            return None
        return self._cores.setdefault(self._host_of(place), Cores(self.clock))

    def new_cluster(self) -> Cluster:
        return Cluster(self.setup.cluster)

    def new_follower(self, node: FollowerNode) -> Follower:
        """The machine of a router that is not the owner."""
        return Follower(node.peer_info(), self.router_addresses, self.setup.cluster, self.member_config)

    def new_instance(self, node: InstanceNode) -> Instance:
        """An instance's machine."""
        machine = self.setup.machine
        profile = machine.costs if self.setup.has_profiles else None
        preemption_costs = PreemptionCosts(block_bytes=machine.geometry.block_bytes, profile=profile)
        block_tokens = machine.geometry.block_tokens
        kind = FastForwardInstance if isinstance(node, ReplayNode) and node.fast_forwards else Instance
        instance = kind(
            self._instance_config(node), block_tokens, preemption_costs, self_peer=node.peer, geometry=machine.geometry
        )
        state = instance.state
        if state.objectives is not None:
            state.objectives = StudiedObjectives(
                self.setup.scheduler, state.costs, self.setup.lengths, machine.context_tokens
            )
        layers = state.memory.layers
        if isinstance(layers, LayerPlacer) and self.setup.layers is not None:
            layers.policy = self.setup.layers
        return instance

    def _instance_config(self, node: InstanceNode) -> InstanceConfig:
        machine = self.setup.machine
        pool = PoolConfig(machine.hbm_blocks, machine.dram_blocks, self.setup.caches_kv(node.role))
        return InstanceConfig(
            machine.context_tokens, NAMESPACE, pool, self.setup.scheduler, node.role, ExchangeConfig()
        )

    def new_device(self, node: InstanceNode) -> TimedDevice:
        return TimedDevice(self.clock, self.setup.machine, self.moments, self._steps)

    def new_port(self, node: MemberNode) -> TimedPort:
        """Its data port to the pages of others."""
        geometry = self.setup.machine.geometry
        return TimedPort(node, self.fabric, partial(self._link_to, node.peer.name), geometry, self.links)

    store_port = new_port

    def _link_to(self, name: str, peer: Peer) -> Link:
        """How ``name`` reaches the pages of ``peer``."""
        costs, hosts = self.setup.machine.costs, self._hosts
        return Link(costs.same_host, "shm") if hosts[name] == hosts.get(peer.name) else Link(costs.network, "nixl")

    def _new_store(self, setup: StoreSetup, number: int) -> ReplayStore:
        """Beside instance ``number``, or the first one of that host."""
        first = number * self.setup.around.instances_per_host % len(self.instances)
        beside, name = self.instances[first], store_name(number)
        self._hosts[name] = self._hosts[beside.peer.name]
        store = ReplayStore(self, name, setup, store_info(self.peer_info(beside), setup, self.setup.machine.costs))
        self.network.nodes[name] = store
        return store

    def peer_info(self, node: InstanceNode) -> PeerInfo:
        """An instance's description when it joins."""
        config = self._instance_config(node)
        return PeerInfo(
            node.peer, node.role, f"virtual://{node.peer.name}", NAMESPACE, self.setup.machine.geometry,
            config.pool.hbm_blocks, config.pool.dram_blocks, node.machine.context_tokens, config.pool.caching,
            host_id=self._host_of(node.place), costs=self._costs, reports_layers=self.setup.reports_layers,
            step_tokens=config.scheduler.step_tokens, computes_stripes=self.setup.reports_layers,
        )  # fmt: skip

    # -- what happens

    def on_output(self, output: TokenOutput) -> None:
        """The router gives tokens to a client."""
        self.clients.on_output(output)

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a request."""
        self.clients.turned_away(request_id, reason, retry_after_s)

    def on_handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """A machine has handled an event."""

    def log_line(self, line: str, detail: object = "") -> None:
        """Not recorded."""

    # -- running

    def run_workload(self, limit_s: float | None = None) -> None:
        """From the first join to the last answer, or for ``limit_s`` of virtual time from the workload's start."""
        while not self._is_ready():
            if self.clock.now > JOINED_BY_NS:
                raise UserError("the instances do not get ready", hint="try fewer, or a larger --heartbeat-ms")
            self.clock.run_until(self.clock.now + self.member_config.beat_ns)
        self.start_ns = self.clock.now
        for fault in self.setup.faults:
            self.clock.call_at(self.start_ns + ns_from_s(fault.at_s), self._strike_fault, fault)
        self.timeline.begin_workload()
        self.clients.begin_workload()
        if self.scaling is not None:
            self.scaling.begin_workload()
        end_ns = None if limit_s is None else self.start_ns + ns_from_s(limit_s)
        clock, clients = self.clock, self.clients
        while not clients.done and (end_ns is None or (clock.next_ns or 0) <= end_ns):
            clock.run_one()
        if end_ns is not None and not clients.done:
            self._break_off(end_ns)
        self.timeline.record_sample()

    def _is_ready(self) -> bool:
        """All are members, and each router hears every instance."""
        for node in self.followers:
            if node.refusal:
                raise UserError(f"{node.peer.name} is refused: {node.refusal}", param="routers")
        members = len(self.instances) + len(self.stores)
        return len(self.router.machine.instances()) == members + len(self.followers) and all(
            len(node.machine.cluster.instances()) == members for node in self.followers
        )

    def _break_off(self, end_ns: int) -> None:
        """Time is up: clients get all tokens drawn so far, even those that no message has carried yet."""
        self.clock.now = end_ns
        for node in self.instances:
            node.send_tokens()
        self.clock.run_until(end_ns + self.setup.around.message_ns)

    @property
    def elapsed_s(self) -> float:
        """Virtual time since the workload began."""
        return (self.clock.now - self.start_ns) / NS_PER_S

    def _strike_fault(self, fault: Fault) -> None:
        if fault.kind == "join":
            if self.setup.stores is not None:
                self.stores.append(self._new_store(self.setup.stores, len(self.stores)))
            return
        nodes: list[ReplayNode | FollowerNode | ReplayStore] = [*self.instances, *self.followers, *self.stores]
        node = next(node for node in nodes if node.peer.name == fault.name)
        heal: Callable[[], None]
        match fault.kind:
            case "kill":
                node.kill_process()
                heal = node.boot_process
                if not isinstance(node, ReplayStore):
                    self.clients.cut_off(self.balancer.requests_at(node))
            case "pause":
                node.pause_process()
                heal = node.resume_process
            case _:
                self._set_slowness(node, fault.factor)
                heal = partial(self._set_slowness, node, 1.0)
        self.clock.call_after(ns_from_s(fault.for_s), heal)

    @staticmethod
    def _set_slowness(node: Process, factor: float) -> None:
        if isinstance(node, ReplayNode):  # a router takes no steps
            node.catch_up()
            node.device.slowness = factor


def _last_due_s(workload: Workload) -> float:
    return max((turn.due_s or 0.0 for session in workload.sessions for turn in session.turns), default=0.0)


def usage(world: ReplayWorld) -> Usage:
    """Usage of ``world``, which has run."""
    elapsed_s, setup = world.elapsed_s, world.setup
    instance_s = len(world.instances) * elapsed_s if world.scaling is None else world.scaling.instance_seconds()
    device_hours = setup.machine.devices * instance_s / S_PER_HOUR
    busy_s = sum(node.device.busy_ns for node in world.instances) / NS_PER_S
    return Usage(
        setup.machine.devices * len(world.instances),
        elapsed_s,
        device_hours,
        busy_s / instance_s if instance_s else 0.0,
        world.clients.tokens,
        world.clients.tokens / device_hours if device_hours else 0.0,
        world.links.pulled_bytes,
        world.links.waited_ns / NS_PER_S,
        hit_tokens(world.clients.served),
        store_usage(world.stores, setup.stores, elapsed_s) if setup.stores is not None else None,
    )
