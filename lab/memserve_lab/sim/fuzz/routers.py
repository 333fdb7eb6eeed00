"""The router of the fuzzed world, and its disk.

The production gate holds back actions that depend on the disk. The disk can be slow, full, or lose power; a checker
knows which records must survive, and which actions must not leave before those are durable.

All routers of the fuzzed world: the owner, and followers that may die; which of them each client asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Protocol

from memserve.base.config import ClusterConfig, MemberConfig
from memserve.base.types import TransferPolicy
from memserve.base.units import NS_PER_S
from memserve.journal.state import MetadataState
from memserve.journal.store import MediumFailed, Store
from memserve.protocol.events import RejectRequest, RequestArrived, RequestCancelled, Send, SequenceStopped
from memserve.protocol.messages import Cancel, Dispatch
from memserve.protocol.peers import ROUTER, Peer
from memserve.protocol.records import AnyRecord
from memserve.protocol.store import store_at
from memserve.router.admission.follower import RemoteAdmission
from memserve.router.events import ClusterAction, Note, Remember, ReportMember, StateRecovered, StoreNamed
from memserve.router.follower import Follower
from memserve.router.outbox import DurabilityGate, Write
from memserve_lab.sim.engines import EngineNode
from memserve_lab.sim.faulty_medium import FaultyMedium
from memserve_lab.sim.fuzz import checks
from memserve_lab.sim.fuzz import checks as store_checks
from memserve_lab.sim.fuzz.admission_judge import remote_name
from memserve_lab.sim.fuzz.clients import Ask, OutputChecker
from memserve_lab.sim.fuzz.instances import FuzzedInstance, FuzzHost
from memserve_lab.sim.fuzz.keyed import KeyedClients
from memserve_lab.sim.fuzz.scenario import MS, Scenario
from memserve_lab.sim.fuzz.stores import FuzzedStore
from memserve_lab.sim.nodes import FollowedHost, FollowerNode, RouterNode
from memserve_lab.sim.reference.oracle import Violation, require

CHECKPOINT_BYTES_MIN = 4096
REPAIR_NS = 500_000_000


class Promises:
    """What a restart must find: everything up to the last sync that returned, then any number of the writes behind it,
    in order."""

    def __init__(self) -> None:
        self._kept = MetadataState()
        self._pending: list[Sequence[AnyRecord]] = []
        #: by id(): actions that have not left, each with the records that must be durable first; and records not
        #: durable yet
        self._needs: dict[int, tuple[ClusterAction, Sequence[AnyRecord]]] = {}
        self._unsafe: dict[int, Sequence[AnyRecord]] = {}

    def expect_actions(self, actions: Sequence[ClusterAction]) -> None:
        """A machine asks for these actions, in order: those behind a ``Remember`` depend on it, but for what promises
        nothing of the cluster."""
        needed: Sequence[AnyRecord] | None = None
        for action in actions:
            if isinstance(action, Remember):
                needed = self._unsafe[id(action.records)] = action.records
            elif needed is not None and not isinstance(action, Note | ReportMember | RejectRequest):
                self._needs[id(action)] = action, needed

    def check_leaves(self, action: ClusterAction, *, is_broken: bool) -> None:
        """Raise :class:`Violation` if what ``action`` depends on may be lost. A failing disk excuses it."""
        _, needed = self._needs.pop(id(action), (action, ()))
        if needed and id(needed) in self._unsafe and not is_broken:
            raise Violation(f"{action!r} leaves before this is durable: {needed!r}"[:500])

    def drop_unsent(self) -> None:
        """Actions that had not left never will."""
        self._needs.clear()
        self._unsafe.clear()

    def note_written(self, records: Sequence[AnyRecord]) -> None:
        """``records`` were written, and may still be lost."""
        self._pending.append(records)

    def note_synced(self) -> None:
        """Records written so far must not be lost any more."""
        for records in self._pending:
            self._kept.apply(records)
            self._unsafe.pop(id(records), None)
        self._pending.clear()

    def check_recovered(self, recovered: MetadataState) -> None:
        """Raise :class:`Violation` unless ``found`` keeps the promise. Further records may still be lost: they were
        read, but not synced."""
        records = list(recovered.checkpoint_records())
        state = MetadataState()
        state.apply(self._kept.checkpoint_records())
        for count in range(len(self._pending) + 1):
            if list(state.checkpoint_records()) == records:
                del self._pending[count:]
                return
            if count < len(self._pending):
                state.apply(self._pending[count])
        raise Violation(f"durable is not durable: the disk gives {len(records)} records, and more was promised")


class FuzzedRouter(RouterNode):
    """A router that may be killed, with or without the writes that its disk had not synced."""

    host: FuzzHost

    def __init__(self, world: FuzzHost) -> None:
        super().__init__(world)
        self.medium = FaultyMedium()
        self.disk_ns = 0
        """The time of each sync."""
        self.promises = Promises()
        self._gate = DurabilityGate()
        self._store: Store | None = None
        if world.scenario.remembers:
            self._open_store()
        self._call_store()

    def restart_router(self) -> None:
        """It dies and restarts from its disk; its clients are gone, the instances remain. If a
        cluster has two routers, the other may take over, at its own address."""
        super().restart_router()
        if len(self.host.router_addresses) > 1:
            self.address = self.host.random.choice(self.host.router_addresses)
        self._gate = DurabilityGate()
        self.promises.drop_unsent()
        if self._store is not None:
            self._open_store()
        self._call_store()

    def _call_store(self) -> None:
        """Its operator has named a store that looks for no router itself."""
        store = self.host.scenario.store
        for number in range(store.count) if store is not None and store.is_called else ():
            self.post_event(StoreNamed(self.address, store_at(number)))

    def lose_power(self, arrived: float, hole: tuple[float, float]) -> None:
        """Only a part of the unsynced bytes survives, given as shares of their length; :meth:`restart_router` comes
        next."""
        unsafe_bytes = self.medium.unsafe_bytes
        arrived_bytes = int(arrived * unsafe_bytes)
        start = int(hole[0] * arrived_bytes)
        self.medium.lose_power(arrived_bytes, [(start, start + int(hole[1] * arrived_bytes))])

    def _open_store(self) -> None:
        """Recover from the disk. The wall clock makes generations grow, even if nothing was kept."""
        try:
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        except MediumFailed:  # a torn write must be replaced, but there is no room: an operator has to make some
            self.medium.room_bytes = None
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        self.promises.check_recovered(self._store.state)
        if self._store.checkpoints:  # the last write was torn: the rest was rewritten
            self.promises.note_synced()
        recovered = self._store.state.recovered_state(-self.skew_ns)
        last = recovered.router.generation if recovered.router is not None else 0
        self.peer = Peer(ROUTER, max(last, self.peer.generation) + 1)
        self.post_event(StateRecovered(recovered, self.peer, self.address, -self.skew_ns))

    # -- actions, in the order that the gate finds safe

    def perform_actions(self, actions: Sequence[ClusterAction]) -> None:
        self.promises.expect_actions(actions)
        for action in self._gate.admit_actions(actions):
            if isinstance(action, Write):
                self._write_records(action.records)
                if action.number is not None:
                    self.call_later(self.disk_ns, self._sync_records, action.number)
            else:
                self.perform_one(action)

    def perform_one(self, action: ClusterAction) -> None:
        self.promises.check_leaves(action, is_broken=self._store is None or self._store.is_broken)
        super().perform_one(action)

    def _write_records(self, records: Sequence[AnyRecord]) -> None:
        store = self._store
        if store is None:
            return
        self.promises.note_written(records)
        was_broken, checkpoints = store.is_broken, store.checkpoints
        try:
            store.write_records(records)
        except MediumFailed as error:
            if not was_broken:
                self.host.log_line(f"the router's disk: {error}")
                self.call_later(REPAIR_NS, self._repair_store)
        if store.checkpoints > checkpoints:
            self.promises.note_synced()

    def _sync_records(self, number: int) -> None:
        """Release the actions that waited: their records are durable now, or can't be, and the cluster goes on."""
        store = self._store
        if store is not None and not store.is_broken:
            store.sync()
            self.promises.note_synced()
        for action in self._gate.release_actions(number):
            self.perform_one(action)
        self._gate.check_invariants()

    def _repair_store(self) -> None:
        """Nothing is written behind a hole: only a whole checkpoint repairs it."""
        if self._store is None or not self._store.is_broken:
            return
        try:
            self._store.write_checkpoint()
            self.promises.note_synced()
        except MediumFailed:
            self.call_later(REPAIR_NS, self._repair_store)


