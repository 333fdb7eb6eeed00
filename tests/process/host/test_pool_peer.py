"""PoolPeer: Table 1 between two real processes, over each link; and what is left when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import memserve
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Tier
from memserve.host.pool_peer import Delivery, PoolPeer, TransferFlag
from memserve.kv.mempool import Address
from memserve.transport.links.nixl_agent import nixl_is_installed
from waiting import stop_process

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim_k=64, head_dim_v=64, dtype="float32", block_tokens=4)
BYTES = GEOMETRY.block_bytes
SECRET = "a secret of the tests, long enough"
TOKENS = np.arange(100, 116, dtype=np.int32)  # four blocks
LINKS = [
    "curve",
    "shm",
    pytest.param("nixl", marks=pytest.mark.skipif(not nixl_is_installed(), reason="NIXL is not installed")),
]


def pattern(seed: int) -> np.ndarray:
    shape = (GEOMETRY.num_layers, GEOMETRY.page_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def make(name: str, hbm: int = 8, dram: int = 4, **options: Any) -> PoolPeer:
    return PoolPeer(
        GEOMETRY, **{"name": name, "secret": SECRET, "hbm_bytes": hbm * BYTES, "dram_bytes": dram * BYTES} | options
    )


def fill(peer: PoolPeer, count: int, tier: Tier = Tier.HBM, seed: int = 0) -> list[Address]:
    """Blocks with known bytes."""
    held = peer.alloc_mem(count, tier)
    assert held is not None
    for at, address in enumerate(held):
        peer.view(address)[...] = pattern(seed + at)
    return list(held)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def used(peer: PoolPeer) -> tuple[int, int]:
    """Blocks that are neither free nor merely cached, on each tier."""
    tiers = peer.report().by_tier
    return tuple(tiers[t].blocks_used - tiers[t].blocks_evictable for t in (Tier.HBM, Tier.DRAM))


# -- the other process


def _serve(pipe: Any, options: dict[str, Any]) -> None:
    """Runs a peer and does what the pipe says: ``(name, arguments)`` of a function below or of the peer."""
    delivered: queue.Queue[Delivery] = queue.Queue()
    with make("b", on_delivery=delivered.put, **options) as peer:
        own = {"fill": fill, "used": used}
        while True:
            name, arguments, named = pipe.recv()
            if name == "end":
                return
            try:
                if name == "delivery":
                    got = delivered.get(timeout=10)
                    result: Any = (got.sender, list(got.addresses or ()), got.tokens.tolist(), got.private)
                elif name == "read":
                    result = [peer.view(address).copy() for address in arguments[0]]
                elif name == "messages":
                    result = peer._host._mailbox.counters.received
                elif name in own:
                    result = own[name](peer, *arguments, **named)
                else:
                    result = getattr(peer, name)(*arguments, **named)
                    if name in ("alloc_mem", "match") and result is not None:
                        result = list(result)
            except Exception as error:
                result = error
            pipe.send(result)


class Other:
    """A peer called b, in a process of its own."""

    def __init__(self, **options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, options), daemon=True)
        self.process.start()
        self.info = self.call("info")

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        self._pipe.send((name, arguments, named))
        assert self._pipe.poll(20), f"no answer to {name}"
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send(("end", (), {}))
            self.process.join(10)
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module", params=LINKS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[PoolPeer, Other, list[Delivery]]]:
    """Two connected peers; no heartbeat disturbs the count of messages."""
    got: list[Delivery] = []
    other = Other(link=request.param, silent_s=1000.0)
    with make("a", link=request.param, silent_s=1000.0, on_delivery=got.append) as peer:
        assert peer.connect(other.info) == "b"
        until(lambda: other.call("peers") == ["a"])
        yield peer, other, got
        other.end()


@pytest.fixture
def both(pair: tuple[PoolPeer, Other, list[Delivery]]) -> Iterator[tuple[PoolPeer, Other]]:
    """The pair, empty before and after."""
    peer, other, _ = pair
    yield peer, other
    for tokens in (TOKENS, TOKENS + 1):
        for prefix in (tokens, tokens[:8]):
            peer.delete(prefix)
            other.call("delete", prefix)
    until(lambda: used(peer) == (0, 0) and other.call("used") == (0, 0))
    peer.check_invariants()
    other.call("check_invariants")


def test_blocks_of_a_peer_are_freed_once(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    there = peer.alloc_mem(2, id="b")
    assert there is not None
    with pytest.raises(UserError, match=r"block \d of b is not held"):
        peer.free_mem([*there, there[0]])
    peer.free_mem(there)
    with pytest.raises(UserError, match="not held"):
        peer.free_mem(there)
    until(lambda: other.call("used") == (0, 0))


def test_transferred_blocks_are_held_and_delivered_freed_once(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    held = fill(peer, 2)
    assert peer.transfer("b", held)
    _, addresses, _, _ = other.call("delivery")
    other.call("free_mem", addresses)
    with pytest.raises(UserError, match="not held"):
        other.call("free_mem", addresses)
    peer.free_mem(held)
    for send in (
        lambda: peer.transfer("b", held), lambda: peer.transfer_with_insert("b", TOKENS[:8], held)
    ):  # fmt: skip
        with pytest.raises(UserError, match="not held"):
            send()
    with pytest.raises(UserError, match="token"):
        peer.transfer_with_insert("b", [-1] * 8, held)


def test_is_public() -> None:
    assert memserve.PoolPeer is PoolPeer


def test_remote_memory(both: tuple[PoolPeer, Other]) -> None:
    """M1: allocate and free at another instance; addresses carry their owner's generation."""
    peer, other = both
    there = peer.alloc_mem(3, id="b")
    assert there is not None and len(there) == 3 and there.generation != peer.alloc_mem(0).generation
    assert other.call("used") == (3, 0)
    below = peer.alloc_mem(4, Tier.DRAM, id="b")
    assert below is not None and other.call("used") == (3, 4)
    assert peer.alloc_mem(6, id="b") is None
    assert peer.alloc_mem(1, Tier.DRAM, id="b") is None
    peer.free_mem(there[:1])
    peer.free_mem([*there[1:], *below])
    until(lambda: other.call("used") == (0, 0))


