"""Disks: what is admitted, when reads end, what a failing disk means. On literal disks, in virtual time."""

from __future__ import annotations

import random

import pytest

from disks_world import SEGMENT_BYTES, DisksWorld, seal_of, split
from memserve import _core
from memserve.base.units import MIB, NS_PER_MS, NS_PER_S
from memserve.store.disks import events as ev
from memserve.store.disks.disks import Disks, DisksConfig
from memserve.store.disks.jobs import DAY_NS, WriteBudget
from memserve_lab.sim.reference.disk import PAGE_BYTES

BLOCK = bytes(range(256)) * 32  # two pages


def started(config: DisksConfig | None = None, **options) -> DisksWorld:
    world = DisksWorld(random.Random(7), config, **options)
    world.settle()
    return world


def filled(world: DisksWorld, count: int, payload: bytes = BLOCK) -> list[bytes]:
    """Keys of values that are published."""
    keys = [world.rng.randbytes(16) for _ in range(count)]
    for key in keys:
        while not world.put(key, payload):
            world.work()
    world.settle()
    return [key for key in keys if key in world.disks]


def ends(world: DisksWorld, kind: type) -> list:
    return [outcome for outcome in world.outcomes if isinstance(outcome, kind)]


def test_written_value_is_read_with_name_and_tag() -> None:
    world = started()
    for number, size in enumerate((0, 1, 4016 - 3, 4016 - 2, 4096, 9000)):
        key = bytes([number]) * 16
        payload = world.rng.randbytes(size)
        assert world.put(key, payload, name=b"abc", scope=5)
        world.settle()
        record = world.disks.find_record(key)
        assert record is not None and (record.length, record.scope, record.seal) == (size, 5, seal_of(payload))
        assert world.read_now(key) == payload
        assert ends(world, ev.ReadEnded)[-1].name == b"abc"
        assert not world.put(key, payload), "it is here"
        assert not world.disks.wants_value(key, size, world.now, bypass=True)
    assert sorted(split(world.disks.all_keys())) == [bytes([number]) * 16 for number in range(6)]
    assert world.read(b"?" * 16) is None and world.disks.find_record(b"?" * 16) is None


def test_first_request_for_a_value_is_not_written_to_full_disk() -> None:
    world = started(DisksConfig(), disks=1)
    key, other = b"k" * 16, b"o" * 16
    assert world.disks.wants_value(key, 8192, world.now), "there is space that nothing lies on"
    filled(world, 60)
    assert not world.disks.wants_value(other, 8192, world.now)
    assert world.disks.wants_value(other, 8192, world.now)
    assert world.disks.wants_value(b"p" * 16, 8192, world.now, bypass=True)
    assert world.disks.counters()["refused_seldom"] == 1
    everything = started(DisksConfig(admission="all"), disks=1)
    filled(everything, 60)
    assert everything.disks.wants_value(other, 8192, everything.now)


def test_no_24_hours_see_more_than_the_days_budget() -> None:
    rng = random.Random(4)
    budget = WriteBudget(1000 * MIB)
    assert budget.burst_bytes == 125 * MIB
    written: list[tuple[int, int]] = []
    now = 5
    for _ in range(20_000):
        now += rng.choice((0, NS_PER_S, 60 * NS_PER_S))
        if budget.allows_bytes(MIB, now):
            budget.charge_bytes(MIB, now)
            written.append((now, MIB))
    first = total = most = 0
    for at, nbytes in written:
        total += nbytes
        while written[first][0] < at - DAY_NS:
            total -= written[first][1]
            first += 1
        most = max(most, total)
    assert 980 * MIB < most <= 1000 * MIB
    assert WriteBudget(0).allows_bytes(1 << 60, 0)


def test_daily_write_budget_is_shared_by_all_disks() -> None:
    world = started(DisksConfig(admission="all", writes_per_day_bytes=2 * MIB), disks=2, segments=100)
    for _ in range(600):
        world.put(world.rng.randbytes(16), BLOCK)
        world.work()
    world.settle()
    counters = world.disks.counters()
    assert counters["refused_budget"] > 100
    assert MIB - 16 * PAGE_BYTES < counters["disk_bytes_written"] < MIB + 16 * PAGE_BYTES  # burst: half of this day's
    assert not world.disks.wants_value(b"k" * 16, 8192, world.now, bypass=True), "a bypass is no licence"
    world.pass_time(DAY_NS)
    assert world.disks.wants_value(b"k" * 16, 8192, world.now)


