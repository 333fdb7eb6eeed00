"""KV that lies by layer: whatever lies where, the tokens are those of KV that lies whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from memserve.errors import InvariantError
from memserve.instance.events import PlaceByLayer, SpillBlocks
from memserve.model.attention.layered import LayeredAttention
from memserve.model.copier import Copy, PageCopier
from memserve.types import CopyBlocks, Tier
from tiny_models import FAMILIES, Driver, greedy_tokens, loaded, prompt, sequence, tiny_module

LAYERS = 3
BLOCK = 32


class Blocks:
    """Hands out HBM and DRAM blocks in random order."""

    def __init__(self, rng: random.Random, hbm: int, dram: int) -> None:
        self.hbm, self.dram = rng.sample(range(hbm), hbm), rng.sample(range(dram), dram)

    def frames(self, entries: int) -> list[int]:
        return [self.hbm.pop() for _ in range(-(-entries // LAYERS))]


class Placed:
    """One sequence of which all full blocks but the last lie by layer, however ``layers`` says."""

    def __init__(self, driver: Driver, blocks: Blocks, slot: int) -> None:
        self.driver, self.blocks, self.slot = driver, blocks, slot
        self.dram: list[int] = []
        self.whole: dict[int, int] = {}  # entry of the table -> block

    def order(self, kept: Sequence[int]) -> tuple[PlaceByLayer, list[CopyBlocks]]:
        """Where everything lies from now on, and what brings kept pages there: through a block that is not in use."""
        count = len(self.dram)
        frames = {layer: self.blocks.frames(count) for layer in kept}
        staging = self.blocks.frames(count), self.blocks.frames(count)
        return PlaceByLayer(self.slot, 0, list(self.dram), frames, staging), []

    def give_back(self, order: PlaceByLayer) -> None:
        for frames in [*order.kept.values(), *order.staging]:
            self.blocks.hbm[:0] = frames


def pages_of(order: PlaceByLayer, sources: Sequence[int]) -> list[tuple[int, int]]:
    """Page by page from whole blocks ``sources`` into the frames of the kept layers."""
    return [
        (source * LAYERS + layer, frames[entry // LAYERS] * LAYERS + entry % LAYERS)
        for layer, frames in order.kept.items()
        for entry, source in enumerate(sources)
    ]


def decoded(driver: Driver, rng: random.Random, lengths: Sequence[int], count: int, keep: Sequence[int] | None) -> list:
    """Greedy tokens of several prompts. Their full blocks lie by layer as soon as they are computed, with ``keep``
    kept; None: other layers in every step, for which everything comes from DRAM once more."""
    blocks = Blocks(rng, 200, 40)
    tokens = [prompt(length, seed) for seed, length in enumerate(lengths)]
    drawn: list[list[int]] = [[] for _ in lengths]
    state: list[tuple[list[int], list[int]]] = []
    for slot, some in enumerate(tokens):
        table = [blocks.hbm.pop() for _ in range(-(-(len(some) + count) // BLOCK))]
        full = (len(some) - 1) // BLOCK
        state.append((table, [blocks.dram.pop() for _ in range(full)]))
        driver.step([(slot, 0, len(some) - 1, ())], open=[sequence(slot, some, table)])
    spill = [SpillBlocks(table[: len(dram)], dram) for table, dram in state if dram]
    driver.step(spill=spill)
    former: list[PlaceByLayer] = []
    for step in range(count):
        place, moves = [], []
        if step == 0 or keep is None:
            for order in former:
                for frames in [*order.kept.values(), *order.staging]:
                    blocks.hbm[:0] = frames
            for slot, (table, dram) in enumerate(state):
                kept = sorted(rng.sample(range(LAYERS), rng.randrange(LAYERS + 1))) if keep is None else keep
                frames = {layer: blocks.frames(len(dram)) for layer in kept}
                order = PlaceByLayer(slot, 0, dram, frames, (blocks.frames(len(dram)), blocks.frames(len(dram))))
                if step == 0:  # the whole blocks are still there
                    moves.append(SpillBlocks([], [], pages_of(order, table[: len(dram)])))
                else:
                    scratch = [blocks.hbm.pop() for _ in dram]
                    driver.step(copies=[CopyBlocks(Tier.DRAM, Tier.HBM, dram, scratch)])
                    moves.append(SpillBlocks([], [], pages_of(order, scratch)))
                    blocks.hbm[:0] = scratch
                place.append(order)
            driver.step(spill=moves)
            if step == 0:  # nobody reads them any more: another sequence's, or garbage
                for table, dram in state:
                    arena = np.frombuffer(driver.device.shared_arenas[Tier.HBM], np.uint8).reshape(200, -1)
                    arena[table[: len(dram)]] = 255
            former = place
        rows = [(slot, len(tokens[slot]) - 1 + step, 1, (slot,)) for slot in range(len(state))]
        for slot, token in enumerate(driver.step(rows, place=place).tokens):
            drawn[slot].append(token)
    return drawn


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


def device(module: object, **options: object) -> Driver:
    return Driver(loaded(module), blocks=200, dram_blocks=40, shared=True, **options)


@pytest.mark.parametrize("keep", [[], [0], [1], [2], [0, 2], [0, 1, 2], None])
def test_tokens_do_not_depend_on_where_layers_lie(keep: list[int] | None, rng: random.Random) -> None:
    """Prompts of one block to seven, some of which lie whole; every set of kept layers, or another one in each step."""
    lengths = [200, 40, 131, 20, 65]
    expected = [greedy_tokens(tiny_module("llama"), prompt(length, seed), 6) for seed, length in enumerate(lengths)]
    assert decoded(device(tiny_module("llama")), rng, lengths, 6, keep) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_its_layers_from_anywhere(family: str, rng: random.Random) -> None:
    """Windows, caps and sinks are a layer's own: they must meet the right pages."""
    lengths = [150, 70]
    expected = [greedy_tokens(tiny_module(family), prompt(length, seed), 4) for seed, length in enumerate(lengths)]
    assert decoded(device(tiny_module(family)), rng, lengths, 4, None) == expected
