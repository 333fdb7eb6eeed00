"""StoreClient beside a store that is a dictionary: values through messages, as from another host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from memserve import StoreClient, StoreUnavailable, UserError
from memserve.protocol.codec import FRAME_BYTES_MAX
from memserve.protocol.messages import AnyMessage, Refused
from memserve.protocol.peers import Peer
from memserve.protocol.store import (
    StoreCode,
    StoreDone,
    StoreGet,
    StoreHello,
    StorePlaces,
    StorePut,
)
from memserve.store.client import connection
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from scripted_store import SECRET, ScriptedStore
from waiting import eventually


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def store() -> Iterator[ScriptedStore]:
    with ScriptedStore() as store:
        yield store


@pytest.fixture
def client(store: ScriptedStore, secret_file: Path) -> Iterator[StoreClient]:
    with StoreClient(store.address, secret_file=secret_file) as client:
        yield client


def value_of(nbytes: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


def held(client: StoreClient, key: bytes) -> bytes | None:
    view = client.get(key)
    if view is None:
        return None
    with view:
        return bytes(view)


# -- values


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 16_384, 16_385, 3_000_000])
def test_put_value_is_returned(client: StoreClient, nbytes: int) -> None:
    value = value_of(nbytes)
    assert client.get(b"key") is None
    assert client.put(b"key", value)
    assert held(client, b"key") == value
    buffer = bytearray(nbytes + 3)
    assert client.get_into([(b"key", buffer), (b"other", buffer)]) == [nbytes, -1]
    assert buffer[:nbytes] == value


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview"),
        np.arange(10, dtype=np.float32),
        np.zeros((3, 4), np.int64),
        np.empty(0, np.float32),
    ],
)
def test_any_contiguous_buffer_is_a_value(client: StoreClient, value: object) -> None:
    assert client.put(b"key", value)
    assert held(client, b"key") == memoryview(value).tobytes()


def test_memory_of_the_client_is_put(client: StoreClient) -> None:
    with client.allocate(8) as memory:
        memory.data[:] = b"12345678"
        assert client.put(b"key", memory)
        assert client.put_many([(b"key", memory), (b"other", b"x")]) == [True, True]
    assert held(client, b"key") == b"12345678"
    with pytest.raises(UserError, match="released"):
        client.put(b"key", memory)


def test_a_value_longer_than_a_message_comes_in_parts(store: ScriptedStore, client: StoreClient) -> None:
    store.inline_bytes_max = 1000
    value = value_of(4321)
    assert client.put_many([(b"a", value), (b"b", b"short"), (b"c", value_of(900)), (b"d", value_of(900, 2))])
    copies = client.get_copies([b"a", b"b", b"none", b"c", b"d", b"c"])
    assert copies == [value, b"short", None, value_of(900), value_of(900, 2), value_of(900)]
    assert all(copy is None or copy.readonly for copy in copies)


def test_values_of_many_kinds_in_one_call(client: StoreClient) -> None:
    pairs = [(b"%d" % at, value_of(at * 700, at)) for at in range(200)]
    assert client.put_many(pairs) == [True] * 200
    assert client.get_copies([key for key, _ in pairs]) == [value for _, value in pairs]
    buffers = [bytearray(len(value)) for _, value in pairs]
    written = client.get_into([(key, buffer) for (key, _), buffer in zip(pairs, buffers, strict=True)])
    assert written == [len(value) for _, value in pairs]
    assert buffers == [value for _, value in pairs]


def test_refused_put_returns_false(store: ScriptedStore, client: StoreClient) -> None:
    store.answers = lambda message: (
        StoreDone(message.call, bytes([StoreCode.NO_ROOM] * len(message.pairs)))
        if isinstance(message, StorePut)
        else None
    )
    assert client.put(b"key", b"value") is False
    assert client.put_many([(b"key", b"value"), (b"large", bytes(FRAME_BYTES_MAX))]) == [False, False]


def test_oversized_value_is_not_sent(store: ScriptedStore, secret_file: Path) -> None:
    store.value_bytes_max = 10
    with StoreClient(store.address, secret_file=secret_file) as client:
        assert client.value_bytes_max() == 10
        assert client.put_many([(b"a", bytes(11)), (b"b", bytes(10))]) == [False, True]
        assert sum(len(message.pairs) for message in store.heard if isinstance(message, StorePut)) == 1


def test_put_replaces_unless_it_is_told_not_to(client: StoreClient) -> None:
    assert client.put(b"key", b"one") and client.put(b"key", b"two")
    assert client.put(b"key", b"three", overwrite=False) is False
    assert held(client, b"key") == b"two"


def test_a_buffer_that_is_too_small_leaves_all_as_they_were(client: StoreClient) -> None:
    client.put_many([(b"a", b"first"), (b"b", b"second")])
    fits, short = bytearray(5), bytearray(5)
    with pytest.raises(UserError, match=r"b'b' has 6 bytes, its buffer 5"):
        client.get_into([(b"a", fits), (b"b", short)])
    assert fits == short == bytes(5)
    with pytest.raises(UserError, match="cannot be written"):
        client.get_into([(b"a", bytes(5))])


def test_keys_are_looked_up_counted_and_forgotten(client: StoreClient) -> None:
    keys = [b"%d" % at for at in range(10)]
    assert client.match_last_index(keys) == -1 and client.match_last_index([]) == -1
    client.put_many([(key, key) for key in keys if key != b"7"])
    assert client.exists([b"1", b"7", b"9"]) == [True, False, True]
    assert client.match_last_index(keys) == 6 and client.match_last_index(keys[:3]) == 2
    assert sorted(entry.name for entry in client.entries()) == [key for key in keys if key != b"7"]
    assert client.statistics() == {"values": 9} and client.verify()["verify_running"] == 0
    assert client.delete([b"1", b"7", b"2"]) == 2
    assert client.exists([b"1", b"2", b"3"]) == [False, False, True]
    assert client.purge() == 7
    assert client.exists(keys) == [False] * 10


# -- bad input


@pytest.mark.parametrize("key", ["text", b"", bytes(1025), bytearray(b"k"), None, 5])
def test_invalid_key_is_refused(client: StoreClient, key: object) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.put(key, b""),
        lambda: client.get(key),
        lambda: client.get_into([(key, bytearray(1))]),
        lambda: client.exists([key]),
        lambda: client.delete([key]),
        lambda: client.match_last_index([key]),
    ]
    for call in calls:
        with pytest.raises(UserError, match="a key"):
            call()
    with pytest.raises(UserError, match=r"a list of bytes"):
        client.exists(b"key")


def test_the_longest_key_is_a_key(client: StoreClient) -> None:
    assert client.put(bytes(1024), b"value") and held(client, bytes(1024)) == b"value"


@pytest.mark.parametrize("value", ["text", 5, None, [1, 2], np.zeros((4, 4))[:, ::2]])
def test_invalid_value_is_refused(client: StoreClient, value: object) -> None:
    with pytest.raises(UserError, match="a value is"):
        client.put(b"key", value)


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":7000", "host:0", "host:65536", "host:x", "host:\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_invalid_address_is_refused(address: str, secret_file: Path) -> None:
    with pytest.raises(UserError, match="no address of a store"):
        StoreClient(address, secret_file=secret_file)


def test_without_a_secret_it_is_said_where_secrets_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEMSERVE_CLUSTER_SECRET_FILE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="MEMSERVE_CLUSTER_SECRET_FILE=PATH"):
        StoreClient("127.0.0.1:7000")
    kept = tmp_path / "memserve" / "port-8000" / "secret"
    kept.parent.mkdir(parents=True)
    kept.write_text(SECRET)
    with pytest.raises(UserError, match=str(kept)):
        StoreClient("127.0.0.1:7000")


def test_the_secret_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, store: ScriptedStore, secret_file: Path
) -> None:
    monkeypatch.setenv("MEMSERVE_CLUSTER_SECRET_FILE", str(secret_file))
    with StoreClient(f"tcp://{store.address}") as client:
        assert client.address == store.address and not client.is_mapped


# -- stores that are not there, not stores, or not well


def test_where_nothing_listens_it_is_said(secret_file: Path) -> None:
    with ScriptedStore() as store:
        address = store.address
    with pytest.raises(StoreUnavailable, match="nothing answers there"):
        StoreClient(address, secret_file=secret_file, timeout_s=0.3)


def test_another_secret_is_said(store: ScriptedStore, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("quite another secret of the tests")
    other.chmod(0o600)
    with pytest.raises(StoreUnavailable, match="another secret"):
        StoreClient(store.address, secret_file=other, timeout_s=0.3)


def test_server_that_is_no_store_is_reported(secret_file: Path) -> None:
    mailbox = ZmqMailbox(Peer("router", 1), ListenAddress(SECRET), lambda sender, message: None)
    try:
        with pytest.raises(StoreUnavailable, match="does not answer as a store"):
            StoreClient(mailbox.address, secret_file=secret_file, timeout_s=0.3)
    finally:
        mailbox.close()


def test_refusal_is_raised(secret_file: Path) -> None:
    with ScriptedStore() as store:
        store._greet = lambda sender, hello: (
            store._mailbox.connect(sender, hello.address),
            store._mailbox.send(sender, Refused("too many clients")),
        )
        with pytest.raises(UserError, match="too many clients"):
            StoreClient(store.address, secret_file=secret_file)


def test_a_call_ends_at_its_deadline(store: ScriptedStore, client: StoreClient) -> None:
    store.is_silent = True
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        client.put(b"key", b"value", timeout_s=0.05)
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        client.get(b"key", timeout_s=0.05)
    store.is_silent = False
    assert client.put(b"key", b"value")


def test_the_memory_of_a_put_without_an_answer_waits_for_it(
    store: ScriptedStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may be read as long as the answer is out."""
    line, freed = client.connection, threading.Event()
    store.is_silent = True
    with pytest.raises(StoreUnavailable):
        line.call_store(lambda call, left_ns: StorePut(call, ()), time.monotonic() + 0.05, freed.set)
    assert not freed.is_set()
    (call,) = line._calls
    line._on_message(line.known_session.peer, StoreDone(call, b""))
    assert freed.is_set() and not line._calls
    with pytest.raises(StoreUnavailable):
        line.call_store(lambda call, left_ns: StorePut(call, ()), time.monotonic() + 0.05, freed.clear)
    assert freed.is_set()
    line.renew_session(line.known_session)
    assert not freed.is_set() and not line._calls


