"""memserve as an application of Ray Serve: deployed by a configuration as in the guide, asked by OpenAI's client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from asking_clients import QUESTIONS, question, truth_of
from memserve.base.errors import UserError
from memserve.integrations.ray_serve import app, read_options, words_of
from on_ray import COUNT, WAIT_S
from on_ray_serve import Served, replicas
from served_cluster import eventually
from tiny_models import save_folder, tiny_module

pytest.importorskip("ray.serve", reason="Ray Serve (extra: ray) is not installed")
pytestmark = pytest.mark.timeout(900)  # three raylets and two instances share the machine with other tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(model, tmp_path_factory.mktemp("serve"))
    yield served
    served.close()


def test_the_official_client_streams_the_answers_of_one_engine(served: Served, model: Path) -> None:
    truth = truth_of(model, COUNT)
    assert [card.id for card in served.client.models.list()] == ["tiny"]
    for seed in range(QUESTIONS):
        asked = {"model": "tiny", "prompt": question(seed), "max_tokens": COUNT, "temperature": 0}
        pieces = [
            event.choices[0].text
            for event in served.client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
            if event.choices
        ]
        assert "".join(pieces) == truth[seed] and len(pieces) > 2, "it came in pieces"
    page = httpx.get(f"{served.url}/metrics", timeout=30).text
    assert "memserve_router_members_joined_total 2.0" in page, "a prefill and a decode instance"


def test_a_wrong_request_and_one_that_is_cancelled(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="other", prompt="x")
    asked = {"model": "tiny", "prompt": question(0), "max_tokens": 100, "extra_body": {"ignore_eos": True}}
    with served.client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: "memserve_router_requests_live 0.0" in httpx.get(f"{served.url}/metrics", timeout=30).text)


def test_scaled_by_hand(served: Served) -> None:
    """``memserve scale`` finds the cluster of the replica."""
    command = [sys.executable, "-m", "memserve", "scale", "decode=2", "--address", served.ray.address]
    told = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert told.returncode == 0, told.stderr
    assert told.stdout.split("\n")[:2] == ["prefill: p1", "decode: d1, d2"]
    assert "memserve_router_instances 3.0" in httpx.get(f"{served.url}/metrics", timeout=30).text


def test_a_killed_replica_is_replaced(served: Served, model: Path) -> None:
    """Its instances end with it, and the next one starts its own."""
    (before,) = replicas()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: replicas() - {before})
    eventually(served.is_ready)
    asked = {"model": "tiny", "prompt": question(0), "max_tokens": COUNT, "temperature": 0}
    answer = served.client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == truth_of(model, COUNT)[0]
    page = httpx.get(f"{served.url}/metrics", timeout=30).text
    assert "memserve_router_members_joined_total 2.0" in page, "as many as the file says"


def test_options_are_those_of_serve() -> None:
    words = words_of({"prefill": "2", "kv_memory": "4MiB", "no_cache": True, "tenant-weight": ["a=2", "b=1"]})
    asked, cluster = read_options(words)
    assert (cluster.prefill, cluster.decode, asked.engine.kv_memory_bytes) == (2, 1, 4 << 20)
    assert not asked.engine.caching and cluster.config.admission.weights == (("a", 2), ("b", 1))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": 1}, "port cannot be set here"),
        ({"in-process": True}, "in-process cannot be set here"),
        ({"modle": "x"}, "No such option: --modle"),
        ({"engine": "http://127.0.0.1:1"}, "engine cannot be set here"),
        ({"prefill": 0, "decode": 0}, "a cluster without instances cannot serve"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_deployed(args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        app(args)
