"""A real ``memserve store``: KV of instances and values of clients come back after kill -9 and after an orderly end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from geometries import SHAPES
from memserve import StoreClient, _core
from memserve.base.config import ExchangeConfig, PoolConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.costs import CostModel
from memserve.kv.identity import identity_key
from memserve.kv.pool import BlockPool
from memserve.kv.transfer.events import FetchEnded, PagesPulled, PagesSealed, Released
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.messages import AnyMessage, Join, JoinAccepted, KvEvents, KvSnapshot
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.process import new_generation
from memserve.transport.data_port import open_data_port
from memserve.transport.links.shared_memory import this_host
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from ports import free_port
from waiting import eventually

SECRET = "a secret of a test, long enough"
GEOMETRY = KVGeometry(4, 2, 32, 32, "bfloat16", 32)  # blocks of 64 KiB
NAMESPACE = "a model"
BLOCKS = 20
"""Of the instance; eight of them go to the store."""


class Cluster:
    """A scripted router, and one instance with a real exchange and real pages."""

    def __init__(self, geometry: KVGeometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.tokens = np.arange(1000, 1000 + 8 * geometry.block_tokens, dtype=np.int32)
        self.lock = threading.RLock()
        self.hides = False
        """The router answers no store."""
        self.news: list[KvEvents | KvSnapshot] = []
        self.store: PeerInfo | None = None
        self.outcomes: list[object] = []
        self.router = ZmqMailbox(Peer("router", new_generation()), ListenAddress(SECRET), self._router_hears)
        me = Peer("p1", new_generation())
        config = PoolConfig(BLOCKS, 0, identity_key=identity_key(SECRET))
        self.pool = BlockPool(config, self.geometry.block_tokens, NAMESPACE)
        self.arena = _core.SharedArena(BLOCKS * self.geometry.block_bytes)
        self.exchange = Exchange(self.pool, self.geometry, ExchangeConfig(), me)
        self.port = open_data_port("shm", self.geometry, {Tier.HBM: self.arena}, self._pages)
        self.mailbox = ZmqMailbox(me, ListenAddress(SECRET), self._instance_hears)
        place = (Role.COLOCATED, self.mailbox.address, NAMESPACE)
        self.info = self.port.describe(PeerInfo(me, *place, geometry, BLOCKS, 0, 999, True, this_host()))

    def close(self) -> None:
        for part in (self.mailbox, self.port, self.router):
            part.close()

    def _router_hears(self, sender: Peer, message: AnyMessage) -> None:
        if isinstance(message, Join) and not self.hides:
            self.router.connect(message.info.peer, message.info.address)
            self.router.send(message.info.peer, JoinAccepted((self.info, message.info), message.sent_to))
            self._meet(message.info)
        elif isinstance(message, KvEvents | KvSnapshot):
            self.news.append(message)

    def _meet(self, info: PeerInfo) -> None:
        with self.lock:
            if self.store is not None and self.store.peer == info.peer:
                return
            self.news.clear()
            self.mailbox.connect(info.peer, info.address)
            self.port.add_peer(info)
            self.store = info
            self._take(self.exchange.set_members((self.info, info), 0))

    def _instance_hears(self, sender: Peer, message: AnyMessage) -> None:
        with self.lock:
            self._take(self.exchange.handle(MessageArrived(sender, message), 0))

    def _pages(self, event: PagesSealed | PagesPulled) -> None:
        with self.lock:
            self._take(self.exchange.handle(event, 0))

    def _take(self, outcomes: list[object]) -> None:
        self.outcomes += outcomes
        for action in self.exchange.take_actions():
            if isinstance(action, Send):
                self.mailbox.send(action.to, action.message)
            else:
                self.port.start(action)

    @property
    def ready(self) -> bool:
        return self.store is not None and self.store.namespace == NAMESPACE and bool(self.news)

    def known(self) -> dict[Tier, int]:
        """Blocks on each tier, as a router counts them."""
        places: dict[bytes, Tier] = {}
        for news in list(self.news):
            if isinstance(news, KvSnapshot):
                runs = [("stored", Tier.DRAM, news.dram), ("stored", Tier.SSD, news.ssd)]
                places.clear()
            else:
                runs = [(change.kind, change.tier, change.identities) for change in news.changes]
            for kind, tier, run in runs:
                for at in range(0, len(run), 16):
                    if kind == "evicted":
                        places.pop(run[at : at + 16], None)
                    else:
                        places[run[at : at + 16]] = tier
        tiers = list(places.values())
        return {tier: tiers.count(tier) for tier in set(tiers)}

    def forget_store(self) -> None:
        """It was killed: the next one is waited for."""
        self.store = None

    def content(self, block: int) -> np.ndarray:
        rng = np.random.default_rng(int(self.tokens[block * self.geometry.block_tokens]))
        return rng.integers(0, 256, self.geometry.block_bytes, np.uint8)

    def push(self) -> None:
        """Offer all of the prompt, and wait until the store has it."""
        view = np.frombuffer(self.arena, np.uint8).reshape(-1, self.geometry.block_bytes)
        with self.lock:
            blocks = self.pool.allocate(8)
            for at, block in enumerate(blocks):
                view[block] = self.content(at)
            offer = self.exchange.offer_blocks(self.store.peer, OfferedBlocks("t", self.tokens, blocks), 0)
            self.exchange.announce_computed(offer, 0, 8)
            self.pool.release(blocks)
            self._take([])
        (ended,) = self._all(Released)
        assert ended.used, ended.reason

    def _all(self, kind: type) -> list[object]:
        """Outcomes of a kind, of which there is to be one at least."""
        eventually(lambda: any(isinstance(outcome, kind) for outcome in self.outcomes))
        return [outcome for outcome in self.outcomes if isinstance(outcome, kind)]

    def fetch(self) -> int:
        """Blocks that come from the store, each with the right bytes."""
        with self.lock:
            self.pool.clear_cache()
            self.outcomes.clear()
            self.exchange.fetch_blocks(self.store.peer, "t", self.tokens, 0, 8, 0, 1 << 60)
            self._take([])
        (ended,) = self._all(FetchEnded)
        assert ended.ok, ended.reason
        view = np.frombuffer(self.arena, np.uint8).reshape(-1, self.geometry.block_bytes)
        with self.lock:
            blocks, _ = self.pool.export_blocks("t", self.tokens)
            for at, block in enumerate(blocks):
                assert np.array_equal(view[block], self.content(at)), f"block {at} is wrong"
            self.pool.release(blocks)
        return len(blocks)


class Store:
    """The process, with its folder and its secret."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.port = folder, free_port()
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        self.flags = flags
        self.process: subprocess.Popen[str] | None = None

    def start(self, *more: str) -> str:
        command = [sys.executable, "-m", "memserve", "store", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--name", f"s-{os.getpid()}-{self.port}", "--cluster-secret-file", str(self.secret)]
        command += ["--dram", "16MiB", *self.flags, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        assert line.startswith("ready in"), line + self.process.stderr.read()
        return line

    def client(self) -> StoreClient:
        return StoreClient(f"127.0.0.1:{self.port}", secret_file=self.secret)

    def kill(self, *, memory: bool = False) -> None:
        """With -9. ``memory``: what it has left in shared memory goes as well."""
        self.process.kill()
        self.process.wait()
        if memory:
            self.forget_memory()

    def forget_memory(self) -> None:
        for path in Path("/dev/shm").glob(f"memserve-store-s-{os.getpid()}-{self.port}-*"):
            path.unlink()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.forget_memory()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(getattr(request, "param", GEOMETRY))
    yield cluster
    cluster.close()


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    stores: list[Store] = []

    def make(*flags: str) -> Store:
        stores.append(Store(tmp_path, *flags))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "cluster", [SHAPES[name].kv for name in ("mqa", "long-blocks")], ids=["mqa", "long-blocks"], indirect=True
)
def test_kv_of_an_instance_outlives_the_store(cluster: Cluster, new_store, tmp_path: Path) -> None:
    """Blocks of 576 KiB and of 8 MiB, in memory and on a disk, by the events and snapshots that a router gets."""
    room = 32 * cluster.geometry.block_bytes
    sizes = ("--dram", f"{room}B", "--ssd", f"{tmp_path}/ssd={max(2 * room, 64 << 20)}B")
    store = new_store("--join", cluster.router.address.removeprefix("tcp://"), *sizes)
    store.start()
    eventually(lambda: cluster.ready)
    assert cluster.store is not None and not cluster.store.costs, "of a disk without values nothing is known"
    cluster.push()
    eventually(lambda: cluster.known() == {Tier.DRAM: 8})
    assert cluster.fetch() == 8
    with store.client() as client:
        eventually(lambda: client.statistics()["disk_records"] == 8)

    store.kill()
    cluster.forget_store()
    assert "8 values in memory, 8 on disks" in store.start()
    eventually(lambda: cluster.ready and cluster.known() == {Tier.DRAM: 8})
    assert cluster.fetch() == 8
    with store.client() as client:
        assert client.statistics()["compared"] == 8

    store.kill(memory=True)
    cluster.forget_store()
    assert "0 values in memory, 8 on disks" in store.start()
    eventually(lambda: cluster.ready and cluster.known() == {Tier.SSD: 8})
    assert CostModel.from_json(cluster.store.costs).disk.byte_ns > 0, "it has read a little of its disk"
    assert cluster.fetch() == 8
    eventually(lambda: cluster.known() == {Tier.DRAM: 8})
    assert store.end() == 0


def test_values_of_a_client_outlive_the_store(new_store, tmp_path: Path) -> None:
    store = new_store("--ssd", f"{tmp_path}/one=64MiB", "--ssd", f"{tmp_path}/two=64MiB")
    store.start()
    values = {b"key %d" % number: os.urandom(number * 3001) for number in range(30)}
    with store.client() as client:
        client.put_many(values.items())
        eventually(lambda: client.statistics()["disk_records"] == 30)
    for end in ("kill", "lose memory", "in order"):
        if end == "in order":
            assert store.end() == 0
        else:
            store.kill(memory=end == "lose memory")
        store.start()
        with store.client() as client:
            for key, value in values.items():
                with client.get(key) as view:
                    assert bytes(view) == value, f"{key!r} after {end}"
    with store.client() as client:
        assert client.delete([b"key 3"]) == 1
    store.kill()
    store.start()
    with store.client() as client:
        assert client.get(b"key 3") is None
    assert store.end() == 0
    assert not list(Path("/dev/shm").glob(f"memserve-store-s-{os.getpid()}-{store.port}-*"))


def test_values_in_memory_alone_outlive_the_first_model(cluster: Cluster, new_store) -> None:
    """The store takes memory with blocks of that model; its clients find what they have put."""
    store = new_store("--join", cluster.router.address.removeprefix("tcp://"))
    cluster.hides = True
    store.start()
    values = {b"key %d" % n: bytes([n]) * (3000 * n) for n in range(20)}
    with store.client() as client:
        assert all(client.put(name, value) for name, value in values.items())
    cluster.hides = False
    eventually(lambda: cluster.ready)
    with store.client() as client:
        for name, value in values.items():
            with client.get(name) as view:
                assert bytes(view) == value
    assert store.end() == 0


def test_the_end_of_a_store_without_disks_leaves_nothing(new_store) -> None:
    store = new_store()
    store.start()
    with store.client() as client:
        client.put(b"key", b"value")
        with client.get(b"key") as view:
            assert bytes(view) == b"value"
    assert store.end() == 0
    assert not list(Path("/dev/shm").glob(f"memserve-store-s-{os.getpid()}-{store.port}-*"))


def test_two_stores_of_one_name_or_folder_do_not_start(new_store, tmp_path: Path) -> None:
    store = new_store("--ssd", f"{tmp_path}/ssd=64MiB")
    store.start()
    for flags, words in (((), "/dev/shm"), (("--name", "another"), "is in use")):
        command = [sys.executable, "-m", "memserve", "store", "--listen", f"127.0.0.1:{free_port()}"]
        command += [
            "--name",
            f"s-{os.getpid()}-{store.port}",
            "--cluster-secret-file",
            str(store.secret),
            "--dram",
            "16MiB",
        ]
        command += ["--ssd", f"{tmp_path}/ssd=64MiB", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and words in done.stderr and "hint:" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "neither clients nor a cluster"),
        (["--listen", "127.0.0.1:7999"], "needs the cluster's secret"),
        (["--listen", "127.0.0.1:7999", "--ssd", "folder"], "cannot read --ssd"),
        (["--listen", "127.0.0.1:7999", "--ssd-sync", "often"], "unknown --ssd-sync"),
        (["--listen", "nowhere", "--cluster-secret-file", "SECRET"], "HOST:PORT"),
        (["--listen", "127.0.0.1:7999", "--cluster-secret-file", "SECRET", "--dram", "4096"], "less than two blocks"),
    ],
)
def test_wrong_options_are_one_error_with_a_hint(flags: list[str], words: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    flags = [str(secret) if flag == "SECRET" else flag for flag in flags]
    command = [sys.executable, "-m", "memserve", "store", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and words in done.stderr and "hint:" in done.stderr, done.stderr


def test_client_with_another_secret_gets_an_error(new_store, tmp_path: Path) -> None:
    store = new_store()
    store.start()
    other = tmp_path / "other"
    other.write_text("another secret, of another cluster")
    other.chmod(0o600)
    with pytest.raises(UserError, match="another secret"), StoreClient(f"127.0.0.1:{store.port}", secret_file=other):
        pass
