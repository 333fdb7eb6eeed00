"""What ``store_client.py`` measures memserve beside: memcpy, LMDB, Redis and Mooncake's store, with the same calls.

A contender that is not installed raises :class:`Skipped` when it is made.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from harness.processes import end, kill, wait_until

from ports import free_port

MIB = 1 << 20
VALUES = 64
MATCHED = 1000
CHAINS = 20
"""Chains of keys that are matched one after the other, none of them twice in a row."""
MOONCAKE_KEYS = 20_000
WAIT_S = 120.0

Operation = Callable[[], object]


class Skipped(Exception):
    """This contender is not here."""


def chains(count: int) -> list[list[bytes]]:
    """``CHAINS`` times ``MATCHED`` keys in turn, from anywhere among ``count``."""
    starts = np.random.default_rng(2).integers(0, max(1, count - MATCHED), CHAINS)
    return [[key_of(int(start) + number, "small") for number in range(MATCHED)] for start in starts]


def key_of(number: int, kind: str = "value") -> bytes:
    return b"%s %08d" % (kind.encode(), number)


KEYS = [key_of(number) for number in range(VALUES)]


class Buffers:
    """Memory of the program's, touched before."""

    def __init__(self, block_bytes: int) -> None:
        generator = np.random.default_rng(1)
        self.one = generator.integers(0, 256, MIB, dtype=np.uint8)
        self.out = np.zeros(MIB, np.uint8)
        self.places = generator.integers(0, 256, (VALUES, MIB), dtype=np.uint8)
        self.blocks = generator.integers(0, 256, (VALUES, block_bytes), dtype=np.uint8)
        self.targets = np.ones((VALUES, block_bytes), np.uint8)


class Contender:
    """What it can do once for all values, by kind and variant: names of its methods, in ``can``; those in ``by_key``
    are called for each of ``KEYS``, and ``match`` for each of ``matched``."""

    name = ""
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    by_key: ClassVar[frozenset[str]] = frozenset(("put", "put_staged", "get", "get_in_place"))

    def __init__(self, buffers: Buffers, folder: Path) -> None:
        self.buffers, self.folder = buffers, folder
        self.matched: list[list[bytes]] = []
        self.open()

    def operations(self) -> dict[str, dict[str, Operation]]:
        """Kind -> variant -> a call that does it for all values once."""
        return {
            kind: {variant: partial(self._perform, name) for variant, name in variants.items()}
            for kind, variants in self.can.items()
        }

    def _perform(self, name: str) -> None:
        method = getattr(self, name)
        if name == "match":
            for keys in self.matched:
                method(keys)
        elif name in self.by_key:
            for key in KEYS:
                method(key)
        else:
            method()

    def open(self) -> None:
        """Start it, with the blocks. Raises :class:`Skipped`."""

    def fill(self, count: int) -> None:
        """Have ``count`` keys of eight bytes."""

    def close(self) -> None:
        """End it."""


class Memcpy(Contender):
    name = "memcpy"
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "put": {"": "puts"},
        "get": {"": "gets"},
        "blocks": {"": "copies"},
    }

    def puts(self) -> None:
        for place in self.buffers.places:
            np.copyto(place, self.buffers.one)

    def gets(self) -> None:
        for place in self.buffers.places:
            np.copyto(self.buffers.out, place)

    def copies(self) -> None:
        for target, block in zip(self.buffers.targets, self.buffers.blocks, strict=True):
            np.copyto(target, block)


class Lmdb(Contender):
    name = "LMDB"
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "put": {"copied": "put", "copied, one call": "put_many"}, "get": {"in place": "get_in_place", "copied": "get"},
        "blocks": {"1 thread": "blocks"}, "match": {"": "match"},
    }  # fmt: skip

    def open(self) -> None:
        try:
            import lmdb
        except ImportError:
            raise Skipped("the package lmdb is not installed") from None
        self._map = lmdb.open(str(self.folder / "lmdb"), map_size=4 << 30, sync=False)
        self._put_all((key_of(number, "block"), block.data) for number, block in enumerate(self.buffers.blocks))

    def _put_all(self, pairs: Any) -> None:
        with self._map.begin(write=True) as change:
            for key, value in pairs:
                change.put(key, value)

    def put(self, key: bytes) -> None:
        with self._map.begin(write=True) as change:
            change.put(key, self.buffers.one.data)

    def put_many(self) -> None:
        self._put_all((key, self.buffers.one.data) for key in KEYS)

    def get_in_place(self, key: bytes) -> None:
        with self._map.begin(buffers=True) as look:
            look.get(key)

    def get(self, key: bytes) -> None:
        with self._map.begin(buffers=True) as look:
            np.copyto(self.buffers.out, np.frombuffer(look.get(key), np.uint8))

    def blocks(self) -> None:
        with self._map.begin(buffers=True) as look:
            for number, target in enumerate(self.buffers.targets):
                np.copyto(target, np.frombuffer(look.get(key_of(number, "block")), np.uint8))

    def match(self, keys: list[bytes]) -> None:
        with self._map.begin(buffers=True) as look:
            assert all(look.get(key) is not None for key in keys)

    def fill(self, count: int) -> None:
        self._put_all((key_of(number, "small"), b"8 bytes!") for number in range(count))

    def close(self) -> None:
        self._map.close()


