"""Stories of the cluster machine: members, what they have cached, sessions and handles."""

from __future__ import annotations

import pytest

from cluster_world import BLOCK, World, a_request, cached, dispatches, info, lone_answer, next_token
from memserve.base.errors import UserError
from memserve.base.types import Caching, KVGeometry, NamedPrefix, Role, Tier, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import (
    Drain,
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    Leave,
    PeerJoined,
    Pin,
    Pinned,
    Refused,
    Unpin,
)
from memserve.protocol.peers import Load, Peer
from memserve.router.events import (
    InstanceDrained,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
)

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))


# -- members


def test_members_meet_each_other(make_cluster):
    world = make_cluster(("p", P))
    actions = world.hear(Peer("d", 1), Join(info("d", D)))
    (welcome,) = [m for _, m in world.sent(actions, JoinAccepted)]
    assert [i.peer.name for i in welcome.peers] == ["p"]
    assert [(to, m.info.peer.name) for to, m in world.sent(actions, PeerJoined)] == [("p", "d")]
    again = world.hear(Peer("d", 1), Join(info("d", D)))
    assert world.sent(again, JoinAccepted) and not world.sent(again, PeerJoined), "its welcome was lost"


def test_another_model_cannot_join(make_cluster):
    world = make_cluster(("p", P))
    other = KVGeometry(3, 2, 8, 8, "float32", BLOCK)
    for wrong in ({"namespace": "another"}, {"geometry": other}):
        ((to, refused),) = world.sent(world.hear(Peer("d", 1), Join(info("d", D, **wrong))), Refused)
        assert to == "d" and "differ" in refused.reason
    ((_, refused),) = world.sent(world.hear(Peer("d", 1), Join(info("x", D))), Refused)
    assert "speaks for" in refused.reason
    assert len(world.cluster.instances()) == 1
    world.hear(Peer("p", 1), Leave())
    assert world.sent(world.hear(Peer("d", 1), Join(info("d", D, namespace="another"))), JoinAccepted), (
        "no member of the old model is left"
    )


def test_two_processes_of_one_name_do_not_expel_each_other() -> None:
    """The first is silent, so that the second may be a restart of it: it has its place; the first comes again, and is
    told."""
    world = World()
    first, second = info("c", C, address="tcp://here"), info("c", C, 2, address="tcp://there")
    world.hear(first.peer, Join(first))
    for _ in range(3):
        assert not world.hear(second.peer, Join(second)), "the first may be heard yet"
        world.now += NS_PER_S // 2
    world.now += 1
    assert world.sent(world.hear(second.peer, Join(second)), JoinAccepted)
    assert world.sent(world.hear(first.peer, Heartbeat(Load(), 0)), Expelled)
    again = info("c", C, 3, address="tcp://here")
    ((to, refused),) = world.sent(world.hear(again.peer, Join(again)), Refused)
    assert to == "c" and "the colocated at tcp://there has it" in refused.reason
    assert [one.peer for one in world.cluster.instances()] == [second.peer]
    router = info("c", Role.ROUTER, 4)
    assert world.sent(world.hear(router.peer, Join(router)), Refused), "of whatever role"


def test_a_second_process_does_not_displace_a_live_one() -> None:
    world = World()
    first, second = info("c", C, address="tcp://here"), info("c", C, 2, address="tcp://there")
    world.hear(first.peer, Join(first))
    assert not world.hear(second.peer, Join(second))
    world.now += NS_PER_S // 4
    world.hear(first.peer, Heartbeat(Load(), 0))  # it may have been on its way since before its process ended
    world.now += NS_PER_S // 4
    assert not world.hear(second.peer, Join(second))
    world.now += NS_PER_S // 4
    world.hear(first.peer, Heartbeat(Load(), 0))
    world.now += NS_PER_S // 4
    ((to, refused),) = world.sent(world.hear(second.peer, Join(second)), Refused)
    assert to == "c" and "the colocated at tcp://here has it" in refused.reason
    assert [one.peer for one in world.cluster.instances()] == [first.peer]


