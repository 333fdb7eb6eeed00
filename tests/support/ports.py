"""Ports for servers that must be told theirs before they start."""

from __future__ import annotations

import os
import random
import socket
import tempfile
import time
from pathlib import Path

_DRAWN = random.SystemRandom()
_FIRST, _END = 20_000, 32_000
"""Below those that the kernel gives away by itself."""
_CLAIMS = Path(tempfile.gettempdir()) / f"memserve-test-ports-{os.getuid()}"
_CLAIMED_S = 900
"""A server may take long until it listens, and tests run side by side: for so long no other test is given its port."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that no process listens at, and that no other test was given lately."""
    while True:
        port = _DRAWN.randrange(_FIRST, _END)
        if _is_free(port) and _claim(port):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _claim(port: int) -> bool:
    _CLAIMS.mkdir(exist_ok=True)
    claim = _CLAIMS / str(port)
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        if time.time() - claim.stat().st_mtime < _CLAIMED_S:
            return False
        claim.touch()
    return True


def listening_sockets(url: str) -> int:
    """How many sockets accept connections at the port of ``url``: routers that share it."""
    port = f":{int(url.rsplit(':', 1)[1].split('/')[0]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(words[1].endswith(port) and words[3] == "0A" for words in (line.split() for line in lines))