def test_a_queue_that_is_deep_takes_no_more_writes() -> None:
    world = started(DisksConfig(admission="all", writes_max=4), disks=1, segments=12)
    keys = [world.rng.randbytes(16) for _ in range(6)]
    assert [world.put(key, BLOCK) for key in keys] == [True] * 4 + [False] * 2
    assert not world.disks.wants_value(keys[5], 8192, world.now)
    assert world.disks.counters()["refused_busy"] == 3
    world.settle()
    assert world.put(keys[5], BLOCK)


def test_a_value_longer_than_a_segment_is_refused() -> None:
    world = started()
    assert not world.disks.wants_value(b"k" * 16, SEGMENT_BYTES, world.now)
    assert not world.disks.write_value(b"k" * 16, 0, SEGMENT_BYTES, world.now)


def test_a_read_ends_by_its_deadline_and_its_extent_later() -> None:
    """The disk stalls for two seconds."""
    world = started(disks=1)
    first, second = filled(world, 2)
    read_id = world.read(first, world.now + 30 * NS_PER_MS)
    assert world.disks.next_deadline_ns == world.now + 30 * NS_PER_MS
    world.pass_time(29 * NS_PER_MS)
    assert read_id not in world.reads
    world.pass_time(NS_PER_MS)
    assert world.reads[read_id] == (False, "late", b"") and read_id in world.reading
    assert world.read(second) is None, "a disk that is late is not asked again"
    assert world.put(b"w" * 16, BLOCK), "writes wait in its queue"
    assert world.disks.next_deadline_ns is None
    world.pass_time(2 * NS_PER_S)
    world.settle()
    assert ends(world, ev.ExtentFree) == [ev.ExtentFree(read_id)]
    assert world.read_now(first) == world.read_now(second) == BLOCK, "a late read is no damage"
    counters = world.disks.counters()
    assert (counters["reads_late"], counters["reads_refused"], counters["reads_damaged"]) == (1, 1, 0)


def test_no_more_reads_than_are_allowed() -> None:
    world = started(DisksConfig(admission="all", reads_max=3), disks=1)
    (key,) = filled(world, 1)
    assert [world.read(key) is not None for _ in range(5)] == [True, True, True, False, False]
    world.settle()
    assert world.read_now(key) == BLOCK


def test_a_record_that_cannot_be_read_is_forgotten() -> None:
    world = started(disks=1)
    first, second = filled(world, 2)
    read_id = world.read(first)
    world.end(next(iter(world.jobs)), works=False)
    assert world.reads[read_id] == (False, "EIO", b"")
    assert first not in world.disks and ends(world, ev.Dropped) == [ev.Dropped(first)]
    world.settle()
    assert world.read_now(second) == BLOCK
    world.restart(power=False)
    assert first not in world.disks and second in world.disks


def test_a_disk_that_is_full_drops_writes_and_goes_on() -> None:
    world = started(disks=1)
    keys = [world.rng.randbytes(16) for _ in range(5)]
    for key in keys:
        while not world.put(key, BLOCK):
            world.work()
        job = next(job for job, begun in world.jobs.items() if isinstance(begun.action, ev.WriteExtent))
        world.end(job, works=False, why="ENOSPC")
        assert ends(world, ev.Written)[-1] == ev.Written(key, False)
    assert world.disks.counters()["writes_failed"] == 5 and len(world.free) == 64
    world.settle()
    assert filled(world, 1)


def refused(world: DisksWorld, why: str = "ENOSPC") -> None:
    """Writes until the disk is full."""
    while not ends(world, ev.DiskFull):
        world.put(world.rng.randbytes(16), BLOCK)
        for job, begun in list(world.jobs.items()):
            if not isinstance(begun.action, ev.ReadExtent | ev.ReadRecord):
                world.end(job, works=False, why=why)


