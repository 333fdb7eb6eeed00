"""The time of steps by layer: beside a twin that moves every page by itself."""

from __future__ import annotations

from random import Random

import pytest

from memserve.base.types import KVGeometry, Tier
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.instance.events import MovePages, PlaceByLayer, StepPlan
from memserve_lab.sim.timed_link import TimedLink

LAYERS, BLOCK = 6, 4
GEOMETRY = KVGeometry(LAYERS, 1, 8, 8, "float32", BLOCK)
PAGE_NS = NS_PER_MS
RATE = GEOMETRY.page_bytes / PAGE_NS * NS_PER_S


def placed(slot: int, first: int, count: int, kept: list[int]) -> PlaceByLayer:
    return PlaceByLayer(slot, first, list(range(count)), {layer: [] for layer in kept}, ([], []))


def row(link: TimedLink, computed_ns: int, start: int, count: int, **more: object) -> int:
    return link.step_ns(StepPlan(1, slots=[0], starts=[start], counts=[count], sample_slots=[()], **more), computed_ns)


def test_without_kv_by_layer_a_step_takes_its_computing() -> None:
    link = TimedLink(GEOMETRY, RATE)
    assert row(link, 7 * NS_PER_MS, 8, 1) == 7 * NS_PER_MS
    assert link.counters.busy_ns == link.counters.waited_ns == 0


def test_layers_come_one_ahead_and_only_the_first_is_waited_for() -> None:
    """Two pages a layer in 2 ms each; a layer is computed in 3 ms: the step waits 2 ms for layer 0."""
    link = TimedLink(GEOMETRY, RATE)
    assert row(link, 18 * NS_PER_MS, 8, 1, place=[placed(0, 0, 2, [])]) == 20 * NS_PER_MS
    assert link.counters.up_bytes == 12 * GEOMETRY.page_bytes and link.counters.waited_ns == 2 * NS_PER_MS
    assert row(link, 18 * NS_PER_MS, 9, 1, place=[placed(0, 0, 2, [0])]) == 18 * NS_PER_MS, "layer 0 is kept"
    assert link.counters.read_pages == [2, 4, 4, 4, 4, 4]


def test_a_slow_link_decides() -> None:
    """12 pages in 12 ms, and the last layer's computing."""
    assert row(TimedLink(GEOMETRY, RATE), 6, 8, 1, place=[placed(0, 0, 2, [])]) == pytest.approx(
        12 * NS_PER_MS, rel=1e-6
    )


def test_offload_overlaps_compute_except_the_last_layer() -> None:
    """Three pages a layer in 3 ms, beside 5 ms of computing; nothing is read back."""
    link = TimedLink(GEOMETRY, RATE)
    assert row(link, 30 * NS_PER_MS, 0, 12, place=[placed(0, 0, 3, [])]) == 33 * NS_PER_MS
    assert (link.counters.up_bytes, link.counters.down_bytes) == (0, 18 * GEOMETRY.page_bytes)


def test_block_moves_use_the_rest_of_the_link() -> None:
    link = TimedLink(GEOMETRY, RATE)
    moves = [MovePages(Tier.DRAM, Tier.HBM, list(range(12)), list(range(12)))]
    assert row(link, 5 * NS_PER_MS, 8, 1, moves=moves) == 12 * NS_PER_MS
    assert row(link, 18 * NS_PER_MS, 8, 1, place=[placed(0, 0, 2, [])], moves=moves) == 24 * NS_PER_MS
    assert row(link, NS_PER_MS, 9, 1, close=[0]) == NS_PER_MS
    kept = [MovePages(Tier.HBM, Tier.HBM, [1], [2])]
    assert row(link, NS_PER_MS, 9, 1, moves=kept) == NS_PER_MS, "that is no work for the link"


def twin_ns(up: list[int], down: int, layer_ns: int) -> int:
    """Page by page, in ticks of a nanosecond's multiple: what the module's picture says."""
    now, up_free, down_free = 0, 0, 0
    come, left = dict.fromkeys(range(LAYERS), 0), dict.fromkeys(range(LAYERS), 0)
    computed: dict[int, int] = {-2: 0, -1: 0}
    for layer in range(LAYERS):
        begins = computed[layer - 2]
        for _ in range(up[layer]):
            up_free = max(up_free, begins) + PAGE_NS
        come[layer] = up_free if up[layer] else 0
        buffer_free = left[layer - 2] if layer >= 2 else 0
        now = computed[layer] = max(now, come[layer], buffer_free) + layer_ns
        for _ in range(down):
            down_free = max(down_free, now) + PAGE_NS
        left[layer] = down_free if down else 0
    return max(now, down_free)


def test_any_step_takes_as_long_as_its_twin() -> None:
    random = Random(5)
    for _ in range(300):
        link, slots, orders, up, down = TimedLink(GEOMETRY, RATE), [], [], [0] * LAYERS, 0
        starts, counts = [], []
        for slot in range(random.randrange(1, 4)):
            count, kept = random.randrange(1, 6), random.sample(range(LAYERS), random.randrange(LAYERS + 1))
            prefills = random.random() < 0.3
            starts.append(0 if prefills else count * BLOCK)
            counts.append(count * BLOCK if prefills else 1)
            slots.append(slot)
            orders.append(placed(slot, 0, count, kept))
            down += count if prefills else 0
            up = [pages + (0 if prefills or layer in kept else count) for layer, pages in enumerate(up)]
        layer_ns = random.randrange(1, 6) * NS_PER_MS
        plan = StepPlan(1, place=orders, slots=slots, starts=starts, counts=counts, sample_slots=[()] * len(slots))
        assert link.step_ns(plan, layer_ns * LAYERS) == pytest.approx(twin_ns(up, down, layer_ns), rel=1e-9)
