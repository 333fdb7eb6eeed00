"""A router that remembers: what it says must be kept is what it knows, and another one goes on from that."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Self

import msgspec
import numpy as np
import pytest

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Admission, FinishReason, Request, Role, SamplingParams, StopParams, Tier, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.journal.state import MetadataState
from memserve.protocol.messages import (
    AnyMessage,
    Dispatch,
    Drain,
    Expelled,
    Heartbeat,
    Join,
    JoinAccepted,
    KvChange,
    KvEvents,
    KvSnapshot,
    Leave,
    PeerGone,
    Pin,
    QueryKvEvents,
    Refused,
    RejoinRequest,
    Tokens,
)
from memserve.protocol.peers import Load, Peer
from memserve.protocol.records import EntryUsed, MemberGone, RouterStarted
from memserve.router.admission.ledger import Need
from memserve.router.events import (
    ClockTicked,
    InstanceDrained,
    MessageArrived,
    Note,
    PrefixPinned,
    PrefixUnpinned,
    Remember,
    ReportMember,
    RequestArrived,
    Send,
    StateRecovered,
)
from memserve.router.machine import Cluster
from memserve.router.placement.prefix_directory import tiers_of
from meta_records import identities, info

CONFIG = ClusterConfig(dead_after_ns=2 * NS_PER_S, policy="prompt-tree")
PROMPT = np.arange(1, 18, dtype=np.int32)  # four whole blocks, and a token


class World:
    """A router, and the state of what it asked its host to keep."""

    config = CONFIG

    def __init__(self, state: MetadataState | None = None, generation: int = 1, now_ns: int = 0) -> None:
        self.me, self.now, self.state = Peer("router", generation), now_ns, state or MetadataState()
        self.machine = Cluster(self.config, remembers=True)
        self.sent: list[Send] = []
        self.order: list[str] = []
        self.handle(StateRecovered(self.state.recovered_state(0), self.me, f"tcp://r:{generation}"))

    def handle(self, event: Any, after_ns: int = 0) -> list[Send]:
        self.now += after_ns
        self.sent, self.order = [], []
        for action in self.machine.handle(event, self.now):
            if isinstance(action, ReportMember):
                continue  # for operators: it waits for nothing, and nothing waits for it
            self.order.append(type(action).__name__)
            if isinstance(action, Remember | Note):
                self.state.apply(action.records)
            elif isinstance(action, Send):
                self.sent.append(action)
        self.machine.check_invariants()
        return self.sent

    def hear(self, peer: Peer, message: AnyMessage, after_ns: int = 0) -> list[Send]:
        return self.handle(MessageArrived(peer, message), after_ns)

    def told(self, kind: type) -> list[Send]:
        return [send for send in self.sent if isinstance(send.message, kind)]

    def successor(self, downtime_ns: int = 0) -> Self:
        """The router is killed; the next one finds the state."""
        found = MetadataState()
        found.apply(self.state.checkpoint_records())
        return type(self)(found, self.me.generation + 1, self.now + downtime_ns)

    def ask(self, name: str, session: str = "") -> Peer | None:
        """The instance that is given a request with the prompt."""
        request = Request(name, PROMPT, SamplingParams(), StopParams(max_tokens=1), session=session)
        self.handle(RequestArrived(request))
        return next((send.to for send in self.told(Dispatch)), None)

    def blocks(self) -> list[bytes]:
        """Identities of the prompt's blocks."""
        run = self.machine._trees.prompt_identities("", "space", PROMPT, 4)
        return [run[at : at + 16] for at in range(0, len(run), 16)]

    def knows(self) -> dict[str, Any]:
        """What the machine knows of what must be kept."""
        machine, members = self.machine, []
        for member in machine._registry:
            held = dict(zip(tiers_of(member.info.role), machine._trees.holdings_of(member.number), strict=True))
            hbm, dram, ssd = (as_set(held.get(tier, b"")) for tier in Tier)
            draining = member.drains or member.state.value == "draining"
            next_event = machine._trees.feed_of(member.number).next_event
            members.append((member.info, draining, next_event, hbm, dram, ssd))
        return {
            "members": members,
            "gone": list(machine._registry._dead),
            "sessions": sorted(((t, s), peers) for t, s, peers in machine._sessions._places.items()),
            "handles": {
                (h.tenant, h.name): (h.tokens.tobytes(), h.expires_ns) for h in machine._named_prefixes._named.values()
            },
        }

    def kept(self) -> dict[str, Any]:
        """What the state knows."""
        found = self.state.recovered_state(0)
        members = [
            (m.info, m.is_draining, m.next_event, as_set(m.hbm), as_set(m.dram), as_set(m.ssd)) for m in found.members
        ]
        return {
            "members": members,
            "gone": list(found.dead_peers),
            "sessions": sorted(((way.tenant, way.session), way.peers) for way in found.sessions),
            "handles": {(pin.tenant, pin.handle): (pin.tokens, pin.expires_ns) for pin in found.handles},
        }