ANSWER_NS = 1500 * MS
"""How long routers and instances keep answers."""


def cluster_config(scenario: Scenario) -> ClusterConfig:
    """Of every router."""
    return ClusterConfig(
        caching=scenario.setting.caching,
        policy=scenario.policy,
        migration=scenario.migration,
        transfer=TransferPolicy.AUTO if scenario.chooses_transfer else TransferPolicy(scenario.setting.transfer.value),
        dead_after_ns=NS_PER_S,
        call_every_ns=200 * MS,
        stalled_after_ns=4 * NS_PER_S,
        attempts_max=4,
        unplaced_ns=6 * NS_PER_S,
        tree_ttl_ns=20 * NS_PER_S,
        speculative_ttl_ns=NS_PER_S,
        admission=scenario.admission,
        answer_ns=ANSWER_NS,
        store_copies=scenario.store.copies if scenario.store is not None else 1,
    )


def new_follower(scenario: Scenario, node: FollowerNode, owners: tuple[str, ...], member: MemberConfig) -> Follower:
    """The production machine of a follower."""
    return Follower(node.peer_info(), owners, cluster_config(scenario), member)


class Host(FuzzHost, FollowedHost, Protocol):
    """A world with clients and routers."""

    referee: OutputChecker
    keyed: KeyedClients
    instances: list[FuzzedInstance]
    stores: list[FuzzedStore]
    engines: list[EngineNode]
    stalled: Counter[Peer]
    """Attempts that looked so to each router."""

    @property
    def router(self) -> FuzzedRouter:
        """The owner."""

    def next_turn(self, ask: Ask) -> None:
        """A client waits for nothing more, and asks something else later."""