def test_calls_without_answers_are_bounded(
    store: ScriptedStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_CALLS_MAX", 3)
    store.is_silent = True
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="in time"):
            client.connection.call_store(lambda call, left_ns: StorePut(call, ()), time.monotonic() + 0.01)
    assert client.connection._calls, "they wait for their answers"
    with pytest.raises(StoreUnavailable, match="not answered 3 calls"):
        client.statistics()


def test_answers_that_make_no_sense_are_errors(store: ScriptedStore, client: StoreClient) -> None:
    client.put(b"key", b"value")
    nonsense: list[Callable[[AnyMessage], AnyMessage]] = [
        lambda message: StorePlaces(message.call, b""),
        lambda message: StoreDone(message.call, b""),
        lambda message: StoreDone(message.call, b"\0\0", (1, 2), (1, 2), (b"", b"")),
        lambda message: StoreDone(message.call, b"\x63"),
        lambda message: StoreDone(message.call, b"\0", (1 << 40,), (1,), (b"part",)),
        lambda message: StoreDone(message.call, b"\0", (5,), (1,), (b"wrong",)),
        lambda message: StoreDone(message.call, b"\0", (5,), (1,), (b"",)),
        lambda message: StoreDone(message.call, bytes([StoreCode.LATER]), (5,), (1,), (b"",)),
        lambda message: StoreDone(message.call, bytes([StoreCode.LATE]), (5,), (1,), (b"",)),
    ]
    for answer in nonsense:
        store.answers = answer
        with pytest.raises(StoreUnavailable):
            if client.get(b"key") is None:
                raise StoreUnavailable("an unknown code is no value")
        with pytest.raises(StoreUnavailable):
            client.put(b"key", b"value")
            raise StoreUnavailable("a put that seems done")
    store.answers = None
    assert held(client, b"key") == b"value"


