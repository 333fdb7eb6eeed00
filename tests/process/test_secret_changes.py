"""The cluster's secret is changed under load: all processes and clients go on, and the old one opens nothing."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

from asking_clients import Load, question, truth_of
from memserve.base.errors import StoreUnavailable
from memserve.store.client.client import StoreClient
from memserve.transport.probe import ProbeResult, probe_address
from ports import free_port
from secret_steps import OLD, STEPS, put
from served_cluster import GREEDY, WAIT_S, Server, eventually
from tiny_models import save_folder, tiny_module

ANSWER_TOKENS = 24
READ_AGAIN = "the cluster secret in .*: read again"


class Member:
    """A process that was started by hand, with a secret file of its own."""

    def __init__(self, folder: Path, command: str, name: str, port: int, text: str, *flags: str) -> None:
        self.file, self.log = put(folder / f"{name}.secret", text), folder / f"{name}.log"
        words = ["--join", f"127.0.0.1:{port}", "--name", name, "--cluster-secret-file", str(self.file), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "memserve", command, *words], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)


class Cluster:
    """Two routers at one port, 1P1D and a store as children of one command; an instance and a router by hand."""

    def __init__(self, folder: Path, logs: IO[str]) -> None:
        self.folder, self.log = folder, Path(logs.name)
        self.model = save_folder(tiny_module("llama"), folder / "tiny")
        self.file, self.port, self.store = put(folder / "secret", f"{OLD}\n"), free_port(), f"127.0.0.1:{free_port()}"
        shape = ("--prefill", "1", "--decode", "1", "--routers", "2", "--metadata", str(folder / "state"))
        at = ("--cluster-port", str(self.port), "--cluster-secret-file", str(self.file))
        store = ("--ssd", f"{folder}/ssd=64MiB", "--store-dram", "16MiB", "--store-listen", self.store)
        self.server = Server(self.model, *shape, *at, *store, stderr=logs)
        self.hand = self.instance("hand", f"{OLD}\n")
        self.router_port = free_port()
        flags = ("--model", str(self.model), "--port", str(self.router_port))
        self.router = Member(folder, "router", "router-hand", self.port, f"{OLD}\n", *flags)
        eventually(lambda: "hand" in self.server.members())
        eventually(lambda: "ready in" in self.router.log.read_text())

    def instance(self, name: str, text: str) -> Member:
        flags = ("--model", str(self.model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1")
        return Member(self.folder, "instance", name, self.port, text, "--role", "decode", *flags)

    def ask(self, at: int) -> str:
        """Each of the routers in turn, in a connection of its own."""
        tokens = [int(token) for token in question(at)]
        url = f"http://127.0.0.1:{self.router_port}/v1" if at % 3 == 0 else self.server.url
        body = {"model": "tiny", "temperature": 0, "ignore_eos": True, "prompt": tokens, "max_tokens": ANSWER_TOKENS}
        text = ""
        with httpx.stream("POST", f"{url}/completions", json={**body, "stream": True}, timeout=WAIT_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                assert "error" not in line, line
                text += "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', line))
        return text

    def metric(self, name: str) -> float:
        """Of the router that has a port of its own: at the port of two any one of them answers."""
        page = httpx.get(f"http://127.0.0.1:{self.router_port}/metrics", timeout=WAIT_S).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (.+)$", page, re.M))

    def read_again(self, log: Path) -> int:
        return len(re.findall(READ_AGAIN, log.read_text()))

    def end(self) -> None:
        for member in (self.router, self.hand):
            member.end()
        self.server.process.terminate()
        assert self.server.process.wait(60) == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with (tmp_path / "serve.log").open("w") as logs:
        cluster = Cluster(tmp_path, logs)
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.end)
            yield cluster


def test_secret_rotation_in_three_steps_fails_no_request(cluster: Cluster, tmp_path: Path) -> None:
    truth = truth_of(cluster.model, ANSWER_TOKENS)
    before = {name: cluster.metric(f"memserve_router_{name}_total") for name in ("members_died", "members_refused")}
    members = cluster.server.members()
    client_file = put(tmp_path / "client.secret", f"{OLD}\n")
    children = len(cluster.server.children())
    with (
        StoreClient(cluster.store, secret_file=client_file, timeout_s=WAIT_S) as client,
        Load(cluster.ask, truth, clients=3) as load,
    ):
        client.put(b"key", b"value")
        for step, text in enumerate(STEPS, 1):
            for file in (client_file, cluster.hand.file, cluster.file, cluster.router.file):
                put(file, text)
            answers = load.answers
            eventually(lambda step=step: cluster.read_again(cluster.log) == step * (children + 1))
            for member in (cluster.hand, cluster.router):
                eventually(lambda log=member.log, step=step: cluster.read_again(log) == step)
            first = text.splitlines()[0]
            for port in (f"127.0.0.1:{cluster.port}", cluster.store):
                eventually(
                    lambda port=port, first=first: probe_address(f"tcp://{port}", first, 5.0) is ProbeResult.ACCEPTED
                )
            eventually(lambda answers=answers: load.answers > answers + 30)
            with client.get(b"key", timeout_s=WAIT_S) as found:
                assert bytes(found) == b"value"
    assert not load.wrong, load.wrong[:3]
    assert members == cluster.server.members()
    assert before == {name: cluster.metric(f"memserve_router_{name}_total") for name in before}
    for port in (f"127.0.0.1:{cluster.port}", cluster.store):
        assert probe_address(f"tcp://{port}", OLD, 5.0) is ProbeResult.REJECTED
    with pytest.raises(StoreUnavailable, match="another secret"):
        StoreClient(cluster.store, secret_file=put(tmp_path / "old.secret", OLD), timeout_s=1.0)
    assert cluster.server.client.completions.create(
        prompt=question(1), max_tokens=2, **GREEDY
    ).usage.prompt_tokens_details.cached_tokens, "the KV is still found"

    stranger, newcomer = cluster.instance("stranger", OLD), cluster.instance("newcomer", STEPS[2])
    try:
        eventually(lambda: "newcomer" in cluster.server.members())
        eventually(lambda: "refuses the secret" in stranger.log.read_text())
        assert "stranger" not in cluster.server.members()
        with Load(cluster.ask, truth, clients=3) as load:
            eventually(lambda: load.answers > 30)
        assert not load.wrong, load.wrong[:3]
    finally:
        stranger.end()
        newcomer.end()
