"""The processes that build grammars and compute masks, as the process that wants the masks sees them
(:mod:`memserve.model.grammar.process` is what runs there).

One source for all, which starts with the first grammar, and one process for each grammar. A process that takes too much
memory or processor time ends alone, by its own limits; one that takes too long is ended by
:meth:`GrammarProcess.end_process`.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from memserve.base.errors import check
from memserve.base.units import MIB
from memserve.model.grammar import process as wire
from memserve.model.grammar.matcher import YIELD_S, GrammarProcess
from memserve.system.process import module_command

log = logging.getLogger(__name__)

TOTAL_BYTES = 512 * MIB
"""What all grammars may take together, beside builds and masks under way: then the largest one ends."""
TOGETHER = f"all grammars together take more than {TOTAL_BYTES // MIB} MiB, and this one takes most"


class GrammarProcesses:
    """The source, and the processes of all grammars that are alive. Threads may call it at the same time."""

    def __init__(
        self, tokenizer: Callable[[], bytes] | None, vocab_size: int, eos: Sequence[int] = (), *, cells: int = 1
    ) -> None:
        """``tokenizer`` gives its text, :func:`compressed`, for each start of the source; None: grammars are only
        checked. ``cells``: the matchers that a grammar may have."""
        self.vocab_size, self._tokenizer, self._eos, self._cells = vocab_size, tokenizer, list(eos), cells
        self._lock = threading.RLock()  # guards all below
        self._numbers = 0
        self._alive: dict[int, GrammarProcess] = {}
        self._source: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._begun: queue.SimpleQueue[GrammarProcess] = queue.SimpleQueue()
        self._timed: dict[int, float] = {}  # number -> when it has taken long
        self._poll: select.epoll
        self._wake: int  # both are opened with the thread: an import opens nothing
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, text: str, on_built: Callable[[str], None]) -> GrammarProcess:
        """Begin to build a grammar; ``on_built`` gets the reason why there is none, or ""."""
        with self._lock:
            self._numbers += 1
            process = GrammarProcess(self, self._numbers, text.encode(), self._cells, on_built)
            self._alive[process.number] = process
            if self._thread is None:
                self._start_thread()
        self._begun.put(process)
        os.eventfd_write(self._wake, 1)
        return process

    def _start_thread(self) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._poll_processes, name="memserve-grammars", daemon=True)
        self._thread.start()

    def wait_built(self, text: str, seconds: float) -> tuple[str, GrammarProcess]:
        """Build a grammar, and wait for that: why there is none, or "", and its process. Raises ``TimeoutError``."""
        results: queue.SimpleQueue[str] = queue.SimpleQueue()
        process = self.start(text, results.put)
        try:
            return results.get(timeout=seconds), process
        except queue.Empty:
            process.end_process()
            raise TimeoutError(f"it was not built within {seconds:g} s") from None

    def close(self) -> None:
        """End all processes, and the source."""
        with self._lock:
            self._closed = True
            alive, control, source = list(self._alive.values()), self._control, self._source
            self._control = self._source = None
        for process in alive:
            process.end_process()
        if control is not None:
            control.close()
        if source is not None:
            source.wait()
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)

    # -- for its processes

    def send_command(self, command: bytes, number: int, fds: Sequence[int] = ()) -> None:
        """Tell the source, which starts with the first grammar."""
        with self._lock:
            for _ in range(2):  # a source that has ended is started again
                if self._control is None:
                    if command != wire.FORK or self._closed:
                        return
                    self._start_source()
                try:
                    control = self._control
                    check(control is not None, "the source has not started")
                    socket.send_fds(control, [wire.ORDER.pack(command, number)], fds)  # type: ignore[arg-type]  # checked in the line before
                    return
                except OSError:
                    self._control, self._source = None, None

    def kill_process(self, number: int) -> None:
        self.send_command(wire.KILL, number)

    def forget_process(self, process: GrammarProcess) -> None:
        with self._lock:
            self._alive.pop(process.number, None)
            self._timed.pop(process.number, None)

    def start_timer(self, process: GrammarProcess) -> None:
        """It is waited for: it gives way once it computes for long."""
        if not process.yields:
            self._timed.setdefault(process.number, time.monotonic() + YIELD_S)
            os.eventfd_write(self._wake, 1)

    def on_memory_grown(self) -> None:
        """A process has more memory than before: end the largest one where all have too much."""
        with self._lock:
            alive = list(self._alive.values())
            if sum([process.taken_bytes for process in alive]) <= TOTAL_BYTES:
                return
            largest = max(alive, key=lambda process: process.taken_bytes)
        log.warning("grammars take more than %d MiB: the largest one ends", TOTAL_BYTES // MIB)
        threading.Thread(target=largest.end_process, args=(TOGETHER,), daemon=True).start()  # locks are held here

    def watch_process(self, process: GrammarProcess) -> None:
        """Read what it says as soon as it says something, and send the rest of what it is told."""
        events = select.EPOLLIN | select.EPOLLONESHOT | (select.EPOLLOUT if process.has_to_send else 0)
        fd = process.fileno()
        if fd >= 0:
            with suppress(OSError):  # it was closed meanwhile
                try:
                    self._poll.register(fd, events)
                except FileExistsError:
                    self._poll.modify(fd, events)

    # -- the thread

    def _poll_processes(self) -> None:
        while not self._closed:
            due_s = min(self._timed.values(), default=None)
            for fd, _ in self._poll.poll(None if due_s is None else max(0.0, due_s - time.monotonic())):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
            self._begin_waiting()
            for process in list(self._alive.values()):
                process.send_pending()
                process.read_replies()
                if process.is_awaited:
                    self.watch_process(process)
            self._lower_priorities()

    def _begin_waiting(self) -> None:
        while not self._begun.empty():
            process = self._begun.get()
            try:
                process.start_process()
            except OSError as error:
                process.end_process(f"no process can be started for it: {error}")

    def _lower_priorities(self) -> None:
        now_s = time.monotonic()
        for number, due_s in list(self._timed.items()):
            process = self._alive.get(number)
            if process is None or not process.is_awaited:
                self._timed.pop(number, None)
            elif due_s <= now_s and process.last_reply_s > now_s - YIELD_S:
                self._timed[number] = process.last_reply_s + YIELD_S  # many masks, and each takes little
            elif due_s <= now_s:
                self._timed[number] = now_s + YIELD_S
                process.look_at()

    def _start_source(self) -> None:
        ours, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        vocabulary = -1
        with child_socket:
            if self._tokenizer is not None:
                vocabulary = os.memfd_create("memserve-vocabulary")
                with os.fdopen(vocabulary, "wb", closefd=False) as file:
                    file.write(self._tokenizer())
            inherited = [child_socket.fileno(), *([vocabulary] if vocabulary >= 0 else [])]
            arguments = [child_socket.fileno(), vocabulary, self.vocab_size, *self._eos]
            command = module_command(wire.__name__, *map(str, arguments))
            one_heap = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else each thread's counts against the limits
            self._source = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL, env=one_heap)
        if vocabulary >= 0:
            os.close(vocabulary)
        self._control = ours


def compressed(tokenizer: str) -> bytes:
    """The text of a tokenizer, as :class:`GrammarProcesses` keeps it."""
    return zlib.compress(tokenizer.encode(), 1)
