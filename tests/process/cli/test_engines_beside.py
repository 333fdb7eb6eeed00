"""Real instances and scripted engines behind one server: named models, one without a name, several routers, kills."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from memserve.cli.cluster.beside import ENGINES
from ports import free_port, listening_sockets
from router_kills import Killed
from scripted_engine import DONE, EVENTS, STREAM_HEAD, Asked, ScriptedEngine, chunk, scripted_engines, well
from served_cluster import Server
from tiny_models import greedy_answers, prompt, save_folder, tiny_module
from waiting import eventually

COUNT = 6


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    with scripted_engines(2) as started:
        yield started


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("operators-key-0123456789\n")
    return file


class Own:
    """A tiny model of its own, and whether a server answers with it."""

    def __init__(self, folder: Path) -> None:
        self.module = tiny_module("llama", 1)
        self.path = save_folder(self.module, folder / "own")

    def check(self, url: str, model: str | None, seed: int) -> None:
        tokens = prompt(40, seed).tolist()
        body = {"prompt": tokens, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {} if model is None else {"model": model}
        answer = httpx.post(f"{url}/completions", json=body, timeout=120).raise_for_status().json()
        ids = answer["choices"][0]["token_ids"]
        assert ids == greedy_answers(self.module, [tokens], COUNT, [ids])[0]


def ask_engine(url: str, model: str = "scripted") -> httpx.Response:
    return httpx.post(f"{url}/completions", json={"model": model, "prompt": "x"}, timeout=60)


def names_at(url: str) -> list[str]:
    return [card["id"] for card in httpx.get(f"{url}/models", timeout=60).json()["data"]]


def run_engine(url: str, key: Path, *words: str) -> str:
    """What ``memserve engine`` prints."""
    command = [sys.executable, "-m", "memserve", "engine", *words, "--engine-admin-key-file", str(key)]
    ended = subprocess.run([*command, "--router", url], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def end(server: Server) -> None:
    server.process.terminate()
    assert server.process.wait(60) == 0


def test_named_models_and_engines(engines: list[ScriptedEngine], key: Path, tmp_path: Path) -> None:
    own, (first, second) = Own(tmp_path), engines
    second.models = ["OWN", "second"]
    flags = ("--engine", f"vllm={first.url}", "--engine-admin-key-file", str(key), "--metadata", "none")
    server = Server(f"own={own.path},colocated=1", *flags)
    try:
        lines = [server.lines[2], *(server.process.stdout.readline() for _ in range(2))]
        assert "engines: 1 of 1 take requests: scripted\n" in lines
        assert "has joined" in run_engine(server.url, key, "join", f"vllm={second.url}")
        assert names_at(server.url) == ["own", "scripted", "second"]
        for model in ("own", "OWN", None):
            own.check(server.url, model, 1)
        assert ask_engine(server.url).status_code == ask_engine(server.url, "second").status_code == 200
        assert [asked.fields["model"] for asked in second.asked] == ["second"]
        unknown = ask_engine(server.url, "none")
        assert unknown.status_code == 404 and "`own, scripted, second`" in unknown.json()["error"]["message"]
        assert first.name in run_engine(server.url, key, "list") and second.name in run_engine(server.url, key, "list")
        assert "has left" in run_engine(server.url, key, "leave", second.name)
        assert names_at(server.url) == ["own", "scripted"]
    finally:
        end(server)


def test_one_model_without_a_name(engines: list[ScriptedEngine], key: Path, tmp_path: Path) -> None:
    own = Own(tmp_path)
    flags = ("--engine", f"vllm={engines[0].url}", "--colocated", "1", "--metadata", str(tmp_path / "state"))
    server = Server(own.path, *flags)
    try:
        names = names_at(server.url)
        assert len(names) == 2 and names[1] == "scripted"
        own.check(server.url, None, 1)
        own.check(server.url, names[0], 2)
        assert ask_engine(server.url).status_code == 200
        page = httpx.get(server.url.removesuffix("/v1") + "/metrics", timeout=60).text
        assert re.search(r'^memserve_instance_up\{instance="c1",model="[^"]+",role="colocated"\} 1.0$', page, re.M)
        assert f'memserve_fleet_requests_total{{engine="{engines[0].name}"}} 1.0' in page
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
            for number, body in enumerate([{"prompt": [5, 6], "max_tokens": 2}, {"model": "scripted", "prompt": "x"}])
        ]
        file = server.client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = server.client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        eventually(lambda: server.client.batches.retrieve(batch.id).status == "completed")
        assert server.client.batches.retrieve(batch.id).request_counts.completed == 2
    finally:
        end(server)


def test_an_engine_in_this_process_and_one_beside(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    own = Own(tmp_path)
    server = Server(own.path, "--engine", f"vllm={engines[0].url}", "--in-process")
    try:
        own.check(server.url, None, 3)
        assert ask_engine(server.url).status_code == 200
    finally:
        end(server)


def test_admission_of_own_models_is_not_the_engines(engines: list[ScriptedEngine], tmp_path: Path) -> None:
    """Four streams of an engine neither fill the one place of own requests, nor wait for it."""
    own, held = Own(tmp_path), Held()
    engines[0].script = held.script
    flags = ("--admission", "bounded", "--max-active", "1", "--admission-queue", "1", "--colocated", "1")
    server = Server(own.path, "--engine", f"vllm={engines[0].url}", *flags, "--metadata", "none")
    readers = [Reader(server.url) for _ in range(4)]
    try:
        for reader in readers:
            reader.start()
        assert all(reader.began.wait(60) for reader in readers)
        own.check(server.url, None, 1)
        held.is_open.set()
        for reader in readers:
            reader.join(60)
        assert all(reader.is_whole for reader in readers)
    finally:
        held.is_open.set()
        end(server)


def test_a_router_of_its_own_has_engines(engines: list[ScriptedEngine], key: Path, tmp_path: Path) -> None:
    """`memserve router` beside an owner without any: they are its own."""
    own, port, cluster_port = Own(tmp_path), free_port(), free_port()
    shared = ("--cluster-secret-file", str(key))
    server = Server(own.path, "--colocated", "1", "--cluster-port", str(cluster_port), "--metadata", "none", *shared)
    words = ("--join", f"127.0.0.1:{cluster_port}", "--port", str(port), "--model", str(own.path))
    command = [sys.executable, "-m", "memserve", "router", *words, *shared, "--engine", f"vllm={engines[0].url}"]
    router = subprocess.Popen([*command, "--engine-admin-key-file", str(key)])
    url = f"http://127.0.0.1:{port}/v1"
    try:
        eventually(lambda: listening_sockets(url) == 1)
        own.check(url, None, 1)
        assert ask_engine(url).status_code == 200 and ask_engine(server.url).status_code == 404
        assert "has joined" in run_engine(url, key, "join", f"vllm={engines[1].url}")
    finally:
        router.terminate()
        assert router.wait(60) == 0
        end(server)


class Held:
    """Streams whose second half comes when they are let go."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    async def script(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(EVENTS[0]))
        await writer.drain()
        while not self.is_open.is_set():
            await asyncio.sleep(0.01)
        writer.write(chunk(EVENTS[1]) + chunk(DONE) + b"0\r\n\r\n")


