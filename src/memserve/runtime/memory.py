"""How much memory and how many cores this machine has for us (level 3)."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memserve.errors import UserError
from memserve.units import human_bytes

_CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def objects_that_stay() -> Iterator[None]:
    """For the start of a process of ours: what is made here (half a million objects of torch and transformers) stays.

    To look for garbage among them again and again costs a sixth of the start, and later a pause in the middle of
    serving. Not for a library's user, whose own objects would stay as well.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def available_memory_bytes() -> int | None:
    """The kernel's estimate, or what the control group leaves, whichever is less; ``None`` where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        return min(available, int(limit) - used) if limit != "max" else available
    except (OSError, ValueError):
        return available


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, or by the control group's share of time if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period))) if quota != "max" else cores
    except (OSError, ValueError):
        return cores


def check_host_memory(wanted_bytes: int) -> None:
    """Refuse KV memory that this machine cannot hold: the kernel would grant it, and kill the server under load.

    Raises :class:`UserError`.
    """
    available = available_memory_bytes()
    if available is not None and wanted_bytes > available:
        raise UserError(
            f"{human_bytes(wanted_bytes)} of KV memory are asked for, and {human_bytes(available)} are available",
            hint="give less with --kv-memory and --dram-memory, or close other programs",
            param="kv_memory",
        )
