"""Nothing leaves a router before what it depends on is durable (level 2).

An action behind a ``Remember`` waits until its records are durable. So does every later message to a peer for which an
earlier one waits: each member hears all in order. Everything else goes on: no request is slowed by a pin that waits for
the disk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memserve.cluster.events import ClusterAction, Note, Remember, ReportMember
from memserve.errors import check
from memserve.messages import Peer
from memserve.metadata import AnyRecord
from memserve.serving import Send


@dataclass(frozen=True, slots=True)
class Write:
    """Write records down, in order."""

    records: Sequence[AnyRecord]
    number: int | None
    """N: once these records and all before them are durable, or cannot be made so, :meth:`DurabilityGate.release` is to
    be called with N. None: nothing waits for them."""


class DurabilityGate:
    """Puts a router's actions into an order that is safe."""

    __slots__ = ("_asked", "_held", "_held_for", "_released")

    def __init__(self) -> None:
        self._asked = self._released = 0
        #: actions that wait, with the number of the Write that they wait for; numbers never fall
        self._held: deque[tuple[int, ClusterAction]] = deque()
        #: messages among them, by receiver
        self._held_for: Counter[Peer] = Counter()

    def admit(self, actions: Iterable[ClusterAction]) -> list[ClusterAction | Write]:
        """What is to be done now of the actions that one event led to; the rest follows from :meth:`release`."""
        now: list[ClusterAction | Write] = []
        is_behind = False
        for action in actions:
            if isinstance(action, Note):
                now.append(Write(action.records, None))
            elif isinstance(action, Remember):
                is_behind = True
                self._asked += 1
                now.append(Write(action.records, self._asked))
            elif isinstance(action, ReportMember):
                now.append(action)  # operators hear of it whatever the disk does
            elif is_behind or (isinstance(action, Send) and action.to in self._held_for):
                self._hold(action)
            else:
                now.append(action)
        return now

    def release(self, number: int) -> list[ClusterAction]:
        """What waited for the Write of this number, or for one before it."""
        self._released = max(self._released, number)
        done: list[ClusterAction] = []
        while self._held and self._held[0][0] <= self._released:
            _, action = self._held.popleft()
            if isinstance(action, Send):
                self._held_for[action.to] -= 1
                if not self._held_for[action.to]:
                    del self._held_for[action.to]
            done.append(action)
        return done

    def _hold(self, action: ClusterAction) -> None:
        self._held.append((self._asked, action))
        if isinstance(action, Send):
            self._held_for[action.to] += 1

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        numbers = [number for number, _ in self._held]
        check(numbers == sorted(numbers), "actions wait out of order")
        check(all(self._released < number <= self._asked for number in numbers), "an action waits for nothing")
        waiting = Counter(action.to for _, action in self._held if isinstance(action, Send))
        check(waiting == self._held_for, f"messages wait for {waiting}, counted are {self._held_for}")
