"""Handoffs between two pools, and the plans that their pages wait for."""

from __future__ import annotations

import pytest

from exchange_world import (
    BLOCK,
    LAYERS,
    PROMPT,
    array,
    last,
    of,
    pair,
    send,
    settled_world,
)
from memserve.base.types import Request, Tier, TransferMode
from memserve.kv.transfer.events import (
    HandoffArrived,
    Inserted,
    Released,
)
from memserve.kv.transfer.exchange import OfferedBlocks


@pytest.fixture
def world():
    with settled_world() as world:
        yield world


# -- handoffs


def test_a_handoff_brings_every_page(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq, first=((7,), (9,)), return_kv=True, deadline_in_ns=5)
    p.end(seq)
    world.run()
    arrived = last(d)
    assert isinstance(arrived, HandoffArrived)
    assert (arrived.transfer_id, arrived.first_tokens, arrived.ended_indices) == (offer_id, ((7,), (9,)), ())
    assert (arrived.pulled_blocks, arrived.reused_blocks, len(arrived.blocks)) == (3, 0, 3)
    assert arrived.offer.return_kv and arrived.offer.deadline_in_ns == 5 and arrived.sender == p.peer
    assert d.seqs[0].checked, "the contents were not checked"
    assert d.pool.match("", array(PROMPT)) == 2 * BLOCK
    assert arrived.lease.tokens == 2 * BLOCK and arrived.lease.blocks == arrived.blocks[:2]
    assert of(p, Released) == [Released(offer_id, d.peer, True, "")]
    assert (p.exchange.counters.offers, p.exchange.counters.released) == (1, 1)
    assert (d.exchange.counters.imports_done, d.exchange.counters.pulled_blocks) == (1, 3)
    assert d.exchange.counters.pulled_bytes == 3 * LAYERS * 16


def test_blocks_cached_at_taker_are_not_checksummed_or_pulled(world) -> None:
    """The second turn of a conversation: `Wanted` comes while the prefill computes."""
    p, d = pair(world)
    d.compute("", PROMPT)
    world.run()
    seq = p.compute("", [*PROMPT, *range(5)])
    p.hand_over(d.peer, seq)
    world.deliver((p.peer, d.peer))
    world.deliver((d.peer, p.peer))
    world.run()
    arrived = last(d)
    assert (arrived.pulled_blocks, arrived.reused_blocks) == (2, 2)
    assert p.exchange.counters.sealed_pages == 2 * LAYERS
    assert send(world, "d") == ["Wanted", "Release"]


def test_late_wanted_hint_costs_only_checksums(world) -> None:
    p, d = pair(world)
    d.compute("", PROMPT)
    seq = p.compute("", PROMPT)
    world.run()
    p.hand_over(d.peer, seq)
    p.seal(p.seals[0])
    world.run()
    assert p.exchange.counters.sealed_pages == 3 * LAYERS
    assert last(d).pulled_blocks == 1


def test_blocks_come_chunk_by_chunk_and_layer_by_layer(world) -> None:
    """Pages are pulled while later layers and chunks are being computed."""
    p, d = pair(world)
    whole = p.compute("", PROMPT)
    p.finish_plan()
    request = Request("r", whole.tokens)
    offer_id = p.offer(d.peer, whole, 0, 1, request=request, mode=TransferMode.BY_LAYER)
    p.exchange.announce_computed(offer_id, 0, 1, 0, 1, fence=0)
    p.take([])
    world.run()
    assert d.exchange.counters.pulls == 1
    p.exchange.announce_computed(offer_id, 0, 1, 1, LAYERS, fence=0)
    p.exchange.more_blocks(offer_id, whole.blocks[1:])
    p.exchange.announce_computed(offer_id, 1, 3, 0, 2, fence=0)
    p.take([])
    world.run()
    assert d.exchange.counters.pulls == 3 and not of(d, HandoffArrived)
    p.exchange.announce_computed(offer_id, 1, 3, 2, LAYERS, fence=0)
    p.exchange.hand_off(offer_id, ((1,),), (0,))
    p.take([])
    world.run()
    assert last(d).ended_indices == (0,) and last(d).pulled_blocks == 3
    assert send(world, "p") == ["Offer", "Ready", "MoreBlocks", "Ready", "Ready", "Ready", "Handoff"]


