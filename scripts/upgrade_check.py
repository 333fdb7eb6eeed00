"""A cluster is upgraded process by process while clients stream: ``python scripts/upgrade_check.py --old PYTHON``.

PYTHON runs the release before (``PYTHON -m memserve``), this checkout's is the new one. For the first part both need
the extra etcd, and etcd itself must be installed (Debian: etcd-server; ``scripts/etcd.sh``). Two parts:

* *members*: a router, a prefill and a decode instance and a store of the old release serve a tiny random model in
  float32. Then, one after the other, each instance gets a successor of the new release and is asked to end (SIGTERM),
  the store is followed by one of the new release on the same disk, and the router hands over to a standby of the new
  release, by etcd. Programs of both releases put values into each of the two stores, and get all of them from both; the
  last one compares every value with its checksum. All the while clients ask questions one after the other,
  greedily, streamed and with an ``Idempotency-Key``; as clients do, they try the other router when one does not answer.
  Each answer is compared with the old release's own before the upgrade. A request that has no answer after a minute,
  or another one, has failed.
* *journal*: a router of the old release with its metadata in a folder, and an instance. A document is stored, and a
  question asked with a key. The router ends, and one of the new release takes its place: it must know the document,
  take back the instance with its cache, and give the same answer under the same id.

The exit status is 1 where anything failed. ``--back`` goes the other way: from this checkout, whose store then has
``--kv-codec none``, to PYTHON.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
from harness.clients import Answer, greedy, stream
from harness.flags import options, save
from harness.processes import without_path

from meta_etcd_server import ETCD, running_etcd
from ports import free_port
from tiny_models import prompt, save_folder, tiny_module

REQUEST_S, STEP_S, CALL_S = 60.0, 180.0, 5.0
QUESTIONS, ANSWER_TOKENS = 24, 60
STORE = f"upgrade-{os.getpid()}"
BLOCK_TOKENS = 32
BACK_FLAGS = ["--kv-codec", "none"]
"""Of this checkout's store, when the other release follows it: a release from before ``--kv-codec`` begins a disk with
encoded values anew."""


class Cluster:
    """Routers that share their metadata, and members that join whichever is active."""

    def __init__(self, folder: Path, metadata: str, stack: ExitStack, *, is_back: bool = False) -> None:
        self._folder, self._metadata, self._stack, self._is_back = folder, metadata, stack, is_back
        folder.mkdir(exist_ok=True)
        self._model = save_folder(tiny_module("llama"), folder / "tiny")
        self._secret = folder / "secret"
        self._secret.write_text(uuid.uuid4().hex)
        self._secret.chmod(0o600)
        self._cluster_ports, self.http_ports = [free_port(), free_port()], [free_port(), free_port()]
        self.store_port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, python: str, name: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        command = [python, "-m", "memserve", *arguments, "--cluster-secret-file", str(self._secret)]
        self._processes[name] = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=self._folder, env=without_path(), start_new_session=True
        )
        self._stack.callback(self._processes[name].kill)

    @property
    def _engine(self) -> list[str]:
        return ["--model", str(self._model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]

    @property
    def _join(self) -> list[str]:
        return ["--join", ",".join(f"127.0.0.1:{port}" for port in self._cluster_ports)]

    def router(self, python: str, name: str, index: int = 0) -> None:
        """At the first or the second pair of ports. Of two, the first one is active, the other one stands by."""
        flags = ["--prefill", "0", "--decode", "0", "--port", str(self.http_ports[index]), "--drain-s", "10"]
        flags += ["--cluster-port", str(self._cluster_ports[index]), "--metadata", self._metadata]
        self._start(python, name, "serve", *flags, *self._engine)

    def instance(self, python: str, role: str, name: str) -> None:
        self._start(
            python, name, "instance", *self._join, "--role", role, "--name", name, "--drain-s", "30", *self._engine
        )

    def store(self, python: str, name: str) -> None:
        """All stores have one disk and one name: each finds what the one before has left, there and in memory."""
        flags = ["--name", STORE, "--listen", f"127.0.0.1:{self.store_port}", "--dram", "16MiB"]
        flags += ["--ssd", f"{self._folder}/disk=64MiB", "--ssd-sync", "always"]
        flags += BACK_FLAGS if python == sys.executable and self._is_back else []
        self._start(python, name, "store", *self._join, *flags)
        self._stack.callback(forget_store_memory)

    def use_store(self, python: str, *names: str) -> None:
        """A program puts a value of the first of ``names``, and gets those of all."""
        command = [python, "-c", PROGRAM, f"127.0.0.1:{self.store_port}", str(self._secret), *names]
        subprocess.run(command, cwd=self._folder, env=without_path(), timeout=STEP_S, check=True)

    def metrics(self) -> str:
        """The page of the active router; empty: none answers."""
        for port in self.http_ports:
            with suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2).text
        return ""

    def members(self) -> set[str]:
        """Those that take requests, as the active router says."""
        return set(re.findall(r'memserve_instance_up{instance="(\w+)",role="\w+"} 1.0', self.metrics()))

    def total(self, name: str, member: str = "") -> float:
        """A counter or gauge of one member, or of all."""
        samples = re.findall(rf"^memserve_{name}(?:_total)?({{.*}})? (\S+)$", self.metrics(), re.MULTILINE)
        return sum(float(value) for labels, value in samples if not member or f'"{member}"' in labels)

    def end(self, name: str) -> None:
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        print(f"  {name} has ended with status {process.wait(STEP_S)}", flush=True)

    def await_total(self, name: str, member: str, least: float) -> None:
        self.until(lambda: self.total(name, member) >= least, f"{name} of {member} is at least {least:g}")

    def await_members(self, *names: str) -> None:
        self.until(lambda: self.members() == set(names), f"members are {', '.join(names)}")

    def until(self, condition: Callable[[], object], description: str) -> None:
        end_s = time.monotonic() + STEP_S
        while not condition():
            exit_codes = {
                name: process.returncode for name, process in self._processes.items() if process.poll() not in (None, 0)
            }
            if time.monotonic() > end_s or exit_codes:
                raise SystemExit(
                    f"it never came to that: {description}; ended: {exit_codes or 'none'}\n{self._last_words()}"
                )
            time.sleep(0.05)

    def _last_words(self) -> str:
        """The end of each process's log: the logs are gone with their folder."""
        texts = {path.stem: path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(f"-- {name}\n{text}" for name, text in texts.items())


PROGRAM = """
import sys, time
from memserve import StoreClient
address, secret, name, *others = sys.argv[1:]
with StoreClient(address, "upgrade", secret) as client:
    assert client.put(name.encode(), name.encode() * 50_000)
    for key in (name, *others):
        with client.get(key.encode()) as view:
            assert bytes(view.data) == key.encode() * 50_000, key
    numbers = client.verify()
    while numbers["verify_running"]:
        time.sleep(0.1)
        numbers = client.verify(start=False)
    assert not any(count for name, count in numbers.items() if name.endswith("damaged")), numbers
"""
"""Puts a value, gets it and those of others, and has the store compare all that it keeps."""


def forget_store_memory() -> None:
    """A store leaves its memory to the next one of its name."""
    for path in Path("/dev/shm").glob(f"memserve-store-{STORE}*"):
        path.unlink(missing_ok=True)


class Clients:
    """Each asks one question at a time until it is told to stop."""

    def __init__(self, ports: Sequence[int], count: int) -> None:
        self._ports = list(ports)
        self._ended = threading.Event()
        self._questions = [[int(token) for token in prompt(70 + 3 * number, number)] for number in range(QUESTIONS)]
        self._answers: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        self.right = self.retried = 0
        self.failures: list[str] = []
        self.slowest_s = 0.0

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(question) for question in self._questions]

    def learn(self) -> None:
        self._answers = [self._ask(question, 0)[0] for question in self._questions]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(REQUEST_S + CALL_S)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._ended.is_set():
            index, begun_s = rng.randrange(QUESTIONS), time.monotonic()
            try:
                text, calls = self._ask(self._questions[index], number)
            except TimeoutError as error:
                self.failures.append(str(error))
                continue
            self.retried += calls > 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)
            if text == self._answers[index]:
                self.right += 1
            else:
                self.failures.append(f"another answer: {text!r}, not {self._answers[index]!r}")

    def _ask(self, question: list[int], first: int) -> tuple[str, int]:
        """The answer, and how many calls it took."""
        body, limits = greedy(question, ANSWER_TOKENS, "tiny"), httpx.Timeout(CALL_S, connect=2)
        headers, end_s, calls, answer = {"Idempotency-Key": uuid.uuid4().hex}, time.monotonic() + REQUEST_S, 0, Answer()
        while time.monotonic() < end_s:
            url = f"http://127.0.0.1:{self._ports[(first + calls) % len(self._ports)]}"
            calls += 1
            answer = stream(url, body, headers=headers, timeout=limits)
            if answer.is_whole and not answer.error:
                return answer.text, calls
            time.sleep(0.1)
        raise TimeoutError(f"no answer after {REQUEST_S:.0f} s and {calls} calls: {answer.status} {answer.error[:200]}")


