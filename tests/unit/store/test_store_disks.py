"""The host of the disks: real files, both engines, whatever lengths and units values have."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from disk_files import Files, has_io_uring
from memserve.base.errors import UserError
from memserve.base.units import GIB, MIB, NS_PER_MS, NS_PER_S
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig
from memserve.store.disks.events import segment_bytes_for
from memserve.store.host.backends import FILE
from memserve.store.host.disks import DiskHost

SIZE = 16 * MIB


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "io_uring" and not has_io_uring(tmp_path):
        pytest.skip("this kernel or container allows no io_uring")
    return request.param


@pytest.mark.parametrize("unit_bytes", [4096, 9000])
def test_values_of_all_lengths_are_read_back_after_a_restart(tmp_path: Path, engine: str, unit_bytes: int) -> None:
    """With a unit of 9,000 bytes nothing is whole pages, and the next value begins right behind."""
    rng = random.Random(3)
    lengths = [0, 1, 64, 3990, 4016, 4017, 4096, 9000, 737_280, 500_001]
    if unit_bytes == 9000:
        lengths = [length for length in lengths if length <= 9000]
    values = {rng.randbytes(16): rng.randbytes(length) for length in lengths}
    files = Files([(tmp_path / "a", SIZE), (tmp_path / "b", SIZE)], engine=engine, unit_bytes=unit_bytes)
    for key, payload in values.items():
        assert files.write(key, unit_bytes, payload, name=b"n", scope=3)
    files.kill()
    files = Files([(tmp_path / "a", SIZE), (tmp_path / "b", SIZE)], engine=engine, unit_bytes=unit_bytes)
    assert len(files.disks) == len(values)
    for key, payload in values.items():
        for extent in (0, unit_bytes):  # on a page, and perhaps not
            files.bytes[:] = 77
            assert files.read(key, extent, len(payload)) == payload
            assert files.outcomes_of(ev.ReadEnded)[-1].name == b"n"
            unit_end = extent + -(-max(1, len(payload)) // unit_bytes) * unit_bytes
            assert (files.bytes[:extent] == 77).all() and (files.bytes[unit_end:] == 77).all(), (
                "other units were written"
            )
    files.disks.start_verification(files.now)
    files.settle()
    assert files.outcomes_of(ev.Verified)[-1].records == len(values)
    assert files.outcomes_of(ev.Verified)[-1].damaged == 0
    files.close()


def test_full_disks_go_round_and_what_is_wanted_moves(tmp_path: Path, engine: str) -> None:
    rng = random.Random(5)
    files = Files([(tmp_path, SIZE)], engine=engine)
    wanted = {rng.randbytes(16): rng.randbytes(length) for length in (100, 3000, 90_000, 50_001)}
    for key, payload in wanted.items():
        assert files.write(key, 0, payload)
    for _ in range(200):
        assert files.write(rng.randbytes(16), MIB, rng.randbytes(200_000))
        for key, payload in wanted.items():
            assert files.read(key, 2 * MIB, len(payload)) == payload
    counters = files.disks.counters()
    assert counters["moves"] >= 4 and counters["records_evicted"] > 50
    assert os.path.getsize(tmp_path / FILE) == SIZE, "the file never grows"
    files.close()


def test_a_bit_that_flips_in_the_file_is_noticed(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)])
    payload = bytes(range(256)) * 100
    assert files.write(b"k" * 16, 0, payload) and files.write(b"l" * 16, MIB, payload)
    files.close()
    data = (tmp_path / FILE).read_bytes()
    at = data.index(payload)
    with open(tmp_path / FILE, "r+b") as file:
        file.seek(at + 7777)
        file.write(bytes([data[at + 7777] ^ 16]))
    files = Files([(tmp_path, SIZE)])
    found = [files.read(key * 16, 0, len(payload)) for key in (b"k", b"l")]
    assert found == [None, payload] and files.disks.counters()["reads_damaged"] == 1
    assert files.outcomes_of(ev.Dropped) == [ev.Dropped(b"k" * 16)]
    files.close()


def test_a_stalled_disk_delays_no_reader_beyond_its_deadline(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], faulty=True)
    payload = bytes(20_000)
    assert files.write(b"k" * 16, 0, payload)
    files.queues[0].through.clear()
    read_id = files.disks.read_value(b"k" * 16, MIB, files.now, files.now + 30 * NS_PER_MS)
    assert read_id is not None
    files.tick(files.now + 30 * NS_PER_MS)
    assert files.outcomes[-1] == ev.ReadEnded(read_id, False, "late", extent_free=False)
    assert files.disks.read_value(b"k" * 16, MIB, files.now) is None
    writes = [files.disks.write_value(bytes([n]) * 16, 2 * MIB, 1, files.now) for n in range(40)]
    assert writes == [True] * 32 + [False] * 8 and files.disks.counters()["refused_busy"] == 8
    files.tick(files.now + 2 * NS_PER_S)
    files.queues[0].through.set()
    files.settle()
    assert ev.ExtentFree(read_id) in files.outcomes and files.read(b"k" * 16, MIB, len(payload)) == payload
    files.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writes_that_fail_are_dropped_and_counted(tmp_path: Path, code: int) -> None:
    files = Files([(tmp_path, SIZE)], faulty=True)
    assert files.write(b"k" * 16, 0, bytes(20_000))
    for n in range(3):
        left = [code]  # the record's write fails, and what wipes its place works
        files.queues[0].fails = lambda kind, left=left: left.pop() if kind == "write" and left else 0
        assert not files.write(bytes([n]) * 16, MIB, bytes(20_000))
    counters = files.disks.counters()
    assert (counters["writes_failed"], counters["device_errors"], counters["disks_lost"]) == (3, 3, 0)
    assert files.read(b"k" * 16, MIB, 20_000) == bytes(20_000)
    files.queues[0].fails = lambda kind: 0
    assert files.write(b"l" * 16, 0, bytes(20_000))
    files.close()


def test_full_disk_file_is_read_and_written_later(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], DisksConfig(admission="all", full_pause_ns=NS_PER_S), faulty=True)
    kept = [bytes([n]) * 16 for n in range(4)]
    for key in kept:
        assert files.write(key, 0, key * 1000)
    files.queues[0].fails = lambda kind: 0 if kind == "read" else errno.ENOSPC
    for n in range(12):
        assert not files.write(bytes([100 + n]) * 16, MIB, bytes(20_000))
    assert [outcome.why for outcome in files.outcomes_of(ev.DiskFull)] == ["ENOSPC"]
    assert not files.outcomes_of(ev.DiskLost)
    assert [files.read(key, 0, 16_000) for key in kept] == [key * 1000 for key in kept]
    files.queues[0].fails = lambda kind: 0
    files.tick(files.now + NS_PER_S)
    files.settle()
    assert files.outcomes_of(ev.DiskHasRoom) == [ev.DiskHasRoom(0)]
    assert files.write(b"l" * 16, 0, bytes(20_000))
    files.close()
    files = Files([(tmp_path, SIZE)])
    assert all(key in files.disks for key in [*kept, b"l" * 16])
    files.close()


def test_a_lost_disk_is_forgotten_and_the_other_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    places = [(tmp_path / "a", SIZE), (tmp_path / "b", SIZE)]
    files = Files(places, faulty=True)
    keys = [bytes([n]) * 16 for n in range(0, 250, 10)]
    for key in keys:
        assert files.write(key, 0, key * 1000)
    first = [key for key in keys if key in files.host.logs[0]]
    others = [key for key in keys if key not in first]
    assert first and others
    files.queues[0].fails = lambda kind: errno.EIO
    for key in first[:8]:
        assert files.read(key, 0, 16_000) is None
    assert files.outcomes_of(ev.DiskLost) == [ev.DiskLost(0, "EIO")]
    assert [files.read(key, 0, 16_000) for key in others] == [key * 1000 for key in others]
    assert files.write(first[0], 0, first[0] * 1000), "what it would have taken goes to the other"
    assert files.host.close()
    assert sum("is lost (EIO)" in record.message for record in caplog.records) == 1
    files = Files(places)
    assert {key for key in keys if key in files.disks} == {first[0], *others}
    assert not any(key in files.host.logs[0] for key in keys), "a restart begins anew on it"
    files.close()


def test_bad_places_are_one_clear_error(tmp_path: Path) -> None:
    config = DisksConfig()
    host = DiskHost([(tmp_path, SIZE)], config)
    with pytest.raises(UserError, match="in use"):
        DiskHost([(tmp_path, SIZE)], config)
    assert host.close() and oct(os.stat(tmp_path / FILE).st_mode & 0o777) == "0o600"
    with pytest.raises(UserError, match=r"has 16,777,216 bytes, not 33,554,432.*--ssd .*=16MiB"):
        DiskHost([(tmp_path, 2 * SIZE)], config)
    with pytest.raises(UserError, match="at least 16"):
        DiskHost([(tmp_path, MIB)], config)
    with pytest.raises(UserError, match="one folder"):
        DiskHost([(tmp_path, SIZE), (tmp_path / "x" / "..", SIZE)], config)
    with pytest.raises(UserError, match=r"File too large|No space.*smaller|make room"):
        DiskHost([(tmp_path / "huge", 1 << 60)], config)
    assert not (tmp_path / "huge" / FILE).exists(), "nothing is left of it"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot keep values"):
        DiskHost([(tmp_path / "file" / "dir", SIZE)], config)
    with pytest.raises(UserError):
        DiskHost([(tmp_path / "other", SIZE), (tmp_path, 2 * SIZE)], config)
    DiskHost([(tmp_path / "other", SIZE), (tmp_path, SIZE)], config).close()  # none was left locked
    truncated = (tmp_path / FILE).read_bytes()[: SIZE // 2]
    (tmp_path / FILE).write_bytes(truncated)
    Files([(tmp_path / "other", SIZE)]).close()


def test_segments_fit_the_disk() -> None:
    assert [segment_bytes_for(size) // MIB for size in (SIZE, GIB, 2 * GIB, 20 * GIB, 1000 * GIB)] == [
        1,
        32,
        64,
        256,
        256,
    ]
    assert segment_bytes_for(100_000 * GIB) == 2 * GIB


def test_no_disks_are_no_trouble() -> None:
    before = threading.active_count()
    files = Files([])
    assert not files.write(b"k" * 16, 0, b"x") and threading.active_count() == before
    files.close()