@pytest.mark.parametrize("sync", ["none", "segment", "always"])
@pytest.mark.parametrize("why", ["ENOSPC", "EDQUOT"])
def test_full_disk_is_read_and_written_again_when_room_returns(why: str, sync) -> None:
    world = started(DisksConfig(admission="all", sync=sync), disks=1, segments=20)
    keys = filled(world, 12)
    refused(world, why)
    assert ends(world, ev.DiskFull) == [ev.DiskFull(0, why)] and not ends(world, ev.DiskLost)
    assert world.disks.counters()["disks_full"] == world.disks.counters()["disks_filled"] == 1
    assert world.disks.is_idle and not world.jobs, "what waits for room is not under way"
    for key in keys:
        assert world.read_now(key) == BLOCK
    assert not world.put(b"n" * 16, BLOCK) and not world.disks.wants_value(
        b"n" * 16, len(BLOCK), world.now, bypass=True
    )
    assert world.disks.next_deadline_ns == world.now + world.config.full_pause_ns
    for _ in range(30):  # one write each time, and one word in all
        world.pass_time(world.config.full_pause_ns)
        assert len(world.jobs) <= 1
        world.is_full = True
        while world.jobs:
            world.work()
    assert len(ends(world, ev.DiskFull)) == 1 and not ends(world, ev.DiskHasRoom)
    world.is_full = False
    while not ends(world, ev.DiskHasRoom):
        world.put(b"t" * 16, BLOCK)
        world.work() if world.jobs else world.pass_time(world.config.full_pause_ns)
    world.settle()
    assert world.disks.counters()["disks_full"] == 0 and world.disks.counters()["disks_lost"] == 0
    fresh = filled(world, 3)
    assert len(fresh) == 3
    for power in (False, True):
        wanted, found = world.restart(power=power)
        assert found >= len(keys) and (power or found == wanted)


def test_removal_on_full_disk_is_not_reported_durable_early() -> None:
    world = started(disks=1, segments=20)
    first, second, *_ = filled(world, 6)
    refused(world)
    world.remove(first)
    assert first not in world.disks and not world.disks.removals_written
    assert world.read_now(second) == BLOCK
    world.pass_time(world.config.full_pause_ns)
    world.settle()
    assert world.disks.removals_written and ends(world, ev.DiskHasRoom)
    world.restart(power=False)
    assert first not in world.disks and second in world.disks


def test_a_full_disk_whose_reads_fail_is_lost() -> None:
    world = started(DisksConfig(admission="all"), disks=1, segments=20)
    keys = filled(world, 12)
    refused(world)
    for key in keys[:8]:
        assert world.read(key) is not None
        world.end(next(iter(world.jobs)), works=False)
    assert ends(world, ev.DiskLost) == [ev.DiskLost(0, "EIO")] and world.disks.next_deadline_ns is None
    world.settle()


def test_failed_retry_for_another_reason_is_retried() -> None:
    world = started(disks=1, segments=20)
    filled(world, 2)
    refused(world)
    world.pass_time(world.config.full_pause_ns)
    world.end(next(iter(world.jobs)), works=False, why="EIO")
    while world.jobs:
        world.end(next(iter(world.jobs)), works=False, why="ENOSPC")
    assert world.disks.next_deadline_ns is not None
    world.settle()
    while not ends(world, ev.DiskHasRoom):
        world.pass_time(world.config.full_pause_ns)
        world.settle()


@pytest.mark.parametrize("disks", [1, 3])
def test_disk_failing_eight_times_is_lost_others_keep_values(disks: int) -> None:
    world = started(DisksConfig(admission="all"), disks=disks, segments=20)
    keys = filled(world, 24)
    dying = world.disk_of[keys[0]]
    of_it = [key for key in keys if world.disk_of[key] == dying]
    others = [key for key in keys if world.disk_of[key] != dying]
    extents = len(world.free)
    while not ends(world, ev.DiskLost):
        key = world.rng.randbytes(16)
        if world.put(key, BLOCK) and world.disk_of[key] != dying:
            others.append(key)
        for job, begun in list(world.jobs.items()):
            if job in world.jobs and begun.action.disk == dying:
                world.end(job, works=False)
    assert ends(world, ev.DiskLost) == [ev.DiskLost(dying, "EIO")]
    assert set(of_it) <= {key for outcome in ends(world, ev.Dropped) for key in split(outcome.keys)}
    world.settle()
    assert not any(key in world.disks for key in of_it) and all(key in world.disks for key in others)
    assert len(world.free) == extents and not world.putting and not world.reading
    for key in others:
        assert world.read_now(key) == BLOCK
    fresh = [world.rng.randbytes(16) for _ in range(3)]
    assert [world.put(key, BLOCK) for key in fresh] == [disks > 1] * 3
    world.settle()
    assert world.disks.counters()["disks_lost"] == 1 and world.disks.counters()["disks"] == disks - 1
    wanted, found = world.restart(power=False)
    assert (wanted, found) == (len(world.model),) * 2
    assert set(world.model) == {*others, *(fresh if disks > 1 else [])}, "the lost disk begins anew"


