"""Hosts in network namespaces: each with an address of its own, on one network that nothing else is on.

::

    namespace of a host      namespace of the hub
    eth0 10.77.0.7 --veth--- p7 -- bridge -- p8 ---veth-- eth0 of the next host

or, where the network has a :class:`Quality`, over a process that delays, loses and paces frames (``wire.cpp``; kernels
without netem have no other)::

    eth0 10.77.0.7 ---TAP--- wire ---TAP--- eth0 of the next host

Everything lies in namespaces that are made here, and ends with them: no traffic reaches the machine's own networks.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import http.client
import json
import os
import queue
import secrets
import shlex
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forked_processes import enter_network

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
Made = TypeVar("Made")


def why_none(*, wired: bool = False) -> str | None:
    """Why this machine has no hosts for tests. ``None``: it has. ``wired``: hosts on a network of some quality."""
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
    if veth or bridge:
        return "this kernel has no veth or no bridge"
    if wired and not Path("/dev/net/tun").exists():
        return "this machine has no TAP devices"
    return "the network between hosts needs g++" if wired and shutil.which("g++") is None else None


@dataclass(frozen=True)
class Quality:
    """Of a network, one way."""

    delay_s: float = 0.001
    loss: float = 0.01
    """Share of frames."""
    bits_per_s: float = 1e9
    seed: int = 1


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


class Wired:
    """Hosts on a network of some :class:`Quality`, all known at the start; lines between them can be cut."""

    def __init__(self, quality: Quality, *names: str) -> None:
        """Raises :class:`OSError` where there is no TAP device or compiler."""
        self._tag = f"ms{secrets.token_hex(3)}"
        self.hosts: dict[str, Host] = {}
        fds = []
        for number, name in enumerate(names, 2):
            host = Host(f"{self._tag}-{name}", name, number)
            _ip("netns", "add", host.namespace)
            self.hosts[name] = host
            fds.append(_inside(host.namespace, lambda: _open_tap("eth0")))
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
            _ip("-n", host.namespace, "link", "set", "eth0", "txqueuelen", "10000", "up")
        told = (quality.delay_s * 1e6, quality.loss * 1e6, quality.bits_per_s, quality.seed, *fds)
        self._wire = subprocess.Popen(
            [str(_built_wire()), *(f"{number:.0f}" for number in told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Wired:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts.values():
            host.end_processes()
        self._wire.kill()
        self._wire.wait()
        for host in self.hosts.values():
            _ip("netns", "del", host.namespace, check=False)

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def cut(self, one: str, *others: str) -> None:
        """Nothing passes between ``one`` and ``others`` any more, either way."""
        self._tell("cut", one, others)

    def heal(self, one: str, *others: str) -> None:
        """All passes again."""
        self._tell("heal", one, others)

    def _tell(self, what: str, one: str, others: Sequence[str]) -> None:
        places = list(self.hosts)
        assert self._wire.stdin is not None and self._wire.stdout is not None
        for other in others:
            for pair in ((one, other), (other, one)):
                self._wire.stdin.write(f"{what} {places.index(pair[0])} {places.index(pair[1])}\n")
                self._wire.stdin.flush()
                assert self._wire.stdout.readline() == "ok\n"


class Host:
    """One namespace."""

    def __init__(self, namespace: str, name: str, number: int) -> None:
        self.namespace, self.name = namespace, name
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number:x}"
        self.port = f"p{number}"
        """Of the hub, where this host is plugged in."""

    def popen(self, command: Sequence[str], setup: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        """Start ``command`` here. ``setup``: lines of shell that run before, in a mount namespace of this process."""
        if not setup:
            return _inside(self.namespace, lambda: subprocess.Popen(command, text=True, **options))
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
        return _inside(self.namespace, lambda: socket.socket(family))

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


def _inside(namespace: str, make: Callable[[], Made]) -> Made:
    """What ``make`` makes in a namespace."""
    made: queue.SimpleQueue[Made | OSError] = queue.SimpleQueue()

    def enter_and_make() -> None:  # a thread of its own: it stays in the namespace
        try:
            enter_network(f"/run/netns/{namespace}")
            made.put(make())
        except OSError as error:
            made.put(error)

    thread = threading.Thread(target=enter_and_make)
    thread.start()
    thread.join()
    found = made.get()
    if isinstance(found, OSError):
        raise found
    return found


def _open_tap(name: str) -> int:
    """The descriptor of a new TAP device, which ends with it."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


@functools.cache
def _built_wire() -> Path:
    """``wire.cpp``, compiled once for this version of it."""
    source = Path(__file__).with_name("wire.cpp")
    stamp = hashlib.blake2b(source.read_bytes(), digest_size=8).hexdigest()
    program = Path(tempfile.gettempdir()) / f"memserve-test-wire-{os.getuid()}-{stamp}"
    if not program.is_file():
        draft = program.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", "-O2", "-std=c++17", "-o", str(draft), str(source)], check=True)
        draft.replace(program)
    return program
