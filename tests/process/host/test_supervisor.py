"""The supervisor around children that are ten lines of Python: restarts, last words, and ends of all kinds."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.host import supervisor as supervisor_module
from memserve.host.supervisor import ChildOrder, ChildStart, ChildStats, Supervisor
from memserve.journal.survivors import ChildrenFile
from places import SUPPORT
from waiting import eventually, stop_process

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
    def command_line(self) -> list[str]:
        return [sys.executable, "-c", CHILD.format(body=self.flags[0]), *self.flags[1:]]


class World:
    """A supervisor of one script, and what the script has written."""

    def __init__(self, body: str, log: Path, names: tuple[str, ...] = ("x1",), folder: Path | None = None) -> None:
        self.log = log
        self.deaths: list[str] = []
        self.how: list[str] = []
        orders = [Script(name, Role.DECODE, (body, str(log))) for name in names]
        self.supervisor = Supervisor(orders, ChildStart("the secret"), self._died, folder)
        self.supervisor.start()

    def _died(self, name: str, how: str) -> None:
        self.deaths.append(name)
        self.how.append(how)

    def lives(self) -> list[list]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor_module, "BACKOFF_S", (0.01,))
    monkeypatch.setattr(supervisor_module, "TERMINATE_S", 1.0)
    made: list[World] = []

    def make(body: str, *names: str, folder: Path | None = None) -> World:
        made.append(World(body, tmp_path / "log", names or ("x1",), folder))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.close()
        assert not each.supervisor.child_pids


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_child_gets_secret_and_is_restarted_on_death(world) -> None:
    it = world("time.sleep(60)")
    eventually(it.lives)
    it.supervisor.confirm_started()
    [[first, secret, parent, *_]] = it.lives()
    assert (secret, parent) == ("the secret", os.getpid()) and it.supervisor.child_pids == {"x1": first}
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(it.lives()) == 2)
    assert it.deaths == ["x1"] and it.how == ["was ended by signal 9"]
    assert it.supervisor.child_stats() == {"x1": ChildStats(is_running=True, restarts=1, deaths=1, spawn_failures=0)}
    it.supervisor.raise_failure()


def test_startup_error_of_child_is_reported_without_retry(world) -> None:
    it = world("print(json.dumps({'error': 'no room', 'hint': 'buy some'})); sys.exit(1)")
    eventually(lambda: it.supervisor._failure)
    with pytest.raises(UserError, match="instance x1: no room") as raised:
        it.supervisor.raise_failure()
    assert raised.value.hint == "buy some" and len(it.lives()) == 1 and not it.deaths


@pytest.mark.parametrize(
    ("body", "words"), [("sys.exit(3)", "ended with status 3"), ("os.kill(os.getpid(), 9)", "was ended by signal 9")]
)
def test_silent_child_death_is_described(world, body: str, words: str) -> None:
    it = world(body)
    eventually(lambda: it.supervisor._failure)
    with pytest.raises(UserError, match=words):
        it.supervisor.confirm_started()


def test_why_a_child_does_not_come_back_is_logged_with_a_hint(world, caplog: pytest.LogCaptureFixture) -> None:
    it = world(
        "if len(log.read_text().splitlines()) > 1:\n"
        "    print(json.dumps({'error': 'the file has 7 bytes', 'hint': 'give 7'})); sys.exit(1)\n"
        "time.sleep(60)"
    )
    eventually(it.lives)
    it.supervisor.confirm_started()
    os.kill(it.lives()[0][0], signal.SIGKILL)
    eventually(lambda: "instance x1: the file has 7 bytes; the next attempt" in caplog.text)
    assert "(hint: give 7)" in caplog.text


def test_child_ignoring_sigterm_is_killed(world) -> None:
    deafness = "signal.signal(signal.SIGTERM, signal.SIG_IGN); log.with_name('deaf').touch()"
    it = world(f"{deafness}\nwhile True: time.sleep(1)")
    eventually(it.log.with_name("deaf").exists)
    it.supervisor.confirm_started()
    [[pid, *_]] = it.lives()
    it.supervisor.close()
    assert not is_alive(pid) and not it.deaths and len(it.lives()) == 1


def spare_of(it: World, body: str, folder: Path | None = None) -> Supervisor:
    """A supervisor of ``x1`` that may add ``x2``."""
    first, second = (Script(name, Role.DECODE, (body, str(it.log))) for name in ("x1", "x2"))
    return Supervisor([first], ChildStart("the secret"), it._died, folder, spare=[second])


def test_added_child_is_supervised_and_retired_one_stays_ended(world) -> None:
    it = world("time.sleep(60)")
    it.supervisor.close()
    it.log.unlink(missing_ok=True)
    supervisor = spare_of(it, "time.sleep(60)")
    try:
        supervisor.start()
        eventually(it.lives)
        supervisor.confirm_started()
        assert supervisor.names_of(Role.DECODE) == ["x1"] and supervisor.add_child(Role.PREFILL) is None
        assert supervisor.add_child(Role.DECODE) == "x2" and supervisor.add_child(Role.DECODE) is None
        eventually(lambda: len(it.lives()) == 2)
        os.kill(supervisor.child_pids["x2"], signal.SIGKILL)
        eventually(lambda: len(it.lives()) == 3)
        assert it.deaths == ["x2"]
        supervisor.expect_end_of("x2")
        assert supervisor.names_of(Role.DECODE) == ["x1"]
        supervisor.remove_child("x2", 0.0)
        assert supervisor.child_names == ["x1"] and it.deaths == ["x2"] and len(it.lives()) == 3, "its end was no death"
        assert supervisor.add_child(Role.DECODE) == "x2", "the name is free again"
        eventually(lambda: len(it.lives()) == 4)
    finally:
        supervisor.close()
    assert not supervisor.child_pids and supervisor.add_child(Role.DECODE) is None


PARENT = """
import sys, time
from pathlib import Path
sys.path[:0] = {paths!r}
from test_supervisor import World
World("from memserve.system.process import die_with; die_with(greeting['parent_pid']); "
      "print('armed', file=open(sys.argv[1] + '.armed', 'w'), flush=True); time.sleep(60)", Path({log!r}))
