"""KV by layer in whole clusters: forced, drawn or off, with everything that the scenarios do otherwise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from geometries import SHAPES
from memserve.cli.main import run
from memserve_lab.sim.fuzz.campaign import judge, parse_setting, play, run_campaign, setting_of
from memserve_lab.sim.fuzz.scenario import Forced, draw
from memserve_lab.sim.fuzz.world import World

BY_LAYER, WHOLE = Forced(layerwise="auto"), Forced(layerwise="off")
SHARED = ("handed_over", "fetched", "pulled")


def test_scenarios_by_layer_reach_what_they_are_for() -> None:
    """Some begin by layer, some go over to it, and the same clusters hand over and fetch pages of all layers."""
    seen: Counter[str] = Counter()
    for verdict in run_campaign(range(24), weather="healthy", forced=BY_LAYER):
        assert not verdict.failure, f"{verdict.seed}: {verdict.failure}"
        seen += verdict.happened
    assert seen["by layer: admitted"] > 3 and seen["by layer: converted"] and seen["by layer: parked"], seen
    assert seen["by layer: handed_over"] and seen["by layer: taken_over"], seen
    assert seen["by layer: pages_moved"] > 500 and seen["by layer: pages_read"] > 5000, seen
    assert all(seen[name] for name in SHARED), seen


def test_a_share_of_the_seeds_has_kv_by_layer() -> None:
    drawn = [draw(seed, setting_of(seed)).layered for seed in range(300)]
    assert 15 < sum(setup is not None for setup in drawn) < 60
    assert all(draw(seed, setting_of(seed), BY_LAYER).layered is not None for seed in range(50))
    assert all(draw(seed, setting_of(seed), WHOLE).layered is None for seed in range(50))


def test_all_instances_have_as_many_layers() -> None:
    world = play(3, setting_of(3), forced=BY_LAYER)
    assert {node.device.layers for node in world.instances} == {world.geometry.num_layers} == {5}
    assert play(3, setting_of(3), forced=WHOLE).geometry.num_layers == 2


@pytest.mark.parametrize(
    ("seed", "setting"), [(4, "pd-caching-3/by-layer/1P1D/faulty"), (3, "pd-caching-2/by-request/1P1D/faulty")]
)
@pytest.mark.parametrize("layers", sorted({shape.kv.num_layers for shape in SHAPES.values()}))
def test_clusters_with_as_many_layers_as_real_models(layers: int, seed: int, setting: str) -> None:
    """The reference device's KV is handed over, fetched and placed by layer; a pull takes as long as of few layers."""
    scenario = draw(seed, parse_setting(setting), BY_LAYER)
    few = scenario.layered
    assert few is not None
    scenario.layered = replace(few, layers=layers)
    scenario.pull_ns = scenario.pull_ns[0] * few.layers // layers, scenario.pull_ns[1] * few.layers // layers
    world = World(scenario)
    world.run_scenario()
    assert {node.device.layers for node in world.instances} == {layers}
    done = world.count_achievements()
    assert done["by layer: pages_read"] and done["handed_over"]


def test_swapped_and_readmitted_sequence_is_listed_once() -> None:
    """It was listed twice among those that lie by layer, and was parked twice when the link carried less."""
    assert not judge(960000762, parse_setting("pd-caching-2/by-request/1P1C/healthy"), forced=BY_LAYER).failure


@pytest.mark.parametrize(
    ("seed", "setting"),
    [(980000318, "pd-caching-2/by-request-agg/2P/faulty"), (990000074, "pd-caching-3/by-layer/2D/faulty")],
)
def test_store_gets_no_blocks_during_swap_in(seed: int, setting: str) -> None:
    """A parked sequence ended while its blocks came up, and they were sealed for the store as they were before."""
    assert not judge(seed, parse_setting(setting), forced=BY_LAYER).failure


def test_the_command_forces_it_and_names_it_where_a_seed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    planted = (judge(seed, setting_of(seed), plant="layer-arrival", forced=BY_LAYER) for seed in range(100))
    first = next(verdict.seed for verdict in planted if "not there yet" in verdict.failure)
    forced = ["--layerwise", "auto", "--plant", "layer-arrival"]
    assert run(["sim", "fuzz", "--first", str(first), "--seeds", "1", *forced]) == 1
    command = next(line.split() for line in capsys.readouterr().out.splitlines() if "--seed " in line)
    assert command[-5:] == [*forced, "--story"] and run(command[1:]) == 1
    assert "not there yet" in capsys.readouterr().out.splitlines()[-1]
    assert run(["sim", "fuzz", "--first", str(first), "--seeds", "1", "--layerwise", "off"]) == 0
    assert "by layer" not in capsys.readouterr().out
    assert run(["sim", "fuzz", "--layerwise", "sometimes"]) == 1
    assert "hint: use one of auto, off" in capsys.readouterr().err
