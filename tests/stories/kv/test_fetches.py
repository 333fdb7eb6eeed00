"""KV that a peer is asked for, KV that is sent back or to a place of its own, and memory at a peer."""

from __future__ import annotations

import numpy as np
import pytest

from exchange_world import (
    BLOCK,
    LAYERS,
    LEASE_NS,
    PROMPT,
    allocated,
    array,
    last,
    of,
    pages,
    pair,
    raw_label,
    settled_world,
)
from memserve.base.errors import InvariantError
from memserve.base.types import Tier
from memserve.kv.transfer.context import Room
from memserve.kv.transfer.events import (
    Delivered,
    FetchEnded,
    Inserted,
    Released,
    RemoteAllocated,
)
from memserve.protocol.messages import Alloc, Allocated, Fetch, Free, Offer, Withdraw
from memserve.protocol.peers import Peer


@pytest.fixture
def world():
    with settled_world() as world:
        yield world


# -- fetches


def test_a_fetch_leaves_the_prefix_in_the_index(world) -> None:
    p, d = pair(world)
    tokens = list(range(5 * BLOCK + 1))
    p.end(p.compute("", tokens))
    d.end(d.compute("", tokens[: 2 * BLOCK]))
    world.run()
    fetch_id = d.fetch(p.peer, "", tokens, 500)
    assert d.pool.report().by_tier[Tier.HBM].blocks_pinned == 2
    world.run()
    assert last(d) == FetchEnded(fetch_id, True, 5 * BLOCK, "", 3)
    assert d.check_cache("", tokens) == 5
    assert of(p, Released) == [Released(fetch_id, d.peer, True, "")]
    assert d.exchange.counters.fetched_blocks == 3


def test_a_trial_gives_way_where_its_holder_needs_the_room(world) -> None:
    """What a peer reads to measure the link, and that alone."""
    p, d = pair(world)
    tokens = list(range(5 * BLOCK))
    p.end(p.compute("", tokens))
    world.run()
    asked = d.fetch(p.peer, "", tokens, 500)
    trial = d.fetch(p.peer, "", tokens[: 2 * BLOCK], 500, is_trial=True)
    world.deliver((d.peer, p.peer))
    world.deliver((d.peer, p.peer))
    assert p.exchange.transfers_open == 2 and p.exchange.withdraw_trials()
    assert p.exchange.transfers_open == 1 and not p.exchange.withdraw_trials()
    world.run()
    assert {(end.transfer_id, end.ok) for end in of(d, FetchEnded)} == {(asked, True), (trial, False)}


def test_a_fetch_reads_where_the_blocks_lie(world) -> None:
    """Part of the prefix is in the holder's DRAM: nothing is brought up for it."""
    p, d = world.add("p", hbm=4, dram=4), world.add("d")
    world.meet()
    tokens = list(range(4 * BLOCK))
    p.end(p.compute("", tokens))
    p.pool.demote_blocks(3)
    d.fetch(p.peer, "", tokens, 500)
    world.deliver((d.peer, p.peer))
    assert p.exchange.wants_plan, "what goes down is not down yet"
    world.run()
    assert last(d).ok and d.check_cache("", tokens) == 4
    assert d.exchange.counters.pulls == 2
    assert p.pool.report().by_tier[Tier.DRAM].blocks_cached == 3


def test_of_a_fetch_what_came_in_time_is_kept(world) -> None:
    p, d = world.add("p", hbm=4, dram=4), world.add("d")
    world.meet()
    tokens = list(range(4 * BLOCK))
    p.end(p.compute("", tokens))
    p.pool.demote_blocks(2)
    world.run()
    d.fetch(p.peer, "", tokens, 500)
    while len(d.pulls) < 2:
        world.step()
    first = min(d.pulls, key=lambda pull: pull.job.src_tier)
    d.answer(first)
    assert d.exchange.next_deadline_ns == 500
    world.wait(500)
    assert (last(d).ok, last(d).tokens, last(d).pulled_blocks) == (True, 2 * BLOCK, 2)
    assert d.exchange.counters.fetch_timeouts == 1
    assert d.exchange.references() != {}, "the host still writes"
    world.run()
    assert d.check_cache("", tokens) == 2


