"""Recurrent states in a store: kept and lent as blocks of their own, and never without the KV before them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from exchange_world import BLOCK, LAYERS, LEASE_NS, Node, array
from memserve.base.states import StatePages
from memserve.base.types import Tier
from memserve.kv.transfer.events import FetchEnded, Released
from memserve.protocol.messages import Fetch
from store_world import StoreWorld, offer_loan, push

STATES = StatePages(3 * 64 + 8, 2)
"""A whole block, and of another one a page."""
PROMPT = list(range(100, 100 + 4 * BLOCK))
EDGES = (4 * BLOCK, 2 * BLOCK)


def instance(world: StoreWorld, name: str) -> Node:
    return world.instance(name, hbm=32, states=STATES)


def contents(tokens: int, place: int) -> np.ndarray:
    """Of block ``place`` of a state, ``[layers, 16]`` uint8."""
    return np.full((LAYERS, 16), 10 * tokens + place, np.uint8)


def offer_state(world: StoreWorld, node: Node, tokens: list[int]) -> str:
    """``node`` takes a snapshot behind ``tokens``, whose KV it has, and offers it."""
    pool, prefix = node.pool, array(tokens)
    snapshot = pool.allocate_snapshot(len(tokens))
    for place, block in enumerate(snapshot.pages):
        node.arena[Tier.HBM][block] = contents(len(tokens), place)
    assert pool.keep_snapshot("t", prefix, snapshot)
    return offer_cached_state(world, node, tokens)


def offer_cached_state(world: StoreWorld, node: Node, tokens: list[int]) -> str:
    return offer_loan(world, node, "t", tokens, node.pool.lend_state("t", array(tokens), 2))


def fetch(world: StoreWorld, node: Node, tokens: list[int] = PROMPT) -> int:
    """Tokens that a sequence of ``node`` can go on behind after it has asked the store."""
    node.fetch(world.store.peer, "t", tokens, world.now + LEASE_NS)
    world.run()
    lease = node.pool.acquire("t", array(tokens))
    if lease.snapshot is not None:
        node.check_cache("t", tokens[: lease.tokens])
        (first, second), used = lease.snapshot.pages, STATES.layers_of_last(node.exchange._context.geometry)
        assert np.array_equal(node.arena[Tier.HBM][first], contents(lease.tokens, 0))
        assert np.array_equal(node.arena[Tier.HBM][second][:used], contents(lease.tokens, 1)[:used])
    node.pool.unpin(lease)
    node.pool.release(lease.blocks)
    return lease.tokens


def names_of_state(world: StoreWorld) -> list[bytes]:
    """Identities of the two blocks of the state behind the whole prompt."""
    last = world.store.identities("t", PROMPT)[-1]
    return world.store.machine.kv._pool.names_behind([last], 2, 0)


def lose(world: StoreWorld, identity: bytes) -> None:
    world.store.tier.remove(identity)
    world.store.machine.values._on_evicted(identity)


def test_a_state_is_kept_and_fetched_with_its_kv(world) -> None:
    world.open_store(blocks=16)
    p, d = instance(world, "p"), instance(world, "d")
    push(world, p, "t", PROMPT)
    offer_id = offer_state(world, p, PROMPT)
    assert p.offers[offer_id] is False and [end.used for end in p.outcomes if isinstance(end, Released)] == [True] * 2
    assert set(names_of_state(world)) <= world.store.known_to_router().keys()
    assert fetch(world, d) == len(PROMPT)


def test_of_several_states_the_longest_with_all_kv_is_lent(world) -> None:
    world.open_store(blocks=16)
    p, d, e = instance(world, "p"), instance(world, "d"), instance(world, "e")
    push(world, p, "t", PROMPT)
    for end in EDGES:
        offer_state(world, p, PROMPT[:end])
    assert fetch(world, d, [*PROMPT[: 3 * BLOCK], 1, 2, 3, 4]) == 2 * BLOCK
    lose(world, world.store.identities("t", PROMPT)[3])
    assert fetch(world, e) == 2 * BLOCK


def test_neither_kv_nor_a_state_comes_alone(world) -> None:
    world.open_store(blocks=16)
    p, d = instance(world, "p"), instance(world, "d")
    push(world, p, "t", PROMPT)
    world.run()
    assert fetch(world, d) == 0 and not d.check_cache("t", PROMPT)
    offer_state(world, p, PROMPT)
    lose(world, world.store.identities("t", PROMPT)[0])
    assert fetch(world, d) == 0 and not d.check_cache("t", PROMPT)


def test_half_of_a_state_is_none(world) -> None:
    world.open_store(blocks=16)
    p, d = instance(world, "p"), instance(world, "d")
    push(world, p, "t", PROMPT)
    offer_state(world, p, PROMPT)
    lose(world, names_of_state(world)[1])
    assert fetch(world, d) == 0
    offer_cached_state(world, p, PROMPT)
    assert fetch(world, d) == len(PROMPT)


@pytest.mark.parametrize("power", [False, True])
def test_states_come_back_from_disk_after_a_kill(world, power) -> None:
    """What a disk has whole is lent; what power has taken is not there, with its KV or without."""
    world.open_store(blocks=16, disks=1)
    p, d = instance(world, "p"), instance(world, "d")
    push(world, p, "t", PROMPT, b"keep")
    for end in EDGES:
        offer_state(world, p, PROMPT[:end])
    for identity in list(world.store.known_to_router()):
        lose(world, identity)
    world.restart(power=power)
    world.run()
    world.meet()
    assert fetch(world, d) in ({0, *EDGES} if power else set(EDGES))


def test_a_store_that_knows_no_states_gives_nothing(world) -> None:
    """One of before keeps the KV, ignores what follows it, and its answer is not what was asked for."""
    world.open_store(blocks=16)
    p, d = instance(world, "p"), instance(world, "d")
    push(world, p, "t", PROMPT)
    world.run()
    begin = world.store.machine.kv._begin_fetch
    world.store.machine.kv._begin_fetch = lambda sender, fetch, now_ns: begin(
        sender, structs.replace(fetch, state_blocks=0), now_ns
    )
    assert fetch(world, d) == 0
    ended = next(outcome for outcome in d.outcomes if isinstance(outcome, FetchEnded))
    assert not ended.ok and ended.reason == "not what was asked for"


def test_a_state_larger_than_the_store_costs_nothing(world) -> None:
    """A peer may say any number."""
    world.open_store(blocks=16)
    p = instance(world, "p")
    push(world, p, "t", PROMPT)
    world.run()
    p.exchange.handle = lambda event, now_ns: []
    world.store.hear(p.peer, Fetch("p/1/77", "t", array(PROMPT), 0, 4, LEASE_NS, 1 << 60))
    world.run()
    assert not world.store.exchange.transfers_open


def test_a_fetch_without_a_state_is_answered_as_ever(world) -> None:
    world.open_store(blocks=16)
    p = instance(world, "p")
    push(world, p, "t", PROMPT)
    offer_state(world, p, PROMPT)
    e = world.instance("e")
    e.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    assert e.check_cache("t", PROMPT) == 4
