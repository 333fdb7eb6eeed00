"""Stories of two or three pools that deal with each other; every step's books are balanced by ``World.run``."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import numpy as np
import pytest
from msgspec import structs

from exchange_world import BLOCK, GEOMETRY, LAYERS, LEASE_NS, Node, World, array, raw_label
from memserve.errors import InvariantError
from memserve.kv_transfer.barriers import Barriers
from memserve.kv_transfer.context import Deadlines
from memserve.kv_transfer.jobs import PagesPulled, PagesSealed
from memserve.kv_transfer.outcomes import (
    Delivered,
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    Inserted,
    Released,
    RemoteAllocated,
)
from memserve.messages import (
    Alloc,
    Allocated,
    Fetch,
    Free,
    Handoff,
    MoreBlocks,
    Offer,
    Peer,
    Ready,
    Release,
    Wanted,
    Withdraw,
)
from memserve.serving import Send
from memserve.types import Request, Tier, TransferMode, isolation

PROMPT = list(range(100, 100 + 2 * BLOCK + 2))  # two whole blocks and a half


@pytest.fixture
def world():
    """At the end of each story, when all have finished and all leases have ended, nothing is held."""
    world = World()
    yield world
    world.drop = None
    world.run()
    for node in world.nodes.values():
        while node.seqs:
            node.end(node.seqs[0])
        for tier, block in node.held:
            (node.pool.release if tier == Tier.HBM else node.pool.release_dram)([block])
        node.held.clear()
    for _ in range(2):
        world.wait(2 * LEASE_NS)
        world.run()
    for node in world.nodes.values():
        node.check()
        node.check_empty()
        assert node.exchange.next_deadline_ns is None


def pair(world: World, **options) -> tuple[Node, Node]:
    """A prefill and a decode instance; options are the decode instance's."""
    p, d = world.add("p"), world.add("d", **options)
    world.meet()
    return p, d


def of(node: Node, kind):
    """The node's outcomes of a kind."""
    return [outcome for outcome in node.outcomes if isinstance(outcome, kind)]


def last(node: Node):
    return node.outcomes[-1]


def losing(*kinds):
    """Loses messages of these kinds."""
    return lambda sender, to, message: isinstance(message, kinds)


def send(world: World, name: str) -> list[str]:
    return [kind for sender, _, kind in world.log if sender == name]


def allocated(node: Node, at: Node, count: int, tier: Tier = Tier.HBM, deadline_ns: int = 500) -> str:
    call_id = node.exchange.allocate_at(at.peer, count, tier, node.now, deadline_ns)
    node.expecting[call_id] = "alloc"
    node.take([])
    return call_id


# -- handoffs


def test_a_handoff_brings_every_page(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq, first=((7,), (9,)), return_kv=True, deadline_in_ns=5)
    p.end(seq)
    world.run()
    arrived = last(d)
    assert isinstance(arrived, HandoffArrived)
    assert (arrived.transfer_id, arrived.first_tokens, arrived.ended) == (offer_id, ((7,), (9,)), ())
    assert (arrived.pulled_blocks, arrived.reused_blocks, len(arrived.blocks)) == (3, 0, 3)
    assert arrived.offer.return_kv and arrived.offer.deadline_in_ns == 5 and arrived.sender == p.peer
    assert d.seqs[0].checked, "nobody looked at the contents"
    assert d.pool.match("", array(PROMPT)) == 2 * BLOCK
    assert arrived.lease.tokens == 2 * BLOCK and arrived.lease.blocks == arrived.blocks[:2]
    assert of(p, Released) == [Released(offer_id, d.peer, True, "")]
    assert (p.exchange.counters.offers, p.exchange.counters.released) == (1, 1)
    assert (d.exchange.counters.imports_done, d.exchange.counters.pulled_blocks) == (1, 3)
    assert d.exchange.counters.pulled_bytes == 3 * LAYERS * 16


def test_what_the_taker_has_is_neither_sealed_nor_pulled(world) -> None:
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


def test_a_late_hint_costs_checksums_and_nothing_else(world) -> None:
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
    p.exchange.computed(offer_id, 0, 1, 0, 1, fence=0)
    p.take([])
    world.run()
    assert d.exchange.counters.pulls == 1
    p.exchange.computed(offer_id, 0, 1, 1, LAYERS, fence=0)
    p.exchange.more_blocks(offer_id, whole.blocks[1:])
    p.exchange.computed(offer_id, 1, 3, 0, 2, fence=0)
    p.take([])
    world.run()
    assert d.exchange.counters.pulls == 3 and not of(d, HandoffArrived)
    p.exchange.computed(offer_id, 1, 3, 2, LAYERS, fence=0)
    p.exchange.hand_off(offer_id, ((1,),), (0,))
    p.take([])
    world.run()
    assert last(d).ended == (0,) and last(d).pulled_blocks == 3
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


