"""Stories of the cluster machine: stores, which hold KV on two tiers of their own, and run nothing."""

from __future__ import annotations

import pytest

from cluster_world import BLOCK, GEOMETRY, a_request, cached, dispatches, info
from memserve.base.types import KVGeometry, Role, Tier
from memserve.base.units import NS_PER_S
from memserve.kv.costs import CopyCurve, CostModel
from memserve.kv.identity import block_identities, namespace_id, state_identities
from memserve.kv.store_shares import split_keys
from memserve.protocol.messages import (
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    KvChange,
    KvEvents,
    KvSnapshot,
    Leave,
    Pin,
    Refused,
)
from memserve.protocol.peers import Holder, Load, Peer
from memserve.router.events import PrefixPinned, RequestArrived

P, D, C, S = Role.PREFILL, Role.DECODE, Role.COLOCATED, Role.STORE
PROMPT = list(range(1, 21))
NO_MODEL = {"context_tokens": 0, "hbm_blocks": 0, "namespace": "", "geometry": KVGeometry(1, 1, 1, 1, "float32", 1)}


def names_of(prompt=PROMPT):
    tokens = a_request("", prompt).prompt
    return b"".join(block_identities(namespace_id("", "ns"), tokens, BLOCK))


def holders_of(world, name="r"):
    """What is named to the instance that gets a request with the prompt."""
    ((_, order),) = dispatches(world, world.post(RequestArrived(a_request(name, PROMPT))))
    return [(h.peer.name, h.prefix_tokens, h.tier, h.disk_tokens) for h in order.holders]


def test_store_without_model_joins_before_any_instance(make_cluster):
    """It joins before any instance. The first one with a model decides namespace and geometry; others are refused."""
    world = make_cluster()
    world.add("s", S, **NO_MODEL)
    actions = world.hear(Peer("c", 1), Join(info("c", C)))
    assert world.sent(actions, JoinAccepted)
    assert world.cluster._registry.namespace == "ns" and world.cluster._registry.geometry == GEOMETRY
    assert world.sent(world.hear(Peer("x", 1), Join(info("x", C, namespace="another"))), Refused)
    world.hear(Peer("c", 1), Leave())
    assert world.sent(world.hear(Peer("x", 1), Join(info("x", C, namespace="another"))), JoinAccepted)


def test_a_store_is_given_no_request(make_cluster):
    """Not even as the only member."""
    world = make_cluster()
    world.add("s", S, **NO_MODEL)
    assert not dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
    world.add("c", C)
    world.run()
    assert world.clients["r"].reasons[0] is not None


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_a_store_may_have_the_state_of_what_is_there(make_cluster, state_blocks):
    """An instance that has all of the KV asks for it only where it may lack a state, or a window; and then not behind
    the last token, which is computed in any case."""
    world = make_cluster(policy="least-load")
    world.add("c", C, state_blocks=state_blocks)
    world.add("s", S, state_blocks=0)
    cached(world, "c", PROMPT)
    cached(world, "s", PROMPT, Tier.DRAM)
    assert holders_of(world) == ([("s", 16, Tier.DRAM, 0)] if state_blocks else [])


def test_a_store_is_a_holder_with_two_tiers(make_cluster):
    """What lies in its memory, then also what lies on its disks, and what has moved up or is gone."""
    world = make_cluster(("c", C), ("s", S), policy="least-load")
    cached(world, "s", PROMPT[:12], Tier.DRAM)
    assert holders_of(world, "one") == [("s", 12, Tier.DRAM, 0)]
    world.run()
    store, names = Peer("s", 1), names_of()
    tail = [KvChange("moved", Tier.SSD, names[:32]), KvChange("stored", Tier.SSD, names[48:])]
    world.hear(store, KvEvents(1, tuple(tail)))
    world = fresh_reader(world)
    assert holders_of(world, "two") == [("s", 20, Tier.SSD, 16)]
    world.hear(store, KvEvents(3, (KvChange("moved", Tier.DRAM, names[:32] + names[48:]),)))
    assert holders_of(fresh_reader(world), "three") == [("s", 20, Tier.DRAM, 0)]
    world.hear(store, KvEvents(4, (KvChange("evicted", Tier.DRAM, names[16:32]),)))
    assert holders_of(fresh_reader(world), "four") == [("s", 4, Tier.DRAM, 0)]


