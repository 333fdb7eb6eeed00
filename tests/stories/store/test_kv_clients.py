"""Stories of clients whose values are KV blocks: engines of others that share KV with memserve's instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from exchange_world import BLOCK, GEOMETRY, LAYERS, LEASE_NS, array, pages
from memserve.base.types import Tier
from memserve.protocol.messages import Refused
from memserve.protocol.peers import ArenaPlace, Peer
from memserve.protocol.store import KvModel, StoreCode, StoreDelete, StoreGet, StoreHello, StorePair, StorePut
from memserve.store.machine.events import ServeModel
from store_world import BLOCK_BYTES, HOST, Client, StoreWorld, push

DONE, PRESENT, ABSENT, BAD_CALL = (bytes([code]) for code in (0, 1, 2, 7))
MODEL = KvModel("m", GEOMETRY)
PROMPT = [7] * 3 * BLOCK


@pytest.fixture
def world() -> Iterator[StoreWorld]:
    world = StoreWorld()
    yield world
    world.run()
    world.store.check_empty()
    world.close()


def kv_client(world: StoreWorld, name: str, model: KvModel = MODEL) -> Client:
    """A client that has greeted as one with KV blocks."""
    client = world.clients[name] = Client(world, Peer(name, len(world.clients) + 1))
    place = ArenaPlace(Tier.DRAM, 0, len(client.arena), 3)
    client.say(StoreHello("tcp://client:1", "default", 7, HOST, place, model))
    world.run()
    return client


def block(tenant: str, tokens: list[int], at: int) -> bytes:
    """As an instance of this world has it: the first bytes of each page say what it is."""
    whole = np.zeros((LAYERS, GEOMETRY.page_bytes), np.uint8)
    whole[:, :16] = pages(tenant, array(tokens), at)
    return whole.tobytes()


def put(client: Client, *pairs: tuple[bytes, bytes], name: bytes = b"", call: int = 1, replaces: bool = True) -> bytes:
    said = tuple(StorePair(key, name, len(data), data=data) for key, data in pairs)
    client.say(StorePut(call, said, replaces))
    client.world.run()
    return client.answers[call].codes


def test_instance_fetches_blocks_put_by_a_client(world) -> None:
    world.open_store(blocks=8)
    engine, d = kv_client(world, "vllm"), world.instance("d")
    assert engine.welcome is not None
    identities = world.store.identities("t", PROMPT)
    assert put(engine, *((key, block("t", PROMPT, at)) for at, key in enumerate(identities))) == DONE * 3
    assert world.store.check_kv("t", PROMPT) == 3
    assert set(world.store.known_to_router()) == set(identities), "the router knows where they are"
    d.fetch(world.store.peer, "t", PROMPT, world.now + LEASE_NS)
    world.run()
    assert d.check_cache("t", PROMPT) == 3


def test_client_reads_blocks_computed_by_an_instance(world) -> None:
    world.open_store(blocks=8, disks=1)
    p, engine = world.instance("p"), kv_client(world, "vllm")
    push(world, p, "t", PROMPT)
    world.run()
    keys = b"".join(world.store.identities("t", PROMPT))
    engine.say(StoreGet(1, keys, (b"",) * 3))
    engine.say(StoreGet(2, keys, (b"",) * 3, inline=True))
    world.run()
    told, sent = engine.answers[1], engine.answers[2]
    assert told.codes == sent.codes == DONE * 3 and told.lengths == (BLOCK_BYTES,) * 3
    assert told.seals == sent.seals and all(told.seals), "a client compares what it reads in place"
    for at, value in enumerate(sent.values):
        got = np.frombuffer(value, np.uint8).reshape(LAYERS, GEOMETRY.page_bytes)[:, :16]
        assert np.array_equal(got, pages("t", array(PROMPT), at))


def test_a_block_is_a_block(world) -> None:
    world.open_store(blocks=8)
    engine, other = kv_client(world, "vllm"), world.client("a")
    key = world.store.identities("t", PROMPT)[0]
    whole = block("t", PROMPT, 0)
    assert put(engine, (key, whole[:-1]), call=1) == BAD_CALL
    assert put(engine, (key, whole), name=b"named", call=2) == BAD_CALL
    assert put(engine, (key, whole), call=3) == DONE
    assert put(engine, (key, whole), call=4) == PRESENT, "what is there stays: instances read it"
    other.say(StoreDelete(5, key, (b"",)))
    engine.say(StoreDelete(5, key, (b"",)))
    world.run()
    assert other.answers[5].codes == BAD_CALL and engine.answers[5].codes == DONE
    assert not world.store.known_to_router()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (KvModel("another", GEOMETRY), "other weights"),
        (KvModel("m", replace(GEOMETRY, num_layers=LAYERS + 1)), "another shape"),
        (KvModel("m", replace(GEOMETRY, block_tokens=2 * BLOCK)), f"{2 * BLOCK} tokens"),
        (KvModel("m", replace(GEOMETRY, kv_dtype="int8")), "kept as int8 (--kv-dtype), what is kept here as auto"),
    ],
)
def test_kv_of_another_model_is_refused(world, model: KvModel, why: str) -> None:
    world.open_store(blocks=8)
    engine = kv_client(world, "vllm", model)
    assert engine.welcome is None
    (refused,) = engine.heard
    assert isinstance(refused, Refused) and why in refused.reason
    assert not world.store.serves


def test_a_store_without_a_model_takes_that_of_the_client(world) -> None:
    """Its host starts it again with blocks of that size; until then the client waits."""
    world.open_store(blocks=8, namespace="")
    engine = kv_client(world, "vllm")
    assert engine.welcome is None and not engine.heard
    assert world.store.serves == [ServeModel("m", GEOMETRY, "vllm")]
    kv_client(world, "another")
    assert len(world.store.serves) == 1


def test_no_room_is_said(world) -> None:
    world.open_store(blocks=4)
    engine, p = kv_client(world, "vllm"), world.instance("p")
    prompt = [3] * 4 * BLOCK
    push(world, p, "t", prompt)
    keys = world.store.identities("t", PROMPT)
    codes = put(engine, *((key, block("t", PROMPT, at)) for at, key in enumerate(keys)))
    assert set(codes) <= {StoreCode.DONE, StoreCode.NO_ROOM}
