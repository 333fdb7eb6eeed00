"""Instances that fetch prefixes from each other, and send generated KV back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_world import BLOCK, GEOMETRY, Fleet, computed, fleet_config, pair, stats, story_of, tokens_of
from instance_world import PROMPT, request
from memserve.base.config import ExchangeConfig
from memserve.base.types import ClockTicked, Tier
from memserve.base.units import NS_PER_S
from memserve.instance.cluster.prefix_fetch import GATHER_NS
from memserve.instance.machine import Instance
from memserve.kv.costs import CopyCurve, CostModel, DecodeCurve, PreemptionCosts, PrefillCurve
from memserve.protocol.messages import Cancel, Dispatch, Fetch, Offer
from memserve.protocol.peers import Holder


def test_returned_kv_gives_next_turn_a_hit_at_prefill_instance():
    """PD-Caching-3: the answer's KV comes home, so the next turn computes nearly nothing."""
    fleet = pair({"hbm": 40}, {"hbm": 40})
    job = fleet.submit(request("one", PROMPT[:9], max_tokens=9), "p", "d", return_kv=True)
    fleet.run()
    before = computed(fleet, "p")
    again = fleet.submit(request("two", [*PROMPT[:9], *job.got[0], 1, 2], max_tokens=3), "p", "d", return_kv=True)
    fleet.finish()
    assert computed(fleet, "p") - before == 4 and again.cached == [16]  # 20 tokens, 16 of them cached
    assert stats(fleet, "d").blocks_sent_home >= 2 == stats(fleet, "p").blocks_come_home


def fetching(fleet, taker="d", holder="p", prompt=PROMPT[:18], tokens=16, **rest):
    peer = fleet.members[holder].peer
    job = fleet.submit(request("b", prompt, max_tokens=3, **rest), taker, None, holders=(Holder(peer, tokens),))
    fleet.run()
    return job


def test_a_prefix_is_fetched_instead_of_computed():
    """MemServe's cost model says that moving is cheaper; the story tells from which instance, and why."""
    fleet = pair()
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    job = fetching(fleet)
    assert computed(fleet, "d") == 2 + 2 and stats(fleet, "d").fetched_tokens == 16
    story = story_of(job)
    assert story["fetched_tokens"] == 16 and story["fetched_from"] == "p" and "fetch 16" in story["fetch_decision"]
    assert story["cached_tokens_hbm"] == 16
    fleet.finish()


@pytest.mark.parametrize("unreachable", ["p", "d"])
def test_kv_in_the_memory_of_a_gpu_is_neither_given_nor_fetched(unreachable):
    """Two such instances in one cluster: each computes for itself, whichever the router names as a holder."""
    configs = {name: fleet_config() for name in "pd"}
    configs[unreachable] = replace(configs[unreachable], exchange=ExchangeConfig(shares_kv=False))
    fleet = Fleet(**configs)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    fetching(fleet)
    assert computed(fleet, "d") == 18 + 2 and stats(fleet, "d").fetched_tokens == 0
    fleet.finish()


def test_prefix_swapped_out_to_dram_is_fetched_from_there():
    """The holder's HBM is full of other things; the blocks lie in its host memory."""
    fleet = pair({"hbm": 8, "dram": 12}, {})
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    fleet.submit(request("other", PROMPT[7:32], max_tokens=3), "p")
    fleet.run()
    assert stats(fleet, "p").dram.blocks_cached > 0
    fetching(fleet)
    assert stats(fleet, "d").fetched_tokens == 16 and computed(fleet, "d") == 4
    fleet.finish()


def test_lower_dtype_prefix_is_fetched_through_hbm():
    """Peers know no rounded pages: the holder brings the blocks up before it offers them."""
    config = fleet_config(hbm=12, dram=24)
    rounds = replace(config, namespace="n|int8", pool=replace(config.pool, lower_dtype="int8"))
    fleet = Fleet(p=rounds, d=rounds)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    for number, start in enumerate((7, 11, 3)):
        fleet.submit(request(f"other-{number}", PROMPT[start : start + 25], max_tokens=3), "p")
        fleet.run()
    assert fleet.members["p"].machine.state.memory.pool.match_blocks("", PROMPT[:16])[1] > 0, "some of it is in DRAM"
    fetching(fleet)
    offers = [message for message in fleet.members["p"].said if isinstance(message, Offer)]
    assert offers and all(offer.tier is Tier.HBM and not offer.dram_blocks for offer in offers)
    assert stats(fleet, "d").fetched_tokens == 16 and computed(fleet, "d") == 4
    fleet.finish()


def test_instances_that_round_otherwise_share_nothing():
    """Their namespaces differ, so neither takes the other's KV."""
    config = fleet_config()
    fleet = Fleet(p=replace(config, namespace="n|int8"), d=replace(config, namespace="n"))
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    fetching(fleet)
    assert computed(fleet, "d") == 18 + 2 and stats(fleet, "d").fetched_tokens == 0
    fleet.finish()


