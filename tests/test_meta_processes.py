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
import pytest

from memserve import LLM
from memserve.types import SamplingParams
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
        return Server(self._model, "--metadata", str(self.state))

    def children(self) -> dict[str, int]:
        """Name -> process id, as it is written down."""
        known = json.loads((self.state / "children.json").read_text())
        return {name: child["pid"] for name, child in known.items()}

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.server.process.kill()
        self.server.process.wait()

    def end(self) -> None:
        """In good order; whoever lives on nevertheless is a mistake."""
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
    """Clients that ask the same questions again and again, and try again when there is nobody."""

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


def test_after_kill_9_under_load_service_goes_on_and_the_cache_is_still_there(running: Running, truth) -> None:
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


def test_a_second_server_is_refused_the_folder_and_the_first_ends_in_good_order(running: Running, model: Path) -> None:
    flags = ["--model", str(model), "--port", "0", "--metadata", str(running.state)]
    second = subprocess.run([sys.executable, "-m", "memserve", "serve", *flags], capture_output=True, text=True)
    assert second.returncode == 1 and "is in use" in second.stderr
    running.end()


@pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")
def test_a_standby_router_takes_over_with_the_cache(model: Path, truth, tmp_path: Path) -> None:
    """Two routers, one etcd, an instance that has joined the first: which is killed with -9."""
    (tmp_path / "secret").write_text("s" * 32)
    questions = [(tokens(70 + 5 * number, number), 20) for number in range(3)]
    with running_etcd(tmp_path) as host, ExitStack() as stack:
        started = stack.enter_context(ThreadPoolExecutor(2))
        routers: list[Future[Server]] = []
        stack.callback(lambda: [made.result().process.kill() for made in routers])  # in order: the other is active then

        def router() -> tuple[str, Callable[[], Server]]:
            """Where its members join, and the server, as soon as it is active."""
            port = free_port()
            shared = ["--cluster-port", str(port), "--cluster-secret-file", str(tmp_path / "secret")]
            flags = ["--prefill", "0", "--decode", "0", *shared, "--metadata", f"etcd://{host}/test"]
            routers.append(started.submit(Server, model, *flags))
            return f"127.0.0.1:{port}", routers[-1].result

        join, first = router()
        flags = ["--join", join, "--cluster-secret-file", str(tmp_path / "secret"), "--name", "c1"]
        engine = ["--model", str(model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]
        instance = subprocess.Popen([sys.executable, "-m", "memserve", "instance", *flags, *engine])
        stack.callback(instance.kill)
        active = first()
        for question, count in questions:
            assert active.complete(question, count) == truth(question, count)
        warm = cached(active, questions)
        clients = clients_of(host)
        _, second = router()
        eventually(lambda: clients_of(host) > clients)  # it has tokenizers and all, and stands by
        active.process.kill()
        killed = time.monotonic()
        standby = second()
        eventually(lambda: standby.members() == {"c1"})
        assert time.monotonic() - killed < 20  # about three on an idle machine: bench/router_restart.py
        assert cached(standby, questions) >= 0.99 * warm > 0
        assert [standby.complete(*question) for question in questions] == [truth(*question) for question in questions]
        assert instance.poll() is None


def clients_of(host: str) -> int:
    """Connections that etcd has accepted, its own gateway's among them."""
    accepted = f":{int(host.rpartition(':')[2]):04X}"
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(local.endswith(accepted) and state == "01" for _, local, _, state, *_ in lines)
