"""A ``memserve store`` in a process of its own, and hostile peers of it."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import zmq

from memserve import StoreClient
from memserve.protocol import codec as wire
from memserve.protocol.messages import AnyMessage, Leave
from memserve.protocol.peers import Peer
from memserve.transport.curve import CurveKeys
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from ports import free_port
from served_cluster import Server, eventually, is_alive

SECRET = "a secret of the tests, long enough"
WAIT_S = 60.0
STORE = Peer("store", 0)


class ServedStore:
    """The process, started with ``flags``. A store of the same ``name`` finds what an earlier one has left."""

    def __init__(self, folder: Path, *flags: str, dram: str = "64MiB", name: str = "") -> None:
        self.secret_file = folder / "secret"
        self.secret_file.write_text(SECRET)
        self.secret_file.chmod(0o600)
        self._log = folder / "store.log"
        self.name = name or f"test-{os.getpid()}-{secrets.token_hex(4)}"
        self.flags = flags
        self.dram = dram
        self._start(free_port())

    def _start(self, port: int) -> None:
        command = [sys.executable, "-m", "memserve", "store", "--listen", f"127.0.0.1:{port}", "--dram", self.dram]
        command += ["--cluster-secret-file", str(self.secret_file), "--name", self.name, *self.flags]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the store does not start"
        self.line = self.process.stdout.readline()
        found = re.search(r" at ([\d.]+:\d+)", self.line)
        assert found is not None, self.line
        self.address = found[1]

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """All that it has said."""
        return self._log.read_text(errors="replace")

    def client(self, tenant: str = "default", **options: Any) -> StoreClient:
        return StoreClient(self.address, tenant, self.secret_file, timeout_s=WAIT_S, **options)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def restart(self) -> None:
        """Start it again at its address."""
        self._start(int(self.address.rpartition(":")[2]))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        """Without shared memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024

    def close(self) -> int:
        """End it in order; its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            print(self.log(), file=sys.stderr)  # shown where a test fails
            for path in Path("/dev/shm").glob(f"memserve-store-{self.name[:24]}*"):
                path.unlink(missing_ok=True)

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Impostor:
    """Knows the secret, and says what it likes: raw letters, or messages of its own making."""

    def __init__(self, address: str, name: str = "impostor") -> None:
        self.me = Peer(f"{name}-{secrets.token_hex(4)}", time.time_ns())
        self.heard: list[AnyMessage] = []
        self.mailbox = ZmqMailbox(self.me, ListenAddress(SECRET), lambda _, message: self.heard.append(message))
        self.mailbox.connect(STORE, f"tcp://{address}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._raw = self._context.socket(zmq.PUSH)
        CurveKeys.derived_from(SECRET).configure_client(self._raw)
        self._raw.connect(f"tcp://{address}")
        self._number = 0

    def say(self, message: AnyMessage) -> None:
        self.mailbox.send(STORE, message)

    def ask(self, message: AnyMessage, timeout_s: float = WAIT_S) -> AnyMessage:
        """Send, and wait for the next message that is an answer."""
        before = len(self.heard)
        self.say(message)
        deadline = time.monotonic() + timeout_s
        while len(self.heard) == before:
            assert time.monotonic() < deadline, f"no answer to {type(message).__name__}"
            time.sleep(0.002)
        return self.heard[before]

    def post(self, *frames: bytes) -> None:
        """Send these bytes as they are."""
        self._raw.send_multipart(frames)

    def letter(self, message: bytes) -> bytes:
        """A right envelope around anything."""
        self._number += 1
        return wire.seal(Peer(self.me.name + "-raw", 1), self.mailbox.address, STORE, self._number, message)

    def close(self) -> None:
        self.say(Leave())
        self.mailbox.close()
        self._raw.close(1000)
        self._context.term()

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerOfStores:
    """One ``memserve serve`` after the other, with stores that run on."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._model, self._flags = model, flags
        self.pids: set[int] = set()

    def start(self, *flags: str) -> None:
        self.server = Server(self._model, "--colocated", "1", *self._flags, *flags)
        self.pids |= {self.server.process.pid, *self.server.children().values()}
        assert set(self.server.children()) == {"c1"}, "no store is started"

    def kill_everything(self) -> None:
        """The server with its instances, with -9."""
        for pid in self.pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.server.process.wait(60)
        eventually(lambda: not any(is_alive(pid) for pid in self.pids))

    def ask(self, tokens: list[int], count: int = 8) -> dict[str, Any]:
        """A completion, with its story."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.server.url}/completions", json=body | {"explain": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def blocks_by_store(self) -> dict[str, float]:
        """As the router knows, by the name of the store."""
        page = httpx.get(self.server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        rows = re.findall(r'^memserve_store_tree_blocks\{.*?"([^"]+)".*\} (.+)$', page, re.M)
        return {name: float(count) for name, count in rows}

    def stored_blocks(self) -> float:
        """Of all stores."""
        return sum(self.blocks_by_store().values())


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the story of an answer."""
    return {fact["fact"]: fact["value"] for fact in answer["memserve"]["story"]}
