"""The cluster behind ``memserve serve``: a router in this process, instances in processes of their own.

The store that ``memserve serve --store HOST:PORT`` names: it runs already, and is asked to join.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from memserve.base.config import ClusterConfig, EngineOptions
from memserve.base.deployment import Followers, PlacementOptions, StoreOptions
from memserve.base.errors import StoreUnavailable, UserError
from memserve.base.options import command_line_of
from memserve.base.types import Caching, Role, check_link
from memserve.base.units import human_bytes
from memserve.cli.cluster.models import slug_of
from memserve.cli.cluster.topology import follow_context, model_of, room_text, with_models
from memserve.cli.output import progress_bar
from memserve.fleet.messages import EngineSpec, FleetOptions
from memserve.instance.scheduler.capacity import kv_tokens
from memserve.journal.keeper import Metadata, MetadataPlace, open_metadata
from memserve.model.gpu.setup import check_gpu_shares, on_gpus, refuse_on_gpu
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.store.host.files import store_secret, stored_secret
from memserve.system.gpus import DeviceChoice, device_here
from memserve.system.memory import objects_that_stay
from memserve.system.secrets import Followed, Secret, as_followed
from memserve.transport.network_devices import own_address, split_address, with_port

if TYPE_CHECKING:
    from memserve.cli.flags import HttpOptions
    from memserve.host.autoscaling import Perform
    from memserve.host.router import RouterEngine
    from memserve.host.supervisor import ChildOrder, Supervisor
    from memserve.model.loading.card import RemoteModel
    from memserve.model.loading.sources import ModelFolder
    from memserve.transport.ports import Mailbox, OnMessage
    from memserve.transport.shared_mailbox import SharedMailbox


START_TIMEOUT_S = 600.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class OtherModels:
    """What the instances of other models, which this process starts as well, take of this host."""

    workers_before: tuple[int, ...] = ()
    """Of each instance that has its GPUs before ours."""
    workers_after: tuple[int, ...] = ()
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineMembers:
    """Servers of other projects that serve the model as well, and are members beside the instances."""

    specs: tuple[EngineSpec, ...] = ()
    key_file: str | None = None
    """With their API key. None: they ask for none."""

    @property
    def names(self) -> list[str]:
        """Of the members."""
        return [f"e{number}" for number in range(1, len(self.specs) + 1)]

    def for_model(self, name: str) -> EngineMembers:
        """Those that serve the model of this name; empty: the only one."""
        return dataclasses.replace(self, specs=tuple(spec for spec in self.specs if not name or spec.model == name))

    @classmethod
    def of_models(cls, fleet: FleetOptions, names: Sequence[str], *, standalone: bool) -> EngineMembers:
        """Those of ``fleet``. Raises :class:`UserError` for one that serves no model of ``names`` (one that is empty is
        any), and where there is no cluster."""
        specs = fleet.member_specs
        if specs and standalone:
            raise UserError("one engine alone has no members", hint="leave out --in-process, or model= of --engine")
        for spec in specs:
            if "" not in names and spec.model not in names:
                hint = f"one of {', '.join(names)}; without model= it answers for the models that it lists"
                message = f"--engine {spec.url} names {spec.model!r}, which no --model has"
                raise UserError(message, hint=hint, param="engine")
        return cls(specs, fleet.key_file)

    def flags_of(self, spec: EngineSpec) -> tuple[str, ...]:
        """Options of ``memserve instance``."""
        return "--engine", spec.text, *(("--engine-key-file", self.key_file) if self.key_file is not None else ())


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The instances that this host runs, how they work together, and whether others may join."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0
    config: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)
    link: str = "auto"
    host: str = "127.0.0.1"
    """Address at which the router and this host's instances listen, and by which other hosts reach them."""
    port: int | None = None
    """Port at which instances of other hosts may join. None: they may not."""
    secret: Secret | None = None
    """Secret of all members. None: the instances of this host are given a fresh one."""
    metadata: MetadataPlace = dataclasses.field(default_factory=MetadataPlace)
    """Where the router keeps its records; default: nowhere."""
    why: str = ""
    """A line about the shape, where it was chosen to suit the machine. Empty: the options set it."""
    store: StoreOptions = dataclasses.field(default_factory=StoreOptions)
    """The store of this host; default: none."""
    placement: PlacementOptions = dataclasses.field(default_factory=PlacementOptions)
    routers: int = 1
    """Router processes on this host, the owner included."""
    followers: Followers = dataclasses.field(default_factory=Followers)
    model_name: str = ""
    """The name of the model, where it has been given one: several are told apart by it."""
    others: OtherModels = dataclasses.field(default_factory=lambda: OtherModels())
    engines: EngineMembers = dataclasses.field(default_factory=lambda: EngineMembers())

    def __post_init__(self) -> None:
        if self.store.is_used and self.config.caching is Caching.OFF:
            hint = "leave out --caching off and --no-cache, or the options of the store"
            raise UserError("a store keeps what instances cache, and none of them caches", hint=hint, param="ssd")
        check_link(self.link)
        if not self.instance_count and self.port is None:
            hint = "name some, e.g. --colocated 1, or let others join with --cluster-port"
            raise UserError("a cluster without instances cannot serve", hint=hint)
        if self.host in ("0.0.0.0", "::", "*"):
            hint = "give the address by which others reach this host, e.g. --cluster-host 10.0.0.1"
            raise UserError(f"no instance can be reached at {self.host}", hint=hint, param="cluster_host")
        if self.metadata.etcd and self.secret is None:
            hint = "add --cluster-port PORT --cluster-secret-file FILE, the same file wherever a router may run"
            raise UserError("a router and its standbys need a shared secret", hint=hint, param="metadata")
        if self.port is not None and self.secret is None:
            hint = "make one: head -c 32 /dev/urandom | base64 > secret; then --cluster-secret-file secret"
            raise UserError("--cluster-port needs the cluster's secret", hint=hint, param="cluster_secret_file")
        if self.store.at is not None and self.secret is None:
            hint = "give the file that the store was started with: --cluster-secret-file FILE"
            raise UserError("--store needs the secret of that store", hint=hint, param="cluster_secret_file")

    @property
    def may_span_hosts(self) -> bool:
        """Whether there may be members on other hosts."""
        has_remote_members = self.port is not None or self.store.at is not None
        return has_remote_members and own_address(self.host) not in ("127.0.0.1", "::1")

    @property
    def instance_count(self) -> int:
        """Instances that this host runs."""
        return sum(self.counts.values())

    @property
    def counts(self) -> dict[Role, int]:
        """The same by role, in the order in which they start."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}

    @property
    def at_most(self) -> ClusterOptions:
        """With as many instances as the load may ask for here."""
        scaling = self.placement.scaling
        most = {} if scaling.told_in else {role: allowed.most for role, allowed in scaling.by_role().items()}
        return dataclasses.replace(
            self,
            prefill=most.get(Role.PREFILL, self.prefill),
            decode=most.get(Role.DECODE, self.decode),
            colocated=most.get(Role.COLOCATED, self.colocated),
        )

    def begins_with(self, order: ChildOrder) -> bool:
        """Whether ``order`` is one of those that are started at once."""
        number = order.name.removeprefix(self.name_prefix)[1:]
        return order.role not in self.counts or int(number) <= self.counts[order.role]

    @property
    def name_prefix(self) -> str:
        """Of the names of this host's members: where there are several models, each has its own."""
        return f"{slug_of(self.model_name)}-" if self.model_name else ""

    @property
    def store_name(self) -> str:
        """Of the store that this host starts."""
        return f"{self.name_prefix}s1"

    def role_caches(self, role: Role) -> bool:
        """Whether instances of ``role`` cache KV at this caching level (MemServe 5.1)."""
        caching = self.config.caching
        return caching is not Caching.OFF and not (role is Role.DECODE and caching is Caching.PD_CACHING_1)


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """What a command line of ``memserve serve`` asks for."""

    engine: EngineOptions
    http: HttpOptions
    cluster: ClusterOptions | None
    """None: one engine in its process."""


