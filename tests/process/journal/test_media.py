"""Where journals lie: one contract for a file, etcd and faulty memory; the thread that writes; what waits for it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.journal.folder import FileMedium, StateFolder, default_folder, is_locked
from memserve.journal.keeper import MetadataPlace, MetaKeeper, metadata_place, open_metadata
from memserve.journal.store import Medium, MediumFailed, Store
from memserve.journal.survivors import ChildrenFile
from memserve.protocol.peers import Peer
from memserve.protocol.records import HandleDropped, RouterStarted, SessionRouted
from memserve_lab.sim.faulty_medium import FaultyMedium
from meta_etcd_server import ETCD, running_etcd
from meta_records import Drawn
from waiting import eventually

WAIT_S = 30.0
NEEDS_ETCD = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as host:
        yield host


@pytest.fixture(params=["memory", "file", pytest.param("etcd", marks=NEEDS_ETCD)])
def reopened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Medium]]:
    """Opens the same medium again and again, as one process after the other does."""
    opened: list[Medium] = []
    memory = FaultyMedium()

    def again() -> Medium:
        if opened and request.param != "memory":
            opened.pop().close()
        opened.append(memory if request.param == "memory" else make())
        return opened[-1]

    def make() -> Medium:
        if request.param == "file":
            return FileMedium(tmp_path)
        from memserve.journal.etcd import EtcdMedium

        medium = EtcdMedium([request.getfixturevalue("etcd")], name=tmp_path.name)
        medium.await_election("test", lambda leader: None, lambda: None)
        return medium

    yield again
    for medium in opened:
        medium.close()


# -- the contract


def test_medium_loads_synced_and_replaced_bytes(reopened) -> None:
    medium = reopened()
    assert medium.load() is None and medium.name
    medium.replace(b"first")
    for piece in (b"abc", b"", b"d" * 700_000, b"e"):  # more than etcd takes at once
        medium.append(piece)
    medium.sync()
    everything = b"firstabc" + b"d" * 700_000 + b"e"
    medium = reopened()
    assert medium.load() == everything
    medium.append(b"f")
    medium.sync()
    medium = reopened()
    assert medium.load() == everything + b"f"
    medium.replace(b"second")
    medium.sync()
    medium.append(b"!")
    medium.sync()
    assert reopened().load() == b"second!"


def test_journal_store_reloads_state_on_any_medium(reopened) -> None:
    drawn, records = Drawn(4), []
    for _ in range(4):
        store = Store(reopened(), checkpoint_bytes_min=3000)
        assert list(store.state.checkpoint_records()) == records
        for _ in range(20):
            store.write_records([drawn.record()])
        store.sync()
        records = list(store.state.checkpoint_records())


@NEEDS_ETCD
def test_one_router_is_elected_and_paused_one_is_fenced(etcd: str) -> None:
    from memserve.journal.etcd import EtcdMedium

    first, second = EtcdMedium([etcd], "election"), EtcdMedium([etcd], "election")
    waiting, lost = queue.Queue(), threading.Event()
    first.await_election("first", waiting.put, lost.set)
    first.replace(b"first")
    elected = threading.Thread(target=second.await_election, args=("second", waiting.put, lambda: None))
    elected.start()
    assert waiting.get(timeout=WAIT_S) == "first" and elected.is_alive()
    first._refresher.cancel()  # it stands still: nobody keeps its lease
    elected.join(WAIT_S)
    assert not elected.is_alive() and second.load() == b"first"
    first.append(b" again")
    with pytest.raises(MediumFailed, match="another router is active"):
        first.sync()
    with pytest.raises(MediumFailed, match="another router is active"):
        first.replace(b"mine")
    assert second.load() == b"first"
    asyncio.run_coroutine_threadsafe(first._keep_lease("first", lost.set), first._loop)  # and wakes up
    assert lost.wait(WAIT_S)
    first.close()
    second.close()


@NEEDS_ETCD
def test_lease_expired_while_idle_is_taken_again(etcd: str) -> None:
    from memserve.journal.etcd import EtcdMedium

    medium, lost = EtcdMedium([etcd], "outage"), threading.Event()
    medium.await_election("me", lambda leader: None, lost.set)
    medium.replace(b"a")
    before = medium._created
    medium._call_and_wait(lambda client: client.revoke_lease(medium._lease_id))
    with pytest.raises(MediumFailed):
        medium.replace(b"b")
    eventually(lambda: medium._created > before)
    medium.replace(b"c")
    assert not lost.is_set() and medium.load() == b"c"
    medium.close()


# -- files


def test_truncated_file_or_full_disk_is_handled(tmp_path: Path) -> None:
    store = Store(FileMedium(tmp_path))
    store.write_records([RouterStarted(Peer("router", 5), "")])
    store.sync()
    safe = (tmp_path / "journal").stat().st_size
    store.write_records([HandleDropped("", "h")])
    store.close()
    (tmp_path / "journal.new").write_bytes(b"half a checkp")
    os.truncate(tmp_path / "journal", safe + 9)
    store = Store(FileMedium(tmp_path))
    assert store.torn_bytes == 9 and store.state.router == Peer("router", 5) and store.checkpoints == 1
    store.close()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    medium = FileMedium(tmp_path, fsync=full)
    before = medium.load()
    medium.append(b"x")
    with pytest.raises(MediumFailed, match="No space left"):
        medium.sync()
    with pytest.raises(MediumFailed, match="No space left"):
        medium.replace(b"new")
    assert medium.load() == before + b"x" and not (tmp_path / "journal.new").exists()


def test_a_state_folder_belongs_to_one_process(tmp_path: Path) -> None:
    code = "import sys, pathlib; from memserve.journal.folder import *; f = pathlib.Path(sys.argv[1])\n"
    hold = code + "s = StateFolder(f); print(s.read_or_create_secret(), flush=True); sys.stdin.read()"
    look = code + "print(is_locked(f))"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    secret = other.stdout.readline().strip()
    assert is_locked(tmp_path) and len(secret) > 20
    with pytest.raises(UserError, match="in use"):
        StateFolder(tmp_path)
    other.kill()
    other.wait()
    assert not is_locked(tmp_path)
    mine = StateFolder(tmp_path)
    assert mine.read_or_create_secret() == secret and (tmp_path / "secret").stat().st_mode & 0o077 == 0
    before = (tmp_path / "secret").stat().st_ctime_ns
    mine.close()
    mine = StateFolder(tmp_path)
    assert (tmp_path / "secret").stat().st_ctime_ns == before, "who follows the secret sees no change"
    seen = subprocess.run([sys.executable, "-c", look, str(tmp_path)], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "True"
    mine.close()
    with pytest.raises(UserError, match="cannot keep metadata"):
        StateFolder(tmp_path / "secret" / "below")


def test_metadata_option_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own = tmp_path / "memserve" / "port-8000"
    assert default_folder(8000) == own
    assert metadata_place("auto", 8000) == MetadataPlace(own, is_wish=True)
    assert metadata_place("auto", 0).folder is None
    assert metadata_place("none", 8000) == MetadataPlace()
    assert metadata_place("x", 0) == MetadataPlace(Path("x").absolute())
    assert metadata_place("etcd://a:1,b:2/blue", 8000) == MetadataPlace(own, ("a:1", "b:2"), "blue", True)
    for bad in ("redis://x", "etcd://"):
        with pytest.raises(UserError):
            metadata_place(bad, 0)


def test_unusable_default_metadata_folder_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    with open_metadata(MetadataPlace(tmp_path / "file" / "below", is_wish=True), said.append) as kept:
        assert (kept.folder, kept.keeper, kept.secret) == (None, None, None)
    assert "instances will end with this process: cannot keep metadata" in said[0]
    with pytest.raises(UserError), open_metadata(MetadataPlace(tmp_path / "file" / "below"), said.append):
        pass
    for generation in (5, 6):
        with open_metadata(MetadataPlace(tmp_path), said.append) as kept:
            me = kept.next_router("router", 5)  # the clock stands still
            assert me == Peer("router", generation)
            done: queue.Queue[bool] = queue.Queue()
            kept.keeper.write_durably([RouterStarted(me, "tcp://h:1")], done.put)
            assert done.get(timeout=WAIT_S)
            kept.keeper.close()


# -- the keeper and the gate


class SlowMedium(FaultyMedium):
    """Syncs when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Semaphore(0)

    def sync(self) -> None:
        assert self.go.acquire(timeout=WAIT_S)
        super().sync()


