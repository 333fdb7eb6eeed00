"""Stories of instances in a cluster: a prompt here, its answer there, KV that is fetched, returned, pinned and told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_world import BLOCK, GEOMETRY, ROUTER_PEER, Fleet, TransferMode, fleet_config, story_of
from instance_world import PROMPT, VOCAB, plans_of, request
from memserve.config import ExchangeConfig, PoolConfig
from memserve.instance.events import ClockTicked, MessageArrived
from memserve.instance.fetching import GATHER_NS
from memserve.instance.machine import Instance
from memserve.instance.pins import Pins
from memserve.mempool.identity import block_identities, namespace_id
from memserve.mempool.pool import BlockPool
from memserve.messages import (
    AskAttempts,
    AskEvents,
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Drain,
    Expelled,
    Fetch,
    Handoff,
    Holder,
    JoinAccepted,
    KvEvents,
    KvSnapshot,
    Offer,
    Peer,
    Pin,
    Pinned,
    StopSequence,
    Tokens,
    Unpin,
    Withdraw,
)
from memserve.policy.costs import CopyCurve, CostModel, DecodeCurve, PrefillCurve
from memserve.policy.reuse import PreemptionCosts
from memserve.serving import Send
from memserve.sim.fuzz.truth import lone_tokens
from memserve.types import FinishReason, Tier
from memserve.units import NS_PER_S

MODES = list(TransferMode)


def pair(p=None, d=None):
    return Fleet(p=fleet_config(**(p or {})), d=fleet_config(**(d or {})))


def computed(fleet, name):
    return fleet.members[name].device.computed_tokens


def stats(fleet, name):
    return fleet.members[name].machine.stats()


# -- disaggregated inference


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_conversation_through_prefill_and_decode_is_as_if_alone(mode, level):
    """Six turns at each caching level of MemServe 5.1. What each saves is visible in what is computed and sent."""
    fleet = pair({"caching": level >= 1, "hbm": 40}, {"caching": level >= 2, "hbm": 40})
    history = PROMPT[:9]
    for turn in range(6):
        job = fleet.submit(
            request(f"t{turn}", history, max_tokens=5, seed=turn), "p", "d", transfer=mode, return_kv=level == 3
        )
        fleet.run()
        history = [*history, *job.got[0], turn % VOCAB]
    assert len(fleet.handed_over) == 6 and not fleet.refused
    p, d = stats(fleet, "p"), stats(fleet, "d")
    assert (p.cached_tokens > 0) == (level >= 1)  # what P computed once it has
    assert (d.blocks_reused > 0) == (level >= 2)  # P sends D only what is new
    assert (p.blocks_come_home > 0) == (level == 3)
    assert d.computed_tokens == 6 * 4  # D computes no prompt token, ever
    fleet.finish()


def test_each_caching_level_saves_what_the_paper_says():
    """The same six turns: caching-1 saves prefill at P, caching-2 saves bytes to D, caching-3 makes P's reuse grow."""
    prefilled, received, reused_by_turn = [], [], []
    for level in range(4):
        fleet = pair({"caching": level >= 1, "hbm": 60}, {"caching": level >= 2, "hbm": 60})
        history, cached = PROMPT[:13], []
        for turn in range(5):
            job = fleet.submit(request(f"t{turn}", history, max_tokens=7), "p", "d", return_kv=level == 3)
            fleet.run()
            history = [*history, *job.got[0], 1]
            cached.append(job.cached[0])
        prefilled.append(computed(fleet, "p"))
        received.append(stats(fleet, "d").blocks_received)
        reused_by_turn.append(cached)
        fleet.finish()
    assert prefilled[0] > prefilled[1] == prefilled[2] > prefilled[3]
    assert received[0] == received[1] > received[2] >= received[3]
    assert all(behind >= before for behind, before in zip(reused_by_turn[3], reused_by_turn[2], strict=True))
    assert sum(reused_by_turn[3]) > sum(reused_by_turn[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 0), (3, 0), (2, 3)])
@pytest.mark.parametrize("tokens", [1, 8, 9, 22])
def test_every_shape_of_request_is_handed_over(mode, shape, tokens):
    """One, three parallel samples, beams; prompts that fill their last block, and such that do not."""
    fleet = pair({"running": 8}, {"running": 8})
    job = fleet.submit(
        request("a", PROMPT[:tokens], max_tokens=6, n=shape[0], beam_width=shape[1]), "p", "d", transfer=mode
    )
    fleet.finish()
    assert job.attempt == 0 and fleet.handed_over == ["a#0"]
    assert all(reason is FinishReason.LENGTH for reason in job.final.values())


