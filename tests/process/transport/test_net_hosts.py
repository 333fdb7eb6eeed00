"""A cluster on hosts of their own, over a network that delays, loses, paces, and comes apart: right tokens, no hang."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import net_hosts
from memserve.transport.links.nixl_agent import nixl_is_installed
from net_hosts import Quality, Wired
from tiny_models import one_engine, prompt, save_folder, tiny_module
from waiting import eventually

_WHY_NOT = net_hosts.why_none(wired=True)
pytestmark = [
    pytest.mark.skipif(_WHY_NOT is not None, reason=f"no hosts: {_WHY_NOT}"),
]
WAIT_S = 120.0
BLOCK = 8
HOSTS = ("router", "p", "d", "s", "client")
MEMBERS = {"p": "prefill", "d": "decode", "s": "store"}


class Cluster:
    """A router, a prefill and a decode instance, and a store, each on its host; KV goes over ``link``, not through the
    memory that these hosts share."""

    def __init__(self, network: Wired, model: Path, folder: Path, is_ipv6: bool, link: str) -> None:
        self.network, self._model, self._folder = network, model, folder
        self._v6 = is_ipv6
        secret = folder / "secret"
        secret.write_text("a secret of the tests, long enough")
        secret.chmod(0o600)
        self._known = ("--cluster-secret-file", str(secret), "--log-level", "info")
        router = self.address("router")
        self.processes: dict[str, subprocess.Popen[str]] = {}
        everywhere = "::" if is_ipv6 else "0.0.0.0"
        none = ("--prefill", "0", "--decode", "0", "--colocated", "0", "--metadata", "none")
        at = ("--host", everywhere, "--port", "8000", "--cluster-host", router, "--cluster-port", "7000")
        self._start("router", "serve", "--model", str(model), *none, *at)
        own = ("--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1")
        join = ("--join", f"[{router}]:7000" if is_ipv6 else f"{router}:7000", "--link", link)
        for name in ("p", "d"):
            more = ("--role", MEMBERS[name], "--name", name, "--block-tokens", str(BLOCK))
            self._start(name, "instance", *join, *own, *more)
        self._start("s", "store", *join, "--name", f"s-{network['s'].namespace}", "--dram", "16MiB")
        eventually(lambda: self.live() == {"prefill", "decode", "store"}, WAIT_S)

    def address(self, name: str) -> str:
        host = self.network[name]
        return host.address6 if self._v6 else host.address

    def _start(self, name: str, *words: str) -> None:
        log = (self._folder / f"{name}.log").open("w")
        command = [sys.executable, "-m", "memserve", *words, *self._known]
        environment = {**os.environ, "UCX_TLS": "tcp,self"}
        self.processes[name] = self.network[name].popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def live(self) -> set[str]:
        """Roles of the members that take work."""
        return {
            role
            for role in MEMBERS.values()
            if self.samples(f'_up{{.*role="{role}"' if role != "store" else "store_up")
        }

    def metrics(self) -> str:
        try:
            status, page = self.network["client"].http(self.address("router"), 8000, "/metrics", timeout_s=10)
        except OSError:
            return ""
        return page if status == 200 else ""

    def samples(self, pattern: str) -> float:
        """The sum of the samples whose line matches."""
        rows = [line for line in self.metrics().splitlines() if re.search(pattern, line) and line[0] != "#"]
        return sum(float(line.rpartition(" ")[2]) for line in rows)

    def ask(self, tokens: list[int], count: int) -> str:
        return "".join(self.stream(tokens, count))

    def stream(self, tokens: list[int], count: int) -> Iterator[str]:
        """The answer piece by piece, as it is computed."""
        wanted = {"model": self._model.name, "prompt": tokens, "max_tokens": count, "temperature": 0}
        body = json.dumps(wanted | {"ignore_eos": True, "stream": True})
        with self.network["client"].socket(socket.AF_INET6 if self._v6 else socket.AF_INET) as sock:
            sock.settimeout(WAIT_S)
            sock.connect((self.address("router"), 8000))
            call = http.client.HTTPConnection(self.address("router"), 8000)
            call.sock = sock
            call.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = call.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    yield str(json.loads(line[6:])["choices"][0]["text"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[[list[int], int], str]]:
    with one_engine(model) as answer:
        yield answer


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((False, "curve"), id="IPv4, encrypted"),
        pytest.param(
            (True, "nixl"), id="IPv6, NIXL",
            marks=pytest.mark.skipif(not nixl_is_installed(), reason="NIXL (extra: nixl) is not installed"),
        ),
    ],
)  # fmt: skip
def cluster(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("logs")
    with Wired(Quality(delay_s=0.001, loss=0.01, bits_per_s=1e9), *HOSTS) as network:
        yield Cluster(network, model, folder, *request.param)


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


def test_kv_crosses_hosts_and_answers_are_right(cluster: Cluster, truth: Callable[..., str]) -> None:
    """PD-Caching-3 with 1 ms of delay and 1 % of frames lost each way: prompts twice, so that prefixes are reused."""
    questions = [tokens(90 + 8 * seed, seed) for seed in range(4)]
    for question in questions * 2:
        assert cluster.ask(question, 24) == truth(question, 24)
    eventually(lambda: cluster.samples("^memserve_instance_received_blocks_total.*decode") >= 4 * (90 // BLOCK), WAIT_S)
    assert cluster.samples("^memserve_instance_checksum_mismatches_total") == 0
    assert cluster.samples("^memserve_cached_prompt_tokens_total") > 4 * 80, "the second time, prefixes are there"
    eventually(lambda: cluster.samples("^memserve_store_kv_blocks_stored_total") > 0, WAIT_S)


@pytest.mark.parametrize(
    ("one", "others"),
    [("router", ("p",)), ("router", ("d",)), ("p", ("d",)), ("s", ("router", "p", "d"))],
    ids=["router-p", "router-d", "p-d", "s-all"],
)
def test_network_partition(cluster: Cluster, truth: Callable[..., str], one: str, others: tuple[str, ...]) -> None:
    """A request that runs when the line is cut, one behind it, and one after the line is whole again."""
    seed = 100 + 10 * HOSTS.index(one) + len(others) + HOSTS.index(others[0])
    running, behind, after = (tokens(60, seed * 3 + at) for at in range(3))
    stream = cluster.stream(running, 180)
    begun = [next(stream), next(stream)]  # of 180 pieces
    cluster.network.cut(one, *others)
    try:
        assert cluster.ask(behind, 24) == truth(behind, 24)
        assert "".join([*begun, *stream]) == truth(running, 180)
    finally:
        cluster.network.heal(one, *others)
    eventually(lambda: cluster.live() == {"prefill", "decode", "store"}, WAIT_S)
    assert cluster.ask(after, 24) == truth(after, 24)
    assert all(process.poll() is None for process in cluster.processes.values()), "no process has ended"
