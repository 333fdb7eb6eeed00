"""Stories of a store and instances: what is offered is kept and lent, wherever it lies, and nothing else ever is."""

from __future__ import annotations

import pytest

from disks_world import split
from exchange_world import BLOCK, LEASE_NS, Node, array
from memserve.base.types import Role, Tier
from memserve.base.units import NS_PER_S
from memserve.kv.transfer.events import FetchEnded, Released
from memserve.kv.transfer.exchange import OfferedBlocks
from memserve.protocol.messages import (
    KEEP,
    Heartbeat,
    KvEvents,
    KvSnapshot,
    Offer,
    PeerGone,
    PeerJoined,
    QueryKvEvents,
    Release,
    Withdraw,
)
from memserve.protocol.peers import Peer, PeerInfo
from memserve.protocol.store import ForgetKv, KvUsed
from memserve.router.follower import NO_KV
from memserve.store.disks.events import DisksConfig
from store_world import BLOCK_BYTES, ROUTER_PEER, Client, StoreWorld, push

PROMPT = list(range(100, 100 + 4 * BLOCK + 1))  # four whole blocks and a token


def fetch(
    world: StoreWorld, node: Node, tenant: str = "t", tokens: list[int] = PROMPT, patience: int = LEASE_NS
) -> int:
    """Blocks that a node has after it has asked the store."""
    node.fetch(world.store.peer, tenant, tokens, world.now + patience)
    world.run()
    return node.check_cache(tenant, tokens)


def ends(node: Node, kind: type) -> list:
    return [outcome for outcome in node.outcomes if isinstance(outcome, kind)]


