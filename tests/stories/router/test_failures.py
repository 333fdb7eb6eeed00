"""Stories of the cluster machine: instances die, hang or refuse, and messages about attempts are lost."""

from __future__ import annotations

import pytest

from cluster_world import a_request, dispatches, info, lone_answer
from memserve.base.types import FinishReason, Role, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import (
    Cancel,
    Dispatch,
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    Leave,
    PeerGone,
    QueryAttempts,
    RequestRefused,
    Tokens,
)
from memserve.protocol.peers import Load, Peer, members_digest
from memserve.router.events import (
    ClockTicked,
)

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))


# -- instances die


@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_request_survives_its_instances(make_cluster, victim, steps):
    """kill -9 while it is queued, handed over, decoded: another instance goes on with the client's very tokens."""
    world = make_cluster(("p", P), ("d", D), ("p2", P), ("d2", D))
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


def test_retry_dispatch_carries_tokens_and_endings(make_cluster):
    """Two of three sequences have ended when D dies: only the third is to be continued."""
    world = make_cluster(("c", C), ("c2", C))
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


def test_dead_member_is_announced_and_expelled_on_return(make_cluster):
    """SIGSTOP for half a minute: others act at once, the sleeper must begin a new life."""
    world = make_cluster(("p", P), ("d", D), ("store", S))
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


def test_missed_peer_joined_is_resent(make_cluster):
    """A lost ``PeerJoined``: every handoff to the newcomer would wait for the end of its lease. One heartbeat with the
    wrong digest may have crossed the news; two did not."""
    world = make_cluster(("p", P), ("d", D))
    p, d = Peer("p", 1), Peer("d", 1)
    alone, both, ghosts = members_digest([p]), members_digest([d, p]), members_digest([p, d, Peer("ghost", 3)])
    story = ((0, 0), (alone, 0), (both, 0), (alone, 0), (alone, 1), (alone, 0), (ghosts, 1))
    for digest, welcomed in story:
        answers = world.sent(world.hear(p, Heartbeat(Load(), members_digest=digest)), JoinAccepted)
        assert [[i.peer.name for i in welcome.peers] for _, welcome in answers] == [["d"]] * welcomed


def test_join_with_old_generation_gets_the_generation_to_use(make_cluster):
    """The wall clock, from which generations come, was set back before it was started again. Its peers would take an
    older incarnation than the dead one for a ghost, and each handoff to it would wait for the lease to end."""
    world = make_cluster(("p", P))
    world.hear(Peer("d", 9), Join(info("d", D, 9)))
    world.hear(Peer("d", 9), Leave())
    actions = world.hear(Peer("d", 4), Join(info("d", D, 4)))
    assert world.sent(actions, Expelled) == [("d", Expelled("this incarnation was taken to be dead", 9))]
    assert world.sent(world.hear(Peer("d", 10), Join(info("d", D, 10))), JoinAccepted)
    actions = world.hear(Peer("d", 5), Join(info("d", D, 5)))  # again, and the death of the tenth is not known yet
    assert world.sent(actions, Expelled) == [("d", Expelled("this incarnation was taken to be dead", 10))]


def test_retry_goes_to_an_instance_with_enough_context(make_cluster):
    """The prompt would fit into the small one, but not what the client has: it would end there, before its time."""
    world = make_cluster(("a", C))
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


def test_restart_under_the_same_name_is_a_new_member(make_cluster):
    """The supervisor was quicker than the heartbeats: what the old one had is started again at once."""
    world = make_cluster(("c", C))
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


def test_tokens_of_the_prefill_instance_may_die_with_it(make_cluster):
    """P handed over, and died before its first token had left: the gap lasts, so the request starts from nothing."""
    world = make_cluster(("p", P), ("d", D))
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


