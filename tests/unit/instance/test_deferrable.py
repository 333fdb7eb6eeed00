"""Deferrable requests: they run behind all others, take a part of each step, and make room."""

from __future__ import annotations

import pytest

from instance_world import PROMPT, World, config, request
from memserve.base.config import AdmissionConfig
from memserve.base.types import DEFERRABLE_PRIORITY
from memserve.instance.scheduler.planner import DEFERRABLE_PART
from memserve.instance.scheduler.state import INTERACTIVE_NS
from memserve.router.admission.needs import with_operator_settings

LATER = {"priority": DEFERRABLE_PRIORITY, "urgency": DEFERRABLE_PRIORITY}


def endings(world: World) -> list[str]:
    return [name for name, _ in world.final]


def plan_tokens(world: World, steps: int) -> list[int]:
    """Prompt tokens of the next plans."""
    counts = []
    for _ in range(steps):
        if not world.plans:
            break
        counts.append(sum(count for count in world.plans[0].counts if count > 1))
        world.step()
    return counts


def test_highest_priority_number_counts_across_tenants() -> None:
    later = with_operator_settings(request("x", [1], priority=DEFERRABLE_PRIORITY), AdmissionConfig())
    assert later.urgency == DEFERRABLE_PRIORITY and later.is_deferrable
    almost = with_operator_settings(request("x", [1], priority=DEFERRABLE_PRIORITY - 1), AdmissionConfig())
    assert almost.urgency == 0 and not almost.is_deferrable


@pytest.mark.parametrize("tenants", [("", ""), ("a", "b"), ("a", "a")], ids=["none", "two", "one"])
def test_interactive_request_overtakes_all_that_wait(tenants: tuple[str, str]) -> None:
    world = World(config(running=2, depth=1))
    for number in range(12):
        world.arrive(request(f"later{number}", PROMPT[: 3 + number % 5], max_tokens=3, tenant=tenants[0], **LATER))
    world.step()
    world.arrive(request("now", PROMPT[:4], max_tokens=3, tenant=tenants[1]))
    world.drain()
    assert endings(world).index("now") <= 2
    world.check_all_ended()


@pytest.mark.parametrize("tenants", [("a", "b"), ("a", "a")], ids=["two", "one"])
@pytest.mark.parametrize("lack", ["slots", "blocks"])
def test_interactive_request_takes_room_of_deferrable_ones(tenants: tuple[str, str], lack: str) -> None:
    sizes = {"running": 2, "hbm": 40} if lack == "slots" else {"running": 6, "hbm": 12}
    world = World(config(depth=1, context=48, **sizes))
    for number in range(2):
        prompt = PROMPT[number : number + 8]
        world.arrive(request(f"later{number}", prompt, max_tokens=24, tenant=tenants[0], **LATER))
    for _ in range(6):
        world.step()
    world.arrive(request("now", PROMPT[9:33], max_tokens=3, tenant=tenants[1]))
    world.drain()
    assert endings(world)[0] == "now"
    stats = world.machine.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute >= 1
    world.check_all_ended()


def test_deferrable_request_takes_room_of_none() -> None:
    world = World(config(running=2, depth=1))
    for number in range(2):
        world.arrive(request(f"now{number}", PROMPT[number : number + 4], max_tokens=10, tenant="a"))
    world.step()
    world.arrive(request("later", PROMPT[:4], max_tokens=2, tenant="b", **LATER))
    world.drain()
    stats = world.machine.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute == 0 and endings(world)[-1] == "later"


def test_deferrable_prompts_fill_a_part_of_a_step() -> None:
    world = World(config(step_tokens=64, chunk=64, depth=1, hbm=64), block_tokens=4)
    world.arrive(request("now", PROMPT[:2], max_tokens=40))
    world.step()
    for number in range(3):
        world.arrive(request(f"later{number}", PROMPT[number : number + 30], max_tokens=1, **LATER))
    counts = plan_tokens(world, 30)
    assert max(counts) == 64 // DEFERRABLE_PART and counts.count(max(counts)) > 5
    world.drain()
    world.check_all_ended()


def test_prompts_of_others_are_computed_without_deferrable_ones() -> None:
    world = World(config(step_tokens=64, chunk=16, depth=1, hbm=64), block_tokens=4)
    world.arrive(request("first", PROMPT[:2], max_tokens=40))
    world.step()
    for number in range(3):
        world.arrive(request(f"later{number}", PROMPT[number : number + 30], max_tokens=1, **LATER))
    world.step()
    world.arrive(request("now", PROMPT[3:40], max_tokens=3))
    world.step()
    assert plan_tokens(world, 3) == [16, 16, 5]
    assert plan_tokens(world, 9)[0] == 64 // DEFERRABLE_PART
    world.drain()
    world.check_all_ended()


def test_deferrable_prompts_fill_steps_where_no_other_comes() -> None:
    world = World(config(step_tokens=64, chunk=64, depth=1, hbm=64), block_tokens=4)
    world.arrive(request("alone", PROMPT[:30], max_tokens=1, **LATER))
    assert plan_tokens(world, 9)[0] == 30
    world.arrive(request("now", PROMPT[:2], max_tokens=1))
    world.drain()
    world.arrive(request("soon", PROMPT[1:31], max_tokens=1, **LATER))
    assert plan_tokens(world, 9)[0] == 64 // DEFERRABLE_PART
    world.drain()
    world.now += INTERACTIVE_NS
    world.arrive(request("late", PROMPT[2:32], max_tokens=1, **LATER))
    assert plan_tokens(world, 9)[0] == 30


def test_what_has_room_needs_none_of_deferrable_ones() -> None:
    """Else a sequence that waits for another reason would be taken for one that room was made for."""
    world = World(config(depth=1))
    for name in ("now", "next"):  # the second one waits for the plan of the first
        world.arrive(request(name, PROMPT[:4], max_tokens=3))
    (head,) = world.machine.state.waiting.line_of("")
    assert not world.machine.planner.sharing.preempt_for_head(head)
    world.drain()
    world.check_all_ended()