def test_by_layer_pulls_while_the_prefill_goes_on():
    """MemServe 5.2: the first layer of a chunk is on its way before the chunk is done."""
    fleet = pair({"depth": 1}, {})
    p, d = fleet.members["p"], fleet.members["d"]
    fleet.submit(request("a", PROMPT[:7], max_tokens=4), "p", "d", transfer=TransferMode.BY_LAYER)
    fleet.run(until=lambda: p.layers_told == 1)
    for _ in range(50):
        for wire in list(fleet.wires):
            fleet.deliver(wire)
        for member in (p, d):
            if member.jobs:
                member.do_job()
    assert p.plans and p.layers_told == 1, "the only plan is still under way"
    assert d.machine.stats().bytes_received == 64, "and the first layer of its two blocks is at the other end"
    fleet.finish()


def test_modes_without_layers_ask_the_device_for_none():
    """Reporting layers costs; plain requests and whole-request transfers do without."""
    for mode, asked in ((TransferMode.BY_LAYER, True), (TransferMode.BY_REQUEST, False), (None, False)):
        fleet = pair()
        member = fleet.members["p"]
        decode_at = fleet.members["d"].peer if mode else None
        order = Dispatch(request("a", PROMPT[:5]), decode_at=decode_at, transfer=mode or TransferMode.BY_LAYER)
        plans = plans_of(member.hear(order))
        assert plans and all(plan.report_layers == asked for plan in plans[:1])


def test_an_answer_of_one_token_needs_nobody_else():
    """``max_tokens=1``: nothing is offered. A first token that ends the request: the offer is taken back."""
    fleet = pair()
    fleet.submit(request("one", PROMPT[:9], max_tokens=1), "p", "d")
    stop = lone_tokens(PROMPT[:9], 1, 5, 0, VOCAB)
    fleet.submit(request("stops", PROMPT[:9], max_tokens=8, seed=5, stops=stop), "p", "d")
    fleet.finish()
    assert not fleet.handed_over and not fleet.refused
    assert any(isinstance(message, Withdraw) for message in fleet.members["p"].said)
    assert stats(fleet, "d").requests_rejected == 0


def test_samples_that_end_at_once_are_not_handed_over_with_the_others():
    """``n = 3``, one draws the stop token first; or its stop string was found while the KV was on its way."""
    firsts = [lone_tokens(PROMPT[:9], 1, 2, index, VOCAB)[0] for index in range(3)]
    fleet = pair({"running": 8}, {"running": 8})
    job = fleet.submit(request("a", PROMPT[:9], max_tokens=6, seed=2, n=3, stops=[firsts[1]]), "p", "d")
    fleet.run(until=lambda: any(isinstance(message, Handoff) for message in fleet.members["p"].said))
    left = [index for index in range(3) if firsts[index] != firsts[1]]
    for name in "pd":
        fleet.send(ROUTER_PEER, fleet.members[name].peer, StopSequence("a#0", left[0]))
    fleet.run()
    assert job.final[1] is FinishReason.STOP and job.got[1] == [firsts[1]]
    assert job.final[left[0]] is FinishReason.STOP and len(job.got[left[0]]) < 6
    assert fleet.handed_over == ["a#0"]


def test_a_taker_without_room_takes_it_when_there_is():
    """The decode instance is full; the offer waits, and so do the blocks of the prefill side."""
    fleet = pair({}, {"hbm": 8, "caching": False})
    fleet.submit(request("long", PROMPT[:20], max_tokens=8), "d")
    fleet.run(until=lambda: stats(fleet, "d").sequences_running == 1)
    fleet.submit(request("a", PROMPT[5:21], max_tokens=6), "p", "d")
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and not fleet.refused


def test_what_landed_waits_for_a_slot_without_losing_its_blocks():
    """One slot, three answers to give: no prompt token is computed at the decode instance."""
    fleet = pair({}, {"running": 1, "hbm": 40})
    for number in range(3):
        fleet.submit(request(f"r{number}", PROMPT[number : number + 10], max_tokens=6), "p", "d")
    fleet.finish()
    assert computed(fleet, "d") == 3 * 5 and len(fleet.handed_over) == 3


def test_what_landed_makes_room_for_a_higher_rank_and_is_computed_again():
    """Memory runs out while landed sequences hold most of it: they lose their blocks, not their tokens."""
    fleet = pair({"hbm": 40}, {"running": 1, "hbm": 11, "caching": False})
    fleet.submit(request("first", PROMPT[:12], max_tokens=22, priority=0), "p", "d")
    fleet.run(until=lambda: stats(fleet, "d").sequences_running == 1)
    fleet.submit(request("second", PROMPT[2:17], max_tokens=5, priority=1), "p", "d")
    fleet.finish()
    assert stats(fleet, "d").preemptions_recompute > 0 and not fleet.refused


