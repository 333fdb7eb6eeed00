"""A request that decodes goes on at another instance: what moves, what stays, and every way in which that may end."""

from __future__ import annotations

from random import Random

import pytest

from fleet_world import BLOCK, computed, pair, stats, story_of
from instance_world import PROMPT, VOCAB, request
from memserve.base.layer_kv import WindowPages
from memserve.base.states import StatePages
from memserve.base.types import FinishReason
from memserve.base.units import NS_PER_S
from memserve.instance.cluster import migration
from memserve.protocol.messages import Handoff, Offer, RequestRefused

KINDS = {
    "blocks": {},
    "no cache": {"caching": False},
    "two tiers": {"dram": 20},
    "states": {"states": StatePages(200, 2)},
    "windows": {"windows": WindowPages(6, 2, BLOCK, 12)},
}


def started(tokens=6, sizes=None, target=None, **asked):
    """A pair, and a request of which "p" has drawn some tokens."""
    sizes = {"hbm": 60, "running": 8, **(sizes or {})}
    fleet = pair(sizes, {**sizes, **(target or {})})
    asked = {"max_tokens": 30, **asked}
    job = fleet.submit(request("a", PROMPT[:13], **asked), "p")
    fleet.run(until=lambda: len(job.got.get(0, ())) >= tokens)
    return fleet, job


def offers(fleet, name="p"):
    return [message for message in fleet.members[name].said if isinstance(message, Offer)]


@pytest.mark.parametrize("copies_ahead", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 17])
def test_a_running_request_goes_on_with_its_kv(kind, tokens, copies_ahead):
    """No token is computed twice, wherever in a block the request leaves."""
    fleet, job = started(tokens, KINDS[kind])
    fleet.migrate(job, "d", copies_ahead=copies_ahead and kind != "no cache")
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and job.attempt == 0 and not fleet.stayed
    assert computed(fleet, "p") + computed(fleet, "d") == 13 + 29
    assert computed(fleet, "d") > 0 and story_of(job)["migrated_from"] == "p"
    assert stats(fleet, "p").migrated == stats(fleet, "p").handed_over == 1


def test_what_is_complete_goes_ahead_while_tokens_are_drawn():
    """The handoff itself moves only what was drawn since."""
    fleet, job = started(20)
    fleet.migrate(job, "d")
    fleet.finish()
    copy, *more, handoff = offers(fleet)
    assert copy.request is None and len(copy.blocks) >= 7 and handoff.migrates
    assert stats(fleet, "d").blocks_reused >= 7
    assert len(handoff.tokens) > sum(len(offer.blocks) * BLOCK for offer in (copy, *more))
    assert handoff.tokens.tolist() == [*PROMPT[:13], *job.got[0][: len(handoff.tokens) - 13]]


def test_copies_follow_each_other_until_little_is_left(monkeypatch):
    """Each is of what was drawn during the one before."""
    monkeypatch.setattr(migration, "_LITTLE_BLOCKS", 0)
    fleet, job = started(4, max_tokens=60)
    fleet.migrate(job, "d")
    fleet.finish()
    copies = [offer for offer in offers(fleet) if offer.request is None]
    assert 1 < len(copies) <= migration._COPIES_MAX
    assert [copy.first_block for copy in copies[1:]] == [c.first_block + len(c.blocks) for c in copies[:-1]]
    assert fleet.handed_over == ["a#0"]


BY_LAYER = {"hbm": 20, "dram": 60, "layerwise": "auto", "link_bytes_s": 1e15, "running": 4}


@pytest.mark.parametrize("acts", range(8, 48, 5))
def test_kv_by_layer_leaves_and_what_comes_up_is_not_copied(acts):
    """Of two answers that do not fit one lies by layer: both are to go on elsewhere, and back, while it moves."""
    fleet = pair(BY_LAYER, BY_LAYER)
    layers = fleet.members["p"].machine.state.memory.layers
    jobs = [fleet.submit(request(f"r{k}", PROMPT[3 * k : 41 + 3 * k], max_tokens=30), "p") for k in range(2)]
    fleet.run(until=lambda: layers.admitted + layers.converted > 0)
    fleet.run(until=lambda at=fleet.now + acts: fleet.now >= at)
    for target in "dp":
        for job in jobs:
            fleet.migrate(job, target)
        fleet.run(until=lambda at=fleet.now + 60: fleet.now >= at)
    fleet.finish()
    assert not fleet.refused and fleet.handed_over


