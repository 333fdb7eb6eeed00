"""Between a machine that remembers and the world (level 3): nothing leaves before what it depends on is durable.

What stands behind a ``Remember`` waits, and so does whatever is said later to those whom it would have reached, so
that each member hears all in order. Everything else goes on: a request is not slowed by a pin that waits for the disk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from memserve.cluster.events import ClusterAction, Note, Remember, ReportMember, Send
from memserve.messages import Peer
from memserve.runtime.meta_keeper import MetaKeeper


class MetaGate:
    """Performs actions in an order that is safe. Lives in the machine's thread."""

    def __init__(
        self,
        keeper: MetaKeeper,
        perform: Callable[[ClusterAction], None],
        call_in_thread: Callable[[Callable[[], Any]], None],
    ) -> None:
        """``call_in_thread`` calls a function in the machine's thread, soon."""
        self._keeper, self._perform, self._call = keeper, perform, call_in_thread
        self._asked = 0
        #: actions that wait, with the number of the ``Remember`` that they wait for; numbers never fall
        self._held: deque[tuple[int, ClusterAction]] = deque()
        #: how many of them go to each member
        self._held_for: Counter[Peer] = Counter()

    def perform(self, actions: Sequence[ClusterAction]) -> None:
        """Do all of ``actions``, now or when they may be done."""
        is_behind = False
        for action in actions:
            if isinstance(action, Note):
                self._keeper.note(action.records)
            elif isinstance(action, Remember):
                is_behind = True
                self._asked += 1
                self._keep(action, self._asked)
            elif isinstance(action, ReportMember):
                self._perform(action)  # operators hear of it whatever the disk does
            elif is_behind or (isinstance(action, Send) and action.to in self._held_for):
                self._hold(action)
            else:
                self._perform(action)

    def _keep(self, action: Remember, number: int) -> None:
        self._keeper.keep(action.records, lambda _durable: self._call(lambda: self._release(number)))

    def _hold(self, action: ClusterAction) -> None:
        self._held.append((self._asked, action))
        if isinstance(action, Send):
            self._held_for[action.to] += 1

    def _release(self, number: int) -> None:
        """The ``Remember`` of this number, and all before it, are durable; or can't be, and the cluster goes on."""
        while self._held and self._held[0][0] <= number:
            _, action = self._held.popleft()
            if isinstance(action, Send):
                self._held_for[action.to] -= 1
                if not self._held_for[action.to]:
                    del self._held_for[action.to]
            self._perform(action)
