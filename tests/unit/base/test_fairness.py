"""The fair line: which tenant is next, and how unfair it can get at most."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.errors import InvariantError
from memserve.base.fairness import SCALE, FairQueue

TENANTS = "abc"
COST_MAX = 50


class SlowQueue:
    """The twin: start-time fair queueing as it is written down, in fractions, over one list."""

    def __init__(self, weights: dict[str, int]) -> None:
        self.weights, self.items, self.count = weights, [], 0
        self.clock, self.starts_at = Fraction(0), dict.fromkeys(TENANTS, Fraction(0))

    def push(self, tenant, key, cost, priority) -> None:
        if not any(item[0] == tenant for item in self.items):
            self.starts_at[tenant] = max(self.clock, self.starts_at[tenant])
        self.items.append((tenant, priority, self.count, key, cost))
        self.count += 1

    def line(self, tenant) -> list:
        return sorted((p, n, key, cost) for t, p, n, key, cost in self.items if t == tenant)

    def head(self) -> tuple | None:
        firsts = [(self.starts_at[t], self.line(t)[0][1], t) for t in TENANTS if self.line(t)]
        return min(firsts)[2] if firsts else None

    def pop(self) -> str:
        tenant = self.head()
        _, _, key, cost = self.line(tenant)[0]
        self.clock = self.starts_at[tenant]
        self.starts_at[tenant] += Fraction(cost * SCALE // self.weights[tenant])
        self.remove(key)
        return key

    def remove(self, key) -> bool:
        before = len(self.items)
        self.items = [item for item in self.items if item[3] != key]
        return len(self.items) < before

    def most_crowded(self, newcomer) -> str | None:
        crowds = [(Fraction(len(self.line(t)), self.weights[t]), t == newcomer, t) for t in TENANTS if self.line(t)]
        if not crowds:
            return None
        # compared as the machine does it, in ticks: two crowds that differ by less than a tick are equal
        crowds = [(int(crowd * SCALE), own, t) for crowd, own, t in crowds]
        return self.line(max(crowds)[2])[-1][2]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(TENANTS), st.integers(1, COST_MAX), st.integers(0, 1)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=60,
)
WEIGHTS = st.fixed_dictionaries({tenant: st.integers(1, 4) for tenant in TENANTS})


@given(OPERATIONS, WEIGHTS)
def test_queue_equals_its_twin(operations, weights):
    queue, twin, pushed = FairQueue(weights), SlowQueue(weights), 0
    for name, *arguments in operations:
        if name == "push":
            tenant, cost, priority = arguments
            key = f"r{pushed}"
            pushed += 1
            queue.push(tenant, key, key, cost, priority)
            twin.push(tenant, key, cost, priority)
        elif name == "remove":
            key = f"r{arguments[0]}"
            assert (key in queue) == queue.remove(key) == twin.remove(key)
        elif twin.items:
            expected = twin.line(twin.head())[0][2]
            assert queue.head() == expected and queue.pop() == twin.pop() == expected
        else:
            assert queue.head() is None
        queue.check_invariants()
        assert len(queue) == len(twin.items)
        assert queue.waiting_by_tenant() == Counter(item[0] for item in twin.items)
        assert [queue.most_crowded(t) for t in TENANTS] == [twin.most_crowded(t) for t in TENANTS]


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, COST_MAX)), min_size=1, max_size=80),
    WEIGHTS,
    st.integers(1, 60),
)
def test_unfairness_is_bounded_while_both_wait(requests, weights, serve):
    """Service of any two tenants that wait all the time differs by one request of each at most, per weight."""
    queue = FairQueue(weights)
    costs = {}
    for k, (tenant, cost) in enumerate(requests):
        queue.push(tenant, f"r{k}", f"r{k}", cost)
        costs[f"r{k}"] = tenant, cost
    served = Counter()
    for _ in range(min(serve, len(requests))):
        tenant, cost = costs[queue.pop()]
        served[tenant] += cost
        waiting = [name for name in TENANTS if queue.waiting_by_tenant().get(name)]  # since the start: nobody joins
        for one in waiting:
            for other in waiting:
                difference = abs(Fraction(served[one], weights[one]) - Fraction(served[other], weights[other]))
                assert difference <= Fraction(COST_MAX, weights[one]) + Fraction(COST_MAX, weights[other])


@given(st.integers(1, 200), st.integers(1, COST_MAX), st.integers(1, COST_MAX))
def test_a_burst_delays_another_tenant_by_one_request(burst, big, small):
    """However long the line of a burst is: a tenant behind it waits for at most one request of it at a time."""
    queue = FairQueue()
    for k in range(burst):
        queue.push("burst", f"b{k}", "burst", big)
    queue.pop()
    queue.push("late", "late", "late", small)
    before = 0
    while queue.pop() != "late":
        before += 1
    assert before <= 1


def test_a_pause_earns_nothing():
    """A tenant that was away cannot take all the service that it did not want before."""
    queue = FairQueue()
    queue.push("back", "x", "back", 1)
    queue.pop()
    for k in range(100):
        queue.push("steady", f"s{k}", "steady", 10)
    for _ in range(50):
        queue.pop()
    for k in range(100):
        queue.push("back", f"b{k}", "back", 10)
    next_ones = Counter(queue.pop() for _ in range(20))
    assert abs(next_ones["back"] - next_ones["steady"]) <= 1


def test_a_tenant_of_weight_three_gets_three_times_as_much():
    queue = FairQueue({"gold": 3})
    for k in range(400):
        queue.push("gold" if k % 2 else "other", f"r{k}", "gold" if k % 2 else "other", 7)
    served = Counter(queue.pop() for _ in range(200))
    assert served == {"gold": 150, "other": 50}


def test_priority_counts_within_a_tenant_only():
    queue = FairQueue()
    queue.push("a", "1", "a late", 5, priority=1)
    queue.push("a", "2", "a first", 5, priority=0)
    queue.push("b", "3", "b", 5, priority=9)
    assert [queue.pop() for _ in range(3)] == ["a first", "b", "a late"]


def test_removed_request_is_not_charged():
    queue = FairQueue()
    queue.push("a", "1", "a1", 1000)
    assert queue.remove("1") and not queue.remove("1")
    queue.push("b", "2", "b", 1)
    queue.push("a", "3", "a", 1)
    assert [queue.pop(), queue.pop()] == ["b", "a"]


def test_empty_queue_and_zero_weight_are_refused():
    with pytest.raises(InvariantError):
        FairQueue().pop()
    with pytest.raises(InvariantError):
        FairQueue({"a": 0})