READS: ContextVar[Callable[[ServeArguments], None] | None] = ContextVar("READS", default=None)
"""Called instead of running anything, where a command line is only read."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A router with ready instances."""

    engine: RouterEngine
    model: RemoteModel
    text: str
    """One line that names the instances, and one that says what they hold."""
    on_end: Callable[[], None]
    """To be called when the server begins to shut down: instances that end later are not started again."""
    folder: Path | None
    """Where this host keeps what outlives the router. None: nowhere."""
    scale: Perform
    """Comes to so many instances of each role; returns when they are ready, or have ended. Raises
    :class:`UserError`."""


@contextmanager
def running_cluster(
    engine_options: EngineOptions,
    options: ClusterOptions,
    log_level: str,
    print_line: Callable[[str], None],
    elsewhere: Perform | None = None,
) -> Iterator[RunningCluster]:
    """Start everything, wait until it is ready, and end it all on exit. ``print_line`` gets lines about the progress.
    ``elsewhere``: carries out the decisions of ``--scale``, where this host does not run the instances.

    Raises :class:`UserError` when an instance cannot start.
    """
    from memserve.model.loading.card import import_tokenizers
    from memserve.model.loading.sources import resolve_source

    with progress_bar("preparing the model"):  # reads a GGUF file once, before several processes need it
        folder = resolve_source(engine_options.model, "float32", keep_file=engine_options.may_keep_file)
    if options.metadata.etcd:
        import_tokenizers()  # a standby router has the time now
    with open_metadata(options.metadata, print_line, stored_secret(options.store)) as metadata:
        secret = options.secret or metadata.secret or stored_secret(options.store) or secrets.token_urlsafe(32)
        base = ClusterBase(metadata, as_followed(secret), folder)
        with starting_cluster(engine_options, options, base, log_level, print_line, elsewhere) as start:
            yield start()


