"""What is to be looked at when (level 2): one heap for all deadlines."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from memserve.messages import Peer

Key = tuple[str, str | Peer]
"""What kind of thing is waited for, and which one."""


class Timers:
    """Entries are never moved or removed: whoever is woken looks whether it is time, and arms again if not.

    So renewing a deadline costs nothing: a member that beats twice a second has one entry in ``dead_after_ns``.
    """

    __slots__ = ("_armed", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Key]] = []
        self._armed = 0

    def arm(self, when_ns: int, key: Key) -> None:
        """Wake ``key`` at ``when_ns``. Entries of the same time come in the order in which they were armed."""
        self._armed += 1
        heapq.heappush(self._heap, (when_ns, self._armed, key))

    def due(self, now: int) -> Iterator[Key]:
        """Take out what is due, earliest first; what is armed meanwhile for ``now`` or before comes as well."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]

    @property
    def next_ns(self) -> int | None:
        """The earliest entry."""
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)
