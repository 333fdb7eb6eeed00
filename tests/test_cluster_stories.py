"""Stories of the cluster machine: events in, actions out. Each says when it happens in real life."""

from __future__ import annotations

import pytest

from cluster_world import BLOCK, CONTEXT, World, a_request, info, lone_answer, next_token
from memserve.cluster.events import (
    ClockTicked,
    InstanceDrained,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
)
from memserve.errors import UserError
from memserve.mempool.identity import block_identities, namespace_id
from memserve.messages import (
    AskAttempts,
    Cancel,
    Dispatch,
    Drain,
    Expelled,
    HandedOver,
    Heartbeat,
    Join,
    JoinAccepted,
    KvChange,
    KvEvents,
    Leave,
    Load,
    Peer,
    PeerGone,
    PeerJoined,
    Pin,
    Pinned,
    Refused,
    RequestRefused,
    StopSequence,
    Tokens,
    Unpin,
    members_digest,
)
from memserve.types import Caching, FinishReason, KVGeometry, NamedPrefix, Role, Tier, TokenLogprobs, TokenOutput
from memserve.units import NS_PER_S

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))


@pytest.fixture
def make():
    """Builds worlds; at the end each must be repeatable and hold no work of ended requests."""
    worlds = []

    def build(*instances, **config):
        worlds.append(World(instances, **config))
        return worlds[-1]

    yield build
    for world in worlds:
        world.check_repeatable()
        if all(client.done for client in world.clients.values()):
            assert world.cluster.stats().requests_live == 0
            loads = world.cluster._loads
            assert not any(any(loads.own_of(number)) for number in range(len(loads)))


def dispatches(world, actions):
    return world.sent(actions, Dispatch)


def cached(world, name, prompt, tier=Tier.HBM, tenant=""):
    """``name`` says that it has cached the whole blocks of ``prompt``."""
    view = next(v for v in world.cluster.instances() if v.peer.name == name)
    tokens = a_request("", prompt).prompt
    names = b"".join(block_identities(namespace_id(tenant, "ns"), tokens, BLOCK))
    world.hear(view.peer, KvEvents(view.next_event, (KvChange("stored", tier, names),)))


# -- one request


def test_a_request_is_prefilled_here_and_decoded_there(make):
    """The usual way in 1P1D: the first token comes from P, the others from D; the client sees one stream."""
    world = make(("p", P), ("d", D))
    ((to, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT, max_tokens=5, n=2))))
    client = world.clients["r"]
    assert to == "p" and order.decode_at == Peer("d", 1) and order.generated == () and not order.return_kv
    assert order.request.request_id == "r#1" and order.request.deadline_ns is None
    world.run()
    for index in (0, 1):
        assert (client.got[index], client.reasons[index]) == lone_answer(client.request, index)
        assert client.introduced[index] == 1
    assert dict(client.outputs[0].story)["route"] == "p to d" and dict(client.outputs[-1].story)["attempts"] == 1


def test_who_decodes_tells_the_client_what_came_to_it(make):
    """Its first output is the client's second: facts that stand there are told all the same."""
    world = make(("p", P), ("d", D))
    world.post(RequestArrived(a_request("r", PROMPT, max_tokens=5)))
    client = world.clients["r"]
    first, second = lone_answer(client.request, 0)[0][:2]
    world.hear(Peer("p", 1), Tokens((TokenOutput("r#1", 0, (first,), story=(("cached_tokens_hbm", 4),)),)))
    world.hear(Peer("d", 1), Tokens((TokenOutput("r#1", 0, (second,), offset=1, story=(("pulled_blocks", 3),)),)))
    assert [dict(output.story).get("cached_tokens_hbm") for output in client.outputs] == [4, None]
    assert client.outputs[1].story == (("pulled_blocks", 3),)
    world.run()


def test_a_colocated_instance_does_it_alone(make):
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT))
    assert world.instances["c"].heard[-1].decode_at is None
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_generated_kv_goes_home_in_pd_caching_3_only(make):
    for caching in Caching:
        world = make(("p", P), ("d", D), caching=caching)
        ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
        assert order.return_kv == (caching is Caching.PD_CACHING_3)
        trees = {view.peer.name: view.tree_blocks for view in world.cluster.instances()}
        blocks = len(PROMPT) // BLOCK
        on_p, on_d = caching is not Caching.OFF, caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3)
        assert trees == {"p": blocks * on_p, "d": blocks * on_d}, "what is expected to be cached"


def test_kv_of_decode_instances_is_fetched_in_pd_caching_3_only(make):
    """What D holds beyond P's prefix: at lower levels it stays there."""
    for caching in (Caching.PD_CACHING_2, Caching.PD_CACHING_3):
        world = make(("p", P), ("d", D), caching=caching)
        identities = block_identities(namespace_id("", "ns"), PROMPT, BLOCK)
        stored = KvChange("stored", Tier.HBM, b"".join(identities))
        world.hear(Peer("d", 1), KvEvents(0, (stored,)))
        ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
        lenders = [holder.peer.name for holder in order.holders]
        assert lenders == (["d"] if caching is Caching.PD_CACHING_3 else [])