def test_a_fully_cached_prompt_is_fetched_as_a_whole():
    """All of it is in whole blocks: one token is computed, into a copy."""
    fleet = pair()
    fleet.submit(request("a", PROMPT[:16], max_tokens=3), "p")
    fleet.run()
    fetching(fleet, prompt=PROMPT[:16])
    assert computed(fleet, "d") == 1 + 2
    fleet.finish()


@pytest.mark.parametrize("why", ["silent", "evicted", "dead", "corrupt"])
def test_failed_fetch_costs_a_bounded_wait(why):
    """Then the prompt is computed."""
    fleet = pair()
    if why != "evicted":
        fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
        fleet.run()
    peer = fleet.members["p"].peer
    if why == "silent":
        fleet.lose = lambda sender, to, message: isinstance(message, Fetch)
    fleet.members["d"].corrupt_pulls = int(why == "corrupt")
    job = fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=(Holder(peer, 16),))
    fleet.run(until=lambda: stats(fleet, "d").transfers_open)
    deadline = fleet.members["d"].machine.next_deadline_ns
    assert deadline is not None and deadline - fleet.now <= 16 * 500_000 + 1000  # no longer than computing takes
    if why == "dead":
        fleet.kill("p")
    fleet.run()
    if why == "silent":
        assert not job.done
        fleet.now = deadline
        fleet.members["d"].post(ClockTicked())
        fleet.run()
    assert job.done and computed(fleet, "d") == 18 + 2 and story_of(job)["fetch_failed"].startswith("p: ")
    fleet.finish()


def test_the_second_holder_is_asked_when_the_first_has_nothing():
    """The router's tree was behind."""
    fleet = Fleet(p=fleet_config(), q=fleet_config(), d=fleet_config())
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "q")
    fleet.run()
    holders = (Holder(fleet.members["p"].peer, 16), Holder(fleet.members["q"].peer, 12))
    job = fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=holders)
    fleet.finish()
    assert story_of(job)["fetched_from"] == "q" and stats(fleet, "d").fetched_tokens == 12


def test_no_fetch_where_it_cannot_pay():
    """Nothing more there than here; no cache allowed; logprobs of every prompt position wanted."""
    for rest in ({"tokens": 3}, {"use_cache": False}, {"prompt_logprobs": True}):
        fleet = pair()
        job = fetching(fleet, **rest)
        assert job.done and stats(fleet, "d").fetched_tokens == 0
        assert not any(isinstance(message, Fetch) for message in fleet.members["d"].said)


def test_fetch_failed_with_step_is_retried_for_full_prefix():
    """A device fails while another request waits for a prefix. That fetch has failed as well, and the next holder is
    asked: for all of it, as nothing of the cache is left."""
    fleet = Fleet(p=fleet_config(hbm=40), q=fleet_config(hbm=40), d=fleet_config(hbm=40))
    for name in ("p", "q"):
        fleet.submit(request(f"at {name}", PROMPT[:30], max_tokens=2), name)
        fleet.run()
    d, holders = fleet.members["d"], tuple(Holder(fleet.members[name].peer, 28) for name in ("p", "q"))
    fleet.lose = lambda sender, to, message: isinstance(message, Fetch)
    waits = fleet.submit(request("waits", PROMPT[:30], max_tokens=3), "d", None, holders=holders)
    fleet.run()
    computes = fleet.submit(request("computes", PROMPT[:20], max_tokens=3), "d")
    fleet.run(until=lambda: d.plans)
    d.do_plan(fail=3)
    asked = [message for message in d.said if isinstance(message, Fetch)]
    assert [message.first_block for message in asked] == [0, 0]
    fleet.now += 10 * NS_PER_S
    d.post(ClockTicked())
    fleet.run()
    assert waits.done and computes.done
    fleet.finish()


def with_costs(fleet, name, **curves):
    """``name`` starts anew with a profile: computing takes 1 us a token, and whatever ``curves`` say."""
    free = {"prefill": PrefillCurve(0, 1000, 0), "decode": DecodeCurve(0, 0, 0)}
    member = fleet.members[name]
    costs = PreemptionCosts(GEOMETRY.block_bytes, profile=CostModel(**free | curves, machine="here"))
    member.machine = Instance(member.cfg, BLOCK, costs, self_peer=member.peer, geometry=GEOMETRY)
    fleet.welcome_all()
    fleet.run()
    return member


def fetches_of(member):
    return [len(message.tokens) for message in member.said if isinstance(message, Fetch)]


def test_concurrent_fetches_share_link_by_time_saved():
    """Each fetch takes the link 14 us, and the two prefixes 16 and 28 us to compute: only the longer one is fetched,
    though its request came last. While it is fetched, the other one is computed."""
    fleet = Fleet(p=fleet_config(hbm=40), d=fleet_config(hbm=40))
    for name, prompt in (("short", PROMPT[:17]), ("long", PROMPT[5:34])):
        fleet.submit(request(f"{name} at p", prompt, max_tokens=2), "p")
        fleet.run()
    d, peer = with_costs(fleet, "d", same_host=CopyCurve(14_000, 0, 0)), fleet.members["p"].peer
    fleet.submit(request("busy", PROMPT[:3], max_tokens=30), "d")
    fleet.run(until=lambda: d.plans)
    arrived_ns = fleet.now
    short = fleet.submit(request("short", PROMPT[:18], max_tokens=2), "d", None, holders=(Holder(peer, 16),))
    long = fleet.submit(request("long", PROMPT[5:35], max_tokens=2), "d", None, holders=(Holder(peer, 28),))
    while fleet.wires:
        fleet.deliver(next(iter(fleet.wires)))
    assert not fetches_of(d) and fleet.now < d.machine.next_deadline_ns <= arrived_ns + GATHER_NS
    fleet.now = d.machine.next_deadline_ns
    d.post(ClockTicked())
    assert fetches_of(d) == [28]
    fleet.finish()
    assert "fetched_tokens" not in story_of(short) and story_of(long)["fetched_tokens"] == 28


