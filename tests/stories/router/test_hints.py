"""Hints on KV at the router: to which members they go, what clients are told, and what of them outlives the router."""

from __future__ import annotations

import numpy as np
import pytest

from cluster_world import cached
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, Role, Tier
from memserve.base.units import NS_PER_S
from memserve.protocol.kv_hints import HintAction, KvHint, KvHintDone, KvHinted
from memserve.protocol.messages import Leave, Pin, Pinned, Unpin
from memserve.protocol.peers import Peer
from memserve.protocol.records import HandlePinned, RecoveredState
from memserve.router.events import PrefixPinned, Remember, StateRecovered
from memserve.router.machine import Cluster

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))
TOKENS = np.array(PROMPT, np.int32)


def give(world, action, *, handle="", tokens=TOKENS, **terms):
    """A client asks for it; returns what the router does."""
    return world.post(KvHinted(f"{action.value}-id", action, "", handle, tokens, **terms))


def result(world, action):
    found = world.cluster.hints.result_of(f"{action.value}-id")
    return found and (found.outcome.value, found.tokens, found.reason)


def test_a_prefetch_goes_where_most_of_it_lies(make_cluster):
    world = make_cluster(("c1", C), ("c2", C), ("s", S))
    cached(world, "c2", PROMPT[:8])
    cached(world, "s", PROMPT, Tier.DRAM)
    ((name, hint),) = world.sent(give(world, HintAction.PREFETCH), KvHint)
    assert (name, hint.action, hint.tokens.tolist()) == ("c2", "prefetch", PROMPT)
    assert [(holder.peer.name, holder.prefix_tokens) for holder in hint.holders] == [("s", 20)]
    assert result(world, HintAction.PREFETCH) is None
    world.hear(Peer("c1", 1), KvHintDone("prefetch-id", "accepted", 20))
    assert result(world, HintAction.PREFETCH) is None, "another one's answer counts"
    world.hear(Peer("c2", 1), KvHintDone("prefetch-id", "clipped", 16, "no room"))
    assert result(world, HintAction.PREFETCH) == ("clipped", 16, "no room")


def test_a_share_makes_its_destination_fetch(make_cluster):
    world = make_cluster(("c1", C), ("c2", C))
    cached(world, "c1", PROMPT)
    ((name, hint),) = world.sent(give(world, HintAction.SHARE, destination="c2"), KvHint)
    assert (name, hint.action) == ("c2", "prefetch") and hint.holders[0].peer.name == "c1"
    give(world, HintAction.SHARE, destination="c3")
    assert result(world, HintAction.SHARE)[::2] == ("rejected", "there is no instance 'c3'")
    give(world, HintAction.SHARE)
    assert result(world, HintAction.SHARE)[0] == "rejected"
    ((name, hint),) = world.sent(give(world, HintAction.SHARE, destination="store"), KvHint)
    assert (name, hint.action) == ("c1", "share")


@pytest.mark.parametrize("action", [HintAction.PREFETCH, HintAction.SHARE])
def test_nothing_moves_where_admission_counts_memory(make_cluster, action):
    """An admitted request is promised its memory, and a fetch that no request waits for is counted nowhere."""
    world = make_cluster(("c1", C), ("c2", C), admission=AdmissionConfig(Admission.MEMORY))
    cached(world, "c1", PROMPT)
    assert not world.sent(give(world, action, destination="c2"), KvHint)
    assert result(world, action)[0] == "rejected" and "--admission bounded" in result(world, action)[2]


def test_a_release_goes_to_all_that_have_it(make_cluster):
    """Its name ends first; the best of the answers is told when all have come."""
    world = make_cluster(("c1", C), ("c2", C), ("c3", C))
    cached(world, "c1", PROMPT)
    cached(world, "c2", PROMPT[:8])
    world.post(PrefixPinned("h", "", TOKENS, 60 * NS_PER_S, "", 1.0))
    world.hear(Peer("c1", 1), Pinned("0::h", 20))
    actions = give(world, HintAction.RELEASE, handle="h", tokens=None)
    assert [name for name, _ in world.sent(actions, Unpin)] == ["c1"]
    assert sorted(name for name, _ in world.sent(actions, KvHint)) == ["c1", "c2"]
    world.hear(Peer("c2", 1), KvHintDone("release-id", "rejected", 0, "it is pinned"))
    assert result(world, HintAction.RELEASE) is None
    world.hear(Peer("c1", 1), KvHintDone("release-id", "accepted", 20))
    assert result(world, HintAction.RELEASE) == ("accepted", 20, "")
    assert not world.cluster.handles()