def test_one_copy_where_somebody_else_brought_the_same(world) -> None:
    """Two requests with one system prompt arrive at once."""
    p, d = pair(world)
    for _ in range(2):
        seq = p.compute("", PROMPT)
        p.hand_over(d.peer, seq)
    world.run()
    first, second = (arrived.blocks for arrived in of(d, HandoffArrived))
    assert first[:2] == second[:2] and first[2] != second[2], "the half filled block is nobody else's"
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
def test_who_may_not_use_the_cache_leaves_no_trace_in_it(world, options) -> None:
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


def test_neither_an_old_prefix_nor_old_free_blocks_wait_for_plans_under_way(world) -> None:
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


def test_a_prefix_is_sealed_when_its_own_plan_has_finished(world) -> None:
    """Those made later are about others."""
    p, d = pair(world)
    p.compute("", PROMPT)
    p.compute("", [1] * 2 * BLOCK)
    d.fetch(p.peer, "", PROMPT, 500)
    world.deliver((d.peer, p.peer))
    assert not p.seals and p.exchange.holds_back
    p.finish_plan()
    assert p.seals and p.plans


def test_steps_are_expected_before_a_pull_only_where_something_goes_down_for_it(world) -> None:
    roomy, dropping, moving = world.add("a"), world.add("b", hbm=3), world.add("c", hbm=3, dram=3)
    for node in world.nodes.values():
        node.end(node.compute("", [1] * 3 * BLOCK))
        node.make_plan()
        assert node.pool.available() >= 3
    assert [node.exchange.plans_before_pull(2) for node in (roomy, dropping, moving)] == [0, 0, 3]
    world.run()
    assert moving.exchange.plans_before_pull(2) == 0, "nothing is under way"


def test_pages_are_sealed_when_the_plan_that_computes_them_has_finished(world) -> None:
    p, d = pair(world)
    p.compute("", PROMPT)
    again = p.compute("", PROMPT)  # cached: published when its plan was made, computed by nobody yet
    p.exchange.more_blocks("unknown", [1])
    offer_id = p.offer(d.peer, again, request=Request("r", again.tokens))
    p.exchange.computed(offer_id, 0, 2)
    assert not p.seals
    p.finish_plan()
    assert not p.seals, "one of two plans"
    p.finish_plan()
    assert p.seals
    p.exchange.computed(offer_id, 2, 3)
    p.exchange.hand_off(offer_id, ((1,),))
    p.take([])
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_blocks_that_are_being_brought_up_are_not_sealed_yet(world) -> None:
    p, d = world.add("p", hbm=4, dram=4), world.add("d")
    world.meet()
    p.end(p.compute("", PROMPT))
    p.pool.demote(2)
    world.run()
    p.make_plan()
    world.run()
    lease = p.pool.acquire("", array(PROMPT))
    assert lease.dram_tokens == 2 * BLOCK
    offer_id = p.exchange.offer(d.peer, "", array(PROMPT[: 2 * BLOCK]), lease.blocks, 0)
    p.offers[offer_id] = True
    p.exchange.computed(offer_id, 0, 2)
    p.take([])
    assert not p.seals and p.exchange.wants_plan
    p.pool.unpin(lease)
    p.pool.release(lease.blocks)
    world.run()
    assert of(d, Inserted)[0].tokens == 2 * BLOCK
    assert d.check_cache("", PROMPT) == 2


def test_a_cancelled_import_keeps_its_blocks_while_the_host_may_write(world) -> None:
    p, d = pair(world, hbm=3, caching=False)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq)
    while not d.pulls:
        world.step()
    del d.expecting[offer_id]
    d.exchange.give_up(offer_id, "cancelled")
    d.take([])
    assert d.pool.available() == 0, "somebody could get blocks that the host is writing to"
    d.answer(d.pulls[0])
    assert d.pool.available() == 3
    world.run()
    assert of(p, Released) == [Released(offer_id, d.peer, False, "cancelled")]
    assert d.exchange.counters.imports_given_up == 1 and p.exchange.counters.refused == 1


# -- what may go wrong