# -- endings


def phases(submit, end):
    """Do ``end`` after 0, 1, 2, ... actions of the same history: every phase that a request can be in."""
    for count in range(10_000):
        fleet = pair({"chunk": 4}, {})
        submit(fleet)
        done = 0
        while (choices := fleet.choices()) and done < count:
            do, argument = choices[done % len(choices)]
            do(argument) if argument is not None else do()
            done += 1
        end(fleet)
        fleet.finish()
        if done < count:
            return count
    raise AssertionError("no end")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 0), (2, 0)])
def test_cancelling_in_every_phase_leaves_nothing(mode, shape):
    """The browser tab is closed: queued, prefilling, offered, pulled, handed over, decoding, returning."""

    def submit(fleet):
        req = request("a", PROMPT[:10], max_tokens=4, n=shape[0], beam_width=shape[1])
        fleet.submit(req, "p", "d", transfer=mode, return_kv=True)

    def cancel(fleet):
        job = fleet.jobs.pop("a")
        for name in "pd":
            fleet.send(ROUTER_PEER, fleet.members[name].peer, Cancel(job.attempt_id))

    assert phases(submit, cancel) > 20


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("end", ["kill", "expel"])
def test_the_end_of_either_side_in_every_phase_costs_no_token(victim, end):
    """Power failure, or a pause that was taken for one: the request goes on elsewhere from what the client has."""

    def submit(fleet):
        fleet.submit(request("a", PROMPT[:10], max_tokens=4, n=2), "p", "d", transfer=TransferMode.BY_LAYER)

    assert phases(submit, lambda fleet: getattr(fleet, end)(victim)) > 30


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_failed_step_in_every_phase_costs_no_token(victim):
    """The device ran out of memory for a moment; nothing that was offered or landed can be relied upon."""

    def submit(fleet):
        fleet.submit(request("a", PROMPT[:10], max_tokens=5), "p", "d", return_kv=True)

    def fail(fleet):
        if fleet.members[victim].plans:
            fleet.members[victim].do_plan(fail=1)

    assert phases(submit, fail) > 30


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("shape", [(1, 0), (3, 0), (1, 2)])
@pytest.mark.parametrize("losing", [False, True])
def test_preemption_in_every_phase_costs_no_token(victim, shape, losing):
    """Memory stands still: handoffs under way begin anew, or stay; even if the word of it is lost."""

    def submit(fleet):
        fleet.submit(request("a", PROMPT[:10], max_tokens=5, n=shape[0], beam_width=shape[1]), "p", "d")

    def take_all(fleet):
        fleet.lose = lambda sender, to, message: losing and isinstance(message, Withdraw)
        fleet.members[victim].stand_still()
        fleet.run()
        assert fleet.jobs["a"].attempt == 0 and fleet.jobs["a"].done

    assert phases(submit, take_all) > 20


def test_a_device_that_tells_no_layers_hands_over_by_layer_all_the_same():
    """A forward that cannot report: the end of the step says it for all layers."""
    fleet = pair()
    fleet.members["p"].tells_layers = False
    fleet.submit(request("a", PROMPT[:21], max_tokens=5), "p", "d", transfer=TransferMode.BY_LAYER)
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and not fleet.refused


@pytest.mark.parametrize("wrong", [((1, 2),), ((), ()), ((),)])
def test_a_handoff_that_contradicts_its_request_is_not_used(wrong):
    """First tokens that do not fit the KV: a bug of the sender must not become wrong text."""
    fleet = pair()
    d, seen = fleet.members["d"], []

    def tampers(sender, to, message):
        if isinstance(message, Handoff) and not seen:
            seen.append(message)
            fleet.wires[sender, to].append(replaced(message, wrong))
            return True
        return False

    fleet.lose = tampers
    job = fleet.submit(request("a", PROMPT[:10], max_tokens=5), "p", "d")
    fleet.finish()
    assert job.attempt == 1 and any("contradicts" in refused.reason for refused in fleet.refused)
    assert d.machine.stats().takeovers_failed == 1


def test_kv_of_one_tenant_is_not_used_for_another():
    """An offer says "red", its request says "blue": nothing of it is read."""
    fleet = pair()
    seen = []

    def tampers(sender, to, message):
        if isinstance(message, Offer) and not seen:
            seen.append(message)
            changed = msgspec.structs.replace(message.request, tenant="blue")
            fleet.send(sender, to, msgspec.structs.replace(message, request=changed))
            return True
        return False

    fleet.lose = tampers
    job = fleet.submit(request("a", PROMPT[:10], max_tokens=5, tenant="red"), "p", "d")
    fleet.finish()
    assert job.attempt == 1 and len(fleet.refused) >= 1