def test_damaged_value_is_requested_again(store: ScriptedStore, client: StoreClient) -> None:
    client.put(b"key", b"value")
    damaged = []

    def damage(message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, StoreGet) and not damaged:
            damaged.append(message)
            return StoreDone(message.call, b"\0", (5,), (1,), (b"wrong",))
        return None

    store.answers = damage
    assert held(client, b"key") == b"value" and damaged


# -- beginning anew


def test_expired_client_sends_hello_again(store: ScriptedStore, client: StoreClient) -> None:
    client.put(b"key", b"value")
    store.forget()
    assert held(client, b"key") == b"value"
    assert len(set(store.clients.values())) == 1


def test_a_store_that_was_restarted_is_found_again(secret_file: Path) -> None:
    with ScriptedStore() as first:
        client = StoreClient(first.address, secret_file=secret_file)
        client.put(b"key", b"value")
    with pytest.raises(StoreUnavailable):
        client.put(b"key", b"value", timeout_s=0.05)
    with ScriptedStore(port=first.port) as second:
        assert client.put(b"key", b"anew", timeout_s=30)
        assert held(client, b"key") == b"anew"
        assert len(second.values) == 1
        client.close()
        eventually(lambda: not second.clients)


def test_pending_call_is_resent(secret_file: Path) -> None:
    with ScriptedStore() as first:
        client = StoreClient(first.address, secret_file=secret_file)
        first.is_silent = True
        results: list[bool] = []
        waiting = threading.Thread(target=lambda: results.append(client.put(b"key", bytes(100_000), timeout_s=30)))
        waiting.start()
        eventually(lambda: any(isinstance(message, StorePut) for message in first.heard))
    with ScriptedStore(port=first.port) as second:
        waiting.join(30)
        assert results == [True] and len(second.values) == 1
        client.close()


