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
from dataclasses import dataclass
from pathlib import Path

from memserve.errors import UserError

STOP_S_MAX = 30.0
LOG_CHARS = 400
_READY = re.compile(r"ready in \S+ s: (\S+) at (\S+)/v1$")


@dataclass(frozen=True, slots=True)
class ServedChild:
    """A server that answers."""

    url: str
    model: str
    ready_s: float


@contextmanager
def serving(flags: Sequence[str]) -> Iterator[ServedChild]:
    """``memserve serve FLAGS`` on a free port, until the block ends.

    A process group of its own: Ctrl-C at the terminal reaches the bench, which ends its servers itself. Raises
    :class:`UserError`, with what the server said, when it does not start.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", "memserve", "serve", "--port", "0", "--drain-s", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="memserve-bench-") as folder:
        log = Path(folder) / "stderr"
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        try:
            yield _wait_until_ready(process, log, started)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, started: float) -> ServedChild:
    assert process.stdout is not None
    for line in process.stdout:
        if match := _READY.match(line.decode("utf-8", "replace").strip()):
            return ServedChild(match[2], match[1], time.monotonic() - started)
    said = log.read_text(encoding="utf-8", errors="replace").strip()[-LOG_CHARS:]
    raise UserError(f"memserve serve did not start: {said}", hint="try its flags by hand: memserve serve")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