def test_unanswered_fetch_times_out_and_late_offer_is_released(world) -> None:
    p, d = pair(world)
    p.end(p.compute("", PROMPT))
    world.run()
    fetch_id = d.fetch(p.peer, "", PROMPT, 50)
    world.deliver((d.peer, p.peer))
    world.wait(50)
    assert last(d) == FetchEnded(fetch_id, False, 0, "no offer in time")
    world.run()
    assert of(p, Released) == [Released(fetch_id, d.peer, False, "no longer wanted")]
    given_up = d.fetch(p.peer, "", PROMPT, 5000)
    del d.expecting[given_up]
    d.exchange.give_up(given_up, "cancelled")
    world.run()
    assert of(p, Released)[1].reason == "no longer wanted" and len(of(d, FetchEnded)) == 1


def test_a_fetch_gets_nothing_else_than_what_it_asked_for(world) -> None:
    p, d = pair(world)
    p.compute("", PROMPT)
    world.run()
    asked = d.fetch(p.peer, "", PROMPT, 500)
    other = Offer(asked, "", array(range(BLOCK)), p.pool.identity("", array(range(BLOCK))), Tier.HBM, 0, (0,), 100)
    d.hear(Peer("e", 1), other)
    assert d.exchange.transfers_open == 1 and not of(d, FetchEnded), "an answer of another instance"
    d.hear(p.peer, other)
    assert last(d) == FetchEnded(asked, False, 0, "not what was asked for", was_offered=True)
    with pytest.raises(InvariantError, match="to fetch"):
        d.exchange.fetch_blocks(p.peer, "", array(PROMPT), 0, 3, 0, 500)


def test_fetch_of_unknown_peer_is_refused(world) -> None:
    p = world.add("p")
    p.compute("", PROMPT)
    p.hear(Peer("x", 1), Fetch("x/1/1", "", array(PROMPT), 0, 2))
    p.exchange.check_invariants()
    assert world.links[p.peer, Peer("x", 1)].pop() == Withdraw("x/1/1", "x is not a member")
    world.links.clear()


# -- insertions and raw transfers


def test_generated_kv_goes_home(world) -> None:
    p, d = pair(world)
    p.end(p.compute("", PROMPT))
    seq = d.compute("", [*PROMPT, *range(3 * BLOCK)])
    offer_id = d.offer(p.peer, seq, 2, 5)
    d.exchange.announce_computed(offer_id, 2, 5)
    d.end(seq)
    world.run()
    assert (last(p).tokens, last(p).pulled_blocks, last(p).transfer_id) == (5 * BLOCK, 3, offer_id)
    assert p.check_cache("", seq.tokens) == 5
    assert last(d) == Released(offer_id, p.peer, True, "")


def test_insert_without_its_prefix_is_refused(world) -> None:
    p, d = pair(world, caching=False)
    seq = d.compute("", [1] * 3 * BLOCK)
    d.offer(p.peer, seq, 1, 3)
    world.run()
    assert not last(d).used and "before the offer" in last(d).reason
    p.offer(d.peer, p.compute("", PROMPT), 0, 2)
    world.run()
    assert last(p).reason == "nothing is cached here"


