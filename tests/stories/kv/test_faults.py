"""Damaged pages, lost, late and contradictory messages, failed steps: what an exchange does then."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from exchange_world import (
    BLOCK,
    LAYERS,
    LEASE_NS,
    PROMPT,
    Node,
    World,
    array,
    last,
    losing,
    of,
    pair,
    settled_world,
)
from memserve.base.errors import InvariantError
from memserve.base.types import Request, Tier
from memserve.kv.transfer.events import (
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    PagesPulled,
    PagesSealed,
    Released,
)
from memserve.kv.transfer.exchange import OfferedBlocks, OfferTerms
from memserve.protocol.events import Send
from memserve.protocol.messages import Alloc, Handoff, MoreBlocks, Offer, Ready, Release, Wanted, Withdraw
from memserve.protocol.peers import Peer


@pytest.fixture
def world():
    with settled_world() as world:
        yield world


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
    p.exchange.announce_computed(offer_id, 0, 3)
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
    """A handoff of `PROMPT` with blocks that come one by one."""
    seq = p.compute("", PROMPT)
    offer_id = p.offer(d.peer, seq, 0, 1, request=Request("r", seq.tokens))
    for block in (1, 2):
        p.exchange.more_blocks(offer_id, seq.blocks[block : block + 1])
    p.exchange.announce_computed(offer_id, 0, 3)
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


def test_transfer_messages_of_other_peers_are_ignored(world) -> None:
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


def test_replayed_messages_start_nothing(world) -> None:
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
    p.exchange.withdraw_offer(offer_id, "ended here")
    p.exchange.withdraw_offer(offer_id, "ended here")
    p.take([])
    world.run()
    assert isinstance(last(d), HandoffFailed) and "ended here" in last(d).reason
    assert d.pool.match("", array(PROMPT)) == 0 and not of(p, Released)
    assert p.exchange.counters.withdrawn == 1


# -- the device fails


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
    assert FetchEnded(fetch_id, False, 0, "a step failed", was_offered=True) in d.outcomes
    report = d.pool.report().by_tier[Tier.HBM]
    assert report.blocks_cached == 0 and report.blocks_used == sum(len(pull.job.dst_blocks) for pull in d.pulls)
    world.run()
    assert d.pool.match("", array(PROMPT)) == 0


def test_expelled_instance_drops_all_state_silently(world) -> None:
    p, d = pair(world)
    p.hand_over(d.peer, p.compute("", PROMPT))
    d.hear(p.peer, Alloc("p/1/77", 2, Tier.HBM, LEASE_NS))
    d.offer(p.peer, d.compute("", [2] * BLOCK), 0, 1)
    while not d.pulls:
        world.step()
    outcomes, said = len(d.outcomes), len(world.log)
    d.peer = Peer("d", 2)
    d.exchange.restart_as(d.peer)
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
    assert d.exchange.fetch_blocks(p.peer, "", array([5] * BLOCK), 0, 1, 0, 9).startswith("d/2/")
    d.exchange.restart_as(d.peer)


def test_unrequested_host_answers_are_refused(world) -> None:
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
            p.exchange.announce_computed(fresh, *blocks, *layers)
        p.exchange.withdraw_offer(fresh, "a mistake")
        p.offers[fresh] = False
    with pytest.raises(InvariantError, match="COMPUTED is no legal cause in HANDED_OFF"):
        p.exchange.announce_computed(offer_id, 0, 1)
    with pytest.raises(InvariantError, match="EXTENDED is no legal cause in HANDED_OFF"):
        p.exchange.more_blocks(offer_id, seq.blocks[:1])
    with pytest.raises(InvariantError, match="HANDED_OFF is no legal cause in HANDED_OFF"):
        p.exchange.hand_off(offer_id, ())


def test_snapshot_equals_replayed_events() -> None:
    """What a follower that replayed all events has equals what the snapshot says, tier by tier."""
    node = World().add("n", hbm=6, dram=4)
    held: dict[bytes, Tier] = {}
    for at in range(8):
        node.end(node.compute("", [at % 3] * (at % 4 + 1) * BLOCK))
        node.pool.demote_blocks(at % 3)
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
    p.exchange.offer_blocks(d.peer, OfferedBlocks("", array([]), p.pool.allocate(1)), 0, OfferTerms(insert=False))
    actions = p.exchange.take_actions()
    assert len(actions) == 1 and isinstance(actions[0], Send) and actions[0].to == d.peer
    assert p.exchange.take_actions() == []
    assert "exports=1" in repr(p.exchange) and np.all(actions[0].message.tokens == array([]))
