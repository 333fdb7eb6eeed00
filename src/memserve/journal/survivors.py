"""Instances that outlive the ``memserve serve`` that started them, and are found by the next one.

A supervisor with a state folder writes down the instances that it has started. When the supervisor is killed, they live
on and keep their KV; each asks the kernel now and then whether a process holds the folder's lock, and ends when none
has held it for ``ORPHAN_S``. The next supervisor with this folder takes over the instances that run the command that it
would run itself, and ends the others.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from memserve.journal.folder import OUT_OF_RESOURCES, is_locked, write_private
from memserve.protocol.peers import Peer
from memserve.system.process import SAFE_PATH

log = logging.getLogger(__name__)

CHILDREN = "children.json"
ORPHAN_S = 60.0
"""How long an instance waits for a new ``memserve serve``."""
LOOK_S = 0.5
END_S = 5.0
"""How long an instance that is of no use may take to leave."""


class AdoptedProcess:
    """A process that another one has started, as far as a supervisor needs ``subprocess.Popen``."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """None: it runs. 0: it has ended; the kernel tells its status to its parent alone."""
        self._wait_for_exit(0.0)
        return self.returncode

    def communicate(self, _greeting: str | None, _timeout_s: float | None = None) -> tuple[str, None]:
        """Wait for its end. What it printed went to a pipe without a reader."""
        self._wait_for_exit(None)
        return "", None

    def send_signal(self, sig: signal.Signals) -> None:
        """Send ``sig``, to this process and no other that may have its number by now."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, sig)

    def end_process(self) -> None:
        """Gently, then by force."""
        self.send_signal(signal.SIGTERM)
        self._wait_for_exit(END_S)
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._pidfd)

    def _wait_for_exit(self, timeout_s: float | None) -> None:
        if self.returncode is not None:
            return
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(None if timeout_s is None else timeout_s * 1000):
            self.returncode = 0


class _Started(msgspec.Struct):
    """A child, as it is written down."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int | None
    command: list[str]


class ChildrenFile:
    """Instances that were started, by name: process, its start (so that no later process is taken for it), command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / CHILDREN
        self._lock = threading.Lock()
        self._children = _read(self._path)

    def adopt_child(self, name: str, command: Sequence[str]) -> AdoptedProcess | None:
        """The living child of that name if it runs ``command``, whatever router that joins; one that does not is
        ended."""
        process = self._living_process(name)
        if process is not None and _but_address(self._children[name].command) != _but_address(command):
            log.warning("instance %s runs with other options: it is ended, and started anew", name)
            process.end_process()
            return None
        return process

    def end_useless(self, commands: Mapping[str, Sequence[str]]) -> None:
        """End those that are written down and run none of ``commands`` (name to command line) under its name.

        Before a router calls back the members that it remembers: one with another model must not answer.
        """
        for name in [name for name in self._children if name not in commands]:
            process = self._living_process(name)
            if process is not None:
                process.end_process()
            self.forget_child(name)
        for name in self._children:  # all that are left are wanted
            self.adopt_child(name, commands[name])

    def living_names(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` with processes that run."""
        alive = []
        for name in names:
            process = self._living_process(name)
            if process is not None:
                alive.append(name)
        return alive

    def record_start(self, name: str, pid: int, command: Sequence[str]) -> None:
        """Write down a new child."""
        with self._lock:
            self._children[name] = _Started(pid, _start_of(pid), list(command))
            self._write()

    def forget_child(self, name: str) -> None:
        """Strike out a child that has ended for good, if it is written down."""
        with self._lock:
            if self._children.pop(name, None) is not None:
                self._write()

    def _write(self) -> None:
        try:
            write_private(self._path, msgspec.json.encode(self._children).decode())
        except OSError as error:  # a full disk ends no thread that tends an instance
            log.error("cannot write %s: %s; the next router will not know these instances", self._path, error.strerror)

    def _living_process(self, name: str) -> AdoptedProcess | None:
        child = self._children.get(name)
        if child is None:
            return None
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            if error.errno in OUT_OF_RESOURCES:
                raise  # it may live: taken for dead, a second one of its name would be started
            return None
        if (
            child.started is not None and _start_of(child.pid) == child.started
        ):  # asked behind the pidfd: the pidfd is of this process
            return AdoptedProcess(child.pid, pidfd)
        os.close(pidfd)
        return None


def end_when_orphaned(folder: Path, router: Callable[[], Peer | None]) -> None:
    """From now on a thread ends this process (SIGTERM) when the lock of ``folder`` has been free for ``ORPHAN_S``.

    ``router`` gives the router that has accepted this instance. Where that is another one than the last holder of the
    lock, a router elsewhere has taken over, and the instance goes on without the lock's holder.
    """
    threading.Thread(target=_watch, args=(folder, router), name="memserve-orphan", daemon=True).start()


def _watch(folder: Path, router: Callable[[], Peer | None]) -> None:
    keeper: Peer | None = None
    unlocked_since_s: float | None = None
    while unlocked_since_s is None or time.monotonic() - unlocked_since_s <= ORPHAN_S:
        time.sleep(LOOK_S)
        if is_locked(folder):
            keeper, unlocked_since_s = router(), None
            continue
        keeper = keeper or router()  # it may have welcomed us and been killed between two looks
        if router() not in (None, keeper):
            unlocked_since_s = None
        elif unlocked_since_s is None:
            unlocked_since_s = time.monotonic()
    log.warning("no router has come back for %.0f s: this instance ends", ORPHAN_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _read(path: Path) -> dict[str, _Started]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Started])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        lost = "instances that the last router started are not known: each joins by itself, or ends within a minute"
        log.error("%s cannot be read (%s); %s", path, error, lost)
        return {}


def _start_of(pid: int) -> int | None:
    """When it began, in the kernel's ticks. None: there is no such process, or all that is left of it is its status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in ("Z", "X") else None
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
            raise
        return None


def _but_address(command: Sequence[str]) -> list[str]:
    words = [word for word in command if word != SAFE_PATH]
    if "--join" in words:
        words[words.index("--join") + 1] = ""
    return words
