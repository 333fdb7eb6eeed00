"""A process that is forked from the template is to its parent, and to itself, as one that was executed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked_processes
from forked_processes import executed
from served_cluster import is_alive
from waiting import eventually

TOLD = """
import json, os, signal, subprocess, sys, time

def tell(**more):
    line = open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))
    state = {"words": sys.argv[1:], "line": line, "main": __name__, "file": os.path.basename(sys.argv[0]),
             "parent": os.getppid(), "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
             "folder": os.getcwd(), "first": sys.path[0] == os.getcwd(), "second": sys.path[1],
             "mark": os.environ.get("MEMSERVE_MARK"),
             "fds": sorted(filter(is_open, map(int, os.listdir("/proc/self/fd")))),
             "stopped": signal.getsignal(signal.SIGHUP).name, **more}
    print(json.dumps(state), flush=True)

def is_open(fd):
    try:
        return os.fstat(fd) is not None and os.get_inheritable(fd)
    except OSError:
        return False

if __name__ == "__main__":
    if sys.argv[1] == "tell":
        tell(read=sys.stdin.read())
        print("said", file=sys.stderr)
    elif sys.argv[1] == "end":
        sys.exit(int(sys.argv[2]) if sys.argv[2].isdecimal() else sys.argv[2])
    elif sys.argv[1] == "raise":
        raise ValueError("wrong")
    elif sys.argv[1] == "start":
        child = subprocess.Popen([sys.executable, "-m", "told", "tell"], stdin=subprocess.DEVNULL, process_group=0)
        sys.exit(10 + child.wait())
    else:
        child = subprocess.Popen([sys.executable, "-m", "told", "wait"]) if sys.argv[1] == "two" else None
        print(os.getpid(), flush=True)
        time.sleep(600)
"""
KEPT: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
WAYS = pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "executed"])


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module whose processes are started."""
    (tmp_path / "told.py").write_text(TOLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forked_processes, "MODULES", ("told",))
    monkeypatch.setattr(forked_processes, "SCRIPTS", (str(tmp_path / "told.py"),))
    return tmp_path


def way(is_forked: bool) -> Any:
    return contextlib.nullcontext() if is_forked else executed()


def run(is_forked: bool, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    with way(is_forked):
        return subprocess.run([sys.executable, "-m", "told", *words], capture_output=True, text=True, **options)


def began(is_forked: bool, *words: str) -> subprocess.Popen[str]:
    with way(is_forked):
        process = subprocess.Popen([sys.executable, "-m", "told", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and int(process.stdout.readline()) == process.pid
    return process


@WAYS
def test_a_process_has_what_its_parent_gave(is_forked: bool, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "told.py").write_text(TOLD)
    (other / "file").touch()
    with (other / "file").open() as file:
        environment = {**os.environ, "MEMSERVE_MARK": "x", "PYTHONPATH": str(tmp_path)}
        given = {"cwd": other, "env": environment, "pass_fds": [file.fileno()]}
        done = run(is_forked, "tell", "a b", "", input="read", start_new_session=True, **given)
        fds = [0, 1, 2, file.fileno()]
    assert (done.returncode, done.stderr) == (0, "said\n")
    assert json.loads(done.stdout) == {
        "words": ["tell", "a b", ""], "line": [sys.executable, "-m", "told", "tell", "a b"], "main": "__main__",
        "file": "told.py", "parent": os.getpid(), "group": True, "session": True, "folder": str(other), "first": True,
        "second": str(tmp_path), "mark": "x", "fds": fds, "stopped": "SIG_DFL", "read": "read",
    }  # fmt: skip


@WAYS
@pytest.mark.parametrize("options", [[], ["-m"], ["-P", "-m"]], ids=["file", "module", "module without its folder"])
def test_a_program_is_found_and_named_alike(is_forked: bool, options: list[str], told: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    program = "told" if options else str(told / "told.py")
    environment = {**os.environ, "MEMSERVE_MARK": "x"}
    command = [sys.executable, *options, program, "tell", "word"]
    with way(is_forked):
        done = subprocess.run(command, cwd=other if not options else told, env=environment, **KEPT)
    if options[:1] == ["-P"]:
        assert done.returncode == 1 and "told" in done.stderr.splitlines()[-1]
        return
    told_of = json.loads(done.stdout)
    assert done.stderr == "said\n"
    assert told_of["words"] == ["tell", "word"] and told_of["file"] == "told.py" and told_of["main"] == "__main__"
    assert told_of["first"] == bool(options)


def test_what_was_asked_for_was_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other tests compare nothing if all processes are executed; and some must be."""
    forks: list[object] = []
    fork = forked_processes.Template.fork_process
    monkeypatch.setattr(
        forked_processes.Template, "fork_process", lambda *given: (forks.append(given), fork(*given))[1]
    )
    run(True, "end", "0")
    assert len(forks) == 1
    run(False, "end", "0")
    run(True, "end", "0", env={**os.environ, "OMP_NUM_THREADS": "2"})
    (tmp_path / "sitecustomize.py").touch()
    run(True, "end", "0", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert subprocess.run([sys.executable, "-c", "pass"]).returncode == 0
    assert len(forks) == 1


@WAYS
@pytest.mark.parametrize(("word", "status", "said"), [("7", 7, ""), ("0", 0, ""), ("why", 1, "why\n")])
def test_a_process_ends_with_its_status(is_forked: bool, word: str, status: int, said: str) -> None:
    done = run(is_forked, "end", word)
    assert (done.returncode, done.stderr) == (status, said)


@WAYS
def test_an_error_is_printed(is_forked: bool) -> None:
    done = run(is_forked, "raise")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("\nValueError: wrong\n")


@WAYS
def test_a_process_starts_processes_of_its_own(is_forked: bool) -> None:
    with way(is_forked):
        parent = subprocess.Popen([sys.executable, "-m", "told", "start"], stdout=subprocess.PIPE, text=True)
    output, _ = parent.communicate(timeout=60)
    told = json.loads(output)
    assert parent.returncode == 10
    assert told["parent"] == parent.pid and told["group"] and not told["session"]


@WAYS
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_the_process_alone(is_forked: bool, sig: signal.Signals) -> None:
    process, other = began(is_forked, "wait"), began(is_forked, "wait")
    process.send_signal(sig)
    assert process.wait(60) == -sig
    assert other.poll() is None
    other.kill()
    assert other.wait(60) == -signal.SIGKILL


def test_nothing_is_left_of_a_killed_process_s_template() -> None:
    process = began(True, "two")
    below = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(below) == 2, "its template, and its child"
    process.kill()
    process.wait(60)
    eventually(lambda: sum(map(is_alive, below)) == 1, 60)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, below)), 60)
