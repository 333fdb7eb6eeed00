"""Several routers of the same engines at one port: what each knows, joins and leaves, deaths, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fleet_server import FleetProcess
from memserve.base.types import Role
from memserve.fleet.messages import EngineKind, EngineSpec, read_engine
from ports import listening_sockets
from process_tree import named_children
from scripted_engine import ScriptedEngine, scripted_engines
from waiting import eventually

ROUTERS = 3


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


def children_of(server: FleetProcess) -> dict[str, int]:
    """The further routers, by name."""
    return {name: pid for name, pid in named_children(server.process.pid).items() if name.startswith("router-")}


def all_listen(server: FleetProcess) -> bool:
    """Whether each router is there: connections go to any of them."""
    return listening_sockets(server.url) == ROUTERS == 1 + len(children_of(server))


def test_all_routers_answer_and_follow_joins(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    first, second = engines
    key = tmp_path / "key"
    key.write_text("operators-key\n")
    key.chmod(0o600)
    flags = ("--engine", f"vllm={first.url}", "--engine-admin-key-file", str(key), "--routers", str(ROUTERS))

    def told(*words: str) -> str:
        command = [sys.executable, "-m", "memserve", "engine", *words, "--engine-admin-key-file", str(key)]
        ended = subprocess.run(
            [*command, "--router", server.url], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def listed() -> set[str]:
        headers = {"authorization": "Bearer operators-key"}
        cards = [httpx.get(f"{server.url}/engines", headers=headers).json()["engines"] for _ in range(24)]
        return {json.dumps([card["name"] for card in of_one if card["up"]]) for of_one in cards}

    with FleetProcess(*flags) as server:
        eventually(lambda: all_listen(server))
        assert "has joined" in told("join", f"vllm={second.url}")  # whichever router is asked
        eventually(
            lambda: {frozenset(json.loads(names)) for names in listed()} == {frozenset({first.name, second.name})}
        )
        asked = len(second.asked)
        with ThreadPoolExecutor(8) as pool:
            assert all(answer.status_code == 200 for answer in pool.map(lambda _: server.post(), range(40)))
        assert len(second.asked) > asked
        assert "has left" in told("leave", first.name)
        eventually(lambda: listed() == {json.dumps([second.name])})
        os.kill(children_of(server)["router-2"], signal.SIGKILL)  # what it knew, the next one reads
        eventually(lambda: all_listen(server))
        assert listed() == {json.dumps([second.name])}
        assert server.post().status_code == 200


def test_a_killed_router_comes_back_and_others_go_on(engines: list[ScriptedEngine]) -> None:
    flags = [word for engine in engines for word in ("--engine", f"vllm={engine.url}")]
    with FleetProcess(*flags, "--routers", str(ROUTERS)) as server:
        eventually(lambda: all_listen(server))
        for name, pid in sorted(children_of(server).items()):
            os.kill(pid, signal.SIGKILL)
            eventually(lambda name=name, pid=pid: children_of(server).get(name, pid) != pid)
            failed = 0
            for _ in range(40):
                try:
                    assert server.post().status_code == 200
                except httpx.TransportError:  # it was this router's, before its port was closed
                    failed += 1
            assert failed <= 8
        eventually(lambda: all_listen(server))


def test_routers_end_with_the_first_one(engines: list[ScriptedEngine]) -> None:
    with FleetProcess("--engine", f"vllm={engines[0].url}", "--routers", "2") as server:
        eventually(lambda: len(children_of(server)) == 1)
        (pid,) = children_of(server).values()
        server.process.kill()
        server.process.wait(60)
        eventually(lambda: not Path(f"/proc/{pid}").exists())
        server.process.returncode = 0


@pytest.mark.parametrize(
    "spec",
    [
        EngineSpec(EngineKind.VLLM, "http://a:1"),
        EngineSpec(EngineKind.SGLANG, "https://a:1", "tcp://a:2", events_format="sglang"),
        EngineSpec(EngineKind.VLLM, "http://a:1", "tcp://a:2", "tcp://a:3", "sglang", Role.PREFILL),
        EngineSpec(EngineKind.SGLANG, "http://a:1", events_format="sglang"),
    ],
)
def test_an_engine_is_told_as_it_is_read(spec: EngineSpec) -> None:
    assert read_engine(spec.text) == spec