@pytest.mark.parametrize("acts", range(0, 15, 3))
def test_prompt_by_layer_in_part_leaves_with_its_whole_blocks(acts):
    """Another request made it go down: some of its blocks are in DRAM already, those behind them whole in HBM."""
    sizes = {**BY_LAYER, "hbm": 40, "chunk": 4, "context": 128}
    fleet, chance = pair(sizes, sizes), Random(1)
    layers = fleet.members["p"].machine.state.memory.layers
    prompts = [[chance.randrange(VOCAB) for _ in range(length)] for length in (100, 80)]
    job = fleet.submit(request("a", prompts[0], max_tokens=8), "p")
    fleet.run(until=lambda: computed(fleet, "p") >= 48)
    fleet.submit(request("b", prompts[1], max_tokens=8, n=2), "p")
    fleet.run(until=lambda: layers.converted > 0)
    fleet.run(until=lambda at=fleet.now + acts: fleet.now >= at)
    assert not job.got
    fleet.migrate(job, "d", copies_ahead=False)
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and not fleet.refused


@pytest.mark.parametrize("shape", [{"n": 2}, {"beam_width": 2}, {"max_tokens": 7}])
def test_what_cannot_leave_stays_and_its_router_is_told(shape):
    fleet, job = started(6 if "beam_width" not in shape else 0, **shape)
    fleet.migrate(job, "d")
    fleet.finish()
    assert fleet.stayed[0][0] == "a#0" and not fleet.handed_over and job.attempt == 0


def test_request_with_inexact_kv_stays_where_that_is():
    """The other instance would take it for exact, and cache it."""
    fleet = pair(*2 * [{"hbm": 60, "running": 8, "nonprefix_reuse": True}])
    fleet.submit(request("text", [1, *PROMPT[:30]], max_tokens=1), "p")
    fleet.run()
    job = fleet.submit(request("a", [2, 2, *PROMPT[:30]], max_tokens=30, nonprefix_reuse=True), "p")
    fleet.run(until=lambda: len(job.got.get(0, ())) >= 8)
    fleet.migrate(job, "d")
    fleet.run()
    assert fleet.stayed == [("a#0", "its KV is inexact, and would be taken for exact")]
    assert not offers(fleet) and not fleet.handed_over and job.done and len(job.got[0]) == 30


def test_unknown_request_is_refused():
    fleet, job = started()
    fleet.run()
    fleet.migrate(job, "d")
    fleet.finish()
    assert fleet.stayed == [("a#0", "it is not here")]


def test_a_second_order_changes_nothing():
    """The router repeats it when it hears nothing."""
    fleet, job = started(8)
    for _ in range(3):
        fleet.migrate(job, "d")
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and not fleet.stayed


def test_a_request_that_waits_goes_back_to_the_router():
    """Nothing of it is computed: it need not be computed here."""
    fleet, first = started(2, {"running": 1})
    waiting = fleet.submit(request("b", PROMPT[3:20], max_tokens=5), "p")
    fleet.run(until=lambda: "b#0" in fleet.members["p"].machine.state.groups)
    fleet.migrate(waiting, "d")
    fleet.run(until=lambda: any(isinstance(said, RequestRefused) for said in fleet.members["p"].said))
    assert fleet.members["p"].said[-1].request_id == "b#0" and len(first.got[0]) < 30
    fleet.finish()


def test_a_prompt_under_way_is_finished_first():
    fleet = pair({"chunk": 4, "hbm": 40}, {"hbm": 40})
    job = fleet.submit(request("a", PROMPT[:22], max_tokens=6), "p")
    fleet.run(until=lambda: computed(fleet, "p") >= 4)
    assert not job.got
    fleet.migrate(job, "d")
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and computed(fleet, "p") + computed(fleet, "d") == 22 + 5
    assert computed(fleet, "d") >= 3


