"""Bars of progress, looked at through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memserve.cli.output import progress_bar

SOON = "from memserve.cli import output; output.SHOWN_AFTER_S = 0; "
RUN = f"import sys; {SOON}sys.argv = sys.argv[1:]; from memserve.cli.main import main; main()"
SIMULATED = ("memserve", "sim", "run", "--workload", "sharegpt", "--sessions", "20", "--rate", "4", "--json")
DOING = (
    f"import sys; {SOON}import time\n"
    "with output.progress_bar('doing it', 8, lambda: 2):\n"
    "    print('a line on stderr', file=sys.stderr)\n"
    "    with output.progress_bar('a part of it'):\n"
    "        time.sleep(1)\n"
    "    print('a result')\n"
)


def at_a_terminal(code: str, *arguments: str) -> tuple[str, str]:
    """Runs Python code with stderr at a terminal: what came on stdout, a pipe, and what was drawn."""
    ours, theirs = pty.openpty()
    drawn: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                drawn.append(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-c", code, *arguments]
    environment = dict(os.environ, TERM="xterm", COLUMNS="100")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=120, check=False)
    os.close(theirs)
    reader.join(30)
    os.close(ours)
    text = b"".join(drawn).decode()
    assert done.returncode == 0, text
    return done.stdout.decode(), text


def test_progress_bar_shows_progress_and_is_cleared() -> None:
    told, drawn = at_a_terminal(DOING)
    assert told == "a result\n"
    assert "doing it" in drawn and "25%" in drawn and "a line on stderr" in drawn
    assert "a part of it" not in drawn  # one bar at a time
    last = drawn.rpartition("\n")[2]
    assert "doing it" not in last and drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h")  # the cursor is there again


def test_progress_bar_does_not_break_json_on_stdout() -> None:
    told, drawn = at_a_terminal(RUN, *SIMULATED)
    assert "simulating" in drawn and "%" in drawn
    assert json.loads(told)


def test_without_a_terminal_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setattr("memserve.cli.output.SHOWN_AFTER_S", 0)
        with progress_bar("doing it", 8, lambda: 2):
            pass
    assert (tmp_path / "err").read_text() == ""


def test_a_command_draws_nothing_in_a_pipe() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, *SIMULATED], capture_output=True, timeout=120, check=True)
    assert done.stderr == b"" and json.loads(done.stdout)
    done = subprocess.run([sys.executable, "-c", DOING], capture_output=True, timeout=60, check=True)
    assert done.stderr == b"a line on stderr\n" and done.stdout == b"a result\n"