@dataclass(frozen=True, slots=True)
class ClusterBase:
    """What the cluster of one model stands on."""

    metadata: Metadata
    secret: Followed[str]
    folder: ModelFolder
    mailbox: SharedMailbox | None = None
    """Of the routers of all models of this process. None: there is one model."""


@contextmanager
def starting_cluster(
    engine_options: EngineOptions,
    options: ClusterOptions,
    base: ClusterBase,
    log_level: str,
    print_line: Callable[[str], None],
    elsewhere: Perform | None = None,
) -> Iterator[Callable[[], RunningCluster]]:
    """As :func:`running_cluster`, in two steps: all processes have been started when this begins; calling what it
    gives waits until they are ready."""
    from memserve.host.autoscaling import LocalInstances
    from memserve.host.supervisor import ChildStart, Supervisor
    from memserve.journal.survivors import ChildrenFile
    from memserve.model.loading.card import early_tokenizer

    metadata, secret, limit = base.metadata, base.secret, options.config.sequence_instances_max
    named_stores, most = find_stores(options, print_line), options.at_most if elsewhere is None else options
    if options.secret is None:
        store_secret(options.store, secret.initial_value, print_line)
    if metadata.folder is not None:
        orders = _orders(engine_options, most, "", log_level)  # wherever the router will be
        ChildrenFile(metadata.folder).end_useless({order.name: order.command_line for order in orders})
    options.followers.on_start()
    engine = _open_router(options, base)
    orders = _orders(engine_options, most, engine.address, log_level)
    first = [order for order in orders if options.begins_with(order)]
    start = ChildStart(secret, options.followers.keys)
    spare = [order for order in orders if order not in first]
    supervisor = Supervisor(first, start, engine.mark_dead, metadata.folder, spare=spare)
    engine.children = supervisor.child_stats
    with ExitStack() as stack:
        stack.callback(engine.close)
        stack.callback(supervisor.close)
        _check_memory(engine_options, most, orders, supervisor.surviving_names)
        numbers = itertools.count() if base.mailbox is None else base.mailbox.store_numbers
        for address, number in zip(options.store.addresses, numbers, strict=False):  # as many as there are stores
            engine.invite_store(f"tcp://{with_port(*split_address(address, '--store'))}", number)
        supervisor.start()
        with objects_that_stay():
            tokenizer = early_tokenizer(base.folder)
            import memserve.api.app  # noqa: F401  # imported while the instances load: later, clients would wait

        def wait_until_ready() -> RunningCluster:
            with progress_bar("loading" if supervisor.child_names else "waiting"):
                infos = _wait_until_ready(engine, supervisor, named_stores, options, print_line)
            model = model_of(infos, base.folder, limit, tokenizer)
            follow_context(engine, model, limit)
            supervisor.confirm_started()
            text = _describe(infos, options, engine_options, model)
            perform = elsewhere or LocalInstances(supervisor, engine).scale_roles
            stack.enter_context(_scaled(engine, options, engine_options, perform))
            return RunningCluster(engine, model, text, supervisor.begin_retiring, metadata.folder, perform)

        yield wait_until_ready


