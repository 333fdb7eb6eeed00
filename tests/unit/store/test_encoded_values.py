"""Values in fewer bytes on a store's disks: on real files, beside files and values that are as they were."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from disk_files import Files
from disks_world import DisksWorld
from kv_floats import floats
from memserve import _core
from memserve.base.errors import UserError
from memserve.base.units import MIB
from memserve.store.disks import events as ev
from memserve.store.disks.disks import DisksConfig
from memserve.store.host import disks
from memserve.store.host.backends import FILE
from memserve.store.host.disks import DiskCodec, DiskWay
from memserve.store.host.files import DiskFile
from memserve.system.kv_codec import CodecGate, CodecRates, KvCodec, measured_rates

SIZE = 32 * MIB
VALUE = 256 << 10
ALWAYS = DisksConfig(admission="all", kv_codec="always")
PLAIN = DisksConfig(admission="all")


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def value_of(number: int, nbytes: int = VALUE) -> bytes:
    return floats("bfloat16", nbytes, number).tobytes()


def version_of(folder: Path) -> list[int]:
    """Of both superblocks."""
    with (folder / FILE).open("rb") as file:
        pages = [file.read(4096), file.read(4096)]
    return [int.from_bytes(page[8:12], "little") for page in pages]


def test_encoded_values_come_back_and_take_fewer_bytes(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], ALWAYS)
    values = {key_of(n): value_of(n, nbytes) for n, nbytes in enumerate((VALUE, VALUE - 1, 20_001, 16_384, 9000, 100))}
    values[key_of(9)] = random.Random(1).randbytes(VALUE)  # does not become shorter
    for key, value in values.items():
        assert files.write(key, 0, value, name=b"name", scope=7)
    counters = files.disks.counters()
    assert counters["values_encoded"] == 4 and counters["encode_ns"] > 0
    assert counters["encoded_from_bytes"] > 1.25 * counters["encoded_to_bytes"]
    assert counters["payload_bytes_written"] == sum(map(len, values.values()))
    assert files.disks.write_amplification < 1
    for life in range(3):
        for key, value in values.items():
            assert files.read(key, MIB, len(value)) == value
            record = files.disks.find_record(key)
            assert record is not None and record.length == len(value)
        assert files.disks.counters()["values_decoded"] == 4
        if life == 2:
            break
        if life == 0:
            files.kill()  # the segment has no footer: its values are decoded and compared
        else:
            files.close()
        files = Files([(tmp_path, SIZE)], ALWAYS)
        assert files.disks.counters()["records_recovered"] == len(values)
    files.disks.start_verification(0)
    files.settle()
    verified = files.outcomes_of(ev.Verified)[-1]
    assert (verified.records, verified.damaged, verified.unread) == (len(values), 0, 0)
    files.close()


def test_more_encoded_values_fit_on_a_disk(tmp_path: Path) -> None:
    fitting = {}
    for name, config in (("plain", PLAIN), ("encoded", ALWAYS)):
        files = Files([(tmp_path / name, SIZE)], config)
        for number in range(220):
            files.write(key_of(number), 0, value_of(number % 7))
        fitting[name] = len(files.disks)
        assert all(files.read(key_of(n), 0, VALUE) == value_of(n % 7) for n in range(200, 220))
        files.close()
    assert fitting["encoded"] > 1.3 * fitting["plain"], fitting


def test_a_file_of_before_is_read_and_goes_on_with_both(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], PLAIN)
    assert files.write(key_of(1), 0, value_of(1))
    files.kill()
    assert version_of(tmp_path) == [1, 1]
    files = Files([(tmp_path, SIZE)], ALWAYS)
    assert files.read(key_of(1), 0, VALUE) == value_of(1)
    assert version_of(tmp_path) == [1, 1], "nothing on it needs more yet"
    assert files.write(key_of(2), 0, value_of(2))
    assert version_of(tmp_path) == [2, 2], "before the first record that needs it"
    files.kill()
    files = Files([(tmp_path, SIZE)], PLAIN)  # encodes nothing itself
    assert files.write(key_of(3), 0, value_of(3)) and files.disks.counters()["values_encoded"] == 0
    for number in (1, 2, 3):
        assert files.read(key_of(number), 0, VALUE) == value_of(number)
    assert version_of(tmp_path) == [2, 2]
    files.close()


def test_a_file_of_a_later_version_is_refused(tmp_path: Path) -> None:
    Files([(tmp_path, SIZE)], PLAIN).close()
    path = tmp_path / FILE
    file = bytearray(path.read_bytes())
    for page in (0, 4096):
        file[page + 8] = 3
        check = _core.siphash128(bytes(16), bytes(file[page : page + 56]))[:8]
        file[page + 56 : page + 64] = check
    path.write_bytes(file)
    with pytest.raises(UserError, match="written by a later memserve"):
        DiskFile(tmp_path, SIZE, PLAIN)
    assert path.read_bytes() == file, "it is as it was"


@pytest.mark.parametrize("place", (0, 30, 5000, 100_000))
def test_damaged_encoding_is_noticed_and_forgotten(tmp_path: Path, place: int) -> None:
    files = Files([(tmp_path, SIZE)], ALWAYS)
    assert files.write(key_of(1), 0, value_of(1)) and files.write(key_of(2), 0, value_of(2))
    record = files.host.logs[0].look(key_of(1))
    assert record is not None and record.encoded_bytes
    descriptor = os.open(tmp_path / FILE, os.O_RDWR)
    byte = os.pread(descriptor, 1, record.offset + place)
    os.pwrite(descriptor, bytes([byte[0] ^ 0x10]), record.offset + place)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert files.read(key_of(1), 0, VALUE) is None and files.read(key_of(2), 0, VALUE) == value_of(2)
    assert files.disks.counters()["reads_damaged"] == 1 and key_of(1) not in files.disks
    files.close()


def test_torn_encoding_is_not_found_by_the_next_life(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], ALWAYS)
    for number in (1, 2, 3):
        assert files.write(key_of(number), 0, value_of(number))
    record = files.host.logs[0].look(key_of(2))
    assert record is not None
    files.kill()
    with (tmp_path / FILE).open("r+b") as file:  # power went while its last pages were written
        file.seek(record.offset + record.encoded_bytes - 3 * 4096)
        file.write(bytes(3 * 4096))
    files = Files([(tmp_path, SIZE)], ALWAYS)
    assert [key_of(number) in files.disks for number in (1, 2, 3)] == [True, False, True]
    assert files.read(key_of(3), 0, VALUE) == value_of(3)
    files.close()


def test_encoded_reads_at_once_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_LANDING_BYTES_MAX", 2 * VALUE)
    monkeypatch.setattr(disks, "_IDLE_MAX", 100)
    files = Files([(tmp_path, SIZE)], ALWAYS, arena_bytes=40 * VALUE)
    for number in range(30):
        assert files.write(key_of(number), 0, value_of(number))
    reads = [files.disks.read_value(key_of(number), number * VALUE, 0, 1 << 62) for number in range(30)]
    files.settle()
    ended = {end.id: end.ok for end in files.outcomes_of(ev.ReadEnded)}
    for number, read_id in enumerate(reads):
        assert read_id is not None and ended[read_id]
        assert bytes(files.bytes[number * VALUE : (number + 1) * VALUE]) == value_of(number)
    memory = files.host._workers[0]._memory
    assert sum(len(pieces) for size, pieces in memory._idle.items() if size >= VALUE // 2) <= 4
    files.close()


def test_value_removed_while_it_is_encoded_is_not_written() -> None:
    world = DisksWorld(random.Random(3), DisksConfig(admission="all", kv_codec="always"), disks=1, segments=12)
    world.settle()
    key, payload = b"k" * 16, floats("bfloat16", 20_000).tobytes()
    assert world.put(key, payload) and any(isinstance(job.action, ev.EncodeExtent) for job in world.jobs.values())
    assert world.disks.remove_value(key, world.now) and not world.disks.remove_value(key, world.now)
    world.settle()
    assert key not in world.disks and world.outcomes[-1] == ev.Written(key, False)
    assert world.put(key, payload)
    world.settle()
    assert world.read_now(key) == payload


def test_lost_disk_ends_what_is_encoded() -> None:
    world = DisksWorld(random.Random(3), DisksConfig(admission="all", kv_codec="always"), disks=1, segments=12)
    world.settle()
    keys = [bytes([number]) * 16 for number in range(10)]
    for key in keys:
        assert world.put(key, floats("bfloat16", 20_000, key[0]).tobytes())
    world.failing = 1.0
    while world.jobs:
        world.work()
    assert any(isinstance(outcome, ev.DiskLost) for outcome in world.outcomes)
    assert not world.putting and not world.kept, "each write has an end, and the host keeps nothing"


# -- when it pays


def test_gate_opens_where_the_way_is_slower_than_the_codec() -> None:
    gate = CodecGate("auto", 0.1)
    assert not gate.lets_encode(None, 0.1, 0.7), "nothing is known of the way"
    assert not gate.lets_encode(1.2, 0.1, 0.7)  # saves 0.36, and the codec has to be clearly better
    assert gate.lets_encode(1.4, 0.1, 0.7)
    assert gate.lets_encode(0.9, 0.1, 0.7), "it goes on as long as it saves clearly more than it takes"
    assert not gate.lets_encode(0.8, 0.1, 0.7) and not gate.lets_encode(1.2, 0.1, 0.7)
    assert not CodecGate("none").lets_encode(100.0, 0.1, 0.7)
    assert CodecGate("always").lets_encode(None, 100.0, 1.0)


def test_values_that_do_not_shrink_close_the_gate_but_for_a_try() -> None:
    codec = KvCodec("auto", CodecRates(0.2, 0.1, 0.7))
    noise, out = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), np.empty(2 << 20, np.uint8)
    for _ in range(20):
        assert codec.encode(noise.ctypes.data, np.zeros(1, np.int64), noise.nbytes, out) == 0
    gate = CodecGate("auto", 0.1)
    tries = [gate.lets_encode(2.0, 0.1, codec.rates.share) for _ in range(640)]
    assert tries.count(True) == 10 and not tries[0]
    value = floats("bfloat16", 1 << 20)
    for _ in range(20):
        assert codec.encode(value.ctypes.data, np.zeros(1, np.int64), value.nbytes, out)
    assert all(gate.lets_encode(2.0, 0.1, codec.rates.share) for _ in range(100)), "values have become shorter again"


def test_codec_that_was_slow_for_a_while_is_tried_again() -> None:
    gate = CodecGate("auto", 0.1)
    tries = [gate.lets_encode(2.0, 2.0, 0.7) for _ in range(640)]  # the core was busy: 20 times as slow as it can be
    assert tries.count(True) == 10
    assert gate.lets_encode(2.0, 0.1, 0.7)
    quick = CodecGate("auto", 0.1)
    assert not any(quick.lets_encode(0.2, 2.0, 0.7) for _ in range(640)), "here it can never pay"


def test_codec_is_timed_before_its_first_value() -> None:
    rates = measured_rates()
    assert 0 < rates.decode_byte_ns < 50 and 0 < rates.encode_byte_ns < 50 and 0.5 < rates.share < 0.8


def test_way_of_a_disk_is_its_busy_time_without_the_codec() -> None:
    way = DiskWay()
    for number in range(4):  # side by side, half a mebibyte each
        way.begin_job(1000 * number)
    way.leave_out(500_000)
    for number in range(4):
        way.end_job(MIB // 2, 1_000_000 * (number + 1))
    assert way.rate.byte_ns is not None and abs(way.rate.byte_ns - 3_500_000 / (2 * MIB)) < 1e-6
    way.begin_job(10_000_000_000)  # the time between does not count
    way.end_job(MIB, 10_003_000_000)
    assert way.rate.byte_ns < 3.0


def test_disk_encodes_where_it_is_slow() -> None:
    codec = DiskCodec(KvCodec("auto", CodecRates(0.2, 0.1, 0.7)))
    assert not codec.pays, "nothing is known of the disk"
    codec.writes.rate.byte_ns = 2.0
    assert codec.pays, "reads are taken to be as slow"
    codec.reads.rate.byte_ns = 0.2
    assert not codec.pays, "a value would be read later"
    codec.reads.rate.byte_ns = 2.0
    assert codec.pays
    codec.writes.rate.byte_ns = 0.6
    assert codec.pays, "one value is encoded while another is written"
    codec.writes.rate.byte_ns = 0.4
    assert not codec.pays, "the disk would wait for the codec"


def test_auto_learns_from_the_disk_and_begins_by_itself(tmp_path: Path) -> None:
    files = Files([(tmp_path, SIZE)], DisksConfig(admission="all", kv_codec="auto"), faulty=True)
    files.queues[0].delay_s = 0.001
    for number in range(24):
        assert files.write(key_of(number), 0, value_of(number))
    assert 10 < files.disks.counters()["values_encoded"] < 24, "the first ones went as they are"
    assert all(files.read(key_of(number), 0, VALUE) == value_of(number) for number in range(24))
    files.close()
