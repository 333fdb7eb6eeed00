"""This process: signals that end it, and other programs beside it, by files in the form of /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memserve.system import process
from memserve.system.process import CpuWatch, EndRequested, busy_note, signals_raise

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def a_quiet_machine() -> None:
    """Here it is the subject."""


class FakeProc:
    """A machine with processors and processes that a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now_s = folder, 100.0
        monkeypatch.setattr(process, "_PROC", folder)
        monkeypatch.setattr(process.time, "monotonic", lambda: self.now_s)

    def machine(self, user_s: float, idle_s: float = 0.0, iowait_s: float = 0.0, stolen_s: float = 0.0) -> None:
        columns = [user_s, 0, 0, idle_s, iowait_s, 0, 0, stolen_s, user_s, 0]  # guest time is user time again
        (self.folder / "stat").write_text("cpu  " + " ".join(str(round(s * TICKS)) for s in columns) + "\ncpu0 1 2\n")

    def process(self, pid: int, parent: int, used_s: float, of_ended_children_s: float = 0.0) -> None:
        place = self.folder / str(pid)
        place.mkdir(exist_ok=True)
        used, ended = str(round(used_s * TICKS)), str(round(of_ended_children_s * TICKS))
        fields = ["R", str(parent), *["0"] * 9, used, "0", ended, "0", "0"]
        (place / "stat").write_text(f"{pid} (a (b) c) " + " ".join(fields))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    fake = FakeProc(tmp_path, monkeypatch)
    fake.machine(50.0)
    fake.process(os.getpid(), 1, 5.0)
    fake.process(900001, os.getpid(), 1.0)  # a child, and its child
    fake.process(900002, 900001, 1.0)
    fake.process(900003, 1, 7.0)  # another program
    return fake


def test_cpu_use_of_program_and_children_is_own(proc: FakeProc) -> None:
    watch = CpuWatch()
    proc.now_s += 10
    proc.machine(50.0 + 12.0, idle_s=300.0, iowait_s=40.0)
    proc.process(os.getpid(), 1, 5.0 + 4.0, of_ended_children_s=1.0)
    proc.process(900002, 900001, 1.0 + 7.0)
    assert watch.others_cores() == pytest.approx(0.0)
    assert busy_note(watch.others_cores()) is None


def test_cpu_use_of_others_is_reported(proc: FakeProc) -> None:
    watch = CpuWatch()
    proc.now_s += 10
    proc.machine(50.0 + 9.0, stolen_s=6.0)
    proc.process(os.getpid(), 1, 5.0 + 2.0)
    assert watch.others_cores() == pytest.approx(1.3)
    assert "other programs use 1.3 of" in str(busy_note(watch.others_cores()))


def test_cpu_watch_without_proc_files(proc: FakeProc) -> None:
    watch = CpuWatch()
    assert watch.others_cores() is None, "no time has passed"
    proc.now_s += 1
    (proc.folder / "stat").unlink()
    assert watch.others_cores() is None and busy_note(None) is None


def test_this_machine_tells() -> None:
    assert process._read_cpu() is not None


def test_signal_wrapped_in_a_library_error_still_ends() -> None:
    """As the tokenizer's library does with whatever the Python that it calls raises."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EndRequested, match="SIGTERM"), signals_raise():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as asked:
            raise OSError(f"cannot read the file: {asked}") from None
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(OSError, match="no such file"), signals_raise():
        raise OSError("no such file")


COMMAND = """
import atexit, ctypes, os, sys
from memserve.cli.main import main

def tell() -> None:
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))  # PR_GET_PDEATHSIG
    print(death_signal.value, any(name.startswith("MEMSERVE_DIES") for name in os.environ))

atexit.register(tell)
main(["version"])
"""


@pytest.mark.parametrize("is_named", [False, True])
def test_commands_die_with_the_parent_that_names_itself(is_named: bool) -> None:
    """Its own children do not."""
    environment = os.environ | {process.DIES_WITH: str(os.getpid()) if is_named else ""}
    command = [sys.executable, "-c", COMMAND]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert run.stdout.split()[1:] == ["9" if is_named else "0", "False"]


def test_a_command_whose_parent_has_ended_ends_at_once() -> None:
    environment = os.environ | {process.DIES_WITH: str(os.getppid())}
    run = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=60, env=environment)
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "")
