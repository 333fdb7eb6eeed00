"""What tenants may leave behind: a bounded store, shared fairly when it is full.

One tenant alone may fill it. When it is full, the tenant with most loses its least recently used value; among equal
tenants, the one that adds a value. So a flood of one tenant's names costs other tenants nothing within their share, and
a request costs a look at a few counters, however many values are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from memserve.errors import check

Value = TypeVar("Value")


class _Kept(NamedTuple, Generic[Value]):
    value: Value
    cost: int


class TenantStore(Generic[Value]):
    """Values by tenant and name, with a total cost of at most ``cost_max`` (one value alone may exceed it)."""

    __slots__ = ("_costs", "_kept", "_total", "cost_max")

    def __init__(self, cost_max: int) -> None:
        check(cost_max >= 1, f"cost_max must be at least 1, got {cost_max}")
        self.cost_max = cost_max
        #: values of each tenant that has any, least recently used first
        self._kept: dict[str, OrderedDict[str, _Kept[Value]]] = {}
        self._costs: dict[str, int] = {}
        self._total = 0

    def put(self, tenant: str, name: str, value: Value, cost: int = 1) -> list[Value]:
        """Keep ``value``; it replaces an earlier one of that name. Returns the values that were evicted for it."""
        self.pop(tenant, name)
        self._kept.setdefault(tenant, OrderedDict())[name] = _Kept(value, cost)
        self._costs[tenant] = self._costs.get(tenant, 0) + cost
        self._total += cost
        gone = []
        while self._total > self.cost_max and len(self) > 1:
            victim, oldest = self._first_to_go(tenant, name)
            gone.append(self._kept[victim][oldest].value)
            self.pop(victim, oldest)
        return gone

    def get(self, tenant: str, name: str) -> Value | None:
        """The value of that name. Looking does not count as use."""
        names = self._kept.get(tenant)
        kept = names.get(name) if names is not None else None
        return kept.value if kept is not None else None

    def pop(self, tenant: str, name: str) -> Value | None:
        """Forget a name and return its value; ``None``: the name was not known."""
        names = self._kept.get(tenant)
        kept = names.pop(name, None) if names is not None else None
        if names is None or kept is None:
            return None
        self._total -= kept.cost
        self._costs[tenant] -= kept.cost
        if not names:
            del self._kept[tenant], self._costs[tenant]
        return kept.value

    def items(self) -> Iterator[tuple[str, str, Value]]:
        """Tenant, name and value of all, in the order of :meth:`values`."""
        return ((tenant, name, kept.value) for tenant, names in self._kept.items() for name, kept in names.items())

    def values(self) -> Iterator[Value]:
        """All values, tenant by tenant, each tenant's least recently used first."""
        return (kept.value for names in self._kept.values() for kept in names.values())

    def of(self, tenant: str) -> list[Value]:
        """A tenant's values, least recently used first."""
        return [kept.value for kept in self._kept.get(tenant, {}).values()]

    def count(self, tenant: str) -> int:
        """How many values a tenant has."""
        return len(self._kept.get(tenant, ()))

    def __len__(self) -> int:
        return sum([len(names) for names in self._kept.values()])

    def _first_to_go(self, tenant: str, newest: str) -> tuple[str, str]:
        """The oldest of the tenant with most, but never the newest of all."""
        others = [name for name in self._costs if name != tenant or len(self._kept[tenant]) > 1]
        victim = max(others, key=lambda name: (self._costs[name], name == tenant, name))
        return victim, next(iter(self._kept[victim]))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the counts do not agree."""
        costs = {tenant: sum(kept.cost for kept in names.values()) for tenant, names in self._kept.items()}
        check(costs == self._costs and sum(costs.values()) == self._total, "{} are kept as {}", self._costs, costs)
        check(all(self._kept.values()), "a tenant without anything is listed")
        check(self._total <= self.cost_max or len(self) == 1, f"{self._total} of {self.cost_max} are kept")
