"""The routers of one cluster as endpoints: a gateway sends requests to whichever is least busy and alive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from asking_gateway import Answer, Asking, AskingGateway
from envoy_gateway import envoy_before
from ports import free_port
from router_kills import long_model, question
from scripted_engine import MODEL, scripted_engines
from served_cluster import Server, eventually, served

BODY = question(2, 5)


class Picked:
    """A server with one instance, further routers at ports of their own, and its picker."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.secret, self.cluster_port, self.picker_port = folder / "secret", free_port(), free_port()
        self.secret.write_text("x" * 40)
        self.secret.chmod(0o600)
        self.model = long_model(folder / "tiny")
        self.flags = (
            "--colocated", "1", "--cluster-port", str(self.cluster_port), "--cluster-secret-file", str(self.secret),
            "--endpoint-picker", f"127.0.0.1:{self.picker_port}", *flags,
        )  # fmt: skip

    @property
    def picker(self) -> str:
        return f"127.0.0.1:{self.picker_port}"

    @contextmanager
    def serving(self, *words: str) -> Iterator[None]:
        """A server, whose answers are not looked at; it ends in order."""
        common = ["--dtype", "float32", "--kv-memory", "4MiB", "--threads", "1", "--port", "0", "--metadata", "none"]
        command = [sys.executable, "-m", "memserve", "serve", *words, *common]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and process.stdout.readline().startswith("ready in")
                yield
            finally:
                process.terminate()
                assert process.wait(60) == 0

    @contextmanager
    def router(self, port: int, *flags: str) -> Iterator[subprocess.Popen[str]]:
        """One more router at ``port``, until the block ends."""
        words = ["router", "--join", f"127.0.0.1:{self.cluster_port}", "--cluster-secret-file", str(self.secret)]
        words += ["--model", str(self.model), "--port", str(port), "--advertise", "127.0.0.1", *flags]
        command = [sys.executable, "-m", "memserve", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline().startswith("ready in")
            try:
                yield process
            finally:
                process.terminate()
                process.communicate(timeout=60)


@pytest.fixture
def picked(tmp_path: Path) -> Picked:
    return Picked(tmp_path)


def asked(gateway: AskingGateway, **headers: str) -> tuple[Asking, Answer]:
    """A request that goes on until it is ended."""
    asking = gateway.begin()
    asking.send_head(**headers)
    asking.send_body(json.dumps(BODY).encode())
    return asking, asking.answer()


def endpoints_of(gateway: AskingGateway, **headers: str) -> list[str]:
    """In the order of their names."""
    return sorted(gateway.ask(BODY, **headers).endpoints)


def test_requests_go_to_the_router_with_the_least_load(picked: Picked, tmp_path: Path) -> None:
    port = free_port()
    other = f"127.0.0.1:{port}"
    with served(picked.model, *picked.flags) as server, AskingGateway(picked.picker) as gateway:
        own = server.url.removeprefix("http://").removesuffix("/v1")
        eventually(lambda: endpoints_of(gateway) == [own])
        with picked.router(port) as process:
            eventually(lambda: endpoints_of(gateway) == sorted([own, other]))
            askings, names = [], []
            for _ in range(4):
                asking, answer = asked(gateway)
                askings.append(asking)
                names.append(answer.endpoints[0])
            assert names[0] != names[1] and sorted(names) == sorted([own, other] * 2)
            for asking in askings:
                asking.end()
            with envoy_before([own, other], picked.picker, tmp_path) as url:
                check_answers(server, url)
            process.terminate()
            eventually(lambda: endpoints_of(gateway) == [own])  # it has left the cluster


def check_answers(server: Server, url: str) -> None:
    """Through a gateway at ``url`` they are the server's own."""
    body, answers = {**BODY, "stream": False}, []
    for base in (server.url, *[f"{url}/v1"] * 4):
        answer = httpx.post(f"{base}/completions", json=body, timeout=60).raise_for_status().json()
        answers.append(answer["choices"][0]["text"])
    assert answers[0] and len(set(answers)) == 1


def test_keys_stay_the_routers_and_tls_is_spoken(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority = trustme.CA()
    pair = authority.issue_cert("localhost", "127.0.0.1")
    pair.private_key_pem.write_to_path(key)
    key.chmod(0o600)
    pair.cert_chain_pems[0].write_to_path(cert)
    keys = tmp_path / "keys"
    keys.write_text("ada=secret-of-ada\n")
    keys.chmod(0o600)
    picked = Picked(tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), "--api-key-file", str(keys))
    with (
        picked.serving("--model", str(picked.model), *picked.flags),
        AskingGateway(picked.picker, authority.cert_pem.bytes()) as gateway,
    ):
        eventually(lambda: endpoints_of(gateway))  # it has asked itself with one of its keys
        answer = gateway.ask(BODY, authorization="Bearer wrong")
        assert answer.endpoints and "authorization" not in {*answer.headers, *answer.removed}
        assert gateway.ask({**BODY, "model": "nope"}).status == 404


def test_the_picker_of_several_models_knows_them_all(tmp_path: Path) -> None:
    picked = Picked(tmp_path)
    words = ["--model", f"one={picked.model},colocated=1", "--model", f"two={picked.model},colocated=1"]
    with picked.serving(*words, *picked.flags[2:]), AskingGateway(picked.picker) as gateway:
        eventually(lambda: gateway.ask({**BODY, "model": "one"}).endpoints)
        assert gateway.ask({**BODY, "model": "two"}).endpoints
        assert gateway.ask({**BODY, "model": "three"}).status == 404


def test_routers_are_picked_for_engines_beside_own_models(picked: Picked, tmp_path: Path) -> None:
    with (
        scripted_engines(1) as (engine,),
        served(picked.model, *picked.flags, "--engine", f"vllm={engine.url}") as server,
        AskingGateway(picked.picker) as gateway,
    ):
        own = server.url.removeprefix("http://").removesuffix("/v1")
        eventually(lambda: gateway.ask({**BODY, "model": MODEL}).endpoints == [own])
        with envoy_before([own], picked.picker, tmp_path) as url:
            for model, asked_count in ((MODEL, 1), (BODY["model"], 1)):  # the own model is not the engine's
                body = {**BODY, "stream": False, "model": model}
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
                assert len(engine.asked) == asked_count
