"""``memserve serve --store``: a store that runs already is called, found again, and goes on when the server ends."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memserve.protocol.messages import Join
from memserve.protocol.peers import ROUTER, Peer
from memserve.protocol.store import STORE, JoinRequest
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from places import ROOT
from ports import free_port
from served_cluster import WAIT_S, eventually, is_alive
from served_store import SECRET, ServedStore, ServerOfStores, facts
from tiny_models import one_engine, prompt, save_folder, tiny_module

BLOCK = 8
"""Tokens: the model's context is 256."""
VALUE = bytes(range(256)) * 40
IMPATIENT = str(ROOT / "tests" / "support" / "impatient_memserve.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[[list[int], int], str]]:
    with one_engine(model) as answer:
        yield answer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServedStore]:
    """It was told of no router."""
    with ServedStore(tmp_path, "--ssd", f"{tmp_path}/ssd=64MiB", "--ssd-sync", "none", dram="16MiB") as store:
        yield store


@pytest.fixture
def serving(model: Path, store: ServedStore) -> Iterator[ServerOfStores]:
    named = ("--store", store.address, "--cluster-secret-file", str(store.secret_file))
    serving = ServerOfStores(model, "--block-tokens", str(BLOCK), *named)
    yield serving
    serving.kill_everything()


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


@pytest.mark.parametrize("metadata", ["none", "state"])
def test_running_store_outlives_every_server(serving, store, truth, tmp_path, monkeypatch, metadata) -> None:
    """kill -9 of the server; the next one finds in the store what the first has computed, and so do clients. Without
    metadata the next router is a stranger to the store, which waits until the first one is silent for long enough."""
    monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "first"))
    metadata = metadata if metadata == "none" else str(tmp_path / metadata)
    questions = [tokens(205, seed) for seed in (1, 5, 6, 7, 8)]
    blocks = len(questions) * (205 // BLOCK)
    with store.client() as client:
        assert client.put(b"mine", VALUE)
        serving.start("--metadata", metadata)
        assert f"store: that at {store.address}" in serving.server.lines[2]
        for question in questions:
            assert serving.ask(question, 8)["choices"][0]["text"] == truth(question, 8)
        eventually(lambda: serving.stored_blocks() >= blocks)
        serving.kill_everything()
        assert client.get(b"mine").data == VALUE, "alone, it serves clients"

        # had it learnt how quick this tiny model is, it would rather compute
        monkeypatch.setenv("MEMSERVE_CACHE_DIR", str(tmp_path / "second"))
        serving.start("--metadata", metadata)
        eventually(lambda: serving.stored_blocks() >= blocks)
        answers = [serving.ask(question, 8) for question in questions]
        assert [answer["choices"][0]["text"] for answer in answers] == [truth(question, 8) for question in questions]
        fetched = [answer for answer in answers if facts(answer).get("fetched_from") == store.name]
        assert fetched, f"what comes too late is computed; but not all of it comes too late: {answers}"
        assert fetched[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 205 // BLOCK * BLOCK
        assert client.get(b"mine").data == VALUE

        serving.server.process.send_signal(signal.SIGTERM)
        assert serving.server.process.wait(60) == 0
        assert client.get(b"mine").data == VALUE and is_alive(store.pid), "the end of a server is not that of the store"


def test_restarted_store_is_called_again(serving, store, truth) -> None:
    serving.start("--metadata", "none")
    question = tokens(90, 2)
    assert serving.ask(question, 8)["choices"][0]["text"] == truth(question, 8)
    eventually(lambda: serving.stored_blocks() >= len(question) // BLOCK)
    store.kill()
    other = tokens(60, 3)
    assert serving.ask(other, 8)["choices"][0]["text"] == truth(other, 8), "no request needs the store"
    store.restart()
    eventually(lambda: serving.stored_blocks() >= len(question) // BLOCK)


def serve_error(model: Path, *flags: str) -> str:
    """What ``memserve serve`` says, which waits for a store for two seconds instead of half a minute."""
    command = [sys.executable, IMPATIENT, "serve", "--model", str(model), "--port", "0", "--metadata", "none"]
    ended = subprocess.run([*command, "--colocated", "1", *flags], capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 1 and not ended.stdout
    return " ".join(ended.stderr.strip().splitlines()[-2:])  # the error and its hint


def test_wrong_secret_and_unreachable_store_have_own_errors(model, store, tmp_path) -> None:
    other = tmp_path / "other"
    other.write_text("a secret of another cluster")
    other.chmod(0o600)
    said = serve_error(model, "--store", store.address, "--cluster-secret-file", str(other))
    assert "has another secret" in said and "--cluster-secret-file FILE" in said
    nowhere = f"127.0.0.1:{free_port()}"
    said = serve_error(model, "--store", nowhere, "--cluster-secret-file", str(store.secret_file))
    assert f"no store at {nowhere}: nothing answers there" in said and "start it: memserve store --listen" in said


def test_a_store_of_another_server_does_not_join(serving, store, model) -> None:
    serving.start("--metadata", "none")
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1", "--block-tokens", str(BLOCK))
    named = ("--store", store.address, "--cluster-secret-file", str(store.secret_file))
    said = serve_error(model, *flags, *named)
    assert f"does not join: {store.name} belongs to the router at tcp://127.0.0.1:" in said
    assert serving.stored_blocks() == 0 and serving.server.process.poll() is None
    question = tokens(90, 4)
    serving.ask(question, 8)
    eventually(lambda: serving.stored_blocks() >= len(question) // BLOCK)


def test_store_is_free_after_its_server_shuts_down(serving, store) -> None:
    serving.start("--metadata", "none")
    serving.server.process.send_signal(signal.SIGTERM)
    assert serving.server.process.wait(60) == 0
    ended_s, heard = time.monotonic(), queue.SimpleQueue()
    me = Peer(ROUTER, time.time_ns())
    router = ZmqMailbox(me, ListenAddress(SECRET), lambda _, message: heard.put(message))
    try:
        router.connect(STORE, f"tcp://{store.address}")
        router.send(STORE, JoinRequest(router.address))
        assert isinstance(heard.get(timeout=5), Join), "it belongs to the router that has ended"
        assert time.monotonic() - ended_s < 5, "before silence could have told it"
    finally:
        router.close()