time.sleep(60)
"""


def test_stopped_child_does_not_outlive_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = PARENT.format(paths=[str(Path(__file__).parent), str(SUPPORT)], log=str(log))
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(Path(f"{log}.armed").exists)
        pid = json.loads(log.read_text())[0]
        stop_process(pid)
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not is_alive(pid))


# -- failures of a spawn


class Spawns:
    """``subprocess.Popen`` that fails as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = subprocess.Popen
        self.failures: dict[str, list[BaseException]] = {}
        """Name -> what the next attempts to start it raise."""
        monkeypatch.setattr(supervisor_module.subprocess, "Popen", self)

    def __call__(self, command: list[str], **options):
        planted = next((kinds for name, kinds in self.failures.items() if name in command), [])
        if planted:
            raise planted.pop(0)
        return self._open(command, **options)


class Named(Script):
    @property
    def command_line(self) -> list[str]:
        return [*super().command_line, self.name]


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> Spawns:
    monkeypatch.setattr(sys.modules[__name__], "Script", Named)
    return Spawns(monkeypatch)


PLANTED = [
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    MemoryError(),
    subprocess.SubprocessError("Exception occurred in preexec_fn."),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("failure", PLANTED, ids=lambda failure: type(failure).__name__ + str(failure)[:10])
def test_failing_restart_is_retried_and_affects_no_other_child(
    world, spawns: Spawns, caplog: pytest.LogCaptureFixture, failure: BaseException
) -> None:
    it = world("time.sleep(60)", "x1", "x2")
    eventually(lambda: len(it.lives()) == 2)
    it.supervisor.confirm_started()
    spawns.failures = {"x1": [failure] * 3}
    before = it.supervisor.child_pids
    os.kill(before["x1"], signal.SIGKILL)
    eventually(lambda: it.supervisor.child_pids.get("x1", before["x1"]) != before["x1"])
    assert it.supervisor.child_pids["x2"] == before["x2"]
    assert it.supervisor.child_stats()["x1"] == ChildStats(is_running=True, restarts=1, deaths=1, spawn_failures=3)
    told = [record.message for record in caplog.records if "cannot be started" in record.message]
    assert len(told) == 3 and all("x1" in line and "\n" not in line for line in told)
    os.kill(it.supervisor.child_pids["x2"], signal.SIGKILL)  # the thread of the other one lives as well
    eventually(lambda: it.supervisor.child_stats()["x2"].restarts == 1)


def test_first_spawn_failure_ends_startup_with_reason(world, spawns: Spawns) -> None:
    spawns.failures = {"x1": [OSError(errno.EMFILE, "Too many open files")]}
    it = world("time.sleep(60)", "x1")
    eventually(lambda: it.supervisor._failure)
    with pytest.raises(UserError, match="instance x1 cannot be started: Too many open files"):
        it.supervisor.raise_failure()


def test_crash_loop_is_restarted_with_bounded_backoff(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backoff grows to its last entry, stays there, and each attempt is counted."""
    it = world("log.with_name('again').exists() and sys.exit(3)\ntime.sleep(60)")
    eventually(it.lives)
    it.supervisor.confirm_started()
    pauses: list[float] = []
    monkeypatch.setattr(supervisor_module, "BACKOFF_S", (0.001, 0.002, 0.004))
    wait = it.supervisor._retiring.wait
    monkeypatch.setattr(it.supervisor._retiring, "wait", lambda pause_s: pauses.append(pause_s) or wait(pause_s))
    it.log.with_name("again").touch()
    os.kill(it.supervisor.child_pids["x1"], signal.SIGKILL)
    eventually(lambda: len(pauses) > 5)
    assert pauses[:5] == [0.002, 0.004, 0.004, 0.004, 0.004]
    assert it.supervisor.child_stats()["x1"].deaths >= 5


def test_child_is_restarted_when_death_callback_fails(world) -> None:
    it = world("time.sleep(60)")
    eventually(it.lives)
    it.supervisor.confirm_started()
    failures: list[str] = []

    def fail(name: str, how: str) -> None:
        failures.append(name)
        raise IndexError("whatever hangs on it")

    it.supervisor._on_death = fail
    os.kill(it.supervisor.child_pids["x1"], signal.SIGKILL)
    eventually(lambda: len(it.lives()) == 2)
    assert failures == ["x1"]
    assert it.supervisor.child_stats() == {"x1": ChildStats(is_running=True, restarts=1, deaths=1, spawn_failures=0)}


def test_words_that_are_no_text_end_no_thread(world) -> None:
    it = world("sys.stdout.buffer.write(bytes([255, 254])); sys.stdout.flush()\ntime.sleep(60)")
    eventually(it.lives)
    it.supervisor.confirm_started()
    os.kill(it.supervisor.child_pids["x1"], signal.SIGKILL)
    eventually(lambda: len(it.lives()) == 2)
    assert it.how == ["was ended by signal 9"] and not it.supervisor._failure


def test_children_file_write_is_retried_after_failure(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RECORD_S", 0.01)
    write, failures = ChildrenFile._write, [OSError(errno.ENOSPC, "No space left on device")] * 3

    def fail_at_first(file: ChildrenFile) -> None:
        if failures:
            raise failures.pop()
        write(file)

    monkeypatch.setattr(ChildrenFile, "_write", fail_at_first)
    it = world("time.sleep(60)", folder=tmp_path)
    eventually((tmp_path / "children.json").exists)
    eventually(it.lives)
    assert ChildrenFile(tmp_path).living_names(["x1"]) == ["x1"] and not it.supervisor._failure


def test_no_child_is_started_again_once_the_end_has_begun(world) -> None:
    """SIGTERM to all processes at once, as systemd does by default: the router drains, its instances are gone."""
    it = world("time.sleep(60)")
    eventually(it.lives)
    it.supervisor.confirm_started()
    it.supervisor.begin_retiring()
    os.kill(it.supervisor.child_pids["x1"], signal.SIGTERM)
    it.supervisor._children[0].thread.join(30)
    assert len(it.lives()) == 1 and it.deaths == ["x1"] and not it.supervisor.child_pids


DESCRIPTORS = """
import logging, os, resource, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
from memserve.host import supervisor as module
from test_supervisor import World
from waiting import eventually
module.BACKOFF_S = (0.01, 0.02)
it = World("time.sleep(60)", Path({log!r}))
eventually(it.lives)
it.supervisor.confirm_started()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
os.kill(it.supervisor.child_pids["x1"], signal.SIGKILL)
# its death has closed a pipe or two of ours: not enough for the next one
eventually(lambda: it.supervisor.child_stats()["x1"].spawn_failures >= 2)
for fd in taken:
    os.close(fd)
eventually(lambda: len(it.lives()) == 2)
print(it.supervisor.child_stats()["x1"].restarts, "again", flush=True)
it.supervisor.close()
"""


def test_an_instance_is_back_when_descriptors_are_free_again(tmp_path: Path) -> None:
    code = DESCRIPTORS.format(paths=[str(Path(__file__).parent), str(SUPPORT)], log=str(tmp_path / "log"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["1 again"], done.stdout + done.stderr
    assert "instance x1 cannot be started: Too many open files; the next attempt" in done.stdout


DRAINING = """
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append("SIGTERM"))
log.with_name("began").touch()
while not signals: time.sleep(0.001)
log.with_name("drains").touch()
begun = time.monotonic()
while len(signals) < 2 and time.monotonic() - begun < 1.5: time.sleep(0.001)  # longer than good-byes take
log.with_name("signals").write_text(" ".join(signals))
"""


@pytest.mark.parametrize("is_told", [False, True])
def test_routers_finish_what_clients_wait_for(is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not the end was announced, each is asked once, and has its drain time."""
    monkeypatch.setattr(supervisor_module, "TERMINATE_S", 0.2)
    order = Script("router-2", Role.ROUTER, (DRAINING, str(tmp_path / "log")), drain_s=10.0)
    supervisor = Supervisor([order], ChildStart("the secret"), lambda name, how: None)
    supervisor.start()
    eventually((tmp_path / "began").exists)
    supervisor.confirm_started()
    if is_told:
        supervisor.begin_retiring()
        eventually((tmp_path / "drains").exists)
    supervisor.close()
    assert (tmp_path / "signals").read_text() == "SIGTERM"


def test_store_ends_after_the_instances(world, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what they offer last; they are given the time for it, and it is given the time to write."""
    body = """
end = log.with_name("ends")
def bye(*_):
    log.with_name(f"{name} ends").touch()
    while name != "s1" and not all(log.with_name(f"{one} ends").exists() for one in ("x1", "x2")):
        time.sleep(0.001)  # a store that is asked at the same time is quicker
    with end.open("a") as lines:
        print(name, file=lines)
    sys.exit(0)
signal.signal(signal.SIGTERM, bye)
log.with_name(name).touch()
while True: time.sleep(1)
"""
    orders = [
        Script(name, role, (f"name = {name!r}\n{body}", str(tmp_path / "log")))
        for name, role in (("s1", Role.STORE), ("x1", Role.DECODE), ("x2", Role.PREFILL))
    ]
    supervisor = Supervisor(orders, ChildStart("the secret"), lambda name, how: None)
    supervisor.start()
    eventually(lambda: all((tmp_path / name).exists() for name in ("s1", "x1", "x2")))
    supervisor.confirm_started()
    supervisor.close()
    ends = (tmp_path / "ends").read_text().split()
    assert sorted(ends[:2]) == ["x1", "x2"] and ends[2:] == ["s1"]
    greetings = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all(greeting[-1] == supervisor_module.LEAVE_S for greeting in greetings)
