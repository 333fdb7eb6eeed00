"""Instances and a store: what is offered to it, what is fetched from it, and that no request waits for it."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from fleet_store import StoreMember, split, with_store
from fleet_world import BLOCK, GEOMETRY, TransferMode, computed, fleet_config, pair, stats, story_of, tokens_of
from instance_world import PROMPT, request
from memserve.base.config import ExchangeConfig
from memserve.base.types import ClockTicked, Tier
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.instance.cluster import store_offers
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.kv.costs import CopyCurve, CostModel, PrefillCurve
from memserve.protocol.messages import KEEP, Fetch, Offer, PeerGone, Pin, Ready, Withdraw
from memserve.protocol.peers import Holder

ROOMY = {"hbm": 64}
DEAR = CostModel(prefill=PrefillCurve(0.0, 10.0 * NS_PER_MS, 0.0))
"""Whatever can be fetched is worth it."""


def offers(fleet, name="p"):
    return [m for m in fleet.members[name].said if isinstance(m, Offer) and m.request is None and m.insert]


@pytest.fixture
def by_layer(monkeypatch):
    """Small blocks count as many bytes."""
    monkeypatch.setattr(store_offers, "GROUP_BYTES", 1)


def test_prompt_and_generated_blocks_reach_the_store():
    """A prompt in three chunks and an answer; partly filled blocks stay behind."""
    fleet = with_store(p=fleet_config(**ROOMY))
    job = fleet.submit(request("a", PROMPT[:21], max_tokens=8), "p")
    fleet.run()
    tokens = tokens_of(21).tolist() + job.got[0]
    whole = (21 + 7) // BLOCK
    assert fleet.members["s"].has(as_tokens(tokens)) == whole
    told = stats(fleet, "p")
    assert told.store_blocks_offered == told.store_blocks_taken == whole
    assert told.store_blocks_dropped == told.store_blocks_failed == 0
    fleet.finish()


def test_without_a_store_nothing_happens():
    """Nothing listens to the cache, and nothing is offered; the same when the store has left."""
    fleet = pair(ROOMY, ROOMY)
    memory = fleet.members["p"].machine.state.memory
    fleet.submit(request("a", PROMPT[:21], max_tokens=8), "p")
    fleet.run()
    assert memory.listener is None and not offers(fleet)
    store = StoreMember(fleet)
    fleet.members["s"] = store
    fleet.welcome_all()
    fleet.run()
    assert memory.listener is not None
    fleet.kill("s")
    fleet.run()
    assert memory.listener is None
    fleet.submit(request("b", PROMPT[5:30], max_tokens=8), "p")
    fleet.run()
    assert not offers(fleet)
    fleet.finish()


def test_a_request_that_may_not_use_the_cache_is_not_offered():
    fleet = with_store(p=fleet_config(**ROOMY))
    fleet.submit(request("a", PROMPT[:21], max_tokens=8, use_cache=False), "p")
    fleet.run()
    assert not offers(fleet)
    fleet.finish()


def test_layers_leave_while_the_step_goes_on(by_layer):
    """The first layer is at the store before the plan is done; the last one waits for the end of the step."""
    fleet = with_store(p=fleet_config(**ROOMY, depth=1))
    p = fleet.members["p"]
    fleet.submit(request("a", PROMPT[:8], max_tokens=2), "p")
    fleet.run(until=lambda: p.layers_told == GEOMETRY.num_layers)
    for _ in range(50):
        for wire in list(fleet.wires):
            fleet.deliver(wire)
        for member in (p, fleet.members["s"]):
            if member.jobs:
                member.do_job()
    layers = [(m.first_layer, m.end_layer) for m in p.said if isinstance(m, Ready)]
    assert p.plans and layers and layers[-1][1] == GEOMETRY.num_layers - 1
    assert fleet.members["s"].has(tokens_of(8)) == 0
    fleet.run()
    assert fleet.members["s"].has(tokens_of(8)) == 2
    fleet.finish()


@pytest.mark.parametrize("mode", list(TransferMode))
def test_a_request_that_is_handed_over_is_offered_to_both(mode, by_layer):
    """The decode instance gets the prompt, and the store gets prompt and answer, each block once."""
    fleet = with_store(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    job = fleet.submit(request("a", PROMPT[:13], max_tokens=9), "p", "d", transfer=mode, return_kv=True)
    fleet.run()
    tokens = as_tokens(tokens_of(13).tolist() + job.got[0])
    assert fleet.handed_over == ["a#0"]
    assert fleet.members["s"].has(tokens) == (13 + 8) // BLOCK
    assert stats(fleet, "p").store_blocks_offered == 13 // BLOCK
    assert stats(fleet, "d").store_blocks_offered == (13 + 8) // BLOCK - 13 // BLOCK
    assert stats(fleet, "p").blocks_come_home > 0
    fleet.finish()


def test_offered_blocks_are_not_offered_again():
    """Until a minute has passed, or another incarnation of the store has come."""
    fleet = with_store(p=fleet_config(**ROOMY))

    def run(name):
        fleet.members["p"].machine.pool.clear_cache()
        fleet.submit(request(name, PROMPT[:16], max_tokens=1), "p")
        fleet.run()
        return stats(fleet, "p").store_blocks_offered

    assert run("a") == 4 and run("b") == 4
    fleet.pass_time(61 * NS_PER_S)
    assert run("c") == 8
    fleet.members["s"] = StoreMember(fleet, generation=2)
    fleet.welcome_all()
    fleet.run()
    assert run("d") == 12 and fleet.members["s"].has(tokens_of(16)) == 4
    fleet.finish()


def test_store_that_joins_late_gets_what_is_reused():
    """It is offered what was computed before it was there once that is used again: once in a minute, as it may have
    lost it, which costs nothing where it has not."""
    fleet = pair(ROOMY, ROOMY)
    fleet.submit(request("a", PROMPT[:16], max_tokens=1), "p")
    fleet.run()
    store = fleet.members["s"] = StoreMember(fleet)
    fleet.welcome_all()

    def run(name):
        fleet.submit(request(name, PROMPT[:17], max_tokens=1), "p")
        fleet.run()
        return stats(fleet, "p").store_blocks_offered

    fleet.run()
    assert not offers(fleet) and store.has(tokens_of(16)) == 0
    assert run("b") == 4 and store.has(tokens_of(16)) == 4 and computed(fleet, "p") == 17
    assert run("c") == 4
    fleet.pass_time(61 * NS_PER_S)
    store.pool.release([store.pool.table.popitem()[1]])
    assert run("d") == 8 and store.has(tokens_of(16)) == 4
    fleet.finish()


def test_the_store_hears_which_blocks_are_used():
    """Of each once in ten seconds, and not of those that were computed just now."""
    fleet = with_store(p=fleet_config(**ROOMY))
    store = fleet.members["s"]

    def run(name, tokens):
        fleet.submit(request(name, tokens, max_tokens=1), "p")
        fleet.run()
        told, store.used = store.used, []
        return told

    identities = split(fleet.members["p"].machine.pool.identities("", tokens_of(24)))
    assert run("a", PROMPT[:8]) == [] and run("b", PROMPT[:16]) == [identities[:2]]
    assert run("c", PROMPT[:24]) == [identities[2:4]]
    fleet.pass_time(11 * NS_PER_S)
    assert run("d", PROMPT[:17]) == [identities[:4]]
    fleet.finish()


def test_few_blocks_are_lent_at_once_and_the_rest_follows():
    """At most an eighth of the memory is lent; what waits is offered out of the cache when the store has taken that."""
    fleet = with_store(p=fleet_config(hbm=32, step_tokens=40, chunk=40))
    fleet.submit(request("a", PROMPT[:36], max_tokens=1), "p")
    fleet.run(until=lambda: offers(fleet))
    assert stats(fleet, "p").store_blocks_offered == 4 == fleet.members["p"].machine.link.writer.offers.exported
    fleet.run()
    assert (
        stats(fleet, "p").store_blocks_taken == 9 == fleet.members["s"].has(tokens_of(36)) and len(offers(fleet)) == 3
    )
    fleet.finish()


def test_what_waits_for_a_store_that_dies_goes_to_the_other():
    """Its own offers end, which does not mean that the other one is too slow for the rest."""
    fleet = pair({"hbm": 32, "step_tokens": 40, "chunk": 40}, ROOMY)
    for name in "st":
        fleet.members[name] = StoreMember(fleet, name)
    fleet.welcome_all()
    fleet.run()
    fleet.members["s"].mute = True
    fleet.submit(request("a", PROMPT[:36], max_tokens=1), "p")
    fleet.run()
    assert stats(fleet, "p").store_blocks_offered < 9, "the rest waits"
    fleet.kill("s")
    fleet.run()
    held = split(fleet.members["p"].machine.pool.identities("", tokens_of(36)))
    lost = stats(fleet, "p").store_blocks_failed
    assert sum(identity in fleet.members["t"].pool.table for identity in held) == 9 - lost
    assert stats(fleet, "p").store_blocks_dropped == 0 < lost
    fleet.finish()


def test_silent_store_drops_waiting_offers():
    """What its lease has ended for, and what waits behind it, is dropped and counted; what comes later is offered."""
    fleet = with_store(p=fleet_config(hbm=32, step_tokens=40, chunk=40))
    fleet.members["s"].mute = True
    fleet.submit(request("a", PROMPT[:36], max_tokens=1), "p")
    fleet.run()
    fleet.pass_time(store_offers.LEASE_NS + 2 * store_offers.FIRST_PLAN_NS + NS_PER_S)
    told = stats(fleet, "p")
    assert (told.store_blocks_offered, told.store_blocks_failed, told.store_blocks_dropped) == (4, 4, 5)
    fleet.members["s"].mute = False
    fleet.submit(request("b", PROMPT[5:13], max_tokens=1), "p")
    fleet.run()
    assert stats(fleet, "p").store_blocks_taken == 2
    fleet.finish()


def test_leases_are_as_long_as_plans_take():
    """An offer is made with the plan that computes it; a large model may take many seconds for that."""
    fleet = with_store(p=fleet_config(**ROOMY))
    fleet.submit(request("a", PROMPT[:21], max_tokens=1), "p")
    fleet.run()
    assert {offer.lease_ns for offer in offers(fleet)[:1]} == {store_offers.LEASE_NS + 2 * store_offers.FIRST_PLAN_NS}
    lent = fleet.members["p"].machine.link.writer.offers
    count = len(offers(fleet))
    lent.plan_made(1000, 0)
    lent.step_finished(1000, 7 * NS_PER_S)
    fleet.submit(request("b", PROMPT[30:51], max_tokens=1), "p")
    fleet.run()
    slow = offers(fleet)[count].lease_ns - store_offers.LEASE_NS
    assert 13 * NS_PER_S < slow <= 14 * NS_PER_S, "twice the seven seconds, which are forgotten little by little"
    fleet.finish()


def test_blocks_of_each_ended_request_wait_for_themselves():
    """Requests that have ended leave objects whose ``id`` comes again: none may replace what waits of another."""
    fleet = with_store(p=fleet_config(hbm=64, step_tokens=40, chunk=40))
    fleet.members["s"].mute = True
    for number in range(8):
        fleet.submit(request(f"r{number}", PROMPT[number : number + 16], max_tokens=1), "p")
        fleet.run()
        del fleet.jobs[f"r{number}"]
        gc.collect()
    fleet.pass_time(6 * NS_PER_S)
    told = stats(fleet, "p")
    assert told.store_blocks_offered + told.store_blocks_dropped == 8 * 4
    fleet.finish()


def test_request_needing_room_withdraws_store_offers():
    """The store is silent, and holds half of a tiny memory by its offers: they are taken back."""
    fleet = with_store(p=fleet_config(hbm=8))
    store, p = fleet.members["s"], fleet.members["p"]
    store.mute = True
    fleet.submit(request("a", PROMPT[:28], max_tokens=1), "p")
    fleet.run()
    assert p.machine.link.writer.offers.exported == 1
    job = fleet.submit(request("b", PROMPT[3:33], max_tokens=2), "p")
    fleet.run()
    assert job.done and any(isinstance(m, Withdraw) for m in p.said)
    fleet.finish()


def test_blocks_of_running_requests_stay_exported():
    """Another request waits for its room: taking its offers back would make none, and under load, when some request
    always waits, the store would get nothing."""
    fleet = with_store(p=fleet_config(hbm=16))
    store, p = fleet.members["s"], fleet.members["p"]
    store.mute = True
    fleet.submit(request("a", PROMPT[:28], max_tokens=8), "p")
    fleet.run(until=lambda: p.machine.link.writer.offers.exported)
    waits = fleet.submit(request("b", PROMPT[1:41], max_tokens=2), "p")
    fleet.run(until=lambda: len(fleet.jobs["a"].got.get(0, ())) >= 6)
    assert not waits.got and p.machine.link.writer.offers.exported == 2
    assert not any(isinstance(m, Withdraw) for m in p.said)
    fleet.run()
    assert waits.done
    fleet.finish()


@pytest.mark.parametrize("when", ["at once", "while it pulls"])
def test_a_store_that_dies_costs_nothing(when):
    fleet = with_store(p=fleet_config(**ROOMY))
    job = fleet.submit(request("a", PROMPT[:30], max_tokens=6), "p")
    if when == "while it pulls":
        fleet.run(until=lambda: fleet.members["s"].jobs)
    fleet.kill("s")
    fleet.run()
    assert job.done and fleet.members["p"].machine.link.writer.offers.exported == 0
    fleet.finish()


def test_failed_step_withdraws_its_offers(by_layer):
    """Nothing of it reaches the store; the next attempt's blocks do."""
    fleet = with_store(p=fleet_config(**ROOMY))
    fleet.submit(request("a", PROMPT[:16], max_tokens=2), "p")
    p = fleet.members["p"]
    fleet.run(until=lambda: p.layers_told == 1)
    p.do_plan(fail=1)
    assert any(isinstance(m, Withdraw) for m in p.said) and stats(fleet, "p").store_blocks_failed >= 2
    fleet.run()
    assert fleet.members["s"].has(tokens_of(16)) == 4
    fleet.finish()