def session(number: int) -> SessionRouted:
    return SessionRouted("", f"s{number}", ())


def test_records_during_a_sync_share_the_next_one() -> None:
    medium, done = SlowMedium(), queue.Queue()
    keeper = MetaKeeper(medium)
    keeper.write_durably([session(0)], lambda ok: done.put((0, ok)))
    eventually(lambda: medium.unsafe_bytes)
    for number in range(1, 50):
        keeper.write_durably([session(number)], lambda ok, number=number: done.put((number, ok)))
    medium.go.release()
    assert done.get(timeout=WAIT_S) == (0, True) and done.empty()
    medium.go.release()
    assert [done.get(timeout=WAIT_S) for _ in range(49)] == [(number, True) for number in range(1, 50)]
    assert medium.syncs == 2
    medium.go.release(2)
    keeper.close()
    assert len(Store(medium).state.sessions) == 50


def test_notes_outlive_a_kill_without_a_sync_and_are_synced_soon() -> None:
    medium = SlowMedium()
    keeper = MetaKeeper(medium)
    keeper.note([session(1)])
    eventually(lambda: Store(copy_of(medium)).state.sessions)
    assert medium.unsafe_bytes and not medium.syncs, "a kill would not have lost it, a power cut would"
    medium.go.release(2)
    eventually(lambda: not medium.unsafe_bytes)
    assert medium.syncs == 1, "without anything that asks for it"
    keeper.close()