def test_time_in_the_router_is_part_of_the_queue(make):
    """Nobody was there for two seconds, then the instance let it wait for 7 ns."""
    world = make()
    client = world.ask(a_request("r", PROMPT))
    world.wait(2 * NS_PER_S)
    world.add("c", C)
    world.run()
    assert client.outputs[0].queue_ns == 2 * NS_PER_S + 7


def test_prompts_that_fit_nowhere_are_rejected_with_the_numbers(make):
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", [1] * CONTEXT))
    assert client.rejected.retry_after_s is None and str(CONTEXT) in client.rejected.reason
    empty = world.ask(a_request("e", []))
    assert empty.rejected.reason == "the prompt is empty"


def test_an_id_that_is_running_is_not_taken_again(make):
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT))
    again = RequestArrived(a_request("r", PROMPT))
    (action,) = actions = world.cluster.handle(again, world.now)
    world.diary.append((world.now, again, repr(actions)))
    assert "still running" in action.reason
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


# -- out of order, lost, repeated


def test_the_decode_instance_may_be_quicker_than_the_prefill_instance(make):
    """Two processes, two connections: D's second token is here before P's first."""
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, max_tokens=4))
    prefill, decode = world.instances["p"], world.instances["d"]
    prefill.step()
    kept, prefill.outbox = prefill.outbox, []
    world.say_all(prefill)  # the handoff
    for _ in range(3):
        decode.step()
    world.say_all(decode)
    assert client.got == [[]], "nothing can be given to the client"
    world.hear(prefill.peer, kept[0])
    assert (client.got[0], client.reasons[0]) == lone_answer(client.request, 0)


def test_tokens_that_were_lost_are_drawn_again(make):
    """A connection broke with tokens in it; what comes after shows the gap, and the request starts over behind it."""
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=6))
    instance = world.instances["c"]
    world.step()
    instance.step()
    instance.outbox.clear()  # lost
    world.step()
    assert len(client.got[0]) == 1
    world.wait(3 * NS_PER_S)
    order = instance.heard[-1]
    assert isinstance(order, Dispatch) and order.generated == (tuple(client.got[0]),)
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.attempts_failed == {"gap": 1}


def test_repeated_and_late_outputs_are_dropped(make):
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=3))
    instance = world.instances["c"]
    instance.step()
    (first,), instance.outbox = instance.outbox, []
    for _ in range(3):
        world.hear(instance.peer, first)
    world.run()
    world.hear(instance.peer, first)
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.outputs_late == 3


def test_an_output_that_is_partly_known_gives_what_is_new_with_its_logprobs(make):
    """Outputs may carry several tokens; the client has the first of them already."""
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=3))
    answer = lone_answer(client.request, 0)[0]
    logprobs = tuple(TokenLogprobs(token, -0.5) for token in answer)
    world.hear(Peer("c", 1), Tokens((TokenOutput("r#1", 0, (answer[0],), logprobs[:1]),)))
    world.hear(Peer("c", 1), Tokens((TokenOutput("r#1", 0, tuple(answer), logprobs, FinishReason.LENGTH),)))
    assert client.got[0] == answer and client.outputs[-1].logprobs == logprobs[1:]