def replaced(handoff, first_tokens):
    return Handoff(handoff.transfer_id, first_tokens, handoff.ended)


def test_any_one_message_may_be_lost():
    """Each message of a handoff with a return, in turn. Deadlines end every wait, and the router tries again."""
    lost = []
    for unlucky in range(100):
        fleet = pair({"chunk": 4}, {})
        sent = []

        def loses(sender, to, message, sent=sent, unlucky=unlucky):
            sent.append(message)
            return len(sent) == unlucky + 1

        fleet.lose = loses
        fleet.submit(request("a", PROMPT[:10], max_tokens=4), "p", "d", return_kv=True)
        fleet.finish()
        if len(sent) <= unlucky:
            break
        lost.append(type(sent[unlucky]).__name__)
    assert {"Dispatch", "Offer", "Ready", "Handoff", "Release", "Tokens", "HandedOver", "KvEvents"} <= set(lost)


def test_a_corrupted_page_is_never_read():
    """A cable, a bug, a cosmic ray: the checksum differs, the request goes on elsewhere, it is counted."""
    fleet = pair()
    fleet.members["d"].corrupt_pulls = 1
    job = fleet.submit(request("a", PROMPT[:10], max_tokens=5), "p", "d")
    fleet.finish()
    assert job.attempt > 0 and stats(fleet, "d").checksum_mismatches > 0


def test_a_deadline_ends_a_request_on_its_way():
    """The client's patience ends while the KV travels: both sides give up, one of them says so."""
    fleet = pair()
    fleet.lose = lambda sender, to, message: isinstance(message, Handoff)
    job = fleet.submit(request("a", PROMPT[:10], max_tokens=5), "p", "d", deadline_in_ns=10**6)
    fleet.run()
    assert len(job.got[0]) == 1 and fleet.members["d"].machine.next_deadline_ns < 2 * 10**6
    fleet.pass_time(10**6)
    assert job.final == {0: FinishReason.DEADLINE} and stats(fleet, "d").transfers_open == 0


def test_a_taker_that_declines_leaves_the_request_where_it_is():
    """The decode instance's queue is full. It says so, and whoever prefills goes on by itself until it is told."""
    fleet = pair({"chunk": 1}, {"running": 1, "waiting": 1})
    for number in range(2):
        fleet.submit(request(f"busy{number}", PROMPT[number : number + 4], max_tokens=40), "d")
    fleet.run(until=lambda: stats(fleet, "d").sequences_running == 1)
    fleet.attempt = lambda job: None  # the router is slow
    job = fleet.submit(request("a", PROMPT[:20], max_tokens=5), "p", "d")
    fleet.run()
    assert job.done and job.attempt == 0 and "queue is full" in fleet.refused[0].reason
    assert "queue is full" in story_of(job)["handoff_not_made"]


# -- resumed requests


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("decode_at", [None, "d"])
@pytest.mark.parametrize("given", [1, 4])
def test_a_resumed_request_continues_exactly(n, decode_at, given):
    """The instance died after some tokens; logprobs and endings go on as if nothing had happened."""
    fleet = pair({"running": 8}, {"running": 8})
    req = request("a", PROMPT[:9], max_tokens=8, n=n, seed=3, logprobs=0)
    job = fleet.submit(msgspec.structs.replace(req, request_id="elsewhere"), "p")
    fleet.run()
    whole = {index: list(tokens) for index, tokens in job.got.items()}
    members = fleet.members
    order = Dispatch(
        msgspec.structs.replace(req, request_id="a#0"),
        generated=tuple(tuple(whole[index][:given]) for index in range(n)),
        decode_at=members[decode_at].peer if decode_at else None,
    )
    before = len(members["p"].said)
    members["p"].hear(order)
    fleet.run()
    said = members["p"].said[before:] + (members["d"].said if decode_at else [])
    outputs = [output for message in said if isinstance(message, Tokens) for output in message.outputs]
    for index in range(n):
        mine = [output for output in outputs if output.index == index]
        assert mine[0].offset == given and [t for o in mine for t in o.tokens] == whole[index][given:]
        assert [e.token for o in mine for e in o.logprobs] == whole[index][given:]
        assert mine[-1].finish_reason is FinishReason.LENGTH
    assert ("a#0" in fleet.handed_over) == (decode_at is not None and n == 1)