def upgrade_members(folder: Path, old: str, new: str, count: int, *, is_back: bool) -> Clients:
    """Member by member, with ``count`` clients; what they have seen."""
    folder.mkdir()
    with ExitStack() as stack:
        etcd = f"etcd://{stack.enter_context(running_etcd(folder))}/upgrade"
        cluster = Cluster(folder, etcd, stack, is_back=is_back)
        cluster.router(old, "router1")
        cluster.instance(old, "prefill", "p1")
        cluster.instance(old, "decode", "d1")
        cluster.store(old, "store1")
        cluster.await_members("p1", "d1")
        clients = Clients(cluster.http_ports, count)
        clients.learn()
        blocks = sum(length // BLOCK_TOKENS for length in clients.prompt_lengths)
        cluster.await_total("store_disk_values", STORE, blocks)
        cluster.router(new, "router2", 1)

        def use_first_store() -> None:
            cluster.use_store(old, "one")
            cluster.use_store(new, "two", "one")

        def follow_store() -> None:
            cluster.end("store1")
            cluster.store(new, "store2")
            cluster.await_total("store_disk_values", STORE, blocks + 2)
            cluster.use_store(new, "three", "two", "one")
            cluster.use_store(old, "four", "three", "two", "one")

        steps: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("decode", lambda: (cluster.instance(new, "decode", "d2"), cluster.await_members("p1", "d1", "d2")),
             lambda: (cluster.end("d1"), cluster.await_members("p1", "d2"))),
            ("store", use_first_store, follow_store),
            ("prefill", lambda: (cluster.instance(new, "prefill", "p2"), cluster.await_members("p1", "p2", "d2")),
             lambda: (cluster.end("p1"), cluster.await_members("p2", "d2"))),
            ("router", lambda: None, lambda: (cluster.end("router1"), cluster.await_members("p2", "d2"))),
        ]  # fmt: skip
        with clients:
            for step_name, begin, finish in steps:
                print(step_name, flush=True)
                for act in (begin, finish):
                    act()
                    right = clients.right  # both releases answer together for a while
                    cluster.until(
                        lambda right=right: clients.right >= right + 50 or clients.failures, "50 more answers"
                    )
        for name in ("store_damaged", "store_disk_reads_damaged", "instance_checksum_mismatches"):
            clients.failures += [f"{name}: {count:g}"] if (count := cluster.total(name)) else []
    return clients


