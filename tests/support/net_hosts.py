"""Hosts in network namespaces: each with an address of its own, on one network that nothing else is on.

::

    namespace of a host      namespace of the hub
    eth0 10.77.0.7 --veth--- p7 -- bridge -- p8 ---veth-- eth0 of the next host

Everything lies in namespaces that are made here, and ends with them: no traffic reaches the machine's own networks.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import queue
import secrets
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_none() -> str | None:
    """Why this machine has no hosts for tests. ``None``: it has."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    name = f"msprobe{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this machine makes no network namespace: {made.stderr.strip()}"
    veth = _ip("-n", name, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1", check=False)
    bridge = _ip("-n", name, "link", "add", "name", "v2", "type", "bridge", check=False)
    _ip("netns", "del", name)
    return None if veth == bridge == 0 else "this kernel has no veth or no bridge"


class Network:
    """The hub, and the hosts on it."""

    def __init__(self) -> None:
        self._tag = f"ms{secrets.token_hex(3)}"
        self.hub = f"{self._tag}-hub"
        self.hosts: dict[str, Host] = {}
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "name", "net0", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "net0", "up")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, name: str) -> Host:
        """A further host, up and reachable."""
        host = Host(f"{self._tag}-{name}", name, len(self.hosts) + 2)
        _ip("netns", "add", host.namespace)
        self.hosts[name] = host
        ends = ("type", "veth", "peer", "name", host.port, "netns", self.hub)
        _ip("-n", host.namespace, "link", "add", "name", "eth0", *ends)
        _ip("-n", self.hub, "link", "set", host.port, "master", "net0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        return host

    def close(self) -> None:
        """End every process on the hosts, and the namespaces."""
        for host in self.hosts.values():
            host.end_processes()
        for namespace in [*(host.namespace for host in self.hosts.values()), self.hub]:
            _ip("netns", "del", namespace, check=False)


class Host:
    """One namespace."""

    def __init__(self, namespace: str, name: str, number: int) -> None:
        self.namespace, self.name = namespace, name
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number:x}"
        self.port = f"p{number}"
        """Of the hub, where this host is plugged in."""

    def popen(self, command: Sequence[str], setup: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        """Start ``command`` here. ``setup``: lines of shell that run before, in a mount namespace of this process."""
        script = "\n".join(["set -e", *setup, f"exec {shlex.join(command)}"])
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, "sh", "-c", script], text=True, **options)

    def run(self, *command: str) -> str:
        """The output of ``command``, run here."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command], check=True, capture_output=True, text=True, timeout=120
        ).stdout

    def end_processes(self) -> None:
        """Kill what runs here."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout.split()
        for pid in pids:
            try:
                os.kill(int(pid), 9)
            except ProcessLookupError:
                continue

    def socket(self, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
        """A TCP socket of this host."""
        made: queue.SimpleQueue[socket.socket | OSError] = queue.SimpleQueue()

        def make() -> None:  # a thread of its own: it stays in the namespace
            with Path(f"/run/netns/{self.namespace}").open() as file:
                entered = _libc.setns(file.fileno(), _CLONE_NEWNET)
            made.put(socket.socket(family) if entered == 0 else OSError(ctypes.get_errno(), "setns"))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        found = made.get()
        if isinstance(found, OSError):
            raise found
        return found

    def http(
        self, address: str, port: int, path: str, body: Mapping[str, Any] | None = None, *,
        timeout_s: float = 60.0, key: str | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """Status and text of what a client on this host is answered."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = self.socket(family)
        try:
            sock.settimeout(timeout_s)
            sock.connect((address, port))
            call = http.client.HTTPConnection(address, port)
            call.sock = sock
            headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
            call.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            answer = call.getresponse()
            return answer.status, answer.read().decode()
        finally:
            sock.close()


def _ip(*words: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr}"
    return done.returncode
