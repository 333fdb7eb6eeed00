"""Stories of instances in a cluster: requests that resume, caches that are reported, members that come and go."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fleet_world import BLOCK, ROUTER_PEER, Fleet, fleet_config, pair, stats, tokens_of
from instance_world import PROMPT, VOCAB, plans_of, request
from memserve.base.config import ExchangeConfig
from memserve.base.types import FinishReason, Tier
from memserve.instance.machine import Instance
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.messages import (
    AttemptsUnknown,
    Dispatch,
    Drain,
    Expelled,
    JoinAccepted,
    KvEvents,
    KvSnapshot,
    Pin,
    QueryAttempts,
    QueryKvEvents,
    Tokens,
)
from memserve.protocol.peers import Peer
from memserve_lab.sim.reference.oracle import lone_tokens

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


def test_resumed_sequence_is_opened_with_generated_tokens():
    """Penalties and seeds depend on what is prompt and what is generated: the device is told."""
    fleet = pair()
    sampling = msgspec.structs.replace(request("x", [1]).sampling, frequency_penalty=0.5, seed=9)
    req = msgspec.structs.replace(request("a", PROMPT[:9], max_tokens=8), sampling=sampling)
    (plan, *_) = plans_of(fleet.members["p"].hear(Dispatch(req, generated=((1, 2, 3),))))
    (opened,) = plan.open
    assert opened.tokens.tolist() == [*PROMPT[:9], 1, 2, 3] and opened.prompt_tokens == 9
    assert opened.sampling == sampling and plan.num_tokens == min(8, 12)


def test_ended_sequences_are_not_resumed_and_known_ends_emitted():
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
    """No router of ours gives them; a half-understood order must not run."""
    fleet = pair()
    fleet.members["p"].hear(Dispatch(request("a", PROMPT[:9], n=2), **wrong))
    fleet.run()
    assert [refused.request_id for refused in fleet.refused] == ["a"] and fleet.members["p"].machine.is_idle


# -- what the cache holds


def test_instance_reports_its_attempts():
    """The router compares totals, and asks when they differ (``LossDetector``). A member that left is known until it is
    taken over; in the next incarnation nothing was ever heard or told."""
    fleet = pair()
    p = fleet.members["p"]
    assert (p.machine.load().dispatches_heard, p.machine.load().answers_told) == (0, 0)
    fleet.submit(request("here", PROMPT[:9], max_tokens=5), "p")
    fleet.submit(request("leaves", PROMPT[9:30], max_tokens=5), "p", "d")
    fleet.run(until=lambda: "leaves#0" in p.machine.link.sender.departed.values())
    p.hear(QueryAttempts(("lost#0", "here#0", "leaves#0"), 3))
    told = sum(isinstance(message, Tokens) for message in p.said)
    assert p.said[-1] == AttemptsUnknown(("lost#0",), dispatches=3, dispatches_heard=2, answers_told=told) and told
    fleet.run()
    p.hear(QueryAttempts(("here#0", "leaves#0"), 2))
    told = sum(isinstance(message, Tokens) for message in p.said)
    assert p.said[-1] == AttemptsUnknown(("here#0", "leaves#0"), 2, 2, told)
    assert (p.machine.load().dispatches_heard, p.machine.load().answers_told) == (2, told)
    fleet.finish()
    p.machine.restart_as(Peer("p", 2))
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
    """The router's tree of an instance with a cache that moves between tiers all the time."""
    fleet = Fleet(p=fleet_config(hbm=10, dram=6))
    member = fleet.members["p"]
    busy_with_changes(fleet)
    live, late = Follower(), Follower()
    for message in member.said:
        live.hear(message)
    member.hear(QueryKvEvents(0))
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


def test_missed_events_are_replayed_or_replaced_by_snapshot():
    """A message was lost: the ring has the rest. The router was away for long: a snapshot."""
    cfg = replace(fleet_config(hbm=10, dram=6), exchange=ExchangeConfig(event_capacity=6))
    fleet = Fleet(p=cfg)
    member = fleet.members["p"]
    busy_with_changes(fleet)
    last = member.machine.next_event
    for first in range(last + 3):
        before = len(member.said)
        member.hear(QueryKvEvents(first))
        answer = member.said[before:]
        if first == last:
            assert answer == []
        elif last - 6 <= first < last:
            assert isinstance(answer[0], KvEvents) and answer[0].first == first
            assert len(answer[0].changes) == last - first
        else:
            assert isinstance(answer[0], KvSnapshot) and answer[0].next_event == last
    fleet.finish()


def test_new_router_gets_full_state():
    """It was restarted: it knows nothing, and nothing waits for what the old one wanted."""
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
    member.machine.restart_as(Peer("p", 2))
    assert member.machine.self_peer == Peer("p", 2)
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
    assert machine.self_peer is None and machine.next_event == 0 and machine.is_idle
    assert machine.load().hbm_blocks_available == 0
