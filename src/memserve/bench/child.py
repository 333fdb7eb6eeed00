"""``memserve serve`` as a child process, as a user would start it (level 4)."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        try:
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
def serving(flags: Sequence[str]) -> Iterator[ServedChild]:
    """``memserve serve FLAGS`` on a free port, until the block ends. Raises :class:`UserError`."""
    child = ServedChild(flags)
    try:
        yield child
    finally:
        child.end()