def fresh_reader(world, **described):
    """The instance has left, and another one has come: nothing is cached or expected but at the store."""
    world.run()
    for name, instance in list(world.instances.items()):
        if instance.role is C and instance.alive:
            world.hear(instance.peer, Leave())
            instance.alive = False
            del world.instances[name]
    world.add(f"c{len(world.diary)}", C, **described)
    return world


def test_a_snapshot_has_both_tiers(make_cluster):
    world = make_cluster(("c", C), ("s", S), policy="least-load")
    names = names_of()
    world.hear(Peer("s", 1), KvSnapshot(7, b"", names[:16], names[16:]))
    assert holders_of(world) == [("s", 20, Tier.SSD, 16)]
    (view,) = [view for view in world.cluster.instances() if view.peer.name == "s"]
    assert (view.next_event, view.tree_blocks) == (7, 5)


@pytest.mark.parametrize(
    ("name", "news"),
    [
        ("s", KvEvents(0, (KvChange("stored", Tier.HBM, bytes(16)),))),
        ("s", KvSnapshot(1, bytes(16), b"", b"")),
        ("s", KvSnapshot(1, b"", b"", bytes(15))),
        ("c", KvEvents(0, (KvChange("stored", Tier.SSD, bytes(16)),))),
        ("c", KvSnapshot(1, b"", b"", bytes(16))),
    ],
)
def test_a_tier_that_a_member_cannot_have_is_nonsense(make_cluster, name, news):
    world = make_cluster(("c", C), ("s", S))
    assert world.sent(world.hear(Peer(name, 1), news), Expelled)
    assert [view.peer.name for view in world.cluster.instances()] == [{"s": "c", "c": "s"}[name]]


def test_equal_prefixes_are_named_from_the_fastest_tier_on(make_cluster):
    """HBM, DRAM, a store's memory, its disks."""
    world = make_cluster(("reader", C), ("s", S), ("dram", C), ("hbm", C), policy="least-load")
    for name, tier in (("s", Tier.DRAM), ("dram", Tier.DRAM), ("hbm", Tier.HBM)):
        cached(world, name, PROMPT, tier)
    for name in ("dram", "hbm"):
        world.hear(Peer(name, 1), Heartbeat(Load(prefill_tokens_queued=500), next_event=1))
    assert [name for name, *_ in holders_of(world)] == ["hbm", "dram", "s"]


def spread_holder(world, name="r"):
    """Of a request with the prompt: tokens, tier, tokens on disks, and the store of each block."""
    ((_, order),) = dispatches(world, world.post(RequestArrived(a_request(name, PROMPT))))
    (holder,) = order.holders
    return holder.prefix_tokens, holder.tier, holder.disk_tokens, [holder.stores[at].name for at in holder.places]


def stored(world, name, blocks, tier=Tier.DRAM):
    """A store says that it has these blocks of the prompt."""
    tell_stored(world, name, b"".join(split_keys(names_of())[at] for at in blocks), tier)


def tell_stored(world, name, identities, tier=Tier.DRAM):
    store = Peer(name, 1)
    (view,) = [view for view in world.cluster.instances() if view.peer == store]
    world.hear(store, KvEvents(view.next_event, (KvChange("stored", tier, identities),)))


@pytest.fixture
def two_stores(make_cluster):
    return make_cluster(("c", C), ("s", S), ("t", S), policy="least-load")


def test_prefix_over_two_stores_is_one_prefix(two_stores):
    """Each block is asked of a store that has it: of one that has it in memory, if there is one."""
    stored(two_stores, "s", [0, 3])
    stored(two_stores, "t", [1, 2])
    assert spread_holder(two_stores, "one") == (16, Tier.DRAM, 0, ["s", "t", "t", "s"])
    stored(two_stores, "s", [4], Tier.SSD)
    stored(two_stores, "s", [1, 2], Tier.SSD)
    two_stores = fresh_reader(two_stores)
    assert spread_holder(two_stores, "two") == (20, Tier.SSD, 4, ["s", "t", "t", "s", "s"])


def test_store_that_dies_takes_its_blocks_with_it(two_stores):
    """What the other one has as well stays; then it is the only store, and holders are as ever."""
    stored(two_stores, "s", [0, 1, 2])
    stored(two_stores, "t", [1, 2, 3, 4])
    assert spread_holder(two_stores, "one")[0] == 20
    two_stores.hear(Peer("t", 1), Leave())
    two_stores = fresh_reader(two_stores)
    assert holders_of(two_stores, "two") == [("s", 12, Tier.DRAM, 0)]


