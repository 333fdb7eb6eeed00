"""The supervisor around children that are ten lines of Python: restarts, last words, and ends of all kinds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memserve.errors import UserError
from memserve.runtime import supervisor as supervisor_module
from memserve.runtime.supervisor import ChildOrder, Supervisor
from memserve.types import Role
from waiting import eventually

CHILD = """
import json, os, pathlib, signal, sys, time
greeting = json.loads(sys.stdin.readline())
log = pathlib.Path(sys.argv[1])
with log.open("a") as lines:
    print(json.dumps([os.getpid(), *greeting.values()]), file=lines)
{body}
"""


class Script(ChildOrder):
    """A child that runs a script instead of an instance."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", CHILD.format(body=self.flags[0]), *self.flags[1:]]


class World:
    """A supervisor of one script, and what the script has written."""

    def __init__(self, body: str, log: Path) -> None:
        self.log = log
        self.deaths: list[str] = []
        self.supervisor = Supervisor([Script("x1", Role.DECODE, (body, str(log)))], "the secret", self.deaths.append)
        self.supervisor.start()

    def lives(self) -> list[list]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor_module, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(supervisor_module, "TERMINATE_S", 1.0)
    made: list[World] = []

    def make(body: str) -> World:
        made.append(World(body, tmp_path / "log"))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.close()
        assert not each.supervisor.pids


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_is_told_the_secret_and_started_again_when_it_dies(world) -> None:
    it = world("time.sleep(60)")
    eventually(it.lives)
    it.supervisor.settle()
    [[first, secret, parent]] = it.lives()
    assert (secret, parent) == ("the secret", os.getpid()) and it.supervisor.pids == {"x1": first}
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(it.lives()) == 2)
    assert it.deaths == ["x1"] and it.supervisor.restarts == 1
    it.supervisor.check()


def test_a_child_that_cannot_start_gives_its_reason_and_is_not_tried_again(world) -> None:
    it = world("print(json.dumps({'error': 'no room', 'hint': 'buy some'})); sys.exit(1)")
    eventually(lambda: it.supervisor._failure)
    with pytest.raises(UserError, match="instance x1: no room") as raised:
        it.supervisor.check()
    assert raised.value.hint == "buy some" and len(it.lives()) == 1 and not it.deaths


@pytest.mark.parametrize(
    ("body", "words"), [("sys.exit(3)", "ended with status 3"), ("os.kill(os.getpid(), 9)", "was ended by signal 9")]
)
def test_a_child_that_dies_without_a_word_is_described(world, body: str, words: str) -> None:
    it = world(body)
    eventually(lambda: it.supervisor._failure)
    with pytest.raises(UserError, match=words):
        it.supervisor.settle()


def test_a_child_that_ignores_the_end_is_killed(world) -> None:
    deafness = "signal.signal(signal.SIGTERM, signal.SIG_IGN); log.with_name('deaf').touch()"
    it = world(f"{deafness}\nwhile True: time.sleep(1)")
    eventually(it.log.with_name("deaf").exists)
    it.supervisor.settle()
    [[pid, _, _]] = it.lives()
    it.supervisor.close()
    assert not is_alive(pid) and not it.deaths and len(it.lives()) == 1


PARENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_runtime_supervisor import World
World("from memserve.runtime.instance_host import die_with; die_with(greeting['parent_pid']); "
      "print('armed', file=open(sys.argv[1] + '.armed', 'w'), flush=True); time.sleep(60)", Path({log!r}))
time.sleep(60)
"""


def test_no_child_outlives_a_parent_that_is_killed_not_even_one_that_stands_still(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = PARENT.format(tests=str(Path(__file__).parent), log=str(log))
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(Path(f"{log}.armed").exists)
        pid = json.loads(log.read_text())[0]
        os.kill(pid, signal.SIGSTOP)
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not is_alive(pid))
