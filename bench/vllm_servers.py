"""vLLM's server as the benches here start and ask it, with memserve's connector or without one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rivals import bundled_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from served_store import ServedStore as ServedStore  # what the servers share, for those who start them

ROOT = Path(__file__).resolve().parent.parent
START_S = 900.0
ANSWER_S = 300.0
TIE = 1e-3
"""Of log probability."""


@dataclass
class Answer:
    """What one request has brought."""

    tokens: list[int]
    gaps: list[float]
    """Between the two best tokens, one for each."""
    cached: int
    first_s: float
    total_s: float


@dataclass
class Vllm:
    """A server in a process group of its own."""

    python: str
    model: str
    store: str = ""
    secret_file: str = ""
    cpus: str = "0-1"
    flags: tuple[str, ...] = ("--max-model-len", "2048")
    log: Path = field(default_factory=lambda: Path(os.devnull))
    name: str = "x"
    """Under which clients ask for the model."""
    dtype: str = "float32"
    connector: tuple[str, str] = ("MemserveConnector", "memserve.integrations.vllm")
    """Class and module."""

    def start(self) -> Vllm:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", self.name, "--dtype", self.dtype]
        command += ["--block-size", "32"]
        command += ["--enforce-eager", "--enable-prompt-tokens-details", *self.flags]
        if self.store:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        environment = dict(
            os.environ, HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_SERVER_DEV_MODE="1",
            VLLM_CPU_OMP_THREADS_BIND=self.cpus, PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{ROOT / 'bench'}",
            VLLM_NO_USAGE_STATS="1",
        )  # fmt: skip
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM does not start, see {self.log}:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.2)
        return self

    @property
    def transfer(self) -> dict[str, Any]:
        """As the guide has it."""
        where = {"pool": self.store, "secret_file": self.secret_file}
        return {
            "kv_connector": self.connector[0], "kv_connector_module_path": self.connector[1],
            "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": where,
        }  # fmt: skip

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, prompt: list[int], tokens: int) -> Answer:
        """One completion, greedy, streamed."""
        body = {
            "model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        begin, first_s, found, gaps, cached = time.perf_counter(), 0.0, list[int](), list[float](), 0
        for part in streamed(f"{self.url}/v1/completions", body):
            for choice in part["choices"]:
                first_s = first_s or time.perf_counter() - begin
                found += choice.get("token_ids") or []
                for top in (choice.get("logprobs") or {}).get("top_logprobs") or []:
                    gaps.append(gap(list(top.values())))
            if part.get("usage"):
                cached = cached_of(part["usage"])
        return Answer(found, gaps, cached, first_s, time.perf_counter() - begin)

    def total(self, name: str) -> float:
        """The sum over all label values."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}"))

    def metric(self, name: str) -> int:
        """A count, over all label values."""
        return int(self.total(name))

    def cpu_s(self) -> float:
        """CPU time of all of its processes so far."""
        return cpu_s(self.process.pid)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        urllib.request.urlopen(
            urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST"), timeout=30
        ).close()

    def kill(self) -> None:
        """All of its processes at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(*servers: Vllm) -> Iterator[None]:
    """Start them side by side, and kill what is left of them at the end."""
    try:
        with ThreadPoolExecutor(len(servers)) as starting:
            list(starting.map(Vllm.start, servers))
        yield
    finally:
        for server in servers:
            if hasattr(server, "process") and server.process.poll() is None:
                server.kill()


def cpu_s(group: int) -> float:
    """CPU time so far of a process and of all in its group, if it leads one."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if group in (int(path.parent.name), int(told[2])):
            ticks += int(told[11]) + int(told[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def streamed(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer. Raises ``RuntimeError`` for one that says what went wrong, or that breaks off."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                part = json.loads(line[6:])
                if "error" in part:
                    raise RuntimeError(str(part["error"]))
                yield part
            elif line.startswith(b"data: [DONE]"):
                return
    raise RuntimeError("the stream broke off")


def gap(logprobs: list[float]) -> float:
    """Between the two best."""
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else 0.0


def cached_of(usage: dict[str, Any]) -> int:
    """Tokens of the prompt that were cached."""
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def recorded(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Path], Any]) -> Any:
    """Measure with what ``parser`` reads, and with the options that all of these benches have; the record."""
    parser.add_argument("--vllm", default="python", help="a Python that can import vllm")
    parser.add_argument("--model", default="", help="a folder; default: memserve's own, as float32")
    parser.add_argument("--folder", type=Path, help="for logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="file for the record")
    options = parser.parse_args()
    options.model = options.model or bundled_model("float32")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record = measure(options, folder)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return record