def _scaled(
    engine: RouterEngine, options: ClusterOptions, engine_options: EngineOptions, perform: Perform
) -> AbstractContextManager[None]:
    from memserve.host.autoscaling import follow_load

    by_memory = options.config.admission.counts_memory
    aim_ns = engine_options.scheduler.slo_ttft_ns
    return follow_load(engine, options.placement.scaling, aim_ns, perform, counts_gate=by_memory)


def devices_for(engine_options: EngineOptions, options: ClusterOptions) -> DeviceChoice:
    """What the instances of this host compute with; nothing is asked for where there are none."""
    return device_here(engine_options.device if options.instance_count else "cpu")


def find_stores(options: ClusterOptions, print_line: Callable[[str], None]) -> list[NamedStore]:
    """The stores that were named, as far as they answer: of several, those that do not may come later."""
    stores: list[NamedStore] = []
    addresses = options.store.addresses
    for address in addresses if options.secret is not None else ():
        try:
            store = find_store(address, options.secret or "", options.host, print_line)
        except UserError as error:
            if len(addresses) == 1 or error.param != "store" or (not stores and address == addresses[-1]):
                raise
            print_line(f"{error.message}: going on without it until it answers")
            continue
        namesake = next((entry for entry in stores if entry.name == store.name), None)
        if namesake is not None:
            hint = "start one of them with another --name: a value's place follows from the names"
            message = f"the stores at {namesake.address} and {store.address} are both called {store.name!r}"
            raise UserError(message, hint=hint, param="store")
        stores.append(store)
    return stores


def _check_memory(
    engine_options: EngineOptions, options: ClusterOptions, orders: list[ChildOrder], living: list[str]
) -> None:
    """Check the memory of all processes together: each checks its own, but all at once they see one free memory."""
    from memserve.system.memory import check_host_memory

    gpus = len(devices_for(engine_options, options).gpus)
    check_gpu_shares(engine_options.gpu_memory_share, _all_workers(engine_options, options), gpus)
    starting = [order.role for order in orders if order.name not in living]
    check_host_memory(options.others.memory_bytes + memory_bytes_of(starting, engine_options, options))


def memory_bytes_of(roles: Sequence[Role], engine_options: EngineOptions, options: ClusterOptions) -> int:
    """Bytes of host memory that children of these roles are given for KV."""
    hbm_bytes = 0 if devices_for(engine_options, options).gpus else engine_options.kv_memory_bytes
    of_instance = hbm_bytes + engine_options.dram_memory_bytes
    return sum(
        options.store.memory_bytes if role is Role.STORE else of_instance
        for role in roles
        if role is Role.STORE or role.shares_kv
    )