def test_outputs_of_an_old_attempt_are_dropped_and_their_sender_told(make):
    """The stalled instance wakes up and goes on as if nothing had happened."""
    world = make(("a", C), ("b", C), stalled_after_ns=NS_PER_S, dead_after_ns=100 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    stuck = world.instances["a"]
    assert stuck.running
    held = dict(stuck.running)
    world.wait(2 * NS_PER_S)
    assert world.instances["b"].running and not stuck.running
    stuck.running = held
    stuck.step()
    (late,) = stuck.outbox
    stuck.outbox = []
    assert world.sent(world.hear(stuck.peer, late), Cancel) == [("a", Cancel("r#1"))]
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


@pytest.mark.parametrize("wrong", [
    TokenOutput("r#1", 1, (5,)), TokenOutput("r#1", 0, (1,) * 9), TokenOutput("r#1", 0, (), offset=-1),
    TokenOutput("r#1", 0, (), finish_reason=FinishReason.DEADLINE),
], ids=["index", "too many", "offset", "deadline"])  # fmt: skip
def test_an_output_that_cannot_be_fails_the_attempt(make, wrong):
    """Memory is broken there: nothing more of this attempt is believed."""
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.hear(Peer("a", 1), Tokens((wrong,)))
    assert world.instances["b"].running and not world.instances["a"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.attempts_failed == {"contradiction": 1}


def test_nobody_speaks_for_a_request_that_was_given_to_another(make):
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.hear(Peer("b", 1), Tokens((TokenOutput("r#1", 0, (999,)),)))
    world.hear(Peer("b", 1), HandedOver("r#1"))
    world.hear(Peer("b", 1), RequestRefused("r#1", "not mine"))
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


# -- instances die


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_survives_its_instances(make, victim, steps):
    """kill -9 while it is queued, handed over, decoded: another instance goes on with the client's very tokens."""
    world = make(("p", P), ("d", D), ("p2", P), ("d2", D))
    client = world.ask(a_request("r", PROMPT, max_tokens=6, n=2, stops=[7]))
    first = world.cluster.story("r").attempts[0]
    names = {"p": first.first.name, "d": first.decode_at.name}
    for _ in range(steps):
        world.step()
    before = [list(tokens) for tokens in client.got]
    world.kill(names[victim])
    world.wait(6 * NS_PER_S)
    world.run()
    needed = victim == "d" or steps == 0
    counters = world.cluster.stats().counters
    assert counters.resumptions == needed and counters.attempts_failed == ({"gone": 1} if needed else {})
    for index in (0, 1):
        assert client.got[index][: len(before[index])] == before[index]
        assert (client.got[index], client.reasons[index]) == lone_answer(client.request, index)
        assert client.introduced[index] == 1


def test_those_who_go_on_get_the_tokens_and_the_endings(make):
    """Two of three sequences have ended when D dies: only the third is to be continued."""
    world = make(("c", C), ("c2", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=8, n=3))
    world.step()
    world.step()
    world.stop("r", 1)
    world.kill("c")
    actions = world.hear(Peer("c", 1), Leave())
    ((to, order),) = dispatches(world, actions)
    assert to == "c2" and order.ended == (1,)
    assert order.generated == tuple(tuple(tokens) for tokens in client.got) and len(order.generated[0]) == 2
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0] and len(client.got[1]) == 2


def test_everybody_is_told_that_a_member_is_dead_and_it_is_told_too_when_it_wakes_up(make):
    """SIGSTOP for half a minute: others act at once, the sleeper must begin a new life."""
    world = make(("p", P), ("d", D), ("store", S))
    world.instances["d"].paused = True
    world.wait(6 * NS_PER_S)
    for name in ("p", "store"):
        assert any(isinstance(m, PeerGone) and m.peer == Peer("d", 1) for m in world.instances[name].heard)
    world.resume("d")
    actions = world.hear(Peer("d", 1), Heartbeat(Load()))
    assert [to for to, _ in world.sent(actions, Expelled)] == ["d"]
    world.beat()
    assert world.instances["d"].generation == 2 and world.instances["d"].member
    assert [view.peer for view in world.cluster.instances()] == [Peer("p", 1), Peer("store", 1), Peer("d", 2)]


def test_who_missed_a_member_is_told_again(make):
    """A lost ``PeerJoined``: every handoff to the newcomer would wait for the end of its lease. One heartbeat with the
    wrong digest may have crossed the news; two did not."""
    world = make(("p", P), ("d", D))
    p, d = Peer("p", 1), Peer("d", 1)
    alone, both, ghosts = members_digest([p]), members_digest([d, p]), members_digest([p, d, Peer("ghost", 3)])
    story = ((0, 0), (alone, 0), (both, 0), (alone, 0), (alone, 1), (alone, 0), (ghosts, 1))
    for digest, welcomed in story:
        answers = world.sent(world.hear(p, Heartbeat(Load(), members_digest=digest)), JoinAccepted)
        assert [[i.peer.name for i in welcome.peers] for _, welcome in answers] == [["d"]] * welcomed


def test_who_comes_from_the_past_is_told_which_generation_to_be(make):
    """The wall clock, from which generations come, was set back before it was started again. Its peers would take an
    older incarnation than the dead one for a ghost, and each handoff to it would wait for the lease to end."""
    world = make(("p", P))
    world.hear(Peer("d", 9), Join(info("d", D, 9)))
    world.hear(Peer("d", 9), Leave())
    actions = world.hear(Peer("d", 4), Join(info("d", D, 4)))
    assert world.sent(actions, Expelled) == [("d", Expelled("this incarnation was taken to be dead", 9))]
    assert world.sent(world.hear(Peer("d", 10), Join(info("d", D, 10))), JoinAccepted)
    actions = world.hear(Peer("d", 5), Join(info("d", D, 5)))  # again, and nobody knows yet that the tenth is dead
    assert world.sent(actions, Expelled) == [("d", Expelled("this incarnation was taken to be dead", 10))]


def test_who_goes_on_with_an_answer_has_room_for_it(make):
    """The prompt would fit into the small one, but not what the client has: it would end there, before its time."""
    world = make(("a", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=9))
    world.add("small", C, context_tokens=len(PROMPT) + 2)
    world.add("b", C)
    for _ in range(4):
        world.step("a")
    assert len(client.got[0]) > 2
    world.kill("a")
    world.wait(6 * NS_PER_S)
    assert world.instances["b"].running and not world.instances["small"].running
    world.run()
    assert (client.got[0], client.reasons[0]) == lone_answer(client.request, 0)


def test_a_restart_with_the_same_name_is_somebody_else(make):
    """The supervisor was quicker than the heartbeats: what the old one had is started again at once."""
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.instances["c"].running.clear()
    world.instances["c"].generation = 2
    actions = world.hear(Peer("c", 2), Join(info("c", C, 2)))
    assert isinstance(actions[0].message, JoinAccepted)
    ((_, order),) = dispatches(world, actions)
    assert order.generated == (tuple(client.got[0]),)
    assert world.sent(world.hear(Peer("c", 1), Heartbeat(Load())), Expelled)
    assert world.sent(world.hear(Peer("c", 1), Join(info("c", C, 1))), Expelled), "a late Join of the dead one"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_tokens_of_the_prefill_instance_may_die_with_it(make):
    """P handed over, and died before its first token had left: the gap lasts, so the request starts from nothing."""
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    prefill = world.instances["p"]
    prefill.step()
    prefill.outbox.clear()
    world.say_all(prefill)
    world.say_all(world.instances["d"])
    world.hear(Peer("p", 1), Leave())
    prefill.alive = False
    world.step("d")
    assert client.got == [[]]
    world.wait(3 * NS_PER_S)
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_a_request_that_nobody_can_run_waits_and_is_then_rejected(make):
    world = make(unplaced_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    assert world.cluster.stats().requests_unplaced == 1
    world.wait(3 * NS_PER_S)
    assert not client.done
    world.wait(NS_PER_S)
    assert client.rejected.retry_after_s > 0


def test_a_stream_that_nobody_can_continue_ends_with_an_error(make):
    """The last instance died in the middle of an answer."""
    world = make(("c", C), unplaced_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.kill("c")
    world.wait(10 * NS_PER_S)
    assert client.reasons == [FinishReason.ERROR] and len(client.got[0]) == 1


def test_a_request_that_kills_its_instances_ends_after_some_attempts(make):
    world = make(*[(f"c{k}", C) for k in range(6)], attempts_max=3)
    client = world.ask(a_request("r", PROMPT))
    for _ in range(3):
        (name,) = [i.name for i in world.instances.values() if i.running and i.alive]
        world.kill(name)
        world.hear(Peer(name, 1), Leave())
    assert client.reasons == [FinishReason.ERROR]
    assert dict(client.outputs[-1].story) == {"attempts": 3, "last_failure": "gone"}
    assert world.cluster.stats().counters.dispatches == 3


def test_an_instance_that_goes_on_beating_but_says_nothing_is_given_up(make):
    """Its engine thread hangs, its heartbeat thread does not. The second time more patience is had."""
    world = make(("a", C), ("b", C), stalled_after_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    world.wait(5 * NS_PER_S)
    assert world.instances["b"].running and not world.instances["a"].running
    world.wait(5 * NS_PER_S)
    assert world.instances["b"].running, "a long queue looks the same"
    world.wait(4 * NS_PER_S)
    assert world.instances["a"].running
    world.run()
    assert client.done and world.cluster.stats().counters.attempts_failed == {"stalled": 2}


def test_a_device_that_fails_is_not_the_clients_affair(make):
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.hear(Peer("a", 1), Tokens((TokenOutput("r#1", 0, (), finish_reason=FinishReason.ERROR, offset=1),)))
    assert world.instances["b"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_whoever_has_handed_over_cannot_end_it_any_more(make):
    """Its lease ran out because the release was lost, or it shuts down: the decode instance is not concerned."""
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    world.step("p")
    world.say_all(world.instances["d"])
    world.hear(Peer("p", 1), RequestRefused("r#1", "nobody took it over", 0.0))
    world.hear(Peer("p", 1), Tokens((TokenOutput("r#1", 0, (), finish_reason=FinishReason.CANCELLED, offset=1),)))
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    counters = world.cluster.stats().counters
    assert counters.dispatches == 1 and counters.attempts_failed == {}


def test_a_router_that_slept_does_not_take_all_others_for_dead(make):
    """The router's machine was suspended for a minute: the heartbeats are in its inbox, behind the clock."""
    world = make(("c", C))
    world.ask(a_request("r", PROMPT))
    world.now += 60 * NS_PER_S
    world.post(ClockTicked())
    assert [view.peer.name for view in world.cluster.instances()] == ["c"]
    world.wait(6 * NS_PER_S, beats=False)
    assert world.cluster.instances() == ()


# -- refusals


def test_a_busy_instance_is_passed_over_and_the_client_told_when_all_are(make):
    world = make(("a", C), ("b", C))
    world.instances["a"].refuses = ("the queue is full", 3.0)
    world.ask(a_request("r", PROMPT))
    world.say_all(world.instances["a"])
    assert world.instances["b"].running
    world.instances["b"].refuses = ("the queue is full", 2.0)
    client = world.ask(a_request("q", PROMPT))
    for _ in range(2):
        for instance in world.instances.values():
            world.say_all(instance)
    assert client.rejected.reason == "the queue is full" and client.rejected.retry_after_s == 2.0
    world.run()


def test_refusals_of_busy_instances_are_no_attempts(make):
    """A rush hour: many instances are full, the last one is not."""
    world = make(*[(f"c{k}", C) for k in range(6)], attempts_max=2)
    for k in range(5):
        world.instances[f"c{k}"].refuses = ("the queue is full", 3.0)
    client = world.ask(a_request("r", PROMPT))
    for instance in world.instances.values():
        world.say_all(instance)
    assert world.instances["c5"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_who_could_never_run_it_is_not_asked_again(make):
    """One is too small, the other one only full: when it is asked again, then without the small one."""
    world = make(("small", C), ("full", C), ("dies", C))
    client = world.ask(a_request("x", PROMPT, max_tokens=1))
    world.run()
    world.instances["small"].refuses, world.instances["full"].refuses = ("too wide", None), ("the queue is full", 1.0)
    for name in ("small", "full"):
        world.hear(Peer(name, 1), Heartbeat(Load(prefill_tokens_queued=99_999)))
    client = world.ask(a_request("r", PROMPT))
    world.step("dies")
    world.kill("dies")
    world.hear(Peer("dies", 1), Leave())
    for _ in range(2):
        for name in ("small", "full"):
            world.say_all(world.instances[name])
    asked = sum(isinstance(m, Dispatch) for m in world.instances["small"].heard)
    assert world.cluster.stats().requests_unplaced == 1 and len(client.got[0]) == 1
    world.instances["full"].refuses = None
    world.wait(2 * NS_PER_S)
    assert sum(isinstance(m, Dispatch) for m in world.instances["small"].heard) == asked
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_what_could_never_run_is_rejected_for_good(make):
    world = make(("a", C), ("b", C))
    for instance in world.instances.values():
        instance.refuses = ("too wide", None)
    client = world.ask(a_request("r", PROMPT))
    for instance in world.instances.values():
        world.say_all(instance)
    assert client.rejected.reason == "too wide" and client.rejected.retry_after_s is None


def test_a_failed_handoff_is_tried_again_even_where_it_failed(make):
    """1P1D, and the pull was cut off: there is nobody else to try."""
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    actions = world.hear(Peer("d", 1), RequestRefused("r#1", "checksums differ", 0.0))
    assert world.sent(actions, Cancel) == [("p", Cancel("r#1"))]
    ((to, order),) = dispatches(world, actions)
    assert (to, order.decode_at) == ("p", None), "P alone, rather than again with D"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_a_stream_waits_for_a_busy_instance(make):
    """The first instance died in mid-stream, the second one is full: the client has tokens, so nothing is rejected."""
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.instances["b"].refuses = ("the queue is full", 2.0)
    world.kill("a")
    world.hear(Peer("a", 1), Leave())
    world.say_all(world.instances["b"])
    assert not client.done and world.cluster.stats().requests_unplaced == 1
    world.instances["b"].refuses = None
    world.wait(3 * NS_PER_S)
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


# -- clients


def test_a_cancel_reaches_all_involved(make):
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, n=2))
    world.clients["r"].asked_to_end = True
    world.cancel("r")
    assert client.reasons == [FinishReason.CANCELLED] * 2
    assert {name for name, i in world.instances.items() if Cancel("r#1") in i.heard} == {"p", "d"}
    world.cancel("r")  # it may just have ended


def test_a_stop_string_ends_one_sequence_at_once(make):
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT, n=2))
    world.stop("r", 0)  # not before it has said anything
    assert client.reasons == [None, None]
    world.step("p")
    world.stop("r", 0)
    assert client.reasons == [FinishReason.STOP, None]
    assert StopSequence("r#1", 0) in world.instances["d"].heard
    world.stop("r", 1)
    assert client.done and Cancel("r#1") in world.instances["d"].heard


def test_a_deadline_is_kept_by_the_router_itself(make):
    """The instance hangs; clients are not to wait for it longer than they said."""
    world = make(("c", C))
    client = world.ask(a_request("r", PROMPT, deadline_ns=3 * NS_PER_S))
    assert world.instances["c"].heard[-1].deadline_in_ns == 3 * NS_PER_S
    assert world.cluster.next_deadline_ns <= 3 * NS_PER_S
    world.wait(3 * NS_PER_S)
    assert client.reasons == [FinishReason.DEADLINE] and Cancel("r#1") in world.instances["c"].heard


def test_a_clock_that_runs_ahead_ends_no_request(make):
    """Its virtual machine was moved, and its clock leapt: for the instance the deadline has passed."""
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT, deadline_ns=3 * NS_PER_S))
    early = TokenOutput("r#1", 0, (), finish_reason=FinishReason.DEADLINE)
    world.hear(Peer("a", 1), Tokens((early,)))
    assert world.instances["b"].running and not world.instances["a"].running
    world.run()
    assert (client.got[0], client.reasons[0]) == lone_answer(client.request, 0)


