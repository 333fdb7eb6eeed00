"""Several replicas of Ray Serve before one cluster: each may be killed, and the owner, and others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from asking_clients import QUESTIONS, Load, question, truth_of
from memserve.base.errors import UserError
from memserve.integrations.ray_replicas import check_router
from memserve.integrations.ray_serve import replicas_of, words_of
from on_ray import COUNT, WAIT_S
from on_ray_serve import Served, replicas
from process_tree import command_of
from served_cluster import eventually
from tiny_models import save_folder, tiny_module

pytest.importorskip("ray.serve", reason="Ray Serve (extra: ray) is not installed")
pytestmark = pytest.mark.timeout(900)  # two raylets, an owner, two replicas and two instances share the machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_module("llama"), tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def truth(model: Path) -> list[str]:
    return truth_of(model, COUNT)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(model, tmp_path_factory.mktemp("serve"), replicas=2)
    yield served
    served.close()


def processes_of(model: Path, command: str) -> set[int]:
    """Those of ``memserve COMMAND`` with this model."""
    places = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in places if {command, str(model)} <= set(command_of(pid))}


def ask(served: Served, seed: int = 0) -> str:
    body = {"model": "tiny", "prompt": question(seed), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=WAIT_S)
    return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else ""


def test_all_replicas_answer_as_one_engine(served: Served, truth: list[str], model: Path) -> None:
    eventually(lambda: len(replicas()) == 2)
    assert [ask(served, seed) for seed in range(8)] == truth
    assert len(processes_of(model, "instance")) == 2 and len(processes_of(model, "serve")) == 1


def test_documents_are_kept_by_the_owner(served: Served) -> None:
    text = {"endpoint": "completions", "text": "w1 w2 w3 w4 w5 w6 w7 w8"}
    for number in range(6):  # whichever replica is asked, the owner keeps it
        url = f"{served.url}/v1/documents/d{number}"
        assert httpx.put(url, json=text, timeout=60).status_code in (200, 201)
        assert httpx.get(url, timeout=60).status_code == 200


def test_a_killed_replica_takes_nothing_with_it(served: Served, truth: list[str], model: Path) -> None:
    eventually(lambda: len(replicas()) == 2)
    before, instances = replicas(), processes_of(model, "instance")
    os.kill(min(before), signal.SIGKILL)
    eventually(lambda: ask(served) == truth[0])
    eventually(lambda: len(replicas() - {min(before)}) == 2)
    assert [ask(served, seed) for seed in range(8)] == truth
    assert processes_of(model, "instance") == instances


def test_a_killed_owner_takes_its_replicas_back(served: Served, truth: list[str], model: Path) -> None:
    (owner,) = processes_of(model, "serve")
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: processes_of(model, "serve") - {owner})
    eventually(lambda: [ask(served, seed) for seed in range(4)] == truth[:4])


def test_everything_ends_with_the_last_replica(served: Served, model: Path) -> None:
    served.end()
    eventually(lambda: not processes_of(model, "instance") | processes_of(model, "serve"))


def test_counts_follow_the_load_of_all_replicas(model: Path, truth: list[str], tmp_path: Path) -> None:
    scaling = {"scale": "colocated=1..2", "scale_up_after": "1", "scale_down_after": "600", "max_running": "1"}
    scaled = Served(model, tmp_path, replicas=2, prefill=0, decode=0, **scaling)
    try:
        with Load(lambda seed: ask(scaled, seed), truth, 6) as load:
            eventually(lambda: len(processes_of(model, "instance")) == 2)
            before = load.answers
            eventually(lambda: load.answers > before + 2 * QUESTIONS)
        assert load.wrong == []
    finally:
        scaled.close()


def test_counts_of_replicas_are_checked() -> None:
    assert (replicas_of({}), replicas_of({"replicas": 3}), replicas_of({"replicas": "2"})) == (1, 3, 2)
    for wrong in (0, -1, "x", 65):
        with pytest.raises(UserError, match="cannot read replicas"):
            replicas_of({"replicas": wrong})
    with pytest.raises(UserError, match="cannot be set here"):
        words_of({"endpoint_picker": "0.0.0.0:9002"})
    check_router()  # of a process without a replica