def test_kv_that_is_not_to_be_trusted_is_forgotten_by_the_store():
    """A row without a finite logit: its last blocks are not offered, and those of its earlier chunks are taken back."""
    from memserve.instance.events import RowFailed
    from memserve_lab.sim.reference.device import fail_row

    fleet = with_store(p=fleet_config(**ROOMY, depth=1))
    p, store = fleet.members["p"], fleet.members["s"]
    fleet.submit(request("a", PROMPT[:24], max_tokens=2), "p")
    fleet.run(until=lambda: store.has(tokens_of(24)) >= 2 and len(p.plans) == 1 and p.plans[0].starts == [16])
    plan = p.plans.popleft()
    event = p.device.run_plan(plan)
    fail_row(plan, event, plan.slots[0], RowFailed("planted", kv_is_suspect=True))
    fleet.jobs.clear()
    p.post(event)
    fleet.run()
    assert store.has(tokens_of(24)) == 0 and len(store.forgotten) == 6


def test_a_named_prefix_is_kept():
    """It was offered when it was computed; its name comes later, and marks it at the store."""
    fleet = with_store(p=fleet_config(hbm=64))
    p, store = fleet.members["p"], fleet.members["s"]
    fleet.submit(request("a", PROMPT[:40], max_tokens=1), "p")
    fleet.run()
    assert not store.kept
    for _ in range(3):  # repeated by the router
        p.hear(Pin("doc", "", tokens_of(40), 100 * NS_PER_S))
        fleet.run()
    assert len(store.kept) == 10 and [m.private for m in offers(fleet)].count(KEEP) == 2, "eight blocks, and two"
    assert stats(fleet, "p").store_blocks_taken == 20
    p.hear(PeerGone(store.peer, "gone"))
    fleet.pass_time(200 * NS_PER_S)
    fleet.finish()


