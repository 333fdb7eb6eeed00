"""Metadata that is lost, damaged or odd is said loudly, by name; deleted text is in no file; other users read none."""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.journal import keeper as meta_keeper
from memserve.journal.folder import FileMedium, StateFolder
from memserve.journal.keeper import MetadataPlace, MetaKeeper, metadata_place, open_metadata
from memserve.journal.store import MediumFailed, Store
from memserve.journal.survivors import ChildrenFile
from memserve.protocol.peers import Peer
from memserve.protocol.records import (
    AnyRecord,
    DocumentDropped,
    DocumentPut,
    HandleDropped,
    HandlePinned,
    RouterStarted,
)
from memserve_lab.sim.faulty_medium import FaultyMedium
from meta_etcd_server import ETCD, running_etcd
from meta_records import Drawn
from mutations import mutated
from waiting import eventually

WAIT_S = 30.0
NEEDS_ETCD = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")
TEXT = b"the text of a document that a client has deleted"
NEVER_NS = 1 << 62


def keep(keeper: MetaKeeper, *records: AnyRecord) -> None:
    done: queue.Queue[bool] = queue.Queue()
    keeper.write_durably(records, done.put)
    assert done.get(timeout=WAIT_S)


def open_once(folder: Path) -> None:
    with open_metadata(MetadataPlace(folder), lambda line: None) as kept:
        keep(kept.keeper, RouterStarted(kept.next_router("router", 5), "tcp://h:1"))
        kept.keeper.close()


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder that a router has used."""
    open_once(tmp_path / "state")
    return tmp_path / "state"


# -- loss and damage


@pytest.mark.parametrize("damage", [b"", b"memserve", bytes(4096), b"\xff" * 90])
def test_lost_or_damaged_journal_is_refused_by_name(used: Path, damage: bytes) -> None:
    (used / "journal").write_bytes(damage)
    with pytest.raises(UserError, match=r"the metadata is (lost|damaged)") as caught:
        open_once(used)
    assert str(used / "journal") in caught.value.message and "documents" in caught.value.hint
    assert (used / "journal").read_bytes() == damage  # it is still there to be repaired
    open_folder = StateFolder(used)  # and the lock was given back
    open_folder.close()


def test_missing_journal_is_logged_as_an_error(used: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_once(used)
    assert not caplog.records
    (used / "journal").unlink()
    open_once(used)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and str(used / "journal") in record.message
    assert "documents" in record.message


def test_a_journal_that_cannot_be_read_is_a_users_error(used: Path) -> None:
    (used / "journal").unlink()
    (used / "journal").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*journal"):
        open_once(used)


@pytest.mark.parametrize(("data", "words"), [(bytes(range(128, 256)), "it is no text"), (b" \n", "is empty")])
def test_invalid_secret_is_one_clear_line(used: Path, data: bytes, words: str) -> None:
    (used / "secret").write_bytes(data)
    with pytest.raises(UserError, match=words) as caught:
        open_once(used)
    assert str(used / "secret") in caught.value.message and caught.value.hint


ODD_CHILDREN = [
    "", "{'half", "[]", "7", '{"p1": 5}', '{"p1": {"pid": "x", "started": 1, "command": []}}', "[" * 100_000,
    '{"p1": {"pid": -1, "started": 1, "command": []}}', '{"p1": {"pid": 1e99, "started": 1, "command": []}}',
    '{"p1": {"pid": 99999999999999999999, "started": 1, "command": []}}',
    '{"p1": {"pid": 1, "started": 1, "command": [3]}}', '{"p1": {"pid": 1, "started": 1}}',
]  # fmt: skip


@pytest.mark.parametrize("text", ODD_CHILDREN, ids=range(len(ODD_CHILDREN)))
def test_damaged_children_list_is_reported_and_ends_no_process(text: str, tmp_path: Path, caplog) -> None:
    (tmp_path / "children.json").write_text(text)
    file = ChildrenFile(tmp_path)
    assert file.living_names(["p1"]) == []
    file.end_useless({})
    assert str(tmp_path / "children.json") in caplog.records[0].message
    (tmp_path / "children.json").write_bytes(b"\xff\xfe")
    assert ChildrenFile(tmp_path).living_names(["p1"]) == []


def test_unwritable_children_file_does_not_end_the_supervisor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ChildrenFile(tmp_path / "gone")
    file.record_start("p1", os.getpid(), ["x"])
    assert file.living_names(["p1"]) == ["p1"] and caplog.records[0].levelno == logging.ERROR


def test_a_password_for_etcd_is_not_taken_from_the_command_line() -> None:
    with pytest.raises(UserError, match="must not hold a password") as caught:
        metadata_place("etcd://root:hunter2@10.0.0.1:2379", 0)
    assert "hunter2" not in str(caught.value)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as host:
        yield host


@NEEDS_ETCD
@pytest.mark.parametrize(
    ("current", "words"),
    [(b"abc", "current is b'abc', and no number"), (b"-1", "no number"), (b"9" * 99, "no number"), (b"7", "is lost"),
     (None, "no /memserve/.*/current")],
)  # fmt: skip
def test_an_etcd_whose_current_names_no_journal_is_refused(etcd: str, current: bytes | None, words: str) -> None:
    from memserve.journal.etcd import EtcdMedium

    def opened() -> EtcdMedium:
        medium = EtcdMedium([etcd], name=f"odd-{(current or b'none')[:9].decode()}")
        medium.await_election("test", lambda leader: None, lambda: None)
        return medium

    keeper = MetaKeeper(opened())
    keep(keeper, RouterStarted(Peer("router", 1), "tcp://h:1"))
    keeper.close()
    medium = opened()
    medium.load()
    medium.replace(medium.load())  # a second journal
    key = medium._key_of("current")
    medium._call_and_wait(lambda client: client.delete(key) if current is None else client.put(key, current))
    medium.close()
    with pytest.raises(UserError, match=words) as caught:
        MetaKeeper(opened())
    assert "/memserve/odd-" in caught.value.message and caught.value.hint


# -- deleted text


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def document(body: bytes = TEXT, expires_ns: int = NEVER_NS) -> DocumentPut:
    return DocumentPut("tenant", "doc", body, expires_ns)


WAYS_TO_GO = {
    "deleted": (document(), DocumentDropped("tenant", "doc")),
    "replaced": (document(), document(b"another")),
    "unpinned": (HandlePinned("tenant", "h", TEXT, NEVER_NS // 2), HandleDropped("tenant", "h")),
}


@pytest.mark.parametrize("way", WAYS_TO_GO)
def test_deleted_text_is_soon_in_no_file(way: str, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``ERASE_S``, here 50 ms; nothing else has to happen for it."""
    monkeypatch.setattr(meta_keeper, "ERASE_S", 0.05)
    monkeypatch.setattr(meta_keeper, "NOTES_SYNC_S", 0.02)
    came, went = WAYS_TO_GO[way]
    keeper = MetaKeeper(FileMedium(used))
    keep(keeper, came)
    assert TEXT in everything_in(used)
    keep(keeper, went)
    eventually(lambda: TEXT not in everything_in(used))
    keeper.close()


