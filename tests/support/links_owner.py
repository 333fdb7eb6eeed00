"""Another process that owns pages: started by the tests of the links, told what to do line by line."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from typing import Any

import numpy as np

from memserve import _core
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.transfer.events import PagesPulled, PagesSealed, SealPages
from memserve.protocol import codec as wire
from memserve.protocol.messages import Join
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.data_port import open_data_port
from memserve.transport.network_devices import ListenAddress
from waiting import stop_process

GEOMETRY = KVGeometry(num_layers=4, num_kv_heads=4, head_dim_k=8, head_dim_v=8, dtype="float32", block_tokens=8)
BLOCKS = 64
"""In each tier."""
SECRET = "a secret of the links' tests"


def content(tier: Tier, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What the owner's arena holds: bytes that never repeat with the place."""
    return np.random.default_rng((int(tier), 5)).integers(0, 256, nbytes, dtype=np.uint8)


def info_of(peer: Peer) -> PeerInfo:
    """A description that a port has still to complete."""
    return PeerInfo(peer, Role.PREFILL, "tcp://127.0.0.1:1", "ns", GEOMETRY, BLOCKS, BLOCKS, 100, True)


def view(arena: _core.SharedArena) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The arena's bytes, writable."""
    return np.frombuffer(arena, np.uint8)


class Owner:
    """The test's end of an owner process."""

    def __init__(self, link: str, generation: int = 1, block_bytes: int = GEOMETRY.block_bytes) -> None:
        command = [sys.executable, os.path.abspath(__file__), link, str(generation), str(BLOCKS * block_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = self._info(self._read())

    @property
    def peer(self) -> Peer:
        return self.info.peer

    def seal(self, tier: Tier, blocks: tuple[int, ...], first_layer: int, end_layer: int) -> tuple[int, ...]:
        """The owner's checksums."""
        return tuple(self.ask("seal", int(tier), blocks, first_layer, end_layer))

    def overwrite(self, tier: Tier, offset: int) -> None:
        """Change one byte."""
        self.ask("overwrite", int(tier), offset)

    def become(self, generation: int) -> None:
        """The same process as another generation."""
        self.info = self._info(self.ask("become", generation))

    def ask(self, *what: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._read()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        stop_process(self._process.pid)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the owner died"
        return json.loads(line)

    @staticmethod
    def _info(text: str) -> PeerInfo:
        join = wire.decode(bytes.fromhex(text))
        assert isinstance(join, Join)
        return join.info


def main() -> None:
    """The owner process."""
    link, generation, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    arenas = {tier: _core.SharedArena(nbytes) for tier in (Tier.HBM, Tier.DRAM)}
    for tier, arena in arenas.items():
        view(arena)[:] = content(tier, nbytes)
    sealed: queue.Queue[PagesSealed | PagesPulled] = queue.Queue()
    port = open_data_port(link, GEOMETRY, arenas, sealed.put, ListenAddress(SECRET))
    reader = PeerInfo(Peer("reader", 1), Role.DECODE, "", "ns", GEOMETRY, 0, 0, 0, True, nixl_agent=b"not connected to")
    port.add_peer(reader)

    def describe(generation: int) -> str:
        info = port.describe(info_of(Peer("owner", generation)))
        return wire.encode(Join(info)).hex()

    print(json.dumps(describe(generation)), flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case ["seal", tier, blocks, first_layer, end_layer]:
                port.start(SealPages(1, Tier(tier), tuple(blocks), first_layer, end_layer))
                answer: Any = sealed.get().checksums
            case ["overwrite", tier, offset]:
                view(arenas[Tier(tier)])[offset] ^= 1
                answer = None
            case ["become", generation]:
                answer = describe(generation)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