def test_another_checksum_ends_the_import_and_is_counted(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    p.hand_over(d.peer, seq)
    while not d.pulls:
        world.step()
    d.move(d.pulls[0], corrupt=True)
    world.run()
    failed = last(d)
    assert isinstance(failed, HandoffFailed) and "checksum" in failed.reason
    counters = d.exchange.counters
    assert (counters.pulls, counters.pulls_failed, counters.mismatches, counters.imports_failed) == (1, 1, 3, 1)
    assert d.pool.match("", array(PROMPT)) == 0 and d.pool.report().by_tier[Tier.HBM].blocks_used == 0
    assert not of(p, Released)[0].used


@pytest.mark.parametrize(
    ("lost", "both_at_once"),
    [(Offer, False), (Ready, True), (Handoff, False), (Release, False), (MoreBlocks, True), (Wanted, True)],
)
def test_a_lost_message_ends_with_the_lease_at_the_latest(world, lost, both_at_once) -> None:
    p, d = pair(world)
    d.compute("", PROMPT[:BLOCK])
    world.drop = losing(lost)
    seq = p.compute("", PROMPT)
    offer_id = p.offer(d.peer, seq, 0, 1, request=Request("r", seq.tokens))
    p.exchange.more_blocks(offer_id, seq.blocks[1:])
    p.exchange.computed(offer_id, 0, 3)
    p.exchange.hand_off(offer_id, ((1,),))
    p.take([])
    world.run()
    p.end(seq)
    before = p.exchange.transfers_open, d.exchange.transfers_open
    world.wait(LEASE_NS)
    assert (p.exchange.transfers_open, d.exchange.transfers_open) == (0, 0)
    assert (before == (0, 0)) == both_at_once
    arrived = len(of(d, HandoffArrived))
    assert arrived == (lost in (Release, Wanted)) and arrived + len(of(d, HandoffFailed)) == (lost is not Offer)
    assert p.exchange.counters.expired == (lost in (Offer, Handoff, Release))


def in_three_parts(p: Node, d: Node) -> str:
    """A handoff of `PROMPT` whose blocks come one by one."""
    seq = p.compute("", PROMPT)
    offer_id = p.offer(d.peer, seq, 0, 1, request=Request("r", seq.tokens))
    for block in (1, 2):
        p.exchange.more_blocks(offer_id, seq.blocks[block : block + 1])
    p.exchange.computed(offer_id, 0, 3)
    p.exchange.hand_off(offer_id, ((1,),))
    p.end(seq)
    p.take([])
    return offer_id


def test_a_gap_in_the_blocks_is_noticed_at_once(world) -> None:
    p, d = pair(world)
    world.drop = lambda sender, to, message: isinstance(message, MoreBlocks) and message.first_block == 1
    in_three_parts(p, d)
    world.run()
    assert isinstance(last(d), HandoffFailed) and "2, 1 expected" in last(d).reason
    assert not of(p, Released)[0].used and d.exchange.counters.pulls == 0


def test_only_who_made_a_transfer_has_a_say_in_it(world) -> None:
    p, d = pair(world)
    e = world.add("e")
    world.meet()
    offer_id = p.hand_over(d.peer, p.compute("", PROMPT))
    while not d.pulls:
        world.step()
    for message in (Withdraw(offer_id, "no"), Handoff(offer_id, ((6,),)), Ready(offer_id, 0, 0, 9, (1,))):
        d.hear(e.peer, message)
    for message in (Release(offer_id, False, "no"), Wanted(offer_id, 9)):
        p.hear(e.peer, message)
    world.run()
    assert last(d).first_tokens == ((7,),) and of(p, Released) == [Released(offer_id, d.peer, True, "")]


def test_messages_heard_twice_change_nothing(world) -> None:
    p, d = pair(world)
    d.compute("", PROMPT[:BLOCK])
    world.drop = lambda sender, to, message: world.links.setdefault((sender, to), deque()).append(message)
    in_three_parts(p, d)
    world.run()
    assert [type(outcome) for outcome in d.outcomes] == [HandoffOffered, HandoffArrived]
    assert len(of(p, Released)) == 1 and d.exchange.counters.pulls == 1


def test_the_whole_conversation_heard_again_starts_nothing(world) -> None:
    p, d = pair(world)
    heard = []
    world.drop = lambda sender, to, message: heard.append((sender, to, message))
    seq = p.compute("", PROMPT)
    p.hand_over(d.peer, seq)
    world.run()
    for _ in range(2):
        world.drop = None
        for sender, to, message in heard:
            world.post(sender, to, message)
        world.run()
    assert [type(outcome) for outcome in d.outcomes] == [HandoffOffered, HandoffArrived]


def test_ready_that_contradicts_itself_fails_the_import(world) -> None:
    p, d = pair(world)
    for what in ("layers", "overlap", "beyond"):
        seq = p.compute("", [*PROMPT, len(what)])
        offer_id = p.offer(d.peer, seq, request=Request("r", seq.tokens))
        wrong = {
            "layers": Ready(offer_id, 0, 1, LAYERS + 1, (1,)),
            "overlap": Ready(offer_id, 0, 0, 2, (1,)),
            "beyond": Ready(offer_id, 2, 0, 1, (1, 1)),
        }[what]
        world.run()
        d.hear(p.peer, Ready(offer_id, 0, 0, 1, (1,)))
        d.hear(p.peer, wrong)
        assert isinstance(last(d), HandoffFailed), what
    assert d.exchange.counters.imports_failed == 3


def test_withdrawn_is_withdrawn(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq)
    while not d.pulls:
        world.step()
    p.offers[offer_id] = False
    p.exchange.withdraw(offer_id, "ended here")
    p.exchange.withdraw(offer_id, "ended here")
    p.take([])
    world.run()
    assert isinstance(last(d), HandoffFailed) and "ended here" in last(d).reason
    assert d.pool.match("", array(PROMPT)) == 0 and not of(p, Released)
    assert p.exchange.counters.withdrawn == 1


# -- room


def test_an_import_waits_for_room_in_order_of_arrival(world) -> None:
    p, d = pair(world, hbm=4, caching=False)
    busy = d.compute("", [1] * 4 * BLOCK)
    ids = [p.hand_over(d.peer, p.compute("", [at] * size * BLOCK)) for at, size in ((2, 3), (3, 1))]
    world.run()
    assert not of(d, HandoffArrived) and len(of(d, HandoffOffered)) == 2
    d.end(busy)
    d.advance()
    world.run()
    assert [arrived.transfer_id for arrived in of(d, HandoffArrived)] == ids


def test_who_is_first_in_line_is_not_overtaken(world) -> None:
    p, d = pair(world, hbm=4, caching=False)
    d.compute("", [1] * 2 * BLOCK)
    for at, size in ((2, 3), (3, 1)):
        p.hand_over(d.peer, p.compute("", [at] * size * BLOCK))
    world.run()
    assert not of(d, HandoffArrived)
    world.wait(LEASE_NS)
    assert [failed.reason for failed in of(d, HandoffFailed)] == ["the lease has ended"] * 2


def test_headroom_is_left_alone(world) -> None:
    p, d = pair(world, hbm=4)
    d.exchange.headroom_blocks = 2
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert not of(d, HandoffArrived)
    d.exchange.headroom_blocks = 1
    d.advance()
    world.run()
    assert len(of(d, HandoffArrived)) == 1


def test_who_waits_for_room_touches_nothing(world) -> None:
    """It is tried on every event: the own prefix is not brought up for it before there is room for all."""
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT))
    d.pool.demote(2)
    d.make_plan()
    busy = d.compute("", [1] * 2 * BLOCK)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    for _ in range(3):
        d.advance()
    assert d.quiet() and d.pool.report().by_tier[Tier.DRAM].blocks_cached == 2
    d.end(busy)
    d.advance()
    world.run()
    assert last(d).reused_blocks == 2
    d.make_plan()