def test_a_resumed_sequence_is_opened_with_its_tokens_behind_its_prompt():
    """Penalties and seeds depend on what is prompt and what is generated: the device is told."""
    fleet = pair()
    sampling = replace(request("x", [1]).sampling, frequency_penalty=0.5, seed=9)
    req = msgspec.structs.replace(request("a", PROMPT[:9], max_tokens=8), sampling=sampling)
    (plan, *_) = plans_of(fleet.members["p"].hear(Dispatch(req, generated=((1, 2, 3),))))
    (opened,) = plan.open
    assert opened.tokens.tolist() == [*PROMPT[:9], 1, 2, 3] and opened.prompt_tokens == 9
    assert opened.sampling == sampling and plan.num_tokens == min(8, 12)


def test_sequences_that_have_ended_are_not_resumed_and_known_ends_are_told():
    """Of three samples one had ended; of another the client has all tokens but not the word that it is over."""
    fleet = pair({"running": 8}, {})
    tokens = [lone_tokens(PROMPT[:9], 6, 3, index, VOCAB) for index in range(3)]
    req = request("a", PROMPT[:9], max_tokens=6, n=3, seed=3)
    generated = (tuple(tokens[0][:2]), tuple(tokens[1]), tuple(tokens[2][:4]))
    member = fleet.members["p"]
    member.hear(Dispatch(req, generated=generated, ended=(0,)))
    fleet.run()
    outputs = [o for m in member.said if isinstance(m, Tokens) for o in m.outputs]
    assert {o.index for o in outputs} == {1, 2}
    assert [o.tokens for o in outputs if o.index == 1] == [()] and outputs[0].finish_reason is FinishReason.LENGTH
    assert [t for o in outputs if o.index == 2 for t in o.tokens] == tokens[2][4:]


def test_a_resumed_beam_search_starts_over():
    """It has emitted nothing before its end."""
    fleet = pair({"running": 8}, {"running": 8})
    job = fleet.submit(request("a", PROMPT[:9], max_tokens=6, n=2, beam_width=3), "p", "d")
    fleet.run(until=lambda: fleet.handed_over)
    fleet.kill("d")
    fleet.finish()
    assert job.attempt == 1


@pytest.mark.parametrize("wrong", [{"generated": ((1,),)}, {"generated": ((1,), (2,), (3,))}, {"ended": (5,)}])
def test_orders_that_contradict_themselves_are_refused(wrong):
    """Nobody of ours gives them; a half-understood order must not run."""
    fleet = pair()
    fleet.members["p"].hear(Dispatch(request("a", PROMPT[:9], n=2), **wrong))
    fleet.run()
    assert [refused.request_id for refused in fleet.refused] == ["a"] and fleet.members["p"].machine.is_idle


# -- returns and fetches


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


def with_costs(fleet, name, **curves):
    """``name`` starts anew with a profile: computing takes 1 us a token, and whatever ``curves`` say."""
    free = {"prefill": PrefillCurve(0, 1000, 0), "decode": DecodeCurve(0, 0, 0)}
    member = fleet.members[name]
    costs = PreemptionCosts(GEOMETRY.block_bytes, profile=CostModel(**free | curves, machine="here"))
    member.machine = Instance(member.cfg, BLOCK, costs, me=member.peer, geometry=GEOMETRY)
    fleet.welcome_all()
    fleet.run()
    return member


def fetches_of(member):
    return [len(message.tokens) for message in member.said if isinstance(message, Fetch)]


def test_requests_that_come_together_share_the_link_by_what_they_save():
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


def test_one_request_at_an_idle_instance_asks_at_once():
    fleet = Fleet(p=fleet_config(), d=fleet_config())
    fleet.submit(request("a", PROMPT[:17], max_tokens=3), "p")
    fleet.run()
    d = fleet.members["d"]
    fleet.submit(request("b", PROMPT[:18], max_tokens=3), "d", None, holders=(Holder(fleet.members["p"].peer, 16),))
    fleet.deliver(next(iter(fleet.wires)))
    assert fetches_of(d) == [16] and not d.machine._link.fetches.undecided
    fleet.finish()


def test_a_request_that_ends_before_it_is_decided_leaves_nothing():
    fleet = Fleet(p=fleet_config(), d=fleet_config())
    d, peer = fleet.members["d"], fleet.members["p"].peer
    fleet.submit(request("busy", PROMPT[:3], max_tokens=9), "d")
    fleet.run(until=lambda: d.plans)
    d.hear(Dispatch(request("gone", PROMPT[:18]), holders=(Holder(peer, 16),)))
    assert d.machine._link.fetches.undecided
    d.hear(Cancel("gone"))
    assert not d.machine._link.fetches.undecided and d.machine._link.fetches.decide_at_ns is None
    fleet.finish()


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


# -- pins


