"""Several raylets of Ray's own test cluster: scaled under load, no request fails, and every answer is right."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from memserve import LLM
from memserve.cli.on_ray import _DROPPED, without
from memserve.types import SamplingParams
from ports import free_port
from served_cluster import eventually
from tiny_models import prompt, save_folder, tiny_module

pytest.importorskip("ray", reason="Ray (extra: ray) is not installed")
pytestmark = pytest.mark.timeout(900)  # three raylets and four instances share the machine with other tests
WAIT_S = 240.0
COUNT = 32
QUESTIONS = 8
CLIENTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> dict[int, str]:
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


class OnRay:
    """``memserve serve --on ray`` on a head without room for instances, and two nodes with room for four each."""

    def __init__(self, model: Path) -> None:
        from ray.cluster_utils import Cluster

        quickly = {"health_check_period_ms": 1000, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 5}
        self.ray = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": quickly},
        )
        self.nodes = [self.ray.add_node(num_cpus=4) for _ in range(2)]
        self._name, port = model.name, free_port()
        self.url = f"http://127.0.0.1:{port}"
        shape = ("--prefill", "1", "--decode", "1", "--metadata", "none", "--port", str(port))
        own = ("--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1")
        self.process = self._memserve("serve", "--on", "ray", *shape, *own, "--block-tokens", "8")
        assert self.process.stdout is not None
        self.lines = [self.process.stdout.readline() for _ in range(3)]

    def _memserve(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "memserve", *words, "--address", self.ray.address]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

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


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[OnRay]:
    served = OnRay(model)
    yield served
    if served.process.poll() is None:
        served.process.kill()
    served.ray.shutdown()


class Load:
    """Clients that ask without pause, and compare."""

    def __init__(self, served: OnRay, truth: dict[int, str]) -> None:
        self._served, self._truth = served, truth
        self._stop = threading.Event()
        self.answers, self.wrong = 0, []
        self._clients = [threading.Thread(target=self._ask, args=(at,)) for at in range(CLIENTS)]

    def _ask(self, at: int) -> None:
        seed = at
        while not self._stop.is_set():
            seed = (seed + CLIENTS) % QUESTIONS
            try:
                told: Any = self._served.ask(seed)
            except Exception as error:  # any failure of a request is what this is about
                told = error
            if told != self._truth[seed]:
                self.wrong.append((seed, told))
            self.answers += 1
            time.sleep(0.05)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(WAIT_S)


def test_scaling_up_and_down_loses_no_request(served: OnRay, truth: dict[int, str]) -> None:
    """1P1D to 2P2D and back, under load."""
    assert served.lines[0].startswith("ready in "), served.lines
    assert served.up() == {"p1", "d1"}
    with Load(served, truth) as load:
        told = served.scale("prefill=2", "decode=2")
        assert told.split("\n")[:2] == ["prefill: p1, p2", "decode: d1, d2"]
        assert served.up() == {"p1", "p2", "d1", "d2"}
        before = load.answers
        eventually(lambda: load.answers > before + 2 * QUESTIONS)
        assert served.scale("prefill=1", "decode=1").split("\n")[:2] == ["prefill: p1", "decode: d1"]
        eventually(lambda: served.up() == {"p1", "d1"})
        before = load.answers
        eventually(lambda: load.answers > before + QUESTIONS)
    assert load.wrong == []
    assert served.counter("router_members_left_total") == 2, "those that were too many said goodbye"
    assert served.counter("router_members_died_total") == 0


def test_the_end(served: OnRay) -> None:
    """SIGTERM drains everything and ends with 0."""
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(WAIT_S) == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{served.url}/health", timeout=5)


def test_words_of_the_driver_are_not_those_of_the_router() -> None:
    words = ["serve", "--on", "ray", "--port=1", "--dtype", "float32", "--api-key", "k", "--lenient", "--prefill", "2"]
    assert without(words, _DROPPED) == ["serve", "--dtype", "float32", "--lenient"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--address", "192.0.2.1:6379"], "--address and --ray-resources are Ray's"),
        (["serve", "--on", "ray", "--address", "127.0.0.1:1"], "no Ray at 127.0.0.1:1"),
        (["serve", "--on", "ray", "--ray-resources", "decode=GPU"], "cannot read --ray-resources"),
        (["serve", "--on", "ray", "--in-process"], "--in-process runs one engine without a cluster"),
        (["scale", "prefill"], "ROLE=COUNT is needed"),
        (["scale", "prefill=1", "--address", "127.0.0.1:1"], "no Ray at 127.0.0.1:1"),
    ],
)
def test_wrong_words(capfd: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    from memserve.cli.main import run

    assert run(words) == 1
    assert message in capfd.readouterr().err
