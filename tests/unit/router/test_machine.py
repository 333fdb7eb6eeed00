"""A router that is not the owner: which its members are, whose its attempts, and what becomes of answers with a key."""

from __future__ import annotations

from msgspec import structs

from cluster_world import BLOCK, a_request, info
from memserve.base.config import ClusterConfig, MemberConfig
from memserve.base.types import ClockTicked, FinishReason, Role, Tier, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.events import EmitTokens, KeyConflict, MessageArrived, RejectRequest, RequestArrived, Send
from memserve.protocol.idempotency import AnswerHeld, AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.member_events import AddPeer, ChangeGeneration, ConnectRouter, GenerationChanged, RemovePeer
from memserve.protocol.messages import (
    Cancel,
    Dispatch,
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    KvChange,
    KvEvents,
    KvSnapshot,
    Leave,
    PeerGone,
    PeerJoined,
    QueryKvEvents,
    Tokens,
)
from memserve.protocol.peers import Holder, Load, Peer, PeerInfo
from memserve.router.follower import NO_KV, Follower, FollowerStarts
from memserve.router.requests.idempotency import OTHER_REQUEST, TAKEN_OVER

OWNER, ME = Peer("router", 5), Peer("router-2", 3)
C1, C2 = info("c1", Role.COLOCATED), info("c2", Role.COLOCATED)


class World:
    """One follower; every event is followed by a check of its machines."""

    def __init__(self, *members: PeerInfo) -> None:
        me = PeerInfo(ME, Role.ROUTER, "", "", NO_KV, 0, 0, 0, False)
        self.now = 0
        self.machine = Follower(me, ("tcp://owner",), ClusterConfig(), MemberConfig())
        self.started = self.post(FollowerStarts("tcp://me"))
        self.accepted = self.hear(OWNER, JoinAccepted((*members, info("s1", Role.STORE))))

    def post(self, event) -> list:
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return actions

    def hear(self, sender: Peer, message) -> list:
        return self.post(MessageArrived(sender, message))

    def beat(self, *members: PeerInfo) -> None:
        for one in members:
            self.hear(one.peer, Heartbeat(Load()))

    @property
    def members(self) -> list[Peer]:
        return [view.peer for view in self.machine.cluster.instances()]


def sent(actions: list, kind: type) -> list:
    return [
        (action.to, action.message)
        for action in actions
        if isinstance(action, Send)
        if isinstance(action.message, kind)
    ]


def keyed(name: str):
    return structs.replace(a_request(name, [1, 2, 3, 4, 5]), key="key", asked="body", created_s=7)


def test_member_counts_once_owner_names_it_and_heartbeat_comes() -> None:
    world = World(C1, C2)
    assert ConnectRouter(Peer("router", 0), "tcp://owner") in world.started
    ((_, join),) = sent(world.started, Join)
    assert (join.info.role, join.info.address) == (Role.ROUTER, "tcp://me")
    assert {action.info.peer for action in world.accepted if isinstance(action, AddPeer)} >= {C1.peer, C2.peer}
    assert world.members == []
    world.beat(C1, replace_peer(C2, 9), info("c3", Role.COLOCATED))
    assert world.members == [C1.peer], "another incarnation, and a process that the owner has not named, are none"
    world.hear(OWNER, PeerJoined(replace_peer(C1, 2)))
    assert world.members == []
    world.beat(C1, replace_peer(C1, 2), C2)
    assert world.members == [Peer("c1", 2), C2.peer]
    gone = world.hear(OWNER, PeerGone(C2.peer, "dead"))
    assert RemovePeer(C2.peer) in gone and world.members == [Peer("c1", 2)]
    assert not sent(gone, Expelled | PeerGone), "a follower tells no member of others"


def replace_peer(one: PeerInfo, generation: int) -> PeerInfo:
    return structs.replace(one, peer=Peer(one.peer.name, generation))


