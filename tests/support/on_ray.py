"""memserve on raylets of Ray's own test cluster, clients that ask and compare, and the loss of a node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from asking_clients import question
from ports import free_port

WAIT_S = 240.0
COUNT = 32
CLIENTS = 3
PAUSE_S = 0.05
"""Of a client, between two requests."""
QUICKLY = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,  # else actors wait for everything else that this machine does
}


class Raylets:
    """A head without room for instances, and nodes with room for four each; they say that they have two GPUs each."""

    def __init__(self, nodes: int = 2) -> None:
        self.cluster = _started_head()
        self.nodes = [self.cluster.add_node(num_cpus=4, num_gpus=2) for _ in range(nodes)]
        self.address = self.cluster.address

    def kill_raylet(self, node: int) -> None:
        """``kill -9``; Ray sees the node go."""
        os.kill(self.nodes[node].all_processes["raylet"][0].process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all of it."""
        self.cluster.shutdown()


def _started_head(tries: int = 3) -> Any:
    """Ray itself gives a node 30 s to start, which on a busy machine may not be enough."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICKLY}
    for _ in range(tries - 1):
        with contextlib.suppress(Exception):
            return Cluster(initialize_head=True, head_node_args=head)
    return Cluster(initialize_head=True, head_node_args=head)


class OnRay:
    """``memserve serve --on ray``."""

    def __init__(self, model: Path, *flags: str, prefill: int = 1, decode: int = 1, ray: Raylets | None = None) -> None:
        self.ray = ray or Raylets()
        self._name, self._model, port = model.name, str(model), free_port()
        self.url = f"http://127.0.0.1:{port}"
        shape = ("--prefill", str(prefill), "--decode", str(decode), "--metadata", "none", "--port", str(port))
        own = ("--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1")
        self.process = self._memserve("serve", "--on", "ray", *shape, *own, "--block-tokens", "8", *flags)
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(2)]

    def _memserve(self, *words: str, stderr: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "memserve", *words, "--address", self.ray.address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)

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
        status, told = self.try_to_scale(*counts)
        assert status == 0, told
        return told

    def try_to_scale(self, *counts: str) -> tuple[int, str]:
        """Its exit status, and what it prints, errors included."""
        process = self._memserve("scale", *counts, stderr=subprocess.STDOUT)
        told, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, told

    def up(self) -> set[str]:
        """Instances that take requests, without what their names say of their life."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return set(re.findall(r'memserve_instance_up{instance="(\w+)[\w-]*",role="\w+"} 1.0', page))

    def gpus_shown_to(self, name: str) -> list[str]:
        """What ``CUDA_VISIBLE_DEVICES`` of the instance's process says."""
        (place,) = (one for one in Path("/proc").glob("[0-9]*") if self._runs(one, name))
        (shown,) = re.findall(rb"(?:^|\0)CUDA_VISIBLE_DEVICES=([^\0]*)", (place / "environ").read_bytes())
        return str(shown, "ascii").split(",")

    def routers(self) -> int:
        """How many processes answer clients."""
        port = self.url.rpartition(":")[2]
        at_port = [_words_of(process) for process in Path("/proc").glob("[0-9]*")]
        return (
            sum("--port" in words and words[words.index("--port") + 1] == port for words in at_port) - 1
        )  # the driver

    def _runs(self, process: Path, name: str) -> bool:
        """Whether it is the instance, and not one of its workers or of another cluster."""
        words = _words_of(process)
        return "--join" in words and self._model in words and any(word.startswith(f"{name}-") for word in words)

    def counter(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(value) for value in re.findall(rf"^memserve_{name}(?:{{.*}})? (.+)$", page, re.M))

    def ask(self, seed: int) -> str:
        body = {"model": self._name, "prompt": question(seed), "max_tokens": COUNT, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


def _words_of(process: Path) -> list[str]:
    """Of its command line; of one that has ended, none."""
    try:
        return (process / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
