"""The processes that a process has started, read while they and their threads come and go."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The processes that any thread of ``pid`` has started and that run, or wait to be asked about."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:  # a thread may have, too
                found += map(int, file.read().split())
    return found


def command_of(pid: int) -> list[str]:
    """The words of its command line; none where it is only just being started, or has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def named_children(pid: int) -> dict[str, int]:
    """The members that a ``memserve serve`` has started: name -> process id."""
    members = {}
    for child in children_of(pid):
        words = command_of(child)
        if "--name" in words:
            members[words[words.index("--name") + 1]] = child
    return members


def processes_below(pid: int) -> list[int]:
    """The process and all that it has started, and they."""
    return [pid, *(below for child in children_of(pid) for below in processes_below(child))]
