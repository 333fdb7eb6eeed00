"""Layers are reported while a step runs: in order, each once, and what is reported is written for good."""

from __future__ import annotations

import numpy as np
import pytest

from memserve.base.types import Tier
from memserve.model.arena import ArenaSizes, KvArenas
from memserve.model.capture.forward import capture_forward
from memserve.model.forward import EagerForward
from tiny_models import CONTEXT_TOKENS, Driver, loaded, prompt, sequence, tiny_module

BLOCKS = [9, 2, 30, 4, 11, 6, 7]


class Watcher:
    """Copies the pages of each layer as soon as it is reported."""

    def __init__(self, driver: Driver, page_bytes: int) -> None:
        self.reported: list[tuple[int, int]] = []
        self.pages: dict[int, np.ndarray] = {}
        arena = np.frombuffer(driver.device.shared_arenas[Tier.HBM], np.uint8)
        self._pages = arena.reshape(-1, arena.size // 64 // page_bytes, page_bytes)  # [block, layer, bytes]
        driver.device.on_layer = self.layer_finished

    def layer_finished(self, step_id: int, layer: int) -> None:
        self.reported.append((step_id, layer))
        self.pages[layer] = self.now(layer)

    def now(self, layer: int) -> np.ndarray:
        return self._pages[BLOCKS, layer].copy()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_reported_layer_is_written_and_stays_so(captured: bool) -> None:
    tokens = prompt(200, 1)
    assert len(tokens) < CONTEXT_TOKENS
    model = loaded(tiny_module("llama"))
    forward = capture_forward(model.module) if captured else EagerForward(model.module)
    assert forward is not None
    driver = Driver(model, forward=forward, shared=True)
    watcher = Watcher(driver, model.geometry.page_bytes)

    driver.step([(0, 0, 150, ())], open=[sequence(0, tokens, BLOCKS)], report_layers=True)
    driver.step([(0, 150, 49, ())])  # not asked for
    driver.step([(0, 199, 1, (0,))], report_layers=True)

    assert watcher.reported == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)]
    for layer in range(3):
        np.testing.assert_array_equal(watcher.pages[layer], watcher.now(layer))
        assert watcher.pages[layer].any()


def test_shared_and_private_memory_give_equal_tokens() -> None:
    tokens = prompt(70, 2)
    answers = []
    for shared in (False, True):
        driver = Driver(loaded(tiny_module("qwen3")), shared=shared)
        first = driver.step([(0, 0, 70, (0,))], open=[sequence(0, tokens, BLOCKS)]).tokens
        answers.append(first + driver.decode(0, 70, 6))
        assert set(driver.device.shared_arenas) == ({Tier.HBM, Tier.DRAM} if shared else set())
    assert answers[0] == answers[1]


def test_shared_arena_grows_onto_huge_pages_losslessly() -> None:
    """What is written before stays, and the memory is committed as far as it is used, not further."""
    arenas = KvArenas(ArenaSizes(block_bytes=1 << 20, hbm_blocks=96, dram_blocks=0), shared=True)
    arenas.hbm[40] = 7
    arenas.will_use([3, 2])
    arenas.prepare_pages(3)
    assert arenas._huge_bytes == 4 << 20
    arenas.will_use([])
    arenas.will_use([95, 2])
    while arenas._huge_bytes < 96 << 20:
        arenas.prepare_pages(1)
    assert (arenas.hbm[40] == 7).all() and not arenas.hbm[39].any() and not arenas.hbm[95].any()


class RecordingArena:
    """What a real one is asked to put on huge pages."""

    nbytes = 77 << 20

    def __init__(self) -> None:
        self.prepared: list[tuple[int, int]] = []

    def collapse(self, offset: int, size: int) -> None:
        self.prepared.append((offset, offset + size))


def test_no_plan_prepares_much_more_than_it_writes() -> None:
    """KV that comes from elsewhere uses much of the memory at once: rows of other requests do not wait for that."""
    arenas = KvArenas(ArenaSizes(block_bytes=1 << 20, hbm_blocks=0, dram_blocks=0))
    arenas._hbm_arena = arena = RecordingArena()
    arenas.will_use([70])
    plans = 0
    while arenas._huge_bytes < 71 << 20:
        arenas.prepare_pages(20 if plans == 3 else 1)
        plans += 1
    sizes = [(end - start) >> 20 for start, end in arena.prepared]
    assert sizes[:5] == [4, 4, 4, 20, 4] and max(sizes[4:]) <= 4
    assert len(sizes) == plans


def test_workers_prepare_every_piece_of_their_memory_once() -> None:
    arena = RecordingArena()
    for worker in range(3):
        arenas = KvArenas(ArenaSizes(block_bytes=1 << 20, hbm_blocks=0, dram_blocks=0), worker=(worker, 3))
        arenas._hbm_arena = arena
        for blocks in ([10], [76, 40], [3]):
            arenas.will_use(blocks)
            arenas.prepare_pages(40)
    ends = [0, *(end for _, end in sorted(arena.prepared))]
    assert [start for start, _ in sorted(arena.prepared)] == ends[:-1] and ends[-1] == 77 << 20
    assert len(arena.prepared) == 9