def test_what_can_never_fit_is_refused_at_once(world) -> None:
    p, d = pair(world, hbm=2)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffFailed) and "do not fit" in last(d).reason
    assert d.exchange.counters.imports_refused == 1 and p.exchange.counters.refused == 1


def test_the_own_prefix_comes_up_from_dram_for_a_handoff(world) -> None:
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT))
    d.pool.demote(2)
    world.run()
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    arrived = last(d)
    assert (arrived.reused_blocks, arrived.pulled_blocks) == (2, 1)
    d.make_plan()
    world.run()
    assert d.seqs[0].checked


def test_pulls_are_given_to_the_host_in_order_and_so_many_at_once(world) -> None:
    p, d = pair(world, pulls_in_flight=2)
    for at in range(4):
        p.hand_over(d.peer, p.compute("", [at] * BLOCK))
    while world.links or p.seals or p.plans:
        while p.plans:
            p.finish_plan()
        while p.seals:
            p.seal(p.seals[0])
        while world.links:
            world.deliver(next(iter(world.links)))
    started = [pull.job for pull in d.pulls]
    assert len(started) == 2
    d.answer(d.pulls[0])
    assert len(d.pulls) == 2
    started.append(d.pulls[1].job)
    world.run()
    assert [job.job_id for job in started] == sorted(job.job_id for job in started)
    assert len(of(d, HandoffArrived)) == 4


def deliver_all_but_pulls(world: World) -> None:
    while world.step(pulls=False):
        pass


def arrived_tenants(node: Node) -> list[str]:
    return [arrived.offer.request.tenant for arrived in of(node, HandoffArrived)]