def test_silent_member_gets_no_dispatch_until_heartbeat() -> None:
    world = World(C1)
    world.beat(C1)
    ((to, first),) = sent(world.post(RequestArrived(a_request("a", [1, 2, 3]))), Dispatch)
    assert to == C1.peer and first.request.request_id == "a#router-2.3-1", "no other router has an attempt of this name"
    silent_since = world.now
    while world.members:
        world.now += NS_PER_S // 2
        world.hear(OWNER, JoinAccepted((C1,)))
    assert world.now == silent_since + ClusterConfig().dead_after_ns
    again = world.hear(C1.peer, Heartbeat(Load()))
    assert world.members == [C1.peer]
    assert [order.request.request_id for _, order in sent(again, Dispatch)] == ["a#router-2.3-2"]
    assert not sent(world.hear(C1.peer, Leave()), Expelled) and world.members == []


def test_prompt_too_long_for_live_members_waits_for_named_ones() -> None:
    small, large = structs.replace(C1, context_tokens=16), structs.replace(C2, context_tokens=256)
    world = World(small, large)
    world.beat(small)
    actions = world.post(RequestArrived(a_request("long", list(range(40)))))
    assert not [one for one in actions if isinstance(one, RejectRequest)]
    orders = sent(world.hear(large.peer, Heartbeat(Load())), Dispatch)
    assert [to for to, _ in orders] == [large.peer]


def test_store_is_a_member_by_heartbeat_and_named_as_holder() -> None:
    """What it holds a follower hears from the store itself; a gap is asked for."""
    store, prompt = info("s1", Role.STORE), list(range(1, 3 * BLOCK + 2))
    names = block_identities(namespace_id("", "ns"), a_request("", prompt).prompt, BLOCK)
    run = b"".join(names)
    world = World(C1)
    world.beat(C1)
    asked = world.hear(store.peer, Heartbeat(Load(), 5))
    assert world.members == [C1.peer, store.peer] and sent(asked, QueryKvEvents) == [(store.peer, QueryKvEvents(0))]
    world.hear(store.peer, KvSnapshot(5, b"", run[:32], run[32:48]))
    ((to, order),) = sent(world.post(RequestArrived(a_request("a", prompt))), Dispatch)
    assert (to, order.holders) == (C1.peer, (Holder(store.peer, 3 * BLOCK, Tier.SSD, BLOCK),))
    world.hear(store.peer, KvEvents(5, (KvChange("evicted", Tier.SSD, run[32:48]),)))
    world.hear(C1.peer, Tokens((TokenOutput(order.request.request_id, 0, (1,), finish_reason=FinishReason.STOP),)))
    world.now += 60 * NS_PER_S  # nothing is expected of the first any more
    world.beat(C1, store)
    world.beat(C1, store)
    ((_, order),) = sent(world.post(RequestArrived(a_request("b", prompt))), Dispatch)
    assert order.holders == (Holder(store.peer, 2 * BLOCK, Tier.DRAM, 0),)
    world.hear(OWNER, PeerGone(store.peer, "dead"))
    ((_, order),) = sent(world.post(RequestArrived(a_request("c", prompt))), Dispatch)
    assert order.holders == () and world.members == [C1.peer]


def test_unheard_store_keeps_no_prompt_waiting() -> None:
    """It could not take one that is too long for the instances."""
    world = World(structs.replace(C1, context_tokens=16))
    world.beat(structs.replace(C1, context_tokens=16))
    actions = world.post(RequestArrived(a_request("long", list(range(40)))))
    assert [one.request_id for one in actions if isinstance(one, RejectRequest)] == ["long"]


def test_answer_running_at_an_instance_is_resumed() -> None:
    world = World(C1, C2)
    world.beat(C1, C2)
    asked = world.post(RequestArrived(keyed("a")))
    assert sent(asked, QueryAnswers) == [(C1.peer, QueryAnswers("key", "body")), (C2.peer, QueryAnswers("key", "body"))]
    assert not sent(asked, Dispatch)
    told = (TokenOutput("old#router-3.1-1", 0, (8, 9)),)
    held = AnswerHeld("key", "body", "old#router-3.1-1", True, 7, told)
    assert not sent(world.hear(C2.peer, AnswersHeld((), True, "key")), Dispatch)
    actions = world.hear(C1.peer, AnswersHeld((held,), True, "key"))
    assert not sent(actions, Dispatch), "it is not computed again"
    (emitted,) = [action for action in actions if isinstance(action, EmitTokens)]
    assert [output.tokens for output in emitted.outputs] == [(8, 9)]
    end = TokenOutput("old#router-3.1-1", 0, (3, 4), finish_reason=FinishReason.LENGTH, offset=2)
    (emitted,) = [one for one in world.hear(C1.peer, Tokens((end,))) if isinstance(one, EmitTokens)]
    assert [(output.request_id, output.tokens) for output in emitted.outputs] == [("a", (3, 4))]
    assert world.machine.cluster.stats().requests_live == 0


