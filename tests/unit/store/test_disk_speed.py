"""What a store says that reading its disks takes, from a few reads of what lies on them."""

from __future__ import annotations

import pytest

from memserve._core import SegmentLog
from memserve.base.units import KIB, MIB, NS_PER_MS
from memserve.kv.costs import CopyCurve
from memserve.store.host.files import (
    MEASURE_BYTES_MAX,
    RECORD_BYTES_MAX,
    RECORD_BYTES_MIN,
    RECORDS_MAX,
    RECORDS_MIN,
    ReadArrived,
    curve_of_disks,
    curve_of_reads,
    spans_to_read,
)
from memserve_lab.sim.timed_disk import DISKS


def arrivals(start_ns: float, byte_ns: float, count: int, nbytes: int = MIB) -> list[ReadArrived]:
    return [ReadArrived(n * nbytes, round(start_ns + byte_ns * n * nbytes)) for n in range(1, count + 1)]


@pytest.mark.parametrize("start_ns", [0, 200_000, 20 * NS_PER_MS])
def test_start_and_bytes_are_found_in_what_arrives(start_ns: int) -> None:
    curve = curve_of_reads(arrivals(start_ns, 0.8, 16), 0, 10**9)
    assert curve.byte_ns == pytest.approx(0.8, rel=0.01) and curve.start_ns == pytest.approx(start_ns, abs=10)
    assert curve.piece_ns > 0


def test_burst_after_long_latency_still_gives_a_byte_rate() -> None:
    """All that came at once: the bytes carry all of the time, and the whole takes as long as it took."""
    curve = curve_of_reads([ReadArrived(n * MIB, 30 * NS_PER_MS) for n in range(1, 9)], 0, 30 * NS_PER_MS)
    assert curve.start_ns == 0 and curve.byte_ns > 0
    whole_ns = curve.start_ns + curve.byte_ns * 8 * MIB
    assert 25 * NS_PER_MS < whole_ns < 60 * NS_PER_MS


def test_disk_that_stalls_after_quick_start_is_measured_slow() -> None:
    quick = arrivals(100_000, 0.5, 2)
    stood = curve_of_reads(quick, MIB, 150 * NS_PER_MS)
    assert stood.ns(3 * MIB) > 75 * NS_PER_MS
    nothing = curve_of_reads([], MIB, 150 * NS_PER_MS)
    assert nothing.byte_ns * MIB == pytest.approx(150 * NS_PER_MS)


def test_slow_disk_is_measured_from_few_reads() -> None:
    """12 MB/s and 20 ms late."""
    slow = arrivals(20.0 * NS_PER_MS, 83.0, 2, 737_280)
    curve = curve_of_reads(slow, 737_280, 150 * NS_PER_MS)
    assert curve.byte_ns == pytest.approx(83.0, rel=0.02)
    assert curve.start_ns == pytest.approx(20 * NS_PER_MS, rel=0.05)


def test_a_fetch_of_several_disks_waits_for_the_slowest_share() -> None:
    one = CopyCurve(1000.0, 10.0, 2.0)
    assert curve_of_disks([(5, one)]) == one
    assert curve_of_disks([(5, one), (5, one)]) == CopyCurve(1000.0, 10.0, 1.0)
    assert curve_of_disks([(1, CopyCurve(5.0, 0.0, 8.0)), (3, one)]) == CopyCurve(1000.0, 10.0, 2.0)


def log_with(lengths: list[int]) -> SegmentLog:
    log = SegmentLog(64, 8 * MIB, bytes(16))
    log.format()

    def perform() -> None:
        while commands := log.take_commands():
            for command, *_ in commands:
                log.finish_command(command, True)

    perform()
    for number, length in enumerate(lengths):
        ticket = log.place(number.to_bytes(8, "little") * 2, length, b"", 1, 0)
        assert ticket is not None
        log.finish_record(ticket.id, True)
        perform()
    return log


def test_fresh_disk_is_not_measured() -> None:
    assert spans_to_read(log_with([])) == []
    assert spans_to_read(log_with([MIB] * (RECORDS_MIN - 1))) == []
    assert spans_to_read(log_with([RECORD_BYTES_MIN - 1] * 50)) == [], "short values tell nothing of blocks"


@pytest.mark.parametrize("length", [64 * KIB, 737_280, 5 * MIB])
def test_measured_spans_are_bounded_and_lie_on_records(length: int) -> None:
    log = log_with([length] * 40)
    spans = spans_to_read(log)
    assert RECORDS_MIN <= len(spans) <= RECORDS_MAX
    assert sum(span.nbytes for span in spans) <= MEASURE_BYTES_MAX
    heads = set()
    for at in range(0, 16 * 40, 16):
        found = log.look(log.keys()[at : at + 16])
        assert found is not None
        heads.add(found.head_offset)
    assert {span.offset for span in spans} <= heads and len({span.offset for span in spans}) == len(spans)
    assert all(span.nbytes <= 4096 + RECORD_BYTES_MAX and span.nbytes % 4096 == 0 for span in spans)


def test_a_simulated_disk_tells_what_measuring_it_would_find() -> None:
    """Jobs begin with their latency, side by side, and share the bandwidth."""
    model = DISKS["virtual"]
    found = curve_of_reads(arrivals(model.read_latency_ns, model.curve.byte_ns, 16), 0, 10**9)
    assert found.byte_ns == pytest.approx(model.curve.byte_ns, rel=0.01)
    assert found.start_ns == pytest.approx(model.curve.start_ns, rel=0.01)
