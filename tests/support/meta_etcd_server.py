"""A real etcd for tests: one member, on free ports, in a folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port

ETCD = shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))


@contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Its ``host:port`` for clients."""
    port, peer_port = free_port(), free_port()
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    flags = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    flags += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen([str(ETCD), *flags], stdout=log, stderr=log)
        try:
            _wait_until_listening(port, process)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _wait_until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "etcd did not start"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