def _open_router(options: ClusterOptions, base: ClusterBase) -> RouterEngine:
    from memserve.host.router import RouterEngine
    from memserve.kv.identity import identity_key
    from memserve.router.machine import Cluster
    from memserve.system.process import new_generation

    metadata, shared, last = base.metadata, base.mailbox, base.metadata.recovered_state.address
    self_peer = metadata.next_router(ROUTER, new_generation()) if shared is None else shared.self_peer
    key = identity_key(base.secret.initial_value)

    def router_on(open_mailbox: Callable[[OnMessage], Mailbox]) -> RouterEngine:
        machine = Cluster(options.config, remembers=metadata.keeper is not None, identity_key=key)
        return RouterEngine(machine, open_mailbox, keeper=metadata.keeper, self_peer=self_peer)

    if shared is not None:
        return router_on(partial(shared.open_part, options.model_name))
    return at_last_port(
        options, last, lambda port: router_on(partial(mailbox_at, options, base.secret, self_peer, port))
    )


Opened = TypeVar("Opened")


def at_last_port(options: ClusterOptions, last_address: str, open_at: Callable[[int], Opened]) -> Opened:
    """Open a router's mailbox where the last one listened, if that port is free: its instances ask there first."""
    last_host, _, last_port = last_address.removeprefix("tcp://").rpartition(":")
    if options.port is None and last_host.strip("[]") == options.host:
        try:
            return open_at(int(last_port))
        except UserError:  # another process has taken the port: members are told the new one
            return open_at(0)
    return open_at(options.port or 0)


def mailbox_at(
    options: ClusterOptions, secret: Followed[str], self_peer: Peer, port: int, on_message: OnMessage
) -> Mailbox:
    """The mailbox of a router at ``port`` (0: any). Raises :class:`UserError` where that cannot be listened on."""
    from memserve.transport.mailbox import ZmqMailbox
    from memserve.transport.network_devices import ListenAddress

    gives_way = not options.at_most.instance_count
    return ZmqMailbox(self_peer, ListenAddress(secret, options.host, port=port), on_message, gives_way=gives_way)


def workers_of(engine_options: EngineOptions, options: ClusterOptions) -> list[int]:
    """Of each instance."""
    parallel, counts = engine_options.parallel, options.counts
    return [parallel.for_role(role).worker_count for role, count in counts.items() for _ in range(count)]


def _all_workers(engine_options: EngineOptions, options: ClusterOptions) -> list[int]:
    others = options.others
    return [*others.workers_before, *workers_of(engine_options, options), *others.workers_after]


def _orders(engine_options: EngineOptions, options: ClusterOptions, address: str, log_level: str) -> list[ChildOrder]:
    from memserve.host.supervisor import STORE_END_S, ChildOrder

    link = "shm" if options.link == "auto" and not options.may_span_hosts else options.link
    workers, first_number = _all_workers(engine_options, options), len(options.others.workers_before)
    orders: list[ChildOrder] = []
    gpus = len(devices_for(engine_options, options).gpus)
    if options.model_name:
        engine_options = dataclasses.replace(engine_options, model=f"{options.model_name}={engine_options.model}")
    for role, count in options.counts.items():
        cached = dataclasses.replace(engine_options, caching=engine_options.caching and options.role_caches(role))
        if count and gpus:
            refuse_on_gpu(engine_options)
        for number in range(1, count + 1):
            own_options = on_gpus(cached, first_number + len(orders), workers, gpus)
            flags = ("--join", address, "--link", link, "--log-level", log_level, *command_line_of(own_options))
            orders.append(ChildOrder(f"{options.name_prefix}{role.value[0]}{number}", role, flags))
    if options.store.is_wanted:
        flags = ("--join", address, "--link", link, "--log-level", log_level, *options.store.store_flags)
        flags += ("--kv-codec", engine_options.kv_codec)
        flags += ("--model", options.model_name) if options.model_name else ()
        orders.append(ChildOrder(options.store_name, Role.STORE, flags, STORE_END_S))
    for name, spec in zip(options.engines.names, options.engines.specs, strict=True):
        model_flags = command_line_of(EngineOptions(engine_options.model, block_tokens=engine_options.block_tokens))
        flags = ("--join", address, "--log-level", log_level, *options.engines.flags_of(spec), *model_flags)
        orders.append(ChildOrder(f"{options.name_prefix}{name}", Role.ENGINE, flags))
    flags = ("--join", address, *options.followers.flags)
    numbers, drain_s = range(2, options.routers + 1), options.followers.drain_s
    return orders + [ChildOrder(f"router-{number}", Role.ROUTER, flags, drain_s) for number in numbers]


