"""A simulated cluster: instances and their machines, its configuration, and the world around them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memserve.base.config import ClusterConfig, SchedulerConfig
from memserve.base.deployment import ScalingOptions
from memserve.base.errors import UserError
from memserve.base.types import Caching, Role, TransferMode
from memserve.base.units import NS_PER_MS, NS_PER_S, NS_PER_US, flag_bytes
from memserve.instance.layerwise.budget import LayerPolicy
from memserve.store.disks.events import DisksConfig
from memserve_lab.sim.hardware import Machine
from memserve_lab.sim.replay.lengths import LengthStudy
from memserve_lab.sim.timed_disk import DISKS, DiskModel

GPU_SCHEDULER = SchedulerConfig(max_running=256, max_step_tokens=8192)
"""What an operator would give ``memserve serve`` on a GPU of a data center; steps as large as those of vLLM's V1
engine. The defaults of ``memserve serve`` suit any machine, and are smaller."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Delays between clients and machines, and shared hosts."""

    front_ns: int = 1 * NS_PER_MS
    """Time from the client's send to the router's decision: connection, JSON, tokenizer."""
    back_ns: int = 200 * NS_PER_US
    """Time from the router to the client's first byte of a token."""
    message_ns: int = 100 * NS_PER_US
    """Time of a message between two processes."""
    heartbeat_ns: int = 500 * NS_PER_MS
    """Time between heartbeats, as in ``host/member``."""
    retries: bool = False
    """Clients send a rejected request again after the time that the rejection names. False: their session ends."""
    start_ns: int = 20 * NS_PER_S
    """Time from the start of another instance until it asks to join: processes, weights."""
    instances_per_host: int = 1
    """Instances of one host share its processors and see each other's memory."""
    beside: tuple[float, float] | None = None
    """How fast steps that compute prompts, and those that only decode, are while another instance of the host computes
    too; 1: as alone. None: each instance has devices of its own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one instance, of a router that is not the owner, or of a store, for a time."""

    kind: str
    """``kill`` (it starts again afterwards, a store with nothing), ``pause``, ``slow`` (an instance's steps take
    ``factor`` times as long), or ``join``: no fault, but one more store comes, and stays."""
    name: str
    at_s: float
    for_s: float
    factor: float = 1.0

    def stops_process(self, name: str) -> bool:
        """Whether the instance of that name is killed or paused."""
        return self.name == name and self.kind != "slow"


STORES_MAX = 64


@dataclass(frozen=True, slots=True)
class StoreSetup:
    """The stores of a cluster, all alike."""

    memory_bytes: int
    disk_bytes: tuple[int, ...] = ()
    """Of each disk of a store."""
    disks: DisksConfig = field(default_factory=DisksConfig)
    model: DiskModel = DISKS["nvme"]
    count: int = 1
    """Stores, which are as one. Number n is on the host of instance n; of more than there are hosts, the next is on
    the first again."""

    def block_count(self, block_bytes: int) -> int:
        """Blocks of KV in a store's memory. Raises :class:`UserError` for fewer than two."""
        blocks = self.memory_bytes // block_bytes
        if blocks < 2:
            message = f"{self.memory_bytes:,} bytes of memory hold less than two blocks of {block_bytes:,} bytes"
            raise UserError(message, hint=f"give at least --store {flag_bytes(2 * block_bytes)}", param="store")
        return blocks


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster."""

    instances: dict[Role, int]
    machine: Machine
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    scheduler: SchedulerConfig = GPU_SCHEDULER
    around: Surroundings = field(default_factory=Surroundings)
    faults: tuple[Fault, ...] = ()
    routers: int = 1
    """Routers, over which connections are spread: the owner, and followers (``follower_names``)."""
    seed: int = 0
    """Decides which router each connection comes to."""
    stores: StoreSetup | None = None
    """None: instances keep KV alone."""
    lengths: LengthStudy = field(default_factory=LengthStudy)
    """What objectives know of the lengths of answers."""
    layers: LayerPolicy | None = None
    """How KV lies by layer in all instances, where the scheduler has it. None: as ``--layerwise`` says."""
    scaling: ScalingOptions = field(default_factory=ScalingOptions)
    """Which counts follow the load."""
    has_profiles: bool = True
    """Instances have measured themselves before. False: they begin with assumed costs, as in their first start."""
    fast_forwards: bool = True
    """Run many like steps in one go (``sim/fast_forward``): the results are equal, and the run is faster."""

    def __post_init__(self) -> None:
        if not sum(self.instances.values()):
            raise UserError("a cluster needs instances", hint="for example --instances prefill=2,decode=6")
        if self.routers < 1:
            raise UserError(f"{self.routers} routers", hint="a cluster has at least one", param="routers")
        if self.stores is not None:
            self._check_stores(self.stores)
        if not self.reports_layers and self.cluster.transfer.mode is TransferMode.BY_LAYER:
            message = "by-layer transfer is not modelled between instances that share cores"
            raise UserError(message, hint="by-request or by-request-agg, or instances with devices of their own")

    def _check_stores(self, stores: StoreSetup) -> None:
        stores.block_count(self.machine.geometry.block_bytes)
        if not 1 <= stores.count <= STORES_MAX:
            raise UserError(f"{stores.count} stores", hint=f"--stores 1 to {STORES_MAX}")
        if self.cluster.caching is Caching.OFF:
            raise UserError("a store keeps nothing without caching", hint="leave --caching off out")

    @property
    def reports_layers(self) -> bool:
        """Whether a layer's end is known: beside other instances the time of a step is not known in advance."""
        return self.around.beside is None

    @property
    def devices(self) -> int:
        """Number of devices of all instances."""
        return self.machine.devices * sum(self.instances.values())

    def caches_kv(self, role: Role) -> bool:
        """Whether instances of ``role`` keep KV for reuse (MemServe 5.1)."""
        caching = self.cluster.caching
        return caching is not Caching.OFF and not (role is Role.DECODE and caching is Caching.PD_CACHING_1)