def test_keyed_request_is_placed_without_silent_instances_reply() -> None:
    world = World(C1, C2)
    world.beat(C1, C2)
    world.post(RequestArrived(keyed("a")))
    world.hear(C1.peer, AnswersHeld((), True, "key"))
    world.now += ClusterConfig().dead_after_ns // 2
    world.beat(C1, C2)
    world.now += ClusterConfig().dead_after_ns // 2
    assert len(sent(world.post(ClockTicked()), Dispatch)) == 1


def test_answer_taken_over_by_another_router_ends() -> None:
    world = World(C1)
    world.beat(C1)
    world.post(RequestArrived(keyed("a")))
    ((_, order),) = sent(world.hear(C1.peer, AnswersHeld((), True, "key")), Dispatch)
    actions = world.hear(C1.peer, AnswerTaken(order.request.request_id))
    (refused,) = [action for action in actions if isinstance(action, RejectRequest)]
    assert (refused.request_id, refused.reason, refused.conflict) == ("a", TAKEN_OVER, KeyConflict.TAKEN_OVER)
    assert world.machine.cluster.stats().requests_live == 0 and not len(world.machine.cluster.answers)


def test_answer_taken_over_before_resume_is_rejected() -> None:
    """It waits for what the other instance tells; else it would wait for tokens that the other router gets."""
    world = World(C1, C2)
    world.beat(C1, C2)
    world.post(RequestArrived(keyed("a")))
    held = AnswerHeld("key", "body", "old#router-3.1-1", True, 7, (TokenOutput("old#router-3.1-1", 0, (8, 9)),))
    world.hear(C1.peer, AnswersHeld((held,), True, "key"))
    actions = world.hear(C1.peer, AnswerTaken("old#router-3.1-1"))
    (refused,) = [action for action in actions if isinstance(action, RejectRequest)]
    assert (refused.request_id, refused.conflict) == ("a", KeyConflict.TAKEN_OVER)
    assert not sent(actions, Cancel), "the instance computes it for the other router"
    later = world.hear(C2.peer, AnswersHeld((), True, "key"))
    assert not sent(later, Dispatch) and not sent(later, Cancel)
    assert world.machine.cluster.stats().requests_live == 0 and not len(world.machine.cluster.answers)


def test_a_key_of_another_routers_request_is_refused() -> None:
    """As one of a request of this router is; what was asked for another body before does not count."""
    world = World(C1, C2)
    world.beat(C1, C2)
    world.post(RequestArrived(keyed("a")))
    assert not world.hear(C2.peer, AnswersHeld((), True, "key", "earlier"))
    actions = world.hear(C1.peer, AnswersHeld((), True, "key", "body"))
    (refused,) = [action for action in actions if isinstance(action, RejectRequest)]
    assert (refused.request_id, refused.reason, refused.conflict) == ("a", OTHER_REQUEST, KeyConflict.OTHER_REQUEST)
    assert not sent(actions, Dispatch) and not sent(actions, Cancel)
    assert world.machine.cluster.stats().requests_live == 0 and not len(world.machine.cluster.answers)


def test_expelled_follower_drops_attempts_and_rejoins() -> None:
    world = World(C1)
    world.beat(C1)
    assert len(sent(world.post(RequestArrived(a_request("a", [1, 2, 3]))), Dispatch)) == 1
    (order,) = [one for one in world.hear(OWNER, Expelled("silent", 3)) if isinstance(one, ChangeGeneration)]
    assert order.generation_min == 4 and world.members == []
    joins = sent(
        world.post(GenerationChanged(structs.replace(world.machine.member.info, peer=Peer("router-2", 4)))), Join
    )
    assert [join.info.peer.generation for _, join in joins] == [4]
    world.hear(OWNER, JoinAccepted((C1,)))
    assert len(sent(world.hear(C1.peer, Heartbeat(Load())), Dispatch)) == 1
