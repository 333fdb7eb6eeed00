"""StoreClient on the store's host: values in the store's own memory, pinned as long as they are read."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memserve import StoreClient, StoreUnavailable, UserError, _core
from memserve.protocol.store import StoreGet, StorePut
from memserve.store.client.memory import View
from scripted_store import SECRET, ScriptedStore
from waiting import eventually

UNIT = 4096


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def store() -> Iterator[ScriptedStore]:
    tier = _core.MemoryTier(64 * UNIT, UNIT, name=f"test-{os.getpid()}")
    with ScriptedStore(tier) as store:
        yield store
    tier.unlink()


@pytest.fixture
def client(store: ScriptedStore, secret_file: Path) -> Iterator[StoreClient]:
    with StoreClient(store.address, secret_file=secret_file, staging_bytes=256 * UNIT) as client:
        yield client


def value_of(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def got(client: StoreClient, key: bytes) -> View:
    view = client.get(key)
    assert view is not None
    return view


@pytest.mark.parametrize("nbytes", [0, 1, UNIT - 3, 5 * UNIT + 1])
def test_values_are_read_where_they_lie(store: ScriptedStore, client: StoreClient, nbytes: int) -> None:
    value, buffer = value_of(nbytes), bytearray(nbytes + 1)
    assert client.is_mapped and client.get(b"key") is None
    assert client.put(b"key", value)
    with got(client, b"key") as view:
        assert view.in_place and view.data.readonly and view.data == value and len(view) == nbytes
    assert client.get_into([(b"key", buffer), (b"other", buffer)]) == [nbytes, -1] and buffer[:nbytes] == value
    assert client.exists([b"key", b"other"]) == [True, False] and client.match_last_index([b"key", b"other"]) == 0
    assert not any(isinstance(message, StoreGet) for message in store.heard), "nothing was asked of the store"


def test_large_values_are_pulled_and_small_ones_sent(store: ScriptedStore, client: StoreClient) -> None:
    with client.allocate(5 * UNIT) as memory:
        memory.data[:] = value_of(5 * UNIT, 2)
        assert client.put_many([(b"a", value_of(5 * UNIT)), (b"b", b"short"), (b"c", memory)]) == [True] * 3
    (put,) = (message for message in store.heard if isinstance(message, StorePut))
    assert [pair.data for pair in put.pairs] == [None, b"short", None]
    assert len({pair.offset for pair in put.pairs if pair.data is None}) == 2
    assert bytes(got(client, b"a")) == value_of(5 * UNIT) and bytes(got(client, b"c")) == value_of(5 * UNIT, 2)
    assert client.connection.staging.bytes_free == client.connection.staging.nbytes


def test_more_than_the_staging_memory_goes_in_several_calls(store: ScriptedStore, secret_file: Path) -> None:
    with StoreClient(store.address, secret_file=secret_file, staging_bytes=12 * UNIT) as client:
        pairs = [(b"%d" % at, value_of(5 * UNIT, at)) for at in range(9)]
        assert client.put_many(pairs) == [True] * 9
        assert sum(isinstance(message, StorePut) for message in store.heard) == 5
        with pytest.raises(UserError, match="staging_bytes"):
            client.put(b"large", bytes(13 * UNIT))
        assert client.get_copies([key for key, _ in pairs]) == [value for _, value in pairs]


def test_a_view_keeps_its_value_from_eviction(store: ScriptedStore, client: StoreClient) -> None:
    value = value_of(8 * UNIT)
    client.put(b"key", value)
    view = got(client, b"key")
    for at in range(40):
        client.put(b"%d" % at, bytes([at]) * 8 * UNIT)
    assert store.tier.take_evicted()
    assert view.data == value
    array = np.frombuffer(view.data, np.uint8)
    view.release()
    with pytest.raises(UserError, match="released"):
        _ = view.data
    for at in range(40):
        client.put(b"%d" % at, bytes([at]) * 8 * UNIT)
    assert array.tobytes() == value, "an array holds the pin when the view is gone"
    reader = client.connection.known_session.reader
    assert reader.held == 1
    del array
    gc.collect()
    assert reader.held == 0 and not client.connection.known_session.pins
    store.tier.check_invariants()


def test_views_that_are_dropped_hold_nothing(client: StoreClient) -> None:
    client.put(b"key", b"value")
    view, other = got(client, b"key"), got(client, b"key")
    reader = client.connection.known_session.reader
    assert reader.held == 2
    del view
    gc.collect()
    assert reader.held == 1
    part = other.data[1:3]
    other.release()
    assert bytes(part) == b"al" and reader.held == 1
    part.release()
    del part
    gc.collect()
    assert reader.held == 0


def test_views_keep_a_replaced_value(client: StoreClient) -> None:
    client.put(b"key", b"one")
    view = got(client, b"key")
    client.put(b"key", b"two")
    assert bytes(view) == b"one" and bytes(got(client, b"key")) == b"two"
    client.delete([b"key"])
    assert bytes(view) == b"one" and client.get(b"key") is None


def test_evicted_value_is_fetched_again(store: ScriptedStore, client: StoreClient) -> None:
    """The scripted store keeps everything; its tier is the memory."""
    values = {b"%d" % at: value_of(6 * UNIT, at) for at in range(30)}
    client.put_many(list(values.items()))
    assert len(store.tier) < len(store.values)
    for key in store.values:
        store.tier.mark_on_disk(key, True)
    assert client.exists(list(values)) == [True] * 30 and client.match_last_index(list(values)) == 29
    for key, value in values.items():
        assert bytes(got(client, key)) == value
    buffers = [bytearray(6 * UNIT) for _ in values]
    assert client.get_into(list(zip(values, buffers, strict=True)), threads=2) == [6 * UNIT] * 30
    assert buffers == list(values.values())
    assert any(isinstance(message, StoreGet) for message in store.heard)


def test_dropped_client_reads_nothing_more(store: ScriptedStore, client: StoreClient) -> None:
    client.put(b"key", b"value")
    view, other, third = (got(client, b"key") for _ in range(3))
    store.forget()
    with pytest.raises(StoreUnavailable, match="given up"):
        _ = view.data
    with pytest.raises(StoreUnavailable, match="given up"):
        other.release()
    with pytest.raises(StoreUnavailable, match="given up"), third:
        pass
    assert bytes(got(client, b"key")) == b"value", "it says hello again"
    store.forget()
    assert client.get_into([(b"key", bytearray(5))]) == [5]


def test_a_store_that_was_restarted_keeps_what_is_held(secret_file: Path) -> None:
    name, value = f"test-again-{os.getpid()}", value_of(8 * UNIT)
    with ScriptedStore(_core.MemoryTier(64 * UNIT, UNIT, name=name)) as first:
        client = StoreClient(first.address, secret_file=secret_file)
        client.put(b"key", value)
        view = got(client, b"key")
    first.tier = None
    gc.collect()
    tier = _core.MemoryTier(64 * UNIT, UNIT, name=name)
    assert tier.adopted
    with ScriptedStore(tier, port=first.port) as second:
        for at in range(40):
            assert client.put(b"%d" % at, bytes([at]) * 8 * UNIT, timeout_s=30)
            assert view.data == value
        view.release()
        assert second.values
        client.close()
    tier.unlink()


def test_views_beyond_the_pin_limit_are_copies(client: StoreClient) -> None:
    client.put_many([(b"key", b"value"), (b"large", bytes(17 * UNIT))])
    with got(client, b"large") as large:
        beside = got(client, b"key")
        assert large.in_place and not beside.in_place, "more than a quarter of the store's memory is held"
        assert large.data == bytes(17 * UNIT) and beside.data == b"value"
    views = [got(client, b"key") for _ in range(1030)]
    assert [view.in_place for view in views] == [True] * 1024 + [False] * 6
    assert all(view.data == b"value" for view in views) and client.get_held(b"key") is None
    buffer = bytearray(5)
    assert client.get_into([(b"key", buffer)]) == [5] and buffer == b"value"
    views.pop(0).release()
    assert got(client, b"key").in_place


def test_close_ends_views_and_leaves_arrays(store: ScriptedStore, secret_file: Path) -> None:
    client = StoreClient(store.address, secret_file=secret_file)
    client.put(b"key", b"value")
    view = got(client, b"key")
    array = np.frombuffer(view.data, np.uint8)
    client.close()
    with pytest.raises(UserError, match="released"):
        _ = view.data
    assert store.clients and array.tobytes() == b"value"
    del array, view
    gc.collect()
    eventually(lambda: not store.clients)


def test_forked_child_releases_no_pin(client: StoreClient) -> None:
    client.put(b"key", b"value")
    view = got(client, b"key")
    child = os.fork()
    if child == 0:
        view.drop()
        client.close()
        del view, client
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert client.connection.known_session.reader.held == 1
    with open(store_area(client), "rb") as area:
        assert np.count_nonzero(np.frombuffer(area.read()[64 : 64 + 8 * 1024], np.uint64)) == 1


def store_area(client: StoreClient) -> str:
    return client.connection.known_session.welcome.client_path


def test_memory_that_cannot_be_mapped_is_done_without(
    store: ScriptedStore, secret_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_reader(*paths: str) -> None:
        raise OSError(errno.EACCES, "not yours")

    monkeypatch.setattr(_core, "TierReader", no_reader)
    with StoreClient(store.address, secret_file=secret_file) as client:
        assert client.put(b"key", value_of(5 * UNIT)) and not client.is_mapped
        view = got(client, b"key")
        assert not view.in_place and view.data == value_of(5 * UNIT)


def test_threads_read_what_others_replace(client: StoreClient) -> None:
    """Each value is one byte all along: torn ones would show."""
    wrong: list[object] = []
    ended = threading.Event()

    def read() -> None:
        try:
            read_on()
        except Exception as error:
            wrong.append(error)

    def read_on() -> None:
        buffer = bytearray(8 * UNIT)
        while not ended.is_set():
            view = client.get(b"key")
            if view is not None:
                with view:
                    if len(set(bytes(view))) != 1:
                        wrong.append(bytes(view))
            if client.get_into([(b"key", buffer)])[0] > 0 and len(set(buffer)) != 1:
                wrong.append(bytes(buffer))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for at in range(100):
        client.put(b"key", bytes([at]) * 8 * UNIT)
    ended.set()
    for reader in readers:
        reader.join(60)
    assert not wrong


def test_a_reader_that_ends_in_a_child_of_fork_leaves_the_pins(store: ScriptedStore) -> None:
    area = store.tier.open_client(77)
    reader = _core.TierReader(store.tier.data_path, store.tier.index_path, area)
    offset = store.tier.allocate(8)
    store.tier.publish(b"k" * 16, offset, 8)
    assert reader.hold(b"k" * 16, b"") is not None
    child = os.fork()
    if child == 0:
        del reader
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    with open(area, "rb") as pins:
        assert np.count_nonzero(np.frombuffer(pins.read()[64 : 64 + 8 * 1024], np.uint64)) == 1