# -- members


def test_members_meet_each_other(make):
    world = make(("p", P))
    actions = world.hear(Peer("d", 1), Join(info("d", D)))
    (welcome,) = [m for _, m in world.sent(actions, JoinAccepted)]
    assert [i.peer.name for i in welcome.peers] == ["p"]
    assert [(to, m.info.peer.name) for to, m in world.sent(actions, PeerJoined)] == [("p", "d")]
    again = world.hear(Peer("d", 1), Join(info("d", D)))
    assert world.sent(again, JoinAccepted) and not world.sent(again, PeerJoined), "its welcome was lost"


def test_another_model_cannot_join(make):
    world = make(("p", P))
    other = KVGeometry(3, 2, 8, 8, "float32", BLOCK)
    for wrong in ({"namespace": "another"}, {"geometry": other}):
        ((to, refused),) = world.sent(world.hear(Peer("d", 1), Join(info("d", D, **wrong))), Refused)
        assert to == "d" and "differ" in refused.reason
    ((_, refused),) = world.sent(world.hear(Peer("d", 1), Join(info("x", D))), Refused)
    assert "speaks for" in refused.reason
    assert len(world.cluster.instances()) == 1
    world.hear(Peer("p", 1), Leave())
    assert world.sent(world.hear(Peer("d", 1), Join(info("d", D, namespace="another"))), JoinAccepted), "nobody is left"


