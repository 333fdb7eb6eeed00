"""Blocks that a peer computes of a sequence that is computed here as well: layer by layer, into its own blocks."""

from __future__ import annotations

import pytest

from exchange_world import BLOCK, LAYERS, LEASE_NS, array, of, pair, send, settled_world
from memserve.base.types import Tier, TransferMode
from memserve.kv.transfer.events import LayersArrived, StripeLost, StripeOffered

TOKENS = range(100, 100 + 2 * BLOCK)
"""Of the stripe, blocks 3 and 4 of its prompt."""


@pytest.fixture
def world():
    with settled_world() as world:
        yield world


def offered(world, p, d, **more):
    """A stripe of ``p``, computed, for a sequence of ``d``. Returns the transfer."""
    seq = p.compute("", TOKENS)
    world.run()
    terms = {"insert": False, "mode": TransferMode.BY_LAYER, "part_of": "long#1"} | more
    offer_id = p.offer(d.peer, seq, 0, 2, **terms)
    world.run()
    return offer_id


def announced(world, p, offer_id, first_layer=0, end_layer=LAYERS):
    p.exchange.announce_computed(offer_id, 0, 2, first_layer, end_layer, fence=0)
    p.take([])
    world.run()


def placed(world, d, offer_id, count=2):
    blocks = d.pool.allocate(count)
    d.held += [(Tier.HBM, block) for block in blocks]
    d.take(d.exchange.place_stripe(offer_id, blocks, world.now))
    world.run()
    return blocks


def test_stripe_waits_for_blocks_of_its_sequence(world) -> None:
    p, d = pair(world)
    offer_id = offered(world, p, d)
    announced(world, p, offer_id)
    (told,) = of(d, StripeOffered)
    assert told.transfer_id == offer_id and told.offer.part_of == "long#1" and not of(d, LayersArrived)
    assert not d.exchange.counters.pulls, "nothing is written before there is a place"
    blocks = placed(world, d, offer_id)
    assert of(d, LayersArrived)[-1].layers == LAYERS
    for block, source in zip(blocks, told.offer.blocks, strict=True):
        assert (d.arena[Tier.HBM][block] == p.arena[Tier.HBM][source]).all()
    assert send(world, "d") == ["Release"] and not d.pool.match("", array(TOKENS)), "nothing of it is cached"


def test_layers_are_told_in_order_as_they_come(world) -> None:
    p, d = pair(world)
    offer_id = offered(world, p, d)
    placed(world, d, offer_id)
    for layers in ((1, 2), (0, 1), (2, 3)):
        announced(world, p, offer_id, *layers)
    assert [arrived.layers for arrived in of(d, LayersArrived)] == [2, 3], "layer 1 alone is of no use"


def test_what_is_cached_at_the_taker_is_not_overwritten(world) -> None:
    p, d = pair(world)
    offer_id = offered(world, p, d)
    placed(world, d, offer_id, 1)
    announced(world, p, offer_id)
    assert of(d, LayersArrived)[-1].layers == LAYERS and d.exchange.counters.pulled_bytes == LAYERS * 16
    second = offered(world, p, d)
    placed(world, d, second, 0)
    assert of(d, LayersArrived)[-1].transfer_id == second, "all of it is cached: it has come"


@pytest.mark.parametrize("how", ["withdrawn", "lease", "gone", "checksum"])
def test_stripe_that_does_not_come_is_told_once(world, how: str) -> None:
    p, d = pair(world)
    offer_id = offered(world, p, d)
    placed(world, d, offer_id)
    if how == "withdrawn":
        p.exchange.withdraw_offer(offer_id, "its row has failed")
        p.offers[offer_id] = False
        p.take([])
    elif how == "lease":
        world.wait(2 * LEASE_NS)
    elif how == "gone":
        d.take(d.exchange.peer_removed(p.peer, world.now))
    else:
        p.exchange.announce_computed(offer_id, 0, 2, fence=0)
        p.take([])
        while world.step(pulls=False):
            pass
        for pull in d.pulls:
            d.move(pull, corrupt=True)
    world.run()
    assert [lost.transfer_id for lost in of(d, StripeLost)] == [offer_id]


def test_offer_that_names_a_place_is_no_stripe(world) -> None:
    p, d = pair(world)
    offered(world, p, d, insert=True)
    assert not of(d, StripeOffered) and d.exchange.counters.imports_refused == 1
