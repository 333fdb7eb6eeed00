"""The image and the chart: Helm lints and renders it, schemas of Kubernetes accept it, and it says nothing that
memserve does not know: flags, metrics, ports, users."""

from __future__ import annotations

import functools
import importlib.util
import re
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="the chart is rendered by Helm, which helm-python-sdk brings")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="brings the schemas of Kubernetes")
pods = pytest.importorskip("pods", reason="manifests need PyYAML")
import yaml  # noqa: E402  # kubernetes-validate brings it

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
VERSIONS = ("1.29", "1.34")
"""Of Kubernetes: the oldest that Chart.yaml allows, and a late one."""
MARGIN_S = 10

EVERYTHING: dict[str, Any] = {
    "router": {"replicas": 2, "args": ["--admission", "memory"]},
    "instances": {"colocated": {"replicas": 1, "args": ["--threads=1"]}},
    "store": {"replicas": 2},
    "etcd": {"enabled": True},
    "apiKeys": {"lines": ["ada=abcdefgh12345678", "bob=zyxwvuts12345678"]},
    "metricsKey": {"existingSecret": "metrics"},
    "tls": {"existingSecret": "llm-tls"},
    "autoscaling": {role: {"enabled": True} for role in ("prefill", "decode", "colocated")},
    "model": {"source": "/srv/memserve/model/llama", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "high",
    "podAnnotations": {"team": "chat"},
}
BARE: dict[str, Any] = {
    "networkPolicy": {"enabled": False},
    "instances": {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "colocated": {"replicas": 2}},
    "store": {"replicas": 1, "ssd": ""},
    "etcd": {"endpoints": ["etcd-0.etcd:2379"]},
    "clusterSecret": {"existingSecret": "secret"},
}
SEVERAL: dict[str, Any] = {
    "router": {"processes": 2},
    "followers": {"replicas": 2, "args": ["--admission", "bounded", "--max-active", "8"]},
    "models": [
        {"name": "small", "source": "default", "instances": {"prefill": {"replicas": 0}, "decode": {"replicas": 0},
                                                             "colocated": {"replicas": 1}}},
        {"name": "large", "source": "/srv/memserve/model/large", "store": {"replicas": 1},
         "instances": {"decode": {"replicas": 2, "args": ["--threads=1"]}},
         "autoscaling": {"prefill": {"enabled": True}}},
    ],
    "picker": {"enabled": True, "inferencePool": {"enabled": True}, "gateways": [{"namespaceSelector": {}}]},
    "tls": {"existingSecret": "llm-tls"},
    "apiKeys": {"existingSecret": "keys"},
    "metricsKey": {"existingSecret": "metrics"},
}  # fmt: skip
FLEET: dict[str, Any] = {
    "router": {"host": "::", "replicas": 2, "processes": 3},
    "engines": {
        "servers": ["vllm=http://vllm-0.vllm:8000,events=tcp://vllm-0.vllm:5557", "memserve=http://other:80"],
        "keySecret": "engines", "adminKeySecret": "operators",
    },
    "picker": {"enabled": True, "port": 9009},
}  # fmt: skip
CASES = {"defaults": {}, "everything": EVERYTHING, "bare": BARE, "several": SEVERAL, "fleet": FLEET}
OWN_KINDS = ("InferencePool",)
"""Of extensions: no schema of Kubernetes knows them."""


@functools.cache
def manifests(case: str) -> list[dict[str, Any]]:
    return pods.rendered(CASES[case])


@functools.cache
def reference() -> types.ModuleType:
    """``scripts/reference.py``, which knows all commands and metrics."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_kind(case: str, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in manifests(case) if one["kind"] in kinds]


def containers(case: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and container of memserve's own workloads."""
    for workload in of_kind(case, "StatefulSet", "Deployment"):
        pod = workload["spec"]["template"]["spec"]
        for container in pod["containers"]:
            if container["name"] != "etcd":
                yield pod, container


def flag(container: dict[str, Any], name: str) -> str:
    return next(word for word in container["args"] if word.startswith(f"{name}=")).partition("=")[2]


@pytest.mark.parametrize("case", CASES)
def test_helm_lints_the_chart(case: str) -> None:
    from helm_python import lint

    said = lint(str(pods.CHART), CASES[case])
    assert not said["errors"]
    assert [one["error"] for one in said["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_schemas_accept_every_manifest(case: str, version: str) -> None:
    kinds = {"StatefulSet", "Service", "PodDisruptionBudget"}
    assert kinds <= {one["kind"] for one in manifests(case)}
    for one in manifests(case):
        if one["kind"] not in OWN_KINDS:
            kubernetes_validate.validate(one, version, strict=True)
    broken = {**manifests(case)[0], "specification": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_commands_know_every_flag_that_a_pod_gives_them(case: str) -> None:
    commands = reference().typer.main.get_command(reference().command_line()).commands
    seen = set()
    for _, container in containers(case):
        command, *words = container["args"]
        known = {option for param in commands[command].params for option in param.opts}
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= known, f"{command} does not know {given - known}"
        seen.add(command)
    assert seen >= ({"serve"} if case == "fleet" else {"serve", "instance"})


@pytest.mark.parametrize("case", CASES)
def test_pods_have_the_time_to_drain(case: str) -> None:
    for pod, container in containers(case):
        hook = container.get("lifecycle", {}).get("preStop")
        before_s = float(hook["exec"]["command"][1]) if hook is not None else 0.0
        needed_s = before_s + float(flag(container, "--drain-s")) + MARGIN_S
        assert pod["terminationGracePeriodSeconds"] >= needed_s


def test_autoscalers_ask_for_metrics_that_the_router_has() -> None:
    known = {family.name: family for family in reference().metric_families()}
    asked = set()
    for scaler in of_kind("everything", "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            told = metric["external"]["metric"]
            asked.add(told["name"])
            assert told["name"] in known
            assert told["selector"]["matchLabels"].keys() <= set(known[told["name"]]._labelnames)
    assert asked == {"memserve_instance_requests_waiting", "memserve_instance_sequences_running"}
    adapter = yaml.safe_load((ROOT / "deploy" / "prometheus-adapter.yaml").read_text())
    offered = {re.split(r"[{]", rule["seriesQuery"])[0] for rule in adapter["rules"]["external"]}
    assert offered == asked, "what the autoscalers ask for is what the adapter offers"
    assert all(rule["seriesQuery"].split("{")[0] in rule["metricsQuery"] for rule in adapter["rules"]["external"])


def test_autoscaled_deployment_sets_no_replicas() -> None:
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind("everything", "HorizontalPodAutoscaler")}
    assert scaled == {"chat-prefill", "chat-decode", "chat-colocated"}
    for one in of_kind("everything", "Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in scaled)


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_pods_and_ports(case: str) -> None:
    workloads = of_kind(case, "StatefulSet", "Deployment")
    templates = [one["spec"]["template"] for one in workloads]

    def found(labels: dict[str, str]) -> list[dict[str, Any]]:
        return [one for one in templates if labels.items() <= one["metadata"]["labels"].items()]

    for one in [*workloads, *of_kind(case, "PodDisruptionBudget")]:
        assert len(found(one["spec"]["selector"]["matchLabels"])) == 1, one["metadata"]["name"]
    for one in of_kind(case, "Service"):
        behind = found(one["spec"]["selector"])
        assert len(behind) == (2 if case == "several" and one["metadata"]["name"] == "chat" else 1)
        for template in behind:
            ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
            for port in one["spec"]["ports"]:
                target = port.get("targetPort", port["port"])
                is_headless = one["spec"].get("clusterIP") == "None" and case == "fleet"
                assert target in ports or target in ports.values() or is_headless, one["metadata"]["name"]
    for one in of_kind(case, "NetworkPolicy"):
        assert found(one["spec"]["podSelector"]["matchLabels"])


@pytest.mark.parametrize("case", CASES)
def test_pods_run_without_privileges(case: str) -> None:
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.M)
    for pod, container in containers(case):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert str(pod["securityContext"]["runAsUser"]) == user
        safe = container["securityContext"]
        assert safe["readOnlyRootFilesystem"] and not safe["allowPrivilegeEscalation"]
        assert safe["capabilities"] == {"drop": ["ALL"]}
        secrets = [one["secret"]["defaultMode"] for one in pod["volumes"] if "secret" in one]
        assert secrets and all(not mode & 0o037 for mode in secrets)
        assert not any("KEY" in word and "=" in word for word in container["args"]), "no key on a command line"


def test_each_model_has_members_of_its_own() -> None:
    workloads = of_kind("several", "Deployment", "StatefulSet")
    models = {
        one["metadata"]["name"].removeprefix("chat-"): [
            word.partition("=")[2]
            for word in one["spec"]["template"]["spec"]["containers"][0]["args"]
            if word.startswith("--model=")
        ]
        for one in workloads
    }
    small, large = "small=default", "large=/srv/memserve/model/large"
    assert models == {
        "router": [small, large], "follower": [small, large], "small-colocated": [small], "large-prefill": [large],
        "large-decode": [large], "large-store": ["large"],
    }  # fmt: skip
    (scaler,) = of_kind("several", "HorizontalPodAutoscaler")
    assert scaler["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"] == {
        "role": "prefill", "model": "large",
    }  # fmt: skip


def test_a_gateway_is_sent_to_all_routers() -> None:
    (pool,) = of_kind("several", "InferencePool")
    (picker,) = [one for one in of_kind("several", "Service") if one["metadata"]["name"] == "chat-picker"]
    assert pool["spec"]["endpointPickerRef"]["name"] == picker["metadata"]["name"]
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == picker["spec"]["ports"][0]["port"] == 9002
    labels = pool["spec"]["selector"]["matchLabels"].items()
    workloads = of_kind("several", "StatefulSet", "Deployment")
    chosen = [one for one in workloads if labels <= one["spec"]["template"]["metadata"]["labels"].items()]
    assert {one["metadata"]["name"] for one in chosen} == {"chat-router", "chat-follower"}
    for one in chosen:
        ports = one["spec"]["template"]["spec"]["containers"][0]["ports"]
        assert {"name": "http", "containerPort": pool["spec"]["targetPorts"][0]["number"]} in ports
    (serving,) = [container for _, container in containers("several") if container["args"][0] == "serve"]
    assert flag(serving, "--endpoint-picker") == "0.0.0.0:9002" and flag(serving, "--routers") == "2"


def test_a_fleet_has_engines_and_no_members() -> None:
    ((_, serving),) = containers("fleet")
    engines = [word.partition("=")[2] for word in serving["args"] if word.startswith("--engine=")]
    assert engines == FLEET["engines"]["servers"]
    assert flag(serving, "--endpoint-picker") == "[::]:9009"
    given = {word.partition("=")[0] for word in serving["args"]}
    assert not given & {"--model", "--prefill", "--cluster-port", "--metadata"}, "a fleet refuses them"
    with pytest.raises(Exception, match="have no models, followers and stores"):
        pods.rendered({**FLEET, "store": {"replicas": 1}})
    with pytest.raises(Exception, match="is no name"):
        pods.rendered({"models": [{"name": "Big", "source": "x"}]})


def test_a_standby_router_needs_etcd() -> None:
    with pytest.raises(Exception, match="a standby router needs etcd"):
        pods.rendered({"router": {"replicas": 2}})


def test_instances_are_told_of_every_router() -> None:
    for _, container in containers("everything"):
        if container["args"][0] != "serve":
            joined = flag(container, "--join")
            assert joined == "chat-router-0.chat-routers:7000,chat-router-1.chat-routers:7000"


def test_the_image_takes_what_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    assert set(wanted.split(",")) <= extras.keys()
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists() and name in kept, name
    assert pods.entrypoint() == ["memserve"]
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(f"torch=={version}" in pinned for version in set(re.findall(r"torch==([\d.]+)", DOCKERFILE)))


def test_commands_of_the_guide_are_known() -> None:
    """What a reader types stands in the guide as it is typed: every flag is one of its command."""
    page = (ROOT / "docs" / "guides" / "HOSTS.md").read_text()
    blocks = re.findall(r"```\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = reference().typer.main.get_command(reference().command_line()).commands
    seen = set()
    for line in lines:
        found = re.search(r"(?:^|-- )memserve (\w+)(.*)$", line)
        if found is None:
            continue
        known = {option for param in commands[found[1]].params for option in param.opts}
        assert set(re.findall(r"--[\w-]+", found[2])) <= known, line
        seen.add(found[1])
    assert seen == {"serve", "router", "instance", "store", "doctor", "scale"}
    sets = re.findall(r"--set ([\w.]+)=", "\n".join(lines))
    chart = yaml.safe_load((pods.CHART / "values.yaml").read_text())
    for path in sets:
        at: Any = chart
        for word in path.split("."):
            assert word in at, f"--set {path}"
            at = at[word]
    assert sets
