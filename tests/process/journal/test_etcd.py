"""etcd with three members of which one and then two die, with members that hang, with TLS and with users: nothing that
was acknowledged is lost, and without a quorum service goes on and says what it cannot promise."""

from __future__ import annotations

import dataclasses
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from memserve.base.errors import UserError
from memserve.cli.credentials import etcd_access
from memserve.journal import etcd as meta_etcd
from memserve.journal import keeper as meta_keeper
from memserve.journal.etcd import EtcdAccess, EtcdMedium
from memserve.journal.keeper import MetaKeeper, metadata_place
from memserve.journal.store import MediumFailed, Store
from memserve.protocol.records import SessionRouted
from meta_etcd_server import ETCD, OPENSSL, Certificates, EtcdCluster
from ports import free_port
from served_cluster import Server
from tiny_models import prompt, save_folder, tiny_module
from waiting import eventually

WAIT_S = 60.0
pytestmark = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")
NEEDS_OPENSSL = pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed: there are no certificates")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path, 3)
    yield cluster
    cluster.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An election among members that get little of the processor takes longer than a call may, and than a lease lasts;
    these tests are about what comes of it. ``undo()`` is the end of the patience."""
    with monkeypatch.context() as longer:
        longer.setattr(meta_etcd, "_CALL_S", 15.0)
        longer.setattr(meta_etcd, "LEASE_S", 15)
        yield longer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls") / "certificates")


def elected(cluster: EtcdCluster, access: EtcdAccess | None = None, lost: threading.Event | None = None) -> EtcdMedium:
    medium = EtcdMedium(cluster.hosts, "test", access)
    medium.await_election("me", lambda leader: None, (lost or threading.Event()).set)
    return medium


class Journal:
    """A keeper whose records are counted: what it has acknowledged, and what it could not promise."""

    def __init__(self, medium: EtcdMedium) -> None:
        self.keeper, self._count = MetaKeeper(medium), 0
        self.acknowledged: list[str] = []

    def write(self) -> bool:
        """One record, and whether it is durable."""
        name, done = f"s{self._count}", queue.Queue[bool]()
        self._count += 1
        self.keeper.write_durably([SessionRouted("", name, ())], done.put)
        is_durable = done.get(timeout=WAIT_S)
        if is_durable:
            self.acknowledged.append(name)
        return is_durable


# -- members that die


def test_etcd_members_die_and_one_returns(
    three: EtcdCluster, monkeypatch: pytest.MonkeyPatch, patience: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_keeper, "REPAIR_S", 0.2)
    monkeypatch.setattr(meta_keeper, "NOTES_SYNC_S", 0.05)
    lost, standing_by = threading.Event(), queue.Queue[str]()
    medium = elected(three, lost=lost)
    journal, keeper = (made := Journal(medium)), made.keeper
    second = EtcdMedium(three.hosts, "test")
    wins = threading.Thread(target=second.await_election, args=("second", standing_by.put, lambda: None))
    wins.start()
    assert standing_by.get(timeout=WAIT_S) == "me"
    assert all(journal.write() for _ in range(5))

    three.kill(0)  # the member that is asked first
    assert all(journal.write() for _ in range(5)) and keeper.durability().is_kept

    patience.undo()
    three.kill(1)  # no quorum: clear answers, in time, and nothing piles up
    asked = time.monotonic()
    assert not journal.write() and time.monotonic() - asked < 2 * meta_etcd._CALL_S + 2
    assert not keeper.durability().is_kept and keeper.durability().failures and keeper.durability().lag_ns > 0
    for number in range(20_000):
        keeper.note([SessionRouted("", f"n{number % 10}", ())])
    eventually(keeper._inbox.empty, WAIT_S)
    assert not journal.write() and sum(map(len, medium._pending)) < 1 << 20
    assert not lost.is_set() and wins.is_alive()

    three.start(0)  # two of three again
    eventually(journal.write, WAIT_S)
    assert keeper.durability().is_kept and not lost.is_set()
    acknowledged = list(journal.acknowledged)
    assert len(acknowledged) > 10

    three.kill(2)  # the only one that had all from the beginning, but for what has been copied
    three.start(1)
    eventually(journal.write, WAIT_S)
    keeper.close()
    wins.join(WAIT_S)
    assert not wins.is_alive()
    known = {name for _, name in Store(second).state.sessions}
    assert set(journal.acknowledged) <= known and {f"n{number}" for number in range(10)} <= known
    second.close()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_hanging_etcd_member_causes_a_short_delay(three: EtcdCluster, number: int, patience: object) -> None:
    """Whichever it is: the one that is asked, or the leader of the others."""
    lost = threading.Event()
    journal = Journal(elected(three, lost=lost))
    assert journal.write()
    three.stop(number)
    assert all(journal.write() for _ in range(10)) and not lost.is_set()
    three.go_on(number)
    assert journal.write() and not lost.is_set()
    journal.keeper.close()


def test_an_election_among_the_members_is_waited_for(three: EtcdCluster, patience: object) -> None:
    """Each member dies in turn, so the leader does; the next call comes right behind the kill."""
    journal = Journal(elected(three))
    for number in range(3):
        assert journal.write()
        three.kill(number)
        assert journal.write(), f"without member {number}"
        three.start(number)
    assert journal.keeper.durability().failures == 0
    journal.keeper.close()


def test_standby_starts_with_any_member_and_waits_for_quorum(three: EtcdCluster) -> None:
    first = elected(three)
    Journal(first).keeper.close()  # leaves at once
    three.kill(0)
    active = elected(three)
    active.load()
    active.replace(b"what is kept")
    standby, told = EtcdMedium(three.hosts, "test"), queue.Queue[str]()
    wins = threading.Thread(target=standby.await_election, args=("standby", told.put, lambda: None))
    wins.start()
    assert told.get(timeout=WAIT_S) == "me"
    three.kill(1)
    with pytest.raises(MediumFailed):
        active.replace(b"what is lost")
    assert wins.is_alive()
    with pytest.raises(UserError, match="no etcd answers"):  # one that starts now says so, and does not hang
        EtcdMedium(three.hosts, "test")
    active._refresher.cancel()
    three.start(1)
    wins.join(WAIT_S)
    assert not wins.is_alive() and standby.load() == b"what is kept"
    standby.close()


def test_a_checkpoint_whose_answer_was_lost_is_not_written_over(tmp_path: Path, monkeypatch) -> None:
    """The quorum went away right when the number of the new journal was written: the write counts all the same."""
    cluster = EtcdCluster(tmp_path)
    medium = elected(cluster)
    medium.load()
    medium.replace(b"first")
    write, writes = EtcdMedium._guarded, list[int]()

    def write_and_lose(fails_at: int, counts: bool) -> None:
        def guarded(self: EtcdMedium, *arguments: object) -> None:
            writes.append(1)
            if len(writes) < fails_at or counts:
                write(self, *arguments)
            if len(writes) == fails_at:
                raise MediumFailed("no answer")

        writes.clear()
        monkeypatch.setattr(EtcdMedium, "_guarded", guarded)

    write_and_lose(3, counts=True)  # old pieces, new pieces, the number
    with pytest.raises(MediumFailed):
        medium.replace(b"second")
    write_and_lose(2, counts=False)  # the router dies in the middle of the next attempt
    with pytest.raises(MediumFailed):
        medium.replace(b"third")
    monkeypatch.setattr(EtcdMedium, "_guarded", write)
    medium.close()
    after = elected(cluster)
    assert after.load() == b"second"
    after.replace(b"fourth")
    assert after.load() == b"fourth"
    pieces = after._call_and_wait(lambda client: client.get_prefix(after._key_of("journal/"), keys_only=True))
    assert len(list(pieces)) == 1
    after.close()
    cluster.close()


# -- TLS and users


@NEEDS_OPENSSL
def test_tls_with_a_certificate_of_the_client_and_a_user(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = EtcdCluster(tmp_path, 1, certificates)
    try:
        cluster.demand_users("memserve", "a password")
        right = etcd_access(credentials_file(tmp_path, certificates, "user = memserve\npassword = a password\n"))
        assert right is not None and right.tls and "a password" not in repr(right) and "PRIVATE" not in repr(right)
        journal = Journal(elected(cluster, right))
        assert journal.write()

        other = Certificates.make(tmp_path / "others")
        monkeypatch.setattr(meta_etcd, "_CALL_S", 1.0)  # for the connections that do not come about
        wrong = {
            "no TLS": EtcdAccess(user=right.user, password=right.password),
            "no certificate": dataclasses.replace(right, certificate=None, key=None),
            "another CA": dataclasses.replace(right, ca=other.ca.read_bytes()),
            "certificate of another CA": dataclasses.replace(
                right, certificate=other.client[0].read_bytes(), key=other.client[1].read_bytes()
            ),
            "wrong password": dataclasses.replace(right, password="another password"),
            "no user": dataclasses.replace(right, user="", password=""),
        }
        for what, access in wrong.items():
            with pytest.raises(UserError, match="no etcd answers") as caught:
                EtcdMedium(cluster.hosts, "test", access)
            assert "a password" not in caught.value.message and "another" not in caught.value.message, what
        monkeypatch.undo()
        with pytest.raises(MediumFailed, match="permission denied"):  # the user may do no more than a router must
            journal.keeper._store._medium._call_and_wait(lambda client: client.put(b"/others", b"x"))

        cluster.kill(0)  # and its tokens with it
        cluster.start(0)
        eventually(journal.write, WAIT_S)
        journal.keeper.close()
        again = elected(cluster, right)
        assert set(journal.acknowledged) <= {name for _, name in Store(again).state.sessions}
        again.close()
    finally:
        cluster.close()


def credentials_file(folder: Path, certificates: Certificates, user: str) -> Path:
    certificate, key = certificates.client
    path = folder / "etcd.conf"
    path.write_text(f"# what etcd asks for\nca = {certificates.ca}\ncert = {certificate}\nkey = {key}\n{user}")
    path.chmod(0o600)
    return path


# -- a whole server


@NEEDS_OPENSSL
def test_server_serves_without_quorum_and_refuses_promises(tmp_path: Path, certificates: Certificates) -> None:
    """Three members with TLS and a user. Documents are what a client is promised; a stream is under way meanwhile."""
    model = save_folder(tiny_module("llama"), tmp_path / "tiny")
    cluster, servers = EtcdCluster(tmp_path, 3, certificates), list[Server]()
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    cluster.demand_users("memserve", "a password")
    access = credentials_file(tmp_path, certificates, "user = memserve\npassword = a password\n")

    def serve() -> Server:
        flags = ["--colocated", "1", "--cluster-port", str(free_port()), "--cluster-secret-file", str(secret)]
        flags += ["--metadata", f"etcd://{','.join(cluster.hosts)}/test", "--metadata-credentials", str(access)]
        servers.append(Server(model, *flags))
        return servers[-1]

    def put(name: str) -> int:
        body = {"json": {"text": f"the text of {name}", "endpoint": "completions"}, "timeout": WAIT_S}
        status = httpx.put(f"{servers[-1].url}/documents/{name}", **body).status_code
        promised.extend([name] if status == 201 else [])
        return status

    promised: list[str] = []
    question = [int(token) for token in prompt(70, 1)]
    try:
        answer = serve().complete(question, 40)
        assert put("first") == 201
        cluster.kill(0)
        assert put("second") == 201

        body = {"model": "tiny", "prompt": question, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{servers[-1].url}/completions", json=body | {"stream": True}, timeout=WAIT_S
        ) as got:
            lines = got.iter_lines()
            assert next(lines).startswith("data: {")
            cluster.kill(1)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # what is under way goes on
        assert put("unsure") == 503
        assert servers[-1].complete(question, 40) == answer
        assert httpx.get(f"{servers[-1].url}/documents/first", timeout=WAIT_S).status_code == 200

        cluster.start(0)
        eventually(lambda: put(f"again-{time.monotonic_ns()}") == 201, WAIT_S)
        servers[-1].process.send_signal(signal.SIGKILL)
        servers[-1].process.wait()
        serve()
        for name in promised:
            assert httpx.get(f"{servers[-1].url}/documents/{name}", timeout=WAIT_S).status_code == 200, name
        assert len(promised) >= 3 and servers[-1].complete(question, 40) == answer
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.process.wait(WAIT_S)
        cluster.close()


# -- what may stand in the file


def test_where_credentials_for_etcd_may_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert etcd_access(None) is None
    monkeypatch.setenv("MEMSERVE_ETCD_USER", "u")
    monkeypatch.setenv("MEMSERVE_ETCD_PASSWORD", "p")
    assert etcd_access(None) == EtcdAccess(user="u", password="p")
    assert etcd_access(None) is None  # taken out of the environment: children inherit none
    file = tmp_path / "etcd.conf"
    file.write_text("ca = system\nuser = v\npassword = q = r\n")
    file.chmod(0o600)
    monkeypatch.setenv("MEMSERVE_ETCD_USER", "u")
    assert etcd_access(file) == EtcdAccess(tls=True, user="v", password="q = r")
    with pytest.raises(UserError, match="credentials for etcd, and no etcd"):
        metadata_place("none", 8000, EtcdAccess(user="u", password="p"))
    assert metadata_place("etcd://a:1", 8000, EtcdAccess(tls=True)).access.tls


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user = u\n", "needs both a user and a password"),
        ("password = p\n", "needs both a user and a password"),
        ("cert = a.pem\nkey = a.key\n", "has no ca"),
        ("ca = system\ncert = a.pem\n", "half a client certificate"),
        ("ca = /nowhere/ca.pem\n", "cannot read etcd's CA in /nowhere/ca.pem"),
        ("passwort = hunter2\n", "line 1 of .* is not a setting"),
        ("# fine\n\nuser hunter2\n", "line 3 of .* is not a setting"),
        ("user = a\nuser = hunter2\n", "line 2 of .* is not a setting"),
    ],
)
def test_bad_etcd_credentials_are_refused_without_echoing_them(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "etcd.conf"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UserError, match=words) as caught:
        etcd_access(file)
    assert "hunter2" not in caught.value.message and caught.value.hint
    file.chmod(0o622)
    with pytest.raises(UserError, match="other users may write"):
        etcd_access(file)