def _wait_until_ready(
    engine: RouterEngine,
    supervisor: Supervisor,
    named_stores: list[NamedStore],
    options: ClusterOptions,
    print_line: Callable[[str], None],
) -> list[PeerInfo]:
    """Wait for the instances of this host and for the stores; without instances, for the first one that joins. Returns
    the instances that were waited for."""
    started = time.monotonic()
    joined = {store.name: started for store in named_stores}
    engines = {f"{options.name_prefix}{name}" for name in options.engines.names}  # they may come when they like
    names = [name for name in supervisor.child_names if name not in engines]
    if set(names) <= {options.store_name}:
        print_line(f"waiting for instances to join at {engine.address} ...")
    names = [*names, *joined]
    reported_names: set[str] = set()
    while not _are_ready(members := engine.members(), names):
        if engine.wait_for_members(names, _LOOK_S):
            time.sleep(_LOOK_S)  # all are members: a store begins anew
        supervisor.raise_failure()
        seconds = time.monotonic() - started
        for store in list(named_stores):
            if store.name in members:
                joined[store.name] = time.monotonic()
                engine.declined.pop(store.name, None)
                continue
            try:
                store.check_joins(engine, time.monotonic() - joined[store.name])
            except UserError as error:
                if not options.metadata.etcd:
                    raise
                print_line(f"{error.message}: taking over without it")
                named_stores.remove(store)
                names.remove(store.name)
        for name in members.keys() - reported_names:
            print_line(f"{name} ({members[name].role.value}) is ready after {seconds:.1f} s")
        reported_names |= members.keys()
        if names and seconds > START_TIMEOUT_S:
            missing_names = ", ".join(name for name in names if name not in members)
            raise UserError(
                f"{missing_names} not ready after {seconds:.0f} s", hint="look for the reason with --log-level info"
            )
    members = with_models(engine.members())
    return [members[name] for name in names if name in members] or list(members.values())


def _are_ready(members: dict[str, PeerInfo], names: list[str]) -> bool:
    """Whether all of ``names`` are ``members``, instances are, and each store keeps their KV: one that does not begins
    anew when it has seen the first instance, and is no member for a moment."""
    namespaces = {info.namespace for info in with_models(members).values()}
    stores = [info for info in members.values() if info.role is Role.STORE]
    return bool(namespaces) and members.keys() >= set(names) and all(store.namespace in namespaces for store in stores)


def _describe(infos: list[PeerInfo], options: ClusterOptions, engine_options: EngineOptions, model: RemoteModel) -> str:
    """One line that names the instances, and one that says what they hold."""
    names = ", ".join(f"{info.peer.name} ({info.role.value})" for info in sorted(infos, key=lambda i: i.peer.name))
    config = options.config
    text = f"instances: {names}; {config.caching.value}, policy {config.policy}, transfer {config.transfer.value}"
    admission = config.admission
    if admission.shared_mode:
        most = f", at most {admission.active_max} at once" if admission.active_max is not None else ""
        text += f"; admission {admission.mode}{most}, {admission.waiting_max} may wait"
    text += f"; store: {_store_text(options.store)}" if options.store.is_used else ""
    text += f"; others may join at port {options.port}" if options.port is not None else ""
    return f"{text}\n{_room(infos, model.max_model_tokens, engine_options.scheduler.max_running)}"


def _store_text(store: StoreOptions) -> str:
    if store.at is not None:
        return f"{'that' if len(store.addresses) == 1 else 'those'} at {', '.join(store.addresses)}"
    disks = [f"{human_bytes(size)} in {folder}" for folder, size in store.folders]
    address_text = f", at {store.address}" if store.address is not None else ""
    return ", ".join([f"{human_bytes(store.memory_bytes)} of memory", *disks]) + address_text


