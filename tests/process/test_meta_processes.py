"""``memserve serve`` killed with -9 while clients stream: instances live on, the next one takes them over with all that
they have cached, and no answer is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from memserve import LLM
from memserve.base.types import SamplingParams
from memserve.journal.state import MemberPage, MetadataState
from memserve.journal.store import read_journal, records_of
from memserve.kv.identity import DEFAULT_KEY, block_identities, identity_key, namespace_id
from meta_etcd_server import ETCD, running_etcd
from ports import free_port
from served_cluster import Server, eventually, is_alive
from tiny_models import prompt, save_folder, tiny_module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> Iterator[Callable[[list[int], int], str]]:
    """What one engine in one process answers, greedily."""
    with LLM(str(model), dtype="float32", kv_memory="4MiB", threads=1) as llm:
        greedy = SamplingParams(temperature=0)
        yield lambda tokens, count: llm.generate([tokens], greedy, max_tokens=count, ignore_eos=True)[0].text


def tokens(length: int, seed: int) -> list[int]:
    return [int(token) for token in prompt(length, seed)]


class Running:
    """A ``memserve serve`` with metadata, which is killed and started again."""

    def __init__(self, model: Path, state: Path) -> None:
        self._model, self.state = model, state
        self.server = self.start()

    def start(self) -> Server:
        return Server(self._model, "--prefill", "1", "--decode", "1", "--metadata", str(self.state))

    def children(self) -> dict[str, int]:
        """Name -> process id, as it is written down."""
        known = json.loads((self.state / "children.json").read_text())
        return {name: child["pid"] for name, child in known.items()}

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.server.process.kill()
        self.server.process.wait()

    def end(self) -> None:
        """In good order; one that lives on nevertheless is a mistake."""
        pids = self.children().values()
        self.server.process.send_signal(signal.SIGTERM)
        assert self.server.process.wait(60) == 0
        assert not any(is_alive(pid) for pid in pids)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(model, tmp_path_factory.mktemp("state"))
    yield running
    if running.server.process.poll() is None:
        running.end()
    for pid in running.children().values():
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


class Crowd:
    """Clients that ask the same questions again and again, and try again when no server answers."""

    def __init__(self, running: Running, questions: list[tuple[list[int], int]], answers: list[str]) -> None:
        self._running, self._questions, self._answers = running, questions, answers
        self.right = self.errors = 0
        self.wrong: list[str] = []
        self.hits = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(len(questions))]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        while not self._ended.is_set():
            (question, count), text = self._questions[number], ""
            body = {"model": "tiny", "prompt": question, "max_tokens": count, "temperature": 0, "ignore_eos": True}
            try:
                with httpx.stream(
                    "POST", f"{self._running.server.url}/completions", json=body | {"stream": True}, timeout=60
                ) as stream:
                    for line in stream.iter_lines():
                        if line.startswith("data: {"):
                            text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", []))
            except (httpx.HTTPError, OSError):
                self.errors += 1
                if not self._answers[number].startswith(text):
                    self.wrong.append(text)
                time.sleep(0.05)
                continue
            if text == self._answers[number]:
                self.right += 1
            else:
                self.wrong.append(text)


def cached(server: Server, questions: list[tuple[list[int], int]]) -> int:
    """Prompt tokens that are reused when each question is asked once more."""
    total = 0
    for question, _ in questions:
        usage = server.client.completions.create(model="tiny", prompt=question, max_tokens=1, temperature=0).usage
        total += usage.prompt_tokens_details.cached_tokens
    return total


def test_service_and_cache_survive_kill_9_under_load(running: Running, truth) -> None:
    questions = [(tokens(70 + 5 * number, number), 60) for number in range(5)]
    answers = [truth(*question) for question in questions]
    pids, manual = running.children(), f"{running.server.url}/documents/manual"
    put = httpx.put(manual, json={"text": "a text", "endpoint": "completions"}, timeout=60)
    assert put.status_code == 201
    with Crowd(running, questions, answers) as crowd:
        eventually(lambda: crowd.right >= 10)
        running.kill()
        assert all(is_alive(pid) for pid in pids.values())
        running.server, served = running.start(), crowd.right
        eventually(lambda: crowd.right >= served + 10)
    assert not crowd.wrong and crowd.errors
    assert running.children() == pids and running.server.members() == {"p1", "d1"}
    before = sum(len(question) // 32 * 32 for question, _ in questions)
    assert cached(running.server, questions) >= 0.99 * before
    found = httpx.get(f"{running.server.url}/documents/manual", timeout=60).json()
    assert (found["tokens"], found["created"]) == (put.json()["tokens"], put.json()["created"])
    assert 0 < found["expires_in_s"] < put.json()["expires_in_s"]


def test_block_names_depend_on_persisted_cluster_secret(running: Running) -> None:
    """The journal has the names under the folder's secret, and none that can be found without it."""
    question = tokens(70, 99)
    assert cached(running.server, [(question, 1)]) == 0
    key = identity_key((running.state / "secret").read_text().strip())

    def members() -> list[MemberPage]:
        state = MetadataState()
        for body in read_journal((running.state / "journal").read_bytes()).bodies:
            state.apply(records_of(body))
        return list(state.members.values())

    def names(key: bytes) -> set[bytes]:
        namespace = namespace_id("", members()[0].info.namespace, key)
        return set(block_identities(namespace, np.array(question, np.int32), 32, key))

    eventually(lambda: any(names(key) <= page.entries.stamps.keys() for page in members()))
    assert len(names(key)) == 2 and not any(names(DEFAULT_KEY) & page.entries.stamps.keys() for page in members())
    running.kill()
    running.server = running.start()
    assert cached(running.server, [(question, 1)]) == 64


