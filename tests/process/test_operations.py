"""What operators see of real processes: signals that end them, lines about strangers, deaths and returns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ports import free_port
from served_cluster import GREEDY, WAIT_S, Server, eventually, is_alive
from tiny_models import prompt, save_folder, tiny_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


def secret_file(path: Path, secret: str) -> str:
    path.write_text(secret)
    path.chmod(0o600)
    return str(path)


def an_instance(folder: Path, port: int, secret: str, log: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "memserve", "instance", "--join", f"127.0.0.1:{port}", "--model", str(folder)]
    flags = ["--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1", "--name", "far"]
    with log.open("w") as stderr:
        return subprocess.Popen(
            [*command, *flags, "--cluster-secret-file", secret], stdout=subprocess.PIPE, stderr=stderr, text=True
        )


def test_cluster_logs_member_events_and_ends_on_sighup(folder: Path, tmp_path: Path) -> None:
    """A stranger, a death, a return; then the terminal closes: all processes get SIGHUP, and a stream is finished."""
    log, port = tmp_path / "log", free_port()
    secret = secret_file(tmp_path / "secret", "the right secret of this cluster")
    with log.open("w") as stderr:
        flags = ["--colocated", "2", "--cluster-port", str(port), "--cluster-secret-file", secret]
        server = Server(folder, *flags, "--metadata", str(tmp_path / "state"), stderr=stderr)
    started = [server.process]
    try:
        pid = server.children()["c1"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "is back" in log.read_text())
        said = log.read_text()
        assert re.search(r"instance c1 at tcp://127.0.0.1:\d+ is dead: its process was ended by signal 9", said)
        assert re.search(r"instance c1 was ended by signal 9; the next attempt to start it is in \d", said)
        assert re.search(r"instance c1 at tcp://127.0.0.1:\d+ is back: after [\d.]+ s", said)
        page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text
        assert re.search(r"^memserve_router_members_died_total [1-9]", page, re.M)
        assert 'memserve_instance_restarts_total{instance="c1"} 1.0' in page
        assert 'memserve_instance_process_deaths_total{instance="c1"} 1.0' in page
        assert "memserve_router_metadata_durable 1.0" in page
        other = secret_file(tmp_path / "other", "some other cluster's secret")
        started.append(stranger := an_instance(folder, port, other, tmp_path / "s"))
        eventually(lambda: "refuses the secret" in (tmp_path / "s").read_text())
        eventually(lambda: re.search(r"rejected 127.0.0.1:\d+ at the cluster port: it has another", log.read_text()))
        stranger.send_signal(signal.SIGHUP)
        assert stranger.wait(WAIT_S) == 0 and stranger.stdout.read() == ""
        pids = list(server.children().values())
        tokens = [int(token) for token in prompt(40, 7)]
        chunks = server.client.completions.create(prompt=tokens, max_tokens=200, stream=True, **GREEDY)
        next(iter(chunks))
        for each in (*pids, server.process.pid, *pids, server.process.pid):
            os.kill(each, signal.SIGHUP)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(WAIT_S) == 0
        assert not any(is_alive(pid) for pid in pids)
        assert "SIGHUP: stopping; 1 requests in progress" in log.read_text()
    finally:
        for pid in server.children().values():
            os.kill(pid, signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("executed_processes")
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_waiting_instance_logs_cause_and_never_reports_ready(folder: Path, tmp_path: Path, sign) -> None:
    log, port = tmp_path / "log", free_port()
    waiting = an_instance(folder, port, secret_file(tmp_path / "secret", "a secret that is not asked for"), log)
    try:
        eventually(lambda: f"waiting for a router at 127.0.0.1:{port}: nothing answers there" in log.read_text())
        waiting.send_signal(sign)
        assert waiting.wait(WAIT_S) == 0
    finally:
        waiting.kill()
        waiting.wait()
    assert "ready" not in waiting.stdout.read()
    said = log.read_text()
    assert f"ended by {sign.name} before it was a member" in said and "nanobind" not in said and "Traceback" not in said