def test_idle_instance_fetches_immediately():
    fleet = Fleet(p=fleet_config(), d=fleet_config())
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    d = fleet.members["d"]
    fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=(Holder(fleet.members["p"].peer, 16),))
    fleet.deliver(next(iter(fleet.wires)))
    assert fetches_of(d) == [16] and not d.machine.link.fetches.undecided
    fleet.finish()


def test_a_request_that_ends_before_it_is_decided_leaves_nothing():
    fleet = Fleet(p=fleet_config(), d=fleet_config())
    d, peer = fleet.members["d"], fleet.members["p"].peer
    fleet.submit(request("busy", PROMPT[:3], max_tokens=9), "d")
    fleet.run(until=lambda: d.plans)
    d.hear(Dispatch(request("gone", PROMPT[:18]), holders=(Holder(peer, 16),)))
    assert d.machine.link.fetches.undecided
    d.hear(Cancel("gone"))
    assert not d.machine.link.fetches.undecided and d.machine.link.fetches.decide_at_ns is None
    fleet.finish()


def test_no_more_is_fetched_at_once_than_there_is_room_for():
    """Three turns of conversations that do not fit into memory together: what was fetched for the last one would be
    evicted again before it is admitted."""
    fleet = Fleet(p=fleet_config(hbm=60), d=fleet_config(hbm=20))
    turns = [[start, *PROMPT[1:29]] for start in (1, 2, 3)]
    for number, turn in enumerate(turns):
        fleet.submit(request(f"before {number}", turn, max_tokens=2), "p")
        fleet.run()
    d, peer = fleet.members["d"], fleet.members["p"].peer
    fleet.submit(request("busy", PROMPT[:3], max_tokens=9), "d")
    fleet.run(until=lambda: d.plans)
    for number, turn in enumerate(turns):
        d.hear(Dispatch(request(f"turn {number}", turn, max_tokens=2), holders=(Holder(peer, 28),)))
    fleet.now = d.machine.next_deadline_ns
    d.post(ClockTicked())
    assert fetches_of(d) == [28, 28] and len(d.machine.link.fetches.undecided) == 1, "20 blocks; 8 for each turn"
    fleet.finish()
    assert stats(fleet, "d").fetched_tokens == 3 * 28 and not d.machine.link.fetches.undecided


@pytest.mark.parametrize(("swap_ns", "fetched"), [(0, [16]), (50_000, [])])
def test_own_blocks_in_dram_cost_their_way_up(swap_ns, fetched):
    """What is fetched comes behind them: if bringing them up takes longer than computing all, nothing is fetched."""
    fleet = Fleet(p=fleet_config(), d=fleet_config(hbm=8, dram=12))
    fleet.submit(request("a", PROMPT[:17], max_tokens=2), "p")
    fleet.run()
    d = with_costs(fleet, "d", swap_in=CopyCurve(swap_ns, 0, 0), same_host=CopyCurve(2_000, 0, 0))
    for name, prompt in (("own", PROMPT[:9]), ("other", PROMPT[7:37])):
        fleet.submit(request(name, prompt, max_tokens=2), "d")
        fleet.run()
    hbm, dram = d.machine.pool.match_blocks("", tokens_of(18))
    assert dram == 2 and not hbm
    job = fetching(fleet)
    assert fetches_of(d) == fetched
    assert ("swap-in 8" in story_of(job)["fetch_decision"].split(":")[0]) == bool(fetched)
    fleet.finish()


def test_tenants_do_not_fetch_from_each_other():
    """The same prompt of another customer is not there, from wherever it is asked for."""
    fleet = pair()
    fleet.submit(request("a", PROMPT[:17], max_tokens=3, tenant="red"), "p")
    fleet.run()
    job = fetching(fleet, tenant="blue")
    assert job.done and stats(fleet, "d").fetched_tokens == 0 and computed(fleet, "d") == 20


def test_cancelling_a_request_that_waits_for_a_fetch():
    """Nothing of it stays."""
    fleet = pair()
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    fleet.lose = lambda sender, to, message: isinstance(message, Fetch)
    fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=(Holder(fleet.members["p"].peer, 16),))
    fleet.run(until=lambda: stats(fleet, "d").transfers_open)
    fleet.members["d"].hear(Cancel("b#0"))
    del fleet.jobs["b"]
    assert fleet.members["d"].machine.is_idle
    fleet.finish()
