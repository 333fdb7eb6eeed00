"""What routers hear without asking: one at once, several in bundles."""

from __future__ import annotations

import random

import pytest

from memserve.base.types import KVGeometry, Role, Tier
from memserve.instance.cluster.routers import BUNDLE_NS, Routers, RouterUpdates
from memserve.kv.events import KvEvent, KvEventKind, KvFeed
from memserve.protocol.events import Send
from memserve.protocol.messages import Heartbeat, KvEvents, KvSnapshot
from memserve.protocol.peers import Load, Peer, PeerInfo

OWNER, R2, R3 = Peer("router", 5), Peer("router-2", 1), Peer("router-3", 1)
LOAD = Load(requests_waiting=7, dispatches_heard=3)
GEOMETRY = KVGeometry(1, 1, 1, 1, "float32", 1)


class Index:
    """Changes, and nothing that is kept."""

    def __init__(self) -> None:
        self.next_event = 0
        self._new: list[KvEvent] = []

    def change(self, count: int = 1) -> None:
        for _ in range(count):
            identity = self.next_event.to_bytes(16, "little")
            self._new.append(KvEvent(self.next_event, KvEventKind.STORED, Tier.HBM, (identity,)))
            self.next_event += 1

    def take_events(self) -> list[KvEvent]:
        taken, self._new = self._new, []
        return taken

    def cached_identities(self, tier: Tier) -> bytes:
        return b""


class World:
    """An instance's news and its routers, each of which counts what it has heard."""

    def __init__(self, *followers: Peer, kept: int = 100) -> None:
        self.index, self.routers = Index(), Routers(100)
        self.routers.owner = OWNER
        self.routers.set_members([PeerInfo(peer, Role.ROUTER, "", "", GEOMETRY, 0, 0, 0, False) for peer in followers])
        self.news = RouterUpdates(self.routers, KvFeed(self.index, kept), lambda: LOAD)
        self.heard = dict.fromkeys((OWNER, *followers), 0)
        self.loads = dict.fromkeys((OWNER, *followers), 0)
        self.take(0)  # routers hear what happens from here on, and ask for the rest

    def take(self, now_ns: int) -> list[Peer]:
        """Which routers are told something."""
        said = self.news.take_messages(now_ns)
        self.news.check_invariants()
        for send in said:
            self._hear(send)
        return [*dict.fromkeys(send.to for send in said)]

    def _hear(self, send: Send) -> None:
        message = send.message
        if isinstance(message, KvEvents):
            assert message.first == self.heard[send.to], "news with a gap, or twice"
            self.heard[send.to] += len(message.changes)
            if message.load is not None:
                self._hear_load(send.to, message.load)
        elif isinstance(message, KvSnapshot):
            self.heard[send.to] = message.next_event
        else:
            assert isinstance(message, Heartbeat) and message == Heartbeat(message.load, self.index.next_event)
            self._hear_load(send.to, message.load)

    def _hear_load(self, router: Peer, load: Load) -> None:
        assert load == Load(requests_waiting=7, dispatches_heard=None)
        assert self.heard[router] == self.index.next_event, "a load that claims changes before they are told"
        self.loads[router] += 1


def test_single_router_gets_updates_immediately() -> None:
    it = World()
    for now in range(5):
        it.index.change()
        it.news.on_attempt_placed(OWNER)
        assert it.take(now) == [OWNER]
    assert it.heard == {OWNER: 5} and it.loads == {OWNER: 0} and it.take(9) == []


def test_of_several_routers_each_hears_in_bundles() -> None:
    it = World(R2)
    it.index.change()
    it.news.on_attempt_placed(R2)
    assert it.take(1) == [OWNER, R2], "quiet so far: at once"
    for now in (2, 3):
        it.index.change()
        it.news.on_attempt_placed(R2)
        assert it.take(now) == []
        assert it.news.next_deadline_ns == 1 + BUNDLE_NS
    assert it.take(BUNDLE_NS) == []
    assert it.take(1 + BUNDLE_NS) == [OWNER, R2] and it.news.next_deadline_ns is None
    assert it.heard == {OWNER: 3, R2: 3} and it.loads == {OWNER: 2, R2: 0}


