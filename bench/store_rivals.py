"""What ``store_client.py`` measures memserve beside: memcpy, LMDB, Redis and Mooncake's store, with the same calls.

A contender that is not installed raises :class:`Skipped` when it is made.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
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
    return [[key_of(int(start) + at, "small") for at in range(MATCHED)] for start in starts]


def key_of(number: int, kind: str = "value") -> bytes:
    return b"%s %08d" % (kind.encode(), number)


class Buffers:
    """Memory of the program's, touched before."""

    def __init__(self, block_bytes: int) -> None:
        drawn = np.random.default_rng(1)
        self.one = drawn.integers(0, 256, MIB, dtype=np.uint8)
        self.out = np.zeros(MIB, np.uint8)
        self.places = drawn.integers(0, 256, (VALUES, MIB), dtype=np.uint8)
        self.blocks = drawn.integers(0, 256, (VALUES, block_bytes), dtype=np.uint8)
        self.targets = np.ones((VALUES, block_bytes), np.uint8)


class Contender:
    """``operations()`` gives what it can do: kind -> variant -> a call that does it for all values once."""

    name = ""

    def __init__(self) -> None:
        self.matched: list[list[bytes]] = []

    def operations(self) -> dict[str, dict[str, Operation]]:
        raise Skipped

    def fill(self, count: int) -> None:
        """Have ``count`` keys of eight bytes."""

    def close(self) -> None:
        pass


class Memcpy(Contender):
    name = "memcpy"

    def __init__(self, buffers: Buffers, folder: Path) -> None:
        super().__init__()
        self._buffers = buffers

    def operations(self) -> dict[str, dict[str, Operation]]:
        mine = self._buffers

        def put() -> None:
            for place in mine.places:
                np.copyto(place, mine.one)

        def get() -> None:
            for place in mine.places:
                np.copyto(mine.out, place)

        def blocks() -> None:
            for target, block in zip(mine.targets, mine.blocks, strict=True):
                np.copyto(target, block)

        return {"put": {"": put}, "get": {"": get}, "blocks": {"": blocks}}


class Lmdb(Contender):
    name = "LMDB"

    def __init__(self, buffers: Buffers, folder: Path) -> None:
        super().__init__()
        try:
            import lmdb
        except ImportError:
            raise Skipped("the package lmdb is not installed") from None
        self._buffers = buffers
        self._map = lmdb.open(str(folder / "lmdb"), map_size=4 << 30, sync=False)
        with self._map.begin(write=True) as change:
            for number, block in enumerate(buffers.blocks):
                change.put(key_of(number, "block"), block.data)

    def operations(self) -> dict[str, dict[str, Operation]]:
        mine, keys = self._buffers, [key_of(number) for number in range(VALUES)]

        def put() -> None:
            for key in keys:
                with self._map.begin(write=True) as change:
                    change.put(key, mine.one.data)

        def put_many() -> None:
            with self._map.begin(write=True) as change:
                for key in keys:
                    change.put(key, mine.one.data)

        def get_in_place() -> None:
            for key in keys:
                with self._map.begin(buffers=True) as look:
                    look.get(key)

        def get_copied() -> None:
            for key in keys:
                with self._map.begin(buffers=True) as look:
                    np.copyto(mine.out, np.frombuffer(look.get(key), np.uint8))

        def blocks() -> None:
            with self._map.begin(buffers=True) as look:
                for number, target in enumerate(mine.targets):
                    np.copyto(target, np.frombuffer(look.get(key_of(number, "block")), np.uint8))

        def match() -> None:
            for keys_in_turn in self.matched:
                with self._map.begin(buffers=True) as look:
                    assert all(look.get(key) is not None for key in keys_in_turn)

        return {
            "put": {"copied": put, "copied, one call": put_many},
            "get": {"in place": get_in_place, "copied": get_copied},
            "blocks": {"1 thread": blocks},
            "match": {"": match},
        }

    def fill(self, count: int) -> None:
        with self._map.begin(write=True) as change:
            for number in range(count):
                change.put(key_of(number, "small"), b"8 bytes!")

    def close(self) -> None:
        self._map.close()