class Reader(threading.Thread):
    """A client's stream, read to its end."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self.content, self.began, self.is_whole = url, b"", threading.Event(), False

    def run(self) -> None:
        body = {"model": "scripted", "prompt": "x", "stream": True}
        try:
            with httpx.stream("POST", f"{self._url}/completions", json=body, timeout=60) as stream:
                for piece in stream.iter_bytes():
                    self.content += piece
                    self.began.set()
            self.is_whole = self.content == b"".join((*EVENTS, DONE))
        except httpx.TransportError:
            pass


@pytest.mark.parametrize("named", [True, False])
def test_a_killed_router_loses_its_own_streams(
    engines: list[ScriptedEngine], key: Path, tmp_path: Path, *, named: bool
) -> None:
    own, held, (first, second) = Own(tmp_path), Held(), engines
    flags = ("--engine", f"vllm={first.url}", "--engine-admin-key-file", str(key), "--routers", "2")
    model = f"own={own.path},colocated=1" if named else own.path
    killed = Killed(model, tmp_path / "state", *flags, *(() if named else ("--colocated", "1")))
    try:
        url = killed.url
        eventually(lambda: listening_sockets(url) == 2)
        for seed in range(6):  # connections, which the kernel spreads over both
            own.check(url, names_at(url)[0], seed)
            assert ask_engine(url).status_code == 200
        first.script = held.script
        readers = [Reader(url) for _ in range(16)]
        for reader in readers:
            reader.start()
        assert all(reader.began.wait(60) for reader in readers)
        children = json.loads((tmp_path / "state" / ("models/own" if named else "") / "children.json").read_text())
        os.kill(children["router-2"]["pid"], signal.SIGKILL)
        eventually(lambda: sum(not reader.is_alive() for reader in readers) > 0)
        held.is_open.set()
        first.script = well
        for reader in readers:
            reader.join(60)
        assert 0 < sum(reader.is_whole for reader in readers) < 16, "those of the other router go on"
        eventually(lambda: listening_sockets(url) == 2)
        assert "has joined" in run_engine(url, key, "join", f"vllm={second.url}")
        second.models = ["second"]
        eventually(lambda: all("second" in names_at(url) for _ in range(8)))
        assert (tmp_path / "state" / ENGINES).read_text() == f"vllm={first.url}\nvllm={second.url}\n"
        os.kill(killed.server.process.pid, signal.SIGKILL)
        killed.server.process.wait()
        assert ask_engine(url).status_code == 200, "the router that is left answers"
        own.check(url, None, 9)
        killed.restart()
        url = killed.url
        eventually(lambda: listening_sockets(url) == 2)
        eventually(lambda: all(names_at(url)[1:] == ["scripted"] for _ in range(8)))
    finally:
        held.is_open.set()
        killed.end()