def test_copies_take_turns(two_stores):
    """So that each stays in the memory of its store."""
    for name in ("s", "t"):
        stored(two_stores, name, range(5))
    first = spread_holder(two_stores, "one")[3]
    second = spread_holder(fresh_reader(two_stores), "two")[3]
    assert all({a, b} == {"s", "t"} for a, b in zip(first, second, strict=True))


def test_copy_on_own_host_goes_first(make_cluster):
    world = make_cluster(policy="least-load")
    for name, role, host in (("s", S, "far"), ("t", S, "here"), ("c", C, "here")):
        world.add(name, role, host_id=host)
    stored(world, "s", range(5))
    stored(world, "t", [1, 2])
    assert spread_holder(world)[3] == ["s", "t", "t", "s", "s"]


def test_prefix_over_two_stores_ends_where_they_have_a_state(make_cluster):
    """It is of no use without one; what is asked of which store is said for its blocks as well."""
    world = make_cluster(policy="least-load")
    world.add("c", C, state_blocks=2)
    for name in ("s", "t"):
        world.add(name, S, state_blocks=0)
    stored(world, "s", [0, 1, 4])
    stored(world, "t", [2, 3])
    assert holders_of(world, "one") == []
    blocks, states = split_keys(names_of()), {}
    for end in (2, 3, 5):  # behind five blocks: the last token would not be computed
        states[end] = state_identities(blocks[end - 1], 2)
        for name, identity in zip(("s", "t"), states[end], strict=True):
            tell_stored(world, name, identity)
    world.run()
    assert spread_holder(fresh_reader(world, state_blocks=2), "two") == (12, Tier.DRAM, 0, ["s", "s", "t", "s", "t"])
    (view,) = [view for view in world.cluster.instances() if view.peer.name == "t"]
    gone = KvEvents(view.next_event, (KvChange("evicted", Tier.DRAM, states[3][1]),))
    world.hear(Peer("t", 1), gone)
    assert spread_holder(fresh_reader(world, state_blocks=2), "three") == (8, Tier.DRAM, 0, ["s", "s", "s", "t"])


def test_disk_cost_decides_the_route(make_cluster):
    """On quick disks the prefix makes the idle instance the better one; on slow ones the busy one that has it."""
    chosen = {}
    for ns_a_byte in (0.0, 1e9):
        costs = CostModel(disk=CopyCurve(0.0, 0.0, ns_a_byte), machine="m", same_host=CopyCurve(0.0, 0.0, 0.0))
        world = make_cluster(policy="cost")
        world.add("s", S, costs=costs.to_json(), **NO_MODEL)
        for name in ("busy", "idle"):
            world.add(name, C, costs=CostModel(same_host=CopyCurve(0.0, 0.0, 0.0), machine="m").to_json())
        cached(world, "s", PROMPT, Tier.SSD)
        cached(world, "busy", PROMPT[:16])
        world.hear(Peer("busy", 1), Heartbeat(Load(prefill_tokens_queued=4, hbm_blocks_available=64), next_event=1))
        ((to, order),) = dispatches(world, world.post(RequestArrived(a_request("r", PROMPT))))
        chosen[ns_a_byte] = to
        assert order.holders[0] == Holder(Peer("s", 1), 20, Tier.SSD, 20)
    assert chosen == {0.0: "idle", 1e9: "busy"}


def test_named_prefix_is_pinned_at_an_instance_not_at_a_store(make_cluster):
    """The store has most of it; it keeps it by what the instance tells it."""
    world = make_cluster(("c", C), ("s", S))
    cached(world, "s", PROMPT, Tier.DRAM)
    tokens = a_request("", PROMPT).prompt
    actions = world.post(PrefixPinned("doc", "", tokens, 60 * NS_PER_S))
    assert not world.sent(actions, Pin) and world.cluster.handles()[0].peer is None
    cached(world, "c", PROMPT[:8])
    world.wait(2 * NS_PER_S)
    assert world.cluster.handles()[0].peer == Peer("c", 1)


def test_silent_store_is_removed_with_its_entries(make_cluster):
    world = make_cluster(("c", C), ("s", S), policy="least-load")
    cached(world, "s", PROMPT, Tier.DRAM)
    for _ in range(7):
        world.now += NS_PER_S
        world.hear(Peer("c", 1), Heartbeat(Load()))
    assert [view.peer.name for view in world.cluster.instances()] == ["c"]
    assert holders_of(world) == []