def as_set(run: bytes) -> frozenset[bytes]:
    return frozenset(run[at : at + 16] for at in range(0, len(run), 16))


def stored(first: int, *blocks: bytes, tier: Tier = Tier.HBM) -> KvEvents:
    return KvEvents(first, (KvChange("stored", tier, b"".join(blocks)),))


P1, P2 = Peer("p1", 10), Peer("p2", 20)


@pytest.fixture
def world() -> World:
    """Two members; the second has the prompt's first three blocks."""
    world = World()
    for peer in (P1, P2):
        world.hear(peer, Join(info(peer)))
    world.hear(P2, stored(0, *world.blocks()[:3]))
    return world


# -- stories


def test_durable_records_precede_sends(world: World) -> None:
    assert world.order == ["Note"]  # entries may come later
    world.hear(Peer("p3", 1), Join(info(Peer("p3", 1))))
    assert world.order[0] == "Remember" and set(world.order[1:]) == {"Send"}
    world.handle(InstanceDrained("p3"))
    assert world.order == ["Remember", "Send"]
    world.handle(PrefixPinned("doc", "", PROMPT, NS_PER_S))
    assert world.order == ["Remember", "Send"] and world.told(Pin)
    world.hear(Peer("p3", 1), Leave())
    assert world.order[0] == "Remember" and world.told(PeerGone)
    assert "Remember" not in Cluster(CONFIG).handle(MessageArrived(P1, Join(info(P1))), 0)


def test_next_router_routes_by_recovered_entries(world: World) -> None:
    assert world.ask("before") == P2
    after = world.successor()
    assert {send.to for send in after.told(RejoinRequest)} == {P1, P2}
    assert all(send.message.address == "tcp://r:2" for send in after.told(RejoinRequest))
    assert after.ask("early") is None  # nobody has answered yet: it waits
    after.hear(P2, Join(info(P2)))
    assert after.told(JoinAccepted)[0].to == P2 and after.told(Dispatch)[0].to == P2
    after.hear(P1, Join(info(P1)))
    assert after.ask("later") == P2, "no snapshot has come, and the entries are known"
    stats = after.machine.stats()
    assert stats.counters.members_readopted == 2 and stats.counters.members_joined == 0
    assert stats.counters.matched_tokens == 12 + 16  # three recovered blocks, and then the one that is expected


class RoomForOne(World):
    """Its gate lets in as many as there are instances."""

    config = replace(CONFIG, admission=AdmissionConfig(Admission.MEMORY, unit_tokens=256))


def test_rejoined_instance_gives_room_to_queued_requests() -> None:
    """The gate looks when something has happened: also when an instance opens that it has known as closed."""
    before = RoomForOne()
    for peer in (P1, P2):
        before.hear(peer, Join(info(peer)))
    after = before.successor()
    after.hear(P1, Join(info(P1)))
    assert after.ask("first") == P1 and after.ask("second") is None
    after.hear(P2, Join(info(P2)))
    assert [send.to for send in after.told(Dispatch)] == [P2]


def test_entries_of_a_dead_incarnation_are_not_counted(world: World) -> None:
    after, newer = world.successor(), Peer("p2", 21)
    after.hear(newer, Join(info(newer)))
    assert after.machine._trees.holdings_of(after.machine._registry.member_by_name("p2").number) == (b"", b"")
    assert after.ask("r") == newer  # the only one that is there
    assert after.machine.stats().counters.matched_tokens == 0
    assert after.hear(P2, Heartbeat(Load()))[0].message == Expelled("this incarnation is no member")


def test_member_without_rejoin_is_removed_for_good(world: World) -> None:
    after = world.successor()
    after.hear(P1, Join(info(P1)))
    for _ in range(3):
        after.hear(P1, Heartbeat(Load()), after_ns=NS_PER_S)
    assert [view.peer for view in after.machine.instances()] == [P1]
    assert MemberGone(P2) in list(after.state.checkpoint_records())
    again = after.successor()
    assert {send.to for send in again.told(RejoinRequest)} == {P1}
    assert isinstance(again.hear(P2, Join(info(P2)))[0].message, Expelled)


