"""StoreClient and `memserve store stat|ls|verify|purge` beside a real store: two processes, its restarts, its disks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forked_processes import executed
from memserve import AsyncStoreClient, StoreClient, StoreUnavailable
from memserve.protocol.store import INLINE_BYTES_MAX
from memserve.store.client import connection
from served_store import WAIT_S, ServedStore
from waiting import eventually


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with executed():  # one that is forked has torch
        store = ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB")
    with store:
        yield store


@pytest.fixture(params=["here", "elsewhere"])
def client(
    request: pytest.FixtureRequest, store: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreClient]:
    """On the store's host; and as from another one, where nothing is mapped."""
    if request.param == "elsewhere":
        monkeypatch.setattr(connection, "this_host", lambda: "another host")
    with store.client() as client:
        assert client.is_mapped is (request.param == "here")
        yield client
        client.purge(everything=True)


def value_of(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def read(client: StoreClient, key: bytes) -> bytes | None:
    view = client.get(key, timeout_s=WAIT_S)
    if view is None:
        return None
    with view:
        return bytes(view)


def test_a_store_starts_without_torch(store: ServedStore) -> None:
    assert "libtorch" not in Path(f"/proc/{store.pid}/maps").read_text()


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4095, 20_000, 1 << 20, INLINE_BYTES_MAX - 100])
def test_put_value_is_returned(client: StoreClient, nbytes: int) -> None:
    value, key = value_of(nbytes), b"key %d" % nbytes
    assert read(client, key) is None
    assert client.put(key, value, timeout_s=WAIT_S)
    assert read(client, key) == value
    buffer = bytearray(nbytes + 1)
    assert client.get_into([(key, buffer), (b"none", buffer)], timeout_s=WAIT_S) == [nbytes, -1]
    assert buffer[:nbytes] == value
    assert client.get_copies([key], timeout_s=WAIT_S) == [value]


def test_values_that_are_brought(client: StoreClient) -> None:
    assert client.put_many([(b"one", bytes(100)), (b"other", bytes(20_000))], timeout_s=WAIT_S) == [True, True]
    assert client.bring([b"other", b"none", b"one"], timeout_s=WAIT_S) == [20_000, -1, 100]
    assert client.bring([], timeout_s=WAIT_S) == []


def test_a_value_of_several_messages(client: StoreClient) -> None:
    value = value_of(2 * INLINE_BYTES_MAX + 12_345)
    assert client.put_many([(b"short", b"value"), (b"long", value)], timeout_s=WAIT_S) == [True, True]
    assert client.get_copies([b"long", b"none", b"short"], timeout_s=WAIT_S) == [value, None, b"value"]
    assert client.put(b"larger", bytes(client.value_bytes_max() + 1)) is False


def test_keys_of_a_prefix(client: StoreClient) -> None:
    keys = [b"block %d" % at for at in range(3000)]
    assert client.put_many([(key, key) for key in keys if key != b"block 2500"], timeout_s=WAIT_S) == [True] * 2999
    assert client.match_last_index(keys) == 2499 and client.exists(keys[2499:2502]) == [True, False, True]
    assert client.delete(keys[:100]) == 100 and client.match_last_index(keys) == -1
    assert {entry.name for entry in client.entries()} == set(keys[100:]) - {b"block 2500"}
    assert client.purge() == 2899 and list(client.entries()) == []


def test_put_replaces_and_readers_see_whole_values(client: StoreClient) -> None:
    wrong: list[object] = []
    ended = threading.Event()

    def look() -> None:
        try:
            while not ended.is_set():
                value = read(client, b"key")
                if value is not None and len(set(value)) != 1:
                    wrong.append(value)
        except Exception as error:
            wrong.append(error)

    readers = [threading.Thread(target=look) for _ in range(3)]
    for reader in readers:
        reader.start()
    for at in range(60):
        assert client.put(b"key", bytes([at]) * 100_000, timeout_s=WAIT_S)
    ended.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert not wrong
    assert client.put(b"key", b"no", overwrite=False) is False and read(client, b"key") == bytes([59]) * 100_000