def test_dram_blocks_of_layerwise_answer_are_offered():
    """Memory is full of one answer; the next prompt lies by layer, and is cached in DRAM when it has ended."""
    fleet = with_store(p=fleet_config(hbm=20, dram=40, layerwise="auto", link_bytes_s=1e15))
    fleet.submit(request("whole", PROMPT[:41], max_tokens=12), "p")
    job = fleet.submit(request("by layer", PROMPT[3:44], max_tokens=9), "p")
    fleet.run()
    layers = fleet.members["p"].machine.state.memory.layers
    assert isinstance(layers, LayerPlacer) and layers.admitted == 1
    tokens = as_tokens(PROMPT[3:44] + job.got[0])
    cached = fleet.members["p"].machine.pool.match("", tokens) // BLOCK
    assert fleet.members["s"].has(tokens) == cached >= 41 // BLOCK
    fleet.finish()


@pytest.mark.parametrize("lower", ["auto", "int8"])
def test_lower_dtype_blocks_in_dram_are_not_offered(lower):
    """A prefix is named when only a part of it is in HBM: from DRAM the store gets what is there as it was computed."""
    config = fleet_config(hbm=12, dram=40)
    fleet = with_store(p=replace(config, pool=replace(config.pool, lower_dtype=lower)))
    fleet.lose = lambda sender, to, message: isinstance(message, Offer)  # none of the first ones arrives
    for name, start in (("a", 0), ("b", 9), ("c", 4)):
        fleet.submit(request(name, PROMPT[start : start + 25], max_tokens=3), "p")
        fleet.run()
    fleet.lose = lambda sender, to, message: False
    fleet.pass_time(200 * NS_PER_S)
    before, writer = len(offers(fleet)), fleet.members["p"].machine.link.writer
    writer.keep_prefix("", tokens_of(24), fleet.now)
    fleet.members["p"].post(ClockTicked())
    fleet.run()
    last = offers(fleet)[before:]
    assert any(offer.tier is Tier.DRAM or offer.dram_blocks for offer in last) == (lower == "auto")
    fleet.finish()


