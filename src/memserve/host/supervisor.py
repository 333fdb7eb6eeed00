"""Keeps the instance processes of one host, and its store, alive.

Each child has a thread here that starts it, waits for its end, and starts it again, later and later the more often it
ends. Children die with that thread, so none outlives this process, whatever happens to it; unless there is a state
folder: then they wait for the next supervisor, which takes them over (:mod:`memserve.journal.survivors`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.journal.survivors import AdoptedProcess, ChildrenFile
from memserve.system.process import module_command
from memserve.system.secrets import Secret, as_followed

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before the first, second, ... attempt in a row; every later attempt waits as long as the last one listed."""

HEALTHY_S = 60.0
"""A child that lived for so long was well: the next pause is the first one again."""

TERMINATE_S = 5.0
"""How long a child may take to say good-bye before it is killed."""

STORE_END_S = 30.0
"""How long a store may take to write what is in its memory alone."""

LEAVE_S = 4.0
"""How long instances may take until others have their requests, and the store what they offered last."""

KILL_S = 10.0
"""How long the kernel may take to end a killed child; then the child is named in the log and left behind."""

RECORD_S = 5.0
"""Between two attempts to write a child down in the state folder."""


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """One instance, or a store, to be kept alive."""

    name: str
    role: Role
    flags: tuple[str, ...]
    """Further options of ``memserve instance`` or ``memserve store``."""
    drain_s: float = 0.0
    """How long it may take to finish what it has begun, before it says good-bye."""

    @property
    def command_line(self) -> list[str]:
        """What runs; role and name come first, so that ``ps`` shows them."""
        alone = {Role.STORE: ["store"], Role.ROUTER: ["router"]}
        subcommand = alone.get(self.role) or ["instance", "--role", self.role.value]
        return module_command("memserve", *subcommand, "--name", self.name, "--supervised", *self.flags)

    @property
    def is_store(self) -> bool:
        """Whether it keeps KV for instances, and so outlives them."""
        return self.role is Role.STORE

    @property
    def display_name(self) -> str:
        """For messages."""
        return f"{'instance' if self.role.has_model else self.role.value} {self.name}"


@dataclass(frozen=True, slots=True)
class ChildStart:
    """What children are told at their start, through a pipe: neither command lines nor environments show it."""

    secret: Secret
    """Where it is of a file, children follow that."""
    router_keys: Mapping[str, object] = field(default_factory=dict)
    """What routers among them are told with it."""

    def greetings(self, folder: Path | None) -> dict[Role, dict[str, object]]:
        """For the children of each role. ``folder``: where they wait for the next supervisor."""
        outlive = {"folder": str(folder)} if folder is not None else {}
        secret = as_followed(self.secret)
        file = {"secret_file": str(secret.files[0].absolute())} if secret.files else {}
        startup_payload = {"secret": secret.value(), **file, "parent_pid": os.getpid(), **outlive, "drain_s": LEAVE_S}
        return {role: startup_payload | (dict(self.router_keys) if role is Role.ROUTER else {}) for role in Role}


@dataclass(frozen=True, slots=True)
class ChildStats:
    """Totals of one child since the start of its supervisor."""

    is_running: bool
    restarts: int
    """Times that the child's process was started again after its end."""
    deaths: int
    """Times that the child's process ended by accident."""
    spawn_failures: int
    """Attempts to start the child's process that failed: no descriptors, no memory, no executable."""


class _Child:
    """One order and the process that fulfils it at present."""

    def __init__(self, order: ChildOrder) -> None:
        self.order = order
        self.process: subprocess.Popen[str] | AdoptedProcess | None = None
        self.thread: threading.Thread | None = None
        self.leaves = False
        """Its end was asked for, and no life follows."""
        self.lives = 0
        self.deaths = 0
        self.spawn_failures = 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def restart_count(self) -> int:
        """How often its process was started again."""
        return max(0, self.lives - 1)


