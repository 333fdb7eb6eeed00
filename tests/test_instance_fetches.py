"""Instances that fetch prefixes from each other, and send generated KV back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet_world import Fleet, computed, fleet_config, pair, stats, story_of
from instance_world import PROMPT, request
from memserve.config import ExchangeConfig
from memserve.messages import (
    Cancel,
    Fetch,
    Holder,
)
from memserve.serving import ClockTicked
from memserve.units import NS_PER_S


def test_a_return_makes_the_next_turn_hit_at_the_prefill_instance():
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
    """MemServe's cost model says that moving is cheaper; the story tells from whom, and why."""
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
    """Two such instances in one cluster: each computes for itself, whoever the router names as a holder."""
    configs = {name: fleet_config() for name in "pd"}
    configs[unreachable] = replace(configs[unreachable], exchange=ExchangeConfig(shares_kv=False))
    fleet = Fleet(**configs)
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    fetching(fleet)
    assert computed(fleet, "d") == 18 + 2 and stats(fleet, "d").fetched_tokens == 0
    fleet.finish()


def test_a_prefix_that_went_down_to_dram_is_fetched_from_there():
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


def test_a_fully_cached_prompt_is_fetched_as_a_whole():
    """All of it is in whole blocks: one token is computed, into a copy."""
    fleet = pair()
    fleet.submit(request("a", PROMPT[:16], max_tokens=3), "p")
    fleet.run()
    fetching(fleet, prompt=PROMPT[:16])
    assert computed(fleet, "d") == 1 + 2
    fleet.finish()


@pytest.mark.parametrize("why", ["silent", "evicted", "dead", "corrupt"])
def test_a_fetch_that_comes_to_nothing_costs_a_bounded_wait(why):
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


def test_nobody_is_asked_where_it_cannot_pay():
    """Nothing more there than here; no cache allowed; logprobs of every prompt position wanted."""
    for rest in ({"tokens": 3}, {"use_cache": False}, {"prompt_logprobs": True}):
        fleet = pair()
        job = fetching(fleet, **rest)
        assert job.done and stats(fleet, "d").fetched_tokens == 0
        assert not any(isinstance(message, Fetch) for message in fleet.members["d"].said)


def test_a_fetch_that_fails_with_a_step_does_not_count_on_what_the_step_was_to_compute():
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


def test_tenants_do_not_fetch_from_each_other():
    """The same prompt of another customer is not there, whoever asks."""
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