@pytest.mark.parametrize("source", [Tier.HBM, Tier.DRAM])
@pytest.mark.parametrize("flags", [TransferFlag.NONE, TransferFlag.TO_DRAM, TransferFlag.BY_PAGE])
def test_transfer_where_the_receiver_allocates(both: tuple[PoolPeer, Other], source: Tier, flags: TransferFlag) -> None:
    peer, other = both
    held = fill(peer, 3, source, seed=10)
    done = peer.transfer("b", held, flags=flags, private=b"for you")
    assert done, done.reason
    sender, addresses, tokens, private = other.call("delivery")
    assert (sender, tokens, private) == ("a", [], b"for you")
    assert {address.tier for address in addresses} == {Tier.DRAM if TransferFlag.TO_DRAM in flags else Tier.HBM}
    for at, data in enumerate(other.call("read", addresses)):
        assert np.array_equal(data, pattern(10 + at))
    other.call("free_mem", addresses)
    peer.free_mem(held)


def test_transfer_into_chosen_blocks(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    held = fill(peer, 2, seed=30)
    there = peer.alloc_mem(3, id="b")
    assert there is not None
    assert peer.transfer("b", held, there[1:], private=b"x")
    _, addresses, _, _ = other.call("delivery")
    assert addresses == list(there[1:])
    for at, data in enumerate(other.call("read", addresses)):
        assert np.array_equal(data, pattern(30 + at))
    other.call("free_mem", addresses)  # b's own hold; a still has its
    assert other.call("used") == (3, 0)
    peer.free_mem(there)
    peer.free_mem(held)


def test_layers_are_transferred_one_by_one(both: tuple[PoolPeer, Other]) -> None:
    """Each into its page of the same blocks; with the last ones the peer's index has the prefix."""
    peer, other = both
    held = fill(peer, 2, seed=30)
    there, layers = peer.alloc_mem(2, id="b"), GEOMETRY.num_layers
    assert there is not None
    assert peer.transfer("b", held, there, layers=(1, 2))
    assert peer.transfer("b", held, there, layers=(2, layers))
    pulled = other.call("counters").pulled_bytes
    assert peer.transfer_with_insert("b", TOKENS[:8], held, there, layers=(0, 1))
    assert other.call("counters").pulled_bytes == pulled + 2 * GEOMETRY.page_bytes
    assert other.call("delivery")[2] == TOKENS[:8].tolist(), "the application is told once"
    found = other.call("match", TOKENS[:8])
    assert all(np.array_equal(data, pattern(30 + at)) for at, data in enumerate(other.call("read", found)))
    other.call("free_mem", found)
    for wrong in ((0, 0), (1, layers + 1), (-1, 1)):
        with pytest.raises(UserError, match="no layers"):
            peer.transfer("b", held, there, layers=wrong)
    with pytest.raises(UserError, match="not chosen"):
        peer.transfer("b", held, layers=(0, 1))
    peer.free_mem(there)
    peer.free_mem(held)


def test_pages_of_other_layers_stay_as_they_are(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    first, second, there = fill(peer, 2, seed=60), fill(peer, 2, seed=30), peer.alloc_mem(2, id="b")
    assert there is not None and peer.transfer("b", first, there, layers=(0, 3))
    assert peer.transfer_with_insert("b", TOKENS[:8], second, there, layers=(1, 2))
    other.call("delivery")
    found = other.call("match", TOKENS[:8])
    for at, data in enumerate(other.call("read", found)):
        assert np.array_equal(data[1], pattern(30 + at)[1])
        assert np.array_equal(data[[0, 2]], pattern(60 + at)[[0, 2]])
    other.call("free_mem", found)
    for addresses in (first, second, there):
        peer.free_mem(addresses)


def test_blocks_of_others_cannot_be_chosen(both: tuple[PoolPeer, Other]) -> None:
    """Only what the sender itself has allocated there may be written."""
    peer, other = both
    victim = other.call("fill", 2, Tier.HBM, 77)
    held = fill(peer, 2)
    done = peer.transfer("b", held, victim)
    assert not done and done.reason
    assert np.array_equal(other.call("read", victim)[0], pattern(77))
    other.call("free_mem", victim)
    peer.free_mem(held)


@pytest.mark.parametrize("source", [Tier.HBM, Tier.DRAM])
def test_transfer_with_insert(both: tuple[PoolPeer, Other], source: Tier) -> None:
    peer, other = both
    held = fill(peer, 4, source, seed=50)
    assert peer.transfer_with_insert("b", TOKENS, held, private=b"a prompt")
    assert other.call("delivery") == ("a", [], TOKENS.tolist(), b"a prompt")
    found = other.call("match", np.append(TOKENS, 7).astype(np.int32))
    assert len(found) == 4
    for at, data in enumerate(other.call("read", found)):
        assert np.array_equal(data, pattern(50 + at))
    other.call("free_mem", found)
    peer.free_mem(held)


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
def test_transfer_with_insert_into_chosen_blocks(tier: Tier) -> None:
    """MemServe's Table 1: ``dst`` of ``transfer_with_insert`` names blocks that the sender has allocated there."""
    got: list[Delivery] = []
    with make("a", dram=5) as one, make("b", dram=5, on_delivery=got.append) as two:
        one.connect(two.info())
        held, there = fill(one, 4, seed=60), one.alloc_mem(5, tier, id="b")
        assert one.transfer_with_insert("b", TOKENS, held, there, private=b"x")
        until(lambda: bool(got))
        assert (got[0].addresses, got[0].tokens.tolist(), got[0].private) == (None, TOKENS.tolist(), b"x")
        cached = two.report().by_tier
        assert (cached[tier].blocks_cached, sum(each.blocks_cached for each in cached.values())) == (4, 4)
        one.free_mem(there)
        until(lambda: used(two) == (0, 0))
        found = two.match(TOKENS)
        assert tier is Tier.DRAM or sorted(found) == sorted(list(there)[:4])
        assert [bytes(two.view(each)) for each in found] == [pattern(60 + at).tobytes() for at in range(4)]
        two.free_mem(found)
        one.free_mem(held)
        two.check_invariants()


def test_chosen_blocks_cached_at_peer_stay_with_sender() -> None:
    with make("a") as one, make("b") as two:
        one.connect(two.info())
        mine = fill(two, 2, seed=20)
        two.insert(TOKENS[:8], mine)
        two.free_mem(mine)
        held, there = fill(one, 4, seed=20), one.alloc_mem(4, id="b")
        with pytest.raises(UserError, match="3 addresses for 4 blocks"):
            one.transfer_with_insert("b", TOKENS, held, there[:3])
        with pytest.raises(UserError, match="TO_DRAM, and addresses in HBM"):
            one.transfer_with_insert("b", TOKENS, held, there, TransferFlag.TO_DRAM)
        assert one.transfer_with_insert("b", TOKENS, held, there)
        found = two.match(TOKENS)
        assert list(found) == [*mine, *list(there)[2:]]
        assert [bytes(two.view(each)) for each in found] == [pattern(20 + at).tobytes() for at in range(4)]
        two.free_mem(found)
        one.free_mem(there)
        until(lambda: used(two) == (0, 0))
        assert two.report().by_tier[Tier.HBM].blocks_cached == 4
        one.free_mem(held)


def test_prefix_inserted_in_dram_stays_there_until_matched() -> None:
    with make("a") as one, make("b") as two:
        one.connect(two.info())
        held = fill(one, 4, seed=40)
        assert one.transfer_with_insert("b", TOKENS, held, flags=TransferFlag.TO_DRAM)
        tiers = two.report().by_tier
        assert (tiers[Tier.HBM].blocks_cached, tiers[Tier.DRAM].blocks_cached) == (0, 4)
        found = two.match(TOKENS)
        assert {each.tier for each in found} == {Tier.HBM}
        assert [bytes(two.view(each)) for each in found] == [pattern(40 + at).tobytes() for at in range(4)]
        two.free_mem(found)
        one.free_mem(held)
        two.check_invariants()


def test_insert_costs_no_round_trip_and_moves_only_what_is_new(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    held = fill(peer, 4)

    def messages_of(act: Callable[[], Any]) -> tuple[int, int]:
        before = other.call("messages"), peer._host._mailbox.counters.received
        assert act()
        until(lambda: used(peer) == (4, 0))
        return other.call("messages") - before[0], peer._host._mailbox.counters.received - before[1]

    raw = messages_of(lambda: peer.transfer("b", held[:2]))
    other.call("free_mem", other.call("delivery")[1])
    first = messages_of(lambda: peer.transfer_with_insert("b", TOKENS[:8], held))
    other.call("delivery")
    assert first[0] <= raw[0] and sum(first) <= sum(raw) + 1, f"{first} messages instead of {raw}"  # + Wanted, a hint
    moved = other.call("counters").pulled_bytes
    assert peer.transfer_with_insert("b", TOKENS, held)
    other.call("delivery")
    assert other.call("counters").pulled_bytes - moved == 2 * BYTES
    peer.free_mem(held)


def test_fetch(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    theirs = other.call("fill", 4, Tier.HBM, 90)
    other.call("insert", TOKENS, theirs)
    other.call("free_mem", theirs)
    assert peer.fetch("b", TOKENS) == 16
    found = peer.match(TOKENS)
    assert [bytes(peer.view(address)) for address in found] == [pattern(90 + at).tobytes() for at in range(4)]
    peer.free_mem(found)
    assert peer.fetch("b", TOKENS + 1) == 0
    assert peer.fetch("b", TOKENS) == 16  # nothing to ask for


def test_no_room_is_an_answer(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    theirs = other.call("alloc_mem", 8)
    held = fill(peer, 2)
    waiting = peer.transfer_later("b", held)
    assert peer.alloc_mem(1, id="b") is None
    other.call("free_mem", theirs)  # the offer was waiting for room
    assert waiting.result(10)
    other.call("free_mem", other.call("delivery")[1])
    peer.free_mem(held)


def test_the_own_pool_works_as_ever(both: tuple[PoolPeer, Other]) -> None:
    peer, _ = both
    held = fill(peer, 4)
    assert peer.insert(TOKENS, held) == 4 and peer.cached_tokens(TOKENS) == 16
    below = peer.swap_out_blocks(fill(peer, 1, seed=5))
    assert below is not None and below.tier == Tier.DRAM
    above = peer.swap_in(below)
    assert above is not None and np.array_equal(peer.view(above[0]), pattern(5))
    peer.free_mem([*held, *above])
    assert peer.swap_out(2) == 2
    again = peer.match(TOKENS)
    assert np.array_equal(peer.view(again[3]), pattern(3))
    peer.free_mem(again)
    assert peer.delete(TOKENS) == 4


def test_bad_input(both: tuple[PoolPeer, Other]) -> None:
    peer, other = both
    held = fill(peer, 2)
    with pytest.raises(UserError, match="no peer 'c'"):
        peer.alloc_mem(1, id="c")
    with pytest.raises(UserError, match="not addresses of a"):
        peer.transfer("b", [Address(Tier.HBM, 0, 5)])
    with pytest.raises(UserError, match="2 blocks to 1 addresses"):
        peer.transfer("b", held, [Address(Tier.HBM, 0, other.call("alloc_mem", 0) or _generation(other))])
    with pytest.raises(UserError, match="2 addresses for 4"):
        peer.transfer_with_insert("b", TOKENS, held)
    with pytest.raises(UserError, match="nothing to transfer"):
        peer.transfer("b", [])
    with pytest.raises(UserError, match="not a peer's info"):
        peer.connect(b"nonsense")
    with pytest.raises(UserError, match="both are called"):
        peer.connect(peer.info())
    peer.free_mem(held)


def _generation(other: Other) -> int:
    address = other.call("alloc_mem", 1)[0]
    other.call("free_mem", [address])
    return int(address.generation)


# -- who may, and who is gone


def test_a_tenants_tokens_give_another_tenant_nothing() -> None:
    with make("a", tenant="one") as one, make("b", tenant="two") as two:
        one.connect(two.info())
        held = fill(one, 4)
        one.insert(TOKENS, held)
        assert one.transfer_with_insert("b", TOKENS, held)
        assert two.cached_tokens(TOKENS) == 0 and len(two.match(TOKENS)) == 0
        assert two.fetch("a", TOKENS) == 0
        one.free_mem(held)


def test_other_secrets_and_other_models_get_no_answer() -> None:
    one, two = make("b", secret="another secret, as long as the first"), make("b", namespace="another model")
    with make("a") as peer, one, two:
        with pytest.raises(UserError, match="no answer from b"):
            peer.connect(one.info(), timeout_s=0.3)
        with pytest.raises(UserError, match="b has other KV"):
            peer.connect(two.info())


def test_memory_of_a_dead_peer_is_freed() -> None:
    other = Other(silent_s=0.5)
    with make("a", silent_s=0.5) as peer:
        peer.connect(other.info)
        until(lambda: other.call("peers") == ["a"])
        assert len(other.call("alloc_mem", 3, id="a")) == 3
        assert len(other.call("alloc_mem", 2, Tier.DRAM, id="a")) == 2
        held = fill(peer, 2)
        stop_process(other.process.pid or 0)
        waiting = peer.transfer_later("b", held)
        peer.free_mem(held)
        assert used(peer) == (5, 2)
        os.kill(other.process.pid or 0, signal.SIGKILL)
        assert not waiting.result(10)
        until(lambda: used(peer) == (0, 0))
        assert peer.peers() == []
        peer.check_invariants()
    other.end()


def test_suspended_peer_rejoins() -> None:
    other = Other(silent_s=0.5)
    with make("a", silent_s=0.5) as peer:
        peer.connect(other.info)
        until(lambda: other.call("peers") == ["a"])
        there = peer.alloc_mem(2, id="b")
        assert there is not None
        stop_process(other.process.pid or 0)
        until(lambda: peer.peers() == [])
        peer.free_mem(there)  # gone with the peer
        os.kill(other.process.pid or 0, signal.SIGCONT)
        until(lambda: peer.peers() == ["b"] and other.call("peers") == ["a"])
        until(lambda: other.call("used") == (0, 0))
        held = fill(peer, 1)
        until(lambda: bool(peer.transfer("b", held)))
        other.call("free_mem", other.call("delivery")[1])
    other.end()


def test_a_lease_ends() -> None:
    with make("a", lease_s=0.3) as peer, make("b") as other:
        peer.connect(other.info())
        assert peer.alloc_mem(8, id="b") is not None
        assert used(other) == (8, 0)
        until(lambda: used(other) == (0, 0))


def test_goodbye() -> None:
    with make("a") as peer, make("b") as other:
        peer.connect(other.info())
        until(lambda: other.peers() == ["a"])
        assert peer.alloc_mem(2, id="b") is not None
        peer.disconnect("b")
        until(lambda: other.peers() == [] and used(other) == (0, 0))
        peer.connect(other.info())  # as a new generation: what the old one had is gone
        held = fill(peer, 4)
        assert peer.transfer_with_insert("b", TOKENS, held) and other.cached_tokens(TOKENS) == 16
        peer.free_mem(held)
    with pytest.raises(UserError, match="closed"):
        peer.report()
