"""Stories of the instance machine's endings: cancellations, deadlines, failures, and what it tells about itself."""

from __future__ import annotations

import pytest

from instance_world import PROMPT, World, building_worlds, config, plans_of, request
from memserve.base.errors import InvariantError
from memserve.base.types import ClockTicked, FinishReason
from memserve.instance.events import StepFinished
from memserve.protocol.events import RequestCancelled, SequenceStopped

make = pytest.fixture(params=["twin", "real"])(building_worlds)


# -- endings


def test_cancel_frees_slot_for_the_next_plan(make):
    """The browser tab is closed; plans with its rows are still under way."""
    world = make(running=1)
    world.arrive(request("gone", PROMPT[:6], max_tokens=20))
    world.arrive(request("next", PROMPT[1:9], max_tokens=2))
    world.asked_to_end.add("gone")
    world.post(RequestCancelled("gone"))
    (plan,) = plans_of(world.step())
    assert plan.close == [0] and plan.open[0].slot == 0
    world.drain()
    assert world.final == {("gone", 0): FinishReason.CANCELLED, ("next", 0): FinishReason.LENGTH}


def test_cancelling_a_waiting_request_ends_all_its_sequences(make):
    """It never ran; the edge still waits for ``n`` endings."""
    world = make(running=3)
    world.arrive(request("runs", PROMPT[:6], max_tokens=9))
    world.arrive(request("waits", PROMPT[:5], n=3))
    world.asked_to_end.add("waits")
    world.post(RequestCancelled("waits"))
    assert [key for key in world.final if key[0] == "waits"] == [("waits", 0), ("waits", 1), ("waits", 2)]


def test_a_stop_string_ends_one_sequence_of_several(make):
    """The edge found the stop string in the text of choice 1."""
    world = make()
    world.arrive(request("a", PROMPT[:6], max_tokens=9, n=2))
    world.step()
    world.asked_to_end.add(("a", 1))
    world.post(SequenceStopped("a", 1))
    world.post(SequenceStopped("a", 1))  # posted twice: no second ending
    world.drain()
    assert world.final == {("a", 1): FinishReason.STOP, ("a", 0): FinishReason.LENGTH}


@pytest.mark.parametrize("where", ["waiting", "running", "swapped"])
def test_deadlines_end_a_request_wherever_it_is(make, where):
    """A client gives up after a while; the tick comes when nothing else does."""
    world = make(hbm=6, dram=6, preemption="swap", caching=False, running=1 if where == "waiting" else 6)
    world.arrive(request("first", PROMPT[:8], max_tokens=14))
    world.arrive(request("timed", PROMPT[:8], max_tokens=14, deadline_ns=10**6))
    for _ in range(6 if where != "running" else 2):
        world.step()
    stats = world.machine.stats()
    assert {"waiting": stats.requests_waiting, "running": stats.sequences_running, "swapped": stats.sequences_swapped}[
        where
    ]
    world.now = 10**6
    world.post(ClockTicked())
    assert world.final["timed", 0] is FinishReason.DEADLINE and world.machine.next_deadline_ns is None


# -- failures


def test_failed_step_is_retried_once_without_wrong_tokens(make):
    """The device ran out of memory for a moment: half of the plan's blocks are garbage, also what it published."""
    world = make(depth=2)
    world.arrive(request("a", PROMPT[:12], max_tokens=6))
    world.fail()
    world.arrive(request("b", PROMPT[:12], max_tokens=6))
    world.drain()
    assert set(world.final.values()) == {FinishReason.LENGTH}


def test_a_step_that_fails_again_ends_its_sequences(make):
    """A poisonous request must not be retried for ever; the others go on."""
    world = make(depth=1)
    world.arrive(request("poison", PROMPT[:12], max_tokens=6))
    world.fail()
    world.fail()
    assert world.final == {("poison", 0): FinishReason.ERROR}


def test_report_without_a_plan_raises():
    """Steps come back in order; anything else must be loud."""
    world = World(config())
    world.arrive(request("a", PROMPT[:12], max_tokens=6))
    with pytest.raises(InvariantError, match="step 2 reported, but 1"):
        world.machine.handle(StepFinished(2, [1], 0), 0)
    world = World(config())
    with pytest.raises(InvariantError, match="no plan is under way"):
        world.machine.handle(StepFinished(1, [1], 0), 0)


# -- views


def test_the_memory_report_counts_less_than_a_block_a_sequence(make):
    """Row P4, on three running sequences of uneven length."""
    world = make()
    for name, length in (("a", 5), ("b", 8), ("c", 11)):
        world.arrive(request(name, PROMPT[:length][::-1], max_tokens=9))
    world.step()
    world.step()
    report = world.machine.report()
    lengths = {"a": 5 + 3, "b": 8 + 1, "c": 11}  # computed, plans under way included: 2, 3 and 3 blocks of 4
    assert report.sequences == 3 and report.blocks_held == 2 + 3 + 3
    assert report.tokens_held == sum(lengths.values())
    assert report.fragmentation_tokens_total == 0 + 3 + 1 and report.fragmentation_tokens_max == 3
    assert report.block_tokens == 4