def test_a_long_prompt_under_way_has_all_the_time_it_takes():
    """Its KV is offered from its next piece on; only what is complete has to arrive soon."""
    fleet = pair({"chunk": 4, "hbm": 40}, {"hbm": 40})
    job = fleet.submit(request("a", PROMPT[:22], max_tokens=6), "p")
    fleet.run(until=lambda: computed(fleet, "p") >= 4)
    fleet.migrate(job, "d", copies_ahead=False)
    fleet.run(until=lambda: any(offer.migrates for offer in offers(fleet)))
    plans, fleet.members["p"].plans = fleet.members["p"].plans, type(fleet.members["p"].plans)()
    fleet.pass_time(5 * NS_PER_S)
    fleet.members["p"].plans = plans
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and job.attempt == 0 and not fleet.refused


def test_a_full_target_costs_nothing():
    """The copy finds no room, and the request goes on where it is."""
    fleet, job = started(4, target={"hbm": 8}, max_tokens=17)
    other = fleet.submit(request("b", PROMPT[2:20], max_tokens=12), "d")
    fleet.run(until=lambda: len(other.got.get(0, ())) >= 2)
    fleet.migrate(job, "d")
    fleet.finish()
    assert not fleet.handed_over and job.attempt == other.attempt == 0
    assert computed(fleet, "p") == 13 + 16


def test_a_handoff_that_finds_no_room_is_tried_elsewhere():
    """For two seconds; then the router places it anew, from the tokens that the client has."""
    fleet, job = started(4, target={"hbm": 8, "caching": False}, max_tokens=17)
    other = fleet.submit(request("b", PROMPT[2:20], max_tokens=12), "d")
    fleet.run(until=lambda: len(other.got.get(0, ())) >= 2)
    fleet.members["d"].plans.clear()
    fleet.migrate(job, "d", copies_ahead=False)
    fleet.run()
    assert any(isinstance(said, Handoff) for said in fleet.members["p"].said) and not job.done
    fleet.pass_time(3_000_000_000)
    assert fleet.refused and "no instance took it over" in fleet.refused[0].reason
    fleet.kill("d")
    fleet.finish()


def every_moment(end):
    """``end(fleet, job)`` after 0, 1, 2, ... further actions of a migration: every phase that it can be in."""
    for count in range(10_000):
        fleet, job = started(5, max_tokens=16)
        fleet.migrate(job, "d")
        done = 0
        while (choices := fleet.choices()) and done < count:
            do, argument = choices[done % len(choices)]
            do(argument) if argument is not None else do()
            done += 1
        end(fleet, job)
        fleet.finish()
        if done < count:
            return count
    raise AssertionError("no end")


@pytest.mark.parametrize("name", ["p", "d"])
def test_either_end_may_die_at_any_moment(name):
    assert every_moment(lambda fleet, job: fleet.kill(name)) > 30


@pytest.mark.parametrize("name", ["p", "d"])
def test_either_end_may_be_expelled_at_any_moment(name):
    assert every_moment(lambda fleet, job: fleet.expel(name)) > 30


@pytest.mark.parametrize("name", ["p", "d"])
def test_either_end_may_lose_a_step_at_any_moment(name):
    def fail(fleet, job):
        if fleet.members[name].plans:
            fleet.members[name].do_plan(fail=1)

    assert every_moment(fail) > 30


def test_a_request_may_wander():
    """From instance to instance and back, each time behind a few tokens."""
    fleet, job = started(3, max_tokens=40)
    for place, target in enumerate("dpdp", 1):
        fleet.migrate(job, target)
        fleet.run(until=lambda least=place: len(fleet.handed_over) >= least)
        fleet.run(until=lambda least=7 * place: len(job.got[0]) >= least)
    fleet.finish()
    assert len(fleet.handed_over) == 4 and job.attempt == 0 and job.final[0] is FinishReason.LENGTH
    assert computed(fleet, "p") + computed(fleet, "d") == 13 + 39