def test_offered_blocks_are_fetched_by_another_instance(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    offer = push(world, p, "t", PROMPT)
    world.run()
    assert ends(p, Released)[0].used and p.offers[offer] is False
    assert world.store.check_kv("t", PROMPT) == 4
    assert set(world.store.known_to_router().values()) == {Tier.DRAM}
    assert fetch(world, d) == 4
    assert ends(d, FetchEnded)[0].ok


def test_every_router_hears_what_the_store_holds(world) -> None:
    """The owner and each follower, as long as that is a member: changes, heartbeats, and what it asks for."""
    world.open_store(blocks=8)
    p = world.instance("p")
    router, stranger = (world.clients.setdefault(name, Client(world, Peer(name, 3))) for name in ("router-2", "x"))
    info = PeerInfo(router.peer, Role.ROUTER, "tcp://r", "", NO_KV, 0, 0, 0, False)
    push(world, p, "t", PROMPT)
    world.run()
    world.store.hear(ROUTER_PEER, PeerJoined(info))
    world.wait(NS_PER_S)
    world.run()
    (beat,) = [said for said in router.heard if isinstance(said, Heartbeat)]
    for one in (router, stranger):
        one.say(QueryKvEvents(0))
    world.run()
    (whole,) = [said for said in router.heard if isinstance(said, KvSnapshot)]
    assert beat.next_event == whole.next_event > 0 and not stranger.heard
    assert set(split(whole.dram)) == set(world.store.identities("t", PROMPT))
    push(world, p, "u", PROMPT)
    world.run()
    (news,) = [said for said in router.heard if isinstance(said, KvEvents)]
    assert news.first == beat.next_event
    world.store.hear(ROUTER_PEER, PeerGone(router.peer, "it died"))
    said = len(router.heard)
    push(world, p, "v", PROMPT[: 2 * BLOCK + 1])
    world.wait(NS_PER_S)
    world.run()
    assert len(router.heard) == said and world.store.told[-1].first > news.first


def test_tenants_share_nothing(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    assert fetch(world, d, "other") == 0
    assert "not cached" in ends(d, FetchEnded)[0].reason


def test_blocks_that_are_here_are_not_pulled_again(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT[: 2 * BLOCK])
    world.run()
    pulled = world.store.exchange.counters.pulled_bytes
    push(world, d, "t", PROMPT)
    world.run()
    assert world.store.exchange.counters.pulled_bytes == 2 * pulled
    assert world.store.check_kv("t", PROMPT) == 4
    push(world, p, "t", PROMPT)
    world.run()
    assert world.store.exchange.counters.pulled_bytes == 2 * pulled
    assert all(outcome.used for outcome in ends(p, Released))
    assert world.store.machine.counters.kv_known == 2 + 4


def test_blocks_come_layer_by_layer(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT[:BLOCK])
    world.run()
    seq = p.compute("t", PROMPT)
    offer = p.offer(world.store.peer, seq, 0, 4)
    world.run()
    for layer in range(3):
        p.exchange.announce_computed(offer, 0, 4, layer, layer + 1)
        p.take([])
        world.run()
    p.end(seq)
    assert world.store.check_kv("t", PROMPT) == 4 and fetch(world, d) == 4


def test_offer_without_its_prefix_is_found_once_that_arrives(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    seq = p.compute("t", PROMPT)
    offer = p.offer(world.store.peer, seq, 2, 4)
    p.exchange.announce_computed(offer, 2, 4)
    p.take([])
    p.end(seq)
    world.run()
    assert fetch(world, d) == 0
    push(world, p, "t", PROMPT)
    world.run()
    assert fetch(world, d) == 4


def test_room_is_made_by_giving_up_what_was_not_asked_for(world) -> None:
    world.open_store(blocks=4)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", [1] * 3 * BLOCK)
    world.run()
    push(world, p, "t", [2] * 3 * BLOCK)
    world.run()
    assert world.store.check_kv("t", [2] * 3 * BLOCK) == 3
    assert len(world.store.known_to_router()) == 4
    assert fetch(world, d, tokens=[2] * 3 * BLOCK) == 3


def test_offer_larger_than_the_store_is_refused(world) -> None:
    world.open_store(blocks=3)
    p = world.instance("p")
    push(world, p, "t", PROMPT)
    world.run()
    assert not ends(p, Released)[0].used and "do not fit" in ends(p, Released)[0].reason


def test_evicted_blocks_return_from_disk(world) -> None:
    world.open_store(blocks=4, disks=2)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    push(world, p, "t", [2] * 4 * BLOCK)
    world.run()
    assert set(world.store.known_to_router().values()) == {Tier.DRAM, Tier.SSD}
    assert world.store.check_kv("t", PROMPT) == 0
    assert fetch(world, d) == 4
    assert world.store.machine.counters.loads == 4


def test_two_fetches_of_the_same_blocks_read_them_once(world) -> None:
    world.open_store(blocks=4, disks=1)
    p, d, e = world.instance("p"), world.instance("d"), world.instance("e")
    push(world, p, "t", PROMPT)
    world.run()
    push(world, p, "t", [2] * 4 * BLOCK)
    world.run()
    world.store.stalls = True
    for node in (d, e):
        node.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    world.store.stalls = False
    world.run()
    assert d.check_cache("t", PROMPT) == e.check_cache("t", PROMPT) == 4
    assert world.store.machine.counters.loads == 4 and world.store.machine.counters.loads_joined == 4


def test_a_disk_that_fails_cuts_the_prefix_there(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT[: 2 * BLOCK])
    world.run()
    push(world, p, "t", PROMPT)
    world.run()
    for identity in world.store.identities("t", PROMPT)[2:]:
        world.store.tier.remove(identity)
        world.store.machine.values._on_evicted(identity)
    world.store.fails = True
    assert fetch(world, d) == 2
    assert ends(d, FetchEnded)[0].ok and world.store.machine.counters.fetches_cut == 1


def test_a_disk_that_does_not_answer_in_time_cuts_the_prefix(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    last = world.store.identities("t", PROMPT)[-1]
    world.store.tier.remove(last)
    world.store.machine.values._on_evicted(last)
    world.store.stalls = True
    d.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    assert not ends(d, FetchEnded)
    world.now += LEASE_NS // 2
    world.store.advance()
    world.run()
    assert d.check_cache("t", PROMPT) == 3
    world.store.stalls = False


def test_slow_disk_reads_end_in_time_for_a_short_fetch_deadline(world) -> None:
    """The reads end early enough that what has come can still be moved."""
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    last = world.store.identities("t", PROMPT)[-1]
    world.store.tier.remove(last)
    world.store.machine.values._on_evicted(last)
    world.store.stalls = True
    waits_ns = LEASE_NS // 4
    d.fetch(world.store.peer, "t", PROMPT, world.now + waits_ns)
    world.run()
    world.now += waits_ns * 3 // 4
    world.store.advance()
    world.run()
    assert d.check_cache("t", PROMPT) == 3 and world.store.machine.counters.fetches_cut == 1
    world.store.stalls = False


def test_nothing_here_is_said_at_once(world) -> None:
    world.open_store(blocks=8)
    d = world.instance("d")
    assert fetch(world, d) == 0 and not ends(d, FetchEnded)[0].ok


def test_damage_on_a_disk_is_found_and_the_block_forgotten(world) -> None:
    world.open_store(blocks=4, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    push(world, p, "t", [2] * 4 * BLOCK)
    world.run()
    disk = world.store.literal[0]
    disk.sync_writes()
    for at in range(len(disk.synced) - BLOCK_BYTES):
        if disk.synced[at : at + 16] == world_page(world, 1):
            disk.synced[at + 3] ^= 1
            break
    assert fetch(world, d) == 1
    assert world.store.identities("t", PROMPT)[1] not in world.store.known_to_router()


def world_page(world: StoreWorld, block: int) -> bytes:
    from exchange_world import pages

    return pages("t", array(PROMPT), block)[0].tobytes()


def test_memory_of_killed_store_is_verified_before_export(world) -> None:
    world.open_store(blocks=8)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    store = world.restart()
    assert len(store.known_to_router()) == 4 and store.machine.counters.compared == 0
    place = store.tier.find(store.identities("t", PROMPT)[2], counts=False)
    store.tier.release(place.offset)
    assert not place.verified
    store.bytes[place.offset + 5] ^= 1
    assert fetch(world, d) == 2
    counters = store.machine.counters
    assert counters.compared == 3 and counters.damaged == 1
    assert store.identities("t", PROMPT)[2] not in store.known_to_router()


def test_damage_in_memory_is_mended_from_the_disk(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    store = world.restart()
    place = store.tier.find(store.identities("t", PROMPT)[2], counts=False)
    store.tier.release(place.offset)
    store.bytes[place.offset + 5] ^= 1
    assert fetch(world, d) == 4
    assert store.machine.counters.damaged == 1 and store.machine.counters.loads == 1


@pytest.mark.parametrize("power", [False, True])
def test_blocks_on_disks_survive_the_store(world, power) -> None:
    world.open_store(blocks=8, disks=2, disks_config=DisksConfig(sync="always"))
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    store = world.restart(power=power)
    assert set(store.known_to_router().values()) == {Tier.SSD if power else Tier.DRAM}
    assert fetch(world, d) == 4


def test_disk_dropping_blocks_keeps_copies_on_other_disk(world) -> None:
    """Each disk was a store's only one for a time, and was given the same blocks; then one store has both."""
    world.open_store(blocks=8, disks=2, disks_config=DisksConfig(sync="always", admission="all"))
    both, p = world.store.literal, world.instance("p")
    for disk in both:
        world.store.literal = [disk]
        world.restart(power=True)
        push(world, p, "t", PROMPT)
        world.run()
    world.store.literal = both
    store = world.restart(power=True)
    identities = store.identities("t", PROMPT)
    first, second = store.machine.values.disks._live_logs()
    assert all(identity in log for log in (first, second) for identity in identities)

    store.fails = True  # the disk that is asked first drops each block that it cannot read, and is lost in the end
    assert fetch(world, world.instance("d")) == 0
    store.fails = False
    assert store.machine.values.disks._live_logs() == [second]
    assert all(identity in second for identity in identities)
    assert store.known_to_router() == dict.fromkeys(identities, Tier.SSD)
    assert fetch(world, world.instance("e")) == 4


def test_an_orderly_end_writes_what_is_in_memory_alone(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    world.store.stalls = True
    push(world, p, "t", PROMPT)
    world.run()
    world.store.stalls = False
    store = world.restart(orderly=True)
    assert set(store.known_to_router().values()) == {Tier.SSD}
    assert fetch(world, d) == 4


def test_an_instance_that_dies_leaves_nothing(world) -> None:
    world.open_store(blocks=4, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    push(world, p, "t", [2] * 4 * BLOCK)
    world.run()
    world.store.stalls = True
    d.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    seq = p.compute("t", [3] * 4 * BLOCK)
    p.offer(world.store.peer, seq, 0, 4)
    while world.links:
        world.step()
    world.dies("d")
    world.dies("p")
    world.store.stalls = False
    world.run()
    world.store.check_empty()


def test_another_namespace_is_refused(world) -> None:
    world.open_store(blocks=8)
    p = world.instance("p")
    q = world.instance("q", namespace="another model")
    push(world, p, "t", PROMPT)
    world.run()
    push(world, q, "t", [5] * 2 * BLOCK)
    world.run()
    assert "another identity" in ends(q, Released)[0].reason
    q.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    assert "another namespace" in ends(q, FetchEnded)[0].reason
    assert not world.store.serves


def test_untrusted_blocks_of_an_instance_are_forgotten(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, d = world.instance("p"), world.instance("d")
    push(world, p, "t", PROMPT)
    world.run()
    world.post(p.peer, world.store.peer, ForgetKv(b"".join(world.store.identities("t", PROMPT)[1:])))
    world.run()
    assert fetch(world, d) == 1


def test_the_end_of_a_prompt_leaves_a_full_store_first(world) -> None:
    """A prefix without its first block is of no use, however lately what is behind it came."""
    world.open_store(blocks=8)
    p = world.instance("p")
    for tokens in (PROMPT[: 2 * BLOCK], [7] * 2 * BLOCK, PROMPT):  # the second half of the prompt came later
        push(world, p, "t", tokens)
        world.run()
    kept = []
    for room in (2, 4, 6):
        push(world, p, "t", [50 + room] * 2 * BLOCK)
        world.run()
        kept.append(sum(identity in world.store.machine.values for identity in world.store.identities("t", PROMPT)))
    assert kept == [4, 4, 2]
    assert fetch(world, world.instance("d")) == 2


def test_blocks_that_instances_use_of_their_own_stay(world) -> None:
    world.open_store(blocks=8)
    p = world.instance("p")
    for tokens in (PROMPT, [7] * 4 * BLOCK):
        push(world, p, "t", tokens)
        world.run()
    used = KvUsed(b"".join(world.store.identities("t", PROMPT)))
    world.post(world.instance("q", namespace="another model").peer, world.store.peer, used)
    world.post(p.peer, world.store.peer, KvUsed(used.identities + b"half"))
    world.run()
    push(world, p, "t", [8] * 4 * BLOCK)
    world.run()
    assert [fetch(world, world.instance(name), tokens=tokens) for name, tokens in (("d", PROMPT), ("e", [7] * 17))] == [
        4,
        0,
    ]


def test_named_blocks_go_to_the_disk_without_a_second_hit(world) -> None:
    config = DisksConfig(admission="second-hit")
    world.open_store(blocks=8, disks=1, segments=6, disks_config=config)
    p = world.instance("p")
    tail = 0
    while world.store.machine.values.disks.counters()["refused_seldom"] == 0:  # until the disk was full once
        push(world, p, "t", [1000 + tail] * 4 * BLOCK)
        world.run()
        tail += 1
    push(world, p, "t", [1] * 4 * BLOCK, KEEP)
    world.run()
    disks = world.store.machine.values.disks
    assert all(identity in disks for identity in world.store.identities("t", [1] * 4 * BLOCK))
    push(world, p, "t", [2] * 4 * BLOCK)
    world.run()
    assert not any(identity in disks for identity in world.store.identities("t", [2] * 4 * BLOCK))


def test_a_transfer_without_tokens_is_no_business_of_a_store(world) -> None:
    world.open_store(blocks=8)
    p = world.instance("p")
    seq = p.compute("t", PROMPT)
    p.offer(world.store.peer, seq, 0, 2, insert=False, dst_tier=Tier.DRAM)
    world.run()
    assert not ends(p, Released)[0].used
    p.end(seq)


def offer_named(world: StoreWorld, node: Node, tokens: list[int], before: bytes) -> None:
    """As to one of several stores: the last two blocks of ``tokens``, by their identities."""
    seq, first = node.compute("t", tokens), len(tokens) // BLOCK - 2
    named = node.pool.identities("t", array(tokens))[16 * first :]
    offered = OfferedBlocks("t", array([]), seq.blocks[first : first + 2], identities=named, before=before)
    node.offers[node.exchange.offer_blocks(world.store.peer, offered, world.now)] = True
    node.exchange.announce_computed(list(node.offers)[-1], 0, 2)
    node.take([])
    node.end(seq)
    world.run()


def test_named_blocks_leave_before_those_that_lead_to_them(world) -> None:
    world.open_store(blocks=8)
    p = world.instance("p")
    path = b"".join(world.store.identities("t", PROMPT))
    for tokens, before in ((PROMPT[: 2 * BLOCK], b""), ([7] * 2 * BLOCK, b""), (PROMPT[: 4 * BLOCK], path[:32])):
        offer_named(world, p, tokens, before)
    offer_named(world, p, [8] * 2 * BLOCK, b"no key")
    refused = ends(p, Released)[-1]
    assert not refused.used and "identity" in refused.reason
    for first in (52, 54, 56):
        push(world, p, "t", [first] * 2 * BLOCK)
        world.run()
    assert [path[at : at + 16] in world.store.machine.values for at in range(0, 64, 16)] == [True, True, False, False]


def test_messages_of_strangers_do_nothing(world) -> None:
    world.open_store(blocks=8)
    p = world.instance("p")
    world.dies("p")
    tokens = array(PROMPT[: 2 * BLOCK])
    identity = world.store.identities("t", tokens)[-1]
    world.store.hear(p.peer, Offer("x", "t", tokens, identity, Tier.HBM, 0, (1, 2), LEASE_NS))
    for message in (Release("y"), Withdraw("y", "")):
        world.store.hear(p.peer, message)
    world.store.check_empty()