def test_an_insertion_may_go_to_dram(world) -> None:
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT[:BLOCK]))
    offer_id = p.offer(d.peer, p.compute("", PROMPT), 1, 2, dst_tier=Tier.DRAM)
    p.exchange.announce_computed(offer_id, 1, 2)
    world.run()
    assert isinstance(last(d), Inserted)
    report = d.pool.report().by_tier
    assert (report[Tier.HBM].blocks_cached, report[Tier.DRAM].blocks_cached) == (1, 1)
    assert d.check_cache("", PROMPT) == 2


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
def test_a_raw_transfer_is_delivered(world, tier) -> None:
    p, d = pair(world, dram=4)
    seq = p.compute("", PROMPT)
    offer_id = p.offer(d.peer, seq, 1, 3, insert=False, dst_tier=tier, private=raw_label(seq, 1))
    p.exchange.announce_computed(offer_id, 1, 3)
    p.end(seq)
    world.run()
    assert isinstance(last(d), Delivered) and len(last(d).blocks) == 2
    assert d.held == [(tier, block) for block in last(d).blocks]
    assert d.pool.match("", array(PROMPT)) == 0


@pytest.mark.parametrize("insert", [False, True])
def test_blocks_go_where_their_sender_has_allocated(world, insert) -> None:
    p, d = pair(world)
    call_id = allocated(p, d, 2)
    world.run()
    blocks = p.remote[call_id][2]
    seq = p.compute("", PROMPT)
    options = {"insert": insert, "dst_blocks": blocks, "private": raw_label(seq, 0)}
    offer_id = p.offer(d.peer, seq, 0, 2, **options)
    p.exchange.announce_computed(offer_id, 0, 2)
    world.run()
    assert isinstance(last(d), Inserted if insert else Delivered)
    assert d.pool.match("", array(PROMPT)) == (2 * BLOCK if insert else 0)
    assert [block for block in blocks if d.pool.ref_count(Tier.HBM, block) == 2] == list(blocks)
    again = p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks[:1])
    p.exchange.announce_computed(again, 0, 1)
    world.run()
    assert "in use" in last(p).reason, "what is cached or delivered is overwritten"
    p.exchange.free_at(call_id)
    p.take([])
    world.run()
    assert d.exchange.references() == {}


def test_layers_come_one_by_one_into_chosen_blocks(world) -> None:
    """Until the last ones the blocks are their sender's alone; then the index has them, each page as computed."""
    p, d = pair(world)
    call_id = allocated(p, d, 2)
    world.run()
    blocks, seq = p.remote[call_id][2], p.compute("", PROMPT)
    for first in range(LAYERS):
        is_last = first == LAYERS - 1
        offer_id = p.offer(d.peer, seq, 0, 2, insert=is_last, dst_blocks=blocks, layers=(first, first + 1))
        p.exchange.announce_computed(offer_id, 0, 2, first, first + 1)
        p.take([])
        world.run()
        assert last(p) == Released(offer_id, d.peer, True, "")
        assert [d.pool.ref_count(Tier.HBM, block) for block in blocks] == [1 + is_last] * 2
    assert not of(d, Delivered) and isinstance(last(d), Inserted)
    assert d.pool.match("", array(PROMPT)) == 2 * BLOCK
    for place, block in enumerate(blocks):
        assert np.array_equal(d.arena[Tier.HBM][block], pages("", seq.tokens, place))
    again = p.offer(d.peer, seq, 0, 2, insert=False, dst_blocks=blocks, layers=(0, 1))
    world.run()
    assert (last(p).transfer_id, last(p).used) == (again, False) and "in use" in last(p).reason, "it is cached now"
    p.exchange.free_at(call_id)
    p.take([])
    world.run()
    assert d.exchange.references() == {}


def test_pages_of_other_layers_than_were_offered_are_not_pulled(world) -> None:
    p, d = pair(world)
    call_id = allocated(p, d, 1)
    world.run()
    blocks = p.remote[call_id][2]
    offer_id = p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks, layers=(0, 1))
    p.exchange.announce_computed(offer_id, 0, 1, 1, 2)
    world.run()
    assert not d.exchange.counters.pulls and not d.arena[Tier.HBM][blocks[0]].any()
    world.wait(LEASE_NS)
    assert not last(p).used


