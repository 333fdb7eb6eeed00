"""Pressure: what must go, what may not, and when nothing need."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memserve.router.admission.ledger import BlockLedger, Need


def under_pressure(blocks: int, *held: tuple[str, int, bool]) -> BlockLedger:
    """One node; requests in order of allocation, with their blocks and whether they have ended."""
    ledger = BlockLedger()
    ledger.add_node(0, blocks)
    for name, count, _ in held:
        ledger.allocate_blocks(name, 0, Need(count))
    for age, (name, _, ended) in reversed([*enumerate(held)]):  # ended in another order than allocated
        if ended:
            ledger.retire_request(name, 0, age)
    return ledger


def test_the_example_of_the_source():
    """An active request is skipped, the oldest inactive one goes, and room is there on the second try."""
    ledger = under_pressure(30, ("req-1", 10, False), ("req-4", 12, True), ("req-5", 8, True))
    relief = ledger.evict_for(Need(11), [0], 1)
    assert relief == (0, ("req-4",)) and ledger.blocks_free(0) == 12
    assert list(ledger.holders_of(0)) == ["req-1", "req-5"] and ledger.evictions == 1


def test_insufficient_evictions_reject_without_evicting():
    ledger = under_pressure(30, ("req-4", 12, True), ("req-5", 18, True))
    assert ledger.evict_for(Need(13), [0], 1) is None
    assert ledger.blocks_free(0) == 0 and ledger.evictions == 0
    assert ledger.evict_for(Need(13), [0], 2).evicted == ("req-4", "req-5")


def test_stale_entries_are_skipped():
    """The blocks of a request that has ended were freed: it is passed over."""
    ledger = under_pressure(30, ("gone", 10, True), ("old", 10, True), ("new", 10, True))
    ledger.free_blocks("gone", 0)
    ledger.allocate_blocks("taker", 0, Need(10))
    assert ledger.evict_for(Need(5), [0], 1) == (0, ("old",))
    assert list(ledger.inactive_requests(0)) == ["new"]


def test_shared_blocks_are_free_only_when_their_last_holder_goes():
    ledger = BlockLedger()
    ledger.add_node(0, 6)
    for name, need in (("a", Need(1, (b"x", b"y"))), ("b", Need(1, (b"x", b"y"))), ("c", Need(2))):
        ledger.allocate_blocks(name, 0, need)
        ledger.retire_request(name, 0, ord(name))
    assert ledger.blocks_free(0) == 0
    assert ledger.evict_for(Need(2), [0], 1) is None, "a alone frees one block"
    assert ledger.evict_for(Need(0, (b"x", b"y", b"z")), [0], 1).evicted == ("a",), "x and y stay, they are needed"
    assert ledger.evict_for(Need(4), [0], 2).evicted == ("b",), "now with b its blocks go"


def test_expired_entries_are_released_without_eviction():
    """Each counts from its own end; an entry that went earlier, or lost its node, is not missed."""
    ledger = under_pressure(30, ("running", 5, False), ("first", 10, True), ("second", 10, True))
    assert ledger.expire_retired(100, kept_ns=50) == 0
    assert ledger.evict_for(Need(10), [0], 1).evicted == ("first",)
    ledger.allocate_blocks("third", 0, Need(10))
    ledger.retire_request("third", 0, 3)
    assert ledger.expire_retired(120, kept_ns=50) == 0 and ledger.expire_retired(149, kept_ns=50) == 0
    assert ledger.expire_retired(150, kept_ns=50) == 1 and ledger.inactive_requests(0) == ["third"]
    assert ledger.expire_retired(170, kept_ns=50) == 1 and ledger.blocks_free(0) == 25
    assert list(ledger.holders_of(0)) == ["running"] and ledger.evictions == 1


NEEDS = st.builds(
    Need,
    st.integers(0, 5),
    st.lists(st.integers(0, 1), max_size=3).map(lambda turns: tuple(bytes(turns[: k + 1]) for k in range(len(turns)))),
)


@given(
    st.lists(st.tuples(st.integers(0, 1), NEEDS, st.booleans()), max_size=12),
    NEEDS,
    st.integers(0, 5),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_relieve_equals_trying_evictions_one_by_one(held, need, limit, totals):
    """The twin evicts for real, oldest first, on a copy of each node, until there is room."""
    ledger = BlockLedger()
    blocks: dict[int, dict[str, set]] = {0: {}, 1: {}}
    inactive: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    for node, total in enumerate(totals):
        ledger.add_node(node, total)
    for k, (node, each, ended) in enumerate(held):
        name, age = f"r{k}", k
        ledger.allocate_blocks(name, node, each)
        blocks[node][name] = {*each.names, *((name, i) for i in range(each.blocks))}
        if ended:
            ledger.retire_request(name, node, age)
            inactive[node].append((age, name))

    def fits(node: int, without: list[str]) -> bool:
        taken = set().union(*(b for name, b in blocks[node].items() if name not in without))
        return len(taken | set(need.names)) + need.blocks <= totals[node]

    plans = []
    for node in (0, 1):
        for count in range(1, min(limit, len(inactive[node])) + 1):
            victims = inactive[node][:count]
            if fits(node, [name for _, name in victims]):
                if not fits(node, []):
                    plans.append((count, victims[0][0], node, tuple(name for _, name in victims)))
                break
    needed = [node for node in (0, 1) if not fits(node, [])]
    relief = ledger.evict_for(need, needed, limit)
    assert relief == (min(plans)[2:] if plans else None)
    ledger.check_invariants()
    if relief is not None:
        assert ledger.blocks_left(np.array([relief.node]), need)[0] >= 0
        active = [name for name in blocks[relief.node] if name not in [n for _, n in inactive[relief.node]]]
        assert not set(active) & set(relief.evicted)


@given(
    st.lists(st.tuples(NEEDS, st.integers(0, 3), st.booleans()), max_size=8),
    NEEDS,
    st.integers(0, 20),
)
def test_room_is_foretold_for_the_moment_when_it_is_there(held, need, total):
    """The twin lets time pass and looks."""
    ledger = BlockLedger()
    ledger.add_node(0, total)
    now = 0
    for k, (each, pause, ended) in enumerate(held):
        now += pause
        ledger.allocate_blocks(f"r{k}", 0, each)
        if ended:
            ledger.retire_request(f"r{k}", 0, k)
        ledger.expire_retired(now, kept_ns=100)

    def fits() -> bool:
        return bool(ledger.blocks_left(np.array([0]), need)[0] >= 0)

    told, seen = ledger.room_at_ns(need, 0), 0 if fits() else None
    for later in range(now, now + 101):
        ledger.expire_retired(later, kept_ns=100)
        ledger.check_invariants()
        if seen is None and fits():
            seen = later
    assert told == seen
