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

import argparse
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np

READY_S = 120.0


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """All started processes; ended at the end, whatever happens."""

    def __init__(self, folder: Path) -> None:
        """``folder``: for the files that they leave behind."""
        self._all: list[subprocess.Popen[Any]] = []
        self._environment = {**os.environ, "XDG_STATE_HOME": str(folder)}

    def start(self, *command: str) -> subprocess.Popen[Any]:
        """Run ``command``."""
        self._all.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self._environment))
        return self._all[-1]

    def memserve(self, *arguments: str) -> subprocess.Popen[Any]:
        """Run a memserve command."""
        return self.start(sys.executable, "-m", "memserve", *arguments)

    def close(self) -> None:
        """End all processes, gently at first."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            for process in self._all:
                if process.poll() is None:
                    process.send_signal(sig)
            for process in self._all:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    continue


class Crowd:
    """Clients that retry for ever."""

    def __init__(self, urls: list[str], clients: int) -> None:
        self.urls = urls
        rng = np.random.default_rng(1)
        self.prompts = [rng.integers(100, 20_000, 300 + 40 * number).tolist() for number in range(clients)]
        self.truth: dict[int, str] = {}
        self.right = self.errors = 0
        self.wrong: list[str] = []
        self.times: list[float] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def start(self) -> None:
        """Begin to ask; the first answers are the reference."""
        for number in range(len(self.prompts)):
            self.truth[number] = self._answer(number)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more questions."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            try:
                text = self._answer(number)
            except (httpx.HTTPError, ConnectionError):
                self.errors += 1
                self.urls.append(self.urls.pop(0))  # perhaps another router is active
                time.sleep(0.02)
                continue
            self.times.append(time.monotonic())
            self.right += text == self.truth[number]
            if text != self.truth[number]:
                self.wrong.append(text)

    def _answer(self, number: int) -> str:
        body = {"model": "m", "prompt": self.prompts[number], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        text, ended = "", False
        timeout = httpx.Timeout(60, connect=1)
        with httpx.stream("POST", f"{self.urls[0]}/v1/completions", json=body | {"stream": True}, timeout=timeout) as s:
            if s.status_code != 200:
                raise ConnectionError(s.status_code)
            for line in s.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", []))
        if not ended:
            raise ConnectionError("the stream broke off")
        return text

    def hit_rate(self) -> float:
        """Ask each question once more: the share of its tokens that are reused."""
        cached = 0
        for prompt in self.prompts:
            body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            usage = httpx.post(f"{self.urls[0]}/v1/completions", json=body, timeout=60).json()["usage"]
            cached += usage["prompt_tokens_details"]["cached_tokens"]
        return cached / sum(map(len, self.prompts))


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll ``condition`` until it holds."""
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the cluster did not become ready")
        time.sleep(0.01)


def is_ready(url: str) -> bool:
    """Whether the server at ``url`` accepts requests."""
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def kill_and_measure(crowd: Crowd, kill: Callable[[], None]) -> dict[str, Any]:
    """Let the clients run, kill, wait until they are served again, and compare."""
    crowd.start()
    wait_for(lambda: crowd.right >= 2 * len(crowd.prompts))
    crowd.stop()
    before = crowd.hit_rate()
    again = Crowd(crowd.urls, len(crowd.prompts))
    again.start()
    wait_for(lambda: again.right >= len(again.prompts))
    killed, served = time.monotonic(), again.right
    kill()
    wait_for(lambda: again.right >= served + 2 * len(again.prompts) and again.times[-1] > killed + 0.5)
    again.stop()
    # answers already on their way are no service: the first one after the longest pause is
    times = [killed, *(at for at in again.times if at > killed)]
    pause_s, first = max((later - earlier, later) for earlier, later in itertools.pairwise(times))
    after = again.hit_rate()
    return {
        "first_answer_s": first - killed, "longest_pause_s": pause_s, "errors": again.errors,
        "right": again.right, "wrong": len(again.wrong) + len(crowd.wrong), "hit_rate_before": before,
        "hit_rate_after": after,
    }  # fmt: skip


def with_file(model: list[str], clients: int, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """One host: restart the same command."""
    processes = Processes(folder)
    stack.callback(processes.close)
    http = free_port()
    shape = ["--prefill", "1", "--decode", "1"]
    kept = ["--metadata", str(folder / "state")]
    command = ["serve", *model, *shape, "--port", str(http), "--served-model-name", "m", *kept]
    router = processes.memserve(*command)
    url = f"http://127.0.0.1:{http}"
    wait_for(lambda: is_ready(url))

    def kill() -> None:
        router.kill()
        router.wait()
        processes.memserve(*command)

    return kill_and_measure(Crowd([url], clients), kill)


def with_etcd(model: list[str], clients: int, folder: Path, stack: ExitStack, etcd: str) -> dict[str, Any]:
    """Two routers, one of which waits."""
    processes = Processes(folder)
    stack.callback(processes.close)
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    flags = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    processes.start(etcd, *flags, "--log-level", "error")
    secret = folder / "secret"
    secret.write_text(secrets.token_urlsafe(32))
    store = f"etcd://{client.removeprefix('http://')}"
    routers, urls, joins = [], [], []
    for _ in range(2):
        http, port = free_port(), free_port()
        cluster = ["--prefill", "0", "--decode", "0", "--cluster-port", str(port), "--cluster-secret-file", str(secret)]
        name = ["--port", str(http), "--served-model-name", "m", "--metadata", store]
        wait_for(lambda: _answers(client))
        routers.append(processes.memserve("serve", *model, *cluster, *name))
        urls.append(f"http://127.0.0.1:{http}")
        joins.append(f"127.0.0.1:{port}")
        if len(routers) == 1:
            joined = ["--join", joins[0], "--cluster-secret-file", str(secret), "--name", "c1"]
            processes.memserve("instance", *model, *joined)
            wait_for(lambda: is_ready(urls[0]))
    time.sleep(5)  # the second one has started and waits
    return kill_and_measure(Crowd(urls, clients), routers[0].kill)


def _answers(client: str) -> bool:
    try:
        return httpx.get(f"{client}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder; default: the bundled one")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--only", choices=["file", "etcd"])
    parser.add_argument("--etcd", default=shutil.which("etcd"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    results: dict[str, Any] = {}
    for name in ("file", "etcd"):
        if options.only in (None, name) and (name == "file" or options.etcd):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memserve-restart-")))
                etcd = [options.etcd] if name == "etcd" else []
                measure = with_etcd if name == "etcd" else with_file
                results[name] = measure(model, options.clients, folder, stack, *etcd)
            print(name, json.dumps(results[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    sys.exit(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    main()
