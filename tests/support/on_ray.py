"""memserve on raylets of Ray's own test cluster, clients that ask and compare, and the loss of a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from memserve import LLM
from memserve.types import SamplingParams
from ports import free_port
from tiny_models import prompt

WAIT_S = 240.0
COUNT = 32
QUESTIONS = 8
CLIENTS = 3
QUICKLY = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,  # else actors wait for everything else that this machine does
}


def truth_of(model: Path) -> dict[int, str]:
    """What one engine without a cache answers, greedily."""
    with LLM(str(model), dtype="float32", kv_memory="4MiB", threads=1, enable_prefix_caching=False) as llm:
        greedy = SamplingParams(temperature=0)
        asked = [question(seed) for seed in range(QUESTIONS)]
        return {
            seed: llm.generate([tokens], greedy, max_tokens=COUNT, ignore_eos=True)[0].text
            for seed, tokens in enumerate(asked)
        }


def question(seed: int) -> list[int]:
    return [int(token) for token in prompt(60 + 8 * seed, seed)]


class Raylets:
    """A head without room for instances, and nodes with room for four each."""

    def __init__(self, nodes: int = 2) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICKLY}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=4) for _ in range(nodes)]
        self.address = self.cluster.address

    def kill_raylet(self, node: int) -> None:
        """``kill -9``; Ray sees the node go."""
        os.kill(self.nodes[node].all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all of it."""
        self.cluster.shutdown()


class OnRay:
    """``memserve serve --on ray``."""

    def __init__(self, model: Path, *flags: str, prefill: int = 1, decode: int = 1, ray: Raylets | None = None) -> None:
        self.ray = ray or Raylets()
        self._name, port = model.name, free_port()
        self.url = f"http://127.0.0.1:{port}"
        shape = ("--prefill", str(prefill), "--decode", str(decode), "--metadata", "none", "--port", str(port))
        own = ("--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1")
        self.process = self._memserve("serve", "--on", "ray", *shape, *own, "--block-tokens", "8", *flags)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(2)]

    def _memserve(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "memserve", *words, "--address", self.ray.address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def end(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End all of it, in whatever state it is."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.ray.close()

    def scale(self, *counts: str) -> str:
        """What ``memserve scale`` prints."""
        process = self._memserve("scale", *counts)
        told, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, told
        return told

    def up(self) -> set[str]:
        """Instances that take requests, without what their names say of their life."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return set(re.findall(r'memserve_instance_up{instance="(\w+)[\w-]*",role="\w+"} 1.0', page))

    def counter(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}(?:{{.*}})? (.+)$", page, re.M))

    def ask(self, seed: int) -> str:
        body = {"model": self._name, "prompt": question(seed), "max_tokens": COUNT, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


class Load:
    """Clients that ask, and compare; ``pause_s`` between two requests."""

    def __init__(self, served: OnRay, truth: Mapping[int, str], clients: int = CLIENTS, pause_s: float = 0.05) -> None:
        self._served, self._truth, self._pause_s = served, truth, pause_s
        self._stop = threading.Event()
        self.seconds: list[float] = []
        """That each answer took."""
        self.wrong: list[tuple[int, Any]] = []
        self._clients = [threading.Thread(target=self._ask, args=(at,)) for at in range(clients)]

    @property
    def answers(self) -> int:
        return len(self.seconds)

    def _ask(self, at: int) -> None:
        seed = at
        while not self._stop.is_set():
            seed = (seed + 1) % QUESTIONS
            started = time.monotonic()
            try:
                told: Any = self._served.ask(seed)
            except Exception as error:  # any failure of a request is what this is about
                told = error
            if told != self._truth[seed]:
                self.wrong.append((seed, told))
            self.seconds.append(time.monotonic() - started)
            self._stop.wait(self._pause_s)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(WAIT_S)