def tokens_of(count):
    return np.asarray(PROMPT[:count], np.int32)


def test_a_pinned_prefix_outlives_pressure_until_its_time_is_over():
    """A document is opened; others fill the cache; its questions still find it."""
    fleet = Fleet(p=fleet_config(hbm=12))
    member = fleet.members["p"]
    for name, start in (("doc", 0), ("noise", 11)):
        fleet.submit(request(name, PROMPT[start : start + 17], max_tokens=2), "p")
        fleet.run()
        if name == "doc":
            member.hear(Pin("doc", "", tokens_of(17), 5 * NS_PER_S))
            assert Pinned("doc", 16) in member.said and stats(fleet, "p").pins == 1
    for number in range(3):
        fleet.submit(request(f"more{number}", PROMPT[20 - number : 38], max_tokens=2), "p")
        fleet.run()
    assert member.machine.pool.match("", tokens_of(17)) == 16
    deadline = member.machine.next_deadline_ns
    fleet.now = deadline
    member.post(ClockTicked())
    assert stats(fleet, "p").pins == 0 and member.machine.next_deadline_ns is None
    fleet.finish()


def test_a_pin_is_renewed_extended_and_given_up():
    """A conversation goes on under one name."""
    fleet = Fleet(p=fleet_config())
    member = fleet.members["p"]
    fleet.submit(request("a", PROMPT[:25], max_tokens=2), "p")
    fleet.run()
    member.hear(Pin("s", "", tokens_of(9), NS_PER_S))
    member.hear(Pin("s", "", tokens_of(25), 9 * NS_PER_S))
    assert [m.tokens for m in member.said if isinstance(m, Pinned)] == [8, 24]
    assert member.machine.pool.report().by_tier[Tier.HBM].blocks_pinned > 0
    member.hear(Unpin("s"))
    member.hear(Unpin("unknown"))
    assert member.machine.pool.report().by_tier[Tier.HBM].blocks_pinned == 0
    member.hear(Pin("nothing", "", np.asarray([9, 9, 9, 9, 9], np.int32), NS_PER_S))
    assert Pinned("nothing", 0) in member.said and member.machine.next_deadline_ns is None
    fleet.finish()


def test_pins_yield_before_everything_stands_still():
    """The pinned document leaves too little memory for a request that was accepted: the promise is broken, and told."""
    fleet = Fleet(p=fleet_config(hbm=8))
    member = fleet.members["p"]
    fleet.submit(request("doc", PROMPT[:21], max_tokens=2), "p")
    fleet.run()
    member.hear(Pin("doc", "", tokens_of(21), 600 * NS_PER_S))
    fleet.submit(request("big", PROMPT[9:33], max_tokens=6), "p")
    fleet.run()
    assert Pinned("doc", 0) in member.said and stats(fleet, "p").pins == 0
    fleet.finish()


# -- what the cache holds


def test_an_instance_says_which_attempts_it_has():
    """The router compares totals, and asks when they differ (``LossDetector``). A member that left is known until it is
    taken over; in the next incarnation nothing was ever heard or told."""
    fleet = pair()
    p = fleet.members["p"]
    assert (p.machine.load().dispatches_heard, p.machine.load().answers_told) == (0, 0)
    fleet.submit(request("here", PROMPT[:9], max_tokens=5), "p")
    fleet.submit(request("leaves", PROMPT[9:30], max_tokens=5), "p", "d")
    fleet.run(until=lambda: "leaves#0" in p.machine._link.handoffs.left.values())
    p.hear(AskAttempts(("lost#0", "here#0", "leaves#0"), 3))
    told = sum(isinstance(message, Tokens) for message in p.said)
    assert p.said[-1] == AttemptsUnknown(("lost#0",), dispatches=3, dispatches_heard=2, answers_told=told) and told
    fleet.run()
    p.hear(AskAttempts(("here#0", "leaves#0"), 2))
    told = sum(isinstance(message, Tokens) for message in p.said)
    assert p.said[-1] == AttemptsUnknown(("here#0", "leaves#0"), 2, 2, told)
    assert (p.machine.load().dispatches_heard, p.machine.load().answers_told) == (2, told)
    fleet.finish()
    p.machine.reborn(Peer("p", 2))
    assert (p.machine.load().dispatches_heard, p.machine.load().answers_told) == (0, 0)