def test_operations_on_lost_disk_end_when_device_completes() -> None:
    world = started(DisksConfig(admission="all", failures_max=1), disks=1, segments=8)
    keys = filled(world, 6)
    reads = [world.read(key) for key in keys[:3]]
    assert world.put(b"w" * 16, BLOCK)
    world.disks.start_verification(world.now)
    world.take()
    world.end(next(iter(world.jobs)), works=False)
    assert [world.reads[read_id][:2] for read_id in reads] == [(False, "EIO"), (False, "lost"), (False, "lost")]
    assert sorted(world.reading) == reads[1:] and b"w" * 16 in world.putting
    assert [outcome.records for outcome in ends(world, ev.Verified)] == [0]
    assert world.read(keys[4]) is None and keys[4] not in world.disks and len(world.disks) == 0
    world.settle()
    assert ends(world, ev.Written)[-1] == ev.Written(b"w" * 16, False) and not world.reading


def test_no_rewrite_while_lost_disk_may_read_the_extent() -> None:
    world = started(DisksConfig(admission="all", failures_max=1), disks=2, segments=8)
    key = b"w" * 16
    assert world.put(key, BLOCK)
    writing = next(iter(world.jobs))
    assert world.disks.remove_value(key)
    world.take()
    other = next(job for job in world.jobs if job != writing and world.jobs[job].action.disk == world.disk_of[key])
    world.end(other, works=False)
    assert ends(world, ev.DiskLost) and not world.put(key, BLOCK)
    world.settle()
    assert world.put(key, BLOCK)


def test_values_spread_by_disk_size_and_survive_reordering() -> None:
    logs = [_core.SegmentLog(segments, SEGMENT_BYTES, bytes(16)) for segments in (60, 20)]
    disks = Disks(logs, DisksConfig(admission="all"))
    rng = random.Random(1)
    numbers = [disks._disk_for(rng.randbytes(16)).number for _ in range(4000)]
    assert 2850 < numbers.count(0) < 3150
    world = started(disks=2)
    keys = filled(world, 10)
    world.literal.reverse()
    world.restart(power=False)
    assert all(world.read_now(key) == BLOCK for key in keys)
    assert not any(world.put(key, BLOCK) for key in keys), "nothing is kept twice"


def test_nothing_works_without_disks() -> None:
    disks = Disks([])
    key = b"k" * 16
    assert key not in disks and disks.all_keys() == b"" and disks.find_record(key) is None
    assert (
        not disks.wants_value(key, 1, 0) and not disks.write_value(key, 0, 1, 0) and disks.read_value(key, 0, 0) is None
    )
    assert not disks.remove_value(key) and disks.is_idle and disks.next_deadline_ns is None
    disks.start_verification(0)
    assert disks.take_outcomes() == [ev.Verified(1, 0, 0, 0, 0, b"")] and disks.take_actions() == []


def test_a_removal_and_a_purge_outlive_a_kill() -> None:
    world = started(DisksConfig(sync="always", admission="all"))
    keys = filled(world, 4)
    world.remove(keys[0])
    assert keys[0] not in world.disks and not world.disks.removals_written
    world.settle()
    assert world.disks.removals_written
    world.restart(power=True)
    assert [key in world.disks for key in keys] == [False, True, True, True]
    world.purge()
    world.settle()
    world.restart(power=True)
    assert len(world.disks) == 0