def test_a_release_by_tokens_ends_what_retains_them(make_cluster):
    """Names of its own path, under whatever name; none where two of them part behind it."""
    world = make_cluster(("c1", C))
    longer, other = np.array([*PROMPT, 30, 31, 32, 33], np.int32), np.array([*PROMPT, *range(40, 44)], np.int32)
    for name, tokens in (("a", longer), ("b", other)):
        cached(world, "c1", tokens.tolist())
        world.post(PrefixPinned(name, "", tokens, 60 * NS_PER_S, "", 1.0))
    give(world, HintAction.RELEASE)
    assert [view.handle for view in world.cluster.handles()] == ["a", "b"]
    give(world, HintAction.RELEASE, tokens=longer)
    assert [view.handle for view in world.cluster.handles()] == ["b"]
    give(world, HintAction.RELEASE)
    assert not world.cluster.handles()


@pytest.mark.parametrize("action", [HintAction.DEMOTE, HintAction.PREFETCH, HintAction.RELEASE])
def test_what_no_member_has_is_missing(make_cluster, action):
    world = make_cluster(("c1", C))
    assert not world.sent(give(world, action), KvHint)
    assert result(world, action)[0] == "missing"
    assert not world.sent(give(world, action, handle="unknown", tokens=None), KvHint)
    assert result(world, action)[::2] == ("missing", "the name keeps no KV: say which tokens are meant")


def test_a_member_that_dies_answers_no_hint(make_cluster):
    world = make_cluster(("c1", C), ("c2", C))
    cached(world, "c1", PROMPT)
    give(world, HintAction.DEMOTE)
    world.hear(Peer("c1", 1), Leave())
    assert result(world, HintAction.DEMOTE) == ("missing", 0, "c1 is gone")
    world.cluster.check_invariants()


def test_a_lost_hint_is_forgotten(make_cluster):
    world = make_cluster(("c1", C))
    cached(world, "c1", PROMPT)
    give(world, HintAction.DEMOTE)
    world.wait(31 * NS_PER_S)
    world.hear(Peer("c1", 1), KvHintDone("demote-id", "accepted", 20))
    assert result(world, HintAction.DEMOTE) is None


def test_what_is_retained_is_no_reservation(make_cluster):
    """The instance is told the priority; no room is counted for it; it is renewed, and lapses as a pin does."""
    world = make_cluster(("c1", C))
    cached(world, "c1", PROMPT)
    actions = give(world, HintAction.RETAIN, handle="h", ttl_ns=5 * NS_PER_S, priority=2.5)
    ((name, pin),) = world.sent(actions, Pin)
    assert (name, pin.handle, pin.priority) == ("c1", "0::h", 2.5)
    assert result(world, HintAction.RETAIN) is None
    world.hear(Peer("c1", 1), Pinned("0::h", 16))
    assert result(world, HintAction.RETAIN) == ("clipped", 16, "no more of it is cached")
    (view,) = world.cluster.handles()
    assert view.pinned_tokens == 16 and world.cluster.stats().tenant_retained_tokens == {"": 16}
    world.cluster.check_invariants()
    world.wait(6 * NS_PER_S)
    assert not world.cluster.handles() and world.cluster.stats().tenant_retained_tokens == {}


def test_a_retained_prefix_is_journalled_with_its_priority():
    """A router that starts anew retains it, and does not pin it."""
    cluster = Cluster(ClusterConfig(), remembers=True)
    cluster.handle(StateRecovered(RecoveredState(), Peer("router", 1), "tcp://h:1", 0), 0)
    hint = KvHinted("a", HintAction.RETAIN, "", "h", TOKENS, ttl_ns=5 * NS_PER_S, priority=2.5)
    remembered = [action.records for action in cluster.handle(hint, 1) if isinstance(action, Remember)]
    ((record,),) = remembered
    assert record == HandlePinned("", "h", TOKENS.tobytes(), 5 * NS_PER_S + 1, "", 2.5)
    again = Cluster(ClusterConfig(), remembers=True)
    again.handle(StateRecovered(RecoveredState(handles=(record,)), Peer("router", 2), "tcp://h:1", 0), 2)
    assert again.stats().tenant_retained_tokens == {"": 0} and len(again.handles()) == 1
