"""Counts that follow the load, in virtual time: production machines, instances that boot and drain, no lost request."""

from __future__ import annotations

import dataclasses

import pytest

from memserve.base.deployment import ScalingOptions
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.cli.main import run
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Setup, Surroundings
from memserve_lab.sim.replay.world import ReplayWorld, usage
from memserve_lab.workloads.records import Blocks, History, Session, Span, Turn, Workload

H100 = dataclasses.replace(machine("llama-3-8b", "h100"), hbm_blocks=3000)
AROUND = Surroundings(start_ns=5 * NS_PER_S)


def waves(*waves: tuple[float, float, float]) -> Workload:
    """Requests of 3,000 tokens, each with a prefix of its own: (from second, until second, requests a second)."""
    due = [begin + number / rate for begin, end, rate in waves for number in range(int((end - begin) * rate))]
    sessions = tuple(
        Session(f"s{at}", (Turn(Blocks(16, (Span(10_000 * at, 3000),)), 20, due_s=due_s),), history=History.GIVEN)
        for at, due_s in enumerate(due)
    )
    return Workload("blocks", "test", sessions)


def played(scale: str, workload: Workload, instances: dict[Role, int]) -> ReplayWorld:
    options = ScalingOptions((scale,), 2 * NS_PER_S, 20 * NS_PER_S)
    world = ReplayWorld(Setup(instances, H100, around=AROUND, scaling=options), workload)
    world.run_workload()
    for node in (world.router, *world.instances):
        node.machine.check_invariants()
    world.scaling.machine.check_invariants()
    return world


@pytest.fixture(scope="module")
def wave() -> ReplayWorld:
    """A minute with more prompts than one prefill instance computes, then three minutes with few."""
    workload = waves((0, 60, 14), (60, 240, 0.5))
    return played("prefill=1..4", workload, {Role.PREFILL: 1, Role.DECODE: 1})


def test_instances_come_with_a_wave_and_drain_after_it(wave: ReplayWorld) -> None:
    orders = [order for _, order in wave.scaling.decisions]
    counts = [order.target for order in orders]
    top = counts.index(max(counts))
    assert counts == [*sorted(counts[: top + 1]), *sorted(counts[top + 1 :], reverse=True)], "up, then down"
    assert max(counts) > 1 == counts[-1]
    told = wave.router.machine.stats()
    assert told.counters.members_left == max(counts) - 1 and told.counters.members_died == 0


def test_no_request_fails_and_each_is_complete(wave: ReplayWorld) -> None:
    assert all(served.answered and len(served.token_ns) == 20 for served in wave.clients.served)
    assert wave.router.machine.stats().counters.attempts_failed == {}, "an instance that drains finishes what it has"


def test_instance_hours_are_those_of_instances_that_were_there(wave: ReplayWorld) -> None:
    used = usage(wave)
    most = max(order.target for _, order in wave.scaling.decisions)
    assert used.devices == most + 1
    assert 2 * used.simulated_s < used.device_hours * 3600 < used.devices * used.simulated_s
    assert 0 < used.busy_share <= 1


def test_a_constant_load_keeps_its_count() -> None:
    world = played("colocated=1..4", waves((0, 400, 8)), {Role.COLOCATED: 1})
    late = [order for at_s, order in world.scaling.decisions if at_s > 200]
    assert late == [], [order.text for order in late]
    assert all(served.answered for served in world.clients.served)


def test_the_command_tells_each_decision(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sim", "run", "--instances", "colocated=1", "--scale", "colocated=1..3", "--scale-up-after", "2"]
    assert run([*words, "--workload", "trace", "--sessions", "400", "--rate", "20"]) == 0
    assert "colocated: 1 -> " in capsys.readouterr().out