class Follower:
    """A simple tree of one instance: numbered changes, applied in order."""

    def __init__(self):
        self.held, self.next = {}, 0

    def hear(self, message):
        if isinstance(message, KvSnapshot):
            self.held = {}
            for tier, packed in ((Tier.HBM, message.hbm), (Tier.DRAM, message.dram)):
                self.held.update({packed[at : at + 16]: tier for at in range(0, len(packed), 16)})
            self.next = message.next_event
        elif isinstance(message, KvEvents):
            assert message.first == self.next, "a gap"
            self.next += len(message.changes)
            for change in message.changes:
                for at in range(0, len(change.identities), 16):
                    identity = change.identities[at : at + 16]
                    if change.kind == "evicted":
                        del self.held[identity]
                    else:
                        assert (change.kind == "moved") == (identity in self.held)
                        self.held[identity] = change.tier


def busy_with_changes(fleet, rounds=8):
    for number in range(rounds):
        fleet.submit(request(f"r{number}", PROMPT[number * 3 : number * 3 + 14], max_tokens=5), "p")
        fleet.run()


def test_events_and_snapshot_say_what_the_index_holds():
    """The router's tree of an instance whose cache moves between tiers all the time."""
    fleet = Fleet(p=fleet_config(hbm=10, dram=6))
    member = fleet.members["p"]
    busy_with_changes(fleet)
    live, late = Follower(), Follower()
    for message in member.said:
        live.hear(message)
    member.hear(AskEvents(0))
    late.hear(member.said[-1])
    pool = member.machine.pool
    truth = {}
    for tier in (Tier.HBM, Tier.DRAM):
        packed = pool.cached_identities(tier)
        truth.update({packed[at : at + 16]: tier for at in range(0, len(packed), 16)})
        assert len(packed) // 16 == pool.report().by_tier[tier].blocks_cached
    assert live.held == late.held == truth and live.next == late.next == member.machine.next_event
    assert Tier.DRAM in truth.values() and Tier.HBM in truth.values()
    prompt = np.asarray(PROMPT[21:35], np.int32)  # the last one
    identities = block_identities(namespace_id("", member.cfg.namespace), prompt, BLOCK)
    assert len(identities) == 3 and all(identity in truth for identity in identities)
    fleet.finish()


def test_who_missed_events_gets_them_again_or_everything():
    """A message was lost: the ring has the rest. The router was away for long: a snapshot."""
    cfg = replace(fleet_config(hbm=10, dram=6), exchange=ExchangeConfig(event_capacity=6))
    fleet = Fleet(p=cfg)
    member = fleet.members["p"]
    busy_with_changes(fleet)
    last = member.machine.next_event
    for first in range(last + 3):
        before = len(member.said)
        member.hear(AskEvents(first))
        answer = member.said[before:]
        if first == last:
            assert answer == []
        elif last - 6 <= first < last:
            assert isinstance(answer[0], KvEvents) and answer[0].first == first
            assert len(answer[0].changes) == last - first
        else:
            assert isinstance(answer[0], KvSnapshot) and answer[0].next_event == last
    fleet.finish()


def test_a_new_router_is_told_everything_at_once():
    """It was restarted: it knows nothing, and nobody waits for what the old one wanted."""
    fleet = Fleet(p=fleet_config())
    member = fleet.members["p"]
    busy_with_changes(fleet, 2)
    fleet.submit(request("orphan", PROMPT[:9], max_tokens=30), "p")
    fleet.run(until=lambda: stats(fleet, "p").sequences_running == 1)
    newer = Peer(ROUTER_PEER.name, ROUTER_PEER.generation + 1)
    actions = member.machine.handle(MessageArrived(newer, JoinAccepted(())), fleet.now)
    sent = [action for action in actions if isinstance(action, Send)]
    assert any(isinstance(send.message, KvSnapshot) and send.to == newer for send in sent)
    assert stats(fleet, "p").requests_waiting == stats(fleet, "p").sequences_running == 0
    member.hear(Dispatch(request("from the old one", PROMPT[:9])))
    assert stats(fleet, "p").messages_ignored == 1 and stats(fleet, "p").sequences_running == 0


# -- membership


def test_orders_are_taken_from_the_router_only():
    """Another instance has no say in what runs here."""
    fleet = pair()
    member = fleet.members["p"]
    for message in (Dispatch(request("a", PROMPT[:9])), Expelled("go"), Pin("x", "", tokens_of(9), 10**9), Drain()):
        assert member.hear(message, fleet.members["d"].peer) == []
    assert stats(fleet, "p").messages_ignored == 4 and member.machine.is_idle


def test_a_draining_instance_refuses_and_finishes():
    """A rolling update: what runs may end, then it is idle and may leave."""
    fleet = pair()
    member = fleet.members["p"]
    job = fleet.submit(request("a", PROMPT[:9], max_tokens=6), "p")
    fleet.run(until=lambda: stats(fleet, "p").sequences_running == 1)
    member.hear(Drain())
    assert not member.machine.is_idle
    member.hear(Dispatch(request("late", PROMPT[:9])))
    fleet.run()
    assert job.done and [r.request_id for r in fleet.refused] == ["late"] and fleet.refused[0].retry_after_s == 0.0
    assert member.machine.is_idle


