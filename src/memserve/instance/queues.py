"""Sequences in rank order, and the waiting queue: one such list for each tenant."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from memserve.errors import InvariantError
from memserve.instance.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RankedList:
    """Sequences sorted by rank. Ranks are unique, so a place is found by bisection."""

    __slots__ = ("items", "tenants")

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        #: sequences by tenant, of those that have any
        self.tenants: dict[str, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        items, tenant = self.items, sequence.group.tenant
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1
        if not items or items[-1].rank < sequence.rank:
            items.append(sequence)
        else:
            insort(items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Raises :class:`InvariantError` where ``sequence`` is not listed."""
        place = bisect_left(self.items, sequence.rank, key=_rank)
        if place >= len(self.items) or self.items[place] is not sequence:
            raise InvariantError(f"{sequence} is not in this list")
        del self.items[place]
        tenant = sequence.group.tenant
        left = self.tenants[tenant] - 1
        if left:
            self.tenants[tenant] = left
        else:
            del self.tenants[tenant]

    def of(self, tenant: str) -> list[Sequence]:
        """The sequences of one tenant, in order."""
        if self.tenants.get(tenant, 0) == len(self.items):
            return self.items.copy()
        return [sequence for sequence in self.items if sequence.group.tenant == tenant]

    def __contains__(self, sequence: Sequence) -> bool:
        place = bisect_left(self.items, sequence.rank, key=_rank)
        return place < len(self.items) and self.items[place] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<RankedList {self.items}>"


class WaitingQueue:
    """Sequences that wait: a line for each tenant, in rank order. A long line slows no other tenant's down."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[str, RankedList] = {}

    def add(self, sequence: Sequence) -> None:
        """Insert into the line of its tenant, in order."""
        tenant = sequence.group.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = RankedList()
        line.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises :class:`InvariantError` where ``sequence`` is not listed."""
        tenant = sequence.group.tenant
        line = self._lines.get(tenant)
        if line is None:
            raise InvariantError(f"{sequence} is not in this list")
        line.remove(sequence)
        if not line.items:
            del self._lines[tenant]

    def line(self, tenant: str) -> list[Sequence]:
        """The line of one tenant itself, not a copy: callers neither change nor keep it."""
        line = self._lines.get(tenant)
        return line.items if line is not None else []

    def first_urgency(self) -> int | None:
        """The lowest urgency of the heads of all lines. None: nothing waits."""
        return min([line.items[0].rank[0] for line in self._lines.values()], default=None)

    @property
    def lines(self) -> list[list[Sequence]]:
        """The lines of all tenants that have any."""
        return [line.items for line in self._lines.values()]

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants with a line."""
        return self._lines.keys()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.group.tenant)
        return line is not None and sequence in line

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((sequence for line in self.lines for sequence in line), key=_rank))

    def __len__(self) -> int:
        return sum([len(line.items) for line in self._lines.values()])

    def __repr__(self) -> str:
        return f"<WaitingQueue {self._lines}>"
