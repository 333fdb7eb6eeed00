"""A :class:`Disks` machine on literal disks: jobs end in any order, fail, tear; processes die, power goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

import kv_floats
from memserve import _core
from memserve.base.units import NS_PER_MS
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.disks.events import SYNC_CODES
from memserve_lab.sim.reference.disk import PAGE_BYTES, SymbolicDisk, Write

SEGMENT_BYTES = 16 * PAGE_BYTES
EXTENT_BYTES = 14 * PAGE_BYTES


def seal_of(payload: bytes | bytearray) -> int:
    if not payload:
        return 0
    data = np.frombuffer(bytes(payload), np.uint8)
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(payload))[0])


def decoded(encoded: bytes, length: int) -> bytes | None:
    """None: it is no encoding of so many bytes."""
    value = kv_floats.decode(np.frombuffer(encoded, np.uint8), length)
    return None if value is None else value[0].tobytes()


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


@dataclass
class Put:
    """A value that was given to a key."""

    payload: bytes
    number: int


@dataclass
class Job:
    action: ev.DiskAction
    writes: list[Write] = field(default_factory=list)


class DisksWorld:
    """The machine, its host on literal disks, an arena of extents, and what callers may rely on."""

    def __init__(
        self, rng: random.Random, config: DisksConfig | None = None, *, disks: int = 2, segments: int = 6
    ) -> None:
        self.rng = rng
        self.config = config or DisksConfig(admission="all")
        self.segments = segments
        self.literal = [SymbolicDisk(self.log(bytes(16)).disk_bytes, rng) for _ in range(disks)]
        self.arena = bytearray(64 * EXTENT_BYTES)
        self.failing = 0.0
        self.is_full = False
        """Nothing is written: there is no room."""
        self.now = 0
        self.number = 0
        self.values: dict[bytes, dict[int, bytes]] = {}
        """Every payload that a key was ever given, by number."""
        self.model: dict[bytes, Put] = {}
        """What is published now."""
        self.safe: dict[bytes, Put] = {}
        """What was published before the last sync of its disk."""
        self.gone: dict[bytes, int] = {}
        """Removed up to this number, as a restart knows."""
        self.start(recovers=False)

    def log(self, secret: bytes) -> _core.SegmentLog:
        sync = SYNC_CODES[self.config.sync]
        return _core.SegmentLog(self.segments, SEGMENT_BYTES, secret, self.config.move_share, sync)

    def start(self, *, recovers: bool) -> None:
        logs = []
        for disk in self.literal:
            disk.writes = []
            known = _core.SegmentLog.read_superblock(disk.read_bytes) if recovers else None
            logs.append(self.log(known[2] if known is not None else self.rng.randbytes(16)))
            if known is not None:
                logs[-1].recover(disk.read_bytes)
            else:
                logs[-1].format()  # with a new secret: what lies there is of no log's
        self.disks = Disks(logs, self.config)
        self.outcomes: list[ev.DiskOutcome] = []
        self.jobs: dict[int, Job] = {}
        self.kept: dict[int, bytes] = {}
        self.disk_of: dict[bytes, int] = {}
        self.putting: dict[bytes, tuple[Put, int]] = {}
        self.reading: dict[int, tuple[bytes, int, bytes | None]] = {}
        """Of each read: key, extent, and the payload that must come; None: any that the key was given."""
        self.key_at: dict[int, bytes] = {}
        """The last key that was written from or read into each extent."""
        self.free = [n * EXTENT_BYTES for n in range(64)]
        self.removed: list[list[tuple[bytes, int]]] = [[] for _ in self.literal]
        self.reads: dict[int, tuple[bool, str, bytes]] = {}
        self.take()

    # -- callers

    def put(self, key: bytes, payload: bytes, name: bytes = b"", scope: int = 0) -> bool:
        if not self.free:
            return False
        extent = self.free.pop()
        self.arena[extent : extent + len(payload)] = payload
        self.number += 1
        put = Put(payload, self.number)
        self.values.setdefault(key, {})[put.number] = payload
        seal = seal_of(payload)
        taken = self.disks.write_value(key, extent, len(payload), self.now, scope=scope, seal=seal, name=name)
        if taken:
            self.putting[key] = (put, extent)
            self.key_at[extent] = key
        else:
            self.free.append(extent)
        self.take()
        return taken

    def read(self, key: bytes, deadline_ns: int | None = None) -> int | None:
        if not self.free:
            return None
        extent = self.free.pop()
        read_id = self.disks.read_value(key, extent, self.now, deadline_ns)
        if read_id is None:
            self.free.append(extent)
        else:
            self.reading[read_id] = (key, extent, self.model[key].payload)
            self.key_at[extent] = key
        self.take()
        return read_id

    def read_now(self, key: bytes) -> bytes | None:
        """The value, once everything that is needed for it has ended; None: there is none."""
        read_id = self.read(key, self.now + (1 << 60))
        while read_id is not None and read_id not in self.reads:
            self.work()
        if read_id is None:
            return None
        ok, _, payload = self.reads.pop(read_id)
        return payload if ok else None

    def remove(self, key: bytes) -> None:
        if self.disks.remove_value(key, self.now):
            self.model.pop(key, None)
            self.safe.pop(key, None)
            self.removed[self.disk_of[key]].append((key, self.number))
        self.take()

    def purge(self) -> None:
        self.disks.remove_all(self.now)
        self.model.clear()
        self.safe.clear()
        self.removed = [[] for _ in self.literal]
        self.take()

    # -- the host

    def take(self) -> None:
        for action in self.disks.take_actions():
            self.begin(action)
        for outcome in self.disks.take_outcomes():
            self.note(outcome)
        self.disks.check_invariants()

    def begin(self, action: ev.DiskAction) -> None:
        match action:
            case ev.ForgetDisk(disk, _):
                self.literal[disk].erase_start(2 * PAGE_BYTES)
                return
            case ev.DropRecord(_, source):
                self.kept.pop(source, None)
                return
            case ev.WritePages(_, disk, offset, data):
                writes = [self.literal[disk].begin_write(offset, data)]
            case ev.WriteExtent(_, disk, offset, head, extent, length, inside):
                payload = bytes(self.arena[extent : extent + length])
                writes = self.begin_record(disk, offset, head, payload, inside)
            case ev.EncodeExtent(_, _, extent, length):
                encoded = kv_floats.encode(np.frombuffer(self.arena, np.uint8)[extent : extent + length].copy(), None)
                if encoded.nbytes and _core.SegmentLog.saves_pages(length, encoded.nbytes):
                    self.kept[action.job] = encoded.tobytes()
                writes = []
            case ev.WriteRecord(_, disk, offset, head, source, _):
                writes = self.begin_record(disk, offset, head, self.kept.pop(source), 0)
            case _:
                writes = []
        self.jobs[action.job] = Job(action, writes)
        if isinstance(action, ev.WriteExtent | ev.EncodeExtent | ev.ReadExtent):
            self.disk_of[self.key_at[action.extent]] = action.disk

    def begin_record(self, disk: int, offset: int, head: bytes, payload: bytes, inside: int) -> list[Write]:
        assert len(head) == PAGE_BYTES
        if inside:
            return [self.literal[disk].begin_write(offset, head[:inside] + payload + head[inside + len(payload) :])]
        padded = payload + bytes(-len(payload) % PAGE_BYTES)
        return [
            self.literal[disk].begin_write(offset, head),
            self.literal[disk].begin_write(offset + PAGE_BYTES, padded),
        ]

    def end(self, job_id: int, works: bool = True, why: str = "EIO") -> None:
        job = self.jobs.pop(job_id)
        action = job.action
        literal = self.literal[action.disk]
        for write in job.writes:
            literal.end_write(write, works)
        if isinstance(action, ev.EncodeExtent):
            works, why = True, ""
        encodes = self.config.kv_codec != "none" and self.rng.random() < 0.8
        done = ev.DiskDone(job_id, works, why="" if works else why, encodes=encodes)
        if isinstance(action, ev.EncodeExtent):
            done = replace(done, encoded_bytes=len(self.kept.get(job_id, b"")), codec_ns=1)
        if works and isinstance(action, ev.SyncDisk):
            self.synced(action.disk)
        if works and isinstance(action, ev.ReadExtent | ev.ReadRecord):
            head, payload = self.read_record(action)
            if isinstance(action, ev.ReadRecord) and action.keep:
                self.kept[job_id] = payload
            value = decoded(payload, action.length) if action.encoded_bytes else payload
            done = replace(done, seal=0 if value is None else seal_of(value), head=head)
            if isinstance(action, ev.ReadExtent) and value is not None:
                self.arena[action.extent : action.extent + len(value)] = value
        self.disks.handle(done, self.now)
        self.take()

    def read_record(self, action: ev.ReadExtent | ev.ReadRecord) -> tuple[bytes, bytes]:
        literal = self.literal[action.disk]
        head = literal.read_bytes(action.offset, PAGE_BYTES)
        if action.inside:
            return head, head[action.inside : action.inside + action.length]
        length = action.encoded_bytes or action.length
        pages = -(-length // PAGE_BYTES)
        return head, literal.read_bytes(action.offset + PAGE_BYTES, pages * PAGE_BYTES)[:length]

    def work(self) -> None:
        """Some job ends."""
        if self.jobs:
            job = self.rng.choice(list(self.jobs))
            if self.is_full and not isinstance(self.jobs[job].action, ev.ReadExtent | ev.ReadRecord):
                self.end(job, works=False, why=self.rng.choice(("ENOSPC", "EDQUOT")))
            else:
                self.end(job, self.rng.random() >= self.failing)
        else:
            self.pass_time(20 * NS_PER_MS)

    def pass_time(self, duration_ns: int) -> None:
        self.now += duration_ns
        self.disks.advance_time(self.now)
        self.take()

    def settle(self) -> None:
        self.failing, self.is_full = 0.0, False
        for _ in range(100_000):
            if self.disks.is_idle and not self.jobs:
                assert not self.kept, "a record that was read is never needed"
                return
            self.work()
        raise AssertionError("the disks never come to rest")

    def verify(self) -> ev.Verified:
        wanted = self.disks.start_verification(self.now)
        self.take()
        while True:
            for outcome in self.outcomes:
                if isinstance(outcome, ev.Verified) and outcome.id == wanted:
                    return outcome
            self.work()

    # -- what callers may rely on

    def note(self, outcome: ev.DiskOutcome) -> None:
        self.outcomes.append(outcome)
        match outcome:
            case ev.Written(key, ok):
                put, extent = self.putting.pop(key)
                self.free.append(extent)
                if ok:
                    self.model[key] = put
            case ev.ReadEnded(read_id, ok, why, _, extent_free):
                _, extent, expected = self.reading[read_id]
                payload = bytes(self.arena[extent : extent + len(expected or b"")]) if ok else b""
                assert not ok or expected is None or payload == expected, "a wrong value was read"
                self.reads[read_id] = (ok, why, payload)
                if extent_free:
                    self.free.append(self.reading.pop(read_id)[1])
            case ev.ExtentFree(read_id):
                self.free.append(self.reading.pop(read_id)[1])
            case ev.Dropped(keys):
                for key in split(keys):
                    self.model.pop(key, None)
                    self.safe.pop(key, None)

    def synced(self, disk: int) -> None:
        self.literal[disk].sync_writes()
        for key, put in self.model.items():
            if self.disk_of[key] == disk:
                self.safe[key] = put
        if self.disks.removals_written:
            self.gone.update(dict(self.removed[disk]))
            self.removed[disk] = []

    def restart(self, *, power: bool) -> tuple[int, int]:
        """The process ends at once, or power goes. Returns how many values had to be found, and how many were."""
        self.failing, self.is_full = 0.0, False
        if power:
            for literal in self.literal:
                literal.lose_power()
            must = {key: put for key, put in self.safe.items() if self.model.get(key) == put}
        else:
            for literal in self.literal:
                literal.kill_writer()
            must = dict(self.model)
        self.start(recovers=True)
        return self.look_around(must)

    def look_around(self, must: dict[bytes, Put]) -> tuple[int, int]:
        """Read everything. Returns how many of ``must`` were not evicted, and how many of those were found."""
        self.model, self.safe = {}, {}
        for key in split(self.disks.all_keys()):
            if key not in self.disks:
                continue  # evicted: reading lets the log go on
            record = self.disks.find_record(key)
            assert record is not None
            payload = self.read_raw(key, record.length)
            if payload is None:
                continue
            numbers = [number for number, value in self.values[key].items() if value == payload]
            assert numbers, "a value was made up"
            assert max(numbers) > self.gone.get(key, 0), "a removed value came back"
            self.model[key] = Put(payload, max(numbers))
        evicted = set()
        for outcome in self.outcomes:
            if isinstance(outcome, ev.Dropped):
                evicted |= set(split(outcome.keys))
        self.model = {key: put for key, put in self.model.items() if key in self.disks}
        self.safe = dict(self.model)
        wanted = {key: put for key, put in must.items() if key not in evicted}
        found = sum(key in self.model and self.model[key].number >= put.number for key, put in wanted.items())
        return len(wanted), found

    def read_raw(self, key: bytes, length: int) -> bytes | None:
        """As :meth:`read_now`, of a key that the model does not know yet."""
        extent = self.free.pop()
        read_id = self.disks.read_value(key, extent, self.now, 1 << 62)
        assert read_id is not None, (key in self.disks, self.disks.counters())
        self.reading[read_id] = (key, extent, None)
        self.key_at[extent] = key
        self.take()
        while read_id not in self.reads:
            self.work()
        ok, why, _ = self.reads.pop(read_id)
        assert ok or why == "damaged" or self.failing > 0, why
        return bytes(self.arena[extent : extent + length]) if ok else None


def life(world: DisksWorld, keys: list[bytes], steps: int) -> Iterator[DisksWorld]:
    """Random calls and ends of jobs; yields after each step."""
    rng = world.rng
    sizes = (0, 1, 900, 3000, 4016, 4017, 4096, 5000, 12000, 13 * PAGE_BYTES)
    for _ in range(steps):
        act = rng.random()
        key = rng.choice(keys)
        if act < 0.3:
            payload = rng.randbytes(rng.choice(sizes))
            if world.config.kv_codec != "none" and rng.random() < 0.5:
                floats = rng.choice([*kv_floats.KINDS]), rng.choice((16_384, 20_001, EXTENT_BYTES))
                payload = kv_floats.floats(*floats, rng.randrange(1 << 30)).tobytes()
            world.put(key, payload, name=key[: rng.choice((0, 0, 9))])
        elif act < 0.33:
            world.remove(key)
        elif act < 0.5:
            world.read(key, world.now + rng.choice((1, 5, 100)) * NS_PER_MS)
        elif act < 0.502:
            world.purge()
        elif act < 0.51:
            world.disks.close(world.now)
            world.take()
        elif act < 0.512:
            world.disks.start_verification(world.now)
            world.take()
        else:
            world.work()
        if rng.random() < 0.1:
            world.pass_time(NS_PER_MS)
        yield world