def _room(infos: list[PeerInfo], context_tokens: int, running_max: int) -> str:
    """The memory of instances that decode: a prompt's KV leaves its prefill instance."""
    able = [info for info in infos if info.role is not Role.PREFILL] or infos
    tokens = sum(kv_tokens(info.hbm_blocks, info.state_blocks, info.geometry.block_tokens) for info in able)
    return room_text(tokens, context_tokens, len(able) * running_max)


FIND_S = 30.0
"""How long the start waits until the store answers at all."""
JOIN_S = 60.0
"""How long the store may take to join, once it has answered; it may begin another life meanwhile."""
DECLINED_S = 12.0
"""A store that belongs to another router finds out within so many seconds that this router is gone."""
_ANSWER_POLL_S = 2.0
_PROBE_S = 1.0
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class NamedStore:
    """A store that has answered."""

    name: str
    """Under which it joins."""
    address: str
    """``HOST:PORT``."""

    def check_joins(self, engine: RouterEngine, seconds: float) -> None:
        """Raise :class:`UserError` when it has not joined for ``seconds`` and will not."""
        declined = engine.declined.get(self.name)
        if declined is not None and seconds > DECLINED_S:
            hint = "end `memserve serve` there, or start a store of its own for this one: a store has one router"
            raise UserError(f"the store at {self.address} does not join: {declined.why}", hint=hint)
        if seconds > JOIN_S:
            router_address = engine.address.removeprefix("tcp://")
            hint = f"can its host reach this router at {router_address} (--cluster-host)? The log of the store has more"
            raise UserError(f"the store at {self.address} answers, and has not joined for {seconds:.0f} s", hint=hint)


def find_store(address: str, secret: Secret, cluster_host: str, print_line: Callable[[str], None]) -> NamedStore:
    """Wait until the store at ``address`` (``HOST:PORT``) answers, for ``FIND_S`` at most.

    Raises :class:`UserError` when nothing answers there by then; at once for another secret, and where the store could
    not reach a router at ``cluster_host``."""
    from memserve.store.client.arguments import own_host
    from memserve.store.client.connection import StoreConnection

    host, port = split_address(address, "--store")
    address = with_port(host, port)
    if own_address(cluster_host) in _LOOPBACK and own_address(host) is None:
        hint = "name the address by which other hosts reach this one: --cluster-host HOST"
        raise UserError(f"the store at {address} cannot reach a router at {cluster_host}", hint=hint, param="store")
    deadline, is_announced = time.monotonic() + FIND_S, False
    connection = StoreConnection(address, "default", secret, 1, own_host(address))
    try:
        while True:
            try:
                session = connection.wait_for_session(time.monotonic() + _ANSWER_POLL_S)
                return NamedStore(session.peer.name, address)
            except StoreUnavailable:
                _check_reachable(address, secret, is_late=time.monotonic() >= deadline)
            if not is_announced:
                print_line(f"waiting for the store at {address}, for up to {FIND_S:.0f} s ...")
            is_announced = True
    finally:
        connection.close()


def _check_reachable(address: str, secret: Secret, *, is_late: bool) -> None:
    """Raise :class:`UserError` where it is of no use to wait for a store."""
    from memserve.transport.probe import ProbeResult, probe_address

    match probe_address(f"tcp://{address}", secret, _PROBE_S):
        case ProbeResult.REJECTED:
            hint = "give the file that this store was started with: --cluster-secret-file FILE"
            raise UserError(f"the store at {address} has another secret", hint=hint, param="cluster_secret_file")
        case ProbeResult.NO_ANSWER:
            finding = "nothing answers there"
            hint = f"start it: memserve store --listen {address} --cluster-secret-file FILE; or correct the address"
        case ProbeResult.ACCEPTED:
            finding = "it takes the secret, and does not answer as a store"
            hint = "give the address that `memserve store --listen` has"
    if is_late:
        raise UserError(f"no store at {address}: {finding}", hint=hint, param="store")