def test_a_lost_recall_is_repeated_at_the_next_sign_of_life(world: World) -> None:
    after = world.successor()
    for _ in range(2):
        [answer] = after.hear(P1, Heartbeat(Load()), after_ns=100 * NS_PER_MS)
        assert answer == Send(P1, RejoinRequest("tcp://r:2", after=1))
    assert after.hear(P1, stored(0, identities(1)))[0].message == RejoinRequest("tcp://r:2", after=1), (
        "old news: nothing is applied"
    )


def test_store_that_joined_another_router_is_forgotten(world: World) -> None:
    """It is not asked again and again; when it is free again, it joins as another incarnation."""
    after = world.successor()
    sent = after.hear(P1, Refused("it belongs to another"))
    assert [send.to for send in sent] == [P2], "it is not asked to rejoin"
    assert MemberGone(P1) in list(after.state.checkpoint_records())
    assert [view.peer for view in after.machine.instances()] == [P2]
    assert isinstance(after.hear(P1, Join(info(P1)))[0].message, Expelled)


def test_draining_state_survives_router_restart(world: World) -> None:
    world.handle(InstanceDrained("p2"))
    after = world.successor()
    after.hear(P2, Join(info(P2)))
    assert after.told(Drain) and after.ask("r") is None
    after.hear(P1, Join(info(P1)))
    assert after.told(Dispatch)[0].to == P1


def test_sessions_and_handles_find_their_places_again(world: World) -> None:
    assert world.ask("r", session="s") == P2
    world.handle(PrefixPinned("s", "", PROMPT, 100 * NS_PER_S))
    after = world.successor(downtime_ns=NS_PER_S)
    for peer in (P1, P2):
        after.hear(peer, Join(info(peer)))
    assert not after.told(Pin)
    after.handle(ClockTicked(), after_ns=NS_PER_S)
    [pin] = after.told(Pin)
    assert pin.to == P2 and pin.message.ttl_ns == 98 * NS_PER_S and (pin.message.tokens == PROMPT).all()
    assert after.machine._sessions.member_numbers("", "s") == (after.machine._registry.member_by_name("p2").number,)


def test_handles_that_have_expired_meanwhile_are_forgotten(world: World) -> None:
    world.handle(PrefixPinned("s", "", PROMPT, NS_PER_S))
    after = world.successor(downtime_ns=2 * NS_PER_S)
    assert not after.machine.handles() and not after.state.handles


def test_recovered_entries_do_not_block_another_model(world: World) -> None:
    after, other = world.successor(), Peer("p1", 11)
    answer = after.hear(other, Join(msgspec.structs.replace(info(other), namespace="other")))
    assert not any(isinstance(send.message, Refused) for send in answer)
    assert [view.peer for view in after.machine.instances()] == [other]


def test_every_router_has_a_higher_generation_on_record(world: World) -> None:
    after = world.successor()
    assert after.state.router == Peer("router", 2) and after.order[0] == "Remember"
    assert next(after.state.checkpoint_records()) == RouterStarted(Peer("router", 2), "tcp://r:2")


class KeepingWorld(World):
    """Of what has ended one request may be evicted for a newcomer, for a minute."""

    config = replace(CONFIG, admission=AdmissionConfig(Admission.MEMORY, evictions_max=1, output_tokens_max=0))