# -- reading


def fetch_from_store(fleet, taker="d", tier=Tier.DRAM, tokens=16, disk_tokens=0, name="b", **rest):
    holder = Holder(fleet.members["s"].peer, tokens, tier, disk_tokens)
    job = fleet.submit(request(name, PROMPT[:18], max_tokens=3), taker, None, holders=(holder, *rest.get("others", ())))
    fleet.run()
    return job


def stored(**configs):
    """A store that has the first four blocks of the prompt."""
    fleet = with_store(**configs)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    return fleet


@pytest.mark.parametrize("disk_tokens", [0, 8])
def test_prefix_is_fetched_from_the_store(disk_tokens):
    fleet = stored(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    job = fetch_from_store(fleet, tier=Tier.SSD if disk_tokens else Tier.DRAM, disk_tokens=disk_tokens)
    story, told = story_of(job), stats(fleet, "d")
    assert computed(fleet, "d") == 2 + 2 and told.fetched_tokens == told.store_tokens == 16
    assert told.store_ssd_tokens == (16 if disk_tokens else 0)
    assert story["fetched_from"] == "s" and story["fetched_tier"] == ("ssd" if disk_tokens else "store")
    fleet.finish()


def test_another_instance_is_no_store():
    fleet = pair(ROOMY, ROOMY)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    holder = Holder(fleet.members["p"].peer, 16, Tier.DRAM)
    job = fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=(holder,))
    fleet.run()
    assert story_of(job)["fetched_tier"] == "dram" and stats(fleet, "d").store_tokens == 0
    fleet.finish()