class Redis(Contender):
    name = "Redis"
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "put": {"copied": "put", "copied, one call": "put_many"}, "get": {"copied": "get"}, "match": {"": "match"},
    }  # fmt: skip

    def open(self) -> None:
        server = shutil.which("redis-server")
        if server is None:
            raise Skipped("redis-server is not installed")
        try:
            import redis
        except ImportError:
            raise Skipped("the package redis is not installed") from None
        path = self.folder / "redis.sock"
        quiet = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket", str(path)]
        self._process = subprocess.Popen([server, *quiet], stdout=subprocess.DEVNULL)
        wait_until(path.exists, "redis listens", WAIT_S)
        self._redis = redis.Redis(unix_socket_path=str(path))

    def put(self, key: bytes) -> None:
        self._redis.set(key, self.buffers.one.data)

    def put_many(self) -> None:
        self._redis.mset(dict.fromkeys(KEYS, self.buffers.one.data))

    def get(self, key: bytes) -> None:
        np.copyto(self.buffers.out, np.frombuffer(self._redis.get(key), np.uint8))

    def match(self, keys: list[bytes]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(key)
            assert all(pipe.execute())

    def fill(self, count: int) -> None:
        for first in range(0, count, 10_000):
            self._redis.mset({key_of(n, "small"): b"8 bytes!" for n in range(first, min(first + 10_000, count))})

    def close(self) -> None:
        end(self._process)


_SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 2 << 30, 64 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
time.sleep(1 << 30)
"""


class Mooncake(Contender):
    name = "Mooncake"
    can: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "put": {"copied": "puts"}, "get": {"copied": "gets"}, "match": {"": "match"}
    }  # fmt: skip

    def open(self) -> None:
        master = Path(sys.executable).parent / "mooncake_master"
        if not master.exists():
            raise Skipped("the package mooncake-transfer-engine-non-cuda is not installed")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:  # a library of the system's that it needs, such as libibverbs.so.1
            raise Skipped(f"mooncake cannot be loaded ({error})") from None
        port, log = free_port(), (self.folder / "mooncake.log").open("w")
        quiet = {"stdout": log, "stderr": log}
        ports = [f"--rpc_port={port}", f"--metrics_port={free_port()}"]
        self._processes = [subprocess.Popen([master, *ports], **quiet)]
        for _ in range(20):
            time.sleep(0.5)  # it tells nothing when it listens
            command = [sys.executable, "-c", _SEGMENT, f"127.0.0.1:{port}"]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
            if any(line.strip() == "ready" for line in self._processes[-1].stdout):
                break
        self._store, self._keys = MooncakeDistributedStore(), list[str]()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{port}") != 0:
            self.close()
            raise Skipped("mooncake's client cannot be set up")
        for buffer in (self.buffers.one, self.buffers.out):
            assert self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    def puts(self) -> None:
        """Under keys that it has never seen: it keeps the value of a key that it knows."""
        kind = f"value of round {time.monotonic_ns()}"
        self._keys = [key_of(number, kind).decode() for number in range(VALUES)]
        for key in self._keys:
            assert self._store.put_from(key, self.buffers.one.ctypes.data, MIB) == 0

    def gets(self) -> None:
        for key in self._keys:
            assert self._store.get_into(key, self.buffers.out.ctypes.data, MIB) == MIB

    def match(self, keys: list[bytes]) -> None:
        assert all(results == 1 for results in self._store.batch_is_exist([key.decode() for key in keys]))

    def fill(self, count: int) -> None:
        for number in range(min(count, MOONCAKE_KEYS)):
            assert self._store.put(key_of(number, "small").decode(), b"8 bytes!") == 0

    def close(self) -> None:
        for process in self._processes:
            kill(process)


RIVALS: tuple[type[Contender], ...] = (Memcpy, Lmdb, Redis, Mooncake)
