"""``memserve serve`` as a child process, as a user would start it (level 4)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memserve.errors import UserError

STOP_S_MAX = 30.0
LOG_CHARS = 400
_READY = re.compile(r"ready in \S+ s: (\S+) at (\S+)/v1$")


class ServedChild:
    """A server that answers, from its construction to :meth:`end`.

    A process group of its own: Ctrl-C at the terminal reaches the bench, which ends its servers itself. Raises
    :class:`UserError`, with what the server said, when it does not start.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="memserve-bench-")
        self._log = Path(self._folder.name) / "stderr"
        command = [sys.executable, "-m", "memserve", "serve", "--port", "0", "--drain-s", "0", *flags]
        with self._log.open("wb") as errors, _signals_held() as raise_now:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        try:
            raise_now()
            self.model, self.url = self._wait_until_ready()
        except BaseException:  # Ctrl-C too: nothing may go on behind
            self.end()
            raise
        self.ready_s = time.monotonic() - started

    def _wait_until_ready(self) -> tuple[str, str]:
        """Model and address."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := _READY.match(line.decode("utf-8", "replace").strip()):
                return match[1], match[2]
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-LOG_CHARS:]
        raise UserError(f"memserve serve did not start: {said}", hint="try its flags by hand: memserve serve")

    def ask_to_end(self) -> None:
        """Let it begin to end; :meth:`end` waits. Several servers end together when all are asked first."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a word, as an accident would."""
        self._process.kill()

    def end(self) -> None:
        """End it, with force where it does not want to."""
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
    """Until the end of the block SIGINT and SIGTERM wait; the function that it gives lets them have their way then.

    One that came while a process is being started would leave a process that nobody knows of.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals are the main thread's
        return
    came: list[int] = []

    def raise_now() -> None:
        for sign in came:
            signal.raise_signal(sign)

    held = {sign: signal.signal(sign, lambda sign, _: came.append(sign)) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield raise_now
    finally:
        for sign, handler in held.items():
            signal.signal(sign, handler)


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[ServedChild]:
    """``memserve serve FLAGS`` on a free port, until the block ends. Raises :class:`UserError`."""
    child = ServedChild(flags)
    try:
        yield child
    finally:
        child.end()
