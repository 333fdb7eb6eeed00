"""Blocks by request and node, and where one more fits best."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.base.errors import InvariantError
from memserve.base.types import Role
from memserve.router.admission.ledger import BlockLedger, Need, best_fit, required_blocks
from memserve.router.placement.candidates import Ask, Candidate
from memserve.router.placement.routing import route

BOTH, IDLE = np.array([0, 1]), np.zeros(2, np.int64)


def test_the_examples_of_the_source():
    """Two nodes with 20 and 31 free blocks of 16 MB (llm-serving-cache, KV cache memory model)."""
    ledger = BlockLedger()
    ledger.add_node(0, 62)
    ledger.add_node(1, 62)
    ledger.allocate_blocks("before-a", 0, Need(42))
    ledger.allocate_blocks("before-b", 1, Need(31))
    need = Need(required_blocks(180, 16))
    left = ledger.blocks_left(BOTH, need)
    assert (need.blocks, left.tolist()) == (12, [8, 19])
    assert best_fit(BOTH, left, IDLE).tolist() == [0]
    ledger.allocate_blocks("req-4", 0, need)
    assert ledger.blocks_free(0) == 8
    large = Need(required_blocks(600, 16))
    assert large.blocks == 38 and not len(best_fit(BOTH, ledger.blocks_left(BOTH, large), IDLE))
    assert ledger.free_blocks("req-4", 0) == 12 and ledger.blocks_free(0) == 20


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_blocks_are_rounded_up(size, block):
    assert required_blocks(size, block) == math.ceil(size / block)


@given(st.lists(st.tuples(st.integers(-5, 20), st.integers(0, 3)), max_size=8))
def test_least_left_over_ties_by_load_then_by_number(nodes):
    columns = np.array([(node, left, load) for node, (left, load) in enumerate(nodes)], np.int64).reshape(-1, 3).T
    chosen = best_fit(*columns).tolist()
    order = sorted((left, load, node) for node, (left, load) in enumerate(nodes) if left >= 0)
    assert chosen == [node for _, _, node in order[:1]]
    assert chosen == best_fit(*columns[:, ::-1]).tolist()


def chain(turns: list[int]) -> tuple[bytes, ...]:
    """Names of the blocks of a prompt: each stands for all before it as well."""
    return tuple(bytes(turns[: k + 1]) for k in range(len(turns)))


NEEDS = st.builds(Need, st.integers(0, 5), st.lists(st.integers(0, 1), max_size=4).map(chain))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 1), NEEDS), max_size=40))
def test_ledger_equals_its_twin(operations):
    """The twin keeps a set of blocks for each request: a shared block is one element of several."""
    ledger, held = BlockLedger(), {}
    for node in (0, 1):
        ledger.add_node(node, 20)
    for gives, number, node, need in operations:
        request = f"r{number}"
        if gives and (request, node) not in held:
            held[request, node] = {*need.names, *((request, k) for k in range(need.blocks))}
            ledger.allocate_blocks(request, node, need)
        elif not gives and (request, node) in held:
            mine = held.pop((request, node))
            others = set().union(*(blocks for (_, n), blocks in held.items() if n == node))
            assert ledger.free_blocks(request, node) == len(mine - others)
        ledger.check_invariants()
        for at in (0, 1):
            taken = set().union(*(blocks for (_, n), blocks in held.items() if n == at))
            assert ledger.blocks_free(at) == 20 - len(taken)
            left = 20 - len(taken) - need.blocks - len(set(need.names) - taken)
            assert ledger.blocks_left(np.array([at]), need).tolist() == [left]
            assert ledger.blocks_left(BOTH, need)[at] == left
            assert list(ledger.holders_of(at)) == [r for (r, n) in held if n == at]


def test_nothing_is_given_twice_or_taken_twice():
    ledger = BlockLedger()
    ledger.add_node(0, 4)
    ledger.allocate_blocks("r", 0, Need(2))
    for mistake in (lambda: ledger.allocate_blocks("r", 0, Need(1)), lambda: ledger.add_node(0, 4)):
        with pytest.raises(InvariantError):
            mistake()
    ledger.free_blocks("r", 0)
    with pytest.raises(KeyError):
        ledger.free_blocks("r", 0)


def test_as_a_routing_policy_large_holes_stay_for_large_requests():
    def choice(prompt: int, rooms: list[int], work: list[int]) -> int:
        some = [
            Candidate(k, f"i{k}", Role.COLOCATED, room_tokens=r, prefill_tokens=w)
            for k, (r, w) in enumerate(zip(rooms, work, strict=True))
        ]
        decided = route("best-fit", Ask(prompt), some)
        assert decided.first.name in decided.reason
        return decided.first.number

    assert choice(100, [1000, 150, 120], [0, 0, 0]) == 2
    assert choice(100, [120, 99, 120], [5, 0, 4]) == 2
    assert choice(100, [10, 99, 40], [0, 5, 0]) == 1, "nobody has enough: the most"