class Supervisor:
    """Starts children, restarts those that die, ends them all."""

    def __init__(
        self,
        orders: Sequence[ChildOrder],
        start: ChildStart,
        on_death: Callable[[str, str], None],
        folder: Path | None = None,
        *,
        spare: Sequence[ChildOrder] = (),
    ) -> None:
        """``on_death`` is called with the name of a child that has ended, and how it ended, from the child's thread.
        ``folder``: where started children are written down; they outlive this process then, unless it ends in good
        order. ``spare``: children that may be added later; those of them that live are taken over at the start."""
        self._on_death = on_death
        self._orders = [*orders, *spare]
        self._file = ChildrenFile(folder) if folder is not None else None
        living = self._file.living_names([order.name for order in spare]) if self._file is not None else []
        self._children = [_Child(order) for order in self._orders if order in orders or order.name in living]
        self._startup_payloads = start.greetings(folder)
        self._environment = dict(os.environ)
        if (
            sum(order.role.has_model for order in self._orders) > 1
        ):  # they share cores: a worker of one that spins between steps takes them from another
            self._environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._retiring = threading.Event()
        self._closing = threading.Event()
        self._settled = False  # all have been ready: from now on deaths are accidents
        self._failure: UserError | None = None
        self._lock = threading.Lock()  # a child is never started after `close` has begun

    @property
    def child_names(self) -> list[str]:
        """Of all children, in the order of their start."""
        return [child.order.name for child in self._children]

    @property
    def surviving_names(self) -> list[str]:
        """Names of children that the last supervisor of this folder has left, and that run."""
        return self._file.living_names(self.child_names) if self._file is not None else []

    def start(self) -> None:
        """Start all children, or take over those that live; they load in parallel."""
        if self._file is not None:
            self._file.end_useless({child.order.name: child.order.command_line for child in self._children})
        for child in self._children:
            self._start_thread(child)

    def _start_thread(self, child: _Child) -> None:
        child.thread = threading.Thread(
            target=self._keep_alive, args=(child,), name=f"memserve-tend-{child.order.name}", daemon=True
        )
        child.thread.start()

    # -- more and fewer children

    def names_of(self, role: Role) -> list[str]:
        """The children of ``role`` that are to go on, in the order in which they were added."""
        return [child.order.name for child in self._children if child.order.role is role and not child.leaves]

    def add_child(self, role: Role) -> str | None:
        """Start one more child of ``role``, and keep it alive; its name. None: all spare ones are there, or the end has
        begun."""
        with self._lock:
            children_by_name = {child.order.name: child for child in self._children}
            free = [order for order in self._orders if order.role is role and order.name not in children_by_name]
            if not free or self._retiring.is_set():
                return None
            child = _Child(free[0])
            self._children = [*self._children, child]
            self._start_thread(child)
            return child.order.name

    def expect_end_of(self, name: str) -> None:
        """The child ``name`` will end: it is not started again, and its end is no death."""
        for child in self._children:
            if child.order.name == name:
                child.leaves = True

    def remove_child(self, name: str, patience_s: float) -> None:
        """Wait up to ``patience_s`` for the end of a child that was let go, then end it."""
        removed_children = [child for child in self._children if child.order.name == name]
        _wait_for(removed_children, patience_s)
        self._end_all(removed_children)
        with self._lock:
            self._children = [child for child in self._children if child not in removed_children]
            if self._file is not None:
                self._file.forget_child(name)

    def raise_failure(self) -> None:
        """Raise the :class:`UserError` of a child that could not start."""
        if self._failure is not None:
            raise self._failure

    def confirm_started(self) -> None:
        """All are ready: from now on one that dies is started again."""
        self.raise_failure()
        self._settled = True

    @property
    def child_pids(self) -> dict[str, int]:
        """Name -> process id of the children that run."""
        running = ((child.order.name, child.process) for child in self._children)
        return {name: process.pid for name, process in running if process is not None and process.poll() is None}

    def child_stats(self) -> dict[str, ChildStats]:
        """Name -> totals of all children. Any thread may ask."""
        return {
            child.order.name: ChildStats(child.is_running, child.restart_count, child.deaths, child.spawn_failures)
            for child in self._children
        }

    def begin_retiring(self) -> None:
        """A child that ends from now on is not started again: the whole cluster is about to end. Routers begin to
        drain."""
        self._retiring.set()
        _send_signal(self._router_children, signal.SIGTERM)

    def close(self) -> None:
        """End all children, gently at first; the store after the instances, which offer KV to it until their end."""
        with self._lock:
            routers_drain = self._retiring.is_set()
            self._retiring.set()
            self._closing.set()
        # a second signal would cut off what they are finishing
        self._end_all(self._router_children, asks=not routers_drain)
        self._end_all([child for child in self._children if child.order.role.has_model])
        self._end_all([child for child in self._children if child.order.is_store])

    @property
    def _router_children(self) -> list[_Child]:
        return [child for child in self._children if child.order.role is Role.ROUTER]

    @staticmethod
    def _end_all(children: Sequence[_Child], *, asks: bool = True) -> None:
        if asks:
            _send_signal(children, signal.SIGTERM)
        _wait_for(children, TERMINATE_S + max((child.order.drain_s for child in children), default=0.0))
        _send_signal(children, signal.SIGKILL)
        _wait_for(children, KILL_S)
        for child in children:
            if child.is_running:
                pid = child.process.pid if child.process is not None else 0
                log.error(
                    "%s (process %d) does not end, not even killed: it is left behind", child.order.display_name, pid
                )

    # -- a thread for each child

    def _keep_alive(self, child: _Child) -> None:
        """Life after life, until the supervisor closes. No failure of a spawn, or of what is told of it, ends this
        thread: a child without it would never be started again."""
        failures = 0
        while not self._retiring.is_set():
            started = time.monotonic()
            try:
                story = self._run_once(child)
            except Exception as error:  # also what no line of this module expects
                story = UserError(f"{child.order.display_name} cannot be looked after: {error!r}")
                self._kill_process(child)
            if story is None or self._retiring.is_set() or child.leaves:
                return
            if not self._settled:
                self._failure = self._failure or story
                return
            failures = 0 if time.monotonic() - started > HEALTHY_S else failures + 1
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            hint = f" (hint: {story.hint})" if story.hint else ""
            log.warning("%s; the next attempt to start it is in %.1f s%s", story.message, pause_s, hint)
            self._retiring.wait(pause_s)

    def _run_once(self, child: _Child) -> UserError | None:
        """One life of ``child``: why it ended, or why it could not begin. ``None``: the supervisor closes."""
        name = child.order.name
        try:
            process = self._spawn_process(child)
        except Exception as error:  # OSError: descriptors, memory, executable; others: bugs, which stop no instance
            child.spawn_failures += 1
            cause = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            return UserError(f"{child.order.display_name} cannot be started: {cause}", hint=_SPAWN_HINT)
        if process is None:
            return None
        child.lives += 1
        last_output = self._wait_for_exit(child, process)
        if self._closing.is_set():
            return None
        how = _exit_text(process)
        if child.leaves:
            return None
        if self._settled:  # else the whole start fails
            child.deaths += 1
            self._on_death(name, how)
        return _exit_error(child.order.display_name, how, last_output)

    def _spawn_process(self, child: _Child) -> subprocess.Popen[str] | AdoptedProcess | None:
        with self._lock:
            if self._closing.is_set() or child.leaves:
                return None
            if self._file is not None and child.process is None:
                child.process = self._file.adopt_child(child.order.name, child.order.command_line)
                if child.process is not None:
                    return child.process
                self._on_death(child.order.name, _REPLACED)  # else its shadow might keep the new one out
            child.process = subprocess.Popen(
                child.order.command_line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=self._environment,
                process_group=0,  # Ctrl-C is for us: streams drain before their instances end
            )
            return child.process

    def _wait_for_exit(self, child: _Child, process: subprocess.Popen[str] | AdoptedProcess) -> str:
        """Send the process its start-up payload and wait for its end; its last output. While it cannot be
        written down, try again."""
        startup_payload: str | None = json.dumps(self._startup_payloads[child.order.role]) + "\n"
        while True:
            patience_s = None if self._is_recorded(child, process) else RECORD_S
            try:
                output, _ = process.communicate(startup_payload, patience_s)
                return output
            except subprocess.TimeoutExpired:
                startup_payload = None  # it was sent

    def _is_recorded(self, child: _Child, process: subprocess.Popen[str] | AdoptedProcess) -> bool:
        """Write a new child down; ``False``: impossible at present (disk full, no descriptors)."""
        if self._file is None or isinstance(process, AdoptedProcess):
            return True
        try:
            self._file.record_start(child.order.name, process.pid, child.order.command_line)
            return True
        except OSError as error:
            log.warning("%s is not written down in the state folder: %s", child.order.display_name, error)
            return False

    def _kill_process(self, child: _Child) -> None:
        """Two processes of one name would expel each other: the last one ends before the next begins."""
        with contextlib.suppress(Exception):
            if child.process is not None and child.is_running:
                child.process.send_signal(signal.SIGKILL)
                child.process.communicate(None, KILL_S)


def _send_signal(children: Sequence[_Child], sig: signal.Signals) -> None:
    for child in children:
        if child.process is not None and child.process.poll() is None:
            child.process.send_signal(sig)


def _wait_for(children: Sequence[_Child], patience_s: float) -> None:
    """Until their threads have ended; ``patience_s`` for all together."""
    deadline = time.monotonic() + patience_s
    for child in children:
        if child.thread is not None:
            child.thread.join(max(0.0, deadline - time.monotonic()))


_REPLACED = "was left by an earlier router and is of no use to this one"
_SPAWN_HINT = "see ulimit -n and ulimit -u, and the free memory; is this Python still installed?"


def _exit_text(process: subprocess.Popen[str] | AdoptedProcess) -> str:
    """How a process ended, as a sentence without subject."""
    status = process.returncode or 0
    if isinstance(process, AdoptedProcess):
        return "ended (its status went to an earlier router)"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def _exit_error(title: str, how: str, output: str) -> UserError:
    """Why a child ended: in its own words where it found any."""
    try:
        words = json.loads(output)
        return UserError(f"{title}: {words['error']}", hint=words.get("hint"))
    except (ValueError, TypeError, KeyError):
        return UserError(f"{title} {how}", hint="its messages above may say why")