def test_next_router_evicts_recovered_entries_by_last_use() -> None:
    """The times of recovered entries: they count as used for a minute from their last use, and go in that order."""
    world = KeepingWorld()
    world.hear(P1, Join(info(P1)))
    for first in range(3):  # the first two blocks are created at 0 s and 10 s, the third one in DRAM
        world.hear(P1, stored(first, world.blocks()[first], tier=Tier(first // 2)), after_ns=first and 10 * NS_PER_S)
    world.state.apply([EntryUsed(P1, world.blocks()[0], world.now)])  # at 20 s
    after = world.successor(downtime_ns=5 * NS_PER_S)
    after.hear(P1, Join(info(P1)))
    ledger = after.machine._lifecycle.admission.memory.ledger
    kept_last, used_last = ledger.inactive_requests(0)
    total = int(ledger.blocks_total(np.array([0]))[0])
    assert ledger.blocks_free(0) == total - 2
    assert ledger.evict_for(Need(total - 1), [0], 1).evicted == (kept_last,), "used at 10 s"
    for after_ns, free in ((54 * NS_PER_S, 1), (2 * NS_PER_S, 0)):  # until 79 s, and 81 s
        after.hear(P1, Heartbeat(Load()), after_ns=after_ns)
        assert ledger.blocks_free(0) == total - free and list(ledger.inactive_requests(0)) == [used_last][:free]


# -- at random: the state is the machine's twin


class Index:
    """What one incarnation has cached, and all changes of it."""

    def __init__(self, rng: random.Random, tiers: tuple[Tier, Tier]) -> None:
        self.rng, self.held, self.log, self.tiers = rng, dict[bytes, Tier](), list[KvChange](), tiers

    def change(self) -> None:
        for _ in range(self.rng.randrange(1, 4)):
            block, tier = identities(self.rng.randrange(12)), self.rng.choice(self.tiers)
            if block not in self.held:
                self.log.append(KvChange("stored", tier, block))
                self.held[block] = tier
            elif self.rng.random() < 0.5:
                self.log.append(KvChange("evicted", self.held.pop(block), block))
            elif self.held[block] is not tier:
                self.log.append(KvChange("moved", tier, block))
                self.held[block] = tier


def role_of(peer: Peer) -> Role:
    """One of the four is a store."""
    return Role.STORE if peer.name == "i3" else Role.COLOCATED


class RandomLife(World):
    """Members come, fill their caches, lose messages, drain, die; clients pin and ask; routers are killed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rng, self.indexes = random.Random(0), dict[Peer, Index]()

    def step(self) -> None:
        rng = self.rng
        members = [member.peer for member in self.machine._registry]
        ops = [self.joins, self.time_passes, self.asks, self.pins, self.unpins]
        if members:
            ops += [self.tells] * 3 + [self.beats, self.snapshots, self.drains, self.leaves, self.answers]
        rng.choice(ops)(rng.choice(members) if members else None)

    def joins(self, _: Any) -> None:
        peer = Peer(f"i{self.rng.randrange(4)}", self.rng.randrange(1, 50))
        self.hear(peer, Join(msgspec.structs.replace(info(peer), role=role_of(peer))))

    def time_passes(self, _: Any) -> None:
        self.handle(ClockTicked(), after_ns=self.rng.randrange(700 * NS_PER_MS))

    def asks(self, _: Any) -> None:
        self.ask(f"r{self.now}-{self.rng.random()}", session=self.rng.choice(["", "s1", "s2"]))

    def answers(self, peer: Peer) -> None:
        """All that runs there ends."""
        member = self.machine._registry.get(peer)
        for attempt in list(member.attempts):
            self.hear(peer, Tokens((TokenOutput(attempt, 0, (1,), finish_reason=FinishReason.LENGTH),)))

    def pins(self, _: Any) -> None:
        self.handle(PrefixPinned(f"h{self.rng.randrange(3)}", "", PROMPT, self.rng.randrange(1, 4) * NS_PER_S))

    def unpins(self, _: Any) -> None:
        self.handle(PrefixUnpinned(f"h{self.rng.randrange(3)}", ""))

    def tells(self, peer: Peer) -> None:
        """Its index changes; of what it says some comes again, some is lost, and some comes behind a gap."""
        rng, index = self.rng, self.index_of(peer)
        index.change()
        log = index.log
        known = self.machine._trees.feed_of(self.machine._registry.get(peer).number).next_event
        first = min(len(log), max(0, known + rng.choice([0, 0, 0, 1, 2, -1])))
        self.hear(peer, KvEvents(first, tuple(log[first : first + rng.randrange(1, 4)])))
        for send in self.told(QueryKvEvents):
            if rng.random() < 0.5:
                self.hear(peer, KvEvents(send.message.first, tuple(log[send.message.first :])))

    def snapshots(self, peer: Peer) -> None:
        index = self.index_of(peer)
        tiers = ([block for block, at in index.held.items() if at is tier] for tier in Tier)
        hbm, dram, ssd = (b"".join(blocks) for blocks in tiers)
        self.hear(peer, KvSnapshot(len(index.log), hbm, dram, ssd))

    def index_of(self, peer: Peer) -> Index:
        return self.indexes.setdefault(peer, Index(self.rng, tiers_of(role_of(peer))))

    def beats(self, peer: Peer) -> None:
        self.hear(peer, Heartbeat(Load()))

    def drains(self, peer: Peer) -> None:
        if self.rng.random() < 0.2:
            self.handle(InstanceDrained(peer.name))

    def leaves(self, peer: Peer) -> None:
        if self.rng.random() < 0.2:
            self.hear(peer, Leave())


@pytest.mark.parametrize("seed", range(25))
def test_journal_state_equals_machine_through_many_routers(seed: int) -> None:
    world, rng = RandomLife(), random.Random(seed)
    world.rng = rng
    for _ in range(rng.randrange(2, 4)):
        for _ in range(60):
            world.step()
            assert world.kept() == world.knows()
        before, indexes, world = world.kept(), world.indexes, world.successor()
        world.rng, world.indexes = rng, indexes
        assert world.knows() == before == world.kept()
        for member in list(world.machine._registry):
            if rng.random() < 0.7:
                world.hear(member.peer, Join(member.info))