def test_a_flood_of_pulls_delays_another_tenant_by_one_turn(world) -> None:
    """Six long handoffs of a, half of them salted, wait when the short one of b comes."""
    p, d = world.add("p", hbm=64), world.add("d", hbm=64, pulls_in_flight=1)
    world.meet()
    for at in range(6):
        p.hand_over(d.peer, p.compute(isolation("a", "salt" * (at % 2)), range(10 * at, 10 * at + 3 * BLOCK)))
        deliver_all_but_pulls(world)
    p.hand_over(d.peer, p.compute("b", [1] * BLOCK))
    deliver_all_but_pulls(world)
    world.run()
    assert len(arrived_tenants(d)) == 7 and arrived_tenants(d).index("b") <= 1


def test_handoffs_that_wait_for_room_take_turns_by_tenant(world) -> None:
    """Room for one handoff at a time: the flood of a came first, and b is second in line."""
    p, d = world.add("p", hbm=64), world.add("d", hbm=2)
    world.meet()
    for at in range(6):
        p.hand_over(d.peer, p.compute("a", range(10 * at, 10 * at + 2 * BLOCK)))
    world.run()
    p.hand_over(d.peer, p.compute("b", range(2 * BLOCK)))
    for _ in range(7):
        world.run()
        d.end(d.seqs[0])
        d.advance()
    assert len(arrived_tenants(d)) == 7 and arrived_tenants(d).index("b") == 1


# -- who is who


def test_an_offer_heard_after_its_end_is_sent_back(world) -> None:
    p, d = pair(world)
    world.drop = losing(Release)
    offer_id = p.hand_over(d.peer, p.compute("", PROMPT))
    offer = world.links[p.peer, d.peer][0]
    world.run()
    assert p.exchange.transfers_open == 1
    world.drop = None
    world.post(p.peer, d.peer, offer)
    world.run()
    assert of(p, Released) == [Released(offer_id, d.peer, False, "it has ended")] and len(of(d, HandoffArrived)) == 1


@pytest.mark.parametrize("difference", ["namespace", "geometry"])
def test_peers_with_other_kv_are_refused(world, difference) -> None:
    p, d = world.add("p"), world.add("d", namespace="another" if difference == "namespace" else "m")
    other = replace(GEOMETRY, num_kv_heads=2) if difference == "geometry" else GEOMETRY
    info = p.info()
    fields = {name: getattr(info, name) for name in info.__struct_fields__} | {"geometry": other}
    d.exchange.peer_joined(type(info)(**fields), 0)
    p.exchange.peer_joined(d.info(), 0)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffFailed) and difference in last(d).reason
    if difference == "namespace":
        p.compute("", PROMPT)
        d.fetch(p.peer, "", PROMPT, 500)
        world.run()
        assert not last(d).ok and difference in last(d).reason


@pytest.mark.parametrize("wrong", ["tenant", "request", "tokens", "namespace"])
def test_blocks_under_another_name_are_refused(world, wrong) -> None:
    """Whatever a peer says of itself: namespace, key, tenant and tokens are in the identity."""
    p, d = pair(world)
    seq = p.compute("acme", PROMPT)
    world.drop = lambda sender, to, message: forged.append(message) or True
    forged: list = []
    p.hand_over(d.peer, seq)
    offer = forged[0]
    changed = {
        "tenant": {"tenant": "other", "request": structs.replace(offer.request, tenant="other")},
        "request": {"request": structs.replace(offer.request, tenant="other")},
        "tokens": {"tokens": array([1, *PROMPT[1:]])},
        "namespace": {"identity": World().add("q", namespace="n").pool.identity("acme", array(PROMPT))},
    }[wrong]
    fields = {name: getattr(offer, name) for name in offer.__struct_fields__} | changed
    d.hear(p.peer, Offer(**fields))
    why = "one tenant's KV" if wrong == "request" else "identity"
    assert isinstance(last(d), HandoffFailed) and why in last(d).reason
    assert d.exchange.counters.imports_refused == 1 and d.exchange.references() == {}


def test_one_tenant_fetches_nothing_with_the_tokens_of_another(world) -> None:
    p, d = pair(world)
    p.compute("acme", PROMPT)
    world.run()
    d.fetch(p.peer, "other", PROMPT, 500)
    world.run()
    assert not last(d).ok and "not cached" in last(d).reason
    d.fetch(p.peer, "acme", PROMPT, 500)
    world.run()
    assert last(d).ok


