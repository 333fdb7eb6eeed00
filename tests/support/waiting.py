"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Until ``condition`` holds. To look takes a quarter of the time: a test that asks a server again and again leaves
    the processor to what it waits for, and what is quickly looked at is looked at often."""
    began = time.monotonic()
    deadline = began + timeout_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, "it never came to that"
        time.sleep(min(0.1, max(0.005, 3 * (now - began))))
        began = time.monotonic()
