"""The options of the store that ``memserve serve`` starts: sizes, refusals, and what its process is told."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from memserve.base.config import ClusterConfig, EngineOptions, MemberConfig
from memserve.base.deployment import StoreOptions, read_folders, refuse_store
from memserve.base.errors import UserError
from memserve.base.options import from_keywords, options_of
from memserve.base.types import Caching, Role
from memserve.base.units import GIB, MIB, NS_PER_S
from memserve.cli import doctor
from memserve.cli.cluster.members import DECLINED_S, JOIN_S, ClusterOptions, NamedStore, _orders, find_store
from memserve.cli.cluster.store import disks_config
from memserve.cli.main import run
from memserve.host.supervisor import ChildOrder
from memserve.protocol.peers import Peer
from memserve.router.events import MemberChange, ReportMember
from memserve.store.host.files import SECRET, store_secret, stored_secret, with_absolute_folders


def test_folders_and_sizes_are_read() -> None:
    asked = from_keywords(StoreOptions(), {"ssd": ["/mnt/a=20GiB", "/mnt/b/x=y=1.5GiB"], "ssd_sync": "always"})
    assert asked.folders == (("/mnt/a", 20 * GIB), ("/mnt/b/x=y", 3 * GIB // 2))
    assert asked.is_wanted and asked.memory_bytes == GIB
    (shown,) = [one.flag_default for one in options_of(asked) if one.flag == "--ssd"]
    assert read_folders(shown) == asked.folders, "what a flag shows is what it reads"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ssd": ["/mnt/a"]}, "cannot read --ssd '/mnt/a'"),
        ({"ssd": ["=20GiB"]}, "cannot read"),
        ({"ssd": ["/mnt/a=lots"]}, "as a size"),
        ({"ssd": ["/mnt/a=1MiB"]}, "too small"),
        ({"ssd": ["/mnt/a=1GiB", "/mnt/a=2GiB"]}, "twice"),
        ({"ssd": ["/mnt/a=1GiB"], "ssd_sync": "often"}, "unknown --ssd-sync 'often'"),
        ({"ssd": ["/mnt/a=1GiB"], "ssd_admission": "some"}, "unknown --ssd-admission"),
        ({"ssd_sync": "always"}, "does nothing without a disk"),
        ({"ssd_writes_per_day": "1GiB"}, "does nothing without a disk"),
        ({"store": "h:1", "ssd": ["/mnt/a=1GiB"]}, "--store names a store that runs, and --ssd starts one"),
        ({"store": "h:1", "store_dram": "1GiB"}, "and --store-dram starts one"),
        ({"store": "h:1", "store_listen": "h:2"}, "and --store-listen starts one"),
        ({"store": "h:1", "ssd_sync": "always"}, "give it to the `memserve store` that runs there"),
    ],
)
def test_invalid_store_options_are_refused_in_one_line(wrong, words) -> None:
    with pytest.raises(UserError, match=words):
        from_keywords(StoreOptions(), wrong)


def test_folders_are_absolute_and_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_folders(StoreOptions((("kv", GIB),))).folders == ((str(tmp_path / "kv"), GIB),)
    with pytest.raises(UserError, match="twice"):
        with_absolute_folders(StoreOptions((("kv", GIB), (str(tmp_path / "kv"), GIB))))


def test_no_store_is_started_unasked() -> None:
    assert not StoreOptions().is_wanted
    for asked in ({"dram_bytes": 64 * MIB}, {"address": "127.0.0.1:7500"}, {"folders": (("/a", GIB),)}):
        assert StoreOptions(**asked).is_wanted


def test_a_store_that_runs_is_used_and_none_is_started() -> None:
    store = StoreOptions(at="127.0.0.1:7100")
    assert store.is_used and not store.is_wanted and not StoreOptions().is_used
    assert StoreOptions(dram_bytes=64 * MIB).is_used
    with pytest.raises(UserError, match="--store needs the secret of that store"):
        ClusterOptions(store=store)
    ClusterOptions(store=store, secret="a secret of the tests")
    off = ClusterConfig(caching=Caching.OFF)
    with pytest.raises(UserError, match="none of them caches"):
        ClusterOptions(store=store, secret="a secret of the tests", config=off)


def test_a_store_on_another_host_must_reach_the_router() -> None:
    with pytest.raises(UserError, match=r"cannot reach a router at 127\.0\.0\.1") as caught:
        find_store("192.0.2.1:7100", "a secret of the tests", "127.0.0.1", print)
    assert "--cluster-host" in (caught.value.hint or "")


def test_a_store_that_does_not_join_is_given_up() -> None:
    """A router that it has may be found to be gone; then nothing can be said but that it does not come."""
    named, engine = NamedStore("s", "h:1"), SimpleNamespace(declined={}, address="tcp://h:2")
    named.check_joins(engine, JOIN_S)
    with pytest.raises(UserError, match="answers, and has not joined for 61 s"):
        named.check_joins(engine, JOIN_S + 1)
    why = "s belongs to the router at tcp://h:3"
    engine.declined["another"] = ReportMember(MemberChange.DECLINED, Peer("another", 1), "", why)
    named.check_joins(engine, DECLINED_S + 1)
    engine.declined["s"] = ReportMember(MemberChange.DECLINED, Peer("s", 1), "", why)
    named.check_joins(engine, DECLINED_S)
    with pytest.raises(UserError, match="does not join: s belongs to the router at tcp://h:3"):
        named.check_joins(engine, DECLINED_S + 1)
    assert MemberConfig().silent_after_ns + 2 * ClusterConfig().call_every_ns < DECLINED_S * NS_PER_S


def test_store_process_gets_all_options() -> None:
    store = StoreOptions((("/mnt/a", 5 * GIB),), 64 * MIB, "0.0.0.0:7500", "always", 9 * GIB, "all")
    order = ChildOrder("s1", Role.STORE, store.store_flags)
    command = order.command_line[order.command_line.index("memserve") :]
    assert command == [
        "memserve", "store", "--name", "s1", "--supervised", "--dram", str(64 * MIB), "--ssd-sync", "always",
        "--ssd-admission", "all", "--ssd", f"/mnt/a={5 * GIB}", "--ssd-writes-per-day", str(9 * GIB),
        "--listen", "0.0.0.0:7500",
    ]  # fmt: skip
    words = ChildOrder("c1", Role.COLOCATED, ()).command_line
    assert words[words.index("memserve") + 1 :][:3] == ["instance", "--role", "colocated"]


def test_single_engine_refuses_store_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="ssd needs a cluster"):
        refuse_store({"ssd": ["/mnt/a=1GiB"]})
    with pytest.raises(UserError, match="store needs a cluster"):
        refuse_store({"store": "h:1"})
    refuse_store({"threads": 2, "ssd": None})
    assert run(["serve", "--in-process", "--ssd", "/mnt/a=1GiB"]) != 0
    said = capsys.readouterr().err
    assert "--ssd needs a cluster" in said and "leave out --in-process" in said and len(said.splitlines()) <= 2


def test_where_nothing_is_cached_there_is_nothing_to_keep() -> None:
    with pytest.raises(UserError, match="none of them caches"):
        ClusterOptions(config=ClusterConfig(caching=Caching.OFF), store=StoreOptions((("/mnt/a", GIB),)))


# -- the secret beside the disks


def test_secret_is_stored_with_the_disks_readable_by_owner_only(tmp_path: Path) -> None:
    said: list[str] = []
    store = StoreOptions(((str(tmp_path / "new"), GIB), (str(tmp_path / "other"), GIB)))
    assert stored_secret(store) is None
    store_secret(store, "first", said.append)
    file = tmp_path / "new" / SECRET
    assert stored_secret(store) == "first" and stat.S_IMODE(file.stat().st_mode) == 0o600
    store_secret(store, "first", said.append)
    assert not said and not (tmp_path / "other").exists()
    store_secret(store, "second", said.append)
    assert stored_secret(store) == "first" and "of another cluster" in said[0]


def test_without_disks_no_secret_is_kept() -> None:
    store_secret(StoreOptions(dram_bytes=GIB), "first", print)
    assert stored_secret(StoreOptions(dram_bytes=GIB)) is None


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot"):
        store_secret(StoreOptions(((str(tmp_path / "file"), GIB),)), "first", print)
    (tmp_path / SECRET).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="it is no text"):
        stored_secret(StoreOptions(((str(tmp_path), GIB),)))


def test_doctor_looks_at_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(ssd: str) -> doctor.Finding:
        (finding,) = doctor.check_disks([ssd])
        return finding

    assert of(f"{tmp_path}/not/there=64MiB").status is not doctor.Status.FAIL
    assert of(f"{tmp_path}=900000GiB").status is doctor.Status.FAIL
    (tmp_path / "file").write_text("")
    assert of(f"{tmp_path}/file=64MiB").status is doctor.Status.FAIL
    monkeypatch.setattr(doctor, "_takes_direct_io", lambda folder: False)
    assert of(f"{tmp_path}=64MiB").status is doctor.Status.WARN


# -- KV in fewer bytes


def test_members_and_store_get_the_codec_of_serve() -> None:
    options = ClusterOptions(store=StoreOptions((("/mnt/a", GIB),)))
    for asked in ("auto", "none", "always"):
        for order in _orders(EngineOptions(kv_codec=asked), options, "tcp://127.0.0.1:1", "info"):
            words = [*order.command_line, "--kv-codec", "auto"]  # left out, it is the default
            assert words[words.index("--kv-codec") + 1] == asked
    assert disks_config(options.store, "always").kv_codec == "always"


def test_unknown_codec_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="unknown --kv-codec 'zip'"):
        EngineOptions(kv_codec="zip")
    assert run(["store", "--listen", "127.0.0.1:1", "--kv-codec", "zip"]) != 0
    assert "unknown --kv-codec 'zip'" in capsys.readouterr().err
