"""MemServe's figure 12 in virtual time, with a fourth line: ``--transfer auto`` is near the best mode at any rate."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from memserve.base.config import ClusterConfig
from memserve.base.types import Caching, Role, TransferMode, TransferPolicy
from memserve.base.units import NS_PER_MS
from memserve_lab.bench.catalogue import Arrivals, Recipe, build
from memserve_lab.bench.metrics import figures
from memserve_lab.cli.sim_results import simulate
from memserve_lab.sim.hardware import machine
from memserve_lab.sim.replay.setup import Setup, Surroundings
from memserve_lab.sim.replay.world import ReplayWorld
from memserve_lab.workloads.records import Workload
from memserve_lab.workloads.shape import Caps

H100 = machine("llama-3-8b", "h100")
PAIR = {Role.PREFILL: 1, Role.DECODE: 1}
STATIC = tuple(policy for policy in TransferPolicy if policy.mode is not None)


@cache
def workload_at(rate: float, requests: int = 120) -> Workload:
    caps = Caps(1024, 32, 1)
    return build(Recipe(kind="uniform", sessions=requests, arrivals=Arrivals.POISSON, caps=caps, requests_per_s=rate))


def setup_of(policy: TransferPolicy, **more: object) -> Setup:
    return Setup(PAIR, H100, ClusterConfig(Caching.OFF, "cost", policy), **more)


def jct_s(policy: TransferPolicy, rate: float, **more: object) -> float:
    found = figures(simulate(setup_of(policy, **more), workload_at(rate), policy.value, "uniform").records)
    assert found.failed == 0
    return found.jct_s.mean


def chosen_modes(world: ReplayWorld) -> dict[str, int]:
    return world.router.machine.stats().counters.transfers_chosen


@pytest.mark.parametrize("rate, best", [
    (2, TransferPolicy.BY_LAYER), (16, TransferPolicy.BY_LAYER), (30, TransferPolicy.BY_REQUEST_AGG),
])  # fmt: skip
def test_auto_is_within_three_percent_of_the_best_mode(rate: float, best: TransferPolicy) -> None:
    """Alone a transfer hides behind the prefill; crowded, each message makes all that wait wait longer."""
    static_s = {policy: jct_s(policy, rate) for policy in STATIC}
    assert min(static_s, key=static_s.__getitem__) is best
    assert jct_s(TransferPolicy.AUTO, rate) < 1.03 * static_s[best]


def test_both_modes_are_chosen_as_the_queue_grows() -> None:
    shares = []
    for rate in (2, 30):
        world = ReplayWorld(setup_of(TransferPolicy.AUTO), workload_at(rate))
        world.run_workload()
        counts = chosen_modes(world)
        assert sum(counts.values()) == 120 and TransferMode.BY_REQUEST not in counts
        shares.append(counts.get(TransferMode.BY_LAYER, 0) / 120)
    assert shares[0] > 0.9 and shares[1] < 0.3


def test_a_first_start_learns_what_links_and_reports_cost() -> None:
    """With assumed costs nothing goes by layer; a report costs ten times what is assumed, and some pay for it."""
    dear = dataclasses.replace(H100.costs, report_ns=1.0 * NS_PER_MS)
    slow_link = dataclasses.replace(dear.network, byte_ns=0.2)
    costs = dataclasses.replace(dear, network=slow_link, same_host=slow_link)
    setup = dataclasses.replace(
        setup_of(TransferPolicy.AUTO, has_profiles=False), machine=dataclasses.replace(H100, costs=costs)
    )
    world = ReplayWorld(setup, workload_at(1))
    world.run_workload()
    learnt = world.instances[0].machine.state.costs.model
    assert learnt.report_ns == pytest.approx(costs.report_ns, rel=0.25)
    counts = chosen_modes(world)
    assert counts[TransferMode.BY_REQUEST_AGG] > counts[TransferMode.BY_LAYER] > 0


def test_instances_that_share_cores_report_no_layers() -> None:
    setup = setup_of(TransferPolicy.AUTO, around=Surroundings(beside=(0.5, 0.5)))
    world = ReplayWorld(setup, workload_at(2, 10))
    world.run_workload()
    assert chosen_modes(world) == {TransferMode.BY_REQUEST_AGG: 10}
