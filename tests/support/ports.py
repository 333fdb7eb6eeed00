"""Ports for servers that must be told theirs before they start."""

from __future__ import annotations

import random
import socket

_DRAWN = random.SystemRandom()
_FIRST, _END = 20_000, 32_000
"""Below those that the kernel gives away by itself: until the server listens, nobody is given the port."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 at which no process listens."""
    while True:
        port = _DRAWN.randrange(_FIRST, _END)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