def test_an_offer_may_come_before_the_news_of_its_sender(world) -> None:
    p, d = world.add("p"), world.add("d")
    p.take(p.exchange.peer_joined(d.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert [type(outcome) for outcome in d.outcomes] == [HandoffOffered]
    d.take(d.exchange.peer_joined(p.info(), 0))
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_the_old_generation_of_a_member_is_not_heard(world) -> None:
    p, d = pair(world)
    old = p.peer
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq)
    while not d.pulls:
        world.step()
    new = world.add("p")
    d.take(d.exchange.peer_joined(new.info(), 0))
    assert isinstance(last(d), HandoffFailed) and "anew" in last(d).reason
    before = len(d.outcomes)
    d.hear(old, Offer("p/1/99", "", seq.tokens, b"", Tier.HBM, 0, (0,), 100, request=Request("s", seq.tokens)))
    d.hear(old, Alloc("p/1/98", 1, Tier.HBM, 100))
    d.take(d.exchange.peer_joined(p.info(), 0))
    assert len(d.outcomes) == before and d.exchange.transfers_open == 0 and d.exchange.references() != {}
    world.run()
    new.exchange.peer_joined(d.info(), 0)
    new.hand_over(d.peer, new.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffArrived) and last(d).transfer_id != offer_id


def test_who_has_left_may_come_back(world) -> None:
    """Also as the same process; until then nothing is heard from it."""
    p, d = pair(world)
    d.take(d.exchange.peer_gone(p.peer, 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert not d.outcomes
    d.take(d.exchange.peer_joined(p.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_a_dead_peer_holds_nothing_and_nothing_is_waited_for(world) -> None:
    p, d = pair(world, pulls_in_flight=1)
    for tokens in (PROMPT, [1] * BLOCK):
        p.hand_over(d.peer, p.compute("", tokens))
    d.hear(p.peer, Alloc("p/1/9", 2, Tier.HBM, LEASE_NS))
    while not d.pulls:
        world.step()
    fetch_id = d.fetch(p.peer, "", [2] * BLOCK, 500)
    call_id = allocated(d, p, 1)
    offer_id = d.offer(p.peer, d.compute("", [3] * BLOCK), 0, 1)
    before = len(d.outcomes)
    world.nodes.pop("p")
    d.take(d.exchange.peer_gone(p.peer, 0))
    assert d.cancelled == [p.peer] and d.exchange.transfers_open == 0
    ends = d.outcomes[before:]
    assert [end.reason for end in ends if isinstance(end, HandoffFailed)] == ["p is gone"] * 2
    assert FetchEnded(fetch_id, False, 0, "p is gone") in ends
    assert Released(offer_id, p.peer, False, "p is gone") in ends
    assert RemoteAllocated(call_id, p.peer, Tier.HBM, None) in ends
    assert len(ends) == 5
    written = [(Tier.HBM, block) for pull in d.pulls for block in pull.job.dst_blocks]
    assert sorted(d.exchange.references()) == sorted(written), "only what the host may still write to"
    world.run()
    assert d.exchange.references() == {}


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


def test_a_fetch_reads_where_the_blocks_lie(world) -> None:
    """Part of the prefix is in the holder's DRAM: nothing is brought up for it."""
    p, d = world.add("p", hbm=4, dram=4), world.add("d")
    world.meet()
    tokens = list(range(4 * BLOCK))
    p.end(p.compute("", tokens))
    p.pool.demote(3)
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
    p.pool.demote(2)
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


def test_a_fetch_that_nobody_answers_ends_in_time_and_a_late_offer_is_sent_back(world) -> None:
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
    assert d.exchange.transfers_open == 1 and not of(d, FetchEnded), "an answer from somebody else"
    d.hear(p.peer, other)
    assert last(d) == FetchEnded(asked, False, 0, "not what was asked for")
    with pytest.raises(InvariantError, match="to fetch"):
        d.exchange.fetch(p.peer, "", array(PROMPT), 0, 3, 0, 500)


def test_asked_by_whom_it_does_not_know_it_says_no(world) -> None:
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
    d.exchange.computed(offer_id, 2, 5)
    d.end(seq)
    world.run()
    assert (last(p).tokens, last(p).pulled_blocks, last(p).transfer_id) == (5 * BLOCK, 3, offer_id)
    assert p.check_cache("", seq.tokens) == 5
    assert last(d) == Released(offer_id, p.peer, True, "")


def test_what_lacks_its_beginning_is_refused(world) -> None:
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
    p.exchange.computed(offer_id, 1, 2)
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
    p.exchange.computed(offer_id, 1, 3)
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
    p.exchange.computed(offer_id, 0, 2)
    world.run()
    assert isinstance(last(d), Inserted if insert else Delivered)
    assert d.pool.match("", array(PROMPT)) == (2 * BLOCK if insert else 0)
    assert [block for block in blocks if d.pool.ref_count(Tier.HBM, block) == 2] == list(blocks)
    again = p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks[:1])
    p.exchange.computed(again, 0, 1)
    world.run()
    assert "in use" in last(p).reason, "what is cached or delivered is overwritten"
    p.exchange.free_at(call_id)
    p.take([])
    world.run()
    assert d.exchange.references() == {}


def test_a_destination_is_not_used_again_while_the_host_still_writes_to_it(world) -> None:
    p, d = pair(world)
    call_id = allocated(p, d, 1)
    world.run()
    blocks = p.remote[call_id][2]
    first = p.offer(d.peer, p.compute("", [1] * BLOCK), 0, 1, insert=False, dst_blocks=blocks)
    p.exchange.computed(first, 0, 1)
    while not d.pulls:
        world.step()
    d.exchange.give_up(first, "a change of mind")
    seq = p.compute("", [2] * BLOCK)
    for still_writing in (True, False):
        offer_id = p.offer(d.peer, seq, 0, 1, insert=False, dst_blocks=blocks, private=raw_label(seq, 0))
        p.exchange.computed(offer_id, 0, 1)
        p.take([])
        while world.step(pulls=False):
            pass
        assert (last(p).transfer_id == offer_id and "in use" in last(p).reason) == still_writing
        world.run()
    assert last(p) == Released(offer_id, d.peer, True, "")


def test_blocks_that_belong_to_somebody_else_are_no_destination(world) -> None:
    p, d = pair(world)
    mine = d.compute("", [1] * BLOCK)
    seq = p.compute("", PROMPT)
    p.offer(d.peer, seq, 0, 1, insert=False, dst_blocks=mine.blocks)
    world.run()
    assert not last(p).used and "not allocated for the sender" in last(p).reason


def test_remote_memory_comes_back(world) -> None:
    """By `Free`, by the lease's end, or when nobody waits for the answer any more."""
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
def test_remote_memory_that_nobody_waits_for_comes_back_before_its_lease(world, lost) -> None:
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
    d.exchange.headroom_blocks = 3
    for count in (2, 1):
        allocated(p, d, count)
    world.run()
    assert [answer.blocks is not None for answer in of(p, RemoteAllocated)] == [False, True]


# -- the device fails, the instance is expelled


def test_when_a_step_failed_nothing_is_relied_upon(world) -> None:
    p, d = pair(world)
    p.compute("", [1] * BLOCK + [4] * BLOCK)
    offer_id = d.offer(p.peer, d.compute("", [2] * BLOCK), 0, 1)
    for tokens in (PROMPT, [3] * BLOCK):
        p.hand_over(d.peer, p.compute("", tokens))
    d.compute("", [1] * BLOCK)
    fetch_id = d.fetch(p.peer, "", [1] * BLOCK + [4] * BLOCK, 500)
    while not d.pulls:
        world.step()
    while d.seqs:
        d.end(d.seqs[0])
    d.take(d.exchange.everything_failed(0))
    d.pool.clear_cache()
    assert len(of(d, HandoffFailed)) == 2 and Released(offer_id, p.peer, False, "a step failed") in d.outcomes
    assert FetchEnded(fetch_id, False, 0, "a step failed") in d.outcomes
    report = d.pool.report().by_tier[Tier.HBM]
    assert report.blocks_cached == 0 and report.blocks_used == sum(len(pull.job.dst_blocks) for pull in d.pulls)
    world.run()
    assert d.pool.match("", array(PROMPT)) == 0


def test_an_expelled_instance_forgets_everything_without_a_word(world) -> None:
    p, d = pair(world)
    p.hand_over(d.peer, p.compute("", PROMPT))
    d.hear(p.peer, Alloc("p/1/77", 2, Tier.HBM, LEASE_NS))
    d.offer(p.peer, d.compute("", [2] * BLOCK), 0, 1)
    while not d.pulls:
        world.step()
    outcomes, said = len(d.outcomes), len(world.log)
    d.peer = Peer("d", 2)
    d.exchange.reborn(d.peer)
    d.take([])
    d.offers.clear(), d.expecting.clear()
    assert (len(d.outcomes), len(world.log)) == (outcomes, said) and d.exchange.transfers_open == 0
    d.answer(d.pulls[0])
    assert d.exchange.references() == {}
    p.take(p.exchange.peer_joined(d.info(), 0))
    d.take(d.exchange.peer_joined(p.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffArrived)
    assert d.exchange.fetch(p.peer, "", array([5] * BLOCK), 0, 1, 0, 9).startswith("d/2/")
    d.exchange.reborn(d.peer)


def test_the_host_answers_only_what_it_was_asked(world) -> None:
    d = world.add("d")
    with pytest.raises(InvariantError, match="seals nothing"):
        d.exchange.handle(PagesSealed(5, ()), 0)
    with pytest.raises(InvariantError, match="pulls nothing"):
        d.exchange.handle(PagesPulled(5), 0)


def test_the_owner_announces_only_what_it_has(world) -> None:
    p, d = pair(world)
    seq = p.compute("", PROMPT)
    offer_id = p.hand_over(d.peer, seq)
    for blocks, layers in (((0, 4), (0, 1)), ((0, 1), (0, LAYERS + 1))):
        fresh = p.offer(d.peer, seq)
        with pytest.raises(InvariantError, match="has no"):
            p.exchange.computed(fresh, *blocks, *layers)
        p.exchange.withdraw(fresh, "a mistake")
        p.offers[fresh] = False
    with pytest.raises(InvariantError, match="after its handoff"):
        p.exchange.computed(offer_id, 0, 1)
    with pytest.raises(InvariantError, match="twice"):
        p.exchange.hand_off(offer_id, ())


def test_the_index_can_be_copied_for_who_missed_its_events() -> None:
    """What a follower has who replayed all events equals what the snapshot says, tier by tier."""
    node = World().add("n", hbm=6, dram=4)
    held: dict[bytes, Tier] = {}
    for at in range(8):
        node.end(node.compute("", [at % 3] * (at % 4 + 1) * BLOCK))
        node.pool.demote(at % 3)
        for event in node.pool.take_events():
            for identity in event.identities:
                held.pop(identity, None)
                if event.kind.value != "evicted":
                    held[identity] = event.tier
        assert event.sequence + 1 == node.pool.next_event
        for tier in (Tier.HBM, Tier.DRAM):
            packed = node.pool.cached_identities(tier)
            mine = sorted(packed[i : i + 16] for i in range(0, len(packed), 16))
            assert mine == sorted(identity for identity, where in held.items() if where == tier)
    assert {Tier.HBM, Tier.DRAM} == set(held.values())


def test_actions_are_taken_once() -> None:
    world = World()
    p, d = pair(world)
    p.exchange.offer(d.peer, "", array([]), p.pool.allocate(1), 0, insert=False)
    actions = p.exchange.take_actions()
    assert len(actions) == 1 and isinstance(actions[0], Send) and actions[0].to == d.peer
    assert p.exchange.take_actions() == []
    assert "exports=1" in repr(p.exchange) and np.all(actions[0].message.tokens == array([]))


# -- the parts, next to simple ones


@dataclass(eq=False)
class Thing:
    deadline_ns: int
    over: bool = False


def test_deadlines_are_those_of_a_sorted_list() -> None:
    random, deadlines, things = Random(5), Deadlines(), []
    for now in range(3000):
        thing = Thing(now + random.choice([random.randint(0, 400), 9000]))
        deadlines.add(thing)
        things.append(thing)
        if random.random() < 0.8:
            random.choice(things).over = True
        while (due := deadlines.pop_due(now)) is not None:
            assert due in things and not due.over and due.deadline_ns <= now
            things.remove(due)
        things = [thing for thing in things if not thing.over]
        assert deadlines.next_ns() == min((thing.deadline_ns for thing in things), default=None)
        assert min((thing.deadline_ns for thing in things), default=now + 1) > now
    assert len(deadlines._heap) <= max(64, 4 * len(things)), "what has ended is kept in memory"


def test_fences_open_in_order_and_only_when_their_plan_has_finished() -> None:
    random, pool = Random(6), World().add("n").pool
    fences, waiting, opened = Barriers(pool), [], []
    for at in range(2000):
        if random.random() < 0.5:
            fence = random.choice([0, fences.finished, fences.made, fences.all_settled()])
            fences.when_passed(fence, partial(opened.append, (fence, at)))
            waiting.append((fence, at))
        elif random.random() < 0.5:
            fences.plan_made(fences.made + random.randint(1, 2))
        elif fences.finished < fences.made:
            fences.plan_finished(random.randint(fences.finished + 1, fences.made))
        assert opened == sorted(entry for entry in waiting if entry[0] <= fences.finished)
        waiting = [entry for entry in waiting if entry[0] > fences.finished]
        opened.clear()
        fences.check_invariants()
    assert not fences.wants_plan
    with pytest.raises(InvariantError):
        fences.plan_made(fences.made)
    with pytest.raises(InvariantError):
        fences.plan_finished(fences.made + 1)
