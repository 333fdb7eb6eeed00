"""Disaggregated inference: a prompt here, its answer there, and every way in which that may end."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from fleet_world import ROUTER_PEER, TransferMode, computed, pair, stats, story_of
from instance_world import PROMPT, VOCAB, plans_of, request
from memserve.base.states import StatePages
from memserve.base.types import FinishReason
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import (
    Cancel,
    Dispatch,
    Handoff,
    Offer,
    StopSequence,
    Withdraw,
)
from memserve_lab.sim.reference.oracle import lone_tokens

MODES = list(TransferMode)


# -- disaggregated inference


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_disaggregated_conversation_equals_colocated(mode, level):
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


def test_one_token_answer_is_not_handed_over():
    """``max_tokens=1``: nothing is offered. A first token that ends the request: the offer is taken back."""
    fleet = pair()
    fleet.submit(request("one", PROMPT[:9], max_tokens=1), "p", "d")
    stop = lone_tokens(PROMPT[:9], 1, 5, 0, VOCAB)
    fleet.submit(request("stops", PROMPT[:9], max_tokens=8, seed=5, stops=stop), "p", "d")
    fleet.finish()
    assert not fleet.handed_over and not fleet.refused
    assert any(isinstance(message, Withdraw) for message in fleet.members["p"].said)
    assert stats(fleet, "d").requests_rejected == 0


def test_ended_samples_are_not_handed_over():
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


def test_decode_instance_takes_handoff_when_room_returns():
    """The decode instance is full; the offer waits, and so do the blocks of the prefill side."""
    fleet = pair({}, {"hbm": 8, "caching": False})
    fleet.submit(request("long", PROMPT[:20], max_tokens=8), "d")
    fleet.run(until=lambda: stats(fleet, "d").sequences_running == 1)
    fleet.submit(request("a", PROMPT[5:21], max_tokens=6), "p", "d")
    fleet.finish()
    assert fleet.handed_over == ["a#0"] and not fleet.refused


def test_landed_sequence_keeps_blocks_while_waiting_for_a_slot():
    """One slot, three answers to give: no prompt token is computed at the decode instance."""
    fleet = pair({}, {"running": 1, "hbm": 40})
    for number in range(3):
        fleet.submit(request(f"r{number}", PROMPT[number : number + 10], max_tokens=6), "p", "d")
    fleet.finish()
    assert computed(fleet, "d") == 3 * 5 and len(fleet.handed_over) == 3


def test_landed_sequences_are_preempted_and_recomputed():
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
def test_death_of_either_side_in_any_phase_costs_no_token(victim, end):
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


def test_handoff_by_layer_works_without_layer_reports():
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


@pytest.mark.parametrize("kind", [{}, {"states": StatePages(200, 2)}])
@pytest.mark.parametrize("blocks", [9, 12, 15])
def test_full_instances_do_not_wait_for_each_other(kind, blocks):
    """All of "p" waits to be decoded; "d" lacks the blocks that it sends back, for which "p" has no room."""
    state_blocks = 2 if kind else 0
    sizes = {"dram": 40, "context": 17, **kind}
    fleet = pair({"hbm": blocks, **sizes}, {"hbm": 4 + state_blocks, **sizes})
    chance = Random(1)
    jobs = [
        fleet.submit(
            request(f"r{k}", [chance.randrange(VOCAB) for _ in range(11)], max_tokens=6), "p", "d", return_kv=True
        )
        for k in range(6)
    ]
    fleet.run()
    for _ in jobs:
        fleet.pass_time(NS_PER_S // 8)
    assert all(job.done and job.attempt == 0 for job in jobs) and not fleet.refused
    fleet.finish()


def test_a_deadline_ends_a_request_on_its_way():
    """The client's patience ends while the KV travels: both sides give up, one of them says so."""
    fleet = pair()
    fleet.lose = lambda sender, to, message: isinstance(message, Handoff)
    job = fleet.submit(request("a", PROMPT[:10], max_tokens=5), "p", "d", deadline_in_ns=10**6)
    fleet.run()
    assert len(job.got[0]) == 1 and fleet.members["d"].machine.next_deadline_ns < 2 * 10**6
    fleet.pass_time(10**6)
    assert job.final == {0: FinishReason.DEADLINE} and stats(fleet, "d").transfers_open == 0


def test_declined_handoff_leaves_request_at_prefill_instance():
    """The decode instance's queue is full. It says so, and the prefill instance goes on by itself until it is told."""
    fleet = pair({"chunk": 1}, {"running": 1, "waiting": 1})
    for number in range(2):
        fleet.submit(request(f"busy{number}", PROMPT[number : number + 4], max_tokens=40), "d")
    fleet.run(until=lambda: stats(fleet, "d").sequences_running == 1)
    fleet.attempt = lambda job: None  # the router is slow
    job = fleet.submit(request("a", PROMPT[:20], max_tokens=5), "p", "d")
    fleet.run()
    assert job.done and job.attempt == 0 and "queue is full" in fleet.refused[0].reason
    assert "queue is full" in story_of(job)["handoff_not_made"]