def test_an_expelled_instance_keeps_its_cache_and_nothing_else():
    """It was paused for half a minute; others act as if it were dead."""
    fleet = pair()
    member = fleet.members["p"]
    fleet.submit(request("a", PROMPT[:17], max_tokens=6), "p", "d")
    fleet.run()
    fleet.submit(request("b", PROMPT[3:17], max_tokens=6), "p", "d")
    fleet.run(until=lambda: stats(fleet, "p").transfers_open > 0)
    before = len(member.said)
    del fleet.jobs["b"]
    member.hear(Expelled("silent"))
    assert member.said[before:] == [] and not stats(fleet, "p").requests_waiting
    assert member.machine.pool.match("", tokens_of(17)) == 16
    member.machine.reborn(Peer("p", 2))
    assert member.machine.me == Peer("p", 2)
    while member.busy:
        member.do_plan() if member.plans else member.do_job()
    assert member.machine.is_idle and member.machine.next_deadline_ns is None


def test_load_says_what_a_router_must_know():
    """Two prompts wait behind one that decodes."""
    fleet = Fleet(p=fleet_config(running=1, hbm=20))
    member = fleet.members["p"]
    idle = member.machine.load()
    assert (idle.requests_waiting, idle.sequences_running, idle.hbm_blocks_available) == (0, 0, 20)
    for number in range(3):
        fleet.submit(request(f"r{number}", PROMPT[number : number + 9], max_tokens=12), "p")
    fleet.run(until=lambda: len(fleet.jobs["r0"].got.get(0, ())) >= 2)
    load = member.machine.load()
    assert (load.requests_waiting, load.sequences_running) == (2, 1)
    assert load.prefill_tokens_queued == 18 and load.context_tokens_running >= 11
    assert load.hbm_blocks_available < 20
    fleet.finish()


def test_an_idle_instance_has_no_deadline():
    """It must not tick busily."""
    fleet = pair()
    assert fleet.members["p"].machine.next_deadline_ns is None
    fleet.submit(request("a", PROMPT[:9], max_tokens=6), "p", "d", return_kv=True)
    fleet.run()
    fleet.pass_time()
    assert all(member.machine.next_deadline_ns is None for member in fleet.members.values())


def test_outside_a_cluster_there_is_none_of_it():
    """One server on one machine."""
    machine = Instance(fleet_config(), BLOCK)
    assert machine.me is None and machine.next_event == 0 and machine.is_idle
    assert machine.load().hbm_blocks_available == 0


class PlainPins:
    """Names with their ends, looked through each time."""

    def __init__(self):
        self.ends = {}

    def due(self, now):
        self.ends = {handle: (tokens, end) for handle, (tokens, end) in self.ends.items() if end > now}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30), st.integers(0, 25), st.booleans()), max_size=60))
@settings(deadline=None, max_examples=60)
def test_pins_are_what_a_plain_dictionary_says(operations):
    """Pinned, renewed, given up and expired at random: how much is kept, until when, and nothing else."""
    pool = BlockPool(PoolConfig(16, 0), BLOCK, "test")
    blocks = pool.allocate(6)
    pool.insert("", tokens_of(24), blocks, 6)
    pool.release(blocks)
    pins, plain, now = Pins(pool), PlainPins(), 0
    for handle, life, tokens, gives_up in operations:
        now += 3
        pins.expire(now)
        plain.due(now)
        if gives_up:
            pins.unpin(f"h{handle}")
            plain.ends.pop(f"h{handle}", None)
        else:
            kept = pins.pin(f"h{handle}", "", tokens_of(tokens), now + life)
            assert kept == min(tokens, 24) // BLOCK * BLOCK
            plain.ends.pop(f"h{handle}", None)
            if kept:
                plain.ends[f"h{handle}"] = (kept, now + life)
        longest = max((tokens for tokens, _ in plain.ends.values()), default=0)
        assert pool.report().by_tier[Tier.HBM].blocks_pinned == longest // BLOCK
        assert pins.next_deadline_ns == min((end for _, end in plain.ends.values()), default=None)
        assert len(pins) == len(plain.ends)
        assert all(pins.tokens(handle) == tokens for handle, (tokens, _) in plain.ends.items())
    assert pins.release_all() == bool(plain.ends) and sorted(pins.lost) == sorted(plain.ends)
    assert pool.clear_cache() == 6 and pins.next_deadline_ns is None