def copy_of(medium: FaultyMedium) -> FaultyMedium:
    copy = FaultyMedium()
    copy.replace(medium.load())
    return copy


def test_full_disk_stops_no_writer_and_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from memserve.journal import keeper as meta_keeper

    monkeypatch.setattr(meta_keeper, "REPAIR_S", 0.05)
    monkeypatch.setattr(meta_keeper, "NOTES_SYNC_S", 0.05)
    medium, done = FaultyMedium(), queue.Queue()
    keeper = MetaKeeper(medium)
    medium.room_bytes = 60
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            keeper.write_durably([session(number)], done.put)
            assert done.get(timeout=WAIT_S) is False
        medium.room_bytes = None
        eventually(lambda: (keeper.write_durably([session(9)], done.put), done.get(timeout=WAIT_S))[1])
    keeper.close()
    assert {name for _, name in Store(medium).state.sessions} == {"s0", "s1", "s2", "s9"}
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


def test_a_router_starts_again_while_its_disk_is_full(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from memserve.journal import keeper as meta_keeper

    monkeypatch.setattr(meta_keeper, "REPAIR_S", 0.05)
    medium, done = FaultyMedium(), queue.Queue()
    store = Store(medium)
    store.write_records([session(1)])
    store.sync()
    torn = FaultyMedium()
    torn.replace(medium.load() + b"\x99" * 7)
    torn.room_bytes = 20
    with caplog.at_level(logging.WARNING):
        keeper = MetaKeeper(torn)
        keeper.write_durably([session(2)], done.put)
        assert done.get(timeout=WAIT_S) is False and not keeper.durability().is_kept
        torn.room_bytes = None
        eventually(lambda: (keeper.write_durably([session(3)], done.put), done.get(timeout=WAIT_S))[1])
    keeper.close()
    assert {name for _, name in Store(torn).state.sessions} == {"s1", "s2", "s3"}
    assert "takes nothing more" in caplog.text and "writes resumed" in caplog.text


# -- a process that is killed


WRITER = """
import itertools, sys
from pathlib import Path
from memserve.journal.store import Store
from memserve.protocol.records import SessionRouted
from memserve.journal.folder import FileMedium
store = Store(FileMedium(Path(sys.argv[1])), checkpoint_bytes_min=2000)
for number in itertools.count(len(store.state.sessions)):
    store.write_records([SessionRouted("", f"s{number}", ())])
    store.sync()
    print(number, flush=True)
"""


def test_repeatedly_killed_writer_loses_no_acknowledged_record(tmp_path: Path) -> None:
    for kill_at in (1, 40, 7, 90, 23):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        told = [int(line) for line in itertools.islice(writer.stdout, kill_at)]
        writer.kill()
        told += [int(line) for line in writer.stdout if line.endswith("\n")]
        writer.wait()
        store = Store(FileMedium(tmp_path))
        assert {f"s{number}" for number in range(told[-1] + 1)} <= {name for _, name in store.state.sessions}
        store.close()


# -- children that outlive


SLEEPER = "import sys, time; print('up', flush=True); time.sleep(60)"


def sleeper(*flags: str) -> tuple[subprocess.Popen[str], list[str]]:
    command = [sys.executable, "-c", SLEEPER, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process, command


def test_children_are_found_again_and_those_of_no_use_are_ended(tmp_path: Path) -> None:
    file = ChildrenFile(tmp_path)
    made = {name: sleeper("--join", "old", name) for name in ("same", "other", "gone", "left")}
    for name, (process, command) in made.items():
        file.record_start(name, process.pid, command)
    made["gone"][0].kill()
    made["gone"][0].wait()
    again = ChildrenFile(tmp_path)
    assert again.living_names(["same", "gone", "new"]) == ["same"]
    moved = [*made["same"][1][:3], "--join", "new", "same"]
    adopted = again.adopt_child("same", moved)
    assert adopted.pid == made["same"][0].pid and adopted.poll() is None
    assert again.adopt_child("other", [*made["other"][1], "--threads", "2"]) is None
    assert made["other"][0].wait(WAIT_S) == -signal.SIGTERM
    commands = {name: made[name][1] for name in ("other", "gone")} | {"same": moved}
    again.end_useless(commands)
    assert made["left"][0].wait(WAIT_S) == -signal.SIGTERM
    assert again.adopt_child("gone", made["gone"][1]) is None and again.adopt_child("new", []) is None
    adopted.send_signal(signal.SIGKILL)
    assert adopted.communicate("") == ("", None) and adopted.poll() == 0
    assert made["same"][0].wait(WAIT_S) == -signal.SIGKILL
    (tmp_path / "children.json").write_text("{'half")
    assert ChildrenFile(tmp_path).living_names(["same"]) == []


ORPHAN = """
import sys, threading
from pathlib import Path
from memserve.protocol.messages import Peer
from memserve.journal import survivors
survivors.LOOK_S, survivors.ORPHAN_S = 0.01, 0.3
router = [Peer("router", 1)]
looks, looked, is_locked = [], threading.Condition(), survivors.is_locked
def look(folder):
    with looked:
        looks.append(is_locked(folder))
        looked.notify_all()
    return looks[-1]
def wait_for_looks(count):
    with looked:
        looked.wait_for(lambda: len(looks) >= count)
survivors.is_locked = look
survivors.end_when_orphaned(Path(sys.argv[1]), lambda: router[0])
wait_for_looks(3)
print("up", flush=True)
router[0] = Peer("router", int(sys.stdin.readline()))
print("ok", flush=True)
sys.stdin.readline()
wait_for_looks(len(looks) + 80)  # in more time than its patience
"""


@pytest.mark.parametrize(
    ("is_held", "router", "status"),
    [(True, 1, 0), (False, 1, -signal.SIGTERM), (False, 2, 0)],
    ids=["its router lives", "its router is gone", "another router has taken over"],
)
def test_an_orphan_waits_for_a_while_and_then_ends(tmp_path: Path, is_held: bool, router: int, status: int) -> None:
    folder = StateFolder(tmp_path)
    command = [sys.executable, "-c", ORPHAN, str(tmp_path)]
    orphan = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert orphan.stdout.readline() == "up\n", "it has seen the lock"
    if router == 1 and not is_held:
        folder.close()
    orphan.stdin.write(f"{router}\n")
    orphan.stdin.flush()
    if router != 1:
        assert orphan.stdout.readline() == "ok\n"
        folder.close()
    orphan.stdin.close()
    assert orphan.wait(WAIT_S) == status
    if is_held:
        folder.close()