def test_value_removed_during_write_is_not_found() -> None:
    world = started(disks=1)
    assert world.put(b"k" * 16, BLOCK) and world.disks.remove_value(b"k" * 16)
    world.take()
    world.settle()
    assert ends(world, ev.Written) == [ev.Written(b"k" * 16, False)] and b"k" * 16 not in world.disks


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "used elsewhere"])
def test_hit_records_are_kept_and_amplification_is_bounded(is_read: bool) -> None:
    world = started(DisksConfig(admission="all"), disks=1, segments=8)
    wanted = filled(world, 1)[0]
    for _ in range(300):
        world.put(world.rng.randbytes(16), BLOCK)
        if is_read:
            assert world.read_now(wanted) == BLOCK
        else:
            world.disks.touch_values(bytes(16) + wanted)
            world.settle()
    assert world.read_now(wanted) == BLOCK
    counters = world.disks.counters()
    assert counters["moves"] > 2 and counters["records_evicted"] > 100
    assert 1.5 < world.disks.write_amplification < 2.3  # a head a record of two pages, footers, and moves
    assert counters["payload_bytes_written"] == counters["writes"] * len(BLOCK)


def test_a_flipped_bit_of_any_record_is_noticed() -> None:
    """Of head, name or payload; by a read, and by a verification."""
    rng = random.Random(21)
    world = started(DisksConfig(admission="all"), disks=2, segments=250)
    for number in range(1000):
        size = rng.choice((1, 700, 3900, 4096, 9000))
        while not world.put(number.to_bytes(16, "big"), rng.randbytes(size), name=rng.randbytes(rng.choice((0, 20)))):
            world.work()
    world.settle()
    keys = split(world.disks.all_keys())
    assert len(keys) == 1000
    for key in keys:
        disk = world.disk_of[key]
        log = world.disks._disks[disk].log
        found = log.look(key)
        name = log.read_head(world.literal[disk].read_bytes(found.head_offset, PAGE_BYTES))[3]
        bits = 8 * (log.HEAD_BYTES + len(name) + found.length)
        at = rng.randrange(bits)
        inside = found.offset < found.head_offset + PAGE_BYTES
        byte = at // 8 if inside or at // 8 < log.HEAD_BYTES + len(name) else at // 8 - log.HEAD_BYTES - len(name)
        start = found.head_offset if inside or at // 8 < log.HEAD_BYTES + len(name) else found.offset
        world.literal[disk].sync_writes()
        world.literal[disk].synced[start + byte] ^= 1 << at % 8
    for key in keys[:500]:
        assert world.read_now(key) is None
    assert world.disks.counters()["reads_damaged"] == 500
    assert world.verify() == ev.Verified(
        world.outcomes[-1].id, 500, world.outcomes[-1].payload_bytes, 500, 0, world.outcomes[-1].keys
    )
    assert set(split(world.outcomes[-1].keys)) == set(keys[500:]) and len(world.disks) == 0


def test_another_record_in_the_place_of_one_is_noticed() -> None:
    """A write that went astray: everything agrees but the key."""
    world = started(disks=1)
    first, second = filled(world, 2)
    log, disk = world.disks._disks[0].log, world.literal[0]
    disk.sync_writes()
    places = [log.look(key).head_offset for key in (first, second)]
    disk.synced[places[0] : places[0] + 3 * PAGE_BYTES] = disk.synced[places[1] : places[1] + 3 * PAGE_BYTES]
    assert world.read_now(first) is None and world.read_now(second) == BLOCK
    assert world.disks.counters()["reads_damaged"] == 1


def test_verification_reads_one_record_at_a_time_and_yields() -> None:
    world = started(DisksConfig(admission="all", check_pause_ns=10 * NS_PER_MS), disks=1, segments=12)
    keys = filled(world, 20)
    held = world.read(keys[0], world.now + NS_PER_S)
    verification = world.disks.start_verification(world.now)
    assert world.disks.start_verification(world.now) == verification, "one at a time"
    world.take()
    checks = lambda: [job for job, begun in world.jobs.items() if isinstance(begun.action, ev.ReadRecord)]  # noqa: E731  # short
    assert len(checks()) == 1
    world.end(checks()[0])
    assert not checks() and world.disks.next_deadline_ns == world.now + 10 * NS_PER_MS, "a caller reads"
    world.pass_time(10 * NS_PER_MS)
    assert len(checks()) == 1
    world.remove(keys[3])
    world.settle()
    assert held in world.reads
    done = ends(world, ev.Verified)
    assert done == [ev.Verified(verification, done[0].records, done[0].records * len(BLOCK), 0, 0, b"")]
    assert 19 <= done[0].records <= 20 and world.disks.verified_records == 0
