"""What an instance learns of the disks of a store from its own fetches."""

from __future__ import annotations

import pytest

from memserve.instance.cluster.prefix_fetch import (
    GOOD_IN_A_ROW,
    TRIAL_AFTER_MAX_NS,
    TRIAL_AFTER_NS,
    TRUSTED_AFTER,
    ReadSpeed,
)
from memserve.kv.costs import CopyCurve

TOLD = CopyCurve(1000.0, 100.0, 2.0)


def test_nothing_learned_is_what_the_store_says():
    assert ReadSpeed(TOLD).expected_curve == TOLD and not ReadSpeed(TOLD).wants_trial(10 * TRIAL_AFTER_NS)


def test_one_late_fetch_slows_the_curve():
    """Of nothing that came it is known only that it takes longer than was waited for: twice as long, at least."""
    speed = ReadSpeed(TOLD)
    speed.on_late(TOLD.ns(1000), 20 * TOLD.ns(1000), 0, is_part=False)
    assert speed.expected_curve.ns(1000) >= 2 * 20 * TOLD.ns(1000) - 2
    part = ReadSpeed(TOLD)
    part.on_late(TOLD.ns(1000), 20 * TOLD.ns(1000), 0, is_part=True)
    assert part.expected_curve.ns(1000) == pytest.approx(20 * TOLD.ns(1000), abs=2)


def test_late_at_once_makes_no_disk_quicker():
    """A store that has none of it any more answers quickly."""
    speed = ReadSpeed(TOLD, scale=3.0)
    speed.on_late(TOLD.ns(1000), 1, 0, is_part=False)
    assert speed.scale == 3.0


def test_one_stall_is_forgotten_after_several_good_fetches():
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 50_000, 0, is_part=False)
    slow = speed.scale
    for _ in range(GOOD_IN_A_ROW - 1):
        speed.on_arrived(1000, 1000, 0)
    assert speed.scale == slow
    for _ in range(6):
        speed.on_arrived(1000, 1000, 0)
    assert speed.scale < 1.2


def test_repeatedly_stalled_disk_is_tried_less_often():
    """Until it has been right for long."""
    speed = ReadSpeed(TOLD)
    for _ in range(20):
        speed.on_arrived(1000, 1000, 0)
        speed.on_late(1000, 50_000, 0, is_part=False)
    assert speed.trial_after_ns == TRIAL_AFTER_MAX_NS and not speed.wants_trial(TRIAL_AFTER_MAX_NS - 1)
    for _ in range(TRUSTED_AFTER):
        speed.on_arrived(1000, 1000, 0)
    assert speed.trial_after_ns == TRIAL_AFTER_NS and speed.scale < 1.2


def test_learnt_speed_is_bounded_in_both_directions():
    speed = ReadSpeed(TOLD)
    for _ in range(20):
        speed.on_arrived(1_000_000, 1, 0)
    assert speed.scale == pytest.approx(0.1, rel=0.01)
    for _ in range(20):
        speed.on_arrived(0, 10**15, 0)
    assert speed.scale == pytest.approx(1e4, rel=0.01)


def test_slow_disks_are_looked_at_now_and_then():
    """At once when it is not known how slow they are; a trial that brings nothing is no reason for another at once."""
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 50_000, 100, is_part=False)
    assert speed.wants_trial(100)
    speed.on_trial_started(100)
    assert not speed.wants_trial(100 + TRIAL_AFTER_NS - 1) and speed.wants_trial(100 + TRIAL_AFTER_NS)
    speed.on_late(1000, 60_000, 200, is_part=False)
    assert not speed.wants_trial(200 + TRIAL_AFTER_NS - 1) and speed.wants_trial(200 + TRIAL_AFTER_NS)


def test_how_slow_a_disk_is_that_gave_part_is_known():
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 50_000, 100, is_part=True)
    assert not speed.is_unknown
    assert not speed.wants_trial(100 + TRIAL_AFTER_NS - 1) and speed.wants_trial(100 + TRIAL_AFTER_NS)


def test_disk_without_reads_is_unused_until_a_trial_measures_it():
    """Whatever the next fetch would cost if the disk were only as slow as is proven: the trial says how slow it is."""
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 3000, 0, is_part=False)
    assert speed.scale == 6.0 and speed.expected_curve.ns(1000) >= 1000 * TOLD.ns(1000)
    speed.on_trial_started(0)
    speed.on_arrived(1000, 80_000, 10)
    assert speed.scale == 80.0 and speed.expected_curve.ns(1000) == pytest.approx(80 * TOLD.ns(1000), abs=2)
    stood_still = ReadSpeed(TOLD)
    stood_still.on_late(1000, 3000, 0, is_part=False)
    stood_still.on_arrived(1000, 900, 10)
    assert not stood_still.is_unknown and stood_still.scale == 6.0 and not stood_still.wants_trial(10)


def test_trial_interval_of_repeatedly_late_disk_doubles() -> None:
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 50_000, 0, is_part=False)
    assert speed.wants_trial(0)
    speed.on_arrived(1000, 1000, 1)
    speed.on_late(1000, 50_000, 2, is_part=False)
    assert speed.is_unknown and speed.trial_after_ns == 2 * TRIAL_AFTER_NS
    assert not speed.wants_trial(2 * TRIAL_AFTER_NS + 1) and speed.wants_trial(2 * TRIAL_AFTER_NS + 2)
    speed.on_arrived(1000, 1000, 2 * TRIAL_AFTER_NS + 2)
    later = 10 * TRIAL_AFTER_NS
    speed.on_late(1000, 50_000, later, is_part=False)
    assert speed.wants_trial(later)


def test_late_move_after_timely_read_does_not_distrust_disk() -> None:
    """As when the blocks that it was to be pulled into were still in use."""
    speed = ReadSpeed(TOLD)
    speed.on_late(1000, 3000, 0, is_part=False, was_read=True)
    assert speed.scale == 6.0 and not speed.is_unknown and not speed.wants_trial(TRIAL_AFTER_NS - 1)


def test_immediate_miss_does_not_change_disk_speed():
    speed = ReadSpeed(TOLD)
    speed.on_late(TOLD.ns(1000), 1, 0, is_part=False)
    assert not speed.is_unknown and speed.expected_curve == TOLD
    slow = ReadSpeed(TOLD, scale=3.0)
    slow.on_late(TOLD.ns(1000), 1, 0, is_part=False)
    assert not slow.is_unknown and slow.scale == 3.0
