"""This process: the signals that ask for its end, how its threads wait, and what other programs take of its
cores.

A file that says once a second what a process is: probes of containers read its text, and look at its age.

Command lines of child processes that run a module of this package, by this process's Python.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from memserve.base.errors import UserError


def cache_root() -> Path:
    """Where what was found out or converted once is kept: ``$MEMSERVE_CACHE_DIR``, else ``$XDG_CACHE_HOME/memserve``,
    else ``~/.cache/memserve``."""
    if configured := os.environ.get("MEMSERVE_CACHE_DIR"):
        return Path(configured).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memserve"


class EndRequested(BaseException):
    """A signal asked for the end of the process. Not an ``Exception``: nothing that goes on may swallow it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.signal_name = name


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals after which a process ends in good order. ``nohup`` has SIGHUP ignored, and it stays ignored."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(sig for sig in asking if sig != signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN)


class SignalCounter:
    """Counts how often the end was asked for: a second time means now. A closing terminal sends several SIGHUP (the
    kernel, the shell): they count once."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []
        """Names of the signals that counted, in order."""

    def count_signal(self, sig: int) -> bool:
        """A signal came; whether it counts."""
        name = signal.Signals(sig).name
        if name == "SIGHUP" and name in self.names:
            return False
        self.count += 1
        self.names.append(name)
        return True

    def patience_s(self, drain_s: float) -> float:
        """The seconds that work may take from now on: ``drain_s`` at the first signal, none after the second."""
        return drain_s if self.count == 1 else 0.0


def on_ending_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """``handler`` takes every ending signal from now on. Main thread only."""
    for sig in ending_signals():
        signal.signal(sig, handler)


def ignore_terminal() -> None:
    """From now on Ctrl-C and a closed terminal are no concern of this process: another one will end it."""
    for sig in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Until the end of the block an ending signal raises :class:`EndRequested` here (Ctrl-C: ``KeyboardInterrupt``),
    once: what was started by then is ended in good order, and no second signal may interrupt that."""
    before = {sig: signal.getsignal(sig) for sig in ending_signals()}
    counter = SignalCounter()

    def end() -> BaseException:
        return KeyboardInterrupt() if counter.names[0] == "SIGINT" else EndRequested(counter.names[0])

    def raise_once(sig: int, frame: FrameType | None) -> None:
        if counter.count_signal(sig) and counter.count == 1:
            raise end()

    on_ending_signals(raise_once)
    try:
        yield
    except Exception:
        if counter.count:  # a native library that called Python has made an error of its own out of it
            raise end() from None
        raise
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


_SPIN_TURNS = 20_000
"""How long a worker spins before it sleeps: some hundred microseconds."""

PRIMITIVES_MAX = 320
"""Primitives that oneDNN keeps, 0.8 MB each at most; its own default of 1,024 grows by 0.7 GB. A captured forward
needs 55 row counts of each shape of linear up to a step of 2,048 tokens: 220 for a model with four of them."""


def set_thread_environment() -> None:
    """Choose how idle workers of OpenMP wait, and bound oneDNN's cache; what the user has set stays.

    Between the dozens of short parallel regions of a step a worker must not fall asleep: waking a halted virtual CPU
    costs 30 to 60 us, more than many of the regions take. Between steps it must not burn the core that the scheduler
    and the HTTP server need. libgomp's default spins for a bounded time (below a millisecond or two), then sleeps. A
    part of that still covers the gaps inside a step and is as fast on quiet cores; where another process wants the
    core, a worker that gives it up sooner shortens the step. Where several engines share cores, their user sets
    ``OMP_WAIT_POLICY=PASSIVE``: no worker spins.

    Does nothing once torch is imported: its libraries have read the environment by then, and have no call for it.
    """
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_TURNS))
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES_MAX))


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
    """Work of all processors together, without idle time and waits for IO; with time that a hypervisor took."""
    own_s: float
    """Work of this process and its descendants, those that have ended included."""


class CpuWatch:
    """Counts from its construction on; starting one costs a millisecond."""

    def __init__(self) -> None:
        self._first_reading = _read_cpu()

    def others_cores(self) -> float | None:
        """Processors that other programs kept busy since then, on average: 1.5 is one and a half.

        ``None``: this system does not tell, or hardly any time has passed.
        """
        now = _read_cpu()
        if self._first_reading is None or now is None or now.at_s - self._first_reading.at_s < 0.05:
            return None
        others_s = (now.machine_s - self._first_reading.machine_s) - (now.own_s - self._first_reading.own_s)
        return max(0.0, others_s / (now.at_s - self._first_reading.at_s))


