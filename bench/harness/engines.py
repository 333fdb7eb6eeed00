"""vLLM's server: plain, with memserve's connector on a store, or with KV events and its own map; and what compares its
answers token by token."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import BENCH, ROOT
from harness.clients import Answer, completion
from harness.flags import options, save, working_folder
from harness.processes import cpu_s, is_ready, metrics_of, wait_until, without_path
from harness.served import bundled_model
from ports import free_port
from served_store import ServedStore as ServedStore  # what the servers share, for those who start them

START_S = 900.0
TIE = 1e-3
"""Of log probability."""
CONNECTOR = ("MemserveConnector", "memserve.integrations.vllm")
"""Class and module."""


def transfer_config(store: ServedStore, connector: tuple[str, str] = CONNECTOR, **more: Any) -> dict[str, Any]:
    """vLLM's ``--kv-transfer-config``, as the guide has it."""
    pool_options = {"pool": store.address, "secret_file": str(store.secret_file), **more}
    return {
        "kv_connector": connector[0], "kv_connector_module_path": connector[1], "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": pool_options,
    }  # fmt: skip


@dataclass
class Vllm:
    """A server in a process group of its own; at the same ports each time that it is started."""

    python: str
    model: str
    store: ServedStore | None = None
    log: Path = field(default_factory=lambda: Path(os.devnull))
    cpus: str = "0-1"
    flags: Sequence[str] = ("--max-model-len", "2048")
    name: str = "x"
    """Under which clients ask for the model."""
    dtype: str = "float32"
    connector: tuple[str, str] = CONNECTOR
    more: dict[str, Any] = field(default_factory=dict)
    """For the connector."""
    environment: dict[str, str] = field(default_factory=dict)
    is_eager: bool = True
    """Not compiled, which takes more than a minute at its start; its default is to compile."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Vllm:
        """Returns when it is well. Ends the script with the end of its log when it is not."""
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", self.name]
        command += ["--dtype", self.dtype, "--block-size", "32", "--enable-prompt-tokens-details"]
        command += [*(["--enforce-eager"] if self.is_eager else []), *self.flags]
        if self.store is not None:
            command += ["--kv-transfer-config", json.dumps(transfer_config(self.store, self.connector, **self.more))]
        environment = without_path(
            HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1", VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_OMP_THREADS_BIND=self.cpus, PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{BENCH}",
        ) | self.environment  # fmt: skip
        with self.log.open("ab") as log:
            self.process = process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(lambda: process.poll() is not None or is_ready(self.url), "vLLM is ready", START_S, 0.2)
        if process.poll() is not None:
            raise SystemExit(f"vLLM does not start, see {self.log}:\n{self.log.read_text()[-2000:]}")
        return self

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        """One completion, greedy, streamed, with the gaps between the two best tokens."""
        more = {"logprobs": 2, "return_token_ids": True, "model": self.name}
        return completion(self.url, prompt, tokens, **more).checked()

    def total(self, name: str) -> float:
        """A metric, over all label values."""
        return sum(value for key, value in metrics_of(self.url).items() if key.startswith(f"vllm:{name}"))

    def metric(self, name: str) -> int:
        """A count."""
        return int(self.total(name))

    def cpu_s(self) -> float:
        """CPU time of all of its processes so far."""
        return cpu_s(self.process.pid) if self.process is not None else 0.0

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        httpx.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass
class EventServer(Vllm):
    """One that publishes KV events, and shows what its prefix cache holds (``vllm_map.py``)."""

    folder: Path = field(default_factory=Path)
    number: int = 0
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        kv_events = {
            "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}", "buffer_steps": 10_000,
        }  # fmt: skip
        self.flags = (*self.flags, "--kv-events-config", json.dumps(kv_events))
        if self.store is None:
            self.log = self.folder / f"vllm{self.number}.log"
            self.environment = {
                "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(self._plugin()),
                "VLLM_MAP_SOCKET": str(self.map_socket),
            }  # fmt: skip

    @property
    def map_socket(self) -> Path:
        """Where ``vllm_map.py`` answers."""
        return self.folder / f"map{self.number}"

    @property
    def events(self) -> str:
        """Where it publishes."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay(self) -> str:
        """Where it repeats."""
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def option(self) -> str:
        """As ``memserve serve --engine`` takes it."""
        return f"vllm={self.url},events={self.events},replay={self.replay}"

    def _plugin(self) -> Path:
        """A folder with ``vllm_map.py`` as an installed plug-in."""
        folder = self.folder / "plugin"
        meta = folder / "vllm_map-1.dist-info"
        meta.mkdir(parents=True, exist_ok=True)
        (folder / "vllm_map.py").write_bytes((BENCH / "vllm_map.py").read_bytes())
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-map\nVersion: 1\n")
        (meta / "entry_points.txt").write_text("[vllm.general_plugins]\nvllm_map = vllm_map:register\n")
        return folder

    def held(self) -> dict[int, int]:
        """What its prefix cache holds by its own map: copies of each block, by the hash that KV events name."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self.map_socket))
            with connection.makefile("rb") as page:
                return {name: copies for name, _, copies in json.load(page)}


@contextmanager
def running(*servers: Vllm) -> Iterator[None]:
    """Start them side by side, and kill what is left of them at the end."""
    try:
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(lambda server: server.start(), servers))
        yield
    finally:
        for server in servers:
            server.kill()


def recorded(doc: str | None, measure: Callable[[argparse.Namespace, Path], Any], **flags: Any) -> Any:
    """Measure with the flags that all of these scripts have, and with ``flags``; the record."""
    model = ("", "a folder; default: memserve's own, as float32")
    arguments = options(doc, vllm="python", model=model, folder=Path, **flags)
    arguments.model = arguments.model or bundled_model("float32")
    with working_folder(arguments.folder) as folder:
        record = measure(arguments, folder)
    save(arguments, record)
    return record


def judge(name: object, answer: Answer, expected: Answer, counts: Counter[str], wrong: str = "WRONG") -> int | None:
    """Count an answer as equal, as a tie, or as ``wrong``; the first token that differs."""
    pairs = zip(answer.tokens, expected.tokens, strict=False)
    place = next((place for place, (answer, right) in enumerate(pairs) if answer != right), None)
    if place is None and len(answer.tokens) == len(expected.tokens):
        counts["equal"] += 1
    elif place is not None and expected.gaps[place] < TIE:
        counts["ties"] += 1
    else:
        counts[wrong] += 1
        print(f"  {wrong}: {name} at token {place}: {answer.tokens} for {expected.tokens}")
    return place