@pytest.mark.parametrize("layers, chosen", [((0, LAYERS + 1), True), ((2, 2), True), ((0, 1), False)])
def test_offers_of_layers_that_cannot_be_are_refused(world, layers, chosen) -> None:
    p, d = pair(world)
    call_id = allocated(p, d, 1)
    world.run()
    blocks = p.remote[call_id][2] if chosen else ()
    p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks, layers=layers)
    world.run()
    assert not last(p).used and f"layers {layers[0]} to {layers[1]}" in last(p).reason


def test_destination_is_not_reused_while_host_writes_to_it(world) -> None:
    p, d = pair(world)
    call_id = allocated(p, d, 1)
    world.run()
    blocks = p.remote[call_id][2]
    first = p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks)
    p.exchange.announce_computed(first, 0, 1)
    while not d.pulls:
        world.step()
    d.exchange.give_up(first, "a change of mind")
    seq = p.compute("", [2] * BLOCK)
    for still_writing in (True, False):
        offer_id = p.offer(d.peer, seq, 0, 1, insert=False, dst_blocks=blocks, private=raw_label(seq, 0))
        p.exchange.announce_computed(offer_id, 0, 1)
        p.take([])
        while world.step(pulls=False):
            pass
        assert (last(p).transfer_id == offer_id and "in use" in last(p).reason) == still_writing
        world.run()
    assert last(p) == Released(offer_id, d.peer, True, "")


def test_unallocated_destination_blocks_are_refused(world) -> None:
    p, d = pair(world)
    mine = d.compute("", [1] * BLOCK)
    seq = p.compute("", PROMPT)
    p.offer(d.peer, seq, 0, 1, insert=False, dst_blocks=mine.blocks)
    world.run()
    assert not last(p).used and "not allocated for the sender" in last(p).reason


def test_remote_memory_comes_back(world) -> None:
    """By `Free`, by the lease's end, or when nothing waits for the answer any more."""
    p, d = pair(world)
    used = lambda: d.pool.report().by_tier[Tier.HBM].blocks_used  # noqa: E731  # it is read again and again
    kept = allocated(p, d, 3)
    world.run()
    assert isinstance(last(p), RemoteAllocated) and len(last(p).blocks) == 3 and used() == 3
    d.hear(p.peer, Alloc(kept, 3, Tier.HBM, LEASE_NS))
    assert used() == 3, "heard twice, allocated twice"
    allocated(p, d, 99)
    allocated(p, d, 1, Tier.DRAM)
    world.run()
    assert [outcome.blocks for outcome in of(p, RemoteAllocated)[1:]] == [None, None]
    late = allocated(p, d, 2, deadline_ns=10)
    world.wait(10)
    assert last(p) == RemoteAllocated(late, d.peer, Tier.HBM, None)
    world.run()
    assert used() == 3
    early = allocated(p, d, 2)
    p.exchange.free_at(early)
    del p.expecting[early]
    p.take([])
    world.run()
    assert used() == 3 and len(of(p, RemoteAllocated)) == 4
    world.wait(LEASE_NS)
    assert used() == 0


@pytest.mark.parametrize("lost", [Allocated, Free])
def test_unawaited_remote_allocation_is_freed_before_its_lease(world, lost) -> None:
    p, d = pair(world)
    allocated(p, d, 2, deadline_ns=10)
    world.drop = lambda sender, to, message: isinstance(message, lost) and world.now <= 10
    world.deliver((p.peer, d.peer))
    world.wait(10)
    world.now += 1
    world.run()
    assert d.exchange.references() == {} and last(p).blocks is None


def test_peers_leave_the_headroom_alone_too(world) -> None:
    p, d = pair(world, hbm=4)
    d.exchange.room = Room(3)
    for count in (2, 1):
        allocated(p, d, count)
    world.run()
    assert [answer.blocks is not None for answer in of(p, RemoteAllocated)] == [False, True]
