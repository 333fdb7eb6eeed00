"""Which request is next: a queue that is fair to tenants, however many requests each of them has.

Start-time fair queueing (Goyal 1996), as VTC uses it for language models (Sheng 2024): every tenant has a clock that
counts its service, cost divided by weight, and the tenant whose clock is furthest behind is next. A tenant that comes
back after a pause starts at the clock of the tenants now served: a pause earns nothing, a burst costs its own tenant
only.

While two tenants both wait, their service per weight differs by at most one request of each::

    |served_a / weight_a - served_b / weight_b|  <=  cost_max / weight_a + cost_max / weight_b

What tenants may leave behind: a bounded store, shared fairly when it is full.

One tenant alone may fill it. When it is full, the tenant with most loses its least recently used value; among equal
tenants, the one that adds a value. So a flood of one tenant's names costs other tenants nothing within their share, and
a request costs a look at a few counters, however many values are kept.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from memserve.base.errors import InvariantError, check

Item = TypeVar("Item")
SCALE = 1 << 20
"""Ticks of the clocks for a cost of one at weight one: integers, so that weights divide without rounding away."""
AWAY_MIN = 1024
"""The clocks of absent tenants are pruned when there are more than this, and twice as many as after the last
pruning."""


class QueuePlace(NamedTuple):
    """Where an item stands in its tenant's line."""

    urgency: int
    priority: int
    arrival: int
    key: str


