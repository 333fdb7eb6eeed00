"""A cluster is upgraded process by process while clients stream: ``python scripts/upgrade_check.py --old PYTHON``.

PYTHON runs the release before (``PYTHON -m memserve``), this checkout's is the new one; both with the extra etcd, and
etcd itself must be installed. A router, a prefill and a decode instance of the old release serve a tiny random model
in float32. Then, one after the other, each instance gets a successor of the new release and is asked to end (SIGTERM),
and the router hands over to a standby of the new release. All the while clients ask questions one after the other,
greedily, streamed and with an ``Idempotency-Key``; as clients do, they try the other router when one does not answer.
Each answer is compared with the old release's own before the upgrade. A request that has no answer after a minute, or
another one, has failed: the exit status is 1. ``--back`` goes the other way: from this checkout to PYTHON.
"""

from __future__ import annotations

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
from contextlib import ExitStack
from pathlib import Path

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


class Cluster:
    """Routers that share an etcd, and instances that join whichever is active."""

    def __init__(self, folder: Path, etcd: str, stack: ExitStack) -> None:
        self._folder, self._etcd, self._stack = folder, etcd, stack
        self._model = save_folder(tiny_module("llama"), folder / "tiny")
        self._secret = folder / "secret"
        self._secret.write_text(uuid.uuid4().hex)
        self._secret.chmod(0o600)
        self._cluster_ports, self.http_ports = [free_port(), free_port()], [free_port(), free_port()]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, python: str, name: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        engine = ["--model", str(self._model), "--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1"]
        command = [python, "-m", "memserve", *arguments, *engine, "--cluster-secret-file", str(self._secret)]
        self._processes[name] = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=self._folder, env=without_path(), start_new_session=True
        )
        self._stack.callback(self._processes[name].kill)

    def router(self, python: str, name: str) -> None:
        """The first one is active, the second one stands by."""
        index = sum(process_name.startswith("router") for process_name in self._processes)
        flags = ["--prefill", "0", "--decode", "0", "--port", str(self.http_ports[index]), "--drain-s", "10"]
        flags += ["--cluster-port", str(self._cluster_ports[index]), "--metadata", f"etcd://{self._etcd}/upgrade"]
        self._start(python, name, "serve", *flags)

    def instance(self, python: str, role: str, name: str) -> None:
        join = ",".join(f"127.0.0.1:{port}" for port in self._cluster_ports)
        self._start(python, name, "instance", "--join", join, "--role", role, "--name", name, "--drain-s", "30")

    def members(self) -> set[str]:
        """Those that take requests, as the active router says."""
        for port in self.http_ports:
            try:
                page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2).text
            except httpx.HTTPError:
                continue
            return set(re.findall(r'memserve_instance_up{instance="(\w+)",role="\w+"} 1.0', page))
        return set()

    def end(self, name: str) -> None:
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        print(f"  {name} has ended with status {process.wait(STEP_S)}", flush=True)

    def await_members(self, *names: str) -> None:
        self.until(lambda: self.members() == set(names), f"members are {', '.join(names)}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + STEP_S
        while not condition():
            exit_codes = {
                name: process.returncode for name, process in self._processes.items() if process.poll() not in (None, 0)
            }
            if time.monotonic() > end_s or exit_codes:
                raise SystemExit(f"it never came to that: {what}; ended: {exit_codes or 'none'}\n{self._last_words()}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        """The end of each process's log: the logs are gone with their folder."""
        texts = {path.stem: path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.log"))}
        return "\n".join(f"-- {name}\n{text}" for name, text in texts.items())


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
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        cluster = Cluster(folder, stack.enter_context(running_etcd(folder)), stack)
        cluster.router(old, "router1")
        cluster.instance(old, "prefill", "p1")
        cluster.instance(old, "decode", "d1")
        cluster.await_members("p1", "d1")
        clients = Clients(cluster.http_ports, args.clients)
        clients.learn()
        cluster.router(new, "router2")
        steps: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            ("decode", lambda: (cluster.instance(new, "decode", "d2"), cluster.await_members("p1", "d1", "d2")),
             lambda: (cluster.end("d1"), cluster.await_members("p1", "d2"))),
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
    print(
        f"{clients.right} answers right, {clients.retried} of them after a second call, the slowest after "
        f"{clients.slowest_s:.1f} s; {len(clients.failures)} requests failed"
    )
    for failure in clients.failures[:5]:
        print(f"  {failure}")
    save(args, {"right": clients.right, "retried": clients.retried, "failures": clients.failures})
    return int(bool(clients.failures))


if __name__ == "__main__":
    raise SystemExit(main())