def test_a_geometry_that_cannot_be_is_refused(make):
    """The first member's geometry and context become the cluster's: a broken one must not. (A geometry that cannot be
    is refused where it is made, so that no letter brings one.)"""
    world = make()
    with pytest.raises(UserError):
        KVGeometry(3, 2, 8, 8, "float32", 0)
    ((_, refused),) = world.sent(world.hear(Peer("p", 1), Join(info("p", P, context_tokens=0))), Refused)
    assert "makes no sense" in refused.reason
    assert world.cluster.instances() == ()


def test_strangers_are_told_that_they_are_none(make):
    world = make()
    assert world.sent(world.hear(Peer("x", 1), Heartbeat(Load())), Expelled)
    assert world.hear(Peer("x", 1), Leave()) == []


def test_a_drained_instance_finishes_and_leaves(make):
    """An operator takes a machine out of service."""
    world = make(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    assert world.sent(world.post(InstanceDrained("a")), Drain)
    for k in range(4):
        world.ask(a_request(f"q{k}", PROMPT))
    assert list(world.instances["a"].running) == ["r#1"]
    assert world.cluster.instances()[0].state == "draining"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    world.beat()
    assert [view.peer.name for view in world.cluster.instances()] == ["b"]
    assert world.cluster.stats().counters.attempts_failed == {}
    world.post(InstanceDrained("nobody"))


def test_a_single_role_that_is_left_does_everything(make):
    for role in (P, D):
        world = make(("x", role))
        client = world.ask(a_request("r", PROMPT))
        world.run()
        assert client.got[0] == lone_answer(client.request, 0)[0]
    world = make(("store", S))
    assert not world.ask(a_request("r", PROMPT)).done and world.cluster.stats().requests_unplaced == 1


def test_a_burst_between_two_heartbeats_is_spread(make):
    """Thirty clients come within a millisecond: nobody has said how busy it is."""
    world = make(*[(f"c{k}", C) for k in range(10)], policy="least-load")
    for k in range(30):
        world.ask(a_request(f"r{k}", [k, *PROMPT]))
    assert {len(i.running) for i in world.instances.values()} == {3}
    world.run()


def test_work_that_came_from_elsewhere_counts_too(make):
    world = make(("a", C), ("b", C), policy="least-load")
    world.hear(Peer("a", 1), Heartbeat(Load(prefill_tokens_queued=1000)))
    for k in range(3):
        world.ask(a_request(f"r{k}", PROMPT))
    assert len(world.instances["b"].running) == 3
    world.run()


# -- caches


def test_the_next_request_follows_the_first_before_any_event(make):
    """Two clients send the same document a millisecond apart."""
    world = make(*[(f"c{k}", C) for k in range(4)], policy="prompt-tree")
    world.ask(a_request("one", PROMPT))
    world.ask(a_request("two", [*PROMPT, 99]))
    assert [len(i.running) for i in world.instances.values()] == [2, 0, 0, 0]
    assert "20 of 21 tokens" in world.cluster.story("two").attempts[0].why
    world.run()
    world.wait(30 * NS_PER_S)
    assert [view.tree_blocks for view in world.cluster.instances()] == [0] * 4, "no event confirmed it"


def test_instances_without_events_are_believed_for_longer(make):
    world = make(tree_ttl_ns=100 * NS_PER_S)
    world.add("v", C, publishes_events=False)
    world.ask(a_request("one", PROMPT))
    world.run()
    world.wait(90 * NS_PER_S)
    assert world.cluster.instances()[0].tree_blocks == 5
    world.wait(20 * NS_PER_S)
    assert world.cluster.instances()[0].tree_blocks == 0


def test_tenants_do_not_meet_in_the_trees(make):
    world = make(("a", C), ("b", C), policy="prompt-tree")
    cached(world, "b", PROMPT, tenant="mine")
    for tenant, expected in (("mine", "b"), ("yours", "a")):
        ((to, _),) = dispatches(world, world.post(RequestArrived(a_request(tenant, PROMPT, tenant=tenant))))
        assert to == expected


def test_holders_of_more_are_named(make):
    """The longest prefix lies with a store and with a busy instance: whoever computes may fetch it."""
    world = make(("p", P), ("d", D), ("store", S), ("busy", P), ("some", P), policy="least-load")
    for name, blocks in (("store", 5), ("busy", 4), ("some", 2), ("d", 1)):
        cached(world, name, PROMPT[: 4 * blocks], Tier.DRAM if name == "store" else Tier.HBM)
    for name in ("busy", "some"):
        world.hear(Peer(name, 1), Heartbeat(Load(prefill_tokens_queued=500), next_event=1))
    ((to, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
    named = [(h.peer.name, h.prefix_tokens, h.tier) for h in order.holders]
    assert to == "p" and named == [("store", 20, Tier.DRAM), ("busy", 16, Tier.HBM), ("some", 8, Tier.HBM)]


def test_requests_that_bypass_the_cache_name_no_holders_and_leave_no_trace(make):
    world = make(("a", C), ("b", C), policy="least-load")
    cached(world, "b", PROMPT)
    ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT, use_cache=False))))
    assert order.holders == ()
    assert [view.tree_blocks for view in world.cluster.instances()] == [0, 5]


