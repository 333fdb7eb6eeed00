"""Rates are those that were measured: instances learn what the link and prompts take, and lose little until then."""

from __future__ import annotations

import dataclasses
from random import Random
from statistics import fmean
from typing import Any

import pytest

from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.types import Caching, Role
from memserve.base.units import GIB, NS_PER_S
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.kv.costs import CopyCurve
from memserve_lab.bench.catalogue import Recipe, build
from memserve_lab.experiments.layerkv import requests
from memserve_lab.sim.hardware import Machine, machine
from memserve_lab.sim.replay.setup import GPU_SCHEDULER, Setup
from memserve_lab.sim.replay.world import ReplayWorld


def long_prompts(hardware: Machine, count: int = 30, has_profiles: bool = True, **scheduler: Any) -> ReplayWorld:
    """More prompts of 6,144 tokens, with answers of 512, than memory holds at once."""
    waits = AdmissionConfig(waiting_max=1000, wait_ns=1000 * NS_PER_S)
    cluster = ClusterConfig(caching=Caching.OFF, admission=waits, stalled_after_ns=10_000 * NS_PER_S)
    config = dataclasses.replace(GPU_SCHEDULER, **scheduler)
    setup = Setup({Role.COLOCATED: 1}, hardware, cluster, config, has_profiles=has_profiles)
    world = ReplayWorld(setup, requests([(6144, 512)] * count, 0.9, Random("test")))
    world.run_workload()
    assert all(served.answered for served in world.clients.served)
    return world


def device(name: str) -> Machine:
    """Llama-3-8B with memory for six of the prompts."""
    return dataclasses.replace(machine("llama-3-8b", name, 1, 256 * GIB), hbm_blocks=1200)


def jct_s(world: ReplayWorld) -> float:
    return fmean((served.token_ns[-1] - served.scheduled_ns) / NS_PER_S for served in world.clients.served)


def ttft_s(world: ReplayWorld) -> float:
    return fmean(((served.first_ns or 0) - served.scheduled_ns) / NS_PER_S for served in world.clients.served)


@pytest.mark.parametrize("name", ["h100", "l40s"])
def test_by_layer_answers_end_within_a_twentieth_of_by_request(name: str) -> None:
    whole, by_layer = (long_prompts(device(name), layerwise=mode) for mode in ("off", "auto"))
    assert jct_s(by_layer) <= 1.05 * jct_s(whole) and ttft_s(by_layer) < ttft_s(whole) / 2


@pytest.mark.parametrize("has_profiles", [True, False])
def test_link_is_what_copies_took_whatever_was_expected(has_profiles: bool) -> None:
    """A profile that says 0.5 GB/s, and none at all: the device's link carries 25 GB/s."""
    hardware = device("l40s")
    slow = dataclasses.replace(hardware.costs, swap_in=CopyCurve(0.0, 0.0, 2.0))
    world = long_prompts(dataclasses.replace(hardware, costs=slow), 30, has_profiles, layerwise="auto")
    layers = world.instances[0].machine.state.memory.layers
    assert isinstance(layers, LayerPlacer) and abs(layers.link_bytes_s / hardware.host_rate - 1) < 0.05


def missed(world: ReplayWorld) -> float:
    """Share of requests with a first token after 3 s, or more than 200 ms a token."""
    late = []
    for served in world.clients.served:
        first_ns, last_ns, tokens = served.token_ns[0], served.token_ns[-1], len(served.token_ns)
        late.append(first_ns - served.scheduled_ns > 3 * NS_PER_S or (last_ns - first_ns) / (tokens - 1) > NS_PER_S / 5)
    return fmean(late)


def test_slo_scheduling_misses_less_under_memory_pressure() -> None:
    aims = {"slo_ttft_ns": 3 * NS_PER_S, "slo_tpot_ns": NS_PER_S // 5, "layerwise": "auto"}
    plain, by_objectives = (long_prompts(device("l40s"), 60, scheduling=how, **aims) for how in ("fcfs", "slo"))
    assert missed(by_objectives) < 0.9 * missed(plain)


def trace(**options: Any) -> ReplayWorld:
    """The built-in trace on three instances, by cost."""
    cluster = ClusterConfig(policy="cost", caching=options.pop("caching", Caching.PD_CACHING_3))
    setup = Setup({Role.COLOCATED: 3}, machine("llama-3-8b", "h100"), cluster, **options)
    world = ReplayWorld(setup, build(Recipe(kind="trace", sessions=300, seed=0, speed=0.375)))
    world.run_workload()
    return world


def test_a_first_start_serves_as_one_with_a_profile() -> None:
    """Within a twentieth, and never slower than without a cache: routers hear what instances learn."""
    profiled, first, uncached = trace(), trace(has_profiles=False), trace(caching=Caching.OFF)
    assert ttft_s(first) <= 1.05 * ttft_s(profiled) and jct_s(first) <= 1.05 * jct_s(profiled)
    assert ttft_s(first) < ttft_s(uncached) and jct_s(first) < jct_s(uncached)
    tokens = [node.machine.state.counters.generated_tokens for node in first.instances]
    assert min(tokens) > max(tokens) / 2, "an instance that has told nothing gets requests as the others"
