"""Stories of two or three pools that deal with each other; every step's books are balanced by ``World.run``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import pytest
from msgspec import structs

from exchange_world import (
    BLOCK,
    GEOMETRY,
    LEASE_NS,
    PROMPT,
    World,
    allocated,
    array,
    arrived_tenants,
    deliver_all_but_pulls,
    last,
    losing,
    of,
    pair,
    settled_world,
)
from memserve.base.errors import InvariantError
from memserve.base.types import Request, Tier, isolation
from memserve.kv.transfer.barriers import Barriers
from memserve.kv.transfer.context import Deadlines, Room
from memserve.kv.transfer.events import (
    FetchEnded,
    HandoffArrived,
    HandoffFailed,
    HandoffOffered,
    Released,
    RemoteAllocated,
)
from memserve.protocol.messages import (
    Alloc,
    Offer,
    Release,
)


@pytest.fixture
def world():
    with settled_world() as world:
        yield world


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


def test_first_waiting_import_is_not_overtaken(world) -> None:
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
    d.exchange.room = Room(2)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert not of(d, HandoffArrived)
    d.exchange.room = Room(1)
    d.advance()
    world.run()
    assert len(of(d, HandoffArrived)) == 1


def test_handoff_without_hbm_room_goes_to_dram(world) -> None:
    p, d = pair(world, hbm=4, dram=4)
    busy = d.compute("", [1] * 3 * BLOCK)
    d.exchange.room = Room(0, parked=0)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    arrived = last(d)
    assert (arrived.tier, arrived.pulled_blocks) == (Tier.DRAM, 3)
    d.end(busy)


def test_handoff_of_prompt_tail_goes_to_hbm_with_cached_head(world) -> None:
    """What lies before it is cached here, and no peer will send it: DRAM would wait for it for ever."""
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT[:BLOCK]))
    d.make_plan()
    d.exchange.room = Room(0, parked=1)
    seq = p.compute("", PROMPT)
    offer_id = p.offer(d.peer, seq, first_block=1, request=Request("r", seq.tokens))
    p.exchange.announce_computed(offer_id, 1, len(seq.blocks))
    p.exchange.hand_off(offer_id, ((7,),))
    p.take([])
    world.run()
    arrived = last(d)
    assert (arrived.tier, arrived.reused_blocks) == (Tier.HBM, 1)


def test_import_waiting_for_room_swaps_nothing_in(world) -> None:
    """It is tried on every event: the own prefix is not brought up for it before there is room for all."""
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT))
    d.pool.demote_blocks(2)
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


def test_kv_for_the_cache_alone_is_refused_where_room_is_late(world) -> None:
    """Its sender holds blocks for it, and may have no room for what is handed over to it from here."""
    p, d = pair(world, hbm=4, room_wait_ns=LEASE_NS // 2)
    busy = d.compute("", [1] * 4 * BLOCK)
    whole = PROMPT[: 2 * BLOCK]
    late = p.offer(d.peer, p.compute("", whole))
    p.exchange.announce_computed(late, 0, 2)
    p.take([])
    asked = p.hand_over(d.peer, p.compute("", [2] * 2 * BLOCK))
    world.run()
    world.wait(LEASE_NS // 2 - 1)
    assert not of(p, Released)
    world.wait(1)
    world.run()
    assert [(end.transfer_id, end.reason) for end in of(p, Released)] == [(late, "there is no room")]
    d.end(busy)
    d.advance()
    world.run()
    assert [arrived.transfer_id for arrived in of(d, HandoffArrived)] == [asked]


def test_handoff_larger_than_the_pool_is_refused(world) -> None:
    p, d = pair(world, hbm=2)
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffFailed) and "do not fit" in last(d).reason
    assert d.exchange.counters.imports_refused == 1 and p.exchange.counters.refused == 1


def test_local_prefix_is_swapped_in_for_a_handoff(world) -> None:
    p, d = pair(world, hbm=4, dram=4)
    d.end(d.compute("", PROMPT))
    d.pool.demote_blocks(2)
    world.run()
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    arrived = last(d)
    assert (arrived.reused_blocks, arrived.pulled_blocks) == (2, 1)
    d.make_plan()
    world.run()
    assert d.seqs[0].checked


def test_pulls_start_in_order_within_concurrency_limit(world) -> None:
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


# -- identities


def test_offer_received_after_its_end_is_released(world) -> None:
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


def test_tenant_cannot_fetch_another_tenants_blocks(world) -> None:
    p, d = pair(world)
    p.compute("acme", PROMPT)
    world.run()
    d.fetch(p.peer, "other", PROMPT, 500)
    world.run()
    assert not last(d).ok and "not cached" in last(d).reason
    d.fetch(p.peer, "acme", PROMPT, 500)
    world.run()
    assert last(d).ok


def test_offer_may_precede_peer_joined_of_its_sender(world) -> None:
    p, d = world.add("p"), world.add("d")
    p.take(p.exchange.peer_joined(d.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert [type(outcome) for outcome in d.outcomes] == [HandoffOffered]
    d.take(d.exchange.peer_joined(p.info(), 0))
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_an_offer_whose_sender_stays_unknown_ends_with_its_lease(world) -> None:
    """The news that arrives afterwards starts nothing anew."""
    p, d = world.add("p"), world.add("d")
    p.take(p.exchange.peer_joined(d.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    world.wait(2 * LEASE_NS)
    assert [type(outcome) for outcome in d.outcomes] == [HandoffOffered, HandoffFailed]
    assert d.exchange.counters.imports_failed == 1 and not d.exchange.transfers_open
    d.take(d.exchange.peer_joined(p.info(), 0))
    world.run()
    assert isinstance(last(d), HandoffFailed)


def test_old_generation_of_a_member_is_ignored(world) -> None:
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


def test_removed_peer_may_rejoin(world) -> None:
    """Also as the same process; until then nothing is heard from it."""
    p, d = pair(world)
    d.take(d.exchange.peer_removed(p.peer, 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert not d.outcomes
    d.take(d.exchange.peer_joined(p.info(), 0))
    p.hand_over(d.peer, p.compute("", PROMPT))
    world.run()
    assert isinstance(last(d), HandoffArrived)


def test_dead_peer_holds_nothing_and_blocks_nothing(world) -> None:
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
    d.take(d.exchange.peer_removed(p.peer, 0))
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


# -- the parts


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


def test_fences_open_in_order_after_their_plan() -> None:
    random, pool = Random(6), World().add("n").pool
    fences, waiting, opened = Barriers(pool), [], []
    for at in range(2000):
        if random.random() < 0.5:
            fence = random.choice([0, fences.last_finished, fences.last_made, fences.all_settled()])
            fences.when_passed(fence, partial(opened.append, (fence, at)))
            waiting.append((fence, at))
        elif random.random() < 0.5:
            fences.plan_made(fences.last_made + random.randint(1, 2))
        elif fences.last_finished < fences.last_made:
            fences.plan_finished(random.randint(fences.last_finished + 1, fences.last_made))
        assert opened == sorted(entry for entry in waiting if entry[0] <= fences.last_finished)
        waiting = [entry for entry in waiting if entry[0] > fences.last_finished]
        opened.clear()
        fences.check_invariants()
    assert not fences.wants_plan
    with pytest.raises(InvariantError):
        fences.plan_made(fences.last_made)
    with pytest.raises(InvariantError):
        fences.plan_finished(fences.last_made + 1)
