"""The control plane killed with -9 under load: seconds without service, and how much of the cache remains.

    python bench/router_restart.py [--model DIR] [--clients 4] [--etcd /usr/bin/etcd] [--json FILE]

Clients ask repeatedly, greedily, streamed, and retry while there is no server; each answer must equal the one
before the kill.

* *file*: ``memserve serve --metadata FOLDER`` with a prefill and a decode instance; its process is killed, and the same
  command is started again at once, as systemd does. The time includes the start of a Python process.
* *etcd*: two ``memserve serve --metadata etcd://...``, one of them active, and a colocated instance that has joined
  by ``memserve instance``; the active one is killed. The time ends when the other one answers.

*hit rate*: share of the prompts' tokens that are reused when all questions are asked once more, before and after the
kill.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
from harness.clients import Answer, greedy, meanwhile, post, stream
from harness.flags import options, save
from harness.processes import is_ready, process, wait_until
from harness.prompts import random_tokens
from harness.tables import Table

from ports import free_port

READY_S = 120.0
COLUMNS = {
    "router": "{name}", "first answer": "{first_answer_s:.2f} s", "longest pause": "{longest_pause_s:.2f} s",
    "errors": "{errors}", "right": "{right}", "wrong": "{wrong}", "hit rate before": "{hit_rate_before:.1%}",
    "after": "{hit_rate_after:.1%}",
}  # fmt: skip


class Processes:
    """All started processes; ended at the end, whatever happens."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        """``folder``: for the files that they leave behind."""
        self._stack, self._environment = stack, {**os.environ, "XDG_STATE_HOME": str(folder)}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(process(command, environment=self._environment))

    def memserve(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(sys.executable, "-m", "memserve", *arguments)


class Crowd:
    """Clients that retry for ever."""

    def __init__(self, urls: list[str], clients: int) -> None:
        self.urls, self._clients, rng = urls, clients, Random(1)
        self.prompts = [random_tokens(300 + 40 * number, rng) for number in range(clients)]
        self.truth: dict[int, str] = {}
        self.right = self.errors = 0
        self.wrong: list[str] = []
        self.times: list[float] = []

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Until the end of the block; the first answers are the reference."""
        self.truth = {number: self._answer(number).checked().text for number in range(self._clients)}
        with meanwhile(*(partial(self._run, number=number) for number in range(self._clients))):
            yield

    def _run(self, over: threading.Event, number: int) -> None:
        while not over.is_set():
            answer = self._answer(number)
            if answer.status != 200 or answer.error or not answer.is_whole:
                self.errors += 1
                self.urls.append(self.urls.pop(0))  # perhaps another router is active
                time.sleep(0.02)
                continue
            self.times.append(time.monotonic())
            self.right += answer.text == self.truth[number]
            self.wrong += [answer.text] if answer.text != self.truth[number] else []

    def _answer(self, number: int) -> Answer:
        body = greedy(self.prompts[number], 24, "m")
        return stream(self.urls[0], body, timeout=httpx.Timeout(60, connect=1))

    def hit_rate(self) -> float:
        """Ask each question once more: the share of its tokens that are reused."""
        answers = [post(self.urls[0], greedy(prompt, 1, "m")).checked() for prompt in self.prompts]
        return sum(answer.cached for answer in answers) / sum(map(len, self.prompts))


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll ``condition`` until it holds."""
    wait_until(condition, "the cluster is ready", READY_S, 0.01)


def kill_and_measure(urls: list[str], clients: int, kill: Callable[[], object]) -> dict[str, Any]:
    """Let the clients run, kill, wait until they are served again, and compare."""
    crowd, again = Crowd(urls, clients), Crowd(urls, clients)
    with crowd.asking():
        wait_for(lambda: crowd.right >= 2 * clients)
    before = crowd.hit_rate()
    with again.asking():
        wait_for(lambda: again.right >= clients)
        killed_s, served = time.monotonic(), again.right
        kill()
        wait_for(lambda: again.right >= served + 2 * clients and again.times[-1] > killed_s + 0.5)
    # answers already on their way are no service: the first one after the longest pause is
    times = [killed_s, *(time_s for time_s in again.times if time_s > killed_s)]
    pause_s, first_s = max((later - earlier, later) for earlier, later in itertools.pairwise(times))
    return {
        "first_answer_s": first_s - killed_s, "longest_pause_s": pause_s, "errors": again.errors,
        "right": again.right, "wrong": len(again.wrong) + len(crowd.wrong), "hit_rate_before": before,
        "hit_rate_after": again.hit_rate(),
    }  # fmt: skip


def restart_file(args: Namespace, folder: Path, processes: Processes) -> dict[str, Any]:
    """One host: restart the same command."""
    http = free_port()
    command = ["serve", *model_of(args), "--prefill", "1", "--decode", "1", "--port", str(http)]
    command += ["--served-model-name", "m", "--metadata", str(folder / "state")]
    router, url = processes.memserve(*command), f"http://127.0.0.1:{http}"
    wait_for(lambda: is_ready(url))

    def kill() -> None:
        router.kill()
        router.wait()
        processes.memserve(*command)

    return kill_and_measure([url], args.clients, kill)


def restart_etcd(args: Namespace, folder: Path, processes: Processes) -> dict[str, Any]:
    """Two routers, one of which waits."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    processes.start(args.etcd, *flags, "--log-level", "error")
    wait_for(lambda: is_ready(client))
    secret = folder / "secret"
    secret.write_text(secrets.token_urlsafe(32))
    routers, urls = [], []
    for number in range(2):
        http, port = free_port(), free_port()
        cluster = ["--prefill", "0", "--decode", "0", "--cluster-port", str(port), "--cluster-secret-file", str(secret)]
        name = ["--port", str(http), "--served-model-name", "m", "--metadata", f"etcd://{client[7:]}"]
        routers.append(processes.memserve("serve", *model_of(args), *cluster, *name))
        urls.append(f"http://127.0.0.1:{http}")
        if number == 0:
            joined = ["--join", f"127.0.0.1:{port}", "--cluster-secret-file", str(secret), "--name", "c1"]
            processes.memserve("instance", *model_of(args), *joined)
            wait_for(lambda: is_ready(urls[0]))
    time.sleep(5)  # the second one has started and waits
    return kill_and_measure(urls, args.clients, routers[0].kill)


def model_of(args: Namespace) -> list[str]:
    return ["--model", args.model] if args.model else []


def main() -> None:
    args = options(
        __doc__, model="", clients=4, only=(str, "", ("file", "etcd")), etcd=shutil.which("etcd") or ""
    )  # fmt: skip
    rows, table = [], Table(COLUMNS)
    for name, measure in {"file": restart_file, "etcd": restart_etcd}.items():
        if args.only in (None, name) and (name == "file" or args.etcd):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memserve-restart-")))
                rows.append({"name": name, **measure(args, folder, Processes(stack, folder))})
            table.show(rows[-1])
    save(args, {row["name"]: row for row in rows})
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