class Redis(Contender):
    name = "Redis"

    def __init__(self, buffers: Buffers, folder: Path) -> None:
        super().__init__()
        server = shutil.which("redis-server")
        if server is None:
            raise Skipped("redis-server is not installed")
        try:
            import redis
        except ImportError:
            raise Skipped("the package redis is not installed") from None
        self._buffers = buffers
        path = folder / "redis.sock"
        quiet = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket", str(path)]
        self._process = subprocess.Popen([server, *quiet], stdout=subprocess.DEVNULL)
        until(path.exists)
        self._redis = redis.Redis(unix_socket_path=str(path))
        until(self._redis.ping)

    def operations(self) -> dict[str, dict[str, Operation]]:
        mine, keys = self._buffers, [key_of(number) for number in range(VALUES)]

        def put() -> None:
            for key in keys:
                self._redis.set(key, mine.one.data)

        def put_many() -> None:
            self._redis.mset(dict.fromkeys(keys, mine.one.data))

        def get() -> None:
            for key in keys:
                np.copyto(mine.out, np.frombuffer(self._redis.get(key), np.uint8))

        def match() -> None:
            for keys_in_turn in self.matched:
                with self._redis.pipeline(transaction=False) as pipe:
                    for key in keys_in_turn:
                        pipe.exists(key)
                    assert all(pipe.execute())

        return {
            "put": {"copied": put, "copied, one call": put_many},
            "get": {"copied": get},
            "match": {"": match},
        }

    def fill(self, count: int) -> None:
        for first in range(0, count, 10_000):
            self._redis.mset({key_of(n, "small"): b"8 bytes!" for n in range(first, min(first + 10_000, count))})

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)


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

    def __init__(self, buffers: Buffers, folder: Path) -> None:
        super().__init__()
        master = Path(sys.executable).parent / "mooncake_master"
        if not master.exists():
            raise Skipped("the package mooncake-transfer-engine-non-cuda is not installed")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:  # a library of the system's that it needs, such as libibverbs.so.1
            raise Skipped(f"mooncake cannot be loaded ({error})") from None
        self._buffers, port = buffers, free_port()
        log = (folder / "mooncake.log").open("w")
        quiet = {"stdout": log, "stderr": log}
        self._master = subprocess.Popen([master, f"--rpc_port={port}", f"--metrics_port={free_port()}"], **quiet)
        self._segment: subprocess.Popen[str] | None = None
        for _ in range(20):
            time.sleep(0.5)  # it tells nothing when it listens
            command = [sys.executable, "-c", _SEGMENT, f"127.0.0.1:{port}"]
            self._segment = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            if any(line.strip() == "ready" for line in self._segment.stdout):
                break
        self._store = MooncakeDistributedStore()
        if self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"127.0.0.1:{port}") != 0:
            self.close()
            raise Skipped("mooncake's client cannot be set up")
        for buffer in (buffers.one, buffers.out):
            assert self._store.register_buffer(buffer.ctypes.data, buffer.nbytes) == 0

    def operations(self) -> dict[str, dict[str, Operation]]:
        one, out, store = self._buffers.one.ctypes.data, self._buffers.out.ctypes.data, self._store
        names = [[key.decode() for key in chain] for chain in self.matched]
        keys: list[str] = []

        def put() -> None:
            """Under keys that it has never seen: it keeps the value of a key that it knows."""
            kind = f"value of round {time.monotonic_ns()}"
            keys[:] = [key_of(number, kind).decode() for number in range(VALUES)]
            for key in keys:
                assert store.put_from(key, one, MIB) == 0

        def get() -> None:
            for key in keys:
                assert store.get_into(key, out, MIB) == MIB

        def match() -> None:
            for keys_in_turn in names:
                assert all(found == 1 for found in store.batch_is_exist(keys_in_turn))

        return {"put": {"copied": put}, "get": {"copied": get}, "match": {"": match}}

    def fill(self, count: int) -> None:
        for number in range(min(count, MOONCAKE_KEYS)):
            assert self._store.put(key_of(number, "small").decode(), b"8 bytes!") == 0

    def close(self) -> None:
        for process in (self._segment, self._master):
            if process is not None:
                process.kill()
                process.wait()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it does not start"
        time.sleep(0.01)


RIVALS: tuple[type[Contender], ...] = (Memcpy, Lmdb, Redis, Mooncake)