def parse_instances(text: str) -> dict[Role, int]:
    """``prefill=2,decode=6``, ``colocated=100``, or just a number of colocated ones. Raises :class:`UserError`."""
    if text.isdecimal():
        return {Role.COLOCATED: int(text)}
    counts: dict[Role, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if name not in list(Role) or not count.isdecimal() or Role(name) in counts or name == Role.STORE:
            raise UserError(f"cannot read {part!r} as instances", hint="for example prefill=2,decode=6 or colocated=8")
        counts[Role(name)] = int(count)
    return counts


_FAULT = re.compile(r"(kill|pause|slow|join):([\w-]+)@([\d.]+)(?:\+([\d.]+))?(?:x([\d.]+))?")


def parse_faults(text: str, instances: dict[Role, int], routers: int = 1, stores: int = 0) -> tuple[Fault, ...]:
    """``kill:d0@60+10,slow:p1@20+5x3,join:store4@90``: kind, instance, follower or store, start and duration in
    seconds, slowdown.

    Raises :class:`UserError`, also for those that do not exist.
    """
    followers = [*follower_names(routers), *(store_name(number) for number in range(stores))]
    names, faults = [*(name for name, _ in names_of(instances)), *followers], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FAULT.fullmatch(part)
        if match is None:
            hint = "for example kill:c0@60+10 or slow:c1@20+5x3 (from second 20 on, for 5 s, 3 times slower)"
            raise UserError(f"cannot read {part!r} as a fault", hint=hint)
        kind, name, at_s, for_s, factor = match.groups()
        if kind == "join":
            if not stores or name != store_name(stores):
                hint = f"the next one is called {store_name(stores)}" if stores else "add --store 64GiB"
                raise UserError(f"no store that may join is called {name!r}", hint=hint)
            stores += 1
            followers.append(name)
            names.append(name)
            faults.append(Fault(kind, name, float(at_s), 0.0))
            continue
        if for_s is None:
            raise UserError(f"cannot read {part!r} as a fault", hint="say for how long: for example kill:c0@60+10")
        if name not in names:
            hint = f"they are called {', '.join([*names[:8], *followers])} ..."
            raise UserError(f"no instance, store or router beside the owner is called {name!r}", hint=hint)
        if kind == "slow" and name in followers:
            raise UserError(f"{name} takes no steps", hint="a router and a store can be killed or paused")
        faults.append(Fault(kind, name, float(at_s), float(for_s), float(factor or 2.0)))
    return tuple(faults)


def follower_names(routers: int) -> list[str]:
    """``router-2``, ``router-3``, ...: all of ``routers`` but the owner."""
    return [f"router-{number}" for number in range(2, routers + 1)]


def store_name(number: int) -> str:
    """``store0``, ``store1``, ..."""
    return f"store{number}"


def names_of(instances: dict[Role, int]) -> list[tuple[str, Role]]:
    """``p0``, ``d0``, ``d1``, ... with their roles."""
    return [(f"{role.value[0]}{number}", role) for role, count in instances.items() for number in range(count)]
