"""The chart's pods as processes on hosts of their own: they join, are ready, drain and end, as the manifests say."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import net_hosts
from net_hosts import Network
from served_cluster import eventually
from tiny_models import prompt, save_folder, tiny_module

pytest.importorskip("helm_python", reason="the chart is rendered by Helm, which helm-python-sdk brings")
pods = pytest.importorskip("pods", reason="pods need PyYAML")
_WHY_NOT = net_hosts.why_none()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no hosts for pods: {_WHY_NOT}")

KEY = "pods-abcdefgh-12345678"
VALUES: dict[str, Any] = {
    "model": {"source": "/srv/memserve/model/tiny", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "apiKeys": {"lines": [f"ada={KEY}"]},
    "router": {"drainS": 20, "preStopS": 1},
    "instanceArgs": ["--dtype=float32", "--kv-memory=4MiB", "--threads=1", "--block-tokens=8"],
    "instanceDrainS": 30,
    "instances": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
    "store": {"replicas": 1, "dram": "16MiB", "dramLimit": "32Mi", "ssd": "64MiB", "drainS": 20},
}


class Cluster:
    """A pod of each workload."""

    def __init__(self, network: Network, folder: Path, model: Path, values: dict[str, Any] = VALUES) -> None:
        manifests = pods.rendered(values)
        self.client = network.add("client")
        workloads = {one["metadata"]["name"]: one for one in manifests if one["kind"] in ("StatefulSet", "Deployment")}
        self.pods: dict[str, Any] = {}
        for name, workload in workloads.items():
            role = name.removeprefix("chat-")
            self.pods[role] = pods.Pod(workload, f"{name}-0", network.add(role), folder / role)
        services = [one["metadata"]["name"] for one in manifests if one["kind"] == "Service"]
        lines = ["127.0.0.1 localhost"]
        for pod in self.pods.values():
            names = [pod.name, *(f"{pod.name}.{service}" for service in services)]
            lines.append(f"{pod.host.address} {' '.join(names)}")
        keys = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "Secret"}
        secret = base64.b64decode(keys["chat-cluster-secret"]["data"]["cluster-secret"]).decode()
        for role in self.pods:
            of = folder / role / "volumes"
            for part in ("cluster-secret", "api-keys", "model"):
                (of / part).mkdir(parents=True)
            (folder / role / "hosts").write_text("\n".join(lines) + "\n")
            (of / "cluster-secret" / "cluster").write_text(secret)
            (of / "api-keys" / "api-keys").write_text(keys["chat-api-keys"]["stringData"]["api-keys"])
            shutil.copytree(model, of / "model" / "tiny")

    def ask(self, count: int, key: str = KEY, model: str = "tiny", router: str = "router") -> tuple[int, Any]:
        tokens = [int(token) for token in prompt(90, 3)]
        body = {"model": model, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        router = self.pods[router].host.address
        status, text = self.client.http(router, 8000, "/v1/completions", body | {"explain": True}, key=key)
        return status, json.loads(text)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    model = save_folder(tiny_module("llama"), tmp_path / "tiny")
    with Network() as network:
        yield Cluster(network, tmp_path, model)


COLOCATED = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "colocated": {"replicas": 1}}
SEVERAL: dict[str, Any] = {
    **VALUES,
    "models": [
        {"name": name, "source": "/srv/memserve/model/tiny", "instances": COLOCATED, "store": {"replicas": stores}}
        for name, stores in (("small", 0), ("large", 1))
    ],
    "router": {**VALUES["router"], "processes": 2},
    "followers": {"replicas": 1},
    "picker": {"enabled": True},
}
ASK_PICKER = """
import sys
from asking_gateway import AskingGateway
with AskingGateway(sys.argv[1]) as gateway:
    answers = [gateway.ask({"model": model, "prompt": "x"}) for model in ("small", "large", "none")]