class Turns:
    """One clock per tenant: its service, cost divided by weight. Of the present tenants, the one furthest behind is
    next."""

    __slots__ = ("_away", "_away_max", "_clock", "_clocks", "_weights")

    def __init__(self) -> None:
        self._clock = 0
        #: of exactly the present tenants
        self._clocks: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        #: of absent tenants that left with a clock ahead of ``_clock``
        self._away: dict[str, int] = {}
        self._away_max = AWAY_MIN

    def add_tenant(self, tenant: str, weight: int = 1) -> None:
        """``tenant`` wants service from now on. If it is already present, only its weight is updated."""
        if tenant not in self._clocks:
            self._clocks[tenant] = max(self._clock, self._away.pop(tenant, 0))
        self._weights[tenant] = weight

    def serve_tenant(self, tenant: str, cost: int, times: int = 1) -> None:
        """``tenant``, which is present, gets service of ``cost``, ``times`` times."""
        ticks = cost * SCALE // self._weights[tenant]
        last = self._clocks[tenant] + (times - 1) * ticks
        self._clock = max(self._clock, last)
        self._clocks[tenant] = last + ticks

    def remove_tenant(self, tenant: str) -> None:
        """``tenant``, which is present, wants no more service. It keeps what it owes."""
        clock = self._clocks.pop(tenant)
        del self._weights[tenant]
        if clock > self._clock:
            self._away[tenant] = clock
        if len(self._away) > self._away_max:  # tenants that never came back
            self._away = {name: clock for name, clock in self._away.items() if clock > self._clock}
            self._away_max = max(AWAY_MIN, 2 * len(self._away))

    def clock_of(self, tenant: str) -> int:
        """The clock of a present tenant."""
        return self._clocks[tenant]

    def weight_of(self, tenant: str) -> int:
        """The weight of a present tenant."""
        return self._weights[tenant]

    def share_of(self, tenant: str, total: int) -> int:
        """A tenant's part of ``total`` while all present tenants want it: by weight, at least one.

        For an absent tenant: what it would get."""
        weight = self._weights.get(tenant, 1)
        other_weights = sum(self._weights.values()) - (weight if tenant in self._weights else 0)
        return max(1, total * weight // (weight + other_weights))

    def sort_by_turn(self, tenants: Iterable[str]) -> list[str]:
        """``tenants``, which are present, the one furthest behind first."""
        return sorted(tenants, key=self._clocks.__getitem__)

    def __len__(self) -> int:
        return len(self._clocks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._clocks)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a tenant is both present and absent, or has a clock without a weight."""
        overlap = [tenant for tenant in self._away if tenant in self._clocks]
        check(not overlap and len(self._weights) == len(self._clocks), "present and absent: {}", overlap)


class FairQueue(Generic[Item]):
    """Items by tenant. Looking at the head changes nothing: it stays the head until it is served, removed, or
    overtaken."""

    __slots__ = ("_arrivals", "_items", "_lines", "_turns", "_weights")

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        """``weights``: of tenants, at least 1 each; 1 for those not named."""
        self._weights = dict(weights or {})
        check(all(weight >= 1 for weight in self._weights.values()), f"weights below one: {self._weights}")
        self._arrivals = 0
        #: places of each tenant's items, in order; only tenants that have any
        self._lines: dict[str, list[QueuePlace]] = {}
        self._turns = Turns()
        self._items: dict[str, tuple[str, QueuePlace, int, Item]] = {}

    def push(self, tenant: str, key: str, item: Item, cost: int, priority: int = 0, urgency: int = 0) -> None:
        """``item`` joins the queue. ``key`` is its name, ``cost`` (tokens, at least 1) what its service takes.

        ``priority`` orders the items of a tenant, ``urgency`` those of all tenants, before their turns; lower goes
        first.
        """
        check(key not in self._items, f"{key} waits already")
        self._turns.add_tenant(tenant, self._weights.get(tenant, 1))
        place = QueuePlace(urgency, priority, self._arrivals, key)
        self._arrivals += 1
        insort(self._lines.setdefault(tenant, []), place)
        self._items[key] = tenant, place, max(1, cost), item

    def item(self, key: str) -> Item:
        """The item of that name, which must be here."""
        return self._items[key][3]

    def head(self) -> Item | None:
        """The next item; ``None``: the queue is empty."""
        place = self._first_place()
        return self._items[place.key][3] if place is not None else None

    def heads(self) -> Iterator[Item]:
        """The next item of each tenant, in the order of their turns: :meth:`head` first. Nothing may change
        meanwhile."""
        places = [(line[0].urgency, self._turns.clock_of(tenant), line[0]) for tenant, line in self._lines.items()]
        for _, _, place in sorted(places, key=lambda entry: (entry[0], entry[1], entry[2].arrival)):
            yield self._items[place.key][3]

    def pop(self) -> Item:
        """Serve the head, which must exist: its tenant's clock goes on by its cost."""
        place = self._first_place()
        if place is None:
            raise InvariantError("the queue is empty")
        return self.serve_item(place.key)

    def behind_head(self, count: int) -> list[Item]:
        """Up to ``count`` items that are next in the head's line, of its urgency and priority."""
        place = self._first_place()
        if place is None:
            return []
        line = self._lines[self._items[place.key][0]][1 : count + 1]
        return [self._items[entry.key][3] for entry in line if entry[:2] == place[:2]]

    def serve_item(self, key: str) -> Item:
        """Serve an item of :meth:`heads` or :meth:`behind_head`: its tenant's clock goes on by its cost."""
        tenant, place, cost, item = self._items.pop(key)
        self._lines[tenant].remove(place)
        self._turns.serve_tenant(tenant, cost)
        self._close_if_empty(tenant)
        return item

    def remove(self, key: str) -> bool:
        """The item leaves the queue unserved. ``False``: it was not there."""
        entry = self._items.pop(key, None)
        if entry is None:
            return False
        tenant, place = entry[:2]
        self._lines[tenant].remove(place)
        self._close_if_empty(tenant)
        return True

    def most_crowded(self, new_tenant: str) -> Item | None:
        """The item to reject when there are too many: the last of the tenant with most waiting items per weight.

        Among equal tenants ``new_tenant``: no tenant loses a place to one that has as many.
        """
        if not self._lines:
            return None
        tenant = max(self._lines, key=lambda name: (self._queue_weight(name), name == new_tenant, name))
        return self._items[self._lines[tenant][-1].key][3]

    def waiting_by_tenant(self) -> dict[str, int]:
        """Number of items by tenant; only tenants that have any."""
        return {tenant: len(line) for tenant, line in self._lines.items()}

    def _queue_weight(self, tenant: str) -> int:
        return len(self._lines[tenant]) * SCALE // self._turns.weight_of(tenant)

    def _first_place(self) -> QueuePlace | None:
        if len(self._lines) < 2:
            for line in self._lines.values():
                return line[0]
            return None
        lines, clock = self._lines.items(), self._turns.clock_of
        return min((line[0].urgency, clock(tenant), line[0].arrival, line[0]) for tenant, line in lines)[3]

    def _close_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]
            self._turns.remove_tenant(tenant)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the lines and the items do not agree."""
        listed = [place.key for line in self._lines.values() for place in line]
        check(sorted(listed) == sorted(self._items), "lines have {}, items are {}", listed, self._items)
        self._turns.check_invariants()
        check(sorted(self._turns) == sorted(self._lines), "lines of {}, turns of {}", self._lines, self._turns)
        for tenant, line in self._lines.items():
            check(line == sorted(line) and bool(line), "the line of {!r} is out of order, or empty", tenant)
            check(all(self._items[place.key][0] == tenant for place in line), "{!r}'s line has items of others", tenant)

    def __repr__(self) -> str:
        return f"<FairQueue {self.waiting_by_tenant()}>"


Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    value: Value
    cost: int


class TenantStore(Generic[Value]):
    """Values by tenant and name, with a total cost of at most ``cost_max`` (one value alone may exceed it)."""

    __slots__ = ("_costs", "_entries", "_total", "cost_max")

    def __init__(self, cost_max: int) -> None:
        check(cost_max >= 1, f"cost_max must be at least 1, got {cost_max}")
        self.cost_max = cost_max
        #: values of each tenant that has any, least recently used first
        self._entries: dict[str, OrderedDict[str, _Entry[Value]]] = {}
        self._costs: dict[str, int] = {}
        self._total = 0

    def put(self, tenant: str, name: str, value: Value, cost: int = 1) -> list[Value]:
        """Keep ``value``; it replaces an earlier one of that name. Returns the values that were evicted for it."""
        self.pop(tenant, name)
        self._entries.setdefault(tenant, OrderedDict())[name] = _Entry(value, cost)
        self._costs[tenant] = self._costs.get(tenant, 0) + cost
        self._total += cost
        evicted = []
        while self._total > self.cost_max and len(self) > 1:
            victim, oldest = self._pick_victim(tenant, name)
            evicted.append(self._entries[victim][oldest].value)
            self.pop(victim, oldest)
        return evicted

    def get(self, tenant: str, name: str) -> Value | None:
        """The value of that name. Looking does not count as use."""
        names = self._entries.get(tenant)
        entry = names.get(name) if names is not None else None
        return entry.value if entry is not None else None

    def pop(self, tenant: str, name: str) -> Value | None:
        """Forget a name and return its value; ``None``: the name was not known."""
        names = self._entries.get(tenant)
        entry = names.pop(name, None) if names is not None else None
        if names is None or entry is None:
            return None
        self._total -= entry.cost
        self._costs[tenant] -= entry.cost
        if not names:
            del self._entries[tenant], self._costs[tenant]
        return entry.value

    def items(self) -> Iterator[tuple[str, str, Value]]:
        """Tenant, name and value of all, in the order of :meth:`values`."""
        return ((tenant, name, entry.value) for tenant, names in self._entries.items() for name, entry in names.items())

    def values(self) -> Iterator[Value]:
        """All values, tenant by tenant, each tenant's least recently used first."""
        return (entry.value for names in self._entries.values() for entry in names.values())

    def values_of(self, tenant: str) -> list[Value]:
        """A tenant's values, least recently used first."""
        return [entry.value for entry in self._entries.get(tenant, {}).values()]

    def __len__(self) -> int:
        return sum([len(names) for names in self._entries.values()])

    def _pick_victim(self, tenant: str, newest: str) -> tuple[str, str]:
        """The oldest of the tenant with most, but never the newest of all."""
        candidates = [name for name in self._costs if name != tenant or len(self._entries[tenant]) > 1]
        victim = max(candidates, key=lambda name: (self._costs[name], name == tenant, name))
        return victim, next(iter(self._entries[victim]))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the counts do not agree."""
        costs = {tenant: sum(entry.cost for entry in names.values()) for tenant, names in self._entries.items()}
        check(costs == self._costs and sum(costs.values()) == self._total, "{} are kept as {}", self._costs, costs)
        check(all(self._entries.values()), "a tenant without anything is listed")
        check(self._total <= self.cost_max or len(self) == 1, "{} of {} are kept", self._total, self.cost_max)
