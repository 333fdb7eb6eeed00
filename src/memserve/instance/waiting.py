"""The waiting line (level 2): sequences in rank order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from memserve.errors import InvariantError
from memserve.instance.sequence import Rank, Sequence


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RankedList:
    """Sequences sorted by rank. Ranks are unique, so a place is found by bisection."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        items = self.items
        if not items or items[-1].rank < sequence.rank:
            items.append(sequence)
        else:
            insort(items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out ``sequence``, which must be here."""
        place = bisect_left(self.items, sequence.rank, key=_rank)
        if place >= len(self.items) or self.items[place] is not sequence:
            raise InvariantError(f"{sequence} is not in this list")
        del self.items[place]

    def __contains__(self, sequence: Sequence) -> bool:
        place = bisect_left(self.items, sequence.rank, key=_rank)
        return place < len(self.items) and self.items[place] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<RankedList {self.items}>"