def test_pages_move_one_by_one_unless_aggregated(world) -> None:
    p, d = pair(world)
    by_page = {}
    for mode in TransferMode:
        seq = p.compute("", [list(TransferMode).index(mode)] * BLOCK)
        p.hand_over(d.peer, seq, mode=mode)
        while not d.pulls:
            world.step()
        by_page[mode] = d.pulls[0].job.by_page
        world.run()
    modes = TransferMode.BY_LAYER, TransferMode.BY_REQUEST, TransferMode.BY_REQUEST_AGG
    assert by_page == dict(zip(modes, (True, True, False), strict=True))


def test_the_handoff_follows_the_last_ready(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    p.hand_over(d.peer, seq)
    p.finish_plan()
    assert "Handoff" not in send(world, "p"), "said before the pages were sealed"
    p.seal(p.seals[0])
    assert send(world, "p") == ["Offer", "Ready", "Handoff"]
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_equal_handoffs_keep_one_copy(world) -> None:
    """Two requests with one system prompt arrive at once."""
    p, d = pair(world)
    for _ in range(2):
        seq = p.compute("", PROMPT)
        p.hand_over(d.peer, seq)
    world.run()
    first, second = (arrived.blocks for arrived in of(d, HandoffArrived))
    assert first[:2] == second[:2] and first[2] != second[2], "the half filled block is not shared"
    assert d.exchange.counters.pulled_blocks == 6
    assert d.pool.report().by_tier[Tier.HBM].blocks_used == 4


def test_without_a_cache_the_blocks_are_private(world) -> None:
    p, d = pair(world, caching=False)
    for _ in range(2):
        seq = p.compute("", PROMPT)
        p.hand_over(d.peer, seq)
    world.run()
    first, second = of(d, HandoffArrived)
    assert not set(first.blocks) & set(second.blocks)
    assert first.lease is not None and first.lease.pin == 0


@pytest.mark.parametrize("options", [{"insert": False}, {"request": Request("r", array(PROMPT), use_cache=False)}])
def test_handoff_with_cache_bypass_leaves_no_cache_entry(world, options) -> None:
    p, d = pair(world)
    d.compute("", PROMPT[:BLOCK])
    seq = p.compute("", PROMPT)
    p.hand_over(d.peer, seq, **options)
    world.run()
    assert last(d).lease is None and last(d).reused_blocks == 0
    assert d.pool.match("", array(PROMPT)) == BLOCK


# -- fences


def test_a_pull_waits_for_plans_that_still_write_its_blocks(world) -> None:
    """A sequence has ended while the device still computes it: its blocks are free, and will be written to."""
    p, d = pair(world, hbm=3, caching=False)
    seq = p.compute("", PROMPT)
    p.finish_plan()
    d.end(d.compute("", [1] * 3 * BLOCK))
    p.hand_over(d.peer, seq)
    p.seal(p.seals[0])
    while world.links:
        world.deliver(next(iter(world.links)))
    assert not d.pulls and d.plans, "it pulls into blocks that a plan under way writes to"
    d.finish_plan()
    assert len(d.pulls) == 1 and not d.exchange.wants_plan
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_a_pull_waits_for_the_copy_that_saves_what_was_evicted(world) -> None:
    """The allocation evicts to DRAM; the copy is only recorded, and no plan would come by itself."""
    p, d = pair(world, hbm=3, dram=3)
    d.end(d.compute("", [1] * 3 * BLOCK))
    d.finish_plan()
    seq = p.compute("", PROMPT)
    p.finish_plan()
    p.hand_over(d.peer, seq)
    p.seal(p.seals[0])
    while world.links:
        world.deliver(next(iter(world.links)))
    assert not d.pulls and d.exchange.wants_plan and d.exchange.fence == d.steps + 1
    d.make_plan()
    assert not d.pulls and not d.exchange.wants_plan
    world.run()
    assert isinstance(last(d), HandoffArrived)
    assert d.check_cache("", [1] * 3 * BLOCK) == 3, "what was evicted is right where it is now"


def test_old_blocks_do_not_wait_for_plans_in_flight(world) -> None:
    """Both sides are busy, and will be: with other blocks."""
    p, d = pair(world)
    d.end(d.compute("", [9] * 2 * BLOCK))
    p.end(p.compute("", PROMPT))
    world.run()
    for node in (p, d):
        node.compute("", [1] * 2 * BLOCK)
        node.end(node.compute("", [2] * 2 * BLOCK))
    d.fetch(p.peer, "", PROMPT, 500)
    while not (p.seals or d.pulls):
        world.deliver(next(iter(world.links)))
    p.seal(p.seals[0])
    while not d.pulls:
        world.deliver(next(iter(world.links)))
    assert len(p.plans) == len(d.plans) == 2 and not d.exchange.holds_back and not p.exchange.holds_back
    d.answer(d.pulls[0])
    assert last(d).ok and len(d.plans) == 2
    world.run()
    assert d.check_cache("", PROMPT) == 2


def test_prefix_is_checksummed_after_its_own_plan(world) -> None:
    """Those made later are about others."""
    p, d = pair(world)
    p.compute("", PROMPT)
    p.compute("", [1] * 2 * BLOCK)
    d.fetch(p.peer, "", PROMPT, 500)
    world.deliver((d.peer, p.peer))
    assert not p.seals and p.exchange.holds_back
    p.finish_plan()
    assert p.seals and p.plans


def test_pull_waits_for_plans_only_if_blocks_are_swapped_out(world) -> None:
    roomy, dropping, moving = world.add("a"), world.add("b", hbm=3), world.add("c", hbm=3, dram=3)
    for node in world.nodes.values():
        node.end(node.compute("", [1] * 3 * BLOCK))
        node.make_plan()
        assert node.pool.available() >= 3
    assert [node.exchange.plans_before_pull(2) for node in (roomy, dropping, moving)] == [0, 0, 3]
    world.run()
    assert moving.exchange.plans_before_pull(2) == 0, "nothing is under way"


def test_pages_are_checksummed_after_the_plan_computing_them(world) -> None:
    p, d = pair(world)
    p.compute("", PROMPT)
    again = p.compute("", PROMPT)  # cached: published when its plan was made, not computed yet
    p.exchange.more_blocks("unknown", [1])
    offer_id = p.offer(d.peer, again, request=Request("r", again.tokens))
    p.exchange.announce_computed(offer_id, 0, 2)
    assert not p.seals
    p.finish_plan()
    assert not p.seals, "one of two plans"
    p.finish_plan()
    assert p.seals
    p.exchange.announce_computed(offer_id, 2, 3)
    p.exchange.hand_off(offer_id, ((1,),))
    p.take([])
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_blocks_that_are_being_brought_up_are_not_sealed_yet(world) -> None:
    p, d = world.add("p", hbm=4, dram=4), world.add("d")
    world.meet()
    p.end(p.compute("", PROMPT))
    p.pool.demote_blocks(2)
    world.run()
    p.make_plan()
    world.run()
    lease = p.pool.acquire("", array(PROMPT))
    assert lease.dram_tokens == 2 * BLOCK
    offer_id = p.exchange.offer_blocks(d.peer, OfferedBlocks("", array(PROMPT[: 2 * BLOCK]), lease.blocks), 0)
    p.offers[offer_id] = True
    p.exchange.announce_computed(offer_id, 0, 2)
    p.take([])
    assert not p.seals and p.exchange.wants_plan
    p.pool.unpin(lease)
    p.pool.release(lease.blocks)
    world.run()
    assert of(d, Inserted)[0].tokens == 2 * BLOCK
    assert d.check_cache("", PROMPT) == 2


def test_cancelled_import_keeps_blocks_while_host_may_write(world) -> None:
    p, d = pair(world, hbm=3, caching=False)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq)
    while not d.pulls:
        world.step()
    del d.expecting[offer_id]
    d.exchange.give_up(offer_id, "cancelled")
    d.take([])
    assert d.pool.available() == 0, "blocks that the host is writing to could be given out"
    d.answer(d.pulls[0])
    assert d.pool.available() == 3
    world.run()
    assert of(p, Released) == [Released(offer_id, d.peer, False, "cancelled")]
    assert d.exchange.counters.imports_given_up == 1 and p.exchange.counters.refused == 1
