"""Whose turn it is (level 1): a waiting line that is fair to tenants, however many requests each of them has.

Start-time fair queueing (Goyal 1996), as VTC uses it for language models (Sheng 2024): every tenant has a clock of
the service that it got, cost by weight, and the one whose clock is furthest behind is next. Who comes back after a
pause starts at the time of those that are served now: a pause earns nothing, a burst costs only the one who has it.

While two tenants both wait, the service that they get differs by at most one request of each, per weight::

    |served_a / weight_a - served_b / weight_b|  <=  cost_max / weight_a + cost_max / weight_b
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from memserve.errors import InvariantError, check

Item = TypeVar("Item")
SCALE = 1 << 20
"""Ticks of the clocks for a cost of one at weight one: integers, so that weights divide without rounding away."""


class Place(NamedTuple):
    """Where an item stands in its tenant's line."""

    priority: int
    arrival: int
    key: str


@dataclass(slots=True)
class _Line:
    """One tenant's items; it exists while there are any."""

    starts_at: int
    """The tenant's clock: virtual time at which its first item's service begins."""
    places: list[Place] = field(default_factory=list)
    """In order: lower priority first, then arrival."""


class FairQueue(Generic[Item]):
    """Items by tenant. Looking at the head changes nothing: it is the head until it is served, removed, or preceded."""

    __slots__ = ("_arrivals", "_clock", "_items", "_lines", "_resumes_at", "_weights")

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        """``weights``: of tenants that get more than others, 1 by default; at least 1 each."""
        self._weights = dict(weights or {})
        check(all(weight >= 1 for weight in self._weights.values()), f"weights below one: {self._weights}")
        self._clock = 0
        self._arrivals = 0
        self._lines: dict[str, _Line] = {}
        #: clocks of tenants without items that are ahead of ``_clock``
        self._resumes_at: dict[str, int] = {}
        self._items: dict[str, tuple[str, Place, int, Item]] = {}

    def push(self, tenant: str, key: str, item: Item, cost: int, priority: int = 0) -> None:
        """``item`` waits from now on. ``key`` is its name, ``cost`` (tokens, at least 1) what its service takes."""
        check(key not in self._items, f"{key} waits already")
        line = self._lines.get(tenant)
        if line is None:
            starts_at = max(self._clock, self._resumes_at.pop(tenant, 0))
            line = self._lines[tenant] = _Line(starts_at)
        place = Place(priority, self._arrivals, key)
        self._arrivals += 1
        insort(line.places, place)
        self._items[key] = tenant, place, max(1, cost), item

    def head(self) -> Item | None:
        """Whose turn it is; ``None`` = nobody waits."""
        line = self._next_line()
        return self._items[line.places[0].key][3] if line is not None else None

    def pop(self) -> Item:
        """Serve the head, which must exist: its tenant's clock goes on by its cost."""
        line = self._next_line()
        if line is None:
            raise InvariantError("nobody waits")
        tenant, _, cost, item = self._items.pop(line.places.pop(0).key)
        self._clock = line.starts_at
        line.starts_at += cost * SCALE // self._weight(tenant)
        self._close_if_empty(tenant)
        return item

    def remove(self, key: str) -> bool:
        """It waits no more, and has got nothing. ``False`` = it did not wait."""
        known = self._items.pop(key, None)
        if known is None:
            return False
        tenant, place = known[:2]
        self._lines[tenant].places.remove(place)
        self._close_if_empty(tenant)
        return True

    def most_crowded(self, newcomer: str) -> Item | None:
        """Who is turned away when there are too many: the last one of the tenant that has most waiting, by weight.

        Of equal ones it is the ``newcomer``'s own: nobody loses a place to somebody who has as many.
        """
        if not self._lines:
            return None
        tenant = max(self._lines, key=lambda name: (self._crowd(name), name == newcomer, name))
        return self._items[self._lines[tenant].places[-1].key][3]

    def waiting(self) -> dict[str, int]:
        """Items by tenant, of those that have any."""
        return {tenant: len(line.places) for tenant, line in self._lines.items()}

    def _crowd(self, tenant: str) -> int:
        return len(self._lines[tenant].places) * SCALE // self._weight(tenant)

    def _weight(self, tenant: str) -> int:
        return self._weights.get(tenant, 1)

    def _next_line(self) -> _Line | None:
        lines = self._lines.values()
        return min(lines, key=lambda line: (line.starts_at, line.places[0].arrival)) if lines else None

    def _close_if_empty(self, tenant: str) -> None:
        line = self._lines[tenant]
        if line.places:
            return
        del self._lines[tenant]
        if line.starts_at > self._clock:
            self._resumes_at[tenant] = line.starts_at
        if not self._lines and len(self._resumes_at) > 1024:  # tenants that never came back
            self._resumes_at = {name: at for name, at in self._resumes_at.items() if at > self._clock}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the lines and the items do not agree."""
        listed = [place.key for line in self._lines.values() for place in line.places]
        check(sorted(listed) == sorted(self._items), f"lines have {listed}, items are {list(self._items)}")
        for tenant, line in self._lines.items():
            check(
                line.places == sorted(line.places) and line.places, f"the line of {tenant!r} is out of order, or empty"
            )
            check(all(self._items[place.key][0] == tenant for place in line.places), f"strangers in {tenant!r}'s line")
            check(tenant not in self._resumes_at, f"{tenant!r} waits and is away")
            check(line.starts_at >= self._clock, f"{tenant!r} should have been served before")

    def __repr__(self) -> str:
        return f"<FairQueue {self.waiting()}>"
