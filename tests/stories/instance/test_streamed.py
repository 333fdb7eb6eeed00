"""Sequences that are longer than KV memory: their layers stream, alone and beside others, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from geometries import SHAPES
from instance_world import VOCAB, World, config, request
from memserve.base.types import FinishReason, KVGeometry, Role, Tier
from memserve.base.units import NS_PER_MS
from memserve.instance.events import LinkUse
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.machine import Instance
from memserve.protocol.events import RequestCancelled

PROMPTS = [[(family * 5 + i * i) % VOCAB for i in range(200)] for family in range(3)]
SIZES = {"hbm": 16, "dram": 120, "context": 240, "running": 4, "step_tokens": 16, "chunk": 8, "preemption": "swap"}


def world_with(**changes: object) -> World:
    """HBM for 64 tokens, in blocks of 4, and a link that carries nothing to speak of; five layers."""
    geometry = changes.pop("geometry", None)
    sizes = SIZES | {"caching": False, "layerwise": "auto", "link_bytes_s": 125_000.0} | changes
    return World(config(**sizes), 4, twin=False, geometry=geometry)


def layers_of(world: World) -> LayerPlacer:
    layers = world.machine.state.memory.layers
    assert isinstance(layers, LayerPlacer)
    return layers


def kv_of(world: World, name: str):
    return next(iter(world.machine.state.groups[name].sequences.values())).layered


def ended(world: World) -> dict[str, FinishReason]:
    world.drain()
    world.check_all_ended()
    return {name: reason for (name, _), reason in world.final.items()}


def test_prompt_three_times_hbm_has_its_answer() -> None:
    """121 tokens are the most: of 16 blocks a quarter is for what is written, and six frames have 30 pages each."""
    world = world_with()
    assert world.machine.context_tokens == 121
    world = world_with(hbm=40)
    assert world.machine.context_tokens == 240
    world.arrive(request("long", PROMPTS[0], max_tokens=40))
    for _ in range(40):
        world.step()
    kv = kv_of(world, "long")
    assert kv is not None and kv.streams
    assert ended(world) == {"long": FinishReason.LENGTH} and not layers_of(world).parked


@pytest.mark.parametrize("name", SHAPES)
def test_layers_of_real_models_stream(name: str) -> None:
    """A dozen times as much as HBM holds, for as long as their layers are many."""
    world = world_with(hbm=6, geometry=replace(SHAPES[name].kv, block_tokens=4))
    assert world.machine.context_tokens >= min(240, 4 * SHAPES[name].kv.num_layers)
    tokens = min(200, world.machine.context_tokens - 20)
    world.arrive(request("long", PROMPTS[0][:tokens], max_tokens=12))
    assert ended(world) == {"long": FinishReason.LENGTH}


def test_answer_that_outgrows_hbm_goes_on_by_layer() -> None:
    """It lay whole until it had all of HBM; nothing stands still on the way, and no token is computed twice."""
    world = world_with()
    world.arrive(request("grows", PROMPTS[0][:20], max_tokens=90))
    assert ended(world) == {"grows": FinishReason.LENGTH}
    assert layers_of(world).resumed == 1 and world.machine.state.counters.preempted_by_recompute == 0
    assert "resumes_by_layer" in world.facts


def test_cached_prefix_as_large_as_hbm_is_sent_down() -> None:
    """What an earlier request has left in HBM would leave no room for the layers of the next."""
    world = world_with(caching=True)
    world.arrive(request("first", PROMPTS[0][:60], max_tokens=2))
    world.drain()
    world.arrive(request("second", PROMPTS[0][:110], max_tokens=5))
    world.drain()
    assert ended(world)["second"] is FinishReason.LENGTH
    assert world.machine.stats().cached_tokens >= 56


def test_cancelled_long_one_leaves_nothing_behind() -> None:
    world = world_with()
    for steps in (3, 9, 20):
        name = f"after {steps}"
        world.arrive(request(name, PROMPTS[0][:100], max_tokens=20))
        for _ in range(steps):
            world.step()
        world.asked_to_end.add(name)
        world.post(RequestCancelled(name))
    assert set(ended(world).values()) == {FinishReason.CANCELLED}
    report = world.machine.pool.report()
    assert all(report.by_tier[tier].blocks_used == 0 for tier in (Tier.HBM, Tier.DRAM))


def test_short_ones_pass_a_long_one() -> None:
    """They have the quarter of HBM that it leaves, and begin and end while it runs."""
    world = world_with(hbm=24, context=160)
    world.arrive(request("long", PROMPTS[0][:120], max_tokens=39))
    for _ in range(25):
        world.step()
    assert world.got["long", 0] and kv_of(world, "long").streams
    for number in range(3):
        world.arrive(request(f"short {number}", PROMPTS[1][: 10 + number], max_tokens=4))
    while not all((f"short {number}", 0) in world.final for number in range(3)):
        world.step()
    assert ("long", 0) not in world.final
    assert set(ended(world).values()) == {FinishReason.LENGTH}


def test_long_ones_rest_while_steps_wait_for_their_layers() -> None:
    """Each step with its row waits nine times as long as it computes: others lose half of the time at most."""
    world = world_with(hbm=24, context=160, depth=1)
    world.arrive(request("long", PROMPTS[0][:120], max_tokens=39))
    for _ in range(25):
        world.step()
    world.arrive(request("short", PROMPTS[1][:10], max_tokens=60))
    for _ in range(3):
        world.step()
    world.device.device_ns = 0  # what steps take is told below
    layers, rows, waited_ms = layers_of(world), [], 0
    slot = next(iter(world.machine.state.groups["long"].sequences.values())).slot
    for _ in range(26):
        has_row = slot in world.plans[0].slots
        rows.append(has_row)
        layers.on_step_finished(LinkUse(waited_ns=9 * has_row * NS_PER_MS), (1 + 9 * has_row) * NS_PER_MS)
        waited_ms += 9 * has_row
        world.step()
    assert sum(rows) == 3 and waited_ms <= len(rows) + 9, rows
    world.drain()
    assert set(world.final.values()) == {FinishReason.LENGTH}


def test_two_long_ones_share_dram_for_one() -> None:
    """Both grow until it is full: the later one is computed again when the first has ended."""
    world = world_with(dram=34)
    for number in range(2):
        world.arrive(request(f"long {number}", PROMPTS[number][:60], max_tokens=55))
    assert ended(world) == {"long 0": FinishReason.LENGTH, "long 1": FinishReason.LENGTH}
    assert [name for name, _ in world.final] == ["long 0", "long 1"]
    assert world.machine.state.counters.preempted_by_recompute >= 1


def test_failed_step_of_a_long_one_is_computed_again() -> None:
    world = world_with()
    world.arrive(request("long", PROMPTS[0][:110], max_tokens=10))
    for _ in range(12):
        world.step()
    world.fail()
    assert ended(world) == {"long": FinishReason.LENGTH}


def test_what_is_rounded_and_leaves_lies_whole() -> None:
    """A prefill instance hands its prompts over, and what DRAM rounds leaves no instance."""
    cfg = config(**SIZES | {"layerwise": "auto"})
    cfg = replace(cfg, pool=replace(cfg.pool, lower_dtype="int8"))
    geometry = KVGeometry(5, 1, 1, 1, "float32", 4)
    contexts = [
        Instance(replace(cfg, role=role), 4, geometry=geometry).context_tokens
        for role in (Role.COLOCATED, Role.PREFILL)
    ]
    assert contexts == [121, 65]
