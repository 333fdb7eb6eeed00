"""The segment log beside a dict: random lives on a disk that tears, loses and reorders what was not synced."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from memserve import _core
from memserve_lab.sim.reference.disk import PAGE_BYTES, SymbolicDisk, Write

SEGMENT_BYTES = 16 * PAGE_BYTES
SECRET = bytes(range(16))
NONE, SEGMENT, ALWAYS = 0, 1, 2
WRITE, SYNC, MOVE = 0, 1, 2


def seal_of(payload: bytes) -> int:
    data = np.frombuffer(payload, np.uint8).copy() if payload else np.zeros(1, np.uint8)
    if not payload:
        return 0
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(payload))[0])


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


def padded(payload: bytes) -> bytes:
    return payload + bytes(-len(payload) % PAGE_BYTES)


@dataclass
class Put:
    key: bytes
    payload: bytes
    number: int
    writes: list[Write] = field(default_factory=list)
    command: int | None = None


class Host:
    """Performs what a log asks for, in any order, on a literal disk; knows what must be there after a crash."""

    def __init__(self, rng: random.Random, sync: int, segments: int = 6) -> None:
        self.rng = rng
        self.sync = sync
        self.segments = segments
        self.log = _core.SegmentLog(segments, SEGMENT_BYTES, SECRET, 0.25, sync)
        self.disk = SymbolicDisk(self.log.disk_bytes, rng)
        self.log.format()
        self.values: dict[bytes, dict[int, bytes]] = {}  # every payload that a key was ever given, by number
        self.model: dict[bytes, tuple[int, bytes]] = {}  # what is published now
        self.safe: dict[bytes, tuple[int, bytes]] = {}  # the model at the last sync
        self.gone: dict[bytes, int] = {}  # removed, up to this number, and synced
        self.removed: list[tuple[bytes, int]] = []  # since the last sync
        self.puts: dict[int, Put] = {}
        self.steps: dict[int, tuple[int, Write | None]] = {}
        self.held: list[int] = []
        self.number = 0
        self.power_lost = False
        self.failing = rng.choice((0.0, 0.0, 0.05))

    def fetch(self) -> None:
        for command, kind, offset, data in self.log.take_commands():
            if kind == MOVE:
                self.move(command, data)
            elif kind == WRITE:
                self.steps[command] = (kind, self.disk.begin_write(offset, data))
            else:
                self.steps[command] = (kind, None)
        for ticket, published in self.log.take_ended():
            put = self.puts.pop(ticket)
            if put.command is not None:
                self.log.finish_command(put.command, published)
            elif published and put.number > self.model.get(put.key, (-1, b""))[0]:
                self.model[put.key] = (put.number, put.payload)
        for key in split(self.log.take_evicted()):
            self.model.pop(key, None)
            self.safe.pop(key, None)
        self.log.check_invariants()

    def move(self, command: int, key: bytes) -> None:
        payload = self.read(key)
        ticket = self.log.place_moved(command) if payload is not None else None
        if ticket is None or payload is None:
            self.log.finish_command(command, False)
            return
        self.write(ticket, Put(key, payload, -1, command=command))

    def write(self, ticket: _core.Ticket, put: Put) -> None:
        head = self.log.head(ticket.id, b"", put.payload)
        data = head if ticket.pages == 1 else head + padded(put.payload)
        assert len(data) == ticket.pages * PAGE_BYTES
        put.writes = [self.disk.begin_write(ticket.offset, data[:PAGE_BYTES])]
        if ticket.pages > 1:
            put.writes.append(self.disk.begin_write(ticket.offset + PAGE_BYTES, data[PAGE_BYTES:]))
        self.puts[ticket.id] = put

    def put(self, key: bytes, payload: bytes) -> bool:
        self.number += 1
        ticket = self.log.place(key, len(payload), b"", 0, seal_of(payload))
        if ticket is None:
            return False
        self.values.setdefault(key, {})[self.number] = payload
        self.write(ticket, Put(key, payload, self.number))
        return True

    def read(self, key: bytes) -> bytes | None:
        seen = self.log.look(key)
        found = self.log.hold(key)
        assert (seen is None) == (found is None)
        if seen is None or found is None:
            return None
        assert (seen.offset, seen.length, seen.seal) == (found.offset, found.length, found.seal)
        start = found.offset // PAGE_BYTES * PAGE_BYTES
        inside = found.offset - start
        pages = -(-(inside + found.length) // PAGE_BYTES)
        payload = self.disk.read_bytes(start, pages * PAGE_BYTES)[inside : inside + found.length]
        self.log.let_go(found.segment)
        return payload if seal_of(payload) == found.seal else None

    def remove(self, key: bytes) -> None:
        if self.log.remove(key):
            self.model.pop(key, None)
            self.safe.pop(key, None)
            self.removed.append((key, self.number))

    def work(self) -> None:
        """One thing that is under way ends."""
        self.fetch()
        choices: list[tuple[str, int]] = [("step", step) for step in self.steps] + [
            ("put", ticket) for ticket, put in self.puts.items() if not all(write.completed for write in put.writes)
        ]
        if not choices:
            return
        what, which = self.rng.choice(choices)
        works = self.rng.random() >= self.failing
        if what == "put":
            for write in self.puts[which].writes:
                self.disk.end_write(write, works)
            self.log.finish_record(which, works)
        else:
            kind, write = self.steps.pop(which)
            if write is not None:
                self.disk.end_write(write, works)
            if kind == SYNC and works:
                self.synced()
            self.log.finish_command(which, works)
        self.fetch()

    def synced(self) -> None:
        self.disk.sync_writes()
        self.safe = dict(self.model)
        if self.log.removals_written:
            self.gone.update(dict(self.removed))
            self.removed = []

    def settle(self) -> None:
        for _ in range(100_000):
            self.fetch()
            if not self.steps and self.log.idle:
                return
            self.failing = 0.0
            self.work()
        raise AssertionError("the log never comes to rest")

    def restart(self, power: bool) -> None:
        if power:
            self.power_lost = True
            self.disk.lose_power()
            # A record that was put again since the sync is as safe as the later one: its own segment may be gone.
            must = {key: value for key, value in self.safe.items() if self.model.get(key) == value}
        else:
            self.disk.kill_writer()
            must = dict(self.model)
        self.log = _core.SegmentLog(self.segments, SEGMENT_BYTES, SECRET, 0.25, self.sync)
        if _core.SegmentLog.read_superblock(self.disk.read_bytes) is None:
            assert not must, "the disk has lost its superblocks"
            self.log.format()
        else:
            self.log.recover(self.disk.read_bytes)
        self.log.check_invariants()
        self.puts, self.steps = {}, {}
        self.disk.writes = []
        found: dict[bytes, tuple[int, bytes]] = {}
        for key in split(self.log.keys()):
            payload = self.read(key)
            if payload is None and key not in self.log:
                continue  # evicted: reading lets the log go on
            if payload is None:
                assert self.sync == NONE and self.power_lost, "a record that was synced is damaged"
                self.log.remove(key)
                continue
            numbers = [number for number, value in self.values[key].items() if value == payload]
            assert numbers, "the log made a value up"
            found[key] = (max(numbers), payload)
            assert max(numbers) > self.gone.get(key, -1), f"a removed record came back: {key.hex()[:6]}, {numbers}"
        evicted = set(split(self.log.take_evicted()))
        for key, (number, _) in must.items():
            if key in evicted or (self.sync == NONE and power):
                continue
            assert key in found, "a published record is lost"
            assert found[key][0] >= number, "an older value came back"
        self.model = {key: value for key, value in found.items() if key not in evicted}
        self.safe = dict(self.model)
        self.removed = []


def life(seed: int, sync: int, steps: int = 400) -> Iterator[Host]:
    rng = random.Random(seed)
    host = Host(rng, sync, segments=rng.choice((4, 5, 8)))
    keys = [rng.randbytes(16) for _ in range(rng.choice((4, 30)))]
    sizes = (0, 1, 900, 3000, 3996, 4096, 5000, 12000, host.log.record_bytes_max)
    for _ in range(steps):
        act = rng.random()
        if act < 0.35:
            host.put(rng.choice(keys), rng.randbytes(rng.choice(sizes)))
        elif act < 0.42:
            host.remove(rng.choice(keys))
        elif act < 0.6:
            key = rng.choice(keys)
            payload = host.read(key)
            if payload is not None:
                assert payload == host.model[key][1]
            else:
                assert key not in host.model
        elif act < 0.61:
            host.log.close_open()
        elif act < 0.612:
            host.log.purge()
            host.removed = []  # the superblock will say it
            host.fetch()
            host.model.clear()
            host.safe.clear()
        else:
            host.work()
        host.fetch()
        if rng.random() < 0.01:
            host.restart(power=rng.random() < 0.5)
            yield host
    host.settle()
    yield host


@pytest.mark.parametrize("sync", [NONE, SEGMENT, ALWAYS])
def test_every_life_reads_back_what_it_wrote(sync: int) -> None:
    for seed in [*range(30), *(secrets.randbits(40) for _ in range(40))]:
        try:
            for _ in life(seed, sync):
                pass
        except Exception as error:
            error.add_note(f"life({seed}, {sync})")
            raise


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("sync", [NONE, SEGMENT, ALWAYS])
def test_many_starts_in_a_row_cost_a_full_disk_nothing(sync: int, clean: bool) -> None:
    """Each life goes on where the one before ended, whether that was killed or closed its segment."""
    rng = random.Random(sync)
    host = Host(rng, sync)
    host.failing = 0.0
    for _ in range(300):
        host.put(rng.randbytes(16), rng.randbytes(900))
        host.settle()
    in_a_segment = 14
    full = len(host.log)
    assert full >= 3 * in_a_segment
    for start in range(60):
        if clean:
            host.log.close_open()
            host.settle()
        host.restart(power=False)
        host.settle()
        assert len(host.log) >= full - in_a_segment, f"start {start} left {len(host.log)} of {full}"
        host.put(rng.randbytes(16), rng.randbytes(900))
        if clean or start % 2:
            host.settle()  # else the kill comes in the middle of it


def test_an_index_of_many_is_rebuilt_from_footers() -> None:
    """No payload is read back of segments that have their footer."""
    rng = random.Random(3)
    host = Host(rng, SEGMENT, segments=12)
    host.failing = 0.0
    keys = [rng.randbytes(16) for _ in range(60)]
    for key in keys:
        while not host.put(key, rng.randbytes(3000)):
            host.work()
    host.log.close_open()
    host.settle()
    read: list[int] = []

    def recording(offset: int, count: int) -> bytes:
        read.append(count)
        return host.disk.read_bytes(offset, count)

    log = _core.SegmentLog(12, SEGMENT_BYTES, SECRET)
    log.recover(recording)
    assert len(log) == len(host.log) > 0 and log.counters()["records_recovered"] == len(log)
    assert sum(read) < 12 * (PAGE_BYTES + SEGMENT_BYTES) and max(read) <= SEGMENT_BYTES


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    rng = random.Random(9)
    host = Host(rng, SEGMENT, segments=6)
    host.failing = 0.0
    key, payload = rng.randbytes(16), rng.randbytes(9000)
    while not host.put(key, payload):
        host.work()
    host.settle()
    found = host.log.hold(key)
    assert found is not None
    for _ in range(200):
        bit = rng.randrange(8 * len(payload))
        host.disk.synced[found.offset + bit // 8] ^= 1 << bit % 8
        host.disk.writes = [write for write in host.disk.writes if not write.completed]
        if host.disk.read_bytes(found.offset, len(payload)) != payload:
            damaged = host.disk.read_bytes(found.offset, len(payload))
            assert seal_of(damaged) != found.seal
        host.disk.synced[found.offset + bit // 8] ^= 1 << bit % 8


def test_a_purge_is_for_good() -> None:
    rng = random.Random(4)
    host = Host(rng, SEGMENT)
    host.failing = 0.0
    while not host.put(b"k" * 16, b"payload"):
        host.work()
    host.settle()
    host.log.purge()
    assert b"k" * 16 not in host.log and host.log.take_evicted() == b"k" * 16
    host.model.clear()
    host.settle()
    host.restart(power=True)
    assert len(host.log) == 0


def test_space_is_never_exceeded_and_what_is_wanted_stays() -> None:
    rng = random.Random(11)
    host = Host(rng, NONE, segments=8)
    host.failing = 0.0
    wanted = rng.randbytes(16)
    while not host.put(wanted, b"w" * 5000):
        host.work()
    for _ in range(600):
        host.put(rng.randbytes(16), rng.randbytes(5000))
        host.read(wanted)
        host.work()
        host.work()
        assert len(host.log) * 5000 < 8 * SEGMENT_BYTES
    assert host.read(wanted) == b"w" * 5000
    counters = host.log.counters()
    assert counters["moved_bytes"] <= counters["payload_bytes"] / 3


def test_bad_sizes_are_said_at_once() -> None:
    with pytest.raises(ValueError, match="segments"):
        _core.SegmentLog(2, SEGMENT_BYTES, SECRET)
    with pytest.raises(ValueError, match="pages"):
        _core.SegmentLog(4, 1000, SECRET)
    log = _core.SegmentLog(4, SEGMENT_BYTES, SECRET)
    with pytest.raises(ValueError, match="16 bytes"):
        log.hold(b"short")
    with pytest.raises(ValueError, match="segment takes"):
        log.place(bytes(16), SEGMENT_BYTES)


def test_frequency_sketch_counts_and_decays() -> None:
    rng = random.Random(2)
    sketch = _core.Frequency(1024)
    once, often = rng.randbytes(16), rng.randbytes(16)
    assert sketch.note(once) == 0 and [sketch.note(often) for _ in range(4)] == [0, 1, 2, 3]
    strangers = sum(sketch.note(rng.randbytes(16)) > 0 for _ in range(900))
    assert strangers < 45  # of 900
    for _ in range(8 * 1024):
        sketch.note(rng.randbytes(16))
    assert sketch.note(often) <= 1
