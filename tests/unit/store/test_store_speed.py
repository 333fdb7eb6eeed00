"""A store reads a little of its disks at its start: of real files, slow ones and ones that stand still."""

from __future__ import annotations

import errno
import random
import threading
import time
from pathlib import Path

import pytest

from disk_files import FaultyQueue, Files
from faulty_store import Faults
from faulty_store import FaultyQueue as SlowQueue
from kv_floats import floats
from memserve import _core
from memserve.base.units import MIB, NS_PER_MS, NS_PER_S
from memserve.store.disks.disks import DisksConfig
from memserve.store.host.disks import DiskHost
from memserve.store.host.files import measured_curve, spans_to_read
from waiting import eventually

SIZE = 64 * MIB
LENGTH = 737_280


def filled(folder: Path, count: int = 12) -> None:
    rng = random.Random(2)
    files = Files([(folder, SIZE)], unit_bytes=4096)
    for _ in range(count):
        assert files.write(rng.randbytes(16), 4096, rng.randbytes(LENGTH))
    files.close()


def host_of(folder: Path) -> DiskHost:
    return DiskHost([(folder, SIZE)], DisksConfig())


def logs_of(host: DiskHost) -> list[tuple[Path, _core.SegmentLog]]:
    return [(file.path, file.log) for file in host._files]


def test_empty_file_gives_no_curve(tmp_path: Path) -> None:
    host = host_of(tmp_path / "a")
    assert host.read_curve() is None
    assert host.close()
    assert DiskHost([], DisksConfig()).read_curve() is None


def test_file_with_values_gives_a_curve_quickly(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    host = host_of(tmp_path / "a")
    began = time.monotonic()
    curve = host.read_curve()
    assert time.monotonic() - began < 5.0
    assert curve is not None and 0 < curve.byte_ns < 1000 and curve.start_ns >= 0
    assert host.close()


def test_empty_disk_of_two_gives_no_read_curve(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    host = DiskHost([(tmp_path / "a", SIZE), (tmp_path / "b", SIZE)], DisksConfig())
    assert host.read_curve() is None
    assert host.close()


def test_a_slow_disk_is_known_as_slow(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    host = host_of(tmp_path / "a")

    (tmp_path / "faults.json").write_text('{"rate": 50e6, "delay_s": 0.01}')
    faults = Faults(tmp_path / "faults.json")

    def is_known() -> bool:
        slow = measured_curve(
            logs_of(host), lambda path: SlowQueue(_core.DiskQueue(path), faults), within_ns=20 * NS_PER_S
        )
        return slow is not None and 15 < slow.byte_ns < 60 and slow.ns(LENGTH) > 20 * NS_PER_MS

    assert any(is_known() for _ in range(3)), "a busy machine delays short reads more than long ones, now and then"
    assert host.close()


def test_stalled_disk_does_not_delay_startup(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    host, made = host_of(tmp_path / "a"), []

    def still(path: str) -> FaultyQueue:
        made.append(FaultyQueue(path, []))
        made[-1].through.clear()
        return made[-1]

    began = time.monotonic()
    curve = measured_curve(logs_of(host), still)
    assert time.monotonic() - began < 5.0
    assert curve is not None and curve.byte_ns * LENGTH >= 100 * NS_PER_MS
    eventually(lambda: made)  # on a busy machine the measuring thread may only begin now
    made[0].through.set()
    assert host.close()
    for thread in threading.enumerate():
        if thread.name == "memserve-disk-speed":
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("fails", ["read", "open"])
def test_failing_disk_gives_no_curve(tmp_path: Path, fails: str) -> None:
    filled(tmp_path / "a")
    host = host_of(tmp_path / "a")

    def failing(path: str) -> FaultyQueue:
        if fails == "open":
            raise OSError(errno.EMFILE, "too many files")
        queue = FaultyQueue(path, [])
        queue.fails = lambda kind: errno.EIO
        return queue

    assert measured_curve(logs_of(host), failing, within_ns=20 * NS_PER_S) is None
    assert host.close()


def test_encoded_values_are_read_for_the_curve_as_they_will_be(tmp_path: Path) -> None:
    config = DisksConfig(admission="all", kv_codec="always")
    files = Files([(tmp_path, SIZE)], config)
    for number in range(8):
        assert files.write(bytes([number]) * 16, 0, floats("bfloat16", 500_000, number).tobytes())
    files.close()
    host = DiskHost([(tmp_path, SIZE)], config)
    spans = spans_to_read(host.logs[0])
    assert [span.value_bytes for span in spans] == [500_000] * 8 and all(span.nbytes < 400_000 for span in spans)
    curve = host.read_curve()
    assert curve is not None and curve.byte_ns > 0
    host.close()