# -- sessions and handles


def test_a_session_stays_where_it_is(make):
    world = make(*[(f"c{k}", C) for k in range(3)], policy="session")
    world.ask(a_request("x", PROMPT))
    world.ask(a_request("one", PROMPT, session="s"))
    assert "one#2" in world.instances["c1"].running
    world.run()
    world.ask(a_request("two", [5, 6, 7, 8], session="s"))
    world.ask(a_request("other", [5, 6, 7, 8], session="s", tenant="somebody else"))
    assert list(world.instances["c1"].running) == ["two#3"]
    world.run()
    world.hear(Peer("c1", 1), Leave())
    world.instances["c1"].alive = False
    world.ask(a_request("three", PROMPT, session="s"))
    world.run()


def test_another_tenants_prefix_cannot_be_pinned(make):
    world = make(("a", C))
    cached(world, "a", PROMPT)
    actions = world.post(PrefixPinned("doc", "me", a_request("", PROMPT).prompt, 60 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.handles()[0].peer is None


def test_pins_are_answered_renewed_moved_and_end(make):
    world = make(("a", C), ("b", C), ("c", C), policy="session")
    cached(world, "b", PROMPT)
    cached(world, "c", PROMPT[:8])
    tokens = a_request("", PROMPT).prompt
    ((to, pin),) = world.sent(world.post(PrefixPinned("doc", "", tokens, 60 * NS_PER_S)), Pin)
    assert to == "b" and pin.ttl_ns == 60 * NS_PER_S and len(pin.tokens) == 20
    (view,) = world.cluster.handles()
    assert (view.peer.name, view.pinned_tokens) == ("b", None)
    world.say_all(world.instances["b"])
    assert world.cluster.handles()[0].pinned_tokens == 20
    ((to, _),) = dispatches(world, world.post(RequestArrived(a_request("q", PROMPT, session="doc"))))
    assert to == "b", "requests of the session go there"
    actions = world.hear(Peer("b", 1), Leave())
    ((to, pin),) = world.sent(actions, Pin)
    assert to == "c" and 0 < pin.ttl_ns <= 60 * NS_PER_S
    assert world.sent(world.post(PrefixUnpinned("doc", "")), Unpin) == [("c", Unpin(pin.handle))]
    assert world.cluster.handles() == ()
    world.post(PrefixUnpinned("doc", ""))


def test_a_pin_without_answer_is_repeated_until_it_ends(make):
    world = make(("a", C))
    cached(world, "a", PROMPT)
    tokens = a_request("", PROMPT).prompt
    world.instances["a"].paused = True
    world.post(PrefixPinned("doc", "", tokens, 4 * NS_PER_S))
    world.wait(2 * NS_PER_S)
    assert sum(isinstance(m, Pin) for m in world.instances["a"].inbox) == 3
    world.resume("a")
    world.say_all(world.instances["a"])
    heard = len(world.instances["a"].heard)
    world.wait(NS_PER_S)
    assert not any(isinstance(m, Pin) for m in world.instances["a"].heard[heard:])
    world.wait(2 * NS_PER_S)
    assert world.cluster.handles() == ()


def test_a_handle_finds_its_prefix_once_a_request_has_computed_it(make):
    """A document is named before anybody has read it."""
    world = make(("a", C), ("b", C))
    tokens = a_request("", PROMPT).prompt
    world.post(PrefixPinned("doc", "", tokens, 60 * NS_PER_S))
    assert world.cluster.handles()[0].peer is None
    world.ask(a_request("r", PROMPT, session="doc", max_tokens=1))
    world.run()
    assert world.cluster.handles()[0].peer == Peer("a", 1)
    world.say_all(world.instances["a"])
    assert world.cluster.handles()[0].pinned_tokens == 20
    world.hear(Peer("b", 1), Pinned("0::doc", 3))
    assert world.cluster.handles()[0].pinned_tokens == 20, "only the place itself can say"


def test_where_there_is_nothing_to_pin_that_is_the_answer(make):
    """Less than a block: it is known at once that nothing is pinned, and nothing is repeated until its time is over."""
    world = make(("a", C))
    cached(world, "a", PROMPT)
    short = a_request("", PROMPT[:3]).prompt
    actions = world.post(PrefixPinned("doc", "", short, 4 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.pinned_tokens("", ["doc"]) == [0]
    assert world.cluster.named_prefixes("") == [NamedPrefix("doc", 0, world.now + 4 * NS_PER_S)]
    assert world.cluster.named_prefixes("another") == []
    world.wait(3 * NS_PER_S)
    assert not any(isinstance(m, Pin) for m in world.instances["a"].heard)
    world.post(PrefixPinned("doc", "", a_request("", PROMPT).prompt, 4 * NS_PER_S))
    world.say_all(world.instances["a"])
    assert world.cluster.pinned_tokens("", ["doc"]) == [20]
    actions = world.post(PrefixPinned("doc", "", short, 4 * NS_PER_S))
    assert len(world.sent(actions, Unpin)) == 1 and world.cluster.pinned_tokens("", ["doc"]) == [0]
    world.wait(5 * NS_PER_S)
    assert world.cluster.handles() == ()


def test_where_nothing_is_cached_nothing_is_waited_for(make):
    world = make(("a", C), caching=Caching.OFF)
    actions = world.post(PrefixPinned("doc", "", a_request("", PROMPT).prompt, 60 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.pinned_tokens("", ["doc"]) == [0]


# -- the machine as a whole


def test_an_idle_cluster_wakes_up_for_its_members_only(make):
    """No busy ticking: with nothing to do the next thing is a member's silence."""
    world = make(("p", P), ("d", D))
    world.ask(a_request("r", PROMPT))
    world.run()
    world.wait(100 * NS_PER_S)
    assert world.cluster.next_deadline_ns >= world.now + 4 * NS_PER_S
    assert make().cluster.next_deadline_ns is None


def test_stories_tell_who_where_and_why(make):
    world = make(("a", C), ("b", C))
    world.ask(a_request("r", PROMPT))
    world.step()
    world.kill("a")
    world.hear(Peer("a", 1), Leave())
    story = world.cluster.story("r")
    assert [(a.first.name, a.ended) for a in story.attempts] == [("a", "gone"), ("b", "")]
    assert story.emitted_tokens == (1,) and "reuses" in story.attempts[1].why
    assert world.cluster.story("nobody") is None
    world.run()


def test_the_oracle_notices_a_wrong_token(make):
    """The referee must fail when a token is repeated or skipped, else all the above proves nothing."""
    request = a_request("r", PROMPT)
    right = next_token(request.prompt, 0, 0, [])
    for wrong in (TokenOutput("r", 0, (right + 1,)), TokenOutput("r", 0, (right,), offset=1)):
        world = World()
        with pytest.raises(AssertionError):
            world.ask(request).take(wrong, 0)


# -- attempts that were lost


def test_a_lost_dispatch_is_noticed_within_two_heartbeats(make):
    """The link stays up, one letter was lost. Heartbeats come twice a second."""
    world = make(("a", C), ("b", C))
    world.instances["a"].deaf = True
    client = world.ask(a_request("r", PROMPT))
    world.instances["a"].deaf = False
    assert not world.instances["a"].running and not world.instances["b"].running
    world.wait(NS_PER_S)
    assert world.instances["a"].running, "nobody is to blame for one letter: the cached prefix is there"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    counters = world.cluster.stats().counters
    assert counters.attempts_failed == {"lost": 1} and counters.dispatches == 2


def test_who_loses_what_has_failed_before_is_passed_over(make):
    world = make(("a", C), ("b", C))
    world.instances["a"].deaf = True
    client = world.ask(a_request("r", PROMPT))
    world.wait(2 * NS_PER_S)
    assert world.instances["b"].running and world.cluster.stats().counters.attempts_failed == {"lost": 2}
    world.run()
    assert client.done


def test_a_dispatch_under_way_is_not_taken_for_lost(make):
    """Its instance is busy for three seconds: heartbeats repeat an old reading, questions wait behind the dispatch."""
    world = make(("a", C), ("b", C))
    a = world.instances["a"]
    world.ask(a_request("r", PROMPT))
    order = next(message for message in a.heard if isinstance(message, Dispatch))
    a.running.clear()
    asked = []
    for _ in range(6):
        world.now += NS_PER_S // 2
        asked += world.sent(world.hear(a.peer, Heartbeat(Load(dispatches_heard=0))), AskAttempts)
    assert len(asked) == 5 and not world.instances["b"].running
    a.outbox.clear()
    a._dispatched(order)
    for _, question in asked:
        a.hear(question)
    world.say_all(a)
    world.run()
    counters = world.cluster.stats().counters
    assert counters.dispatches == 1 and counters.attempts_failed == {}


def test_a_lost_ending_is_noticed_at_the_next_heartbeat(make):
    """Tokens that are followed by others leave a gap; the last ones don't."""
    world = make(("a", C))
    client = world.ask(a_request("r", PROMPT, max_tokens=2))
    world.step()
    world.instances["a"].mute = True
    world.step()
    world.instances["a"].mute = False
    assert len(client.got[0]) == 1 and not world.instances["a"].running
    world.wait(NS_PER_S // 2)
    assert world.instances["a"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    assert world.cluster.stats().counters.attempts_failed == {"lost": 1}


@pytest.mark.parametrize("knows", [True, False])
def test_of_a_pair_both_must_have_lost_it(make, knows):
    """A dispatch is lost somewhere; who prefilled another request has handed it over, whose ``HandedOver`` was lost."""
    world = make(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    p, d = world.instances["p"], world.instances["d"]
    p.step()
    world.say_all(p)
    assert d.running and not p.running
    d.outbox.clear()  # HandedOver
    if not knows:
        d.running.clear()
    p.deaf = True
    other = world.ask(a_request("s", PROMPT[::-1]))
    p.deaf = False
    world.wait(NS_PER_S)
    world.say_all(d)
    assert world.cluster.stats().counters.attempts_failed == {"lost": 1 if knows else 2}
    world.run()
    for asked in (client, other):
        assert asked.got[0] == lone_answer(asked.request, 0)[0]


def test_equal_totals_ask_nothing(make):
    """Also after a loss that was explained."""
    world = make(("a", C))
    a = world.instances["a"]
    a.deaf = True
    world.ask(a_request("r", PROMPT))
    a.deaf = False
    world.wait(NS_PER_S)
    world.run()
    asked = sum(isinstance(message, AskAttempts) for message in a.heard)
    for number in range(20):
        world.ask(a_request(f"q{number}", PROMPT))
        world.wait(NS_PER_S // 2)
        world.run()
    assert asked == 1 and sum(isinstance(message, AskAttempts) for message in a.heard) == 1