@pytest.mark.parametrize("why", ["silent", "gone", "damaged", "evicted"])
def test_a_store_without_an_answer_costs_a_bounded_wait(why):
    """Then the prompt is computed, and the tokens are right."""
    fleet = stored(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    store = fleet.members["s"]
    store.mute = why == "silent"
    fleet.members["d"].corrupt_pulls = int(why == "damaged")
    if why == "evicted":
        store.pool.release(list(store.pool.table.values()))
        store.pool.table.clear()
    if why == "gone":
        fleet.lose = lambda sender, to, message: isinstance(message, Fetch)
    job = fetch_from_store(fleet)
    if why == "gone":
        assert not job.done
        fleet.kill("s")
        fleet.run()
    elif why == "silent":
        fleet.pass_time(3 * NS_PER_S)
    assert job.done and stats(fleet, "d").store_fetches_failed == 1
    assert "s:" in story_of(job)["fetch_failed"]
    fleet.finish()


def test_a_slow_disk_is_not_asked_where_computing_is_quicker():
    """The store says in its costs what its disks take; an instance in memory, with less of the prompt, goes first."""
    fleet = stored(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    store, slow = fleet.members["s"], CostModel(disk=CopyCurve(60.0 * NS_PER_S, 0.0, 0.0), machine="here")
    taker = fleet.members["d"].machine.link.fetches
    taker.stores_changed([replace_info(store.info, slow)])
    less = Holder(fleet.members["p"].peer, 12, Tier.HBM)
    job = fetch_from_store(fleet, tier=Tier.SSD, disk_tokens=16, others=(less,))
    assert story_of(job)["fetched_from"] == "p"
    fleet.members["d"].machine.pool.clear_cache()
    alone = fetch_from_store(fleet, tier=Tier.SSD, disk_tokens=16, name="c")
    assert "fetched_from" not in story_of(alone) and "recompute" in story_of(alone)["fetch_decision"]
    fleet.finish()


def test_late_disk_is_not_awaited_until_a_trial_fetch_is_quick():
    """The store says nothing of its costs. A trial fetch is a fetch that no request waits for: the first goes with the
    next request, the others follow at intervals."""
    fleet = stored(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    store, d = fleet.members["s"], fleet.members["d"]

    def fetches():
        return [m.end_block for m in d.said if isinstance(m, Fetch)]

    def again(name):
        d.machine.pool.clear_cache()
        d.machine.state.costs.model = DEAR  # this device computes in no time
        return fetch_from_store(fleet, tier=Tier.SSD, disk_tokens=16, name=name)

    store.mute = True
    late = again("b")
    fleet.pass_time(3 * NS_PER_S)
    assert late.done and "s:" in story_of(late)["fetch_failed"] and fetches() == [4]
    store.mute = False
    speed = d.machine.link.fetches._disks["s"]
    slow = speed.scale
    for number in range(3):
        assert speed.scale == slow
        tried = again(f"c{number}")
        assert tried.done and "fetched_from" not in story_of(tried) and fetches() == [4] * (2 + number)
        if number < 2:
            soon = again(f"d{number}")
            assert soon.done and "fetched_from" not in story_of(soon) and fetches() == [4] * (2 + number)
            fleet.pass_time(6 * NS_PER_S)
    assert speed.scale < slow
    while speed.scale > 1.0:
        speed.on_arrived(speed.reported_curve.ns(1000), speed.reported_curve.ns(1000) // 2, fleet.now)
    assert story_of(again("e"))["fetched_tier"] == "ssd"
    fleet.finish()


def test_changed_store_costs_replace_learnt_ones():
    fleet = stored(p=fleet_config(**ROOMY), d=fleet_config(**ROOMY))
    store, fetches = fleet.members["s"], fleet.members["d"].machine.link.fetches
    fetches._disks["s"].scale = 7.0
    fetches.stores_changed([store.info])
    assert fetches._disks["s"].scale == 7.0
    fetches.stores_changed([replace_info(store.info, CostModel(disk=CopyCurve(1.0, 2.0, 3.0), machine="here"))])
    assert (fetches._disks["s"].scale, fetches._disks["s"].reported_curve.byte_ns) == (1.0, 3.0)


def test_the_store_on_the_own_host_goes_first():
    fleet = with_store("here", p=fleet_config(**ROOMY))
    fleet.members["p"].machine.link.writer.host_id = "here"
    fleet.members["a-far-one"] = StoreMember(fleet, "a-far-one", host_id="there")
    fleet.welcome_all()
    fleet.run()
    assert fleet.members["p"].machine.link.writer.target == fleet.members["s"].peer
    fleet.kill("s")
    fleet.run()
    assert fleet.members["p"].machine.link.writer.target == fleet.members["a-far-one"].peer


def test_kv_that_no_other_process_can_reach_is_not_offered():
    config = replace(fleet_config(**ROOMY), exchange=ExchangeConfig(shares_kv=False))
    fleet = with_store(p=config)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    assert not offers(fleet) and fleet.members["p"].machine.state.memory.listener is None


def replace_info(info, costs):
    from msgspec import structs

    return structs.replace(info, costs=costs.to_json())


def as_tokens(tokens):
    import numpy as np

    return np.asarray(tokens, np.int32)
