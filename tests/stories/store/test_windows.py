"""Parts of windows in a store: values beside those of their blocks, lent where all of a window is there."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from exchange_world import BLOCK, LAYERS, LEASE_NS, Node, array
from memserve.base.layer_kv import WindowPages
from memserve.base.types import Tier
from memserve.kv.identity import part_identities
from memserve.kv.transfer.exchange import OfferedBlocks
from memserve.protocol.messages import Fetch, Offer
from store_world import StoreWorld, offer_loan, push

PART_BLOCKS = 2
WINDOWS = WindowPages(BLOCK + 2, PART_BLOCKS, BLOCK, 2 * BLOCK)
"""Behind whole blocks it reaches over two of them."""
PROMPT = list(range(100, 100 + 5 * BLOCK))


def instance(world: StoreWorld, name: str) -> Node:
    return world.instance(name, hbm=48, windows=WINDOWS)


def contents(entry: int, place: int) -> np.ndarray:
    """Of block ``place`` of the part of ``entry``, ``[layers, 16]`` uint8."""
    return np.full((LAYERS, 16), 10 * entry + place + 1, np.uint8)


def compute_parts(node: Node, tokens: list[int] = PROMPT) -> None:
    """The parts of all blocks of ``tokens``, whose KV is cached, hang at them."""
    pool, entries = node.pool, len(tokens) // BLOCK
    blocks = pool.allocate(entries * PART_BLOCKS)
    for index, block in enumerate(blocks):
        node.arena[Tier.HBM][block] = contents(*divmod(index, PART_BLOCKS))
    parts = pool.windows.build_parts(blocks)
    pool.anchor_parts("t", array(tokens), 0, parts, written_by=0)
    pool.windows.release_parts(parts, is_end=True)


def offer_parts(world: StoreWorld, node: Node, first: int = 0, count: int = 5) -> None:
    _, loan = node.pool.lend_cached_parts("t", array(PROMPT), first, count)
    offer_loan(world, node, "t", PROMPT[: loan.tokens], loan)


def fill(world: StoreWorld, disks: int = 0) -> None:
    """A store, which gets the prompt's blocks, and their parts."""
    world.open_store(blocks=32, disks=disks)
    p = instance(world, "p")
    push(world, p, "t", PROMPT)
    world.run()
    compute_parts(p)
    offer_parts(world, p)


def fetch(world: StoreWorld, node: Node, tokens: list[int] = PROMPT) -> int:
    """Tokens that a sequence of ``node`` can go on behind after it has asked the store."""
    node.fetch(world.store.peer, "t", tokens, world.now + LEASE_NS)
    world.run()
    lease = node.pool.acquire("t", array(tokens))
    node.check_cache("t", tokens[: lease.tokens])
    first = WINDOWS.first_entry(lease.tokens)
    for entry, part in enumerate(lease.tail, first):
        for place, block in enumerate(part.blocks):
            assert np.array_equal(node.arena[Tier.HBM][block], contents(entry, place))
    assert len(lease.tail) == len(WINDOWS.entries_behind(lease.tokens))
    node.pool.unpin(lease)
    node.pool.release(lease.blocks)
    return lease.tokens


def part_of(world: StoreWorld, entry: int) -> list[bytes]:
    return part_identities(world.store.identities("t", PROMPT)[entry], PART_BLOCKS, world.store.machine.kv._pool._key)


def lose(world: StoreWorld, identity: bytes) -> None:
    world.store.tier.remove(identity)
    world.store.machine.values._on_evicted(identity)


def test_a_prompt_goes_on_wherever_it_leaves_another_one(world) -> None:
    fill(world)
    assert {name for entry in range(5) for name in part_of(world, entry)} <= world.store.known_to_router().keys()
    for number, end in enumerate((1, 3, 5)):
        assert fetch(world, instance(world, f"d{number}"), [*PROMPT[: end * BLOCK], 1, 2, 3, 4]) == end * BLOCK


def test_a_window_with_a_hole_is_none(world) -> None:
    """The longest position before which a whole window is there: losing a part costs those that read it alone."""
    fill(world)
    lose(world, part_of(world, 3)[1])
    assert fetch(world, instance(world, "d"), [*PROMPT[: 4 * BLOCK], 1, 2, 3, 4]) == 3 * BLOCK
    assert fetch(world, instance(world, "e")) == 3 * BLOCK, "its window reaches over the hole"
    offer_parts(world, world.nodes["p"], 3, 1)
    assert fetch(world, instance(world, "f")) == len(PROMPT)


def test_parts_without_their_blocks_are_not_lent(world) -> None:
    fill(world)
    lose(world, world.store.identities("t", PROMPT)[2])
    assert fetch(world, instance(world, "d")) == 2 * BLOCK


def test_parts_that_are_known_are_not_moved_again(world) -> None:
    fill(world)
    stored = world.store.machine.values.counters.kv_stored
    offer_parts(world, world.nodes["p"])
    assert world.store.machine.values.counters.kv_stored == stored


@pytest.mark.parametrize("power", [False, True])
def test_parts_come_back_from_disk_after_a_kill(world, power) -> None:
    fill(world, disks=1)
    for identity in list(world.store.known_to_router()):
        lose(world, identity)
    world.restart(power=power)
    world.run()
    world.meet()
    assert fetch(world, instance(world, "d")) in (range(0, 6 * BLOCK, BLOCK) if power else {len(PROMPT)})


@pytest.mark.parametrize(("blocks", "part_blocks"), [(3, 2), (1, 2), (1 << 60, 2), (2, 1 << 60)])
def test_sizes_that_a_peer_invents_cost_nothing(world, blocks, part_blocks) -> None:
    fill(world)
    p = world.nodes["p"]
    p.exchange.handle = lambda event, now_ns: []
    world.store.hear(p.peer, Fetch("p/1/77", "t", array(PROMPT), 0, 5, LEASE_NS, blocks, part_blocks))
    world.run()
    assert not world.store.exchange.transfers_open


def test_an_offer_of_half_a_part_is_no_part(world) -> None:
    """Blocks that cannot be named are refused, and nothing is stored under a wrong name."""
    fill(world)
    known = world.store.known_to_router()
    p, sent = world.nodes["p"], []
    p.exchange._context.send = lambda to, message: sent.append(message)
    first, loan = p.pool.lend_cached_parts("t", array(PROMPT), 3, 2)
    p.exchange.offer_blocks(
        world.store.peer, OfferedBlocks("t", array(PROMPT)[: loan.tokens], (), first_block=5, state=loan), world.now
    )
    [offer] = [message for message in sent if isinstance(message, Offer)]
    world.store.hear(p.peer, structs.replace(offer, part_blocks=3))
    world.run()
    assert (first, world.store.known_to_router()) == (3, known)
