"""Keeps the instance processes of one host alive (level 3).

Each child has a thread here that starts it, waits for its end, and starts it again, later and later the more often it
ends. Children die with that thread, so none outlives this process, whatever happens to it; unless there is a state
folder: then they wait for the next supervisor, which takes them over (:mod:`memserve.runtime.meta_children`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memserve.errors import UserError
from memserve.runtime.meta_children import AdoptedProcess, ChildrenFile
from memserve.types import Role

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before the first, second, ... restart in a row."""

HEALTHY_S = 60.0
"""A child that lived for so long was well: the next pause is the first one again."""

TERMINATE_S = 5.0
"""How long a child may take to say good-bye before it is killed."""


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """One instance to be kept alive."""

    name: str
    role: Role
    flags: tuple[str, ...]
    """Further options of ``memserve instance``."""

    @property
    def command(self) -> list[str]:
        """What runs; role and name come first, so that ``ps`` shows them."""
        start = [sys.executable, "-m", "memserve", "instance", "--role", self.role.value, "--name", self.name]
        return [*start, "--supervised", *self.flags]


class _Child:
    """One order and the process that fulfils it at present."""

    def __init__(self, order: ChildOrder) -> None:
        self.order = order
        self.process: subprocess.Popen[str] | AdoptedProcess | None = None
        self.thread: threading.Thread | None = None
        self.restarts = 0


class Supervisor:
    """Starts children, restarts those that die, ends them all."""

    def __init__(
        self, orders: Sequence[ChildOrder], secret: str, on_death: Callable[[str], None], folder: Path | None = None
    ) -> None:
        """``secret`` goes to each child through a pipe: neither command lines nor environments show it. ``on_death``
        is called with the name of a child that has ended by accident, from its thread. ``folder``: where it is written
        down who was started; they outlive this process then, unless it ends in good order."""
        self._on_death = on_death
        self._children = [_Child(order) for order in orders]
        self._file = ChildrenFile(folder) if folder is not None else None
        outlive = {"folder": str(folder)} if folder is not None else {}
        self._greeting = json.dumps({"secret": secret, "parent_pid": os.getpid(), **outlive}) + "\n"
        self._environment = dict(os.environ)
        if len(orders) > 1:  # they share cores: a worker of one that spins between steps takes them from another
            self._environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._closing = threading.Event()
        self._settled = False  # all have been ready: from now on deaths are accidents
        self._failure: UserError | None = None
        self._lock = threading.Lock()  # a child is never started after `close` has begun

    @property
    def names(self) -> list[str]:
        """Of all children, in the order of their start."""
        return [child.order.name for child in self._children]

    @property
    def living(self) -> list[str]:
        """Names of children that the last supervisor of this folder has left, and that run."""
        return self._file.living(self.names) if self._file is not None else []

    def start(self) -> None:
        """Start all children, or take over those that live; they load in parallel."""
        if self._file is not None:
            self._file.end_useless({child.order.name: child.order.command for child in self._children})
        for child in self._children:
            child.thread = threading.Thread(
                target=self._tend, args=(child,), name=f"memserve-tend-{child.order.name}", daemon=True
            )
            child.thread.start()

    def check(self) -> None:
        """Raise the :class:`UserError` of a child that could not start."""
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """Everybody is ready: from now on whoever dies is started again."""
        self.check()
        self._settled = True

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of the children that run."""
        running = ((child.order.name, child.process) for child in self._children)
        return {name: process.pid for name, process in running if process is not None and process.poll() is None}

    @property
    def restarts(self) -> int:
        """How often a child was started again."""
        return sum(child.restarts for child in self._children)

    def close(self) -> None:
        """End all children, gently at first."""
        with self._lock:
            self._closing.set()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_S
        for child in self._children:
            if child.thread is not None:
                child.thread.join(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for child in self._children:
            if child.thread is not None:
                child.thread.join()

    def _signal(self, sig: signal.Signals) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(sig)

    # -- a thread for each child

    def _tend(self, child: _Child) -> None:
        failures = 0
        while (process := self._spawn(child)) is not None:
            started = time.monotonic()
            said, _ = process.communicate(self._greeting)
            if self._closing.is_set():
                return
            story = _story(child.order.name, process.returncode or 0, said)
            if not self._settled:
                self._failure = self._failure or story
                return
            self._on_death(child.order.name)
            failures = 0 if time.monotonic() - started > HEALTHY_S else failures + 1
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            log.warning("%s; it is started again in %.1f s", story.message, pause_s)
            if self._closing.wait(pause_s):
                return
            child.restarts += 1

    def _spawn(self, child: _Child) -> subprocess.Popen[str] | AdoptedProcess | None:
        with self._lock:
            if self._closing.is_set():
                return None
            if self._file is not None and child.process is None:
                child.process = self._file.adopt(child.order.name, child.order.command)
                if child.process is not None:
                    return child.process
            child.process = subprocess.Popen(
                child.order.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
                process_group=0,  # Ctrl-C is for us: streams drain before their instances end
            )
            if self._file is not None:
                self._file.started(child.order.name, child.process.pid, child.order.command)
            return child.process


def _story(name: str, status: int, said: str) -> UserError:
    """Why a child ended: in its own words where it found any."""
    try:
        words = json.loads(said)
        return UserError(f"instance {name}: {words['error']}", hint=words.get("hint"))
    except (ValueError, TypeError, KeyError):
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return UserError(f"instance {name} {how}", hint="its messages above may say why")