class Routers:
    """The owner and the followers, behind something like a TCP balancer: each connection goes to any of them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._random = Random(f"balancer {host.scenario.seed} {host.scenario.setting}")
        self._at: dict[str, FuzzedRouter | FollowerNode] = {}  # by the name of a connection
        self.followers = [FollowerNode(host, f"router-{number}") for number in range(2, 2 + host.scenario.followers)]
        for node in self.followers:
            host.network.nodes[node.peer.name] = node

    def router_of(self, connection: str) -> FuzzedRouter | FollowerNode:
        """The router of a connection."""
        return self._at.get(connection, self._host.router)

    def next_for(self, connection: str) -> FuzzedRouter | FollowerNode:
        """The router to which the balancer leads a new connection."""
        if connection not in self._at and self.followers:
            able: list[FuzzedRouter | FollowerNode] = [
                self._host.router,
                *(node for node in self.followers if node.alive),
            ]
            self._at[connection] = self._random.choice(able)
        return self.router_of(connection)

    def submit_event(self, event: object) -> None:
        """A client, or an operator at the owner, does something."""
        match event:
            case RequestArrived(request):
                self.next_for(request.request_id).submit_event(event)
            case RequestCancelled(name) | SequenceStopped(name, _):
                self.router_of(name).submit_event(event)
            case _:
                self._host.router.submit_event(event)

    def owner_dies(self) -> None:
        """It restarts at once; its clients get an error from the network, and ask again or something else later."""
        self._host.router.restart_router()
        self._break_off(self._host.router)

    def follower_dies(self, number: int) -> FollowerNode | None:
        """Its clients get an error from the network. Returns it. None: it is dead already, or there is none."""
        node = self.followers[number % len(self.followers)] if self.followers else None
        if node is None or not node.alive:
            return None
        node.kill_process()
        self._break_off(node)
        return node

    def _break_off(self, node: FuzzedRouter | FollowerNode) -> None:
        for ask in list(self._host.referee.asks.values()):
            connection = self._host.keyed.connection_of(ask.request.request_id)
            if ask.over or self.router_of(connection) is not node or self._host.keyed.router_died(ask):
                continue
            ask.lost = True
            self._host.next_turn(ask)

    def attempts_of(self, attempt_id: str) -> int:
        """How many attempts the request of this one has had. 0: no router knows it."""
        for machine in (self._host.router.machine, *(node.machine.cluster for node in self.followers)):
            req = machine._lifecycle.requests.by_attempt.get(attempt_id)
            if req is not None:
                return len(req.past) + 1
        return 0

    def count_achievements(self) -> Counter[str]:
        """What the followers have gone through."""
        counts = Counter[str]()
        for node in self.followers:
            counters = node.machine.cluster.stats().counters
            counts.update(
                {"followers: dispatches": counters.dispatches, "followers: adopted": counters.attempts_adopted}
            )
            counts.update({"followers: finished": counters.requests_finished})
            counts.update({"followers: sequences shared": counters.sequences_split})
            counts.update({"followers: attempts refused": counters.attempts_failed.get("refused", 0)})
            counts.update({"followers: outrun": counters.attempts_failed.get("outrun", 0)})
            admission = node.machine.cluster.stats().admission
            counts.update({"followers: admitted": admission.admitted})
            counts.update({f"followers: {cause} rejected": count for cause, count in admission.rejected.items()})
        return counts

    def check_at_rest(self, has_events: bool) -> None:
        """Followers know exactly what instances cache, and keep nothing of requests that have ended."""
        host = self._host
        remote_requests = host.router.machine._lifecycle.remote_requests.by_id
        require(not remote_requests, f"the owner counts requests of followers that have ended: {remote_requests}")
        for node in self.followers:
            name = node.peer.name
            require(node.alive and not node.paused, f"{name} was not put right")
            checks.check_at_rest(node.machine.cluster, host.instances, [*host.stores, *host.engines], has_events)
            for store in host.stores:
                store_checks.check_tree(node.machine.cluster, store)
            require(not node.machine.cluster.stats().requests_live, f"{name} has requests that do not end")
            require(not len(node.machine.cluster.answers), f"{name} keeps answers for ever")
            if not host.scenario.faults:
                failed = node.machine.cluster.stats().counters.attempts_failed
                require(
                    failed.keys() <= {"refused", "outrun", "stalled"},
                    f"{name}: attempts failed in a healthy world: {failed}",
                )
        for instance in host.instances:
            link = instance.machine.link
            require(
                link is None or not link.routers.detached, f"{instance.peer.name} has requests that no router wants"
            )


def check_stalls(host: Host, node: RouterNode | FollowerNode, actions: Sequence[object]) -> None:
    """In a healthy world what looks like a stalled attempt only waits for long, behind others or for many pulls: an
    instance has it, and for this router."""
    cluster = node.machine.cluster if isinstance(node, FollowerNode) else node.machine
    stalled = cluster._counters.attempts_failed.get("stalled", 0)
    if host.scenario.faults or stalled == host.stalled[node.peer]:
        return
    host.stalled[node.peer] = stalled
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Cancel):
            name = action.message.request_id
            machines = [instance.machine for instance in host.instances if name in instance.machine.state.groups]
            waits = any(machine.link is None or machine.link.routers.is_of(name, node.peer) for machine in machines)
            require(waits, f"{node.peer.name} waits for {name} in a healthy world, and no instance has it for that")


def check_dispatches(host: Host, node: FollowerNode, actions: Sequence[object]) -> None:
    """The owner counts what a follower dispatches, as granted: no other request has got its place meanwhile.

    A new owner that has no records, or none of this follower, does not know what it admits beside. Nor does one
    whose clock goes forward: monotonic clocks do not.
    """
    lifecycle, happened = host.router.machine._lifecycle, host.happened
    admission, remote_requests = lifecycle.admission, lifecycle.remote_requests.by_id
    asking = node.machine.cluster._lifecycle.admission
    forgets = not host.scenario.remembers and (happened["router-restart"] or happened["router-power"])
    excused = forgets or happened["router-clock-jump"] or happened["disk-full"]
    if not isinstance(asking, RemoteAdmission) or admission.is_closed or excused:
        return
    for action in actions:
        if isinstance(action, Send) and isinstance(action.message, Dispatch):
            name = action.message.request.request_id.partition("#")[0]
            numbers = [pending.number for pending in asking._by_number.values() if pending.req.request_id == name]
            requests_known = [remote_requests.get(remote_name(node.peer, number)) for number in numbers]
            counted = [
                req for req in requests_known if req is not None and req.request_id in admission._active_since_ns
            ]
            require(bool(counted), f"{node.peer.name} dispatches {name}, which the owner does not count")