def test_hello_is_repeated(store: ScriptedStore, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GREETING_S", 0.01)
    eventually(lambda: sum(isinstance(message, StoreHello) for message in store.heard) > 3)
    assert len(store.clients) == 1 and client.put(b"key", b"value")


# -- threads, processes, ends


def test_threads_share_a_client(client: StoreClient) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        for at in range(20):
            key, value = b"%d %d" % (seed, at), value_of(at * 2000, seed)
            if not client.put(key, value) or held(client, key) != value:
                wrong.append((seed, at))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not client.connection._calls
    assert client.connection.staging.bytes_free == client.connection.staging.nbytes


def test_a_child_of_fork_is_refused(client: StoreClient) -> None:
    client.put(b"key", b"value")
    view = client.get(b"key")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            client.get(b"key")
        except UserError as error:
            code = 0 if "forked" in str(error) else 2
        client.close()  # nothing: it is the parent's
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert view is not None and bytes(view) == b"value" and client.put(b"key", b"on")


def test_closed_client_raises(store: ScriptedStore, secret_file: Path) -> None:
    client = StoreClient(store.address, secret_file=secret_file)
    client.put(b"key", b"value")
    view = client.get(b"key")
    client.close()
    client.close()
    eventually(lambda: not store.clients)
    with pytest.raises(UserError, match="closed"):
        client.get(b"key")
    assert "closed" in repr(client)
    assert view is not None and not view.in_place and bytes(view) == b"value"  # a copy is the program's own
    view.release()
    with pytest.raises(UserError, match="released"):
        bytes(view)
