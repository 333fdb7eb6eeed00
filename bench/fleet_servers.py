"""What ``fleet.py`` measures with: vLLM servers that publish KV events, and routers before them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_S = 300.0
BENCH = Path(__file__).resolve().parent
MODEL = "fleet"
"""The name under which the servers are asked."""


def free_port() -> int:
    """A port of this host that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def responds(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class EventServer:
    """An unmodified vLLM on the CPU, on the same ports every time that it is started."""

    python: str
    model: str
    folder: Path
    number: int
    flags: tuple[str, ...] = ()
    buffer_steps: int = 10_000
    """Batches of KV events that it can repeat."""
    ports: tuple[int, int, int] = field(default_factory=lambda: (free_port(), free_port(), free_port()))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[2]}"

    @property
    def option(self) -> str:
        """As ``memserve serve --engine`` takes it."""
        return f"vllm={self.url},events={self.events},replay={self.replay}"

    @property
    def log(self) -> Path:
        return self.folder / f"vllm{self.number}.log"

    @property
    def map_socket(self) -> Path:
        return self.folder / f"map{self.number}"

    def start(self) -> None:
        """Returns when it is well. Raises :class:`SystemExit` with the end of its log when it is not."""
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.ports[1]}"}
        events |= {"replay_endpoint": f"tcp://*:{self.ports[2]}", "buffer_steps": self.buffer_steps}
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.ports[0])]
        command += ["--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(events), *self.flags]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(self._plugin()), "VLLM_MAP_SOCKET": str(self.map_socket),
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not responds(f"{self.url}/health"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM does not start, see {self.log}:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _plugin(self) -> Path:
        """A folder with ``vllm_map.py`` as an installed plug-in."""
        folder = self.folder / "plugin"
        meta = folder / "vllm_map-1.dist-info"
        meta.mkdir(parents=True, exist_ok=True)
        (folder / "vllm_map.py").write_bytes((BENCH / "vllm_map.py").read_bytes())
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-map\nVersion: 1\n")
        (meta / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_map = vllm_map:register\n")
        return folder

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def forget(self) -> None:
        """Empty its prefix cache."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def held(self) -> dict[int, int]:
        """What its prefix cache holds by its own map: copies of each block, by the hash that KV events name."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.map_socket))
            with connection.makefile("rb") as page:
                return {one: copies for one, _, copies in json.load(page)}


@contextmanager
def running(servers: list[EventServer]) -> Iterator[None]:
    """Start them side by side, and kill them at the end."""
    try:
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(EventServer.start, servers))
        yield
    finally:
        for server in servers:
            server.kill()


@contextmanager
def process(command: list[str], url: str, log: Path) -> Iterator[str]:
    """A router in a process of its own, until the block ends; its address. Raises :class:`SystemExit` when it does not
    start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("ab") as file:
        child = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60.0
        while not responds(f"{url}/health"):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the router does not start, see {log}:\n{log.read_text()[-1000:]}")
            time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def ours(engines: list[str], policy: str, log: Path) -> Any:
    """``memserve serve --engine``."""
    flags = [word for engine in engines for word in ("--engine", engine)]
    port = free_port()
    command = [sys.executable, "-m", "memserve", "serve", "--port", str(port), "--policy", policy, *flags]
    return process(command, f"http://127.0.0.1:{port}", log)


def theirs(name: str, python: str, servers: list[EventServer], log: Path) -> Any:
    """``sglang-router``, or ``vllm-router`` with its policy behind a colon, from the environment of ``python``."""
    module, _, policy = name.partition(":")
    port, metrics = free_port(), free_port()
    command = [python, "-m", f"{module.replace('-', '_')}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--policy", policy, "--worker-urls", *(one.url for one in servers)]
    if policy == "kv_aware":
        for server in servers:
            command += ["--kv-event-source", f"{server.url}={server.events}"]
            command += ["--kv-event-replay-source", f"{server.url}={server.replay}"]
        command += ["--kv-event-block-size", "32", "--kv-event-model", MODEL]
    return process(command, f"http://127.0.0.1:{port}", log)