print(*[",".join(sorted(answer.endpoints)) or answer.status for answer in answers])
"""


def test_several_models_have_several_routers(tmp_path: Path) -> None:
    """Each model's instance joins every router, and a gateway is told of the owner and the follower."""
    model = save_folder(tiny_module("llama"), tmp_path / "tiny")
    with Network() as network:
        cluster = Cluster(network, tmp_path, model, SEVERAL)
        assert set(cluster.pods) == {"router", "follower", "small-colocated", "large-colocated", "large-store"}
        for pod in cluster.pods.values():
            pod.start()
        for pod in cluster.pods.values():
            pod.wait("readinessProbe")
        routers = [cluster.pods[name].host.address for name in ("router", "follower")]
        for router in ("router", "follower"):
            for name in ("small", "large"):
                status, answer = cluster.ask(4, model=name, router=router)
                assert status == 200 and answer["model"] == name, answer
        doctor = ("memserve", "doctor", "--cluster", "http://127.0.0.1:8000", "--api-key", KEY)
        found = cluster.pods["router"].exec(*doctor)
        assert found.returncode == 0, found.stdout + found.stderr
        endpoints = ",".join(sorted(f"{address}:8000" for address in routers))
        eventually(lambda: ask_picker(cluster, routers[0]) == f"{endpoints} {endpoints} 404")
        for pod in reversed(cluster.pods.values()):
            pod.terminate()
            assert pod.status() == 0, pod.said()


def ask_picker(cluster: Cluster, router: str) -> str:
    """Where requests for each model, and for one that is none, are to go."""
    support = str(pods.ROOT / "tests" / "support")
    command = ["env", f"PYTHONPATH={support}", sys.executable, "-c", ASK_PICKER, f"{router}:9002"]
    asking = cluster.client.popen(command, stdout=subprocess.PIPE)
    return asking.communicate(timeout=60)[0].strip()


def test_pods_join_are_ready_drain_and_end(cluster: Cluster) -> None:
    """Instances before the router, as Kubernetes may start them; a request that runs survives the end of its decode
    pod's service; every process ends with 0 within its grace period."""
    everything = cluster.pods
    assert set(everything) == {"router", "prefill", "decode", "store"}
    for pod in everything.values():
        pod.start()
    router = everything["router"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        for pod in everything.values():
            pod.wait(kind)

    assert cluster.ask(4, key="wrong")[0] == 401
    status, first = cluster.ask(8)
    assert status == 200, first
    assert all(name in json.dumps(first["memserve"]) for name in ("chat-prefill-0", "chat-decode-0")), first

    expected = "prefill=1,decode=1,store=1"
    doctor = ("memserve", "doctor", "--cluster", "http://127.0.0.1:8000", "--api-key", KEY, "--expect", expected)
    told = router.exec(*doctor)
    assert told.returncode == 0 and "1 decode, 1 prefill, 1 store" in told.stdout, told.stdout + told.stderr
    port = ("--join", "chat-router-0.chat-routers:7000", "--cluster-secret-file", "/srv/memserve/secret/cluster")
    told = everything["decode"].exec("memserve", "doctor", *port)
    assert told.returncode == 0 and "takes the secret" in told.stdout, told.stdout + told.stderr

    answers: list[tuple[int, Any]] = []
    running = threading.Thread(target=lambda: answers.append(cluster.ask(150)))
    running.start()
    time.sleep(0.2)
    decode = everything["decode"]
    decode.terminate()
    assert decode.status() == 0, decode.said()
    running.join(60)
    assert answers and answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 150

    for role in ("prefill", "store"):
        everything[role].terminate()
        assert everything[role].status() == 0, everything[role].said()
        assert not everything[role].probe("readinessProbe"), "what is gone is not ready"
    told = router.exec(*doctor)
    assert told.returncode == 1 and "0 of 1 are live" in told.stdout, told.stdout + told.stderr
    router.wait("readinessProbe", 30, wanted=False)
    assert router.probe("livenessProbe"), "a router without instances is not restarted"
    router.terminate()
    assert router.status() == 0, router.said()
