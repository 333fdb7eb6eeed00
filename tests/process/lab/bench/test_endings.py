"""Runs that end early, with real processes: a clear message, no process left behind, and what was measured is kept."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from instant_server import Asked, Script, instant_server
from memserve.base.units import NS_PER_S
from memserve_lab.bench.load.client import Target
from memserve_lab.bench.load.driver import Driver, drive
from memserve_lab.bench.load.prompts import Manner, Outcome, read_records
from memserve_lab.bench.servers import ServedChild
from memserve_lab.workloads.arrivals import Constant, by_session
from memserve_lab.workloads.sessions import uniform_workload
from process_tree import children_of, command_of
from served_cluster import is_alive
from tiny_models import VOCAB, save_folder, tiny_module

pytestmark = pytest.mark.usefixtures("executed_processes")

WAIT_S = 60.0


def started(*arguments: str) -> subprocess.Popen[str]:
    """``memserve bench ARGUMENTS`` as a process of its own."""
    command = [sys.executable, "-m", "memserve", "bench", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def servers(pid: int) -> list[int]:
    """Those of them that are ``memserve serve``; a bench starts others too, for a moment."""
    return [child for child in children_of(pid) if "serve" in command_of(child)[:5]]


def signals_after(count: int, signal_number: int, bench: list[subprocess.Popen[str]]) -> Callable[[Asked], Script]:
    """A server's script: the bench gets a signal with its ``count``-th request, and that one has no end."""
    came: list[Asked] = []

    def script(asked: Asked) -> Script:
        came.append(asked)
        if len(came) == count:
            os.kill(bench[0].pid, signal_number)
        return Script() if len(came) < count else Script(pauses_s=[30.0, 0, 0])

    return script


def test_ctrl_c_in_serve_keeps_what_was_measured(tmp_path: Path) -> None:
    bench: list[subprocess.Popen[str]] = []
    with instant_server() as server:
        size = ["--rate", "40", "--sessions", "40", "--turns-max", "2", "--workload", "react", "--seeds", "2"]
        out = tmp_path / "run"
        server.script = signals_after(60, signal.SIGINT, bench)
        bench.append(
            started("serve", "--settings", "", "--base-url", f"one={server.url}", *size, "--out", str(out))
        )  # fmt: skip
        printed, said = bench[0].communicate(timeout=WAIT_S)
    assert bench[0].returncode == 1, said
    assert "partial: interrupted" in printed and "Traceback" not in said
    assert "**Partial:** interrupted" in (out / "report.md").read_text()
    results = json.loads((out / "results.json").read_text())
    assert results["partial"] == "interrupted" and len(results["passes"]) == 1
    records = read_records(out / "records.jsonl.gz")
    assert sum(record.ok for record in records) >= 50
    assert {record.outcome for record in records} == {Outcome.OK, Outcome.STOPPED}


def test_sigterm_in_capacity_keeps_what_was_found(tmp_path: Path) -> None:
    bench: list[subprocess.Popen[str]] = []
    with instant_server() as server:
        server.script = signals_after(60, signal.SIGTERM, bench)
        servers = ["--settings", "", "--base-url", f"one={server.url}", "--base-url", f"two={server.url}"]
        size = ["--start", "16", "--probe-s", "1"]
        bench.append(started("capacity", *servers, *size, "--out", str(tmp_path / "run")))
        printed, said = bench[0].communicate(timeout=WAIT_S)
    assert bench[0].returncode == 1 and "Traceback" not in said
    assert re.search(r"one: \d+\.\d+ requests/s \(partial: ", printed), printed
    assert "two" not in printed, "nothing was asked of it"
    (found,) = json.loads((tmp_path / "run" / "results.json").read_text())["found"]
    assert found["partial"] == "interrupted" and found["probes"][0]["borne"]
    assert "**Partial:** one: interrupted" in (tmp_path / "run" / "report.md").read_text()
    assert read_records(tmp_path / "run" / "records.jsonl.gz")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize("command", ["serve", "capacity"])
