"""Random lives with KV by layer: every token as the lone request's, whatever lies where, and nothing is leaked."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from dataclasses import replace

from geometries import SHAPES
from instance_world import LAYERS, VOCAB, World, config, request
from memserve.base.types import FinishReason, KVGeometry, Tier
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.kv.costs import CostModel, PreemptionCosts
from memserve.protocol.events import RequestCancelled

FAMILIES = [[(family * 5 + i * i) % VOCAB for i in range(120)] for family in range(3)]
CONTEXT = 160
SMALL = KVGeometry(LAYERS, 1, 1, 1, "float32", 4)


def world_of(rng: random.Random, geometry: KVGeometry) -> World:
    """Pools that many prompts do not fit into, and a link that sometimes carries less than they need."""
    cfg = config(
        hbm=rng.choice((16, 20, 24, 40, 60, 80)),
        dram=rng.choice((20, 60, 120)),
        caching=rng.random() < 0.5,
        context=CONTEXT,
        running=rng.choice((1, 3, 6)),
        step_tokens=rng.choice((8, 16, 24)),
        chunk=rng.choice((4, 8, 12)),
        depth=rng.choice((1, 2, 3)),
        preemption=rng.choice(("auto", "swap", "recompute")),
        layerwise=rng.choice(("auto", "auto", "auto", "layerkv", "next-layer", "static-2")),
        link_bytes_s=link_rate(rng, geometry),
        slo_tpot_ns=rng.choice((None, 50_000_000)),
    )
    return World(cfg, 4, twin=False, geometry=geometry)


def link_rate(rng: random.Random, geometry: KVGeometry) -> float | None:
    """Bytes a second, for as many tokens of any geometry."""
    rate = rng.choice((None, 125_000.0, 8e9, 2e10, 1e15))
    return rate and rate * geometry.token_bytes / SMALL.token_bytes


def life(seed: int, steps: int = 400, geometry: KVGeometry = SMALL) -> Counter[str]:
    """One life to its end; what happened in it."""
    rng = random.Random(seed)
    world = world_of(rng, geometry)
    count = 0
    for _ in range(steps):
        act = rng.random()
        if act < 0.2 and len(world.machine.state.groups) < 8:
            count += 1
            tokens = [*rng.choice(FAMILIES)[: rng.choice((3, 30, 90, 119, 119))], rng.randrange(VOCAB)]
            shape = {"n": rng.choice((1, 1, 1, 1, 2)), "beam_width": 0}
            if rng.random() < 0.05:
                shape = {"n": 1, "beam_width": 2}
            world.arrive(
                request(
                    f"r{count}",
                    tokens,
                    max_tokens=rng.choice((1, 5, 19, 40)),
                    seed=rng.randrange(3),
                    use_cache=rng.random() < 0.9,
                    tenant=rng.choice(("", "", "other")),
                    prompt_logprobs=rng.random() < 0.05,
                    **shape,
                )
            )
        elif act < 0.215 and world.requests:
            name = rng.choice(list(world.requests))
            world.asked_to_end.add(name)
            world.post(RequestCancelled(name))
        elif world.plans and act < 0.22:
            world.fail(rng.randrange(1000))
        elif world.plans and act < 0.23:
            world.fail_row(rng.randrange(8), suspect=rng.random() < 0.5)
        elif world.plans:
            world.step()
    world.drain()
    world.check_all_ended()
    pool = world.machine.pool
    pool.clear_cache()
    report = pool.report()
    assert all(report.by_tier[tier].blocks_used == 0 for tier in (Tier.HBM, Tier.DRAM)), report
    layers = world.machine.state.memory.layers
    assert isinstance(layers, LayerPlacer)
    return Counter(
        admitted=layers.admitted,
        converted=layers.converted,
        parked=layers.parked,
        resumed=layers.resumed,
        moved=world.device.kv.moved_pages,
        read=world.device.kv.read_by_layer,
    )


def test_tokens_do_not_depend_on_what_lies_by_layer() -> None:
    seen = Counter[str]()
    for seed in [*range(10), *(secrets.randbits(40) for _ in range(14))]:
        try:
            seen += life(seed)
        except Exception as error:
            error.add_note(f"life({seed})")
            raise
    assert min(seen[what] for what in ("admitted", "converted")) > 3, seen  # parking has stories below
    assert seen["moved"] > 1000 and seen["read"] > 1000, seen


def test_real_layers_lie_anywhere_as_well() -> None:
    """By the dozen, so that a frame of a kept layer has room for more blocks than a sequence has. Blocks are short."""
    seen = Counter[str]()
    for name, shape in SHAPES.items():
        try:
            seen += life(4, 200, replace(shape.kv, block_tokens=4))
        except Exception as error:
            error.add_note(f"with {name}")
            raise
    assert seen["admitted"] and seen["converted"] and seen["read"] > 1000, seen


def test_resident_layers_are_evicted_under_pressure() -> None:
    """The first prompt lies whole. The second begins beside it by layer, keeps what it can when the first has ended,
    and gives it up, layer by layer, for the third."""
    sizes = {"hbm": 48, "dram": 60, "context": CONTEXT, "running": 3, "step_tokens": 16, "chunk": 4}
    cfg = config(**sizes, caching=False, layerwise="auto", link_bytes_s=1e15)
    world = World(cfg, 4, twin=False)
    layers = world.machine.state.memory.layers
    assert isinstance(layers, LayerPlacer)
    world.arrive(request("whole", FAMILIES[0][:118], max_tokens=12))
    world.arrive(request("by layer", FAMILIES[1][:110], max_tokens=45))
    for _ in range(55):
        world.step()
    kv = next(iter(world.machine.state.groups["by layer"].sequences.values())).layered
    assert kv is not None and kv.resident_layers, "whatever is free is used"
    assert world.machine.state.groups.keys() == {"by layer"}
    most = len(kv.resident_layers)
    world.arrive(request("third", FAMILIES[2][:100], max_tokens=3))
    for _ in range(4):
        world.step()
    assert len(kv.resident_layers) < most and world.machine.state.groups.keys() == {"by layer", "third"}
    world.drain()
    world.check_all_ended()
    assert layers.admitted == 1 and set(world.final.values()) == {FinishReason.LENGTH}


def test_published_policy_gives_layers_up_before_memory_is_short() -> None:
    """Answers that run fill a block each in so many steps: where blocks will be few, kept layers go at once."""
    sizes = {"hbm": 48, "dram": 160, "context": CONTEXT, "running": 6, "step_tokens": 16, "chunk": 4}
    kept_at: dict[int, list[int]] = {}
    for answers in (0, 4):
        world = World(config(**sizes, caching=False, layerwise="layerkv", link_bytes_s=1e15), 4, twin=False)
        layers = world.machine.state.memory.layers
        assert isinstance(layers, LayerPlacer)
        world.arrive(request("whole", FAMILIES[0][:118], max_tokens=2))
        for _ in range(9):
            world.step()
        world.arrive(request("by layer", FAMILIES[1][:110], max_tokens=45))
        for _ in range(40):
            world.step()
        for number in range(answers):
            world.arrive(request(f"answer {number}", FAMILIES[2][:4], max_tokens=60))
        for _ in range(4):
            world.step()
        kv = next(iter(world.machine.state.groups["by layer"].sequences.values())).layered
        assert kv is not None
        kept_at[answers] = [len(kv.resident_layers), world.machine.pool.available()]
        world.drain()
        world.check_all_ended()
    assert kept_at[4][0] < kept_at[0][0] and kept_at[4][1] > 10, kept_at


def test_prompt_keeps_the_least_layers_that_hide_the_rest() -> None:
    """The published policy, while it is computed: with a slow link some layers, with a fast one none."""
    sizes = {"hbm": 56, "dram": 160, "context": CONTEXT, "running": 3, "step_tokens": 16, "chunk": 4}
    kept = []
    for link_bytes_s in (1e15, 150e3, 125e3):
        cfg = config(**sizes, caching=False, layerwise="layerkv", link_bytes_s=link_bytes_s)
        world = World(cfg, 4, twin=False, costs=PreemptionCosts(profile=CostModel()))
        world.arrive(request("whole", FAMILIES[0][:118], max_tokens=20))
        for _ in range(12):
            world.step()
        world.arrive(request("by layer", FAMILIES[1][:108], max_tokens=5))
        sequence = next(iter(world.machine.state.groups["by layer"].sequences.values()))
        while sequence.layered is None:
            world.step()
        kept.append(len(sequence.layered.resident_layers))
        world.drain()
        world.check_all_ended()
    assert kept == [0, 1, 2], "a prompt takes 24 ms; all of its layers take 0, 29 and 35 ms"


def test_sequence_beyond_link_rate_is_swapped_after_first_token() -> None:
    """Memory is full of an answer that takes long. A second prompt is computed beside it all the same, its client has
    the first token, and it goes on in whole blocks when the other has ended: prompts do not wait for memory."""
    sizes = {"hbm": 56, "dram": 160, "context": CONTEXT, "running": 3, "step_tokens": 16, "chunk": 4}
    world = World(config(**sizes, caching=False, layerwise="auto", link_bytes_s=3e9), 4, twin=False)
    state = world.machine.state
    layers = state.memory.layers
    assert isinstance(layers, LayerPlacer)
    world.arrive(request("long", FAMILIES[0][:118], max_tokens=40))
    for _ in range(10):
        world.step()
    world.arrive(request("second", FAMILIES[1][:110], max_tokens=20))
    world.arrive(request("third", FAMILIES[2][:100], max_tokens=20))
    while not state.parked or len(state.parked) < 2:
        world.step()
    assert {name for (name, _), tokens in world.got.items() if tokens} == {"long", "second", "third"}
    assert not world.final
    assert world.machine.stats().layers.parked == 2
    world.drain()
    world.check_all_ended()
    assert [world.facts.count(name) for name in ("begins_by_layer", "by_layer", "parked", "parked_ms")] == [2, 2, 2, 2]
    assert [name for name, _ in world.final] == ["long", "second", "third"]
    assert set(world.final.values()) == {FinishReason.LENGTH} and layers.resumed == 0


def test_swapped_sequence_resumes_by_layer_within_link_rate() -> None:
    """Steps become longer, so the link carries more beside them."""
    sizes = {"hbm": 56, "dram": 160, "context": CONTEXT, "running": 3, "step_tokens": 16, "chunk": 4}
    world = World(config(**sizes, caching=False, layerwise="auto", link_bytes_s=3e9), 4, twin=False)
    state = world.machine.state
    layers = state.memory.layers
    assert isinstance(layers, LayerPlacer)
    world.arrive(request("long", FAMILIES[0][:118], max_tokens=40))
    world.arrive(request("second", FAMILIES[1][:110], max_tokens=20))
    while not state.parked:
        world.step()
    world.device.device_ns = 1_000_000_000
    while state.parked:
        world.step()
    assert layers.resumed == 1 and not world.final
    world.drain()
    world.check_all_ended()


def test_parked_sequences_that_fit_together_go_on_together() -> None:
    """A little memory is kept for prompts to come, but not so that half of it lies idle."""
    sizes = {"hbm": 57, "dram": 160, "context": CONTEXT, "running": 3, "step_tokens": 16, "chunk": 4}
    world = World(config(**sizes, caching=False, layerwise="auto", link_bytes_s=3e9), 4, twin=False)
    state = world.machine.state
    world.arrive(request("long", FAMILIES[0][:118], max_tokens=40))
    for _ in range(10):
        world.step()
    world.arrive(request("second", FAMILIES[1][:110], max_tokens=20))
    world.arrive(request("third", FAMILIES[2][:100], max_tokens=20))
    together = 0
    while state.groups:
        world.step()
        together += state.groups.keys() == {"second", "third"} and len(state.decoding) == 2
    world.check_all_ended()
    assert together


def test_sequence_swapped_for_another_tenant_resumes_after_it() -> None:
    """One of two answers gives its slot up for the prompt of another tenant, which has room, whole; in
    DRAM there is none for both."""
    sizes = {"hbm": 80, "dram": 10, "context": CONTEXT, "running": 2, "step_tokens": 16, "chunk": 4}
    cfg = config(**sizes, caching=False, layerwise="auto", preemption="swap", depth=1)
    world = World(cfg, 4, twin=False)
    for name in ("first", "second"):
        world.arrive(request(name, FAMILIES[0][:20], max_tokens=60))
    for _ in range(12):
        world.step()
    world.arrive(request("other", FAMILIES[1][:20], max_tokens=3, tenant="other"))
    for _ in range(20):
        world.step()
    assert ("other", 0) in world.final and not {("first", 0), ("second", 0)} & world.final.keys()
    world.drain()
    world.check_all_ended()
