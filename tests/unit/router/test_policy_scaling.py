"""How many instances there should be: each reason, the times before it counts, and that the count settles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.base.deployment import Range
from memserve.base.units import NS_PER_S
from memserve.router.members.autoscaling import InstancesWanted, RoleLoad, RoleScaling

UP_S, DOWN_S, SETTLE_S = 5, 60, 60
CALM = RoleLoad(2)


def scaling(least: int = 1, most: int = 8) -> RoleScaling:
    return RoleScaling(Range(least, most), UP_S * NS_PER_S, DOWN_S * NS_PER_S, SETTLE_S * NS_PER_S)


def looks(policy: RoleScaling, load: RoleLoad, seconds: int, start_s: int = 0) -> list[tuple[int, InstancesWanted]]:
    """One look a second; when something was decided, and what."""
    found = [(at, policy.observe_load(load, at * NS_PER_S)) for at in range(start_s, start_s + seconds)]
    return [(at, wanted) for at, wanted in found if wanted is not None]


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (replace(CALM, waiting=5), "5 requests wait, 2 for each instance are allowed"),
        (replace(CALM, prompt_wait_ns=3 * NS_PER_S // 2), "prompts wait for 1.50 s, 1.00 s are allowed"),
        (replace(CALM, busy=1.8), "the devices work 90% of the time"),
        (replace(CALM, kv_held=1.8), "requests hold 90% of KV memory"),
        (replace(CALM, answers=100, late=8), "8% of answers miss their objective"),
        (
            replace(CALM, prompt_tokens=1000, lost_tokens=300, is_full=True),
            "30% of prompt tokens were cached once, and memory is full",
        ),
    ],
)
def test_each_reason_asks_for_one_more_and_says_so(load: RoleLoad, why: str) -> None:
    ((at, wanted),) = looks(scaling(), load, UP_S + 20)
    assert (wanted.instances, wanted.target, wanted.why) == (2, 3, why)
    assert UP_S <= at <= UP_S + 2, "what is a share needs a sample first"


@pytest.mark.parametrize(
    "load",
    [
        CALM,
        replace(CALM, waiting=4, busy=1.6, kv_held=1.6),
        replace(CALM, answers=100, late=4),
        replace(CALM, prompt_tokens=1000, lost_tokens=900),
        replace(CALM, prompt_tokens=1, lost_tokens=1, is_full=True),
    ],
    ids=["idle", "at the limits", "few are late", "memory is not full", "hardly a prompt"],
)
def test_no_decision_within_limits(load: RoleLoad) -> None:
    assert looks(scaling(least=2), load, 200) == []


def test_twice_too_much_doubles_the_count_within_the_range() -> None:
    ((_, wanted),) = looks(scaling(), replace(CALM, waiting=9), UP_S + 1)
    assert wanted.target == 4
    ((_, wanted),) = looks(scaling(most=3), replace(CALM, waiting=9), UP_S + 1)
    assert wanted.target == 3


def test_a_short_burst_starts_nothing() -> None:
    policy = scaling(least=2)
    for start in range(0, 100, 10):
        assert looks(policy, replace(CALM, waiting=50), UP_S, start) == []
        assert looks(policy, CALM, 5, start + UP_S) == []


def test_fewer_only_after_a_time_in_which_fewer_were_enough() -> None:
    ((at, wanted),) = looks(scaling(), CALM, DOWN_S + 20)
    assert at == DOWN_S
    assert (wanted.target, wanted.why) == (1, "1 could have done what came in the last 60 s")
    policy = scaling()
    assert looks(policy, CALM, DOWN_S - 1) == []
    assert looks(policy, replace(CALM, kv_held=0.7), 1, DOWN_S - 1) == [], "0.7 of one instance is too much for one"
    ((at, _),) = looks(policy, CALM, DOWN_S + 1, DOWN_S)
    assert at == 2 * DOWN_S


def test_next_decision_waits_for_started_instances_or_timeout() -> None:
    policy, much = scaling(), replace(CALM, waiting=5)
    assert len(looks(policy, much, 40)) == 1
    assert len(looks(policy, much, 60, 40)) == 1, "the first decision was not carried out within 60 s"
    policy = scaling()
    assert len(looks(policy, much, UP_S + 1)) == 1
    ((at, wanted),) = looks(policy, replace(much, instances=3, waiting=7), 20, 20)
    assert (at, wanted.target) == (20 + UP_S, 4), "the time begins again when the third one is there"


def test_count_is_clamped_and_dead_instances_do_not_scale_up() -> None:
    ((_, wanted),) = looks(scaling(most=3), replace(CALM, instances=5), 10)
    assert (wanted.target, wanted.why) == (3, "at most 3 are allowed")
    assert looks(scaling(least=2), RoleLoad(1), 500) == []
    assert looks(scaling(), RoleLoad(0, waiting=100), 500) == []


def test_insufficient_count_is_not_retried_at_equal_load() -> None:
    """Two instances are late; three are not, and look as if two could do it."""
    policy = scaling()
    late, fine = (RoleLoad(count, served_tokens=1000, answers=10, late=bad) for count, bad in ((2, 5), (3, 0)))
    ((at, wanted),) = looks(policy, late, 100)[:1]
    assert (at, wanted.target) == (UP_S, 4)
    policy = scaling()
    assert looks(policy, replace(late, answers=100, late=6), 60)[0][1].target == 3
    assert looks(policy, fine, 1000, 60) == []
    ((_, wanted),) = looks(policy, replace(fine, served_tokens=600), DOWN_S + 30, 1060)
    assert wanted.target == 2, "much less is asked for than when two were too few"


@dataclass
class Plant:
    """A service under a constant load: each instance can do 1 of it; what is too much for them waits, or is late."""

    demand: float
    """In instances."""
    late_above: float
    """Share of their work above which answers are late; no other signal tells."""
    says_busy: bool
    queue: float = 0.0

    def load(self, count: int, noise: float) -> RoleLoad:
        demand = self.demand * noise
        self.queue = max(0.0, self.queue + 4 * (demand - count))
        done = min(demand, float(count)) if not self.queue else float(count)
        late = 10 if done / count > self.late_above else 0
        return RoleLoad(
            count, waiting=int(self.queue), busy=done if self.says_busy else 0.0, served_tokens=1000 * done,
            answers=20, late=late,
        )  # fmt: skip


def lives(plant: Plant, policy: RoleScaling, start: int, noise: Callable[[int], float], seconds: int) -> list[int]:
    """The counts second by second; new instances come after 7 s, and others go after 3 s."""
    count, due, counts = start, {}, []
    for at in range(seconds):
        count = due.pop(at, count)
        wanted = policy.observe_load(plant.load(count, noise(at)), at * NS_PER_S)
        if wanted is not None:
            due[at + (7 if wanted.target > count else 3)] = wanted.target
        counts.append(count)
    return counts


@settings(deadline=None, max_examples=60)
@given(
    demand=st.floats(0.05, 7.0),
    late_above=st.floats(0.3, 1.5),
    says_busy=st.booleans(),
    start=st.integers(1, 8),
    swing=st.floats(0.0, 0.1),
    bounds=st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted),
)
def test_the_count_settles_under_a_constant_load(
    demand: float, late_above: float, says_busy: bool, start: int, swing: float, bounds: list[int]
) -> None:
    """Whatever tells that it is too much: after each count has failed once at most, nothing changes any more."""
    least, most = bounds
    start = min(max(start, least), most)
    policy, plant = scaling(least, most), Plant(demand, late_above, says_busy)
    counts = lives(plant, policy, start, lambda at: 1 + swing * (-1) ** at, 3000)
    assert all(least <= count <= most for count in counts)
    assert len(set(counts[-1200:])) == 1, "it goes up and down without end"
    final = counts[-1]
    if demand > 1.01 * final:
        assert final == most, "too few, and more are allowed"


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    st.lists(
        st.builds(
            RoleLoad,
            instances=st.integers(0, 9),
            waiting=st.integers(0, 40),
            prompt_wait_ns=st.integers(0, 3 * NS_PER_S),
            busy=st.floats(0, 6),
            kv_held=st.floats(0, 6),
            served_tokens=st.floats(0, 1e4),
            answers=st.integers(0, 30),
            late=st.integers(0, 30),
            prompt_tokens=st.floats(0, 1e4),
            lost_tokens=st.floats(0, 1e4),
            is_full=st.booleans(),
        ),
        max_size=60,
    ),
    st.lists(st.integers(1, 40), min_size=60, max_size=60),
)
def test_decisions_are_within_the_range_and_change_the_count(
    bounds: list[int], loads: list[RoleLoad], steps_s: list[int]
) -> None:
    least, most = bounds
    policy, now = scaling(least, most), 0
    for load, step_s in zip(loads, steps_s, strict=False):
        now += step_s * NS_PER_S
        wanted = policy.observe_load(load, now)
        if wanted is not None:
            assert least <= wanted.target <= most and wanted.target != load.instances and wanted.why