def test_a_restart_at_the_same_address_has_its_place_at_once() -> None:
    world = World()
    first, second = info("c", C), info("c", C, 2)
    world.hear(first.peer, Join(first))
    assert world.sent(world.hear(second.peer, Join(second)), JoinAccepted)
    assert [one.peer for one in world.cluster.instances()] == [second.peer]


def test_a_geometry_that_cannot_be_is_refused(make_cluster):
    """The first member's geometry and context become the cluster's: a broken one must not. (A geometry that cannot be
    is refused where it is made, so that no letter brings one.)"""
    world = make_cluster()
    with pytest.raises(UserError):
        KVGeometry(3, 2, 8, 8, "float32", 0)
    ((_, refused),) = world.sent(world.hear(Peer("p", 1), Join(info("p", P, context_tokens=0))), Refused)
    assert "makes no sense" in refused.reason
    assert world.cluster.instances() == ()


def test_strangers_are_told_that_they_are_none(make_cluster):
    world = make_cluster()
    assert world.sent(world.hear(Peer("x", 1), Heartbeat(Load())), Expelled)
    assert world.hear(Peer("x", 1), Leave()) == []


def test_a_drained_instance_finishes_and_leaves(make_cluster):
    """An operator takes a machine out of service."""
    world = make_cluster(("a", C), ("b", C))
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


def test_single_remaining_role_serves_requests_alone(make_cluster):
    for role in (P, D):
        world = make_cluster(("x", role))
        client = world.ask(a_request("r", PROMPT))
        world.run()
        assert client.got[0] == lone_answer(client.request, 0)[0]
    world = make_cluster(("store", S))
    assert not world.ask(a_request("r", PROMPT)).done and world.cluster.stats().requests_unplaced == 1


def test_a_burst_between_two_heartbeats_is_spread(make_cluster):
    """Thirty clients come within a millisecond: no instance has said how busy it is."""
    world = make_cluster(*[(f"c{k}", C) for k in range(10)], policy="least-load")
    for k in range(30):
        world.ask(a_request(f"r{k}", [k, *PROMPT]))
    assert {len(i.running) for i in world.instances.values()} == {3}
    world.run()


def test_work_that_came_from_elsewhere_counts_too(make_cluster):
    world = make_cluster(("a", C), ("b", C), policy="least-load")
    world.hear(Peer("a", 1), Heartbeat(Load(prefill_tokens_queued=1000)))
    for k in range(3):
        world.ask(a_request(f"r{k}", PROMPT))
    assert len(world.instances["b"].running) == 3
    world.run()


# -- caches


def test_the_next_request_follows_the_first_before_any_event(make_cluster):
    """Two clients send the same document a millisecond apart."""
    world = make_cluster(*[(f"c{k}", C) for k in range(4)], policy="prompt-tree")
    world.ask(a_request("one", PROMPT))
    world.ask(a_request("two", [*PROMPT, 99]))
    assert [len(i.running) for i in world.instances.values()] == [2, 0, 0, 0]
    assert "20 of 21 tokens" in world.cluster.story("two").attempts[0].why
    world.run()
    world.wait(30 * NS_PER_S)
    assert [view.tree_blocks for view in world.cluster.instances()] == [0] * 4, "no event confirmed it"


def test_instances_without_events_are_believed_for_longer(make_cluster):
    world = make_cluster(tree_ttl_ns=100 * NS_PER_S)
    world.add("v", C, publishes_events=False)
    world.ask(a_request("one", PROMPT))
    world.run()
    world.wait(90 * NS_PER_S)
    assert world.cluster.instances()[0].tree_blocks == 5
    world.wait(20 * NS_PER_S)
    assert world.cluster.instances()[0].tree_blocks == 0


def test_tenants_do_not_meet_in_the_trees(make_cluster):
    world = make_cluster(("a", C), ("b", C), policy="prompt-tree")
    cached(world, "b", PROMPT, tenant="mine")
    for tenant, expected in (("mine", "b"), ("yours", "a")):
        ((to, _),) = dispatches(world, world.post(RequestArrived(a_request(tenant, PROMPT, tenant=tenant))))
        assert to == expected


