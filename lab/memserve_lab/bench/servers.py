"""The servers of a run: each starts when a pass first needs it, and is kept while memory lasts.

A start takes as long as a pass or two, so one server serves all workloads and seeds of its setting; every pass has a
salt of its own (:class:`~memserve_lab.bench.load.prompts.Manner`), so that none finds the cache of another. When memory
gets short, the server whose next pass is furthest away ends (Belady 1966: the order of the passes is known).
"""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from memserve.base.errors import UserError
from memserve.system.memory import available_memory_bytes
from memserve.system.process import module_command
from memserve_lab.bench.load.client import Target, first_model
from memserve_lab.bench.load.driver import INTERRUPTED, Labels, LoadRun, send
from memserve_lab.bench.load.prompts import Manner
from memserve_lab.bench.settings import Setting
from memserve_lab.workloads.records import Session, Text, Turn, Workload

STOP_S_MAX = 30.0
LOG_CHARS = 400
_READY = re.compile(r"ready in \S+ s: (\S+) at (\S+)/v1$")


class ServedChild:
    """A running server, from its construction to :meth:`end_server`.

    A process group of its own: Ctrl-C at the terminal reaches the bench, which ends its servers itself. Raises
    :class:`UserError`, with the server's output, if it does not start.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="memserve-bench-")
        self._log = Path(self._folder.name) / "stderr"
        command = module_command("memserve", "serve", "--port", "0", "--drain-s", "0", *flags)
        process: subprocess.Popen[bytes] | None = None
        try:
            with self._log.open("wb") as errors, _signals_held() as raise_now:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
                self._process = process
            raise_now()
            self.model, self.url = self._wait_until_ready()
        except BaseException:  # Ctrl-C too, and as soon as no signal is held: no process may stay behind
            if process is not None:
                self.end_server()
            raise
        self.ready_s = time.monotonic() - started

    def _wait_until_ready(self) -> tuple[str, str]:
        """Model and address."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := _READY.match(line.decode("utf-8", "replace").strip()):
                return match[1], match[2]
        log_text = self._log.read_text(encoding="utf-8", errors="replace").strip()[-LOG_CHARS:]
        raise UserError(f"memserve serve did not start: {log_text}", hint="run memserve serve with these flags by hand")

    def ask_to_end(self) -> None:
        """Send SIGTERM; :meth:`end_server` waits. To end several servers together, ask all of them first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill_server(self) -> None:
        """Send SIGKILL, as an accident would."""
        self._process.kill()

    def end_server(self) -> None:
        """End the server, after 30 s by SIGKILL."""
        self.ask_to_end()
        if self._process.stdout is not None:
            self._process.stdout.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """SIGINT and SIGTERM wait until the end of the block; the yielded function raises those that came.

    A signal during the start of a process would leave that process running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread gets signals
        return
    came: list[int] = []

    def raise_now() -> None:
        for sign in came:
            signal.raise_signal(sign)

    handlers = {
        sign: signal.signal(sign, lambda sign, _: came.append(sign)) for sign in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield raise_now
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[ServedChild]:
    """``memserve serve FLAGS`` on a free port, until the block ends. Raises :class:`UserError`."""
    child = ServedChild(flags)
    try:
        yield child
    finally:
        child.end_server()


WARM_REQUESTS, WARM_OUTPUT_TOKENS = 4, 4
"""The first requests of a process pay for its lazy initialisation; they are sent before measuring."""
ROOM_FACTOR = 2.0
"""A server starts only if this many times the largest server so far fits: caches fill up later."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address and model of a setting's server."""

    url: str
    model: str


class Servers:
    """A context manager: on exit every server has ended."""

    def __init__(self, flags: Sequence[str], say: Callable[[str], None]) -> None:
        """``flags``: of every server that this object starts."""
        self._flags, self._say = tuple(flags), say
        self._addresses: dict[str, Address] = {}
        self._children: dict[str, ServedChild] = {}
        self._largest_bytes = 0
        self.notes: list[str] = []
        self.starting_s = 0.0
        """Seconds spent on starts so far: a kept server costs later seeds nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for child in self._children.values():
            child.ask_to_end()
        with ExitStack() as stack:  # all are ended, even if ending one fails
            for child in self._children.values():
                stack.callback(child.end_server)

    def address_of(self, setting: Setting, coming: Sequence[str] = ()) -> Address:
        """The address of ``setting``'s warm server. ``coming``: names of the settings of all later passes, in order.

        Raises :class:`UserError` if the server does not start or cannot be reached.
        """
        if (address := self._addresses.get(setting.name)) is not None:
            return address
        address_started = self._start_server(setting, coming)
        warm = warm_up(address_started)
        if warm.partial == INTERRUPTED:
            raise KeyboardInterrupt
        if failed := next((record for record in warm.records if not record.ok), None):
            self.notes.append(f"{setting.name}: a request of the warm-up failed: {failed.error}")
        self._addresses[setting.name] = address_started
        return address_started

    def end_unneeded(self, coming: Sequence[str]) -> None:
        """End the servers that no pass of ``coming`` needs."""
        for name in [name for name in self._children if name not in coming]:
            self._end_server(name)

    def _start_server(self, setting: Setting, coming: Sequence[str]) -> Address:
        if setting.base_url is not None:
            return Address(setting.base_url, first_model(Target(setting.base_url)))
        while self._children and self._is_short():
            self._end_server(furthest(list(self._children), coming))
        before = available_memory_bytes()
        child = ServedChild((*setting.flags, *self._flags))
        self._children[setting.name] = child
        after = available_memory_bytes()
        if before is not None and after is not None:
            self._largest_bytes = max(self._largest_bytes, before - after)
        self.starting_s += child.ready_s
        self._say(f"{setting.name} is ready after {child.ready_s:.0f} s")
        return Address(child.url, child.model)

    def _is_short(self) -> bool:
        available = available_memory_bytes()
        return available is not None and available < ROOM_FACTOR * self._largest_bytes

    def _end_server(self, name: str) -> None:
        self._addresses.pop(name, None)
        self._children.pop(name).end_server()


def furthest(names: Sequence[str], coming: Sequence[str]) -> str:
    """The one of ``names`` whose first occurrence in ``coming`` is last, or that does not occur."""
    places = {name: place for place, name in reversed(list(enumerate(coming)))}
    return max(names, key=lambda name: places.get(name, len(coming)))


def warm_up(address: Address) -> LoadRun:
    """Short requests that share no prefix with any workload."""
    turns = (Turn(Text("one two three four five six seven eight nine ten " * 6), WARM_OUTPUT_TOKENS),)
    sessions = tuple(Session(f"warm-up-{number}", turns) for number in range(WARM_REQUESTS))
    workload = Workload("warm-up", "", sessions, users=2)
    return send(workload, Target(address.url), Manner(address.model), Labels(workload="warm-up"))
