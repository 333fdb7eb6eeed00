"""Pods of rendered manifests as processes: commands, mounts, probes and hooks of containers, as a kubelet has them."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from net_hosts import Host

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "memserve"
NO_CLUSTER = "apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n"

Manifest = dict[str, Any]


def rendered(values: Mapping[str, Any], release: str = "chat") -> list[Manifest]:
    """What Helm would install."""
    from helm_python import Config

    with Config(storage_driver="memory", namespace="llm", kubeconfig_content=NO_CLUSTER) as helm:
        told = helm.install(str(CHART), release, dict(values), dry_run="client", namespace="llm")
    return [one for one in yaml.safe_load_all(told["manifest"]) if one]


def entrypoint() -> list[str]:
    """What the image runs, less the init process."""
    found = re.search(r"^ENTRYPOINT (\[.*\])$", (ROOT / "deploy" / "Dockerfile").read_text(), re.M)
    assert found is not None
    words: list[str] = json.loads(found[1])
    assert words[:2] == ["/usr/bin/tini", "--"]
    return words[2:]


class Pod:
    """The one container of a pod of ``workload``, on a host of its own."""

    def __init__(self, workload: Manifest, name: str, host: Host, folder: Path) -> None:
        """``folder``: of what is mounted: ``volumes/<name>`` for each, and ``hosts`` as /etc/hosts."""
        spec = workload["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]
        self.name, self.host, self._folder = name, host, folder
        self.grace_s: int = spec.get("terminationGracePeriodSeconds", 30)
        self._volumes = {one["name"]: one for one in spec.get("volumes", ())}
        self._claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        self._words = {"metadata.name": name, "status.podIP": host.address}

    def start(self) -> None:
        """Start the container."""
        env = {one["name"]: self._value(one) for one in self.container.get("env", ())}
        words = [self._expanded(word, env) for word in self.container["args"]]
        command = self.container.get("command") or entrypoint()
        inside = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **env}
        self.log = (self._folder / "log").open("w+")
        self.process = self.host.popen(
            ["env", "-i", *(f"{name}={value}" for name, value in inside.items()), *command, *words],
            self._mounts(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def _value(self, one: Manifest) -> str:
        return one["value"] if "value" in one else self._words[one["valueFrom"]["fieldRef"]["fieldPath"]]

    @staticmethod
    def _expanded(word: str, env: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word)

    def _mounts(self) -> list[str]:
        """A read-only root with the container's volumes in it; /tmp comes last, since it hides where they come from.
        A checkout below /tmp, which has the command, is put back."""
        lines = [f"mount --bind {shlex.quote(str(self._folder / 'hosts'))} /etc/hosts", "mount -t tmpfs none /srv"]
        last = []
        checkout, aside = shlex.quote(str(ROOT)), "/srv/checkout"
        if ROOT.is_relative_to("/tmp"):
            lines.append(f"mkdir {aside} && mount --bind {checkout} {aside}")
        for mount in self.container["volumeMounts"]:
            path, name = mount["mountPath"], mount["name"]
            memory = self._volumes.get(name, {}).get("emptyDir", {}).get("medium") == "Memory"
            source = self._folder / "volumes" / name
            known = name in self._volumes or name in self._claims
            assert known, f"{name} is mounted, and no volume"
            if path.startswith("/srv/"):
                lines.append(f"mkdir -p {path}")
            if memory or path == "/tmp":
                size = self._volumes[name]["emptyDir"].get("sizeLimit", "64Mi").replace("Mi", "m")
                (last if path == "/tmp" else lines).append(f"mount -t tmpfs -o size={size} none {path}")
                continue
            source.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {shlex.quote(str(source))} {path}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,ro,bind {path}")
        lines.append("mount -o remount,ro,bind /" if self._is_read_only else "true")
        if ROOT.is_relative_to("/tmp"):
            last.append(f"mkdir -p {checkout} && mount --bind {aside} {checkout}")
        return [*lines, *last]

    @property
    def _is_read_only(self) -> bool:
        return bool(self.container["securityContext"]["readOnlyRootFilesystem"])

    def probe(self, kind: str) -> bool:
        """Whether ``startupProbe``, ``readinessProbe`` or ``livenessProbe`` succeeds once."""
        probe = self.container[kind]
        if "exec" in probe:
            return self._exec(probe["exec"]["command"], probe.get("timeoutSeconds", 1) + 10).returncode == 0
        asked = probe["httpGet"]
        ports = {one["name"]: one["containerPort"] for one in self.container["ports"]}
        try:
            status, _ = self.host.http(
                self.host.address, ports[asked["port"]], asked["path"], timeout_s=probe.get("timeoutSeconds", 1)
            )
        except OSError:
            return False
        return 200 <= status < 400

    def exec(self, *command: str) -> subprocess.CompletedProcess[str]:
        """What ``kubectl exec`` would do."""
        return self._exec([*command], 120)

    def _exec(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        path = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"
        inside = ["nsenter", "-t", str(self.process.pid), "-m", "-n", "env", path, *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=timeout_s)

    def wait(self, kind: str, timeout_s: float = 120.0, wanted: bool = True) -> None:
        """Until the probe says what is ``wanted``."""
        deadline = time.monotonic() + timeout_s
        while self.probe(kind) is not wanted:
            assert self.process.poll() is None, f"{self.name} ended: {self.said()}"
            assert time.monotonic() < deadline, f"{kind} of {self.name} stays {not wanted}: {self.said()}"
            time.sleep(0.2)

    def terminate(self) -> None:
        """As a kubelet ends a pod, without waiting: the hook, then SIGTERM."""
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert self._exec(hook["exec"]["command"], self.grace_s).returncode == 0
        self.process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """The exit status, within the grace period."""
        return self.process.wait(self.grace_s)

    def said(self) -> str:
        """All that it printed."""
        self.log.flush()
        return (self._folder / "log").read_text()[-3000:]
