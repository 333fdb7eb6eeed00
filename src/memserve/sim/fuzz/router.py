"""The router of the fuzzed world, and the disk on which it remembers.

What stands behind a ``Remember`` waits for the disk, as ``runtime/meta_gate`` has it. The disk can be slow, full, or
lose power; a checker knows what it has promised to keep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memserve.cluster.events import ClusterAction, Note, Remember, ReportMember, Send, StateRecovered
from memserve.messages import ROUTER, Peer
from memserve.meta.book import Book
from memserve.meta.faulty import FaultyMedium
from memserve.meta.medium import MediumFailed
from memserve.meta.store import Store
from memserve.remembered import AnyRecord
from memserve.sim.fuzz.truth import Violation
from memserve.sim.nodes import RouterNode

if TYPE_CHECKING:
    from memserve.sim.fuzz.world import World

CHECKPOINT_BYTES_MIN = 4096
REPAIR_NS = 500_000_000


class Promises:
    """What must be found again: everything up to the last sync that returned, and then any number of the writes behind
    it, in order."""

    def __init__(self) -> None:
        self._kept = Book()
        self._pending: list[Sequence[AnyRecord]] = []

    def written(self, records: Sequence[AnyRecord]) -> None:
        """They may be lost."""
        self._pending.append(records)

    def synced(self) -> None:
        """What was written so far must not be lost any more."""
        for records in self._pending:
            self._kept.apply(records)
        self._pending.clear()

    def check(self, found: Book) -> None:
        """Raise :class:`Violation` unless ``found`` keeps the promise. What it has beyond that may yet be lost: it was
        read, and not made safe."""
        there = list(found.records())
        book = Book()
        book.apply(self._kept.records())
        for count in range(len(self._pending) + 1):
            if list(book.records()) == there:
                del self._pending[count:]
                return
            if count < len(self._pending):
                book.apply(self._pending[count])
        raise Violation(f"durable is not durable: the disk gives {len(there)} records, and more was promised")


class FuzzedRouter(RouterNode):
    """A router that may be killed, with or without what its disk had not yet made safe."""

    host: World

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.medium = FaultyMedium()
        self.disk_ns = 0
        """What each sync takes."""
        self.promises = Promises()
        self._held: deque[tuple[int, ClusterAction]] = deque()
        self._asked = 0
        self._store: Store | None = None
        if world.scenario.remembers:
            self._open()

    def restart(self) -> None:
        """It dies and starts again, with what is on its disk; its clients are gone, the instances are there."""
        super().restart()
        self._held.clear()
        if self._store is not None:
            self._open()

    def lose_power(self, arrived: float, hole: tuple[float, float]) -> None:
        """Of what is not safe only a part is there; shares of its length. To be followed by :meth:`restart`."""
        unsafe_bytes = self.medium.unsafe_bytes
        arrived_bytes = int(arrived * unsafe_bytes)
        start = int(hole[0] * arrived_bytes)
        self.medium.lose_power(arrived_bytes, [(start, start + int(hole[1] * arrived_bytes))])

    def _open(self) -> None:
        """Go on from what is there. The wall clock makes generations grow, also when nothing could be kept."""
        try:
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        except MediumFailed:  # a torn write is to be replaced, and there is no room: somebody has to make some
            self.medium.room_bytes = None
            self._store = Store(self.medium, checkpoint_bytes_min=CHECKPOINT_BYTES_MIN)
        self.promises.check(self._store.book)
        if self._store.checkpoints:  # the last write was torn: what is left was written anew
            self.promises.synced()
        remembered = self._store.book.remembered(-self.skew_ns)
        last = remembered.router.generation if remembered.router is not None else 0
        self.peer = Peer(ROUTER, max(last, self.peer.generation) + 1)
        self.post(StateRecovered(remembered, self.peer, "virtual://router", -self.skew_ns))

    # -- actions, in an order that is safe

    def perform(self, actions: Sequence[ClusterAction]) -> None:
        is_behind = False
        for action in actions:
            if isinstance(action, Note):
                self._write(action.records)
            elif isinstance(action, Remember):
                is_behind = True
                self._asked += 1
                self._write(action.records)
                self.later(self.disk_ns, self._sync, self._asked)
            elif isinstance(action, ReportMember):
                self.perform_one(action)
            elif is_behind or (self._held and isinstance(action, Send)):
                self._held.append((self._asked, action))
            else:
                self.perform_one(action)

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
        """What waited for this goes out: it is durable now, or can't be, and the cluster goes on."""
        store = self._store
        if store is not None and not store.is_broken:
            store.sync()
            self.promises.synced()
        while self._held and self._held[0][0] <= number:
            self.perform_one(self._held.popleft()[1])

    def _repair(self) -> None:
        """Nothing is written behind a hole: only a whole checkpoint makes it good."""
        if self._store is None or not self._store.is_broken:
            return
        try:
            self._store.checkpoint()
            self.promises.synced()
        except MediumFailed:
            self.later(REPAIR_NS, self._repair)