def test_changes_and_load_go_in_one_letter_and_a_load_goes_alone() -> None:
    it = World(R2)
    it.index.change()
    it.news.on_attempt_placed(OWNER)
    letters = [send for send in it.news.take_messages(1) if send.to == R2]
    assert len(letters) == 1 and isinstance(letters[0].message, KvEvents) and letters[0].message.load is not None
    it.news.on_attempt_placed(OWNER)
    (letter,) = it.news.take_messages(1 + BUNDLE_NS)
    assert letter.to == R2 and isinstance(letter.message, Heartbeat)


def test_a_heartbeat_claims_no_change_that_waits() -> None:
    """A router takes what it is told to have missed for lost, and asks. That helps where the clock was set back."""
    it = World(R2)
    start = 10 * BUNDLE_NS
    it.index.change()
    it.take(start)
    it.index.change(3)
    assert it.take(start + 1) == []
    assert [it.news.for_heartbeat(router, start + 2) for router in (OWNER, R2, None)] == [1, 1, 4]
    for late_or_early in (start + BUNDLE_NS, 5):
        assert [it.news.for_heartbeat(router, late_or_early) for router in (OWNER, R2)] == [4, 4]


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    it = World(R2)
    it.index.change()
    it.take(1000 * BUNDLE_NS)
    it.index.change()
    assert it.take(3) == [OWNER, R2]


def test_query_answer_counts_as_delivered_update() -> None:
    it = World(R2)
    it.index.change()
    it.take(1)
    it.index.change(2)
    answer = it.news.catch_up(R2, 0)
    assert isinstance(answer, KvEvents) and (answer.first, len(answer.changes)) == (0, 3)
    assert it.take(2) == []
    assert it.take(1 + BUNDLE_NS) == [OWNER]


def test_router_beyond_retained_updates_gets_full_state() -> None:
    it = World(R2, kept=4)
    it.index.change()
    it.take(1)
    for now in range(2, 10):
        it.index.change()
        assert it.take(now) == []
    assert it.take(1 + BUNDLE_NS) == [OWNER, R2] and it.heard == {OWNER: 9, R2: 9}


def test_routers_come_and_go() -> None:
    it = World(R2)
    it.index.change()
    it.take(0)
    it.routers.remove_member(R2)
    it.index.change()
    assert it.take(1) == [OWNER], "alone again"
    it.routers.set_members([PeerInfo(R3, Role.ROUTER, "", "", GEOMETRY, 0, 0, 0, False)])
    it.heard[R3] = it.loads[R3] = it.index.next_event  # it asks for what there is
    it.take(2)
    it.index.change()
    assert it.take(2 + BUNDLE_NS) == [OWNER, R3]


@pytest.mark.parametrize("seed", range(20))
def test_every_router_hears_everything_in_order(seed: int) -> None:
    """No gap, no letter between bundles, and nothing is left once the time of a bundle is over."""
    rng = random.Random(seed)
    it = World(R2, R3)
    now, last = 1, dict.fromkeys(it.heard, 0)
    for _ in range(300):
        now += rng.choice((0, 1, BUNDLE_NS // 3, BUNDLE_NS, 3 * BUNDLE_NS))
        if rng.random() < 0.5:
            it.index.change(rng.randrange(1, 4))
        if rng.random() < 0.3:
            it.news.on_attempt_placed(rng.choice([*it.heard]))
        for router in it.take(now):
            assert now - last[router] >= BUNDLE_NS or not last[router]
            last[router] = now
        for router, number in it.heard.items():
            assert number == it.index.next_event or it.news.next_deadline_ns is not None, router
    it.take(now + BUNDLE_NS)
    assert set(it.heard.values()) == {it.index.next_event} and it.news.next_deadline_ns is None