def test_second_server_on_same_state_folder_is_refused(running: Running, model: Path) -> None:
    flags = ["--model", str(model), "--port", "0", "--metadata", str(running.state)]
    second = subprocess.run([sys.executable, "-m", "memserve", "serve", *flags], capture_output=True, text=True)
    assert second.returncode == 1 and "is in use" in second.stderr
    running.end()


class Pair:
    """Two routers, one etcd: the first one is active, the other stands by; and instances that have no parent."""

    def __init__(self, model: Path, folder: Path, host: str, stack: ExitStack) -> None:
        self._model, self._secret, self._host, self._stack = model, folder / "secret", host, stack
        self._secret.write_text("s" * 32)
        self._started = stack.enter_context(ThreadPoolExecutor(2))
        self._routers: list[Future[Server]] = []
        self._ports = [free_port(), free_port()]
        stack.callback(self._kill_routers)

    def _kill_routers(self) -> None:
        for made in self._routers:  # in order: the other one is active then
            made.result().process.kill()

    @property
    def addresses(self) -> list[str]:
        """Where members join the one and the other."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    def router(self) -> Callable[[], Server]:
        """Start the next one; the server, as soon as it is active."""
        port = self._ports[len(self._routers)]
        shared = ["--cluster-port", str(port), "--cluster-secret-file", str(self._secret)]
        flags = ["--prefill", "0", "--decode", "0", *shared, "--metadata", f"etcd://{self._host}/test"]
        self._routers.append(self._started.submit(Server, self._model, *flags))
        return self._routers[-1].result

    def standby(self) -> Callable[[], Server]:
        """The second one, when the first one is elected, and it has tokenizers and all, and stands by."""
        eventually(lambda: keys_of(self._host))
        clients = clients_of(self._host)
        second = self.router()
        eventually(lambda: clients_of(self._host) > clients)
        return second

    def instance(self, name: str, *join: str) -> subprocess.Popen[bytes]:
        flags = ["--join", ",".join(join), "--cluster-secret-file", str(self._secret), "--name", name]
        engine = ["--model", str(self._model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]
        process = subprocess.Popen([sys.executable, "-m", "memserve", "instance", *flags, *engine])
        self._stack.callback(process.kill)
        return process


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    if ETCD is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    with running_etcd(tmp_path) as host, ExitStack() as stack:
        yield Pair(model, tmp_path, host, stack)


def test_a_standby_router_takes_over_with_the_cache(pair: Pair, truth) -> None:
    """An instance that has joined the first, and knows of no other: the first is killed with -9."""
    questions = [(tokens(70 + 5 * number, number), 20) for number in range(3)]
    first = pair.router()
    instance = pair.instance("c1", pair.addresses[0])
    active = first()
    for question, count in questions:
        assert active.complete(question, count) == truth(question, count)
    warm = cached(active, questions)
    second = pair.standby()
    active.process.kill()
    killed = time.monotonic()
    standby = second()
    eventually(lambda: standby.members() == {"c1"})
    assert time.monotonic() - killed < 20  # about three on an idle machine: bench/router_restart.py
    assert cached(standby, questions) >= 0.99 * warm > 0
    assert [standby.complete(*question) for question in questions] == [truth(*question) for question in questions]
    assert instance.poll() is None


def test_instances_with_two_addresses_find_the_active_router(pair: Pair, truth) -> None:
    """Two that are members when it is killed with -9, and one that starts afterwards and knocks first where none is
    any more."""
    question = tokens(70, 1), 20
    first = pair.router()
    members = [pair.instance(name, *pair.addresses) for name in ("c1", "c2")]
    second, active = pair.standby(), first()
    eventually(lambda: active.members() == {"c1", "c2"})
    assert active.complete(*question) == truth(*question)
    active.process.kill()
    killed = time.monotonic()
    standby = second()
    eventually(lambda: standby.members() == {"c1", "c2"})
    assert time.monotonic() - killed < 5
    assert standby.complete(*question) == truth(*question)
    members.append(pair.instance("c3", *pair.addresses))
    eventually(lambda: standby.members() == {"c1", "c2", "c3"})
    assert [standby.complete(tokens(70, seed), 5) for seed in range(6)] == [truth(tokens(70, s), 5) for s in range(6)]
    assert all(member.poll() is None for member in members)


def keys_of(host: str) -> int:
    """How many keys etcd has, by its own gateway: none before a router is elected."""
    everything = {"key": "AA==", "range_end": "AA==", "count_only": True}
    return int(httpx.post(f"http://{host}/v3/kv/range", json=everything).json().get("count", 0))


def clients_of(host: str) -> int:
    """Connections that etcd has accepted, its own gateway's among them."""
    accepted = f":{int(host.rpartition(':')[2]):04X}"
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(local.endswith(accepted) and state == "01" for _, local, _, state, *_ in lines)


def test_another_model_on_fewer_instances_starts_at_once(running: Running, tmp_path: Path) -> None:
    """Last in this file: what the killed router knew is of no use to the next one, and does not stand in its way."""
    before = running.children()
    running.kill()
    other = save_folder(tiny_module("qwen3"), tmp_path / "other")
    server = Server(other, "--colocated", "1", "--metadata", str(running.state))
    try:
        assert server.members() == {"c1"}
        page = server.client.models.list().data
        assert [model.id for model in page] == ["other"]
        with LLM(str(other), dtype="float32", kv_memory="4MiB", threads=1) as llm:
            truth = llm.generate([tokens(40, 1)], SamplingParams(temperature=0), max_tokens=8, ignore_eos=True)[0].text
        answer = server.client.completions.create(
            model="other", prompt=tokens(40, 1), max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.choices[0].text == truth
        eventually(lambda: not any(is_alive(pid) for pid in before.values()))
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
