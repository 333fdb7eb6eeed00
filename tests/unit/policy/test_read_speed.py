"""What an instance learns of the disks of a store from its own fetches."""

from __future__ import annotations

import pytest

from memserve.policy.costs import CopyCurve
from memserve.policy.read_speed import (
    GOOD_IN_A_ROW,
    TRIAL_AFTER_MAX_NS,
    TRIAL_AFTER_NS,
    TRUSTED_AFTER,
    ReadSpeed,
)

TOLD = CopyCurve(1000.0, 100.0, 2.0)


def test_nothing_learned_is_what_the_store_says():
    assert ReadSpeed(TOLD).curve == TOLD and not ReadSpeed(TOLD).wants_trial(10 * TRIAL_AFTER_NS)


def test_one_late_fetch_is_enough():
    """Of nothing that came it is known only that it takes longer than was waited for: twice as long, at least."""
    speed = ReadSpeed(TOLD)
    speed.was_late(TOLD.ns(1000), 20 * TOLD.ns(1000), 0, is_part=False)
    assert speed.curve.ns(1000) >= 2 * 20 * TOLD.ns(1000) - 2
    part = ReadSpeed(TOLD)
    part.was_late(TOLD.ns(1000), 20 * TOLD.ns(1000), 0, is_part=True)
    assert part.curve.ns(1000) == pytest.approx(20 * TOLD.ns(1000), abs=2)


def test_late_at_once_makes_no_disk_quicker():
    """A store that has none of it any more answers quickly."""
    speed = ReadSpeed(TOLD, scale=3.0)
    speed.was_late(TOLD.ns(1000), 1, 0, is_part=False)
    assert speed.scale == 3.0


def test_one_stall_is_forgotten_after_a_few_fetches_and_not_after_one():
    speed = ReadSpeed(TOLD)
    speed.was_late(1000, 50_000, 0, is_part=False)
    slow = speed.scale
    for _ in range(GOOD_IN_A_ROW - 1):
        speed.came(1000, 1000, 0)
    assert speed.scale == slow
    for _ in range(6):
        speed.came(1000, 1000, 0)
    assert speed.scale < 1.2


def test_a_disk_that_stands_still_again_and_again_is_looked_at_less_and_less_often():
    """Until it has been right for long."""
    speed = ReadSpeed(TOLD)
    for _ in range(20):
        speed.came(1000, 1000, 0)
        speed.was_late(1000, 50_000, 0, is_part=False)
    assert speed.trial_after_ns == TRIAL_AFTER_MAX_NS and not speed.wants_trial(TRIAL_AFTER_MAX_NS - 1)
    for _ in range(TRUSTED_AFTER):
        speed.came(1000, 1000, 0)
    assert speed.trial_after_ns == TRIAL_AFTER_NS and speed.scale < 1.2


def test_a_quicker_disk_than_was_said_is_learned_too_within_bounds():
    speed = ReadSpeed(TOLD)
    for _ in range(20):
        speed.came(1_000_000, 1, 0)
    assert speed.scale == pytest.approx(0.1, rel=0.01)
    for _ in range(20):
        speed.came(0, 10**15, 0)
    assert speed.scale == pytest.approx(1e4, rel=0.01)


def test_slow_disks_are_looked_at_now_and_then():
    speed = ReadSpeed(TOLD)
    speed.was_late(1000, 50_000, 100, is_part=False)
    assert not speed.wants_trial(100 + TRIAL_AFTER_NS - 1) and speed.wants_trial(100 + TRIAL_AFTER_NS)