def test_unplaceable_request_waits_and_is_rejected(make_cluster):
    world = make_cluster(unplaced_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    assert world.cluster.stats().requests_unplaced == 1
    world.wait(3 * NS_PER_S)
    assert not client.done
    world.wait(NS_PER_S)
    assert client.rejected.retry_after_s > 0


def test_unresumable_stream_ends_with_an_error(make_cluster):
    """The last instance died in the middle of an answer."""
    world = make_cluster(("c", C), unplaced_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.kill("c")
    world.wait(10 * NS_PER_S)
    assert client.reasons == [FinishReason.ERROR] and len(client.got[0]) == 1


def test_request_killing_its_instances_ends_after_attempts_max(make_cluster):
    world = make_cluster(*[(f"c{k}", C) for k in range(6)], attempts_max=3)
    client = world.ask(a_request("r", PROMPT))
    for _ in range(3):
        (name,) = [i.name for i in world.instances.values() if i.running and i.alive]
        world.kill(name)
        world.hear(Peer(name, 1), Leave())
    assert client.reasons == [FinishReason.ERROR]
    assert dict(client.outputs[-1].story) == {"attempts": 3, "last_failure": "gone"}
    assert world.cluster.stats().counters.dispatches == 3


def test_stalled_instance_with_heartbeats_loses_its_request(make_cluster):
    """Its engine thread hangs, its heartbeat thread does not. The second time more patience is had."""
    world = make_cluster(("a", C), ("b", C), stalled_after_ns=4 * NS_PER_S)
    client = world.ask(a_request("r", PROMPT))
    world.wait(5 * NS_PER_S)
    assert world.instances["b"].running and not world.instances["a"].running
    world.wait(5 * NS_PER_S)
    assert world.instances["b"].running, "a long queue looks the same"
    world.wait(4 * NS_PER_S)
    assert world.instances["a"].running
    world.run()
    assert client.done and world.cluster.stats().counters.attempts_failed == {"stalled": 2}


def test_device_failure_is_retried_unseen_by_the_client(make_cluster):
    world = make_cluster(("a", C), ("b", C))
    client = world.ask(a_request("r", PROMPT))
    world.step()
    world.hear(Peer("a", 1), Tokens((TokenOutput("r#1", 0, (), finish_reason=FinishReason.ERROR, offset=1),)))
    assert world.instances["b"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_prefill_instance_cannot_end_a_handed_over_request(make_cluster):
    """Its lease ran out because the release was lost, or it shuts down: the decode instance is not concerned."""
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    world.step("p")
    world.say_all(world.instances["d"])
    world.hear(Peer("p", 1), RequestRefused("r#1", "nobody took it over", 0.0))
    world.hear(Peer("p", 1), Tokens((TokenOutput("r#1", 0, (), finish_reason=FinishReason.CANCELLED, offset=1),)))
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    counters = world.cluster.stats().counters
    assert counters.dispatches == 1 and counters.attempts_failed == {}


def test_suspended_router_does_not_declare_members_dead(make_cluster):
    """The router's machine was suspended for a minute: the heartbeats are in its inbox, behind the clock."""
    world = make_cluster(("c", C))
    world.ask(a_request("r", PROMPT))
    world.now += 60 * NS_PER_S
    world.post(ClockTicked())
    assert [view.peer.name for view in world.cluster.instances()] == ["c"]
    world.wait(6 * NS_PER_S, beats=False)
    assert world.cluster.instances() == ()


# -- refusals


def test_busy_instance_is_skipped_until_all_are_busy(make_cluster):
    world = make_cluster(("a", C), ("b", C))
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


def test_refusals_of_busy_instances_are_no_attempts(make_cluster):
    """A rush hour: many instances are full, the last one is not."""
    world = make_cluster(*[(f"c{k}", C) for k in range(6)], attempts_max=2)
    for k in range(5):
        world.instances[f"c{k}"].refuses = ("the queue is full", 3.0)
    client = world.ask(a_request("r", PROMPT))
    for instance in world.instances.values():
        world.say_all(instance)
    assert world.instances["c5"].running
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_unable_instance_is_excluded_from_retries(make_cluster):
    """One is too small, the other one only full: when it is asked again, then without the small one."""
    world = make_cluster(("small", C), ("full", C), ("dies", C))
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


def test_unservable_request_is_rejected_without_retry_after(make_cluster):
    world = make_cluster(("a", C), ("b", C))
    for instance in world.instances.values():
        instance.refuses = ("too wide", None)
    client = world.ask(a_request("r", PROMPT))
    for instance in world.instances.values():
        world.say_all(instance)
    assert client.rejected.reason == "too wide" and client.rejected.retry_after_s is None


def test_a_failed_handoff_is_tried_again_even_where_it_failed(make_cluster):
    """1P1D, and the pull was cut off: there is no other instance to try."""
    world = make_cluster(("p", P), ("d", D))
    client = world.ask(a_request("r", PROMPT))
    actions = world.hear(Peer("d", 1), RequestRefused("r#1", "checksums differ", 0.0))
    assert world.sent(actions, Cancel) == [("p", Cancel("r#1"))]
    ((to, order),) = dispatches(world, actions)
    assert (to, order.decode_at) == ("p", None), "P alone, rather than again with D"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]


def test_a_stream_waits_for_a_busy_instance(make_cluster):
    """The first instance died in mid-stream, the second one is full: the client has tokens, so nothing is rejected."""
    world = make_cluster(("a", C), ("b", C))
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


# -- attempts that were lost


def test_a_lost_dispatch_is_noticed_within_two_heartbeats(make_cluster):
    """The link stays up, one letter was lost. Heartbeats come twice a second."""
    world = make_cluster(("a", C), ("b", C))
    world.instances["a"].deaf = True
    client = world.ask(a_request("r", PROMPT))
    world.instances["a"].deaf = False
    assert not world.instances["a"].running and not world.instances["b"].running
    world.wait(NS_PER_S)
    assert world.instances["a"].running, "one letter has no cause there: the cached prefix is there"
    world.run()
    assert client.got[0] == lone_answer(client.request, 0)[0]
    counters = world.cluster.stats().counters
    assert counters.attempts_failed == {"lost": 1} and counters.dispatches == 2


def test_instance_losing_a_retried_request_is_skipped(make_cluster):
    world = make_cluster(("a", C), ("b", C))
    world.instances["a"].deaf = True
    client = world.ask(a_request("r", PROMPT))
    world.wait(2 * NS_PER_S)
    assert world.instances["b"].running and world.cluster.stats().counters.attempts_failed == {"lost": 2}
    world.run()
    assert client.done


def test_a_dispatch_under_way_is_not_taken_for_lost(make_cluster):
    """Its instance is busy for three seconds: heartbeats repeat an old reading, questions wait behind the dispatch."""
    world = make_cluster(("a", C), ("b", C))
    a = world.instances["a"]
    world.ask(a_request("r", PROMPT))
    order = next(message for message in a.heard if isinstance(message, Dispatch))
    a.running.clear()
    asked = []
    for _ in range(6):
        world.now += NS_PER_S // 2
        asked += world.sent(world.hear(a.peer, Heartbeat(Load(dispatches_heard=0))), QueryAttempts)
    assert len(asked) == 5 and not world.instances["b"].running
    a.outbox.clear()
    a._dispatched(order)
    for _, question in asked:
        a.hear(question)
    world.say_all(a)
    world.run()
    counters = world.cluster.stats().counters
    assert counters.dispatches == 1 and counters.attempts_failed == {}


def test_a_lost_ending_is_noticed_at_the_next_heartbeat(make_cluster):
    """Tokens that are followed by others leave a gap; the last ones don't."""
    world = make_cluster(("a", C))
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
def test_of_a_pair_both_must_have_lost_it(make_cluster, knows):
    """A dispatch is lost somewhere; a prefill instance has handed another request over; ``HandedOver`` was lost."""
    world = make_cluster(("p", P), ("d", D))
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


def test_equal_totals_ask_nothing(make_cluster):
    """Also after a loss that was explained."""
    world = make_cluster(("a", C))
    a = world.instances["a"]
    a.deaf = True
    world.ask(a_request("r", PROMPT))
    a.deaf = False
    world.wait(NS_PER_S)
    world.run()
    asked = sum(isinstance(message, QueryAttempts) for message in a.heard)
    for number in range(20):
        world.ask(a_request(f"q{number}", PROMPT))
        world.wait(NS_PER_S // 2)
        world.run()
    assert asked == 1 and sum(isinstance(message, QueryAttempts) for message in a.heard) == 1
