"""The router of the fuzzed world, and its disk.

The production gate holds back actions that depend on the disk. The disk can be slow, full, or lose power; a checker
knows which records must survive, and which actions must not leave before those are durable.
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.cluster.events import ClusterAction, Note, Remember, ReportMember, StateRecovered, StoreNamed
from memserve.cluster.outbox import DurabilityGate, Write
from memserve.messages import ROUTER, Peer
from memserve.meta.medium import FaultyMedium, MediumFailed
from memserve.meta.state import MetadataState
from memserve.meta.store import Store
from memserve.metadata import AnyRecord
from memserve.serving import RejectRequest
from memserve.sim.fuzz.instances import FuzzHost
from memserve.sim.fuzz.truth import Violation
from memserve.sim.nodes import RouterNode

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

    def expected(self, actions: Sequence[ClusterAction]) -> None:
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

    def died(self) -> None:
        """Actions that had not left never will."""
        self._needs.clear()
        self._unsafe.clear()

    def written(self, records: Sequence[AnyRecord]) -> None:
        """``records`` were written, and may still be lost."""
        self._pending.append(records)

    def synced(self) -> None:
        """Records written so far must not be lost any more."""
        for records in self._pending:
            self._kept.apply(records)
            self._unsafe.pop(id(records), None)
        self._pending.clear()

    def check(self, found: MetadataState) -> None:
        """Raise :class:`Violation` unless ``found`` keeps the promise. Further records may still be lost: they were
        read, but not synced."""
        there = list(found.records())
        state = MetadataState()
        state.apply(self._kept.records())
        for count in range(len(self._pending) + 1):
            if list(state.records()) == there:
                del self._pending[count:]
                return
            if count < len(self._pending):
                state.apply(self._pending[count])
        raise Violation(f"durable is not durable: the disk gives {len(there)} records, and more was promised")


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
            self._open()
        self._call_store()

    def restart(self) -> None:
        """It dies and restarts from its disk; its clients are gone, the instances remain. If a
        cluster has two routers, the other may take over, at its own address."""
        super().restart()
        if len(self.host.router_addresses) > 1:
            self.address = self.host.random.choice(self.host.router_addresses)
        self._gate = DurabilityGate()
        self.promises.died()
        if self._store is not None:
            self._open()
        self._call_store()

    def _call_store(self) -> None:
        """Its operator has named a store that looks for no router itself."""
        store = self.host.scenario.store
        if store is not None and store.is_called:
            self.post(StoreNamed(self.address))

    def lose_power(self, arrived: float, hole: tuple[float, float]) -> None:
        """Only a part of the unsynced bytes survives, given as shares of their length. Call :meth:`restart` next."""
        unsafe_bytes = self.medium.unsafe_bytes
        arrived_bytes = int(arrived * unsafe_bytes)
        start = int(hole[0] * arrived_bytes)
        self.medium.lose_power(arrived_bytes, [(start, start + int(hole[1] * arrived_bytes))])

    def _open(self) -> None:
        """Recover from the disk. The wall clock makes generations grow, even if nothing was kept."""
        try:
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        except MediumFailed:  # a torn write must be replaced, but there is no room: an operator has to make some
            self.medium.room_bytes = None
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        self.promises.check(self._store.state)
        if self._store.checkpoints:  # the last write was torn: the rest was rewritten
            self.promises.synced()
        recovered = self._store.state.recovered(-self.skew_ns)
        last = recovered.router.generation if recovered.router is not None else 0
        self.peer = Peer(ROUTER, max(last, self.peer.generation) + 1)
        self.post(StateRecovered(recovered, self.peer, self.address, -self.skew_ns))

    # -- actions, in the order that the gate finds safe

    def perform(self, actions: Sequence[ClusterAction]) -> None:
        self.promises.expected(actions)
        for action in self._gate.admit(actions):
            if isinstance(action, Write):
                self._write(action.records)
                if action.number is not None:
                    self.later(self.disk_ns, self._sync, action.number)
            else:
                self.perform_one(action)

    def perform_one(self, action: ClusterAction) -> None:
        self.promises.check_leaves(action, is_broken=self._store is None or self._store.is_broken)
        super().perform_one(action)

    def _write(self, records: Sequence[AnyRecord]) -> None:
        store = self._store
        if store is None:
            return
        self.promises.written(records)
        was_broken, checkpoints = store.is_broken, store.checkpoints
        try:
            store.write(records)
        except MediumFailed as error:
            if not was_broken:
                self.host.say(f"the router's disk: {error}")
                self.later(REPAIR_NS, self._repair)
        if store.checkpoints > checkpoints:
            self.promises.synced()

    def _sync(self, number: int) -> None:
        """Release the actions that waited: their records are durable now, or can't be, and the cluster goes on."""
        store = self._store
        if store is not None and not store.is_broken:
            store.sync()
            self.promises.synced()
        for action in self._gate.release(number):
            self.perform_one(action)
        self._gate.check_invariants()

    def _repair(self) -> None:
        """Nothing is written behind a hole: only a whole checkpoint repairs it."""
        if self._store is None or not self._store.is_broken:
            return
        try:
            self._store.checkpoint()
            self.promises.synced()
        except MediumFailed:
            self.later(REPAIR_NS, self._repair)
