"""Counts that follow the load: a real ``memserve serve`` starts instances under load, and drains them after it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from asking_clients import Load, question, truth_of
from served_cluster import WAIT_S, Server, eventually
from tiny_models import save_folder, tiny_module

pytestmark = pytest.mark.timeout(600)
COUNT, CLIENTS = 24, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[str]:
    return truth_of(folder, COUNT)


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Server]:
    """One sequence at a time on each instance, so that the others of several clients wait."""
    flags = ["--scale", "colocated=1..2", "--scale-up-after", "1", "--scale-down-after", "10", "--max-running", "1"]
    with (tmp_path / "log").open("w") as stderr:
        served = Server(folder, *flags, "--metadata", str(tmp_path / "state"), stderr=stderr)
    yield served
    served.process.kill()
    served.process.wait(WAIT_S)


def asker(server: Server) -> Callable[[int], str]:
    return lambda at: server.complete(question(at), COUNT)


def overload(server: Server, truth: list[str], log: Path) -> Load:
    """Clients that ask until another instance is asked for; it starts without them, and so more quickly."""
    with Load(asker(server), truth, CLIENTS) as load:
        eventually(lambda: "colocated: 1 -> 2, because " in log.read_text())
    return load


def metrics(server: Server) -> str:
    return httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=WAIT_S).text


def test_instances_come_with_the_load_and_go_after_it(server: Server, truth: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert server.members() == {"c1"} == set(server.children())
    load = overload(server, truth, log)
    with Load(asker(server), truth, 1, 0.5) as light:  # asks on while an instance comes, and while it drains
        eventually(lambda: server.members() == {"c1", "c2"})
        eventually(lambda: server.members() == {"c1"} == set(server.children()))
    assert load.wrong == [] == light.wrong and load.answers and light.answers
    assert "colocated: 2 -> 1, because 1 could have done what came in the last 10 s" in log.read_text()
    eventually(lambda: 'memserve_instance_process_up{instance="c2"}' not in metrics(server))  # none is expected now
    page = metrics(server)
    assert 'memserve_scaling_wanted{role="colocated"} 1.0' in page
    assert 'memserve_scaling_decisions_total{for="more",role="colocated"} 1.0' in page
    assert "memserve_router_members_left_total 1.0" in page, "it said goodbye"
    assert "memserve_router_members_died_total 0.0" in page
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(WAIT_S) == 0


def test_next_router_takes_over_autoscaled_instances(
    server: Server, folder: Path, truth: list[str], tmp_path: Path
) -> None:
    """Killed while two instances run: its successor begins with both."""
    overload(server, truth, tmp_path / "log")
    eventually(lambda: server.members() == {"c1", "c2"})
    pids = server.children()
    server.process.kill()
    server.process.wait(WAIT_S)
    flags = ["--scale", "colocated=1..2", "--scale-down-after", "600", "--max-running", "1"]
    after = Server(folder, *flags, "--metadata", str(tmp_path / "state"))
    try:
        eventually(lambda: after.members() == {"c1", "c2"})
        assert all(Path(f"/proc/{pid}").exists() for pid in pids.values()), "neither was started anew"
        assert after.complete(question(1), COUNT) == truth[1]
    finally:
        after.process.send_signal(signal.SIGTERM)
        assert after.process.wait(WAIT_S) == 0


def test_decisions_are_told_in_a_file(folder: Path, truth: list[str], tmp_path: Path) -> None:
    """``--scale-file``: another supervisor starts the instances; this one runs what it was told to."""
    told = tmp_path / "scale.json"
    flags = ["--scale", "colocated=1..3", "--scale-up-after", "1", "--scale-file", str(told), "--max-running", "1"]
    server = Server(folder, *flags, "--colocated", "1", "--metadata", "none")
    try:
        assert json.loads(told.read_text()) == {}, "nothing is decided yet"
        with Load(asker(server), truth, CLIENTS) as load:
            eventually(lambda: json.loads(told.read_text()))
        ((role, decided),) = json.loads(told.read_text()).items()
        assert role == "colocated" and decided["instances"] in (2, 3) and decided["decision"]
        assert server.members() == {"c1"} and load.wrong == []
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