def follow_router(folder: Path, old: str, new: str) -> list[str]:
    """A router's journal, read by another release. What is wrong."""
    question, problems = [int(token) for token in prompt(100, 7)], []
    with ExitStack() as stack:
        cluster = Cluster(folder, str(folder / "state"), stack)
        url = f"http://127.0.0.1:{cluster.http_ports[0]}"
        headers = {"Idempotency-Key": "asked-before"}

        def ask() -> dict[str, Any]:
            body = greedy(question, ANSWER_TOKENS, "tiny")
            return dict(httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=REQUEST_S).json())

        cluster.router(old, "router1")
        cluster.instance(new, "colocated", "c1")
        cluster.await_members("c1")
        document = {"text": " ".join(["w"] * 80), "endpoint": "completions", "ttl_s": 3600}
        stored = httpx.put(f"{url}/v1/documents/book", json=document, timeout=REQUEST_S)
        answer = ask()
        cluster.end("router1")
        cluster.router(new, "router2")
        cluster.await_members("c1")
        documents = httpx.get(f"{url}/v1/documents", timeout=REQUEST_S).json()
        if stored.status_code >= 300 or [card["id"] for card in documents["data"]] != ["book"]:
            problems.append(f"the document: {stored.status_code}, then {documents}")
        if not cluster.total("router_members_readopted"):
            problems.append("the instance did not come back with its cache")
        if ask() != answer:
            problems.append(f"another answer than {answer}")
    print(f"journal: {problems or 'a document, an answer and a member are known again'}")
    return problems


def main() -> int:
    args = options(
        __doc__, required="old", old=(str, "a Python that can import the release before"), clients=8,
        back=(False, "from this checkout to that release"),
    )  # fmt: skip
    if ETCD is None:
        print("etcd is not installed (Debian: etcd-server): nothing is checked")
        return 0
    old, new = (sys.executable, args.old) if args.back else (args.old, sys.executable)
    for python in (old, new):
        version_text = subprocess.run([python, "-m", "memserve", "--version"], capture_output=True, text=True, cwd="/")
        print(f"{'from' if python == old else 'to'} {version_text.stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        problems = follow_router(Path(name) / "journal", old, new)
        clients = upgrade_members(Path(name) / "members", old, new, args.clients, is_back=args.back)
    print(
        f"{clients.right} answers right, {clients.retried} of them after a second call, the slowest after "
        f"{clients.slowest_s:.1f} s; {len(clients.failures)} requests failed"
    )
    failures = problems + clients.failures
    for failure in failures[:5]:
        print(f"  {failure}")
    save(args, {"right": clients.right, "retried": clients.retried, "failures": failures})
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
