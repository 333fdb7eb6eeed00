"""A real etcd for tests: one member or several, on free ports, in folders of their own; with TLS and users if asked."""

from __future__ import annotations

import base64
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ports import free_port
from waiting import stop_process

ETCD = shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))
OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Certificates:
    """A CA, and what it has signed for the members and for a client. Paths of PEM files."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]

    @staticmethod
    def make(folder: Path) -> Certificates:
        """By the command line of OpenSSL."""
        folder.mkdir()
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

        def openssl(*words: str) -> None:
            subprocess.run([str(OPENSSL), *words], cwd=folder, check=True, capture_output=True)

        openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test ca")
        (folder / "names").write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        for name in ("server", "client"):
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
            openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
        pairs = [(folder / f"{name}.pem", folder / f"{name}.key") for name in ("server", "client")]
        for _, private in pairs:
            private.chmod(0o600)
        return Certificates(folder / "ca.pem", *pairs)


class EtcdCluster:
    """The members of one etcd, each a process that can be killed, stopped, and started again with what it had."""

    def __init__(self, folder: Path, members: int = 1, certificates: Certificates | None = None) -> None:
        self._folder, self._certificates = folder, certificates
        self._ports = [(free_port(), free_port()) for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.hosts = [f"127.0.0.1:{port}" for port, _ in self._ports]
        """``host:port`` of each, for clients."""
        for number in range(members):
            self._spawn(number)
        for number in range(members):
            self._wait_until_listening(number)

    def start(self, number: int) -> None:
        """A member that was killed comes back."""
        self._spawn(number)
        self._wait_until_listening(number)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes.pop(number).wait()

    def stop(self, number: int) -> None:
        """It hangs: connections to it are accepted, and nothing is answered."""
        stop_process(self._processes[number].pid)

    def go_on(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """By the gateway of the first member, without a user."""
        tls: Any = True
        if self._certificates is not None:
            tls = ssl.create_default_context(cafile=str(self._certificates.ca))
            tls.load_cert_chain(*self._certificates.client)
        with httpx.Client(verify=tls, timeout=30) as client:
            answer = client.post(f"{self._scheme}://{self.hosts[0]}/v3/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def demand_users(self, user: str, password: str) -> None:
        """From now on only ``user`` may read and write what memserve keeps, and nothing else; and root all."""
        prefix = {
            "key": base64.b64encode(b"/memserve/").decode(),
            "range_end": base64.b64encode(b"/memserve0").decode(),
        }
        self.ask("auth/role/add", {"name": "router"})
        self.ask("auth/role/grant", {"name": "router", "perm": {"permType": "READWRITE", **prefix}})
        for name, secret, role in (("root", "of the tests", "root"), (user, password, "router")):
            self.ask("auth/user/add", {"name": name, "password": secret})
            if role == "root":
                self.ask("auth/role/add", {"name": "root"})
            self.ask("auth/user/grant", {"user": name, "role": role})
        self.ask("auth/enable", {})

    @property
    def _scheme(self) -> str:
        return "http" if self._certificates is None else "https"

    def _spawn(self, number: int) -> None:
        port, peer_port = self._ports[number]
        client, peer = f"{self._scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        everyone = ",".join(f"m{at}=http://127.0.0.1:{other}" for at, (_, other) in enumerate(self._ports))
        flags = ["--name", f"m{number}", "--data-dir", str(self._folder / f"etcd-{number}")]
        flags += ["--listen-client-urls", client, "--advertise-client-urls", client]
        flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", everyone]
        if self._certificates is not None:
            certificate, key = self._certificates.server
            flags += ["--cert-file", str(certificate), "--key-file", str(key), "--client-cert-auth"]
            flags += ["--trusted-ca-file", str(self._certificates.ca)]
        with (self._folder / f"etcd-{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen([str(ETCD), *flags], stdout=log, stderr=log)

    def _wait_until_listening(self, number: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            assert self._processes[number].poll() is None and time.monotonic() < deadline, "etcd did not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._ports[number][0])) == 0:
                    return
            time.sleep(0.02)


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """One member: its ``host:port`` for clients."""
    cluster = EtcdCluster(folder)
    try:
        yield cluster.hosts[0]
    finally:
        cluster.close()