def test_a_server_that_still_starts_is_ended_too(model: Path, tmp_path: Path, command: str) -> None:
    bench = started(command, "--settings", "PD", "--model", str(model), "--out", str(tmp_path / "run"))
    until(lambda: bool(servers(bench.pid)))
    (server,) = servers(bench.pid)
    os.kill(bench.pid, signal.SIGINT)
    printed, said = bench.communicate(timeout=WAIT_S)
    assert bench.returncode == 1 and "Traceback" not in said
    assert "partial: interrupted" in printed
    assert "**Partial:**" in (tmp_path / "run" / "report.md").read_text()
    assert not is_alive(server)


# -- a real server


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[ServedChild]:
    """A cluster of one tiny instance."""
    flags = f"--model {model} --prefill 0 --decode 0 --colocated 1 --dtype float32 --kv-memory 8MiB --threads 1"
    child = ServedChild(flags.split())
    try:
        yield child
    finally:
        child.end_server()


def metric(served: ServedChild, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=WAIT_S).text
    return float(re.findall(rf"^memserve_{name} (\S+)$", text, re.MULTILINE)[0])


def test_records_agree_with_the_servers_own_metrics(served: ServedChild) -> None:
    """Counts exactly; times from the sending on, less what the way through HTTP takes."""
    uniform = uniform_workload(30, prompt_tokens=64, shared_tokens=32, output_tokens=6)
    workload = by_session(uniform, Constant(40), seed=1)
    run = drive(lambda: Driver(workload, Target(served.url), Manner(served.model, VOCAB)))
    assert run.partial is None and all(record.ok for record in run.records)
    assert sum(record.prompt_tokens or 0 for record in run.records) == metric(served, "prompt_tokens_total") == 30 * 64
    assert sum(record.output_tokens for record in run.records) == metric(served, "generated_tokens_total") == 30 * 6
    cached = sum(record.cached_tokens or 0 for record in run.records)
    assert cached == metric(served, "cached_prompt_tokens_total") > 0
    for name, ends_ns in (
        ("time_to_first_token_seconds", [record.first_ns for record in run.records]),
        ("request_seconds", [record.end_ns for record in run.records]),
    ):
        assert metric(served, f"{name}_count") == 30
        spent_ns = [(end or 0) - (r.sent_ns or 0) for end, r in zip(ends_ns, run.records, strict=True)]
        ours_s, theirs_s = sum(spent_ns) / NS_PER_S, metric(served, f"{name}_sum")
        assert theirs_s <= ours_s, "the server cannot have taken longer than the client waited"


def test_a_server_that_is_killed_leaves_a_partial_report(served: ServedChild, tmp_path: Path) -> None:
    """``kill -9`` in the middle of a run."""
    size = ["--workload", "trace", "--rate", "5", "--sessions", "400", "--prompt-tokens-max", "100"]
    out, name = tmp_path / "run", f"own={served.url}"
    command = [
        "serve",
        "--settings",
        "",
        "--base-url",
        name,
        *size,
        "--seeds",
        "1",
        "--vocab-size",
        str(VOCAB),
        "--output-tokens-max",
        "3",
    ]
    bench = started(*command, "--out", str(out))
    before = metric(served, "request_seconds_count")
    until(lambda: metric(served, "request_seconds_count") > before + 12)
    served.kill_server()
    printed, said = bench.communicate(timeout=WAIT_S)
    assert bench.returncode == 1 and "Traceback" not in said
    assert f"partial: the server at {served.url} is gone" in printed
    assert "is gone" in json.loads((out / "results.json").read_text())["partial"]
    records = read_records(out / "records.jsonl.gz")
    assert sum(record.ok for record in records) >= 5 and Outcome.BROKEN in {record.outcome for record in records}
    assert "| own |" in (out / "report.md").read_text()


def test_asking_a_server_that_is_gone_is_one_line(served: ServedChild, tmp_path: Path) -> None:
    bench = started("serve", "--settings", "", "--base-url", f"own={served.url}", "--out", str(tmp_path / "run"))
    _, said = bench.communicate(timeout=WAIT_S)
    assert bench.returncode == 1 and "cannot be reached" in said and "Traceback" not in said
