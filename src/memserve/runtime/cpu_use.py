"""How much of this machine's processors other programs take, for whatever measures here (level 3)."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

BUSY_CORES = 0.25
"""From this much on, other programs distort what is measured: a quarter of one core."""
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _GUEST = 3, 4, 8
"""Columns of ``/proc/stat`` that are no work, and the first of those that are counted twice."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor seconds up to one moment."""

    at_s: float
    machine_s: float
    """Of all processors together, idle time and waits for IO left out; time that a hypervisor took included."""
    own_s: float
    """Of this process and its descendants, those that have ended included."""


class CpuWatch:
    """Counts from its construction on; starting one costs a millisecond."""

    def __init__(self) -> None:
        self._begun = _read()

    def others_cores(self) -> float | None:
        """Processors that other programs kept busy since then, on average: 1.5 is one and a half.

        ``None``: this system does not tell, or hardly any time has passed.
        """
        now = _read()
        if self._begun is None or now is None or now.at_s - self._begun.at_s < 0.05:
            return None
        others_s = (now.machine_s - self._begun.machine_s) - (now.own_s - self._begun.own_s)
        return max(0.0, others_s / (now.at_s - self._begun.at_s))


def watched(seconds: float = 0.5) -> float | None:
    """As :meth:`CpuWatch.others_cores`, over the next ``seconds``, in which the caller does nothing."""
    watch = CpuWatch()
    time.sleep(seconds)
    return watch.others_cores()


def busy_note(cores: float | None) -> str | None:
    """A line for people where ``cores`` distorts a measurement; ``None``: the machine was quiet, or cannot tell."""
    if cores is None or cores < BUSY_CORES:
        return None
    return f"the machine is busy: other programs use {cores:.1f} of {os.cpu_count()} cores, so figures come out too low"


def _read() -> Reading | None:
    try:
        columns = [int(text) for text in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
        work = sum(ticks for at, ticks in enumerate(columns[:_GUEST]) if at not in (_IDLE, _IOWAIT))
        return Reading(time.monotonic(), work / _TICKS_PER_S, _own_ticks() / _TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None


def _own_ticks() -> int:
    """Of this process and its living descendants; what ended ones used is in their parents' account."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(text) for text in fields[11:15])  # utime, stime, cutime, cstime
    own = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    return sum(ticks.get(pid, 0) for pid in own)
