"""Stories of a store that was told of no router: it serves clients, is called, and is alone again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exchange_world import BLOCK, LEASE_NS
from memserve.base.config import MemberConfig
from memserve.base.types import ClockTicked
from memserve.base.units import NS_PER_S
from memserve.protocol.member_events import DrainRequested
from memserve.protocol.messages import JoinAccepted, Leave
from memserve.protocol.store import JoinRequest, StoreCode
from store_world import ROUTER_PEER, Client, StoreWorld, push

PROMPT = list(range(100, 100 + 4 * BLOCK + 1))  # four whole blocks and a token
CALL = JoinRequest("tcp://router:1")
SILENT_NS = MemberConfig().silent_after_ns


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    world = StoreWorld()
    yield world
    world.run()
    if world.store.ended is None:
        world.store.check_empty()
    world.close()


def put(client: Client, name: bytes, value: bytes) -> None:
    call = client.put({name: value})
    client.world.run()
    assert client.answers[call].codes == bytes([StoreCode.DONE])


def read(client: Client, name: bytes) -> bytes:
    call = client.get(name)
    client.world.run()
    return client.answers[call].values[0]


def be_silent(world: StoreWorld, client: Client) -> None:
    """The router says nothing for so long that it is taken to be gone; the client greets the store meanwhile."""
    until = world.now + SILENT_NS + NS_PER_S
    while world.now < until:
        world.wait(NS_PER_S)
        client.hello()
        world.run()


def test_the_first_instance_of_another_model_than_it_has_kept(world) -> None:
    """It joins long after the store was called: a model takes its time to load."""
    world.open_store(blocks=8, namespace="of an earlier life", is_called=True)
    world.store.hear(ROUTER_PEER, CALL)
    world.store.join([world.store.info()])
    p = world.add("p", hbm=8)
    world.joins(p)
    assert [(one.namespace, one.of) for one in world.store.serves] == [(p.info().namespace, "p")]


def test_the_next_router_may_have_another_model(world) -> None:
    world.open_store(blocks=8, is_called=True)
    world.store.hear(ROUTER_PEER, CALL)
    world.instance("p")
    world.dies("p")
    assert not world.store.serves
    world.store.join([world.store.info()])
    world.joins(world.add("q", hbm=8, namespace="another model"))
    assert [(one.namespace, one.of) for one in world.store.serves] == [("another model", "q")]


def test_store_keeps_values_before_during_and_after_a_router(world) -> None:
    """What instances have offered stays, and is there for those of the next router."""
    world.open_store(blocks=8, is_called=True)
    client = world.client("a")
    put(client, b"mine", b"value")
    world.store.hear(ROUTER_PEER, JoinAccepted(()))
    assert world.store.machine.member.router is None, "it asked no router"

    world.store.hear(ROUTER_PEER, CALL)
    p = world.instance("p")
    push(world, p, "t", PROMPT)
    world.run()
    assert world.store.check_kv("t", PROMPT) == 4 and len(world.store.known_to_router()) == 4

    be_silent(world, client)
    assert world.store.machine.member.is_detached and not world.store.exchange._context.peers.members()
    assert "waits to be called" in world.store.notices[-1]
    assert read(client, b"mine") == b"value" and world.store.check_kv("t", PROMPT) == 4
    told = len(world.store.told)
    put(client, b"more", b"x" * 9)
    assert len(world.store.told) == told, "there is no router to be told of anything"

    world.store.hear(ROUTER_PEER, CALL)
    d = world.instance("d")
    assert len(world.store.known_to_router()) == 4, "the router gets a snapshot"
    d.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    assert d.check_cache("t", PROMPT) == 4


def test_transfers_with_instances_end_with_their_router(world) -> None:
    """An offer that is being pulled: nothing is held for instances of a router that is gone."""
    world.open_store(blocks=8, is_called=True)
    world.store.hear(ROUTER_PEER, CALL)
    p = world.instance("p")
    push(world, p, "t", PROMPT[: 2 * BLOCK])
    world.run()
    push(world, p, "u", PROMPT)
    while not world.store.pulls:
        assert world.step(pulls=False)
    assert world.store.exchange.transfers_open
    # the router is silent: no event but the clock's
    world.now += SILENT_NS + NS_PER_S
    world.store.tell(ClockTicked())
    assert world.store.machine.member.is_detached
    while world.store.pulls:
        world.store.answer(world.store.pulls[0])
    world.run()
    world.store.check_empty()


def test_store_shutdown_messages_name_a_store(world) -> None:
    world.open_store(blocks=16, disks=1)
    client = world.client("a")
    world.store.stalls = True
    for number in range(3):
        put(client, b"value %d" % number, bytes([number]) * 99)
    world.store.tell(DrainRequested(7 * NS_PER_S, "SIGTERM"))
    said = "SIGTERM: store s ends; it keeps 0 values on disks and writes 3 more, for 7 s at most"
    assert world.store.notices == [said]
    world.wait(8 * NS_PER_S)
    assert world.store.notices[1:] == ["the time is over: store s has not written 3 values"]
    assert world.store.ended is not None


def test_shutdown_without_pending_writes_is_logged(world) -> None:
    world.open_store(blocks=16, disks=1)
    client = world.client("a")
    put(client, b"value", bytes(99))
    world.store.tell(DrainRequested(7 * NS_PER_S, "SIGTERM"))
    world.run()
    assert world.store.notices == ["SIGTERM: store s ends; it keeps 1 values on disks"]
    assert world.store.ended is not None


def test_store_releases_all_and_is_free_after_leave(world) -> None:
    """Of its router, or of an instance whose router is silent."""
    world.open_store(blocks=8, is_called=True)
    world.store.hear(ROUTER_PEER, CALL)
    p = world.instance("p")
    push(world, p, "t", PROMPT)
    while not world.store.pulls:
        assert world.step(pulls=False)
    assert world.store.exchange.transfers_open
    world.store.hear(p.peer, Leave())
    while world.store.pulls:
        world.store.answer(world.store.pulls[0])
    assert not world.store.exchange.transfers_open and world.now < LEASE_NS

    world.store.hear(ROUTER_PEER, Leave())
    assert world.store.machine.member.is_detached
    assert world.store.notices[-1] == "the router at tcp://router:1 ends; s waits to be called by another"