@pytest.mark.parametrize("way", WAYS_TO_GO)
def test_deleted_text_leaves_the_folder_when_the_router_closes(way: str, used: Path) -> None:
    keeper = MetaKeeper(FileMedium(used))
    keep(keeper, *WAYS_TO_GO[way])
    assert TEXT in everything_in(used)  # a minute has not passed
    keeper.close()
    assert TEXT not in everything_in(used)


def test_expired_text_is_erased_like_deleted_text(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_keeper, "ERASE_S", 0.0)
    monkeypatch.setattr(meta_keeper, "NOTES_SYNC_S", 0.02)
    now_ns = [1000]
    keeper = MetaKeeper(FileMedium(used), wall_ns=lambda: now_ns[0])
    keep(keeper, document(expires_ns=2000))
    keep(keeper, RouterStarted(Peer("router", 9), "tcp://h:1"))
    assert TEXT in everything_in(used)
    now_ns[0] = 2000
    eventually(lambda: TEXT not in everything_in(used))
    keeper.close()


def test_a_crash_leaves_no_deleted_text_for_ever(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the journal as it was, and in a checkpoint that was being written."""
    monkeypatch.setattr(meta_keeper, "ERASE_S", 0.0)
    medium = FileMedium(used)
    store = Store(medium)
    store.write_records(WAYS_TO_GO["deleted"])
    medium.close()
    (used / "journal.new").write_bytes(TEXT)
    keeper = MetaKeeper(FileMedium(used))
    eventually(lambda: TEXT not in everything_in(used))
    keeper.close()


def test_nothing_is_rewritten_as_long_as_nothing_was_deleted() -> None:
    medium = FaultyMedium()
    store = Store(medium)
    drawn = Drawn(3)
    store.write_records([document(), document(), HandlePinned("t", "h", TEXT, 1), HandleDropped("t", "x")])
    assert not store.holds_deleted
    store.write_records([DocumentDropped("tenant", "doc")])
    assert store.holds_deleted
    assert Store(medium).holds_deleted  # the next router finds it out by reading
    medium.room_bytes = 10
    with pytest.raises(MediumFailed):
        store.write_checkpoint()
    assert store.holds_deleted
    medium.room_bytes = None
    store.write_checkpoint()
    assert not store.holds_deleted and TEXT in medium.load()  # of the handle
    store.write_records([drawn.record()])
    assert not store.holds_deleted


# -- for their owner alone


def modes(folder: Path) -> dict[str, str]:
    found = {path.name: path for path in folder.iterdir()} | {".": folder}
    return {name: oct(stat.S_IMODE(path.stat().st_mode)) for name, path in sorted(found.items())}


def test_all_of_a_state_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    before = os.umask(0)
    try:
        open_once(folder)
        ChildrenFile(folder).record_start("p1", os.getpid(), ["x"])
        wanted = {".": "0o700", "lock": "0o600", "secret": "0o600", "journal": "0o600", "children.json": "0o600"}
        assert modes(folder) == wanted
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)  # as an older memserve, or a backup, may have left it
        open_once(folder)
        assert modes(folder) == wanted
        (folder / "others").touch(mode=0o644)
        folder.chmod(0o755)
        open_once(folder)
        assert modes(folder) == wanted | {".": "0o755", "others": "0o644"}  # not ours to close
    finally:
        os.umask(before)


def test_folder_writable_by_others_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "others").touch()
    tmp_path.chmod(0o777)
    open_once(tmp_path)
    assert "chmod 700" in caplog.text


# -- at random


@pytest.mark.parametrize("seed", range(150))
def test_a_mutated_state_folder_is_refused_in_one_line_or_works(seed: int, tmp_path: Path) -> None:
    rng, folder = random.Random(seed), tmp_path / "state"
    folder.mkdir(mode=0o700)
    store = Store(FileMedium(folder))
    drawn = Drawn(seed)
    for _ in range(5):
        store.write_records([drawn.record() for _ in range(3)])
        store.sync()
    store.close()
    (folder / "secret").write_text("0123456789abcdef0123456789abcdef\n")
    child = {"pid": (1 << 31) - 1, "started": 12345, "command": ["memserve", "instance", "--join", "tcp://h:1"]}
    (folder / "children.json").write_text(json.dumps({"p1": child, "d1": child}))
    path = folder / rng.choice(["journal", "journal", "secret", "children.json"])
    path.write_bytes(mutated(path.read_bytes(), rng))
    try:
        open_once(folder)
    except UserError as error:
        assert error.hint and "\n" not in str(error) and len(str(error)) < 600 and str(folder) in error.message
    file = ChildrenFile(folder)
    assert file.living_names(["p1", "d1"]) == []
    file.end_useless({})
