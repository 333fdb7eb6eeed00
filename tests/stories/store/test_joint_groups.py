"""Models that need more than KV to go on, with several stores as one: states and windows lie over them, block by block.

The router's side of it: how far they have a prefix together with what comes behind it, beside a search by the rule."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

import numpy as np
import pytest

from exchange_world import BLOCK, LAYERS, LEASE_NS, Node, array
from memserve import _core
from memserve.base.layer_kv import WindowPages
from memserve.base.states import KV_ALONE, BehindKv, StatePages
from memserve.base.types import Tier
from memserve.kv.identity import DEFAULT_KEY, part_identities, state_identities
from memserve.kv.store_shares import StoreShares, split_keys
from memserve.kv.transfer.events import FetchEnded
from memserve.kv.transfer.exchange import OfferedBlocks
from memserve.kv.transfer.spread import SpreadPrefix
from memserve.protocol.peers import Peer
from memserve.router.placement.store_union import StoreUnion
from store_world import StoreNode, StoreWorld, finished_world

STATES = StatePages(3 * 64 + 8, 2)
"""A whole block, and of another one a page."""
PROMPT = list(range(100, 100 + 6 * BLOCK))
WHOLE = len(PROMPT)


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    with finished_world() as world:
        world.open_store(blocks=32)
        for name in ("t", "u"):
            world.open_further(name)
        world.meet()
        yield world
        for store in world.stores[1:]:
            if not store.is_dead:
                store.check_empty()


def instance(world: StoreWorld, name: str) -> Node:
    return world.instance(name, hbm=40, states=STATES)


def stores_by_block(world: StoreWorld, keys: bytes, copies: int) -> list[list[StoreNode]]:
    """Of each block, the stores that are to keep it."""
    by_name = {store.peer.name: store for store in world.stores}
    shares = StoreShares(by_name, copies)
    return [[by_name[shares.names[number]] for number in owners] for owners in shares.owners_of(keys).tolist()]


def offer_spread(world: StoreWorld, node: Node, keys: bytes, blocks: list[int], copies: int) -> None:
    """``node`` offers its blocks with these names to the stores that are to keep them."""
    owners = stores_by_block(world, keys, copies)
    for store in world.stores:
        own = [index for index, stores in enumerate(owners) if store in stores]
        if own:
            named = b"".join(split_keys(keys)[index] for index in own)
            offered = OfferedBlocks("t", array([]), [blocks[index] for index in own], identities=named)
            offer_id = node.exchange.offer_blocks(store.peer, offered, world.now)
            node.offers[offer_id] = True
            node.exchange.announce_computed(offer_id, 0, len(own))
    node.take([])


def put(world: StoreWorld, node: Node, end: int = WHOLE, copies: int = 1) -> None:
    """``node`` computes the prompt, takes a snapshot behind ``end`` tokens, and offers both."""
    sequence = node.compute("t", PROMPT)
    node.end(sequence)
    node.finish_plan()
    pool, prefix = node.pool, array(PROMPT[:end])
    snapshot = pool.allocate_snapshot(end)
    for place, block in enumerate(snapshot.pages):
        node.arena[Tier.HBM][block] = contents(end, place)
    assert pool.keep_snapshot("t", prefix, snapshot)
    keys = pool.identities("t", array(PROMPT))
    lease = pool.acquire_kv("t", array(PROMPT))
    offer_spread(world, node, keys, lease.blocks, copies)
    loan = pool.lend_state("t", prefix, 2)
    offer_spread(world, node, pool.names_behind(keys[: 16 * (end // BLOCK)]), loan.blocks, copies)
    for held in (lease, loan):
        pool.unpin(held)
        pool.release(held.blocks)
    world.run()


def contents(tokens: int, place: int) -> np.ndarray:
    """Of block ``place`` of a state, ``[layers, 16]`` uint8."""
    return np.full((LAYERS, 16), 10 * tokens + place, np.uint8)


def fetch(world: StoreWorld, node: Node, *, first: int = 0, copies: int = 1, dies: str = "") -> FetchEnded:
    """``node`` asks for the prompt behind its ``first`` blocks, and for the state behind all of it; then a store
    ``dies``."""
    tokens = array(PROMPT)
    identities = node.pool.identities("t", tokens)
    behind = node.pool.names_behind(identities)
    keys = identities[16 * first :] + behind
    peers = [store.peer for store in world.stores]
    owners = [[peers.index(store.peer) for store in stores] for stores in stores_by_block(world, keys, copies)]
    spares = bytes(stores[1] for stores in owners) if copies > 1 else b""
    spread = SpreadPrefix(tuple(peers), bytes(stores[0] for stores in owners), keys, spares, len(behind) // 16)
    fetch_id = node.exchange.fetch_spread(spread, "t", tokens, first, world.now, world.now + LEASE_NS)
    node.expecting[fetch_id] = "fetch"
    node.take([])
    if dies:
        world.store_dies(dies)
    world.run()
    node.exchange.check_invariants()
    return [outcome for outcome in node.outcomes if isinstance(outcome, FetchEnded)][-1]


def resumed(node: Node) -> int:
    """Tokens that a sequence of ``node`` can go on behind; KV and state are what they should be."""
    lease = node.pool.acquire("t", array(PROMPT))
    if lease.snapshot is not None:
        node.check_cache("t", PROMPT[: lease.tokens])
        pages, used = lease.snapshot.pages, STATES.layers_of_last(node.exchange._context.geometry)
        assert np.array_equal(node.arena[Tier.HBM][pages[0]], contents(lease.tokens, 0))
        assert np.array_equal(node.arena[Tier.HBM][pages[1]][:used], contents(lease.tokens, 1)[:used])
    node.pool.unpin(lease)
    node.pool.release(lease.blocks)
    return lease.tokens


def lose(world: StoreWorld, identity: bytes) -> int:
    """All stores that have this block lose it. Returns how many."""
    holders = [store for store in world.stores if identity in store.machine.values]
    for store in holders:
        store.tier.remove(identity)
        store.machine.values._on_evicted(identity)
    return len(holders)


def state_names(node: Node) -> list[bytes]:
    return split_keys(node.pool.names_behind(node.pool.identities("t", array(PROMPT))))


def test_a_state_comes_from_several_stores_with_its_kv(world) -> None:
    p, d = instance(world, "p"), instance(world, "d")
    put(world, p)
    assert all(store.machine.values.log.all_identities() for store in world.stores)
    ended = fetch(world, d)
    assert ended.ok and ended.has_state and (ended.tokens, ended.pulled_blocks) == (WHOLE, 6)
    assert resumed(d) == WHOLE


def test_a_state_comes_alone_behind_kv_that_is_here(world) -> None:
    p, d = instance(world, "p"), instance(world, "d")
    put(world, p)
    d.end(d.compute("t", PROMPT))
    d.finish_plan()
    assert resumed(d) == 0
    pulled = d.exchange.counters.pulled_blocks
    ended = fetch(world, d, first=6)
    assert ended.ok and ended.has_state and d.exchange.counters.pulled_blocks == pulled + 2
    assert resumed(d) == WHOLE


@pytest.mark.parametrize("lost", ["state", "kv"])
def test_neither_comes_without_the_other_from_several(world, lost) -> None:
    p, d = instance(world, "p"), instance(world, "d")
    put(world, p)
    identities = split_keys(p.pool.identities("t", array(PROMPT)))
    assert lose(world, state_names(p)[1] if lost == "state" else identities[3]) == 1
    ended = fetch(world, d)
    assert not ended.ok and not ended.has_state
    assert resumed(d) == 0 and d.pool.match_kv("t", array(PROMPT)) == 0


@pytest.mark.parametrize("lost", ["state", "kv"])
def test_a_second_copy_stands_in_for_part_of_it(world, lost) -> None:
    p, d = instance(world, "p"), instance(world, "d")
    put(world, p, copies=2)
    identity = state_names(p)[0] if lost == "state" else split_keys(p.pool.identities("t", array(PROMPT)))[2]
    first = stores_by_block(world, identity, 2)[0][0]
    first.tier.remove(identity)
    first.machine.values._on_evicted(identity)
    assert fetch(world, d, copies=2).has_state and resumed(d) == WHOLE


@pytest.mark.parametrize("name", ["t", "u"])
def test_a_store_that_dies_costs_all_of_it_at_once(world, name) -> None:
    p, d = instance(world, "p"), instance(world, "d")
    put(world, p)
    now = world.now
    ended = fetch(world, d, dies=name)
    assert not ended.ok and world.now == now
    assert resumed(d) == 0 and d.pool.available() == 40


# -- what the router knows


WINDOWS = {
    "window": BehindKv(6, WindowPages(2 * BLOCK + 1, 2, BLOCK, 8)),
    "chunk": BehindKv(8, WindowPages(0, 2, BLOCK, 8, 4 * BLOCK)),
    "both": BehindKv(8, WindowPages(BLOCK + 2, 2, BLOCK, 8, 4 * BLOCK)),
}
BEHIND = {"kv": KV_ALONE, "state": BehindKv(3), **WINDOWS}


def resumable(have: set[bytes], identities: list[bytes], behind: BehindKv) -> int:
    """By the rule: the longest prefix with all its KV, and all of what comes behind it."""
    for end in range(len(identities), 0, -1):
        names = set(identities[:end])
        if behind.windows is not None:
            for entry in behind.windows.entries_behind(end * BLOCK):
                names |= set(part_identities(identities[entry], behind.part_blocks, DEFAULT_KEY))
        elif behind.most_blocks:
            names |= set(state_identities(identities[end - 1], behind.most_blocks, DEFAULT_KEY))
        if names <= have:
            return end
    return 0


@pytest.mark.parametrize("kind", BEHIND)
def test_prefix_of_all_stores_ends_where_one_can_go_on(kind: str) -> None:
    behind, random = BEHIND[kind], Random(kind)
    seen = set()
    for _ in range(300):
        directory = _core.PrefixDirectory()
        union = StoreUnion(directory, DEFAULT_KEY)
        for number in range(3):
            union.add_store(number)
        identities = [random.randbytes(16) for _ in range(random.choice((3, 9, 200)))]
        names = {
            name
            for identity in identities
            for name in (
                part_identities(identity, behind.part_blocks, DEFAULT_KEY)
                if behind.windows is not None
                else state_identities(identity, behind.most_blocks, DEFAULT_KEY)
            )
        }
        lost_share = random.choice((0.0, 0.01, 0.1, 0.5))
        kv_end = random.randrange(len(identities) + 1)
        have = {name for name in sorted(names) if random.random() >= lost_share} | set(identities[:kv_end])
        for name in sorted(have):
            number, tier = random.randrange(3), random.randrange(2)
            union.apply_change(number, name, partial(directory.store, number, tier, name))
        columns = np.zeros((2, 3), np.int64)
        union.join_columns(columns, b"".join(identities), behind)
        expected = resumable(have, identities, behind)
        assert columns[0].tolist() == [expected, 0, 0]
        seen.add(expected == kv_end)
        peers, places, _ = union.choose_sources(
            b"".join(identities[:expected]) + union.names_behind(b"".join(identities[:expected]), behind, BLOCK),
            {number: (Peer(f"store-{number}", 1), False) for number in range(3)},
        )
        assert len(places) == expected + (behind.count_blocks(expected * BLOCK) if expected else 0) and len(peers) == 3
        union.check_invariants()
    assert seen == {True, False} or kind == "kv"