def measure_busy_cores() -> float | None:
    """As :meth:`CpuWatch.others_cores`, over the next half second, in which the caller does nothing."""
    watch = CpuWatch()
    time.sleep(0.5)
    return watch.others_cores()


def busy_note(cores: float | None) -> str | None:
    """A line for people where ``cores`` distorts a measurement; ``None``: the machine was quiet, or cannot tell."""
    if cores is None or cores < BUSY_CORES:
        return None
    return f"the machine is busy: other programs use {cores:.1f} of {os.cpu_count()} cores, so figures come out too low"


def _read_cpu() -> Reading | None:
    try:
        columns = [int(text) for text in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
        work = sum(ticks for column, ticks in enumerate(columns[:_GUEST]) if column not in (_IDLE, _IOWAIT))
        return Reading(time.monotonic(), work / _TICKS_PER_S, _own_ticks() / _TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None


def _own_ticks() -> int:
    """Ticks of this process and its living descendants; those of ended ones are in their parents' account."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # that process ended meanwhile
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(int(text) for text in fields[11:15])  # utime, stime, cutime, cstime
    own_pids = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in own_pids} - own_pids
        own_pids |= more
        grown = bool(more)
    return sum(ticks.get(pid, 0) for pid in own_pids)


_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """From now on this process is killed when its parent ends, however that ends, and even while it is stopped.

    The kernel watches the parent's *thread*: a parent keeps the thread that started instances.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it has ended already
        os._exit(1)


DIES_WITH = "MEMSERVE_DIES_WITH"
"""In the environment: the parent that a command ends with (:func:`die_with`). A parent with threads names itself there:
code of its own between fork and exec may wait for ever for a lock that one of them has."""


def die_with_parent() -> None:
    """:func:`die_with` the parent that the environment names; children of this process are not told."""
    parent_pid = os.environ.pop(DIES_WITH, "")
    if parent_pid:
        die_with(int(parent_pid))


def new_generation() -> int:
    """A generation higher than that of any earlier process of the same name: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


PERIOD_S = 1.0
STALL_S = 15.0
"""A process whose own thread has done nothing for so long is not said to work any more."""


class HealthState(enum.StrEnum):
    """What a process is to its cluster."""

    MEMBER = "member"
    OUTSIDE = "outside"  # it works, and no router has accepted it
    DRAINS = "drains"  # it takes nothing new


class HealthFile:
    """Writes a :class:`HealthState` into a file at most once a second, and removes it at the end.

    A process that hangs writes nothing: the file grows old. One that works without a router keeps it young, and says
    ``outside``: whether it is to be restarted, and whether it is ready, are two questions.
    """

    def __init__(self, path: Path) -> None:
        """Raises :class:`UserError` when no file can be written there."""
        self._path = path.absolute()
        self._draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._next_s = 0.0
        try:
            self._path.unlink(missing_ok=True)  # of the process before, which may have said that it is a member
            self._draft.touch()
        except OSError as error:
            hint = "give --health-file a path in a folder that this user may write to"
            message = f"cannot write {self._path}: {error.strerror or error}"
            raise UserError(message, hint=hint, param="health_file") from None

    def write_state(self, state: HealthState) -> None:
        """Write ``state``, unless that was done within this second. A full disk leaves the file to grow old."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + PERIOD_S * 0.9  # callers come once a second, and not to the millisecond
        try:
            self._draft.write_text(f"{state.value}\n")
            self._draft.replace(self._path)
        except OSError:
            return

    def remove_file(self) -> None:
        """There is nothing more to say."""
        for path in (self._path, self._draft):
            path.unlink(missing_ok=True)


SAFE_PATH = "-P"


def module_command(module: str, *words: str, cwd: str | None = None) -> list[str]:
    """``python -m module words...``, which imports nothing from the folder where it runs (``cwd``; None: the present
    one), unless this process does so, too. Without that a file ``socket.py`` that lies there would be run."""
    return [sys.executable, *([] if _imports_from(cwd or os.getcwd()) else [SAFE_PATH]), "-m", module, *words]


def _imports_from(folder: str) -> bool:
    return os.path.realpath(folder) in map(os.path.realpath, sys.path)
