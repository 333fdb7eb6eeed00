"""A client of three real stores as one: shares, copies, deaths, returns, and what must not come back."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from memserve import StoreClient, StoreUnavailable, UserError
from memserve.integrations.store_cache import EnginePool, PoolOptions, Value
from memserve.store.client.async_client import AsyncStoreClient
from memserve.store.client.joint import JointStoreClient
from ports import free_port
from served_store import WAIT_S, ServedStore
from waiting import eventually

COUNT = 240
VALUES = {f"key {number}".encode(): random.Random(number).randbytes(3000 + 90 * number) for number in range(COUNT)}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[ServedStore]]:
    with ExitStack() as stack:
        stores = []
        for name in "abc":
            (tmp_path / name).mkdir()
            stores.append(stack.enter_context(ServedStore(tmp_path / name, dram="32MiB")))
        yield stores


def joint(stores: list[ServedStore], copies: int = 1, **options) -> StoreClient:
    address = ",".join(store.address for store in stores)
    return StoreClient(address, "default", stores[0].secret_file, timeout_s=WAIT_S, copies=copies, **options)


def counts(stores: list[ServedStore]) -> list[int]:
    """Which of the values each store has."""
    numbers = []
    for store in stores:
        with store.client() as client:
            numbers.append(sum(client.exists(VALUES)))
    return numbers


def live(client: StoreClient) -> list:
    """The stores that are asked."""
    return client._live_members(time.monotonic() + WAIT_S)


def wrong(client: StoreClient) -> list[bytes]:
    """Keys whose value is not there, or another."""
    buffers = {key: bytearray(len(value)) for key, value in VALUES.items()}
    lengths = client.get_into(buffers.items(), timeout_s=WAIT_S)
    return [key for (key, buffer), n in zip(buffers.items(), lengths, strict=True) if n < 0 or buffer != VALUES[key]]


def test_each_store_keeps_its_share(stores) -> None:
    with joint(stores) as client:
        assert isinstance(client, JointStoreClient) and client.is_mapped
        assert all(client.put_many(VALUES.items(), timeout_s=WAIT_S))
        shares = counts(stores)
        assert sum(shares) == COUNT and min(shares) > COUNT / 5
        assert not wrong(client)
        assert client.exists([b"key 1", b"none"]) == [True, False]
        assert client.match_last_index([b"key 1", b"key 2", b"none", b"key 3"]) == 1
        assert client.bring([b"key 5", b"none"]) == [len(VALUES[b"key 5"]), -1]
        assert [bytes(copy) if copy else None for copy in client.get_copies([b"key 5", b"none"])] == [
            VALUES[b"key 5"],
            None,
        ]
        with client.get(b"key 7") as view:
            assert view.in_place and bytes(view) == VALUES[b"key 7"]
        assert client.get(b"none") is None
        with client.allocate(5) as memory:
            for key in (b"m1", b"m2", b"m3", b"m4"):
                memory.data[:] = b"abcd" + key[1:]
                assert client.put(key, memory)
        assert bytes(client.get(b"m4")) == b"abcd4"
        assert sorted(entry.name for entry in client.entries()) == sorted([*VALUES, b"m1", b"m2", b"m3", b"m4"])
        assert client.statistics()["dram_values"] == COUNT + 4
        assert client.delete([b"m1", b"none"]) == 1 and client.get(b"m1") is None
        assert client.purge() == COUNT + 3 and counts(stores) == [0, 0, 0]


def test_killed_store_costs_no_value_with_two_copies(stores) -> None:
    """Its memory is gone, too; when it is back it is given by and by what is asked for."""
    with joint(stores, copies=2) as client:
        assert all(client.put_many(VALUES.items(), timeout_s=WAIT_S))
        assert sum(counts(stores)) == 2 * COUNT
        lost = stores[1]
        lost.kill()
        for path in Path("/dev/shm").glob(f"memserve-store-{lost.name[:24]}*"):
            path.unlink()
        assert not wrong(client)
        assert client.put(b"new", b"value") and bytes(client.get(b"new")) == b"value"
        lost.restart()
        eventually(lambda: len(live(client)) == 3)
        assert not wrong(client)
        eventually(lambda: not wrong(client) and counts([lost])[0] > COUNT / 4)


def test_without_copies_a_death_costs_its_share_alone(stores) -> None:
    with joint(stores) as client:
        client.put_many(VALUES.items(), timeout_s=WAIT_S)
        shares = counts(stores)
        stores[2].kill()
        for path in Path("/dev/shm").glob(f"memserve-store-{stores[2].name[:24]}*"):
            path.unlink()
        eventually(lambda: len(live(client)) == 2)
        assert len(wrong(client)) == shares[2]


def test_value_replaced_during_an_absence_does_not_come_back(stores) -> None:
    """Nor one that was deleted."""
    with joint(stores, copies=2) as client:
        client.put_many(VALUES.items(), timeout_s=WAIT_S)
        stores[0].kill()
        eventually(lambda: len(live(client)) == 2)
        replaced, deleted = list(VALUES)[:100], list(VALUES)[100:200]
        assert all(client.put_many([(key, b"new") for key in replaced], timeout_s=WAIT_S))
        assert client.delete(deleted, timeout_s=WAIT_S) == 100
        stores[0].restart()
        eventually(lambda: len(live(client)) == 3)
        assert all(bytes(copy) == b"new" for copy in client.get_copies(replaced))
        assert not any(client.exists(deleted))


def test_store_that_joins_changes_no_answer(stores) -> None:
    """The next in line has what the new one lacks, and it is put where it belongs."""
    with joint(stores[:2]) as client:
        client.put_many(VALUES.items(), timeout_s=WAIT_S)
    with joint(stores) as client:
        assert not wrong(client)
        eventually(lambda: not wrong(client) and counts(stores[2:])[0] > COUNT / 5)


def test_absent_store_is_left_out_from_the_start(stores) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    address = f"{stores[0].address},{nowhere}"
    with StoreClient(address, "default", stores[0].secret_file, timeout_s=2.0) as client:
        assert client.put(b"key", b"value") and bytes(client.get(b"key")) == b"value"
    with pytest.raises(StoreUnavailable):
        StoreClient(f"{nowhere},127.0.0.1:{free_port()}", "default", stores[0].secret_file, timeout_s=0.5)
    with pytest.raises(UserError, match="copies"):
        StoreClient(stores[0].address, "default", stores[0].secret_file, copies=0)
    with pytest.raises(UserError, match="twice"):
        StoreClient(f"{nowhere},{nowhere}", "default", stores[0].secret_file)


def test_async_client_has_the_same_list(stores) -> None:
    async def story() -> None:
        address = ",".join(store.address for store in stores)
        async with AsyncStoreClient(address, secret_file=stores[0].secret_file, copies=2) as client:
            assert await client.put(b"key", b"value")
            assert bytes(await client.get(b"key")) == b"value"
            assert await client.exists([b"key", b"none"]) == [True, False]

    asyncio.run(story())


def test_engines_pool_goes_on_after_a_death(stores) -> None:
    """As connectors of vLLM, SGLang and LMCache have it."""
    options = PoolOptions.from_mapping(
        {"pool": ",".join(store.address for store in stores), "copies": 2, "secret_file": str(stores[0].secret_file)}
    )
    pages = np.random.default_rng(3).integers(0, 255, (60, 4096), np.uint8)
    read = np.zeros_like(pages)
    pool = EnginePool(options)
    try:
        values = [Value(f"page {at}".encode(), [(page.ctypes.data, 4096)]) for at, page in enumerate(pages)]
        targets = [Value(value.name, [(page.ctypes.data, 4096)]) for value, page in zip(values, read, strict=True)]
        assert all(pool.put_values(values))
        os.kill(stores[0].pid, 9)
        eventually(lambda: all(pool.get_values(targets)))
        assert (read == pages).all() and pool.counts["damaged"] == 0
        assert pool.match_prefix([value.name for value in values]) == 60
    finally:
        pool.close()