def test_asyncio(store: ServedStore) -> None:
    async def story() -> None:
        async with AsyncStoreClient(store.address, "async", store.secret_file) as client:
            pairs = [(b"%d" % at, value_of(50_000, at)) for at in range(40)]
            assert await asyncio.gather(*(client.put(key, value) for key, value in pairs)) == [True] * 40
            views = await asyncio.gather(*(client.get(key) for key, _ in pairs))
            assert [bytes(view) for view in views] == [value for _, value in pairs]
            assert await client.purge() == 40

    asyncio.run(story())


# -- restarts


def test_a_view_outlives_the_store(tmp_path: Path) -> None:
    """The store is killed; the next one adopts the memory, and leaves alone what is held."""
    with ServedStore(tmp_path) as store, store.client() as client:
        value = value_of(1_000_000)
        assert client.put(b"key", value)
        view = client.get(b"key")
        store.kill()
        assert view.data == value and read(client, b"key") == value, "the memory is there as long as it is mapped"
        with pytest.raises(StoreUnavailable, match="in time"):
            client.put(b"other", b"value", timeout_s=0.1)
        store.restart()
        for at in range(80):
            assert client.put(b"fill %d" % at, bytes([at]) * 1_000_000, timeout_s=WAIT_S)
        assert view.data == value and view.valid
        view.release()
        assert client.statistics()["dram_adopted"] >= 1


def test_values_on_a_disk_outlive_the_store(tmp_path: Path) -> None:
    flags = ["--ssd", f"{tmp_path / 'disk'}=64MiB"]
    values = {b"%d" % at: value_of(500_000, at) for at in range(20)}
    with ServedStore(tmp_path, *flags, dram="16MiB") as store:
        with store.client() as client:
            assert client.put_many(list(values.items()), timeout_s=WAIT_S) == [True] * 20
            eventually(lambda: client.statistics()["disk_records"] == 20)
            for key, value in values.items():
                assert read(client, key) == value
        assert store.close() == 0
        store.restart()
        with store.client() as client:
            assert client.exists(list(values)) == [True] * 20
            buffers = [bytearray(500_000) for _ in values]
            assert client.get_into(list(zip(values, buffers, strict=True)), timeout_s=WAIT_S) == [500_000] * 20
            assert buffers == list(values.values())
            numbers = client.verify()
            while numbers["verify_running"]:
                numbers = client.verify(start=False)
            assert numbers["verify_checked"] >= 20 and numbers["verify_damaged"] == 0


# -- the command line


def tool(store: ServedStore, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memserve", "store", *words]
    command += ["--cluster-secret-file", str(store.secret_file)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=WAIT_S)


def test_the_tools_show_and_empty_a_store(store: ServedStore) -> None:
    with store.client("shop") as shop, store.client() as other:
        shop.put_many([(b"apple", bytes(5000)), (b"\xff\0", b"x")])
        other.put(b"pear", b"y")
        stat = tool(store, "stat", store.address, "--json")
        assert stat.returncode == 0 and json.loads(stat.stdout)["dram_values"] == 3
        assert "256.0 MiB" in tool(store, "stat", store.address).stdout
        listed = tool(store, "ls", store.address, "--tenant", "shop").stdout
        assert "5,000  memory" in listed and "apple" in listed and "0xff00" in listed and "pear" not in listed
        everything = tool(store, "ls", store.address, "--all", "--json").stdout.splitlines()
        assert {json.loads(line)["name"] for line in everything} == {"apple", "0xff00", "pear"}
        few = tool(store, "ls", store.address, "--all", "--limit", "2")
        assert len(few.stdout.splitlines()) == 2 and "more than 2" in few.stderr
        verified = tool(store, "verify", store.address, "--json")
        assert verified.returncode == 0 and json.loads(verified.stdout)["verify_checked"] == 3
        refused = tool(store, "purge", store.address, "--tenant", "shop", stdin="n\n")
        assert refused.returncode == 1 and "nothing was forgotten" in refused.stderr
        assert "2 values" in tool(store, "purge", store.address, "--tenant", "shop", "--yes").stdout
        assert other.exists([b"pear"]) == [True]
        assert "1 values" in tool(store, "purge", store.address, "--all", "--yes").stdout


def test_tools_without_a_store_say_so(store: ServedStore) -> None:
    gone = tool(store, "stat", "127.0.0.1:1", "--timeout-s", "0.2")
    assert gone.returncode == 1 and "nothing answers there" in gone.stderr and "hint:" in gone.stderr