def test_holders_of_more_are_named(make_cluster):
    """The longest prefix lies with a store and with a busy instance: an instance that computes may fetch it."""
    world = make_cluster(("p", P), ("d", D), ("store", S), ("busy", P), ("some", P), policy="least-load")
    for name, blocks in (("store", 5), ("busy", 4), ("some", 2), ("d", 1)):
        cached(world, name, PROMPT[: 4 * blocks], Tier.DRAM if name == "store" else Tier.HBM)
    for name in ("busy", "some"):
        world.hear(Peer(name, 1), Heartbeat(Load(prefill_tokens_queued=500), next_event=1))
    ((to, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
    named = [(h.peer.name, h.prefix_tokens, h.tier) for h in order.holders]
    assert to == "p" and named == [("store", 20, Tier.DRAM), ("busy", 16, Tier.HBM), ("some", 8, Tier.HBM)]


def test_cache_bypass_names_no_holders_and_records_nothing(make_cluster):
    world = make_cluster(("a", C), ("b", C), policy="least-load")
    cached(world, "b", PROMPT)
    ((_, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT, use_cache=False))))
    assert order.holders == ()
    assert [view.tree_blocks for view in world.cluster.instances()] == [0, 5]


# -- sessions and handles


def test_a_session_stays_where_it_is(make_cluster):
    world = make_cluster(*[(f"c{k}", C) for k in range(3)], policy="session")
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


def test_another_tenants_prefix_cannot_be_pinned(make_cluster):
    world = make_cluster(("a", C))
    cached(world, "a", PROMPT)
    actions = world.post(PrefixPinned("doc", "me", a_request("", PROMPT).prompt, 60 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.handles()[0].peer is None


def test_pins_are_answered_renewed_moved_and_end(make_cluster):
    world = make_cluster(("a", C), ("b", C), ("c", C), policy="session")
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


def test_a_pin_without_answer_is_repeated_until_it_ends(make_cluster):
    world = make_cluster(("a", C))
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


def test_named_prefix_is_pinned_once_a_request_computes_it(make_cluster):
    """A document is named before anybody has read it."""
    world = make_cluster(("a", C), ("b", C))
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


def test_where_there_is_nothing_to_pin_that_is_the_answer(make_cluster):
    """Less than a block: it is known at once that nothing is pinned, and nothing is repeated until its time is over."""
    world = make_cluster(("a", C))
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


def test_where_nothing_is_cached_nothing_is_waited_for(make_cluster):
    world = make_cluster(("a", C), caching=Caching.OFF)
    actions = world.post(PrefixPinned("doc", "", a_request("", PROMPT).prompt, 60 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.pinned_tokens("", ["doc"]) == [0]


# -- the machine as a whole


def test_an_idle_cluster_wakes_up_for_its_members_only(make_cluster):
    """No busy ticking: with nothing to do the next thing is a member's silence."""
    world = make_cluster(("p", P), ("d", D))
    world.ask(a_request("r", PROMPT))
    world.run()
    deadlines = set()
    for _ in range(200):
        world.wait(NS_PER_S // 2)
        deadlines.add(world.cluster.next_deadline_ns)
    assert min(deadlines) > 0 and len(deadlines) <= 2 * 100 / 4, "one in more than four seconds for each member"
    assert make_cluster().cluster.next_deadline_ns is None


def test_story_has_instances_attempts_and_reasons(make_cluster):
    world = make_cluster(("a", C), ("b", C))
    world.ask(a_request("r", PROMPT))
    world.step()
    world.kill("a")
    world.hear(Peer("a", 1), Leave())
    story = world.cluster.story("r")
    assert [(a.first.name, a.failure) for a in story.attempts] == [("a", "gone"), ("b", "")]
    assert story.emitted_tokens == (1,) and "reuses" in story.attempts[1].why
    assert world.cluster.story("nobody") is None
    world.run()


def test_the_oracle_notices_a_wrong_token(make_cluster):
    """The referee must fail when a token is repeated or skipped, else all the above proves nothing."""
    request = a_request("r", PROMPT)
    right = next_token(request.prompt, 0, 0, [])
    for wrong in (TokenOutput("r", 0, (right + 1,)), TokenOutput("r", 0, (right,), offset=1)):
        world = World()
        with pytest.raises(AssertionError):
            world.ask(request).take(wrong, 0)
